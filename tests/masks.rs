//! Prebuilt masks and score mods against the golden cases, and against their formulas in plain Rust.

use flexattn::expr::{Env, Point, Program};
use flexattn::{BlockMask, BlockShape, Capture, MaskMod, Params, Result, ScoreMod, masks, scores};
use flexattn_testing::Golden;
use flexattn_testing::problem::Numbers;

type Anything = std::result::Result<(), Box<dyn std::error::Error>>;

/// The golden case and a capture's values.
fn golden(name: &str) -> std::result::Result<Golden, Box<dyn std::error::Error>> {
    Ok(Golden::shipped(name)?)
}

fn captured<'a>(golden: &'a Golden, name: &str) -> &'a Capture {
    golden.captures.iter().find(|capture| capture.name() == name).expect("the case captures it")
}

fn ints(golden: &Golden, name: &str) -> Vec<i32> {
    let capture = captured(golden, name);
    (0..capture.len()).map(|i| capture.value(i).map_or(0, |value| value.bits().cast_signed())).collect()
}

fn floats(golden: &Golden, name: &str) -> Vec<f32> {
    let capture = captured(golden, name);
    (0..capture.len()).map(|i| capture.value(i).map_or(0.0, |value| f32::from_bits(value.bits()))).collect()
}

/// Requires a prebuilt mask to keep what the mask of a golden case keeps.
fn same_mask(name: &str, prebuilt: &MaskMod) -> Anything {
    let golden = golden(name)?;
    let [batch, heads, _, q_len, kv_len, ..] = golden.dims();
    let theirs = golden.mask_mod()?.ok_or("the case has a mask")?;
    let shape = BlockShape::new(batch, heads, q_len, kv_len);
    let (ours, theirs) = (BlockMask::build(prebuilt, shape)?, BlockMask::build(&theirs, shape)?);
    assert_eq!(ours.to_mask()?, theirs.to_mask()?, "{name}");
    assert_eq!(ours, theirs, "{name}");
    Ok(())
}

#[test]
fn prebuilt_masks_equal_the_golden_cases_that_they_stand_for() -> Anything {
    same_mask("all_masked", &!masks::noop())?;
    same_mask("bkv1_b4_gqa2_noop", &masks::noop())?;
    same_mask("gqa3_causal", &masks::causal())?;
    same_mask("bottom_right_q33_kv65", &masks::bottom_right_causal())?;
    same_mask("len127_d15_slide", &masks::sliding_window(21))?;
    same_mask("softcap_causal_window", &(masks::causal() & masks::sliding_window(24)))?;
    same_mask("len31_d24_symwindow", &masks::local_window(5, 5))?;
    same_mask("gqa4_dilated_kscale", &masks::dilated_window(12, 3))?;
    same_mask("len65_d72_prefix_lm", &masks::prefix_lm(13))?;
    same_mask("scale_one_strided", &masks::strided(8, 8))?;
    same_mask("natten_8x8_k5", &masks::natten_2d(8, 8, 5))?;
    same_mask("block_diffusion_l32_b8", &masks::block_diffusion(32, 8))?;
    same_mask("prefix_per_batch", &masks::prefix_lm_per_batch(&ints(&golden("prefix_per_batch")?, "plen")))?;
    same_mask("d96_s48_doc_ids", &masks::document(&ints(&golden("d96_s48_doc_ids")?, "doc")))?;
    let doc = ints(&golden("doc_batch_causal")?, "doc");
    same_mask("doc_batch_causal", &(masks::document_per_batch(&doc, 2) & masks::causal()))?;
    let mut offsets = ints(&golden("packed_causal_doc")?, "start");
    offsets.push(130);
    same_mask("packed_causal_doc", &masks::packed_causal_document(&offsets))?;
    same_mask("packed_causal_doc", &(masks::document_from_offsets(&offsets) & masks::causal()))?;
    let case = golden("d64_s130_longformer")?;
    let is_global: Vec<bool> = ints(&case, "glob").iter().map(|&flag| flag != 0).collect();
    same_mask("d64_s130_longformer", &masks::longformer(12, &is_global))?;
    let case = golden("shared_prefix")?;
    same_mask("shared_prefix", &masks::shared_prefix(&ints(&case, "doc"), &ints(&case, "pre")))?;
    let case = golden("flamingo_q50_kv33")?;
    let intervals: Vec<[i32; 2]> = ints(&case, "iv").chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
    same_mask("flamingo_q50_kv33", &masks::interval(&ints(&case, "img"), &intervals))?;
    let case = golden("dense_tensor_mask")?;
    let keep: Vec<bool> = ints(&case, "keep").iter().map(|&keep| keep != 0).collect();
    same_mask("dense_tensor_mask", &masks::dense(&keep, [2, 2, 48, 48]))?;
    // The case stores who is above whom; the parent is the nearest one above.
    let above = ints(&golden("tree_q9_p40")?, "anc");
    let parents: Vec<i32> = (0..9)
        .map(|node| (0..node).rev().find(|up| above[9 * node + up] != 0).map_or(-1, |up| up as i32))
        .collect();
    same_mask("tree_q9_p40", &masks::tree(40, &parents))
}

