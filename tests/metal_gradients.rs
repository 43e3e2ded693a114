//! The Metal gradient kernels, executed in the emulator: conformance, tiles, costs.

use flexattn::kernels::{Kernel, Loader, MslGradientTile};
use flexattn::{Attention, DType, MaskMod, Saved, Tensor, Wanted, masks};
use flexattn_emulator::{Case, Emulator, Kernels, Math, MmaOrder, Options, Schedule};
use flexattn_testing::conformance::{self, Verdict};
use flexattn_testing::{Golden, problem::Numbers};

/// An emulated GPU, or the reason why there is none.
fn emulator(loader: Loader) -> Option<Emulator> {
    Emulator::metal(loader).inspect_err(|error| eprintln!("skipped: {error}")).ok()
}

/// The goldens that store gradients: all with FLEXATTN_FULL=1, otherwise every `step`th from `first` on.
fn goldens(first: usize, step: usize) -> Vec<Golden> {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    let files = Golden::files(Golden::directory()).unwrap();
    let all: Vec<Golden> = files.iter().map(|file| Golden::load(file).unwrap()).collect();
    let all: Vec<Golden> = all.into_iter().filter(|golden| !golden.gradients().is_empty()).collect();
    assert_eq!(all.len(), 60);
    all.into_iter().enumerate().filter(|(i, _)| full || i % step == first).map(|(_, golden)| golden).collect()
}

/// Every gradient within its budget, in all schedules with equal bits and without a report.
fn gradients_agree(loader: Loader, dtype: DType, first: usize, step: usize) {
    let Some(emulator) = emulator(loader) else { return };
    let emulator = emulator.with_all_schedules();
    let (mut failures, mut compared, mut metal) = (Vec::new(), 0, 0);
    let goldens = goldens(first, step);
    for golden in &goldens {
        let mut findings = pollster::block_on(conformance::run(&emulator, golden, dtype));
        // A table that many pairs read is summed atomically, the one documented exception: its last bits
        // depend on the schedule, so each schedule has to agree by itself.
        let exception = |finding: &conformance::Finding| {
            let error = finding.result.as_ref().err().map(ToString::to_string);
            error.is_some_and(|error| error.contains("`rows` leaves other bytes"))
        };
        if findings.iter().any(exception) {
            findings.clear();
            for schedule in Schedule::ALL {
                emulator.set_options(Options { schedules: vec![schedule], ..Options::default() });
                findings.extend(pollster::block_on(conformance::run(&emulator, golden, dtype)));
            }
            emulator.set_options(Options { schedules: Schedule::ALL.to_vec(), ..Options::default() });
        }
        for finding in findings {
            compared += 1;
            if finding.verdict() != Verdict::Passed {
                let (name, output) = (&golden.name, &finding.output);
                failures.push(format!("{name} {output}: {:?}, budget {}", finding.result, finding.budget));
            }
        }
        let records = emulator.take_records();
        metal += records.iter().filter(|record| record.entry == "dkv" && record.counters.mma > 0).count();
    }
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), goldens.len(), failures.join("\n"));
    // Each case took its gradients from the Metal kernels, and not only out.
    assert!(metal >= goldens.len() && compared >= 4 * goldens.len(), "{metal} {compared}");
    println!("{} cases, {compared} outputs", goldens.len());
}

#[test]
fn gradients_agree_half_staged() {
    gradients_agree(Loader::Staged, DType::F16, 0, 20);
}

#[test]
fn gradients_agree_half_direct() {
    gradients_agree(Loader::Direct, DType::F16, 3, 30);
}

#[test]
fn gradients_agree_float_staged() {
    gradients_agree(Loader::Staged, DType::F32, 5, 20);
}

#[test]
fn gradients_agree_float_direct() {
    gradients_agree(Loader::Direct, DType::F32, 7, 30);
}

#[test]
fn gradients_agree_bfloat_staged() {
    gradients_agree(Loader::Staged, DType::BF16, 11, 30);
}

#[test]
fn gradients_agree_bfloat_direct() {
    gradients_agree(Loader::Direct, DType::BF16, 13, 30);
}

/// Dims beyond the goldens: several chunks of a gradient, v narrower than k, whole and partial stages.
#[test]
fn gradients_of_large_heads_agree_with_the_reference() {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    for loader in Loader::ALL {
        let Some(_) = emulator(loader) else { return };
        for (dtype, head_dim) in [(DType::F16, 192), (DType::F32, 128), (DType::F16, 512), (DType::F32, 256)]
        {
            if !full && head_dim != 512 {
                continue;
            }
            let mask = MaskMod::new(|i| (i.q() + 9).ge(i.kv()));
            let square = Case::square(Kernels::Msl(loader), dtype, 40, head_dim);
            let case = Case { q_heads: 2, mask: Some(mask), ..square };
            case.measure_backward().unwrap_or_else(|error| panic!("{dtype} {head_dim}: {error}"));
        }
    }
}

