//! Derivatives against central differences, and PyTorch's conventions at kinks.

use flexattn::expr::{Env, Expr, Input, Op, Point, Program, Type};
use flexattn::{Capture, ScoreMod};
use proptest::prelude::*;

use super::random::{self, KV_LEN, Q_LEN};

fn value(expr: &Expr, captures: &[Capture], at: Point<f64>) -> f64 {
    let scalars = random::scalars();
    let env = Env::new(captures, &scalars, Q_LEN, KV_LEN).unwrap();
    Program::new(std::slice::from_ref(expr)).eval(&env, &at).unwrap()[0].to_f64()
}

fn slope_at(text: &str, score: f64) -> f64 {
    let score_mod = ScoreMod::from_wgsl(text, &[], &[]).unwrap();
    let d = score_mod.gradient().unwrap().d_score;
    value(&d, &[], Point { score, b: 0, h: 0, q: 0, kv: 0 })
}

#[test]
fn kinks_follow_pytorch() {
    let cases = [
        ("abs(score)", 0.0, 0.0),
        ("max(score, 1.0)", 1.0, 0.5),
        ("min(score, 1.0)", 1.0, 0.5),
        ("max(score, 1.0)", 2.0, 1.0),
        ("max(score, 1.0)", 0.0, 0.0),
        ("max(score, score)", 3.0, 1.0),
        ("clamp(score, -1.0, 2.0)", 2.0, 1.0),
        ("clamp(score, -1.0, 2.0)", -1.0, 1.0),
        ("clamp(score, -1.0, 2.0)", 2.5, 0.0),
        ("floor(score) + round(score) + sign(score)", 1.2, 0.0),
        ("fract(score)", 1.25, 1.0),
        ("f32(i32(score))", 1.25, 0.0),
        ("select(score * 2.0, score * 3.0, score > 1.0)", 1.0, 2.0),
        ("pow(score, 2.0)", 3.0, 6.0),
        ("pow(score, 1.0)", 0.0, 1.0),
        ("pow(score, 3.0)", 0.0, 0.0),
        ("pow(score, 0.0 * score)", 0.0, 0.0),
        ("pow(score, 3.0)", -2.0, 12.0),
        ("pow(score, -1.0)", -2.0, -0.25),
    ];
    for (text, score, expected) in cases {
        assert_eq!(slope_at(text, score), expected, "{text} at {score}");
    }
}

#[test]
fn the_bounds_of_clamp_get_what_pytorch_gives_them() {
    // low, high, then what flows to score, low and high; torch.clamp with tensors as bounds.
    let cases = [
        (-1.0, 2.0, -3.0, [0.0, 1.0, 0.0]),
        (-1.0, 2.0, -1.0, [1.0, 0.0, 0.0]),
        (-1.0, 2.0, 2.0, [1.0, 0.0, 0.0]),
        (-1.0, 2.0, 3.0, [0.0, 0.0, 1.0]),
        (1.0, 1.0, 1.0, [1.0, 0.0, 0.0]),
        (1.0, 1.0, 0.0, [0.0, 0.0, 0.0]),
        (1.0, 1.0, 2.0, [0.0, 0.0, 1.0]),
        (2.0, -1.0, -3.0, [0.0, 0.0, 1.0]),
        (2.0, -1.0, 0.0, [0.0, 0.0, 1.0]),
        (2.0, -1.0, 3.0, [0.0, 0.0, 1.0]),
    ];
    for (low, high, score, expected) in cases {
        let bounds: Capture = Capture::f32("bounds", &[low, high], &[2]).unwrap().into();
        let text = "clamp(score, bounds(0), bounds(1))";
        let score_mod = ScoreMod::from_wgsl(text, &[bounds], &[]).unwrap();
        let gradient = score_mod.gradient().unwrap();
        let at = Point { score, b: 0, h: 0, q: 0, kv: 0 };
        let mut found = [value(&gradient.d_score, score_mod.captures(), at), 0.0, 0.0];
        for place in &gradient.captures {
            let index = value(&place.indices[0], &[], at) as usize;
            found[1 + index] = value(&place.d, score_mod.captures(), at);
        }
        assert_eq!(found, expected, "clamp({score}, {low}, {high})");
    }
}

#[test]
fn the_branch_not_taken_never_poisons_the_gradient() {
    assert_eq!(slope_at("select(log(score), score, score <= 0.0)", 0.0), 1.0);
    assert_eq!(slope_at("select(log(score), score, score <= 0.0)", 2.0), 0.5);
    assert_eq!(slope_at("select(sqrt(score), 0.0, score <= 0.0)", 0.0), 0.0);
    // The same poisoned value in two branches and outside of both.
    let text = "fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 {
        let l = log(score);
        if (q > 3) { return l * 2.0; }
        if (kv > 3) { return l * 3.0; }
        return score;
    }";
    assert_eq!(slope_at(text, 0.0), 1.0);
}

