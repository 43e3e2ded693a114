//! The linear form of expressions: every distinct operation once, arguments before users.

use std::collections::HashMap;
use std::fmt;

use super::capture::{Capture, CaptureData, CaptureDecl, Scalar, ScalarDecl};
use super::op::{Kernel, MAX_ARGS, Record};
use super::range::{self, Range, RangeFn};
use super::value::{Column, Element, Float, Lane, Type, Value};
use super::{Expr, Input, Inputs, Op, visit};
use crate::error::{Error, Result};
use crate::threads::Shared;

/// Says what a captured tensor may hold in a box of indices. `block_mask` keeps such summaries.
pub trait CaptureRanges: Shared {
    /// The range of the elements whose index along each dimension lies in `index` (both ends included, already
    /// clamped to the shape).
    fn range(&self, index: &[(i64, i64)]) -> Range;
}

/// What an expression reads besides its inputs: captured tensors, scalars and lengths.
#[derive(Clone)]
pub struct Env<'a> {
    captures: Vec<(&'a Capture, Option<&'a dyn CaptureRanges>)>,
    scalars: &'a [Scalar],
    q_len: i32,
    kv_len: i32,
}

impl fmt::Debug for Env<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.captures.iter().map(|(c, _)| c.name()).collect();
        f.debug_struct("Env")
            .field("captures", &names)
            .field("scalars", &self.scalars)
            .field("q_len", &self.q_len)
            .field("kv_len", &self.kv_len)
            .finish()
    }
}

impl<'a> Env<'a> {
    /// The tensors and scalars of a mask or score mod, with the lengths that `q_len` and `kv_len` give.
    ///
    /// # Errors
    /// When a length does not fit an i32.
    pub fn new(
        captures: &'a [Capture],
        scalars: &'a [Scalar],
        q_len: usize,
        kv_len: usize,
    ) -> Result<Env<'a>> {
        let length = |name: &str, x: usize| {
            i32::try_from(x).map_err(|_| {
                Error::Overflow(format!(
                    "{name} is {x} but indices in masks and score mods are i32: at most {}",
                    i32::MAX
                ))
            })
        };
        Ok(Env {
            captures: captures.iter().map(|c| (c, None)).collect(),
            scalars,
            q_len: length("q_len", q_len)?,
            kv_len: length("kv_len", kv_len)?,
        })
    }

    /// Adds a summary of the capture `name`, from which ranges follow. Without one, only small boxes are looked at.
    #[must_use]
    pub fn with_ranges(mut self, name: &str, ranges: &'a dyn CaptureRanges) -> Env<'a> {
        for (capture, slot) in &mut self.captures {
            if capture.name() == name {
                *slot = Some(ranges);
            }
        }
        self
    }

    /// The same with another `kv_len`, as each batch entry may have its own.
    #[must_use]
    pub fn with_kv_len(mut self, kv_len: i32) -> Env<'a> {
        self.kv_len = kv_len;
        self
    }

    fn capture(&self, decl: &CaptureDecl) -> Result<(&'a Capture, Option<&'a dyn CaptureRanges>)> {
        let found = self.captures.iter().find(|(c, _)| c.name() == &*decl.name);
        match found {
            Some((capture, ranges)) if capture.decl() == *decl => Ok((capture, *ranges)),
            Some((capture, _)) => Err(Error::capture(
                &*decl.name,
                format!(
                    "the expression reads {} of rank {} but the tensor given is {} of shape {:?}",
                    decl.dtype,
                    decl.rank,
                    capture.dtype(),
                    capture.shape()
                ),
            )),
            None => Err(Error::capture(&*decl.name, "the expression reads this tensor but it was not given")),
        }
    }

    /// The shape of the capture that an expression reads.
    pub(crate) fn shape(&self, decl: &CaptureDecl) -> Result<&'a [usize]> {
        Ok(self.capture(decl)?.0.shape())
    }

    fn scalar(&self, decl: &ScalarDecl) -> Result<Value> {
        match self.scalars.iter().find(|s| s.decl() == *decl) {
            Some(scalar) => Ok(scalar.value()),
            None => Err(Error::capture(
                &*decl.name,
                format!("the expression reads this {} scalar but it was not given", decl.ty),
            )),
        }
    }
}

