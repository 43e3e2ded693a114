//! The exported `Attention`: reading what a call passes, giving the core its tensors, handing results back.

use std::cell::RefCell;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use flexattn::expr::{MaskMod, ScoreMod};
use flexattn::reference::{self, Problem};
use flexattn::{
    AttentionShape, BlockMask, DType, Error, Layout, Output, Params, PerBatch, Result, Runtime, Saved,
    Tensor, Usage, Wanted,
};
use js_sys::futures::future_to_promise;
use js_sys::{ArrayBuffer, Float32Array, Float64Array, Object, Promise};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::error::{Failure, Which};
use crate::gpu::Gpu;
use crate::js;
use crate::mods::{self, Values, numbers};
use crate::runtime::{Buffer, Page};
use crate::tensor::{Given, gpu_buffer, object, typed};

type Outcome<T> = std::result::Result<T, Failure>;

/// The raw half of `Attention` in index.ts.
#[wasm_bindgen]
pub struct Attention {
    page: Page,
    mask: Option<JsValue>,
    score: Option<JsValue>,
    values: Values,
    block_mask: Option<Arc<BlockMask>>,
    fixed: Settings,
    /// Whether a prebuilt mod follows the sizes of a call.
    sized: bool,
    made: RefCell<Option<Made>>,
}

/// The operation for the sizes of the last call.
struct Made {
    sizes: Params,
    mask: Option<MaskMod>,
    score: Option<ScoreMod>,
    attention: flexattn::Attention,
}

/// What may be given at construction and per call.
#[derive(Clone, Default)]
struct Settings {
    scale: Option<f32>,
    q_offset: Option<PerBatch<i32>>,
    kv_len: Option<PerBatch<u32>>,
    sinks: Option<Arc<[f32]>>,
}

impl Settings {
    fn read(options: &JsValue) -> Result<Self> {
        let each = |name: &str| -> Result<Option<Vec<f64>>> {
            let Some(value) = js::field(options, name) else { return Ok(None) };
            let values = match value.as_f64() {
                Some(number) => vec![number],
                None => numbers(&value, name)?,
            };
            match values.iter().find(|value| value.fract() != 0.0 || value.abs() > f64::from(i32::MAX)) {
                Some(value) => {
                    Err(Error::shape(format!("{name} is {value} but must be a whole number of 32 bits")))
                }
                None => Ok(Some(values)),
            }
        };
        let is_list = |name: &str| js::field(options, name).is_some_and(|value| value.is_object());
        let q_offset = each("qOffset")?.map(|values| match (values.as_slice(), is_list("qOffset")) {
            ([one], false) => PerBatch::All(*one as i32),
            (values, _) => PerBatch::Each(values.iter().map(|&value| value as i32).collect()),
        });
        let kv_len = match each("kvLen")? {
            None => None,
            Some(values) => {
                if let Some(value) = values.iter().find(|&&value| value < 0.0) {
                    return Err(Error::shape(format!("kvLen is {value} but must be 0 or more")));
                }
                Some(match (values.as_slice(), is_list("kvLen")) {
                    ([one], false) => PerBatch::All(*one as u32),
                    (values, _) => PerBatch::Each(values.iter().map(|&value| value as u32).collect()),
                })
            }
        };
        let sinks = match js::field(options, "sinks") {
            None => None,
            Some(value) => Some(numbers(&value, "sinks")?.into_iter().map(|value| value as f32).collect()),
        };
        Ok(Self { scale: js::number(options, "scale")?.map(|scale| scale as f32), q_offset, kv_len, sinks })
    }

    fn apply(&self, mut attention: flexattn::Attention) -> flexattn::Attention {
        if let Some(scale) = self.scale {
            attention = attention.scale(scale);
        }
        if let Some(q_offset) = &self.q_offset {
            attention = attention.q_offset(q_offset.clone());
        }
        if let Some(kv_len) = &self.kv_len {
            attention = attention.kv_len(kv_len.clone());
        }
        if let Some(sinks) = &self.sinks {
            attention = attention.sinks(sinks.clone());
        }
        attention
    }
}

impl std::fmt::Debug for Attention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attention").field("values", &self.values).finish_non_exhaustive()
    }
}

#[wasm_bindgen]
impl Attention {
    /// Reads the mods. Those that follow sizes are tried with some.
    #[wasm_bindgen(constructor)]
    pub fn new(gpu: &Gpu, options: &JsValue) -> std::result::Result<Attention, JsValue> {
        Ok(Self::build(gpu, options)?)
    }

