//! A `GPUDevice` at work: pipelines, one uniform buffer, command recording, reading back.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use flexattn::kernels::{BindingKind, KernelSpec, Language};
use flexattn::{Dispatch, Error, Result};
use js_sys::{ArrayBuffer, JsNullable, Promise};
use wasm_bindgen::{JsCast, JsValue};
use web_sys::{
    GpuBindGroupDescriptor, GpuBindGroupEntry, GpuBindGroupLayout, GpuBindGroupLayoutDescriptor,
    GpuBindGroupLayoutEntry, GpuBuffer, GpuBufferBinding, GpuBufferBindingLayout, GpuBufferBindingType,
    GpuBufferDescriptor, GpuCommandEncoder, GpuComputePipeline, GpuComputePipelineDescriptor, GpuDevice,
    GpuErrorFilter, GpuPipelineLayoutDescriptor, GpuProgrammableStage, GpuShaderModuleDescriptor,
};

use crate::error::message;
use crate::runtime::Buffer;

// GPUBufferUsage, GPUMapMode and GPUShaderStage are not interfaces but bags of numbers; Node has none
// of them in its global scope.
pub(crate) const MAP_READ: u32 = 0x1;
pub(crate) const COPY_SRC: u32 = 0x4;
pub(crate) const COPY_DST: u32 = 0x8;
pub(crate) const UNIFORM: u32 = 0x40;
pub(crate) const STORAGE: u32 = 0x80;
const MAP_MODE_READ: u32 = 1;
const COMPUTE: u32 = 4;

/// Offsets of uniform bindings: WebGPU's default alignment, which every device keeps to.
const UNIFORM_ALIGNMENT: usize = 256;

/// A device and what was made on it.
pub(crate) struct WebGpu {
    pub(crate) device: GpuDevice,
    /// Whether the device is ours to destroy.
    pub(crate) owned: bool,
    pipelines: RefCell<HashMap<u128, Pipeline>>,
    layouts: RefCell<Vec<(Vec<BindingKind>, GpuBindGroupLayout)>>,
    uniforms: RefCell<Option<(GpuBuffer, usize)>>,
    open: RefCell<Option<Open>>,
    scopes: Cell<u32>,
}

/// Commands that are recorded and not submitted yet, with the buffers they name.
struct Open {
    encoder: GpuCommandEncoder,
    held: Vec<Buffer>,
}

enum Pipeline {
    Ready(GpuComputePipeline, GpuBindGroupLayout),
    Compiling(Promise<GpuComputePipeline>, GpuBindGroupLayout, String),
}

impl WebGpu {
    pub(crate) fn new(device: GpuDevice, owned: bool) -> Self {
        Self {
            device,
            owned,
            pipelines: RefCell::default(),
            layouts: RefCell::default(),
            uniforms: RefCell::default(),
            open: RefCell::default(),
            scopes: Cell::new(0),
        }
    }

    /// A buffer of zeros.
    pub(crate) fn create(&self, label: &str, bytes: u64, usage: u32) -> Result<GpuBuffer> {
        let descriptor = GpuBufferDescriptor::new_with_f64(bytes as f64, usage);
        descriptor.set_label(label);
        // Throws a RangeError where the browser cannot even reserve the size.
        self.device
            .create_buffer(&descriptor)
            .map_err(|_| Error::OutOfMemory { label: label.to_owned(), bytes })
    }

    /// Whether the kernel is compiled. Starts the compiler for one that was not asked for before, off
    /// the page's thread.
    pub(crate) fn ready(&self, spec: &KernelSpec) -> Result<bool> {
        let key = spec.key();
        if let Some(pipeline) = self.pipelines.borrow().get(&key) {
            return Ok(matches!(pipeline, Pipeline::Ready(..)));
        }
        let text = spec.text(Language::WgslWeb)?;
        let label = spec.label();
        let module = GpuShaderModuleDescriptor::new(&text);
        module.set_label(&label);
        let module = self.device.create_shader_module(&module);
        let stage = GpuProgrammableStage::new(&module);
        stage.set_entry_point(spec.entry());
        let layout = self.layout(&spec.bindings())?;
        let pipeline_layout = self.pipeline_layout(&layout);
        let descriptor = GpuComputePipelineDescriptor::new(&pipeline_layout, &stage);
        descriptor.set_label(&label);
        let promise = self.device.create_compute_pipeline_async(&descriptor);
        self.pipelines.borrow_mut().insert(key, Pipeline::Compiling(promise, layout, label));
        Ok(false)
    }

