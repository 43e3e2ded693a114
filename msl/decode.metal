// decode: attention of few queries over many keys, in two passes: entry `split`, then `combine`.
//
// The query rows of all heads that share a kv head are packed into one threadgroup, so that k and v are read
// once per kv head. `split` cuts the keys into p.splits parts of p.split_len; a threadgroup attends to one
// part and leaves O, m and l of each row, in f32. `combine` weighs the parts: a simdgroup for each row.
// The order of the parts is fixed, so the result is the same every time.
#include "common.metal"
#include "attend.metal"

// In partials: O [B, Hq, L, splits, Dv], then (m, l) [B, Hq, L, splits, 2].
inline ulong partial_of(constant Params& p, ulong row, uint split) { return row * p.splits + split; }
inline ulong partial_stats(constant Params& p) { return ulong(p.batch) * p.q_heads * p.q_len * p.splits * V_DIM; }

// The kind of tile `tile` (32 keys) of the rows before 32, from the list of batch entry b and query head h.
inline uint kind_of(thread const Ctx& ctx, uint b, uint h, uint tile) {
  constant Params& p = ctx.p;
  constant uint* header = ctx.tables + p.lists + 4u * (((b % p.mask_batch) * p.mask_heads + h % p.mask_heads) * p.q_blocks);
  const uint block = tile * TILE / BLOCK;
  // The last run that begins at or before the block, then the last partial block.
  uint first = header[0], end = header[1];
  while (first < end) {
    uint middle = first + (end - first) / 4u * 2u;
    if (ctx.tables[middle + 1u] <= block) first = middle + 2u;
    else end = middle;
  }
  if (first < header[1] && ctx.tables[first] <= block) return FULL;
  first = header[2];
  end = header[3];
  while (first < end) {
    uint middle = first + (end - first) / 4u * 2u;
    if (ctx.tables[middle] < block) first = middle + 2u;
    else end = middle;
  }
  if (first < header[3] && ctx.tables[first] == block) return ctx.tables[first + 1u] >> (2u * (tile % 4u)) & 3u;
  return EMPTY;
}

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void split(device const Elem* q [[buffer(0)]],            // [B, Hq, L, D], L at most 32
                  device const Elem* k [[buffer(1)]],            // [Bkv, Hkv, S, D]
                  device const Elem* v [[buffer(2)]],            // [Bkv, Hkv, S, Dv]
                  device float* partials [[buffer(3)]],
                  constant uint* tables [[buffer(5)]],           // block lists, q_offset, kv_len, sinks
                  device const uint* captures [[buffer(6)]],
                  device const uint* large [[buffer(7)]],
                  constant Params& p [[buffer(8)]],
                  uint3 threadgroup_at [[threadgroup_position_in_grid]],
                  uint thread_index [[thread_index_in_threadgroup]],
                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]]) {
  const uint id = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (id >= p.groups) return;
  const uint rows = p.group * p.q_len;
  const uint tile_count = (rows + TILE_ROWS - 1u) / TILE_ROWS;
  const uint part = id % p.splits;
  const uint row0 = id / p.splits % tile_count * TILE_ROWS;
  const uint kv_head = id / (p.splits * tile_count) % p.kv_heads;
  const uint b = id / (p.splits * tile_count * p.kv_heads);

  const Ctx ctx = {p, tables, captures, large};
  const uint kv_len = kv_len_of(ctx, b);
  const Rows k_rows = {k + p.k.x + ulong(b) * p.k.y + ulong(kv_head) * p.k.z, p.k.w, kv_len, HEAD_DIM};
  const Rows v_rows = {v + p.v.x + ulong(b) * p.v.y + ulong(kv_head) * p.v.z, p.v.w, kv_len, V_DIM};
  DECLARE_TILES(tiles, TILE_ELEMENTS + Q_TILE);

  Queries queries;
  queries.b = b;
  queries.own = simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    const uint packed = row0 + queries.own + 8u * r, at = min(packed, rows - 1u);
    const uint h = kv_head * p.group + at / p.q_len;
    queries.h[r] = int(h);
    queries.q[r] = int(at % p.q_len) + q_offset_of(ctx, b);
    queries.row[r] = row_mod(ctx, int(b), int(h), queries.q[r]);
    load_row(queries, r, q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z + ulong(at % p.q_len) * p.q.w, packed < rows, lane);
  }

  for (uint chunk = 0; chunk < V_DIM; chunk += V_CHUNK) {
    Online online;
    begin(online);
    const uint end = min((part + 1u) * p.split_len, kv_len);
    for (uint kv = part * p.split_len; kv < end; kv += TILE) {
      // Heads may have lists of their own: a tile is left out when it is empty for all of the group.
      uint any = EMPTY, kind[ROW_FRAGMENTS];
      for (uint h = 0; h < min(p.group, p.mask_heads); h++) any |= kind_of(ctx, b, kv_head * p.group + h, kv / TILE);
      if (any == EMPTY) continue;
      #pragma unroll
      for (uint r = 0; r < ROW_FRAGMENTS; r++) kind[r] = kind_of(ctx, b, uint(queries.h[r]), kv / TILE);
      attend(online, queries, ctx, tiles, k_rows, v_rows, kv, kind, chunk, thread_index, lane);
    }

    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      const float sum = row_sum(online.l[r]);
      const uint packed = row0 + queries.own + 8u * r;
      if (packed >= rows) continue;
      const ulong partial = partial_of(p, (ulong(b) * p.q_heads + queries.h[r]) * p.q_len + packed % p.q_len, part);
      #pragma unroll
      for (uint g = 0; g < V_GROUPS; g++) {
        #pragma unroll
        for (uint i = 0; i < V_PACK; i++) {
          uint column = chunk + g * 4 * V_PACK + V_PACK * (lane_col(lane) / 2u) + i;
          float x = online.o[r][g * V_FRAGMENTS + i / 2u].thread_elements()[i % 2u];
          if (column < V_DIM) partials[partial * V_DIM + column] = x;
        }
      }
      if (lane_col(lane) == 0u && chunk == 0u) {
        partials[partial_stats(p) + 2u * partial] = online.m[r];
        partials[partial_stats(p) + 2u * partial + 1u] = sum;
      }
    }
  }
}

