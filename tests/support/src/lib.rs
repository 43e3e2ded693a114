//! What flexattn's tests and examples share: golden data, error budgets, problem generators.
//!
//! - [`golden`] reads the golden files in `tests/goldens` (and any other file of that form),
//! - [`budget`] says how far an output may be from its golden value,
//! - [`conformance`] runs a golden case on a runtime and compares every output,
//! - [`problem`] makes up inputs that f32, f16 and bf16 all hold exactly.
//!
//! Nothing here knows a kernel or a GPU: a case is tensors, two mods and a list of expected outputs.

pub mod budget;
pub mod conformance;
pub mod golden;
pub mod problem;

pub use budget::{Budget, Comparison};
pub use golden::{Array, Golden, GoldenError};

/// How an example ends: with what went wrong as lines on stderr, where `main` would show a text as Rust writes it.
pub fn ended(run: Result<(), Box<dyn std::error::Error>>) -> std::process::ExitCode {
    match run {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            std::process::ExitCode::FAILURE
        }
    }
}
