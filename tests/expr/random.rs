//! Random expressions, points and boxes.

use std::sync::OnceLock;

use flexattn::expr::{Expr, IndexBox, Input, Op, Point, ScalarDecl, Type};
use flexattn::{Capture, Scalar};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// The same cases in every run, so that a change and not chance decides; with FLEXATTN_FULL=1 ten
/// times as many, new ones each time.
pub(super) fn config(cases: u32) -> ProptestConfig {
    let full = std::env::var_os("FLEXATTN_FULL").is_some();
    ProptestConfig {
        cases: if full { 10 * cases } else { cases },
        rng_seed: if full { RngSeed::Random } else { RngSeed::Fixed(20) },
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    }
}

pub(super) const Q_LEN: usize = 40;
pub(super) const KV_LEN: usize = 56;

/// The captured tensors that random expressions read.
pub(super) fn captures() -> Vec<Capture> {
    static CAPTURES: OnceLock<Vec<Capture>> = OnceLock::new();
    CAPTURES
        .get_or_init(|| {
            let floats: Vec<f32> = (0..24).map(|i| (i as f32 - 11.0) * 0.375).collect();
            let halves: Vec<half::f16> = floats[..7].iter().map(|x| half::f16::from_f32(*x)).collect();
            let halves_of_16: Vec<half::f16> =
                (0..16u8).map(|i| half::f16::from_f32(f32::from(i) * 0.3 - 2.0)).collect();
            let brains: Vec<half::bf16> = floats[..9].iter().map(|x| half::bf16::from_f32(*x)).collect();
            let ints: Vec<i32> = (0..30).map(|i| (i * 7) % 11 - 3).collect();
            let words: Vec<u32> = (0..5).map(|i| i * 0x9e37_79b9).map(|x: u32| x >> 3).collect();
            let flags: Vec<bool> = (0..13).map(|i| i % 3 == 0).collect();
            vec![
                Capture::bf16("brains", &brains, &[3, 3]).unwrap().into(),
                Capture::i32("cubes", &ints[..24], &[2, 3, 2, 2]).unwrap().into(),
                Capture::bool("flags", &flags, &[13]).unwrap().into(),
                Capture::f32("floats", &floats, &[2, 3, 4]).unwrap().into(),
                Capture::f16("halves", &halves, &[7]).unwrap().into(),
                Capture::i32("ints", &ints, &[30]).unwrap().into(),
                Capture::f32("point", &[-1.625], &[]).unwrap().into(),
                Capture::f16("quads", &halves_of_16, &[2, 2, 2, 2]).unwrap().into(),
                Capture::u32("words", &words, &[1, 5]).unwrap().into(),
            ]
        })
        .clone()
}

pub(super) fn scalars() -> Vec<Scalar> {
    vec![
        Scalar::f32("cap", 1.75).unwrap().into(),
        Scalar::i32("shift", -3).unwrap().into(),
        Scalar::u32("seed", 0x8000_0007).unwrap().into(),
    ]
}

pub(super) fn point() -> impl Strategy<Value = Point<f64>> {
    let q = prop_oneof![0..40i32, Just(-1), Just(-40), Just(100_000)];
    (0..3i32, 0..4i32, q, 0..56i32, -6.0..6.0f64).prop_map(|(b, h, q, kv, score)| Point {
        score: f64::from(score as f32),
        b,
        h,
        q,
        kv,
    })
}

pub(super) fn index_box() -> impl Strategy<Value = IndexBox> {
    let side = |most: i32| prop_oneof![Just(0), 0..8i32, 0..most];
    (0..3i32, 0..4i32, -8..40i32, side(40), 0..56i32, side(56)).prop_map(|(b, h, q, dq, kv, dkv)| IndexBox {
        b: (b, b),
        h: (h, h),
        q: (q, q + dq),
        kv: (kv, kv + dkv),
    })
}

fn apply(op: Op, args: &[Expr]) -> Expr {
    Expr::exact(op, args).unwrap()
}

fn gather(name: &str, args: &[Expr]) -> Expr {
    let decl = captures().iter().find(|c| c.name() == name).unwrap().decl();
    apply(Op::Gather(decl), args)
}

/// Decides what to build: numbers drawn beforehand, 0 when they are used up, so that shrinking gives leaves.
struct Tape {
    numbers: Vec<u32>,
    next: usize,
}

