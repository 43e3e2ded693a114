//! Derivatives by reverse mode over the graph, with the slope of each operation from its record.
//!
//! What flows backwards carries a guard: the condition under which it counts at all. A `select` narrows the guard
//! of each branch instead of multiplying by 0, so that a NaN or an infinity in the branch not taken never
//! meets the sum.

use std::collections::HashMap;

use super::capture::CaptureDecl;
use super::value::Type;
use super::views::{Bool, F32, View};
use super::{Expr, Input, Op, visit};
use crate::error::{Error, Result};

/// Gives what flows back into each argument, from an operation's [`Local`] view.
pub(crate) type Slope = fn(&Local<'_>) -> [Option<Flow>; 3];

/// What flows back into one argument: a value, and a further condition under which it counts.
pub(crate) struct Flow {
    value: F32,
    when: Option<Bool>,
}

/// An operation as its slope sees it.
pub(crate) struct Local<'a> {
    g: F32,
    expr: &'a Expr,
}

impl Local<'_> {
    /// What flows into the result.
    pub(crate) fn g(&self) -> F32 {
        self.g.clone()
    }

    /// The result.
    pub(crate) fn out(&self) -> F32 {
        view(self.expr)
    }

    /// An argument of type f32.
    pub(crate) fn arg(&self, i: usize) -> F32 {
        view(&self.expr.args()[i])
    }

    /// One value per argument.
    #[expect(clippy::unused_self, reason = "reads as part of the operation's record")]
    pub(crate) fn slopes<const N: usize>(&self, values: [F32; N]) -> [Option<Flow>; 3] {
        let mut flows = [const { None }; 3];
        for (flow, value) in flows.iter_mut().zip(values) {
            *flow = Some(Flow { value, when: None });
        }
        flows
    }
}

fn view(expr: &Expr) -> F32 {
    F32::from_term(super::views::Term::new(expr.clone()))
}

fn condition(expr: &Expr) -> Bool {
    Bool::from_term(super::views::Term::new(expr.clone()))
}

pub(crate) fn select(d: &Local<'_>) -> [Option<Flow>; 3] {
    let chosen = condition(&d.expr.args()[0]);
    let not = !&chosen;
    [None, Some(Flow { value: d.g(), when: Some(chosen) }), Some(Flow { value: d.g(), when: Some(not) })]
}

/// Half to each operand on a tie.
fn extreme(d: &Local<'_>, first_wins: Bool, second_wins: Bool) -> [Option<Flow>; 3] {
    let (a, b) = (d.arg(0), d.arg(1));
    let tie = a.eq(&b).select(d.g() * 0.5, d.g());
    [
        Some(Flow { value: tie.clone(), when: Some(!second_wins) }),
        Some(Flow { value: tie, when: Some(!first_wins) }),
        None,
    ]
}

pub(crate) fn min(d: &Local<'_>) -> [Option<Flow>; 3] {
    let (a, b) = (d.arg(0), d.arg(1));
    extreme(d, a.lt(&b), b.lt(&a))
}

pub(crate) fn max(d: &Local<'_>) -> [Option<Flow>; 3] {
    let (a, b) = (d.arg(0), d.arg(1));
    extreme(d, a.gt(&b), b.gt(&a))
}

/// Where low is not below high, nothing flows to low; where it is above, all flows to high.
pub(crate) fn clamp(d: &Local<'_>) -> [Option<Flow>; 3] {
    let (a, low, high) = (d.arg(0), d.arg(1), d.arg(2));
    let flow = |when: Bool| Some(Flow { value: d.g(), when: Some(when) });
    [flow(a.ge(&low) & a.le(&high)), flow(a.lt(&low) & low.lt(&high)), flow(a.gt(&high) | high.lt(&low))]
}

pub(crate) fn pow(d: &Local<'_>) -> [Option<Flow>; 3] {
    let (a, b) = (d.arg(0), d.arg(1));
    // a^(b - 1) of a = 0 would pass through log2(0); whole exponents do without.
    let (base, when) = match b.expr().as_constant() {
        Some(super::Value::F32(1.0)) => (d.g(), None),
        Some(super::Value::F32(2.0)) => (d.g() * (&a * 2.0), None),
        _ => (d.g() * (&b * a.pow(&b - 1.0)), Some(b.ne(0.0))),
    };
    [
        Some(Flow { value: base, when }),
        Some(Flow { value: d.g() * (d.out() * a.log()), when: Some(a.gt(0.0)) }),
        None,
    ]
}

/// The derivative of a score mod.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradient {
    /// d score_mod / d score.
    pub d_score: Expr,
    /// d score_mod / d element, once per place where a float capture is read.
    pub captures: Vec<GatherGradient>,
}

/// One place where a score mod reads a captured tensor: the element at `indices` gets `d` times what
/// flows into the score.
#[derive(Debug, Clone, PartialEq)]
pub struct GatherGradient {
    /// The captured tensor.
    pub capture: CaptureDecl,
    /// Its indices, before clamping.
    pub indices: Vec<Expr>,
    /// d score_mod / d element.
    pub d: Expr,
}

