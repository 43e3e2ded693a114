//! The tiles of the Metal kernels, per loader, operand width and head dim.

use std::fmt;

use super::MslGradientTile;
use crate::DType;

/// How fragments reach the registers of a simdgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loader {
    /// By way of threadgroup memory: M1 and M2, where reading them from device memory costs twice.
    Staged,
    /// Straight from device memory: M3 and later, where staging costs more than it saves.
    Direct,
}

impl Loader {
    /// Both.
    pub const ALL: [Loader; 2] = [Loader::Staged, Loader::Direct];

    /// `staged` or `direct`.
    pub const fn name(self) -> &'static str {
        match self {
            Loader::Staged => "staged",
            Loader::Direct => "direct",
        }
    }

    /// The most 32-bit registers of a lane that fragments may hold across the kv loop. M1 and M2 have
    /// 128 for a thread and everything else needs some 30; from M3 on registers share a pool with the
    /// caches, and 160 still leaves several simdgroups to a core.
    pub const fn registers(self) -> u32 {
        match self {
            Loader::Staged => 96,
            Loader::Direct => 160,
        }
    }
}

/// A row of [`MSL_TILES`]. Columns are those of a whole row of q, k, v or out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MslRow {
    /// The loader it is for.
    pub loader: Loader,
    /// Operands of matrix products are halves (f16); otherwise floats (f32, bf16 widened).
    pub half: bool,
    /// The largest head_dim and v_dim.
    pub up_to: u32,
    /// Simdgroups of a threadgroup.
    pub simdgroups: u32,
    /// Fragments of 8 query rows in a simdgroup.
    pub row_fragments: u32,
    /// Columns of q that stay in registers.
    pub q_columns: u32,
    /// The other columns of q are staged once; otherwise read again for each tile.
    pub q_staged: bool,
    /// Columns of out that are computed at once.
    pub v_columns: u32,
    /// Columns of k or v that are staged at once.
    pub stage: u32,
}

const fn staged(
    half: bool,
    up_to: u32,
    simdgroups: u32,
    q_columns: u32,
    q_staged: bool,
    stage: u32,
) -> MslRow {
    // A staged threadgroup has 32 query rows: a fragment of k or v then serves two row fragments, which
    // halves the reads of threadgroup memory, as long as two rows' output fits the registers.
    let row_fragments = 4 / simdgroups;
    MslRow {
        loader: Loader::Staged,
        half,
        up_to,
        simdgroups,
        row_fragments,
        q_columns,
        q_staged,
        v_columns: 256,
        stage,
    }
}

const fn direct(half: bool, up_to: u32, q_columns: u32) -> MslRow {
    MslRow {
        loader: Loader::Direct,
        half,
        up_to,
        simdgroups: 2,
        row_fragments: 1,
        q_columns,
        q_staged: false,
        v_columns: 512,
        stage: 32,
    }
}

/// The tiles, ascending in `up_to` for each loader and operand width. Larger dims use the last.
pub const MSL_TILES: &[MslRow] = &[
    staged(true, 96, 2, 96, false, 96),
    staged(true, 128, 2, 64, true, 128),
    staged(true, 192, 4, 192, false, 64),
    staged(true, 576, 4, 192, true, 64),
    staged(true, u32::MAX, 4, 192, false, 64),
    staged(false, 64, 2, 64, false, 64),
    staged(false, 96, 2, 64, true, 64),
    staged(false, 128, 2, 32, true, 64),
    staged(false, 192, 4, 160, true, 64),
    staged(false, 256, 4, 96, true, 64),
    staged(false, u32::MAX, 4, 96, false, 64),
    direct(true, 256, 256),
    direct(true, u32::MAX, 192),
    direct(false, 256, 256),
    direct(false, u32::MAX, 96),
];

