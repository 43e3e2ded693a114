//! Intersection, union, complement and slices.

use super::build::Compiled;
use super::lists::Segments;
use super::meaning::fix_lengths;
use super::quad_tree::settle;
use super::{BlockMask, BlockShape, Class, Lists, TileMap};
use crate::error::{Error, Result};
use crate::expr::MaskMod;

/// How two masks combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Both {
    And,
    Or,
}

impl BlockMask {
    /// The pairs that both masks keep.
    ///
    /// The masks must have the same lengths, offsets and block size; one matrix combines with many
    /// (batch or heads of 1). Tiles that are partial in both are looked at pair by pair, so the result
    /// is as exact as if it had been built from `a & b`.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when the masks do not fit, [`Error::Capture`] when both hold partial blocks and
    /// one has no mask_mod or one that reads a capture that lives only on a GPU.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let shape = BlockShape::new(1, 1, 1000, 1000);
    /// let causal = BlockMask::build(&masks::causal(), shape)?;
    /// let window = BlockMask::build(&masks::local_window(200, 200), shape)?;
    /// let both = BlockMask::build(&(masks::causal() & masks::local_window(200, 200)), shape)?;
    /// assert_eq!(causal.and(&window)?, both);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn and(&self, other: &Self) -> Result<Self> {
        self.combine(other, Both::And)
    }

    /// The pairs that at least one of the masks keeps. See [`BlockMask::and`].
    ///
    /// # Errors
    ///
    /// As [`BlockMask::and`].
    pub fn or(&self, other: &Self) -> Result<Self> {
        self.combine(other, Both::Or)
    }

    /// The pairs that the mask drops.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when there are partial blocks and no mask_mod.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let shape = BlockShape::new(1, 1, 500, 700);
    /// let mask = BlockMask::build(&masks::causal(), shape)?;
    /// assert_eq!(mask.not()?, BlockMask::build(&!masks::causal(), shape)?);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn not(&self) -> Result<Self> {
        let mask_mod = !self.meaning()?;
        let mut rows = Lists::default();
        for matrix in 0..self.matrices() {
            let grid = self.grid(matrix);
            let columns = grid.blocks()[1];
            for row in 0..self.block_rows() {
                let mut next = 0;
                for (first, end, map) in self.rows.segments(self.row(matrix, row)) {
                    rows.push_run(next, first);
                    next = end;
                    if map != TileMap::FULL {
                        let map = map.not(grid.filled(row, first, Class::Full));
                        rows.push_block(&grid, row, first, map);
                    }
                }
                rows.push_run(next, columns.max(next));
                rows.end_row()?;
            }
        }
        self.with_rows(self.batch, self.heads, rows, mask_mod)
    }

    fn combine(&self, other: &Self, both: Both) -> Result<Self> {
        let fits = |a: u32, b: u32| a == b || a == 1 || b == 1;
        if (self.q_len, self.kv_len) != (other.q_len, other.kv_len)
            || self.block != other.block
            || !fits(self.batch, other.batch)
            || !fits(self.heads, other.heads)
        {
            return Err(Error::shape(format!(
                "one mask is [{}, {}, {}, {}] in blocks of {}x{} and the other [{}, {}, {}, {}] in blocks of {}x{}, but lengths and blocks must be equal and batch and heads equal or 1; build both for the same shape",
                self.batch,
                self.heads,
                self.q_len,
                self.kv_len,
                self.block[0],
                self.block[1],
                other.batch,
                other.heads,
                other.q_len,
                other.kv_len,
                other.block[0],
                other.block[1],
            )));
        }
        let (batch, heads) = (self.batch.max(other.batch), self.heads.max(other.heads));
        for b in 0..batch as usize {
            let [mine, theirs] = [self, other].map(|mask| {
                let b = b % mask.batch as usize;
                (mask.q_offset[b], mask.kv_lens[b])
            });
            if mine != theirs {
                return Err(Error::shape(format!(
                    "(q_offset, kv_len) of batch entry {b} is {mine:?} in one mask and {theirs:?} in the other but must be equal; build both for the same shape"
                )));
            }
        }
        let (mine, theirs) = (self.meaning()?, other.meaning()?);
        let mask_mod = match both {
            Both::And => mine & theirs,
            Both::Or => mine | theirs,
        };
        mask_mod.check()?;
        // The larger of the two in each direction carries the offsets of the result.
        let like = if self.batch >= other.batch { self } else { other };
        let mut compiled = None;
        let mut rows = Lists::default();
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let [a, o] = [self, other].map(|mask| mask.matrix(b as usize, h as usize));
            let grid = like.grid(like.matrix(b as usize, 0));
            for row in 0..self.block_rows() {
                let sources = [self.rows.segments(self.row(a, row)), other.rows.segments(other.row(o, row))];
                let mut failed = Ok(());
                merge(sources, |first, end, [a, o]| {
                    let (mut map, open) = match both {
                        Both::And => a.and(o),
                        Both::Or => a.or(o),
                    };
                    if open != 0 && failed.is_ok() {
                        failed = resolve(&mut compiled, &mask_mod, like, (b, h), |elements| {
                            for tile in (0..16).filter(|tile| open >> (2 * tile) & 1 == 1) {
                                let [r, c] = [tile / 4, tile % 4];
                                let pairs = grid.tile_pairs(row, first, [r, r + 1], [c, c + 1]);
                                map = map.with(r as usize, c as usize, settle(elements, &pairs));
                            }
                        });
                    }
                    if map == TileMap::FULL {
                        rows.push_run(first, end);
                    } else {
                        rows.push_block(&grid, row, first, map);
                    }
                });
                failed?;
                rows.end_row()?;
            }
        }
        like.with_rows(batch, heads, rows, mask_mod)
    }

    /// Queries `[start, start + q_len)` and the first `kv_len` keys of this mask.
    ///
    /// Unlike a slice in blocks, `start` and the lengths are tokens: `slice(p, 1, p + 1)` is the mask
    /// of decoding position `p`. The result keeps what the original keeps: its q_offset grows by
    /// `start`, and `q_len` and `kv_len` in the mask_mod stay those of the original.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for a range outside the mask, or when there are partial blocks and no mask_mod.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 1000, 1000))?;
    /// let step = mask.slice(700, 1, 1000)?;
    /// assert_eq!(step.q_offset(), [700]);
    /// assert_eq!(step.kept()?, 701);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn slice(&self, start: usize, q_len: usize, kv_len: usize) -> Result<Self> {
        if start.saturating_add(q_len) > self.q_len() || kv_len > self.kv_len() {
            return Err(Error::shape(format!(
                "the slice of rows {start}..{} and {kv_len} columns must lie in the mask of {} x {}; shorten it",
                start.saturating_add(q_len),
                self.q_len,
                self.kv_len
            )));
        }
        let mask_mod = fix_lengths(&self.meaning()?, self.q_len, &self.kv_lens)?;
        let q_offset: Vec<i32> =
            self.q_offset.iter().map(|&offset| offset.saturating_add(start as i32)).collect();
        let kv_lens: Vec<u32> = self.kv_lens.iter().map(|&len| len.min(kv_len as u32)).collect();
        let shape = BlockShape {
            batch: self.mask_batch(),
            heads: self.mask_heads(),
            q_len,
            kv_len,
            q_offset: &q_offset,
            kv_lens: &kv_lens,
        };
        Compiled::new(&mask_mod)?.build(&shape, [self.block[0] as usize, self.block[1] as usize])
    }
}

