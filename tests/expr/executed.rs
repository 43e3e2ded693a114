//! Kernel text gives what the expression says, executed: WGSL on a GPU adapter, MSL in the emulator. Each test
//! is one body for both.

mod checked;
mod msl;
#[cfg(feature = "wgpu")]
mod wgsl;

use std::cell::Cell;

use flexattn::expr::{Env, Expr, Gradient, Input, Op, Point, ScalarDecl, Type};
use flexattn::lower::{Layout, Mods};
use flexattn::{Capture, Scalar, ScoreMod};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::ops::{KINKS, OPS, of_floats, sum_of};
use super::random::{self, KV_LEN, Q_LEN};
use super::values;
use checked::check;

const POINTS: usize = 64;

/// What the expressions of a batch read besides their inputs.
struct World {
    captures: Vec<Capture>,
    scalars: Vec<Scalar>,
    /// The tensor of f32 that is bound in place, and the element of its buffer at which it begins.
    large: Option<(&'static str, u32)>,
}

/// What kernels bind of a [`World`].
struct Words {
    info: Vec<u32>,
    captures: Vec<u32>,
    large: Vec<u32>,
}

impl World {
    fn new(captures: Vec<Capture>, scalars: Vec<Scalar>) -> Self {
        Self { captures, scalars, large: None }
    }

    fn env(&self) -> Env<'_> {
        Env::new(&self.captures, &self.scalars, Q_LEN, KV_LEN).unwrap()
    }

    /// A score mod as text.
    fn score(&self, text: &str) -> Expr {
        let read = |name: &str, after: &str| {
            let mut found = text.match_indices(name);
            let word = |c: char| c.is_alphanumeric() || c == '_';
            found.any(|(at, _)| {
                !text[..at].ends_with(word)
                    && text[at + name.len()..].starts_with(after)
                    && !text[at + name.len()..].starts_with(word)
            })
        };
        let captures: Vec<Capture> =
            self.captures.iter().filter(|capture| read(capture.name(), "(")).cloned().collect();
        let scalars: Vec<Scalar> =
            self.scalars.iter().filter(|scalar| read(&scalar.decl().name, "")).cloned().collect();
        ScoreMod::from_wgsl(text, &captures, &scalars).unwrap().expr().clone()
    }

    /// The layout of what `jobs` read.
    fn layout<'a>(&self, jobs: impl IntoIterator<Item = &'a Job>) -> Layout {
        let exprs = jobs.into_iter().flat_map(|job| job.mods.score.iter().chain(&job.mods.mask));
        Layout::new(exprs, self.large.map(|(name, _)| name))
    }

    /// The captured tensors that have gradients, in the order of those.
    fn gradients(&self) -> Vec<String> {
        let floats = self.captures.iter().filter(|capture| capture.dtype().ty() == Type::F32);
        floats.map(|capture| capture.name().to_owned()).collect()
    }

    /// Where the gradient of a captured tensor begins.
    fn gradient_at(&self, name: &str) -> usize {
        let before = self.captures.iter().take_while(|capture| capture.name() != name);
        before.filter(|capture| capture.dtype().ty() == Type::F32).map(Capture::len).sum()
    }

    fn words(&self, layout: &Layout) -> Words {
        let (name, at) = self.large.unwrap_or(("", 0));
        let info = layout.info_with_gradients(&self.captures, &self.scalars, at, &self.gradients()).unwrap();
        let mut captures = layout.words(&self.captures).unwrap();
        captures.push(0);
        // What lies before a tensor in place is of no concern.
        let mut large = vec![0x7fc0_0000; at as usize + 1];
        if let Some(capture) = self.captures.iter().find(|capture| capture.name() == name) {
            large.pop();
            let alone = Layout { captures: vec![capture.decl()], ..Layout::default() };
            large.extend(alone.words(&self.captures).unwrap());
        }
        Words { info: info.into_iter().flatten().collect(), captures, large }
    }
}

