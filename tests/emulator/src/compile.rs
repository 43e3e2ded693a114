//! From MSL text to a shared object, cached by content.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use flexattn::{Error, Result};
use libloading::Library;
use xxhash_rust::xxh3::xxh3_128;

use crate::instrument::{Instrumented, instrument};
use crate::signature::{Entry, count_mods, entries, fix_constants, glue};

const HEADER: &str = include_str!("../include/metal_stdlib");
const RUNTIME: &str = include_str!("../runtime.cpp");

/// Settings that change the numbers that come out, for kernel and runtime alike. Vectorisers and loop
/// idioms stay off: an access is announced as the kernel wrote it.
const KERNEL_FLAGS: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-builtin",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-ffp-contract=on",
    "-mllvm",
    "-disable-vector-combine",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    // An unsuffixed literal is a float in Metal.
    "-Xclang",
    "-cl-single-precision-constant",
    "-gline-tables-only",
    "-Wno-everything",
    "-Werror=return-type",
    "-Werror=uninitialized",
    "-Werror=division-by-zero",
];

/// What `thread float x = ...` under Metal's default math mode may become: no NaN, no infinity, any order.
const FAST_FLAGS: &[&str] = &["-ffast-math"];

fn machine_flags() -> &'static [&'static str] {
    if cfg!(target_arch = "x86_64") { &["-mavx2", "-mfma", "-mf16c"] } else { &[] }
}

/// How the compiler treats floats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Math {
    /// IEEE, fused multiply-add where an expression allows it.
    #[default]
    Precise,
    /// Metal's default: sums may be reordered; NaN and infinity may be assumed away.
    Fast,
}

/// A kernel text, compiled and loaded.
pub struct Kernel {
    /// Held while a dispatch runs: the object has one set of threadgroup arrays.
    pub(crate) library: Mutex<Library>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) text: String,
    shared: Vec<(String, u64)>,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel")
            .field("entries", &self.entries)
            .field("shared", &self.shared)
            .finish_non_exhaustive()
    }
}

/// The clang that compiles kernels: `$FLEXATTN_CLANG`, or `clang++-19`, or `clang++` of version 19 or later.
///
/// # Errors
///
/// [`Error::Unsupported`] with what to install.
pub fn clang() -> Result<PathBuf> {
    static FOUND: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
        let named = std::env::var_os("FLEXATTN_CLANG").map(PathBuf::from);
        let candidates =
            named.into_iter().chain(["clang++-19", "clang++-20", "clang++-21", "clang++"].map(PathBuf::from));
        candidates.into_iter().find(|name| {
            let output = Command::new(name).arg("-dumpversion").output();
            let version = output.ok().filter(|output| output.status.success()).map(|output| output.stdout);
            version
                .and_then(|text| String::from_utf8(text).ok()?.split('.').next()?.trim().parse::<u32>().ok())
                .is_some_and(|major| major >= 19)
        })
    });
    if cfg!(target_os = "macos") {
        return Err(Error::unsupported(
            "the MSL emulator needs ELF sections; a Mac runs the kernels on its GPU instead",
        ));
    }
    FOUND.clone().ok_or_else(|| {
        Error::unsupported("the MSL emulator needs clang 19 or newer; on Debian: apt-get install clang-19")
    })
}

/// Where objects are kept: `emulator` in the folder that cargo builds into.
fn cache() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let profile = program.ancestors().find(|path| {
        path.file_name().is_some_and(|name| name == OsStr::new("release") || name == OsStr::new("debug"))
    });
    let folder = profile.and_then(Path::parent).map_or_else(std::env::temp_dir, Path::to_path_buf);
    folder.join("flexattn-emulator")
}