/// How a Metal kernel cuts its work: a row of the table, fitted to the dims. The fields are the
/// constants of `msl/tile.metal` and `msl/attend.metal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MslTile {
    /// How fragments are loaded.
    pub loader: Loader,
    /// Simdgroups of a threadgroup.
    pub simdgroups: u32,
    /// Fragments of 8 query rows in a simdgroup.
    pub row_fragments: u32,
    /// Neighbouring columns of q and k that come with one load.
    pub k_pack: u32,
    /// Neighbouring columns of v and out that come with one load.
    pub v_pack: u32,
    /// Groups of 8 * `k_pack` columns of q that stay in registers.
    pub q_groups: u32,
    /// The other groups are staged once.
    pub q_staged: bool,
    /// Columns of out that are computed at once.
    pub v_chunk: u32,
    /// Columns of k or v that are staged at once.
    pub stage: u32,
    /// Bytes of an element.
    element: u32,
    /// 32-bit registers of a lane for a fragment of q.
    q_registers: u32,
    head_groups: u32,
}

impl fmt::Display for MslTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { simdgroups, row_fragments, q_groups, v_chunk, stage, .. } = self;
        write!(f, "{}-{simdgroups}x{}-q{q_groups}-v{v_chunk}-s{stage}", self.loader.name(), 8 * row_fragments)
    }
}

impl MslTile {
    /// The tile for an element type and dims. Every dim has one.
    pub fn choose(loader: Loader, dtype: DType, head_dim: u32, v_dim: u32) -> Self {
        let half = dtype == DType::F16;
        let dim = head_dim.max(v_dim);
        let fits = |row: &&MslRow| row.loader == loader && row.half == half && dim <= row.up_to;
        let row = MSL_TILES.iter().find(fits).unwrap_or(&MSL_TILES[MSL_TILES.len() - 1]);
        let k_pack = if head_dim.is_multiple_of(32) { 4 } else { 2 };
        let v_pack = if v_dim.is_multiple_of(16) { 4 } else { 2 };
        let head_groups = head_dim.div_ceil(8 * k_pack);
        let v_chunk = v_dim.next_multiple_of(4 * v_pack).min(row.v_columns);
        // A stage holds whole groups of both k and v.
        let group = (8 * k_pack).max(4 * v_pack);
        let stage = (head_groups * 8 * k_pack).max(v_chunk).next_multiple_of(group).min(row.stage);
        let q_groups = head_groups.min(row.q_columns / (8 * k_pack));
        Self {
            loader,
            simdgroups: row.simdgroups,
            row_fragments: row.row_fragments,
            k_pack,
            v_pack,
            q_groups,
            q_staged: row.q_staged && q_groups < head_groups,
            v_chunk,
            stage,
            element: dtype.size() as u32,
            q_registers: if half { 1 } else { 2 },
            head_groups,
        }
    }

    /// The tile of the decode kernel: one simdgroup, which has 8 packed rows and a part of the keys of its
    /// own. The time goes into reading k and v, each byte once, so they come straight from device memory
    /// on every chip; what differs is how many registers there are.
    pub fn decode(loader: Loader, dtype: DType, head_dim: u32, v_dim: u32) -> Self {
        let tile = Self::choose(Loader::Direct, dtype, head_dim, v_dim);
        let v_chunk = if loader == Loader::Staged { tile.v_chunk.min(256) } else { tile.v_chunk };
        let mut tile = Self { simdgroups: 1, v_chunk, ..tile };
        while tile.registers() > loader.registers() && tile.q_groups > 1 {
            tile.q_groups -= 1;
        }
        tile
    }

    /// Query rows of a threadgroup.
    pub const fn tile_q(&self) -> u32 {
        8 * self.row_fragments * self.simdgroups
    }

    /// Threads of a threadgroup.
    pub const fn threads(&self) -> u32 {
        32 * self.simdgroups
    }

    /// Bytes of threadgroup memory that the forward kernel declares.
    pub const fn threadgroup_memory(&self) -> u32 {
        match self.loader {
            Loader::Direct => 0,
            Loader::Staged => {
                let rest = (self.head_groups - self.q_groups) * 8 * self.k_pack;
                let q = if self.q_staged { self.tile_q() * self.stride(rest) } else { 0 };
                32 * self.stride(self.stage) + q
            }
        }
    }

    /// Bytes from row to row: 32 past a multiple of 64.
    const fn stride(&self, columns: u32) -> u32 {
        (columns * self.element + 31) / 64 * 64 + 32
    }

