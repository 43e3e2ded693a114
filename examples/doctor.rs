//! What this machine offers: adapters, their features and limits, the tier that is chosen, and why not a
//! better one. Paste its output into a bug report.
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

fn print(gpu: &Gpu, adapters: &[AdapterReport]) {
    println!("flexattn {} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
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
}

fn report(gpu: &Gpu, adapters: &[AdapterReport]) -> Json {
    let rungs = gpu.report().rungs.iter();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "os": std::env::consts::OS,
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