#[test]
fn gradients_with_576_and_512_columns_repeat_and_leave_nothing_unwritten() {
    for loader in Loader::ALL {
        let Some(emulator) = emulator(loader) else { return };
        let mut numbers = Numbers::new(3);
        let mut tensor = |shape: [usize; 4]| {
            let values = numbers.normals(shape.iter().product());
            Tensor::upload(&emulator, &values, shape).unwrap()
        };
        let (q, k, v) = (tensor([1, 2, 9, 576]), tensor([1, 1, 34, 576]), tensor([1, 1, 34, 512]));
        let dout = tensor([1, 2, 9, 512]);
        let attention = Attention::new();
        let output = attention.forward(&emulator, &q, &k, &v).unwrap();
        let saved = Saved::new(&q, &k, &v, &output).unwrap();
        let run = || {
            let found = attention.backward(&emulator, &saved, &dout, None, &Wanted::qkv()).unwrap();
            [found.dq, found.dk, found.dv].map(|tensor| tensor.unwrap().read().unwrap())
        };
        let first = run();
        assert!(first.iter().flatten().all(|x| x.is_finite() && *x != 0.0));
        assert_eq!(first, run());
    }
}

#[test]
fn dk_or_dv_alone_is_what_both_together_give() {
    for loader in Loader::ALL {
        let Some(emulator) = emulator(loader) else { return };
        let mut numbers = Numbers::new(5);
        let mut tensor = |shape: [usize; 4]| {
            let values = numbers.normals(shape.iter().product());
            Tensor::upload(&emulator, &values, shape).unwrap()
        };
        let (q, k, v) = (tensor([1, 2, 37, 32]), tensor([1, 1, 50, 32]), tensor([1, 1, 50, 16]));
        let dout = tensor([1, 2, 37, 16]);
        let attention = Attention::new().mask_mod(masks::causal());
        let output = attention.forward(&emulator, &q, &k, &v).unwrap();
        let saved = Saved::new(&q, &k, &v, &output).unwrap();
        let run = |k: bool, v: bool| {
            emulator.take_records();
            let wanted = Wanted { k, v, ..Wanted::default() };
            let found = attention.backward(&emulator, &saved, &dout, None, &wanted).unwrap();
            let products: u64 = emulator.take_records().iter().map(|record| record.counters.mma).sum();
            ([found.dk, found.dv].map(|tensor| tensor.map(|tensor| tensor.read().unwrap())), products)
        };
        let ([dk, dv], both) = run(true, true);
        let (alone, products) = run(true, false);
        assert_eq!(alone, [dk, None]);
        assert!(products < both);
        let (alone, products) = run(false, true);
        assert_eq!(alone, [None, dv]);
        // S and dv, of 32 and 16 columns, instead of S, dP, dv and dk.
        assert_eq!(2 * products, both);
    }
}

#[test]
#[cfg(feature = "wgpu")]
fn kinks_at_a_score_of_exactly_zero_have_the_documented_derivatives() {
    for loader in Loader::ALL {
        let Some(emulator) = emulator(loader) else { return };
        crate::backward::ops::kinks_follow_the_documented_convention(&emulator);
    }
}

/// As for forward: neither the last bits of exp2 nor the order within a product are promised, and NaN and
/// infinity may be assumed away.
#[test]
fn gradients_agree_whatever_the_hardware_leaves_open() {
    for loader in Loader::ALL {
        let Some(plain) = emulator(loader) else { return };
        let mask = MaskMod::new(|i| (i.q() + 9).ge(i.kv()) & (i.q() % 7).ne(3));
        let case = Case { mask: Some(mask), ..Case::square(Kernels::Msl(loader), DType::F16, 45, 64) };
        for (math, perturb_exp2, mma_order) in [
            (Math::Precise, 3, MmaOrder::Reverse),
            (Math::Precise, 8, MmaOrder::Pairwise),
            (Math::Fast, 0, MmaOrder::Forward),
        ] {
            let emulator = plain.clone().with_math(math);
            emulator.set_options(Options { perturb_exp2, mma_order, ..Options::default() });
            let found = case.measure_backward_on(&emulator);
            found.unwrap_or_else(|error| panic!("{math:?} {mma_order:?}: {error}"));
        }
    }
}

