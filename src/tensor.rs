//! Tensors: a buffer of a runtime, an element type and a layout.

use crate::error::{Error, Result, filled};
#[cfg(feature = "wgpu")]
use crate::expr::{Capture, CaptureData, CaptureType, DeviceHandle};
#[cfg(feature = "wgpu")]
use crate::runtime::Resident;
use crate::runtime::{Runtime, Usage};
use crate::shape::{DType, Element, Layout};
use std::fmt;

/// The runtime of a [`Tensor`] unless another is named.
#[cfg(feature = "wgpu")]
pub type DefaultRuntime = crate::gpu::Gpu;
/// The runtime of a [`Tensor`] unless another is named.
#[cfg(not(feature = "wgpu"))]
pub type DefaultRuntime = crate::cpu::Cpu;

/// A `[B, H, L, D]` tensor in a runtime's memory.
///
/// Cloning gives another handle to the same memory. Several tensors may lie in one buffer.
#[derive(Clone)]
pub struct Tensor<R: Runtime = DefaultRuntime> {
    runtime: R,
    buffer: R::Buffer,
    dtype: DType,
    layout: Layout,
}

impl<R: Runtime> fmt::Debug for Tensor<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("dtype", &self.dtype)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

impl<R: Runtime> Tensor<R> {
    /// Uploads `data`, row-major `[B, H, L, D]`.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when the number of values is not that of the shape, and those of
    /// [`Runtime::create`].
    pub fn upload<T: Element>(runtime: &R, data: &[T], shape: [usize; 4]) -> Result<Self> {
        let layout = Layout::contiguous(shape)?;
        if data.len() != layout.elements() {
            return Err(Error::shape(format!(
                "there are {} values but shape {shape:?} has {}; pass one for each element",
                data.len(),
                layout.elements()
            )));
        }
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let buffer = runtime.create("tensor", bytes.len() as u64, Usage::Tensor)?;
        runtime.write(&buffer, 0, bytes)?;
        Ok(Self { runtime: runtime.clone(), buffer, dtype: T::DTYPE, layout })
    }

    /// A new tensor of zeros, row-major.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::contiguous`] and [`Runtime::create`].
    pub fn zeros(runtime: &R, dtype: DType, shape: [usize; 4]) -> Result<Self> {
        Self::named(runtime, "tensor", dtype, shape)
    }

    pub(crate) fn named(runtime: &R, label: &str, dtype: DType, shape: [usize; 4]) -> Result<Self> {
        let layout = Layout::contiguous(shape)?;
        let bytes = layout.elements() as u64 * dtype.size() as u64;
        let buffer = runtime.create(label, bytes, Usage::Tensor)?;
        Ok(Self { runtime: runtime.clone(), buffer, dtype, layout })
    }

