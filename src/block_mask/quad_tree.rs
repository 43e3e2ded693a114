//! Finds the classes of all blocks and tiles of one matrix by asking about as few boxes as possible.

use super::lists::{Cells, Rect};
use super::terms::Open;
use super::tile_map::{Class, TileMap};
use std::collections::HashMap;

/// A box of pairs: rows `[q0, q1)` and columns `[kv0, kv1)`, counted in rows and columns of the
/// matrix (q_offset not added).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pairs {
    pub(crate) q: [u32; 2],
    pub(crate) kv: [u32; 2],
}

impl Pairs {
    fn rows(&self) -> u32 {
        self.q[1].saturating_sub(self.q[0])
    }

    fn columns(&self) -> u32 {
        self.kv[1].saturating_sub(self.kv[0])
    }

    fn is_empty(&self) -> bool {
        self.rows() == 0 || self.columns() == 0
    }
}

/// What the quad-tree asks about the boxes of a mask. `open` is the set of terms that a box around this one
/// left open.
pub(crate) trait Boxes {
    /// The set of all terms.
    fn all(&self) -> Open;
    /// The class of a box as far as range analysis knows it, `Partial` when it does not, and the terms
    /// that are still open in it.
    fn range(&mut self, pairs: &Pairs, open: Open) -> (Class, Open);
}

/// What it asks about the pairs of a mask, where they can be looked at.
pub(crate) trait Elements: Boxes {
    /// What the pairs of a box follow from, if it is less than the whole box: boxes of one size and pattern
    /// keep the same pairs. The box must be the one whose range was asked last.
    fn pattern(&mut self, pairs: &Pairs, open: Open) -> Option<Pattern>;
    /// Whether one pair is kept.
    fn keeps(&mut self, q: u32, kv: u32, open: Open) -> bool;
    /// Whether `(some, every)` pair of a stretch of one row is kept. May stop early once some pair is
    /// kept and some is not.
    fn row(&mut self, q: u32, kv: [u32; 2]) -> (bool, bool);
}

/// What the pairs of a box follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pattern {
    /// The open terms and q - kv.
    Diagonal(Open, i64),
    /// The open terms, q, and values that are constant in the box, as their hash.
    Rows(Open, u32, u64),
    /// The open terms, kv, and values that are constant in the box, as their hash.
    Columns(Open, u32, u64),
}

/// The geometry of one matrix of blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) q_len: u32,
    /// Columns that exist for this batch entry: blocks beyond are empty.
    pub(crate) kv_len: u32,
    pub(crate) block: [u32; 2],
}

impl Grid {
    /// Block rows and block columns that hold a pair.
    pub(crate) fn blocks(&self) -> [u32; 2] {
        [self.q_len.div_ceil(self.block[0]), self.kv_len.div_ceil(self.block[1])]
    }

    /// Rows and columns of a tile.
    pub(crate) fn tile(&self) -> [u32; 2] {
        self.block.map(|side| side.div_ceil(TileMap::SIDE as u32))
    }

    /// The pairs of the blocks `rows` x `columns` that exist.
    pub(crate) fn pairs(&self, rows: [u32; 2], columns: [u32; 2]) -> Pairs {
        let q = rows.map(|row| row.saturating_mul(self.block[0]).min(self.q_len));
        let kv = columns.map(|column| column.saturating_mul(self.block[1]).min(self.kv_len));
        Pairs { q, kv }
    }

    /// The pairs of the tiles `rows` x `columns` of one block that exist.
    pub(crate) fn tile_pairs(&self, row: u32, column: u32, rows: [u32; 2], columns: [u32; 2]) -> Pairs {
        let block = self.pairs([row, row + 1], [column, column + 1]);
        let tile = self.tile();
        Pairs {
            q: rows.map(|r| (block.q[0] + r * tile[0]).min(block.q[1])),
            kv: columns.map(|c| (block.kv[0] + c * tile[1]).min(block.kv[1])),
        }
    }

    /// The map of a block all of whose tiles have this class, where they exist.
    pub(crate) fn filled(&self, row: u32, column: u32, class: Class) -> TileMap {
        let block = self.pairs([row, row + 1], [column, column + 1]);
        let tile = self.tile();
        let rows = block.rows().div_ceil(tile[0]);
        let columns = block.columns().div_ceil(tile[1]);
        TileMap::filled(rows as usize, columns as usize, class)
    }
}

