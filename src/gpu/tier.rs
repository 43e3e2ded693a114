//! Which tier an adapter is good for, and why not a better one.

#![cfg_attr(
    target_vendor = "apple",
    expect(unsafe_code, reason = "the GPU family is asked of Metal's own device object")
)]

use super::device::Device;
use super::passthrough;
use crate::kernels::{Kernel, KernelSpec, Language, Loader, MSL_FILES, MetalTile, WGSL_FILES};
use crate::runtime::{Limits, Matrices, Profile, Tier};
use crate::{DType, Error, Result};
use std::fmt;

/// What was found on this machine, and why the tier is what it is. Made for reports: its `Display`
/// is one paragraph.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The adapter in use; `None` on the Cpu tier.
    pub adapter: Option<AdapterReport>,
    /// The tier in use.
    pub tier: Tier,
    /// The program asked for this tier; otherwise it is the best that is usable.
    pub asked_for: bool,
    /// Every tier, best first, with whether it works here and the reason.
    pub rungs: Vec<Rung>,
}

/// One tier's verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rung {
    /// The tier.
    pub tier: Tier,
    /// It works here.
    pub usable: bool,
    /// Why, or why not.
    pub reason: String,
}

/// An adapter, as wgpu describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdapterReport {
    /// The name, such as `Apple M3 Max` or `llvmpipe (LLVM 15.0.6, 256 bits)`.
    pub name: String,
    /// `Vulkan`, `Metal`, `Dx12`, `BrowserWebGpu`.
    pub backend: String,
    /// The driver and its version.
    pub driver: String,
    /// It runs on the CPU.
    pub software: bool,
    /// Sizes that a subgroup may have; 0 when unknown.
    pub subgroup: (u32, u32),
    /// The features that matter here and that the adapter has.
    pub features: Vec<&'static str>,
    /// Its limits.
    pub limits: Limits,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.adapter {
            Some(adapter) => write!(f, "{} on {} ({})", self.tier, adapter.name, adapter.backend)?,
            None => write!(f, "{}", self.tier)?,
        }
        if self.asked_for {
            f.write_str(", as asked for")?;
        }
        let better: Vec<(Tier, String)> = self
            .rungs
            .iter()
            .take_while(|rung| rung.tier != self.tier)
            .map(|rung| match self.asked_for && rung.usable {
                true => (rung.tier, format!("{} was asked for", self.tier)),
                false => (rung.tier, rung.reason.clone()),
            })
            .collect();
        for alike in better.chunk_by(|a, b| a.1 == b.1) {
            let tiers: Vec<String> = alike.iter().map(|(tier, _)| tier.to_string()).collect();
            write!(f, "; not {}: {}", tiers.join(", "), alike[0].1)?;
        }
        Ok(())
    }
}

/// The features that a device should be created with, as far as `adapter` has them. Experimental
/// ones are not among them: they need a token that only the program can give.
pub(super) fn wanted_features(adapter: &wgpu::Adapter) -> wgpu::Features {
    use wgpu::Features as F;
    let mut wanted = F::SHADER_F16 | F::SUBGROUP | F::TIMESTAMP_QUERY;
    if adapter.get_info().backend == wgpu::Backend::Metal {
        wanted |= F::PASSTHROUGH_SHADERS;
    }
    adapter.features() & wanted
}

/// The limits that a device should be created with: WebGPU's defaults, and the adapter's own values
/// for those that attention presses against.
pub(super) fn wanted_limits(adapter: &wgpu::Adapter) -> wgpu::Limits {
    let best = adapter.limits();
    let mut limits = wgpu::Limits::default().or_worse_values_from(&best);
    limits.max_buffer_size = best.max_buffer_size;
    limits.max_storage_buffer_binding_size = best.max_storage_buffer_binding_size;
    limits.max_compute_workgroup_storage_size = best.max_compute_workgroup_storage_size;
    limits.max_compute_invocations_per_workgroup = best.max_compute_invocations_per_workgroup;
    limits.max_compute_workgroup_size_x = best.max_compute_workgroup_size_x;
    limits
}

