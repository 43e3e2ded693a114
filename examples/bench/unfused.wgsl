// Attention without fusion, as programs have it that multiply matrices and take a softmax: three kernels,
// and the whole score matrix in memory. What the bench measures against.
//
//   scores:  S = q k^T * scale, in base 2; a workgroup computes TILE rows by TILE columns
//   weights: each row of S becomes its softmax; a workgroup computes a row
//   output:  O = S v; a workgroup computes TILE rows by 64 columns
//
// 64 invocations form an 8 x 8 grid (x, y). Invocation (x, y) has the rows y * ROWS + i and the columns
// x + 8 j of S. Lengths are multiples of TILE. The causal variant skips the tiles above the diagonal.

const HEAD_DIM: u32 = 64u;
const ROWS: u32 = 8u;          // register tile: ROWS x ROWS of S, 4 or 8
const CAUSAL: bool = false;

const TILE: u32 = 8u * ROWS;
const QUADS: u32 = HEAD_DIM / 4u;
const STEP: u32 = 4u;          // vec4 of the summed dimension that are staged at once
const GROUPS: u32 = ROWS / 4u; // vec4 of a row of the register tile
const OUT: u32 = 2u;           // vec4 of an output row in one invocation

struct Params {
  q_len: u32,       // rows of q in memory
  kv_len: u32,      // columns of S
  first_row: u32,   // row of q that is row 0 of S
  rows: u32,        // rows of S, a multiple of TILE
  first_head: u32,  // head that is head 0 of S
  scale: f32,       // factor of dot(q, k), times log2(e)
  zero: u32,        // always 0, which a compiler cannot know: keeps long loops rolled
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;         // [H, L, D]
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;         // [H, S, D]
@group(0) @binding(2) var<storage, read> v: array<vec4<f32>>;         // [H, S, D]
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>; // [H, L, D]
@group(0) @binding(4) var<storage, read_write> s: array<f32>;         // [heads, rows, S]
@group(0) @binding(5) var<uniform> p: Params;

var<workgroup> left: array<vec4<f32>, TILE * STEP>;    // TILE rows of q, then of S
var<workgroup> right: array<vec4<f32>, 256>;           // TILE rows of k, or 16 rows of v by 64 columns
var<workgroup> reduced: array<f32, 64>;

@compute @workgroup_size(8, 8)
fn scores(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(local_invocation_id) at: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let row = group.y * TILE;
  let column = group.x * TILE;
  if (CAUSAL && column > p.first_row + row + TILE - 1u) { return; }
  let head = p.first_head + group.z;
  let q_base = (head * p.q_len + p.first_row + row) * QUADS;
  let k_base = (head * p.kv_len + column) * QUADS;
  var sum = array<array<vec4<f32>, GROUPS>, ROWS>();
  for (var i = 0u; i < ROWS; i += 1u) {
    for (var g = 0u; g < GROUPS; g += 1u) { sum[i][g] = vec4<f32>(0.0); }
  }
  for (var d = 0u; d < QUADS + p.zero; d += STEP) {
    for (var i = local; i < TILE * STEP + p.zero; i += 64u) {
      left[i] = q[q_base + (i / STEP) * QUADS + d + i % STEP];
      right[i] = k[k_base + (i / STEP) * QUADS + d + i % STEP];
    }
    workgroupBarrier();
    for (var e = 0u; e < STEP + p.zero; e += 1u) {
      var a = array<vec4<f32>, ROWS>();
      for (var i = 0u; i < ROWS; i += 1u) { a[i] = left[(at.y * ROWS + i) * STEP + e]; }
      for (var g = 0u; g < GROUPS; g += 1u) {
        let b0 = right[(at.x + 32u * g) * STEP + e];
        let b1 = right[(at.x + 32u * g + 8u) * STEP + e];
        let b2 = right[(at.x + 32u * g + 16u) * STEP + e];
        let b3 = right[(at.x + 32u * g + 24u) * STEP + e];
        for (var i = 0u; i < ROWS; i += 1u) {
          sum[i][g] += vec4<f32>(dot(a[i], b0), dot(a[i], b1), dot(a[i], b2), dot(a[i], b3));
        }
      }
    }
    workgroupBarrier();
  }
  for (var i = 0u; i < ROWS; i += 1u) {
    let base = (group.z * p.rows + row + at.y * ROWS + i) * p.kv_len + column + at.x;
    for (var j = 0u; j < ROWS; j += 1u) { s[base + 8u * j] = sum[i][j / 4u][j % 4u] * p.scale; }
  }
}

@compute @workgroup_size(64)
fn weights(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let base = (group.y * p.rows + group.x) * p.kv_len;
  let last = p.first_row + group.x;
  let kept = select(p.kv_len, min(p.kv_len, last + 1u), CAUSAL);
  var m = -1e30;
  for (var i = local; i < kept; i += 64u) { m = max(m, s[base + i]); }
  reduced[local] = m;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half >>= 1u) {
    if (local < half) { reduced[local] = max(reduced[local], reduced[local + half]); }
    workgroupBarrier();
  }
  m = reduced[0];
  workgroupBarrier();
  var l = 0.0;
  for (var i = local; i < kept; i += 64u) {
    let weight = exp2(s[base + i] - m);
    s[base + i] = weight;
    l += weight;
  }
  reduced[local] = l;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half >>= 1u) {
    if (local < half) { reduced[local] += reduced[local + half]; }
    workgroupBarrier();
  }
  let share = 1.0 / reduced[0];
  for (var i = local; i < kept; i += 64u) { s[base + i] *= share; }
  // The rest of the diagonal's tile, which `output` reads.
  for (var i = kept + local; i < min(p.kv_len, (last / TILE + 1u) * TILE); i += 64u) { s[base + i] = 0.0; }
}

