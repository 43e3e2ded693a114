//! The lists of one order: for each block row, runs of full blocks and entries of partial ones.

use super::quad_tree::Grid;
use super::tile_map::{Class, TileMap};
use crate::error::{Error, Result};

/// Which blocks of each row are full and which are partial, in compressed rows.
///
/// A row is one (b, h, block row). In [`BlockMask::rows`](super::BlockMask::rows) the block rows are
/// those of q and the columns those of kv; in
/// [`BlockMask::transposed`](super::BlockMask::transposed) it is the other way round. Runs of a row
/// are disjoint, not adjacent and ascending; partial entries are ascending; no block is in both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lists {
    /// Row `r` has the runs `run_offsets[r]..run_offsets[r + 1]`.
    pub run_offsets: Vec<u32>,
    /// `[first, end)`: columns of consecutive full blocks.
    pub runs: Vec<[u32; 2]>,
    /// Row `r` has the partial entries `partial_offsets[r]..partial_offsets[r + 1]`.
    pub partial_offsets: Vec<u32>,
    /// `[column, tile map]`, see [`TileMap`].
    pub partials: Vec<[u32; 2]>,
}

impl Default for Lists {
    /// No rows.
    fn default() -> Self {
        Self { run_offsets: vec![0], runs: Vec::new(), partial_offsets: vec![0], partials: Vec::new() }
    }
}

/// A rectangle of blocks, half-open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rect {
    pub(crate) rows: [u32; 2],
    pub(crate) columns: [u32; 2],
}

/// One matrix of blocks as its builder finds it, in an order in which the columns of any one row
/// ascend.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cells {
    pub(crate) full: Vec<Rect>,
    /// Row, column, tile map.
    pub(crate) partial: Vec<(u32, u32, TileMap)>,
}

impl Lists {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.run_offsets.len().saturating_sub(1)
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The runs of one row; none for a row that does not exist.
    pub fn runs_of(&self, row: usize) -> &[[u32; 2]] {
        slice(&self.run_offsets, &self.runs, row)
    }

    /// The partial entries of one row; none for a row that does not exist.
    pub fn partials_of(&self, row: usize) -> &[[u32; 2]] {
        slice(&self.partial_offsets, &self.partials, row)
    }

    /// How many blocks are full, and how many are partial.
    pub fn blocks(&self) -> (u64, u64) {
        let full = self.runs.iter().map(|&[first, end]| u64::from(end - first)).sum();
        (full, self.partials.len() as u64)
    }

    /// Bytes that the lists hold.
    pub fn bytes(&self) -> usize {
        4 * (self.run_offsets.len() + self.partial_offsets.len())
            + 8 * (self.runs.len() + self.partials.len())
    }

