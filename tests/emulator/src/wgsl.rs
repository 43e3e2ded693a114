//! The MSL that naga, and so wgpu and Firefox, write for a WGSL kernel.

use flexattn::{Error, Result};
use naga::back::msl;
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// Buffer index of the table of buffer sizes, after the nine bindings of a kernel.
pub(crate) const SIZES: u8 = 9;

/// A kernel as naga spells it.
#[derive(Debug)]
pub(crate) struct Translated {
    pub(crate) text: String,
    pub(crate) entry: String,
    /// The bindings whose sizes in bytes the buffer [`SIZES`] holds, in its order.
    pub(crate) sized: Vec<u32>,
}

/// Translates one entry point. Workgroup memory is not zeroed first: what a kernel forgets to write
/// should show.
pub(crate) fn translate(wgsl: &str, entry: &str) -> Result<Translated> {
    let refused = |message: String| Error::compile(entry, message);
    let module = naga::front::wgsl::parse_str(wgsl).map_err(|error| refused(error.emit_to_string(wgsl)))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|error| refused(error.emit_to_string(wgsl)))?;
    let mut resources = msl::EntryPointResources { sizes_buffer: Some(SIZES), ..Default::default() };
    let mut sized = Vec::new();
    for (_, variable) in module.global_variables.iter() {
        let Some(binding) = variable.binding else { continue };
        let mutable = matches!(variable.space, naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE));
        let target = msl::BindTarget { buffer: Some(binding.binding as u8), mutable, ..Default::default() };
        resources.resources.insert(binding, target);
        if module.types[variable.ty].inner.is_dynamically_sized(&module.types) {
            sized.push(binding.binding);
        }
    }
    let options = msl::Options {
        lang_version: (3, 0),
        per_entry_point_map: [(entry.to_owned(), resources)].into(),
        fake_missing_bindings: false,
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        ..Default::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((naga::ShaderStage::Compute, entry.to_owned())),
        ..Default::default()
    };
    let (text, names) =
        msl::write_string(&module, &info, &options, &pipeline).map_err(|error| refused(error.to_string()))?;
    // A cast between clang's vectors keeps bits, or is refused; Metal's converts.
    let text = ["float", "half", "int", "uint", "bool"].iter().fold(text, |text, element| {
        (2..=4).fold(text, |text, n| {
            let ty = format!("metal::{element}{n}");
            text.replace(&format!("static_cast<{ty}>("), &format!("metal::make<{ty}>("))
        })
    });
    // Matrices that Metal lacks: `metal_stdlib` has them for translations alone.
    let text = match text.contains("simdgroup_half16x16") {
        true => format!("#define EMU_MATRICES_OF_16\n{text}"),
        false => text,
    };
    let name = names.entry_point_names.into_iter().next();
    let name = name.ok_or_else(|| refused("naga wrote no entry point".into()))?;
    Ok(Translated { text, entry: name.map_err(|error| refused(error.to_string()))?, sized })
}
