//! The block lists of a call as words of the `tables` buffer, built once per mask, lengths and
//! captured content.

use super::{Constant, Forward, lock};
use crate::block_mask::{BlockMask, BlockShape};
use crate::error::{Error, Result};
use crate::expr::{Capture, Input};
use crate::kernels::NONE;
use crate::shape::{AttentionShape, BLOCK};
use std::ops::Range;
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Lists as they lie at the start of `tables`.
#[derive(Debug)]
pub(super) struct Lists {
    words: Arc<[u32]>,
    key: u128,
    pub(super) lists: u32,
    pub(super) lists_t: u32,
    pub(super) mask_batch: u32,
    pub(super) mask_heads: u32,
    /// Share of the pairs that kernels visit, roughly.
    density: f64,
    /// Partial tiles of a block mask that has no mask_mod, so that the call has to give one.
    undecided: usize,
    /// Blocks in the longest list of query rows, and in the longest transposed one.
    longest: [u32; 2],
}

/// Pairs of a call: of some batch entries and query heads, and of some blocks of what is gone through, keys
/// or, in transposed lists, query rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Part {
    pub(super) entries: Range<u32>,
    pub(super) heads: Range<u32>,
    pub(super) blocks: Range<u32>,
}

/// Word offsets of what follows the lists.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub(super) q_offset: u32,
    pub(super) kv_len: u32,
    pub(super) sinks: u32,
}

impl Lists {
    /// Pairs that the kernels visit, roughly.
    pub(super) fn pairs(&self, shape: &AttentionShape) -> f64 {
        self.density * shape.rows() as f64 * shape.kv_len as f64
    }

    /// Blocks that a workgroup goes through at most: of keys, or of query rows in the transposed lists.
    pub(super) fn longest(&self, transposed: bool) -> u32 {
        self.longest[usize::from(transposed)]
    }

    /// The tables of a call: the lists, then q_offset, kv_len and sinks.
    pub(super) fn with_tail(&self, call: &Forward<'_>, shape: &AttentionShape) -> (Constant, Places) {
        let mut tail: Vec<u32> = Vec::with_capacity(2 * shape.batch + shape.q_heads);
        tail.extend(call.q_offset.iter().map(|&offset| offset as u32));
        tail.extend_from_slice(call.kv_len);
        tail.extend(call.sinks.unwrap_or_default().iter().map(|sink| sink.to_bits()));
        let q_offset = self.words.len() as u32;
        let kv_len = q_offset + shape.batch as u32;
        let sinks = if call.sinks.is_some() { kv_len + shape.batch as u32 } else { NONE };
        let mut hash = Xxh3::new();
        hash.update(&self.key.to_le_bytes());
        hash.update(bytemuck::cast_slice(&tail));
        let constant =
            Constant { label: "tables", key: hash.digest128(), parts: vec![self.words.clone(), tail.into()] };
        (constant, Places { q_offset, kv_len, sinks })
    }

    /// The lists of the query rows, or the transposed ones, with only what lies in a part. The others are gone.
    pub(super) fn within(&self, part: &Part, transposed: bool, shape: &AttentionShape) -> Self {
        let (batch, q_heads) = (shape.batch as u32, shape.q_heads as u32);
        let (from, rows) = match transposed {
            true => (self.lists_t, shape.kv_blocks() as u32),
            false => (self.lists, shape.q_blocks() as u32),
        };
        let mask_batch = if part.entries == (0..batch) { self.mask_batch } else { batch };
        let mask_heads = if part.heads == (0..q_heads) { self.mask_heads } else { q_heads };
        let old = |at: u32| self.words[at as usize];
        let count = mask_batch * mask_heads * rows;
        let mut words = vec![0; 4 * count as usize];
        for list in 0..count {
            let (b, h, row) = (list / rows / mask_heads, list / rows % mask_heads, list % rows);
            if mask_batch == batch && !part.entries.contains(&b)
                || mask_heads == q_heads && !part.heads.contains(&h)
            {
                continue;
            }
            let from_list = (b % self.mask_batch * self.mask_heads + h % self.mask_heads) * rows + row;
            let header = from + 4 * from_list;
            let mut begin = words.len() as u32;
            for run in (old(header)..old(header + 1)).step_by(2) {
                let (first, end) = (old(run).max(part.blocks.start), old(run + 1).min(part.blocks.end));
                if first < end {
                    words.extend([first, end]);
                }
            }
            let places = [begin, words.len() as u32];
            words[4 * list as usize..][..2].copy_from_slice(&places);
            begin = words.len() as u32;
            for partial in (old(header + 2)..old(header + 3)).step_by(2) {
                if part.blocks.contains(&old(partial)) {
                    words.extend([old(partial), old(partial + 1)]);
                }
            }
            let places = [begin, words.len() as u32];
            words[4 * list as usize + 2..][..2].copy_from_slice(&places);
        }
        let mut hash = Xxh3::new();
        hash.update(&self.key.to_le_bytes());
        hash.update(&[u8::from(transposed)]);
        for range in [&part.entries, &part.heads, &part.blocks] {
            hash.update(bytemuck::cast_slice(&[range.start, range.end]));
        }
        Self {
            words: words.into(),
            key: hash.digest128(),
            lists: 0,
            lists_t: 0,
            mask_batch,
            mask_heads,
            density: self.density,
            undecided: self.undecided,
            longest: self.longest,
        }
    }

