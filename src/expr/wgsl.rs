//! Masks and score mods written as WGSL text.
//!
//! naga's front end parses the text; `execute` then runs naga's functions on expressions instead of numbers,
//! and what comes out is an [`Expr`]. What the text may call besides WGSL's own functions (captured tensors,
//! scalars, `floor_div`, ...) is declared in a prelude that stands AFTER the text, so that positions hold.

mod execute;

use std::fmt::Write;
use std::ops::Range;

use super::capture::{Capture, Scalar};
use super::mods::{MaskMod, ScoreMod};
use super::value::Type;
use super::{Expr, MAX_NODES};
use crate::error::{Error, ParseError, Result};

/// Functions that every text may call: name, and parameters, result and body as WGSL declares them.
const FUNCTIONS: &[(&str, &str)] = &[
    ("floor_div", "(a: i32, b: i32) -> i32 { return a; }"),
    ("floor_mod", "(a: i32, b: i32) -> i32 { return a; }"),
    ("wrapping_add", "(a: i32, b: i32) -> i32 { return a; }"),
    ("wrapping_sub", "(a: i32, b: i32) -> i32 { return a; }"),
    ("wrapping_mul", "(a: i32, b: i32) -> i32 { return a; }"),
    ("wrapping_neg", "(a: i32) -> i32 { return a; }"),
    ("wrapping_add_u32", "(a: u32, b: u32) -> u32 { return a; }"),
    ("wrapping_sub_u32", "(a: u32, b: u32) -> u32 { return a; }"),
    ("wrapping_mul_u32", "(a: u32, b: u32) -> u32 { return a; }"),
    ("sigmoid", "(a: f32) -> f32 { return a; }"),
];

/// What a text has to be.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Mask,
    Score,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Mask => "mask_mod",
            Kind::Score => "score_mod",
        }
    }

    fn signature(self) -> &'static str {
        match self {
            Kind::Mask => "fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool",
            Kind::Score => "fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32",
        }
    }

    fn result(self) -> Type {
        match self {
            Kind::Mask => Type::Bool,
            Kind::Score => Type::F32,
        }
    }
}

