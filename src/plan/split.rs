//! Cutting a call into launches: by how much a binding may hold, and by how long a submit may take.

use super::{Forward, Operand, Plan, Role, Slot, Source};
use crate::error::{Error, Result};
use crate::runtime::Profile;
use crate::shape::{BLOCK, DType, Layout};
use std::ops::Range;

/// Workgroups, numbered by batch entry, head and tile of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) heads: usize,
    /// Heads that share what their rows are multiplied with.
    pub(super) group: usize,
    /// Rows of one head.
    pub(super) rows: usize,
    /// Rows of a tile.
    pub(super) tile: u32,
}

/// The workgroups of a call.
pub(super) struct Cutter<'a> {
    pub(super) call: &'a Forward<'a>,
    pub(super) profile: &'a Profile,
    pub(super) grid: Grid,
    /// All of them.
    pub(super) groups: u32,
    /// Multiply-adds of the call.
    pub(super) work: f64,
    /// Whether the keys may be cut into ranges, whose results are then merged.
    pub(super) may_range: bool,
    /// Blocks of keys that a workgroup may go through in one launch, where it would go through more.
    pub(super) most_blocks: u32,
}

/// A range of workgroups and what they touch.
pub(super) struct Piece {
    pub(super) first: u32,
    pub(super) end: u32,
    pub(super) work: f64,
    /// q, k, v, out. k and v are those of the first range where there are ranges.
    windows: [Window; 4],
    /// Ranges of the keys, where k or v is too long for one binding; otherwise none. The rows of such a
    /// piece are of one head of one batch entry.
    pub(super) ranges: Vec<KvRange>,
}

/// A slot and the view of the tensor from its start.
pub(super) type Window = (Slot, [u32; 4]);

/// A part of the keys that fits a binding.
pub(super) struct KvRange {
    /// Blocks of 128 keys.
    pub(super) blocks: Range<u32>,
    pub(super) k: Window,
    pub(super) v: Window,
}

impl Piece {
    /// The slot of a tensor, and its view as the kernels read it.
    pub(super) fn window(&self, role: Role) -> (Slot, [u32; 4]) {
        self.windows[role as usize].clone()
    }
}

/// Batch entries, heads and rows of a range of workgroups.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) batch: Range<usize>,
    pub(super) heads: Range<usize>,
    pub(super) rows: Range<usize>,
}

impl Extent {
    /// What is touched of q and out.
    fn q(&self) -> [Range<usize>; 3] {
        [self.batch.clone(), self.heads.clone(), self.rows.clone()]
    }

    /// What is touched of these rows of k and v.
    fn kv(&self, call: &Forward<'_>, rows: Range<usize>) -> [Range<usize>; 3] {
        let shape = &call.shape;
        let batch = if shape.kv_batch == 1 { 0..1 } else { self.batch.clone() };
        [batch, self.heads.start / shape.group()..(self.heads.end - 1) / shape.group() + 1, rows]
    }
}

impl Grid {
    /// Tiles of one head.
    pub(super) fn tiles(&self) -> u32 {
        self.rows.div_ceil(self.tile as usize) as u32
    }

    /// Whether these workgroups are of one head of one batch entry.
    pub(super) fn one_head(&self, first: u32, end: u32) -> bool {
        first / self.tiles() == (end - 1) / self.tiles()
    }

    /// Where to cut: between batch entries, else between heads, else between tiles.
    pub(super) fn middle(&self, first: u32, end: u32) -> Option<u32> {
        let tiles = self.tiles();
        for step in [tiles * self.heads as u32, tiles * self.group as u32, tiles, 1] {
            // Multiples of `step` strictly inside.
            let low = first / step + 1;
            let high = (end - 1) / step;
            if low <= high {
                return Some((low + (high - low) / 2) * step);
            }
        }
        None
    }

