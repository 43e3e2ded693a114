//! What can be looked at without a device: the library's mods, their text, what is wrong with a text, the
//! kernels that mods become.

use flexattn::expr::{Capture, CaptureData, Expr, MaskMod, ScoreMod, Value};
use flexattn::kernels::{Kernel, KernelSpec, Language, Loader};
use flexattn::lower::{Layout, Mods};
use flexattn::{DType, Error, Params, Result, Scalar, masks, scores};
use js_sys::{Array, Float32Array, Int32Array, Object, Uint8Array, Uint16Array, Uint32Array};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::block_mask::Shape;
use crate::error::{Failure, Which, position};
use crate::js;
use crate::mods::{self, Values};

/// Every prebuilt mask and score mod.
#[wasm_bindgen(unchecked_return_type = "any")]
pub fn prebuilt() -> Array {
    let row = |kind: &str, name: &str, formula: &str, params: &[(&str, &str)]| -> JsValue {
        let object = Object::new();
        js::set(&object, "kind", &kind.into());
        js::set(&object, "name", &name.into());
        js::set(&object, "formula", &formula.into());
        let parameters: Array = params
            .iter()
            .map(|(name, about)| {
                let parameter = Object::new();
                js::set(&parameter, "name", &(*name).into());
                js::set(&parameter, "about", &(*about).into());
                JsValue::from(parameter)
            })
            .collect();
        js::set(&object, "parameters", &parameters);
        object.into()
    };
    let masks = masks::ALL.iter().map(|mask| row("mask", mask.name, mask.formula, mask.params));
    let scores = scores::ALL.iter().map(|score| row("score", score.name, score.formula, score.params));
    masks.chain(scores).collect()
}

/// A mod as text, with the tensors and scalars that it reads.
#[wasm_bindgen(unchecked_return_type = "any")]
pub fn spell(
    kind: &str,
    what: &JsValue,
    shape: &JsValue,
    values: &JsValue,
) -> std::result::Result<Object, JsValue> {
    let read = || -> Result<(Values, Params)> { Ok((Values::read(values)?, Shape::read(shape)?.sizes())) };
    let (values, sizes) = read().map_err(Failure::from)?;
    if kind == "mask" {
        let mask = mods::mask(what, &values, &sizes)?;
        Ok(spelled(mask.expr(), mask.captures(), mask.scalars()))
    } else {
        let score = mods::score(what, &values, &sizes)?;
        Ok(spelled(score.expr(), score.captures(), score.scalars()))
    }
}

fn spelled(expr: &Expr, captures: &[Capture], scalars: &[Scalar]) -> Object {
    let object = Object::new();
    js::set(&object, "text", &expr.to_string().into());
    let read = Object::new();
    for capture in captures {
        let data: JsValue = match capture.data() {
            CaptureData::F32(values) => Float32Array::from(&values[..]).into(),
            CaptureData::I32(values) => Int32Array::from(&values[..]).into(),
            CaptureData::U32(values) => Uint32Array::from(&values[..]).into(),
            CaptureData::F16(values) => Uint16Array::from(bytemuck::cast_slice(&values[..])).into(),
            CaptureData::BF16(values) => Uint16Array::from(bytemuck::cast_slice(&values[..])).into(),
            CaptureData::Bool(values) => {
                Uint8Array::from(values.iter().map(|&value| u8::from(value)).collect::<Vec<_>>().as_slice())
                    .into()
            }
            // Its values are a buffer that the page holds already.
            CaptureData::Device(_) => continue,
        };
        let entry = Object::new();
        js::set(&entry, "data", &data);
        js::set(&entry, "dtype", &capture.dtype().name().into());
        let shape: Array = capture.shape().iter().map(|&size| JsValue::from_f64(size as f64)).collect();
        js::set(&entry, "shape", &shape);
        js::set(&read, capture.name(), &entry);
    }
    js::set(&object, "captures", &read);
    let given = Object::new();
    for scalar in scalars {
        let (kind, value) = match scalar.value() {
            Value::F32(value) => ("f32", f64::from(value)),
            Value::I32(value) => ("i32", f64::from(value)),
            Value::U32(value) => ("u32", f64::from(value)),
            Value::Bool(value) => ("u32", f64::from(u8::from(value))),
        };
        let entry = Object::new();
        js::set(&entry, kind, &value.into());
        js::set(&given, scalar.name(), &entry);
    }
    js::set(&object, "scalars", &given);
    object
}

/// What is wrong with the mods.
#[wasm_bindgen(unchecked_return_type = "any")]
pub fn check(options: &JsValue) -> std::result::Result<Array, JsValue> {
    let values = Values::read(options).map_err(Failure::from)?;
    let sizes = Params::new(1, 8, 128, 128);
    let mut found = Array::new();
    if let Some(mask) = js::field(options, "maskMod") {
        let made = mods::mask(&mask, &values, &sizes).and_then(|mask| mask.check().map_err(Failure::from));
        found.extend(made.err().map(|failure| diagnostic(Which::Mask, &failure, &mask)));
    }
    if let Some(score) = js::field(options, "scoreMod") {
        let made =
            mods::score(&score, &values, &sizes).and_then(|score| score.check().map_err(Failure::from));
        found.extend(made.err().map(|failure| diagnostic(Which::Score, &failure, &score)));
    }
    Ok(found)
}

