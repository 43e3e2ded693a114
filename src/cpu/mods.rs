//! The mods of a launch, evaluated along rows.

use super::launch::Launch;
use super::lists::{self, SIDE, TILE, Tile};
use crate::error::Result;
use crate::expr::{Bound, Env, Expr, Gradient, Input, Program};
use crate::lower;

/// The linear forms of a launch's mods.
#[derive(Debug)]
pub(super) struct Programs {
    /// The changed score and, for gradients, its derivative by the score.
    score: Option<Program>,
    mask: Option<Program>,
    grad: bool,
    /// Whether a mod reads kv_len, which each batch entry has its own of.
    reads_kv_len: bool,
}

impl Programs {
    pub(super) fn new(mods: &lower::Mods, grad: bool) -> Result<Self> {
        let reads = |e: &Option<Expr>| e.as_ref().is_some_and(|e| e.inputs().contains(Input::KvLen));
        let score = match &mods.score {
            Some(score) if grad => Some(Program::new(&[score.clone(), Gradient::of(score)?.d_score])),
            Some(score) => Some(Program::new(std::slice::from_ref(score))),
            None => None,
        };
        Ok(Self {
            score,
            mask: mods.mask.as_ref().map(|mask| Program::new(std::slice::from_ref(mask))),
            grad,
            reads_kv_len: reads(&mods.score) || reads(&mods.mask),
        })
    }
}

/// One worker's evaluators.
#[derive(Debug)]
pub(super) struct Mods<'a> {
    programs: &'a Programs,
    score: Option<Bound<'a, f32>>,
    mask: Option<Bound<'a, f32>>,
    /// The batch entry that they are bound for.
    b: usize,
}

impl<'a> Mods<'a> {
    pub(super) fn new(programs: &'a Programs, launch: &'a Launch<'_>, b: usize) -> Result<Self> {
        let env =
            Env::new(&launch.captures, &launch.scalars, launch.params.q_len as usize, launch.kv_len(b))?;
        let bind = |program: &'a Option<Program>| program.as_ref().map(|p| p.bind(&env)).transpose();
        Ok(Self { programs, score: bind(&programs.score)?, mask: bind(&programs.mask)?, b })
    }

    /// Gets ready for another batch entry.
    pub(super) fn at_batch(&mut self, launch: &'a Launch<'_>, b: usize) -> Result<()> {
        if self.b != b && self.programs.reads_kv_len {
            *self = Self::new(self.programs, launch, b)?;
        }
        self.b = b;
        Ok(())
    }

    /// Takes q.k of one query row (batch entry, head, row) and the keys of a block, the first of which is `kv0`,
    /// to scores: scaled, changed by the score mod, minus infinity where a pair is not kept. What lies in empty tiles is
    /// left alone. The derivative of each score by that before the score mod goes to `slopes`, if the programs have
    /// it.
    #[cfg_attr(target_arch = "wasm32", inline(never))]
    #[cfg_attr(not(target_arch = "wasm32"), inline(always))]
    #[expect(clippy::too_many_arguments, reason = "the place, and what is there")]
    pub(super) fn apply(
        &mut self,
        launch: &Launch<'_>,
        [b, h, row]: [usize; 3],
        kv0: usize,
        keys: usize,
        tiles: [Tile; SIDE],
        scores: &mut [f32],
        slopes: &mut [f32],
    ) {
        let q = (row as i32).wrapping_add(launch.q_offset(b));
        let (b, h) = (b as i32, h as i32);
        for stretch in lists::stretches(tiles) {
            let (start, end) = (stretch.start * TILE, stretch.end * TILE);
            let kept = end.min(keys);
            let scores = &mut scores[start..end];
            if self.programs.grad {
                slopes[start..end].fill(1.0);
            }
            for score in &mut *scores {
                *score *= launch.params.scale;
            }
            if let Some(score) = &mut self.score {
                score.row(b, h, q, (kv0 + start) as i32, &scores[..kept - start], kept - start);
                scores[..kept - start].copy_from_slice(score.output(0).floats());
                if self.programs.grad {
                    slopes[start..kept].copy_from_slice(score.output(1).floats());
                }
            }
            scores[kept - start..].fill(f32::NEG_INFINITY);
            let Some(mask) = &mut self.mask else { continue };
            for tile in stretch.filter(|&tile| tiles[tile] == Tile::Partial) {
                let scores = &mut scores[tile * TILE - start..][..TILE];
                mask.row(b, h, q, (kv0 + tile * TILE) as i32, &[], TILE);
                for (score, &kept) in scores.iter_mut().zip(mask.output(0).bools()) {
                    *score = if kept { *score } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}
