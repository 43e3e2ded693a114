//! The crate's one error type.
//!
//! A message says which value was found, which rule it breaks and what to do about it. The variants
//! carry the numbers, so that a caller can react without reading text; the predicates
//! ([`Error::is_out_of_memory`], ...) stay valid when variants grow.

use std::fmt;
use std::ops::Range;

/// The result of anything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was refused or failed.
///
/// Bad input never panics; it gives one of these. `Debug` prints what `Display` does, since it is what Rust
/// shows of a `main` that gives an error, or of `unwrap`.
///
/// # Example
///
/// ```
/// use flexattn::{AttentionShape, Layout};
///
/// let q = Layout::contiguous([1, 8, 16, 64])?;
/// let k = Layout::contiguous([1, 3, 16, 64])?;
/// let error = AttentionShape::new(&q, &k, &k).unwrap_err();
/// assert!(error.is_shape());
/// assert!(error.to_string().starts_with("kv_heads is 3 but must divide q_heads = 8"));
/// # Ok::<(), flexattn::Error>(())
/// ```
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Sizes that do not fit together.
    #[error("{0}")]
    Shape(String),
    /// An element type that is not allowed here, or two that differ.
    #[error("{0}")]
    DType(String),
    /// A captured tensor or a named scalar: missing, of another type, or indexed outside its shape.
    #[error("`{name}`: {message}")]
    Capture {
        /// The capture's or scalar's name.
        name: String,
        /// Value found, rule, remedy.
        message: String,
    },
    /// A mask or score mod that breaks a rule of the expression language.
    #[error("{0}")]
    Expression(String),
    /// Text that is not a valid mask or score mod.
    #[error("{0}")]
    Parse(Box<ParseError>),
    /// A number that does not fit the 32-bit integers that GPUs index with.
    #[error("{0}")]
    Overflow(String),
    /// A limit of this adapter or browser that the call would exceed.
    #[error("{what} needs {needed} but {limit} is {available} here; {remedy}")]
    Limit {
        /// What needs it.
        what: String,
        /// The limit's name, as WebGPU spells it.
        limit: &'static str,
        /// The value needed.
        needed: u64,
        /// The value this adapter or device has.
        available: u64,
        /// What to do.
        remedy: String,
    },
    /// Something that this crate, tier or adapter does not do.
    #[error("{0}")]
    Unsupported(String),
    /// A buffer that is too small, lacks a usage, or belongs to another device.
    #[error("{0}")]
    Buffer(String),
    /// A kernel that the driver or the validator refused. This is a bug here or in the driver.
    #[error("kernel `{kernel}` was refused: {message}")]
    Compile {
        /// The kernel's label.
        kernel: String,
        /// What the compiler said.
        message: String,
    },
    /// The device ran out of memory.
    #[error(
        "out of memory for `{label}` ({bytes} bytes); free tensors, or use fewer heads or shorter lengths per call"
    )]
    OutOfMemory {
        /// What was to be allocated.
        label: String,
        /// How much, in bytes; 0 when unknown.
        bytes: u64,
    },
    /// The GPU device is gone: driver reset, unplugged, destroyed. Make a new `Gpu` and upload again.
    #[error("the GPU device was lost ({0}); create a new Gpu and upload the tensors again")]
    DeviceLost(String),
    /// A file or byte string in a format of this crate that does not parse.
    #[error("{0}")]
    Format(String),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Where a text stopped being a valid mask or score mod.
///
/// Its `Display`, and so its `Debug`, shows the line with a caret under the place.
#[derive(Clone, PartialEq, Eq)]
pub struct ParseError {
    /// Value found, rule, remedy; without position.
    pub message: String,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Bytes of the text that the message is about; may be empty.
    pub span: Range<usize>,
    /// The line with a caret line under it.
    pub snippet: String,
}

impl ParseError {
    /// An error about the bytes `span` of `text`. A span outside the text is clamped to it.
    ///
    /// ```
    /// let error = flexattn::ParseError::new("score +", 6..7, "an operand is missing after `+`");
    /// assert_eq!((error.line, error.column), (1, 7));
    /// assert!(error.to_string().ends_with("1 | score +\n  |       ^"));
    /// ```
    pub fn new(text: &str, span: Range<usize>, message: impl Into<String>) -> Self {
        let start = char_boundary(text, span.start);
        let end = char_boundary(text, span.end).max(start);
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let line = text[..start].matches('\n').count() + 1;
        let column = text[line_start..start].chars().count() + 1;
        let width = text[start..end.min(line_end).max(start)].chars().count().max(1);
        // Tabs stay tabs before the caret, so that it lands under the place in any tab width.
        let lead: String =
            text[line_start..start].chars().map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let number = line.to_string();
        let gutter = " ".repeat(number.len());
        let snippet = format!(
            "{number} | {}\n{gutter} | {lead}{}",
            text[line_start..line_end].trim_end_matches('\r'),
            "^".repeat(width)
        );
        Self { message: message.into(), line, column, span: start..end, snippet }
    }
}

fn char_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}\n{}", self.line, self.column, self.message, self.snippet)
    }
}

impl fmt::Debug for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<ParseError> for Error {
    fn from(error: ParseError) -> Self {
        Self::Parse(Box::new(error))
    }
}

