//! Bad input as a program meets it, through `Attention`: each case is refused before anything runs, says
//! the value found, the rule and the way out, and leaves the machine and the tensors as they were.

use flexattn::expr::{self, CaptureData, CaptureType, Captured, DeviceHandle};
use flexattn::{
    Attention, BlockMask, BlockShape, Capture, DType, Error, Gpu, Layout, MaskMod, Resident, Result, Runtime,
    Scalar, ScoreMod, Tensor, Tier, Usage, masks, scores, wgpu,
};

/// A machine and tensors that fit together: q `[1, 8, 6, 16]`, k and v `[1, 2, 10, 16]`.
struct Bench {
    gpu: Gpu,
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Bench {
    fn new(gpu: Gpu) -> Bench {
        let tensor = |shape: [usize; 4]| {
            let values: Vec<f32> =
                (0..shape.iter().product()).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
            gpu.tensor(&values, shape).unwrap()
        };
        let (q, kv) = ([1, 8, 6, 16], [1, 2, 10, 16]);
        Bench { q: tensor(q), k: tensor(kv), v: tensor(kv), gpu }
    }

    /// Whatever is here: the messages are the same on every tier.
    fn any() -> Bench {
        Bench::new(Gpu::new().unwrap())
    }

    /// Runs a call that must fail, and then a good one, which must give what it gave before.
    fn refused(&self, call: impl FnOnce() -> Result<()>) -> Error {
        let good = || Attention::new().forward(&self.gpu, &self.q, &self.k, &self.v)?.out.read();
        let before = good().unwrap();
        let error = call().expect_err("a call with bad input succeeded");
        assert_eq!(good().unwrap(), before, "after: {error}");
        error
    }

    fn forward(&self, attention: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        attention.forward(&self.gpu, q, k, v)?.out.read().map(|_| ())
    }

    /// The error of a plain call on these tensors.
    fn refuses(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Error {
        self.refused(|| self.forward(&Attention::new(), q, k, v))
    }

    /// The error of a call with these mods on good tensors.
    fn refuses_mods(&self, attention: &Attention) -> Error {
        self.refused(|| self.forward(attention, &self.q, &self.k, &self.v))
    }
}

/// The message holds all of these.
fn says(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
}

#[test]
fn shapes_that_do_not_fit_say_both_sizes_and_the_rule() {
    let bench = Bench::any();
    let zeros = |shape| bench.gpu.zeros(DType::F32, shape).unwrap();
    let Bench { q, k, v, .. } = &bench;

    let three_heads = zeros([1, 3, 10, 16]);
    let error = bench.refuses(q, &three_heads, &three_heads);
    assert!(error.is_shape());
    says(&error, &["kv_heads is 3", "must divide q_heads = 8"]);

    let error = bench.refuses(q, &zeros([1, 2, 10, 24]), v);
    assert!(error.is_shape());
    says(&error, &["head_dim 24", "16"]);

    let error = bench.refuses(q, k, &zeros([1, 2, 9, 16]));
    assert!(error.is_shape());
    says(&error, &["kv_len 9", "10"]);

    let error = bench.refuses(q, k, &zeros([1, 1, 10, 16]));
    assert!(error.is_shape());
    says(&error, &["1 heads", "2"]);

    let (k2, v2) = (zeros([2, 2, 10, 16]), zeros([2, 2, 10, 16]));
    let error = bench.refuses(q, &k2, &v2);
    assert!(error.is_shape());
    says(&error, &["batch", "2", "must be that of q, 1"]);

    let out = zeros([1, 8, 6, 8]);
    let error = bench.refused(|| Attention::new().forward_into(&bench.gpu, q, k, v, &out).map(|_| ()));
    assert!(error.is_shape());
    says(&error, &["[1, 8, 6, 8]", "[1, 8, 6, 16]"]);
}

#[test]
fn sizes_of_zero_are_empty_results_or_clear_refusals() {
    let bench = Bench::any();
    let zeros = |shape| bench.gpu.zeros(DType::F32, shape).unwrap();
    let no_rows = Attention::new().forward(&bench.gpu, &zeros([1, 8, 0, 16]), &bench.k, &bench.v).unwrap();
    assert!(no_rows.out.read().unwrap().is_empty());
    let no_keys = zeros([1, 2, 0, 16]);
    let nothing = Attention::new().forward(&bench.gpu, &bench.q, &no_keys, &no_keys).unwrap();
    assert!(nothing.out.read().unwrap().iter().all(|&value| value == 0.0));
    assert!(nothing.lse.unwrap().read().unwrap().iter().all(|&value| value == f32::NEG_INFINITY));

    let error = bench.refused(|| bench.gpu.zeros(DType::F32, [1, 8, 6, 0]).map(|_| ()));
    assert!(error.is_shape());
    says(&error, &["[1, 8, 6, 0]", "at least one column"]);

    let headless = zeros([1, 0, 6, 16]);
    let error = bench.refuses(&headless, &bench.k, &bench.v);
    assert!(error.is_shape());
    says(&error, &["0 q_heads", "at least 1"]);
}

#[test]
fn element_types_that_differ_are_named() {
    let bench = Bench::any();
    let half = bench.gpu.zeros(DType::F16, [1, 2, 10, 16]).unwrap();
    let error = bench.refuses(&bench.q, &half, &bench.v);
    assert!(error.is_dtype());
    says(&error, &["q is f32", "k is f16", "one type"]);

    let out = bench.gpu.zeros(DType::BF16, [1, 8, 6, 16]).unwrap();
    let error = bench.refused(|| {
        Attention::new().forward_into(&bench.gpu, &bench.q, &bench.k, &bench.v, &out).map(|_| ())
    });
    assert!(error.is_dtype());
    says(&error, &["out is bf16", "q is f32"]);

    let error = DType::from_name("f64").unwrap_err();
    assert!(error.is_dtype());
    says(&error, &["f64", "f32, f16, bf16"]);
}

#[test]
fn captures_must_be_there_have_their_rank_and_be_used() {
    let bench = Bench::any();
    let slope: Capture = Capture::f32("slope", &[1.0; 8], &[8]).unwrap().into();

    // Missing: the text calls what nobody gave.
    let error = ScoreMod::from_wgsl("score * slope(h)", &[], &[]).unwrap_err();
    says(&error, &["slope", "line 1, column 9"]);

    // Given, but no text names them; a comment does not.
    let unused = MaskMod::from_wgsl("q >= kv // slope(h)", std::slice::from_ref(&slope), &[]).unwrap_err();
    assert!(unused.is_capture());
    says(&unused, &["slope", "never reads it", "slope(i)"]);
    let cap: Scalar = Scalar::f32("cap", 5.0).unwrap().into();
    let unused = ScoreMod::from_wgsl("score", &[], &[cap]).unwrap_err();
    says(&unused, &["cap", "never reads it"]);

    // Of wrong rank, in the text and in the values.
    let error = ScoreMod::from_wgsl("score * slope(h, q)", std::slice::from_ref(&slope), &[]).unwrap_err();
    assert!(error.is_parse());
    says(&error, &["slope", "1", "2"]);
    let score_mod = ScoreMod::from_wgsl("score * slope(h)", std::slice::from_ref(&slope), &[]).unwrap();
    let attention = Attention::new().score_mod(score_mod.clone());
    let square: Capture = Capture::f32("slope", &[1.0; 16], &[8, 2]).unwrap().into();
    let error = bench.refused(|| attention.clone().with_capture(square).map(|_| ()));
    assert!(error.is_capture());
    says(&error, &["slope", "rank 1"]);

    // Of another type.
    let whole: Capture = Capture::i32("slope", &[1; 8], &[8]).unwrap().into();
    assert_eq!(whole.dtype(), CaptureType::I32);
    let error = bench.refused(|| attention.clone().with_capture(whole).map(|_| ()));
    assert!(error.is_capture());
    says(&error, &["slope", "f32", "i32"]);

    // Unused.
    let other: Capture = Capture::f32("table", &[1.0; 8], &[8]).unwrap().into();
    let error = bench.refused(|| attention.clone().with_capture(other.clone()).map(|_| ()));
    assert!(error.is_capture());
    says(&error, &["table", "neither"]);

    // Shape and values that disagree.
    let error = Capture::f32("slope", &[1.0; 7], &[8]).unwrap_err();
    assert!(error.is_capture());
    says(&error, &["slope", "7", "8"]);

    // Scalars.
    let error = attention.with_scalar(Scalar::f32("cap", 1.0).unwrap()).unwrap_err();
    assert!(error.is_capture());
    says(&error, &["cap", "neither"]);
}

#[test]
fn syntax_and_type_errors_in_text_have_line_column_and_caret() {
    let text = "fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 {\n  let near = q - kv < 4;\n  return scor * 2.0;\n}";
    let error = ScoreMod::from_wgsl(text, &[], &[]).unwrap_err();
    let place = error.parse_error().expect("a place");
    assert_eq!((place.line, place.column), (3, 10), "{error}");
    says(&error, &["scor", "3 |   return scor * 2.0;\n  |          ^^^^"]);

    let error = MaskMod::from_wgsl("q >= kv &&", &[], &[]).unwrap_err();
    assert!(error.is_parse());
    says(&error, &["line 1, column", "1 | q >= kv &&", "^"]);

    let error = MaskMod::from_wgsl("q + kv", &[], &[]).unwrap_err();
    assert!(error.is_parse());
    says(&error, &["bool", "i32", "^"]);

    let error = MaskMod::from_wgsl("q >= 1.5", &[], &[]).unwrap_err();
    assert!(error.is_parse());
    says(&error, &["line 1, column", "^"]);
}

#[test]
fn index_expressions_that_overflow_i32_are_refused_with_the_value() {
    let bench = Bench::any();
    let mask = MaskMod::from_wgsl("q * 1000000000 + kv >= 0", &[], &[]).unwrap();
    let error = bench.refuses_mods(&Attention::new().mask_mod(mask));
    says(&error, &["q * 1000000000", "5000000000", "wrapping_mul"]);
    let meant = MaskMod::from_wgsl("wrapping_mul(q, 1000000000) + kv != 7", &[], &[]).unwrap();
    bench.forward(&Attention::new().mask_mod(meant), &bench.q, &bench.k, &bench.v).unwrap();
}

#[test]
fn what_lengths_scalars_and_values_of_an_earlier_call_allowed_is_looked_at_again() {
    let gpu = Gpu::builder().tier(Tier::Cpu).build().unwrap();
    let run = |attention: &Attention, kv_len: usize| {
        let q = gpu.tensor(&[0.5f32], [1, 1, 1, 1]).unwrap();
        let k = gpu.tensor(&vec![0.5f32; kv_len], [1, 1, kv_len, 1]).unwrap();
        attention.forward(&gpu, &q, &k, &k).map(|_| ())
    };
    // Both lengths lie between the same powers of two.
    let far = Attention::new().mask_mod(MaskMod::from_wgsl("kv * 50000 >= 0", &[], &[]).unwrap());
    run(&far, 40_000).unwrap();
    let error = run(&far, 45_000).unwrap_err();
    assert!(error.is_overflow());
    says(&error, &["kv * 50000", "2249950000"]);
    run(&far, 40_000).unwrap();

    let table: Capture = Capture::f32("table", &[0.5; 4], &[4]).unwrap().into();
    let shift: Scalar = Scalar::i32("shift", 0).unwrap().into();
    let shifted = ScoreMod::from_wgsl("score + table(kv + shift)", &[table], &[shift]).unwrap();
    let attention = Attention::new().score_mod(shifted);
    run(&attention, 4).unwrap();
    let attention = attention.with_scalar(Scalar::i32("shift", 1000).unwrap()).unwrap();
    says(&run(&attention, 4).unwrap_err(), &["table", "1000 to 1003", "0 to 3"]);

    // Which places of a table are read may depend on the values of another.
    let captures = |at: i32| -> [Capture; 2] {
        [
            Capture::f32("table", &[0.5; 4], &[4]).unwrap().into(),
            Capture::i32("place", &[at; 4], &[4]).unwrap().into(),
        ]
    };
    let placed = ScoreMod::from_wgsl("score + table(place(kv))", &captures(3), &[]).unwrap();
    let attention = Attention::new().score_mod(placed);
    run(&attention, 4).unwrap();
    let [_, outside] = captures(4);
    let moved = attention.clone().with_capture(outside).unwrap();
    says(&run(&moved, 4).unwrap_err(), &["table", "4 to 4", "0 to 3"]);
    run(&attention, 4).unwrap();
}

#[test]
fn an_index_outside_its_tensor_for_every_value_is_refused() {
    let bench = Bench::any();
    let table: [Capture; 1] = [Capture::f32("table", &[0.5; 4], &[4]).unwrap().into()];
    let outside = ScoreMod::from_wgsl("score + table(kv + 4)", &table, &[]).unwrap();
    let error = bench.refuses_mods(&Attention::new().score_mod(outside));
    says(&error, &["table", "4 to 13", "0 to 3"]);
    let clamped = ScoreMod::from_wgsl("score + table(kv + 3)", &table, &[]).unwrap();
    bench.forward(&Attention::new().score_mod(clamped), &bench.q, &bench.k, &bench.v).unwrap();
}

#[test]
fn a_view_that_leaves_its_buffer_says_where_both_end() {
    let bench = Bench::any();
    let longer = Layout::contiguous([1, 8, 7, 16]).unwrap();
    let error = bench.refused(|| bench.q.view(longer).map(|_| ()));
    assert!(error.is_buffer());
    says(&error, &["3072 bytes", "3584", "larger buffer"]);
    let error = Layout::new([1, 8, 6, 16], [768, 96, 16, 2], 0).unwrap_err();
    assert!(error.is_shape());
    says(&error, &["inner stride is 2", "must be 1"]);
}

#[test]
fn tensors_of_another_device_are_refused() {
    let bench = Bench::any();
    let other = Bench::new(Gpu::builder().tier(Tier::Cpu).build().unwrap());
    let error = bench.refuses(&bench.q, &other.k, &other.v);
    assert!(error.is_buffer(), "{error}");
    let error = bench.refuses(&other.q, &bench.k, &bench.v);
    assert!(error.is_buffer(), "{error}");
}

/// A device of its own on the machine's best adapter; `None`, said aloud, where there is no adapter.
fn device(change: impl FnOnce(&mut wgpu::Limits)) -> Option<Gpu> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let Ok(adapter) = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
    else {
        eprintln!("skipped: there is no adapter");
        return None;
    };
    let mut limits = Gpu::wanted_limits(&adapter);
    change(&mut limits);
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: Gpu::wanted_features(&adapter),
        required_limits: limits,
        ..wgpu::DeviceDescriptor::default()
    }))
    .unwrap();
    Some(Gpu::from_wgpu(&adapter, device, queue).unwrap())
}

