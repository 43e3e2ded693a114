//! The launches that look into the blocks of a mask which reads a tensor on the device.

use super::captures::{self, Mods};
use super::{Constant, Pass, Plan, Role, Slot, Source, fold};
use crate::block_mask::OpenMask;
use crate::error::Result;
use crate::kernels::{F16, Kernel, KernelSpec, NONE, Params, Tile};
use crate::lower;
use crate::runtime::Profile;
use crate::shape::{BLOCK, DType};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// Plans the tile maps of the open blocks of a mask: words of the tensor [`Role::Out`], in their order.
///
/// # Errors
///
/// [`Error::Capture`](crate::Error::Capture) for a second captured tensor on the device, and for one that no
/// kernel can bind.
pub(crate) fn scan(mask: &OpenMask, profile: &Profile) -> Result<Plan> {
    let mods = Mods::new(Some(mask.mask_mod()), None)?;
    let packed = captures::Cache::default().pack(&mods)?;
    let info = packed.info(&mods)?;
    let spec = Arc::new(spec(mask, &mods, profile)?);
    let mut constants: Vec<Constant> = packed.constant.into_iter().collect();
    let captures = if constants.is_empty() { Source::Unread } else { Source::Constant(0) };
    let large = packed.large.map_or(Source::Unread, Source::Capture);

    let pairs = (BLOCK * BLOCK) as f64;
    let work = pairs * mask.mask_mod().expr().nodes() as f64;
    let each = ((Plan::budget(profile) / work) as usize).clamp(1, u32::MAX as usize);
    let mut passes = Vec::new();
    let window = blocks_of_a_binding(mask, profile);
    for (at, blocks) in mask.open().chunks(window).enumerate() {
        let (tables, base) = tables(mask, blocks);
        constants.push(tables);
        let maps = Slot {
            source: Source::Tensor(Role::Out),
            offset: 4 * (at * window) as u64,
            size: 4 * blocks.len() as u64,
        };
        for first in (0..blocks.len()).step_by(each) {
            let groups = (first + each).min(blocks.len());
            let params = Params { first_group: first as u32, groups: groups as u32, ..base };
            let unread = || Slot::whole(Source::Unread);
            let slots = vec![
                unread(),
                unread(),
                unread(),
                maps.clone(),
                Slot::whole(Source::Unwritten),
                Slot::whole(Source::Constant(constants.len() - 1)),
                Slot::whole(captures.clone()),
                Slot::whole(large.clone()),
            ];
            let count = groups - first;
            let grid = fold(count as u32, profile.limits.workgroups)?;
            passes.push(Pass::new(&spec, slots, params, &info, grid, work * count as f64));
        }
    }
    Ok(Plan { passes, constants, scratch: Vec::new(), stats: 0 })
}

fn spec(mask: &OpenMask, mods: &Mods<'_>, profile: &Profile) -> Result<KernelSpec> {
    // There are no q, k and v whose type and columns would matter.
    let (kernel, dtype) = (Kernel::BlockMask, DType::F32);
    Ok(KernelSpec {
        kernel,
        dtype,
        f16: F16::Packed,
        head_dim: 0,
        v_dim: 0,
        tile: Tile::choose(kernel, dtype, 0, 0, profile)?,
        metal: None,
        aligned: true,
        pooled: false,
        dkv: [true; 2],
        mods: lower::Mods { mask: Some(mask.mask_mod().expr().clone()), ..lower::Mods::default() },
        layout: mods.layout.clone(),
    })
}

/// Blocks whose numbers, and whose maps, are one binding: the maps of the next begin where one may.
fn blocks_of_a_binding(mask: &OpenMask, profile: &Profile) -> usize {
    let alignment = profile.limits.storage_alignment.max(4);
    let before = 8 * mask.q_offset().len() as u64;
    let bytes = profile.limits.storage_binding.saturating_sub(before) / alignment * alignment;
    (bytes / 4).max(1) as usize
}

/// q_offset and kv_len of each batch entry, then the blocks; and the parameters that say so.
fn tables(mask: &OpenMask, blocks: &[u32]) -> (Constant, Params) {
    let entries = mask.q_offset().len() as u32;
    let [q_len, kv_len] = mask.lengths();
    let [q_blocks, kv_blocks] = mask.blocks();
    let mut words: Vec<u32> = mask.q_offset().iter().map(|offset| offset.cast_unsigned()).collect();
    words.extend_from_slice(mask.kv_lens());
    words.extend_from_slice(blocks);
    let key = xxh3_128(bytemuck::cast_slice(&words));
    let params = Params {
        batch: entries,
        q_heads: mask.heads(),
        q_len,
        kv_len,
        q_blocks,
        kv_blocks,
        mask_batch: entries,
        mask_heads: mask.heads(),
        lists: 2 * entries,
        q_offset_at: 0,
        kv_len_at: entries,
        sinks_at: NONE,
        lse_at: NONE,
        max_at: NONE,
        delta_at: NONE,
        dlse_at: NONE,
        ..Params::default()
    };
    (Constant { label: "blocks to look into", key, parts: vec![words.into()] }, params)
}
