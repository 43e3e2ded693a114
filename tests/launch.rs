//! What a call costs beside its work, and the limits and driver bugs that others ran into.
//!
//! The known bugs are those of WebGPU attention elsewhere: subgroup sizes that were assumed, grids past
//! 65535, workgroup memory past 16 KiB, infinite literals, loop variables that keep their value, barriers in
//! control flow that is not uniform.

use std::collections::BTreeSet;

use flexattn::kernels::{Kernel, KernelSpec, Language, TILES, Tile, WGSL_FILES, all_specs};
use flexattn::lower::{Layout, Mods};
use flexattn::{
    Attention, BlockMask, BlockShape, DType, Gpu, Limits, MaskMod, Profile, Runtime, ScoreMod, Tensor, Tier,
    masks, wgpu,
};

/// The machine's best wgpu tier.
fn gpu() -> Option<Gpu> {
    let gpu = Gpu::new().unwrap();
    if gpu.device().is_none() {
        eprintln!("skipped: {}", gpu.report());
        return None;
    }
    Some(gpu)
}

/// Every wgpu tier that works here.
fn tiers() -> Vec<Gpu> {
    let Some(best) = gpu() else { return Vec::new() };
    let rungs = best.report().rungs.iter().filter(|rung| rung.usable && rung.tier != Tier::Cpu);
    rungs.map(|rung| Gpu::builder().tier(rung.tier).build().unwrap()).collect()
}

/// A device of the program's own on the best adapter, and its best tier.
fn with_limits(change: impl FnOnce(&mut wgpu::Limits)) -> Gpu {
    on_tier(None, change).unwrap()
}

