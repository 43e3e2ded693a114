//! Lowered derivatives, executed: every operation, and the kinks.

use std::any::Any;

use flexattn::expr::{Expr, Input, Op, Type};
use flexattn::{Attention, Capture, Gradients, Runtime, Saved, ScoreMod, Tensor, Tier, Wanted};
use flexattn_testing::problem::{Numbers, Sizes};

use super::case::Case;
use super::tiers;
use crate::expr::ops;

const SIZES: Sizes =
    Sizes { batch: 1, kv_batch: 1, q_heads: 2, kv_heads: 1, q_len: 20, kv_len: 24, head_dim: 8, v_dim: 8 };

/// The operation with `args`, whatever they are, brought to where it has a value and a derivative.
fn tamed(op: &Op, args: &[Expr]) -> Expr {
    let apply = |op: Op, args: &[Expr]| Expr::new(op, args).unwrap();
    let mut args = args.to_vec();
    let positive = |x: &Expr| apply(Op::Exp, std::slice::from_ref(x));
    match op {
        Op::Sqrt | Op::Log | Op::Log2 | Op::Pow => args[0] = positive(&args[0]),
        Op::Div => args[1] = positive(&args[1]),
        Op::Tan => args[0] = apply(Op::Tanh, &args[..1]),
        _ => {}
    }
    apply(op.clone(), &args)
}

/// The sum of these operations, each of the score and of elements by row and by column.
fn sum_of(ops: &[(Op, Vec<Type>)]) -> ScoreMod {
    let mut numbers = Numbers::new(5);
    let row: Capture = Capture::f32("row", &numbers.normals(20), &[20]).unwrap().into();
    let column: Capture = Capture::f32("column", &numbers.normals(24), &[24]).unwrap().into();
    let apply = |op: Op, args: &[Expr]| Expr::new(op, args).unwrap();
    let read = |capture: &Capture, input| apply(Op::Gather(capture.decl()), &[Expr::input(input)]);
    let (a, b) = (read(&row, Input::Q), read(&column, Input::Kv));
    let score = Expr::input(Input::Score);
    let bent = apply(Op::Add, &[apply(Op::Mul, &[score.clone(), a.clone()]), b.clone()]);
    let sum = ops.iter().fold(score.clone(), |sum, (op, types)| {
        let args = match types.as_slice() {
            [_] => vec![bent.clone()],
            [_, _] => vec![bent.clone(), apply(Op::Sub, &[a.clone(), score.clone()])],
            [Type::Bool, ..] => vec![apply(Op::Gt, &[bent.clone(), a.clone()]), score.clone(), b.clone()],
            _ => vec![
                bent.clone(),
                apply(Op::Neg, &[apply(Op::Exp, std::slice::from_ref(&a))]),
                apply(Op::Exp, std::slice::from_ref(&b)),
            ],
        };
        let part = apply(Op::Mul, &[tamed(op, &args), Expr::constant(0.25f32)]);
        apply(Op::Add, &[sum, part])
    });
    ScoreMod::from_expr(sum, &[row, column], &[]).unwrap()
}

#[test]
fn the_lowered_derivative_of_every_operation_is_that_of_the_reference() {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    let all = ops::of_floats();
    for gpu in tiers() {
        // A GPU compiles kernels for each score mod.
        let at_once = if full || gpu.tier() == Tier::Cpu { 1 } else { 7 };
        for ops in all.chunks(at_once) {
            println!("{} {:?}", gpu.tier(), ops.iter().map(|(op, _)| op.name()).collect::<Vec<_>>());
            let case = Case { score: Some(sum_of(ops)), ..Case::new(SIZES) };
            // The Subgroup tier shares the kernels of captured tensors with the Portable one.
            let captures: &[&str] = if gpu.tier() == Tier::Subgroup { &[] } else { &["row", "column"] };
            case.check(&gpu, captures, &[]);
        }
    }
}

