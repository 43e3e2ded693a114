//! Cutting the launches of gradients by what a binding may hold.
//!
//! A launch that binds whole buffers is left as it is. Else it covers ranges of batch entries, heads and
//! rows, of which windows fit. Where even the other side of one head does not fit, what is summed is cut
//! into parts, each a launch whose lists hold nothing else; it adds to what the parts before it have left
//! ([`Params::accumulate`]), in one order, so that results still repeat bit for bit. A gradient of 16 bits
//! is rounded once for each part.

use super::lists::Part;
use super::split::{Extent, Grid, Window, view, window};
use super::{Backward, Operand, Role, Slot, Source};
use crate::error::Result;
use crate::kernels::{NONE, Params};
use crate::runtime::Profile;
use crate::shape::{AttentionShape, BLOCK, DType, Layout};
use std::ops::Range;

/// What the workgroups of a kernel go over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// No tensor of the call.
    Nothing,
    /// Eight rows of out each, counted over heads and batch entries.
    Rows,
    /// A tile of query rows of one query head each.
    Queries,
    /// A tile of query rows each, of all heads and batch entries one after the other.
    QueriesOfAllHeads,
    /// A tile of keys of one kv head each, with the query heads that share it.
    Keys,
    /// A tile of keys of one query head each.
    KeysOfQueryHeads,
}

/// What a kernel writes besides statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Nothing.
    None,
    /// dq.
    Dq,
    /// dk, dv, or both.
    Dkv([bool; 2]),
    /// The gradients of captured tensors.
    Captured,
}

/// The bindings of a launch that depend on where it is, and how their tensors are seen from there.
#[derive(Clone, Debug)]
pub(super) struct Bound {
    pub(super) inputs: [Slot; 4],
    pub(super) target: Slot,
    params: Params,
}

impl Bound {
    /// `base` with the views of these bindings.
    pub(super) fn params(&self, base: Params, over: Over) -> Params {
        let Params { q, k, v, out, dout, dq, dk, dv, lse_at, dlse_at, .. } = self.params;
        // Other kernels read lse and delta from the statistics.
        let [lse_at, dlse_at] =
            if over == Over::Rows { [lse_at, dlse_at] } else { [base.lse_at, base.dlse_at] };
        Params { q, k, v, out, dout, dq, dk, dv, lse_at, dlse_at, ..base }
    }
}

/// The tensors of a backward call as bindings.
pub(super) struct Bindings<'a> {
    pub(super) back: &'a Backward<'a>,
    pub(super) profile: &'a Profile,
    /// dq, dk and dv.
    pub(super) gradients: [Layout; 3],
    /// Elements of the buffer of dk and dv.
    pub(super) dkv_elements: usize,
}

/// What a launch may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Multiply-adds.
    pub(super) work: f64,
    /// Blocks that one workgroup goes through.
    pub(super) most: u32,
    /// Blocks in the longest list of what it goes through.
    pub(super) longest: u32,
}

/// A launch over some workgroups, and the part of what they sum that it goes through.
pub(super) struct Piece {
    pub(super) groups: Range<u32>,
    /// All of it, or one of several.
    pub(super) part: Option<Part>,
    /// Adds to what earlier parts have left.
    pub(super) accumulate: bool,
    /// Multiply-adds.
    pub(super) work: f64,
    pub(super) bound: Bound,
}

