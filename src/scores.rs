//! Prebuilt score mods: one function each, and a table of them all.
//!
//! Score mods compose: `scores::softcap(20.0).then(&scores::alibi(8))` caps first. A mistake in an argument is kept
//! in the score mod and reported by [`ScoreMod::check`], which every operation calls; nothing panics.
//!
//! `score` is `dot(q, k) * scale`, in natural units, before the softmax. Tensors that a score mod captures
//! (slopes, tables, gates) can be learnt: the backward pass gives their gradients, by the name that each function says
//! here ([`Wanted::capture`](crate::Wanted::capture)).
//!
//! ```
//! use flexattn::scores;
//!
//! let score_mod = scores::softcap(30.0).then(&scores::temperature(2.0));
//! score_mod.check()?;
//! assert_eq!(score_mod.expr().captures().len(), 0);
//! # Ok::<(), flexattn::Error>(())
//! ```

mod table;

use crate::error::{Error, Result};
use crate::expr::{Capture, Captured, F32, I32, Score, ScoreMod};
use crate::prebuilt::{self, Params};

pub use table::ALL;

/// The score mod of this name in [`ALL`], with its parameters or their defaults.
///
/// # Errors
///
/// [`Error::Expression`] for a name, parameter or value that does not exist.
///
/// ```
/// use flexattn::{Params, scores};
///
/// let sizes = Params::new(1, 8, 1024, 1024);
/// let softcap = scores::by_name("softcap", &sizes.clone().with("cap", 30.0))?;
/// assert_eq!(softcap.expr(), scores::softcap(30.0).expr());
/// assert!(scores::by_name("softcup", &sizes).is_err());
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn by_name(name: &str, params: &Params) -> Result<ScoreMod> {
    let score_mod = prebuilt::find(ALL, "score mod", name)?.build(params)?;
    score_mod.check()?;
    Ok(score_mod)
}

/// `f` with a captured tensor, or the mistake in the tensor.
fn capturing<V>(capture: Result<Captured<V>>, f: impl FnOnce(&Score, &Captured<V>) -> F32) -> ScoreMod {
    match capture {
        Ok(capture) => ScoreMod::new(|s| f(s, &capture)),
        Err(error) => ScoreMod::mistaken(error),
    }
}

/// A score mod that reports a value that breaks a rule.
fn refused(what: &str, value: impl std::fmt::Debug, rule: &str) -> ScoreMod {
    ScoreMod::mistaken(Error::expression(format!("{what} is {value:?} but {rule}")))
}

/// The score as it is.
///
/// Source: the default of FlexAttention.
///
/// ```
/// assert_eq!(flexattn::scores::identity().expr().to_string(), "score");
/// ```
pub fn identity() -> ScoreMod {
    ScoreMod::new(|s| s.score())
}

/// Attention with linear biases: `score + slope[h] * (kv - q)`, with the slopes of the paper.
///
/// For a power of two of heads, `slope[h] = 2^(-8 * (h + 1) / q_heads)`. For other numbers, the slopes of the power
/// of two below, then every second one of the power of two above, as in the paper's own code.
/// attention-gym uses the first formula for every number of heads.
///
/// Captures `slope`, f32 `[q_heads]`.
///
/// Source: Press et al. 2022, "Train Short, Test Long", section 3.
///
/// ```
/// use flexattn::{expr::CaptureData, scores};
///
/// let alibi = scores::alibi(8);
/// let CaptureData::F32(slope) = alibi.captures()[0].data() else { unreachable!() };
/// assert_eq!(slope[..3], [0.5, 0.25, 0.125]);
/// ```
pub fn alibi(q_heads: usize) -> ScoreMod {
    alibi_with_slopes(&alibi_slopes(q_heads))
}

/// The slopes of [`alibi`].
///
/// ```
/// assert_eq!(flexattn::scores::alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
/// assert_eq!(flexattn::scores::alibi_slopes(3), [0.0625, 0.00390625, 0.25]);
/// ```
pub fn alibi_slopes(q_heads: usize) -> Vec<f32> {
    let slope = |h: usize, heads: usize| (-8.0 * (h + 1) as f64 / heads as f64).exp2() as f32;
    let power = if q_heads == 0 { 0 } else { 1 << q_heads.ilog2() };
    let low = (0..power).map(|h| slope(h, power));
    low.chain((0..q_heads - power).map(|h| slope(2 * h, 2 * power))).collect()
}

/// [`alibi`] with slopes of your own, one per query head: `score + slope[h] * (kv - q)`.
///
/// Captures `slope`, f32 `[q_heads]`.
///
/// Source: as [`alibi`].
///
/// ```
/// let alibi = flexattn::scores::alibi_with_slopes(&[0.5, 0.1]);
/// assert_eq!(alibi.captures()[0].shape(), [2]);
/// ```
pub fn alibi_with_slopes(slopes: &[f32]) -> ScoreMod {
    capturing(Capture::f32("slope", slopes, &[slopes.len()]), |s, slope| {
        s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32()
    })
}

