//! Kernel text out.
