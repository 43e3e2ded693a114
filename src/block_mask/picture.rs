//! Block masks to look at.

use super::{BlockMask, Class, TileMap};
use crate::error::{Error, Result};
use std::fmt;

/// How many (b, h) the text shows.
const SHOWN: usize = 4;
/// Characters of the text picture, each way, at most.
const TEXT_ROWS: usize = 32;
const TEXT_COLUMNS: usize = 64;
/// Pixels of the picture, each way and per (b, h), at most.
const PIXELS: usize = 1024;

/// Shares of the pairs of one cell of a picture that lie in full and in partial tiles.
#[derive(Clone, Copy, Debug, Default)]
struct Shade {
    full: f32,
    partial: f32,
}

/// What [`BlockMask::to_picture`] draws.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels of a row.
    pub width: usize,
    /// Rows of pixels.
    pub height: usize,
    /// Red, green and blue of each pixel, row by row.
    pub rgb: Vec<u8>,
}

impl BlockMask {
    /// A picture of one (b, h) in `rows` x `columns` cells. `unit` is 1 to count whole blocks and 4 to
    /// look into tiles: how many steps a block has each way.
    fn shades(&self, matrix: usize, rows: usize, columns: usize, unit: usize) -> Vec<Shade> {
        let mut cells = vec![Shade::default(); rows * columns];
        let high = self.block_rows() as usize * unit;
        let wide = self.block_columns() as usize * unit;
        let (tall, broad) = (rows as f32 / high as f32, columns as f32 / wide as f32);
        for row in 0..self.block_rows() {
            for (first, end, map) in self.rows.segments(self.row(matrix, row)) {
                if map == TileMap::FULL || unit == 1 {
                    let full = map == TileMap::FULL;
                    let y = [row as f32 * unit as f32 * tall, (row + 1) as f32 * unit as f32 * tall];
                    let x = [first as f32 * unit as f32 * broad, end as f32 * unit as f32 * broad];
                    paint(&mut cells, columns, y, x, full);
                    continue;
                }
                for (r, c) in (0..16).map(|tile| (tile / 4, tile % 4)) {
                    let y = (row as usize * unit + r) as f32 * tall;
                    let x = (first as usize * unit + c) as f32 * broad;
                    match map.get(r, c) {
                        Class::Empty => {}
                        class => {
                            paint(&mut cells, columns, [y, y + tall], [x, x + broad], class == Class::Full);
                        }
                    }
                }
            }
        }
        cells
    }