/// An empty list with room for `count` values, in memory that may not be there: a size that a caller chose must
/// not end the process.
pub(crate) fn reserved<T>(label: &str, count: Option<usize>) -> Result<Vec<T>> {
    let mut memory = Vec::new();
    match count.map(|count| memory.try_reserve_exact(count)) {
        Some(Ok(())) => Ok(memory),
        _ => {
            let bytes =
                count.and_then(|count| count.checked_mul(size_of::<T>())).unwrap_or(usize::MAX) as u64;
            Err(Error::OutOfMemory { label: label.to_owned(), bytes })
        }
    }
}

/// `count` times `value`, likewise.
pub(crate) fn filled<T: Clone>(label: &str, value: T, count: Option<usize>) -> Result<Vec<T>> {
    let mut memory = reserved(label, count)?;
    memory.resize(count.unwrap_or(0), value);
    Ok(memory)
}

impl Error {
    /// A [`Error::Shape`].
    pub fn shape(message: impl Into<String>) -> Self {
        Self::Shape(message.into())
    }

    /// A [`Error::DType`].
    pub fn dtype(message: impl Into<String>) -> Self {
        Self::DType(message.into())
    }

    /// A [`Error::Capture`] about the capture or scalar `name`.
    pub fn capture(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Capture { name: name.into(), message: message.into() }
    }

    /// A [`Error::Expression`].
    pub fn expression(message: impl Into<String>) -> Self {
        Self::Expression(message.into())
    }

    /// A [`Error::Overflow`].
    pub fn overflow(message: impl Into<String>) -> Self {
        Self::Overflow(message.into())
    }

    /// A [`Error::Unsupported`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::Unsupported(message.into())
    }

    /// A [`Error::Buffer`].
    pub fn buffer(message: impl Into<String>) -> Self {
        Self::Buffer(message.into())
    }

    /// A [`Error::Compile`] of the kernel with this label.
    pub fn compile(kernel: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Compile { kernel: kernel.into(), message: message.into() }
    }

    /// A [`Error::Format`].
    pub fn format(message: impl Into<String>) -> Self {
        Self::Format(message.into())
    }

    /// Sizes that do not fit together.
    pub fn is_shape(&self) -> bool {
        matches!(self, Self::Shape(_))
    }

    /// A wrong element type.
    pub fn is_dtype(&self) -> bool {
        matches!(self, Self::DType(_))
    }

    /// Something about a capture or a named scalar.
    pub fn is_capture(&self) -> bool {
        matches!(self, Self::Capture { .. })
    }

    /// An expression that breaks a rule of the language.
    pub fn is_expression(&self) -> bool {
        matches!(self, Self::Expression(_))
    }

    /// Text that does not parse; [`Error::parse_error`] has the place.
    pub fn is_parse(&self) -> bool {
        matches!(self, Self::Parse(_))
    }

    /// The place and snippet of a parse error.
    pub fn parse_error(&self) -> Option<&ParseError> {
        match self {
            Self::Parse(error) => Some(error),
            _ => None,
        }
    }

    /// A number that does not fit 32 bits.
    pub fn is_overflow(&self) -> bool {
        matches!(self, Self::Overflow(_))
    }

    /// A limit of the adapter.
    pub fn is_limit(&self) -> bool {
        matches!(self, Self::Limit { .. })
    }

    /// Something not offered here.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported(_))
    }

    /// A bad buffer.
    pub fn is_buffer(&self) -> bool {
        matches!(self, Self::Buffer(_))
    }

    /// A refused kernel.
    pub fn is_compile(&self) -> bool {
        matches!(self, Self::Compile { .. })
    }

    /// No memory left on the device. Smaller calls may still work.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }

    /// The device is gone; every later call on it gives this too.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::DeviceLost(_))
    }

    /// Bytes in a format of this crate that do not parse.
    pub fn is_format(&self) -> bool {
        matches!(self, Self::Format(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caret_stands_under_the_span_on_its_own_line() {
        let text = "let a = 1;\n\tq >= kvv\nend";
        let at = text.find("kvv").unwrap();
        let error = ParseError::new(text, at..at + 3, "`kvv` is not known");
        assert_eq!((error.line, error.column), (2, 7));
        assert_eq!(error.snippet, "2 | \tq >= kvv\n  | \t     ^^^");
    }

    #[test]
    fn span_outside_the_text_is_clamped() {
        let error = ParseError::new("é", 1..99, "x");
        assert_eq!(error.span, 0..2);
        assert_eq!(error.column, 1);
        let empty = ParseError::new("", 5..7, "x");
        assert_eq!((empty.line, empty.column), (1, 1));
    }

    #[test]
    fn debug_shows_the_caret_picture_as_lines() {
        let error = Error::from(ParseError::new("score +", 6..7, "an operand is missing after `+`"));
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(format!("{error:?}").ends_with("\n1 | score +\n  |       ^"));
    }

    #[test]
    fn limit_names_limit_need_and_value() {
        let error = Error::Limit {
            what: "k".into(),
            limit: "maxStorageBufferBindingSize",
            needed: 200,
            available: 100,
            remedy: "split it".into(),
        };
        assert_eq!(error.to_string(), "k needs 200 but maxStorageBufferBindingSize is 100 here; split it");
    }
}
