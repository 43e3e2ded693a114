//! The wgpu runtime: what is compiled, what is kept, what happens to bad input and lost devices.
//!
//! These tests run on any adapter, software ones included; without one they say so and stop.

use flexattn::expr::{self, Bool, CaptureType, Captured, I32};
use flexattn::{
    Attention, BlockMask, Capture, DType, Error, Gpu, KvBlocks, Layout, MaskMod, Scalar, ScoreMod, Tensor,
    Tier,
};

/// The machine's best wgpu tier. Tests of wgpu itself mean nothing on the Cpu tier.
fn gpu() -> Option<Gpu> {
    let gpu = Gpu::new().unwrap();
    if gpu.device().is_none() {
        eprintln!("skipped: {}", gpu.report());
        return None;
    }
    Some(gpu)
}

/// Values in (-1, 1) that look random and are exact in f16.
fn values(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 16) as i32 % 1024 - 512) as f32 / 512.0
    };
    (0..count).map(next).collect()
}

fn tensor(gpu: &Gpu, seed: u32, shape: [usize; 4]) -> Tensor {
    gpu.tensor(&values(seed, shape.iter().product()), shape).unwrap()
}

/// Attention from its definition in f64, for `keep` and `score` over (h, q, kv); all inputs row-major.
fn naive(
    [q, k, v]: [&[f32]; 3],
    [batch, q_heads, kv_heads]: [usize; 3],
    [q_len, kv_len]: [usize; 2],
    [e, ev]: [usize; 2],
    scale: f64,
    keep: impl Fn(usize, i32, i32) -> bool,
    score: impl Fn(f64, usize, i32, i32) -> f64,
) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for b in 0..batch {
        for h in 0..q_heads {
            let kv_head = b * kv_heads + h / (q_heads / kv_heads);
            for row in 0..q_len {
                let mut scores = Vec::new();
                for col in 0..kv_len {
                    if !keep(h, row as i32, col as i32) {
                        continue;
                    }
                    let q_at = ((b * q_heads + h) * q_len + row) * e;
                    let k_at = (kv_head * kv_len + col) * e;
                    let dot: f64 = (0..e).map(|d| f64::from(q[q_at + d]) * f64::from(k[k_at + d])).sum();
                    scores.push((col, score(dot * scale, h, row as i32, col as i32)));
                }
                let max = scores.iter().map(|&(_, s)| s).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|&(_, s)| (s - max).exp()).sum();
                lse.push(if scores.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
                for d in 0..ev {
                    let weighted = |&(col, s): &(usize, f64)| {
                        (s - max).exp() / sum * f64::from(v[(kv_head * kv_len + col) * ev + d])
                    };
                    out.push(scores.iter().map(weighted).sum());
                }
            }
        }
    }
    (out, lse)
}

fn all(_h: usize, _q: i32, _kv: i32) -> bool {
    true
}

fn below(_h: usize, q: i32, kv: i32) -> bool {
    q >= kv
}

fn same(score: f64, _h: usize, _q: i32, _kv: i32) -> f64 {
    score
}

fn close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let same = f64::from(a) == e || (f64::from(a) - e).abs() <= tolerance;
        assert!(same, "element {i} is {a} but should be {e}");
    }
}

fn causal() -> MaskMod {
    MaskMod::new(|i| i.q().ge(i.kv()))
}

#[test]
fn forward_equals_the_definition_with_mask_score_and_grouped_heads() {
    let Some(gpu) = gpu() else { return };
    let [q, k, v] = [(1, 4, 70, 24), (2, 2, 70, 24), (3, 2, 70, 40)]
        .map(|(seed, heads, len, dim)| values(seed, 2 * heads * len * dim));
    let slopes = [0.5f32, 0.25, 0.125, 0.0625];
    let slope = Capture::f32("slope", &slopes, &[4]).unwrap();
    let attention = Attention::new()
        .mask_mod(causal())
        .score_mod(ScoreMod::new(|s| s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32()))
        .with_max(true);
    let output = attention
        .forward(
            &gpu,
            &gpu.tensor(&q, [2, 4, 70, 24]).unwrap(),
            &gpu.tensor(&k, [2, 2, 70, 24]).unwrap(),
            &gpu.tensor(&v, [2, 2, 70, 40]).unwrap(),
        )
        .unwrap();
    let (out, lse) =
        naive([&q, &k, &v], [2, 4, 2], [70, 70], [24, 40], 1.0 / 24f64.sqrt(), below, |s, h, q, kv| {
            s + f64::from(slopes[h]) * f64::from(kv - q)
        });
    close(&output.out.read().unwrap(), &out, 2e-6);
    close(&output.lse.unwrap().read().unwrap(), &lse, 1e-5);
    assert_eq!(output.max.unwrap().shape(), [2, 4, 70, 1]);
}

