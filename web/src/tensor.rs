//! Tensors that cross the border: typed arrays and the page's buffers.

use flexattn::{DType, Error, Layout, Result, Runtime};
use js_sys::{ArrayBuffer, Float32Array, Function, Object, Reflect, Symbol, Uint8Array, Uint16Array};
use wasm_bindgen::{JsCast, JsValue};
use web_sys::GpuBuffer;

use crate::js;
use crate::runtime::{Buffer, Page};
use crate::webgpu::STORAGE;

/// What kind of object a value is, by its `Symbol.toStringTag`.
pub(crate) fn tag(value: &JsValue) -> String {
    Reflect::get(value, &Symbol::to_string_tag()).ok().and_then(|tag| tag.as_string()).unwrap_or_default()
}

/// The value as a GPUBuffer, if it is one. Not by `instanceof`: Node has no such class in its scope.
pub(crate) fn gpu_buffer(value: &JsValue) -> Option<GpuBuffer> {
    let is =
        tag(value) == "GPUBuffer" || js::field(value, "mapAsync").is_some_and(|method| method.is_function());
    is.then(|| value.unchecked_ref::<GpuBuffer>().clone())
}

/// The bytes under a typed array.
pub(crate) fn bytes_of(array: &JsValue, name: &str) -> Result<Uint8Array> {
    let part = |field: &str| js::field(array, field);
    match (
        part("buffer"),
        part("byteOffset").and_then(|at| at.as_f64()),
        part("byteLength").and_then(|n| n.as_f64()),
    ) {
        (Some(buffer), Some(at), Some(length)) => {
            Ok(Uint8Array::new_with_byte_offset_and_length(&buffer, at as u32, length as u32))
        }
        _ => Err(js::wrong(name, "a typed array or a GPUBuffer")),
    }
}

/// A q, k, v, out or dout as it was passed.
pub(crate) struct Given {
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    pub(crate) data: JsValue,
    /// Whether it lies on the GPU.
    pub(crate) on_gpu: bool,
}

impl Given {
    /// Reads `{ data, shape, dtype?, strides?, offset? }`.
    pub(crate) fn read(value: &JsValue, name: &str) -> Result<Self> {
        let data =
            js::field(value, "data").ok_or_else(|| js::wrong(name, "an object with data and shape"))?;
        let sizes = |field: &str| -> Result<Option<[usize; 4]>> {
            let Some(list) = js::counts(value, field)? else { return Ok(None) };
            let length = list.len();
            list.try_into().map(Some).map_err(|_| {
                Error::shape(format!(
                    "{name}.{field} has {length} numbers but must have 4: batch, heads, length, head_dim"
                ))
            })
        };
        let shape = sizes("shape")?.ok_or_else(|| js::wrong(&format!("{name}.shape"), "four numbers"))?;
        let offset = js::count(value, "offset")?.unwrap_or(0);
        let layout = match sizes("strides")? {
            Some(strides) => Layout::new(shape, strides, offset)?,
            None => Layout::contiguous(shape)?.at(offset)?,
        };
        let said = js::string(value, "dtype")?.map(|dtype| DType::from_name(&dtype)).transpose()?;
        let on_gpu = gpu_buffer(&data).is_some();
        let dtype = match (tag(&data).as_str(), said, on_gpu) {
            ("Float32Array", None | Some(DType::F32), false) | (_, None, true) => DType::F32,
            ("Float16Array", None | Some(DType::F16), false) => DType::F16,
            ("Uint16Array", Some(dtype @ (DType::F16 | DType::BF16)), false) | (_, Some(dtype), true) => {
                dtype
            }
            ("Uint16Array", None, false) => {
                return Err(Error::dtype(format!(
                    "{name} is a Uint16Array, which may hold f16 or bf16; say which with dtype"
                )));
            }
            (kind @ ("Float32Array" | "Float16Array" | "Uint16Array"), Some(dtype), false) => {
                return Err(Error::dtype(format!("{name} is a {kind} and cannot hold {}", dtype.name())));
            }
            _ => {
                return Err(js::wrong(
                    &format!("{name}.data"),
                    "a Float32Array, Float16Array, Uint16Array or GPUBuffer",
                ));
            }
        };
        Ok(Self { dtype, layout, data, on_gpu })
    }

    /// The tensor's memory on this machine: a page's buffer in place, an array copied.
    pub(crate) fn buffer(&self, page: &Page, name: &str) -> Result<Buffer> {
        let buffer = match gpu_buffer(&self.data) {
            None => {
                let bytes = bytes_of(&self.data, name)?;
                self.layout.check_buffer(name, self.dtype, bytes.length().into())?;
                return page.upload(name, &bytes);
            }
            Some(buffer) => buffer,
        };
        if page.device().is_none() {
            return Err(Error::buffer(format!(
                "{name} is a GPUBuffer but this Gpu is on the cpu tier; pass a typed array"
            )));
        }
        if buffer.usage() & STORAGE == 0 {
            return Err(Error::buffer(format!(
                "{name}'s GPUBuffer has usage {:#x} but must have STORAGE; create it with GPUBufferUsage.STORAGE",
                buffer.usage()
            )));
        }
        let buffer = Buffer::adopt(buffer);
        self.layout.check_buffer(name, self.dtype, page.size(&buffer))?;
        Ok(buffer)
    }

    /// All elements in the tensor's memory as f32, for the reference.
    pub(crate) fn widened(&self, name: &str) -> Result<Vec<f32>> {
        if self.on_gpu {
            return Err(Error::buffer(format!(
                "{name} is a GPUBuffer but the reference reads typed arrays only"
            )));
        }
        let bytes = bytes_of(&self.data, name)?.to_vec();
        self.layout.check_buffer(name, self.dtype, bytes.len() as u64)?;
        Ok(self.dtype.widen(&bytes))
    }
}

/// Elements as a fresh typed array of the kind that suits the dtype, or the kind that was passed in.
pub(crate) fn typed(array: ArrayBuffer, dtype: DType, like: &JsValue) -> JsValue {
    match dtype {
        DType::F32 => Float32Array::new(&array).into(),
        DType::F16 | DType::BF16 => {
            if tag(like) == "Float16Array"
                && let Some(class) = js::field(&js_sys::global(), "Float16Array")
                && let Ok(made) =
                    Reflect::construct(class.unchecked_ref::<Function>(), &js_sys::Array::of1(&array))
            {
                return made;
            }
            Uint16Array::new(&array).into()
        }
    }
}

/// `{ data, shape, dtype }`.
pub(crate) fn object(data: &JsValue, shape: [usize; 4], dtype: DType) -> Object {
    let object = Object::new();
    js::set(&object, "data", data);
    let shape: js_sys::Array = shape.iter().map(|&size| JsValue::from_f64(size as f64)).collect();
    js::set(&object, "shape", &shape);
    js::set(&object, "dtype", &dtype.name().into());
    object
}
