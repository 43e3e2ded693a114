//! Element types, layouts, and every check on sizes.
//!
//! The letters of the field: B batch, Hq and Hkv query and kv heads, L q_len, S kv_len, E head_dim,
//! Ev v_dim. Query head `h` reads kv head `h / (Hq / Hkv)`.

use crate::error::{Error, Result};
use std::fmt;
use std::ops::Range;

/// Rows and columns of the blocks that kernels skip by.
pub const BLOCK: usize = 128;

/// Element type of q, k, v and out. Softmax state and sums are f32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an f32, stored as 16-bit words and widened when read.
    BF16,
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// `f32`, `f16` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        }
    }

    /// The type with this name.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] for any other name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
            Error::dtype(format!("dtype is `{name}` but must be one of f32, f16, bf16; convert the tensor"))
        })
    }

    /// The values in `bytes` (little endian) as f32.
    pub fn widen(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            DType::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            DType::F16 => {
                bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            DType::BF16 => {
                bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
        }
    }

    /// `values` rounded to nearest even in this type, as little-endian bytes.
    pub fn narrow(self, values: &[f32]) -> Vec<u8> {
        match self {
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect(),
            DType::BF16 => values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that is a [`DType`].
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its name on the GPU.
    const DTYPE: DType;
    /// Widened exactly.
    fn to_f32(self) -> f32;
    /// Rounded to nearest even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
    fn to_f32(self) -> f32 {
        half::f16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        half::f16::from_f32(value)
    }
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
    fn to_f32(self) -> f32 {
        half::bf16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        half::bf16::from_f32(value)
    }
}

/// Where the elements of a `[B, H, L, D]` tensor lie in a buffer, counted in elements.
///
/// The order of the shape is always batch, head, row, column; a `[B, L, H, D]` tensor in memory is
/// the same shape with other strides ([`Layout::blhd`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Batch, heads, rows, columns.
    pub shape: [usize; 4],
    /// Distance between neighbours along each axis; the last is 1.
    pub strides: [usize; 4],
    /// The first element's place in the buffer.
    pub offset: usize,
}

impl Layout {
    /// Row-major `[B, H, L, D]` from the buffer's start.
    ///
    /// # Errors
    ///
    /// [`Error::Overflow`] when the last element's index does not fit u32; [`Error::Shape`] for a
    /// column count of 0.
    ///
    /// ```
    /// let layout = flexattn::Layout::contiguous([2, 4, 16, 8])?;
    /// assert_eq!(layout.strides, [512, 128, 8, 1]);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn contiguous(shape: [usize; 4]) -> Result<Self> {
        let [_, heads, rows, columns] = shape.map(|d| d as u64);
        let row = columns.max(1);
        let head = row.checked_mul(rows.max(1));
        let batch = head.and_then(|head| head.checked_mul(heads.max(1)));
        let (Some(head), Some(batch)) = (head, batch) else { return Err(too_long(shape)) };
        let fits = |stride: u64| usize::try_from(stride).map_err(|_| too_long(shape));
        Self::new(shape, [fits(batch)?, fits(head)?, fits(row)?, 1], 0)
    }

    /// A tensor that lies in memory as `[B, L, H, D]`, row-major; `shape` is still `[B, H, L, D]`.
    ///
    /// # Errors
    ///
    /// As [`Layout::contiguous`].
    pub fn blhd(shape: [usize; 4]) -> Result<Self> {
        let [batch, heads, rows, columns] = shape;
        let swapped = Self::contiguous([batch, rows, heads, columns])?;
        let [b, l, h, d] = swapped.strides;
        Self::new(shape, [b, h, l, d], 0)
    }

    /// Any strides with inner stride 1, any offset, all in elements. Strides of axes of length 1 do
    /// not matter.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for an inner stride other than 1 or for 0 columns, [`Error::Overflow`] when
    /// an element's index does not fit u32.
    pub fn new(shape: [usize; 4], strides: [usize; 4], offset: usize) -> Result<Self> {
        if shape[3] == 0 {
            return Err(Error::shape(format!(
                "the last size of {shape:?} is 0 but a head needs at least one column"
            )));
        }
        if strides[3] != 1 && shape[3] > 1 {
            return Err(Error::shape(format!(
                "the inner stride is {} but must be 1; copy the tensor so that its last axis is contiguous",
                strides[3]
            )));
        }
        let layout = Self { shape, strides: [strides[0], strides[1], strides[2], 1], offset };
        let end = layout.checked_end().ok_or_else(|| too_long(shape))?;
        // Strides travel as u32, those of axes of length 1 too.
        if end > u64::from(u32::MAX) || layout.strides.iter().any(|&s| u32::try_from(s).is_err()) {
            return Err(too_long(shape));
        }
        Ok(layout)
    }

    /// The same tensor `offset` elements further into the buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Overflow`] when an element's index does not fit u32.
    pub fn at(self, offset: usize) -> Result<Self> {
        Self::new(self.shape, self.strides, offset)
    }

    /// Number of elements of the tensor (not of the buffer).
    pub fn elements(&self) -> usize {
        product(&self.shape)
    }

    /// No element at all.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// One past the last element's index in the buffer; the offset itself when empty.
    pub fn end(&self) -> usize {
        self.checked_end().map_or(usize::MAX, |end| end as usize)
    }

    fn checked_end(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(self.offset as u64);
        }
        let mut last = self.offset as u64;
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add((size as u64 - 1).checked_mul(stride as u64)?)?;
        }
        last.checked_add(1)
    }

    /// Row-major with no gaps, whatever the offset.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1usize;
        for axis in (0..4).rev() {
            if self.shape[axis] > 1 && self.strides[axis] != expected {
                return false;
            }
            expected = expected.saturating_mul(self.shape[axis].max(1));
        }
        true
    }

    /// Whether an element of each lies in the same place of one buffer. No two of `self` may
    /// ([`Layout::check_writable`]).
    pub(crate) fn meets(&self, other: &Layout) -> bool {
        if self.is_empty() || other.is_empty() || self.offset >= other.end() || other.offset >= self.end() {
            return false;
        }
        let mut axes = [0, 1, 2, 3].map(|axis| (self.strides[axis], self.shape[axis]));
        axes.sort_unstable();
        // Every row of the other, once where a stride of 0 repeats it.
        let [batch, heads, rows] =
            [0, 1, 2].map(|axis| if other.strides[axis] == 0 { 1 } else { other.shape[axis] });
        (0..batch * heads * rows).any(|at| {
            let first = other.index([at / rows / heads, at / rows % heads, at % rows, 0]);
            touches(&axes, self.offset, first..first + other.shape[3])
        })
    }

    /// The index of element (b, h, row, column) in the buffer.
    pub fn index(&self, at: [usize; 4]) -> usize {
        self.offset + at.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum::<usize>()
    }

    /// Refuses a buffer of `bytes` that ends before the tensor does. `name` is the tensor's.
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`].
    pub fn check_buffer(&self, name: &str, dtype: DType, bytes: u64) -> Result<()> {
        let needed = self.end() as u64 * dtype.size() as u64;
        if !self.is_empty() && needed > bytes {
            return Err(Error::buffer(format!(
                "the buffer of {name} has {bytes} bytes but {:?} {dtype} at offset {} with strides {:?} ends at byte {needed}; bind a larger buffer or fix the strides",
                self.shape, self.offset, self.strides
            )));
        }
        Ok(())
    }

    /// Refuses strides under which two elements share a place: such a tensor can be read but not
    /// written. `name` is the tensor's.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`].
    pub fn check_writable(&self, name: &str) -> Result<()> {
        let mut axes: Vec<(usize, usize)> =
            self.strides.iter().copied().zip(self.shape).filter(|&(_, size)| size > 1).collect();
        axes.sort_unstable();
        let mut reach = 1usize;
        for (stride, size) in axes {
            if stride < reach {
                return Err(Error::shape(format!(
                    "{name} has strides {:?} for shape {:?}: two elements share a place, so it cannot be written; give it distinct places",
                    self.strides, self.shape
                )));
            }
            reach = stride.saturating_mul(size - 1).saturating_add(reach);
        }
        Ok(())
    }
}

