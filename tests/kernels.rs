//! Kernel files and the table that fills them.

use std::collections::BTreeSet;
use std::path::Path;

use flexattn::expr::{Expr, Input};
use flexattn::kernels::{
    Adapter, Fill, Kernel, KernelSpec, Language, Loader, MSL_FILES, Params, REGISTERS, TILES, Tile, TileRow,
    WGSL_FILES, all_specs,
};
use flexattn::lower::{Layout, Mods};
use flexattn::{DType, MaskMod, Profile, ScoreMod, Tier, masks, scores};
use naga::AddressSpace;
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// Parses and validates, and gives the module.
fn valid_wgsl(name: &str, text: &str) -> naga::Module {
    let module =
        naga::front::wgsl::parse_str(text).unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(text)));
    let checked = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module);
    if let Err(error) = checked {
        panic!("{name}: {}", error.emit_to_string(text));
    }
    module
}

/// Kernel files have an entry point; the others are included by them.
fn is_kernel(text: &str) -> bool {
    text.contains("@compute")
}

#[test]
fn every_kernel_file_is_a_valid_program_unfilled() {
    let mut kernels = 0;
    for (name, text) in WGSL_FILES {
        if is_kernel(text) {
            valid_wgsl(name, &Fill::join(name, WGSL_FILES).unwrap().finish());
            kernels += 1;
        }
    }
    assert!(kernels > 0);
}

#[test]
fn every_variant_is_valid_wgsl_with_its_entry_point_and_workgroup() {
    for spec in all_specs() {
        let text = spec.text(Language::Wgsl).unwrap();
        let module = valid_wgsl(&spec.label(), &text);
        let entry = module.entry_points.iter().find(|entry| entry.name == spec.entry());
        let entry = entry.unwrap_or_else(|| panic!("{} has no entry {}", spec.label(), spec.entry()));
        assert_eq!(entry.workgroup_size, spec.workgroup(), "{}", spec.label());
    }
}

#[test]
fn every_row_of_the_table_declares_the_workgroup_memory_it_states() {
    for spec in all_specs() {
        let module = valid_wgsl(&spec.label(), &spec.text(Language::Wgsl).unwrap());
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let declared: u32 = module
            .global_variables
            .iter()
            .filter(|(_, variable)| variable.space == AddressSpace::WorkGroup)
            .map(|(_, variable)| layouter[variable.ty].size)
            .sum();
        assert_eq!(declared, spec.workgroup_memory(), "{}", spec.label());
        assert!(declared <= 32 << 10, "{}: {declared}", spec.label());
    }
}

#[test]
fn tiles_for_gpus_hold_no_more_than_the_registers_of_an_invocation() {
    let of = |row: &TileRow| {
        // Wider heads spill; dk and dv are two rows to keep.
        let widest = if row.kernel == Kernel::Dkv { 384 } else { 576 };
        row.tile.registers(row.kernel, row.head_dim.min(widest), row.v_dim.min(widest))
    };
    let rows = |adapter| TILES.iter().filter(move |row| row.adapter == adapter);
    let mut counted = 0;
    for row in rows(Adapter::Any) {
        let Some(registers) = of(row) else { continue };
        assert!(registers <= REGISTERS, "{row:?}: {registers}");
        counted += 1;
    }
    assert!(counted > 30);
    // Those of a CPU are another matter, and stay there.
    assert!(rows(Adapter::Software).filter_map(of).max() > Some(2 * REGISTERS));
    let floor = Profile::floor(Tier::Subgroup);
    for (kernel, on_gpus, on_cpus) in [
        (Kernel::ForwardSubgroup, 64, 256),
        (Kernel::DecodeSubgroup, 64, 256),
        (Kernel::DqSubgroup, 32, 128),
        (Kernel::DkvSubgroup, 32, 128),
    ] {
        let fits = |dim, software| {
            Tile::choose(kernel, DType::F32, dim, dim, &Profile { software, ..floor.clone() }).is_ok()
        };
        assert_eq!([on_gpus, on_gpus + 1].map(|dim| fits(dim, false)), [true, false], "{kernel:?}");
        assert_eq!([on_cpus, on_cpus + 1].map(|dim| fits(dim, true)), [true, false], "{kernel:?}");
        assert!(Tile::choose(kernel.portable(), DType::F32, 256, 256, &floor).is_ok());
    }
}

