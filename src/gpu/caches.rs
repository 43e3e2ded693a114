//! What the GPU keeps between calls, all of it bounded: bind groups, read-only buffers by content,
//! scratch by purpose, and the arena of uniform slices.

use super::device::{Buffer, lock};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bind groups by what they bind. An entry leaves when any of its buffers is dropped, so the cache
/// never keeps a user's tensor alive.
#[derive(Debug, Default)]
pub(super) struct BindGroups {
    groups: Mutex<HashMap<GroupKey, wgpu::BindGroup>>,
    made: AtomicU64,
}

/// What a bind group binds: the pipeline's layout, then (buffer, offset, size) of each entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupKey {
    pub(super) layout: usize,
    pub(super) entries: Vec<(u64, u64, u64)>,
}

impl BindGroups {
    const MAX: usize = 256;

    pub(super) fn get_or(&self, key: GroupKey, make: impl FnOnce() -> wgpu::BindGroup) -> wgpu::BindGroup {
        let mut groups = lock(&self.groups);
        if let Some(group) = groups.get(&key) {
            return group.clone();
        }
        if groups.len() >= Self::MAX {
            groups.clear();
        }
        let group = make();
        self.made.fetch_add(1, Ordering::Relaxed);
        groups.insert(key, group.clone());
        group
    }

    /// Forgets what binds this buffer.
    pub(super) fn forget(&self, buffer: u64) {
        lock(&self.groups).retain(|key, _| key.entries.iter().all(|&(id, ..)| id != buffer));
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.groups).len()
    }

    pub(super) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }
}

/// Values by content hash; the least recently used leaves first.
#[derive(Debug)]
pub(super) struct Constants<B> {
    entries: HashMap<u128, (B, u64, u64)>,
    bytes: u64,
    tick: u64,
}

impl<B> Default for Constants<B> {
    fn default() -> Self {
        Self { entries: HashMap::new(), bytes: 0, tick: 0 }
    }
}

impl<B: Clone> Constants<B> {
    const MAX_ENTRIES: usize = 64;
    const MAX_BYTES: u64 = 256 << 20;

    pub(super) fn get(&mut self, key: u128) -> Option<B> {
        self.tick += 1;
        let (buffer, _, used) = self.entries.get_mut(&key)?;
        *used = self.tick;
        Some(buffer.clone())
    }

    pub(super) fn insert(&mut self, key: u128, buffer: B, bytes: u64) {
        while !self.entries.is_empty()
            && (self.entries.len() >= Self::MAX_ENTRIES || self.bytes + bytes > Self::MAX_BYTES)
        {
            let oldest = self.entries.iter().min_by_key(|(_, (_, _, used))| *used).map(|(&key, _)| key);
            let Some((_, freed, _)) = oldest.and_then(|key| self.entries.remove(&key)) else { break };
            self.bytes -= freed;
        }
        self.tick += 1;
        if let Some((_, replaced, _)) = self.entries.insert(key, (buffer, bytes, self.tick)) {
            self.bytes -= replaced;
        }
        self.bytes += bytes;
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Slices for parameter blocks. A slice is never handed out twice, so parameters that a caller's
/// encoder refers to cannot be overwritten before it is submitted; a full chunk is let go and lives
/// on while command buffers refer to it.
#[derive(Debug, Default)]
pub(super) struct Arena {
    chunk: Option<Buffer>,
    at: u64,
}

impl Arena {
    pub(super) const CHUNK: u64 = 64 << 10;

    /// A place for `bytes` at a multiple of `alignment`; `make` creates chunks.
    pub(super) fn slice<E>(
        &mut self,
        bytes: u64,
        alignment: u64,
        make: impl FnOnce(u64) -> Result<Buffer, E>,
    ) -> Result<(Buffer, u64), E> {
        let at = self.at.next_multiple_of(alignment);
        match &self.chunk {
            Some(chunk) if at + bytes <= chunk.size() => {
                self.at = at + bytes;
                Ok((chunk.clone(), at))
            }
            _ => {
                let chunk = make(Self::CHUNK.max(bytes))?;
                self.chunk = Some(chunk.clone());
                self.at = bytes;
                Ok((chunk, 0))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_stay_within_their_bounds_and_drop_the_least_recently_used() {
        let mut constants = Constants::<u32>::default();
        for key in 0..100u32 {
            constants.insert(u128::from(key), key, 8);
            assert_eq!(constants.get(0), Some(0), "the one in use stays");
        }
        assert_eq!(constants.len(), Constants::<u32>::MAX_ENTRIES);
        assert_eq!(constants.get(1), None);
        constants.insert(1000, 7, Constants::<u32>::MAX_BYTES * 2);
        assert_eq!((constants.len(), constants.get(1000)), (1, Some(7)));
        constants.insert(1001, 8, 8);
        assert_eq!((constants.len(), constants.bytes()), (1, 8));
    }
}
