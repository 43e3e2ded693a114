//! Prebuilt masks: one function each, and a table of them all.
//!
//! Masks combine with `&`, `|` and `!`. A mistake in an argument (an empty list, a tile that does not
//! divide the canvas) is kept in the mask and reported by [`MaskMod::check`], which every operation
//! calls; nothing panics.
//!
//! Positions: `q` and `kv` are token positions, `q` with the call's `q_offset`, so that
//! `causal()` and the windows are right in decoding too. Lists captured by a mask are indexed with
//! positions and clamped: a list that is too short repeats its last value. Each function says what its captures are
//! called: [`Attention::with_capture`](crate::Attention::with_capture) gives them new values.
//!
//! ```
//! use flexattn::{BlockMask, BlockShape, masks};
//!
//! let ids = [0, 0, 0, 1, 1, 2, 2, 2];
//! let mask = masks::document(&ids) & masks::causal();
//! let kept = BlockMask::build(&mask, BlockShape::new(1, 1, 8, 8))?.kept()?;
//! assert_eq!(kept, 6 + 3 + 6);
//! # Ok::<(), flexattn::Error>(())
//! ```

mod grid;
mod packed;
mod table;

use crate::error::{Error, Result};
use crate::expr::{Bool, Capture, Captured, I32, Index, MaskMod};
use crate::prebuilt::{self, Params};

pub use grid::{natten_2d, sliding_tile_2d, sliding_tile_3d};
pub use packed::{
    document, document_from_offsets, document_per_batch, interval, packed_causal_document, row_interval,
    shared_prefix, tree,
};
pub use table::ALL;

/// The mask of this name in [`ALL`], with its parameters or their defaults.
///
/// # Errors
///
/// [`Error::Expression`] for a name, parameter or value that does not exist.
///
/// ```
/// use flexattn::{Params, masks};
///
/// let sizes = Params::new(1, 8, 1024, 1024);
/// let mask = masks::by_name("sliding_window", &sizes.clone().with("window", 64))?;
/// assert_eq!(mask.expr(), masks::sliding_window(64).expr());
/// assert!(masks::by_name("sliding_widow", &sizes).is_err());
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn by_name(name: &str, params: &Params) -> Result<MaskMod> {
    let mask = prebuilt::find(ALL, "mask", name)?.build(params)?;
    mask.check()?;
    Ok(mask)
}

/// `f` with a captured tensor, or the mistake in the tensor.
fn capturing<V>(capture: Result<Captured<V>>, f: impl FnOnce(&Index, &Captured<V>) -> Bool) -> MaskMod {
    match capture {
        Ok(capture) => MaskMod::new(|i| f(i, &capture)),
        Err(error) => MaskMod::mistaken(error),
    }
}

/// A mask that reports a value that breaks a rule.
fn refused(what: &str, value: impl std::fmt::Debug, rule: &str) -> MaskMod {
    MaskMod::mistaken(Error::expression(format!("{what} is {value:?} but {rule}")))
}

/// |q - kv|.
fn distance(i: &Index) -> I32 {
    (i.q() - i.kv()).abs()
}

/// Everything: `true`.
///
/// Source: the default of FlexAttention (PyTorch's `noop_mask`).
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::noop(), BlockShape::new(1, 1, 5, 7))?;
/// assert_eq!(mask.kept()?, 35);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn noop() -> MaskMod {
    MaskMod::new(|_| true.into())
}

/// Keys up to the query itself: `q >= kv`.
///
/// Position 0 of queries and keys coincide, whatever the lengths (top left, as in PyTorch); a call with
/// a `q_offset` shifts the queries. See [`bottom_right_causal`] for the other alignment.
///
/// Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 3, 3))?;
/// assert_eq!(mask.to_mask()?, [true, false, false, true, true, false, true, true, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn causal() -> MaskMod {
    MaskMod::new(|i| i.q().ge(i.kv()))
}

/// Causal with the last query at the last key: `q - q_len >= kv - kv_len`.
///
/// Follows the run-time lengths, of each batch entry. Give it no `q_offset`. It is the alignment of
/// FlashAttention since 2.1.
///
/// Source: the flash-attn package, whose `causal` has meant this since 2.1.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::bottom_right_causal(), BlockShape::new(1, 1, 2, 4))?;
/// assert_eq!(mask.to_mask()?, [true, true, true, false, true, true, true, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn bottom_right_causal() -> MaskMod {
    MaskMod::new(|i| (i.q() - i.q_len()).ge(i.kv() - i.kv_len()))
}

