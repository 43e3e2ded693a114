//! The Cpu tier: attention on all cores of this machine, with no GPU at all.
//!
//! [`Cpu`] is a [`Runtime`] like any other: it gets the same dispatches, walks the same block lists and tile
//! maps, and stores f32, f16 and bf16 in the same bytes. It computes in f32, in blocks that stay in a core's
//! cache, with the widest vector instructions that the machine has. Results do not depend on the number of cores.
//!
//! On wasm32 it uses one core and blocks while it works: run it in a Worker.

mod backward;
mod captured;
mod forward;
mod launch;
mod lists;
mod matrix;
mod mods;
mod packing;
mod softmax;
mod view;

use std::future::{Future, ready};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use fearless_simd::{Level, dispatch};

use self::launch::{Item, Launch};
use self::lists::TILE;
use self::mods::{Mods, Programs};
use self::view::View;
use crate::error::{Error, Result};
use crate::kernels::{Kernel, NONE};
use crate::runtime::{Binding, Dispatch, Limits, Profile, Runtime, Tier, Usage};
use crate::threads::{Sent, Shared};

/// All cores of this machine as a runtime. Cloning gives another handle.
#[derive(Clone, Debug)]
pub struct Cpu {
    profile: Arc<Profile>,
    cores: usize,
    level: Level,
}

/// Memory of the [`Cpu`] runtime. Cloning gives another handle to the same memory.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<RwLock<Vec<u32>>>);

impl PartialEq for Buffer {
    /// The same memory.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Buffer {
    // A panic while a buffer is locked leaves numbers in it, which is all it ever holds.
    fn words(&self) -> RwLockReadGuard<'_, Vec<u32>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, with: impl FnOnce(&mut [u32])) {
        with(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// All cores.
    ///
    /// ```
    /// use flexattn::{Cpu, Runtime, Tier};
    ///
    /// assert_eq!(Cpu::new().profile().tier, Tier::Cpu);
    /// ```
    pub fn new() -> Self {
        let cores = if cfg!(target_arch = "wasm32") {
            1
        } else {
            std::thread::available_parallelism().map_or(1, usize::from)
        };
        Self::with_cores(cores)
    }

    /// At most this many cores, at least one. The results are the same for any number.
    pub fn with_cores(cores: usize) -> Self {
        let level = Level::new();
        // The level's name is that of its variant, before the fields.
        let name = format!("{level:?}");
        let vectors = name.split(['(', ' ']).next().unwrap_or("").to_lowercase();
        let cores = cores.max(1);
        let profile = Profile {
            adapter: format!("{cores} CPU core{} with {vectors}", if cores == 1 { "" } else { "s" }),
            f16: true,
            software: true,
            limits: Limits {
                storage_binding: u64::from(u32::MAX) * 4,
                buffer: u64::from(u32::MAX) * 4,
                storage_alignment: 4,
                workgroups: u32::MAX,
                ..Limits::default()
            },
            ..Profile::floor(Tier::Cpu)
        };
        Self { profile: Arc::new(profile), cores, level }
    }

    /// Runs `work` on every item, items in any order on any core, and gives the results in the order of the items.
    /// Each worker has a state of its own.
    fn each<S, T: Sent>(
        &self,
        items: &[Item],
        state: impl Fn() -> Result<S> + Shared,
        work: impl Fn(&mut S, &Item) -> Result<T> + Shared,
    ) -> Result<Vec<T>> {
        let next = AtomicUsize::new(0);
        let worker = || -> Result<Vec<(usize, T)>> {
            let (mut state, mut done) = (state()?, Vec::new());
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(i) else { return Ok(done) };
                done.push((i, work(&mut state, item)?));
            }
        };
        let workers = self.cores.min(items.len());
        #[cfg(target_arch = "wasm32")]
        let mut done = if workers > 0 { worker()? } else { Vec::new() };
        #[cfg(not(target_arch = "wasm32"))]
        let mut done = if workers <= 1 {
            worker()?
        } else {
            std::thread::scope(|scope| {
                let others: Vec<_> = (1..workers).map(|_| scope.spawn(worker)).collect();
                let mut done = worker()?;
                for other in others {
                    match other.join() {
                        Ok(part) => done.extend(part?),
                        Err(panic) => std::panic::resume_unwind(panic),
                    }
                }
                Ok::<_, Error>(done)
            })?
        };
        done.sort_unstable_by_key(|&(i, _)| i);
        Ok(done.into_iter().map(|(_, output)| output).collect())
    }

