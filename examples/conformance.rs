//! Runs golden files on every tier of this machine.
//!
//! ```text
//! cargo run --release --example conformance -- DIR [--tier TIER] [--dtype TYPE] [--forward] [--every N] \
//!     [--emulate] [--json]
//! ```
//!
//! Every `*.safetensors` file in DIR, on every tier available here, in f32, f16 and bf16: forward, and the gradients
//! that the file stores. One line per case and tier, then how many of these passed and failed. What a tier cannot do
//! is `skipped`, which is neither. Fails when a case does. --forward leaves the gradients out, which run the same
//! kernels on every WGSL tier; --every N takes one file of N.
//!
//! --emulate adds the Metal kernels, executed on the CPU by the emulator of tests/emulator with both loaders: it
//! needs clang, and takes more than an hour for tests/goldens. --tier metal does so too where there is no Apple GPU.
//!
//! With --json a line per output, and the count on stderr: case, tier, dtype, output, pass (null where skipped, with
//! the reason as `skipped`), mean_err, max_err, budget.

use std::any::Any;
use std::path::PathBuf;
use std::process::ExitCode;

use flexattn::kernels::Loader;
use flexattn::{DType, Gpu, Runtime, Tier};
use flexattn_emulator::Emulator;
use flexattn_testing::Golden;
use flexattn_testing::conformance::{self, Finding, Verdict};
use serde_json::json;

const USAGE: &str = "\
usage: conformance DIR [--tier metal|coop-matrix|subgroup|portable|cpu] [--dtype f32|f16|bf16]
                   [--forward] [--every N] [--emulate] [--json]
  --forward   no gradients
  --every N   one case of N
  --emulate   the Metal kernels too, in an emulator on the CPU (needs clang; more than an hour for tests/goldens);
              --tier metal does so too where there is no Apple GPU";

