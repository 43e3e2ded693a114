//! Interleaved timing, and the fused calls that are timed.

use crate::Row;
use crate::baseline::{Baseline, wait};
use crate::baseline_row::UnfusedRow;
use flexattn::{Attention, BlockMask, BlockShape, DType, Gpu, MaskMod, Result, Tensor};
use flexattn_testing::conformance::upload;
use indicatif::ProgressBar;
use std::time::Instant;

/// Something to time.
pub(crate) type Work<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// The median time of each, in milliseconds. All take turns; the first turn compiles and does not count.
pub(crate) fn medians(name: &str, rounds: usize, works: &mut [Work<'_>]) -> Result<Vec<f64>> {
    let bar = ProgressBar::new(((rounds + 1) * works.len()) as u64).with_message(name.to_owned());
    bar.set_style(
        indicatif::ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} {eta}")
            .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()),
    );
    let mut times = vec![Vec::with_capacity(rounds); works.len()];
    for round in 0..=rounds {
        for (work, times) in works.iter_mut().zip(&mut times) {
            let start = Instant::now();
            work()?;
            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(times.into_iter().map(median).collect())
}

/// The middle value; of an even number the mean of the two in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// The adapter and its driver.
pub(crate) fn adapter(gpu: &Gpu) -> String {
    let adapter = gpu.report().adapter.as_ref();
    adapter.map_or("no adapter".to_owned(), |adapter| format!("{}, {}", adapter.name, adapter.driver))
}

/// Sizes of one call; one batch entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
}

impl Sizes {
    /// As many kv heads as query heads, as many keys as queries.
    pub(crate) fn square(heads: usize, len: usize, head_dim: usize) -> Sizes {
        Sizes { q_heads: heads, kv_heads: heads, q_len: len, kv_len: len, head_dim }
    }

    /// Values of q, k and v: independent, of unit variance or so, the same on every machine.
    pub(crate) fn data(&self) -> [Vec<f32>; 3] {
        let kv = self.kv_heads * self.kv_len * self.head_dim;
        [self.q_heads * self.q_len * self.head_dim, kv, kv].map({
            let mut seed = 0x9e37_79b9_u32;
            move |count| {
                let mut next = || {
                    seed ^= seed << 13;
                    seed ^= seed >> 17;
                    seed ^= seed << 5;
                    (seed >> 8) as f32 / (1 << 24) as f32
                };
                // A sum of four uniform values is near enough to a normal one.
                (0..count).map(|_| (next() + next() + next() + next() - 2.0) * 1.7).collect()
            }
        })
    }

    /// Kept pairs / (L * S).
    pub(crate) fn density(&self, mask: Option<&MaskMod>) -> Result<f64> {
        match mask {
            None => Ok(1.0),
            Some(mask) => {
                let shape = BlockShape::new(1, self.q_heads, self.q_len, self.kv_len);
                BlockMask::build(mask, shape)?.density()
            }
        }
    }

    /// A row without times.
    pub(crate) fn row(&self, suite: &'static str, case: &str, gpu: &Gpu, dtype: DType, density: f64) -> Row {
        let elements = self.q_heads * self.q_len * 2 + self.kv_heads * self.kv_len * 2;
        Row {
            suite,
            case: case.to_owned(),
            tier: gpu.tier().name().to_owned(),
            adapter: adapter(gpu),
            dtype: dtype.name(),
            batch: 1,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            q_len: self.q_len,
            kv_len: self.kv_len,
            head_dim: self.head_dim,
            density,
            bytes: (elements * self.head_dim * dtype.size()) as u64,
            ..Row::default()
        }
    }
}

impl Row {
    /// The row with its times.
    pub(crate) fn timed(mut self, ms: f64, baseline_ms: Option<f64>) -> Row {
        let pairs = self.density * (self.q_heads * self.q_len) as f64 * self.kv_len as f64;
        self.ms = ms;
        self.baseline_ms = baseline_ms;
        self.ratio = baseline_ms.map(|baseline| baseline / ms);
        self.gflops = Some(4.0 * pairs * self.head_dim as f64 / (ms * 1e6));
        self
    }
}

/// Tensors of one size and type on one machine, and calls on them.
#[derive(Debug)]
pub(crate) struct Fused<'a> {
    gpu: &'a Gpu,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
}

impl<'a> Fused<'a> {
    pub(crate) fn new(gpu: &'a Gpu, sizes: Sizes, dtype: DType, data: &[Vec<f32>; 3]) -> Result<Fused<'a>> {
        let q_shape = [1, sizes.q_heads, sizes.q_len, sizes.head_dim];
        let kv_shape = [1, sizes.kv_heads, sizes.kv_len, sizes.head_dim];
        Ok(Fused {
            gpu,
            q: upload(gpu, dtype, &data[0], &q_shape)?,
            k: upload(gpu, dtype, &data[1], &kv_shape)?,
            v: upload(gpu, dtype, &data[2], &kv_shape)?,
            out: gpu.zeros(dtype, q_shape)?,
        })
    }

    /// A call, waited for.
    pub(crate) fn work(&'a self, attention: Attention) -> Work<'a> {
        Box::new(move || {
            attention.forward_into(self.gpu, &self.q, &self.k, &self.v, &self.out)?;
            match self.gpu.device() {
                Some(device) => wait(device),
                None => Ok(()),
            }
        })
    }

    pub(crate) fn inputs(&self) -> [&Tensor; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// The largest difference between the outputs of the fused call and of the baseline.
    pub(crate) fn differs_from(&self, baseline: &Baseline, attention: &Attention) -> Result<f32> {
        attention.forward_into(self.gpu, &self.q, &self.k, &self.v, &self.out)?;
        baseline.run()?;
        let other = baseline.output(self.gpu, self.out.shape())?;
        let pairs = self.out.read()?.into_iter().zip(other);
        Ok(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max))
    }

    /// The same for one query row.
    pub(crate) fn differs_from_row(&self, baseline: &UnfusedRow) -> Result<f32> {
        Attention::new().forward_into(self.gpu, &self.q, &self.k, &self.v, &self.out)?;
        baseline.run()?;
        let other = baseline.output(self.gpu, self.out.shape())?;
        let pairs = self.out.read()?.into_iter().zip(other);
        Ok(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max))
    }
}