/// One position of the score matrix, with its score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point<F> {
    /// dot(q, k) * scale.
    pub score: F,
    /// Batch index.
    pub b: i32,
    /// Query head.
    pub h: i32,
    /// Query position, `q_offset` included.
    pub q: i32,
    /// Key position.
    pub kv: i32,
}

/// A box of positions: both ends of every range are included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexBox {
    /// Batch indices.
    pub b: (i32, i32),
    /// Query heads.
    pub h: (i32, i32),
    /// Query positions, `q_offset` included.
    pub q: (i32, i32),
    /// Key positions.
    pub kv: (i32, i32),
}

/// One operation of a [`Program`].
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) expr: Expr,
    args: [u32; MAX_ARGS],
    /// Position in `captures` or `scalars`, for the operations that read one.
    source: u32,
    /// Whether an operation that varies along a row reads this one, which does not.
    spread: bool,
}

impl Step {
    fn record<F: Float>(&self) -> Option<Record<F>> {
        let mut types = [Type::Bool; MAX_ARGS];
        for (ty, arg) in types.iter_mut().zip(self.expr.args()) {
            *ty = arg.ty();
        }
        self.expr.op().record::<F>(&types[..self.expr.args().len()])
    }

    pub(crate) fn args(&self) -> &[u32] {
        &self.args[..self.expr.args().len()]
    }
}

/// Expressions in linear form: what they share is computed once.
///
/// Bind it to an [`Env`] and evaluate it at points ([`Program::eval`]), along rows ([`Bound::row`]), or over boxes
/// ([`Ranges::range`]).
#[derive(Debug, Clone)]
pub struct Program {
    pub(crate) steps: Vec<Step>,
    outputs: Vec<u32>,
    captures: Vec<CaptureDecl>,
    scalars: Vec<ScalarDecl>,
}

impl Program {
    /// The program that computes `outputs`.
    pub fn new(outputs: &[Expr]) -> Program {
        let mut steps: Vec<Step> = Vec::new();
        let mut at: HashMap<u128, u32> = HashMap::new();
        let (mut captures, mut scalars) = (Vec::new(), Vec::new());
        let position_of = |list: &mut Vec<CaptureDecl>, decl: &CaptureDecl| {
            list.iter().position(|d| d == decl).unwrap_or_else(|| {
                list.push(decl.clone());
                list.len() - 1
            })
        };
        visit(outputs, |expr| {
            let mut args = [0; MAX_ARGS];
            for (slot, arg) in args.iter_mut().zip(expr.args()) {
                *slot = at[&arg.hash()];
                if arg.inputs().fixed_in_row() && !expr.inputs().fixed_in_row() {
                    steps[*slot as usize].spread = true;
                }
            }
            let source = match expr.op() {
                Op::Gather(decl) => position_of(&mut captures, decl) as u32,
                Op::Scalar(decl) => {
                    let found = scalars.iter().position(|d| d == decl);
                    found.unwrap_or_else(|| {
                        scalars.push(decl.clone());
                        scalars.len() - 1
                    }) as u32
                }
                _ => 0,
            };
            at.insert(expr.hash(), steps.len() as u32);
            steps.push(Step { expr: expr.clone(), args, source, spread: false });
        });
        let outputs: Vec<u32> = outputs.iter().map(|e| at[&e.hash()]).collect();
        for output in &outputs {
            steps[*output as usize].spread = true;
        }
        Program { steps, outputs, captures, scalars }
    }

    /// The number of operations.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// What the outputs depend on.
    pub fn inputs(&self) -> Inputs {
        let outputs = self.outputs.iter().map(|i| self.steps[*i as usize].expr.inputs());
        outputs.fold(Inputs::NONE, Inputs::union)
    }