fn tiers() -> Vec<Gpu> {
    crate::tiers::here(&[Tier::Cpu, Tier::Portable, Tier::Subgroup, Tier::CoopMatrix])
}

#[test]
fn values_of_any_width_are_attended_to_on_every_tier() {
    for gpu in tiers() {
        // 700 keys of one query take the kernels of decoding.
        for [q_len, kv_len, e, ev] in [[40, 70, 576, 512], [40, 37, 16, 1030], [1, 700, 8, 1028]] {
            let [q, k, v] = [(1, 2, q_len, e), (2, 1, kv_len, e), (3, 1, kv_len, ev)]
                .map(|(seed, heads, len, dim)| values(seed, heads * len * dim));
            let tensors = [([1, 2, q_len, e], &q), ([1, 1, kv_len, e], &k), ([1, 1, kv_len, ev], &v)]
                .map(|(shape, data)| gpu.tensor(data, shape).unwrap());
            let attention = Attention::new().mask_mod(MaskMod::new(|i| i.kv().le(i.q() + 3)));
            let output =
                attention.with_max(true).forward(&gpu, &tensors[0], &tensors[1], &tensors[2]).unwrap();
            let near = |_: usize, q: i32, kv: i32| kv <= q + 3;
            let scale = 1.0 / (e as f64).sqrt();
            let (out, lse) = naive([&q, &k, &v], [1, 2, 1], [q_len, kv_len], [e, ev], scale, near, same);
            println!("{} {q_len} x {kv_len}, {e} and {ev}", gpu.tier());
            close(&output.out.read().unwrap(), &out, 5e-6);
            close(&output.lse.unwrap().read().unwrap(), &lse, 1e-5);
        }
        // The second slice of columns would read what the first has written.
        let [q, k] = [1, 2].map(|seed| tensor(&gpu, seed, [1, 1, 3, 516]));
        let error = Attention::new().forward_into(&gpu, &q, &k, &k, &q).map(|_| ()).unwrap_err();
        assert!(error.is_buffer() && error.to_string().contains("up to 512 columns"), "{error}");
    }
}

#[test]
fn a_row_of_nothing_but_very_low_scores_is_the_plain_mean() {
    for gpu in tiers() {
        let [q, k, v] = [1, 2, 3].map(|seed| tensor(&gpu, seed, [1, 1, 40, 16]));
        let low = ScoreMod::new(|s| s.q().lt(20).select(expr::F32::from(-1e30f32), s.score()));
        let attention = Attention::new().score_mod(low).with_lse(false).with_max(true);
        let output = attention.forward(&gpu, &q, &k, &v).unwrap();
        assert!(output.lse.is_none());
        let (out, max) = (output.out.read().unwrap(), output.max.unwrap().read().unwrap());
        let v = v.read().unwrap();
        let mean: Vec<f64> =
            (0..16).map(|d| (0..40).map(|row| f64::from(v[row * 16 + d])).sum::<f64>() / 40.0).collect();
        for row in 0..20 {
            close(&out[row * 16..][..16], &mean, 1e-6);
        }
        assert!(max[..20].iter().all(|&max| (max / -1e30 - 1.0).abs() < 1e-6), "{} {max:?}", gpu.tier());
        assert!(max[20..].iter().all(|&max| max.abs() < 100.0), "{} {max:?}", gpu.tier());
    }
}