    /// 32-bit registers of a lane that fragments of q, the output and the scores hold across the kv loop.
    pub const fn registers(&self) -> u32 {
        let out = self.v_chunk / 8 * 2;
        let scores = 4 * 2;
        let q = self.q_groups * self.k_pack * self.q_registers;
        self.row_fragments * (out + scores + q)
    }

    /// The constants of `msl/forward.metal` and `msl/decode.metal`.
    pub(super) fn constants(&self, head_dim: u32, v_dim: u32) -> [(&'static str, u32); 10] {
        [
            ("HEAD_DIM", head_dim),
            ("V_DIM", v_dim),
            ("SIMDGROUPS", self.simdgroups),
            ("ROW_FRAGMENTS", self.row_fragments),
            ("K_PACK", self.k_pack),
            ("V_PACK", self.v_pack),
            ("Q_GROUPS", self.q_groups),
            ("Q_STAGED", self.q_staged.into()),
            ("V_CHUNK", self.v_chunk),
            ("STAGE", self.stage),
        ]
    }
}

/// How any Metal kernel cuts its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MetalTile {
    /// Forward and decode.
    Attend(MslTile),
    /// dq and dkv.
    Gradient(MslGradientTile),
    /// What goes through rows without matrix products.
    Rows {
        /// The loader of the other kernels of the call; nothing here depends on it.
        loader: Loader,
        /// Threads of a threadgroup.
        threads: u32,
    },
}

impl fmt::Display for MetalTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attend(tile) => tile.fmt(f),
            Self::Gradient(tile) => tile.fmt(f),
            Self::Rows { threads, .. } => write!(f, "metal-t{threads}"),
        }
    }
}

impl MetalTile {
    /// Bytes of threadgroup memory that a kernel may declare, whatever a WebGPU device was created with:
    /// "Maximum total threadgroup memory allocation" in Apple's Metal Feature Set Tables, for the families
    /// from Apple4 on.
    pub const MAX_THREADGROUP_MEMORY: u32 = 32 << 10;

    /// How fragments are loaded.
    pub const fn loader(&self) -> Loader {
        match self {
            Self::Attend(tile) => tile.loader,
            Self::Gradient(tile) => tile.loader,
            Self::Rows { loader, .. } => *loader,
        }
    }

    /// Threads of a threadgroup.
    pub const fn threads(&self) -> u32 {
        match self {
            Self::Attend(tile) => tile.threads(),
            Self::Gradient(tile) => tile.threads(),
            Self::Rows { threads, .. } => *threads,
        }
    }

    /// Rows of a threadgroup: of q, or of k and v in dkv.
    pub const fn rows(&self) -> u32 {
        match self {
            Self::Attend(tile) => tile.tile_q(),
            Self::Gradient(tile) => tile.rows(),
            Self::Rows { .. } => 8,
        }
    }

    /// Bytes of threadgroup memory.
    pub const fn threadgroup_memory(&self) -> u32 {
        match self {
            Self::Attend(tile) => tile.threadgroup_memory(),
            Self::Gradient(tile) => tile.threadgroup_memory(),
            Self::Rows { .. } => 0,
        }
    }

    /// The constants of the kernel's text.
    pub(super) fn constants(&self, head_dim: u32, v_dim: u32) -> Vec<(&'static str, u32)> {
        match self {
            Self::Attend(tile) => tile.constants(head_dim, v_dim).to_vec(),
            Self::Gradient(tile) => tile.constants(head_dim, v_dim).to_vec(),
            Self::Rows { .. } => vec![("V_DIM", v_dim)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_starts_32_bytes_past_a_multiple_of_64() {
        let tile = MslTile::choose(Loader::Staged, DType::F16, 64, 64);
        for columns in [8, 16, 24, 32, 40, 48, 64, 80, 96, 128] {
            let stride = tile.stride(columns);
            assert!(
                stride >= 2 * columns && stride < 2 * columns + 64 && stride % 64 == 32,
                "{columns}: {stride}"
            );
        }
    }
}
