//! Mistakes put into the kernels one by one: every one must be noticed, by a report or by the result.
//!
//! Scheduling fences (`mem_none`) are exempt: without them a kernel is right, and on a GPU slower.

use flexattn::kernels::Loader;
use flexattn::{DType, MaskMod};
use flexattn_emulator::{Case, Emulator, Kernels, Mutation, Options, Schedule, clang};

/// Runs `case` with a mistake; what the emulator or the comparison says, or nothing.
fn notices(case: &Case, loader: Loader, (from, to, nth): (&str, &str, usize)) -> Option<String> {
    let emulator = Emulator::metal(loader).unwrap();
    let emulator = emulator.with_mutation(Mutation { from: from.into(), to: to.into(), nth });
    emulator.set_options(Options {
        schedules: Schedule::ALL.to_vec(),
        budget: 200_000_000,
        ..Options::default()
    });
    case.measure_on(&emulator).err().map(|error| error.to_string())
}

/// A problem in which every part of the kernel has work: ragged lengths, a band that passes the last key,
/// rows with nothing kept.
fn case(loader: Loader, head_dim: usize) -> Case {
    let mask = MaskMod::new(|i| (i.q() + 20).ge(i.kv()) & (i.q() % 7).ne(3));
    let square = Case::square(Kernels::Msl(loader), DType::F16, 75, head_dim);
    Case { q_len: 45, q_offset: 30, mask: Some(mask), ..square }
}

fn all_noticed(loader: Loader, head_dim: usize, mutants: &[(&str, &str, usize)]) {
    if let Err(error) = clang() {
        eprintln!("skipped: {error}");
        return;
    }
    let case = case(loader, head_dim);
    case.measure().unwrap_or_else(|error| panic!("{error}"));
    for mutant in mutants {
        let noticed = notices(&case, loader, *mutant);
        let noticed =
            noticed.unwrap_or_else(|| panic!("nobody noticed {mutant:?} in the {} kernel", loader.name()));
        assert!(!noticed.contains("is not there"), "{noticed}");
        println!("{:?} -> {:?}: {}", mutant.0, mutant.1, noticed.lines().next().unwrap_or_default());
    }
}

const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";

#[test]
fn every_barrier_is_needed() {
    // Both of `stage`: before the copy and after it. head_dim 128 has a part of q staged as well.
    for head_dim in [64, 128] {
        all_noticed(
            Loader::Staged,
            head_dim,
            &[
                (BARRIER, "", 0),
                (BARRIER, "", 1),
                (BARRIER, "threadgroup_barrier(mem_flags::mem_none);", 0),
                (BARRIER, "threadgroup_barrier(mem_flags::mem_device);", 1),
                (BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", 0),
                (BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", 1),
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
            ("  stage_q(tiles,", "  if (simdgroup == 1u) return;\n  stage_q(tiles,", 0),
            ("  stage_q(tiles,", "  if (lane == 7u) return;\n  stage_q(tiles,", 0),
            (
                "    while (next_tile(ctx, walk)) {",
                "    while (next_tile(ctx, walk)) { if (walk.first == 32u && simdgroup == 0u) continue;",
                0,
            ),
            (
                "const float sum = row_sum(online.l[r]);",
                "if (row0 + queries.own + 8u * r >= p.q_len) continue; const float sum = row_sum(online.l[r]);",
                0,
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
            ("i < TILE_KV * STAGE / 4u;", "i < TILE_KV * STAGE / 4u - 1u;", 0),
            ("i < TILE_KV * STAGE / 4u;", "i < (TILE_KV - 1u) * STAGE / 4u;", 0),
            // An index that is shifted, in memory of each kind.
            (
                "tiles[row * (KV_STRIDE / 4u) + quad] = x;",
                "tiles[row * (KV_STRIDE / 4u) + quad + 1u] = x;",
                0,
            ),
            (
                "(threadgroup const Elem*)tiles + (8u * j + lane_col(lane)) * KV_STRIDE",
                "(threadgroup const Elem*)tiles + (8u * j + lane_col(lane) + 1u) * KV_STRIDE",
                0,
            ),
            ("if (kv + row < rows.count) x", "x", 0),
            ("ulong(kv + row) * rows.stride, column", "ulong(kv + row + 1u) * rows.stride, column", 0),
            // Lane maps that are swapped.
            ("(8u * j + lane_row(lane)) * KV_STRIDE", "(8u * j + lane_col(lane)) * KV_STRIDE", 0),
            ("K_PACK * lane_row(lane);", "K_PACK * lane_col(lane);", 0),
        ],
    );
    // Without its copy of q, head_dim 128 reads what nobody wrote.
    all_noticed(Loader::Staged, 128, &[("  stage_q(tiles, q_rows, row0, thread_index);", "", 0)]);
}

#[test]
fn wrong_indices_in_the_direct_loader_are_noticed() {
    all_noticed(
        Loader::Direct,
        64,
        &[
            ("ulong(min(row, rows.count - 1u))", "ulong(row)", 0),
            ("row_of(rows, row + 1u), column", "row_of(rows, row), column", 0),
            ("8u * j + lane_row(lane), column", "8u * j + lane_col(lane), column", 0),
            ("K_PACK * lane_row(lane);", "K_PACK * lane_col(lane);", 0),
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
                ("((lane / 4u) & 4u)", "((lane / 4u) & 2u)", 0),
                ("simd_shuffle_xor(x, 8)", "simd_shuffle_xor(x, 4)", 0),
                ("simd_shuffle_xor(x, 1)", "simd_shuffle_xor(x, 2)", 1),
                ("online.l[r] *= shrink;", "", 0),
                ("online.m[r] = m;", "", 0),
                ("masked |= 1u << i;", "", 0),
                ("column < k.count", "column <= k.count", 0),
                ("queries.q[r] = int(at)", "queries.q[r] = int(at) + 1", 0),
                ("if (at >= p.q_len) continue;", "", 0),
                (
                    "const uint at = min(row0 + queries.own + 8u * r, p.q_len - 1u);",
                    "const uint at = row0 + queries.own + 8u * r;",
                    0,
                ),
                ("walk.kind = walk.kinds & 3u;", "walk.kind = FULL;", 0),
                ("* ctx.p.scale", "", 0),
            ],
        );
    }
}