#[test]
fn nothing_is_compiled_when_only_values_and_sizes_change() {
    let Some(gpu) = gpu() else { return };
    let window = Scalar::i32("window", 8).unwrap();
    let slope = Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    let attention = Attention::new()
        .mask_mod(MaskMod::new(|i| i.q().ge(i.kv()) & (i.q() - i.kv()).lt(window.get())))
        .score_mod(ScoreMod::new(|s| s.score() * slope.at([s.head()])));
    let run = |attention: &Attention, batch: usize, q_len: usize, kv_len: usize| {
        let q = tensor(&gpu, 1, [batch, 2, q_len, 16]);
        let kv = tensor(&gpu, 2, [batch, 1, kv_len, 16]);
        attention.forward(&gpu, &q, &kv, &kv).unwrap().out.read().unwrap()
    };
    let first = run(&attention, 1, 20, 40);
    let built = gpu.pipelines_built();
    assert!(built > 0);

    run(&attention, 3, 130, 300);
    run(&attention, 1, 1, 1);
    let scaled = run(&attention.clone().scale(3.0), 1, 20, 40);
    let shifted = run(&attention.clone().q_offset(20), 1, 20, 40);
    let shorter = run(&attention.clone().kv_len(5), 1, 20, 40);
    let other = Capture::f32("slope", &[-0.5, 2.0], &[2]).unwrap();
    let sloped = run(&attention.clone().with_capture(other).unwrap(), 1, 20, 40);
    let wider = run(&attention.clone().with_scalar(Scalar::i32("window", 2).unwrap()).unwrap(), 1, 20, 40);
    for changed in [&scaled, &shifted, &shorter, &sloped, &wider] {
        assert_ne!(*changed, first);
    }
    // Strides: heads and rows swapped in memory.
    let q = tensor(&gpu, 1, [1, 20, 2, 16]).view(Layout::blhd([1, 2, 20, 16]).unwrap()).unwrap();
    let kv = tensor(&gpu, 2, [1, 1, 40, 16]);
    attention.forward(&gpu, &q, &kv, &kv).unwrap();
    assert_eq!(gpu.pipelines_built(), built);

    // The one exception: tensors whose rows do not begin at multiples of four elements.
    let pool = tensor(&gpu, 1, [1, 1, 1, 41 * 16 + 1]);
    let odd = pool.view(Layout::new([1, 2, 20, 16], [20 * 16, 20 * 16, 16, 1], 1).unwrap()).unwrap();
    attention.forward(&gpu, &odd, &kv, &kv).unwrap();
    attention.forward(&gpu, &odd.rows(3, 7).unwrap(), &kv, &kv).unwrap();
    assert_eq!(gpu.pipelines_built(), built + 1);
}

#[test]
fn decoding_compiles_a_kernel_for_each_power_of_two_of_packed_rows_and_no_more() {
    let Some(gpu) = gpu() else { return };
    let attention = Attention::new().mask_mod(causal());
    let run = |q_len: usize, kv_len: usize| {
        let q = tensor(&gpu, 1, [1, 1, q_len, 16]);
        let kv = tensor(&gpu, 2, [1, 1, kv_len, 16]);
        attention.clone().q_offset((kv_len - q_len) as i32).forward(&gpu, &q, &kv, &kv).unwrap();
        gpu.pipelines_built()
    };
    for q_len in [1, 2, 4, 8, 16, 32] {
        run(q_len, 1024);
    }
    let built = gpu.pipelines_built();
    for q_len in 1..=32 {
        for kv_len in [1024, 1500, 2048] {
            assert_eq!(run(q_len, kv_len), built, "{q_len} queries, {kv_len} keys");
        }
    }
    assert!(built <= 8, "{built} kernels");
}

#[test]
fn two_scales_in_one_encoder_give_two_answers() {
    let Some(gpu) = gpu() else { return };
    let (device, queue) = (gpu.device().unwrap(), gpu.queue().unwrap());
    let q = tensor(&gpu, 1, [1, 2, 40, 16]);
    let kv = tensor(&gpu, 2, [1, 2, 40, 16]);
    let mut encoder = device.create_command_encoder(&Default::default());
    let attention = Attention::new().mask_mod(causal());
    let scales = [0.25f32, 2.0];
    let recorded = scales.map(|scale| {
        let out = gpu.zeros(DType::F32, [1, 2, 40, 16]).unwrap();
        attention.clone().scale(scale).record(&gpu, &mut encoder, &q, &kv, &kv, &out).unwrap()
    });
    assert!(recorded[0].work > 0.0);
    queue.submit([encoder.finish()]);
    for (scale, recorded) in scales.into_iter().zip(recorded) {
        let alone = attention.clone().scale(scale).forward(&gpu, &q, &kv, &kv).unwrap();
        assert_eq!(recorded.output.out.read().unwrap(), alone.out.read().unwrap());
        let (q, kv) = (q.read().unwrap(), kv.read().unwrap());
        let (out, _) = naive([&q, &kv, &kv], [1, 2, 2], [40, 40], [16, 16], scale.into(), below, same);
        close(&alone.out.read().unwrap(), &out, 2e-6);
    }
}

#[test]
fn a_hundred_thousand_decode_steps_keep_the_caches_small() {
    let gpu = Gpu::builder().tier(Tier::Cpu).build().unwrap();
    const STEPS: usize = 100_000;
    let q = Tensor::zeros(&gpu, DType::F32, [1, 1, 1, 4]).unwrap();
    let kv = Tensor::zeros(&gpu, DType::F32, [1, 1, STEPS, 4]).unwrap();
    let out = Tensor::zeros(&gpu, DType::F32, [1, 1, 1, 4]).unwrap();
    let attention =
        Attention::new().with_lse(false).mask_mod(causal() & MaskMod::new(|i| (i.q() - i.kv()).lt(64)));
    for step in 0..STEPS {
        let step_attention = attention.clone().q_offset(step as i32).kv_len(step as u32 + 1);
        step_attention.forward_into(&gpu, &q, &kv, &kv, &out).unwrap();
    }
    let [kernels, lists, captures] = attention.held();
    assert!(kernels == 1 && lists <= 17 && captures == 0, "{:?}", attention.held());
}