#[test]
fn registers_are_counted_as_the_text_declares_them() {
    let mut counted = 0;
    for spec in all_specs() {
        let Some(registers) = spec.tile.registers(spec.kernel, spec.head_dim, spec.v_dim) else { continue };
        let module = valid_wgsl(&spec.label(), &spec.text(Language::Wgsl).unwrap());
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let bytes = |function: &naga::Function, names: &[&str]| -> u32 {
            let named = |name: &&str| {
                let local = function.local_variables.iter().find(|(_, it)| it.name.as_deref() == Some(name));
                layouter[local.unwrap_or_else(|| panic!("{}: no {name}", spec.label())).1.ty].size
            };
            names.iter().map(named).sum()
        };
        let entry = &module.entry_points.iter().find(|it| it.name == spec.entry()).unwrap().function;
        let within = |name: &str, variables: &[&str]| {
            bytes(
                module.functions.iter().find(|(_, it)| it.name.as_deref() == Some(name)).unwrap().1,
                variables,
            )
        };
        // k0 to k3, and a; in gradients b0 to b3.
        let quads = 5 * 16;
        let counted_there = match spec.kernel {
            Kernel::ForwardSubgroup | Kernel::DecodeSubgroup => {
                bytes(entry, &["q_rows", "s"])
                    + within("scores", &["columns"])
                    + within("product", &["low", "high"])
            }
            Kernel::Dq => bytes(entry, &["gradient", "stat"]) + 2 * within("product", &["s"]) + quads,
            Kernel::Dkv => {
                bytes(entry, &["dk", "dv", "dp"])
                    + within("product", &["s"])
                    + quads.max(bytes(entry, &["weights", "ds"]))
            }
            Kernel::DqSubgroup => {
                bytes(entry, &["q_rows", "dout_rows", "gradient", "stat", "k_columns", "ds"])
                    + 2 * within("product", &["s"])
                    + within("product", &["low", "high"])
            }
            Kernel::DkvSubgroup => {
                bytes(
                    entry,
                    &["k_rows", "v_rows", "dk", "dv", "q_columns", "dout_columns", "dp", "weights", "ds"],
                ) + within("product", &["s", "low", "high"])
            }
            _ => bytes(entry, &["s"]) + quads,
        };
        let of_rows: &[&str] = match spec.kernel {
            Kernel::Dkv | Kernel::DkvSubgroup => &[],
            Kernel::Dq | Kernel::DqSubgroup => &["q_pos"],
            kernel if kernel.is_forward() => &["o", "m", "l", "q_pos"],
            _ => &["o", "m", "l", "q_pos", "q_head"],
        };
        let declared = bytes(entry, of_rows) + counted_there;
        assert_eq!(4 * registers, declared, "{}", spec.label());
        counted += 1;
    }
    assert!(counted > 100);
}

#[test]
fn every_head_dim_has_a_tile_within_16_kib() {
    for &kernel in Kernel::ALL {
        for dtype in DType::ALL {
            for (head_dim, v_dim) in [(1, 1), (3, 5), (64, 64), (72, 80), (128, 128), (256, 256), (576, 512)]
            {
                // The other tiers fall back to this one.
                let up_to = match kernel {
                    Kernel::ForwardCoop => 256,
                    Kernel::DqSubgroup | Kernel::DkvSubgroup => 32,
                    _ => 64,
                };
                if kernel.uses_subgroups() && head_dim > up_to
                    || kernel.uses_matrices() && dtype == DType::BF16
                {
                    continue;
                }
                let spec = KernelSpec::new(kernel, dtype, head_dim, v_dim, 16 << 10).unwrap();
                assert!(spec.workgroup_memory() <= 16 << 10, "{}", spec.label());
            }
        }
    }
}

