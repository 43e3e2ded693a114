//! The forward kernel by itself: shapes, strides and lists that the plan would have chosen otherwise.

use std::sync::Arc;

use flexattn::expr::{Env, Point, Program};
use flexattn::kernels::{Kernel, KernelSpec, Loader, NONE, Params};
use flexattn::lower::{self, Mods};
use flexattn::reference::{self, Problem};
use flexattn::{AttentionShape, Binding, DType, Dispatch, Layout, MaskMod, Runtime, ScoreMod, Usage};
use flexattn_emulator::{Counters, Emulator, Memory, clang};

struct Case {
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    v_dim: usize,
    mask: Option<MaskMod>,
    score: Option<ScoreMod>,
    dtype: DType,
}

impl Case {
    fn square(len: usize, dim: usize, dtype: DType) -> Self {
        Self {
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            q_len: len,
            kv_len: len,
            head_dim: dim,
            v_dim: dim,
            mask: None,
            score: None,
            dtype,
        }
    }
}

fn numbers(count: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let mut state = seed * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let values: Vec<f32> = (0..count).map(|_| next() + next() + next() + next()).collect();
    dtype.widen(&dtype.narrow(&values))
}

/// Lists as the kernel reads them, from every element of the mask.
fn tables(case: &Case, lists_at: u32) -> Vec<u32> {
    let program = case.mask.as_ref().map(|mask| Program::new(&[mask.expr().clone()]));
    let env = case
        .mask
        .as_ref()
        .map(|mask| Env::new(mask.captures(), mask.scalars(), case.q_len, case.kv_len).unwrap());
    let mut bound =
        program.as_ref().zip(env.as_ref()).map(|(program, env)| program.bind::<f64>(env).unwrap());
    let mut keep = |h: usize, q: usize, kv: usize| match &mut bound {
        None => true,
        Some(bound) => {
            bound.point(&Point { score: 0.0, b: 0, h: h as i32, q: q as i32, kv: kv as i32 });
            bound.output(0).bools()[0]
        }
    };
    let (q_blocks, kv_blocks) = (case.q_len.div_ceil(128), case.kv_len.div_ceil(128));
    let mut headers = Vec::new();
    let mut words = Vec::new();
    let base = lists_at as usize + 4 * case.q_heads * q_blocks;
    for h in 0..case.q_heads {
        for block in 0..q_blocks {
            let (mut runs, mut partials): (Vec<[u32; 2]>, Vec<u32>) = Default::default();
            for other in 0..kv_blocks {
                let mut map = 0u32;
                for (row, column) in (0..16).map(|i| (i / 4, i % 4)) {
                    let rows = (128 * block + 32 * row..(128 * block + 32 * row + 32).min(case.q_len))
                        .collect::<Vec<_>>();
                    let columns =
                        128 * other + 32 * column..(128 * other + 32 * column + 32).min(case.kv_len);
                    let (mut kept, mut all) = (0, 0);
                    for &q in &rows {
                        for kv in columns.clone() {
                            all += 1;
                            kept += usize::from(keep(h, q, kv));
                        }
                    }
                    let kind = if kept == 0 {
                        0
                    } else if kept == all {
                        2
                    } else {
                        1
                    };
                    map |= kind << (2 * (4 * row + column));
                }
                let full = case.mask.is_none() || map == 0xaaaaaaaa;
                match runs.last_mut() {
                    _ if !full && map != 0 => partials.extend([other as u32, map]),
                    Some(run) if full && run[1] == other as u32 => run[1] += 1,
                    _ if full => runs.push([other as u32, other as u32 + 1]),
                    _ => {}
                }
            }
            let at = (base + words.len()) as u32;
            let runs = runs.as_flattened();
            let (mid, end) = (at + runs.len() as u32, at + (runs.len() + partials.len()) as u32);
            headers.extend([at, mid, mid, end]);
            words.extend_from_slice(runs);
            words.extend(partials);
        }
    }
    headers.extend(words);
    headers
}

