// What the gradient kernels compute again of a 32-column tile: S = q k^T and dP = dout v^T, and of each
// pair P and dS = P (dP - delta) score_mod'(S).
//
// Rows are the simdgroup's own, query rows in dq and kv rows in dkv, and columns the others: in dkv S and
// dP come out transposed, which is how they are needed there. Both stay in registers.
#pragma once
#include "common.metal"
#include "mods_grad.metal"
#include "product.metal"
#include "tile.metal"
#include "walk.metal"

#define S_KEPT 2           // groups of fragments of an own row of q or k that stay in registers
#define DP_KEPT 2          // the same of dout or v; the other groups are read again for each tile
#define CHUNK 64           // columns of a gradient that are computed at once, in registers
#define AREAS 2            // 2: whole rows of both others are staged side by side; 1: STAGE columns of one

#define S_PACK SUM_PACK(HEAD_DIM)
#define DP_PACK SUM_PACK(V_DIM)
// The second area, or the only one.
#define AREA_1 ((AREAS - 1u) * TILE_ELEMENTS / 4u)

// Own rows of a tensor with DIM columns, as one lane sees them: of each row fragment it holds one row.
template <int DIM, int N, int KEPT> struct Own {
  device const Elem* at[ROW_FRAGMENTS];            // [DIM]
  Fragment kept[KEPT][ROW_FRAGMENTS][N];
};

// Row fragment r is row `row`. Past the end it is the last row, and nothing of it is stored.
template <int DIM, int N, int KEPT> inline void load_own(thread Own<DIM, N, KEPT>& own, uint r, Rows rows, uint row, uint lane) {
  own.at[r] = row_of(rows, row);
  #pragma unroll
  for (int g = 0; g < KEPT; g++) {
    uint column = g * 8 * N + N * lane_col(lane);
    left<N>(own.kept[g][r], read<N>(own.at[r], column, DIM), read<N>(own.at[r], column + N, DIM));
  }
}

// S = X Y^T: own rows with those of the tile. With one area the tile's columns are staged STAGE at a time.
template <int DIM, int N, int KEPT>
inline void product(thread Accumulator (&s)[ROW_FRAGMENTS][COLUMN_FRAGMENTS], thread Own<DIM, N, KEPT>& own,
                    threadgroup vec<Elem, 4>* tile, Rows rows, uint first, uint thread_index, uint lane) {
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    #pragma unroll
    for (uint j = 0; j < COLUMN_FRAGMENTS; j++) s[r][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  #pragma unroll
  for (int g = 0; g < KEPT; g++) {
    if (AREAS == 1 && g * 8 * N % STAGE == 0) stage(tile, rows, first, g * 8 * N, thread_index);
    simdgroup_barrier(mem_flags::mem_none);
    multiply<N>(s, own.kept[g], tile, rows, first, g, lane);
  }
  for (int g = KEPT; g < SUM_GROUPS(DIM, N); g++) {
    if (AREAS == 1 && g * 8 * N % STAGE == 0) stage(tile, rows, first, g * 8 * N, thread_index);
    Fragment loaded[ROW_FRAGMENTS][N];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      uint column = g * 8 * N + N * lane_col(lane);
      left<N>(loaded[r], read<N>(own.at[r], column, DIM), read<N>(own.at[r], column + N, DIM));
    }
    multiply<N>(s, loaded, tile, rows, first, g, lane);
  }
}

// lse and delta of a query row.
struct Stat {
  float lse;
  float delta;
};
inline Stat stat_of(thread const Ctx& ctx, device const float* stats, uint b, uint h, uint row) {
  const ulong at = ulong(b * ctx.p.q_heads + h) * ctx.p.q_len + row;
  return Stat{stats[ctx.p.lse_at + at], stats[ctx.p.delta_at + at]};
}

// Turns S and dP of a pair into P and dS, 0 where it is not kept, whatever the mods give there.
inline void weigh(thread float& s, thread float& dp, thread const Ctx& ctx, Stat stat, Row row, uint b, int h, int q, uint kv,
                  bool inside, uint kind) {
  const float raw = s * ctx.p.scale;
  const float score = score_mod(ctx, raw, row, int(b), h, q, int(kv));
  bool keep = inside && as_type<uint>(score) != MINUS_INFINITY;
  if (keep && kind != FULL) keep = mask_mod(ctx, row, int(b), h, q, int(kv));
  const float weight = exp2((score - stat.lse) * LOG2E);
  const float d_post = keep ? weight * (dp - stat.delta) : 0.0f;
  s = keep ? weight : 0.0f;
  // score_mod' may be NaN or infinite where the pair is not kept.
  dp = d_post == 0.0f ? 0.0f : d_post * score_grad(ctx, raw, row, int(b), h, q, int(kv));
}
