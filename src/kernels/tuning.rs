//! Tiles that were found fastest on an adapter.

use std::fmt;

use super::{Kernel, TILES, Tile};
use crate::{DType, Error, Result};

/// Which tile of the table a kernel takes, by element size and dims, where that was measured.
///
/// Its text has a line for each: the kernel's entry point, bytes of an element, the largest dim, the tile.
///
/// # Example
///
/// ```
/// use flexattn::kernels::Tuning;
///
/// # fn main() -> flexattn::Result<()> {
/// let tuning = Tuning::from_text("forward_subgroup 4 64 t64-2x2\n")?;
/// assert_eq!(tuning.to_string(), "forward_subgroup 4 64 t64-2x2\n");
/// assert!(Tuning::from_text("forward 4 64 t1-1x1").is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning(Vec<Choice>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    kernel: Kernel,
    element: u32,
    dims: u32,
    tile: Tile,
}

/// Dims that take the same tile: up to 32, 64, 128, 256 and so on.
fn bucket(dim: u32) -> u32 {
    dim.next_power_of_two().max(32)
}

impl Tuning {
    /// The tile for a kernel whose larger dim is `dim`.
    pub fn get(&self, kernel: Kernel, dtype: DType, dim: u32) -> Option<Tile> {
        let key = (kernel, dtype.size() as u32, bucket(dim));
        self.0.iter().find(|choice| (choice.kernel, choice.element, choice.dims) == key).map(|it| it.tile)
    }

    /// Sets the tile for a kernel whose larger dim is `dim`, and for dims of the same power of two.
    pub fn set(&mut self, kernel: Kernel, dtype: DType, dim: u32, tile: Tile) {
        let (element, dims) = (dtype.size() as u32, bucket(dim));
        self.0.retain(|choice| (choice.kernel, choice.element, choice.dims) != (kernel, element, dims));
        self.0.push(Choice { kernel, element, dims, tile });
    }

    /// Reads what `Display` wrote.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] for a line that names no tile of the table.
    pub fn from_text(text: &str) -> Result<Self> {
        let choice = |line: &str| {
            let mut words = line.split_whitespace();
            let (entry, element, dims, tile) = (words.next()?, words.next()?, words.next()?, words.next()?);
            let row = TILES.iter().find(|row| row.kernel.entry() == entry && row.tile.to_string() == tile)?;
            Some(Choice {
                kernel: row.kernel,
                element: element.parse().ok()?,
                dims: dims.parse().ok()?,
                tile: row.tile,
            })
        };
        let choices = text.lines().map(|line| {
            choice(line)
                .ok_or_else(|| Error::format(format!("`{line}` names no tile of this version; tune again")))
        });
        choices.collect::<Result<_>>().map(Self)
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Choice { kernel, element, dims, tile } in &self.0 {
            writeln!(f, "{} {element} {dims} {tile}", kernel.entry())?;
        }
        Ok(())
    }
}
