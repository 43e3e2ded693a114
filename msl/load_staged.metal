// Loads by way of threadgroup memory: M1 and M2, where reading fragments from device memory costs twice.
//
// All threads copy STAGE columns of 32 rows side by side; then each simdgroup reads its fragments from
// there. Two barriers per copy.
#pragma once
#include "tile.metal"
#include "walk.metal"

#define STAGE_STRIDE (STRIDE(STAGE))
#define TILE_ELEMENTS (TILE * STAGE_STRIDE)
// Threadgroup memory of `count` elements.
#define DECLARE_TILES(name, count) SHARED vec<Elem, 4> name[(count) / 4u]

// Copies `columns` columns of `count` rows, from row `first` and column `column` on. Rows past the end
// become zeros: their weight is 0, but 0 * NaN is not.
inline void copy(threadgroup vec<Elem, 4>* to, uint stride, Rows rows, uint first, uint count, uint column, uint columns, uint thread_index) {
  const uint quads = columns / 4u;
  for (uint i = thread_index; i < count * quads; i += THREADS) {
    uint row = i / quads, quad = i % quads;
    vec<Elem, 4> x = vec<Elem, 4>(Elem(0));
    if (first + row < rows.count) x = read<4>(rows.first + ulong(first + row) * rows.stride, column + 4u * quad, rows.columns);
    to[row * (stride / 4u) + quad] = x;
  }
}

// Stages STAGE columns of the 32 rows from `first` on.
inline void stage(threadgroup vec<Elem, 4>* tile, Rows rows, uint first, uint column, uint thread_index) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody reads the last tile any more
  copy(tile, STAGE_STRIDE, rows, first, TILE, column, STAGE, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Stages whole rows, of one tensor and of another, in tiles of their own.
inline void stage_both(threadgroup vec<Elem, 4>* tiles, Rows a, Rows b, uint first, uint thread_index) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  copy(tiles, STAGE_STRIDE, a, first, TILE, 0u, STAGE, thread_index);
  copy(tiles + TILE_ELEMENTS / 4u, STAGE_STRIDE, b, first, TILE, 0u, STAGE, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Right operands of a product with the transpose of 8 rows, the j-th of the tile; group `group` of N
// fragments of their columns.
template <int N> inline void load_columns(thread Fragment* x, threadgroup const vec<Elem, 4>* tile, Rows rows, uint first, uint j, uint group, uint lane) {
  threadgroup const Elem* at = (threadgroup const Elem*)tile + (8u * j + lane_col(lane)) * STAGE_STRIDE +
                               group % (STAGE / (8 * N)) * (8 * N) + N * lane_row(lane);
  left<N>(x, *(threadgroup const vec<Elem, N>*)at, *(threadgroup const vec<Elem, N>*)(at + STAGE_STRIDE));
}

// Right operands of a product with those rows as they are; group `group` of N / 2 fragments.
template <int N> inline void load_rows(thread Fragment* x, threadgroup const vec<Elem, 4>* tile, Rows rows, uint first, uint j, uint group, uint lane) {
  threadgroup const Elem* at = (threadgroup const Elem*)tile + (8u * j + lane_row(lane)) * STAGE_STRIDE +
                               group % (STAGE / (4 * N)) * (4 * N) + N * (lane_col(lane) / 2u);
  right<N>(x, *(threadgroup const vec<Elem, N>*)at);
}
