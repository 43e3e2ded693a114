//! Plans for the gradients: row statistics first, then each gradient that is wanted, in passes of its
//! own, so that every sum has one owner.

use super::lists::{Lists, Part};
use super::parts::{Bindings, Bounds, Over, Piece, Target};
use super::{Cache, Constant, Forward, Operand, Pass, Plan, Slot, Source, SpecKey, captures, fold, lists};
use crate::error::{Error, Result};
use crate::expr::ScoreMod;
use crate::kernels::{F16, Kernel, KernelSpec, NONE, Params, Tile};
use crate::lower::{self, Home};
use crate::runtime::{Profile, Tier};
use crate::shape::{DType, Layout};
use std::collections::HashMap;
use std::sync::Arc;

/// A backward call without its buffers.
#[derive(Clone, Debug)]
pub struct Backward<'a> {
    /// The forward call whose gradients are wanted; `out` is what it gave.
    pub call: Forward<'a>,
    /// The gradient of out, `[B, Hq, L, Ev]` in out's type.
    pub dout: Operand,
    /// The lse that the forward call gave: `[B, Hq, L, 1]`, row-major f32.
    pub lse: Operand,
    /// The gradient of lse, likewise.
    pub dlse: Option<Operand>,
    /// Which gradients are computed.
    pub wanted: Wanted,
}

/// Which gradients a backward call computes. The others cost neither time nor memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Of q.
    pub q: bool,
    /// Of k.
    pub k: bool,
    /// Of v.
    pub v: bool,
    /// Of the attention sinks.
    pub sinks: bool,
    /// Of these captured float tensors that the score_mod reads.
    pub captures: Vec<String>,
}

impl Wanted {
    /// Of q, k and v.
    pub fn qkv() -> Self {
        Self { q: true, k: true, v: true, ..Self::default() }
    }

    /// Also of the attention sinks.
    pub fn sinks(self) -> Self {
        Self { sinks: true, ..self }
    }

    /// Also of the captured tensor `name`.
    pub fn capture(mut self, name: impl Into<String>) -> Self {
        self.captures.push(name.into());
        self
    }
}

/// Where the gradients of captured tensors lie in the buffer of [`super::Role::Captured`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturedPlaces {
    /// Name, shape and first f32 element of each, in the order they were wanted.
    pub tensors: Vec<(String, Vec<usize>, usize)>,
    /// Elements of the buffer, sums that the kernels keep there included. It has to be zeros.
    pub elements: usize,
}

/// A backward call, planned.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    /// The launches. Its statistics hold lse and delta of each row, then, where wanted, the gradient of
    /// the sinks: per row, and from `dsink_at` on per head.
    pub plan: Plan,
    /// Where the sinks' gradient begins in the statistics.
    pub dsink_at: usize,
    /// The layout of dk and of dv in the buffer of [`super::Role::Dkv`]. One that is not wanted has no
    /// place there.
    pub dkv: [Layout; 2],
    /// Elements of that buffer.
    pub dkv_elements: usize,
    /// The captured tensors' gradients.
    pub captured: CapturedPlaces,
}

