//! Gradients at the edges: odd and empty shapes, other layouts, what is not finite, too large, or lost.

use std::rc::Rc;

use flexattn::expr::CaptureType;
use flexattn::{
    Attention, BlockMask, BlockShape, Capture, DType, Gpu, Layout, MaskMod, Profile, Saved, ScoreMod, Tensor,
    Tier, Wanted, masks,
};
use flexattn_testing::problem::{Inputs, Numbers, Sizes};

use super::case::Case;
use super::wanted::saved;
use super::{tiers, upload};
use crate::watched::Watched;

fn sizes(
    [batch, q_heads, kv_heads]: [usize; 3],
    [q_len, kv_len]: [usize; 2],
    [head_dim, v_dim]: [usize; 2],
) -> Sizes {
    Sizes { batch, kv_batch: batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_dim }
}

#[test]
fn any_shape_has_the_gradients_of_the_reference() {
    let shapes = [
        sizes([1, 1, 1], [1, 1], [1, 1]),
        sizes([2, 6, 2], [33, 65], [3, 5]),
        sizes([1, 2, 1], [129, 17], [24, 64]),
        sizes([1, 1, 1], [7, 140], [67, 4]),
        sizes([1, 2, 2], [40, 50], [128, 100]),
        sizes([1, 1, 1], [20, 30], [160, 160]),
        sizes([1, 1, 1], [9, 40], [257, 257]),
        Sizes { kv_batch: 1, ..sizes([3, 4, 2], [35, 40], [16, 32]) },
    ];
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    for gpu in tiers() {
        for (i, shape) in shapes.into_iter().enumerate() {
            // A GPU compiles kernels for each.
            if gpu.tier() != Tier::Cpu && i % 3 != 1 && i < 6 && !full {
                continue;
            }
            println!("{} {shape:?}", gpu.tier());
            Case { mask: Some(masks::sliding_window(40)), ..Case::new(shape) }.check(&gpu, &[], &[]);
        }
    }
}

#[test]
fn tiles_for_hardware_give_the_same_as_those_for_software() {
    // Software adapters have rows of their own in the table of tiles.
    for tier in [Tier::Portable, Tier::Subgroup] {
        let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
        let mut on = Watched::over(gpu);
        on.profile = Rc::new(Profile { software: false, ..(*on.profile).clone() });
        let case = |heads, lengths: [usize; 2], dims| Case {
            mask: (lengths[1] < 512).then(|| masks::sliding_window(40)),
            ..Case::new(sizes(heads, lengths, dims))
        };
        let square = case([1, 2, 1], [70, 100], [64, 64]);
        square.check_forward(&on);
        square.check(&on, &[], &[]);
        // Fewer rows to an invocation for wide heads; decode of as many rows as a tile has, and of more.
        for (lengths, dims) in
            [([20, 60], [200, 200]), ([10, 40], [300, 300]), ([1, 600], [64, 64]), ([2, 600], [300, 300])]
        {
            case([1, 2, 1], lengths, dims).check_forward(&on);
        }
        // The same for gradients.
        for (lengths, dims) in
            [([40, 70], [32, 20]), ([40, 45], [100, 128]), ([35, 40], [130, 40]), ([33, 35], [40, 300])]
        {
            case([1, 2, 1], lengths, dims).check(&on, &[], &[]);
        }
    }
}

#[test]
fn sinks_and_the_gradient_of_lse_count() {
    let shape = sizes([2, 4, 2], [45, 70], [16, 16]);
    let dlse: Vec<f32> = (0..2 * 4 * 45).map(|i| ((i * 37) % 19) as f32 / 19.0 - 0.5).collect();
    for gpu in tiers() {
        let case = Case {
            mask: Some(MaskMod::new(|i| i.q().ge(i.kv() + 5))),
            score: Some(ScoreMod::new(|s| (s.score() * 0.1).tanh() * 10.0)),
            dlse: dlse.clone(),
            sinks: vec![0.5, -1.0, 2.0, 0.0],
            ..Case::new(shape)
        };
        case.check(&gpu, &[], &[]);
        // Rows 0 to 4 keep nothing.
        let dq = case.run(&gpu, &Wanted::qkv()).unwrap().dq.unwrap().read().unwrap();
        for head in dq.chunks(45 * 16) {
            assert!(head[..5 * 16].iter().all(|&x| x == 0.0), "{}", gpu.tier());
            assert!(head[5 * 16..].iter().any(|&x| x != 0.0), "{}", gpu.tier());
        }
    }
}

