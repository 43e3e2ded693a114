//! WGSL text in: what is accepted, what is refused, and where errors point.

use flexattn::expr::{Env, Lane, Point, Program, text_reads};
use flexattn::{Capture, Error, MaskMod, ParseError, Scalar, ScoreMod};
use flexattn_testing::Golden;

fn mask_error(text: &str) -> ParseError {
    match MaskMod::from_wgsl(text, &[], &[]) {
        Err(Error::Parse(error)) => *error,
        other => panic!("{text} gave {other:?}"),
    }
}

fn score(text: &str, at: Point<f64>) -> f64 {
    let score_mod = ScoreMod::from_wgsl(text, &[], &[]).unwrap_or_else(|e| panic!("{text}\n{e}"));
    let env = Env::new(&[], &[], 64, 64).unwrap();
    Program::new(&[score_mod.expr().clone()]).eval(&env, &at).unwrap()[0].to_f64()
}

const AT: Point<f64> = Point { score: 1.5, b: 1, h: 2, q: 7, kv: 4 };

#[test]
fn every_golden_text_parses_and_evaluates() {
    let mut parsed = 0;
    for path in Golden::files(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens")).unwrap() {
        let golden = Golden::load(&path).unwrap();
        let captures = &golden.captures;
        let env = Env::new(captures, &[], golden.q.shape[2], golden.k.shape[2]).unwrap();
        let [batch, heads, q_len, _] = golden.q.shape[..] else { panic!("q is 4-D") };
        let mut exprs = Vec::new();
        if let Some(mask) = golden.mask_mod().unwrap_or_else(|e| panic!("{}: {e}", golden.name)) {
            exprs.push(mask.expr().clone());
        }
        if let Some(score_mod) = golden.score_mod().unwrap_or_else(|e| panic!("{}: {e}", golden.name)) {
            let d = score_mod.gradient().unwrap();
            assert_eq!(d.captures.len(), d.captures.iter().filter(|g| g.d.nodes() > 0).count());
            exprs.push(score_mod.expr().clone());
            exprs.push(d.d_score);
        }
        if exprs.is_empty() {
            continue;
        }
        parsed += 1;
        let last = |n: usize| n as i32 - 1;
        let at = flexattn::expr::IndexBox {
            b: (0, last(batch)),
            h: (0, last(heads)),
            q: (0, last(q_len)),
            kv: (0, last(golden.k.shape[2])),
        };
        for expr in &exprs {
            expr.check(&env, &at).unwrap_or_else(|e| panic!("{}: {expr}: {e}", golden.name));
        }
        let program = Program::new(&exprs);
        let values =
            program.eval(&env, &Point { score: 0.75f64, b: 0, h: 0, q: last(q_len), kv: 1 }).unwrap();
        assert_eq!(values.len(), exprs.len());
    }
    assert!(parsed >= 60, "{parsed}");
}

#[test]
fn text_and_closure_give_the_same_expression() {
    let slope = Capture::f32("slope", &[0.5, 0.25], &[2]).unwrap();
    let closure = ScoreMod::new(|s| s.score() + slope.at([s.head()]) * (s.kv() - s.q()).to_f32());
    let captures = [Capture::from(&slope)];
    let text = ScoreMod::from_wgsl("score + slope(h) * f32(kv - q)", &captures, &[]).unwrap();
    assert_eq!(closure.expr(), text.expr());
    let function = ScoreMod::from_wgsl(
        "fn score_mod(s: f32, b: i32, head: i32, q: i32, k: i32) -> f32 { let d = f32(k - q); return s + slope(head) * d; }",
        &captures,
        &[],
    )
    .unwrap();
    assert_eq!(closure.expr(), function.expr());
    let body =
        ScoreMod::from_wgsl("let d = f32(kv - q); return score + slope(h) * d;", &captures, &[]).unwrap();
    assert_eq!(closure.expr(), body.expr());
}

