//! What a captured tensor holds in a box of indices: least and greatest values of aligned chunks.

use crate::expr::{Capture, CaptureData, CaptureRanges, Range};
use std::sync::OnceLock;

/// Elements of the smallest chunks. Chunks above are twice as long each.
const CHUNK: usize = 16;

/// Lines (indices along all axes but one) that one question may look at before it settles for the range
/// of the whole tensor.
const LINES: usize = 128;

/// The summaries of one captured tensor, made along an axis when first asked for.
#[derive(Debug)]
pub(crate) struct Summary {
    capture: Capture,
    axes: [OnceLock<Chunks>; 4],
    whole: OnceLock<Range>,
}

/// Least and greatest value of each chunk along one axis.
#[derive(Debug)]
enum Chunks {
    F32(Levels<f32>),
    I32(Levels<i32>),
    U32(Levels<u32>),
    Bool(Levels<bool>),
}

impl Summary {
    pub(crate) fn new(capture: &Capture) -> Self {
        Self { capture: capture.clone(), axes: Default::default(), whole: OnceLock::new() }
    }

    /// The range of the elements `lo..=hi` along `axis`, from element `base` on.
    fn line(&self, axis: usize, base: usize, lo: usize, hi: usize) -> Range {
        let shape = self.capture.shape();
        let line = Line {
            stride: shape[axis + 1..].iter().product(),
            len: shape[axis],
            outer: shape[..axis].iter().product(),
        };
        let ask = |levels: Option<&Chunks>| match (self.capture.data(), levels) {
            (CaptureData::F32(values), Some(Chunks::F32(levels))) => {
                line.range(levels, base, lo, hi, |i| values[i])
            }
            (CaptureData::F16(values), Some(Chunks::F32(levels))) => {
                line.range(levels, base, lo, hi, |i| values[i].to_f32())
            }
            (CaptureData::BF16(values), Some(Chunks::F32(levels))) => {
                line.range(levels, base, lo, hi, |i| values[i].to_f32())
            }
            (CaptureData::I32(values), Some(Chunks::I32(levels))) => {
                line.range(levels, base, lo, hi, |i| values[i])
            }
            (CaptureData::U32(values), Some(Chunks::U32(levels))) => {
                line.range(levels, base, lo, hi, |i| values[i])
            }
            (CaptureData::Bool(values), Some(Chunks::Bool(levels))) => {
                line.range(levels, base, lo, hi, |i| values[i])
            }
            _ => Range::all(self.capture.dtype().ty()),
        };
        let levels = self.axes[axis].get_or_init(|| match self.capture.data() {
            CaptureData::F32(values) => Chunks::F32(line.levels(|i| values[i])),
            CaptureData::F16(values) => Chunks::F32(line.levels(|i| values[i].to_f32())),
            CaptureData::BF16(values) => Chunks::F32(line.levels(|i| values[i].to_f32())),
            CaptureData::I32(values) => Chunks::I32(line.levels(|i| values[i])),
            CaptureData::U32(values) => Chunks::U32(line.levels(|i| values[i])),
            CaptureData::Bool(values) => Chunks::Bool(line.levels(|i| values[i])),
            CaptureData::Device(_) => Chunks::Bool(Levels::default()),
        });
        ask(Some(levels))
    }

    /// The range of all elements.
    fn whole(&self) -> Range {
        *self.whole.get_or_init(|| {
            let shape = self.capture.shape();
            let Some((&len, rest)) = shape.split_last() else {
                return self.capture.value(0).map_or(Range::all(self.capture.dtype().ty()), Range::value);
            };
            let lines: usize = rest.iter().product();
            (0..lines)
                .map(|line| self.line(shape.len() - 1, line * len, 0, len - 1))
                .reduce(Range::or)
                .unwrap_or(Range::all(self.capture.dtype().ty()))
        })
    }
}