impl Tape {
    fn draw(&mut self, below: usize) -> usize {
        let number = self.numbers.get(self.next).copied().unwrap_or(0);
        self.next += 1;
        number as usize % below
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.draw(of.len())].clone()
    }

    fn leaf(&mut self, ty: Type) -> Expr {
        let scalar = |name: &str, ty| Expr::scalar(ScalarDecl { name: name.into(), ty });
        match ty {
            Type::F32 => match self.draw(7) {
                0..4 => Expr::input(Input::Score),
                4 => scalar("cap", Type::F32),
                _ => Expr::constant(self.pick(&[0.0f32, 1.0, -1.0, 0.5, 2.0, -3.25, 7.1, -0.0, 40.0])),
            },
            Type::I32 => match self.draw(8) {
                0..5 => Expr::input(self.pick(&[
                    Input::Q,
                    Input::Kv,
                    Input::Q,
                    Input::Kv,
                    Input::Batch,
                    Input::Head,
                    Input::QLen,
                    Input::KvLen,
                ])),
                5 => scalar("shift", Type::I32),
                _ => Expr::constant(self.pick(&[0, 1, -1, 2, 8, -5, 17, 64, i32::MIN, i32::MAX])),
            },
            Type::U32 => match self.draw(6) {
                0..3 => {
                    let e = self.leaf(Type::I32);
                    apply(Op::ToU32, &[e])
                }
                3 => scalar("seed", Type::U32),
                _ => Expr::constant(self.pick(&[0u32, 1, 16, 3, 77, u32::MAX])),
            },
            Type::Bool => match self.draw(5) {
                0..4 => {
                    let (a, b) = (self.leaf(Type::I32), self.leaf(Type::I32));
                    apply(Op::Ge, &[a, b])
                }
                _ => Expr::constant(self.draw(2) == 1),
            },
        }
    }

    fn call(&mut self, ops: &[Op], types: &[Type], depth: u32) -> Expr {
        let op = self.pick(ops);
        let args: Vec<Expr> = types.iter().map(|ty| self.expr(*ty, depth - 1)).collect();
        apply(op, &args)
    }

    fn read(&mut self, name: &str, rank: usize, depth: u32) -> Expr {
        let args: Vec<Expr> = (0..rank).map(|_| self.expr(Type::I32, depth - 1)).collect();
        gather(name, &args)
    }

    fn expr(&mut self, ty: Type, depth: u32) -> Expr {
        use Type::{Bool, F32, I32, U32};
        if depth == 0 {
            return self.leaf(ty);
        }
        match ty {
            F32 => match self.draw(25) {
                0 => self.leaf(ty),
                1..7 => {
                    self.call(&[Op::Add, Op::Sub, Op::Mul, Op::Div, Op::Min, Op::Max], &[F32, F32], depth)
                }
                7..11 => self.call(
                    &[
                        Op::Neg,
                        Op::Abs,
                        Op::Sign,
                        Op::Floor,
                        Op::Ceil,
                        Op::Round,
                        Op::Trunc,
                        Op::Fract,
                        Op::Sqrt,
                        Op::Exp,
                        Op::Exp2,
                        Op::Log,
                        Op::Log2,
                        Op::Sin,
                        Op::Cos,
                        Op::Tan,
                        Op::Tanh,
                        Op::Sigmoid,
                    ],
                    &[F32],
                    depth,
                ),
                11 => {
                    let (a, b) = (self.expr(F32, depth - 1), self.expr(F32, depth - 1));
                    apply(Op::Pow, &[apply(Op::Abs, &[a]), b])
                }
                12 => self.call(&[Op::Clamp], &[F32, F32, F32], depth),
                13 | 14 => self.call(&[Op::Select], &[Bool, F32, F32], depth),
                15 | 16 => self.call(&[Op::ToF32], &[I32], depth),
                17 => self.call(&[Op::ToF32], &[U32], depth),
                18 => self.call(&[Op::ToF32], &[Bool], depth),
                19 => self.read("halves", 1, depth),
                20 => self.read("brains", 2, depth),
                21 => self.read("point", 0, depth),
                22 => self.read("quads", 4, depth),
                23 => {
                    let ty = self.pick(&[I32, U32]);
                    self.call(&[Op::BitsToF32], &[ty], depth)
                }
                _ => self.read("floats", 3, depth),
            },
            I32 => match self.draw(22) {
                0 => self.leaf(ty),
                1..8 => self.call(
                    &[
                        Op::Add,
                        Op::Sub,
                        Op::Mul,
                        Op::Div,
                        Op::Rem,
                        Op::WrappingAdd,
                        Op::WrappingSub,
                        Op::WrappingMul,
                        Op::FloorDiv,
                        Op::FloorMod,
                        Op::Min,
                        Op::Max,
                        Op::And,
                        Op::Or,
                        Op::Xor,
                    ],
                    &[I32, I32],
                    depth,
                ),
                8 | 9 => self.call(
                    &[Op::Neg, Op::WrappingNeg, Op::Not, Op::Abs, Op::Sign, Op::CountOneBits],
                    &[I32],
                    depth,
                ),
                10 | 11 => self.call(&[Op::Shl, Op::Shr], &[I32, U32], depth),
                12 => self.call(&[Op::Clamp], &[I32, I32, I32], depth),
                13 | 14 => self.call(&[Op::Select], &[Bool, I32, I32], depth),
                15 => self.call(&[Op::ToI32], &[F32], depth),
                16 => self.call(&[Op::ToI32], &[U32], depth),
                17 => self.call(&[Op::ToI32], &[Bool], depth),
                18 => self.call(&[Op::BitsToI32], &[F32], depth),
                19 => self.read("cubes", 4, depth),
                _ => self.read("ints", 1, depth),
            },
            U32 => match self.draw(16) {
                0 => self.leaf(ty),
                1..7 => self.call(
                    &[
                        Op::Add,
                        Op::Sub,
                        Op::Mul,
                        Op::Div,
                        Op::Rem,
                        Op::WrappingAdd,
                        Op::WrappingSub,
                        Op::WrappingMul,
                        Op::Min,
                        Op::Max,
                        Op::And,
                        Op::Or,
                        Op::Xor,
                        Op::Shl,
                        Op::Shr,
                    ],
                    &[U32, U32],
                    depth,
                ),
                7 => self.call(&[Op::Not, Op::CountOneBits], &[U32], depth),
                8 => self.call(&[Op::Clamp], &[U32, U32, U32], depth),
                9 => self.call(&[Op::Select], &[Bool, U32, U32], depth),
                10 => self.call(&[Op::ToU32], &[F32], depth),
                11 | 12 => self.call(&[Op::ToU32], &[I32], depth),
                13 => self.call(&[Op::ToU32], &[Bool], depth),
                14 => self.call(&[Op::BitsToU32], &[F32], depth),
                _ => self.read("words", 2, depth),
            },
            Bool => {
                const COMPARE: [Op; 6] = [Op::Lt, Op::Le, Op::Gt, Op::Ge, Op::Eq, Op::Ne];
                match self.draw(16) {
                    0 => self.leaf(ty),
                    1..5 => self.call(&COMPARE, &[I32, I32], depth),
                    5 | 6 => self.call(&COMPARE, &[F32, F32], depth),
                    7 => self.call(&COMPARE, &[U32, U32], depth),
                    8..11 => self.call(&[Op::And, Op::Or, Op::Xor, Op::Eq, Op::Ne], &[Bool, Bool], depth),
                    11 => self.call(&[Op::Not], &[Bool], depth),
                    12 => self.call(&[Op::Select], &[Bool, Bool, Bool], depth),
                    13 => self.call(&[Op::ToBool], &[I32], depth),
                    14 => self.call(&[Op::ToBool], &[F32], depth),
                    _ => self.read("flags", 1, depth),
                }
            }
        }
    }
}

/// A random expression of type `ty`, not simplified.
pub(super) fn expr(ty: Type, depth: u32) -> impl Strategy<Value = Expr> {
    prop::collection::vec(any::<u32>(), 20..200)
        .prop_map(move |numbers| Tape { numbers, next: 0 }.expr(ty, depth))
}

/// A random expression of any type, not simplified.
pub(super) fn any_expr() -> impl Strategy<Value = Expr> {
    prop_oneof![expr(Type::F32, 5), expr(Type::I32, 4), expr(Type::U32, 4), expr(Type::Bool, 5)]
}

/// A random mask, not simplified but where the score was: a mask reads none.
pub(super) fn mask(depth: u32) -> impl Strategy<Value = Expr> {
    expr(Type::Bool, depth).prop_map(|e| {
        e.replace_inputs(|input| (input == Input::Score).then(|| Expr::constant(0.75f32))).unwrap()
    })
}
