//! `cargo xtask web` builds the npm package and the demo page; `cargo xtask serve` shows the page.
//!
//! The steps, each of which a person can run: cargo for wasm32 with the profile `web`, wasm-bindgen,
//! wasm-opt, tsc, vite. What they need comes from npm by `web/package-lock.json`, but for wasm-bindgen's
//! command, which has to be of the same version as the crate.

use crate::machine::{self, Need, cargo_with_profile, rustup_has};
use crate::process::{Program, on_path};
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

type Outcome = Result<bool, Box<dyn std::error::Error>>;

/// The most that the module may weigh on the wire.
const MODULE_CEILING: u64 = 500_000;
/// The same where rustup's standard library for wasm32 is linked: it comes built, for speed and with the texts of panics, which
/// no flag here takes out again. Only the module that is published has to keep the ceiling above, and it is built with a
/// standard library made for size; this number tells such a machine of growth, and no machine without that library measures it.
const MODULE_CEILING_WITH_STD: u64 = 570_000;

/// `cargo xtask web [--install] [--package]`
pub(crate) fn main(mut arguments: lexopt::Parser) -> Outcome {
    let (mut demo, mut install) = (true, false);
    while let Some(argument) = arguments.next()? {
        match argument {
            lexopt::Arg::Long("package") => demo = false,
            lexopt::Arg::Long("install") => install = true,
            other => return Err(other.unexpected().into()),
        }
    }
    build(install, demo)?;
    sizes()
}

fn build(install: bool, demo: bool) -> Result<(), Box<dyn std::error::Error>> {
    let needs = [Need::WasmStd, Need::Node, Need::WebPackages];
    if install {
        machine::install(&needs);
    }
    let lacking: Vec<&str> = needs.iter().filter(|need| !need.is_met()).map(|need| need.what()).collect();
    if !lacking.is_empty() {
        return Err(format!("needs {}; --install brings it on Debian and Ubuntu", lacking.join("; ")).into());
    }
    wasm()?;
    package()?;
    if demo {
        page()?;
    }
    Ok(())
}

/// `cargo xtask serve [--install] [--port N]`
pub(crate) fn serve(mut arguments: lexopt::Parser) -> Outcome {
    let (mut port, mut install) = (4173, false);
    while let Some(argument) = arguments.next()? {
        match argument {
            lexopt::Arg::Long("install") => install = true,
            lexopt::Arg::Long("port") => port = lexopt::ValueExt::parse(&arguments.value()?)?,
            other => return Err(other.unexpected().into()),
        }
    }
    // What is up to date is not made again, so this takes seconds; what is not would show an older page.
    build(install, true)?;
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    let address = format!("http://localhost:{}/", listener.local_addr()?.port());
    println!("flexattn demo: {address} (ends with Ctrl-C)");
    let opener = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    if on_path(opener).is_some() {
        Program::new(opener).arg(&address).leave();
    }
    listen(&listener, Path::new("web/demo/dist"));
    Ok(true)
}

/// How long a connection may say nothing. Browsers open some ahead of need, and leave them open.
const SILENCE: Duration = Duration::from_secs(10);

/// Answers each connection in a thread of its own, so that one that says nothing holds up nobody.
fn listen(listener: &TcpListener, folder: &Path) {
    for stream in listener.incoming() {
        let folder = folder.to_owned();
        std::thread::spawn(move || {
            // A browser that goes away in the middle of an answer is no reason to stop.
            let timed = stream.and_then(|stream| stream.set_read_timeout(Some(SILENCE)).map(|()| stream));
            timed.and_then(|stream| answer(stream, &folder)).ok();
        });
    }
}

fn step(program: Program) -> Result<(), String> {
    let text = program.to_string();
    if program.run().ok { Ok(()) } else { Err(format!("`{text}` failed")) }
}

/// The passes of wasm-opt, a run each. What counts is the weight after compression, so these passes are not those that
/// give the fewest bytes (-Oz gives 2 % fewer and compresses to 2 % more). Functions that are alike by name are put side by
/// side, which takes a run of its own: without the names the next run writes 1 % less.
const RUNS: [&str; 3] = [
    "-O1 --shrink-level 2 --duplicate-function-elimination --simplify-globals --reorder-functions-by-name --strip-debug",
    "--rse -O1 --shrink-level 2",
    "--dae-optimizing --code-folding --merge-locals -O1 --shrink-level 2 --strip-target-features",
];
const FEATURES: &str = "--enable-bulk-memory --enable-nontrapping-float-to-int --enable-sign-ext --enable-mutable-globals \
    --enable-reference-types --enable-multivalue --enable-simd";

