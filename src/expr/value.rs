//! Types and values: one value ([`Value`]), one value in f32 or f64 ([`Lane`]), many ([`Column`]).

use std::fmt;

/// The type of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// IEEE binary32 on the GPU; f64 in the reference.
    F32,
    /// Two's complement, wraps.
    I32,
    /// Wraps.
    U32,
    /// true or false.
    Bool,
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Type::F32 => "f32",
            Type::I32 => "i32",
            Type::U32 => "u32",
            Type::Bool => "bool",
        })
    }
}

/// A constant or the value of a run-time scalar. Equality goes by bits, so that NaN equals itself and -0
/// differs from 0.
#[derive(Debug, Clone, Copy)]
pub enum Value {
    /// An f32.
    F32(f32),
    /// An i32.
    I32(i32),
    /// A u32.
    U32(u32),
    /// A bool.
    Bool(bool),
}

impl Value {
    /// The type of the value.
    pub fn ty(self) -> Type {
        match self {
            Value::F32(_) => Type::F32,
            Value::I32(_) => Type::I32,
            Value::U32(_) => Type::U32,
            Value::Bool(_) => Type::Bool,
        }
    }

    /// The value as a 32-bit word: the bits of the number, 0 or 1 for a bool.
    pub fn bits(self) -> u32 {
        match self {
            Value::F32(x) => x.to_bits(),
            Value::I32(x) => x as u32,
            Value::U32(x) => x,
            Value::Bool(x) => x.into(),
        }
    }

    /// 0 or false.
    pub fn zero(ty: Type) -> Value {
        match ty {
            Type::F32 => Value::F32(0.0),
            Type::I32 => Value::I32(0),
            Type::U32 => Value::U32(0),
            Type::Bool => Value::Bool(false),
        }
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Value) -> bool {
        self.ty() == other.ty() && self.bits() == other.bits()
    }
}

impl Eq for Value {}

impl std::hash::Hash for Value {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.ty().hash(state);
        self.bits().hash(state);
    }
}

impl From<f32> for Value {
    fn from(x: f32) -> Value {
        Value::F32(x)
    }
}

impl From<i32> for Value {
    fn from(x: i32) -> Value {
        Value::I32(x)
    }
}

impl From<u32> for Value {
    fn from(x: u32) -> Value {
        Value::U32(x)
    }
}

impl From<bool> for Value {
    fn from(x: bool) -> Value {
        Value::Bool(x)
    }
}

