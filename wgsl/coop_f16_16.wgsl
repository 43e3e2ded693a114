// Cooperative matrices of 16 x 16, f16 with sums in f32, for devices that offer no smaller ones.

enable f16;
enable wgpu_cooperative_matrix;

const EDGE: u32 = 16u;                    // rows and columns of a matrix
alias Operand = f16;                      // an element of q, k, v and P
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sum = coop_mat16x16<f32, C>;