/// Plans a backward call.
///
/// # Errors
///
/// As [`super::forward`]; [`Error::Capture`] for the gradient of a tensor that the score_mod does not
/// read as floats.
pub fn backward(back: &Backward<'_>, profile: &Profile, cache: &Cache) -> Result<BackwardPlan> {
    back.check()?;
    let call = &back.call;
    cache.check_positions(call)?;
    let shape = &call.shape;
    let wanted = &back.wanted;
    let mods = captures::Mods::new(call.mask, call.score)?;
    let packed = super::lock(&cache.captures).pack(&mods)?;
    // The gradient takes the binding of the tensor in place, which moves to that of the packed ones, and those
    // follow the tables.
    let (captured_source, beside) = match (&packed.large, &packed.constant) {
        (Some(large), beside) => (Source::Capture(large.clone()), beside.as_ref()),
        (None, Some(_)) => (Source::Constant(1), None),
        (None, None) => (Source::Unread, None),
    };
    let layout = lower::Layout {
        large: mods.layout.large.clone().filter(|_| beside.is_some()),
        crowded: beside.is_some(),
        ..mods.layout.clone()
    };
    let lists = lists::of(call, cache)?;
    let (tables, places) = lists.with_tail(call, shape);
    let tables = beside.map_or(tables.clone(), |beside| tables.followed_by(beside));
    let mut constants = vec![tables];
    constants.extend(packed.constant.clone().filter(|_| beside.is_none()));

    let places_of = |name: &String| -> Result<(String, Vec<usize>)> {
        let reads = call.score.map_or(&[][..], ScoreMod::captures);
        let found = reads.iter().find(|capture| capture.name() == name).ok_or_else(|| {
            Error::capture(name, "no gradient: the score_mod does not read a tensor of this name")
        })?;
        Ok((name.clone(), found.shape().to_vec()))
    };
    let mut captured = CapturedPlaces { tensors: Vec::new(), elements: 0 };
    for name in &wanted.captures {
        if captured.tensors.iter().any(|(known, ..)| known == name) {
            continue;
        }
        let (name, dims) = places_of(name)?;
        let first = captured.elements;
        captured.elements += dims.iter().product::<usize>();
        captured.tensors.push((name, dims, first));
    }
    let sums_at = captured.elements;

    let rows = shape.rows();
    let dsink_terms = 2 * rows;
    let dk_layout = Layout::contiguous([shape.kv_batch, shape.kv_heads, shape.kv_len, shape.head_dim])?;
    // dv follows dk, where that is wanted.
    let dv_layout = Layout::contiguous([shape.kv_batch, shape.kv_heads, shape.kv_len, shape.v_dim])?
        .at(if wanted.k { dk_layout.elements().next_multiple_of(4) } else { 0 })?;
    let dkv_elements = match (wanted.k, wanted.v) {
        (_, true) => dv_layout.end(),
        (true, false) => dk_layout.end(),
        (false, false) => 0,
    };
    let dq_layout = Layout::contiguous([shape.batch, shape.q_heads, shape.q_len, shape.head_dim])?;

    let base = Params {
        batch: shape.batch as u32,
        q_heads: shape.q_heads as u32,
        kv_heads: shape.kv_heads as u32,
        group: shape.group() as u32,
        q_len: shape.q_len as u32,
        kv_len: shape.kv_len as u32,
        q_blocks: shape.q_blocks() as u32,
        kv_blocks: shape.kv_blocks() as u32,
        mask_batch: lists.mask_batch,
        mask_heads: lists.mask_heads,
        lists: lists.lists,
        lists_t: lists.lists_t,
        q_offset_at: places.q_offset,
        kv_len_at: places.kv_len,
        sinks_at: places.sinks,
        lse_at: 0,
        max_at: NONE,
        delta_at: rows as u32,
        dlse_at: NONE,
        capture_at: NONE,
        scale: call.scale,
        ..Params::default()
    };
    let mut info = packed.info(&mods)?;
    for (name, _, first) in &captured.tensors {
        if let Some(number) = mods.layout.captures.iter().position(|decl| *decl.name == **name) {
            info[2 * number + 1][2] = *first as u32;
        }
    }

    let bindings = Bindings { back, profile, gradients: [dq_layout, dk_layout, dv_layout], dkv_elements };
    let mut builder = Passes {
        bindings,
        cache,
        lists: &lists,
        layout,
        beside,
        base,
        info,
        captured: Slot::whole(captured_source),
        constants,
        tables: HashMap::new(),
        passes: Vec::new(),
    };
    let pairs = lists.pairs(shape);
    let (head_dim, v_dim) = (shape.head_dim as f64, shape.v_dim as f64);

    let dsink_wanted = wanted.sinks && call.sinks.is_some();
    let stats = if dsink_wanted { 3 * rows + shape.q_heads } else { 2 * rows } as u64;
    fit("the row statistics", 4 * stats, profile)?;
    let terms_at = if dsink_wanted { dsink_terms as u32 } else { NONE };
    let launch = Launch {
        kernel: Kernel::Delta,
        over: Over::Rows,
        target: Target::None,
        terms: &[],
        capture_at: terms_at,
    };
    builder.add(&launch, rows as f64 * v_dim)?;
    if dsink_wanted {
        let launch = Launch { kernel: Kernel::Dsink, over: Over::Nothing, ..launch };
        builder.add(&launch, rows as f64)?;
    }
    let launch = Launch { capture_at: NONE, ..launch };
    if wanted.q {
        let kernel = builder.best(Kernel::DqSubgroup);
        let launch = Launch { kernel, over: Over::Queries, target: Target::Dq, ..launch };
        builder.add(&launch, pairs * (2.0 * head_dim + v_dim))?;
    }
    let kernel = builder.best(Kernel::DkvSubgroup);
    for wanted in builder.bindings.dkv_launches() {
        // S is computed again for either, dP for dk.
        let work = pairs
            * match wanted {
                [true, true] => 2.0 * head_dim + 2.0 * v_dim,
                [true, false] => 2.0 * head_dim + v_dim,
                [false, _] => head_dim + v_dim,
            };
        builder.add(&Launch { kernel, over: Over::Keys, target: Target::Dkv(wanted), ..launch }, work)?;
    }
    if !wanted.captures.is_empty() {
        let names: Vec<String> = captured.tensors.iter().map(|(name, ..)| name.clone()).collect();
        let counts = builder.mods(false, &names).term_counts()?;
        let launch = Launch { target: Target::Captured, terms: &names, capture_at: sums_at as u32, ..launch };
        let work = pairs * (head_dim + v_dim);
        if counts.rows + counts.pairs > 0 {
            // With pair terms one workgroup goes through all heads, so that elements which one pair
            // reads have one owner.
            let over = if counts.pairs > 0 { Over::QueriesOfAllHeads } else { Over::Queries };
            builder.add(&Launch { kernel: Kernel::CapturedRows, over, ..launch }, work)?;
        }
        if counts.columns > 0 {
            let over = Over::KeysOfQueryHeads;
            builder.add(&Launch { kernel: Kernel::CapturedColumns, over, ..launch }, work)?;
        }
        let sums = counts.rows * rows + counts.columns * shape.batch * shape.q_heads * shape.kv_len;
        if sums > 0 {
            let over = Over::Nothing;
            builder.scatter(&Launch { kernel: Kernel::CapturedScatter, over, ..launch }, sums)?;
        }
        captured.elements += sums;
    }
    let Passes { mut passes, constants, .. } = builder;
    if shape.batch == 0 {
        // Sums of nothing: the new buffers are zeros.
        passes.clear();
    }
    fit("the gradients of captured tensors", 4 * captured.elements as u64, profile)?;
    for constant in &constants {
        fit(constant.label, 4 * constant.words() as u64, profile)?;
    }
    Ok(BackwardPlan {
        plan: Plan { passes, constants, scratch: Vec::new(), stats },
        dsink_at: 3 * rows,
        dkv: [dk_layout, dv_layout],
        dkv_elements,
        captured,
    })
}

