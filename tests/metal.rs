//! The Metal kernels, executed in the emulator: conformance, known bugs of other Metal kernels, costs.
//!
//! Nothing here says how fast a kernel is on a GPU. Where clang is missing the tests say so and stop.

mod layouts;

use flexattn::kernels::{Kernel, KernelSpec, Language, Loader, MSL_FILES, MetalTile, MslTile};
use flexattn::{
    Attention, Capture, DType, MaskMod, Matrices, Runtime, ScoreMod, Tensor, Tier, masks, scores,
};
use flexattn_emulator::{
    Bound, Case, Emulator, Kernels, Math, Measurement, Memory, MmaOrder, Mutation, Options, lint,
};
use flexattn_testing::{Budget, Golden};

/// An emulated GPU, or the reason why there is none.
fn emulator(loader: Loader) -> Option<Emulator> {
    Emulator::metal(loader).inspect_err(|error| eprintln!("skipped: {error}")).ok()
}

/// Values of a tensor of any element type.
fn tensor(emulator: &Emulator, dtype: DType, values: &[f32], shape: [usize; 4]) -> Tensor<Emulator> {
    let tensor = Tensor::zeros(emulator, dtype, shape).unwrap();
    emulator.write(tensor.buffer(), 0, &padded(&dtype.narrow(values))).unwrap();
    tensor
}

fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Numbers that look random, exact in every element type.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(99);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 20) as i32 % 256 - 128) as f32 / 64.0
    };
    (0..count).map(next).collect()
}

fn shape(shape: &[usize]) -> [usize; 4] {
    [shape[0], shape[1], shape[2], shape[3]]
}

/// Everything that is wrong with one golden case, one line an output.
fn golden_failures(golden: &Golden, emulator: &Emulator, dtype: DType) -> Vec<String> {
    let run = |sinks: Option<&[f32]>| -> flexattn::Result<Vec<(&str, Vec<f32>)>> {
        let [q, k, v] =
            [&golden.q, &golden.k, &golden.v].map(|x| tensor(emulator, dtype, x.f32(), shape(&x.shape)));
        let mut attention = Attention::new().scale(golden.scale as f32).with_lse(true).with_max(true);
        if let Some(mask) = golden.mask_mod()? {
            attention = attention.mask_mod(mask);
        }
        if let Some(score) = golden.score_mod()? {
            attention = attention.score_mod(score);
        }
        if let Some(sinks) = sinks {
            attention = attention.sinks(sinks);
        }
        let output = attention.forward(emulator, &q, &k, &v)?;
        let mut outputs = vec![(if sinks.is_some() { "out_sink" } else { "out" }, output.out.read()?)];
        if let (None, Some(lse), Some(max)) = (sinks, output.lse, output.max) {
            outputs.extend([("lse", lse.read()?), ("max", max.read()?)]);
        }
        Ok(outputs)
    };
    let mut failures = Vec::new();
    let with_sinks = golden.sinks.as_deref().filter(|_| golden.values("out_sink").is_some()).map(Some);
    for sinks in std::iter::once(None).chain(with_sinks) {
        match run(sinks) {
            Err(error) => failures.push(format!("{}: {error}", golden.name)),
            Ok(outputs) => {
                for (name, got) in outputs {
                    let gold = golden.values(name).unwrap();
                    let budget = Budget::of(golden, name, dtype);
                    let compared = budget.compare(gold, &got);
                    if !compared.pass {
                        failures.push(format!(
                            "{}: {name} mean {:.2e} max {:.2e}, budget {budget:?}",
                            golden.name, compared.mean, compared.max
                        ));
                    }
                }
            }
        }
    }
    failures
}

/// With FLEXATTN_FULL=1 all golden cases, otherwise every `step`th from `first` on.
fn goldens_agree(emulator: Option<Emulator>, dtype: DType, first: usize, step: usize) {
    let Some(emulator) = emulator else { return };
    let emulator = emulator.with_all_schedules();
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    let files = Golden::files(Golden::directory()).unwrap();
    let chosen = files.iter().enumerate().filter(|(i, _)| full || i % step == first).map(|(_, file)| file);
    let (mut failures, mut cases) = (Vec::new(), 0);
    for file in chosen {
        cases += 1;
        failures.extend(golden_failures(&Golden::load(file).unwrap(), &emulator, dtype));
    }
    assert!(failures.is_empty(), "{} of {cases} cases:\n{}", failures.len(), failures.join("\n"));
    assert!(cases >= files.len() / step);
}

#[test]
fn goldens_agree_half_staged() {
    goldens_agree(emulator(Loader::Staged), DType::F16, 0, 2);
}

#[test]
fn goldens_agree_half_direct() {
    goldens_agree(emulator(Loader::Direct), DType::F16, 1, 4);
}