pub(super) fn describe(adapter: &wgpu::Adapter) -> AdapterReport {
    use wgpu::Features as F;
    let info = adapter.get_info();
    let features = adapter.features();
    let named = [
        (F::SHADER_F16, "shader-f16"),
        (F::SUBGROUP, "subgroups"),
        (F::TIMESTAMP_QUERY, "timestamp-query"),
        (F::PASSTHROUGH_SHADERS, "passthrough-shaders"),
        (F::EXPERIMENTAL_COOPERATIVE_MATRIX, "cooperative-matrix"),
    ];
    AdapterReport {
        backend: format!("{:?}", info.backend),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        software: info.device_type == wgpu::DeviceType::Cpu,
        subgroup: subgroup_sizes(&info),
        features: named
            .into_iter()
            .filter(|(flag, _)| features.contains(*flag))
            .map(|(_, name)| name)
            .collect(),
        limits: limits(&adapter.limits()),
        name: info.name,
    }
}

/// wgpu reports 4 to 64 on Metal whatever the GPU; an Apple GPU's simdgroup is 32 wide.
fn subgroup_sizes(info: &wgpu::AdapterInfo) -> (u32, u32) {
    if info.backend == wgpu::Backend::Metal && info.name.contains("Apple") {
        (32, 32)
    } else {
        (info.subgroup_min_size, info.subgroup_max_size)
    }
}

fn limits(limits: &wgpu::Limits) -> Limits {
    Limits {
        storage_binding: limits.max_storage_buffer_binding_size,
        buffer: limits.max_buffer_size,
        storage_alignment: u64::from(limits.min_storage_buffer_offset_alignment),
        workgroups: limits.max_compute_workgroups_per_dimension,
        workgroup_memory: limits.max_compute_workgroup_storage_size,
        invocations: limits.max_compute_invocations_per_workgroup,
    }
}

/// Finds the best tier of a device, or checks that `forced` works on it.
///
/// # Errors
///
/// [`Error::Unsupported`] when the forced tier does not work here, with the reason.
pub(super) async fn probe(
    adapter: &wgpu::Adapter,
    device: &Device,
    forced: Option<Tier>,
) -> Result<(Profile, Report)> {
    let described = describe(adapter);
    let family = apple_family(device.device());
    let mut rungs = Vec::new();
    let lanes = subgroup(&described, device).await;
    let matrices = matrices(adapter, device);
    for tier in Tier::ALL {
        let verdict = match tier {
            Tier::Metal => metal(adapter, device, family).await,
            Tier::CoopMatrix => coop_matrix(&described, &matrices, &lanes),
            Tier::Subgroup => lanes.clone(),
            Tier::Portable => Ok("core WGSL".to_owned()),
            Tier::Cpu => Ok("always there".to_owned()),
        };
        let usable = verdict.is_ok();
        rungs.push(Rung { tier, usable, reason: verdict.unwrap_or_else(|reason| reason) });
    }
    let tier = match forced {
        None => {
            let slower = |tier| tier == Tier::CoopMatrix && described.software;
            let best = rungs.iter().find(|rung| rung.usable && !slower(rung.tier));
            best.map_or(Tier::Portable, |rung| rung.tier)
        }
        Some(forced) => {
            if let Some(rung) = rungs.iter().find(|rung| rung.tier == forced && !rung.usable) {
                return Err(Error::unsupported(format!(
                    "tier {forced} was asked for but does not work on {}: {}; ask for another tier or let the probe choose",
                    described.name, rung.reason
                )));
            }
            forced
        }
    };
    let (subgroup_min, subgroup_max) = described.subgroup;
    let profile = Profile {
        tier,
        adapter: described.name.clone(),
        subgroup_min,
        subgroup_max,
        f16: device.device().features().contains(wgpu::Features::SHADER_F16),
        matrices: matrices.unwrap_or_default(),
        tuning: None,
        load_direct: family.is_some_and(loads_directly),
        browser: adapter.get_info().backend == wgpu::Backend::BrowserWebGpu,
        software: described.software,
        limits: limits(&device.device().limits()),
    };
    Ok((profile, Report { adapter: Some(described), tier, asked_for: forced.is_some(), rungs }))
}

/// A reason, for or against.
type Verdict = Result<String, String>;

fn has_file(files: &[(&str, &str)], name: &str) -> Result<(), String> {
    if files.iter().any(|(file, _)| *file == name) {
        Ok(())
    } else {
        Err(format!("this build has no {name}; falls to the next tier"))
    }
}

