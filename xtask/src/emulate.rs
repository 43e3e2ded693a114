//! `cargo xtask emulate`: what a Metal kernel does, counted while the emulator runs it.
//!
//! A program of the emulator's package does the work, so that this one stays quick to build.

use std::process::Command;

/// Passes the arguments on.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<bool, Box<dyn std::error::Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["run", "--release", "--quiet", "--package", "flexattn-emulator", "--bin", "emulate", "--"])
        .args(arguments.raw_args()?)
        .status()?;
    Ok(status.success())
}
