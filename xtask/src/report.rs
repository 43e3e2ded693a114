//! What the suites found: a table, and the closing line that counts tests.

use std::ops::AddAssign;
use std::time::Duration;

/// Tests counted by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl Counts {
    /// What one line of a test runner's output says: cargo's `test result: ok. 3 passed; 0 failed; 1 ignored; ..`,
    /// the project's own `3 passed, 0 failed, 1 skipped`, and node's `# pass 3`. Any other line says nothing.
    pub(crate) fn read(line: &str) -> Counts {
        let line = line.trim();
        let node = |word: &str| -> u64 {
            let rest = line.strip_prefix("# ").or_else(|| line.strip_prefix("\u{2139} ")).unwrap_or_default();
            rest.strip_prefix(word).and_then(|number| number.trim().parse().ok()).unwrap_or(0)
        };
        let list = match line.strip_prefix("test result: ") {
            Some(rest) => rest.split_once(". ").map_or("", |(_, list)| list),
            None if line.contains(" passed, ") && line.contains(" failed") => line,
            None => {
                return Counts { passed: node("pass "), failed: node("fail "), skipped: node("skipped ") };
            }
        };
        let mut counts = Counts::default();
        for part in list.split([',', ';']) {
            let mut words = part.split_whitespace().rev();
            let (Some(word), Some(number)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match word {
                "passed" => counts.passed += number,
                "failed" => counts.failed += number,
                "skipped" | "ignored" => counts.skipped += number,
                _ => {}
            }
        }
        counts
    }
}

/// How one suite ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Passed(Counts),
    Failed(Counts, String),
    /// It could not run here, or not all of it; the text says what is missing.
    Skipped(String),
}

/// One line of the closing table.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) suite: &'static str,
    pub(crate) outcome: Outcome,
    pub(crate) time: Duration,
}

impl Row {
    /// A suite without a test runner (formatting, lints) counts as one test; a suite that could not run counts as one skipped.
    fn counts(&self) -> Counts {
        match &self.outcome {
            Outcome::Passed(counts) if *counts == Counts::default() => Counts { passed: 1, ..*counts },
            Outcome::Passed(counts) => *counts,
            Outcome::Failed(counts, _) => Counts { failed: counts.failed.max(1), ..*counts },
            Outcome::Skipped(_) => Counts { skipped: 1, ..Counts::default() },
        }
    }
}

/// Prints the table and the closing line; true when nothing failed.
pub(crate) fn print(rows: &[Row]) -> bool {
    println!("\n{:<22} {:>8} {:>7} {:>7} {:>8}  outcome", "suite", "passed", "failed", "skipped", "seconds");
    let mut total = Counts::default();
    for row in rows {
        let counts = row.counts();
        total += counts;
        let outcome = match &row.outcome {
            Outcome::Passed(_) => "ok".to_owned(),
            Outcome::Failed(_, why) => format!("FAILED: {why}"),
            Outcome::Skipped(why) => format!("not run: {why}"),
        };
        let Counts { passed, failed, skipped } = counts;
        let seconds = row.time.as_secs_f64();
        println!("{:<22} {passed:>8} {failed:>7} {skipped:>7} {seconds:>8.1}  {outcome}", row.suite);
    }
    let seconds: f64 = rows.iter().map(|row| row.time.as_secs_f64()).sum();
    println!("{:<22} {:>33.1}  ({:.1} minutes)\n", "total", seconds, seconds / 60.0);
    println!("{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    total.failed == 0
}

#[cfg(test)]
mod tests {
    use super::Counts;

    #[test]
    fn closing_lines_of_every_runner_are_read() {
        let counts = |passed, failed, skipped| Counts { passed, failed, skipped };
        let cargo = "test result: FAILED. 12 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.4s";
        assert_eq!(Counts::read(cargo), counts(12, 2, 1));
        assert_eq!(Counts::read("88 passed, 0 failed"), counts(88, 0, 0));
        assert_eq!(Counts::read("tint: 7 passed, 1 failed, 4 skipped"), counts(7, 1, 4));
        assert_eq!(Counts::read("# pass 5"), counts(5, 0, 0));
        assert_eq!(Counts::read("\u{2139} fail 2"), counts(0, 2, 0));
        assert_eq!(Counts::read("warning: 3 passed over"), counts(0, 0, 0));
        assert_eq!(Counts::read("test forward ... ok"), counts(0, 0, 0));
    }
}
