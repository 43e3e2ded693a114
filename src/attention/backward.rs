//! Gradients of an attention call.

use super::{Attention, Output};
use crate::error::{Error, Result};
use crate::plan::{self, Backward, BackwardPlan, Operand, Role, Wanted};
use crate::runtime::{Dispatch, Runtime, Usage};
use crate::shape::{DType, Layout};
use crate::tensor::{DefaultRuntime, Tensor};
use std::any::Any;
use std::fmt;

/// What a backward call needs of its forward call: the tensors it read, and out and lse. Nothing of
/// size L x S is kept.
#[derive(Clone)]
pub struct Saved<R: Runtime = DefaultRuntime> {
    q: Tensor<R>,
    k: Tensor<R>,
    v: Tensor<R>,
    out: Tensor<R>,
    lse: Tensor<R>,
}

impl<R: Runtime> fmt::Debug for Saved<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saved")
            .field("q", &self.q)
            .field("k", &self.k)
            .field("v", &self.v)
            .finish_non_exhaustive()
    }
}

impl<R: Runtime> Saved<R> {
    /// The tensors of a forward call and what it gave.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when the output has no lse: [`Attention::with_lse`] was told not to.
    pub fn new(q: &Tensor<R>, k: &Tensor<R>, v: &Tensor<R>, output: &Output<R>) -> Result<Self> {
        let lse = output.lse.clone().ok_or_else(|| {
            Error::shape(
                "the output has no lse, which gradients need; do not turn it off with with_lse(false)",
            )
        })?;
        Ok(Self { q: q.clone(), k: k.clone(), v: v.clone(), out: output.out.clone(), lse })
    }
}

/// The gradients of a backward call; those that were not wanted are absent.
#[derive(Clone)]
pub struct Gradients<R: Runtime = DefaultRuntime> {
    /// Of q, `[B, Hq, L, E]` in q's type.
    pub dq: Option<Tensor<R>>,
    /// Of k, `[Bkv, Hkv, S, E]`: summed over the query heads that share a kv head and, when Bkv is 1,
    /// over the batch.
    pub dk: Option<Tensor<R>>,
    /// Of v, `[Bkv, Hkv, S, Ev]`, summed likewise.
    pub dv: Option<Tensor<R>>,
    /// Of the attention sinks, `[1, 1, 1, Hq]` f32.
    pub dsinks: Option<Tensor<R>>,
    /// Of captured tensors by name, f32, with the tensor's dimensions at the end of the shape.
    pub captures: Vec<(String, Tensor<R>)>,
}

impl<R: Runtime> fmt::Debug for Gradients<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gradients")
            .field("dq", &self.dq)
            .field("dk", &self.dk)
            .field("dv", &self.dv)
            .finish_non_exhaustive()
    }
}

impl<R: Runtime> Gradients<R> {
    /// The gradient of the captured tensor `name`.
    pub fn capture(&self, name: &str) -> Option<&Tensor<R>> {
        self.captures.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor)
    }
}

