//! Makes a compiled kernel tell the runtime what it does.
//!
//! Works on LLVM's text form after optimisation: before each load and store in a GPU address space it
//! puts a call with the address, the size and the kernel's line, which gives the address to use (what a
//! kernel has of a buffer is a place in a window of its own); before each runtime call, the line; into
//! each block, the number of float operations and conversions in it. Address spaces are in the
//! types, so accesses to a thread's own memory cost nothing and nothing is missed: what this pass
//! does not understand is an error.

use std::collections::HashMap;
use std::fmt::Write;

/// An instrumented module.
#[derive(Debug)]
pub(crate) struct Instrumented {
    /// LLVM text, to be compiled without further passes.
    pub(crate) text: String,
    /// Threadgroup arrays: mangled name and bytes.
    pub(crate) shared: Vec<(String, u64)>,
}

/// Instruments `ir`; `kernel` is the file name that its lines are counted in.
pub(crate) fn instrument(ir: &str, kernel: &str) -> Result<Instrumented, String> {
    let lines = DebugLines::read(ir, kernel);
    let mut pass = Pass { lines, out: String::with_capacity(ir.len() * 2), next: 0, bytes: false };
    let mut shared = Vec::new();
    let mut body: Option<Block> = None;
    for line in ir.lines() {
        match &mut body {
            None if line.starts_with("define ") => {
                pass.push(line);
                body = Some(Block::default());
            }
            None => {
                if let Some(variable) = threadgroup_variable(line)? {
                    pass.push(line);
                    // Between two arrays lies memory that belongs to neither.
                    let gap = shared.len();
                    let _ = writeln!(
                        pass.out,
                        "@emu_gap_{gap} = internal addrspace(3) global [4096 x i8] zeroinitializer, section \"tgmem\", align 64"
                    );
                    shared.push(variable);
                } else {
                    pass.push(line);
                }
            }
            Some(block) if line == "}" => {
                block.flush(&mut pass);
                pass.push(line);
                body = None;
            }
            Some(block) if is_label(line) => {
                block.flush(&mut pass);
                pass.push(line);
            }
            Some(block) => pass.instruction(block, line)?,
        }
    }
    let declared = |name: &str| ir.lines().any(|line| line.starts_with(&format!("@{name} =")));
    for name in ["emu_fp", "emu_conversions"] {
        if !declared(name) {
            let _ = writeln!(pass.out, "@{name} = external hidden global i64");
        }
    }
    let shift = u32::from(!pass.bytes);
    let _ = writeln!(pass.out, "@emu_line = external hidden global i32");
    let _ = writeln!(pass.out, "@emu_cell_shift = hidden constant i32 {shift}");
    let mut table = String::new();
    for (name, size) in &shared {
        let _ = write!(
            table,
            "{{ i64, i64 }} {{ i64 ptrtoint (ptr addrspace(3) @{name} to i64), i64 {size} }}, "
        );
    }
    let _ = writeln!(
        pass.out,
        "@emu_variables = hidden constant [{} x {{ i64, i64 }}] [{table}{{ i64, i64 }} zeroinitializer]",
        shared.len() + 1
    );
    pass.push("declare i64 @emu_read(i64, i32, i32, i32, i32)");
    pass.push("declare i64 @emu_write(i64, i32, i32, i32, i32)");
    Ok(Instrumented { text: pass.out, shared })
}

/// A basic block: its instructions, and what they do.
#[derive(Default)]
struct Block {
    /// Before the first instruction that is no phi.
    head: String,
    rest: String,
    fp: u64,
    conversions: u64,
}

impl Block {
    fn flush(&mut self, pass: &mut Pass) {
        pass.out.push_str(&self.head);
        for (count, name) in [(self.fp, "emu_fp"), (self.conversions, "emu_conversions")] {
            if count > 0 {
                let n = pass.fresh();
                let _ = writeln!(
                    pass.out,
                    "  %emu.a{n} = load i64, ptr @{name}\n  %emu.b{n} = add i64 %emu.a{n}, {count}\n  store i64 %emu.b{n}, ptr @{name}"
                );
            }
        }
        pass.out.push_str(&self.rest);
        *self = Block::default();
    }
}

