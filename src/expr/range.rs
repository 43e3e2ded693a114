//! What a value may be when its inputs vary: interval arithmetic that never excludes a possible value.
//!
//! For f32 the ends hold whatever a GPU may compute: they are rounded outward to f32, subnormals may become 0,
//! and functions carry the error that WGSL allows them, doubled or more. The exact value, which the reference
//! computes in f64, lies inside too.

use super::value::{Float, Lane, Type, Value};

/// The values that an expression may take: all of `lo..=hi`, and NaN if `nan`.
///
/// i32, u32 and bool (0 and 1) are held in f64 exactly.
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
            Type::F32 => ANY,
            Type::I32 => Range::of(i32::MIN.into(), i32::MAX.into()),
            Type::U32 => Range::of(0.0, u32::MAX.into()),
            Type::Bool => EITHER,
        }
    }

    /// `lo..=hi`, never NaN.
    pub fn of(lo: f64, hi: f64) -> Range {
        Range { lo, hi, nan: false }
    }

    /// One value; everything for a NaN.
    pub fn value(value: Value) -> Range {
        let x = Lane::<f32>::of(value).to_f64();
        if x.is_nan() {
            ANY
        } else if value.ty() == Type::F32 {
            float(x, x, false)
        } else {
            Range::of(x, x)
        }
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

    fn holds(self, x: f64) -> bool {
        self.lo <= x && x <= self.hi
    }

    fn infinite(self) -> bool {
        self.lo == f64::NEG_INFINITY || self.hi == f64::INFINITY
    }

    fn single(self) -> bool {
        self.lo == self.hi && !self.nan
    }
}

const ANY: Range = Range { lo: f64::NEG_INFINITY, hi: f64::INFINITY, nan: true };
const EITHER: Range = Range { lo: 0.0, hi: 1.0, nan: false };
const TINY: f64 = f32::MIN_POSITIVE as f64;

/// An f32 range with its ends rounded outward, subnormals widened to 0.
pub(crate) fn float(lo: f64, hi: f64, nan: bool) -> Range {
    if lo.is_nan() || hi.is_nan() {
        return ANY;
    }
    let (low, high) = (lo as f32, hi as f32);
    let mut lo = f64::from(if f64::from(low) > lo { low.next_down() } else { low });
    let mut hi = f64::from(if f64::from(high) < hi { high.next_up() } else { high });
    if lo > 0.0 && lo < TINY {
        lo = 0.0;
    }
    if hi < 0.0 && hi > -TINY {
        hi = 0.0;
    }
    Range { lo, hi, nan }
}

/// An f32 range from exact ends and the error that each may have, relative and absolute.
fn inexact(lo: f64, hi: f64, relative: f64, absolute: f64, nan: bool) -> Range {
    let error = |x: f64| if x.is_finite() { x.abs() * relative + absolute } else { 0.0 };
    float(lo - error(lo), hi + error(hi), nan)
}

/// 2^-20: eight units in the last place, about three times what WGSL allows a division.
const ULPS: f64 = 1.0 / 1_048_576.0;

fn integer(ty: Type, lo: f64, hi: f64) -> Range {
    let all = Range::all(ty);
    if lo < all.lo || hi > all.hi || lo.is_nan() || hi.is_nan() { all } else { Range::of(lo, hi) }
}

fn i32s(lo: f64, hi: f64) -> Range {
    integer(Type::I32, lo, hi)
}

fn u32s(lo: f64, hi: f64) -> Range {
    integer(Type::U32, lo, hi)
}

/// The smallest and the largest of four.
fn hull(x: [f64; 4]) -> (f64, f64) {
    (x[0].min(x[1]).min(x[2].min(x[3])), x[0].max(x[1]).max(x[2].max(x[3])))
}

fn truth(possible: bool, certain: bool, nan: bool) -> Range {
    // Where NaN may occur nothing is certain: fast math need not respect it.
    if nan { EITHER } else { Range::of(f64::from(u8::from(certain)), f64::from(u8::from(possible))) }
}

