//! Every operation of the language, and the floats that each of them takes.

use std::collections::BTreeSet;

use flexattn::expr::{Expr, Input, Op, ScalarDecl, Type};
use flexattn::{Capture, ScoreMod};
use flexattn_testing::problem::Numbers;

/// Every operation that has arguments, but for reads of captured tensors.
pub(crate) const OPS: [Op; 54] = [
    Op::Neg,
    Op::WrappingNeg,
    Op::Not,
    Op::Abs,
    Op::Sign,
    Op::Floor,
    Op::Ceil,
    Op::Round,
    Op::Trunc,
    Op::Fract,
    Op::Sqrt,
    Op::Exp,
    Op::Exp2,
    Op::Log,
    Op::Log2,
    Op::Sin,
    Op::Cos,
    Op::Tan,
    Op::Tanh,
    Op::Sigmoid,
    Op::CountOneBits,
    Op::Add,
    Op::Sub,
    Op::Mul,
    Op::Div,
    Op::Rem,
    Op::WrappingAdd,
    Op::WrappingSub,
    Op::WrappingMul,
    Op::FloorDiv,
    Op::FloorMod,
    Op::Min,
    Op::Max,
    Op::Pow,
    Op::And,
    Op::Or,
    Op::Xor,
    Op::Shl,
    Op::Shr,
    Op::Lt,
    Op::Le,
    Op::Gt,
    Op::Ge,
    Op::Eq,
    Op::Ne,
    Op::Select,
    Op::Clamp,
    Op::ToF32,
    Op::ToI32,
    Op::ToU32,
    Op::ToBool,
    Op::BitsToF32,
    Op::BitsToI32,
    Op::BitsToU32,
];

/// Those that make a float of floats, with the types of their arguments.
pub(crate) fn of_floats() -> Vec<(Op, Vec<Type>)> {
    use Type::{Bool, F32};
    let shapes = [&[F32][..], &[F32, F32], &[F32, F32, F32], &[Bool, F32, F32]];
    let leaf = |ty: &Type| match ty {
        Bool => Expr::constant(true),
        _ => Expr::scalar(ScalarDecl { name: "x".into(), ty: F32 }),
    };
    let mut found = Vec::new();
    for op in OPS {
        for types in shapes {
            let args: Vec<Expr> = types.iter().map(leaf).collect();
            if Expr::exact(op.clone(), &args).is_ok_and(|made| made.ty() == F32) {
                found.push((op.clone(), types.to_vec()));
            }
        }
    }
    found
}

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

/// The sum of these operations, each of the score and of elements by row (20) and by column (24).
pub(crate) fn sum_of(ops: &[(Op, Vec<Type>)]) -> ScoreMod {
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

/// At a score of exactly 0 with `t` = 0: the expression, its derivative by the score, and by the element
/// `t(h, kv)` that it reads.
pub(crate) const KINKS: [(&str, f32, f32); 22] = [
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

#[test]
fn the_list_of_operations_has_all_that_the_language_has() {
    let text = include_str!("../../src/expr/op.rs");
    let body = text.split("pub enum Op {").nth(1).unwrap().split("\n}\n").next().unwrap();
    let lines = body.lines().map(str::trim).filter(|line| line.ends_with(',') && !line.starts_with("//"));
    let declared: BTreeSet<String> = lines.map(|line| line.trim_end_matches(',').to_owned()).collect();
    let leaves = ["Const(Value)", "Input(Input)", "Scalar(ScalarDecl)", "Gather(CaptureDecl)"];
    let listed = OPS.iter().map(|op| format!("{op:?}")).chain(leaves.map(str::to_owned));
    assert_eq!(listed.collect::<BTreeSet<String>>(), declared);
    assert_eq!(of_floats().len(), 28);
}
