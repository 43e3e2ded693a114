//! From a call to launches: which kernels, which bytes of which buffers, which parameters, which grid.
//!
//! A [`Plan`] is pure data. It is made without a GPU, for any [`Profile`], and holds nothing of a
//! runtime; [`Plan::dispatches`] turns it into launches once buffers are there. Three rules shape it:
//!
//! - What may change from call to call (lengths, strides, scale, offsets, captured values, scalars) is
//!   parameters, never kernel text. The one exception is the alignment class of the tensors.
//! - A binding is at most as long as the device allows. Larger tensors are bound window by window:
//!   the launches then cover ranges of batch entries, heads or query rows, and views of tensors count
//!   from the window's start (in wrapping u32, so kernels keep their absolute indices).
//! - A submit stays under about half a second of work, since operating systems and browsers end
//!   longer ones.

mod backward;
mod captures;
mod columns;
mod decode;
mod lists;
mod merge;
mod parts;
mod scan;
mod split;

use crate::error::{Error, Result};
use crate::expr::{Env, IndexBox, Input, MaskMod, ScoreMod};
use crate::kernels::{F16, Kernel, KernelSpec, Loader, NONE, Params, Tile};
use crate::runtime::{Binding, Dispatch, Profile, Runtime, Tier, Usage};
use crate::shape::{AttentionShape, DType, Layout};
use crate::{BlockMask, lower};
pub(crate) use captures::{ELSEWHERE, resident};
pub(crate) use columns::MOST as MOST_COLUMNS;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use xxhash_rust::xxh3::Xxh3;

pub use backward::{Backward, BackwardPlan, CapturedPlaces, Wanted, backward};
pub(crate) use scan::scan;

/// A forward call without its buffers.
#[derive(Clone, Debug)]
pub struct Forward<'a> {
    /// The sizes.
    pub shape: AttentionShape,
    /// Element type of q, k, v and out.
    pub dtype: DType,
    /// q `[B, Hq, L, E]`.
    pub q: Operand,
    /// k `[Bkv, Hkv, S, E]`.
    pub k: Operand,
    /// v `[Bkv, Hkv, S, Ev]`.
    pub v: Operand,
    /// out `[B, Hq, L, Ev]`.
    pub out: Operand,
    /// out lies in a buffer that q, k or v lies in too.
    pub pooled: bool,
    /// Factor of dot(q, k).
    pub scale: f32,
    /// Position of query row 0 of each batch entry.
    pub q_offset: &'a [i32],
    /// Keys that count, of each batch entry; at most S.
    pub kv_len: &'a [u32],
    /// One attention sink per query head.
    pub sinks: Option<&'a [f32]>,
    /// Which pairs are kept.
    pub mask: Option<&'a MaskMod>,
    /// How scores change.
    pub score: Option<&'a ScoreMod>,
    /// Lists to use instead of those built from `mask`.
    pub block_mask: Option<&'a Arc<BlockMask>>,
    /// Whether the log-sum-exp of each row is wanted.
    pub lse: bool,
    /// Whether the maximum of each row is wanted.
    pub max: bool,
    /// Whether few queries over many keys are cut into parts of the keys.
    pub splits: bool,
}

/// A tensor's place, and the size of the buffer that it lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Where the elements lie.
    pub layout: Layout,
    /// Bytes of the buffer.
    pub buffer: u64,
}

/// What a runtime has to do for one call.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The launches, in order.
    pub passes: Vec<Pass>,
    /// Read-only buffers, with their content.
    pub constants: Vec<Constant>,
    /// Buffers for values that live within the call.
    pub scratch: Vec<Scratch>,
    /// Elements of the statistics buffer: lse `[B, Hq, L]`, then max `[B, Hq, L]`, as far as wanted.
    pub stats: u64,
}

/// One launch.
#[derive(Clone, Debug)]
pub struct Pass {
    /// The kernel.
    pub spec: Arc<KernelSpec>,
    /// What its storage bindings are, in order.
    pub slots: Vec<Slot>,
    /// Its uniform block.
    pub params: Vec<u8>,
    /// Workgroups along x, y, z.
    pub grid: [u32; 3],
    /// Estimated work, in multiply-adds.
    pub work: f64,
}

