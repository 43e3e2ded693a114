//! Masks over images and videos that are flattened to sequences.

use super::refused;
use crate::expr::{Bool, I32, MaskMod};

/// Neighbourhood attention on an image of `height` x `width` tokens in row order: each token sees the
/// `kernel` x `kernel` square around it, moved inwards at the borders.
///
/// With `row = q / width` and the centre `clamp(row, r, height - 1 - r)` where `r = kernel / 2`:
/// `|centre - kv / width| <= r`, and the same with columns.
///
/// Source: Hassani et al. 2023, "Neighborhood Attention Transformer", section 3.1.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = BlockMask::build(&masks::natten_2d(4, 4, 3), BlockShape::new(1, 1, 16, 16))?;
/// assert_eq!(mask.kept()?, 16 * 9);
/// assert!(masks::natten_2d(4, 4, 2).check().is_err());
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn natten_2d(height: i32, width: i32, kernel: i32) -> MaskMod {
    if kernel < 1 || kernel % 2 == 0 || kernel > height.min(width) {
        return refused(
            "kernel",
            kernel,
            &format!("must be odd and at most the image's {height} x {width}; choose another"),
        );
    }
    let radius = kernel / 2;
    let near = |q: I32, kv: I32, len: i32| (q.clamp(radius, len - 1 - radius) - kv).abs().le(radius);
    MaskMod::new(|i| near(i.q() / width, i.kv() / width, height) & near(i.q() % width, i.kv() % width, width))
}

/// Sliding tile attention on an image, with a text behind it: see [`sliding_tile_3d`].
///
/// Source: as [`sliding_tile_3d`].
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// // 4x6 tokens in tiles of 2x2: each tile sees 1x3 tiles, here its whole row of tiles.
/// let mask = BlockMask::build(&masks::sliding_tile_2d([4, 6], [2, 2], [1, 3], 0), BlockShape::new(1, 1, 24, 24))?;
/// assert_eq!(mask.kept()?, 24 * 12);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn sliding_tile_2d(canvas: [i32; 2], tile: [i32; 2], window: [i32; 2], text: i32) -> MaskMod {
    sliding_tile(canvas, tile, window, text)
}

/// Sliding tile attention on a video of `canvas` tokens `[frames, height, width]`, with `text` tokens behind it.
///
/// Tokens are in tile order: tile after tile, `tile[0] * tile[1] * tile[2]` tokens each. A tile sees the `window` of
/// tiles around it, moved inwards at the borders, and the text; the text sees everything.
///
/// With `t = q / tokens_per_tile` taken apart into coordinates, and each centre clamped as in [`natten_2d`]:
/// all of `|centre - kv's coordinate| <= window / 2`, or `kv` or `q` is text.
///
/// Source: Zhang et al. 2025, "Fast Video Generation with Sliding Tile Attention", section 3.
///
/// ```
/// use flexattn::{BlockMask, BlockShape, masks};
///
/// let mask = masks::sliding_tile_3d([4, 4, 4], [2, 2, 2], [1, 1, 1], 3);
/// let mask = BlockMask::build(&mask, BlockShape::new(1, 1, 67, 67))?;
/// // 64 tokens see their tile of 8 and the text of 3; the text sees all 67.
/// assert_eq!(mask.kept()?, 64 * 11 + 3 * 67);
/// # Ok::<(), flexattn::Error>(())
/// ```
pub fn sliding_tile_3d(canvas: [i32; 3], tile: [i32; 3], window: [i32; 3], text: i32) -> MaskMod {
    sliding_tile(canvas, tile, window, text)
}

fn sliding_tile<const N: usize>(canvas: [i32; N], tile: [i32; N], window: [i32; N], text: i32) -> MaskMod {
    let mut tiles = [0; N];
    for axis in 0..N {
        if tile[axis] < 1 || canvas[axis] < 1 || canvas[axis] % tile[axis] != 0 {
            return refused(
                "tile",
                tile,
                &format!("its sides must divide the canvas {canvas:?}; pad the canvas"),
            );
        }
        tiles[axis] = canvas[axis] / tile[axis];
        if window[axis] < 1 || window[axis] % 2 == 0 || window[axis] > tiles[axis] {
            return refused(
                "window",
                window,
                &format!("its sides must be odd and at most the {tiles:?} tiles; it is counted in tiles"),
            );
        }
    }
    let product = |sides: &[i32]| sides.iter().try_fold(1i32, |n, &side| n.checked_mul(side));
    let tokens = product(&canvas).and_then(|tokens| Some((tokens, tokens.checked_add(text)?)));
    let (Some((tokens, end)), true) = (tokens, text >= 0) else {
        return refused(
            "text",
            text,
            &format!("it and the canvas {canvas:?} must have fewer than 2^31 tokens"),
        );
    };
    let per_tile = tokens / tiles.iter().product::<i32>();
    MaskMod::new(|i| {
        let (of_q, of_kv) = (i.q() / per_tile, i.kv() / per_tile);
        let near = (0..N).fold(Bool::from(true), |near, axis| {
            // Tiles along the axes behind this one.
            let stride: i32 = tiles[axis + 1..].iter().product();
            let coordinate = |of: &I32| of / stride % tiles[axis];
            let radius = window[axis] / 2;
            let centre = coordinate(&of_q).clamp(radius, tiles[axis] - 1 - radius);
            near & (centre - coordinate(&of_kv)).abs().le(radius)
        });
        let (image_q, image_kv) = (i.q().lt(tokens), i.kv().lt(tokens));
        let text_q = !&image_q & i.q().lt(end);
        (image_q & ((&image_kv & near) | (!&image_kv & i.kv().lt(end)))) | (text_q & i.kv().lt(end))
    })
}
