//! The captured tensors and scalars of a call: joined from mask and score mod, hashed, packed.

use super::Constant;
use crate::error::{Error, Result};
use crate::expr::{Capture, CaptureData, MaskMod, Scalar, ScoreMod};
use crate::lower::Layout;
use crate::runtime::{Profile, Resident};
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Why a captured tensor cannot be bound.
pub(crate) const ELSEWHERE: &str =
    "its values live on another kind of device; upload them to the one that runs the call";

/// What the mods of a call read.
pub(super) struct Mods<'a> {
    pub(super) layout: Layout,
    pub(super) captures: Vec<&'a Capture>,
    pub(super) scalars: Vec<Scalar>,
    /// The captured tensor that lives on the device, bound in place.
    pub(super) large: Option<Arc<str>>,
}

impl<'a> Mods<'a> {
    pub(super) fn new(mask: Option<&'a MaskMod>, score: Option<&'a ScoreMod>) -> Result<Self> {
        let mut captures: Vec<&'a Capture> = Vec::new();
        let mut scalars: Vec<Scalar> = Vec::new();
        mask.map_or(Ok(()), MaskMod::check)?;
        score.map_or(Ok(()), ScoreMod::check)?;
        let read =
            mask.map_or(&[][..], MaskMod::captures).iter().chain(score.map_or(&[][..], ScoreMod::captures));
        for capture in read {
            match captures.iter().find(|known| known.name() == capture.name()) {
                None => captures.push(capture),
                Some(known) if known.same(capture) => {}
                Some(_) => {
                    return Err(Error::capture(
                        capture.name(),
                        "the mask_mod and the score_mod capture different tensors of this name; rename_capture one",
                    ));
                }
            }
        }
        let read =
            mask.map_or(&[][..], MaskMod::scalars).iter().chain(score.map_or(&[][..], ScoreMod::scalars));
        for scalar in read {
            match scalars.iter().find(|known| known.name() == scalar.name()) {
                None => scalars.push(scalar.clone()),
                Some(known) if known == scalar => {}
                Some(_) => {
                    return Err(Error::capture(
                        scalar.name(),
                        "the mask_mod and the score_mod have different values of this scalar; rename one",
                    ));
                }
            }
        }
        let mut large: Option<Arc<str>> = None;
        for capture in &captures {
            let CaptureData::Device(handle) = capture.data() else { continue };
            if handle.get::<Resident>().is_none() {
                return Err(Error::capture(capture.name(), ELSEWHERE));
            }
            if let Some(first) = large.replace(capture.name().into()) {
                return Err(Error::capture(
                    capture.name(),
                    format!(
                        "it lives on the device and so does `{first}`, but a call binds one such tensor; keep the others in host memory"
                    ),
                ));
            }
        }
        let exprs = mask.map(MaskMod::expr).into_iter().chain(score.map(ScoreMod::expr));
        let layout = Layout::new(exprs, large.as_deref());
        Ok(Self { layout, captures, scalars, large })
    }

    fn owned(&self) -> Vec<Capture> {
        self.captures.iter().map(|&capture| capture.clone()).collect()
    }
}

/// The device's part of a captured tensor.
pub(crate) fn resident(capture: &Capture) -> Option<&Resident> {
    match capture.data() {
        CaptureData::Device(handle) => handle.get::<Resident>(),
        _ => None,
    }
}

/// Refuses a buffer of a captured tensor on the device that is too long: a kernel binds it as a whole.
pub(super) fn bindable(name: &str, needed: u64, profile: &Profile) -> Result<()> {
    let available = profile.limits.storage_binding;
    if needed <= available {
        return Ok(());
    }
    Err(Error::Limit {
        what: format!("the buffer of capture `{name}`"),
        limit: "maxStorageBufferBindingSize",
        needed,
        available,
        remedy: "give the tensor a smaller buffer, or the device the larger limit".into(),
    })
}

/// Host captures as the words of a buffer.
#[derive(Clone)]
pub(super) struct Packed {
    /// None when no capture is in host memory.
    pub(super) constant: Option<Constant>,
    /// The capture bound in place.
    pub(super) large: Option<Arc<str>>,
    large_at: u32,
}

impl Packed {
    /// The words after the parameters: shapes, places, scalars.
    pub(super) fn info(&self, mods: &Mods<'_>) -> Result<Vec<[u32; 4]>> {
        mods.layout.info(&mods.owned(), &mods.scalars, self.large_at)
    }
}

/// Hashes and packed words of the captures of the last few calls. Old ones leave soon: the cache
/// shares their memory and would keep it alive.
#[derive(Debug, Default)]
pub(super) struct Cache {
    hashes: Vec<(Capture, u128, u64)>,
    packed: Vec<(u128, Arc<[u32]>, u64)>,
    tick: u64,
}

impl Cache {
    /// Calls after which an entry that none of them used is dropped.
    const KEPT: u64 = 4;
    /// Hashes that are kept at most.
    const MOST: usize = 64;

    pub(super) fn len(&self) -> usize {
        self.hashes.len() + self.packed.len()
    }

    pub(super) fn pack(&mut self, mods: &Mods<'_>) -> Result<Packed> {
        self.tick += 1;
        let mut hash = Xxh3::new();
        let mut any = false;
        for decl in &mods.layout.captures {
            let Some(capture) = mods.captures.iter().find(|capture| capture.name() == &*decl.name) else {
                continue;
            };
            if let CaptureData::Device(_) = capture.data() {
                continue;
            }
            any = true;
            hash.update(&self.content(capture).to_le_bytes());
        }
        let large_at =
            mods.captures.iter().find_map(|capture| resident(capture)).map_or(0, |on_device| on_device.first);
        let constant = if any {
            let key = hash.digest128();
            let words = match self.packed.iter_mut().find(|(known, ..)| *known == key) {
                Some((_, words, used)) => {
                    *used = self.tick;
                    words.clone()
                }
                None => {
                    let words: Arc<[u32]> = mods.layout.words(&mods.owned())?.into();
                    self.packed.push((key, words.clone(), self.tick));
                    words
                }
            };
            Some(Constant { label: "captures", key, parts: vec![words] })
        } else {
            None
        };
        let oldest = self.tick.saturating_sub(Self::KEPT);
        self.hashes.retain(|&(.., used)| used > oldest);
        self.packed.retain(|&(.., used)| used > oldest);
        Ok(Packed { constant, large: mods.large.clone(), large_at })
    }

    /// A hash of type, shape and values; of the identity for a capture on the device.
    pub(super) fn content(&mut self, capture: &Capture) -> u128 {
        if let Some((_, hash, used)) = self.hashes.iter_mut().find(|(known, ..)| known.same(capture)) {
            *used = self.tick;
            return *hash;
        }
        let mut hash = Xxh3::new();
        hash.update(format!("{} {} {:?}", capture.name(), capture.dtype(), capture.shape()).as_bytes());
        if let Some(bytes) = capture.data().host_bytes() {
            hash.update(&xxh3_128(bytes).to_le_bytes());
        }
        let hash = hash.digest128();
        // Calls that are refused drop nothing by age.
        if self.hashes.len() >= Self::MOST {
            self.hashes.remove(0);
        }
        self.hashes.push((capture.clone(), hash, self.tick));
        hash
    }
}