fn check(case: &Case, loader: Loader) -> Option<Counters> {
    if let Err(error) = clang() {
        eprintln!("skipped: {error}");
        return None;
    }
    let &Case { batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_dim, dtype, .. } = case;
    let shape = |heads, rows, dim| Layout::contiguous([batch, heads, rows, dim]).unwrap();
    let layouts =
        [shape(q_heads, q_len, head_dim), shape(kv_heads, kv_len, head_dim), shape(kv_heads, kv_len, v_dim)];
    let attention = AttentionShape::new(&layouts[0], &layouts[1], &layouts[2]).unwrap();
    let [q, k, v] = [0, 1, 2].map(|i| numbers(layouts[i].elements(), i as u64 + 1, dtype));
    let problem = Problem {
        mask_mod: case.mask.as_ref(),
        score_mod: case.score.as_ref(),
        ..Problem::new(attention, &q, &k, &v)
    };
    let gold = reference::forward(&problem).unwrap();

    let emulator = Emulator::metal(loader).unwrap().with_all_schedules();
    let exprs: Vec<_> =
        case.mask.iter().map(MaskMod::expr).chain(case.score.iter().map(ScoreMod::expr)).cloned().collect();
    let layout = lower::Layout::new(&exprs, None);
    let mut spec = KernelSpec::new(Kernel::Forward, dtype, head_dim as u32, v_dim as u32, 32 << 10)
        .unwrap()
        .on_metal(loader);
    spec.mods = Mods {
        score: case.score.as_ref().map(|s| s.expr().clone()),
        mask: case.mask.as_ref().map(|m| m.expr().clone()),
        ..Mods::default()
    };
    spec.layout = layout.clone();
    let captures: Vec<_> = case
        .mask
        .iter()
        .flat_map(|m| m.captures())
        .chain(case.score.iter().flat_map(|s| s.captures()))
        .cloned()
        .collect();
    let info = layout.info(&captures, &[], 0).unwrap();
    let mut words = layout.words(&captures).unwrap();
    words.push(0);

    let view =
        |layout: &Layout| [0, layout.strides[0] as u32, layout.strides[1] as u32, layout.strides[2] as u32];
    let out = shape(q_heads, q_len, v_dim);
    let groups = (batch * q_heads * q_len.div_ceil(spec.tile_q() as usize)) as u32;
    let rows = (batch * q_heads * q_len) as u32;
    let mut table: Vec<u32> = vec![0; batch];
    table.extend(vec![kv_len as u32; batch]);
    let lists = table.len() as u32;
    table.extend(tables(case, lists));
    let params = Params {
        batch: batch as u32,
        q_heads: q_heads as u32,
        kv_heads: kv_heads as u32,
        group: (q_heads / kv_heads) as u32,
        q_len: q_len as u32,
        kv_len: kv_len as u32,
        q_blocks: q_len.div_ceil(128) as u32,
        kv_blocks: kv_len.div_ceil(128) as u32,
        mask_batch: 1,
        mask_heads: q_heads as u32,
        lists,
        lists_t: NONE,
        q_offset_at: 0,
        kv_len_at: batch as u32,
        sinks_at: NONE,
        lse_at: 0,
        max_at: rows,
        scale: problem.scale as f32,
        groups,
        fold: groups,
        q: view(&layouts[0]),
        k: view(&layouts[1]),
        v: view(&layouts[2]),
        out: view(&out),
        ..Params::default()
    };
    let upload = |bytes: &[u8]| {
        let buffer = emulator.create("", bytes.len() as u64, Usage::Tensor).unwrap();
        emulator.write(&buffer, 0, bytes).unwrap();
        Binding { size: bytes.len() as u64, buffer, offset: 0 }
    };
    let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let out_buffer = upload(&vec![0; out.elements() * dtype.size()]);
    let stats = upload(&vec![0; 8 * rows as usize]);
    let bindings = vec![
        upload(&dtype.narrow(&q)),
        upload(&dtype.narrow(&k)),
        upload(&dtype.narrow(&v)),
        out_buffer.clone(),
        stats.clone(),
        upload(&bytes(&table)),
        upload(&bytes(&words)),
        upload(&[0; 4]),
    ];
    let mut block = bytemuck::bytes_of(&params).to_vec();
    block.extend(info.iter().flatten().flat_map(|word| word.to_le_bytes()));
    if info.is_empty() {
        block.extend([0; 16]);
    }
    let dispatch = Dispatch { spec: Arc::new(spec), bindings, params: block, grid: [groups, 1, 1] };
    if let Err(error) = emulator.run(&[dispatch]) {
        panic!("{error}");
    }
    let got = dtype.widen(&out_buffer.buffer.read(0, out.elements() * dtype.size()));
    let largest = gold.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let tolerance = match dtype {
        DType::F32 => 5e-6,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
    } * largest.max(1e-3);
    let worst = got
        .iter()
        .zip(&gold.out)
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, |m: f64, x| if x > m || x.is_nan() { x } else { m });
    assert!(
        worst <= tolerance,
        "{:?} {loader:?} {head_dim}/{v_dim} {q_len}x{kv_len}: out differs by {worst} of {largest}",
        dtype
    );
    let stat = DType::F32.widen(&stats.buffer.read(0, 8 * rows as usize));
    for (name, got, gold) in
        [("lse", &stat[..rows as usize], &gold.lse), ("max", &stat[rows as usize..], &gold.max)]
    {
        for (i, (a, b)) in got.iter().zip(gold).enumerate() {
            let same = f64::from(*a) == *b || (f64::from(*a) - b).abs() < 1e-5 * b.abs().max(1.0);
            assert!(same, "{name} of row {i} is {a}, not {b}");
        }
    }
    emulator.take_records().last().map(|record| record.counters)
}

