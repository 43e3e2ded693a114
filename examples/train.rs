//! Trains a small transformer layer whose attention has a learned table of distances and a document mask.
//!
//! ```text
//! cargo run --release --example train [-- TIER]
//! ```
//!
//! The task: say which token stood three places back in the same document, or, nearer to its beginning, the
//! document's first. No token carries its position, so only the table of relative positions can say what is three
//! places back, and only the mask where a document begins. Attention and its gradients run on the machine's best
//! tier; the rest is plain loops. The gradients of the first step are compared with the f64 reference. Fails
//! unless the loss falls to a tenth.

#[path = "train/matrix.rs"]
mod matrix;

use std::error::Error;
use std::process::ExitCode;

use flexattn::reference::{self, Problem};
use flexattn::{
    Attention, AttentionShape, Capture, Gpu, Gradients, Layout, MaskMod, Saved, ScoreMod, Tensor, Tier,
    Wanted,
};
use flexattn_testing::problem::Numbers;
use indicatif::{ProgressBar, ProgressStyle};
use matrix::{Matrix, Weight};

const BATCH: usize = 4;
const LEN: usize = 96;
const TOKENS: usize = BATCH * LEN;
const WORDS: usize = 16;
const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const WIDTH: usize = HEADS * HEAD_DIM;
const HIDDEN: usize = 64;
const SPAN: usize = 16; // distances in the table; what is farther counts as the last
const BACK: usize = 3;
const STEPS: usize = 120;

fn main() -> ExitCode {
    flexattn_testing::ended(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let gpu = match std::env::args().nth(1).as_deref() {
        Some("--help" | "-h") => {
            println!("usage: train [metal|coop-matrix|subgroup|portable|cpu]");
            return Ok(());
        }
        Some(tier) => Gpu::builder().tier(Tier::from_name(tier)?).build()?,
        None => Gpu::new()?,
    };
    println!("Training on {}", gpu.report());
    let mut numbers = Numbers::new(1);
    let mut layer = Layer::new(&gpu, &mut numbers);
    let bar = ProgressBar::new(STEPS as u64)
        .with_style(ProgressStyle::with_template("[{wide_bar}] {pos}/{len} steps, {msg}, {eta} left")?);
    let mut losses = Vec::with_capacity(STEPS);
    for step in 0..STEPS {
        let loss = layer.train(&Batch::new(&mut numbers), step)?;
        bar.set_message(format!("loss {loss:.3}"));
        bar.inc(1);
        if step % (STEPS / 10) == 0 || step + 1 == STEPS {
            let height = "#".repeat((loss * 20.0) as usize);
            bar.suspend(|| println!("step {step:>3}  loss {loss:.3}  {height}"));
        }
        losses.push(loss);
    }
    bar.finish_and_clear();
    layer.show_table();
    let (first, last) = (losses[0], losses[STEPS - 5..].iter().sum::<f32>() / 5.0);
    println!("the loss fell from {first:.3} to {last:.3}, to 1/{:.0}", first / last);
    if last <= first / 10.0 { Ok(()) } else { Err("the loss did not fall to a tenth".into()) }
}

/// Sequences of documents of different lengths, packed one after the other.
struct Batch {
    words: Vec<usize>,
    documents: Vec<i32>,
    targets: Vec<usize>,
}

impl Batch {
    fn new(numbers: &mut Numbers) -> Self {
        let mut batch = Self { words: Vec::new(), documents: Vec::new(), targets: Vec::new() };
        for _ in 0..BATCH {
            let (mut start, mut end, mut document) = (0, 0, -1);
            for at in 0..LEN {
                if at == end {
                    (start, end, document) = (at, at + 4 + numbers.below(20), document + 1);
                }
                batch.words.push(numbers.below(WORDS));
                batch.documents.push(document);
                let back = (at - start).min(BACK);
                batch.targets.push(batch.words[batch.words.len() - 1 - back]);
            }
        }
        batch
    }
}

/// x1 = x + attention(norm(x)), x2 = x1 + mlp(norm(x1)), between an embedding and its inverse.
struct Layer<'a> {
    gpu: &'a Gpu,
    attention: Attention,
    embedding: Weight,
    qkv: Weight,
    table: Weight,
    projection: Weight,
    up: Weight,
    down: Weight,
    output: Weight,
}

