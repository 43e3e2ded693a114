//! What the suites need from the machine, how to see whether it is there, and how to bring it.

use crate::drivers::{Driver, retry};
use crate::process::{Program, on_path, own_node};
use std::path::Path;

/// Something that a suite needs and a fresh machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A GPU that wgpu can open; on a machine without one, lavapipe.
    Vulkan,
    /// clang 19 with C++: the Metal emulator compiles kernels with it. A Mac has no use for it: the emulator needs
    /// ELF objects, and the kernels run on the GPU there.
    Clang,
    /// The standard library of wasm32-unknown-unknown and a linker for it.
    WasmStd,
    /// The lints of the toolchain that has it.
    WasmClippy,
    /// The standard library of aarch64-apple-darwin.
    DarwinStd,
    Node,
    Chromium,
    /// Mesa 26, unpacked: cooperative matrices.
    Mesa26,
    /// Mesa 25, unpacked: the driver that Dawn accepts.
    Mesa25,
    /// Dawn for node, by the lockfile of `tests/tint`.
    Dawn,
    /// The npm packages of `web`, by its lockfile.
    WebPackages,
    Typos,
    /// Apple's Metal compiler: only a Mac has it.
    MetalCompiler,
}

use Need::*;

impl Need {
    pub(crate) fn is_met(self) -> bool {
        match self {
            Vulkan => cfg!(target_os = "macos") || has_vulkan_driver(),
            Clang => cfg!(target_os = "macos") || on_path("clang++-19").is_some(),
            WasmStd => {
                rustup_has("wasm32-unknown-unknown") || (debian_std() && on_path("wasm-ld-19").is_some())
            }
            WasmClippy => rustup_has("wasm32-unknown-unknown") || Path::new(DEBIAN_CLIPPY).is_file(),
            DarwinStd => cfg!(target_os = "macos") || rustup_has("aarch64-apple-darwin") || debian_std(),
            Node => {
                on_path("npm").is_some() && node_version().is_some_and(|version| is_recent_node(&version))
            }
            Chromium => on_path("chromium").is_some(),
            Mesa26 => Driver::Mesa26.is_here(),
            Mesa25 => Driver::Mesa25.is_here(),
            Dawn => Path::new("tests/tint/node_modules/webgpu/package.json").is_file(),
            WebPackages => Path::new("web/node_modules/.package-lock.json").is_file(),
            Typos => typos().is_some(),
            MetalCompiler => Program::words("xcrun --find metal").run_quietly().ok,
        }
    }

    /// Whether the machine can have it at all.
    fn applies(self) -> bool {
        match self {
            Mesa25 | Mesa26 => cfg!(target_os = "linux"),
            MetalCompiler => cfg!(target_os = "macos"),
            _ => true,
        }
    }

    /// What a person is told to bring.
    pub(crate) fn what(self) -> &'static str {
        match self {
            Vulkan => "a Vulkan driver (apt: mesa-vulkan-drivers libvulkan1)",
            Clang => "clang 19 (apt: clang-19 g++)",
            WasmStd => {
                "wasm32-unknown-unknown (rustup target add, or apt: rustc-web cargo-web rust-web-src lld-19)"
            }
            WasmClippy => "clippy for wasm32-unknown-unknown (rustup target add, or apt: rust-web-clippy)",
            DarwinStd => "aarch64-apple-darwin (rustup target add, or apt: rustc-web cargo-web rust-web-src)",
            Node => {
                "npm, and node 20.19, 22.12 or newer (a Mac: brew install node; Debian 12's own is older: --install)"
            }
            Chromium => "Chromium (apt: chromium)",
            Mesa26 => "Mesa 26's lavapipe, unpacked under target/drivers (cargo xtask test --install)",
            Mesa25 => "Mesa 25's lavapipe, unpacked under target/drivers (cargo xtask test --install)",
            Dawn => "the npm packages of tests/tint (npm ci)",
            WebPackages => "the npm packages of web (npm ci)",
            Typos => "typos (pip: typos)",
            MetalCompiler => "a Mac with Xcode's Metal compiler (xcrun metal)",
        }
    }

    fn apt_packages(self) -> &'static [&'static str] {
        match self {
            Vulkan => &["mesa-vulkan-drivers", "libvulkan1"],
            Clang => &["clang-19", "g++"],
            WasmStd => &["rustc-web", "cargo-web", "rust-web-src", "lld-19"],
            WasmClippy => &["rust-web-clippy"],
            DarwinStd => &["rustc-web", "cargo-web", "rust-web-src"],
            // Only to begin with: where this brings an older node, npm brings a newer one.
            Node if on_path("npm").is_none() => &["nodejs", "npm"],
            Chromium => &["chromium", "fonts-dejavu-core"],
            Node | Mesa26 | Mesa25 | Dawn | WebPackages | Typos | MetalCompiler => &[],
        }
    }
}