/// The same on a tier of choice.
fn on_tier(tier: Option<Tier>, change: impl FnOnce(&mut wgpu::Limits)) -> flexattn::Result<Gpu> {
    let (adapter, device, queue) = crate::gpu::device(change);
    pollster::block_on(Gpu::from_wgpu_async(&adapter, device, queue, tier))
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

fn tensor(gpu: &Gpu, seed: u32, shape: [usize; 4], dtype: DType) -> Tensor {
    let values = values(seed, shape.iter().product());
    flexattn_testing::conformance::upload(gpu, dtype, &values, &shape).unwrap()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let apart = |(a, b): (&f32, &f32)| if a == b { 0.0 } else { (a - b).abs() };
    // Not max(): a NaN must not pass.
    a.iter().zip(b).map(apart).fold(0.0, |m, x| if x <= m { m } else { x })
}

// Launch cost.

#[test]
fn later_calls_are_one_submit_and_make_no_buffer_no_bind_group_and_no_pipeline() {
    let Some(gpu) = gpu() else { return };
    let attention = Attention::new().mask_mod(masks::causal()).with_lse(false);
    // Prefill, and decode with its scratch.
    for (q_len, kv_len) in [(96, 96), (1, 1024)] {
        let q = tensor(&gpu, 1, [1, 2, q_len, 16], DType::F32);
        let kv = tensor(&gpu, 2, [1, 2, kv_len, 16], DType::F32);
        let out = gpu.zeros(DType::F32, [1, 2, q_len, 16]).unwrap();
        let offset = (kv_len - q_len) as i32;
        let attention = attention.clone().q_offset(offset);
        let call = || attention.forward_into(&gpu, &q, &kv, &kv, &out).unwrap();
        call();
        let (built, before) = (gpu.pipelines_built(), gpu.held());
        (0..20).for_each(|_| drop(call()));
        let after = gpu.held();
        assert_eq!(after.submits - before.submits, 20, "one submit a call");
        assert_eq!(gpu.pipelines_built(), built);
        assert_eq!(after.scratch_bytes, before.scratch_bytes);
        assert_eq!(after.constants, before.constants);
        // Parameters lie in an arena, which takes a new chunk, and with it a new bind group for each kernel,
        // every few hundred launches.
        assert!(after.buffers_made - before.buffers_made <= 1, "{before:?} {after:?}");
        assert!(after.bind_groups_made - before.bind_groups_made <= 2, "{before:?} {after:?}");
    }
}

#[test]
fn an_arena_of_parameters_takes_hundreds_of_calls_before_it_allocates() {
    let Some(gpu) = gpu() else { return };
    let q = tensor(&gpu, 1, [1, 1, 8, 8], DType::F32);
    let out = gpu.zeros(DType::F32, [1, 1, 8, 8]).unwrap();
    let attention = Attention::new().with_lse(false);
    let call = || attention.forward_into(&gpu, &q, &q, &q, &out).unwrap();
    call();
    let before = gpu.held().buffers_made;
    (0..500).for_each(|_| drop(call()));
    let made = gpu.held().buffers_made - before;
    assert!(made <= 5, "{made} buffers in 500 calls");
}

#[test]
fn work_of_seconds_is_cut_into_submits() {
    let Some(gpu) = gpu() else { return };
    let q = gpu.zeros(DType::F32, [1, 64, 4096, 64]).unwrap();
    let plan = Attention::new().plan(&gpu, [&q, &q, &q, &q]).unwrap();
    let budget = flexattn::plan::Plan::budget(gpu.profile());
    assert!(plan.work() > 2.0 * budget, "this call has to be longer than a submit may be");
    assert!(plan.passes.iter().all(|pass| pass.work <= budget));
}

// Results.

#[test]
fn results_are_the_same_bits_every_time_on_every_tier() {
    for gpu in tiers() {
        let types: &[DType] = if gpu.tier() == Tier::CoopMatrix { &[DType::F16] } else { &[DType::F32] };
        for &dtype in types {
            for (q_len, kv_len) in [(70, 130), (1, 700)] {
                let q = tensor(&gpu, 1, [1, 4, q_len, 24], dtype);
                let kv = tensor(&gpu, 2, [1, 2, kv_len, 24], dtype);
                let window = MaskMod::new(|i| (i.kv() % 3).ne(1));
                let attention = Attention::new().mask_mod(window).with_max(true);
                let run = || {
                    let output = attention.forward(&gpu, &q, &kv, &kv).unwrap();
                    let stats = [output.lse.unwrap(), output.max.unwrap()];
                    let [lse, max] = stats.map(|stat| stat.read().unwrap());
                    [output.out.read().unwrap(), lse, max]
                        .map(|it| it.into_iter().map(f32::to_bits).collect())
                };
                let first: [Vec<u32>; 3] = run();
                for _ in 0..3 {
                    assert!(run() == first, "{} {dtype} {q_len}x{kv_len}", gpu.tier());
                }
            }
        }
    }
}

#[test]
fn tuning_changes_tiles_but_not_results_and_is_kept_in_a_file() {
    let Some(gpu) = gpu() else { return };
    let file = std::env::temp_dir().join(format!("flexattn-tiles-{}.txt", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let tuned = gpu.tune(&file, &[16]).unwrap();
    if matches!(gpu.tier(), Tier::Metal | Tier::Cpu) {
        return;
    }
    let kept = std::fs::read_to_string(&file).unwrap();
    let built = gpu.pipelines_built();
    let again = gpu.tune(&file, &[16]).unwrap();
    assert_eq!(gpu.pipelines_built(), built, "the file is read, and nothing is tried again");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), kept);
    let adapter = gpu.report().adapter.as_ref().unwrap();
    assert!(kept.starts_with("flexattn ") && kept.contains(&adapter.name), "{kept}");
    assert!(kept.lines().count() >= 2, "{kept}");
    // A file of another adapter is not believed.
    std::fs::write(&file, kept.replace(&adapter.name, "another adapter")).unwrap();
    gpu.tune(&file, &[16]).unwrap();
    assert!(std::fs::read_to_string(&file).unwrap().contains(&adapter.name));
    std::fs::remove_file(&file).unwrap();

    let q = tensor(&gpu, 1, [1, 2, 90, 16], DType::F32);
    let run = |gpu: &Gpu| Attention::new().forward(gpu, &q, &q, &q).unwrap().out.read().unwrap();
    let plain = run(&gpu);
    for tuned in [tuned, again] {
        assert!(largest_difference(&run(&tuned), &plain) < 2e-6);
    }
}

#[test]
fn every_tile_of_the_subgroup_and_portable_kernels_computes_the_same() {
    // The table's first row is what the other tests run; these are what tuning may choose.
    for gpu in tiers() {
        let kernel = match gpu.tier() {
            Tier::Subgroup => Kernel::ForwardSubgroup,
            Tier::Portable => Kernel::Forward,
            _ => continue,
        };
        let q = tensor(&gpu, 1, [1, 2, 150, 64], DType::F32);
        let attention =
            Attention::new().mask_mod(masks::causal() & MaskMod::new(|i| (i.q() - i.kv()).lt(70)));
        let expected = attention.forward(&gpu, &q, &q, &q).unwrap().out.read().unwrap();
        let tiles: Vec<Tile> = Tile::candidates(kernel, DType::F32, 64, 64, gpu.profile()).collect();
        let mut seen = BTreeSet::new();
        for tile in tiles.into_iter().filter(|tile| seen.insert(tile.to_string())).take(4) {
            let mut tuning = flexattn::kernels::Tuning::default();
            tuning.set(kernel, DType::F32, 64, tile);
            let file = std::env::temp_dir().join(format!("flexattn-{tile}-{}.txt", std::process::id()));
            let adapter = gpu.report().adapter.clone().unwrap();
            let title = format!(
                "flexattn {} {} on {}, {}\n",
                env!("CARGO_PKG_VERSION"),
                gpu.tier(),
                adapter.name,
                adapter.driver
            );
            let mut both = tuning.clone();
            both.set(
                kernel,
                DType::F16,
                64,
                Tile::candidates(kernel, DType::F16, 64, 64, gpu.profile()).next().unwrap(),
            );
            std::fs::write(&file, format!("{title}{both}")).unwrap();
            let tuned = gpu.tune(&file, &[64]).unwrap();
            std::fs::remove_file(&file).unwrap();
            assert_eq!(Attention::new().plan(&tuned, [&q; 4]).unwrap().passes[0].spec.tile, tile);
            let out = attention.forward(&tuned, &q, &q, &q).unwrap().out.read().unwrap();
            assert!(largest_difference(&out, &expected) < 2e-6, "{tile}");
        }
        assert!(seen.len() >= 2);
    }
}

// Limits.

#[test]
fn keys_longer_than_a_binding_are_attended_to_in_ranges_and_merged() {
    let Some(whole) = gpu() else { return };
    let gpu = with_limits(|limits| limits.max_storage_buffer_binding_size = 64 << 10);
    for (dtype, q_len, allowed) in [(DType::F32, 40, 2e-6), (DType::F32, 1, 2e-6), (DType::F16, 40, 2e-3)] {
        let kv_len = if dtype == DType::F32 { 700 } else { 1400 };
        let offset = (kv_len - q_len) as i32;
        let keep = MaskMod::new(|i| ((i.q() + i.kv() + i.head()) % 3).ne(0));
        let attention = Attention::new()
            .mask_mod(masks::causal() & (keep | MaskMod::new(|i| i.q().lt(offset + 3) & i.kv().ge(650))))
            .score_mod(ScoreMod::new(|s| s.score() + (s.kv() - s.q()).to_f32() * 0.01))
            .sinks([0.5, -1.0, 2.0, 0.0])
            .kv_len([kv_len as u32, 650])
            .q_offset(offset)
            .with_max(true);
        let run = |gpu: &Gpu| {
            let q = tensor(gpu, 1, [2, 4, q_len, 64], dtype);
            let [k, v] = [2, 3].map(|seed| tensor(gpu, seed, [2, 2, kv_len, 64], dtype));
            let plan = attention.plan(gpu, [&q, &k, &v, &q]).unwrap();
            let output = attention.forward(gpu, &q, &k, &v).unwrap();
            let [lse, max] = [output.lse.unwrap(), output.max.unwrap()].map(|stat| stat.read().unwrap());
            (output.out.read().unwrap(), lse, max, plan)
        };
        let (ranged, expected) = (run(&gpu), run(&whole));
        assert!(ranged.3.passes.iter().any(|pass| pass.spec.kernel == Kernel::Merge));
        let apart = [
            largest_difference(&ranged.0, &expected.0),
            largest_difference(&ranged.1, &expected.1),
            largest_difference(&ranged.2, &expected.2),
        ];
        assert!(apart[0] < allowed && apart[1] < 1e-5 && apart[2] < 1e-5, "{dtype} {q_len}: {apart:?}");
    }
}

#[test]
fn more_than_65535_workgroups_are_folded_and_all_of_them_run() {
    let Some(gpu) = gpu() else { return };
    let heads = 70_000;
    let q = gpu.zeros(DType::F32, [1, heads, 1, 4]).unwrap();
    let v = tensor(&gpu, 3, [1, heads, 1, 4], DType::F32);
    let output = Attention::new().with_lse(false).forward(&gpu, &q, &q, &v).unwrap();
    let plan = Attention::new().plan(&gpu, [&q, &q, &v, &output.out]).unwrap();
    assert!(plan.passes.iter().any(|pass| pass.grid[1] > 1), "{:?}", plan.passes[0].grid);
    // One key: out is its value.
    assert_eq!(output.out.read().unwrap(), v.read().unwrap());
}

#[test]
fn a_device_with_webgpus_least_limits_runs_every_head_dim() {
    if gpu().is_none() {
        return;
    }
    let floor = wgpu::Limits::default();
    // The kernels of Portable are those that use workgroup memory.
    for tier in [Tier::Portable, Tier::Subgroup] {
        let gpu = on_tier(Some(tier), |limits| {
            limits.max_compute_workgroup_storage_size = floor.max_compute_workgroup_storage_size;
            limits.max_compute_invocations_per_workgroup = floor.max_compute_invocations_per_workgroup;
            limits.max_compute_workgroup_size_x = floor.max_compute_workgroup_size_x;
        });
        let gpu = match gpu {
            Ok(gpu) => gpu,
            Err(reason) => {
                println!("skipped: {tier}: {reason}");
                continue;
            }
        };
        assert_eq!(gpu.profile().limits.workgroup_memory, 16 << 10);
        for dtype in [DType::F32, DType::F16] {
            for dim in [8, 128, 320] {
                // Prefill, and decode.
                for (q_len, kv_len) in [(5, 5), (1, 600)] {
                    let q = tensor(&gpu, 1, [1, 1, q_len, dim], dtype);
                    let kv = tensor(&gpu, 2, [1, 1, kv_len, dim], dtype);
                    let attention = Attention::new().scale(0.0);
                    let plan = attention.plan(&gpu, [&q, &kv, &kv, &q]).unwrap();
                    let decodes = plan.passes.iter().any(|pass| pass.spec.kernel == Kernel::DecodeCombine);
                    assert_eq!(decodes, q_len == 1);
                    let memory: Vec<u32> =
                        plan.passes.iter().map(|pass| pass.spec.workgroup_memory()).collect();
                    assert!(memory.iter().all(|bytes| *bytes <= 16 << 10), "{memory:?}");
                    assert!(tier != Tier::Portable || memory[0] > 4 << 10, "{memory:?}");
                    let out = attention.forward(&gpu, &q, &kv, &kv).unwrap().out.read().unwrap();
                    // With scale 0 every row is the mean of the values.
                    let values = kv.read().unwrap();
                    let column = |d: usize| (0..kv_len).map(|row| values[row * dim + d]).sum::<f32>();
                    let mean: Vec<f32> = (0..dim).map(|d| column(d) / kv_len as f32).collect();
                    let allowed = if dtype == DType::F32 { 1e-6 } else { 1e-3 };
                    let apart = largest_difference(&out[..dim], &mean);
                    assert!(apart < allowed, "{tier} {dtype} {dim} {q_len}x{kv_len}: {apart}");
                }
            }
        }
    }
}

#[test]
fn subgroups_of_4_lanes_are_left_to_portable_and_of_128_change_nothing() {
    // The probe's rule; a browser's and an adapter's sizes go through the same.
    assert!(Profile::subgroups_suit(4).unwrap_err().to_string().contains("4 lanes"));
    assert!(Profile::subgroups_suit(0).is_err(), "unknown sizes");
    for size in [8, 16, 32, 64, 128] {
        assert!(Profile::subgroups_suit(size).is_ok());
    }
    // Kernels for clusters of eight lanes never ask how wide a subgroup is, so it cannot matter.
    for spec in all_specs().iter().filter(|spec| spec.kernel.uses_subgroups() && !spec.kernel.uses_matrices())
    {
        let text = spec.text(Language::Wgsl).unwrap();
        for asked in
            ["subgroup_size", "num_subgroups", "subgroup_id)", "subgroupAdd", "subgroupMax", "subgroupAll"]
        {
            assert!(!text.contains(asked), "{} reads {asked}", spec.label());
        }
    }
    // And the choice of kernel is the same.
    let profile = |size| Profile { subgroup_min: size, subgroup_max: size, ..Profile::floor(Tier::Subgroup) };
    let tile = |size| Tile::choose(Kernel::ForwardSubgroup, DType::F32, 64, 64, &profile(size)).unwrap();
    assert_eq!(tile(8), tile(128));
}

#[test]
fn tiles_keep_to_the_memory_and_the_invocations_of_the_device() {
    for kernel in [Kernel::Forward, Kernel::ForwardSubgroup] {
        for (workgroup_memory, invocations) in
            [(16 << 10, 256), (32 << 10, 256), (32 << 10, 1024), (16 << 10, 64)]
        {
            let limits = Limits { workgroup_memory, invocations, ..Limits::default() };
            let profile = Profile { limits, ..Profile::floor(Tier::Subgroup) };
            for dtype in DType::ALL {
                for dim in [32, 64, 128, 256] {
                    // Wider heads take the kernel without subgroup operations.
                    if kernel.uses_subgroups() && dim > 64 {
                        continue;
                    }
                    let mut count = 0;
                    for tile in Tile::candidates(kernel, dtype, dim, dim, &profile) {
                        let spec = KernelSpec {
                            tile,
                            ..KernelSpec::new(kernel, dtype, dim, dim, 32 << 10).unwrap()
                        };
                        assert!(spec.workgroup_memory() <= workgroup_memory && tile.threads <= invocations);
                        count += 1;
                    }
                    assert!(count > 0, "{kernel:?} {dtype} {dim}");
                }
            }
        }
    }
    assert!(
        TILES.iter().any(|row| row.tile.threads > 64),
        "there are rows for devices with many invocations"
    );
}

// What compilers got wrong.

/// The text of every kernel, and of one with mods that read constants of every kind.
fn texts() -> Vec<(String, String)> {
    let mut texts: Vec<(String, String)> =
        WGSL_FILES.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
    let score = ScoreMod::new(|s| s.q().ge(s.kv()).select(s.score(), f32::NEG_INFINITY) * f32::INFINITY);
    let mask = MaskMod::new(|i| i.q().to_f32().lt(f32::INFINITY));
    let exprs = [score.expr().clone(), mask.expr().clone()];
    let layout = Layout::new(exprs.iter(), None);
    let [score, mask] = exprs.map(Some);
    let mods = Mods { score, mask, ..Mods::default() };
    for kernel in [Kernel::Forward, Kernel::ForwardSubgroup, Kernel::DecodeSplit] {
        let spec = KernelSpec::new(kernel, DType::F32, 64, 64, 32 << 10).unwrap();
        let spec = KernelSpec { mods: mods.clone(), layout: layout.clone(), ..spec };
        texts.push((spec.label(), spec.text(Language::WgslWeb).unwrap()));
    }
    texts
}

/// The number, or the division by one, in a line of WGSL that is infinite when it is compiled.
fn infinite(code: &str) -> Option<&str> {
    let of_word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    // `e+39` and `e-7` belong to the number before the sign.
    let words = code.char_indices().filter(|&(at, c)| of_word(c) && !code[..at].ends_with(of_word));
    for (at, _) in words {
        let mut rest = code[at..].char_indices().peekable();
        let number = code[at..].starts_with(|c: char| c.is_ascii_digit() || c == '.');
        let hex = code[at..].starts_with("0x");
        let mut before = ' ';
        let length = loop {
            let Some(&(length, c)) = rest.peek() else { break code.len() - at };
            let signed = number && !hex && matches!(c, '+' | '-') && matches!(before, 'e' | 'E');
            if !of_word(c) && !signed {
                break length;
            }
            before = c;
            rest.next();
        };
        let word = &code[at..at + length];
        if ["inf", "infinity"].contains(&word.to_lowercase().as_str()) {
            return Some(word);
        }
        if !number || hex {
            continue;
        }
        let digits = word.trim_end_matches(['f', 'h', 'i', 'u']);
        let Ok(value) = digits.parse::<f64>() else { continue };
        let largest = if word.ends_with('h') { 65_504.0 } else { f64::from(f32::MAX) };
        let divides = code[..at].trim_end().ends_with('/');
        if value > largest || divides && value == 0.0 {
            return Some(&code[..at + length]);
        }
    }
    None
}

#[test]
fn infinite_literals_are_told_from_finite_ones() {
    for code in [
        "let x = 1.0/0.0;",
        "let x = -1.0 / 0.0;",
        "f(0f / 0f)",
        "let x = 1e39;",
        "x = -3.5E+99f;",
        "1.0e99",
        "70000.0h",
        "x = inf;",
        "-INFINITY",
    ] {
        assert!(infinite(code).is_some(), "{code}");
    }
    for code in [
        "x / 0.5",
        "1.0 / p.zero",
        "info + name39",
        "3.4e38",
        "1e-39",
        "0xff800000u",
        "0x1e99u",
        "x / 0x10u",
        "a[0].x",
        "65504.0h",
        "minus_infinity()",
        "1e+5 / 10",
    ] {
        assert_eq!(infinite(code), None, "{code}");
    }
}

#[test]
fn no_kernel_writes_an_infinite_literal_or_a_constant_that_is_one() {
    for (name, text) in texts() {
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            // Tint refuses `bitcast<f32>(0xff800000u)`: what it is given must not be a constant.
            let constant = code.contains("bitcast<f32>(0x") && !code.contains("+ p.zero");
            assert!(!constant && infinite(code).is_none(), "{name}:{}: {line}", number + 1);
        }
    }
}

