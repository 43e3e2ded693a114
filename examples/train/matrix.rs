//! What a layer needs besides attention: matrices in plain loops, and weights that learn.

use flexattn_testing::problem::Numbers;

const RATE: f32 = 0.02;

/// A matrix that learns, by Adam (arXiv 1412.6980).
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) value: Matrix,
    moments: [Vec<f32>; 2],
}

impl Weight {
    pub(crate) fn new(rows: usize, columns: usize, numbers: &mut Numbers) -> Self {
        let value = Matrix::from(rows, columns, |_, _| numbers.normal() / (rows as f32).sqrt());
        let zeros = vec![0.0; rows * columns];
        Self { value, moments: [zeros.clone(), zeros] }
    }

    pub(crate) fn update(&mut self, gradient: &[f32], step: usize) {
        let [first, second] = &mut self.moments;
        let unbias = [0.9f32, 0.99].map(|decay| 1.0 - decay.powi(step as i32 + 1));
        for (((x, &g), m), v) in self.value.data.iter_mut().zip(gradient).zip(first).zip(second) {
            *m += 0.1 * (g - *m);
            *v += 0.01 * (g * g - *v);
            *x -= RATE * (*m / unbias[0]) / ((*v / unbias[1]).sqrt() + 1e-8);
        }
    }
}

/// Row-major.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) columns: usize,
    pub(crate) data: Vec<f32>,
}

impl Matrix {
    pub(crate) fn from(rows: usize, columns: usize, mut f: impl FnMut(usize, usize) -> f32) -> Self {
        let data = (0..rows * columns).map(|i| f(i / columns, i % columns)).collect();
        Self { columns, data }
    }

    pub(crate) fn at(&self, row: usize, column: usize) -> f32 {
        self.data[row * self.columns + column]
    }

    pub(crate) fn map(&self, f: impl Fn(f32) -> f32) -> Self {
        Self { columns: self.columns, data: self.data.iter().map(|&x| f(x)).collect() }
    }

    pub(crate) fn zip(&self, other: &Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let pairs = self.data.iter().zip(&other.data);
        Self { columns: self.columns, data: pairs.map(|(&x, &y)| f(x, y)).collect() }
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        self.zip(other, |x, y| x + y)
    }

    pub(crate) fn transposed(&self) -> Self {
        Self::from(self.columns, self.data.len() / self.columns, |r, c| self.at(c, r))
    }

    pub(crate) fn times(&self, other: &Self) -> Self {
        let mut data = vec![0.0; self.data.len() / self.columns * other.columns];
        for (row, out) in self.data.chunks(self.columns).zip(data.chunks_mut(other.columns)) {
            for (&x, line) in row.iter().zip(other.data.chunks(other.columns)) {
                out.iter_mut().zip(line).for_each(|(out, y)| *out += x * y);
            }
        }
        Self { columns: other.columns, data }
    }

    /// Layer norm: rows of mean 0 and variance 1, and what each was divided by.
    pub(crate) fn norm(&self) -> (Self, Vec<f32>) {
        let (mut result, mut scales, n) = (self.clone(), Vec::new(), self.columns as f32);
        for row in result.data.chunks_mut(self.columns) {
            let mean = row.iter().sum::<f32>() / n;
            let scale = (row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n + 1e-5).sqrt();
            row.iter_mut().for_each(|x| *x = (*x - mean) / scale);
            scales.push(scale);
        }
        (result, scales)
    }

    /// The gradient of what [`Matrix::norm`] made this from, given this one's.
    pub(crate) fn norm_gradient(&self, scales: &[f32], gradient: &Self) -> Self {
        let (mut result, n) = (gradient.clone(), self.columns as f32);
        let rows = result.data.chunks_mut(self.columns).zip(self.data.chunks(self.columns));
        for ((d, y), scale) in rows.zip(scales) {
            let mean = d.iter().sum::<f32>() / n;
            let along = d.iter().zip(y).map(|(d, y)| d * y).sum::<f32>() / n;
            d.iter_mut().zip(y).for_each(|(d, y)| *d = (*d - mean - y * along) / scale);
        }
        result
    }
}
