//! Lowered derivatives, executed: every operation, and the kinks.

use std::any::Any;

use flexattn::{Attention, Capture, Gradients, Runtime, Saved, ScoreMod, Tensor, Tier, Wanted};
use flexattn_testing::problem::Sizes;

use super::case::Case;
use super::tiers;
use crate::expr::ops::{KINKS, of_floats, sum_of};

const SIZES: Sizes =
    Sizes { batch: 1, kv_batch: 1, q_heads: 2, kv_heads: 1, q_len: 20, kv_len: 24, head_dim: 8, v_dim: 8 };

#[test]
fn the_lowered_derivative_of_every_operation_is_that_of_the_reference() {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    let all = of_floats();
    for gpu in tiers() {
        // A GPU compiles kernels for each score mod.
        let at_once = if full || gpu.tier() == Tier::Cpu { 1 } else { 7 };
        for ops in all.chunks(at_once) {
            println!("{} {:?}", gpu.tier(), ops.iter().map(|(op, _)| op.name()).collect::<Vec<_>>());
            let case = Case { score: Some(sum_of(ops)), ..Case::new(SIZES) };
            // The Subgroup tier shares the kernels of captured tensors with the Portable one.
            let captures: &[&str] = if gpu.tier() == Tier::Subgroup { &[] } else { &["row", "column"] };
            case.check(&gpu, captures, &[]);
        }
    }
}

/// Each kink in a head of its own. Both keys have the weight 1/2 and dPost is 1/2 and -1/2; key 0 is 1 in
/// its first column, so dq is half of the derivative there, and `t(h, kv)` has plus and minus the half.
pub(crate) fn kinks_follow_the_documented_convention<R: Runtime>(on: &R)
where
    R::Buffer: Any + PartialEq,
{
    let heads = KINKS.len();
    let branches: Vec<String> = KINKS
        .iter()
        .enumerate()
        .map(|(h, (text, ..))| format!("if (h == {h}) {{ return {text}; }}\n"))
        .collect();
    let text = format!(
        "fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 {{\n{}return score;\n}}",
        branches.concat()
    );
    let table: Capture = Capture::f32("t", &vec![0.0; 2 * heads], &[heads, 2]).unwrap().into();
    let attention = Attention::new().scale(1.0).score_mod(ScoreMod::from_wgsl(&text, &[table], &[]).unwrap());
    let first = [1.0, 0.0, 0.0, 0.0];
    let upload = |values: &[f32], shape| Tensor::upload(on, values, shape).unwrap();
    let q = upload(&vec![0.0; 4 * heads], [1, heads, 1, 4]);
    let k = upload(&[first, [0.0; 4]].concat(), [1, 1, 2, 4]);
    let v = upload(&[first, first.map(|x| -x)].concat(), [1, 1, 2, 4]);
    let dout = upload(&first.repeat(heads), [1, heads, 1, 4]);
    let output = attention.forward(on, &q, &k, &v).unwrap();
    let saved = Saved::new(&q, &k, &v, &output).unwrap();
    let Gradients { dq, captures, .. } =
        attention.backward(on, &saved, &dout, None, &Wanted::qkv().capture("t")).unwrap();
    let (dq, dt) = (dq.unwrap().read().unwrap(), captures[0].1.read().unwrap());
    // Zeros are exact; exp2 of a score that is not 0 may round the halves.
    let is = |got: &[f32], expected: &[f32]| {
        got.iter().zip(expected).all(|(x, y)| if *y == 0.0 { *x == 0.0 } else { (x - y).abs() < 1e-6 })
    };
    for (h, (text, by_score, by_element)) in KINKS.into_iter().enumerate() {
        let (dq, dt) = (&dq[4 * h..][..4], &dt[2 * h..][..2]);
        assert!(is(dq, &[by_score / 2.0, 0.0, 0.0, 0.0]), "{text}: dq is {dq:?}");
        assert!(is(dt, &[by_element / 2.0, -by_element / 2.0]), "{text}: dt is {dt:?}");
    }
}

#[test]
fn kinks_at_a_score_of_exactly_zero_have_the_documented_derivatives() {
    for gpu in tiers() {
        println!("{}", gpu.tier());
        kinks_follow_the_documented_convention(&gpu);
    }
}