/// Mods and the points at which they are evaluated.
struct Job {
    mods: Mods,
    points: Vec<Point<f64>>,
}

/// What the mods of a job gave at one point.
#[derive(Debug)]
struct Found {
    score: f32,
    keep: bool,
    grad: f32,
    /// The derivative by each place that reads a captured tensor, and the element that it reads: places
    /// by row, then by column, then by pair.
    terms: Vec<(f32, u32)>,
}

/// Words of a result before its terms.
const HEAD: usize = 3;

impl Job {
    /// A score mod and, with `grad`, its derivatives by the score and by every captured tensor that has one.
    fn of_score(score: &Expr, grad: bool, points: &[Point<f64>]) -> Self {
        let terms = if grad { differentiable(score) } else { Vec::new() };
        let mods = Mods { score: Some(score.clone()), grad, terms, ..Mods::default() };
        Self { mods, points: points.to_vec() }
    }

    fn terms(&self) -> usize {
        let counts = if self.mods.terms.is_empty() { None } else { self.mods.term_counts().ok() };
        counts.map_or(0, |counts| counts.rows + counts.columns + counts.pairs)
    }

    /// Reads the words of its results, `stride` for each point.
    fn read(&self, words: &[u32], stride: usize) -> Vec<Found> {
        let read = |words: &[u32]| Found {
            score: f32::from_bits(words[0]),
            keep: words[1] == 1,
            grad: f32::from_bits(words[2]),
            terms: words[HEAD..].chunks(2).take(self.terms()).map(|w| (f32::from_bits(w[0]), w[1])).collect(),
        };
        words.chunks(stride).take(self.points.len()).map(read).collect()
    }
}

/// The captured tensors that a score mod may have gradients of: those whose indices do not depend on the score.
fn differentiable(score: &Expr) -> Vec<String> {
    let gradient = Gradient::of(score).unwrap();
    let fixed = |name: &str| {
        let places = gradient.captures.iter().filter(|place| &*place.capture.name == name);
        places.flat_map(|place| &place.indices).all(|index| !index.inputs().contains(Input::Score))
    };
    let mut names: Vec<String> = gradient.captures.iter().map(|g| g.capture.name.to_string()).collect();
    names.sort();
    names.dedup();
    names.retain(|name| fixed(name));
    names
}

/// Where kernel text runs.
trait Executor {
    /// What each job gives at each of its points. All have as many points.
    fn run(&self, world: &World, jobs: &[Job]) -> Result<Vec<Vec<Found>>, String>;

    /// How many jobs it takes at once.
    fn at_once(&self) -> usize;
}

/// Runs jobs and checks them; how many values were certain to the bit, for each.
fn agree(on: &dyn Executor, world: &World, jobs: &[Job]) -> Result<Vec<usize>, String> {
    let mut exact = Vec::new();
    for jobs in jobs.chunks(on.at_once()) {
        for (job, found) in jobs.iter().zip(on.run(world, jobs)?) {
            exact.push(check(world, job, &found)?);
        }
    }
    Ok(exact)
}

fn all_agree(on: &dyn Executor, world: &World, jobs: &[Job]) -> Vec<usize> {
    agree(on, world, jobs).unwrap_or_else(|message| panic!("{message}"))
}

/// Jobs made of `cases` random values; one that fails is made as small as it can be. The number of values
/// that were certain to the bit.
fn random_agree<S: Strategy>(
    on: &dyn Executor,
    world: &World,
    cases: u32,
    strategy: &S,
    job: impl Fn(S::Value) -> Job,
) -> usize {
    let config = random::config(cases);
    let cases = config.cases as usize;
    let mut runner = TestRunner::new(config);
    let mut trees: Vec<_> = (0..cases).map(|_| strategy.new_tree(&mut runner).unwrap()).collect();
    let mut exact = 0;
    for trees in trees.chunks_mut(on.at_once()) {
        let jobs: Vec<Job> = trees.iter().map(|tree| job(tree.current())).collect();
        let whole = on.run(world, &jobs);
        for ((tree, first), i) in trees.iter_mut().zip(&jobs).zip(0..) {
            // Where the batch itself is refused, the first job that is refused alone is looked for.
            let checked = match &whole {
                Ok(found) => check(world, first, &found[i]),
                Err(_) => agree(on, world, std::slice::from_ref(first)).map(|exact| exact[0]),
            };
            match checked {
                Ok(count) => exact += count,
                Err(message) => panic!("{}", smallest(on, world, tree, &job, message)),
            }
        }
        if let Err(message) = whole {
            panic!("together: {message}");
        }
    }
    exact
}

