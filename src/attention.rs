//! Attention as a program uses it.
//!
//! # Decoding with a cache
//!
//! One token at a time over a cache that grows; 4 query heads on 2 kv heads. Nothing is compiled after the first step.
//!
//! ```
//! use flexattn::{Attention, DType, Gpu, masks};
//!
//! # fn main() -> flexattn::Result<()> {
//! let gpu = Gpu::new()?;
//! let (q_heads, kv_heads, capacity, head_dim) = (4, 2, 16, 8);
//! let cache_k = gpu.zeros(DType::F32, [1, kv_heads, capacity, head_dim])?;
//! let cache_v = gpu.zeros(DType::F32, [1, kv_heads, capacity, head_dim])?;
//! let attention = Attention::new().mask_mod(masks::causal());
//! for n in 0..5 {
//!     // The new token's key and value become row n of each kv head.
//!     cache_k.rows(n, 1)?.write(&vec![0.1f32; kv_heads * head_dim])?;
//!     cache_v.rows(n, 1)?.write(&vec![n as f32; kv_heads * head_dim])?;
//!     let q = gpu.tensor(&vec![0.2f32; q_heads * head_dim], [1, q_heads, 1, head_dim])?;
//!     // The query is at position n, and n + 1 keys count.
//!     let step = attention.clone().q_offset(n as i32).kv_len(n as u32 + 1);
//!     let out = step.forward(&gpu, &q, &cache_k, &cache_v)?.out.read()?;
//!     // All keys are alike here, so out is the mean of the values 0 to n.
//!     assert!(out.iter().all(|x| (x - n as f32 / 2.0).abs() < 1e-5));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # The gradient of a captured table
//!
//! By the capture's name; each prebuilt score mod says what its own is called.
//!
//! ```
//! use flexattn::{Attention, Gpu, Saved, Wanted, scores};
//!
//! # fn main() -> flexattn::Result<()> {
//! let gpu = Gpu::new()?;
//! let q = gpu.tensor(&[0.0f32; 4], [1, 1, 1, 4])?;
//! let k = gpu.tensor(&[0.0f32; 8], [1, 1, 2, 4])?;
//! let v = gpu.tensor(&[0.0f32, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [1, 1, 2, 4])?;
//! // Biases of the distances -1, 0 and 1.
//! let attention = Attention::new().score_mod(scores::relative_bias(&[0.0; 3], 1, 1));
//! let output = attention.forward(&gpu, &q, &k, &v)?;
//! let dout = gpu.tensor(&[1.0f32; 4], [1, 1, 1, 4])?;
//! let saved = Saved::new(&q, &k, &v, &output)?;
//! let gradients = attention.backward(&gpu, &saved, &dout, None, &Wanted::default().capture("table"))?;
//! // Row 0 weighs both keys by 1/2; the sum of out grows with the bias of key 1 and falls with that of key 0.
//! let table = gradients.capture("table").unwrap().read()?;
//! assert!(table.iter().zip([0.0, -1.0, 1.0]).all(|(got, exact)| (got - exact).abs() < 1e-5));
//! # Ok(())
//! # }
//! ```
//!
//! # On a device and in an encoder of the program's own
//!
//! [`Gpu::from_wgpu`](crate::Gpu::from_wgpu) shares the device, [`Tensor::from_buffer`] its buffers, and
//! [`Attention::record`] submits nothing.
//!
//! ```
//! # #[cfg(feature = "wgpu")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use flexattn::{Attention, DType, Gpu, Tensor, wgpu};
//!
//! let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
//! let Ok(adapter) = pollster::block_on(instance.request_adapter(&Default::default())) else {
//!     return Ok(()); // no GPU here
//! };
//! let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
//!     required_features: Gpu::wanted_features(&adapter),
//!     required_limits: Gpu::wanted_limits(&adapter),
//!     ..Default::default()
//! }))?;
//! let gpu = Gpu::from_wgpu(&adapter, device.clone(), queue.clone())?;
//!
//! // One buffer of the program's, used as q, k and v: 1 head, 16 tokens, 8 columns.
//! let buffer = device.create_buffer(&wgpu::BufferDescriptor {
//!     label: None,
//!     size: 16 * 8 * 4,
//!     usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
//!     mapped_at_creation: false,
//! });
//! queue.write_buffer(&buffer, 0, &1.0f32.to_le_bytes().repeat(16 * 8));
//! let x = Tensor::from_buffer(&gpu, &buffer, DType::F32, 0, [1, 1, 16, 8], [16 * 8, 16 * 8, 8, 1])?;
//! let out = gpu.zeros(DType::F32, x.shape())?;
//!
//! let mut encoder = device.create_command_encoder(&Default::default());
//! // Passes recorded before this one are done before it, those after it see its result.
//! Attention::new().record(&gpu, &mut encoder, &x, &x, &x, &out)?;
//! queue.submit([encoder.finish()]);
//! assert!(out.read()?.iter().all(|x| (x - 1.0).abs() < 1e-5));
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "wgpu"))]
//! # fn main() {}
//! ```
//!
//! # Checking a mask and a score mod of one's own
//!
//! [`reference::forward`](crate::reference::forward) is the definition in f64, pair by pair.
//!
//! ```
//! use flexattn::reference::{self, Problem};
//! use flexattn::{Attention, AttentionShape, Gpu, MaskMod, ScoreMod};
//!
//! # fn main() -> flexattn::Result<()> {
//! let mask = MaskMod::new(|i| i.q().ge(i.kv()) & (i.q() - i.kv()).lt(3));
//! let score = ScoreMod::new(|s| (s.score() / 5.0).tanh() * 5.0);
//! let data: Vec<f32> = (0..2 * 10 * 8).map(|i| (i % 13) as f32 / 6.0 - 1.0).collect();
//!
//! let gpu = Gpu::new()?;
//! let x = gpu.tensor(&data, [1, 2, 10, 8])?;
//! let attention = Attention::new().mask_mod(mask.clone()).score_mod(score.clone());
//! let out = attention.forward(&gpu, &x, &x, &x)?.out.read()?;
//!
//! let shape = AttentionShape::new(x.layout(), x.layout(), x.layout())?;
//! let problem = Problem {
//!     mask_mod: Some(&mask),
//!     score_mod: Some(&score),
//!     ..Problem::new(shape, &data, &data, &data)
//! };
//! let exact = reference::forward(&problem)?.out;
//! assert!(out.iter().zip(exact).all(|(&got, exact)| (f64::from(got) - exact).abs() < 1e-5));
//! # Ok(())
//! # }
//! ```

