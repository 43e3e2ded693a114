// forward: out = softmax(score_mod(q k^T * scale)) v over the kept pairs, and its lse and max.
//
// A threadgroup computes TILE_Q query rows of one head, each simdgroup 8 * ROW_FRAGMENTS of them. It
// walks the tiles of their block list: for each, S = Q K^T in 8x8 fragments, the mods, the online
// softmax (row max m, row sum l), and O += P V, again in fragments. S, P and O never leave registers.
// When v has more columns than V_CHUNK the walk is repeated for each chunk of them.
#include "common.metal"
#include "load_staged.metal"
#include "mods.metal"
#include "tile.metal"
#include "walk.metal"

// S += Q K^T over one group of columns.
inline void multiply_scores(thread Accumulator (&s)[ROW_FRAGMENTS][KV_FRAGMENTS], thread Fragment (&q)[ROW_FRAGMENTS][K_PACK],
                            threadgroup const vec<Elem, 4>* tiles, Rows k, uint kv, uint group, uint lane) {
  #pragma unroll
  for (uint j = 0; j < KV_FRAGMENTS; j++) {
    Fragment right[K_PACK];
    load_k(right, tiles, k, kv, j, group, lane);
    #pragma unroll
    for (uint i = 0; i < K_PACK; i++) {
      #pragma unroll
      for (uint r = 0; r < ROW_FRAGMENTS; r++) simdgroup_multiply_accumulate(s[r][j], q[r][i], right[i], s[r][j]);
    }
  }
}

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
  const uint tile_count = (p.q_len + TILE_Q - 1u) / TILE_Q;
  const uint row0 = id % tile_count * TILE_Q;
  const uint h = id / tile_count % p.q_heads;
  const uint b = id / (tile_count * p.q_heads);

  const Ctx ctx = {p, tables, captures, large};
  const uint kv_len = kv_len_of(ctx, b);
  const Rows q_rows = {q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z, p.q.w, p.q_len};
  const Rows k_rows = {k + p.k.x + ulong(b) * p.k.y + ulong(h / p.group) * p.k.z, p.k.w, kv_len};
  const Rows v_rows = {v + p.v.x + ulong(b) * p.v.y + ulong(h / p.group) * p.v.z, p.v.w, kv_len};
  DECLARE_TILES(tiles);

  // Of each row fragment, this lane holds one row: where it is, and what the mods need of it.
  int q_pos[ROW_FRAGMENTS];
  Row row[ROW_FRAGMENTS];
  Fragment kept[Q_GROUPS][ROW_FRAGMENTS][K_PACK];
  const uint own = simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    uint at = min(row0 + own + 8u * r, p.q_len - 1u);
    q_pos[r] = int(at) + q_offset_of(ctx, b);
    row[r] = row_mod(ctx, int(b), int(h), q_pos[r]);
    #pragma unroll
    for (uint g = 0; g < Q_GROUPS; g++) {
      device const Elem* first = q_rows.first + ulong(at) * q_rows.stride;
      uint column = g * K_COLUMNS + K_PACK * lane_col(lane);
      left(kept[g][r], read<K_PACK>(first, column, HEAD_DIM), read<K_PACK>(first, column + K_PACK, HEAD_DIM));
    }
  }
  stage_q(tiles, q_rows, row0, thread_index);

  for (uint chunk = 0; chunk < V_DIM; chunk += V_CHUNK) {
    float m[ROW_FRAGMENTS], l[ROW_FRAGMENTS];  // row max so far; row sum so far, of this lane's columns
    Accumulator o[ROW_FRAGMENTS][V_GROUPS * V_FRAGMENTS];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      m[r] = LOWEST;
      l[r] = 0.0f;
      #pragma unroll
      for (uint c = 0; c < V_GROUPS * V_FRAGMENTS; c++) o[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    Walk walk = walk_row(ctx, b, h, row0, kv_len);
    while (next_tile(ctx, walk)) {
      // S = Q K^T. The fences keep the compiler from loading every fragment first.
      Accumulator s[ROW_FRAGMENTS][KV_FRAGMENTS];
      #pragma unroll
      for (uint r = 0; r < ROW_FRAGMENTS; r++) {
        #pragma unroll
        for (uint j = 0; j < KV_FRAGMENTS; j++) s[r][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      #pragma unroll
      for (uint g = 0; g < Q_GROUPS; g++) {
        if (g * K_COLUMNS % STAGE == 0u) stage(tiles, k_rows, walk.first, g * K_COLUMNS, HEAD_DIM, thread_index);
        simdgroup_barrier(mem_flags::mem_none);
        multiply_scores(s, kept[g], tiles, k_rows, walk.first, g, lane);
      }
      for (uint g = Q_GROUPS; g < HEAD_GROUPS; g++) {
        if (g * K_COLUMNS % STAGE == 0u) stage(tiles, k_rows, walk.first, g * K_COLUMNS, HEAD_DIM, thread_index);
        Fragment loaded[ROW_FRAGMENTS][K_PACK];
        #pragma unroll
        for (uint r = 0; r < ROW_FRAGMENTS; r++) load_q(loaded[r], tiles, q_rows, row0, own + 8u * r, g, lane);
        multiply_scores(s, loaded, tiles, k_rows, walk.first, g, lane);
      }

      // Mods. A masked pair is excluded whatever score_mod gave for it: a bit for each of this lane's scores.
      const bool check = walk.kind != FULL || walk.first + TILE_KV > kv_len;
      uint masked = 0u;
      #pragma unroll
      for (uint i = 0; i < ROW_FRAGMENTS * KV_FRAGMENTS * 2u; i++) {
        uint r = i / (KV_FRAGMENTS * 2u), j = i / 2u % KV_FRAGMENTS;
        int kv = int(walk.first + 8u * j + lane_col(lane) + i % 2u);
        float score = s[r][j].thread_elements()[i % 2u] * p.scale;
        s[r][j].thread_elements()[i % 2u] = score_mod(ctx, score, row[r], int(b), int(h), q_pos[r], kv);
      }
      if (check) {
        #pragma unroll
        for (uint i = 0; i < ROW_FRAGMENTS * KV_FRAGMENTS * 2u; i++) {
          uint r = i / (KV_FRAGMENTS * 2u), j = i / 2u % KV_FRAGMENTS;
          int kv = int(walk.first + 8u * j + lane_col(lane) + i % 2u);
          bool keep = uint(kv) < kv_len && (walk.kind == FULL || mask_mod(ctx, row[r], int(b), int(h), q_pos[r], kv));
          if (!keep) {
            masked |= 1u << i;
            s[r][j].thread_elements()[i % 2u] = LOWEST;
          }
        }
      }

      // Online softmax: the new row max, P = exp(S - m), and the old sum and output scaled to it.
      #pragma unroll
      for (uint r = 0; r < ROW_FRAGMENTS; r++) {
        float m_new = m[r];
        #pragma unroll
        for (uint j = 0; j < KV_FRAGMENTS; j++)
          m_new = max(m_new, max(s[r][j].thread_elements()[0], s[r][j].thread_elements()[1]));
        m_new = max(m_new, simd_shuffle_xor(m_new, 1));
        m_new = max(m_new, simd_shuffle_xor(m_new, 8));
        float shrink = exp2(max((m[r] - m_new) * LOG2E, -200.0f));
        m[r] = m_new;
        l[r] *= shrink;
        #pragma unroll
        for (uint c = 0; c < V_GROUPS * V_FRAGMENTS; c++) {
          o[r][c].thread_elements()[0] *= shrink;
          o[r][c].thread_elements()[1] *= shrink;
        }
        #pragma unroll
        for (uint i = 0; i < KV_FRAGMENTS * 2u; i++) {
          float weight = exp2((s[r][i / 2u].thread_elements()[i % 2u] - m_new) * LOG2E);
          if (check && (masked >> (r * KV_FRAGMENTS * 2u + i) & 1u) != 0u) weight = 0.0f;
          s[r][i / 2u].thread_elements()[i % 2u] = weight;
          l[r] += weight;
        }
      }

      // O += P V
      #pragma unroll
      for (uint g = 0; g < V_GROUPS; g++) {
        if (g * V_COLUMNS % STAGE == 0u) stage(tiles, v_rows, walk.first, chunk + g * V_COLUMNS, V_DIM, thread_index);
        simdgroup_barrier(mem_flags::mem_none);
        #pragma unroll
        for (uint j = 0; j < KV_FRAGMENTS; j++) {
          Fragment right[V_FRAGMENTS];
          load_v(right, tiles, v_rows, walk.first, j, chunk / V_COLUMNS + g, lane);
          #pragma unroll
          for (uint i = 0; i < V_FRAGMENTS; i++) {
            #pragma unroll
            for (uint r = 0; r < ROW_FRAGMENTS; r++) {
              uint c = g * V_FRAGMENTS + i;
              simdgroup_multiply_accumulate(o[r][c], s[r][j], right[i], o[r][c]);
            }
          }
        }
      }
    }

    // out = O / l. A row with nothing kept: out 0, lse and max -inf.
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      float sum = l[r];
      sum += simd_shuffle_xor(sum, 1);
      sum += simd_shuffle_xor(sum, 8);
      const bool empty = sum == 0.0f;
      const float lse = m[r] + log(sum);
      float factor = empty ? 0.0f : 1.0f / sum;
      if (p.sinks_at != NONE && !empty) factor /= 1.0f + exp(as_type<float>(tables[p.sinks_at + h]) - lse);
      const uint at = row0 + own + 8u * r;
      if (at >= p.q_len) continue;
      device Elem* out_row = out + p.out.x + ulong(b) * p.out.y + ulong(h) * p.out.z + ulong(at) * p.out.w;
      #pragma unroll
      for (uint g = 0; g < V_GROUPS; g++) {
        vec<Elem, V_PACK> x;
        #pragma unroll
        for (uint i = 0; i < V_PACK; i++) {
          float value = o[r][g * V_FRAGMENTS + i / 2u].thread_elements()[i % 2u];
          Elem rounded;
          narrow(empty ? 0.0f : value * factor, rounded);
          x[i] = rounded;
        }
        uint column = chunk + g * V_COLUMNS + V_PACK * (lane_col(lane) / 2u);
        if (ALIGNED) {
          if (column < V_DIM) *(device vec<Elem, V_PACK>*)(out_row + column) = x;
        } else {
          for (uint i = 0; i < V_PACK; i++) if (column + i < V_DIM) out_row[column + i] = x[i];
        }
      }
      if (lane_col(lane) == 0u && chunk == 0u) {
        const ulong stat = ulong(b * p.q_heads + h) * p.q_len + at;
        if (p.lse_at != NONE) stats[p.lse_at + stat] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(lse));
        if (p.max_at != NONE) stats[p.max_at + stat] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(m[r]));
      }
    }
  }
}