struct Pass {
    lines: DebugLines,
    out: String,
    next: u64,
    /// Some access to a shared kind of memory is a single byte.
    bytes: bool,
}

impl Pass {
    fn push(&mut self, line: &str) {
        self.out.push_str(line);
        self.out.push('\n');
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn instruction(&mut self, block: &mut Block, line: &str) -> Result<(), String> {
        let text = line.trim_start();
        if text.contains(" = phi ") {
            let _ = writeln!(block.head, "{line}");
            return Ok(());
        }
        let operation =
            text.split_once(" = ").filter(|(name, _)| name.starts_with('%')).map_or(text, |(_, op)| op);
        let operation = ["tail ", "musttail ", "notail "]
            .iter()
            .find_map(|prefix| operation.strip_prefix(prefix))
            .unwrap_or(operation);
        count(operation, block);
        let at = self.lines.of(text);
        let opcode = operation.split(' ').next().unwrap_or_default();
        let mut line = line.to_owned();
        match opcode {
            "load" | "store" => {
                if let Some(access) = Access::parse(operation)? {
                    let real = self.announce(block, &access, opcode == "store", at);
                    let pointer = line.rfind("ptr addrspace(").unwrap_or(0);
                    let renamed = line[pointer..].replacen(&access.operand, &real, 1);
                    line.replace_range(pointer.., &renamed);
                }
            }
            "atomicrmw" | "cmpxchg" => {
                return Err(format!("an atomic instruction outside the runtime: {text}"));
            }
            "addrspacecast" if operation.starts_with("addrspacecast ptr addrspace(") => {
                return Err(format!("a pointer loses its address space: {text}"));
            }
            "call" => line = self.call(block, &line, operation, at)?,
            _ => {}
        }
        let _ = writeln!(block.rest, "{line}");
        Ok(())
    }

    /// The line to stand for a call.
    fn call(&mut self, block: &mut Block, line: &str, operation: &str, at: u32) -> Result<String, String> {
        if operation.contains("@emu_")
            && !operation.contains("@emu_matrix_row")
            && !operation.contains("@emu_matrix_col")
        {
            let _ = writeln!(block.rest, "  store i32 {at}, ptr @emu_line");
        }
        let moves = ["@llvm.memcpy.", "@llvm.memmove.", "@llvm.memset."];
        let Some(name) = moves.iter().find(|name| operation.contains(**name)) else {
            return Ok(line.to_owned());
        };
        let mut line = line.to_owned();
        let Some(arguments) = operation.find(name).and_then(|start| arguments(&operation[start..])) else {
            return Err(format!("a copy that cannot be read: {operation}"));
        };
        let size = arguments
            .get(2)
            .and_then(|size| size.strip_prefix("i64 "))
            .and_then(|size| size.trim_start_matches("noundef ").parse::<u64>().ok());
        let pointers = if *name == moves[2] { 1 } else { 2 };
        for (i, argument) in arguments.iter().take(pointers).enumerate() {
            let Some((space, operand)) = pointer(argument) else { continue };
            let Some(size) = size else {
                return Err(format!("a copy of unknown size: {operation}"));
            };
            let access = Access { space, operand: operand.to_owned(), size, align: 1 };
            let real = self.announce(block, &access, i == 0, at);
            line = line.replacen(argument, &argument.replacen(operand, &real, 1), 1);
        }
        Ok(line)
    }

    /// Announces an access; the operand with which to make it.
    fn announce(&mut self, block: &mut Block, access: &Access, write: bool, at: u32) -> String {
        let n = self.fresh();
        let Access { space, operand, size, align } = access;
        self.bytes |= *size == 1 && *space != 2;
        let name = if write { "emu_write" } else { "emu_read" };
        let _ = writeln!(
            block.rest,
            "  %emu.p{n} = ptrtoint ptr addrspace({space}) {operand} to i64\n  %emu.q{n} = call i64 @{name}(i64 %emu.p{n}, i32 {size}, i32 {align}, i32 {at}, i32 {space})"
        );
        // Threadgroup arrays are where they seem to be.
        if *space == 3 {
            return operand.clone();
        }
        let _ = writeln!(block.rest, "  %emu.r{n} = inttoptr i64 %emu.q{n} to ptr addrspace({space})");
        format!("%emu.r{n}")
    }
}

/// A load or store in a GPU address space.
struct Access {
    space: u32,
    operand: String,
    size: u64,
    align: u64,
}

impl Access {
    fn parse(operation: &str) -> Result<Option<Access>, String> {
        let Some(at) = operation.rfind("ptr addrspace(") else { return Ok(None) };
        let (is_store, rest) = match operation.strip_prefix("store ") {
            Some(rest) => (true, rest),
            None => (false, operation.strip_prefix("load ").unwrap_or(operation)),
        };
        // `store ptr addrspace(1) %x, ptr %y` writes to the thread's own memory.
        let pointer_text = &operation[at..];
        let before = operation[..at].trim_end();
        if !before.ends_with(',') {
            return Ok(None);
        }
        if is_store && operation[at..].contains(", ptr ") {
            return Ok(None);
        }
        let rest = rest.trim_start_matches("atomic ").trim_start_matches("volatile ");
        let ty = type_prefix(rest).ok_or_else(|| format!("no type in: {operation}"))?;
        let size = size_of(ty).ok_or_else(|| format!("the size of {ty} is unknown: {operation}"))?;
        let Some((space, operand)) = pointer(pointer_text) else { return Ok(None) };
        let align = operation.rfind(", align ").map_or("1", |at| &operation[at + 8..]);
        let align =
            align.split(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok()).unwrap_or(1);
        Ok(Some(Access { space, operand: operand.to_owned(), size, align }))
    }
}

/// Address space and operand of `ptr addrspace(1) attributes... %x, ...`.
fn pointer(text: &str) -> Option<(u32, &str)> {
    let rest = text.trim_start().strip_prefix("ptr addrspace(")?;
    let (space, rest) = rest.split_once(')')?;
    let start = rest.find(['%', '@']).map(|at| match rest.find("getelementptr") {
        Some(gep) if gep < at => gep,
        _ => at,
    })?;
    let operand = &rest[start..];
    let mut depth = 0;
    let end = operand.find(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0 || depth < 0
    });
    Some((space.parse().ok()?, operand[..end.unwrap_or(operand.len())].trim_end()))
}

