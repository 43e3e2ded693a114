//! The decode kernel by itself: packed heads, splits, lists per head, and what it reads.

use flexattn::kernels::{Fill, Language, Loader, MSL_FILES, MslTile, NONE, Params};
use flexattn::lower;
use flexattn::reference::{self, Problem};
use flexattn::{AttentionShape, BlockMask, BlockShape, DType, Layout, MaskMod, masks};
use flexattn_emulator::{Bound, Counters, Kernel, Memory, Options, Schedule, clang};

struct Case {
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    v_dim: usize,
    q_offset: i32,
    split_len: usize,
    dtype: DType,
    loader: Loader,
    mask: Option<MaskMod>,
    sinks: bool,
}

impl Case {
    /// One query, 8 query heads on 2 kv heads.
    fn step(kv_len: usize, dim: usize) -> Self {
        Self {
            batch: 1,
            q_heads: 8,
            kv_heads: 2,
            q_len: 1,
            kv_len,
            head_dim: dim,
            v_dim: dim,
            q_offset: kv_len as i32 - 1,
            split_len: 128,
            dtype: DType::F16,
            loader: Loader::Direct,
            mask: None,
            sinks: false,
        }
    }
}

fn numbers(count: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..count).map(|_| next() + next()).collect();
    dtype.widen(&dtype.narrow(&values))
}

/// The kernel's text with the constants of a tile that fits `rows` packed rows.
fn text(case: &Case, tile: &MslTile, slots: &[(&str, String)]) -> String {
    let mut files = MSL_FILES.to_vec();
    let direct = files.iter().find(|(name, _)| *name == "load_direct.metal").unwrap().1;
    files.iter_mut().find(|(name, _)| *name == "load_staged.metal").unwrap().1 = direct;
    let mut fill = Fill::join("decode.metal", &files).unwrap();
    let element = match case.dtype {
        DType::F32 => "float",
        DType::F16 => "half",
        DType::BF16 => "ushort",
    };
    let aligned = case.head_dim.is_multiple_of(4) && case.v_dim.is_multiple_of(4);
    for (name, value) in [
        ("Elem", element.to_owned()),
        ("ALIGNED", u32::from(aligned).to_string()),
        ("HEAD_DIM", case.head_dim.to_string()),
        ("V_DIM", case.v_dim.to_string()),
        ("SIMDGROUPS", tile.simdgroups.to_string()),
        ("ROW_FRAGMENTS", tile.row_fragments.to_string()),
        ("K_PACK", tile.k_pack.to_string()),
        ("V_PACK", tile.v_pack.to_string()),
        ("Q_GROUPS", tile.q_groups.to_string()),
        ("Q_STAGED", u32::from(tile.q_staged).to_string()),
        ("V_CHUNK", tile.v_chunk.to_string()),
        ("STAGE", tile.stage.to_string()),
    ] {
        fill.constant(name, &value).unwrap();
    }
    for (name, text) in slots {
        fill.slot(name, text).unwrap();
    }
    fill.finish()
}