#[test]
fn short_circuit_and_early_returns_become_plain_logic() {
    let text = |text: &str| MaskMod::from_wgsl(text, &[], &[]).unwrap().expr().to_string();
    assert_eq!(text("q >= kv && q - kv < 256"), "(q >= kv) & (q - kv < 256)");
    assert_eq!(text("kv < 4 || q >= kv"), "(kv < 4) | (q >= kv)");
    assert_eq!(text("!(q < kv)"), "q >= kv");
    assert_eq!(text("if (kv < 4) { return true; } return q >= kv;"), "(kv < 4) | (q >= kv)");
    assert_eq!(
        text("if (kv > q) { return false; } if (q < 9) { return true; } return kv > 2;"),
        "(kv <= q) & ((q < 9) | (kv > 2))"
    );
    assert_eq!(text("select(false, true, q >= kv)"), "q >= kv");
}

#[test]
fn control_flow_is_unrolled() {
    let cases = [
        ("var x = score; if (q > 3) { x = x * 2.0; } else { x = 0.0; } return x;", 3.0),
        ("var x = 1.0; if (q > 30) { x = 2.0; } return x;", 1.0),
        ("var x = 0.0; for (var i = 0; i < 4; i++) { x += f32(i) * score; } return x;", 9.0),
        (
            "var x = 0.0; for (var i = 0; i < 8; i++) { if (i == 3) { continue; } if (i > kv) { break; } x += f32(i); } return x;",
            7.0,
        ),
        ("for (var i = 0; i < 8; i++) { if (i * i > q) { return f32(i); } } return -1.0;", 3.0),
        ("for (var i = 0; i < 8; i++) { if (i * i > q * 100) { return f32(i); } } return -1.0;", -1.0),
        ("var x = 0.0; var i = 0; while (i < 3) { x = x + 2.0; i = i + 1; } return x;", 6.0),
        ("var x = 0.0; loop { x = x + 1.0; if (x > 4.0) { break; } } return x;", 5.0),
        ("var x = 0.0; loop { x += 1.0; continuing { break if x > 2.0; } } return x;", 3.0),
        (
            "var x = 0.0; for (var i = 0; i < 3; i++) { for (var j = 0; j < 3; j++) { if (j > i) { break; } if (i == 1 && q > 3) { continue; } x += 1.0; } } return x;",
            4.0,
        ),
        ("switch (h) { case 0: { return 1.0; } case 1, 2: { return 2.0; } default: { return 3.0; } }", 2.0),
        (
            "var x = 0.0; switch (q) { case 7: { if (kv == 4) { break; } x = 9.0; } default: { x = 1.0; } } return x + 0.5;",
            0.5,
        ),
        (
            "var x = 0.0; for (var i = 0; i < 4; i++) { switch (i) { case 1: { continue; } case 2: { break; } default: { x += 1.0; } } x += 10.0; } return x;",
            32.0,
        ),
        ("var x = score; let p = &x; *p = 3.0; return x;", 3.0),
        (
            "var x = 0.0; loop { if (q > 3) { x = 1.0; break; } if (kv > 3) { return 9.0; } x = 5.0; break; } return x;",
            1.0,
        ),
        (
            "var x = 0.0; for (var i = 0; i < 3; i++) { if (q > 3) { continue; } if (kv > 3) { break; } x += 1.0; } return x;",
            0.0,
        ),
        (
            "var x = 0.0; for (var i = 0; i < 3; i++) { x += 1.0; if (f32(i) > score) { return x; } } return -1.0;",
            3.0,
        ),
        ("{ var x = 2.0; { let x = 5.0; } return x; }", 2.0),
    ];
    for (text, expected) in cases {
        assert_eq!(score(text, AT), expected, "{text}");
    }
}

