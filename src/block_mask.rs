//! Which blocks of the score matrix are empty, partial or full.
//!
//! Skipping work comes from here and from nowhere else: kernels walk the lists of a [`BlockMask`], skip
//! what is not listed, and evaluate the mask only in partial tiles. A mask is built from its expression
//! by range analysis on boxes of pairs, so that a million tokens cost milliseconds and not the
//! evaluation of every pair:
//!
//! 1. A quad-tree starts at the whole matrix and descends only into boxes whose range is unknown; below
//!    the block it descends to tiles. Full boxes are written as runs without visiting their blocks.
//! 2. A tile that ranges do not decide is probed at its corners; one kept and one dropped pair make it
//!    partial. Otherwise its pairs are scanned until both are seen.
//!
//! Where a mask reads a captured tensor that lives on a device, the second step happens there: a kernel looks
//! at every pair of the blocks that ranges leave open ([`BlockMask::build_on`]).
//!
//! The result is exact: a tile is partial only if it keeps a pair and drops a pair.
//!
//! Ragged ends: a block or tile at the end of the lengths is full when it keeps every pair that exists.
//! Kernels exclude columns beyond `kv_len` by themselves.

mod algebra;
mod build;
mod bytes;
mod import;
mod lists;
mod meaning;
mod open;
mod picture;
mod quad_tree;
mod ranges;
mod terms;
mod tile_map;

use crate::error::{Error, Result, filled};
use crate::expr::MaskMod;
use crate::shape::BLOCK;
use quad_tree::Grid;
use std::fmt;
use std::ops::Range;

pub use build::Compiled as CompiledMask;
pub use import::KvBlocks;
pub use lists::Lists;
pub(crate) use open::OpenMask;
pub use picture::Picture;
pub use tile_map::{Class, TileMap};

/// The largest side of a block.
pub const MAX_BLOCK: u32 = 1 << 16;

/// The sizes that a block mask is built for.
///
/// ```
/// use flexattn::BlockShape;
///
/// // Two sequences of 100 and 70 cached keys, each decoding its newest token.
/// let shape = BlockShape { q_offset: &[99, 69], kv_lens: &[100, 70], ..BlockShape::new(2, 8, 1, 100) };
/// assert_eq!(shape.heads, 8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape<'a> {
    /// Batch entries of the queries.
    pub batch: usize,
    /// QUERY heads.
    pub heads: usize,
    /// Query rows.
    pub q_len: usize,
    /// Keys (the most of any batch entry).
    pub kv_len: usize,
    /// What is added to a row to give the `q` of the mask: none, one for all, or one per batch entry.
    pub q_offset: &'a [i32],
    /// Keys of each batch entry, at most `kv_len`: none, one for all, or one per batch entry.
    pub kv_lens: &'a [u32],
}

impl BlockShape<'_> {
    /// Without offsets and with `kv_len` keys everywhere.
    pub const fn new(batch: usize, heads: usize, q_len: usize, kv_len: usize) -> Self {
        Self { batch, heads, q_len, kv_len, q_offset: &[], kv_lens: &[] }
    }
}

/// Lists of full and partial blocks, by query rows and by key columns.
///
/// `batch` and `heads` are 1 where the mask does not depend on them: matrix `(b % batch, h % heads)`
/// holds for batch entry `b` and query head `h`.
///
/// Two block masks are equal when their shapes and lists are; the mask_mod is not compared.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 2048, 2048))?;
/// assert_eq!(mask.sparsity(), 0.46875);
/// assert_eq!(mask.rows().runs_of(15), [[0, 15]]);
/// assert_eq!(mask.rows().partials_of(15).len(), 1);
/// # Ok::<(), flexattn::Error>(())
/// ```
#[derive(Clone)]
pub struct BlockMask {
    batch: u32,
    heads: u32,
    q_len: u32,
    kv_len: u32,
    block: [u32; 2],
    /// One per batch entry of the mask.
    q_offset: Vec<i32>,
    kv_lens: Vec<u32>,
    rows: Lists,
    transposed: Lists,
    /// What decides the pairs of partial tiles.
    mask_mod: Option<MaskMod>,
    /// Whether the lists say no more than the mask_mod does. Imported lists may leave out blocks in
    /// which the mask_mod keeps something.
    derived: bool,
}

