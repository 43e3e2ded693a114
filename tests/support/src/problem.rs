//! Made-up inputs: reproducible, and exact in f32, f16 and bf16 alike.

use half::bf16;

/// A small reproducible generator of numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// Starts a sequence; the same seed gives the same numbers everywhere.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// 64 pseudo-random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..1`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An integer below `bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.unit() * bound as f64) as usize
    }

    /// A standard normal number, rounded so that f16 and bf16 hold it exactly.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let x = (radius * (std::f64::consts::TAU * self.unit()).cos()) as f32;
        // bf16 has the fewer bits, f16 the smaller range: below 2^-14 it starts to lose bits.
        if x.abs() < 6.2e-5 { 0.0 } else { bf16::from_f32(x).to_f32() }
    }

    /// `count` standard normal numbers.
    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }
}

/// The sizes of an attention problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Batch entries of q.
    pub batch: usize,
    /// Batch entries of k and v: `batch` or 1.
    pub kv_batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads; divides `q_heads`.
    pub kv_heads: usize,
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
}

impl Sizes {
    /// Self-attention: as many keys as queries, as many kv heads as query heads, values as wide as keys.
    pub fn square(batch: usize, heads: usize, len: usize, head_dim: usize) -> Self {
        Self {
            batch,
            kv_batch: batch,
            q_heads: heads,
            kv_heads: heads,
            q_len: len,
            kv_len: len,
            head_dim,
            v_dim: head_dim,
        }
    }

    /// `[B, Hq, L, E]`.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.head_dim]
    }

    /// `[Bkv, Hkv, S, E]`.
    pub fn k_shape(&self) -> [usize; 4] {
        [self.kv_batch, self.kv_heads, self.kv_len, self.head_dim]
    }

    /// `[Bkv, Hkv, S, Ev]`.
    pub fn v_shape(&self) -> [usize; 4] {
        [self.kv_batch, self.kv_heads, self.kv_len, self.v_dim]
    }

    /// `[B, Hq, L, Ev]`.
    pub fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.v_dim]
    }
}

/// Sizes and the tensors that go with them, contiguous.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The sizes.
    pub sizes: Sizes,
    /// Queries, `[B, Hq, L, E]`.
    pub q: Vec<f32>,
    /// Keys, `[Bkv, Hkv, S, E]`.
    pub k: Vec<f32>,
    /// Values, `[Bkv, Hkv, S, Ev]`.
    pub v: Vec<f32>,
    /// An upstream gradient of out, `[B, Hq, L, Ev]`.
    pub dout: Vec<f32>,
}

impl Inputs {
    /// Standard normal tensors of the given sizes.
    pub fn normal(sizes: Sizes, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut tensor = |shape: [usize; 4]| numbers.normals(shape.iter().product());
        let (q, k, v) = (tensor(sizes.q_shape()), tensor(sizes.k_shape()), tensor(sizes.v_shape()));
        let dout = tensor(sizes.out_shape());
        Self { sizes, q, k, v, dout }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn normals_are_exact_in_both_16_bit_dtypes() {
        for x in Numbers::new(1).normals(10_000) {
            assert_eq!(bf16::from_f32(x).to_f32(), x);
            assert_eq!(f16::from_f32(x).to_f32(), x);
        }
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let numbers = Numbers::new(2).normals(40_000);
        let mean = numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / 40_000.0;
        let variance = numbers.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 40_000.0;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "mean {mean}, variance {variance}");
    }
}
