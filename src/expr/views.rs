//! Typed views of expressions, for closures: operators, methods, and the captures met on the way.

use std::ops::{Add, BitAnd, BitOr, BitXor, Deref, Div, Mul, Neg, Not, Range, Rem, Shl, Shr, Sub};

use super::capture::{Capture, Scalar};
use super::value::{Type, Value};
use super::{Expr, Input, Op};
use crate::error::{Error, Result};

/// An expression with the captures and scalars it reads, and the first mistake made while building it.
/// Closures cannot return errors from inside an operator, so a mistake travels to `check`.
#[derive(Debug, Clone)]
pub struct Term {
    pub(crate) expr: Expr,
    pub(crate) captures: Vec<Capture>,
    pub(crate) scalars: Vec<Scalar>,
    pub(crate) error: Option<Error>,
}

impl Term {
    pub(crate) fn new(expr: Expr) -> Term {
        Term { expr, captures: Vec::new(), scalars: Vec::new(), error: None }
    }

    pub(crate) fn constant(value: impl Into<Value>) -> Term {
        Term::new(Expr::constant(value))
    }

    /// `op` of `args`; on a mistake a zero of type `ty` that carries it.
    pub(crate) fn apply(op: Op, args: &[&Term], ty: Type) -> Term {
        let exprs: Vec<Expr> = args.iter().map(|t| t.expr.clone()).collect();
        let mut out = match Expr::new(op, &exprs) {
            Ok(expr) => Term::new(expr),
            Err(error) => Term { error: Some(error), ..Term::constant(Value::zero(ty)) },
        };
        for arg in args {
            out.join(arg);
        }
        out
    }

    /// Takes over the captures, scalars and mistakes of `other`.
    pub(crate) fn join(&mut self, other: &Term) {
        for capture in &other.captures {
            self.add_capture(capture);
        }
        for scalar in &other.scalars {
            self.add_scalar(scalar);
        }
        if self.error.is_none() {
            self.error.clone_from(&other.error);
        }
    }

    pub(crate) fn with_capture(mut self, capture: &Capture) -> Term {
        self.add_capture(capture);
        self
    }

    pub(crate) fn with_scalar(mut self, scalar: &Scalar) -> Term {
        self.add_scalar(scalar);
        self
    }

    fn add_capture(&mut self, capture: &Capture) {
        match self.captures.binary_search_by(|c| c.name().cmp(capture.name())) {
            Ok(i) if self.captures[i].same(capture) => {}
            Ok(_) => self.fail(format!(
                "two different captured tensors are named {}; rename_capture one of them first",
                capture.name()
            )),
            Err(i) => self.captures.insert(i, capture.clone()),
        }
    }

    fn add_scalar(&mut self, scalar: &Scalar) {
        match self.scalars.binary_search_by(|s| s.name().cmp(scalar.name())) {
            Ok(i) if self.scalars[i] == *scalar => {}
            Ok(i) => self.fail(format!(
                "scalar {} is both {} and {}; give each its own name",
                scalar.name(),
                self.scalars[i].value(),
                scalar.value()
            )),
            Err(i) => self.scalars.insert(i, scalar.clone()),
        }
    }