#[test]
fn decode_steps_on_the_gpu_reuse_buffers_and_bind_groups() {
    let Some(gpu) = gpu() else { return };
    let kv = tensor(&gpu, 2, [1, 2, 512, 8]);
    let q = tensor(&gpu, 1, [1, 2, 1, 8]);
    let out = gpu.zeros(DType::F32, [1, 2, 1, 8]).unwrap();
    let attention = Attention::new().mask_mod(causal()).with_lse(false);
    let step = |step: usize| {
        let attention = attention.clone().q_offset(step as i32).kv_len(step as u32 + 1);
        attention.forward_into(&gpu, &q, &kv, &kv, &out).unwrap();
    };
    (0..100).for_each(step);
    let before = gpu.held();
    let built = gpu.pipelines_built();
    (100..512).for_each(step);
    let after = gpu.held();
    assert_eq!(gpu.pipelines_built(), built);
    assert!(after.constants <= 64 && after.bind_groups <= 256, "{after:?}");
    assert!(after.scratch_bytes <= 4 * before.scratch_bytes.max(1 << 16), "{before:?} {after:?}");
    let (q, kv) = (q.read().unwrap(), kv.read().unwrap());
    let (expected, _) = naive([&q, &kv, &kv], [1, 2, 2], [1, 512], [8, 8], 1.0 / 8f64.sqrt(), all, same);
    close(&out.read().unwrap(), &expected, 2e-6);
}

#[test]
fn few_queries_over_many_keys_are_cut_into_parts_and_combined() {
    let Some(gpu) = gpu() else { return };
    // (q heads, kv heads, q_len, kv_len, head_dim, v_dim)
    for (q_heads, kv_heads, q_len, kv_len, e, ev) in
        [(8, 2, 1, 1300, 32, 32), (2, 2, 3, 700, 24, 10), (6, 1, 5, 2100, 64, 128)]
    {
        let [q, k, v] = [(1, q_heads, q_len, e), (2, kv_heads, kv_len, e), (3, kv_heads, kv_len, ev)]
            .map(|(seed, heads, len, dim)| values(seed, 2 * heads * len * dim));
        let on = |data: &[f32], heads, len, dim| gpu.tensor(data, [2, heads, len, dim]).unwrap();
        let [q_on, k_on, v_on] =
            [on(&q, q_heads, q_len, e), on(&k, kv_heads, kv_len, e), on(&v, kv_heads, kv_len, ev)];
        let offset = (kv_len - q_len) as i32;
        let attention = Attention::new().q_offset(offset).with_max(true);
        let by_head = MaskMod::new(|i| (i.kv() % 3).ne(i.head() % 3));
        for (mask, keep) in [
            (causal(), (|_, q, kv| q >= kv) as fn(usize, i32, i32) -> bool),
            (causal() & by_head, |h, q, kv| q >= kv && kv % 3 != h as i32 % 3),
            (MaskMod::new(|i| i.kv().lt(130)), |_, _, kv| kv < 130),
            (MaskMod::new(|i| i.kv().lt(0)), |_, _, _| false),
        ] {
            let output = attention.clone().mask_mod(mask).forward(&gpu, &q_on, &k_on, &v_on).unwrap();
            let (out, lse) = naive(
                [&q, &k, &v],
                [2, q_heads, kv_heads],
                [q_len, kv_len],
                [e, ev],
                1.0 / (e as f64).sqrt(),
                |h, q, kv| keep(h, q + offset, kv),
                same,
            );
            close(&output.out.read().unwrap(), &out, 2e-6);
            close(&output.lse.unwrap().read().unwrap(), &lse, 1e-5);
            let max = output.max.unwrap().read().unwrap();
            assert!(max.iter().zip(&lse).all(|(&max, &lse)| f64::from(max) <= lse + 1e-5));
        }
        let plan = attention
            .plan(&gpu, [&q_on, &k_on, &v_on, &on(&vec![0.0; 2 * q_heads * q_len * ev], q_heads, q_len, ev)])
            .unwrap();
        assert_eq!(plan.passes.len(), 2, "a split and a combine");
    }
}

