//! Whether what a mod gave is what the language defines: the one rule for both languages.

use std::collections::HashMap;

use flexattn::expr::{
    Bound, Column, Env, Expr, Gradient, IndexBox, Input, Lane, Op, Point, Program, Range, Type,
};

use super::super::values::all_parts;
use super::{Found, Job, World};

/// An expression and everything in it, for what may come of it at a point.
struct Certain {
    program: Program,
    parts: Vec<Expr>,
    /// Which part each argument of each part is.
    args: Vec<Vec<usize>>,
}

/// What is right at a point.
struct Right {
    range: Range,
    /// The one value that is right, where nothing is rounded.
    exact: Option<f64>,
}

impl Right {
    fn is_single(&self) -> bool {
        self.exact.is_some() || self.range.lo == self.range.hi
    }

    fn holds(&self, x: f64) -> bool {
        self.range.lo <= x && x <= self.range.hi && self.exact.is_none_or(|exact| exact == x)
    }
}

/// Whether an operation gives one value, of arguments that are known to the bit.
fn is_exact(expr: &Expr) -> bool {
    if expr.ty() != Type::F32 {
        return true;
    }
    let rounds = matches!(
        expr.op(),
        Op::Add
            | Op::Sub
            | Op::Mul
            | Op::Div
            | Op::Pow
            | Op::Fract
            | Op::Sqrt
            | Op::Exp
            | Op::Exp2
            | Op::Log
            | Op::Log2
            | Op::Sin
            | Op::Cos
            | Op::Tan
            | Op::Tanh
            | Op::Sigmoid
    );
    !rounds
}

impl Certain {
    fn new(expr: &Expr) -> Self {
        let parts = all_parts(expr);
        let numbers: HashMap<u128, usize> = parts.iter().map(Expr::hash).zip(0..).collect();
        let of = |part: &Expr| part.args().iter().map(|arg| numbers[&arg.hash()]).collect();
        let args = parts.iter().map(of).collect();
        Self { program: Program::new(&parts), parts, args }
    }

    /// The values that are right at `at`; nothing where some part may be NaN. What follows from a NaN is not
    /// defined: drivers take exp2(log2(x)) for x.
    fn at(&self, env: &Env<'_>, at: &Point<f64>) -> Option<Right> {
        let mut ranges = self.program.bind_ranges(env).unwrap();
        let range = range_of(&mut ranges, at);
        if (0..self.parts.len()).any(|i| ranges.output(i).nan) {
            return None;
        }
        let mut reference = self.program.bind::<f32>(env).unwrap();
        reference.point(&Point { score: at.score as f32, b: at.b, h: at.h, q: at.q, kv: at.kv });
        let exact = self.known(0, &reference, &mut vec![None; self.parts.len()]);
        Some(Right { range, exact: exact.then(|| reference.output(0).lane(0).to_f64()) })
    }

    /// Whether every GPU has the same bits for a part: it is made of exact operations alone, and no float in it
    /// is a zero that was computed (whose sign is open) or denormal.
    fn known(&self, i: usize, reference: &Bound<'_, f32>, seen: &mut [Option<bool>]) -> bool {
        if let Some(known) = seen[i] {
            return known;
        }
        let part = &self.parts[i];
        let leaf = matches!(part.op(), Op::Const(_) | Op::Input(_) | Op::Scalar(_) | Op::Gather(_));
        let plain = match reference.output(i).lane(0) {
            Lane::F32(x) => x.is_normal() || (x == 0.0 && (leaf || *part.op() == Op::BitsToF32)),
            _ => true,
        };
        let known =
            plain && is_exact(part) && self.args[i].iter().all(|&arg| self.known(arg, reference, seen));
        seen[i] = Some(known);
        known
    }
}

fn range_of(ranges: &mut flexattn::expr::Ranges<'_>, at: &Point<f64>) -> Range {
    let index = IndexBox { b: (at.b, at.b), h: (at.h, at.h), q: (at.q, at.q), kv: (at.kv, at.kv) };
    ranges.range_with_score(&index, Range::of(at.score, at.score))
}

/// One derivative by a captured tensor: its value, and where its element is.
struct Place {
    d: Certain,
    name: String,
    indices: Vec<Certain>,
    expr: Expr,
}