/// Whether any of the places `at` plus multiples of strides, (stride, size) with the largest stride last, is in a
/// range.
fn touches(axes: &[(usize, usize)], at: usize, range: Range<usize>) -> bool {
    let Some((&(stride, size), inner)) = axes.split_last() else { return range.contains(&at) };
    let reach = 1 + inner.iter().map(|(stride, size)| stride * (size - 1)).sum::<usize>();
    let first = (range.start + 1).saturating_sub(at + reach).div_ceil(stride.max(1));
    (first..size)
        .take_while(|i| at + i * stride < range.end)
        .any(|i| touches(inner, at + i * stride, range.clone()))
}

/// How many elements a shape has; the largest number where there are more, as strides of 0 allow.
#[inline(never)] // Small in many places, so that the module for pages stays small.
pub(crate) fn product(shape: &[usize]) -> usize {
    let saturated = shape.iter().fold(1usize, |product, &size| product.saturating_mul(size));
    if shape.contains(&0) { 0 } else { saturated }
}

fn too_long(shape: [usize; 4]) -> Error {
    Error::overflow(format!(
        "a tensor of shape {shape:?} reaches past element 4294967295 of its buffer but indices have 32 bits; split it by batch or head"
    ))
}

/// The sizes of one attention call, checked against each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// B.
    pub batch: usize,
    /// Bkv: `batch`, or 1 when all share one k and v.
    pub kv_batch: usize,
    /// Hq.
    pub q_heads: usize,
    /// Hkv.
    pub kv_heads: usize,
    /// L.
    pub q_len: usize,
    /// S, the capacity of k and v; the tokens in use may be fewer (`kv_len` of a call).
    pub kv_len: usize,
    /// E.
    pub head_dim: usize,
    /// Ev.
    pub v_dim: usize,
}

