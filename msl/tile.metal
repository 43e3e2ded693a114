// The tile of a forward threadgroup and its 8x8 fragments.
//
// Lane l of a simdgroup holds two neighbours of one row of a fragment: row lane_row(l), columns
// lane_col(l) and the next. So a row lies in 4 lanes, which differ in bits 0 and 3 of l.
// The order of head_dim is free as long as q and k agree, and the order of v's columns as long as out
// follows. Both are chosen so that a lane's elements of several fragments are neighbours in memory and
// come with one load: K_PACK of them for k and q, V_PACK for v and out. k needs no transposing.
#pragma once
#include "common.metal"

#define HEAD_DIM 64        // columns of q and k
#define V_DIM 64           // columns of v and out
#define SIMDGROUPS 2       // in a threadgroup
#define ROW_FRAGMENTS 2    // fragments of 8 query rows in a simdgroup
#define K_PACK 4           // 4 when HEAD_DIM is a multiple of 32, otherwise 2
#define V_PACK 4           // 4 when V_DIM is a multiple of 16, otherwise 2
#define Q_GROUPS 2         // groups of K_PACK fragments of a q row that stay in registers
#define Q_STAGED 0         // the other groups are read from threadgroup memory (1) or device memory (0)
#define V_CHUNK 64         // columns of out that are computed at once, in registers
#define STAGE 64           // columns of k or v in threadgroup memory at once

#define TILE_Q (8u * ROW_FRAGMENTS * SIMDGROUPS)
#define THREADS (32u * SIMDGROUPS)
#define KV_FRAGMENTS 4u                                               // of 8 columns in a kv tile of 32
#define K_COLUMNS (8u * K_PACK)                                       // of a group
#define V_COLUMNS (4u * V_PACK)
#define HEAD_GROUPS ((HEAD_DIM + K_COLUMNS - 1u) / K_COLUMNS)
#define V_GROUPS ((V_CHUNK + V_COLUMNS - 1u) / V_COLUMNS)             // in a chunk
#define V_FRAGMENTS (V_PACK / 2)                                      // in a group

typedef simdgroup_matrix<float, 8, 8> Accumulator;
typedef simdgroup_matrix<Operand, 8, 8> Fragment;

inline uint lane_row(uint lane) { return ((lane / 4u) & 4u) + (lane / 2u) % 4u; }
inline uint lane_col(uint lane) { return ((lane / 4u) & 2u) * 2u + (lane % 2u) * 2u; }

// The rows of one head.
struct Rows {
  device const Elem* first;  // [count, stride]
  uint stride;               // elements
  uint count;
};

// Left operands: element e of fragment i is column K_PACK * (col + e) + i of the group.
template <typename P> inline void left(thread Fragment* q, vec<P, K_PACK> a, vec<P, K_PACK> b) {
  #pragma unroll
  for (uint i = 0; i < K_PACK; i++) {
    q[i].thread_elements()[0] = widen(a[i]);
    q[i].thread_elements()[1] = widen(b[i]);
  }
}
// Right operands of S = Q K^T: `a` and `b` are of neighbouring rows of k, from column K_PACK * row on.
template <typename P> inline void right(thread Fragment* k, vec<P, K_PACK> a, vec<P, K_PACK> b) { left(k, a, b); }
// Right operands of O = P V: neighbouring columns of one row of v.
template <typename P> inline void right(thread Fragment* v, vec<P, V_PACK> a) {
  #pragma unroll
  for (uint i = 0; i < V_FRAGMENTS; i++) {
    v[i].thread_elements()[0] = widen(a[2 * i]);
    v[i].thread_elements()[1] = widen(a[2 * i + 1]);
  }
}