#[test]
fn goldens_agree_float_staged() {
    goldens_agree(emulator(Loader::Staged), DType::F32, 0, 8);
}

#[test]
fn goldens_agree_float_direct() {
    goldens_agree(emulator(Loader::Direct), DType::F32, 3, 8);
}

#[test]
fn goldens_agree_bfloat_staged() {
    goldens_agree(emulator(Loader::Staged), DType::BF16, 5, 8);
}

#[test]
fn goldens_agree_bfloat_direct() {
    goldens_agree(emulator(Loader::Direct), DType::BF16, 7, 8);
}

/// The WGSL kernels in the MSL that naga writes, with simdgroups of 32: what runs on a Mac in Firefox, or
/// natively when the Metal tier is switched off.
#[test]
fn goldens_agree_for_wgsl_at_the_width_of_an_apple_simdgroup() {
    for (tier, dtype, first) in
        [(Tier::Portable, DType::F16, 0), (Tier::Subgroup, DType::F16, 3), (Tier::Subgroup, DType::F32, 6)]
    {
        let emulator = Emulator::new(tier).inspect_err(|error| eprintln!("skipped: {error}")).ok();
        goldens_agree(emulator, dtype, first, 16);
    }
}

/// The WGSL kernels for few queries and of the gradients the same way.
#[test]
fn decode_and_gradients_of_wgsl_agree_at_the_width_of_an_apple_simdgroup() {
    let names = |measured: &[Measurement]| -> Vec<&str> {
        measured.iter().map(|measured| measured.record.entry).collect()
    };
    for (tier, split, [dq, dkv]) in [
        (Tier::Portable, "split", ["dq", "dkv"]),
        (Tier::Subgroup, "split_subgroup", ["dq_subgroup", "dkv_subgroup"]),
    ] {
        let Ok(emulator) = Emulator::new(tier).inspect_err(|error| eprintln!("skipped: {error}")) else {
            return;
        };
        let emulator = emulator.with_all_schedules();
        // As wide as the gradient kernels with subgroup operations go on GPUs.
        for (dtype, head_dim) in [(DType::F16, 32), (DType::F32, 20)] {
            let decode = Case { q_heads: 4, ..Case::decode(Kernels::Wgsl(tier), dtype, 700, head_dim) };
            let passes = decode.measure_on(&emulator).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(names(&passes), [split, "combine"], "{tier} {dtype}");
            let mask = MaskMod::new(|i| (i.q() + 9).ge(i.kv()) & (i.q() % 7).ne(3));
            let square = Case::square(Kernels::Wgsl(tier), dtype, 45, head_dim);
            let gradients = Case { q_heads: 2, mask: Some(mask), ..square }.measure_backward_on(&emulator);
            let gradients = gradients.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(names(&gradients), ["delta", dq, dkv], "{tier} {dtype}");
        }
    }
}

/// The WGSL kernel with cooperative matrices the same way: the one of f32 that Macs offer, and the one of
/// 16 x 16, which no driver here has. lavapipe runs the one of 8 x 8 and f16 (the suite coopmatrix).
#[test]
fn goldens_agree_for_cooperative_matrices_of_every_kind() {
    let kinds = [
        (DType::F16, Matrices { f16: 8, f32: 0 }, 2),
        (DType::F16, Matrices { f16: 16, f32: 0 }, 5),
        (DType::F32, Matrices { f16: 8, f32: 8 }, 9),
    ];
    for (dtype, matrices, first) in kinds {
        let emulator = Emulator::new(Tier::CoopMatrix).map(|emulator| emulator.with_matrices(matrices));
        let emulator = emulator.inspect_err(|error| eprintln!("skipped: {error}")).ok();
        goldens_agree(emulator.clone(), dtype, first, 16);
        let Some(emulator) = emulator else { continue };
        assert!(emulator.take_records().iter().any(|record| record.entry == "forward_coop"), "{matrices:?}");
    }
}

/// Metal promises neither the last bits of exp2 nor the order within a matrix product, and may assume
/// NaN and infinity away: the budgets hold in all of these worlds.
#[test]
fn goldens_agree_whatever_the_hardware_leaves_open() {
    let names = ["large_x10", "causal_as_score_ninf", "head_masked"];
    for loader in Loader::ALL {
        let Some(plain) = emulator(loader) else { return };
        for (math, perturb_exp2, mma_order) in [
            (Math::Precise, 1, MmaOrder::Reverse),
            (Math::Precise, 7, MmaOrder::Pairwise),
            (Math::Fast, 0, MmaOrder::Forward),
        ] {
            let emulator = plain.clone().with_math(math);
            emulator.set_options(Options { perturb_exp2, mma_order, ..Options::default() });
            for name in names {
                let failures = golden_failures(&Golden::shipped(name).unwrap(), &emulator, DType::F16);
                assert!(failures.is_empty(), "{math:?} {mma_order:?}: {}", failures.join("\n"));
            }
        }
    }
}