/// Runs both passes in all schedules, compares, and gives the counters of each.
fn check(case: &Case) -> Option<[Counters; 2]> {
    if let Err(error) = clang() {
        eprintln!("skipped: {error}");
        return None;
    }
    let &Case {
        batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_dim, q_offset, split_len, dtype, ..
    } = case;
    let shape = |heads, rows, dim| Layout::contiguous([batch, heads, rows, dim]).unwrap();
    let layouts =
        [shape(q_heads, q_len, head_dim), shape(kv_heads, kv_len, head_dim), shape(kv_heads, kv_len, v_dim)];
    let [q, k, v] = [0, 1, 2].map(|i| numbers(layouts[i].elements(), i as u64 + 1, dtype));
    let sinks: Vec<f32> =
        if case.sinks { (0..q_heads).map(|h| h as f32 * 0.5 - 1.0).collect() } else { Vec::new() };
    let offsets = vec![q_offset; batch];
    let attention = AttentionShape::new(&layouts[0], &layouts[1], &layouts[2]).unwrap();
    let problem = Problem {
        mask_mod: case.mask.as_ref(),
        q_offset: &offsets,
        sinks: &sinks,
        ..Problem::new(attention, &q, &k, &v)
    };
    let gold = reference::forward(&problem).unwrap();

    let all = masks::noop();
    let lists = BlockShape { q_offset: &offsets, ..BlockShape::new(batch, q_heads, q_len, kv_len) };
    let block_mask = BlockMask::build(case.mask.as_ref().unwrap_or(&all), lists).unwrap();
    let mut tables: Vec<u32> = offsets.iter().map(|&x| x as u32).collect();
    tables.extend(vec![kv_len as u32; batch]);
    tables.extend(sinks.iter().map(|x| x.to_bits()));
    let lists_at = tables.len() as u32;
    let packed = block_mask.tables(lists_at).unwrap();
    tables.extend(&packed.words);

    let tile = MslTile::decode(case.loader, dtype, head_dim as u32, v_dim as u32);
    let rows = q_heads / kv_heads * q_len;
    let splits = kv_len.div_ceil(split_len) as u32;
    let groups = splits * (rows as u32).div_ceil(tile.tile_q()) * (kv_heads * batch) as u32;
    let view =
        |layout: &Layout| [0, layout.strides[0] as u32, layout.strides[1] as u32, layout.strides[2] as u32];
    let out_layout = shape(q_heads, q_len, v_dim);
    let all_rows = (batch * q_heads * q_len) as u32;
    let params = Params {
        batch: batch as u32,
        q_heads: q_heads as u32,
        kv_heads: kv_heads as u32,
        group: (q_heads / kv_heads) as u32,
        q_len: q_len as u32,
        kv_len: kv_len as u32,
        q_blocks: 1,
        kv_blocks: kv_len.div_ceil(128) as u32,
        mask_batch: block_mask.mask_batch() as u32,
        mask_heads: block_mask.mask_heads() as u32,
        lists: packed.lists,
        q_offset_at: 0,
        kv_len_at: batch as u32,
        sinks_at: if case.sinks { 2 * batch as u32 } else { NONE },
        splits,
        split_len: split_len as u32,
        lse_at: 0,
        max_at: all_rows,
        scale: problem.scale as f32,
        groups,
        fold: groups,
        q: view(&layouts[0]),
        k: view(&layouts[1]),
        v: view(&layouts[2]),
        out: view(&out_layout),
        ..Params::default()
    };
    let mods = lower::Mods { mask: case.mask.as_ref().map(|mask| mask.expr().clone()), ..Default::default() };
    let slots = lower::slots(&mods, &lower::Layout::default(), Language::Msl).unwrap();
    let kernel = Kernel::compile(&text(case, &tile, &slots)).unwrap_or_else(|error| panic!("{error}"));
    let block = |params: &Params| Memory::from_bytes(&[bytemuck::bytes_of(params), &[0; 16]].concat());
    let words: Vec<u8> = tables.iter().flat_map(|word| word.to_le_bytes()).collect();
    let partials = Memory::new(4 * all_rows as usize * splits as usize * (v_dim + 2));
    let (out, stats) =
        (Memory::new(out_layout.elements() * dtype.size()), Memory::new(8 * all_rows as usize));
    let tables = Memory::from_bytes(&words);
    let empty = Memory::new(16);
    let options = Options { schedules: Schedule::ALL.to_vec(), count_unique: true, ..Options::default() };
    let inputs = [&q, &k, &v].map(|x| Memory::from_bytes(&dtype.narrow(x)));
    let bound =
        |memories: &[(u32, &Memory)]| memories.iter().map(|(i, m)| Bound::whole(*i, m)).collect::<Vec<_>>();
    let split = kernel
        .launch(
            "split",
            &bound(&[
                (0, &inputs[0]),
                (1, &inputs[1]),
                (2, &inputs[2]),
                (3, &partials),
                (5, &tables),
                (6, &empty),
                (7, &empty),
                (8, &block(&params)),
            ]),
            [groups, 1, 1],
            [tile.threads(), 1, 1],
            &options,
        )
        .unwrap();
    let params = Params { groups: all_rows, fold: all_rows, ..params };
    let combine = kernel
        .launch(
            "combine",
            &bound(&[(0, &partials), (3, &out), (4, &stats), (5, &tables), (8, &block(&params))]),
            [all_rows, 1, 1],
            [32, 1, 1],
            &options,
        )
        .unwrap();
    for outcome in [&split, &combine] {
        assert!(outcome.reports.is_empty(), "{}", outcome.reports[0]);
    }
    let got = dtype.widen(&out.read(0, out.size()));
    let tolerance = match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
    };
    for (i, (a, b)) in got.iter().zip(&gold.out).enumerate() {
        assert!((f64::from(*a) - b).abs() <= tolerance, "out {i} is {a}, not {b}");
    }
    let stat = DType::F32.widen(&stats.read(0, stats.size()));
    for (a, b) in stat.iter().zip(gold.lse.iter().chain(&gold.max)) {
        assert!(f64::from(*a) == *b || (f64::from(*a) - b).abs() < 1e-5 * b.abs().max(1.0), "{a} {b}");
    }
    Some([split.counters, combine.counters])
}

