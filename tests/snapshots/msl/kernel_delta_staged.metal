// delta: what the gradient kernels need of each query row.
//
// `delta` computes, of 8 rows, lse with the attention sink in the sum, and rowsum(out * dout) less what
//   the gradient of lse adds: dScore = P (dP - delta), where P = exp(score - lse). 8 lanes share a row.
// `dsink` adds up the gradient of one query head's sink, over all batch entries and rows in order.
// Parameters, tables and captured tensors, as every kernel binds them; element types; the attention mods.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
// Metal's default mode may assume NaN and infinity away; from 3.2 on a text can ask for less.
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(relaxed)
#endif

// Threadgroup arrays in a kernel's body. Whoever runs the text elsewhere may define it.
#ifndef SHARED
#define SHARED threadgroup
#endif

#define INFO 1        // uint4 of `info`: two per captured tensor, one per four scalars
#define Elem half     // of q, k, v and out: half, float, or ushort with the bits of a bfloat
#define ALIGNED 1     // every offset, stride and dim of q, k, v and out is a multiple of 4 elements
#define NONE 0xffffffffu

struct Params {
  uint batch;         // entries of q and out
  uint q_heads;       // heads of q and out
  uint kv_heads;      // heads of k and v
  uint group;         // query heads that share a kv head: q_heads / kv_heads
  uint q_len;         // rows of q
  uint kv_len;        // rows of k and v in memory; how many count is per batch entry, at kv_len_at
  uint q_blocks;      // blocks of 128 rows in q_len
  uint kv_blocks;     // blocks of 128 columns in kv_len
  uint mask_batch;    // batch entries of the block mask: batch, or 1 if all share one
  uint mask_heads;    // heads of the block mask: q_heads, or 1
  uint lists;         // in tables: headers of the lists of each query row block
  uint lists_t;       // in tables: headers of the transposed lists, of each kv block
  uint q_offset_at;   // in tables: the position of query row 0, an i32 per batch entry
  uint kv_len_at;     // in tables: how many rows of k and v count, per batch entry
  uint sinks_at;      // in tables: an f32 attention sink per query head, or none
  uint splits;        // decode: parts that kv_len is cut into
  uint lse_at;        // in stats: lse, or none
  uint max_at;        // in stats: max, or none
  uint delta_at;      // in stats: delta = rowsum(out * dout)
  uint dlse_at;       // in stats: the gradient of lse, or none
  float scale;        // factor of dot(q, k)
  uint first_group;   // number of the first workgroup of this dispatch
  uint groups;        // end of the workgroups that have work
  uint fold;          // workgroups in x per step of y
  uint split_len;     // decode: columns in a part, a multiple of 32
  uint accumulate;    // gradients: 1 where a launch adds to what is there, 0 where it replaces it
  uint capture_at;    // captured gradients: where this pass writes, in elements
  uint zero;          // always 0, which a compiler cannot know: keeps long loops rolled
  uint4 q;            // view of q
  uint4 k;            // view of k
  uint4 v;            // view of v
  uint4 out;          // view of out
  uint4 dout;         // view of dout
  uint4 dq;           // view of dq
  uint4 dk;           // view of dk
  uint4 dv;           // view of dv
  uint4 info[INFO]; // captures: dims, then offsets; then scalars
};

// What the mods may read besides their arguments.
struct Ctx {
  constant Params& p;
  constant uint* tables;        // block lists, q_offset, kv_len, sinks
  device const uint* captures;  // captured tensors, one after the other
  device const uint* large;     // one large captured tensor, in place
};

// The position of query row 0, which mods see as q.
inline int q_offset_of(thread const Ctx& ctx, uint b) { return int(ctx.tables[ctx.p.q_offset_at + b]); }
// How many rows of k and v count.
inline uint kv_len_of(thread const Ctx& ctx, uint b) { return ctx.tables[ctx.p.kv_len_at + b]; }

// Scores are exponentiated base 2 inside the kernels; score_mod, lse and max are in natural units.
#define LOG2E 1.4426950408889634f
// The row max before any score. Finite, and no kept score lies below it; -inf has weight 0 by itself.
#define LOWEST (-3.402823466e38f)
// As bits: arithmetic with an infinite constant means nothing in Metal's default mode.
#define MINUS_INFINITY 0xff800000u

// What a matrix product takes: halves as they are, floats, bfloats widened to floats.
inline half widen(half x) { return x; }
inline float widen(float x) { return x; }
inline float widen(ushort x) { return as_type<float>(uint(x) << 16); }
typedef decltype(widen(Elem(0))) Operand;
// Rounds to nearest, ties to even.
inline void narrow(float x, thread half& y) { y = half(x); }
inline void narrow(float x, thread float& y) { y = x; }
inline void narrow(float x, thread ushort& y) {
  uint bits = as_type<uint>(x);
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y = ushort(nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// N neighbours of a row from column `column` on; past the end of the row, zeros.
template <int N> inline vec<Elem, N> read(device const Elem* row, uint column, uint columns) {
  vec<Elem, N> x = vec<Elem, N>(Elem(0));
  if (ALIGNED) {
    if (column < columns) x = *(device const vec<Elem, N>*)(row + column);
  } else {
    for (uint i = 0; i < N; i++) if (column + i < columns) x[i] = row[column + i];
  }
  return x;
}

// The same to memory, rounded to the element type.
template <int N> inline void write(device Elem* row, uint column, uint columns, vec<float, N> x) {
  vec<Elem, N> rounded;
  for (uint i = 0; i < N; i++) {
    Elem y;
    narrow(x[i], y);
    rounded[i] = y;
  }
  if (ALIGNED) {
    if (column < columns) *(device vec<Elem, N>*)(row + column) = rounded;
  } else {
    for (uint i = 0; i < N; i++) if (column + i < columns) row[column + i] = rounded[i];
  }
}

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
