//! Masks and score mods as kernel text: the slots that `kernels` fills, in WGSL and in MSL.
//!
//! [`slots`] gives, for the expressions of one kernel, the texts of
//!
//! | slot | holds |
//! |---|---|
//! | `captures` | what the text below calls: an accessor per captured tensor and per scalar, integer helpers |
//! | `row` | `struct Row` and `row_mod(b, h, q)`: what does not change along a row and is worth keeping |
//! | `score_mod` | `score_mod(score, row, b, h, q, kv)` |
//! | `mask_mod` | `mask_mod(row, b, h, q, kv)` |
//! | `score_grad` | `score_grad(score, row, b, h, q, kv)`: d score_mod / d score |
//! | `terms` | d score_mod / d element for each place that reads a captured tensor, and which element it is |
//!
//! In MSL every function takes `thread const Ctx& ctx` first. Shared subexpressions get names. The texts
//! follow the rules of [`crate::expr`] exactly where languages differ: integers wrap (MSL computes through
//! uint), division by 0, shifts, saturating conversions; infinities and NaN are made at run time, since
//! WGSL has no literals for them.
//!
//! Does not check: call [`crate::expr::Expr::check`] first, or overflow that was meant to be refused just wraps.

mod layout;
mod msl;
mod terms;
mod wgsl;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;

use crate::error::{Error, Result};
use crate::expr::{CaptureDecl, Expr, GatherGradient, Gradient, Input, Inputs, Op, ScalarDecl, Type, Value};
use crate::kernels::Language;

pub(crate) use layout::Home;
pub use layout::Layout;
use terms::Terms;

/// The expressions of one kernel.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Mods {
    /// The score mod, of type f32; nothing for the identity.
    pub score: Option<Expr>,
    /// The mask, of type bool; nothing for all true.
    pub mask: Option<Expr>,
    /// Also `score_grad`.
    pub grad: bool,
    /// Also `terms`, for the captured tensors of these names.
    pub terms: Vec<String>,
}

/// The most values that a row keeps: they live in registers of every invocation.
const MAX_ROW_VALUES: usize = 8;

/// How much a value must cost before a row keeps it: less is cheaper to compute again than to keep.
const WORTH_KEEPING: u32 = 4;

/// Expressions nest at most this deep in the text; compilers have limits.
const MAX_NESTING: usize = 16;