impl fmt::Debug for BlockMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (full, partial) = self.rows.blocks();
        f.debug_struct("BlockMask")
            .field("shape", &[self.batch, self.heads, self.q_len, self.kv_len])
            .field("block", &self.block)
            .field("full_blocks", &full)
            .field("partial_blocks", &partial)
            .finish_non_exhaustive()
    }
}

impl PartialEq for BlockMask {
    fn eq(&self, other: &Self) -> bool {
        let key = |mask: &Self| (mask.batch, mask.heads, mask.q_len, mask.kv_len, mask.block);
        key(self) == key(other)
            && self.q_offset == other.q_offset
            && self.kv_lens == other.kv_lens
            && self.rows == other.rows
            && self.transposed == other.transposed
    }
}

/// A block mask as words for the GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Row headers, runs and partial entries of the q-major lists, then the same of the kv-major ones.
    ///
    /// A header is four words: where the runs of the row begin and end and where its partial entries
    /// begin and end, as word offsets in the buffer that the words lie in. A run is two words, the
    /// first block and the end; a partial entry is two words, the block and its [`TileMap`].
    pub words: Vec<u32>,
    /// Word offset of the headers of the q-major lists: row `(b * heads + h) * q_blocks + q_block`.
    pub lists: u32,
    /// Word offset of the headers of the kv-major lists: row `(b * heads + h) * kv_blocks + kv_block`.
    pub lists_t: u32,
}

impl BlockMask {
    /// The blocks of a mask in the kernels' block size, 128x128.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for a shape that does not fit itself, [`Error::Expression`] or
    /// [`Error::Capture`] for a mask that does not pass [`MaskMod::check`], [`Error::Unsupported`] when it reads a capture that lives only
    /// on a GPU: [`BlockMask::build_on`] takes those.
    pub fn build(mask_mod: &MaskMod, shape: BlockShape<'_>) -> Result<Self> {
        Self::build_with(mask_mod, shape, [BLOCK; 2])
    }

    /// The blocks of a mask in blocks of `block[0]` rows and `block[1]` columns.
    ///
    /// Kernels take blocks of 128x128 only; others are to look at, to compare and to convert.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::build`], and [`Error::Shape`] for a side of 0 or more than 65536.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build_with(&masks::causal(), BlockShape::new(1, 1, 61, 90), [24, 40])?;
    /// assert_eq!((mask.block_rows(), mask.block_columns()), (3, 3));
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn build_with(mask_mod: &MaskMod, shape: BlockShape<'_>, block: [usize; 2]) -> Result<Self> {
        build::Compiled::new(mask_mod)?.build(&shape, block)
    }

