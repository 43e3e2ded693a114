//! A dispatch as the workers see it: parameters, tensors, tables, captures.

use std::ops::Range;

use super::view::View;
use crate::error::{Error, Result};
use crate::expr::{Capture, CaptureData, CaptureType, Scalar, Type, Value};
use crate::kernels::{KernelSpec, NONE, Params};
use crate::lower::Home;
use crate::shape::BLOCK;

/// Rows of one head that a worker takes at a time: query rows or, for dk and dv, keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) b: usize,
    pub(super) h: usize,
    /// Within one block.
    pub(super) rows: Range<usize>,
}

/// What a dispatch gives, unpacked.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) spec: &'a KernelSpec,
    pub(super) params: Params,
    /// The words of each binding.
    bindings: Vec<&'a [u32]>,
    pub(super) q: View,
    pub(super) k: View,
    pub(super) v: View,
    pub(super) out: View,
    pub(super) dout: View,
    pub(super) captures: Vec<Capture>,
    pub(super) scalars: Vec<Scalar>,
    /// Captured tensors and scalars, as the uniform block describes them.
    info: Vec<u32>,
    grid: u64,
}

/// Where the bindings that every kernel shares are.
const STATS: usize = 4;
const TABLES: usize = 5;
const CAPTURES: usize = 6;
const LARGE: usize = 7;

impl<'a> Launch<'a> {
    pub(super) fn new(
        spec: &'a KernelSpec,
        bindings: Vec<&'a [u32]>,
        params: &[u8],
        grid: [u32; 3],
    ) -> Result<Self> {
        let (head, info) = params.split_at_checked(size_of::<Params>()).ok_or_else(|| {
            Error::buffer(format!(
                "the parameters have {} bytes but the block is {}",
                params.len(),
                size_of::<Params>()
            ))
        })?;
        let params: Params = bytemuck::pod_read_unaligned(head);
        let info: Vec<u32> =
            info.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        let (captures, scalars) = read_info(spec, &info, &bindings)?;
        let (head_dim, v_dim) = (spec.head_dim as usize, spec.v_dim as usize);
        Ok(Self {
            spec,
            params,
            q: View::new(params.q, head_dim, spec.dtype),
            k: View::new(params.k, head_dim, spec.dtype),
            v: View::new(params.v, v_dim, spec.dtype),
            out: View::new(params.out, v_dim, spec.dtype),
            dout: View::new(params.dout, v_dim, spec.dtype),
            captures,
            scalars,
            info,
            grid: grid.iter().map(|&n| u64::from(n)).product(),
            bindings,
        })
    }

    /// The words of a binding.
    pub(super) fn words(&self, binding: usize) -> &'a [u32] {
        self.bindings[binding]
    }

    /// Row statistics.
    pub(super) fn stats(&self) -> &'a [f32] {
        bytemuck::cast_slice(self.bindings[STATS])
    }

    pub(super) fn tables(&self) -> &'a [u32] {
        self.bindings[TABLES]
    }

    /// Query heads per kv head.
    pub(super) fn group(&self) -> usize {
        self.params.group as usize
    }

    /// How many keys count.
    pub(super) fn kv_len(&self, b: usize) -> usize {
        self.tables()[self.params.kv_len_at as usize + b] as usize
    }

    /// What mods see as the position of query row 0.
    pub(super) fn q_offset(&self, b: usize) -> i32 {
        self.tables()[self.params.q_offset_at as usize + b].cast_signed()
    }

    /// The attention sink of a query head.
    pub(super) fn sink(&self, h: usize) -> Option<f32> {
        let at = self.params.sinks_at;
        (at != NONE).then(|| f32::from_bits(self.tables()[at as usize + h]))
    }

    /// The header of an item's list of kv blocks.
    pub(super) fn list(&self, item: &Item) -> usize {
        let p = &self.params;
        self.header(p.lists, p.q_blocks, [item.b, item.h, item.rows.start / BLOCK])
    }

    /// The header of the list of q blocks of kv block `block`.
    pub(super) fn list_of_keys(&self, b: usize, h: usize, block: usize) -> usize {
        self.header(self.params.lists_t, self.params.kv_blocks, [b, h, block])
    }

    fn header(&self, lists: u32, blocks: u32, [b, h, block]: [usize; 3]) -> usize {
        let p = &self.params;
        let row = (b % p.mask_batch as usize) * p.mask_heads as usize + h % p.mask_heads as usize;
        lists as usize + 4 * (row * blocks as usize + block)
    }

    /// Where the gradient of capture `c` begins among those of all captured tensors.
    pub(super) fn gradient_at(&self, c: usize) -> usize {
        self.info.get(8 * c + 6).map_or(0, |&at| at as usize)
    }

    /// Whether all batch entries read the same k and v.
    pub(super) fn shared_kv(&self) -> bool {
        self.params.dk[1] == 0
    }

    /// The number of a row in `[B, Hq, L]`.
    pub(super) fn row(&self, [b, h, q]: [usize; 3]) -> usize {
        (b * self.params.q_heads as usize + h) * self.params.q_len as usize + q
    }

    /// What the workgroups of this dispatch compute, `tile` of `len` rows of one of `heads` heads each, joined to
    /// the blocks that they are parts of.
    pub(super) fn items(&self, tile: usize, len: usize, heads: usize) -> Vec<Item> {
        let tiles = len.div_ceil(tile).max(1) as u64;
        let first = u64::from(self.params.first_group);
        let mut items: Vec<Item> = Vec::new();
        for id in first..(first + self.grid).min(self.params.groups.into()) {
            let start = (id % tiles) as usize * tile;
            let head = (id / tiles) as usize;
            let item = Item { b: head / heads, h: head % heads, rows: start..(start + tile).min(len) };
            match items.last_mut() {
                Some(last)
                    if (last.b, last.h, last.rows.end) == (item.b, item.h, start)
                        && !start.is_multiple_of(BLOCK) =>
                {
                    last.rows.end = item.rows.end;
                }
                _ => items.push(item),
            }
        }
        items
    }
}

