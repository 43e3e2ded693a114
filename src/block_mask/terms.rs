//! A mask as terms that are decided one by one while boxes get smaller.

use crate::expr::{Expr, Input, Op, Type, Value};
use std::collections::{HashMap, HashSet};

/// The most terms that are told apart.
const MOST: usize = 64;

/// A set of terms, bit `i` for term `i`.
pub(super) type Open = u64;

/// A mask that is the conjunction or the disjunction of terms.
///
/// A term that is always true in a box, or never, stays so in every part of the box, so it need not be
/// asked again: inside one document, only causality is left of `document & causal`.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) terms: Vec<Expr>,
    /// The value of a term that decides the whole mask: false in a conjunction, true in a disjunction.
    pub(super) deciding: bool,
}

impl Terms {
    pub(super) fn of(mask: &Expr) -> Self {
        let mut terms = Vec::new();
        if matches!(mask.op(), Op::And | Op::Or) {
            flatten(mask, mask.op(), &mut HashSet::new(), &mut terms);
        }
        if terms.is_empty() || terms.len() > MOST {
            terms = vec![mask.clone()];
        }
        Self { terms, deciding: matches!(mask.op(), Op::Or) }
    }

    /// All terms.
    pub(super) fn all(&self) -> Open {
        Open::MAX >> (MOST - self.terms.len())
    }

    /// The terms whose value stays the same when q and kv grow alike, for positions up to `last` either way.
    pub(super) fn shifting(&self, last: i64) -> Open {
        let mut known = HashMap::new();
        let still = |term: &Expr| shift(term, last, &mut known).is_some_and(|shift| shift.by == 0);
        self.terms.iter().map(still).enumerate().map(|(i, still)| Open::from(still) << i).sum()
    }
}

/// The operands of a chain of one operation, each once.
fn flatten(expr: &Expr, op: &Op, seen: &mut HashSet<u128>, out: &mut Vec<Expr>) {
    if !seen.insert(expr.hash()) {
    } else if expr.op() == op {
        expr.args().iter().for_each(|arg| flatten(arg, op, seen, out));
    } else {
        out.push(expr.clone());
    }
}

/// By how much a value grows when q and kv both grow by 1, the same everywhere.
#[derive(Clone, Copy, Debug)]
struct Shift {
    by: i32,
    /// No value is larger, either way, before it wraps.
    most: i64,
}

/// Any value of 32 bits.
const ANY: i64 = 1 << 32;

fn shift(expr: &Expr, last: i64, known: &mut HashMap<u128, Option<Shift>>) -> Option<Shift> {
    if let Some(&found) = known.get(&expr.hash()) {
        return found;
    }
    let args: Option<Vec<Shift>> = expr.args().iter().map(|arg| shift(arg, last, known)).collect();
    let found = args.and_then(|args| match (expr.op(), &args[..]) {
        (Op::Input(Input::Q | Input::Kv), _) => Some(Shift { by: 1, most: last }),
        (Op::Input(Input::QLen | Input::KvLen), _) => Some(Shift { by: 0, most: i32::MAX.into() }),
        (Op::Const(Value::I32(value)), _) => Some(Shift { by: 0, most: i64::from(*value).abs() }),
        (Op::Add, [a, b]) if expr.ty() == Type::I32 => Some(Shift { by: a.by + b.by, most: a.most + b.most }),
        (Op::Sub, [a, b]) if expr.ty() == Type::I32 => Some(Shift { by: a.by - b.by, most: a.most + b.most }),
        // Values that grow alike compare alike, unless they wrap.
        (Op::Lt | Op::Le | Op::Gt | Op::Ge, [a, b])
            if a.by == b.by && (a.by == 0 || a.most.max(b.most) <= i32::MAX.into()) =>
        {
            Some(Shift { by: 0, most: 1 })
        }
        (Op::Eq | Op::Ne, [a, b]) if a.by == b.by => Some(Shift { by: 0, most: 1 }),
        (_, args) => args.iter().all(|arg| arg.by == 0).then_some(Shift { by: 0, most: ANY }),
    });
    // Deep sums of growing values are no masks; they only have to end.
    let found = found.filter(|shift| shift.by.abs() < 1 << 16 && (shift.by == 0 || shift.most < ANY));
    let found = found.map(|shift| Shift { most: shift.most.min(ANY), ..shift });
    known.insert(expr.hash(), found);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::MaskMod;
    use crate::{Capture, masks};

    fn shifting(mask: &MaskMod, last: i64) -> Vec<bool> {
        let terms = Terms::of(mask.expr());
        let set = terms.shifting(last);
        (0..terms.terms.len()).map(|i| set >> i & 1 == 1).collect()
    }

    #[test]
    fn chains_of_one_operation_are_split_and_others_are_not() {
        let terms = |mask: &MaskMod| Terms::of(mask.expr()).terms.len();
        assert_eq!(terms(&masks::causal()), 1);
        assert_eq!(terms(&(masks::sliding_window(5) & masks::document(&[1, 2]))), 3);
        assert_eq!(terms(&masks::longformer(5, &[true])), 3);
        assert_eq!(terms(&!(masks::causal() & masks::document(&[1, 2]))), 1);
        // Shared halves do not multiply.
        let mut mask = masks::causal();
        for i in 0..60 {
            let own = |j: i32| MaskMod::new(|x| (x.q() % (i + 2)).ne(j));
            mask = (mask.clone() & own(0)) & (mask & own(1));
        }
        assert_eq!(Terms::of(mask.expr()).terms.len(), 1);
    }

    #[test]
    fn terms_that_only_compare_positions_are_found() -> crate::Result<()> {
        assert_eq!(shifting(&masks::causal(), 1 << 20), [true]);
        assert_eq!(shifting(&masks::sliding_window(7), 1 << 20), [true, true]);
        assert_eq!(shifting(&masks::dilated_window(7, 3), 1 << 20), [true, true]);
        assert_eq!(shifting(&(masks::causal() & masks::document(&[1, 2])), 1 << 20), [true, false]);
        assert_eq!(shifting(&masks::prefix_lm(3), 1 << 20), [false, true]);
        assert_eq!(shifting(&masks::block_diagonal(4), 1 << 20), [false]);
        let table = Capture::bool("table", &[true, false], &[2])?;
        assert_eq!(shifting(&MaskMod::new(|i| table.at([i.q() - i.kv()])), 1 << 20), [true]);
        assert_eq!(shifting(&MaskMod::new(|i| (i.q() + i.kv()).lt(9)), 1 << 20), [false]);
        // What could wrap is not compared alike.
        let far = MaskMod::new(|i| (i.q() + 2_000_000_000).ge(i.kv()));
        assert_eq!(shifting(&far, 1 << 20), [true]);
        assert_eq!(shifting(&far, 1 << 30), [false]);
        Ok(())
    }
}
