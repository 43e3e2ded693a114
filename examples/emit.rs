//! Prints kernel text: what a mask and a score mod become on a GPU.
//!
//! ```text
//! cargo run --release --example emit -- --language wgsl|wgsl-web|msl --pass forward|decode|backward|block_mask \
//!     [--score NAME|FILE] [--mask NAME|FILE] [--params NAME=VALUE,..] [--capture NAME:TYPE:8x64] ..
//!     [--head-dim D] [--v-dim D] [--dtype f32|f16|bf16] [--tier portable|subgroup|coop-matrix] [--loader staged|direct]
//! cargo run --release --example emit -- --all --language LANGUAGE --out FOLDER
//! ```
//!
//! NAME is that of a prebuilt mask or score mod, with `--params` for its parameters. FILE holds WGSL text;
//! each tensor that it captures is declared by `--capture`. With `--language msl`, a kernel that exists in WGSL
//! only is named in a comment and skipped. `--all` writes every row of the kernel tables and every prebuilt mask
//! and score mod, MSL with both loaders, and `manifest.json` beside them: file, entry, label and workgroup_memory
//! of each. A text is written once: the entries of one file share it.

use flexattn::expr::text_reads;
use flexattn::kernels::{Kernel, KernelSpec, Language, Loader, MSL_GRADIENT_TILES, MSL_TILES, all_specs};
use flexattn::lower::{Layout, Mods};
use flexattn::{Capture, DType, MaskMod, Params, ScoreMod, Tier, masks, scores};
use lexopt::prelude::*;
use serde_json::json;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

type Failure = Box<dyn std::error::Error>;

/// Workgroup memory that every WebGPU device has, in bytes.
const FLOOR: u32 = 16 << 10;

/// Prebuilt mods have defaults that suit these sizes: batch, query heads, q_len, kv_len.
const SIZES: Params = Params::new(1, 8, 1024, 1024);

/// What the command line asks for.
struct Wanted {
    language: Language,
    pass: String,
    score: Option<String>,
    mask: Option<String>,
    params: Params,
    captures: Vec<Capture>,
    head_dim: u32,
    v_dim: Option<u32>,
    dtype: DType,
    tier: Tier,
    loader: Loader,
    all: bool,
    out: Option<PathBuf>,
}

impl Wanted {
    /// Those that a text reads: the mask and the score mod may each read some.
    fn captures_of(&self, text: &str) -> Vec<Capture> {
        self.captures.iter().filter(|capture| text_reads(text, capture.name())).cloned().collect()
    }
}

const USAGE: &str = "\
usage: emit --language wgsl|wgsl-web|msl --pass forward|decode|backward|block_mask [--score NAME|FILE] [--mask NAME|FILE]
            [--params NAME=VALUE,..] [--capture NAME:TYPE:8x64] .. [--head-dim D] [--v-dim D] [--dtype f32|f16|bf16]
            [--tier portable|subgroup|coop-matrix] [--loader staged|direct]
       emit --all --language LANGUAGE --out FOLDER";

fn main() -> ExitCode {
    flexattn_testing::ended(run())
}

fn run() -> Result<(), Failure> {
    let Some(wanted) = arguments()? else {
        println!("{USAGE}");
        println!("score mods: {}", scores::ALL.iter().map(|row| row.name).collect::<Vec<_>>().join(", "));
        println!("masks: {}", masks::ALL.iter().map(|row| row.name).collect::<Vec<_>>().join(", "));
        return Ok(());
    };
    match (&wanted.out, wanted.all) {
        (Some(folder), true) => write_all(wanted.language, folder),
        (None, false) => print(&wanted),
        _ => Err("--all and --out FOLDER go together".into()),
    }
}

