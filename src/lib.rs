//! flexattn