mod backward;
mod per_batch;
mod scan;
#[cfg(all(feature = "wgpu", not(target_arch = "wasm32")))]
mod tune;
mod weights;

#[cfg(feature = "wgpu")]
pub use backward::RecordedBackward;
pub use backward::{Gradients, Saved};
pub use per_batch::PerBatch;

use crate::block_mask::BlockMask;
use crate::error::{Error, Result};
use crate::expr::{Capture, MaskMod, Scalar, ScoreMod};
use crate::plan::{self, Forward, Operand, Plan, Role};
use crate::runtime::{Dispatch, Resident, Runtime};
use crate::shape::{AttentionShape, DType, Layout, same_dtype};
use crate::tensor::{DefaultRuntime, Tensor};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// softmax(score_mod(q kᵀ · scale)) v over the pairs that mask_mod keeps.
///
/// - q `[B, Hq, L, E]`, k `[Bkv, Hkv, S, E]`, v `[Bkv, Hkv, S, Ev]`, out `[B, Hq, L, Ev]` in q's type.
///   Hkv divides Hq and query head h reads kv head `h / (Hq / Hkv)`; Bkv is B or 1.
/// - A score is `dot(q, k) * scale`, then goes through the score_mod in natural units, then counts if
///   the mask_mod keeps its pair. Masks and score mods see `q = row + q_offset`.
/// - A row that keeps nothing gives zeros, lse -inf and max -inf.
///
/// Kernels, block lists and packed captures are cached inside and shared by clones, so keep one
/// `Attention` and clone it to change lengths, offsets, captured values or scalars: nothing is
/// compiled again.
///
/// It does not drop out, does not quantise, and does not return all weights (see
/// [`Attention::weights`] for those of chosen rows).
///
/// # Example
///
/// ```
/// use flexattn::{Attention, Gpu, MaskMod};
///
/// # fn main() -> flexattn::Result<()> {
/// let gpu = Gpu::new()?;
/// let q = gpu.tensor(&[1.0f32; 2 * 4], [1, 1, 2, 4])?;
/// let v = gpu.tensor(&[1.0f32, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0], [1, 1, 2, 4])?;
/// let attention = Attention::new().mask_mod(MaskMod::new(|i| i.q().ge(i.kv())));
/// let output = attention.forward(&gpu, &q, &q, &v)?;
/// // Row 0 sees key 0 only; row 1 sees both, equally.
/// assert_eq!(output.out.read()?, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Attention {
    mask: Option<MaskMod>,
    score: Option<ScoreMod>,
    block_mask: Option<Arc<BlockMask>>,
    scale: Option<f32>,
    q_offset: PerBatch<i32>,
    kv_len: Option<PerBatch<u32>>,
    sinks: Option<Arc<[f32]>>,
    lse: bool,
    max: bool,
    splits: bool,
    cache: Arc<plan::Cache>,
}