#[test]
fn empty_tensors_have_empty_or_zero_gradients() {
    let slope = Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    for gpu in tiers() {
        for (q_len, kv_len, batch, kv_batch) in
            [(0, 5, 1, 1), (5, 0, 1, 1), (0, 0, 1, 1), (4, 4, 0, 0), (4, 5, 0, 1)]
        {
            let shape = Sizes { kv_batch, ..sizes([batch, 2, 2], [q_len, kv_len], [8, 8]) };
            let case = Case {
                score: Some(ScoreMod::new(|s| s.score() * slope.at([s.head()]))),
                mask: Some(masks::causal()),
                sinks: vec![0.0; 2],
                ..Case::new(shape)
            };
            let found = case.run(&gpu, &Wanted::qkv().sinks().capture("slope"));
            let found = found.unwrap_or_else(|e| panic!("{} {q_len} {kv_len} {batch}: {e}", gpu.tier()));
            let slope = found.capture("slope").unwrap().read().unwrap();
            assert_eq!(slope, [0.0; 2], "{} {q_len} {kv_len}", gpu.tier());
            assert_eq!(found.dsinks.unwrap().read().unwrap(), [0.0; 2]);
            let rows =
                [(found.dq, batch * q_len), (found.dk, kv_batch * kv_len), (found.dv, kv_batch * kv_len)];
            for (tensor, rows) in rows {
                assert_eq!(tensor.unwrap().read().unwrap(), vec![0.0; rows * 2 * 8]);
            }
        }
    }
}

#[test]
fn strides_and_offsets_of_every_input_may_be_any() {
    let shape = sizes([2, 2, 2], [37, 41], [12, 12]);
    let case = Case { mask: Some(masks::causal()), ..Case::new(shape) };
    for gpu in tiers() {
        let expected = case.run(&gpu, &Wanted::qkv()).unwrap();
        for (pad, offset) in [(4, 8), (3, 5)] {
            // [B, L, H, D] with gaps between rows, in a larger buffer.
            let moved = |values: &[f32], len: usize| {
                let row = 2 * 12 + pad;
                let layout = Layout::new([2, 2, len, 12], [len * row, 12, row, 1], offset).unwrap();
                let all = gpu.zeros(DType::F32, [1, 1, 1, offset + 2 * len * row + 8]).unwrap();
                let tensor = all.view(layout).unwrap();
                tensor.write(values).unwrap();
                tensor
            };
            let inputs = &case.inputs;
            let (q, k, v) = (moved(&inputs.q, 37), moved(&inputs.k, 41), moved(&inputs.v, 41));
            let dout = moved(&inputs.dout, 37);
            let out = moved(&vec![0.0; inputs.dout.len()], 37);
            let attention = case.attention();
            let output = attention.forward_into(&gpu, &q, &k, &v, &out).unwrap();
            let saved = Saved::new(&q, &k, &v, &output).unwrap();
            let found = attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv()).unwrap();
            for (got, expected) in
                [(&found.dq, &expected.dq), (&found.dk, &expected.dk), (&found.dv, &expected.dv)]
            {
                let [got, expected] = [got, expected].map(|t| t.as_ref().unwrap().read().unwrap());
                let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-5, "{} {pad} {offset}: {worst}", gpu.tier());
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let shape = sizes([1, 1, 1], [40, 40], [8, 8]);
    for gpu in tiers() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let mut case = Case { mask: Some(masks::causal()), ..Case::new(shape) };
            case.inputs.q[20 * 8..21 * 8].fill(value);
            let dq = case.run(&gpu, &Wanted::qkv()).unwrap().dq.unwrap().read().unwrap();
            let finite = dq.iter().enumerate().filter(|(i, _)| i / 8 != 20);
            assert!(finite.into_iter().all(|(_, x)| x.is_finite()), "{} {value}", gpu.tier());
        }
    }
}

