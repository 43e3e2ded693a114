//! The tiles of the Metal gradient kernels.

use std::fmt;

use super::{Kernel, Loader};
use crate::DType;

/// A row of [`MSL_GRADIENT_TILES`]. Columns are those of a whole row of q, k, v, out or a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MslGradientRow {
    /// The loader it is for.
    pub loader: Loader,
    /// The kernel: [`Kernel::Dq`] or [`Kernel::Dkv`].
    pub kernel: Kernel,
    /// Operands of matrix products are halves (f16); otherwise floats (f32, bf16 widened).
    pub half: bool,
    /// The largest head_dim and v_dim.
    pub up_to: u32,
    /// Simdgroups of a threadgroup.
    pub simdgroups: u32,
    /// Fragments of 8 rows in a simdgroup.
    pub row_fragments: u32,
    /// Columns of each of the two own operands (q and dout, or k and v) that stay in registers.
    pub kept: u32,
    /// Columns of a gradient that are computed at once.
    pub columns: u32,
}

const fn staged(
    kernel: Kernel,
    half: bool,
    up_to: u32,
    fragments: u32,
    kept: u32,
    columns: u32,
) -> MslGradientRow {
    // 32 rows in all, so that what is staged serves as many.
    let simdgroups = 4 / fragments;
    MslGradientRow {
        loader: Loader::Staged,
        kernel,
        half,
        up_to,
        simdgroups,
        row_fragments: fragments,
        kept,
        columns,
    }
}

const fn direct(kernel: Kernel, half: bool, up_to: u32, kept: u32, columns: u32) -> MslGradientRow {
    MslGradientRow {
        loader: Loader::Direct,
        kernel,
        half,
        up_to,
        simdgroups: 2,
        row_fragments: 1,
        kept,
        columns,
    }
}

const ANY: u32 = u32::MAX;

/// The tiles, ascending in `up_to` for each loader, kernel and operand width.
///
/// What stays in registers is the gradient first, since its sums would have to be read and written for
/// each tile, then as much of the own operands as there is room for. metal-flash-attention's measured
/// parameters (Documentation, "AttentionDescriptor+Parameters") choose in the same order.
pub const MSL_GRADIENT_TILES: &[MslGradientRow] = &[
    staged(Kernel::Dq, true, 64, 2, 64, 64),
    staged(Kernel::Dq, true, 128, 1, 128, 128),
    staged(Kernel::Dq, true, 192, 1, 128, 192),
    staged(Kernel::Dq, true, ANY, 1, 64, 256),
    staged(Kernel::Dq, false, 32, 2, 32, 32),
    staged(Kernel::Dq, false, 96, 1, 96, 96),
    staged(Kernel::Dq, false, 128, 1, 96, 128),
    staged(Kernel::Dq, false, ANY, 1, 32, 256),
    staged(Kernel::Dkv, true, 96, 1, 96, 96),
    staged(Kernel::Dkv, true, ANY, 1, 64, 128),
    staged(Kernel::Dkv, false, 64, 1, 64, 64),
    staged(Kernel::Dkv, false, 96, 1, 64, 96),
    staged(Kernel::Dkv, false, ANY, 1, 32, 128),
    direct(Kernel::Dq, true, 256, 256, 256),
    direct(Kernel::Dq, true, ANY, 320, 256),
    direct(Kernel::Dq, false, 192, 192, 192),
    direct(Kernel::Dq, false, ANY, 160, 256),
    direct(Kernel::Dkv, true, 192, 192, 192),
    direct(Kernel::Dkv, true, ANY, 64, 256),
    direct(Kernel::Dkv, false, 128, 128, 128),
    direct(Kernel::Dkv, false, ANY, 32, 256),
];

/// Whole rows of two tensors are staged side by side while they take no more bytes than this: two
/// threadgroups then fit a core.
const WHOLE_ROWS: u32 = 27 << 10;

/// How a Metal gradient kernel cuts its work: a row of the table, fitted to the dims. The fields are the
/// constants of `msl/recompute.metal` and `msl/tile.metal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MslGradientTile {
    /// How fragments are loaded.
    pub loader: Loader,
    /// Simdgroups of a threadgroup.
    pub simdgroups: u32,
    /// Fragments of 8 rows in a simdgroup.
    pub row_fragments: u32,
    /// Groups of fragments of an own row of q or k that stay in registers.
    pub s_kept: u32,
    /// The same of dout or v.
    pub dp_kept: u32,
    /// Columns of a gradient that are computed at once.
    pub chunk: u32,
    /// Tiles in threadgroup memory: 2 hold whole rows, 1 holds `stage` columns.
    pub areas: u32,
    /// Columns of a staged tile.
    pub stage: u32,
    /// Bytes of a row of a staged tile.
    stride: u32,
    /// 32-bit registers of a lane for the gradients of one row fragment.
    gradient_registers: u32,
    /// The same for the own operands.
    own_registers: u32,
}

