//! Masks and score mods: an expression with the tensors and scalars it reads.

use std::ops::{BitAnd, BitOr, Not};

use super::capture::{Capture, Scalar};
use super::value::{Type, Value};
use super::views::{Bool, F32, Index, Score, Term, View};
use super::{Expr, Gradient, Input, MAX_NODES, Op};
use crate::error::{Error, Result};

macro_rules! modification {
    ($name:ident) => {
        impl $name {
            /// The expression.
            pub fn expr(&self) -> &Expr {
                &self.0.expr
            }

            /// The captured tensors, by name.
            pub fn captures(&self) -> &[Capture] {
                &self.0.captures
            }

            /// The run-time scalars, by name.
            pub fn scalars(&self) -> &[Scalar] {
                &self.0.scalars
            }

            /// The content hash of the expression: stable, without shapes and values of captures and without
            /// values of scalars.
            pub fn hash(&self) -> u128 {
                self.0.expr.hash()
            }

            /// Reports the first mistake made while it was written. Every operation of this crate calls it.
            ///
            /// # Errors
            /// A wrong number of capture indices, two captures of one name, or too many operations.
            pub fn check(&self) -> Result<()> {
                check(&self.0)
            }

            /// The same with another tensor in place of the capture of that name.
            ///
            /// # Errors
            /// When there is no capture of that name, or its type or rank differ.
            pub fn with_capture(&self, capture: impl Into<Capture>) -> Result<Self> {
                let mut new = self.clone();
                replace_capture(&mut new.0, capture.into())?;
                Ok(new)
            }

            /// The same with the captured tensor `from` called `to`, so that it can be combined with another
            /// that has its name.
            ///
            /// # Errors
            /// When there is no capture `from`, there is one `to` already, or `to` is no identifier.
            ///
            /// ```
            /// use flexattn::masks;
            ///
            /// let [book, chapter] = [masks::document(&[0, 0, 0, 1]), masks::document(&[0, 0, 1, 2])];
            /// let both = book & chapter.rename_capture("doc", "chapter")?;
            /// assert_eq!(both.captures().len(), 2);
            /// # Ok::<(), flexattn::Error>(())
            /// ```
            pub fn rename_capture(&self, from: &str, to: &str) -> Result<Self> {
                let mut new = self.clone();
                rename_capture(&mut new.0, from, to)?;
                Ok(new)
            }

            /// The same with another value of the scalar of that name. Costs no new kernel.
            ///
            /// # Errors
            /// When there is no scalar of that name, or its type differs.
            pub fn with_scalar(&self, scalar: impl Into<Scalar>) -> Result<Self> {
                let mut new = self.clone();
                replace_scalar(&mut new.0, scalar.into())?;
                Ok(new)
            }
        }
    };
}

/// Which scores are kept: an expression of type bool over `b`, `h`, `q`, `kv`.
///
/// Masks combine with `&`, `|` and `!`.
#[derive(Debug, Clone)]
pub struct MaskMod(Term);

modification!(MaskMod);

impl MaskMod {
    /// A mask from a closure that says whether a position is kept.
    ///
    /// The closure runs once and builds an expression, so comparisons are methods (`eq`, `ne`, `lt`, `le`, `gt`, `ge`)
    /// and `&`, `|` and `!` combine their results; Rust's `==`, `<`, `&&` and `if` do not apply.
    ///
    /// ```
    /// use flexattn::MaskMod;
    ///
    /// let causal = MaskMod::new(|i| i.q().ge(i.kv()));
    /// assert_eq!(causal.expr().to_string(), "q >= kv");
    /// let window = MaskMod::new(|i| i.q().ge(i.kv()) & !(i.q() - i.kv()).ge(256) | i.kv().eq(0));
    /// assert!(window.check().is_ok());
    /// ```
    pub fn new(f: impl FnOnce(&Index) -> Bool) -> MaskMod {
        MaskMod(f(&Index::new()).term().clone())
    }

    /// A mask from an expression and what it reads.
    ///
    /// # Errors
    /// When the expression is no bool, reads the score, or reads a capture or scalar that is not given.
    pub fn from_expr(expr: Expr, captures: &[Capture], scalars: &[Scalar]) -> Result<MaskMod> {
        if expr.inputs().contains(Input::Score) {
            return Err(Error::Expression(
                "a mask_mod cannot read the score; select in the score_mod".into(),
            ));
        }
        from_expr(expr, Type::Bool, "mask_mod", captures, scalars).map(MaskMod)
    }

