//! Few queries over many keys: the keys are cut into parts that run side by side, and the query rows that
//! share a kv head are packed into tiles, for each of which k and v are read once.

use super::split::{Cutter, Grid, Piece};
use super::{Forward, Pass, Plan, Role, Scratch, Slot, Source, fold, most_blocks};
use crate::error::Result;
use crate::kernels::{Kernel, KernelSpec, Params, Tile};
use crate::runtime::{Profile, Tier};
use crate::shape::BLOCK;
use std::ops::Range;
use std::sync::Arc;

/// How a call is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Parts that are left.
    pub(super) splits: u32,
    /// Workgroups that share the keys of a tile.
    pub(super) workgroups: u32,
    /// Keys of a workgroup, a multiple of 128.
    pub(super) split_len: u32,
    /// Tiles of the packed query rows of a kv head.
    pub(super) tiles: u32,
    /// Bytes of what the parts leave.
    pub(super) bytes: u64,
}

/// Whether a call takes the decode kernels. Decided by shapes alone, not by kv_len, so that a cache
/// that fills up keeps its kernels.
pub(super) fn applies(call: &Forward<'_>, profile: &Profile) -> bool {
    let shape = &call.shape;
    call.splits
        && profile.tier != Tier::Cpu
        // The kernels look at the first row of a block's tiles only.
        && (1..=32).contains(&shape.q_len)
        && shape.group() * shape.q_len <= 64
        && shape.kv_len >= 512
        && shape.batch > 0
}

/// Cuts the call for the kernel that attends to the parts.
pub(super) fn parts(call: &Forward<'_>, profile: &Profile, split: &KernelSpec) -> Parts {
    let shape = &call.shape;
    let tiles = ((shape.group() * shape.q_len) as u32).div_ceil(split.tile_q());
    // Each cluster of a workgroup leaves a part of its own, and they take 32 keys each in turn.
    let (clusters, step) = match split.kernel {
        Kernel::DecodeSubgroup => (split.tile.threads / 8, split.tile.threads / 8 * 32),
        _ => (1, 128),
    };
    let alone = (shape.batch * shape.kv_heads) as u64 * u64::from(tiles);
    let longest = call.kv_len.iter().copied().max().unwrap_or(0).max(1);
    // Enough workgroups to fill the machine; a part has 256 keys at least, or combining costs more.
    let wanted: u64 = if profile.software { 16 } else { 256 };
    let most = u64::from(longest.div_ceil(256)).min(128);
    let splits = (wanted / alone.max(1)).clamp(1, most) as u32;
    // No longer than a workgroup may go through in one launch.
    let blocks = most_blocks(profile, split.kernel, [shape.head_dim, shape.v_dim]);
    let splits = splits.max(longest.div_ceil(blocks.saturating_mul(BLOCK as u32)));
    let split_len = longest.div_ceil(splits).next_multiple_of(step);
    let splits = longest.div_ceil(split_len) * clusters;
    let bytes = 4 * shape.rows() as u64 * u64::from(splits) * (shape.v_dim as u64 + 2);
    Parts { splits, workgroups: splits / clusters, split_len, tiles, bytes }
}

/// The call as one piece, whatever its work: the launches over its parts are cut by time later. None when a
/// tensor, or what the parts leave, is longer than one binding: the forward kernel then goes through the call
/// window by window, several times slower. Parts would have to be counted from the start of a window for
/// that, and a cache of more than 128 MiB for one layer on a device of WebGPU's least limits is rare.
pub(super) fn whole(call: &Forward<'_>, profile: &Profile, parts: &Parts, work: f64) -> Option<Piece> {
    let shape = &call.shape;
    let groups = (shape.batch * shape.q_heads) as u32;
    // One workgroup has all rows of a head.
    let tile = shape.q_len.max(1) as u32;
    let grid = Grid { heads: shape.q_heads, group: shape.group(), rows: shape.q_len, tile };
    let cutter = Cutter { call, profile, grid, groups, work, may_range: false, most_blocks: u32::MAX };
    cutter.whole().filter(|_| parts.bytes <= profile.limits.storage_binding)
}