/// The places of a job, in the order of its terms.
fn places(job: &Job, gradient: &Gradient) -> Vec<Place> {
    let depends = |indices: &[Expr], input| indices.iter().any(|index| index.inputs().contains(input));
    let mut groups = [const { Vec::new() }; 3];
    for name in &job.mods.terms {
        for place in gradient.captures.iter().filter(|place| *place.capture.name == **name) {
            let group = match (depends(&place.indices, Input::Q), depends(&place.indices, Input::Kv)) {
                (_, false) => 0,
                (false, true) => 1,
                (true, true) => 2,
            };
            groups[group].push(Place {
                d: Certain::new(&place.d),
                name: name.clone(),
                indices: place.indices.iter().map(Certain::new).collect(),
                expr: place.d.clone(),
            });
        }
    }
    groups.into_iter().flatten().collect()
}

impl Place {
    /// The number of its element among those of all gradients, where it is certain.
    fn element(&self, world: &World, env: &Env<'_>, at: &Point<f64>) -> Option<u32> {
        let capture = world.captures.iter().find(|capture| capture.name() == self.name).unwrap();
        let mut element = 0;
        for (index, side) in self.indices.iter().zip(capture.shape()) {
            let index = index.at(env, at).filter(Right::is_single)?;
            let index = index.exact.unwrap_or(index.range.lo);
            element = element * side + index.clamp(0.0, *side as f64 - 1.0) as usize;
        }
        Some((world.gradient_at(&self.name) + element) as u32)
    }
}

/// What a job gave is right; how many values could only be one.
pub(super) fn check(world: &World, job: &Job, found: &[Found]) -> Result<usize, String> {
    let env = world.env();
    let mods = &job.mods;
    let score = mods.score.as_ref().map(|expr| (expr, Certain::new(expr)));
    let mask = mods.mask.as_ref().map(|expr| (expr, Certain::new(expr)));
    let gradient = mods.score.as_ref().filter(|_| mods.grad).map(|score| Gradient::of(score).unwrap());
    let slope = gradient.as_ref().map(|gradient| (&gradient.d_score, Certain::new(&gradient.d_score)));
    let places = gradient.as_ref().map_or_else(Vec::new, |gradient| places(job, gradient));
    let mut exact = 0;
    for (at, found) in job.points.iter().zip(found) {
        let mut number = |what: &str, expr: &Expr, certain: &Certain, value: f32| {
            let Some(right) = certain.at(&env, at) else { return Ok(()) };
            exact += usize::from(right.is_single());
            if right.holds(value.into()) {
                return Ok(());
            }
            let Right { range, exact } = right;
            Err(format!("{what} {expr} is {value} in kernel text, but {exact:?} {range:?} at {at:?}"))
        };
        if let Some((expr, certain)) = &score {
            number("the score mod", expr, certain, found.score)?;
        }
        if let Some((expr, certain)) = &slope {
            number("the derivative", expr, certain, found.grad)?;
        }
        if places.len() != found.terms.len() {
            return Err(format!("{} terms instead of {}", found.terms.len(), places.len()));
        }
        for (place, (d, element)) in places.iter().zip(&found.terms) {
            number(&format!("d / d {}", place.name), &place.expr, &place.d, *d)?;
            if let Some(expected) = place.element(world, &env, at).filter(|expected| expected != element) {
                return Err(format!("a term of {} reads {element}, not {expected}, at {at:?}", place.name));
            }
        }
        if let Some((expr, certain)) = &mask {
            let Some(right) = certain.at(&env, at) else { continue };
            exact += usize::from(right.is_single());
            if !right.holds(f64::from(u8::from(found.keep))) {
                return Err(format!(
                    "{expr} is {} in kernel text, but {:?} {:?} at {at:?}",
                    found.keep, right.exact, right.range
                ));
            }
        }
    }
    Ok(exact)
}

/// The score at every point lies within its range, NaN or not, and so does the reference.
pub(super) fn within_ranges(world: &World, job: &Job, found: &[Found]) {
    let env = world.env();
    let expr = job.mods.score.as_ref().unwrap();
    let program = Program::new(std::slice::from_ref(expr));
    let mut ranges = program.bind_ranges(&env).unwrap();
    let mut reference = program.bind::<f64>(&env).unwrap();
    for (at, found) in job.points.iter().zip(found) {
        let range = range_of(&mut ranges, at);
        let holds = |x: f64| range.lo <= x && x <= range.hi;
        assert!(holds(found.score.into()), "{expr} is {}, not in {range:?} at {}", found.score, at.score);
        reference.point(at);
        let Column::F32(expected) = reference.output(0) else { panic!("{expr} is f32") };
        assert!(holds(expected[0]), "{expr} is {expected:?}, not in {range:?} at {}", at.score);
    }
}
