//! Captured tensors and run-time scalars: what an expression reads by name.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use half::{bf16, f16};

use super::value::{Type, Value};
use super::views::{Bool, F32, I32, Term, U32, View};
use super::{Expr, Op};
use crate::error::{Error, Result};

/// The element type of a captured tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CaptureType {
    /// Read as f32.
    F32,
    /// Read as f32.
    F16,
    /// Read as f32.
    BF16,
    /// Read as i32.
    I32,
    /// Read as u32.
    U32,
    /// One byte each; read as bool.
    Bool,
}

impl CaptureType {
    /// The type that an element has in an expression.
    pub fn ty(self) -> Type {
        match self {
            CaptureType::F32 | CaptureType::F16 | CaptureType::BF16 => Type::F32,
            CaptureType::I32 => Type::I32,
            CaptureType::U32 => Type::U32,
            CaptureType::Bool => Type::Bool,
        }
    }

    /// Bytes of one stored element.
    pub fn bytes(self) -> usize {
        match self {
            CaptureType::F32 | CaptureType::I32 | CaptureType::U32 => 4,
            CaptureType::F16 | CaptureType::BF16 => 2,
            CaptureType::Bool => 1,
        }
    }

    /// Where a tensor of such elements ends in its buffer, in bytes, beginning at element `first`.
    pub(crate) fn end(self, first: u32, shape: &[usize]) -> u64 {
        let elements = u64::from(first).saturating_add(crate::shape::product(shape) as u64);
        elements.saturating_mul(self.bytes() as u64)
    }

    /// The name: f32, f16, bf16, i32, u32 or bool.
    pub fn name(self) -> &'static str {
        match self {
            CaptureType::F32 => "f32",
            CaptureType::F16 => "f16",
            CaptureType::BF16 => "bf16",
            CaptureType::I32 => "i32",
            CaptureType::U32 => "u32",
            CaptureType::Bool => "bool",
        }
    }
}

impl fmt::Display for CaptureType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What an expression knows of a captured tensor. Its shape and its values are not part of the expression.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CaptureDecl {
    /// The name by which the text calls it.
    pub name: Arc<str>,
    /// The element type.
    pub dtype: CaptureType,
    /// The number of dimensions, 0 to 4.
    pub rank: u8,
}

/// What an expression knows of a run-time scalar. Its value is not part of the expression.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScalarDecl {
    /// The name in the text.
    pub name: Arc<str>,
    /// The type.
    pub ty: Type,
}

/// A buffer of some runtime, which only that runtime can read.
#[derive(Clone)]
pub struct DeviceHandle(Handle);

#[cfg(not(target_arch = "wasm32"))]
type Handle = Arc<dyn Any + Send + Sync>;
#[cfg(target_arch = "wasm32")]
type Handle = Arc<dyn Any>;

impl DeviceHandle {
    /// Wraps a runtime's buffer.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new<T: Any + Send + Sync>(buffer: T) -> DeviceHandle {
        DeviceHandle(Arc::new(buffer))
    }

    /// Wraps a runtime's buffer.
    #[cfg(target_arch = "wasm32")]
    pub fn new<T: Any>(buffer: T) -> DeviceHandle {
        DeviceHandle(Arc::new(buffer))
    }

    /// The buffer, if it is of type `T`.
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceHandle")
    }
}

/// Where the values of a captured tensor are. Row-major, contiguous.
#[derive(Debug, Clone)]
pub enum CaptureData {
    /// f32 in host memory.
    F32(Arc<[f32]>),
    /// f16 in host memory.
    F16(Arc<[f16]>),
    /// bf16 in host memory.
    BF16(Arc<[bf16]>),
    /// i32 in host memory.
    I32(Arc<[i32]>),
    /// u32 in host memory.
    U32(Arc<[u32]>),
    /// bool in host memory.
    Bool(Arc<[bool]>),
    /// Values that only a GPU knows. Kernels read them; a mask that reads them skips no blocks, unless the call is
    /// given the block mask that [`BlockMask::build_on`](crate::BlockMask::build_on) makes of it.
    Device(DeviceHandle),
}

impl CaptureData {
    /// The number of elements in host memory.
    pub fn host_len(&self) -> Option<usize> {
        Some(match self {
            CaptureData::F32(x) => x.len(),
            CaptureData::F16(x) => x.len(),
            CaptureData::BF16(x) => x.len(),
            CaptureData::I32(x) => x.len(),
            CaptureData::U32(x) => x.len(),
            CaptureData::Bool(x) => x.len(),
            CaptureData::Device(_) => return None,
        })
    }

