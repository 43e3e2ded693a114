// What the gradient kernels read, and what they compute of each pair of a query row and a column: P, and
// dPost, the gradient of its score after score_mod.

const HEAD_QUADS: u32 = (HEAD_DIM + 3u) / 4u;
const V_QUADS: u32 = (V_DIM + 3u) / 4u;

@group(0) @binding(0) var<storage, read> q: array<Word>;             // [B, Hq, L, D]
@group(0) @binding(1) var<storage, read> k: array<Word>;             // [Bkv, Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<Word>;             // [Bkv, Hkv, S, Dv]
@group(0) @binding(3) var<storage, read> dout: array<Word>;          // [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;    // lse, with sinks | delta, each [B, Hq, L]

const Q: u32 = 0u;
const K: u32 = 1u;
const V: u32 = 2u;
const DOUT: u32 = 3u;

fn load(tensor: u32, at: u32, left: u32) -> Quad {
  if (tensor == Q) { return load_q(at, left); }
  if (tensor == K) { return load_k(at, left); }
  if (tensor == V) { return load_v(at, left); }
  return load_dout(at, left);
}

// What a pair contributes: P, and dPost = P (dP - delta), the gradient of its score after score_mod.
// Zero where it is not kept, whatever the mods give there.
fn pair(s: f32, dp: f32, stat: vec2<f32>, row: Row, b: u32, h: u32, q_pos: i32, kv: u32, inside: bool, full: bool) -> vec2<f32> {
  let score = score_mod(s * p.scale, row, i32(b), i32(h), q_pos, i32(kv));
  var keep = inside && !is_minus_infinity(score);
  if (!full) { keep = keep && mask_mod(row, i32(b), i32(h), q_pos, i32(kv)); }
  let weight = exp2((score - stat.x) * LOG2E);
  return select(vec2<f32>(0.0), vec2<f32>(weight, weight * (dp - stat.y)), keep);
}

// dPost times a derivative of score_mod, which may be NaN or infinite where the pair is not kept.
fn chain(d_post: f32, slope: f32) -> f32 { return select(d_post * slope, 0.0, d_post == 0.0); }

// Four elements of a gradient, added to what an earlier launch has left there where this one only goes
// through part of what is summed.
fn store_gradient(at: u32, left: u32, value: vec4<f32>) {
  var sum = value;
  if (p.accumulate != 0u) { sum += widen(load_out(at, left)); }
  store_out(at, left, sum);
}

// lse and delta of a query row.
fn stats_of(row: u32) -> vec2<f32> { return vec2<f32>(stats[p.lse_at + row], stats[p.delta_at + row]); }
