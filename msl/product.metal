// Products of a simdgroup's rows with the 32 rows of a tile.
#pragma once
#include "load_staged.metal"

// S += X Y^T over one group of N fragments, X the simdgroup's rows and Y those of the tile.
template <int N>
inline void multiply(thread Accumulator (&s)[ROW_FRAGMENTS][COLUMN_FRAGMENTS], thread Fragment (&own)[ROW_FRAGMENTS][N],
                     threadgroup const vec<Elem, 4>* tile, Rows rows, uint first, uint group, uint lane) {
  #pragma unroll
  for (uint j = 0; j < COLUMN_FRAGMENTS; j++) {
    Fragment y[N];
    load_columns<N>(y, tile, rows, first, j, group, lane);
    #pragma unroll
    for (int i = 0; i < N; i++) {
      #pragma unroll
      for (uint r = 0; r < ROW_FRAGMENTS; r++) simdgroup_multiply_accumulate(s[r][j], own[r][i], y[i], s[r][j]);
    }
  }
}

// O += P Y, for G groups of N / 2 fragments of Y's columns, from column `column` on. `again` stages them.
template <int N, int G>
inline void accumulate(thread Accumulator (&o)[ROW_FRAGMENTS][G * N / 2], thread Accumulator (&p)[ROW_FRAGMENTS][COLUMN_FRAGMENTS],
                       threadgroup vec<Elem, 4>* tile, Rows rows, uint first, uint column, bool again, uint thread_index, uint lane) {
  #pragma unroll
  for (int g = 0; g < G; g++) {
    if (again && g * 4 * N % STAGE == 0) stage(tile, rows, first, column + g * 4 * N, thread_index);
    // The fences keep the compiler from loading every fragment first.
    simdgroup_barrier(mem_flags::mem_none);
    #pragma unroll
    for (uint j = 0; j < COLUMN_FRAGMENTS; j++) {
      Fragment y[N / 2];
      load_rows<N>(y, tile, rows, first, j, column / (4 * N) + g, lane);
      #pragma unroll
      for (int i = 0; i < N / 2; i++) {
        #pragma unroll
        for (uint r = 0; r < ROW_FRAGMENTS; r++)
          simdgroup_multiply_accumulate(o[r][g * N / 2 + i], p[r][j], y[i], o[r][g * N / 2 + i]);
      }
    }
  }
}

// This lane's part of a row, in G groups, to memory, times `factor`: 0 gives zeros whatever was summed.
// With `add` on top of what is there.
template <int N, int G>
inline void store_row(device Elem* row, thread Accumulator (&o)[G * N / 2], uint column, uint columns, float factor, bool add, uint lane) {
  #pragma unroll
  for (int g = 0; g < G; g++) {
    vec<float, N> x;
    #pragma unroll
    for (int i = 0; i < N; i++) x[i] = factor == 0.0f ? 0.0f : o[g * N / 2 + i / 2].thread_elements()[i % 2] * factor;
    const uint at = column + g * 4 * N + N * (lane_col(lane) / 2u);
    if (add) {
      const vec<Elem, N> old = read<N>(row, at, columns);
      #pragma unroll
      for (int i = 0; i < N; i++) x[i] += float(widen(old[i]));
    }
    write<N>(row, at, columns, x);
  }
}