    /// Uses these blocks instead of finding them.
    #[wasm_bindgen(js_name = useBlockMask)]
    pub fn use_block_mask(&mut self, block_mask: &crate::block_mask::BlockMask) {
        self.block_mask = Some(block_mask.shared());
        self.made.take();
    }

    /// `{ out, lse, max }`
    pub fn forward(&self, q: &JsValue, k: &JsValue, v: &JsValue, options: &JsValue) -> Promise {
        promise(self.try_forward([q, k, v], options))
    }

    /// `{ dq, dk, dv, dsinks, captures }`
    pub fn backward(
        &self,
        q: &JsValue,
        k: &JsValue,
        v: &JsValue,
        output: &JsValue,
        dout: &JsValue,
        options: &JsValue,
    ) -> Promise {
        promise(self.try_backward([q, k, v], output, dout, options))
    }

    /// Weights of some rows.
    #[wasm_bindgen(unchecked_return_type = "Promise<Float32Array>")]
    pub fn weights(&self, q: &JsValue, k: &JsValue, rows: &JsValue, options: &JsValue) -> Promise {
        promise(self.try_weights(q, k, rows, options))
    }

    /// `{ out, lse, max }` in f64.
    #[wasm_bindgen(unchecked_return_type = "any")]
    pub fn reference(
        &self,
        q: &JsValue,
        k: &JsValue,
        v: &JsValue,
        options: &JsValue,
    ) -> std::result::Result<Object, JsValue> {
        Ok(self.try_reference([q, k, v], options)?)
    }
}

/// Runs the part that is there at once, and turns what is left into a promise.
fn promise(given: Outcome<impl Future<Output = Result<JsValue>> + 'static>) -> Promise {
    // Boxed, so that the machinery of promises is in the module once and not for each kind of call.
    settle(given.map(|rest| Box::pin(rest) as Pin<Box<dyn Future<Output = Result<JsValue>>>>))
}

fn settle(given: Outcome<Pin<Box<dyn Future<Output = Result<JsValue>>>>>) -> Promise {
    future_to_promise(async move { Ok(given?.await.map_err(Failure::from)?) })
}

impl Attention {
    fn build(gpu: &Gpu, options: &JsValue) -> Outcome<Self> {
        let (mask, score) = (js::field(options, "maskMod"), js::field(options, "scoreMod"));
        let sized = mask.iter().chain(&score).any(mods::depends_on_sizes);
        let attention = Self {
            page: gpu.page().clone(),
            sized,
            mask,
            score,
            values: Values::read(options)?,
            block_mask: None,
            fixed: Settings::read(options)?,
            made: RefCell::default(),
        };
        attention.at(&Params::new(1, 8, 128, 128))?;
        Ok(attention)
    }

    /// The operation for a call of these sizes. Kernels and block lists live on from call to call: where
    /// only captured values follow the sizes, only those change.
    fn at(&self, sizes: &Params) -> Outcome<flexattn::Attention> {
        let mut slot = self.made.borrow_mut();
        if let Some(made) = &*slot
            && (!self.sized || made.sizes == *sizes)
        {
            return Ok(made.attention.clone());
        }
        let mask = self.mask.as_ref().map(|mask| mods::mask(mask, &self.values, sizes)).transpose()?;
        let score = self.score.as_ref().map(|score| mods::score(score, &self.values, sizes)).transpose()?;
        if let Some(mask) = &mask {
            mask.check().map_err(|error| about(error, Which::Mask, &self.mask))?;
        }
        if let Some(score) = &score {
            score.check().map_err(|error| about(error, Which::Score, &self.score))?;
        }
        let attention = match &*slot {
            Some(made)
                if made.mask.as_ref().map(MaskMod::expr) == mask.as_ref().map(MaskMod::expr)
                    && made.score.as_ref().map(ScoreMod::expr) == score.as_ref().map(ScoreMod::expr) =>
            {
                let captures =
                    mask.iter().flat_map(MaskMod::captures).chain(score.iter().flat_map(ScoreMod::captures));
                captures.cloned().try_fold(made.attention.clone(), flexattn::Attention::with_capture)?
            }
            _ => {
                let mut attention = flexattn::Attention::new();
                if let Some(mask) = &mask {
                    attention = attention.mask_mod(mask.clone());
                }
                if let Some(score) = &score {
                    attention = attention.score_mod(score.clone());
                }
                if let Some(block_mask) = &self.block_mask {
                    attention = attention.block_mask(block_mask.clone());
                }
                self.fixed.apply(attention)
            }
        };
        *slot = Some(Made { sizes: sizes.clone(), mask, score, attention: attention.clone() });
        Ok(attention)
    }

