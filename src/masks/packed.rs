//! Masks over packed sequences, prefixes and trees.

use super::{capturing, refused};
use crate::error::{Error, reserved};
use crate::expr::{Capture, MaskMod};
use std::collections::HashMap;

/// Tokens of one document: `doc[q] == doc[kv]`, by the document's id for each token.
///
/// Ids may be in any order; tokens of one id see each other wherever they are. The mask numbers documents anew, in the
/// order in which they appear. Give an id for each token: those past the end have the last one, as every index past a
/// captured tensor is clamped.
///
/// Captures `doc`, i32 `[tokens]`.
///
/// Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", section 3.2.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::document(&[7, 7, 3]), BlockShape::new(1, 1, 3, 3))?;
/// assert_eq!(mask.to_mask()?, [true, true, false, true, true, false, false, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn document(ids: &[i32]) -> MaskMod {
    let ids = numbered(ids);
    capturing(Capture::i32("doc", &ids, &[ids.len()]), |i, doc| doc.at([i.q()]).eq(doc.at([i.kv()])))
}

/// [`document`] with ids for each batch entry: `doc[b, q] == doc[b, kv]`, `ids` being `[batch, tokens]`
/// row-major.
///
/// Captures `doc`, i32 `[batch, tokens]`.
///
/// Source: as [`document`].
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = masks::document_per_batch(&[0, 0, 0, 1], 2);
/// let mask = BlockMask::build(&mask, BlockShape::new(2, 1, 2, 2))?;
/// assert_eq!(mask.to_mask()?, [true, true, true, true, true, false, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn document_per_batch(ids: &[i32], batch: usize) -> MaskMod {
    if batch == 0 || !ids.len().is_multiple_of(batch) {
        return refused(
            "batch",
            batch,
            &format!("must divide the {} ids; give as many for each entry", ids.len()),
        );
    }
    let ids: Vec<i32> = ids.chunks_exact((ids.len() / batch).max(1)).flat_map(numbered).collect();
    capturing(Capture::i32("doc", &ids, &[batch, ids.len() / batch]), |i, doc| {
        doc.at([i.batch(), i.q()]).eq(doc.at([i.batch(), i.kv()]))
    })
}

/// The ids with the first one to appear as 0, the next as 1 and so on: the same mask, and whatever the ids
/// were, those of packed documents ascend, so that ranges tell documents apart.
fn numbered(ids: &[i32]) -> Vec<i32> {
    let mut numbers = HashMap::new();
    let mut last = None;
    ids.iter()
        .map(|&id| match last {
            Some((before, number)) if before == id => number,
            _ => {
                let next = numbers.len() as i32;
                let number = *numbers.entry(id).or_insert(next);
                last = Some((id, number));
                number
            }
        })
        .collect()
}

/// [`document`] from the offsets at which documents begin, with the end of the last: document `d` is
/// `offsets[d]..offsets[d + 1]`. Tokens behind the last offset are one more document.
///
/// Captures `doc`, i32 `[tokens + 1]`.
///
/// Source: as [`document`]; the offsets are the flash-attn package's `cu_seqlens`.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = masks::document_from_offsets(&[0, 2, 3]);
/// let mask = BlockMask::build(&mask, BlockShape::new(1, 1, 4, 4))?;
/// assert_eq!(mask.kept()?, 4 + 1 + 1);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn document_from_offsets(offsets: &[i32]) -> MaskMod {
    match per_token(offsets, |document, _| document) {
        Ok(ids) => document(&ids),
        Err(error) => MaskMod::mistaken(error),
    }
}

