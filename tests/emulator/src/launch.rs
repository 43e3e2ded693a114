//! Dispatches: memory, options, what was counted and what was found.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flexattn::{Error, Result};

use crate::compile::Kernel;

/// Memory that kernels read and write, a handle to it: an `MTLBuffer`.
#[derive(Clone)]
pub struct Memory {
    /// In 16-byte units, so that every type is aligned.
    words: Arc<Mutex<Box<[u128]>>>,
    bytes: usize,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.bytes)
    }
}

/// The same memory, not the same bytes.
impl PartialEq for Memory {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.words, &other.words)
    }
}

impl Memory {
    /// Zeros.
    pub fn new(bytes: usize) -> Self {
        let words = bytes.div_ceil(16);
        Self { words: Arc::new(Mutex::new(vec![0; words].into())), bytes }
    }

    /// A copy of these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let memory = Self::new(bytes.len());
        memory.write(0, bytes);
        memory
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        self.bytes
    }

    fn lock(&self) -> MutexGuard<'_, Box<[u128]>> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Overwrites bytes from `offset` on.
    ///
    /// # Panics
    ///
    /// Past the end.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(
            offset + bytes.len() <= self.bytes,
            "write of {} bytes at {offset} of {}",
            bytes.len(),
            self.bytes
        );
        bytemuck_bytes(&mut self.lock())[offset..][..bytes.len()].copy_from_slice(bytes);
    }

    /// A copy of `bytes` bytes from `offset` on.
    ///
    /// # Panics
    ///
    /// Past the end.
    pub fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.bytes, "read of {bytes} bytes at {offset} of {}", self.bytes);
        bytemuck_bytes(&mut self.lock())[offset..][..bytes].to_vec()
    }
}

fn bytemuck_bytes(words: &mut [u128]) -> &mut [u8] {
    let len = size_of_val(words);
    // SAFETY: any bytes are valid as u8, and the borrow of `words` lasts as long as the result.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}

/// A range of a memory, bound at `[[buffer(index)]]`.
#[derive(Clone, Debug)]
pub struct Bound {
    /// The buffer index.
    pub index: u32,
    /// The memory.
    pub memory: Memory,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

impl Bound {
    /// All of a memory.
    pub fn whole(index: u32, memory: &Memory) -> Self {
        Self { index, memory: memory.clone(), offset: 0, size: memory.size() }
    }
}

/// In which order the threads of a threadgroup run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Thread after thread, each until it waits.
    RoundRobin = 0,
    /// The first simdgroup as far as it can go, then the next.
    Greedy = 1,
    /// The last simdgroup as far as it can go, last lane first.
    GreedyReverse = 2,
}

impl Schedule {
    /// All of them: what one order hides, another shows.
    pub const ALL: [Schedule; 3] = [Schedule::RoundRobin, Schedule::Greedy, Schedule::GreedyReverse];
}

/// In which order a matrix product of 8 terms is summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MmaOrder {
    /// From the accumulator, first term first, each step fused.
    #[default]
    Forward = 0,
    /// From the accumulator, last term first, each step fused.
    Reverse = 1,
    /// The products in pairs, then the accumulator.
    Pairwise = 2,
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The schedules, one run each; results must be equal bit by bit.
    pub schedules: Vec<Schedule>,
    /// Moves exp and exp2 by up to 2 units in the last place, another way for each seed; 0 is off.
    pub perturb_exp2: u32,
    /// The order within a matrix product, which the hardware does not promise.
    pub mma_order: MmaOrder,
    /// Count the distinct device bytes of each threadgroup (takes memory).
    pub count_unique: bool,
    /// Memory accesses and rendezvous before a dispatch counts as endless.
    pub budget: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            schedules: vec![Schedule::RoundRobin],
            perturb_exp2: 0,
            mma_order: MmaOrder::Forward,
            count_unique: false,
            budget: 20_000_000_000,
        }
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What a dispatch did. Simdgroup operations count once per simdgroup, everything else once
        /// per thread; bytes are those that the threads asked for.
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Device bytes read per buffer index.
            pub read_of: [u64; 32],
            /// Device bytes written per buffer index.
            pub written_of: [u64; 32],
        }

        impl std::ops::AddAssign for Counters {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)+
                for i in 0..32 {
                    self.read_of[i] += other.read_of[i];
                    self.written_of[i] += other.written_of[i];
                }
            }
        }
    };
}

