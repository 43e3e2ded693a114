//! Gradients of captured tensors: what each place that reads one adds to which element.
//!
//! P and dPost are computed again as for dq. An item gives a list of (element, summand); lists are added up in
//! the order of the items, so that results repeat bit for bit, whatever the pattern of the reads. There is nothing
//! left to do for `scatter`.

use fearless_simd::Simd;

use super::backward::{Tiles, gather};
use super::launch::{Item, Launch};
use super::lists::{self, SIDE, TILE, Tile};
use super::matrix::Panels;
use super::mods::Mods;
use super::packing::{KeyBlock, strips};
use crate::error::Result;
use crate::expr::{Bound, Env, GatherGradient, Gradient, Input, Program};
use crate::kernels::Kernel;
use crate::shape::BLOCK;

/// What an item adds to the gradients: an element and a summand, in order.
pub(super) type Summands = Vec<(usize, f32)>;

/// One place where the score mod reads a captured tensor.
#[derive(Debug)]
struct Place {
    /// Its dimensions.
    shape: Vec<usize>,
    /// The tensor's first element among the gradients.
    first: usize,
    /// The same element for a whole query row, for a whole column, or for a pair.
    per: Per,
    /// Where its derivative stands among the program's outputs; its indices follow.
    output: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Per {
    Row,
    Column,
    Pair,
}

/// The places that a launch is about.
#[derive(Debug)]
pub(super) struct Places {
    program: Program,
    places: Vec<Place>,
}

impl Places {
    pub(super) fn new(launch: &Launch<'_>) -> Result<Self> {
        let mods = &launch.spec.mods;
        let columns = launch.spec.kernel == Kernel::CapturedColumns;
        let (mut outputs, mut places) = (Vec::new(), Vec::new());
        let gradient = mods.score.as_ref().map(Gradient::of).transpose()?;
        for GatherGradient { capture, indices, d } in gradient.into_iter().flat_map(|g| g.captures) {
            let depends = |input| indices.iter().any(|index| index.inputs().contains(input));
            let per = match (depends(Input::Q), depends(Input::Kv)) {
                (_, false) => Per::Row,
                (false, true) => Per::Column,
                (true, true) => Per::Pair,
            };
            let known = launch.captures.iter().position(|known| known.decl() == capture);
            let (true, Some(known)) = (mods.terms.iter().any(|name| **name == *capture.name), known) else {
                continue;
            };
            if columns == (per == Per::Column) {
                let shape = launch.captures[known].shape().to_vec();
                places.push(Place { shape, first: launch.gradient_at(known), per, output: outputs.len() });
                outputs.push(d);
                outputs.extend(indices);
            }
        }
        Ok(Self { program: Program::new(&outputs), places })
    }

    /// Whether some element is read per pair: then one workgroup goes through all heads.
    pub(super) fn pairs(&self) -> bool {
        self.places.iter().any(|place| place.per == Per::Pair)
    }

    /// The evaluator of one worker and batch entry.
    pub(super) fn bind<'a>(&'a self, launch: &'a Launch<'_>, b: usize) -> Result<Bound<'a, f32>> {
        let q_len = launch.params.q_len as usize;
        self.program.bind(&Env::new(&launch.captures, &launch.scalars, q_len, launch.kv_len(b))?)
    }
}

impl Place {
    /// The element that is read at position `j` of the evaluated row.
    fn element(&self, bound: &Bound<'_, f32>, j: usize) -> usize {
        let index = |dim: usize| bound.output(self.output + 1 + dim).lane(j).to_f64();
        self.shape.iter().enumerate().fold(0, |at, (dim, &size)| {
            at * size + index(dim).clamp(0.0, size.saturating_sub(1) as f64) as usize
        }) + self.first
    }
}

/// A worker's memory, reused from item to item.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    widened: Vec<f32>,
    q: Vec<f32>,
    dout: Vec<f32>,
    k: Panels,
    v: Panels,
    tiles: Tiles,
    /// Scaled scores of a row.
    raw: Vec<f32>,
    /// One per place and row, or per place and column.
    sums: Vec<f32>,
}

