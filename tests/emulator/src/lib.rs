//! Runs Metal kernels on a CPU, and says what is wrong with them.
//!
//! The text of a kernel is compiled by clang against `include/metal_stdlib` and executed thread by
//! thread: 32-lane simdgroups, 8x8 matrices in Apple's lane layout, threadgroup memory, barriers. Every
//! access is checked (bounds, races, uninitialised threadgroup memory, alignment), every barrier and
//! simdgroup operation has to be reached by all of its threads, and the work is counted.
//!
//! What it cannot tell: how fast a kernel is on Apple hardware, what Apple's compiler makes of it, how
//! many registers it takes, and anything about memory weaker than the barriers that it names.
//!
//! ```
//! use flexattn_emulator::{Bound, Kernel, Memory, Options, clang};
//! # fn main() -> flexattn::Result<()> {
//! # if clang().is_err() { return Ok(()); }
//! let kernel = Kernel::compile(
//!     "#include <metal_stdlib>
//!      kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= 2.0; }",
//! )?;
//! let x = Memory::from_bytes(&[1.0f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat());
//! let outcome = kernel.launch("twice", &[Bound::whole(0, &x)], [2, 1, 1], [2, 1, 1], &Options::default())?;
//! assert!(outcome.reports.is_empty());
//! assert_eq!(x.read(4, 4), 4.0f32.to_le_bytes());
//! // One threadgroup more is two threads too many.
//! let outcome = kernel.launch("twice", &[Bound::whole(0, &x)], [3, 1, 1], [2, 1, 1], &Options::default())?;
//! assert!(outcome.reports[0].to_string().starts_with("device read out of bounds at line 2"));
//! # Ok(())
//! # }
//! ```

mod compile;
mod emulator;
mod instrument;
mod launch;
mod lint;
mod measure;
mod signature;
mod wgsl;

pub use compile::{Kernel, Math, clang};
pub use emulator::{Emulator, Mutation, Record};
pub use launch::{Bound, Counters, Memory, MmaOrder, Options, Outcome, Problem, Report, Schedule};
pub use lint::{Violation, lint};
pub use measure::{Case, Kernels, Measurement, cycles};
