//! The slot `terms`: gradients of captured tensors, one term per place that reads one.

use std::collections::HashMap;

use super::{Target, Uses, body};
use crate::error::{Error, Result};
use crate::expr::{Expr, GatherGradient, Gradient, Input};

/// The places that read a captured tensor, by what their index depends on.
#[derive(Debug, Default)]
pub(super) struct Terms<'a> {
    /// b, h and q at most.
    rows: Vec<&'a GatherGradient>,
    /// b, h and kv.
    columns: Vec<&'a GatherGradient>,
    /// q and kv.
    pub(super) pairs: Vec<&'a GatherGradient>,
}

/// The arguments of a numbered function.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    /// score, row, b, h, q, kv: a derivative.
    Derivative,
    /// b, h, q: an element.
    Row,
    /// b, h, kv: an element.
    Column,
    /// row, b, h, q, kv: an element.
    Pair,
}

impl<'a> Terms<'a> {
    pub(super) fn of(gradient: &'a Gradient, names: &[String]) -> Result<Terms<'a>> {
        let mut terms = Terms::default();
        for name in names {
            let mut found = false;
            for place in gradient.captures.iter().filter(|g| *g.capture.name == **name) {
                found = true;
                let depends = |input| place.indices.iter().any(|i| i.inputs().contains(input));
                if depends(Input::Score) {
                    return Err(Error::capture(
                        name,
                        "no gradient where its index depends on the score; index by b, h, q and kv",
                    ));
                }
                match (depends(Input::Q), depends(Input::Kv)) {
                    (_, false) => terms.rows.push(place),
                    (false, true) => terms.columns.push(place),
                    (true, true) => terms.pairs.push(place),
                }
            }
            if !found {
                return Err(Error::capture(name, "no gradient: the score_mod does not read it as a float"));
            }
        }
        Ok(terms)
    }

    pub(super) fn counts(&self) -> super::TermCounts {
        super::TermCounts { rows: self.rows.len(), columns: self.columns.len(), pairs: self.pairs.len() }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &'a GatherGradient> + '_ {
        self.rows.iter().chain(&self.columns).chain(&self.pairs).copied()
    }

    /// The text of the slot; `number` gives the number of a capture in the layout.
    pub(super) fn text(
        &self,
        target: &dyn Target,
        number: impl Fn(&GatherGradient) -> Result<usize>,
        kept: &HashMap<u128, String>,
        uses: &mut Uses,
    ) -> Result<String> {
        let mut text = String::new();
        let groups = [("row", &self.rows, Shape::Row), ("column", &self.columns, Shape::Column)];
        let groups = groups.into_iter().chain([("pair", &self.pairs, Shape::Pair)]);
        let mut functions = String::new();
        for (group, places, shape) in groups {
            text += &target.count(&format!("{}_TERMS", group.to_uppercase()), places.len());
            let mut derivatives = Vec::new();
            let mut elements = Vec::new();
            for place in places {
                let d = std::slice::from_ref(&place.d);
                derivatives.push(indented(&body(target, d, kept, uses, |v| v[0].clone())));
                uses.captures.insert(place.capture.clone());
                let number = number(place)?;
                // Only pairs are handed the row.
                let none = HashMap::new();
                let kept: &HashMap<u128, String> = if matches!(shape, Shape::Pair) { kept } else { &none };
                let indices: &[Expr] = &place.indices;
                let element =
                    body(target, indices, kept, uses, |v| target.element(&place.capture.name, number, &v));
                elements.push(indented(&element));
            }
            functions += &target.numbered(&format!("{group}_term"), Shape::Derivative, &derivatives);
            functions += &target.numbered(&format!("{group}_element"), shape, &elements);
        }
        Ok(text + &functions)
    }
}

fn indented(body: &str) -> String {
    body.lines().map(|line| format!("  {line}\n")).collect()
}
