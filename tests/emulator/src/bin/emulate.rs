//! Counts what a kernel does: `cargo xtask emulate` runs this.

use std::error::Error;

use flexattn::kernels::Loader;
use flexattn::{DType, Params, Tier, masks, scores};
use flexattn_emulator::{Case, Kernels, Measurement};
use lexopt::prelude::*;
use serde_json::{Value as Json, json};

const USAGE: &str = "\
usage: cargo xtask emulate [--kernel forward|decode|backward] [--loader staged|direct|coop-matrix|subgroup|portable] [--dtype f16|bf16|f32]
                           [--head-dim D] [--seq N] [--kv-len N] [--q-heads H] [--kv-heads H]
                           [--mask NAME] [--score NAME] [--json]
       cargo xtask emulate --table

Runs the kernel's Metal text in the emulator, checks the result, and prints what it did: one line per dispatch.
forward, backward: N queries, N keys (512). decode: one query, N keys (4096), 8 query heads on 2 key heads, head dim 128.
--table prints the rows of docs/metal-counters.md.
";

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = lexopt::Parser::from_env();
    let (mut kernel, mut loader, mut dtype) =
        ("forward".to_owned(), Kernels::Msl(Loader::Staged), DType::F16);
    let (mut head_dim, mut seq, mut kv_len, mut q_heads, mut kv_heads) = (None, None, None, None, None);
    let (mut mask, mut score, mut as_json) = ("dense".to_owned(), None, false);
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("kernel") => kernel = arguments.value()?.string()?,
            Long("loader") => loader = Kernels::from_name(&arguments.value()?.string()?)?,
            Long("dtype") => dtype = DType::from_name(&arguments.value()?.string()?)?,
            Long("head-dim") => head_dim = Some(arguments.value()?.parse::<usize>()?),
            Long("seq") => seq = Some(arguments.value()?.parse::<usize>()?),
            Long("kv-len") => kv_len = Some(arguments.value()?.parse::<usize>()?),
            Long("q-heads") => q_heads = Some(arguments.value()?.parse::<usize>()?),
            Long("kv-heads") => kv_heads = Some(arguments.value()?.parse::<usize>()?),
            Long("mask") => mask = arguments.value()?.string()?,
            Long("score") => score = Some(arguments.value()?.string()?),
            Long("json") => as_json = true,
            Long("table") => return table(),
            Long("help") | Short('h') => {
                print!("{USAGE}");
                return Ok(());
            }
            other => return Err(other.unexpected().into()),
        }
    }
    if !matches!(kernel.as_str(), "forward" | "decode" | "backward") {
        return Err(format!(
            "there is no kernel `{kernel}`; there are forward, decode and backward\n{USAGE}"
        )
        .into());
    }
    let decode = kernel == "decode";
    let seq_default = if decode { 4096 } else { 512 };
    let keys = kv_len.or(seq).unwrap_or(seq_default);
    let q_len = if decode { 1 } else { seq.unwrap_or(seq_default) };
    let (heads_default, kv_default) = if decode { (8, 2) } else { (1, 1) };
    let q_heads = q_heads.unwrap_or(heads_default);
    let sizes = Params::new(1, q_heads, q_len, keys);
    let case = Case {
        kernels: loader,
        dtype,
        q_heads,
        kv_heads: kv_heads.unwrap_or(kv_default),
        q_len,
        kv_len: keys,
        head_dim: head_dim.unwrap_or(if decode { 128 } else { 64 }),
        // The query of a decode step is the last position.
        q_offset: if decode { keys as i32 - 1 } else { 0 },
        mask: if matches!(mask.as_str(), "dense" | "none") {
            None
        } else {
            Some(masks::by_name(&mask, &sizes)?)
        },
        score: score.as_deref().map(|name| scores::by_name(name, &sizes)).transpose()?,
    };
    let measured = if kernel == "backward" { case.measure_backward() } else { case.measure() };
    for measurement in measured? {
        let line = report(&kernel, &case, &mask, &measurement);
        if as_json {
            println!("{line}");
        } else {
            println!("{} {}", measurement.record.entry, measurement.record.label);
            for (name, value) in line.as_object().into_iter().flatten() {
                println!("  {name:<24} {value}");
            }
        }
    }
    Ok(())
}

