//! Attention weights of chosen rows, for looking at.

use super::{Attention, Output};
use crate::error::{Error, Result};
use crate::expr::{Env, Expr, Input, Lane, Point, Program, Value};
use crate::runtime::Runtime;
use crate::shape::AttentionShape;
use crate::tensor::Tensor;

impl Attention {
    /// The attention weights of query rows `rows`: `[B, Hq, rows.len(), S]`, each row summing to 1, or
    /// to 0 where it keeps nothing. Sinks are not weighed.
    ///
    /// Computed on this machine's CPU from q and k, for looking at a few rows; it reads all of k.
    ///
    /// # Errors
    ///
    /// As [`Attention::forward`]; [`Error::Shape`] for a row past q_len or an output without lse,
    /// [`Error::Unsupported`] when a captured tensor lives on the device.
    pub async fn weights_async<R: Runtime>(
        &self,
        q: &Tensor<R>,
        k: &Tensor<R>,
        output: &Output<R>,
        rows: &[usize],
    ) -> Result<Vec<f32>> {
        let v_shape = [k.shape()[0], k.shape()[1], k.shape()[2], output.out.shape()[3]];
        let v = crate::Layout::contiguous(v_shape)?;
        let shape = AttentionShape::new(q.layout(), k.layout(), &v)?;
        let rows_of = |shape: [usize; 4]| [shape[0], shape[1], shape[2]];
        if rows_of(output.out.shape()) != rows_of(shape.out()) {
            return Err(Error::shape(format!(
                "the output is {:?} but this q gives {:?}; pass the one that it came from",
                output.out.shape(),
                shape.out()
            )));
        }
        if let Some(row) = rows.iter().find(|&&row| row >= shape.q_len) {
            return Err(Error::shape(format!("row {row} was asked for but q_len is {}", shape.q_len)));
        }
        let Some(lse) = &output.lse else {
            return Err(Error::shape(
                "the output has no lse, which weights are computed from; use with_lse(true)",
            ));
        };
        let (q, k, lse) = (q.read_async().await?, k.read_async().await?, lse.read_async().await?);
        let q_offset = self.q_offset.resolve("q_offset", shape.batch)?;
        let kv_len = match &self.kv_len {
            Some(kv_len) => kv_len.resolve("kv_len", shape.batch)?,
            None => vec![shape.kv_len as u32; shape.batch],
        };
        let scale = self.scale.unwrap_or_else(|| shape.scale());
        // Lists may leave out what the mask_mod keeps.
        let listed = match (&self.block_mask, &self.mask) {
            (Some(lists), Some(mask)) => Some((**lists).clone().with_mask_mod(mask.clone()).meaning()?),
            (Some(lists), None) => Some(lists.meaning()?),
            (None, _) => None,
        };
        let mask_mod = listed.as_ref().or(self.mask.as_ref());
        let score =
            self.score.as_ref().map_or_else(|| Expr::input(Input::Score), |score| score.expr().clone());
        let keep = mask_mod.map_or_else(|| Expr::constant(Value::Bool(true)), |mask| mask.expr().clone());
        let program = Program::new(&[score, keep]);
        let mut captures: Vec<_> = mask_mod.map_or(&[][..], |mask| mask.captures()).to_vec();
        let mut scalars: Vec<_> = mask_mod.map_or(&[][..], |mask| mask.scalars()).to_vec();
        if let Some(score) = &self.score {
            captures.extend(score.captures().iter().cloned());
            scalars.extend(score.scalars().iter().cloned());
        }
        captures.dedup_by(|a, b| a.name() == b.name());
        scalars.dedup_by(|a, b| a.name() == b.name());

        let mut weights = Vec::with_capacity(shape.batch * shape.q_heads * rows.len() * shape.kv_len);
        for b in 0..shape.batch {
            let env = Env::new(&captures, &scalars, shape.q_len, kv_len[b] as usize)?;
            let mut bound = program.bind::<f32>(&env)?;
            for h in 0..shape.q_heads {
                for &row in rows {
                    let at = ((b * shape.q_heads + h) * shape.q_len + row) * shape.head_dim;
                    let q_row = &q[at..at + shape.head_dim];
                    let kv_entry = if shape.kv_batch == 1 { 0 } else { b };
                    let kv_head = kv_entry * shape.kv_heads + h / shape.group();
                    let lse = lse[(b * shape.q_heads + h) * shape.q_len + row];
                    for kv in 0..shape.kv_len {
                        if kv >= kv_len[b] as usize {
                            weights.push(0.0);
                            continue;
                        }
                        let at = (kv_head * shape.kv_len + kv) * shape.head_dim;
                        let dot: f32 =
                            q_row.iter().zip(&k[at..at + shape.head_dim]).map(|(q, k)| q * k).sum();
                        bound.point(&Point {
                            score: dot * scale,
                            b: b as i32,
                            h: h as i32,
                            q: (row as i32).wrapping_add(q_offset[b]),
                            kv: kv as i32,
                        });
                        let kept = matches!(bound.output(1).lane(0), Lane::Bool(true));
                        let weight = match bound.output(0).lane(0) {
                            Lane::F32(score) if kept && score > f32::NEG_INFINITY => (score - lse).exp(),
                            _ => 0.0,
                        };
                        weights.push(weight);
                    }
                }
            }
        }
        Ok(weights)
    }

    /// [`Attention::weights_async`], waiting for it.
    ///
    /// # Errors
    ///
    /// As [`Attention::weights_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn weights<R: Runtime>(
        &self,
        q: &Tensor<R>,
        k: &Tensor<R>,
        output: &Output<R>,
        rows: &[usize],
    ) -> Result<Vec<f32>> {
        crate::runtime::block_on(self.weights_async(q, k, output, rows))
    }
}
