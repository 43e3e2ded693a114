//! The expression language of masks and score mods: the one place where "what attention means" is said.
//!
//! A [`MaskMod`] is an expression of type `bool`, a [`ScoreMod`] one of type `f32`. Both are written as
//! Rust closures over typed views ([`F32`], [`I32`], [`U32`], [`Bool`]) or as WGSL text, and both become
//! the same [`Expr`]: immutable, typed, simplified as it is built, with a content hash. From it follow the
//! kernel text, the reference value, the range over a block of the score matrix, and the derivative.
//!
//! # The language
//!
//! **Types**: `f32`, `i32`, `u32`, `bool`. There are no vectors, no loops that survive and no memory:
//! bounded sums and constant-bound loops are unrolled. Nothing converts by itself.
//!
//! **Inputs**: `score` (f32, after scale), and the i32 values `b` (batch), `h` (QUERY head), `q` (row plus
//! `q_offset`), `kv`, `q_len` and `kv_len`. Named run-time scalars ([`Scalar`]) and captured tensors
//! ([`Capture`], rank 0 to 4) are read by name.
//!
//! **Evaluation** has no side effects, so both branches of a `select` may be evaluated; the one not chosen
//! is discarded, NaN and all. `&` and `|` on bool likewise.
//!
//! **i32 and u32 wrap** in `+ - * -x abs`, in every language and in the value. Overflow that follows from
//! `b`, `h`, `q`, `kv` and constants alone is almost always an error of the author, so [`Expr::check`]
//! refuses it, unless it is written with `wrapping_add`, `wrapping_sub`, `wrapping_mul` or `wrapping_neg`.
//!
//! **Integer division** truncates. `x / 0` is `x`, `x % 0` is 0, `MIN / -1` is `MIN`, `MIN % -1` is 0 (WGSL's
//! rules). `floor_div` and `floor_mod` round towards minus infinity, as Python's `//` and `%` do, with the
//! same answers for a divisor of 0. `%` on f32 is `x - y * trunc(x / y)`.
//!
//! **Shifts** take a u32 amount modulo 32. `>>` on i32 keeps the sign.
//!
//! **Conversions**: f32 to i32 or u32 truncates and saturates (to the largest f32 that fits, 2147483520 or
//! 4294967040, at the upper end), NaN gives 0; i32 to f32 rounds to nearest even; i32 to u32 and back keeps
//! the bits; to bool is `x != 0`; bool to a number is 0 or 1. `bitcast` between the 32-bit types keeps the bits.
//!
//! **f32** follows IEEE where the GPU does. `round` rounds half to even. `sign(0)` is 0. `pow(x, y)` of
//! x < 0 is `|x|^y` with the sign that a whole y gives it, as in PyTorch, and NaN for any other y (WGSL's own
//! `pow` has no value there); `pow(x, 0)` is 1, `pow(0, y)` of y < 0 is infinite. A GPU may flush subnormals, may contract `a * b + c`, and computes
//! division, `sqrt`, `exp`, `log`, `sin` and the like within WGSL's error bounds; ranges allow for that. A
//! comparison with NaN is false, `!=` is true, as far as the GPU keeps NaN at all: do not test for NaN or
//! infinity. `min`, `max` and `clamp` of a NaN give either operand. The reference evaluates in f64.
//!
//! **Captured tensors** are indexed with one i32 per dimension. Each index is clamped to its dimension,
//! always. A call whose index lies outside for EVERY point is refused by [`Expr::check`], as is a tensor indexed by
//! `h` or `b` alone that has several values but fewer than heads or batch entries. f16 and bf16 tensors are read as f32.
//!
//! **Size**: an expression of more than [`MAX_NODES`] distinct operations after unrolling is refused.
//!
//! # Derivative
//!
//! Reverse mode, with PyTorch's conventions at kinks: `abs'(0) = 0`; `min` and `max` give half to each
//! operand on a tie, so `max(x, 0)` has slope 1/2 at 0 where `relu` has 0; `clamp` passes the gradient at its
//! bounds, and nothing goes to a lower bound that is not below the upper one, everything to an upper one below
//! the lower; `pow` passes nothing to the base where the exponent is 0, nor to the exponent where the base is not
//! positive (PyTorch: NaN where it is negative); `floor`, `ceil`, `round`, `trunc`, `sign` and every integer have
//! derivative 0. `select` passes the gradient to the chosen branch alone and the branch not chosen contributes 0,
//! whatever it holds there. (PyTorch's derivatives.yaml and FunctionsManual.cpp.)
//!
//! # Example
//!
//! ```
//! use flexattn::{Capture, MaskMod, ScoreMod};
//!
//! let causal = MaskMod::new(|i| i.q().ge(i.kv()));
//! let window = MaskMod::new(|i| (i.q() - i.kv()).lt(256));
//! let both = causal & window;
//! both.check()?;
//!
//! let slope = Capture::f32("slope", &[0.5, 0.25], &[2])?;
//! let alibi = ScoreMod::new(|s| s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32());
//! assert_eq!(alibi.captures().len(), 1);
//! # Ok::<(), flexattn::Error>(())
//! ```