/// The message of the smallest case that fails.
fn smallest<T: ValueTree>(
    on: &dyn Executor,
    world: &World,
    tree: &mut T,
    job: &impl Fn(T::Value) -> Job,
    mut message: String,
) -> String {
    let mut more = tree.simplify();
    for _ in 0..200 {
        if !more {
            break;
        }
        more = match agree(on, world, &[job(tree.current())]) {
            Err(smaller) => {
                message = smaller;
                tree.simplify()
            }
            Ok(_) => tree.complicate(),
        };
    }
    message
}

fn apply(op: Op, args: &[Expr]) -> Expr {
    Expr::new(op, args).unwrap()
}

/// A value of any type as f32, exactly: of a whole number its low half where the head is even, its high
/// half where it is odd.
fn as_float(expr: &Expr) -> Expr {
    let one = std::slice::from_ref(expr);
    match expr.ty() {
        Type::F32 => expr.clone(),
        Type::Bool => apply(Op::ToF32, one),
        Type::I32 | Type::U32 => {
            let word = if expr.ty() == Type::I32 { apply(Op::ToU32, one) } else { expr.clone() };
            let odd = apply(Op::And, &[apply(Op::ToU32, &[Expr::input(Input::Head)]), Expr::constant(1u32)]);
            let shift = apply(Op::Mul, &[odd, Expr::constant(16u32)]);
            let half = apply(Op::And, &[apply(Op::Shr, &[word, shift]), Expr::constant(65_535u32)]);
            apply(Op::ToF32, &[half])
        }
    }
}

/// Makes each body a test in both languages.
macro_rules! in_both_languages {
    ($($name:ident,)+) => {
        #[cfg(feature = "wgpu")]
        mod in_wgsl {
            $(
                #[test]
                fn $name() {
                    match super::wgsl::Bench::new() {
                        Some(bench) => super::$name(&bench),
                        None => println!("SKIPPED: no GPU adapter"),
                    }
                }
            )+
        }
        mod in_msl {
            $(
                #[test]
                fn $name() {
                    match super::msl::Emulated::new() {
                        Ok(emulated) => super::$name(&emulated),
                        Err(error) => println!("SKIPPED: {error}"),
                    }
                }
            )+
        }
    };
}

in_both_languages! {
    text_of_random_expressions_gives_their_values,
    text_of_random_derivatives_gives_their_values,
    every_operation_on_every_type_gives_its_value,
    casts_of_bits_keep_them,
    whole_powers_of_negative_numbers_have_their_signs,
    the_derivative_of_every_operation_is_what_the_reference_says,
    derivatives_at_kinks_are_the_documented_ones,
    functions_are_as_exact_as_ranges_say,
    captured_tensors_of_every_type_and_rank_are_read,
    a_tensor_in_place_is_read_from_its_first_element_on,
    infinite_constants_arrive,
}

fn text_of_random_expressions_gives_their_values(on: &dyn Executor) {
    let world = World::new(random::captures(), random::scalars());
    let points = prop::collection::vec(random::point(), POINTS);
    let exact = random_agree(
        on,
        &world,
        96,
        &(random::any_expr(), random::mask(4), points),
        |(expr, mask, points)| {
            // What a mod holds is simplified; naga's own arithmetic on constants never sees the rest.
            let (score, mask) = (as_float(&values::simplified(&expr)), values::simplified(&mask));
            Job { mods: Mods { score: Some(score), mask: Some(mask), ..Mods::default() }, points }
        },
    );
    assert!(exact > 1000, "only {exact} values were certain");
}

