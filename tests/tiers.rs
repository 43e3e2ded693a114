//! The tiers that this machine has.

use flexattn::{Gpu, Tier};

/// Those of `tiers` that are here; the others are named.
pub(crate) fn here(tiers: &[Tier]) -> Vec<Gpu> {
    let mut found = Vec::new();
    for tier in tiers {
        match Gpu::builder().tier(*tier).build() {
            Ok(gpu) => found.push(gpu),
            Err(reason) => println!("skipped: {tier}: {reason}"),
        }
    }
    found
}