/// Requires a mask to keep exactly the pairs for which the formula in plain Rust holds.
fn same_pairs(mask: &MaskMod, q_len: usize, kv_len: usize, formula: impl Fn(i32, i32) -> bool) -> Result<()> {
    let found = BlockMask::build_with(mask, BlockShape::new(1, 1, q_len, kv_len), [16, 16])?.to_mask()?;
    for (at, keep) in found.into_iter().enumerate() {
        let (q, kv) = ((at / kv_len) as i32, (at % kv_len) as i32);
        assert_eq!(keep, formula(q, kv), "({q}, {kv}) of {}", mask.expr());
    }
    Ok(())
}

#[test]
fn masks_without_a_golden_case_keep_what_their_formulas_say() -> Result<()> {
    same_pairs(&masks::local_window(3, 7), 50, 60, |q, kv| kv >= q - 3 && kv <= q + 7)?;
    same_pairs(&masks::strided(4, 6), 60, 60, |q, kv| q >= kv && (q - kv < 4 || (q - kv) % 6 == 0))?;
    same_pairs(&masks::block_diagonal(7), 50, 40, |q, kv| q / 7 == kv / 7)?;
    same_pairs(&masks::padding(&[23]), 40, 40, |q, kv| q < 23 && kv < 23)?;
    same_pairs(&masks::row_interval(&[0, 5, 9], &[4, 5, 40]), 3, 40, |q, kv| {
        [0..4, 5..5, 9..40][q as usize].contains(&kv)
    })?;
    same_pairs(&masks::document(&[9, 9, 2, 9, 2]), 5, 5, |q, kv| {
        let ids = [9, 9, 2, 9, 2];
        ids[q as usize] == ids[kv as usize]
    })
}

/// Tile coordinates of a token in tile order.
fn tile_of<const N: usize>(token: i32, canvas: [i32; N], tile: [i32; N]) -> [i32; N] {
    let mut rest = token / tile.iter().product::<i32>();
    let mut out = [0; N];
    for axis in (0..N).rev() {
        let tiles = canvas[axis] / tile[axis];
        out[axis] = rest % tiles;
        rest /= tiles;
    }
    out
}

#[test]
fn sliding_tiles_see_the_window_of_tiles_around_them_and_the_text() -> Result<()> {
    let (canvas, tile, window, text) = ([4, 6, 10], [2, 2, 2], [1, 3, 3], 5);
    let image = 240;
    let mask = masks::sliding_tile_3d(canvas, tile, window, text);
    same_pairs(&mask, 250, 250, |q, kv| {
        if q >= image + text || kv >= image + text {
            return false;
        }
        if q >= image || kv >= image {
            return true;
        }
        let (q, kv) = (tile_of(q, canvas, tile), tile_of(kv, canvas, tile));
        (0..3).all(|axis| {
            let tiles = canvas[axis] / tile[axis];
            // The window's first tile, moved so that the window lies inside.
            let first = (q[axis] - window[axis] / 2).max(0).min(tiles - window[axis]);
            (first..first + window[axis]).contains(&kv[axis])
        })
    })
}

