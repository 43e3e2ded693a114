//! What is refused although it has a value: integers that overflow, and captures that are never inside their tensor.

use super::program::{Bound, Env, IndexBox, Point, Program, Step};
use super::range::Range;
use super::simplify::exact_value;
use super::value::{Lane, Type};
use super::{Expr, Input, MAX_NODES, Op};
use crate::error::{Error, Result};

impl Expr {
    /// Refuses what is almost always a mistake when positions lie in `at`:
    ///
    /// - an integer `+ - * abs` or negation that overflows at some position, as far as that follows from `b`, `h`, `q`,
    ///   `kv`, lengths and constants, and matters for the value there (`wrapping_*` is never refused);
    /// - a captured tensor whose index lies outside at every position, or that has several values for `h` or `b` but
    ///   not one for each;
    /// - more than [`MAX_NODES`] operations.
    ///
    /// Where ranges leave it open, overflow is looked for at some hundreds of positions, corners among them, and at
    /// scores of both signs; a rare one between may pass, and then wraps. Where a captured tensor is on a device
    /// only, nothing is refused for overflow.
    ///
    /// # Errors
    /// The above; and as [`Program::bind_ranges`].
    pub fn check(&self, env: &Env<'_>, at: &IndexBox) -> Result<()> {
        let program = Program::new(std::slice::from_ref(self));
        let Found { suspects, .. } = self.look(&program, env, at)?;
        if suspects.is_empty() {
            return Ok(());
        }
        // Captures on a device leave conditions open; then nothing is certain.
        let Ok(mut bound) = program.bind::<f64>(env) else { return Ok(()) };
        for point in samples(at) {
            witness(&program, &mut bound, &suspects, &point)?;
        }
        Ok(())
    }

    /// Whether ranges alone show that no operation overflows within `at` and no index leaves its tensor. Then
    /// [`Expr::check`] passes in every box inside too.
    pub(crate) fn is_settled(&self, env: &Env<'_>, at: &IndexBox) -> bool {
        let program = Program::new(std::slice::from_ref(self));
        self.look(&program, env, at).is_ok_and(|found| found.suspects.is_empty() && found.inside)
    }

    fn look(&self, program: &Program, env: &Env<'_>, at: &IndexBox) -> Result<Found> {
        let nodes = self.nodes();
        if nodes > MAX_NODES {
            return Err(Error::Expression(format!(
                "the expression has {nodes} operations after unrolling but at most {MAX_NODES} are allowed; capture a table"
            )));
        }
        let mut ranges = program.bind_ranges(env)?;
        ranges.range(at);
        let ranges = ranges.all();
        let demanded = demanded(program, |i| {
            let range = ranges[i];
            (range.always() || range.never()).then(|| range.always())
        });

        let mut found = Found { suspects: Vec::new(), inside: true };
        let mut known = vec![false; program.steps.len()];
        for (i, step) in program.steps.iter().enumerate() {
            known[i] = !matches!(step.expr.op(), Op::Gather(_) | Op::Scalar(_) | Op::Input(Input::Score))
                && step.args().iter().all(|a| known[*a as usize]);
            if !demanded[i] {
                continue;
            }
            if let Op::Gather(_) = step.expr.op() {
                found.inside &= inside(step, ranges, env)?;
            }
            if known[i] && may_overflow(step, ranges) {
                found.suspects.push(i);
            }
        }
        Ok(found)
    }
}

/// What ranges say of a box.
struct Found {
    /// Operations that may overflow.
    suspects: Vec<usize>,
    /// Every index stays inside its tensor.
    inside: bool,
}

/// Which operations may matter for the output, given the truth values that are known.
fn demanded(program: &Program, truth: impl Fn(usize) -> Option<bool>) -> Vec<bool> {
    let mut demanded = vec![false; program.steps.len()];
    if let Some(last) = demanded.last_mut() {
        *last = true;
    }
    for (i, step) in program.steps.iter().enumerate().rev() {
        if !demanded[i] {
            continue;
        }
        let args = step.args();
        let logic = step.expr.ty() == Type::Bool;
        match (step.expr.op(), args) {
            (Op::Select, [condition, yes, no]) => {
                demanded[*condition as usize] = true;
                let truth = truth(*condition as usize);
                demanded[*yes as usize] |= truth != Some(false);
                demanded[*no as usize] |= truth != Some(true);
            }
            // One operand may settle it.
            (Op::And | Op::Or, [a, b]) if logic => {
                let settles = Some(*step.expr.op() == Op::Or);
                if truth(*a as usize) == settles {
                    demanded[*a as usize] = true;
                } else {
                    demanded[*b as usize] = true;
                    demanded[*a as usize] |= truth(*b as usize) != settles;
                }
            }
            _ => args.iter().for_each(|a| demanded[*a as usize] = true),
        }
    }
    demanded
}

