//! The [`Runtime`] of a page: its `GPUDevice`, or WebAssembly itself where there is none.
//!
//! Nothing here blocks. Work that cannot start at once (a kernel is still compiling, or the CPU has to
//! let the page breathe) waits in a queue, and everything that comes later waits behind it, so that the
//! order of calls is the order of effects. A [`Call`] collects what went wrong on the way.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};

use flexattn::{Cpu, Dispatch, Error, Profile, Result, Runtime, Usage};
use js_sys::futures::spawn_local;
use js_sys::{ArrayBuffer, Uint8Array};
use wasm_bindgen::{JsCast, JsValue};
use web_sys::GpuBuffer;

use crate::error::message;
use crate::webgpu::{COPY_DST, COPY_SRC, STORAGE, SharedGpu};

/// A machine that a page offers. Clones are handles to the same one.
#[derive(Clone)]
pub(crate) struct Page(Rc<Inner>);

struct Inner {
    profile: Profile,
    engine: Engine,
    queue: RefCell<VecDeque<Job>>,
    draining: Cell<bool>,
    /// The call that is giving work; none between calls.
    call: RefCell<Option<Rc<Call>>>,
    lost: RefCell<Option<String>>,
    scratch: RefCell<HashMap<&'static str, Buffer>>,
    constants: RefCell<Constants>,
}

enum Engine {
    Gpu(SharedGpu),
    Cpu(Cpu),
}

struct Job {
    work: Work,
    call: Rc<Call>,
}

enum Work {
    Run(Vec<Dispatch<Buffer>>),
    Write(Buffer, u64, Vec<u8>),
    Copy(Buffer, Range<u64>, Buffer),
}

/// One call of the API: how much of it is outstanding, and the first thing that went wrong.
#[derive(Default)]
pub(crate) struct Call {
    jobs: Cell<usize>,
    checks: Cell<usize>,
    failed: RefCell<Option<Error>>,
    wakers: RefCell<Vec<Waker>>,
}

impl Call {
    fn fail(&self, error: Error) {
        self.failed.borrow_mut().get_or_insert(error);
    }

    fn wake(&self) {
        for waker in self.wakers.borrow_mut().drain(..) {
            waker.wake();
        }
    }

    async fn wait(&self, done: impl Fn(&Self) -> bool) -> Result<()> {
        poll_fn(|context| {
            if done(self) {
                return Poll::Ready(());
            }
            self.wakers.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
        match self.failed.borrow_mut().take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Until all work of the call is submitted.
    pub(crate) async fn submitted(&self) -> Result<()> {
        self.wait(|call| call.jobs.get() == 0).await
    }

    /// Until the browser has also checked it.
    pub(crate) async fn checked(&self) -> Result<()> {
        self.wait(|call| call.jobs.get() == 0 && call.checks.get() == 0).await
    }
}

/// Memory of a machine. Freed with the last handle, unless a page owns it.
#[derive(Clone)]
pub(crate) struct Buffer(Rc<Memory>);

enum Memory {
    Gpu { buffer: GpuBuffer, bytes: u64, ours: Cell<bool> },
    Cpu { buffer: flexattn::cpu::Buffer, bytes: u64 },
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Gpu { buffer, ours, .. } = self
            && ours.get()
        {
            buffer.destroy();
        }
    }
}

impl PartialEq for Buffer {
    /// The same memory.
    fn eq(&self, other: &Self) -> bool {
        match (&*self.0, &*other.0) {
            (Memory::Gpu { buffer: a, .. }, Memory::Gpu { buffer: b, .. }) => a == b,
            _ => Rc::ptr_eq(&self.0, &other.0),
        }
    }
}

impl Buffer {
    /// A page's own buffer, used in place.
    pub(crate) fn adopt(buffer: GpuBuffer) -> Self {
        let bytes = buffer.size() as u64;
        Self(Rc::new(Memory::Gpu { buffer, bytes, ours: Cell::new(false) }))
    }

    /// A buffer that was made here.
    pub(crate) fn own(buffer: GpuBuffer) -> Self {
        let bytes = buffer.size() as u64;
        Self(Rc::new(Memory::Gpu { buffer, bytes, ours: Cell::new(true) }))
    }

    /// Hands the buffer to the page, which destroys it.
    pub(crate) fn release(&self) -> Result<GpuBuffer> {
        if let Memory::Gpu { ours, .. } = &*self.0 {
            ours.set(false);
        }
        self.gpu().cloned()
    }

    pub(crate) fn gpu(&self) -> Result<&GpuBuffer> {
        match &*self.0 {
            Memory::Gpu { buffer, .. } => Ok(buffer),
            Memory::Cpu { .. } => {
                Err(Error::buffer("the buffer lies in WebAssembly memory, not on a GPU device"))
            }
        }
    }

    pub(crate) fn cpu(&self) -> Result<&flexattn::cpu::Buffer> {
        match &*self.0 {
            Memory::Cpu { buffer, .. } => Ok(buffer),
            Memory::Gpu { .. } => {
                Err(Error::buffer("the buffer lies on a GPU device, not in WebAssembly memory"))
            }
        }
    }

    fn size(&self) -> u64 {
        match &*self.0 {
            Memory::Gpu { bytes, .. } | Memory::Cpu { bytes, .. } => *bytes,
        }
    }

    fn check(&self, offset: u64, length: u64) -> Result<()> {
        let size = self.size();
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(()),
            _ => Err(Error::buffer(format!(
                "bytes {offset}..{} were asked for but the buffer has {size}",
                offset.saturating_add(length)
            ))),
        }
    }
}

/// Read-only buffers by content, the most recently used last.
#[derive(Default)]
struct Constants {
    entries: VecDeque<(u128, Buffer)>,
    bytes: u64,
}

impl Constants {
    const ENTRIES: usize = 256;
    const BYTES: u64 = 64 << 20;