/// Range of an operation from the ranges of at most three arguments; those beyond the last one are ignored.
pub(crate) type RangeFn = fn(Range, Range, Range) -> Range;

pub(crate) fn same(a: Range, _: Range, _: Range) -> Range {
    a
}

pub(crate) fn any_f32(_: Range, _: Range, _: Range) -> Range {
    ANY
}

pub(crate) fn any_i32(_: Range, _: Range, _: Range) -> Range {
    Range::all(Type::I32)
}

pub(crate) fn any_u32(_: Range, _: Range, _: Range) -> Range {
    Range::all(Type::U32)
}

pub(crate) fn bit_count(_: Range, _: Range, _: Range) -> Range {
    Range::of(0.0, 32.0)
}

pub(crate) fn neg_f32(a: Range, _: Range, _: Range) -> Range {
    Range { lo: -a.hi, hi: -a.lo, nan: a.nan }
}

pub(crate) fn neg_i32(a: Range, _: Range, _: Range) -> Range {
    i32s(-a.hi, -a.lo)
}

pub(crate) fn not_bool(a: Range, _: Range, _: Range) -> Range {
    Range::of(1.0 - a.hi, 1.0 - a.lo)
}

pub(crate) fn not_i32(a: Range, _: Range, _: Range) -> Range {
    Range::of(-1.0 - a.hi, -1.0 - a.lo)
}

pub(crate) fn not_u32(a: Range, _: Range, _: Range) -> Range {
    let max = f64::from(u32::MAX);
    Range::of(max - a.hi, max - a.lo)
}

fn magnitude(a: Range) -> (f64, f64) {
    let far = a.lo.abs().max(a.hi.abs());
    (if a.holds(0.0) { 0.0 } else { a.lo.abs().min(a.hi.abs()) }, far)
}

pub(crate) fn abs_f32(a: Range, _: Range, _: Range) -> Range {
    let (lo, hi) = magnitude(a);
    Range { lo, hi, nan: a.nan }
}

pub(crate) fn abs_i32(a: Range, _: Range, _: Range) -> Range {
    let (lo, hi) = magnitude(a);
    i32s(lo, hi)
}

pub(crate) fn sign(a: Range, _: Range, _: Range) -> Range {
    let sign = |x: f64| {
        if x > 0.0 {
            1.0
        } else if x < 0.0 {
            -1.0
        } else {
            0.0
        }
    };
    if a.nan { Range { lo: -1.0, hi: 1.0, nan: true } } else { Range::of(sign(a.lo), sign(a.hi)) }
}

pub(crate) fn floor(a: Range, _: Range, _: Range) -> Range {
    Range { lo: a.lo.floor(), hi: a.hi.floor(), nan: a.nan }
}

pub(crate) fn ceil(a: Range, _: Range, _: Range) -> Range {
    Range { lo: a.lo.ceil(), hi: a.hi.ceil(), nan: a.nan }
}

pub(crate) fn round(a: Range, _: Range, _: Range) -> Range {
    Range { lo: a.lo.round_ties_even(), hi: a.hi.round_ties_even(), nan: a.nan }
}

pub(crate) fn trunc(a: Range, _: Range, _: Range) -> Range {
    Range { lo: a.lo.trunc(), hi: a.hi.trunc(), nan: a.nan }
}

pub(crate) fn fract(a: Range, _: Range, _: Range) -> Range {
    let nan = a.nan || a.infinite();
    if a.lo.floor() == a.hi.floor() && !a.infinite() {
        return inexact(a.lo - a.lo.floor(), a.hi - a.lo.floor(), ULPS, 0.0, nan);
    }
    Range { lo: 0.0, hi: 1.0, nan }
}

pub(crate) fn sqrt(a: Range, _: Range, _: Range) -> Range {
    if a.hi < 0.0 {
        return ANY;
    }
    inexact(a.lo.max(0.0).sqrt(), a.hi.sqrt(), ULPS, 0.0, a.nan || a.lo < 0.0)
}