impl Attention {
    /// The gradients of `sum(out * dout) + sum(lse * dlse)`.
    ///
    /// With delta = rowsum(out * dout), P = exp(score_mod(S) - lse) and dP = dout vᵀ (FlashAttention-2,
    /// arXiv 2307.08691, algorithm 2): dPost = P (dP - delta + dlse), dS = dPost · d score_mod / d score ·
    /// scale, dq = dS k, dk = dSᵀ q, dv = Pᵀ dout; the gradient of an element of a captured tensor is the
    /// sum of dPost · d score_mod / d element over the pairs that read it. Pairs that are not kept, and rows
    /// that keep nothing, give exactly 0, whatever their derivative is.
    ///
    /// `dout` is `[B, Hq, L, Ev]` in out's type, `dlse` `[B, Hq, L, 1]` f32. Two calls give the same bits,
    /// except, on a GPU, for the gradient of a captured tensor that is indexed by q and kv together and
    /// whose elements several pairs read (a table of distances): those sums are atomic. Kinks (abs, max,
    /// clamp) have PyTorch's derivatives, see [`crate::expr`].
    ///
    /// Tensors that are longer than the device may bind at once are gone through in parts; a gradient of 16
    /// bits is then rounded once for each part.
    ///
    /// It gives no second derivatives, and no gradient of the scale, of masks or of scalars.
    ///
    /// # Errors
    ///
    /// As [`Attention::forward`], and:
    ///
    /// - [`Error::Shape`] and [`Error::DType`] when out, lse, dout or dlse do not fit q, k and v;
    /// - [`Error::Capture`] for the gradient of a tensor that the score_mod does not read, does not read as
    ///   floats, or reads at an index that depends on the score, and for that of sinks where there are none;
    /// - [`Error::Unsupported`] when head_dim is above 1792 or v_dim above 1024;
    /// - [`Error::Limit`] when the row statistics, the gradients of captured tensors or the captured tensors
    ///   themselves do not fit one binding; [`Error::Overflow`] when there are too many to count in 32 bits.
    ///
    /// # Example
    ///
    /// ```
    /// use flexattn::{Attention, Gpu, Saved, Wanted};
    ///
    /// # fn main() -> flexattn::Result<()> {
    /// let gpu = Gpu::new()?;
    /// let q = gpu.tensor(&[0.0f32; 4], [1, 1, 1, 4])?;
    /// let k = gpu.tensor(&[0.0f32; 8], [1, 1, 2, 4])?;
    /// let v = gpu.tensor(&[0.5f32; 8], [1, 1, 2, 4])?;
    /// let attention = Attention::new();
    /// let output = attention.forward(&gpu, &q, &k, &v)?;
    /// let dout = gpu.tensor(&[1.0f32; 4], [1, 1, 1, 4])?;
    /// let saved = Saved::new(&q, &k, &v, &output)?;
    /// let gradients = attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv())?;
    /// // Both keys have the weight 1/2.
    /// assert_eq!(gradients.dv.unwrap().read()?, [0.5; 8]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn backward<R: Runtime>(
        &self,
        runtime: &R,
        saved: &Saved<R>,
        dout: &Tensor<R>,
        dlse: Option<&Tensor<R>>,
        wanted: &Wanted,
    ) -> Result<Gradients<R>>
    where
        R::Buffer: Any + PartialEq,
    {
        let (submits, gradients, _) = self.ready(runtime, saved, dout, dlse, wanted)?;
        for dispatches in submits {
            runtime.run(&dispatches)?;
        }
        Ok(gradients)
    }

    /// The launches of a backward call and the tensors that they will have filled, for programs that
    /// run them their own way. One inner list is one submit.
    ///
    /// # Errors
    ///
    /// As [`Attention::backward`].
    #[expect(clippy::type_complexity, reason = "a list of submits, and the tensors that they fill")]
    pub fn prepare_backward<R: Runtime>(
        &self,
        runtime: &R,
        saved: &Saved<R>,
        dout: &Tensor<R>,
        dlse: Option<&Tensor<R>>,
        wanted: &Wanted,
    ) -> Result<(Vec<Vec<Dispatch<R::Buffer>>>, Gradients<R>)>
    where
        R::Buffer: Any + PartialEq,
    {
        let (submits, gradients, _) = self.ready(runtime, saved, dout, dlse, wanted)?;
        Ok((submits, gradients))
    }

    /// The launches, the tensors that they fill, and the work in multiply-adds.
    #[expect(clippy::type_complexity, reason = "a list of submits, and the tensors that they fill")]
    fn ready<R: Runtime>(
        &self,
        runtime: &R,
        saved: &Saved<R>,
        dout: &Tensor<R>,
        dlse: Option<&Tensor<R>>,
        wanted: &Wanted,
    ) -> Result<(Vec<Vec<Dispatch<R::Buffer>>>, Gradients<R>, f64)>
    where
        R::Buffer: Any + PartialEq,
    {
        let planned = self.plan_backward(runtime, saved, dout, dlse, wanted)?;
        let BackwardPlan { plan, dsink_at, dkv, dkv_elements, captured } = &planned;
        let dtype = saved.q.dtype();
        let stats = plan.create_stats(runtime)?;
        let dq = wanted.q.then(|| Tensor::named(runtime, "dq", dtype, saved.q.shape())).transpose()?;
        let [dk_layout, dv_layout] = *dkv;
        let dkv = if wanted.k || wanted.v {
            let bytes = (dkv_elements * dtype.size()) as u64;
            Some(runtime.create("dk and dv", bytes, Usage::Tensor)?)
        } else {
            None
        };
        let captured_buffer = if captured.tensors.is_empty() {
            None
        } else {
            Some(runtime.create(
                "gradients of captured tensors",
                4 * captured.elements as u64,
                Usage::Tensor,
            )?)
        };
        let unplanned = || Error::buffer("the plan names a tensor that the call does not have");
        let buffer = |role: Role| -> Result<R::Buffer> {
            Ok(match role {
                Role::Q => saved.q.buffer().clone(),
                Role::K => saved.k.buffer().clone(),
                Role::V => saved.v.buffer().clone(),
                Role::Out => saved.out.buffer().clone(),
                Role::Dout => dout.buffer().clone(),
                Role::Lse => saved.lse.buffer().clone(),
                Role::Dlse => dlse.ok_or_else(unplanned)?.buffer().clone(),
                Role::Dq => dq.as_ref().ok_or_else(unplanned)?.buffer().clone(),
                Role::Dkv => dkv.clone().ok_or_else(unplanned)?,
                Role::Captured => captured_buffer.clone().ok_or_else(unplanned)?,
            })
        };
        let submits =
            plan.dispatches(runtime, &buffer, stats.as_ref(), &|name| self.captured_buffer(runtime, name))?;

        let part = |buffer: &Option<R::Buffer>, wanted: bool, dtype: DType, layout: Layout| match buffer {
            Some(buffer) if wanted => Tensor::from_parts(runtime, buffer.clone(), dtype, layout).map(Some),
            _ => Ok(None),
        };
        let heads = saved.q.shape()[1];
        let mut captures = Vec::new();
        for (name, dims, first) in &captured.tensors {
            let mut shape = [1; 4];
            shape[4 - dims.len()..].copy_from_slice(dims);
            let layout = Layout::contiguous(shape)?.at(*first)?;
            if let Some(tensor) = part(&captured_buffer, true, DType::F32, layout)? {
                captures.push((name.clone(), tensor));
            }
        }
        let gradients = Gradients {
            dk: part(&dkv, wanted.k, dtype, dk_layout)?,
            dv: part(&dkv, wanted.v, dtype, dv_layout)?,
            dsinks: part(
                &stats,
                wanted.sinks,
                DType::F32,
                Layout::contiguous([1, 1, 1, heads])?.at(*dsink_at)?,
            )?,
            dq,
            captures,
        };
        Ok((submits, gradients, plan.work()))
    }

    /// The plan of a backward call: pure data, for looking at.
    ///
    /// # Errors
    ///
    /// As [`Attention::backward`].
    pub fn plan_backward<R: Runtime>(
        &self,
        runtime: &R,
        saved: &Saved<R>,
        dout: &Tensor<R>,
        dlse: Option<&Tensor<R>>,
        wanted: &Wanted,
    ) -> Result<BackwardPlan>
    where
        R::Buffer: PartialEq,
    {
        if dout.dtype() != saved.out.dtype() {
            return Err(Error::dtype(format!(
                "dout is {} but out is {}; they must be of one type",
                dout.dtype(),
                saved.out.dtype()
            )));
        }
        if let Some(dlse) = dlse
            && dlse.dtype() != DType::F32
        {
            return Err(Error::dtype(format!("dlse is {} but must be f32, as lse is", dlse.dtype())));
        }
        let operand =
            |tensor: &Tensor<R>| Operand { layout: *tensor.layout(), buffer: runtime.size(tensor.buffer()) };
        self.with_call(runtime, [&saved.q, &saved.k, &saved.v, &saved.out], |call| {
            let back = Backward {
                call,
                dout: operand(dout),
                lse: operand(&saved.lse),
                dlse: dlse.map(operand),
                wanted: wanted.clone(),
            };
            plan::backward(&back, runtime.profile(), &self.cache)
        })
    }
}

#[cfg(feature = "wgpu")]
impl Attention {
    /// Records a backward call into the program's own encoder and submits nothing: it may follow the
    /// forward call that it belongs to ([`Attention::record`]) in the same encoder.
    ///
    /// # Errors
    ///
    /// As [`Attention::backward`], and [`Error::Unsupported`] on the Cpu tier.
    pub fn record_backward(
        &self,
        gpu: &crate::gpu::Gpu,
        encoder: &mut wgpu::CommandEncoder,
        saved: &Saved,
        dout: &Tensor,
        dlse: Option<&Tensor>,
        wanted: &Wanted,
    ) -> Result<RecordedBackward> {
        let (submits, gradients, work) = self.ready(gpu, saved, dout, dlse, wanted)?;
        for dispatches in &submits {
            gpu.encode(encoder, dispatches)?;
        }
        Ok(RecordedBackward { gradients, work })
    }
}

/// A backward call recorded into a program's encoder.
#[cfg(feature = "wgpu")]
#[derive(Clone, Debug)]
pub struct RecordedBackward {
    /// The gradients, filled once the encoder's commands have run.
    pub gradients: Gradients,
    /// Estimated work in multiply-adds.
    pub work: f64,
}
