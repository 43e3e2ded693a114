//! The gradients: row statistics, dq, dk and dv.
//!
//! As in the forward pass a worker takes a block of rows of one head: query rows for dq, keys for dk and dv. P
//! and dP are computed again strip by strip. Every sum has one owner and one order.
//!
//! ```text
//! P = exp(score_mod(q k^T * scale) - lse)      dP = dout v^T      dS = P (dP - delta) score_mod'
//! dq = scale * dS k      dk = scale * dS^T q      dv = P^T dout
//! ```

use std::ops::Range;

use fearless_simd::Simd;

use super::launch::{Item, Launch};
use super::lists::{self, SIDE, TILE, Tile};
use super::matrix::{self, Left, Panels, ROWS, Target, padded};
use super::mods::Mods;
use super::packing::{KeyBlock, strips};
use super::softmax;
use crate::error::Result;
use crate::kernels::NONE;
use crate::shape::BLOCK;

/// A worker's memory, reused from item to item.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    widened: Vec<f32>,
    /// `[rows, head_dim]`.
    q: Vec<f32>,
    /// `[rows, v_dim]`.
    dout: Vec<f32>,
    /// Columns are keys.
    k: Panels,
    /// Columns are keys.
    v: Panels,
    /// Rows are keys, or the query rows of a strip.
    rows: [Panels; 2],
    /// Of a strip, `[TILE, BLOCK]`.
    tiles: Tiles,
}

/// Scores and what becomes of them, each `[TILE, BLOCK]`.
#[derive(Debug, Default)]
pub(super) struct Tiles {
    /// S, then P.
    p: Vec<f32>,
    /// dP, then dS.
    ds: Vec<f32>,
    /// Of one row.
    slopes: Vec<f32>,
}

/// What the gradients need of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowStats {
    /// The log of the sum of exponentials, the attention sink among them.
    pub(super) lse: f32,
    /// rowsum(out * dout), less what the gradient of lse adds.
    pub(super) delta: f32,
    /// The row's part of the gradient of the sink.
    pub(super) dsink: f32,
}

/// Of rows of `[B * Hq * L]`.
pub(super) fn delta(launch: &Launch<'_>, rows: Range<usize>) -> Vec<RowStats> {
    let p = &launch.params;
    let (heads, q_len) = (p.q_heads as usize, p.q_len as usize);
    let [lse, dlse] = [0, 1].map(|binding| bytemuck::cast_slice::<u32, f32>(launch.words(binding)));
    let mut widened = [Vec::new(), Vec::new()];
    let [left, right] = &mut widened;
    rows.map(|index| {
        let row = [index / q_len / heads, index / q_len % heads, index % q_len];
        let out = launch.out.read(launch.words(2), row, left);
        let dout = launch.dout.read(launch.words(3), row, right);
        let total = out.iter().zip(dout).map(|(a, b)| a * b).sum::<f32>();
        let row_lse = lse[p.lse_at as usize + index];
        let mut stats = RowStats { lse: row_lse, delta: total, dsink: 0.0 };
        if row_lse == f32::NEG_INFINITY {
            return stats;
        }
        if let Some(sink) = launch.sink(row[1]) {
            let larger = row_lse.max(sink);
            stats.lse = larger + ((row_lse - larger).exp() + (sink - larger).exp()).ln();
            stats.dsink = -(sink - stats.lse).exp() * total;
        }
        if p.dlse_at != NONE {
            stats.delta -= dlse[p.dlse_at as usize + index] * (stats.lse - row_lse).exp();
        }
        stats
    })
    .collect()
}