fn text_of_random_derivatives_gives_their_values(on: &dyn Executor) {
    let world = World::new(random::captures(), random::scalars());
    let points = prop::collection::vec(random::point(), POINTS);
    let terms = Cell::new(0);
    random_agree(on, &world, 64, &(random::expr(Type::F32, 3), points), |(expr, points)| {
        let job = Job::of_score(&values::simplified(&expr), true, &points);
        terms.set(terms.get() + job.terms());
        job
    });
    assert!(terms.get() >= 5, "only {} places read a captured tensor", terms.get());
}

/// Numbers at which rules break.
const WHOLE: [i32; 12] = [0, 1, -1, 2, -2, 3, -7, 31, 33, 1000, i32::MAX, i32::MIN];
const FLOATS: [f32; 13] = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.75, -0.375, 2.0, 6.0e9, -3.0e9, 1.0e-3];

/// Tables of the numbers above; every combination of two of them occurs at some point.
fn edges() -> (World, Vec<Point<f64>>) {
    let words = WHOLE.map(|x| x as u32);
    let flags = WHOLE.map(|x| x % 3 == 0);
    let world = World::new(
        vec![
            Capture::bool("flags", &flags, &[WHOLE.len()]).unwrap().into(),
            Capture::f32("floats", &FLOATS, &[FLOATS.len()]).unwrap().into(),
            Capture::i32("ints", &WHOLE, &[WHOLE.len()]).unwrap().into(),
            Capture::u32("words", &words, &[WHOLE.len()]).unwrap().into(),
        ],
        Vec::new(),
    );
    // Both halves of a whole number: heads of both kinds.
    let points = (0..13 * 13 * 2).map(|i| {
        let (h, q, kv) = (i % 2, i / 2 % 13, i / 26);
        Point { score: f64::from(FLOATS[(q * 5 + kv * 3) as usize % 13]), b: (q + 2 * kv) % 13, h, q, kv }
    });
    (world, points.collect())
}

/// An argument that a compiler cannot know: number `i` of an operation.
fn argument(world: &World, ty: Type, i: usize) -> Expr {
    let name = match ty {
        Type::F32 => "floats",
        Type::I32 => "ints",
        Type::U32 => "words",
        Type::Bool => "flags",
    };
    let decl = world.captures.iter().find(|capture| capture.name() == name).unwrap().decl();
    apply(Op::Gather(decl), &[Expr::input([Input::Q, Input::Kv, Input::Batch][i])])
}

/// Constants of a type, for which lowering may have a spelling of its own.
fn constants(ty: Type) -> Vec<Expr> {
    match ty {
        Type::F32 => [0.0f32, 1.0, -2.0, 3.0, 0.5].map(Expr::constant).to_vec(),
        Type::I32 => [0, 1, -1, 8, i32::MIN].map(Expr::constant).to_vec(),
        Type::U32 => [0u32, 1, 8, 35].map(Expr::constant).to_vec(),
        Type::Bool => [false, true].map(Expr::constant).to_vec(),
    }
}

/// Every operation with every list of types that it takes.
fn signatures() -> Vec<(Op, Vec<Type>)> {
    const TYPES: [Type; 4] = [Type::F32, Type::I32, Type::U32, Type::Bool];
    let lists = |n: u32| (0..4usize.pow(n)).map(move |i| (0..n).map(|k| TYPES[i >> (2 * k) & 3]).collect());
    let lists: Vec<Vec<Type>> = (1..=3).flat_map(lists).collect();
    let leaf =
        |(i, ty): (usize, &Type)| Expr::scalar(ScalarDecl { name: ["x", "y", "z"][i].into(), ty: *ty });
    let mut found = Vec::new();
    for op in OPS {
        let taken = lists.iter().filter(|types| {
            let args: Vec<Expr> = types.iter().enumerate().map(leaf).collect();
            Expr::exact(op.clone(), &args).is_ok()
        });
        found.extend(taken.map(|types| (op.clone(), types.clone())));
    }
    found
}