/// NaN and infinity where the mask drops a pair, or where the block mask has none: they stay out although
/// Metal's default mode may assume that there are none.
#[test]
fn what_is_masked_stays_out_in_fast_mode() {
    let names =
        ["poison_log", "poison_nan_bias", "poison_reciprocal", "neginf_bias", "all_masked", "padded_causal"];
    for loader in Loader::ALL {
        let Some(emulator) = emulator(loader) else { return };
        let emulator = emulator.with_math(Math::Fast);
        for (name, dtype) in names.iter().flat_map(|name| [(name, DType::F16), (name, DType::F32)]) {
            let golden = Golden::shipped(name).unwrap();
            assert!(golden.values("out").unwrap().iter().all(|x| x.is_finite()), "{name}");
            let failures = golden_failures(&golden, &emulator, dtype);
            assert!(failures.is_empty(), "{} {dtype}: {}", loader.name(), failures.join("\n"));
        }
    }
}

// ---- costs: the bars, next to which docs/metal-counters.md has those of other kernels ---------------

fn forward(
    loader: Loader,
    head_dim: usize,
    mask: Option<MaskMod>,
    score: Option<ScoreMod>,
) -> Option<Measurement> {
    emulator(loader)?;
    let case = Case { mask, score, ..Case::square(Kernels::Msl(loader), DType::F16, 512, head_dim) };
    let mut measured = in_a_minute(|| case.measure());
    assert_eq!(measured.len(), 1);
    measured.pop()
}

/// A measurement that takes longer is one that nobody makes.
pub(crate) fn in_a_minute<T>(measure: impl FnOnce() -> flexattn::Result<T>) -> T {
    let start = std::time::Instant::now();
    let measured = measure().unwrap_or_else(|error| panic!("{error}"));
    assert!(start.elapsed().as_secs() < 60, "it took {:?}", start.elapsed());
    measured
}

#[test]
fn dense_forward_does_no_more_than_it_needs() {
    for (loader, head_dim) in
        [(Loader::Staged, 64), (Loader::Staged, 128), (Loader::Direct, 64), (Loader::Direct, 128)]
    {
        let Some(measured) = forward(loader, head_dim, None, None) else { return };
        let c = measured.record.counters;
        let scores = c.score_calls as f64;
        assert_eq!(c.mma, 4 * 512 * 512 * head_dim as u64 / 1024);
        assert_eq!(measured.device_read(), measured.device_read_minimum);
        assert!(c.transcendentals as f64 <= 1.2 * scores, "{}", c.transcendentals as f64 / scores);
        assert!(c.conversions as f64 <= 4.0 * scores);
        assert_eq!(c.reductions, 0);
        match loader {
            Loader::Staged => {
                assert!(c.barriers as f64 <= 4.0 * scores / 1024.0);
                assert!(c.threadgroup_read <= 100 * c.mma, "{}", c.threadgroup_read as f64 / c.mma as f64);
                assert!(measured.record.threadgroup_memory <= 16 << 10);
                assert!(measured.model_utilisation() >= 0.78, "{}", measured.model_utilisation());
            }
            Loader::Direct => {
                assert_eq!((c.barriers, c.threadgroup_read, measured.record.threadgroup_memory), (0, 0, 0));
                assert!(measured.model_utilisation() >= 0.76, "{}", measured.model_utilisation());
            }
        }
    }
}

#[test]
fn causal_forward_skips_what_lies_above_the_diagonal() {
    for loader in Loader::ALL {
        for head_dim in [64, 128] {
            let Some(measured) = forward(loader, head_dim, Some(masks::causal()), None) else { return };
            let c = measured.record.counters;
            assert!(c.mma as f64 <= 1.07 * (2 * 512 * 513 * head_dim / 1024) as f64);
            // The 16 tiles on the diagonal, and nothing else.
            assert_eq!(c.mask_calls, 16 * 1024);
        }
    }
}

#[test]
fn the_slope_of_alibi_is_read_once_per_row() {
    for loader in Loader::ALL {
        for mask in [None, Some(masks::causal())] {
            let Some(plain) = forward(loader, 64, mask.clone(), None) else { return };
            let alibi = forward(loader, 64, mask, Some(scores::alibi(1))).unwrap();
            // Each of the 4 lanes that hold a row reads it.
            assert_eq!(alibi.record.counters.device_read - plain.record.counters.device_read, 512 * 4 * 4);
            assert_eq!(alibi.record.counters.transcendentals, plain.record.counters.transcendentals);
        }
    }
}

