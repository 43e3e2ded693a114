//! The exported `BlockMask`.

use std::sync::Arc;

use flexattn::{BlockShape, Class, Error, Params, Result, TileMap};
use js_sys::{Object, Uint8Array, Uint8ClampedArray, Uint32Array};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::error::{Failure, Which};
use crate::js;
use crate::mods::{self, Values, numbers};

/// The raw half of `BlockMask` in index.ts.
#[wasm_bindgen]
#[derive(Clone, Debug)]
pub struct BlockMask(Arc<flexattn::BlockMask>);

/// Sizes that a mask is laid over, as JavaScript gives them.
pub(crate) struct Shape {
    batch: usize,
    heads: usize,
    q_len: usize,
    kv_len: usize,
    q_offset: Vec<i32>,
    kv_lens: Vec<u32>,
    block: [usize; 2],
}

impl Shape {
    pub(crate) fn read(value: &JsValue) -> Result<Self> {
        let length = |name: &str| {
            js::count(value, name)?.ok_or_else(|| js::wrong(&format!("shape.{name}"), "a number"))
        };
        let list = |name: &str| -> Result<Vec<f64>> {
            match js::field(value, name) {
                None => Ok(Vec::new()),
                Some(value) => match value.as_f64() {
                    Some(number) => Ok(vec![number]),
                    None => numbers(&value, name),
                },
            }
        };
        let block = js::counts(value, "block")?.unwrap_or_else(|| vec![flexattn::BLOCK; 2]);
        let sides = block.len();
        Ok(Self {
            batch: js::count(value, "batch")?.unwrap_or(1),
            heads: js::count(value, "heads")?.unwrap_or(1),
            q_len: length("qLen")?,
            kv_len: length("kvLen")?,
            q_offset: list("qOffset")?.into_iter().map(|value| value as i32).collect(),
            kv_lens: list("kvLens")?.into_iter().map(|value| value as u32).collect(),
            block: block.try_into().map_err(|_| {
                Error::shape(format!("block has {sides} numbers but must have 2: rows and columns"))
            })?,
        })
    }

    pub(crate) fn sizes(&self) -> Params {
        Params::new(self.batch, self.heads, self.q_len, self.kv_len)
    }

    fn blocks(&self) -> BlockShape<'_> {
        BlockShape {
            q_offset: &self.q_offset,
            kv_lens: &self.kv_lens,
            ..BlockShape::new(self.batch, self.heads, self.q_len, self.kv_len)
        }
    }
}

type Thrown<T> = std::result::Result<T, JsValue>;

fn thrown<T>(result: Result<T>) -> Thrown<T> {
    Ok(result.map_err(Failure::from)?)
}

impl BlockMask {
    pub(crate) fn shared(&self) -> Arc<flexattn::BlockMask> {
        self.0.clone()
    }

    fn new(made: Result<flexattn::BlockMask>) -> Thrown<Self> {
        thrown(made.map(|made| Self(Arc::new(made))))
    }
}

/// The tile maps of one matrix, row-major.
pub(crate) fn tiles(mask: &flexattn::BlockMask, matrix: usize) -> Vec<u32> {
    let (rows, columns) = (mask.block_rows() as usize, mask.block_columns() as usize);
    let mut tiles = vec![0; rows * columns];
    for row in 0..rows {
        let list = matrix * rows + row;
        for &[first, end] in mask.rows().runs_of(list) {
            tiles[row * columns + first as usize..row * columns + end as usize].fill(TileMap::FULL.0);
        }
        for &[block, map] in mask.rows().partials_of(list) {
            tiles[row * columns + block as usize] = map;
        }
    }
    tiles
}

#[wasm_bindgen]
impl BlockMask {
    /// From a mask.
    pub fn build(mask: &JsValue, shape: &JsValue, values: &JsValue) -> Thrown<BlockMask> {
        let shape = thrown(Shape::read(shape))?;
        let made = mods::mask(mask, &thrown(Values::read(values))?, &shape.sizes())?;
        let built = flexattn::BlockMask::build_with(&made, shape.blocks(), shape.block);
        let text = mask.as_string().unwrap_or_default();
        Ok(Self(Arc::new(built.map_err(|error| Failure { error, about: Some((Which::Mask, text)) })?)))
    }

    /// From the value of every pair.
    #[wasm_bindgen(js_name = fromDense)]
    pub fn from_dense(mask: &[u8], shape: &JsValue) -> Thrown<BlockMask> {
        let shape = thrown(Shape::read(shape))?;
        let keep: Vec<bool> = mask.iter().map(|&byte| byte != 0).collect();
        let sizes = [shape.batch, shape.heads, shape.q_len, shape.kv_len];
        Self::new(flexattn::BlockMask::from_dense_mask(&keep, sizes, shape.block))
    }

