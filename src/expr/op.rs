//! The operations: one record each, with its types, its value, its range and its derivative.

use std::f32::consts::LN_2;

use xxhash_rust::xxh3::Xxh3;

use super::capture::{CaptureDecl, ScalarDecl};
use super::derivative::{self, Slope};
use super::range::{self, RangeFn};
use super::value::{Column, Element, Float, Type, Value};
use super::{Expr, Input};
use crate::error::{Error, Result};

/// The most arguments that an operation takes: a capture has at most four dimensions.
pub(crate) const MAX_ARGS: usize = 4;

/// An operation. Arguments are named a, b, c below; the types that each accepts follow it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// A constant of any type.
    Const(Value),
    /// What the kernel gives: score or an index.
    Input(Input),
    /// A named value that may change from run to run without a new kernel.
    Scalar(ScalarDecl),
    /// An element of a captured tensor; one i32 index per dimension, each clamped.
    Gather(CaptureDecl),

    /// -a (f32; i32, refused when it overflows).
    Neg,
    /// -a (i32, wraps).
    WrappingNeg,
    /// !a (bool), ~a (i32, u32).
    Not,
    /// Absolute value (f32; i32, where MIN stays MIN; u32).
    Abs,
    /// -1, 0 or 1 (f32, i32).
    Sign,
    /// Largest whole number not above a (f32).
    Floor,
    /// Smallest whole number not below a (f32).
    Ceil,
    /// Nearest whole number, half to even (f32).
    Round,
    /// Towards zero (f32).
    Trunc,
    /// a - floor(a) (f32).
    Fract,
    /// Square root (f32).
    Sqrt,
    /// e to the a (f32).
    Exp,
    /// 2 to the a (f32).
    Exp2,
    /// Natural logarithm (f32).
    Log,
    /// Logarithm to base 2 (f32).
    Log2,
    /// Sine, in radians (f32).
    Sin,
    /// Cosine, in radians (f32).
    Cos,
    /// Tangent, in radians (f32).
    Tan,
    /// Hyperbolic tangent (f32).
    Tanh,
    /// 1 / (1 + exp(-a)) (f32).
    Sigmoid,
    /// Number of one bits (i32, u32).
    CountOneBits,

    /// a + b (f32; i32, u32, refused when it overflows).
    Add,
    /// a - b (f32; i32, u32, refused when it overflows).
    Sub,
    /// a * b (f32; i32, u32, refused when it overflows).
    Mul,
    /// a / b (f32; i32, u32 truncate, x / 0 = x).
    Div,
    /// Remainder with the sign of a (i32, u32), x % 0 = 0.
    Rem,
    /// a + b (i32, u32, wraps).
    WrappingAdd,
    /// a - b (i32, u32, wraps).
    WrappingSub,
    /// a * b (i32, u32, wraps).
    WrappingMul,
    /// Python's a // b (i32).
    FloorDiv,
    /// Python's a % b (i32).
    FloorMod,
    /// The smaller (f32, i32, u32).
    Min,
    /// The larger (f32, i32, u32).
    Max,
    /// a to the b (f32); of a < 0 it has a value where b is whole.
    Pow,
    /// Both (bool), bitwise (i32, u32).
    And,
    /// Either (bool), bitwise (i32, u32).
    Or,
    /// One but not both (bool), bitwise (i32, u32).
    Xor,
    /// a << (b % 32) (i32, u32; b is u32).
    Shl,
    /// a >> (b % 32), keeping the sign of an i32 (i32, u32; b is u32).
    Shr,

    /// a < b (f32, i32, u32), a bool.
    Lt,
    /// a <= b (f32, i32, u32), a bool.
    Le,
    /// a > b (f32, i32, u32), a bool.
    Gt,
    /// a >= b (f32, i32, u32), a bool.
    Ge,
    /// a == b (any type), a bool.
    Eq,
    /// a != b (any type), a bool.
    Ne,

    /// b if a else c: a is bool, b and c have one type.
    Select,
    /// min(max(a, b), c) (f32, i32, u32).
    Clamp,

    /// To f32 (i32, u32, bool).
    ToF32,
    /// To i32 (f32 saturates; u32 keeps the bits; bool).
    ToI32,
    /// To u32 (f32 saturates; i32 keeps the bits; bool).
    ToU32,
    /// a != 0 (f32, i32, u32).
    ToBool,
    /// The same bits as f32 (i32, u32).
    BitsToF32,
    /// The same bits as i32 (f32).
    BitsToI32,
    /// The same bits as u32 (f32).
    BitsToU32,
}