#[test]
fn decode_takes_half_precision_sinks_and_lengths_of_each_entry() {
    let Some(gpu) = gpu() else { return };
    let q: Vec<half::f16> = values(1, 2 * 4 * 16).into_iter().map(half::f16::from_f32).collect();
    let kv: Vec<half::f16> = values(2, 2 * 2 * 600 * 16).into_iter().map(half::f16::from_f32).collect();
    let q_on = gpu.tensor(&q, [2, 4, 1, 16]).unwrap();
    let kv_on = gpu.tensor(&kv, [2, 2, 600, 16]).unwrap();
    let attention = Attention::new().kv_len([600, 0]).sinks([0.5, -1.0, 2.0, 0.0]);
    let output = attention.forward(&gpu, &q_on, &kv_on, &kv_on).unwrap();
    let [q, kv] = [&q, &kv].map(|half| half.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
    let (mut out, mut lse) = naive([&q[..4 * 16], &kv, &kv], [1, 4, 2], [1, 600], [16, 16], 0.25, all, same);
    for (h, sink) in [0.5, -1.0, 2.0, 0.0].into_iter().enumerate() {
        out[h * 16..(h + 1) * 16].iter_mut().for_each(|x| *x /= 1.0 + f64::exp(sink - lse[h]));
    }
    out.extend([0.0; 4 * 16]);
    lse.extend([f64::NEG_INFINITY; 4]);
    close(&output.out.read().unwrap(), &out, 2e-4);
    close(&output.lse.unwrap().read().unwrap(), &lse, 1e-5);
}

#[test]
fn dropped_tensors_leave_the_bind_group_cache() {
    let Some(gpu) = gpu() else { return };
    let attention = Attention::new();
    for _ in 0..3 {
        let q = tensor(&gpu, 1, [1, 1, 8, 8]);
        attention.forward(&gpu, &q, &q, &q).unwrap().out.read().unwrap();
    }
    assert_eq!(gpu.held().bind_groups, 0);
    let q = tensor(&gpu, 1, [1, 1, 8, 8]);
    let output = attention.forward(&gpu, &q, &q, &q).unwrap();
    assert_eq!(gpu.held().bind_groups, 1);
    drop(output);
    assert_eq!(gpu.held().bind_groups, 0);
}

#[test]
fn q_k_v_and_out_in_one_pool_buffer() {
    let Some(gpu) = gpu() else { return };
    let rows = 33 * 16;
    let pool = tensor(&gpu, 5, [1, 1, 1, 8 * 1024]);
    let at = |slot: usize| {
        let layout = Layout::contiguous([1, 1, 33, 16]).unwrap().at(slot * 1024 + 64).unwrap();
        pool.view(layout).unwrap()
    };
    let [q, k, v, out] = [at(0), at(2), at(4), at(6)];
    let before = pool.read().unwrap();
    Attention::new().forward_into(&gpu, &q, &k, &v, &out).unwrap();
    let after = pool.read().unwrap();
    let slice = |slot: usize| &before[slot * 1024 + 64..slot * 1024 + 64 + rows];
    let (expected, _) = naive([slice(0), slice(2), slice(4)], [1, 1, 1], [33, 33], [16, 16], 0.25, all, same);
    let written = 6 * 1024 + 64..6 * 1024 + 64 + rows;
    close(&after[written.clone()], &expected, 2e-6);
    for (i, (a, b)) in after.iter().zip(&before).enumerate() {
        assert!(written.contains(&i) || a == b, "element {i} changed from {b} to {a}");
    }
}

#[test]
fn blhd_strides_read_and_write_in_place() {
    let Some(gpu) = gpu() else { return };
    let blhd = |seed, heads, len| {
        let memory = tensor(&gpu, seed, [2, len, heads, 20]);
        memory.view(Layout::blhd([2, heads, len, 20]).unwrap()).unwrap()
    };
    let [q, k, v, out] = [blhd(1, 4, 19), blhd(2, 2, 37), blhd(3, 2, 37), blhd(4, 4, 19)];
    Attention::new().forward_into(&gpu, &q, &k, &v, &out).unwrap();
    let [q, k, v] = [q, k, v].map(|tensor| tensor.read().unwrap());
    let (expected, _) = naive([&q, &k, &v], [2, 4, 2], [19, 37], [20, 20], 1.0 / 20f64.sqrt(), all, same);
    close(&out.read().unwrap(), &expected, 2e-6);
}

#[test]
fn tensors_past_the_binding_limit_are_bound_window_by_window() {
    let Some(whole) = gpu() else { return };
    // The same device, created with the smallest limit that this call could meet.
    let (adapter, device, queue) = device(|limits| limits.max_storage_buffer_binding_size = 64 << 10);
    let gpu = Gpu::from_wgpu(&adapter, device, queue).unwrap();
    let shapes = [[2, 4, 96, 64], [2, 2, 200, 64], [2, 2, 200, 64]];
    let run = |gpu: &Gpu| {
        let [q, k, v] = [1, 2, 3].map(|seed| tensor(gpu, seed, shapes[seed as usize - 1]));
        let mask = MaskMod::new(|i| ((i.q() + i.kv() + i.head() + i.batch()) % 3).ne(0));
        let output = Attention::new().mask_mod(mask).forward(gpu, &q, &k, &v).unwrap();
        (output.out.read().unwrap(), output.lse.unwrap().read().unwrap())
    };
    assert_eq!(run(&gpu), run(&whole));
}

/// A device of the program's own on the best adapter.
pub(crate) fn device(change: impl FnOnce(&mut wgpu::Limits)) -> (wgpu::Adapter, wgpu::Device, wgpu::Queue) {
    use flexattn::wgpu;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default())).unwrap();
    let mut limits = Gpu::wanted_limits(&adapter);
    change(&mut limits);
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: Gpu::wanted_features(&adapter),
        required_limits: limits,
        ..Default::default()
    }))
    .unwrap();
    (adapter, device, queue)
}

