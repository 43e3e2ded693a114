//! The runtime of Rust programs: a wgpu device on its best tier, or the CPU where there is no adapter.

mod caches;
mod device;
mod passthrough;
mod tier;

pub use device::Held;
pub use tier::{AdapterReport, Report, Rung};

use crate::cpu::Cpu;
#[cfg(not(target_arch = "wasm32"))]
use crate::kernels::Tuning;
use crate::runtime::{Binding, Dispatch, Profile, Runtime, Tier, Usage};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
#[cfg(not(target_arch = "wasm32"))]
use std::time::Duration;

/// A machine to run attention on. Cloning gives a handle to the same device and caches; on native
/// targets it may be shared between threads.
///
/// # Example
///
/// ```
/// # fn main() -> flexattn::Result<()> {
/// let gpu = flexattn::Gpu::new()?;
/// println!("{}", gpu.report());
/// let ones = gpu.tensor(&[1.0f32; 8], [1, 1, 2, 4])?;
/// assert_eq!(ones.read()?, [1.0; 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Gpu(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    engine: Arc<Engine>,
    profile: Profile,
    report: Report,
}

#[derive(Debug)]
enum Engine {
    Wgpu(Box<device::Device>),
    Cpu(Cpu),
}

/// A buffer of a [`Gpu`].
#[derive(Clone, Debug)]
pub struct Buffer(Memory);

#[derive(Clone, Debug)]
enum Memory {
    Wgpu(device::Buffer),
    Cpu(<Cpu as Runtime>::Buffer),
}

/// Chooses an adapter and a tier. Made by [`Gpu::builder`].
#[derive(Clone, Debug, Default)]
pub struct GpuBuilder {
    tier: Option<Tier>,
    adapter: Option<String>,
    software: bool,
}

impl GpuBuilder {
    /// Forces a tier; [`GpuBuilder::build`] fails where it does not work. [`Tier::Cpu`] looks for no
    /// adapter at all.
    pub fn tier(mut self, tier: Tier) -> Self {
        self.tier = Some(tier);
        self
    }

    /// Takes the first adapter whose name contains this text, in any case.
    pub fn adapter(mut self, name: impl Into<String>) -> Self {
        self.adapter = Some(name.into());
        self
    }

    /// Takes only adapters that run on the CPU (lavapipe, SwiftShader, WARP), for tests that should
    /// not depend on the graphics card.
    pub fn software(mut self) -> Self {
        self.software = true;
        self
    }

    /// Creates the device and finds its tier. With neither an adapter asked for nor a tier forced, a
    /// machine without adapter gives the Cpu tier.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the tier or adapter asked for is not there.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn build(self) -> Result<Gpu> {
        crate::runtime::block_on(self.build_async())
    }

    /// [`GpuBuilder::build`] for async programs and pages.
    ///
    /// # Errors
    ///
    /// As [`GpuBuilder::build`].
    pub async fn build_async(self) -> Result<Gpu> {
        if self.tier == Some(Tier::Cpu) {
            return Ok(Gpu::cpu("cpu was asked for", true));
        }
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let adapters = adapters(&instance).await;
        let found = adapters.iter().map(|adapter| adapter.get_info().name).collect::<Vec<_>>().join(", ");
        let chosen = adapters.into_iter().find(|adapter| {
            let info = adapter.get_info();
            let named = self
                .adapter
                .as_ref()
                .is_none_or(|name| info.name.to_lowercase().contains(&name.to_lowercase()));
            named && (!self.software || info.device_type == wgpu::DeviceType::Cpu)
        });
        let Some(adapter) = chosen else {
            if self.tier.is_none() && self.adapter.is_none() && !self.software {
                return Ok(Gpu::cpu(&format!("no GPU adapter was found; {NO_ADAPTER}"), false));
            }
            let wanted = match (&self.adapter, self.software) {
                (Some(name), _) => format!("an adapter named `{name}`"),
                (None, true) => "a software adapter".to_owned(),
                (None, false) => format!("an adapter for tier {}", self.tier.unwrap_or(Tier::Portable)),
            };
            let (found, remedy) = match (found.is_empty(), &self.adapter) {
                (true, _) => ("none at all", NO_ADAPTER),
                (false, Some(_)) => (&*found, "ask for one of these"),
                (false, None) => (&*found, NO_ADAPTER),
            };
            return Err(Error::unsupported(format!("{wanted} was asked for, but found: {found}; {remedy}")));
        };
        let (device, queue) = request(&adapter).await?;
        Gpu::over(&adapter, device::Device::new(device, queue, true), self.tier).await
    }
}

