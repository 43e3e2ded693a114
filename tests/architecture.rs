//! The invariants of docs/ARCHITECTURE.md, read from the source text. Comments do not count as code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Hand-written files below `folder` with one of these endings.
fn files(folder: &str, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let generated = ["target", "node_modules", "dist", "pkg", "snapshots", "goldens"];
            if path.is_dir() {
                if !name.starts_with('.') && !generated.contains(&name.as_str()) {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no file ends with any of {endings:?} below {folder}");
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", shown(path)))
}

/// The file without line comments and without what follows `#[cfg(test)]`, which by custom ends a file.
fn code(path: &Path) -> String {
    let text = text(path);
    let body = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code = |line: &str| line.split("//").next().unwrap_or_default().trim_end().to_owned();
    body.lines().map(code).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

/// The module of `src/` that a file belongs to: `src/expr/op.rs` is `expr`.
fn module(path: &Path) -> String {
    let inside = path.strip_prefix(root().join("src")).expect("a file of src");
    let first = inside.components().next().expect("a name").as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

/// The modules that a file names after `crate::`, in a path or in a list of braces.
fn imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let list = match rest.strip_prefix('{') {
            Some(list) => first_level(list),
            None => vec![rest],
        };
        for item in list {
            let name: String =
                item.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            found.insert(name);
        }
    }
    found
}

/// The comma-separated items of a brace list whose opening brace is gone.
fn first_level(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                items.push(&list[start..at]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items
}

/// Which modules a module may name. Types at the crate's root count as the module that they come from.
fn arrows() -> BTreeMap<&'static str, Vec<&'static str>> {
    let ground = ["error", "shape", "threads"];
    let expression = [&ground[..], &["expr"]].concat();
    let core = [&expression[..], &["masks", "prebuilt", "scores", "block_mask", "kernels", "lower"]].concat();
    let planned = [&core[..], &["runtime", "plan"]].concat();
    BTreeMap::from([
        ("error", vec!["error"]),
        ("shape", ground.to_vec()),
        ("expr", expression.clone()),
        ("masks", [&expression[..], &["masks", "prebuilt"]].concat()),
        ("scores", [&expression[..], &["scores", "prebuilt"]].concat()),
        ("prebuilt", [&expression[..], &["prebuilt", "masks", "scores"]].concat()),
        ("reference", [&expression[..], &["reference"]].concat()),
        ("block_mask", [&expression[..], &["masks", "block_mask"]].concat()),
        ("kernels", [&expression[..], &["kernels", "lower"]].concat()),
        ("lower", [&expression[..], &["kernels", "lower"]].concat()),
        ("plan", planned.clone()),
        ("runtime", [&expression[..], &["kernels", "runtime"]].concat()),
        ("cpu", [&planned[..], &["cpu"]].concat()),
        ("gpu", [&planned[..], &["cpu", "gpu"]].concat()),
    ])
}

#[test]
fn arrows_between_layers_point_down_only() {
    let arrows = arrows();
    let mut wrong = Vec::new();
    for path in files("src", &[".rs"]) {
        let Some(allowed) = arrows.get(module(&path).as_str()) else { continue };
        for name in imports(&code(&path)) {
            let is_module = name.chars().next().is_some_and(char::is_lowercase);
            if is_module && !allowed.contains(&name.as_str()) {
                wrong.push(format!("{} names crate::{name}", shown(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows point down only:\n{}", wrong.join("\n"));
}

#[test]
fn everything_above_the_runtimes_builds_without_wgpu() {
    let free = [
        "error",
        "shape",
        "expr",
        "masks",
        "scores",
        "prebuilt",
        "block_mask",
        "reference",
        "lower",
        "kernels",
    ];
    for path in files("src", &[".rs"]) {
        if free.contains(&module(&path).as_str())
            || ["plan", "runtime", "cpu"].contains(&module(&path).as_str())
        {
            assert!(!code(&path).contains("wgpu::"), "{} names wgpu", shown(&path));
        }
    }
}

#[test]
fn only_the_fenced_files_hold_unsafe_code() {
    for path in files("src", &[".rs"]) {
        let name = shown(&path);
        let fenced = ["src/gpu/passthrough.rs", "src/gpu/tier.rs"].contains(&name.as_str());
        let unsafe_code = code(&path).split_whitespace().any(|word| word.trim_start_matches('(') == "unsafe");
        assert!(fenced || !unsafe_code, "{name} holds unsafe code");
    }
}

#[test]
fn the_npm_package_converts_and_computes_nothing() {
    // Whatever says what attention means needs one of these; sizes and byte offsets need none.
    let functions = [
        "sqrt", "exp", "exp2", "ln", "log", "log2", "log10", "ln_1p", "exp_m1", "powi", "powf", "pow", "sin",
        "cos", "tan", "tanh", "mul_add", "recip", "hypot", "fround", "cbrt",
    ];
    let sources = files("web/src", &[".rs"]);
    for path in sources.iter().chain(&[root().join("web/index.ts")]) {
        let code = code(path);
        for function in functions {
            let call = format!(".{function}(");
            assert!(!code.contains(&call), "{} computes with {call}..)", shown(path));
        }
        assert!(!code.contains("f32::consts") && !code.contains("f64::consts"), "{}", shown(path));
    }
}

#[test]
fn no_kernel_text_stands_in_rust_strings() {
    let marks =
        ["@compute", "@group(", "kernel void", "[[buffer(", "threadgroup_barrier(", "workgroupBarrier("];
    for path in files("src", &[".rs"]) {
        let code = code(&path);
        // The filler finds and rewrites attributes; a mark alone in a string is how it does so.
        if shown(&path).starts_with("src/kernels/") {
            continue;
        }
        for mark in marks {
            assert!(!code.contains(mark), "{} holds kernel text: {mark}", shown(&path));
        }
    }
}

#[test]
fn kernels_fit_on_a_few_screens_and_say_what_they_compute() {
    for folder in ["wgsl", "msl"] {
        for path in files(folder, &[".wgsl", ".metal"]) {
            let text = text(&path);
            let lines = text.lines().count();
            assert!(lines <= 420, "{} has {lines} lines; split it by noun", shown(&path));
            assert!(text.starts_with("//"), "{} does not begin by saying what it is", shown(&path));
        }
    }
}

#[test]
fn rust_files_stay_short() {
    for folder in ["src", "examples", "xtask", "tests"] {
        for path in files(folder, &[".rs"]) {
            let lines = code(&path).lines().count();
            assert!(lines <= 800, "{} has {lines} lines of code; split it by noun", shown(&path));
        }
    }
}

#[test]
fn nothing_is_left_undone_in_the_sources() {
    // Spelled in pieces, so that this file does not hold them.
    let marks =
        ["to do!(", "unimple mented!(", "# [ignore", "FIX ME", "XX X"].map(|mark| mark.replace(' ', ""));
    for folder in ["src", "examples", "xtask", "tests", "wgsl", "msl", "web"] {
        for path in files(folder, &[".rs", ".wgsl", ".metal", ".ts", ".mjs", ".cpp", ".h"]) {
            let text = text(&path);
            for mark in &marks {
                assert!(!text.contains(mark.as_str()), "{} still holds {mark}", shown(&path));
            }
        }
    }
}

#[test]
fn lints_are_expected_with_a_reason_never_allowed() {
    for folder in ["src", "examples", "xtask", "tests"] {
        for path in files(folder, &[".rs"]) {
            let bare = ["#[al", "low("].concat();
            let inner = ["#![al", "low("].concat();
            let text = text(&path);
            assert!(!text.contains(&bare) && !text.contains(&inner), "{} allows a lint", shown(&path));
        }
    }
}

#[test]
fn the_project_names_no_machine_and_no_registry() {
    let paths = ["/wo rk/", "/ho me/", "/ro ot/", "/Us ers/"];
    let hosts = ["registry.np mjs", "deb.deb ian", "index.cra tes", "files.python hosted", "artifact regis"];
    let marks: Vec<String> = paths.iter().chain(&hosts).map(|mark| mark.replace(' ', "")).collect();
    let endings = [
        ".rs", ".wgsl", ".metal", ".ts", ".mjs", ".md", ".toml", ".json", ".yml", ".html", ".css", ".lock",
        ".py",
    ];
    for path in files(".", &endings) {
        let text = text(&path);
        for mark in &marks {
            assert!(!text.contains(mark.as_str()), "{} names {mark}", shown(&path));
        }
    }
}

#[test]
fn readme_names_only_files_that_exist() {
    for page in ["README.md", "PLATFORM.md", "docs/ARCHITECTURE.md", "docs/testing.md"] {
        let text = text(&root().join(page));
        let folder = root().join(page);
        let folder = folder.parent().expect("a folder");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            assert!(folder.join(file).exists(), "{page} links to {file}, which is not there");
        }
    }
}