/// What a forward call gives.
#[derive(Clone)]
pub struct Output<R: Runtime = DefaultRuntime> {
    /// `[B, Hq, L, Ev]` in q's type.
    pub out: Tensor<R>,
    /// The natural logarithm of the sum of exponentials of each row's kept scores, `[B, Hq, L, 1]` f32;
    /// -inf for a row that keeps nothing.
    pub lse: Option<Tensor<R>>,
    /// The largest kept score of each row, `[B, Hq, L, 1]` f32, natural units; -inf for a row that keeps nothing.
    pub max: Option<Tensor<R>>,
}

impl<R: Runtime> fmt::Debug for Output<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output")
            .field("out", &self.out)
            .field("lse", &self.lse)
            .field("max", &self.max)
            .finish()
    }
}

impl Default for Attention {
    fn default() -> Self {
        Self::new()
    }
}

impl Attention {
    /// Plain attention: every pair kept, scores as they are, scale 1 / sqrt(E); lse is returned, max
    /// is not.
    pub fn new() -> Self {
        Self {
            mask: None,
            score: None,
            block_mask: None,
            scale: None,
            q_offset: PerBatch::All(0),
            kv_len: None,
            sinks: None,
            lse: true,
            max: false,
            splits: true,
            cache: Arc::default(),
        }
    }

    /// Which pairs are kept. Blocks that keep nothing are skipped; there is no need to build a block
    /// mask, unless the mask reads a captured tensor on the device: see [`BlockMask::build_on`].
    pub fn mask_mod(mut self, mask: MaskMod) -> Self {
        self.mask = Some(mask);
        self
    }

    /// How scores change before the softmax.
    ///
    /// GPU kernels hold scores in f32 and base 2: below -6.9e37 they count as equal, and above 2.3e38 as infinite. Drop
    /// pairs with a mask, or a score of minus infinity, instead of adding `f32::MIN`.
    pub fn score_mod(mut self, score: ScoreMod) -> Self {
        self.score = Some(score);
        self
    }

    /// Block lists to use instead of those that would be built: imported ones, or those of a mask that reads a
    /// captured tensor on the device ([`BlockMask::build_on`]). Pairs of partial tiles are decided by
    /// the mask_mod given here, which has to be the one that the lists were built from, else by the block
    /// mask's own; a call with neither is refused, unless no tile is partial. Another mask_mod than the block
    /// mask's own, or other values of what it reads, are refused too; imported and loaded lists have none of
    /// their own, so that nothing can be said of them.
    pub fn block_mask(mut self, block_mask: impl Into<Arc<BlockMask>>) -> Self {
        self.block_mask = Some(block_mask.into());
        self
    }

