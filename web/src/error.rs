//! Errors on their way out: [`flexattn::Error`] as the `FlexattnError` of index.ts.

use std::cell::RefCell;

use flexattn::{Error, ParseError};
use js_sys::{Array, Function, Object, Reflect};
use wasm_bindgen::{JsCast, JsValue};

thread_local! {
    static CLASS: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Which mod's text an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Mask,
    Score,
}

impl Which {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Which::Mask => "mask",
            Which::Score => "score",
        }
    }
}

/// An error, and where a text is at fault, which text.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) about: Option<(Which, String)>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, about: None }
    }
}

/// Remembers the class to throw.
pub(crate) fn throw_as(class: Function) {
    CLASS.with(|slot| *slot.borrow_mut() = Some(class));
}

impl From<Failure> for JsValue {
    fn from(failure: Failure) -> JsValue {
        let message = match failure.error.parse_error() {
            Some(parse) => parse.message.clone(),
            None => failure.error.to_string(),
        };
        let (which, position) = match (&failure.about, failure.error.parse_error()) {
            (Some((which, text)), Some(parse)) => {
                (JsValue::from_str(which.name()), position(parse, text).into())
            }
            (Some((which, _)), None) => (JsValue::from_str(which.name()), JsValue::UNDEFINED),
            (None, _) => (JsValue::UNDEFINED, JsValue::UNDEFINED),
        };
        let arguments = Array::of4(
            &JsValue::from_str(&message),
            &JsValue::from_str(kind(&failure.error)),
            &which,
            &position,
        );
        CLASS
            .with(|slot| slot.borrow().clone())
            .and_then(|class| Reflect::construct(&class, &arguments).ok())
            .unwrap_or_else(|| js_sys::Error::new(&message).unchecked_into())
    }
}

/// The name of the error's kind, one of `ErrorKind` in index.ts.
pub(crate) fn kind(error: &Error) -> &'static str {
    match error {
        Error::Shape(_) => "shape",
        Error::DType(_) => "dtype",
        Error::Capture { .. } => "capture",
        Error::Expression(_) => "expression",
        Error::Parse(_) => "parse",
        Error::Overflow(_) => "overflow",
        Error::Limit { .. } => "limit",
        Error::Buffer(_) => "buffer",
        Error::Compile { .. } => "compile",
        Error::OutOfMemory { .. } => "out-of-memory",
        Error::DeviceLost(_) => "device-lost",
        Error::Format(_) => "format",
        _ => "unsupported",
    }
}

/// Line, column and UTF-16 offsets of a parse error in its text.
pub(crate) fn position(parse: &ParseError, text: &str) -> Object {
    let utf16 = |bytes: usize| text.get(..bytes).map_or(0, |before| before.encode_utf16().count()) as f64;
    let object = Object::new();
    for (name, value) in [
        ("line", parse.line as f64),
        ("column", parse.column as f64),
        ("from", utf16(parse.span.start)),
        ("to", utf16(parse.span.end)),
    ] {
        crate::js::set(&object, name, &value.into());
    }
    object
}

/// What a JavaScript exception says.
pub(crate) fn message(exception: &JsValue) -> String {
    let text = Reflect::get(exception, &"message".into()).ok().and_then(|text| text.as_string());
    text.or_else(|| exception.as_string()).unwrap_or_else(|| format!("{exception:?}"))
}
