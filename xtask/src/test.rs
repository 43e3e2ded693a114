//! `cargo xtask test`: every suite, each with its time, then a table and the count.
//!
//! A suite that lacks something is named with what it lacks and counts as not run: it never passes silently.

mod suites;

use crate::machine::{self, Need};
use crate::report::{self, Outcome, Row};
use lexopt::prelude::*;
use std::time::Instant;
use suites::{SUITES, Suite};

/// The flags of one run.
#[derive(Debug, Default)]
struct Wanted {
    install: bool,
    full: bool,
    names: Vec<String>,
}

impl Wanted {
    fn runs(&self, suite: &Suite) -> bool {
        self.full || !self.names.is_empty() || !suite.apart
    }
}

pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<bool, Box<dyn std::error::Error>> {
    let mut wanted = Wanted::default();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("install") => wanted.install = true,
            Long("full") => wanted.full = true,
            Long("list") => {
                list();
                return Ok(true);
            }
            Value(name) => wanted.names.push(name.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    if let Some(name) =
        wanted.names.iter().find(|name| SUITES.iter().all(|suite| suite.name != name.as_str()))
    {
        return Err(format!("there is no suite {name}; `cargo xtask test --list` names them").into());
    }
    let chosen =
        |suite: &&Suite| wanted.names.is_empty() || wanted.names.iter().any(|name| name == suite.name);
    let suites: Vec<&Suite> = SUITES.iter().filter(chosen).collect();

    let mut rows = Vec::new();
    if wanted.install {
        let start = Instant::now();
        println!("== install");
        let runs = |suite: &&&Suite| wanted.runs(suite);
        let mut needs: Vec<Need> =
            suites.iter().filter(runs).flat_map(|suite| suite.needs).copied().collect();
        needs.sort_by_key(|need| *need as u8);
        needs.dedup();
        machine::install(&needs);
        println!("== install: {:.1} s", start.elapsed().as_secs_f64());
    }
    for suite in suites {
        let start = Instant::now();
        println!("\n== {}: {}", suite.name, suite.what);
        let outcome = if wanted.runs(suite) {
            run(suite, wanted.full)
        } else {
            Outcome::Skipped(format!("runs with `--full`, or as `cargo xtask test {}`", suite.name))
        };
        let time = start.elapsed();
        if let Outcome::Skipped(why) = &outcome {
            println!("skipped: {why}");
        }
        println!("== {}: {:.1} s", suite.name, time.as_secs_f64());
        rows.push(Row { suite: suite.name, outcome, time });
    }
    Ok(report::print(&rows))
}

fn run(suite: &Suite, full: bool) -> Outcome {
    let lacking: Vec<&str> =
        suite.needs.iter().filter(|need| !need.is_met()).map(|need| need.what()).collect();
    if lacking.is_empty() {
        (suite.run)(full)
    } else {
        Outcome::Skipped(format!("needs {}", lacking.join("; ")))
    }
}

fn list() {
    for suite in SUITES {
        println!("{:<14} {}", suite.name, suite.what);
        for need in suite.needs {
            println!("{:<14}   {} {}", "", if need.is_met() { "has  " } else { "lacks" }, need.what());
        }
    }
}
