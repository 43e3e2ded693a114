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

/// Each part is a case of its own: from expression to text, the module and the pipeline made from it, the
/// first call until it is submitted, the same to its end (with the driver's own compilation), and a later
/// call until it is submitted.
pub(crate) fn run(gpu: &Gpu, rounds: Option<usize>) -> Result<Found, Failure> {
    let mut found = Found::default();
    let (Some(device), rounds) = (gpu.device(), rounds.unwrap_or(5)) else { return Ok(found) };
    let data = SIZES.data();
    let tensor = |values: &[f32]| gpu.tensor(values, [1, SIZES.q_heads, SIZES.q_len, SIZES.head_dim]);
    let (q, k, v) = (tensor(&data[0])?, tensor(&data[1])?, tensor(&data[2])?);
    let out = gpu.zeros(DType::F32, q.shape())?;
    for (name, make) in cases() {
        let mut parts: [Vec<f64>; 6] = Default::default();
        for round in 0..rounds {
            // Different constants are a new expression, a new text, a new pipeline, for the driver too.
            let attention = make(3 + round as i32)?;
            let plan = attention.plan(gpu, [&q, &k, &v, &out])?;
            let spec = &plan.passes.first().ok_or("the plan has no pass")?.spec;
            let (text, text_ms) = milliseconds(|| Ok(spec.text(Language::Wgsl)?))?;
            let source = wgpu::ShaderSource::Wgsl(text.into());
            let descriptor = wgpu::ShaderModuleDescriptor { label: Some(name), source };
            let (module, module_ms) = milliseconds(|| Ok(device.create_shader_module(descriptor)))?;
            let (_, pipeline_ms) = milliseconds(|| {
                Ok(device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                    label: Some(name),
                    layout: None,
                    module: &module,
                    entry_point: Some(spec.entry()),
                    compilation_options: wgpu::PipelineCompilationOptions::default(),
                    cache: None,
                }))
            })?;
            wait(device)?;
            let attention = make(1003 + round as i32)?;
            let call = || -> Result<(), Failure> {
                attention.forward_into(gpu, &q, &k, &v, &out)?;
                Ok(())
            };
            let start = Instant::now();
            let (_, first_ms) = milliseconds(call)?;
            wait(device)?;
            let end_ms = start.elapsed().as_secs_f64() * 1e3;
            let (_, later_ms) = milliseconds(call)?;
            wait(device)?;
            for (part, ms) in
                parts.iter_mut().zip([text_ms, module_ms, pipeline_ms, first_ms, end_ms, later_ms])
            {
                part.push(ms);
            }
        }
        let names = [
            "text",
            "module",
            "pipeline",
            "first call, submitted",
            "first call, done",
            "later call, submitted",
        ];
        for (part, times) in names.into_iter().zip(parts) {
            let ms = median(times);
            let row = SIZES.row("compile", &format!("{name}: {part}"), gpu, DType::F32, 1.0);
            found.rows.push(Row { ms, bytes: 0, ..row });
            if part == "first call, submitted" {
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