    fn launch(&self, dispatch: &Dispatch<Buffer>) -> Result<()> {
        match dispatch.spec.kernel {
            Kernel::Forward => self.forward(dispatch),
            Kernel::Delta => self.delta(dispatch),
            Kernel::Dsink => self.dsink(dispatch),
            Kernel::Dq => self.dq(dispatch),
            Kernel::Dkv => self.dkv(dispatch),
            Kernel::CapturedRows | Kernel::CapturedColumns => self.captured(dispatch),
            // The others have added to the elements already.
            Kernel::CapturedScatter => Ok(()),
            kernel @ (Kernel::ForwardSubgroup
            | Kernel::DqSubgroup
            | Kernel::DkvSubgroup
            | Kernel::ForwardCoop
            | Kernel::Merge
            | Kernel::DecodeSplit
            | Kernel::DecodeSubgroup
            | Kernel::DecodeCombine
            | Kernel::BlockMask) => Err(Error::unsupported(format!(
                "the Cpu tier has no kernel `{}`; plan for its own profile",
                kernel.entry()
            ))),
        }
    }

    /// Items on all cores, with the mods bound for each worker.
    fn blocks<S: Default, T: Sent>(
        &self,
        launch: &Launch<'_>,
        items: &[Item],
        work: impl for<'a> Fn(&'a Launch<'a>, &mut Mods<'a>, &Item, &mut S) -> Result<T> + Shared,
    ) -> Result<Vec<T>> {
        let grad = launch.spec.kernel.uses_score_grad();
        let programs = Programs::new(&launch.spec.mods, grad)?;
        self.each(
            items,
            || Ok((Mods::new(&programs, launch, 0)?, S::default())),
            |(mods, scratch), item| {
                mods.at_batch(launch, item.b)?;
                work(launch, mods, item, scratch)
            },
        )
    }

    fn forward(&self, dispatch: &Dispatch<Buffer>) -> Result<()> {
        let (params, items, outputs) = with_launch(dispatch, |launch| {
            let p = &launch.params;
            let items = launch.items(launch.spec.tile_q() as usize, p.q_len as usize, p.q_heads as usize);
            let outputs = self.blocks(launch, &items, |launch, mods, item, scratch| {
                Ok(dispatch!(self.level, simd => forward::forward(simd, launch, mods, item, scratch)))
            })?;
            Ok((*p, items, outputs))
        })?;
        let out = View::new(params.out, dispatch.spec.v_dim as usize, dispatch.spec.dtype);
        change(&dispatch.bindings[3], |words| {
            for (item, output) in items.iter().zip(&outputs) {
                store(words, out, item, &output.out, false);
            }
        });
        change(&dispatch.bindings[4], |words| {
            let stats: &mut [f32] = bytemuck::cast_slice_mut(words);
            for (item, output) in items.iter().zip(&outputs) {
                let row =
                    (item.b * params.q_heads as usize + item.h) * params.q_len as usize + item.rows.start;
                for (at, values) in [(params.lse_at, &output.lse), (params.max_at, &output.max)] {
                    if at != NONE {
                        stats[at as usize + row..][..values.len()].copy_from_slice(values);
                    }
                }
            }
        });
        Ok(())
    }

    fn delta(&self, dispatch: &Dispatch<Buffer>) -> Result<()> {
        let (params, items, rows) = with_launch(dispatch, |launch| {
            let p = &launch.params;
            let rows = p.batch as usize * p.q_heads as usize * p.q_len as usize;
            let items = launch.items(8, rows, 1);
            let rows =
                self.each(&items, || Ok(()), |(), item| Ok(backward::delta(launch, item.rows.clone())))?;
            Ok((*p, items, rows))
        })?;
        change(&dispatch.bindings[4], |words| {
            let stats: &mut [f32] = bytemuck::cast_slice_mut(words);
            for (index, row) in items.iter().zip(&rows).flat_map(|(item, rows)| item.rows.clone().zip(rows)) {
                stats[index] = row.lse;
                stats[params.delta_at as usize + index] = row.delta;
                if params.capture_at != NONE {
                    stats[params.capture_at as usize + index] = row.dsink;
                }
            }
        });
        Ok(())
    }

    fn dsink(&self, dispatch: &Dispatch<Buffer>) -> Result<()> {
        let p = with_launch(dispatch, |launch| Ok(launch.params))?;
        let (heads, q_len) = (p.q_heads as usize, p.q_len as usize);
        change(&dispatch.bindings[4], |words| {
            let stats: &mut [f32] = &mut bytemuck::cast_slice_mut(words)[p.capture_at as usize..];
            let (rows, sums) = stats.split_at_mut(p.batch as usize * heads * q_len);
            for (h, sum) in sums[..heads].iter_mut().enumerate() {
                let of_head = (0..p.batch as usize).flat_map(|b| &rows[(b * heads + h) * q_len..][..q_len]);
                *sum = of_head.sum();
            }
        });
        Ok(())
    }

    fn dq(&self, dispatch: &Dispatch<Buffer>) -> Result<()> {
        let (params, items, outputs) = with_launch(dispatch, |launch| {
            let p = &launch.params;
            let items = launch.items(TILE, p.q_len as usize, p.q_heads as usize);
            let outputs = self.blocks(launch, &items, |launch, mods, item, scratch| {
                Ok(dispatch!(self.level, simd => backward::dq(simd, launch, mods, item, scratch)))
            })?;
            Ok((*p, items, outputs))
        })?;
        let dq = View::new(params.dq, dispatch.spec.head_dim as usize, dispatch.spec.dtype);
        change(&dispatch.bindings[7], |words| {
            let add = params.accumulate != 0;
            items.iter().zip(&outputs).for_each(|(item, values)| store(words, dq, item, values, add));
        });
        Ok(())
    }

    fn dkv(&self, dispatch: &Dispatch<Buffer>) -> Result<()> {
        let (params, items, outputs) = with_launch(dispatch, |launch| {
            let p = &launch.params;
            let items = launch.items(TILE, p.kv_len as usize, p.kv_heads as usize);
            let outputs = self.blocks(launch, &items, |launch, mods, item, scratch| {
                dispatch!(self.level, simd => backward::dkv(simd, launch, mods, item, scratch))
            })?;
            Ok((*p, items, outputs))
        })?;
        let dk = View::new(params.dk, dispatch.spec.head_dim as usize, dispatch.spec.dtype);
        let dv = View::new(params.dv, dispatch.spec.v_dim as usize, dispatch.spec.dtype);
        change(&dispatch.bindings[7], |words| {
            for (item, gradients) in items.iter().zip(&outputs) {
                for ((view, values), wanted) in [dk, dv].into_iter().zip(gradients).zip(dispatch.spec.dkv) {
                    if wanted {
                        store(words, view, item, values, params.accumulate != 0);
                    }
                }
            }
        });
        Ok(())
    }
}

