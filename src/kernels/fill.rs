//! Filling a kernel file: joins includes, rewrites named constants and access modes, fills slots.
//!
//! Every kernel file, with what it includes, is a valid program as it stands. Filling changes
//! marked places only, and each name has to match exactly once: a kernel and this table cannot drift
//! apart in silence. There are no conditions and no expressions; whatever depends on a case is a
//! constant, or a slot filled with another file.
//!
//! | in WGSL | in MSL | changed by |
//! |---|---|---|
//! | `//#include walk.wgsl` | `#include "walk.metal"` | [`Fill::join`]: the file's text, once per kernel |
//! | `const ROWS: u32 = 4u;` | `#define ROWS 4` | [`Fill::constant`] |
//! | `var<storage, read> k: ` | - | [`Fill::writable`] |
//! | `//@slot load` to `//@end` | the same | [`Fill::slot`] |
//! | `enable f16;` | - | moved to the top, where WGSL wants it |

use crate::{Error, Result};

/// A kernel's text on its way from file to compiler.
#[derive(Clone, Debug)]
pub struct Fill {
    kernel: String,
    lines: Vec<String>,
}

impl Fill {
    /// The file `name` of `files` with its includes in place; a file that is included again is left
    /// out the second time.
    ///
    /// # Errors
    ///
    /// [`Error::Compile`] when a file is missing.
    pub fn join(name: &str, files: &[(&str, &str)]) -> Result<Self> {
        let mut fill = Self { kernel: name.to_owned(), lines: Vec::new() };
        fill.include(name, files, &mut Vec::new())?;
        Ok(fill)
    }

    fn include(&mut self, name: &str, files: &[(&str, &str)], seen: &mut Vec<String>) -> Result<()> {
        if seen.iter().any(|other| other == name) {
            return Ok(());
        }
        seen.push(name.to_owned());
        let Some((_, text)) = files.iter().find(|(file, _)| *file == name) else {
            return Err(self.error(format!("there is no file {name} to include")));
        };
        // A file's own guard says nothing once files are joined.
        for line in text.lines().filter(|line| *line != "#pragma once") {
            match included(line) {
                Some(file) => self.include(file, files, seen)?,
                None => self.lines.push(line.to_owned()),
            }
        }
        Ok(())
    }

    /// Gives the constant `name` the value `value`, text of the language, without a type suffix for
    /// u32 in WGSL (it is added).
    ///
    /// # Errors
    ///
    /// [`Error::Compile`] unless exactly one line declares it.
    pub fn constant(&mut self, name: &str, value: &str) -> Result<()> {
        let wgsl = [format!("const {name}: u32 = "), format!("const {name}: bool = ")];
        let msl = format!("#define {name} ");
        self.once(&format!("constant {name}"), |line| {
            if line.starts_with(&wgsl[0]) {
                let (_, comment) = line.split_once(';')?;
                Some(format!("{}{value}u;{comment}", wgsl[0]))
            } else if line.starts_with(&wgsl[1]) {
                let (_, comment) = line.split_once(';')?;
                Some(format!("{}{value};{comment}", wgsl[1]))
            } else {
                let rest = line.strip_prefix(&msl)?.trim_start();
                let after = rest.find(char::is_whitespace).map_or("", |end| &rest[end..]);
                Some(format!("{msl}{value}{after}"))
            }
        })
    }

    /// Declares the storage buffer `name` `read_write` instead of `read`.
    ///
    /// # Errors
    ///
    /// [`Error::Compile`] unless exactly one line declares it `read`.
    pub fn writable(&mut self, name: &str) -> Result<()> {
        let read = format!("var<storage, read> {name}: ");
        self.once(&format!("read-only buffer {name}"), |line| {
            line.contains(&read).then(|| line.replace(&read, &format!("var<storage, read_write> {name}: ")))
        })
    }

    /// Replaces what stands in the slot `name` by `text`.
    ///
    /// # Errors
    ///
    /// [`Error::Compile`] unless there is exactly one slot of this name, with an end.
    pub fn slot(&mut self, name: &str, text: &str) -> Result<()> {
        let mark = format!("//@slot {name}");
        let begins: Vec<usize> =
            (0..self.lines.len()).filter(|&i| self.lines[i].trim_end() == mark).collect();
        let [begin] = begins[..] else {
            return Err(
                self.error(format!("slot {name} is there {} times but has to be there once", begins.len()))
            );
        };
        // Slots nest: a slot's default text may have slots of its own.
        let mut depth = 0;
        let length = self.lines[begin..].iter().position(|line| {
            depth += i32::from(line.starts_with("//@slot ")) - i32::from(line.trim_end() == "//@end");
            depth == 0
        });
        let Some(length) = length else {
            return Err(self.error(format!("slot {name} has no //@end")));
        };
        self.lines.splice(begin + 1..begin + length, text.lines().map(str::to_owned));
        Ok(())
    }

    /// Fills the slot `name` with another kernel file and what it includes.
    ///
    /// # Errors
    ///
    /// As [`Fill::join`] and [`Fill::slot`].
    pub fn slot_file(&mut self, name: &str, file: &str, files: &[(&str, &str)]) -> Result<()> {
        let text = Self::join(file, files)?.lines.join("\n");
        self.slot(name, &text)
    }

    /// Adds the directive `enable EXTENSION;`, which files leave out where dialects of WGSL differ.
    pub fn enable(&mut self, extension: &str) {
        self.lines.push(format!("enable {extension};"));
    }

    /// The text, `enable` directives first.
    pub fn finish(self) -> String {
        let (enables, rest): (Vec<_>, Vec<_>) =
            self.lines.into_iter().partition(|line| line.starts_with("enable "));
        enables.into_iter().chain(rest).map(|line| line + "\n").collect()
    }

    fn once(&mut self, what: &str, mut rewrite: impl FnMut(&str) -> Option<String>) -> Result<()> {
        let found: Vec<(usize, String)> =
            self.lines.iter().enumerate().filter_map(|(i, line)| Some((i, rewrite(line)?))).collect();
        match <[_; 1]>::try_from(found) {
            Ok([(i, line)]) => {
                self.lines[i] = line;
                Ok(())
            }
            Err(found) => {
                Err(self.error(format!("{what} is there {} times but has to be there once", found.len())))
            }
        }
    }

    fn error(&self, message: String) -> Error {
        Error::compile(&self.kernel, message)
    }
}

fn included(line: &str) -> Option<&str> {
    let msl = || line.strip_prefix("#include \"").and_then(|rest| rest.split('"').next());
    line.strip_prefix("//#include ").map(str::trim).or_else(msl)
}