#[test]
fn a_kernel_that_needs_more_workgroup_memory_says_how_much() {
    let error = KernelSpec::new(Kernel::Forward, DType::F32, 64, 64, 4 << 10).unwrap_err();
    assert!(error.is_limit());
    assert!(error.to_string().contains("maxComputeWorkgroupStorageSize"), "{error}");
}

#[test]
fn files_and_table_agree() {
    let on_disk: BTreeSet<String> = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/wgsl"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let embedded: BTreeSet<String> = WGSL_FILES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(on_disk, embedded);
    let with_entries: BTreeSet<String> =
        WGSL_FILES.iter().filter(|(_, text)| is_kernel(text)).map(|(name, _)| (*name).to_owned()).collect();
    let of_kernels: BTreeSet<String> =
        Kernel::ALL.iter().map(|kernel| format!("{}.wgsl", kernel.file())).collect();
    assert_eq!(with_entries, of_kernels);
    for &kernel in Kernel::ALL {
        assert!(TILES.iter().any(|row| row.kernel == kernel), "{kernel:?} has no tile");
    }
}

#[test]
fn common_files_contain_the_parameter_block_as_declared() {
    let (_, common) = WGSL_FILES.iter().find(|(name, _)| *name == "common.wgsl").unwrap();
    let declared = Params::declaration(Language::Wgsl);
    assert!(common.contains(&declared), "common.wgsl should contain\n{declared}");
    if let Some((_, common)) = MSL_FILES.iter().find(|(name, _)| *name == "common.metal") {
        let declared = Params::declaration(Language::Msl);
        assert!(common.contains(&declared), "common.metal should contain\n{declared}");
    }
}

#[test]
fn parameters_have_the_same_offsets_in_rust_and_on_the_gpu() {
    let module = valid_wgsl("forward.wgsl", &Fill::join("forward.wgsl", WGSL_FILES).unwrap().finish());
    let (_, params) = module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some("Params")).unwrap();
    let naga::TypeInner::Struct { members, .. } = &params.inner else { panic!("Params is a struct") };
    let offset = |name: &str| members.iter().find(|m| m.name.as_deref() == Some(name)).unwrap().offset;
    assert_eq!(offset("scale") as usize, std::mem::offset_of!(Params, scale));
    assert_eq!(offset("q") as usize, std::mem::offset_of!(Params, q));
    assert_eq!(offset("dv") as usize, std::mem::offset_of!(Params, dv));
    assert_eq!(offset("info") as usize, size_of::<Params>());
}

#[test]
fn keys_differ_between_variants() {
    let keys: BTreeSet<u128> = all_specs().iter().map(KernelSpec::key).collect();
    assert_eq!(keys.len(), all_specs().len());
    let mut spec = KernelSpec::new(Kernel::Forward, DType::F32, 64, 64, 16 << 10).unwrap();
    let plain = spec.key();
    spec.mods.score = Some(Expr::input(Input::Score));
    assert_ne!(spec.key(), plain);
}

const TOY: &[(&str, &str)] = &[
    (
        "toy.wgsl",
        "//#include part.wgsl\n//#include part.wgsl\nconst ROWS: u32 = 4u;   // rows\n//@slot a\nold\n//@slot b\ninner\n//@end\n//@end\nvar<storage, read> k: array<u32>;",
    ),
    ("part.wgsl", "enable f16;\nconst PART: bool = false;"),
    ("open.wgsl", "//@slot a\n"),
];

#[test]
fn filler_joins_once_rewrites_and_fills() {
    let mut fill = Fill::join("toy.wgsl", TOY).unwrap();
    fill.constant("ROWS", "8").unwrap();
    fill.constant("PART", "true").unwrap();
    fill.slot("a", "new").unwrap();
    fill.writable("k").unwrap();
    assert_eq!(
        fill.finish(),
        "enable f16;\nconst PART: bool = true;\nconst ROWS: u32 = 8u;   // rows\n//@slot a\nnew\n//@end\nvar<storage, read_write> k: array<u32>;\n"
    );
}