    /// The values as bytes; none of what lies on a device.
    pub(crate) fn host_bytes(&self) -> Option<&[u8]> {
        Some(match self {
            CaptureData::F32(values) => bytemuck::cast_slice(values),
            CaptureData::F16(values) => bytemuck::cast_slice(values),
            CaptureData::BF16(values) => bytemuck::cast_slice(values),
            CaptureData::I32(values) => bytemuck::cast_slice(values),
            CaptureData::U32(values) => bytemuck::cast_slice(values),
            CaptureData::Bool(values) => bytemuck::cast_slice(values),
            CaptureData::Device(_) => return None,
        })
    }

    /// Whether both hold the same values. Of what lies on a device nothing is read: it must be one place.
    fn same(&self, other: &CaptureData) -> bool {
        match (self, other) {
            (CaptureData::Device(a), CaptureData::Device(b)) => Arc::ptr_eq(&a.0, &b.0),
            _ => match (self.host_bytes(), other.host_bytes()) {
                (Some(a), Some(b)) => std::ptr::eq(a, b) || a == b,
                _ => false,
            },
        }
    }
}

/// A captured tensor: a name, a shape and values that masks and score mods read. Cheap to clone.
///
/// ```
/// use flexattn::{Capture, MaskMod};
///
/// let doc = Capture::i32("doc", &[0, 0, 1, 1, 1], &[5])?;
/// let same_document = MaskMod::new(|i| doc.at([i.q()]).eq(doc.at([i.kv()])));
/// assert_eq!(same_document.expr().to_string(), "doc(q) == doc(kv)");
/// # Ok::<(), flexattn::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Capture {
    name: Arc<str>,
    dtype: CaptureType,
    shape: Vec<usize>,
    data: CaptureData,
}

impl Capture {
    /// A tensor from `data`, whose variant must fit `dtype`, or be a device's.
    ///
    /// # Errors
    /// When the name is no identifier, a dimension is 0 or beyond i32, there are more than four of them, or the number
    /// of values is not the product of the shape.
    pub fn new(name: &str, dtype: CaptureType, shape: &[usize], data: CaptureData) -> Result<Capture> {
        check_name("capture", name)?;
        if shape.len() > 4 {
            return Err(Error::capture(
                name,
                format!("it has {} dimensions but may have at most 4; reshape it", shape.len()),
            ));
        }
        if let Some(dim) = shape.iter().find(|d| **d == 0 || **d > i32::MAX as usize) {
            return Err(Error::capture(
                name,
                format!("it has a dimension of {dim} but each must be 1 to {}", i32::MAX),
            ));
        }
        let expected = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let fits = match &data {
            CaptureData::F32(_) => dtype == CaptureType::F32,
            CaptureData::F16(_) => dtype == CaptureType::F16,
            CaptureData::BF16(_) => dtype == CaptureType::BF16,
            CaptureData::I32(_) => dtype == CaptureType::I32,
            CaptureData::U32(_) => dtype == CaptureType::U32,
            CaptureData::Bool(_) => dtype == CaptureType::Bool,
            CaptureData::Device(_) => true,
        };
        if !fits {
            return Err(Error::capture(name, format!("it is declared {dtype} but holds other values")));
        }
        if let Some(len) = data.host_len()
            && expected != Some(len)
        {
            return Err(Error::capture(
                name,
                format!(
                    "it has {len} values but its shape {shape:?} needs {}",
                    expected.map_or("more than fit in memory".into(), |n| n.to_string())
                ),
            ));
        }
        Ok(Capture { name: name.into(), dtype, shape: shape.to_vec(), data })
    }

    /// An f32 tensor; [`Captured::at`] gives an [`F32`].
    ///
    /// # Errors
    /// As [`Capture::new`].
    pub fn f32(name: &str, values: &[f32], shape: &[usize]) -> Result<Captured<F32>> {
        Capture::new(name, CaptureType::F32, shape, CaptureData::F32(values.into())).map(Captured::of)
    }

    /// An f16 tensor, read as f32.
    ///
    /// # Errors
    /// As [`Capture::new`].
    pub fn f16(name: &str, values: &[f16], shape: &[usize]) -> Result<Captured<F32>> {
        Capture::new(name, CaptureType::F16, shape, CaptureData::F16(values.into())).map(Captured::of)
    }

