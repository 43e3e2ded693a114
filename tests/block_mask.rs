//! Block masks against the value of every pair, against PyTorch's lists, and their bars.

#[cfg(feature = "wgpu")]
mod on_device;
mod random;

use flexattn::expr::{Env, Program};
use flexattn::{
    Attention, BlockMask, BlockShape, Capture, Class, CompiledMask, DType, Error, Gpu, KvBlocks, Lists,
    MaskMod, Params, Result, Tier, TileMap, masks,
};
use flexattn_testing::Golden;
use flexattn_testing::problem::Numbers;
use std::time::Duration;

/// Calls `each(matrix, row, kept)` for every row of every matrix that `like` tells apart, evaluating the mask
/// pair by pair.
fn every_row(
    mask: &MaskMod,
    like: &BlockMask,
    rows: impl Fn(usize) -> bool,
    mut each: impl FnMut(usize, usize, &[bool]),
) -> Result<()> {
    let program = Program::new(std::slice::from_ref(mask.expr()));
    let kept_to = like.kv_len();
    for b in 0..like.mask_batch() {
        let kv_len = like.kv_lens()[b] as usize;
        let env = Env::new(mask.captures(), mask.scalars(), like.q_len(), kv_len)?;
        let mut bound = program.bind::<f32>(&env)?;
        for h in 0..like.mask_heads() {
            for row in (0..like.q_len()).filter(|&row| rows(row)) {
                let q = row as i32 + like.q_offset()[b];
                let mut line = vec![false; kept_to];
                if kv_len > 0 {
                    bound.row(b as i32, h as i32, q, 0, &[], kv_len);
                    line[..kv_len].copy_from_slice(bound.output(0).bools());
                }
                each(b * like.mask_heads() + h, row, &line);
            }
        }
    }
    Ok(())
}

/// The value of every pair, as [`BlockMask::to_mask`] gives it.
fn brute_force(mask: &MaskMod, like: &BlockMask) -> Result<Vec<bool>> {
    let mut out = Vec::new();
    every_row(mask, like, |_| true, |_, _, line| out.extend_from_slice(line))?;
    Ok(out)
}

/// The mask with exactly the tiles that the values of its pairs give.
fn exact(mask: &MaskMod, like: &BlockMask) -> Result<BlockMask> {
    let [block_q, block_kv] = like.block();
    let (tile_q, tile_kv) = (block_q.div_ceil(4), block_kv.div_ceil(4));
    let (rows, columns) = (like.block_rows() as usize, like.block_columns() as usize);
    let count = like.mask_batch() * like.mask_heads() * rows * columns;
    let (mut some, mut every) = (vec![[false; 16]; count], vec![[true; 16]; count]);
    every_row(
        mask,
        like,
        |_| true,
        |matrix, row, line| {
            let kv_len = like.kv_lens()[matrix / like.mask_heads()] as usize;
            let at = (matrix * rows + row / block_q) * columns;
            let r = row % block_q / tile_q;
            for (column, block) in line[..kv_len].chunks(block_kv).enumerate() {
                for (c, tile) in block.chunks(tile_kv).enumerate() {
                    some[at + column][4 * r + c] |= tile.contains(&true);
                    every[at + column][4 * r + c] &= !tile.contains(&false);
                }
            }
        },
    )?;
    let maps: Vec<u32> = some
        .iter()
        .zip(&every)
        .map(|(some, every)| {
            let class = |tile: usize| match (some[tile], every[tile]) {
                (false, _) => Class::Empty,
                (_, true) => Class::Full,
                _ => Class::Partial,
            };
            (0..16).fold(TileMap::EMPTY, |map, tile| map.with(tile / 4, tile % 4, class(tile))).0
        })
        .collect();
    let shape = BlockShape {
        batch: like.mask_batch(),
        heads: like.mask_heads(),
        q_len: like.q_len(),
        kv_len: like.kv_len(),
        q_offset: like.q_offset(),
        kv_lens: like.kv_lens(),
    };
    BlockMask::from_tile_maps(&maps, shape, like.block(), Some(mask))
}

/// Builds the mask and requires every tile, and every pair, to be what evaluating all pairs gives.
fn check(mask: &MaskMod, shape: BlockShape<'_>, block: [usize; 2]) -> Result<BlockMask> {
    let built = BlockMask::build_with(mask, shape, block)?;
    check_promises(&built);
    let expected = exact(mask, &built)?;
    assert_eq!(built, expected, "{} in blocks {block:?} of {shape:?}:\n{built}\n{expected}", mask.expr());
    Ok(built)
}

/// Class and map of every block by one order of lists.
fn blocks_of(lists: &Lists, row: usize, columns: usize) -> Vec<TileMap> {
    let mut out = vec![TileMap::EMPTY; columns];
    let mut end = None;
    for run in lists.runs_of(row) {
        assert!(run[0] < run[1] && end.is_none_or(|end| run[0] > end), "runs must be apart: {lists:?}");
        end = Some(run[1]);
        out[run[0] as usize..run[1] as usize].fill(TileMap::FULL);
    }
    for &[column, map] in lists.partials_of(row) {
        assert_eq!(out[column as usize], TileMap::EMPTY, "block {column} is listed twice");
        assert_ne!(map, 0);
        out[column as usize] = TileMap(map);
    }
    assert!(lists.partials_of(row).is_sorted_by(|a, b| a[0] < b[0]));
    out
}

