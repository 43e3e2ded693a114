//! The exported `Gpu`: finding a device, choosing a tier, saying why.

use std::rc::Rc;

use flexattn::kernels::WGSL_FILES;
use flexattn::{Cpu, Error, Limits, Matrices, Profile, Result, Runtime, Tier};
use js_sys::{Array, JsString, Object, Promise, Reflect};
use wasm_bindgen::prelude::wasm_bindgen;
use wasm_bindgen::{JsCast, JsValue};
use web_sys::{GpuAdapter, GpuDevice, GpuDeviceDescriptor, GpuPowerPreference, GpuRequestAdapterOptions};

use crate::error::{Failure, message};
use crate::js;
use crate::runtime::Page;
use crate::webgpu::WebGpu;

/// Features worth having: 16-bit arithmetic, shuffles, and time stamps for measuring.
const FEATURES: [&str; 3] = ["shader-f16", "subgroups", "timestamp-query"];

/// Limits that attention presses against.
const LIMITS: [&str; 6] = [
    "maxBufferSize",
    "maxStorageBufferBindingSize",
    "maxComputeWorkgroupStorageSize",
    "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupSizeX",
    "maxStorageBuffersPerShaderStage",
];

/// A device with its tier; the raw half of `Gpu` in index.ts.
#[wasm_bindgen]
pub struct Gpu {
    page: Page,
    notes: Vec<String>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("profile", self.page.profile()).finish_non_exhaustive()
    }
}

impl Gpu {
    pub(crate) fn page(&self) -> &Page {
        &self.page
    }
}

#[wasm_bindgen]
impl Gpu {
    /// A device of its own, or the cpu tier.
    #[wasm_bindgen(unchecked_return_type = "Gpu")]
    pub async fn create(options: JsValue) -> std::result::Result<Gpu, JsValue> {
        Ok(create(&options).await.map_err(Failure::from)?)
    }

    /// A page's device.
    #[wasm_bindgen(js_name = fromDevice)]
    pub async fn from_device(device: GpuDevice, options: JsValue) -> std::result::Result<Gpu, JsValue> {
        let tier = tier(&options).map_err(Failure::from)?;
        Ok(adopt(device, false, tier).await.map_err(Failure::from)?)
    }

    /// Features of an adapter worth requesting.
    #[wasm_bindgen(js_name = wantedFeatures)]
    pub fn wanted_features(adapter: &GpuAdapter) -> Array {
        wanted_features(adapter).into_iter().map(JsValue::from_str).collect()
    }

    /// Limits of an adapter worth requesting.
    #[wasm_bindgen(js_name = wantedLimits)]
    pub fn wanted_limits(adapter: &GpuAdapter) -> Object {
        wanted_limits(adapter)
    }

    /// Name of the tier.
    #[wasm_bindgen(getter)]
    pub fn tier(&self) -> String {
        self.page.profile().tier.name().to_owned()
    }

    /// The adapter in words.
    #[wasm_bindgen(getter)]
    pub fn adapter(&self) -> String {
        self.page.profile().adapter.clone()
    }

    /// Why no better tier is in use.
    #[wasm_bindgen(getter)]
    pub fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// The device.
    #[wasm_bindgen(getter)]
    pub fn device(&self) -> Option<GpuDevice> {
        self.page.device().map(|gpu| gpu.device.clone())
    }

    /// Waits for everything submitted.
    pub fn idle(&self) -> Promise {
        let finished = self.page.finished();
        js_sys::futures::future_to_promise(async move {
            finished.await.map_err(Failure::from)?;
            Ok(JsValue::UNDEFINED)
        })
    }

    /// Drops caches, and the device if it is ours.
    pub fn dispose(&self) {
        self.page.dispose();
    }
}

fn tier(options: &JsValue) -> Result<Option<Tier>> {
    js::string(options, "tier")?.map(|name| Tier::from_name(&name)).transpose()
}

