//! Plans without any device.

use super::*;
use crate::block_mask::{BlockShape, OpenMask};
use crate::expr::{Capture, CaptureData, CaptureType, Captured, DeviceHandle, I32};
use crate::masks;
use crate::runtime::{Limits, Resident};

fn operand(layout: Layout) -> Operand {
    Operand { layout, buffer: layout.end() as u64 * 4 }
}

struct Sizes {
    batch: usize,
    heads: [usize; 2],
    lengths: [usize; 2],
    dim: usize,
}

/// A call on contiguous f32 tensors.
fn plan(sizes: &Sizes, profile: &Profile, cache: &Cache, mask: Option<&MaskMod>) -> Result<Plan> {
    let Sizes { batch, heads: [q_heads, kv_heads], lengths: [q_len, kv_len], dim } = *sizes;
    let q = Layout::contiguous([batch, q_heads, q_len, dim])?;
    let k = Layout::contiguous([batch, kv_heads, kv_len, dim])?;
    let shape = AttentionShape::new(&q, &k, &k)?;
    let call = Forward {
        shape,
        dtype: DType::F32,
        q: operand(q),
        k: operand(k),
        v: operand(k),
        out: operand(q),
        pooled: false,
        scale: shape.scale(),
        q_offset: &vec![0; batch],
        kv_len: &vec![kv_len as u32; batch],
        sinks: None,
        mask,
        score: None,
        block_mask: None,
        lse: true,
        max: false,
        splits: true,
    };
    forward(&call, profile, cache)
}

fn params(pass: &Pass) -> Params {
    *bytemuck::from_bytes(&pass.params[..size_of::<Params>()])
}

/// The workgroups of these launches, each of which begins where the one before it ended, holds what it is to run
/// and keeps to the budget.
fn covered(passes: &[Pass], profile: &Profile) -> u32 {
    let mut next = 0;
    for pass in passes {
        let params = params(pass);
        assert_eq!(params.first_group, next);
        let [x, y, z] = pass.grid;
        assert!(x * y * z >= params.groups - params.first_group && params.fold == x);
        assert!(pass.work <= Plan::budget(profile));
        next = params.groups;
    }
    next
}

#[test]
fn launches_cover_every_workgroup_once() {
    let sizes = Sizes { batch: 3, heads: [4, 2], lengths: [4096, 4096], dim: 64 };
    let profile = Profile { software: true, ..Profile::floor(Tier::Portable) };
    let plan = plan(&sizes, &profile, &Cache::default(), None).unwrap();
    assert!(plan.passes.len() > 1);
    let tile_q = plan.passes[0].spec.tile_q();
    assert_eq!(covered(&plan.passes, &profile), 3 * 4 * 4096 / tile_q);
    let all = 3.0 * 4.0 * 4096.0 * 4096.0 * 128.0;
    assert!((plan.work() / all - 1.0).abs() < 1e-6);
}

#[test]
fn causal_is_about_half_the_work_and_the_cpu_is_never_cut() {
    let sizes = Sizes { batch: 1, heads: [1, 1], lengths: [4096, 4096], dim: 64 };
    let cpu = Profile::floor(Tier::Cpu);
    let [dense, causal] =
        [None, Some(&masks::causal())].map(|mask| plan(&sizes, &cpu, &Cache::default(), mask).unwrap());
    assert_eq!(dense.passes.len(), 1);
    let ratio = causal.work() / dense.work();
    assert!((0.5..0.55).contains(&ratio), "{ratio}");
}

#[test]
fn bindings_stay_within_the_limit_and_views_find_their_elements() {
    let sizes = Sizes { batch: 2, heads: [4, 2], lengths: [300, 500], dim: 16 };
    let limits = Limits { storage_binding: 40_000, ..Limits::default() };
    let profile = Profile { limits, ..Profile::floor(Tier::Portable) };
    let plan = plan(&sizes, &profile, &Cache::default(), None).unwrap();
    // One kv head of one batch entry fits a binding, two do not.
    assert_eq!(plan.passes.len(), 4);
    for pass in &plan.passes {
        let params = params(pass);
        let tile_q = pass.spec.tile_q();
        let tiles = 300u32.div_ceil(tile_q);
        for slot in &pass.slots[..4] {
            assert!(slot.size <= 40_000 && slot.offset % 256 == 0, "{slot:?}");
        }
        for group in params.first_group..params.groups {
            let (tile, h, b) = (group % tiles, (group / tiles) % 4, group / (tiles * 4));
            let within = |view: [u32; 4], slot: &Slot, head: u32, row: u32| {
                let at = view[0]
                    .wrapping_add(b.wrapping_mul(view[1]))
                    .wrapping_add(head * view[2])
                    .wrapping_add(row * view[3]);
                assert!(u64::from(at) * 4 + 64 <= slot.size, "{at} {slot:?}");
            };
            let last = (tile * tile_q + tile_q - 1).min(299);
            within(params.q, &pass.slots[0], h, last);
            within(params.out, &pass.slots[3], h, tile * tile_q);
            within(params.k, &pass.slots[1], h / 2, 499);
            within(params.v, &pass.slots[2], h / 2, 0);
        }
    }
}