/// The promises of [`Lists`], and that both orders say the same.
fn check_promises(mask: &BlockMask) {
    let (rows, columns) = (mask.block_rows() as usize, mask.block_columns() as usize);
    let matrices = mask.mask_batch() * mask.mask_heads();
    assert_eq!(mask.rows().len(), matrices * rows);
    assert_eq!(mask.transposed().len(), matrices * columns);
    for matrix in 0..matrices {
        let by_row: Vec<_> =
            (0..rows).map(|row| blocks_of(mask.rows(), matrix * rows + row, columns)).collect();
        for column in 0..columns {
            let by_column = blocks_of(mask.transposed(), matrix * columns + column, rows);
            assert!(by_row.iter().zip(&by_column).all(|(row, map)| row[column] == *map));
        }
    }
}

#[test]
fn every_prebuilt_mask_has_exactly_the_tiles_of_its_pairs() -> Result<()> {
    for (q_len, kv_len, q_offset) in [(700, 700, 0), (333, 517, 100), (1, 300, 299)] {
        let params = Params::new(3, 2, q_len, kv_len);
        for row in masks::ALL {
            let mask = row.build(&params)?;
            let shape = BlockShape { q_offset: &[q_offset], ..BlockShape::new(3, 2, q_len, kv_len) };
            check(&mask, shape, [128, 128])?;
            check(&mask, shape, [24, 40])?;
        }
    }
    Ok(())
}

/// Whole at 8,192 tokens with `FLEXATTN_FULL=1`; else four block rows of each.
#[test]
fn every_prebuilt_mask_agrees_with_its_pairs_at_8192_tokens() -> Result<()> {
    let full = std::env::var_os("FLEXATTN_FULL").is_some_and(|value| value == "1");
    let mut numbers = Numbers::new(8192);
    for prebuilt in masks::ALL {
        let mask = prebuilt.build(&Params::new(2, 2, 8192, 8192))?;
        let built = BlockMask::build(&mask, BlockShape::new(2, 2, 8192, 8192))?;
        let chosen: Vec<usize> = (0..4).map(|_| numbers.below(64)).collect();
        let mut tiles = vec![(false, true); 256];
        every_row(
            &mask,
            &built,
            |row| full || chosen.contains(&(row / 128)),
            |matrix, row, line| {
                if row % 32 == 0 {
                    tiles.fill((false, true));
                }
                for (tile, pairs) in tiles.iter_mut().zip(line.chunks_exact(32)) {
                    tile.0 |= pairs.contains(&true);
                    tile.1 &= !pairs.contains(&false);
                }
                if row % 32 == 31 {
                    let blocks = blocks_of(built.rows(), matrix * 64 + row / 128, 64);
                    for (c, &tile) in tiles.iter().enumerate() {
                        let expected = match tile {
                            (false, _) => Class::Empty,
                            (_, true) => Class::Full,
                            _ => Class::Partial,
                        };
                        let found = blocks[c / 4].get(row % 128 / 32, c % 4);
                        assert_eq!(found, expected, "{} rows to {row}, tile column {c}", prebuilt.name);
                    }
                }
            },
        )?;
    }
    Ok(())
}

#[test]
fn random_masks_have_exactly_the_tiles_of_their_pairs() -> Result<()> {
    let blocks = [[128, 128], [24, 40], [1, 32], [16, 32], [32, 16], [128, 64], [200, 7]];
    for seed in 0..400 {
        let mut numbers = Numbers::new(seed);
        let mask = random::mask(&mut numbers, "a", 4);
        let (q_len, kv_len) = (1 + numbers.below(300), 1 + numbers.below(300));
        let q_offset = [[0, 0], [37, 37], [-5, 60]][numbers.below(3)];
        let kv_lens = [numbers.below(kv_len + 1) as u32, kv_len as u32];
        let shape = BlockShape {
            q_offset: &q_offset,
            kv_lens: if seed % 3 == 0 { &kv_lens } else { &[] },
            ..BlockShape::new(2, 2, q_len, kv_len)
        };
        let block = blocks[numbers.below(blocks.len())];
        let built = check(&mask, shape, block)?;
        let pairs = brute_force(&mask, &built)?;
        assert_eq!(built.to_mask()?, pairs, "seed {seed}: {}", mask.expr());
        assert_eq!(built.kept()?, pairs.iter().filter(|&&keep| keep).count() as u64, "seed {seed}");
        let again = BlockMask::from_bytes(&built.to_bytes())?;
        assert_eq!(again, built, "seed {seed}");
    }
    Ok(())
}

