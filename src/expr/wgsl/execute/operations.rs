//! naga's operators, conversions and functions in terms of ours.

use naga::{BinaryOperator, MathFunction, ScalarKind, Span};

use super::Run;
use crate::error::Result;
use crate::expr::value::Type;
use crate::expr::{Expr, Op};

impl Run<'_> {
    pub(super) fn binary(&self, op: BinaryOperator, a: Expr, b: Expr, span: Span) -> Result<Expr> {
        let op = match op {
            BinaryOperator::Add => Op::Add,
            BinaryOperator::Subtract => Op::Sub,
            BinaryOperator::Multiply => Op::Mul,
            BinaryOperator::Divide => Op::Div,
            BinaryOperator::Modulo if a.ty() == Type::F32 && b.ty() == Type::F32 => {
                // x - y * trunc(x / y)
                let quotient = self.new_expr(Op::Div, &[a.clone(), b.clone()], span)?;
                let whole = self.new_expr(Op::Trunc, &[quotient], span)?;
                let product = self.new_expr(Op::Mul, &[b, whole], span)?;
                return self.new_expr(Op::Sub, &[a, product], span);
            }
            BinaryOperator::Modulo => Op::Rem,
            BinaryOperator::Equal => Op::Eq,
            BinaryOperator::NotEqual => Op::Ne,
            BinaryOperator::Less => Op::Lt,
            BinaryOperator::LessEqual => Op::Le,
            BinaryOperator::Greater => Op::Gt,
            BinaryOperator::GreaterEqual => Op::Ge,
            BinaryOperator::And | BinaryOperator::LogicalAnd => Op::And,
            BinaryOperator::ExclusiveOr => Op::Xor,
            BinaryOperator::InclusiveOr | BinaryOperator::LogicalOr => Op::Or,
            BinaryOperator::ShiftLeft => Op::Shl,
            BinaryOperator::ShiftRight => Op::Shr,
        };
        self.new_expr(op, &[a, b], span)
    }

    pub(super) fn convert(&self, a: Expr, kind: ScalarKind, width: Option<u8>, span: Span) -> Result<Expr> {
        if width.is_none() {
            self.logical(&a, false, span)?;
        }
        let op = match (kind, width) {
            (ScalarKind::Float, Some(4)) => Op::ToF32,
            (ScalarKind::Sint, Some(4)) => Op::ToI32,
            (ScalarKind::Uint, Some(4)) => Op::ToU32,
            (ScalarKind::Bool, Some(_)) => Op::ToBool,
            // bitcast
            (ScalarKind::Float, None) if a.ty() == Type::F32 => return Ok(a),
            (ScalarKind::Sint, None) if a.ty() == Type::I32 => return Ok(a),
            (ScalarKind::Uint, None) if a.ty() == Type::U32 => return Ok(a),
            (ScalarKind::Float, None) => Op::BitsToF32,
            (ScalarKind::Sint, None) if a.ty() == Type::F32 => Op::BitsToI32,
            (ScalarKind::Uint, None) if a.ty() == Type::F32 => Op::BitsToU32,
            (ScalarKind::Sint, None) => Op::ToI32,
            (ScalarKind::Uint, None) => Op::ToU32,
            _ => return self.refuse(span, "a conversion to this type", "use f32, i32, u32 or bool"),
        };
        self.new_expr(op, &[a], span)
    }

    pub(super) fn math(&self, fun: MathFunction, args: &[Expr], span: Span) -> Result<Expr> {
        let constant = |x: f32| Expr::constant(x);
        let op = match fun {
            MathFunction::Abs => Op::Abs,
            MathFunction::Min => Op::Min,
            MathFunction::Max => Op::Max,
            MathFunction::Clamp => Op::Clamp,
            MathFunction::Cos => Op::Cos,
            MathFunction::Sin => Op::Sin,
            MathFunction::Tan => Op::Tan,
            MathFunction::Tanh => Op::Tanh,
            MathFunction::Ceil => Op::Ceil,
            MathFunction::Floor => Op::Floor,
            MathFunction::Round => Op::Round,
            MathFunction::Fract => Op::Fract,
            MathFunction::Trunc => Op::Trunc,
            MathFunction::Exp => Op::Exp,
            MathFunction::Exp2 => Op::Exp2,
            MathFunction::Log => Op::Log,
            MathFunction::Log2 => Op::Log2,
            MathFunction::Pow => Op::Pow,
            MathFunction::Sign => Op::Sign,
            MathFunction::Sqrt => Op::Sqrt,
            MathFunction::CountOneBits => Op::CountOneBits,
            MathFunction::Saturate => {
                return self.new_expr(Op::Clamp, &[args[0].clone(), constant(0.0), constant(1.0)], span);
            }
            MathFunction::InverseSqrt => {
                let root = self.new_expr(Op::Sqrt, args, span)?;
                return self.new_expr(Op::Div, &[constant(1.0), root], span);
            }
            MathFunction::Radians => {
                return self.new_expr(
                    Op::Mul,
                    &[args[0].clone(), constant(std::f32::consts::PI / 180.0)],
                    span,
                );
            }
            MathFunction::Degrees => {
                return self.new_expr(
                    Op::Mul,
                    &[args[0].clone(), constant(180.0 / std::f32::consts::PI)],
                    span,
                );
            }
            MathFunction::Fma => {
                let product = self.new_expr(Op::Mul, &args[..2], span)?;
                return self.new_expr(Op::Add, &[product, args[2].clone()], span);
            }
            MathFunction::Mix => {
                // a * (1 - t) + b * t
                let rest = self.new_expr(Op::Sub, &[constant(1.0), args[2].clone()], span)?;
                let a = self.new_expr(Op::Mul, &[args[0].clone(), rest], span)?;
                let b = self.new_expr(Op::Mul, &[args[1].clone(), args[2].clone()], span)?;
                return self.new_expr(Op::Add, &[a, b], span);
            }
            MathFunction::Step => {
                let reached = self.new_expr(Op::Le, args, span)?;
                return self.new_expr(Op::Select, &[reached, constant(1.0), constant(0.0)], span);
            }
            _ => {
                let name = format!("the function {fun:?}").to_lowercase();
                return self.refuse(span, &name, "write it with the functions that are, or capture a table");
            }
        };
        self.new_expr(op, args, span)
    }
}