impl Pass {
    /// A launch over a folded grid, of which `params` is told; `info` says where captured tensors and scalars are.
    fn new(
        spec: &Arc<KernelSpec>,
        slots: Vec<Slot>,
        params: Params,
        info: &[[u32; 4]],
        grid: [u32; 3],
        work: f64,
    ) -> Self {
        let params = Params { fold: grid[0], ..params };
        let mut bytes = bytemuck::bytes_of(&params).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(info));
        Self { spec: spec.clone(), slots, params: bytes, grid, work }
    }
}

/// A range of a buffer of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Which buffer.
    pub source: Source,
    /// First byte.
    pub offset: u64,
    /// Bytes; 0 for all of the buffer.
    pub size: u64,
}

/// The buffers of a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A tensor of the call.
    Tensor(Role),
    /// The statistics that the call returns.
    Stats,
    /// One of [`Plan::constants`].
    Constant(usize),
    /// One of [`Plan::scratch`].
    Scratch(usize),
    /// A captured tensor that lives on the device, by name.
    Capture(Arc<str>),
    /// Nothing that the kernel reads.
    Unread,
    /// Nothing that the kernel writes.
    Unwritten,
}

/// What a tensor is to the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The result.
    Out,
    /// The gradient of the result.
    Dout,
    /// lse, as the forward call gave it.
    Lse,
    /// The gradient of lse.
    Dlse,
    /// The gradient of the queries.
    Dq,
    /// The gradients of keys and values, one after the other.
    Dkv,
    /// The gradients of captured tensors, and sums on their way there.
    Captured,
}

/// A read-only buffer and its content.
#[derive(Clone, Debug)]
pub struct Constant {
    /// What it is, for labels.
    pub label: &'static str,
    /// A hash of the content.
    pub key: u128,
    /// The words, in pieces that follow each other.
    pub parts: Vec<Arc<[u32]>>,
}

impl Constant {
    fn words(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// Both in one buffer.
    fn followed_by(&self, other: &Self) -> Self {
        let mut hash = Xxh3::new();
        hash.update(&self.key.to_le_bytes());
        hash.update(&other.key.to_le_bytes());
        let parts = self.parts.iter().chain(&other.parts).cloned().collect();
        Self { label: self.label, key: hash.digest128(), parts }
    }
}

/// A buffer for values that live within one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// What it is; calls share scratch of one label.
    pub label: &'static str,
    /// Bytes.
    pub bytes: u64,
}

impl Slot {
    fn whole(source: Source) -> Self {
        Self { source, offset: 0, size: 0 }
    }
}

/// What calls of one [`Attention`](crate::Attention) share: kernels, block lists, packed captures.
/// Bounded, and thread-safe.
#[derive(Debug, Default)]
pub struct Cache {
    specs: Mutex<HashMap<SpecKey, Arc<KernelSpec>>>,
    lists: Mutex<lists::Cache>,
    captures: Mutex<captures::Cache>,
    /// Calls whose index expressions were found good, by what decides that.
    positions: Mutex<HashSet<Vec<u128>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How the Metal kernels load on this adapter, where they run.
fn metal_loader(profile: &Profile) -> Option<Loader> {
    let loader = if profile.load_direct { Loader::Direct } else { Loader::Staged };
    (profile.tier == Tier::Metal).then_some(loader)
}

impl Cache {
    /// Kernels, block lists and packed captures held, for tests and reports.
    pub fn held(&self) -> [usize; 3] {
        [lock(&self.specs).len(), lock(&self.lists).len(), lock(&self.captures).len()]
    }
}

/// What decides a kernel's text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SpecKey {
    kernel: Kernel,
    dtype: DType,
    f16: F16,
    dims: [u32; 2],
    tile: Tile,
    metal: Option<Loader>,
    aligned: bool,
    pooled: bool,
    score: Option<u128>,
    mask: Option<u128>,
    large: Option<String>,
    terms: Vec<String>,
    dkv: [bool; 2],
}

