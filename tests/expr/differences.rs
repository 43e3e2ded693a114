//! Central differences of whole score mods and of each operation by itself. They look at values only,
//! so they share nothing with what they check.

use std::collections::HashMap;

use flexattn::expr::{CaptureDecl, Env, Expr, Gradient, Input, Op, Point, Program, ScalarDecl, Type};
use flexattn::{Capture, Params, Scalar, ScoreMod, scores};
use proptest::prelude::*;

use super::derivative::differences;
use super::random::{self, KV_LEN, Q_LEN};
use super::{ops, values};

/// What expressions are evaluated with.
struct World<'a> {
    captures: &'a [Capture],
    scalars: &'a [Scalar],
}

impl World<'_> {
    fn all(&self, exprs: &[Expr], at: Point<f64>) -> Vec<f64> {
        let env = Env::new(self.captures, self.scalars, Q_LEN, KV_LEN).unwrap();
        let lanes = Program::new(exprs).eval(&env, &at).unwrap();
        lanes.iter().map(|lane| lane.to_f64()).collect()
    }

    fn value(&self, expr: &Expr, at: Point<f64>) -> f64 {
        self.all(std::slice::from_ref(expr), at)[0]
    }
}

fn apply(op: Op, args: &[Expr]) -> Expr {
    Expr::exact(op, args).unwrap()
}

/// Whether a read at `indices` is of `element`; indices outside of the tensor are clamped.
fn reads(indices: &[Expr], shape: &[usize], element: &[i32]) -> Expr {
    let sides = indices.iter().zip(shape).zip(element);
    sides.fold(Expr::constant(true), |all, ((index, &side), &at)| {
        let last = Expr::constant(side as i32 - 1);
        let clamped = apply(Op::Clamp, &[index.clone(), Expr::constant(0), last]);
        apply(Op::And, &[all, apply(Op::Eq, &[clamped, Expr::constant(at)])])
    })
}

/// One element of a captured tensor.
struct Element<'a> {
    decl: CaptureDecl,
    shape: &'a [usize],
    at: Vec<i32>,
}

impl Element<'_> {
    /// The expression with the score as it is at a point, and its input added to this element instead: f64
    /// all the way, whatever the tensor's type.
    fn nudged(&self, expr: &Expr) -> Expr {
        let score = Expr::scalar(score_decl());
        let fixed = expr.replace_inputs(|input| (input == Input::Score).then(|| score.clone())).unwrap();
        self.added(&fixed, &mut HashMap::new())
    }

    fn added(&self, expr: &Expr, done: &mut HashMap<u128, Expr>) -> Expr {
        if let Some(known) = done.get(&expr.hash()) {
            return known.clone();
        }
        let args: Vec<Expr> = expr.args().iter().map(|arg| self.added(arg, done)).collect();
        let made = if args.is_empty() && *expr.op() != Op::Gather(self.decl.clone()) {
            expr.clone()
        } else {
            apply(expr.op().clone(), &args)
        };
        let made = if *expr.op() == Op::Gather(self.decl.clone()) {
            let hit = reads(&args, self.shape, &self.at);
            let step = apply(Op::Select, &[hit, Expr::input(Input::Score), Expr::constant(0.0f32)]);
            apply(Op::Add, &[made, step])
        } else {
            made
        };
        done.insert(expr.hash(), made.clone());
        made
    }

    /// What the gradient says of this element: the sum over the places that read it.
    fn slope(&self, gradient: &Gradient) -> Expr {
        let places = gradient.captures.iter().filter(|place| place.capture == self.decl);
        places.fold(Expr::constant(0.0f32), |sum, place| {
            let hit = reads(&place.indices, self.shape, &self.at);
            let part = apply(Op::Select, &[hit, place.d.clone(), Expr::constant(0.0f32)]);
            apply(Op::Add, &[sum, part])
        })
    }
}

fn score_decl() -> ScalarDecl {
    ScalarDecl { name: "the_score".into(), ty: Type::F32 }
}

fn with_score(scalars: &[Scalar], score: f64) -> Vec<Scalar> {
    let mut all = scalars.to_vec();
    all.push(Scalar::f32("the_score", score as f32).unwrap().into());
    all
}

