//! Runs golden cases through the public operation and compares what comes out.

use std::any::Any;

use flexattn::{
    Attention, BlockMask, BlockShape, Class, DType, Output, Result, Runtime, Saved, Tensor, Wanted,
};
use half::{bf16, f16};

use crate::budget::{Budget, Comparison};
use crate::golden::Golden;

/// What became of one output of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// `out`, `lse`, `max`, `dq`, `dcap.x`, ..., with the suffix `_sink` where the case has sinks.
    pub output: String,
    /// How it compared, or why it was not computed.
    pub result: Result<Comparison>,
    /// What the mean (of lse and max: the largest) error may be.
    pub budget: f64,
}

impl Finding {
    /// Whether it was computed and is within its budget. What is not supported is neither passed nor failed.
    pub fn verdict(&self) -> Verdict {
        match &self.result {
            Ok(comparison) if comparison.pass => Verdict::Passed,
            Err(error) if error.is_unsupported() => Verdict::Skipped,
            _ => Verdict::Failed,
        }
    }
}

/// What a finding amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within its budget.
    Passed,
    /// Outside, or an error.
    Failed,
    /// Not supported here.
    Skipped,
}

/// Runs a case on a runtime in one dtype: forward, and the gradients that the case stores. An output that
/// cannot be computed is a finding with its error.
pub async fn run<R: Runtime>(runtime: &R, golden: &Golden, dtype: DType) -> Vec<Finding>
where
    R::Buffer: Any + PartialEq,
{
    let mut names = vec!["out".to_owned(), "lse".to_owned(), "max".to_owned()];
    let mut findings = part(runtime, golden, dtype, "", names.clone()).await;
    if golden.sinks.is_some() {
        names.truncate(1);
        findings.extend(part(runtime, golden, dtype, "_sink", names).await);
    }
    findings
}

/// The outputs `forward` and the stored gradients, without sinks or (suffix `_sink`) with them.
async fn part<R: Runtime>(
    runtime: &R,
    golden: &Golden,
    dtype: DType,
    suffix: &str,
    forward: Vec<String>,
) -> Vec<Finding>
where
    R::Buffer: Any + PartialEq,
{
    let gradients = if suffix.is_empty() { golden.gradients() } else { golden.sink_gradients() };
    let names = forward.into_iter().map(|name| format!("{name}{suffix}")).chain(gradients);
    let outputs = outputs(runtime, golden, dtype, suffix).await;
    names
        .filter(|name| golden.tensor(name).is_some())
        .map(|output| {
            let gold = golden.values(&output).unwrap_or(&[]);
            let budget = Budget::of(golden, &output, dtype);
            let result = match &outputs {
                Err(error) => Err(error.clone()),
                Ok(outputs) => {
                    let found = outputs.iter().find(|(name, _)| *name == output);
                    let missing =
                        || flexattn::Error::Unsupported(format!("there is no {output} on this tier"));
                    found.ok_or_else(missing).and_then(|(_, got)| got.clone())
                }
            };
            Finding {
                result: result.map(|got| budget.compare(gold, &got)),
                budget: budget.shown(gold),
                output,
            }
        })
        .collect()
}

/// Every output of a case by name; an error of its own for gradients, which a tier may not have.
async fn outputs<R: Runtime>(
    runtime: &R,
    golden: &Golden,
    dtype: DType,
    suffix: &str,
) -> Result<Vec<(String, Result<Vec<f32>>)>>
where
    R::Buffer: Any + PartialEq,
{
    let attention = attention(golden, !suffix.is_empty())?;
    let tensor = |array: &crate::Array| upload(runtime, dtype, array.f32(), &array.shape);
    let (q, k, v) = (tensor(&golden.q)?, tensor(&golden.k)?, tensor(&golden.v)?);
    let output = attention.forward(runtime, &q, &k, &v)?;
    let mut outputs = vec![(format!("out{suffix}"), output.out.read_async().await)];
    for (name, stat) in [("lse", &output.lse), ("max", &output.max)] {
        if let (Some(stat), "") = (stat, suffix) {
            outputs.push((name.to_owned(), stat.read_async().await));
        }
    }
    let gradients = if suffix.is_empty() { golden.gradients() } else { golden.sink_gradients() };
    if !gradients.is_empty() {
        let found = self::gradients(&attention, golden, [&q, &k, &v], &output, suffix, &gradients).await;
        match found {
            Ok(found) => outputs.extend(found),
            Err(error) => outputs.extend(gradients.into_iter().map(|name| (name, Err(error.clone())))),
        }
    }
    Ok(outputs)
}