/// One head of 32 columns without mods, whose q, k and v lie in one memory; what to run it with, and out.
fn plain(emulator: &Emulator, loader: Loader, memory: &Memory, params: Params) -> (Dispatch<Memory>, Memory) {
    let &Params { batch, q_heads, q_len, kv_len, .. } = &params;
    let spec = KernelSpec::new(Kernel::Forward, DType::F16, 32, 32, 32 << 10).unwrap().on_metal(loader);
    let tiles = q_len.div_ceil(spec.tile_q());
    let (q_blocks, lists) = (q_len.div_ceil(128), 2 * batch);
    let mut table = vec![0; batch as usize];
    table.extend(vec![kv_len; batch as usize]);
    let run = lists + 4 * q_blocks;
    table.extend((0..q_blocks).flat_map(|_| [run, run + 2, run + 2, run + 2]));
    table.extend([0, kv_len.div_ceil(128)]);
    let params = Params {
        kv_heads: q_heads,
        group: 1,
        q_blocks,
        kv_blocks: kv_len.div_ceil(128),
        mask_batch: 1,
        mask_heads: 1,
        lists,
        lists_t: NONE,
        q_offset_at: 0,
        kv_len_at: batch,
        sinks_at: NONE,
        lse_at: NONE,
        max_at: NONE,
        scale: 1.0,
        groups: batch * q_heads * tiles,
        fold: batch * q_heads * tiles,
        out: [0, q_heads * q_len * 32, q_len * 32, 32],
        ..params
    };
    let whole = |buffer: &Memory| Binding { size: buffer.size() as u64, buffer: buffer.clone(), offset: 0 };
    let out = emulator.create("", u64::from(batch * q_heads * q_len * 64), Usage::Tensor).unwrap();
    let words: Vec<u8> = table.iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
    let (tables, empty) = (Memory::from_bytes(&words), Memory::new(16));
    let bindings = [memory, memory, memory, &out, &empty, &tables, &empty, &empty].map(whole).to_vec();
    let mut block = bytemuck::bytes_of(&params).to_vec();
    block.extend([0; 16]);
    let grid = [params.groups, 1, 1];
    (Dispatch { spec: Arc::new(spec), bindings, params: block, grid }, out)
}