    /// A mask that [`MaskMod::check`] refuses with this error: how a function that gives a mask reports
    /// an argument that it does not take.
    pub(crate) fn mistaken(error: Error) -> MaskMod {
        MaskMod(Term { error: Some(error), ..Term::constant(false) })
    }

    /// This mask at another position: the way to wrap a mask, for example per document.
    ///
    /// ```
    /// use flexattn::MaskMod;
    ///
    /// let causal = MaskMod::new(|i| i.q().ge(i.kv()));
    /// let shifted = MaskMod::new(|i| causal.at(&i.clone().with_q(i.q() + 32)));
    /// assert_eq!(shifted.expr().to_string(), "q + 32 >= kv");
    /// ```
    pub fn at(&self, index: &Index) -> Bool {
        Bool::from_term(substitute(&self.0, None, index))
    }
}

impl BitAnd for MaskMod {
    type Output = MaskMod;

    fn bitand(self, other: MaskMod) -> MaskMod {
        MaskMod(Term::apply(Op::And, &[&self.0, &other.0], Type::Bool))
    }
}

impl BitOr for MaskMod {
    type Output = MaskMod;

    fn bitor(self, other: MaskMod) -> MaskMod {
        MaskMod(Term::apply(Op::Or, &[&self.0, &other.0], Type::Bool))
    }
}

impl Not for MaskMod {
    type Output = MaskMod;

    fn not(self) -> MaskMod {
        MaskMod(Term::apply(Op::Not, &[&self.0], Type::Bool))
    }
}

/// How scores change before the softmax: an expression of type f32 over `score`, `b`, `h`, `q`, `kv`.
#[derive(Debug, Clone)]
pub struct ScoreMod(Term);

modification!(ScoreMod);

impl ScoreMod {
    /// A score mod from a closure that gives the new score.
    ///
    /// ```
    /// use flexattn::ScoreMod;
    ///
    /// let softcap = ScoreMod::new(|s| (s.score() / 20.0).tanh() * 20.0);
    /// assert_eq!(softcap.expr().to_string(), "tanh(score / 20.0) * 20.0");
    /// ```
    pub fn new(f: impl FnOnce(&Score) -> F32) -> ScoreMod {
        ScoreMod(f(&Score::new()).term().clone())
    }

    /// A score mod from an expression and what it reads.
    ///
    /// # Errors
    /// When the expression is no f32, or reads a capture or scalar that is not given.
    pub fn from_expr(expr: Expr, captures: &[Capture], scalars: &[Scalar]) -> Result<ScoreMod> {
        from_expr(expr, Type::F32, "score_mod", captures, scalars).map(ScoreMod)
    }

    /// The derivative: with respect to the score, and at each place where a float capture is read.
    ///
    /// # Errors
    /// As [`ScoreMod::check`], and when the derivative has too many operations.
    pub fn gradient(&self) -> Result<Gradient> {
        self.check()?;
        Gradient::of(self.expr())
    }

    /// A score mod that [`ScoreMod::check`] refuses with this error.
    pub(crate) fn mistaken(error: Error) -> ScoreMod {
        ScoreMod(Term { error: Some(error), ..Term::constant(0.0f32) })
    }

    /// This score mod on another score and position.
    pub fn at(&self, score: &Score) -> F32 {
        F32::from_term(substitute(&self.0, Some(score.score().term()), score))
    }

    /// First this, then `other` on the result.
    ///
    /// ```
    /// use flexattn::ScoreMod;
    ///
    /// let twice = ScoreMod::new(|s| s.score() * 2.0);
    /// let shifted = ScoreMod::new(|s| s.score() + 1.0);
    /// assert_eq!(twice.then(&shifted).expr().to_string(), "score * 2.0 + 1.0");
    /// ```
    pub fn then(&self, other: &ScoreMod) -> ScoreMod {
        let score = Score::new().with_score(F32::from_term(self.0.clone()));
        ScoreMod(other.at(&score).term().clone())
    }
}

fn check(term: &Term) -> Result<()> {
    if let Some(error) = &term.error {
        return Err(error.clone());
    }
    let nodes = term.expr.nodes();
    if nodes > MAX_NODES {
        return Err(Error::Expression(format!(
            "the expression has {nodes} operations after unrolling but at most {MAX_NODES} are allowed; capture a table"
        )));
    }
    Ok(())
}