#[test]
fn an_output_over_what_is_still_read_is_refused() {
    let bench = Bench::any();
    let on = |q: &Tensor, kv: &Tensor, out: &Tensor| {
        Attention::new().forward_into(&bench.gpu, q, kv, kv, out).map(|_| ())
    };
    let pool = bench.gpu.tensor(&[0.5f32; 4096], [1, 1, 1, 4096]).unwrap();
    let at = |strides, offset| pool.view(Layout::new([1, 2, 8, 16], strides, offset).unwrap()).unwrap();
    let q = at([512, 128, 16, 1], 0);
    // The same places, some of them, and some of q's only.
    for (kv, out, name) in [
        (at([512, 128, 16, 1], 512), at([512, 128, 16, 1], 512), "k"),
        (at([512, 128, 16, 1], 512), at([512, 128, 16, 1], 767), "k"),
        (at([512, 16, 32, 1], 1024), at([1024, 16, 64, 1], 1056), "k"),
        (at([512, 128, 16, 1], 512), at([512, 128, 16, 1], 16), "q"),
        (at([512, 128, 16, 1], 512), at([512, 16, 32, 1], 0), "q"),
    ] {
        let error = bench.refused(|| on(&q, &kv, &out));
        assert!(error.is_buffer());
        says(&error, &["out shares places with", name]);
    }
    // Rows that alternate, and rows beside each other, share none.
    for (kv, out) in [
        (at([512, 16, 64, 1], 1024), at([1024, 16, 64, 1], 1056)),
        (at([512, 128, 16, 1], 512), at([512, 128, 16, 1], 768)),
    ] {
        on(&q, &kv, &out).unwrap();
    }
}