    /// The mask that keeps every pair: one full run per block row.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::build`].
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape};
    ///
    /// let mask = BlockMask::dense(BlockShape::new(2, 4, 300, 200))?;
    /// assert_eq!((mask.mask_batch(), mask.density()?), (1, 1.0));
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn dense(shape: BlockShape<'_>) -> Result<Self> {
        Self::build(&crate::masks::noop(), shape)
    }

    /// Batch entries that have lists of their own: 1 when all are alike.
    pub fn mask_batch(&self) -> usize {
        self.batch as usize
    }

    /// Query heads that have lists of their own: 1 when all are alike.
    pub fn mask_heads(&self) -> usize {
        self.heads as usize
    }

    /// Query rows.
    pub fn q_len(&self) -> usize {
        self.q_len as usize
    }

    /// Keys.
    pub fn kv_len(&self) -> usize {
        self.kv_len as usize
    }

    /// Rows and columns of a block.
    pub fn block(&self) -> [usize; 2] {
        self.block.map(|side| side as usize)
    }

    /// What is added to a row to give the `q` of the mask, for each of [`BlockMask::mask_batch`].
    pub fn q_offset(&self) -> &[i32] {
        &self.q_offset
    }

    /// Keys of each of [`BlockMask::mask_batch`].
    pub fn kv_lens(&self) -> &[u32] {
        &self.kv_lens
    }

    /// Block rows of each matrix.
    pub fn block_rows(&self) -> u32 {
        self.q_len.div_ceil(self.block[0])
    }

    /// Block columns of each matrix.
    pub fn block_columns(&self) -> u32 {
        self.kv_len.div_ceil(self.block[1])
    }

    /// The lists by query rows. Row `(b * mask_heads + h) * block_rows + r`.
    pub fn rows(&self) -> &Lists {
        &self.rows
    }

    /// The lists by key columns, as the backward pass for k and v reads them. Row
    /// `(b * mask_heads + h) * block_columns + c`.
    pub fn transposed(&self) -> &Lists {
        &self.transposed
    }

    /// What decides the pairs of partial tiles. None after [`BlockMask::from_bytes`].
    pub fn mask_mod(&self) -> Option<&MaskMod> {
        self.mask_mod.as_ref()
    }

    /// Whether the mask_mod says all that the lists do.
    pub(crate) fn is_derived(&self) -> bool {
        self.derived
    }

    /// The same mask with this mask_mod, which says exactly the same.
    pub(crate) fn decided_by(self, mask_mod: MaskMod) -> Self {
        Self { mask_mod: Some(mask_mod), ..self }
    }

    /// The same lists with this mask_mod to decide the pairs of partial tiles. It must be true in full
    /// blocks; where no block is listed it is not asked.
    #[must_use]
    pub fn with_mask_mod(mut self, mask_mod: MaskMod) -> Self {
        self.mask_mod = Some(mask_mod);
        self.derived = false;
        self
    }

    /// Share of the pairs that lie in empty blocks: what a kernel saves by skipping blocks. 0 for a mask of no pairs.
    pub fn sparsity(&self) -> f64 {
        let total = self.pairs() * f64::from(self.batch) * f64::from(self.heads);
        if total == 0.0 {
            return 0.0;
        }
        let mut computed = 0.0;
        for (_, row, first, end, _) in self.segments() {
            let rows = self.side(row, 0);
            let columns = (end * self.block[1]).min(self.kv_len) - first * self.block[1];
            computed += f64::from(rows) * f64::from(columns);
        }
        1.0 - computed / total
    }

    /// Share of the pairs that are kept, between 0 and 1. 0 for a mask of no pairs.
    ///
    /// Exact: full tiles count at once and the pairs of partial tiles are evaluated. That is slow when
    /// there are very many; [`BlockMask::density_bounds`] evaluates none.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::kept`].
    pub fn density(&self) -> Result<f64> {
        let total = self.pairs() * f64::from(self.batch) * f64::from(self.heads);
        if total == 0.0 {
            return Ok(0.0);
        }
        Ok(self.kept()? as f64 / total)
    }

    /// The share of kept pairs with partial tiles counted as empty and as full.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 4096, 4096))?;
    /// let [low, high] = mask.density_bounds();
    /// let density = mask.density()?;
    /// assert!(low < density && density < high && high - low < 0.01);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn density_bounds(&self) -> [f64; 2] {
        let total = self.pairs() * f64::from(self.batch) * f64::from(self.heads);
        if total == 0.0 {
            return [0.0; 2];
        }
        let (mut low, mut high) = (0.0, 0.0);
        for matrix in 0..self.matrices() {
            let (full, partial) = self.count(matrix);
            low += full as f64;
            high += (full + partial) as f64;
        }
        [low / total, high / total]
    }

    /// How many pairs are kept, over all of [`BlockMask::mask_batch`] and [`BlockMask::mask_heads`].
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when there are partial blocks and no mask_mod.
    pub fn kept(&self) -> Result<u64> {
        let mut kept = 0;
        let compiled = self.compiled()?;
        for matrix in 0..self.matrices() {
            kept += self.count(matrix).0;
            if let Some(compiled) = &compiled {
                let mut elements = self.elements(compiled, matrix)?;
                self.partial_tiles(matrix, |pairs| {
                    for q in pairs.q[0]..pairs.q[1] {
                        kept += elements.mask_row(q, pairs.kv).iter().filter(|&&keep| keep).count() as u64;
                    }
                });
            }
        }
        Ok(kept)
    }

    /// The class of every block, `[mask_batch, mask_heads, block_rows, block_columns]`.
    pub fn to_dense(&self) -> Vec<Class> {
        let columns = self.block_columns() as usize;
        let mut out = vec![Class::Empty; self.rows.len() * columns];
        for (matrix, row, first, end, map) in self.segments() {
            let at = self.row(matrix, row) * columns;
            let class = if map == TileMap::FULL { Class::Full } else { Class::Partial };
            out[at + first as usize..at + end as usize].fill(class);
        }
        out
    }

    /// Whether each pair is kept, `[mask_batch, mask_heads, q_len, kv_len]`.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when there are partial blocks and no mask_mod, [`Error::OutOfMemory`].
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 2, 3))?;
    /// assert_eq!(mask.to_mask()?, [true, false, false, true, true, false]);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn to_mask(&self) -> Result<Vec<bool>> {
        let (height, width) = (self.q_len(), self.kv_len());
        let pairs = height.checked_mul(width).and_then(|pairs| pairs.checked_mul(self.matrices()));
        let mut out = filled("the mask of every pair", false, pairs)?;
        let compiled = self.compiled()?;
        for matrix in 0..self.matrices() {
            let out = &mut out[matrix * height * width..][..height * width];
            self.full_boxes(matrix, |pairs| {
                for q in pairs.q[0]..pairs.q[1] {
                    let at = q as usize * width;
                    out[at + pairs.kv[0] as usize..at + pairs.kv[1] as usize].fill(true);
                }
            });
            if let Some(compiled) = &compiled {
                let mut elements = self.elements(compiled, matrix)?;
                self.partial_tiles(matrix, |pairs| {
                    for q in pairs.q[0]..pairs.q[1] {
                        let at = q as usize * width + pairs.kv[0] as usize;
                        let keep = elements.mask_row(q, pairs.kv);
                        out[at..at + keep.len()].copy_from_slice(keep);
                    }
                });
            }
        }
        Ok(out)
    }

    /// [`BlockMask::to_mask`] of a part of one matrix: rows `q` and columns `kv` of batch entry and query head
    /// `[b, h]`, for looking at.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::to_mask`], and [`Error::Shape`] for a window that reaches past the lengths.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 1000, 1000))?;
    /// assert_eq!(mask.window([0, 0], 500..502, 500..502)?, [true, false, true, true]);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn window(&self, [b, h]: [usize; 2], q: Range<usize>, kv: Range<usize>) -> Result<Vec<bool>> {
        if q.end > self.q_len() || kv.end > self.kv_len() || q.start > q.end || kv.start > kv.end {
            return Err(Error::shape(format!(
                "rows {q:?} and columns {kv:?} were asked for but the mask has {} and {}",
                self.q_len, self.kv_len
            )));
        }
        let matrix = b % self.mask_batch() * self.mask_heads() + h % self.mask_heads();
        let mut out = filled("a part of the mask", false, q.len().checked_mul(kv.len()))?;
        // What a box of pairs and the window share.
        let shared = |pairs: &quad_tree::Pairs| {
            let rows = q.start.max(pairs.q[0] as usize)..q.end.min(pairs.q[1] as usize);
            let columns = kv.start.max(pairs.kv[0] as usize)..kv.end.min(pairs.kv[1] as usize);
            (rows, columns)
        };
        let at = |row: usize, column: usize| (row - q.start) * kv.len() + column - kv.start;
        self.full_boxes(matrix, |pairs| {
            let (rows, columns) = shared(pairs);
            if !columns.is_empty() {
                rows.for_each(|row| out[at(row, columns.start)..][..columns.len()].fill(true));
            }
        });
        if let Some(compiled) = &self.compiled()? {
            let mut elements = self.elements(compiled, matrix)?;
            self.partial_tiles(matrix, |pairs| {
                let (rows, columns) = shared(pairs);
                if !columns.is_empty() {
                    let part = [columns.start as u32, columns.end as u32];
                    for row in rows {
                        let keep = elements.mask_row(row as u32, part);
                        out[at(row, columns.start)..][..keep.len()].copy_from_slice(keep);
                    }
                }
            });
        }
        Ok(out)
    }

    /// The lists as words for the GPU, to lie at word `base` of a buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Overflow`] when offsets exceed 32 bits.
    pub fn tables(&self, base: u32) -> Result<Tables> {
        let size = |lists: &Lists| 4 * lists.len() + 2 * (lists.runs.len() + lists.partials.len());
        let words = size(&self.rows) + size(&self.transposed);
        if base as usize + words > u32::MAX as usize {
            return Err(Error::overflow(format!(
                "the block mask needs {words} words but offsets are 32 bits; use fewer heads or batch entries"
            )));
        }
        let mut tables = Tables { words: Vec::with_capacity(words), ..Tables::default() };
        tables.lists = append(&mut tables.words, base, &self.rows);
        tables.lists_t = append(&mut tables.words, base, &self.transposed);
        Ok(tables)
    }

    fn matrices(&self) -> usize {
        self.mask_batch() * self.mask_heads()
    }

    /// The matrix that holds for batch entry `b` and head `h`.
    fn matrix(&self, b: usize, h: usize) -> usize {
        (b % self.mask_batch()) * self.mask_heads() + h % self.mask_heads()
    }

    /// The row of [`BlockMask::rows`] of a block row.
    fn row(&self, matrix: usize, row: u32) -> usize {
        matrix * self.block_rows() as usize + row as usize
    }

    fn grid(&self, matrix: usize) -> Grid {
        let kv_len = self.kv_lens[matrix / self.mask_heads()];
        Grid { q_len: self.q_len, kv_len, block: self.block }
    }

    /// Pairs of one matrix.
    fn pairs(&self) -> f64 {
        f64::from(self.q_len) * f64::from(self.kv_len)
    }

    /// Rows (axis 0) or columns (axis 1) of the block at `index`.
    fn side(&self, index: u32, axis: usize) -> u32 {
        let len = [self.q_len, self.kv_len][axis];
        self.block[axis].min(len - index * self.block[axis])
    }

    /// `(matrix, block row, first block, end, map)` of everything listed.
    fn segments(&self) -> impl Iterator<Item = (usize, u32, u32, u32, TileMap)> + '_ {
        let matrices = 0..self.matrices();
        matrices.flat_map(move |matrix| {
            (0..self.block_rows()).flat_map(move |row| {
                let segments = self.rows.segments(self.row(matrix, row));
                segments.map(move |(first, end, map)| (matrix, row, first, end, map))
            })
        })
    }

    /// Pairs in full tiles and pairs in partial tiles of one matrix.
    fn count(&self, matrix: usize) -> (u64, u64) {
        let (mut full, mut partial) = (0, 0);
        let area = |pairs: &quad_tree::Pairs| {
            u64::from(pairs.q[1] - pairs.q[0]) * u64::from(pairs.kv[1] - pairs.kv[0])
        };
        self.full_boxes(matrix, |pairs| full += area(pairs));
        self.partial_tiles(matrix, |pairs| partial += area(pairs));
        (full, partial)
    }

    /// The boxes of pairs that are kept without asking: runs and full tiles.
    fn full_boxes(&self, matrix: usize, mut each: impl FnMut(&quad_tree::Pairs)) {
        let grid = self.grid(matrix);
        for row in 0..self.block_rows() {
            for (first, end, map) in self.rows.segments(self.row(matrix, row)) {
                if map == TileMap::FULL {
                    each(&grid.pairs([row, row + 1], [first, end]));
                } else {
                    tiles(&grid, row, first, map, Class::Full, &mut each);
                }
            }
        }
    }

    /// The tiles whose pairs the mask_mod decides.
    fn partial_tiles(&self, matrix: usize, mut each: impl FnMut(&quad_tree::Pairs)) {
        let grid = self.grid(matrix);
        for row in 0..self.block_rows() {
            for &[column, map] in self.rows.partials_of(self.row(matrix, row)) {
                tiles(&grid, row, column, TileMap(map), Class::Partial, &mut each);
            }
        }
    }

    /// The mask_mod, ready to evaluate; none when no pair is left to it.
    fn compiled(&self) -> Result<Option<build::Compiled>> {
        match &self.mask_mod {
            _ if self.rows.partials.is_empty() => Ok(None),
            Some(mask_mod) => build::Compiled::new(mask_mod).map(Some),
            None => Err(self.no_mask_mod()),
        }
    }

    fn elements<'a>(&self, compiled: &'a build::Compiled, matrix: usize) -> Result<build::Matrix<'a>> {
        let (b, h) = (matrix / self.mask_heads(), matrix % self.mask_heads());
        compiled.matrix([b as u32, h as u32], self.q_len, self.kv_lens[b], self.q_offset[b])
    }

    /// Partial tiles, where there is no mask_mod to decide their pairs.
    pub(crate) fn undecided(&self) -> usize {
        match &self.mask_mod {
            Some(_) => 0,
            None => self.rows.partials.iter().map(|&[_, map]| TileMap(map).partial_tiles()).sum(),
        }
    }

    fn no_mask_mod(&self) -> Error {
        Error::shape(format!(
            "the block mask has {} partial blocks but no mask_mod to decide their pairs; add it with `with_mask_mod`",
            self.rows.partials.len()
        ))
    }

    /// A mask like this one with other rows and another mask_mod that says exactly the same.
    fn with_rows(&self, batch: u32, heads: u32, rows: Lists, mask_mod: MaskMod) -> Result<Self> {
        let matrices = batch as usize * heads as usize;
        let transposed =
            rows.transpose(matrices, self.block_rows(), self.block_columns(), u32::MAX as usize)?;
        Ok(Self {
            batch,
            heads,
            rows,
            transposed,
            q_offset: self.q_offset.clone(),
            kv_lens: self.kv_lens.clone(),
            mask_mod: Some(mask_mod),
            derived: true,
            ..*self
        })
    }
}