/// Brings what is missing of `needs`. Whatever cannot be brought stays missing, is named here, and its suites
/// count as not run.
pub(crate) fn install(needs: &[Need]) {
    let missing = || needs.iter().copied().filter(|need| need.applies() && !need.is_met());
    let packages: Vec<&str> = missing().flat_map(Need::apt_packages).copied().collect();
    if !packages.is_empty()
        && let Err(why) = install_packages(&packages)
    {
        println!("apt: {why}");
    }
    for need in missing() {
        let brought = match need {
            Mesa26 => Driver::Mesa26.unpack(),
            Mesa25 => Driver::Mesa25.unpack(),
            Dawn => install_npm("tests/tint"),
            WebPackages => install_npm("web"),
            Typos => install_typos(),
            Node => install_node(),
            Vulkan | Clang | WasmStd | WasmClippy | DarwinStd | Chromium | MetalCompiler => {
                Err("still missing".to_owned())
            }
        };
        if let Err(why) = brought {
            println!("cannot install {}: {why}", need.what());
        }
    }
}

fn install_packages(packages: &[&str]) -> Result<(), String> {
    if on_path("apt-get").is_none() {
        return Err(format!("this machine has no apt-get; bring {} another way", packages.join(", ")));
    }
    let apt = |words: &str| {
        let words =
            format!("env DEBIAN_FRONTEND=noninteractive apt-get --quiet=2 -o Acquire::Retries=5 {words}");
        match is_root() {
            true => Program::words(&words),
            false => Program::words("sudo --non-interactive").args(words.split_whitespace()),
        }
    };
    retry(|| apt("update").run().ok).map_err(|why| format!("apt-get update {why}"))?;
    // One by one after a failed joint install: a package that this distribution lacks must not keep the others away.
    let install = |list: &[&str]| {
        let list = list.join(" ");
        retry(|| apt(&format!("install --yes --no-install-recommends {list}")).run().ok)
    };
    if install(packages).is_ok() {
        return Ok(());
    }
    let failed: Vec<&str> = packages.iter().filter(|package| install(&[package]).is_err()).copied().collect();
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("cannot install {}", failed.join(", "))),
    }
}

/// Exactly what the lockfile names; no script of a package runs.
fn install_npm(folder: &str) -> Result<(), String> {
    if on_path("npm").is_none() {
        return Err("npm is missing".to_owned());
    }
    if !Path::new(folder).join("package-lock.json").is_file() {
        return Err(format!("{folder} has no package-lock.json"));
    }
    retry(|| Program::words("npm ci --ignore-scripts --no-audit --no-fund").folder(folder).run().ok)
}

/// Builds of node by its own project, as npm packages: one for each kind of machine, and beside it an npm that fits.
const NODE: &str = "22.23.5";
const NPM: &str = "10.9.4";

/// A node of our own under `target/`, brought by whatever npm is here from the registry that it is set to; npm compares
/// what comes with the registry's checksums. From then on it stands first on the PATH of every program that is run.
fn install_node() -> Result<(), String> {
    let machine = match std::env::consts::ARCH {
        "x86_64" => "x64",
        "aarch64" => "arm64",
        other => return Err(format!("there is no build of node for {other}; bring a newer node")),
    };
    if !cfg!(target_os = "linux") {
        return Err("brew install node".to_owned());
    }
    if on_path("npm").is_none() {
        return Err("npm is missing".to_owned());
    }
    let folder = crate::target_folder().join("tools/node");
    let npm = || {
        let words = "npm install --ignore-scripts --no-audit --no-fund --no-save --prefix";
        let packages = [format!("node-linux-{machine}@{NODE}"), format!("npm@{NPM}")];
        Program::words(words).arg(&folder).args(packages).run().ok
    };
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    retry(npm)?;
    match Node.is_met() {
        true => Ok(()),
        false => Err(format!("{} does not run here", own_node().join("node").display())),
    }
}

/// What the node on the PATH says of its version: `v22.23.5`.
fn node_version() -> Option<String> {
    let said = Program::words("node --version").run_quietly();
    said.lines.into_iter().next().filter(|_| said.ok)
}

