//! The emulator as a runtime of `flexattn`.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flexattn::kernels::{KernelSpec, Language, Loader, MetalTile};
use flexattn::{Dispatch, Error, Limits, Matrices, Profile, Result, Runtime, Tier, Usage};

use crate::compile::{Kernel, Math, clang};
use crate::launch::{Bound, Counters, Memory, Options, Outcome, Report, Schedule};
use crate::wgsl::{SIZES, Translated, translate};

/// A Metal GPU that is not there: runs the kernels of `flexattn` from their MSL text.
///
/// Kernels that `msl/` lacks run from their WGSL text by way of naga, as wgpu runs them on a Mac. A
/// dispatch that makes the emulator report anything is an error. Speed says nothing about a GPU.
#[derive(Clone, Debug)]
pub struct Emulator {
    profile: Profile,
    math: Math,
    mutation: Option<Mutation>,
    shared: Arc<Shared>,
}

/// A mistake that is put into a kernel's text, to see whether it is noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// The text that is replaced.
    pub from: String,
    /// By what.
    pub to: String,
    /// Which of its occurrences, from 0.
    pub nth: usize,
    /// Only in the kernel with this entry; otherwise in all.
    pub entry: Option<&'static str>,
}

impl Mutation {
    /// The text with the mistake in it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the text does not have that occurrence.
    pub fn apply(&self, text: &str) -> Result<String> {
        let at = text.match_indices(&self.from).nth(self.nth).map(|(at, _)| at);
        let at = at.ok_or_else(|| {
            Error::unsupported(format!("`{}` is not there {} times", self.from, self.nth + 1))
        })?;
        Ok([&text[..at], &self.to, &text[at + self.from.len()..]].concat())
    }
}

#[derive(Debug, Default)]
struct Shared {
    options: Mutex<Options>,
    log: Mutex<Vec<Record>>,
    reports: Mutex<Vec<Report>>,
    kernels: Mutex<HashMap<u128, Arc<Compiled>>>,
}

#[derive(Debug)]
struct Compiled {
    kernel: Arc<Kernel>,
    entry: String,
    sized: Vec<u32>,
}

