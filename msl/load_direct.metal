// Loads straight from device memory: M3 and later, where staging costs more than it saves.
//
// The functions of load_staged.metal. No threadgroup memory, no barriers: simdgroups share nothing.
// A row past the end reads the last one instead; its weight is 0.
#pragma once
#include "tile.metal"
#include "walk.metal"

#define TILE_ELEMENTS 0u
#define DECLARE_TILES(name, count) threadgroup vec<Elem, 4>* name = nullptr

inline void copy(threadgroup vec<Elem, 4>* to, uint stride, Rows rows, uint first, uint count, uint column, uint columns, uint thread_index) {}
inline void stage(threadgroup vec<Elem, 4>* tile, Rows rows, uint first, uint column, uint thread_index) {}
inline void stage_both(threadgroup vec<Elem, 4>* tiles, Rows a, Rows b, uint first, uint thread_index) {}

template <int N> inline void load_columns(thread Fragment* x, threadgroup const vec<Elem, 4>* tile, Rows rows, uint first, uint j, uint group, uint lane) {
  uint row = first + 8u * j + lane_col(lane), column = group * (8 * N) + N * lane_row(lane);
  left<N>(x, read<N>(row_of(rows, row), column, rows.columns), read<N>(row_of(rows, row + 1u), column, rows.columns));
}

template <int N> inline void load_rows(thread Fragment* x, threadgroup const vec<Elem, 4>* tile, Rows rows, uint first, uint j, uint group, uint lane) {
  uint row = first + 8u * j + lane_row(lane), column = group * (4 * N) + N * (lane_col(lane) / 2u);
  right<N>(x, read<N>(row_of(rows, row), column, rows.columns));
}