/// A score mod that reads a tensor per head, per row, per column, per pair, and by distance.
fn every_pattern(heads: usize, [q_len, kv_len]: [usize; 2]) -> ScoreMod {
    let mut numbers = Numbers::new(5);
    let mut table = |name: &str, shape: &[usize]| {
        Capture::f32(name, &numbers.normals(shape.iter().product()), shape).unwrap()
    };
    let (head, row, column) = (table("head", &[heads]), table("row", &[q_len]), table("column", &[kv_len]));
    let distance = table("distance", &[16]);
    ScoreMod::new(|s| {
        let bias = row.at([s.q()]) + column.at([s.kv()]) + distance.at([(s.q() - s.kv()).abs().min(15)]);
        s.score() * head.at([s.head()]) + bias
    })
}

const PATTERNS: [&str; 4] = ["head", "row", "column", "distance"];

#[test]
fn tensors_past_the_binding_limit_have_the_same_gradients() {
    // One head of q, k, v and dout takes 19 KiB, q and dout of one kv head the double.
    let long = sizes([2, 2, 1], [300, 310], [16, 16]);
    for tier in [Tier::Portable, Tier::Subgroup] {
        let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
        let mut on = Watched::over(gpu);
        let mut profile = (*on.profile).clone();
        profile.limits.storage_binding = 18 << 10;
        on.profile = Rc::new(profile);
        let mask = masks::sliding_window(250) | MaskMod::new(|i| ((i.q() + i.kv() + i.head()) % 3).eq(0));
        let case = Case {
            mask: Some(mask),
            score: Some(every_pattern(2, [300, 310])),
            kv_len: vec![310, 290],
            sinks: vec![0.5, -1.0],
            dlse: (0..2 * 2 * 300).map(|i| ((i * 37) % 19) as f32 / 19.0 - 0.5).collect(),
            ..Case::new(long)
        };
        case.check(&on, &PATTERNS, &["distance"]);
        // Rows that do not begin at multiples of four elements, and one k and v for all.
        let shared = Sizes { kv_batch: 1, ..sizes([3, 4, 2], [130, 260], [15, 10]) };
        Case { mask: Some(masks::causal()), q_offset: vec![130; 3], ..Case::new(shared) }.check(
            &on,
            &[],
            &[],
        );
    }
}

#[test]
fn gradients_are_cut_by_batch_entries_and_heads_where_each_of_them_fits_a_binding() {
    for gpu in tiers() {
        let mut on = Watched::over(gpu);
        let mut profile = (*on.profile).clone();
        profile.limits.storage_binding = 25 << 10;
        on.profile = Rc::new(profile);
        // A head takes 8 KiB; what a workgroup of dkv goes through, 4 heads of 3 batch entries, 96.
        let shape = Sizes { kv_batch: 1, ..sizes([3, 4, 1], [128, 128], [16, 16]) };
        let score = Some(every_pattern(4, [128, 128]));
        let sinks = vec![0.5, -1.0, 0.0, 1.0];
        let case = Case { mask: Some(masks::causal()), score, sinks, ..Case::new(shape) };
        case.check(&on, &PATTERNS, &["distance"]);
    }
}