/// Runs `with` on the elements of one matrix of `mask_mod`, compiling it on first use.
fn resolve(
    compiled: &mut Option<Compiled>,
    mask_mod: &MaskMod,
    like: &BlockMask,
    (b, h): (u32, u32),
    with: impl FnOnce(&mut super::build::Matrix<'_>),
) -> Result<()> {
    let compiled = match compiled {
        Some(compiled) => compiled,
        None => compiled.insert(Compiled::new(mask_mod)?),
    };
    let entry = b as usize % like.mask_batch();
    with(&mut compiled.matrix([b, h], like.q_len, like.kv_lens[entry], like.q_offset[entry])?);
    Ok(())
}

/// Walks two rows together: calls `at(first, end, maps)` for each stretch in which at least one of
/// them is not empty.
fn merge(mut rows: [Segments<'_>; 2], mut at: impl FnMut(u32, u32, [TileMap; 2])) {
    let mut heads = [rows[0].next(), rows[1].next()];
    let mut from = 0;
    loop {
        // Where each row next changes, seen from `from`.
        let bounds = heads.map(|head| match head {
            Some((first, end, _)) => {
                if from < first {
                    first
                } else {
                    end
                }
            }
            None => u32::MAX,
        });
        let to = bounds[0].min(bounds[1]);
        if to == u32::MAX {
            return;
        }
        let maps = heads.map(|head| match head {
            Some((first, _, map)) if first <= from => map,
            _ => TileMap::EMPTY,
        });
        if from < to && maps != [TileMap::EMPTY; 2] {
            at(from, to, maps);
        }
        from = to;
        for (head, row) in heads.iter_mut().zip(&mut rows) {
            if head.is_some_and(|(_, end, _)| end == to) {
                *head = row.next();
            }
        }
    }
}