/// A value and its slope, as expressions of the score, beside each other at `at`: nothing where the value has
/// no derivative there, or is too large for differences.
fn compare(world: &World<'_>, value: &Expr, slope: &Expr, at: Point<f64>) -> Option<[f64; 2]> {
    let parts = values::all_parts(value);
    if world.all(&parts, at).iter().any(|x| x.is_nan() || x.abs() > 1e6) {
        return None;
    }
    // Bounds that move together are a kink that differences do not see.
    let clamps = parts.iter().filter(|e| *e.op() == Op::Clamp && e.ty() == Type::F32);
    let bounds: Vec<Expr> = clamps.flat_map(|e| e.args()[1..].to_vec()).collect();
    if world.all(&bounds, at).chunks(2).any(|pair| pair[0] == pair[1]) {
        return None;
    }
    let moved = |score: f64| Point { score, ..at };
    let expected = differences(|score| world.value(value, moved(score)), at.score)?;
    let got = world.value(slope, at);
    // A kink exactly here shows in neither.
    let near = [at.score - 1e-7, at.score + 1e-7].map(|score| world.value(slope, moved(score)));
    near.iter().all(|n| (n - got).abs() <= 1e-3 * got.abs().max(1.0)).then_some([got, expected])
}

fn close([got, expected]: [f64; 2], bound: f64) -> bool {
    (got - expected).abs() <= bound * expected.abs().max(1.0)
}

/// Points inside the domain of an operation and off its kinks, one value for each float argument.
fn points(op: &Op, floats: usize) -> Vec<Vec<f64>> {
    let each = |values: &[f64]| values.iter().map(|&x| vec![x]).collect();
    match op {
        Op::Sqrt | Op::Log | Op::Log2 => each(&[0.125, 0.9, 4.0, 30.5]),
        Op::Tan => each(&[-1.25, 0.3, 1.1, 2.5]),
        Op::Pow => vec![vec![0.5, 2.5], vec![3.0, -1.5], vec![2.0, 3.0], vec![1.25, 0.0], vec![1.5, 1.0]],
        Op::Clamp => vec![vec![-3.0, -1.0, 2.0], vec![0.25, -1.0, 2.0], vec![2.5, -1.0, 2.0]],
        _ if floats == 1 => each(&[-2.375, -0.7, 0.4, 1.625]),
        _ if floats == 2 => vec![vec![0.75, -2.5], vec![-1.5, 3.25], vec![-0.5, -2.0], vec![4.0, 1.75]],
        _ => panic!("{op:?} has no points: name some inside its domain"),
    }
}

#[test]
fn central_differences_agree_with_the_derivative_of_every_operation_by_every_argument() {
    let names = ["x", "y", "z"];
    let mut sloped = 0;
    for (op, types) in ops::of_floats() {
        let floats = types.iter().filter(|ty| **ty == Type::F32).count();
        let conditions: &[bool] = if types[0] == Type::Bool { &[true, false] } else { &[true] };
        let score = Expr::input(Input::Score);
        let mut largest = 0.0f64;
        for (numbers, &condition) in
            points(&op, floats).iter().flat_map(|p| conditions.iter().map(move |c| (p, c)))
        {
            let scalars: Vec<Scalar> = numbers
                .iter()
                .zip(names)
                .map(|(&x, name)| Scalar::f32(name, x as f32).unwrap().into())
                .collect();
            let world = World { captures: &[], scalars: &scalars };
            let leaves: Vec<Expr> = names[..floats]
                .iter()
                .map(|&name| Expr::scalar(ScalarDecl { name: name.into(), ty: Type::F32 }))
                .collect();
            let call = |floats: &[Expr]| {
                let mut args = floats.to_vec();
                if types[0] == Type::Bool {
                    args.insert(0, Expr::constant(condition));
                }
                apply(op.clone(), &args)
            };
            let slopes = call(&leaves).derivative(&leaves).unwrap();
            for (i, &x) in numbers.iter().enumerate() {
                let x = f64::from(x as f32);
                let at = Point { score: x, b: 0, h: 0, q: 0, kv: 0 };
                // By the score with the other arguments as scalars, by scalars alone, and by the score with
                // constants, of which simplification makes other expressions.
                let mut args = leaves.clone();
                args[i] = score.clone();
                let by_score = call(&args);
                let mut constants: Vec<Expr> = numbers.iter().map(|&x| Expr::constant(x as f32)).collect();
                constants[i] = score.clone();
                let by_constants = values::simplified(&call(&constants));
                let d = |expr: &Expr| expr.derivative(std::slice::from_ref(&score)).unwrap()[0].clone();
                for (value, slope) in [
                    (&by_score, d(&by_score)),
                    (&by_score, slopes[i].clone()),
                    (&by_constants, d(&by_constants)),
                ] {
                    let both = compare(&world, value, &slope, at)
                        .unwrap_or_else(|| panic!("{value} has a kink at {x}, {numbers:?}"));
                    assert!(close(both, 2e-6), "{value} by argument {i} at {numbers:?}: {both:?}, {slope}");
                    largest = largest.max(both[0].abs());
                }
            }
        }
        sloped += usize::from(largest > 0.0);
    }
    // sign, floor, ceil, round and trunc are flat.
    assert_eq!(sloped, ops::of_floats().len() - 5);
}

