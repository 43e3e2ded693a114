//! A block mask of a mask whose pairs only a device can look at: what ranges say, and the blocks that they
//! leave open.

use super::build::{Compiled, Sizes};
use super::lists::{Cells, Lists, Rect};
use super::quad_tree::{Found, Grid, descend};
use super::tile_map::{Class, TileMap};
use super::{BlockMask, BlockShape};
use crate::error::{Error, Result};
use crate::expr::{Input, MaskMod};
use crate::shape::BLOCK;

/// A block mask on its way, in the kernels' block size. Captured tensors that live on a device have unknown
/// ranges, but the rest of the mask may decide a block all the same: those above the diagonal of
/// `document & causal` are empty whatever the documents are.
#[derive(Debug)]
pub(crate) struct OpenMask {
    mask_mod: MaskMod,
    sizes: Sizes,
    heads: u32,
    /// One for each matrix.
    cells: Vec<Cells>,
    /// The blocks that are open, `(matrix * block rows + row) * block columns + column`.
    open: Vec<u32>,
}

impl OpenMask {
    /// What ranges say of a mask. At most `most` blocks may be left open.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::build`], but captures may be on a device; [`Error::Overflow`] for 2^32 blocks and
    /// [`Error::Limit`] for more open ones than `most`.
    pub(crate) fn new(mask_mod: &MaskMod, shape: &BlockShape<'_>, most: usize) -> Result<Self> {
        mask_mod.check()?;
        let compiled = Compiled::of_any(mask_mod);
        let sizes = Sizes::new(shape, [BLOCK; 2], mask_mod.expr().inputs().contains(Input::Batch))?;
        let heads = compiled.heads(&sizes);
        let mut mask = Self { mask_mod: mask_mod.clone(), heads, sizes, cells: Vec::new(), open: Vec::new() };
        let [rows, columns] = mask.blocks();
        let count = [mask.sizes.batch, heads, rows].iter().try_fold(columns, |n, &size| n.checked_mul(size));
        if count.is_none() {
            return Err(Error::overflow(format!(
                "the mask has {} x {heads} x {rows} x {columns} blocks but a device numbers them by u32; build it for fewer heads or batch entries",
                mask.sizes.batch
            )));
        }
        let mut found = 0u64;
        for (b, h) in (0..mask.sizes.batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let matrix = b * heads + h;
            let sizes = &mask.sizes;
            let (kv_len, q_offset) = (sizes.kv_lens[b as usize], sizes.q_offset[b as usize]);
            let grid = Grid { q_len: sizes.q_len, kv_len, block: sizes.block };
            let mut cells = Cells::default();
            let mut boxes = compiled.boxes([b, h], sizes.q_len, kv_len, q_offset)?;
            descend(&grid, &mut boxes, |_, seen| match seen {
                Found::Full(rect) => cells.full.push(rect),
                Found::Open { row, column, .. } => {
                    found += 1;
                    if mask.open.len() < most {
                        mask.open.push((matrix * rows + row) * columns + column);
                    }
                }
            });
            mask.cells.push(cells);
        }
        if found > mask.open.len() as u64 {
            return Err(Error::Limit {
                what: format!("the tile maps of {found} blocks that only a device can look into"),
                limit: "maxBufferSize",
                needed: 4 * found,
                available: 4 * most as u64,
                remedy: "build the mask for fewer heads, batch entries or tokens".into(),
            });
        }
        Ok(mask)
    }

    /// The mask.
    pub(crate) fn mask_mod(&self) -> &MaskMod {
        &self.mask_mod
    }

    /// The blocks that ranges leave open, `(matrix * block rows + row) * block columns + column`, where
    /// matrices are counted over batch entries and heads.
    pub(crate) fn open(&self) -> &[u32] {
        &self.open
    }

    /// Block rows and block columns of each matrix.
    pub(crate) fn blocks(&self) -> [u32; 2] {
        [self.sizes.q_len.div_ceil(BLOCK as u32), self.sizes.kv_len.div_ceil(BLOCK as u32)]
    }

    /// Query rows and keys.
    pub(crate) fn lengths(&self) -> [u32; 2] {
        [self.sizes.q_len, self.sizes.kv_len]
    }

    /// Heads that have matrices of their own.
    pub(crate) fn heads(&self) -> u32 {
        self.heads
    }

    /// Positions of query row 0, of each batch entry that has matrices of its own.
    pub(crate) fn q_offset(&self) -> &[i32] {
        &self.sizes.q_offset
    }

    /// Keys of each of them.
    pub(crate) fn kv_lens(&self) -> &[u32] {
        &self.sizes.kv_lens
    }

    /// The block mask, once there is a tile map for each block of [`OpenMask::open`].
    pub(crate) fn settle(mut self, maps: &[u32]) -> Result<BlockMask> {
        let [rows, columns] = self.blocks();
        for (&block, &map) in self.open.iter().zip(maps) {
            let (matrix, row, column) = (block / columns / rows, block / columns % rows, block % columns);
            let kv_len = self.sizes.kv_lens[(matrix / self.heads) as usize];
            let grid = Grid { q_len: self.sizes.q_len, kv_len, block: self.sizes.block };
            let cells = &mut self.cells[matrix as usize];
            if TileMap(map) == grid.filled(row, column, Class::Full) {
                cells.full.push(Rect { rows: [row, row + 1], columns: [column, column + 1] });
            } else if TileMap(map) != TileMap::EMPTY {
                cells.partial.push((row, column, TileMap(map)));
            }
        }
        let mut lists = Lists::default();
        for (matrix, cells) in self.cells.iter_mut().enumerate() {
            // Blocks that were open come after those that were not; no two of one row begin alike.
            cells.full.sort_unstable_by_key(|rect| rect.columns[0]);
            let kv_len = self.sizes.kv_lens[matrix / self.heads as usize];
            let grid = Grid { q_len: self.sizes.q_len, kv_len, block: self.sizes.block };
            lists.push_cells(grid.blocks()[0], cells)?;
        }
        self.sizes.finish(self.heads, lists, Some(self.mask_mod), true)
    }
}