struct Options {
    dir: PathBuf,
    tier: Option<Tier>,
    dtype: Option<DType>,
    forward: bool,
    every: usize,
    emulate: bool,
    json: bool,
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("{problem}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Nothing when help was asked for.
fn options() -> Result<Option<Options>, String> {
    use lexopt::prelude::*;
    let (mut dir, mut tier, mut dtype, mut every) = (None, None, None, 1);
    let (mut forward, mut emulate, mut json) = (false, false, false);
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next().map_err(|e| e.to_string())? {
        match arg {
            Value(path) if dir.is_none() => dir = Some(PathBuf::from(path)),
            Long("tier") => {
                let name = args.value().and_then(|v| v.parse::<String>()).map_err(|e| e.to_string())?;
                tier = Some(Tier::from_name(&name).map_err(|e| e.to_string())?);
            }
            Long("dtype") => {
                let name = args.value().and_then(|v| v.parse::<String>()).map_err(|e| e.to_string())?;
                let found = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
                dtype = Some(found.ok_or_else(|| format!("there is no type {name}"))?);
            }
            Long("forward") => forward = true,
            Long("every") => {
                every = args.value().and_then(|v| v.parse::<usize>()).map_err(|e| e.to_string())?.max(1);
            }
            Long("emulate") => emulate = true,
            Long("json") => json = true,
            Long("help") | Short('h') => return Ok(None),
            other => return Err(other.unexpected().to_string()),
        }
    }
    let dir = dir.ok_or("DIR is missing: the directory of the golden files, such as tests/goldens")?;
    if let (true, Some(tier)) = (emulate, tier.filter(|tier| *tier != Tier::Metal)) {
        return Err(format!(
            "--emulate runs the kernels of tier metal, not of {tier}; leave one of the two out"
        ));
    }
    Ok(Some(Options { dir, tier, dtype, forward, every, emulate, json }))
}

/// Something that runs kernels here.
enum Machine {
    Gpu(Gpu),
    /// The Metal kernels on this machine's CPU, as M1 and M2 or as later chips load tiles.
    Emulator(&'static str, Emulator),
}

impl Machine {
    fn name(&self) -> &'static str {
        match self {
            Machine::Gpu(gpu) => gpu.tier().name(),
            Machine::Emulator(name, _) => name,
        }
    }

    fn run(&self, golden: &Golden, dtype: DType) -> Vec<Finding> {
        fn on<R: Runtime>(runtime: &R, golden: &Golden, dtype: DType) -> Vec<Finding>
        where
            R::Buffer: Any + PartialEq,
        {
            pollster::block_on(conformance::run(runtime, golden, dtype))
        }
        match self {
            Machine::Gpu(gpu) => on(gpu, golden, dtype),
            Machine::Emulator(_, emulator) => {
                let findings = on(emulator, golden, dtype);
                // What it counted is not asked for here, and would pile up.
                emulator.take_records();
                findings
            }
        }
    }
}

/// The tiers that are here, and why the others are not.
fn machines(options: &Options) -> (Vec<Machine>, Vec<(&'static str, String)>) {
    let (mut here, mut absent) = (Vec::new(), Vec::new());
    for wanted in Tier::ALL.into_iter().filter(|wanted| options.tier.is_none_or(|tier| tier == *wanted)) {
        match Gpu::builder().tier(wanted).build() {
            Ok(gpu) => here.push(Machine::Gpu(gpu)),
            Err(error) => absent.push((wanted.name(), error.to_string())),
        }
        // Metal asked for by name is emulated where there is nothing else to run it on.
        let alone = options.tier == Some(Tier::Metal) && here.is_empty();
        if wanted == Tier::Metal && !options.emulate && !alone {
            absent.push(("metal-emulated", "it takes more than an hour; --emulate runs it".to_owned()));
        } else if wanted == Tier::Metal {
            emulators(&mut here, &mut absent);
        }
    }
    (here, absent)
}

/// The emulator with each of the loaders.
fn emulators(here: &mut Vec<Machine>, absent: &mut Vec<(&'static str, String)>) {
    for (name, loader) in
        [("metal-emulated-staged", Loader::Staged), ("metal-emulated-direct", Loader::Direct)]
    {
        match Emulator::metal(loader) {
            Ok(emulator) => here.push(Machine::Emulator(name, emulator)),
            Err(error) => absent.push((name, error.to_string())),
        }
    }
}

/// Whether every case passed.
fn run(options: &Options) -> Result<bool, String> {
    let files = Golden::files(&options.dir).map_err(|e| e.to_string())?;
    let (machines, absent) = machines(options);
    for (tier, reason) in &absent {
        // Not on stdout with --json: there is no case that this is about.
        if options.json {
            eprintln!("{tier} skipped: {reason}")
        } else {
            println!("{tier} skipped: {reason}")
        }
    }
    for machine in &machines {
        // What a tier cannot multiply itself, it says.
        if let (Machine::Gpu(gpu), false) = (machine, options.json) {
            let own = gpu.report().rungs.iter().find(|rung| rung.tier == gpu.tier());
            println!("{}: {}", gpu.tier(), own.map_or("", |rung| &rung.reason));
        }
    }
    if machines.is_empty() {
        return Err("no tier that was asked for is available here".to_owned());
    }
    let (mut passed, mut failed) = (0, 0);
    let mut count = |good: bool| if good { passed += 1 } else { failed += 1 };
    let files: Vec<_> = files.into_iter().step_by(options.every).collect();
    for (number, file) in files.iter().enumerate() {
        eprintln!("case {} of {}", number + 1, files.len());
        let golden = match Golden::load(file) {
            Ok(golden) if options.forward => golden.without_gradients(),
            Ok(golden) => golden,
            Err(problem) => {
                eprintln!("{problem}");
                count(false);
                continue;
            }
        };
        let lists = compare_blocks(&golden, options.json);
        if let Some(good) = lists {
            count(good);
        }
        for machine in &machines {
            let mut report = Report::default();
            for dtype in DType::ALL.into_iter().filter(|dtype| options.dtype.is_none_or(|one| one == *dtype))
            {
                for finding in machine.run(&golden, dtype) {
                    report.add(dtype, &finding);
                    if options.json {
                        println!("{}", row(&golden.name, machine.name(), dtype, &finding));
                    }
                }
            }
            if !options.json {
                println!("{} {} {report}", golden.name, machine.name());
            }
            match report.verdict() {
                Verdict::Passed => count(true),
                Verdict::Failed => count(false),
                Verdict::Skipped => {}
            }
        }
    }
    let summary = format!("{passed} passed, {failed} failed");
    if options.json {
        eprintln!("{summary}")
    } else {
        println!("{summary}")
    }
    Ok(failed == 0)
}

/// Prints how the block lists of a case compare; nothing for a case without.
fn compare_blocks(golden: &Golden, json: bool) -> Option<bool> {
    let (count, differing) = match conformance::blocks(golden) {
        Ok(None) => return None,
        Ok(Some((count, differing))) => (count, differing),
        Err(error) => (0, vec![error.to_string()]),
    };
    let pass = differing.is_empty();
    if json {
        let row = json!({
            "case": golden.name, "tier": "block-mask", "dtype": "bool", "output": "blocks", "pass": pass,
            "mean_err": differing.len() as f64 / count.max(1) as f64, "max_err": differing.len(), "budget": 0,
        });
        println!("{row}");
    } else if pass {
        println!("{} block-mask passed: {count} blocks", golden.name);
    } else {
        println!("{} block-mask FAILED: {} of {count}: {}", golden.name, differing.len(), differing[0]);
    }
    Some(pass)
}

/// What became of a case on a tier.
#[derive(Default)]
struct Report {
    passed: Vec<String>,
    failed: Vec<String>,
    /// Outputs and reasons.
    skipped: Vec<(String, String)>,
    /// Whether something of the forward pass was computed.
    forward: bool,
}

impl Report {
    fn add(&mut self, dtype: DType, finding: &Finding) {
        let name = format!("{dtype} {}", finding.output);
        match (finding.verdict(), &finding.result) {
            (Verdict::Passed, _) => self.passed.push(name),
            (Verdict::Skipped, result) => {
                let reason = result.as_ref().err().map_or(String::new(), ToString::to_string);
                self.skipped.push((finding.output.clone(), reason));
            }
            (Verdict::Failed, Err(error)) => self.failed.push(format!("{name}: {error}")),
            (Verdict::Failed, Ok(found)) => self.failed.push(format!(
                "{name}: mean error {:.2e}, largest {:.2e}, budget {:.2e}",
                found.mean, found.max, finding.budget
            )),
        }
        self.forward |= finding.output.starts_with("out") && finding.verdict() != Verdict::Skipped;
    }

    /// A case of which only gradients are missing still counts; one that did not run does not.
    fn verdict(&self) -> Verdict {
        match (self.failed.is_empty(), self.forward) {
            (false, _) => Verdict::Failed,
            (true, true) => Verdict::Passed,
            (true, false) => Verdict::Skipped,
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.verdict() {
            Verdict::Passed => write!(f, "passed: {} outputs", self.passed.len())?,
            Verdict::Failed => write!(f, "FAILED: {}", self.failed.join("; "))?,
            Verdict::Skipped => {}
        }
        if let Some((_, reason)) = self.skipped.first() {
            let names: std::collections::BTreeSet<&str> =
                self.skipped.iter().map(|(name, _)| name.as_str()).collect();
            let names: Vec<&str> = names.into_iter().collect();
            let comma = if self.verdict() == Verdict::Skipped { "" } else { ", " };
            write!(f, "{comma}skipped: {}: {reason}", names.join(", "))?;
        }
        Ok(())
    }
}

/// The JSON of one output.
fn row(case: &str, tier: &str, dtype: DType, finding: &Finding) -> serde_json::Value {
    // JSON has no infinity: null stands for an error that has no number.
    let (mean, max) = finding.result.as_ref().map_or((None, None), |found| {
        (Some(found.mean).filter(|x| x.is_finite()), Some(found.max).filter(|x| x.is_finite()))
    });
    let pass = match finding.verdict() {
        Verdict::Passed => Some(true),
        Verdict::Failed => Some(false),
        Verdict::Skipped => None,
    };
    let mut row = json!({
        "case": case, "tier": tier, "dtype": dtype.name(), "output": finding.output, "pass": pass,
        "mean_err": mean, "max_err": max, "budget": finding.budget,
    });
    if let Err(error) = &finding.result {
        let key = if pass.is_none() { "skipped" } else { "error" };
        row[key] = json!(error.to_string());
    }
    row
}