@compute @workgroup_size(8, 8)
fn output(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(local_invocation_id) at: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let row = group.y * TILE;
  let head = p.first_head + group.z;
  let s_base = (group.z * p.rows + row) * p.kv_len;
  let v_base = head * p.kv_len * QUADS + group.x * 16u;
  let kept = select(p.kv_len, min(p.kv_len, p.first_row + row + TILE), CAUSAL);
  var o = array<array<vec4<f32>, OUT>, ROWS>();
  for (var i = 0u; i < ROWS; i += 1u) {
    for (var c = 0u; c < OUT; c += 1u) { o[i][c] = vec4<f32>(0.0); }
  }
  for (var j = 0u; j < kept; j += 4u * STEP) {
    for (var i = local; i < TILE * STEP + p.zero; i += 64u) {
      let from_s = s_base + (i / STEP) * p.kv_len + j + 4u * (i % STEP);
      left[i] = vec4<f32>(s[from_s], s[from_s + 1u], s[from_s + 2u], s[from_s + 3u]);
    }
    for (var i = local; i < 256u + p.zero; i += 64u) { right[i] = v[v_base + (j + i / 16u) * QUADS + i % 16u]; }
    workgroupBarrier();
    for (var e = 0u; e < STEP + p.zero; e += 1u) {
      var a = array<vec4<f32>, ROWS>();
      for (var i = 0u; i < ROWS; i += 1u) { a[i] = left[(at.y * ROWS + i) * STEP + e]; }
      for (var f = 0u; f < 4u; f += 1u) {
        for (var c = 0u; c < OUT; c += 1u) {
          let value = right[(4u * e + f) * 16u + at.x + 8u * c];
          for (var i = 0u; i < ROWS; i += 1u) { o[i][c] = fma(vec4<f32>(a[i][f]), value, o[i][c]); }
        }
      }
    }
    workgroupBarrier();
  }
  for (var i = 0u; i < ROWS; i += 1u) {
    let base = (head * p.q_len + p.first_row + row + at.y * ROWS + i) * QUADS + group.x * 16u + at.x;
    for (var c = 0u; c < OUT; c += 1u) { out[base + 8u * c] = o[i][c]; }
  }
}
