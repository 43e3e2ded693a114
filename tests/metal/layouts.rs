//! Where tensors lie: strides, element offsets, one buffer for all, batch entries of their own lengths.

use super::{emulator, padded};
use flexattn::kernels::Loader;
use flexattn::reference::{self, Problem};
use flexattn::{Attention, AttentionShape, DType, Layout, Runtime, Tensor, masks};
use flexattn_emulator::Emulator;
use flexattn_testing::problem::Numbers;

const Q_OFFSET: [i32; 2] = [33, 8];
const KV_LEN: [u32; 2] = [70, 45];
/// What the pool holds where no tensor lies: reading it poisons, writing it shows.
const NOTHING: f32 = f32::NAN;

/// Two batch entries of different lengths and positions, 4 query heads on 2.
fn attention() -> Attention {
    Attention::new().mask_mod(masks::causal()).q_offset(Q_OFFSET).kv_len(KV_LEN)
}

/// Shapes of q, k, v and out.
fn shapes(dim: usize) -> [[usize; 4]; 4] {
    [[2, 4, 37, dim], [2, 2, 70, dim], [2, 2, 70, dim], [2, 4, 37, dim]]
}

/// How the tensors lie in the pool, in elements: all begin `offset` past a multiple of 256, and `pad` elements
/// follow each row of all heads (BLHD).
#[derive(Clone, Copy, Debug)]
struct Pooled {
    offset: usize,
    pad: usize,
}

impl Pooled {
    /// One behind the other.
    fn layouts(self, dim: usize) -> [Layout; 4] {
        let mut next = 0;
        shapes(dim).map(|shape| {
            let [batch, heads, rows, dim] = shape;
            let row = heads * dim + self.pad;
            let layout = Layout::new(shape, [rows * row, dim, row, 1], next + self.offset).unwrap();
            next += (batch * rows * row + self.offset).next_multiple_of(256);
            layout
        })
    }
}

/// The elements of a tensor in order, each with its place.
fn places(layout: &Layout) -> impl Iterator<Item = usize> {
    let ([batch, heads, rows, dim], [sb, sh, sl, _], offset) = (layout.shape, layout.strides, layout.offset);
    let starts = (0..batch * heads * rows).map(move |i| {
        let (b, h, l) = (i / rows / heads, i / rows % heads, i % rows);
        offset + b * sb + h * sh + l * sl
    });
    starts.flat_map(move |start| start..start + dim)
}

fn contiguous(emulator: &Emulator, dtype: DType, [q, k, v]: [&[f32]; 3], dim: usize) -> Vec<f32> {
    let shapes = shapes(dim);
    let [q, k, v] = [(q, 0), (k, 1), (v, 2)].map(|(x, i)| super::tensor(emulator, dtype, x, shapes[i]));
    attention().forward(emulator, &q, &k, &v).unwrap_or_else(|error| panic!("{error}")).out.read().unwrap()
}

/// out, and everything else that the pool holds afterwards where it held something else before.
fn pooled(
    emulator: &Emulator,
    dtype: DType,
    values: [&[f32]; 3],
    dim: usize,
    at: Pooled,
) -> (Vec<f32>, usize) {
    let layouts = at.layouts(dim);
    let length = layouts[3].offset + 2 * layouts[3].strides[0];
    let mut before = vec![NOTHING; length];
    for (layout, values) in layouts.iter().zip(values) {
        places(layout).zip(values).for_each(|(place, x)| before[place] = *x);
    }
    let pool = Tensor::zeros(emulator, dtype, [1, 1, 1, length]).unwrap();
    emulator.write(pool.buffer(), 0, &padded(&dtype.narrow(&before))).unwrap();
    let [q, k, v, out] = layouts.map(|layout| pool.view(layout).unwrap());
    attention().forward_into(emulator, &q, &k, &v, &out).unwrap_or_else(|error| panic!("{error}"));
    let mut after = pool.read().unwrap();
    let found: Vec<f32> = places(&layouts[3]).map(|place| after[place]).collect();
    places(&layouts[3]).for_each(|place| after[place] = NOTHING);
    let changed = after.iter().zip(&before).filter(|(a, b)| a != b && !(a.is_nan() && b.is_nan())).count();
    (found, changed)
}

/// Wherever the tensors lie, out has the bits that contiguous ones give, and those agree with the reference. 64
/// columns are aligned while an odd stride or offset is not; 20 fill no group of fragments.
#[test]
fn strides_offsets_and_one_buffer_for_all_change_no_bit() {
    for loader in Loader::ALL {
        let Some(emulator) = emulator(loader) else { return };
        for (dtype, dim) in [(DType::F16, 64), (DType::F32, 64), (DType::BF16, 64), (DType::F16, 20)] {
            let mut numbers = Numbers::new(17);
            let [q, k, v, _] = shapes(dim).map(|shape| numbers.normals(shape.iter().product()));
            let values = [&q[..], &k, &v];
            let expected = contiguous(&emulator, dtype, values, dim);
            agrees_with_the_reference(&expected, values, dtype, dim);
            for at in [
                Pooled { offset: 0, pad: 0 },
                Pooled { offset: 64, pad: 8 },
                Pooled { offset: 3, pad: 0 },
                Pooled { offset: 0, pad: 5 },
                Pooled { offset: 7, pad: 1 },
            ] {
                let name = format!("{} {dtype} {dim} {at:?}", loader.name());
                let (found, changed) = pooled(&emulator, dtype, values, dim, at);
                assert!(found == expected, "{name}");
                assert_eq!(changed, 0, "{name}: elements outside of out");
            }
            let records = emulator.take_records();
            assert!(records.iter().all(|record| record.counters.mma > 0), "{records:?}");
            let unaligned = records.iter().filter(|record| record.label.contains("unaligned")).count();
            assert_eq!(unaligned, 3, "{} {dtype} {dim}", loader.name());
        }
    }
}

fn agrees_with_the_reference(out: &[f32], [q, k, v]: [&[f32]; 3], dtype: DType, dim: usize) {
    let [q_layout, k_layout, v_layout, _] = shapes(dim).map(|shape| Layout::contiguous(shape).unwrap());
    let shape = AttentionShape::new(&q_layout, &k_layout, &v_layout).unwrap();
    let mask = masks::causal();
    let problem = Problem {
        mask_mod: Some(&mask),
        q_offset: &Q_OFFSET,
        kv_len: &KV_LEN,
        ..Problem::new(shape, q, k, v)
    };
    let gold = reference::forward(&problem).unwrap().out;
    let allowed = match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
    };
    for (i, (x, gold)) in out.iter().zip(&gold).enumerate() {
        assert!((f64::from(*x) - gold).abs() <= allowed, "{dtype} {dim}: element {i} is {x}, not {gold}");
    }
}
