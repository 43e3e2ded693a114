//! Random expressions written again as a Rust closure would be: with the operators and methods of the views.

use flexattn::expr::{Bool, CaptureDecl, CaptureType, Expr, F32, I32, Input, Op, Score, Type, U32, Value};
use flexattn::{Capture, Scalar, ScoreMod};

use super::random;
use super::values::simplified;

/// What a closure reads an element of: a captured tensor as declared, of one element.
macro_rules! read {
    ($capture:expr, $index:expr) => {{
        let capture = $capture.unwrap();
        match <[I32; 4]>::try_from($index) {
            Ok(index) => capture.at(index),
            Err(index) => match index.as_slice() {
                [] => capture.at([]),
                [a] => capture.at([a.clone()]),
                [a, b] => capture.at([a.clone(), b.clone()]),
                [a, b, c] => capture.at([a.clone(), b.clone(), c.clone()]),
                more => panic!("{} indices", more.len()),
            },
        }
    }};
}

/// The methods and operators that views of numbers share.
macro_rules! compared {
    ($op:expr, $a:expr, $b:expr) => {
        match $op {
            Op::Lt => $a.lt($b),
            Op::Le => $a.le($b),
            Op::Gt => $a.gt($b),
            Op::Ge => $a.ge($b),
            Op::Eq => $a.eq($b),
            Op::Ne => $a.ne($b),
            other => panic!("{other:?} compares nothing"),
        }
    };
}

/// Writes expressions as a closure given `s` would.
struct Closure<'a>(&'a Score);

