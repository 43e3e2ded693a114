//! Attention with a mask and a score mod of one's own, on the best tier of this machine.
//!
//! ```text
//! cargo run --release --example quickstart [-- WORD [HEAD]]
//! ```
//!
//! First a layer of a trained model on real sentences: which words does a word attend to? Then 4096 tokens of packed
//! documents: how long does it take, what does the mask skip, and is it right?

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use flexattn::reference::{self, Problem};
use flexattn::{Attention, AttentionShape, BlockMask, BlockShape, Capture, Gpu, MaskMod, ScoreMod, Tensor};
use flexattn_testing::Golden;
use flexattn_testing::problem::Numbers;

#[expect(dead_code, reason = "the bench uses more of the baseline")]
#[path = "bench/baseline.rs"]
mod baseline;

fn main() -> ExitCode {
    flexattn_testing::ended(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    if chosen.len() > 2 || chosen.iter().any(|word| word.starts_with("--")) {
        println!("usage: quickstart [WORD [HEAD]], `it` and 1 if not given");
        return Ok(());
    }
    let word = chosen.first().map_or("it", String::as_str);
    let head = chosen.get(1).map_or("1", String::as_str);
    let gpu = Gpu::new()?;
    println!("Running on {}\n", gpu.report());
    sentences(&gpu, word, head)?;
    documents(&gpu)
}

/// What `word` of the first sentence attends to in `head` of layer 3 of all-MiniLM-L6-v2.
fn sentences(gpu: &Gpu, word: &str, head: &str) -> Result<(), Box<dyn Error>> {
    let layer = Golden::shipped("real_minilm_l3_padded")?;
    let words: Vec<Vec<String>> = serde_json::from_str(layer.metadata("tokens").unwrap_or("[]"))?;
    let [batch, heads, _, len, _, head_dim, _] = layer.dims();
    let row = words[0].iter().position(|w| w == word);
    let row = row.ok_or_else(|| format!("`{word}` is not in the sentence; it has {}", words[0].join(" ")))?;
    let head: usize = head
        .parse()
        .ok()
        .filter(|head| *head < heads)
        .ok_or_else(|| format!("the head is {head} but must be a number below {heads}"))?;
    let upload = |values: &[f32]| gpu.tensor(values, [batch, heads, len, head_dim]);
    let (q, k, v) = (upload(layer.q.f32())?, upload(layer.k.f32())?, upload(layer.v.f32())?);

    // The sentences have different lengths: a word sees those of its own sentence, not the padding.
    let lengths: Vec<i32> = words.iter().map(|sentence| sentence.len() as i32).collect();
    let length = Capture::i32("length", &lengths, &[batch])?;
    let attention = Attention::new().mask_mod(MaskMod::new(|i| i.kv().lt(length.at([i.batch()]))));
    let output = attention.forward(gpu, &q, &k, &v)?;

    // Nobody stored the matrix of weights; those of one row follow from its log-sum-exp.
    let weights = attention.weights(&q, &k, &output, &[row])?;
    let mut seen: Vec<(f32, &str)> =
        weights[head * len..].iter().copied().zip(words[0].iter().map(String::as_str)).collect();
    seen.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("\"{}\"", words[0][1..words[0].len() - 1].join(" "));
    println!("In head {head}, `{word}` attends to:");
    for (weight, word) in &seen[..4] {
        println!("  {word:<10} {weight:.2}  {}", "#".repeat((weight * 40.0) as usize));
    }
    println!();
    Ok(())
}

/// Packed documents: a token sees at most 512 earlier ones of its own document, and scores are capped and fade
/// with the distance.
fn documents(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    const HEADS: usize = 2;
    const LEN: usize = 4096;
    const DIM: usize = 64;
    let ids: Vec<i32> = (0..LEN).map(|token| ((token as f64 / 16.0).sqrt() / 2.0) as i32).collect();
    let document = Capture::i32("document", &ids, &[LEN])?;
    let mask = MaskMod::new(|i| document.at([i.q()]).eq(document.at([i.kv()])))
        & MaskMod::new(|i| i.q().ge(i.kv()) & (i.q() - i.kv()).lt(512));
    let score = ScoreMod::new(|s| {
        let distance = (s.q() - s.kv()).to_f32();
        (s.score() / 20.0).tanh() * 20.0 - (distance + 1.0).log()
    });
    println!("{}", BlockMask::build(&mask, BlockShape::new(1, HEADS, LEN, LEN))?);

    let mut numbers = Numbers::new(1);
    let data: [Vec<f32>; 3] = std::array::from_fn(|_| numbers.normals(HEADS * LEN * DIM));
    let upload = |values: &Vec<f32>| gpu.tensor(values, [1, HEADS, LEN, DIM]);
    let tensors = [upload(&data[0])?, upload(&data[1])?, upload(&data[2])?];
    let attention = Attention::new().mask_mod(mask.clone()).score_mod(score.clone());

    let (first, out) = timed(|| forward(gpu, &attention, &tensors))?;
    println!("first call, with the kernel compiled and the block lists built: {first:.1?}");
    let mut later: [Duration; 5] = Default::default();
    for time in &mut later {
        *time = timed(|| forward(gpu, &attention, &tensors))?.0;
    }
    later.sort_unstable();
    println!("later calls, the median of 5: {:.1?}", later[2]);
    let problem = baseline::Problem { heads: HEADS, q_len: LEN, kv_len: LEN, head_dim: DIM, causal: false };
    let inputs = [&data[0][..], &data[1], &data[2]];
    if let Some(unfused) = baseline::Baseline::new(gpu, problem, baseline::Tile::Eight, inputs)? {
        unfused.run()?;
        println!("unfused, every pair, no mods: {:.1?}", timed(|| unfused.run())?.0);
    } else {
        let plain = Attention::new();
        println!("every pair, no mods: {:.1?}", timed(|| forward(gpu, &plain, &tensors))?.0);
    }

    // Against f64, on a few rows of each head.
    let layout = tensors[0].layout();
    let problem = Problem {
        mask_mod: Some(&mask),
        score_mod: Some(&score),
        ..Problem::new(AttentionShape::new(layout, layout, layout)?, &data[0], &data[1], &data[2])
    };
    let rows: Vec<[usize; 3]> = (0..64).map(|i| [0, i % HEADS, (i * 977) % LEN]).collect();
    let exact = reference::forward_rows(&problem, rows.iter().copied())?.out;
    let got = rows.iter().flat_map(|[_, h, q]| &out[(h * LEN + q) * DIM..][..DIM]);
    let error = got.zip(&exact).map(|(&got, exact)| (f64::from(got) - exact).abs()).fold(0.0, f64::max);
    println!("largest error against f64 on {} rows: {error:.1e}", rows.len());
    if error > 1e-5 { Err("the result is wrong".into()) } else { Ok(()) }
}

fn forward(gpu: &Gpu, attention: &Attention, [q, k, v]: &[Tensor; 3]) -> flexattn::Result<Vec<f32>> {
    // Reading waits for the work.
    attention.forward(gpu, q, k, v)?.out.read()
}

fn timed<T>(work: impl FnOnce() -> flexattn::Result<T>) -> flexattn::Result<(Duration, T)> {
    let start = Instant::now();
    let result = work()?;
    Ok((start.elapsed(), result))
}