    /// From packed sequences.
    #[wasm_bindgen(js_name = fromOffsets)]
    pub fn from_offsets(offsets: &JsValue, causal: bool) -> Thrown<BlockMask> {
        let offsets: Vec<u32> =
            thrown(numbers(offsets, "offsets"))?.into_iter().map(|offset| offset as u32).collect();
        Self::new(flexattn::BlockMask::from_cu_seqlens(&offsets, &offsets, causal))
    }

    /// What `toBytes` gave.
    #[wasm_bindgen(js_name = fromBytes)]
    pub fn from_bytes(bytes: &[u8]) -> Thrown<BlockMask> {
        Self::new(flexattn::BlockMask::from_bytes(bytes))
    }

    /// Batch entries with lists of their own.
    #[wasm_bindgen(getter)]
    pub fn batch(&self) -> usize {
        self.0.mask_batch()
    }

    /// Heads with lists of their own.
    #[wasm_bindgen(getter)]
    pub fn heads(&self) -> usize {
        self.0.mask_heads()
    }

    /// Query rows.
    #[wasm_bindgen(getter, js_name = qLen)]
    pub fn q_len(&self) -> usize {
        self.0.q_len()
    }

    /// Keys.
    #[wasm_bindgen(getter, js_name = kvLen)]
    pub fn kv_len(&self) -> usize {
        self.0.kv_len()
    }

    /// Kept pairs over all pairs.
    pub fn density(&self) -> Thrown<f64> {
        thrown(self.0.density())
    }

    /// Pairs in empty blocks over all pairs.
    pub fn sparsity(&self) -> f64 {
        self.0.sparsity()
    }

    /// Kinds and tile maps of one matrix.
    #[wasm_bindgen(unchecked_return_type = "any")]
    pub fn blocks(&self, batch: usize, head: usize) -> Thrown<Object> {
        let (rows, columns) = (self.0.block_rows() as usize, self.0.block_columns() as usize);
        let matrix = (batch % self.0.mask_batch()) * self.0.mask_heads() + head % self.0.mask_heads();
        let all = self.0.to_dense();
        let tiles = tiles(&self.0, matrix);
        let kinds: Vec<u8> = all[matrix * rows * columns..][..rows * columns]
            .iter()
            .map(|class| match class {
                Class::Empty => 0,
                Class::Partial => 1,
                Class::Full => 2,
            })
            .collect();
        let object = Object::new();
        js::set(&object, "rows", &JsValue::from_f64(rows as f64));
        js::set(&object, "columns", &JsValue::from_f64(columns as f64));
        js::set(&object, "kinds", &Uint8Array::from(kinds.as_slice()));
        js::set(&object, "tiles", &Uint32Array::from(tiles.as_slice()));
        Ok(object)
    }

    /// Whether each pair of a window is kept.
    pub fn tokens(
        &self,
        batch: usize,
        head: usize,
        q: usize,
        q_end: usize,
        kv: usize,
        kv_end: usize,
    ) -> Thrown<Vec<u8>> {
        let keep = thrown(self.0.window([batch, head], q..q_end, kv..kv_end))?;
        Ok(keep.into_iter().map(u8::from).collect())
    }

    /// Pairs that both keep.
    pub fn and(&self, other: &BlockMask) -> Thrown<BlockMask> {
        Self::new(self.0.and(&other.0))
    }

    /// Pairs that either keeps.
    pub fn or(&self, other: &BlockMask) -> Thrown<BlockMask> {
        Self::new(self.0.or(&other.0))
    }

    /// Pairs that this one masks.
    pub fn not(&self) -> Thrown<BlockMask> {
        Self::new(self.0.not())
    }

    /// `{ width, height, data }`, four bytes a pixel.
    #[wasm_bindgen(unchecked_return_type = "any")]
    pub fn picture(&self) -> Thrown<Object> {
        let picture = thrown(self.0.to_picture())?;
        let rgba: Vec<u8> =
            picture.rgb.chunks_exact(3).flat_map(|rgb| [rgb[0], rgb[1], rgb[2], 255]).collect();
        let object = Object::new();
        js::set(&object, "width", &JsValue::from_f64(picture.width as f64));
        js::set(&object, "height", &JsValue::from_f64(picture.height as f64));
        js::set(&object, "data", &Uint8ClampedArray::from(rgba.as_slice()));
        Ok(object)
    }

    /// The lists in a form to store.
    #[wasm_bindgen(js_name = toBytes)]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.to_bytes()
    }

    /// The blocks as text.
    #[wasm_bindgen(js_name = toText)]
    pub fn to_text(&self) -> String {
        self.0.to_string()
    }
}
