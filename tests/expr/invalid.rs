//! WGSL text that WGSL forbids: naga's validator does not run, so what it would refuse is refused here.

use flexattn::expr::text_reads;
use flexattn::{Capture, Error, MaskMod, ParseError};

fn doc() -> Capture {
    Capture::i32("doc", &[0, 0, 1], &[3]).unwrap().into()
}

fn refused(text: &str) -> ParseError {
    match MaskMod::from_wgsl(text, &[doc()], &[]) {
        Err(Error::Parse(error)) => {
            let said = error.to_string();
            // Nothing of what the library puts around a text.
            assert!(
                !error.message.contains("fn ") || error.message.contains("fn mask_mod("),
                "{text}\n{said}"
            );
            assert!(error.span.end <= text.len(), "{text}\n{said}");
            *error
        }
        other => panic!("{text} gave {other:?}"),
    }
}

/// `before`, and a mask with this body.
fn with(before: &str, body: &str) -> String {
    format!("{before} fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool {{ {body} }}")
}

const BODIES: &[&str] = &[
    // Switches.
    "switch q { case 1: { return true; } } return false;",
    "switch q { default: { return true; } default: { return false; } }",
    "switch q { case 1, default: { return true; } default: {} } return false;",
    "switch q { case 1: { return true; } case 1: { return false; } default: {} } return false;",
    "switch q { case 1, 2, 1: { return true; } default: {} } return false;",
    "switch u32(q) { case 1u, 1: { return true; } default: {} } return false;",
    "switch f32(q) { default: { return true; } }",
    "switch q > kv { default: { return true; } }",
    "switch q { case kv: { return true; } default: {} } return false;",
    // Places.
    "if (q > kv) { break; } return true;",
    "if (q > kv) { continue; } return true;",
    "switch q { case 1: { continue; } default: {} } return true;",
    "if (false) { break; } return true;",
    "return true; continue;",
    "var i = 0; loop { if (i > 3) { break; } continuing { i++; return true; } } return q > kv;",
    "var i = 0; loop { if (i > 3) { break; } continuing { i++; if (q > 3) { return true; } } } return q > kv;",
    "var i = 0; loop { if (i > 3) { break; } continuing { i++; { break; } } } return q > kv;",
    "var i = 0; loop { if (i > 3) { break; } continuing { i++; if (q > kv) { break; } } } return q > kv;",
    "var i = 0; loop { if (i > 3) { break; } continuing { i++; continue; } } return q > kv;",
    "for (var j = 0; j < 2; j++) { var i = 0; loop { if (i > 3) { break; } continuing { i++; if (q > kv) { continue; } } } } return q > kv;",
    "var i = 0; loop { continuing { i++; switch q { default: { continue; } } break if i > 3; } } return q > kv;",
    "break if q > 3; return true;",
    // Returns.
    "if (q > 3) { return; } return true;",
    "return;",
    "if (q > 3) { return true; }",
    "if (q > 3) { return 1; } return true;",
    "if (q > 3) { return q; } return q > kv;",
    "for (var i = 0; i < 3; i++) { if (q > i) { return true; } }",
    // Types.
    "var x = true; x = q; return x;",
    "var x: i32 = 1u; return q > x;",
    "let x: bool = q; return x;",
    "var x: f32 = q; return x > 0.0;",
    "var x = 1.5; x += q; return x > 0.0;",
    "var x = 1.5; x++; return x > 0.0;",
    "var x = 1; x = 1.5; return q > x;",
    "let x = 1; x = 2; return q > x;",
    "q = 3; return q > kv;",
    "q_len = 3; return q > kv;",
    "var x: i32; x = x + 1u; return q > x;",
    "if (q) { return true; } return false;",
    "if (1) { return true; } return false;",
    "while (q) { return true; } return false;",
    "for (var i = 0; i; i++) { return true; } return false;",
    "var i = 0; loop { i++; continuing { break if i; } } return true;",
    "let f = doc; return q > kv;",
    "doc = 3; return q > kv;",
    "q; return true;",
    "const x = q; return x > kv;",
    "const_assert 1 > 2; return q > kv;",
    "let x = 1; let x = 2; return q > x;",
    "var x: missing; return q > x;",
    "return q.x > kv;",
    "return q[0] > kv;",
    "let p = &q; return *p > kv;",
    "return true; } const x = 1; struct S { x: i32",
    "return true; }",
    "{ return true;",
];

