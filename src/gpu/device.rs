//! A wgpu device: buffers, pipelines, recording and submitting launches, reading back.

use super::caches::{Arena, BindGroups, Constants, GroupKey};
use super::passthrough;
use crate::kernels::{BindingKind, KernelSpec, Language, MetalTile};
use crate::runtime::{Dispatch, Profile, Usage};
use crate::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// A lock that outlives a panic elsewhere: what it guards are caches, whole at every moment.
pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A buffer on the device. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Buffer(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    raw: wgpu::Buffer,
    id: u64,
    /// Set once a bind group refers to it; spares the others the search when they are dropped.
    bound: AtomicBool,
    groups: Weak<BindGroups>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.bound.load(Ordering::Relaxed)
            && let Some(groups) = self.groups.upgrade()
        {
            groups.forget(self.id);
        }
    }
}

impl Buffer {
    pub(super) fn raw(&self) -> &wgpu::Buffer {
        &self.0.raw
    }

    pub(super) fn size(&self) -> u64 {
        self.0.raw.size()
    }
}

#[derive(Debug)]
struct Layouts {
    index: usize,
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

#[derive(Debug)]
struct Pipeline {
    raw: wgpu::ComputePipeline,
    layouts: Arc<Layouts>,
    label: String,
}

/// Pipelines by the address of the kernel.
type Recent = HashMap<usize, (Arc<KernelSpec>, Arc<Pipeline>)>;

/// What the caches hold and how much was made, for tests and reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// Compiled pipelines.
    pub pipelines: usize,
    /// Bind groups.
    pub bind_groups: usize,
    /// Read-only buffers (block lists, captures).
    pub constants: usize,
    /// Bytes of them.
    pub constant_bytes: u64,
    /// Bytes of scratch.
    pub scratch_bytes: u64,
    /// Buffers made so far, adopted ones included.
    pub buffers_made: u64,
    /// Bind groups made so far.
    pub bind_groups_made: u64,
    /// Submits of calls so far.
    pub submits: u64,
}

#[derive(Debug)]
pub(super) struct Device {
    device: wgpu::Device,
    queue: wgpu::Queue,
    language: Language,
    limit_buffer: u64,
    limit_invocations: u32,
    limit_workgroup_memory: u32,
    uniform_alignment: u64,
    timestamps: bool,
    lost: Arc<OnceLock<String>>,
    layouts: Mutex<HashMap<Vec<BindingKind>, Arc<Layouts>>>,
    pipelines: Mutex<HashMap<u128, Arc<Pipeline>>>,
    recent: Mutex<Recent>,
    submits: AtomicU64,
    built: AtomicU64,
    buffers: AtomicU64,
    groups: Arc<BindGroups>,
    constants: Mutex<Constants<Buffer>>,
    scratch: Mutex<HashMap<&'static str, Buffer>>,
    arena: Mutex<Arena>,
    timing: Mutex<Option<Vec<wgpu::Buffer>>>,
}

impl Device {
    /// Compiled variants kept at most; a program that makes masks forever starts over there.
    const MAX_PIPELINES: usize = 1024;

    /// Kernels known by address at most.
    const MAX_RECENT: usize = 64;

    /// Takes over a device. An `own` one also gets a handler for errors outside every scope, which
    /// would otherwise panic; an adopted one keeps its owner's.
    pub(super) fn new(device: wgpu::Device, queue: wgpu::Queue, own: bool) -> Self {
        let lost = Arc::new(OnceLock::new());
        let seen = lost.clone();
        device.set_device_lost_callback(move |reason, message| {
            let message = if message.is_empty() { format!("{reason:?}") } else { message };
            let _ = seen.set(message);
        });
        if own {
            // Every call of this module has its own error scopes; what remains are messages about
            // resources that an error had already been returned for.
            device.on_uncaptured_error(Arc::new(|_| ()));
        }
        let limits = device.limits();
        Self {
            language: Language::Wgsl,
            limit_buffer: limits.max_buffer_size,
            limit_invocations: limits.max_compute_invocations_per_workgroup,
            limit_workgroup_memory: limits.max_compute_workgroup_storage_size,
            uniform_alignment: u64::from(limits.min_uniform_buffer_offset_alignment).max(16),
            timestamps: device.features().contains(wgpu::Features::TIMESTAMP_QUERY),
            device,
            queue,
            lost,
            layouts: Mutex::default(),
            pipelines: Mutex::default(),
            recent: Mutex::default(),
            submits: AtomicU64::new(0),
            built: AtomicU64::new(0),
            buffers: AtomicU64::new(0),
            groups: Arc::default(),
            constants: Mutex::default(),
            scratch: Mutex::default(),
            arena: Mutex::default(),
            timing: Mutex::new(None),
        }
    }