/// Plans a forward call.
///
/// # Errors
///
/// [`Error::Shape`], [`Error::Capture`], [`Error::Overflow`], [`Error::Limit`] and
/// [`Error::Unsupported`], each naming what the call has and what it may have.
pub fn forward(call: &Forward<'_>, profile: &Profile, cache: &Cache) -> Result<Plan> {
    call.check()?;
    cache.check_positions(call)?;
    if call.shape.v_dim > columns::MOST {
        return columns::sliced(call, profile, cache);
    }
    let shape = &call.shape;
    let mods = captures::Mods::new(call.mask, call.score)?;
    let packed = lock(&cache.captures).pack(&mods)?;
    let lists = lists::of(call, cache)?;
    let mut constants = Vec::new();
    let (tables, places) = lists.with_tail(call, shape);
    constants.push(tables);
    let captures = packed.constant.clone().map(|constant| {
        constants.push(constant);
        Source::Constant(constants.len() - 1)
    });

    let rows = shape.rows() as u64;
    let lse_at = if call.lse { 0 } else { NONE };
    let max_at = match (call.max, call.lse) {
        (false, _) => NONE,
        (true, false) => 0,
        (true, true) => rows as u32,
    };
    let stats = rows * (u64::from(call.lse) + u64::from(call.max));

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
        lse_at,
        max_at,
        delta_at: NONE,
        dlse_at: NONE,
        scale: call.scale,
        ..Params::default()
    };
    let info = packed.info(&mods)?;
    let last = [
        Slot::whole(if stats > 0 { Source::Stats } else { Source::Unwritten }),
        Slot::whole(Source::Constant(0)),
        Slot::whole(captures.unwrap_or(Source::Unread)),
        Slot::whole(packed.large.clone().map_or(Source::Unread, Source::Capture)),
    ];
    let work = lists.pairs(shape) * (shape.head_dim + shape.v_dim) as f64;

    if decode::applies(call, profile) {
        let [split, combine] = decode::kernels(call, profile);
        let split = cache.spec(call, Some(&mods), split, profile)?;
        let parts = decode::parts(call, profile, &split);
        if let Some(piece) = decode::whole(call, profile, &parts, work) {
            let combine = cache.spec(call, None, combine, profile)?;
            let launches = decode::Launches { profile, parts, piece, base, info: &info, slots: last };
            let (passes, scratch) = launches.passes(split, combine)?;
            return Ok(Plan { passes, constants, scratch: vec![scratch], stats });
        }
    }

    let spec = cache.spec(call, Some(&mods), forward_kernel(call, profile), profile)?;
    let tile_q = spec.tile_q();
    let tiles = (shape.q_len as u64).div_ceil(u64::from(tile_q));
    let groups = u32::try_from(tiles * shape.q_heads as u64 * shape.batch as u64).map_err(|_| {
        Error::overflow(format!(
            "q_len {} in tiles of {tile_q}, {} heads and batch {} make more than 2^32 workgroups; split the call by batch",
            shape.q_len, shape.q_heads, shape.batch
        ))
    })?;

    let grid = split::Grid { heads: shape.q_heads, group: shape.group(), rows: shape.q_len, tile: tile_q };
    let most = most_blocks(profile, spec.kernel, [shape.head_dim, shape.v_dim]);
    let most_blocks = if lists.longest(false) > most { most } else { u32::MAX };
    let cutter = split::Cutter { call, profile, grid, groups, work, may_range: true, most_blocks };
    let mut passes = Vec::new();
    let mut merge = None;
    for piece in cutter.pieces()? {
        if !piece.ranges.is_empty() {
            let merge = match &mut merge {
                Some(merge) => merge,
                none => none.insert(merge::Merge {
                    call,
                    lists: &lists,
                    base,
                    info: &info,
                    slots: last.clone(),
                    spec: cache.spec(call, None, merge::KERNEL, profile)?,
                    tables: HashMap::new(),
                    bytes: [0; 2],
                }),
            };
            passes.extend(merge.passes(&cutter, &piece, &spec, &mut constants)?);
            continue;
        }
        let mut params = Params { groups: piece.end, first_group: piece.first, ..base };
        let grid = fold(piece.end - piece.first, profile.limits.workgroups)?;
        let mut slots = Vec::with_capacity(8);
        for (role, view) in [
            (Role::Q, &mut params.q),
            (Role::K, &mut params.k),
            (Role::V, &mut params.v),
            (Role::Out, &mut params.out),
        ] {
            let (slot, placed) = piece.window(role);
            *view = placed;
            slots.push(slot);
        }
        slots.extend(last.iter().cloned());
        passes.push(Pass::new(&spec, slots, params, &info, grid, piece.work));
    }
    Ok(Plan { passes, constants, scratch: merge.map_or(Vec::new(), |merge| merge.scratch()), stats })
}

