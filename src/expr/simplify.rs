//! Simplification as expressions are built. Every rule keeps the value for every input: for integers that wrap,
//! for division by 0, and for floats with NaN, infinities and both zeros (so `x + 0.0`, `x * 0.0` and `!(a < b)`
//! stay). Arguments are simplified already.

use super::value::{Type, Value};
use super::{Expr, Op};

/// A simpler expression of the same value, if a rule applies. May itself be simplified further.
pub(crate) fn rule(expr: &Expr) -> Option<Expr> {
    let op = expr.op();
    let args = expr.args();
    if args.is_empty() || matches!(op, Op::Gather(_)) {
        return None;
    }
    if args.iter().all(|a| a.as_constant().is_some()) {
        // What overflows stays, so that it can be refused.
        return if overflows(expr) { None } else { expr.fold().map(Expr::constant) };
    }
    match args {
        [a] => unary(op, a),
        [a, b] => match a.ty() {
            Type::Bool => logic(op, a, b),
            Type::F32 => float(op, a, b),
            Type::I32 | Type::U32 => integer(op, a, b),
        },
        [a, b, c] if *op == Op::Select => select(a, b, c),
        _ => None,
    }
}

/// Whether an integer operation that is not meant to wrap does so on these constants.
pub(crate) fn overflows(expr: &Expr) -> bool {
    exact(expr).is_some_and(|x| match expr.ty() {
        Type::I32 => i32::try_from(x).is_err(),
        Type::U32 => u32::try_from(x).is_err(),
        Type::F32 | Type::Bool => false,
    })
}

/// The true result of an integer operation on constants, for the operations that must not overflow.
fn exact(expr: &Expr) -> Option<i128> {
    let number = |i: usize| match expr.args().get(i)?.as_constant()? {
        Value::I32(x) => Some(i128::from(x)),
        Value::U32(x) => Some(i128::from(x)),
        Value::F32(_) | Value::Bool(_) => None,
    };
    exact_value(expr.op(), number(0)?, number(1).unwrap_or(0))
}

/// The true result of `op` for the operations that must not overflow.
pub(crate) fn exact_value(op: &Op, a: i128, b: i128) -> Option<i128> {
    Some(match op {
        Op::Neg => -a,
        Op::Abs => a.abs(),
        Op::Add => a + b,
        Op::Sub => a - b,
        Op::Mul => a * b,
        _ => return None,
    })
}

fn build(op: Op, args: &[Expr]) -> Option<Expr> {
    Expr::new(op, args).ok()
}

/// Whether an expression is this whole number, of whatever type.
fn is(expr: &Expr, number: i32) -> bool {
    match expr.as_constant() {
        Some(Value::I32(x)) => x == number,
        Some(Value::U32(x)) => x == number as u32,
        // Neither -0 for 0: equality of values goes by bits.
        Some(value @ Value::F32(_)) => value == Value::F32(number as f32),
        Some(Value::Bool(_)) | None => false,
    }
}

fn truth(expr: &Expr) -> Option<bool> {
    if let Some(Value::Bool(x)) = expr.as_constant() { Some(x) } else { None }
}

/// Whether one is the negation of the other.
fn opposite(a: &Expr, b: &Expr) -> bool {
    (*a.op() == Op::Not && a.args()[0] == *b)
        || (*b.op() == Op::Not && b.args()[0] == *a)
        || (a.args() == b.args() && !a.args().is_empty() && negated(a).as_ref() == Some(b.op()))
}

/// The comparison that is true where this one is false. NaN leaves only == and != of floats.
fn negated(expr: &Expr) -> Option<Op> {
    let float = expr.args().first()?.ty() == Type::F32;
    Some(match expr.op() {
        Op::Eq => Op::Ne,
        Op::Ne => Op::Eq,
        Op::Lt if !float => Op::Ge,
        Op::Ge if !float => Op::Lt,
        Op::Gt if !float => Op::Le,
        Op::Le if !float => Op::Gt,
        _ => return None,
    })
}

fn unary(op: &Op, a: &Expr) -> Option<Expr> {
    let inner = a.args().first();
    match (op, a.op()) {
        (Op::Not, Op::Not) => inner.cloned(),
        (Op::Not, _) if a.ty() == Type::Bool => build(negated(a)?, a.args()),
        (Op::Neg, Op::Neg) if a.ty() == Type::F32 => inner.cloned(),
        (Op::WrappingNeg, Op::Neg | Op::WrappingNeg) => inner.cloned(),
        (Op::Abs, Op::Abs) => Some(a.clone()),
        (Op::Abs, Op::Neg | Op::WrappingNeg) => build(Op::Abs, &[inner?.clone()]),
        (Op::Floor | Op::Ceil | Op::Round | Op::Trunc, Op::Floor | Op::Ceil | Op::Round | Op::Trunc) => {
            Some(a.clone())
        }
        (Op::Abs, _) if a.ty() == Type::U32 => Some(a.clone()),
        (Op::ToF32, _) if a.ty() == Type::F32 => Some(a.clone()),
        (Op::ToI32, _) if a.ty() == Type::I32 => Some(a.clone()),
        (Op::ToU32, _) if a.ty() == Type::U32 => Some(a.clone()),
        (Op::ToBool, _) if a.ty() == Type::Bool => Some(a.clone()),
        // i32 to u32 and back keeps the bits, and so does a bitcast.
        (Op::ToI32, Op::ToU32) | (Op::ToU32, Op::ToI32) => {
            let inner = inner?;
            (inner.ty() == Type::I32 && *op == Op::ToI32 || inner.ty() == Type::U32 && *op == Op::ToU32)
                .then(|| inner.clone())
        }
        // A bool as a number is 0 or 1.
        (Op::ToBool, Op::ToF32 | Op::ToI32 | Op::ToU32) => {
            inner.filter(|inner| inner.ty() == Type::Bool).cloned()
        }
        (Op::ToBool, _) => build(Op::Ne, &[a.clone(), Expr::constant(Value::zero(a.ty()))]),
        _ => None,
    }
}

