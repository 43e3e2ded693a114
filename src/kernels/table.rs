//! The table of tiles: which one a kernel uses for an element size, a head dim and a memory limit.

use std::fmt;

use super::Kernel;
use crate::{DType, Error, Profile, Result};

/// How a kernel cuts its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Invocations of a workgroup.
    pub threads: u32,
    /// Query rows of one invocation; with cooperative matrices those of a subgroup, as many as a matrix
    /// has.
    pub rows: u32,
    /// Columns of the scores of one invocation.
    pub columns: u32,
    /// vec4 of the rows of q and k that are staged in workgroup memory at once; 0 where none are. The
    /// gradient kernels stage v and dout by it too.
    pub chunk: u32,
    /// Rows of v that the forward kernel stages at once; 0 in other kernels.
    pub v_rows: u32,
    /// Operands that the gradient kernels have staged at a time: 2, or 3 where those of the rows stay
    /// in place; 0 in other kernels.
    pub stages: u32,
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}-{}x{}", self.threads, self.rows, self.columns)?;
        for (letter, number) in [('c', self.chunk), ('v', self.v_rows), ('s', self.stages)] {
            if number > 0 {
                write!(f, "-{letter}{number}")?;
            }
        }
        Ok(())
    }
}

/// Which adapters a row of [`TILES`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adapter {
    /// All of them.
    Any,
    /// Those that run on the CPU behind a GPU interface. Their registers are memory, so large tiles
    /// cost nothing, and loads from workgroup memory are dear.
    Software,
}

/// A row of [`TILES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileRow {
    /// The kernel it is for.
    pub kernel: Kernel,
    /// The adapters it is for.
    pub adapter: Adapter,
    /// Bytes of an element.
    pub element: u32,
    /// The largest head_dim.
    pub head_dim: u32,
    /// The largest v_dim.
    pub v_dim: u32,
    /// The tile.
    pub tile: Tile,
}

const ANY: u32 = u32::MAX;

/// The most 32-bit registers of an invocation that [`Tile::registers`] may be on a GPU. Apple's M1 and M2 have 128
/// before they spill, as have Intel's at eight lanes; NVIDIA's (255) and AMD's (256) still run two
/// workgroups side by side then.
pub const REGISTERS: u32 = 128;

/// The largest dims of dq, dk and dv: an invocation keeps an eighth of four rows of dk and of dv, both as
/// long as the longer one, and WGSL promises 8 KiB for all variables of a function.
const LARGEST: [u32; 2] = [1792, 1024];

const fn forward(
    adapter: Adapter,
    element: u32,
    [head_dim, v_dim]: [u32; 2],
    rows: u32,
    chunk: u32,
    v_rows: u32,
) -> TileRow {
    let tile = Tile { threads: 64, rows, columns: 4, chunk, v_rows, stages: 0 };
    TileRow { kernel: Kernel::Forward, adapter, element, head_dim, v_dim, tile }
}

/// The row of a decode kernel: 16 packed query rows.
const fn decode(kernel: Kernel, element: u32, dims: [u32; 2], chunk: u32, v_rows: u32) -> TileRow {
    let tile = Tile { threads: 64, rows: 2, columns: 4, chunk, v_rows, stages: 0 };
    TileRow { kernel, adapter: Adapter::Any, element, head_dim: dims[0], v_dim: dims[1], tile }
}

/// The same with half the query rows.
const fn narrow(row: TileRow) -> TileRow {
    TileRow { tile: Tile { rows: row.tile.rows / 2, ..row.tile }, ..row }
}

/// The same on adapters that run on the CPU only.
const fn software(row: TileRow) -> TileRow {
    TileRow { adapter: Adapter::Software, ..row }
}

/// The same with twice the invocations, for devices that have many: what `Gpu::tune` tries beside the
/// default.
const fn wide(row: TileRow) -> TileRow {
    TileRow { tile: Tile { threads: 128, ..row.tile }, ..row }
}

/// The rows of a kernel that stages nothing.
const fn unstaged(
    kernel: Kernel,
    adapter: Adapter,
    element: u32,
    [head_dim, v_dim]: [u32; 2],
    rows: u32,
    columns: u32,
) -> TileRow {
    let tile = Tile { threads: 64, rows, columns, chunk: 0, v_rows: 0, stages: 0 };
    TileRow { kernel, adapter, element, head_dim, v_dim, tile }
}