/// The forward kernel of a tier, as far as it has a tile for these dims.
fn forward_kernel(call: &Forward<'_>, profile: &Profile) -> Kernel {
    let dims = [call.shape.head_dim, call.shape.v_dim].map(|dim| dim as u32);
    let fits = |kernel| Tile::choose(kernel, call.dtype, dims[0], dims[1], profile).is_ok();
    match profile.tier {
        Tier::CoopMatrix if fits(Kernel::ForwardCoop) => Kernel::ForwardCoop,
        Tier::Subgroup | Tier::CoopMatrix if fits(Kernel::ForwardSubgroup) => Kernel::ForwardSubgroup,
        Tier::Metal | Tier::CoopMatrix | Tier::Subgroup | Tier::Portable | Tier::Cpu => Kernel::Forward,
    }
}

/// Blocks that one workgroup of a kernel without subgroup operations may go through in one launch, where the
/// adapter is a CPU. lavapipe ends the loops of an invocation, all together, after 65,535 steps, and gives
/// wrong numbers from there on. Measured on Mesa 22.3: forward is right up to 16,384 keys at head dims of 64
/// and 128, the gradients up to 12,288 at 64, under 4,096 at 128 and about 1,056 at 264, where they stage
/// rows by chunks. Two thirds of that and less is taken.
fn most_blocks(profile: &Profile, kernel: Kernel, dims: [usize; 2]) -> u32 {
    let dim = dims[0].max(dims[1]).max(1) as u32;
    match kernel {
        _ if !profile.software || profile.tier == Tier::Cpu => u32::MAX,
        Kernel::Forward | Kernel::DecodeSplit => (64 * 64 / dim).clamp(1, 64),
        Kernel::Dq | Kernel::Dkv | Kernel::CapturedRows | Kernel::CapturedColumns => {
            if dim <= 64 {
                64
            } else {
                (8 * 128 / dim).max(1)
            }
        }
        _ => u32::MAX,
    }
}

/// Refuses row statistics that kernels could not index.
fn countable(statistics: u64) -> Result<()> {
    if statistics <= u64::from(u32::MAX) {
        return Ok(());
    }
    Err(Error::overflow(format!(
        "the call has {statistics} row statistics but they are indexed by u32; split it by batch or head"
    )))
}

/// `groups` workgroups as a grid of at most `limit` a side.
fn fold(groups: u32, limit: u32) -> Result<[u32; 3]> {
    let limit = limit.max(1);
    let x = groups.min(limit);
    let y = groups.div_ceil(x.max(1));
    if y > limit {
        return Err(Error::Limit {
            what: format!("{groups} workgroups"),
            limit: "maxComputeWorkgroupsPerDimension",
            needed: y.into(),
            available: limit.into(),
            remedy: "split the call by batch or head".into(),
        });
    }
    Ok([x, y, 1])
}