use flexattn::wgpu;

#[test]
fn an_adopted_device_shares_its_buffers() {
    if gpu().is_none() {
        return;
    }
    let (adapter, device, queue) = device(|_| ());
    let gpu = Gpu::from_wgpu(&adapter, device.clone(), queue.clone()).unwrap();
    let data = values(1, 16 * 8);
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16 * 8 * 4,
        usage,
        mapped_at_creation: false,
    });
    queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&data));
    let own = Tensor::from_buffer(&gpu, &buffer, DType::F32, 0, [1, 1, 16, 8], [128, 128, 8, 1]).unwrap();
    let out = Attention::new().forward(&gpu, &own, &own, &own).unwrap().out;
    let (expected, _) =
        naive([&data, &data, &data], [1, 1, 1], [16, 16], [8, 8], 1.0 / 8f64.sqrt(), all, same);
    close(&out.read().unwrap(), &expected, 2e-6);

    let error =
        Tensor::from_buffer(&gpu, &buffer, DType::F32, 1, [1, 1, 16, 8], [128, 128, 8, 1]).unwrap_err();
    assert!(error.is_buffer(), "{error}");
    let unreadable = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16 * 8 * 4,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let tensor =
        Tensor::from_buffer(&gpu, &unreadable, DType::F32, 0, [1, 1, 16, 8], [128, 128, 8, 1]).unwrap();
    let error = tensor.read().unwrap_err();
    assert!(error.is_buffer(), "{error}");
}

#[test]
fn a_captured_tensor_on_the_device_is_read_in_place() {
    let Some(gpu) = gpu() else { return };
    let (device, queue) = (gpu.device().unwrap(), gpu.queue().unwrap());
    let keep: Vec<i32> = (0..5 + 150).map(|i| i32::from(i % 3 == 0)).collect();
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4 * keep.len() as u64,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&keep));
    let q = tensor(&gpu, 1, [1, 2, 150, 16]);
    let on_host = Captured::<I32>::new(Capture::i32("keep", &keep[5..], &[150]).unwrap().into()).unwrap();
    let on_device =
        Captured::<I32>::new(gpu.capture("keep", CaptureType::I32, &buffer, 5, &[150]).unwrap()).unwrap();
    let [host, device] = [on_host, on_device].map(|keep| {
        let mask = causal() & MaskMod::new(|i| keep.at([i.kv()]).ne(0));
        let attention = Attention::new().mask_mod(mask);
        attention.forward(&gpu, &q, &q, &q).unwrap().out.read().unwrap()
    });
    assert_eq!(host, device);
    let error = gpu.capture("keep", CaptureType::I32, &buffer, 6, &[150]).unwrap_err();
    assert!(error.is_buffer(), "{error}");
}

#[test]
fn a_lost_device_gives_errors_and_never_panics() {
    if gpu().is_none() {
        return;
    }
    let (adapter, device, queue) = device(|_| ());
    let gpu = Gpu::from_wgpu(&adapter, device.clone(), queue).unwrap();
    let q = tensor(&gpu, 1, [1, 1, 8, 8]);
    let attention = Attention::new();
    attention.forward(&gpu, &q, &q, &q).unwrap();
    assert!(!gpu.is_lost());
    device.destroy();
    for _ in 0..3 {
        let error = attention.forward(&gpu, &q, &q, &q).unwrap_err();
        assert!(error.is_device_lost(), "{error}");
        assert!(q.read().unwrap_err().is_device_lost());
        assert!(gpu.tensor(&[0.0f32; 4], [1, 1, 1, 4]).unwrap_err().is_device_lost());
    }
    assert!(gpu.is_lost());
}