fn exponential(a: Range, f: fn(f64) -> f64) -> Range {
    // WGSL: 3 + 2 |x| units in the last place.
    let error = |x: f64| (4.0 + 4.0 * x.abs().min(1e4)) / 4_194_304.0;
    let (lo, hi) = (f(a.lo), f(a.hi));
    let lo = if lo.is_finite() { lo * (1.0 - error(a.lo)) } else { f32::MAX.into() };
    let hi = if hi.is_finite() { hi * (1.0 + error(a.hi)) } else { hi };
    float(lo.max(0.0), hi, a.nan)
}

pub(crate) fn exp(a: Range, _: Range, _: Range) -> Range {
    exponential(a, f64::exp)
}

pub(crate) fn exp2(a: Range, _: Range, _: Range) -> Range {
    exponential(a, f64::exp2)
}

fn logarithm(a: Range, f: fn(f64) -> f64) -> Range {
    if a.hi < 0.0 {
        return ANY;
    }
    // WGSL: 2^-21 near 1, 3 units in the last place elsewhere.
    let (lo, hi) = (f(a.lo.max(0.0)), f(a.hi));
    inexact(lo, if a.hi < TINY { f(TINY) } else { hi }, ULPS, ULPS, a.nan || a.lo < 0.0)
}

pub(crate) fn log(a: Range, _: Range, _: Range) -> Range {
    logarithm(a, f64::ln)
}

pub(crate) fn log2(a: Range, _: Range, _: Range) -> Range {
    logarithm(a, f64::log2)
}

/// sin and cos: 2^-11 absolute within pi, nothing promised beyond it but a value between -1 and 1.
pub(crate) fn wave(a: Range, _: Range, _: Range) -> Range {
    Range { lo: -1.001, hi: 1.001, nan: a.nan || a.infinite() }
}

pub(crate) fn tanh(a: Range, _: Range, _: Range) -> Range {
    inexact(a.lo.tanh(), a.hi.tanh(), 0.0, 1e-4, a.nan)
}

pub(crate) fn sigmoid(a: Range, _: Range, _: Range) -> Range {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (lo, hi) = (sigmoid(a.lo), sigmoid(a.hi));
    float((lo - 1e-4).max(0.0), hi + 1e-4, a.nan)
}

pub(crate) fn add_f32(a: Range, b: Range, _: Range) -> Range {
    let nan = (a.hi == f64::INFINITY && b.lo == f64::NEG_INFINITY)
        || (a.lo == f64::NEG_INFINITY && b.hi == f64::INFINITY);
    float(a.lo + b.lo, a.hi + b.hi, a.nan || b.nan || nan)
}

pub(crate) fn sub_f32(a: Range, b: Range, c: Range) -> Range {
    add_f32(a, neg_f32(b, b, b), c)
}

pub(crate) fn mul_f32(a: Range, b: Range, _: Range) -> Range {
    let nan = a.nan || b.nan || (a.holds(0.0) && b.infinite()) || (b.holds(0.0) && a.infinite());
    let product = |x: f64, y: f64| if x == 0.0 || y == 0.0 { 0.0 } else { x * y };
    let (lo, hi) = hull([product(a.lo, b.lo), product(a.lo, b.hi), product(a.hi, b.lo), product(a.hi, b.hi)]);
    float(lo, hi, nan)
}

pub(crate) fn div_f32(a: Range, b: Range, _: Range) -> Range {
    // WGSL's bound on the error holds for divisors from 2^-126 to 2^126.
    let (near, far) = magnitude(b);
    if near < TINY || far > 8.5e37 {
        return ANY;
    }
    let (lo, hi) = hull([a.lo / b.lo, a.lo / b.hi, a.hi / b.lo, a.hi / b.hi]);
    inexact(lo, hi, ULPS, 0.0, a.nan || b.nan)
}

pub(crate) fn pow(a: Range, b: Range, c: Range) -> Range {
    if a.lo < 0.0 || a.nan { ANY } else { exp2(mul_f32(b, log2(a, b, c), c), b, c) }
}

pub(crate) fn add_i32(a: Range, b: Range, _: Range) -> Range {
    i32s(a.lo + b.lo, a.hi + b.hi)
}