/// Whether this version runs the page's build: Vite takes 20.19 and 22.12 and what is newer, but no 21.
fn is_recent_node(version: &str) -> bool {
    let mut numbers = version.trim_start_matches('v').split('.').map(|part| part.parse::<u32>().ok());
    let (Some(Some(major)), Some(Some(minor))) = (numbers.next(), numbers.next()) else { return false };
    match major {
        20 => minor >= 19,
        22 => minor >= 12,
        major => major > 22,
    }
}

fn install_typos() -> Result<(), String> {
    let folder = crate::target_folder().join("tools/typos");
    let pip = || {
        let words = "python3 -m pip install --quiet --disable-pip-version-check --upgrade --target";
        Program::words(words).arg(&folder).arg(format!("typos=={TYPOS}")).run().ok
    };
    retry(pip)
}

/// New releases know new misspellings: pinned, so that a quiet tree stays quiet.
const TYPOS: &str = "1.52.0";

/// The spelling checker: the machine's own, or the one that `--install` brought.
pub(crate) fn typos() -> Option<std::path::PathBuf> {
    let own = crate::target_folder().join("tools/typos/bin/typos");
    own.is_file().then_some(own).or_else(|| on_path("typos"))
}

fn has_vulkan_driver() -> bool {
    if let Some(list) = std::env::var_os("VK_DRIVER_FILES").or_else(|| std::env::var_os("VK_ICD_FILENAMES")) {
        return std::env::split_paths(&list).any(|file| file.is_file());
    }
    let folders = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
    folders.iter().any(|folder| std::fs::read_dir(folder).is_ok_and(|mut files| files.next().is_some()))
}

/// Whether rustup's toolchain, the one that built this program, has the standard library of `target`.
pub(crate) fn rustup_has(target: &str) -> bool {
    let ended = Program::words("rustc --print sysroot").run_quietly();
    ended.ok
        && ended
            .lines
            .first()
            .is_some_and(|root| Path::new(root).join("lib/rustlib").join(target).join("lib").is_dir())
}

/// Debian's Rust for the web: it carries the standard library's source, and so builds it for any target.
pub(crate) fn debian_std() -> bool {
    let source = |entry: std::fs::DirEntry| entry.path().join("library/std/Cargo.toml").is_file();
    Path::new("/usr/bin/rustc").is_file()
        && Path::new("/usr/bin/cargo").is_file()
        && std::fs::read_dir("/usr/src")
            .is_ok_and(|mut folders| folders.any(|folder| folder.is_ok_and(source)))
}

/// What `cargo clippy` of Debian's cargo comes to: found by its path, it takes the compiler beside it, not rustup's.
const DEBIAN_CLIPPY: &str = "/usr/bin/cargo-clippy";

/// Cargo for a target that this machine does not run, in a target folder of its own: `cargo_for("wasm32-unknown-unknown",
/// "check")` and so on. The toolchain of rustup where it has the target, else Debian's.
pub(crate) fn cargo_for(target: &str, command: &str) -> Program {
    cargo_with_profile(target, command, "release")
}

/// The same with another profile.
pub(crate) fn cargo_with_profile(target: &str, command: &str, profile: &str) -> Program {
    let folder = crate::target_folder().join("cross");
    let program = if rustup_has(target) {
        Program::words("cargo").arg(command)
    } else {
        Program::words(if command == "clippy" { DEBIAN_CLIPPY } else { "/usr/bin/cargo" })
            .arg(command)
            .env("CARGO", "/usr/bin/cargo")
            .args(["-Z", "build-std=std,panic_abort"])
            .env("RUSTC", "/usr/bin/rustc")
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", "wasm-ld-19")
    };
    program.args(["--profile", profile, "--target", target, "--target-dir"]).arg(folder)
}

fn is_root() -> bool {
    Program::words("id -u").run_quietly().lines.first().is_some_and(|line| line == "0")
}

#[cfg(test)]
mod tests {
    use super::is_recent_node;

    #[test]
    fn a_node_that_cannot_build_the_page_does_not_count() {
        for old in ["v18.20.4", "v20.18.3", "v21.7.0", "v22.11.0", "", "v22", "nonsense"] {
            assert!(!is_recent_node(old), "{old}");
        }
        for recent in ["v20.19.0", "v22.12.0", "v22.23.5", "v23.0.0", "v26.1.0"] {
            assert!(is_recent_node(recent), "{recent}");
        }
    }
}