impl<'a> Layer<'a> {
    fn new(gpu: &'a Gpu, numbers: &mut Numbers) -> Self {
        let mut weight = |rows, columns| Weight::new(rows, columns, numbers);
        Self {
            gpu,
            attention: Attention::new(),
            embedding: weight(WORDS, WIDTH),
            qkv: weight(WIDTH, 3 * WIDTH),
            table: weight(HEADS, SPAN),
            projection: weight(WIDTH, WIDTH),
            up: weight(WIDTH, HIDDEN),
            down: weight(HIDDEN, WIDTH),
            output: weight(WIDTH, WORDS),
        }
    }

    /// A token sees earlier ones of its document; the table raises or lowers their scores by distance.
    fn mods(&self, batch: &Batch) -> flexattn::Result<(MaskMod, ScoreMod)> {
        let document = Capture::i32("document", &batch.documents, &[BATCH, LEN])?;
        let table = Capture::f32("table", &self.table.value.data, &[HEADS, SPAN])?;
        let mask = MaskMod::new(|i| {
            let document = |token| document.at([i.batch(), token]);
            i.q().ge(i.kv()) & document(i.q()).eq(document(i.kv()))
        });
        let score = ScoreMod::new(|s| s.score() + table.at([s.head(), s.q() - s.kv()]));
        Ok((mask, score))
    }

    /// One step on one batch; gives the loss before it.
    fn train(&mut self, batch: &Batch, step: usize) -> Result<f32, Box<dyn Error>> {
        // Forward. Kernels are compiled once: other documents and table values are parameters.
        let (mask, score) = self.mods(batch)?;
        let attention = self.attention.clone().mask_mod(mask.clone()).score_mod(score.clone());
        let x = Matrix::from(TOKENS, WIDTH, |t, c| self.embedding.value.at(batch.words[t], c));
        let (x_norm, x_scale) = x.norm();
        let q = self.upload(&x_norm.times(&self.qkv.value))?;
        let part = |n: usize| q.view(q.layout().at(n * WIDTH)?);
        let (k, v) = (part(1)?, part(2)?);
        let attended = attention.forward(self.gpu, &q, &k, &v)?;
        let out = tokens(&attended.out)?;
        let x1 = x.plus(&out.times(&self.projection.value));
        let (x1_norm, x1_scale) = x1.norm();
        let active = x1_norm.times(&self.up.value).map(|h| h.max(0.0));
        let x2 = x1.plus(&active.times(&self.down.value));
        let (x2_norm, x2_scale) = x2.norm();
        let (loss, d_logits) = cross_entropy(&x2_norm.times(&self.output.value), &batch.targets);

        // Backward, in the opposite order.
        let d_output = x2_norm.transposed().times(&d_logits);
        let d_x2 = x2_norm.norm_gradient(&x2_scale, &d_logits.times(&self.output.value.transposed()));
        let d_down = active.transposed().times(&d_x2);
        let d_active = d_x2.times(&self.down.value.transposed());
        let d_hidden = d_active.zip(&active, |d, a| if a > 0.0 { d } else { 0.0 });
        let d_up = x1_norm.transposed().times(&d_hidden);
        let d_x1_norm = d_hidden.times(&self.up.value.transposed());
        let d_x1 = d_x2.plus(&x1_norm.norm_gradient(&x1_scale, &d_x1_norm));
        let d_projection = out.transposed().times(&d_x1);
        let d_out = self.upload(&d_x1.times(&self.projection.value.transposed()))?;
        let saved = Saved::new(&q, &k, &v, &attended)?;
        let wanted = Wanted::qkv().capture("table");
        let gradients = attention.backward(self.gpu, &saved, &d_out, None, &wanted)?;
        if step == 0 {
            check([&q, &k, &v, &d_out], (&mask, &score), &gradients)?;
        }
        let [d_q, d_k, d_v, d_table] = all(&gradients)?;
        let parts = [tokens(d_q)?, tokens(d_k)?, tokens(d_v)?];
        let d_qkv_out = Matrix::from(TOKENS, 3 * WIDTH, |t, c| parts[c / WIDTH].at(t, c % WIDTH));
        let d_table = d_table.read()?;
        let d_qkv = x_norm.transposed().times(&d_qkv_out);
        let d_x_norm = d_qkv_out.times(&self.qkv.value.transposed());
        let d_x = d_x1.plus(&x_norm.norm_gradient(&x_scale, &d_x_norm));
        let mut d_embedding = Matrix::from(WORDS, WIDTH, |_, _| 0.0);
        for (t, &word) in batch.words.iter().enumerate() {
            for c in 0..WIDTH {
                d_embedding.data[word * WIDTH + c] += d_x.at(t, c);
            }
        }

        self.table.update(&d_table, step);
        let weights = [
            &mut self.embedding,
            &mut self.qkv,
            &mut self.projection,
            &mut self.up,
            &mut self.down,
            &mut self.output,
        ];
        let gradients = [d_embedding, d_qkv, d_projection, d_up, d_down, d_output];
        weights
            .into_iter()
            .zip(&gradients)
            .for_each(|(weight, gradient)| weight.update(&gradient.data, step));
        Ok(loss)
    }

