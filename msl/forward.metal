// forward: out = softmax(score_mod(q k^T * scale)) v over the kept pairs, and its lse and max.
//
// A threadgroup computes TILE_ROWS query rows of one head, each simdgroup 8 * ROW_FRAGMENTS of them. It walks
// the tiles of their block list and attends to each (attend.metal). When v has more columns than V_CHUNK
// the walk is repeated for each chunk of them.
#include "common.metal"
#include "attend.metal"

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void forward(device const Elem* q [[buffer(0)]],          // [B, Hq, L, D]
                    device const Elem* k [[buffer(1)]],          // [Bkv, Hkv, S, D]
                    device const Elem* v [[buffer(2)]],          // [Bkv, Hkv, S, Dv]
                    device Elem* out [[buffer(3)]],              // [B, Hq, L, Dv]
                    device float* stats [[buffer(4)]],           // lse [B, Hq, L] | max [B, Hq, L]
                    constant uint* tables [[buffer(5)]],         // block lists, q_offset, kv_len, sinks
                    device const uint* captures [[buffer(6)]],
                    device const uint* large [[buffer(7)]],
                    constant Params& p [[buffer(8)]],
                    uint3 threadgroup_at [[threadgroup_position_in_grid]],
                    uint thread_index [[thread_index_in_threadgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
  const uint id = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (id >= p.groups) return;
  const uint tile_count = (p.q_len + TILE_ROWS - 1u) / TILE_ROWS;
  const uint row0 = id % tile_count * TILE_ROWS;
  const uint h = id / tile_count % p.q_heads;
  const uint b = id / (tile_count * p.q_heads);

  const Ctx ctx = {p, tables, captures, large};
  const uint kv_len = kv_len_of(ctx, b);
  const Rows q_rows = {q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z, p.q.w, p.q_len, HEAD_DIM};
  const Rows k_rows = {k + p.k.x + ulong(b) * p.k.y + ulong(h / p.group) * p.k.z, p.k.w, kv_len, HEAD_DIM};
  const Rows v_rows = {v + p.v.x + ulong(b) * p.v.y + ulong(h / p.group) * p.v.z, p.v.w, kv_len, V_DIM};
  DECLARE_TILES(tiles, TILE_ELEMENTS + Q_TILE);

  // A row past the end repeats the last one, and is not stored.
  Queries queries;
  queries.b = b;
  queries.own = simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    const uint at = min(row0 + queries.own + 8u * r, p.q_len - 1u);
    queries.h[r] = int(h);
    queries.q[r] = int(at) + q_offset_of(ctx, b);
    queries.row[r] = row_mod(ctx, int(b), int(h), queries.q[r]);
    load_row(queries, r, q_rows.first + ulong(at) * q_rows.stride, true, lane);
  }
  stage_q(tiles, q_rows, row0, thread_index);

  for (uint chunk = 0; chunk < V_DIM; chunk += V_CHUNK) {
    Online online;
    begin(online);
    Walk walk = walk_row(ctx, b, h, row0, kv_len);
    while (next_tile(ctx, walk)) {
      uint kind[ROW_FRAGMENTS];
      #pragma unroll
      for (uint r = 0; r < ROW_FRAGMENTS; r++) kind[r] = walk.kind;
      attend(online, queries, ctx, tiles, k_rows, v_rows, walk.first, kind, chunk, thread_index, lane);
    }

    // out = O / l. A row with nothing kept: out 0, lse and max -inf.
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      const float sum = row_sum(online.l[r]);
      const uint at = row0 + queries.own + 8u * r;
      if (at >= p.q_len) continue;
      const bool empty = sum == 0.0f;
      const float lse = online.m[r] + log(sum);
      float factor = 1.0f / sum;
      if (p.sinks_at != NONE) factor /= 1.0f + exp(as_type<float>(tables[p.sinks_at + h]) - lse);
      device Elem* out_row = out + p.out.x + ulong(b) * p.out.y + ulong(h) * p.out.z + ulong(at) * p.out.w;
      store_row<V_PACK, V_GROUPS>(out_row, online.o[r], chunk, V_DIM, empty ? 0.0f : factor, false, lane);
      if (lane_col(lane) == 0u && chunk == 0u) {
        const ulong stat = ulong(b * p.q_heads + h) * p.q_len + at;
        if (p.lse_at != NONE) stats[p.lse_at + stat] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(lse));
        if (p.max_at != NONE) stats[p.max_at + stat] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(online.m[r]));
      }
    }
  }
}
