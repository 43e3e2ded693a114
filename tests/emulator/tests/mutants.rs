//! Mistakes put into the kernels one by one: every one must be noticed by the detector that is named beside it.
//!
//! Scheduling fences (`mem_none`) are exempt: without them a kernel is right, and on a GPU slower.

use flexattn::kernels::{Kernel, KernelSpec, Language, Loader};
use flexattn::{DType, MaskMod};
use flexattn_emulator::{Case, Emulator, Kernels, Mutation, Options, Problem, Schedule, clang};

/// What noticed a mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The emulator, which stopped the kernel or went on to its end.
    Report(Problem),
    /// The comparison with the reference.
    Result,
}

const RACE: By = By::Report(Problem::Race);
const BOUNDS: By = By::Report(Problem::OutOfBounds);
const UNWRITTEN: By = By::Report(Problem::Uninitialised);
const DIVERGENCE: By = By::Report(Problem::Divergence);
const RESULT: By = By::Result;

/// Text, what replaces it, which of its occurrences that happens to, and what has to notice.
type Mutant = (&'static str, &'static str, usize, By);

/// Runs `case` with a mistake in the kernel `entry`; all that notices it, with what it says. A text that does not
/// compile and a kernel that does not end are no ways to be noticed.
fn notices(
    case: &Case,
    loader: Loader,
    entry: &'static str,
    (from, to, nth, _): Mutant,
) -> Result<Vec<(By, String)>, String> {
    let emulator = Emulator::metal(loader).unwrap();
    let emulator =
        emulator.with_mutation(Mutation { from: from.into(), to: to.into(), nth, entry: Some(entry) });
    emulator.set_options(Options {
        schedules: Schedule::ALL.to_vec(),
        budget: 200_000_000,
        ..Options::default()
    });
    let backward = matches!(entry, "delta" | "dq" | "dkv");
    let result = if backward { case.measure_backward_on(&emulator) } else { case.measure_on(&emulator) };
    let Err(error) = result else { return Ok(Vec::new()) };
    let error = error.to_string();
    let reports = emulator.take_reports();
    if reports.is_empty() {
        let wrong = error.contains("differs from the reference");
        return if wrong { Ok(vec![(By::Result, error)]) } else { Err(error) };
    }
    if reports.iter().any(|report| report.problem == Problem::Endless) {
        return Err(error);
    }
    Ok(reports.into_iter().map(|report| (By::Report(report.problem), report.to_string())).collect())
}

/// A problem in which every part of the kernel has work: ragged lengths, a band that passes the last key,
/// rows with nothing kept.
fn case(loader: Loader, head_dim: usize) -> Case {
    let mask = MaskMod::new(|i| (i.q() + 20).ge(i.kv()) & (i.q() % 7).ne(3));
    let square = Case::square(Kernels::Msl(loader), DType::F16, 75, head_dim);
    Case { q_len: 45, q_offset: 30, mask: Some(mask), ..square }
}

fn all_noticed(loader: Loader, head_dim: usize, mutants: &[Mutant]) {
    noticed_in("forward", &case(loader, head_dim), loader, mutants);
}