#[test]
fn neighbourhoods_at_the_border_keep_their_size() -> Result<()> {
    same_pairs(&masks::natten_2d(5, 9, 3), 45, 45, |q, kv| {
        let inside = |q: i32, kv: i32, len: i32| {
            let first = (q - 1).max(0).min(len - 3);
            (first..first + 3).contains(&kv)
        };
        inside(q / 9, kv / 9, 5) && inside(q % 9, kv % 9, 9)
    })
}

#[test]
fn trees_see_their_branch_and_nothing_behind_it() -> Result<()> {
    let parents = [-1, 0, 0, 1, 2, 2];
    same_pairs(&masks::tree(3, &parents), 6, 12, |q, kv| {
        if kv < 3 {
            return true;
        }
        let mut node = q;
        while node >= 0 {
            if node == kv - 3 {
                return true;
            }
            node = parents[node as usize];
        }
        false
    })
}

#[test]
fn arguments_that_make_no_mask_are_refused_with_their_value() {
    let refused = [
        (masks::dilated_window(3, 0), "dilation is 0"),
        (masks::strided(3, -1), "stride is -1"),
        (masks::block_diagonal(0), "size is 0"),
        (masks::natten_2d(8, 8, 9), "kernel is 9"),
        (masks::sliding_tile_2d([8, 8], [3, 2], [1, 1], 0), "tile is [3, 2]"),
        (masks::sliding_tile_2d([8, 8], [2, 2], [5, 1], 0), "window is [5, 1]"),
        (masks::sliding_tile_2d([8, 8], [2, 2], [1, 1], -1), "text is -1"),
        (masks::sliding_tile_3d([1 << 12, 1 << 12, 1 << 12], [1, 1, 1], [1, 1, 1], 0), "text is 0"),
        (masks::block_diffusion(0, 1), "(0, 1)"),
        (masks::tree(4, &[0]), "parent is 0"),
        (masks::tree(4, &[-1, -2]), "parent is -2"),
        (masks::tree(-1, &[-1]), "prefix is -1"),
        (masks::shared_prefix(&[0, 2], &[-1, -1]), "document id is 2"),
        (masks::packed_causal_document(&[0, 5, 3]), "3 document offsets"),
        (masks::document_from_offsets(&[]), "0 document offsets"),
        (masks::document_per_batch(&[0, 0, 0], 2), "batch is 2"),
        (masks::row_interval(&[0], &[1, 2]), "ends is 2"),
        (masks::document(&[]), "doc"),
        (masks::padding(&[]), "length"),
        (masks::dense(&[true], [1, 1, 1, 2]), "keep"),
    ];
    for (mask, part) in refused {
        let message = mask.check().unwrap_err().to_string();
        assert!(message.contains(part), "{message} should contain {part}");
        // A mistake stays when the mask is combined.
        assert_eq!((masks::causal() & !mask).check().unwrap_err().to_string(), message);
    }
    let refused = [
        (scores::softcap(-1.0), "cap is -1"),
        (scores::temperature(f32::NAN), "temperature is NaN"),
        (scores::log_n(1), "train_len is 1"),
        (scores::relative_bias(&[0.0; 3], 1, -1), "reach is -1"),
        (scores::relative_bias(&[0.0; 4], 1, 1), "table"),
        (scores::t5_bucket_bias(&[0.0; 2], 1, 128, true), "(2, 128)"),
        (scores::sandwich(0, 128, 9), "(0, 128)"),
        (scores::alibi(0), "slope"),
        (scores::head_gate(&[]), "gate"),
    ];
    for (score_mod, part) in refused {
        let message = score_mod.check().unwrap_err().to_string();
        assert!(message.contains(part), "{message} should contain {part}");
        assert_eq!(scores::identity().then(&score_mod).check().unwrap_err().to_string(), message);
    }
}

