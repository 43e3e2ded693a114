//! Values, ranges and simplification agree.

use std::collections::HashSet;

use flexattn::expr::{
    CaptureData, CaptureType, DeviceHandle, Env, Expr, IndexBox, Lane, Op, Point, Program, Type, Value,
};
use flexattn::{Capture, MaskMod, Scalar, ScoreMod};
use proptest::prelude::*;

use super::ops::OPS;
use super::random::{self, KV_LEN, Q_LEN};

fn eval64(expr: &Expr, captures: &[Capture], scalars: &[Scalar], at: Point<f64>) -> Lane<f64> {
    let env = Env::new(captures, scalars, Q_LEN, KV_LEN).unwrap();
    Program::new(std::slice::from_ref(expr)).eval(&env, &at).unwrap()[0]
}

/// The same expression with every operation simplified.
pub(crate) fn simplified(expr: &Expr) -> Expr {
    let args: Vec<Expr> = expr.args().iter().map(simplified).collect();
    if args.is_empty() { expr.clone() } else { Expr::new(expr.op().clone(), &args).unwrap() }
}

/// The expression and everything in it, each part once.
pub(crate) fn all_parts(expr: &Expr) -> Vec<Expr> {
    let mut parts = vec![expr.clone()];
    let mut seen = HashSet::from([expr.hash()]);
    let mut next = 0;
    while next < parts.len() {
        let args = parts[next].args().to_vec();
        parts.extend(args.into_iter().filter(|arg| seen.insert(arg.hash())));
        next += 1;
    }
    parts
}

fn same(a: Lane<f64>, b: Lane<f64>) -> bool {
    match (a, b) {
        (Lane::F32(a), Lane::F32(b)) => {
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-6 * a.abs().max(b.abs())
        }
        _ => a == b,
    }
}

/// Numbers at which rules break: zeros, ones, bounds.
const EDGES: [i32; 11] = [0, 1, -1, 2, -2, 3, -7, 31, 32, i32::MAX, i32::MIN];

#[test]
fn every_integer_operation_simplifies_to_the_same_value() {
    let q = Expr::input(flexattn::expr::Input::Q);
    let kv = Expr::input(flexattn::expr::Input::Kv);
    let mut checked = 0;
    for unsigned in [false, true] {
        let convert = |e: &Expr| {
            if unsigned { Expr::exact(Op::ToU32, std::slice::from_ref(e)).unwrap() } else { e.clone() }
        };
        let constant = |x: i32| if unsigned { Expr::constant(x as u32) } else { Expr::constant(x) };
        for op in &OPS {
            let mut pairs = vec![(convert(&q), convert(&q)), (convert(&q), convert(&kv))];
            for edge in EDGES {
                pairs.push((convert(&q), constant(edge)));
                pairs.push((constant(edge), convert(&q)));
            }
            for (a, b) in pairs {
                let Ok(raw) = Expr::exact(op.clone(), &[a, b]) else { continue };
                let simple = simplified(&raw);
                for x in EDGES {
                    for y in [0, -3, i32::MAX] {
                        let at = Point { score: 0.0, b: 0, h: 0, q: x, kv: y };
                        let (before, after) = (eval64(&raw, &[], &[], at), eval64(&simple, &[], &[], at));
                        assert_eq!(before, after, "{raw} became {simple} at q = {x}, kv = {y}");
                        checked += 1;
                    }
                }
            }
        }
    }
    assert!(checked > 20_000, "{checked}");
}