impl Forward<'_> {
    fn check(&self) -> Result<()> {
        let shape = &self.shape;
        shape.check_out(&self.out.layout)?;
        for (name, operand) in [("q", &self.q), ("k", &self.k), ("v", &self.v), ("out", &self.out)] {
            operand.layout.check_buffer(name, self.dtype, operand.buffer)?;
        }
        countable(shape.rows() as u64 * (u64::from(self.lse) + u64::from(self.max)))?;
        let sinks = self.sinks.into_iter().flatten().map(|&sink| ("a sink", sink));
        let mut numbers = sinks.chain([("scale", self.scale)]);
        if let Some((name, number)) = numbers.find(|(_, number)| !number.is_finite()) {
            return Err(Error::shape(format!("{name} is {number} but must be finite")));
        }
        if self.q_offset.len() != shape.batch || self.kv_len.len() != shape.batch {
            return Err(Error::shape(format!(
                "there are {} q_offset and {} kv_len but batch is {}; give one for each batch entry, or one for all",
                self.q_offset.len(),
                self.kv_len.len(),
                shape.batch
            )));
        }
        for (b, &kv_len) in self.kv_len.iter().enumerate() {
            if kv_len as usize > shape.kv_len {
                return Err(Error::shape(format!(
                    "kv_len of batch entry {b} is {kv_len} but k has {} rows; it must be at most that",
                    shape.kv_len
                )));
            }
        }
        for &offset in self.q_offset {
            if offset.checked_add(shape.q_len as i32).is_none() {
                return Err(Error::overflow(format!(
                    "q_offset {offset} plus q_len {} is past i32, which masks see positions as; use smaller offsets",
                    shape.q_len
                )));
            }
        }
        if let Some(sinks) = self.sinks
            && sinks.len() != shape.q_heads
        {
            return Err(Error::shape(format!(
                "there are {} sinks but q_heads is {}; give one for each query head",
                sinks.len(),
                shape.q_heads
            )));
        }
        Ok(())
    }

    /// Every offset and stride that is used, and both dims, are multiples of 4 elements.
    fn aligned(&self) -> bool {
        let places = [&self.q, &self.k, &self.v, &self.out].into_iter().all(|operand| {
            let layout = &operand.layout;
            let used = layout.shape.iter().zip(&layout.strides).take(3).filter(|&(&size, _)| size > 1);
            layout.offset.is_multiple_of(4)
                && used.map(|(_, stride)| stride).all(|stride| stride.is_multiple_of(4))
        });
        places && self.shape.head_dim.is_multiple_of(4) && self.shape.v_dim.is_multiple_of(4)
    }

    fn operand(&self, role: Role) -> &Operand {
        match role {
            Role::Q => &self.q,
            Role::K => &self.k,
            Role::V => &self.v,
            // A forward call has no other tensor.
            Role::Out | Role::Dout | Role::Lse | Role::Dlse | Role::Dq | Role::Dkv | Role::Captured => {
                &self.out
            }
        }
    }
}

impl Cache {
    const MAX_SPECS: usize = 64;