/// A job for every operation on every list of types, of arguments alone and beside constants.
fn every_call(world: &World, points: &[Point<f64>]) -> Vec<(Op, Job)> {
    let mut calls = Vec::new();
    for (op, types) in signatures() {
        let args: Vec<Expr> = types.iter().enumerate().map(|(i, ty)| argument(world, *ty, i)).collect();
        let mut lists = vec![args.clone()];
        if let [_, ty] = types[..] {
            lists.extend(constants(ty).into_iter().map(|last| vec![args[0].clone(), last]));
            lists.extend(constants(types[0]).into_iter().take(1).map(|first| vec![first, args[1].clone()]));
        }
        if let (Op::Clamp, [ty, ..]) = (&op, &types[..]) {
            let [low, high] = [0, 1].map(|i| constants(*ty)[i].clone());
            lists.extend(
                [[&low, &high], [&high, &low]].map(|[a, b]| vec![args[0].clone(), a.clone(), b.clone()]),
            );
        }
        for args in lists {
            let call = apply(op.clone(), &args);
            calls.push((op.clone(), Job::of_score(&as_float(&call), false, points)));
        }
    }
    calls
}

fn every_operation_on_every_type_gives_its_value(on: &dyn Executor) {
    let (world, points) = edges();
    let (calls, jobs): (Vec<Op>, Vec<Job>) = every_call(&world, &points).into_iter().unzip();
    let exact = all_agree(on, &world, &jobs);
    println!("{} calls", jobs.len());
    // Nothing is exact of a function, and of casts from bits: those have tests of their own.
    for (op, of_op) in OPS.iter().map(|op| (op, calls.iter().zip(&exact).filter(move |(o, _)| *o == op))) {
        let certain: usize = of_op.map(|(_, exact)| exact).sum();
        let inexact = matches!(
            op,
            Op::Sqrt
                | Op::Exp
                | Op::Exp2
                | Op::Log
                | Op::Log2
                | Op::Sin
                | Op::Cos
                | Op::Tan
                | Op::Tanh
                | Op::Sigmoid
                | Op::Pow
                | Op::Div
                | Op::BitsToF32
                | Op::BitsToI32
                | Op::BitsToU32
        );
        assert!(inexact || certain > 100, "{op:?}: only {certain} values were certain");
    }
}

/// Ranges say nothing of such powers; here each is compared with its value.
fn negative_powers(on: &dyn Executor) -> Result<(), String> {
    let bases = [-1.0f32, -2.5, -0.375, -3.0, -0.0, 0.0, -1.0e3];
    let exponents = [0.0f32, 1.0, 2.0, 3.0, -1.0, -2.0, -3.0, 4.0, 7.0];
    let captures: Vec<Capture> = vec![
        Capture::f32("bases", &bases, &[bases.len()]).unwrap().into(),
        Capture::f32("exponents", &exponents, &[exponents.len()]).unwrap().into(),
    ];
    let world = World::new(captures, Vec::new());
    let points: Vec<Point<f64>> =
        (0..63).map(|i| Point { score: 0.0, b: 0, h: 0, q: i % 7, kv: i / 7 }).collect();
    let jobs = [Job::of_score(&world.score("pow(bases(q), exponents(kv))"), false, &points)];
    for (at, found) in points.iter().zip(&on.run(&world, &jobs)?[0]) {
        let (x, y) = (f64::from(bases[at.q as usize]), f64::from(exponents[at.kv as usize]));
        // The sign of a zero, and so of its inverse, is not part of what `pow` promises.
        let expected = if x == 0.0 { x.powf(y).abs() } else { x.powf(y) };
        let value = f64::from(if x == 0.0 { found.score.abs() } else { found.score });
        if value != expected && (value - expected).abs() > 1e-4 * expected.abs() {
            return Err(format!("pow({x}, {y}) is {value} in kernel text, not {expected}"));
        }
    }
    Ok(())
}