/// The row of the kernel with cooperative matrices of `edge` x `edge`: four subgroups of 8 lanes, or of 32.
const fn matrices(adapter: Adapter, element: u32, up_to: u32, edge: u32, chunk: u32) -> TileRow {
    let threads = match adapter {
        Adapter::Any => 32 * 32 / edge,
        Adapter::Software => 8 * 32 / edge,
    };
    let tile = Tile { threads, rows: edge, columns: 32, chunk, v_rows: 0, stages: 0 };
    TileRow { kernel: Kernel::ForwardCoop, adapter, element, head_dim: up_to, v_dim: up_to, tile }
}

/// The rows of a gradient kernel: 32 rows among 64 invocations. 3 stages only where a chunk is a whole row.
const fn gradient(kernel: Kernel, element: u32, dims: [u32; 2], chunk: u32, stages: u32) -> TileRow {
    let tile = Tile { threads: 64, rows: 4, columns: 4, chunk, v_rows: 0, stages };
    TileRow { kernel, adapter: Adapter::Any, element, head_dim: dims[0], v_dim: dims[1], tile }
}

/// The same 32 rows among another number of invocations: the more, the fewer of the gradients each holds.
const fn among(row: TileRow, threads: u32) -> TileRow {
    TileRow { tile: Tile { threads, rows: 256 / threads, ..row.tile }, ..row }
}

/// The row of a kernel that spreads rows over lanes: clusters of 8 invocations with `rows` rows each, and
/// `columns` columns of their scores in a lane.
const fn clusters(
    kernel: Kernel,
    adapter: Adapter,
    element: u32,
    up_to: u32,
    threads: u32,
    [rows, columns]: [u32; 2],
) -> TileRow {
    let row = unstaged(kernel, adapter, element, [up_to; 2], rows, columns);
    TileRow { tile: Tile { threads, ..row.tile }, ..row }
}