#[test]
fn algebra_of_block_masks_equals_algebra_of_expressions() -> Result<()> {
    for seed in 0..200 {
        let mut numbers = Numbers::new(1000 + seed);
        let (a, b) = (random::mask(&mut numbers, "a", 3), random::mask(&mut numbers, "b", 3));
        let (q_len, kv_len) = (1 + numbers.below(200), 1 + numbers.below(200));
        let kv_lens = [kv_len as u32, numbers.below(kv_len + 1) as u32];
        let shape = BlockShape { kv_lens: &kv_lens, ..BlockShape::new(2, 2, q_len, kv_len) };
        let build = |mask: &MaskMod| BlockMask::build_with(mask, shape, [32, 16]);
        let (built_a, built_b) = (build(&a)?, build(&b)?);
        let pairs = [
            (built_a.and(&built_b)?, a.clone() & b.clone()),
            (built_a.or(&built_b)?, a.clone() | b.clone()),
            (built_a.not()?, !a),
        ];
        for (found, mask) in pairs {
            check_promises(&found);
            // The expression may simplify to one that depends on less.
            let matrices = [found.mask_batch(), found.mask_heads()];
            let expected = exact(&mask, &found)?;
            assert_eq!(found, expected, "seed {seed}, {matrices:?}: {}", mask.expr());
        }
    }
    Ok(())
}

#[test]
fn one_matrix_combines_with_one_for_each_batch_entry_and_head() -> Result<()> {
    let shape = BlockShape::new(3, 2, 300, 300);
    let per_batch = masks::prefix_lm_per_batch(&[10, 150, 290]);
    let per_head = MaskMod::new(|i| (i.q() - i.kv()).lt((i.head() + 1) * 100));
    let both = BlockMask::build(&per_batch, shape)?.and(&BlockMask::build(&per_head, shape)?)?;
    assert_eq!((both.mask_batch(), both.mask_heads()), (3, 2));
    assert_eq!(both, BlockMask::build(&(per_batch & per_head), shape)?);
    Ok(())
}

#[test]
fn masks_of_different_shapes_do_not_combine() -> Result<()> {
    let a = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 300, 300))?;
    let b = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 300, 301))?;
    let c = BlockMask::build_with(&masks::causal(), BlockShape::new(1, 1, 300, 300), [64, 64])?;
    let d =
        BlockMask::build(&masks::causal(), BlockShape { q_offset: &[1], ..BlockShape::new(1, 1, 300, 300) })?;
    for other in [&b, &c, &d] {
        assert!(a.and(other).is_err_and(|error| error.is_shape()));
    }
    Ok(())
}

#[test]
fn block_lists_equal_pytorchs_on_every_golden_case() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut compared = 0;
    for path in Golden::files(Golden::directory())? {
        let golden = Golden::load(&path)?;
        let (Some(mask), Some(blocks)) = (golden.mask_mod()?, golden.blocks()) else { continue };
        let [batch, heads, _, q_len, kv_len, ..] = golden.dims();
        let built = check(&mask, BlockShape::new(batch, heads, q_len, kv_len), blocks.block)?;
        let classes = built.to_dense();
        let (rows, columns) = (built.block_rows() as usize, built.block_columns() as usize);
        let [golden_batch, golden_heads, golden_rows] = blocks.shape;
        assert_eq!(rows, golden_rows, "{}", golden.name);
        let theirs = (0..golden_batch).flat_map(|b| (0..golden_heads).map(move |h| (b, h)));
        for (matrix, (b, h)) in theirs.enumerate() {
            let ours = b % built.mask_batch() * built.mask_heads() + h % built.mask_heads();
            for (row, column) in (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))) {
                let list = matrix * rows + row;
                let expected =
                    match (blocks.partial[list].contains(&column), blocks.full[list].contains(&column)) {
                        (false, false) => Class::Empty,
                        (true, false) => Class::Partial,
                        _ => Class::Full,
                    };
                let found = classes[(ours * rows + row) * columns + column];
                let ragged = (row + 1) * blocks.block[0] > q_len || (column + 1) * blocks.block[1] > kv_len;
                let same =
                    found == expected || (ragged && found == Class::Full && expected == Class::Partial);
                assert!(same, "{}: block ({row}, {column}) is {found:?}, not {expected:?}", golden.name);
                compared += 1;
            }
        }
        // Importing PyTorch's lists with the mask gives the same blocks.
        if (golden_batch, golden_heads) == (built.mask_batch(), built.mask_heads()) {
            let number =
                |lists: &[Vec<usize>]| lists.iter().map(|list| list.len() as i32).collect::<Vec<_>>();
            let indices = |lists: &[Vec<usize>]| {
                let mut out = vec![-1; lists.len() * columns];
                for (line, list) in out.chunks_exact_mut(columns).zip(lists) {
                    // Any order will do.
                    line.iter_mut().zip(list.iter().rev()).for_each(|(slot, &column)| *slot = column as i32);
                }
                out
            };
            let lists = KvBlocks {
                shape: blocks.shape,
                num_blocks: &number(&blocks.partial),
                indices: &indices(&blocks.partial),
                full_num_blocks: &number(&blocks.full),
                full_indices: &indices(&blocks.full),
            };
            let imported = BlockMask::from_kv_blocks(&lists, q_len, kv_len, blocks.block, Some(&mask))?;
            assert_eq!(imported, built, "{}", golden.name);
        }
    }
    assert!(compared > 600, "{compared} blocks compared");
    Ok(())
}

