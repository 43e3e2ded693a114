//! What a machine must offer to run a plan: buffers, kernels in order, reading back.
//!
//! Everything above this trait is data and builds for any target. Runtimes are
//! `Gpu` (wgpu, or the CPU when there is no adapter), `Cpu`, a
//! page's `GPUDevice` (the npm package) and the Metal emulator of the tests. Another engine can be
//! one too: it gets kernel text from `KernelSpec::text`, and buffers and numbers from [`Dispatch`].

use crate::error::{Error, Result};
use crate::expr::DeviceHandle;
use crate::kernels::{KernelSpec, Tuning};
use crate::shape::DType;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

/// The ladder of ways to run, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Hand-written Metal kernels on simdgroup matrices (Apple7 and newer).
    Metal,
    /// WGSL with 8x8 cooperative matrices (native only, experimental in wgpu).
    CoopMatrix,
    /// WGSL with subgroup shuffles, subgroups of at least 8.
    Subgroup,
    /// Core WGSL, f16 if the adapter has it.
    Portable,
    /// No GPU: all cores of this machine, f32.
    Cpu,
}

impl Tier {
    /// All of them, best first.
    pub const ALL: [Tier; 5] = [Tier::Metal, Tier::CoopMatrix, Tier::Subgroup, Tier::Portable, Tier::Cpu];

    /// `metal`, `coop-matrix`, `subgroup`, `portable` or `cpu`.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Metal => "metal",
            Tier::CoopMatrix => "coop-matrix",
            Tier::Subgroup => "subgroup",
            Tier::Portable => "portable",
            Tier::Cpu => "cpu",
        }
    }

    /// The tier with this name, in any case.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] listing the names.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|tier| tier.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
            let names = Self::ALL.map(Tier::name).join(", ");
            Error::unsupported(format!("there is no tier `{name}`; the tiers are {names}"))
        })
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the machine is, as far as the choice of kernels goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The best tier that works here, or the one that was asked for.
    pub tier: Tier,
    /// The adapter's name, for reports.
    pub adapter: String,
    /// Smallest subgroup a kernel may meet; 0 when unknown. Never assume 32.
    pub subgroup_min: u32,
    /// Largest subgroup a kernel may meet; 0 when unknown.
    pub subgroup_max: u32,
    /// 16-bit floats in arithmetic (`shader-f16`). f16 tensors work without: they are read as words.
    pub f16: bool,
    /// The cooperative matrices that the tier [`Tier::CoopMatrix`] multiplies.
    pub matrices: Matrices,
    /// Whether a simdgroup should read tiles straight from device memory (Apple9 and newer: M3, M4).
    pub load_direct: bool,
    /// The kernels run in a browser, whose WGSL dialect differs (`enable subgroups;`).
    pub browser: bool,
    /// Runs on the CPU behind a GPU interface (lavapipe, SwiftShader): slow, so submits are cut finer.
    pub software: bool,
    /// Tiles to take instead of the table's own choice, from `Gpu::tune`.
    pub tuning: Option<Arc<Tuning>>,
    /// What the device allows.
    pub limits: Limits,
}

impl Profile {
    /// Whether the kernels with subgroup operations run right where subgroups have at least `min` lanes:
    /// their clusters are of eight. Larger ones, of whatever size, make no difference.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] below 8, and for the 0 of an adapter that does not tell.
    pub fn subgroups_suit(min: u32) -> Result<()> {
        match min {
            0 => Err(Error::unsupported("the adapter does not tell how small its subgroups are")),
            1..8 => Err(Error::unsupported(format!(
                "subgroups may be as small as {min} lanes; the kernels need 8"
            ))),
            _ => Ok(()),
        }
    }

    /// The floor that every WebGPU implementation has, on this tier.
    pub fn floor(tier: Tier) -> Self {
        let subgroup = match tier {
            Tier::Metal => 32,
            Tier::CoopMatrix | Tier::Subgroup => 8,
            Tier::Portable | Tier::Cpu => 0,
        };
        Self {
            tier,
            adapter: format!("{tier} floor"),
            subgroup_min: subgroup,
            subgroup_max: subgroup,
            f16: matches!(tier, Tier::Metal | Tier::CoopMatrix),
            matrices: match tier {
                Tier::CoopMatrix => Matrices { f16: 8, f32: 0 },
                _ => Matrices::default(),
            },
            load_direct: false,
            browser: false,
            software: false,
            tuning: None,
            limits: Limits::default(),
        }
    }
}

/// The square cooperative matrices that a device multiplies with sums in f32, by the type of their
/// elements: rows of one, 0 where there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matrices {
    /// Of f16: 8, 16 or 0.
    pub f16: u32,
    /// Of f32: 8 or 0.
    pub f32: u32,
}

impl Matrices {
    /// Rows of a matrix for tensors of this type.
    pub const fn edge(self, dtype: DType) -> u32 {
        match dtype {
            DType::F16 => self.f16,
            DType::F32 => self.f32,
            DType::BF16 => 0,
        }
    }
}