#[test]
fn block_masks_for_other_positions_lengths_or_heads_are_refused() {
    let bench = Bench::any();
    let shape = BlockShape::new(1, 8, 6, 10);
    let with = |mask: &MaskMod, shape| Attention::new().block_mask(BlockMask::build(mask, shape).unwrap());
    let causal = masks::causal();
    let by_head = MaskMod::new(|i| i.head().lt(3) | i.q().ge(i.kv()));
    let by_length = masks::bottom_right_causal();
    let later = BlockShape { q_offset: &[4], ..shape };
    let shorter = BlockShape { kv_lens: &[7], ..shape };
    for (attention, parts) in [
        (with(&causal, later), ["q_offset 4", "the call has 0"]),
        (with(&causal, shorter), ["kv_len 7", "the call has 10"]),
        (with(&by_length, shape).kv_len(7), ["kv_len 10", "the call has 7"]),
        (with(&by_head, BlockShape { heads: 1, ..shape }), ["heads 1", "the call has 8"]),
    ] {
        let error = bench.refuses_mods(&attention);
        assert!(error.is_shape());
        says(&error, &parts);
    }
    // Fewer keys than were built for are no other mask, and neither is an offset that nobody reads.
    bench.forward(&with(&causal, shape).kv_len(7), &bench.q, &bench.k, &bench.v).unwrap();
    bench.forward(&with(&masks::noop(), later), &bench.q, &bench.k, &bench.v).unwrap();
}