#[test]
fn helpers_constants_and_builtins_work() {
    let text = "
        const WIDTH: i32 = 8;
        const GAIN = 0.5;
        fn side(x: i32) -> i32 { if (x < 0) { return -x; } return x; }
        fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 {
            return score * GAIN + f32(side(kv - q) / WIDTH + side(q - kv));
        }";
    assert_eq!(score(text, AT), 3.75);
    assert_eq!(score("f32(floor_div(kv - q, 2)) + f32(floor_mod(kv - q, 2))", AT), -1.0);
    assert_eq!(
        score("mix(score, 2.0, 0.5) + saturate(score) + step(1.0, score) + fma(2.0, 3.0, score)", AT),
        11.25
    );
    assert_eq!(score("5.5 % 2.0 + (-score) % 1.0", AT), 1.0);
    assert_eq!(score("f32(countOneBits(7u)) + bitcast<f32>(1065353216u)", AT), 4.0);
    assert_eq!(score("inverseSqrt(4.0 + 0.0 * score)", AT), 0.5);
    assert_eq!(score("f32(q_len - kv_len) + f32(wrapping_mul(q, 2))", AT), 14.0);
    assert!((score("sigmoid(score)", AT) - 1.0 / (1.0 + (-1.5f64).exp())).abs() < 1e-12);
    assert_eq!(score("score // a comment", AT), 1.5);
    // A function of the text hides one of ours.
    let own = "fn sigmoid(x: f32) -> f32 { return x * 10.0; }
        fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 { return sigmoid(score); }";
    assert_eq!(score(own, AT), 15.0);
}

#[test]
fn scalars_and_captures_are_read_by_name() {
    let cap: Scalar = Scalar::f32("cap", 2.0).unwrap().into();
    let table: Capture = Capture::i32("table", &[3, 4, 5, 6], &[2, 2]).unwrap().into();
    let (captures, scalars) = ([table], [cap]);
    let score_mod = ScoreMod::from_wgsl("cap * f32(table(q - 6, kv - 4))", &captures, &scalars).unwrap();
    let env = Env::new(score_mod.captures(), score_mod.scalars(), 8, 8).unwrap();
    let value = Program::new(&[score_mod.expr().clone()]).eval(&env, &AT).unwrap()[0];
    assert_eq!(value, Lane::F32(10.0));
}

#[test]
fn errors_point_at_the_place() {
    let error = mask_error("q >= kvv");
    assert_eq!((error.line, error.column, error.span.clone()), (1, 6, 5..8));
    assert!(
        error.message.contains("kvv") && error.message.contains("known here: b, h, q, kv"),
        "{}",
        error.message
    );
    assert!(error.snippet.ends_with("     ^^^"), "{}", error.snippet);

    let text = "fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool {\n    let x = q + 1.5;\n    return q >= kv;\n}";
    let error = mask_error(text);
    assert_eq!(error.line, 2, "{error}");

    let error = mask_error("if (q < 3) { return true; }\nreturn bool(score);");
    assert_eq!((error.line, error.column), (2, 13), "{error}");

    let error = mask_error("q >=");
    assert_eq!(error.line, 1, "{error}");
}

#[test]
fn types_must_fit() {
    for (text, part) in [
        ("q + kv", "bool"),
        ("f32(q) >= kv", ""),
        ("q >= 1u", ""),
        ("var x = 1.0; x = f32(q) + h; return x > 0.0;", ""),
    ] {
        let error = mask_error(text);
        assert!(error.message.contains(part), "{text}: {error}");
    }
    let table: Capture = Capture::i32("table", &[3, 4], &[2]).unwrap().into();
    for text in ["table(q, kv) > 0", "table() > 0", "table(f32(q)) > 0"] {
        let error = MaskMod::from_wgsl(text, std::slice::from_ref(&table), &[]).unwrap_err();
        assert!(matches!(error, Error::Parse(_)), "{text}: {error}");
    }
}