    /// The factor of dot(q, k), instead of 1 / sqrt(E).
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// The position of query row 0: one for all batch entries, or one each. Masks and score mods see
    /// `q = row + q_offset`; when decoding with a cache of n keys before the new ones, it is n.
    pub fn q_offset(mut self, q_offset: impl Into<PerBatch<i32>>) -> Self {
        self.q_offset = q_offset.into();
        self
    }

    /// How many rows of k and v count (the rest of a cache is not read): one for all batch entries,
    /// or one each. At most S.
    pub fn kv_len(mut self, kv_len: impl Into<PerBatch<u32>>) -> Self {
        self.kv_len = Some(kv_len.into());
        self
    }

    /// One attention sink per query head: a score without a value, which takes part in the softmax's
    /// sum only. `out` is scaled by sigmoid(lse - sink); lse does not include the sink.
    pub fn sinks(mut self, sinks: impl Into<Arc<[f32]>>) -> Self {
        self.sinks = Some(sinks.into());
        self
    }

    /// Whether lse is returned (it is unless told otherwise; backward needs it).
    pub fn with_lse(mut self, lse: bool) -> Self {
        self.lse = lse;
        self
    }

    /// Whether the largest score of each row is returned.
    pub fn with_max(mut self, max: bool) -> Self {
        self.max = max;
        self
    }

    /// Whether few queries over many keys may be cut into parts of the keys that run side by side, as they
    /// are unless told otherwise. Without it they take the kernels of many queries: slower, and the sums
    /// then do not depend on how many parts an adapter gets.
    pub fn with_splits(mut self, splits: bool) -> Self {
        self.splits = splits;
        self
    }

    /// The same with other values of a captured tensor, in whichever of mask and score mod read it.
    /// Compiles nothing; block lists are built again only if the mask reads it. A block mask that was given is
    /// not: build that from the mask with the new values.
    ///
    /// # Errors
    ///
    /// [`Error::Capture`] when neither reads a tensor of this name, or its type or rank differ.
    pub fn with_capture(mut self, capture: impl Into<Capture>) -> Result<Self> {
        let capture = capture.into();
        let mut found = false;
        if let Some(mask) = &self.mask
            && mask.captures().iter().any(|known| known.name() == capture.name())
        {
            self.mask = Some(mask.with_capture(capture.clone())?);
            found = true;
        }
        if let Some(score) = &self.score
            && score.captures().iter().any(|known| known.name() == capture.name())
        {
            self.score = Some(score.with_capture(capture.clone())?);
            found = true;
        }
        if found {
            Ok(self)
        } else {
            Err(Error::capture(
                capture.name(),
                "neither the mask_mod nor the score_mod reads a tensor of this name",
            ))
        }
    }

    /// The same with another value of a scalar, in whichever of mask and score mod read it.
    ///
    /// # Errors
    ///
    /// [`Error::Capture`] when neither reads a scalar of this name, or its type differs.
    pub fn with_scalar(mut self, scalar: impl Into<Scalar>) -> Result<Self> {
        let scalar = scalar.into();
        let mut found = false;
        if let Some(mask) = &self.mask
            && mask.scalars().iter().any(|known| known.name() == scalar.name())
        {
            self.mask = Some(mask.with_scalar(scalar.clone())?);
            found = true;
        }
        if let Some(score) = &self.score
            && score.scalars().iter().any(|known| known.name() == scalar.name())
        {
            self.score = Some(score.with_scalar(scalar.clone())?);
            found = true;
        }
        if found {
            Ok(self)
        } else {
            Err(Error::capture(
                scalar.name(),
                "neither the mask_mod nor the score_mod reads a scalar of this name",
            ))
        }
    }

    /// What the shared caches hold: kernels, block lists, packed captures. All are bounded.
    pub fn held(&self) -> [usize; 3] {
        self.cache.held()
    }