    /// Prepares evaluation: finds the captures and scalars.
    ///
    /// # Errors
    /// When one is missing or of another type, or when the values of a capture are on a device only.
    pub fn bind<'a, F: Float>(&'a self, env: &Env<'a>) -> Result<Bound<'a, F>> {
        let mut captures = Vec::new();
        for decl in &self.captures {
            let (capture, _) = env.capture(decl)?;
            if let CaptureData::Device(_) = capture.data() {
                return Err(Error::capture(
                    &*decl.name,
                    "the values are on the device only; give host values to evaluate on the CPU",
                ));
            }
            captures.push(capture);
        }
        let scalars = self.scalars.iter().map(|d| env.scalar(d)).collect::<Result<Vec<_>>>()?;
        let mut kernels = Vec::with_capacity(self.steps.len());
        let mut columns = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            kernels.push(step.record::<F>().map(|r| r.kernel));
            columns.push(Column::new(step.expr.ty()));
        }
        Ok(Bound { program: self, kernels, captures, scalars, columns, q_len: env.q_len, kv_len: env.kv_len })
    }

    /// Prepares range analysis: finds the captures, their summaries and the scalars.
    ///
    /// # Errors
    /// When one is missing or of another type. Captures that are on a device only have unknown values.
    pub fn bind_ranges<'a>(&'a self, env: &Env<'a>) -> Result<Ranges<'a>> {
        let captures = self.captures.iter().map(|d| env.capture(d)).collect::<Result<Vec<_>>>()?;
        let scalars = self.scalars.iter().map(|d| env.scalar(d)).collect::<Result<Vec<_>>>()?;
        Ok(Ranges::new(self, captures, &scalars, [env.q_len, env.kv_len]))
    }

    /// The outputs at one point, with `F` (f32 or f64) for f32. To evaluate at many points, [`Program::bind`] once.
    ///
    /// # Errors
    /// As [`Program::bind`].
    pub fn eval<F: Float>(&self, env: &Env<'_>, at: &Point<F>) -> Result<Vec<Lane<F>>> {
        let mut bound = self.bind::<F>(env)?;
        bound.point(at);
        Ok((0..self.outputs.len()).map(|i| bound.output(i).lane(0)).collect())
    }

    /// The ranges of the outputs over `at`. For many boxes, [`Program::bind_ranges`] once.
    ///
    /// # Errors
    /// As [`Program::bind_ranges`].
    pub fn range(&self, env: &Env<'_>, at: &IndexBox) -> Result<Vec<Range>> {
        let mut ranges = self.bind_ranges(env)?;
        ranges.range(at);
        Ok((0..self.outputs.len()).map(|i| ranges.output(i)).collect())
    }
}

/// A [`Program`] ready to evaluate: keeps its columns between calls, so calls do not allocate. One per thread.
pub struct Bound<'a, F> {
    program: &'a Program,
    kernels: Vec<Option<Kernel<F>>>,
    captures: Vec<&'a Capture>,
    scalars: Vec<Value>,
    columns: Vec<Column<F>>,
    q_len: i32,
    kv_len: i32,
}

impl<F> fmt::Debug for Bound<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bound").field("program", &self.program).finish_non_exhaustive()
    }
}

