//! The table of all prebuilt masks.

use super::*;
use crate::prebuilt::Prebuilt;

/// `count` unequal parts of `len` tokens, as offsets.
fn offsets(len: i32, count: i32) -> Vec<i32> {
    // Lengths grow from part to part; any unequal ones would do.
    let total = i64::from(count) * i64::from(count + 1) / 2;
    (0..=count)
        .map(|part| (i64::from(len) * i64::from(part) * i64::from(part + 1) / 2 / total) as i32)
        .collect()
}

/// The part of each of `len` tokens.
fn parts(len: i32, count: i32) -> Vec<i32> {
    let offsets = offsets(len, count);
    (0..len.max(1))
        .map(|token| offsets[1..].partition_point(|&end| end <= token).min(count as usize - 1) as i32)
        .collect()
}

/// The most square image of `len` tokens: height and width.
fn image(len: i32) -> [i32; 2] {
    let len = len.max(1);
    let height = (1..=len.isqrt()).rev().find(|height| len % height == 0).unwrap_or(1);
    [height, len / height]
}

/// A divisor of `len`, at most `most`.
fn divisor(len: i32, most: i32) -> i32 {
    (1..=most).rev().find(|side| len % side == 0).unwrap_or(1)
}

/// `kernel` made odd and at most `len`.
fn odd(kernel: i32, len: i32) -> i32 {
    let kernel = kernel.min(len).max(1);
    kernel - (1 - kernel % 2)
}

fn flags(params: &Params, name: &str, default: impl FnOnce() -> Vec<i32>) -> Result<Vec<bool>> {
    Ok(params.ints(name, default)?.iter().map(|&flag| flag != 0).collect())
}

fn sliding_tiles<const N: usize>(params: &Params, canvas: [i32; N]) -> Result<[[i32; N]; 3]> {
    let canvas = params.sides("canvas", canvas)?;
    let tile = params.sides("tile", canvas.map(|side| divisor(side.max(1), 4)))?;
    let mut window = [1; N];
    for (window, (canvas, tile)) in window.iter_mut().zip(canvas.iter().zip(tile)) {
        *window = odd(3, canvas / tile.max(1));
    }
    Ok([canvas, tile, params.sides("window", window)?])
}

