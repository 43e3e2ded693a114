//! One test binary: one module a subject, each behaviour a test. A new test goes to the module that
//! is named for what it exercises; its name says the behaviour.
mod architecture;
#[cfg(feature = "wgpu")]
mod backward;
mod block_mask;
mod conformance;
#[cfg(feature = "wgpu")]
mod decode;
#[cfg(feature = "wgpu")]
mod errors;
mod expr;
#[cfg(feature = "wgpu")]
mod gpu;
mod kernels;
#[cfg(feature = "wgpu")]
mod launch;
mod masks;
mod metal;
mod metal_gradients;
#[cfg(feature = "wgpu")]
mod tiers;
#[cfg(feature = "wgpu")]
mod watched;
