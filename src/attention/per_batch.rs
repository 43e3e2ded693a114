//! A value for all batch entries, or one for each.

use crate::error::{Error, Result};
use std::sync::Arc;

/// A value for all batch entries, or one for each.
///
/// ```
/// use flexattn::Attention;
///
/// let one_for_all = Attention::new().kv_len(100);
/// let one_for_each = Attention::new().kv_len([100, 70]).q_offset([99, 69]);
/// # let _ = (one_for_all, one_for_each);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PerBatch<T> {
    /// The same for all.
    All(T),
    /// One for each batch entry.
    Each(Arc<[T]>),
}

impl<T: Copy> PerBatch<T> {
    /// One value for each of `batch` entries. `name` is for the message.
    pub(super) fn resolve(&self, name: &str, batch: usize) -> Result<Vec<T>> {
        match self {
            PerBatch::All(value) => Ok(vec![*value; batch]),
            PerBatch::Each(values) if values.len() == batch => Ok(values.to_vec()),
            PerBatch::Each(values) => Err(Error::shape(format!(
                "{name} has {} values but batch is {batch}; give one for each batch entry, or one for all",
                values.len()
            ))),
        }
    }
}

impl<T> From<T> for PerBatch<T> {
    fn from(value: T) -> Self {
        PerBatch::All(value)
    }
}

impl<T: Clone, const N: usize> From<[T; N]> for PerBatch<T> {
    fn from(values: [T; N]) -> Self {
        PerBatch::Each(values.into())
    }
}

impl<T: Clone> From<&[T]> for PerBatch<T> {
    fn from(values: &[T]) -> Self {
        PerBatch::Each(values.into())
    }
}

impl<T> From<Vec<T>> for PerBatch<T> {
    fn from(values: Vec<T>) -> Self {
        PerBatch::Each(values.into())
    }
}