/// `[rows, padded head_dim]`.
#[inline(always)]
pub(super) fn dq<S: Simd>(
    simd: S,
    launch: &Launch<'_>,
    mods: &mut Mods<'_>,
    item: &Item,
    scratch: &mut Scratch,
) -> Vec<f32> {
    let stride = padded(launch.q.columns);
    let Scratch { widened, q, dout, k, v, rows: [k_rows, _], tiles } = scratch;
    let height = gather(launch, [item.b, item.h], item.rows.clone(), q, dout, widened);
    let mut dq = vec![0.0; height * stride];
    for block in lists::blocks(launch.tables(), launch.list(item)) {
        let keys = launch.kv_len(item.b).saturating_sub(block.index * BLOCK).min(BLOCK);
        let place = KeyBlock::new(launch, item, block.index, keys, strips(item, block, keys));
        place.pack_columns(simd, launch.k, launch.words(1), k, widened);
        place.pack_columns(simd, launch.v, launch.words(2), v, widened);
        place.pack_rows(simd, launch.k, launch.words(1), k_rows, widened);
        for strip in strips(item, block, keys) {
            let first = strip.rows.start - item.rows.start;
            let height = strip.height();
            let (q, dout) = (&q[first * launch.q.columns..], &dout[first * launch.v.columns..]);
            tiles.products(simd, launch, [q, dout], [&*k, &*v], height, strip.tiles);
            for (r, row) in strip.rows.clone().enumerate() {
                tiles.gradient(
                    launch,
                    mods,
                    [item.b, item.h, row],
                    r,
                    block.index * BLOCK,
                    keys,
                    strip.tiles,
                );
            }
            // dq += dS k
            for stretch in lists::stretches(strip.tiles) {
                let columns = stretch.start * TILE..stretch.end * TILE;
                let left = Left::Rows(&tiles.ds[columns.start..], BLOCK);
                let target = Target { data: &mut dq[first * stride..], stride, add: true };
                matrix::multiply(simd, left, height, k_rows, columns, 0..launch.k.columns, target);
            }
        }
    }
    dq.iter_mut().for_each(|x| *x *= launch.params.scale);
    dq
}

/// `[rows, padded head_dim]` and `[rows, padded v_dim]`. The head of the item is a kv head.
#[inline(always)]
pub(super) fn dkv<'a, S: Simd>(
    simd: S,
    launch: &'a Launch<'a>,
    mods: &mut Mods<'a>,
    item: &Item,
    scratch: &mut Scratch,
) -> Result<[Vec<f32>; 2]> {
    let p = &launch.params;
    let strides = [padded(launch.k.columns), padded(launch.v.columns)];
    let mut gradients = strides.map(|stride| vec![0.0; item.rows.len().next_multiple_of(TILE) * stride]);
    let Scratch { widened, q, dout, k, v, rows: [q_rows, dout_rows], tiles } = scratch;
    let block = item.rows.start / BLOCK;
    // The tiles of the block that the item's keys are.
    let own = item.rows.start % BLOCK / TILE..(item.rows.end - 1) % BLOCK / TILE + 1;

    let first_head = item.h * launch.group();
    let keys_of = Item { b: item.b, h: first_head, rows: 0..0 };
    let held = (p.kv_len as usize - block * BLOCK).min(BLOCK);
    let place = KeyBlock::all(launch, &keys_of, block, held);
    place.pack_columns(simd, launch.k, launch.words(1), k, widened);
    place.pack_columns(simd, launch.v, launch.words(2), v, widened);

    // k and v that all batch entries share sum over them.
    let batch = if launch.shared_kv() { 0..p.batch as usize } else { item.b..item.b + 1 };
    for (b, h) in batch.flat_map(|b| (first_head..first_head + launch.group()).map(move |h| (b, h))) {
        mods.at_batch(launch, b)?;
        let keys = launch.kv_len(b).saturating_sub(block * BLOCK).min(BLOCK);
        for q_block in lists::blocks(launch.tables(), launch.list_of_keys(b, h, block)) {
            let first = q_block.index * BLOCK;
            let rows = first..(first + BLOCK).min(p.q_len as usize);
            for strip in strips(&Item { b, h, rows }, q_block, keys) {
                let mut live = [Tile::Empty; SIDE];
                live[own.clone()].copy_from_slice(&strip.tiles[own.clone()]);
                let height = gather(launch, [b, h], strip.rows.clone(), q, dout, widened);
                tiles.products(simd, launch, [&*q, &*dout], [&*k, &*v], height, live);
                for (r, row) in strip.rows.clone().enumerate() {
                    tiles.gradient(launch, mods, [b, h, row], r, block * BLOCK, keys, live);
                }
                q_rows.resize(TILE, launch.q.columns);
                dout_rows.resize(TILE, launch.v.columns);
                for r in 0..strip.rows.len() {
                    q_rows.pack_row(simd, r, &q[r * launch.q.columns..][..launch.q.columns]);
                    dout_rows.pack_row(simd, r, &dout[r * launch.v.columns..][..launch.v.columns]);
                }
                // dk += dS^T q, dv += P^T dout
                for stretch in lists::stretches(live) {
                    let columns = stretch.start * TILE..stretch.end * TILE;
                    let row = columns.start - own.start * TILE;
                    let sides = [(&tiles.ds, &*q_rows), (&tiles.p, &*dout_rows)];
                    let dims = [launch.k.columns, launch.v.columns];
                    let targets = gradients.iter_mut().zip(strides).zip(sides).zip(dims).zip(launch.spec.dkv);
                    for ((((gradient, stride), (left, right)), dim), _) in
                        targets.filter(|&(_, wanted)| wanted)
                    {
                        let left = Left::Columns(&left[columns.start..], BLOCK);
                        let target = Target { data: &mut gradient[row * stride..], stride, add: true };
                        matrix::multiply(
                            simd,
                            left,
                            columns.len(),
                            right,
                            0..strip.rows.len(),
                            0..dim,
                            target,
                        );
                    }
                }
            }
        }
    }
    gradients[0].iter_mut().for_each(|x| *x *= p.scale);
    Ok(gradients)
}