    /// Chooses the language of kernels once the tier is known.
    pub(super) fn set_language(&mut self, profile: &Profile) {
        self.language = match profile.tier {
            crate::Tier::Metal => Language::Msl,
            _ if profile.browser => Language::WgslWeb,
            _ => Language::Wgsl,
        };
    }

    pub(super) fn device(&self) -> &wgpu::Device {
        &self.device
    }

    pub(super) fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    pub(super) fn is_lost(&self) -> bool {
        self.check_alive().is_err()
    }

    pub(super) fn pipelines_built(&self) -> u64 {
        self.built.load(Ordering::Relaxed)
    }

    pub(super) fn held(&self) -> Held {
        let scratch_bytes = lock(&self.scratch).values().map(Buffer::size).sum();
        let constants = lock(&self.constants);
        Held {
            pipelines: lock(&self.pipelines).len(),
            bind_groups: self.groups.len(),
            constants: constants.len(),
            constant_bytes: constants.bytes(),
            scratch_bytes,
            buffers_made: self.buffers.load(Ordering::Relaxed),
            bind_groups_made: self.groups.made(),
            submits: self.submits.load(Ordering::Relaxed),
        }
    }

    /// Advances callbacks, and reports a device that is gone.
    fn check_alive(&self) -> Result<()> {
        self.poll(wgpu::PollType::Poll)
    }

    /// Reports a submission that a destroyed device silently dropped. wgpu tells of the loss only once
    /// the work before it has ended, but it does not know the number of a dropped submission.
    fn check_taken(&self, submission: wgpu::SubmissionIndex) -> Result<()> {
        let kind = wgpu::PollType::Wait { submission_index: Some(submission), timeout: Some(Duration::ZERO) };
        self.poll(kind)
    }