/// The module and its glue, into `web/wasm`. Nothing is done there when it was made from this very module.
fn wasm() -> Result<(), Box<dyn std::error::Error>> {
    let build = small(cargo_with_profile("wasm32-unknown-unknown", "build", "web"));
    step(build.args(["--package", "flexattn-web"]))?;
    let module = crate::target_folder().join("cross/wasm32-unknown-unknown/web/flexattn_web.wasm");
    let bindgen = bindgen()?;
    let (from, note) = (stamp(&module)?, Path::new("web/wasm/made-from"));
    if fs::read_to_string(note).is_ok_and(|made_from| made_from == from) {
        return Ok(());
    }
    fs::remove_dir_all("web/wasm").ok();
    let words = "--target web --out-dir web/wasm --out-name flexattn --remove-producers-section";
    step(Program::new(bindgen).args(words.split_whitespace()).arg(module))?;
    let file = "wasm/flexattn_bg.wasm";
    for passes in RUNS {
        let optimise =
            Program::words("node node_modules/binaryen/bin/wasm-opt").args(FEATURES.split_whitespace());
        step(optimise.args(passes.split_whitespace()).args([file, "-o", file]).folder("web"))?;
    }
    Ok(fs::write(note, from)?)
}

/// Everything that decides what `web/wasm` holds, as one number: the module that cargo made, and what comes after.
fn stamp(module: &Path) -> std::io::Result<String> {
    let mut hasher = std::hash::DefaultHasher::new();
    (fs::read(module)?, fs::read("web/package-lock.json")?, RUNS, FEATURES).hash(&mut hasher);
    Ok(format!("{:016x}", hasher.finish()))
}

/// What makes the module small. Where the standard library is built anyway, it is built for size and
/// without the texts of panics: bad input is an error here, so a panic is a bug and stops the module either way.
fn small(build: Program) -> Program {
    // RUSTFLAGS replaces what .cargo/config.toml says. Browsers have had 128-bit vectors since 2021 to 2023.
    let mut flags = "--cfg=web_sys_unstable_apis -Ctarget-feature=+simd128".to_owned();
    let mut build = build;
    if builds_std() {
        // Names in the older form put functions side by side that compress better: by 0.6 %.
        flags += " -Zunstable-options -Cpanic=immediate-abort -Csymbol-mangling-version=legacy";
        build = build.args(["-Z", "build-std-features=optimize_for_size"]);
    }
    if let Ok(own) = std::env::var("RUSTFLAGS") {
        flags = format!("{own} {flags}");
    }
    // Incremental builds cut the crate into pieces, which takes 1 % more.
    build.env("RUSTFLAGS", flags).env("CARGO_INCREMENTAL", "0")
}

/// The most that a module built here may weigh.
pub(crate) fn module_ceiling() -> u64 {
    if builds_std() { MODULE_CEILING } else { MODULE_CEILING_WITH_STD }
}

/// Whether the standard library is built along: rustup's comes built, for speed.
fn builds_std() -> bool {
    !rustup_has("wasm32-unknown-unknown")
}

/// wasm-bindgen's command, of the version that `web/Cargo.toml` pins; installed when it is missing.
fn bindgen() -> Result<PathBuf, String> {
    let manifest =
        fs::read_to_string("web/Cargo.toml").map_err(|error| format!("web/Cargo.toml: {error}"))?;
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("wasm-bindgen = \"=")?.strip_suffix('"'))
        .ok_or("web/Cargo.toml does not pin wasm-bindgen")?;
    let fits = |file: &Path| {
        let said = Program::new(file).arg("--version").run_quietly();
        said.ok && said.lines.iter().any(|line| line.split_whitespace().nth(1) == Some(version))
    };
    let own = crate::target_folder().join("tools/wasm-bindgen/bin/wasm-bindgen");
    if let Some(found) =
        [on_path("wasm-bindgen"), Some(own.clone())].into_iter().flatten().find(|file| fits(file))
    {
        return Ok(found);
    }
    let root = crate::target_folder().join("tools/wasm-bindgen");
    let install = Program::words("cargo install wasm-bindgen-cli --bin wasm-bindgen --version").arg(version);
    // It runs for a second; compiling it for speed would take longer than it could ever save.
    let install = install.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    step(
        install.arg("--root").arg(root).env("CARGO_TARGET_DIR", crate::target_folder().join("tools/build")),
    )?;
    Ok(own)
}