impl<F: Float> Bound<'_, F> {
    /// Evaluates at one point; [`Bound::output`] then has one value.
    pub fn point(&mut self, at: &Point<F>) {
        self.row(at.b, at.h, at.q, at.kv, std::slice::from_ref(&at.score), 1);
    }

    /// Evaluates at `n` keys from `kv0` on of one row; `score` holds the scores there, or is empty when the outputs
    /// do not read them (a missing score is 0). What does not change along the row is computed once.
    pub fn row(&mut self, b: i32, h: i32, q: i32, kv0: i32, score: &[F], n: usize) {
        for (i, step) in self.program.steps.iter().enumerate() {
            let varies = !step.expr.inputs().fixed_in_row();
            let (before, rest) = self.columns.split_at_mut(i);
            let out = &mut rest[0];
            // A constant that already fills its column stays.
            if matches!(step.expr.op(), Op::Const(_)) && out.len() == n {
                continue;
            }
            out.resize(if varies { n } else { 1 });
            match step.expr.op() {
                Op::Const(value) => out.set(Lane::of(*value)),
                Op::Scalar(_) => out.set(Lane::of(self.scalars[step.source as usize])),
                Op::Input(input) => match (input, &mut *out) {
                    (Input::Score, Column::F32(x)) => {
                        let given = score.len().min(n);
                        x[..given].copy_from_slice(&score[..given]);
                        x[given..].fill(F::of(0.0));
                    }
                    (Input::Kv, Column::I32(x)) => {
                        for (j, x) in x.iter_mut().enumerate() {
                            *x = kv0.wrapping_add(j as i32);
                        }
                    }
                    (Input::Batch, out) => out.set(Lane::I32(b)),
                    (Input::Head, out) => out.set(Lane::I32(h)),
                    (Input::Q, out) => out.set(Lane::I32(q)),
                    (Input::QLen, out) => out.set(Lane::I32(self.q_len)),
                    (Input::KvLen, out) => out.set(Lane::I32(self.kv_len)),
                    _ => unreachable!("inputs have the types of Input::ty"),
                },
                Op::Gather(_) => {
                    let mut index: [&[i32]; MAX_ARGS] = [&[]; MAX_ARGS];
                    for (slot, arg) in index.iter_mut().zip(step.args()) {
                        *slot = <i32 as Element<F>>::of(&before[*arg as usize]);
                    }
                    gather(self.captures[step.source as usize], &index[..step.args().len()], out);
                }
                _ => {
                    let first = &before[step.args()[0] as usize];
                    let mut args = [first; MAX_ARGS];
                    for (slot, arg) in args.iter_mut().zip(step.args()) {
                        *slot = &before[*arg as usize];
                    }
                    if let Some(kernel) = &self.kernels[i] {
                        kernel(&args[..step.args().len()], out);
                    }
                }
            }
            if !varies && step.spread && n != 1 {
                out.spread(n);
            }
        }
    }

    /// The values of operation `i` in the last call.
    pub(crate) fn step(&self, i: usize) -> &Column<F> {
        &self.columns[i]
    }

    /// The values of output `i` of the last call, `n` of them.
    pub fn output(&self, i: usize) -> &Column<F> {
        &self.columns[self.program.outputs[i] as usize]
    }
}

/// Reads elements; every index is clamped to its dimension.
fn gather<F: Float>(capture: &Capture, index: &[&[i32]], out: &mut Column<F>) {
    fn each<F, T: Copy, R: Element<F>>(
        values: &[T],
        shape: &[usize],
        index: &[&[i32]],
        out: &mut Column<F>,
        read: impl Fn(T) -> R,
    ) {
        for (j, out) in R::of_mut(out).iter_mut().enumerate() {
            let mut at = 0;
            for (index, dim) in index.iter().zip(shape) {
                at = at * dim + (index[j].max(0) as usize).min(dim - 1);
            }
            *out = read(values[at]);
        }
    }
    let shape = capture.shape();
    match capture.data() {
        CaptureData::F32(x) => each(x, shape, index, out, F::of),
        CaptureData::F16(x) => each(x, shape, index, out, |x| F::of(x.to_f32())),
        CaptureData::BF16(x) => each(x, shape, index, out, |x| F::of(x.to_f32())),
        CaptureData::I32(x) => each(x, shape, index, out, |x| x),
        CaptureData::U32(x) => each(x, shape, index, out, |x| x),
        CaptureData::Bool(x) => each(x, shape, index, out, |x| x),
        CaptureData::Device(_) => unreachable!("bind refuses captures that are on a device only"),
    }
}

/// A [`Program`] ready for range analysis; calls do not allocate. One per thread.
pub struct Ranges<'a> {
    program: &'a Program,
    captures: Vec<(&'a Capture, Option<&'a dyn CaptureRanges>)>,
    steps: Vec<RangeStep>,
    /// The steps that change from box to box.
    varying: Vec<u32>,
    ranges: Vec<Range>,
}

/// How the range of one operation follows from a box: what [`Step`] says, without the expression.
#[derive(Debug, Clone, Copy)]
enum RangeStep {
    /// Known before any box is.
    Fixed,
    Input(Input),
    /// An element of a capture; the indices are at the first `rank` of `args`.
    Gather {
        capture: u32,
        args: [u32; MAX_ARGS],
        rank: u8,
        float: bool,
    },
    Call {
        function: RangeFn,
        args: [u32; 3],
    },
}