#[test]
fn tables_name_every_function_once_and_build_it_for_any_sizes() -> Result<()> {
    let names: Vec<&str> = masks::ALL.iter().map(|row| row.name).collect();
    let mut unique = names.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), names.len());
    let mut numbers = Numbers::new(1);
    for _ in 0..50 {
        let below = |numbers: &mut Numbers, n| 1 + numbers.below(n);
        let params = Params::new(
            below(&mut numbers, 5),
            below(&mut numbers, 9),
            below(&mut numbers, 400),
            below(&mut numbers, 400),
        );
        for row in masks::ALL {
            let mask = masks::by_name(row.name, &params)?;
            // It has to be usable, too.
            let shape = BlockShape::new(params.batch, params.heads, params.q_len, params.kv_len);
            BlockMask::build(&mask, shape)?;
        }
        for row in scores::ALL {
            scores::by_name(row.name, &params)?;
        }
    }
    Ok(())
}

#[test]
fn names_and_parameters_that_do_not_exist_are_refused_with_those_that_do() {
    let params = Params::new(1, 1, 8, 8);
    let message = masks::by_name("causl", &params).unwrap_err().to_string();
    assert!(message.contains("`causl`") && message.contains("causal, "), "{message}");
    let message = scores::by_name("alibi", &params.clone().with("slope", 1.0)).unwrap_err().to_string();
    assert!(message.contains("`slope`") && message.contains("slopes"), "{message}");
    let message = masks::by_name("causal", &params.clone().with("window", 1)).unwrap_err().to_string();
    assert!(message.contains("takes none"), "{message}");
    let message =
        masks::by_name("sliding_window", &params.clone().with("window", 1.5)).unwrap_err().to_string();
    assert!(message.contains("1.5") && message.contains("whole"), "{message}");
    let message = masks::by_name("block_diagonal", &params.with("size", 0)).unwrap_err().to_string();
    assert!(message.contains("size is 0"), "{message}");
}

#[test]
fn parameters_by_name_reach_the_functions() -> Result<()> {
    let params = Params::new(2, 4, 12, 12);
    let same = |name: &str, text: &str, mask: MaskMod| -> Result<()> {
        let found = masks::by_name(name, &params.clone().read(text)?)?;
        let shape = BlockShape::new(2, 4, 12, 12);
        assert_eq!(
            BlockMask::build(&found, shape)?.to_mask()?,
            BlockMask::build(&mask, shape)?.to_mask()?,
            "{name}"
        );
        Ok(())
    };
    same("local_window", "before=1, after=2", masks::local_window(1, 2))?;
    same("prefix_lm_per_batch", "prefix=[3 5]", masks::prefix_lm_per_batch(&[3, 5]))?;
    same("longformer", "window=1, is_global=[0 1 0]", masks::longformer(1, &[false, true, false]))?;
    same("interval", "group=[0 0 1], intervals=[0 4 4 12]", masks::interval(&[0, 0, 1], &[[0, 4], [4, 12]]))?;
    same("tree", "prefix=2, parents=[-1 0 0]", masks::tree(2, &[-1, 0, 0]))?;
    same("natten_2d", "height=3, width=4, kernel=3", masks::natten_2d(3, 4, 3))?;
    same("sliding_tile_2d", "canvas=[2 4], tile=[1 2], window=[1 1], text=3", {
        masks::sliding_tile_2d([2, 4], [1, 2], [1, 1], 3)
    })?;
    same("dense", "shape=[1 1 1 3], keep=[1 0 1]", masks::dense(&[true, false, true], [1, 1, 1, 3]))
}

/// The value of a score mod in f64.
fn value(score_mod: &ScoreMod, [b, h, q, kv]: [i32; 4], score: f64, len: usize) -> Result<f64> {
    let program = Program::new(std::slice::from_ref(score_mod.expr()));
    let env = Env::new(score_mod.captures(), score_mod.scalars(), len, len)?;
    Ok(program.eval(&env, &Point { score, b, h, q, kv })?[0].to_f64())
}