    /// The runs and the partial blocks of a block row.
    #[cfg(test)]
    pub(super) fn row(&self, row: u32) -> (Vec<[u32; 2]>, Vec<[u32; 2]>) {
        let at = (self.lists + 4 * row) as usize;
        let pairs = |first: u32, end: u32| {
            self.words[first as usize..end as usize].chunks(2).map(|pair| [pair[0], pair[1]]).collect()
        };
        let header = &self.words[at..at + 4];
        (pairs(header[0], header[1]), pairs(header[2], header[3]))
    }

    fn of(mask: &BlockMask, key: u128) -> Result<Self> {
        let tables = mask.tables(0)?;
        let (full, partial) = mask.rows().blocks();
        let all = mask.mask_batch() as f64
            * mask.mask_heads() as f64
            * f64::from(mask.block_rows())
            * f64::from(mask.block_columns());
        let matrices = (mask.mask_batch() * mask.mask_heads()) as u32;
        let longest = [(tables.lists, mask.block_rows()), (tables.lists_t, mask.block_columns())]
            .map(|(headers, rows)| longest(&tables.words, headers, matrices * rows));
        Ok(Self {
            longest,
            words: tables.words.into(),
            key,
            lists: tables.lists,
            lists_t: tables.lists_t,
            mask_batch: mask.mask_batch() as u32,
            mask_heads: mask.mask_heads() as u32,
            density: if all > 0.0 { (full as f64 + 0.6 * partial as f64) / all } else { 0.0 },
            undecided: mask.undecided(),
        })
    }

    /// One list for every block row, which says the same of all blocks: full, or left to the mask_mod.
    fn uniform(shape: &AttentionShape, full: bool) -> Self {
        let [q_blocks, kv_blocks] = [shape.q_blocks() as u32, shape.kv_blocks() as u32];
        let mut words = Vec::new();
        let [lists, lists_t] = [(q_blocks, kv_blocks), (kv_blocks, q_blocks)].map(|(rows, columns)| {
            let headers = words.len() as u32;
            let at = headers + 4 * rows;
            let (runs, partials) = match (columns, full) {
                (0, _) => (0, 0),
                (_, true) => (2, 0),
                (_, false) => (0, 2 * columns),
            };
            for _ in 0..rows {
                words.extend([at, at + runs, at + runs, at + runs + partials]);
            }
            if runs > 0 {
                words.extend([0, columns]);
            }
            if partials > 0 {
                words.extend((0..columns).flat_map(|block| [block, EVERY_TILE_PARTIAL]));
            }
            headers
        });
        let key = xxh3_128(format!("uniform {q_blocks} {kv_blocks} {full}").as_bytes());
        Self {
            words: words.into(),
            key,
            lists,
            lists_t,
            mask_batch: 1,
            mask_heads: 1,
            density: 1.0,
            undecided: 0,
            longest: [kv_blocks, q_blocks],
        }
    }
}

/// Blocks in the longest of these lists.
fn longest(words: &[u32], headers: u32, count: u32) -> u32 {
    let headers = words[headers as usize..].chunks_exact(4).take(count as usize);
    let blocks = headers.map(|header| {
        let runs = words[header[0] as usize..header[1] as usize].chunks_exact(2).map(|run| run[1] - run[0]);
        runs.sum::<u32>() + (header[3] - header[2]) / 2
    });
    blocks.max().unwrap_or(0)
}