#[test]
fn sparsity_and_list_lengths_are_pytorchs() -> Result<()> {
    let shape = BlockShape::new(1, 1, 2048, 2048);
    let causal = BlockMask::build(&masks::causal(), shape)?;
    assert_eq!(causal.sparsity(), 0.46875);
    let window = BlockMask::build(&masks::sliding_window(513), shape)?;
    assert_eq!(window.rows().blocks().1, 28);
    let offset = MaskMod::new(|i| (i.q() + i.batch() * 128).ge(i.kv()));
    let offset = BlockMask::build(&offset, BlockShape::new(8, 1, 2048, 2048))?;
    assert_eq!(offset.sparsity(), 0.291015625);
    // A dense mask of ragged length: PyTorch's figure is negative here.
    let dense = BlockMask::dense(BlockShape::new(1, 1, 232, 232))?;
    assert_eq!(dense.sparsity(), 0.0);
    assert_eq!(dense.rows().partials.len(), 0);
    Ok(())
}

#[test]
fn causal_computes_about_half_in_tiles() -> Result<()> {
    let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 512, 512))?;
    assert_eq!(mask.density_bounds()[1], 0.53125);
    Ok(())
}

#[test]
fn lists_collapse_where_nothing_depends_on_batch_or_head() -> Result<()> {
    let shape = BlockShape::new(4, 6, 100, 100);
    let size = |mask: &BlockMask| (mask.mask_batch(), mask.mask_heads());
    assert_eq!(size(&BlockMask::build(&masks::causal(), shape)?), (1, 1));
    assert_eq!(size(&BlockMask::build(&masks::padding(&[1, 2, 3, 4]), shape)?), (4, 1));
    assert_eq!(size(&BlockMask::build(&MaskMod::new(|i| i.head().ge(3)), shape)?), (1, 6));
    // Offsets and lengths that differ make lists differ; those that do not, do not.
    let offsets = BlockShape { q_offset: &[0, 0, 0, 1], ..shape };
    assert_eq!(size(&BlockMask::build(&masks::causal(), offsets)?), (4, 1));
    let lengths = BlockShape { kv_lens: &[100, 50, 100, 100], ..shape };
    assert_eq!(size(&BlockMask::build(&masks::noop(), lengths)?), (4, 1));
    let equal = BlockShape { q_offset: &[9; 4], kv_lens: &[50; 4], ..shape };
    assert_eq!(size(&BlockMask::build(&masks::causal(), equal)?), (1, 1));
    Ok(())
}

#[test]
fn blocks_beyond_the_kv_len_of_a_batch_entry_are_empty() -> Result<()> {
    let shape = BlockShape { kv_lens: &[0, 130, 400], ..BlockShape::new(3, 1, 200, 400) };
    let mask = BlockMask::dense(shape)?;
    assert_eq!(mask.rows().runs_of(0), [] as [[u32; 2]; 0]);
    assert_eq!(mask.rows().runs_of(2), [[0, 2]]);
    assert_eq!(mask.rows().runs_of(4), [[0, 4]]);
    assert_eq!(mask.kept()?, 200 * 530);
    assert_eq!(mask.not()?.kept()?, 0);
    Ok(())
}

#[test]
fn lengths_of_zero_give_empty_masks() -> Result<()> {
    for (q_len, kv_len) in [(0, 0), (0, 5), (5, 0)] {
        let mask = BlockMask::build(&masks::causal(), BlockShape::new(2, 2, q_len, kv_len))?;
        check_promises(&mask);
        assert_eq!((mask.kept()?, mask.density()?, mask.sparsity()), (0, 0.0, 0.0));
        assert_eq!(BlockMask::from_bytes(&mask.to_bytes())?, mask);
        assert!(mask.to_png().is_err());
        assert!(mask.to_string().starts_with("BlockMask"));
        assert_eq!(mask.not()?.kept()?, 0);
    }
    Ok(())
}

#[test]
fn shapes_that_cannot_be_are_refused_with_their_numbers() {
    let build = |shape, block| BlockMask::build_with(&masks::causal(), shape, block).unwrap_err().to_string();
    let shape = BlockShape::new(2, 1, 8, 8);
    assert!(build(BlockShape { batch: 0, ..shape }, [16, 16]).contains("batch is 0"));
    assert!(build(BlockShape { q_len: 1 << 31, ..shape }, [16, 16]).contains("q_len is 2147483648"));
    assert!(build(shape, [0, 16]).contains("block_q is 0"));
    assert!(build(shape, [16, 65537]).contains("block_kv is 65537"));
    assert!(build(BlockShape { q_offset: &[1, 2, 3], ..shape }, [16, 16]).contains("q_offset has 3 values"));
    assert!(build(BlockShape { kv_lens: &[9], ..shape }, [16, 16]).contains("9 exceeds"));
    assert!(build(BlockShape { q_offset: &[i32::MAX - 7], ..shape }, [16, 16]).contains("2147483640"));
    let mistaken = masks::block_diagonal(0);
    assert!(BlockMask::build(&mistaken, shape).is_err_and(|error| error.is_expression()));
}