#[test]
fn half_gradients_past_the_binding_limit_stay_within_their_rounding() {
    for tier in [Tier::Portable, Tier::Subgroup] {
        let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
        let full = std::env::var_os("FLEXATTN_FULL").is_some();
        for (dtype, dim, bound) in [(DType::F16, 32, 2e-3), (DType::BF16, 32, 2e-2), (DType::F16, 31, 2e-3)] {
            // These two compile long.
            if tier == Tier::Subgroup && (dtype, dim) != (DType::F16, 32) && !full {
                continue;
            }
            let gradients = |limit: u64| {
                let mut on = Watched::over(gpu.clone());
                let mut profile = (*on.profile).clone();
                profile.limits.storage_binding = limit;
                on.profile = Rc::new(profile);
                let Inputs { q, k, v, dout, .. } =
                    Inputs::normal(sizes([1, 2, 1], [320, 320], [dim, dim]), 3);
                let make = |values: &[f32], heads| upload(&on, values, [1, heads, 320, dim], dtype);
                let [q, k, v, dout] = [make(&q, 2), make(&k, 1), make(&v, 1), make(&dout, 2)];
                let attention = Attention::new().mask_mod(masks::causal());
                let output = attention.forward(&on, &q, &k, &v).unwrap();
                let saved = Saved::new(&q, &k, &v, &output).unwrap();
                let plan = attention.plan_backward(&on, &saved, &dout, None, &Wanted::qkv()).unwrap().plan;
                let found = attention.backward(&on, &saved, &dout, None, &Wanted::qkv()).unwrap();
                let all = [found.dq, found.dk, found.dv].map(|x| x.unwrap().read().unwrap());
                (all.concat(), plan.passes.len())
            };
            let ((cut, launches), (whole, few)) = (gradients(19 << 10), gradients(1 << 27));
            assert!(launches > few);
            let largest = whole.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
            let worst = cut.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= bound * largest, "{tier} {dtype} {dim}: {worst} of {largest}");
        }
    }
}

#[test]
fn statistics_that_one_binding_cannot_hold_are_refused_with_the_limit() {
    let mut on = Watched::as_tier(Tier::Portable);
    let attention = Attention::new();
    let (saved, dout) = saved(&on, &attention, 300);
    // lse and delta of 600 rows take 4800 bytes.
    let mut profile = (*on.profile).clone();
    profile.limits.storage_binding = 4096;
    on.profile = Rc::new(profile);
    let error = attention.plan_backward(&on, &saved, &dout, None, &Wanted::qkv()).unwrap_err();
    assert!(error.is_limit() && error.to_string().contains("row statistics"), "{error}");
    let needed = error.to_string();
    assert!(needed.contains("4800") && needed.contains("4096"), "{error}");
}

#[test]
fn a_capture_that_is_wanted_twice_counts_once() {
    let slope = Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    for gpu in tiers() {
        let case = Case {
            score: Some(ScoreMod::new(|s| s.score() * slope.at([s.head()]))),
            ..Case::new(sizes([1, 2, 2], [9, 9], [8, 8]))
        };
        let once = case.run(&gpu, &Wanted::default().capture("slope")).unwrap();
        let twice = case.run(&gpu, &Wanted::default().capture("slope").capture("slope")).unwrap();
        let read = |found: &flexattn::Gradients| found.capture("slope").unwrap().read().unwrap();
        assert_eq!(read(&once), read(&twice));
        assert_eq!(twice.captures.len(), 1);
    }
}

#[test]
fn gradients_of_what_has_none_are_refused_by_name() {
    let gpu = Gpu::builder().tier(Tier::Cpu).build().unwrap();
    let shift = Capture::i32("shift", &[1, 2], &[2]).unwrap();
    let only_mask = Capture::f32("limit", &[5.0], &[1]).unwrap();
    let table = Capture::f32("table", &[0.5, 0.25], &[2]).unwrap();
    let case = Case {
        mask: Some(MaskMod::new(|i| i.kv().to_f32().lt(only_mask.at([i.batch()])))),
        score: Some(ScoreMod::new(|s| {
            s.score() + shift.at([s.head()]).to_f32() + table.at([s.score().to_i32()])
        })),
        ..Case::new(sizes([1, 2, 2], [9, 9], [8, 8]))
    };
    for (name, reason) in [
        ("shift", "does not read it as a float"),
        ("limit", "does not read a tensor of this name"),
        ("table", "index depends on the score"),
        ("nothing", "does not read a tensor of this name"),
    ] {
        let message = case.run(&gpu, &Wanted::default().capture(name)).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains(reason), "{message}");
    }
}