pub(crate) fn add_u32(a: Range, b: Range, _: Range) -> Range {
    u32s(a.lo + b.lo, a.hi + b.hi)
}

pub(crate) fn sub_i32(a: Range, b: Range, _: Range) -> Range {
    i32s(a.lo - b.hi, a.hi - b.lo)
}

pub(crate) fn sub_u32(a: Range, b: Range, _: Range) -> Range {
    u32s(a.lo - b.hi, a.hi - b.lo)
}

pub(crate) fn mul_i32(a: Range, b: Range, _: Range) -> Range {
    let (lo, hi) = hull([a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi]);
    i32s(lo, hi)
}

pub(crate) fn mul_u32(a: Range, b: Range, _: Range) -> Range {
    u32s(a.lo * b.lo, a.hi * b.hi)
}

/// a / b rounded by `round`, with x / 0 = x. Quotients of 32-bit integers round correctly in f64.
fn quotient(ty: Type, a: Range, b: Range, round: fn(f64) -> f64) -> Range {
    let mut found: Option<Range> = b.holds(0.0).then_some(a);
    for (lo, hi) in [(b.lo, b.hi.min(-1.0)), (b.lo.max(1.0), b.hi)] {
        if lo <= hi {
            let (lo, hi) = hull([round(a.lo / lo), round(a.lo / hi), round(a.hi / lo), round(a.hi / hi)]);
            let range = integer(ty, lo, hi);
            found = Some(found.map_or(range, |f| f.or(range)));
        }
    }
    found.unwrap_or(Range::all(ty))
}

pub(crate) fn div_i32(a: Range, b: Range, _: Range) -> Range {
    quotient(Type::I32, a, b, f64::trunc)
}

pub(crate) fn div_u32(a: Range, b: Range, _: Range) -> Range {
    quotient(Type::U32, a, b, f64::trunc)
}

pub(crate) fn floor_div(a: Range, b: Range, _: Range) -> Range {
    quotient(Type::I32, a, b, f64::floor)
}

pub(crate) fn rem(a: Range, b: Range, _: Range) -> Range {
    let one_sign = a.lo >= 0.0 || a.hi <= 0.0;
    if b.single() && b.lo != 0.0 && one_sign && (a.lo / b.lo).trunc() == (a.hi / b.lo).trunc() {
        return Range::of(a.lo % b.lo, a.hi % b.lo);
    }
    let most = (magnitude(b).1 - 1.0).max(0.0);
    Range::of(a.lo.min(0.0).max(-most), a.hi.max(0.0).min(most))
}

pub(crate) fn floor_mod(a: Range, b: Range, _: Range) -> Range {
    if b.single() && b.lo != 0.0 {
        let (first, last) = ((a.lo / b.lo).floor(), (a.hi / b.lo).floor());
        if first == last {
            return Range::of(a.lo - first * b.lo, a.hi - first * b.lo);
        }
    }
    if a.lo >= 0.0 && a.hi < b.lo {
        return a;
    }
    Range::of((b.lo + 1.0).min(0.0), (b.hi - 1.0).max(0.0))
}

pub(crate) fn min(a: Range, b: Range, _: Range) -> Range {
    let range = Range { lo: a.lo.min(b.lo), hi: a.hi.min(b.hi), nan: a.nan || b.nan };
    // A NaN operand may give the other one.
    match (a.nan, b.nan) {
        (false, false) => range,
        (true, false) => Range { hi: b.hi, ..range },
        (false, true) => Range { hi: a.hi, ..range },
        (true, true) => Range { hi: a.hi.max(b.hi), ..range },
    }
}

pub(crate) fn max(a: Range, b: Range, c: Range) -> Range {
    let negated = min(neg_f32(a, a, a), neg_f32(b, b, b), c);
    neg_f32(negated, negated, negated)
}

pub(crate) fn clamp(a: Range, b: Range, c: Range) -> Range {
    let low = max(a, b, b);
    let range = min(low, c, c);
    // Of a NaN among the three, any of the other two may remain.
    if a.nan || b.nan || c.nan { Range { nan: true, ..range.or(a).or(b).or(c) } } else { range }
}

