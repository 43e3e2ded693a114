//! What this machine offers: adapters, their features and limits, the tier that is chosen, and why not a
//! better one; at the end, a block to paste into an issue.
//!
//! ```text
//! cargo run --release --example doctor [-- --json]
//! ```

use flexattn::Gpu;
use flexattn::gpu::{AdapterReport, Rung};
use lexopt::prelude::*;
use serde_json::{Value as Json, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut as_json = false;
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("json") => as_json = true,
            Long("help") | Short('h') => {
                println!("usage: doctor [--json]");
                return Ok(());
            }
            other => return Err(other.unexpected().into()),
        }
    }
    let adapters = Gpu::adapters();
    let gpu = Gpu::new()?;
    if as_json {
        println!("{}", report(&gpu, &adapters));
    } else {
        print(&gpu, &adapters);
    }
    Ok(())
}

/// The version of wgpu that this was built with.
fn wgpu_version() -> &'static str {
    let lock = include_str!("../Cargo.lock");
    let entry = lock.split("[[package]]").find(|entry| entry.contains("name = \"wgpu\""));
    let version = entry.and_then(|entry| entry.split("version = \"").nth(1)?.split('"').next());
    version.unwrap_or("of unknown version")
}

/// What the operating system calls itself, with its version: what a driver's bugs depend on.
fn os_version() -> String {
    let said_by = |program: &str, arguments: &[&str]| {
        let output = std::process::Command::new(program).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let found = match std::env::consts::OS {
        "macos" => said_by("sw_vers", &["-productVersion"]).map(|version| format!("macOS {version}")),
        "windows" => said_by("cmd", &["/c", "ver"]),
        _ => {
            let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
            let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
            let kernel = said_by("uname", &["-sr"]);
            name.map(|name| format!("{}, {}", name.trim_matches('"'), kernel.unwrap_or_default()))
        }
    };
    found.unwrap_or_else(|| format!("{} of unknown version", std::env::consts::OS))
}

/// The versions of everything between this library and the GPU.
fn versions() -> String {
    let (flexattn, arch) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    format!("flexattn {flexattn}, wgpu {}, {}, {arch}", wgpu_version(), os_version())
}

/// Short enough for an issue, with all that a maintainer asks for first.
fn for_an_issue(gpu: &Gpu, adapters: &[AdapterReport]) -> String {
    let mut block = format!("{}\n", versions());
    for AdapterReport { name, backend, driver, subgroup: (least, most), features, .. } in adapters {
        let features = features.join(" ");
        block += &format!("adapter: {name}; {backend}; {driver}; subgroups {least} to {most}; {features}\n");
    }
    if adapters.is_empty() {
        block += "adapter: none\n";
    }
    block += &format!("tier: {}\n", gpu.tier());
    for Rung { tier, reason, .. } in gpu.report().rungs.iter().filter(|rung| !rung.usable) {
        block += &format!("not {}: {reason}\n", tier.name());
    }
    block
}

fn print(gpu: &Gpu, adapters: &[AdapterReport]) {
    println!("{}", versions());
    if adapters.is_empty() {
        println!("no GPU adapter was found");
    }
    for AdapterReport { name, backend, driver, software, subgroup, features, limits, .. } in adapters {
        println!("\n{name}");
        println!("  backend          {backend}{}", if *software { ", in software" } else { "" });
        println!("  driver           {driver}");
        println!("  subgroup sizes   {} to {}", subgroup.0, subgroup.1);
        println!("  features         {}", features.join(", "));
        println!("  workgroup        {} bytes, {} invocations", limits.workgroup_memory, limits.invocations);
        println!("  storage binding  {} MiB", limits.storage_binding >> 20);
    }
    println!("\ntier: {}", gpu.tier());
    for Rung { tier, usable, reason } in &gpu.report().rungs {
        println!("  {} {:<12} {reason}", if *usable { "works" } else { "no   " }, tier.name());
    }
    println!("\nPaste this into an issue:\n\n```text\n{}```", for_an_issue(gpu, adapters));
}

fn report(gpu: &Gpu, adapters: &[AdapterReport]) -> Json {
    let rungs = gpu.report().rungs.iter();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "wgpu": wgpu_version(),
        "os": std::env::consts::OS,
        "os_version": os_version(),
        "arch": std::env::consts::ARCH,
        "tier": gpu.tier().name(),
        "adapter": gpu.report().adapter.as_ref().map(|adapter| adapter.name.clone()),
        "tiers": rungs.map(|Rung { tier, usable, reason }| {
            json!({ "tier": tier.name(), "usable": usable, "reason": reason })
        }).collect::<Vec<_>>(),
        "adapters": adapters.iter().map(describe).collect::<Vec<_>>(),
    })
}

fn describe(adapter: &AdapterReport) -> Json {
    let AdapterReport { name, backend, driver, software, subgroup, features, limits, .. } = adapter;
    json!({
        "name": name,
        "backend": backend,
        "driver": driver,
        "software": software,
        "subgroup_min": subgroup.0,
        "subgroup_max": subgroup.1,
        "features": features,
        "limits": {
            "maxStorageBufferBindingSize": limits.storage_binding,
            "maxBufferSize": limits.buffer,
            "minStorageBufferOffsetAlignment": limits.storage_alignment,
            "maxComputeWorkgroupsPerDimension": limits.workgroups,
            "maxComputeWorkgroupStorageSize": limits.workgroup_memory,
            "maxComputeInvocationsPerWorkgroup": limits.invocations,
        },
    })
}
