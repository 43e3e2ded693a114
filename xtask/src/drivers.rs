//! Newer software GPU drivers beside the distribution's own, unpacked into a folder and never installed.
//!
//! Debian 12's lavapipe (Mesa 22.3) has no cooperative matrices, and Dawn refuses it. Two other builds of
//! lavapipe come as Debian packages: Mesa 26 from trixie-backports and Mesa 25 from bookworm-backports. apt
//! resolves and checks them in a private state folder that knows of no installed package, so that every
//! library that the driver needs is fetched with it; `dpkg-deb` unpacks them under `target/drivers/`.
//! Nothing of the machine's own packages changes, and no root rights are needed.

use crate::process::Program;
use std::fs;
use std::path::{Path, PathBuf};

/// A driver build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// Mesa 26 of trixie-backports, with the C library it was built for: cooperative matrices 8x8x8.
    /// Programs run through that C library's loader; see [`Driver::runner`].
    Mesa26,
    /// Mesa 25 of bookworm-backports, for programs of this machine (node): f16, subgroups of 8.
    Mesa25,
}

impl Driver {
    fn name(self) -> &'static str {
        match self {
            Driver::Mesa26 => "mesa26",
            Driver::Mesa25 => "mesa25",
        }
    }

    /// The suite that everything comes from, and the one that wins for Mesa.
    fn suites(self) -> [&'static str; 2] {
        match self {
            Driver::Mesa26 => ["trixie", "trixie-backports"],
            Driver::Mesa25 => ["bookworm", "bookworm-backports"],
        }
    }

    /// Whether the driver is loaded into programs that run on the machine's own C library: then that
    /// library and the compiler's must not be shadowed by the unpacked ones.
    fn uses_own_c_library(self) -> bool {
        self == Driver::Mesa26
    }

    fn folder(self) -> PathBuf {
        crate::target_folder().join("drivers").join(self.name())
    }

    fn tree(self) -> PathBuf {
        self.folder().join("tree")
    }

    /// The unpacked shared libraries.
    fn libraries(self) -> PathBuf {
        let tree = self.tree().join("usr/lib");
        let multiarch = fs::read_dir(&tree).into_iter().flatten().flatten().map(|entry| entry.path());
        multiarch.into_iter().find(|path| path.join("libvulkan_lvp.so").is_file()).unwrap_or(tree)
    }

    fn manifest(self) -> PathBuf {
        self.tree().join("usr/share/vulkan/icd.d/lvp_icd.json")
    }

    /// A script that runs a program on this driver: `SCRIPT PROGRAM ARGUMENTS..`. Cargo takes it as a runner.
    pub(crate) fn runner(self) -> PathBuf {
        self.folder().join("run")
    }

    /// Whether the driver lies unpacked and whole: the runner is written last.
    pub(crate) fn is_here(self) -> bool {
        self.runner().is_file()
    }

    /// Fetches and unpacks the driver.
    pub(crate) fn unpack(self) -> Result<(), String> {
        let folder = self.folder();
        let state = folder.join("apt");
        let fail = |error: std::io::Error| format!("cannot write under {}: {error}", folder.display());
        fs::remove_dir_all(&folder).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(fail(error)),
        })?;
        for part in ["lists/partial", "cache/archives/partial", "sources"] {
            fs::create_dir_all(state.join(part)).map_err(fail)?;
        }
        fs::create_dir_all(self.tree()).map_err(fail)?;
        fs::write(state.join("status"), "").map_err(fail)?;
        fs::write(state.join("sources/driver.sources"), self.sources()?).map_err(fail)?;
        fs::write(state.join("apt.conf"), apt_settings(&state)).map_err(fail)?;

        let apt = |words: &str| Program::words(words).env("APT_CONFIG", state.join("apt.conf"));
        retry(|| apt("apt-get --quiet=2 update").run().ok)?;
        let release = self.suites()[1];
        let fetch = format!(
            "apt-get --quiet=2 install --yes --download-only --target-release {release} mesa-vulkan-drivers"
        );
        retry(|| apt(&fetch).run().ok)?;
        self.unpack_archives(&state.join("cache/archives"))?;
        self.write_runner().map_err(fail)?;
        fs::remove_dir_all(&state).map_err(fail)
    }

    /// The machine's own Debian mirror, with this driver's suites.
    fn sources(self) -> Result<String, String> {
        let mirror =
            mirror().ok_or("no Debian mirror is named in /etc/apt, so newer drivers cannot be fetched")?;
        let keys = Path::new("/usr/share/keyrings/debian-archive-keyring.gpg");
        if !keys.is_file() {
            return Err(format!("{} is missing: install debian-archive-keyring", keys.display()));
        }
        let [suite, backports] = self.suites();
        Ok(format!(
            "Types: deb\nURIs: {mirror}\nSuites: {suite} {backports}\nComponents: main\nSigned-By: {}\n",
            keys.display()
        ))
    }

    fn unpack_archives(self, archives: &Path) -> Result<(), String> {
        let c_library = ["libc6_", "libgcc-s1_", "libstdc++6_", "gcc-"];
        let files = fs::read_dir(archives).map_err(|error| error.to_string())?;
        for file in files.flatten().map(|entry| entry.path()) {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let shadows = !self.uses_own_c_library() && c_library.iter().any(|start| name.starts_with(start));
            if !name.ends_with(".deb") || shadows {
                continue;
            }
            if !Program::words("dpkg-deb --extract").arg(&file).arg(self.tree()).run_quietly().ok {
                return Err(format!("dpkg-deb cannot unpack {name}"));
            }
        }
        match self.manifest().is_file() {
            true => Ok(()),
            false => Err(format!("the packages hold no {}", self.manifest().display())),
        }
    }

    fn write_runner(self) -> std::io::Result<()> {
        let libraries = self.libraries();
        let start = if self.uses_own_c_library() {
            let entries = fs::read_dir(&libraries)?.flatten().map(|entry| entry.path());
            let is_loader = |path: &PathBuf| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld-linux"))
            };
            let loader = entries.into_iter().find(is_loader).ok_or(std::io::ErrorKind::NotFound)?;
            format!("exec '{}' --library-path '{}' \"$@\"", loader.display(), libraries.display())
        } else {
            format!("LD_LIBRARY_PATH='{}' exec \"$@\"", libraries.display())
        };
        let manifest = self.manifest();
        let script = format!(
            "#!/bin/sh\n# Runs a program on the driver unpacked beside this script.\nexport VK_DRIVER_FILES='{0}' VK_ICD_FILENAMES='{0}'\n{start}\n",
            manifest.display()
        );
        let temporary = self.folder().join("run.new");
        fs::write(&temporary, script)?;
        make_executable(&temporary)?;
        fs::rename(temporary, self.runner())
    }
}

