//! What a value may be when its inputs vary: interval arithmetic that never excludes a possible value.

use super::Float;
use super::value::{Lane, Type, Value};

/// The values that an expression may take: all of `lo..=hi`, and NaN if `nan`.
///
/// i32, u32 and bool (0 and 1) are held in f64 exactly. For f32 the ends allow for every rounding that a GPU
/// may do. A range that only NaN can take has `lo > hi`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// The smallest value.
    pub lo: f64,
    /// The largest value.
    pub hi: f64,
    /// Whether the value may be NaN.
    pub nan: bool,
}

impl Range {
    /// Every value of the type.
    pub fn all(ty: Type) -> Range {
        match ty {
            Type::F32 => Range { lo: f64::NEG_INFINITY, hi: f64::INFINITY, nan: true },
            Type::I32 => Range::of(i32::MIN.into(), i32::MAX.into()),
            Type::U32 => Range::of(0.0, u32::MAX.into()),
            Type::Bool => Range::of(0.0, 1.0),
        }
    }

    /// `lo..=hi`, never NaN.
    pub fn of(lo: f64, hi: f64) -> Range {
        Range { lo, hi, nan: false }
    }

    /// One value.
    pub fn value(value: Value) -> Range {
        let x = Lane::<f32>::of(value).to_f64();
        if x.is_nan() {
            Range { lo: f64::INFINITY, hi: f64::NEG_INFINITY, nan: true }
        } else {
            Range::of(x, x)
        }
    }

    /// Whether only one value is possible.
    pub fn single(self) -> Option<f64> {
        (self.lo == self.hi && !self.nan).then_some(self.lo)
    }

    /// For a bool: whether it is always true.
    pub fn always(self) -> bool {
        self.lo == 1.0
    }

    /// For a bool: whether it is never true.
    pub fn never(self) -> bool {
        self.hi == 0.0
    }

    /// Every value of either.
    pub fn or(self, other: Range) -> Range {
        Range { lo: self.lo.min(other.lo), hi: self.hi.max(other.hi), nan: self.nan || other.nan }
    }

    /// Whether `lane` is one of the values.
    pub fn contains<F: Float>(self, lane: Lane<F>) -> bool {
        let x = lane.to_f64();
        if x.is_nan() { self.nan } else { self.lo <= x && x <= self.hi }
    }
}