fn whole_powers_of_negative_numbers_have_their_signs(on: &dyn Executor) {
    negative_powers(on).unwrap_or_else(|message| panic!("{message}"));
}

fn casts_of_bits_keep_them(on: &dyn Executor) {
    let floats = [1.5f32, -1.5, f32::MAX, f32::MIN_POSITIVE, 0.0, -0.0, 1.0e-30, -7.25e12];
    let words = floats.map(f32::to_bits);
    let ints = words.map(|x| x as i32);
    let captures: Vec<Capture> = vec![
        Capture::f32("floats", &floats, &[8]).unwrap().into(),
        Capture::i32("ints", &ints, &[8]).unwrap().into(),
        Capture::u32("words", &words, &[8]).unwrap().into(),
    ];
    let world = World::new(captures, Vec::new());
    let points: Vec<Point<f64>> =
        (0..16).map(|i| Point { score: 0.0, b: 0, h: i % 2, q: i / 2, kv: 0 }).collect();
    let casts = [
        (Op::BitsToF32, Type::I32),
        (Op::BitsToF32, Type::U32),
        (Op::BitsToI32, Type::F32),
        (Op::BitsToU32, Type::F32),
    ];
    let jobs: Vec<Job> = casts
        .iter()
        .map(|(op, ty)| apply(op.clone(), &[argument(&world, *ty, 0)]))
        .map(|cast| Job::of_score(&as_float(&cast), false, &points))
        .collect();
    let found = on.run(&world, &jobs).unwrap_or_else(|message| panic!("{message}"));
    for ((op, ty), found) in casts.iter().zip(found) {
        for (at, found) in points.iter().zip(found) {
            let word = words[at.q as usize];
            let expected = match op {
                Op::BitsToF32 => f32::from_bits(word),
                _ => (word >> (16 * at.h) & 0xffff) as f32,
            };
            assert_eq!(found.score.to_bits(), expected.to_bits(), "{op:?} of {ty} {word:#x}");
        }
    }
}

fn the_derivative_of_every_operation_is_what_the_reference_says(on: &dyn Executor) {
    let captures = sum_of(&[]).captures().to_vec();
    let captures = if captures.is_empty() { sum_of(&of_floats()).captures().to_vec() } else { captures };
    let world = World::new(captures, Vec::new());
    let points: Vec<Point<f64>> = (0..20 * 24)
        .map(|i| {
            let (q, kv) = (i % 20, i / 20);
            Point { score: f64::from((((7 * q + 3 * kv) % 29) as f32 - 14.0) * 0.21), b: 0, h: 0, q, kv }
        })
        .collect();
    let jobs: Vec<Job> = of_floats()
        .iter()
        .map(|op| Job::of_score(sum_of(std::slice::from_ref(op)).expr(), true, &points))
        .collect();
    assert!(
        jobs.iter().all(|job| job.mods.terms == ["column", "row"]) || jobs.iter().any(|job| job.terms() > 1)
    );
    all_agree(on, &world, &jobs);
}

fn derivatives_at_kinks_are_the_documented_ones(on: &dyn Executor) {
    let heads = KINKS.len();
    let table: Capture = Capture::f32("t", &vec![0.0; 2 * heads], &[heads, 2]).unwrap().into();
    let world = World::new(vec![table], Vec::new());
    let jobs: Vec<Job> = KINKS
        .iter()
        .zip(0..)
        .map(|((text, ..), h)| {
            let score = world.score(text);
            Job::of_score(&score, true, &[Point { score: 0.0, b: 0, h, q: 0, kv: 0 }])
        })
        .collect();
    let found = on.run(&world, &jobs).unwrap_or_else(|message| panic!("{message}"));
    for (((text, by_score, by_element), found), h) in KINKS.into_iter().zip(found).zip(0..) {
        assert_eq!(found[0].grad, by_score, "{text} by the score");
        let sum: f32 = found[0].terms.iter().map(|(d, _)| d).sum();
        assert_eq!(sum, by_element, "{text} by its element");
        assert!(found[0].terms.iter().all(|(_, element)| *element == 2 * h), "{text}: {found:?}");
    }
}