/// The texts of the slots, by slot name. Slots that stay as the kernel file has them are left out.
///
/// # Errors
/// When an expression has the wrong type or reads a capture or scalar that `layout` lacks.
pub fn slots(mods: &Mods, layout: &Layout, language: Language) -> Result<Vec<(&'static str, String)>> {
    let target: &dyn Target = match language {
        Language::Wgsl | Language::WgslWeb => &wgsl::Wgsl,
        Language::Msl => &msl::Msl,
    };
    let score = mods.score.clone().unwrap_or_else(|| Expr::input(Input::Score));
    expect(&score, Type::F32, "score_mod")?;
    if let Some(mask) = &mods.mask {
        expect(mask, Type::Bool, "mask_mod")?;
        if mask.inputs().contains(Input::Score) {
            return Err(Error::expression(format!(
                "a mask_mod cannot read the score; select in the score_mod: {mask}"
            )));
        }
    }
    let gradient = (mods.grad || !mods.terms.is_empty()).then(|| Gradient::of(&score)).transpose()?;
    let terms = match &gradient {
        Some(gradient) => Terms::of(gradient, &mods.terms)?,
        None => Terms::default(),
    };

    // All outputs of the kernel: rows are shared between them.
    let mut outputs = Vec::new();
    outputs.extend(mods.score.clone());
    outputs.extend(mods.mask.clone());
    if let (true, Some(gradient)) = (mods.grad, &gradient) {
        outputs.push(gradient.d_score.clone());
    }
    outputs.extend(terms.all().map(|term| term.d.clone()));
    outputs.extend(terms.pairs.iter().flat_map(|term| term.indices.iter().cloned()));
    // What the scatter needs has to be in the layout too, but no row keeps it.
    for index in terms.all().flat_map(|term| &term.indices) {
        layout.covers(index)?;
    }

    for output in &outputs {
        layout.covers(output)?;
    }
    let rows = row_values(&outputs);
    let kept: HashMap<u128, String> =
        rows.iter().enumerate().map(|(i, e)| (e.hash(), format!("row.r{i}"))).collect();
    let mut uses = Uses::default();
    let mut texts = Vec::new();

    let fields: Vec<String> = rows.iter().enumerate().map(|(i, e)| target.field(i, e.ty())).collect();
    let row = target.row(
        &fields,
        &body(target, &rows, &HashMap::new(), &mut uses, |v| {
            let typed: Vec<(Type, String)> = rows.iter().map(Expr::ty).zip(v).collect();
            target.row_value(&typed)
        }),
    );
    if !rows.is_empty() {
        texts.push(("row", row));
    }
    if let Some(score) = &mods.score {
        let body = body(target, std::slice::from_ref(score), &kept, &mut uses, |v| v[0].clone());
        texts.push(("score_mod", target.function("score_mod", Type::F32, &body)));
    }
    if let Some(mask) = &mods.mask {
        let body = body(target, std::slice::from_ref(mask), &kept, &mut uses, |v| v[0].clone());
        texts.push(("mask_mod", target.function("mask_mod", Type::Bool, &body)));
    }
    if let (true, Some(gradient)) = (mods.grad, &gradient) {
        let body = body(target, std::slice::from_ref(&gradient.d_score), &kept, &mut uses, |v| v[0].clone());
        texts.push(("score_grad", target.function("score_grad", Type::F32, &body)));
    }
    if !mods.terms.is_empty() {
        let number = |place: &GatherGradient| layout.capture(&place.capture);
        texts.push(("terms", terms.text(target, number, &kept, &mut uses)?));
    }

    let mut accessors = String::new();
    for name in &uses.functions {
        accessors.push_str(target.define(name));
    }
    for decl in &uses.captures {
        accessors.push_str(&target.accessor(decl, layout.capture(decl)?, layout.home(decl)));
    }
    for decl in &uses.scalars {
        accessors.push_str(&target.scalar_accessor(decl, layout.scalar(decl)?));
    }
    if !accessors.is_empty() {
        texts.insert(0, ("captures", accessors));
    }
    for (_, text) in &mut texts {
        text.truncate(text.trim_end().len());
    }
    Ok(texts)
}

fn expect(expr: &Expr, ty: Type, name: &str) -> Result<()> {
    if expr.ty() == ty {
        return Ok(());
    }
    Err(Error::Expression(format!("a {name} must be {ty}, but this is {}: {expr}", expr.ty())))
}

/// A piece of text and how tightly its outermost operation binds.
#[derive(Debug, Clone)]
struct Text {
    text: String,
    level: u8,
}

/// Names, literals, calls.
const ATOM: u8 = 10;
const UNARY: u8 = 9;
const MUL: u8 = 8;
const ADD: u8 = 7;
const SHIFT: u8 = 6;
const COMPARE: u8 = 5;
const AND: u8 = 3;
const XOR: u8 = 2;
const OR: u8 = 1;

impl Text {
    fn atom(text: impl Into<String>) -> Text {
        Text { text: text.into(), level: ATOM }
    }

    /// In parentheses unless it binds at least as tightly as `level`.
    fn at(&self, level: u8) -> String {
        if self.level >= level { self.text.clone() } else { format!("({})", self.text) }
    }

    fn call(name: &str, args: &[Text]) -> Text {
        // `f(a < b, c > d)` would be a template list in WGSL.
        let args: Vec<String> =
            args.iter().map(|a| a.at(if a.level == COMPARE { ATOM } else { 0 })).collect();
        Text::atom(format!("{name}({})", args.join(", ")))
    }

    /// `a sign b`, left associative, by the strict rules of WGSL, which C accepts too.
    fn infix(sign: &str, level: u8, a: &Text, b: &Text) -> Text {
        let (left, right) = match level {
            MUL | ADD => (level, level + 1),
            SHIFT => (ATOM, ATOM),
            // `a < b >> c` would begin a template list in WGSL.
            COMPARE => (ADD, ADD),
            // `a & b & c` may stand without parentheses; nothing else may mix with it.
            _ if a.level == level => (level, ATOM),
            _ => (ATOM, ATOM),
        };
        Text { text: format!("{} {sign} {}", a.at(left), b.at(right)), level }
    }

