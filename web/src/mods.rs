//! Masks and score mods as JavaScript writes them: text, names with parameters, combinations.

use flexattn::expr::{
    Capture, CaptureData, CaptureType, DeviceHandle, MaskMod, Scalar, ScoreMod, Value, text_reads,
};
use flexattn::{Error, Param, Params, Resident, Result, masks, scores};
use wasm_bindgen::JsValue;

use crate::error::{Failure, Which};
use crate::js;
use crate::runtime::Buffer;
use crate::tensor::{bytes_of, gpu_buffer, tag};

/// Captured tensors and scalars, by the names that mods use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Values {
    pub(crate) captures: Vec<Capture>,
    pub(crate) scalars: Vec<Scalar>,
}

impl Values {
    /// Those that a text reads: one stock serves all texts of an attention.
    fn captures_of(&self, text: &str) -> Vec<Capture> {
        self.captures.iter().filter(|capture| text_reads(text, capture.name())).cloned().collect()
    }

    fn scalars_of(&self, text: &str) -> Vec<Scalar> {
        self.scalars.iter().filter(|scalar| text_reads(text, scalar.name())).cloned().collect()
    }

    /// Reads `{ captures?, scalars? }`.
    pub(crate) fn read(options: &JsValue) -> Result<Self> {
        let mut values = Self::default();
        if let Some(captures) = js::field(options, "captures") {
            for (name, value) in js::entries(&captures, "captures")? {
                values.captures.push(capture(&name, &value)?);
            }
        }
        if let Some(scalars) = js::field(options, "scalars") {
            for (name, value) in js::entries(&scalars, "scalars")? {
                values.scalars.push(scalar(&name, &value)?);
            }
        }
        Ok(values)
    }
}

fn scalar(name: &str, value: &JsValue) -> Result<Scalar> {
    if let Some(number) = value.as_f64() {
        return Scalar::new(name, Value::F32(number as f32));
    }
    if let Some(number) = js::number(value, "f32")? {
        return Scalar::new(name, Value::F32(number as f32));
    }
    let whole = |field: &str, low: f64, high: f64| -> Result<Option<f64>> {
        match js::number(value, field)? {
            Some(number) if number.fract() != 0.0 || number < low || number > high => Err(Error::capture(
                name,
                format!("the scalar is {number} but an {field} is a whole number from {low} to {high}"),
            )),
            number => Ok(number),
        }
    };
    if let Some(number) = whole("i32", i32::MIN.into(), i32::MAX.into())? {
        return Scalar::new(name, Value::I32(number as i32));
    }
    if let Some(number) = whole("u32", 0.0, u32::MAX.into())? {
        return Scalar::new(name, Value::U32(number as u32));
    }
    Err(Error::capture(name, "a scalar must be a number, { f32 }, { i32 } or { u32 }"))
}

fn capture(name: &str, value: &JsValue) -> Result<Capture> {
    // A bare array stands for { data: array }.
    let data = js::field(value, "data").unwrap_or_else(|| value.clone());
    let said = js::string(value, "dtype")?;
    let said = said.as_deref();
    let kind = tag(&data);
    if let Some(buffer) = gpu_buffer(&data) {
        let (Some(dtype), Some(shape)) = (said, js::counts(value, "shape")?) else {
            return Err(Error::capture(name, "a GPUBuffer does not say what it holds; give dtype and shape"));
        };
        let dtype = capture_type(name, dtype)?;
        let resident = Resident { buffer: DeviceHandle::new(Buffer::adopt(buffer)), first: 0 };
        let handle = CaptureData::Device(DeviceHandle::new(resident));
        return Capture::new(name, dtype, &shape, handle);
    }
    let bytes = || bytes_of(&data, name).map(|bytes| bytes.to_vec());
    let words = || -> Result<Vec<[u8; 4]>> { Ok(bytes()?.as_chunks().0.to_vec()) };
    let (dtype, elements) = match (kind.as_str(), said) {
        ("Float32Array", None | Some("f32")) => {
            (CaptureType::F32, CaptureData::F32(words()?.into_iter().map(f32::from_le_bytes).collect()))
        }
        ("Int32Array", None | Some("i32")) => {
            (CaptureType::I32, CaptureData::I32(words()?.into_iter().map(i32::from_le_bytes).collect()))
        }
        ("Uint32Array", None | Some("u32")) => {
            (CaptureType::U32, CaptureData::U32(words()?.into_iter().map(u32::from_le_bytes).collect()))
        }
        ("Uint8Array", None | Some("bool")) => {
            (CaptureType::Bool, CaptureData::Bool(bytes()?.into_iter().map(|byte| byte != 0).collect()))
        }
        ("Float16Array", None | Some("f16")) | ("Uint16Array", Some("f16")) => (
            CaptureType::F16,
            CaptureData::F16(
                flexattn::DType::F16.widen(&bytes()?).into_iter().map(half::f16::from_f32).collect(),
            ),
        ),
        ("Uint16Array", Some("bf16")) => (
            CaptureType::BF16,
            CaptureData::BF16(
                flexattn::DType::BF16.widen(&bytes()?).into_iter().map(half::bf16::from_f32).collect(),
            ),
        ),
        ("Uint16Array", None) => {
            return Err(Error::capture(name, "a Uint16Array may hold f16 or bf16; say which with dtype"));
        }
        ("", None | Some("bool")) if js_sys::Array::is_array(&data) => {
            let flags: Option<Vec<bool>> = js::list(&data, name)?.iter().map(JsValue::as_bool).collect();
            let flags = flags.ok_or_else(|| {
                Error::capture(name, "a plain list holds true and false only; use a typed array for numbers")
            })?;
            (CaptureType::Bool, CaptureData::Bool(flags.into()))
        }
        (kind, said) => {
            return Err(Error::capture(
                name,
                format!(
                    "{} cannot hold {}; use a typed array of that type",
                    if kind.is_empty() { "the value" } else { kind },
                    said.unwrap_or("a captured tensor")
                ),
            ));
        }
    };
    let shape = match js::counts(value, "shape")? {
        Some(shape) => shape,
        None => vec![elements.host_len().unwrap_or(0)],
    };
    Capture::new(name, dtype, &shape, elements)
}