    fn poll(&self, kind: wgpu::PollType) -> Result<()> {
        if let Some(reason) = self.lost.get() {
            return Err(Error::DeviceLost(reason.clone()));
        }
        // wgpu panics in here when the driver reports a lost device while waiting for it.
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.device.poll(kind)));
        match (self.lost.get(), polled) {
            (Some(reason), _) => Err(Error::DeviceLost(reason.clone())),
            (None, Err(_)) => {
                let reason = "the driver failed while waiting for it".to_owned();
                let _ = self.lost.set(reason.clone());
                Err(Error::DeviceLost(reason))
            }
            (None, Ok(Err(wgpu::PollError::WrongSubmissionIndex(..)))) => {
                let reason = "it was destroyed".to_owned();
                let _ = self.lost.set(reason.clone());
                Err(Error::DeviceLost(reason))
            }
            (None, Ok(_)) => Ok(()),
        }
    }

    /// Runs `f` and returns the first error that wgpu raised meanwhile. Scopes belong to the thread,
    /// so another thread's errors do not land here.
    fn scoped<T>(&self, f: impl FnOnce() -> T) -> (T, Option<wgpu::Error>) {
        #[cfg(not(target_arch = "wasm32"))]
        {
            let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
            let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
            let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
            let value = f();
            // Ready at once outside browsers.
            let validation = crate::runtime::block_on(validation.pop());
            let internal = crate::runtime::block_on(internal.pop());
            let memory = crate::runtime::block_on(memory.pop());
            (value, memory.or(internal).or(validation))
        }
        // A page learns of errors later than the call; they reach the uncaptured handler.
        #[cfg(target_arch = "wasm32")]
        (f(), None)
    }

    pub(super) fn create(&self, label: &str, bytes: u64, usage: Usage) -> Result<Buffer> {
        use wgpu::BufferUsages as U;
        let usage = match usage {
            Usage::Tensor => U::STORAGE | U::COPY_SRC | U::COPY_DST,
            Usage::Constant => U::STORAGE | U::COPY_DST,
            Usage::Scratch => U::STORAGE,
        };
        self.create_raw(label, bytes, usage)
    }

    fn create_raw(&self, label: &str, bytes: u64, usage: wgpu::BufferUsages) -> Result<Buffer> {
        // One vec4 at least: the smallest thing a kernel may declare.
        let size = bytes.max(16).next_multiple_of(4);
        if size > self.limit_buffer {
            return Err(Error::Limit {
                what: format!("`{label}`"),
                limit: "maxBufferSize",
                needed: size,
                available: self.limit_buffer,
                remedy: "split it by batch or head, or create the device with Gpu::wanted_limits".into(),
            });
        }
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
        let (raw, error) = self.scoped(|| self.device.create_buffer(&descriptor));
        self.check_alive()?;
        match error {
            Some(wgpu::Error::OutOfMemory { .. }) => {
                Err(Error::OutOfMemory { label: label.into(), bytes: size })
            }
            Some(error) => Err(Error::buffer(format!("`{label}` of {size} bytes was refused: {error}"))),
            None => Ok(self.adopt(raw)),
        }
    }

    pub(super) fn adopt(&self, raw: wgpu::Buffer) -> Buffer {
        let id = self.buffers.fetch_add(1, Ordering::Relaxed);
        Buffer(Arc::new(Owned {
            raw,
            id,
            bound: AtomicBool::new(false),
            groups: Arc::downgrade(&self.groups),
        }))
    }

    /// Ids count per device, so a buffer of another one could be taken for one of ours.
    fn owns(&self, buffer: &Buffer) -> bool {
        std::ptr::eq(buffer.0.groups.as_ptr(), Arc::as_ptr(&self.groups))
    }

    pub(super) fn write(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset + bytes.len() as u64;
        if end.next_multiple_of(4) > buffer.size() || !offset.is_multiple_of(4) {
            return Err(Error::buffer(format!(
                "{} bytes at {offset} do not fit a buffer of {} bytes at a multiple of 4",
                bytes.len(),
                buffer.size()
            )));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let ((), error) = self.scoped(|| {
            let whole = bytes.len() / 4 * 4;
            if whole > 0 {
                self.queue.write_buffer(buffer.raw(), offset, &bytes[..whole]);
            }
            if whole < bytes.len() {
                let mut last = [0; 4];
                last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
                self.queue.write_buffer(buffer.raw(), offset + whole as u64, &last);
            }
        });
        if let Some(reason) = self.lost.get() {
            return Err(Error::DeviceLost(reason.clone()));
        }
        error.map_or(Ok(()), |error| Err(Error::buffer(format!("the buffer cannot be written: {error}"))))
    }

    pub(super) fn constant(&self, key: u128, label: &str, bytes: impl FnOnce() -> Vec<u8>) -> Result<Buffer> {
        if let Some(buffer) = lock(&self.constants).get(key) {
            return Ok(buffer);
        }
        let bytes = bytes();
        let buffer = self.create(label, bytes.len() as u64, Usage::Constant)?;
        self.write(&buffer, 0, &bytes)?;
        lock(&self.constants).insert(key, buffer.clone(), buffer.size());
        Ok(buffer)
    }

    pub(super) fn scratch(&self, label: &'static str, bytes: u64) -> Result<Buffer> {
        let mut scratch = lock(&self.scratch);
        if let Some(buffer) = scratch.get(label)
            && buffer.size() >= bytes
        {
            return Ok(buffer.clone());
        }
        // Growing by doubling at least: a growing kv_len must not allocate at every step.
        let held = scratch.get(label).map_or(0, Buffer::size);
        let grown = bytes.max((held * 2).min(self.limit_buffer));
        let buffer = self.create(label, grown, Usage::Scratch)?;
        scratch.insert(label, buffer.clone());
        Ok(buffer)
    }

    fn layouts(&self, kinds: &[BindingKind]) -> Arc<Layouts> {
        let mut layouts = lock(&self.layouts);
        if let Some(found) = layouts.get(kinds) {
            return found.clone();
        }
        let entries: Vec<_> = kinds
            .iter()
            .enumerate()
            .map(|(binding, kind)| wgpu::BindGroupLayoutEntry {
                binding: binding as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match kind {
                        BindingKind::Read => wgpu::BufferBindingType::Storage { read_only: true },
                        BindingKind::ReadWrite => wgpu::BufferBindingType::Storage { read_only: false },
                        BindingKind::Uniform => wgpu::BufferBindingType::Uniform,
                    },
                    has_dynamic_offset: *kind == BindingKind::Uniform,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let group = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some("flexattn"),
            entries: &entries,
        });
        let pipeline = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some("flexattn"),
            bind_group_layouts: &[Some(&group)],
            immediate_size: 0,
        });
        let made = Arc::new(Layouts { index: layouts.len(), group, pipeline });
        layouts.insert(kinds.to_vec(), made.clone());
        made
    }

    /// The pipeline of a kernel. A kernel that was met before is known by its address, so that later calls
    /// neither spell nor hash what it is.
    fn pipeline(&self, spec: &Arc<KernelSpec>) -> Result<Arc<Pipeline>> {
        let address = Arc::as_ptr(spec) as usize;
        if let Some((_, found)) = lock(&self.recent).get(&address) {
            return Ok(found.clone());
        }
        let pipeline = self.pipeline_by_key(spec)?;
        let mut recent = lock(&self.recent);
        if recent.len() >= Self::MAX_RECENT {
            recent.clear();
        }
        // The kernel is held along, so that its address is not given to another.
        recent.insert(address, (spec.clone(), pipeline.clone()));
        Ok(pipeline)
    }

    fn pipeline_by_key(&self, spec: &KernelSpec) -> Result<Arc<Pipeline>> {
        let key = spec.key();
        // Held while compiling: a second thread that wants the same kernel waits for it.
        let mut pipelines = lock(&self.pipelines);
        if let Some(found) = pipelines.get(&key) {
            return Ok(found.clone());
        }
        let built = Arc::new(self.build(spec, self.language)?);
        self.built.fetch_add(1, Ordering::Relaxed);
        if pipelines.len() >= Self::MAX_PIPELINES {
            pipelines.clear();
        }
        pipelines.insert(key, built.clone());
        Ok(built)
    }

    /// Whether the driver's compiler takes a kernel in `language`; what it makes is not kept.
    pub(super) fn try_build(&self, spec: &KernelSpec, language: Language) -> Result<()> {
        self.build(spec, language).map(drop)
    }

    fn build(&self, spec: &KernelSpec, language: Language) -> Result<Pipeline> {
        let label = spec.label();
        let [x, y, z] = spec.workgroup();
        for (limit, needed, available) in [
            ("maxComputeInvocationsPerWorkgroup", x * y * z, self.limit_invocations),
            (
                "maxComputeWorkgroupStorageSize",
                spec.workgroup_memory(),
                workgroup_memory(spec, self.limit_workgroup_memory),
            ),
        ] {
            if needed > available {
                return Err(Error::Limit {
                    what: format!("kernel `{label}`"),
                    limit,
                    needed: needed.into(),
                    available: available.into(),
                    remedy: "create the device with Gpu::wanted_limits".into(),
                });
            }
        }
        let (made, error) = self.scoped(|| -> Result<_> {
            let layouts = self.layouts(&spec.bindings());
            let module = passthrough::module(&self.device, spec, language)?;
            let raw = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&label),
                layout: Some(&layouts.pipeline),
                module: &module,
                entry_point: Some(spec.entry()),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // The kernels write before they read; browsers fill with zeros all the same.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            });
            Ok((raw, layouts))
        });
        self.check_alive()?;
        let (raw, layouts) = made?;
        match error {
            Some(wgpu::Error::OutOfMemory { .. }) => Err(Error::OutOfMemory { label, bytes: 0 }),
            Some(error) => Err(Error::compile(label, error.to_string())),
            None => Ok(Pipeline { raw, layouts, label }),
        }
    }

    /// Records the launches as one compute pass. Nothing is submitted.
    pub(super) fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        dispatches: &[Dispatch<Buffer>],
    ) -> Result<()> {
        self.encode_timed(encoder, dispatches, None)
    }

    fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        dispatches: &[Dispatch<Buffer>],
        timer: Option<&wgpu::QuerySet>,
    ) -> Result<()> {
        let mut ready = Vec::with_capacity(dispatches.len());
        for dispatch in dispatches.iter().filter(|dispatch| !dispatch.grid.contains(&0)) {
            let pipeline = self.pipeline(&dispatch.spec)?;
            let (group, offset) = self.bind(&pipeline, dispatch)?;
            ready.push((pipeline, group, offset, dispatch.grid));
        }
        let ((), error) = self.scoped(|| {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some("flexattn"),
                timestamp_writes: timer.map(|query_set| wgpu::ComputePassTimestampWrites {
                    query_set,
                    beginning_of_pass_write_index: Some(0),
                    end_of_pass_write_index: Some(1),
                }),
            });
            for (pipeline, group, offset, [x, y, z]) in &ready {
                pass.set_pipeline(&pipeline.raw);
                pass.set_bind_group(0, group, &[*offset]);
                pass.dispatch_workgroups(*x, *y, *z);
            }
        });
        self.refused(error, &ready.iter().map(|(pipeline, ..)| pipeline.label.as_str()).collect::<Vec<_>>())
    }

    fn refused(&self, error: Option<wgpu::Error>, labels: &[&str]) -> Result<()> {
        match error {
            None => Ok(()),
            Some(wgpu::Error::OutOfMemory { .. }) => {
                Err(Error::OutOfMemory { label: labels.join(", "), bytes: 0 })
            }
            Some(error) => Err(Error::compile(labels.join(", "), error.to_string())),
        }
    }

    /// The bind group of a launch and the offset of its parameters in the arena.
    fn bind(&self, pipeline: &Pipeline, dispatch: &Dispatch<Buffer>) -> Result<(wgpu::BindGroup, u32)> {
        let bytes = (dispatch.params.len() as u64).next_multiple_of(16);
        let (chunk, offset) = lock(&self.arena).slice(bytes, self.uniform_alignment, |size| {
            self.create_raw(
                "flexattn parameters",
                size,
                wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            )
        })?;
        self.write(&chunk, offset, &dispatch.params)?;

        if dispatch.bindings.iter().any(|binding| !self.owns(&binding.buffer)) {
            return Err(super::foreign());
        }
        let kinds = dispatch.spec.bindings();
        let mut storage = dispatch.bindings.iter();
        let mut places = Vec::with_capacity(kinds.len());
        for kind in kinds {
            places.push(match kind {
                BindingKind::Uniform => (&chunk, 0, bytes),
                BindingKind::Read | BindingKind::ReadWrite => {
                    let Some(binding) = storage.next() else {
                        return Err(Error::buffer(format!(
                            "kernel `{}` got {} buffers but needs more; bind one for each of its storage bindings",
                            pipeline.label,
                            dispatch.bindings.len()
                        )));
                    };
                    (&binding.buffer, binding.offset, binding.size)
                }
            });
        }
        let key = GroupKey {
            layout: pipeline.layouts.index,
            entries: places.iter().map(|(buffer, offset, size)| (buffer.0.id, *offset, *size)).collect(),
        };
        let mut error = None;
        let group = self.groups.get_or(key, || {
            let entries: Vec<_> = places
                .iter()
                .enumerate()
                .map(|(binding, (buffer, offset, size))| {
                    buffer.0.bound.store(true, Ordering::Relaxed);
                    wgpu::BindGroupEntry {
                        binding: binding as u32,
                        resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                            buffer: buffer.raw(),
                            offset: *offset,
                            size: wgpu::BufferSize::new(*size),
                        }),
                    }
                })
                .collect();
            let descriptor = wgpu::BindGroupDescriptor {
                label: Some(&pipeline.label),
                layout: &pipeline.layouts.group,
                entries: &entries,
            };
            let (group, refused) = self.scoped(|| self.device.create_bind_group(&descriptor));
            error = refused;
            group
        });
        if let Some(error) = error {
            // What was cached is unusable; the buffers stay usable for other kernels.
            for (buffer, ..) in &places {
                self.groups.forget(buffer.0.id);
            }
            return Err(Error::buffer(format!(
                "kernel `{}` cannot bind its buffers: {error}",
                pipeline.label
            )));
        }
        Ok((group, offset as u32))
    }

    pub(super) fn run(&self, dispatches: &[Dispatch<Buffer>]) -> Result<()> {
        self.check_alive()?;
        let timer = self.timer();
        let mut encoder = self.encoder();
        self.encode_timed(&mut encoder, dispatches, timer.as_ref().map(|(set, _)| set))?;
        if let Some((set, resolved)) = &timer {
            encoder.resolve_query_set(set, 0..2, resolved, 0);
        }
        let (submission, error) = self.scoped(|| self.queue.submit([encoder.finish()]));
        self.submits.fetch_add(1, Ordering::Relaxed);
        if error.is_none() {
            self.check_taken(submission)?;
        }
        let labels: Vec<String> = match error {
            Some(_) => dispatches.iter().map(|dispatch| dispatch.spec.label()).collect(),
            None => Vec::new(),
        };
        self.refused(error, &labels.iter().map(String::as_str).collect::<Vec<_>>())?;
        if let (Some((_, resolved)), Some(times)) = (timer, lock(&self.timing).as_mut()) {
            times.push(resolved);
        }
        Ok(())
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("flexattn") })
    }

    fn timer(&self) -> Option<(wgpu::QuerySet, wgpu::Buffer)> {
        if !self.timestamps || lock(&self.timing).is_none() {
            return None;
        }
        let set = self.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("flexattn time"),
            ty: wgpu::QueryType::Timestamp,
            count: 2,
        });
        let resolved = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("flexattn time"),
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Some((set, resolved))
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn start_timing(&self) -> bool {
        *lock(&self.timing) = Some(Vec::new());
        self.timestamps
    }

    /// GPU time of the submits since [`Self::start_timing`], summed.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) async fn stop_timing(&self) -> Result<Duration> {
        let submits = lock(&self.timing).take().unwrap_or_default();
        let mut ticks = 0u64;
        for resolved in submits {
            let bytes = self.read(&self.adopt(resolved), 0..16).await?;
            let at = |i: usize| bytes[i..i + 8].iter().rev().fold(0u64, |n, &b| n << 8 | u64::from(b));
            ticks += at(8).saturating_sub(at(0));
        }
        Ok(Duration::from_nanos((ticks as f64 * f64::from(self.queue.get_timestamp_period())) as u64))
    }

    /// Runs a kernel of one workgroup whose only binding is a buffer of `bytes`, and returns them.
    pub(super) async fn try_kernel(
        &self,
        module: impl FnOnce(&wgpu::Device) -> wgpu::ShaderModule,
        entry: &str,
        bytes: u64,
    ) -> Result<Vec<u8>> {
        let buffer = self.create(entry, bytes, Usage::Tensor)?;
        let ((), error) = self.scoped(|| {
            let layouts = self.layouts(&[BindingKind::ReadWrite]);
            let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(entry),
                layout: Some(&layouts.pipeline),
                module: &module(&self.device),
                entry_point: Some(entry),
                compilation_options: wgpu::PipelineCompilationOptions::default(),
                cache: None,
            });
            let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(entry),
                layout: &layouts.group,
                entries: &[wgpu::BindGroupEntry { binding: 0, resource: buffer.raw().as_entire_binding() }],
            });
            let mut encoder = self.encoder();
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(1, 1, 1);
            drop(pass);
            self.queue.submit([encoder.finish()]);
        });
        self.refused(error, &[entry])?;
        self.read(&buffer, 0..bytes).await
    }

    pub(super) async fn read(&self, buffer: &Buffer, range: Range<u64>) -> Result<Vec<u8>> {
        self.check_alive()?;
        if range.start > range.end || range.end > buffer.size() {
            return Err(Error::buffer(format!(
                "bytes {range:?} do not lie in a buffer of {} bytes",
                buffer.size()
            )));
        }
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let start = range.start / 4 * 4;
        let size = range.end.next_multiple_of(4).min(buffer.size() / 4 * 4) - start;
        let staging = self.create_raw(
            "flexattn read back",
            size,
            wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        )?;
        let mapped = Arc::new(Mapped::default());
        let ((), error) = self.scoped(|| {
            let mut encoder = self.encoder();
            encoder.copy_buffer_to_buffer(buffer.raw(), start, staging.raw(), 0, Some(size));
            self.queue.submit([encoder.finish()]);
            let told = mapped.clone();
            staging.raw().map_async(wgpu::MapMode::Read, 0..size, move |result| told.set(result.is_ok()));
        });
        if let Some(error) = error {
            self.poll(wgpu::PollType::wait_indefinitely())?;
            return Err(Error::buffer(format!("the buffer cannot be read: {error}")));
        }
        // Native devices advance when polled; a page's advance by themselves.
        #[cfg(not(target_arch = "wasm32"))]
        self.poll(wgpu::PollType::wait_indefinitely())?;
        if !mapped.wait().await {
            self.check_alive()?;
            return Err(Error::buffer(
                "reading back was refused by the driver; the device may be out of memory",
            ));
        }
        let view = staging
            .raw()
            .slice(0..size)
            .get_mapped_range()
            .map_err(|error| Error::buffer(format!("the buffer cannot be read: {error}")))?;
        let skip = (range.start - start) as usize;
        Ok(view[skip..skip + (range.end - range.start) as usize].to_vec())
    }
}

