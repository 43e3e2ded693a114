//! Every operation of the language, and the floats that each of them takes.

use std::collections::BTreeSet;

use flexattn::expr::{Expr, Op, ScalarDecl, Type};

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