/// Every prebuilt mask, in the order of this page, with parameters that have defaults for any sizes.
///
/// ```
/// use flexattn::{Params, masks};
///
/// for row in masks::ALL {
///     row.build(&Params::new(2, 4, 96, 96))?.check()?;
/// }
/// # Ok::<(), flexattn::Error>(())
/// ```
pub const ALL: &[Prebuilt<MaskMod>] = &[
    Prebuilt { name: "noop", formula: "true", params: &[], make: |_| Ok(noop()) },
    Prebuilt { name: "causal", formula: "q >= kv", params: &[], make: |_| Ok(causal()) },
    Prebuilt {
        name: "bottom_right_causal",
        formula: "q - q_len >= kv - kv_len",
        params: &[],
        make: |_| Ok(bottom_right_causal()),
    },
    Prebuilt {
        name: "sliding_window",
        formula: "q >= kv & q - kv < window",
        params: &[("window", "keys, the query itself included")],
        make: |p| Ok(sliding_window(p.int("window", 256)?)),
    },
    Prebuilt {
        name: "local_window",
        formula: "q - kv <= before & kv - q <= after",
        params: &[("before", "keys before the query"), ("after", "keys behind the query")],
        make: |p| Ok(local_window(p.int("before", 128)?, p.int("after", 128)?)),
    },
    Prebuilt {
        name: "dilated_window",
        formula: "|q - kv| <= window & |q - kv| % dilation == 0",
        params: &[("window", "largest distance"), ("dilation", "step of distances")],
        make: |p| Ok(dilated_window(p.int("window", 256)?, p.int("dilation", 4)?)),
    },
    Prebuilt {
        name: "prefix_lm",
        formula: "kv < prefix | q >= kv",
        params: &[("prefix", "tokens that everyone sees")],
        make: |p| Ok(prefix_lm(p.int("prefix", p.len() / 4)?)),
    },
    Prebuilt {
        name: "prefix_lm_per_batch",
        formula: "kv < prefix[b] | q >= kv",
        params: &[("prefix", "for each batch entry, tokens that everyone sees")],
        make: |p| {
            let prefix =
                p.ints("prefix", || (1..=p.batch as i32).map(|b| p.len() / (2 * b + 1)).collect())?;
            Ok(prefix_lm_per_batch(&prefix))
        },
    },
    Prebuilt {
        name: "padding",
        formula: "q < lengths[b] & kv < lengths[b]",
        params: &[("lengths", "for each batch entry, its tokens")],
        make: |p| {
            let lengths =
                p.ints("lengths", || (0..p.batch as i32).map(|b| p.len() - p.len() / 4 * (b % 3)).collect())?;
            Ok(padding(&lengths))
        },
    },
    Prebuilt {
        name: "document",
        formula: "doc[q] == doc[kv]",
        params: &[("ids", "the document of each token")],
        make: |p| Ok(document(&p.ints("ids", || parts(p.len(), 4))?)),
    },
    Prebuilt {
        name: "document_per_batch",
        formula: "doc[b, q] == doc[b, kv]",
        params: &[("ids", "the document of each token of each batch entry")],
        make: |p| {
            let ids = p.ints("ids", || (0..p.batch as i32).flat_map(|b| parts(p.len(), 3 + b)).collect())?;
            Ok(document_per_batch(&ids, p.batch))
        },
    },
    Prebuilt {
        name: "document_from_offsets",
        formula: "doc[q] == doc[kv]",
        params: &[("offsets", "where documents begin, and the end")],
        make: |p| Ok(document_from_offsets(&p.ints("offsets", || offsets(p.len(), 4))?)),
    },
    Prebuilt {
        name: "packed_causal_document",
        formula: "kv >= start[q] & q >= kv",
        params: &[("offsets", "where documents begin, and the end")],
        make: |p| Ok(packed_causal_document(&p.ints("offsets", || offsets(p.len(), 4))?)),
    },
    Prebuilt {
        name: "row_interval",
        formula: "first[q] <= kv & kv < end[q]",
        params: &[("first", "for each row, its first key"), ("end", "for each row, the end of its keys")],
        make: |p| {
            let first = p.ints("first", || (0..p.len().max(1)).map(|q| q / 2).collect())?;
            let end = p.ints("end", || (0..p.len().max(1)).map(|q| q / 2 + q / 3 + 1).collect())?;
            Ok(row_interval(&first, &end))
        },
    },
    Prebuilt {
        name: "longformer",
        formula: "|q - kv| <= window | is_global[q] | is_global[kv]",
        params: &[("window", "largest distance"), ("is_global", "for each token, 1 if it is global")],
        make: |p| {
            let is_global =
                flags(p, "is_global", || (0..p.len().max(1)).map(|i| i32::from(i % 500 == 3)).collect())?;
            Ok(longformer(p.int("window", 128)?, &is_global))
        },
    },
    Prebuilt {
        name: "strided",
        formula: "q >= kv & (q - kv < window | (q - kv) % stride == 0)",
        params: &[("window", "keys before the query"), ("stride", "step of the keys before those")],
        make: |p| Ok(strided(p.int("window", 128)?, p.int("stride", 128)?)),
    },
    Prebuilt {
        name: "block_diagonal",
        formula: "q / size == kv / size",
        params: &[("size", "tokens of a block")],
        make: |p| Ok(block_diagonal(p.int("size", 200)?)),
    },
    Prebuilt {
        name: "natten_2d",
        formula: "|clamp(q / width) - kv / width| <= kernel / 2, and the same with columns",
        params: &[
            ("height", "rows of the image"),
            ("width", "columns of the image"),
            ("kernel", "odd side of the square"),
        ],
        make: |p| {
            let [height, width] = image(p.len());
            let (height, width) = (p.int("height", height)?, p.int("width", width)?);
            Ok(natten_2d(height, width, p.int("kernel", odd(7, height.min(width)))?))
        },
    },
    Prebuilt {
        name: "sliding_tile_2d",
        formula: "|clamp(tile of q) - tile of kv| <= window / 2 on both axes, or text",
        params: &[
            ("canvas", "height and width in tokens"),
            ("tile", "height and width of a tile in tokens"),
            ("window", "odd height and width of the window in tiles"),
            ("text", "text tokens behind the image"),
        ],
        make: |p| {
            let [canvas, tile, window] = sliding_tiles(p, image(p.len()))?;
            Ok(sliding_tile_2d(canvas, tile, window, p.int("text", 0)?))
        },
    },
    Prebuilt {
        name: "sliding_tile_3d",
        formula: "|clamp(tile of q) - tile of kv| <= window / 2 on all axes, or text",
        params: &[
            ("canvas", "frames, height and width in tokens"),
            ("tile", "frames, height and width of a tile in tokens"),
            ("window", "odd frames, height and width of the window in tiles"),
            ("text", "text tokens behind the video"),
        ],
        make: |p| {
            let frames = divisor(p.len().max(1), 8);
            let [height, width] = image(p.len() / frames);
            let [canvas, tile, window] = sliding_tiles(p, [frames, height, width])?;
            Ok(sliding_tile_3d(canvas, tile, window, p.int("text", 0)?))
        },
    },
    Prebuilt {
        name: "shared_prefix",
        formula: "doc[q] == doc[kv] & q >= kv | prefix_of[doc[q]] == doc[kv]",
        params: &[("ids", "the document of each token"), ("prefix_of", "the prefix of each document, or -1")],
        make: |p| {
            let ids = p.ints("ids", || parts(p.len(), 4))?;
            Ok(shared_prefix(&ids, &p.ints("prefix_of", || vec![-1, 0, 0, -1])?))
        },
    },
    Prebuilt {
        name: "block_diffusion",
        formula: "half(q) == half(kv) & block(q) == block(kv) | half(kv) & block(q) > block(kv)",
        params: &[("len", "tokens of each half"), ("block", "tokens of a block")],
        make: |p| Ok(block_diffusion(p.int("len", (p.len() / 2).max(1))?, p.int("block", 16)?)),
    },
    Prebuilt {
        name: "tree",
        formula: "kv < prefix | above[q, kv - prefix]",
        params: &[("prefix", "cached keys"), ("parents", "the node above each node, or -1")],
        make: |p| {
            let (q_len, kv_len) = (p.q_len.min(64) as i32, p.kv_len as i32);
            let parents = p.ints("parents", || (0..q_len.max(1)).map(|node| (node + 1) / 2 - 1).collect())?;
            Ok(tree(p.int("prefix", (kv_len - parents.len() as i32).max(0))?, &parents))
        },
    },
    Prebuilt {
        name: "interval",
        formula: "intervals[group[kv], 0] <= q & q < intervals[group[kv], 1]",
        params: &[("group", "the group of each key"), ("intervals", "first row and end for each group")],
        make: |p| {
            let (q_len, kv_len) = (p.q_len as i32, p.kv_len as i32);
            let group = p.ints("group", || parts(kv_len, 3))?;
            let intervals = p.ints("intervals", || {
                let at = offsets(q_len, 5);
                vec![at[1], at[2], at[2], at[4], at[4], at[5]]
            })?;
            Ok(interval(&group, intervals.as_chunks().0))
        },
    },
    Prebuilt {
        name: "dense",
        formula: "keep[b, h, q, kv]",
        params: &[
            ("keep", "for each pair, 1 if it is kept"),
            ("shape", "batch, heads, rows and columns of `keep`"),
        ],
        make: |p| {
            // A default that keeps memory small: one line for all rows.
            let shape = p.sides("shape", [1, 1, 1, i32::try_from(p.kv_len.max(1)).unwrap_or(i32::MAX)])?;
            let keep = flags(p, "keep", || (0..shape[3]).map(|kv| i32::from(kv % 7 < 4)).collect())?;
            Ok(dense(&keep, shape.map(|dim| usize::try_from(dim).unwrap_or(0))))
        },
    },
];