/// At a score of exactly 0 with `t` = 0: the expression, its derivative by the score, and by the element
/// `t(h, kv)` that it reads.
const KINKS: [(&str, f32, f32); 22] = [
    ("abs(score)", 0.0, 0.0),
    ("max(score, 0.0)", 0.5, 0.0),
    ("min(score, 0.0)", 0.5, 0.0),
    ("max(score, score)", 1.0, 0.0),
    ("max(score, t(h, kv))", 0.5, 0.5),
    ("min(t(h, kv), score)", 0.5, 0.5),
    ("max(score, t(h, kv) - 1.0)", 1.0, 0.0),
    ("min(score, t(h, kv) - 1.0)", 0.0, 1.0),
    ("clamp(score, 0.0, 1.0)", 1.0, 0.0),
    ("clamp(score, -1.0, 0.0)", 1.0, 0.0),
    ("clamp(score, 1.0, 2.0)", 0.0, 0.0),
    ("clamp(score, t(h, kv), 1.0)", 1.0, 0.0),
    ("clamp(score, -1.0, t(h, kv))", 1.0, 0.0),
    ("clamp(score, t(h, kv), t(h, kv))", 1.0, 0.0),
    ("clamp(t(h, kv), score, 1.0)", 0.0, 1.0),
    ("clamp(score, t(h, kv) + 1.0, 2.0)", 0.0, 1.0),
    ("select(score * 2.0, score * 3.0, score > 0.0)", 2.0, 0.0),
    ("select(score * 2.0, score * 3.0, score == t(h, kv))", 3.0, 0.0),
    ("select(log(score), score, score <= 0.0)", 1.0, 0.0),
    ("sign(score) + floor(score) + round(score) + f32(i32(score))", 0.0, 0.0),
    ("fract(score)", 1.0, 0.0),
    ("pow(score, 2.0) + score * t(h, kv)", 0.0, 0.0),
];

/// Each kink in a head of its own. Both keys have the weight 1/2 and dPost is 1/2 and -1/2; key 0 is 1 in
/// its first column, so dq is half of the derivative there, and `t(h, kv)` has plus and minus the half.
pub(crate) fn kinks_follow_the_documented_convention<R: Runtime>(on: &R)
where
    R::Buffer: Any + PartialEq,
{
    let heads = KINKS.len();
    let branches: Vec<String> = KINKS
        .iter()
        .enumerate()
        .map(|(h, (text, ..))| format!("if (h == {h}) {{ return {text}; }}\n"))
        .collect();
    let text = format!(
        "fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 {{\n{}return score;\n}}",
        branches.concat()
    );
    let table: Capture = Capture::f32("t", &vec![0.0; 2 * heads], &[heads, 2]).unwrap().into();
    let attention = Attention::new().scale(1.0).score_mod(ScoreMod::from_wgsl(&text, &[table], &[]).unwrap());
    let first = [1.0, 0.0, 0.0, 0.0];
    let upload = |values: &[f32], shape| Tensor::upload(on, values, shape).unwrap();
    let q = upload(&vec![0.0; 4 * heads], [1, heads, 1, 4]);
    let k = upload(&[first, [0.0; 4]].concat(), [1, 1, 2, 4]);
    let v = upload(&[first, first.map(|x| -x)].concat(), [1, 1, 2, 4]);
    let dout = upload(&first.repeat(heads), [1, heads, 1, 4]);
    let output = attention.forward(on, &q, &k, &v).unwrap();
    let saved = Saved::new(&q, &k, &v, &output).unwrap();
    let Gradients { dq, captures, .. } =
        attention.backward(on, &saved, &dout, None, &Wanted::qkv().capture("t")).unwrap();
    let (dq, dt) = (dq.unwrap().read().unwrap(), captures[0].1.read().unwrap());
    // Zeros are exact; exp2 of a score that is not 0 may round the halves.
    let is = |got: &[f32], expected: &[f32]| {
        got.iter().zip(expected).all(|(x, y)| if *y == 0.0 { *x == 0.0 } else { (x - y).abs() < 1e-6 })
    };
    for (h, (text, by_score, by_element)) in KINKS.into_iter().enumerate() {
        let (dq, dt) = (&dq[4 * h..][..4], &dt[2 * h..][..2]);
        assert!(is(dq, &[by_score / 2.0, 0.0, 0.0, 0.0]), "{text}: dq is {dq:?}");
        assert!(is(dt, &[by_element / 2.0, -by_element / 2.0]), "{text}: dt is {dt:?}");
    }
}

#[test]
fn kinks_at_a_score_of_exactly_zero_have_the_documented_derivatives() {
    for gpu in tiers() {
        println!("{}", gpu.tier());
        kinks_follow_the_documented_convention(&gpu);
    }
}