/// Classifies the blocks of one matrix.
pub(crate) fn classify(grid: &Grid, mask: &mut impl Elements) -> Cells {
    let mut cells = Cells::default();
    // The maps of whole blocks by what they follow from.
    let mut patterns = HashMap::new();
    descend(grid, mask, |mask, found| match found {
        Found::Full(rect) => cells.full.push(rect),
        Found::Open { row, column, pairs, open } => {
            let map = block(grid, mask, &mut patterns, [row, column], &pairs, open);
            if map == grid.filled(row, column, Class::Full) {
                cells.full.push(Rect { rows: [row, row + 1], columns: [column, column + 1] });
            } else if map != TileMap::EMPTY {
                cells.partial.push((row, column, map));
            }
        }
    });
    cells
}

/// What a descent meets.
pub(crate) enum Found {
    /// Blocks all of whose pairs are kept.
    Full(Rect),
    /// A block that ranges do not decide, its pairs and its open terms.
    Open { row: u32, column: u32, pairs: Pairs, open: Open },
}

/// Descends into the boxes of one matrix that ranges do not decide, down to blocks. The columns of each row,
/// and the rows of each column, are met ascending, those of full blocks and those of open ones.
///
/// The tree starts at the smallest power of two of blocks that covers the matrix, so that boxes line
/// up with the chunks over which captured tensors are summarised.
pub(crate) fn descend<M: Boxes>(grid: &Grid, mask: &mut M, each: impl FnMut(&mut M, Found)) {
    let open = mask.all();
    let mut tree = Tree { grid, mask, each };
    let [rows, columns] = grid.blocks();
    if rows > 0 && columns > 0 {
        tree.blocks(0, 0, rows.max(columns).next_power_of_two(), open);
    }
}

struct Tree<'a, M, E> {
    grid: &'a Grid,
    mask: &'a mut M,
    each: E,
}

impl<M: Boxes, E: FnMut(&mut M, Found)> Tree<'_, M, E> {
    /// Blocks `[row, row + size) x [column, column + size)`, as far as they exist.
    fn blocks(&mut self, row: u32, column: u32, size: u32, open: Open) {
        let [rows, columns] = self.grid.blocks();
        if row >= rows || column >= columns {
            return;
        }
        let rect = Rect {
            rows: [row, rows.min(row.saturating_add(size))],
            columns: [column, columns.min(column.saturating_add(size))],
        };
        let pairs = self.grid.pairs(rect.rows, rect.columns);
        match self.mask.range(&pairs, open) {
            (Class::Empty, _) => {}
            (Class::Full, _) => (self.each)(self.mask, Found::Full(rect)),
            (Class::Partial, open) if size == 1 => {
                (self.each)(self.mask, Found::Open { row, column, pairs, open });
            }
            (Class::Partial, open) => {
                // This order visits the columns of each row, and the rows of each column, ascending.
                let half = size / 2;
                self.blocks(row, column, half, open);
                self.blocks(row, column + half, half, open);
                self.blocks(row + half, column, half, open);
                self.blocks(row + half, column + half, half, open);
            }
        }
    }
}

/// The map of a block that ranges do not decide.
fn block(
    grid: &Grid,
    mask: &mut impl Elements,
    patterns: &mut HashMap<Pattern, TileMap>,
    [row, column]: [u32; 2],
    pairs: &Pairs,
    open: Open,
) -> TileMap {
    let whole = [pairs.rows(), pairs.columns()] == grid.block;
    let pattern = if whole { mask.pattern(pairs, open) } else { None };
    let map = match pattern.and_then(|pattern| patterns.get(&pattern)) {
        Some(&map) => map,
        None => tiles(grid, mask, row, column, open),
    };
    if let Some(pattern) = pattern {
        patterns.insert(pattern, map);
    }
    map
}