/// `web/dist` and the licences: what is published.
fn package() -> Result<(), Box<dyn std::error::Error>> {
    let dist = Path::new("web/dist");
    fs::remove_dir_all(dist).or_else(|error| if dist.exists() { Err(error) } else { Ok(()) })?;
    step(Program::words("node node_modules/typescript/bin/tsc").folder("web"))?;
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        // npm packs nothing from outside the package's folder.
        fs::copy(licence, Path::new("web").join(licence))?;
    }
    fs::create_dir_all(dist.join("wasm"))?;
    for file in ["flexattn.js", "flexattn_bg.wasm"] {
        fs::copy(Path::new("web/wasm").join(file), dist.join("wasm").join(file))?;
    }
    Ok(())
}

/// `web/demo/dist`: the page.
fn page() -> Result<(), String> {
    step(Program::words("node node_modules/typescript/bin/tsc --project demo").folder("web"))?;
    step(Program::words("node node_modules/vite/bin/vite.js build demo --logLevel warn").folder("web"))
}

/// Says what the module weighs, raw and as `gzip -9` packs it, and whether the latter is within the ceiling. (The zlib in
/// node is another, which packs 0.8 % less.)
fn sizes() -> Result<bool, Box<dyn std::error::Error>> {
    let count = "const b = require('node:fs').readFileSync('web/dist/wasm/flexattn_bg.wasm'); \
        const z = require('node:zlib'); \
        const gzip = require('node:child_process').execFileSync('gzip', ['-9'], { input: b, maxBuffer: 1e7 }); \
        console.log(b.length, gzip.length, z.brotliCompressSync(b).length)";
    let counted = Program::new("node").args(["-e", count]).run_quietly();
    let numbers: Vec<u64> = counted
        .lines
        .iter()
        .flat_map(|line| line.split_whitespace())
        .filter_map(|word| word.parse().ok())
        .collect();
    let [raw, gzip, brotli] = numbers[..] else { return Err("node could not measure the module".into()) };
    let ceiling = module_ceiling();
    let verdict = if gzip <= ceiling { "within" } else { "OVER" };
    println!("module: {raw} bytes, {gzip} gzipped ({verdict} the ceiling of {ceiling}), {brotli} in brotli");
    if !builds_std() {
        println!(
            "this ceiling is for rustup's standard library; what is published has one built for size \
             (apt: rustc-web cargo-web rust-web-src lld-19)"
        );
    }
    Ok(gzip <= ceiling)
}

/// Answers one request with a file of `folder`.
fn answer(mut stream: TcpStream, folder: &Path) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < 16 << 10 {
        match stream.read(&mut part)? {
            0 => break,
            read => request.extend_from_slice(&part[..read]),
        }
    }
    let request = String::from_utf8_lossy(&request);
    let path = request.split_whitespace().nth(1).unwrap_or("/").split(['?', '#']).next().unwrap_or("/");
    let path = path.trim_start_matches('/');
    let path = if path.is_empty() { "index.html" } else { path };
    let inside = !path.split('/').any(|part| part == "..");
    let body = if inside { fs::read(folder.join(path)).ok() } else { None };
    let kind = match Path::new(path).extension().and_then(|ending| ending.to_str()) {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript",
        Some("css") => "text/css",
        Some("txt") => "text/plain; charset=utf-8",
        Some("wasm") => "application/wasm",
        _ => "application/octet-stream",
    };
    match body {
        Some(body) => {
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            )?;
            stream.write_all(&body)
        }
        None => stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::listen;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn a_connection_that_says_nothing_holds_up_no_other() {
        let folder = std::env::temp_dir().join(format!("flexattn-serve-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("index.html"), "a page").unwrap();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn({
            let folder = folder.clone();
            move || listen(&listener, &folder)
        });
        let silent = TcpStream::connect(address).unwrap();
        let mut half = TcpStream::connect(address).unwrap();
        half.write_all(b"GET / HT").unwrap();
        let ask = |path: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
        let page = ask("/");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/html"), "{page}");
        assert!(page.ends_with("\r\n\r\na page"), "{page}");
        assert!(ask("/../index.html").starts_with("HTTP/1.1 404"));
        drop((silent, half));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