/// The tables of docs/metal-counters.md: forward and gradients of 512 queries, 512 keys, one head, f16; decoding.
fn table() -> Result<(), Box<dyn Error>> {
    let kernels = [
        Kernels::Msl(Loader::Staged),
        Kernels::Msl(Loader::Direct),
        // Its gradients and its decoding are those of the tiers below.
        Kernels::Wgsl(Tier::CoopMatrix),
        Kernels::Wgsl(Tier::Subgroup),
        Kernels::Wgsl(Tier::Portable),
    ];
    for backward in [false, true] {
        println!(
            "\n| kernels | case | threads | TG memory | MMA / needed | device read / minimum | TG read, write per MMA \
             | barriers per 32x32 | exp / score | fp / score | conversions / score | utilisation |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
        for kernels in kernels {
            if backward && kernels == Kernels::Wgsl(Tier::CoopMatrix) {
                continue;
            }
            for head_dim in [64, 128] {
                for (name, mask, score) in [
                    ("dense", None, None),
                    ("causal", Some(masks::causal()), None),
                    ("causal, alibi", Some(masks::causal()), Some(scores::alibi(1))),
                ] {
                    let case = Case { mask, score, ..Case::square(kernels, DType::F16, 512, head_dim) };
                    let measured = if backward { case.measure_backward()? } else { case.measure()? };
                    for measured in measured.iter().filter(|measured| measured.mma_minimum > 0) {
                        let entry =
                            if backward { format!("{} ", measured.record.entry) } else { String::new() };
                        println!("| {} | {entry}D{head_dim} {name} | {} |", kernels.name(), row(measured));
                    }
                }
            }
        }
    }
    println!(
        "\n| kernels | case | threads | device read / k and v | simd reductions per key and head | MMA / needed \
         | exp / score | fp / score | conversions / score |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for kernels in kernels.into_iter().filter(|kernels| *kernels != Kernels::Wgsl(Tier::CoopMatrix)) {
        for head_dim in [64, 128] {
            let case = Case::decode(kernels, DType::F16, 4096, head_dim);
            println!("| {} | D{head_dim} | {} |", kernels.name(), decode_row(&case, &case.measure()?));
        }
    }
    Ok(())
}

/// The columns of a row of decoding after its name: both passes together.
fn decode_row(case: &Case, passes: &[Measurement]) -> String {
    let sum = |of: fn(&Measurement) -> u64| passes.iter().map(of).sum::<u64>() as f64;
    let scores = sum(|pass| pass.kept);
    [
        passes[0].record.threads.to_string(),
        format!("{:.3}", sum(Measurement::device_read) / case.kv_bytes() as f64),
        format!("{:.4}", sum(|pass| pass.record.counters.reductions) / scores),
        format!("{:.2}", sum(|pass| pass.record.counters.mma) / sum(|pass| pass.mma_minimum)),
        format!("{:.3}", sum(|pass| pass.record.counters.transcendentals) / scores),
        format!("{:.2}", sum(|pass| pass.record.counters.fp) / scores),
        format!("{:.2}", sum(|pass| pass.record.counters.conversions) / scores),
    ]
    .join(" | ")
}

/// The columns of a row after its name.
fn row(measured: &Measurement) -> String {
    let c = &measured.record.counters;
    let needed = measured.mma_minimum as f64;
    let mma = if c.mma > 0 { c.mma as f64 } else { needed };
    // Scores that the mask needs, as in the notes on other kernels.
    let scores = measured.kept as f64;
    [
        measured.record.threads.to_string(),
        measured.record.threadgroup_memory.to_string(),
        format!("{:.3}", c.mma as f64 / needed),
        format!("{:.3}", measured.device_read() as f64 / measured.device_read_minimum as f64),
        format!("{:.0}, {:.0}", c.threadgroup_read as f64 / mma, c.threadgroup_write as f64 / mma),
        format!("{:.2}", c.barriers as f64 / measured.kv_tiles as f64),
        format!("{:.3}", c.transcendentals as f64 / scores),
        format!("{:.2}", c.fp as f64 / scores),
        format!("{:.2}", c.conversions as f64 / scores),
        format!("{:.3}", measured.model_utilisation()),
    ]
    .join(" | ")
}

fn report(kernel: &str, case: &Case, mask: &str, measurement: &Measurement) -> Json {
    let c = &measurement.record.counters;
    json!({
        "kernel": kernel,
        "entry": measurement.record.entry,
        "loader": case.kernels.name(),
        "dtype": case.dtype.name(),
        "head_dim": case.head_dim,
        "q_len": case.q_len,
        "kv_len": case.kv_len,
        "mask": mask,
        "threads": measurement.record.threads,
        "threadgroup_memory": measurement.record.threadgroup_memory,
        "mma": c.mma,
        "mma_minimum": measurement.mma_minimum,
        "device_read_bytes": measurement.device_read(),
        "device_read_minimum": measurement.device_read_minimum,
        "device_unique_bytes": c.device_unique,
        "device_write_bytes": c.device_write,
        "threadgroup_read_bytes": c.threadgroup_read,
        "threadgroup_write_bytes": c.threadgroup_write,
        "barriers": c.barriers,
        "kv_tiles": measurement.kv_tiles,
        "shuffles": c.shuffles,
        "reductions": c.reductions,
        "transcendentals": c.transcendentals,
        "fp": c.fp,
        "conversions": c.conversions,
        "mask_calls": c.mask_calls,
        "score_calls": c.score_calls,
        "model_utilisation": (1e4 * measurement.model_utilisation()).round() / 1e4,
    })
}
