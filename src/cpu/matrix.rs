//! Products of small f32 matrices, the inner loops of the Cpu tier.
//!
//! One operand is packed into panels: `width` columns of it side by side, row after row, so that the
//! inner loop reads it in order. The other stays row-major (or is read by columns where its transpose is
//! meant). A register tile of [`ROWS`] rows and one panel of columns is summed at a time.

use fearless_simd::{Simd, SimdBase, SimdFloat};

/// Rows of a register tile.
pub(super) const ROWS: usize = 4;

/// Vectors side by side in a register tile. Four of them times four rows keep the four multiply-add units of
/// an Apple core busy and fit its 32 registers; x86 and WebAssembly have half as many of both.
const VECTORS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };

/// An array of [`ROWS`] values. Spelled out instead of mapped, so that it stays in registers where the compiler
/// is told to save space and neither unrolls nor inlines, as it is for the npm package.
macro_rules! rows {
    ($row:ident => $value:expr) => {
        rows!($row => $value; 0 1 2 3)
    };
    ($row:ident => $value:expr; $($n:literal)*) => {
        [$({
            const $row: usize = $n;
            $value
        }),*]
    };
}

/// The same of [`VECTORS`].
#[cfg(not(target_arch = "aarch64"))]
macro_rules! vectors {
    ($vector:ident => $value:expr) => {
        rows!($vector => $value; 0 1)
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! vectors {
    ($vector:ident => $value:expr) => {
        rows!($vector => $value; 0 1 2 3)
    };
}

/// Columns of a panel.
#[inline(always)]
fn width<S: Simd>() -> usize {
    VECTORS * S::f32s::N
}

/// `columns` rounded up so that every vector width divides it: the row length of buffers that
/// products are written to.
pub(super) fn padded(columns: usize) -> usize {
    columns.next_multiple_of(32)
}

/// A matrix of `depth` rows, packed for the right-hand side of a product.
#[derive(Debug, Default)]
pub(super) struct Panels {
    data: Vec<f32>,
    depth: usize,
}

impl Panels {
    /// Makes room for `depth` rows of `columns` columns. What they hold is left over from before.
    pub(super) fn resize(&mut self, depth: usize, columns: usize) {
        self.depth = depth;
        let size = depth * padded(columns);
        if self.data.len() < size {
            self.data.resize(size, 0.0);
        }
    }

    /// Packs row `row` of the matrix.
    #[inline(always)]
    pub(super) fn pack_row<S: Simd>(&mut self, _simd: S, row: usize, values: &[f32]) {
        let width = width::<S>();
        for (panel, part) in values.chunks(width).enumerate() {
            let at = (panel * self.depth + row) * width;
            let slot = &mut self.data[at..at + width];
            slot[..part.len()].copy_from_slice(part);
            slot[part.len()..].fill(0.0);
        }
    }

    /// Makes row `row` of the matrix zero.
    #[inline(always)]
    pub(super) fn clear_row<S: Simd>(&mut self, _simd: S, row: usize) {
        let width = width::<S>();
        for panel in self.data.chunks_exact_mut(self.depth * width) {
            panel[row * width..(row + 1) * width].fill(0.0);
        }
    }

    /// Packs column `column` of the matrix.
    #[inline(always)]
    pub(super) fn pack_column<S: Simd>(&mut self, _simd: S, column: usize, values: &[f32]) {
        let width = width::<S>();
        let at = column / width * width * self.depth + column % width;
        let slots = self.data[at..].iter_mut().step_by(width);
        for (slot, &value) in slots.zip(values) {
            *slot = value;
        }
    }
}

/// How the left-hand side lies in memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Left<'a> {
    /// Element (row, k) at `row * stride + k`.
    Rows(&'a [f32], usize),
    /// Element (row, k) at `k * stride + row`.
    Columns(&'a [f32], usize),
}

/// Where a product goes: element (row, column) at `row * stride + column`.
#[derive(Debug)]
pub(super) struct Target<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) stride: usize,
    /// Add to what is there, or replace it.
    pub(super) add: bool,
}

/// `target (+)= left * right`, for `rows` rows (a multiple of [`ROWS`]), the depth range `ks` of `right`
/// (of which the left-hand side's first column is the first) and the column range `columns` of `right`
/// (whose bounds are multiples of the panel width or its end; the target's first column is the first).
///
/// Inlined, because that is what gives it the vector instructions of the caller's machine; those of WebAssembly
/// are given to all functions, and there one copy is enough.
#[cfg_attr(target_arch = "wasm32", inline(never))]
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
pub(super) fn multiply<S: Simd>(
    simd: S,
    left: Left<'_>,
    rows: usize,
    right: &Panels,
    ks: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    target: Target<'_>,
) {
    let width = width::<S>();
    let Target { data, stride, add } = target;
    for panel in columns.start / width..columns.end.div_ceil(width) {
        let column = panel * width - columns.start;
        let from = panel * right.depth * width;
        let part = &right.data[from + ks.start * width..from + ks.end * width];
        for row in (0..rows).step_by(ROWS) {
            let out = &mut data[row * stride + column..];
            match left {
                Left::Rows(a, a_stride) => {
                    let a = rows!(R => &a[(row + R) * a_stride..][..ks.len()]);
                    tile(simd, ByRows(a), part, out, stride, add);
                }
                Left::Columns(a, a_stride) => {
                    tile(simd, ByColumns(&a[row..], a_stride), part, out, stride, add);
                }
            }
        }
    }
}

/// The left-hand side of a register tile: its column `k`.
trait Column {
    fn column(&self, k: usize) -> [f32; ROWS];
}

struct ByRows<'a>([&'a [f32]; ROWS]);

impl Column for ByRows<'_> {
    #[inline(always)]
    fn column(&self, k: usize) -> [f32; ROWS] {
        rows!(R => self.0[R][k])
    }
}

struct ByColumns<'a>(&'a [f32], usize);

impl Column for ByColumns<'_> {
    #[inline(always)]
    fn column(&self, k: usize) -> [f32; ROWS] {
        let column = &self.0[k * self.1..][..ROWS];
        rows!(R => column[R])
    }
}

/// One register tile: the sum over k of the left-hand side's column k times line k of the panel.
#[inline(always)]
fn tile<S: Simd>(simd: S, left: impl Column, panel: &[f32], out: &mut [f32], stride: usize, add: bool) {
    let (n, width) = (S::f32s::N, width::<S>());
    let mut sums = rows!(R => vectors!(V => {
        if add { S::f32s::from_slice(simd, &out[R * stride + V * n..][..n]) } else { S::f32s::splat(simd, 0.0) }
    }));
    for k in 0..panel.len() / width {
        let line = &panel[k * width..][..width];
        let a = left.column(k);
        let a = rows!(R => S::f32s::splat(simd, a[R]));
        let b = vectors!(V => S::f32s::from_slice(simd, &line[V * n..][..n]));
        sums = rows!(R => vectors!(V => a[R].mul_add(b[V], sums[R][V])));
    }
    for (r, sum) in sums.iter().enumerate() {
        let line = &mut out[r * stride..][..width];
        for (v, sum) in sum.iter().enumerate() {
            sum.store_slice(&mut line[v * n..][..n]);
        }
    }
}
