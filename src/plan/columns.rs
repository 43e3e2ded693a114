//! v with more columns than a kernel accumulates at once: the columns of out do not depend on each other, so a
//! call is made for each slice of them. S is computed again in each; the statistics come out the same.

use super::{Cache, Forward, Plan, Source};
use crate::error::Result;
use crate::runtime::Profile;

/// Columns of v that every tier has a tile for.
pub(crate) const MOST: usize = 512;

/// One plan after the other, over the same buffers.
pub(super) fn sliced(call: &Forward<'_>, profile: &Profile, cache: &Cache) -> Result<Plan> {
    let columns = call.shape.v_dim;
    let mut whole = Plan { passes: Vec::new(), constants: Vec::new(), scratch: Vec::new(), stats: 0 };
    for first in (0..columns).step_by(MOST) {
        let mut slice = call.clone();
        slice.shape.v_dim = (columns - first).min(MOST);
        for operand in [&mut slice.v, &mut slice.out] {
            operand.layout.shape[3] = slice.shape.v_dim;
            operand.layout.offset += first;
        }
        let mut plan = super::forward(&slice, profile, cache)?;
        for source in plan.passes.iter_mut().flat_map(|pass| &mut pass.slots).map(|slot| &mut slot.source) {
            match source {
                Source::Constant(n) => *n += whole.constants.len(),
                Source::Scratch(n) => *n += whole.scratch.len(),
                Source::Tensor(_)
                | Source::Stats
                | Source::Capture(_)
                | Source::Unread
                | Source::Unwritten => {}
            }
        }
        whole.passes.append(&mut plan.passes);
        whole.constants.append(&mut plan.constants);
        whole.scratch.append(&mut plan.scratch);
        whole.stats = plan.stats;
    }
    Ok(whole)
}
