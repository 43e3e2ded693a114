//! The expression language: typed views, values, ranges, simplification, derivatives, WGSL text.

mod derivative;
mod differences;
#[cfg(feature = "wgpu")]
mod gpu;
mod invalid;
mod lower;
pub(crate) mod ops;
mod random;
mod text;
mod values;