/// What would bring a GPU path to a machine that has none.
#[cfg(target_os = "linux")]
const NO_ADAPTER: &str = "on Debian and Ubuntu `apt-get install mesa-vulkan-drivers` brings Vulkan drivers, one for the CPU (lavapipe) among them";
#[cfg(not(target_os = "linux"))]
const NO_ADAPTER: &str =
    "install or update the graphics driver (Metal, DirectX 12 or Vulkan), or use a browser with WebGPU";

/// The adapters, best first: hardware before software, and the platform's own interface first.
async fn adapters(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    #[cfg(not(target_arch = "wasm32"))]
    {
        let mut adapters = instance.enumerate_adapters(wgpu::Backends::PRIMARY).await;
        adapters.sort_by_key(|adapter| {
            let info = adapter.get_info();
            let kind = match info.device_type {
                wgpu::DeviceType::DiscreteGpu => 0,
                wgpu::DeviceType::IntegratedGpu => 1,
                wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => 2,
                wgpu::DeviceType::Cpu => 3,
            };
            let backend = match info.backend {
                wgpu::Backend::Metal => 0,
                wgpu::Backend::Vulkan => 1,
                _ => 2,
            };
            (kind, backend)
        });
        adapters
    }
    #[cfg(target_arch = "wasm32")]
    instance
        .request_adapter(&wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        })
        .await
        .into_iter()
        .collect()
}

async fn request(adapter: &wgpu::Adapter) -> Result<(wgpu::Device, wgpu::Queue)> {
    let mut features = tier::wanted_features(adapter);
    let experimental = adapter.features() & wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    let token = if experimental.is_empty() {
        wgpu::ExperimentalFeatures::disabled()
    } else {
        features |= experimental;
        passthrough::experimental()
    };
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("flexattn"),
        required_features: features,
        required_limits: tier::wanted_limits(adapter),
        experimental_features: token,
        memory_hints: wgpu::MemoryHints::Performance,
        trace: wgpu::Trace::Off,
    };
    adapter.request_device(&descriptor).await.map_err(|error| {
        Error::unsupported(format!("{} gave no device: {error}; update its driver", adapter.get_info().name))
    })
}

impl Gpu {
    /// The best tier of the best adapter here; the Cpu tier when there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the driver refuses to make a device.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// [`Gpu::new`] for async programs and pages.
    ///
    /// # Errors
    ///
    /// As [`Gpu::new`].
    pub async fn new_async() -> Result<Self> {
        Self::builder().build_async().await
    }

    /// To choose the adapter or force a tier.
    pub fn builder() -> GpuBuilder {
        GpuBuilder::default()
    }