/// Computes a column from argument columns; every argument is at least as long as the result.
pub(crate) type Kernel<F> = Box<dyn Fn(&[&Column<F>], &mut Column<F>) + Send + Sync>;

/// What an operation is, for given argument types.
pub(crate) struct Record<F> {
    /// The type of the result.
    pub(crate) ty: Type,
    /// The value.
    pub(crate) kernel: Kernel<F>,
    /// What it may be when the arguments vary.
    pub(crate) range: RangeFn,
    /// The derivative; nothing where it is 0 everywhere.
    pub(crate) slope: Option<Slope>,
}

impl<F> Record<F> {
    fn slope(mut self, slope: Slope) -> Record<F> {
        self.slope = Some(slope);
        self
    }
}

fn map1<F: Float, A: Element<F>, R: Element<F>>(
    f: impl Fn(A) -> R + Copy + Send + Sync + 'static,
    range: RangeFn,
) -> Record<F> {
    let kernel = move |args: &[&Column<F>], out: &mut Column<F>| {
        for (out, a) in R::of_mut(out).iter_mut().zip(A::of(args[0])) {
            *out = f(*a);
        }
    };
    Record { ty: R::TYPE, kernel: Box::new(kernel), range, slope: None }
}

fn map2<F: Float, A: Element<F>, B: Element<F>, R: Element<F>>(
    f: impl Fn(A, B) -> R + Copy + Send + Sync + 'static,
    range: RangeFn,
) -> Record<F> {
    let kernel = move |args: &[&Column<F>], out: &mut Column<F>| {
        for ((out, a), b) in R::of_mut(out).iter_mut().zip(A::of(args[0])).zip(B::of(args[1])) {
            *out = f(*a, *b);
        }
    };
    Record { ty: R::TYPE, kernel: Box::new(kernel), range, slope: None }
}

fn map3<F: Float, A: Element<F>, B: Element<F>, C: Element<F>, R: Element<F>>(
    f: impl Fn(A, B, C) -> R + Copy + Send + Sync + 'static,
    range: RangeFn,
) -> Record<F> {
    let kernel = move |args: &[&Column<F>], out: &mut Column<F>| {
        let columns = A::of(args[0]).iter().zip(B::of(args[1])).zip(C::of(args[2]));
        for (out, ((a, b), c)) in R::of_mut(out).iter_mut().zip(columns) {
            *out = f(*a, *b, *c);
        }
    };
    Record { ty: R::TYPE, kernel: Box::new(kernel), range, slope: None }
}