#[test]
fn keys_longer_than_a_binding_are_cut_into_ranges() {
    let sizes = Sizes { batch: 1, heads: [2, 1], lengths: [70, 1000], dim: 16 };
    let limits = Limits { storage_binding: 40_000, ..Limits::default() };
    let profile = Profile { limits, ..Profile::floor(Tier::Portable) };
    let plan = plan(&sizes, &profile, &Cache::default(), Some(&masks::causal())).unwrap();
    // Two heads, each of two ranges and the merge.
    let kernels: Vec<Kernel> = plan.passes.iter().map(|pass| pass.spec.kernel).collect();
    assert_eq!(kernels, [[Kernel::Forward, Kernel::Forward, Kernel::Merge]; 2].concat());
    for pass in &plan.passes {
        assert!(pass.slots.iter().all(|slot| slot.size <= 40_000 && slot.offset % 256 == 0));
    }
    let views = [&plan.passes[0], &plan.passes[1]].map(|pass| {
        let params = params(pass);
        // The last key of the range, in its window.
        [511u32, 999].map(|kv| u64::from(params.k[0].wrapping_add(kv.wrapping_mul(params.k[3]))) * 4 + 64)
    });
    assert!(views[0][0] <= plan.passes[0].slots[1].size && views[1][1] <= plan.passes[1].slots[1].size);
    assert_ne!(params(&plan.passes[0]).kv_len_at, NONE);
    assert_eq!(params(&plan.passes[5]).first_group, 70, "rows are counted over all heads");
}

#[test]
fn lists_within_ranges_hold_every_block_once() {
    let sizes = Sizes { batch: 1, heads: [1, 1], lengths: [700, 700], dim: 16 };
    let cache = Cache::default();
    let mask = masks::causal() & MaskMod::new(|i| (i.q() - i.kv()).lt(300));
    plan(&sizes, &Profile::floor(Tier::Portable), &cache, Some(&mask)).unwrap();
    let whole = lock(&cache.lists).any().unwrap();
    let blocks = |lists: &lists::Lists, row: u32| {
        let (runs, partials) = lists.row(row);
        let full = runs.into_iter().flat_map(|[first, end]| (first..end).map(|block| (block, 0)));
        let mut all: Vec<(u32, u32)> =
            full.chain(partials.into_iter().map(|[block, map]| (block, map))).collect();
        all.sort_unstable();
        all
    };
    let layout = Layout::contiguous([1, 1, 700, 16]).unwrap();
    let shape = AttentionShape::new(&layout, &layout, &layout).unwrap();
    for row in 0..6 {
        let parts = [0..2, 2..5, 5..6].map(|range| {
            let part = lists::Part { entries: 0..1, heads: 0..1, blocks: range };
            blocks(&whole.within(&part, false, &shape), row)
        });
        let all = blocks(&whole, row);
        assert!(!all.is_empty());
        assert_eq!(parts.concat(), all);
    }
}

/// A call of one query over a cache; heads are those of queries and keys.
fn cache_call(batch: usize, heads: [usize; 2], lengths: [usize; 2], profile: &Profile) -> Plan {
    let sizes = Sizes { batch, heads, lengths, dim: 64 };
    plan(&sizes, profile, &Cache::default(), None).unwrap()
}

fn is_decode(plan: &Plan) -> bool {
    plan.passes.iter().all(|pass| {
        matches!(pass.spec.kernel, Kernel::DecodeSplit | Kernel::DecodeSubgroup | Kernel::DecodeCombine)
    })
}

#[test]
fn decode_past_the_budget_is_cut_between_its_workgroups() {
    for tier in [Tier::Portable, Tier::Subgroup] {
        let limits = Limits { storage_binding: 4 << 30, ..Limits::default() };
        let profile = Profile { software: true, limits, ..Profile::floor(tier) };
        let plan = cache_call(8, [8, 8], [1, 131_072], &profile);
        let (combine, splits) = plan.passes.split_last().unwrap();
        assert!(is_decode(&plan) && combine.spec.kernel == Kernel::DecodeCombine);
        assert!(splits.len() > 1);
        // Of one row each, so one tile.
        let clusters = if tier == Tier::Subgroup { 8 } else { 1 };
        assert_eq!(covered(splits, &profile), params(combine).splits / clusters * 64);
        let all = 8.0 * 8.0 * 131_072.0 * 128.0;
        assert!((splits.iter().map(|pass| pass.work).sum::<f64>() / all - 1.0).abs() < 1e-6);
    }
}

