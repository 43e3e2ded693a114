//! Masks whose captured tensors live on a device: their blocks, and calls that are given them.

use flexattn::expr::{Bool, CaptureData, CaptureType, Captured, DeviceHandle, F32, I32, U32};
use flexattn::reference::{self, Problem};
use flexattn::{
    Attention, AttentionShape, BlockMask, BlockShape, Capture, Cpu, DType, Error, Gpu, Layout, MaskMod,
    Resident, Result, Runtime, Saved, Scalar, Tensor, Tier, Usage, Wanted, masks, wgpu,
};
use flexattn_testing::problem::{Inputs, Numbers, Sizes};

fn tiers() -> Vec<Gpu> {
    crate::tiers::here(&[Tier::Portable, Tier::Subgroup, Tier::Cpu])
}

fn bytes(data: &CaptureData) -> Vec<u8> {
    match data {
        CaptureData::F32(values) => bytemuck::cast_slice(values).to_vec(),
        CaptureData::F16(values) => bytemuck::cast_slice(values).to_vec(),
        CaptureData::BF16(values) => bytemuck::cast_slice(values).to_vec(),
        CaptureData::I32(values) => bytemuck::cast_slice(values).to_vec(),
        CaptureData::U32(values) => bytemuck::cast_slice(values).to_vec(),
        // Any byte but 0 is true.
        CaptureData::Bool(values) => values.iter().map(|&value| if value { 0x82 } else { 0 }).collect(),
        CaptureData::Device(_) => panic!("it is on a device already"),
    }
}

/// The mask with its captured tensor `name` in a buffer of `on`, behind `first` other elements.
fn moved<R: Runtime>(on: &R, mask: &MaskMod, name: &str, first: u32) -> MaskMod
where
    R::Buffer: Send + Sync + 'static,
{
    let host = mask.captures().iter().find(|capture| capture.name() == name).unwrap();
    let mut content = vec![0xa5; first as usize * host.dtype().bytes()];
    content.extend(bytes(host.data()));
    content.resize(content.len().next_multiple_of(4), 0);
    let buffer = on.create(name, content.len() as u64, Usage::Tensor).unwrap();
    on.write(&buffer, 0, &content).unwrap();
    let resident = Resident { buffer: DeviceHandle::new(buffer), first };
    let data = CaptureData::Device(DeviceHandle::new(resident));
    mask.with_capture(Capture::new(name, host.dtype(), host.shape(), data).unwrap()).unwrap()
}

/// Ids of documents of made-up lengths.
fn ids(seed: u64, tokens: usize, most: usize) -> Vec<i32> {
    let mut numbers = Numbers::new(seed);
    let mut ids = Vec::new();
    for id in 0.. {
        if ids.len() >= tokens {
            break;
        }
        ids.resize(ids.len() + 1 + numbers.below(most), id);
    }
    ids.truncate(tokens);
    ids
}

/// Pairs of which most tiles are decided, some are not, and a corner is: kept where a coarse chequered pattern
/// says so, but for a few pairs.
fn chequered(shape: [usize; 4]) -> Vec<bool> {
    let mut numbers = Numbers::new(7);
    let [_, _, rows, columns] = shape;
    (0..shape.iter().product())
        .map(|i: usize| {
            let (matrix, q, kv) = (i / columns / rows, i / columns % rows, i % columns);
            let keep = (q / 48 + kv / 80 + matrix).is_multiple_of(2) || q >= 128 && kv >= 256;
            keep != (numbers.below(20_000) == 0)
        })
        .collect()
}

struct Case<'a> {
    mask: MaskMod,
    capture: &'a str,
    first: u32,
    shape: BlockShape<'a>,
}