/// The same in the kernel `entry`, on a case that runs it.
fn noticed_in(entry: &'static str, case: &Case, loader: Loader, mutants: &[Mutant]) {
    if let Err(error) = clang() {
        eprintln!("skipped: {error}");
        return;
    }
    let mut missed = Vec::new();
    for mutant in mutants {
        let name = format!("{entry} {} {mutant:?}", loader.name());
        match notices(case, loader, entry, *mutant) {
            Err(error) => missed.push(format!("{name} does not run: {error}")),
            Ok(noticed) => match noticed.iter().find(|(by, _)| *by == mutant.3) {
                Some((_, message)) => println!("{name}: {message}"),
                None => missed.push(format!("{name} is noticed by {noticed:?}")),
            },
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    // Without a mistake nothing is noticed.
    let sound = notices(case, loader, entry, ("#define NONE", "#define NONE", 0, RESULT));
    assert_eq!(sound, Ok(Vec::new()));
}

/// Otherwise a typing mistake in a mutant would pass for a detector's work.
#[test]
fn a_text_that_does_not_compile_is_not_noticed_but_refused() {
    if let Err(error) = clang() {
        eprintln!("skipped: {error}");
        return;
    }
    for mutant in [("* ctx.p.scale", "* ctx.p.scales", 0, RESULT), ("no such text", "", 0, RESULT)] {
        let refused = notices(&case(Loader::Direct, 64), Loader::Direct, "forward", mutant);
        assert!(refused.is_err(), "{mutant:?}: {refused:?}");
    }
}

const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";

/// How often [`BARRIER`] stands in a kernel's text, and which functions with barriers the kernel calls: a new one
/// has to meet the tests below.
fn barriers(kernel: Kernel) -> (usize, [bool; 2]) {
    let spec = KernelSpec::new(kernel, DType::F16, 64, 64, 32 << 10).unwrap();
    let text = spec.on_metal(Loader::Staged).text(Language::Msl).unwrap();
    let ours = text.matches(BARRIER).count();
    assert_eq!(text.matches("threadgroup_barrier(").count(), ours, "barriers of another kind");
    // Once is the definition.
    let called = |name: &str| text.matches(&format!(" {name}(")).count() > 1;
    (ours, [called("stage"), called("stage_both")])
}

#[test]
fn every_barrier_is_needed() {
    // The last two are those of `stage_both`, which forward does not call.
    assert_eq!(barriers(Kernel::Forward), (4, [true, false]));
    for kernel in [Kernel::DecodeSplit, Kernel::DecodeCombine, Kernel::Delta, Kernel::Dsink] {
        assert_eq!(barriers(kernel).0, 0, "{kernel:?}");
    }
    // Both of `stage`: before the copy and after it. head_dim 128 has a part of q staged as well.
    for head_dim in [64, 128] {
        all_noticed(
            Loader::Staged,
            head_dim,
            &[
                (BARRIER, "", 0, RACE),
                (BARRIER, "", 1, UNWRITTEN),
                (BARRIER, "threadgroup_barrier(mem_flags::mem_none);", 0, RACE),
                (BARRIER, "threadgroup_barrier(mem_flags::mem_device);", 1, RACE),
                (BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", 0, RACE),
                (BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", 1, RACE),
            ],
        );
    }
}

#[test]
fn a_thread_that_misses_a_barrier_or_a_shuffle_is_noticed() {
    all_noticed(
        Loader::Staged,
        64,
        &[
            ("  stage_q(tiles,", "  if (simdgroup == 1u) return;\n  stage_q(tiles,", 0, DIVERGENCE),
            ("  stage_q(tiles,", "  if (lane == 7u) return;\n  stage_q(tiles,", 0, DIVERGENCE),
            (
                "    while (next_tile(ctx, walk)) {",
                "    while (next_tile(ctx, walk)) { if (walk.first == 32u && simdgroup == 0u) continue;",
                0,
                DIVERGENCE,
            ),
            (
                "const float sum = row_sum(online.l[r]);",
                "if (row0 + queries.own + 8u * r >= p.q_len) continue; const float sum = row_sum(online.l[r]);",
                0,
                DIVERGENCE,
            ),
        ],
    );
}

#[test]
fn wrong_indices_in_the_staged_loader_are_noticed() {
    all_noticed(
        Loader::Staged,
        64,
        &[
            // A load that is left out.
            ("i < count * quads;", "i < count * quads - 1u;", 0, UNWRITTEN),
            ("i < count * quads;", "i < (count - 1u) * quads;", 0, UNWRITTEN),
            // An index that is shifted, in memory of each kind.
            ("to[row * (stride / 4u) + quad] = x;", "to[row * (stride / 4u) + quad + 1u] = x;", 0, UNWRITTEN),
            (
                "(threadgroup const Elem*)tile + (8u * j + lane_col(lane)) * STAGE_STRIDE",
                "(threadgroup const Elem*)tile + (8u * j + lane_col(lane) + 1u) * STAGE_STRIDE",
                0,
                BOUNDS,
            ),
            ("if (first + row < rows.count) x", "x", 0, BOUNDS),
            (
                "ulong(first + row) * rows.stride, column",
                "ulong(first + row + 1u) * rows.stride, column",
                0,
                BOUNDS,
            ),
            // Lane maps that are swapped.
            (
                "(8u * j + lane_row(lane)) * STAGE_STRIDE",
                "(8u * j + lane_col(lane)) * STAGE_STRIDE",
                0,
                RESULT,
            ),
            ("(8 * N) + N * lane_row(lane);", "(8 * N) + N * lane_col(lane);", 0, RESULT),
        ],
    );
    // Without its copy of q, head_dim 128 reads what nobody wrote.
    all_noticed(Loader::Staged, 128, &[("  stage_q(tiles, q_rows, row0, thread_index);", "", 0, UNWRITTEN)]);
}

#[test]
fn wrong_indices_in_the_direct_loader_are_noticed() {
    all_noticed(
        Loader::Direct,
        64,
        &[
            ("ulong(min(row, rows.count - 1u))", "ulong(row)", 0, BOUNDS),
            ("row_of(rows, row + 1u), column", "row_of(rows, row), column", 0, RESULT),
            ("8u * j + lane_row(lane), column", "8u * j + lane_col(lane), column", 0, RESULT),
            ("(8 * N) + N * lane_row(lane);", "(8 * N) + N * lane_col(lane);", 0, RESULT),
        ],
    );
}

#[test]
fn wrong_arithmetic_is_noticed() {
    for loader in Loader::ALL {
        all_noticed(
            loader,
            64,
            &[
                ("((lane / 4u) & 4u)", "((lane / 4u) & 2u)", 0, RACE),
                ("simd_shuffle_xor(x, 8)", "simd_shuffle_xor(x, 4)", 0, RESULT),
                ("simd_shuffle_xor(x, 1)", "simd_shuffle_xor(x, 2)", 1, RESULT),
                ("online.l[r] *= shrink;", "", 0, RESULT),
                ("online.m[r] = m;", "", 0, RESULT),
                ("masked |= 1u << i;", "", 0, RESULT),
                ("column < k.count", "column <= k.count", 0, RESULT),
                ("queries.q[r] = int(at)", "queries.q[r] = int(at) + 1", 0, RESULT),
                ("if (at >= p.q_len) continue;", "", 0, BOUNDS),
                (
                    "const uint at = min(row0 + queries.own + 8u * r, p.q_len - 1u);",
                    "const uint at = row0 + queries.own + 8u * r;",
                    0,
                    BOUNDS,
                ),
                ("walk.kind = walk.kinds & 3u;", "walk.kind = FULL;", 0, RESULT),
                ("* ctx.p.scale", "", 0, RESULT),
            ],
        );
    }
}

/// Three queries of eight heads on two, over keys that fill no whole part: a full block, a block with two
/// empty tiles, two full ones, a partial one. One head keeps nothing.
fn decode_case(loader: Loader) -> Case {
    let mask = MaskMod::new(|i| {
        let near = (i.q() - i.kv()).lt(400) | i.kv().lt(128);
        near & i.q().ge(i.kv()) & i.head().ne(5)
    });
    Case {
        q_heads: 8,
        kv_heads: 2,
        q_len: 3,
        q_offset: 596,
        mask: Some(mask),
        // A row of out ends within a group of fragments.
        ..Case::square(Kernels::Msl(loader), DType::F16, 599, 36)
    }
}

#[test]
fn mistakes_in_the_decode_kernels_are_noticed() {
    let case = decode_case(Loader::Staged);
    noticed_in(
        "split",
        &case,
        Loader::Staged,
        &[
            ("kv = part * p.split_len;", "kv = 0u;", 0, RESULT),
            ("kv = part * p.split_len;", "kv = part * p.split_len + TILE;", 0, RESULT),
            (
                "ctx.tables[first] <= block) return FULL;",
                "ctx.tables[first] < block) return FULL;",
                0,
                RESULT,
            ),
            ("(2u * (tile % 4u)) & 3u", "(2u * (tile % 2u)) & 3u", 0, RESULT),
            ("kv_head * p.group + at / p.q_len", "kv_head * p.group + at % p.q_len", 0, RACE),
            ("int(at % p.q_len) + q_offset_of", "int(at / p.q_len) + q_offset_of", 0, RESULT),
            ("partial + 1u] = sum;", "partial + 1u] = 1.0f;", 0, RESULT),
            ("if (column < V_DIM) partials", "partials", 0, RACE),
            ("if (packed >= rows) continue;", "", 0, RACE),
            ("any == EMPTY", "any != FULL", 0, RESULT),
        ],
    );
    noticed_in(
        "combine",
        &case,
        Loader::Staged,
        &[
            ("weight = exp2(max(", "weight = 1.0f + exp2(max(", 0, RESULT),
            ("simd_shuffle(weight, i)", "weight", 0, RESULT),
            ("sum = simd_sum(sum);", "", 0, RESULT),
            ("sum == 0.0f", "false", 0, RESULT),
            ("part0 + lane < p.splits", "true", 0, BOUNDS),
            ("o[column] * w", "o[column + 1u] * w", 0, RESULT),
        ],
    );
}

#[test]
fn every_barrier_of_the_gradient_kernels_is_needed() {
    assert_eq!([Kernel::Dq, Kernel::Dkv].map(barriers), [(4, [true, true]); 2]);
    for entry in ["dq", "dkv"] {
        // Whole rows of both tensors are staged at once (the second pair of barriers in the text), or
        // columns of one (the first pair).
        for (head_dim, first) in [(64, 2), (256, 0)] {
            noticed_in(
                entry,
                &case(Loader::Staged, head_dim),
                Loader::Staged,
                &[
                    (BARRIER, "", first, RACE),
                    (BARRIER, "", first + 1, UNWRITTEN),
                    (BARRIER, "threadgroup_barrier(mem_flags::mem_none);", first, RACE),
                    (BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", first + 1, RACE),
                ],
            );
        }
    }
}

#[test]
fn mistakes_in_the_gradient_kernels_are_noticed() {
    let staged = case(Loader::Staged, 64);
    noticed_in(
        "delta",
        &staged,
        Loader::Staged,
        &[
            ("lane_sum(sum, 8)", "lane_sum(sum, 4)", 0, RESULT),
            ("column += 32u", "column += 64u", 0, RESULT),
            ("total -= dlse", "total += dlse", 0, RESULT),
            ("if (!there || lane != 0u) return;", "if (lane != 0u) return;", 0, BOUNDS),
            ("stats[p.delta_at + index]", "stats[p.delta_at + index + 1u]", 0, BOUNDS),
        ],
    );
    noticed_in(
        "dq",
        &staged,
        Loader::Staged,
        &[
            ("dp - stat.delta", "dp", 0, RESULT),
            ("score - stat.lse", "score", 0, RESULT),
            ("dp = d_post == 0.0f", "s = d_post == 0.0f", 0, RESULT),
            ("const float d_post = keep ?", "const float d_post = true ?", 0, RESULT),
            ("tiles + AREA_1, v_rows", "tiles, v_rows", 0, RESULT),
            ("chunk, HEAD_DIM, p.scale", "chunk, HEAD_DIM, 1.0f", 0, RESULT),
            ("if (at >= p.q_len) continue;", "", 0, BOUNDS),
            ("if (keep && kind != FULL)", "if (keep && kind == FULL)", 0, RESULT),
        ],
    );
    noticed_in(
        "dkv",
        &staged,
        Loader::Staged,
        &[
            ("simd_shuffle(read_stat.lse, column)", "read_stat.lse", 0, RESULT),
            ("simd_shuffle(read_stat.delta, column)", "read_stat.delta", 0, RESULT),
            ("(kinds >> 6u) & 0xcu", "(kinds >> 4u) & 0xcu", 0, RESULT),
            ("walk.transposed ? column_kinds", "!walk.transposed ? column_kinds", 0, RESULT),
            ("+ q_offset_of(ctx, b);\n            const Row", ";\n            const Row", 0, RESULT),
            ("dp[r][i / 2u].thread_elements()[i % 2u] = ds;", "", 1, RESULT),
            ("dv, s, tiles + AREA_1", "dv, s, tiles", 0, RESULT),
            ("if (at >= p.kv_len) continue;", "", 0, RACE),
            ("h < (kv_head + 1u) * p.group", "h < kv_head * p.group", 0, RESULT),
        ],
    );
    // Rows past the end: repeated here, zeros where they are staged.
    let direct = case(Loader::Direct, 64);
    noticed_in("dq", &direct, Loader::Direct, &[("kv, kv < kv_len, walk", "kv, true, walk", 0, RESULT)]);
    noticed_in("dkv", &direct, Loader::Direct, &[("at < p.q_len && kv < kv_len", "kv < kv_len", 0, RESULT)]);
}