fn capture_type(name: &str, dtype: &str) -> Result<CaptureType> {
    use CaptureType::{BF16, Bool, F16, F32, I32, U32};
    [F32, F16, BF16, I32, U32, Bool].into_iter().find(|known| known.name() == dtype).ok_or_else(|| {
        Error::capture(name, format!("dtype is {dtype} but must be f32, f16, bf16, i32, u32 or bool"))
    })
}

/// Whether a mod's defaults follow the sizes of a call.
pub(crate) fn depends_on_sizes(value: &JsValue) -> bool {
    if let Some(list) = value.dyn_ref_array() {
        return list.iter().any(|item| depends_on_sizes(&item));
    }
    js::field(value, "name").is_some()
        || ["all", "any", "not"]
            .iter()
            .any(|key| js::field(value, key).is_some_and(|part| depends_on_sizes(&part)))
}

trait AsArray {
    fn dyn_ref_array(&self) -> Option<js_sys::Array>;
}

impl AsArray for JsValue {
    fn dyn_ref_array(&self) -> Option<js_sys::Array> {
        use wasm_bindgen::JsCast;
        self.dyn_ref::<js_sys::Array>().cloned()
    }
}

/// A mask: text, `{ name, ... }`, `{ all }`, `{ any }` or `{ not }`.
pub(crate) fn mask(
    value: &JsValue,
    values: &Values,
    sizes: &Params,
) -> std::result::Result<MaskMod, Failure> {
    if let Some(text) = value.as_string() {
        return MaskMod::from_wgsl(&text, &values.captures_of(&text), &values.scalars_of(&text))
            .map_err(|error| Failure { error, about: Some((Which::Mask, text)) });
    }
    if let Some(name) = js::string(value, "name")? {
        let made = masks::by_name(&name, &params(value, sizes)?);
        return made.map_err(|error| Failure { error, about: None });
    }
    let parts = |list: &JsValue, key: &str| -> std::result::Result<Vec<MaskMod>, Failure> {
        js::list(list, key)?.iter().map(|part| mask(part, values, sizes)).collect()
    };
    if let Some(list) = js::field(value, "all") {
        return Ok(parts(&list, "all")?.into_iter().reduce(|a, b| a & b).unwrap_or_else(masks::noop));
    }
    if let Some(list) = js::field(value, "any") {
        return Ok(parts(&list, "any")?.into_iter().reduce(|a, b| a | b).unwrap_or_else(|| !masks::noop()));
    }
    if let Some(part) = js::field(value, "not") {
        return Ok(!mask(&part, values, sizes)?);
    }
    Err(js::wrong("maskMod", "text, { name }, { all }, { any } or { not }").into())
}

/// A score mod: text, `{ name, ... }`, or a list that is applied in order.
pub(crate) fn score(
    value: &JsValue,
    values: &Values,
    sizes: &Params,
) -> std::result::Result<ScoreMod, Failure> {
    if let Some(text) = value.as_string() {
        return ScoreMod::from_wgsl(&text, &values.captures_of(&text), &values.scalars_of(&text))
            .map_err(|error| Failure { error, about: Some((Which::Score, text)) });
    }
    if let Some(list) = value.dyn_ref_array() {
        let mut whole = scores::identity();
        for part in list.iter() {
            whole = whole.then(&score(&part, values, sizes)?);
        }
        return Ok(whole);
    }
    if let Some(name) = js::string(value, "name")? {
        return Ok(scores::by_name(&name, &params(value, sizes)?)?);
    }
    Err(js::wrong("scoreMod", "text, { name } or a list of those").into())
}

/// The parameters beside `name`.
fn params(value: &JsValue, sizes: &Params) -> Result<Params> {
    let mut params = sizes.clone();
    for (name, value) in js::entries(value, "a prebuilt mod")? {
        if name == "name" {
            continue;
        }
        let param = match value.as_f64() {
            Some(number) => Param::Number(number),
            None => Param::List(numbers(&value, &name)?),
        };
        params = params.with(&name, param);
    }
    Ok(params)
}

/// A list of numbers or a typed array.
pub(crate) fn numbers(value: &JsValue, name: &str) -> Result<Vec<f64>> {
    let values = js_sys::Array::from(value);
    let numbers: Option<Vec<f64>> = values.iter().map(|item| item.as_f64()).collect();
    match numbers {
        Some(numbers) if value.is_object() => Ok(numbers),
        _ => Err(js::wrong(name, "a number or a list of numbers")),
    }
}