pub(crate) fn and_bool(a: Range, b: Range, _: Range) -> Range {
    Range::of(a.lo.min(b.lo), a.hi.min(b.hi))
}

pub(crate) fn or_bool(a: Range, b: Range, _: Range) -> Range {
    Range::of(a.lo.max(b.lo), a.hi.max(b.hi))
}

pub(crate) fn xor_bool(a: Range, b: Range, _: Range) -> Range {
    if a.single() && b.single() {
        let x = f64::from(u8::from(a.lo != b.lo));
        return Range::of(x, x);
    }
    EITHER
}

/// The bits of a range of one sign: those that all its values share, and which ones vary.
fn bits(ty: Type, a: Range) -> Option<(u32, u32)> {
    if a.lo < 0.0 && a.hi >= 0.0 {
        return None;
    }
    let word = |x: f64| if ty == Type::I32 { x as i32 as u32 } else { x as u32 };
    let (lo, hi) = (word(a.lo), word(a.hi));
    let varying = u32::MAX.checked_shr((lo ^ hi).leading_zeros()).unwrap_or(0);
    Some((lo & !varying, varying))
}

fn bitwise(
    ty: Type,
    a: Range,
    b: Range,
    f: fn(u32, u32) -> u32,
    known: fn(u32, u32, u32, u32) -> u32,
) -> Range {
    let (Some((a, a_vary)), Some((b, b_vary))) = (bits(ty, a), bits(ty, b)) else {
        return Range::all(ty);
    };
    // Bits of the result that may vary; all others are those of f on the shared bits.
    let vary = known(a, a_vary, b, b_vary);
    let least = f(a, b) & !vary;
    let most = least | vary;
    match ty {
        Type::I32 => {
            let (lo, hi) = (least as i32, most as i32);
            if (lo < 0) == (hi < 0) { Range::of(lo.into(), hi.into()) } else { Range::all(ty) }
        }
        _ => Range::of(least.into(), most.into()),
    }
}

fn and_bits(ty: Type, a: Range, b: Range) -> Range {
    let range = bitwise(
        ty,
        a,
        b,
        |a, b| a & b,
        |a, a_vary, b, b_vary| (a_vary & (b | b_vary)) | (b_vary & (a | a_vary)),
    );
    // x & y is at most the smaller of two that are not negative.
    let most = match (a.lo >= 0.0, b.lo >= 0.0) {
        (true, true) => a.hi.min(b.hi),
        (true, false) => a.hi,
        (false, true) => b.hi,
        (false, false) => return range,
    };
    Range::of(range.lo.max(0.0), range.hi.min(most))
}

fn or_bits(ty: Type, a: Range, b: Range) -> Range {
    bitwise(ty, a, b, |a, b| a | b, |a, a_vary, b, b_vary| (a_vary & !b) | (b_vary & !a))
}

fn xor_bits(ty: Type, a: Range, b: Range) -> Range {
    bitwise(ty, a, b, |a, b| a ^ b, |_, a_vary, _, b_vary| a_vary | b_vary)
}

pub(crate) fn and_i32(a: Range, b: Range, _: Range) -> Range {
    and_bits(Type::I32, a, b)
}

pub(crate) fn and_u32(a: Range, b: Range, _: Range) -> Range {
    and_bits(Type::U32, a, b)
}

pub(crate) fn or_i32(a: Range, b: Range, _: Range) -> Range {
    or_bits(Type::I32, a, b)
}

pub(crate) fn or_u32(a: Range, b: Range, _: Range) -> Range {
    or_bits(Type::U32, a, b)
}

pub(crate) fn xor_i32(a: Range, b: Range, _: Range) -> Range {
    xor_bits(Type::I32, a, b)
}

pub(crate) fn xor_u32(a: Range, b: Range, _: Range) -> Range {
    xor_bits(Type::U32, a, b)
}

