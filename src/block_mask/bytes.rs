//! A block mask as bytes.
//!
//! Little endian: `FXBM`, version (u32), the u32 fields `batch heads q_len kv_len block_q block_kv`, then q_offset
//! (i32) and kv_len (u32) per batch, then both lists (u32 counts of runs and partial entries, run
//! offsets, runs, partial offsets, partial entries), then the 64-bit XXH3 of everything before it.

use super::{BlockMask, Lists, MAX_BLOCK};
use crate::error::{Error, Result};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 4] = b"FXBM";
const VERSION: u32 = 1;

impl BlockMask {
    /// The mask as bytes, for [`BlockMask::from_bytes`]. The mask_mod is not part of them.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 300, 300))?;
    /// let again = BlockMask::from_bytes(&mask.to_bytes())?;
    /// assert_eq!(again, mask);
    /// assert!(again.mask_mod().is_none());
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let mut word = |value: u32| out.extend_from_slice(&value.to_le_bytes());
        word(VERSION);
        for value in [self.batch, self.heads, self.q_len, self.kv_len, self.block[0], self.block[1]] {
            word(value);
        }
        self.q_offset.iter().for_each(|&value| word(value.cast_unsigned()));
        self.kv_lens.iter().for_each(|&value| word(value));
        for lists in [&self.rows, &self.transposed] {
            word(lists.runs.len() as u32);
            word(lists.partials.len() as u32);
            lists.run_offsets.iter().for_each(|&value| word(value));
            lists.runs.iter().flatten().for_each(|&value| word(value));
            lists.partial_offsets.iter().for_each(|&value| word(value));
            lists.partials.iter().flatten().for_each(|&value| word(value));
        }
        let hash = xxh3_64(&out);
        out.extend_from_slice(&hash.to_le_bytes());
        out
    }

    /// The mask that [`BlockMask::to_bytes`] wrote, without its mask_mod: give it back with
    /// [`BlockMask::with_mask_mod`] if there are partial blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] for anything but an undamaged mask of this version. Never panics and never
    /// allocates more than a small multiple of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let Some((body, hash)) = bytes.split_last_chunk::<8>() else {
            return Err(Error::format(format!(
                "a block mask of {} bytes is cut short; write it again",
                bytes.len()
            )));
        };
        let mut words = Words(body);
        if words.take::<4>()? != *MAGIC {
            return Err(Error::format(
                "these bytes are no block mask: they must start with `FXBM`; write them with BlockMask::to_bytes",
            ));
        }
        let version = words.word()?;
        if version != VERSION {
            return Err(Error::format(format!(
                "the block mask has version {version} but must have version {VERSION}; write it again with this release"
            )));
        }
        if xxh3_64(body) != u64::from_le_bytes(*hash) {
            return Err(Error::format(
                "the bytes of the block mask are damaged: their hash differs from the stored one; write it again",
            ));
        }
        let [batch, heads, q_len, kv_len, block_q, block_kv] = words.array()?;
        let block = [block_q, block_kv];
        let limit = i32::MAX as u32;
        // Matrices take bytes where there are rows or columns; others could be forged by the billion.
        let most = if q_len.max(kv_len) == 0 { 1 << 16 } else { limit };
        if batch == 0 || heads == 0 || batch.saturating_mul(heads) > most || q_len > limit || kv_len > limit {
            return Err(Error::format(format!(
                "a block mask of batch {batch}, heads {heads}, q_len {q_len}, kv_len {kv_len} must have 1 to {most} matrices and lengths below 2^31; write it again"
            )));
        }
        if block.iter().any(|side| !(1..=MAX_BLOCK).contains(side)) {
            return Err(Error::format(format!(
                "the blocks of a block mask are {block_q}x{block_kv} but each side must be 1 to {MAX_BLOCK}; write it again"
            )));
        }
        let q_offset = words.words(batch as usize)?.into_iter().map(u32::cast_signed).collect();
        let kv_lens = words.words(batch as usize)?;
        if kv_lens.iter().any(|&len| len > kv_len) {
            return Err(Error::format(format!(
                "a kv_len of one batch entry exceeds the kv_len = {kv_len} of the block mask; write it again"
            )));
        }
        let matrices = (batch as usize).checked_mul(heads as usize);
        let [row_count, column_count] = [q_len.div_ceil(block_q), kv_len.div_ceil(block_kv)];
        let mut lists = |rows: u32, columns: u32| {
            let rows = matrices.and_then(|n| n.checked_mul(rows as usize)).unwrap_or(usize::MAX);
            let [runs, partials] = words.array()?;
            let lists = Lists {
                run_offsets: words.words(rows.saturating_add(1))?,
                runs: words.pairs(runs as usize)?,
                partial_offsets: words.words(rows.saturating_add(1))?,
                partials: words.pairs(partials as usize)?,
            };
            lists.check(rows, columns)?;
            Ok::<_, Error>(lists)
        };
        let rows = lists(row_count, column_count)?;
        let transposed = lists(column_count, row_count)?;
        if !words.0.is_empty() {
            return Err(Error::format(format!(
                "{} bytes follow the block mask; cut them off",
                words.0.len()
            )));
        }
        let mask = Self {
            batch,
            heads,
            q_len,
            kv_len,
            block,
            q_offset,
            kv_lens,
            rows,
            transposed,
            mask_mod: None,
            derived: false,
        };
        mask.check_maps()?;
        let expected =
            mask.rows.transpose(mask.matrices(), row_count, column_count, mask.transposed.runs.len())?;
        if expected != mask.transposed {
            return Err(Error::format("the two lists of the block mask disagree; write it again"));
        }
        Ok(mask)
    }

    /// Checks that no map marks a tile, and no run a block, that holds no pair.
    fn check_maps(&self) -> Result<()> {
        for matrix in 0..self.matrices() {
            let grid = self.grid(matrix);
            let columns = grid.blocks()[1];
            for row in 0..self.block_rows() {
                for (first, end, map) in self.rows.segments(self.row(matrix, row)) {
                    let fits = end <= columns
                        && (map == super::TileMap::FULL
                            || map.within(grid.filled(row, first, super::Class::Full)) == map);
                    if !fits {
                        return Err(Error::format(format!(
                            "block row {row} of the block mask keeps pairs beyond q_len or kv_len; write it again"
                        )));
                    }
                }
            }
        }
        Ok(())
    }
}

/// The bytes not read yet.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or_else(cut)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn word(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u32; N]> {
        let mut out = [0; N];
        for value in &mut out {
            *value = self.word()?;
        }
        Ok(out)
    }

    fn words(&mut self, count: usize) -> Result<Vec<u32>> {
        let bytes = count.checked_mul(4).ok_or_else(cut)?;
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or_else(cut)?;
        self.0 = rest;
        Ok(taken.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn pairs(&mut self, count: usize) -> Result<Vec<[u32; 2]>> {
        let words = self.words(count.checked_mul(2).ok_or_else(cut)?)?;
        Ok(words.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect())
    }
}

fn cut() -> Error {
    Error::format("a block mask is cut short; write it again")
}