#[test]
fn zero_lengths_are_answers_not_errors() {
    let Some(gpu) = gpu() else { return };
    let some = tensor(&gpu, 1, [2, 2, 5, 8]);
    let none = gpu.zeros(DType::F32, [2, 2, 0, 8]).unwrap();
    let attention = Attention::new().mask_mod(causal()).with_max(true);

    let no_rows = attention.forward(&gpu, &none, &some, &some).unwrap();
    assert_eq!(no_rows.out.shape(), [2, 2, 0, 8]);
    assert!(no_rows.out.read().unwrap().is_empty() && no_rows.lse.unwrap().read().unwrap().is_empty());

    for no_keys in [
        attention.forward(&gpu, &some, &none, &none).unwrap(),
        attention.clone().kv_len(0).forward(&gpu, &some, &some, &some).unwrap(),
    ] {
        assert_eq!(no_keys.out.read().unwrap(), vec![0.0; 2 * 2 * 5 * 8]);
        assert_eq!(no_keys.lse.unwrap().read().unwrap(), vec![f32::NEG_INFINITY; 2 * 2 * 5]);
        assert_eq!(no_keys.max.unwrap().read().unwrap(), vec![f32::NEG_INFINITY; 2 * 2 * 5]);
    }
}

#[test]
fn bad_input_is_refused_with_what_to_do() {
    let Some(gpu) = gpu() else { return };
    let q = tensor(&gpu, 1, [1, 8, 4, 16]);
    let k = tensor(&gpu, 2, [1, 3, 4, 16]);
    let half = gpu.tensor(&[half::f16::ZERO; 8 * 4 * 16], [1, 8, 4, 16]).unwrap();
    let attention = Attention::new();
    let forward =
        |attention: &Attention, k: &Tensor| attention.forward(&gpu, &q, k, k).map(|_| ()).unwrap_err();

    let error = forward(&attention, &k);
    assert!(
        error.is_shape() && error.to_string().contains("kv_heads is 3 but must divide q_heads = 8"),
        "{error}"
    );
    assert!(forward(&attention, &half).is_dtype());
    assert!(forward(&attention.clone().scale(f32::NAN), &q).is_shape());
    assert!(forward(&attention.clone().kv_len(5), &q).is_shape());
    assert!(forward(&attention.clone().kv_len([1, 2]), &q).is_shape());
    assert!(forward(&attention.clone().q_offset(i32::MAX), &q).is_overflow());
    assert!(forward(&attention.clone().sinks([0.0; 3]), &q).is_shape());
    let unknown = Capture::f32("nobody", &[1.0], &[1]).unwrap();
    assert!(matches!(attention.clone().with_capture(unknown), Err(Error::Capture { .. })));

    let overlapping = q.view(Layout::new([1, 8, 4, 16], [512, 64, 0, 1], 0).unwrap()).unwrap();
    assert!(attention.forward_into(&gpu, &q, &q, &q, &overlapping).unwrap_err().is_shape());

    let other = Gpu::builder().tier(Tier::Cpu).build().unwrap();
    let foreign = tensor(&other, 1, [1, 8, 4, 16]);
    assert!(forward(&attention, &foreign).is_buffer());
}

#[test]
fn an_adapter_or_tier_that_is_not_there_is_refused_by_name() {
    let error = Gpu::builder().adapter("no such adapter").build().unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("no such adapter"), "{error}");
    if !cfg!(target_vendor = "apple") {
        let error = Gpu::builder().tier(Tier::Metal).build().unwrap_err();
        assert!(error.is_unsupported(), "{error}");
    }
}

#[test]
fn the_report_says_why_each_better_tier_was_not_taken() {
    let gpu = Gpu::new().unwrap();
    let report = gpu.report();
    assert_eq!(report.rungs.iter().map(|rung| rung.tier).collect::<Vec<_>>(), Tier::ALL);
    for rung in report.rungs.iter().take_while(|rung| rung.tier != report.tier) {
        assert!(!rung.usable && !rung.reason.is_empty());
        assert!(report.to_string().contains(&rung.reason));
    }
}

#[test]
fn gpu_time_is_measured_where_the_adapter_can() {
    let Some(gpu) = gpu() else { return };
    let q = tensor(&gpu, 1, [1, 2, 128, 32]);
    let attention = Attention::new();
    let (_, time) = gpu.timed(|| attention.forward(&gpu, &q, &q, &q)).unwrap();
    let offered = gpu.device().unwrap().features().contains(wgpu::Features::TIMESTAMP_QUERY);
    assert_eq!(time.is_some(), offered);
    if let Some(time) = time {
        assert!(!time.is_zero() && time.as_secs() < 60, "{time:?}");
    }
}