/// Nothing when help was asked for.
fn arguments() -> Result<Option<Wanted>, Failure> {
    let mut wanted = Wanted {
        language: Language::Wgsl,
        pass: "forward".to_owned(),
        score: None,
        mask: None,
        params: SIZES,
        captures: Vec::new(),
        head_dim: 64,
        v_dim: None,
        dtype: DType::F32,
        tier: Tier::Portable,
        loader: Loader::Staged,
        all: false,
        out: None,
    };
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("language") => wanted.language = language_named(&arguments.value()?.string()?)?,
            Long("pass") => wanted.pass = arguments.value()?.string()?,
            Long("score") => wanted.score = Some(arguments.value()?.string()?),
            Long("mask") => wanted.mask = Some(arguments.value()?.string()?),
            Long("params") => wanted.params = SIZES.read(&arguments.value()?.string()?)?,
            Long("capture") => wanted.captures.push(declared(&arguments.value()?.string()?)?),
            Long("head-dim") => wanted.head_dim = arguments.value()?.parse()?,
            Long("v-dim") => wanted.v_dim = Some(arguments.value()?.parse()?),
            Long("dtype") => wanted.dtype = DType::from_name(&arguments.value()?.string()?)?,
            Long("tier") => wanted.tier = Tier::from_name(&arguments.value()?.string()?)?,
            Long("loader") => wanted.loader = loader_named(&arguments.value()?.string()?)?,
            Long("all") => wanted.all = true,
            Long("out") => wanted.out = Some(PathBuf::from(arguments.value()?)),
            Long("help") | Short('h') => return Ok(None),
            other => return Err(format!("{}\n{USAGE}", other.unexpected()).into()),
        }
    }
    Ok(Some(wanted))
}

fn language_named(name: &str) -> Result<Language, Failure> {
    match name {
        "wgsl" => Ok(Language::Wgsl),
        "wgsl-web" => Ok(Language::WgslWeb),
        "msl" => Ok(Language::Msl),
        _ => Err(format!("there is no language {name}; there are wgsl, wgsl-web and msl").into()),
    }
}

fn loader_named(name: &str) -> Result<Loader, Failure> {
    match name {
        "staged" => Ok(Loader::Staged),
        "direct" => Ok(Loader::Direct),
        _ => {
            Err(format!("there is no loader {name}; there are staged (M1, M2) and direct (M3 and later)")
                .into())
        }
    }
}

/// A captured tensor of zeros from `slope:f32:8`: kernel text depends on type and rank, never on values.
fn declared(text: &str) -> Result<Capture, Failure> {
    let wrong =
        || format!("{text} declares no capture; write NAME:TYPE:8x64 with f32, f16, bf16, i32, u32 or bool");
    let mut parts = text.split(':');
    let (Some(name), Some(dtype), Some(shape), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(wrong().into());
    };
    let shape: Vec<usize> =
        shape.split('x').filter(|size| !size.is_empty()).map(str::parse).collect::<Result<_, _>>()?;
    let count = shape.iter().product();
    Ok(match dtype {
        "f32" => Capture::f32(name, &vec![0.0; count], &shape)?.into(),
        "f16" => Capture::f16(name, &vec![half::f16::ZERO; count], &shape)?.into(),
        "bf16" => Capture::bf16(name, &vec![half::bf16::ZERO; count], &shape)?.into(),
        "i32" => Capture::i32(name, &vec![0; count], &shape)?.into(),
        "u32" => Capture::u32(name, &vec![0; count], &shape)?.into(),
        "bool" => Capture::bool(name, &vec![false; count], &shape)?.into(),
        _ => return Err(wrong().into()),
    })
}