#[test]
fn a_mask_mod_that_a_block_mask_was_not_built_from_is_refused() {
    let bench = Bench::any();
    let window = Scalar::i32("window", 3).unwrap();
    let ids = |first| Capture::i32("ids", &[first, 0, 0, 1, 1, 1, 1, 2, 2, 2], &[10]).unwrap();
    let mask = {
        let (window, ids) = (window.clone(), ids(0));
        MaskMod::new(|i| (i.q() - i.kv()).lt(window.get()) & ids.at([i.q()]).eq(ids.at([i.kv()])))
    };
    let built = BlockMask::build(&mask, BlockShape::new(1, 8, 6, 10)).unwrap();
    let given = |mask: MaskMod| Attention::new().block_mask(built.clone()).mask_mod(mask);
    let forward = |attention: &Attention| bench.forward(attention, &bench.q, &bench.k, &bench.v);
    // The one that it was built from, and other values that are the same.
    forward(&given(mask.clone())).unwrap();
    let same = given(mask.clone()).with_capture(ids(0)).unwrap();
    forward(&same.with_scalar(Scalar::i32("window", 3).unwrap()).unwrap()).unwrap();
    let other = given(mask.clone()).with_scalar(Scalar::i32("window", 4).unwrap()).unwrap();
    says(&bench.refuses_mods(&other), &["`window`", "another one", "build it again"]);
    let other = given(mask.clone()).with_capture(ids(7)).unwrap();
    says(&bench.refuses_mods(&other), &["`ids`", "another one", "build it again"]);
    says(&bench.refuses_mods(&given(masks::causal())), &["`mask_mod`", "another one", "leave it out"]);
    // Loaded lists have no mask of their own, so that it is the program that knows.
    let loaded = BlockMask::from_bytes(&built.to_bytes()).unwrap();
    forward(&Attention::new().block_mask(loaded).mask_mod(mask)).unwrap();
}