    fn prefix(sign: &str, a: &Text) -> Text {
        Text { text: format!("{sign}{}", a.at(ATOM)), level: UNARY }
    }
}

/// What the text of a kernel calls.
#[derive(Debug, Default)]
struct Uses {
    /// Named functions of the target, such as `floor_div`.
    functions: BTreeSet<&'static str>,
    captures: BTreeSet<CaptureDecl>,
    scalars: BTreeSet<ScalarDecl>,
}

/// An operation with what its spelling may depend on.
struct Call<'a> {
    op: &'a Op,
    args: &'a [Text],
    /// Type of the first argument.
    of: Type,
    exprs: &'a [Expr],
}

impl Call<'_> {
    fn constant(&self, i: usize) -> Option<Value> {
        self.exprs[i].as_constant()
    }
}

/// A shading language: how it spells an expression and the functions around it.
trait Target {
    fn ty(&self, ty: Type) -> &'static str;
    fn constant(&self, value: Value) -> Text;
    fn input(&self, input: Input) -> Text;
    /// Every operation with arguments but gathers; names the helper functions it needs.
    fn call(&self, call: &Call<'_>, functions: &mut BTreeSet<&'static str>) -> Text;
    /// The definition of a helper function.
    fn define(&self, name: &str) -> &'static str;
    fn read(&self, capture: &str, index: &[Text]) -> Text;
    fn scalar(&self, name: &str) -> Text;
    fn bind(&self, name: &str, ty: Type, value: &str) -> String;
    fn function(&self, name: &str, ty: Type, body: &str) -> String;
    fn field(&self, i: usize, ty: Type) -> String;
    fn row(&self, fields: &[String], body: &str) -> String;
    fn row_value(&self, values: &[(Type, String)]) -> String;
    /// The element of the gradients at these indices of capture number `number`.
    fn element(&self, capture: &str, number: usize, index: &[String]) -> String;
    /// A function that takes a number first, with one body per number; `what` says which arguments it has.
    fn numbered(&self, name: &str, what: terms::Shape, bodies: &[String]) -> String;
    fn count(&self, name: &str, count: usize) -> String;
    /// `position` is the number of the capture in the layout.
    fn accessor(&self, decl: &CaptureDecl, position: usize, home: Home) -> String;
    /// `word` is the number of the word of `info` that holds it.
    fn scalar_accessor(&self, decl: &ScalarDecl, word: usize) -> String;
}

/// The lines of a function body that returns `result` of the values' texts.
fn body(
    target: &dyn Target,
    values: &[Expr],
    kept: &HashMap<u128, String>,
    uses: &mut Uses,
    result: impl FnOnce(Vec<String>) -> String,
) -> String {
    // How often each expression is needed, not looking below what the row keeps.
    let mut order = Vec::new();
    let mut count: HashMap<u128, usize> = HashMap::new();
    let mut stack: Vec<(Expr, bool)> = values.iter().rev().map(|e| (e.clone(), false)).collect();
    while let Some((expr, done)) = stack.pop() {
        if done {
            order.push(expr);
            continue;
        }
        let count = count.entry(expr.hash()).or_default();
        *count += 1;
        if *count > 1 {
            continue;
        }
        stack.push((expr.clone(), true));
        if !kept.contains_key(&expr.hash()) && folded(&expr).is_none() {
            stack.extend(expr.args().iter().rev().map(|a| (a.clone(), false)));
        }
    }

    let mut lines = String::new();
    let mut texts: HashMap<u128, (Text, usize)> = HashMap::new();
    let mut names = 0;
    for expr in &order {
        let mut nesting = 0;
        let text = if let Some(name) = kept.get(&expr.hash()) {
            Text::atom(name.as_str())
        } else if let Some(value) = folded(expr) {
            target.constant(value)
        } else {
            let mut args = Vec::with_capacity(expr.args().len());
            for arg in expr.args() {
                let (text, depth) = &texts[&arg.hash()];
                nesting = nesting.max(depth + 1);
                args.push(text.clone());
            }
            match expr.op() {
                Op::Const(value) => target.constant(*value),
                Op::Input(input) => target.input(*input),
                Op::Scalar(decl) => {
                    uses.scalars.insert(decl.clone());
                    target.scalar(&decl.name)
                }
                Op::Gather(decl) => {
                    uses.captures.insert(decl.clone());
                    target.read(&decl.name, &args)
                }
                op => {
                    let call = Call { op, args: &args, of: expr.args()[0].ty(), exprs: expr.args() };
                    target.call(&call, &mut uses.functions)
                }
            }
        };
        let plain = kept.contains_key(&expr.hash())
            || matches!(
                expr.op(),
                Op::Const(_) | Op::Input(Input::Score | Input::Batch | Input::Head | Input::Q | Input::Kv)
            )
            || folded(expr).is_some();
        if !plain && (count[&expr.hash()] > 1 || nesting >= MAX_NESTING) {
            let name = format!("v{names}");
            names += 1;
            lines.push_str(&target.bind(&name, expr.ty(), &text.text));
            texts.insert(expr.hash(), (Text::atom(name), 0));
        } else {
            texts.insert(expr.hash(), (text, nesting));
        }
    }
    // Several stand in one list of arguments.
    let alone = values.len() == 1;
    let values = values
        .iter()
        .map(|e| &texts[&e.hash()].0)
        .map(|text| if alone || text.level != COMPARE { text.text.clone() } else { text.at(ATOM) })
        .collect();
    let _ = writeln!(lines, "  return {};", result(values));
    lines
}

