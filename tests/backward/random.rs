//! Calls of random sizes, lengths, offsets and masks, forward and backward, beside the reference.

use flexattn::{Capture, MaskMod, Scalar, ScoreMod, Tier};
use flexattn_testing::problem::{Inputs, Numbers, Sizes};

use super::case::Case;
use super::tiers;

/// Every call of these has the same kernels: what differs is parameters.
fn case(seed: u64) -> Case {
    let mut numbers = Numbers::new(seed);
    let mut up_to = |most: usize| 1 + numbers.below(most);
    let (batch, kv_heads, group) = (up_to(3), up_to(2), up_to(3));
    let shared = up_to(4) == 1;
    // A third of the calls have fewer rows than a tile. Caches long enough for the kernels of decode are in
    // tests/decode.rs.
    let q_len = if up_to(3) == 1 { up_to(6) } else { up_to(160) };
    let kv_len = up_to(200);
    let (window, step) = (up_to(80) as i32, up_to(6) as i32);
    let sizes = Sizes {
        batch,
        kv_batch: if shared { 1 } else { batch },
        q_heads: kv_heads * group,
        kv_heads,
        q_len,
        kv_len,
        head_dim: 8,
        v_dim: 12,
    };
    let slope = Capture::f32("slope", &numbers.normals(6), &[6]).unwrap();
    let window = Scalar::i32("window", window).unwrap();
    let step = Scalar::i32("step", step).unwrap();
    let mask = MaskMod::new(|i| {
        let gap = i.q() - i.kv();
        let near = gap.ge(0) & gap.lt(window.get());
        near | ((i.q() + i.kv() + i.head()) % step.get()).eq(1)
    });
    let score = ScoreMod::new(|s| s.score() * 0.5 + slope.at([s.head()]) * (s.kv() - s.q()).to_f32() * 0.05);
    let rows = batch * sizes.q_heads * q_len;
    Case {
        inputs: Inputs::normal(sizes, seed),
        mask: Some(mask),
        score: Some(score),
        q_offset: (0..batch).map(|_| numbers.below(61) as i32 - 20).collect(),
        kv_len: (0..batch).map(|_| numbers.below(kv_len + 1) as u32).collect(),
        sinks: if seed.is_multiple_of(3) { numbers.normals(sizes.q_heads) } else { Vec::new() },
        dlse: if seed.is_multiple_of(2) { numbers.normals(rows) } else { Vec::new() },
    }
}

#[test]
fn random_calls_agree_with_the_reference() {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    for gpu in tiers() {
        let count = match (full, gpu.tier()) {
            (true, _) => 300,
            (false, Tier::Cpu) => 30,
            (false, _) => 10,
        };
        for seed in 0..count {
            println!("{} seed {seed}", gpu.tier());
            let case = case(seed);
            case.check_forward(&gpu);
            case.check(&gpu, &["slope"], &[]);
        }
    }
}
