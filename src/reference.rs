//! Attention and its gradients in f64, straight from the definition.
//!
//! What every kernel is compared with. It evaluates the mods at every pair of a query and a key, keeps
//! whole rows of scores, and knows nothing of blocks, kernels or runtimes, so that a mistake there cannot
//! hide here. It is slow, and meant to be.
//!
//! For query row q of batch entry b and head h, with kv head g = h / (Hq / Hkv), over the kept keys j:
//!
//! ```text
//! s_j = score_mod(q . k_j * scale, b, h, q + q_offset[b], j)      kept: j < kv_len[b], mask_mod, s_j > -inf
//! lse = log sum_j exp(s_j)        max = max_j s_j        out = sum_j exp(s_j - lse) v_j
//! ```
//!
//! A row that keeps nothing has out 0, lse and max minus infinity, and gradients 0. With a sink z_h, out is
//! multiplied by sigmoid(lse - z_h); lse and max are those without it.
//!
//! The loss behind the gradients is `sum(out * dout) + sum(lse * dlse)` over rows that keep something:
//!
//! ```text
//! P_j = exp(s_j - lse)      Ps_j = P_j * sigmoid(lse - z)      delta = out . dout
//! ds_j = Ps_j (dout . v_j - delta) + P_j dlse      dz = - (1 - sigmoid(lse - z)) delta
//! dv_j = Ps_j dout      dq = scale * sum_j ds_j score_mod'(s_j) k_j      dk_j = scale * ds_j score_mod'(s_j) q
//! ```
//!
//! summed over the query heads of a group, and over the batch where k and v have one entry.

mod gradients;

use crate::error::{Error, Result};
use crate::expr::{Bound, Capture, Env, MaskMod, Program, Scalar, ScoreMod};
use crate::shape::AttentionShape;

pub use gradients::{Gradients, backward};

/// One attention problem. Tensors are row-major and have no gaps.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    /// The sizes.
    pub shape: AttentionShape,
    /// Queries, `[B, Hq, L, E]`.
    pub q: &'a [f32],
    /// Keys, `[Bkv, Hkv, S, E]`.
    pub k: &'a [f32],
    /// Values, `[Bkv, Hkv, S, Ev]`.
    pub v: &'a [f32],
    /// What q.k is multiplied by.
    pub scale: f64,
    /// Changes scores; none leaves them.
    pub score_mod: Option<&'a ScoreMod>,
    /// Says which pairs are kept; none keeps all.
    pub mask_mod: Option<&'a MaskMod>,
    /// What mods see as the position of row 0, per batch entry; empty is 0.
    pub q_offset: &'a [i32],
    /// How many keys count, per batch entry; empty is all.
    pub kv_len: &'a [u32],
    /// One logit per query head that takes part in the softmax and has no value; empty is none.
    pub sinks: &'a [f32],
}

/// What attention gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reference {
    /// `[B, Hq, L, Ev]`.
    pub out: Vec<f64>,
    /// `[B, Hq, L]`, natural log, after scale and score_mod.
    pub lse: Vec<f64>,
    /// `[B, Hq, L]`, the largest kept score.
    pub max: Vec<f64>,
}

impl<'a> Problem<'a> {
    /// A problem without mods, with the scale 1/sqrt(E).
    pub fn new(shape: AttentionShape, q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Self {
        Self {
            shape,
            q,
            k,
            v,
            scale: 1.0 / (shape.head_dim as f64).sqrt(),
            score_mod: None,
            mask_mod: None,
            q_offset: &[],
            kv_len: &[],
            sinks: &[],
        }
    }

    fn check(&self) -> Result<()> {
        let AttentionShape { batch, kv_batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_dim } =
            self.shape;
        if kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) || ![1, batch].contains(&kv_batch) {
            return Err(Error::shape(format!(
                "kv_heads {kv_heads} must divide q_heads {q_heads}, and kv_batch {kv_batch} be 1 or batch {batch}"
            )));
        }
        // Saturated, no tensor has that many elements.
        let product = |sizes: [usize; 4]| sizes.into_iter().fold(1, usize::saturating_mul);
        let lengths = [
            ("q", self.q.len(), product([batch, q_heads, q_len, head_dim])),
            ("k", self.k.len(), product([kv_batch, kv_heads, kv_len, head_dim])),
            ("v", self.v.len(), product([kv_batch, kv_heads, kv_len, v_dim])),
        ];
        let optional = [
            ("q_offset", self.q_offset.len(), batch),
            ("kv_len", self.kv_len.len(), batch),
            ("sinks", self.sinks.len(), q_heads),
        ];
        let wrong = |&(_, found, wanted): &(&str, usize, usize)| found != wanted;
        let optional = optional.into_iter().filter(|&(_, found, _)| found != 0);
        match lengths.into_iter().chain(optional).find(wrong) {
            None => Ok(()),
            Some((name, found, wanted)) => Err(Error::shape(format!(
                "{name} has {found} elements but its shape has {wanted}; pass it without gaps"
            ))),
        }
    }
}

