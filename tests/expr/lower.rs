//! The text that kernels get.

use flexattn::expr::Type;
use flexattn::kernels::Language;
use flexattn::lower::{Layout, Mods, slots};
use flexattn::{Capture, MaskMod, Scalar, ScoreMod};
use proptest::prelude::*;

use super::random;

fn lowered(mods: &Mods, language: Language) -> Vec<(&'static str, String)> {
    slots(mods, &Layout::new(mods.score.iter().chain(&mods.mask), None), language).unwrap()
}

fn slot<'a>(texts: &'a [(&'static str, String)], name: &str) -> &'a str {
    texts.iter().find(|(slot, _)| *slot == name).map_or("", |(_, text)| text)
}

#[test]
fn causal_is_one_comparison() {
    let mods = Mods { mask: Some(MaskMod::new(|i| i.q().ge(i.kv())).expr().clone()), ..Mods::default() };
    let texts = lowered(&mods, Language::Wgsl);
    assert_eq!(texts.len(), 1);
    assert_eq!(
        slot(&texts, "mask_mod"),
        "fn mask_mod(row: Row, b: i32, h: i32, q: i32, kv: i32) -> bool {\n  return q >= kv;\n}"
    );
    let texts = lowered(&mods, Language::Msl);
    assert_eq!(
        slot(&texts, "mask_mod"),
        "inline bool mask_mod(thread const Ctx& ctx, Row row, int b, int h, int q, int kv) {\n  return q >= kv;\n}"
    );
}

#[test]
fn alibi_reads_its_slope_once_per_row() {
    let slope = Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    let alibi = ScoreMod::new(|s| s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32());
    let mods = Mods { score: Some(alibi.expr().clone()), grad: true, ..Mods::default() };
    let texts = lowered(&mods, Language::Wgsl);
    assert!(slot(&texts, "score_mod").contains("return score + row.r0 * f32(kv - q);"), "{texts:?}");
    assert!(
        slot(&texts, "row").contains("struct Row { r0: f32 }")
            && slot(&texts, "row").contains("return Row(captured_slope(h));")
    );
    assert!(slot(&texts, "score_grad").contains("return 1.0;"));
    assert!(slot(&texts, "captures").contains("fn captured_slope(i0: i32) -> f32"));
    let texts = lowered(&mods, Language::Msl);
    assert!(
        slot(&texts, "score_mod").contains("return score + row.r0 * float(wrap_sub(kv, q));"),
        "{texts:?}"
    );
}

#[test]
fn what_costs_nothing_stays_in_place() {
    let mods = |text: &str| Mods {
        mask: Some(MaskMod::from_wgsl(text, &[], &[]).unwrap().expr().clone()),
        ..Mods::default()
    };
    let texts = lowered(&mods("q + 32 >= kv"), Language::Wgsl);
    assert!(
        slot(&texts, "row").is_empty() && slot(&texts, "mask_mod").contains("return q + 32 >= kv;"),
        "{texts:?}"
    );
    // A length per batch entry is read from memory.
    let texts = lowered(&mods("kv < kv_len - 3"), Language::Wgsl);
    assert!(slot(&texts, "mask_mod").contains("return kv < row.r0;"), "{texts:?}");
    let texts = lowered(&mods("q % 2 == 0"), Language::Wgsl);
    assert!(slot(&texts, "mask_mod").contains("return row.r0;"), "{texts:?}");
}

#[test]
fn shared_parts_are_named_once() {
    let text = "let d = f32(kv - q) * score; return exp(d) + d * d;";
    let mods =
        Mods { score: Some(ScoreMod::from_wgsl(text, &[], &[]).unwrap().expr().clone()), ..Mods::default() };
    let texts = lowered(&mods, Language::Wgsl);
    let body = slot(&texts, "score_mod");
    assert!(body.contains("let v0 = f32(kv - q) * score;\n  return exp(v0) + v0 * v0;"), "{body}");
    let texts = lowered(&mods, Language::Msl);
    assert!(
        slot(&texts, "score_mod").contains("const float v0 = float(wrap_sub(kv, q)) * score;"),
        "{texts:?}"
    );
}

#[test]
fn terms_are_sorted_by_what_their_index_depends_on() {
    let bias: Capture = Capture::f32("bias", &[0.0; 8], &[8]).unwrap().into();
    let table: Capture = Capture::f32("table", &[0.0; 64], &[8, 8]).unwrap().into();
    let captures = [bias, table];
    let score = ScoreMod::from_wgsl("score + bias(q) + bias(kv) + table(h, kv - q)", &captures, &[]).unwrap();
    let mods = Mods {
        score: Some(score.expr().clone()),
        grad: true,
        terms: vec!["bias".into(), "table".into()],
        ..Mods::default()
    };
    for language in [Language::Wgsl, Language::Msl] {
        let texts = lowered(&mods, language);
        let terms = slot(&texts, "terms");
        let count = |name: &str| match language {
            Language::Msl => terms.contains(&format!("#define {name}_TERMS 1u")),
            _ => terms.contains(&format!("const {name}_TERMS: u32 = 1u;")),
        };
        assert!(count("ROW") && count("COLUMN") && count("PAIR"), "{terms}");
        assert!(terms.contains("info[1].z + position_bias("), "{terms}");
        assert!(terms.contains("info[3].z + position_table("), "{terms}");
    }
    let layout = Layout::new([score.expr()], None);
    let info = layout.info_with_gradients(score.captures(), &[], 0, &mods.terms).unwrap();
    assert_eq!((info[1], info[3]), ([0, 0, 0, 0], [8, 0, 8, 0]));
    assert_eq!(info[2], [8, 8, 1, 1]);
    let unread = Mods { terms: vec!["other".into()], ..mods };
    assert!(slots(&unread, &layout, Language::Wgsl).is_err());
}

#[test]
fn scalars_follow_the_captures_in_info() {
    let scalars = random::scalars();
    let mut captures = random::captures();
    captures.retain(|capture| capture.name() == "halves");
    let text = "score * cap + f32(shift) + f32(seed) + halves(q)";
    let score = ScoreMod::from_wgsl(text, &captures, &scalars).unwrap();
    let layout = Layout::new([score.expr()], None);
    let names: Vec<&str> = layout.scalars.iter().map(|s| &*s.name).collect();
    assert_eq!(names, ["cap", "seed", "shift"]);
    let info = layout.info(score.captures(), score.scalars(), 0).unwrap();
    assert_eq!(info[2], [1.75f32.to_bits(), 0x8000_0007, (-3i32) as u32, 0]);
    assert_eq!(layout.words(score.captures()).unwrap().len(), 4);
    let texts = lowered(&Mods { score: Some(score.expr().clone()), ..Mods::default() }, Language::Wgsl);
    assert!(
        slot(&texts, "captures").contains("fn scalar_shift() -> i32 { return bitcast<i32>(p.info[2].z); }")
    );
    let missing = Layout::new([score.expr()], None).info(score.captures(), &[], 0);
    assert!(missing.unwrap_err().to_string().contains("`cap`"));
    let _: &[Scalar] = score.scalars();
}

#[test]
fn a_mask_that_reads_the_score_is_refused() {
    let score = flexattn::expr::Expr::input(flexattn::expr::Input::Score);
    let above = flexattn::expr::Op::Gt;
    let mask = flexattn::expr::Expr::new(above, &[score, flexattn::expr::Expr::constant(0.0f32)]).unwrap();
    let mods = Mods { mask: Some(mask), ..Mods::default() };
    let error = slots(&mods, &Layout::default(), Language::Wgsl).unwrap_err().to_string();
    assert!(error.contains("score > 0.0"), "{error}");
}

proptest! {
    #![proptest_config(super::random::config(150))]

    #[test]
    fn text_has_one_balanced_body_in_both_languages(score in random::expr(Type::F32, 5), mask in random::mask(5)) {
        let mods = Mods { score: Some(score), mask: Some(mask), grad: true, ..Mods::default() };
        for language in [Language::Wgsl, Language::Msl] {
            for (name, text) in lowered(&mods, language) {
                let count = |c| text.matches(c).count();
                prop_assert_eq!(count('('), count(')'), "{}: {}", name, &text);
                prop_assert_eq!(count('{'), count('}'), "{}: {}", name, &text);
                prop_assert!(!text.contains("inf") || text.contains("info"), "{}", text);
                prop_assert!(!text.contains("NaN"), "{}", text);
            }
        }
    }
}

#[test]
fn text_of_a_typical_mod_takes_well_under_a_millisecond() {
    let slope = Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    let start = std::time::Instant::now();
    for _ in 0..100 {
        let alibi =
            ScoreMod::new(|s| (s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32()).tanh() * 8.0);
        let mods = Mods { score: Some(alibi.expr().clone()), grad: true, ..Mods::default() };
        assert_eq!(lowered(&mods, Language::Wgsl).len(), 4);
    }
    // A wide margin for a loaded machine.
    assert!(start.elapsed().as_secs_f64() / 100.0 < 2e-3, "{:?} for 100", start.elapsed());
}