#[test]
fn decode_ends_at_its_bounds_of_queries_rows_and_keys() {
    for tier in [Tier::Portable, Tier::Subgroup, Tier::CoopMatrix, Tier::Metal] {
        let profile = Profile::floor(tier);
        let decodes = |heads, lengths| is_decode(&cache_call(1, heads, lengths, &profile));
        for (heads, inside, outside) in
            [([1, 1], [32, 512], [33, 512]), ([4, 1], [16, 512], [17, 512]), ([1, 1], [1, 512], [1, 511])]
        {
            assert!(decodes(heads, inside) && !decodes(heads, outside), "{tier} {heads:?} {outside:?}");
        }
        // 65 packed rows, where 64 would do.
        assert!(decodes([4, 1], [16, 4096]) && !decodes([5, 1], [13, 4096]), "{tier}");
    }
    assert!(!is_decode(&cache_call(1, [1, 1], [1, 4096], &Profile::floor(Tier::Cpu))));
}

#[test]
fn parts_follow_the_length_the_heads_and_the_adapter() {
    let parts = |heads, kv_len, software| {
        let limits = Limits { storage_binding: 4 << 30, ..Limits::default() };
        let profile = Profile { software, limits, ..Profile::floor(Tier::Portable) };
        params(&cache_call(1, [heads; 2], [1, kv_len], &profile).passes[0]).splits
    };
    // At least 256 keys to a part, and at most 128 parts.
    assert_eq!([512, 1024, 4096, 32_768, 131_072].map(|len| parts(1, len, false)), [2, 4, 16, 128, 128]);
    // Workgroups enough to fill the machine, no matter of how many heads.
    assert_eq!([1, 2, 16, 64, 256].map(|heads| parts(heads, 4096, false)), [16, 16, 16, 4, 1]);
    // A CPU has fewer cores to fill, but a driver that bounds what a workgroup may go through.
    assert_eq!([1, 2, 16, 64].map(|heads| parts(heads, 4096, true)), [16, 8, 1, 1]);
    assert_eq!([8192, 8193, 65_536].map(|len| parts(64, len, true)), [1, 2, 8]);
}

#[test]
fn a_cache_longer_than_a_binding_goes_through_the_forward_kernel() {
    let limits = Limits { storage_binding: 1 << 20, ..Limits::default() };
    let profile = Profile { limits, ..Profile::floor(Tier::Portable) };
    assert!(is_decode(&cache_call(1, [1, 1], [1, 4096], &profile)));
    let windows = cache_call(1, [1, 1], [1, 4097], &profile);
    assert!(windows.passes.iter().any(|pass| pass.spec.kernel == Kernel::Forward));
}

#[test]
fn a_block_longer_than_a_binding_is_refused_with_the_limit() {
    let sizes = Sizes { batch: 1, heads: [1, 1], lengths: [1, 1000], dim: 16 };
    let limits = Limits { storage_binding: 4_000, ..Limits::default() };
    let profile = Profile { limits, ..Profile::floor(Tier::Portable) };
    let error = plan(&sizes, &profile, &Cache::default(), None).unwrap_err();
    assert!(error.is_limit() && error.to_string().contains("maxStorageBufferBindingSize"), "{error}");
}

#[test]
fn grids_fold_at_the_limit_of_a_dimension() {
    assert_eq!(fold(0, 65535).unwrap(), [0, 0, 1]);
    assert_eq!(fold(65535, 65535).unwrap(), [65535, 1, 1]);
    assert_eq!(fold(65536, 65535).unwrap(), [65535, 2, 1]);
    assert!(fold(101, 10).unwrap_err().is_limit());
}

#[test]
fn lists_are_never_stale_and_not_built_twice() {
    let sizes = Sizes { batch: 1, heads: [1, 1], lengths: [256, 256], dim: 16 };
    let profile = Profile::floor(Tier::Portable);
    let cache = Cache::default();
    let documents = |change: usize| -> MaskMod {
        let ids: Vec<i32> = (0..256).map(|i| i32::from(i >= change)).collect();
        let doc = Capture::i32("doc", &ids, &[256]).unwrap();
        MaskMod::new(|i| doc.at([i.q()]).eq(doc.at([i.kv()])))
    };
    let key = |mask: &MaskMod| plan(&sizes, &profile, &cache, Some(mask)).unwrap().constants[0].key;
    let half = key(&documents(128));
    assert_eq!(half, key(&documents(128)), "the same content in other memory");
    assert_ne!(half, key(&documents(64)), "other content under the same name");
    assert_eq!(half, key(&documents(128)));
    assert_eq!(lock(&cache.lists).len(), 2);
    assert_eq!(lock(&cache.specs).len(), 1, "captured values are no kernel text");
}

