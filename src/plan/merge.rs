//! Keys that are longer than a binding: each range of them gets a softmax of its own, whose results are
//! then merged by lse.
//!
//! The results of the ranges are in the call's own type, so a 16-bit call rounds once more than one that
//! fits.

use super::lists::{Lists, Part, Places};
use super::split::{Cutter, Piece};
use super::{Constant, Forward, Pass, Role, Scratch, Slot, Source, fold};
use crate::error::Result;
use crate::kernels::{Kernel, KernelSpec, NONE, Params};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What the pieces of a call share, and what they add to the plan.
pub(super) struct Merge<'a> {
    pub(super) call: &'a Forward<'a>,
    pub(super) lists: &'a Lists,
    pub(super) base: Params,
    pub(super) info: &'a [[u32; 4]],
    /// Statistics, tables, captures, the capture in place.
    pub(super) slots: [Slot; 4],
    /// The kernel that merges.
    pub(super) spec: Arc<KernelSpec>,
    /// Where the tables of a range are among the constants of the plan.
    pub(super) tables: HashMap<Range<u32>, (usize, Places, u32)>,
    /// Bytes of the results of the ranges, and of their statistics: the largest piece's.
    pub(super) bytes: [u64; 2],
}

/// The kernel, without mods.
pub(super) const KERNEL: Kernel = Kernel::Merge;

impl Merge<'_> {
    /// The launches of a piece: one for each range, and the one that merges.
    pub(super) fn passes(
        &mut self,
        cutter: &Cutter<'_>,
        piece: &Piece,
        forward: &Arc<KernelSpec>,
        constants: &mut Vec<Constant>,
    ) -> Result<Vec<Pass>> {
        let shape = &self.call.shape;
        let extent = cutter.grid.extent(piece.first, piece.end);
        let (rows, v_dim) = (extent.rows.len() as u32, shape.v_dim as u32);
        let ranges = piece.ranges.len() as u32;
        // The first row of the piece among those of the call.
        let head = (extent.batch.start * shape.q_heads + extent.heads.start) as u32;
        let first_row = head * shape.q_len as u32 + extent.rows.start as u32;
        let size = self.call.dtype.size() as u64;
        let bytes = [
            (u64::from(ranges) * u64::from(rows) * u64::from(v_dim) * size).next_multiple_of(4),
            4 * (u64::from(first_row) + 2 * u64::from(ranges) * u64::from(rows)),
        ];
        self.bytes = [self.bytes[0].max(bytes[0]), self.bytes[1].max(bytes[1])];
        let [partial, partial_stats] =
            [0, 1].map(|at| Slot { source: Source::Scratch(at), offset: 0, size: bytes[at] });

        let mut passes = Vec::new();
        for (n, range) in piece.ranges.iter().enumerate() {
            let n = n as u32;
            let (tables, places, lists) = match self.tables.get(&range.blocks) {
                Some(known) => *known,
                None => {
                    let part = Part {
                        entries: 0..shape.batch as u32,
                        heads: 0..shape.q_heads as u32,
                        blocks: range.blocks.clone(),
                    };
                    let within = self.lists.within(&part, false, shape);
                    let (constant, places) = within.with_tail(self.call, shape);
                    constants.push(constant);
                    let made = (constants.len() - 1, places, within.lists);
                    self.tables.insert(range.blocks.clone(), made);
                    made
                }
            };
            // Rows are counted over the whole call. The results begin with the piece, by a view in wrapping
            // u32; their statistics where the call's own would, as no offset may come out as NONE.
            let before = n * rows;
            let lse_at = before;
            let max_at = if self.base.max_at == NONE { NONE } else { (ranges + n) * rows };
            let (q, q_view) = piece.window(Role::Q);
            let out = [before.wrapping_sub(extent.rows.start as u32).wrapping_mul(v_dim), 0, 0, v_dim];
            let params = Params {
                q: q_view,
                k: range.k.1,
                v: range.v.1,
                out,
                lists,
                q_offset_at: places.q_offset,
                kv_len_at: places.kv_len,
                sinks_at: NONE,
                lse_at,
                max_at,
                first_group: piece.first,
                groups: piece.end,
                ..self.base
            };
            let [_, _, captures, large] = self.slots.clone();
            let slots = vec![
                q,
                range.k.0.clone(),
                range.v.0.clone(),
                partial.clone(),
                partial_stats.clone(),
                Slot::whole(Source::Constant(tables)),
                captures,
                large,
            ];
            passes.push(self.pass(
                forward,
                slots,
                params,
                piece.end - piece.first,
                cutter,
                piece.work / f64::from(ranges),
            )?);
        }
        let [stats, tables, _, _] = self.slots.clone();
        let (out, out_view) = piece.window(Role::Out);
        let unread = || Slot::whole(Source::Unread);
        let params = Params {
            out: out_view,
            splits: ranges,
            first_group: first_row,
            groups: first_row + rows,
            ..self.base
        };
        let slots = vec![partial, unread(), unread(), out, stats, tables, unread(), partial_stats];
        let work = f64::from(ranges * rows) * f64::from(v_dim);
        passes.push(self.pass(&self.spec.clone(), slots, params, rows, cutter, work)?);
        Ok(passes)
    }

    fn pass(
        &self,
        spec: &Arc<KernelSpec>,
        slots: Vec<Slot>,
        params: Params,
        groups: u32,
        cutter: &Cutter<'_>,
        work: f64,
    ) -> Result<Pass> {
        let grid = fold(groups, cutter.profile.limits.workgroups)?;
        Ok(Pass::new(spec, slots, params, self.info, grid, work))
    }

    /// The buffers that the pieces share.
    pub(super) fn scratch(&self) -> Vec<Scratch> {
        let [results, stats] = self.bytes;
        if results == 0 {
            return Vec::new();
        }
        vec![
            Scratch { label: "results of key ranges", bytes: results },
            Scratch { label: "lse and max of key ranges", bytes: stats },
        ]
    }
}