impl AttentionShape {
    /// The shape of attention over q `[B, Hq, L, E]`, k `[Bkv, Hkv, S, E]`, v `[Bkv, Hkv, S, Ev]`.
    ///
    /// L = 0 and B = 0 are an empty result; S = 0 gives rows of zeros with lse -inf.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] naming the two sizes that disagree, [`Error::Overflow`] when lengths do not
    /// fit the i32 that mods see.
    pub fn new(q: &Layout, k: &Layout, v: &Layout) -> Result<Self> {
        let [batch, q_heads, q_len, head_dim] = q.shape;
        let [kv_batch, kv_heads, kv_len, k_dim] = k.shape;
        let [v_batch, v_heads, v_len, v_dim] = v.shape;
        if k_dim != head_dim {
            return Err(Error::shape(format!(
                "k has head_dim {k_dim} but must have that of q, {head_dim}: scores are dot products of their rows"
            )));
        }
        if v_len != kv_len {
            return Err(Error::shape(format!(
                "v has kv_len {v_len} but must have that of k, {kv_len}: each key has one value"
            )));
        }
        if v_heads != kv_heads {
            return Err(Error::shape(format!(
                "v has {v_heads} heads but must have as many as k, {kv_heads}"
            )));
        }
        if v_batch != kv_batch {
            return Err(Error::shape(format!("v has batch {v_batch} but must have that of k, {kv_batch}")));
        }
        if kv_batch != batch && kv_batch != 1 {
            return Err(Error::shape(format!(
                "the batch of k and v is {kv_batch} but must be that of q, {batch}, or 1 (shared by all)"
            )));
        }
        if q_heads == 0 || kv_heads == 0 {
            return Err(Error::shape(format!(
                "there are {q_heads} q_heads and {kv_heads} kv_heads but each must be at least 1"
            )));
        }
        if q_heads % kv_heads != 0 {
            return Err(Error::shape(format!(
                "kv_heads is {kv_heads} but must divide q_heads = {q_heads}; query head h reads kv head h / (q_heads / kv_heads)"
            )));
        }
        let shape = Self { batch, kv_batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_dim };
        for (name, size) in [
            ("batch", batch),
            ("q_heads", q_heads),
            ("q_len", q_len),
            ("kv_len", kv_len),
            ("head_dim", head_dim),
            ("v_dim", v_dim),
        ] {
            if size > (i32::MAX as usize) / 2 {
                return Err(Error::overflow(format!(
                    "{name} is {size} but must be below 2^30: masks and score mods see it as i32"
                )));
            }
        }
        // Rows of lse, and the row headers of the block lists, are indexed with u32.
        let rows = batch as u64 * q_heads as u64;
        if rows.checked_mul(q_len as u64).is_none_or(|rows| rows > u64::from(u32::MAX) / 2) {
            return Err(Error::overflow(format!(
                "batch {batch} * q_heads {q_heads} * q_len {q_len} is past 2^31 rows; split the call by batch or head"
            )));
        }
        Ok(shape)
    }

    /// Query heads per kv head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Blocks of [`BLOCK`] query rows.
    pub fn q_blocks(&self) -> usize {
        self.q_len.div_ceil(BLOCK)
    }

    /// Blocks of [`BLOCK`] keys.
    pub fn kv_blocks(&self) -> usize {
        self.kv_len.div_ceil(BLOCK)
    }

    /// B * Hq * L: rows of out, elements of lse and max.
    pub fn rows(&self) -> usize {
        self.batch * self.q_heads * self.q_len
    }

    /// `[B, Hq, L, Ev]`.
    pub fn out(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.v_dim]
    }

    /// 1 / sqrt(head_dim), the scale unless one is given.
    pub fn scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }

    /// Refuses an output layout that is not `[B, Hq, L, Ev]` with distinct places.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`].
    pub fn check_out(&self, out: &Layout) -> Result<()> {
        if out.shape != self.out() {
            return Err(Error::shape(format!(
                "out has shape {:?} but must be [B, Hq, L, Ev] = {:?}",
                out.shape,
                self.out()
            )));
        }
        out.check_writable("out")
    }
}