/// Packed documents, causal in each: `kv >= start[q] & q >= kv`, where `start[q]` is where the document of `q`
/// begins. `offsets` as in [`document_from_offsets`].
///
/// The same mask as `document_from_offsets(offsets) & causal()` in the form that costs a kernel least:
/// one interval of keys for each row, and one read.
///
/// Captures `doc_start`, i32 `[tokens + 1]`.
///
/// Source: as [`document`], and [`causal`](crate::masks::causal).
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let offsets = [0, 200, 500];
/// let shape = BlockShape::new(1, 1, 500, 500);
/// let packed = BlockMask::build(&masks::packed_causal_document(&offsets), shape)?;
/// let mask = masks::document_from_offsets(&offsets) & masks::causal();
/// assert_eq!(packed, BlockMask::build(&mask, shape)?);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn packed_causal_document(offsets: &[i32]) -> MaskMod {
    match per_token(offsets, |_, start| start) {
        Ok(starts) => capturing(Capture::i32("doc_start", &starts, &[starts.len()]), |i, start| {
            i.kv().ge(start.at([i.q()])) & i.q().ge(i.kv())
        }),
        Err(error) => MaskMod::mistaken(error),
    }
}

/// `value(document, start)` for each token of packed documents, and once for what follows them.
fn per_token(offsets: &[i32], value: impl Fn(i32, i32) -> i32) -> Result<Vec<i32>, Error> {
    let ascending = offsets.windows(2).all(|pair| pair[0] <= pair[1]);
    let Some(&end) = offsets.last().filter(|_| ascending && offsets[0] == 0) else {
        return Err(Error::expression(format!(
            "the {} document offsets must ascend from 0 to the number of tokens; cumulate the lengths again",
            offsets.len()
        )));
    };
    let mut out = reserved("documents", Some(end as usize + 1))?;
    for (document, pair) in (0..).zip(offsets.windows(2)) {
        out.resize(pair[1] as usize, value(document, pair[0]));
    }
    out.push(value(offsets.len() as i32 - 1, end));
    Ok(out)
}

/// Keys of an interval for each row: `first[q] <= kv & kv < end[q]`.
///
/// Captures `first` and `end`, i32 `[rows]`.
///
/// Source: Wang et al. 2024, "FlashMask", section 4 (there intervals of rows for each column).
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = masks::row_interval(&[0, 1], &[1, 3]);
/// let mask = BlockMask::build(&mask, BlockShape::new(1, 1, 2, 3))?;
/// assert_eq!(mask.to_mask()?, [true, false, false, false, true, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn row_interval(first: &[i32], end: &[i32]) -> MaskMod {
    if first.len() != end.len() {
        return refused(
            "the number of ends",
            end.len(),
            &format!("must be that of the starts, {}; give one each", first.len()),
        );
    }
    capturing(Capture::i32("first", first, &[first.len()]), |i, first| first.at([i.q()]).le(i.kv()))
        & capturing(Capture::i32("end", end, &[end.len()]), |i, end| i.kv().lt(end.at([i.q()])))
}

/// Cross attention by intervals, as between text and images: key `kv` belongs to group
/// `group[kv]`, and group `g` is seen by rows `intervals[g][0]..intervals[g][1]`:
/// `intervals[group[kv], 0] <= q & q < intervals[group[kv], 1]`.
///
/// Captures `group`, i32 `[keys]`, and `interval`, i32 `[groups, 2]`.
///
/// Source: Alayrac et al. 2022, "Flamingo", section 2.3 (text sees the image before it).
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// // Two images of two and one key; text rows 1 and 2 see the first, row 3 the second.
/// let mask = masks::interval(&[0, 0, 1], &[[1, 3], [3, 4]]);
/// let mask = BlockMask::build(&mask, BlockShape::new(1, 1, 4, 3))?;
/// assert_eq!(mask.to_mask()?[3..6], [true, true, false]);
/// assert_eq!(mask.kept()?, 4 + 1);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn interval(group: &[i32], intervals: &[[i32; 2]]) -> MaskMod {
    let table = match Capture::i32("interval", intervals.as_flattened(), &[intervals.len(), 2]) {
        Ok(table) => table,
        Err(error) => return MaskMod::mistaken(error),
    };
    capturing(Capture::i32("group", group, &[group.len()]), |i, group| {
        let group = group.at([i.kv()]);
        table.at([group.clone(), 0.into()]).le(i.q()) & i.q().lt(table.at([group, 1.into()]))
    })
}