fn print(wanted: &Wanted) -> Result<(), Failure> {
    let score = wanted.score.as_deref().map(|name| -> Result<ScoreMod, Failure> {
        Ok(match std::fs::read_to_string(name) {
            Ok(text) => ScoreMod::from_wgsl(&text, &wanted.captures_of(&text), &[])?,
            Err(_) => scores::by_name(name, &wanted.params)?,
        })
    });
    let mask = wanted.mask.as_deref().map(|name| -> Result<MaskMod, Failure> {
        Ok(match std::fs::read_to_string(name) {
            Ok(text) => MaskMod::from_wgsl(&text, &wanted.captures_of(&text), &[])?,
            Err(_) => masks::by_name(name, &wanted.params)?,
        })
    });
    let (score, mask) = (score.transpose()?, mask.transpose()?);
    let [matrices, subgroup] = [Tier::CoopMatrix, Tier::Subgroup].map(|tier| wanted.tier == tier);
    let chosen = |kernel: &Kernel| match kernel {
        Kernel::Forward => !subgroup && !matrices,
        Kernel::Dq | Kernel::Dkv | Kernel::DecodeSplit => !subgroup,
        Kernel::ForwardSubgroup | Kernel::DecodeSubgroup | Kernel::DqSubgroup | Kernel::DkvSubgroup => {
            subgroup
        }
        Kernel::ForwardCoop => matrices,
        _ => true,
    };
    let all = Kernel::ALL.iter().copied();
    let kernels: Vec<Kernel> = all.filter(chosen).filter(|kernel| pass_of(*kernel) == wanted.pass).collect();
    if kernels.is_empty() {
        return Err(format!(
            "there is no pass {}; there are forward, decode, backward and block_mask",
            wanted.pass
        )
        .into());
    }
    let mut printed = 0;
    for kernel in kernels {
        let v_dim = wanted.v_dim.unwrap_or(wanted.head_dim);
        let with = |kernel| KernelSpec::new(kernel, wanted.dtype, wanted.head_dim, v_dim, FLOOR);
        let spec = with(kernel).or_else(|_| with(kernel.portable()))?;
        let spec = if evaluates_mods(&spec)? { with_mods(spec, score.as_ref(), mask.as_ref()) } else { spec };
        let metal = wanted.language == Language::Msl;
        let spec = if metal { spec.on_metal(wanted.loader) } else { spec };
        if metal && spec.metal.is_none() {
            println!(
                "// {}: left out, it runs from its WGSL on Metal too; `--language wgsl` prints it",
                spec.label()
            );
            continue;
        }
        println!("// {}\n{}", spec.label(), spec.text(wanted.language)?);
        printed += 1;
    }
    if printed == 0 {
        return Err(format!(
            "no {} kernel of tier {} has MSL; leave --tier out, or print WGSL",
            wanted.pass, wanted.tier
        )
        .into());
    }
    Ok(())
}

/// The pass that a kernel belongs to; the kernels of captured tensors are written for one tensor each and
/// belong to none.
fn pass_of(kernel: Kernel) -> &'static str {
    match kernel.file() {
        "captured" => "captured",
        "block_mask" => "block_mask",
        "decode" | "decode_subgroup" => "decode",
        _ if kernel.is_backward() => "backward",
        _ => "forward",
    }
}

/// Some kernels only combine what others left, and have no slots for mods.
fn evaluates_mods(spec: &KernelSpec) -> Result<bool, Failure> {
    Ok(spec.text(Language::Wgsl)?.contains("//@slot score_mod"))
}

fn with_mods(spec: KernelSpec, score: Option<&ScoreMod>, mask: Option<&MaskMod>) -> KernelSpec {
    let (score, mask) = (score.map(|score| score.expr().clone()), mask.map(|mask| mask.expr().clone()));
    let layout = Layout::new(score.iter().chain(&mask), None);
    let grad = spec.kernel.uses_score_grad();
    KernelSpec { mods: Mods { score, mask, grad, ..Mods::default() }, layout, ..spec }
}