#[test]
fn every_float_operation_simplifies_to_the_same_value() {
    let edges = [0.0f32, -0.0, 1.0, -1.0, 0.5, 1e30, -1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let s = Expr::input(flexattn::expr::Input::Score);
    let ops = [
        Op::Add,
        Op::Sub,
        Op::Mul,
        Op::Div,
        Op::Min,
        Op::Max,
        Op::Pow,
        Op::Lt,
        Op::Le,
        Op::Gt,
        Op::Ge,
        Op::Eq,
        Op::Ne,
    ];
    for op in ops {
        let mut pairs = vec![(s.clone(), s.clone())];
        let negated = Expr::exact(Op::Neg, std::slice::from_ref(&s)).unwrap();
        pairs.push((s.clone(), negated.clone()));
        pairs.push((negated.clone(), negated));
        for edge in edges {
            pairs.push((s.clone(), Expr::constant(edge)));
            pairs.push((Expr::constant(edge), s.clone()));
        }
        for (a, b) in pairs {
            let raw = Expr::exact(op.clone(), &[a, b]).unwrap();
            for raw in [raw.clone(), Expr::exact(Op::Not, std::slice::from_ref(&raw)).unwrap_or(raw)] {
                let simple = simplified(&raw);
                for x in edges {
                    let at = Point { score: f64::from(x), b: 0, h: 0, q: 0, kv: 0 };
                    let (before, after) = (eval64(&raw, &[], &[], at), eval64(&simple, &[], &[], at));
                    let zero = |lane: Lane<f64>| match lane {
                        Lane::F32(x) => x == 0.0 && x.is_sign_negative(),
                        _ => false,
                    };
                    assert!(
                        same(before, after) && zero(before) == zero(after),
                        "{raw} = {before:?} became {simple} = {after:?} at {x}"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(super::random::config(400))]

    #[test]
    fn simplification_keeps_the_value_of_random_expressions(
        expr in random::any_expr(),
        points in prop::collection::vec(random::point(), 8),
    ) {
        let simple = simplified(&expr);
        let (captures, scalars) = (random::captures(), random::scalars());
        let env = Env::new(&captures, &scalars, Q_LEN, KV_LEN).unwrap();
        let both = Program::new(&[expr.clone(), simple.clone()]);
        let (mut in64, mut in32) = (both.bind::<f64>(&env).unwrap(), both.bind::<f32>(&env).unwrap());
        for at in points {
            in64.point(&at);
            let (before, after) = (in64.output(0).lane(0), in64.output(1).lane(0));
            // Constants are folded to f32, so where rounding decides, f32 has to agree.
            in32.point(&Point { score: at.score as f32, b: at.b, h: at.h, q: at.q, kv: at.kv });
            let equal32 = in32.output(0).lane(0) == in32.output(1).lane(0);
            prop_assert!(same(before, after) || equal32, "{} = {:?} became {} = {:?} at {:?}", expr, before, simple, after, at);
        }
    }

    #[test]
    fn range_holds_every_value_in_f32_and_f64(expr in random::any_expr(), at in random::index_box(), inside in prop::collection::vec((0.0..1.0f64, 0.0..1.0f64, -4.0..4.0f64), 12)) {
        let (captures, scalars) = (random::captures(), random::scalars());
        let env = Env::new(&captures, &scalars, Q_LEN, KV_LEN).unwrap();
        let program = Program::new(std::slice::from_ref(&expr));
        let range = program.range(&env, &at).unwrap()[0];
        let (mut in64, mut in32) = (program.bind::<f64>(&env).unwrap(), program.bind::<f32>(&env).unwrap());
        for (x, y, score) in inside {
            let pick = |(lo, hi): (i32, i32), t: f64| lo + (f64::from(hi - lo) * t).round() as i32;
            let (q, kv) = (pick(at.q, x), pick(at.kv, y));
            let score = f64::from(score as f32);
            let point = Point { score, b: at.b.0, h: at.h.0, q, kv };
            in64.point(&point);
            prop_assert!(range.contains(in64.output(0).lane(0)), "{expr} is {:?} at {point:?}, outside {range:?}", in64.output(0));
            in32.point(&Point { score: score as f32, b: point.b, h: point.h, q, kv });
            prop_assert!(range.contains(in32.output(0).lane(0)), "{expr} is {:?} in f32 at {point:?}, outside {range:?}", in32.output(0));
        }
    }

    #[test]
    fn a_row_equals_its_points(expr in random::any_expr(), at in random::point(), scores in prop::collection::vec(-4.0..4.0f64, 9)) {
        let (captures, scalars) = (random::captures(), random::scalars());
        let env = Env::new(&captures, &scalars, Q_LEN, KV_LEN).unwrap();
        let program = Program::new(std::slice::from_ref(&expr));
        let mut bound = program.bind::<f64>(&env).unwrap();
        bound.row(at.b, at.h, at.q, at.kv, &scores, scores.len());
        let row = bound.output(0).clone();
        prop_assert_eq!(row.len(), scores.len());
        for (i, score) in scores.iter().enumerate() {
            bound.point(&Point { score: *score, kv: at.kv + i as i32, ..at });
            let (a, b) = (row.lane(i), bound.output(0).lane(0));
            prop_assert!(a == b || same(a, b), "{expr} at {i}: {a:?} in the row, {b:?} alone");
        }
    }
}

#[test]
fn integer_arithmetic_wraps_and_division_by_zero_is_defined() {
    let at = |q, kv| Point { score: 0.0, b: 0, h: 0, q, kv };
    let cases: &[(&str, i32, i32, i32)] = &[
        ("q + kv", i32::MAX, 1, i32::MIN),
        ("q - kv", i32::MIN, 1, i32::MAX),
        ("q * kv", 65_536, 65_536, 0),
        ("-q", i32::MIN, 0, i32::MIN),
        ("abs(q)", i32::MIN, 0, i32::MIN),
        ("q / kv", 7, 0, 7),
        ("q % kv", 7, 0, 0),
        ("q / kv", i32::MIN, -1, i32::MIN),
        ("q % kv", i32::MIN, -1, 0),
        ("q / kv", -7, 2, -3),
        ("q % kv", -7, 2, -1),
        ("floor_div(q, kv)", -7, 2, -4),
        ("floor_mod(q, kv)", -7, 2, 1),
        ("floor_div(q, kv)", 7, -2, -4),
        ("floor_mod(q, kv)", 7, -2, -1),
        ("floor_div(q, kv)", 7, 0, 7),
        ("floor_mod(q, kv)", 7, 0, 0),
        ("floor_div(q, kv)", i32::MIN, -1, i32::MIN),
        ("floor_div(q, 8)", -1, 0, -1),
        ("floor_mod(q, 8)", -1, 0, 7),
        ("q << u32(kv)", 1, 33, 2),
        ("q >> u32(kv)", -8, 1, -4),
        ("i32(f32(q) * 1e9)", 10, 0, 2_147_483_520),
        ("i32(f32(q) * 1e9)", -10, 0, i32::MIN),
        ("i32(u32(q) / 2u)", -2, 0, i32::MAX),
    ];
    for (text, q, kv, expected) in cases {
        let score = ScoreMod::from_wgsl(
            &format!("select(0.0, 1.0, ({text}) == {expected})").replace("-2147483648", "i32(-2147483648)"),
            &[],
            &[],
        )
        .unwrap();
        let value = eval64(score.expr(), &[], &[], at(*q, *kv));
        assert_eq!(value, Lane::F32(1.0), "{text} at q = {q}, kv = {kv} is not {expected}: {}", score.expr());
    }
}

#[test]
fn captured_indices_are_clamped() {
    let table = Capture::f32("table", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]).unwrap();
    let score = ScoreMod::new(|s| table.at([s.q(), s.kv()]));
    for (q, kv, expected) in [(0, 0, 1.0), (-5, 1, 2.0), (9, 9, 6.0), (1, i32::MIN, 4.0), (i32::MAX, 1, 5.0)]
    {
        let at = Point { score: 0.0, b: 0, h: 0, q, kv };
        assert_eq!(eval64(score.expr(), score.captures(), &[], at), Lane::F32(expected));
    }
}

#[test]
fn sixteen_bit_and_bool_captures_are_read_as_their_types() {
    let half = Capture::f16("half", &[half::f16::from_f32(1.5)], &[1]).unwrap();
    let brain = Capture::bf16("brain", &[half::bf16::from_f32(-2.0)], &[]).unwrap();
    let flag = Capture::bool("flag", &[true, false], &[2]).unwrap();
    let score = ScoreMod::new(|s| flag.at([s.kv()]).select(half.at([s.q()]), brain.at([])));
    let value = |kv| eval64(score.expr(), score.captures(), &[], Point { score: 0.0, b: 0, h: 0, q: 0, kv });
    assert_eq!((value(0), value(1)), (Lane::F32(1.5), Lane::F32(-2.0)));
}

#[test]
fn mistakes_in_a_closure_are_reported_by_check() {
    let table = Capture::f32("table", &[1.0; 6], &[2, 3]).unwrap();
    let wrong_rank = ScoreMod::new(|s| s.score() + table.at([s.q()]));
    let message = wrong_rank.check().unwrap_err().to_string();
    assert!(message.contains("table has rank 2"), "{message}");

    let other = Capture::f32("table", &[2.0; 6], &[2, 3]).unwrap();
    let two = ScoreMod::new(|s| table.at([s.q(), s.kv()]) + other.at([s.q(), s.kv()]));
    assert!(two.check().unwrap_err().to_string().contains("two different captured tensors are named table"));

    let long = ScoreMod::new(|s| flexattn::expr::sum(0..5000, |i| s.score() * i.to_f32()));
    assert!(long.check().unwrap_err().to_string().contains("4096"), "{:?}", long.check());
}

#[test]
fn hash_depends_on_the_expression_alone() {
    let mask = |values: &[i32]| {
        let doc = Capture::i32("doc", values, &[values.len()]).unwrap();
        MaskMod::new(|i| doc.at([i.q()]).eq(doc.at([i.kv()])))
    };
    assert_eq!(mask(&[1, 2]).hash(), mask(&[3, 4, 5]).hash());
    let causal = MaskMod::new(|i| i.q().ge(i.kv()));
    assert_ne!(causal.hash(), MaskMod::new(|i| i.q().gt(i.kv())).hash());
    // Stable between runs, machines and releases: pipeline caches on disk are named by it.
    assert_eq!(format!("{:032x}", causal.hash()), "b0eff4b32d516690a4dfd4afd49f6ef4");
}

#[test]
fn a_constant_that_overflows_is_not_folded_away() {
    let sum = Expr::new(Op::Add, &[Expr::constant(i32::MAX), Expr::constant(1)]).unwrap();
    assert_eq!(sum.as_constant(), None);
    let wraps = Expr::new(Op::WrappingAdd, &[Expr::constant(i32::MAX), Expr::constant(1)]).unwrap();
    assert_eq!(wraps.as_constant(), Some(Value::I32(i32::MIN)));
}

#[test]
fn overflow_that_follows_from_the_position_is_refused() {
    let env = Env::new(&[], &[], 70_000, 70_000).unwrap();
    let all = IndexBox { b: (0, 1), h: (0, 3), q: (0, 69_999), kv: (0, 69_999) };
    let refused = |text: &str| MaskMod::from_wgsl(text, &[], &[]).unwrap().expr().check(&env, &all);
    let message = refused("q * 70000 + kv > 5").unwrap_err().to_string();
    assert!(message.contains("q * 70000") && message.contains("4899930000"), "{message}");
    assert!(message.contains("wrapping_mul"), "{message}");
    assert!(refused("u32(q) - u32(kv) < 5u").is_err());
    // Not reached, or meant.
    assert!(refused("q < 10 && q * 70000 + kv > 5").is_ok());
    assert!(refused("select(true, q * 70000 > 5, q < 10)").is_ok());
    assert!(refused("wrapping_mul(q, 70000) > 5").is_ok());
    assert!(refused("q * 7 + kv > 5").is_ok());
    // Reached at some scores.
    let check = |text: &str, captures: &[Capture]| {
        let env = Env::new(captures, &[], 70_000, 70_000).unwrap();
        ScoreMod::from_wgsl(text, captures, &[]).unwrap().expr().check(&env, &all)
    };
    assert!(check("select(score, f32(q * 70000), score > 0.5)", &[]).is_err());
    assert!(check("select(score, f32(q * 70000), score < -100.0)", &[]).is_err());
    // Nothing is certain about what a device holds.
    let data = CaptureData::Device(DeviceHandle::new(()));
    let keep = [Capture::new("keep", CaptureType::I32, &[70_000], data).unwrap()];
    assert!(check("select(score, f32(q * 70000), keep(kv) > 3)", &keep).is_ok());
    assert!(check("select(score, f32(q * 7), keep(kv) > 3)", &keep).is_ok());
    // From a constant alone.
    let nothing = 0;
    let constant = MaskMod::new(|i| (i.q() * nothing + i32::MAX + 1).gt(i.kv()));
    assert!(constant.expr().check(&env, &all).is_err(), "{}", constant.expr());
}

#[test]
fn an_index_outside_its_tensor_for_every_value_is_refused() {
    let table: Capture = Capture::f32("table", &[1.0; 8], &[8]).unwrap().into();
    let captures = [table];
    let env = Env::new(&captures, &[], 16, 16).unwrap();
    let all = IndexBox { b: (0, 0), h: (0, 0), q: (0, 15), kv: (0, 15) };
    let check = |text: &str| ScoreMod::from_wgsl(text, &captures, &[]).unwrap().expr().check(&env, &all);
    let message = check("table(q + 8)").unwrap_err().to_string();
    assert!(
        message.contains("table") && message.contains("8 to 23") && message.contains("0 to 7"),
        "{message}"
    );
    assert!(check("table(-1 - kv)").is_err());
    assert!(check("table(q + 7)").is_ok());
    assert!(check("select(score, table(q + 8), q < 0)").is_ok());
}

#[test]
fn typical_masks_are_decided_by_range() {
    let env = Env::new(&[], &[], 4096, 4096).unwrap();
    let at = |q: i32, kv: i32| IndexBox { b: (0, 0), h: (0, 0), q: (q, q + 127), kv: (kv, kv + 127) };
    let range = |text: &str, q, kv| {
        let mask = MaskMod::from_wgsl(text, &[], &[]).unwrap();
        let range = Program::new(&[mask.expr().clone()]).range(&env, &at(q, kv)).unwrap()[0];
        (range.never(), range.always())
    };
    assert_eq!(range("q >= kv", 256, 0), (false, true));
    assert_eq!(range("q >= kv", 0, 256), (true, false));
    assert_eq!(range("q >= kv", 0, 0), (false, false));
    assert_eq!(range("q >= kv && q - kv < 256", 2048, 0), (true, false));
    assert_eq!(range("q / 128 == kv / 128", 128, 128), (false, true));
    assert_eq!(range("floor_mod(q, 256) < 128", 512, 0), (false, true));
    assert_eq!(range("(q & 128) == 0", 0, 0), (false, true));
    assert_eq!(range("f32(q) * 0.5 > f32(kv)", 1024, 0), (false, true));
    assert_eq!(range("exp(f32(kv) * 0.001) > 0.5", 0, 0), (false, true));
    assert_eq!(range("!(log(f32(q) - 5000.0) < 0.0)", 0, 0), (false, false));
    assert_eq!(range("abs(q - kv) <= 12 || kv < 4", 1024, 0), (false, false));
}

#[test]
fn a_scalar_changes_without_changing_the_expression() {
    let window = Scalar::i32("window", 4).unwrap();
    let mask = MaskMod::new(|i| (i.q() - i.kv()).lt(window.get()));
    let at = Point { score: 0.0, b: 0, h: 0, q: 9, kv: 2 };
    assert_eq!(eval64(mask.expr(), &[], mask.scalars(), at), Lane::Bool(false));
    let wider = mask.with_scalar(Scalar::i32("window", 8).unwrap()).unwrap();
    assert_eq!(wider.hash(), mask.hash());
    assert_eq!(eval64(wider.expr(), &[], wider.scalars(), at), Lane::Bool(true));
    assert!(mask.with_scalar(Scalar::f32("window", 8.0).unwrap()).is_err());
    assert!(mask.with_scalar(Scalar::i32("width", 8).unwrap()).is_err());
}

#[test]
fn a_missing_capture_is_named() {
    let expr = ScoreMod::new(|s| {
        let bias = Capture::f32("bias", &[0.0], &[1]).unwrap();
        s.score() + bias.at([s.q()])
    });
    let error = ScoreMod::from_expr(expr.expr().clone(), &[], &[]).unwrap_err().to_string();
    assert!(error.starts_with("`bias`: "), "{error}");
    assert_eq!(expr.expr().ty(), Type::F32);
}