/// Query rows and their upstream gradients, as f32; gives their number, rounded up to whole register tiles.
#[inline(always)]
pub(super) fn gather(
    launch: &Launch<'_>,
    [b, h]: [usize; 2],
    rows: Range<usize>,
    q: &mut Vec<f32>,
    dout: &mut Vec<f32>,
    widened: &mut Vec<f32>,
) -> usize {
    let height = rows.len().next_multiple_of(ROWS);
    q.clear();
    dout.clear();
    for row in rows {
        launch.q.append(launch.words(0), [b, h, row], q, widened);
        launch.dout.append(launch.words(3), [b, h, row], dout, widened);
    }
    q.resize(height * launch.q.columns, 0.0);
    dout.resize(height * launch.v.columns, 0.0);
    height
}

impl Tiles {
    /// Line `r` of S or P, and of dP or dS.
    pub(super) fn line(&self, r: usize) -> [&[f32]; 2] {
        [&self.p, &self.ds].map(|tile| &tile[r * BLOCK..][..BLOCK])
    }

    /// S = q k^T and dP = dout v^T, where tiles are not empty.
    #[inline(always)]
    pub(super) fn products<S: Simd>(
        &mut self,
        simd: S,
        launch: &Launch<'_>,
        [q, dout]: [&[f32]; 2],
        [k, v]: [&Panels; 2],
        height: usize,
        live: [Tile; SIDE],
    ) {
        let dims = [launch.q.columns, launch.v.columns];
        for ((to, (left, right)), dim) in
            [&mut self.p, &mut self.ds].into_iter().zip([(q, k), (dout, v)]).zip(dims)
        {
            to.resize(TILE * BLOCK, 0.0);
            for stretch in lists::stretches(live) {
                let columns = stretch.start * TILE..stretch.end * TILE;
                let target = Target { data: &mut to[columns.start..], stride: BLOCK, add: false };
                matrix::multiply(simd, Left::Rows(left, dim), height, right, 0..dim, columns, target);
            }
        }
        self.slopes.resize(BLOCK, 1.0);
    }

    /// P and dS of line `r`, query row `row`, in place of S and dP.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "the place, and what is there")]
    pub(super) fn gradient(
        &mut self,
        launch: &Launch<'_>,
        mods: &mut Mods<'_>,
        row: [usize; 3],
        r: usize,
        kv0: usize,
        keys: usize,
        live: [Tile; SIDE],
    ) {
        let (p, ds) = (&mut self.p[r * BLOCK..][..BLOCK], &mut self.ds[r * BLOCK..][..BLOCK]);
        mods.apply(launch, row, kv0, keys, live, p, &mut self.slopes);
        let index = launch.row(row);
        let lse = launch.stats()[launch.params.lse_at as usize + index];
        let delta = launch.stats()[launch.params.delta_at as usize + index];
        for stretch in lists::stretches(live) {
            let columns = stretch.start * TILE..stretch.end * TILE;
            let pairs =
                p[columns.clone()].iter_mut().zip(&mut ds[columns.clone()]).zip(&self.slopes[columns]);
            for ((p, ds), slope) in pairs {
                // Where the pair is not kept all is 0, even if lse is infinite or the mods or values give NaN.
                let weight = if *p == f32::NEG_INFINITY { 0.0 } else { softmax::exp(*p - lse) };
                let post = if weight == 0.0 { 0.0 } else { weight * (*ds - delta) };
                *p = weight;
                *ds = if post == 0.0 { 0.0 } else { post * slope };
            }
        }
    }
}