/// The tile map of a block of which nothing is known.
const EVERY_TILE_PARTIAL: u32 = 0x5555_5555;

/// The lists of recent calls, by mask, lengths and captured content.
#[derive(Debug, Default)]
pub(super) struct Cache {
    built: Vec<(u128, Arc<Lists>, u64)>,
    given: Vec<(Arc<BlockMask>, Arc<Lists>, u64)>,
    tick: u64,
}

impl Cache {
    const MAX_ENTRIES: usize = 16;
    const MAX_WORDS: usize = 32 << 20;

    #[cfg(test)]
    pub(super) fn any(&self) -> Option<Arc<Lists>> {
        self.built.first().map(|(_, lists, _)| lists.clone())
    }

    pub(super) fn len(&self) -> usize {
        self.built.len() + self.given.len()
    }

    fn trim(&mut self) {
        while self.built.len() > Self::MAX_ENTRIES
            || self.built.len() > 1
                && self.built.iter().map(|(_, lists, _)| lists.words.len()).sum::<usize>() > Self::MAX_WORDS
        {
            let oldest = (0..self.built.len()).min_by_key(|&i| self.built[i].2);
            self.built.swap_remove(oldest.unwrap_or(0));
        }
        while self.given.len() > Self::MAX_ENTRIES {
            let oldest = (0..self.given.len()).min_by_key(|&i| self.given[i].2);
            self.given.swap_remove(oldest.unwrap_or(0));
        }
    }
}

/// The lists of a call.
pub(super) fn of(call: &Forward<'_>, cache: &super::Cache) -> Result<Arc<Lists>> {
    if let Some(given) = call.block_mask {
        fits_mask(call, given, &mut lock(&cache.captures))?;
        return from_given(call, given, &mut lock(&cache.lists));
    }
    let Some(mask) = call.mask else {
        return Ok(Arc::new(Lists::uniform(&call.shape, true)));
    };
    if mask.captures().iter().any(|capture| super::resident(capture).is_some()) {
        return Ok(Arc::new(Lists::uniform(&call.shape, false)));
    }
    let shape = &call.shape;
    if shape.batch == 0 {
        return Ok(Arc::new(Lists::uniform(shape, true)));
    }
    let mut hash = Xxh3::new();
    hash.update(&mask.hash().to_le_bytes());
    {
        let mut captures = lock(&cache.captures);
        for capture in mask.captures() {
            hash.update(&captures.content(capture).to_le_bytes());
        }
    }
    for scalar in mask.scalars() {
        hash.update(scalar.name().as_bytes());
        hash.update(&scalar.value().bits().to_le_bytes());
    }
    for size in [shape.batch, shape.q_heads, shape.q_len, shape.kv_len] {
        hash.update(&(size as u64).to_le_bytes());
    }
    hash.update(bytemuck::cast_slice(call.q_offset));
    hash.update(bytemuck::cast_slice(call.kv_len));
    let key = hash.digest128();

    let mut lists = lock(&cache.lists);
    lists.tick += 1;
    let tick = lists.tick;
    if let Some((_, found, used)) = lists.built.iter_mut().find(|(known, ..)| *known == key) {
        *used = tick;
        return Ok(found.clone());
    }
    let built = BlockMask::build(
        mask,
        BlockShape {
            batch: shape.batch,
            heads: shape.q_heads,
            q_len: shape.q_len,
            kv_len: shape.kv_len,
            q_offset: call.q_offset,
            kv_lens: call.kv_len,
        },
    )?;
    let made = Arc::new(Lists::of(&built, key)?);
    lists.built.push((key, made.clone(), tick));
    lists.trim();
    Ok(made)
}

fn from_given(call: &Forward<'_>, mask: &Arc<BlockMask>, cache: &mut Cache) -> Result<Arc<Lists>> {
    let lists = known(call, mask, cache)?;
    if call.mask.is_none() && lists.undecided > 0 {
        return Err(Error::shape(format!(
            "the block mask has {} partial tiles but neither it nor the attention has a mask_mod to decide their pairs; give the one that it was built from",
            lists.undecided
        )));
    }
    Ok(lists)
}