impl fmt::Display for Value {
    /// As a WGSL literal, where WGSL has one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::F32(x) => write!(f, "{x:?}"),
            Value::I32(x) => write!(f, "{x}"),
            Value::U32(x) => write!(f, "{x}u"),
            Value::Bool(x) => write!(f, "{x}"),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// The number that stands for f32 while an expression is evaluated: f32 as the GPU does, f64 for the reference.
pub trait Float:
    sealed::Sealed
    + Copy
    + Default
    + PartialOrd
    + fmt::Debug
    + Send
    + Sync
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + 'static
{
    #![doc(hidden)]
    fn of(x: f32) -> Self;
    fn of_i32(x: i32) -> Self;
    fn of_u32(x: u32) -> Self;
    fn to_f64(self) -> f64;
    fn to_f32(self) -> f32;
    fn to_i32(self) -> i32;
    fn to_u32(self) -> u32;
    fn abs(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    fn round(self) -> Self;
    fn trunc(self) -> Self;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn exp2(self) -> Self;
    fn log(self) -> Self;
    fn log2(self) -> Self;
    fn pow(self, y: Self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn tan(self) -> Self;
    fn tanh(self) -> Self;
    fn min(self, y: Self) -> Self;
    fn max(self, y: Self) -> Self;
}

macro_rules! float {
    ($float:ty) => {
        impl Float for $float {
            fn of(x: f32) -> Self {
                x.into()
            }
            fn of_i32(x: i32) -> Self {
                x as $float
            }
            fn of_u32(x: u32) -> Self {
                x as $float
            }
            fn to_f64(self) -> f64 {
                self.into()
            }
            fn to_f32(self) -> f32 {
                self as f32
            }
            fn to_i32(self) -> i32 {
                // The largest f32 below 2^31: what WGSL clamps to.
                if self >= 2_147_483_520.0 { 2_147_483_520 } else { self as i32 }
            }
            fn to_u32(self) -> u32 {
                if self >= 4_294_967_040.0 { 4_294_967_040 } else { self as u32 }
            }
            fn abs(self) -> Self {
                self.abs()
            }
            fn floor(self) -> Self {
                self.floor()
            }
            fn ceil(self) -> Self {
                self.ceil()
            }
            fn round(self) -> Self {
                self.round_ties_even()
            }
            fn trunc(self) -> Self {
                self.trunc()
            }
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn exp2(self) -> Self {
                self.exp2()
            }
            fn log(self) -> Self {
                self.ln()
            }
            fn log2(self) -> Self {
                self.log2()
            }
            fn pow(self, y: Self) -> Self {
                // Of -0 as of 0: the sign of a zero does not survive every driver.
                if self == 0.0 && y < 0.0 { <$float>::INFINITY } else { self.powf(y) }
            }
            fn sin(self) -> Self {
                self.sin()
            }
            fn cos(self) -> Self {
                self.cos()
            }
            fn tan(self) -> Self {
                self.tan()
            }
            fn tanh(self) -> Self {
                self.tanh()
            }
            fn min(self, y: Self) -> Self {
                self.min(y)
            }
            fn max(self, y: Self) -> Self {
                self.max(y)
            }
        }
    };
}

float!(f32);
float!(f64);

/// One value during evaluation, with `F` (f32 or f64) for the type f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lane<F> {
    /// A value of type f32.
    F32(F),
    /// A value of type i32.
    I32(i32),
    /// A value of type u32.
    U32(u32),
    /// A value of type bool.
    Bool(bool),
}

impl<F: Float> Lane<F> {
    /// The value of a constant.
    pub fn of(value: Value) -> Lane<F> {
        match value {
            Value::F32(x) => Lane::F32(F::of(x)),
            Value::I32(x) => Lane::I32(x),
            Value::U32(x) => Lane::U32(x),
            Value::Bool(x) => Lane::Bool(x),
        }
    }

    /// The float, if the value is of type f32.
    pub fn as_float(self) -> Option<F> {
        if let Lane::F32(x) = self { Some(x) } else { None }
    }

    /// The truth value, if the value is of type bool.
    pub fn as_bool(self) -> Option<bool> {
        if let Lane::Bool(x) = self { Some(x) } else { None }
    }

    /// The number as f64, exactly; 0 or 1 for a bool.
    pub fn to_f64(self) -> f64 {
        match self {
            Lane::F32(x) => x.to_f64(),
            Lane::I32(x) => x.into(),
            Lane::U32(x) => x.into(),
            Lane::Bool(x) => u8::from(x).into(),
        }
    }
}

impl Lane<f32> {
    /// Back to a constant.
    pub fn value(self) -> Value {
        match self {
            Lane::F32(x) => Value::F32(x),
            Lane::I32(x) => Value::I32(x),
            Lane::U32(x) => Value::U32(x),
            Lane::Bool(x) => Value::Bool(x),
        }
    }
}

/// Values of one expression at many points.
#[derive(Debug, Clone, PartialEq)]
pub enum Column<F> {
    /// Values of type f32.
    F32(Vec<F>),
    /// Values of type i32.
    I32(Vec<i32>),
    /// Values of type u32.
    U32(Vec<u32>),
    /// Values of type bool.
    Bool(Vec<bool>),
}

impl<F: Float> Column<F> {
    pub(crate) fn new(ty: Type) -> Column<F> {
        match ty {
            Type::F32 => Column::F32(Vec::new()),
            Type::I32 => Column::I32(Vec::new()),
            Type::U32 => Column::U32(Vec::new()),
            Type::Bool => Column::Bool(Vec::new()),
        }
    }

    /// One constant.
    pub(crate) fn of(value: Value) -> Column<F> {
        match Lane::of(value) {
            Lane::F32(x) => Column::F32(vec![x]),
            Lane::I32(x) => Column::I32(vec![x]),
            Lane::U32(x) => Column::U32(vec![x]),
            Lane::Bool(x) => Column::Bool(vec![x]),
        }
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        match self {
            Column::F32(x) => x.len(),
            Column::I32(x) => x.len(),
            Column::U32(x) => x.len(),
            Column::Bool(x) => x.len(),
        }
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value at `i`.
    ///
    /// # Panics
    /// When `i` is not below [`Column::len`].
    pub fn lane(&self, i: usize) -> Lane<F> {
        match self {
            Column::F32(x) => Lane::F32(x[i]),
            Column::I32(x) => Lane::I32(x[i]),
            Column::U32(x) => Lane::U32(x[i]),
            Column::Bool(x) => Lane::Bool(x[i]),
        }
    }

    /// The floats, empty if the type is not f32.
    pub fn floats(&self) -> &[F] {
        if let Column::F32(x) = self { x } else { &[] }
    }

    /// The truth values, empty if the type is not bool.
    pub fn bools(&self) -> &[bool] {
        if let Column::Bool(x) = self { x } else { &[] }
    }

    pub(crate) fn resize(&mut self, n: usize) {
        match self {
            Column::F32(x) => x.resize(n, F::default()),
            Column::I32(x) => x.resize(n, 0),
            Column::U32(x) => x.resize(n, 0),
            Column::Bool(x) => x.resize(n, false),
        }
    }

    /// `n` copies of the first value.
    pub(crate) fn spread(&mut self, n: usize) {
        fn copies<T: Copy>(x: &mut Vec<T>, n: usize) {
            let first = x[0];
            x.clear();
            x.resize(n, first);
        }
        match self {
            Column::F32(x) => copies(x, n),
            Column::I32(x) => copies(x, n),
            Column::U32(x) => copies(x, n),
            Column::Bool(x) => copies(x, n),
        }
    }

    pub(crate) fn set(&mut self, lane: Lane<F>) {
        match (self, lane) {
            (Column::F32(x), Lane::F32(v)) => x.fill(v),
            (Column::I32(x), Lane::I32(v)) => x.fill(v),
            (Column::U32(x), Lane::U32(v)) => x.fill(v),
            (Column::Bool(x), Lane::Bool(v)) => x.fill(v),
            _ => unreachable!("a column keeps its type"),
        }
    }
}

/// The element of a column: `F`, i32, u32 or bool.
pub(crate) trait Element<F>: Copy {
    const TYPE: Type;
    fn of(column: &Column<F>) -> &[Self];
    fn of_mut(column: &mut Column<F>) -> &mut [Self];
}

macro_rules! element {
    ($name:ident, $ty:ty $(, $float:ident)?) => {
        impl<F: Float> Element<F> for $ty {
            const TYPE: Type = Type::$name;
            fn of(column: &Column<F>) -> &[Self] {
                if let Column::$name(x) = column { x } else { unreachable!("types are checked when built") }
            }
            fn of_mut(column: &mut Column<F>) -> &mut [Self] {
                if let Column::$name(x) = column { x } else { unreachable!("types are checked when built") }
            }
        }
    };
}

element!(I32, i32);
element!(U32, u32);
element!(Bool, bool);
element!(F32, F);