    /// A tensor that lies in a buffer of the runtime, at the layout's offset and strides.
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`] when the buffer ends before the tensor does.
    pub fn from_parts(runtime: &R, buffer: R::Buffer, dtype: DType, layout: Layout) -> Result<Self> {
        let layout = Layout::new(layout.shape, layout.strides, layout.offset)?;
        layout.check_buffer("the tensor", dtype, runtime.size(&buffer))?;
        Ok(Self { runtime: runtime.clone(), buffer, dtype, layout })
    }

    /// Other elements of the same buffer: a slice of a pool, other strides.
    ///
    /// # Errors
    ///
    /// As [`Tensor::from_parts`].
    pub fn view(&self, layout: Layout) -> Result<Self> {
        Self::from_parts(&self.runtime, self.buffer.clone(), self.dtype, layout)
    }

    /// Rows `start..start + len` of every head, without copying.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when there are fewer rows.
    pub fn rows(&self, start: usize, len: usize) -> Result<Self> {
        let mut layout = self.layout;
        if start.checked_add(len).is_none_or(|end| end > layout.shape[2]) {
            return Err(Error::shape(format!(
                "rows {start} and {len} after it do not lie in the {} rows of the tensor",
                layout.shape[2]
            )));
        }
        layout.shape[2] = len;
        layout.offset += start * layout.strides[2];
        Ok(Self { layout, ..self.clone() })
    }

    /// Batch, heads, rows, columns.
    pub fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    /// Where the elements lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The buffer.
    pub fn buffer(&self) -> &R::Buffer {
        &self.buffer
    }

    /// The runtime whose memory this is.
    pub fn runtime(&self) -> &R {
        &self.runtime
    }

    /// Overwrites the elements with `data`, row-major in the tensor's shape: how a kv cache is
    /// appended to, with [`Tensor::rows`].
    ///
    /// # Errors
    ///
    /// [`Error::DType`] for another type, [`Error::Shape`] for another number of values,
    /// [`Error::Buffer`] when a run of 16-bit elements begins in the middle of a 32-bit word.
    pub fn write<T: Element>(&self, data: &[T]) -> Result<()> {
        if T::DTYPE != self.dtype {
            return Err(Error::dtype(format!(
                "the tensor is {} but the values are {}",
                self.dtype,
                T::DTYPE
            )));
        }
        if data.len() != self.layout.elements() {
            return Err(Error::shape(format!(
                "there are {} values but the tensor has {}; pass one for each element",
                data.len(),
                self.layout.elements()
            )));
        }
        for (from, to, len) in self.runs() {
            let at = (to * self.dtype.size()) as u64;
            let bytes: &[u8] = bytemuck::cast_slice(&data[from..from + len]);
            if !at.is_multiple_of(4) || !bytes.len().is_multiple_of(4) {
                return Err(Error::buffer(format!(
                    "a run of {len} {} elements at {to} is not made of whole 32-bit words; write more rows at once or pad head_dim",
                    self.dtype
                )));
            }
            self.runtime.write(&self.buffer, at, bytes)?;
        }
        Ok(())
    }

    /// The elements as f32, row-major in the tensor's shape.
    ///
    /// Waits for all work given so far. In a page use [`Tensor::read_async`].
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn read(&self) -> Result<Vec<f32>> {
        crate::runtime::block_on(self.read_async())
    }

    /// [`Tensor::read`] for async programs and pages.
    ///
    /// # Errors
    ///
    /// As [`Tensor::read`].
    pub async fn read_async(&self) -> Result<Vec<f32>> {
        Ok(self.dtype.widen(&self.read_bytes().await?))
    }

    /// The elements as they are stored, row-major in the tensor's shape.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] when `T` is another type, [`Error::DeviceLost`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn read_as<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::dtype(format!(
                "the tensor is {} and cannot be read as {}",
                self.dtype,
                T::DTYPE
            )));
        }
        let bytes = crate::runtime::block_on(self.read_bytes())?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// The bytes of the elements (little endian), row-major in the tensor's shape.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`].
    pub async fn read_bytes(&self) -> Result<Vec<u8>> {
        if self.layout.is_empty() {
            return Ok(Vec::new());
        }
        let size = self.dtype.size();
        let start = self.layout.offset * size;
        let end = self.layout.end() * size;
        let bytes = self.runtime.read(&self.buffer, start as u64..end as u64).await?;
        if self.layout.is_contiguous() {
            return Ok(bytes);
        }
        let count = self.layout.elements().checked_mul(size);
        let mut gathered = filled("the elements that are read", 0, count)?;
        for (to, from, len) in self.runs() {
            let from = from * size - start;
            gathered[to * size..(to + len) * size].copy_from_slice(&bytes[from..from + len * size]);
        }
        Ok(gathered)
    }

    /// The tensor as runs of neighbours: (place in row-major order, place in the buffer, length).
    fn runs(&self) -> Vec<(usize, usize, usize)> {
        let [batch, heads, rows, columns] = self.layout.shape;
        if self.layout.is_contiguous() {
            return vec![(0, self.layout.offset, self.layout.elements())];
        }
        let mut runs = Vec::new();
        let together = rows == 1 || self.layout.strides[2] == columns;
        let (steps, len) = if together { (1, rows * columns) } else { (rows, columns) };
        for b in 0..batch {
            for h in 0..heads {
                for row in 0..steps {
                    let to = ((b * heads + h) * steps + row) * len;
                    runs.push((to, self.layout.index([b, h, row, 0]), len));
                }
            }
        }
        runs
    }
}

#[cfg(feature = "wgpu")]
impl crate::gpu::Gpu {
    /// Uploads `data` (f32, [`half::f16`] or [`half::bf16`]), row-major `[B, H, L, D]`.
    ///
    /// # Errors
    ///
    /// As [`Tensor::upload`].
    pub fn tensor<T: Element>(&self, data: &[T], shape: [usize; 4]) -> Result<Tensor> {
        Tensor::upload(self, data, shape)
    }

