//! Tables of prebuilt masks and score mods, built by name with parameters.

use crate::error::{Error, Result};
use std::collections::BTreeMap;

/// One prebuilt mask or score mod: a row of [`masks::ALL`](crate::masks::ALL) or
/// [`scores::ALL`](crate::scores::ALL).
#[derive(Debug)]
pub struct Prebuilt<M: 'static> {
    /// The name of the function.
    pub name: &'static str,
    /// What it says, in the notation of the expression language.
    pub formula: &'static str,
    /// Name and meaning of each parameter. Every parameter has a default that suits the sizes.
    pub params: &'static [(&'static str, &'static str)],
    /// Builds it from parameters whose names have been checked.
    pub(crate) make: fn(&Params) -> Result<M>,
}

impl<M> Prebuilt<M> {
    /// Builds it.
    ///
    /// # Errors
    ///
    /// [`Error::Expression`] for a parameter that it does not have or a value that it does not take.
    pub fn build(&self, params: &Params) -> Result<M> {
        if let Some(name) =
            params.values.keys().find(|name| self.params.iter().all(|(known, _)| known != name))
        {
            let known: Vec<&str> = self.params.iter().map(|(name, _)| *name).collect();
            return Err(Error::expression(format!(
                "`{}` has no parameter `{name}`; {}",
                self.name,
                if known.is_empty() {
                    "it takes none".into()
                } else {
                    format!("it takes {}", known.join(", "))
                }
            )));
        }
        (self.make)(params)
    }
}

/// The row of this name.
pub(crate) fn find<M>(all: &'static [Prebuilt<M>], kind: &str, name: &str) -> Result<&'static Prebuilt<M>> {
    all.iter().find(|row| row.name == name).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|row| row.name).collect();
        Error::expression(format!("there is no {kind} `{name}`; there are {}", names.join(", ")))
    })
}

/// The value of a parameter: a number or a list of numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Param {
    /// A number.
    Number(f64),
    /// A list, row by row where the function takes rows.
    List(Vec<f64>),
}

macro_rules! from_numbers {
    ($($number:ty),*) => {$(
        impl From<$number> for Param {
            fn from(value: $number) -> Self {
                Self::Number(f64::from(value))
            }
        }

        impl From<&[$number]> for Param {
            fn from(values: &[$number]) -> Self {
                Self::List(values.iter().map(|&value| f64::from(value)).collect())
            }
        }

        impl From<Vec<$number>> for Param {
            fn from(values: Vec<$number>) -> Self {
                values.as_slice().into()
            }
        }
    )*};
}

from_numbers!(f64, f32, i32, u32);

/// Sizes and named parameters of a prebuilt mask or score mod.
///
/// ```
/// use flexattn::{Params, masks};
///
/// let params = Params::new(1, 8, 4096, 4096).with("window", 512);
/// let mask = masks::by_name("sliding_window", &params)?;
/// assert_eq!(mask.expr(), masks::sliding_window(512).expr());
/// assert_eq!(params, Params::new(1, 8, 4096, 4096).read("window=512")?);
/// # Ok::<(), flexattn::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// Batch entries: how long lists with one value per batch entry are by default.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Query rows.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    values: BTreeMap<String, Param>,
}

impl Params {
    /// Only sizes: every parameter has its default.
    pub const fn new(batch: usize, heads: usize, q_len: usize, kv_len: usize) -> Self {
        Self { batch, heads, q_len, kv_len, values: BTreeMap::new() }
    }

    /// The same with one more parameter.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Param>) -> Self {
        self.values.insert(name.to_owned(), value.into());
        self
    }

    /// The same with parameters from a text such as `window=64, ids=[0 0 1 1]`.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] for anything else.
    pub fn read(mut self, text: &str) -> Result<Self> {
        let wrong = |part: &str| {
            Error::format(format!(
                "`{}` is no parameter; write name=number or name=[number number ...], separated by commas",
                part.trim()
            ))
        };
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|value| value.is_finite());
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| wrong(part))?;
            let value = value.trim();
            let value = match value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                Some(list) => list.split_whitespace().map(number).collect::<Option<_>>().map(Param::List),
                None => number(value).map(Param::Number),
            };
            self.values.insert(name.trim().to_owned(), value.ok_or_else(|| wrong(part))?);
        }
        Ok(self)
    }

    fn invalid(name: &str, value: &dyn std::fmt::Debug, rule: &str) -> Error {
        Error::expression(format!("parameter `{name}` is {value:?} but must be {rule}"))
    }

    /// A number.
    pub(crate) fn float(&self, name: &str, default: f64) -> Result<f64> {
        match self.values.get(name) {
            None => Ok(default),
            Some(Param::Number(value)) => Ok(*value),
            Some(value) => Err(Self::invalid(name, value, "one number")),
        }
    }

    /// A whole number.
    pub(crate) fn int(&self, name: &str, default: i32) -> Result<i32> {
        whole(name, self.float(name, default.into())?)
    }

    /// A list of numbers; a single number is a list of one.
    pub(crate) fn floats(&self, name: &str, default: impl FnOnce() -> Vec<f32>) -> Result<Vec<f32>> {
        Ok(match self.values.get(name) {
            None => default(),
            Some(Param::Number(value)) => vec![*value as f32],
            Some(Param::List(values)) => values.iter().map(|&value| value as f32).collect(),
        })
    }

    /// A list of whole numbers.
    pub(crate) fn ints(&self, name: &str, default: impl FnOnce() -> Vec<i32>) -> Result<Vec<i32>> {
        match self.values.get(name) {
            None => Ok(default()),
            Some(Param::Number(value)) => Ok(vec![whole(name, *value)?]),
            Some(Param::List(values)) => values.iter().map(|&value| whole(name, value)).collect(),
        }
    }

    /// Exactly `N` whole numbers.
    pub(crate) fn sides<const N: usize>(&self, name: &str, default: [i32; N]) -> Result<[i32; N]> {
        let values = self.ints(name, || default.to_vec())?;
        values.try_into().map_err(|values| Self::invalid(name, &values, &format!("{N} whole numbers")))
    }

    /// The larger length, as an index.
    pub(crate) fn len(&self) -> i32 {
        i32::try_from(self.q_len.max(self.kv_len)).unwrap_or(i32::MAX)
    }
}

fn whole(name: &str, value: f64) -> Result<i32> {
    let inside = (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&value);
    if inside && value.fract() == 0.0 {
        Ok(value as i32)
    } else {
        Err(Params::invalid(name, &value, "a whole number of 32 bits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_parameters_reads_numbers_and_lists() -> Result<()> {
        let params = Params::new(1, 1, 8, 8).read(" window = 4 , ids=[0 0 1], rate=0.5,")?;
        assert_eq!(params.int("window", 0)?, 4);
        assert_eq!(params.ints("ids", Vec::new)?, [0, 0, 1]);
        assert_eq!(params.float("rate", 0.0)?, 0.5);
        assert_eq!(params.int("absent", 7)?, 7);
        for bad in ["window", "window=", "ids=[0", "ids=[a]", "rate=inf"] {
            assert!(Params::new(1, 1, 8, 8).read(bad).is_err_and(|error| error.is_format()), "{bad}");
        }
        assert!(params.int("rate", 0).is_err());
        assert!(params.int("ids", 0).is_err());
        Ok(())
    }
}