/// Refuses q, k and v of different types.
///
/// # Errors
///
/// [`Error::DType`].
pub fn same_dtype(q: DType, k: DType, v: DType) -> Result<DType> {
    if q == k && q == v {
        return Ok(q);
    }
    Err(Error::dtype(format!("q is {q}, k is {k} and v is {v} but they must be of one type; convert them")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(shape: [usize; 4]) -> Layout {
        Layout::contiguous(shape).unwrap()
    }

    #[test]
    fn empty_queries_and_empty_keys_are_shapes() {
        let q = layout([1, 2, 0, 8]);
        let k = layout([1, 2, 5, 8]);
        assert_eq!(AttentionShape::new(&q, &k, &k).unwrap().rows(), 0);
        let none = layout([1, 2, 0, 8]);
        assert_eq!(AttentionShape::new(&k, &none, &none).unwrap().kv_blocks(), 0);
    }

    #[test]
    fn each_disagreement_names_its_sizes() {
        let q = layout([2, 8, 4, 16]);
        let cases: [([usize; 4], [usize; 4], &str); 6] = [
            ([2, 8, 5, 8], [2, 8, 5, 16], "k has head_dim 8"),
            ([2, 8, 5, 16], [2, 8, 6, 16], "v has kv_len 6"),
            ([2, 8, 5, 16], [2, 4, 5, 16], "v has 4 heads"),
            ([2, 8, 5, 16], [1, 8, 5, 16], "v has batch 1"),
            ([3, 8, 5, 16], [3, 8, 5, 16], "the batch of k and v is 3"),
            ([2, 3, 5, 16], [2, 3, 5, 16], "kv_heads is 3 but must divide q_heads = 8"),
        ];
        for (k, v, message) in cases {
            let error = AttentionShape::new(&q, &layout(k), &layout(v)).unwrap_err();
            assert!(error.is_shape() && error.to_string().starts_with(message), "{error}");
        }
    }

    #[test]
    fn shared_keys_and_any_head_ratio_pass() {
        let q = layout([5, 6, 4, 16]);
        let k = layout([1, 2, 9, 16]);
        let v = layout([1, 2, 9, 3]);
        let shape = AttentionShape::new(&q, &k, &v).unwrap();
        assert_eq!((shape.group(), shape.out()), (3, [5, 6, 4, 3]));
    }

    #[test]
    fn inner_stride_other_than_one_is_refused() {
        let error = Layout::new([1, 1, 4, 4], [16, 16, 1, 4], 0).unwrap_err();
        assert!(error.is_shape() && error.to_string().contains("inner stride is 4"), "{error}");
    }

    #[test]
    fn indices_past_u32_are_refused() {
        assert!(Layout::contiguous([1 << 10, 1 << 10, 1 << 10, 4]).unwrap_err().is_overflow());
        assert!(Layout::contiguous([usize::MAX, 2, 2, 2]).unwrap_err().is_overflow());
        assert!(Layout::new([1, 1, 2, 2], [4, 4, usize::MAX, 1], 0).unwrap_err().is_overflow());
        assert!(
            Layout::contiguous([1, 1, 1, 4]).unwrap().at(u32::MAX as usize - 2).unwrap_err().is_overflow()
        );
    }

    #[test]
    fn short_buffer_is_refused_with_the_end() {
        let error = layout([1, 1, 2, 8]).at(4).unwrap().check_buffer("k", DType::F16, 38).unwrap_err();
        assert!(error.is_buffer() && error.to_string().contains("ends at byte 40"), "{error}");
        layout([1, 1, 2, 8]).at(4).unwrap().check_buffer("k", DType::F16, 40).unwrap();
    }

    #[test]
    fn blhd_has_the_strides_of_its_memory() {
        let layout = Layout::blhd([2, 3, 4, 5]).unwrap();
        assert_eq!(layout.strides, [60, 5, 15, 1]);
        assert_eq!(layout.index([1, 2, 3, 4]), 60 + 10 + 45 + 4);
        assert!(!layout.is_contiguous());
        layout.check_writable("out").unwrap();
    }

    #[test]
    fn overlapping_rows_cannot_be_written() {
        let broadcast = Layout::new([2, 1, 4, 4], [0, 16, 4, 1], 0).unwrap();
        assert!(broadcast.check_writable("out").unwrap_err().is_shape());
        let overlapping = Layout::new([1, 1, 4, 4], [16, 16, 3, 1], 0).unwrap();
        assert!(overlapping.check_writable("out").unwrap_err().is_shape());
    }

    #[test]
    fn mixed_dtypes_are_refused_by_name() {
        let error = same_dtype(DType::F16, DType::F32, DType::F16).unwrap_err();
        assert!(error.is_dtype() && error.to_string().contains("k is f32"), "{error}");
    }

    #[test]
    fn narrow_then_widen_is_exact_for_representable_values() {
        for dtype in DType::ALL {
            let values = [0.0, -1.5, 256.0, f32::INFINITY];
            assert_eq!(dtype.widen(&dtype.narrow(&values)), values);
        }
    }
}