fn from_expr(expr: Expr, ty: Type, what: &str, captures: &[Capture], scalars: &[Scalar]) -> Result<Term> {
    if expr.ty() != ty {
        return Err(Error::Expression(format!("a {what} must be {ty}, but this is {}: {expr}", expr.ty())));
    }
    let mut term = Term::new(expr);
    for decl in term.expr.captures() {
        let Some(capture) = captures.iter().find(|c| c.name() == &*decl.name) else {
            return Err(Error::Capture {
                name: decl.name.to_string(),
                message: format!("the {what} reads it but no such captured tensor was given"),
            });
        };
        if capture.decl() != decl {
            return Err(Error::Capture {
                name: decl.name.to_string(),
                message: format!(
                    "the {what} reads {} of rank {} but the tensor given is {} of rank {}",
                    decl.dtype,
                    decl.rank,
                    capture.dtype(),
                    capture.shape().len()
                ),
            });
        }
        term = term.with_capture(capture);
    }
    for decl in term.expr.scalars() {
        let Some(scalar) = scalars.iter().find(|s| s.decl() == decl) else {
            return Err(Error::Capture {
                name: decl.name.to_string(),
                message: format!("the {what} reads this {} scalar but no such scalar was given", decl.ty),
            });
        };
        term = term.with_scalar(scalar);
    }
    check(&term)?;
    Ok(term)
}

fn replace_capture(term: &mut Term, new: Capture) -> Result<()> {
    let Some(old) = term.captures.iter_mut().find(|c| c.name() == new.name()) else {
        return Err(Error::Capture {
            name: new.name().to_owned(),
            message: "no captured tensor of this name is read".to_owned(),
        });
    };
    if old.decl() != new.decl() {
        return Err(Error::Capture {
            name: new.name().to_owned(),
            message: format!(
                "a {} tensor of rank {} cannot replace a {} tensor of rank {}",
                new.dtype(),
                new.shape().len(),
                old.dtype(),
                old.shape().len()
            ),
        });
    }
    *old = new;
    Ok(())
}

fn rename_capture(term: &mut Term, from: &str, to: &str) -> Result<()> {
    if from != to && term.captures.iter().any(|c| c.name() == to) {
        return Err(Error::capture(to, "another captured tensor has this name; take a third"));
    }
    let Some(old) = term.captures.iter_mut().find(|c| c.name() == from) else {
        return Err(Error::capture(from, "no captured tensor of this name is read"));
    };
    *old = Capture::new(to, old.dtype(), old.shape(), old.data().clone())?;
    term.captures.sort_by(|a, b| a.name().cmp(b.name()));
    term.expr = term.expr.rename_capture(from, to)?;
    Ok(())
}

fn replace_scalar(term: &mut Term, new: Scalar) -> Result<()> {
    let Some(old) = term.scalars.iter_mut().find(|s| s.name() == new.name()) else {
        return Err(Error::Capture {
            name: new.name().to_owned(),
            message: "no scalar of this name is read".to_owned(),
        });
    };
    if old.decl() != new.decl() {
        return Err(Error::Capture {
            name: new.name().to_owned(),
            message: format!("it is {} and cannot become {}", old.value().ty(), new.value().ty()),
        });
    }
    *old = new;
    Ok(())
}

/// `term` with `score` and the indices of `index` in place of the inputs.
fn substitute(term: &Term, score: Option<&Term>, index: &Index) -> Term {
    let (batch, head, q, kv) = (index.batch(), index.head(), index.q(), index.kv());
    let with = |input| match input {
        Input::Score => score,
        Input::Batch => Some(batch.term()),
        Input::Head => Some(head.term()),
        Input::Q => Some(q.term()),
        Input::Kv => Some(kv.term()),
        Input::QLen | Input::KvLen => None,
    };
    let mut out = match term.expr.replace_inputs(|input| with(input).map(|t| t.expr.clone())) {
        Ok(expr) => Term::new(expr),
        Err(error) => Term { error: Some(error), ..Term::constant(Value::zero(term.expr.ty())) },
    };
    out.join(term);
    for input in Input::ALL {
        if let Some(replacement) = with(input).filter(|_| term.expr.inputs().contains(input)) {
            out.join(replacement);
        }
    }
    out
}