    /// A captured tensor whose values lie in a buffer of the program's on this device, from element
    /// `first` on, row-major: kernels read it in place, so what the GPU computed need not be read
    /// back. A call binds one such tensor. Nothing is known of its values, so every block of a mask
    /// that reads it counts as partial, unless the call is given the block mask that
    /// [`BlockMask::build_on`](crate::BlockMask::build_on) makes of it.
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`] for a buffer without `STORAGE` or one that ends too early, those of
    /// [`Capture::new`], [`Error::Unsupported`] on the Cpu tier.
    pub fn capture(
        &self,
        name: &str,
        dtype: CaptureType,
        buffer: &wgpu::Buffer,
        first: u32,
        shape: &[usize],
    ) -> Result<Capture> {
        storage(buffer)?;
        let needed = dtype.end(first, shape);
        if needed > buffer.size() {
            return Err(Error::buffer(format!(
                "the buffer of capture {name} has {} bytes but {shape:?} {dtype} from element {first} on ends at byte {needed}; bind a larger buffer",
                buffer.size()
            )));
        }
        let resident = Resident { buffer: DeviceHandle::new(self.adopt(buffer.clone())?), first };
        Capture::new(name, dtype, shape, CaptureData::Device(DeviceHandle::new(resident)))
    }

    /// A new tensor of zeros, row-major `[B, H, L, D]`.
    ///
    /// # Errors
    ///
    /// As [`Tensor::zeros`].
    pub fn zeros(&self, dtype: DType, shape: [usize; 4]) -> Result<Tensor> {
        Tensor::zeros(self, dtype, shape)
    }
}

#[cfg(feature = "wgpu")]
impl Tensor<crate::gpu::Gpu> {
    /// A tensor in a buffer of the program's own, which must belong to the device of `gpu` and have
    /// the usage `STORAGE` (and `COPY_SRC` to be read, `COPY_DST` to be written from the host).
    /// A buffer of another device is refused by the call that binds it, as long as both devices are of one
    /// `wgpu::Instance`; wgpu cannot tell buffers of several instances apart.
    /// `offset` and `strides` count elements.
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`] for a missing usage, a buffer that ends too early or not after a whole word, those
    /// of [`Layout::new`], [`Error::Unsupported`] on the Cpu tier.
    pub fn from_buffer(
        gpu: &crate::gpu::Gpu,
        buffer: &wgpu::Buffer,
        dtype: DType,
        offset: usize,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self> {
        storage(buffer)?;
        let layout = Layout::new(shape, strides, offset)?;
        Self::from_parts(gpu, gpu.adopt(buffer.clone())?, dtype, layout)
    }
}

#[cfg(feature = "wgpu")]
fn storage(buffer: &wgpu::Buffer) -> Result<()> {
    if !buffer.size().is_multiple_of(4) {
        return Err(Error::buffer(format!(
            "the buffer has {} bytes but kernels bind whole words; create it with a multiple of 4",
            buffer.size()
        )));
    }
    if buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
        return Ok(());
    }
    Err(Error::buffer(format!(
        "the buffer has usage {:?} but needs STORAGE; create it with that",
        buffer.usage()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    fn tensor(shape: [usize; 4]) -> Tensor<Cpu> {
        let data: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
        Tensor::upload(&Cpu::new(), &data, shape).unwrap()
    }

    #[test]
    fn strided_view_reads_in_the_order_of_its_shape() {
        let blhd = tensor([1, 3, 2, 4]);
        let layout = Layout::blhd([1, 2, 3, 4]).unwrap();
        let view = blhd.view(layout).unwrap();
        let expected: Vec<f32> = (0..2)
            .flat_map(|h| (0..3).flat_map(move |l| (0..4).map(move |d| ((l * 2 + h) * 4 + d) as f32)))
            .collect();
        assert_eq!(view.read().unwrap(), expected);
    }

    #[test]
    fn appended_rows_land_in_their_place() {
        let cache = tensor([1, 2, 4, 2]);
        cache
            .rows(1, 2)
            .unwrap()
            .write(&[100.0f32, 101.0, 102.0, 103.0, 200.0, 201.0, 202.0, 203.0])
            .unwrap();
        let read = cache.read().unwrap();
        assert_eq!(read[..8], [0.0, 1.0, 100.0, 101.0, 102.0, 103.0, 6.0, 7.0]);
        assert_eq!(read[8..], [8.0, 9.0, 200.0, 201.0, 202.0, 203.0, 14.0, 15.0]);
        assert!(cache.rows(3, 2).unwrap_err().is_shape());
    }

    #[test]
    fn wrong_values_are_refused() {
        let tensor = tensor([1, 1, 2, 2]);
        assert!(tensor.write(&[1.0f32]).unwrap_err().is_shape());
        assert!(tensor.write(&[half::f16::ONE; 4]).unwrap_err().is_dtype());
        assert!(tensor.read_as::<half::f16>().unwrap_err().is_dtype());
        assert!(tensor.view(Layout::contiguous([1, 1, 3, 2]).unwrap()).unwrap_err().is_buffer());
        assert!(Tensor::upload(&Cpu::new(), &[0.0f32; 3], [1, 1, 2, 2]).unwrap_err().is_shape());
    }
}
