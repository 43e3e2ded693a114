//! Golden cases: one `*.safetensors` file each, described in `tests/goldens/README.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use flexattn::expr::text_reads;
use flexattn::{Capture, MaskMod, ScoreMod};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Why a golden file could not be used: the file, and what is wrong with it.
#[derive(Clone, Debug)]
pub struct GoldenError {
    path: PathBuf,
    what: String,
}

impl fmt::Display for GoldenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.what)
    }
}

impl std::error::Error for GoldenError {}

/// The numbers of a stored tensor, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 32-bit signed integers.
    I32(Vec<i32>),
}

/// One tensor of a golden file.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Its dimensions; empty for a single value.
    pub shape: Vec<usize>,
    /// Its numbers, row-major.
    pub data: Data,
}

impl Array {
    /// The numbers of a float tensor; empty for an integer one.
    pub fn f32(&self) -> &[f32] {
        match &self.data {
            Data::F32(values) => values,
            Data::I32(_) => &[],
        }
    }

    /// The numbers of an integer tensor; empty for a float one.
    pub fn i32(&self) -> &[i32] {
        match &self.data {
            Data::I32(values) => values,
            Data::F32(_) => &[],
        }
    }
}

/// The block lists of a case, as the golden file stores them.
#[derive(Clone, Debug)]
pub struct GoldenBlocks {
    /// Batch entries, heads and q-block rows that the lists are over.
    pub shape: [usize; 3],
    /// Tokens of a q block and of a kv block.
    pub block: [usize; 2],
    /// Per list (batch-major, then head, then q block): kv blocks in which some element is kept and some not.
    pub partial: Vec<Vec<usize>>,
    /// Per list: kv blocks in which every element is kept.
    pub full: Vec<Vec<usize>>,
}

/// One golden case.
#[derive(Clone, Debug)]
pub struct Golden {
    /// The file stem.
    pub name: String,
    /// What the case is for.
    pub notes: String,
    /// Queries, `[B, Hq, L, E]`.
    pub q: Array,
    /// Keys, `[Bkv, Hkv, S, E]`.
    pub k: Array,
    /// Values, `[Bkv, Hkv, S, Ev]`.
    pub v: Array,
    /// WGSL text of the score mod, where the case has one.
    pub score_text: Option<String>,
    /// WGSL text of the mask, where the case has one.
    pub mask_text: Option<String>,
    /// What q·k is multiplied by.
    pub scale: f64,
    /// Tensors that the mods read.
    pub captures: Vec<Capture>,
    /// Attention sinks, one logit per query head, where the case has them.
    pub sinks: Option<Vec<f32>>,
    tensors: BTreeMap<String, Array>,
    metadata: BTreeMap<String, String>,
}

