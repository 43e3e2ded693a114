//! Prints kernel text: what a mask and a score mod become on a GPU.
//!
//! ```text
//! cargo run --release --example emit -- --language wgsl|wgsl-web|msl --pass forward|decode|backward \
//!     [--score NAME|FILE] [--mask NAME|FILE] [--head-dim D] [--v-dim D] [--dtype f32|f16|bf16]
//! cargo run --release --example emit -- --all --language LANGUAGE --out FOLDER
//! ```
//!
//! `--all` writes every row of the kernel table, and `manifest.json` beside them: file, entry, label and
//! workgroup_memory of each.

use flexattn::kernels::{KernelSpec, Language, all_specs};
use lexopt::prelude::*;
use serde_json::json;
use std::path::{Path, PathBuf};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut language = Language::Wgsl;
    let mut all = false;
    let mut out = None;
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("language") => language = language_named(&arguments.value()?.string()?)?,
            Long("all") => all = true,
            Long("out") => out = Some(PathBuf::from(arguments.value()?)),
            other => return Err(other.unexpected().into()),
        }
    }
    match (all, out) {
        (true, Some(folder)) => write_all(&all_specs(), language, &folder),
        _ => Err("--all needs --out FOLDER".into()),
    }
}

fn language_named(name: &str) -> Result<Language, Failure> {
    match name {
        "wgsl" => Ok(Language::Wgsl),
        "wgsl-web" => Ok(Language::WgslWeb),
        "msl" => Ok(Language::Msl),
        _ => Err(format!("there is no language {name}; there are wgsl, wgsl-web and msl").into()),
    }
}

fn write_all(specs: &[KernelSpec], language: Language, folder: &Path) -> Result<(), Failure> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    std::fs::create_dir_all(folder)?;
    let ending = if language == Language::Msl { "metal" } else { "wgsl" };
    let mut manifest = Vec::new();
    for (number, spec) in specs.iter().enumerate() {
        let label = spec.label();
        let file = format!("{number:03}-{label}.{ending}");
        std::fs::write(folder.join(&file), spec.text(language)?)?;
        let (entry, workgroup_memory) = (spec.entry(), spec.workgroup_memory());
        manifest.push(
            json!({ "file": file, "entry": entry, "label": label, "workgroup_memory": workgroup_memory }),
        );
    }
    std::fs::write(folder.join("manifest.json"), serde_json::to_string_pretty(&manifest)?)?;
    println!("{} kernels in {}", manifest.len(), folder.display());
    Ok(())
}
