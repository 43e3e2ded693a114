//! Random masks: every operation that masks are made of, over positions, captures and captures of captures.

use flexattn::expr::{Bool, Captured, F32, I32, Index};
use flexattn::{Capture, MaskMod};
use flexattn_testing::problem::Numbers;

struct Tensors {
    document: Captured<I32>,
    order: Captured<I32>,
    flags: Captured<Bool>,
    table: Captured<Bool>,
    weight: Captured<F32>,
}

/// A mask whose expression is about `depth` operations deep, with captures whose names end in `id`.
pub(super) fn mask(numbers: &mut Numbers, id: &str, depth: usize) -> MaskMod {
    let mut ints = |count: usize, below: usize| -> Vec<i32> {
        (0..count).map(|_| numbers.below(below) as i32).collect()
    };
    let mut document = ints(2 * 310, 2);
    for line in document.chunks_exact_mut(310) {
        // Ascending ids, most of them equal to the one before.
        let mut id = 0;
        for value in line {
            id += i32::from(*value > 0 && id % 7 != 3);
            *value = id / 9;
        }
    }
    let order = ints(290, 320);
    let flags: Vec<bool> = ints(300, 40).iter().map(|&x| x == 0).collect();
    let table: Vec<bool> = ints(40 * 50, 3).iter().map(|&x| x > 0).collect();
    let weight: Vec<f32> = ints(300, 1000).iter().map(|&x| x as f32 / 100.0 - 5.0).collect();
    let name = |kind: &str| format!("{kind}_{id}");
    let made = (|| {
        Ok::<_, flexattn::Error>(Tensors {
            document: Capture::i32(&name("document"), &document, &[2, 310])?,
            order: Capture::i32(&name("order"), &order, &[290])?,
            flags: Capture::bool(&name("flags"), &flags, &[300])?,
            table: Capture::bool(&name("table"), &table, &[40, 50])?,
            weight: Capture::f32(&name("weight"), &weight, &[300])?,
        })
    })();
    let tensors = made.expect("the tensors fit their shapes");
    MaskMod::new(|i| truth(numbers, i, &tensors, depth))
}

fn truth(numbers: &mut Numbers, i: &Index, t: &Tensors, depth: usize) -> Bool {
    if depth == 0 {
        return match numbers.below(6) {
            0 => i.q().ge(i.kv()),
            1 => (i.q() - i.kv()).lt(numbers.below(150) as i32),
            2 => t.flags.at([i.kv()]),
            3 => t.document.at([i.batch(), i.q()]).eq(t.document.at([i.batch(), i.kv()])),
            4 => i.kv().lt(numbers.below(300) as i32),
            _ => i.head().eq(numbers.below(2) as i32),
        };
    }
    let d = depth - 1;
    match numbers.below(14) {
        0..=2 => truth(numbers, i, t, d) & truth(numbers, i, t, d),
        3..=5 => truth(numbers, i, t, d) | truth(numbers, i, t, d),
        6 => !truth(numbers, i, t, d),
        7 => truth(numbers, i, t, d) ^ truth(numbers, i, t, d),
        8 => truth(numbers, i, t, d).select(truth(numbers, i, t, d), truth(numbers, i, t, d)),
        9 => t.table.at([position(numbers, i, t, d), position(numbers, i, t, d)]),
        10 => t.weight.at([position(numbers, i, t, d)]).lt(t.weight.at([position(numbers, i, t, 0)])),
        11 => {
            let scaled = position(numbers, i, t, d).to_f32() * 0.37;
            scaled.sin().gt(numbers.below(200) as f32 / 100.0 - 1.0)
        }
        _ => {
            let (a, b) = (position(numbers, i, t, d), position(numbers, i, t, d));
            match numbers.below(6) {
                0 => a.lt(b),
                1 => a.le(b),
                2 => a.gt(b),
                3 => a.ge(b),
                4 => a.eq(b),
                _ => a.ne(b),
            }
        }
    }
}

fn position(numbers: &mut Numbers, i: &Index, t: &Tensors, depth: usize) -> I32 {
    if depth == 0 {
        return match numbers.below(8) {
            0..=2 => i.q(),
            3..=5 => i.kv(),
            6 => i.kv_len() - i.q_len(),
            _ => I32::from(numbers.below(200) as i32 - 50),
        };
    }
    let d = depth - 1;
    let a = position(numbers, i, t, d);
    match numbers.below(13) {
        0 => a + position(numbers, i, t, d),
        1 | 2 => a - position(numbers, i, t, d),
        3 => a.wrapping_mul(numbers.below(9) as i32 - 4),
        4 => a / (numbers.below(40) as i32 - 8),
        5 => a % (numbers.below(40) as i32 - 8),
        6 => a.floor_div(numbers.below(40) as i32 - 8),
        7 => a.floor_mod(numbers.below(40) as i32 - 8),
        8 => a.min(position(numbers, i, t, d)),
        9 => a.abs(),
        10 => t.order.at([a]),
        11 => (a ^ position(numbers, i, t, d)) & 0x7f,
        _ => a.clamp(3, 90) >> (numbers.below(4) as u32),
    }
}
