//! FlexAttention for every GPU that WebGPU reaches, with hand-written Metal kernels on Apple
//! Silicon: a mask and a score modification, written once, fused into one attention kernel that
//! skips the blocks nobody attends to.
//!
//! ```
//! use flexattn::{Attention, Gpu, MaskMod, masks, scores};
//!
//! # fn main() -> flexattn::Result<()> {
//! let gpu = Gpu::new()?; // the best tier here; without a GPU, all cores of the CPU
//! let (q_heads, kv_heads, tokens, head_dim) = (4, 2, 6, 8);
//! let q = gpu.tensor(&vec![0.5f32; q_heads * tokens * head_dim], [1, q_heads, tokens, head_dim])?;
//! let k = gpu.tensor(&vec![0.5f32; kv_heads * tokens * head_dim], [1, kv_heads, tokens, head_dim])?;
//! let v = gpu.tensor(&vec![2.0f32; kv_heads * tokens * head_dim], [1, kv_heads, tokens, head_dim])?;
//!
//! let window = MaskMod::new(|i| (i.q() - i.kv()).lt(4));
//! let attention = Attention::new().mask_mod(masks::causal() & window).score_mod(scores::alibi(q_heads));
//! let output = attention.forward(&gpu, &q, &k, &v)?;
//! assert!(output.out.read()?.iter().all(|x| (x - 2.0).abs() < 1e-5));
//! # Ok(())
//! # }
//! ```
//!
//! # What attention means here
//!
//! - q `[B, Hq, L, E]`, k `[Bkv, Hkv, S, E]`, v `[Bkv, Hkv, S, Ev]`, out `[B, Hq, L, Ev]`, in f32, f16 or
//!   bf16, with any strides whose last is 1 ([`Layout`]). Hkv divides Hq and query head h reads kv head
//!   `h / (Hq / Hkv)`. Bkv is B, or 1 when all batch entries share k and v.
//! - score = `dot(q, k) * scale`, in f32, scale 1 / sqrt(E) unless given. Then the [`ScoreMod`], in natural units.
//!   Then the [`MaskMod`]: a pair that it drops is excluded, whatever its score was, NaN included. A
//!   kept score of -inf counts as dropped. v, and for gradients q, k and dout, should be finite there all
//!   the same: a tile that keeps other pairs multiplies them by a weight of 0, and 0 * inf is NaN. Keys
//!   past kv_len count for nothing, whatever they hold.
//! - Masks and score mods are functions of batch entry, QUERY head, query position (row + q_offset) and
//!   key position, all i32; the language is in [`expr`]. They read captured tensors ([`Capture`]) and
//!   scalars ([`Scalar`]) by name.
//! - A row that keeps nothing gives zeros, lse -inf, max -inf and zero gradients, never NaN. A NaN score
//!   that is kept makes its row NaN where the GPU allows it.
//! - lse is the natural logarithm of the sum of exponentials of a row's kept scores; max the largest of
//!   them. Both are f32, as all sums and softmax state are.
//! - Changing lengths, strides, scale, q_offset, kv_len, captured values or scalars compiles nothing,
//!   but for the decoding kernels once a call has few queries and many keys.
//!
//! # Tiers
//!
//! [`Gpu`] takes the best of [`Tier`] that works and says why not a better one ([`gpu::Report`]). Bad input
//! gives an [`Error`] with the value found, the rule and the remedy; it never panics.
//!
//! What it does not do: dropout, quantised k and v, attention weights of all rows.
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

pub use attention::{Attention, Gradients, Output, PerBatch, Saved, sdpa};
#[cfg(feature = "wgpu")]
pub use attention::{Recorded, RecordedBackward};
pub use block_mask::{BlockMask, BlockShape, Class, CompiledMask, KvBlocks, Lists, Picture, Tables, TileMap};
pub use cpu::Cpu;
pub use error::{Error, ParseError, Result};
pub use expr::{Capture, MaskMod, Scalar, ScoreMod};
#[cfg(feature = "wgpu")]
pub use gpu::Gpu;
pub use plan::Wanted;
pub use prebuilt::{Param, Params, Prebuilt};
pub use runtime::{Binding, Dispatch, Limits, Matrices, Profile, Resident, Runtime, Tier, Usage};
pub use shape::{AttentionShape, BLOCK, DType, Element, Layout, same_dtype};
pub use tensor::{DefaultRuntime, Tensor};

/// The Rust examples of the README, which run as the other examples do.
#[cfg(all(doctest, feature = "wgpu"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// The wgpu that this crate is built on, of which [`Gpu::from_wgpu`] takes a device.
#[cfg(feature = "wgpu")]
pub use wgpu;
