//! Gradients of whole calls on every tier that this machine has.

mod captured;
mod case;
mod edges;
pub(crate) mod ops;
mod prebuilt;
mod random;
mod wanted;

use flexattn::expr::{Gradient, Input};
use flexattn::{
    Attention, Capture, DType, Gpu, Gradients, MaskMod, Runtime, Saved, ScoreMod, Tensor, Tier, Wanted,
};
use flexattn_testing::problem::Numbers;
use flexattn_testing::{Budget, Golden, conformance};

/// The tiers that are here; the others are named.
fn tiers() -> Vec<Gpu> {
    crate::tiers::here(&[Tier::Portable, Tier::Subgroup, Tier::Cpu])
}

fn upload<R: Runtime>(on: &R, data: &[f32], shape: [usize; 4], dtype: DType) -> Tensor<R> {
    conformance::upload(on, dtype, data, &shape).unwrap()
}

fn four(shape: &[usize]) -> [usize; 4] {
    shape.try_into().unwrap()
}

fn attention(golden: &Golden) -> Attention {
    let mut attention = Attention::new().scale(golden.scale as f32);
    if let Some(mask) = golden.mask_mod().unwrap() {
        attention = attention.mask_mod(mask);
    }
    if let Some(score) = golden.score_mod().unwrap() {
        attention = attention.score_mod(score);
    }
    attention
}

/// Gradients by the goldens' names.
fn gradients(gpu: &Gpu, golden: &Golden, dtype: DType) -> flexattn::Result<Vec<(String, Vec<f32>)>> {
    let [q, k, v] = [&golden.q, &golden.k, &golden.v].map(|x| upload(gpu, x.f32(), four(&x.shape), dtype));
    let mut got = Vec::new();
    let mut names: Vec<String> = golden.gradients();
    names.extend(golden.sink_gradients());
    for suffix in ["", "_sink"] {
        let Some(dout) = golden.values(&format!("dout{suffix}")) else { continue };
        let mut attention = attention(golden);
        let mut wanted = Wanted::qkv();
        if suffix == "_sink" {
            attention = attention.sinks(golden.sinks.clone().unwrap());
            wanted = wanted.sinks();
        } else {
            for name in golden.gradients() {
                if let Some(name) = name.strip_prefix("dcap.") {
                    wanted = wanted.capture(name);
                }
            }
        }
        let output = attention.forward(gpu, &q, &k, &v)?;
        let dout = upload(gpu, dout, output.out.shape(), dtype);
        let dlse = golden.values("dlse").filter(|_| suffix.is_empty());
        let [b, h, l, _] = output.out.shape();
        let dlse = dlse.map(|dlse| upload(gpu, dlse, [b, h, l, 1], DType::F32));
        let saved = Saved::new(&q, &k, &v, &output)?;
        let Gradients { dq, dk, dv, dsinks, captures } =
            attention.backward(gpu, &saved, &dout, dlse.as_ref(), &wanted)?;
        for (name, tensor) in [("dq", dq), ("dk", dk), ("dv", dv)] {
            got.push((format!("{name}{suffix}"), tensor.unwrap().read()?));
        }
        for (name, tensor) in captures {
            got.push((format!("dcap.{name}"), tensor.read()?));
        }
        if let Some(dsinks) = dsinks {
            got.push(("dcap.sink".to_owned(), dsinks.read()?));
        }
    }
    got.retain(|(name, _)| names.contains(name));
    Ok(got)
}