/// Soft capping: `cap * tanh(score / cap)`.
///
/// Source: Gemma Team 2024, "Gemma 2", section 2 (logit soft-capping).
///
/// ```
/// let softcap = flexattn::scores::softcap(20.0);
/// assert_eq!(softcap.expr().captures().len(), 0);
/// assert!(flexattn::scores::softcap(0.0).check().is_err());
/// ```
pub fn softcap(cap: f32) -> ScoreMod {
    if !(cap > 0.0 && cap.is_finite()) {
        return refused("cap", cap, "must be positive and finite; leave the score mod out for no cap");
    }
    ScoreMod::new(|s| (s.score() / cap).tanh() * cap)
}

/// A table of biases by head and distance: `score + table[h, clamp(kv - q, -reach, reach) + reach]`.
///
/// `table` is `[q_heads, 2 * reach + 1]`, row-major; the ends hold for all distances beyond.
///
/// Captures `table`, of that shape.
///
/// Source: Shaw et al. 2018, "Self-Attention with Relative Position Representations", section 3.2 (clipped distances, here
/// a bias).
///
/// ```
/// let bias = flexattn::scores::relative_bias(&[0.1, 0.0, -0.1], 1, 1);
/// assert_eq!(bias.captures()[0].shape(), [1, 3]);
/// assert!(flexattn::scores::relative_bias(&[0.0; 5], 2, 1).check().is_err());
/// ```
pub fn relative_bias(table: &[f32], q_heads: usize, reach: i32) -> ScoreMod {
    let Some(width) = reach.checked_mul(2).filter(|_| reach >= 0) else {
        return refused("reach", reach, "must be at least 0 and below 2^30; it is the largest distance");
    };
    capturing(Capture::f32("table", table, &[q_heads, width as usize + 1]), |s, table| {
        s.score() + table.at([s.head(), (s.kv() - s.q()).clamp(-reach, reach) + reach])
    })
}

/// The buckets of T5: `score + table[bucket(kv - q), h]`, `table` being `[buckets, q_heads]`, row-major.
///
/// Of `n` buckets for one direction, the first half hold one distance each and the others grow with the logarithm of the
/// distance up to `max_distance`; the last holds all beyond. If `bidirectional`, the second half of the buckets is for keys
/// behind the query; else those count as distance 0.
///
/// Captures `table`, of that shape.
///
/// Source: Raffel et al. 2020, T5, section 2.1. The bucket adds 0.001 before it truncates, so that rounding cannot move a
/// distance that lies on an edge.
///
/// ```
/// let bias = flexattn::scores::t5_bucket_bias(&[0.0; 32 * 8], 8, 128, true);
/// assert_eq!(bias.captures()[0].shape(), [32, 8]);
/// ```
pub fn t5_bucket_bias(table: &[f32], q_heads: usize, max_distance: i32, bidirectional: bool) -> ScoreMod {
    let buckets = table.len() / q_heads.max(1);
    let per_direction = if bidirectional { buckets / 2 } else { buckets };
    let exact = per_direction / 2;
    let (Ok(exact), Ok(per_direction)) = (i32::try_from(exact), i32::try_from(per_direction)) else {
        return refused("the number of buckets", buckets, "must be below 2^31; T5 has 32");
    };
    if exact < 1 || max_distance <= exact {
        return refused(
            "(buckets, max_distance)",
            (buckets, max_distance),
            "each direction needs at least 2 buckets and a max_distance above half of them; T5 has 32 and 128",
        );
    }
    let slope = f64::from(per_direction - exact) / (f64::from(max_distance) / f64::from(exact)).ln();
    capturing(Capture::f32("table", table, &[buckets, q_heads]), |s, table| {
        let ahead = s.kv() - s.q();
        let distance = if bidirectional { ahead.abs() } else { (-&ahead).max(0) };
        let far = (distance.max(exact).to_f32() / exact as f32).log() * slope as f32 + 0.001;
        let far = (far.to_i32() + exact).min(per_direction - 1);
        let bucket = distance.lt(exact).select(distance, far);
        let side = if bidirectional { ahead.gt(0).select(I32::from(per_direction), 0) } else { 0.into() };
        s.score() + table.at([bucket + side, s.head()])
    })
}

/// A bias for each query head: `score + bias[h]`.
///
/// It changes the softmax of no row, but the lse; with a sink or a merge of several calls it counts.
///
/// Captures `head_bias`, f32 `[q_heads]`.
///
/// Source: the formula is all there is to it.
///
/// ```
/// assert_eq!(flexattn::scores::head_bias(&[0.1, 0.2]).captures()[0].name(), "head_bias");
/// ```
pub fn head_bias(bias: &[f32]) -> ScoreMod {
    capturing(Capture::f32("head_bias", bias, &[bias.len()]), |s, bias| s.score() + bias.at([s.head()]))
}