/// Packed sequences of which some share a prefix, as rollouts of one prompt do: a token sees its own
/// document causally and the whole document that is its prefix:
/// `doc[q] == doc[kv] & q >= kv | prefix_of[doc[q]] == doc[kv]`.
///
/// `prefix_of[d]` is the prefix of document `d`, or -1; ids must be indices into it.
///
/// Captures `doc`, i32 `[tokens]`, and `prefix_of`, i32 `[documents]`.
///
/// Source: Juravsky et al. 2024, "Hydragen", section 3 (there in two passes, here as a mask).
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// // A prompt of two tokens and two answers of one.
/// let mask = masks::shared_prefix(&[0, 0, 1, 2], &[-1, 0, 0]);
/// let mask = BlockMask::build(&mask, BlockShape::new(1, 1, 4, 4))?;
/// assert_eq!(mask.to_mask()?[12..], [true, true, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn shared_prefix(ids: &[i32], prefix_of: &[i32]) -> MaskMod {
    if let Some(id) = ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= prefix_of.len())) {
        return refused(
            "a document id",
            id,
            &format!("must be from 0 to below {}; give each document a prefix or -1", prefix_of.len()),
        );
    }
    let prefix = match Capture::i32("prefix_of", prefix_of, &[prefix_of.len()]) {
        Ok(prefix) => prefix,
        Err(error) => return MaskMod::mistaken(error),
    };
    capturing(Capture::i32("doc", ids, &[ids.len()]), |i, doc| {
        let (of_q, of_kv) = (doc.at([i.q()]), doc.at([i.kv()]));
        (of_q.eq(&of_kv) & i.q().ge(i.kv())) | prefix.at([of_q]).eq(of_kv)
    })
}

/// Verification of a tree of drafted tokens: row `q` is node `q` and sees the `prefix` cached keys and, at keys
/// `prefix..`, itself and the nodes above it: `kv < prefix | above[q, kv - prefix]`.
///
/// `parents[n]` is the node above `n`, smaller than `n`, or -1 at the root. Rows are nodes: give it no `q_offset`.
///
/// Captures `above`, bool `[nodes, nodes]`.
///
/// Source: Miao et al. 2023, "SpecInfer", section 4.2.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// // One cached token, a root and two branches.
/// let mask = masks::tree(1, &[-1, 0, 0]);
/// let mask = BlockMask::build(&mask, BlockShape::new(1, 1, 3, 4))?;
/// assert_eq!(mask.to_mask()?[8..], [true, true, false, true]);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn tree(prefix: i32, parents: &[i32]) -> MaskMod {
    let nodes = parents.len();
    let mut above = vec![false; nodes * nodes];
    for (node, &parent) in parents.iter().enumerate() {
        match usize::try_from(parent) {
            Ok(parent) if parent < node => {
                let (before, row) = above.split_at_mut(node * nodes);
                row[..nodes].copy_from_slice(&before[parent * nodes..][..nodes]);
            }
            Err(_) if parent == -1 => {}
            _ => {
                return refused(
                    "a parent",
                    parent,
                    &format!(
                        "the one of node {node} must be a smaller node or -1; number nodes from the root"
                    ),
                );
            }
        }
        above[node * nodes + node] = true;
    }
    let count = i32::try_from(nodes).unwrap_or(i32::MAX);
    if prefix < 0 || prefix.checked_add(count).is_none() {
        return refused("prefix", prefix, "must be at least 0 and leave room for the nodes below 2^31");
    }
    capturing(Capture::bool("above", &above, &[nodes, nodes]), |i, above| {
        let node = i.kv() - prefix;
        i.kv().lt(prefix) | (i.kv().lt(prefix + count) & above.at([i.q(), node]))
    })
}