    /// Runs attention into new tensors.
    ///
    /// The call returns once the work is submitted; reading waits for it. Long calls are cut into
    /// several submits, so that none runs into the watchdog of the system or browser.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::DType`], [`Error::Capture`], [`Error::Overflow`] and [`Error::Limit`]
    /// for input that does not fit, and those of [`Runtime::create`] and [`Runtime::run`].
    pub fn forward<R: Runtime>(
        &self,
        runtime: &R,
        q: &Tensor<R>,
        k: &Tensor<R>,
        v: &Tensor<R>,
    ) -> Result<Output<R>>
    where
        R::Buffer: Any + PartialEq,
    {
        let shape = AttentionShape::new(q.layout(), k.layout(), v.layout())?;
        let dtype = same_dtype(q.dtype(), k.dtype(), v.dtype())?;
        let out = Tensor::named(runtime, "out", dtype, shape.out())?;
        self.forward_into(runtime, q, k, v, &out)
    }

    /// Runs attention into a tensor of the program's, which may lie in the same buffer as q, k and v: in
    /// places that none of them has, or in all of q's (`out` is q, which is then overwritten).
    /// The returned `out` is that tensor.
    ///
    /// # Errors
    ///
    /// As [`Attention::forward`], [`Error::Shape`] when `out` is not `[B, Hq, L, Ev]` with distinct places,
    /// and [`Error::Buffer`] when it shares some with k, v or part of q.
    pub fn forward_into<R: Runtime>(
        &self,
        runtime: &R,
        q: &Tensor<R>,
        k: &Tensor<R>,
        v: &Tensor<R>,
        out: &Tensor<R>,
    ) -> Result<Output<R>>
    where
        R::Buffer: Any + PartialEq,
    {
        let (submits, output) = self.prepare(runtime, [q, k, v, out])?;
        for dispatches in submits {
            runtime.run(&dispatches)?;
        }
        Ok(output)
    }