fn feature(adapter: &wgpu::Adapter, device: &Device, flag: wgpu::Features, name: &str) -> Result<(), String> {
    if !adapter.features().contains(flag) {
        return Err(format!("the adapter lacks {name}"));
    }
    if !device.device().features().contains(flag) {
        return Err(format!("the device was created without {name}; use Gpu::wanted_features"));
    }
    Ok(())
}

async fn metal(adapter: &wgpu::Adapter, device: &Device, family: Option<u32>) -> Verdict {
    let backend = adapter.get_info().backend;
    if backend != wgpu::Backend::Metal {
        return Err(format!("the backend is {backend:?}, not Metal"));
    }
    has_file(MSL_FILES, "forward.metal")?;
    feature(adapter, device, wgpu::Features::PASSTHROUGH_SHADERS, "passthrough-shaders")?;
    let Some(family) = family else {
        return Err("the GPU is older than family Apple7 (M1): it has no simdgroup matrices".into());
    };
    let text = include_str!("canary.metal");
    let module = |device: &_| passthrough::msl(device, "flexattn canary", text, "canary", [32, 1, 1]);
    let product = device
        .try_kernel(module, "canary", 256)
        .await
        .map_err(|error| format!("the canary kernel failed: {error}"))?;
    let numbers = product.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    if !numbers.eq((0..64).map(|i| i as f32)) {
        return Err(
            "the canary kernel multiplied 8x8 matrices wrongly, or its lanes hold other elements".into()
        );
    }
    // The canary has the matrices; the kernels need more of the language, which only a compiler can tell.
    usual_kernel(family)
        .and_then(|spec| device.try_build(&spec, Language::Msl))
        .map_err(|error| format!("the forward kernel does not compile: {error}"))?;
    Ok(format!("family Apple{family}, simdgroup matrices work and the kernels compile"))
}

/// From family Apple9 (M3) on, fragments come straight from device memory.
const fn loads_directly(family: u32) -> bool {
    family >= 9
}

/// The forward kernel that most calls on such a GPU run, without mods.
fn usual_kernel(family: u32) -> Result<KernelSpec> {
    let loader = if loads_directly(family) { Loader::Direct } else { Loader::Staged };
    let memory = MetalTile::MAX_THREADGROUP_MEMORY;
    Ok(KernelSpec::new(Kernel::Forward, DType::F16, 64, 64, memory)?.on_metal(loader))
}

/// The cooperative matrices that the device multiplies, or why none.
fn matrices(adapter: &wgpu::Adapter, device: &Device) -> Result<Matrices, String> {
    feature(
        adapter,
        device,
        wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX,
        "cooperative matrices (experimental)",
    )?;
    feature(adapter, device, wgpu::Features::SHADER_F16, "shader-f16")?;
    let offered = adapter.cooperative_matrix_properties();
    let offers = |edge: u32, element| {
        offered.iter().any(|shape| {
            [shape.m_size, shape.n_size, shape.k_size] == [edge; 3]
                && shape.ab_type == element
                && shape.cr_type == wgpu::CooperativeScalarType::F32
        })
    };
    let edge =
        |element, edges: &[u32]| edges.iter().copied().find(|edge| offers(*edge, element)).unwrap_or(0);
    let found = Matrices {
        f16: edge(wgpu::CooperativeScalarType::F16, &[8, 16]),
        f32: edge(wgpu::CooperativeScalarType::F32, &[8]),
    };
    if found.f16 == 0 {
        return Err("no 8x8 or 16x16 matrices of f16 with sums in f32 among those offered".into());
    }
    Ok(found)
}

fn coop_matrix(described: &AdapterReport, matrices: &Result<Matrices, String>, lanes: &Verdict) -> Verdict {
    has_file(WGSL_FILES, "forward_coop.wgsl")?;
    let Matrices { f16, f32 } = matrices.clone()?;
    lanes.clone()?;
    if described.subgroup.0 < f16 {
        return Err(format!("subgroups may be smaller than a matrix of {f16}x{f16}"));
    }
    let others = if f32 > 0 { "bf16 falls to subgroup" } else { "f32 and bf16 fall to subgroup" };
    let taken = if described.software {
        "; on a CPU slower than shuffles, so it is taken only when asked for"
    } else {
        ""
    };
    Ok(format!("{f16}x{f16} f16 -> f32, {others}{taken}"))
}

