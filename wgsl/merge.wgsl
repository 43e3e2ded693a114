// merge: out, lse and max of query rows whose keys were attended to in ranges, each with a softmax of its
// own, because k or v is longer than a binding.
//
// A workgroup computes one row: the sum over the ranges of exp(lse of the range - lse) times out of the
// range. The order of the ranges is fixed, so the result is the same every time.

//#include common.wgsl

const V_DIM: u32 = 64u;
const V_QUADS: u32 = (V_DIM + 3u) / 4u;

@group(0) @binding(0) var<storage, read> q: array<Word>;              // out of each range [ranges, rows, Dv]
@group(0) @binding(1) var<storage, read> k: array<Word>;              // nothing
@group(0) @binding(2) var<storage, read> v: array<Word>;              // nothing
@group(0) @binding(3) var<storage, read_write> out: array<OutWord>;   // [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;     // lse [B, Hq, L] | max [B, Hq, L]
@group(0) @binding(7) var<storage, read> parts: array<f32>;           // from the first row on: lse of each range [ranges, rows] | max

//@slot load
//#include load_f32.wgsl
//@end

@compute @workgroup_size(64)
fn merge(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let n = workgroup.x + workgroup.y * p.fold;       // row of the parts
  let rows = p.groups - p.first_group;
  if (n >= rows) { return; }
  let row = p.first_group + n;                      // row of [B, Hq, L]
  let h = row / p.q_len % p.q_heads;
  let b = row / (p.q_len * p.q_heads);

  var m = FLOOR;
  for (var part = 0u; part < p.splits; part += 1u) {
    let lse = parts[row + part * rows];
    if (!is_minus_infinity(lse)) { m = max(m, lse); }
  }
  var sum = 0.0;
  var row_max = minus_infinity();
  for (var part = 0u; part < p.splits; part += 1u) {
    let lse = parts[row + part * rows];
    if (!is_minus_infinity(lse)) {
      sum += exp(lse - m);
      if (p.max_at != NONE) {
        let other = parts[row + (p.splits + part) * rows];
        row_max = select(max(row_max, other), other, is_minus_infinity(row_max));
      }
    }
  }
  // A row with nothing kept: out 0, lse and max -inf.
  let empty = sum == 0.0;
  let lse = select(m + log(sum), minus_infinity(), empty);
  var factor = select(1.0 / sum, 0.0, empty);
  if (p.sinks_at != NONE) {
    let sink = bitcast<f32>(tables[p.sinks_at + h]);
    factor *= select(1.0 / (1.0 + exp(sink - lse)), 0.0, empty);
  }
  for (var quad = local; quad < V_QUADS; quad += 64u) {
    var value = vec4<f32>(0.0);
    for (var part = 0u; part < p.splits; part += 1u) {
      let lse_part = parts[row + part * rows];
      if (!is_minus_infinity(lse_part)) {
        let at = (part * rows + n) * V_DIM + 4u * quad;
        value += exp(lse_part - m) * widen(load_q(at, V_DIM - 4u * quad));
      }
    }
    let at = p.out.x + b * p.out.y + h * p.out.z + (row % p.q_len) * p.out.w + 4u * quad;
    store_out(at, V_DIM - 4u * quad, select(value * factor, vec4<f32>(0.0), empty));
  }
  if (local == 0u) {
    if (p.lse_at != NONE) { stats[p.lse_at + row] = lse; }
    if (p.max_at != NONE) { stats[p.max_at + row] = row_max; }
  }
}