#[test]
fn what_the_language_lacks_is_refused_by_name() {
    let wrap = |body: &str| format!("fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool {{ {body} }}");
    let cases: Vec<(String, &str)> = vec![
        (wrap("let v = vec2<i32>(q, kv); return v.x > 1;"), "vector"),
        (wrap("var a = array<i32, 2>(q, kv); return a[0] > 1;"), "array"),
        (wrap("let p = &q; return true;"), "reference"),
        (format!("struct S {{ x: i32 }} {}", wrap("let s = S(q); return s.x > 1;")), "struct"),
        (
            format!(
                "@group(0) @binding(0) var t: texture_2d<f32>; {}",
                wrap("return textureLoad(t, vec2(0, 0), 0).x > 0.0;")
            ),
            "vector",
        ),
        (format!("var<private> state: i32; {}", wrap("return state > q;")), "state"),
        (format!("override W: i32 = 4; {}", wrap("return q > W;")), "override"),
        (wrap("workgroupBarrier(); return true;"), "barrier"),
        (wrap("var i = 0; while (i < q) { i = i + 1; } return i > kv;"), "depend on constants alone"),
        (wrap("var i = 0; loop { i = i + 1; } return true;"), "does not end"),
        (format!("fn f(x: i32) -> i32 {{ return f(x - 1); }} {}", wrap("return f(q) > 0;")), "recursive"),
        (wrap("return acos(f32(q)) > 0.0;"), "acos"),
        (wrap("return dpdx(f32(q)) > 0.0;"), "derivative"),
        (wrap("if (q > 3) { return true; }"), "every path"),
        ("fn other() {}".into(), "mask_mod"),
        ("fn mask_mod(q: i32, kv: i32) -> bool { return q >= kv; }".into(), "signature"),
        ("@compute @workgroup_size(1) fn mask_mod() {}".into(), "entry point"),
    ];
    for (text, part) in cases {
        let error = mask_error(&text);
        assert!(error.message.contains(part), "{text}\n{error}");
        assert!(error.line >= 1 && error.span.end <= text.len());
    }
    let table: Capture = Capture::i32("table", &[3, 4], &[2]).unwrap().into();
    let clash = "fn table(x: i32) -> i32 { return x; }\nfn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool { return table(q) > 0; }";
    let error = MaskMod::from_wgsl(clash, &[table], &[]).unwrap_err().to_string();
    assert!(error.contains("captured tensor"), "{error}");
}

#[test]
fn no_text_makes_the_parser_panic() {
    let pieces = [
        "fn",
        "mask_mod",
        "(",
        ")",
        "{",
        "}",
        "q",
        "kv",
        ">=",
        "+",
        "&&",
        "return",
        ";",
        "1",
        "1.5",
        "if",
        "let",
        "x",
        "=",
        "var",
        "for",
        "é",
        "\n",
        "//",
        "/*",
        "select",
        ",",
        "true",
        "<",
        ">",
        "2147483648",
        "-",
        "@",
        "loop",
        "break",
    ];
    let mut state = 0x2545_f491_4f6c_dd1du64;
    for _ in 0..3000 {
        let mut text = String::new();
        for _ in 0..(state % 14) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            text.push_str(pieces[(state % pieces.len() as u64) as usize]);
            text.push(' ');
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let _ = MaskMod::from_wgsl(&text, &[], &[]);
        let _ = ScoreMod::from_wgsl(&text, &[], &[]);
    }
}

#[test]
fn the_remainder_of_floats_is_one_thing_in_closures_and_in_text() {
    let closure = ScoreMod::new(|s| s.score() % 3.0 + s.kv().to_f32() % s.score());
    let text = ScoreMod::from_wgsl("score % 3.0 + f32(kv) % score", &[], &[]).unwrap();
    assert_eq!(closure.expr(), text.expr());
}

#[test]
fn a_long_sum_is_as_long_as_an_expression_may_be() {
    let score = ScoreMod::new(|s| flexattn::expr::sum(1..1301, |i| s.score() * i.to_f32()));
    score.check().unwrap();
    let env = Env::new(&[], &[], 64, 64).unwrap();
    let value = Program::new(&[score.expr().clone()]).eval(&env, &AT).unwrap()[0].to_f64();
    assert_eq!(value, 1.5 * 1300.0 * 1301.0 / 2.0);
}

