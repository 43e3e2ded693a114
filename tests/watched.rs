//! A runtime that can be told to plan as another one would, and that takes note of what it creates.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use flexattn::{Cpu, Dispatch, Profile, Runtime, Tier, Usage};

/// A runtime, with another profile if wanted, taking note of the buffers that are created.
#[derive(Clone)]
pub(crate) struct Watched<R: Runtime = Cpu> {
    runtime: R,
    pub(crate) profile: Rc<Profile>,
    pub(crate) created: Rc<RefCell<Vec<(String, u64)>>>,
}

impl<R: Runtime> Watched<R> {
    pub(crate) fn over(runtime: R) -> Self {
        Self { profile: Rc::new(runtime.profile().clone()), runtime, created: Rc::default() }
    }
}

impl Watched {
    pub(crate) fn new() -> Self {
        Self::over(Cpu::new())
    }

    /// Plans for another tier; such plans cannot be run.
    pub(crate) fn as_tier(tier: Tier) -> Self {
        Self { profile: Rc::new(Profile::floor(tier)), ..Self::new() }
    }
}

impl<R: Runtime> Runtime for Watched<R> {
    type Buffer = R::Buffer;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn create(&self, label: &str, bytes: u64, usage: Usage) -> flexattn::Result<Self::Buffer> {
        self.created.borrow_mut().push((label.to_owned(), bytes));
        self.runtime.create(label, bytes, usage)
    }

    fn size(&self, buffer: &Self::Buffer) -> u64 {
        self.runtime.size(buffer)
    }

    fn write(&self, buffer: &Self::Buffer, offset: u64, bytes: &[u8]) -> flexattn::Result<()> {
        self.runtime.write(buffer, offset, bytes)
    }

    fn run(&self, dispatches: &[Dispatch<Self::Buffer>]) -> flexattn::Result<()> {
        self.runtime.run(dispatches)
    }

    fn read(
        &self,
        buffer: &Self::Buffer,
        range: Range<u64>,
    ) -> impl Future<Output = flexattn::Result<Vec<u8>>> {
        self.runtime.read(buffer, range)
    }
}