fn clang_run(arguments: &[OsString]) -> Result<(), String> {
    let clang = clang().map_err(|error| error.to_string())?;
    let output = Command::new(clang).args(arguments).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Part of a file name that no other thread or process uses.
fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Writes a file of this name that is complete when it appears, even with several writers.
fn produce(path: &Path, write: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), String> {
    if path.exists() {
        return Ok(());
    }
    let draft = path.with_extension(format!("draft-{}", unique()));
    write(&draft)?;
    std::fs::rename(&draft, path).map_err(|error| format!("{}: {error}", path.display()))
}

fn arguments(parts: &[&[&str]], rest: &[&OsStr]) -> Vec<OsString> {
    parts
        .iter()
        .flat_map(|part| part.iter().map(OsString::from))
        .chain(rest.iter().map(OsString::from))
        .collect()
}

impl Kernel {
    /// Compiles MSL text, or loads what an earlier run compiled from the same text.
    ///
    /// # Errors
    ///
    /// [`Error::Compile`] with clang's message and its lines of the text; [`Error::Unsupported`] when
    /// there is no clang.
    pub fn compile(text: &str) -> Result<Arc<Self>> {
        Self::compile_as(text, Math::Precise)
    }

    /// As [`Kernel::compile`], with a choice of float semantics.
    ///
    /// # Errors
    ///
    /// As [`Kernel::compile`].
    pub fn compile_as(text: &str, math: Math) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Mutex<HashMap<u128, Arc<Kernel>>>> = LazyLock::new(Mutex::default);
        clang()?;
        let flags =
            [KERNEL_FLAGS, machine_flags(), if math == Math::Fast { FAST_FLAGS } else { &[] }].concat();
        let build =
            concat!(include_str!("compile.rs"), include_str!("instrument.rs"), include_str!("signature.rs"));
        let key = [text, &flags.join(" "), HEADER, RUNTIME, build].join("\0");
        let key = xxh3_128(key.as_bytes());
        let loaded = || LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded().get(&key) {
            return Ok(kernel.clone());
        }
        let kernel = Self::build(text, &flags, key).map_err(|message| Error::compile("msl", message))?;
        Ok(loaded().entry(key).or_insert(Arc::new(kernel)).clone())
    }

    fn build(text: &str, flags: &[&str], key: u128) -> Result<Self, String> {
        let entries = entries(text)?;
        let folder = cache();
        let include = include_folder(&folder)?;
        let write = |text: &str, path: &Path| std::fs::write(path, text).map_err(|error| error.to_string());
        let object = folder.join(format!("{key:032x}.so"));
        let shared_list = folder.join(format!("{key:032x}.shared"));
        if !object.exists() || !shared_list.exists() {
            let source = folder.join(format!("{key:032x}-{}.metal", unique()));
            let ir = source.with_extension("ll");
            let code = source.with_extension("o");
            write(&marked(text, &entries), &source)?;
            let result = clang_run(&arguments(
                &[&["-x", "c++"], flags, &["-S", "-emit-llvm", "-I"]],
                &[include.as_ref(), source.as_ref(), "-o".as_ref(), ir.as_ref()],
            ));
            result.map_err(|message| quote_lines(&message, text))?;
            let plain = std::fs::read_to_string(&ir).map_err(|error| error.to_string())?;
            let Instrumented { text: instrumented, shared } = instrument(&plain, "kernel.metal")?;
            write(&instrumented, &ir)?;
            clang_run(&arguments(
                &[machine_flags(), &["-x", "ir", "-O1", "-fPIC", "-Xclang", "-disable-llvm-passes", "-c"]],
                &[ir.as_ref(), "-o".as_ref(), code.as_ref()],
            ))?;
            let runtime = runtime_object(&folder)?;
            produce(&object, |path| {
                clang_run(&arguments(
                    &[&["-shared", "-Wl,-Bsymbolic"]],
                    &[code.as_ref(), runtime.as_ref(), "-o".as_ref(), path.as_ref(), "-lm".as_ref()],
                ))
            })?;
            let list: String = shared.iter().map(|(name, size)| format!("{name} {size}\n")).collect();
            produce(&shared_list, |path| write(&list, path))?;
            for path in [&source, &ir, &code] {
                let _ = std::fs::remove_file(path);
            }
        }
        let list = std::fs::read_to_string(&shared_list).map_err(|error| error.to_string())?;
        let shared = list.lines().filter_map(|line| line.split_once(' '));
        let shared = shared.filter_map(|(name, size)| Some((name.to_owned(), size.parse().ok()?))).collect();
        // SAFETY: the object was built from our runtime and a kernel; it has no initialisers that run code.
        let library = unsafe { Library::new(&object) }.map_err(|error| error.to_string())?;
        Ok(Self { library: Mutex::new(library), entries, text: text.to_owned(), shared })
    }

    /// Whether clang accepts MSL text, with the types of its entry points' arguments; nothing is compiled.
    ///
    /// # Errors
    ///
    /// As [`Kernel::compile`].
    pub fn check(text: &str) -> Result<()> {
        clang()?;
        let checked = || -> Result<(), String> {
            let entries = entries(text)?;
            let folder = cache();
            let include = include_folder(&folder)?;
            let source = folder.join(format!("check-{}.metal", unique()));
            std::fs::write(&source, marked(text, &entries)).map_err(|error| error.to_string())?;
            let parts: [&[&str]; 4] =
                [&["-x", "c++", "-fsyntax-only"], KERNEL_FLAGS, machine_flags(), &["-I"]];
            let result = clang_run(&arguments(&parts, &[include.as_ref(), source.as_ref()]));
            let _ = std::fs::remove_file(&source);
            result.map_err(|message| quote_lines(&message, text))
        };
        checked().map_err(|message| Error::compile("msl", message))
    }

    /// The names of the entry points.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.name.as_str())
    }

    /// Bytes of threadgroup memory that an entry point declares.
    pub fn threadgroup_memory(&self, entry: &str) -> u64 {
        let index = self.entries.iter().position(|other| other.name == entry).unwrap_or(0);
        let own = format!("_ZZ{}{entry}", entry.len());
        let glued = format!("emu_argument_{index}_");
        let of_entry = |name: &str| name.starts_with(&own) || name.contains(&glued);
        self.shared.iter().filter(|(name, _)| of_entry(name)).map(|(_, size)| size).sum()
    }

    /// A line of the text, counted from 1.
    pub(crate) fn line(&self, number: u32) -> &str {
        self.text.lines().nth((number as usize).wrapping_sub(1)).unwrap_or("").trim()
    }
}

