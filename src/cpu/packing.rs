//! Which parts of a block are looked at, and packing them.

use fearless_simd::Simd;

use super::launch::{Item, Launch};
use super::lists::{Block, SIDE, TILE, Tile};
use super::matrix::{Panels, ROWS};
use super::view::View;
use crate::shape::BLOCK;

/// Rows of an item that lie in one row of tiles of a block.
#[derive(Clone, Debug)]
pub(super) struct Strip {
    pub(super) rows: std::ops::Range<usize>,
    /// Those past the keys that count are empty.
    pub(super) tiles: [Tile; SIDE],
}

impl Strip {
    /// Its rows, rounded up to whole register tiles.
    pub(super) fn height(&self) -> usize {
        self.rows.len().next_multiple_of(ROWS)
    }
}

/// The strips of an item; those without a tile are left out.
pub(super) fn strips(item: &Item, block: Block, keys: usize) -> impl Iterator<Item = Strip> {
    let rows = item.rows.clone();
    let mut next = rows.start;
    std::iter::from_fn(move || {
        while next < rows.end {
            let start = next;
            next = (start / TILE * TILE + TILE).min(rows.end);
            let mut tiles = block.row(start % BLOCK / TILE);
            tiles[keys.div_ceil(TILE)..].fill(Tile::Empty);
            if tiles != [Tile::Empty; SIDE] {
                return Some(Strip { rows: start..next, tiles });
            }
        }
        None
    })
}

/// The keys of one block that some strip looks at.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyBlock {
    b: usize,
    kv_head: usize,
    first: usize,
    keys: usize,
    looked_at: [bool; SIDE],
}

impl KeyBlock {
    /// Of the keys of block `index`, `keys` count.
    pub(super) fn new(
        launch: &Launch<'_>,
        item: &Item,
        index: usize,
        keys: usize,
        strips: impl Iterator<Item = Strip>,
    ) -> Self {
        let mut looked_at = [false; SIDE];
        for strip in strips {
            for (looked_at, tile) in looked_at.iter_mut().zip(strip.tiles) {
                *looked_at |= tile != Tile::Empty;
            }
        }
        Self { b: item.b, kv_head: item.h / launch.group(), first: index * BLOCK, keys, looked_at }
    }

    /// All keys of block `index`, of which `keys` are there.
    pub(super) fn all(launch: &Launch<'_>, item: &Item, index: usize, keys: usize) -> Self {
        let looked_at = [true; SIDE];
        Self { b: item.b, kv_head: item.h / launch.group(), first: index * BLOCK, keys, looked_at }
    }

    /// The keys, and whether they count.
    fn each(&self) -> impl Iterator<Item = (usize, bool)> + '_ {
        (0..BLOCK).filter(|key| self.looked_at[key / TILE]).map(|key| (key, key < self.keys))
    }

    /// Packs rows of `view` as columns. Columns of keys that do not count hold what was there before.
    #[cfg_attr(target_arch = "wasm32", inline(never))]
    #[cfg_attr(not(target_arch = "wasm32"), inline(always))]
    pub(super) fn pack_columns<S: Simd>(
        &self,
        simd: S,
        view: View,
        words: &[u32],
        panels: &mut Panels,
        widened: &mut Vec<f32>,
    ) {
        panels.resize(view.columns, BLOCK);
        for (key, _) in self.each().filter(|&(_, counts)| counts) {
            panels.pack_column(
                simd,
                key,
                view.read(words, [self.b, self.kv_head, self.first + key], widened),
            );
        }
    }

    /// The scores of a few query rows, without packing: packing pays when many rows share it. `s` is
    /// `[rows, BLOCK]`; columns of keys that do not count are left alone.
    #[inline(always)]
    pub(super) fn dot(&self, view: View, words: &[u32], q: &[f32], s: &mut [f32], widened: &mut Vec<f32>) {
        for (key, _) in self.each().filter(|&(_, counts)| counts) {
            let row = view.read(words, [self.b, self.kv_head, self.first + key], widened);
            for (q, s) in q.chunks_exact(view.columns).zip(s.chunks_exact_mut(BLOCK)) {
                s[key] = dot(q, row);
            }
        }
    }

    /// Adds the rows of `view`, weighed by the `[rows, BLOCK]` of `weights`, to the `[rows, stride]` of `o`.
    #[inline(always)]
    pub(super) fn weigh(
        &self,
        view: View,
        words: &[u32],
        weights: &[f32],
        (o, stride): (&mut [f32], usize),
        widened: &mut Vec<f32>,
    ) {
        for (key, _) in self.each().filter(|&(_, counts)| counts) {
            let row = view.read(words, [self.b, self.kv_head, self.first + key], widened);
            for (weights, o) in weights.chunks_exact(BLOCK).zip(o.chunks_exact_mut(stride)) {
                let weight = weights[key];
                for (o, x) in o.iter_mut().zip(row) {
                    *o += weight * x;
                }
            }
        }
    }

    /// Packs rows of `view` as rows. Those of keys that do not count are zero: what lies there may be NaN, and
    /// 0 * NaN is too.
    #[cfg_attr(target_arch = "wasm32", inline(never))]
    #[cfg_attr(not(target_arch = "wasm32"), inline(always))]
    pub(super) fn pack_rows<S: Simd>(
        &self,
        simd: S,
        view: View,
        words: &[u32],
        panels: &mut Panels,
        widened: &mut Vec<f32>,
    ) {
        panels.resize(BLOCK, view.columns);
        for (key, counts) in self.each() {
            if counts {
                panels.pack_row(
                    simd,
                    key,
                    view.read(words, [self.b, self.kv_head, self.first + key], widened),
                );
            } else {
                panels.clear_row(simd, key);
            }
        }
    }
}

/// The dot product, in lanes that become vectors.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0.0; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    for (a, b) in a.zip(b) {
        for (lane, (x, y)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += x * y;
        }
    }
    lanes.into_iter().sum::<f32>() + rest
}