impl fmt::Display for MslGradientTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { simdgroups, row_fragments, s_kept, dp_kept, chunk, areas, stage, .. } = self;
        let (name, rows) = (self.loader.name(), 8 * row_fragments);
        write!(f, "{name}-{simdgroups}x{rows}-k{s_kept}+{dp_kept}-c{chunk}-s{areas}x{stage}")
    }
}

impl MslGradientTile {
    /// The tile for [`Kernel::Dq`] or [`Kernel::Dkv`] (any other kernel counts as dq), an element type and
    /// dims. Every dim has one.
    pub fn choose(kernel: Kernel, loader: Loader, dtype: DType, head_dim: u32, v_dim: u32) -> Self {
        let half = dtype == DType::F16;
        let kernel = if kernel == Kernel::Dkv { kernel } else { Kernel::Dq };
        let dim = head_dim.max(v_dim);
        let fits = |row: &&MslGradientRow| {
            row.loader == loader && row.kernel == kernel && row.half == half && dim <= row.up_to
        };
        let row = MSL_GRADIENT_TILES.iter().find(fits).unwrap_or(&MSL_GRADIENT_TILES[0]);
        // SUM_PACK, SUM_GROUPS, RESULT_PACK and RESULT_GROUPS of msl/tile.metal.
        let sum_pack = |dim: u32| if dim.is_multiple_of(32) { 4 } else { 2 };
        let kept = |dim: u32| {
            let columns = 8 * sum_pack(dim);
            dim.div_ceil(columns).min(row.kept / columns)
        };
        // Chunks of equal width, each of whole stages.
        let chunk = match dim.div_ceil(row.columns) {
            0 | 1 => dim.next_multiple_of(16),
            chunks => dim.div_ceil(chunks).next_multiple_of(64),
        };
        let gradient = |dim: u32| {
            let columns = if dim.is_multiple_of(16) { 16 } else { 8 };
            chunk.min(dim).div_ceil(columns) * columns / 8 * 2
        };
        let element = dtype.size() as u32;
        let stride = |columns: u32| (columns * element + 31) / 64 * 64 + 32;
        let whole = dim.next_multiple_of(32);
        let (areas, stage) = match (loader, 2 * 32 * stride(whole) <= WHOLE_ROWS) {
            (Loader::Staged, true) => (2, whole),
            // Nothing is staged; two areas need no copies between the products.
            (Loader::Direct, _) => (2, 64),
            (Loader::Staged, false) => (1, 64),
        };
        let register = if half { 1 } else { 2 };
        let own = |dim: u32| kept(dim) * sum_pack(dim) * register;
        Self {
            loader,
            simdgroups: row.simdgroups,
            row_fragments: row.row_fragments,
            s_kept: kept(head_dim),
            dp_kept: kept(v_dim),
            chunk,
            areas,
            stage,
            stride: stride(stage),
            gradient_registers: gradient(head_dim) + if kernel == Kernel::Dkv { gradient(v_dim) } else { 0 },
            own_registers: own(head_dim) + own(v_dim),
        }
    }

    /// Rows of a threadgroup: query rows in dq, kv rows in dkv.
    pub const fn rows(&self) -> u32 {
        8 * self.row_fragments * self.simdgroups
    }

    /// Threads of a threadgroup.
    pub const fn threads(&self) -> u32 {
        32 * self.simdgroups
    }

    /// Bytes of threadgroup memory that the kernel declares.
    pub const fn threadgroup_memory(&self) -> u32 {
        match self.loader {
            Loader::Direct => 0,
            Loader::Staged => self.areas * 32 * self.stride,
        }
    }

    /// 32-bit registers of a lane that fragments of the own operands, the gradients, S and dP hold across
    /// the loop over tiles.
    pub const fn registers(&self) -> u32 {
        let scores = 2 * 4 * 2;
        self.row_fragments * (self.gradient_registers + self.own_registers + scores)
    }

    /// The constants of `msl/backward.metal`.
    pub(super) fn constants(&self, head_dim: u32, v_dim: u32) -> [(&'static str, u32); 9] {
        [
            ("HEAD_DIM", head_dim),
            ("V_DIM", v_dim),
            ("SIMDGROUPS", self.simdgroups),
            ("ROW_FRAGMENTS", self.row_fragments),
            ("S_KEPT", self.s_kept),
            ("DP_KEPT", self.dp_kept),
            ("CHUNK", self.chunk),
            ("AREAS", self.areas),
            ("STAGE", self.stage),
        ]
    }
}