impl Bindings<'_> {
    fn shape(&self) -> &AttentionShape {
        &self.back.call.shape
    }

    fn shared(&self) -> bool {
        self.shape().kv_batch == 1
    }

    fn operand(&self, role: Role) -> Operand {
        let made = |layout: Layout, end: usize| {
            let bytes = (end * self.back.call.dtype.size()) as u64;
            Operand { layout, buffer: bytes.next_multiple_of(4) }
        };
        let [dq, dk, _] = self.gradients;
        match role {
            Role::Dout => self.back.dout,
            Role::Lse => self.back.lse,
            Role::Dlse => self.back.dlse.unwrap_or(self.back.lse),
            Role::Dq => made(dq, dq.end()),
            Role::Dkv | Role::Captured => made(dk, self.dkv_elements),
            Role::Q | Role::K | Role::V | Role::Out => *self.back.call.operand(role),
        }
    }

    /// Which of dk and dv each launch computes: both, if the buffer that holds both can be bound.
    pub(super) fn dkv_launches(&self) -> Vec<[bool; 2]> {
        let wanted = [self.back.wanted.k, self.back.wanted.v];
        let fits = self.operand(Role::Dkv).buffer <= self.profile.limits.storage_binding;
        let each = [[wanted[0], false], [false, wanted[1]]];
        let launches = if fits { vec![wanted] } else { each.to_vec() };
        launches.into_iter().filter(|wanted| wanted.contains(&true)).collect()
    }

    /// The grid of a kernel with tiles of `tile` rows.
    pub(super) fn grid(&self, over: Over, tile: u32) -> Grid {
        let shape = self.shape();
        let (q_heads, group) = (shape.q_heads, shape.group());
        match over {
            Over::Nothing => Grid { heads: 1, group: 1, rows: shape.q_heads, tile: 1 },
            Over::Rows => Grid { heads: 1, group: 1, rows: shape.rows(), tile: 8 },
            Over::Queries => Grid { heads: q_heads, group, rows: shape.q_len, tile },
            Over::QueriesOfAllHeads => Grid { heads: 1, group: 1, rows: shape.q_len, tile },
            Over::Keys => Grid { heads: shape.kv_heads, group: 1, rows: shape.kv_len, tile },
            Over::KeysOfQueryHeads => Grid { heads: q_heads, group, rows: shape.kv_len, tile },
        }
    }

    /// Workgroups of a kernel.
    pub(super) fn groups(&self, over: Over, grid: &Grid) -> u64 {
        let shape = self.shape();
        u64::from(grid.tiles())
            * match over {
                Over::Nothing | Over::Rows | Over::QueriesOfAllHeads => 1,
                Over::Queries | Over::KeysOfQueryHeads => (shape.q_heads * shape.batch) as u64,
                Over::Keys => (shape.kv_heads * shape.kv_batch) as u64,
            }
    }

    /// Everything that a launch over these workgroups goes through.
    fn touched(&self, over: Over, extent: &Extent) -> Part {
        let shape = self.shape();
        let count = |range: Range<usize>| range.start as u32..range.end as u32;
        let (all_entries, all_heads) = (0..shape.batch, 0..shape.q_heads);
        let (entries, heads) = match over {
            Over::Nothing | Over::Rows | Over::QueriesOfAllHeads => (all_entries, all_heads),
            Over::Queries | Over::KeysOfQueryHeads => (extent.batch.clone(), extent.heads.clone()),
            Over::Keys => {
                let entries = if self.shared() { all_entries } else { extent.batch.clone() };
                (entries, extent.heads.start * shape.group()..extent.heads.end * shape.group())
            }
        };
        let blocks = if over.owns_queries() { shape.kv_blocks() } else { shape.q_blocks() };
        Part { entries: count(entries), heads: count(heads), blocks: 0..blocks as u32 }
    }

    /// The bindings of a launch over the workgroups of `extent`, going through `part`.
    fn bind(&self, over: Over, target: Target, extent: &Extent, part: &Part) -> Result<Bound> {
        let shape = self.shape();
        let mut params = Params { dlse_at: NONE, ..Params::default() };
        let unread = || Slot::whole(Source::Unread);
        let inputs = match over {
            Over::Nothing => [unread(), unread(), unread(), unread()],
            Over::Rows => {
                // A window that begins with the tensor: its offset cannot come out as NONE.
                let whole = |role| self.place(role, DType::F32, false, |layout| 0..layout.end());
                let (lse, at) = whole(Role::Lse)?;
                params.lse_at = at[0];
                let mut dlse = unread();
                if self.back.dlse.is_some() {
                    let (slot, at) = whole(Role::Dlse)?;
                    (dlse, params.dlse_at) = (slot, at[0]);
                }
                let rows = |role| {
                    self.place(role, self.back.call.dtype, false, |layout| hull_of_rows(layout, &extent.rows))
                };
                let (out, dout) = (rows(Role::Out)?, rows(Role::Dout)?);
                [params.out, params.dout] = [out.1, dout.1];
                [lse, dlse, out.0, dout.0]
            }
            Over::Queries | Over::QueriesOfAllHeads | Over::Keys | Over::KeysOfQueryHeads => {
                let rows_of = |count: usize, blocks: &Range<usize>| {
                    blocks.start * BLOCK..(blocks.end * BLOCK).min(count)
                };
                // The Cpu tier looks at whole blocks.
                let own = extent.rows.start / BLOCK..extent.rows.end.div_ceil(BLOCK);
                let other = part.blocks.start as usize..part.blocks.end as usize;
                let (q_blocks, kv_blocks) = if over.owns_queries() { (own, other) } else { (other, own) };
                let entries = part.entries.start as usize..part.entries.end as usize;
                let heads = part.heads.start as usize..part.heads.end as usize;
                let kv_entries = if self.shared() { 0..1 } else { entries.clone() };
                let kv_heads = heads.start / shape.group()..heads.end.div_ceil(shape.group());
                let of_q = [entries, heads, rows_of(shape.q_len, &q_blocks)];
                let of_kv = [kv_entries, kv_heads, rows_of(shape.kv_len, &kv_blocks)];
                let place = |role, shared, ranges: &[Range<usize>; 3]| {
                    self.place(role, self.back.call.dtype, shared, |layout| hull(layout, ranges))
                };
                let (q, dout) = (place(Role::Q, false, &of_q)?, place(Role::Dout, false, &of_q)?);
                let (k, v) = (place(Role::K, self.shared(), &of_kv)?, place(Role::V, self.shared(), &of_kv)?);
                [params.q, params.k, params.v, params.dout] = [q.1, k.1, v.1, dout.1];
                [q.0, k.0, v.0, dout.0]
            }
        };
        let own = [extent.batch.clone(), extent.heads.clone(), extent.rows.clone()];
        let dtype = self.back.call.dtype;
        let target = match target {
            Target::None => Slot::whole(Source::Unwritten),
            Target::Captured => Slot::whole(Source::Tensor(Role::Captured)),
            Target::Dq => {
                let (slot, view) = self.place(Role::Dq, dtype, false, |layout| hull(layout, &own))?;
                params.dq = view;
                slot
            }
            Target::Dkv(wanted) => {
                let [_, dk, dv] = self.gradients;
                let place = |layout: &Layout| match wanted {
                    [true, false] => hull(layout, &own),
                    [false, _] => hull(&dv, &own),
                    [true, true] => hull(layout, &own).start..hull(&dv, &own).end,
                };
                let (slot, seen) = self.place(Role::Dkv, dtype, self.shared(), place)?;
                params.dk = seen;
                // dv lies in the same buffer.
                let start = (dk.offset as u32).wrapping_sub(seen[0]);
                params.dv = view(&dv, start, self.shared());
                slot
            }
        };
        Ok(Bound { inputs, target, params })
    }

    /// The bindings of a launch that reads no tensor of the call.
    pub(super) fn unbound(&self, target: Target) -> Result<Bound> {
        let extent = self.grid(Over::Nothing, 1).extent(0, 1);
        self.bind(Over::Nothing, target, &extent, &self.touched(Over::Nothing, &extent))
    }

    /// Blocks that a workgroup goes through in a launch over this part.
    fn steps(&self, over: Over, part: &Part, bounds: Bounds) -> u32 {
        let (entries, heads, blocks) = (part.entries.len(), part.heads.len(), part.blocks.len());
        let lists = match over {
            Over::Nothing | Over::Rows => 0,
            Over::Queries | Over::KeysOfQueryHeads => 1,
            Over::QueriesOfAllHeads => entries * heads,
            Over::Keys => heads.min(self.shape().group()) * if self.shared() { entries } else { 1 },
        };
        lists.saturating_mul(blocks.min(bounds.longest as usize)).try_into().unwrap_or(u32::MAX)
    }

    /// The whole buffer where it fits, or the window of these elements.
    fn place(
        &self,
        role: Role,
        dtype: DType,
        shared: bool,
        elements: impl Fn(&Layout) -> Range<usize>,
    ) -> Result<Window> {
        let operand = self.operand(role);
        let layout = &operand.layout;
        if operand.buffer <= self.profile.limits.storage_binding || layout.is_empty() {
            return Ok((Slot::whole(Source::Tensor(role)), view(layout, 0, shared)));
        }
        window(role, &operand, dtype, shared, elements(layout), self.profile)
    }

    /// Launches over all `groups`, each of what fits and of at most `budget` multiply-adds.
    pub(super) fn pieces(
        &self,
        over: Over,
        target: Target,
        grid: &Grid,
        groups: u32,
        work: f64,
        bounds: Bounds,
    ) -> Result<Vec<Piece>> {
        let budget = bounds.work;
        let extent = grid.extent(0, groups);
        let touched = self.touched(over, &extent);
        if let (true, Ok(bound)) =
            (self.steps(over, &touched, bounds) <= bounds.most, self.bind(over, target, &extent, &touched))
        {
            let each = groups.div_ceil(((work / budget).ceil() as u32).clamp(1, groups));
            let piece = |first: u32| Piece {
                groups: first..(first + each).min(groups),
                part: None,
                accumulate: false,
                work: work * f64::from((first + each).min(groups) - first) / f64::from(groups),
                bound: bound.clone(),
            };
            return Ok((0..groups).step_by(each as usize).map(piece).collect());
        }
        let cut = Cut { bindings: self, over, target, grid, work: work / f64::from(groups), bounds };
        let mut pieces = Vec::new();
        cut.cut(0, groups, &mut pieces)?;
        Ok(pieces)
    }
}

