// block_mask: what a mask keeps of each tile of a block, for masks that read a tensor which lives only on
// the GPU.
//
// A workgroup looks at the 128 x 128 pairs of one block of one batch entry and query head, one of those that
// `tables` lists, and writes its tile map: two bits for each of 4 x 4 tiles of 32 x 32, at
// 2 * (4 * q tile + kv tile): 0 where no pair is kept (empty), 1 where some are (partial), 2 where every pair
// that exists is (full). A tile of no pairs is empty.
// Invocation `local` has column local % 32 of each tile, and every (THREADS / 32)-th row of the block.

// Parameters, tables and captured tensors, as every kernel binds them; and the attention mods.

const INFO: u32 = 4u;          // vec4 of `info`: two per captured tensor, one per four scalars
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
// The attention mods: identity score_mod, all-true mask_mod. Positions are global: q is a row plus
// the batch entry's q_offset, h a query head, score = dot(q, k) * scale in natural units.

//@slot captures
fn position_group(i0: i32) -> u32 { return u32(clamp(i0, 0, i32(p.info[0].x) - 1)); }
fn captured_group(i0: i32) -> i32 {
  let at = p.info[1].y + position_group(i0);
  return bitcast<i32>(large[p.info[1].x + at]);
}
fn position_interval(i0: i32, i1: i32) -> u32 { return (u32(clamp(i0, 0, i32(p.info[2].x) - 1))) * p.info[2].y + u32(clamp(i1, 0, i32(p.info[2].y) - 1)); }
fn captured_interval(i0: i32, i1: i32) -> i32 {
  let at = p.info[3].y + position_interval(i0, i1);
  return bitcast<i32>(captures[p.info[3].x + at]);
}
//@end

//@slot row
// What the mods need of a row, computed once for all its columns.
struct Row { unused: u32 }
fn row_mod(b: i32, h: i32, q: i32) -> Row { return Row(0u); }
//@end

//@slot score_mod
fn score_mod(score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 { return score; }
//@end

//@slot mask_mod
fn mask_mod(row: Row, b: i32, h: i32, q: i32, kv: i32) -> bool {
  let v0 = captured_group(kv);
  return (captured_interval(v0, 0) <= q) & (q < captured_interval(v0, 1)) & (q >= kv);
}
//@end

const THREADS: u32 = 64u;

const BLOCK: u32 = 128u;
const TILE: u32 = 32u;

@group(0) @binding(3) var<storage, read_write> maps: array<u32>;      // a tile map for each block that is listed
@group(0) @binding(7) var<storage, read> large: array<u32>;           // one large captured tensor, in place

var<workgroup> seen: array<u32, THREADS>;  // of each invocation: tiles with a pair that is kept, then with one that is not

@compute @workgroup_size(THREADS)
fn block_mask(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let n = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (n >= p.groups) { return; }
  let block = tables[p.lists + n];              // counted over batch entries, heads, block rows and block columns
  let kv_first = block % p.kv_blocks * BLOCK;
  let q_first = block / p.kv_blocks % p.q_blocks * BLOCK;
  let matrix = block / p.kv_blocks / p.q_blocks;
  let b = matrix / p.mask_heads;
  let h = matrix % p.mask_heads;
  let kv_len = kv_len_of(b);

  var found = 0u;
  let rows = min(BLOCK, p.q_len - q_first);
  for (var r = local / TILE; r < rows; r += THREADS / TILE) {
    let q = i32(q_first + r) + q_offset_of(b);
    let row = row_mod(i32(b), i32(h), q);
    for (var c = 0u; c < BLOCK / TILE; c += 1u) {
      let kv = kv_first + TILE * c + local % TILE;
      let tile = BLOCK / TILE * (r / TILE) + c;
      // A tile of which both have been met is settled.
      if (kv < kv_len && ((found >> tile) & 0x10001u) != 0x10001u) {
        found |= select(0x10000u, 1u, mask_mod(row, i32(b), i32(h), q, i32(kv))) << tile;
      }
    }
  }
  seen[local] = found;
  workgroupBarrier();
  if (local == 0u) {
    for (var i = 1u; i < THREADS; i += 1u) { found |= seen[i]; }
    var map = 0u;
    for (var tile = 0u; tile < 16u; tile += 1u) {
      let kept = (found >> tile) & 1u;
      let dropped = (found >> (tile + 16u)) & 1u;
      map |= (kept * (2u - dropped)) << (2u * tile);
    }
    maps[n] = map;
  }
}