impl Cpu {
    /// Items whose summands are in flight at once, per core: they take memory until they are added up.
    const WAVE: usize = 8;

    fn captured(&self, dispatch: &Dispatch<Buffer>) -> Result<()> {
        let sums = with_launch(dispatch, |launch| {
            let p = &launch.params;
            let (batch, heads) = (p.batch as usize, p.q_heads as usize);
            let places = captured::Places::new(launch)?;
            let by_columns = launch.spec.kernel == Kernel::CapturedColumns;
            let items = if by_columns {
                launch.items(TILE, p.kv_len as usize, heads)
            } else if places.pairs() {
                let items = launch.items(TILE, p.q_len as usize, 1);
                let all = |item: &Item| {
                    let rows = item.rows.clone();
                    (0..batch * heads).map(move |i| Item { b: i / heads, h: i % heads, rows: rows.clone() })
                };
                items.iter().flat_map(all).collect()
            } else {
                launch.items(TILE, p.q_len as usize, heads)
            };
            let mut sums = bytemuck::cast_slice::<u32, f32>(launch.words(7)).to_vec();
            for wave in items.chunks(Self::WAVE * self.cores) {
                let summands = self.blocks(launch, wave, |launch, mods, item, scratch| {
                    let bound = &mut places.bind(launch, item.b)?;
                    let places = (&places, bound);
                    Ok(dispatch!(self.level, simd => if by_columns {
                        captured::columns(simd, launch, mods, places, item, scratch)
                    } else {
                        captured::rows(simd, launch, mods, places, item, scratch)
                    }))
                })?;
                for (element, summand) in summands.into_iter().flatten() {
                    sums[element] += summand;
                }
            }
            Ok(sums)
        })?;
        change(&dispatch.bindings[7], |words| words.copy_from_slice(bytemuck::cast_slice(&sums)));
        Ok(())
    }
}