    fn fail(&mut self, message: String) {
        self.error.get_or_insert(Error::Expression(message));
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A typed view: [`F32`], [`I32`], [`U32`] or [`Bool`].
pub trait View: sealed::Sealed + Clone + Sized {
    /// The type of the value.
    const TYPE: Type;
    #[doc(hidden)]
    fn term(&self) -> &Term;
    #[doc(hidden)]
    fn from_term(term: Term) -> Self;

    /// The expression behind the view.
    fn expr(&self) -> &Expr {
        &self.term().expr
    }
}

macro_rules! view {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name(Term);

        impl sealed::Sealed for $name {}

        impl View for $name {
            const TYPE: Type = Type::$name;

            fn term(&self) -> &Term {
                &self.0
            }

            fn from_term(term: Term) -> Self {
                debug_assert_eq!(term.expr.ty(), Type::$name);
                $name(term)
            }
        }

        impl From<&$name> for $name {
            fn from(view: &$name) -> $name {
                view.clone()
            }
        }

        impl $name {
            /// A view of an expression, which must have this type.
            ///
            /// # Errors
            /// When the expression has another type.
            pub fn new(expr: Expr) -> Result<$name> {
                if expr.ty() != Type::$name {
                    return Err(Error::Expression(format!(
                        "{expr} has type {} but {} is needed here",
                        expr.ty(),
                        Type::$name
                    )));
                }
                Ok($name(Term::new(expr)))
            }
        }
    };
}

view! {
    /// A value of type f32 while an expression is written.
    F32
}
view! {
    /// A value of type i32 while an expression is written. `/` and `%` truncate; see `floor_div`, `floor_mod`.
    I32
}
view! {
    /// A value of type u32 while an expression is written.
    U32
}
view! {
    /// A truth value while an expression is written. `&`, `|`, `^` and `!` combine.
    Bool
}

impl From<f32> for F32 {
    fn from(x: f32) -> F32 {
        F32(Term::constant(x))
    }
}

impl From<f64> for F32 {
    /// Rounded to f32.
    fn from(x: f64) -> F32 {
        F32(Term::constant(x as f32))
    }
}

impl From<i32> for I32 {
    fn from(x: i32) -> I32 {
        I32(Term::constant(x))
    }
}

impl From<u32> for U32 {
    fn from(x: u32) -> U32 {
        U32(Term::constant(x))
    }
}

impl From<bool> for Bool {
    fn from(x: bool) -> Bool {
        Bool(Term::constant(x))
    }
}

macro_rules! operator {
    ($trait:ident, $method:ident, $op:expr, $view:ident $(, $literal:ty)?) => {
        impl $trait<$view> for $view {
            type Output = $view;
            fn $method(self, other: $view) -> $view {
                $view(Term::apply($op, &[&self.0, &other.0], Type::$view))
            }
        }
        impl $trait<&$view> for $view {
            type Output = $view;
            fn $method(self, other: &$view) -> $view {
                $view(Term::apply($op, &[&self.0, &other.0], Type::$view))
            }
        }
        impl $trait<$view> for &$view {
            type Output = $view;
            fn $method(self, other: $view) -> $view {
                $view(Term::apply($op, &[&self.0, &other.0], Type::$view))
            }
        }
        impl $trait<&$view> for &$view {
            type Output = $view;
            fn $method(self, other: &$view) -> $view {
                $view(Term::apply($op, &[&self.0, &other.0], Type::$view))
            }
        }
        $(
            impl $trait<$literal> for $view {
                type Output = $view;
                fn $method(self, other: $literal) -> $view {
                    $trait::$method(self, $view::from(other))
                }
            }
            impl $trait<$literal> for &$view {
                type Output = $view;
                fn $method(self, other: $literal) -> $view {
                    $trait::$method(self, $view::from(other))
                }
            }
            impl $trait<$view> for $literal {
                type Output = $view;
                fn $method(self, other: $view) -> $view {
                    $trait::$method($view::from(self), other)
                }
            }
            impl $trait<&$view> for $literal {
                type Output = $view;
                fn $method(self, other: &$view) -> $view {
                    $trait::$method($view::from(self), other)
                }
            }
        )?
    };
}

operator!(Add, add, Op::Add, F32, f32);
operator!(Sub, sub, Op::Sub, F32, f32);
operator!(Mul, mul, Op::Mul, F32, f32);
operator!(Div, div, Op::Div, F32, f32);
impl Rem for F32 {
    type Output = F32;
    /// `x - y * trunc(x / y)`.
    fn rem(self, other: F32) -> F32 {
        let whole = (&self / &other).trunc();
        self - other * whole
    }
}

impl Rem<f32> for F32 {
    type Output = F32;
    /// As between two expressions.
    fn rem(self, other: f32) -> F32 {
        self % F32::from(other)
    }
}

operator!(Add, add, Op::Add, I32, i32);
operator!(Sub, sub, Op::Sub, I32, i32);
operator!(Mul, mul, Op::Mul, I32, i32);
operator!(Div, div, Op::Div, I32, i32);
operator!(Rem, rem, Op::Rem, I32, i32);
operator!(BitAnd, bitand, Op::And, I32, i32);
operator!(BitOr, bitor, Op::Or, I32, i32);
operator!(BitXor, bitxor, Op::Xor, I32, i32);
operator!(Add, add, Op::Add, U32, u32);
operator!(Sub, sub, Op::Sub, U32, u32);
operator!(Mul, mul, Op::Mul, U32, u32);
operator!(Div, div, Op::Div, U32, u32);
operator!(Rem, rem, Op::Rem, U32, u32);
operator!(BitAnd, bitand, Op::And, U32, u32);
operator!(BitOr, bitor, Op::Or, U32, u32);
operator!(BitXor, bitxor, Op::Xor, U32, u32);
operator!(BitAnd, bitand, Op::And, Bool, bool);
operator!(BitOr, bitor, Op::Or, Bool, bool);
operator!(BitXor, bitxor, Op::Xor, Bool, bool);

macro_rules! unary_operator {
    ($trait:ident, $method:ident, $op:expr, $view:ident) => {
        impl $trait for $view {
            type Output = $view;
            fn $method(self) -> $view {
                $view(Term::apply($op, &[&self.0], Type::$view))
            }
        }
        impl $trait for &$view {
            type Output = $view;
            fn $method(self) -> $view {
                $view(Term::apply($op, &[&self.0], Type::$view))
            }
        }
    };
}

unary_operator!(Neg, neg, Op::Neg, F32);
unary_operator!(Neg, neg, Op::Neg, I32);
unary_operator!(Not, not, Op::Not, I32);
unary_operator!(Not, not, Op::Not, U32);
unary_operator!(Not, not, Op::Not, Bool);

macro_rules! shift {
    ($trait:ident, $method:ident, $op:expr, $view:ident) => {
        impl<N: Into<U32>> $trait<N> for $view {
            type Output = $view;
            /// The amount is taken modulo 32.
            fn $method(self, amount: N) -> $view {
                $view(Term::apply($op, &[&self.0, &amount.into().0], Type::$view))
            }
        }
    };
}

shift!(Shl, shl, Op::Shl, I32);
shift!(Shr, shr, Op::Shr, I32);
shift!(Shl, shl, Op::Shl, U32);
shift!(Shr, shr, Op::Shr, U32);

macro_rules! methods {
    ($view:ident { $($(#[$doc:meta])* $name:ident($($arg:ident),*) -> $out:ident = $op:expr;)* }) => {
        impl $view {
            $(
                $(#[$doc])*
                pub fn $name(&self, $($arg: impl Into<$view>),*) -> $out {
                    $(let $arg: $view = $arg.into();)*
                    $out(Term::apply($op, &[&self.0, $(&$arg.0),*], Type::$out))
                }
            )*
        }
    };
}

methods!(F32 {
    /// self < other; false if either is NaN.
    lt(other) -> Bool = Op::Lt;
    /// self <= other; false if either is NaN.
    le(other) -> Bool = Op::Le;
    /// self > other; false if either is NaN.
    gt(other) -> Bool = Op::Gt;
    /// self >= other; false if either is NaN.
    ge(other) -> Bool = Op::Ge;
    /// self == other; false if either is NaN.
    eq(other) -> Bool = Op::Eq;
    /// self != other; true if either is NaN.
    ne(other) -> Bool = Op::Ne;
    /// The smaller.
    min(other) -> F32 = Op::Min;
    /// The larger.
    max(other) -> F32 = Op::Max;
    /// min(max(self, low), high).
    clamp(low, high) -> F32 = Op::Clamp;
    /// Absolute value.
    abs() -> F32 = Op::Abs;
    /// -1, 0 or 1.
    sign() -> F32 = Op::Sign;
    /// Largest whole number not above.
    floor() -> F32 = Op::Floor;
    /// Smallest whole number not below.
    ceil() -> F32 = Op::Ceil;
    /// Nearest whole number, half to even.
    round() -> F32 = Op::Round;
    /// Towards zero.
    trunc() -> F32 = Op::Trunc;
    /// self - floor(self).
    fract() -> F32 = Op::Fract;
    /// Square root.
    sqrt() -> F32 = Op::Sqrt;
    /// e to the self.
    exp() -> F32 = Op::Exp;
    /// 2 to the self.
    exp2() -> F32 = Op::Exp2;
    /// Natural logarithm.
    log() -> F32 = Op::Log;
    /// Logarithm to base 2.
    log2() -> F32 = Op::Log2;
    /// self to the exponent. Of self < 0: `|self|^exponent` with the sign that a whole exponent gives it, NaN for any other.
    pow(exponent) -> F32 = Op::Pow;
    /// Sine, in radians.
    sin() -> F32 = Op::Sin;
    /// Cosine, in radians.
    cos() -> F32 = Op::Cos;
    /// Tangent, in radians.
    tan() -> F32 = Op::Tan;
    /// Hyperbolic tangent.
    tanh() -> F32 = Op::Tanh;
    /// 1 / (1 + exp(-self)).
    sigmoid() -> F32 = Op::Sigmoid;
    /// Truncated and saturated; NaN gives 0.
    to_i32() -> I32 = Op::ToI32;
    /// Truncated and saturated; NaN gives 0.
    to_u32() -> U32 = Op::ToU32;
    /// self != 0.
    to_bool() -> Bool = Op::ToBool;
    /// The same bits.
    bits_to_i32() -> I32 = Op::BitsToI32;
    /// The same bits.
    bits_to_u32() -> U32 = Op::BitsToU32;
});

methods!(I32 {
    /// self < other.
    lt(other) -> Bool = Op::Lt;
    /// self <= other.
    le(other) -> Bool = Op::Le;
    /// self > other.
    gt(other) -> Bool = Op::Gt;
    /// self >= other.
    ge(other) -> Bool = Op::Ge;
    /// self == other.
    eq(other) -> Bool = Op::Eq;
    /// self != other.
    ne(other) -> Bool = Op::Ne;
    /// The smaller.
    min(other) -> I32 = Op::Min;
    /// The larger.
    max(other) -> I32 = Op::Max;
    /// min(max(self, low), high).
    clamp(low, high) -> I32 = Op::Clamp;
    /// Absolute value; MIN stays MIN.
    abs() -> I32 = Op::Abs;
    /// -1, 0 or 1.
    sign() -> I32 = Op::Sign;
    /// Python's self // other; self if other is 0.
    floor_div(other) -> I32 = Op::FloorDiv;
    /// Python's self % other, with the sign of other; 0 if other is 0.
    floor_mod(other) -> I32 = Op::FloorMod;
    /// self + other, meant to wrap.
    wrapping_add(other) -> I32 = Op::WrappingAdd;
    /// self - other, meant to wrap.
    wrapping_sub(other) -> I32 = Op::WrappingSub;
    /// self * other, meant to wrap.
    wrapping_mul(other) -> I32 = Op::WrappingMul;
    /// -self, meant to wrap.
    wrapping_neg() -> I32 = Op::WrappingNeg;
    /// Number of one bits.
    count_ones() -> I32 = Op::CountOneBits;
    /// The nearest f32.
    to_f32() -> F32 = Op::ToF32;
    /// The same bits.
    to_u32() -> U32 = Op::ToU32;
    /// self != 0.
    to_bool() -> Bool = Op::ToBool;
    /// The same bits.
    bits_to_f32() -> F32 = Op::BitsToF32;
});

methods!(U32 {
    /// self < other.
    lt(other) -> Bool = Op::Lt;
    /// self <= other.
    le(other) -> Bool = Op::Le;
    /// self > other.
    gt(other) -> Bool = Op::Gt;
    /// self >= other.
    ge(other) -> Bool = Op::Ge;
    /// self == other.
    eq(other) -> Bool = Op::Eq;
    /// self != other.
    ne(other) -> Bool = Op::Ne;
    /// The smaller.
    min(other) -> U32 = Op::Min;
    /// The larger.
    max(other) -> U32 = Op::Max;
    /// min(max(self, low), high).
    clamp(low, high) -> U32 = Op::Clamp;
    /// self + other, meant to wrap.
    wrapping_add(other) -> U32 = Op::WrappingAdd;
    /// self - other, meant to wrap.
    wrapping_sub(other) -> U32 = Op::WrappingSub;
    /// self * other, meant to wrap.
    wrapping_mul(other) -> U32 = Op::WrappingMul;
    /// Number of one bits.
    count_ones() -> U32 = Op::CountOneBits;
    /// The nearest f32.
    to_f32() -> F32 = Op::ToF32;
    /// The same bits.
    to_i32() -> I32 = Op::ToI32;
    /// self != 0.
    to_bool() -> Bool = Op::ToBool;
    /// The same bits.
    bits_to_f32() -> F32 = Op::BitsToF32;
});

methods!(Bool {
    /// Both true or both false.
    eq(other) -> Bool = Op::Eq;
    /// One true, one false.
    ne(other) -> Bool = Op::Ne;
    /// 0 or 1.
    to_f32() -> F32 = Op::ToF32;
    /// 0 or 1.
    to_i32() -> I32 = Op::ToI32;
    /// 0 or 1.
    to_u32() -> U32 = Op::ToU32;
});

impl Bool {
    /// `yes` where true, `no` where false. Both may be evaluated; only the chosen one counts.
    pub fn select<V: View>(&self, yes: V, no: impl Into<V>) -> V {
        V::from_term(Term::apply(Op::Select, &[&self.0, yes.term(), no.into().term()], V::TYPE))
    }
}

/// The sum of `f(i)` over `range`, unrolled; 0 for an empty range. Up to 256 terms are added in order, more by halves.
///
/// ```
/// use flexattn::{Capture, ScoreMod, expr};
///
/// let a = Capture::f32("a", &[1.0; 12], &[4, 3])?;
/// let dot = ScoreMod::new(|s| {
///     s.score() + expr::sum(0..3, |i| a.at([s.q(), i.clone()]) * a.at([s.kv(), i]))
/// });
/// dot.check()?;
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn sum(range: Range<i32>, mut f: impl FnMut(I32) -> F32) -> F32 {
    if range.len() > super::MAX_NODES {
        let mut zero = Term::constant(0.0f32);
        zero.error = Some(Error::Expression(format!(
            "a sum over {} terms unrolls to more than {} operations; sum into a captured tensor instead",
            range.len(),
            super::MAX_NODES
        )));
        return F32(zero);
    }
    let terms: Vec<F32> = range.map(|i| f(I32::from(i))).collect();
    add_up(&terms)
}

/// A long chain would be deeper than expressions may be.
fn add_up(terms: &[F32]) -> F32 {
    if terms.len() > 256 {
        let (first, second) = terms.split_at(terms.len() / 2);
        return add_up(first) + add_up(second);
    }
    terms.iter().cloned().reduce(|a, b| a + b).unwrap_or_else(|| F32::from(0.0f32))
}

/// The position in the score matrix, as a mask sees it.
#[derive(Debug, Clone)]
pub struct Index {
    batch: I32,
    head: I32,
    q: I32,
    kv: I32,
}

impl Default for Index {
    fn default() -> Index {
        let input = |input| I32(Term::new(Expr::input(input)));
        Index {
            batch: input(Input::Batch),
            head: input(Input::Head),
            q: input(Input::Q),
            kv: input(Input::Kv),
        }
    }
}

impl Index {
    /// The kernel's own position.
    pub fn new() -> Index {
        Index::default()
    }

    /// The same position with another batch index.
    pub fn with_batch(mut self, batch: impl Into<I32>) -> Index {
        self.batch = batch.into();
        self
    }

    /// The same position with another head.
    pub fn with_head(mut self, head: impl Into<I32>) -> Index {
        self.head = head.into();
        self
    }

    /// The same position with another query position.
    pub fn with_q(mut self, q: impl Into<I32>) -> Index {
        self.q = q.into();
        self
    }

    /// The same position with another key position.
    pub fn with_kv(mut self, kv: impl Into<I32>) -> Index {
        self.kv = kv.into();
        self
    }

    /// `b`: the batch index.
    pub fn batch(&self) -> I32 {
        self.batch.clone()
    }

    /// `h`: the QUERY head.
    pub fn head(&self) -> I32 {
        self.head.clone()
    }

    /// `q`: the query position, `q_offset` included.
    pub fn q(&self) -> I32 {
        self.q.clone()
    }

    /// `kv`: the key position.
    pub fn kv(&self) -> I32 {
        self.kv.clone()
    }

    /// `q_len`: the number of query rows.
    pub fn q_len(&self) -> I32 {
        I32(Term::new(Expr::input(Input::QLen)))
    }

    /// `kv_len`: the number of keys of this batch entry.
    pub fn kv_len(&self) -> I32 {
        I32(Term::new(Expr::input(Input::KvLen)))
    }
}

/// A score and its position, as a score mod sees them.
#[derive(Debug, Clone)]
pub struct Score {
    score: F32,
    index: Index,
}

impl Default for Score {
    fn default() -> Score {
        Score { score: F32(Term::new(Expr::input(Input::Score))), index: Index::default() }
    }
}

impl Score {
    /// The kernel's own score and position.
    pub fn new() -> Score {
        Score::default()
    }

    /// The same position with another score.
    pub fn with_score(mut self, score: impl Into<F32>) -> Score {
        self.score = score.into();
        self
    }

    /// The same score at another position.
    pub fn with_index(mut self, index: Index) -> Score {
        self.index = index;
        self
    }

    /// `score`: dot(q, k) * scale, in f32 and natural units.
    pub fn score(&self) -> F32 {
        self.score.clone()
    }
}

impl Deref for Score {
    type Target = Index;

    fn deref(&self) -> &Index {
        &self.index
    }
}