/// A bias for every pair: `score + bias[b, h, q, kv]`, row-major; a dimension of 1 is shared by all.
///
/// Indexed with positions: give it no `q_offset` unless `bias` has all rows. An entry of minus infinity counts as
/// masked, but skips no work: use [`masks::dense`](crate::masks::dense) for that.
///
/// Captures `bias`, f32 of `shape`.
///
/// Source: PyTorch's `scaled_dot_product_attention`, a float `attn_mask`.
///
/// ```
/// let bias = flexattn::scores::dense_bias(&[0.0; 6], [1, 1, 2, 3]);
/// bias.check()?;
/// assert!(flexattn::scores::dense_bias(&[0.0; 5], [1, 1, 2, 3]).check().is_err());
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn dense_bias(bias: &[f32], shape: [usize; 4]) -> ScoreMod {
    capturing(Capture::f32("bias", bias, &shape), |s, bias| {
        let at = |dim: usize, index: I32| if shape[dim] == 1 { 0.into() } else { index };
        s.score() + bias.at([at(0, s.batch()), at(1, s.head()), at(2, s.q()), at(3, s.kv())])
    })
}

/// A penalty that grows with the distance: `score - rate * |q - kv|`.
///
/// Source: Chi et al. 2022, "KERPLE", section 4 (its power variant with an exponent of 1).
///
/// ```
/// assert_eq!(flexattn::scores::distance_penalty(0.5).captures().len(), 0);
/// ```
pub fn distance_penalty(rate: f32) -> ScoreMod {
    ScoreMod::new(|s| s.score() - (s.q() - s.kv()).abs().to_f32() * rate)
}

/// Softmax temperature: `score / temperature`.
///
/// Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2.
///
/// ```
/// assert!(flexattn::scores::temperature(0.5).check().is_ok());
/// assert!(flexattn::scores::temperature(0.0).check().is_err());
/// ```
pub fn temperature(temperature: f32) -> ScoreMod {
    if !(temperature > 0.0 && temperature.is_finite()) {
        return refused(
            "temperature",
            temperature,
            "must be positive and finite; a small one gives the maximum",
        );
    }
    ScoreMod::new(|s| s.score() / temperature)
}

/// Scores that grow with the logarithm of the number of keys: `score * max(1, log(q + 1) / log(train_len))`.
///
/// Keeps the entropy of attention about the same beyond the length of training; rows up to it are
/// unchanged. Counts keys as causal attention does.
///
/// Source: Chiang and Cholak 2022, "Overcoming a Theoretical Limitation of Self-Attention", section 5.3; Qwen uses the
/// same with its training length.
///
/// ```
/// assert!(flexattn::scores::log_n(2048).check().is_ok());
/// assert!(flexattn::scores::log_n(1).check().is_err());
/// ```
pub fn log_n(train_len: i32) -> ScoreMod {
    if train_len < 2 {
        return refused("train_len", train_len, "must be at least 2; it is the length of training in tokens");
    }
    let rate = (1.0 / f64::from(train_len).ln()) as f32;
    ScoreMod::new(|s| s.score() * ((s.q().to_f32() + 1.0).log() * rate).max(1.0))
}

/// Sandwich: `score + table[clamp(q - kv, -reach, reach) + reach] * q_heads / (8 * (h + 1))`, where the table holds the sums of
/// `cos(distance / 10000^(2 * i / dim))` over `i < dim / 2`.
///
/// It is the product of two sinusoidal position embeddings of `dim` numbers, summarised as a bias. `reach` is the largest distance told
/// apart.
///
/// Captures `sandwich`, f32 `[2 * reach + 1]`.
///
/// Source: Chi et al. 2023, "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis", section 5.
///
/// ```
/// let sandwich = flexattn::scores::sandwich(4, 128, 1023);
/// assert_eq!(sandwich.captures()[0].shape(), [2047]);
/// ```
pub fn sandwich(q_heads: usize, dim: usize, reach: i32) -> ScoreMod {
    let Some(width) = reach.checked_mul(2).filter(|_| reach >= 0) else {
        return refused("reach", reach, "must be at least 0 and below 2^30; it is the largest distance");
    };
    if q_heads == 0 || dim < 2 {
        return refused(
            "(q_heads, dim)",
            (q_heads, dim),
            "must be at least 1 and 2; the paper uses 128 for dim",
        );
    }
    let table: Vec<f32> = (-reach..=reach)
        .map(|distance| {
            let wave = |i: usize| (f64::from(distance) / 10000f64.powf(2.0 * i as f64 / dim as f64)).cos();
            (0..dim / 2).map(wave).sum::<f64>() as f32
        })
        .collect();
    let rate = q_heads as f32 / 8.0;
    capturing(Capture::f32("sandwich", &table, &[width as usize + 1]), |s, table| {
        let distance = (s.q() - s.kv()).clamp(-reach, reach);
        s.score() + table.at([distance + reach]) * (F32::from(rate) / (s.head() + 1).to_f32())
    })
}

/// A gate for each query head: `score * sigmoid(gate[h])`.
///
/// Captures `gate`, f32 `[q_heads]`.
///
/// Source: the formula is all there is to it; gates in papers scale a head's output, this one its scores.
///
/// ```
/// assert_eq!(flexattn::scores::head_gate(&[0.0, 1.0]).captures()[0].shape(), [2]);
/// ```
pub fn head_gate(gate: &[f32]) -> ScoreMod {
    capturing(Capture::f32("gate", gate, &[gate.len()]), |s, gate| s.score() * gate.at([s.head()]).sigmoid())
}
