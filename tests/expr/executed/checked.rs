//! Whether what a mod gave is what the language defines: the one rule for both languages.

use flexattn::expr::{Column, Env, Expr, Gradient, IndexBox, Input, Point, Program, Range};

use super::super::values::all_parts;
use super::{Found, Job, World};

/// An expression and everything in it, for what may come of it at a point.
struct Certain {
    program: Program,
    parts: usize,
}

impl Certain {
    fn new(expr: &Expr) -> Self {
        let parts = all_parts(expr);
        Self { program: Program::new(&parts), parts: parts.len() }
    }

    /// The values that are right at `at`; nothing where some part may be NaN. What follows from a NaN is not
    /// defined: drivers take exp2(log2(x)) for x.
    fn at(&self, env: &Env<'_>, at: &Point<f64>) -> Option<Range> {
        let mut ranges = self.program.bind_ranges(env).unwrap();
        let first = range_of(&mut ranges, at);
        (0..self.parts).all(|i| !ranges.output(i).nan).then_some(first)
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
            let range = index.at(env, at).filter(|range| range.lo == range.hi)?;
            element = element * side + range.lo.clamp(0.0, *side as f64 - 1.0) as usize;
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
            let Some(range) = certain.at(&env, at) else { return Ok(()) };
            exact += usize::from(range.lo == range.hi);
            if range.lo <= value.into() && f64::from(value) <= range.hi {
                return Ok(());
            }
            Err(format!("{what} {expr} is {value} in kernel text, but {range:?} at {at:?}"))
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
            let Some(range) = certain.at(&env, at) else { continue };
            exact += usize::from(range.always() || range.never());
            if if found.keep { range.never() } else { range.always() } {
                return Err(format!("{expr} is {} in kernel text, but {range:?} at {at:?}", found.keep));
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