    /// The operation for one call: its sizes, and what it changes.
    fn for_call(&self, shape: &AttentionShape, options: &JsValue) -> Outcome<flexattn::Attention> {
        let sizes = Params::new(shape.batch, shape.q_heads, shape.q_len, shape.kv_len);
        let mut attention = Settings::read(options)?.apply(self.at(&sizes)?);
        let values = Values::read(options)?;
        let listed = self.block_mask.as_ref().and_then(|block_mask| block_mask.mask_mod());
        for scalar in values.scalars {
            let mut known = listed.into_iter().flat_map(MaskMod::scalars);
            if known.any(|known| known.name() == scalar.name() && *known != scalar) {
                return Err(Error::capture(
                    scalar.name(),
                    "blockMask was built with another value; build one with this value, or give maskMod alone",
                )
                .into());
            }
            attention = attention.with_scalar(scalar)?;
        }
        for capture in values.captures {
            attention = attention.with_capture(capture)?;
        }
        Ok(attention)
    }

    fn try_forward(
        &self,
        tensors: [&JsValue; 3],
        options: &JsValue,
    ) -> Outcome<impl Future<Output = Result<JsValue>> + use<>> {
        let [q, k, v] = given(tensors)?;
        let shape = AttentionShape::new(&q.layout, &k.layout, &v.layout)?;
        let attention = self.for_call(&shape, options)?;
        let home = home(options, &q)?;
        let wants_max = js::boolean(options, "max")?.unwrap_or(false);
        let attention = attention.with_max(wants_max);
        let target = js::field(options, "out").map(|out| Given::read(&out, "out")).transpose()?;
        let page = self.page.clone();
        let (work, call) = page.call(|| {
            let (q_tensor, k, v) =
                (tensor(&page, &q, "q")?, tensor(&page, &k, "k")?, tensor(&page, &v, "v")?);
            let output = match &target {
                None => attention.forward(&page, &q_tensor, &k, &v)?,
                Some(target) if !target.on_gpu => {
                    return Err(Error::buffer(
                        "out must be a GPUBuffer; results in host memory are always new arrays",
                    ));
                }
                Some(target) => {
                    attention.forward_into(&page, &q_tensor, &k, &v, &tensor(&page, target, "out")?)?
                }
            };
            match home {
                Home::Host => Ok(Work::Fetch(fetch(&page, &output)?)),
                Home::Gpu => keep(&page, &output),
            }
        })?;
        let (dtype, out_shape, like) = (q.dtype, shape.out(), q.data);
        let target = js::field(options, "out");
        Ok(async move {
            let object = Object::new();
            match work {
                Work::Fetch(arrays) => {
                    let mut arrays = arrays.await?.into_iter();
                    let mut next = || arrays.next().unwrap_or_else(|| ArrayBuffer::new(0));
                    js::set(&object, "out", &self::object(&typed(next(), dtype, &like), out_shape, dtype));
                    js::set(&object, "lse", &Float32Array::new(&next()));
                    let max = wants_max.then(|| Float32Array::new(&next()));
                    js::set(&object, "max", &max.map_or(JsValue::NULL, JsValue::from));
                    call.checked().await?;
                }
                Work::Keep(out, lse, max) => {
                    call.checked().await?;
                    match target {
                        Some(target) => js::set(&object, "out", &target),
                        None => {
                            js::set(&object, "out", &self::object(&out.release()?.into(), out_shape, dtype))
                        }
                    }
                    js::set(&object, "lse", &lse.release()?.into());
                    let max = max.map(|max| max.release()).transpose()?;
                    js::set(&object, "max", &max.map_or(JsValue::NULL, JsValue::from));
                }
            }
            Ok(object.into())
        })
    }

