// Unfused attention of one query row of each head, in three kernels with the scores in memory: scores
// s = q k^T, weights p = softmax(s), output o = p v. What `decode.wgsl` is measured against.

const DIM: u32 = 64u;
const QUADS: u32 = DIM / 4u;

struct Params {
  heads: u32,      // query heads
  group: u32,      // query heads that share a kv head
  kv_len: u32,
  scale: f32,      // of the scores, in base 2
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;         // [Hq, 1, D]
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;         // [Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<vec4<f32>>;         // [Hkv, S, D]
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>; // [Hq, 1, D]
@group(0) @binding(4) var<storage, read_write> s: array<f32>;         // [Hq, S]
@group(0) @binding(5) var<uniform> p: Params;

var<workgroup> reduced: array<f32, 64>;
var<workgroup> sums: array<vec4<f32>, 64>;

// An invocation computes the score of one key.
@compute @workgroup_size(64)
fn scores(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let key = group.x * 64u + local;
  let h = group.y;
  if (key >= p.kv_len) { return; }
  let at = (h / p.group * p.kv_len + key) * QUADS;
  var sum = 0.0;
  for (var d = 0u; d < QUADS; d += 1u) { sum += dot(q[h * QUADS + d], k[at + d]); }
  s[h * p.kv_len + key] = sum * p.scale;
}

// A workgroup turns the scores of a head into weights.
@compute @workgroup_size(64)
fn weights(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let base = group.x * p.kv_len;
  var m = -1e30;
  for (var i = local; i < p.kv_len; i += 64u) { m = max(m, s[base + i]); }
  reduced[local] = m;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half >>= 1u) {
    if (local < half) { reduced[local] = max(reduced[local], reduced[local + half]); }
    workgroupBarrier();
  }
  m = reduced[0];
  workgroupBarrier();
  var l = 0.0;
  for (var i = local; i < p.kv_len; i += 64u) {
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
  for (var i = local; i < p.kv_len; i += 64u) { s[base + i] *= share; }
}

// A workgroup adds up the values of a head: 4 invocations share the keys of each vec4 of columns.
@compute @workgroup_size(64)
fn output(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let h = group.x;
  let quad = local % QUADS;
  var o = vec4<f32>(0.0);
  for (var key = local / QUADS; key < p.kv_len; key += 4u) {
    o += s[h * p.kv_len + key] * v[(h / p.group * p.kv_len + key) * QUADS + quad];
  }
  sums[local] = o;
  workgroupBarrier();
  if (local < QUADS) {
    out[h * QUADS + quad] = (sums[local] + sums[local + 16u]) + (sums[local + 32u] + sums[local + 48u]);
  }
}
