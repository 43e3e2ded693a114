//! `Send` and `Sync` where there are threads. A page's module has one, and the page's objects are bound to it.

#[cfg(not(target_arch = "wasm32"))]
pub(crate) use std::marker::{Send as Sent, Sync as Shared};

/// Holds for everything: there is no other thread.
#[cfg(target_arch = "wasm32")]
pub(crate) trait Sent {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> Sent for T {}

/// Holds for everything: there is no other thread.
#[cfg(target_arch = "wasm32")]
pub trait Shared {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> Shared for T {}