#[test]
fn filler_rewrites_metal_macros() {
    let files =
        [("toy.metal", "#include \"part.metal\"\n#define ROWS 4 // rows\n"), ("part.metal", "int part;")];
    let mut fill = Fill::join("toy.metal", &files).unwrap();
    fill.constant("ROWS", "8").unwrap();
    assert_eq!(fill.finish(), "int part;\n#define ROWS 8 // rows\n");
}

#[test]
fn filler_refuses_what_does_not_match_exactly_once() {
    let twice =
        [("toy.wgsl", "const A: u32 = 1u;\nconst A: u32 = 2u;\n//@slot s\n//@end\n//@slot s\n//@end")];
    let refused = |message: flexattn::Error, text: &str| {
        assert!(message.is_compile());
        assert!(message.to_string().contains(text), "{message}");
    };
    refused(Fill::join("absent.wgsl", TOY).unwrap_err(), "no file absent.wgsl");
    let mut fill = Fill::join("toy.wgsl", &twice).unwrap();
    refused(fill.constant("A", "3").unwrap_err(), "constant A is there 2 times");
    refused(fill.constant("B", "3").unwrap_err(), "constant B is there 0 times");
    refused(fill.slot("s", "").unwrap_err(), "slot s is there 2 times");
    refused(fill.slot("t", "").unwrap_err(), "slot t is there 0 times");
    refused(fill.writable("k").unwrap_err(), "read-only buffer k is there 0 times");
    refused(Fill::join("open.wgsl", TOY).unwrap().slot("a", "").unwrap_err(), "slot a has no //@end");
}

/// The forward kernel with each prebuilt mask and score mod, by name.
fn prebuilt_kernels() -> Vec<(&'static str, KernelSpec)> {
    let params = flexattn::Params::new(2, 4, 96, 96);
    let plain = KernelSpec::new(Kernel::Forward, DType::F32, 64, 64, 16 << 10).unwrap();
    let with = |score: Option<&ScoreMod>, mask: Option<&MaskMod>| {
        let score = score.map(|score| score.expr().clone());
        let mask = mask.map(|mask| mask.expr().clone());
        let layout = Layout::new(score.iter().chain(&mask), None);
        KernelSpec { mods: Mods { score, mask, ..Mods::default() }, layout, ..plain.clone() }
    };
    let masks = masks::ALL.iter().map(|row| (row.name, with(None, Some(&row.build(&params).unwrap()))));
    let scores = scores::ALL.iter().map(|row| (row.name, with(Some(&row.build(&params).unwrap()), None)));
    masks.chain(scores).collect()
}

/// The kernel that looks into blocks, of a mask that reads one tensor in place and another among the captures.
fn block_mask_kernel() -> KernelSpec {
    let mask = masks::interval(&[0, 1], &[[0, 1], [1, 2]]) & masks::causal();
    let plain = KernelSpec::new(Kernel::BlockMask, DType::F32, 64, 64, 16 << 10).unwrap();
    let layout = Layout::new([mask.expr()], Some("group"));
    KernelSpec { mods: Mods { mask: Some(mask.expr().clone()), ..Mods::default() }, layout, ..plain }
}

/// Compares a generated file with the stored one, or with UPDATE_SNAPSHOTS=1 stores it.
pub(crate) fn snapshot(path: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(path);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        return;
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == text,
        "{} is not what is generated now; run the tests with UPDATE_SNAPSHOTS=1 and look at the difference",
        path.display()
    );
}

#[test]
fn prebuilt_mods_give_the_stored_kernels_and_each_is_valid() {
    let kernels = prebuilt_kernels();
    let names: BTreeSet<&str> = kernels.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), kernels.len(), "a mask and a score mod share a name");
    for (name, spec) in kernels {
        let text = spec.text(Language::Wgsl).unwrap();
        valid_wgsl(name, &text);
        snapshot(&format!("wgsl/{name}.wgsl"), &text);
    }
    let text = block_mask_kernel().text(Language::Wgsl).unwrap();
    valid_wgsl("block_mask", &text);
    snapshot("wgsl/kernel_block_mask.wgsl", &text);
}