/// The tiles, best first among those for one kernel, element size and dims. For each there is one that
/// needs at most 16 KiB of workgroup memory, the least that WebGPU promises.
///
/// Where whole rows are staged (4 * chunk >= head_dim), barriers are saved and q stays in place.
///
/// Rows of a wide output take more of [`REGISTERS`] each, so that an invocation has fewer of them. The kernels
/// with subgroup operations keep eight rows of k or v besides: on GPUs they end at a dim of 64, those of
/// gradients at 32, and what is wider goes to the kernels without.
pub const TILES: &[TileRow] = &[
    forward(Adapter::Software, 4, [ANY, 64], 8, 8, 16),
    forward(Adapter::Software, 2, [64, 64], 8, 16, 32),
    forward(Adapter::Any, 4, [32, 64], 4, 8, 16),
    forward(Adapter::Any, 4, [64, 64], 4, 16, 32),
    wide(forward(Adapter::Any, 4, [64, 64], 4, 8, 16)),
    forward(Adapter::Any, 4, [ANY, 64], 4, 8, 16),
    forward(Adapter::Any, 4, [ANY, 128], 4, 16, 16),
    forward(Adapter::Any, 4, [ANY, 128], 4, 8, 8),
    forward(Adapter::Software, 4, [ANY, 256], 4, 16, 8),
    forward(Adapter::Software, 4, [ANY, 256], 4, 8, 4),
    forward(Adapter::Software, 4, [ANY, 512], 2, 8, 4),
    forward(Adapter::Any, 4, [ANY, 256], 2, 16, 8),
    forward(Adapter::Any, 4, [ANY, 256], 2, 8, 4),
    forward(Adapter::Any, 4, [ANY, 512], 1, 8, 4),
    forward(Adapter::Any, 2, [32, 32], 4, 8, 32),
    forward(Adapter::Any, 2, [64, 64], 4, 16, 32),
    wide(forward(Adapter::Any, 2, [64, 64], 4, 16, 32)),
    forward(Adapter::Any, 2, [128, 128], 4, 32, 32),
    wide(forward(Adapter::Any, 2, [128, 128], 4, 16, 16)),
    forward(Adapter::Any, 2, [ANY, 128], 4, 16, 16),
    forward(Adapter::Software, 2, [ANY, 256], 4, 16, 8),
    forward(Adapter::Software, 2, [ANY, 512], 2, 16, 8),
    forward(Adapter::Any, 2, [ANY, 256], 2, 16, 8),
    forward(Adapter::Any, 2, [ANY, 512], 1, 16, 8),
    decode(Kernel::DecodeSplit, 4, [32, 64], 8, 16),
    decode(Kernel::DecodeSplit, 4, [ANY, 64], 16, 32),
    decode(Kernel::DecodeSplit, 4, [ANY, 128], 16, 16),
    decode(Kernel::DecodeSplit, 4, [ANY, 256], 16, 8),
    software(decode(Kernel::DecodeSplit, 4, [ANY, 512], 16, 4)),
    narrow(decode(Kernel::DecodeSplit, 4, [ANY, 512], 16, 4)),
    decode(Kernel::DecodeSplit, 2, [32, 64], 8, 32),
    decode(Kernel::DecodeSplit, 2, [64, 64], 16, 32),
    decode(Kernel::DecodeSplit, 2, [ANY, 128], 32, 32),
    decode(Kernel::DecodeSplit, 2, [ANY, 256], 32, 16),
    software(decode(Kernel::DecodeSplit, 2, [ANY, 512], 32, 8)),
    narrow(decode(Kernel::DecodeSplit, 2, [ANY, 512], 32, 8)),
    unstaged(Kernel::DecodeSubgroup, Adapter::Software, 4, [64, 64], 8, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Software, 4, [128, 128], 4, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Software, 4, [256, 256], 2, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Software, 2, [64, 64], 8, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Software, 2, [128, 128], 4, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Software, 2, [256, 256], 2, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Any, 4, [32, 32], 4, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Any, 4, [64, 64], 2, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Any, 2, [32, 32], 4, 4),
    unstaged(Kernel::DecodeSubgroup, Adapter::Any, 2, [64, 64], 2, 4),
    decode(Kernel::DecodeCombine, 4, [32, 64], 8, 16),
    decode(Kernel::DecodeCombine, 4, [ANY, 64], 16, 32),
    decode(Kernel::DecodeCombine, 4, [ANY, 128], 16, 16),
    decode(Kernel::DecodeCombine, 4, [ANY, 256], 16, 8),
    decode(Kernel::DecodeCombine, 4, [ANY, 512], 16, 4),
    decode(Kernel::DecodeCombine, 2, [32, 64], 8, 32),
    decode(Kernel::DecodeCombine, 2, [64, 64], 16, 32),
    decode(Kernel::DecodeCombine, 2, [ANY, 128], 32, 32),
    decode(Kernel::DecodeCombine, 2, [ANY, 256], 32, 16),
    decode(Kernel::DecodeCombine, 2, [ANY, 512], 32, 8),
    clusters(Kernel::ForwardSubgroup, Adapter::Software, 4, 64, 32, [16, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Software, 4, 128, 64, [8, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Software, 4, 256, 64, [2, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Software, 2, 64, 32, [16, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Software, 2, 128, 64, [8, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Software, 2, 256, 64, [2, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 4, 32, 64, [4, 2]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 4, 32, 128, [4, 2]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 4, 64, 64, [2, 2]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 4, 64, 64, [2, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 4, 64, 128, [2, 2]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 2, 32, 64, [4, 2]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 2, 32, 128, [4, 2]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 2, 64, 64, [2, 2]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 2, 64, 64, [2, 1]),
    clusters(Kernel::ForwardSubgroup, Adapter::Any, 2, 64, 128, [2, 2]),
    matrices(Adapter::Software, 2, 64, 8, 16),
    matrices(Adapter::Software, 2, 256, 8, 32),
    matrices(Adapter::Any, 2, 64, 8, 16),
    matrices(Adapter::Any, 2, 256, 8, 32),
    matrices(Adapter::Any, 2, 256, 16, 16),
    matrices(Adapter::Any, 4, 256, 8, 16),
    matrices(Adapter::Any, 4, 256, 8, 8),
    unstaged(Kernel::Merge, Adapter::Any, 4, [ANY, ANY], 0, 0),
    unstaged(Kernel::Merge, Adapter::Any, 2, [ANY, ANY], 0, 0),
    gradient(Kernel::Delta, 4, [ANY, ANY], 0, 0),
    gradient(Kernel::Dsink, 4, [ANY, ANY], 0, 0),
    gradient(Kernel::Delta, 2, [ANY, ANY], 0, 0),
    gradient(Kernel::Dsink, 2, [ANY, ANY], 0, 0),
    gradient(Kernel::Dq, 4, [32, 32], 8, 3),
    software(among(gradient(Kernel::Dq, 4, [64, 64], 16, 3), 32)),
    gradient(Kernel::Dq, 4, [64, 64], 16, 3),
    software(among(gradient(Kernel::Dq, 4, [128, 128], 16, 2), 32)),
    software(gradient(Kernel::Dq, 4, LARGEST, 8, 2)),
    gradient(Kernel::Dq, 4, [128, 128], 8, 2),
    among(gradient(Kernel::Dq, 4, [256, 256], 8, 2), 128),
    among(gradient(Kernel::Dq, 4, LARGEST, 8, 2), 256),
    gradient(Kernel::Dq, 2, [32, 32], 8, 3),
    software(among(gradient(Kernel::Dq, 2, [64, 64], 16, 3), 32)),
    software(among(gradient(Kernel::Dq, 2, [128, 128], 32, 3), 32)),
    gradient(Kernel::Dq, 2, [64, 64], 16, 3),
    gradient(Kernel::Dq, 2, [128, 128], 32, 3),
    software(gradient(Kernel::Dq, 2, LARGEST, 16, 2)),
    gradient(Kernel::Dq, 2, [128, 128], 16, 2),
    among(gradient(Kernel::Dq, 2, [256, 256], 16, 2), 128),
    among(gradient(Kernel::Dq, 2, LARGEST, 16, 2), 256),
    gradient(Kernel::Dkv, 4, [32, 32], 8, 3),
    software(among(gradient(Kernel::Dkv, 4, [64, 64], 16, 3), 32)),
    gradient(Kernel::Dkv, 4, [64, 64], 16, 3),
    software(among(gradient(Kernel::Dkv, 4, [128, 128], 16, 2), 32)),
    software(gradient(Kernel::Dkv, 4, LARGEST, 8, 2)),
    among(gradient(Kernel::Dkv, 4, [128, 128], 8, 2), 128),
    among(gradient(Kernel::Dkv, 4, LARGEST, 8, 2), 256),
    gradient(Kernel::Dkv, 2, [32, 32], 8, 3),
    software(among(gradient(Kernel::Dkv, 2, [64, 64], 16, 3), 32)),
    gradient(Kernel::Dkv, 2, [64, 64], 16, 3),
    software(among(gradient(Kernel::Dkv, 2, [128, 128], 32, 3), 32)),
    software(gradient(Kernel::Dkv, 2, LARGEST, 16, 2)),
    among(gradient(Kernel::Dkv, 2, [128, 128], 32, 3), 128),
    among(gradient(Kernel::Dkv, 2, [128, 128], 16, 2), 128),
    among(gradient(Kernel::Dkv, 2, LARGEST, 16, 2), 256),
    clusters(Kernel::DqSubgroup, Adapter::Software, 4, 64, 32, [8, 1]),
    clusters(Kernel::DqSubgroup, Adapter::Software, 4, 128, 64, [2, 1]),
    clusters(Kernel::DqSubgroup, Adapter::Software, 2, 64, 32, [8, 1]),
    clusters(Kernel::DqSubgroup, Adapter::Software, 2, 128, 64, [2, 1]),
    clusters(Kernel::DkvSubgroup, Adapter::Software, 4, 64, 32, [8, 1]),
    clusters(Kernel::DkvSubgroup, Adapter::Software, 4, 128, 64, [2, 1]),
    clusters(Kernel::DkvSubgroup, Adapter::Software, 2, 64, 32, [8, 1]),
    clusters(Kernel::DkvSubgroup, Adapter::Software, 2, 128, 64, [2, 1]),
    clusters(Kernel::DqSubgroup, Adapter::Any, 4, 32, 64, [4, 1]),
    clusters(Kernel::DqSubgroup, Adapter::Any, 2, 32, 64, [4, 1]),
    clusters(Kernel::DkvSubgroup, Adapter::Any, 4, 32, 64, [2, 1]),
    clusters(Kernel::DkvSubgroup, Adapter::Any, 2, 32, 64, [2, 1]),
    gradient(Kernel::CapturedRows, 4, [32, 32], 8, 3),
    gradient(Kernel::CapturedRows, 4, [64, 64], 16, 3),
    gradient(Kernel::CapturedRows, 4, [ANY, ANY], 8, 2),
    gradient(Kernel::CapturedRows, 2, [32, 32], 8, 3),
    gradient(Kernel::CapturedRows, 2, [64, 64], 16, 3),
    gradient(Kernel::CapturedRows, 2, [128, 128], 32, 3),
    gradient(Kernel::CapturedRows, 2, [ANY, ANY], 16, 2),
    gradient(Kernel::CapturedColumns, 4, [32, 32], 8, 3),
    gradient(Kernel::CapturedColumns, 4, [64, 64], 16, 3),
    gradient(Kernel::CapturedColumns, 4, [ANY, ANY], 8, 2),
    gradient(Kernel::CapturedColumns, 2, [32, 32], 8, 3),
    gradient(Kernel::CapturedColumns, 2, [64, 64], 16, 3),
    gradient(Kernel::CapturedColumns, 2, [128, 128], 32, 3),
    gradient(Kernel::CapturedColumns, 2, [ANY, ANY], 16, 2),
    gradient(Kernel::CapturedScatter, 4, [ANY, ANY], 8, 2),
    gradient(Kernel::CapturedScatter, 2, [ANY, ANY], 16, 2),
    unstaged(Kernel::BlockMask, Adapter::Any, 4, [ANY, ANY], 0, 0),
    unstaged(Kernel::BlockMask, Adapter::Any, 2, [ANY, ANY], 0, 0),
];

impl TileRow {
    fn suits(&self, kernel: Kernel, dtype: DType, profile: &Profile) -> bool {
        self.kernel == kernel
            && self.element == dtype.size() as u32
            && (self.adapter == Adapter::Any || profile.software)
            && self.tile.threads <= profile.limits.invocations
            && (!kernel.uses_matrices() || self.tile.rows == profile.matrices.edge(dtype))
    }
}

impl Tile {
    /// The tiles of the table for this kernel, element type and dims that the adapter has the workgroup
    /// memory and the invocations for, best first as far as is known without trying.
    pub fn candidates(
        kernel: Kernel,
        dtype: DType,
        head_dim: u32,
        v_dim: u32,
        profile: &Profile,
    ) -> impl Iterator<Item = Tile> + Clone {
        TILES
            .iter()
            .filter(move |row| row.suits(kernel, dtype, profile))
            .filter(move |row| head_dim <= row.head_dim && v_dim <= row.v_dim)
            .map(|row| row.tile)
            .filter(move |tile| {
                tile.workgroup_memory(kernel, dtype, v_dim) <= profile.limits.workgroup_memory
            })
    }

    /// What `Gpu::tune` found, or the first tile of the table for this kernel, element type and dims that the adapter has the
    /// workgroup memory for.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when it has not enough for any, [`Error::Unsupported`] when head_dim or v_dim is
    /// too large for the kernel.
    pub fn choose(
        kernel: Kernel,
        dtype: DType,
        head_dim: u32,
        v_dim: u32,
        profile: &Profile,
    ) -> Result<Self> {
        let tuned = profile.tuning.as_ref().and_then(|tuning| tuning.get(kernel, dtype, head_dim.max(v_dim)));
        let mut candidates = Self::candidates(kernel, dtype, head_dim, v_dim, profile);
        let found = candidates.clone().find(|tile| tuned.is_none_or(|tuned| tuned == *tile));
        if let Some(tile) = found.or_else(|| candidates.next()) {
            return Ok(tile);
        }
        let available = profile.limits.workgroup_memory;
        let rows = TILES.iter().filter(|row| row.suits(kernel, dtype, profile));
        let fitting = || rows.clone().filter(|row| head_dim <= row.head_dim && v_dim <= row.v_dim);
        let memory = |row: &TileRow| row.tile.workgroup_memory(kernel, dtype, v_dim);
        match fitting().map(memory).min() {
            Some(needed) => Err(Error::Limit {
                what: format!("the {} kernel at v_dim {v_dim}", kernel.entry()),
                limit: "maxComputeWorkgroupStorageSize",
                needed: needed.into(),
                available: available.into(),
                remedy: "request a device with the larger limit".into(),
            }),
            None => {
                let most = |dim: fn(&TileRow) -> u32| rows.clone().map(dim).max().unwrap_or(0);
                let (most_head, most_v) = (most(|row| row.head_dim), most(|row| row.v_dim));
                let (name, dim, most, remedy) = if head_dim > most_head {
                    ("head_dim", head_dim, most_head, "give q and k fewer columns")
                } else {
                    ("v_dim", v_dim, most_v, "run it on slices of v's columns")
                };
                let remedy = match kernel.uses_subgroups() {
                    true => "use the kernel without subgroup operations",
                    false => remedy,
                };
                Err(Error::unsupported(format!(
                    "{name} is {dim} but the {} kernel has tiles up to {name} {most} only; {remedy}",
                    kernel.entry()
                )))
            }
        }
    }

    /// Rows of a workgroup of the forward and gradient kernels: 8 invocations share a row.
    pub const fn tile_q(&self, kernel: Kernel) -> u32 {
        match kernel {
            Kernel::ForwardCoop => 32,
            Kernel::DecodeSubgroup => self.rows,
            _ => self.threads / 8 * self.rows,
        }
    }

    /// 32-bit registers of an invocation that the values which a kernel names fill at the same time, in its loop
    /// over the keys; addresses come on top. Nothing for kernels that are not counted.
    pub const fn registers(&self, kernel: Kernel, head_dim: u32, v_dim: u32) -> Option<u32> {
        let widest = if head_dim > v_dim { head_dim } else { v_dim };
        // Of each row the scores, maximum, sum and position; in decode its head too.
        let row = self.columns + if kernel.is_forward() { 3 } else { 4 };
        // Of a row of q or v, in one of the eight invocations that share it.
        let line = 4 * widest.div_ceil(32);
        match kernel {
            // q and the output; eight rows of k or v, and the sums of eight columns of one row.
            Kernel::ForwardSubgroup | Kernel::DecodeSubgroup => {
                Some(self.rows * (2 * line + row) + 8 * line + 8)
            }
            // The output; a vec4 of q and of each of the columns.
            Kernel::Forward | Kernel::DecodeSplit => {
                Some(self.rows * (4 * v_dim.div_ceil(32) + row) + 4 * self.columns + 4)
            }
            // dq; of each row S, dP, position, lse and delta; a vec4 of a row and of each of the columns.
            Kernel::Dq => Some(self.rows * (line + 2 * self.columns + 3) + 4 * self.columns + 4),
            // dk and dv, S and dP; then P and dS, after the vec4 of a row and of each of the columns.
            Kernel::Dkv => {
                let pair = 2 * self.rows * self.columns;
                let product = 4 * self.columns + 4;
                Some(2 * self.rows * (line + self.columns) + if pair > product { pair } else { product })
            }
            // q, dout and dq; of each row S, dP, dS, position, lse and delta; eight rows of k or v and sums.
            Kernel::DqSubgroup => Some(self.rows * (3 * line + 6) + 8 * line + 8),
            // k, v, dk and dv; of each row S, dP, P and dS; eight rows of q and of dout, and sums.
            Kernel::DkvSubgroup => Some(self.rows * (4 * line + 4) + 16 * line + 8),
            _ => None,
        }
    }

    /// Bytes of workgroup memory that the kernel declares.
    pub(super) fn workgroup_memory(&self, kernel: Kernel, dtype: DType, v_dim: u32) -> u32 {
        match kernel {
            // Both decode entries are in one file, and what it declares counts.
            Kernel::Forward | Kernel::DecodeSplit | Kernel::DecodeCombine => {
                let stride = self.chunk | 1;
                let q = self.tile_q(kernel) * stride;
                let kv = (8 * self.columns * stride).max(self.v_rows * 8 * v_dim.div_ceil(32));
                let weights = self.tile_q(kernel) * 9 * 16;
                let reduced = self.tile_q(kernel) * 8 * 4;
                (q + kv) * 4 * dtype.size() as u32 + weights + reduced
            }
            Kernel::ForwardSubgroup
            | Kernel::DecodeSubgroup
            | Kernel::DqSubgroup
            | Kernel::DkvSubgroup
            | Kernel::Merge => 0,
            // A chunk, P, S and one flag a strip.
            Kernel::ForwardCoop => {
                let operands = 32 * (4 * self.chunk + self.rows) + 32 * (32 + self.rows);
                operands * dtype.size() as u32 + 32 * 36 * 4 + 32 / self.rows * 4
            }
            Kernel::Delta | Kernel::Dsink => 64 * 4,
            Kernel::BlockMask => self.threads * 4,
            Kernel::Dq | Kernel::Dkv => self.staged(dtype) + 32 * 9 * 16,
            Kernel::CapturedRows | Kernel::CapturedColumns | Kernel::CapturedScatter => {
                self.staged(dtype) + 32 * 8 * 4
            }
        }
    }

    /// Bytes that the gradient kernels stage: chunks of 32 rows.
    const fn staged(&self, dtype: DType) -> u32 {
        self.stages * 32 * (self.chunk + 1) * 4 * dtype.size() as u32
    }
}
