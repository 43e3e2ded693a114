//! Block masks from tensors, block lists and lengths.

use super::build::{Compiled, Sizes};
use super::lists::Lists;
use super::quad_tree::{Grid, settle};
use super::{BlockMask, BlockShape, Class, TileMap};
use crate::error::{Error, Result, filled, reserved};
use crate::expr::{CaptureData, Input, MaskMod};
use crate::masks;

/// Block lists as PyTorch's `BlockMask.from_kv_blocks` takes them.
///
/// `num_blocks` is `[B, H, rows]`, `indices` is `[B, H, rows, width]`; entries of a row past its number
/// are not read. B and H may be 1.
#[derive(Clone, Copy, Debug)]
pub struct KvBlocks<'a> {
    /// B, H and rows of the arrays.
    pub shape: [usize; 3],
    /// How many blocks of each row are partial.
    pub num_blocks: &'a [i32],
    /// Which ones, in any order.
    pub indices: &'a [i32],
    /// How many blocks of each row are full; may be empty, as the next.
    pub full_num_blocks: &'a [i32],
    /// Which ones, in any order.
    pub full_indices: &'a [i32],
}

impl BlockMask {
    /// From the value for every pair, `[B, H, q_len, kv_len]` row-major, in blocks of `block`.
    ///
    /// B and H are the batch entries and heads that the tensor tells apart; give 1 to share. The mask_mod is
    /// [`masks::dense`] of the tensor.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when the number of values is not the product of the shape, and as
    /// [`BlockMask::build_with`].
    ///
    /// ```
    /// use flexattn::BlockMask;
    ///
    /// let keep: Vec<bool> = (0..200 * 200).map(|i| i / 200 >= i % 200).collect();
    /// let mask = BlockMask::from_dense_mask(&keep, [1, 1, 200, 200], [128, 128])?;
    /// assert_eq!(mask.to_mask()?, keep);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn from_dense_mask(keep: &[bool], shape: [usize; 4], block: [usize; 2]) -> Result<Self> {
        let [batch, heads, q_len, kv_len] = shape;
        let sizes = Sizes::new(&BlockShape::new(batch, heads, q_len, kv_len), block, true)?;
        let pairs = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
        if pairs != Some(keep.len()) {
            return Err(Error::shape(format!(
                "the dense mask has {} values but its shape {shape:?} needs {}; give every pair once",
                keep.len(),
                pairs.map_or("more than fit in memory".into(), |n| n.to_string())
            )));
        }
        if keep.is_empty() {
            return Self::build_with(&!masks::noop(), BlockShape::new(batch, heads, q_len, kv_len), block);
        }
        let grid = Grid { q_len: sizes.q_len, kv_len: sizes.kv_len, block: sizes.block };
        let [rows, columns] = grid.blocks();
        let mut lists = Lists::default();
        let mut maps = vec![TileMap::EMPTY; columns as usize];
        for matrix in keep.chunks_exact(q_len * kv_len) {
            for row in 0..rows {
                maps.fill(TileMap::EMPTY);
                for r in 0..TileMap::SIDE as u32 {
                    dense_tiles(&grid, matrix, row, r, &mut maps);
                }
                for (column, &map) in (0..).zip(&maps) {
                    lists.push_block(&grid, row, column, map);
                }
                lists.end_row()?;
            }
        }
        let heads = sizes.heads;
        sizes.finish(heads, lists, Some(masks::dense(keep, shape)), true)
    }

    /// From PyTorch's block lists, for masks of `q_len` x `kv_len` in blocks of `block`.
    ///
    /// Tiles of partial blocks are classified with `mask_mod`, unless it reads `h` or `b` and the lists are
    /// one for all of them: then it decides each pair in the kernel. Without one partial blocks keep every
    /// pair, as PyTorch's `noop_mask` does, but stay partial, so that a mask_mod can be set later. As in
    /// PyTorch's kernels, the mask_mod does not count where no block is listed or where a block is full.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for arrays that do not fit the shape, for a block outside the mask, and for a
    /// block that is listed twice in a row.
    ///
    /// ```
    /// use flexattn::{BlockMask, KvBlocks, masks};
    ///
    /// let lists = KvBlocks {
    ///     shape: [1, 1, 2],
    ///     num_blocks: &[1, 1],
    ///     indices: &[0, 0, 1, 0],
    ///     full_num_blocks: &[0, 1],
    ///     full_indices: &[0, 0, 0, 0],
    /// };
    /// let mask = BlockMask::from_kv_blocks(&lists, 256, 256, [128, 128], Some(&masks::causal()))?;
    /// assert_eq!(mask.kept()?, 256 * 257 / 2);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn from_kv_blocks(
        lists: &KvBlocks<'_>,
        q_len: usize,
        kv_len: usize,
        block: [usize; 2],
        mask_mod: Option<&MaskMod>,
    ) -> Result<Self> {
        let [batch, heads, row_count] = lists.shape;
        let sizes = Sizes::new(&BlockShape::new(batch, heads, q_len, kv_len), block, true)?;
        let grid = Grid { q_len: sizes.q_len, kv_len: sizes.kv_len, block: sizes.block };
        let [rows, columns] = grid.blocks();
        let count = batch.checked_mul(heads).and_then(|n| n.checked_mul(row_count)).unwrap_or(usize::MAX);
        if row_count != rows as usize || lists.num_blocks.len() != count {
            return Err(Error::shape(format!(
                "num_blocks has {} values for the shape {:?} but q_len = {q_len} in blocks of {} rows needs {rows} rows for each batch entry and head; give one number a row",
                lists.num_blocks.len(),
                lists.shape,
                block[0]
            )));
        }
        let compiled = match mask_mod {
            // Partial blocks stay partial in all tiles where one list stands for heads or batch entries that
            // the mask tells apart; and what lives on a GPU cannot be looked at.
            Some(mask_mod)
                if !told_apart(mask_mod, [batch, heads])
                    && !mask_mod.captures().iter().any(|c| matches!(c.data(), CaptureData::Device(_))) =>
            {
                Some(Compiled::new(mask_mod)?)
            }
            _ => None,
        };
        let mut out = Lists::default();
        let mut maps = filled("a row of tile maps", TileMap::EMPTY, Some(columns as usize))?;
        for (b, h) in (0..sizes.batch).flat_map(|b| (0..sizes.heads).map(move |h| (b, h))) {
            let mut elements = match &compiled {
                Some(compiled) => Some(compiled.matrix([b, h], sizes.q_len, sizes.kv_len, 0)?),
                None => None,
            };
            for row in 0..rows {
                let at = ((b * sizes.heads + h) * rows + row) as usize;
                maps.fill(TileMap::EMPTY);
                let sources = [
                    ("indices", lists.num_blocks, lists.indices, Class::Partial),
                    ("full_indices", lists.full_num_blocks, lists.full_indices, Class::Full),
                ];
                for (name, numbers, indices, class) in sources {
                    for &column in listed(name, numbers, indices, count, at)? {
                        let map = usize::try_from(column).ok().and_then(|column| maps.get_mut(column));
                        let Some(map) = map else {
                            return Err(Error::shape(format!(
                                "{name} lists block {column} in row {at} but there are {columns} block columns; lists of another kv_len or block size?"
                            )));
                        };
                        if *map != TileMap::EMPTY {
                            return Err(Error::shape(format!(
                                "block {column} is listed twice in row {at}, but each block counts once; drop one"
                            )));
                        }
                        *map = grid.filled(row, column.cast_unsigned(), class);
                    }
                }
                for (column, map) in (0..).zip(&mut maps) {
                    if let Some(elements) = &mut elements {
                        for (r, c) in (0..16).map(|tile| (tile / 4, tile % 4)) {
                            if map.get(r as usize, c as usize) == Class::Partial {
                                let pairs = grid.tile_pairs(row, column, [r, r + 1], [c, c + 1]);
                                *map = map.with(r as usize, c as usize, settle(elements, &pairs));
                            }
                        }
                    }
                    out.push_block(&grid, row, column, *map);
                }
                out.end_row()?;
            }
        }
        let heads = sizes.heads;
        sizes.finish(heads, out, Some(mask_mod.cloned().unwrap_or_else(masks::noop)), false)
    }

    /// Packed sequences: query rows `cu_q[i]..cu_q[i + 1]` attend to keys `cu_kv[i]..cu_kv[i + 1]`,
    /// each sequence causal from its bottom right corner if `causal`, as in variable-length attention
    /// by cumulated lengths. In blocks of 128x128.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when the two differ in length, do not start at 0 or descend.
    ///
    /// ```
    /// use flexattn::BlockMask;
    ///
    /// let mask = BlockMask::from_cu_seqlens(&[0, 100, 300], &[0, 100, 300], true)?;
    /// assert_eq!(mask.kept()?, 100 * 101 / 2 + 200 * 201 / 2);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn from_cu_seqlens(cu_q: &[u32], cu_kv: &[u32], causal: bool) -> Result<Self> {
        for (name, cu) in [("cu_q", cu_q), ("cu_kv", cu_kv)] {
            let good = cu.first() == Some(&0)
                && cu.windows(2).all(|pair| pair[0] <= pair[1])
                && cu.last().is_some_and(|&end| end <= i32::MAX as u32);
            if !good || cu_q.len() != cu_kv.len() {
                return Err(Error::shape(format!(
                    "{name} has {} values, the other has {}, but both must ascend from 0 to below 2^31 with one value more than there are sequences; cumulate the lengths again",
                    cu.len(),
                    cu_q.len() + cu_kv.len() - cu.len()
                )));
            }
        }
        let rows = cu_q[cu_q.len() - 1] as usize;
        let [mut first, mut end] = [reserved("first keys", Some(rows))?, reserved("ends", Some(rows))?];
        for (q, kv) in cu_q.windows(2).zip(cu_kv.windows(2)) {
            let [q0, q1, kv0, kv1] = [q[0], q[1], kv[0], kv[1]].map(u32::cast_signed);
            for row in q0..q1 {
                first.push(kv0);
                end.push(if causal { (kv1 - (q1 - 1 - row)).max(kv0) } else { kv1 });
            }
        }
        let (q_len, kv_len) = (first.len(), cu_kv[cu_kv.len() - 1] as usize);
        let mask_mod = if first.is_empty() { masks::noop() } else { masks::row_interval(&first, &end) };
        Self::build(&mask_mod, BlockShape::new(1, 1, q_len, kv_len))
    }

    /// From a tile map for each block, `[batch, heads, block_rows, block_columns]`, as a GPU finds them.
    /// `batch` and `heads` of the shape are those that the maps tell apart. The maps say what `mask_mod`
    /// keeps and no more nor less: algebra, slices and counts go by the mask_mod.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when the number of maps is not the number of blocks, or a map has a tile of the
    /// invalid value 3.
    pub fn from_tile_maps(
        maps: &[u32],
        shape: BlockShape<'_>,
        block: [usize; 2],
        mask_mod: Option<&MaskMod>,
    ) -> Result<Self> {
        let sizes = Sizes::new(&shape, block, true)?;
        let rows = sizes.q_len.div_ceil(sizes.block[0]);
        let columns = sizes.kv_len.div_ceil(sizes.block[1]);
        let blocks = [sizes.batch, sizes.heads, rows, columns]
            .iter()
            .try_fold(1usize, |n, &dim| n.checked_mul(dim as usize));
        if blocks != Some(maps.len()) || !maps.iter().all(|&map| TileMap(map).is_valid()) {
            return Err(Error::shape(format!(
                "there are {} tile maps, but each of {} x {} x {rows} x {columns} blocks needs one whose tiles are 0, 1 or 2; read all of them back",
                maps.len(),
                sizes.batch,
                sizes.heads
            )));
        }
        let mut lists = Lists::default();
        let mut maps = maps.iter();
        for b in 0..sizes.batch {
            let grid = Grid { q_len: sizes.q_len, kv_len: sizes.kv_lens[b as usize], block: sizes.block };
            for _ in 0..sizes.heads {
                for row in 0..rows {
                    for (column, &map) in (0..columns).zip(&mut maps) {
                        let exist = grid.filled(row, column, Class::Full);
                        lists.push_block(&grid, row, column, TileMap(map).within(exist));
                    }
                    lists.end_row()?;
                }
            }
        }
        let heads = sizes.heads;
        sizes.finish(heads, lists, mask_mod.cloned(), mask_mod.is_some())
    }
}