    fn try_backward(
        &self,
        tensors: [&JsValue; 3],
        output: &JsValue,
        dout: &JsValue,
        options: &JsValue,
    ) -> Outcome<impl Future<Output = Result<JsValue>> + use<>> {
        let [q, k, v] = given(tensors)?;
        let shape = AttentionShape::new(&q.layout, &k.layout, &v.layout)?;
        let attention = self.for_call(&shape, options)?;
        let home = home(options, &q)?;
        let wanted = wanted(options)?;
        let part = |of: &JsValue, name: &str| {
            js::field(of, name).ok_or_else(|| js::wrong("output", "what forward returned"))
        };
        let (out, lse) = (Given::read(&part(output, "out")?, "output.out")?, part(output, "lse")?);
        let dout = Given::read(dout, "dout")?;
        let dlse = js::field(options, "dlse");
        let rows = Layout::contiguous([shape.batch, shape.q_heads, shape.q_len, 1])?;
        let page = self.page.clone();
        let (work, call) = page.call(|| {
            let (q, k, v) = (tensor(&page, &q, "q")?, tensor(&page, &k, "k")?, tensor(&page, &v, "v")?);
            let row_values = |data: JsValue, name: &str| {
                let on_gpu = gpu_buffer(&data).is_some();
                tensor(&page, &Given { dtype: DType::F32, layout: rows, data, on_gpu }, name)
            };
            let output = Output {
                out: tensor(&page, &out, "output.out")?,
                lse: Some(row_values(lse, "output.lse")?),
                max: None,
            };
            let dout = tensor(&page, &dout, "dout")?;
            let dlse = dlse.map(|dlse| row_values(dlse, "dlse")).transpose()?;
            let saved = Saved::new(&q, &k, &v, &output)?;
            let found = attention.backward(&page, &saved, &dout, dlse.as_ref(), &wanted)?;
            let mut named: Vec<(String, Tensor<Page>)> = Vec::new();
            for (name, tensor) in
                [("dq", found.dq), ("dk", found.dk), ("dv", found.dv), ("dsinks", found.dsinks)]
            {
                named.extend(tensor.map(|tensor| (name.to_owned(), tensor)));
            }
            let tensors = named.len();
            named.extend(found.captures);
            let results = match home {
                Home::Host => {
                    Results::Fetch(page.fetch(named.iter().map(|(_, tensor)| part_of(tensor)).collect()))
                }
                Home::Gpu => Results::Keep(
                    named.iter().map(|(_, tensor)| own_buffer(&page, tensor)).collect::<Result<_>>()?,
                ),
            };
            Ok((named, tensors, results))
        })?;
        let (named, tensors, results) = work;
        let like = q.data;
        Ok(async move {
            let data: Vec<JsValue> = match results {
                Results::Fetch(arrays) => {
                    let arrays = arrays.await?;
                    call.checked().await?;
                    arrays
                        .into_iter()
                        .zip(&named)
                        .map(|(array, (_, tensor))| typed(array, tensor.dtype(), &like))
                        .collect()
                }
                Results::Keep(buffers) => {
                    call.checked().await?;
                    buffers.iter().map(|buffer| Ok(buffer.release()?.into())).collect::<Result<_>>()?
                }
            };
            let (gradients, captures) = (Object::new(), Object::new());
            for name in ["dq", "dk", "dv", "dsinks"] {
                js::set(&gradients, name, &JsValue::NULL);
            }
            for (at, ((name, tensor), data)) in named.iter().zip(&data).enumerate() {
                match name.as_str() {
                    _ if at >= tensors => js::set(&captures, name, data),
                    "dsinks" => js::set(&gradients, name, data),
                    _ => js::set(&gradients, name, &object(data, tensor.shape(), tensor.dtype())),
                }
            }
            js::set(&gradients, "captures", &captures);
            Ok(gradients.into())
        })
    }

    fn try_weights(
        &self,
        q: &JsValue,
        k: &JsValue,
        rows: &JsValue,
        options: &JsValue,
    ) -> Outcome<impl Future<Output = Result<JsValue>> + use<>> {
        let [q, k] = [Given::read(q, "q")?, Given::read(k, "k")?];
        let rows: Vec<usize> =
            js::list(rows, "rows")?.iter().map(|row| js::whole(row, "rows")).collect::<Result<_>>()?;
        // The values do not matter for weights, and the keys have their length and heads.
        let shape = AttentionShape::new(&q.layout, &k.layout, &k.layout)?;
        let attention = self.for_call(&shape, options)?;
        let page = self.page.clone();
        let ((q, k, output), call) = page.call(|| {
            let (q, k) = (tensor(&page, &q, "q")?, tensor(&page, &k, "k")?);
            let output = attention.forward(&page, &q, &k, &k)?;
            Ok((q, k, output))
        })?;
        Ok(async move {
            call.checked().await?;
            let weights = attention.weights_async(&q, &k, &output, &rows).await?;
            Ok(Float32Array::from(weights.as_slice()).into())
        })
    }