impl Golden {
    /// Reads one golden file.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is not of the golden form, or its parts disagree.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, GoldenError> {
        let path = path.as_ref();
        let fail = |what: String| GoldenError { path: path.to_owned(), what };
        let bytes = std::fs::read(path).map_err(|e| fail(format!("cannot be read: {e}")))?;
        Self::parse(&bytes, path.file_stem().and_then(|s| s.to_str()).unwrap_or("golden")).map_err(fail)
    }

    /// Reads a golden case from the bytes of its file.
    ///
    /// # Errors
    ///
    /// When the bytes are not of the golden form, or their parts disagree.
    pub fn parse(bytes: &[u8], stem: &str) -> Result<Self, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|e| format!("is not a safetensors file: {e}"))?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| format!("has a bad header: {e}"))?;
        let metadata: BTreeMap<String, String> =
            header.metadata().clone().unwrap_or_default().into_iter().collect();
        let mut tensors = BTreeMap::new();
        for (name, view) in file.tensors() {
            let words = view.data().chunks_exact(4).map(|w| [w[0], w[1], w[2], w[3]]);
            let data = match view.dtype() {
                Dtype::F32 => Data::F32(words.map(f32::from_le_bytes).collect()),
                Dtype::I32 => Data::I32(words.map(i32::from_le_bytes).collect()),
                other => return Err(format!("tensor `{name}` is {other:?}, but goldens hold F32 and I32")),
            };
            tensors.insert(name, Array { shape: view.shape().to_vec(), data });
        }

        let tensor = |name: &str| tensors.get(name).cloned().ok_or_else(|| format!("has no tensor `{name}`"));
        let (q, k, v) = (tensor("q")?, tensor("k")?, tensor("v")?);
        for (name, array) in [("q", &q), ("k", &k), ("v", &v)] {
            if array.shape.len() != 4 || array.f32().is_empty() {
                return Err(format!("tensor `{name}` is {:?}, but must be 4-D F32", array.shape));
            }
        }
        tensor("out")?;

        let text = |key: &str| metadata.get(key).filter(|text| !text.trim().is_empty()).cloned();
        let scale = match metadata.get("scale") {
            Some(text) => text.parse().map_err(|_| format!("scale `{text}` is not a number"))?,
            None => 1.0 / (q.shape[3] as f64).sqrt(),
        };
        let captures = captures(&metadata, &tensors)?;
        let sinks = tensors.get("out_sink").and(tensors.get("cap.sink")).map(|a| a.f32().to_vec());
        Ok(Self {
            name: metadata.get("name").cloned().unwrap_or_else(|| stem.to_owned()),
            notes: text("notes").unwrap_or_default(),
            q,
            k,
            v,
            score_text: text("score_mod"),
            mask_text: text("mask_mod"),
            scale,
            captures,
            sinks,
            tensors,
            metadata,
        })
    }

    /// The golden files in a directory, by name.
    ///
    /// # Errors
    ///
    /// When the directory cannot be read or holds no `*.safetensors` file.
    pub fn files(dir: impl AsRef<Path>) -> Result<Vec<PathBuf>, GoldenError> {
        let dir = dir.as_ref();
        let fail = |what: String| GoldenError { path: dir.to_owned(), what };
        let entries = std::fs::read_dir(dir).map_err(|e| fail(format!("cannot be listed: {e}")))?;
        let mut files: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
            .collect();
        files.sort();
        if files.is_empty() {
            return Err(fail("holds no *.safetensors file".to_owned()));
        }
        Ok(files)
    }

    /// The directory of the goldens that ship with flexattn.
    pub fn directory() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../goldens")
    }

    /// A golden that ships with flexattn, by name.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn shipped(name: &str) -> Result<Self, GoldenError> {
        Self::load(Self::directory().join(name).with_extension("safetensors"))
    }

    /// The score mod of the case, from its text and captures.
    ///
    /// # Errors
    ///
    /// When the text does not type-check.
    pub fn score_mod(&self) -> flexattn::Result<Option<ScoreMod>> {
        let captures = self.captures_read_by(self.score_text.as_deref());
        self.score_text.as_deref().map(|text| ScoreMod::from_wgsl(text, &captures, &[])).transpose()
    }

    /// The mask of the case, from its text and captures.
    ///
    /// # Errors
    ///
    /// When the text does not type-check.
    pub fn mask_mod(&self) -> flexattn::Result<Option<MaskMod>> {
        let captures = self.captures_read_by(self.mask_text.as_deref());
        self.mask_text.as_deref().map(|text| MaskMod::from_wgsl(text, &captures, &[])).transpose()
    }

    /// The captures that a text reads. The `used_by` lists are not relied upon: not every
    /// file has them.
    fn captures_read_by(&self, text: Option<&str>) -> Vec<Capture> {
        let reads = |capture: &&Capture| text_reads(text.unwrap_or(""), capture.name());
        self.captures.iter().filter(reads).cloned().collect()
    }

    /// A stored tensor.
    pub fn tensor(&self, name: &str) -> Option<&Array> {
        self.tensors.get(name)
    }

    /// A stored float tensor's numbers.
    pub fn values(&self, name: &str) -> Option<&[f32]> {
        self.tensors.get(name).map(Array::f32)
    }

    /// A metadata text.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// A number in the metadata, such as `ref_err_f16`.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.metadata.get(key)?.parse().ok()
    }

    /// An entry of a JSON object in the metadata, such as `dq` of `grad_ref_err_f16`.
    pub fn number_in(&self, key: &str, entry: &str) -> Option<f64> {
        serde_json::from_str::<Value>(self.metadata.get(key)?).ok()?.get(entry)?.as_f64()
    }

    /// The gradients stored for the loss `sum(out*dout) + sum(lse*dlse)`: `dq`, `dk`, `dv`, `dcap.x`.
    pub fn gradients(&self) -> Vec<String> {
        self.names("grad")
    }

    /// The gradients stored for the loss `sum(out_sink*dout_sink)`, with the suffix `_sink` (and `dcap.sink`).
    pub fn sink_gradients(&self) -> Vec<String> {
        self.names("grad_sink")
    }

    /// The same case without its gradients, for running the forward pass alone.
    #[must_use]
    pub fn without_gradients(mut self) -> Self {
        self.metadata.remove("grad");
        self.metadata.remove("grad_sink");
        self
    }

    fn names(&self, key: &str) -> Vec<String> {
        let list = self.metadata.get(key).and_then(|text| serde_json::from_str::<Value>(text).ok());
        let names = list.iter().filter_map(Value::as_array).flatten().filter_map(Value::as_str);
        names.filter(|name| self.tensors.contains_key(*name)).map(str::to_owned).collect()
    }

    /// Query batch, query heads, kv heads, q_len, kv_len, head_dim, v_dim.
    pub fn dims(&self) -> [usize; 7] {
        let (q, k, v) = (&self.q.shape, &self.k.shape, &self.v.shape);
        [q[0], q[1], k[1], q[2], k[2], q[3], v[3]]
    }

    /// The stored block lists, where the case has any.
    pub fn blocks(&self) -> Option<GoldenBlocks> {
        let block = [self.number("block_q")? as usize, self.number("block_kv")? as usize];
        let shape = &self.tensor("mask.kv_num_blocks")?.shape;
        let lists = |counts: &str, indices: &str| -> Option<Vec<Vec<usize>>> {
            let (counts, indices) = (self.tensor(counts)?.i32(), self.tensor(indices)?);
            let width = *indices.shape.last()?;
            let rows = indices.i32().chunks(width.max(1));
            Some(
                rows.zip(counts)
                    .map(|(row, &n)| row[..n as usize].iter().map(|&i| i as usize).collect())
                    .collect(),
            )
        };
        Some(GoldenBlocks {
            shape: [*shape.first()?, *shape.get(1)?, *shape.get(2)?],
            block,
            partial: lists("mask.kv_num_blocks", "mask.kv_indices")?,
            full: lists("mask.full_kv_num_blocks", "mask.full_kv_indices")?,
        })
    }

    /// The case as one JSON object with its tensors as flat arrays: for tests outside Rust. NaN and the
    /// infinities, which JSON lacks, are the strings `"NaN"`, `"inf"` and `"-inf"`.
    pub fn to_json(&self) -> Value {
        let number = |x: f32| {
            serde_json::Number::from_f64(x.into()).map_or_else(|| Value::from(x.to_string()), Value::from)
        };
        let tensors = self.tensors.iter().map(|(name, array)| {
            let data: Vec<Value> = match &array.data {
                Data::F32(values) => values.iter().map(|&x| number(x)).collect(),
                Data::I32(values) => values.iter().map(|&x| x.into()).collect(),
            };
            let dtype = if matches!(array.data, Data::F32(_)) { "f32" } else { "i32" };
            (name.clone(), serde_json::json!({ "dtype": dtype, "shape": array.shape, "data": data }))
        });
        serde_json::json!({
            "metadata": self.metadata,
            "tensors": tensors.collect::<serde_json::Map<_, _>>(),
        })
    }
}

fn captures(
    metadata: &BTreeMap<String, String>,
    tensors: &BTreeMap<String, Array>,
) -> Result<Vec<Capture>, String> {
    let Some(text) = metadata.get("captures") else { return Ok(Vec::new()) };
    let list: Value = serde_json::from_str(text).map_err(|e| format!("captures are not JSON: {e}"))?;
    let mut captures = Vec::new();
    for entry in list.as_array().into_iter().flatten() {
        let name = entry.get("name").and_then(Value::as_str).ok_or("a capture has no name")?;
        let array =
            tensors.get(&format!("cap.{name}")).ok_or_else(|| format!("has no tensor `cap.{name}`"))?;
        let capture = match &array.data {
            Data::F32(values) => Capture::f32(name, values, &array.shape).map(Capture::from),
            Data::I32(values) => Capture::i32(name, values, &array.shape).map(Capture::from),
        };
        captures.push(capture.map_err(|e| format!("capture `{name}`: {e}"))?);
    }
    Ok(captures)
}
