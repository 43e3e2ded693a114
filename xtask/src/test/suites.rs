//! The suites, in the order in which they run: cheap ones first, so that a slip is seen early.

use crate::drivers::Driver;
use crate::machine::{self, Need, cargo_for};
use crate::process::{Ended, Program};
use crate::report::{Counts, Outcome};

/// One suite.
pub(super) struct Suite {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) needs: &'static [Need],
    /// Not part of a plain run: named, or with `--full`. Such a suite is printed as skipped.
    pub(super) apart: bool,
    /// Takes whether everything is wanted (`--full`).
    pub(super) run: fn(bool) -> Outcome,
}

use Need::*;

pub(super) const SUITES: &[Suite] = &[
    Suite {
        name: "fmt",
        what: "formatting",
        needs: &[],
        apart: false,
        run: |_| all([Program::words("cargo fmt --all --check")]),
    },
    Suite { name: "typos", what: "spelling", needs: &[Typos], apart: false, run: |_| typos() },
    Suite {
        name: "clippy",
        what: "lints, warnings denied, every target of every package",
        needs: &[],
        apart: false,
        run: |_| clippy(),
    },
    Suite {
        name: "docs",
        what: "public documentation: every item, every link",
        needs: &[],
        apart: false,
        run: |_| docs(),
    },
    Suite {
        name: "test",
        what: "unit and integration tests",
        needs: &[Vulkan, Clang],
        apart: false,
        run: tests,
    },
    Suite {
        name: "doctest",
        what: "examples in the documentation",
        needs: &[],
        apart: false,
        run: |_| doctests(),
    },
    Suite {
        name: "quickstart",
        what: "the first example and the training example, with a GPU and without; the kernel text of the README",
        needs: &[Vulkan],
        apart: false,
        run: |_| quickstart(),
    },
    Suite {
        name: "conformance",
        what: "every golden case on every tier of this machine",
        needs: &[Vulkan, Clang],
        apart: true,
        run: conformance,
    },
    Suite {
        name: "coopmatrix",
        what: "golden cases on cooperative matrices (Mesa 26)",
        needs: &[Mesa26],
        apart: false,
        run: coopmatrix,
    },
    Suite {
        name: "bench",
        what: "the speeds and sizes that are aimed at on lavapipe; on a quiet machine",
        needs: &[Mesa26],
        apart: true,
        run: |_| bench(),
    },
    Suite {
        name: "tint",
        what: "every WGSL kernel through the browsers' compiler",
        needs: &[Node, Dawn],
        apart: false,
        run: |_| tint(),
    },
    Suite {
        name: "darwin",
        what: "types of the Metal host code",
        needs: &[DarwinStd],
        apart: false,
        run: |_| darwin(),
    },
    Suite {
        name: "metal-compiler",
        what: "every MSL kernel and snapshot through Apple's compiler",
        needs: &[MetalCompiler],
        apart: false,
        run: |_| metal_compiler(),
    },
    Suite {
        name: "wasm",
        what: "types of the crate on wasm32, with its wgpu runtime",
        needs: &[WasmStd],
        apart: false,
        run: |_| wasm(),
    },
    Suite {
        name: "clippy-web",
        what: "lints of the page's half of the npm package, which is there on wasm32 only",
        needs: &[WasmStd, WasmClippy],
        apart: false,
        run: |_| clippy_web(),
    },
    Suite {
        name: "web",
        what: "the npm package in node and in a page",
        needs: &[WasmStd, Node, Chromium, WebPackages, Mesa25],
        apart: false,
        run: web,
    },
];

/// Runs all of them; the first that fails is named.
fn all(programs: impl IntoIterator<Item = Program>) -> Outcome {
    let mut counts = Counts::default();
    let mut failure = None;
    for program in programs {
        let name = program.to_string();
        let Ended { ok, counts: more, .. } = program.run();
        counts += more;
        if !ok && failure.is_none() {
            failure = Some(name);
        }
    }
    match failure {
        None => Outcome::Passed(counts),
        Some(name) => Outcome::Failed(counts, name),
    }
}

