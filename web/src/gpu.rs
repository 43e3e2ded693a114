//! The exported `Gpu`: choosing a tier for a device that index.ts found, saying why.

use std::rc::Rc;

use flexattn::kernels::WGSL_FILES;
use flexattn::{Cpu, Error, Limits, Matrices, Profile, Result, Runtime, Tier};
use js_sys::{Promise, Reflect};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;
use web_sys::GpuDevice;

use crate::error::Failure;
use crate::js;
use crate::runtime::Page;
use crate::webgpu::WebGpu;

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
    /// A device, destroyed in the end if it is `owned`, with its best tier or the one of that name.
    #[wasm_bindgen(unchecked_return_type = "Gpu")]
    pub async fn adopt(
        device: GpuDevice,
        owned: bool,
        tier: Option<String>,
    ) -> std::result::Result<Gpu, JsValue> {
        let tier = tier.map(|name| Tier::from_name(&name)).transpose().map_err(Failure::from)?;
        Ok(adopt(device, owned, tier).await.map_err(Failure::from)?)
    }

    /// The cpu tier, and why no better one is in use.
    pub fn cpu(reason: String) -> Gpu {
        let cpu = Cpu::new();
        let profile = Profile { adapter: "WebAssembly".into(), browser: true, ..cpu.profile().clone() };
        Gpu { page: Page::cpu(profile, cpu), notes: vec![reason] }
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

async fn adopt(device: GpuDevice, owned: bool, forced: Option<Tier>) -> Result<Gpu> {
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
    let notes = match (tier, subgroup) {
        (Tier::Portable, Err(reason)) => vec![format!("subgroup: {reason}")],
        (Tier::Portable, Ok(())) => vec!["subgroup: it works here, but portable was asked for".to_owned()],
        _ => Vec::new(),
    };
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
