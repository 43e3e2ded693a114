//! FlexAttention for every GPU that WebGPU reaches, with hand-written Metal kernels on Apple
//! Silicon: a mask and a score modification, written once, fused into one attention kernel that
//! skips the blocks nobody attends to.
//!
//! # Layers
//!
//! Arrows point down only.
//!
//! ```text
//! attention                        the public operation: forward, backward, decode
//! plan                             a call -> passes, kernels, buffers, grids; pure data
//! kernels | block_mask | lower     kernel table | sparsity | expression -> text
//! expr, masks, scores, shape, error
//! runtime  <- gpu (wgpu)  <- cpu  <- the page's GPUDevice, the MSL emulator
//! ```

mod error;
pub mod expr;
pub mod kernels;
mod runtime;
mod shape;

pub use error::{Error, ParseError, Result};
pub use expr::{Capture, MaskMod, Scalar, ScoreMod};
pub use runtime::{Binding, Dispatch, Limits, Profile, Runtime, Tier, Usage};
pub use shape::{AttentionShape, BLOCK, DType, Element, Layout, same_dtype};