#[test]
fn very_wide_heads_have_gradients_and_still_wider_ones_are_refused_by_name() {
    let table = Capture::f32("table", &Numbers::new(7).normals(40), &[40]).unwrap();
    let score = ScoreMod::new(|s| s.score() + table.at([s.q() - s.kv() + 20]));
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    for gpu in tiers() {
        let wide = sizes([1, 1, 1], [9, 40], [1280, 64]);
        let widest = sizes([1, 1, 1], [5, 140], [1792, 512]);
        // A GPU takes long to compile these; captured tensors have one kernel on Portable and Subgroup.
        let captures: &[&str] = if gpu.tier() != Tier::Subgroup || full { &["table"] } else { &[] };
        Case { score: Some(score.clone()), ..Case::new(wide) }.check(&gpu, captures, captures);
        if gpu.tier() == Tier::Cpu || full {
            Case { score: Some(score.clone()), ..Case::new(widest) }.check(&gpu, &[], &[]);
        }
        let wider = Case::new(sizes([1, 1, 1], [2, 3], [1793, 8]));
        let refused = wider.run(&gpu, &Wanted::qkv()).unwrap_err();
        let message = refused.to_string();
        assert!(refused.is_unsupported() && message.contains("head_dim is 1793"), "{message}");
        assert!(message.contains("head_dim 1792") && !message.contains("v_dim"), "{message}");
    }
}

#[test]
fn tensors_of_different_calls_and_types_are_refused() {
    let gpu = Gpu::builder().tier(Tier::Cpu).build().unwrap();
    let tensor = |len: usize, dtype| upload(&gpu, &vec![1.0; len * 4], [1, 1, len, 4], dtype);
    let (q, longer, half) = (tensor(2, DType::F32), tensor(3, DType::F32), tensor(2, DType::F16));
    let attention = Attention::new();
    let output = attention.forward(&gpu, &q, &q, &q).unwrap();
    let run = |q: &Tensor, k: &Tensor, dout: &Tensor, dlse: Option<&Tensor>| {
        let saved = Saved::new(q, k, k, &output)?;
        attention.backward(&gpu, &saved, dout, dlse, &Wanted::qkv()).map(drop)
    };
    run(&q, &longer, &q, None).unwrap(); // k and v have no length that out could contradict
    let error = run(&longer, &q, &q, None).unwrap_err();
    assert!(error.is_shape(), "{error}");
    let error = run(&half, &half, &q, None).unwrap_err();
    assert!(error.is_dtype(), "{error}");
    let error = run(&q, &q, &half, None).unwrap_err();
    assert!(error.is_dtype(), "{error}");
    let dlse = upload(&gpu, &[1.0; 2], [1, 1, 2, 1], DType::F16);
    let error = run(&q, &q, &q, Some(&dlse)).unwrap_err();
    assert!(error.is_dtype(), "{error}");
}

#[test]
fn a_lost_device_is_an_error_and_no_panic() {
    for gpu in tiers() {
        let case = Case::new(sizes([1, 1, 1], [9, 9], [8, 8]));
        let (attention, [q, k, v, dout]) = (case.attention(), case.tensors(&gpu));
        let Some(device) = gpu.device() else { continue };
        let output = attention.forward(&gpu, &q, &k, &v).unwrap();
        let saved = Saved::new(&q, &k, &v, &output).unwrap();
        attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv()).unwrap();
        device.destroy();
        let refused = attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv()).unwrap_err();
        assert!(refused.is_device_lost(), "{refused}");
    }
}

#[test]
fn keys_repeated_by_a_stride_of_zero_have_a_gradient_for_each_batch_entry() {
    let shape = sizes([2, 2, 2], [20, 24], [8, 8]);
    let mut case = Case::new(shape);
    let one = 2 * 24 * 8;
    for values in [&mut case.inputs.k, &mut case.inputs.v] {
        let (first, second) = values.split_at_mut(one);
        second.copy_from_slice(first);
    }
    for gpu in tiers() {
        let expected = case.run(&gpu, &Wanted::qkv()).unwrap();
        let repeated = |values: &[f32]| {
            let tensor = upload(&gpu, &values[..one], [1, 2, 24, 8], DType::F32);
            tensor.view(Layout::new([2, 2, 24, 8], [0, 24 * 8, 8, 1], 0).unwrap()).unwrap()
        };
        let [q, _, _, dout] = case.tensors(&gpu);
        let (k, v) = (repeated(&case.inputs.k), repeated(&case.inputs.v));
        let attention = case.attention();
        let output = attention.forward(&gpu, &q, &k, &v).unwrap();
        let saved = Saved::new(&q, &k, &v, &output).unwrap();
        let found = attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv()).unwrap();
        let read = |tensor: Option<Tensor>| tensor.unwrap().read().unwrap();
        assert_eq!(read(found.dk), read(expected.dk), "{}", gpu.tier());
        assert_eq!(read(found.dv), read(expected.dv), "{}", gpu.tier());
    }
}

