//! What is kept inside one block, tile by tile.

/// How much of a block or tile a mask keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    /// No pair is kept: kernels skip it.
    #[default]
    Empty = 0,
    /// Some pairs are kept, or nobody knows: kernels evaluate the mask there.
    Partial = 1,
    /// Every pair that exists is kept: kernels do not evaluate the mask there.
    Full = 2,
}

/// The 4x4 tiles of one block, two bits each: the second word of a partial entry.
///
/// Tile (row `r`, column `c`) is in bits `2 * (4 * r + c)` and the one above: 0 empty, 1 partial, 2
/// full. Rows are q and columns are kv in both list orders. A tile covers a quarter of the block,
/// rounded up, each way (32x32 in the kernels' 128x128 block). Tiles that hold no pair, because the
/// block or the lengths end before them, are empty.
///
/// ```
/// use flexattn::{Class, TileMap};
///
/// let map = TileMap::EMPTY.with(1, 2, Class::Full).with(3, 3, Class::Partial);
/// assert_eq!(map.get(1, 2), Class::Full);
/// assert_eq!(map.0, 2 << 12 | 1 << 30);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TileMap(pub u32);

/// The low bit of every tile: set where it is partial.
const PARTIAL: u32 = 0x5555_5555;

impl TileMap {
    /// Tiles per block, each way.
    pub const SIDE: usize = 4;
    /// All tiles empty.
    pub const EMPTY: Self = Self(0);
    /// All tiles full.
    pub const FULL: Self = Self(PARTIAL << 1);

    /// The class of the tile in row `r` (of q) and column `c` (of kv), both below 4.
    pub const fn get(self, r: usize, c: usize) -> Class {
        match (self.0 >> (2 * (4 * (r & 3) + (c & 3)))) & 3 {
            0 => Class::Empty,
            2 => Class::Full,
            _ => Class::Partial,
        }
    }

    /// How many tiles are partial.
    pub(crate) const fn partial_tiles(self) -> usize {
        (self.0 & !(self.0 >> 1) & PARTIAL).count_ones() as usize
    }

    /// The map with one tile replaced.
    #[must_use]
    pub const fn with(self, r: usize, c: usize, class: Class) -> Self {
        let shift = 2 * (4 * (r & 3) + (c & 3));
        Self(self.0 & !(3 << shift) | (class as u32) << shift)
    }

    /// A map whose first `rows` x `columns` tiles have this class and whose others are empty.
    pub(crate) fn filled(rows: usize, columns: usize, class: Class) -> Self {
        let row = (PARTIAL & 0xff) & ((1u32 << (2 * columns.min(4))) - 1);
        let all = (0..rows.min(4)).fold(0, |map, r| map | row << (8 * r));
        Self(all * class as u32)
    }

    /// The low bit of each tile that keeps something.
    const fn any(self) -> u32 {
        (self.0 | self.0 >> 1) & PARTIAL
    }

    /// The low bit of each tile that keeps everything.
    const fn all(self) -> u32 {
        (self.0 >> 1) & PARTIAL
    }

    const fn from_bits(any: u32, all: u32) -> Self {
        Self((any & !all) | all << 1)
    }

    /// The tiles of the intersection, and those among them that two partial tiles leave open (they
    /// may be empty).
    pub(crate) const fn and(self, other: Self) -> (Self, u32) {
        let any = self.any() & other.any();
        let open = any & !self.all() & !other.all();
        (Self::from_bits(any, self.all() & other.all()), open)
    }

    /// The tiles of the union, and those among them that two partial tiles leave open (they may be
    /// full).
    pub(crate) const fn or(self, other: Self) -> (Self, u32) {
        let all = self.all() | other.all();
        let open = self.any() & other.any() & !all;
        (Self::from_bits(self.any() | other.any(), all), open)
    }

    /// The tiles of the complement, within the tiles that exist.
    pub(crate) const fn not(self, exist: Self) -> Self {
        let exist = exist.any();
        Self::from_bits(!self.all() & exist, !self.any() & exist)
    }

    /// The map restricted to the tiles that exist.
    pub(crate) const fn within(self, exist: Self) -> Self {
        Self(self.0 & (exist.any() | exist.any() << 1))
    }

    /// Whether no tile has the invalid value 3.
    pub(crate) const fn is_valid(self) -> bool {
        self.0 & self.0 >> 1 & PARTIAL == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs (keeps something, keeps everything) that a class stands for.
    fn algebra(class: Class) -> [bool; 2] {
        [class != Class::Empty, class == Class::Full]
    }

    #[test]
    fn bitwise_algebra_equals_tile_by_tile_algebra() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let mut map = TileMap::EMPTY;
            for tile in 0..16 {
                let class = [Class::Empty, Class::Partial, Class::Full][(state >> tile) as usize % 3];
                map = map.with(tile / 4, tile % 4, class);
            }
            map
        };
        let exist = TileMap::filled(3, 2, Class::Full);
        for _ in 0..200 {
            let (a, b) = (next(), next());
            let (and, and_open) = a.and(b);
            let (or, or_open) = a.or(b);
            for (r, c) in (0..16).map(|tile| (tile / 4, tile % 4)) {
                let ([any_a, all_a], [any_b, all_b]) = (algebra(a.get(r, c)), algebra(b.get(r, c)));
                assert_eq!(algebra(and.get(r, c)), [any_a && any_b, all_a && all_b]);
                assert_eq!(algebra(or.get(r, c)), [any_a || any_b, all_a || all_b]);
                let both_partial = a.get(r, c) == Class::Partial && b.get(r, c) == Class::Partial;
                let bit = 1 << (2 * (4 * r + c));
                assert_eq!(and_open & bit != 0, both_partial);
                assert_eq!(or_open & bit != 0, both_partial);
                let inside = r < 3 && c < 2;
                let not = algebra(a.not(exist).get(r, c));
                assert_eq!(not, [!all_a && inside, !any_a && inside]);
            }
        }
    }

    #[test]
    fn filled_covers_exactly_the_first_tiles() {
        assert_eq!(TileMap::filled(4, 4, Class::Full), TileMap::FULL);
        assert_eq!(TileMap::filled(0, 4, Class::Full), TileMap::EMPTY);
        let map = TileMap::filled(2, 3, Class::Partial);
        for (r, c) in (0..16).map(|tile| (tile / 4, tile % 4)) {
            assert_eq!(map.get(r, c) == Class::Partial, r < 2 && c < 3);
        }
    }
}
