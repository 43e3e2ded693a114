//! The kernel table. (The types that a launch names; the table itself replaces this file.)

use crate::shape::DType;

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// softmax(score_mod(Q K^T)) V over the lists of blocks.
    Forward,
}

/// One row of the table with the expressions that fill its slots.
#[derive(Clone, Debug)]
pub struct KernelSpec {
    /// Which kernel.
    pub kernel: Kernel,
    /// Element type of q, k, v, out.
    pub dtype: DType,
    /// E.
    pub head_dim: u32,
    /// Ev.
    pub v_dim: u32,
}