/// Calls `each` with the pairs of the tiles of one class.
fn tiles(
    grid: &Grid,
    row: u32,
    column: u32,
    map: TileMap,
    class: Class,
    each: &mut impl FnMut(&quad_tree::Pairs),
) {
    for (r, c) in (0..16u32).map(|tile| (tile / 4, tile % 4)) {
        if map.get(r as usize, c as usize) == class {
            each(&grid.tile_pairs(row, column, [r, r + 1], [c, c + 1]));
        }
    }
}

/// Appends headers, runs and partial entries; gives the word offset of the headers.
fn append(words: &mut Vec<u32>, base: u32, lists: &Lists) -> u32 {
    let at = base + words.len() as u32;
    let runs = at + 4 * lists.len() as u32;
    let partials = runs + 2 * lists.runs.len() as u32;
    for (run, partial) in lists.run_offsets.windows(2).zip(lists.partial_offsets.windows(2)) {
        let [run_begin, run_end] = [run[0], run[1]].map(|entry| runs + 2 * entry);
        let [partial_begin, partial_end] = [partial[0], partial[1]].map(|entry| partials + 2 * entry);
        words.extend([run_begin, run_end, partial_begin, partial_end]);
    }
    words.extend(lists.runs.iter().flatten());
    words.extend(lists.partials.iter().flatten());
    at
}