    /// A bf16 tensor, read as f32.
    ///
    /// # Errors
    /// As [`Capture::new`].
    pub fn bf16(name: &str, values: &[bf16], shape: &[usize]) -> Result<Captured<F32>> {
        Capture::new(name, CaptureType::BF16, shape, CaptureData::BF16(values.into())).map(Captured::of)
    }

    /// An i32 tensor.
    ///
    /// # Errors
    /// As [`Capture::new`].
    pub fn i32(name: &str, values: &[i32], shape: &[usize]) -> Result<Captured<I32>> {
        Capture::new(name, CaptureType::I32, shape, CaptureData::I32(values.into())).map(Captured::of)
    }

    /// A u32 tensor.
    ///
    /// # Errors
    /// As [`Capture::new`].
    pub fn u32(name: &str, values: &[u32], shape: &[usize]) -> Result<Captured<U32>> {
        Capture::new(name, CaptureType::U32, shape, CaptureData::U32(values.into())).map(Captured::of)
    }

    /// A bool tensor, a byte each on the GPU.
    ///
    /// # Errors
    /// As [`Capture::new`].
    pub fn bool(name: &str, values: &[bool], shape: &[usize]) -> Result<Captured<Bool>> {
        Capture::new(name, CaptureType::Bool, shape, CaptureData::Bool(values.into())).map(Captured::of)
    }

    /// The name by which expressions call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type.
    pub fn dtype(&self) -> CaptureType {
        self.dtype
    }

    /// The shape, outermost dimension first; empty for a single value.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values.
    pub fn data(&self) -> &CaptureData {
        &self.data
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        crate::shape::product(&self.shape)
    }

    /// Never: every dimension is at least 1.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What an expression knows of this tensor.
    pub fn decl(&self) -> CaptureDecl {
        CaptureDecl { name: self.name.clone(), dtype: self.dtype, rank: self.shape.len() as u8 }
    }

    /// The element at row-major position `i` as a constant; f16 and bf16 as f32. Nothing if it is out of range
    /// or the values are on a device.
    pub fn value(&self, i: usize) -> Option<Value> {
        match &self.data {
            CaptureData::F32(x) => x.get(i).map(|x| Value::F32(*x)),
            CaptureData::F16(x) => x.get(i).map(|x| Value::F32(x.to_f32())),
            CaptureData::BF16(x) => x.get(i).map(|x| Value::F32(x.to_f32())),
            CaptureData::I32(x) => x.get(i).map(|x| Value::I32(*x)),
            CaptureData::U32(x) => x.get(i).map(|x| Value::U32(*x)),
            CaptureData::Bool(x) => x.get(i).map(|x| Value::Bool(*x)),
            CaptureData::Device(_) => None,
        }
    }

    /// Whether both are the same tensor: name, type, shape and values (on a device: the very same memory).
    pub fn same(&self, other: &Capture) -> bool {
        self.name == other.name
            && self.dtype == other.dtype
            && self.shape == other.shape
            && self.data.same(&other.data)
    }
}

/// A [`Capture`] whose element type the compiler knows: what a closure indexes.
#[derive(Debug, Clone)]
pub struct Captured<V> {
    capture: Capture,
    view: PhantomData<fn() -> V>,
}

impl<V: View> Captured<V> {
    fn of(capture: Capture) -> Captured<V> {
        Captured { capture, view: PhantomData }
    }

    /// The typed form of `capture`.
    ///
    /// # Errors
    /// When its elements have another type.
    pub fn new(capture: Capture) -> Result<Captured<V>> {
        if capture.dtype.ty() != V::TYPE {
            return Err(Error::Expression(format!(
                "capture {} is {} and cannot be read as {}",
                capture.name,
                capture.dtype,
                V::TYPE
            )));
        }
        Ok(Captured::of(capture))
    }

    /// The element at `index`, one i32 per dimension, each clamped to its dimension.
    ///
    /// A wrong number of indices is reported by the `check` of the mask or score mod.
    pub fn at<const N: usize>(&self, index: [I32; N]) -> V {
        let index = index.map(|i| i.term().clone());
        let term = Term::apply(Op::Gather(self.capture.decl()), &index.each_ref(), V::TYPE);
        V::from_term(term.with_capture(&self.capture))
    }
}

