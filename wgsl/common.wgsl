// Parameters, tables and captured tensors, as every kernel binds them; and the attention mods.

const INFO: u32 = 1u;          // vec4 of `info`: two per captured tensor, one per four scalars
const NONE: u32 = 0xffffffffu;

struct Params {
  batch: u32,         // entries of q and out
  q_heads: u32,       // heads of q and out
  kv_heads: u32,      // heads of k and v
  group: u32,         // query heads that share a kv head: q_heads / kv_heads
  q_len: u32,         // rows of q
  kv_len: u32,        // rows of k and v in memory; how many count is per batch entry, at kv_len_at
  q_blocks: u32,      // blocks of 128 rows in q_len
  kv_blocks: u32,     // blocks of 128 columns in kv_len
  mask_batch: u32,    // batch entries of the block mask: batch, or 1 if all share one
  mask_heads: u32,    // heads of the block mask: q_heads, or 1
  lists: u32,         // in tables: headers of the lists of each query row block
  lists_t: u32,       // in tables: headers of the transposed lists, of each kv block
  q_offset_at: u32,   // in tables: the position of query row 0, an i32 per batch entry
  kv_len_at: u32,     // in tables: how many rows of k and v count, per batch entry
  sinks_at: u32,      // in tables: an f32 attention sink per query head, or none
  splits: u32,        // decode: parts that kv_len is cut into
  lse_at: u32,        // in stats: lse, or none
  max_at: u32,        // in stats: max, or none
  delta_at: u32,      // in stats: delta = rowsum(out * dout)
  dlse_at: u32,       // in stats: the gradient of lse, or none
  scale: f32,         // factor of dot(q, k)
  first_group: u32,   // number of the first workgroup of this dispatch
  groups: u32,        // end of the workgroups that have work
  fold: u32,          // workgroups in x per step of y
  split_len: u32,     // decode: columns in a part, a multiple of 32
  accumulate: u32,    // gradients: 1 where a launch adds to what is there, 0 where it replaces it
  capture_at: u32,    // captured gradients: where this pass writes, in elements
  zero: u32,          // always 0, which a compiler cannot know: keeps long loops rolled
  q: vec4<u32>,       // view of q
  k: vec4<u32>,       // view of k
  v: vec4<u32>,       // view of v
  out: vec4<u32>,     // view of out
  dout: vec4<u32>,    // view of dout
  dq: vec4<u32>,      // view of dq
  dk: vec4<u32>,      // view of dk
  dv: vec4<u32>,      // view of dv
  info: array<vec4<u32>, INFO>, // captures: dims, then offsets; then scalars
}

@group(0) @binding(5) var<storage, read> tables: array<u32>;    // block lists, q_offset, kv_len, sinks
@group(0) @binding(6) var<storage, read> captures: array<u32>;  // captured tensors, one after the other
@group(0) @binding(8) var<uniform> p: Params;

// The position of query row 0, which mods see as q.
fn q_offset_of(b: u32) -> i32 { return bitcast<i32>(tables[p.q_offset_at + b]); }
// How many rows of k and v count.
fn kv_len_of(b: u32) -> u32 { return tables[p.kv_len_at + b]; }

// Scores are exponentiated base 2 inside the kernels; score_mod, lse and max are in natural units.
const LOG2E: f32 = 1.4426950408889634;
const LN2: f32 = 0.6931471805599453;
// Below every score that can be told apart; finite, so that differences are.
const FLOOR: f32 = -1e38;

// WGSL has no infinite constants, and a constant bitcast to one is refused.
fn minus_infinity() -> f32 { return bitcast<f32>(0xff800000u + p.zero); }
fn is_minus_infinity(x: f32) -> bool { return bitcast<u32>(x) == 0xff800000u; }