async fn create(options: &JsValue) -> Result<Gpu> {
    let tier = tier(options)?;
    if tier == Some(Tier::Cpu) {
        return Ok(cpu("the cpu tier was asked for".into()));
    }
    match device(options).await {
        Ok(device) => adopt(device, true, tier).await,
        Err(reason) if tier.is_none() => Ok(cpu(reason)),
        Err(reason) => Err(Error::unsupported(format!("{reason}; without a tier, the cpu tier is used"))),
    }
}

/// A device with everything that the adapter has of use, or why there is none.
async fn device(options: &JsValue) -> std::result::Result<GpuDevice, String> {
    let adapter = match js::field(options, "adapter") {
        Some(adapter) => adapter.unchecked_into::<GpuAdapter>(),
        None => adapter(options).await?,
    };
    let descriptor = GpuDeviceDescriptor::new();
    descriptor.set_label("flexattn");
    let features: Vec<JsString> = wanted_features(&adapter).into_iter().map(JsString::from).collect();
    descriptor.set_required_features(&features);
    descriptor.set_required_limits(wanted_limits(&adapter).unchecked_ref());
    let device = adapter.request_device_with_descriptor(&descriptor);
    device.await.map_err(|exception| format!("the adapter gave no device: {}", message(&exception)))
}

async fn adapter(options: &JsValue) -> std::result::Result<GpuAdapter, String> {
    let gpu = js::field(options, "gpu")
        .or_else(|| js::field(&js::field(&js_sys::global(), "navigator")?, "gpu"))
        .ok_or(
            "there is no WebGPU here (navigator.gpu is missing: an older browser, or a page without https)",
        )?
        .unchecked_into::<web_sys::Gpu>();
    let fast = GpuRequestAdapterOptions::new();
    fast.set_power_preference(GpuPowerPreference::HighPerformance);
    match gpu.request_adapter_with_options(&fast).await {
        Ok(adapter) => adapter.into_option().ok_or_else(|| "WebGPU is here but offers no adapter".into()),
        Err(exception) => Err(format!("WebGPU offers no adapter: {}", message(&exception))),
    }
}

fn wanted_features(adapter: &GpuAdapter) -> Vec<&'static str> {
    let features = adapter.features();
    FEATURES.into_iter().filter(|name| features.has(name)).collect()
}

fn wanted_limits(adapter: &GpuAdapter) -> Object {
    let wanted = Object::new();
    for name in LIMITS {
        if let Some(value) = js::field(&adapter.limits(), name) {
            js::set(&wanted, name, &value);
        }
    }
    wanted
}

fn cpu(reason: String) -> Gpu {
    let cpu = Cpu::new();
    let profile = Profile { adapter: "WebAssembly".into(), browser: true, ..cpu.profile().clone() };
    Gpu { page: Page::cpu(profile, cpu), notes: vec![reason] }
}