impl CaptureRanges for Summary {
    fn range(&self, index: &[(i64, i64)]) -> Range {
        if let CaptureData::Device(_) = self.capture.data() {
            return Range::all(self.capture.dtype().ty());
        }
        let shape = self.capture.shape();
        let extent = |&(lo, hi): &(i64, i64)| (hi - lo + 1).max(1) as usize;
        let Some(axis) = (0..index.len()).max_by_key(|&axis| extent(&index[axis])) else {
            return self.whole();
        };
        // Every line along the axis of the largest extent; mostly there is one.
        let lines = (0..index.len())
            .filter(|&other| other != axis)
            .try_fold(1usize, |n, other| n.checked_mul(extent(&index[other])).filter(|&n| n <= LINES));
        let Some(lines) = lines else {
            return self.whole();
        };
        let mut found: Option<Range> = None;
        for line in 0..lines {
            let (mut rest, mut stride, mut base) = (line, 1, 0);
            for other in (0..index.len()).rev() {
                if other != axis {
                    let extent = extent(&index[other]);
                    base += (index[other].0 as usize + rest % extent) * stride;
                    rest /= extent;
                }
                stride *= shape[other];
            }
            let range = self.line(axis, base, index[axis].0 as usize, index[axis].1 as usize);
            found = Some(found.map_or(range, |found| found.or(range)));
        }
        found.unwrap_or_else(|| self.whole())
    }
}

/// A value with an order; NaN is outside of it.
trait Ordered: Copy + PartialOrd {
    /// Above every value, below every value.
    const NONE: [Self; 2];

    fn to_f64(self) -> f64;
}

