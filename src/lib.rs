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

pub mod attention;
pub mod block_mask;
pub mod cpu;
mod error;
pub mod expr;
#[cfg(feature = "wgpu")]
pub mod gpu;
pub mod kernels;
pub mod lower;
pub mod masks;
pub mod plan;
mod prebuilt;
pub mod reference;
mod runtime;
pub mod scores;
mod shape;
mod tensor;
mod threads;

#[cfg(feature = "wgpu")]
pub use attention::Recorded;
pub use attention::{Attention, Gradients, Output, PerBatch, Saved, sdpa};
pub use block_mask::{BlockMask, BlockShape, Class, CompiledMask, KvBlocks, Lists, Picture, Tables, TileMap};
pub use cpu::Cpu;
pub use error::{Error, ParseError, Result};
pub use expr::{Capture, MaskMod, Scalar, ScoreMod};
#[cfg(feature = "wgpu")]
pub use gpu::Gpu;
pub use plan::Wanted;
pub use prebuilt::{Param, Params, Prebuilt};
pub use runtime::{Binding, Dispatch, Limits, Profile, Resident, Runtime, Tier, Usage};
pub use shape::{AttentionShape, BLOCK, DType, Element, Layout, same_dtype};
pub use tensor::{DefaultRuntime, Tensor};

/// The wgpu that this crate is built on, of which [`Gpu::from_wgpu`] takes a device.
#[cfg(feature = "wgpu")]
pub use wgpu;