#[test]
fn every_variable_of_a_function_has_an_initial_value() {
    // Tint does not set a variable to zero again when a loop comes round.
    let mut seen = 0;
    for (name, text) in texts() {
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default().trim();
            for declared in code.split("var ").skip(1) {
                let statement = declared.split(';').next().unwrap_or_default();
                assert!(statement.contains('='), "{name}:{}: {line}", number + 1);
                seen += 1;
            }
        }
    }
    assert!(seen > 100);
}

#[test]
fn what_decides_about_barriers_is_bound_read_only() {
    // Tint refuses barriers in loops that end by a value from a writable buffer; that it takes every kernel
    // is the suite `tint`.
    for spec in all_specs() {
        let text = spec.text(Language::Wgsl).unwrap();
        assert!(text.contains("var<storage, read> tables: array<u32>"), "{}", spec.label());
        assert!(text.contains("var<uniform> p: Params"), "{}", spec.label());
    }
}

#[test]
fn integer_division_by_zero_and_past_the_end_means_the_same_on_every_tier() {
    let len = 48;
    let texts = [
        "(q + 7) / (kv - q) == q + 7",
        "(q + 7) % (kv - q) == 0",
        "-2147483648 / (kv - q) < 0",
        "(q == kv + 1) & (-2147483648 / (kv - q) == -2147483648)",
        "(q == kv + 1) & (-2147483648 % (kv - q) == 0)",
        "u32(q + 7) / u32(kv / 5) == u32(q + 7)",
        "u32(q + 7) % u32(kv / 5) == 0u",
        "floor_div(q + 7, kv - q) == q + 7",
        "floor_mod(q + 7, kv - q) == 0",
    ];
    for tier in [Tier::Portable, Tier::Subgroup, Tier::Cpu] {
        let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
        // With v the identity, out is not 0 where a pair is kept.
        let zeros = gpu.zeros(DType::F32, [1, 1, len, 4]).unwrap();
        let identity: Vec<f32> = (0..len * len).map(|i| f32::from(u8::from(i % len == i / len))).collect();
        let v = gpu.tensor(&identity, [1, 1, len, len]).unwrap();
        for text in texts {
            let mask = MaskMod::from_wgsl(text, &[], &[]).unwrap();
            let expected =
                BlockMask::build(&mask, BlockShape::new(1, 1, len, len)).unwrap().to_mask().unwrap();
            assert!(expected.contains(&true) && expected.contains(&false), "{text}");
            let out = Attention::new()
                .mask_mod(mask)
                .forward(&gpu, &zeros, &zeros, &v)
                .unwrap()
                .out
                .read()
                .unwrap();
            let kept: Vec<bool> = out.iter().map(|&x| x > 0.0).collect();
            assert_eq!(kept, expected, "{tier}: {text}");
        }
    }
}