    /// Refuses index expressions that overflow, and captured tensors that no position reaches. Looked at
    /// again when lengths have doubled, not at every step of decoding.
    fn check_positions(&self, call: &Forward<'_>) -> Result<()> {
        let shape = &call.shape;
        let first = call.q_offset.iter().copied().min().unwrap_or(0);
        let last = call.q_offset.iter().copied().max().unwrap_or(0).saturating_add(shape.q_len as i32 - 1);
        let sizes = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
        if sizes.contains(&0) {
            return Ok(());
        }
        let at = IndexBox {
            b: (0, shape.batch as i32 - 1),
            h: (0, shape.q_heads as i32 - 1),
            q: (first, last),
            kv: (0, shape.kv_len as i32 - 1),
        };
        let mods = [
            call.mask.map(|mask| (mask.expr(), mask.captures(), mask.scalars())),
            call.score.map(|score| (score.expr(), score.captures(), score.scalars())),
        ];
        for (expr, captures, scalars) in mods.into_iter().flatten() {
            let mut of = vec![expr.hash(), shape.batch as u128, shape.q_heads as u128];
            let mut hashes = lock(&self.captures);
            of.extend(captures.iter().map(|capture| hashes.content(capture)));
            drop(hashes);
            of.extend(scalars.iter().map(|scalar| u128::from(scalar.value().bits())));
            let lengths = [shape.q_len, shape.kv_len].map(|len| len as u128);
            let reads_lengths = [Input::QLen, Input::KvLen].iter().any(|len| expr.inputs().contains(*len));
            of.extend(lengths.iter().filter(|_| reads_lengths));
            let key = |at: &IndexBox| -> Vec<u128> {
                let ends = [at.q.0, at.q.1, at.kv.1].map(|end| end as u128);
                of.iter().copied().chain(ends).collect()
            };
            // Lengths grow by one at each step of decoding: what holds up to the next power of two is settled
            // until then.
            let up = |end: i32| end.max((end.unsigned_abs().next_power_of_two().min(1 << 30)) as i32);
            let wide = IndexBox { q: (first.min(0), up(last)), kv: (0, up(at.kv.1)), ..at };
            let is_known = {
                let positions = lock(&self.positions);
                positions.contains(&key(&wide)) || positions.contains(&key(&at))
            };
            if is_known {
                continue;
            }
            let env = Env::new(captures, scalars, shape.q_len, shape.kv_len)?;
            let settled = expr.is_settled(&env, &wide);
            if !settled {
                expr.check(&env, &at)?;
            }
            let mut positions = lock(&self.positions);
            if positions.len() >= Self::MAX_SPECS {
                positions.clear();
            }
            positions.insert(key(if settled { &wide } else { &at }));
        }
        Ok(())
    }

    /// The kernel of a call, with its mods or without any.
    fn spec(
        &self,
        call: &Forward<'_>,
        mods: Option<&captures::Mods<'_>>,
        kernel: Kernel,
        profile: &Profile,
    ) -> Result<Arc<KernelSpec>> {
        let dims = [call.shape.head_dim as u32, call.shape.v_dim as u32];
        let aligned = call.aligned();
        let pooled = call.pooled && kernel.is_forward();
        let (score, mask) = (call.score.filter(|_| mods.is_some()), call.mask.filter(|_| mods.is_some()));
        // On the CPU behind a GPU interface, unpacking words beats 16-bit loads (measured: 1.6x).
        let native = profile.f16 && call.dtype == DType::F16 && aligned && !profile.software;
        let mut tile = Tile::choose(kernel, call.dtype, dims[0], dims[1], profile)?;
        if kernel == Kernel::DecodeSubgroup {
            // No more packed rows than there are.
            tile.rows = tile.rows.min((call.shape.group() * call.shape.q_len).next_power_of_two() as u32);
        }
        let key = SpecKey {
            kernel,
            dtype: call.dtype,
            f16: if native { F16::Native } else { F16::Packed },
            dims,
            tile,
            metal: metal_loader(profile),
            aligned,
            pooled,
            score: score.map(ScoreMod::hash),
            mask: mask.map(MaskMod::hash),
            large: mods.and_then(|mods| mods.large.as_deref()).map(str::to_owned),
            terms: Vec::new(),
            dkv: [true; 2],
        };
        let (f16, tile, metal) = (key.f16, key.tile, key.metal);
        Ok(self.spec_or(key, || {
            let spec = KernelSpec {
                kernel,
                dtype: call.dtype,
                f16,
                head_dim: dims[0],
                v_dim: dims[1],
                tile,
                metal: None,
                aligned,
                pooled,
                dkv: [true; 2],
                mods: lower::Mods {
                    score: score.map(|score| score.expr().clone()),
                    mask: mask.map(|mask| mask.expr().clone()),
                    ..lower::Mods::default()
                },
                layout: mods.map_or_else(lower::Layout::default, |mods| mods.layout.clone()),
            };
            match metal {
                Some(loader) => spec.on_metal(loader),
                None => spec,
            }
        }))
    }