    /// The launches of a call and the tensors that they will have filled: what [`Attention::forward`]
    /// runs, for programs that run them their own way. One inner list is one submit.
    ///
    /// # Errors
    ///
    /// As [`Attention::forward_into`].
    #[expect(clippy::type_complexity, reason = "a list of submits, and the tensors that they fill")]
    pub fn prepare<R: Runtime>(
        &self,
        runtime: &R,
        [q, k, v, out]: [&Tensor<R>; 4],
    ) -> Result<(Vec<Vec<Dispatch<R::Buffer>>>, Output<R>)>
    where
        R::Buffer: Any + PartialEq,
    {
        let plan = self.plan(runtime, [q, k, v, out])?;
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            // Each workgroup has read its rows of q before it writes them, unless it comes again for more columns.
            let once = out.shape()[3] <= plan::MOST_COLUMNS;
            let in_place = name == "q" && once && tensor.layout() == out.layout();
            if tensor.buffer() == out.buffer() && !in_place && out.layout().meets(tensor.layout()) {
                return Err(Error::buffer(format!(
                    "out shares places with {name}, which is read while it is written; give it its own, or, up to {} columns, all of q's",
                    plan::MOST_COLUMNS
                )));
            }
        }
        let stats = plan.create_stats(runtime)?;
        let tensor = |role| {
            let tensor = match role {
                Role::Q => q,
                Role::K => k,
                Role::V => v,
                Role::Out => out,
                Role::Dout | Role::Lse | Role::Dlse | Role::Dq | Role::Dkv | Role::Captured => {
                    return Err(Error::buffer("the plan names a tensor that a forward call does not have"));
                }
            };
            Ok(tensor.buffer().clone())
        };
        let submits =
            plan.dispatches(runtime, &tensor, stats.as_ref(), &|name| self.captured_buffer(runtime, name))?;
        let [batch, heads, rows, _] = out.shape();
        let row_values = Layout::contiguous([batch, heads, rows, 1])?;
        let stat = |wanted: bool, at: usize| -> Result<Option<Tensor<R>>> {
            match (&stats, wanted) {
                (Some(stats), true) => {
                    Tensor::from_parts(runtime, stats.clone(), DType::F32, row_values.at(at)?).map(Some)
                }
                // No rows, no buffer.
                (None, true) => Tensor::zeros(runtime, DType::F32, row_values.shape).map(Some),
                (_, false) => Ok(None),
            }
        };
        let lse = stat(self.lse, 0)?;
        let max = stat(self.max, if self.lse { batch * heads * rows } else { 0 })?;
        Ok((submits, Output { out: out.clone(), lse, max }))
    }

    /// The plan of a call: pure data, for looking at.
    ///
    /// # Errors
    ///
    /// As [`Attention::forward_into`].
    pub fn plan<R: Runtime>(&self, runtime: &R, [q, k, v, out]: [&Tensor<R>; 4]) -> Result<Plan>
    where
        R::Buffer: PartialEq,
    {
        self.with_call(runtime, [q, k, v, out], |call| plan::forward(&call, runtime.profile(), &self.cache))
    }

    /// Hands a forward call of these tensors on.
    fn with_call<R: Runtime, T>(
        &self,
        runtime: &R,
        [q, k, v, out]: [&Tensor<R>; 4],
        then: impl FnOnce(Forward<'_>) -> Result<T>,
    ) -> Result<T>
    where
        R::Buffer: PartialEq,
    {
        let shape = AttentionShape::new(q.layout(), k.layout(), v.layout())?;
        let dtype = same_dtype(q.dtype(), k.dtype(), v.dtype())?;
        if out.dtype() != dtype {
            return Err(Error::dtype(format!(
                "out is {} but q is {dtype}; they must be of one type",
                out.dtype()
            )));
        }
        let q_offset = self.q_offset.resolve("q_offset", shape.batch)?;
        let kv_len = match &self.kv_len {
            Some(kv_len) => kv_len.resolve("kv_len", shape.batch)?,
            None => vec![shape.kv_len as u32; shape.batch],
        };
        let operand =
            |tensor: &Tensor<R>| Operand { layout: *tensor.layout(), buffer: runtime.size(tensor.buffer()) };
        let own = self.block_mask.as_ref().and_then(|block_mask| block_mask.mask_mod());
        let call = Forward {
            shape,
            dtype,
            q: operand(q),
            k: operand(k),
            v: operand(v),
            out: operand(out),
            pooled: [q, k, v].iter().any(|tensor| tensor.buffer() == out.buffer()),
            scale: self.scale.unwrap_or_else(|| shape.scale()),
            q_offset: &q_offset,
            kv_len: &kv_len,
            sinks: self.sinks.as_deref(),
            mask: self.mask.as_ref().or(own),
            score: self.score.as_ref(),
            block_mask: self.block_mask.as_ref(),
            lse: self.lse,
            max: self.max,
            splits: self.splits,
        };
        then(call)
    }

    fn captured_buffer<R: Runtime>(&self, runtime: &R, name: &str) -> Result<R::Buffer>
    where
        R::Buffer: Any,
    {
        let masks = self.mask.iter().flat_map(MaskMod::captures);
        let own =
            self.block_mask.iter().filter_map(|block_mask| block_mask.mask_mod()).flat_map(MaskMod::captures);
        let mut captures = masks.chain(self.score.iter().flat_map(ScoreMod::captures)).chain(own);
        captured_buffer(runtime, &mut captures, name)
    }
}

/// Refuses a captured tensor that ends past its buffer. A size of 0 is what a buffer of another device has here; that
/// is refused where it is bound.
fn holds(size: u64, capture: &Capture, resident: &Resident) -> Result<()> {
    let end = capture.dtype().end(resident.first, capture.shape());
    if size == 0 || end <= size {
        return Ok(());
    }
    Err(Error::capture(
        capture.name(),
        format!("it ends at byte {end} but its buffer at {size}; make that larger"),
    ))
}

/// The buffer of the captured tensor `name`, which lives on the device and holds all of it.
fn captured_buffer<R: Runtime>(
    runtime: &R,
    mut captures: &mut dyn Iterator<Item = &Capture>,
    name: &str,
) -> Result<R::Buffer>
where
    R::Buffer: Any,
{
    let found = Iterator::find(&mut captures, |capture| capture.name() == name);
    let resident = found.and_then(|capture| Some((capture, plan::resident(capture)?)));
    let buffer = resident.and_then(|(_, resident)| resident.buffer.get::<R::Buffer>());
    let (Some((capture, resident)), Some(buffer)) = (resident, buffer) else {
        return Err(Error::capture(name, plan::ELSEWHERE));
    };
    holds(runtime.size(buffer), capture, resident)?;
    Ok(buffer.clone())
}

