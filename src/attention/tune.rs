//! Trying the tiles of the forward kernel on the adapter at hand.

use super::Attention;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernels::{Kernel, Tile, Tuning};
use crate::runtime::{Runtime, Tier, block_on};
use crate::shape::DType;
use crate::tensor::Tensor;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Gpu {
    /// The same machine with the fastest tiles of the forward kernel for these head dims, f32 and 16-bit.
    ///
    /// The choice is kept in `file` and read from there the next time, as long as adapter, driver, tier and
    /// version of this crate are the same and the file knows these dims; otherwise every tile of the table
    /// that fits is timed here, a second or so each, and the file is written. Nothing needs this: without
    /// it the table's own choice is taken. The Metal and Cpu tiers have nothing to choose from and come
    /// back as they are.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when the file cannot be written, and those of [`Attention::forward`].
    ///
    /// # Example
    ///
    /// ```no_run
    /// # fn main() -> flexattn::Result<()> {
    /// let gpu = flexattn::Gpu::new()?.tune("tiles.txt", &[64, 128])?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn tune(&self, file: impl AsRef<Path>, head_dims: &[usize]) -> Result<Gpu> {
        if matches!(self.tier(), Tier::Metal | Tier::Cpu) {
            return Ok(self.clone());
        }
        let file = file.as_ref();
        let title = self.title();
        let mut tuning = std::fs::read_to_string(file)
            .ok()
            .and_then(|text| Tuning::from_text(text.strip_prefix(&title)?).ok())
            .unwrap_or_default();
        let mut changed = false;
        for &head_dim in head_dims {
            for dtype in [DType::F32, DType::F16] {
                let trial = Trial::new(self, head_dim, dtype)?;
                if tuning.get(trial.kernel, dtype, head_dim as u32).is_none()
                    && let Some(tile) = trial.fastest()?
                {
                    tuning.set(trial.kernel, dtype, head_dim as u32, tile);
                    changed = true;
                }
            }
        }
        if changed {
            std::fs::write(file, format!("{title}{tuning}")).map_err(|error| {
                Error::format(format!("the tiles cannot be kept in {}: {error}", file.display()))
            })?;
        }
        Ok(self.with_tuning(Arc::new(tuning)))
    }

    /// The first line of the file: what the choice was made for.
    fn title(&self) -> String {
        let adapter = self.report().adapter.as_ref();
        let (name, driver) = adapter.map_or(("", ""), |adapter| (&adapter.name, &adapter.driver));
        format!("flexattn {} {} on {name}, {driver}\n", env!("CARGO_PKG_VERSION"), self.tier())
    }
}

/// One call, to be run with each tile.
struct Trial<'a> {
    gpu: &'a Gpu,
    dtype: DType,
    head_dim: u32,
    kernel: Kernel,
    /// q, k, v and out.
    tensors: [Tensor; 4],
}

impl<'a> Trial<'a> {
    const ROUNDS: usize = 5;

    fn new(gpu: &'a Gpu, head_dim: usize, dtype: DType) -> Result<Self> {
        let (heads, len) = if gpu.profile().software { (1, 256) } else { (8, 1024) };
        let shape = [1, heads, len, head_dim];
        let zeros = || gpu.zeros(dtype, shape);
        let tensors = [zeros()?, zeros()?, zeros()?, zeros()?];
        let [q, k, v, out] = &tensors;
        let plan = Attention::new().plan(gpu, [q, k, v, out])?;
        let kernel = plan.passes.first().map_or(Kernel::Forward, |pass| pass.spec.kernel);
        Ok(Self { gpu, dtype, head_dim: head_dim as u32, kernel, tensors })
    }

    /// Nothing where there is no choice.
    fn fastest(&self) -> Result<Option<Tile>> {
        let dim = self.head_dim;
        let mut tiles: Vec<Tile> = Vec::new();
        for tile in Tile::candidates(self.kernel, self.dtype, dim, dim, self.gpu.profile()) {
            if !tiles.contains(&tile) && tiles.len() < 4 {
                tiles.push(tile);
            }
        }
        if tiles.len() < 2 {
            return Ok(None);
        }
        let calls = tiles.iter().map(|tile| {
            let mut tuning = Tuning::default();
            tuning.set(self.kernel, self.dtype, dim, *tile);
            (self.gpu.with_tuning(Arc::new(tuning)), Attention::new().with_lse(false))
        });
        let calls: Vec<(Gpu, Attention)> = calls.collect();
        let mut best = vec![Duration::MAX; tiles.len()];
        // All take turns, so that a machine that slows down slows all; the first turn compiles.
        for round in 0..=Self::ROUNDS {
            for ((gpu, attention), best) in calls.iter().zip(&mut best) {
                let time = self.time(gpu, attention)?;
                if round > 0 {
                    *best = time.min(*best);
                }
            }
        }
        Ok(tiles.into_iter().zip(best).min_by_key(|(_, time)| *time).map(|(tile, _)| tile))
    }

    fn time(&self, gpu: &Gpu, attention: &Attention) -> Result<Duration> {
        let [q, k, v, out] = &self.tensors;
        let start = Instant::now();
        attention.forward_into(gpu, q, k, v, out)?;
        block_on(gpu.read(out.buffer(), 0..4))?;
        Ok(start.elapsed())
    }
}