counters! {
    /// 8x8x8 multiply-accumulates.
    mma,
    /// Of these, with a half left operand.
    mma_half_a,
    /// Of these, with a half right operand.
    mma_half_b,
    /// Shuffles and broadcasts.
    shuffles,
    /// Reductions over a simdgroup: simd_sum, simd_max, simd_any and their like.
    reductions,
    /// Simdgroup barriers, scheduling fences included.
    simdgroup_barriers,
    /// Of these, the ones that order memory.
    ordering_simdgroup_barriers,
    /// Threadgroup barriers, once per threadgroup.
    barriers,
    /// exp, exp2, log, sin and their like, per thread.
    transcendentals,
    /// Float additions, multiplications, divisions and fused pairs outside matrix products, per thread
    /// and vector element.
    fp,
    /// Conversions between float types and between floats and integers.
    conversions,
    /// Evaluations of mask_mod.
    mask_calls,
    /// Evaluations of score_mod.
    score_calls,
    /// Evaluations of row_mod.
    row_calls,
    /// Device bytes read.
    device_read,
    /// Device bytes written.
    device_write,
    /// Distinct device bytes read by each threadgroup, summed over threadgroups.
    device_unique,
    /// Bytes read through `constant` pointers.
    constant_read,
    /// Threadgroup bytes read.
    threadgroup_read,
    /// Threadgroup bytes written.
    threadgroup_write,
    /// Threadgroups.
    threadgroups,
    /// Threads.
    threads,
    /// Changes from one fiber to another.
    switches,
}

/// What is wrong with a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Problem {
    /// An access outside the buffer that its pointer came from, or outside every threadgroup array.
    OutOfBounds,
    /// Two accesses to the same bytes, one a write, that no barrier orders.
    Race,
    /// A read of threadgroup memory that nobody wrote.
    Uninitialised,
    /// A barrier or simdgroup operation that some of its threads do not reach.
    Divergence,
    /// An access whose address is no multiple of what its type needs.
    Misaligned,
    /// A write to a buffer that the kernel declares const.
    ReadOnly,
    /// No end in sight.
    Endless,
    /// Results that depend on the schedule.
    Nondeterministic,
}