/// The captured tensors and scalars, as `info` describes them.
fn read_info(spec: &KernelSpec, info: &[u32], bindings: &[&[u32]]) -> Result<(Vec<Capture>, Vec<Scalar>)> {
    // Row statistics have a layout, but no mods that would read it.
    if spec.mods.score.is_none() && spec.mods.mask.is_none() {
        return Ok((Vec::new(), Vec::new()));
    }
    let layout = &spec.layout;
    let word = |at: usize| info.get(at).copied().unwrap_or(0) as usize;
    let mut read = Vec::new();
    for (c, decl) in layout.captures.iter().enumerate() {
        let shape: Vec<usize> = (0..decl.rank as usize).map(|dim| word(8 * c + dim)).collect();
        let size = shape.iter().product::<usize>();
        let words = match layout.home(decl) {
            Home::Captures => bindings[CAPTURES],
            Home::Large => bindings[LARGE],
            Home::Tables => bindings[TABLES],
        };
        // Counted in elements from here on.
        let at = word(8 * c + 4) * 4 / decl.dtype.bytes() + word(8 * c + 5);
        let range = at..at + size;
        let short = || Error::capture(&*decl.name, format!("its buffer ends before its {size} elements do"));
        let data = match decl.dtype {
            CaptureType::F32 => CaptureData::F32(part(words, range).ok_or_else(short)?.into()),
            CaptureType::F16 => CaptureData::F16(part(words, range).ok_or_else(short)?.into()),
            CaptureType::BF16 => CaptureData::BF16(part(words, range).ok_or_else(short)?.into()),
            CaptureType::I32 => CaptureData::I32(part(words, range).ok_or_else(short)?.into()),
            CaptureType::U32 => CaptureData::U32(part(words, range).ok_or_else(short)?.into()),
            CaptureType::Bool => {
                let bytes: &[u8] = part(words, range).ok_or_else(short)?;
                CaptureData::Bool(bytes.iter().map(|&byte| byte != 0).collect())
            }
        };
        read.push(Capture::new(&decl.name, decl.dtype, &shape, data)?);
    }
    let mut scalars = Vec::new();
    for (s, decl) in layout.scalars.iter().enumerate() {
        let bits = word(8 * layout.captures.len() + s) as u32;
        let value = match decl.ty {
            Type::F32 => Value::F32(f32::from_bits(bits)),
            Type::I32 => Value::I32(bits.cast_signed()),
            Type::U32 => Value::U32(bits),
            Type::Bool => Value::Bool(bits != 0),
        };
        scalars.push(Scalar::new(&decl.name, value)?);
    }
    Ok((read, scalars))
}

fn part<T: bytemuck::AnyBitPattern>(words: &[u32], range: Range<usize>) -> Option<&[T]> {
    bytemuck::cast_slice::<u32, T>(words).get(range)
}
