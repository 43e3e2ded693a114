//! Rows and figures as a reader wants them.

use crate::{Bound, Check, Failure, Row, measure};
use flexattn::Gpu;

/// How rows are printed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Format {
    /// In columns, for a terminal.
    #[default]
    Table,
    /// One object a line, and nothing else on standard output.
    Json,
    /// As in docs/benchmarks.md.
    Markdown,
}

impl Format {
    pub(crate) fn head(self, machines: &[Option<Gpu>]) {
        if let Format::Json = self {
            return;
        }
        for gpu in machines.iter().flatten() {
            println!("{} tier on {}", gpu.tier(), measure::adapter(gpu));
        }
        if let Format::Markdown = self {
            println!();
            println!(
                "| tier | case | type | q x kv x dim | density | ms | unfused ms | ratio | GFLOP/s | MB |"
            );
            println!("|---|---|---|---|---|---|---|---|---|---|");
            return;
        }
        println!(
            "{:<12} {:<30} {:>5} {:>6} {:>6} {:>7} {:>9} {:>9} {:>6} {:>8} {:>11}",
            "tier",
            "case",
            "dtype",
            "q_len",
            "kv_len",
            "density",
            "ms",
            "baseline",
            "ratio",
            "gflop/s",
            "bytes"
        );
    }

    pub(crate) fn row(self, row: &Row) -> Result<(), Failure> {
        let figure = |value: Option<f64>, digits: usize| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let time = |digits: usize| match row.us {
            Some(us) => format!("{us:.0} us"),
            None => format!("{:.digits$}", row.ms),
        };
        match self {
            Format::Json => println!("{}", serde_json::to_string(row)?),
            Format::Table => println!(
                "{:<12} {:<30} {:>5} {:>6} {:>6} {:>6.2}% {:>9} {:>9} {:>6} {:>8} {:>11}",
                row.tier,
                row.case,
                row.dtype,
                row.q_len,
                row.kv_len,
                row.density * 100.0,
                time(3),
                figure(row.baseline_ms, 3),
                figure(row.ratio, 2),
                figure(row.gflops, 2),
                row.bytes
            ),
            Format::Markdown => println!(
                "| {} | {} | {} | {} x {} x {} | {:.1} % | {} | {} | {} | {} | {:.1} |",
                row.tier,
                row.case,
                row.dtype,
                row.q_len,
                row.kv_len,
                row.head_dim,
                row.density * 100.0,
                time(1),
                figure(row.baseline_ms, 1),
                figure(row.ratio, 2),
                figure(row.gflops, 2),
                row.bytes as f64 / 1e6
            ),
        }
        Ok(())
    }

    pub(crate) fn checks(self, checks: &[Check]) {
        if let Format::Markdown = self {
            println!();
        }
        for check in checks {
            match self {
                Format::Json => eprintln!("{}", verdict(check)),
                Format::Table => println!("{}", verdict(check)),
                Format::Markdown => println!("- {}", verdict(check)),
            }
        }
    }
}

fn verdict(check: &Check) -> String {
    let Check { what, value, bound } = check;
    let (words, limit) = match bound {
        Bound::AtMost(limit) => ("at most", limit),
        Bound::AtLeast(limit) => ("at least", limit),
    };
    format!("{} {what}: {value:.3}, {words} {limit:.3}", if check.holds() { "pass" } else { "MISS" })
}
