//! Runs naga's functions on expressions instead of numbers.
//!
//! A branch on a condition that is not constant runs both sides and merges what they changed with `select`. A
//! `return` is remembered with the condition under which it is reached; at the end of a function the earliest one
//! that is reached wins. Loops run step by step until their condition is constant and false.

mod operations;
mod rules;

use std::collections::HashMap;
use std::ops::Range;

use naga::{
    BinaryOperator, Block, Expression, Function, Handle, Literal, LocalVariable, Module, RelationalFunction,
    ScalarKind, Span, Statement, SwitchCase, SwitchValue, TypeInner, UnaryOperator,
};

use super::{FUNCTIONS, Kind, Source};
use crate::error::{Error, Result};
use crate::expr::capture::{Capture, CaptureDecl, Scalar, ScalarDecl};
use crate::expr::value::{Type, Value};
use crate::expr::{Expr, Input, Op};
use rules::{Exits, OUTSIDE};

/// More statements than any text needs that stays within the limit of operations.
const MAX_STEPS: usize = 200_000;

/// Runs the function `mask_mod` or `score_mod` of `module`.
pub(super) fn run(
    module: &Module,
    source: &Source<'_>,
    captures: &[Capture],
    scalars: &[Scalar],
) -> Result<Expr> {
    let name = source.kind.name();
    let found = module.functions.iter().find(|(_, f)| f.name.as_deref() == Some(name));
    let Some((handle, function)) = found else {
        let message = match module.entry_points.first() {
            Some(entry) => format!("{} is an entry point; declare `{}`", entry.name, source.kind.signature()),
            None => format!("there is no function {name}; declare `{}`", source.kind.signature()),
        };
        return Err(source.error(0..0, message));
    };
    let span = module.functions.get_span(handle);
    let inputs: &[Input] = match source.kind {
        Kind::Mask => &[Input::Batch, Input::Head, Input::Q, Input::Kv],
        Kind::Score => &[Input::Score, Input::Batch, Input::Head, Input::Q, Input::Kv],
    };
    let mut run = Run {
        module,
        source,
        captures: captures.iter().map(Capture::decl).collect(),
        scalars: scalars.iter().map(Scalar::decl).collect(),
        steps: 0,
        calls: 0,
    };
    let signature_fits = function.arguments.len() == inputs.len()
        && function.arguments.iter().zip(inputs).all(|(a, i)| run.ty(a.ty) == Some(i.ty()))
        && function.result.as_ref().and_then(|r| run.ty(r.ty)) == Some(source.kind.result());
    if !signature_fits {
        let message = format!("{name} has another signature than `{}`", source.kind.signature());
        return Err(run.error(span, message));
    }
    for (_, function) in module.functions.iter() {
        run.places(&function.body, Exits { breaks: false, continues: false, returns: true })?;
    }
    let args = inputs.iter().map(|i| Expr::input(*i)).collect();
    match run.call(function, args, span)? {
        Some(expr) => Ok(expr),
        None => Err(run.error(span, format!("{name} returns nothing"))),
    }
}

struct Run<'a> {
    module: &'a Module,
    source: &'a Source<'a>,
    captures: Vec<CaptureDecl>,
    scalars: Vec<ScalarDecl>,
    steps: usize,
    /// Functions that the current place is in, one calling the other.
    calls: usize,
}

/// Values of local variables.
type Locals = HashMap<Handle<LocalVariable>, Expr>;

/// A condition, and the variables of what left a loop or a switch under it.
type Exit = (Expr, Locals);

/// A function while it runs.
struct Frame<'a> {
    function: &'a Function,
    args: Vec<Expr>,
    /// Values that were computed at the place where naga says so.
    values: HashMap<Handle<Expression>, Expr>,
    /// Conditions and values of the returns met so far; the first whose condition holds counts.
    returns: Vec<(Expr, Expr)>,
    /// When the innermost loop is reached at all.
    base: Expr,
    /// What has left by `break` or `continue` since the innermost loop began.
    gone: Expr,
    /// For each loop and switch around the current place: what has left it.
    breaks: Vec<Vec<Exit>>,
    /// For each loop: what has skipped the rest of the current step.
    continues: Vec<Vec<Exit>>,
}

/// What a branch may change.
#[derive(Clone)]
struct State {
    locals: Locals,
    /// No statement after this point is reached.
    ended: bool,
}