    /// Waits until the kernel is compiled.
    pub(crate) async fn compiled(&self, spec: &KernelSpec) -> Result<()> {
        let key = spec.key();
        self.ready(spec)?;
        let (promise, layout, label) = match self.pipelines.borrow().get(&key) {
            Some(Pipeline::Compiling(promise, layout, label)) => {
                (promise.clone(), layout.clone(), label.clone())
            }
            _ => return Ok(()),
        };
        match promise.await {
            Ok(pipeline) => {
                self.pipelines.borrow_mut().insert(key, Pipeline::Ready(pipeline, layout));
                Ok(())
            }
            Err(exception) => {
                self.pipelines.borrow_mut().remove(&key);
                Err(Error::compile(label, message(&exception)))
            }
        }
    }

    fn pipeline_layout(&self, layout: &GpuBindGroupLayout) -> web_sys::GpuPipelineLayout {
        let groups = [JsNullable::wrap(layout.clone())];
        self.device.create_pipeline_layout(&GpuPipelineLayoutDescriptor::new(&groups))
    }

    fn layout(&self, kinds: &[BindingKind]) -> Result<GpuBindGroupLayout> {
        if let Some((_, layout)) = self.layouts.borrow().iter().find(|(of, _)| of == kinds) {
            return Ok(layout.clone());
        }
        let entries: Vec<_> = (0..)
            .zip(kinds)
            .map(|(binding, kind)| {
                let buffer = GpuBufferBindingLayout::new();
                buffer.set_type(match kind {
                    BindingKind::Read => GpuBufferBindingType::ReadOnlyStorage,
                    BindingKind::ReadWrite => GpuBufferBindingType::Storage,
                    BindingKind::Uniform => GpuBufferBindingType::Uniform,
                });
                let entry = GpuBindGroupLayoutEntry::new(binding, COMPUTE);
                entry.set_buffer(&buffer);
                entry
            })
            .collect();
        let layout = self
            .device
            .create_bind_group_layout(&GpuBindGroupLayoutDescriptor::new(&entries))
            .map_err(|exception| Error::unsupported(message(&exception)))?;
        self.layouts.borrow_mut().push((kinds.to_vec(), layout.clone()));
        Ok(layout)
    }