/// One dispatch that ran.
#[derive(Clone, Debug)]
pub struct Record {
    /// The entry point.
    pub entry: &'static str,
    /// The kernel's label.
    pub label: String,
    /// Threads of a threadgroup.
    pub threads: u32,
    /// Bytes of threadgroup memory.
    pub threadgroup_memory: u64,
    /// What it did.
    pub counters: Counters,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Emulator {
    /// A GPU that runs the Metal kernels with this loader: an M1 or M2 (staged), an M3 or later (direct).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when there is no clang.
    pub fn metal(loader: Loader) -> Result<Self> {
        let emulator = Self::new(Tier::Metal)?;
        let profile = Profile { load_direct: loader == Loader::Direct, ..emulator.profile };
        Ok(Self { profile, ..emulator })
    }

    /// The same GPU, running the WGSL kernels of a lower tier in the MSL that naga writes for them.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when there is no clang.
    pub fn new(tier: Tier) -> Result<Self> {
        clang()?;
        let limits = Limits {
            storage_binding: 1 << 30,
            buffer: 1 << 30,
            workgroup_memory: 32 << 10,
            invocations: 1024,
            ..Limits::default()
        };
        let profile = Profile {
            adapter: "emulated Apple GPU".into(),
            subgroup_min: 32,
            subgroup_max: 32,
            f16: true,
            // What Metal has; only the tier CoopMatrix looks at them.
            matrices: Matrices { f16: 8, f32: 8 },
            limits,
            ..Profile::floor(tier)
        };
        Ok(Self { profile, math: Math::Precise, mutation: None, shared: Arc::default() })
    }

    /// The same with other cooperative matrices, for [`Tier::CoopMatrix`]. Metal has none of 16 x 16: the
    /// emulator puts them together from four of 8 x 8, to run the kernel that Vulkan devices with such
    /// matrices get.
    #[must_use]
    pub fn with_matrices(self, matrices: Matrices) -> Self {
        Self { profile: Profile { matrices, ..self.profile }, shared: Arc::default(), ..self }
    }

    /// The same with Metal's default float semantics.
    #[must_use]
    pub fn with_math(self, math: Math) -> Self {
        Self { math, shared: Arc::default(), ..self }
    }

    /// The same with a mistake in the texts of its kernels.
    #[must_use]
    pub fn with_mutation(self, mutation: Mutation) -> Self {
        Self { mutation: Some(mutation), shared: Arc::default(), ..self }
    }

    /// Runs every dispatch in all schedules and demands equal results.
    #[must_use]
    pub fn with_all_schedules(self) -> Self {
        lock(&self.shared.options).schedules = Schedule::ALL.to_vec();
        self
    }

    /// How dispatches run from now on.
    pub fn set_options(&self, options: Options) {
        *lock(&self.shared.options) = options;
    }

    /// The dispatches since the last call, in order.
    pub fn take_records(&self) -> Vec<Record> {
        std::mem::take(&mut lock(&self.shared.log))
    }

    /// What the dispatch that failed last was reported for, and earlier ones since the last call.
    pub fn take_reports(&self) -> Vec<Report> {
        std::mem::take(&mut lock(&self.shared.reports))
    }

    fn compiled(&self, spec: &KernelSpec) -> Result<Arc<Compiled>> {
        if let Some(compiled) = lock(&self.shared.kernels).get(&spec.key()) {
            return Ok(compiled.clone());
        }
        let (text, entry, sized) = if spec.metal.is_some() {
            (spec.text(Language::Msl)?, spec.entry().to_owned(), Vec::new())
        } else {
            let Translated { text, entry, sized } = translate(&spec.text(Language::Wgsl)?, spec.entry())?;
            (text, entry, sized)
        };
        let here = |mutation: &&Mutation| mutation.entry.is_none_or(|entry| entry == spec.entry());
        let mutation = self.mutation.as_ref().filter(here);
        let text = mutation.map_or(Ok(text.clone()), |mutation| mutation.apply(&text))?;
        let compiled = Compiled { kernel: Kernel::compile_as(&text, self.math)?, entry, sized };
        let (needed, available) =
            (compiled.kernel.threadgroup_memory(&compiled.entry), MetalTile::MAX_THREADGROUP_MEMORY.into());
        if needed > available {
            return Err(Error::Limit {
                what: format!("kernel `{}`", spec.label()),
                limit: "maxThreadgroupMemoryLength",
                needed,
                available,
                remedy: "declare smaller threadgroup arrays".into(),
            });
        }
        Ok(lock(&self.shared.kernels).entry(spec.key()).or_insert(Arc::new(compiled)).clone())
    }

    fn launch(&self, dispatch: &Dispatch<Memory>) -> Result<Outcome> {
        let spec = &dispatch.spec;
        let compiled = self.compiled(spec)?;
        let mut bound: Vec<Bound> = Vec::new();
        for (index, binding) in dispatch.bindings.iter().enumerate() {
            bound.push(Bound {
                index: index as u32,
                memory: binding.buffer.clone(),
                offset: binding.offset as usize,
                size: binding.size as usize,
            });
        }
        let params = bound.len() as u32;
        bound.push(Bound::whole(params, &Memory::from_bytes(&dispatch.params)));
        if !compiled.sized.is_empty() {
            let size = |index: &u32| bound.get(*index as usize).map_or(0, |bound| bound.size as u32);
            let sizes: Vec<u8> = compiled.sized.iter().flat_map(|index| size(index).to_le_bytes()).collect();
            bound.push(Bound::whole(SIZES.into(), &Memory::from_bytes(&sizes)));
        }
        let options = lock(&self.shared.options).clone();
        let outcome =
            compiled.kernel.launch(&compiled.entry, &bound, dispatch.grid, spec.workgroup(), &options)?;
        lock(&self.shared.log).push(Record {
            entry: spec.entry(),
            label: spec.label(),
            threads: spec.workgroup().iter().product(),
            threadgroup_memory: compiled.kernel.threadgroup_memory(&compiled.entry),
            counters: outcome.counters,
        });
        Ok(outcome)
    }
}

fn check(memory: &Memory, offset: u64, bytes: u64) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= memory.size() as u64 => Ok(()),
        _ => Err(Error::buffer(format!(
            "bytes {offset}.. of length {bytes} lie outside a buffer of {}",
            memory.size()
        ))),
    }
}

impl Runtime for Emulator {
    type Buffer = Memory;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn create(&self, _label: &str, bytes: u64, _usage: Usage) -> Result<Memory> {
        if bytes > self.profile.limits.buffer {
            return Err(Error::buffer(format!(
                "a buffer of {bytes} bytes; {} are possible",
                self.profile.limits.buffer
            )));
        }
        Ok(Memory::new(bytes.next_multiple_of(4) as usize))
    }

    fn size(&self, buffer: &Memory) -> u64 {
        buffer.size() as u64
    }

    fn write(&self, buffer: &Memory, offset: u64, bytes: &[u8]) -> Result<()> {
        check(buffer, offset, bytes.len() as u64)?;
        buffer.write(offset as usize, bytes);
        Ok(())
    }

    fn run(&self, dispatches: &[Dispatch<Memory>]) -> Result<()> {
        for dispatch in dispatches {
            let outcome = self.launch(dispatch)?;
            if let Some(report) = outcome.reports.first() {
                let more = outcome.reports.len() - 1;
                lock(&self.shared.reports).extend_from_slice(&outcome.reports);
                return Err(Error::compile(
                    dispatch.spec.label(),
                    format!("{report} (and {more} more reports)"),
                ));
            }
        }
        Ok(())
    }

    async fn read(&self, buffer: &Memory, range: Range<u64>) -> Result<Vec<u8>> {
        check(buffer, range.start, range.end.saturating_sub(range.start))?;
        Ok(buffer.read(range.start as usize, (range.end - range.start) as usize))
    }
}