impl Op {
    /// The record of the operation for these argument types, or nothing where it does not take them.
    /// Leaves and gathers have none: their value comes from the environment.
    pub(crate) fn record<F: Float>(&self, types: &[Type]) -> Option<Record<F>> {
        use Type::{Bool, F32, I32, U32};
        Some(match (self, types) {
            (Op::Const(_) | Op::Input(_) | Op::Scalar(_) | Op::Gather(_), _) => return None,

            (Op::Neg, [F32]) => map1(|a: F| -a, range::neg_f32).slope(|d| d.slopes([-d.g()])),
            (Op::Neg | Op::WrappingNeg, [I32]) => map1(i32::wrapping_neg, range::neg_i32),
            (Op::Not, [Bool]) => map1(|a: bool| !a, range::not_bool),
            (Op::Not, [I32]) => map1(|a: i32| !a, range::not_i32),
            (Op::Not, [U32]) => map1(|a: u32| !a, range::not_u32),
            (Op::Abs, [F32]) => map1(F::abs, range::abs_f32).slope(|d| d.slopes([d.g() * d.arg(0).sign()])),
            (Op::Abs, [I32]) => map1(i32::wrapping_abs, range::abs_i32),
            (Op::Abs, [U32]) => map1(|a: u32| a, range::same),
            (Op::Sign, [F32]) => map1(sign::<F>, range::sign),
            (Op::Sign, [I32]) => map1(i32::signum, range::sign),
            (Op::Floor, [F32]) => map1(F::floor, range::floor),
            (Op::Ceil, [F32]) => map1(F::ceil, range::ceil),
            (Op::Round, [F32]) => map1(F::round, range::round),
            (Op::Trunc, [F32]) => map1(F::trunc, range::trunc),
            (Op::Fract, [F32]) => map1(|a: F| a - a.floor(), range::fract).slope(|d| d.slopes([d.g()])),
            (Op::Sqrt, [F32]) => map1(F::sqrt, range::sqrt).slope(|d| d.slopes([d.g() * 0.5 / d.out()])),
            (Op::Exp, [F32]) => map1(F::exp, range::exp).slope(|d| d.slopes([d.g() * d.out()])),
            (Op::Exp2, [F32]) => map1(F::exp2, range::exp2).slope(|d| d.slopes([d.g() * (d.out() * LN_2)])),
            (Op::Log, [F32]) => map1(F::log, range::log).slope(|d| d.slopes([d.g() / d.arg(0)])),
            (Op::Log2, [F32]) => map1(F::log2, range::log2).slope(|d| d.slopes([d.g() / (d.arg(0) * LN_2)])),
            (Op::Sin, [F32]) => map1(F::sin, range::wave).slope(|d| d.slopes([d.g() * d.arg(0).cos()])),
            (Op::Cos, [F32]) => map1(F::cos, range::wave).slope(|d| d.slopes([-(d.g() * d.arg(0).sin())])),
            (Op::Tan, [F32]) => {
                map1(F::tan, range::any_f32).slope(|d| d.slopes([d.g() * (d.out() * d.out() + 1.0)]))
            }
            (Op::Tanh, [F32]) => {
                map1(F::tanh, range::tanh).slope(|d| d.slopes([d.g() * (1.0 - d.out() * d.out())]))
            }
            (Op::Sigmoid, [F32]) => map1(|a: F| F::of(1.0) / (F::of(1.0) + (-a).exp()), range::sigmoid)
                .slope(|d| d.slopes([d.g() * (d.out() * (1.0 - d.out()))])),
            (Op::CountOneBits, [I32]) => map1(|a: i32| a.count_ones() as i32, range::bit_count),
            (Op::CountOneBits, [U32]) => map1(u32::count_ones, range::bit_count),

            (Op::Add, [F32, F32]) => {
                map2(|a: F, b: F| a + b, range::add_f32).slope(|d| d.slopes([d.g(), d.g()]))
            }
            (Op::Add | Op::WrappingAdd, [I32, I32]) => map2(i32::wrapping_add, range::add_i32),
            (Op::Add | Op::WrappingAdd, [U32, U32]) => map2(u32::wrapping_add, range::add_u32),
            (Op::Sub, [F32, F32]) => {
                map2(|a: F, b: F| a - b, range::sub_f32).slope(|d| d.slopes([d.g(), -d.g()]))
            }
            (Op::Sub | Op::WrappingSub, [I32, I32]) => map2(i32::wrapping_sub, range::sub_i32),
            (Op::Sub | Op::WrappingSub, [U32, U32]) => map2(u32::wrapping_sub, range::sub_u32),
            (Op::Mul, [F32, F32]) => map2(|a: F, b: F| a * b, range::mul_f32)
                .slope(|d| d.slopes([d.g() * d.arg(1), d.g() * d.arg(0)])),
            (Op::Mul | Op::WrappingMul, [I32, I32]) => map2(i32::wrapping_mul, range::mul_i32),
            (Op::Mul | Op::WrappingMul, [U32, U32]) => map2(u32::wrapping_mul, range::mul_u32),
            (Op::Div, [F32, F32]) => map2(|a: F, b: F| a / b, range::div_f32)
                .slope(|d| d.slopes([d.g() / d.arg(1), -(d.g() * d.out() / d.arg(1))])),
            (Op::Div, [I32, I32]) => {
                map2(|a: i32, b: i32| if b == 0 { a } else { a.wrapping_div(b) }, range::div_i32)
            }
            (Op::Div, [U32, U32]) => map2(|a: u32, b: u32| a.checked_div(b).unwrap_or(a), range::div_u32),
            (Op::Rem, [I32, I32]) => {
                map2(|a: i32, b: i32| if b == 0 { 0 } else { a.wrapping_rem(b) }, range::rem)
            }
            (Op::Rem, [U32, U32]) => map2(|a: u32, b: u32| a.checked_rem(b).unwrap_or(0), range::rem),
            (Op::FloorDiv, [I32, I32]) => map2(floor_div, range::floor_div),
            (Op::FloorMod, [I32, I32]) => map2(floor_mod, range::floor_mod),
            (Op::Min, [F32, F32]) => map2(F::min, range::min).slope(derivative::min),
            (Op::Min, [I32, I32]) => map2(|a: i32, b: i32| a.min(b), range::min),
            (Op::Min, [U32, U32]) => map2(|a: u32, b: u32| a.min(b), range::min),
            (Op::Max, [F32, F32]) => map2(F::max, range::max).slope(derivative::max),
            (Op::Max, [I32, I32]) => map2(|a: i32, b: i32| a.max(b), range::max),
            (Op::Max, [U32, U32]) => map2(|a: u32, b: u32| a.max(b), range::max),
            (Op::Pow, [F32, F32]) => map2(F::pow, range::pow).slope(derivative::pow),
            (Op::And, [Bool, Bool]) => map2(|a: bool, b: bool| a & b, range::and_bool),
            (Op::And, [I32, I32]) => map2(|a: i32, b: i32| a & b, range::and_i32),
            (Op::And, [U32, U32]) => map2(|a: u32, b: u32| a & b, range::and_u32),
            (Op::Or, [Bool, Bool]) => map2(|a: bool, b: bool| a | b, range::or_bool),
            (Op::Or, [I32, I32]) => map2(|a: i32, b: i32| a | b, range::or_i32),
            (Op::Or, [U32, U32]) => map2(|a: u32, b: u32| a | b, range::or_u32),
            (Op::Xor, [Bool, Bool]) => map2(|a: bool, b: bool| a ^ b, range::xor_bool),
            (Op::Xor, [I32, I32]) => map2(|a: i32, b: i32| a ^ b, range::xor_i32),
            (Op::Xor, [U32, U32]) => map2(|a: u32, b: u32| a ^ b, range::xor_u32),
            (Op::Shl, [I32, U32]) => map2(i32::wrapping_shl, range::shl_i32),
            (Op::Shl, [U32, U32]) => map2(u32::wrapping_shl, range::shl_u32),
            (Op::Shr, [I32, U32]) => map2(i32::wrapping_shr, range::shr_i32),
            (Op::Shr, [U32, U32]) => map2(u32::wrapping_shr, range::shr_u32),

            (Op::Lt, [F32, F32]) => map2(|a: F, b: F| a < b, range::lt),
            (Op::Lt, [I32, I32]) => map2(|a: i32, b: i32| a < b, range::lt),
            (Op::Lt, [U32, U32]) => map2(|a: u32, b: u32| a < b, range::lt),
            (Op::Le, [F32, F32]) => map2(|a: F, b: F| a <= b, range::le),
            (Op::Le, [I32, I32]) => map2(|a: i32, b: i32| a <= b, range::le),
            (Op::Le, [U32, U32]) => map2(|a: u32, b: u32| a <= b, range::le),
            (Op::Gt, [F32, F32]) => map2(|a: F, b: F| a > b, range::gt),
            (Op::Gt, [I32, I32]) => map2(|a: i32, b: i32| a > b, range::gt),
            (Op::Gt, [U32, U32]) => map2(|a: u32, b: u32| a > b, range::gt),
            (Op::Ge, [F32, F32]) => map2(|a: F, b: F| a >= b, range::ge),
            (Op::Ge, [I32, I32]) => map2(|a: i32, b: i32| a >= b, range::ge),
            (Op::Ge, [U32, U32]) => map2(|a: u32, b: u32| a >= b, range::ge),
            (Op::Eq, [F32, F32]) => map2(|a: F, b: F| a == b, range::eq),
            (Op::Eq, [I32, I32]) => map2(|a: i32, b: i32| a == b, range::eq),
            (Op::Eq, [U32, U32]) => map2(|a: u32, b: u32| a == b, range::eq),
            (Op::Eq, [Bool, Bool]) => map2(|a: bool, b: bool| a == b, range::eq),
            (Op::Ne, [F32, F32]) => map2(|a: F, b: F| a != b, range::ne),
            (Op::Ne, [I32, I32]) => map2(|a: i32, b: i32| a != b, range::ne),
            (Op::Ne, [U32, U32]) => map2(|a: u32, b: u32| a != b, range::ne),
            (Op::Ne, [Bool, Bool]) => map2(|a: bool, b: bool| a != b, range::ne),

            (Op::Select, [Bool, F32, F32]) => {
                map3(|a: bool, b: F, c: F| if a { b } else { c }, range::select).slope(derivative::select)
            }
            (Op::Select, [Bool, I32, I32]) => {
                map3(|a: bool, b: i32, c: i32| if a { b } else { c }, range::select)
            }
            (Op::Select, [Bool, U32, U32]) => {
                map3(|a: bool, b: u32, c: u32| if a { b } else { c }, range::select)
            }
            (Op::Select, [Bool, Bool, Bool]) => {
                map3(|a: bool, b: bool, c: bool| if a { b } else { c }, range::select)
            }
            (Op::Clamp, [F32, F32, F32]) => {
                map3(|a: F, b: F, c: F| a.max(b).min(c), range::clamp).slope(derivative::clamp)
            }
            (Op::Clamp, [I32, I32, I32]) => map3(|a: i32, b: i32, c: i32| a.max(b).min(c), range::clamp),
            (Op::Clamp, [U32, U32, U32]) => map3(|a: u32, b: u32, c: u32| a.max(b).min(c), range::clamp),

            (Op::ToF32, [F32]) => map1(|a: F| a, range::same).slope(|d| d.slopes([d.g()])),
            (Op::ToF32, [I32]) => map1(F::of_i32, range::to_f32),
            (Op::ToF32, [U32]) => map1(F::of_u32, range::to_f32),
            (Op::ToF32, [Bool]) => map1(|a: bool| F::of(u8::from(a).into()), range::same),
            (Op::ToI32, [F32]) => map1(F::to_i32, range::f32_to_i32),
            (Op::ToI32, [I32]) => map1(|a: i32| a, range::same),
            (Op::ToI32, [U32]) => map1(|a: u32| a as i32, range::u32_to_i32),
            (Op::ToI32, [Bool]) => map1(|a: bool| i32::from(a), range::same),
            (Op::ToU32, [F32]) => map1(F::to_u32, range::f32_to_u32),
            (Op::ToU32, [I32]) => map1(|a: i32| a as u32, range::i32_to_u32),
            (Op::ToU32, [U32]) => map1(|a: u32| a, range::same),
            (Op::ToU32, [Bool]) => map1(|a: bool| u32::from(a), range::same),
            (Op::ToBool, [F32]) => map1(|a: F| a != F::of(0.0), range::to_bool),
            (Op::ToBool, [I32]) => map1(|a: i32| a != 0, range::to_bool),
            (Op::ToBool, [U32]) => map1(|a: u32| a != 0, range::to_bool),
            (Op::ToBool, [Bool]) => map1(|a: bool| a, range::same),
            (Op::BitsToF32, [I32]) => map1(|a: i32| F::of(f32::from_bits(a as u32)), range::any_f32),
            (Op::BitsToF32, [U32]) => map1(|a: u32| F::of(f32::from_bits(a)), range::any_f32),
            (Op::BitsToI32, [F32]) => map1(|a: F| a.to_f32().to_bits() as i32, range::any_i32),
            (Op::BitsToU32, [F32]) => map1(|a: F| a.to_f32().to_bits(), range::any_u32),
            _ => return None,
        })
    }