    /// Records compiled launches, after submitting what is open: a later launch may overwrite the
    /// uniform block of an earlier one only once that is on its way.
    pub(crate) fn record(&self, dispatches: &[Dispatch<Buffer>]) -> Result<()> {
        self.flush();
        let mut block = Vec::new();
        let mut offsets = Vec::new();
        for dispatch in dispatches {
            offsets.push(block.len());
            block.extend_from_slice(&dispatch.params);
            block.resize(block.len().next_multiple_of(UNIFORM_ALIGNMENT), 0);
        }
        let uniforms = self.uniforms(block.len())?;
        self.write(&uniforms, 0, &block)?;

        self.enter();
        let encoder = self.device.create_command_encoder();
        let pass = encoder.begin_compute_pass();
        let mut held = Vec::new();
        for (dispatch, offset) in dispatches.iter().zip(offsets) {
            let pipelines = self.pipelines.borrow();
            let Some(Pipeline::Ready(pipeline, layout)) = pipelines.get(&dispatch.spec.key()) else {
                return Err(Error::compile(dispatch.spec.label(), "it was launched before it was compiled"));
            };
            let mut entries = Vec::with_capacity(dispatch.bindings.len() + 1);
            for (slot, binding) in (0..).zip(&dispatch.bindings) {
                let range = GpuBufferBinding::new(binding.buffer.gpu()?);
                range.set_offset_f64(binding.offset as f64);
                range.set_size_f64(binding.size as f64);
                entries.push(GpuBindGroupEntry::new_with_gpu_buffer_binding(slot, &range));
                held.push(binding.buffer.clone());
            }
            let range = GpuBufferBinding::new(&uniforms);
            range.set_offset_f64(offset as f64);
            range.set_size_f64(dispatch.params.len() as f64);
            entries.push(GpuBindGroupEntry::new_with_gpu_buffer_binding(entries.len() as u32, &range));
            let group = self.device.create_bind_group(&GpuBindGroupDescriptor::new(&entries, layout));
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, Some(&group));
            let [x, y, z] = dispatch.grid;
            pass.dispatch_workgroups_with_workgroup_count_y_and_workgroup_count_z(x, y, z);
        }
        pass.end();
        *self.open.borrow_mut() = Some(Open { encoder, held });
        Ok(())
    }

    fn uniforms(&self, bytes: usize) -> Result<GpuBuffer> {
        let mut slot = self.uniforms.borrow_mut();
        if let Some((buffer, size)) = &*slot
            && *size >= bytes
        {
            return Ok(buffer.clone());
        }
        let size = bytes.next_power_of_two().max(4096);
        let buffer = self.create("flexattn parameters", size as u64, UNIFORM | COPY_DST)?;
        if let Some((old, _)) = slot.replace((buffer.clone(), size)) {
            old.destroy();
        }
        Ok(buffer)
    }

    /// Writes through the queue: after all submitted work, before all later work.
    pub(crate) fn write(&self, buffer: &GpuBuffer, offset: u64, bytes: &[u8]) -> Result<()> {
        self.device
            .queue()
            .write_buffer_with_f64_and_u8_slice(buffer, offset as f64, bytes)
            .map_err(|exception| Error::buffer(message(&exception)))
    }

    /// The same from a typed array, without a copy in this module's memory.
    pub(crate) fn write_array(&self, buffer: &GpuBuffer, bytes: &js_sys::Uint8Array) -> Result<()> {
        self.device
            .queue()
            .write_buffer_with_u32_and_buffer_source(buffer, 0, bytes)
            .map_err(|exception| Error::buffer(message(&exception)))
    }

    /// Opens the error scopes that everything until [`WebGpu::leave`] falls into.
    pub(crate) fn enter(&self) {
        if self.scopes.get() == 0 {
            self.device.push_error_scope(GpuErrorFilter::OutOfMemory);
            self.device.push_error_scope(GpuErrorFilter::Validation);
            self.scopes.set(2);
        }
    }

    /// Closes them; the promises say what went wrong: validation, then memory.
    pub(crate) fn leave(&self) -> Option<[Promise<JsNullable<web_sys::GpuError>>; 2]> {
        (self.scopes.replace(0) > 0).then(|| [self.device.pop_error_scope(), self.device.pop_error_scope()])
    }

    /// Submits what is recorded.
    pub(crate) fn flush(&self) {
        if let Some(open) = self.open.borrow_mut().take() {
            self.device.queue().submit(&[open.encoder.finish()]);
        }
    }

    /// Adds a copy of a range of whole words to what is recorded.
    pub(crate) fn copy(&self, from: &Buffer, range: std::ops::Range<u64>, to: &Buffer) -> Result<()> {
        self.enter();
        let mut open = self.open.borrow_mut();
        let open = open
            .get_or_insert_with(|| Open { encoder: self.device.create_command_encoder(), held: Vec::new() });
        open.held.extend([from.clone(), to.clone()]);
        let length = range.end - range.start;
        open.encoder
            .copy_buffer_to_buffer_with_f64_and_f64_and_f64(
                from.gpu()?,
                range.start as f64,
                to.gpu()?,
                0.0,
                length as f64,
            )
            .map_err(|exception| Error::buffer(message(&exception)))
    }

    /// Adds copies into one mappable buffer to what is recorded, and submits. The ranges start and end
    /// at multiples of 4 bytes.
    pub(crate) fn stage(&self, ranges: &[(Buffer, std::ops::Range<u64>)]) -> Result<Staged> {
        let bytes: u64 = ranges.iter().map(|(_, range)| (range.end - range.start).next_multiple_of(8)).sum();
        let staging = self.create("flexattn results", bytes.max(8), MAP_READ | COPY_DST)?;
        self.enter();
        let mut open = self.open.borrow_mut();
        let open_now = open
            .get_or_insert_with(|| Open { encoder: self.device.create_command_encoder(), held: Vec::new() });
        let mut at = 0;
        let mut parts = Vec::new();
        for (buffer, range) in ranges {
            let length = range.end - range.start;
            open_now
                .encoder
                .copy_buffer_to_buffer_with_f64_and_f64_and_f64(
                    buffer.gpu()?,
                    range.start as f64,
                    &staging,
                    at as f64,
                    length as f64,
                )
                .map_err(|exception| Error::buffer(message(&exception)))?;
            parts.push(at..at + length);
            at += length.next_multiple_of(8);
        }
        drop(open);
        self.flush();
        let mapped = staging.map_async(MAP_MODE_READ);
        Ok(Staged { staging, mapped: mapped.unchecked_into(), parts })
    }
}

