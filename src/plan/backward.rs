//! Plans for the gradients: row statistics first, then each gradient that is wanted, in passes of its
//! own, so that every sum has one owner.

use super::{Cache, Forward, Operand, Pass, Plan, Role, Slot, Source, SpecKey, captures, fold, lists};
use crate::error::{Error, Result};
use crate::expr::ScoreMod;
use crate::kernels::{F16, Kernel, KernelSpec, NONE, Params, Tile};
use crate::lower;
use crate::runtime::{Profile, Tier};
use crate::shape::{DType, Layout};
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

/// Which gradients a backward call computes. The others cost nothing.
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

/// Where the gradients of captured tensors lie in the buffer of [`Role::Captured`].
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
    /// The layout of dk and of dv in the buffer of [`Role::Dkv`].
    pub dkv: [Layout; 2],
    /// The captured tensors' gradients.
    pub captured: CapturedPlaces,
}

/// Plans a backward call.
///
/// # Errors
///
/// As [`super::forward`]; [`Error::Capture`] for the gradient of a tensor that the score_mod does not
/// read as floats, [`Error::Unsupported`] when captured tensors live in host memory and on the device.
pub fn backward(back: &Backward<'_>, profile: &Profile, cache: &Cache) -> Result<BackwardPlan> {
    back.check()?;
    let call = &back.call;
    cache.check_positions(call)?;
    let shape = &call.shape;
    let wanted = &back.wanted;
    let mods = captures::Mods::new(call.mask, call.score)?;
    let packed = super::lock(&cache.captures).pack(&mods)?;
    let captured_source = match (&packed.large, &packed.constant) {
        (Some(large), Some(_)) => {
            return Err(Error::unsupported(format!(
                "captured tensor `{large}` lives on the device and others in host memory, but a backward call binds one buffer of them; keep all in host memory"
            )));
        }
        // The gradient takes the binding of the tensor in place; it moves to that of the packed ones.
        (Some(large), None) => Source::Capture(large.clone()),
        (None, Some(_)) => Source::Constant(1),
        (None, None) => Source::Unread,
    };
    let lists = lists::of(call, cache)?;
    let (tables, places) = lists.with_tail(call, shape);
    let mut constants = vec![tables];
    constants.extend(packed.constant.clone());

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
    let dv_layout = Layout::contiguous([shape.kv_batch, shape.kv_heads, shape.kv_len, shape.v_dim])?
        .at(dk_layout.elements().next_multiple_of(4))?;
    let dq_layout = Layout::contiguous([shape.batch, shape.q_heads, shape.q_len, shape.head_dim])?;

    let views = Views { profile };
    let shared = shape.kv_batch == 1;
    let (q, q_view) = views.of(Role::Q, &call.q, call.dtype, false)?;
    let (k, k_view) = views.of(Role::K, &call.k, call.dtype, shared)?;
    let (v, v_view) = views.of(Role::V, &call.v, call.dtype, shared)?;
    let (out, out_view) = views.of(Role::Out, &call.out, call.dtype, false)?;
    let (dout, dout_view) = views.of(Role::Dout, &back.dout, call.dtype, false)?;
    let (lse, lse_view) = views.of(Role::Lse, &back.lse, DType::F32, false)?;
    let (dlse, dlse_at) = match &back.dlse {
        Some(dlse) => {
            let (slot, view) = views.of(Role::Dlse, dlse, DType::F32, false)?;
            (slot, view[0])
        }
        None => (Slot::whole(Source::Unread), NONE),
    };

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
        q: q_view,
        k: k_view,
        v: v_view,
        out: out_view,
        dout: dout_view,
        dq: super::split::view(&dq_layout, 0, false),
        dk: super::split::view(&dk_layout, 0, shared),
        dv: super::split::view(&dv_layout, 0, shared),
        ..Params::default()
    };
    let mut info = packed.info(&mods)?;
    for (name, _, first) in &captured.tensors {
        if let Some(number) = mods.layout.captures.iter().position(|decl| *decl.name == **name) {
            info[2 * number + 1][2] = *first as u32;
        }
    }

    let mut builder = Passes {
        back,
        profile,
        cache,
        mods: &mods,
        info,
        passes: Vec::new(),
        common: [Slot::whole(Source::Stats), Slot::whole(Source::Constant(0)), Slot::whole(captured_source)],
    };
    let inputs = [q, k, v.clone(), dout.clone()];
    let pairs = lists.pairs(shape);
    let (head_dim, v_dim) = (shape.head_dim as f64, shape.v_dim as f64);
    let tiles = |length: usize| length.div_ceil(32) as u64;
    let heads = shape.batch as u64 * shape.q_heads as u64;

    let dsink_wanted = wanted.sinks && call.sinks.is_some();
    let terms_at = if dsink_wanted { dsink_terms as u32 } else { NONE };
    builder.add(
        Kernel::Delta,
        &[],
        [lse, dlse, out, dout],
        Slot::whole(Source::Unwritten),
        Params { lse_at: lse_view[0], dlse_at, capture_at: terms_at, ..base },
        (rows as u64).div_ceil(8),
        rows as f64 * v_dim,
    )?;
    if dsink_wanted {
        builder.add(
            Kernel::Dsink,
            &[],
            inputs.clone(),
            Slot::whole(Source::Unwritten),
            Params { capture_at: terms_at, ..base },
            shape.q_heads as u64,
            rows as f64,
        )?;
    }
    if wanted.q {
        let work = pairs * (2.0 * head_dim + v_dim);
        let target = Slot::whole(Source::Tensor(Role::Dq));
        let kernel = builder.best(Kernel::DqSubgroup, Kernel::Dq);
        let groups = builder.tiles(kernel, shape.q_len)? * heads;
        builder.add(kernel, &[], inputs.clone(), target, base, groups, work)?;
    }
    if wanted.k || wanted.v {
        // S is computed again for either, dP for dk.
        let work = pairs
            * match (wanted.k, wanted.v) {
                (true, true) => 2.0 * head_dim + 2.0 * v_dim,
                (true, false) => 2.0 * head_dim + v_dim,
                (false, _) => head_dim + v_dim,
            };
        let kernel = builder.best(Kernel::DkvSubgroup, Kernel::Dkv);
        let heads = shape.kv_heads as u64 * shape.kv_batch as u64;
        let groups = builder.tiles(kernel, shape.kv_len)? * heads;
        let target = Slot::whole(Source::Tensor(Role::Dkv));
        builder.add(kernel, &[], inputs.clone(), target, base, groups, work)?;
    }
    if !wanted.captures.is_empty() {
        let names: Vec<String> = captured.tensors.iter().map(|(name, ..)| name.clone()).collect();
        let names = &names;
        let counts = builder.mods(false, names).term_counts()?;
        let target = Slot::whole(Source::Tensor(Role::Captured));
        let params = Params { capture_at: sums_at as u32, ..base };
        let work = pairs * (head_dim + v_dim);
        if counts.rows + counts.pairs > 0 {
            // With pair terms one workgroup goes through all heads, so that elements which one pair
            // reads have one owner.
            let groups = tiles(shape.q_len) * if counts.pairs > 0 { 1 } else { heads };
            builder.add(Kernel::CapturedRows, names, inputs.clone(), target.clone(), params, groups, work)?;
        }
        if counts.columns > 0 {
            let groups = tiles(shape.kv_len) * heads;
            builder.add(
                Kernel::CapturedColumns,
                names,
                inputs.clone(),
                target.clone(),
                params,
                groups,
                work,
            )?;
        }
        let sums = counts.rows * rows + counts.columns * shape.batch * shape.q_heads * shape.kv_len;
        if sums > 0 {
            builder.add(Kernel::CapturedScatter, names, inputs, target, params, 4, sums as f64)?;
        }
        captured.elements += sums;
    }
    let passes = builder.passes;
    let stats = if dsink_wanted { 3 * rows + shape.q_heads } else { 2 * rows } as u64;
    let size = call.dtype.size() as u64;
    let (dq, dkv) = (wanted.q, wanted.k || wanted.v);
    views.fit("the row statistics", 4 * stats)?;
    views.fit("dq", if dq { dq_layout.end() as u64 * size } else { 0 })?;
    views.fit("dk and dv", if dkv { dv_layout.end() as u64 * size } else { 0 })?;
    views.fit("the gradients of captured tensors", 4 * captured.elements as u64)?;
    for constant in &constants {
        let words: usize = constant.parts.iter().map(|part| part.len()).sum();
        views.fit(constant.label, 4 * words as u64)?;
    }
    Ok(BackwardPlan {
        plan: Plan { passes, constants, scratch: Vec::new(), stats },
        dsink_at: 3 * rows,
        dkv: [dk_layout, dv_layout],
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

/// Bindings of whole tensors: gradients are not cut by what a binding may hold.
struct Views<'a> {
    profile: &'a Profile,
}

impl Views<'_> {
    /// Refuses what one binding cannot hold, and what u32 cannot count.
    fn fit(&self, what: &str, bytes: u64) -> Result<()> {
        let available = self.profile.limits.storage_binding.min(4 * u64::from(u32::MAX));
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

    fn of(&self, role: Role, operand: &Operand, dtype: DType, shared: bool) -> Result<(Slot, [u32; 4])> {
        let layout = &operand.layout;
        let limits = &self.profile.limits;
        if operand.buffer <= limits.storage_binding || layout.is_empty() {
            return Ok((Slot::whole(Source::Tensor(role)), super::split::view(layout, 0, shared)));
        }
        let size = dtype.size() as u64;
        let alignment = limits.storage_alignment.max(16);
        let offset = layout.offset as u64 * size / alignment * alignment;
        let end = (layout.end() as u64 * size).next_multiple_of(4).min(operand.buffer);
        let length = end - offset;
        self.fit(super::split::name(role), length)?;
        let view = super::split::view(layout, (offset / size) as u32, shared);
        Ok((Slot { source: Source::Tensor(role), offset, size: length }, view))
    }
}

struct Passes<'a> {
    back: &'a Backward<'a>,
    profile: &'a Profile,
    cache: &'a Cache,
    mods: &'a captures::Mods<'a>,
    info: Vec<[u32; 4]>,
    passes: Vec<Pass>,
    /// Row statistics, tables, captures.
    common: [Slot; 3],
}