/// The arguments of a call, `text` starting at the function's name.
fn arguments(text: &str) -> Option<Vec<&str>> {
    let open = text.find('(')?;
    let (mut depth, mut start, mut found) = (0, open + 1, Vec::new());
    for (i, c) in text.char_indices().skip(open) {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 || (c == ',' && depth == 1) {
            found.push(text[start..i].trim());
            start = i + 1;
        }
        if depth == 0 {
            return Some(found);
        }
    }
    None
}

fn is_label(line: &str) -> bool {
    !line.starts_with(' ') && line.split(';').next().is_some_and(|label| label.trim_end().ends_with(':'))
}

/// The first type in `text`.
fn type_prefix(text: &str) -> Option<&str> {
    let close = match text.chars().next()? {
        '<' => '>',
        '[' => ']',
        _ => return text.split([' ', ',']).next(),
    };
    let open = text.chars().next()?;
    let mut depth = 0;
    let end = text.find(|c| {
        depth += i32::from(c == open) - i32::from(c == close);
        depth == 0
    })?;
    Some(&text[..=end])
}

fn size_of(ty: &str) -> Option<u64> {
    let inner = ty.strip_prefix(['<', '[']).and_then(|ty| ty.strip_suffix(['>', ']']));
    if let Some((n, element)) = inner.and_then(|inner| inner.split_once(" x ")) {
        let bytes = n.trim().parse::<u64>().ok()? * size_of(element.trim())?;
        // A vector of three takes the room of four; it is loaded whole.
        return Some(bytes);
    }
    match ty {
        "half" | "i16" => Some(2),
        "float" | "i32" => Some(4),
        "double" | "i64" => Some(8),
        "i8" | "i1" => Some(1),
        _ if ty.starts_with("ptr") => Some(8),
        _ => ty.strip_prefix('i').and_then(|bits| bits.parse::<u64>().ok()).map(|bits| bits.div_ceil(8)),
    }
}

