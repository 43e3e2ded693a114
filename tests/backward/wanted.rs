//! What a backward call computes, creates and records.

use std::rc::Rc;

use flexattn::plan::Plan;
use flexattn::{Attention, Capture, Gpu, Saved, ScoreMod, Tensor, Tier, Wanted, masks};
use flexattn_testing::problem::Sizes;

use super::case::Case;
use super::tiers;
use crate::watched::Watched;

/// The same tensor as q, k, v and dout.
pub(super) fn saved(on: &Watched, attention: &Attention, len: usize) -> (Saved<Watched>, Tensor<Watched>) {
    let [x, out] = [0.5, 0.0].map(|x| Tensor::upload(on, &vec![x; 2 * len * 8], [1, 2, len, 8]).unwrap());
    let (_, output) = attention.prepare(on, [&x, &x, &x, &out]).unwrap();
    (Saved::new(&x, &x, &x, &output).unwrap(), x)
}

fn kernels(plan: &Plan) -> Vec<&'static str> {
    plan.passes.iter().map(|pass| pass.spec.entry()).collect()
}

#[test]
fn only_wanted_gradients_are_computed_and_get_memory() {
    let slope = Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    let attention = Attention::new()
        .score_mod(ScoreMod::new(|s| s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32()))
        .sinks(vec![0.1, 0.2]);
    let none = Wanted::default();
    let cases: [(Wanted, &[&str], &[&str]); 6] = [
        (none.clone(), &["delta"], &[]),
        (Wanted { q: true, ..none.clone() }, &["delta", "dq"], &["dq"]),
        (Wanted { k: true, ..none.clone() }, &["delta", "dkv"], &["dk and dv"]),
        (Wanted { v: true, ..none.clone() }, &["delta", "dkv"], &["dk and dv"]),
        (none.clone().sinks(), &["delta", "dsink"], &[]),
        (none.capture("slope"), &["delta", "rows", "scatter"], &["gradients of captured tensors"]),
    ];
    for (wanted, passes, memory) in cases {
        let on = Watched::new();
        let (saved, dout) = saved(&on, &attention, 40);
        let planned = attention.plan_backward(&on, &saved, &dout, None, &wanted).unwrap();
        assert_eq!(kernels(&planned.plan), passes, "{wanted:?}");
        on.created.borrow_mut().clear();
        let found = attention.backward(&on, &saved, &dout, None, &wanted).unwrap();
        let created: Vec<String> = on.created.borrow().iter().map(|(label, _)| label.clone()).collect();
        let kept: Vec<&str> =
            created.iter().map(String::as_str).filter(|label| label.contains('d')).collect();
        let gradients: Vec<&str> = kept
            .into_iter()
            .filter(|label| ["dq", "dk and dv", "gradients of captured tensors"].contains(label))
            .collect();
        assert_eq!(gradients, memory, "{wanted:?}: {created:?}");
        assert_eq!(found.dq.is_some(), wanted.q);
        assert_eq!(found.dk.is_some(), wanted.k);
        assert_eq!(found.dv.is_some(), wanted.v);
        assert_eq!(found.dsinks.is_some(), wanted.sinks);
        assert_eq!(found.captures.len(), wanted.captures.len());
    }
}

#[test]
fn dk_alone_and_dv_alone_are_what_they_are_together() {
    let sizes = Sizes { kv_heads: 2, kv_len: 75, v_dim: 36, ..Sizes::square(2, 4, 70, 24) };
    let case = Case { mask: Some(masks::causal()), ..Case::new(sizes) };
    for gpu in tiers() {
        let all = case.run(&gpu, &Wanted::qkv()).unwrap();
        let only_k = case.run(&gpu, &Wanted { k: true, ..Wanted::default() }).unwrap();
        let only_v = case.run(&gpu, &Wanted { v: true, ..Wanted::default() }).unwrap();
        let read = |tensor: Option<Tensor>| tensor.unwrap().read().unwrap();
        assert_eq!(read(only_k.dk), read(all.dk), "{}", gpu.tier());
        assert_eq!(read(only_v.dv), read(all.dv), "{}", gpu.tier());
    }
}

#[test]
fn dk_alone_and_dv_alone_take_the_memory_of_one() {
    let sizes = Sizes { kv_heads: 2, kv_len: 75, v_dim: 36, ..Sizes::square(2, 4, 70, 24) };
    let case = Case { mask: Some(masks::causal()), ..Case::new(sizes) };
    let [dk, dv] = [24, 36].map(|dim| 4 * 2 * 2 * 75 * dim);
    // Whole, and in windows of one head each.
    for limit in [1 << 27, 20 << 10] {
        for gpu in tiers() {
            let mut on = Watched::over(gpu);
            let mut profile = (*on.profile).clone();
            profile.limits.storage_binding = limit;
            on.profile = Rc::new(profile);
            let run = |k, v| {
                on.created.borrow_mut().clear();
                let found = case.run(&on, &Wanted { k, v, ..Wanted::default() }).unwrap();
                let created = on.created.borrow();
                let bytes = created.iter().find(|(label, _)| label == "dk and dv").unwrap().1;
                ([found.dk, found.dv].map(|tensor| tensor.map(|tensor| tensor.read().unwrap())), bytes)
            };
            let (both, bytes) = run(true, true);
            assert_eq!(bytes, dk + dv);
            let [all_k, all_v] = both;
            assert_eq!(run(true, false), ([all_k, None], dk), "{}", on.profile.tier);
            assert_eq!(run(false, true), ([None, all_v], dv), "{}", on.profile.tier);
        }
    }
}

