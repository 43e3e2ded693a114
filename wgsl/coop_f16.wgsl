// Cooperative matrices of 8 x 8, f16 with sums in f32: what Apple's GPUs have, from M1 on.

enable f16;
enable wgpu_cooperative_matrix;

const EDGE: u32 = 8u;                     // rows and columns of a matrix
alias Operand = f16;                      // an element of q, k, v and P
alias Left = coop_mat8x8<f16, A>;
alias Right = coop_mat8x8<f16, B>;
alias Sum = coop_mat8x8<f32, C>;
