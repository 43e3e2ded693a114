//! The expression language: typed views, values, ranges, simplification, derivatives, WGSL text.

mod derivative;
mod gpu;
mod random;
mod text;
mod values;
