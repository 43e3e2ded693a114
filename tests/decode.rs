//! Few queries over long caches: every tier beside the reference, whole or in parts, in one submit or more.

use flexattn::kernels::Kernel;
use flexattn::plan::Plan;
use flexattn::reference::{self, Problem};
use flexattn::{Attention, AttentionShape, Cpu, DType, Gpu, Layout, MaskMod, Runtime, Tensor, Tier, masks};
use flexattn_testing::problem::{Inputs, Sizes};
use flexattn_testing::{Budget, conformance};
use half::{bf16, f16};

/// The wgpu tiers with kernels in WGSL that are here; the others are named.
fn tiers() -> Vec<Gpu> {
    crate::tiers::here(&[Tier::Portable, Tier::Subgroup, Tier::CoopMatrix])
}

fn inputs<R: Runtime>(on: &R, inputs: &Inputs, dtype: DType) -> [Tensor<R>; 3] {
    let Inputs { sizes, q, k, v, .. } = inputs;
    [(q, sizes.q_shape()), (k, sizes.k_shape()), (v, sizes.v_shape())]
        .map(|(values, shape)| conformance::upload(on, dtype, values, &shape).unwrap())
}

/// Query heads in groups of 4, each entry at the end of its cache.
fn sizes(q_len: usize, kv_len: usize, dim: usize) -> Sizes {
    Sizes { batch: 2, kv_batch: 2, q_heads: 8, kv_heads: 2, q_len, kv_len, head_dim: dim, v_dim: dim }
}

/// What out may be off by, from what it is exactly: rounding it to its type is all that a kernel loses in the
/// mean, and all that plain attention of that type would lose at the least.
fn budget(exact: &[f32], dtype: DType) -> Budget {
    let rounded = |x: f32| match dtype {
        DType::F32 => x,
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
    };
    let rounding = exact.iter().map(|&x| f64::from((rounded(x) - x).abs())).sum::<f64>() / exact.len() as f64;
    let largest = exact.iter().fold(0.0_f64, |m, &x| m.max(x.abs().into()));
    let max = match dtype {
        DType::F32 => 5e-5,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
    };
    Budget { mean: 1.25 * rounding + 5e-7, max: max * largest, relative: 0.0 }
}

const STATISTICS: Budget = Budget { mean: f64::INFINITY, max: 0.0, relative: 2e-6 };

fn kernels(plan: &Plan) -> Vec<Kernel> {
    plan.passes.iter().map(|pass| pass.spec.kernel).collect()
}

/// Kernels of an attention on these tensors.
fn kernels_of(attention: &Attention, gpu: &Gpu, [q, k, v]: &[Tensor; 3]) -> Vec<Kernel> {
    let [batch, heads, len, _] = q.shape();
    let out = gpu.zeros(q.dtype(), [batch, heads, len, v.shape()[3]]).unwrap();
    kernels(&attention.plan(gpu, [q, k, v, &out]).unwrap())
}

#[test]
fn few_queries_over_many_keys_agree_with_the_reference_on_every_tier() {
    for (q_len, kv_len, windowed) in [(1, 512, false), (1, 700, false), (3, 700, true), (3, 1300, true)] {
        let sizes = sizes(q_len, kv_len, 64);
        let data = Inputs::normal(sizes, kv_len as u64);
        let offset = (kv_len - q_len) as i32;
        // The second entry has filled its cache up to somewhere.
        let kv_len = [kv_len as u32, kv_len as u32 - 75];
        let q_offset = [offset, offset - 75];
        let window = masks::causal() & masks::sliding_window(200);
        let mask = windowed.then_some(&window);
        let [q, k, v] = [sizes.q_shape(), sizes.k_shape(), sizes.v_shape()]
            .map(|shape| Layout::contiguous(shape).unwrap());
        let problem = Problem {
            mask_mod: mask,
            q_offset: &q_offset,
            kv_len: &kv_len,
            ..Problem::new(AttentionShape::new(&q, &k, &v).unwrap(), &data.q, &data.k, &data.v)
        };
        let exact = reference::forward(&problem).unwrap();
        let [out, lse, max] = [exact.out, exact.lse, exact.max]
            .map(|values| values.into_iter().map(|x| x as f32).collect::<Vec<_>>());
        let mut attention = Attention::new().q_offset(q_offset).kv_len(kv_len).with_max(true);
        if let Some(mask) = mask {
            attention = attention.mask_mod(mask.clone());
        }
        for (gpu, dtype) in
            tiers().iter().flat_map(|gpu| DType::ALL.into_iter().map(move |dtype| (gpu, dtype)))
        {
            let tensors = inputs(gpu, &data, dtype);
            let [split, combine] = kernels_of(&attention, gpu, &tensors)[..] else { panic!("two passes") };
            let split_kernels = match gpu.tier() {
                Tier::Portable => [Kernel::DecodeSplit; 2],
                // On a GPU the former has all rows of a kv head, or the latter is taken.
                _ => [Kernel::DecodeSubgroup, Kernel::DecodeSplit],
            };
            let first = if gpu.profile().software { &split_kernels[..1] } else { &split_kernels[..] };
            assert!(first.contains(&split) && combine == Kernel::DecodeCombine, "{split:?} {combine:?}");
            let [q, k, v] = &tensors;
            let found = attention.forward(gpu, q, k, v).unwrap();
            let what = format!("{} {dtype} {q_len}x{kv_len:?}", gpu.tier());
            let compared = budget(&out, dtype).compare(&out, &found.out.read().unwrap());
            assert!(compared.pass, "{what}: out: {compared:?}");
            for (name, got, exact) in [("lse", found.lse, &lse), ("max", found.max, &max)] {
                let compared = STATISTICS.compare(exact, &got.unwrap().read().unwrap());
                assert!(compared.pass, "{what}: {name}: {compared:?}");
            }
        }
    }
}