/// Whether a gradient is one of those that a GPU adds up atomically: a captured tensor that is read by
/// query and key both, so that several pairs may read one element.
fn is_atomic(gpu: &Gpu, golden: &Golden, name: &str) -> bool {
    let Some(score) = golden.score_mod().unwrap() else { return false };
    let depends = |place: &flexattn::expr::GatherGradient, input| {
        place.indices.iter().any(|index| index.inputs().contains(input))
    };
    let places = Gradient::of(score.expr()).unwrap().captures;
    let mut places = places.iter().filter(|place| name == format!("dcap.{}", place.capture.name));
    gpu.tier() != Tier::Cpu && places.any(|place| depends(place, Input::Q) && depends(place, Input::Kv))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn gradients_of_every_golden_agree_on_every_tier_and_repeat_bit_for_bit() {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    let files = Golden::files(Golden::directory()).unwrap();
    for gpu in tiers() {
        let (mut seen, mut compared, mut failures) = (0, 0, Vec::new());
        for file in &files {
            let golden = Golden::load(file).unwrap();
            if golden.gradients().is_empty() {
                continue;
            }
            seen += 1;
            for dtype in DType::ALL {
                // A GPU compiles kernels for each case: the quick suite has every sixth, and 16-bit
                // types for fewer.
                let quick = gpu.tier() == Tier::Cpu || seen % if dtype == DType::F32 { 6 } else { 30 } == 0;
                if !full && !quick {
                    continue;
                }
                match gradients(&gpu, &golden, dtype) {
                    Err(error) => failures.push(format!("{} {dtype}: {error}", golden.name)),
                    Ok(got) => {
                        let again = gradients(&gpu, &golden, dtype).unwrap();
                        for ((name, got), (_, again)) in got.into_iter().zip(again) {
                            if !is_atomic(&gpu, &golden, &name) && bits(&got) != bits(&again) {
                                failures.push(format!("{} {dtype} {name}: two runs differ", golden.name));
                            }
                            let gold = golden.values(&name).unwrap();
                            let found = Budget::of(&golden, &name, dtype).compare(gold, &got);
                            compared += 1;
                            if !found.pass {
                                failures.push(format!(
                                    "{} {dtype} {name}: mean {} max {}",
                                    golden.name, found.mean, found.max
                                ));
                            }
                        }
                    }
                }
            }
        }
        assert!(seen >= 60 && compared > 30, "{seen} {compared}");
        assert!(failures.is_empty(), "{}:\n{}", gpu.tier(), failures.join("\n"));
    }
}

#[test]
fn gradients_repeat_bit_for_bit() {
    let mut numbers = Numbers::new(7);
    let (shape, kv_shape) = ([2, 4, 70, 24], [2, 2, 90, 24]);
    let table = numbers.normals(4);
    let table = Capture::f32("table", &table, &[4]).unwrap();
    let score = ScoreMod::new(|s| s.score() + table.at([s.head()]) * (s.q() - s.kv()).to_f32());
    let mask = MaskMod::new(|i| i.q().ge(i.kv()));
    let attention = Attention::new().mask_mod(mask).score_mod(score);
    let (q, k, v, dout) = (
        numbers.normals(2 * 4 * 70 * 24),
        numbers.normals(2 * 2 * 90 * 24),
        numbers.normals(2 * 2 * 90 * 24),
        numbers.normals(2 * 4 * 70 * 24),
    );
    for gpu in tiers() {
        let run = || {
            let [q, dout] = [&q, &dout].map(|x| upload(&gpu, x, shape, DType::F32));
            let [k, v] = [&k, &v].map(|x| upload(&gpu, x, kv_shape, DType::F32));
            let output = attention.forward(&gpu, &q, &k, &v).unwrap();
            let saved = Saved::new(&q, &k, &v, &output).unwrap();
            let found =
                attention.backward(&gpu, &saved, &dout, None, &Wanted::qkv().capture("table")).unwrap();
            let tensors =
                [found.dq.clone(), found.dk.clone(), found.dv.clone(), found.capture("table").cloned()];
            tensors
                .map(|tensor| tensor.unwrap().read().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        let first = run();
        assert!(first.iter().all(|bits| bits.iter().any(|&bits| bits != 0)));
        assert_eq!(first, run(), "{}", gpu.tier());
    }
}

#[test]
fn gradients_refuse_what_does_not_fit() {
    let gpu = Gpu::builder().tier(Tier::Cpu).build().unwrap();
    let q = gpu.tensor(&[1.0f32; 8], [1, 1, 2, 4]).unwrap();
    let attention = Attention::new();
    let output = attention.forward(&gpu, &q, &q, &q).unwrap();
    let saved = Saved::new(&q, &q, &q, &output).unwrap();
    let short = gpu.tensor(&[1.0f32; 4], [1, 1, 1, 4]).unwrap();
    let refused = |found: flexattn::Result<Gradients>| found.unwrap_err().to_string();
    let message = refused(attention.backward(&gpu, &saved, &short, None, &Wanted::qkv()));
    assert!(message.contains("dout is [1, 1, 1, 4] but out is [1, 1, 2, 4]"), "{message}");
    let message = refused(attention.backward(&gpu, &saved, &q, Some(&q), &Wanted::qkv()));
    assert!(message.contains("dlse is [1, 1, 2, 4] but must be [1, 1, 2, 1]"), "{message}");
    let message = refused(attention.backward(&gpu, &saved, &q, None, &Wanted::qkv().capture("bias")));
    assert!(message.contains("bias"), "{message}");
    let message = refused(attention.backward(&gpu, &saved, &q, None, &Wanted::qkv().sinks()));
    assert!(message.contains("sinks"), "{message}");
    let no_lse = Attention::new().with_lse(false).forward(&gpu, &q, &q, &q).unwrap();
    assert!(Saved::new(&q, &q, &q, &no_lse).unwrap_err().to_string().contains("lse"));
}