fn threadgroup_variable(line: &str) -> Result<Option<(String, u64)>, String> {
    let Some(rest) = line.strip_prefix('@') else { return Ok(None) };
    if !line.contains("section \"tgmem\"") || !line.contains("addrspace(3) global ") {
        return Ok(None);
    }
    let (name, rest) = rest.split_once(" = ").ok_or("a global without a name")?;
    let (_, ty) = rest.split_once("addrspace(3) global ").ok_or("a global without a type")?;
    let ty = type_prefix(ty).ok_or("a global without a type")?;
    let size =
        size_of(ty).ok_or_else(|| format!("threadgroup variable {name} has a type without a size: {ty}"))?;
    Ok(Some((name.to_owned(), size)))
}

/// Adds an instruction's float operations and conversions, one per vector element. A fused
/// multiply-add is one operation; comparisons, maxima and square roots are none.
fn count(operation: &str, block: &mut Block) {
    let lanes = || {
        let start = operation.find('<').map(|at| &operation[at + 1..]);
        start.and_then(|text| text.split(' ').next()).and_then(|n| n.parse::<u64>().ok()).unwrap_or(1)
    };
    match operation.split(' ').next().unwrap_or_default() {
        "fadd" | "fsub" | "fmul" | "fdiv" | "frem" => block.fp += lanes(),
        "fpext" | "fptrunc" | "sitofp" | "uitofp" | "fptosi" | "fptoui" => block.conversions += lanes(),
        "call" if operation.contains("@llvm.fma.") || operation.contains("@llvm.fmuladd.") => {
            block.fp += lanes()
        }
        _ => {}
    }
}

/// From `!dbg` numbers to lines of the kernel.
struct DebugLines {
    lines: HashMap<u32, u32>,
}

impl DebugLines {
    /// Follows inlined locations outwards to the first one in the kernel's own text: an operation of
    /// the library header counts at the line that calls it.
    fn read(ir: &str, kernel: &str) -> Self {
        #[derive(Clone, Copy)]
        struct Location {
            line: u32,
            scope: u32,
            inlined: Option<u32>,
        }
        let (mut files, mut scopes, mut locations) = (HashMap::new(), HashMap::new(), HashMap::new());
        for line in ir.lines().filter(|line| line.starts_with('!')) {
            let Some((id, rest)) = line.split_once(" = ") else { continue };
            let Ok(id) = id[1..].parse::<u32>() else { continue };
            let field = |name: &str| {
                let at = rest.find(&format!("{name}: "))? + name.len() + 2;
                rest[at..]
                    .trim_start_matches('!')
                    .split(|c: char| !c.is_ascii_digit())
                    .next()?
                    .parse::<u32>()
                    .ok()
            };
            let rest_kind = rest.trim_start_matches("distinct ");
            if rest_kind.starts_with("!DIFile(") {
                files.insert(id, rest.contains(&format!("filename: \"{kernel}\"")));
            } else if rest_kind.starts_with("!DISubprogram(") || rest_kind.starts_with("!DILexicalBlock") {
                scopes.insert(id, field("file"));
            } else if rest_kind.starts_with("!DILocation(") {
                let location = Location {
                    line: field("line").unwrap_or(0),
                    scope: field("scope").unwrap_or(0),
                    inlined: field("inlinedAt"),
                };
                locations.insert(id, location);
            }
        }
        let own = |scope: u32| {
            scopes.get(&scope).copied().flatten().and_then(|file| files.get(&file)).copied().unwrap_or(false)
        };
        let mut lines = HashMap::new();
        for &id in locations.keys() {
            let mut at = Some(id);
            while let Some(location) = at.and_then(|id| locations.get(&id)) {
                if own(location.scope) {
                    lines.insert(id, location.line);
                    break;
                }
                at = location.inlined;
            }
        }
        Self { lines }
    }

    fn of(&self, instruction: &str) -> u32 {
        let id = instruction.rfind("!dbg !").map(|at| &instruction[at + 6..]);
        let id = id.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok());
        id.and_then(|id| self.lines.get(&id).copied()).unwrap_or(0)
    }
}
