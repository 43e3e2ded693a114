//! How far an output may be from its golden value.
//!
//! The budgets follow PyTorch's own test rule: the error against f64 may be no worse than a factor of the
//! error that plain attention in the same dtype makes, plus a floor. The golden files store the latter.

use flexattn::DType;

use crate::golden::Golden;

/// The mean relative error of rounding to a dtype: half of what it is at most. It stands in for the error of plain
/// attention where a file stores none: every value in that computation was rounded so.
fn mean_rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 0.0,
        DType::F16 => 2.0_f64.powi(-12),
        DType::BF16 => 2.0_f64.powi(-9),
    }
}

/// What an output may be off by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Mean absolute error over all elements; infinite where only single elements are bounded.
    pub mean: f64,
    /// Absolute error of an element whose golden value is `x`: `max + relative * max(1, |x|)`.
    pub max: f64,
    /// See [`max`](Self::max).
    pub relative: f64,
}

/// How an output compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Whether it is within its budget: sizes agree, no NaN or infinity where the golden value has none,
    /// and the other way round.
    pub pass: bool,
    /// Mean absolute error over the elements whose golden value is finite.
    pub mean: f64,
    /// Largest absolute error; infinite where a NaN or an infinity stands on one side only.
    pub max: f64,
}

impl Budget {
    /// The budget of an output of a golden case, by the output's name: `out`, `lse`, `max`, `dq`, `dk`, `dv`,
    /// `dcap.x`, and the same with the suffix `_sink`.
    pub fn of(golden: &Golden, output: &str, dtype: DType) -> Self {
        let gold = golden.values(output).unwrap_or(&[]);
        let largest = gold.iter().filter(|x| x.is_finite()).fold(0.0_f64, |m, &x| m.max(x.abs().into()));
        let name = dtype.name();
        match output.trim_end_matches("_sink") {
            "out" => {
                let reference = golden.number(&format!("ref_err_{name}")).unwrap_or(0.0);
                let (factor, max) = match dtype {
                    DType::F32 => (10.0, 5e-5),
                    DType::F16 => (1.25, 1e-3),
                    DType::BF16 => (1.25, 8e-3),
                };
                Self { mean: factor * reference + 1e-7, max: max * largest, relative: 0.0 }
            }
            "lse" | "max" => {
                let reference = golden.number("max_lse_err_f32").unwrap_or(0.0);
                Self { mean: f64::INFINITY, max: 4.0 * reference, relative: 1e-6 }
            }
            gradient => {
                let stored = golden.number_in(&format!("grad_ref_err_{name}"), gradient);
                let reference = stored.unwrap_or(mean_rounding(dtype) * largest);
                let (factor, floor) = match dtype {
                    DType::F32 => (10.0, 1e-6),
                    DType::F16 | DType::BF16 => (2.0, 1e-5),
                };
                // The sinks' gradients have no stored error; each adds up what rounding out leaves in
                // every row, and terms of both signs cancel.
                let cancelled = if gradient == "dcap.sink" && dtype != DType::F32 { 8.0 } else { 1.0 };
                let mean = cancelled * factor * reference + floor * largest;
                Self { mean, max: f64::INFINITY, relative: 0.0 }
            }
        }
    }

    /// The one number that a report shows: the mean, or the largest element's bound where there is no mean.
    pub fn shown(&self, gold: &[f32]) -> f64 {
        if self.mean.is_finite() {
            return self.mean;
        }
        let largest = gold.iter().filter(|x| x.is_finite()).fold(1.0_f64, |m, &x| m.max(x.abs().into()));
        self.max + self.relative * largest
    }

    /// Compares an output with its golden values.
    pub fn compare(&self, gold: &[f32], got: &[f32]) -> Comparison {
        if gold.len() != got.len() {
            return Comparison { pass: false, mean: f64::INFINITY, max: f64::INFINITY };
        }
        let (mut sum, mut count, mut max, mut pass) = (0.0, 0usize, 0.0_f64, true);
        for (&gold, &got) in gold.iter().zip(got) {
            if !gold.is_finite() || !got.is_finite() {
                let same = gold == got || (gold.is_nan() && got.is_nan());
                if !same {
                    (pass, max) = (false, f64::INFINITY);
                }
                continue;
            }
            let error = (f64::from(gold) - f64::from(got)).abs();
            pass &= error <= self.max + self.relative * f64::from(gold).abs().max(1.0);
            sum += error;
            count += 1;
            max = max.max(error);
        }
        let mean = if count == 0 { 0.0 } else { sum / count as f64 };
        Comparison { pass: pass && mean <= self.mean, mean, max }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOSE: Budget = Budget { mean: 1.0, max: 1.0, relative: 0.0 };

    #[test]
    fn nan_on_one_side_fails() {
        assert!(!LOOSE.compare(&[0.0], &[f32::NAN]).pass);
        assert!(LOOSE.compare(&[f32::NAN], &[f32::NAN]).pass);
    }

    #[test]
    fn infinities_must_agree_in_sign() {
        assert!(LOOSE.compare(&[f32::NEG_INFINITY], &[f32::NEG_INFINITY]).pass);
        assert!(!LOOSE.compare(&[f32::NEG_INFINITY], &[f32::INFINITY]).pass);
        assert!(!LOOSE.compare(&[f32::NEG_INFINITY], &[-1e30]).pass);
    }

    #[test]
    fn a_missing_element_fails() {
        assert!(!LOOSE.compare(&[0.0, 0.0], &[0.0]).pass);
    }

    #[test]
    fn one_element_past_its_bound_fails_although_the_mean_holds() {
        assert!(!LOOSE.compare(&[0.0; 4], &[0.0, 0.0, 0.0, 1.5]).pass);
    }
}