    /// A picture: one pixel per tile where that fits in 1024 pixels, dark where all pairs are kept, light
    /// where some are, white where none is. The pictures of all (b, h) stand in a column per head and a
    /// row per batch entry, up to 16 each.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for a mask without blocks.
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 1024, 1024))?;
    /// let picture = mask.to_picture()?;
    /// assert_eq!((picture.width, picture.height), (32, 32));
    /// assert_eq!(picture.rgb[3 * 31..][..3], [255; 3]);
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    pub fn to_picture(&self) -> Result<Picture> {
        let [high, wide] = [self.block_rows(), self.block_columns()].map(|n| (4 * n as usize).min(PIXELS));
        if high == 0 || wide == 0 {
            return Err(Error::shape(format!(
                "a block mask of {} x {} pairs has no blocks to draw; both lengths must be at least 1",
                self.q_len, self.kv_len
            )));
        }
        let (down, across) = (self.mask_batch().min(16), self.mask_heads().min(16));
        // One pixel between pictures.
        let (height, width) = (down * (high + 1) - 1, across * (wide + 1) - 1);
        let mut pixels = vec![0x80u8; height * width * 3];
        for (b, h) in (0..down).flat_map(|b| (0..across).map(move |h| (b, h))) {
            let shades = self.shades(b * self.mask_heads() + h, high, wide, 4);
            for (y, line) in shades.chunks_exact(wide).enumerate() {
                let at = 3 * ((b * (high + 1) + y) * width + h * (wide + 1));
                for (pixel, shade) in pixels[at..at + 3 * wide].chunks_exact_mut(3).zip(line) {
                    let (full, partial) = (shade.full.min(1.0), shade.partial.min(1.0 - shade.full.min(1.0)));
                    for ((channel, dark), light) in
                        pixel.iter_mut().zip([24.0, 44.0, 92.0]).zip([250.0, 178.0, 92.0])
                    {
                        *channel = (255.0 - full * (255.0 - dark) - partial * (255.0 - light)).round() as u8;
                    }
                }
            }
        }
        Ok(Picture { width, height, rgb: pixels })
    }

    /// [`BlockMask::to_picture`] as PNG.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::to_picture`].
    ///
    /// ```
    /// use flexattn::{BlockMask, BlockShape, masks};
    ///
    /// let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 1024, 1024))?;
    /// assert_eq!(&mask.to_png()?[1..4], b"PNG");
    /// # Ok::<(), flexattn::Error>(())
    /// ```
    #[cfg(feature = "png")]
    pub fn to_png(&self) -> Result<Vec<u8>> {
        let Picture { width, height, rgb } = self.to_picture()?;
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, width as u32, height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let failed =
            |error: png::EncodingError| Error::format(format!("the picture could not be encoded: {error}"));
        let mut writer = encoder.write_header().map_err(failed)?;
        writer.write_image_data(&rgb).map_err(failed)?;
        writer.finish().map_err(failed)?;
        Ok(out)
    }
}

/// Adds a box, in cell coordinates, to the cells that it covers.
fn paint(cells: &mut [Shade], columns: usize, y: [f32; 2], x: [f32; 2], full: bool) {
    let rows = cells.len() / columns;
    let span = |at: [f32; 2], end: usize| (at[0] as usize, (at[1].ceil() as usize).min(end));
    let (y0, y1) = span(y, rows);
    let (x0, x1) = span(x, columns);
    for row in y0..y1 {
        let tall = (y[1].min(row as f32 + 1.0) - y[0].max(row as f32)).max(0.0);
        for column in x0..x1 {
            let broad = (x[1].min(column as f32 + 1.0) - x[0].max(column as f32)).max(0.0);
            let shade = &mut cells[row * columns + column];
            *(if full { &mut shade.full } else { &mut shade.partial }) += tall * broad;
        }
    }
}

impl fmt::Display for BlockMask {
    /// Sizes, then a picture of the first (b, h): `█` all kept, `▒` some kept, `·` none kept. A large
    /// mask is shown in fewer cells.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (full, partial) = self.rows.blocks();
        writeln!(
            f,
            "BlockMask batch {} heads {} q_len {} kv_len {} blocks {}x{}: {full} full, {partial} partial, {:.2} % skipped",
            self.batch,
            self.heads,
            self.q_len,
            self.kv_len,
            self.block[0],
            self.block[1],
            100.0 * self.sparsity()
        )?;
        let rows = (self.block_rows() as usize).min(TEXT_ROWS);
        let columns = (self.block_columns() as usize).min(TEXT_COLUMNS);
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        for matrix in 0..self.matrices().min(SHOWN) {
            if self.matrices() > 1 {
                writeln!(f, "b {} h {}", matrix / self.mask_heads(), matrix % self.mask_heads())?;
            }
            for line in self.shades(matrix, rows, columns, 1).chunks_exact(columns) {
                let text: String = line
                    .iter()
                    .map(|shade| match (shade.full, shade.partial) {
                        (full, _) if full > 0.999 => '█',
                        (full, partial) if full + partial > 0.0 => '▒',
                        _ => '·',
                    })
                    .collect();
                writeln!(f, "{text}")?;
            }
        }
        if self.matrices() > SHOWN {
            writeln!(f, "and {} more", self.matrices() - SHOWN)?;
        }
        Ok(())
    }
}