impl Backward<'_> {
    fn check(&self) -> Result<()> {
        self.call.check()?;
        let shape = &self.call.shape;
        let out = shape.out();
        if self.dout.layout.shape != out {
            return Err(Error::shape(format!(
                "dout is {:?} but out is {out:?}; they must have one shape",
                self.dout.layout.shape
            )));
        }
        self.dout.layout.check_buffer("dout", self.call.dtype, self.dout.buffer)?;
        // lse, delta and the sinks' gradient of each row, and that of each head.
        super::countable(3 * shape.rows() as u64 + shape.q_heads as u64)?;
        let rows = [out[0], out[1], out[2], 1];
        for (name, operand) in [("lse", Some(&self.lse)), ("dlse", self.dlse.as_ref())] {
            let Some(operand) = operand else { continue };
            if operand.layout.shape != rows || !operand.layout.is_contiguous() {
                return Err(Error::shape(format!(
                    "{name} is {:?} but must be {rows:?}, row-major: one value for each query row",
                    operand.layout.shape
                )));
            }
            operand.layout.check_buffer(name, DType::F32, operand.buffer)?;
        }
        if self.wanted.sinks && self.call.sinks.is_none() {
            return Err(Error::capture("sinks", "no gradient: the attention has no sinks"));
        }
        Ok(())
    }

    fn aligned(&self) -> bool {
        let layout = &self.dout.layout;
        let used = layout.shape.iter().zip(&layout.strides).take(3).filter(|&(&size, _)| size > 1);
        self.call.aligned()
            && layout.offset.is_multiple_of(4)
            && used.map(|(_, stride)| stride).all(|stride| stride.is_multiple_of(4))
    }
}

/// Refuses what has to lie in one binding and does not fit.
fn fit(what: &str, bytes: u64, profile: &Profile) -> Result<()> {
    let available = profile.limits.storage_binding.min(4 * u64::from(u32::MAX));
    if bytes <= available {
        return Ok(());
    }
    Err(Error::Limit {
        what: format!("{what} of a backward call"),
        limit: "maxStorageBufferBindingSize",
        needed: bytes,
        available,
        remedy: "take the gradients of parts of the batch or of the heads".into(),
    })
}