/// Functions inside of functions, of which each takes room on the thread's stack.
const MAX_CALLS: usize = 64;

/// Longer loops do not fit the limit of operations.
const MAX_LOOP: usize = 1500;

/// Nor do these where a step is left under a condition that is not constant: it goes into each later step.
const MAX_OPEN_LOOP: usize = 256;

impl Run<'_> {
    fn error(&self, span: Span, message: impl Into<String>) -> Error {
        self.source.error(span.to_range().unwrap_or(0..0), message)
    }

    fn refuse<T>(&self, span: Span, what: &str, instead: &str) -> Result<T> {
        Err(self.error(span, format!("{what} cannot be used in masks and score mods; {instead}")))
    }

    /// The type of the language that a naga type is, if it is one.
    fn ty(&self, handle: Handle<naga::Type>) -> Option<Type> {
        let TypeInner::Scalar(scalar) = self.module.types[handle].inner else { return None };
        match (scalar.kind, scalar.width) {
            (ScalarKind::Float, 4) => Some(Type::F32),
            (ScalarKind::Sint, 4) => Some(Type::I32),
            (ScalarKind::Uint, 4) => Some(Type::U32),
            (ScalarKind::Bool, _) => Some(Type::Bool),
            _ => None,
        }
    }

    fn expect_ty(&self, handle: Handle<naga::Type>, span: Span) -> Result<Type> {
        let ty = &self.module.types[handle];
        match self.ty(handle) {
            Some(ty) => Ok(ty),
            None => {
                let what = match ty.inner {
                    TypeInner::Scalar(_) => "this number type",
                    TypeInner::Vector { .. } => "a vector",
                    TypeInner::Matrix { .. } => "a matrix",
                    TypeInner::Pointer { .. } | TypeInner::ValuePointer { .. } => "a pointer",
                    TypeInner::Array { .. } => "an array",
                    TypeInner::Struct { .. } => "a struct",
                    TypeInner::Image { .. } | TypeInner::Sampler { .. } => "a texture",
                    TypeInner::Atomic(_) => "an atomic",
                    _ => "this type",
                };
                self.refuse(span, what, "use f32, i32, u32 and bool, and capture tables as tensors")
            }
        }
    }

    fn new_expr(&self, op: Op, args: &[Expr], span: Span) -> Result<Expr> {
        Expr::new(op, args).map_err(|error| match error {
            Error::Expression(message) => self.error(span, message),
            other => other,
        })
    }

    fn call(&mut self, function: &Function, args: Vec<Expr>, span: Span) -> Result<Option<Expr>> {
        if self.calls == MAX_CALLS {
            let message = format!("functions call each other more than {MAX_CALLS} deep; join some of them");
            return Err(self.error(span, message));
        }
        self.calls += 1;
        let result = self.call_at(function, args, span);
        self.calls -= 1;
        result
    }

    fn call_at(&mut self, function: &Function, args: Vec<Expr>, span: Span) -> Result<Option<Expr>> {
        if let Some(result) = &function.result {
            self.expect_ty(result.ty, span)?;
        }
        let mut state = State { locals: HashMap::new(), ended: false };
        let mut frame = Frame {
            function,
            args,
            values: HashMap::new(),
            returns: Vec::new(),
            base: Expr::constant(true),
            gone: Expr::constant(false),
            breaks: Vec::new(),
            continues: Vec::new(),
        };
        for (variable, declared) in function.local_variables.iter() {
            let ty = self.expect_ty(declared.ty, function.local_variables.get_span(variable))?;
            let start = match declared.init {
                Some(init) => self.value(&mut frame, &state, init)?,
                None => Expr::constant(Value::zero(ty)),
            };
            state.locals.insert(variable, start);
        }
        self.block(&mut frame, &mut state, &function.body, &Expr::constant(true))?;
        if function.result.is_none() {
            return Ok(None);
        }
        let mut returns = frame.returns.into_iter().rev();
        let (true, Some((_, mut value))) = (state.ended, returns.next()) else {
            let name = function.name.as_deref().unwrap_or("the function");
            return Err(self.error(span, format!("{name} does not return a value on every path")));
        };
        for (condition, earlier) in returns {
            value = self.new_expr(Op::Select, &[condition, earlier, value], span)?;
        }
        Ok(Some(value))
    }

    fn and(&self, a: &Expr, b: &Expr, span: Span) -> Result<Expr> {
        self.new_expr(Op::And, &[a.clone(), b.clone()], span)
    }

    fn or(&self, a: &Expr, b: &Expr, span: Span) -> Result<Expr> {
        self.new_expr(Op::Or, &[a.clone(), b.clone()], span)
    }

    fn not(&self, a: &Expr, span: Span) -> Result<Expr> {
        self.new_expr(Op::Not, std::slice::from_ref(a), span)
    }

    /// The condition under which the current place is reached, within the innermost loop.
    fn reached(&self, frame: &Frame<'_>, path: &Expr, span: Span) -> Result<Expr> {
        self.and(path, &self.not(&frame.gone, span)?, span)
    }

    /// Leaves the innermost loop or switch, or its current step.
    fn leave(
        &self,
        frame: &mut Frame<'_>,
        state: &mut State,
        path: &Expr,
        step: bool,
        span: Span,
    ) -> Result<()> {
        let exit = (self.reached(frame, path, span)?, state.locals.clone());
        frame.gone = self.or(&frame.gone, &exit.0, span)?;
        let list = if step { frame.continues.last_mut() } else { frame.breaks.last_mut() };
        match list {
            Some(list) => list.push(exit),
            None => return Err(self.error(span, OUTSIDE)),
        }
        state.ended = true;
        Ok(())
    }

    /// The variables after what left under conditions meets the rest, which stays where no condition holds;
    /// without a rest the last exit is it.
    fn settle(&self, mut exits: Vec<Exit>, rest: Option<Locals>, span: Span) -> Result<Option<Locals>> {
        let Some(mut locals) = rest.or_else(|| exits.pop().map(|(_, locals)| locals)) else {
            return Ok(None);
        };
        for (condition, exit) in exits.iter().rev() {
            for (variable, value) in &mut locals {
                let args = [condition.clone(), exit[variable].clone(), value.clone()];
                *value = self.new_expr(Op::Select, &args, span)?;
            }
        }
        Ok(Some(locals))
    }

    /// What holds after a branch: `a` where `condition`, else `b`.
    fn merge(&self, condition: &Expr, a: State, b: State, span: Span) -> Result<State> {
        if a.ended {
            return Ok(b);
        }
        if b.ended {
            return Ok(a);
        }
        let choose =
            |x: &Expr, y: &Expr| self.new_expr(Op::Select, &[condition.clone(), x.clone(), y.clone()], span);
        let mut locals = HashMap::new();
        for (variable, x) in &a.locals {
            locals.insert(*variable, choose(x, &b.locals[variable])?);
        }
        Ok(State { locals, ended: false })
    }

    /// `path`: the conditions of the branches around this block, up to the innermost loop.
    fn block(&mut self, frame: &mut Frame<'_>, state: &mut State, block: &Block, path: &Expr) -> Result<()> {
        for (statement, span) in block.span_iter() {
            if state.ended {
                return Ok(());
            }
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Err(self.error(*span, "the text takes too many steps to unroll; shorten its loops"));
            }
            self.statement(frame, state, statement, *span, path)?;
        }
        Ok(())
    }

    fn statement(
        &mut self,
        frame: &mut Frame<'_>,
        state: &mut State,
        statement: &Statement,
        span: Span,
        path: &Expr,
    ) -> Result<()> {
        match statement {
            Statement::Emit(range) => {
                for handle in range.clone() {
                    let value = self.evaluate(frame, state, handle)?;
                    if let Some(value) = value {
                        frame.values.insert(handle, value);
                    }
                }
            }
            Statement::Block(block) => self.block(frame, state, block, path)?,
            Statement::If { condition, accept, reject } => {
                let condition = self.value(frame, state, *condition)?;
                match condition.as_constant() {
                    Some(Value::Bool(true)) => self.block(frame, state, accept, path)?,
                    Some(Value::Bool(false)) => self.block(frame, state, reject, path)?,
                    _ => {
                        let mut yes = state.clone();
                        self.block(frame, &mut yes, accept, &self.and(path, &condition, span)?)?;
                        let not = self.not(&condition, span)?;
                        let mut no = state.clone();
                        self.block(frame, &mut no, reject, &self.and(path, &not, span)?)?;
                        *state = self.merge(&condition, yes, no, span)?;
                    }
                }
            }
            Statement::Switch { selector, cases } => {
                let selector = self.value(frame, state, *selector)?;
                self.switch(frame, state, &selector, cases, span, path)?;
            }
            Statement::Loop { body, continuing, break_if } => {
                self.repeat(frame, state, body, continuing, *break_if, span, path)?;
            }
            Statement::Break => self.leave(frame, state, path, false, span)?,
            Statement::Continue => self.leave(frame, state, path, true, span)?,
            Statement::Return { value } => {
                let reached = self.reached(frame, path, span)?;
                let condition = self.and(&frame.base, &reached, span)?;
                let value = value.map(|value| self.value(frame, state, value)).transpose()?;
                let found = value.as_ref().map(Expr::ty);
                let declared = frame.function.result.as_ref().and_then(|result| self.ty(result.ty));
                // naga adds one without a place where a function ends without a return.
                if found != declared && span.is_defined() {
                    let name = frame.function.name.as_deref().unwrap_or("");
                    let a = if name == self.source.kind.name() { "a " } else { "" };
                    let [found, declared] =
                        [found, declared].map(|ty| ty.map_or("nothing".into(), |ty| ty.to_string()));
                    let message = format!("{a}{name} must be {declared}, but this is {found}");
                    return Err(self.error(span, message));
                }
                state.ended = found == declared;
                frame.returns.extend(value.map(|value| (condition, value)));
            }
            Statement::Store { pointer, value } => {
                let value = self.value(frame, state, *value)?;
                let Expression::LocalVariable(variable) = frame.function.expressions[*pointer] else {
                    let at = frame.function.expressions.get_span(*pointer);
                    return self.refuse(
                        at,
                        "assigning to this",
                        "only local variables of a single value may change",
                    );
                };
                let declared = &frame.function.local_variables[variable];
                let ty = self.expect_ty(declared.ty, span)?;
                if value.ty() != ty {
                    let name = declared.name.as_deref().unwrap_or("the variable");
                    return Err(self.error(span, format!("{name} is {ty} but gets {}", value.ty())));
                }
                state.locals.insert(variable, value);
            }
            Statement::Call { function, arguments, result } => {
                let callee = &self.module.functions[*function];
                let args =
                    arguments.iter().map(|a| self.value(frame, state, *a)).collect::<Result<Vec<Expr>>>()?;
                let value = match self.builtin(callee, &args, span)? {
                    Some(value) => Some(value),
                    None => self.call(callee, args, span)?,
                };
                if let (Some(result), Some(value)) = (result, value) {
                    frame.values.insert(*result, value);
                }
            }
            Statement::Kill => return self.refuse(span, "discard", "a mask returns false"),
            Statement::ControlBarrier(_) | Statement::MemoryBarrier(_) => {
                return self.refuse(span, "a barrier", "every score is computed on its own");
            }
            Statement::ImageStore { .. } | Statement::ImageAtomic { .. } => {
                return self.refuse(span, "a texture", "capture a tensor");
            }
            Statement::Atomic { .. } => {
                return self.refuse(span, "an atomic", "every score is computed on its own");
            }
            Statement::SubgroupBallot { .. }
            | Statement::SubgroupGather { .. }
            | Statement::SubgroupCollectiveOperation { .. } => {
                return self.refuse(span, "a subgroup operation", "every score is computed on its own");
            }
            Statement::WorkGroupUniformLoad { .. }
            | Statement::RayQuery { .. }
            | Statement::RayPipelineFunction(_)
            | Statement::CooperativeStore { .. } => {
                return self.refuse(
                    span,
                    "this statement",
                    "only f32, i32, u32 and bool values are computed",
                );
            }
        }
        Ok(())
    }

    fn switch(
        &mut self,
        frame: &mut Frame<'_>,
        state: &mut State,
        selector: &Expr,
        cases: &[SwitchCase],
        span: Span,
        path: &Expr,
    ) -> Result<()> {
        // Values that lead to one body: those before it fall through.
        let mut branches: Vec<(Option<Expr>, &Block)> = Vec::new();
        let (mut pending, mut default) = (Expr::constant(false), false);
        for case in cases {
            let value = match case.value {
                SwitchValue::I32(x) => Some(Expr::constant(x)),
                SwitchValue::U32(x) => Some(Expr::constant(x)),
                SwitchValue::Default => None,
            };
            match value {
                Some(value) => {
                    let equal = self.new_expr(Op::Eq, &[selector.clone(), value], span)?;
                    pending = self.or(&pending, &equal, span)?;
                }
                None => default = true,
            }
            if !case.fall_through {
                branches.push((if default { None } else { Some(pending) }, &case.body));
                (pending, default) = (Expr::constant(false), false);
            }
        }
        // The default takes what no other case does.
        let mut others = Expr::constant(false);
        for (condition, _) in &branches {
            if let Some(condition) = condition {
                others = self.or(&others, condition, span)?;
            }
        }
        let rest = self.not(&others, span)?;

        let gone = frame.gone.clone();
        let skipped = frame.continues.last().map_or(0, Vec::len);
        frame.breaks.push(Vec::new());
        let start = state.clone();
        let mut merged: Option<State> = None;
        for (condition, body) in branches.iter().rev() {
            let condition = condition.as_ref().unwrap_or(&rest);
            if condition.as_constant() == Some(Value::Bool(false)) {
                continue;
            }
            let mut branch = start.clone();
            self.block(frame, &mut branch, body, &self.and(path, condition, span)?)?;
            merged = Some(match merged {
                None => branch,
                Some(other) => self.merge(condition, branch, other, span)?,
            });
        }
        let merged = merged.unwrap_or(start);
        let exits = frame.breaks.pop().unwrap_or_default();
        let rest = (!merged.ended).then_some(merged.locals);
        match self.settle(exits, rest, span)? {
            Some(locals) => state.locals = locals,
            None => state.ended = true,
        }
        // What has left the switch goes on after it; what has left the loop's step does not.
        frame.gone = gone;
        for i in skipped..frame.continues.last().map_or(0, Vec::len) {
            let condition = frame.continues.last().map(|list| list[i].0.clone());
            if let Some(condition) = condition {
                frame.gone = self.or(&frame.gone, &condition, span)?;
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of naga's statement")]
    fn repeat(
        &mut self,
        frame: &mut Frame<'_>,
        state: &mut State,
        body: &Block,
        continuing: &Block,
        break_if: Option<Handle<Expression>>,
        span: Span,
        path: &Expr,
    ) -> Result<()> {
        let reached = self.reached(frame, path, span)?;
        let base = self.and(&frame.base, &reached, span)?;
        let base = std::mem::replace(&mut frame.base, base);
        let gone = std::mem::replace(&mut frame.gone, Expr::constant(false));
        let always = Expr::constant(true);
        frame.breaks.push(Vec::new());
        for step in 0.. {
            let open = frame.gone.as_constant().is_none();
            let steps = if open { MAX_OPEN_LOOP } else { MAX_LOOP };
            if step > steps {
                let message = format!(
                    "this loop does not end after {steps} steps; its condition must depend on constants alone"
                );
                return Err(self.error(span, message));
            }
            frame.continues.push(Vec::new());
            self.block(frame, state, body, &always)?;
            let skipped = frame.continues.pop().unwrap_or_default();
            let rest = (!state.ended).then(|| state.locals.clone());
            let Some(locals) = self.settle(skipped, rest, span)? else { break };
            *state = State { locals, ended: false };
            // Those who skipped the rest of this step are back.
            frame.gone = Expr::constant(false);
            for i in 0..frame.breaks.last().map_or(0, Vec::len) {
                if let Some(condition) = frame.breaks.last().map(|list| list[i].0.clone()) {
                    frame.gone = self.or(&frame.gone, &condition, span)?;
                }
            }
            self.block(frame, state, continuing, &always)?;
            if let Some(condition) = break_if {
                let condition = self.value(frame, state, condition)?;
                if condition.as_constant() != Some(Value::Bool(false)) {
                    self.leave(frame, state, &condition, false, span)?;
                    state.ended = false;
                }
            }
            if frame.gone.as_constant() == Some(Value::Bool(true)) {
                break;
            }
        }
        let exits = frame.breaks.pop().unwrap_or_default();
        match self.settle(exits, None, span)? {
            Some(locals) => *state = State { locals, ended: false },
            None => state.ended = true,
        }
        (frame.base, frame.gone) = (base, gone);
        Ok(())
    }

    fn value(&mut self, frame: &mut Frame<'_>, state: &State, handle: Handle<Expression>) -> Result<Expr> {
        if let Some(value) = frame.values.get(&handle) {
            return Ok(value.clone());
        }
        match self.evaluate(frame, state, handle)? {
            Some(value) => Ok(value),
            None => {
                let span = frame.function.expressions.get_span(handle);
                self.refuse(span, "a pointer", "use values")
            }
        }
    }

    /// The value of an expression; nothing for a pointer to a variable, which only loads and stores use.
    fn evaluate(
        &mut self,
        frame: &mut Frame<'_>,
        state: &State,
        handle: Handle<Expression>,
    ) -> Result<Option<Expr>> {
        let function = frame.function;
        let span = function.expressions.get_span(handle);
        let value = match &function.expressions[handle] {
            Expression::LocalVariable(_) | Expression::GlobalVariable(_) => return Ok(None),
            Expression::FunctionArgument(i) => frame.args[*i as usize].clone(),
            Expression::Load { pointer } => match function.expressions[*pointer] {
                Expression::LocalVariable(variable) => state.locals[&variable].clone(),
                Expression::GlobalVariable(variable) => {
                    let name = self.module.global_variables[variable].name.as_deref().unwrap_or("");
                    self.global(name, span)?
                }
                _ => return self.refuse(span, "an element of an array or struct", "capture a tensor"),
            },
            Expression::CallResult(_) => return Err(self.error(span, "this call has no result")),
            Expression::Literal(_) | Expression::Constant(_) | Expression::ZeroValue(_) => {
                self.constant(&function.expressions, handle)?
            }
            Expression::Override(_) => return self.refuse(span, "an override", "use a named scalar"),
            Expression::Unary { op, expr } => {
                let a = self.value(frame, state, *expr)?;
                let op = if *op == UnaryOperator::Negate {
                    Op::Neg
                } else {
                    self.logical(&a, *op == UnaryOperator::LogicalNot, span)?;
                    Op::Not
                };
                self.new_expr(op, &[a], span)?
            }
            Expression::Binary { op, left, right } => {
                let a = self.value(frame, state, *left)?;
                let b = self.value(frame, state, *right)?;
                let by = &function.expressions[*right];
                if matches!(by, Expression::Literal(_) | Expression::Constant(_) | Expression::ZeroValue(_)) {
                    use BinaryOperator::{Divide, Modulo, ShiftLeft, ShiftRight};
                    let wrong = match b.as_constant() {
                        Some(Value::I32(0) | Value::U32(0)) => matches!(op, Divide | Modulo),
                        Some(Value::U32(32..)) => matches!(op, ShiftLeft | ShiftRight),
                        _ => false,
                    };
                    if wrong {
                        return Err(self.error(span, "nothing can be divided by 0 or shifted by 32 or more"));
                    }
                }
                self.binary(*op, a, b, span)?
            }
            Expression::Select { condition, accept, reject } => {
                let condition = self.value(frame, state, *condition)?;
                let yes = self.value(frame, state, *accept)?;
                let no = self.value(frame, state, *reject)?;
                self.new_expr(Op::Select, &[condition, yes, no], span)?
            }
            Expression::Relational { fun, argument } => match fun {
                RelationalFunction::All | RelationalFunction::Any => {
                    let a = self.value(frame, state, *argument)?;
                    self.logical(&a, true, span)?;
                    a
                }
                RelationalFunction::IsNan | RelationalFunction::IsInf => {
                    return self.refuse(
                        span,
                        "a test for NaN or infinity",
                        "GPUs need not keep them: select by the input",
                    );
                }
            },
            Expression::Math { fun, arg, arg1, arg2, arg3 } => {
                let mut args = vec![self.value(frame, state, *arg)?];
                for arg in [arg1, arg2, arg3].into_iter().flatten() {
                    args.push(self.value(frame, state, *arg)?);
                }
                self.math(*fun, &args, span)?
            }
            Expression::As { expr, kind, convert } => {
                let a = self.value(frame, state, *expr)?;
                self.convert(a, *kind, *convert, span)?
            }
            Expression::Compose { .. } | Expression::Splat { .. } | Expression::Swizzle { .. } => {
                return self.refuse(
                    span,
                    "a vector, array or struct",
                    "use single values, and capture tables as tensors",
                );
            }
            Expression::Access { .. } | Expression::AccessIndex { .. } => {
                return self.refuse(span, "indexing", "captured tensors are called: table(i, j)");
            }
            Expression::ImageSample { .. } | Expression::ImageLoad { .. } | Expression::ImageQuery { .. } => {
                return self.refuse(span, "a texture", "capture a tensor");
            }
            Expression::Derivative { .. } => {
                return self.refuse(span, "a screen derivative", "every score is computed on its own");
            }
            Expression::AtomicResult { .. }
            | Expression::WorkGroupUniformLoadResult { .. }
            | Expression::ArrayLength(_)
            | Expression::RayQueryVertexPositions { .. }
            | Expression::RayQueryProceedResult
            | Expression::RayQueryGetIntersection { .. }
            | Expression::SubgroupBallotResult
            | Expression::SubgroupOperationResult { .. }
            | Expression::CooperativeLoad { .. }
            | Expression::CooperativeMultiplyAdd { .. } => {
                return self.refuse(
                    span,
                    "this operation",
                    "only f32, i32, u32 and bool values are computed",
                );
            }
        };
        Ok(Some(value))
    }

    fn constant(&self, arena: &naga::Arena<Expression>, handle: Handle<Expression>) -> Result<Expr> {
        let span = arena.get_span(handle);
        let value = match &arena[handle] {
            Expression::Literal(literal) => match literal {
                Literal::F32(x) => Value::F32(*x),
                Literal::I32(x) => Value::I32(*x),
                Literal::U32(x) => Value::U32(*x),
                Literal::Bool(x) => Value::Bool(*x),
                Literal::AbstractFloat(x) => Value::F32(*x as f32),
                Literal::AbstractInt(x) => match i32::try_from(*x) {
                    Ok(x) => Value::I32(x),
                    Err(_) => return Err(self.error(span, format!("{x} does not fit an i32"))),
                },
                Literal::F64(_) | Literal::F16(_) => {
                    return self.refuse(span, "f16 or f64", "scores are computed in f32");
                }
                Literal::U64(_) | Literal::I64(_) | Literal::U16(_) | Literal::I16(_) => {
                    return self.refuse(span, "16-bit or 64-bit integers", "use i32 or u32");
                }
            },
            Expression::ZeroValue(ty) => Value::zero(self.expect_ty(*ty, span)?),
            Expression::Constant(constant) => {
                return self.constant(&self.module.global_expressions, self.module.constants[*constant].init);
            }
            _ => {
                return self.refuse(
                    span,
                    "this constant",
                    "use f32, i32, u32 or bool, and capture tables as tensors",
                );
            }
        };
        Ok(Expr::constant(value))
    }

    fn global(&self, name: &str, span: Span) -> Result<Expr> {
        match name {
            "q_len" => return Ok(Expr::input(Input::QLen)),
            "kv_len" => return Ok(Expr::input(Input::KvLen)),
            _ => {}
        }
        match self.scalars.iter().find(|s| &*s.name == name) {
            Some(decl) => Ok(Expr::scalar(decl.clone())),
            None => self.refuse(
                span,
                &format!("the module-scope variable {name}"),
                "use const, a named scalar, or capture a tensor",
            ),
        }
    }

    /// A call of a captured tensor or of a function of the prelude.
    fn builtin(&self, callee: &Function, args: &[Expr], span: Span) -> Result<Option<Expr>> {
        let name = callee.name.as_deref().unwrap_or("");
        if let Some(decl) = self.captures.iter().find(|c| &*c.name == name) {
            return self.new_expr(Op::Gather(decl.clone()), args, span).map(Some);
        }
        self.fits(callee, args, span)?;
        // A function of the text may have the name of one of ours, and then it is meant.
        let declared = FUNCTIONS.iter().any(|(function, _)| *function == name);
        let own = declared && self.is_prelude(callee);
        if !own {
            return Ok(None);
        }
        let op = match name {
            "floor_div" => Op::FloorDiv,
            "floor_mod" => Op::FloorMod,
            "wrapping_add" | "wrapping_add_u32" => Op::WrappingAdd,
            "wrapping_sub" | "wrapping_sub_u32" => Op::WrappingSub,
            "wrapping_mul" | "wrapping_mul_u32" => Op::WrappingMul,
            "wrapping_neg" => Op::WrappingNeg,
            "sigmoid" => Op::Sigmoid,
            _ => return Ok(None),
        };
        self.new_expr(op, args, span).map(Some)
    }

    /// Whether a function is declared after the text.
    fn is_prelude(&self, function: &Function) -> bool {
        let found = self.module.functions.iter().find(|(_, f)| f.name == function.name);
        let range: Range<usize> =
            found.and_then(|(handle, _)| self.module.functions.get_span(handle).to_range()).unwrap_or(0..0);
        range.start >= self.source.full.len()
    }
}