#[test]
fn slices_keep_what_the_mask_keeps_there() -> Result<()> {
    let many = [
        masks::causal(),
        masks::sliding_window(70),
        masks::bottom_right_causal(),
        masks::padding(&[150, 310]) & masks::prefix_lm_per_batch(&[3, 90]),
        masks::document(&(0..400).map(|i| i / 90).collect::<Vec<_>>()),
    ];
    let kv_lens = [290, 333];
    for mask in many {
        let shape = BlockShape { kv_lens: &kv_lens, ..BlockShape::new(2, 1, 310, 333) };
        let whole = BlockMask::build(&mask, shape)?;
        let pairs = whole.to_mask()?;
        for (start, q_len, kv_len) in
            [(0, 310, 333), (1, 200, 333), (128, 128, 256), (309, 1, 310), (77, 13, 50)]
        {
            let part = whole.slice(start, q_len, kv_len)?;
            check_promises(&part);
            let expected: Vec<bool> = (0..part.mask_batch())
                .flat_map(|b| (start..start + q_len).map(move |row| (b * 310 + row) * 333))
                .flat_map(|at| pairs[at..at + kv_len].to_vec())
                .collect();
            assert_eq!(part.to_mask()?, expected, "{} {start} {q_len} {kv_len}", mask.expr());
        }
        assert!(whole.slice(300, 11, 333).is_err());
        assert!(whole.slice(0, 310, 334).is_err());
    }
    Ok(())
}

#[test]
fn dense_tensors_become_their_own_mask() -> Result<()> {
    for seed in 0..30 {
        let mut numbers = Numbers::new(seed);
        let shape =
            [1 + numbers.below(2), 1 + numbers.below(2), 1 + numbers.below(200), 1 + numbers.below(200)];
        let all: usize = shape.iter().product();
        let patch = 1 + numbers.below(40);
        let keep: Vec<bool> = (0..all).map(|i| (i / patch * 7 + i / shape[3] / patch) % 3 < 2).collect();
        let block = [[128, 128], [16, 32], [24, 40]][numbers.below(3)];
        let mask = BlockMask::from_dense_mask(&keep, shape, block)?;
        check_promises(&mask);
        assert_eq!(mask.to_mask()?, keep, "seed {seed}");
        let built = BlockMask::build_with(
            &masks::dense(&keep, shape),
            BlockShape::new(shape[0], shape[1], shape[2], shape[3]),
            block,
        )?;
        assert_eq!(mask, built, "seed {seed}");
    }
    assert!(BlockMask::from_dense_mask(&[true; 5], [1, 1, 2, 3], [128, 128]).is_err());
    Ok(())
}

#[test]
fn imported_lists_count_more_than_the_mask_where_they_leave_blocks_out() -> Result<()> {
    // Two of the three causal blocks of a 2x2 matrix; the partial one on the second diagonal is left out.
    let lists = KvBlocks {
        shape: [1, 1, 2],
        num_blocks: &[1, 0],
        indices: &[0, 0],
        full_num_blocks: &[0, 1],
        full_indices: &[0, 0],
    };
    let mask = BlockMask::from_kv_blocks(&lists, 64, 64, [32, 32], Some(&masks::causal()))?;
    let kept = 32 * 33 / 2 + 32 * 32;
    assert_eq!(mask.kept()?, kept);
    assert_eq!(mask.not()?.kept()?, 64 * 64 - kept);
    let all = BlockMask::build_with(&masks::causal(), BlockShape::new(1, 1, 64, 64), [32, 32])?;
    assert_eq!(mask.and(&all)?.kept()?, kept);
    assert_eq!(mask.or(&all)?, all);
    let part = mask.slice(40, 10, 64)?;
    assert_eq!(part.kept()?, 10 * 32);
    // With itself, whose lists join the expression twice, and with its own negation.
    assert_eq!(mask.and(&mask.clone())?.kept()?, kept);
    assert_eq!(mask.not()?.and(&mask)?.kept()?, 0);
    assert_eq!(mask.not()?.not()?.and(&mask)?.kept()?, kept);
    let [a, b] = [1, 2].map(|i| BlockMask::from_dense_mask(&[i == 1, true], [1, 1, 1, 2], [32, 32]));
    assert!(a?.and(&b?).unwrap_err().to_string().contains("rename_capture"));
    // Without a mask, partial blocks keep everything.
    let noop = BlockMask::from_kv_blocks(&lists, 64, 64, [32, 32], None)?;
    assert_eq!((noop.kept()?, noop.rows().partials.len()), (2 * 32 * 32, 1));
    Ok(())
}