/// Whether a mask reads an index of which [batch entries, heads] only one has lists.
fn told_apart(mask_mod: &MaskMod, lists: [usize; 2]) -> bool {
    let inputs = mask_mod.expr().inputs();
    [Input::Batch, Input::Head]
        .into_iter()
        .zip(lists)
        .any(|(input, lists)| lists == 1 && inputs.contains(input))
}

/// The blocks that PyTorch's arrays list for one row.
fn listed<'a>(name: &str, numbers: &[i32], indices: &'a [i32], rows: usize, row: usize) -> Result<&'a [i32]> {
    if numbers.is_empty() && indices.is_empty() {
        return Ok(&[]);
    }
    let width = indices.len() / rows.max(1);
    let number = numbers.get(row).and_then(|&number| usize::try_from(number).ok());
    match number {
        Some(number) if numbers.len() == rows && indices.len() == width * rows && number <= width => {
            Ok(&indices[row * width..row * width + number])
        }
        _ => Err(Error::shape(format!(
            "row {row} must list from 0 to {width} blocks in {name}, which has {} values for {rows} rows and {} numbers; give every row the same width",
            indices.len(),
            numbers.len()
        ))),
    }
}

/// Classifies the tiles of tile row `r` of one block row of a dense matrix.
fn dense_tiles(grid: &Grid, matrix: &[bool], row: u32, r: u32, maps: &mut [TileMap]) {
    let width = grid.kv_len as usize;
    let [q0, q1] = grid.tile_pairs(row, 0, [r, r + 1], [0, 1]).q;
    if q0 == q1 {
        return;
    }
    let lines = &matrix[q0 as usize * width..q1 as usize * width];
    for (column, map) in (0..).zip(maps) {
        for c in 0..TileMap::SIDE as u32 {
            let [kv0, kv1] = grid.tile_pairs(row, column, [r, r + 1], [c, c + 1]).kv;
            if kv0 == kv1 {
                continue;
            }
            let (mut some, mut every) = (false, true);
            for line in lines.chunks_exact(width) {
                let line = &line[kv0 as usize..kv1 as usize];
                // Sums over whole lines vectorise; an early exit inside them would not.
                let kept: usize = line.iter().map(|&keep| usize::from(keep)).sum();
                some |= kept > 0;
                every &= kept == line.len();
                if some && !every {
                    break;
                }
            }
            let class = match (some, every) {
                (false, _) => Class::Empty,
                (_, true) => Class::Full,
                _ => Class::Partial,
            };
            *map = map.with(r as usize, c as usize, class);
        }
    }
}