/// Every kind of row in one call: kept, not kept, past the end; keys that nobody keeps.
#[test]
fn rows_and_keys_that_are_not_kept_have_zero_gradients() {
    for loader in Loader::ALL {
        let Some(emulator) = emulator(loader) else { return };
        emulator.set_options(Options { schedules: Schedule::ALL.to_vec(), ..Options::default() });
        let mut numbers = Numbers::new(4);
        let mut tensor = |shape: [usize; 4]| {
            let values = numbers.normals(shape.iter().product());
            Tensor::upload(&emulator, &values, shape).unwrap()
        };
        let (q, k, v) = (tensor([1, 1, 37, 24]), tensor([1, 1, 50, 24]), tensor([1, 1, 50, 8]));
        let dout = tensor([1, 1, 37, 8]);
        let attention =
            Attention::new().mask_mod(MaskMod::new(|i| i.q().ne(5) & i.kv().ne(7) & i.kv().lt(40)));
        let output = attention.forward(&emulator, &q, &k, &v).unwrap();
        let saved = Saved::new(&q, &k, &v, &output).unwrap();
        let found = attention.backward(&emulator, &saved, &dout, None, &Wanted::qkv()).unwrap();
        let [dq, dk, dv] = [found.dq, found.dk, found.dv].map(|tensor| tensor.unwrap().read().unwrap());
        let zero = |values: &[f32]| values.iter().all(|x| *x == 0.0);
        for (row, values) in dq.chunks(24).enumerate() {
            assert_eq!(zero(values), row == 5, "dq {row}");
        }
        for (kv, (dk, dv)) in dk.chunks(24).zip(dv.chunks(8)).enumerate() {
            let dropped = kv == 7 || kv >= 40;
            assert_eq!((zero(dk), zero(dv)), (dropped, dropped), "key {kv}");
        }
    }
}

#[test]
fn gradient_fragments_fit_the_registers_and_tiles_the_threadgroup_memory() {
    for loader in Loader::ALL {
        for dtype in DType::ALL {
            for kernel in [Kernel::Dq, Kernel::Dkv] {
                for dims in (1..=640).map(|dim| [dim, dim]).chain([[576, 512], [16, 40], [192, 128]]) {
                    let tile = MslGradientTile::choose(kernel, loader, dtype, dims[0], dims[1]);
                    let registers = tile.registers();
                    assert!(
                        registers <= loader.registers(),
                        "{kernel:?} {dtype} {dims:?}: {tile} has {registers}"
                    );
                    assert!(tile.threadgroup_memory() <= 28 << 10, "{tile}");
                    assert!(tile.s_kept > 0 && tile.dp_kept > 0, "{tile}");
                    // Chunks begin where stages begin.
                    let alone = tile.chunk >= dims[0].max(dims[1]);
                    assert!(tile.areas == 2 || alone || tile.chunk.is_multiple_of(tile.stage), "{tile}");
                }
            }
        }
    }
}

#[test]
fn gradients_do_no_more_than_they_need() {
    for (loader, head_dim) in
        [(Loader::Staged, 64), (Loader::Staged, 128), (Loader::Direct, 64), (Loader::Direct, 128)]
    {
        let Some(_) = emulator(loader) else { return };
        for (mask, waste) in [(None, 1.0), (Some(masks::causal()), 1.07)] {
            let partial_tiles = if mask.is_some() { 16 } else { 0 };
            let square = Case::square(Kernels::Msl(loader), DType::F16, 512, head_dim);
            let case = Case { mask, ..square };
            let measured = crate::metal::in_a_minute(|| case.measure_backward());
            let entries: Vec<&str> = measured.iter().map(|measured| measured.record.entry).collect();
            assert_eq!(entries, ["delta", "dq", "dkv"]);
            for measured in &measured[1..] {
                let c = &measured.record.counters;
                let label = &measured.record.label;
                assert!(c.mma as f64 <= waste * measured.mma_minimum as f64, "{label} {}", c.mma);
                assert_eq!(c.mask_calls, partial_tiles * 1024, "{label}");
                assert_eq!((c.reductions, c.transcendentals), (0, c.score_calls), "{label}");
                let read = measured.device_read() as f64 / measured.device_read_minimum as f64;
                // Own columns that the registers have no room for are read again for each tile.
                let short = measured.record.entry == "dkv" && head_dim == 128 && loader == Loader::Staged;
                let again = if short { 1.45 } else { 1.07 };
                assert!(read <= again, "{label}: {read}");
                if loader == Loader::Staged {
                    assert_eq!(c.barriers, 2 * measured.kv_tiles, "{label}");
                } else {
                    assert_eq!((c.barriers, c.threadgroup_read), (0, 0), "{label}");
                }
                println!("{label}: {read:.3} {:.3}", measured.model_utilisation());
            }
        }
    }
}