    /// The kernel of this key, made if it is not there.
    fn spec_or(&self, key: SpecKey, make: impl FnOnce() -> KernelSpec) -> Arc<KernelSpec> {
        let mut specs = lock(&self.specs);
        if let Some(found) = specs.get(&key) {
            return found.clone();
        }
        let spec = Arc::new(make());
        if specs.len() >= Self::MAX_SPECS {
            specs.clear();
        }
        specs.insert(key, spec.clone());
        spec
    }
}

impl Plan {
    /// Multiply-adds of one submit at most: about half a second on a slow device of the kind. No
    /// watchdog looks at the Cpu tier.
    pub fn budget(profile: &Profile) -> f64 {
        match (profile.tier, profile.software) {
            (Tier::Cpu, _) => f64::INFINITY,
            (_, true) => 1e9,
            (_, false) => 3e10,
        }
    }

    /// Estimated work of the whole call, in multiply-adds.
    pub fn work(&self) -> f64 {
        self.passes.iter().map(|pass| pass.work).sum()
    }

    /// The launches on the runtime's buffers, one list a submit. `tensor` and `capture` give the
    /// buffers of the call, `stats` is the statistics buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Runtime::create`], and [`Error::Limit`] for a captured tensor whose buffer is longer than a
    /// binding.
    pub fn dispatches<R: Runtime>(
        &self,
        runtime: &R,
        tensor: &dyn Fn(Role) -> Result<R::Buffer>,
        stats: Option<&R::Buffer>,
        capture: &dyn Fn(&str) -> Result<R::Buffer>,
    ) -> Result<Vec<Vec<Dispatch<R::Buffer>>>> {
        let constants = self
            .constants
            .iter()
            .map(|constant| {
                runtime.constant(constant.key, constant.label, || {
                    constant
                        .parts
                        .iter()
                        .flat_map(|part| bytemuck::cast_slice::<u32, u8>(part))
                        .copied()
                        .collect()
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let scratch = self
            .scratch
            .iter()
            .map(|scratch| runtime.scratch(scratch.label, scratch.bytes))
            .collect::<Result<Vec<_>>>()?;
        let budget = Self::budget(runtime.profile());
        let mut submits = Vec::new();
        let mut submit = Vec::new();
        let mut work = 0.0;
        for pass in &self.passes {
            if !submit.is_empty() && work + pass.work > budget {
                submits.push(std::mem::take(&mut submit));
                work = 0.0;
            }
            work += pass.work;
            let mut bindings = Vec::with_capacity(pass.slots.len());
            for slot in &pass.slots {
                let buffer = match &slot.source {
                    Source::Tensor(role) => tensor(*role)?,
                    Source::Stats => match stats {
                        Some(stats) => stats.clone(),
                        None => runtime.scratch("unwritten", 16)?,
                    },
                    Source::Constant(at) => constants[*at].clone(),
                    Source::Scratch(at) => scratch[*at].clone(),
                    Source::Capture(name) => {
                        let buffer = capture(name)?;
                        captures::bindable(name, runtime.size(&buffer), runtime.profile())?;
                        buffer
                    }
                    Source::Unread => runtime.constant(0, "unread", || vec![0; 16])?,
                    Source::Unwritten => runtime.scratch("unwritten", 16)?,
                };
                let size = if slot.size == 0 { runtime.size(&buffer) - slot.offset } else { slot.size };
                bindings.push(Binding { buffer, offset: slot.offset, size });
            }
            submit.push(Dispatch {
                spec: pass.spec.clone(),
                bindings,
                params: pass.params.clone(),
                grid: pass.grid,
            });
        }
        if !submit.is_empty() {
            submits.push(submit);
        }
        Ok(submits)
    }

    /// The statistics buffer that the call writes.
    ///
    /// # Errors
    ///
    /// Those of [`Runtime::create`].
    pub fn create_stats<R: Runtime>(&self, runtime: &R) -> Result<Option<R::Buffer>> {
        if self.stats == 0 {
            return Ok(None);
        }
        runtime.create("lse and max", 4 * self.stats, Usage::Tensor).map(Some)
    }
}

#[cfg(test)]
mod tests;