/// A finding, with the kernel's line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What is wrong.
    pub problem: Problem,
    /// The line of the kernel's text, from 1; 0 when unknown.
    pub line: u32,
    /// The other line of a race or of a divergence; 0 when there is none.
    pub other_line: u32,
    /// How often it was seen.
    pub count: u64,
    message: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// What a dispatch did and what was found.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Counted in the first schedule.
    pub counters: Counters,
    /// Findings of all schedules; none is what a correct kernel has.
    pub reports: Vec<Report>,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawReport {
    kind: u32,
    space: u32,
    line: u32,
    other_line: u32,
    thread: u32,
    other_thread: u32,
    group: u32,
    op: u32,
    reached: u32,
    expected: u32,
    write: u32,
    binding: u32,
    offset: i64,
    count: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawRange {
    begin: usize,
    end: usize,
    memory: u32,
    writable: u32,
    binding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawMemory {
    begin: usize,
    end: usize,
    writable: u32,
}

#[repr(C)]
struct RawLaunch {
    ranges: *const RawRange,
    range_count: u32,
    memories: *const RawMemory,
    memory_count: u32,
    grid: [u32; 3],
    size: [u32; 3],
    entry: u32,
    schedule: u32,
    perturb_exp2: u32,
    mma_order: u32,
    count_unique: u32,
    budget: u64,
    counters: *mut Counters,
    reports: *mut RawReport,
    report_capacity: u32,
    report_count: u32,
}

impl Kernel {
    /// Runs an entry point over `grid` threadgroups of `threads` threads, once per schedule. Memory
    /// ends as the first schedule left it.
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`] when a buffer that the entry takes is not bound, [`Error::Unsupported`] for an
    /// entry that is not there or a size over 1024 threads. What the kernel does wrong is no error but
    /// in [`Outcome::reports`].
    pub fn launch(
        &self,
        entry: &str,
        bound: &[Bound],
        grid: [u32; 3],
        threads: [u32; 3],
        options: &Options,
    ) -> Result<Outcome> {
        let found = self.entries.iter().position(|other| other.name == entry);
        let index = found.ok_or_else(|| Error::unsupported(format!("the kernel has no entry `{entry}`")))?;
        let count = threads.iter().product::<u32>();
        if count == 0 || count > 1024 {
            return Err(Error::unsupported(format!(
                "a threadgroup of {count} threads; 1 to 1024 are possible"
            )));
        }
        let writes = &self.entries[index].writes;
        // Each memory once, in one order for all threads of this program.
        let mut memories: Vec<&Memory> = bound.iter().map(|bound| &bound.memory).collect();
        memories.sort_by_key(|memory| Arc::as_ptr(&memory.words).addr());
        memories.dedup_by_key(|memory| Arc::as_ptr(&memory.words).addr());
        let library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        let mut guards: Vec<_> = memories.iter().map(|memory| memory.lock()).collect();

        let mut raw_memories = Vec::new();
        for (memory, guard) in memories.iter().zip(&mut guards) {
            let begin = bytemuck_bytes(guard).as_mut_ptr().addr();
            let mut bindings = bound.iter().filter(|bound| Arc::ptr_eq(&bound.memory.words, &memory.words));
            raw_memories.push(RawMemory {
                begin,
                end: begin + memory.bytes,
                writable: bindings.any(|bound| writes.contains(&bound.index)).into(),
            });
        }
        let mut ranges = Vec::new();
        for bound in bound {
            let memory = memories
                .iter()
                .position(|memory| Arc::ptr_eq(&memory.words, &bound.memory.words))
                .unwrap_or(0);
            if bound.index > 30 {
                return Err(Error::buffer(format!("buffer index {} is over 30", bound.index)));
            }
            if bound.offset + bound.size > bound.memory.bytes {
                return Err(Error::buffer(format!(
                    "buffer {} is bound to bytes {}..{} of a memory of {}",
                    bound.index,
                    bound.offset,
                    bound.offset + bound.size,
                    bound.memory.bytes
                )));
            }
            let begin = bytemuck_bytes(&mut guards[memory])[bound.offset..].as_mut_ptr().addr();
            let (writable, binding) = (writes.contains(&bound.index).into(), bound.index);
            let memory = memory as u32;
            ranges.push(RawRange { begin, end: begin + bound.size, memory, writable, binding });
        }

        let before: Vec<Box<[u128]>> = if options.schedules.len() > 1 {
            guards.iter().map(|guard| guard.to_vec().into()).collect()
        } else {
            Vec::new()
        };
        let mut first: Option<Vec<Box<[u128]>>> = None;
        let mut outcome = Outcome::default();
        for (run, &schedule) in options.schedules.iter().enumerate() {
            if run > 0 {
                let result: Vec<Box<[u128]>> = guards.iter().map(|guard| guard.to_vec().into()).collect();
                first.get_or_insert(result);
                for (guard, before) in guards.iter_mut().zip(&before) {
                    guard.copy_from_slice(before);
                }
            }
            let mut counters = Counters::default();
            let mut reports = [RawReport::default(); 64];
            let mut raw = RawLaunch {
                ranges: ranges.as_ptr(),
                range_count: ranges.len() as u32,
                memories: raw_memories.as_ptr(),
                memory_count: raw_memories.len() as u32,
                grid,
                size: threads,
                entry: index as u32,
                schedule: schedule as u32,
                perturb_exp2: options.perturb_exp2,
                mma_order: options.mma_order as u32,
                count_unique: options.count_unique.into(),
                budget: options.budget,
                counters: &mut counters,
                reports: reports.as_mut_ptr(),
                report_capacity: reports.len() as u32,
                report_count: 0,
            };
            // SAFETY: the object exports this function with this signature (runtime.cpp), RawLaunch has
            // the fields of its Launch, and every pointer in it outlives the call. The memories are
            // locked, and the kernel's accesses are checked against them before they are made.
            let status = unsafe {
                let launch = library.get::<unsafe extern "C" fn(*mut RawLaunch) -> i32>(b"emu_launch\0");
                let launch = launch.map_err(|error| Error::compile("msl", error.to_string()))?;
                launch(&mut raw)
            };
            if status == 1 {
                return Err(Error::compile("msl", "the emulator got no memory for its stacks"));
            }
            for report in &reports[..raw.report_count as usize] {
                let report = self.explain(report, threads);
                if !outcome.reports.iter().any(|old| {
                    old.problem == report.problem
                        && old.line == report.line
                        && old.other_line == report.other_line
                }) {
                    outcome.reports.push(report);
                }
            }
            if run == 0 {
                outcome.counters = counters;
            } else if let Some(first) = &first {
                let differs = guards.iter().zip(first).any(|(guard, first)| guard[..] != first[..]);
                if differs && outcome.reports.is_empty() {
                    outcome.reports.push(Report {
                        problem: Problem::Nondeterministic,
                        line: 0,
                        other_line: 0,
                        count: 1,
                        message: format!(
                            "`{entry}` leaves other bytes under {schedule:?} than under {:?}",
                            options.schedules[0]
                        ),
                    });
                }
            }
        }
        if let Some(first) = first {
            for (guard, first) in guards.iter_mut().zip(first) {
                guard.copy_from_slice(&first);
            }
        }
        Ok(outcome)
    }

    fn explain(&self, raw: &RawReport, threads: [u32; 3]) -> Report {
        let problems = [
            Problem::OutOfBounds,
            Problem::Race,
            Problem::Uninitialised,
            Problem::Divergence,
            Problem::Misaligned,
            Problem::ReadOnly,
            Problem::Endless,
        ];
        let problem = problems[raw.kind as usize % problems.len()];
        let space = ["", "device", "constant", "threadgroup"][raw.space as usize % 4];
        let access = if raw.write == 1 { "write" } else { "read" };
        let at = |line: u32| format!("line {line} `{}`", self.line(line));
        let place = match raw.space {
            3 => format!("byte {} of threadgroup memory", raw.offset),
            _ if raw.binding == u32::MAX => "an address that came from no buffer".to_owned(),
            _ => format!("byte {} of buffer {}", raw.offset, raw.binding),
        };
        let who = format!("thread {} of threadgroup {}", raw.thread, raw.group);
        let op = [
            "",
            "threadgroup_barrier",
            "simdgroup_barrier",
            "shuffle",
            "simd reduction",
            "multiply_accumulate",
            "simdgroup_load or store",
        ][raw.op as usize % 7];
        let message = match problem {
            Problem::OutOfBounds => {
                format!("{space} {access} out of bounds at {}: {place}, {who}", at(raw.line))
            }
            Problem::Race => {
                let other = if raw.other_thread == u32::MAX { "a reader" } else { "a writer" };
                format!(
                    "race: {space} {access} at {} by {who} and {other} at {} are not ordered: {place}",
                    at(raw.line),
                    at(raw.other_line)
                )
            }
            Problem::Uninitialised => {
                format!("read of threadgroup memory that nobody wrote at {}: {place}, {who}", at(raw.line))
            }
            Problem::Divergence if raw.other_line != 0 => {
                format!("{op} at {} while other threads wait at {}, {who}", at(raw.line), at(raw.other_line))
            }
            Problem::Divergence => format!(
                "{op} at {} is reached by {} of {} threads, {who}",
                at(raw.line),
                raw.reached,
                if raw.op == 1 { threads.iter().product() } else { raw.expected }
            ),
            Problem::Misaligned => {
                format!(
                    "{space} access at {} needs an alignment of {} bytes, {who}",
                    at(raw.line),
                    raw.expected
                )
            }
            Problem::ReadOnly => {
                format!("write at {} to buffer {}, which is declared const, {who}", at(raw.line), raw.binding)
            }
            Problem::Endless | Problem::Nondeterministic => {
                format!("no end in sight at {}, {who}", at(raw.line))
            }
        };
        Report { problem, line: raw.line, other_line: raw.other_line, count: raw.count, message }
    }
}