    pub(super) fn extent(&self, first: u32, end: u32) -> Extent {
        let (tiles, heads) = (self.tiles(), self.heads as u32);
        let (head0, head1) = (first / tiles, (end - 1) / tiles);
        let (entry0, entry1) = (head0 / heads, head1 / heads);
        let batch = entry0 as usize..entry1 as usize + 1;
        let heads = if entry0 == entry1 {
            (head0 % heads) as usize..(head1 % heads) as usize + 1
        } else {
            0..self.heads
        };
        let rows = if head0 == head1 {
            let row = |tile: u32| (tile as usize * self.tile as usize).min(self.rows);
            row(first % tiles)..row((end - 1) % tiles + 1)
        } else {
            0..self.rows
        };
        Extent { batch, heads, rows }
    }
}

impl Cutter<'_> {
    pub(super) fn pieces(&self) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        if self.groups > 0 {
            self.cut(0, self.groups, &mut pieces)?;
        }
        Ok(pieces)
    }

    /// All workgroups as one piece, whatever their work; none when the tensors need several windows.
    pub(super) fn whole(&self) -> Option<Piece> {
        if self.groups == 0 {
            return None;
        }
        let windows = self.windows(0, self.groups).ok()?;
        Some(Piece { first: 0, end: self.groups, work: self.work, windows, ranges: Vec::new() })
    }

    fn cut(&self, first: u32, end: u32, pieces: &mut Vec<Piece>) -> Result<()> {
        let work = self.work * f64::from(end - first) / f64::from(self.groups);
        let windows = self.windows(first, end);
        let long = self.may_range && self.most_blocks < self.call.shape.kv_blocks() as u32;
        if long
            && self.grid.one_head(first, end)
            && let Some(piece) = self.ranged(first, end, work)
        {
            pieces.push(piece);
            return Ok(());
        }
        if long && let Some(middle) = self.grid.middle(first, end) {
            self.cut(first, middle, pieces)?;
            return self.cut(middle, end, pieces);
        }
        match (self.grid.middle(first, end), windows) {
            (_, Ok(windows)) if work <= Plan::budget(self.profile) || end - first == 1 => {
                pieces.push(Piece { first, end, work, windows, ranges: Vec::new() });
                Ok(())
            }
            (middle, windows) => {
                if let (Err(_), Some(piece)) = (&windows, self.ranged(first, end, work)) {
                    pieces.push(piece);
                    return Ok(());
                }
                match middle {
                    Some(middle) => {
                        self.cut(first, middle, pieces)?;
                        self.cut(middle, end, pieces)
                    }
                    None => {
                        pieces.push(Piece { first, end, work, windows: windows?, ranges: Vec::new() });
                        Ok(())
                    }
                }
            }
        }
    }

    /// The piece with its keys in ranges, if it is of one head and everything then fits.
    fn ranged(&self, first: u32, end: u32, work: f64) -> Option<Piece> {
        if !self.may_range || !self.grid.one_head(first, end) {
            return None;
        }
        let extent = self.grid.extent(first, end);
        let blocks = self.call.shape.kv_blocks() as u32;
        let mut length = blocks;
        while length > 1 {
            length = length.div_ceil(2).min(self.most_blocks);
            let ranges: Result<Vec<KvRange>> = (0..blocks)
                .step_by(length as usize)
                .map(|first| self.range(&extent, first..(first + length).min(blocks)))
                .collect();
            let Ok(ranges) = ranges else { continue };
            let limits = &self.profile.limits;
            let kept = (ranges.len() * extent.rows.len()) as u64 * 4 * self.call.shape.v_dim.max(2) as u64
                + 4 * self.call.shape.rows() as u64;
            let q = self.window(Role::Q, extent.q()).ok()?;
            let out = self.window(Role::Out, extent.q()).ok()?;
            let short = work / ranges.len() as f64 <= Plan::budget(self.profile) || end - first == 1;
            if kept > limits.storage_binding || !short {
                return None;
            }
            let (k, v) = (ranges[0].k.clone(), ranges[0].v.clone());
            return Some(Piece { first, end, work, windows: [q, k, v, out], ranges });
        }
        None
    }

    fn range(&self, extent: &Extent, blocks: Range<u32>) -> Result<KvRange> {
        let end = (blocks.end as usize * BLOCK).min(self.call.shape.kv_len);
        let rows = blocks.start as usize * BLOCK..end;
        let k = self.window(Role::K, extent.kv(self.call, rows.clone()))?;
        let v = self.window(Role::V, extent.kv(self.call, rows))?;
        Ok(KvRange { blocks, k, v })
    }

    fn windows(&self, first: u32, end: u32) -> Result<[Window; 4]> {
        let extent = self.grid.extent(first, end);
        let keys = || extent.kv(self.call, 0..self.call.shape.kv_len);
        let q = self.window(Role::Q, extent.q())?;
        let k = self.window(Role::K, keys())?;
        let v = self.window(Role::V, keys())?;
        let out = self.window(Role::Out, extent.q())?;
        Ok([q, k, v, out])
    }

    /// The slot that holds these entries, heads and rows of a tensor, and its view from there.
    fn window(&self, role: Role, [batch, heads, rows]: [Range<usize>; 3]) -> Result<Window> {
        let operand = self.call.operand(role);
        let layout = &operand.layout;
        let limits = &self.profile.limits;
        // The whole buffer where it fits: the bind group then stays the same while offsets move. Not
        // so for a shared buffer in a browser: there the written part must not overlap the others.
        let apart = self.call.pooled && self.profile.browser;
        if operand.buffer <= limits.storage_binding && !apart || layout.is_empty() {
            return Ok((Slot::whole(Source::Tensor(role)), view(layout, 0, self.shared(role))));
        }
        let low = layout.index([batch.start, heads.start, rows.start, 0]);
        let high = layout.index([batch.end - 1, heads.end - 1, rows.end - 1, layout.shape[3] - 1]) + 1;
        window(role, operand, self.call.dtype, self.shared(role), low..high, self.profile)
    }

    /// One k and v for all batch entries.
    fn shared(&self, role: Role) -> bool {
        matches!(role, Role::K | Role::V) && self.call.shape.kv_batch == 1
    }
}