/// A finding at its place, or about the whole text.
fn diagnostic(which: Which, failure: &Failure, given: &JsValue) -> JsValue {
    let own = failure.about.as_ref().map(|(_, text)| text.clone());
    let text = own.or_else(|| given.as_string()).unwrap_or_default();
    let (object, message) = match failure.error.parse_error() {
        Some(parse) => (position(parse, &text), parse.message.clone()),
        None => {
            let object = Object::new();
            for (name, value) in
                [("line", 1), ("column", 1), ("from", 0), ("to", text.encode_utf16().count())]
            {
                js::set(&object, name, &JsValue::from_f64(value as f64));
            }
            (object, failure.error.to_string())
        }
    };
    js::set(&object, "mod", &which.name().into());
    js::set(&object, "message", &message.into());
    object.into()
}

/// Workgroup memory that every WebGPU device has, in bytes.
const WORKGROUP_MEMORY: u32 = 16 << 10;

/// The kernels of a pass.
#[wasm_bindgen(unchecked_return_type = "any")]
pub fn emit(options: &JsValue) -> std::result::Result<Array, JsValue> {
    Ok(try_emit(options)?)
}

fn try_emit(options: &JsValue) -> std::result::Result<Array, Failure> {
    let values = Values::read(options)?;
    let sizes = Params::new(1, 8, 1024, 1024);
    let mask = js::field(options, "maskMod").map(|mask| mods::mask(&mask, &values, &sizes)).transpose()?;
    let score =
        js::field(options, "scoreMod").map(|score| mods::score(&score, &values, &sizes)).transpose()?;
    let language = match js::string(options, "language")?.as_deref() {
        Some("wgsl") | None => Language::WgslWeb,
        Some("msl") => Language::Msl,
        Some(other) => {
            return Err(Error::unsupported(format!("language is {other} but must be wgsl or msl")).into());
        }
    };
    let subgroup =
        language == Language::WgslWeb && js::string(options, "tier")?.as_deref() == Some("subgroup");
    let kernels: &[Kernel] = match js::string(options, "pass")?.as_deref() {
        Some("forward") | None if subgroup => &[Kernel::ForwardSubgroup],
        Some("forward") | None => &[Kernel::Forward],
        Some("decode") if subgroup => &[Kernel::DecodeSubgroup, Kernel::DecodeCombine],
        Some("decode") => &[Kernel::DecodeSplit, Kernel::DecodeCombine],
        Some("backward") if subgroup => &[Kernel::Delta, Kernel::DqSubgroup, Kernel::DkvSubgroup],
        Some("backward") => &[Kernel::Delta, Kernel::Dq, Kernel::Dkv],
        Some(other) => {
            return Err(Error::unsupported(format!(
                "pass is {other} but must be forward, decode or backward"
            ))
            .into());
        }
    };
    let dtype = js::string(options, "dtype")?.map_or(Ok(DType::F32), |name| DType::from_name(&name))?;
    let head_dim = js::count(options, "headDim")?.unwrap_or(64) as u32;
    let v_dim = js::count(options, "vDim")?.map_or(head_dim, |v_dim| v_dim as u32);
    let exprs = mask.iter().map(MaskMod::expr).chain(score.iter().map(ScoreMod::expr));
    let layout = Layout::new(exprs, None);
    let texts = Array::new();
    for &kernel in kernels {
        let with = |kernel| KernelSpec::new(kernel, dtype, head_dim, v_dim, WORKGROUP_MEMORY);
        let plain = with(kernel).or_else(|_| with(kernel.portable()))?;
        // Some kernels only combine what others left, and have no slots for mods.
        let spec = if plain.text(Language::Wgsl)?.contains("//@slot score_mod") {
            let mods = Mods {
                mask: mask.as_ref().map(|mask| mask.expr().clone()),
                score: score.as_ref().map(|score| score.expr().clone()),
                grad: kernel.uses_score_grad(),
                ..Mods::default()
            };
            KernelSpec { mods, layout: layout.clone(), ..plain }
        } else {
            plain
        };
        let spec = if language == Language::Msl { spec.on_metal(Loader::Staged) } else { spec };
        let object = Object::new();
        js::set(&object, "label", &spec.label().into());
        js::set(&object, "entryPoint", &spec.entry().into());
        let workgroup: Array = spec.workgroup().iter().map(|&size| JsValue::from_f64(size.into())).collect();
        js::set(&object, "workgroup", &workgroup);
        js::set(&object, "text", &spec.text(language)?.into());
        texts.push(&object);
    }
    Ok(texts)
}