impl WebGpu {
    /// Runs a kernel of one workgroup that fills its one buffer, for finding out what the device does.
    pub(crate) async fn probe(&self, text: &str, entry: &str, bytes: u64) -> Result<Vec<u32>> {
        use BindingKind::ReadWrite;
        let module = self.device.create_shader_module(&GpuShaderModuleDescriptor::new(text));
        let stage = GpuProgrammableStage::new(&module);
        stage.set_entry_point(entry);
        let layout = self.layout(&[ReadWrite])?;
        let pipeline_layout = self.pipeline_layout(&layout);
        let descriptor = GpuComputePipelineDescriptor::new(&pipeline_layout, &stage);
        let pipeline = self.device.create_compute_pipeline_async(&descriptor).await;
        let pipeline = pipeline.map_err(|exception| Error::compile("flexattn probe", message(&exception)))?;
        let buffer = Buffer::own(self.create("flexattn probe", bytes, STORAGE | COPY_SRC)?);
        let entry = GpuBindGroupEntry::new_with_gpu_buffer(0, buffer.gpu()?);
        let group = self.device.create_bind_group(&GpuBindGroupDescriptor::new(&[entry], &layout));
        let encoder = self.device.create_command_encoder();
        let pass = encoder.begin_compute_pass();
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, Some(&group));
        pass.dispatch_workgroups(1);
        pass.end();
        *self.open.borrow_mut() = Some(Open { encoder, held: vec![buffer.clone()] });
        let staged = self.stage(&[(buffer, 0..bytes)]);
        if let Some(scopes) = self.leave() {
            for scope in scopes {
                // What the scopes would say, the mapping says too: it fails.
                let _ = scope.await;
            }
        }
        let arrays = staged?.arrays().await.map_err(|exception| Error::buffer(message(&exception)))?;
        Ok(arrays.first().map(|array| js_sys::Uint32Array::new(array).to_vec()).unwrap_or_default())
    }
}

/// A copy on its way to where the page can read it.
pub(crate) struct Staged {
    staging: GpuBuffer,
    mapped: Promise,
    parts: Vec<std::ops::Range<u64>>,
}

impl Staged {
    /// One fresh ArrayBuffer per range, or the browser's reason why not.
    pub(crate) async fn arrays(self) -> std::result::Result<Vec<ArrayBuffer>, JsValue> {
        self.mapped.await?;
        let all = self.staging.get_mapped_range()?;
        let parts =
            self.parts.iter().map(|part| all.slice_with_end(part.start as u32, part.end as u32)).collect();
        self.staging.unmap();
        self.staging.destroy();
        Ok(parts)
    }
}

/// A handle that many may share.
pub(crate) type SharedGpu = Rc<WebGpu>;