/// The device limits that a plan keeps to, named as in WebGPU. The default is WebGPU's floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// maxStorageBufferBindingSize, bytes.
    pub storage_binding: u64,
    /// maxBufferSize, bytes.
    pub buffer: u64,
    /// minStorageBufferOffsetAlignment, bytes.
    pub storage_alignment: u64,
    /// maxComputeWorkgroupsPerDimension.
    pub workgroups: u32,
    /// maxComputeWorkgroupStorageSize, bytes.
    pub workgroup_memory: u32,
    /// maxComputeInvocationsPerWorkgroup.
    pub invocations: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            storage_binding: 128 << 20,
            buffer: 256 << 20,
            storage_alignment: 256,
            workgroups: 65535,
            workgroup_memory: 16 << 10,
            invocations: 256,
        }
    }
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Usage {
    /// A user's tensor: read and written by kernels, copied from and to.
    Tensor,
    /// Read by kernels only; written once by [`Runtime::write`].
    Constant,
    /// Written and read by kernels only.
    Scratch,
}

/// A range of a buffer, as a kernel sees it.
#[derive(Clone, Debug)]
pub struct Binding<B> {
    /// The buffer.
    pub buffer: B,
    /// First byte, a multiple of [`Limits::storage_alignment`].
    pub offset: u64,
    /// Bytes, a multiple of 4.
    pub size: u64,
}

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct Dispatch<B> {
    /// The kernel: its table row, its expressions, its text in each language.
    pub spec: Arc<KernelSpec>,
    /// The storage buffers, in the order of `KernelSpec::bindings`; the uniform follows them.
    pub bindings: Vec<Binding<B>>,
    /// The uniform block: `Params`, then capture shapes and scalars.
    pub params: Vec<u8>,
    /// Workgroups along x, y, z.
    pub grid: [u32; 3],
}

/// Where the values of a captured tensor lie on a device: what a
/// [`DeviceHandle`] of [`CaptureData::Device`](crate::expr::CaptureData::Device) holds.
#[derive(Clone, Debug)]
pub struct Resident {
    /// The runtime's buffer.
    pub buffer: DeviceHandle,
    /// The first element.
    pub first: u32,
}

/// Something that runs kernels. Cloning one is cheap and gives a handle to the same machine.
///
/// The Gpu of a native program is `Send + Sync`; the trait asks for neither, because a page's
/// objects are not.
pub trait Runtime: Clone {
    /// A buffer; cloning gives a handle to the same memory.
    type Buffer: Clone;

    /// What the machine is.
    fn profile(&self) -> &Profile;

    /// A new buffer of zeros. `bytes` is rounded up to a multiple of 4.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], [`Error::Limit`], [`Error::DeviceLost`].
    fn create(&self, label: &str, bytes: u64, usage: Usage) -> Result<Self::Buffer>;

    /// Bytes of a buffer.
    fn size(&self, buffer: &Self::Buffer) -> u64;

    /// Overwrites part of a buffer, after all work given to [`Runtime::run`] so far and before all
    /// later work. `offset` and the length are multiples of 4.
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`] past the end, [`Error::DeviceLost`].
    fn write(&self, buffer: &Self::Buffer, offset: u64, bytes: &[u8]) -> Result<()>;

    /// A read-only buffer with this content, from a cache when `key` (a hash of the content) was
    /// seen before; only otherwise is `bytes` called. The cache is bounded; what it drops lives on
    /// while somebody holds it.
    ///
    /// # Errors
    ///
    /// As [`Runtime::create`].
    fn constant(&self, key: u128, label: &str, bytes: impl FnOnce() -> Vec<u8>) -> Result<Self::Buffer> {
        let _ = key;
        let bytes = bytes();
        let buffer = self.create(label, bytes.len() as u64, Usage::Constant)?;
        self.write(&buffer, 0, &bytes)?;
        Ok(buffer)
    }

    /// A buffer of at least `bytes` for values that live within one call. Later calls may get the
    /// same one: work is ordered, so nobody sees another's values before writing their own.
    ///
    /// # Errors
    ///
    /// As [`Runtime::create`].
    fn scratch(&self, label: &'static str, bytes: u64) -> Result<Self::Buffer> {
        self.create(label, bytes, Usage::Scratch)
    }

    /// Runs the launches in order, as one submit.
    ///
    /// # Errors
    ///
    /// [`Error::Compile`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    fn run(&self, dispatches: &[Dispatch<Self::Buffer>]) -> Result<()>;

    /// The bytes of a range, after all work given so far.
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`] past the end, [`Error::DeviceLost`].
    fn read(&self, buffer: &Self::Buffer, range: Range<u64>) -> impl Future<Output = Result<Vec<u8>>>;
}

/// Runs a future to its end on this thread. For programs that are not async; not for pages, which
/// must never block.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_ordered_best_first_and_named() {
        assert!(Tier::Metal < Tier::Cpu);
        for tier in Tier::ALL {
            assert_eq!(Tier::from_name(&tier.name().to_uppercase()).unwrap(), tier);
        }
        assert!(Tier::from_name("vulkan").unwrap_err().is_unsupported());
    }
}
