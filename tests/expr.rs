//! The expression language: typed views, values, ranges, simplification, derivatives, kernel text, executed.

mod closures;
mod derivative;
mod differences;
mod executed;
mod invalid;
mod lower;
pub(crate) mod ops;
mod random;
mod text;
mod values;
