//! Which parts of a block are looked at, and packing them.

use fearless_simd::Simd;

use super::launch::{Item, Launch};
use super::lists::{Block, SIDE, TILE, Tile};
use super::matrix::Panels;
use super::view::View;
use crate::shape::BLOCK;

/// Rows of an item that lie in one row of tiles of a block.
#[derive(Clone, Debug)]
pub(super) struct Strip {
    pub(super) rows: std::ops::Range<usize>,
    /// Those past the keys that count are empty.
    pub(super) tiles: [Tile; SIDE],
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
    #[inline(always)]
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

    /// Packs rows of `view` as rows. Those of keys that do not count are zero: what lies there may be NaN, and
    /// 0 * NaN is too.
    #[inline(always)]
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
