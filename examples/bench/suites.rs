//! The suites: which cases, and which figures they must reach.

pub(crate) use crate::baseline::Tile;
use crate::baseline::{Baseline, Problem};
use crate::baseline_row::UnfusedRow;
use crate::measure::{Fused, Sizes, Work, median, medians};
use crate::{Bound, Check, Failure, Found, Row, Wanted};
use flexattn::{Attention, BlockMask, BlockShape, DType, Gpu, MaskMod, Params, Tier, masks, scores};
use std::time::Instant;

/// One suite.
pub(crate) struct Suite {
    name: &'static str,
    pub(crate) needs_gpu: bool,
    /// What `--len` may be; nothing where the suite has one length, which is not to be chosen.
    pub(crate) lengths: &'static [usize],
    /// Takes the machine (where the suite needs one), and how many rounds and which length are wanted.
    pub(crate) run: fn(Option<&Gpu>, &Wanted) -> Result<Found, Failure>,
}

const SUITES: &[Suite] = &[
    Suite {
        name: "dense",
        needs_gpu: true,
        lengths: &[256, 512, 1024, 2048, 4096],
        run: |gpu, wanted| dense(given(gpu)?, wanted),
    },
    Suite {
        name: "sparse",
        needs_gpu: true,
        lengths: &[],
        run: |gpu, wanted| sparse(given(gpu)?, wanted.rounds),
    },
    Suite {
        name: "decode",
        needs_gpu: true,
        lengths: DECODE_LENGTHS,
        run: |gpu, wanted| decode(given(gpu)?, wanted),
    },
    Suite {
        name: "backward",
        needs_gpu: true,
        lengths: &[],
        run: |gpu, wanted| crate::backward::run(given(gpu)?, wanted.rounds),
    },
    Suite {
        name: "mods",
        needs_gpu: true,
        lengths: &[],
        run: |gpu, wanted| mods(given(gpu)?, wanted.rounds),
    },
    Suite {
        name: "compile",
        needs_gpu: true,
        lengths: &[],
        run: |gpu, wanted| crate::compile::run(given(gpu)?, wanted.rounds),
    },
    Suite { name: "blockmask", needs_gpu: false, lengths: &[], run: |_, wanted| blockmask(wanted.rounds) },
];

/// Keys of the suite `decode`.
const DECODE_LENGTHS: &[usize] = &[4096, 16_384, 65_536, 131_072];

impl Suite {
    /// Refuses a `--len` that would leave nothing to measure.
    pub(crate) fn check(&self, wanted: &Wanted) -> Result<(), Failure> {
        match wanted.len {
            Some(len) if self.lengths.is_empty() => {
                Err(format!("--len is {len} but the suite {} has one length; leave --len out", self.name)
                    .into())
            }
            Some(len) if !self.lengths.contains(&len) => {
                let lengths = listed(self.lengths);
                Err(format!("--len is {len} but the suite {} has the lengths {lengths}", self.name).into())
            }
            _ => Ok(()),
        }
    }
}