impl fmt::Debug for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranges").field("program", &self.program).finish_non_exhaustive()
    }
}

impl<'a> Ranges<'a> {
    fn new(
        program: &'a Program,
        captures: Vec<(&'a Capture, Option<&'a dyn CaptureRanges>)>,
        scalars: &[Value],
        [q_len, kv_len]: [i32; 2],
    ) -> Ranges<'a> {
        let mut out = Ranges {
            program,
            captures,
            steps: Vec::with_capacity(program.steps.len()),
            varying: Vec::new(),
            ranges: Vec::with_capacity(program.steps.len()),
        };
        for (i, step) in program.steps.iter().enumerate() {
            let args = step.args();
            let fixed = args.iter().all(|a| matches!(out.steps[*a as usize], RangeStep::Fixed));
            let (made, range) = match step.expr.op() {
                Op::Const(value) => (RangeStep::Fixed, Range::value(*value)),
                Op::Scalar(_) => (RangeStep::Fixed, Range::value(scalars[step.source as usize])),
                Op::Input(Input::QLen) => (RangeStep::Fixed, Range::value(Value::I32(q_len))),
                Op::Input(Input::KvLen) => (RangeStep::Fixed, Range::value(Value::I32(kv_len))),
                Op::Input(input) => (RangeStep::Input(*input), Range::all(step.expr.ty())),
                Op::Gather(_) => {
                    let float = step.expr.ty() == Type::F32;
                    let rank = args.len() as u8;
                    let made = RangeStep::Gather { capture: step.source, args: step.args, rank, float };
                    (made, Range::all(step.expr.ty()))
                }
                _ => match step.record::<f32>() {
                    Some(record) => {
                        let at = |i: usize| args.get(i).copied().unwrap_or(args[0]);
                        let made = RangeStep::Call { function: record.range, args: [at(0), at(1), at(2)] };
                        (made, Range::all(step.expr.ty()))
                    }
                    None => (RangeStep::Fixed, Range::all(step.expr.ty())),
                },
            };
            out.steps.push(made);
            out.ranges.push(range);
            match made {
                RangeStep::Fixed => {}
                RangeStep::Gather { .. } | RangeStep::Call { .. } if fixed => {
                    out.ranges[i] = out.step(made);
                    out.steps[i] = RangeStep::Fixed;
                }
                _ => out.varying.push(i as u32),
            }
        }
        out
    }

    /// The range of a gather or a call, from those of its arguments.
    fn step(&self, step: RangeStep) -> Range {
        match step {
            RangeStep::Gather { capture, args, rank, float } => {
                let mut index = [(0, 0); MAX_ARGS];
                let (capture, ranges) = self.captures[capture as usize];
                for ((slot, arg), dim) in index.iter_mut().zip(args).zip(capture.shape()) {
                    let range = self.ranges[arg as usize];
                    let last = (dim - 1) as f64;
                    *slot = (range.lo.clamp(0.0, last) as i64, range.hi.clamp(0.0, last) as i64);
                }
                let index = &index[..rank as usize];
                let found = match ranges {
                    Some(ranges) => ranges.range(index),
                    None => scan(capture, index),
                };
                if float { range::float(found.lo, found.hi, found.nan) } else { found }
            }
            RangeStep::Call { function, args } => {
                let [a, b, c] = args.map(|arg| self.ranges[arg as usize]);
                function(a, b, c)
            }
            RangeStep::Fixed | RangeStep::Input(_) => Range::all(Type::F32),
        }
    }

    /// Finds what every operation may give when the position lies in `at` and the score is any number;
    /// returns the range of the first output.
    pub fn range(&mut self, at: &IndexBox) -> Range {
        self.range_with_score(at, Range::all(Type::F32))
    }

    /// The same when the score is known to lie in `score`.
    pub fn range_with_score(&mut self, at: &IndexBox, score: Range) -> Range {
        let varying = std::mem::take(&mut self.varying);
        self.follow(&varying, at, score);
        self.varying = varying;
        self.output(0)
    }

    /// Finds what the operations of an [`Ranges::order`] may give.
    pub(crate) fn range_in(&mut self, order: &[u32], at: &IndexBox) {
        self.follow(order, at, Range::all(Type::F32));
    }

    fn follow(&mut self, order: &[u32], at: &IndexBox, score: Range) {
        let pair = |(lo, hi): (i32, i32)| Range::of(lo.into(), hi.into());
        for &i in order {
            let step = self.steps[i as usize];
            self.ranges[i as usize] = match step {
                RangeStep::Input(Input::Score) => score,
                RangeStep::Input(Input::Batch) => pair(at.b),
                RangeStep::Input(Input::Head) => pair(at.h),
                RangeStep::Input(Input::Q) => pair(at.q),
                RangeStep::Input(_) => pair(at.kv),
                _ => self.step(step),
            };
        }
    }

    /// The operations that the outputs in the set `outputs` (bit `i` for output `i`, of the first 64) follow from and
    /// that change from box to box.
    pub(crate) fn order(&self, outputs: u64) -> Vec<u32> {
        let mut needed = vec![false; self.steps.len()];
        for (i, output) in self.program.outputs.iter().enumerate().take(64) {
            needed[*output as usize] |= outputs >> i & 1 == 1;
        }
        for (i, step) in self.program.steps.iter().enumerate().rev() {
            if needed[i] {
                step.args().iter().for_each(|arg| needed[*arg as usize] = true);
            }
        }
        self.varying.iter().copied().filter(|i| needed[*i as usize]).collect()
    }

    /// Where `input` comes in: the operations, of those that the outputs in the set follow from, that read it and not
    /// `other`, and whose value goes on to one that reads both or is an output.
    pub(crate) fn sources(&self, outputs: u64, input: Input, other: Input) -> Vec<u32> {
        let reads = |i: u32, input| self.program.steps[i as usize].expr.inputs().contains(input);
        let mut found: Vec<u32> = Vec::new();
        let mut seen = vec![false; self.steps.len()];
        let chosen = self.program.outputs.iter().enumerate().take(64).filter(|(i, _)| outputs >> i & 1 == 1);
        let mut left: Vec<u32> = chosen.map(|(_, at)| *at).collect();
        while let Some(i) = left.pop() {
            if std::mem::replace(&mut seen[i as usize], true) || !reads(i, input) {
                continue;
            }
            if reads(i, other) {
                left.extend(self.program.steps[i as usize].args());
            } else {
                found.push(i);
            }
        }
        found
    }

    /// The value of operation `i` in the last call that computed it, if there is only one. A range of f32 does not tell
    /// -0 from 0, so it never has only one.
    pub(crate) fn constant(&self, i: u32) -> Option<f64> {
        let range = self.ranges[i as usize];
        let exact = self.program.steps[i as usize].expr.ty() != Type::F32;
        (exact && range.lo == range.hi).then_some(range.lo)
    }

    /// The ranges of all operations in the last call.
    pub(crate) fn all(&self) -> &[Range] {
        &self.ranges
    }

    /// The range of output `i` in the last call.
    pub fn output(&self, i: usize) -> Range {
        self.ranges[self.program.outputs[i] as usize]
    }
}

/// The range of a box of elements when there is no summary: looks at small boxes, gives up on others.
fn scan(capture: &Capture, index: &[(i64, i64)]) -> Range {
    const FEW: i64 = 64;
    let count = index.iter().fold(1i64, |n, (lo, hi)| n.saturating_mul(hi - lo + 1));
    let all = Range::all(capture.dtype().ty());
    if count > FEW {
        return all;
    }
    let mut found: Option<Range> = None;
    for i in 0..count {
        let (mut rest, mut at, mut stride) = (i, 0, 1);
        for ((lo, hi), dim) in index.iter().zip(capture.shape()).rev() {
            let extent = hi - lo + 1;
            at += (lo + rest % extent) * stride;
            rest /= extent;
            stride *= *dim as i64;
        }
        let Some(value) = capture.value(at as usize) else { return all };
        let value = Range::value(value);
        found = Some(found.map_or(value, |f| f.or(value)));
    }
    found.unwrap_or(all)
}