const EXPRESSIONS: &[&str] = &[
    "q == 1u",
    "q == 1.5",
    "(q > kv) == 1",
    "(q > kv) > (h > b)",
    "(q && kv) > 3",
    "(q || kv) > 3",
    "q && q > kv",
    "q > kv && q",
    "(q > kv) & q",
    "!q > 3",
    "i32(!q) > 3",
    "~(q > kv)",
    "~1.5 > 0.0",
    "-(q > kv)",
    "-u32(q) > 3u",
    "q << kv > 3",
    "q << 32 > 3",
    "q << 40u > 3",
    "q >> 33u > 3",
    "1.5 << 1u > 0.0",
    "q / 0 > 3",
    "q % 0 > 3",
    "u32(q) / 0u > 3u",
    "f32(q) & 1 > 3",
    "any(q) > 3",
    "all(q) > 3",
    "any(1)",
    "abs(q > kv)",
    "abs(true)",
    "abs() > 1",
    "abs(q, kv) > 1",
    "min(q) > 1",
    "min(q, 1u) > 1",
    "max(q, 1.5) > 1.0",
    "min(q > 1, kv > 1)",
    "clamp(q, 1, 2.5) > 1",
    "fma(q, q, kv) > 1",
    "mix(q, kv, 1) > 1",
    "step(q, kv) > 1.0",
    "sqrt(q) > 1.0",
    "exp(true) > 1.0",
    "saturate(q) > 1",
    "radians(q) > 1.0",
    "sign(u32(q)) > 0u",
    "countOneBits(1.5) > 0",
    "select(true, false, q)",
    "select(q, 1.5, true) > 1.0",
    "select(q, kv) > 1",
    "bitcast<i32>(q > kv) > 0",
    "bitcast<u32>(true) > 0u",
    "bitcast<bool>(q)",
    "f32(q, kv) > 0.0",
    "bool(q, kv)",
    "2147483648 > q",
    "q > 99999999999999999999",
    "q + 2147483647 + 1u > 0",
    "2147483647 + 1 > q",
    "-2147483649 < q",
    "4294967296u > 1u",
    "1 / 0 > q",
    "f32(q) > 1.0 / 0.0",
    "f32(q) > 1e39",
    "f32(q) > 1e39f",
    "f32(q) > 3e38f * 10f",
    "f32(q) > log(0.0)",
    "sqrt(-1.0) > f32(q)",
    "1i << 32u > q",
    "floor_div(q) > 0",
    "floor_div(q, kv, h) > 0",
    "floor_div(1.5, 2.5) > 0",
    "floor_mod(u32(q), 2u) > 0u",
    "wrapping_add(u32(q), 2u) > 0u",
    "wrapping_add_u32(q, kv) > 0",
    "wrapping_neg(1.5) > 0.0",
    "sigmoid(q) > 0.5",
    "sigmoid() > 0.5",
    "sigmoid > 0.5",
    "doc() > 0",
    "doc(q, kv) > 0",
    "doc(1.5) > 0",
    "doc(q).x > 0",
    "doc(doc) > 0",
    "q_len() > 3",
    "mask_mod(b, h, q, kv)",
    "q > kv; let x = 3;",
    "q > kv; }",
    "q > kv ? true : false",
    "q = kv",
    "q > kv > h",
    "q & 1 | kv ^ 2 > 3",
    "\"q\" > kv",
    "q § kv",
    "q > kv \\",
];