[[max_total_threads_per_threadgroup(32)]]
kernel void combine(device const float* partials [[buffer(0)]],
                    device Elem* out [[buffer(3)]],              // [B, Hq, L, Dv]
                    device float* stats [[buffer(4)]],           // lse [B, Hq, L] | max [B, Hq, L]
                    constant uint* tables [[buffer(5)]],
                    constant Params& p [[buffer(8)]],
                    uint3 threadgroup_at [[threadgroup_position_in_grid]],
                    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (row >= p.groups) return;
  const uint at = row % p.q_len, h = row / p.q_len % p.q_heads, b = row / (p.q_len * p.q_heads);
  device const float* part_stats = partials + partial_stats(p);

  float m = LOWEST;
  for (uint part = lane; part < p.splits; part += 32u) m = max(m, part_stats[2u * partial_of(p, row, part)]);
  m = simd_max(m);

  // Each lane weighs one part of 32, and adds up its columns of all of them.
  float sum = 0.0f, x[(V_DIM + 31) / 32];
  for (uint c = 0; c < (V_DIM + 31) / 32; c++) x[c] = 0.0f;
  for (uint part0 = 0; part0 < p.splits; part0 += 32u) {
    float weight = 0.0f;
    if (part0 + lane < p.splits) {
      const ulong partial = partial_of(p, row, part0 + lane);
      weight = exp2(max((part_stats[2u * partial] - m) * LOG2E, -200.0f));
      sum += part_stats[2u * partial + 1u] * weight;
    }
    for (uint i = 0; i < min(p.splits - part0, 32u); i++) {
      const float w = simd_shuffle(weight, i);
      device const float* o = partials + partial_of(p, row, part0 + i) * V_DIM;
      for (uint c = 0; c < (V_DIM + 31) / 32; c++) {
        const uint column = 32u * c + lane;
        if (column < V_DIM) x[c] += o[column] * w;
      }
    }
  }
  sum = simd_sum(sum);

  const bool empty = sum == 0.0f;
  const float lse = m + log(sum);
  float factor = 1.0f / sum;
  if (p.sinks_at != NONE) factor /= 1.0f + exp(as_type<float>(tables[p.sinks_at + h]) - lse);
  device Elem* out_row = out + p.out.x + ulong(b) * p.out.y + ulong(h) * p.out.z + ulong(at) * p.out.w;
  for (uint c = 0; c < (V_DIM + 31) / 32; c++) {
    const uint column = 32u * c + lane;
    Elem rounded;
    narrow(empty ? 0.0f : x[c] * factor, rounded);
    if (column < V_DIM) out_row[column] = rounded;
  }
  if (lane == 0u) {
    if (p.lse_at != NONE) stats[p.lse_at + row] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(lse));
    if (p.max_at != NONE) stats[p.max_at + row] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(m));
  }
}
