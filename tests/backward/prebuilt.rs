//! Gradients of the prebuilt masks and score mods.

use flexattn::expr::{Input, Type};
use flexattn::{Params, Tier, masks, scores};
use flexattn_testing::problem::Sizes;

use super::case::Case;
use super::tiers;

const SIZES: Sizes =
    Sizes { batch: 2, kv_batch: 2, q_heads: 4, kv_heads: 2, q_len: 48, kv_len: 48, head_dim: 8, v_dim: 12 };

/// Whether this tier takes row `i` of a list. A GPU compiles kernels for each, so a plain run has every tenth.
fn takes(tier: Tier, i: usize) -> bool {
    tier == Tier::Cpu || i % 10 == 3 || std::env::var_os("FLEXATTN_FULL").is_some()
}

#[test]
fn every_prebuilt_mask_has_the_gradients_of_the_reference() {
    for gpu in tiers() {
        for (i, row) in masks::ALL.iter().enumerate() {
            if takes(gpu.tier(), i) {
                println!("{} {}", gpu.tier(), row.name);
                let mask = row.build(&Params::new(2, 4, 48, 48)).unwrap();
                Case { mask: Some(mask), ..Case::new(SIZES) }.check(&gpu, &[], &[]);
            }
        }
    }
}

#[test]
fn every_prebuilt_score_mod_has_the_gradients_of_the_reference() {
    for gpu in tiers() {
        for (i, row) in scores::ALL.iter().enumerate() {
            if !takes(gpu.tier(), i) {
                continue;
            }
            println!("{} {}", gpu.tier(), row.name);
            let score = row.build(&Params::new(2, 4, 48, 48)).unwrap();
            let gradient = score.gradient().unwrap();
            let floats = score.captures().iter().filter(|capture| capture.dtype().ty() == Type::F32);
            let captures: Vec<String> = floats.map(|capture| capture.name().to_owned()).collect();
            let captures: Vec<&str> = captures.iter().map(String::as_str).collect();
            // Tables of distances: several pairs read one element.
            let pairs = gradient.captures.iter().filter(|place| {
                let reads = |input| place.indices.iter().any(|index| index.inputs().contains(input));
                reads(Input::Q) && reads(Input::Kv)
            });
            let atomic: Vec<&str> = pairs.map(|place| &*place.capture.name).collect();
            // With sinks, a bias of a whole row changes something.
            let sinks = vec![0.5, -1.0, 2.0, 0.0];
            Case { score: Some(score.clone()), sinks, ..Case::new(SIZES) }.check(&gpu, &captures, &atomic);
        }
    }
}