    /// Runs on the program's own device, so that tensors and command encoders are shared with it.
    /// Create the device with [`Gpu::wanted_features`] and [`Gpu::wanted_limits`], or fewer: the tier
    /// is chosen from what the device has.
    ///
    /// This sets the device's lost callback ([`Gpu::is_lost`] tells); set your own afterwards only if
    /// you also stop using this Gpu once the device is lost.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn from_wgpu(adapter: &wgpu::Adapter, device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        crate::runtime::block_on(Self::from_wgpu_async(adapter, device, queue, None))
    }

    /// [`Gpu::from_wgpu`] for async programs and pages, on a tier of your choice if one is given.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`], and [`Error::Unsupported`] for a tier that does not work on the device.
    pub async fn from_wgpu_async(
        adapter: &wgpu::Adapter,
        device: wgpu::Device,
        queue: wgpu::Queue,
        tier: Option<Tier>,
    ) -> Result<Self> {
        if tier == Some(Tier::Cpu) {
            return Ok(Self::cpu("cpu was asked for", true));
        }
        Self::over(adapter, device::Device::new(device, queue, false), tier).await
    }

    /// The features to create a device with, as far as the adapter has them. For the tier
    /// [`Tier::CoopMatrix`] add `EXPERIMENTAL_COOPERATIVE_MATRIX` and wgpu's token for it.
    pub fn wanted_features(adapter: &wgpu::Adapter) -> wgpu::Features {
        tier::wanted_features(adapter)
    }

    /// The limits to create a device with: WebGPU's defaults, raised to the adapter's own where long
    /// sequences and large heads press against them.
    pub fn wanted_limits(adapter: &wgpu::Adapter) -> wgpu::Limits {
        tier::wanted_limits(adapter)
    }

    async fn over(adapter: &wgpu::Adapter, mut device: device::Device, tier: Option<Tier>) -> Result<Self> {
        let (profile, report) = tier::probe(adapter, &device, tier).await?;
        device.set_language(&profile);
        Ok(Self(Arc::new(Inner { engine: Arc::new(Engine::Wgpu(Box::new(device))), profile, report })))
    }

    fn cpu(reason: &str, asked_for: bool) -> Self {
        let cpu = Cpu::new();
        let rungs = Tier::ALL
            .into_iter()
            .map(|tier| {
                let usable = tier == Tier::Cpu;
                let reason = if usable { "always there" } else { reason };
                Rung { tier, usable, reason: reason.to_owned() }
            })
            .collect();
        let report = Report { adapter: None, tier: Tier::Cpu, asked_for, rungs };
        Self(Arc::new(Inner { profile: cpu.profile().clone(), engine: Arc::new(Engine::Cpu(cpu)), report }))
    }

    /// The adapters of this machine, best first.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn adapters() -> Vec<AdapterReport> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        crate::runtime::block_on(adapters(&instance)).iter().map(tier::describe).collect()
    }

    /// The same machine with other choices of tiles; caches and buffers are shared.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn with_tuning(&self, tuning: Arc<Tuning>) -> Self {
        let profile = Profile { tuning: Some(tuning), ..self.0.profile.clone() };
        Self(Arc::new(Inner { engine: self.0.engine.clone(), profile, report: self.0.report.clone() }))
    }

    /// The tier in use.
    pub fn tier(&self) -> Tier {
        self.0.profile.tier
    }

    /// What was found here, and why the tier is what it is.
    pub fn report(&self) -> &Report {
        &self.0.report
    }

    /// The device; `None` on the Cpu tier.
    pub fn device(&self) -> Option<&wgpu::Device> {
        self.wgpu().map(device::Device::device)
    }

    /// The queue; `None` on the Cpu tier.
    pub fn queue(&self) -> Option<&wgpu::Queue> {
        self.wgpu().map(device::Device::queue)
    }

    /// The device is gone; every call gives [`Error::DeviceLost`].
    pub fn is_lost(&self) -> bool {
        self.wgpu().is_some_and(device::Device::is_lost)
    }

    /// How many pipelines were compiled so far. Changing lengths, strides, scale, offsets, captured
    /// values or scalars compiles nothing, but for the decoding kernels once a call has few queries and
    /// many keys: one for each power of two up to the rows that they pack.
    pub fn pipelines_built(&self) -> u64 {
        self.wgpu().map_or(0, device::Device::pipelines_built)
    }

    /// What the caches hold.
    pub fn held(&self) -> Held {
        self.wgpu().map(device::Device::held).unwrap_or_default()
    }

    /// Runs `work` and returns its result with the GPU time of the submits that it made, measured by
    /// timestamps; `None` without them (the Cpu tier, adapters without `timestamp-query`). Submits of
    /// other threads meanwhile are counted too.
    ///
    /// # Errors
    ///
    /// Those of `work`, and [`Error::DeviceLost`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn timed<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, Option<Duration>)> {
        let Some(device) = self.wgpu() else { return Ok((work()?, None)) };
        let available = device.start_timing();
        let result = work();
        let time = crate::runtime::block_on(device.stop_timing());
        Ok((result?, if available { Some(time?) } else { None }))
    }

    /// Records launches into the program's own encoder. Nothing is submitted.
    pub(crate) fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        dispatches: &[Dispatch<Buffer>],
    ) -> Result<()> {
        match &*self.0.engine {
            Engine::Wgpu(device) => {
                let dispatches = dispatches.iter().map(for_wgpu).collect::<Result<Vec<_>>>()?;
                device.encode(encoder, &dispatches)
            }
            Engine::Cpu(_) => Err(Error::unsupported(
                "the Cpu tier cannot record into a wgpu encoder; call forward instead of record",
            )),
        }
    }

    /// Makes a program's buffer usable here; it must belong to this device.
    pub(crate) fn adopt(&self, buffer: wgpu::Buffer) -> Result<Buffer> {
        match self.wgpu() {
            Some(device) => Ok(Buffer(Memory::Wgpu(device.adopt(buffer)))),
            None => Err(Error::unsupported(
                "the Cpu tier has no wgpu device and cannot use a wgpu buffer; upload with Gpu::tensor",
            )),
        }
    }

    fn wgpu(&self) -> Option<&device::Device> {
        match &*self.0.engine {
            Engine::Wgpu(device) => Some(device),
            Engine::Cpu(_) => None,
        }
    }
}

impl Buffer {
    /// The wgpu buffer; `None` on the Cpu tier.
    pub fn wgpu(&self) -> Option<&wgpu::Buffer> {
        match &self.0 {
            Memory::Wgpu(buffer) => Some(buffer.raw()),
            Memory::Cpu(_) => None,
        }
    }

    fn on_wgpu(&self) -> Result<&device::Buffer> {
        match &self.0 {
            Memory::Wgpu(buffer) => Ok(buffer),
            Memory::Cpu(_) => Err(foreign()),
        }
    }