const MODULES: &[(&str, &str)] = &[
    ("fn f(x: i32) -> i32 { return x; }", "return f() > q;"),
    ("fn f(x: i32) -> i32 { return x; }", "return f(q, kv) > q;"),
    ("fn f() -> i32 { return 1; }", "return f(q) > q;"),
    ("fn f(x: i32) -> i32 { return x; }", "return f(1.5) > q;"),
    ("fn f(x: i32) -> i32 { return x; }", "return f(u32(q)) > q;"),
    ("fn f(x: i32) -> i32 { return x; }", "return f(q > kv) > q;"),
    ("fn f(x: i32) -> i32 { return x; }", "f(); return q > kv;"),
    ("fn f(x: i32) -> i32 { return x; }", "f(q, q); return q > kv;"),
    ("fn f(x: i32) -> i32 { return x; }", "return f > q;"),
    ("fn f(x: i32) -> i32 { return x > 1; }", "return f(q) > q;"),
    ("fn f(x: i32) -> i32 { return 1.5; }", "return f(q) > q;"),
    ("fn f(x: i32) -> f32 { return x; }", "return f(q) > 1.0;"),
    ("fn f(x: i32) -> i32 { return; }", "return f(q) > q;"),
    ("fn f(x: i32) -> i32 { if (x > 3) { return; } return 1; }", "return f(q) > q;"),
    ("fn f(x: i32) -> i32 { if (x > 3) { return 1; } }", "return f(q) > q;"),
    ("fn f(x: i32) -> i32 { }", "return f(q) > q;"),
    ("fn f(x: i32) { return x; }", "f(q); return q > kv;"),
    ("fn f(x: i32) { return x; }", "return f(q) > kv;"),
    ("fn f(x: i32) { }", "return f(q) > kv;"),
    ("fn f(x: i32) { }", "let y = f(q); return q > kv;"),
    ("fn f(x: i32) -> i32 { x = 3; return x; }", "return f(q) > q;"),
    ("fn f(x: i32) -> i32 { return f(x); }", "return f(q) > q;"),
    ("fn f(x: i32) -> i32 { return g(x); } fn g(x: i32) -> i32 { return f(x); }", "return f(q) > q;"),
    ("fn f(x: i32, x: i32) -> i32 { return x; }", "return f(q, kv) > q;"),
    ("fn f(x: i32) -> i32 { return x; } fn f(x: i32) -> i32 { return 1; }", "return f(q) > q;"),
    ("fn f(x: ptr<function, i32>) { *x = 3; }", "var y = 1; f(&y); return q > y;"),
    ("fn f(x: i32) -> i32 { break; return x; }", "return q > kv;"),
    ("fn f(x: i32) -> i32 { switch x { case 1: {} } return x; }", "return q > kv;"),
    ("fn mask_mod() {}", "return q > kv;"),
    ("fn f32(x: i32) -> i32 { return x; }", "return f32(q) > kv;"),
    ("fn i32(x: f32) -> bool { return x > 0.0; }", "return i32(1.5);"),
    ("fn q_len() -> i32 { return 1; }", "return q_len() > kv;"),
    ("const q_len = 1;", "return q_len > kv;"),
    ("const sigmoid = 1;", "return sigmoid > kv;"),
    ("const doc = 1;", "return doc > kv;"),
    ("var<private> q_len: i32;", "return q_len > kv;"),
    ("var<private> x: i32 = 3;", "x = 4; return x > kv;"),
    ("var<workgroup> x: i32;", "return x > kv;"),
    ("const A = B; const B = A;", "return A > kv;"),
    ("const A: i32 = 1.5;", "return A > kv;"),
    ("const_assert false;", "return q > kv;"),
    ("alias i32 = f32;", "return q > kv;"),
    ("enable f16;", "return f16(q) > 1.0h;"),
    ("@fragment", "return q > kv;"),
];

/// Every text above.
fn texts() -> Vec<String> {
    let mut texts: Vec<String> = BODIES.iter().chain(EXPRESSIONS).map(|text| (*text).to_owned()).collect();
    texts.extend(BODIES.iter().filter(|body| !body.contains("struct")).map(|body| with("", body)));
    texts.extend(MODULES.iter().map(|(before, body)| with(before, body)));
    texts
}

#[test]
fn what_wgsl_forbids_is_refused() {
    let texts = texts();
    assert!(texts.len() > 200, "{}", texts.len());
    for text in texts {
        refused(&text);
    }
}