    fn get(&mut self, key: u128) -> Option<Buffer> {
        let at = self.entries.iter().position(|(of, _)| *of == key)?;
        let entry = self.entries.remove(at)?;
        let buffer = entry.1.clone();
        self.entries.push_back(entry);
        Some(buffer)
    }

    fn put(&mut self, key: u128, buffer: Buffer) {
        self.bytes += buffer.size();
        self.entries.push_back((key, buffer));
        while self.entries.len() > Self::ENTRIES || (self.bytes > Self::BYTES && self.entries.len() > 1) {
            if let Some((_, old)) = self.entries.pop_front() {
                self.bytes -= old.size();
            }
        }
    }
}

impl Page {
    /// A page's device.
    pub(crate) fn gpu(profile: Profile, gpu: SharedGpu) -> Self {
        let page = Self::new(profile, Engine::Gpu(gpu.clone()));
        let inner: Weak<Inner> = Rc::downgrade(&page.0);
        let lost = gpu.device.lost();
        spawn_local(async move {
            let Ok(info) = lost.await else { return };
            if let Some(inner) = inner.upgrade() {
                *inner.lost.borrow_mut() = Some(info.message());
            }
        });
        page
    }

    /// WebAssembly alone.
    pub(crate) fn cpu(profile: Profile, cpu: Cpu) -> Self {
        Self::new(profile, Engine::Cpu(cpu))
    }

    fn new(profile: Profile, engine: Engine) -> Self {
        Self(Rc::new(Inner {
            profile,
            engine,
            queue: RefCell::default(),
            draining: Cell::new(false),
            call: RefCell::default(),
            lost: RefCell::default(),
            scratch: RefCell::default(),
            constants: RefCell::default(),
        }))
    }

    /// The device, unless this is the cpu tier.
    pub(crate) fn device(&self) -> Option<&SharedGpu> {
        match &self.0.engine {
            Engine::Gpu(gpu) => Some(gpu),
            Engine::Cpu(_) => None,
        }
    }

    /// Forgets caches, and destroys the device if it is ours.
    pub(crate) fn dispose(&self) {
        self.0.scratch.borrow_mut().clear();
        *self.0.constants.borrow_mut() = Constants::default();
        if let Some(gpu) = self.device()
            && gpu.owned
        {
            gpu.device.destroy();
        }
    }