#[test]
fn rows_of_odd_length_in_16_bits_share_words_without_losing_any() {
    let case = Case { mask: Some(masks::causal()), ..Case::new(sizes([1, 2, 1], [33, 35], [5, 3])) };
    let inputs = &case.inputs;
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    for gpu in tiers() {
        // Kernels of unaligned 16-bit tensors take a software adapter long to compile.
        if gpu.tier() != Tier::Cpu && !full {
            println!("skipped: {}: runs with FLEXATTN_FULL=1", gpu.tier());
            continue;
        }
        let exact = case.run(&gpu, &Wanted::qkv()).unwrap();
        for (dtype, bound) in [(DType::F16, 4e-3), (DType::BF16, 4e-2)] {
            let q = upload(&gpu, &inputs.q, [1, 2, 33, 5], dtype);
            let k = upload(&gpu, &inputs.k, [1, 1, 35, 5], dtype);
            let v = upload(&gpu, &inputs.v, [1, 1, 35, 3], dtype);
            let dout = upload(&gpu, &inputs.dout, [1, 2, 33, 3], dtype);
            let attention = case.attention();
            let output = attention.forward(&gpu, &q, &k, &v).unwrap();
            let saved = Saved::new(&q, &k, &v, &output).unwrap();
            let found = attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv()).unwrap();
            for (got, exact) in [(&found.dq, &exact.dq), (&found.dk, &exact.dk), (&found.dv, &exact.dv)] {
                let [got, exact] = [got, exact].map(|tensor| tensor.as_ref().unwrap().read().unwrap());
                let largest = exact.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let worst = got.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst <= bound * largest, "{} {dtype}: {worst} of {largest}", gpu.tier());
            }
        }
    }
}

#[test]
fn block_masks_decide_gradients_as_they_decide_the_output() {
    let (q_len, kv_len) = (200, 300);
    let keep = |q: usize, kv: usize| (q / 40 + kv / 50).is_multiple_of(2) || (q + kv).is_multiple_of(7);
    let dense: Vec<bool> = (0..q_len * kv_len).map(|i| keep(i / kv_len, i % kv_len)).collect();
    let bits = Capture::bool("bits", &dense, &[q_len, kv_len]).unwrap();
    let mut case = Case::new(sizes([1, 2, 1], [q_len, kv_len], [8, 8]));
    case.mask = Some(MaskMod::new(|i| bits.at([i.q(), i.kv()])));
    for gpu in tiers() {
        let expected = case.run(&gpu, &Wanted::qkv()).unwrap();
        let block_mask = BlockMask::from_dense_mask(&dense, [1, 1, q_len, kv_len], [128, 128]).unwrap();
        let attention = Attention::new().block_mask(block_mask);
        let [q, k, v, dout] = case.tensors(&gpu);
        let output = attention.forward(&gpu, &q, &k, &v).unwrap();
        let saved = Saved::new(&q, &k, &v, &output).unwrap();
        let found = attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv()).unwrap();
        for (got, expected) in [(found.dq, expected.dq), (found.dk, expected.dk), (found.dv, expected.dv)] {
            let [got, expected] = [got, expected].map(|tensor| tensor.unwrap().read().unwrap());
            let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-5, "{}: {worst}", gpu.tier());
        }
    }
}