/// Bytes of workgroup memory that a kernel may have. A Metal text declares its own, which wgpu neither
/// sees nor limits.
fn workgroup_memory(spec: &KernelSpec, limit: u32) -> u32 {
    if spec.metal.is_some() { MetalTile::MAX_THREADGROUP_MEMORY } else { limit }
}

/// Tells a waiting reader that its buffer is mapped.
#[derive(Debug, Default)]
struct Mapped(Mutex<(Option<bool>, Option<std::task::Waker>)>);

impl Mapped {
    fn set(&self, ok: bool) {
        let mut state = lock(&self.0);
        state.0 = Some(ok);
        if let Some(waker) = state.1.take() {
            waker.wake();
        }
    }

    async fn wait(&self) -> bool {
        std::future::poll_fn(|context| {
            let mut state = lock(&self.0);
            match state.0 {
                Some(ok) => std::task::Poll::Ready(ok),
                None => {
                    state.1 = Some(context.waker().clone());
                    std::task::Poll::Pending
                }
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::kernels::{Kernel, Loader};

    #[test]
    fn the_limits_that_a_device_was_created_with_bound_wgsl_kernels_only() {
        let floor = 16 << 10;
        let wgsl = KernelSpec::new(Kernel::Forward, DType::F32, 128, 128, floor).unwrap();
        assert!(wgsl.workgroup_memory() <= workgroup_memory(&wgsl, floor));
        assert_eq!(workgroup_memory(&wgsl, floor), floor);
        let metal = wgsl.on_metal(Loader::Staged);
        assert!(metal.workgroup_memory() > floor, "{}", metal.workgroup_memory());
        assert!(metal.workgroup_memory() <= workgroup_memory(&metal, floor));
    }
}