#[cfg(feature = "wgpu")]
impl Attention {
    /// Records a call into the program's own encoder and submits nothing: the program's passes before
    /// and after it are ordered as they are recorded. The parameters are this call's own, so several
    /// calls in one encoder do not disturb each other.
    ///
    /// `Recorded::work` estimates the call in multiply-adds; an encoder that holds seconds of work may
    /// be ended by the watchdog of the system.
    ///
    /// # Errors
    ///
    /// As [`Attention::forward`], and [`Error::Unsupported`] on the Cpu tier.
    pub fn record(
        &self,
        gpu: &crate::gpu::Gpu,
        encoder: &mut wgpu::CommandEncoder,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
    ) -> Result<Recorded> {
        let (submits, output) = self.prepare(gpu, [q, k, v, out])?;
        for dispatches in &submits {
            gpu.encode(encoder, dispatches)?;
        }
        let work = self.plan(gpu, [q, k, v, out])?.work();
        Ok(Recorded { output, work })
    }
}

/// A call recorded into a program's encoder.
#[cfg(feature = "wgpu")]
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The tensors that are filled once the encoder's commands have run.
    pub output: Output,
    /// Estimated work in multiply-adds.
    pub work: f64,
}

/// Attention in one call: dense or causal, with an additive bias in host memory, given with its shape
/// `[1|B, 1|Hq, L, S]`.
///
/// Where L and S differ, `causal` is aligned at the upper left (query row i sees the keys up to i), as PyTorch's
/// `is_causal` is; [`crate::masks::bottom_right_causal`] is the other one. The bias gets no gradient: with
/// [`crate::scores::dense_bias`] it does.
///
/// # Errors
///
/// As [`Attention::forward`], and [`Error::Capture`] for a bias of another shape.
///
/// # Example
///
/// ```
/// # fn main() -> flexattn::Result<()> {
/// let gpu = flexattn::Gpu::new()?;
/// let q = gpu.tensor(&[0.0f32; 8], [1, 1, 2, 4])?;
/// let v = gpu.tensor(&[1.0f32, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0], [1, 1, 2, 4])?;
/// let out = flexattn::sdpa(&gpu, &q, &q, &v, None, None, true)?;
/// assert_eq!(out.read()?, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub fn sdpa<R: Runtime>(
    runtime: &R,
    q: &Tensor<R>,
    k: &Tensor<R>,
    v: &Tensor<R>,
    mask: Option<MaskMod>,
    bias: Option<(&[f32], [usize; 4])>,
    causal: bool,
) -> Result<Tensor<R>>
where
    R::Buffer: Any + PartialEq,
{
    let shape = AttentionShape::new(q.layout(), k.layout(), v.layout())?;
    let mut attention = Attention::new().with_lse(false);
    let causal = causal.then(|| MaskMod::new(|i| i.q().ge(i.kv())));
    if let Some(mask) = match (mask, causal) {
        (Some(mask), Some(causal)) => Some(mask & causal),
        (mask, causal) => mask.or(causal),
    } {
        attention = attention.mask_mod(mask);
    }
    if let Some((values, sizes)) = bias {
        let whole = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
        let one_or = |at: usize| sizes[at] == 1 || sizes[at] == whole[at];
        if !(one_or(0) && one_or(1) && sizes[2..] == whole[2..]) {
            return Err(Error::capture(
                "bias",
                format!("its shape is {sizes:?} but must be [1|B, 1|Hq, L, S], of [B, Hq, L, S] {whole:?}"),
            ));
        }
        let bias = Capture::f32("bias", values, &sizes)?;
        if !values.is_empty() {
            // An index past a dimension of 1 is clamped to it, which is what broadcasting means.
            attention = attention
                .score_mod(ScoreMod::new(|s| s.score() + bias.at([s.batch(), s.head(), s.q(), s.kv()])));
        }
    }
    Ok(attention.forward(runtime, q, k, v)?.out)
}