fn typos() -> Outcome {
    match machine::typos() {
        Some(program) => all([Program::new(program).args(["--config", "typos.toml"])]),
        None => Outcome::Skipped(Typos.what().to_owned()),
    }
}

fn clippy() -> Outcome {
    let clippy = |words: &str| {
        Program::words("cargo clippy --release").args(words.split(' ')).args(["--", "-D", "warnings"])
    };
    all([clippy("--workspace --all-targets"), clippy("--package flexattn --lib --no-default-features")])
}

fn docs() -> Outcome {
    all([Program::words("cargo doc --release --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings")])
}

fn tests(full: bool) -> Outcome {
    if cfg!(target_os = "macos") {
        // The test runner keeps to itself what tests that pass print.
        println!(
            "skipped: every test of the Metal emulator, which needs Linux; the GPU runs the kernels here"
        );
    }
    let tests = Program::words("cargo test --release --workspace --all-targets --no-fail-fast");
    all([everything(tests, full)])
}

fn doctests() -> Outcome {
    all([Program::words("cargo test --release --workspace --doc --no-fail-fast")])
}

fn example(name: &str) -> Program {
    Program::words("cargo run --release --quiet --example").args([name, "--"])
}

fn quickstart() -> Outcome {
    let no_driver = "/nonexistent/no_driver.json";
    let without_gpu =
        |name| example(name).env("VK_DRIVER_FILES", no_driver).env("VK_ICD_FILENAMES", no_driver);
    // What the model's layer is known to look at, whatever the tier; and what would bring a GPU.
    let trophy = "trophy     0.61";
    let no_gpu: &[&str] = if cfg!(target_os = "linux") {
        &["Running on cpu", "mesa-vulkan-drivers", trophy]
    } else {
        &[trophy]
    };
    let said = says(example("quickstart"), &[trophy])
        .and_then(|()| says(without_gpu("quickstart"), no_gpu))
        .and_then(|()| readme_emits());
    match (all([example("train"), without_gpu("train")]), said) {
        (Outcome::Passed(counts) | Outcome::Failed(counts, _), Err(problem)) => {
            Outcome::Failed(counts, problem)
        }
        (ran, _) => ran,
    }
}

/// Runs a program, which has to print each of `texts` and end well.
fn says(program: Program, texts: &[&str]) -> Result<(), String> {
    let name = program.to_string();
    let ended = program.run();
    if !ended.ok {
        return Err(name);
    }
    match texts.iter().find(|text| !ended.lines.iter().any(|line| line.contains(**text))) {
        Some(text) => Err(format!("{name} does not print `{text}`")),
        None => Ok(()),
    }
}

/// Runs each line of the README that calls the example `emit`, without showing the kernels.
fn readme_emits() -> Result<(), String> {
    let readme = std::fs::read_to_string("README.md").map_err(|error| format!("README.md: {error}"))?;
    let start = "cargo run --release --example emit ";
    let lines: Vec<&str> = readme.split('`').filter(|text| text.starts_with(start)).collect();
    if lines.is_empty() {
        return Err("the README has no line of the example emit".to_owned());
    }
    for line in lines {
        println!("$ {line} > /dev/null");
        let ended = Program::words(line).run_quietly();
        if !ended.ok {
            return Err(format!("{line}: {}", ended.lines.last().map_or("", String::as_str)));
        }
    }
    Ok(())
}

/// Tiers that are here, and the Metal kernels in the emulator; on a Mac they are one of the tiers.
fn conformance(full: bool) -> Outcome {
    let emulate = (!cfg!(target_os = "macos")).then_some("--emulate");
    all([everything(example("conformance").arg("tests/goldens").args(emulate), full)])
}

/// An example, built, to run with some arguments on Mesa 26's lavapipe.
fn on_mesa26(name: &str) -> Result<impl Fn(&str) -> Program, Outcome> {
    let build = Program::words("cargo build --release --quiet --example").arg(name).run();
    if !build.ok {
        return Err(Outcome::Failed(Counts::default(), "the example does not build".to_owned()));
    }
    let program = crate::target_folder().join("release/examples").join(name);
    Ok(move |arguments: &str| Program::new(Driver::Mesa26.runner()).arg(&program).args(arguments.split(' ')))
}