#[test]
fn nothing_of_the_size_of_the_scores_is_kept() {
    for tier in [Tier::Portable, Tier::Subgroup, Tier::Cpu] {
        let on = Watched::as_tier(tier);
        let attention = Attention::new().mask_mod(masks::causal());
        let len = 4096;
        let (saved, dout) = saved(&on, &attention, len);
        attention.prepare_backward(&on, &saved, &dout, None, &Wanted::qkv()).unwrap();
        let largest = on.created.borrow().iter().map(|(_, bytes)| *bytes).max().unwrap();
        // dk and dv together; the scores of one head would take 256 times that.
        assert_eq!(largest, 2 * 4 * 2 * len as u64 * 8);
    }
}

#[test]
fn the_tier_of_cooperative_matrices_takes_the_gradient_kernels_of_the_subgroup_tier() {
    for (tier, expected) in [
        (Tier::CoopMatrix, ["delta", "dq_subgroup", "dkv_subgroup"]),
        (Tier::Subgroup, ["delta", "dq_subgroup", "dkv_subgroup"]),
        (Tier::Portable, ["delta", "dq", "dkv"]),
    ] {
        let on = Watched::as_tier(tier);
        let attention = Attention::new();
        let (saved, dout) = saved(&on, &attention, 40);
        let planned = attention.plan_backward(&on, &saved, &dout, None, &Wanted::qkv()).unwrap();
        assert_eq!(kernels(&planned.plan), expected, "{tier}");
    }
}

#[test]
fn a_forward_and_a_backward_call_recorded_into_one_encoder_give_what_they_give_alone() {
    let bias = Capture::f32("bias", &[0.5, -0.5, 0.25, 0.0], &[4]).unwrap();
    let case = Case {
        mask: Some(masks::causal()),
        score: Some(ScoreMod::new(|s| s.score() * bias.at([s.head()]))),
        ..Case::new(Sizes { kv_heads: 2, ..Sizes::square(2, 4, 50, 16) })
    };
    let wanted = Wanted::qkv().capture("bias");
    for gpu in tiers() {
        let (attention, [q, k, v, dout]) = (case.attention(), case.tensors(&gpu));
        let Some((device, queue)) = gpu.device().zip(gpu.queue()) else {
            refuses_to_record(&gpu, &case);
            continue;
        };
        let out = gpu.zeros(q.dtype(), dout.shape()).unwrap();
        let mut encoder = device.create_command_encoder(&Default::default());
        let forward = attention.record(&gpu, &mut encoder, &q, &k, &v, &out).unwrap();
        let saved = Saved::new(&q, &k, &v, &forward.output).unwrap();
        let backward = attention.record_backward(&gpu, &mut encoder, &saved, &dout, None, &wanted).unwrap();
        assert!(backward.work > forward.work);
        let read = |tensor: &Option<Tensor>| tensor.as_ref().unwrap().read().unwrap();
        assert!(read(&backward.gradients.dq).iter().all(|&x| x == 0.0), "it ran before it was submitted");
        queue.submit([encoder.finish()]);
        let alone = case.run(&gpu, &wanted).unwrap();
        assert_eq!(read(&backward.gradients.dq), read(&alone.dq));
        assert_eq!(read(&backward.gradients.dk), read(&alone.dk));
        assert_eq!(read(&backward.gradients.dv), read(&alone.dv));
        let table = |found: &flexattn::Gradients| found.capture("bias").unwrap().read().unwrap();
        assert_eq!(table(&backward.gradients), table(&alone));
        assert!(table(&alone).iter().all(|&x| x != 0.0));
    }
}

/// The Cpu tier has no encoder; a device of another tier lends one.
fn refuses_to_record(gpu: &Gpu, case: &Case) {
    let Ok(other) = Gpu::builder().tier(Tier::Portable).build() else { return };
    let Some(device) = other.device() else { return };
    let (attention, [q, k, v, dout]) = (case.attention(), case.tensors(gpu));
    let output = attention.forward(gpu, &q, &k, &v).unwrap();
    let saved = Saved::new(&q, &k, &v, &output).unwrap();
    let mut encoder = device.create_command_encoder(&Default::default());
    let refused = attention.record_backward(gpu, &mut encoder, &saved, &dout, None, &Wanted::qkv());
    assert!(refused.unwrap_err().is_unsupported());
}
