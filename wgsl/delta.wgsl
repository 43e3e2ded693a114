// delta: what the gradient kernels need of each query row.
//
// `delta` computes, of 8 rows, lse with the attention sink in the sum, and rowsum(out * dout) less
//   what the gradient of lse adds: dScore = P (dP - delta), where P = exp(score - lse).
// `dsink` adds up the gradient of one query head's sink, over all batch entries and rows in order.

//#include common.wgsl

const V_DIM: u32 = 64u;
const V_QUADS: u32 = (V_DIM + 3u) / 4u;

@group(0) @binding(0) var<storage, read> lse: array<f32>;            // [B, Hq, L] from lse_at, without sinks
@group(0) @binding(1) var<storage, read> dlse: array<f32>;           // [B, Hq, L] from dlse_at, or unread
@group(0) @binding(2) var<storage, read> v: array<Word>;             // out [B, Hq, L, Dv]
@group(0) @binding(3) var<storage, read> dout: array<Word>;          // [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;    // lse, delta at delta_at, dsink at capture_at: [B, Hq, L], then [Hq]
// What the load files name besides; no entry point here uses them.
@group(0) @binding(0) var<storage, read> q: array<Word>;
@group(0) @binding(1) var<storage, read> k: array<Word>;
@group(0) @binding(7) var<storage, read_write> out: array<OutWord>;

//@slot load
//#include load_f32.wgsl
//@end
//@slot load_dout
//#include load_dout.wgsl
//@end

var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn delta(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let rows = p.batch * p.q_heads * p.q_len;
  let index = 8u * id + local / 8u;
  let h = (index / p.q_len) % p.q_heads;
  var sum = 0.0;
  if (index < rows) {
    let r = index % p.q_len;
    let b = index / (p.q_len * p.q_heads);
    let out_base = p.out.x + b * p.out.y + h * p.out.z + r * p.out.w;
    let dout_base = p.dout.x + b * p.dout.y + h * p.dout.z + r * p.dout.w;
    for (var quad = local % 8u; quad < V_QUADS; quad += 8u) {
      let left = V_DIM - 4u * quad;
      sum += dot(widen(load_v(out_base + 4u * quad, left)), widen(load_dout(dout_base + 4u * quad, left)));
    }
  }
  sums[local] = sum;
  workgroupBarrier();
  if (index < rows && local % 8u == 0u) {
    var total = 0.0;
    for (var x = 0u; x < 8u; x += 1u) { total += sums[local + x]; }
    let row_lse = lse[p.lse_at + index];
    var with_sink = row_lse;
    var d_sink = 0.0;
    if (p.sinks_at != NONE && !is_minus_infinity(row_lse)) {
      let sink = bitcast<f32>(tables[p.sinks_at + h]);
      let larger = max(row_lse, sink);
      with_sink = larger + log(exp(row_lse - larger) + exp(sink - larger));
      d_sink = -exp(sink - with_sink) * total;
    }
    if (p.capture_at != NONE) { stats[p.capture_at + index] = d_sink; }
    if (p.dlse_at != NONE && !is_minus_infinity(row_lse)) {
      total -= dlse[p.dlse_at + index] * exp(with_sink - row_lse);
    }
    stats[index] = with_sink;
    stats[p.delta_at + index] = total;
  }
}

@compute @workgroup_size(64)
fn dsink(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let h = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (h >= p.groups) { return; }
  var sum = 0.0;
  for (var b = 0u; b < p.batch; b += 1u) {
    for (var r = local; r < p.q_len; r += 64u) {
      sum += stats[p.capture_at + (b * p.q_heads + h) * p.q_len + r];
    }
  }
  sums[local] = sum;
  workgroupBarrier();
  if (local == 0u) {
    var total = 0.0;
    for (var x = 0u; x < 64u; x += 1u) { total += sums[x]; }
    stats[p.capture_at + p.batch * p.q_heads * p.q_len + h] = total;
  }
}
