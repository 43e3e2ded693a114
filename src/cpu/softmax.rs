//! The softmax of rows of scores.

/// exp(x) for x <= 0, to within two units in the last place; 0 below -87, NaN for NaN.
///
/// 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2, e^r from its Taylor series: the seventh power is
/// the last that f32 can tell. Plain arithmetic without branches or calls, so that a loop over it becomes
/// vector instructions on every machine.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has 9 bits, so that n times it is exact.
    const LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2[0] - n * LN2[1];
    let sum = ((1.0 / 5040.0) * r + 1.0 / 720.0) * r + 1.0 / 120.0;
    let sum = (sum * r + 1.0 / 24.0) * r + 1.0 / 6.0;
    let sum = ((sum * r + 0.5) * r + 1.0) * r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < -87.0 { 0.0 } else { sum * power }
}

/// Lanes that sums and maxima over a row are kept in.
const LANES: usize = 8;

/// The largest of `values`, whose number is a multiple of 8; NaN is passed over.
#[inline(always)]
pub(super) fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in values.chunks_exact(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces each of `values` (a multiple of 8 of them, none above `max`) by exp(value - max), and gives
/// their sum. `max` is finite.
#[inline(always)]
pub(super) fn exponentiate(values: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    for chunk in values.chunks_exact_mut(LANES) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp(*x - max);
            *lane += *x;
        }
    }
    lanes.into_iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in 0..87_000 {
            let x = i as f32 * -1e-3;
            let (got, exact) = (f64::from(exp(x)), f64::from(x).exp());
            let unit = exact * f64::from(f32::EPSILON);
            assert!((got - exact).abs() <= 2.0 * unit, "exp({x}) is {got}, not {exact}");
        }
    }

    #[test]
    fn exp_of_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn a_nan_is_passed_over_by_the_maximum_and_kept_by_the_sum() {
        let mut values = [1.0, f32::NAN, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(largest(&values), 2.0);
        assert!(exponentiate(&mut values, 2.0).is_nan());
    }
}