#[test]
fn a_captured_tensor_that_ends_past_its_buffer_is_refused() {
    for tier in [Tier::Cpu, Tier::Portable, Tier::Subgroup] {
        let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
        let bench = Bench::new(gpu);
        let with = |first, shape: &[usize]| {
            let buffer = DeviceHandle::new(bench.gpu.create("ids", 400, Usage::Tensor).unwrap());
            let data = CaptureData::Device(DeviceHandle::new(Resident { buffer, first }));
            let ids = Capture::new("ids", CaptureType::I32, shape, data).unwrap();
            Captured::<expr::I32>::new(ids).unwrap()
        };
        for (first, len, good) in [(0, 100, true), (90, 10, true), (90, 11, false), (u32::MAX, 1, false)] {
            let ids = with(first, &[len]);
            let mask = MaskMod::new(|i| ids.at([i.q()]).eq(ids.at([i.kv()])));
            let shape = BlockShape::new(1, 8, 6, 10);
            let attention = Attention::new().mask_mod(mask.clone());
            if good {
                bench.forward(&attention, &bench.q, &bench.k, &bench.v).unwrap();
                BlockMask::build_on(&bench.gpu, &mask, shape).unwrap();
                continue;
            }
            says(&bench.refuses_mods(&attention), &["`ids`", "its buffer at 400", "larger"]);
            let built = BlockMask::build_on(&bench.gpu, &mask, shape);
            says(&built.unwrap_err(), &["`ids`", "its buffer at 400", "larger"]);
        }
        let ids = with(0, &[1 << 30; 4]);
        let mask = MaskMod::new(|i| ids.at([0.into(), 0.into(), 0.into(), i.kv()]).eq(0));
        says(&bench.refuses_mods(&Attention::new().mask_mod(mask)), &["`ids`", "its buffer at 400"]);
    }
}

