//! The suite `compile`: what the first call of a new mask or score mod costs, part by part.

use crate::baseline::wait;
use crate::measure::{Sizes, median};
use crate::{Bound, Check, Failure, Found, Row};
use flexattn::kernels::Language;
use flexattn::{Attention, DType, Gpu, MaskMod, ScoreMod, masks, scores, wgpu};
use std::time::Instant;

/// Sizes at which the work itself is small beside the compilation.
const SIZES: Sizes = Sizes { q_heads: 4, kv_heads: 4, q_len: 128, kv_len: 128, head_dim: 64 };

fn milliseconds<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<(T, f64), Failure> {
    let start = Instant::now();
    let value = work()?;
    Ok((value, start.elapsed().as_secs_f64() * 1e3))
}

/// What is timed, in this order.
const PARTS: [&str; 9] = [
    TEXT,
    "module, cold",
    "module, warm",
    "pipeline, cold",
    "pipeline, warm",
    SUBMITTED,
    "driver, after that",
    "first call, done",
    "later call, submitted",
];
const TEXT: &str = "text";
const SUBMITTED: &str = "first call, submitted";

/// Each part is a case of its own. `text` is from expression to text. A module and a pipeline are made from it
/// cold, and warm: of the same text once more. A first call is timed until it is submitted, and to its end; what
/// it waits for longer than a later call does, once it is submitted, is the driver's own compilation.
pub(crate) fn run(gpu: &Gpu, rounds: Option<usize>) -> Result<Found, Failure> {
    let mut found = Found::default();
    let (Some(device), rounds) = (gpu.device(), rounds.unwrap_or(5)) else { return Ok(found) };
    let data = SIZES.data();
    let tensor = |values: &[f32]| gpu.tensor(values, [1, SIZES.q_heads, SIZES.q_len, SIZES.head_dim]);
    let (q, k, v) = (tensor(&data[0])?, tensor(&data[1])?, tensor(&data[2])?);
    let out = gpu.zeros(DType::F32, q.shape())?;
    for (name, make) in cases() {
        let mut parts: [Vec<f64>; PARTS.len()] = Default::default();
        for round in 0..rounds {
            // Different constants are a new expression, a new text, a new pipeline, for the driver too.
            let attention = make(3 + round as i32)?;
            let plan = attention.plan(gpu, [&q, &k, &v, &out])?;
            let spec = &plan.passes.first().ok_or("the plan has no pass")?.spec;
            let (text, text_ms) = milliseconds(|| Ok(spec.text(Language::Wgsl)?))?;
            let make_module = || {
                let source = wgpu::ShaderSource::Wgsl(text.as_str().into());
                let descriptor = wgpu::ShaderModuleDescriptor { label: Some(name), source };
                milliseconds(|| Ok(device.create_shader_module(descriptor)))
            };
            let make_pipeline = |module: &wgpu::ShaderModule| {
                let descriptor = wgpu::ComputePipelineDescriptor {
                    label: Some(name),
                    layout: None,
                    module,
                    entry_point: Some(spec.entry()),
                    compilation_options: wgpu::PipelineCompilationOptions::default(),
                    cache: None,
                };
                milliseconds(|| Ok(device.create_compute_pipeline(&descriptor)))
            };
            let (cold, module_ms) = make_module()?;
            let (_cold_pipeline, pipeline_ms) = make_pipeline(&cold)?;
            let (warm, module_warm_ms) = make_module()?;
            let (_warm_pipeline, pipeline_warm_ms) = make_pipeline(&warm)?;
            wait(device)?;
            let attention = make(1003 + round as i32)?;
            let call = || -> Result<[f64; 2], Failure> {
                let start = Instant::now();
                let (_, submitted) = milliseconds(|| Ok(attention.forward_into(gpu, &q, &k, &v, &out)?))?;
                wait(device)?;
                Ok([submitted, start.elapsed().as_secs_f64() * 1e3])
            };
            let ([first_ms, end_ms], [later_ms, later_end_ms]) = (call()?, call()?);
            let driver_ms = (end_ms - first_ms) - (later_end_ms - later_ms);
            let times = [
                text_ms,
                module_ms,
                module_warm_ms,
                pipeline_ms,
                pipeline_warm_ms,
                first_ms,
                driver_ms,
                end_ms,
                later_ms,
            ];
            for (part, ms) in parts.iter_mut().zip(times) {
                part.push(ms);
            }
        }
        for (part, times) in PARTS.into_iter().zip(parts) {
            let ms = median(times);
            let row = SIZES.row("compile", &format!("{name}: {part}"), gpu, DType::F32, 1.0);
            let us = (part == TEXT).then_some(ms * 1e3);
            found.rows.push(Row { ms, us, bytes: 0, ..row });
            if part == SUBMITTED {
                let what =
                    format!("{name}, first call without the driver's compilation, ms ({})", gpu.tier());
                found.checks.push(Check { what, value: ms, bound: Bound::AtMost(150.0) });
            }
        }
    }
    Ok(found)
}

/// A name, and the attention that has `n` in its expressions.
type Case = (&'static str, fn(i32) -> Result<Attention, Failure>);

fn cases() -> [Case; 3] {
    [
        ("window", |n| Ok(Attention::new().mask_mod(masks::sliding_window(n)))),
        ("causal window + alibi", |n| {
            let mask = masks::causal() & masks::sliding_window(n);
            Ok(Attention::new().mask_mod(mask).score_mod(scores::alibi(SIZES.q_heads)))
        }),
        ("text with branches", |n| {
            let mask = MaskMod::from_wgsl(
                &format!("if (q < {n}) {{ return true; }}\nreturn floor_mod(q - kv, {n}) < 2;"),
                &[],
                &[],
            )?;
            let score = ScoreMod::from_wgsl(&format!("{n}.0 * tanh(score / {n}.0)"), &[], &[])?;
            Ok(Attention::new().mask_mod(mask).score_mod(score))
        }),
    ]
}