impl<V> Deref for Captured<V> {
    type Target = Capture;

    fn deref(&self) -> &Capture {
        &self.capture
    }
}

impl<V> From<Captured<V>> for Capture {
    fn from(captured: Captured<V>) -> Capture {
        captured.capture
    }
}

impl<V> From<&Captured<V>> for Capture {
    fn from(captured: &Captured<V>) -> Capture {
        captured.capture.clone()
    }
}

/// A named run-time scalar: its value may change from call to call without a new kernel.
///
/// ```
/// use flexattn::{MaskMod, Scalar};
///
/// let window = Scalar::i32("window", 256)?;
/// let sliding = MaskMod::new(|i| (i.q() - i.kv()).lt(window.get()));
/// let wider = sliding.with_scalar(Scalar::i32("window", 512)?)?;
/// assert_eq!(sliding.expr(), wider.expr());
/// # Ok::<(), flexattn::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Scalar {
    name: Arc<str>,
    value: Value,
}

impl Scalar {
    /// A scalar of the type of `value`. A bool is not possible.
    ///
    /// # Errors
    /// When the name is no identifier or the value is a bool.
    pub fn new(name: &str, value: Value) -> Result<Scalar> {
        check_name("scalar", name)?;
        if value.ty() == Type::Bool {
            return Err(Error::Expression(format!("scalar {name} is a bool; use an i32 that is 0 or 1")));
        }
        Ok(Scalar { name: name.into(), value })
    }

    /// An f32 scalar.
    ///
    /// # Errors
    /// As [`Scalar::new`].
    pub fn f32(name: &str, value: f32) -> Result<ScalarOf<F32>> {
        Scalar::new(name, Value::F32(value)).map(ScalarOf::of)
    }

    /// An i32 scalar.
    ///
    /// # Errors
    /// As [`Scalar::new`].
    pub fn i32(name: &str, value: i32) -> Result<ScalarOf<I32>> {
        Scalar::new(name, Value::I32(value)).map(ScalarOf::of)
    }

    /// A u32 scalar.
    ///
    /// # Errors
    /// As [`Scalar::new`].
    pub fn u32(name: &str, value: u32) -> Result<ScalarOf<U32>> {
        Scalar::new(name, Value::U32(value)).map(ScalarOf::of)
    }

    /// The name in expressions.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The value.
    pub fn value(&self) -> Value {
        self.value
    }

    /// What an expression knows of this scalar.
    pub fn decl(&self) -> ScalarDecl {
        ScalarDecl { name: self.name.clone(), ty: self.value.ty() }
    }
}

/// A [`Scalar`] whose type the compiler knows: what a closure reads.
#[derive(Debug, Clone)]
pub struct ScalarOf<V> {
    scalar: Scalar,
    view: PhantomData<fn() -> V>,
}

impl<V: View> ScalarOf<V> {
    fn of(scalar: Scalar) -> ScalarOf<V> {
        ScalarOf { scalar, view: PhantomData }
    }

    /// The scalar as a value of the expression.
    pub fn get(&self) -> V {
        V::from_term(Term::new(Expr::scalar(self.scalar.decl())).with_scalar(&self.scalar))
    }
}

impl<V> Deref for ScalarOf<V> {
    type Target = Scalar;

    fn deref(&self) -> &Scalar {
        &self.scalar
    }
}

impl<V> From<ScalarOf<V>> for Scalar {
    fn from(scalar: ScalarOf<V>) -> Scalar {
        scalar.scalar
    }
}

impl<V> From<&ScalarOf<V>> for Scalar {
    fn from(scalar: &ScalarOf<V>) -> Scalar {
        scalar.scalar.clone()
    }
}

/// Names become parts of kernel text: letters, digits and underscores, no digit first, and none of the names
/// that the language gives away already.
fn check_name(what: &str, name: &str) -> Result<()> {
    let mut chars = name.chars();
    let first = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    if !first
        || !chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
        || name.starts_with("__")
        || name == "_"
    {
        return Err(Error::Expression(format!(
            "{what} name {name:?} must be letters, digits and _, not starting with a digit or __"
        )));
    }
    if super::Input::ALL.iter().any(|input| input.name() == name) {
        return Err(Error::Expression(format!("{what} name {name:?} is taken by an input; choose another")));
    }
    Ok(())
}