impl Ordered for f32 {
    const NONE: [f32; 2] = [f32::INFINITY, f32::NEG_INFINITY];

    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Ordered for i32 {
    const NONE: [i32; 2] = [i32::MAX, i32::MIN];

    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Ordered for u32 {
    const NONE: [u32; 2] = [u32::MAX, u32::MIN];

    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Ordered for bool {
    const NONE: [bool; 2] = [true, false];

    fn to_f64(self) -> f64 {
        u8::from(self).into()
    }
}

#[derive(Debug)]
struct Levels<T> {
    /// `levels[k][line * chunks_k + i]`: `[least, greatest]` of chunk `i` of `CHUNK << k` elements.
    levels: Vec<Vec<[T; 2]>>,
    /// Whether any element of the tensor is NaN. Then any range may be.
    nan: bool,
}

impl<T> Default for Levels<T> {
    fn default() -> Self {
        Self { levels: Vec::new(), nan: false }
    }
}

/// How the lines along one axis lie in a tensor.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// Distance between neighbours of a line.
    stride: usize,
    /// Elements of a line.
    len: usize,
    /// Product of the dimensions before the axis.
    outer: usize,
}

fn widen<T: Ordered>([lo, hi]: [T; 2], [a, b]: [T; 2]) -> [T; 2] {
    [if a < lo { a } else { lo }, if b > hi { b } else { hi }]
}

impl Line {
    fn levels<T: Ordered>(&self, get: impl Fn(usize) -> T) -> Levels<T> {
        let lines = self.outer * self.stride;
        let chunks = self.len.div_ceil(CHUNK);
        let mut nan = false;
        let mut below = Vec::with_capacity(lines * chunks);
        for line in 0..lines {
            let base = line / self.stride * self.stride * self.len + line % self.stride;
            for chunk in 0..chunks {
                let end = self.len.min((chunk + 1) * CHUNK);
                let mut span = T::NONE;
                for i in chunk * CHUNK..end {
                    let value = get(base + i * self.stride);
                    span = widen(span, [value; 2]);
                    nan |= value.partial_cmp(&value).is_none();
                }
                below.push(span);
            }
        }
        let mut levels = vec![below];
        let mut chunks = chunks;
        while chunks > 1 {
            let below = &levels[levels.len() - 1];
            let mut level = Vec::with_capacity(lines * chunks.div_ceil(2));
            for line in below.chunks_exact(chunks) {
                level.extend(line.chunks(2).map(|pair| widen(pair[0], pair[pair.len() - 1])));
            }
            levels.push(level);
            chunks = chunks.div_ceil(2);
        }
        Levels { levels, nan }
    }

    /// The range of elements `lo..=hi` of the line whose first element is at `base`.
    fn range<T: Ordered>(
        &self,
        levels: &Levels<T>,
        base: usize,
        lo: usize,
        hi: usize,
        get: impl Fn(usize) -> T,
    ) -> Range {
        let line = base / (self.stride * self.len) * self.stride + base % self.stride;
        let end = hi + 1;
        let mut span = T::NONE;
        let mut at = lo;
        while at < end {
            // The largest aligned chunk that starts here and does not reach beyond the end, except beyond
            // the end of the line itself.
            let fits = |level: usize| {
                let size = CHUNK << level;
                at.is_multiple_of(size) && (at + size <= end || end == self.len)
            };
            if !fits(0) {
                span = widen(span, [get(base + at * self.stride); 2]);
                at += 1;
                continue;
            }
            let mut level = 0;
            while level + 1 < levels.levels.len() && fits(level + 1) {
                level += 1;
            }
            let size = CHUNK << level;
            span = widen(span, levels.levels[level][line * self.len.div_ceil(size) + at / size]);
            at += size;
        }
        Range { lo: span[0].to_f64(), hi: span[1].to_f64(), nan: levels.nan }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::Lane;

    #[test]
    fn summary_of_a_box_is_the_exact_range_of_its_elements_along_every_axis() -> crate::Result<()> {
        let shape = [3usize, 50, 2, 70];
        let len: usize = shape.iter().product();
        let values: Vec<i32> = (0..len).map(|i| (i as i32).wrapping_mul(0x5bd1_e995) >> 8).collect();
        let capture: Capture = Capture::i32("x", &values, &shape)?.into();
        let summary = Summary::new(&capture);
        let mut state = 7u32;
        let mut below = |n: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as usize % n
        };
        for _ in 0..2000 {
            let axis = below(4);
            let mut index = [(0i64, 0i64); 4];
            for (other, slot) in index.iter_mut().enumerate() {
                let lo = below(shape[other]);
                let hi = if other == axis { lo + below(shape[other] - lo) } else { lo };
                *slot = (lo as i64, hi as i64);
            }
            let elements: Vec<i32> = (index[axis].0..=index[axis].1)
                .map(|i| {
                    let mut at = index.map(|(lo, _)| lo as usize);
                    at[axis] = i as usize;
                    values[at.iter().zip(&shape).fold(0, |sum, (i, n)| sum * n + i)]
                })
                .collect();
            let range = summary.range(&index);
            assert_eq!(Some(range.lo), elements.iter().min().map(|&x| f64::from(x)));
            assert_eq!(Some(range.hi), elements.iter().max().map(|&x| f64::from(x)));
        }
        Ok(())
    }

    #[test]
    fn boxes_of_several_lines_are_covered() -> crate::Result<()> {
        let values: Vec<bool> = (0..64 * 300).map(|i| i == 40 * 300 + 123).collect();
        let capture: Capture = Capture::bool("x", &values, &[64, 300])?.into();
        let summary = Summary::new(&capture);
        assert_eq!(summary.range(&[(0, 39), (0, 299)]).hi, 0.0);
        assert_eq!(summary.range(&[(0, 40), (100, 200)]).hi, 1.0);
        assert_eq!(summary.range(&[(40, 40), (123, 123)]).lo, 1.0);
        assert_eq!(summary.range(&[(0, 63), (0, 299)]).hi, 1.0);
        Ok(())
    }

    #[test]
    fn nan_is_in_the_range_and_hides_no_number() -> crate::Result<()> {
        let mut values = vec![1.0f32; 100];
        values[3] = f32::NAN;
        values[90] = -5.0;
        let capture: Capture = Capture::f32("x", &values, &[100])?.into();
        let range = Summary::new(&capture).range(&[(0, 99)]);
        assert!(range.nan && range.lo == -5.0 && range.hi == 1.0);
        assert!(range.contains(Lane::F32(f32::NAN)));
        Ok(())
    }

    #[test]
    fn single_value_has_its_own_range() -> crate::Result<()> {
        let capture: Capture = Capture::i32("x", &[42], &[])?.into();
        let range = Summary::new(&capture).range(&[]);
        assert_eq!((range.lo, range.hi), (42.0, 42.0));
        Ok(())
    }
}
