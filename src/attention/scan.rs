//! Block masks of masks that read tensors on a device.

use super::captured_buffer;
use crate::block_mask::{BlockMask, BlockShape, OpenMask};
use crate::error::Result;
use crate::expr::{Capture, CaptureData, CaptureType, MaskMod};
use crate::plan;
use crate::runtime::{Resident, Runtime, Tier, Usage};
use std::any::Any;

impl BlockMask {
    /// The blocks of a mask that reads a captured tensor on the device, in the kernels' block size: give them to
    /// the call ([`Attention::block_mask`](crate::Attention::block_mask)), which else skips no block for such a
    /// mask. They hold until the tensor's values change; then build them again.
    ///
    /// The device looks at every pair of the blocks that the rest of the mask leaves open, and two bits a tile are
    /// read back: this waits for all work given so far. On the Cpu tier the tensor's values are read instead,
    /// and for a mask whose captures are all in host memory this is [`BlockMask::build`]. In a page use
    /// [`BlockMask::build_on_async`].
    ///
    /// # Errors
    ///
    /// As [`BlockMask::build`]; [`Error::Capture`](crate::Error::Capture) for a second captured tensor on the
    /// device, and for one of another kind of device; [`Error::Buffer`](crate::Error::Buffer) for one of another
    /// device of the kind; [`Error::Overflow`](crate::Error::Overflow) for more blocks than u32 counts;
    /// [`Error::Limit`](crate::Error::Limit) for more than one buffer holds the maps of, and for a captured tensor
    /// whose buffer is longer than a binding; those of [`Runtime::create`], [`Runtime::run`] and
    /// [`Runtime::read`].
    ///
    /// ```
    /// use flexattn::expr::{Captured, CaptureData, CaptureType, DeviceHandle, I32};
    /// use flexattn::{Attention, BlockMask, BlockShape, Capture, Gpu, MaskMod, Resident, Runtime, Usage, masks};
    ///
    /// # fn main() -> flexattn::Result<()> {
    /// let gpu = Gpu::new()?;
    /// // 300 tokens of three documents, numbered on the device.
    /// let ids: Vec<u8> = (0..300i32).flat_map(|token| (token / 100).to_le_bytes()).collect();
    /// let buffer = gpu.create("ids", 4 * 300, Usage::Tensor)?;
    /// gpu.write(&buffer, 0, &ids)?;
    /// // `Gpu::capture` does this for a wgpu buffer of the program's own.
    /// let resident = Resident { buffer: DeviceHandle::new(buffer), first: 0 };
    /// let data = CaptureData::Device(DeviceHandle::new(resident));
    /// let doc = Captured::<I32>::new(Capture::new("doc", CaptureType::I32, &[300], data)?)?;
    ///
    /// let mask = MaskMod::new(|i| doc.at([i.q()]).eq(doc.at([i.kv()]))) & masks::causal();
    /// let block_mask = BlockMask::build_on(&gpu, &mask, BlockShape::new(1, 2, 300, 300))?;
    /// assert_eq!(block_mask.rows().partials_of(2).len(), 2); // the third document begins in block 1
    ///
    /// let q = gpu.tensor(&vec![0.5f32; 2 * 300 * 8], [1, 2, 300, 8])?;
    /// let attention = Attention::new().mask_mod(mask).block_mask(block_mask);
    /// let out = attention.forward(&gpu, &q, &q, &q)?.out.read()?;
    /// assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-5));
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(not(target_arch = "wasm32"))]
    pub fn build_on<R: Runtime>(runtime: &R, mask_mod: &MaskMod, shape: BlockShape<'_>) -> Result<Self>
    where
        R::Buffer: Any,
    {
        crate::runtime::block_on(Self::build_on_async(runtime, mask_mod, shape))
    }

    /// [`BlockMask::build_on`] for async programs and pages.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::build_on`].
    pub async fn build_on_async<R: Runtime>(
        runtime: &R,
        mask_mod: &MaskMod,
        shape: BlockShape<'_>,
    ) -> Result<Self>
    where
        R::Buffer: Any,
    {
        let profile = runtime.profile();
        let on_device: Vec<&Capture> = mask_mod.captures().iter().filter(|it| is_on_device(it)).collect();
        if on_device.is_empty() {
            return Self::build(mask_mod, shape);
        }
        for capture in on_device {
            captured_buffer(runtime, &mut std::iter::once(capture), capture.name())?;
        }
        if profile.tier == Tier::Cpu {
            let host = on_host(runtime, mask_mod).await?;
            return Ok(Self::build(&host, shape)?.decided_by(mask_mod.clone()));
        }
        let most = profile.limits.buffer / 4;
        let open = OpenMask::new(mask_mod, &shape, usize::try_from(most).unwrap_or(usize::MAX))?;
        let plan = plan::scan(&open, profile)?;
        if open.open().is_empty() {
            return open.settle(&[]);
        }
        let bytes = 4 * open.open().len() as u64;
        let maps = runtime.create("tile maps", bytes, Usage::Tensor)?;
        let capture = |name: &str| captured_buffer(runtime, &mut mask_mod.captures().iter(), name);
        for dispatches in plan.dispatches(runtime, &|_| Ok(maps.clone()), None, &capture)? {
            runtime.run(&dispatches)?;
        }
        let read = runtime.read(&maps, 0..bytes).await?;
        open.settle(&bytemuck::pod_collect_to_vec(&read))
    }
}

fn is_on_device(capture: &Capture) -> bool {
    matches!(capture.data(), CaptureData::Device(_))
}

/// The mask with the values of its captured tensors in host memory.
async fn on_host<R: Runtime>(runtime: &R, mask_mod: &MaskMod) -> Result<MaskMod>
where
    R::Buffer: Any,
{
    let mut host = mask_mod.clone();
    for capture in mask_mod.captures().iter().filter(|capture| is_on_device(capture)) {
        let name = capture.name();
        let buffer = captured_buffer(runtime, &mut mask_mod.captures().iter(), name)?;
        let CaptureData::Device(handle) = capture.data() else { continue };
        let first = handle.get::<Resident>().map_or(0, |resident| resident.first);
        let size = capture.dtype().bytes() as u64;
        let start = u64::from(first) * size;
        let bytes = runtime.read(&buffer, start..start + capture.len() as u64 * size).await?;
        let data = match capture.dtype() {
            CaptureType::F32 => CaptureData::F32(bytemuck::pod_collect_to_vec(&bytes).into()),
            CaptureType::F16 => CaptureData::F16(bytemuck::pod_collect_to_vec(&bytes).into()),
            CaptureType::BF16 => CaptureData::BF16(bytemuck::pod_collect_to_vec(&bytes).into()),
            CaptureType::I32 => CaptureData::I32(bytemuck::pod_collect_to_vec(&bytes).into()),
            CaptureType::U32 => CaptureData::U32(bytemuck::pod_collect_to_vec(&bytes).into()),
            CaptureType::Bool => CaptureData::Bool(bytes.iter().map(|&byte| byte != 0).collect()),
        };
        host = host.with_capture(Capture::new(name, capture.dtype(), capture.shape(), data)?)?;
    }
    Ok(host)
}