fn float(op: &Op, a: &Expr, b: &Expr) -> Option<Expr> {
    match op {
        Op::Mul if is(b, 1) => Some(a.clone()),
        Op::Mul if is(a, 1) => Some(b.clone()),
        Op::Mul if is(b, -1) => build(Op::Neg, std::slice::from_ref(a)),
        Op::Mul if is(a, -1) => build(Op::Neg, std::slice::from_ref(b)),
        Op::Div if is(b, 1) => Some(a.clone()),
        // x - 0 is x even for -0; x + 0 is not.
        Op::Sub if is(b, 0) => Some(a.clone()),
        Op::Add if b.as_constant() == Some(Value::F32(-0.0)) => Some(a.clone()),
        Op::Add if *b.op() == Op::Neg => build(Op::Sub, &[a.clone(), b.args()[0].clone()]),
        Op::Sub if *b.op() == Op::Neg => build(Op::Add, &[a.clone(), b.args()[0].clone()]),
        // Both signs cancel.
        Op::Mul | Op::Div if *a.op() == Op::Neg && *b.op() == Op::Neg => {
            build(op.clone(), &[a.args()[0].clone(), b.args()[0].clone()])
        }
        // False for NaN too.
        Op::Lt | Op::Gt if a == b => Some(Expr::constant(false)),
        Op::Min | Op::Max if a == b => Some(a.clone()),
        Op::Pow => whole_power(a, b),
        _ => None,
    }
}

/// Small whole powers as products: cheaper, and of a negative base too what they say.
fn whole_power(a: &Expr, exponent: &Expr) -> Option<Expr> {
    let times = |x: &Expr, y: &Expr| build(Op::Mul, &[x.clone(), y.clone()]);
    match exponent.as_constant()? {
        Value::F32(0.0) => Some(Expr::constant(1.0f32)),
        Value::F32(1.0) => Some(a.clone()),
        Value::F32(2.0) => times(a, a),
        Value::F32(3.0) => times(&times(a, a)?, a),
        Value::F32(4.0) => {
            let square = times(a, a)?;
            times(&square, &square)
        }
        _ => None,
    }
}

fn integer(op: &Op, a: &Expr, b: &Expr) -> Option<Expr> {
    let zero = || Some(Expr::constant(Value::zero(a.ty())));
    let (first, second) = (|| Some(a.clone()), || Some(b.clone()));
    match op {
        Op::Add | Op::WrappingAdd if is(b, 0) => first(),
        Op::Add | Op::WrappingAdd if is(a, 0) => second(),
        Op::Sub | Op::WrappingSub if is(b, 0) => first(),
        Op::Sub | Op::WrappingSub if a == b => zero(),
        Op::Mul | Op::WrappingMul if is(b, 1) => first(),
        Op::Mul | Op::WrappingMul if is(a, 1) => second(),
        Op::Mul | Op::WrappingMul if is(a, 0) || is(b, 0) => zero(),
        // x / 0 is x.
        Op::Div | Op::FloorDiv if is(b, 1) || is(b, 0) => first(),
        Op::Rem | Op::FloorMod if is(b, 1) || is(b, 0) => zero(),
        Op::FloorDiv => {
            let by = power_of_two(b)?;
            build(Op::Shr, &[a.clone(), Expr::constant(by)])
        }
        Op::FloorMod => {
            let by = power_of_two(b)?;
            build(Op::And, &[a.clone(), Expr::constant((1i32 << by) - 1)])
        }
        Op::Div if a.ty() == Type::U32 => {
            let by = power_of_two(b)?;
            build(Op::Shr, &[a.clone(), Expr::constant(by)])
        }
        Op::Rem if a.ty() == Type::U32 => {
            let by = power_of_two(b)?;
            build(Op::And, &[a.clone(), Expr::constant((1u32 << by) - 1)])
        }
        Op::Shl | Op::Shr if is(b, 0) => first(),
        Op::And if is(b, 0) || is(a, -1) => second(),
        Op::And if is(a, 0) || is(b, -1) => first(),
        Op::Or if is(b, 0) || is(a, -1) => first(),
        Op::Or if is(a, 0) || is(b, -1) => second(),
        Op::Xor if is(b, 0) => first(),
        Op::Xor if is(a, 0) => second(),
        Op::Xor if a == b => zero(),
        Op::And | Op::Or | Op::Min | Op::Max if a == b => first(),
        Op::Lt | Op::Gt | Op::Ne if a == b => Some(Expr::constant(false)),
        Op::Le | Op::Ge | Op::Eq if a == b => Some(Expr::constant(true)),
        _ => None,
    }
}