/// Golden cases with their gradients, and results that are the same every time, on the unpacked driver. Most of the time is the
/// driver's compilation of each case, so a plain run takes one case of three.
fn coopmatrix(full: bool) -> Outcome {
    let conformance = match on_mesa26("conformance") {
        Ok(program) => program,
        Err(failed) => return failed,
    };
    let every = if full { "1" } else { "3" };
    let arguments = format!("tests/goldens --tier coop-matrix --dtype f16 --every {every}");
    let runner = format!("target.'cfg(all())'.runner = '{}'", Driver::Mesa26.runner().display());
    all([
        conformance(&arguments),
        Program::words("cargo test --release --test main --config")
            .arg(runner)
            .arg("the_same_bits_every_time"),
    ])
}

fn bench() -> Outcome {
    let bench = match on_mesa26("bench") {
        Ok(program) => program,
        Err(failed) => return failed,
    };
    let suite = |words: &str| bench(&format!("--strict --suite {words}"));
    let on_tiers = ["dense", "sparse", "decode", "mods", "backward", "compile"]
        .map(|name| ["subgroup", "portable"].map(|tier| suite(&format!("{name} --tier {tier}"))));
    all(on_tiers.into_iter().flatten().chain([suite("blockmask")]))
}

fn tint() -> Outcome {
    let folder = crate::target_folder().join("tint");
    let emitted = example("emit").args(["--all", "--language", "wgsl-web", "--out"]).arg(&folder).run();
    if !emitted.ok {
        return Outcome::Failed(Counts::default(), "emit".to_owned());
    }
    let accept = || Program::words("node tests/tint/accept.mjs").arg(&folder);
    if !Driver::Mesa25.is_here() {
        return all([accept()]);
    }
    all([
        accept(),
        Program::new(Driver::Mesa25.runner())
            .args(["node", "tests/tint/accept.mjs", "--pipelines"])
            .arg(&folder),
    ])
}

fn darwin() -> Outcome {
    all([cargo_for("aarch64-apple-darwin", "check").args(["--package", "flexattn", "--lib"])])
}

fn metal_compiler() -> Outcome {
    let folder = crate::target_folder().join("msl");
    let emitted = example("emit").args(["--all", "--language", "msl", "--out"]).arg(&folder).run();
    if !emitted.ok {
        return Outcome::Failed(Counts::default(), "emit".to_owned());
    }
    let folders = [folder, "tests/snapshots/msl".into()];
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "metal"))
        .collect();
    files.sort();
    let compile =
        |file| Program::words("xcrun -sdk macosx metal -Wall -c").arg(file).args(["-o", "/dev/null"]);
    let mut counts = Counts::default();
    for file in files {
        match compile(file).run().ok {
            true => counts.passed += 1,
            false => counts.failed += 1,
        }
    }
    match counts {
        Counts { passed: 0, failed: 0, .. } => Outcome::Failed(counts, "there are no kernels".to_owned()),
        Counts { failed: 0, .. } => Outcome::Passed(counts),
        Counts { failed, .. } => Outcome::Failed(counts, format!("{failed} files do not compile")),
    }
}

fn wasm() -> Outcome {
    all([cargo_for("wasm32-unknown-unknown", "check").args(["--package", "flexattn", "--lib"])])
}

fn clippy_web() -> Outcome {
    let clippy = cargo_for("wasm32-unknown-unknown", "clippy");
    all([clippy.args(["--package", "flexattn-web", "--", "-D", "warnings"])])
}

fn web(full: bool) -> Outcome {
    // The tests are of what is built: without it there is nothing to say.
    let built = all([Program::words("cargo xtask web")]);
    if matches!(built, Outcome::Failed(..)) {
        return built;
    }
    let tests = Program::words("npm test")
        .folder("web")
        .env("FLEXATTN_DAWN_RUNNER", Driver::Mesa25.runner())
        .env("FLEXATTN_MODULE_CEILING", crate::web::module_ceiling().to_string());
    all([everything(tests, full)])
}

/// Suites that can do more read this variable.
fn everything(program: Program, full: bool) -> Program {
    if full { program.env("FLEXATTN_FULL", "1") } else { program }
}