fn prebuilt() -> Vec<Case<'static>> {
    let square = |batch, heads, len| BlockShape::new(batch, heads, len, len);
    let case = |mask, capture, first, shape| Case { mask, capture, first, shape };
    let ragged =
        BlockShape { q_offset: &[0, 40, -3], kv_lens: &[300, 0, 217], ..BlockShape::new(3, 2, 260, 300) };
    let per_batch: Vec<i32> = (0..3).flat_map(|b| ids(b, 300, 90)).collect();
    let dense = [2, 3, 200, 333];
    let groups: Vec<i32> = ids(11, 400, 130);
    let intervals: Vec<[i32; 2]> = (0..=groups[399]).map(|group| [20 * group, 150 + 30 * group]).collect();
    vec![
        case(masks::document(&ids(1, 500, 200)) & masks::causal(), "doc", 0, square(1, 2, 500)),
        case(!masks::document(&ids(2, 260, 90)), "doc", 3, square(2, 1, 260)),
        case(masks::document_per_batch(&per_batch, 3), "doc", 1, ragged),
        case(masks::padding(&[300, 130, 0]), "length", 2, square(3, 2, 300)),
        case(masks::padding(&[300, 128, 32]) & masks::causal(), "length", 0, ragged),
        case(masks::dense(&chequered(dense), dense), "keep", 5, BlockShape::new(2, 3, 200, 333)),
        case(masks::dense(&[true; 150 * 140], [1, 1, 150, 140]), "keep", 0, BlockShape::new(2, 4, 150, 140)),
        case(masks::interval(&groups, &intervals), "group", 7, square(1, 1, 400)),
        case(masks::interval(&groups, &intervals) & masks::causal(), "interval", 2, square(1, 1, 400)),
        case(masks::document(&ids(3, 10, 4)), "doc", 0, BlockShape::new(1, 1, 0, 10)),
        case(masks::document(&ids(3, 10, 4)), "doc", 0, BlockShape::new(1, 1, 10, 0)),
    ]
}

/// Each element type, with scalars, lengths, several heads and positions that run ahead.
fn of_each_type() -> Result<Vec<Case<'static>>> {
    let wave = |i: usize| (i as f32 / 40.0).sin();
    let values: Vec<f32> = (0..300).map(wave).collect();
    let narrow: Vec<half::f16> = values.iter().map(|&x| half::f16::from_f32(x)).collect();
    let brain: Vec<half::bf16> = values.iter().map(|&x| half::bf16::from_f32(x)).collect();
    let words: Vec<u32> = (0..300).map(|i| if i < 128 { u32::MAX } else { i / 64 }).collect();
    let flags: Vec<bool> = (0..2 * 300).map(|i| i % 300 / 70 % 2 == i / 300).collect();
    let gaps = [0, 17, 140];
    let mut with_nan = values.clone();
    with_nan[200] = f32::NAN;
    let [plain, f16, bf16]: [Captured<F32>; 3] = [
        Capture::f32("f", &with_nan, &[300])?,
        Capture::f16("f", &narrow, &[300])?,
        Capture::bf16("f", &brain, &[300])?,
    ];
    let word: Captured<U32> = Capture::u32("u", &words, &[300])?;
    let flag: Captured<Bool> = Capture::bool("flag", &flags, &[2, 300])?;
    let gap: Captured<I32> = Capture::i32("gap", &gaps, &[3])?;
    let window = Scalar::i32("window", 100)?;
    let shape = BlockShape::new(1, 1, 300, 300);
    let case = |mask, capture, first, shape| Case { mask, capture, first, shape };
    Ok(vec![
        case(MaskMod::new(|i| plain.at([i.kv()]).ge(-0.5)), "f", 0, shape),
        case(MaskMod::new(|i| (f16.at([i.q()]) * f16.at([i.kv()])).gt(0.25)), "f", 3, shape),
        case(MaskMod::new(|i| bf16.at([i.q()]).lt(bf16.at([i.kv()]))), "f", 1, shape),
        case(MaskMod::new(|i| word.at([i.q()]).gt(word.at([i.kv()]))), "u", 2, shape),
        case(
            MaskMod::new(|i| flag.at([i.head(), i.kv()]) & (i.q() - i.kv()).lt(window.get())),
            "flag",
            9,
            BlockShape { q_offset: &[130], ..BlockShape::new(2, 2, 170, 300) },
        ),
        case(
            MaskMod::new(|i| i.kv().lt(i.kv_len() - gap.at([i.batch()])) & i.q().lt(i.q_len())),
            "gap",
            0,
            BlockShape { kv_lens: &[300, 256, 129], ..BlockShape::new(3, 1, 140, 300) },
        ),
    ])
}