mod capture;
mod check;
mod derivative;
mod mods;
mod op;
mod print;
mod program;
mod range;
mod simplify;
mod value;
mod views;
mod wgsl;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};

pub use capture::{
    Capture, CaptureData, CaptureDecl, CaptureType, Captured, DeviceHandle, Scalar, ScalarDecl, ScalarOf,
};
pub use derivative::{GatherGradient, Gradient};
pub use mods::{MaskMod, ScoreMod};
pub use op::Op;
pub use program::{Bound, CaptureRanges, Env, IndexBox, Point, Program, Ranges};
pub use range::Range;
pub use value::{Column, Float, Lane, Type, Value};
pub use views::{Bool, F32, I32, Index, Score, U32, View, sum};
pub use wgsl::text_reads;

/// The most distinct operations that one expression may have after unrolling.
pub const MAX_NODES: usize = 4096;

/// The most operations that may stand one inside the other. What goes through an expression goes down as
/// far, and a thread's stack ends.
pub const MAX_DEPTH: usize = 1024;

/// What the kernel gives to an expression. `Score` is f32, the others are i32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Input {
    /// `score`: dot(q, k) * scale, natural units.
    Score,
    /// `b`: batch index of the query.
    Batch,
    /// `h`: QUERY head.
    Head,
    /// `q`: query position, the row plus `q_offset`.
    Q,
    /// `kv`: key position.
    Kv,
    /// `q_len`: number of query rows.
    QLen,
    /// `kv_len`: number of keys of this batch entry.
    KvLen,
}

impl Input {
    /// Every input, in the order of the declaration.
    pub const ALL: [Input; 7] =
        [Input::Score, Input::Batch, Input::Head, Input::Q, Input::Kv, Input::QLen, Input::KvLen];

    /// f32 for the score, i32 for the others.
    pub fn ty(self) -> Type {
        if self == Input::Score { Type::F32 } else { Type::I32 }
    }

    /// The name in WGSL text.
    pub fn name(self) -> &'static str {
        match self {
            Input::Score => "score",
            Input::Batch => "b",
            Input::Head => "h",
            Input::Q => "q",
            Input::Kv => "kv",
            Input::QLen => "q_len",
            Input::KvLen => "kv_len",
        }
    }
}

/// A set of [`Input`]s: what a value depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Inputs(u8);

impl Inputs {
    /// The empty set: a constant, a scalar, or a capture at a constant index.
    pub const NONE: Inputs = Inputs(0);

    /// The set of one input.
    pub fn only(input: Input) -> Inputs {
        Inputs(1 << input as u8)
    }

    /// Whether `input` is in the set.
    pub fn contains(self, input: Input) -> bool {
        self.0 & (1 << input as u8) != 0
    }

    /// Both sets together.
    pub fn union(self, other: Inputs) -> Inputs {
        Inputs(self.0 | other.0)
    }

    /// Whether nothing in the set changes along a row of the score matrix: neither `score` nor `kv`.
    pub fn fixed_in_row(self) -> bool {
        !self.contains(Input::Score) && !self.contains(Input::Kv)
    }
}

