//! Every golden case on the reference and on every tier that this machine has.
//!
//! One body for all tiers. A tier that is not here is printed as `skipped`; slow ones run a subset unless
//! FLEXATTN_FULL=1.

use std::any::Any;

use flexattn::reference::{self, Problem};
use flexattn::{AttentionShape, Capture, Cpu, DType, Layout, MaskMod, Runtime};
use flexattn_testing::conformance::{self, Verdict};
use flexattn_testing::{Budget, Golden};

fn goldens() -> Vec<Golden> {
    let files = Golden::files(Golden::directory()).unwrap();
    files.iter().map(|file| Golden::load(file).unwrap_or_else(|e| panic!("{e}"))).collect()
}

/// Outputs by name, as the golden files name them.
fn reference_outputs(golden: &Golden) -> flexattn::Result<Vec<(String, Vec<f64>)>> {
    let layout = |shape: &[usize]| Layout::contiguous([shape[0], shape[1], shape[2], shape[3]]);
    let shape =
        AttentionShape::new(&layout(&golden.q.shape)?, &layout(&golden.k.shape)?, &layout(&golden.v.shape)?)?;
    let (score_mod, mask_mod) = (golden.score_mod()?, golden.mask_mod()?);
    let problem = Problem {
        scale: golden.scale,
        score_mod: score_mod.as_ref(),
        mask_mod: mask_mod.as_ref(),
        ..Problem::new(shape, golden.q.f32(), golden.k.f32(), golden.v.f32())
    };
    let mut outputs = Vec::new();
    let mut gradients =
        |problem: &Problem<'_>, dout: &str, dlse: &str, suffix: &str| -> flexattn::Result<()> {
            let Some(dout) = golden.values(dout) else { return Ok(()) };
            let gradients = reference::backward(problem, dout, golden.values(dlse).unwrap_or(&[]))?;
            for (name, values) in [("dq", gradients.dq), ("dk", gradients.dk), ("dv", gradients.dv)] {
                outputs.push((format!("{name}{suffix}"), values));
            }
            outputs.extend(
                gradients.captures.into_iter().map(|(name, values)| (format!("dcap.{name}"), values)),
            );
            if !gradients.sinks.is_empty() {
                outputs.push(("dcap.sink".to_owned(), gradients.sinks));
            }
            Ok(())
        };
    gradients(&problem, "dout", "dlse", "")?;
    let forward = reference::forward(&problem)?;
    if let Some(sinks) = &golden.sinks {
        let problem = Problem { sinks, ..problem };
        gradients(&problem, "dout_sink", "", "_sink")?;
        outputs.push(("out_sink".to_owned(), reference::forward(&problem)?.out));
    }
    outputs.extend([
        ("out".to_owned(), forward.out),
        ("lse".to_owned(), forward.lse),
        ("max".to_owned(), forward.max),
    ]);
    Ok(outputs)
}

#[test]
fn the_reference_takes_rows_without_keys_and_refuses_shapes_that_do_not_fit_themselves() {
    let shape = AttentionShape {
        batch: 1,
        kv_batch: 1,
        q_heads: 2,
        kv_heads: 2,
        q_len: 1,
        kv_len: 3,
        head_dim: 1,
        v_dim: 1,
    };
    let table = Capture::i32("table", &[0, 0, 1], &[3]).unwrap();
    let mask = MaskMod::new(|i| table.at([i.q()]).eq(table.at([i.kv()])));
    let values = [1.0f32; 6];
    let none = Problem {
        mask_mod: Some(&mask),
        kv_len: &[0],
        sinks: &[f32::NEG_INFINITY; 2],
        ..Problem::new(shape, &values[..2], &values, &values)
    };
    let forward = reference::forward(&none).unwrap();
    assert_eq!((forward.out, forward.lse), (vec![0.0; 2], vec![f64::NEG_INFINITY; 2]));
    assert_eq!(reference::weights(&none, [0, 1, 0]).unwrap(), [0.0; 3]);
    assert_eq!(reference::backward(&none, &[1.0; 2], &[]).unwrap().dv, [0.0; 6]);

    let huge = usize::MAX / 2;
    for wrong in [
        AttentionShape { kv_heads: 0, ..shape },
        AttentionShape { q_heads: 3, ..shape },
        AttentionShape { batch: 3, kv_batch: 2, ..shape },
        AttentionShape { q_len: huge, head_dim: huge, ..shape },
    ] {
        let error = reference::forward(&Problem::new(wrong, &values, &values, &values)).unwrap_err();
        assert!(error.is_shape(), "{error}");
    }
}

