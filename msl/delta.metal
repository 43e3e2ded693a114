// delta: what the gradient kernels need of each query row.
//
// `delta` computes, of 8 rows, lse with the attention sink in the sum, and rowsum(out * dout) less what
//   the gradient of lse adds: dScore = P (dP - delta), where P = exp(score - lse). 8 lanes share a row.
// `dsink` adds up the gradient of one query head's sink, over all batch entries and rows in order.
#include "common.metal"

#define V_DIM 64           // columns of out and dout

// The sum over `lanes` neighbouring lanes, a power of two.
inline float lane_sum(float x, ushort lanes) {
  for (ushort by = 1; by < lanes; by *= 2) x += simd_shuffle_xor(x, by);
  return x;
}

[[max_total_threads_per_threadgroup(64)]]
kernel void delta(device const float* lse [[buffer(0)]],         // [B, Hq, L] from lse_at, without sinks
                  device const float* dlse [[buffer(1)]],        // [B, Hq, L] from dlse_at, or unread
                  device const Elem* out [[buffer(2)]],          // [B, Hq, L, Dv]
                  device const Elem* dout [[buffer(3)]],         // [B, Hq, L, Dv]
                  device float* stats [[buffer(4)]],             // lse, delta at delta_at, dsink at capture_at: [B, Hq, L]
                  constant uint* tables [[buffer(5)]],           // sinks
                  constant Params& p [[buffer(8)]],
                  uint3 threadgroup_at [[threadgroup_position_in_grid]],
                  uint thread_index [[thread_index_in_threadgroup]]) {
  const uint id = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (id >= p.groups) return;
  const uint index = 8u * id + thread_index / 8u, lane = thread_index % 8u;
  const bool there = index < p.batch * p.q_heads * p.q_len;
  const uint row = index % p.q_len, h = index / p.q_len % p.q_heads, b = index / (p.q_len * p.q_heads);
  float sum = 0.0f;
  if (there) {
    device const Elem* out_row = out + p.out.x + ulong(b) * p.out.y + ulong(h) * p.out.z + ulong(row) * p.out.w;
    device const Elem* dout_row = dout + p.dout.x + ulong(b) * p.dout.y + ulong(h) * p.dout.z + ulong(row) * p.dout.w;
    for (uint column = 4u * lane; column < V_DIM; column += 32u) {
      const vec<Elem, 4> x = read<4>(out_row, column, V_DIM), y = read<4>(dout_row, column, V_DIM);
      #pragma unroll
      for (uint i = 0; i < 4u; i++) sum = fma(float(widen(x[i])), float(widen(y[i])), sum);
    }
  }
  float total = lane_sum(sum, 8);
  if (!there || lane != 0u) return;

  const float row_lse = lse[p.lse_at + index];
  const bool empty = as_type<uint>(row_lse) == MINUS_INFINITY;
  float with_sink = row_lse, d_sink = 0.0f;
  if (p.sinks_at != NONE && !empty) {
    const float sink = as_type<float>(tables[p.sinks_at + h]), larger = max(row_lse, sink);
    with_sink = larger + log(exp(row_lse - larger) + exp(sink - larger));
    d_sink = -exp(sink - with_sink) * total;
  }
  if (p.capture_at != NONE) stats[p.capture_at + index] = d_sink;
  if (p.dlse_at != NONE && !empty) total -= dlse[p.dlse_at + index] * exp(with_sink - row_lse);
  stats[index] = with_sink;
  stats[p.delta_at + index] = total;
}

[[max_total_threads_per_threadgroup(32)]]
kernel void dsink(device float* stats [[buffer(4)]],             // from capture_at: dsink of each row [B, Hq, L], of each head [Hq]
                  constant Params& p [[buffer(8)]],
                  uint3 threadgroup_at [[threadgroup_position_in_grid]],
                  uint lane [[thread_index_in_simdgroup]]) {
  const uint h = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (h >= p.groups) return;
  float sum = 0.0f;
  for (uint b = 0; b < p.batch; b++)
    for (uint row = lane; row < p.q_len; row += 32u) sum += stats[p.capture_at + (b * p.q_heads + h) * p.q_len + row];
  const float total = lane_sum(sum, 32);
  if (lane == 0u) stats[p.capture_at + p.batch * p.q_heads * p.q_len + h] = total;
}