#[test]
fn unrolling_is_bounded() {
    let long = "var x = score; for (var i = 0; i < 1400; i++) { x = x * 1.5 + f32(i); } return x;";
    let error = ScoreMod::from_wgsl(long, &[], &[]).unwrap_err().to_string();
    assert!(error.contains("1024"), "{error}");
    let nested = "var x = score; for (var i = 0; i < 1400; i++) { for (var j = 0; j < 1400; j++) { x = score; } } return x;";
    let error = ScoreMod::from_wgsl(nested, &[], &[]).unwrap_err().to_string();
    assert!(error.contains("unroll") || error.contains("1024"), "{error}");
}

proptest::proptest! {
    #![proptest_config(super::random::config(300))]

    #[test]
    fn an_expression_is_what_its_own_text_says(expr in super::random::expr(flexattn::expr::Type::F32, 4)) {
        let simple = super::values::simplified(&expr);
        let text = simple.to_string();
        // What overflows is refused as text, and infinities have none.
        let plain = super::values::all_parts(&simple).iter().all(|e| {
            let constant = |e: &flexattn::expr::Expr| e.as_constant().is_some();
            let finite = match e.as_constant() {
                Some(flexattn::expr::Value::F32(x)) => x.is_finite(),
                _ => true,
            };
            // WGSL has no such shifts.
            let far = matches!(e.op(), flexattn::expr::Op::Shl | flexattn::expr::Op::Shr)
                && matches!(e.args()[1].as_constant(), Some(flexattn::expr::Value::U32(32..)));
            finite && !far && (e.args().is_empty() || !e.args().iter().all(constant) || matches!(e.op(), flexattn::expr::Op::Gather(_)))
        });
        if plain && !text.contains('…') {
            let (mut captures, mut scalars) = (super::random::captures(), super::random::scalars());
            captures.retain(|capture| text_reads(&text, capture.name()));
            scalars.retain(|scalar| text_reads(&text, scalar.name()));
            let parsed = ScoreMod::from_wgsl(&text, &captures, &scalars);
            match parsed {
                Ok(parsed) => proptest::prop_assert_eq!(parsed.expr(), &simple, "{}", text),
                Err(e) => return Err(proptest::test_runner::TestCaseError::fail(format!("{text}: {e}"))),
            }
        }
    }
}

/// Declarations that each need the one after it, and a mask.
fn declared(levels: usize, each: &dyn Fn(usize) -> String, first: &str) -> String {
    let all: Vec<String> = (1..levels).rev().map(each).collect();
    let mask = "fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool { return q > kv; }";
    format!("{}\n{first}\n{mask}", all.join("\n"))
}