#[test]
fn a_captured_tensor_on_the_device_has_the_gradient_of_one_in_host_memory() {
    let values: Vec<f32> = (0..24).map(|i| (i as f32 * 0.7).sin()).collect();
    let host = Capture::f32("bias", &values, &[24]).unwrap();
    let case = Case {
        score: Some(ScoreMod::new(|s| s.score() + host.at([s.kv()]))),
        ..Case::new(sizes([1, 2, 2], [20, 24], [8, 8]))
    };
    for gpu in tiers() {
        let expected = case.run(&gpu, &Wanted::qkv().capture("bias")).unwrap();
        let tensor = upload(&gpu, &values, [1, 1, 1, 24], DType::F32);
        let Some(buffer) = tensor.buffer().wgpu() else { continue };
        let resident = gpu.capture("bias", CaptureType::F32, buffer, 0, &[24]).unwrap();
        let attention = case.attention().with_capture(resident).unwrap();
        let [q, k, v, dout] = case.tensors(&gpu);
        let output = attention.forward(&gpu, &q, &k, &v).unwrap();
        let saved = Saved::new(&q, &k, &v, &output).unwrap();
        let wanted = Wanted::qkv().capture("bias");
        let found = attention.backward(&gpu, &saved, &dout, None, &wanted).unwrap();
        let read = |found: &flexattn::Gradients| found.capture("bias").unwrap().read().unwrap();
        assert_eq!(read(&found), read(&expected), "{}", gpu.tier());
        assert_eq!(found.dq.unwrap().read().unwrap(), expected.dq.unwrap().read().unwrap());
    }
}

#[test]
fn a_captured_tensor_on_the_device_may_stand_beside_others_in_host_memory() {
    let bias: Vec<f32> = (0..310).map(|i| (i as f32 * 0.7).sin()).collect();
    let keep: Vec<bool> = (0..310).map(|i| i % 5 != 2).collect();
    let keep = Capture::bool("keep", &keep, &[310]).unwrap();
    let slope = Capture::f16("slope", &[0.5, 0.25].map(half::f16::from_f32), &[2]).unwrap();
    let host = Capture::f32("bias", &bias, &[310]).unwrap();
    let case = Case {
        mask: Some(masks::sliding_window(250) & MaskMod::new(|i| keep.at([i.kv()]))),
        score: Some(ScoreMod::new(|s| s.score() * slope.at([s.head()]) + host.at([s.kv()]))),
        sinks: vec![0.5, -1.0],
        ..Case::new(sizes([1, 2, 1], [300, 310], [16, 16]))
    };
    let wanted = Wanted::qkv().sinks().capture("bias").capture("slope");
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    for gpu in tiers() {
        let tensor = upload(&gpu, &bias, [1, 1, 1, 310], DType::F32);
        let Some(buffer) = tensor.buffer().wgpu() else { continue };
        let resident = gpu.capture("bias", CaptureType::F32, buffer, 0, &[310]).unwrap();
        let score = case.score.as_ref().map(|score| score.with_capture(resident).unwrap());
        let beside = Case { score, ..case.clone() };
        // Whole, or with tensors of several bindings, so that parts have tables of their own.
        let limits = match (full, gpu.tier()) {
            (true, _) => &[1 << 27, 18 << 10][..],
            (false, Tier::Portable) => &[1 << 27],
            (false, _) => &[18 << 10],
        };
        for &limit in limits {
            let mut on = Watched::over(gpu.clone());
            let mut profile = (*on.profile).clone();
            profile.limits.storage_binding = limit;
            on.profile = Rc::new(profile);
            let [expected, found] = [&case, &beside].map(|case| {
                let found = case.run(&on, &wanted).unwrap();
                let captured = wanted.captures.iter().map(|name| found.capture(name).unwrap().clone());
                let tensors = [found.dq.clone(), found.dk.clone(), found.dv.clone(), found.dsinks.clone()];
                let all = tensors.map(Option::unwrap).into_iter().chain(captured);
                all.map(|tensor| tensor.read().unwrap()).collect::<Vec<_>>()
            });
            assert_eq!(found, expected, "{} with bindings of {limit} bytes", gpu.tier());
        }
    }
}

#[test]
fn a_block_mask_with_partial_tiles_and_no_mask_mod_is_refused() {
    let case = Case { mask: Some(masks::causal()), ..Case::new(sizes([1, 1, 1], [200, 200], [8, 8])) };
    let built = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 200, 200)).unwrap();
    let read = BlockMask::from_bytes(&built.to_bytes()).unwrap();
    for gpu in tiers() {
        let [q, k, v, _] = case.tensors(&gpu);
        let run = |attention: Attention| attention.forward(&gpu, &q, &k, &v);
        let error = run(Attention::new().block_mask(read.clone())).unwrap_err();
        assert!(error.is_shape() && error.to_string().contains("mask_mod"), "{error}");
        let expected = run(case.attention()).unwrap().out.read().unwrap();
        let given = run(case.attention().block_mask(read.clone())).unwrap().out.read().unwrap();
        let own = read.clone().with_mask_mod(masks::causal());
        let own = run(Attention::new().block_mask(own)).unwrap().out.read().unwrap();
        assert!(given == expected && own == expected, "{}", gpu.tier());
    }
}