    /// Uploads a matrix with a row for each token; its first WIDTH columns as [B, H, L, E], only by strides.
    fn upload(&self, matrix: &Matrix) -> flexattn::Result<Tensor> {
        let width = matrix.columns;
        let strides = [LEN * width, HEAD_DIM, width, 1];
        let layout = Layout::new([BATCH, HEADS, LEN, HEAD_DIM], strides, 0)?;
        self.gpu.tensor(&matrix.data, [1, 1, TOKENS, width])?.view(layout)
    }

    /// What each head makes of distance alone.
    fn show_table(&self) {
        for (head, row) in self.table.value.data.chunks(SPAN).enumerate() {
            let sum: f32 = row.iter().map(|x| x.exp()).sum();
            let shares: Vec<String> = row[..8].iter().map(|x| format!("{:.2}", x.exp() / sum)).collect();
            println!("head {head} weighs distances 0 to 7 by {}", shares.join(" "));
        }
    }
}

/// [B, H, L, E] as a matrix with a row for each token.
fn tokens(tensor: &Tensor) -> flexattn::Result<Matrix> {
    let Layout { shape: [b, h, l, e], strides: [sb, sh, sl, se], offset } = *tensor.layout();
    let by_token = tensor.view(Layout::new([b, l, h, e], [sb, sl, sh, se], offset)?)?;
    Ok(Matrix { columns: h * e, data: by_token.read()? })
}

/// Of q, k, v and the table: all that were wanted.
fn all(gradients: &Gradients) -> Result<[&Tensor; 4], &'static str> {
    let Gradients { dq: Some(dq), dk: Some(dk), dv: Some(dv), .. } = gradients else {
        return Err("a gradient is missing");
    };
    Ok([dq, dk, dv, gradients.capture("table").ok_or("the table's gradient is missing")?])
}

/// Compares gradients with the f64 reference; prints the largest error.
fn check(
    [q, k, v, d_out]: [&Tensor; 4],
    (mask, score): (&MaskMod, &ScoreMod),
    got: &Gradients,
) -> Result<(), Box<dyn Error>> {
    let shape = AttentionShape::new(q.layout(), k.layout(), v.layout())?;
    let (q, k, v, d_out) = (q.read()?, k.read()?, v.read()?, d_out.read()?);
    let problem = Problem { mask_mod: Some(mask), score_mod: Some(score), ..Problem::new(shape, &q, &k, &v) };
    let exact = reference::backward(&problem, &d_out, &[])?;
    // The table is the only captured tensor of floats.
    let exact = [&exact.dq, &exact.dk, &exact.dv, &exact.captures[0].1];
    for ((name, got), exact) in ["q", "k", "v", "the table"].iter().zip(all(got)?).zip(exact) {
        let got = got.read()?;
        let largest = exact.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let errors = got.iter().zip(exact).map(|(&got, exact)| (f64::from(got) - exact).abs());
        let error = errors.fold(0.0, f64::max) / largest;
        println!("gradient of {name}: largest error {error:.1e} of the largest element");
        if error.is_nan() || error > 1e-4 {
            return Err(format!("the gradient of {name} is wrong").into());
        }
    }
    Ok(())
}

/// The mean over tokens, and its gradient.
fn cross_entropy(logits: &Matrix, targets: &[usize]) -> (f32, Matrix) {
    let (mut loss, mut gradient) = (0.0, logits.map(f32::exp));
    for (row, &target) in gradient.data.chunks_mut(WORDS).zip(targets) {
        let sum: f32 = row.iter().sum();
        loss -= (row[target] / sum).ln() / TOKENS as f32;
        row.iter_mut().for_each(|x| *x /= sum * TOKENS as f32);
        row[target] -= 1.0 / TOKENS as f32;
    }
    (loss, gradient)
}