    /// Runs the part of an API call that gives work to the machine. What goes wrong with that work,
    /// at once or later, belongs to the returned call.
    pub(crate) fn call<T>(&self, give: impl FnOnce() -> Result<T>) -> Result<(T, Rc<Call>)> {
        self.alive()?;
        let call = Rc::new(Call::default());
        let before = self.0.call.replace(Some(call.clone()));
        let given = give();
        if let Engine::Gpu(gpu) = &self.0.engine {
            gpu.flush();
        }
        self.check(&call);
        self.0.call.replace(before);
        given.map(|given| (given, call))
    }

    /// The call that gives work now, or for what is done between calls, one of its own.
    fn current(&self) -> Rc<Call> {
        self.0.call.borrow().clone().unwrap_or_default()
    }

    fn alive(&self) -> Result<()> {
        match &*self.0.lost.borrow() {
            Some(reason) => Err(Error::DeviceLost(reason.clone())),
            None => Ok(()),
        }
    }

    /// Sends the verdict of the open error scopes to the call.
    fn check(&self, call: &Rc<Call>) {
        let Engine::Gpu(gpu) = &self.0.engine else { return };
        let Some([validation, memory]) = gpu.leave() else { return };
        call.checks.set(call.checks.get() + 1);
        let call = call.clone();
        spawn_local(async move {
            // A scope that cannot be popped belongs to a lost device, which is reported as such.
            let validation = validation.await.ok().and_then(|error| error.into_option());
            let memory = memory.await.ok().and_then(|error| error.into_option());
            let error = match (memory, validation) {
                (Some(_), _) => Some(Error::OutOfMemory { label: "this call".into(), bytes: 0 }),
                (None, Some(error)) => Some(Error::buffer(error.message())),
                (None, None) => None,
            };
            if let Some(error) = error {
                call.fail(error);
            }
            call.checks.set(call.checks.get() - 1);
            call.wake();
        });
    }

    fn enqueue(&self, work: Work) {
        let call = self.current();
        call.jobs.set(call.jobs.get() + 1);
        self.0.queue.borrow_mut().push_back(Job { work, call });
        if !self.0.draining.replace(true) {
            let page = self.clone();
            spawn_local(async move { page.drain().await });
        }
    }

    async fn drain(&self) {
        loop {
            let Some(job) = self.0.queue.borrow_mut().pop_front() else { break };
            let result = self.work(&job).await;
            if let Err(error) = result {
                job.call.fail(error);
            }
            job.call.jobs.set(job.call.jobs.get() - 1);
            job.call.wake();
        }
        self.0.draining.set(false);
    }

    async fn work(&self, job: &Job) -> Result<()> {
        self.alive()?;
        match (&self.0.engine, &job.work) {
            (Engine::Gpu(gpu), Work::Run(dispatches)) => {
                for dispatch in dispatches {
                    gpu.compiled(&dispatch.spec).await?;
                }
                self.alive()?;
                let recorded = gpu.record(dispatches);
                gpu.flush();
                self.check(&job.call);
                recorded
            }
            (Engine::Gpu(gpu), Work::Write(buffer, offset, bytes)) => {
                gpu.write(buffer.gpu()?, *offset, bytes)
            }
            (Engine::Gpu(gpu), Work::Copy(from, range, to)) => {
                let copied = gpu.copy(from, range.clone(), to);
                gpu.flush();
                self.check(&job.call);
                copied
            }
            (Engine::Cpu(cpu), Work::Copy(from, range, to)) => {
                let bytes = cpu.read(from.cpu()?, range.clone()).await?;
                cpu.write(to.cpu()?, 0, &bytes)
            }
            (Engine::Cpu(cpu), Work::Run(dispatches)) => crate::cpu::run(cpu, dispatches).await,
            (Engine::Cpu(cpu), Work::Write(buffer, offset, bytes)) => {
                cpu.write(buffer.cpu()?, *offset, bytes)
            }
        }
    }

    fn idle(&self) -> bool {
        !self.0.draining.get()
    }