#[test]
fn reference_agrees_with_every_golden() {
    let (mut cases, mut with_gradients, mut failures) = (0, 0, Vec::new());
    for golden in goldens() {
        let outputs = reference_outputs(&golden).unwrap_or_else(|e| panic!("{}: {e}", golden.name));
        let mut wanted = vec!["out".to_owned(), "lse".to_owned(), "max".to_owned()];
        wanted.extend(golden.gradients());
        wanted.extend(golden.sink_gradients());
        wanted.extend(golden.values("out_sink").map(|_| "out_sink".to_owned()));
        for name in &wanted {
            let gold = golden.values(name).unwrap();
            let Some((_, got)) = outputs.iter().find(|(found, _)| found == name) else {
                failures.push(format!("{}: no {name}", golden.name));
                continue;
            };
            // The gold was rounded to f32 once, and so were constants in the mods.
            let off = |(&gold, &got): (&f32, &f64)| {
                let gold = f64::from(gold);
                let close = (gold - got).abs() <= 1e-6 * gold.abs().max(1.0);
                gold != got && !close
            };
            let wrong = gold.iter().zip(got).filter(|&pair| off(pair)).count();
            if gold.len() != got.len() || wrong > 0 {
                failures.push(format!("{}: {wrong} of {} elements of {name}", golden.name, gold.len()));
            }
        }
        cases += 1;
        with_gradients += usize::from(!golden.gradients().is_empty());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!((cases, with_gradients), (88, 60));
}

/// What slow tiers run: each differs from the others in a part of the definition.
#[cfg(feature = "wgpu")]
const SUBSET: [&str; 15] = [
    "bias4d_bhqk",
    "bkv1_b3_causal",
    "bottom_right_q33_kv65",
    "builtins_grad",
    "d3_s34_inverse_causal",
    "decode_q1_offset",
    "ev_gt_e_16_40",
    "flamingo_q50_kv33",
    "gqa3_causal",
    "len129_causal_relbias_b128",
    "neginf_bias",
    "poison_nan_bias",
    "real_minilm_l5_packed",
    "sink",
    "t5_buckets",
];

/// Every output of every case within its budget, in these dtypes. What a tier does not support is printed.
fn agrees<R: Runtime>(runtime: &R, goldens: &[Golden], dtypes: &[DType])
where
    R::Buffer: Any + PartialEq,
{
    let (mut passed, mut failures) = (0, Vec::new());
    for (golden, dtype) in goldens.iter().flat_map(|golden| dtypes.iter().map(move |&dtype| (golden, dtype)))
    {
        for finding in pollster::block_on(conformance::run(runtime, golden, dtype)) {
            let name = format!("{} {dtype} {}", golden.name, finding.output);
            match finding.verdict() {
                Verdict::Passed => passed += 1,
                Verdict::Failed => {
                    failures.push(format!("{name}: {:?}, budget {}", finding.result, finding.budget))
                }
                Verdict::Skipped => println!("skipped {name}: {:?}", finding.result),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(passed > 0, "no output was computed");
}

/// What the tests of the npm package allow, so that the rule is said once: `{case: {dtype: {output: [mean, max,
/// relative]}}}`, `null` where there is no bound.
#[test]
fn the_budgets_of_the_npm_package_are_those_of_every_other_tier() {
    let number = |bound: f64| if bound.is_finite() { format!("{bound:e}") } else { "null".to_owned() };
    let budget = |golden: &Golden, output: &str, dtype| {
        let Budget { mean, max, relative } = Budget::of(golden, output, dtype);
        format!("\"{output}\":[{},{},{}]", number(mean), number(max), number(relative))
    };
    let case = |golden: &Golden| {
        let names = ["out", "lse", "max"].map(str::to_owned).into_iter().chain(golden.gradients());
        let names: Vec<String> = names.collect();
        let dtypes = DType::ALL.map(|dtype| {
            let outputs: Vec<String> = names.iter().map(|output| budget(golden, output, dtype)).collect();
            format!("\"{dtype}\":{{{}}}", outputs.join(","))
        });
        format!("\"{}\":{{{}}}", golden.name, dtypes.join(","))
    };
    let cases: Vec<String> = goldens().iter().map(case).collect();
    let text = format!("{{\n{}\n}}\n", cases.join(",\n"));
    crate::kernels::snapshot("web/budgets.json", &text);
}

#[test]
fn cpu_tier_agrees_with_every_golden() {
    agrees(&Cpu::new(), &goldens(), &DType::ALL);
}

#[test]
fn block_lists_agree_with_every_golden() {
    let (mut blocks, mut failures) = (0, Vec::new());
    for golden in goldens() {
        if let Some((count, differing)) =
            conformance::blocks(&golden).unwrap_or_else(|e| panic!("{}: {e}", golden.name))
        {
            blocks += count;
            failures.extend(differing.into_iter().map(|what| format!("{}: {what}", golden.name)));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(blocks > 500, "{blocks} blocks");
}

/// The tiers of a GPU, or of its software stand-in.
#[cfg(feature = "wgpu")]
mod gpu_tiers {
    use super::{SUBSET, agrees, goldens};
    use crate::watched::Watched;
    use flexattn::{DType, Gpu, Profile, Tier};
    use flexattn_testing::Golden;
    use std::rc::Rc;

    /// Whether a tier that is not here may not be passed over. Only wgpu's Metal backend gives these reasons,
    /// and there the Metal tier must work, but on a GPU that is too old for it.
    fn must_have(tier: Tier, reason: &str) -> bool {
        let ours = ["the canary kernel", "the forward kernel", "passthrough-shaders"];
        tier == Tier::Metal && ours.iter().any(|what| reason.contains(what))
    }

    /// The subset is run in these element types, everything in all. A GPU with the Metal tier is fast
    /// enough for everything.
    fn on(tier: Tier, dtypes: &[DType]) {
        let gpu = match Gpu::builder().tier(tier).build() {
            Ok(gpu) => gpu,
            Err(error) => {
                let reason = error.to_string();
                assert!(!must_have(tier, &reason), "{reason}");
                return println!("{tier} skipped: {reason}");
            }
        };
        let full = std::env::var_os("FLEXATTN_FULL").is_some_and(|full| full == "1");
        if full || tier == Tier::Metal {
            return agrees(&gpu, &goldens(), &DType::ALL);
        }
        let subset: Vec<Golden> = SUBSET.iter().map(|name| Golden::shipped(name).unwrap()).collect();
        println!("{tier}: {} cases in {dtypes:?}; FLEXATTN_FULL=1 runs all, in every type", subset.len());
        agrees(&gpu, &subset, dtypes);
        agrees(&gpu, &subset[..WITH_BF16], &[DType::BF16]);
    }

    /// As many cases of the subset run in bf16 too.
    const WITH_BF16: usize = 3;

    /// Tiles for hardware, and f16 read as such where the adapter can: a software adapter has others of its own.
    #[test]
    fn kernels_for_hardware_agree_with_the_goldens_on_whatever_adapter_is_here() {
        for gpu in crate::tiers::here(&[Tier::Portable, Tier::Subgroup]) {
            let mut on = Watched::over(gpu);
            on.profile = Rc::new(Profile { software: false, ..(*on.profile).clone() });
            let some =
                ["builtins_grad", "decode_q1_offset", "ev_gt_e_16_40", "gqa3_causal", "sink", "t5_buckets"];
            let goldens: Vec<Golden> = some.iter().map(|name| Golden::shipped(name).unwrap()).collect();
            println!("{}, f16 {}", on.profile.tier, on.profile.f16);
            agrees(&on, &goldens, &FEWER);
        }
    }

    const FEWER: [DType; 2] = [DType::F32, DType::F16];

    #[test]
    fn portable_tier_agrees_with_the_goldens() {
        on(Tier::Portable, &FEWER);
    }

    #[test]
    fn subgroup_tier_agrees_with_the_goldens() {
        on(Tier::Subgroup, &FEWER);
    }

    #[test]
    fn coop_matrix_tier_agrees_with_the_goldens() {
        on(Tier::CoopMatrix, &FEWER);
    }

    /// On a Mac; elsewhere the Metal kernels run in the emulator, see `metal.rs`.
    #[test]
    fn metal_tier_agrees_with_the_goldens() {
        on(Tier::Metal, &DType::ALL);
    }

    #[test]
    fn a_mac_that_refuses_the_metal_kernels_does_not_pass() {
        for (tier, reason, fails) in [
            (
                Tier::Metal,
                "tier metal was asked for but does not work on M1: the canary kernel failed: x",
                true,
            ),
            (Tier::Metal, "the canary kernel multiplied 8x8 matrices wrongly", true),
            (Tier::Metal, "the forward kernel does not compile: x", true),
            (Tier::Metal, "the adapter lacks passthrough-shaders", true),
            (Tier::Metal, "the backend is Vulkan, not Metal", false),
            (Tier::Metal, "the GPU is older than family Apple7 (M1): it has no simdgroup matrices", false),
            (Tier::Subgroup, "the probe kernel failed: x", false),
        ] {
            assert_eq!(must_have(tier, reason), fails, "{reason}");
        }
    }
}