impl Gradient {
    /// The derivative of `score_mod`, an expression of type f32.
    ///
    /// # Errors
    /// When it is no f32, or its derivative has too many operations.
    pub fn of(score_mod: &Expr) -> Result<Gradient> {
        let mut places = Vec::new();
        visit(std::slice::from_ref(score_mod), |e| {
            if matches!(e.op(), Op::Gather(_)) && e.ty() == Type::F32 {
                places.push(e.clone());
            }
        });
        let mut wrt = vec![Expr::input(Input::Score)];
        wrt.extend(places.iter().cloned());
        let mut slopes = score_mod.derivative(&wrt)?.into_iter();
        let d_score = slopes.next().unwrap_or_else(|| Expr::constant(0.0));
        let captures = places
            .iter()
            .zip(slopes)
            .filter_map(|(place, d)| match place.op() {
                Op::Gather(decl) => {
                    Some(GatherGradient { capture: decl.clone(), indices: place.args().to_vec(), d })
                }
                _ => None,
            })
            .collect();
        Ok(Gradient { d_score, captures })
    }
}

impl Expr {
    /// The derivative with respect to each of `wrt`, which are subexpressions of type f32 (inputs, captures, or
    /// any other); 0 for one that does not occur.
    ///
    /// ```
    /// use flexattn::ScoreMod;
    /// use flexattn::expr::{Expr, Input};
    ///
    /// let squared = ScoreMod::new(|s| s.score() * s.score());
    /// let slope = squared.expr().derivative(&[Expr::input(Input::Score)])?;
    /// assert_eq!(slope[0].to_string(), "score + score");
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the expression is no f32, or the derivative becomes too deep.
    pub fn derivative(&self, wrt: &[Expr]) -> Result<Vec<Expr>> {
        if self.ty() != Type::F32 {
            return Err(Error::Expression(format!(
                "only an f32 has a derivative, but this is {}: {self}",
                self.ty()
            )));
        }
        let mut order = Vec::new();
        visit(std::slice::from_ref(self), |e| order.push(e.clone()));

        let mut flows: HashMap<u128, Vec<Guarded>> = HashMap::new();
        flows.insert(self.hash(), vec![Guarded { value: F32::from(1.0f32), when: None }]);
        let mut totals: HashMap<u128, Guarded> = HashMap::new();
        for expr in order.iter().rev() {
            let Some(total) = flows.remove(&expr.hash()).map(Guarded::sum) else { continue };
            if wrt.contains(expr) {
                totals.insert(expr.hash(), total.clone());
            }
            let types: Vec<Type> = expr.args().iter().map(Expr::ty).collect();
            let Some(slope) = expr.op().record::<f32>(&types).and_then(|r| r.slope) else { continue };
            let local = Local { g: total.value.clone(), expr };
            for (arg, flow) in expr.args().iter().zip(slope(&local)) {
                if let (Type::F32, Some(flow)) = (arg.ty(), flow) {
                    let when = match (&total.when, flow.when) {
                        (Some(a), Some(b)) => Some(a & b),
                        (a, b) => a.clone().or(b),
                    };
                    flows.entry(arg.hash()).or_default().push(Guarded { value: flow.value, when });
                }
            }
        }
        wrt.iter()
            .map(|e| match totals.get(&e.hash()) {
                None => Ok(Expr::constant(0.0)),
                Some(total) => {
                    let value = total.settled();
                    match &value.term().error {
                        Some(error) => Err(error.clone()),
                        None => Ok(value.expr().clone()),
                    }
                }
            })
            .collect()
    }
}

/// What flows into an expression: `value` where `when` holds (always without it), 0 elsewhere, whatever
/// `value` is there.
#[derive(Debug, Clone)]
struct Guarded {
    value: F32,
    when: Option<Bool>,
}

impl Guarded {
    fn sum(mut flows: Vec<Guarded>) -> Guarded {
        let same = |a: &Option<Bool>, b: &Option<Bool>| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => a.expr() == b.expr(),
            _ => false,
        };
        // Those with one guard add up under it.
        let mut groups: Vec<Guarded> = Vec::new();
        for flow in flows.drain(..) {
            match groups.iter_mut().find(|g| same(&g.when, &flow.when)) {
                Some(group) => group.value = &group.value + flow.value,
                None => groups.push(flow),
            }
        }
        if groups.len() == 1 {
            return groups.swap_remove(0);
        }
        // One group counts everywhere: so does the sum. Otherwise it counts where any does.
        let mut when: Option<Bool> = None;
        let mut always = false;
        let mut value: Option<F32> = None;
        for group in &groups {
            match (&group.when, when.take()) {
                (None, _) => always = true,
                (Some(condition), None) => when = Some(condition.clone()),
                (Some(condition), Some(other)) => when = Some(other | condition),
            }
            let settled = group.settled();
            value = Some(match value {
                None => settled,
                Some(value) => value + settled,
            });
        }
        let value = value.unwrap_or_else(|| F32::from(0.0f32));
        Guarded { value, when: when.filter(|_| !always).filter(|w| w.expr().as_constant().is_none()) }
    }

    fn settled(&self) -> F32 {
        match &self.when {
            None => self.value.clone(),
            Some(condition) => condition.select(self.value.clone(), 0.0f32),
        }
    }
}
