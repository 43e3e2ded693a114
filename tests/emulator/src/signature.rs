//! Reads the entry points of a kernel's text, and writes the code that calls them.

use std::fmt::Write;

/// Where an argument of an entry point comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Argument {
    Buffer(u32),
    /// A field of the runtime's `emu_arguments`.
    Position(&'static str),
    /// Threadgroup memory that the host would size (only naga's output has it).
    Shared,
}

/// An entry point.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    arguments: Vec<Argument>,
    /// Buffers that the kernel can write to.
    pub(crate) writes: Vec<u32>,
}

const POSITIONS: &[(&str, &str)] = &[
    ("thread_position_in_threadgroup", "local"),
    ("threadgroup_position_in_grid", "group"),
    ("threadgroups_per_grid", "grid"),
    ("threads_per_threadgroup", "size"),
    ("thread_index_in_threadgroup", "index"),
    ("thread_index_in_simdgroup", "lane"),
    ("simdgroup_index_in_threadgroup", "simdgroup"),
    ("thread_position_in_grid", "position"),
    ("threads_per_simdgroup", "width"),
    ("simdgroups_per_threadgroup", "simdgroups"),
];

/// The text without comments, of equal length and with equal lines.
pub(crate) fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut block) = (text, false);
    while let Some(c) = rest.chars().next() {
        if block && rest.starts_with("*/") {
            (out, block, rest) = (out + "  ", false, &rest[2..]);
        } else if !block && rest.starts_with("/*") {
            (out, block, rest) = (out + "  ", true, &rest[2..]);
        } else if !block && rest.starts_with("//") {
            let end = rest.find('\n').unwrap_or(rest.len());
            out.extend(std::iter::repeat_n(' ', end));
            rest = &rest[end..];
        } else {
            let width = c.len_utf8();
            if block && c != '\n' {
                out.extend(std::iter::repeat_n(' ', width));
            } else {
                out.push(c);
            }
            rest = &rest[width..];
        }
    }
    out
}

/// The text between a parenthesis at `open` and its partner, and where that one is.
pub(crate) fn parenthesised(text: &str, open: usize) -> Option<(&str, usize)> {
    let mut depth = 0;
    for (i, c) in text[open..].char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth == 0 {
            return Some((&text[open + 1..open + i], open + i));
        }
    }
    None
}