#[test]
fn sdpa_adds_a_bias_that_broadcasts() {
    let Some(gpu) = gpu() else { return };
    let [q, k, v] = [1, 2, 3].map(|seed| values(seed, 2 * 2 * 9 * 8));
    let bias = values(4, 2 * 9 * 9);
    let shape = [2, 2, 9, 8];
    let [q_on, k_on, v_on] = [&q, &k, &v].map(|data| gpu.tensor(data, shape).unwrap());
    let sdpa = |bias: (&[f32], [usize; 4])| flexattn::sdpa(&gpu, &q_on, &k_on, &v_on, None, Some(bias), true);
    // As many heads as batch entries: the shape says which of them have a bias each.
    let each = 2 * 9 * 8;
    for of_heads in [true, false] {
        let sizes = if of_heads { [1, 2, 9, 9] } else { [2, 1, 9, 9] };
        let out = sdpa((&bias, sizes)).unwrap().read().unwrap();
        for b in 0..2 {
            let own = [&q, &k, &v].map(|data| &data[b * each..(b + 1) * each]);
            let (expected, _) =
                naive(own, [1, 2, 2], [9, 9], [8, 8], 1.0 / 8f64.sqrt(), below, |s, h, q, kv| {
                    let table = if of_heads { h } else { b };
                    s + f64::from(bias[(table * 9 + q as usize) * 9 + kv as usize])
                });
            close(&out[b * each..(b + 1) * each], &expected, 2e-6);
        }
    }
    for wrong in [(&bias[1..], [1, 2, 9, 9]), (&bias[..], [2, 1, 81, 1])] {
        assert!(matches!(sdpa(wrong), Err(Error::Capture { .. })), "{:?}", wrong.1);
    }
}

#[test]
fn weights_of_a_row_sum_to_one_and_are_the_softmax() {
    let Some(gpu) = gpu() else { return };
    let q = tensor(&gpu, 1, [1, 2, 6, 8]);
    let k = tensor(&gpu, 2, [1, 1, 6, 8]);
    let attention = Attention::new().mask_mod(causal());
    let output = attention.forward(&gpu, &q, &k, &k).unwrap();
    let weights = attention.weights(&q, &k, &output, &[0, 3]).unwrap();
    assert_eq!(weights.len(), 2 * 2 * 6);
    for row in weights.chunks(6) {
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{row:?}");
    }
    assert_eq!(weights[1..6], [0.0; 5]);
    assert!(attention.weights(&q, &k, &output, &[6]).unwrap_err().is_shape());
}

#[test]
fn weights_of_a_row_are_zero_where_the_block_lists_leave_out_what_the_mask_keeps() {
    let Some(gpu) = gpu() else { return };
    let [q, k] = [1, 2].map(|seed| tensor(&gpu, seed, [1, 1, 300, 8]));
    let lists = KvBlocks {
        shape: [1, 1, 3],
        num_blocks: &[1, 1, 1],
        indices: &[0, 1, 2],
        full_num_blocks: &[0, 0, 1],
        full_indices: &[0, 0, 0],
    };
    let lists = BlockMask::from_kv_blocks(&lists, 300, 300, [128, 128], None).unwrap();
    for attention in [
        Attention::new().block_mask(lists.clone()),
        Attention::new().block_mask(lists.clone()).mask_mod(MaskMod::new(|_| Bool::from(true))),
    ] {
        let output = attention.forward(&gpu, &q, &k, &k).unwrap();
        let weights = attention.weights(&q, &k, &output, &[5, 200, 299]).unwrap();
        for (row, listed) in weights.chunks(300).zip([0..128, 128..256, 0..300]) {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            assert!(row.iter().enumerate().all(|(kv, &w)| w == 0.0 || listed.contains(&kv)));
        }
        assert!(weights[2 * 300 + 128..2 * 300 + 256].iter().all(|&w| w == 0.0));
    }
}

#[test]
fn the_output_may_take_the_place_of_q() {
    for tier in [Tier::Portable, Tier::Subgroup, Tier::Cpu] {
        let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
        for (rows, dim, dtype) in [(100, 64, DType::F32), (70, 24, DType::F16), (1, 64, DType::F32)] {
            let keys = if rows == 1 { 3000 } else { rows };
            let [q, k, v] = [(1, rows), (2, keys), (3, keys)].map(|(seed, rows)| {
                let (data, shape) = (values(seed, 2 * rows * dim), [1, 2, rows, dim]);
                match dtype {
                    DType::F16 => {
                        gpu.tensor(&data.into_iter().map(half::f16::from_f32).collect::<Vec<_>>(), shape)
                    }
                    _ => gpu.tensor(&data, shape),
                }
                .unwrap()
            });
            let attention = Attention::new().score_mod(ScoreMod::new(|s| s.score() * 2.0));
            let apart = attention.forward(&gpu, &q, &k, &v).unwrap().out.read().unwrap();
            attention.forward_into(&gpu, &q, &k, &v, &q).unwrap();
            assert_eq!(q.read().unwrap(), apart, "{tier} {rows} {dtype}");
        }
    }
}