/// k if the expression is the constant 2^k, k > 0.
fn power_of_two(expr: &Expr) -> Option<u32> {
    match expr.as_constant()? {
        Value::I32(x) if x > 1 && x & (x - 1) == 0 => Some(x.trailing_zeros()),
        Value::U32(x) if x > 1 && x.is_power_of_two() => Some(x.trailing_zeros()),
        _ => None,
    }
}

fn logic(op: &Op, a: &Expr, b: &Expr) -> Option<Expr> {
    let not = |x: &Expr| build(Op::Not, std::slice::from_ref(x));
    let (first, second) = (|| Some(a.clone()), || Some(b.clone()));
    match (op, truth(a), truth(b)) {
        (Op::And, Some(true), _) | (Op::Or, Some(false), _) => second(),
        (Op::And, _, Some(true)) | (Op::Or, _, Some(false)) => first(),
        (Op::And, Some(false), _) | (Op::Or, Some(true), _) => first(),
        (Op::And, _, Some(false)) | (Op::Or, _, Some(true)) => second(),
        (Op::And | Op::Or, _, _) if a == b => first(),
        (Op::And, _, _) if opposite(a, b) => Some(Expr::constant(false)),
        (Op::Or, _, _) if opposite(a, b) => Some(Expr::constant(true)),
        // a & (!a | x) is a & x; a | (!a & x) is a | x.
        (Op::And | Op::Or, _, _) => absorb(op, a, b)
            .or_else(|| absorb(op, b, a).map(|(x, y)| (y, x)))
            .and_then(|(a, b)| build(op.clone(), &[a, b])),
        (Op::Eq, Some(true), _) | (Op::Ne | Op::Xor, Some(false), _) => second(),
        (Op::Eq, _, Some(true)) | (Op::Ne | Op::Xor, _, Some(false)) => first(),
        (Op::Eq, Some(false), _) | (Op::Ne | Op::Xor, Some(true), _) => not(b),
        (Op::Eq, _, Some(false)) | (Op::Ne | Op::Xor, _, Some(true)) => not(a),
        (Op::Eq, _, _) if a == b => Some(Expr::constant(true)),
        (Op::Ne | Op::Xor, _, _) if a == b => Some(Expr::constant(false)),
        (Op::Xor, _, _) => build(Op::Ne, &[a.clone(), b.clone()]),
        _ => None,
    }
}

/// For `a op b` with b = (!a) dual x: the pair (a, x).
fn absorb(op: &Op, a: &Expr, b: &Expr) -> Option<(Expr, Expr)> {
    let dual = if *op == Op::And { Op::Or } else { Op::And };
    if *b.op() != dual {
        return None;
    }
    match b.args() {
        [x, y] if opposite(a, x) => Some((a.clone(), y.clone())),
        [x, y] if opposite(a, y) => Some((a.clone(), x.clone())),
        _ => None,
    }
}

fn select(c: &Expr, yes: &Expr, no: &Expr) -> Option<Expr> {
    if let Some(c) = truth(c) {
        return Some(if c { yes } else { no }.clone());
    }
    if yes == no {
        return Some(yes.clone());
    }
    let not = |x: &Expr| build(Op::Not, std::slice::from_ref(x));
    match (truth(yes), truth(no)) {
        (Some(true), Some(false)) => return Some(c.clone()),
        (Some(false), Some(true)) => return not(c),
        (Some(true), None) => return build(Op::Or, &[c.clone(), no.clone()]),
        (Some(false), None) => return build(Op::And, &[not(c)?, no.clone()]),
        (None, Some(true)) => return build(Op::Or, &[not(c)?, yes.clone()]),
        (None, Some(false)) => return build(Op::And, &[c.clone(), yes.clone()]),
        _ => {}
    }
    if *c.op() == Op::Not {
        return build(Op::Select, &[c.args()[0].clone(), no.clone(), yes.clone()]);
    }
    if c == no {
        return build(Op::And, &[c.clone(), yes.clone()]);
    }
    if c == yes {
        return build(Op::Or, &[c.clone(), no.clone()]);
    }
    // Inside a branch the condition is known.
    if *yes.op() == Op::Select && yes.args()[0] == *c {
        return build(Op::Select, &[c.clone(), yes.args()[1].clone(), no.clone()]);
    }
    if *no.op() == Op::Select && no.args()[0] == *c {
        return build(Op::Select, &[c.clone(), yes.clone(), no.args()[2].clone()]);
    }
    None
}
