// One kv tile: S = Q K^T, the mods, the online softmax, O += P V. Forward and decode share it.
//
// S, P and O never leave registers: S and O are 8x8 fragments, P overwrites S.
#pragma once
#include "common.metal"
#include "load_staged.metal"
#include "mods.metal"
#include "tile.metal"
#include "walk.metal"

// The query rows of a simdgroup, as one lane sees them: of each row fragment it holds one row.
struct Queries {
  uint b;
  int h[ROW_FRAGMENTS];                               // query head
  int q[ROW_FRAGMENTS];                               // position, as mods see it
  Row row[ROW_FRAGMENTS];                             // what mods need of it
  device const Elem* at[ROW_FRAGMENTS];               // [D]
  uint own;                                           // its number in the threadgroup, in fragment 0
  Fragment kept[Q_GROUPS][ROW_FRAGMENTS][K_PACK];     // the columns that stay in registers
};

// The online softmax of those rows.
struct Online {
  float m[ROW_FRAGMENTS];                             // row max so far
  float l[ROW_FRAGMENTS];                             // row sum so far, of this lane's columns
  Accumulator o[ROW_FRAGMENTS][V_GROUPS * V_FRAGMENTS];
};

// Where this lane's score i lies: row fragment, kv fragment, and column in the tile.
#define SCORES (ROW_FRAGMENTS * KV_FRAGMENTS * 2u)
#define ROW_OF(i) ((i) / (KV_FRAGMENTS * 2u))
#define FRAGMENT_OF(i) ((i) / 2u % KV_FRAGMENTS)
#define COLUMN_OF(i) (8u * FRAGMENT_OF(i) + lane_col(lane) + (i) % 2u)

// Row `own` of fragment r is at `at`; a row that is not there is zeros.
inline void load_row(thread Queries& queries, uint r, device const Elem* at, bool there, uint lane) {
  queries.at[r] = at;
  #pragma unroll
  for (uint g = 0; g < Q_GROUPS; g++) {
    uint column = g * K_COLUMNS + K_PACK * lane_col(lane), columns = there ? HEAD_DIM : 0u;
    left(queries.kept[g][r], read<K_PACK>(at, column, columns), read<K_PACK>(at, column + K_PACK, columns));
  }
}

inline void begin(thread Online& online) {
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    online.m[r] = LOWEST;
    online.l[r] = 0.0f;
    #pragma unroll
    for (uint c = 0; c < V_GROUPS * V_FRAGMENTS; c++) online.o[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}

// The sum of a row over the 4 lanes that hold it.
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}

inline float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}

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

