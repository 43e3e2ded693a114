//! flexattn in a page: the library's core on the page's own `GPUDevice`.
//!
//! This crate is the WebAssembly half of the npm package; index.ts is the other half and the API.
//! wgpu's browser backend can neither adopt a `GPUDevice` or `GPUBuffer` nor ask for subgroups, so the
//! `flexattn::Runtime` here drives WebGPU itself. There is no mathematics in this crate.
#![cfg(target_arch = "wasm32")]
#![expect(unreachable_pub, reason = "exports are reached from JavaScript")]
#![expect(
    clippy::arc_with_non_send_sync,
    reason = "the core shares block masks by Arc; a page has one thread"
)]

mod attention;
mod block_mask;
mod cpu;
mod error;
mod gpu;
mod inside;
mod js;
mod mods;
mod runtime;
mod tensor;
mod webgpu;

use std::cell::RefCell;

use js_sys::{Function, Promise};
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::wasm_bindgen;

thread_local! {
    static PAUSE: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Prepares the module: the class to throw, and how to let the page breathe.
#[wasm_bindgen]
pub fn start(error_class: Function, pause: Function) {
    error::throw_as(error_class);
    PAUSE.with(|slot| *slot.borrow_mut() = Some(pause));
}

/// Lets the page handle what is waiting, then comes back.
pub(crate) async fn pause() {
    let promise = PAUSE.with(|slot| {
        slot.borrow().as_ref().and_then(|pause| pause.call0(&wasm_bindgen::JsValue::UNDEFINED).ok())
    });
    if let Some(promise) = promise.and_then(|promise| promise.dyn_into::<Promise>().ok()) {
        // It only ever resolves.
        let _ = promise.await;
    }
}
