//! Tensors inside buffers: where a row lies, widening it to f32, narrowing it back.

use half::slice::HalfFloatSliceExt;

use crate::shape::DType;

/// A `[B, H, L, D]` tensor in a buffer, in elements, as `Params` describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    offset: u32,
    batch: u32,
    head: u32,
    row: u32,
    /// D.
    pub(super) columns: usize,
    dtype: DType,
}

impl View {
    pub(super) fn new([offset, batch, head, row]: [u32; 4], columns: usize, dtype: DType) -> Self {
        Self { offset, batch, head, row, columns, dtype }
    }

    /// The first element of a row. A view of part of a tensor may begin before its buffer, so sums wrap, as they
    /// do in the kernels.
    fn at(&self, [b, h, row]: [usize; 3]) -> usize {
        let steps = [(b, self.batch), (h, self.head), (row, self.row)];
        steps.iter().fold(self.offset, |at, &(n, stride)| at.wrapping_add((n as u32).wrapping_mul(stride)))
            as usize
    }

    /// A row as f32: in place where it is stored so, else through `widened`.
    #[inline(always)]
    pub(super) fn read<'a>(&self, words: &'a [u32], row: [usize; 3], widened: &'a mut Vec<f32>) -> &'a [f32] {
        let at = self.at(row);
        if self.dtype == DType::F32 {
            return &bytemuck::cast_slice(words)[at..at + self.columns];
        }
        widened.resize(self.columns, 0.0);
        let halves: &[u16] = &bytemuck::cast_slice(words)[at..at + self.columns];
        if self.dtype == DType::BF16 {
            for (wide, &half) in widened.iter_mut().zip(halves) {
                *wide = f32::from_bits(u32::from(half) << 16);
            }
        } else {
            bytemuck::cast_slice::<u16, half::f16>(halves).convert_to_f32_slice(widened);
        }
        widened
    }

    /// Adds a row, as f32, to the end of a list of rows.
    #[inline(always)]
    pub(super) fn append(&self, words: &[u32], row: [usize; 3], rows: &mut Vec<f32>, widened: &mut Vec<f32>) {
        rows.extend_from_slice(self.read(words, row, widened));
    }

    /// Stores a row, rounding to nearest even.
    pub(super) fn write(&self, words: &mut [u32], row: [usize; 3], values: &[f32]) {
        let at = self.at(row);
        let values = &values[..self.columns];
        if self.dtype == DType::F32 {
            let floats: &mut [f32] = bytemuck::cast_slice_mut(words);
            floats[at..at + self.columns].copy_from_slice(values);
            return;
        }
        let halves: &mut [u16] = &mut bytemuck::cast_slice_mut(words)[at..at + self.columns];
        if self.dtype == DType::BF16 {
            bytemuck::cast_slice_mut::<u16, half::bf16>(halves).convert_from_f32_slice(values);
        } else {
            bytemuck::cast_slice_mut::<u16, half::f16>(halves).convert_from_f32_slice(values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_every_dtype_and_odd_offsets_come_back_rounded() {
        for dtype in DType::ALL {
            let view = View::new([3, 0, 20, 5], 5, dtype);
            let mut words = vec![0u32; 64];
            let values = [1.0, -0.5, 3.0, 0.1, 65504.0];
            view.write(&mut words, [0, 1, 2], &values);
            let got = view.read(&words, [0, 1, 2], &mut Vec::new()).to_vec();
            assert_eq!(got, dtype.widen(&dtype.narrow(&values)));
            assert_eq!(view.read(&words, [0, 1, 1], &mut Vec::new()), [0.0; 5]);
            assert_eq!(view.read(&words, [0, 1, 3], &mut Vec::new()), [0.0; 5]);
        }
    }
}