    fn try_reference(&self, tensors: [&JsValue; 3], options: &JsValue) -> Outcome<Object> {
        let [q, k, v] = given(tensors)?;
        let shape = AttentionShape::new(&q.layout, &k.layout, &v.layout)?;
        let sizes = Params::new(shape.batch, shape.q_heads, shape.q_len, shape.kv_len);
        self.at(&sizes)?;
        let values = Values::read(options)?;
        let slot = self.made.borrow();
        let made = slot.as_ref();
        let (mut mask, mut score) = made.map_or((None, None), |made| (made.mask.clone(), made.score.clone()));
        for scalar in &values.scalars {
            mask = mask
                .map(|mask| {
                    if reads(mask.scalars().iter().map(|s| s.name()), scalar.name()) {
                        mask.with_scalar(scalar.clone())
                    } else {
                        Ok(mask)
                    }
                })
                .transpose()?;
            score = score
                .map(|score| {
                    if reads(score.scalars().iter().map(|s| s.name()), scalar.name()) {
                        score.with_scalar(scalar.clone())
                    } else {
                        Ok(score)
                    }
                })
                .transpose()?;
        }
        for capture in &values.captures {
            mask = mask
                .map(|mask| {
                    if reads(mask.captures().iter().map(|c| c.name()), capture.name()) {
                        mask.with_capture(capture.clone())
                    } else {
                        Ok(mask)
                    }
                })
                .transpose()?;
            score = score
                .map(|score| {
                    if reads(score.captures().iter().map(|c| c.name()), capture.name()) {
                        score.with_capture(capture.clone())
                    } else {
                        Ok(score)
                    }
                })
                .transpose()?;
        }
        let own = Settings::read(options)?;
        let each = |all: Option<&PerBatch<i32>>| match all {
            Some(PerBatch::All(value)) => vec![*value; shape.batch],
            Some(PerBatch::Each(values)) => values.to_vec(),
            None => Vec::new(),
        };
        let q_offset = each(own.q_offset.as_ref().or(self.fixed.q_offset.as_ref()));
        let kv_len = match own.kv_len.as_ref().or(self.fixed.kv_len.as_ref()) {
            Some(PerBatch::All(value)) => vec![*value; shape.batch],
            Some(PerBatch::Each(values)) => values.to_vec(),
            None => Vec::new(),
        };
        if let Some(block_mask) = &self.block_mask {
            mask = Some(within(block_mask, mask, &shape)?);
        }
        let (q, k, v) = (q.widened("q")?, k.widened("k")?, v.widened("v")?);
        let defaults = Problem::new(shape, &q, &k, &v);
        let found = reference::forward(&Problem {
            scale: own.scale.or(self.fixed.scale).map_or(defaults.scale, f64::from),
            mask_mod: mask.as_ref(),
            score_mod: score.as_ref(),
            q_offset: &q_offset,
            kv_len: &kv_len,
            sinks: self.fixed.sinks.as_deref().unwrap_or(&[]),
            ..defaults
        })?;
        let object = Object::new();
        for (name, values) in [("out", &found.out), ("lse", &found.lse), ("max", &found.max)] {
            js::set(&object, name, &Float64Array::from(values.as_slice()));
        }
        Ok(object)
    }
}

/// The mask of a call whose blocks are given. All of these blocks were found from a mask, which says the same.
fn within(block_mask: &BlockMask, mask: Option<MaskMod>, shape: &AttentionShape) -> Result<MaskMod> {
    let lengths = [block_mask.q_len(), block_mask.kv_len()];
    if lengths != [shape.q_len, shape.kv_len] {
        return Err(Error::shape(format!(
            "the block mask is for qLen and kvLen {lengths:?} but the call has {:?}; build one for these",
            [shape.q_len, shape.kv_len]
        )));
    }
    let own = || block_mask.mask_mod().cloned();
    mask.or_else(own).ok_or_else(|| {
        Error::shape(
            "the block mask has no mask_mod, which the reference reads; give the maskMod that it is of",
        )
    })
}

fn reads<'a>(mut names: impl Iterator<Item = &'a str>, name: &str) -> bool {
    names.any(|known| known == name)
}

