//! The expression language: typed views, values, ranges, simplification, derivatives, WGSL text.

mod derivative;
#[cfg(feature = "wgpu")]
mod gpu;
mod invalid;
mod lower;
mod random;
mod text;
mod values;