#[test]
fn keys_and_values_are_read_once_per_kv_head() {
    let case = Case { kv_len: 4096, ..Case::step(4096, 128) };
    let Some([split, combine]) = check(&case) else { return };
    let minimum = 4096 * 128 * 2 * 2 * 2;
    let read = split.device_read + combine.device_read;
    assert!(read as f64 <= 1.05 * minimum as f64, "{}", read as f64 / minimum as f64);
    let pairs = 4096.0 * 8.0;
    assert!((split.reductions + combine.reductions) as f64 <= 1.1 * pairs);
    println!(
        "read {:.4} of the minimum, {} reductions",
        read as f64 / minimum as f64,
        split.reductions + combine.reductions
    );
}

#[test]
fn every_shape_agrees_with_the_reference() {
    check(&Case::step(1, 64));
    check(&Case::step(33, 64));
    check(&Case { dtype: DType::F32, ..Case::step(300, 64) });
    check(&Case { dtype: DType::BF16, ..Case::step(300, 80) });
    check(&Case { q_heads: 3, kv_heads: 3, head_dim: 15, v_dim: 7, ..Case::step(70, 15) });
    check(&Case { q_heads: 6, kv_heads: 2, batch: 2, q_len: 4, ..Case::step(260, 32) });
    check(&Case { q_heads: 16, kv_heads: 1, q_len: 3, ..Case::step(100, 64) });
    check(&Case { head_dim: 576, v_dim: 512, q_heads: 2, kv_heads: 1, ..Case::step(100, 0) });
    check(&Case { head_dim: 576, v_dim: 512, loader: Loader::Staged, ..Case::step(100, 0) });
    check(&Case { sinks: true, ..Case::step(100, 64) });
}

/// mlx's two-pass kernel dropped the keys past the last whole part; pytorch 174861 read past the end.
#[test]
fn parts_of_any_length_cover_every_key() {
    for split_len in [32, 64, 96, 4096] {
        check(&Case { split_len, ..Case::step(333, 64) });
    }
}

#[test]
fn masks_skip_tiles_and_rows_with_nothing_kept_are_zero() {
    let window = MaskMod::new(|i| (i.q() - i.kv()).lt(100) & i.q().ge(i.kv()));
    let Some([sparse, _]) = check(&Case { mask: Some(window), ..Case::step(1000, 64) }) else { return };
    let [dense, _] = check(&Case::step(1000, 64)).unwrap();
    assert!(sparse.device_read * 5 < dense.device_read, "{} {}", sparse.device_read, dense.device_read);
    let per_head = MaskMod::new(|i| i.head().ge(6) | (i.kv().lt(i.head() * 50)));
    check(&Case { mask: Some(per_head), q_len: 2, ..Case::step(400, 64) });
}