    /// The name in messages and hashes; WGSL's, where it has the operation.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Const(_) => "constant",
            Op::Input(_) => "input",
            Op::Scalar(_) => "scalar",
            Op::Gather(_) => "capture",
            Op::Neg => "-",
            Op::WrappingNeg => "wrapping_neg",
            Op::Not => "!",
            Op::Abs => "abs",
            Op::Sign => "sign",
            Op::Floor => "floor",
            Op::Ceil => "ceil",
            Op::Round => "round",
            Op::Trunc => "trunc",
            Op::Fract => "fract",
            Op::Sqrt => "sqrt",
            Op::Exp => "exp",
            Op::Exp2 => "exp2",
            Op::Log => "log",
            Op::Log2 => "log2",
            Op::Sin => "sin",
            Op::Cos => "cos",
            Op::Tan => "tan",
            Op::Tanh => "tanh",
            Op::Sigmoid => "sigmoid",
            Op::CountOneBits => "countOneBits",
            Op::Add => "+",
            Op::Sub => "binary -",
            Op::Mul => "*",
            Op::Div => "/",
            Op::Rem => "%",
            Op::WrappingAdd => "wrapping_add",
            Op::WrappingSub => "wrapping_sub",
            Op::WrappingMul => "wrapping_mul",
            Op::FloorDiv => "floor_div",
            Op::FloorMod => "floor_mod",
            Op::Min => "min",
            Op::Max => "max",
            Op::Pow => "pow",
            Op::And => "&",
            Op::Or => "|",
            Op::Xor => "^",
            Op::Shl => "<<",
            Op::Shr => ">>",
            Op::Lt => "<",
            Op::Le => "<=",
            Op::Gt => ">",
            Op::Ge => ">=",
            Op::Eq => "==",
            Op::Ne => "!=",
            Op::Select => "select",
            Op::Clamp => "clamp",
            Op::ToF32 => "f32",
            Op::ToI32 => "i32",
            Op::ToU32 => "u32",
            Op::ToBool => "bool",
            Op::BitsToF32 => "bitcast<f32>",
            Op::BitsToI32 => "bitcast<i32>",
            Op::BitsToU32 => "bitcast<u32>",
        }
    }

    /// The type of the result for these argument types.
    pub(crate) fn result_type(&self, types: &[Type]) -> Result<Type> {
        match self {
            Op::Const(value) if types.is_empty() => return Ok(value.ty()),
            Op::Input(input) if types.is_empty() => return Ok(input.ty()),
            Op::Scalar(decl) if types.is_empty() => return Ok(decl.ty),
            Op::Gather(decl) => {
                if types.len() != usize::from(decl.rank) || types.iter().any(|ty| *ty != Type::I32) {
                    return Err(Error::Expression(format!(
                        "capture {} has rank {} and takes {} of type i32, but was called with ({})",
                        decl.name,
                        decl.rank,
                        if decl.rank == 1 { "1 index".into() } else { format!("{} indices", decl.rank) },
                        list(types)
                    )));
                }
                return Ok(decl.dtype.ty());
            }
            _ => {}
        }
        match self.record::<f32>(types) {
            Some(record) => Ok(record.ty),
            None => Err(Error::Expression(format!(
                "{} is not defined for ({}); convert with f32(), i32(), u32() or bool()",
                self.name(),
                list(types)
            ))),
        }
    }

    /// The hash of this operation applied to `args`.
    pub(crate) fn content_hash(&self, args: &[Expr]) -> u128 {
        let mut hasher = Xxh3::new();
        hasher.update(self.name().as_bytes());
        match self {
            Op::Const(value) => {
                hasher.update(&[value.ty() as u8]);
                hasher.update(&value.bits().to_le_bytes());
            }
            Op::Input(input) => hasher.update(&[*input as u8]),
            Op::Scalar(decl) => {
                hasher.update(&[decl.ty as u8]);
                hasher.update(decl.name.as_bytes());
            }
            Op::Gather(decl) => {
                hasher.update(&[decl.dtype as u8, decl.rank]);
                hasher.update(decl.name.as_bytes());
            }
            _ => {}
        }
        for arg in args {
            hasher.update(&arg.hash().to_le_bytes());
        }
        hasher.digest128()
    }
}

fn list(types: &[Type]) -> String {
    types.iter().map(Type::to_string).collect::<Vec<_>>().join(", ")
}

fn sign<F: Float>(a: F) -> F {
    let zero = F::of(0.0);
    if a > zero {
        F::of(1.0)
    } else if a < zero {
        F::of(-1.0)
    } else {
        // 0 and NaN stay as they are.
        a
    }
}

fn floor_div(a: i32, b: i32) -> i32 {
    if b == 0 {
        return a;
    }
    let quotient = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
}

fn floor_mod(a: i32, b: i32) -> i32 {
    if b == 0 {
        return 0;
    }
    let rest = a.wrapping_rem(b);
    if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
}