#[test]
fn simple_derivatives_are_short() {
    let d = |text: &str| ScoreMod::from_wgsl(text, &[], &[]).unwrap().gradient().unwrap().d_score.to_string();
    assert_eq!(d("score"), "1.0");
    assert_eq!(d("score * 2.0"), "2.0");
    assert_eq!(d("score + f32(kv - q)"), "1.0");
    assert_eq!(d("select(-1.0e30, score, q >= kv)"), "select(0.0, 1.0, q >= kv)");
    assert_eq!(d("1.5"), "0.0");
}

#[test]
fn every_place_that_reads_a_capture_gets_its_slope() {
    let bias: Capture = Capture::f32("bias", &[0.5, 1.5, -2.0], &[3]).unwrap().into();
    let mass: Capture = Capture::f32("mass", &[2.0, 4.0, 8.0], &[3]).unwrap().into();
    let text = "score * bias(q) + bias(kv) + log(mass(kv))";
    let score_mod = ScoreMod::from_wgsl(text, &[bias.clone(), mass.clone()], &[]).unwrap();
    let gradient = score_mod.gradient().unwrap();
    let at = Point { score: 3.0, b: 0, h: 0, q: 1, kv: 2 };
    let mut found: Vec<(String, String, f64)> = gradient
        .captures
        .iter()
        .map(|g| {
            (g.capture.name.to_string(), g.indices[0].to_string(), value(&g.d, score_mod.captures(), at))
        })
        .collect();
    found.sort_by(|a, b| a.partial_cmp(b).unwrap());
    let expected = [("bias", "kv", 1.0), ("bias", "q", 3.0), ("mass", "kv", 0.125)];
    let expected: Vec<_> = expected.iter().map(|(a, b, c)| (a.to_string(), b.to_string(), *c)).collect();
    assert_eq!(found, expected);
    assert_eq!(value(&gradient.d_score, score_mod.captures(), at), 1.5);
}

/// Whether central differences at two widths agree: then there is no kink nearby and the value is smooth enough.
pub(super) fn differences(f: impl Fn(f64) -> f64, x: f64) -> Option<f64> {
    let central = |h: f64| (f(x + h) - f(x - h)) / (2.0 * h);
    let (wide, narrow) = (central(1e-5), central(2.5e-6));
    let size = wide.abs().max(narrow.abs());
    let one_sided = ((f(x + 1e-5) - f(x)) / 1e-5, (f(x) - f(x - 1e-5)) / 1e-5);
    let smooth = (wide - narrow).abs() <= 1e-5 * size.max(1.0)
        && (one_sided.0 - one_sided.1).abs() <= 1e-2 * size.max(1.0);
    (narrow.is_finite() && size < 1e4 && f(x).abs() < 1e4 && smooth).then_some(narrow)
}

#[test]
fn derivatives_of_random_expressions_equal_central_differences() {
    let mut compared = 0;
    let mut runner = proptest::test_runner::TestRunner::new(random::config(3500));
    let compared_cell = std::cell::Cell::new(0);
    runner
        .run(&(random::expr(Type::F32, 5), random::point()), |(expr, at)| {
            if !expr.inputs().contains(Input::Score) {
                return Ok(());
            }
            let captures = random::captures();
            let Ok(d) = expr.derivative(&[Expr::input(Input::Score)]) else {
                return Err(TestCaseError::fail(format!("{expr} has no derivative")));
            };
            let scalars = random::scalars();
            let env = Env::new(&captures, &scalars, Q_LEN, KV_LEN).unwrap();
            // Where a NaN is dropped on the way, as min() does, there is no derivative to speak of.
            let parts = super::values::all_parts(&expr);
            let all = Program::new(&parts).eval(&env, &at).unwrap();
            // Of large parts, the differences are rounding errors.
            if all.iter().any(|lane| lane.to_f64().is_nan() || lane.to_f64().abs() > 1e6) {
                return Ok(());
            }
            // Bounds that move together are a kink that differences do not see.
            let bounds = parts.iter().filter(|e| *e.op() == Op::Clamp && e.ty() == Type::F32);
            let bounds: Vec<Expr> = bounds.flat_map(|e| e.args()[1..].to_vec()).collect();
            let values = Program::new(&bounds).eval(&env, &at).unwrap();
            if values.chunks(2).any(|pair| pair[0].to_f64() == pair[1].to_f64()) {
                return Ok(());
            }
            let program = Program::new(std::slice::from_ref(&expr));
            let f = |score: f64| program.eval(&env, &Point { score, ..at }).unwrap()[0].to_f64();
            if let Some(expected) = differences(f, at.score) {
                let got = value(&d[0], &captures, at);
                // A kink exactly here shows in neither; the derivative may say something else there.
                let near = [at.score - 1e-7, at.score + 1e-7]
                    .map(|s| value(&d[0], &captures, Point { score: s, ..at }));
                let smooth = near.iter().all(|n| (n - got).abs() <= 1e-3 * got.abs().max(1.0));
                if smooth {
                    compared_cell.set(compared_cell.get() + 1);
                    prop_assert!(
                        (got - expected).abs() <= 1e-3 * expected.abs().max(1.0),
                        "d {expr} = {} is {got}, differences say {expected} at {at:?}",
                        d[0]
                    );
                }
            }
            Ok(())
        })
        .unwrap();
    compared += compared_cell.get();
    assert!(compared > 300, "only {compared} compared");
}