    /// A buffer with the bytes of a typed array.
    pub(crate) fn upload(&self, label: &str, array: &Uint8Array) -> Result<Buffer> {
        let length = array.length();
        let buffer = self.create(label, length.into(), Usage::Tensor)?;
        match &self.0.engine {
            Engine::Cpu(cpu) => cpu.write(buffer.cpu()?, 0, &array.to_vec())?,
            Engine::Gpu(gpu) if length.is_multiple_of(4) => gpu.write_array(buffer.gpu()?, array)?,
            Engine::Gpu(gpu) => {
                let mut bytes = array.to_vec();
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                gpu.write(buffer.gpu()?, 0, &bytes)?;
            }
        }
        Ok(buffer)
    }

    /// Copies a range of whole words to the start of another buffer.
    pub(crate) fn copy(&self, from: &Buffer, range: Range<u64>, to: &Buffer) -> Result<()> {
        self.alive()?;
        from.check(range.start, range.end - range.start)?;
        match &self.0.engine {
            Engine::Gpu(gpu) if self.idle() => gpu.copy(from, range, to),
            _ => {
                self.enqueue(Work::Copy(from.clone(), range, to.clone()));
                Ok(())
            }
        }
    }

    /// The bytes of each range as an ArrayBuffer of its own, after all work given so far. When nothing
    /// waits in the queue, the copy joins the submit that is open.
    pub(crate) fn fetch(
        &self,
        ranges: Vec<(Buffer, Range<u64>)>,
    ) -> impl Future<Output = Result<Vec<ArrayBuffer>>> + use<> {
        let call = self.current();
        let page = self.clone();
        // Widened to whole words, which is how a GPU copies.
        let whole: Vec<(Buffer, Range<u64>)> = ranges
            .iter()
            .map(|(buffer, range)| (buffer.clone(), range.start / 4 * 4..range.end.next_multiple_of(4)))
            .collect();
        let early = match &self.0.engine {
            Engine::Gpu(gpu) if self.idle() => {
                let staged = gpu.stage(&whole);
                // Now, for the page's own scopes: no call may be about to end that would do it.
                self.check(&call);
                Some(staged)
            }
            _ => None,
        };
        async move {
            for (buffer, range) in &ranges {
                buffer.check(range.start, range.end - range.start)?;
            }
            let staged = match (&page.0.engine, early) {
                (_, Some(staged)) => staged?,
                (Engine::Gpu(gpu), None) => {
                    call.submitted().await?;
                    let staged = gpu.stage(&whole);
                    page.check(&call);
                    staged?
                }
                (Engine::Cpu(cpu), None) => {
                    call.submitted().await?;
                    let mut arrays = Vec::new();
                    for (buffer, range) in &ranges {
                        let bytes = cpu.read(buffer.cpu()?, range.clone()).await?;
                        arrays.push(Uint8Array::from(bytes.as_slice()).buffer().unchecked_into());
                    }
                    return Ok(arrays);
                }
            };
            let arrays = match staged.arrays().await {
                Ok(arrays) => arrays,
                Err(exception) => return Err(page.explain(&exception).await),
            };
            call.checked().await?;
            Ok(ranges
                .iter()
                .zip(&whole)
                .zip(arrays)
                .map(|(((_, range), (_, whole)), array)| {
                    let (from, to) = (range.start - whole.start, range.end - whole.start);
                    if from == 0 && to == whole.end - whole.start {
                        array
                    } else {
                        array.slice_with_end(from as u32, to as u32)
                    }
                })
                .collect())
        }
    }

    /// Why the browser refused to map a buffer: a lost device, if that is what happened.
    async fn explain(&self, exception: &JsValue) -> Error {
        // The promise of the loss and the rejection that it causes may come in either order.
        let asked = js_sys::Date::now();
        while js_sys::Date::now() - asked < 250.0 {
            if let Err(lost) = self.alive() {
                return lost;
            }
            crate::pause().await;
        }
        Error::buffer(message(exception))
    }

    /// Until everything submitted has run.
    pub(crate) fn finished(&self) -> impl Future<Output = Result<()>> + use<> {
        let page = self.clone();
        async move {
            while !page.idle() {
                crate::pause().await;
            }
            if let Some(gpu) = page.device() {
                let done = gpu.device.queue().on_submitted_work_done();
                if let Err(exception) = done.await {
                    return Err(page.explain(&exception).await);
                }
                crate::pause().await;
            }
            page.alive()
        }
    }
}

impl Runtime for Page {
    type Buffer = Buffer;

