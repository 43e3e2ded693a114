//! Running other programs: their output is shown as it comes, and read for what it says of tests.

use crate::report::Counts;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;

/// A program to run, spelled as a person would type it.
#[derive(Debug)]
pub(crate) struct Program {
    command: Command,
    text: String,
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Exit status zero.
    pub(crate) ok: bool,
    /// What its closing lines say of tests.
    pub(crate) counts: Counts,
    /// The lines it printed (standard output and standard error, as they came).
    pub(crate) lines: Vec<String>,
}

impl Program {
    pub(crate) fn new(name: impl AsRef<OsStr>) -> Program {
        let text = name.as_ref().to_string_lossy().into_owned();
        let mut command = Command::new(name);
        command.stdin(Stdio::null());
        command.env("PATH", search_path());
        if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
            // Vulkan drivers look here for a display and complain on every start when it is not set.
            command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
        }
        Program { command, text }
    }

    /// The words of `line`, separated by blanks: `"cargo fmt --check"`.
    pub(crate) fn words(line: &str) -> Program {
        let mut words = line.split_whitespace();
        let mut program = Program::new(words.next().unwrap_or_default());
        for word in words {
            program = program.arg(word);
        }
        program
    }

    pub(crate) fn arg(mut self, word: impl AsRef<OsStr>) -> Program {
        self.text.push(' ');
        self.text.push_str(&word.as_ref().to_string_lossy());
        self.command.arg(word);
        self
    }

    pub(crate) fn args<T: AsRef<OsStr>>(self, words: impl IntoIterator<Item = T>) -> Program {
        words.into_iter().fold(self, Program::arg)
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Program {
        self.text = format!("{name}={} {}", value.as_ref().to_string_lossy(), self.text);
        self.command.env(name, value);
        self
    }

    pub(crate) fn folder(mut self, folder: impl AsRef<Path>) -> Program {
        self.command.current_dir(folder);
        self
    }

    /// Runs it, showing each line as it comes. A program that cannot be started ends as not ok.
    pub(crate) fn run(self) -> Ended {
        self.run_with(true)
    }

    /// Runs it without showing anything.
    pub(crate) fn run_quietly(self) -> Ended {
        self.run_with(false)
    }

    /// Starts it and looks no further: it may live on, and reads and writes nothing of this program's. One that
    /// cannot be started is not missed.
    pub(crate) fn leave(mut self) {
        self.command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok();
    }

    fn run_with(mut self, show: bool) -> Ended {
        if show {
            println!("$ {}", self.text);
            std::io::stdout().flush().ok();
        }
        let child = self.command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                let line = format!("{}: {error}", self.text);
                if show {
                    println!("{line}");
                }
                return Ended { ok: false, counts: Counts::default(), lines: vec![line] };
            }
        };
        let (sender, receiver) = mpsc::channel();
        let pipes: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
            child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
        ];
        let readers: Vec<_> = pipes
            .into_iter()
            .flatten()
            .map(|pipe| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    let mut pipe = BufReader::new(pipe);
                    let mut line = Vec::new();
                    while pipe.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                        line.clear();
                        if sender.send(text).is_err() {
                            break;
                        }
                    }
                })
            })
            .collect();
        drop(sender);
        let mut counts = Counts::default();
        let mut lines = Vec::new();
        for line in receiver {
            if show {
                println!("{line}");
            }
            counts += Counts::read(&line);
            lines.push(line);
        }
        for reader in readers {
            reader.join().ok();
        }
        let ok = child.wait().is_ok_and(|status| status.success());
        Ended { ok, counts, lines }
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.text)
    }
}

/// Where the program `name` lies on the PATH of the programs that are run.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&search_path()).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// The folder of the node that `--install` brings where the machine's own is too old.
pub(crate) fn own_node() -> PathBuf {
    crate::target_folder().join("tools/node/node_modules/.bin")
}

/// This program's own PATH, behind the node that was brought, if one was.
fn search_path() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let node = own_node();
    if !node.join("node").is_file() {
        return path;
    }
    let folders = std::iter::once(node).chain(std::env::split_paths(&path));
    std::env::join_paths(folders).unwrap_or(path)
}