/// Whether the indices stay inside; an error if one never is.
fn inside(step: &Step, ranges: &[Range], env: &Env<'_>) -> Result<bool> {
    let Op::Gather(decl) = step.expr.op() else { return Ok(true) };
    let mut always = true;
    for (axis, (arg, dim)) in step.args().iter().zip(env.shape(decl)?).enumerate() {
        let range = ranges[*arg as usize];
        let last = dim - 1;
        always &= range.lo >= 0.0 && range.hi <= last as f64;
        // One value for all heads or batch entries is no mistake; fewer than there are is.
        let each = last > 0 && matches!(step.expr.args()[axis].op(), Op::Input(Input::Head | Input::Batch));
        if range.hi < 0.0 || range.lo > last as f64 || each && range.hi > last as f64 {
            let remedy =
                if each { "give one value for each, or one for all" } else { "it would always be clamped" };
            return Err(Error::capture(
                &*decl.name,
                format!(
                    "index {axis} of {} is {} to {} but must be 0 to {last}; {remedy}",
                    step.expr, range.lo, range.hi
                ),
            ));
        }
    }
    Ok(always)
}

/// Whether the true result may leave the type.
fn may_overflow(step: &Step, ranges: &[Range]) -> bool {
    let all = match step.expr.ty() {
        Type::I32 => Range::all(Type::I32),
        Type::U32 => Range::all(Type::U32),
        Type::F32 | Type::Bool => return false,
    };
    let Some(a) = step.args().first().map(|a| ranges[*a as usize]) else { return false };
    let b = step.args().get(1).map_or(a, |b| ranges[*b as usize]);
    let ends = |x: Range| [x.lo as i128, x.hi as i128];
    ends(a).into_iter().any(|a| {
        ends(b).into_iter().any(|b| {
            exact_value(step.expr.op(), a, b).is_some_and(|x| x < all.lo as i128 || x > all.hi as i128)
        })
    })
}

/// Positions to look at: corners, and some between along q and kv; scores of both signs.
fn samples(at: &IndexBox) -> Vec<Point<f64>> {
    let some = |(lo, hi): (i32, i32), count: i64| {
        let (lo, hi) = (i64::from(lo), i64::from(hi));
        // The upper end first: it says most.
        let steps = [count - 1].into_iter().chain(0..count - 1);
        let mut values: Vec<i32> = steps.map(|i| (lo + (hi - lo) * i / (count - 1)) as i32).collect();
        values.dedup();
        values
    };
    let mut points = Vec::new();
    for b in some(at.b, 2) {
        for h in some(at.h, 2) {
            for q in some(at.q, 9) {
                for kv in some(at.kv, 9) {
                    let point = |score| Point { score, b, h, q, kv };
                    points.extend([0.0, 1.0, -1.0, 1e4, -1e4].map(point));
                }
            }
        }
    }
    points
}

/// Refuses if one of `suspects` overflows at `point` and matters there.
fn witness(
    program: &Program,
    bound: &mut Bound<'_, f64>,
    suspects: &[usize],
    point: &Point<f64>,
) -> Result<()> {
    bound.point(point);
    let value = |i: usize| bound.step(i).lane(0);
    let demanded = demanded(program, |i| value(i).as_bool());
    let number = |i: u32| match value(i as usize) {
        Lane::I32(x) => i128::from(x),
        Lane::U32(x) => i128::from(x),
        Lane::F32(_) | Lane::Bool(_) => 0,
    };
    for i in suspects.iter().filter(|i| demanded[**i]) {
        let step = &program.steps[*i];
        let args = step.args();
        let b = args.get(1).map_or(0, |b| number(*b));
        let Some(exact) = exact_value(step.expr.op(), number(args[0]), b) else { continue };
        let fits = match step.expr.ty() {
            Type::I32 => i32::try_from(exact).is_ok(),
            _ => u32::try_from(exact).is_ok(),
        };
        if !fits {
            let Point { b, h, q, kv, .. } = point;
            let wrapping = match step.expr.op() {
                Op::Add => "wrapping_add",
                Op::Sub => "wrapping_sub",
                Op::Mul => "wrapping_mul",
                _ => "wrapping_neg",
            };
            return Err(Error::Overflow(format!(
                "{} is {exact} at b = {b}, h = {h}, q = {q}, kv = {kv}, which does not fit {}; use smaller numbers, or \
                 {wrapping} if it is meant to wrap",
                step.expr,
                step.expr.ty()
            )));
        }
    }
    Ok(())
}