    fn profile(&self) -> &Profile {
        &self.0.profile
    }

    fn create(&self, label: &str, bytes: u64, usage: Usage) -> Result<Buffer> {
        self.alive()?;
        let bytes = bytes.next_multiple_of(4).max(4);
        match &self.0.engine {
            Engine::Gpu(gpu) => {
                let limit = self.0.profile.limits.buffer;
                if bytes > limit {
                    return Err(Error::Limit {
                        what: label.to_owned(),
                        limit: "maxBufferSize",
                        needed: bytes,
                        available: limit,
                        remedy: "use fewer heads or shorter lengths per call".into(),
                    });
                }
                gpu.enter();
                let usage = match usage {
                    Usage::Constant => STORAGE | COPY_DST,
                    Usage::Tensor | Usage::Scratch => STORAGE | COPY_SRC | COPY_DST,
                };
                let buffer = gpu.create(label, bytes, usage)?;
                Ok(Buffer::own(buffer))
            }
            Engine::Cpu(cpu) => {
                let buffer = cpu.create(label, bytes, usage)?;
                Ok(Buffer(Rc::new(Memory::Cpu { buffer, bytes })))
            }
        }
    }

    fn size(&self, buffer: &Buffer) -> u64 {
        buffer.size()
    }

    fn write(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        self.alive()?;
        buffer.check(offset, bytes.len() as u64)?;
        if !self.idle() {
            self.enqueue(Work::Write(buffer.clone(), offset, bytes.to_vec()));
            return Ok(());
        }
        match &self.0.engine {
            Engine::Gpu(gpu) => {
                gpu.flush();
                gpu.write(buffer.gpu()?, offset, bytes)
            }
            Engine::Cpu(cpu) => cpu.write(buffer.cpu()?, offset, bytes),
        }
    }

    fn constant(&self, key: u128, label: &str, bytes: impl FnOnce() -> Vec<u8>) -> Result<Buffer> {
        if let Some(buffer) = self.0.constants.borrow_mut().get(key) {
            return Ok(buffer);
        }
        let mut bytes = bytes();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let buffer = self.create(label, bytes.len() as u64, Usage::Constant)?;
        // Nobody else has the buffer yet: no need to wait behind the queue.
        match &self.0.engine {
            Engine::Gpu(gpu) => gpu.write(buffer.gpu()?, 0, &bytes)?,
            Engine::Cpu(cpu) => cpu.write(buffer.cpu()?, 0, &bytes)?,
        }
        self.0.constants.borrow_mut().put(key, buffer.clone());
        Ok(buffer)
    }

    fn scratch(&self, label: &'static str, bytes: u64) -> Result<Buffer> {
        if let Some(buffer) = self.0.scratch.borrow().get(label)
            && buffer.size() >= bytes
        {
            return Ok(buffer.clone());
        }
        let buffer = self.create(label, bytes.next_power_of_two(), Usage::Scratch)?;
        self.0.scratch.borrow_mut().insert(label, buffer.clone());
        Ok(buffer)
    }

    fn run(&self, dispatches: &[Dispatch<Buffer>]) -> Result<()> {
        self.alive()?;
        if let Engine::Gpu(gpu) = &self.0.engine {
            gpu.enter();
            let mut ready = self.idle();
            for dispatch in dispatches {
                ready &= gpu.ready(&dispatch.spec)?;
            }
            if ready {
                return gpu.record(dispatches);
            }
        }
        self.enqueue(Work::Run(dispatches.to_vec()));
        Ok(())
    }

    fn read(&self, buffer: &Buffer, range: Range<u64>) -> impl Future<Output = Result<Vec<u8>>> {
        let fetched = self.fetch(vec![(buffer.clone(), range)]);
        async move { Ok(fetched.await?.first().map(|array| Uint8Array::new(array).to_vec()).unwrap_or_default()) }
    }
}