fn split_arguments(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (i, c) in text.char_indices() {
        depth += i32::from("(<[{".contains(c)) - i32::from(")>]}".contains(c));
        if c == ',' && depth == 0 {
            parts.push(text[start..i].trim());
            start = i + 1;
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

/// All entry points of `text`.
pub(crate) fn entries(text: &str) -> Result<Vec<Entry>, String> {
    let text = without_comments(text);
    let mut found = Vec::new();
    for (at, _) in text.match_indices("kernel ") {
        let boundary = text[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_');
        let Some(rest) = text[at + 7..].trim_start().strip_prefix("void ").filter(|_| boundary) else {
            continue;
        };
        let name: String =
            rest.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let open = text.len() - rest.len() + rest.find('(').ok_or("an entry point without arguments")?;
        let (arguments, _) = parenthesised(&text, open).ok_or("an entry point whose arguments do not end")?;
        let mut entry = Entry { name, arguments: Vec::new(), writes: Vec::new() };
        for argument in split_arguments(arguments) {
            entry.arguments.push(source(argument, &mut entry.writes)?);
        }
        found.push(entry);
    }
    if found.is_empty() {
        return Err("there is no `kernel void name(...)` in the text".into());
    }
    Ok(found)
}

fn source(argument: &str, writes: &mut Vec<u32>) -> Result<Argument, String> {
    let Some(at) = argument.find("[[") else {
        if argument.starts_with("threadgroup ") {
            return Ok(Argument::Shared);
        }
        return Err(format!("argument `{argument}` has no attribute that says where it comes from"));
    };
    let attribute = argument[at + 2..].split("]]").next().unwrap_or_default().trim();
    if let Some(index) = attribute.strip_prefix("buffer(").and_then(|rest| rest.strip_suffix(')')) {
        let index = index.trim().parse().map_err(|_| format!("buffer index `{index}` is no number"))?;
        let declared = &argument[..at];
        if declared.contains("device ") && !declared.contains("const ") && !declared.contains("const&") {
            writes.push(index);
        }
        return Ok(Argument::Buffer(index));
    }
    let position = POSITIONS.iter().find(|(name, _)| *name == attribute);
    let (_, field) = position.ok_or_else(|| format!("attribute [[{attribute}]] is not emulated"))?;
    Ok(Argument::Position(field))
}

/// C++ that goes after the kernel's text: one function per entry point that unpacks the runtime's
/// arguments, and the table of entry points.
pub(crate) fn glue(entries: &[Entry]) -> String {
    let mut out = String::from("\n#line 1 \"glue\"\n#pragma GCC visibility push(hidden)\n");
    let mut table = String::new();
    for (i, entry) in entries.iter().enumerate() {
        let name = &entry.name;
        let mut call = String::new();
        let mut shared = String::new();
        for (j, argument) in entry.arguments.iter().enumerate() {
            let ty = format!("emu::parameters<decltype({name})>::at<{j}>");
            let separator = if j > 0 { ", " } else { "" };
            let _ = match argument {
                Argument::Buffer(index) => {
                    write!(call, "{separator}emu::bound<{ty}>::from(a->buffer[{index}])")
                }
                Argument::Position("position") => {
                    write!(call, "{separator}emu::id<{ty}>(position)")
                }
                Argument::Position("width") => write!(call, "{separator}32"),
                Argument::Position("simdgroups") => write!(call, "{separator}({ty})simdgroups"),
                Argument::Position(field @ ("index" | "lane" | "simdgroup")) => {
                    write!(call, "{separator}({ty})a->{field}")
                }
                Argument::Position(field) => write!(call, "{separator}emu::id<{ty}>(a->{field})"),
                Argument::Shared => {
                    let _ = writeln!(
                        shared,
                        "SHARED __attribute__((aligned(16))) unsigned char emu_argument_{i}_{j}[emu::bound<{ty}>::size];"
                    );
                    write!(call, "{separator}emu::bound<{ty}>::from((void*)emu_argument_{i}_{j})")
                }
            };
        }
        let _ = writeln!(
            out,
            "{shared}extern \"C\" void emu_run_{i}(const emu_arguments* a) {{\n  uint32_t position[3]; \
             for (int i = 0; i < 3; i++) position[i] = a->group[i] * a->size[i] + a->local[i];\n  \
             uint32_t simdgroups = (a->size[0] * a->size[1] * a->size[2] + 31) / 32; (void)position; (void)simdgroups;\n  \
             {name}({call});\n}}"
        );
        let _ = write!(table, "{{\"{name}\", emu_run_{i}}}, ");
    }
    let _ = writeln!(
        out,
        "extern \"C\" {{ struct emu_entry {{ const char* name; void (*run)(const emu_arguments*); }};\n\
         extern const emu_entry emu_entries[] = {{ {table} }}; }}\n#pragma GCC visibility pop"
    );
    out
}

/// Makes constants of the variables that Metal declares `constant` outside of functions.
pub(crate) fn fix_constants(text: &str) -> String {
    let declares = |line: &str| line.starts_with("constant ") && line.contains(" = ");
    let lines =
        text.lines().map(|line| if declares(line) { format!("const {line}\n") } else { format!("{line}\n") });
    lines.collect()
}

/// Lets the mods count their calls: an increment at the start of each one's body.
pub(crate) fn count_mods(text: &str) -> String {
    let mut text = text.to_owned();
    for (name, counter) in
        [("mask_mod", "emu_mask_calls"), ("score_mod", "emu_score_calls"), ("row_mod", "emu_row_calls")]
    {
        let bare = without_comments(&text);
        let body = bare.match_indices(&format!("{name}(")).find_map(|(at, _)| {
            let spelled = bare[..at].ends_with(' ');
            let (_, close) = parenthesised(&bare, at + name.len()).filter(|_| spelled)?;
            bare[close + 1..]
                .trim_start()
                .starts_with('{')
                .then(|| close + 1 + bare[close + 1..].find('{').unwrap_or(0))
        });
        if let Some(open) = body {
            text.insert_str(open + 1, &format!(" {counter}++;"));
        }
    }
    text
}