fn shift_left(ty: Type, a: Range, b: Range) -> Range {
    if b.hi > 31.0 {
        return Range::all(ty);
    }
    let (least, most) = (b.lo.exp2(), b.hi.exp2());
    let (lo, hi) = hull([a.lo * least, a.lo * most, a.hi * least, a.hi * most]);
    integer(ty, lo, hi)
}

pub(crate) fn shl_i32(a: Range, b: Range, _: Range) -> Range {
    shift_left(Type::I32, a, b)
}

pub(crate) fn shl_u32(a: Range, b: Range, _: Range) -> Range {
    shift_left(Type::U32, a, b)
}

fn shift_right(ty: Type, a: Range, b: Range) -> Range {
    if b.hi > 31.0 {
        return Range::all(ty);
    }
    let (least, most) = (b.lo.exp2(), b.hi.exp2());
    let (lo, hi) = hull([a.lo / least, a.lo / most, a.hi / least, a.hi / most]);
    Range::of(lo.floor(), hi.floor())
}

pub(crate) fn shr_i32(a: Range, b: Range, _: Range) -> Range {
    shift_right(Type::I32, a, b)
}

pub(crate) fn shr_u32(a: Range, b: Range, _: Range) -> Range {
    shift_right(Type::U32, a, b)
}

pub(crate) fn lt(a: Range, b: Range, _: Range) -> Range {
    truth(a.lo < b.hi, a.hi < b.lo, a.nan || b.nan)
}

pub(crate) fn le(a: Range, b: Range, _: Range) -> Range {
    truth(a.lo <= b.hi, a.hi <= b.lo, a.nan || b.nan)
}

pub(crate) fn gt(a: Range, b: Range, c: Range) -> Range {
    lt(b, a, c)
}

pub(crate) fn ge(a: Range, b: Range, c: Range) -> Range {
    le(b, a, c)
}

pub(crate) fn eq(a: Range, b: Range, _: Range) -> Range {
    truth(a.lo <= b.hi && b.lo <= a.hi, a.single() && b.single() && a.lo == b.lo, a.nan || b.nan)
}

pub(crate) fn ne(a: Range, b: Range, c: Range) -> Range {
    let equal = eq(a, b, c);
    not_bool(equal, c, c)
}

pub(crate) fn select(a: Range, b: Range, c: Range) -> Range {
    if a.always() {
        b
    } else if a.never() {
        c
    } else {
        b.or(c)
    }
}

pub(crate) fn to_f32(a: Range, _: Range, _: Range) -> Range {
    float(a.lo, a.hi, false)
}

pub(crate) fn f32_to_i32(a: Range, _: Range, _: Range) -> Range {
    if a.nan { Range::all(Type::I32) } else { saturate(a, -2_147_483_648.0, 2_147_483_520.0) }
}

pub(crate) fn f32_to_u32(a: Range, _: Range, _: Range) -> Range {
    if a.nan { Range::all(Type::U32) } else { saturate(a, 0.0, 4_294_967_040.0) }
}

fn saturate(a: Range, least: f64, most: f64) -> Range {
    Range::of(a.lo.clamp(least, most).trunc(), a.hi.clamp(least, most).trunc())
}

pub(crate) fn u32_to_i32(a: Range, _: Range, _: Range) -> Range {
    const HALF: f64 = 2_147_483_648.0;
    if a.hi < HALF {
        a
    } else if a.lo >= HALF {
        Range::of(a.lo - 2.0 * HALF, a.hi - 2.0 * HALF)
    } else {
        Range::all(Type::I32)
    }
}

pub(crate) fn i32_to_u32(a: Range, _: Range, _: Range) -> Range {
    const WHOLE: f64 = 4_294_967_296.0;
    if a.lo >= 0.0 {
        a
    } else if a.hi < 0.0 {
        Range::of(a.lo + WHOLE, a.hi + WHOLE)
    } else {
        Range::all(Type::U32)
    }
}

pub(crate) fn to_bool(a: Range, _: Range, _: Range) -> Range {
    truth(!(a.lo == 0.0 && a.hi == 0.0), !a.holds(0.0), a.nan)
}
