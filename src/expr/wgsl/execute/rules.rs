//! What WGSL forbids and naga leaves to its validator, which does not run here.

use naga::{Block, Function, Span, Statement, SwitchCase, SwitchValue};

use super::Run;
use crate::error::Result;
use crate::expr::Expr;
use crate::expr::value::Type;

/// Of `break`, `continue` and `return`.
pub(super) const OUTSIDE: &str = "this stands outside of a loop's body; move it into one";

/// What may leave a block.
#[derive(Clone, Copy)]
pub(super) struct Exits {
    pub(super) breaks: bool,
    pub(super) continues: bool,
    pub(super) returns: bool,
}

impl Run<'_> {
    /// Refuses arguments that are not those that a function declares.
    pub(super) fn fits(&self, function: &Function, args: &[Expr], span: Span) -> Result<()> {
        let (given, declared) = (args.len(), function.arguments.len());
        let name = function.name.as_deref().unwrap_or("");
        if given != declared {
            return Err(self.error(span, format!("{name} has {declared} parameters but gets {given}")));
        }
        for (arg, declared) in args.iter().zip(&function.arguments) {
            let ty = self.expect_ty(declared.ty, span)?;
            if arg.ty() != ty {
                let parameter = declared.name.as_deref().unwrap_or("");
                let message = format!("{parameter} of {name} is {ty} but gets {}", arg.ty());
                return Err(self.error(span, message));
            }
        }
        Ok(())
    }

    /// Refuses what leaves a place that WGSL lets nothing leave, and switches that do not say what happens.
    pub(super) fn places(&self, block: &Block, exits: Exits) -> Result<()> {
        for (statement, span) in block.span_iter() {
            let message = match statement {
                Statement::Block(block) => {
                    self.places(block, exits)?;
                    continue;
                }
                Statement::If { accept, reject, .. } => {
                    self.places(accept, exits)?;
                    self.places(reject, exits)?;
                    continue;
                }
                Statement::Loop { body, continuing, .. } => {
                    self.places(body, Exits { breaks: true, continues: true, ..exits })?;
                    self.places(continuing, Exits { breaks: false, continues: false, returns: false })?;
                    continue;
                }
                Statement::Switch { cases, .. } => {
                    for case in cases {
                        self.places(&case.body, Exits { breaks: true, ..exits })?;
                    }
                    let among = |cases: &[SwitchCase], value| cases.iter().any(|case| case.value == value);
                    if cases.iter().enumerate().any(|(i, case)| among(&cases[..i], case.value)) {
                        "this switch has a case twice; remove one"
                    } else if among(cases, SwitchValue::Default) {
                        continue;
                    } else {
                        "this switch has no default; add `default: {}`"
                    }
                }
                Statement::Break if !exits.breaks => OUTSIDE,
                Statement::Continue if !exits.continues => OUTSIDE,
                Statement::Return { .. } if !exits.returns => OUTSIDE,
                _ => continue,
            };
            return Err(self.error(*span, message));
        }
        Ok(())
    }

    /// Refuses what is bool where it must not be, or the other way round.
    pub(super) fn logical(&self, a: &Expr, logical: bool, span: Span) -> Result<()> {
        if (a.ty() == Type::Bool) == logical {
            return Ok(());
        }
        let message = format!("this is {}; `!`, `any` and `all` take bool, `~` and bitcast do not", a.ty());
        Err(self.error(span, message))
    }
}
