//! out = softmax(score_mod(q k^T * scale)) v over the kept pairs, with lse and max.
//!
//! A worker takes a block of query rows of one head. It walks the blocks of their list: packs the keys and
//! values of one, then for each strip of 32 rows computes S = q k^T where tiles are not empty, applies the
//! mods, updates the online softmax (row max m, row sum l) and adds P v to the output.

use fearless_simd::Simd;

use super::launch::{Item, Launch};
use super::lists::{self, TILE};
use super::matrix::{self, Left, Panels, ROWS, Target, padded};
use super::mods::Mods;
use super::packing::{KeyBlock, strips};
use super::softmax;
use crate::shape::BLOCK;

/// What an item gives.
#[derive(Debug, Default)]
pub(super) struct Output {
    /// `[rows, padded v_dim]`.
    pub(super) out: Vec<f32>,
    /// Per row.
    pub(super) lse: Vec<f32>,
    /// Per row.
    pub(super) max: Vec<f32>,
}

/// A worker's memory, reused from item to item.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    widened: Vec<f32>,
    /// `[rows, head_dim]`.
    q: Vec<f32>,
    /// Columns are keys.
    k: Panels,
    /// Rows are keys.
    v: Panels,
    /// Scores of a strip, then P: `[TILE, BLOCK]`.
    s: Vec<f32>,
    /// Row max so far.
    m: Vec<f32>,
}

#[inline(always)]
pub(super) fn forward<S: Simd>(
    simd: S,
    launch: &Launch<'_>,
    mods: &mut Mods<'_>,
    item: &Item,
    scratch: &mut Scratch,
) -> Output {
    let rows = item.rows.len().next_multiple_of(ROWS);
    let (head_dim, out_stride) = (launch.q.columns, padded(launch.v.columns));
    let Scratch { widened, q, k, v, s, m } = scratch;
    q.clear();
    for row in item.rows.clone() {
        launch.q.append(launch.words(0), [item.b, item.h, row], q, widened);
    }
    q.resize(rows * head_dim, 0.0);
    s.resize(TILE * BLOCK, 0.0);
    m.clear();
    m.resize(rows, f32::NEG_INFINITY);
    let mut o = vec![0.0; rows * out_stride];
    let mut l = vec![0.0; rows];
    // Decoding: all rows are in one strip, and too few to share packed keys and values.
    let few = launch.params.q_len as usize <= ROWS;

    for block in lists::blocks(launch.tables(), launch.list(item)) {
        let keys = launch.kv_len(item.b).saturating_sub(block.index * BLOCK).min(BLOCK);
        let strips = || strips(item, block, keys);
        let place = KeyBlock::new(launch, item, block.index, keys, strips());
        if few {
            place.dot(launch.k, launch.words(1), q, s, widened);
        } else {
            place.pack_columns(simd, launch.k, launch.words(1), k, widened);
            place.pack_rows(simd, launch.v, launch.words(2), v, widened);
        }
        for strip in strips() {
            let first = strip.rows.start - item.rows.start;
            let height = strip.height();

            // S = q k^T
            for tiles in lists::stretches(strip.tiles).filter(|_| !few) {
                let columns = tiles.start * TILE..tiles.end * TILE;
                let target = Target { data: &mut s[columns.start..], stride: BLOCK, add: false };
                let left = Left::Rows(&q[first * head_dim..], head_dim);
                matrix::multiply(simd, left, height, k, 0..head_dim, columns, target);
            }

            // Mods, then the online softmax: the new row max, P = exp(S - m), the old sums scaled to it.
            for (r, row) in strip.rows.clone().enumerate() {
                let at = first + r;
                let scores = &mut s[r * BLOCK..][..BLOCK];
                mods.apply(
                    launch,
                    [item.b, item.h, row],
                    block.index * BLOCK,
                    keys,
                    strip.tiles,
                    scores,
                    &mut [],
                );
                let mut top = m[at];
                for tiles in lists::stretches(strip.tiles) {
                    top = top.max(softmax::largest(&scores[tiles.start * TILE..tiles.end * TILE]));
                }
                // Nothing kept so far: any base will do, minus infinity would give NaN.
                let base = if top == f32::NEG_INFINITY { 0.0 } else { top };
                if m[at] != top {
                    let shrink = softmax::exp(m[at] - base);
                    l[at] *= shrink;
                    o[at * out_stride..][..out_stride].iter_mut().for_each(|x| *x *= shrink);
                    m[at] = top;
                }
                for tiles in lists::stretches(strip.tiles) {
                    l[at] += softmax::exponentiate(&mut scores[tiles.start * TILE..tiles.end * TILE], base);
                }
            }

            // O += P v
            if few {
                place.weigh(launch.v, launch.words(2), s, (&mut o, out_stride), widened);
            }
            for tiles in lists::stretches(strip.tiles).filter(|_| !few) {
                let columns = tiles.start * TILE..tiles.end * TILE;
                let left = Left::Rows(&s[columns.start..], BLOCK);
                let target = Target { data: &mut o[first * out_stride..], stride: out_stride, add: true };
                matrix::multiply(simd, left, height, v, columns, 0..launch.v.columns, target);
            }
        }
    }
    finish(launch, item, o, m, &l)
}

/// out = O / l, less the sink's share; lse and max.
fn finish(launch: &Launch<'_>, item: &Item, mut o: Vec<f32>, m: &[f32], l: &[f32]) -> Output {
    let stride = padded(launch.v.columns);
    let mut output = Output::default();
    for ((out, &m), &l) in o.chunks_exact_mut(stride).zip(m).zip(l).take(item.rows.len()) {
        // Not `l > 0`: a kept NaN has to stay.
        let empty = l == 0.0;
        let lse = if empty { f32::NEG_INFINITY } else { m + l.ln() };
        let beside_sink = launch.sink(item.h).map_or(1.0, |sink| 1.0 / (1.0 + (sink - lse).exp()));
        let factor = if empty { 0.0 } else { beside_sink / l };
        out.iter_mut().for_each(|x| *x *= factor);
        output.lse.push(lse);
        output.max.push(if l.is_nan() { l } else { m });
    }
    output.out = o;
    output
}