/// The last `window` keys, the query itself included: `q >= kv & q - kv < window`.
///
/// Counts as Mistral and Hugging Face's `sliding_window` do. attention-gym's window does not count the
/// query itself: its `w` is `sliding_window(w + 1)`.
///
/// Source: Jiang et al. 2023, "Mistral 7B", section 2.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::sliding_window(2), BlockShape::new(1, 1, 3, 3))?;
/// assert_eq!(mask.to_mask()?, [true, false, false, true, true, false, false, true, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn sliding_window(window: i32) -> MaskMod {
    MaskMod::new(|i| i.q().ge(i.kv()) & (i.q() - i.kv()).lt(window))
}

/// Keys from `before` before the query to `after` behind it, both included:
/// `q - kv <= before & kv - q <= after`.
///
/// FlashAttention's `window_size = (before, after)`; `local_window(w, w)` is a symmetric window.
///
/// Source: the flash-attn package, `window_size`.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::local_window(0, 1), BlockShape::new(1, 1, 3, 3))?;
/// assert_eq!(mask.to_mask()?, [true, true, false, false, true, true, false, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn local_window(before: i32, after: i32) -> MaskMod {
    MaskMod::new(|i| (i.q() - i.kv()).le(before) & (i.kv() - i.q()).le(after))
}

/// Every `dilation`-th key within `window` on both sides:
/// `|q - kv| <= window & |q - kv| % dilation == 0`.
///
/// Source: Beltagy et al. 2020, "Longformer", section 3.1.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::dilated_window(2, 2), BlockShape::new(1, 1, 4, 4))?;
/// assert_eq!(mask.to_mask()?[..4], [true, false, true, false]);
/// assert!(masks::dilated_window(2, 0).check().is_err());
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn dilated_window(window: i32, dilation: i32) -> MaskMod {
    if dilation < 1 {
        return refused("dilation", dilation, "must be at least 1; use 1 for every key");
    }
    MaskMod::new(|i| distance(i).le(window) & (distance(i) % dilation).eq(0))
}

/// A prefix that everyone sees, causal after it: `kv < prefix | q >= kv`.
///
/// Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning" (T5), section 3.2.1.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::prefix_lm(2), BlockShape::new(1, 1, 3, 3))?;
/// assert_eq!(mask.to_mask()?[..3], [true, true, false]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn prefix_lm(prefix: i32) -> MaskMod {
    MaskMod::new(|i| i.kv().lt(prefix) | i.q().ge(i.kv()))
}

/// [`prefix_lm`] with a prefix for each batch entry: `kv < prefix[b] | q >= kv`.
///
/// Captures `prefix`, i32 `[batch]`.
///
/// Source: as [`prefix_lm`].
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::prefix_lm_per_batch(&[0, 2]), BlockShape::new(2, 1, 2, 2))?;
/// assert_eq!(mask.to_mask()?, [true, false, true, true, true, true, true, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn prefix_lm_per_batch(prefix: &[i32]) -> MaskMod {
    capturing(Capture::i32("prefix", prefix, &[prefix.len()]), |i, prefix| {
        i.kv().lt(prefix.at([i.batch()])) | i.q().ge(i.kv())
    })
}

/// The tokens that are no padding, of each batch entry: `q < lengths[b] & kv < lengths[b]`.
///
/// Rows of padding keep nothing, so their output is 0.
///
/// Captures `length`, i32 `[batch]`.
///
/// Source: PyTorch's `key_padding_mask`, here of queries too.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::padding(&[1, 2]), BlockShape::new(2, 1, 2, 2))?;
/// assert_eq!(mask.to_mask()?, [true, false, false, false, true, true, true, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn padding(lengths: &[i32]) -> MaskMod {
    capturing(Capture::i32("length", lengths, &[lengths.len()]), |i, length| {
        let length = length.at([i.batch()]);
        i.q().lt(&length) & i.kv().lt(&length)
    })
}