/// A typed, immutable expression. Cheap to clone; equality and hash go by content, so two expressions
/// built separately from the same operations are equal.
///
/// The content hash covers operations, constants, and the names, types and ranks of captures and scalars. It
/// covers neither shapes nor values of captures, nor values of scalars, and is the same in every run.
#[derive(Clone)]
pub struct Expr(Arc<Node>);

struct Node {
    op: Op,
    args: Box<[Expr]>,
    ty: Type,
    inputs: Inputs,
    depth: u32,
    hash: u128,
}

impl Expr {
    /// Applies `op` to `args`.
    ///
    /// # Errors
    /// When the number or the types of the arguments do not fit the operation, or when the expression
    /// becomes deeper than [`MAX_DEPTH`].
    pub fn new(op: Op, args: &[Expr]) -> Result<Expr> {
        let expr = Expr::exact(op, args)?;
        Ok(simplify::rule(&expr).unwrap_or(expr))
    }

    /// Applies `op` to `args` without simplifying anything. [`Expr::new`] gives the same value.
    ///
    /// # Errors
    /// As [`Expr::new`].
    pub fn exact(op: Op, args: &[Expr]) -> Result<Expr> {
        let mut types = [Type::Bool; op::MAX_ARGS];
        if args.len() > op::MAX_ARGS {
            return Err(Error::Expression(format!("{} takes no {} arguments", op.name(), args.len())));
        }
        for (ty, arg) in types.iter_mut().zip(args) {
            *ty = arg.ty();
        }
        let ty = op.result_type(&types[..args.len()])?;
        let depth = 1 + args.iter().map(|a| a.0.depth).max().unwrap_or(0);
        if depth as usize > MAX_DEPTH {
            return Err(Error::Expression(format!(
                "the expression is more than {MAX_DEPTH} operations deep; shorten it or capture a table"
            )));
        }
        let mut inputs = if let Op::Input(input) = op { Inputs::only(input) } else { Inputs::NONE };
        for arg in args {
            inputs = inputs.union(arg.inputs());
        }
        let hash = op.content_hash(args);
        Ok(Expr(Arc::new(Node { op, args: args.into(), ty, inputs, depth, hash })))
    }

    /// A constant.
    pub fn constant(value: impl Into<Value>) -> Expr {
        Expr::leaf(Op::Const(value.into()))
    }

    /// One of the kernel's inputs.
    pub fn input(input: Input) -> Expr {
        Expr::leaf(Op::Input(input))
    }

    /// A named run-time scalar.
    pub fn scalar(decl: ScalarDecl) -> Expr {
        Expr::leaf(Op::Scalar(decl))
    }

    fn leaf(op: Op) -> Expr {
        let (ty, inputs) = match &op {
            Op::Const(value) => (value.ty(), Inputs::NONE),
            Op::Scalar(decl) => (decl.ty, Inputs::NONE),
            Op::Input(input) => (input.ty(), Inputs::only(*input)),
            _ => unreachable!("only constants, scalars and inputs are leaves"),
        };
        let hash = op.content_hash(&[]);
        Expr(Arc::new(Node { op, args: Box::new([]), ty, inputs, depth: 1, hash }))
    }

    /// The type of the value.
    pub fn ty(&self) -> Type {
        self.0.ty
    }

    /// The outermost operation.
    pub fn op(&self) -> &Op {
        &self.0.op
    }

    /// The arguments of [`Expr::op`].
    pub fn args(&self) -> &[Expr] {
        &self.0.args
    }

    /// The content hash: the same for equal expressions, in every run and on every machine.
    pub fn hash(&self) -> u128 {
        self.0.hash
    }

    /// Which inputs the value depends on, through capture indices too.
    pub fn inputs(&self) -> Inputs {
        self.0.inputs
    }

    /// The value, if the expression is a constant.
    pub fn as_constant(&self) -> Option<Value> {
        if let Op::Const(value) = self.op() { Some(*value) } else { None }
    }