fn about(error: Error, which: Which, text: &Option<JsValue>) -> Failure {
    let text = text.as_ref().and_then(JsValue::as_string).unwrap_or_default();
    Failure { error, about: Some((which, text)) }
}

fn given([q, k, v]: [&JsValue; 3]) -> Result<[Given; 3]> {
    Ok([Given::read(q, "q")?, Given::read(k, "k")?, Given::read(v, "v")?])
}

fn tensor(page: &Page, given: &Given, name: &str) -> Result<Tensor<Page>> {
    Tensor::from_parts(page, given.buffer(page, name)?, given.dtype, given.layout)
}

/// Where results go.
#[derive(Clone, Copy)]
enum Home {
    Host,
    Gpu,
}

fn home(options: &JsValue, q: &Given) -> Result<Home> {
    match js::string(options, "to")?.as_deref() {
        Some("host") => Ok(Home::Host),
        Some("gpu") => Ok(Home::Gpu),
        Some(other) => Err(Error::unsupported(format!("to is {other} but must be host or gpu"))),
        None if q.on_gpu || js::field(options, "out").is_some() => Ok(Home::Gpu),
        None => Ok(Home::Host),
    }
}

enum Results<F> {
    Fetch(F),
    Keep(Vec<Buffer>),
}

enum Work<F> {
    Fetch(F),
    Keep(Buffer, Buffer, Option<Buffer>),
}

/// The part of a tensor's buffer that holds its elements, which have no gaps.
fn part_of(tensor: &Tensor<Page>) -> (Buffer, Range<u64>) {
    let (layout, size) = (tensor.layout(), tensor.dtype().size());
    let start = (layout.offset * size) as u64;
    (tensor.buffer().clone(), start..start + (layout.elements() * size) as u64)
}

fn lse(output: &Output<Page>) -> Result<&Tensor<Page>> {
    output.lse.as_ref().ok_or_else(|| Error::unsupported("the call returned no lse"))
}

fn fetch(
    page: &Page,
    output: &Output<Page>,
) -> Result<impl Future<Output = Result<Vec<ArrayBuffer>>> + use<>> {
    let mut parts = vec![part_of(&output.out), part_of(lse(output)?)];
    parts.extend(output.max.as_ref().map(part_of));
    Ok(page.fetch(parts))
}

/// Buffers for the page to own: out and lse themselves, and a copy of max, which lies behind lse.
fn keep<F>(page: &Page, output: &Output<Page>) -> Result<Work<F>> {
    let max = output.max.as_ref().map(|max| own_buffer(page, max)).transpose()?;
    Ok(Work::Keep(output.out.buffer().clone(), lse(output)?.buffer().clone(), max))
}

/// A buffer that holds the tensor and nothing else: its own, or a copy.
fn own_buffer(page: &Page, tensor: &Tensor<Page>) -> Result<Buffer> {
    let (from, range) = part_of(tensor);
    let whole = range.end.next_multiple_of(4);
    if range.start == 0 && whole == page.size(&from) {
        return Ok(from);
    }
    let to = page.create("result", whole - range.start, Usage::Tensor)?;
    page.copy(&from, range.start..whole, &to)?;
    Ok(to)
}

/// `{ wants?, wantsCaptures? }`
fn wanted(options: &JsValue) -> Result<Wanted> {
    let names = |field: &str| -> Result<Option<Vec<String>>> {
        let Some(value) = js::field(options, field) else { return Ok(None) };
        let names = js::list(&value, field)?.iter().map(JsValue::as_string).collect::<Option<Vec<_>>>();
        names.map(Some).ok_or_else(|| js::wrong(field, "a list of names"))
    };
    let mut wanted = Wanted { captures: names("wantsCaptures")?.unwrap_or_default(), ..Wanted::default() };
    match names("wants")? {
        None => (wanted.q, wanted.k, wanted.v) = (true, true, true),
        Some(names) => {
            for name in names {
                match name.as_str() {
                    "q" => wanted.q = true,
                    "k" => wanted.k = true,
                    "v" => wanted.v = true,
                    "sinks" => wanted.sinks = true,
                    other => {
                        return Err(Error::unsupported(format!(
                            "wants has {other} but may have q, k, v and sinks; captured tensors are named in wantsCaptures"
                        )));
                    }
                }
            }
        }
    }
    Ok(wanted)
}