/// Each prebuilt mask and score mod in each kernel that evaluates it.
fn prebuilt_specs() -> Result<Vec<(String, KernelSpec)>, Failure> {
    let mut specs = Vec::new();
    for &kernel in Kernel::ALL.iter().filter(|kernel| pass_of(**kernel) != "captured") {
        // As wide as heads usually are, or as the kernel has tiles for.
        let with = |dim| KernelSpec::new(kernel, DType::F32, dim, dim, FLOOR);
        let plain = with(64).or_else(|_| with(32))?;
        if !evaluates_mods(&plain)? {
            continue;
        }
        // Blocks are the mask's alone.
        for row in scores::ALL.iter().filter(|_| kernel != Kernel::BlockMask) {
            specs.push((row.name.to_owned(), with_mods(plain.clone(), Some(&row.build(&SIZES)?), None)));
        }
        for row in masks::ALL {
            specs.push((row.name.to_owned(), with_mods(plain.clone(), None, Some(&row.build(&SIZES)?))));
        }
    }
    Ok(specs)
}

/// Every tile of the Metal kernels, by both loaders: the largest dims of each, and dims that are not aligned.
fn metal_specs() -> Result<Vec<KernelSpec>, Failure> {
    let forward = MSL_TILES.iter().map(|row| row.up_to);
    let largest = forward.chain(MSL_GRADIENT_TILES.iter().map(|row| row.up_to));
    let dims: BTreeSet<u32> = largest.map(|dim| dim.min(576)).chain([67]).collect();
    let mut specs = Vec::new();
    for (&kernel, dim) in Kernel::ALL.iter().flat_map(|kernel| dims.iter().map(move |dim| (kernel, *dim))) {
        for dtype in DType::ALL {
            // Which WGSL tile there would be is of no account.
            let spec = KernelSpec::new(kernel.portable(), dtype, dim, dim.min(512), FLOOR)?;
            specs.extend(Loader::ALL.map(|loader| KernelSpec { kernel, ..spec.clone() }.on_metal(loader)));
        }
    }
    specs.retain(|spec| spec.metal.is_some());
    Ok(specs)
}

/// What `--all` writes: each with the name of its mod, if it has one.
fn rows(language: Language) -> Result<Vec<(String, KernelSpec)>, Failure> {
    let named = |spec| (String::new(), spec);
    if language != Language::Msl {
        let taken = |spec: &KernelSpec| language == Language::Wgsl || !spec.kernel.uses_matrices();
        let plain = all_specs().into_iter().map(named);
        return Ok(plain.chain(prebuilt_specs()?).filter(|(_, spec)| taken(spec)).collect());
    }
    let with_mods = prebuilt_specs()?
        .into_iter()
        .flat_map(|(mods, spec)| Loader::ALL.map(|loader| (mods.clone(), spec.clone().on_metal(loader))));
    let with_mods = with_mods.filter(|(_, spec)| spec.metal.is_some());
    Ok(metal_specs()?.into_iter().map(named).chain(with_mods).collect())
}

fn write_all(language: Language, folder: &Path) -> Result<(), Failure> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    std::fs::create_dir_all(folder)?;
    let ending = if language == Language::Msl { "metal" } else { "wgsl" };
    let mut manifest = Vec::new();
    let (mut files, mut seen) = (HashMap::new(), HashSet::new());
    for (mods, spec) in rows(language)? {
        let label = if mods.is_empty() { spec.label() } else { format!("{}-{mods}", spec.label()) };
        let text = spec.text(language)?;
        let file = match files.get(&text) {
            Some(file) => String::clone(file),
            None => {
                let file = format!("{:03}-{label}.{ending}", files.len());
                std::fs::write(folder.join(&file), &text)?;
                files.insert(text, file.clone());
                file
            }
        };
        let (entry, workgroup_memory) = (spec.entry(), spec.workgroup_memory());
        if seen.insert((file.clone(), entry)) {
            manifest.push(
                json!({ "file": file, "entry": entry, "label": label, "workgroup_memory": workgroup_memory }),
            );
        }
    }
    std::fs::write(folder.join("manifest.json"), serde_json::to_string_pretty(&manifest)?)?;
    println!("{} kernels in {} files in {}", manifest.len(), files.len(), folder.display());
    Ok(())
}