fn listed(lengths: &[usize]) -> String {
    lengths.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// The suites and the lengths that they take, a line each.
pub(crate) fn help() -> String {
    let line = |suite: &Suite| match suite.lengths {
        [] => format!("  {}", suite.name),
        lengths => format!("  {:<10} --len is one of {}", suite.name, listed(lengths)),
    };
    SUITES.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn given(gpu: Option<&Gpu>) -> Result<&Gpu, Failure> {
    gpu.ok_or_else(|| "this suite needs a machine to run on".into())
}

pub(crate) fn find(name: &str) -> Option<&'static Suite> {
    SUITES.iter().find(|suite| suite.name == name)
}

pub(crate) fn names() -> String {
    SUITES.iter().map(|suite| suite.name).collect::<Vec<_>>().join(", ")
}

/// The baseline, and a check that it computes the same.
pub(crate) fn checked_baseline(
    gpu: &Gpu,
    fused: &Fused<'_>,
    sizes: Sizes,
    (tile, causal): (Tile, bool),
    data: &[Vec<f32>; 3],
) -> Result<Option<Baseline>, Failure> {
    let Sizes { q_heads: heads, q_len, kv_len, head_dim, .. } = sizes;
    let problem = Problem { heads, q_len, kv_len, head_dim, causal };
    let Some(baseline) = Baseline::new(gpu, problem, tile, [&data[0], &data[1], &data[2]])? else {
        return Ok(None);
    };
    let attention = if causal { Attention::new().mask_mod(masks::causal()) } else { Attention::new() };
    let difference = fused.differs_from(&baseline, &attention)?;
    if difference > 1e-4 {
        return Err(format!("the fused kernel and the unfused baseline differ by {difference}").into());
    }
    Ok(Some(baseline))
}

pub(crate) fn at_most(what: &str, gpu: &Gpu, value: f64, limit: f64) -> Check {
    Check { what: format!("{what} ({})", gpu.tier()), value, bound: Bound::AtMost(limit) }
}

fn at_least(what: &str, gpu: &Gpu, value: f64, limit: f64) -> Check {
    Check { what: format!("{what} ({})", gpu.tier()), value, bound: Bound::AtLeast(limit) }
}

/// Dense and causal by length, type and head dim.
fn dense(gpu: &Gpu, wanted: &Wanted) -> Result<Found, Failure> {
    let mut found = Found::default();
    let cases = [(256, 64), (512, 64), (1024, 64), (1024, 128), (2048, 64), (4096, 64)];
    for (len, head_dim) in cases.into_iter().filter(|(len, _)| wanted.takes(*len)) {
        let sizes = Sizes::square(4, len, head_dim);
        let data = sizes.data();
        let causal = masks::causal();
        let causal_density = sizes.density(Some(&causal))?;
        let fused = Fused::new(gpu, sizes, DType::F32, &data)?;
        let half = Fused::new(gpu, sizes, DType::F16, &data)?;
        let baseline = |tile, causal| checked_baseline(gpu, &fused, sizes, (tile, causal), &data);
        let best = baseline(Tile::Eight, false)?;
        let best_causal = baseline(Tile::Eight, true)?;
        let small = if len == 1024 && head_dim == 64 { baseline(Tile::Four, false)? } else { None };

        let with_causal = || Attention::new().mask_mod(masks::causal());
        let mut works: Vec<Work<'_>> = vec![fused.work(Attention::new()), fused.work(with_causal())];
        let halves = len <= 1024;
        if halves {
            works.extend([half.work(Attention::new()), half.work(with_causal())]);
        }
        let baselines = [&best, &best_causal, &small];
        works.extend(baselines.into_iter().flatten().map(|baseline| Box::new(|| baseline.run()) as Work<'_>));
        let rounds = wanted.rounds.unwrap_or(if len <= 1024 { 7 } else { 3 });
        let times = medians(&format!("dense {len}x{head_dim}"), rounds, &mut works)?;
        drop(works);

        let first_baseline = if halves { 4 } else { 2 };
        let base = times.get(first_baseline).copied();
        let base_causal = times.get(first_baseline + 1).copied();
        let row = |case: &str, dtype, density| sizes.row("dense", case, gpu, dtype, density);
        found.rows.push(row("no mask", DType::F32, 1.0).timed(times[0], base));
        found.rows.push(row("causal", DType::F32, causal_density).timed(times[1], base_causal));
        if halves {
            found.rows.push(row("no mask", DType::F16, 1.0).timed(times[2], base));
            found.rows.push(row("causal", DType::F16, causal_density).timed(times[3], base_causal));
        }
        if let (Some(base), Some(&small)) = (base, times.get(first_baseline + 2)) {
            found.rows.push(row("unfused, 4x4 tile", DType::F32, 1.0).timed(small, Some(base)));
            found.checks.extend(unfused_checks(gpu, times[0], base, small));
        }
        if len == 4096 {
            found.checks.push(at_most("causal / no mask at 4096", gpu, times[1] / times[0], 0.57));
        }
    }
    Ok(found)
}

/// How much faster than the unfused kernels a tier has to be at 1024 x 1024, D = 64, f32.
fn unfused_checks(gpu: &Gpu, fused: f64, best: f64, small: f64) -> Vec<Check> {
    match gpu.tier() {
        Tier::Portable => vec![
            at_least("unfused with the same 4x4 tile / fused", gpu, small / fused, 1.3),
            at_least("best unfused / fused", gpu, best / fused, 0.95),
        ],
        Tier::Subgroup => vec![at_least("best unfused / fused", gpu, best / fused, 2.0)],
        Tier::Metal | Tier::CoopMatrix | Tier::Cpu => Vec::new(),
    }
}

/// The window whose density at this length comes nearest to `density`.
fn window_of(density: f64, len: usize) -> i32 {
    (len as f64 * (1.0 - (1.0 - 2.0 * density).max(0.0).sqrt())).round() as i32
}

/// Windows from sparse to dense at 8192 tokens.
fn sparse(gpu: &Gpu, rounds: Option<usize>) -> Result<Found, Failure> {
    let sizes = Sizes::square(2, 8192, 64);
    let data = sizes.data();
    let fused = Fused::new(gpu, sizes, DType::F32, &data)?;
    let baseline = checked_baseline(gpu, &fused, sizes, (Tile::Eight, false), &data)?;
    let windows = [0.008, 0.031, 0.125, 0.5].map(|density| {
        let window = window_of(density, sizes.kv_len);
        (format!("window {window}"), Some(masks::sliding_window(window)))
    });
    let cases: Vec<(String, Option<MaskMod>)> =
        [("dense".to_owned(), None)].into_iter().chain(windows).collect();
    let mut works: Vec<Work<'_>> = Vec::new();
    for (_, mask) in &cases {
        let attention = Attention::new();
        works.push(fused.work(match mask {
            Some(mask) => attention.mask_mod(mask.clone()),
            None => attention,
        }));
    }
    works.extend(baseline.iter().map(|baseline| Box::new(|| baseline.run()) as Work<'_>));
    let times = medians("sparse", rounds.unwrap_or(3), &mut works)?;
    drop(works);

    let mut found = Found::default();
    for ((name, mask), &ms) in cases.iter().zip(&times) {
        let density = sizes.density(mask.as_ref())?;
        if mask.is_some() {
            let what = format!("{name} / dense");
            found.checks.push(at_most(&what, gpu, ms / times[0], density + 0.04));
        }
        let row = sizes.row("sparse", name, gpu, DType::F32, density);
        found.rows.push(row.timed(ms, times.get(cases.len()).copied()));
    }
    Ok(found)
}

/// One query over a growing cache, 8 query heads on 2 kv heads: the decode kernels, and the kernel of many
/// queries on the same work.
fn decode(gpu: &Gpu, wanted: &Wanted) -> Result<Found, Failure> {
    let mut found = Found::default();
    let lengths = DECODE_LENGTHS.iter().copied().filter(|len| wanted.takes(*len));
    for (kv_len, dtype) in lengths.flat_map(|len| {
        let types: &[DType] = if len == 16_384 { &[DType::F32, DType::F16] } else { &[DType::F32] };
        types.iter().map(move |dtype| (len, *dtype))
    }) {
        let sizes = Sizes { q_heads: 8, kv_heads: 2, q_len: 1, kv_len, head_dim: 64 };
        let data = sizes.data();
        let fused = Fused::new(gpu, sizes, dtype, &data)?;
        let baseline = UnfusedRow::new(gpu, &sizes, [&data[0], &data[1], &data[2]])?;
        if let Some(baseline) = &baseline {
            let difference = fused.differs_from_row(baseline)?;
            let allowed = if dtype == DType::F32 { 1e-4 } else { 2e-2 };
            if difference > allowed {
                return Err(format!("decode and its unfused baseline differ by {difference}").into());
            }
        }
        let mut works: Vec<Work<'_>> =
            vec![fused.work(Attention::new()), fused.work(Attention::new().with_splits(false))];
        works.extend(baseline.iter().map(|baseline| Box::new(|| baseline.run()) as Work<'_>));
        let times = medians(&format!("decode {kv_len}"), wanted.rounds.unwrap_or(7), &mut works)?;
        drop(works);
        let row = |case: &str| sizes.row("decode", case, gpu, dtype, 1.0);
        found.rows.push(row("decode").timed(times[0], times.get(2).copied()));
        found.rows.push(row("prefill kernel").timed(times[1], times.get(2).copied()));
        let what = format!("decode: prefill kernel / decode at {kv_len} {dtype}");
        found.checks.push(at_least(&what, gpu, times[1] / times[0], 3.0));
    }
    Ok(found)
}

/// Every prebuilt score mod, and some masks, beside plain attention.
fn mods(gpu: &Gpu, rounds: Option<usize>) -> Result<Found, Failure> {
    let sizes = Sizes::square(4, 1024, 64);
    let data = sizes.data();
    let fused = Fused::new(gpu, sizes, DType::F32, &data)?;
    let baseline = checked_baseline(gpu, &fused, sizes, (Tile::Eight, false), &data)?;
    let params = Params::new(1, sizes.q_heads, sizes.q_len, sizes.kv_len);
    let mut cases = vec![("none".to_owned(), Attention::new(), None)];
    for prebuilt in scores::ALL {
        let score_mod = scores::by_name(prebuilt.name, &params)?;
        cases.push((prebuilt.name.to_owned(), Attention::new().score_mod(score_mod), None));
    }
    for name in ["causal", "sliding_window", "document", "prefix_lm", "natten_2d"] {
        let mask = masks::by_name(name, &params)?;
        cases.push((name.to_owned(), Attention::new().mask_mod(mask.clone()), Some(mask)));
    }
    let mut works: Vec<Work<'_>> =
        cases.iter().map(|(_, attention, _)| fused.work(attention.clone())).collect();
    works.extend(baseline.iter().map(|baseline| Box::new(|| baseline.run()) as Work<'_>));
    let times = medians("mods", rounds.unwrap_or(7), &mut works)?;
    drop(works);

    let mut found = Found::default();
    for ((name, _, mask), &ms) in cases.iter().zip(&times) {
        let row = sizes.row("mods", name, gpu, DType::F32, sizes.density(mask.as_ref())?);
        found.rows.push(row.timed(ms, times.get(cases.len()).copied()));
        if name == "alibi" {
            found.checks.push(at_most("alibi / no score mod", gpu, ms / times[0], 1.15));
        }
    }
    Ok(found)
}

/// Building block masks for a million tokens, on one core: lists and transpose.
fn blockmask(rounds: Option<usize>) -> Result<Found, Failure> {
    let len = 1 << 20;
    let cases = [
        ("sliding_window 1024", masks::sliding_window(1024)),
        ("causal in 32 documents", masks::document(&documents(len, 32)) & masks::causal()),
    ];
    let mut found = Found::default();
    for (name, mask) in cases {
        let mut times = Vec::new();
        let mut built = None;
        for _ in 0..rounds.unwrap_or(5) {
            let start = Instant::now();
            let block_mask = BlockMask::build(&mask, BlockShape::new(1, 1, len, len))?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            built = Some(block_mask);
        }
        let built = built.ok_or("at least one round is needed")?;
        let (ms, bytes) = (median(times), bytes(&built));
        let [low, high] = built.density_bounds();
        found.rows.push(Row {
            suite: "blockmask",
            case: name.to_owned(),
            tier: "cpu".to_owned(),
            adapter: "one core".to_owned(),
            dtype: "none",
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            q_len: len,
            kv_len: len,
            density: (low + high) / 2.0,
            ms,
            bytes,
            ..Row::default()
        });
        let check = |what: &str, value, limit| Check {
            what: format!("{name}, {what}"),
            value,
            bound: Bound::AtMost(limit),
        };
        found.checks.push(check("ms", ms, 100.0));
        found.checks.push(check("MiB", bytes as f64 / f64::from(1 << 20), 4.0));
    }
    Ok(found)
}

/// Document numbers of `len` tokens in `count` documents of unequal lengths.
fn documents(len: usize, count: usize) -> Vec<i32> {
    let weight = |document: usize| ((document * 2_654_435_761) % 97 + 3) as f64;
    let total: f64 = (0..count).map(weight).sum();
    let mut ids = Vec::with_capacity(len);
    let mut reached = 0.0;
    for document in 0..count {
        reached += weight(document);
        let end = if document + 1 == count { len } else { (reached / total * len as f64) as usize };
        ids.resize(end, document as i32);
    }
    ids
}

/// Of both lists in memory.
fn bytes(block_mask: &BlockMask) -> u64 {
    let lists = [block_mask.rows(), block_mask.transposed()];
    let words = lists.map(|lists| {
        lists.run_offsets.len() + lists.partial_offsets.len() + 2 * (lists.runs.len() + lists.partials.len())
    });
    4 * words.iter().sum::<usize>() as u64
}