    fn on_cpu(&self) -> Result<&<Cpu as Runtime>::Buffer> {
        match &self.0 {
            Memory::Cpu(buffer) => Ok(buffer),
            Memory::Wgpu(_) => Err(foreign()),
        }
    }
}

impl PartialEq for Buffer {
    /// The same memory.
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Memory::Wgpu(a), Memory::Wgpu(b)) => a.raw() == b.raw(),
            (Memory::Cpu(a), Memory::Cpu(b)) => a == b,
            _ => false,
        }
    }
}

fn foreign() -> Error {
    Error::buffer("a tensor belongs to another Gpu; read it and upload it to this one")
}

fn for_wgpu(dispatch: &Dispatch<Buffer>) -> Result<Dispatch<device::Buffer>> {
    translate(dispatch, |buffer| buffer.on_wgpu().cloned())
}

fn translate<B>(dispatch: &Dispatch<Buffer>, buffer: impl Fn(&Buffer) -> Result<B>) -> Result<Dispatch<B>> {
    let bindings = dispatch
        .bindings
        .iter()
        .map(|binding| {
            Ok(Binding { buffer: buffer(&binding.buffer)?, offset: binding.offset, size: binding.size })
        })
        .collect::<Result<_>>()?;
    Ok(Dispatch {
        spec: dispatch.spec.clone(),
        bindings,
        params: dispatch.params.clone(),
        grid: dispatch.grid,
    })
}

impl Runtime for Gpu {
    type Buffer = Buffer;

    fn profile(&self) -> &Profile {
        &self.0.profile
    }

    fn create(&self, label: &str, bytes: u64, usage: Usage) -> Result<Buffer> {
        Ok(Buffer(match &*self.0.engine {
            Engine::Wgpu(device) => Memory::Wgpu(device.create(label, bytes, usage)?),
            Engine::Cpu(cpu) => Memory::Cpu(cpu.create(label, bytes, usage)?),
        }))
    }

    fn size(&self, buffer: &Buffer) -> u64 {
        match (&buffer.0, &*self.0.engine) {
            (Memory::Wgpu(buffer), _) => buffer.size(),
            (Memory::Cpu(buffer), Engine::Cpu(cpu)) => cpu.size(buffer),
            (Memory::Cpu(_), Engine::Wgpu(_)) => 0,
        }
    }

    fn write(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        match &*self.0.engine {
            Engine::Wgpu(device) => device.write(buffer.on_wgpu()?, offset, bytes),
            Engine::Cpu(cpu) => cpu.write(buffer.on_cpu()?, offset, bytes),
        }
    }

    fn constant(&self, key: u128, label: &str, bytes: impl FnOnce() -> Vec<u8>) -> Result<Buffer> {
        Ok(Buffer(match &*self.0.engine {
            Engine::Wgpu(device) => Memory::Wgpu(device.constant(key, label, bytes)?),
            Engine::Cpu(cpu) => Memory::Cpu(cpu.constant(key, label, bytes)?),
        }))
    }

    fn scratch(&self, label: &'static str, bytes: u64) -> Result<Buffer> {
        Ok(Buffer(match &*self.0.engine {
            Engine::Wgpu(device) => Memory::Wgpu(device.scratch(label, bytes)?),
            Engine::Cpu(cpu) => Memory::Cpu(cpu.scratch(label, bytes)?),
        }))
    }

    fn run(&self, dispatches: &[Dispatch<Buffer>]) -> Result<()> {
        match &*self.0.engine {
            Engine::Wgpu(device) => device.run(&dispatches.iter().map(for_wgpu).collect::<Result<Vec<_>>>()?),
            Engine::Cpu(cpu) => {
                let own = dispatches
                    .iter()
                    .map(|dispatch| translate(dispatch, |buffer| buffer.on_cpu().cloned()))
                    .collect::<Result<Vec<_>>>()?;
                cpu.run(&own)
            }
        }
    }

    /// Outside browsers this waits for the GPU inside the future.
    async fn read(&self, buffer: &Buffer, range: Range<u64>) -> Result<Vec<u8>> {
        match &*self.0.engine {
            Engine::Wgpu(device) => device.read(buffer.on_wgpu()?, range).await,
            Engine::Cpu(cpu) => cpu.read(buffer.on_cpu()?, range).await,
        }
    }
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use super::*;

    #[test]
    fn a_forced_cpu_says_that_it_was_asked_for() {
        let report = Gpu::builder().tier(Tier::Cpu).build().unwrap().report().to_string();
        assert!(report.starts_with("cpu, as asked for; not metal, "), "{report}");
        assert!(report.ends_with(", portable: cpu was asked for"), "{report}");
    }

    #[test]
    fn gpu_and_its_buffers_are_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Gpu>();
        shared::<Buffer>();
    }
}
