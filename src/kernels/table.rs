//! The table of tiles: which one a kernel uses for an element size, a head dim and a memory limit.

use std::fmt;

use super::Kernel;
use crate::{DType, Error, Result};

/// How a kernel cuts its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Invocations of a workgroup.
    pub threads: u32,
    /// Query rows of one invocation.
    pub rows: u32,
    /// Columns of the scores of one invocation.
    pub columns: u32,
    /// vec4 of a row that are staged in workgroup memory at once; 0 where nothing is staged.
    pub chunk: u32,
    /// Operands that the gradient kernels have staged at a time: 2, or 3 where those of the rows stay
    /// in place; 0 in other kernels.
    pub stages: u32,
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}-{}x{}-c{}", self.threads, self.rows, self.columns, self.chunk)?;
        if self.stages > 0 { write!(f, "-s{}", self.stages) } else { Ok(()) }
    }
}

/// A row of [`TILES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileRow {
    /// The kernel it is for.
    pub kernel: Kernel,
    /// Bytes of an element.
    pub element: u32,
    /// The largest head_dim and v_dim.
    pub up_to: u32,
    /// The tile.
    pub tile: Tile,
}

const fn row(kernel: Kernel, element: u32, up_to: u32, rows: u32, chunk: u32) -> TileRow {
    TileRow { kernel, element, up_to, tile: Tile { threads: 64, rows, columns: 4, chunk, stages: 0 } }
}

/// The rows of a gradient kernel. 3 stages only where a chunk is a whole row.
const fn gradient(kernel: Kernel, element: u32, up_to: u32, chunk: u32, stages: u32) -> TileRow {
    TileRow { kernel, element, up_to, tile: Tile { threads: 64, rows: 4, columns: 4, chunk, stages } }
}

/// The tiles, best first among those for one kernel, element size and head dim. For each there is one
/// that needs at most 16 KiB of workgroup memory, the least that WebGPU promises.
///
/// Staging whole rows (chunk * 4 >= head_dim) saves barriers and keeps q in place. From 512 columns on
/// the output alone would fill the registers of 4 rows, so an invocation has 2.
pub const TILES: &[TileRow] = &[
    row(Kernel::Forward, 4, 32, 4, 8),
    row(Kernel::Forward, 4, 64, 4, 16),
    row(Kernel::Forward, 4, 64, 4, 8),
    row(Kernel::Forward, 4, 256, 4, 16),
    row(Kernel::Forward, 4, 256, 4, 8),
    row(Kernel::Forward, 4, 1024, 2, 8),
    row(Kernel::Forward, 2, 32, 4, 8),
    row(Kernel::Forward, 2, 64, 4, 16),
    row(Kernel::Forward, 2, 128, 4, 32),
    row(Kernel::Forward, 2, 256, 4, 16),
    row(Kernel::Forward, 2, 1024, 2, 16),
    gradient(Kernel::Delta, 4, 1024, 0, 0),
    gradient(Kernel::Dsink, 4, 1024, 0, 0),
    gradient(Kernel::Delta, 2, 1024, 0, 0),
    gradient(Kernel::Dsink, 2, 1024, 0, 0),
    gradient(Kernel::Dq, 4, 32, 8, 3),
    gradient(Kernel::Dq, 4, 64, 16, 3),
    gradient(Kernel::Dq, 4, 1024, 8, 2),
    gradient(Kernel::Dq, 2, 32, 8, 3),
    gradient(Kernel::Dq, 2, 64, 16, 3),
    gradient(Kernel::Dq, 2, 128, 32, 3),
    gradient(Kernel::Dq, 2, 1024, 16, 2),
    gradient(Kernel::Dkv, 4, 32, 8, 3),
    gradient(Kernel::Dkv, 4, 64, 16, 3),
    gradient(Kernel::Dkv, 4, 1024, 8, 2),
    gradient(Kernel::Dkv, 2, 32, 8, 3),
    gradient(Kernel::Dkv, 2, 64, 16, 3),
    gradient(Kernel::Dkv, 2, 128, 32, 3),
    gradient(Kernel::Dkv, 2, 1024, 16, 2),
    gradient(Kernel::CapturedRows, 4, 32, 8, 3),
    gradient(Kernel::CapturedRows, 4, 64, 16, 3),
    gradient(Kernel::CapturedRows, 4, 1024, 8, 2),
    gradient(Kernel::CapturedRows, 2, 32, 8, 3),
    gradient(Kernel::CapturedRows, 2, 64, 16, 3),
    gradient(Kernel::CapturedRows, 2, 128, 32, 3),
    gradient(Kernel::CapturedRows, 2, 1024, 16, 2),
    gradient(Kernel::CapturedColumns, 4, 32, 8, 3),
    gradient(Kernel::CapturedColumns, 4, 64, 16, 3),
    gradient(Kernel::CapturedColumns, 4, 1024, 8, 2),
    gradient(Kernel::CapturedColumns, 2, 32, 8, 3),
    gradient(Kernel::CapturedColumns, 2, 64, 16, 3),
    gradient(Kernel::CapturedColumns, 2, 128, 32, 3),
    gradient(Kernel::CapturedColumns, 2, 1024, 16, 2),
    gradient(Kernel::CapturedScatter, 4, 1024, 8, 2),
    gradient(Kernel::CapturedScatter, 2, 1024, 16, 2),
];

impl Tile {
    /// The first tile of the table for this kernel, element type and dims that fits
    /// `workgroup_memory` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when none fits, which names what would.
    pub fn choose(
        kernel: Kernel,
        dtype: DType,
        head_dim: u32,
        v_dim: u32,
        workgroup_memory: u32,
    ) -> Result<Self> {
        let dim = head_dim.max(v_dim);
        let fitting = || {
            TILES
                .iter()
                .filter(|row| row.kernel == kernel && row.element == dtype.size() as u32 && dim <= row.up_to)
        };
        if let Some(row) = fitting().find(|row| row.tile.workgroup_memory(kernel, dtype) <= workgroup_memory)
        {
            return Ok(row.tile);
        }
        match fitting().map(|row| row.tile.workgroup_memory(kernel, dtype)).min() {
            Some(needed) => Err(Error::Limit {
                what: format!("the {} kernel at head_dim {dim}", kernel.entry()),
                limit: "maxComputeWorkgroupStorageSize",
                needed: needed.into(),
                available: workgroup_memory.into(),
                remedy: "request a device with the larger limit".into(),
            }),
            None => Err(Error::unsupported(format!(
                "head_dim is {dim} but the {} kernel has tiles up to {} only",
                kernel.entry(),
                TILES.iter().filter(|row| row.kernel == kernel).map(|row| row.up_to).max().unwrap_or(0)
            ))),
        }
    }

    /// Query rows of a workgroup: 8 invocations share a row.
    pub const fn tile_q(&self) -> u32 {
        self.threads / 8 * self.rows
    }

    /// Bytes of workgroup memory that the kernel declares.
    pub(super) const fn workgroup_memory(&self, kernel: Kernel, dtype: DType) -> u32 {
        match kernel {
            Kernel::Forward => {
                let quad = 4 * dtype.size() as u32;
                let stride = self.chunk + 1;
                let staged = (self.tile_q() + 8 * self.columns) * stride * quad;
                let weights = self.tile_q() * 9 * 16;
                let reduced = self.tile_q() * 8 * 4;
                staged + weights + reduced
            }
            Kernel::Delta | Kernel::Dsink => 64 * 4,
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