/// The slot that holds a range of elements of a tensor's buffer, and the tensor's view from there.
pub(super) fn window(
    role: Role,
    operand: &Operand,
    dtype: DType,
    shared: bool,
    elements: Range<usize>,
    profile: &Profile,
) -> Result<Window> {
    let limits = &profile.limits;
    let size = dtype.size() as u64;
    let (low, high) = (elements.start as u64 * size, elements.end as u64 * size);
    let alignment = limits.storage_alignment.max(16);
    let offset = low / alignment * alignment;
    let length = (high.next_multiple_of(4).min(operand.buffer / 4 * 4).max(high) - offset).max(4);
    if length > limits.storage_binding {
        return Err(Error::Limit {
            what: format!("one head of {}, with what lies between its rows,", name(role)),
            limit: "maxStorageBufferBindingSize",
            needed: length,
            available: limits.storage_binding,
            remedy: "store heads one after the other ([B, H, L, D]) or use a 16-bit type".into(),
        });
    }
    let slot = Slot { source: Source::Tensor(role), offset, size: length };
    Ok((slot, view(&operand.layout, (offset / size) as u32, shared)))
}

/// The view of a tensor counted from element `start` of its buffer. The offset wraps when the window
/// begins after the tensor does; adding the strides of what the launch touches wraps it back.
pub(super) fn view(layout: &Layout, start: u32, shared: bool) -> [u32; 4] {
    let [batch, head, row, _] = layout.strides;
    let batch = if shared { 0 } else { batch as u32 };
    [(layout.offset as u32).wrapping_sub(start), batch, head as u32, row as u32]
}

pub(super) fn name(role: Role) -> &'static str {
    match role {
        Role::Q => "q",
        Role::K => "k",
        Role::V => "v",
        Role::Out => "out",
        Role::Dout => "dout",
        Role::Lse => "lse",
        Role::Dlse => "dlse",
        Role::Dq => "dq",
        Role::Dkv => "dk and dv",
        Role::Captured => "the gradients of captured tensors",
    }
}