fn functions_are_as_exact_as_ranges_say(on: &dyn Executor) {
    let functions = [
        "exp(score)",
        "exp2(score)",
        "log(abs(score))",
        "log2(abs(score))",
        "sqrt(abs(score))",
        "sqrt(score * 0.0)",
        "sqrt(ceil(clamp(score, -0.5, 0.0)))",
        "pow(sqrt(ceil(clamp(score, -0.5, 0.0))), -4.0)",
        "sin(score)",
        "cos(score)",
        "tanh(score)",
        "tanh(score * 30.0)",
        "sigmoid(score * 20.0)",
        "pow(abs(score) + 0.1, score)",
        "pow(score, round(score))",
        "pow(score, 5.0) + pow(score, 3.0)",
        "pow(abs(score), 0.5)",
        "pow(min(score, 0.0) * 0.0, round(score) + 20.0)",
        "pow(score * 0.0, 0.0 * score)",
        "1.0 / score",
        "round(score * 2.0)",
        "fract(score)",
        "floor(score)",
        "sign(score)",
        "score % 0.75",
        "clamp(score, 2.0, -1.0)",
        "f32(i32(score * 1e9))",
        "f32(u32(score * 1e9))",
        "f32(i32(score * 1e30))",
    ];
    let points: Vec<Point<f64>> = (0..POINTS)
        .map(|i| Point { score: f64::from((i as f32 - 31.5) * 0.17), b: 0, h: 0, q: 0, kv: 0 })
        .collect();
    let world = World::new(Vec::new(), Vec::new());
    let jobs: Vec<Job> =
        functions.iter().map(|text| Job::of_score(&world.score(text), false, &points)).collect();
    for jobs in jobs.chunks(on.at_once()) {
        let found = on.run(&world, jobs).unwrap_or_else(|message| panic!("{message}"));
        for (job, found) in jobs.iter().zip(found) {
            checked::within_ranges(&world, job, &found);
        }
    }
}