/// Cutting the workgroups of one kernel.
struct Cut<'a> {
    bindings: &'a Bindings<'a>,
    over: Over,
    target: Target,
    grid: &'a Grid,
    /// Multiply-adds of one workgroup.
    work: f64,
    bounds: Bounds,
}

impl Cut<'_> {
    fn cut(&self, first: u32, end: u32, pieces: &mut Vec<Piece>) -> Result<()> {
        let extent = self.grid.extent(first, end);
        let touched = self.bindings.touched(self.over, &extent);
        let mut parts = Vec::new();
        let short = self.bindings.steps(self.over, &touched, self.bounds) <= self.bounds.most;
        let bound = if self.grid.one_head(first, end) {
            self.parts(&extent, touched.clone(), &mut parts)
        } else {
            let whole = self.bindings.bind(self.over, self.target, &extent, &touched);
            whole.map(|bound| parts.push((touched.clone(), bound)))
        };
        let work = self.work * f64::from(end - first) / parts.len().max(1) as f64;
        let middle = self.grid.middle(first, end);
        match (bound, middle) {
            (Ok(()), None) => {}
            (Ok(()), Some(_)) if work <= self.bounds.work && (short || self.grid.one_head(first, end)) => {}
            (_, Some(middle)) => {
                self.cut(first, middle, pieces)?;
                return self.cut(middle, end, pieces);
            }
            (Err(error), None) => return Err(error),
        }
        let whole = parts.len() == 1;
        pieces.extend(parts.into_iter().enumerate().map(|(n, (part, bound))| Piece {
            groups: first..end,
            part: (!whole).then(|| self.beyond(part, &touched)),
            accumulate: n > 0,
            work,
            bound,
        }));
        Ok(())
    }

    /// The parts of what is gone through that fit.
    fn parts(&self, extent: &Extent, part: Part, parts: &mut Vec<(Part, Bound)>) -> Result<()> {
        let long = self.bindings.steps(self.over, &part, self.bounds) > self.bounds.most;
        let both = halves(&part, self.bindings.shape().group() as u32);
        match (self.bindings.bind(self.over, self.target, extent, &part), both) {
            (Ok(bound), None) => parts.push((part, bound)),
            (Ok(bound), Some(_)) if !long => parts.push((part, bound)),
            (_, Some([first, second])) => {
                self.parts(extent, first, parts)?;
                self.parts(extent, second, parts)?;
            }
            (Err(error), None) => return Err(error),
        }
        Ok(())
    }

    /// The part with all entries and heads where it has all that are gone through: lists of others are not
    /// looked at, and tables may serve other workgroups too.
    fn beyond(&self, part: Part, touched: &Part) -> Part {
        let shape = self.bindings.shape();
        let entries = if part.entries == touched.entries { 0..shape.batch as u32 } else { part.entries };
        let heads = if part.heads == touched.heads { 0..shape.q_heads as u32 } else { part.heads };
        Part { entries, heads, ..part }
    }
}