/// What Apple's compiler should see: the Metal kernels with each prebuilt mask and score mod, and every
/// Metal kernel by itself with both loaders.
#[test]
fn prebuilt_mods_give_the_stored_metal_kernels() {
    for (name, spec) in prebuilt_kernels() {
        let text = spec.on_metal(Loader::Staged).text(Language::Msl).unwrap();
        snapshot(&format!("msl/{name}.metal"), &text);
    }
    for &kernel in Kernel::ALL.iter().filter(|kernel| !kernel.uses_subgroups()) {
        for loader in Loader::ALL {
            let spec = KernelSpec::new(kernel, DType::F16, 64, 64, 16 << 10).unwrap().on_metal(loader);
            if spec.metal.is_some() {
                let text = spec.text(Language::Msl).unwrap();
                snapshot(&format!("msl/kernel_{}_{}.metal", kernel.entry(), loader.name()), &text);
            }
        }
    }
}

/// What is stored, and not what is generated: the files that a Mac's compiler gets.
#[test]
fn stored_metal_kernels_are_accepted_by_clang() {
    if let Err(error) = flexattn_emulator::clang() {
        println!("SKIPPED: {error}");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/msl");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 50, "{}", files.len());
    let refused = std::thread::scope(|scope| {
        let parts: Vec<_> = files
            .chunks(files.len().div_ceil(std::thread::available_parallelism().map_or(2, usize::from)))
            .map(|files| {
                scope.spawn(move || {
                    let check = |file: &std::path::PathBuf| {
                        let text = std::fs::read_to_string(file).unwrap();
                        let refused = flexattn_emulator::Kernel::check(&text).err()?;
                        Some(format!("{}: {refused}", file.display()))
                    };
                    files.iter().filter_map(check).collect::<Vec<String>>()
                })
            })
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect::<Vec<String>>()
    });
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    // What Metal refuses, clang refuses.
    let alibi = include_str!("snapshots/msl/alibi.metal");
    for (from, to) in [
        ("device const Elem* k ", "device const uint* k "),
        ("thread const Ctx& ctx, int b, int h, int q) {\n", "thread const Ctx& ctx, int b, int q) {\n"),
    ] {
        assert!(alibi.contains(from), "{from}");
        assert!(flexattn_emulator::Kernel::check(&alibi.replace(from, to)).is_err(), "{to}");
    }
}

#[test]
fn metal_files_and_table_agree() {
    let on_disk: BTreeSet<String> = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/msl"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let embedded: BTreeSet<String> = MSL_FILES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(on_disk, embedded);
    let with_entries: BTreeSet<String> = MSL_FILES
        .iter()
        .filter(|(_, text)| text.contains("\nkernel void "))
        .map(|(name, _)| (*name).to_owned())
        .collect();
    let on_metal = |kernel: &&Kernel| {
        let spec = KernelSpec::new(**kernel, DType::F16, 32, 32, 16 << 10).unwrap();
        spec.on_metal(Loader::Direct).metal.is_some()
    };
    let of_kernels: BTreeSet<String> =
        Kernel::ALL.iter().filter(on_metal).map(|kernel| format!("{}.metal", kernel.file())).collect();
    assert_eq!(with_entries, of_kernels);
}

#[test]
fn browsers_get_the_subgroup_directive_and_naga_does_not() {
    let spec = KernelSpec::new(Kernel::ForwardSubgroup, DType::F32, 64, 64, 16 << 10).unwrap();
    assert!(spec.text(Language::WgslWeb).unwrap().starts_with("enable subgroups;\n"));
    assert!(!spec.text(Language::Wgsl).unwrap().contains("enable subgroups"));
}