/// Stores the rows of an item, which lie `padded` columns apart; with `add` on top of what is there.
fn store(words: &mut [u32], view: View, item: &Item, values: &[f32], add: bool) {
    let rows = values.chunks_exact(matrix::padded(view.columns));
    let mut widened = Vec::new();
    for (row, values) in item.rows.clone().zip(rows) {
        let row = [item.b, item.h, row];
        if add {
            let old = view.read(words, row, &mut widened);
            let sums: Vec<f32> = old.iter().zip(values).map(|(old, value)| old + value).collect();
            view.write(words, row, &sums);
        } else {
            view.write(words, row, values);
        }
    }
}

/// Calls `with` while the buffers of a dispatch are held for reading.
fn with_launch<T>(dispatch: &Dispatch<Buffer>, with: impl FnOnce(&Launch<'_>) -> Result<T>) -> Result<T> {
    // One buffer may be bound twice (a pool); a lock must not be taken twice, a writer may wait in between.
    let mut held: Vec<(&Buffer, RwLockReadGuard<'_, Vec<u32>>)> = Vec::new();
    for binding in &dispatch.bindings {
        if !held.iter().any(|(buffer, _)| **buffer == binding.buffer) {
            held.push((&binding.buffer, binding.buffer.words()));
        }
    }
    let mut bindings = Vec::with_capacity(dispatch.bindings.len());
    for binding in &dispatch.bindings {
        let words = held.iter().find(|(buffer, _)| **buffer == binding.buffer);
        let words: &[u32] = words.map_or(&[], |(_, words)| words);
        let range = range(binding);
        let part = words.get(range.clone()).ok_or_else(|| {
            Error::buffer(format!("bytes {range:?} * 4 are bound of a buffer of {} bytes", 4 * words.len()))
        })?;
        bindings.push(part);
    }
    with(&Launch::new(&dispatch.spec, bindings, &dispatch.params, dispatch.grid)?)
}

/// The words that a binding covers.
fn range(binding: &Binding<Buffer>) -> Range<usize> {
    binding.offset as usize / 4..(binding.offset + binding.size) as usize / 4
}

fn change(binding: &Binding<Buffer>, with: impl FnOnce(&mut [u32])) {
    binding.buffer.change(|words| with(&mut words[range(binding)]));
}

impl Runtime for Cpu {
    type Buffer = Buffer;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn create(&self, label: &str, bytes: u64, _usage: Usage) -> Result<Buffer> {
        let words = usize::try_from(bytes.div_ceil(4)).unwrap_or(usize::MAX);
        let mut memory = Vec::new();
        memory.try_reserve_exact(words).map_err(|_| Error::OutOfMemory { label: label.to_owned(), bytes })?;
        memory.resize(words, 0);
        Ok(Buffer(Arc::new(RwLock::new(memory))))
    }

    fn size(&self, buffer: &Buffer) -> u64 {
        buffer.words().len() as u64 * 4
    }

    fn write(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut result = Ok(());
        buffer.change(|words| {
            let memory: &mut [u8] = bytemuck::cast_slice_mut(words);
            let end = memory.len();
            let range =
                usize::try_from(offset).ok().and_then(|at| memory.get_mut(at..at.checked_add(bytes.len())?));
            match range {
                Some(part) => part.copy_from_slice(bytes),
                None => result = Err(past_the_end(offset..offset + bytes.len() as u64, end)),
            }
        });
        result
    }

    fn run(&self, dispatches: &[Dispatch<Buffer>]) -> Result<()> {
        dispatches.iter().try_for_each(|dispatch| self.launch(dispatch))
    }

    fn read(&self, buffer: &Buffer, range: Range<u64>) -> impl Future<Output = Result<Vec<u8>>> {
        let words = buffer.words();
        let memory: &[u8] = bytemuck::cast_slice(&words);
        let part = memory.get(range.start as usize..range.end as usize);
        ready(part.map(<[u8]>::to_vec).ok_or_else(|| past_the_end(range, memory.len())))
    }
}

fn past_the_end(range: Range<u64>, end: usize) -> Error {
    Error::buffer(format!("bytes {range:?} reach past the buffer's {end}; make it larger or ask for fewer"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{KernelSpec, Params};
    use crate::reference::{self, Problem};
    use crate::shape::{AttentionShape, DType, Layout};
    use flexattn_testing::problem::{Inputs, Sizes};

    /// Forward without mods, over lists in which everything is full.
    fn dense(cpu: &Cpu, sizes: Sizes, dtype: DType, inputs: &Inputs) -> Result<(Vec<f32>, Vec<f32>)> {
        let shapes = [sizes.q_shape(), sizes.k_shape(), sizes.v_shape(), sizes.out_shape()];
        let [q, k, v, out] = shapes.map(|shape| Layout::contiguous(shape).unwrap());
        let view = |layout: Layout| {
            let batch = if layout.shape[0] == 1 { 0 } else { layout.strides[0] };
            [layout.offset, batch, layout.strides[1], layout.strides[2]].map(|x| x as u32)
        };
        let (q_blocks, kv_blocks) = (sizes.q_len.div_ceil(128) as u32, sizes.kv_len.div_ceil(128) as u32);
        let spec =
            KernelSpec::new(Kernel::Forward, dtype, sizes.head_dim as u32, sizes.v_dim as u32, 1 << 20)?;
        let rows = (sizes.batch * sizes.q_heads * sizes.q_len) as u32;
        let params = Params {
            batch: sizes.batch as u32,
            q_heads: sizes.q_heads as u32,
            kv_heads: sizes.kv_heads as u32,
            group: (sizes.q_heads / sizes.kv_heads) as u32,
            q_len: sizes.q_len as u32,
            kv_len: sizes.kv_len as u32,
            q_blocks,
            kv_blocks,
            mask_batch: 1,
            mask_heads: 1,
            q_offset_at: 0,
            kv_len_at: sizes.batch as u32,
            lists: 2 * sizes.batch as u32,
            sinks_at: NONE,
            max_at: rows,
            scale: 1.0 / (sizes.head_dim as f32).sqrt(),
            groups: (sizes.q_len as u32).div_ceil(spec.tile_q()) * (sizes.batch * sizes.q_heads) as u32,
            fold: u32::MAX,
            q: view(q),
            k: view(k),
            v: view(v),
            out: view(out),
            ..Params::default()
        };
        let mut tables = vec![0; sizes.batch];
        tables.extend(vec![sizes.kv_len as u32; sizes.batch]);
        let runs = params.lists + 4 * q_blocks;
        for block in 0..q_blocks {
            // One run, but the last block as a partial one of full tiles.
            tables.extend([
                runs + 4 * block,
                runs + 4 * block + 2,
                runs + 4 * block + 2,
                runs + 4 * block + 4,
            ]);
        }
        for _ in 0..q_blocks {
            tables.extend([0, kv_blocks - 1, kv_blocks - 1, 0xaaaa_aaaa]);
        }
        let buffer = |bytes: &[u8]| -> Result<Binding<Buffer>> {
            let size = (bytes.len() as u64).next_multiple_of(4);
            let buffer = cpu.create("test", size, Usage::Tensor)?;
            cpu.write(&buffer, 0, bytes)?;
            Ok(Binding { buffer, offset: 0, size })
        };
        let bindings = vec![
            buffer(&dtype.narrow(&inputs.q))?,
            buffer(&dtype.narrow(&inputs.k))?,
            buffer(&dtype.narrow(&inputs.v))?,
            buffer(&dtype.narrow(&vec![0.0; out.elements()]))?,
            buffer(&vec![0; 8 * rows as usize])?,
            buffer(bytemuck::cast_slice(&tables))?,
            buffer(&[0; 4])?,
            buffer(&[0; 4])?,
        ];
        let grid = [params.groups, 1, 1];
        let params = bytemuck::bytes_of(&params).to_vec();
        cpu.run(&[Dispatch { spec: Arc::new(spec), bindings: bindings.clone(), params, grid }])?;
        let read =
            |binding: &Binding<Buffer>| bytemuck::cast_slice::<u32, u8>(&binding.buffer.words()).to_vec();
        let out_len = out.elements() * dtype.size();
        Ok((dtype.widen(&read(&bindings[3])[..out_len]), DType::F32.widen(&read(&bindings[4]))))
    }

    #[test]
    fn forward_agrees_with_the_reference_at_any_size_and_dtype() {
        let square = Sizes::square(2, 2, 150, 24);
        let all = [
            square,
            Sizes { q_len: 1, kv_len: 300, ..square },
            Sizes { q_len: 37, kv_len: 129, head_dim: 3, v_dim: 40, ..square },
            Sizes { q_heads: 6, kv_batch: 1, head_dim: 70, v_dim: 5, ..square },
        ];
        for (sizes, dtype) in all.into_iter().flat_map(|sizes| DType::ALL.map(|dtype| (sizes, dtype))) {
            let inputs = Inputs::normal(sizes, 7);
            let (out, stats) = dense(&Cpu::new(), sizes, dtype, &inputs).unwrap();
            let layout = |shape| Layout::contiguous(shape).unwrap();
            let shape = AttentionShape::new(
                &layout(sizes.q_shape()),
                &layout(sizes.k_shape()),
                &layout(sizes.v_shape()),
            )
            .unwrap();
            let gold = reference::forward(&Problem::new(shape, &inputs.q, &inputs.k, &inputs.v)).unwrap();
            let unit = match dtype {
                DType::F32 => 1e-6,
                DType::F16 => 1e-3,
                DType::BF16 => 8e-3,
            };
            for (got, gold) in out.iter().zip(&gold.out) {
                assert!((f64::from(*got) - gold).abs() < unit, "{sizes:?} {dtype}: {got}, not {gold}");
            }
            for (got, gold) in stats.iter().zip(gold.lse.iter().chain(&gold.max)) {
                assert!(
                    (f64::from(*got) - gold).abs() < 2e-6 * gold.abs().max(1.0),
                    "{sizes:?}: {got}, not {gold}"
                );
            }
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_cores() {
        let sizes = Sizes::square(1, 3, 300, 16);
        let inputs = Inputs::normal(sizes, 3);
        let one = dense(&Cpu::with_cores(1), sizes, DType::F32, &inputs).unwrap();
        let five = dense(&Cpu::with_cores(5), sizes, DType::F32, &inputs).unwrap();
        assert_eq!(one, five);
    }
}