/// The plan's own launches, both passes together: each byte of k and v once per kv head, whatever the number of
/// query heads on it; and nothing is reduced key by key.
#[test]
fn decoding_reads_keys_and_values_once_per_kv_head() {
    for loader in Loader::ALL {
        let Some(_) = emulator(loader) else { return };
        for (dtype, head_dim) in [(DType::F16, 128), (DType::F16, 64), (DType::BF16, 128), (DType::F32, 128)]
        {
            let case = Case::decode(Kernels::Msl(loader), dtype, 4096, head_dim);
            let passes = in_a_minute(|| case.measure());
            let entries: Vec<&str> = passes.iter().map(|pass| pass.record.entry).collect();
            assert_eq!(entries, ["split", "combine"]);
            let read = passes.iter().map(Measurement::device_read).sum::<u64>() as f64;
            let reductions = passes.iter().map(|pass| pass.record.counters.reductions).sum::<u64>() as f64;
            let name = format!("{} {dtype} {head_dim}", loader.name());
            assert!(read <= 1.05 * case.kv_bytes() as f64, "{name}: {}", read / case.kv_bytes() as f64);
            assert!(reductions <= 1.1 * passes[0].kept as f64, "{name}: {reductions}");
            // Far below that bar: rows are reduced by shuffles within a fragment, and parts once per head.
            assert!(reductions <= 0.001 * passes[0].kept as f64, "{name}: {reductions}");
        }
    }
}

// ---- the table and the texts -----------------------------------------------------------------------

const DIMS: [(u32, u32); 17] = [
    (1, 1),
    (3, 3),
    (8, 8),
    (16, 40),
    (32, 32),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (96, 64),
    (112, 112),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (512, 512),
    (576, 512),
];

#[test]
fn fragments_that_live_across_the_kv_loop_fit_the_registers() {
    let pairs = (1..=640).flat_map(|dim| (1..=640).step_by(7).map(move |v_dim| (dim, v_dim)));
    for (head_dim, v_dim) in pairs.chain((1..=640).map(|dim| (dim, dim))).chain(DIMS) {
        for (loader, dtype) in Loader::ALL.iter().flat_map(|loader| DType::ALL.map(|dtype| (*loader, dtype)))
        {
            for tile in [
                MslTile::choose(loader, dtype, head_dim, v_dim),
                MslTile::decode(loader, dtype, head_dim, v_dim),
            ] {
                let registers = tile.registers();
                assert!(
                    registers <= loader.registers(),
                    "{dtype:?} {head_dim} {v_dim}: {tile} has {registers}"
                );
            }
        }
    }
}

#[test]
fn every_tile_declares_the_threadgroup_memory_it_states_and_at_most_32_kib() {
    let Some(_) = emulator(Loader::Staged) else { return };
    let most = MetalTile::MAX_THREADGROUP_MEMORY;
    for kernel in [Kernel::Forward, Kernel::Dq, Kernel::Dkv] {
        for (dtype, (head_dim, v_dim)) in DType::ALL.iter().flat_map(|dtype| DIMS.map(|dims| (*dtype, dims)))
        {
            let spec =
                KernelSpec::new(kernel, dtype, head_dim, v_dim, most).unwrap().on_metal(Loader::Staged);
            let (label, stated) = (spec.label(), spec.workgroup_memory());
            assert!(stated <= most, "{label}: {stated}");
            let compiled = match (kernel, dtype) {
                (Kernel::Forward, DType::F16) => true,
                (Kernel::Forward, _) => matches!(head_dim, 64 | 72 | 128 | 256),
                _ => matches!((dtype, head_dim), (DType::F16, 64 | 128) | (DType::F32, 72)),
            };
            if compiled {
                let kernel = flexattn_emulator::Kernel::compile(&spec.text(Language::Msl).unwrap()).unwrap();
                assert_eq!(kernel.threadgroup_memory(spec.entry()), u64::from(stated), "{label}");
            }
        }
    }
}

#[test]
fn a_kernel_with_more_than_32_kib_of_threadgroup_memory_does_not_run() {
    let Some(emulator) = emulator(Loader::Staged) else { return };
    // 4096 times four halves.
    let [from, to] = ["name[(count) / 4u]", "name[(count) / 4u + 4096u]"].map(str::to_owned);
    let mutation = Mutation { from, to, nth: 0, entry: Some("forward") };
    let x = Tensor::zeros(&emulator, DType::F16, [1, 1, 8, 64]).unwrap();
    let run = |emulator: &Emulator| Attention::new().forward(emulator, &x, &x, &x).map(drop);
    run(&emulator).unwrap();
    let error = run(&emulator.with_mutation(mutation)).unwrap_err();
    assert!(error.to_string().contains("32768"), "{error}");
}

