// The tile of a threadgroup and its 8x8 fragments.
//
// Lane l of a simdgroup holds two neighbours of one row of a fragment: row lane_row(l), columns
// lane_col(l) and the next. So a row lies in 4 lanes, which differ in bits 0 and 3 of l.
// The order of the summed dimension is free as long as both operands agree, and the order of a result's
// columns as long as its store follows. Both are chosen so that a lane's elements of several fragments are
// neighbours in memory and come with one load of N: a group of N fragments, or of N / 2. Nothing needs
// transposing.
#pragma once
#include "common.metal"

#define HEAD_DIM 64        // columns of q and k
#define V_DIM 64           // columns of v and out
#define SIMDGROUPS 2       // in a threadgroup
#define ROW_FRAGMENTS 2    // fragments of 8 rows in a simdgroup
#define STAGE 64           // columns of a tile in threadgroup memory

#define TILE_ROWS (8u * ROW_FRAGMENTS * SIMDGROUPS)
#define THREADS (32u * SIMDGROUPS)
#define COLUMN_FRAGMENTS 4u                                          // of 8 columns in a tile of 32
// N when every load of N is whole: 4 if `dim` is a multiple of what 4 take in, otherwise 2.
#define SUM_PACK(dim) ((dim) % 32 == 0 ? 4 : 2)
#define RESULT_PACK(dim) ((dim) % 16 == 0 ? 4 : 2)
#define SUM_GROUPS(dim, n) (((dim) + 8 * (n) - 1) / (8 * (n)))       // of n fragments, 8 n columns
#define RESULT_GROUPS(dim, n) (((dim) + 4 * (n) - 1) / (4 * (n)))    // of n / 2 fragments, 4 n columns
// From row to row in threadgroup memory: 32 bytes past a multiple of 64, so that the rows that lanes read
// together lie in different banks.
#define STRIDE(columns) ((((columns) * sizeof(Elem) + 31u) / 64u * 64u + 32u) / sizeof(Elem))

typedef simdgroup_matrix<float, 8, 8> Accumulator;
typedef simdgroup_matrix<Operand, 8, 8> Fragment;

inline uint lane_row(uint lane) { return ((lane / 4u) & 4u) + (lane / 2u) % 4u; }
inline uint lane_col(uint lane) { return ((lane / 4u) & 2u) * 2u + (lane % 2u) * 2u; }

// The rows of one head.
struct Rows {
  device const Elem* first;  // [count, stride]
  uint stride;               // elements
  uint count;
  uint columns;
};

// Row `row`, or the last one.
inline device const Elem* row_of(Rows rows, uint row) { return rows.first + ulong(min(row, rows.count - 1u)) * rows.stride; }

// Left operands: element e of fragment i is column N * (col + e) + i of the group. Right operands of a
// product with a transposed matrix are the same, with `a` and `b` of neighbouring rows.
template <int N> inline void left(thread Fragment* x, vec<Elem, N> a, vec<Elem, N> b) {
  #pragma unroll
  for (int i = 0; i < N; i++) {
    x[i].thread_elements()[0] = widen(a[i]);
    x[i].thread_elements()[1] = widen(b[i]);
  }
}
// Right operands: neighbouring columns of one row.
template <int N> inline void right(thread Fragment* x, vec<Elem, N> a) {
  #pragma unroll
  for (int i = 0; i < N / 2; i++) {
    x[i].thread_elements()[0] = widen(a[2 * i]);
    x[i].thread_elements()[1] = widen(a[2 * i + 1]);
  }
}
