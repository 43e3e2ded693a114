//! Rules for MSL text that clang's header cannot enforce: what Apple's compiler, or wgpu's way of
//! handing text to it, would refuse or quietly do otherwise.

use std::collections::BTreeSet;

use crate::signature::without_comments;

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The line, from 1.
    pub line: usize,
    /// The rule, and what breaks it.
    pub message: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

/// Words with a meaning of their own in Metal, which a name may not take. C++'s are caught by clang.
const RESERVED: &[&str] = &[
    "access",
    "atomic",
    "coherent",
    "compute",
    "constant",
    "device",
    "discard_fragment",
    "fragment",
    "imageblock",
    "intersection",
    "kernel",
    "mesh",
    "metal",
    "object",
    "object_data",
    "patch",
    "ray_data",
    "sampler",
    "stitchable",
    "texture",
    "thread",
    "threadgroup",
    "threadgroup_imageblock",
    "uniform",
    "vertex",
    "vertices",
    "visible",
];

/// Words that must not occur at all, and why.
const REFUSED: &[(&str, &str)] = &[
    ("double", "Metal has no double"),
    ("atomic_ulong", "64-bit atomics exist on few GPUs only"),
    ("atomic_long", "64-bit atomics exist on few GPUs only"),
    ("function_constant", "wgpu passes no function constants"),
    ("asm", "inline assembly is refused at run time since macOS 15"),
    ("__asm", "inline assembly is refused at run time since macOS 15"),
    ("simdgroup_async_copy", "asynchronous copies are no public operation"),
    ("goto", "Metal has no goto"),
    ("virtual", "Metal has no virtual functions"),
    ("throw", "Metal has no exceptions"),
];

/// Integers of 64 bits.
const LONG: &[&str] = &["long", "ulong", "int64_t", "uint64_t", "size_t", "ptrdiff_t"];

const SPACES: &[&str] = &["device", "constant", "thread", "threadgroup"];
const SCALARS: &[&str] = &[
    "float", "half", "int", "uint", "short", "ushort", "char", "uchar", "long", "ulong", "bool", "size_t",
    "void", "bfloat",
];

#[derive(Clone, Copy, Debug)]
struct Token<'a> {
    text: &'a str,
    line: usize,
}

fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    for (line, content) in text.lines().enumerate() {
        let mut rest = content;
        while let Some(first) = rest.chars().next() {
            let word = |c: char| c.is_alphanumeric() || c == '_' || (c == '.' && first.is_ascii_digit());
            let length = if first == '"' {
                rest[1..].find('"').map_or(rest.len(), |end| end + 2)
            } else if word(first) {
                rest.find(|c| !word(c)).unwrap_or(rest.len())
            } else if rest.starts_with("::")
                || rest.starts_with("&&")
                || rest.starts_with("[[")
                || rest.starts_with("]]")
            {
                2
            } else {
                first.len_utf8()
            };
            if !first.is_whitespace() {
                found.push(Token { text: &rest[..length], line: line + 1 });
            }
            rest = &rest[length..];
        }
    }
    found
}

/// Everything in `text` that breaks a rule:
///
/// - every pointer and reference names its address space;
/// - no double, no 64-bit atomics, no function constants, no inline assembly, no goto;
/// - no `[[threadgroup(n)]]` argument, and no buffer index over 30;
/// - no name that Metal reserves;
/// - no C-style cast to a vector, which means another thing to clang than to Metal.
pub fn lint(text: &str) -> Vec<Violation> {
    let text = without_comments(text);
    let tokens = tokens(&text);
    let mut found = Vec::new();
    let types = types(&tokens);
    let is_type = |word: &str| types.contains(word) || is_vector(word) || word == "vec";
    for (i, token) in tokens.iter().enumerate() {
        let mut refuse = |message: String| found.push(Violation { line: token.line, message });
        let next = |n: usize| tokens.get(i + n).map_or("", |token| token.text);
        if let Some((word, why)) = REFUSED.iter().find(|(word, _)| *word == token.text) {
            refuse(format!("`{word}`: {why}"));
        }
        if token.text == "atomic" && next(1) == "<" && LONG.contains(&next(2)) {
            refuse(format!("`atomic<{}>`: 64-bit atomics exist on few GPUs only", next(2)));
        }
        if token.text == "[[" && next(1) == "threadgroup" && next(2) == "(" {
            refuse("a `[[threadgroup(n)]]` argument: wgpu sets no threadgroup memory length".into());
        }
        if token.text == "buffer" && next(1) == "(" && next(2).parse::<u32>().is_ok_and(|index| index > 30) {
            refuse(format!("buffer({}): there are 31 buffers", next(2)));
        }
        // A name: what follows a type and is followed by something that ends a declarator.
        let named = i > 0
            && is_type(tokens[i - 1].text)
            && matches!(next(1), "=" | ";" | "," | ")" | "[" | "(" | "{");
        if named && RESERVED.contains(&token.text) {
            refuse(format!("`{}` is a reserved word", token.text));
        }
        if token.text == "("
            && is_vector(next(1))
            && next(2) == ")"
            && next(3).starts_with(|c: char| c.is_alphanumeric() || c == '(')
        {
            refuse(format!("`({})`: write {0}(...), a cast of a vector keeps its bits for clang", next(1)));
        }
        if matches!(token.text, "*" | "&") && declares(&tokens, i, &is_type) {
            refuse(format!("`{}` without an address space", declaration(&tokens, i)));
        }
    }
    found
}

