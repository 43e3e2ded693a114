//! Reading values that JavaScript passes. index.ts promises their types; what breaks a promise is an
//! error with the field's name.

use flexattn::{Error, Result};
use js_sys::{Array, Object, Reflect};
use wasm_bindgen::{JsCast, JsValue};

/// The field, or `None` when it is absent, undefined or null.
pub(crate) fn field(object: &JsValue, name: &str) -> Option<JsValue> {
    if !object.is_object() && !object.is_function() {
        return None;
    }
    Reflect::get(object, &name.into()).ok().filter(|value| !value.is_undefined() && !value.is_null())
}

/// Sets a field of an object that is being built.
pub(crate) fn set(object: &Object, name: &str, value: &JsValue) {
    // A plain object that was just made has no setter that could throw.
    let _ = Reflect::set(object, &name.into(), value);
}

/// A string field.
pub(crate) fn string(object: &JsValue, name: &str) -> Result<Option<String>> {
    typed(object, name, "a string", JsValue::as_string)
}

/// A number field.
pub(crate) fn number(object: &JsValue, name: &str) -> Result<Option<f64>> {
    typed(object, name, "a number", JsValue::as_f64)
}

/// A field that counts something.
pub(crate) fn count(object: &JsValue, name: &str) -> Result<Option<usize>> {
    field(object, name).map(|value| whole(&value, name)).transpose()
}

/// A true-or-false field.
pub(crate) fn boolean(object: &JsValue, name: &str) -> Result<Option<bool>> {
    typed(object, name, "true or false", JsValue::as_bool)
}

/// A field that is a list of counts.
pub(crate) fn counts(object: &JsValue, name: &str) -> Result<Option<Vec<usize>>> {
    let Some(value) = field(object, name) else { return Ok(None) };
    list(&value, name)?.iter().map(|item| whole(item, name)).collect::<Result<_>>().map(Some)
}

/// The value as a list.
pub(crate) fn list(value: &JsValue, name: &str) -> Result<Vec<JsValue>> {
    match value.dyn_ref::<Array>() {
        Some(array) => Ok(array.iter().collect()),
        None => Err(wrong(name, "a list")),
    }
}

/// The value as a non-negative whole number.
pub(crate) fn whole(value: &JsValue, name: &str) -> Result<usize> {
    match value.as_f64() {
        Some(number) if number >= 0.0 && number.fract() == 0.0 && number <= f64::from(u32::MAX) => {
            Ok(number as usize)
        }
        Some(number) => Err(Error::shape(format!("{name} is {number} but must be a whole number from 0 up"))),
        None => Err(wrong(name, "a number")),
    }
}

/// `[key, value]` of every own field, sorted by key.
pub(crate) fn entries(object: &JsValue, name: &str) -> Result<Vec<(String, JsValue)>> {
    let Some(object) = object.dyn_ref::<Object>() else { return Err(wrong(name, "an object")) };
    let mut all = Vec::new();
    for key in Object::keys(object).iter() {
        let value = Reflect::get(object, &key).unwrap_or(JsValue::UNDEFINED);
        if let (Some(key), false) = (key.as_string(), value.is_undefined()) {
            all.push((key, value));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// An error for a value of another kind than promised.
pub(crate) fn wrong(name: &str, wanted: &str) -> Error {
    Error::format(format!("{name} must be {wanted}"))
}

fn typed<T>(
    object: &JsValue,
    name: &str,
    wanted: &str,
    read: impl Fn(&JsValue) -> Option<T>,
) -> Result<Option<T>> {
    match field(object, name) {
        None => Ok(None),
        Some(value) => read(&value).map(Some).ok_or_else(|| wrong(name, wanted)),
    }
}