/// Positions and scores that a score mod is looked at.
fn everywhere() -> Vec<Point<f64>> {
    let mut points = Vec::new();
    for (i, q) in [0, 1, 7, 20, 23].into_iter().enumerate() {
        for (j, kv) in [0, 3, 9, 22, 23].into_iter().enumerate() {
            let (b, h) = ((i + j) as i32 % 2, (2 * i + j) as i32 % 4);
            points.push(Point { score: [-2.25, -0.5, 0.125, 1.75, 6.5][(i + 2 * j) % 5], b, h, q, kv });
        }
    }
    points
}

#[test]
fn central_differences_agree_with_every_prebuilt_score_mod_by_the_score_and_every_captured_element() {
    let mut elements = 0;
    for row in scores::ALL {
        let score_mod: ScoreMod = row.build(&Params::new(2, 4, 24, 24)).unwrap();
        let gradient = score_mod.gradient().unwrap();
        let world = World { captures: score_mod.captures(), scalars: &[] };
        for at in everywhere() {
            let both = compare(&world, score_mod.expr(), &gradient.d_score, at)
                .unwrap_or_else(|| panic!("{} has a kink at {at:?}", row.name));
            assert!(close(both, 1e-6), "{} by the score at {at:?}: {both:?}", row.name);
        }
        for capture in score_mod.captures().iter().filter(|capture| capture.dtype().ty() == Type::F32) {
            let mut read = 0;
            for n in 0..capture.len() {
                let mut rest = n;
                let mut at: Vec<i32> = capture
                    .shape()
                    .iter()
                    .rev()
                    .map(|side| {
                        let index = rest % side;
                        rest /= side;
                        index as i32
                    })
                    .collect();
                at.reverse();
                let element = Element { decl: capture.decl(), shape: capture.shape(), at };
                let (value, slope) =
                    (element.nudged(score_mod.expr()), element.nudged(&element.slope(&gradient)));
                let mut touched = false;
                for at in everywhere() {
                    let scalars = with_score(&[], at.score);
                    let world = World { captures: score_mod.captures(), scalars: &scalars };
                    let both = compare(&world, &value, &slope, Point { score: 0.0, ..at })
                        .unwrap_or_else(|| panic!("{} has a kink at {at:?}", row.name));
                    assert!(close(both, 1e-6), "{} by {:?} at {at:?}: {both:?}", row.name, element.at);
                    touched |= both[0] != 0.0;
                }
                read += usize::from(touched);
            }
            assert!(read > 0, "{}: no point reads `{}`", row.name, capture.name());
            elements += capture.len();
        }
    }
    assert!(elements > 400, "{elements}");
}

#[test]
fn central_differences_agree_with_random_composed_score_mods_by_captured_elements() {
    let (compared, moved) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let captures = random::captures();
    let part = || random::expr(Type::F32, 4);
    proptest::test_runner::TestRunner::new(random::config(4000))
        .run(&(part(), part(), random::point()), |(inner, outer, at)| {
            let composed = outer.replace_inputs(|input| (input == Input::Score).then(|| inner.clone()));
            let Ok(score_mod) = composed else { return Ok(()) };
            let Ok(gradient) = Gradient::of(&score_mod) else {
                return Err(TestCaseError::fail(format!("{score_mod} has no derivative")));
            };
            let scalars = with_score(&random::scalars(), at.score);
            let world = World { captures: &captures, scalars: &scalars };
            for place in &gradient.captures {
                let shape = captures.iter().find(|c| c.decl() == place.capture).unwrap().shape();
                // The element that this place reads here.
                let indices = world.all(&place.indices, at);
                let sides = indices.iter().zip(shape);
                let element = Element {
                    decl: place.capture.clone(),
                    shape,
                    at: sides.map(|(&i, &side)| (i as i32).clamp(0, side as i32 - 1)).collect(),
                };
                let (value, slope) = (element.nudged(&score_mod), element.nudged(&element.slope(&gradient)));
                if let Some(both) = compare(&world, &value, &slope, Point { score: 0.0, ..at }) {
                    compared.set(compared.get() + 1);
                    moved.set(moved.get() + usize::from(both[0] != 0.0));
                    prop_assert!(
                        close(both, 1e-3),
                        "{score_mod} by {}{:?} at {at:?}: {both:?}",
                        element.decl.name,
                        element.at
                    );
                }
            }
            Ok(())
        })
        .unwrap();
    println!("{} compared, {} of them not 0", compared.get(), moved.get());
    assert!(compared.get() > 300 && moved.get() > 100, "{} {}", compared.get(), moved.get());
}