/// Attention at every row.
///
/// # Errors
///
/// When a tensor's length is not that of its shape, or a mod reads a capture whose content is not on the
/// host.
pub fn forward(problem: &Problem<'_>) -> Result<Reference> {
    let [batch, heads, rows] = [problem.shape.batch, problem.shape.q_heads, problem.shape.q_len];
    let all = (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |q| [b, h, q])));
    forward_rows(problem, all)
}

/// Attention at chosen rows (batch entry, query head, query), in their order.
///
/// # Errors
///
/// As [`forward`], and when a row is out of range.
pub fn forward_rows(problem: &Problem<'_>, rows: impl IntoIterator<Item = [usize; 3]>) -> Result<Reference> {
    problem.check()?;
    let programs = Programs::new(problem);
    let mut definition = Definition::new(problem, &programs)?;
    let mut result = Reference::default();
    for at in rows {
        let row = definition.row(at)?;
        result.out.extend(definition.out(&row));
        result.lse.push(row.lse);
        result.max.push(row.max);
    }
    Ok(result)
}

/// What a row attends to: one weight per key, 0 where the pair is not kept. They sum to 1, or to less where
/// there is a sink, or are all 0.
///
/// # Errors
///
/// As [`forward_rows`].
pub fn weights(problem: &Problem<'_>, row: [usize; 3]) -> Result<Vec<f64>> {
    problem.check()?;
    let programs = Programs::new(problem);
    let row = Definition::new(problem, &programs)?.row(row)?;
    Ok((0..problem.shape.kv_len).map(|j| row.weight(j) * row.beside_sink).collect())
}

/// The mods of a problem in linear form.
struct Programs {
    score: Option<Program>,
    mask: Option<Program>,
}

impl Programs {
    fn new(problem: &Problem<'_>) -> Self {
        Self {
            score: problem.score_mod.map(|m| Program::new(std::slice::from_ref(m.expr()))),
            mask: problem.mask_mod.map(|m| Program::new(std::slice::from_ref(m.expr()))),
        }
    }
}

/// A problem with its mods ready to be evaluated.
struct Definition<'a> {
    problem: &'a Problem<'a>,
    /// Per batch entry, since mods see its kv_len; empty without a score mod.
    score: Vec<Bound<'a, f64>>,
    /// The same for the mask.
    mask: Vec<Bound<'a, f64>>,
}

/// The scores of one row.
struct Row {
    at: [usize; 3],
    /// q.k * scale, for every key that counts.
    raw: Vec<f64>,
    /// After score_mod; minus infinity where the pair is not kept.
    post: Vec<f64>,
    lse: f64,
    max: f64,
    /// sigmoid(lse - sink): the share that the sink leaves; 1 without one.
    beside_sink: f64,
}

impl Row {
    /// exp(s_j - lse), 0 where the pair is not kept.
    fn weight(&self, key: usize) -> f64 {
        match self.post.get(key) {
            Some(&post) if post != f64::NEG_INFINITY => (post - self.lse).exp(),
            _ => 0.0,
        }
    }
}