/// Refuses a mask_mod that is not the one that the lists were built from, where the block mask has kept that: its full
/// tiles would be of one mask and its partial ones of another.
fn fits_mask(call: &Forward<'_>, given: &BlockMask, hashes: &mut super::captures::Cache) -> Result<()> {
    let (Some(built), Some(called)) = (given.mask_mod(), call.mask) else { return Ok(()) };
    if std::ptr::eq(built, called) {
        return Ok(());
    }
    let mut same = |[a, b]: [&Capture; 2]| {
        let in_host_memory = [a, b].iter().all(|it| it.data().host_bytes().is_some());
        !in_host_memory || hashes.content(a) == hashes.content(b)
    };
    let mut captures = built.captures().iter().zip(called.captures());
    let mut scalars = built.scalars().iter().zip(called.scalars());
    let other = if built.hash() != called.hash() {
        Some("mask_mod")
    } else if let Some((_, capture)) = captures.find(|&(a, b)| !same([a, b])) {
        Some(capture.name())
    } else {
        scalars.find(|(a, b)| a.value().bits() != b.value().bits()).map(|(_, scalar)| scalar.name())
    };
    match other {
        None => Ok(()),
        Some(name) => Err(Error::capture(
            name,
            "the block mask was built from another one; build it again, or leave it out",
        )),
    }
}

/// Refuses a mask that was built for other positions, lengths, batch entries or heads than the call's.
fn fits_positions(call: &Forward<'_>, mask: &BlockMask) -> Result<()> {
    let reads = |input| mask.mask_mod().is_some_and(|mask| mask.expr().inputs().contains(input));
    let same = |name: &str, has: i64, wanted: i64, good: bool| match good {
        true => Ok(()),
        false => Err(Error::shape(format!(
            "the block mask was built for {name} {has} but the call has {wanted}; build one for that"
        ))),
    };
    let own = mask.is_derived();
    for (name, input, has, wanted) in [
        ("batch", Input::Batch, mask.mask_batch(), call.shape.batch),
        ("heads", Input::Head, mask.mask_heads(), call.shape.q_heads),
    ] {
        same(name, has as i64, wanted as i64, has >= wanted || !own || !reads(input))?;
    }
    for (b, (&q_offset, &kv_len)) in call.q_offset.iter().zip(call.kv_len).enumerate() {
        let entry = b % mask.mask_batch();
        let (offset, len) = (mask.q_offset()[entry], mask.kv_lens()[entry]);
        same("q_offset", offset.into(), q_offset.into(), offset == q_offset || own && !reads(Input::Q))?;
        same("kv_len", len.into(), kv_len.into(), len == kv_len || len > kv_len && !reads(Input::KvLen))?;
    }
    Ok(())
}

fn known(call: &Forward<'_>, mask: &Arc<BlockMask>, cache: &mut Cache) -> Result<Arc<Lists>> {
    let shape = &call.shape;
    if mask.block() != [BLOCK; 2] {
        return Err(Error::unsupported(format!(
            "the block mask has blocks of {:?} but kernels skip blocks of [128, 128]; build it with BlockMask::build",
            mask.block()
        )));
    }
    let lengths = [mask.q_len(), mask.kv_len()];
    if lengths != [shape.q_len, shape.kv_len] {
        return Err(Error::shape(format!(
            "the block mask is for q_len and kv_len {lengths:?} but the call has [{}, {}]; build or slice one for these",
            shape.q_len, shape.kv_len
        )));
    }
    for (name, has, call) in
        [("batch", mask.mask_batch(), shape.batch), ("heads", mask.mask_heads(), shape.q_heads)]
    {
        if has != 1 && has != call {
            return Err(Error::shape(format!(
                "the block mask has {name} {has} but the call has {call}; it must be that or 1"
            )));
        }
    }
    fits_positions(call, mask)?;
    cache.tick += 1;
    let tick = cache.tick;
    if let Some((_, found, used)) = cache.given.iter_mut().find(|(known, ..)| Arc::ptr_eq(known, mask)) {
        *used = tick;
        return Ok(found.clone());
    }
    let words = mask.tables(0)?.words;
    let made = Arc::new(Lists::of(mask, xxh3_128(bytemuck::cast_slice(&words)))?);
    cache.given.push((mask.clone(), made.clone(), tick));
    cache.trim();
    Ok(made)
}