/// apt with a state of its own, under `state`.
fn apt_settings(state: &Path) -> String {
    let state = state.display();
    format!(
        "Dir::State \"{state}\";
Dir::State::status \"{state}/status\";
Dir::State::lists \"{state}/lists\";
Dir::Cache \"{state}/cache\";
Dir::Etc::sourcelist \"/dev/null\";
Dir::Etc::sourceparts \"{state}/sources\";
Dir::Etc::preferences \"/dev/null\";
Dir::Etc::preferencesparts \"/dev/null\";
Acquire::Languages \"none\";
Acquire::Retries \"5\";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled \"false\";
APT::Install-Recommends \"false\";
APT::Sandbox::User \"root\";
Debug::NoLocking \"true\";
"
    )
}

/// The first Debian mirror that this machine's own apt settings name.
fn mirror() -> Option<String> {
    let parts =
        fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = parts.collect();
    files.push("/etc/apt/sources.list".into());
    files.sort();
    let is_mirror = |word: &&str| word.contains("://") && word.trim_end_matches('/').ends_with("/debian");
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).find_map(|text| {
        let lines = text.lines().filter(|line| line.starts_with("URIs:") || line.starts_with("deb "));
        lines.flat_map(str::split_whitespace).find(is_mirror).map(str::to_owned)
    })
}

/// Three tries, since mirrors fail now and then.
pub(crate) fn retry(mut attempt: impl FnMut() -> bool) -> Result<(), String> {
    for pause in [2, 10, 0] {
        if attempt() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_secs(pause));
    }
    Err("failed three times".to_owned())
}

#[cfg(unix)]
fn make_executable(file: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> std::io::Result<()> {
    Ok(())
}