#[test]
fn a_cache_gives_the_same_answer_whole_and_in_parts() {
    let data = Inputs::normal(sizes(2, 900, 32), 5);
    for gpu in tiers() {
        for dtype in DType::ALL {
            let tensors = inputs(&gpu, &data, dtype);
            let [q, k, v] = &tensors;
            let keep = MaskMod::new(|i| ((i.q() + i.kv() + i.head()) % 3).ne(0));
            let attention = Attention::new()
                .mask_mod(masks::causal() & keep)
                .q_offset([898, 600])
                .kv_len([900, 602])
                .sinks([0.5, -1.0, 2.0, 0.0, 1.0, -3.0, 0.25, 4.0]);
            let run = |splits: bool| {
                let attention = attention.clone().with_splits(splits);
                let parts = kernels_of(&attention, &gpu, &tensors).contains(&Kernel::DecodeCombine);
                assert_eq!(parts, splits, "{}", gpu.tier());
                let found = attention.forward(&gpu, q, k, v).unwrap();
                (found.out.read().unwrap(), found.lse.unwrap().read().unwrap())
            };
            let (parts, whole) = (run(true), run(false));
            // Both round once, so they may be apart by twice that.
            let mut allowed = budget(&whole.0, dtype);
            let ulp = match dtype {
                DType::F32 => 0.0,
                DType::F16 => 2.0_f64.powi(-11),
                DType::BF16 => 2.0_f64.powi(-8),
            };
            allowed.mean += ulp;
            let out = allowed.compare(&whole.0, &parts.0);
            let lse = STATISTICS.compare(&whole.1, &parts.1);
            assert!(out.pass && lse.pass, "{} {dtype}: {out:?} {lse:?}", gpu.tier());
        }
    }
}

/// Compares a call of one query to each entry of a cache that all entries share with the Cpu tier.
fn agrees_with_cpu(gpu: &Gpu, batch: usize, q_heads: usize, kv_len: usize) {
    let sizes = Sizes { batch, kv_batch: 1, q_heads, kv_heads: 1, q_len: 1, kv_len, head_dim: 64, v_dim: 64 };
    let data = Inputs::normal(sizes, 7);
    let attention = Attention::new();
    let [q, k, v] = inputs(gpu, &data, DType::F32);
    let got = attention.forward(gpu, &q, &k, &v).unwrap();
    let cpu = Cpu::new();
    let [q, k, v] = inputs(&cpu, &data, DType::F32);
    let exact = attention.forward(&cpu, &q, &k, &v).unwrap();
    let exact_out = exact.out.read().unwrap();
    let out = budget(&exact_out, DType::F32).compare(&exact_out, &got.out.read().unwrap());
    let lse = STATISTICS.compare(&exact.lse.unwrap().read().unwrap(), &got.lse.unwrap().read().unwrap());
    assert!(out.pass && lse.pass, "{} {sizes:?}: {out:?} {lse:?}", gpu.tier());
}

#[test]
fn a_workgroup_goes_through_no_more_keys_than_a_driver_lets_it() {
    // So many entries that none of them is cut for the sake of filling the machine.
    for gpu in tiers() {
        agrees_with_cpu(&gpu, 16, 1, 140_000);
    }
}

#[test]
fn work_past_a_submit_goes_into_several_and_stays_with_the_kernels_of_decode() {
    for gpu in tiers().into_iter().filter(|gpu| gpu.profile().software) {
        let shape = |heads, len| [16, heads, len, 64];
        let q = gpu.zeros(DType::F32, shape(32, 1)).unwrap();
        let kv = gpu.zeros(DType::F32, [1, 1, 20_000, 64]).unwrap();
        let plan = Attention::new().plan(&gpu, [&q, &kv, &kv, &q]).unwrap();
        assert!(plan.passes.len() >= 3, "{:?}", kernels(&plan));
        assert_eq!(kernels(&plan).last(), Some(&Kernel::DecodeCombine));
        let before = gpu.held().submits;
        agrees_with_cpu(&gpu, 16, 32, 20_000);
        assert!(gpu.held().submits >= before + 2, "{}", gpu.tier());
    }
}