#[test]
fn prebuilt_score_mods_equal_the_golden_cases_that_they_stand_for() -> Anything {
    let same = |name: &str, ours: &ScoreMod| -> Anything {
        let golden = golden(name)?;
        let [batch, heads, _, q_len, kv_len, ..] = golden.dims();
        let theirs = golden.score_mod()?.ok_or("the case has a score mod")?;
        let mut numbers = Numbers::new(5);
        for _ in 0..500 {
            let at = [batch, heads, q_len, kv_len].map(|n| numbers.below(n) as i32);
            let score = f64::from(numbers.normal());
            let len = q_len.max(kv_len);
            let (ours, theirs) = (value(ours, at, score, len)?, value(&theirs, at, score, len)?);
            assert!(
                (ours - theirs).abs() < 1e-5 * theirs.abs().max(1.0),
                "{name} at {at:?}: {ours}, {theirs}"
            );
        }
        Ok(())
    };
    same("identity_score_mod", &scores::identity())?;
    same("softcap", &scores::softcap(8.0))?;
    same("mqa6_alibi", &scores::alibi_with_slopes(&floats(&golden("mqa6_alibi")?, "slope")))?;
    same("head_gate", &scores::head_gate(&floats(&golden("head_gate")?, "g")))?;
    same("t5_buckets", &scores::t5_bucket_bias(&floats(&golden("t5_buckets")?, "tab"), 2, 128, true))?;
    same("times_two", &scores::temperature(0.5))?;
    // The case's table runs from key to query; one head.
    let mut table = floats(&golden("rel_table")?, "rb");
    table.remove(0);
    table.reverse();
    let table = [&table[..], &table[..]].concat();
    same("rel_table", &scores::relative_bias(&table, 2, 32))
}

#[test]
fn score_mods_without_a_golden_case_do_what_their_formulas_say() -> Result<()> {
    let close = |score_mod: &ScoreMod, at: [i32; 4], score: f64, expected: f64| -> Result<()> {
        let found = value(score_mod, at, score, 64)?;
        let error = (found - expected).abs();
        assert!(error < 1e-6 * expected.abs().max(1.0), "{}: {found}, not {expected}", score_mod.expr());
        Ok(())
    };
    close(&scores::alibi(4), [0, 1, 3, 9], 0.5, 0.5 + 6.0 / 16.0)?;
    close(&scores::alibi(3), [0, 2, 9, 3], 0.5, 0.5 - 6.0 / 4.0)?;
    close(&scores::distance_penalty(0.25), [0, 0, 2, 10], 1.0, -1.0)?;
    close(&scores::head_bias(&[1.0, 2.0]), [0, 1, 0, 0], 0.5, 2.5)?;
    close(&scores::dense_bias(&[1.0, 2.0, 3.0, 4.0], [1, 1, 2, 2]), [1, 3, 1, 0], 0.5, 3.5)?;
    close(&scores::log_n(16), [0, 0, 7, 0], 3.0, 3.0)?;
    close(&scores::log_n(16), [0, 0, 255, 0], 3.0, 6.0)?;
    let wave: f64 = (0..4).map(|i| (5.0 / 10000f64.powf(2.0 * f64::from(i) / 8.0)).cos()).sum();
    close(&scores::sandwich(4, 8, 63), [0, 1, 5, 10], 1.0, 1.0 + wave * 4.0 / 16.0)?;
    close(&scores::sandwich(4, 8, 63), [0, 1, 10, 5], 1.0, 1.0 + wave * 4.0 / 16.0)?;
    let table: Vec<f32> = (0..8).map(|i| i as f32).collect();
    let bucket = |score_mod: &ScoreMod, q: i32, kv: i32| value(score_mod, [0, 0, q, kv], 0.0, 64);
    // Eight buckets in one direction: 0 to 3 exact, then by the logarithm up to 32.
    let causal = scores::t5_bucket_bias(&table, 1, 32, false);
    let found: Vec<f64> = [0, 1, 3, 4, 6, 7, 12, 20, 33, 60]
        .into_iter()
        .map(|back| bucket(&causal, 60, 60 - back))
        .collect::<Result<_>>()?;
    assert_eq!(found, [0.0, 1.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0, 7.0, 7.0]);
    assert_eq!(bucket(&causal, 3, 9)?, 0.0);
    close(&scores::softcap(2.0).then(&scores::temperature(0.5)), [0; 4], 3.0, 4.0 * 1.5f64.tanh())
}