/// What query rows of one head add, by row and by pair.
#[inline(always)]
pub(super) fn rows<S: Simd>(
    simd: S,
    launch: &Launch<'_>,
    mods: &mut Mods<'_>,
    (places, bound): (&Places, &mut Bound<'_, f32>),
    item: &Item,
    scratch: &mut Scratch,
) -> Summands {
    let Scratch { widened, q, dout, k, v, tiles, raw, sums } = scratch;
    let mut summands = Vec::new();
    if lists::blocks(launch.tables(), launch.list(item)).next().is_none() {
        // Perhaps of a head outside of what this launch binds.
        return summands;
    }
    gather(launch, [item.b, item.h], item.rows.clone(), q, dout, widened);
    sums.clear();
    sums.resize(places.places.len() * BLOCK, 0.0);
    for block in lists::blocks(launch.tables(), launch.list(item)) {
        let keys = launch.kv_len(item.b).saturating_sub(block.index * BLOCK).min(BLOCK);
        let place = KeyBlock::new(launch, item, block.index, keys, strips(item, block, keys));
        place.pack_columns(simd, launch.k, launch.words(1), k, widened);
        place.pack_columns(simd, launch.v, launch.words(2), v, widened);
        for strip in strips(item, block, keys) {
            let first = strip.rows.start - item.rows.start;
            let (q, dout) = (&q[first * launch.q.columns..], &dout[first * launch.v.columns..]);
            tiles.products(simd, launch, [q, dout], [&*k, &*v], strip.height(), strip.tiles);
            for (r, row) in strip.rows.clone().enumerate() {
                let row = [item.b, item.h, row];
                each_pair(launch, mods, bound, tiles, raw, row, r, block.index * BLOCK, keys, strip.tiles, {
                    |bound, j, _, post| {
                        for (place, sum) in
                            places.places.iter().zip(sums[first + r..].iter_mut().step_by(BLOCK))
                        {
                            let summand = post * bound.output(place.output).floats()[j];
                            match place.per {
                                Per::Pair => summands.push((place.element(bound, j), summand)),
                                Per::Row | Per::Column => *sum += summand,
                            }
                        }
                    }
                });
            }
        }
    }
    for (r, row) in item.rows.clone().enumerate() {
        let q = (row as i32).wrapping_add(launch.q_offset(item.b));
        bound.row(item.b as i32, item.h as i32, q, 0, &[], 1);
        for (place, sums) in places.places.iter().zip(sums.chunks_exact(BLOCK)) {
            if place.per == Per::Row {
                summands.push((place.element(bound, 0), sums[r]));
            }
        }
    }
    summands
}

/// What keys of one query head add, by column.
#[inline(always)]
pub(super) fn columns<S: Simd>(
    simd: S,
    launch: &Launch<'_>,
    mods: &mut Mods<'_>,
    (places, bound): (&Places, &mut Bound<'_, f32>),
    item: &Item,
    scratch: &mut Scratch,
) -> Summands {
    let Scratch { widened, q, dout, k, v, tiles, raw, sums } = scratch;
    let block = item.rows.start / BLOCK;
    let own = item.rows.start % BLOCK / TILE..(item.rows.end - 1) % BLOCK / TILE + 1;
    let keys = launch.kv_len(item.b).saturating_sub(block * BLOCK).min(BLOCK);
    let place = KeyBlock::all(launch, item, block, keys);
    place.pack_columns(simd, launch.k, launch.words(1), k, widened);
    place.pack_columns(simd, launch.v, launch.words(2), v, widened);
    sums.clear();
    sums.resize(places.places.len() * BLOCK, 0.0);
    for q_block in lists::blocks(launch.tables(), launch.list_of_keys(item.b, item.h, block)) {
        let first = q_block.index * BLOCK;
        let rows = first..(first + BLOCK).min(launch.params.q_len as usize);
        for strip in strips(&Item { rows, ..*item }, q_block, keys) {
            let mut live = [Tile::Empty; SIDE];
            live[own.clone()].copy_from_slice(&strip.tiles[own.clone()]);
            gather(launch, [item.b, item.h], strip.rows.clone(), q, dout, widened);
            tiles.products(simd, launch, [&*q, &*dout], [&*k, &*v], strip.height(), live);
            for (r, row) in strip.rows.clone().enumerate() {
                let row = [item.b, item.h, row];
                each_pair(launch, mods, bound, tiles, raw, row, r, block * BLOCK, keys, live, {
                    |bound, j, column, post| {
                        for (place, sum) in places.places.iter().zip(sums[column..].iter_mut().step_by(BLOCK))
                        {
                            *sum += post * bound.output(place.output).floats()[j];
                        }
                    }
                });
            }
        }
    }
    let mut summands = Vec::new();
    for key in item.rows.clone() {
        bound.row(item.b as i32, item.h as i32, 0, key as i32, &[], 1);
        for (place, sums) in places.places.iter().zip(sums.chunks_exact(BLOCK)) {
            summands.push((place.element(bound, 0), sums[key % BLOCK]));
        }
    }
    summands
}

/// Calls `add` with the evaluated row, the position in it, the column of the block, and dPost, for each pair of a
/// query row and the keys of a block whose dPost is not 0.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the place, and what is there")]
fn each_pair<'a>(
    launch: &Launch<'_>,
    mods: &mut Mods<'_>,
    bound: &mut Bound<'a, f32>,
    tiles: &mut Tiles,
    raw: &mut Vec<f32>,
    row @ [b, h, q]: [usize; 3],
    r: usize,
    kv0: usize,
    keys: usize,
    live: [Tile; SIDE],
    mut add: impl FnMut(&Bound<'a, f32>, usize, usize, f32),
) {
    raw.clear();
    raw.extend(tiles.line(r)[0].iter().map(|score| score * launch.params.scale));
    tiles.gradient(launch, mods, row, r, kv0, keys, live);
    let q = (q as i32).wrapping_add(launch.q_offset(b));
    for stretch in lists::stretches(live) {
        let columns = stretch.start * TILE..(stretch.end * TILE).min(keys);
        bound.row(b as i32, h as i32, q, (kv0 + columns.start) as i32, &raw[columns.clone()], columns.len());
        for (j, column) in columns.enumerate() {
            let post = tiles.line(r)[1][column];
            if post != 0.0 {
                add(bound, j, column, post);
            }
        }
    }
}
