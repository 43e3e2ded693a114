// backward: dq, and dk and dv, of out = softmax(score_mod(q k^T * scale)) v, given dout and the gradient
// of lse. P and dP are computed again, tile by tile; nothing of size q_len * kv_len is kept.
//
// lse and delta come from delta.metal.
// `dq` computes dq of TILE_ROWS query rows of one head, over the tiles of their block list: dq += dS k.
// `dkv` computes dk and dv of TILE_ROWS rows of one kv head, over the query heads that share it and the
//   tiles of the rows' transposed lists: dv += P^T dout, dk += dS^T q.
// When a gradient has more columns than CHUNK the walk is repeated for each chunk of them.
// No float atomics: every sum has one owner and one order, so results repeat bit for bit.
#include "common.metal"
#include "recompute.metal"

#define DK 1               // whether dkv computes dk
#define DV 1               // and dv

#define DQ_PACK RESULT_PACK(HEAD_DIM)
#define DV_PACK RESULT_PACK(V_DIM)
// Groups of a chunk of a gradient with `dim` columns.
#define CHUNK_GROUPS(dim, n) RESULT_GROUPS((CHUNK) < (dim) ? (CHUNK) : (dim), n)
#define DQ_GROUPS CHUNK_GROUPS(HEAD_DIM, DQ_PACK)
#define DV_GROUPS CHUNK_GROUPS(V_DIM, DV_PACK)

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void dq(device const Elem* q [[buffer(0)]],               // [B, Hq, L, D]
               device const Elem* k [[buffer(1)]],               // [Bkv, Hkv, S, D]
               device const Elem* v [[buffer(2)]],               // [Bkv, Hkv, S, Dv]
               device const Elem* dout [[buffer(3)]],            // [B, Hq, L, Dv]
               device const float* stats [[buffer(4)]],          // lse, with sinks | delta, each [B, Hq, L]
               constant uint* tables [[buffer(5)]],              // block lists, q_offset, kv_len
               device const uint* captures [[buffer(6)]],
               device Elem* out [[buffer(7)]],                   // dq [B, Hq, L, D]
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

  const Ctx ctx = {p, tables, captures, captures};
  const uint kv_len = kv_len_of(ctx, b);
  const Rows q_rows = {q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z, p.q.w, p.q_len, HEAD_DIM};
  const Rows dout_rows = {dout + p.dout.x + ulong(b) * p.dout.y + ulong(h) * p.dout.z, p.dout.w, p.q_len, V_DIM};
  const Rows k_rows = {k + p.k.x + ulong(b) * p.k.y + ulong(h / p.group) * p.k.z, p.k.w, kv_len, HEAD_DIM};
  const Rows v_rows = {v + p.v.x + ulong(b) * p.v.y + ulong(h / p.group) * p.v.z, p.v.w, kv_len, V_DIM};
  DECLARE_TILES(tiles, AREAS * TILE_ELEMENTS);

  const uint own = row0 + simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  Own<HEAD_DIM, S_PACK, S_KEPT> own_q;
  Own<V_DIM, DP_PACK, DP_KEPT> own_dout;
  int position[ROW_FRAGMENTS];
  Row row[ROW_FRAGMENTS];
  Stat stat[ROW_FRAGMENTS];
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    const uint at = min(own + 8u * r, p.q_len - 1u);
    load_own(own_q, r, q_rows, at, lane);
    load_own(own_dout, r, dout_rows, at, lane);
    position[r] = int(at) + q_offset_of(ctx, b);
    row[r] = row_mod(ctx, int(b), int(h), position[r]);
    stat[r] = stat_of(ctx, stats, b, h, at);
  }

  for (uint chunk = 0; chunk < HEAD_DIM; chunk += CHUNK) {
    Accumulator gradient[ROW_FRAGMENTS][DQ_GROUPS * DQ_PACK / 2];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      #pragma unroll
      for (int c = 0; c < DQ_GROUPS * DQ_PACK / 2; c++) gradient[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    Walk walk = walk_row(ctx, b, h, row0, kv_len);
    while (next_tile(ctx, walk)) {
      Accumulator s[ROW_FRAGMENTS][COLUMN_FRAGMENTS], dp[ROW_FRAGMENTS][COLUMN_FRAGMENTS];
      if (AREAS == 2) stage_both(tiles, k_rows, v_rows, walk.first, thread_index);
      product(dp, own_dout, tiles + AREA_1, v_rows, walk.first, thread_index, lane);
      product(s, own_q, tiles, k_rows, walk.first, thread_index, lane);
      #pragma unroll
      for (uint i = 0; i < COLUMN_FRAGMENTS * 2u; i++) {
        const uint kv = walk.first + 8u * (i / 2u) + lane_col(lane) + i % 2u;
        #pragma unroll
        for (uint r = 0; r < ROW_FRAGMENTS; r++) {
          float weight = s[r][i / 2u].thread_elements()[i % 2u], ds = dp[r][i / 2u].thread_elements()[i % 2u];
          weigh(weight, ds, ctx, stat[r], row[r], b, int(h), position[r], kv, kv < kv_len, walk.kind);
          dp[r][i / 2u].thread_elements()[i % 2u] = ds;
        }
      }
      accumulate<DQ_PACK, DQ_GROUPS>(gradient, dp, tiles, k_rows, walk.first, chunk, AREAS == 1, thread_index, lane);
    }

    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      const uint at = own + 8u * r;
      if (at >= p.q_len) continue;
      device Elem* to = out + p.dq.x + ulong(b) * p.dq.y + ulong(h) * p.dq.z + ulong(at) * p.dq.w;
      store_row<DQ_PACK, DQ_GROUPS>(to, gradient[r], chunk, HEAD_DIM, p.scale, p.accumulate != 0u, lane);
    }
  }
}

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void dkv(device const Elem* q [[buffer(0)]],              // [B, Hq, L, D]
                device const Elem* k [[buffer(1)]],              // [Bkv, Hkv, S, D]
                device const Elem* v [[buffer(2)]],              // [Bkv, Hkv, S, Dv]
                device const Elem* dout [[buffer(3)]],           // [B, Hq, L, Dv]
                device const float* stats [[buffer(4)]],         // lse, with sinks | delta, each [B, Hq, L]
                constant uint* tables [[buffer(5)]],             // block lists, q_offset, kv_len
                device const uint* captures [[buffer(6)]],
                device Elem* out [[buffer(7)]],                  // dk [Bkv, Hkv, S, D] | dv [Bkv, Hkv, S, Dv]
                constant Params& p [[buffer(8)]],
                uint3 threadgroup_at [[threadgroup_position_in_grid]],
                uint thread_index [[thread_index_in_threadgroup]],
                uint simdgroup [[simdgroup_index_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]]) {
  const uint id = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (id >= p.groups) return;
  const uint tile_count = (p.kv_len + TILE_ROWS - 1u) / TILE_ROWS;
  const uint row0 = id % tile_count * TILE_ROWS;
  const uint kv_head = id / tile_count % p.kv_heads;
  const uint kv_batch = id / (tile_count * p.kv_heads);

  const Ctx ctx = {p, tables, captures, captures};
  const Rows k_rows = {k + p.k.x + ulong(kv_batch) * p.k.y + ulong(kv_head) * p.k.z, p.k.w, p.kv_len, HEAD_DIM};
  const Rows v_rows = {v + p.v.x + ulong(kv_batch) * p.v.y + ulong(kv_head) * p.v.z, p.v.w, p.kv_len, V_DIM};
  DECLARE_TILES(tiles, AREAS * TILE_ELEMENTS);

  const uint own = row0 + simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  Own<HEAD_DIM, S_PACK, S_KEPT> own_k;
  Own<V_DIM, DP_PACK, DP_KEPT> own_v;
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    load_own(own_k, r, k_rows, own + 8u * r, lane);
    load_own(own_v, r, v_rows, own + 8u * r, lane);
  }
  // Where all batch entries share k and v, dk has a batch stride of 0 and the sum goes over them.
  const bool shared_kv = p.dk.y == 0u;
  const uint first_b = shared_kv ? 0u : kv_batch, end_b = shared_kv ? p.batch : kv_batch + 1u;

  for (uint chunk = 0; chunk < max(HEAD_DIM, V_DIM); chunk += CHUNK) {
    Accumulator dk[ROW_FRAGMENTS][DQ_GROUPS * DQ_PACK / 2], dv[ROW_FRAGMENTS][DV_GROUPS * DV_PACK / 2];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      #pragma unroll
      for (int c = 0; c < DQ_GROUPS * DQ_PACK / 2; c++) dk[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      #pragma unroll
      for (int c = 0; c < DV_GROUPS * DV_PACK / 2; c++) dv[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    for (uint b = first_b; b < end_b; b++) {
      const uint kv_len = kv_len_of(ctx, b);
      for (uint h = kv_head * p.group; h < (kv_head + 1u) * p.group; h++) {
        const Rows q_rows = {q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z, p.q.w, p.q_len, HEAD_DIM};
        const Rows dout_rows = {dout + p.dout.x + ulong(b) * p.dout.y + ulong(h) * p.dout.z, p.dout.w, p.q_len, V_DIM};
        Walk walk = walk_column(ctx, b, h, row0);
        while (next_tile(ctx, walk)) {
          Accumulator s[ROW_FRAGMENTS][COLUMN_FRAGMENTS], dp[ROW_FRAGMENTS][COLUMN_FRAGMENTS];
          if (AREAS == 2) stage_both(tiles, q_rows, dout_rows, walk.first, thread_index);
          product(s, own_k, tiles, q_rows, walk.first, thread_index, lane);
          if (DK) product(dp, own_v, tiles + AREA_1, dout_rows, walk.first, thread_index, lane);
          // Each lane reads the statistics of one query row; the others ask it.
          const Stat read_stat = stat_of(ctx, stats, b, h, min(walk.first + lane, p.q_len - 1u));
          #pragma unroll
          for (uint i = 0; i < COLUMN_FRAGMENTS * 2u; i++) {
            const uint column = 8u * (i / 2u) + lane_col(lane) + i % 2u, at = walk.first + column;
            const Stat stat = {simd_shuffle(read_stat.lse, column), simd_shuffle(read_stat.delta, column)};
            const int position = int(min(at, p.q_len - 1u)) + q_offset_of(ctx, b);
            const Row row = row_mod(ctx, int(b), int(h), position);
            #pragma unroll
            for (uint r = 0; r < ROW_FRAGMENTS; r++) {
              const uint kv = own + 8u * r;
              float weight = s[r][i / 2u].thread_elements()[i % 2u], ds = DK ? dp[r][i / 2u].thread_elements()[i % 2u] : 0.0f;
              weigh(weight, ds, ctx, stat, row, b, int(h), position, kv, at < p.q_len && kv < kv_len, walk.kind);
              s[r][i / 2u].thread_elements()[i % 2u] = weight;
              dp[r][i / 2u].thread_elements()[i % 2u] = ds;
            }
          }
          if (DV) accumulate<DV_PACK, DV_GROUPS>(dv, s, tiles + AREA_1, dout_rows, walk.first, chunk, AREAS == 1, thread_index, lane);
          if (DK) accumulate<DQ_PACK, DQ_GROUPS>(dk, dp, tiles, q_rows, walk.first, chunk, AREAS == 1, thread_index, lane);
        }
      }
    }

    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      const uint at = own + 8u * r;
      if (at >= p.kv_len) continue;
      device Elem* to_k = out + p.dk.x + ulong(kv_batch) * p.dk.y + ulong(kv_head) * p.dk.z + ulong(at) * p.dk.w;
      device Elem* to_v = out + p.dv.x + ulong(kv_batch) * p.dv.y + ulong(kv_head) * p.dv.z + ulong(at) * p.dv.w;
      if (DK) store_row<DQ_PACK, DQ_GROUPS>(to_k, dk[r], chunk, HEAD_DIM, p.scale, p.accumulate != 0u, lane);
      if (DV) store_row<DV_PACK, DV_GROUPS>(to_v, dv[r], chunk, V_DIM, 1.0f, p.accumulate != 0u, lane);
    }
  }
}