#[test]
fn lists_that_heads_or_batch_entries_share_leave_to_the_mask_what_it_tells_apart() -> Result<()> {
    let lists = KvBlocks {
        shape: [1, 1, 1],
        num_blocks: &[1],
        indices: &[0],
        full_num_blocks: &[],
        full_indices: &[],
    };
    let by_head = MaskMod::new(|i| i.head().eq(1) | i.kv().lt(5));
    let by_batch = MaskMod::new(|i| i.batch().eq(1) | i.kv().lt(5));
    for (mask, [batch, heads]) in [(by_head, [1, 2]), (by_batch, [2, 1])] {
        let shared = BlockMask::from_kv_blocks(&lists, 1, 128, [128, 128], Some(&mask))?;
        for tier in [Tier::Cpu, Tier::Portable, Tier::Subgroup] {
            let Ok(gpu) = Gpu::builder().tier(tier).build() else { continue };
            let zeros = |rows| gpu.zeros(DType::F32, [batch, heads, rows, 4]);
            let attention = Attention::new().block_mask(shared.clone());
            let kept = attention.forward(&gpu, &zeros(1)?, &zeros(128)?, &zeros(128)?)?.lse;
            let kept: Vec<f32> = kept.map(|lse| lse.read()).transpose()?.unwrap_or_default();
            let kept: Vec<f32> = kept.iter().map(|lse| lse.exp().round()).collect();
            assert_eq!(kept, [5.0, 128.0], "{tier}");
        }
    }
    Ok(())
}

#[test]
fn bytes_of_very_many_empty_matrices_are_refused_at_once() {
    let mut bytes = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 0, 0)).unwrap().to_bytes();
    assert!(BlockMask::from_bytes(&bytes).is_ok());
    // `heads` is the second word after magic and version; the hash of what stands before it comes last.
    bytes[12..16].copy_from_slice(&200_000_000u32.to_le_bytes());
    let end = bytes.len() - 8;
    let hash = xxhash_rust::xxh3::xxh3_64(&bytes[..end]);
    bytes[end..].copy_from_slice(&hash.to_le_bytes());
    let error = BlockMask::from_bytes(&bytes).unwrap_err();
    assert!(error.to_string().contains("heads 200000000"), "{error}");
}

#[test]
fn block_lists_that_do_not_fit_are_refused() {
    let good = KvBlocks {
        shape: [1, 1, 2],
        num_blocks: &[1, 2],
        indices: &[0, 0, 0, 1],
        full_num_blocks: &[],
        full_indices: &[],
    };
    let import = |lists: KvBlocks<'_>| BlockMask::from_kv_blocks(&lists, 64, 64, [32, 32], None);
    assert!(import(good).is_ok());
    let bad = [
        KvBlocks { shape: [1, 1, 3], ..good },
        KvBlocks { num_blocks: &[1], ..good },
        KvBlocks { num_blocks: &[1, 3], ..good },
        KvBlocks { num_blocks: &[-1, 2], ..good },
        KvBlocks { indices: &[0, 0, 0, 2], ..good },
        KvBlocks { indices: &[0, 0, 0, -1], ..good },
        KvBlocks { indices: &[0, 0, 1, 1], ..good },
        KvBlocks { indices: &[0, 0, 0], ..good },
        KvBlocks { full_num_blocks: &[1, 0], full_indices: &[0, 0, 0, 0], ..good },
    ];
    for lists in bad {
        assert!(import(lists).is_err_and(|error| error.is_shape()), "{lists:?}");
    }
}

#[test]
fn cumulated_lengths_give_the_mask_of_packed_sequences() -> Result<()> {
    let cu = [0, 130, 131, 131, 400];
    let offsets: Vec<i32> = cu.iter().map(|&at| at as i32).collect();
    let shape = BlockShape::new(1, 1, 400, 400);
    let causal = BlockMask::from_cu_seqlens(&cu, &cu, true)?;
    assert_eq!(causal, BlockMask::build(&masks::packed_causal_document(&offsets), shape)?);
    let whole = BlockMask::from_cu_seqlens(&cu, &cu, false)?;
    assert_eq!(whole, BlockMask::build(&masks::document_from_offsets(&offsets), shape)?);
    // Fewer queries than keys: causal from the bottom right corner of each sequence.
    let mask = BlockMask::from_cu_seqlens(&[0, 1, 3], &[0, 4, 6], true)?;
    let (t, f) = (true, false);
    assert_eq!(mask.to_mask()?, [t, t, t, t, f, f, f, f, f, f, t, f, f, f, f, f, t, t]);
    for bad in [&[1, 2, 3][..], &[0, 5, 3], &[0, 2]] {
        assert!(BlockMask::from_cu_seqlens(bad, &[0, 2, 3], true).is_err_and(|error| error.is_shape()));
    }
    assert_eq!(BlockMask::from_cu_seqlens(&[0], &[0], true)?.kept()?, 0);
    Ok(())
}