/// What clang gets of a kernel's text.
fn marked(text: &str, entries: &[Entry]) -> String {
    format!("#line 1 \"kernel.metal\"\n{}\n{}", count_mods(&fix_constants(text)), glue(entries))
}

/// The folder with the headers that kernels include.
fn include_folder(folder: &Path) -> Result<PathBuf, String> {
    let include = folder.join(format!("include-{:032x}", xxh3_128(HEADER.as_bytes())));
    std::fs::create_dir_all(include.join("simd"))
        .map_err(|error| format!("{}: {error}", include.display()))?;
    let write = |text: &str, path: &Path| std::fs::write(path, text).map_err(|error| error.to_string());
    produce(&include.join("metal_stdlib"), |path| write(HEADER, path))?;
    // Kernels name the parts that they use; here all are in one.
    for part in ["metal_simdgroup", "metal_simdgroup_matrix", "metal_atomic", "simd/simd.h"] {
        produce(&include.join(part), |path| write("#include <metal_stdlib>\n", path))?;
    }
    Ok(include)
}

fn runtime_object(folder: &Path) -> Result<PathBuf, String> {
    let key = xxh3_128([RUNTIME, &machine_flags().join(" ")].join("\0").as_bytes());
    let object = folder.join(format!("runtime-{key:032x}.o"));
    produce(&object, |path| {
        let source = folder.join(format!("runtime-{key:032x}-{}.cpp", unique()));
        std::fs::write(&source, RUNTIME).map_err(|error| error.to_string())?;
        let result = clang_run(&arguments(
            &[machine_flags(), &["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-c"]],
            &[source.as_ref(), "-o".as_ref(), path.as_ref()],
        ));
        let _ = std::fs::remove_file(&source);
        result
    })?;
    Ok(object)
}

/// clang's message with the kernel's lines under it: the text exists nowhere as a file.
fn quote_lines(message: &str, text: &str) -> String {
    let mut out = message.to_owned();
    let numbers = message
        .match_indices("kernel.metal:")
        .filter_map(|(at, name)| message[at + name.len()..].split(':').next()?.parse::<usize>().ok());
    let mut quoted: Vec<usize> = numbers.collect();
    quoted.dedup();
    for number in quoted.into_iter().take(8) {
        if let Some(line) = text.lines().nth(number.wrapping_sub(1)) {
            out.push_str(&format!("\n{number:>5} | {line}"));
        }
    }
    out
}