fn is_vector(word: &str) -> bool {
    let element = word.strip_suffix(['2', '3', '4']);
    element.is_some_and(|element| SCALARS.contains(&element) || element.starts_with("packed_"))
}

/// Names of types: scalars, and what the text declares with struct, typedef, using or a macro.
fn types<'a>(tokens: &[Token<'a>]) -> BTreeSet<&'a str> {
    let mut types: BTreeSet<&str> = SCALARS.iter().copied().collect();
    for (i, token) in tokens.iter().enumerate() {
        let next = |n: usize| tokens.get(i + n).map_or("", |token| token.text);
        match token.text {
            "struct" | "using" => {
                types.insert(next(1));
            }
            "typedef" => {
                let end = tokens[i..].iter().position(|token| token.text == ";").unwrap_or(1);
                types.insert(next(end - 1));
            }
            "define" if SCALARS.contains(&next(2)) => {
                types.insert(next(1));
            }
            _ => {}
        }
    }
    types.remove("namespace");
    types
}

/// The tokens of the declaration that the `*` or `&` at `i` is in, before it.
fn segment<'t, 'a>(tokens: &'t [Token<'a>], i: usize) -> &'t [Token<'a>] {
    let mut depth = 0;
    let mut end = i;
    // `thread float (&x)[4]`: the type stands before the parenthesis.
    if i > 0 && tokens[i - 1].text == "(" && tokens.get(i + 2).is_some_and(|token| token.text == ")") {
        end = i - 1;
    }
    let start = tokens[..end].iter().rposition(|token| match token.text {
        ">" => {
            depth += 1;
            false
        }
        "<" => {
            depth -= 1;
            false
        }
        "," => depth == 0,
        "(" | ")" | "{" | "}" | ";" | "=" | "return" | ":" | "?" | "]" => true,
        _ => false,
    });
    &tokens[start.map_or(0, |start| start + 1)..end]
}

/// Whether the `*` or `&` makes a pointer or reference type that lacks its address space.
fn declares(tokens: &[Token<'_>], i: usize, is_type: &impl Fn(&str) -> bool) -> bool {
    let words = segment(tokens, i);
    let qualifiers = ["const", "volatile", "static", "inline", "template", "typename", "metal", "::"];
    let first = words.iter().find(|token| !qualifiers.contains(&token.text) && !SPACES.contains(&token.text));
    let last = words.last();
    let is_declarator = first.is_some_and(|token| is_type(token.text))
        && last.is_some_and(|token| is_type(token.text) || matches!(token.text, "const" | ">"));
    is_declarator && !words.iter().any(|token| SPACES.contains(&token.text))
}

fn declaration(tokens: &[Token<'_>], i: usize) -> String {
    let words: Vec<&str> = segment(tokens, i).iter().map(|token| token.text).collect();
    format!("{}{} {}", words.join(" "), tokens[i].text, tokens.get(i + 1).map_or("", |token| token.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(text: &str) -> Vec<usize> {
        lint(text).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn pointers_and_references_need_an_address_space() {
        let text = "struct S { float x; };\nvoid f(float* a);\nvoid g(thread float* a, S& s);\nvoid h(const S& s, thread int (&a)[2]);\nvoid i(int (&a)[2]);\n";
        assert_eq!(broken(text), [2, 3, 4, 5]);
    }

    #[test]
    fn products_and_masks_are_no_declarators() {
        assert!(
            broken(
                "float f(float a, int b, uint x) { float c = a * b; x = x & 3u; return (a) * c * float(b); }"
            )
            .is_empty()
        );
        assert!(
            broken("void f(device const vec<float, 4>* p) { float4 x = *(device float4*)(p + 1); }")
                .is_empty()
        );
    }

    #[test]
    fn words_that_metal_lacks_or_reserves_are_refused() {
        assert_eq!(
            broken(
                "double x;\nint fragment = 1;\nint y [[function_constant(0)]];\nvoid f(threadgroup float* a [[threadgroup(0)]]);\ndevice atomic_ulong* n;\ndevice atomic<ulong>* n;\nlong double z;"
            ),
            [1, 2, 3, 4, 5, 6, 7]
        );
        assert!(broken("void f(device atomic<uint>* n);").is_empty());
        assert_eq!(broken("void f(device float* a [[buffer(31)]], device float* b [[buffer(30)]]);"), [1]);
        assert!(broken("// a double, the fragment of a thread\nint fragments;").is_empty());
    }

    #[test]
    fn vector_casts_are_refused() {
        assert_eq!(broken("float4 f(int4 x) { return (float4)x; }"), [1]);
        assert!(broken("float4 f(int4 x) { return float4(x); }\nint g(float4 x);").is_empty());
    }
}
