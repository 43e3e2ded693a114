//! `cargo xtask`: builds, tests and installs what the project needs, the same on a laptop and in CI.
//!
//! ```text
//! cargo xtask test [--install] [--full] [SUITE..]   every suite, or the named ones
//! cargo xtask test --list                           the suites and what each needs
//! cargo xtask emulate [--kernel K] [--loader L] ..  what a Metal kernel does, counted in the emulator
//! cargo xtask web [--install] [--package]           the npm package and the demo page
//! cargo xtask serve [--install] [--port N]          the demo page in a browser
//! ```

mod drivers;
mod emulate;
mod machine;
mod process;
mod report;
mod test;
mod web;

use lexopt::prelude::*;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test [--install] [--full] [SUITE..]   run every suite, or the named ones
      --install    bring what is missing (apt packages on Debian and Ubuntu, unpacked drivers, npm packages)
      --full       everything: every dtype on every tier, long property tests, mutants
      --list       name the suites and what each of them needs
  emulate [--kernel K] [--json] ..      run a Metal kernel in the emulator and print what it did (--help)
  web [--install] [--package]           build the npm package (web/dist) and the demo page (web/demo/dist)
      --install    bring what is missing, as above
      --package    only the package
  serve [--install] [--port N]          show the demo page on localhost, brought up to date first
";

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// `Ok(false)` is a command that ran and found something wrong.
fn run() -> Result<bool, Box<dyn std::error::Error>> {
    std::env::set_current_dir(root())?;
    let mut arguments = lexopt::Parser::from_env();
    match arguments.next()? {
        Some(Value(command)) => match command.to_str() {
            Some("emulate") => emulate::main(arguments),
            Some("test") => test::main(arguments),
            Some("web") => web::main(arguments),
            Some("serve") => web::serve(arguments),
            _ => Err(format!("there is no command {command:?}\n{USAGE}").into()),
        },
        Some(Long("help") | Short('h')) | None => {
            print!("{USAGE}");
            Ok(true)
        }
        Some(other) => Err(other.unexpected().into()),
    }
}

/// The repository's root: the folder above this package.
fn root() -> std::path::PathBuf {
    let package = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_owned()
}

/// Cargo's target folder, as an absolute path: programs that run elsewhere are told of files in it.
fn target_folder() -> std::path::PathBuf {
    let folder = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
    std::path::absolute(&folder).unwrap_or(folder)
}