/// A window on both sides, and tokens that see and are seen by everyone:
/// `|q - kv| <= window | is_global[q] | is_global[kv]`.
///
/// Captures `is_global`, bool `[tokens]`.
///
/// Source: Beltagy et al. 2020, "Longformer", section 3.1.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = masks::longformer(0, &[true, false, false]);
/// let mask = BlockMask::build(&mask, BlockShape::new(1, 1, 3, 3))?;
/// assert_eq!(mask.to_mask()?, [true, true, true, true, true, false, true, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn longformer(window: i32, is_global: &[bool]) -> MaskMod {
    capturing(Capture::bool("is_global", is_global, &[is_global.len()]), |i, is_global| {
        distance(i).le(window) | is_global.at([i.q()]) | is_global.at([i.kv()])
    })
}

/// A causal window and every `stride`-th key before it:
/// `q >= kv & (q - kv < window | (q - kv) % stride == 0)`.
///
/// Source: Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.2.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::strided(1, 2), BlockShape::new(1, 1, 4, 4))?;
/// assert_eq!(mask.to_mask()?[12..], [false, true, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn strided(window: i32, stride: i32) -> MaskMod {
    if stride < 1 {
        return refused("stride", stride, "must be at least 1; use 1 for plain causal attention");
    }
    MaskMod::new(|i| {
        let back = i.q() - i.kv();
        i.q().ge(i.kv()) & (back.lt(window) | (back % stride).eq(0))
    })
}

/// Blocks of `size` tokens that see only themselves: `q / size == kv / size`.
///
/// Source: Qiu et al. 2020, "Blockwise Self-Attention for Long Document Understanding", section 3 (its identity
/// permutation).
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::block_diagonal(2), BlockShape::new(1, 1, 3, 3))?;
/// assert_eq!(mask.to_mask()?, [true, true, false, true, true, false, false, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn block_diagonal(size: i32) -> MaskMod {
    if size < 1 {
        return refused("size", size, "must be at least 1; use 1 for every token alone");
    }
    MaskMod::new(|i| (i.q() / size).eq(i.kv() / size))
}

/// Block diffusion over `2 * len` tokens, the first half noised and the second clean, in blocks of
/// `block`: noised tokens see their own noised block and the clean blocks before it, clean tokens see
/// their own clean block and those before it.
///
/// With `half(x) = x >= len` and `block(x) = x % len / block`:
/// `half(q) == half(kv) & block(q) == block(kv) | half(kv) & block(q) > block(kv)`.
///
/// Source: Arriola et al. 2025, "Block Diffusion" (BD3-LM), section 3.2.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::block_diffusion(4, 2), BlockShape::new(1, 1, 8, 8))?;
/// // The third noised token, in the second block: itself, its neighbour, and the first clean block.
/// assert_eq!(mask.to_mask()?[2 * 8..3 * 8], [false, false, true, true, true, true, false, false]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn block_diffusion(len: i32, block: i32) -> MaskMod {
    if len < 1 || block < 1 {
        return refused("(len, block)", (len, block), "both must be at least 1; give tokens");
    }
    MaskMod::new(|i| {
        let clean = |x: I32| x.ge(len);
        let number = |x: I32| x.ge(len).select(&x - len, x) / block;
        let (clean_q, clean_kv) = (clean(i.q()), clean(i.kv()));
        let (block_q, block_kv) = (number(i.q()), number(i.kv()));
        (clean_q.eq(&clean_kv) & block_q.eq(&block_kv)) | (clean_kv & block_q.gt(block_kv))
    })
}

/// A mask from the value for every pair: `keep[b, h, q, kv]`, row-major.
///
/// A dimension of 1 is shared by all. Indexed with positions: give it no `q_offset` unless `keep` has all
/// rows. To build a [`BlockMask`](crate::BlockMask) from the tensor at memory speed, use
/// [`BlockMask::from_dense_mask`](crate::BlockMask::from_dense_mask).
///
/// Captures `keep`, bool of `shape`.
///
/// Source: PyTorch's `scaled_dot_product_attention`, a boolean `attn_mask`.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let keep = [true, false, true, true, true, false];
/// let mask = BlockMask::build(&masks::dense(&keep, [1, 1, 2, 3]), BlockShape::new(4, 8, 2, 3))?;
/// assert_eq!(mask.to_mask()?[..6], keep);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn dense(keep: &[bool], shape: [usize; 4]) -> MaskMod {
    capturing(Capture::bool("keep", keep, &shape), |i, keep| {
        // An index into a dimension of 1 is 0, so that the mask does not seem to depend on it.
        let at = |dim: usize, index: I32| if shape[dim] == 1 { 0.into() } else { index };
        keep.at([at(0, i.batch()), at(1, i.head()), at(2, i.q()), at(3, i.kv())])
    })
}
