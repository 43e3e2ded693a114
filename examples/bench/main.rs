//! How long attention takes here, beside an unfused baseline that is measured in the same run.
//!
//! ```text
//! cargo run --release --example bench -- --suite dense|sparse|decode|mods|backward|blockmask|compile \
//!     [--tier TIER] [--len N] [--rounds N] [--json | --markdown] [--plot out.svg] [--strict]
//! ```
//!
//! Each time is the median over rounds in which all cases of a group take turns, so that a machine that
//! slows down slows all of them; the first run of each case is not counted, since it compiles. `ms` is
//! from submit to the end of the work, as the program sees it. `baseline_ms` is attention in three
//! kernels with the score matrix in memory, in f32, without mods; only causal rows have a baseline that
//! skips what it may. `density` is kept pairs / (L * S), `gflops` counts the kept pairs only, `bytes` are
//! those of q, k, v and out (of the lists in the suite blockmask). Figures that are aimed at follow the rows, with
//! `pass` or `MISS`; a miss is a failure only with `--strict`, since other work on the machine makes some.

mod backward;
mod baseline;
mod baseline_row;
mod compile;
mod measure;
mod plot;
mod print;
mod suites;

use flexattn::{Gpu, Tier};
use lexopt::prelude::*;
use print::Format;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;

type Failure = Box<dyn std::error::Error>;

/// One line of the output.
#[derive(Clone, Debug, Default, Serialize)]
struct Row {
    suite: &'static str,
    case: String,
    tier: String,
    adapter: String,
    dtype: &'static str,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    density: f64,
    ms: f64,
    /// The same in microseconds, for what is too short to be read in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    us: Option<f64>,
    baseline_ms: Option<f64>,
    ratio: Option<f64>,
    gflops: Option<f64>,
    bytes: u64,
}

/// A figure that must not be exceeded, or not be missed.
#[derive(Debug)]
struct Check {
    what: String,
    value: f64,
    bound: Bound,
}

#[derive(Debug)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Check {
    fn holds(&self) -> bool {
        match self.bound {
            Bound::AtMost(limit) => self.value <= limit,
            Bound::AtLeast(limit) => self.value >= limit,
        }
    }
}

/// What a suite found on one tier.
#[derive(Debug, Default)]
struct Found {
    rows: Vec<Row>,
    checks: Vec<Check>,
}

/// What the command line asks for.
#[derive(Debug, Default)]
struct Wanted {
    suite: Option<String>,
    tier: Option<Tier>,
    /// Cases of this length only, in suites that have several.
    len: Option<usize>,
    rounds: Option<usize>,
    format: Format,
    plot: Option<PathBuf>,
    /// Whether a figure that is missed is a failure.
    strict: bool,
}

impl Wanted {
    /// Whether a case of this many keys is wanted.
    fn takes(&self, len: usize) -> bool {
        self.len.is_none_or(|wanted| wanted == len)
    }
}

const USAGE: &str = "usage: bench --suite NAME [--tier TIER] [--len N] [--rounds N] [--json | --markdown] [--plot FILE.svg] [--strict]\nsuites:";

fn main() -> ExitCode {
    flexattn_testing::ended(run())
}

fn run() -> Result<(), Failure> {
    let Some(wanted) = arguments()? else {
        println!("{USAGE}\n{}", suites::help());
        return Ok(());
    };
    let name = wanted
        .suite
        .as_deref()
        .ok_or_else(|| format!("--suite is missing: what to measure\n{USAGE}\n{}", suites::help()))?;
    let suite = suites::find(name)
        .ok_or_else(|| format!("there is no suite {name}; there are {}", suites::names()))?;
    suite.check(&wanted)?;
    if let Some(file) = &wanted.plot {
        plot::check(file)?;
    }
    let mut all = Found::default();
    let machines = machines(&wanted, suite)?;
    wanted.format.head(&machines);
    for gpu in &machines {
        let found = (suite.run)(gpu.as_ref(), &wanted)?;
        for row in &found.rows {
            wanted.format.row(row)?;
        }
        all.rows.extend(found.rows);
        all.checks.extend(found.checks);
    }
    wanted.format.checks(&all.checks);
    if let Some(file) = &wanted.plot {
        plot::draw(&all.rows, file)?;
        eprintln!("drew {}", file.display());
    }
    let missed = all.checks.iter().filter(|check| !check.holds()).count();
    if wanted.strict && missed > 0 {
        return Err(format!("{missed} of {} figures were missed", all.checks.len()).into());
    }
    Ok(())
}

/// Nothing when help was asked for.
fn arguments() -> Result<Option<Wanted>, Failure> {
    let mut wanted = Wanted::default();
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("suite") => wanted.suite = Some(arguments.value()?.string()?),
            Long("tier") => wanted.tier = Some(Tier::from_name(&arguments.value()?.string()?)?),
            Long("len") => wanted.len = Some(arguments.value()?.parse()?),
            Long("rounds") => wanted.rounds = Some(arguments.value()?.parse()?),
            Long("json") => wanted.format = Format::Json,
            Long("markdown") => wanted.format = Format::Markdown,
            Long("strict") => wanted.strict = true,
            Long("plot") => wanted.plot = Some(arguments.value()?.into()),
            Long("help") | Short('h') => return Ok(None),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Some(wanted))
}

/// The tier asked for, else every tier of the best adapter here; the Cpu tier only if asked for or alone.
fn machines(wanted: &Wanted, suite: &suites::Suite) -> Result<Vec<Option<Gpu>>, Failure> {
    if !suite.needs_gpu {
        return Ok(vec![None]);
    }
    if let Some(tier) = wanted.tier {
        return Ok(vec![Some(Gpu::builder().tier(tier).build()?)]);
    }
    let best = Gpu::new()?;
    let others = best.report().rungs.iter().filter(|rung| rung.usable && rung.tier != Tier::Cpu);
    let tiers: Vec<Tier> = others.map(|rung| rung.tier).filter(|tier| *tier != best.tier()).collect();
    let mut machines = vec![Some(best)];
    for tier in tiers {
        machines.push(Some(Gpu::builder().tier(tier).build()?));
    }
    Ok(machines)
}
