//! The Cpu tier: memory of this process. (The kernels on all cores replace this file.)

use crate::runtime::{Dispatch, Profile, Runtime, Tier, Usage};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Runs attention on this machine's cores.
#[derive(Clone, Debug)]
pub struct Cpu(Arc<Profile>);

/// A buffer of a [`Cpu`].
#[derive(Clone, Debug)]
pub struct Buffer(Arc<Mutex<Vec<u8>>>);

impl PartialEq for Buffer {
    /// The same memory.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// All cores of this machine.
    pub fn new() -> Self {
        Self(Arc::new(Profile::floor(Tier::Cpu)))
    }
}

impl Runtime for Cpu {
    type Buffer = Buffer;

    fn profile(&self) -> &Profile {
        &self.0
    }

    fn create(&self, _label: &str, bytes: u64, _usage: Usage) -> Result<Buffer> {
        Ok(Buffer(Arc::new(Mutex::new(vec![0; bytes.next_multiple_of(4) as usize]))))
    }

    fn size(&self, buffer: &Buffer) -> u64 {
        buffer.0.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    fn write(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut memory = buffer.0.lock().unwrap_or_else(PoisonError::into_inner);
        let range = offset as usize..offset as usize + bytes.len();
        let place = memory.get_mut(range).ok_or_else(|| Error::buffer("past the end of the buffer"))?;
        place.copy_from_slice(bytes);
        Ok(())
    }

    fn run(&self, _dispatches: &[Dispatch<Buffer>]) -> Result<()> {
        Err(Error::unsupported("the Cpu tier has no kernels yet"))
    }

    async fn read(&self, buffer: &Buffer, range: Range<u64>) -> Result<Vec<u8>> {
        let memory = buffer.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = memory.get(range.start as usize..range.end as usize);
        bytes.map(<[u8]>::to_vec).ok_or_else(|| Error::buffer("past the end of the buffer"))
    }
}