/// PyTorch's first Metal kernels took strides of 32 bits; pytorch 149261: wrong results in buffers of more
/// than 2^32 bytes. Here the third batch entry begins 2^32 elements into a buffer, of which only the rows
/// that are used take memory.
#[test]
fn offsets_of_batch_entries_have_64_bits() {
    if let Err(error) = clang() {
        return eprintln!("skipped: {error}");
    }
    let stride = 1u64 << 31;
    let memory = Memory::new(2 * (2 * stride + 32 * 32) as usize);
    let halves = |value: f32| DType::F16.narrow(&[value; 32 * 32]);
    for (b, value) in [(0, 1.0), (1, 2.0), (2, 3.0)] {
        memory.write(2 * (b * stride) as usize, &halves(value));
    }
    let view = [0, stride as u32, 0, 32];
    let sizes = Params {
        batch: 3,
        q_heads: 1,
        q_len: 32,
        kv_len: 32,
        q: view,
        k: view,
        v: view,
        ..Params::default()
    };
    for loader in Loader::ALL {
        let emulator = Emulator::metal(loader).unwrap();
        let (dispatch, out) = plain(&emulator, loader, &memory, sizes);
        emulator.run(&[dispatch]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(out.read(0, out.size()), [halves(1.0), halves(2.0), halves(3.0)].concat());
    }
}

/// mpsops 0932808: a batch that is dispatched in pieces began at the wrong offset.
#[test]
fn pieces_of_a_dispatch_give_what_the_whole_gives() {
    if let Err(error) = clang() {
        return eprintln!("skipped: {error}");
    }
    let memory = Memory::from_bytes(&DType::F16.narrow(&numbers(2 * 3 * 100 * 32, 1, DType::F16)));
    let view = [0, 3 * 100 * 32, 100 * 32, 32];
    let sizes = Params {
        batch: 2,
        q_heads: 3,
        q_len: 100,
        kv_len: 100,
        q: view,
        k: view,
        v: view,
        ..Params::default()
    };
    for loader in Loader::ALL {
        let emulator = Emulator::metal(loader).unwrap();
        let (whole, out) = plain(&emulator, loader, &memory, sizes);
        let groups = whole.grid[0];
        emulator.run(&[whole]).unwrap();
        // Five threadgroups a piece, in rows of two: the last row has one too many.
        let (piece, pieced) = plain(&emulator, loader, &memory, sizes);
        for first in (0..groups).step_by(5) {
            let mut params: Params = bytemuck::pod_read_unaligned(&piece.params[..size_of::<Params>()]);
            (params.first_group, params.groups, params.fold) = (first, (first + 5).min(groups), 2);
            let mut block = bytemuck::bytes_of(&params).to_vec();
            block.extend([0; 16]);
            let dispatch = Dispatch { params: block, grid: [2, 3, 1], ..piece.clone() };
            emulator.run(&[dispatch]).unwrap_or_else(|error| panic!("{error}"));
        }
        assert_eq!(out.read(0, out.size()), pieced.read(0, pieced.size()));
    }
}

fn causal() -> MaskMod {
    MaskMod::new(|i| i.q().ge(i.kv()))
}

#[test]
fn every_element_type_and_loader_agrees_with_the_reference() {
    for loader in Loader::ALL {
        for dtype in DType::ALL {
            check(&Case::square(70, 64, dtype), loader);
            check(&Case { mask: Some(causal()), ..Case::square(70, 64, dtype) }, loader);
        }
    }
}

#[test]
fn every_head_dim_agrees_with_the_reference() {
    for loader in Loader::ALL {
        for (dtype, head_dim, v_dim) in [
            (DType::F16, 1, 1),
            (DType::F32, 3, 3),
            (DType::F16, 8, 8),
            (DType::BF16, 15, 15),
            (DType::F16, 16, 40),
            (DType::F16, 72, 72),
            (DType::F16, 80, 80),
            (DType::F32, 96, 96),
            (DType::F16, 112, 112),
            (DType::F16, 128, 128),
            (DType::F32, 128, 128),
            (DType::BF16, 128, 64),
            (DType::F16, 192, 128),
            (DType::F32, 192, 192),
            (DType::F16, 256, 256),
            (DType::F32, 256, 256),
            (DType::BF16, 256, 256),
            (DType::F16, 512, 512),
            (DType::F16, 576, 512),
            (DType::F32, 576, 512),
        ] {
            let case = Case { q_len: 35, head_dim, v_dim, ..Case::square(37, head_dim, dtype) };
            check(&case, loader);
        }
    }
}

#[test]
fn grouped_heads_batches_and_ragged_lengths_agree_with_the_reference() {
    for loader in Loader::ALL {
        let case = Case {
            batch: 2,
            q_heads: 6,
            kv_heads: 2,
            q_len: 33,
            kv_len: 161,
            mask: Some(causal()),
            ..Case::square(0, 32, DType::F16)
        };
        check(&case, loader);
    }
}

#[test]
fn a_row_with_nothing_kept_is_zero() {
    for loader in Loader::ALL {
        let mask = MaskMod::new(|i| i.kv().lt(i.q() - 40));
        check(&Case { mask: Some(mask), ..Case::square(150, 32, DType::F32) }, loader);
    }
}

#[test]
fn score_mods_see_positions_and_captures() {
    let slope = flexattn::Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    let score = ScoreMod::new(|s| s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32());
    for loader in Loader::ALL {
        let case = Case {
            q_heads: 2,
            kv_heads: 1,
            score: Some(score.clone()),
            mask: Some(causal()),
            ..Case::square(140, 64, DType::F16)
        };
        check(&case, loader);
    }
}