impl Over {
    /// Whether workgroups own query rows and go through keys, or the other way round.
    pub(super) fn owns_queries(self) -> bool {
        match self {
            Self::Nothing | Self::Rows | Self::Queries | Self::QueriesOfAllHeads => true,
            Self::Keys | Self::KeysOfQueryHeads => false,
        }
    }
}

/// A part in two: by batch entries, else by kv heads, else by query heads, else by blocks.
fn halves(part: &Part, group: u32) -> Option<[Part; 2]> {
    let halves = |range: &Range<u32>, step: u32| {
        let (low, high) = (range.start / step + 1, range.end.saturating_sub(1) / step);
        let middle = (low + high.saturating_sub(low) / 2) * step;
        (low <= high).then_some([range.start..middle, middle..range.end])
    };
    if let Some(both) = halves(&part.entries, 1) {
        return Some(both.map(|entries| Part { entries, ..part.clone() }));
    }
    if let Some(both) = halves(&part.heads, group).or_else(|| halves(&part.heads, 1)) {
        return Some(both.map(|heads| Part { heads, ..part.clone() }));
    }
    halves(&part.blocks, 1).map(|both| both.map(|blocks| Part { blocks, ..part.clone() }))
}

/// From the first to the last element of these entries, heads and rows.
fn hull(layout: &Layout, [batch, heads, rows]: &[Range<usize>; 3]) -> Range<usize> {
    let last = [batch.end - 1, heads.end - 1, rows.end - 1, layout.shape[3] - 1];
    layout.index([batch.start, heads.start, rows.start, 0])..layout.index(last) + 1
}

/// The same of rows counted over heads and batch entries.
fn hull_of_rows(layout: &Layout, rows: &Range<usize>) -> Range<usize> {
    let [_, heads, len, _] = layout.shape;
    let (first, last) = (rows.start / len, (rows.end - 1) / len);
    let (mut low, mut high) = (usize::MAX, 0);
    for head in first..=last {
        let begin = if head == first { rows.start % len } else { 0 };
        let end = if head == last { (rows.end - 1) % len + 1 } else { len };
        let (b, h) = (head / heads, head % heads);
        let part = hull(layout, &[b..b + 1, h..h + 1, begin..end]);
        (low, high) = (low.min(part.start), high.max(part.end));
    }
    low..high
}
