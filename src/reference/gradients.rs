//! The gradients, by the formulas of the module above.

use super::{Definition, Problem, Programs};
use crate::error::{Error, Result};
use crate::expr::{Bound, GatherGradient, Gradient, Program, ScoreMod};

/// The gradients of a loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// As q, `[B, Hq, L, E]`.
    pub dq: Vec<f64>,
    /// As k, `[Bkv, Hkv, S, E]`.
    pub dk: Vec<f64>,
    /// As v, `[Bkv, Hkv, S, Ev]`.
    pub dv: Vec<f64>,
    /// As each float tensor that the score mod reads, by name.
    pub captures: Vec<(String, Vec<f64>)>,
    /// As the sinks, `[Hq]`; empty without them.
    pub sinks: Vec<f64>,
}

/// The gradients of `sum(out * dout) + sum(lse * dlse)`; `dlse` may be empty.
///
/// # Errors
///
/// As [`forward`](super::forward), and when `dout` or `dlse` has the wrong length.
pub fn backward(problem: &Problem<'_>, dout: &[f32], dlse: &[f32]) -> Result<Gradients> {
    problem.check()?;
    let shape = problem.shape;
    if dout.len() != shape.rows() * shape.v_dim || (!dlse.is_empty() && dlse.len() != shape.rows()) {
        return Err(Error::shape(format!(
            "dout has {} elements and dlse {} but out has {} and lse {}; pass them without gaps",
            dout.len(),
            dlse.len(),
            shape.rows() * shape.v_dim,
            shape.rows()
        )));
    }
    let programs = Programs::new(problem);
    let mut definition = Definition::new(problem, &programs)?;
    let derivative = problem.score_mod.map(Derivative::new).transpose()?;
    let mut bound = match &derivative {
        Some(derivative) => derivative.bind(problem)?,
        None => Vec::new(),
    };
    let mut gradients = Gradients {
        dq: vec![0.0; problem.q.len()],
        dk: vec![0.0; problem.k.len()],
        dv: vec![0.0; problem.v.len()],
        captures: derivative.as_ref().map_or(Vec::new(), Derivative::zeros),
        sinks: vec![0.0; problem.sinks.len()],
    };
    for index in 0..shape.rows() {
        let at @ [b, h, q] =
            [index / shape.q_len / shape.q_heads, index / shape.q_len % shape.q_heads, index % shape.q_len];
        let row = definition.row(at)?;
        if row.lse == f64::NEG_INFINITY {
            continue;
        }
        let out = definition.out(&row);
        let dout = &dout[index * shape.v_dim..][..shape.v_dim];
        let dlse = dlse.get(index).map_or(0.0, |&x| f64::from(x));
        let delta: f64 = out.iter().zip(dout).map(|(o, &d)| o * f64::from(d)).sum();
        if let Some(dz) = gradients.sinks.get_mut(h) {
            *dz -= (1.0 - row.beside_sink) * delta;
        }
        if let Some(bound) = bound.get_mut(b) {
            bound.row(b as i32, h as i32, problem.position(b, q), 0, &row.raw, row.raw.len());
        }
        for j in (0..row.raw.len()).filter(|&j| row.weight(j) != 0.0) {
            let weight = row.weight(j);
            let beside = weight * row.beside_sink;
            let v_at = problem.kv_row(at, j) * shape.v_dim;
            let mut dp = 0.0;
            for (d, &up) in dout.iter().enumerate() {
                dp += f64::from(up) * f64::from(problem.v[v_at + d]);
                gradients.dv[v_at + d] += beside * f64::from(up);
            }
            let mut ds = beside * (dp - delta) + weight * dlse;
            if let (Some(derivative), Some(bound)) = (&derivative, bound.get(b)) {
                derivative.add_to(&mut gradients.captures, bound, j, ds);
                ds *= bound.output(0).lane(j).to_f64();
            }
            ds *= problem.scale;
            let k_at = problem.kv_row(at, j) * shape.head_dim;
            let q_at = index * shape.head_dim;
            for e in 0..shape.head_dim {
                gradients.dq[q_at + e] += ds * f64::from(problem.k[k_at + e]);
                gradients.dk[k_at + e] += ds * f64::from(problem.q[q_at + e]);
            }
        }
    }
    Ok(gradients)
}

/// The derivative of a score mod: by its score, and by every gather of a float capture.
struct Derivative<'a> {
    score_mod: &'a ScoreMod,
    /// The outputs: d score, then per gather its derivative and its indices.
    program: Program,
    gathers: Vec<Gather>,
    /// The captures that get gradients, with their sizes.
    captures: Vec<(String, usize)>,
}

/// One place where the score mod reads a capture.
struct Gather {
    /// Which capture, in [`Derivative::captures`].
    capture: usize,
    /// Its dimensions.
    shape: Vec<usize>,
    /// Where its derivative stands among the outputs; its indices follow.
    output: usize,
}

impl<'a> Derivative<'a> {
    fn new(score_mod: &'a ScoreMod) -> Result<Self> {
        let gradient = Gradient::of(score_mod.expr())?;
        let mut outputs = vec![gradient.d_score];
        let (mut gathers, mut captures) = (Vec::new(), Vec::<(String, usize)>::new());
        for GatherGradient { capture: decl, indices, d } in gradient.captures {
            let found = score_mod.captures().iter().find(|capture| capture.name() == &*decl.name);
            let shape = found.map_or(Vec::new(), |capture| capture.shape().to_vec());
            let capture = captures.iter().position(|(name, _)| **name == *decl.name).unwrap_or_else(|| {
                captures.push((decl.name.to_string(), shape.iter().product()));
                captures.len() - 1
            });
            gathers.push(Gather { capture, shape, output: outputs.len() });
            outputs.push(d);
            outputs.extend(indices);
        }
        Ok(Self { score_mod, program: Program::new(&outputs), gathers, captures })
    }

    fn bind(&'a self, problem: &Problem<'_>) -> Result<Vec<Bound<'a, f64>>> {
        problem.bind(&self.program, self.score_mod.captures(), self.score_mod.scalars())
    }

    fn zeros(&self) -> Vec<(String, Vec<f64>)> {
        self.captures.iter().map(|(name, size)| (name.clone(), vec![0.0; *size])).collect()
    }

    /// Adds what a gradient `ds` of the changed score at key `j` does to the captures; `bound` was evaluated
    /// along the row.
    fn add_to(&self, sums: &mut [(String, Vec<f64>)], bound: &Bound<'_, f64>, j: usize, ds: f64) {
        for gather in &self.gathers {
            let element = gather.shape.iter().enumerate().fold(0, |element, (dim, &size)| {
                let index = bound.output(gather.output + 1 + dim).lane(j).to_f64();
                element * size + index.clamp(0.0, size.saturating_sub(1) as f64) as usize
            });
            if let Some(sum) = sums[gather.capture].1.get_mut(element) {
                *sum += ds * bound.output(gather.output).lane(j).to_f64();
            }
        }
    }
}