#[test]
fn what_only_looks_forbidden_is_accepted() {
    let accepted = [
        ("", "switch q { case 1, default: { return true; } }"),
        ("", "switch q { default: { return q > kv; } case 1, 2: { return true; } case 3: {} } return false;"),
        (
            "",
            "for (var i = 0; i < 3; i++) { switch i { case 1: { continue; } default: { break; } } } return q > kv;",
        ),
        (
            "",
            "var i = 0; loop { continuing { for (var j = 0; j < 2; j++) { if (j == 1) { break; } else { continue; } } i++; break if i > 2; } } return q > i;",
        ),
        ("", "loop { return q > kv; }"),
        ("", "var x: i32; return q > x;"),
        ("", "return ~q > 3 && any(q > kv) && all(kv > 1) && !(q == 3);"),
        ("", "return (q << 31u) > (q >> 31) && q / 1 > 0 && q % 2 == 0 && 0u - 1u > u32(q);"),
        ("", "let x = 32u; var by = 33u; return (q << (by - 1u)) > 0 && f32(q) / 1.0 > 0.0 && x > 1u;"),
        ("", "return bitcast<u32>(q) > 3u && bitcast<i32>(f32(q)) > 3;"),
        ("", "let doc = q; return doc > kv;"),
        ("", "return q > kv; // ends\r"),
        ("fn g() { return; }", "g(); return q > kv;"),
        ("fn g(x: i32) { if (x > 3) { return; } }", "g(q); return q > kv;"),
        ("fn min(a: i32, b: i32) -> i32 { return a; }", "return min(kv, q) > 3;"),
        ("fn not(x: bool) -> bool { return !x; }", "return not(q > kv);"),
        ("fn f(x: f32) -> f32 { return x; }", "return f(1) > 3;"),
        ("const A = 2147483647i + 1i;", "return A > kv;"),
        ("fn f32_of(x: i32) -> f32 { return f32(x); }", "return f32_of(q) > 1.0;"),
    ];
    for (before, body) in accepted {
        let text = with(before, body);
        let own = |text: &str| if text_reads(text, "doc") { vec![doc()] } else { Vec::new() };
        MaskMod::from_wgsl(&text, &own(&text), &[]).unwrap_or_else(|e| panic!("{text}\n{e}"));
        if before.is_empty() {
            MaskMod::from_wgsl(body, &own(body), &[]).unwrap_or_else(|e| panic!("{body}\n{e}"));
        }
    }
    let own = with(accepted[14].0, accepted[14].1);
    assert_eq!(MaskMod::from_wgsl(&own, &[], &[]).unwrap().expr().to_string(), "kv > 3");
}

#[test]
fn functions_get_what_they_declare() {
    let f = "fn f(x: i32) -> i32 { return x; }";
    for (before, body, says) in [
        (f, "return f() > q;", "f has 1 parameters but gets 0"),
        (f, "return f(q, kv) > q;", "f has 1 parameters but gets 2"),
        (f, "return f(u32(q)) > q;", "x of f is i32 but gets u32"),
        ("", "return wrapping_add(u32(q), 2u) > 0u;", "a of wrapping_add is i32 but gets u32"),
        ("fn f(x: i32) -> f32 { return x; }", "return f(q) > 1.0;", "f must be f32, but this is i32"),
        ("fn f(x: i32) { return x; }", "f(q); return q > kv;", "f must be nothing, but this is i32"),
        ("fn f32(x: i32) -> i32 { return x; }", "return f32(q) > kv;", "f32 is the name of a type"),
    ] {
        let error = refused(&with(before, body));
        assert!(error.message.contains(says), "{error}");
    }
    // f0 to f40 meet f32.
    let chain: String =
        (1..=40).map(|i| format!("fn f{i}(x: i32) -> i32 {{ return f{}(x) + 1; }}\n", i - 1)).collect();
    let text = with(&format!("fn f0(x: i32) -> i32 {{ return x; }}\n{chain}"), "return f40(q) > kv;");
    let error = refused(&text);
    assert!(error.line == 33 && error.message.contains("f32 is the name of a type"), "{error}");
}

#[test]
fn texts_with_pieces_exchanged_never_panic() {
    let texts = texts();
    let pieces: Vec<&str> =
        texts.iter().flat_map(|text| text.split_inclusive([' ', '(', ',', ';'])).collect();
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut draw = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for _ in 0..6000 {
        let text = &texts[draw(texts.len())];
        let mut own: Vec<&str> = text.split_inclusive([' ', '(', ',', ';']).collect();
        for _ in 0..=draw(3) {
            let at = draw(own.len());
            match draw(3) {
                0 => own[at] = pieces[draw(pieces.len())],
                1 => own.insert(at, pieces[draw(pieces.len())]),
                _ => own[at] = "",
            }
        }
        let _ = MaskMod::from_wgsl(&own.concat(), &[doc()], &[]);
    }
    // A comment ends where a line does, so this is a long statement.
    refused(&format!("q > kv //\r{}", " + kv".repeat(20_000)));
    refused(&format!("q > kv //\u{2028}{}", " + kv".repeat(20_000)));
}