async fn subgroup(described: &AdapterReport, device: &Device) -> Verdict {
    if !described.features.contains(&"subgroups") {
        return Err("the adapter lacks subgroups".into());
    }
    if !device.device().features().contains(wgpu::Features::SUBGROUP) {
        return Err("the device was created without subgroups; use Gpu::wanted_features".into());
    }
    has_file(WGSL_FILES, "forward_subgroup.wgsl")?;
    let (min, _) = described.subgroup;
    Profile::subgroups_suit(min).map_err(|error| error.to_string())?;
    let descriptor = wgpu::ShaderModuleDescriptor {
        label: Some("flexattn probe"),
        source: wgpu::ShaderSource::Wgsl(include_str!("probe.wgsl").into()),
    };
    let module = |device: &wgpu::Device| device.create_shader_module(descriptor);
    let seen = device
        .try_kernel(module, "probe", 64 * 8)
        .await
        .map_err(|error| format!("the probe kernel failed: {error}"))?;
    let words: Vec<u32> = seen
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    for (index, lane_and_size) in words.chunks_exact(2).enumerate() {
        let [lane, size] = [lane_and_size[0], lane_and_size[1]];
        if size < 8 {
            return Err(format!("a subgroup of {size} lanes was met; the kernels need 8"));
        }
        if lane as usize % 8 != index % 8 {
            return Err(format!(
                "invocation {index} is lane {lane}: lanes are not in the order of invocations"
            ));
        }
    }
    Ok(format!("subgroups of {min} lanes or more, in the order of invocations"))
}

/// 7 for M1, 8 for M2, 9 for M3 and M4; `None` for older GPUs and other platforms.
#[cfg(target_vendor = "apple")]
fn apple_family(device: &wgpu::Device) -> Option<u32> {
    use objc2_metal::{MTLDevice as _, MTLGPUFamily};
    // SAFETY: the guard keeps the device alive while it is asked, and nothing is changed through it.
    let metal = unsafe { device.as_hal::<wgpu::hal::api::Metal>() }?;
    let families = [(9, MTLGPUFamily::Apple9), (8, MTLGPUFamily::Apple8), (7, MTLGPUFamily::Apple7)];
    families
        .into_iter()
        .find(|(_, family)| metal.raw_device().supportsFamily(*family))
        .map(|(number, _)| number)
}

/// No other platform has Apple GPU families.
#[cfg(not(target_vendor = "apple"))]
fn apple_family(_device: &wgpu::Device) -> Option<u32> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_that_the_probe_compiles_has_the_loader_of_the_gpus_family() {
        for (family, loader) in [(7, Loader::Staged), (8, Loader::Staged), (9, Loader::Direct)] {
            let spec = usual_kernel(family).unwrap();
            assert_eq!((spec.entry(), spec.metal.map(|tile| tile.loader())), ("forward", Some(loader)));
            let text = spec.text(Language::Msl).unwrap();
            // What the canary lacks.
            for needed in ["kernel void forward(", "simd_shuffle_xor(", "exp2("] {
                assert!(text.contains(needed), "Apple{family}: {needed}");
            }
            let stages = text.contains("threadgroup_barrier(");
            assert_eq!(stages, loader == Loader::Staged, "Apple{family}");
        }
    }

    #[test]
    fn a_tier_that_was_passed_over_gives_the_request_as_its_reason() {
        let rung = |tier, usable, reason: &str| Rung { tier, usable, reason: reason.to_owned() };
        let rungs = vec![
            rung(Tier::Metal, false, "the backend is Vulkan, not Metal"),
            rung(Tier::Subgroup, true, "subgroups of 8 lanes"),
            rung(Tier::Portable, true, "core WGSL"),
        ];
        let report = Report { adapter: None, tier: Tier::Portable, asked_for: true, rungs };
        assert_eq!(
            report.to_string(),
            "portable, as asked for; not metal: the backend is Vulkan, not Metal; not subgroup: portable was asked for"
        );
    }

    #[test]
    fn one_reason_is_given_once() {
        let rung = |tier, usable, reason: &str| Rung { tier, usable, reason: reason.to_owned() };
        let none = [Tier::Metal, Tier::Subgroup, Tier::Portable].map(|tier| rung(tier, false, "no adapter"));
        let rungs = none.into_iter().chain([rung(Tier::Cpu, true, "always")]).collect();
        let report = Report { adapter: None, tier: Tier::Cpu, asked_for: false, rungs };
        assert_eq!(report.to_string(), "cpu; not metal, subgroup, portable: no adapter");
    }
}
