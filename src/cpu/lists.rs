//! Walking the block list of a row of blocks: which 32 x 32 tiles of the score matrix are looked at.

/// Rows and columns of a tile.
pub(super) const TILE: usize = 32;

/// Tiles along a side of a block.
pub(super) const SIDE: usize = crate::shape::BLOCK / TILE;

/// A block of a list with something in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Its number along the list's axis.
    pub(super) index: usize,
    /// Two bits per tile, at `2 * (4 * row + column)`: 0 empty, 1 partial, 2 full.
    map: u32,
}

impl Block {
    /// The tiles of a row of the block; rows are query rows in both kinds of lists.
    pub(super) fn row(&self, row: usize) -> [Tile; SIDE] {
        std::array::from_fn(|column| match self.map >> (2 * (SIDE * row + column)) & 3 {
            0 => Tile::Empty,
            1 => Tile::Partial,
            _ => Tile::Full,
        })
    }
}

/// What is known of the pairs in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tile {
    /// None is kept.
    Empty,
    /// The mask has to be asked.
    Partial,
    /// All are kept.
    Full,
}

/// The blocks of the list whose header is word `header` of the tables: full ones, then partial ones.
pub(super) fn blocks(tables: &[u32], header: usize) -> impl Iterator<Item = Block> + '_ {
    let [run, run_end, partial, partial_end] = std::array::from_fn(|i| tables[header + i] as usize);
    let runs = tables[run..run_end].chunks_exact(2).flat_map(|run| run[0]..run[1]);
    let full = runs.map(|index| Block { index: index as usize, map: 0xaaaa_aaaa });
    let partial = tables[partial..partial_end].chunks_exact(2);
    full.chain(partial.map(|pair| Block { index: pair[0] as usize, map: pair[1] }))
}

/// The stretches of tiles that are not empty, as tile ranges.
pub(super) fn stretches(tiles: [Tile; SIDE]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let start = (next..SIDE).find(|&i| tiles[i] != Tile::Empty)?;
        let end = (start..SIDE).find(|&i| tiles[i] == Tile::Empty).unwrap_or(SIDE);
        next = end;
        Some(start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_gives_its_runs_and_then_its_partial_blocks() {
        // Header: runs at 4..6, partials at 6..8.
        let tables = [4, 6, 6, 8, 2, 4, 7, 0b01_10 << 8];
        let all: Vec<Block> = blocks(&tables, 0).collect();
        assert_eq!(all.iter().map(|b| b.index).collect::<Vec<_>>(), [2, 3, 7]);
        assert_eq!(all[0].row(3), [Tile::Full; 4]);
        assert_eq!(all[2].row(0), [Tile::Empty; 4]);
        assert_eq!(all[2].row(1), [Tile::Full, Tile::Partial, Tile::Empty, Tile::Empty]);
    }

    #[test]
    fn stretches_skip_empty_tiles_and_join_the_others() {
        use Tile::{Empty, Full, Partial};
        let found = |tiles| stretches(tiles).collect::<Vec<_>>();
        assert_eq!(found([Empty; 4]), []);
        assert_eq!(found([Full, Partial, Empty, Partial]), [0..2, 3..4]);
        assert_eq!(found([Empty, Full, Full, Full]), std::iter::once(1..4).collect::<Vec<_>>());
    }
}