#[test]
fn a_device_finds_the_blocks_that_the_host_finds() -> Result<()> {
    let cases = prebuilt().into_iter().chain(of_each_type()?).collect::<Vec<_>>();
    let mut blocks = [0; 2];
    for Case { mask, capture, first, shape } in &cases {
        let expected = super::check(mask, *shape, [128, 128])?;
        let (full, partial) = expected.rows().blocks();
        blocks = [blocks[0] + full, blocks[1] + partial];
        for gpu in tiers() {
            let on_device = moved(&gpu, mask, capture, *first);
            let found = BlockMask::build_on(&gpu, &on_device, *shape)?;
            super::check_promises(&found);
            assert_eq!(found, expected, "{} on {}:\n{found}\n{expected}", mask.expr(), gpu.tier());
            let decides = found.mask_mod().unwrap().captures().iter().find(|it| it.name() == *capture);
            assert!(matches!(decides.unwrap().data(), CaptureData::Device(_)));
        }
    }
    assert!(blocks[0] > 20 && blocks[1] > 50, "the cases show little: {blocks:?}");
    Ok(())
}

#[test]
fn a_mask_that_the_host_can_read_is_built_there() -> Result<()> {
    let mask = masks::document(&ids(1, 300, 100)) & masks::causal();
    let shape = BlockShape::new(1, 2, 300, 300);
    for gpu in tiers() {
        let before = gpu.pipelines_built();
        assert_eq!(BlockMask::build_on(&gpu, &mask, shape)?, BlockMask::build(&mask, shape)?);
        assert_eq!(gpu.pipelines_built(), before);
    }
    Ok(())
}

#[test]
fn other_values_and_lengths_compile_nothing() -> Result<()> {
    for gpu in crate::tiers::here(&[Tier::Portable]) {
        let mut built = Vec::new();
        for (seed, len) in [(1, 300), (2, 300), (3, 150)] {
            let mask = masks::document(&ids(seed, len, 90));
            let shape = BlockShape::new(1, 1, len, len);
            let found = BlockMask::build_on(&gpu, &moved(&gpu, &mask, "doc", seed as u32), shape)?;
            assert_eq!(found, BlockMask::build(&mask, shape)?);
            built.push(gpu.pipelines_built());
        }
        assert_eq!(built, [1; 3]);
    }
    Ok(())
}

/// The result in f64, and the positions that a step at the end of the keys has.
fn exact(mask: &MaskMod, inputs: &Inputs, q_offset: i32) -> reference::Reference {
    let sizes = &inputs.sizes;
    let [q, k, v] =
        [sizes.q_shape(), sizes.k_shape(), sizes.v_shape()].map(|shape| Layout::contiguous(shape).unwrap());
    let problem = Problem {
        mask_mod: Some(mask),
        q_offset: &[q_offset],
        ..Problem::new(AttentionShape::new(&q, &k, &v).unwrap(), &inputs.q, &inputs.k, &inputs.v)
    };
    reference::forward(&problem).unwrap()
}

fn upload<R: Runtime>(on: &R, inputs: &Inputs) -> [Tensor<R>; 4] {
    let Inputs { sizes, q, k, v, dout } = inputs;
    [(q, sizes.q_shape()), (k, sizes.k_shape()), (v, sizes.v_shape()), (dout, sizes.out_shape())]
        .map(|(values, shape)| Tensor::upload(on, values, shape).unwrap())
}

fn close(got: &[f32], exact: &[f64], what: &str) {
    assert_eq!(got.len(), exact.len());
    for (i, (&got, &exact)) in got.iter().zip(exact).enumerate() {
        assert!((f64::from(got) - exact).abs() < 2e-5, "{what}: [{i}] is {got}, not {exact}");
    }
}