fn tiles(grid: &Grid, mask: &mut impl Elements, row: u32, column: u32, open: Open) -> TileMap {
    let mut map = TileMap::EMPTY;
    for r in [0, 2] {
        for c in [0, 2] {
            let pairs = grid.tile_pairs(row, column, [r, r + 2], [c, c + 2]);
            if pairs.is_empty() {
                continue;
            }
            let (class, open) = mask.range(&pairs, open);
            if class == Class::Empty {
                continue;
            }
            for (r, c) in [(r, c), (r, c + 1), (r + 1, c), (r + 1, c + 1)] {
                let pairs = grid.tile_pairs(row, column, [r, r + 1], [c, c + 1]);
                if pairs.is_empty() {
                    continue;
                }
                let class = match class {
                    Class::Partial => settle_open(mask, &pairs, open),
                    known => known,
                };
                map = map.with(r as usize, c as usize, class);
            }
        }
    }
    map
}

/// The exact class of a box: ranges, then corners, then elements.
pub(crate) fn settle(mask: &mut impl Elements, pairs: &Pairs) -> Class {
    let open = mask.all();
    settle_open(mask, pairs, open)
}

fn settle_open(mask: &mut impl Elements, pairs: &Pairs, open: Open) -> Class {
    let open = match mask.range(pairs, open) {
        (Class::Partial, open) => open,
        (known, _) => return known,
    };
    let mut seen = Seen::default();
    let (q, kv) = (pairs.q, pairs.kv);
    for (q, kv) in [(q[0], kv[0]), (q[1] - 1, kv[1] - 1), (q[0], kv[1] - 1), (q[1] - 1, kv[0])] {
        if seen.both() {
            break;
        }
        seen.add(mask.keeps(q, kv, open));
    }
    if !seen.both() {
        scan(mask, pairs, open, &mut seen);
    }
    match seen {
        Seen { kept: true, dropped: true } => Class::Partial,
        Seen { kept: true, .. } => Class::Full,
        _ => Class::Empty,
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    kept: bool,
    dropped: bool,
}

impl Seen {
    fn add(&mut self, keep: bool) {
        self.kept |= keep;
        self.dropped |= !keep;
    }

    fn both(&self) -> bool {
        self.kept && self.dropped
    }
}

/// Boxes of at most this many pairs are scanned when halving does not help.
const SCAN: u64 = 1024;

/// Looks at a box that ranges do not decide until a kept and a dropped pair have been seen.
///
/// Halves along the longer side, as long as a half is decided by its range or is too big to scan:
/// a boundary that only a few rows or columns touch is found in a logarithm of steps.
fn scan(mask: &mut impl Elements, pairs: &Pairs, open: Open, seen: &mut Seen) {
    let (rows, columns) = (pairs.rows(), pairs.columns());
    let big = u64::from(rows) * u64::from(columns) > SCAN;
    if rows == 1 && !big {
        return scan_rows(mask, pairs, seen);
    }
    let halves = if rows >= columns || (rows > 1 && !big) {
        let middle = pairs.q[0] + rows / 2;
        [Pairs { q: [pairs.q[0], middle], ..*pairs }, Pairs { q: [middle, pairs.q[1]], ..*pairs }]
    } else {
        let middle = pairs.kv[0] + columns / 2;
        [Pairs { kv: [pairs.kv[0], middle], ..*pairs }, Pairs { kv: [middle, pairs.kv[1]], ..*pairs }]
    };
    let found = halves.map(|half| mask.range(&half, open));
    for (class, _) in found {
        match class {
            Class::Empty => seen.dropped = true,
            Class::Full => seen.kept = true,
            Class::Partial => {}
        }
    }
    if seen.both() {
        return;
    }
    if found.map(|(class, _)| class) == [Class::Partial; 2] && !big {
        return scan_rows(mask, pairs, seen);
    }
    for ((class, open), half) in found.into_iter().zip(&halves) {
        if class == Class::Partial && !seen.both() {
            scan(mask, half, open, seen);
        }
    }
}

fn scan_rows(mask: &mut impl Elements, pairs: &Pairs, seen: &mut Seen) {
    for q in pairs.q[0]..pairs.q[1] {
        let (some, every) = mask.row(q, pairs.kv);
        seen.kept |= some;
        seen.dropped |= !every;
        if seen.both() {
            return;
        }
    }
}