impl Closure<'_> {
    fn f32(&self, e: &Expr) -> F32 {
        let (a, b, c) = (|| self.f32(&e.args()[0]), || self.f32(&e.args()[1]), || self.f32(&e.args()[2]));
        match e.op() {
            Op::Const(Value::F32(x)) => F32::from(*x),
            Op::Input(Input::Score) => self.0.score(),
            Op::Scalar(decl) => Scalar::f32(&decl.name, 1.0).unwrap().get(),
            Op::Gather(decl) => self.element(decl, e.args()),
            Op::Neg => -a(),
            Op::Abs => a().abs(),
            Op::Sign => a().sign(),
            Op::Floor => a().floor(),
            Op::Ceil => a().ceil(),
            Op::Round => a().round(),
            Op::Trunc => a().trunc(),
            Op::Fract => a().fract(),
            Op::Sqrt => a().sqrt(),
            Op::Exp => a().exp(),
            Op::Exp2 => a().exp2(),
            Op::Log => a().log(),
            Op::Log2 => a().log2(),
            Op::Sin => a().sin(),
            Op::Cos => a().cos(),
            Op::Tan => a().tan(),
            Op::Tanh => a().tanh(),
            Op::Sigmoid => a().sigmoid(),
            Op::Add => a() + b(),
            Op::Sub => a() - b(),
            Op::Mul => a() * b(),
            Op::Div => a() / b(),
            Op::Min => a().min(b()),
            Op::Max => a().max(b()),
            Op::Pow => a().pow(b()),
            Op::Clamp => a().clamp(b(), c()),
            Op::Select => self.bool(&e.args()[0]).select(b(), c()),
            Op::ToF32 => match e.args()[0].ty() {
                Type::I32 => self.i32(&e.args()[0]).to_f32(),
                Type::U32 => self.u32(&e.args()[0]).to_f32(),
                _ => self.bool(&e.args()[0]).to_f32(),
            },
            Op::BitsToF32 => match e.args()[0].ty() {
                Type::I32 => self.i32(&e.args()[0]).bits_to_f32(),
                _ => self.u32(&e.args()[0]).bits_to_f32(),
            },
            other => panic!("{other:?} gives no f32"),
        }
    }

    fn i32(&self, e: &Expr) -> I32 {
        let (a, b, c) = (|| self.i32(&e.args()[0]), || self.i32(&e.args()[1]), || self.i32(&e.args()[2]));
        match e.op() {
            Op::Const(Value::I32(x)) => I32::from(*x),
            Op::Input(Input::Batch) => self.0.batch(),
            Op::Input(Input::Head) => self.0.head(),
            Op::Input(Input::Q) => self.0.q(),
            Op::Input(Input::Kv) => self.0.kv(),
            Op::Input(Input::QLen) => self.0.q_len(),
            Op::Input(Input::KvLen) => self.0.kv_len(),
            Op::Scalar(decl) => Scalar::i32(&decl.name, 1).unwrap().get(),
            Op::Gather(decl) => read!(Capture::i32(&decl.name, &[0], &ones(decl)), self.index(e.args())),
            Op::Neg => -a(),
            Op::WrappingNeg => a().wrapping_neg(),
            Op::Not => !a(),
            Op::Abs => a().abs(),
            Op::Sign => a().sign(),
            Op::CountOneBits => a().count_ones(),
            Op::Add => a() + b(),
            Op::Sub => a() - b(),
            Op::Mul => a() * b(),
            Op::Div => a() / b(),
            Op::Rem => a() % b(),
            Op::WrappingAdd => a().wrapping_add(b()),
            Op::WrappingSub => a().wrapping_sub(b()),
            Op::WrappingMul => a().wrapping_mul(b()),
            Op::FloorDiv => a().floor_div(b()),
            Op::FloorMod => a().floor_mod(b()),
            Op::Min => a().min(b()),
            Op::Max => a().max(b()),
            Op::And => a() & b(),
            Op::Or => a() | b(),
            Op::Xor => a() ^ b(),
            Op::Shl => a() << self.u32(&e.args()[1]),
            Op::Shr => a() >> self.u32(&e.args()[1]),
            Op::Clamp => a().clamp(b(), c()),
            Op::Select => self.bool(&e.args()[0]).select(b(), c()),
            Op::ToI32 => match e.args()[0].ty() {
                Type::F32 => self.f32(&e.args()[0]).to_i32(),
                Type::U32 => self.u32(&e.args()[0]).to_i32(),
                _ => self.bool(&e.args()[0]).to_i32(),
            },
            Op::BitsToI32 => self.f32(&e.args()[0]).bits_to_i32(),
            other => panic!("{other:?} gives no i32"),
        }
    }

    fn u32(&self, e: &Expr) -> U32 {
        let (a, b, c) = (|| self.u32(&e.args()[0]), || self.u32(&e.args()[1]), || self.u32(&e.args()[2]));
        match e.op() {
            Op::Const(Value::U32(x)) => U32::from(*x),
            Op::Scalar(decl) => Scalar::u32(&decl.name, 1).unwrap().get(),
            Op::Gather(decl) => read!(Capture::u32(&decl.name, &[0], &ones(decl)), self.index(e.args())),
            Op::Not => !a(),
            Op::CountOneBits => a().count_ones(),
            Op::Add => a() + b(),
            Op::Sub => a() - b(),
            Op::Mul => a() * b(),
            Op::Div => a() / b(),
            Op::Rem => a() % b(),
            Op::WrappingAdd => a().wrapping_add(b()),
            Op::WrappingSub => a().wrapping_sub(b()),
            Op::WrappingMul => a().wrapping_mul(b()),
            Op::Min => a().min(b()),
            Op::Max => a().max(b()),
            Op::And => a() & b(),
            Op::Or => a() | b(),
            Op::Xor => a() ^ b(),
            Op::Shl => a() << b(),
            Op::Shr => a() >> b(),
            Op::Clamp => a().clamp(b(), c()),
            Op::Select => self.bool(&e.args()[0]).select(b(), c()),
            Op::ToU32 => match e.args()[0].ty() {
                Type::F32 => self.f32(&e.args()[0]).to_u32(),
                Type::I32 => self.i32(&e.args()[0]).to_u32(),
                _ => self.bool(&e.args()[0]).to_u32(),
            },
            Op::BitsToU32 => self.f32(&e.args()[0]).bits_to_u32(),
            other => panic!("{other:?} gives no u32"),
        }
    }

    fn bool(&self, e: &Expr) -> Bool {
        let (a, b, c) = (|| self.bool(&e.args()[0]), || self.bool(&e.args()[1]), || self.bool(&e.args()[2]));
        match (e.op(), e.args().first().map(Expr::ty)) {
            (Op::Const(Value::Bool(x)), _) => Bool::from(*x),
            (Op::Gather(decl), _) => {
                read!(Capture::bool(&decl.name, &[false], &ones(decl)), self.index(e.args()))
            }
            (Op::Select, _) => a().select(b(), c()),
            (Op::ToBool, Some(Type::F32)) => self.f32(&e.args()[0]).to_bool(),
            (Op::ToBool, Some(Type::I32)) => self.i32(&e.args()[0]).to_bool(),
            (Op::ToBool, _) => self.u32(&e.args()[0]).to_bool(),
            (op, Some(Type::F32)) => compared!(op, self.f32(&e.args()[0]), self.f32(&e.args()[1])),
            (op, Some(Type::I32)) => compared!(op, self.i32(&e.args()[0]), self.i32(&e.args()[1])),
            (op, Some(Type::U32)) => compared!(op, self.u32(&e.args()[0]), self.u32(&e.args()[1])),
            (Op::Not, _) => !a(),
            (Op::And, _) => a() & b(),
            (Op::Or, _) => a() | b(),
            (Op::Xor, _) => a() ^ b(),
            (Op::Eq, _) => a().eq(b()),
            (Op::Ne, _) => a().ne(b()),
            (other, _) => panic!("{other:?} gives no bool"),
        }
    }

    fn index(&self, args: &[Expr]) -> Vec<I32> {
        args.iter().map(|arg| self.i32(arg)).collect()
    }

    fn element(&self, decl: &CaptureDecl, args: &[Expr]) -> F32 {
        let (name, shape, index) = (&decl.name, ones(decl), self.index(args));
        match decl.dtype {
            CaptureType::F16 => read!(Capture::f16(name, &[half::f16::ONE], &shape), index),
            CaptureType::BF16 => read!(Capture::bf16(name, &[half::bf16::ONE], &shape), index),
            _ => read!(Capture::f32(name, &[1.0], &shape), index),
        }
    }
}

fn ones(decl: &CaptureDecl) -> Vec<usize> {
    vec![1; usize::from(decl.rank)]
}

proptest::proptest! {
    #![proptest_config(random::config(600))]

    #[test]
    fn a_closure_gives_the_expression_that_it_spells(expr in random::expr(Type::F32, 5)) {
        let written = ScoreMod::new(|s| Closure(s).f32(&expr));
        let simple = simplified(&expr);
        proptest::prop_assert_eq!(written.expr(), &simple, "{}", simple);
    }
}
