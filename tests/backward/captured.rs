//! Gradients of captured tensors, by the pattern of what is read.

use flexattn::{Capture, MaskMod, ScoreMod, Tier};
use flexattn_testing::problem::{Numbers, Sizes};
use half::{bf16, f16};

use super::case::Case;
use super::tiers;

const SIZES: Sizes =
    Sizes { batch: 2, kv_batch: 2, q_heads: 4, kv_heads: 2, q_len: 45, kv_len: 70, head_dim: 8, v_dim: 12 };

/// A case with this score mod, a mask, and lengths and offsets of their own for each batch entry.
fn case(score: ScoreMod) -> Case {
    Case {
        mask: Some(MaskMod::new(|i| (i.q() + 30).ge(i.kv()))),
        score: Some(score),
        q_offset: vec![0, 3],
        kv_len: vec![70, 61],
        ..Case::new(SIZES)
    }
}

struct Pattern {
    name: &'static str,
    score: ScoreMod,
    wanted: Vec<&'static str>,
    /// Tensors of which several pairs read one element.
    atomic: Vec<&'static str>,
}

fn patterns() -> Vec<Pattern> {
    let mut numbers = Numbers::new(11);
    let mut table = |name: &str, shape: &[usize]| {
        let values = numbers.normals(shape.iter().product());
        Capture::f32(name, &values, shape).unwrap()
    };
    let (factor, head, row, column) =
        (table("factor", &[]), table("head", &[4]), table("row", &[48]), table("column", &[70]));
    let (entry, pair, element) =
        (table("entry", &[2]), table("pair", &[48, 70]), table("element", &[2, 4, 48, 70]));
    let (distance, bucket, either) =
        (table("distance", &[4, 24]), table("bucket", &[8, 4]), table("either", &[70]));
    let inner: Vec<i32> = (0..70).map(|i| (i * 7) % 24).collect();
    let inner = Capture::i32("inner", &inner, &[70]).unwrap();
    let half = Capture::f16("half", &[0.5, -0.25, 1.5, 0.0].map(f16::from_f32), &[4]).unwrap();
    let brain = Capture::bf16("brain", &[bf16::from_f32(0.75); 70], &[70]).unwrap();
    let pattern = |name, score, wanted: &[&'static str], atomic: &[&'static str]| Pattern {
        name,
        score,
        wanted: wanted.to_vec(),
        atomic: atomic.to_vec(),
    };
    vec![
        pattern("a scalar", ScoreMod::new(|s| s.score() * factor.at([])), &["factor"], &[]),
        pattern("per head", ScoreMod::new(|s| s.score() * head.at([s.head()]).tanh()), &["head"], &[]),
        pattern("per batch entry", ScoreMod::new(|s| s.score() * entry.at([s.batch()])), &["entry"], &[]),
        pattern("per row", ScoreMod::new(|s| s.score() * row.at([s.q()])), &["row"], &[]),
        pattern("per column", ScoreMod::new(|s| s.score() + column.at([s.kv()])), &["column"], &[]),
        pattern(
            "per element",
            ScoreMod::new(|s| s.score() + element.at([s.batch(), s.head(), s.q(), s.kv()])),
            &["element"],
            &[],
        ),
        // Positions of the two batch entries differ by 3, and both read the same element.
        pattern("per pair", ScoreMod::new(|s| s.score() + pair.at([s.q(), s.kv()])), &["pair"], &["pair"]),
        pattern(
            "a table of distances",
            ScoreMod::new(|s| s.score() + distance.at([s.head(), s.q() - s.kv() + 12])),
            &["distance"],
            &["distance"],
        ),
        pattern(
            "a table of buckets",
            ScoreMod::new(|s| {
                let far = (s.q() - s.kv()).abs().to_f32() + 1.0;
                s.score() + bucket.at([far.log2().to_i32(), s.head()])
            }),
            &["bucket"],
            &["bucket"],
        ),
        pattern(
            "one tensor in four places",
            ScoreMod::new(|s| {
                let both = either.at([s.q()]) * either.at([s.kv()]);
                s.score() * either.at([s.head()]) + both + either.at([s.q() - s.kv()])
            }),
            &["either"],
            &["either"],
        ),
        pattern(
            "a symmetric bias",
            ScoreMod::new(|s| s.score() + either.at([s.q()]) + either.at([s.kv()])),
            &["either"],
            &[],
        ),
        pattern(
            "an index that is read",
            ScoreMod::new(|s| s.score() + distance.at([s.head(), inner.at([s.kv()])])),
            &["distance"],
            &[],
        ),
        pattern(
            "an index that is read per pair",
            ScoreMod::new(|s| s.score() * distance.at([s.head(), inner.at([s.q() - s.kv() + 20])])),
            &["distance"],
            &["distance"],
        ),
        pattern(
            "f16 and bf16, and one tensor without a gradient",
            ScoreMod::new(|s| s.score() * half.at([s.head()]) + brain.at([s.kv()]) * row.at([s.q()])),
            &["brain", "half"],
            &[],
        ),
        pattern(
            "several tensors at once",
            ScoreMod::new(|s| {
                let bent = (s.score() * factor.at([]) + column.at([s.kv()])).tanh();
                bent * head.at([s.head()]) + distance.at([s.head(), s.q() - s.kv()])
            }),
            &["distance", "factor", "column", "head"],
            &["distance"],
        ),
    ]
}