#[test]
fn a_mask_without_its_expression_says_what_is_missing() -> Result<()> {
    let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 200, 200))?;
    let bare = BlockMask::from_bytes(&mask.to_bytes())?;
    let message = bare.kept().unwrap_err().to_string();
    assert!(message.contains("2 partial blocks") && message.contains("with_mask_mod"), "{message}");
    assert!(bare.to_mask().is_err() && bare.not().is_err() && bare.slice(0, 1, 1).is_err());
    assert_eq!(bare.with_mask_mod(masks::causal()).kept()?, mask.kept()?);
    // Nothing is missing when no block is partial.
    let dense = BlockMask::dense(BlockShape::new(1, 1, 200, 200))?;
    assert_eq!(BlockMask::from_bytes(&dense.to_bytes())?.kept()?, 200 * 200);
    Ok(())
}

#[test]
fn damaged_bytes_are_refused_and_never_panic() -> Result<()> {
    let shape = BlockShape { kv_lens: &[150, 300], ..BlockShape::new(2, 1, 260, 300) };
    let good = BlockMask::build(&masks::sliding_window(100), shape)?.to_bytes();
    for len in 0..good.len() {
        assert!(BlockMask::from_bytes(&good[..len]).is_err_and(|error| error.is_format()));
    }
    // Bytes whose hash fits, so that the checks behind it have to hold.
    let sealed = |mut bytes: Vec<u8>| {
        let body = bytes.len() - 8;
        let hash = xxhash_rust::xxh3::xxh3_64(&bytes[..body]);
        bytes[body..].copy_from_slice(&hash.to_le_bytes());
        bytes
    };
    let mut numbers = Numbers::new(3);
    let mut accepted = 0;
    for at in 0..good.len() - 8 {
        for value in [0, 1, 0x80, 0xff, numbers.below(256) as u8] {
            let mut bytes = good.clone();
            bytes[at] = value;
            if bytes == good {
                continue;
            }
            assert!(BlockMask::from_bytes(&bytes).is_err(), "byte {at} = {value}: the hash must differ");
            // What is accepted must hold its promises: only q_offset, kv_len and tile classes can change.
            if let Ok(mask) = BlockMask::from_bytes(&sealed(bytes)) {
                check_promises(&mask);
                accepted += 1;
            }
        }
    }
    assert!(accepted > 0 && accepted < 400, "{accepted} accepted");
    assert!(BlockMask::from_bytes(&sealed([&good[..], &[0; 8]].concat())).is_err());
    Ok(())
}

#[test]
fn tables_list_both_orders_by_absolute_offsets() -> Result<()> {
    let shape = BlockShape::new(2, 3, 300, 500);
    let mask = BlockMask::build(&(masks::padding(&[200, 280]) & masks::local_window(150, 150)), shape)?;
    let base = 1000;
    let tables = mask.tables(base)?;
    let word = |at: u32| tables.words[(at - base) as usize];
    assert_eq!(tables.lists, base);
    for (lists, headers) in [(mask.rows(), tables.lists), (mask.transposed(), tables.lists_t)] {
        for row in 0..lists.len() {
            let header: Vec<u32> = (0..4).map(|i| word(headers + 4 * row as u32 + i)).collect();
            let read = |begin: u32, end: u32| -> Vec<[u32; 2]> {
                (begin..end).step_by(2).map(|at| [word(at), word(at + 1)]).collect()
            };
            assert_eq!(read(header[0], header[1]), lists.runs_of(row));
            assert_eq!(read(header[2], header[3]), lists.partials_of(row));
        }
    }
    assert!(mask.tables(u32::MAX).unwrap_err().is_overflow());
    Ok(())
}

#[test]
fn text_picture_shows_full_partial_and_empty_blocks() -> Result<()> {
    let mask = BlockMask::build(&masks::causal(), BlockShape::new(2, 2, 512, 512))?;
    assert_eq!(
        mask.to_string(),
        "BlockMask batch 1 heads 1 q_len 512 kv_len 512 blocks 128x128: 6 full, 4 partial, 37.50 % skipped\n\
         ▒···\n\
         █▒··\n\
         ██▒·\n\
         ███▒\n"
    );
    let large = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 100_000, 100_000))?.to_string();
    assert_eq!(large.lines().count(), 33);
    assert!(large.lines().skip(1).all(|line| line.chars().count() == 64));
    assert!(large.lines().last().is_some_and(|line| line.starts_with("████")));
    Ok(())
}

#[test]
fn picture_has_a_pixel_for_each_tile() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, 256, 512))?;
    let png = mask.to_png()?;
    let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().ok_or("size")?];
    let info = reader.next_frame(&mut pixels)?;
    assert_eq!((info.width, info.height), (16, 8));
    let pixel = |row: usize, column: usize| &pixels[3 * (row * 16 + column)..][..3];
    assert_eq!(pixel(5, 2), [24, 44, 92], "full");
    assert_eq!(pixel(5, 5), [250, 178, 92], "partial");
    assert_eq!(pixel(5, 6), [255, 255, 255], "empty");
    Ok(())
}