/// What the launches share.
pub(super) struct Launches<'a> {
    pub(super) profile: &'a Profile,
    pub(super) parts: Parts,
    pub(super) piece: Piece,
    pub(super) base: Params,
    pub(super) info: &'a [[u32; 4]],
    /// Statistics, tables, captures, the capture in place.
    pub(super) slots: [Slot; 4],
}

impl Launches<'_> {
    pub(super) fn passes(
        mut self,
        split: Arc<KernelSpec>,
        combine: Arc<KernelSpec>,
    ) -> Result<(Vec<Pass>, Scratch)> {
        let Parts { splits, workgroups, split_len, tiles, bytes } = self.parts;
        self.base.splits = splits;
        self.base.split_len = split_len;
        let [q, k, v, out] = [Role::Q, Role::K, Role::V, Role::Out].map(|role| self.piece.window(role));
        [self.base.q, self.base.k, self.base.v, self.base.out] = [q.1, k.1, v.1, out.1];
        let scratch = Scratch { label: "decode parts", bytes };
        let partials = Slot { source: Source::Scratch(0), offset: 0, size: bytes };
        let [stats, tables, captures, large] = self.slots.clone();
        let unread = || Slot::whole(Source::Unread);
        let unwritten = Slot::whole(Source::Unwritten);
        let split_groups = workgroups * tiles * self.base.kv_heads * self.base.batch;
        let rows = self.base.batch * self.base.q_heads * self.base.q_len;
        let slots = vec![q.0, k.0, v.0, partials.clone(), unwritten, tables.clone(), captures, large];
        // The workgroups do not depend on each other, so any of them can go into a submit of their own.
        let budget = Plan::budget(self.profile);
        let most = f64::from(split_groups) * budget / self.piece.work;
        let step = most.clamp(1.0, f64::from(split_groups)) as u32;
        let mut passes = Vec::new();
        for first in (0..split_groups).step_by(step as usize) {
            let groups = first..split_groups.min(first + step);
            let work = self.piece.work * groups.len() as f64 / f64::from(split_groups);
            passes.push(self.pass(&split, slots.clone(), groups, work)?);
        }
        let slots = vec![partials, unread(), unread(), out.0, stats, tables, unread(), unread()];
        passes.push(self.pass(&combine, slots, 0..rows, bytes as f64 / 4.0)?);
        Ok((passes, scratch))
    }

    fn pass(&self, spec: &Arc<KernelSpec>, slots: Vec<Slot>, groups: Range<u32>, work: f64) -> Result<Pass> {
        let grid = fold(groups.end - groups.start, self.profile.limits.workgroups)?;
        let params = Params { groups: groups.end, first_group: groups.start, ..self.base };
        Ok(Pass::new(spec, slots, params, self.info, grid, work))
    }
}

/// The kernels of a tier, in order.
pub(super) fn kernels(call: &Forward<'_>, profile: &Profile) -> [Kernel; 2] {
    let dims = [call.shape.head_dim, call.shape.v_dim].map(|dim| dim as u32);
    let tile = Tile::choose(Kernel::DecodeSubgroup, call.dtype, dims[0], dims[1], profile);
    // On a GPU, where memory is what decode waits for, only if its tile has all rows of a kv head: the other
    // kernel's has more, and reads k and v less often.
    let rows = (call.shape.group() * call.shape.q_len) as u32;
    let fits = tile.is_ok_and(|tile| profile.software || rows <= tile.rows);
    let split = match profile.tier {
        Tier::Subgroup | Tier::CoopMatrix if fits => Kernel::DecodeSubgroup,
        Tier::Metal | Tier::CoopMatrix | Tier::Subgroup | Tier::Portable | Tier::Cpu => Kernel::DecodeSplit,
    };
    [split, Kernel::DecodeCombine]
}