/// The gradients of these names.
async fn gradients<R: Runtime>(
    attention: &Attention,
    golden: &Golden,
    [q, k, v]: [&Tensor<R>; 3],
    output: &Output<R>,
    suffix: &str,
    names: &[String],
) -> Result<Vec<(String, Result<Vec<f32>>)>>
where
    R::Buffer: Any + PartialEq,
{
    let runtime = q.runtime();
    let upload_as = |name: &str, dtype, shape: [usize; 4]| {
        golden.values(name).map(|values| upload(runtime, dtype, values, &shape)).transpose()
    };
    let shape = output.out.shape();
    let Some(dout) = upload_as(&format!("dout{suffix}"), q.dtype(), shape)? else { return Ok(Vec::new()) };
    // dlse goes with dout, not with dout_sink.
    let dlse = match suffix {
        "" => upload_as("dlse", DType::F32, [shape[0], shape[1], shape[2], 1])?,
        _ => None,
    };
    let mut wanted = Wanted { q: true, k: true, v: true, ..Wanted::default() };
    for name in names.iter().filter_map(|name| name.strip_prefix("dcap.")) {
        if name == "sink" {
            wanted.sinks = true;
        } else {
            wanted.captures.push(name.to_owned());
        }
    }
    let found = attention.backward(runtime, &Saved::new(q, k, v, output)?, &dout, dlse.as_ref(), &wanted)?;
    let mut gradients = Vec::new();
    let own = [("dq", &found.dq), ("dk", &found.dk), ("dv", &found.dv)];
    let own = own.map(|(name, tensor)| (format!("{name}{suffix}"), tensor.as_ref()));
    let sinks = [("dcap.sink".to_owned(), found.dsinks.as_ref())];
    let captures = found.captures.iter().map(|(name, tensor)| (format!("dcap.{name}"), Some(tensor)));
    for (name, tensor) in own.into_iter().chain(sinks).chain(captures) {
        if let Some(tensor) = tensor {
            gradients.push((name, tensor.read_async().await));
        }
    }
    Ok(gradients)
}

/// The operation that a case describes.
///
/// # Errors
///
/// When its mods do not type-check.
pub fn attention(golden: &Golden, with_sinks: bool) -> Result<Attention> {
    let mut attention = Attention::new().scale(golden.scale as f32).with_lse(true).with_max(true);
    if let Some(mask_mod) = golden.mask_mod()? {
        attention = attention.mask_mod(mask_mod);
    }
    if let Some(score_mod) = golden.score_mod()? {
        attention = attention.score_mod(score_mod);
    }
    if let (Some(sinks), true) = (&golden.sinks, with_sinks) {
        attention = attention.sinks(sinks.clone());
    }
    Ok(attention)
}

/// A tensor of a dtype with the nearest values to `values`.
///
/// # Errors
///
/// As [`Tensor::upload`].
pub fn upload<R: Runtime>(runtime: &R, dtype: DType, values: &[f32], shape: &[usize]) -> Result<Tensor<R>> {
    let shape = [shape[0], shape[1], shape[2], shape[3]];
    match dtype {
        DType::F32 => Tensor::upload(runtime, values, shape),
        DType::F16 => {
            let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
            Tensor::upload(runtime, &halves, shape)
        }
        DType::BF16 => {
            let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::upload(runtime, &halves, shape)
        }
    }
}

/// Builds the block lists of a case and compares them with the stored ones: gives how many blocks there are and
/// a description of each that differs. Nothing for a case without lists.
///
/// Blocks that reach past the end of the queries or keys are compared only in whether they are empty: PyTorch
/// never calls them full.
///
/// # Errors
///
/// When the mask does not type-check or its lists cannot be built.
pub fn blocks(golden: &Golden) -> Result<Option<(usize, Vec<String>)>> {
    let (Some(mask_mod), Some(gold)) = (golden.mask_mod()?, golden.blocks()) else { return Ok(None) };
    let [batch, q_heads, _, q_len, kv_len, ..] = golden.dims();
    let built = BlockMask::build_with(&mask_mod, BlockShape::new(batch, q_heads, q_len, kv_len), gold.block)?;
    let classes = built.to_dense();
    let [mask_batch, mask_heads, rows] = gold.shape;
    let columns = kv_len.div_ceil(gold.block[1]);
    let mut differing = Vec::new();
    for (list, (partial, full)) in gold.partial.iter().zip(&gold.full).enumerate() {
        let [b, h, row] = [list / rows / mask_heads, list / rows % mask_heads, list % rows];
        let own = (b % built.mask_batch() * built.mask_heads() + h % built.mask_heads()) * rows + row;
        for column in 0..columns {
            let gold_class = match (partial.contains(&column), full.contains(&column)) {
                (_, true) => Class::Full,
                (true, false) => Class::Partial,
                (false, false) => Class::Empty,
            };
            let class = classes[own * columns + column];
            let inside = (row + 1) * gold.block[0] <= q_len && (column + 1) * gold.block[1] <= kv_len;
            let same =
                class == gold_class || !inside && (class == Class::Empty) == (gold_class == Class::Empty);
            if !same {
                differing.push(format!("block ({b}, {h}, {row}, {column}) is {class:?}, not {gold_class:?}"));
            }
        }
    }
    Ok(Some((mask_batch * mask_heads * rows * columns, differing)))
}