/// Sums that one launch of [`Kernel::CapturedScatter`] goes through, each invocation through all of them:
/// a quarter of the steps after which lavapipe ends a loop, or well under 0.5 s of a GPU.
fn most_sums(profile: &Profile) -> u32 {
    if profile.software { 1 << 14 } else { 1 << 20 }
}

/// A kernel, and what it is launched over.
#[derive(Clone, Copy)]
struct Launch<'a> {
    kernel: Kernel,
    over: Over,
    target: Target,
    /// Captured tensors whose gradients it computes.
    terms: &'a [String],
    capture_at: u32,
}

/// The launches so far, and what they share.
struct Passes<'a> {
    bindings: Bindings<'a>,
    cache: &'a Cache,
    lists: &'a Lists,
    layout: lower::Layout,
    /// Captured tensors that follow the tables.
    beside: Option<&'a Constant>,
    base: Params,
    /// Where captured tensors and scalars are, counted from the first word after the tables for those there.
    info: Vec<[u32; 4]>,
    captured: Slot,
    constants: Vec<Constant>,
    /// Where the tables of a part are among the constants, and the parameters that say what is where in them.
    tables: HashMap<(bool, Part), (usize, Params)>,
    passes: Vec<Pass>,
}

impl Passes<'_> {
    fn mods(&self, grad: bool, terms: &[String]) -> lower::Mods {
        let call = &self.bindings.back.call;
        lower::Mods {
            score: call.score.map(|score| score.expr().clone()),
            mask: call.mask.map(|mask| mask.expr().clone()),
            grad,
            terms: terms.to_vec(),
        }
    }

    /// The kernel with subgroup operations, where the tier has them and the kernel a tile.
    fn best(&self, subgroup: Kernel) -> Kernel {
        match self.bindings.profile.tier {
            Tier::Subgroup | Tier::CoopMatrix if self.tile(subgroup).is_ok() => subgroup,
            Tier::Metal | Tier::CoopMatrix | Tier::Subgroup | Tier::Portable | Tier::Cpu => {
                subgroup.portable()
            }
        }
    }

    fn tile(&self, kernel: Kernel) -> Result<Tile> {
        let Bindings { back, profile, .. } = self.bindings;
        let dims = [back.call.shape.head_dim, back.call.shape.v_dim].map(|dim| dim as u32);
        Tile::choose(kernel, back.call.dtype, dims[0], dims[1], profile)
    }

    /// The launches of a kernel, each of what a binding holds and within the budget of a submit.
    fn add(&mut self, launch: &Launch<'_>, work: f64) -> Result<()> {
        let &Launch { kernel, over, target, .. } = launch;
        let spec = self.spec(launch)?;
        let grid = self.bindings.grid(over, spec.tile_q());
        let groups = self.bindings.groups(over, &grid);
        let groups = u32::try_from(groups).map_err(|_| {
            Error::overflow(format!(
                "the {} kernel needs {groups} workgroups but they are counted in u32; split the call by batch",
                kernel.entry()
            ))
        })?;
        if groups == 0 {
            return Ok(());
        }
        let shape = &self.bindings.back.call.shape;
        let bounds = Bounds {
            work: Plan::budget(self.bindings.profile),
            most: super::most_blocks(self.bindings.profile, kernel, [shape.head_dim, shape.v_dim]),
            longest: self.lists.longest(!over.owns_queries()),
        };
        for piece in self.bindings.pieces(over, target, &grid, groups, work, bounds)? {
            let folded =
                fold(piece.groups.end - piece.groups.start, self.bindings.profile.limits.workgroups)?;
            self.push(launch, &spec, piece, folded)?;
        }
        Ok(())
    }

    /// The launches that add `sums` sums of rows and columns to the elements of captured tensors, one after
    /// the other: each element has one owner, which goes through all sums of a launch.
    fn scatter(&mut self, launch: &Launch<'_>, sums: usize) -> Result<()> {
        /// Workgroups, whose invocations own the elements.
        const GROUPS: u32 = 4;
        let sums = u32::try_from(sums).map_err(|_| {
            Error::overflow(format!(
                "captured gradients need {sums} sums but they are counted in u32; split the call by batch"
            ))
        })?;
        let spec = self.spec(launch)?;
        let bound = self.bindings.unbound(launch.target)?;
        let most = most_sums(self.bindings.profile);
        for first in (0..sums).step_by(most as usize) {
            let groups = first..first.saturating_add(most).min(sums);
            let work = f64::from(groups.end - groups.start);
            let piece = Piece { groups, part: None, accumulate: false, work, bound: bound.clone() };
            self.push(launch, &spec, piece, [GROUPS, 1, 1])?;
        }
        Ok(())
    }

    fn push(
        &mut self,
        launch: &Launch<'_>,
        spec: &Arc<KernelSpec>,
        piece: Piece,
        grid: [u32; 3],
    ) -> Result<()> {
        let (tables, base) = self.tables(launch.over, piece.part)?;
        let params = Params {
            first_group: piece.groups.start,
            groups: piece.groups.end,
            capture_at: launch.capture_at,
            accumulate: piece.accumulate.into(),
            ..piece.bound.params(base, launch.over)
        };
        let common =
            [Slot::whole(Source::Stats), Slot::whole(Source::Constant(tables)), self.captured.clone()];
        let slots = piece.bound.inputs.into_iter().chain(common).chain([piece.bound.target]).collect();
        let info = self.info_after(self.constants[tables].words() - self.beside.map_or(0, Constant::words));
        self.passes.push(Pass::new(spec, slots, params, &info, grid, piece.work));
        Ok(())
    }

    /// Where captured tensors and scalars are, with tables of so many words.
    fn info_after(&self, tables: usize) -> Vec<[u32; 4]> {
        let mut info = self.info.clone();
        for (number, decl) in self.layout.captures.iter().enumerate() {
            if self.layout.home(decl) == Home::Tables {
                info[2 * number + 1][0] += tables as u32;
            }
        }
        info
    }

    /// The tables of a part of what a kernel goes through, and the parameters that go with them.
    fn tables(&mut self, over: Over, part: Option<Part>) -> Result<(usize, Params)> {
        let Some(part) = part else { return Ok((0, self.base)) };
        let transposed = !over.owns_queries();
        if let Some(known) = self.tables.get(&(transposed, part.clone())) {
            return Ok(*known);
        }
        let call = &self.bindings.back.call;
        let within = self.lists.within(&part, transposed, &call.shape);
        let (constant, places) = within.with_tail(call, &call.shape);
        self.constants.push(self.beside.map_or(constant.clone(), |beside| constant.followed_by(beside)));
        let params = Params {
            mask_batch: within.mask_batch,
            mask_heads: within.mask_heads,
            lists: within.lists,
            lists_t: within.lists_t,
            q_offset_at: places.q_offset,
            kv_len_at: places.kv_len,
            sinks_at: places.sinks,
            ..self.base
        };
        let made = (self.constants.len() - 1, params);
        self.tables.insert((transposed, part), made);
        Ok(made)
    }

    fn spec(&self, launch: &Launch<'_>) -> Result<Arc<KernelSpec>> {
        let &Launch { kernel, terms, .. } = launch;
        let Bindings { back, profile, .. } = self.bindings;
        let call = &back.call;
        let dims = [call.shape.head_dim as u32, call.shape.v_dim as u32];
        let aligned = back.aligned();
        let native = profile.f16 && call.dtype == DType::F16 && aligned && !profile.software;
        let tile = self.tile(kernel)?;
        let f16 = if native { F16::Native } else { F16::Packed };
        let rows_only = matches!(kernel, Kernel::Delta | Kernel::Dsink);
        // Terms are derivatives of score_mod with respect to what it captures, not to the score.
        let grad = kernel.uses_score_grad();
        let mods = if rows_only { lower::Mods::default() } else { self.mods(grad, terms) };
        let dkv = if let Target::Dkv(wanted) = launch.target { wanted } else { [true; 2] };
        let metal = super::metal_loader(profile);
        let key = SpecKey {
            kernel,
            dtype: call.dtype,
            f16,
            dims,
            tile,
            metal,
            aligned,
            pooled: false,
            score: mods.score.as_ref().map(crate::expr::Expr::hash),
            mask: mods.mask.as_ref().map(crate::expr::Expr::hash),
            large: self.layout.large.clone(),
            terms: terms.to_vec(),
            dkv,
        };
        Ok(self.cache.spec_or(key, || {
            let spec = KernelSpec {
                kernel,
                dtype: call.dtype,
                f16,
                head_dim: dims[0],
                v_dim: dims[1],
                tile,
                metal: None,
                aligned,
                pooled: false,
                dkv,
                mods,
                layout: self.layout.clone(),
            };
            match metal {
                Some(loader) => spec.on_metal(loader),
                None => spec,
            }
        }))
    }
}