// Attends to the 32 keys from `kv` on, for V_CHUNK columns of v from `chunk` on. `kind` is PARTIAL, FULL or
// EMPTY for each of this lane's rows. All threads of the threadgroup call it together.
inline void attend(thread Online& online, thread Queries& queries, thread const Ctx& ctx, threadgroup vec<Elem, 4>* tiles,
                   Rows k, Rows v, uint kv, thread const uint (&kind)[ROW_FRAGMENTS], uint chunk, uint thread_index, uint lane) {
  // S = Q K^T. The fences keep the compiler from loading every fragment first.
  Accumulator s[ROW_FRAGMENTS][KV_FRAGMENTS];
  #pragma unroll
  for (uint i = 0; i < SCORES; i++) s[ROW_OF(i)][FRAGMENT_OF(i)].thread_elements()[i % 2u] = 0.0f;
  #pragma unroll
  for (uint g = 0; g < Q_GROUPS; g++) {
    if (g * K_COLUMNS % STAGE == 0u) stage(tiles, k, kv, g * K_COLUMNS, HEAD_DIM, thread_index);
    simdgroup_barrier(mem_flags::mem_none);
    multiply_scores(s, queries.kept[g], tiles, k, kv, g, lane);
  }
  for (uint g = Q_GROUPS; g < HEAD_GROUPS; g++) {
    if (g * K_COLUMNS % STAGE == 0u) stage(tiles, k, kv, g * K_COLUMNS, HEAD_DIM, thread_index);
    Fragment loaded[ROW_FRAGMENTS][K_PACK];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) load_q(loaded[r], tiles, queries.at[r], queries.own + 8u * r, g, lane);
    multiply_scores(s, loaded, tiles, k, kv, g, lane);
  }

  // Mods. A masked pair is excluded whatever score_mod gave for it: a bit for each of this lane's scores.
  #pragma unroll
  for (uint i = 0; i < SCORES; i++) {
    const uint r = ROW_OF(i);
    float score = s[r][FRAGMENT_OF(i)].thread_elements()[i % 2u] * ctx.p.scale;
    score = score_mod(ctx, score, queries.row[r], int(queries.b), queries.h[r], queries.q[r], int(kv + COLUMN_OF(i)));
    s[r][FRAGMENT_OF(i)].thread_elements()[i % 2u] = score;
  }
  uint masked = 0u;
  bool check = kv + TILE_KV > k.count;
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) check = check || kind[r] != FULL;
  if (check) {
    #pragma unroll
    for (uint i = 0; i < SCORES; i++) {
      const uint r = ROW_OF(i), column = kv + COLUMN_OF(i);
      bool keep = column < k.count && kind[r] != EMPTY;
      if (keep && kind[r] == PARTIAL)
        keep = mask_mod(ctx, queries.row[r], int(queries.b), queries.h[r], queries.q[r], int(column));
      if (!keep) {
        masked |= 1u << i;
        s[r][FRAGMENT_OF(i)].thread_elements()[i % 2u] = LOWEST;
      }
    }
  }

  // Online softmax: the new row max, P = exp(S - m), and the old sum and output scaled to it.
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    float m = online.m[r];
    #pragma unroll
    for (uint j = 0; j < KV_FRAGMENTS; j++)
      m = max(m, max(s[r][j].thread_elements()[0], s[r][j].thread_elements()[1]));
    m = row_max(m);
    const float shrink = exp2(max((online.m[r] - m) * LOG2E, -200.0f));
    online.m[r] = m;
    online.l[r] *= shrink;
    #pragma unroll
    for (uint c = 0; c < V_GROUPS * V_FRAGMENTS; c++) {
      online.o[r][c].thread_elements()[0] *= shrink;
      online.o[r][c].thread_elements()[1] *= shrink;
    }
    #pragma unroll
    for (uint i = 0; i < KV_FRAGMENTS * 2u; i++) {
      float weight = exp2((s[r][i / 2u].thread_elements()[i % 2u] - m) * LOG2E);
      if (check && (masked >> (r * KV_FRAGMENTS * 2u + i) & 1u) != 0u) weight = 0.0f;
      s[r][i / 2u].thread_elements()[i % 2u] = weight;
      online.l[r] += weight;
    }
  }

  // O += P V
  #pragma unroll
  for (uint g = 0; g < V_GROUPS; g++) {
    if (g * V_COLUMNS % STAGE == 0u) stage(tiles, v, kv, chunk + g * V_COLUMNS, V_DIM, thread_index);
    simdgroup_barrier(mem_flags::mem_none);
    #pragma unroll
    for (uint j = 0; j < KV_FRAGMENTS; j++) {
      Fragment right[V_FRAGMENTS];
      load_v(right, tiles, v, kv, j, chunk / V_COLUMNS + g, lane);
      #pragma unroll
      for (uint i = 0; i < V_FRAGMENTS; i++) {
        #pragma unroll
        for (uint r = 0; r < ROW_FRAGMENTS; r++) {
          const uint c = g * V_FRAGMENTS + i;
          simdgroup_multiply_accumulate(online.o[r][c], s[r][j], right[i], online.o[r][c]);
        }
      }
    }
  }
}
