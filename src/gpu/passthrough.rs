//! The calls into wgpu that it cannot check. Together with [`super::tier`] the only `unsafe` code of
//! the library.

#![expect(unsafe_code, reason = "wgpu marks these entry points unsafe; each use says why it holds")]

use crate::kernels::{KernelSpec, Language};
use crate::{Error, Result};
use std::borrow::Cow;

/// A module of one of our WGSL kernels, compiled without run-time checks: the kernels clamp every
/// index themselves, and bounded loops cost up to several times their work on some drivers
/// (gfx-rs/wgpu issues 7698 and 6518). Integer division keeps its check, since WGSL gives a meaning to
/// division by zero that mods may use.
pub(super) fn trusted_wgsl(device: &wgpu::Device, label: &str, text: &str) -> wgpu::ShaderModule {
    let descriptor = wgpu::ShaderModuleDescriptor {
        label: Some(label),
        source: wgpu::ShaderSource::Wgsl(Cow::Borrowed(text)),
    };
    let checks = wgpu::ShaderRuntimeChecks { int_div_checks: true, ..wgpu::ShaderRuntimeChecks::unchecked() };
    // SAFETY: the text is a kernel of this crate with slots that `lower` printed. Indices into
    // tensors are clamped to the lengths in the parameter block, indices into captures to their
    // shapes, loops end by counts of the block lists; the tests run every kernel with checks as well.
    unsafe { device.create_shader_module_trusted(descriptor, checks) }
}

/// A module of MSL text, handed to Metal as it is.
pub(super) fn msl(
    device: &wgpu::Device,
    label: &str,
    text: &str,
    entry: &str,
    workgroup: [u32; 3],
) -> wgpu::ShaderModule {
    let [x, y, z] = workgroup;
    let descriptor = wgpu::ShaderModuleDescriptorPassthrough {
        label: Some(label),
        entry_points: Cow::Owned(vec![wgpu::PassthroughShaderEntryPoint {
            name: Cow::Borrowed(entry),
            workgroup_size: (x, y, z),
        }]),
        msl: Some(Cow::Borrowed(text)),
        ..Default::default()
    };
    // SAFETY: the text is a kernel of this crate whose bindings are those of the pipeline layout that
    // it is used with (one bind group, ascending, no immediates); its indices are clamped as in the
    // WGSL kernels, which the emulator of the tests checks access by access.
    unsafe { device.create_shader_module_passthrough(descriptor) }
}

/// The module of a kernel in the language of this device.
pub(super) fn module(
    device: &wgpu::Device,
    spec: &KernelSpec,
    language: Language,
) -> Result<wgpu::ShaderModule> {
    // A kernel without a Metal text runs from its WGSL there too.
    let language = match language {
        Language::Msl if spec.metal.is_none() => Language::Wgsl,
        language => language,
    };
    let text = spec.text(language)?;
    let label = spec.label();
    match language {
        Language::Msl => Ok(msl(device, &label, &text, spec.entry(), spec.workgroup())),
        Language::Wgsl | Language::WgslWeb => {
            // naga's front end recurses over the text; a deep mod could outgrow a small thread's stack.
            if text.len() > 1 << 22 {
                return Err(Error::compile(label, "the text is longer than 4 MiB; simplify the mods"));
            }
            Ok(trusted_wgsl(device, &label, &text))
        }
    }
}

/// Leave to ask for wgpu's experimental features, of which this crate uses cooperative matrices.
pub(super) fn experimental() -> wgpu::ExperimentalFeatures {
    // SAFETY: the one experimental feature in use runs only kernels of this crate, on the tier
    // CoopMatrix, whose results the tests compare with the reference.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}