#[test]
fn every_pattern_of_reads_has_the_gradient_of_the_reference() {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    for gpu in tiers() {
        if gpu.tier() == Tier::Cpu || full {
            for Pattern { name, score, wanted, atomic } in patterns() {
                println!("{} {name}", gpu.tier());
                case(score).check(&gpu, &wanted, &atomic);
            }
        }
    }
}

#[test]
fn patterns_may_meet_in_one_score_mod() {
    for gpu in tiers() {
        let (pairs, others): (Vec<_>, Vec<_>) = patterns().into_iter().partition(|p| !p.atomic.is_empty());
        // The Subgroup tier shares the kernels of captured tensors with the Portable one.
        let groups = if gpu.tier() == Tier::Subgroup { vec![pairs] } else { vec![pairs, others] };
        for group in groups {
            let (mut wanted, mut atomic) = (Vec::new(), Vec::new());
            let mut score = ScoreMod::new(|s| s.score() * 0.5);
            for pattern in group {
                println!("{} {}", gpu.tier(), pattern.name);
                score = score.then(&pattern.score);
                wanted.extend(
                    pattern.wanted.into_iter().filter(|name| !wanted.contains(name)).collect::<Vec<_>>(),
                );
                atomic.extend(pattern.atomic);
            }
            case(score).check(&gpu, &wanted, &atomic);
        }
    }
}

#[test]
fn masked_positions_add_nothing_even_where_values_and_derivatives_are_not_finite() {
    let mut weights = vec![0.5; 70];
    // Read at masked columns only.
    weights[20..40].fill(f32::NAN);
    weights[40..60].fill(0.0);
    let weight = Capture::f32("weight", &weights, &[70]).unwrap();
    let score = ScoreMod::new(|s| {
        let gap = (s.q() - s.kv()).to_f32();
        s.score() * weight.at([s.kv()]) + weight.at([s.kv()]).log() + 1.0 / gap
    });
    let mask = MaskMod::new(|i| (i.kv().lt(20) | i.kv().ge(60)) & i.q().ne(i.kv()));
    for gpu in tiers() {
        Case { mask: Some(mask.clone()), ..case(score.clone()) }.check(&gpu, &["weight"], &[]);
    }
}

#[test]
fn columns_past_kv_len_add_nothing_even_where_their_values_are_not_finite() {
    let score = ScoreMod::new(|s| s.score());
    for gpu in tiers() {
        let mut case = Case { mask: None, kv_len: vec![33, 0], ..case(score.clone()) };
        let (head_dim, v_dim) = (SIZES.head_dim, SIZES.v_dim);
        for head in 0..SIZES.batch * SIZES.kv_heads {
            let first = if head < SIZES.kv_heads { 33 } else { 0 };
            for row in first..SIZES.kv_len {
                let at = head * SIZES.kv_len + row;
                case.inputs.k[at * head_dim..][..head_dim].fill(f32::NAN);
                case.inputs.v[at * v_dim..][..v_dim].fill(f32::INFINITY);
            }
        }
        case.check(&gpu, &[], &[]);
    }
}

#[test]
fn a_score_mod_that_ignores_the_score_gives_no_gradient_to_q_and_k() {
    let column = Capture::f32("column", &[0.25; 70], &[70]).unwrap();
    let score = ScoreMod::new(|s| column.at([s.kv()]) * s.q().to_f32() * 0.01);
    for gpu in tiers() {
        let case = case(score.clone());
        case.check(&gpu, &["column"], &[]);
        let found = case.run(&gpu, &flexattn::Wanted::qkv()).unwrap();
        assert!(found.dq.unwrap().read().unwrap().iter().all(|&x| x == 0.0), "{}", gpu.tier());
        assert!(found.dk.unwrap().read().unwrap().iter().all(|&x| x == 0.0), "{}", gpu.tier());
        assert!(found.dv.unwrap().read().unwrap().iter().any(|&x| x != 0.0), "{}", gpu.tier());
    }
}