async fn adopt(device: GpuDevice, owned: bool, forced: Option<Tier>) -> Result<Gpu> {
    match forced {
        None | Some(Tier::Subgroup | Tier::Portable) => {}
        Some(Tier::Cpu) => return Ok(cpu("the cpu tier was asked for".into())),
        Some(other) => {
            return Err(Error::unsupported(format!(
                "tier {other} was asked for but a page has subgroup, portable and cpu; leave it out for the best of them"
            )));
        }
    }
    let gpu = WebGpu::new(device.clone(), owned);
    let subgroup = subgroup(&gpu).await;
    let tier = match (forced, &subgroup) {
        (Some(Tier::Subgroup), Err(reason)) => {
            return Err(Error::unsupported(format!("tier subgroup was asked for but {reason}")));
        }
        (Some(tier), _) => tier,
        (None, Ok(())) => Tier::Subgroup,
        (None, Err(_)) => Tier::Portable,
    };
    let info = js::field(&device, "adapterInfo").unwrap_or(JsValue::UNDEFINED);
    let (subgroup_min, subgroup_max) = subgroup_sizes(&device);
    let limits = device.limits();
    let number = |name: &str, floor: f64| {
        Reflect::get(&limits, &name.into()).ok().and_then(|value| value.as_f64()).unwrap_or(floor)
    };
    let floor = Limits::default();
    let profile = Profile {
        tier,
        adapter: describe(&info),
        subgroup_min,
        subgroup_max,
        f16: device.features().has("shader-f16"),
        matrices: Matrices::default(),
        tuning: None,
        load_direct: false,
        browser: true,
        software: js::field(&info, "isFallbackAdapter").and_then(|value| value.as_bool()).unwrap_or(false)
            || describe(&info).to_lowercase().contains("swiftshader"),
        limits: Limits {
            storage_binding: number("maxStorageBufferBindingSize", floor.storage_binding as f64) as u64,
            buffer: number("maxBufferSize", floor.buffer as f64) as u64,
            storage_alignment: number("minStorageBufferOffsetAlignment", floor.storage_alignment as f64)
                as u64,
            workgroups: number("maxComputeWorkgroupsPerDimension", floor.workgroups.into()) as u32,
            workgroup_memory: number("maxComputeWorkgroupStorageSize", floor.workgroup_memory.into()) as u32,
            invocations: number("maxComputeInvocationsPerWorkgroup", floor.invocations.into()) as u32,
        },
    };
    let mut notes = vec![
        "metal: a page reaches the GPU through WebGPU, which takes no Metal kernels".to_owned(),
        "coop-matrix: browsers do not offer cooperative matrices".to_owned(),
    ];
    if tier == Tier::Portable {
        notes.push(match subgroup {
            Err(reason) => format!("subgroup: {reason}"),
            Ok(()) => "subgroup: it works here, but portable was asked for".to_owned(),
        });
    }
    Ok(Gpu { page: Page::gpu(profile, Rc::new(gpu)), notes })
}

/// Sizes that a subgroup may have; zeros when the browser does not say.
fn subgroup_sizes(device: &GpuDevice) -> (u32, u32) {
    let info = js::field(device, "adapterInfo").unwrap_or(JsValue::UNDEFINED);
    let size = |name: &str| js::field(&info, name).and_then(|value| value.as_f64()).unwrap_or(0.0) as u32;
    (size("subgroupMinSize"), size("subgroupMaxSize"))
}

/// Whether the subgroup kernels work on this device, or why not.
async fn subgroup(gpu: &WebGpu) -> std::result::Result<(), String> {
    if !WGSL_FILES.iter().any(|(file, _)| *file == "forward_subgroup.wgsl") {
        return Err("this build has no forward_subgroup.wgsl".into());
    }
    if !gpu.device.features().has("subgroups") {
        return Err("the device has no subgroups (the browser lacks them, or they were not requested)".into());
    }
    let (min, _) = subgroup_sizes(&gpu.device);
    if min != 0 && min < 8 {
        return Err(format!("subgroups may be as small as {min} lanes; the kernels need 8"));
    }
    let text = format!("enable subgroups;\n{}", include_str!("../../src/gpu/probe.wgsl"));
    let seen = gpu
        .probe(&text, "probe", 64 * 8)
        .await
        .map_err(|error| format!("the probe kernel failed: {error}"))?;
    for (index, lane_and_size) in (0u32..).zip(seen.chunks_exact(2)) {
        let [lane, size] = [lane_and_size[0], lane_and_size[1]];
        if size < 8 {
            return Err(format!("a subgroup of {size} lanes was met; the kernels need 8"));
        }
        if lane % 8 != index % 8 {
            return Err(format!(
                "invocation {index} is lane {lane}: lanes are not in the order of invocations"
            ));
        }
    }
    Ok(())
}

/// The adapter's own words, as many as the browser gives.
fn describe(info: &JsValue) -> String {
    let words: Vec<String> = ["vendor", "architecture", "device", "description"]
        .into_iter()
        .filter_map(|name| js::field(info, name)?.as_string())
        .filter(|word| !word.is_empty())
        .collect();
    match words.as_slice() {
        [] => "WebGPU adapter".into(),
        // The description, where there is one, says everything.
        [.., last] if words.len() == 4 || last.contains(' ') => last.clone(),
        words => words.join(" "),
    }
}