fn captured_tensors_of_every_type_and_rank_are_read(on: &dyn Executor) {
    let floats: Vec<f32> = (0..48).map(|i| i as f32 * 0.75 - 9.0).collect();
    let halves: Vec<half::f16> = floats.iter().map(|x| half::f16::from_f32(*x)).collect();
    let brains: Vec<half::bf16> = floats.iter().map(|x| half::bf16::from_f32(*x)).collect();
    let ints: Vec<i32> = (0..48).map(|i| i * 89_478_485 - 2_000_000_000).collect();
    let words: Vec<u32> = (0..48u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
    let flags: Vec<bool> = (0..48).map(|i| i % 5 < 2).collect();
    let shapes: [&[usize]; 5] = [&[], &[7], &[3, 5], &[2, 3, 4], &[2, 3, 2, 4]];
    let mut captures: Vec<Capture> = Vec::new();
    for shape in shapes {
        let (n, rank) = (shape.iter().product::<usize>(), shape.len());
        captures.extend::<[Capture; 6]>([
            Capture::f32(&format!("floats{rank}"), &floats[..n], shape).unwrap().into(),
            Capture::f16(&format!("halves{rank}"), &halves[..n], shape).unwrap().into(),
            Capture::bf16(&format!("brains{rank}"), &brains[..n], shape).unwrap().into(),
            Capture::i32(&format!("ints{rank}"), &ints[..n], shape).unwrap().into(),
            Capture::u32(&format!("words{rank}"), &words[..n], shape).unwrap().into(),
            Capture::bool(&format!("flags{rank}"), &flags[..n], shape).unwrap().into(),
        ]);
    }
    let scalars: Vec<Scalar> = vec![
        Scalar::f32("cap", 1.75).unwrap().into(),
        Scalar::i32("shift", -3).unwrap().into(),
        Scalar::u32("seed", 0x8000_0007).unwrap().into(),
        Scalar::f32("low", -0.0).unwrap().into(),
        Scalar::i32("last", i32::MIN).unwrap().into(),
    ];
    let world = World::new(captures, scalars);
    // Within the tensors, and past both ends of each dimension.
    let points: Vec<Point<f64>> = (0..6 * 7 * 6)
        .map(|i| Point { score: f64::from(i % 11), b: i % 3, h: i % 6, q: i / 6 % 7 - 1, kv: i / 42 - 1 })
        .collect();
    let inputs = [Input::Q, Input::Kv, Input::Head, Input::Batch];
    let mut jobs: Vec<Job> = world
        .captures
        .iter()
        .map(|capture| {
            let indices = inputs[..capture.shape().len()].iter().map(|input| Expr::input(*input));
            let read = apply(Op::Gather(capture.decl()), &indices.collect::<Vec<_>>());
            Job::of_score(&as_float(&read), false, &points)
        })
        .collect();
    for text in [
        "floats3(ints1(q) % 2, i32(words1(kv)), i32(halves2(q, h)))",
        "brains1(i32(floats2(i32(flags4(q, kv, h, b)), ints2(kv, q) % 5)))",
        "halves4(i32(words0()), i32(brains0()), ints0(), i32(flags0()))",
        "select(floats0(), cap, flags1(kv)) + low",
        "f32(shift) + f32(seed >> 3u) + cap * 2.0",
        "f32((last + 5 + q) >> 16u)",
        "f32(q_len - kv_len + kv)",
    ] {
        jobs.push(Job::of_score(&world.score(text), false, &points));
    }
    let exact = all_agree(on, &world, &jobs);
    // Nothing of this is rounded but for the sums.
    assert!(exact.iter().filter(|exact| **exact == points.len()).count() >= jobs.len() - 2, "{exact:?}");
}

fn a_tensor_in_place_is_read_from_its_first_element_on(on: &dyn Executor) {
    let floats: Vec<f32> = (0..24).map(|i| i as f32 * 0.5 - 3.0).collect();
    let captures: Vec<Capture> = vec![
        Capture::f32("bias", &floats[..6], &[6]).unwrap().into(),
        Capture::f32("table", &floats, &[4, 6]).unwrap().into(),
    ];
    let world = World { large: Some(("table", 5)), ..World::new(captures, Vec::new()) };
    let points: Vec<Point<f64>> =
        (0..48).map(|i| Point { score: f64::from(i), b: 0, h: 0, q: i / 6 - 1, kv: i % 6 }).collect();
    let score = world.score("score + table(q, kv) * bias(kv)");
    let exact = all_agree(on, &world, &[Job::of_score(&score, true, &points)]);
    assert!(exact[0] > 100, "{exact:?}");
}

fn infinite_constants_arrive(on: &dyn Executor) {
    let numbers = [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, -0.0, 1.0e-38];
    let at = Point { score: 1.0, b: 0, h: 0, q: 1, kv: 0 };
    let jobs = numbers.map(|x| {
        let first = apply(Op::Ge, &[Expr::input(Input::Q), Expr::constant(0)]);
        let chosen = apply(Op::Select, &[first, Expr::constant(x), Expr::input(Input::Score)]);
        Job::of_score(&chosen, false, &[at])
    });
    let found =
        on.run(&World::new(Vec::new(), Vec::new()), &jobs).unwrap_or_else(|message| panic!("{message}"));
    for (x, found) in numbers.into_iter().zip(found) {
        assert_eq!(found[0].score.to_bits(), x.to_bits(), "{x}");
    }
}
