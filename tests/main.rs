//! One test binary: one module a subject, each behaviour a test. A new test goes to the module that
//! is named for what it exercises; its name says the behaviour.
mod conformance;
mod expr;
mod gpu;
mod kernels;