/// The value of an operation on constants. Simplification leaves one only where it overflows, and compilers
/// refuse to compute that.
fn folded(expr: &Expr) -> Option<Value> {
    if expr.args().is_empty() || expr.args().iter().any(|a| a.as_constant().is_none()) {
        return None;
    }
    if matches!(expr.op(), Op::Gather(_)) {
        return None;
    }
    expr.fold()
}

/// What a row keeps: the largest parts that depend on `b`, `h` and `q` alone and cost something.
fn row_values(outputs: &[Expr]) -> Vec<Expr> {
    let fixed = |e: &Expr| e.inputs().fixed_in_row();
    let mut roots: Vec<Expr> = Vec::new();
    let mut add = |e: &Expr| {
        if !roots.contains(e) {
            roots.push(e.clone());
        }
    };
    for output in outputs.iter().filter(|e| fixed(e)) {
        add(output);
    }
    crate::expr::visit(outputs, |expr| {
        if !fixed(expr) {
            expr.args().iter().filter(|a| fixed(a)).for_each(&mut add);
        }
    });
    let mut costs: Vec<(u32, Expr)> = roots.into_iter().map(|e| (cost(&e), e)).collect();
    costs.retain(|(cost, _)| *cost >= WORTH_KEEPING);
    costs.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
    costs.truncate(MAX_ROW_VALUES);
    costs.into_iter().map(|(_, e)| e).collect()
}

/// Roughly how many cycles a value takes.
fn cost(expr: &Expr) -> u32 {
    let mut sum = 0;
    crate::expr::visit(std::slice::from_ref(expr), |e| {
        sum += match e.op() {
            Op::Const(_) | Op::Input(_) | Op::Scalar(_) if e.inputs() != Inputs::only(Input::KvLen) => 0,
            Op::Input(_) | Op::Gather(_) => 8,
            Op::Div | Op::Rem | Op::FloorDiv | Op::FloorMod | Op::Pow | Op::Sin | Op::Cos | Op::Tan => 8,
            Op::Exp | Op::Exp2 | Op::Log | Op::Log2 | Op::Sqrt | Op::Tanh | Op::Sigmoid => 4,
            _ => 1,
        };
    });
    sum
}

/// How many places read captured tensors whose gradients are wanted, by what their index depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TermCounts {
    /// b, h and q at most.
    pub rows: usize,
    /// b, h and kv.
    pub columns: usize,
    /// q and kv.
    pub pairs: usize,
}

impl Mods {
    /// The terms of the slot `terms`, counted.
    ///
    /// # Errors
    /// When the score mod reads no float of a tensor in `terms`.
    pub fn term_counts(&self) -> Result<TermCounts> {
        let score = self.score.clone().unwrap_or_else(|| Expr::input(Input::Score));
        let gradient = Gradient::of(&score)?;
        Ok(Terms::of(&gradient, &self.terms)?.counts())
    }
}