impl Passes<'_> {
    fn mods(&self, grad: bool, terms: &[String]) -> lower::Mods {
        let call = &self.back.call;
        lower::Mods {
            score: call.score.map(|score| score.expr().clone()),
            mask: call.mask.map(|mask| mask.expr().clone()),
            grad,
            terms: terms.to_vec(),
        }
    }

    /// The kernel with subgroup operations, where the tier has them and the kernel a tile.
    fn best(&self, subgroup: Kernel, portable: Kernel) -> Kernel {
        match self.profile.tier {
            Tier::Subgroup | Tier::CoopMatrix if self.tile(subgroup).is_ok() => subgroup,
            Tier::Metal | Tier::CoopMatrix | Tier::Subgroup | Tier::Portable | Tier::Cpu => portable,
        }
    }

    fn tile(&self, kernel: Kernel) -> Result<Tile> {
        let shape = &self.back.call.shape;
        let dims = [shape.head_dim, shape.v_dim].map(|dim| dim as u32);
        Tile::choose(kernel, self.back.call.dtype, dims[0], dims[1], self.profile)
    }

    /// Workgroups that `length` rows of one head take.
    fn tiles(&self, kernel: Kernel, length: usize) -> Result<u64> {
        Ok((length as u64).div_ceil(self.spec(kernel, &[])?.tile_q().into()))
    }

    /// Launches of a kernel over `groups` workgroups, each within the budget of a submit.
    #[expect(clippy::too_many_arguments, reason = "what a launch is made of")]
    fn add(
        &mut self,
        kernel: Kernel,
        terms: &[String],
        inputs: [Slot; 4],
        target: Slot,
        params: Params,
        groups: u64,
        work: f64,
    ) -> Result<()> {
        let groups = u32::try_from(groups).map_err(|_| {
            Error::overflow(format!("the {} kernel needs {groups} workgroups but they are counted in u32; split the call by batch", kernel.entry()))
        })?;
        if groups == 0 {
            return Ok(());
        }
        let spec = self.spec(kernel, terms)?;
        let pieces = ((work / Plan::budget(self.profile)).ceil() as u32).clamp(1, groups);
        let each = groups.div_ceil(pieces);
        for first in (0..groups).step_by(each as usize) {
            let end = (first + each).min(groups);
            let grid = fold(end - first, self.profile.limits.workgroups)?;
            let params = Params { first_group: first, groups: end, fold: grid[0], ..params };
            let mut bytes = bytemuck::bytes_of(&params).to_vec();
            bytes.extend_from_slice(bytemuck::cast_slice(&self.info));
            let slots = inputs.iter().chain(&self.common).chain([&target]).cloned().collect();
            let work = work * f64::from(end - first) / f64::from(groups);
            self.passes.push(Pass { spec: spec.clone(), slots, params: bytes, grid, work });
        }
        Ok(())
    }

    fn spec(&self, kernel: Kernel, terms: &[String]) -> Result<Arc<KernelSpec>> {
        let call = &self.back.call;
        let dims = [call.shape.head_dim as u32, call.shape.v_dim as u32];
        let aligned = self.back.aligned();
        let native = self.profile.f16 && call.dtype == DType::F16 && aligned && !self.profile.software;
        let tile = self.tile(kernel)?;
        let f16 = if native { F16::Native } else { F16::Packed };
        let rows_only = matches!(kernel, Kernel::Delta | Kernel::Dsink);
        // Terms are derivatives of score_mod with respect to what it captures, not to the score.
        let grad = kernel.uses_score_grad();
        let mods = if rows_only { lower::Mods::default() } else { self.mods(grad, terms) };
        let wanted = &self.back.wanted;
        let dkv = match kernel {
            Kernel::Dkv | Kernel::DkvSubgroup => [wanted.k, wanted.v],
            _ => [true; 2],
        };
        let metal = super::metal_loader(self.profile);
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
            large: None,
            terms: terms.to_vec(),
            dkv,
        };
        // The capture that lives on the device takes the binding of the packed ones.
        let layout = lower::Layout { large: None, ..self.mods.layout.clone() };
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
                layout,
            };
            match metal {
                Some(loader) => spec.on_metal(loader),
                None => spec,
            }
        }))
    }
}