#[test]
fn a_call_with_blocks_found_on_the_device_is_right_and_does_less() -> Result<()> {
    let len = 600;
    let mask = masks::document(&ids(5, len, 150)) & masks::causal();
    // Many queries, and one at the end of the cache.
    for (q_len, q_offset) in [(len, 0), (1, len as i32 - 1)] {
        let sizes = Sizes { kv_heads: 2, q_len, ..Sizes::square(1, 4, len, 32) };
        let inputs = Inputs::normal(sizes, 8);
        let expected = exact(&mask, &inputs, q_offset).out;
        for gpu in tiers() {
            let on_device = moved(&gpu, &mask, "doc", 6);
            let shape = BlockShape { q_offset: &[q_offset], ..BlockShape::new(1, 4, q_len, len) };
            let blocks = BlockMask::build_on(&gpu, &on_device, shape)?;
            let without = Attention::new().mask_mod(on_device).q_offset(q_offset);
            let with = without.clone().block_mask(blocks.clone());
            // The block mask alone decides the pairs of its partial tiles too.
            let alone = Attention::new().block_mask(blocks).q_offset(q_offset);
            let [q, k, v, _] = upload(&gpu, &inputs);
            for attention in [&without, &with, &alone] {
                let out = attention.forward(&gpu, &q, &k, &v)?.out.read()?;
                close(&out, &expected, gpu.tier().name());
            }
            let out = gpu.zeros(q.dtype(), q.shape())?;
            let [more, less] =
                [&without, &with].map(|call| call.plan(&gpu, [&q, &k, &v, &out]).unwrap().work());
            assert!(less < 0.8 * more, "{}: {less} of {more}", gpu.tier());
        }
    }
    Ok(())
}

#[test]
fn gradients_with_blocks_found_on_the_device_are_those_of_the_same_values_on_the_host() -> Result<()> {
    let len = 300;
    let mask = masks::document(&ids(6, len, 100)) & masks::causal();
    let inputs = Inputs::normal(Sizes { kv_heads: 1, ..Sizes::square(1, 2, len, 16) }, 9);
    for gpu in tiers() {
        let on_device = moved(&gpu, &mask, "doc", 1);
        let blocks = BlockMask::build_on(&gpu, &on_device, BlockShape::new(1, 2, len, len))?;
        let [q, k, v, dout] = upload(&gpu, &inputs);
        let gradients = |attention: Attention| -> Result<[Vec<f32>; 3]> {
            let output = attention.forward(&gpu, &q, &k, &v)?;
            let saved = Saved::new(&q, &k, &v, &output)?;
            let found = attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv())?;
            let read = |tensor: Option<Tensor>| tensor.unwrap().read();
            Ok([read(found.dq)?, read(found.dk)?, read(found.dv)?])
        };
        let host = gradients(Attention::new().mask_mod(mask.clone()))?;
        assert!(host.iter().flatten().any(|&x| x != 0.0));
        assert_eq!(gradients(Attention::new().mask_mod(on_device).block_mask(blocks))?, host);
    }
    Ok(())
}

/// A device that may launch, bind and hold little.
fn small() -> Option<Gpu> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let Ok(adapter) = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
    else {
        eprintln!("skipped: there is no adapter");
        return None;
    };
    let required_limits = wgpu::Limits {
        max_compute_workgroups_per_dimension: 40,
        max_storage_buffer_binding_size: 4 << 10,
        max_buffer_size: 64 << 10,
        ..Gpu::wanted_limits(&adapter)
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: Gpu::wanted_features(&adapter),
        required_limits,
        ..wgpu::DeviceDescriptor::default()
    }))
    .unwrap();
    let made = Gpu::from_wgpu_async(&adapter, device, queue, Some(Tier::Portable));
    Some(pollster::block_on(made).unwrap())
}

#[test]
fn many_blocks_are_looked_into_window_by_window() -> Result<()> {
    let Some(gpu) = small() else { return Ok(()) };
    // 32 x 64 blocks: two bindings, each folded over 40 workgroups a side.
    let keep: Vec<bool> = (0..4096).map(|i| i / 100 % 3 == 0).collect();
    let keep = Capture::bool("keep", &keep, &[4096])?;
    let mask = MaskMod::new(|i| keep.at([i.q()]) ^ (i.kv() % 2).eq(0));
    let shape = BlockShape::new(1, 1, 4096, 8192);
    let found = BlockMask::build_on(&gpu, &moved(&gpu, &mask, "keep", 0), shape)?;
    assert_eq!(found, BlockMask::build(&mask, shape)?);
    assert_eq!(found.rows().blocks(), (0, 32 * 64));

    let long = Capture::i32("long", &[1; 4096], &[4096])?;
    let mask = MaskMod::new(|i| long.at([i.q()]).ne(0));
    let error = BlockMask::build_on(&gpu, &moved(&gpu, &mask, "long", 0), shape).unwrap_err();
    assert!(matches!(error, Error::Limit { needed: 16384, available: 4096, .. }), "{error}");

    // As a call that reads it is.
    let x = gpu.zeros(DType::F32, [1, 1, 8, 4])?;
    let call = Attention::new().mask_mod(moved(&gpu, &mask, "long", 0));
    let error = call.forward(&gpu, &x, &x, &x).unwrap_err();
    assert!(matches!(error, Error::Limit { needed: 16384, available: 4096, .. }), "{error}");

    let more = BlockShape::new(9, 1, 4096, 8192);
    let mask = MaskMod::new(|i| keep.at([i.q() + i.batch()]));
    let error = BlockMask::build_on(&gpu, &moved(&gpu, &mask, "keep", 0), more).unwrap_err();
    assert!(matches!(error, Error::Limit { needed: 73728, available: 65536, .. }), "{error}");
    Ok(())
}