impl Problem<'_> {
    /// How many keys count.
    fn keys(&self, b: usize) -> usize {
        self.kv_len.get(b).map_or(self.shape.kv_len, |&len| self.shape.kv_len.min(len as usize))
    }

    /// What mods see as q.
    fn position(&self, b: usize, q: usize) -> i32 {
        (q as i32).wrapping_add(self.q_offset.get(b).copied().unwrap_or(0))
    }

    /// Which row of k and v a pair reads, as if both were one long list of rows.
    fn kv_row(&self, [b, h, _]: [usize; 3], key: usize) -> usize {
        let b = if self.shape.kv_batch == 1 { 0 } else { b };
        (b * self.shape.kv_heads + h / self.shape.group()) * self.shape.kv_len + key
    }

    /// A program bound once per batch entry.
    fn bind<'a>(
        &self,
        program: &'a Program,
        captures: &'a [Capture],
        scalars: &'a [Scalar],
    ) -> Result<Vec<Bound<'a, f64>>> {
        let one = |b| program.bind(&Env::new(captures, scalars, self.shape.q_len, self.keys(b))?);
        (0..self.shape.batch).map(one).collect()
    }
}

impl<'a> Definition<'a> {
    fn new(problem: &'a Problem<'a>, programs: &'a Programs) -> Result<Self> {
        let mut definition = Self { problem, score: Vec::new(), mask: Vec::new() };
        if let (Some(score), Some(program)) = (problem.score_mod, &programs.score) {
            definition.score = problem.bind(program, score.captures(), score.scalars())?;
        }
        if let (Some(mask), Some(program)) = (problem.mask_mod, &programs.mask) {
            definition.mask = problem.bind(program, mask.captures(), mask.scalars())?;
        }
        Ok(definition)
    }

    fn row(&mut self, at @ [b, h, q]: [usize; 3]) -> Result<Row> {
        let Problem { shape, .. } = *self.problem;
        if b >= shape.batch || h >= shape.q_heads || q >= shape.q_len {
            return Err(Error::shape(format!(
                "row {at:?} is outside batch {}, q_heads {}, q_len {}",
                shape.batch, shape.q_heads, shape.q_len
            )));
        }
        let query = ((b * shape.q_heads + h) * shape.q_len + q) * shape.head_dim;
        let query = &self.problem.q[query..][..shape.head_dim];
        let keys = self.problem.keys(b);
        let raw: Vec<f64> = (0..keys)
            .map(|j| {
                let key = &self.problem.k[self.problem.kv_row(at, j) * shape.head_dim..];
                let products = query.iter().zip(key).map(|(&x, &y)| f64::from(x) * f64::from(y));
                products.sum::<f64>() * self.problem.scale
            })
            .collect();
        let (b, h, q) = (b as i32, h as i32, self.problem.position(b, q));
        let mut post = raw.clone();
        // Mods are evaluated for at least one key.
        if let Some(score) = self.score.get_mut(b as usize).filter(|_| keys > 0) {
            score.row(b, h, q, 0, &raw, keys);
            post.copy_from_slice(score.output(0).floats());
        }
        if let Some(mask) = self.mask.get_mut(b as usize).filter(|_| keys > 0) {
            mask.row(b, h, q, 0, &[], keys);
            for (post, &kept) in post.iter_mut().zip(mask.output(0).bools()) {
                if !kept {
                    *post = f64::NEG_INFINITY;
                }
            }
        }
        // Not f64::max, which drops NaN: a kept NaN is the row's.
        let larger = |m: f64, &x: &f64| if x > m || x.is_nan() { x } else { m };
        let max = post.iter().fold(f64::NEG_INFINITY, larger);
        let sum = || post.iter().map(|&x| (x - max).exp()).sum::<f64>();
        let lse = if max == f64::NEG_INFINITY { max } else { max + sum().ln() };
        let sink = self.problem.sinks.get(at[1]);
        let beside_sink = match sink {
            Some(&z) if z > f32::NEG_INFINITY || z.is_nan() => 1.0 / (1.0 + (f64::from(z) - lse).exp()),
            _ => 1.0,
        };
        Ok(Row { at, raw, post, lse, max, beside_sink })
    }

    fn out(&self, row: &Row) -> Vec<f64> {
        let v_dim = self.problem.shape.v_dim;
        let mut out = vec![0.0; v_dim];
        for j in (0..row.post.len()).filter(|&j| row.post[j] != f64::NEG_INFINITY) {
            let value = &self.problem.v[self.problem.kv_row(row.at, j) * v_dim..];
            let weight = row.weight(j) * row.beside_sink;
            for (o, &x) in out.iter_mut().zip(value) {
                *o += weight * f64::from(x);
            }
        }
        out
    }
}
