// One kv tile: S = Q K^T, the mods, the online softmax, O += P V. Forward and decode share it.
//
// S, P and O never leave registers: S and O are 8x8 fragments, P overwrites S.
#pragma once
#include "common.metal"
#include "mods.metal"
#include "product.metal"
#include "tile.metal"
#include "walk.metal"

#define K_PACK 4           // fragments of k and q that come with one load: SUM_PACK(HEAD_DIM)
#define V_PACK 4           // neighbours in v and out that come with one load: RESULT_PACK(V_DIM)
#define Q_GROUPS 2         // groups of K_PACK fragments of a q row that stay in registers
#define Q_STAGED 0         // the other groups are read from threadgroup memory (1) or device memory (0)
#define V_CHUNK 64         // columns of out that are computed at once, in registers

#define K_COLUMNS (8u * K_PACK)                                      // of a group
#define HEAD_GROUPS SUM_GROUPS(HEAD_DIM, K_PACK)
#define V_GROUPS RESULT_GROUPS(V_CHUNK, V_PACK)                      // in a chunk
#define V_FRAGMENTS (V_PACK / 2)                                     // in a group
// Threadgroup memory: the kv tile, then the part of the q tile that is not in registers.
#define Q_STRIDE STRIDE((HEAD_GROUPS - Q_GROUPS) * K_COLUMNS)
#define Q_TILE (Q_STAGED * TILE_ROWS * Q_STRIDE)

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
#define SCORES (ROW_FRAGMENTS * COLUMN_FRAGMENTS * 2u)
#define ROW_OF(i) ((i) / (COLUMN_FRAGMENTS * 2u))
#define FRAGMENT_OF(i) ((i) / 2u % COLUMN_FRAGMENTS)
#define COLUMN_OF(i) (8u * FRAGMENT_OF(i) + lane_col(lane) + (i) % 2u)

// Row `own` of fragment r is at `at`; a row that is not there is zeros.
inline void load_row(thread Queries& queries, uint r, device const Elem* at, bool there, uint lane) {
  queries.at[r] = at;
  #pragma unroll
  for (uint g = 0; g < Q_GROUPS; g++) {
    uint column = g * K_COLUMNS + K_PACK * lane_col(lane), columns = there ? HEAD_DIM : 0u;
    left<K_PACK>(queries.kept[g][r], read<K_PACK>(at, column, columns), read<K_PACK>(at, column + K_PACK, columns));
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

// Copies what of the q tile is not kept in registers. The first `stage` orders it.
inline void stage_q(threadgroup vec<Elem, 4>* tiles, Rows rows, uint row0, uint thread_index) {
  if (Q_STAGED)
    copy(tiles + TILE_ELEMENTS / 4u, Q_STRIDE, rows, row0, TILE_ROWS, Q_GROUPS * K_COLUMNS, (HEAD_GROUPS - Q_GROUPS) * K_COLUMNS, thread_index);
}

// Left operands of row fragment r: group `group` of those that are not in registers.
inline void load_q(thread Fragment* q, threadgroup const vec<Elem, 4>* tiles, thread const Queries& queries, uint r, uint group, uint lane) {
  uint column = group * K_COLUMNS + K_PACK * lane_col(lane);
  if (Q_STAGED) {
    threadgroup const Elem* tile = (threadgroup const Elem*)(tiles + TILE_ELEMENTS / 4u) + (queries.own + 8u * r) * Q_STRIDE + column - Q_GROUPS * K_COLUMNS;
    left<K_PACK>(q, *(threadgroup const vec<Elem, K_PACK>*)tile, *(threadgroup const vec<Elem, K_PACK>*)(tile + K_PACK));
  } else {
    left<K_PACK>(q, read<K_PACK>(queries.at[r], column, HEAD_DIM), read<K_PACK>(queries.at[r], column + K_PACK, HEAD_DIM));
  }
}

// Attends to the 32 keys from `kv` on, for V_CHUNK columns of v from `chunk` on. `kind` is PARTIAL, FULL or
// EMPTY for each of this lane's rows. All threads of the threadgroup call it together.
inline void attend(thread Online& online, thread Queries& queries, thread const Ctx& ctx, threadgroup vec<Elem, 4>* tiles,
                   Rows k, Rows v, uint kv, thread const uint (&kind)[ROW_FRAGMENTS], uint chunk, uint thread_index, uint lane) {
  // S = Q K^T. The fences keep the compiler from loading every fragment first.
  Accumulator s[ROW_FRAGMENTS][COLUMN_FRAGMENTS];
  #pragma unroll
  for (uint i = 0; i < SCORES; i++) s[ROW_OF(i)][FRAGMENT_OF(i)].thread_elements()[i % 2u] = 0.0f;
  #pragma unroll
  for (uint g = 0; g < Q_GROUPS; g++) {
    if (g * K_COLUMNS % STAGE == 0u) stage(tiles, k, kv, g * K_COLUMNS, thread_index);
    simdgroup_barrier(mem_flags::mem_none);
    multiply<K_PACK>(s, queries.kept[g], tiles, k, kv, g, lane);
  }
  for (uint g = Q_GROUPS; g < HEAD_GROUPS; g++) {
    if (g * K_COLUMNS % STAGE == 0u) stage(tiles, k, kv, g * K_COLUMNS, thread_index);
    Fragment loaded[ROW_FRAGMENTS][K_PACK];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) load_q(loaded[r], tiles, queries, r, g, lane);
    multiply<K_PACK>(s, loaded, tiles, k, kv, g, lane);
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
  bool check = kv + TILE > k.count;
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
    for (uint j = 0; j < COLUMN_FRAGMENTS; j++)
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
    for (uint i = 0; i < COLUMN_FRAGMENTS * 2u; i++) {
      float weight = exp2((s[r][i / 2u].thread_elements()[i % 2u] - m) * LOG2E);
      if (check && (masked >> (r * COLUMN_FRAGMENTS * 2u + i) & 1u) != 0u) weight = 0.0f;
      s[r][i / 2u].thread_elements()[i % 2u] = weight;
      online.l[r] += weight;
    }
  }

  // O += P V
  accumulate<V_PACK, V_GROUPS>(online.o, s, tiles, v, kv, chunk, true, thread_index, lane);
}