#[test]
fn captures_that_a_device_cannot_bind_are_refused() -> Result<()> {
    let shape = BlockShape::new(1, 1, 300, 300);
    let two = masks::row_interval(&[3; 300], &[200; 300]);
    let mask = masks::document(&ids(1, 300, 100));
    let handle = CaptureData::Device(DeviceHandle::new(7u8));
    let nobody = mask.with_capture(Capture::new("doc", CaptureType::I32, &[300], handle)?)?;
    let cpu = Gpu::builder().tier(Tier::Cpu).build()?;
    for gpu in crate::tiers::here(&[Tier::Portable]) {
        let refused = |mask: &MaskMod| BlockMask::build_on(&gpu, mask, shape).unwrap_err();
        let both = moved(&gpu, &moved(&gpu, &two, "first", 0), "end", 0);
        let error = refused(&both);
        let said = error.to_string();
        assert!(
            matches!(error, Error::Capture { .. }) && said.contains("keep the others in host memory"),
            "{said}"
        );

        for mask in [&nobody, &moved(&Cpu::new(), &mask, "doc", 0)] {
            let x = gpu.zeros(DType::F32, [1, 1, 300, 4])?;
            let called = Attention::new().mask_mod(mask.clone()).forward(&gpu, &x, &x, &x).unwrap_err();
            for error in [refused(mask), called] {
                let said = error.to_string();
                assert!(
                    matches!(error, Error::Capture { .. }) && said.contains("another kind of device"),
                    "{said}"
                );
            }
        }
        for other in [&cpu, &small().unwrap()] {
            let error = refused(&moved(other, &mask, "doc", 0));
            assert!(error.is_buffer() && error.to_string().contains("another Gpu"), "{error}");
        }
        let error = BlockMask::build_on(&cpu, &moved(&gpu, &mask, "doc", 0), shape).unwrap_err();
        assert!(error.is_buffer() && error.to_string().contains("another Gpu"), "{error}");
    }
    // On the Cpu tier several are no harder than one.
    let both = moved(&cpu, &moved(&cpu, &two, "first", 0), "end", 0);
    assert_eq!(BlockMask::build_on(&cpu, &both, shape)?, BlockMask::build(&two, shape)?);
    Ok(())
}

#[test]
fn shapes_that_do_not_fit_are_refused_on_a_device_too() {
    for gpu in tiers() {
        let mask = moved(&gpu, &masks::document(&ids(1, 300, 100)), "doc", 0);
        let refused = |shape| BlockMask::build_on(&gpu, &mask, shape).unwrap_err();
        assert!(refused(BlockShape::new(0, 1, 300, 300)).is_shape());
        assert!(refused(BlockShape { kv_lens: &[301], ..BlockShape::new(1, 1, 300, 300) }).is_shape());
        assert!(refused(BlockShape { kv_lens: &[1, 2], ..BlockShape::new(3, 1, 300, 300) }).is_shape());
        let far = BlockShape { q_offset: &[i32::MAX], ..BlockShape::new(1, 1, 300, 300) };
        assert!(refused(far).is_overflow());
        if gpu.tier() != Tier::Cpu {
            let error = refused(BlockShape::new(1, 1, 1 << 30, 1 << 30));
            assert!(error.is_overflow() && error.to_string().contains("8388608 x 8388608 blocks"), "{error}");
        }
    }
}