/// Time that this thread computed, where the system tells; else time that went by.
fn computing<T>(f: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let used = || {
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        stat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    };
    let (start, before) = (std::time::Instant::now(), used());
    let out = f()?;
    let elapsed = match (before, used()) {
        (Some(before), Some(after)) => after - before,
        _ => start.elapsed(),
    };
    Ok((out, elapsed))
}

/// The mean time of several builds. The system counts a thread's time in steps of some milliseconds, so the rounds have
/// to take much longer than that together.
fn mean(rounds: u32, f: impl Fn() -> Result<BlockMask>) -> Result<(BlockMask, Duration)> {
    let (last, time) = computing(|| {
        let mut last = f()?;
        for _ in 1..rounds {
            last = f()?;
        }
        Ok(last)
    })?;
    Ok((last, time / rounds))
}

#[test]
fn a_million_tokens_take_a_tenth_of_a_second_and_four_mebibytes() -> Result<()> {
    const TOKENS: usize = 1 << 20;
    let mut numbers = Numbers::new(32);
    let mut offsets: Vec<i32> = (0..31).map(|_| 1 + numbers.below(TOKENS - 1) as i32).collect();
    offsets.extend([0, TOKENS as i32]);
    offsets.sort_unstable();
    let mut ids = Vec::new();
    for (document, pair) in offsets.windows(2).enumerate() {
        ids.resize(pair[1] as usize, document as i32);
    }
    let shape = BlockShape::new(1, 1, TOKENS, TOKENS);
    let cases: [(&str, &dyn Fn() -> MaskMod); 4] = [
        ("causal", &masks::causal),
        ("sliding window of 1024", &|| masks::sliding_window(1024)),
        ("document & causal", &|| masks::document(&ids) & masks::causal()),
        ("packed causal document", &|| masks::packed_causal_document(&offsets)),
    ];
    let mut built = Vec::new();
    for (name, mask) in cases {
        let mask = mask();
        let (block_mask, time) = mean(10, || BlockMask::build(&mask, shape))?;
        let bytes = [block_mask.rows().bytes(), block_mask.transposed().bytes()];
        println!("{name}: {:.1} ms, {} and {} bytes", time.as_secs_f64() * 1e3, bytes[0], bytes[1]);
        assert!(time < Duration::from_millis(100), "{name} took {time:?}");
        assert!(bytes.iter().all(|&bytes| bytes < 4 << 20), "{name} takes {bytes:?} bytes");
        built.push(block_mask);
    }
    assert_eq!(built[2], built[3]);
    assert_eq!(built[0].rows().blocks(), (8192 * 8191 / 2, 8192));
    Ok(())
}

#[test]
fn a_decoding_step_is_built_in_microseconds() -> Result<()> {
    for mask in [masks::causal(), masks::sliding_window(1024)] {
        let compiled = CompiledMask::new(&mask)?;
        let steps = 100_000..100_200;
        let (_, time) = mean(50, || {
            let mut last = None;
            for kv_len in steps.clone() {
                let shape =
                    BlockShape { q_offset: &[kv_len - 1], ..BlockShape::new(1, 32, 1, kv_len as usize) };
                last = Some(compiled.build(&shape, [128, 128])?);
            }
            last.ok_or_else(|| Error::shape("no step"))
        })?;
        let step = time / steps.len() as u32;
        println!("{}: {step:?}", mask.expr());
        assert!(!step.is_zero(), "too short to be measured");
        assert!(step < Duration::from_micros(100), "{} took {step:?} a step", mask.expr());
    }
    Ok(())
}

#[test]
fn thousands_of_documents_are_no_harder_than_few() -> Result<()> {
    let cu: Vec<u32> = (0..=4000).map(|document| document * 57).collect();
    let (mask, time) = mean(3, || BlockMask::from_cu_seqlens(&cu, &cu, true))?;
    assert_eq!(mask.kept()?, 4000 * 57 * 58 / 2);
    assert!(time < Duration::from_millis(500), "{time:?}");
    Ok(())
}

#[test]
fn captures_on_a_device_are_named() -> Result<()> {
    use flexattn::expr::{CaptureData, CaptureType, Captured, DeviceHandle, I32};
    let doc = Capture::new("doc", CaptureType::I32, &[8], CaptureData::Device(DeviceHandle::new(7u8)))?;
    let doc = Captured::<I32>::new(doc)?;
    let mask = MaskMod::new(|i| doc.at([i.q()]).eq(doc.at([i.kv()])));
    let error = BlockMask::build(&mask, BlockShape::new(1, 1, 8, 8)).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("`doc`"), "{error}");
    Ok(())
}

#[test]
fn a_mask_of_more_pairs_than_memory_is_refused_not_fatal() {
    let len = 1 << 20;
    let mask = BlockMask::build(&masks::causal(), BlockShape::new(1, 1, len, len)).unwrap();
    for error in [mask.to_mask().unwrap_err(), mask.window([0, 0], 0..len, 0..len).unwrap_err()] {
        assert!(error.is_out_of_memory() && error.to_string().contains("1099511627776"), "{error}");
    }
}