#[test]
fn one_query_row_of_each_batch_entry_over_shared_keys_has_its_gradients() {
    let shape = Sizes { kv_batch: 1, ..sizes([3, 1, 1], [1, 1500], [257, 257]) };
    let mask = MaskMod::from_wgsl("(u32(q) ^ u32(kv)) % 7u < 3u", &[], &[]).unwrap();
    let table = Capture::f32("table", &Numbers::new(7).normals(65), &[1, 65]).unwrap();
    let score = ScoreMod::new(|s| s.score() + table.at([s.head(), (s.q() - s.kv()).clamp(-32, 32) + 32]));
    for gpu in tiers() {
        for score in [None, Some(score.clone())] {
            let (mask, q_offset) = (Some(mask.clone()), vec![-31, 99, 97]);
            Case { mask, score, q_offset, ..Case::new(shape) }.check(&gpu, &[], &[]);
        }
    }
}

#[test]
fn long_lengths_are_right_where_a_driver_ends_loops_early() {
    // lavapipe ends an invocation's loops after 65,535 steps.
    let cpu = Gpu::builder().tier(Tier::Cpu).build().unwrap();
    let long = |q_len, kv_len, dim| Case::new(sizes([1, 1, 1], [q_len, kv_len], [dim, dim]));
    for tier in [Tier::Portable, Tier::Subgroup] {
        let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
        let score = every_pattern(1, [1, 8192]);
        // More sums of rows, and of columns, than the steps of one loop.
        let many = 5 * 16_384;
        let sums = Case {
            score: Some(every_pattern(5, [many / 5, many / 5])),
            mask: Some(masks::sliding_window(8)),
            ..Case::new(sizes([1, 5, 5], [many / 5, many / 5], [8, 8]))
        };
        let cases = [
            (long(1, 65_536, 16), &PATTERNS[..0]),
            (long(1, 131_072, 64), &PATTERNS[..0]),
            (long(131_072, 2, 64), &PATTERNS[..0]),
            (long(8192, 2, 128), &PATTERNS[..0]),
            (long(65_536, 2, 256), &PATTERNS[..0]),
            (Case { score: Some(score), sinks: vec![1.0], ..long(1, 8192, 128) }, &PATTERNS[..]),
            (sums, &PATTERNS[..]),
        ];
        for (case, captures) in cases {
            let run = |on: &Gpu| {
                let [q, k, v, dout] = case.tensors(on);
                let attention = case.attention().with_splits(false);
                let output = attention.forward(on, &q, &k, &v).unwrap();
                let saved = Saved::new(&q, &k, &v, &output).unwrap();
                let wanted = captures.iter().fold(Wanted::qkv(), |wanted, name| wanted.capture(*name));
                let found = attention.backward(on, &saved, &dout, None, &wanted).unwrap();
                let own = [Some(output.out), found.dq, found.dk, found.dv].into_iter().flatten();
                let all = own.chain(found.captures.into_iter().map(|(_, tensor)| tensor));
                all.map(|tensor| tensor.read().unwrap()).collect::<Vec<_>>()
            };
            for (n, (got, expected)) in run(&gpu).iter().zip(&run(&cpu)).enumerate() {
                // A bias of rows changes nothing: its gradient is what rounding leaves.
                let floor = if n.checked_sub(4).is_some_and(|n| PATTERNS[n] == "row") { 5e-2 } else { 0.0 };
                let largest = expected.iter().fold(floor, |m: f32, x| m.max(x.abs()));
                let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(
                    worst <= 1e-4 * largest + 1e-8,
                    "{tier} {:?}, result {n}: {worst} of {largest}",
                    case.inputs.sizes
                );
            }
        }
    }
}
