//! Small kernels with one mistake each, and the same without: what the emulator must and must not say.

use flexattn_emulator::{Bound, Kernel, Memory, MmaOrder, Options, Outcome, Problem, Schedule, clang};

const HEAD: &str = "#include <metal_stdlib>\nusing namespace metal;\n";

fn floats(values: &[f32]) -> Memory {
    Memory::from_bytes(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
}

fn read(memory: &Memory) -> Vec<f32> {
    let bytes = memory.read(0, memory.size());
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// Runs `body` as the body of a kernel over `device float* x` (buffer 0) and `device const float* y`
/// (buffer 1), 64 floats each, in all schedules.
fn run(body: &str, groups: u32, threads: u32) -> Option<(Outcome, Vec<f32>)> {
    run_with(body, groups, threads, Options::default())
}

/// The same with options of its own.
fn run_with(body: &str, groups: u32, threads: u32, options: Options) -> Option<(Outcome, Vec<f32>)> {
    if let Err(error) = clang() {
        eprintln!("skipped: {error}");
        return None;
    }
    let text = format!(
        "{HEAD}kernel void f(device float* x [[buffer(0)]], device const float* y [[buffer(1)]],\n\
         uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],\n\
         uint g [[threadgroup_position_in_grid]]) {{\n{body}\n}}\n"
    );
    let kernel = Kernel::compile(&text).unwrap_or_else(|error| panic!("{error}"));
    let (x, y) = (floats(&[0.0; 64]), floats(&std::array::from_fn::<f32, 64, _>(|i| i as f32)));
    let options = Options { schedules: Schedule::ALL.to_vec(), budget: 1_000_000, ..options };
    let bound = [Bound::whole(0, &x), Bound::whole(1, &y)];
    let outcome = kernel.launch("f", &bound, [groups, 1, 1], [threads, 1, 1], &options).unwrap();
    Some((outcome, read(&x)))
}

/// The kernel's first line of the body is line 6.
fn finds(body: &str, groups: u32, threads: u32, problem: Problem, line: u32) {
    let Some((outcome, _)) = run(body, groups, threads) else { return };
    // Which of two racing accesses comes second depends on the schedule.
    let found = |line| {
        outcome.reports.iter().any(|r| r.problem == problem && (r.line == line || r.other_line == line))
    };
    assert!(found(line), "no {problem:?} at line {line}, but {:?}", outcome.reports);
}

fn is_clean(body: &str, groups: u32, threads: u32) -> Vec<f32> {
    let Some((outcome, x)) = run(body, groups, threads) else { return vec![f32::NAN; 64] };
    assert!(outcome.reports.is_empty(), "{}", outcome.reports[0]);
    x
}

#[test]
fn read_past_a_buffer_is_found() {
    finds("x[i] = 1.0;\nx[i] = y[i + 1];", 1, 64, Problem::OutOfBounds, 7);
}

#[test]
fn write_before_a_buffer_is_found() {
    finds("x[int(i) - 1] = 1.0;", 1, 32, Problem::OutOfBounds, 6);
}

/// Both ways, near and far, in one allocation or in two: what lies there is never reached.
#[test]
fn an_index_that_leads_into_another_buffer_is_found() {
    if let Err(error) = clang() {
        eprintln!("skipped: {error}");
        return;
    }
    let kernel = Kernel::compile(&format!(
        "{HEAD}kernel void f(device float* x [[buffer(0)]], device float* y [[buffer(1)]],\n\
         constant int& by [[buffer(2)]], uint i [[thread_position_in_grid]]) {{\n\
         x[i] = 1.0;\n\
         y[int(i) + by] = 2.0;\n}}\n"
    ));
    let kernel = kernel.unwrap_or_else(|error| panic!("{error}"));
    let (together, alone) = (floats(&[0.0; 96]), floats(&[0.0; 32]));
    let part = |index, at: usize| Bound { index, memory: together.clone(), offset: 128 * at, size: 128 };
    // The pieces of one allocation that two buffers may be: 32 floats each, y in the middle.
    let halves = [part(0, 0), part(1, 1)];
    let two = [Bound::whole(0, &together), Bound::whole(1, &alone)];
    for (bound, by) in halves.iter().map(|_| &halves).zip([-32, 32]).chain([(&two, -64), (&two, 1 << 20)]) {
        let by = Memory::from_bytes(&i32::to_le_bytes(by));
        let bound = [bound[0].clone(), bound[1].clone(), Bound::whole(2, &by)];
        let outcome = kernel.launch("f", &bound, [1, 1, 1], [32, 1, 1], &Options::default()).unwrap();
        let report = &outcome.reports[0];
        assert_eq!((report.problem, report.line), (Problem::OutOfBounds, 6), "{report}");
        assert!(report.to_string().contains("of buffer 1"), "{report}");
    }
    let by = Memory::from_bytes(&[0; 4]);
    let bound = [halves[0].clone(), halves[1].clone(), Bound::whole(2, &by)];
    let outcome = kernel.launch("f", &bound, [1, 1, 1], [32, 1, 1], &Options::default()).unwrap();
    assert!(outcome.reports.is_empty(), "{}", outcome.reports[0]);
    let expected: Vec<f32> = [1.0, 2.0, 0.0].into_iter().flat_map(|x| [x; 32]).collect();
    assert_eq!(read(&together), expected);
}

#[test]
fn access_past_a_threadgroup_array_is_found() {
    finds(
        "SHARED float a[32];\nSHARED float b[32];\nb[i] = 0.0;\na[i + 1] = 1.0;\nx[i] = b[i];",
        1,
        32,
        Problem::OutOfBounds,
        9,
    );
}

#[test]
fn unordered_threadgroup_accesses_are_a_race() {
    let body = |barrier: &str| format!("SHARED float a[64];\na[i] = y[i];\n{barrier}\nx[i] = a[63 - i];");
    finds(&body(""), 1, 64, Problem::Race, 9);
    finds(&body("threadgroup_barrier(mem_flags::mem_none);"), 1, 64, Problem::Race, 9);
    finds(&body("threadgroup_barrier(mem_flags::mem_device);"), 1, 64, Problem::Race, 9);
    finds(&body("simdgroup_barrier(mem_flags::mem_threadgroup);"), 1, 64, Problem::Race, 9);
    let x = is_clean(&body("threadgroup_barrier(mem_flags::mem_threadgroup);"), 1, 64);
    assert!(x[0].is_nan() || x[0] == 63.0);
}

#[test]
fn a_simdgroup_barrier_orders_its_own_lanes_only() {
    let body = |other: &str| {
        format!(
            "SHARED float a[64];\na[i] = y[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nx[i] = a[{other}];"
        )
    };
    is_clean(&body("i ^ 1"), 1, 64);
    finds(&body("i ^ 32"), 1, 64, Problem::Race, 9);
}

#[test]
fn a_shuffle_orders_no_memory() {
    finds(
        "SHARED float a[64];\na[i] = y[i];\nfloat z = simd_shuffle_xor(y[i], 1);\nx[i] = z + a[i ^ 1];",
        1,
        64,
        Problem::Race,
        9,
    );
}

#[test]
fn overwriting_what_others_still_read_is_a_race() {
    let body = |barrier: &str| {
        format!(
            "SHARED float a[64];\na[i] = y[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nfloat z = a[63 - i];\n{barrier}\na[i] = 2.0 * z;\nx[i] = a[i];"
        )
    };
    finds(&body(""), 1, 64, Problem::Race, 11);
    is_clean(&body("threadgroup_barrier(mem_flags::mem_threadgroup);"), 1, 64);
}

#[test]
fn device_memory_is_never_ordered_between_threadgroups() {
    finds("if (i == 0) x[0] = float(g);", 2, 32, Problem::Race, 6);
    finds(
        "x[i + 32 * g] = 1.0;\nthreadgroup_barrier(mem_flags::mem_device);\ny = x;\nx[32 * g + i] += y[32 - 32 * g];",
        2,
        32,
        Problem::Race,
        9,
    );
    is_clean("x[i + 32 * g] = y[i];", 2, 32);
}

#[test]
fn a_device_barrier_orders_device_memory_within_a_threadgroup() {
    let body = |flag: &str| {
        format!(
            "x[i] = y[i];\nthreadgroup_barrier(mem_flags::{flag});\nfloat z = x[i ^ 33];\nthreadgroup_barrier(mem_flags::{flag});\nx[i] = z;"
        )
    };
    is_clean(&body("mem_device"), 1, 64);
    finds(&body("mem_threadgroup"), 1, 64, Problem::Race, 8);
}

#[test]
fn neighbours_within_one_word_do_not_race() {
    is_clean("device half* h = (device half*)x;\nh[i] = half(y[i]);", 1, 64);
    is_clean("device uchar* h = (device uchar*)x;\nh[i] = uchar(y[i]);", 1, 64);
}

#[test]
fn atomics_race_with_plain_accesses_only() {
    let x = is_clean(
        "device atomic_uint* n = (device atomic_uint*)x;\natomic_fetch_add_explicit(n, 1u, memory_order_relaxed);",
        2,
        64,
    );
    assert!(x[0].is_nan() || x[0].to_bits() == 128);
    finds(
        "device atomic_uint* n = (device atomic_uint*)x;\natomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\nx[1 + i] = x[0];",
        1,
        32,
        Problem::Race,
        8,
    );
}

/// Its own atomic access comes last, but those of others are still on their way.
#[test]
fn a_plain_access_after_the_atomics_of_others_needs_a_barrier() {
    let counted = |barrier: &str, access: &str| {
        format!(
            "device atomic_uint* n = (device atomic_uint*)x;\n\
             atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n{barrier}\n{access}"
        )
    };
    let device = "threadgroup_barrier(mem_flags::mem_device);";
    // The last to count, in every schedule, so that the last writer is the one who reads or writes.
    let last = "if (atomic_load_explicit(n, memory_order_relaxed) == 64u) x[1] = x[0];";
    for access in [last, "if (atomic_load_explicit(n, memory_order_relaxed) == 64u) x[0] = 1.0;"] {
        finds(&counted("", access), 1, 64, Problem::Race, 9);
        finds(&counted("simdgroup_barrier(mem_flags::mem_device);", access), 1, 64, Problem::Race, 9);
        finds(&counted("threadgroup_barrier(mem_flags::mem_threadgroup);", access), 1, 64, Problem::Race, 9);
    }
    is_clean(&counted(device, "if (i == 5) x[1] = x[0];"), 1, 64);
    is_clean(&counted("simdgroup_barrier(mem_flags::mem_device);", "if (i == 5) x[1] = x[0];"), 1, 32);
    // No barrier reaches other threadgroups.
    finds(&counted(device, "if (g == 1 && i == 5) x[1] = x[0];"), 2, 32, Problem::Race, 9);
    // Of one thread everything comes in order.
    is_clean(
        "device atomic_uint* n = (device atomic_uint*)x + i;\n\
         atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n((device uint*)x)[i] += 1u;",
        1,
        64,
    );
}

/// Each order of the same additions is a right one, so none of them is reported but for the difference.
#[test]
fn results_that_depend_on_the_order_of_atomics_are_found() {
    let counted = |result: &str| {
        format!(
            "device atomic_uint* n = (device atomic_uint*)(x + 63);\n\
             const uint at = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n{result}"
        )
    };
    finds(&counted("x[i] = float(at);"), 1, 32, Problem::Nondeterministic, 0);
    finds(&counted("x[at] = y[i];"), 1, 32, Problem::Nondeterministic, 0);
    // How many there are, and that each got a place, is the same in every order.
    let x = is_clean(&counted("x[at] = 1.0;"), 1, 32);
    assert!(x[0].is_nan() || x[..32] == [1.0; 32] && x[63].to_bits() == 32);
}

#[test]
fn unwritten_threadgroup_memory_is_found() {
    finds(
        "SHARED float a[64];\nif (i < 63) a[i] = y[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nx[i] = a[i];",
        1,
        64,
        Problem::Uninitialised,
        9,
    );
}

#[test]
fn what_an_earlier_threadgroup_wrote_does_not_count() {
    finds(
        "SHARED float a[64];\nif (g == 0) a[i] = y[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nif (g == 1) x[i] = a[i];",
        2,
        64,
        Problem::Uninitialised,
        9,
    );
}

#[test]
fn a_barrier_that_some_threads_skip_is_found() {
    finds("if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);", 1, 64, Problem::Divergence, 6);
    finds(
        "if (i == 5) return;\nthreadgroup_barrier(mem_flags::mem_threadgroup);",
        1,
        64,
        Problem::Divergence,
        7,
    );
}

#[test]
fn a_simdgroup_operation_that_some_lanes_skip_is_found() {
    finds("float z = y[i];\nif (lane < 31) z = simd_sum(z);\nx[i] = z;", 1, 64, Problem::Divergence, 7);
    finds(
        "float z = y[i];\nif (lane < 16)\n  z = simd_sum(z);\nelse\n  z = 2.0 * simd_sum(z);\nx[i] = z;",
        1,
        32,
        Problem::Divergence,
        10,
    );
    is_clean("float z = y[i];\nif (i < 32) z = simd_sum(z);\nx[i] = z;", 1, 64);
}

#[test]
fn a_misaligned_vector_access_is_found() {
    finds("float2 z = *(device const float2*)(y + i);\nx[i] = z.x + z.y;", 1, 32, Problem::Misaligned, 6);
}

#[test]
fn a_write_to_a_const_buffer_is_found() {
    finds("((device float*)y)[i] = 1.0;", 1, 32, Problem::ReadOnly, 6);
}

#[test]
fn an_endless_kernel_is_stopped() {
    let Some((outcome, _)) = run("while (y[i] >= 0.0) x[i] += 1.0;", 1, 32) else { return };
    assert_eq!(outcome.reports[0].problem, Problem::Endless);
}

#[test]
fn matrices_have_apples_lane_layout() {
    // A is the row number, B the identity: each lane's product is its own row.
    let x = is_clean(
        "simdgroup_float8x8 a, b(1.0), c = make_filled_simdgroup_matrix<float, 8, 8>(0.0);\n\
         uint q = lane / 4, row = (q & 4) + (lane / 2) % 4, col = (q & 2) * 2 + (lane % 2) * 2;\n\
         a.thread_elements()[0] = float(8 * row + col);\na.thread_elements()[1] = float(8 * row + col + 1);\n\
         simdgroup_multiply_accumulate(c, a, b, c);\nx[8 * row + col] = c.thread_elements()[0];\nx[8 * row + col + 1] = c.thread_elements()[1];",
        1,
        32,
    );
    assert!(x[0].is_nan() || (0..64).all(|i| x[i] == i as f32), "{x:?}");
}

/// Bits as whole numbers: neighbouring floats are one apart.
fn apart(a: &[f32], b: &[f32]) -> Vec<u32> {
    a.iter().zip(b).map(|(a, b)| a.to_bits().abs_diff(b.to_bits())).collect()
}

#[test]
fn moved_exponentials_move_by_one_or_two_units_in_the_last_place() {
    for body in ["x[i] = exp2(0.37 * y[i] - 11.0);", "x[i] = exp(0.21 * y[i] - 7.0);"] {
        let moved = |perturb_exp2| run_with(body, 1, 64, Options { perturb_exp2, ..Options::default() });
        let Some((_, plain)) = moved(0) else { return };
        let results: Vec<Vec<f32>> = (1..9).map(|seed| moved(seed).unwrap().1).collect();
        for (i, result) in results.iter().enumerate() {
            let by = apart(&plain, result);
            assert!(by.iter().all(|by| *by <= 2), "{by:?}");
            let changed = by.iter().filter(|by| **by > 0).count();
            assert!(changed >= 32 && by.contains(&1) && by.contains(&2), "seed {}: {by:?}", i + 1);
            // Both ways, the same for equal inputs, another way for each seed.
            assert!(
                plain.iter().zip(result).any(|(a, b)| a < b) && plain.iter().zip(result).any(|(a, b)| a > b)
            );
            assert_eq!(apart(result, &moved(i as u32 + 1).unwrap().1), [0; 64]);
            assert!(results[..i].iter().all(|other| other != result));
        }
    }
}

#[test]
fn each_order_within_a_product_gives_other_bits() {
    let body = "simdgroup_float8x8 a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(0.1);\n\
                a.thread_elements() = float2(sin(y[i]), sin(y[i] + 0.5));\n\
                b.thread_elements() = float2(cos(1.7 * y[i]), cos(1.7 * y[i] + 0.5));\n\
                simdgroup_multiply_accumulate(c, a, b, c);\n\
                x[2 * i] = c.thread_elements()[0];\nx[2 * i + 1] = c.thread_elements()[1];";
    let ordered = |mma_order| run_with(body, 1, 32, Options { mma_order, ..Options::default() });
    let Some((_, forward)) = ordered(MmaOrder::Forward) else { return };
    let others = [MmaOrder::Reverse, MmaOrder::Pairwise].map(|order| ordered(order).unwrap().1);
    for (one, other) in [(&forward, &others[0]), (&forward, &others[1]), (&others[0], &others[1])] {
        assert!(apart(one, other).iter().any(|by| *by > 0));
        assert!(one.iter().zip(other).all(|(a, b)| (a - b).abs() < 1e-6), "{one:?} {other:?}");
    }
}

#[test]
fn stored_and_loaded_matrices_agree_with_the_layout() {
    let x = is_clean(
        "simdgroup_float8x8 m;\nsimdgroup_load(m, y, 8, ulong2(0, 0), true);\nsimdgroup_store(m, x, 8);",
        1,
        32,
    );
    assert!(x[0].is_nan() || (0..64).all(|i| x[i] == (8 * (i % 8) + i / 8) as f32), "{x:?}");
}

#[test]
fn half_rounds_after_every_operation() {
    let x = is_clean("half h = half(2048.0);\nx[i] = float(h + half(1.0) - h);", 1, 32);
    assert!(x[0].is_nan() || x[0] == 0.0);
}

#[test]
fn vectors_are_built_from_scalars_and_vectors() {
    let x = is_clean(
        "float4 v = float4(float2(1.0, 2.0), 3.0, 4.0);\nuint3 u = uint3(v.wzy);\nx[i] = v.x + 10.0 * float(u.x) + 100.0 * half2(v.yz).y;",
        1,
        32,
    );
    assert!(x[0].is_nan() || x[0] == 341.0, "{}", x[0]);
}

#[test]
fn work_is_counted_as_written() {
    let Some((outcome, _)) = run(
        "SHARED half t[64];\nt[i] = half(y[i]);\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n\
         float z = fma(float(t[i ^ 1]), 2.0, 1.0) + simd_shuffle_xor(y[i], 8);\nx[i] = exp2(simd_max(z));",
        1,
        64,
    ) else {
        return;
    };
    assert!(outcome.reports.is_empty(), "{}", outcome.reports[0]);
    let c = outcome.counters;
    // y is read twice: a barrier stands between.
    assert_eq!(
        (c.device_read, c.device_write, c.threadgroup_read, c.threadgroup_write),
        (512, 256, 128, 128)
    );
    assert_eq!((c.barriers, c.shuffles, c.reductions, c.transcendentals), (1, 2, 2, 64));
    assert_eq!((c.fp, c.conversions), (128, 128));
}