impl MaskMod {
    /// A mask from WGSL text: `fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool { ... }` with what it needs
    /// around it, or just the body, or just the expression.
    ///
    /// Captured tensors are called by name with one i32 per dimension, scalars are read by name. Locals, `if`,
    /// `switch`, early `return`, other functions and pointers to locals, and loops of every kind that end after a
    /// constant number of steps are possible. Vectors, arrays, structs, textures and module-scope variables are not.
    ///
    /// ```
    /// use flexattn::{Capture, MaskMod};
    ///
    /// let doc = Capture::i32("doc", &[0, 0, 1, 1, 1], &[5])?;
    /// let mask = MaskMod::from_wgsl("q >= kv && doc(q) == doc(kv)", &[doc.into()], &[])?;
    /// assert_eq!(mask.expr().to_string(), "(q >= kv) & (doc(q) == doc(kv))");
    ///
    /// let error = MaskMod::from_wgsl("q >= kvv", &[], &[]).unwrap_err();
    /// assert!(error.to_string().starts_with("line 1, column 6: "));
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Parse`] with line, column and the place in the text, when it is no valid mask;
    /// [`Error::Capture`] when a tensor or scalar is given that it does not name ([`text_reads`]).
    pub fn from_wgsl(text: &str, captures: &[Capture], scalars: &[Scalar]) -> Result<MaskMod> {
        let expr = parse(text, Kind::Mask, captures, scalars)?;
        MaskMod::from_expr(expr, captures, scalars)
    }
}

impl ScoreMod {
    /// A score mod from WGSL text: `fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 { ... }` with
    /// what it needs around it, or just the body, or just the expression. See [`MaskMod::from_wgsl`].
    ///
    /// ```
    /// use flexattn::{Capture, ScoreMod};
    ///
    /// let slope = Capture::f32("slope", &[0.5, 0.25], &[2])?;
    /// let alibi = ScoreMod::from_wgsl("score + slope(h) * f32(kv - q)", &[slope.into()], &[])?;
    /// assert_eq!(alibi.expr().to_string(), "score + slope(h) * f32(kv - q)");
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Parse`] with line, column and the place in the text, when it is no valid score mod;
    /// [`Error::Capture`] when a tensor or scalar is given that it does not name ([`text_reads`]).
    pub fn from_wgsl(text: &str, captures: &[Capture], scalars: &[Scalar]) -> Result<ScoreMod> {
        let expr = parse(text, Kind::Score, captures, scalars)?;
        ScoreMod::from_expr(expr, captures, scalars)
    }
}

/// Whether a text names a captured tensor or a scalar, outside of comments. To pick those that a text needs from a
/// larger stock: giving others is refused.
///
/// ```
/// use flexattn::expr::text_reads;
///
/// let text = "score + slope(h) // not bias";
/// assert!(text_reads(text, "slope") && !text_reads(text, "bias"));
/// ```
pub fn text_reads(text: &str, name: &str) -> bool {
    pieces(text).iter().any(|(piece, _)| *piece == name)
}

/// Operators that one statement may hold: naga goes one call down for each.
const MAX_OPERATORS: usize = 512;

/// A thread of its own reads longer statements, as a program's threads may have little stack.
#[cfg(not(target_arch = "wasm32"))]
const FEW_OPERATORS: usize = 64;

fn parse(text: &str, kind: Kind, captures: &[Capture], scalars: &[Scalar]) -> Result<Expr> {
    let longest = longest_statement(text);
    if longest.operators > MAX_OPERATORS {
        let message = format!(
            "this statement has {} operators but at most {MAX_OPERATORS} are allowed; capture a table, or use `let` for parts of it",
            longest.operators
        );
        return Err(ParseError::new(text, longest.at, message).into());
    }
    #[cfg(not(target_arch = "wasm32"))]
    if longest.operators > FEW_OPERATORS {
        let read = || read(text, kind, captures, scalars);
        return std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(256 << 20).spawn_scoped(scope, read);
            let thread = thread.map_err(|error| {
                Error::expression(format!(
                    "a long text is read on a thread of its own, which failed: {error}"
                ))
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
    }
    read(text, kind, captures, scalars)
}

/// A statement with many operators, and where it is.
struct Statement {
    operators: usize,
    at: Range<usize>,
}

/// The statement with the most operators. An `else` counts as one, since its branches lie one inside the other, and so
/// does a declaration, since each may need the next.
fn longest_statement(text: &str) -> Statement {
    let mut longest = Statement { operators: 0, at: 0..0 };
    let mut current = Statement { operators: 0, at: 0..0 };
    let (mut elses, mut declarations) = (0, 0);
    for (word, at) in pieces(text) {
        match word {
            ";" | "{" | "}" => current = Statement { operators: 0, at: at + 1..at + 1 },
            "else" => {
                elses += 1;
                current.operators = elses;
            }
            "const" | "fn" | "alias" | "struct" => {
                declarations += 1;
                current.operators = declarations;
            }
            _ if word.bytes().all(|b| b"+-*/%&|^<>=!~.[".contains(&b)) => current.operators += 1,
            _ => {}
        }
        current.at.end = at + word.len();
        if current.operators > longest.operators {
            longest = Statement { operators: current.operators, at: current.at.clone() };
        }
    }
    longest
}

fn read(text: &str, kind: Kind, captures: &[Capture], scalars: &[Scalar]) -> Result<Expr> {
    let pieces = pieces(text);
    let word = |piece: &str| piece.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    let words: Vec<(&str, usize)> = pieces.iter().copied().filter(|(piece, _)| word(piece)).collect();
    let has = |name: &str| words.iter().any(|(word, _)| *word == name);
    let defined: Vec<&str> = words.windows(2).filter(|w| w[0].0 == "fn").map(|w| w[1].0).collect();
    if let Some((at, message)) = misplaced(text, &pieces, has("fn"), has("return")) {
        return Err(ParseError::new(text, at, message).into());
    }
    let source = Source::new(text, kind, has("fn"), has("return"));

    for name in &defined {
        let what = if captures.iter().any(|c| c.name() == *name) {
            "captured tensor"
        } else if ["f32", "i32", "u32", "bool"].contains(name) {
            "type"
        } else {
            continue;
        };
        let at = words.windows(2).find(|w| w[0].0 == "fn" && w[1].0 == *name).map_or(0, |w| w[1].1);
        let message = format!("{name} is the name of a {what}; name the function otherwise");
        return Err(ParseError::new(text, at..at + name.len(), message).into());
    }
    let module = {
        let mut full = source.full.clone();
        prelude(&mut full, &defined, captures, scalars);
        naga::front::wgsl::parse_str(&full).map_err(|error| {
            let span = error.labels().next().and_then(|(span, _)| span.to_range()).unwrap_or(0..0);
            let mut message = error.message().to_owned();
            for note in error.notes() {
                let _ = write!(message, "; {note}");
            }
            if message.contains("no definition in scope") {
                let known = known(kind, captures, scalars);
                let _ = write!(
                    message,
                    "; known here: {known}; captured tensors and scalars have to be given with the text"
                );
            }
            if span.start >= source.before + text.len() && message.contains(", found") {
                let expected = message.split(", found").next().unwrap_or(&message);
                message = format!("the text ends too early: {expected}");
            }
            let at = full.get(span.clone()).unwrap_or("");
            if kind == Kind::Mask && at == "score" {
                message.push_str("; masks cannot read the score");
            }
            if let Some(capture) = captures.iter().find(|capture| capture.name() == at) {
                let _ = write!(message, "; captured tensors are read as {}", call(capture));
            }
            for (word, operator) in [("and", "&&"), ("or", "||"), ("not", "!")] {
                if has(word) && !defined.contains(&word) {
                    let _ = write!(message, "; write `{operator}` for `{word}`");
                }
            }
            source.error(span, message)
        })?
    };
    let expr = execute::run(&module, &source, captures, scalars)?;
    let nodes = expr.nodes();
    if nodes > MAX_NODES {
        let message = format!(
            "the expression has {nodes} operations after unrolling but at most {MAX_NODES} are allowed; capture a table"
        );
        return Err(ParseError::new(text, 0..text.len(), message).into());
    }
    let tensor = captures.iter().map(|capture| (capture.name(), call(capture)));
    let scalar = scalars.iter().map(|scalar| (scalar.name(), scalar.name().to_owned()));
    match tensor.chain(scalar).find(|(name, _)| !has(name)) {
        Some((name, read)) => Err(Error::capture(
            name,
            format!("it is given but the text never reads it; give only what is read, or read it as {read}"),
        )),
        None => Ok(expr),
    }
}

/// What naga would not see, or would blame on what stands around the text.
fn misplaced(
    text: &str,
    pieces: &[(&str, usize)],
    is_module: bool,
    is_body: bool,
) -> Option<(Range<usize>, &'static str)> {
    if text.starts_with('\u{feff}') {
        return Some((0..3, "this is a byte order mark; remove it"));
    }
    let mut open = 0;
    for (i, &(piece, at)) in pieces.iter().enumerate() {
        let message = match piece {
            "/*" => "this comment does not end; add `*/`",
            _ if is_module => continue,
            "let" | "var" | "{" if !is_body => STATEMENT,
            ";" if !is_body && i + 1 < pieces.len() => STATEMENT,
            "}" if open == 0 => "this closes nothing; remove it",
            _ => {
                open += i32::from(piece == "{") - i32::from(piece == "}");
                continue;
            }
        };
        return Some((at..at + piece.len(), message));
    }
    None
}

const STATEMENT: &str = "a text of statements needs a `return`";

/// How a captured tensor is read.
fn call(capture: &Capture) -> String {
    format!("{}({})", capture.name(), ["i", "j", "k", "l"][..capture.shape().len()].join(", "))
}

/// The names that a text may use.
fn known(kind: Kind, captures: &[Capture], scalars: &[Scalar]) -> String {
    let mut names: Vec<String> = Vec::new();
    if kind == Kind::Score {
        names.push("score".into());
    }
    names.extend(["b", "h", "q", "kv", "q_len", "kv_len"].map(str::to_owned));
    names.extend(scalars.iter().map(|s| s.name().to_owned()));
    names.extend(captures.iter().map(call));
    names.join(", ")
}

/// The text with what makes it a module, and how to find the way back.
#[derive(Debug)]
struct Source<'a> {
    text: &'a str,
    /// The text inside a function, followed by nothing yet.
    full: String,
    /// How many bytes stand before the text.
    before: usize,
    kind: Kind,
}

impl<'a> Source<'a> {
    fn new(text: &'a str, kind: Kind, is_module: bool, is_body: bool) -> Source<'a> {
        let mut full = String::new();
        if !is_module {
            let _ = write!(full, "{} {{ {}", kind.signature(), if is_body { "" } else { "return " });
        }
        let before = full.len();
        full.push_str(text);
        if !is_module {
            // A comment may end the text.
            full.push_str(if is_body { "\n}" } else { "\n;}" });
        }
        full.push('\n');
        Source { text, full, before, kind }
    }

    fn error(&self, span: Range<usize>, message: impl Into<String>) -> Error {
        let start = span.start.saturating_sub(self.before).min(self.text.trim_end().len());
        let end = span.end.saturating_sub(self.before).min(self.text.len());
        ParseError::new(self.text, start..end, message).into()
    }
}

fn prelude(full: &mut String, defined: &[&str], captures: &[Capture], scalars: &[Scalar]) {
    for (name, rest) in FUNCTIONS {
        let taken = captures.iter().any(|c| c.name() == *name) || scalars.iter().any(|s| s.name() == *name);
        if !defined.contains(name) && !taken {
            let _ = writeln!(full, "fn {name}{rest}");
        }
    }
    for capture in captures {
        let parameters: Vec<String> = (0..capture.shape().len()).map(|i| format!("i{i}: i32")).collect();
        let ty = capture.dtype().ty();
        let _ =
            writeln!(full, "fn {}({}) -> {ty} {{ return {ty}(); }}", capture.name(), parameters.join(", "));
    }
    for name in ["q_len", "kv_len"] {
        let _ = writeln!(full, "var<private> {name}: i32;");
    }
    for scalar in scalars {
        let _ = writeln!(full, "var<private> {}: {};", scalar.name(), scalar.value().ty());
    }
}

/// The identifiers, keywords and numbers of a text, and the characters of operators, braces and semicolons, with
/// their positions. Comments are left out; of one that does not end there is the beginning.
fn pieces(text: &str) -> Vec<(&str, usize)> {
    let bytes = text.as_bytes();
    let mut pieces = Vec::new();
    let (mut i, mut nested, mut comment) = (0, 0, 0);
    let in_word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
    let operator = |b: &u8| b"+-*/%&|^<>=!~".contains(b);
    while i < bytes.len() {
        let two = &bytes[i..(i + 2).min(bytes.len())];
        let run =
            |of: &dyn Fn(&u8) -> bool| bytes[i..].iter().position(|b| !of(b)).map_or(bytes.len(), |n| i + n);
        if two == b"/*" {
            if nested == 0 {
                comment = i;
            }
            nested += 1;
            i += 2;
        } else if nested > 0 && two == b"*/" {
            nested -= 1;
            i += 2;
        } else if nested > 0 {
            i += 1;
        } else if two == b"//" {
            // What ends a line in WGSL.
            let end = |c| matches!(c, '\n'..='\r' | '\u{85}' | '\u{2028}' | '\u{2029}');
            i += text[i..].find(end).unwrap_or(bytes.len() - i);
        } else if in_word(&bytes[i]) {
            let end = run(&in_word);
            pieces.push((&text[i..end], i));
            i = end;
        } else if operator(&bytes[i])
            || b"{};[".contains(&bytes[i])
            || bytes[i] == b'.' && bytes.get(i + 1).is_some_and(u8::is_ascii_alphabetic)
        {
            pieces.push((&text[i..i + 1], i));
            i += 1;
        } else {
            i += 1;
        }
    }
    if nested > 0 {
        pieces.push((&text[comment..comment + 2], comment));
    }
    pieces
}
