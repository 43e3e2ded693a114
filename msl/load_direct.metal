// Loads straight from device memory: M3 and later, where staging costs more than it saves.
//
// The functions of load_staged.metal. No threadgroup memory, no barriers: simdgroups share nothing.
// A row past the end reads the last one instead; its weight is 0.
#pragma once
#include "tile.metal"
#include "walk.metal"

#define DECLARE_TILES(name) threadgroup vec<Elem, 4>* name = nullptr

inline void stage(threadgroup vec<Elem, 4>* tiles, Rows rows, uint kv, uint column, uint columns, uint thread_index) {}
inline void stage_q(threadgroup vec<Elem, 4>* tiles, Rows rows, uint row0, uint thread_index) {}

inline device const Elem* row_of(Rows rows, uint row) { return rows.first + ulong(min(row, rows.count - 1u)) * rows.stride; }

inline void load_q(thread Fragment* q, threadgroup const vec<Elem, 4>* tiles, device const Elem* at, uint row, uint group, uint lane) {
  uint column = group * K_COLUMNS + K_PACK * lane_col(lane);
  left(q, read<K_PACK>(at, column, HEAD_DIM), read<K_PACK>(at, column + K_PACK, HEAD_DIM));
}

inline void load_k(thread Fragment* k, threadgroup const vec<Elem, 4>* tiles, Rows rows, uint kv, uint j, uint group, uint lane) {
  uint row = kv + 8u * j + lane_col(lane), column = group * K_COLUMNS + K_PACK * lane_row(lane);
  right(k, read<K_PACK>(row_of(rows, row), column, HEAD_DIM), read<K_PACK>(row_of(rows, row + 1u), column, HEAD_DIM));
}

inline void load_v(thread Fragment* v, threadgroup const vec<Elem, 4>* tiles, Rows rows, uint kv, uint j, uint group, uint lane) {
  uint row = kv + 8u * j + lane_row(lane), column = group * V_COLUMNS + V_PACK * (lane_col(lane) / 2u);
  right(v, read<V_PACK>(row_of(rows, row), column, V_DIM));
}