#[test]
fn sinks_that_are_not_finite_are_refused() {
    let bench = Bench::any();
    for sink in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut sinks = vec![0.0; 8];
        sinks[3] = sink;
        let error = bench.refuses_mods(&Attention::new().sinks(sinks));
        says(&error, &[&format!("a sink is {sink}"), "must be finite"]);
    }
}

#[test]
fn a_view_with_more_elements_than_memory_is_refused_when_it_is_read() {
    for gpu in
        [Tier::Cpu, Tier::Portable].into_iter().filter_map(|tier| Gpu::builder().tier(tier).build().ok())
    {
        let one = gpu.tensor(&[1.0f32; 8], [1, 1, 1, 8]).unwrap();
        for shape in [[1 << 20, 1 << 20, 1 << 21, 8], [1 << 40, 1 << 40, 1 << 40, 8]] {
            let view = one.view(Layout::new(shape, [0, 0, 0, 1], 0).unwrap()).unwrap();
            assert!(view.read().is_err() && view.write::<f32>(&[]).is_err());
        }
        let nothing = one.view(Layout::new([1 << 40, 1 << 40, 0, 8], [0, 0, 0, 1], 0).unwrap()).unwrap();
        assert_eq!(nothing.read().unwrap(), [0.0f32; 0]);
        nothing.write::<f32>(&[]).unwrap();
    }
}

#[test]
fn a_table_with_too_few_heads_or_batch_entries_is_refused() {
    let bench = Bench::any();
    let error = bench.refuses_mods(&Attention::new().score_mod(scores::alibi(4)));
    assert!(error.is_capture());
    says(&error, &["slope", "0 to 7", "0 to 3", "one value for each"]);
    // As many, more, and one for all.
    for values in [8, 9, 1] {
        let bias = Capture::f32("bias", &vec![0.5; values], &[values]).unwrap();
        let score = ScoreMod::new(|s| s.score() + bias.at([s.head()]));
        bench.forward(&Attention::new().score_mod(score), &bench.q, &bench.k, &bench.v).unwrap();
    }
}

#[test]
fn a_buffer_that_ends_within_a_word_is_refused() {
    let Ok(gpu) = Gpu::builder().tier(Tier::Portable).build() else { return };
    let Some(device) = gpu.device() else { return };
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let descriptor = wgpu::BufferDescriptor { label: None, size: 62, usage, mapped_at_creation: false };
    let buffer = device.create_buffer(&descriptor);
    let error =
        Tensor::from_buffer(&gpu, &buffer, DType::F16, 0, [1, 1, 1, 31], [31, 31, 31, 1]).unwrap_err();
    assert!(error.is_buffer());
    says(&error, &["62 bytes", "multiple of 4"]);
    let error = gpu.capture("bias", CaptureType::F16, &buffer, 0, &[31]).unwrap_err();
    says(&error, &["62 bytes", "multiple of 4"]);
}

