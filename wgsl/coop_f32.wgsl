// Cooperative matrices of 8 x 8, all f32: what Metal has beside those of f16.

enable wgpu_cooperative_matrix;

const EDGE: u32 = 8u;                     // rows and columns of a matrix
alias Operand = f32;                      // an element of q, k, v and P
alias Left = coop_mat8x8<f32, A>;
alias Right = coop_mat8x8<f32, B>;
alias Sum = coop_mat8x8<f32, C>;