    /// The value of an operation on constants: computed in f64, rounded to f32.
    pub(crate) fn fold(&self) -> Option<Value> {
        let types: Vec<Type> = self.args().iter().map(Expr::ty).collect();
        let record = self.op().record::<f64>(&types)?;
        let columns: Vec<Column<f64>> =
            self.args().iter().map(|a| a.as_constant().map(Column::of)).collect::<Option<_>>()?;
        let mut out = Column::new(self.ty());
        out.resize(1);
        (record.kernel)(&columns.iter().collect::<Vec<_>>(), &mut out);
        Some(match out.lane(0) {
            Lane::F32(x) => Value::F32(x as f32),
            Lane::I32(x) => Value::I32(x),
            Lane::U32(x) => Value::U32(x),
            Lane::Bool(x) => Value::Bool(x),
        })
    }

    /// The number of distinct operations, constants and inputs included.
    pub fn nodes(&self) -> usize {
        let mut count = 0;
        visit(std::slice::from_ref(self), |_| count += 1);
        count
    }

    /// The captures that the expression reads, by name.
    pub fn captures(&self) -> Vec<CaptureDecl> {
        let mut found = Vec::new();
        visit(std::slice::from_ref(self), |e| {
            if let Op::Gather(decl) = e.op() {
                found.push(decl.clone());
            }
        });
        found.sort();
        found.dedup();
        found
    }

    /// The run-time scalars that the expression reads, by name.
    pub fn scalars(&self) -> Vec<ScalarDecl> {
        let mut found = Vec::new();
        visit(std::slice::from_ref(self), |e| {
            if let Op::Scalar(decl) = e.op() {
                found.push(decl.clone());
            }
        });
        found.sort();
        found.dedup();
        found
    }

    /// The same expression with other expressions in place of inputs: `with` gives the replacement, or
    /// nothing where an input stays.
    ///
    /// # Errors
    /// When a replacement has another type than its input.
    pub fn replace_inputs(&self, with: impl Fn(Input) -> Option<Expr>) -> Result<Expr> {
        self.rewrite(|op, _| match op {
            Op::Input(input) => with(*input).map(Ok),
            _ => None,
        })
    }

    /// The same expression reading captured tensor `to` in place of `from`.
    pub(crate) fn rename_capture(&self, from: &str, to: &str) -> Result<Expr> {
        self.rewrite(|op, args| match op {
            Op::Gather(decl) if &*decl.name == from => {
                Some(Expr::new(Op::Gather(CaptureDecl { name: to.into(), ..decl.clone() }), args))
            }
            _ => None,
        })
    }

    /// The same expression with what `with` gives for an operation and its new arguments, where it gives
    /// something.
    fn rewrite(&self, with: impl Fn(&Op, &[Expr]) -> Option<Result<Expr>>) -> Result<Expr> {
        let mut done: std::collections::HashMap<u128, Expr> = std::collections::HashMap::new();
        let mut failure = None;
        visit(std::slice::from_ref(self), |e| {
            let args: Vec<Expr> = e.args().iter().map(|a| done[&a.hash()].clone()).collect();
            let new = match with(e.op(), &args) {
                Some(new) => new,
                None if args.is_empty() => Ok(e.clone()),
                None => Expr::new(e.op().clone(), &args),
            };
            let new = new.unwrap_or_else(|error| {
                failure.get_or_insert(error);
                e.clone()
            });
            done.insert(e.hash(), new);
        });
        match failure {
            Some(error) => Err(error),
            None => Ok(done[&self.hash()].clone()),
        }
    }
}

/// Visits each distinct expression once, arguments before their users.
pub(crate) fn visit(roots: &[Expr], mut each: impl FnMut(&Expr)) {
    let mut seen = HashSet::new();
    let mut stack: Vec<(&Expr, usize)> = Vec::new();
    for root in roots {
        if seen.insert(root.hash()) {
            stack.push((root, 0));
        }
        while let Some((expr, next)) = stack.pop() {
            if let Some(arg) = expr.args().get(next) {
                stack.push((expr, next + 1));
                if seen.insert(arg.hash()) {
                    stack.push((arg, 0));
                }
            } else {
                each(expr);
            }
        }
    }
}

impl PartialEq for Expr {
    fn eq(&self, other: &Expr) -> bool {
        self.hash() == other.hash()
    }
}

impl Eq for Expr {}

impl std::hash::Hash for Expr {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u128(self.0.hash);
    }
}

impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print::text(self))
    }
}