#[test]
fn tensors_of_two_mods_may_share_a_name_only_if_they_are_alike() {
    let table = |values: &[f32]| Capture::f32("t", values, &[2]).unwrap();
    let mods = |a: &[f32], b: &[f32]| {
        let (a, b) = (table(a), table(b));
        let mask = MaskMod::new(|i| a.at([i.q()]).gt(0.0));
        let score = ScoreMod::new(|s| s.score() + b.at([s.kv()]));
        captures::Mods::new(Some(&mask), Some(&score)).map(|mods| mods.captures.len())
    };
    assert_eq!(mods(&[1.0, 2.0], &[1.0, 2.0]).unwrap(), 1);
    assert!(mods(&[1.0, 2.0], &[1.0, 3.0]).unwrap_err().is_capture());
}

/// `doc[q] == doc[kv]` of values that nobody here knows.
fn unknown_documents(tokens: usize) -> MaskMod {
    let resident = Resident { buffer: DeviceHandle::new(0u8), first: 0 };
    let data = CaptureData::Device(DeviceHandle::new(resident));
    let doc = Capture::new("doc", CaptureType::I32, &[tokens], data).unwrap();
    let doc = Captured::<I32>::new(doc).unwrap();
    MaskMod::new(|i| doc.at([i.q()]).eq(doc.at([i.kv()])))
}

#[test]
fn only_blocks_that_the_rest_of_a_mask_leaves_open_are_looked_into() {
    let shape = BlockShape::new(2, 4, 1024, 1024);
    let blocks = |mask: MaskMod| {
        let mut open = OpenMask::new(&mask, &shape, usize::MAX).unwrap().open().to_vec();
        open.sort_unstable();
        open
    };
    let doc = || unknown_documents(1024);
    assert!(blocks(doc()).into_iter().eq(0..64));
    assert_eq!(blocks(doc() & masks::causal()).len(), 36);
    assert_eq!(blocks(doc() & masks::sliding_window(100)).len(), 15);
    assert!(blocks(doc() | masks::noop()).is_empty());
    // A mask that tells batch entries apart has a matrix for each.
    assert_eq!(blocks(doc() & masks::padding(&[1024, 128])).len(), 64 + 1);
}

#[test]
fn looking_into_blocks_is_cut_by_bindings_and_by_work() {
    let mask = OpenMask::new(&unknown_documents(16384), &BlockShape::new(1, 1, 16384, 16384), usize::MAX);
    let mask = mask.unwrap();
    let profile = |storage_binding, software| Profile {
        software,
        limits: Limits { storage_binding, workgroups: 150, ..Limits::default() },
        ..Profile::floor(Tier::Portable)
    };
    let launches = |profile: &Profile| {
        let passes = scan(&mask, profile).unwrap().passes;
        let mut windows: Vec<(u64, u64, u32)> = Vec::new();
        for pass in &passes {
            let [x, y, _] = pass.grid;
            let params = params(pass);
            assert!(x <= 150 && y <= 150 && x * y >= params.groups - params.first_group && params.fold == x);
            assert!(pass.work <= Plan::budget(profile));
            let maps = &pass.slots[3];
            match windows.last_mut().filter(|(offset, ..)| *offset == maps.offset) {
                Some((.., next)) if *next == params.first_group => *next = params.groups,
                _ => {
                    assert_eq!(params.first_group, 0);
                    windows.push((maps.offset, maps.size, params.groups));
                }
            }
        }
        for (n, &(offset, size, groups)) in windows.iter().enumerate() {
            assert_eq!(size, 4 * u64::from(groups));
            assert_eq!(offset, windows[..n].iter().map(|(_, size, _)| size).sum::<u64>());
            assert!(offset % 256 == 0 && size + 8 <= profile.limits.storage_binding);
        }
        assert_eq!(windows.iter().map(|(.., groups)| groups).sum::<u32>(), 128 * 128);
        (passes.len(), windows.len())
    };
    assert_eq!(launches(&profile(128 << 20, false)), (1, 1));
    assert_eq!(launches(&profile(128 << 20, true)), (2, 1));
    assert_eq!(launches(&profile(20_000, false)), (4, 4));
}