#[test]
fn weights_of_another_output_are_refused() {
    let bench = Bench::any();
    let output = Attention::new().forward(&bench.gpu, &bench.q, &bench.k, &bench.v).unwrap();
    let longer = bench.gpu.zeros(DType::F32, [1, 8, 9, 16]).unwrap();
    let error = bench.refused(|| Attention::new().weights(&longer, &bench.k, &output, &[8]).map(|_| ()));
    assert!(error.is_shape());
    says(&error, &["[1, 8, 6, 16]", "[1, 8, 9, 16]"]);
}

#[test]
fn two_devices_of_one_adapter_do_not_share_tensors() {
    let (Some(one), Some(two)) = (device(|_| ()), device(|_| ())) else { return };
    let (one, two) = (Bench::new(one), Bench::new(two));
    let error = one.refuses(&one.q, &two.k, &two.v);
    assert!(error.is_buffer(), "{error}");
    says(&error, &["another"]);
}

#[test]
fn a_buffer_of_another_device_of_the_instance_is_an_error_of_the_call() {
    let instance = wgpu::Instance::default();
    let Ok(adapter) = pollster::block_on(instance.request_adapter(&Default::default())) else { return };
    let open = || {
        let (device, queue) = pollster::block_on(adapter.request_device(&Default::default())).unwrap();
        (Gpu::from_wgpu(&adapter, device.clone(), queue).unwrap(), device)
    };
    let ((gpu, _own), (_, other)) = (open(), open());
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let descriptor = wgpu::BufferDescriptor { label: None, size: 64, usage, mapped_at_creation: false };
    let foreign = other.create_buffer(&descriptor);
    let k = Tensor::from_buffer(&gpu, &foreign, DType::F32, 0, [1, 1, 1, 16], [16, 16, 16, 1]).unwrap();
    let q = gpu.tensor(&[0.5f32; 16], [1, 1, 1, 16]).unwrap();
    let run = |k: &Tensor<Gpu>| Attention::new().forward(&gpu, &q, k, k).and_then(|output| output.out.read());
    let error = run(&k).unwrap_err();
    says(&error, &["forward-f32", "Buffer", "doesn't match Device"]);
    assert_eq!(run(&q).unwrap(), [0.5; 16]);
}

#[test]
fn a_limit_that_is_exceeded_is_named_with_the_adapters_value() {
    let Some(gpu) = device(|limits| {
        limits.max_buffer_size = 1 << 20;
        limits.max_storage_buffer_binding_size = 1 << 20;
    }) else {
        return;
    };
    let bench = Bench::new(gpu);
    let error = bench.refused(|| bench.gpu.zeros(DType::F32, [1, 8, 4096, 64]).map(|_| ()));
    assert!(error.is_limit(), "{error}");
    says(&error, &["maxBufferSize", &(1u64 << 20).to_string(), &(8u64 * 4096 * 64 * 4).to_string()]);
}

#[test]
fn an_adapter_lost_in_the_middle_is_an_error_of_every_later_call() {
    let Some(gpu) = device(|_| ()) else { return };
    let bench = Bench::new(gpu);
    let output = Attention::new().forward(&bench.gpu, &bench.q, &bench.k, &bench.v).unwrap();
    bench.gpu.device().unwrap().destroy();
    let error = output.out.read().unwrap_err();
    assert!(error.is_device_lost(), "{error}");
    says(&error, &["create a new Gpu"]);
    assert!(bench.forward(&Attention::new(), &bench.q, &bench.k, &bench.v).unwrap_err().is_device_lost());
    assert!(bench.gpu.is_lost());
    // Another device of the same machine works.
    let Bench { gpu, q, k, v } = Bench::any();
    Attention::new().forward(&gpu, &q, &k, &v).unwrap().out.read().unwrap();
}
