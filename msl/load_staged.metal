// Loads by way of threadgroup memory: M1 and M2, where reading fragments from device memory costs twice.
//
// All threads copy STAGE columns of 32 rows of k, later of v, side by side; then each simdgroup reads
// its fragments from there. Two barriers per copy. A row starts 32 bytes past a multiple of 64, so that
// the rows that lanes read together lie in different banks.
#pragma once
#include "tile.metal"
#include "walk.metal"

#define STRIDE(columns) (((columns) * sizeof(Elem) + 31u) / 64u * 64u + 32u) / sizeof(Elem)
#define KV_STRIDE (STRIDE(STAGE))
#define Q_STRIDE (STRIDE((HEAD_GROUPS - Q_GROUPS) * K_COLUMNS))
#define KV_TILE (TILE_KV * KV_STRIDE)
#define Q_TILE (Q_STAGED * TILE_Q * Q_STRIDE)
// One array: the kv tile, then the part of the q tile that is not in registers.
#define DECLARE_TILES(name) SHARED vec<Elem, 4> name[(KV_TILE + Q_TILE) / 4u]

// Copies columns [column, column + STAGE) of the 32 rows from `kv` on. Rows past the end become zeros:
// their weight is 0, but 0 * NaN is not.
inline void stage(threadgroup vec<Elem, 4>* tiles, Rows rows, uint kv, uint column, uint columns, uint thread_index) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody reads the last tile any more
  for (uint i = thread_index; i < TILE_KV * STAGE / 4u; i += THREADS) {
    uint row = i / (STAGE / 4u), quad = i % (STAGE / 4u);
    vec<Elem, 4> x = vec<Elem, 4>(Elem(0));
    if (kv + row < rows.count) x = read<4>(rows.first + ulong(kv + row) * rows.stride, column + 4u * quad, columns);
    tiles[row * (KV_STRIDE / 4u) + quad] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Copies what of the q tile is not kept in registers. The first `stage` orders it.
inline void stage_q(threadgroup vec<Elem, 4>* tiles, Rows rows, uint row0, uint thread_index) {
  const uint quads = max(HEAD_GROUPS - Q_GROUPS, 1u) * K_COLUMNS / 4u;
  for (uint i = thread_index; i < Q_STAGED * TILE_Q * quads; i += THREADS) {
    uint row = min(row0 + i / quads, rows.count - 1u);
    tiles[KV_TILE / 4u + i / quads * (Q_STRIDE / 4u) + i % quads] =
        read<4>(rows.first + ulong(row) * rows.stride, Q_GROUPS * K_COLUMNS + 4u * (i % quads), HEAD_DIM);
  }
}

// Left operands of row `row` of the threadgroup, which is at `at` in device memory.
inline void load_q(thread Fragment* q, threadgroup const vec<Elem, 4>* tiles, device const Elem* at, uint row, uint group, uint lane) {
  uint column = group * K_COLUMNS + K_PACK * lane_col(lane);
  if (Q_STAGED) {
    threadgroup const Elem* tile = (threadgroup const Elem*)(tiles + KV_TILE / 4u) + row * Q_STRIDE + column - Q_GROUPS * K_COLUMNS;
    left(q, *(threadgroup const vec<Elem, K_PACK>*)tile, *(threadgroup const vec<Elem, K_PACK>*)(tile + K_PACK));
  } else {
    left(q, read<K_PACK>(at, column, HEAD_DIM), read<K_PACK>(at, column + K_PACK, HEAD_DIM));
  }
}

inline void load_k(thread Fragment* k, threadgroup const vec<Elem, 4>* tiles, Rows rows, uint kv, uint j, uint group, uint lane) {
  threadgroup const Elem* at = (threadgroup const Elem*)tiles + (8u * j + lane_col(lane)) * KV_STRIDE +
                               group % (STAGE / K_COLUMNS) * K_COLUMNS + K_PACK * lane_row(lane);
  right(k, *(threadgroup const vec<Elem, K_PACK>*)at, *(threadgroup const vec<Elem, K_PACK>*)(at + KV_STRIDE));
}

inline void load_v(thread Fragment* v, threadgroup const vec<Elem, 4>* tiles, Rows rows, uint kv, uint j, uint group, uint lane) {
  threadgroup const Elem* at = (threadgroup const Elem*)tiles + (8u * j + lane_row(lane)) * KV_STRIDE +
                               group % (STAGE / V_COLUMNS) * V_COLUMNS + V_PACK * (lane_col(lane) / 2u);
  right(v, *(threadgroup const vec<Elem, V_PACK>*)at);
}