#[test]
fn every_metal_file_compiles_as_it_stands_and_keeps_the_rules() {
    for (name, text) in MSL_FILES {
        let broken = lint(text);
        assert!(broken.is_empty(), "{name} {}", broken[0]);
        assert!(text.lines().count() < 400, "{name} is too long");
        if text.contains("kernel void") && emulator(Loader::Staged).is_some() {
            let joined = flexattn::kernels::Fill::join(name, MSL_FILES).unwrap().finish();
            flexattn_emulator::Kernel::compile(&joined).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

#[test]
fn filled_texts_keep_the_rules() {
    let slope = Capture::f32("slope", &[0.5], &[1]).unwrap();
    let score = ScoreMod::new(|s| s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32());
    for loader in Loader::ALL {
        for dtype in DType::ALL {
            let kernels = [Kernel::Forward, Kernel::DecodeSplit, Kernel::Delta, Kernel::Dq, Kernel::Dkv];
            for (kernel, (head_dim, v_dim)) in
                kernels.iter().flat_map(|kernel| DIMS.map(|dims| (*kernel, dims)))
            {
                let mut spec =
                    KernelSpec::new(kernel, dtype, head_dim, v_dim, 32 << 10).unwrap().on_metal(loader);
                if kernel == Kernel::Delta {
                    assert!(lint(&spec.text(Language::Msl).unwrap()).is_empty());
                    continue;
                }
                spec.mods.grad = kernel.is_backward();
                spec.mods.score = Some(score.expr().clone());
                spec.mods.mask = Some(masks::causal().expr().clone());
                spec.layout = flexattn::lower::Layout::new([score.expr()], None);
                let broken = lint(&spec.text(Language::Msl).unwrap());
                assert!(broken.is_empty(), "{} {}", spec.label(), broken[0]);
            }
        }
    }
}

// ---- known bugs of other Metal kernels --------------------------------------------------------------
//
// | | bug | here |
// |---|---|---|
// | 1 | mlx 2395, 2608, 2626: garbage or NaN in rows with nothing kept | a_row_with_nothing_kept_is_zero_and_its_lse_minus_infinity |
// | 2 | mlx 2835: causal means two things when lengths differ | causal_masks_of_unequal_lengths_are_what_they_say |
// | 3 | mlx 3897: f32 at the precision of TF32 | float_keeps_the_precision_of_float |
// | 4 | mlx 3885: head_dim 512 falls back in silence | head_dim_512_runs_the_metal_kernel |
// | 5 | mlx 2096: NaN from a broadcast additive mask | an_additive_mask_that_rows_share_gives_no_nan |
// | 6 | mlx, two-pass decode: keys after the last whole part dropped | parts_of_any_length_cover_every_key (tests/emulator/tests/decode.rs) |
// | 7 | candle 3388, 3690: NaN with grouped heads and a rectangular mask | grouped_heads_with_a_rectangular_mask_are_finite |
// | 8 | candle 3625: causal and mask applied twice | a_mask_that_is_applied_twice_is_the_same_mask |
// | 9 | candle 3852: a ragged end reads past k and v | keys_past_kv_len_are_never_read |
// | 10 | pytorch 156707: as 1 | as 1 |
// | 11 | pytorch 174861: two-pass decode reads out of bounds | parts_of_any_length_cover_every_key |
// | 12 | pytorch 188147: NaN in q swallowed | a_nan_in_a_query_makes_its_row_nan_and_no_other |
// | 13 | pytorch 149132: crash with grouped heads and a mask; 149261: buffers over 2^32 bytes; 147443: 5-D inputs crash | as 7; offsets_of_batch_entries_have_64_bits (tests/emulator/tests/forward.rs); shapes have four dims by their type |
// | 14 | pytorch 195163: MPSGraph multiplies wrongly | does not apply: nothing here uses it, neither as a part nor as the truth |
// | 15 | pytorch 182256: lane layouts of cooperative tensors differ per GPU | does not apply to simdgroup matrices; the probe checks their layout: the_canary_gives_what_the_probe_expects |
// | 16 | llama.cpp 28602: support decided by head_dim alone | v_dim_may_differ_from_head_dim |
// | 17 | llama.cpp 9187: ALiBi and softcap imprecise | alibi_after_softcap_is_precise |
// | 18 | llama.cpp 5021: more threadgroup memory than there is | every_tile_declares_the_threadgroup_memory_it_states_and_at_most_32_kib |
// | 19 20 21 | llama.cpp 17986, 21048, drjit-core 200: operand types and shapes of matmul2d | do not apply: no kernel uses tensor operations |
// | 22 23 | metal-flash-attention 14, 29, 32, 33: asynchronous copies and their assembly | do not apply: refused by a lint, every_metal_file_compiles_as_it_stands_and_keeps_the_rules |
// | 24 | wgpu 3181: a barrier elided on M1 Max | a compiler's bug, which no emulation shows; every_barrier_is_needed (tests/emulator/tests/mutants.rs) says that ours are not redundant |
// | 25 | mpsops 66eb43d: a bias's offset overflows; 0932808: offsets of a batch in pieces | captured_tensors_are_indexed_with_32_bits; pieces_of_a_dispatch_give_what_the_whole_gives (forward.rs) |
// | 26 | llama.cpp: row indices of 16 bits | row_indices_have_32_bits |
// | 27 | pytorch: strides of 32 bits | offsets_of_batch_entries_have_64_bits |

/// Attention in both loaders: out and lse, f16 unless said otherwise.
fn both(run: impl Fn(&Emulator)) {
    for loader in Loader::ALL {
        let Some(emulator) = emulator(loader) else { return };
        run(&emulator.with_all_schedules());
    }
}

fn attend(
    emulator: &Emulator,
    attention: Attention,
    dtype: DType,
    [q, k, v]: [(&[f32], [usize; 4]); 3],
) -> (Vec<f32>, Vec<f32>) {
    let [q, k, v] = [q, k, v].map(|(values, shape)| tensor(emulator, dtype, values, shape));
    let output =
        attention.with_lse(true).forward(emulator, &q, &k, &v).unwrap_or_else(|error| panic!("{error}"));
    (output.out.read().unwrap(), output.lse.unwrap().read().unwrap())
}

/// mlx 2395, 2608 and 2626, pytorch 156707: garbage or NaN in rows with nothing kept.
#[test]
fn a_row_with_nothing_kept_is_zero_and_its_lse_minus_infinity() {
    both(|emulator| {
        let x = numbers(1, 40 * 64);
        let nothing = Attention::new().mask_mod(MaskMod::new(|i| i.kv().lt(i.q() - 10)));
        let at = [1, 1, 40, 64];
        let (out, lse) = attend(emulator, nothing, DType::F16, [(&x, at), (&x, at), (&x, at)]);
        for row in 0..40 {
            let empty = row <= 10;
            assert_eq!(out[64 * row..64 * (row + 1)].iter().all(|x| *x == 0.0), empty, "row {row}");
            assert_eq!(lse[row] == f32::NEG_INFINITY, empty, "row {row}");
        }
    });
}

/// mlx 2835: a causal mask means one thing for q_len == kv_len and two for others. Here it is the mask
/// that was written: upper left, and another one for lower right.
#[test]
fn causal_masks_of_unequal_lengths_are_what_they_say() {
    both(|emulator| {
        let (q, k) = (numbers(2, 33 * 32), numbers(3, 70 * 32));
        let v: Vec<f32> = (0..70 * 32).map(|i| (i / 32) as f32).collect();
        let shapes = [(&q[..], [1, 1, 33, 32]), (&k[..], [1, 1, 70, 32]), (&v[..], [1, 1, 70, 32])];
        let (upper, _) = attend(emulator, Attention::new().mask_mod(masks::causal()), DType::F32, shapes);
        assert_eq!(upper[0], 0.0);
        let (lower, lse) =
            attend(emulator, Attention::new().mask_mod(masks::bottom_right_causal()), DType::F32, shapes);
        let (offset, lse_offset) =
            attend(emulator, Attention::new().mask_mod(masks::causal()).q_offset(37), DType::F32, shapes);
        assert_eq!((lower, lse), (offset, lse_offset));
    });
}

/// mlx 3897: f32 at the precision of TF32.
#[test]
fn float_keeps_the_precision_of_float() {
    for loader in Loader::ALL {
        let Some(_) = emulator(loader) else { return };
        Case::square(Kernels::Msl(loader), DType::F32, 100, 64)
            .measure()
            .unwrap_or_else(|error| panic!("{error}"));
    }
}

/// mlx 3885: a large head_dim falls back to another kernel in silence.
#[test]
fn head_dim_512_runs_the_metal_kernel() {
    both(|emulator| {
        let x = numbers(4, 20 * 512);
        let at = [1, 1, 20, 512];
        attend(emulator, Attention::new(), DType::F16, [(&x, at), (&x, at), (&x, at)]);
        let records = emulator.take_records();
        assert!(records.iter().all(|record| record.counters.mma > 0), "{records:?}");
    });
    for loader in Loader::ALL {
        let Some(_) = emulator(loader) else { return };
        let case = Case::square(Kernels::Msl(loader), DType::F16, 40, 512);
        case.measure().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// mlx 2096: NaN from an additive mask that is broadcast over heads and queries.
#[test]
fn an_additive_mask_that_rows_share_gives_no_nan() {
    both(|emulator| {
        let x = numbers(15, 2 * 70 * 32);
        let kept = |kv: usize| kv % 3 != 1 && kv < 40;
        let bias: Vec<f32> = (0..70).map(|kv| if kept(kv) { 0.0 } else { f32::NEG_INFINITY }).collect();
        let bias = Capture::f32("bias", &bias, &[1, 70]).unwrap();
        let additive = ScoreMod::new(|s| s.score() + bias.at([0.into(), s.kv()]));
        let dropping = MaskMod::new(|i| (i.kv() % 3).ne(1) & i.kv().lt(40));
        let shapes = [(&x[..], [1, 2, 70, 32]); 3];
        let (out, lse) = attend(emulator, Attention::new().score_mod(additive), DType::F16, shapes);
        assert!(out.iter().chain(&lse).all(|x| x.is_finite()));
        assert_eq!((out, lse), attend(emulator, Attention::new().mask_mod(dropping), DType::F16, shapes));
    });
}

/// pytorch 182256: where a lane finds its elements is no promise of Metal, so the probe looks.
#[test]
fn the_canary_gives_what_the_probe_expects() {
    let Some(_) = emulator(Loader::Direct) else { return };
    let text = include_str!("../src/gpu/canary.metal");
    assert_eq!(lint(text), []);
    let kernel = flexattn_emulator::Kernel::compile(text).unwrap();
    let product = Memory::new(256);
    let bound = [Bound::whole(0, &product)];
    let outcome = kernel.launch("canary", &bound, [1, 1, 1], [32, 1, 1], &Options::default()).unwrap();
    assert!(outcome.reports.is_empty());
    let numbers: Vec<f32> = (0..64).map(|i| i as f32).collect();
    assert_eq!(DType::F32.widen(&product.read(0, 256)), numbers);
}

/// candle 3388 and 3690, pytorch 149132: NaN or a crash with grouped heads and a mask that is not square.
#[test]
fn grouped_heads_with_a_rectangular_mask_are_finite() {
    both(|emulator| {
        let (q, k) = (numbers(5, 2 * 8 * 17 * 32), numbers(6, 2 * 2 * 45 * 32));
        let mask = MaskMod::new(|i| ((i.q() + i.kv()) % 3).eq(0));
        let (out, _) = attend(
            emulator,
            Attention::new().mask_mod(mask),
            DType::F16,
            [(&q, [2, 8, 17, 32]), (&k, [2, 2, 45, 32]), (&k, [2, 2, 45, 32])],
        );
        assert!(out.iter().all(|x| x.is_finite()));
    });
    for loader in Loader::ALL {
        let Some(_) = emulator(loader) else { return };
        let mask = MaskMod::new(|i| ((i.q() + i.kv() + i.head()) % 3).eq(0));
        let square = Case::square(Kernels::Msl(loader), DType::F16, 45, 32);
        let case = Case { q_heads: 8, kv_heads: 2, q_len: 17, mask: Some(mask), ..square };
        case.measure().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// candle 3625: causal and a mask applied twice give NaN at some lengths.
#[test]
fn a_mask_that_is_applied_twice_is_the_same_mask() {
    both(|emulator| {
        for len in [31, 32, 33, 64, 96] {
            let x = numbers(7, len * 32);
            let at = [1, 1, len, 32];
            let twice = masks::causal() & masks::causal();
            let run = |mask| {
                attend(emulator, Attention::new().mask_mod(mask), DType::F16, [(&x, at), (&x, at), (&x, at)])
            };
            assert_eq!(run(masks::causal()), run(twice), "{len}");
        }
    });
}

/// candle 3852: a ragged end reads past k and v, and 0 * NaN poisons the row. Here what is bound ends with the
/// last key that counts, so that the emulator sees a read of the next one.
#[test]
fn keys_past_kv_len_are_never_read() {
    both(|emulator| {
        let [q, k] = [numbers(8, 35 * 64), numbers(9, 100 * 64)];
        let q = tensor(emulator, DType::F16, &q, [1, 1, 35, 64]);
        let k = tensor(emulator, DType::F16, &k, [1, 1, 100, 64]);
        let run = |kv_len: u32, bound: u64| {
            let out = Tensor::zeros(emulator, DType::F16, [1, 1, 35, 64])?;
            let (mut submits, output) =
                Attention::new().kv_len(kv_len).prepare(emulator, [&q, &k, &k, &out])?;
            for dispatch in submits.iter_mut().flatten() {
                for binding in &mut dispatch.bindings[1..3] {
                    assert!(binding.size >= bound * 64 * 2);
                    binding.size = bound * 64 * 2;
                }
            }
            submits.iter().try_for_each(|dispatches| emulator.run(dispatches))?;
            output.out.read()
        };
        assert_eq!(run(45, 45).unwrap(), run(45, 100).unwrap());
        let error = run(46, 45).unwrap_err().to_string();
        assert!(error.contains("of buffer"), "{error}");
    });
}

/// What lies in k and v past kv_len plays no part either, also where the compiler may assume that there is no NaN.
#[test]
fn nan_past_kv_len_changes_no_bit() {
    both(|emulator| {
        let q = numbers(8, 35 * 64);
        let mut k = numbers(9, 100 * 64);
        let clean = k.clone();
        k[45 * 64..].fill(f32::NAN);
        let shapes = |k| [(&q[..], [1, 1, 35, 64]), (k, [1, 1, 100, 64]), (k, [1, 1, 100, 64])];
        let attention = Attention::new().kv_len(45);
        for math in [Math::Precise, Math::Fast] {
            let emulator = emulator.clone().with_math(math).with_all_schedules();
            let poisoned = attend(&emulator, attention.clone(), DType::F16, shapes(&k));
            assert!(poisoned.0.iter().all(|x| x.is_finite()), "{math:?}");
            assert_eq!(poisoned, attend(&emulator, attention.clone(), DType::F16, shapes(&clean)));
        }
    });
}

/// pytorch 188147: max ignores NaN, so that a NaN query gives numbers.
#[test]
fn a_nan_in_a_query_makes_its_row_nan_and_no_other() {
    both(|emulator| {
        let k = numbers(10, 40 * 32);
        let mut q = k.clone();
        q[5 * 32] = f32::NAN;
        let at = [1, 1, 40, 32];
        let (out, _) = attend(
            emulator,
            Attention::new().mask_mod(masks::causal()),
            DType::F16,
            [(&q, at), (&k, at), (&k, at)],
        );
        for row in 0..40 {
            assert_eq!(out[32 * row].is_nan(), row == 5, "row {row}");
        }
    });
}

/// llama.cpp 28602: a shape is accepted by looking at the head_dim of k alone.
#[test]
fn v_dim_may_differ_from_head_dim() {
    both(|emulator| {
        let (q, v) = (numbers(11, 40 * 96), vec![2.0; 40 * 64]);
        let (out, _) = attend(
            emulator,
            Attention::new(),
            DType::F16,
            [(&q, [1, 1, 40, 96]), (&q, [1, 1, 40, 96]), (&v, [1, 1, 40, 64])],
        );
        assert_eq!(out.len(), 40 * 64);
        assert!(out.iter().all(|x| (x - 2.0).abs() < 2e-3));
    });
}

/// llama.cpp 9187: ALiBi and softcap together are imprecise.
#[test]
fn alibi_after_softcap_is_precise() {
    for loader in Loader::ALL {
        let Some(_) = emulator(loader) else { return };
        let score = Some(scores::softcap(5.0).then(&scores::alibi(2)));
        let case =
            Case { q_heads: 2, kv_heads: 1, score, ..Case::square(Kernels::Msl(loader), DType::F32, 70, 64) };
        case.measure().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// llama.cpp: a 16-bit row index, so at most 65,535 queries.
#[test]
fn row_indices_have_32_bits() {
    both(|emulator| {
        emulator.set_options(Options::default());
        let rows = 65_536 + 40;
        let (q, k) = (numbers(12, rows * 8), numbers(13, 33 * 8));
        let (out, _) = attend(
            emulator,
            Attention::new().mask_mod(MaskMod::new(|i| i.kv().eq(i.q() % 33))),
            DType::F16,
            [(&q, [1, 1, rows, 8]), (&k, [1, 1, 33, 8]), (&k, [1, 1, 33, 8])],
        );
        for row in [0, 65_535, 65_536, rows - 1] {
            let kv = row % 33;
            assert_eq!(out[8 * row..8 * row + 8], k[8 * kv..8 * kv + 8], "row {row}");
        }
    });
}

/// mpsops 66eb43d: the offset of a bias overflows; here one of over 65,536 elements, per head.
#[test]
fn captured_tensors_are_indexed_with_32_bits() {
    for loader in Loader::ALL {
        let Some(_) = emulator(loader) else { return };
        let bias: Vec<f32> = numbers(14, 2 * 200 * 200);
        let bias = Capture::f32("bias", &bias, &[2, 200, 200]).unwrap();
        let score = ScoreMod::new(|s| s.score() + bias.at([s.head(), s.q(), s.kv()]));
        let case = Case {
            q_heads: 2,
            kv_heads: 2,
            score: Some(score),
            ..Case::square(Kernels::Msl(loader), DType::F32, 200, 16)
        };
        case.measure().unwrap_or_else(|error| panic!("{error}"));
    }
}
