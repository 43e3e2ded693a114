//! The expression that says exactly what a block mask keeps.

use super::{BlockMask, Class};
use crate::error::Result;
use crate::expr::{Capture, Expr, Input, MaskMod, View};
use xxhash_rust::xxh3::xxh3_64;

impl BlockMask {
    /// A mask_mod that keeps exactly what this block mask keeps.
    ///
    /// The mask_mod itself when the lists came from it. Imported lists may leave out blocks where it
    /// keeps something; then the classes of the blocks join it as captured tensors.
    pub(crate) fn meaning(&self) -> Result<MaskMod> {
        let mask_mod = match &self.mask_mod {
            Some(mask_mod) if self.derived => return Ok(mask_mod.clone()),
            Some(mask_mod) => mask_mod.clone(),
            None if self.rows.partials.is_empty() => crate::masks::noop(),
            None => return Err(self.no_mask_mod()),
        };
        let classes = self.to_dense();
        if classes.is_empty() {
            return Ok(!crate::masks::noop());
        }
        let shape =
            [self.mask_batch(), self.mask_heads(), self.block_rows() as usize, self.block_columns() as usize];
        // Two imported masks may meet in one expression, so the names follow from the content.
        let mut bytes: Vec<u8> = classes.iter().map(|&class| class as u8).collect();
        bytes.extend(format!("{shape:?}{:?}", self.q_offset).bytes());
        let id = xxh3_64(&bytes);
        let listed: Vec<bool> = classes.iter().map(|&class| class != Class::Empty).collect();
        let full: Vec<bool> = classes.iter().map(|&class| class == Class::Full).collect();
        let listed = Capture::bool(&format!("listed_{id:016x}"), &listed, &shape)?;
        let full = Capture::bool(&format!("full_{id:016x}"), &full, &shape)?;
        let offset = Capture::i32(&format!("offset_{id:016x}"), &self.q_offset, &[self.q_offset.len()])?;
        let offset_is_zero = self.q_offset.iter().all(|&offset| offset == 0);
        let [block_q, block_kv] = self.block.map(u32::cast_signed);
        Ok(MaskMod::new(|i| {
            let row = if offset_is_zero { i.q() } else { i.q().wrapping_sub(offset.at([i.batch()])) };
            let at = [i.batch(), i.head(), row / block_q, i.kv() / block_kv];
            full.at(at.clone()) | (listed.at(at) & mask_mod.at(i))
        }))
    }
}

/// The mask with its lengths as they are now, so that it means the same in a call of other lengths.
pub(super) fn fix_lengths(mask_mod: &MaskMod, q_len: u32, kv_lens: &[u32]) -> Result<MaskMod> {
    let inputs = mask_mod.expr().inputs();
    if !inputs.contains(Input::QLen) && !inputs.contains(Input::KvLen) {
        return Ok(mask_mod.clone());
    }
    let lens: Vec<i32> = kv_lens.iter().map(|&len| len.cast_signed()).collect();
    let mut captures = mask_mod.captures().to_vec();
    let kv_len = match lens[..] {
        [len] => Expr::constant(len),
        _ => {
            let bytes: Vec<u8> = lens.iter().flat_map(|len| len.to_le_bytes()).collect();
            let name = format!("kv_lens_{:016x}", xxh3_64(&bytes));
            let lens = Capture::i32(&name, &lens, &[lens.len()])?;
            let mut gather = None;
            MaskMod::new(|i| {
                let len = lens.at([i.batch()]);
                gather = Some(len.expr().clone());
                len.to_bool()
            });
            captures.push(lens.into());
            gather.unwrap_or_else(|| Expr::input(Input::KvLen))
        }
    };
    let expr = mask_mod.expr().replace_inputs(|input| match input {
        Input::QLen => Some(Expr::constant(q_len.cast_signed())),
        Input::KvLen => Some(kv_len.clone()),
        _ => None,
    })?;
    MaskMod::from_expr(expr, &captures, mask_mod.scalars())
}
