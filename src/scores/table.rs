//! The table of all prebuilt score mods.

use super::*;
use crate::prebuilt::Prebuilt;

/// Distinct, small, deterministic numbers for tables that a user would learn.
fn numbers(count: usize) -> Vec<f32> {
    (0..count.max(1)).map(|i| ((i * 37 + 11) % 64) as f32 / 32.0 - 1.0).collect()
}

/// Every prebuilt score mod, in the order of this page, with parameters that have defaults for any sizes.
///
/// ```
/// use flexattn::{Params, scores};
///
/// for row in scores::ALL {
///     row.build(&Params::new(2, 4, 96, 96))?.check()?;
/// }
/// # Ok::<(), flexattn::Error>(())
/// ```
pub const ALL: &[Prebuilt<ScoreMod>] = &[
    Prebuilt { name: "identity", formula: "score", params: &[], make: |_| Ok(identity()) },
    Prebuilt {
        name: "alibi",
        formula: "score + slope[h] * (kv - q)",
        params: &[("slopes", "for each query head, its slope")],
        make: |p| Ok(alibi_with_slopes(&p.floats("slopes", || alibi_slopes(p.heads))?)),
    },
    Prebuilt {
        name: "softcap",
        formula: "cap * tanh(score / cap)",
        params: &[("cap", "the bound of the scores")],
        make: |p| Ok(softcap(p.float("cap", 20.0)? as f32)),
    },
    Prebuilt {
        name: "relative_bias",
        formula: "score + table[h, clamp(kv - q, -reach, reach) + reach]",
        params: &[("table", "a bias for each head and distance"), ("reach", "the largest distance")],
        make: |p| {
            let reach = p.int("reach", 32)?;
            let width = 2 * usize::try_from(reach).unwrap_or(0) + 1;
            Ok(relative_bias(&p.floats("table", || numbers(p.heads * width))?, p.heads, reach))
        },
    },
    Prebuilt {
        name: "t5_bucket_bias",
        formula: "score + table[bucket(kv - q), h]",
        params: &[
            ("table", "a bias for each bucket and head"),
            ("max_distance", "the distance at which the last bucket begins"),
            ("bidirectional", "1 if keys behind the query have buckets of their own"),
        ],
        make: |p| {
            let table = p.floats("table", || numbers(32 * p.heads))?;
            Ok(t5_bucket_bias(&table, p.heads, p.int("max_distance", 128)?, p.int("bidirectional", 1)? != 0))
        },
    },
    Prebuilt {
        name: "head_bias",
        formula: "score + bias[h]",
        params: &[("bias", "for each query head, its bias")],
        make: |p| Ok(head_bias(&p.floats("bias", || numbers(p.heads))?)),
    },
    Prebuilt {
        name: "dense_bias",
        formula: "score + bias[b, h, q, kv]",
        params: &[("bias", "a bias for each pair"), ("shape", "batch, heads, rows and columns of `bias`")],
        make: |p| {
            // A default that keeps memory small: one line for all rows.
            let shape = p.sides("shape", [1, 1, 1, i32::try_from(p.kv_len.max(1)).unwrap_or(i32::MAX)])?;
            let bias = p.floats("bias", || numbers(p.kv_len))?;
            Ok(dense_bias(&bias, shape.map(|dim| usize::try_from(dim).unwrap_or(0))))
        },
    },
    Prebuilt {
        name: "distance_penalty",
        formula: "score - rate * |q - kv|",
        params: &[("rate", "penalty of one token of distance")],
        make: |p| Ok(distance_penalty(p.float("rate", 0.05)? as f32)),
    },
    Prebuilt {
        name: "temperature",
        formula: "score / temperature",
        params: &[("temperature", "above 1 flattens, below 1 sharpens")],
        make: |p| Ok(temperature(p.float("temperature", 1.5)? as f32)),
    },
    Prebuilt {
        name: "log_n",
        formula: "score * max(1, log(q + 1) / log(train_len))",
        params: &[("train_len", "tokens in training")],
        make: |p| Ok(log_n(p.int("train_len", 16)?)),
    },
    Prebuilt {
        name: "sandwich",
        formula: "score + table[clamp(q - kv, -reach, reach) + reach] * q_heads / (8 * (h + 1))",
        params: &[("dim", "numbers of a position embedding"), ("reach", "the largest distance")],
        make: |p| {
            let dim = usize::try_from(p.int("dim", 128)?).unwrap_or(0);
            Ok(sandwich(p.heads, dim, p.int("reach", p.len().clamp(1, 4096) - 1)?))
        },
    },
    Prebuilt {
        name: "head_gate",
        formula: "score * sigmoid(gate[h])",
        params: &[("gate", "for each query head, its gate")],
        make: |p| Ok(head_gate(&p.floats("gate", || numbers(p.heads))?)),
    },
];