/// What goes deep in a text: each is fine a few hundred levels down, and refused far down.
fn deep(levels: usize) -> Vec<(&'static str, String)> {
    let chain = |piece: &str, by: &str| vec![piece; levels].join(by);
    vec![
        ("operators", chain("kv == 1", " || ")),
        ("sums", format!("q > {}", chain("kv", " + "))),
        ("negations", format!("{}(q > kv)", "!".repeat(levels))),
        ("parentheses", format!("{}q > kv{}", "(".repeat(levels), ")".repeat(levels))),
        ("calls", format!("q > {}kv{}", "abs(".repeat(levels), ")".repeat(levels))),
        ("branches", format!("{}{{ return false; }}", "if (q > kv) { return true; } else ".repeat(levels))),
        ("blocks", format!("{} return q > kv; {}", "{".repeat(levels), "}".repeat(levels))),
        ("statements", format!("var x = q > kv; {} return x;", "x = x || (kv == 1);".repeat(levels))),
        (
            "loops",
            format!("var x = q > kv; for (var i = 0; i < {levels}; i++) {{ x = x || (kv == i); }} return x;"),
        ),
        ("functions", {
            let each = |i: usize| format!("fn g{}(q: i32) -> bool {{ return g{i}(q + 1); }}\n", i + 1);
            let all: String = (0..levels).map(each).collect();
            let signature = "fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool";
            format!("fn g0(q: i32) -> bool {{ return q > 0; }}\n{all}{signature} {{ return g{levels}(q); }}")
        }),
        ("members", format!("q{} > kv", ".x".repeat(levels))),
        ("elements", format!("q{} > kv", "[0]".repeat(levels))),
        ("places", format!("var a = q; a{} = 1; return a > kv;", ".x".repeat(levels))),
        (
            "constants, last first",
            declared(levels, &|i| format!("const x{i} = x{} + 1;", i - 1), "const x0 = 1;"),
        ),
        ("functions, last first", {
            let each = |i: usize| format!("fn g{i}(q: i32) -> bool {{ return g{}(q); }}", i - 1);
            declared(levels, &each, "fn g0(q: i32) -> bool { return q > 0; }")
        }),
        (
            "aliases, last first",
            declared(levels, &|i| format!("alias t{i} = t{};", i - 1), "alias t0 = i32;"),
        ),
        ("structs, last first", {
            declared(levels, &|i| format!("struct s{i} {{ x: s{} }}", i - 1), "struct s0 { x: i32 }")
        }),
    ]
}

#[test]
fn deep_texts_are_read_or_refused_on_a_thread_with_little_stack() {
    // Half of what a thread gets by default.
    let read = || {
        for levels in [50, 100, 400, 2_000, 20_000] {
            for (what, text) in deep(levels) {
                match MaskMod::from_wgsl(&text, &[], &[]) {
                    Ok(mask) => drop(mask.expr().to_string()),
                    Err(error) => {
                        let refused = ["parentheses", "calls", "functions", "members", "elements", "places"];
                        let nests = what.ends_with("last first");
                        assert!(levels > 50 || nests || refused.contains(&what), "{what}: {error}")
                    }
                }
            }
        }
    };
    std::thread::Builder::new().stack_size(1 << 20).spawn(read).unwrap().join().unwrap();
}

#[test]
fn messages_say_what_to_write_instead() {
    let doc = Capture::i32("doc", &[0, 0, 1], &[3]).unwrap();
    let captures = [doc.into()];
    let cases = [
        ("doc[q] == doc[kv]", "doc(i)"),
        ("ids(q) == ids(kv)", "have to be given with the text"),
        ("q >= kv &&", "the text ends too early: expected expression"),
        ("q - kv", "a mask_mod must be bool, but this is i32"),
        ("doc == 1", "captured tensors are read as doc(i)"),
        ("score > 1.0", "masks cannot read the score"),
        ("q >= kv and kv > 3", "write `&&` for `and`"),
        ("q >= kv or kv > 3", "write `||` for `or`"),
        ("not (q >= kv)", "write `!` for `not`"),
        ("not q >= kv", "write `!` for `not`"),
        ("let x = q - kv;", "needs a `return`"),
        ("let x = q - kv", "needs a `return`"),
        ("q >= kv; let x = 3;", "needs a `return`"),
        ("if (q >= kv) { true }", "needs a `return`"),
        ("return true; } const x = 1; struct S { x: i32", "line 1, column 14: this closes nothing"),
        ("\u{feff}q >= kv", "line 1, column 1: this is a byte order mark"),
        ("q >= kv\n  /* a /* b */", "line 2, column 3: this comment does not end"),
        ("switch q { case 1: { return true; } } return false;", "add `default: {}`"),
        ("switch q { case 1: {} case 2, 1: {} default: {} } return true;", "a case twice"),
        (
            "if (q > 3) { return; } return true;",
            "line 1, column 14: a mask_mod must be bool, but this is nothing",
        ),
        ("!q > 3", "`!`, `any` and `all` take bool"),
        ("q << 32 > 3", "shifted by 32 or more"),
    ];
    for (text, says) in cases {
        let error = MaskMod::from_wgsl(text, &captures, &[]).unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}