    /// The row as ascending segments `(first, end, map)` that touch no empty block.
    pub(crate) fn segments(&self, row: usize) -> Segments<'_> {
        Segments { runs: self.runs_of(row), partials: self.partials_of(row) }
    }

    pub(crate) fn push_run(&mut self, first: u32, end: u32) {
        let begin = self.run_offsets.last().copied().unwrap_or(0) as usize;
        match self.runs[begin..].last_mut() {
            Some(last) if last[1] == first => last[1] = end,
            _ if first < end => self.runs.push([first, end]),
            _ => {}
        }
    }

    pub(crate) fn push_partial(&mut self, column: u32, map: TileMap) {
        self.partials.push([column, map.0]);
    }

    /// Appends one block in the list where it belongs. Columns must ascend within a row.
    pub(crate) fn push_block(&mut self, grid: &Grid, row: u32, column: u32, map: TileMap) {
        if map == TileMap::EMPTY {
            return;
        }
        if map == TileMap::FULL || map == grid.filled(row, column, Class::Full) {
            self.push_run(column, column + 1);
        } else {
            self.push_partial(column, map);
        }
    }

    /// Ends the current row.
    pub(crate) fn end_row(&mut self) -> Result<()> {
        self.run_offsets.push(count(self.runs.len())?);
        self.partial_offsets.push(count(self.partials.len())?);
        Ok(())
    }

    /// Appends the rows of one matrix of `rows` block rows.
    pub(crate) fn push_cells(&mut self, rows: u32, cells: &Cells) -> Result<()> {
        // A counting sort by row keeps the order of columns within each row.
        let mut at = vec![0u64; rows as usize + 1];
        for rect in &cells.full {
            for row in rect.rows[0]..rect.rows[1] {
                at[row as usize + 1] += 1;
            }
        }
        prefix_sum(&mut at);
        let mut runs = vec![[0u32; 2]; at[rows as usize] as usize];
        let mut fill = at.clone();
        for rect in &cells.full {
            for row in rect.rows[0]..rect.rows[1] {
                runs[fill[row as usize] as usize] = rect.columns;
                fill[row as usize] += 1;
            }
        }
        let mut partial_at = vec![0u64; rows as usize + 1];
        for &(row, ..) in &cells.partial {
            partial_at[row as usize + 1] += 1;
        }
        prefix_sum(&mut partial_at);
        let first_partial = self.partials.len();
        count(first_partial + cells.partial.len())?;
        self.partials.resize(first_partial + cells.partial.len(), [0; 2]);
        let mut fill = partial_at.clone();
        for &(row, column, map) in &cells.partial {
            self.partials[first_partial + fill[row as usize] as usize] = [column, map.0];
            fill[row as usize] += 1;
        }
        for row in 0..rows as usize {
            for &[first, end] in &runs[at[row] as usize..at[row + 1] as usize] {
                self.push_run(first, end);
            }
            self.run_offsets.push(count(self.runs.len())?);
            self.partial_offsets.push(count(first_partial + partial_at[row + 1] as usize)?);
        }
        Ok(())
    }

    /// The lists of the transposed matrices: `matrices` of them, each `rows` x `columns`, may have
    /// at most `limit` runs together.
    ///
    /// Works on the differences between one row and the next, so the cost is that of the runs that
    /// go in and come out, not of the blocks.
    pub(crate) fn transpose(&self, matrices: usize, rows: u32, columns: u32, limit: usize) -> Result<Self> {
        let mut out = Self::default();
        out.run_offsets.reserve(matrices * columns as usize);
        out.partial_offsets.reserve(matrices * columns as usize);
        let mut since = vec![0u32; columns as usize];
        let mut found: Vec<(u32, [u32; 2])> = Vec::new();
        let mut at = vec![0u64; columns as usize + 1];
        for matrix in 0..matrices {
            let first_row = matrix * rows as usize;
            found.clear();
            let mut before: &[[u32; 2]] = &[];
            for row in 0..=rows {
                let now = if row < rows { self.runs_of(first_row + row as usize) } else { &[] };
                if before != now {
                    changes(before, now, |first, end, starts| {
                        for column in first..end {
                            if starts {
                                since[column as usize] = row;
                            } else {
                                found.push((column, [since[column as usize], row]));
                            }
                        }
                    });
                    if out.runs.len() + found.len() > limit {
                        return Err(Error::format(format!(
                            "the transposed lists of this block mask have more than {limit} runs; use larger blocks"
                        )));
                    }
                }
                before = now;
            }
            let first_run = out.runs.len();
            out.runs.resize(first_run + found.len(), [0; 2]);
            at.fill(0);
            for &(column, _) in &found {
                at[column as usize + 1] += 1;
            }
            prefix_sum(&mut at);
            for column in 0..columns as usize {
                out.run_offsets.push(count(first_run + at[column + 1] as usize)?);
            }
            for &(column, run) in &found {
                out.runs[first_run + at[column as usize] as usize] = run;
                at[column as usize] += 1;
            }

            let first_partial = out.partials.len();
            let begin = self.partial_offsets.get(first_row).copied().unwrap_or(0) as usize;
            let end = self.partial_offsets.get(first_row + rows as usize).copied().unwrap_or(0) as usize;
            out.partials.resize(first_partial + end - begin, [0; 2]);
            at.fill(0);
            for &[column, _] in &self.partials[begin..end] {
                at[column as usize + 1] += 1;
            }
            prefix_sum(&mut at);
            for column in 0..columns as usize {
                out.partial_offsets.push(count(first_partial + at[column + 1] as usize)?);
            }
            for row in 0..rows {
                for &[column, map] in self.partials_of(first_row + row as usize) {
                    out.partials[first_partial + at[column as usize] as usize] = [row, map];
                    at[column as usize] += 1;
                }
            }
        }
        Ok(out)
    }

    /// Checks the promises of the type for `rows` rows of `columns` columns.
    pub(crate) fn check(&self, rows: usize, columns: u32) -> Result<()> {
        let offsets_fit = |offsets: &[u32], entries: usize| {
            offsets.len() == rows + 1
                && offsets.first() == Some(&0)
                && offsets.last().map(|&end| end as usize) == Some(entries)
                && offsets.windows(2).all(|pair| pair[0] <= pair[1])
        };
        if !offsets_fit(&self.run_offsets, self.runs.len())
            || !offsets_fit(&self.partial_offsets, self.partials.len())
        {
            return Err(Error::format(format!(
                "the row offsets of a block mask must ascend from 0 to the number of entries in {} steps; write the mask again",
                rows
            )));
        }
        for row in 0..rows {
            let mut end = 0;
            let mut runs = self.runs_of(row);
            let ascending = runs.iter().enumerate().all(|(i, run)| {
                let good = run[0] < run[1] && run[1] <= columns && (i == 0 || run[0] > end);
                end = run[1];
                good
            });
            let mut next = 0;
            let partial = ascending
                && self.partials_of(row).iter().all(|&[column, map]| {
                    while let [first, rest @ ..] = runs {
                        if first[1] > column {
                            break;
                        }
                        runs = rest;
                    }
                    let alone = runs.first().is_none_or(|run| column < run[0]);
                    let good = column >= next && column < columns && alone && map != 0;
                    next = column + u32::from(good);
                    good && TileMap(map).is_valid()
                });
            if !partial {
                return Err(Error::format(format!(
                    "row {row} of a block mask must list ascending, disjoint blocks below {columns} with valid tile maps; write the mask again"
                )));
            }
        }
        Ok(())
    }
}

/// Reads a row in ascending order of columns.
#[derive(Clone, Debug)]
pub(crate) struct Segments<'a> {
    runs: &'a [[u32; 2]],
    partials: &'a [[u32; 2]],
}

impl Iterator for Segments<'_> {
    type Item = (u32, u32, TileMap);

    fn next(&mut self) -> Option<Self::Item> {
        match (self.runs, self.partials) {
            ([run, runs @ ..], partials) if partials.first().is_none_or(|entry| run[0] < entry[0]) => {
                self.runs = runs;
                Some((run[0], run[1], TileMap::FULL))
            }
            (_, [[column, map], partials @ ..]) => {
                self.partials = partials;
                Some((*column, column + 1, TileMap(*map)))
            }
            _ => None,
        }
    }
}

fn slice<'a>(offsets: &[u32], entries: &'a [[u32; 2]], row: usize) -> &'a [[u32; 2]] {
    match offsets.get(row..row + 2) {
        Some(&[begin, end]) => &entries[begin as usize..end as usize],
        _ => &[],
    }
}

/// Calls `at(first, end, starts)` for each stretch of columns that is in one list of runs and not in
/// the other; `starts` says that it is in `now`.
fn changes(before: &[[u32; 2]], now: &[[u32; 2]], mut at: impl FnMut(u32, u32, bool)) {
    let bound = |runs: &[[u32; 2]], i: usize| runs.get(i / 2).map_or(u32::MAX, |run| run[i % 2]);
    // Index of the next bound of each list: odd means inside a run.
    let (mut i, mut j) = (0, 0);
    let mut from = 0;
    loop {
        let to = bound(before, i).min(bound(now, j));
        if i % 2 != j % 2 && from < to {
            at(from, to, j % 2 == 1);
        }
        if to == u32::MAX {
            break;
        }
        i += usize::from(bound(before, i) == to);
        j += usize::from(bound(now, j) == to);
        from = to;
    }
}

/// Turns counts that stand one place to the right into offsets.
fn prefix_sum(at: &mut [u64]) {
    let mut sum = 0;
    for value in at {
        sum += *value;
        *value = sum;
    }
}

fn count(entries: usize) -> Result<u32> {
    u32::try_from(entries).map_err(|_| {
        Error::overflow(format!(
            "a block mask has {entries} entries but its offsets are 32 bits; use larger blocks or fewer heads"
        ))
    })
}
