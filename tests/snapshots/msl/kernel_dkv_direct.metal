// backward: dq, and dk and dv, of out = softmax(score_mod(q k^T * scale)) v, given dout and the gradient
// of lse. P and dP are computed again, tile by tile; nothing of size q_len * kv_len is kept.
//
// lse and delta come from delta.metal.
// `dq` computes dq of TILE_ROWS query rows of one head, over the tiles of their block list: dq += dS k.
// `dkv` computes dk and dv of TILE_ROWS rows of one kv head, over the query heads that share it and the
//   tiles of the rows' transposed lists: dv += P^T dout, dk += dS^T q.
// When a gradient has more columns than CHUNK the walk is repeated for each chunk of them.
// No float atomics: every sum has one owner and one order, so results repeat bit for bit.
// Parameters, tables and captured tensors, as every kernel binds them; element types; the attention mods.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
// Metal's default mode may assume NaN and infinity away; from 3.2 on a text can ask for less.
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(relaxed)
#endif

// Threadgroup arrays in a kernel's body. Whoever runs the text elsewhere may define it.
#ifndef SHARED
#define SHARED threadgroup
#endif

#define INFO 1        // uint4 of `info`: two per captured tensor, one per four scalars
#define Elem half     // of q, k, v and out: half, float, or ushort with the bits of a bfloat
#define ALIGNED 1     // every offset, stride and dim of q, k, v and out is a multiple of 4 elements
#define NONE 0xffffffffu

struct Params {
  uint batch;         // entries of q and out
  uint q_heads;       // heads of q and out
  uint kv_heads;      // heads of k and v
  uint group;         // query heads that share a kv head: q_heads / kv_heads
  uint q_len;         // rows of q
  uint kv_len;        // rows of k and v in memory; how many count is per batch entry, at kv_len_at
  uint q_blocks;      // blocks of 128 rows in q_len
  uint kv_blocks;     // blocks of 128 columns in kv_len
  uint mask_batch;    // batch entries of the block mask: batch, or 1 if all share one
  uint mask_heads;    // heads of the block mask: q_heads, or 1
  uint lists;         // in tables: headers of the lists of each query row block
  uint lists_t;       // in tables: headers of the transposed lists, of each kv block
  uint q_offset_at;   // in tables: the position of query row 0, an i32 per batch entry
  uint kv_len_at;     // in tables: how many rows of k and v count, per batch entry
  uint sinks_at;      // in tables: an f32 attention sink per query head, or none
  uint splits;        // decode: parts that kv_len is cut into
  uint lse_at;        // in stats: lse, or none
  uint max_at;        // in stats: max, or none
  uint delta_at;      // in stats: delta = rowsum(out * dout)
  uint dlse_at;       // in stats: the gradient of lse, or none
  float scale;        // factor of dot(q, k)
  uint first_group;   // number of the first workgroup of this dispatch
  uint groups;        // end of the workgroups that have work
  uint fold;          // workgroups in x per step of y
  uint split_len;     // decode: columns in a part, a multiple of 32
  uint accumulate;    // gradients: 1 where a launch adds to what is there, 0 where it replaces it
  uint capture_at;    // captured gradients: where this pass writes, in elements
  uint zero;          // always 0, which a compiler cannot know: keeps long loops rolled
  uint4 q;            // view of q
  uint4 k;            // view of k
  uint4 v;            // view of v
  uint4 out;          // view of out
  uint4 dout;         // view of dout
  uint4 dq;           // view of dq
  uint4 dk;           // view of dk
  uint4 dv;           // view of dv
  uint4 info[INFO]; // captures: dims, then offsets; then scalars
};

// What the mods may read besides their arguments.
struct Ctx {
  constant Params& p;
  constant uint* tables;        // block lists, q_offset, kv_len, sinks
  device const uint* captures;  // captured tensors, one after the other
  device const uint* large;     // one large captured tensor, in place
};

// The position of query row 0, which mods see as q.
inline int q_offset_of(thread const Ctx& ctx, uint b) { return int(ctx.tables[ctx.p.q_offset_at + b]); }
// How many rows of k and v count.
inline uint kv_len_of(thread const Ctx& ctx, uint b) { return ctx.tables[ctx.p.kv_len_at + b]; }

// Scores are exponentiated base 2 inside the kernels; score_mod, lse and max are in natural units.
#define LOG2E 1.4426950408889634f
// The row max before any score. Finite, and no kept score lies below it; -inf has weight 0 by itself.
#define LOWEST (-3.402823466e38f)
// As bits: arithmetic with an infinite constant means nothing in Metal's default mode.
#define MINUS_INFINITY 0xff800000u

// What a matrix product takes: halves as they are, floats, bfloats widened to floats.
inline half widen(half x) { return x; }
inline float widen(float x) { return x; }
inline float widen(ushort x) { return as_type<float>(uint(x) << 16); }
typedef decltype(widen(Elem(0))) Operand;
// Rounds to nearest, ties to even.
inline void narrow(float x, thread half& y) { y = half(x); }
inline void narrow(float x, thread float& y) { y = x; }
inline void narrow(float x, thread ushort& y) {
  uint bits = as_type<uint>(x);
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y = ushort(nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// N neighbours of a row from column `column` on; past the end of the row, zeros.
template <int N> inline vec<Elem, N> read(device const Elem* row, uint column, uint columns) {
  vec<Elem, N> x = vec<Elem, N>(Elem(0));
  if (ALIGNED) {
    if (column < columns) x = *(device const vec<Elem, N>*)(row + column);
  } else {
    for (uint i = 0; i < N; i++) if (column + i < columns) x[i] = row[column + i];
  }
  return x;
}

// The same to memory, rounded to the element type.
template <int N> inline void write(device Elem* row, uint column, uint columns, vec<float, N> x) {
  vec<Elem, N> rounded;
  for (uint i = 0; i < N; i++) {
    Elem y;
    narrow(x[i], y);
    rounded[i] = y;
  }
  if (ALIGNED) {
    if (column < columns) *(device vec<Elem, N>*)(row + column) = rounded;
  } else {
    for (uint i = 0; i < N; i++) if (column + i < columns) row[column + i] = rounded[i];
  }
}
// What the gradient kernels compute again of a 32-column tile: S = q k^T and dP = dout v^T, and of each
// pair P and dS = P (dP - delta) score_mod'(S).
//
// Rows are the simdgroup's own, query rows in dq and kv rows in dkv, and columns the others: in dkv S and
// dP come out transposed, which is how they are needed there. Both stay in registers.
// The derivative of score_mod with respect to the score: 1 for the identity.
// The attention mods: identity score_mod, all-true mask_mod. Positions are global: q is a row plus
// the batch entry's q_offset, h a query head, score = dot(q, k) * scale in natural units.

//@slot captures
//@end

//@slot row
// What the mods need of a row, computed once for all its columns.
struct Row { uint unused; };
inline Row row_mod(thread const Ctx& ctx, int b, int h, int q) { return Row{0u}; }
//@end

//@slot score_mod
inline float score_mod(thread const Ctx& ctx, float score, Row row, int b, int h, int q, int kv) { return score; }
//@end

//@slot mask_mod
inline bool mask_mod(thread const Ctx& ctx, Row row, int b, int h, int q, int kv) { return true; }
//@end

//@slot score_grad
inline float score_grad(thread const Ctx& ctx, float score, Row row, int b, int h, int q, int kv) { return 1.0f; }
//@end
// Products of a simdgroup's rows with the 32 rows of a tile.
// Loads straight from device memory: M3 and later, where staging costs more than it saves.
//
// The functions of load_staged.metal. No threadgroup memory, no barriers: simdgroups share nothing.
// A row past the end reads the last one instead; its weight is 0.
// The tile of a threadgroup and its 8x8 fragments.
//
// Lane l of a simdgroup holds two neighbours of one row of a fragment: row lane_row(l), columns
// lane_col(l) and the next. So a row lies in 4 lanes, which differ in bits 0 and 3 of l.
// The order of the summed dimension is free as long as both operands agree, and the order of a result's
// columns as long as its store follows. Both are chosen so that a lane's elements of several fragments are
// neighbours in memory and come with one load of N: a group of N fragments, or of N / 2. Nothing needs
// transposing.

#define HEAD_DIM 64        // columns of q and k
#define V_DIM 64           // columns of v and out
#define SIMDGROUPS 2       // in a threadgroup
#define ROW_FRAGMENTS 1    // fragments of 8 rows in a simdgroup
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
// Walking the block list of 32 query rows, or the transposed list of 32 columns: full runs first, then
// partial blocks.
//
// A list's header (in `tables`, 4 words) gives the word ranges of its runs, pairs [first, end) of
// blocks in which every pair is kept, and of its partial blocks, pairs (block, tile map).
// A block is 128 x 128 pairs. A tile map says for each of its 4 x 4 tiles of 32 x 32 whether it is
// empty, partial or full: two bits each, at 2 * (4 * q tile + kv tile).
// All of it is the same for every thread of a threadgroup, so it lies in `constant` memory.

#define BLOCK 128u
#define TILE 32u
#define EMPTY 0u
#define PARTIAL 1u
#define FULL 2u
#define ALL_FULL 0xaaaaaaaau

struct Walk {
  uint run;          // next run, a word offset in tables
  uint run_end;
  uint partial;      // next partial block
  uint partial_end;
  uint tile;         // row of the tile map, or column, 0..4
  bool transposed;   // the walk is over the query rows of a column
  uint kinds;        // kinds of the coming tiles, two bits each
  uint next;         // first column of the coming tile
  uint end;          // end of the columns of the run or block being walked
  uint count;        // columns in all
  uint first;        // the current tile: its first column
  uint kind;         // and PARTIAL or FULL
};

// The list of the query rows around `row` of batch entry b and query head h.
inline Walk walk_row(thread const Ctx& ctx, uint b, uint h, uint row, uint kv_len) {
  constant Params& p = ctx.p;
  uint list = ((b % p.mask_batch) * p.mask_heads + h % p.mask_heads) * p.q_blocks + row / BLOCK;
  constant uint* header = ctx.tables + p.lists + 4u * list;
  return Walk{header[0], header[1], header[2], header[3], (row % BLOCK) / TILE, false, 0u, 0u, 0u, kv_len, 0u, EMPTY};
}

// The transposed list of the columns around `kv`: which query rows they are kept for.
inline Walk walk_column(thread const Ctx& ctx, uint b, uint h, uint kv) {
  constant Params& p = ctx.p;
  uint list = ((b % p.mask_batch) * p.mask_heads + h % p.mask_heads) * p.kv_blocks + kv / BLOCK;
  constant uint* header = ctx.tables + p.lists_t + 4u * list;
  return Walk{header[0], header[1], header[2], header[3], (kv % BLOCK) / TILE, true, 0u, 0u, 0u, p.q_len, 0u, EMPTY};
}

// The kinds of the four tiles of row `tile` of a map, or of its column.
inline uint row_kinds(uint map, uint tile) { return map >> (8u * tile); }
inline uint column_kinds(uint map, uint tile) {
  const uint kinds = map >> (2u * tile);
  return (kinds & 3u) | ((kinds >> 6u) & 0xcu) | ((kinds >> 12u) & 0x30u) | ((kinds >> 18u) & 0xc0u);
}

// Moves to the next tile that is not empty; false at the end of the list.
inline bool next_tile(thread const Ctx& ctx, thread Walk& walk) {
  while (true) {
    if (walk.next < walk.end) {
      // Rotating leaves ALL_FULL as it is, however long the run.
      walk.first = walk.next;
      walk.kind = walk.kinds & 3u;
      walk.next += TILE;
      walk.kinds = (walk.kinds >> 2) | (walk.kinds << 30);
      if (walk.kind != EMPTY) return true;
    } else if (walk.run < walk.run_end) {
      walk.next = ctx.tables[walk.run] * BLOCK;
      walk.end = min(ctx.tables[walk.run + 1u] * BLOCK, walk.count);
      walk.kinds = ALL_FULL;
      walk.run += 2u;
    } else if (walk.partial < walk.partial_end) {
      walk.next = ctx.tables[walk.partial] * BLOCK;
      walk.end = min(walk.next + BLOCK, walk.count);
      const uint map = ctx.tables[walk.partial + 1u];
      walk.kinds = walk.transposed ? column_kinds(map, walk.tile) : row_kinds(map, walk.tile);
      walk.partial += 2u;
    } else {
      return false;
    }
  }
}

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

#define DK 1               // whether dkv computes dk
#define DV 1               // and dv

#define DQ_PACK RESULT_PACK(HEAD_DIM)
#define DV_PACK RESULT_PACK(V_DIM)
// Groups of a chunk of a gradient with `dim` columns.
#define CHUNK_GROUPS(dim, n) RESULT_GROUPS((CHUNK) < (dim) ? (CHUNK) : (dim), n)
#define DQ_GROUPS CHUNK_GROUPS(HEAD_DIM, DQ_PACK)
#define DV_GROUPS CHUNK_GROUPS(V_DIM, DV_PACK)

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void dq(device const Elem* q [[buffer(0)]],               // [B, Hq, L, D]
               device const Elem* k [[buffer(1)]],               // [Bkv, Hkv, S, D]
               device const Elem* v [[buffer(2)]],               // [Bkv, Hkv, S, Dv]
               device const Elem* dout [[buffer(3)]],            // [B, Hq, L, Dv]
               device const float* stats [[buffer(4)]],          // lse, with sinks | delta, each [B, Hq, L]
               constant uint* tables [[buffer(5)]],              // block lists, q_offset, kv_len
               device const uint* captures [[buffer(6)]],
               device Elem* out [[buffer(7)]],                   // dq [B, Hq, L, D]
               constant Params& p [[buffer(8)]],
               uint3 threadgroup_at [[threadgroup_position_in_grid]],
               uint thread_index [[thread_index_in_threadgroup]],
               uint simdgroup [[simdgroup_index_in_threadgroup]],
               uint lane [[thread_index_in_simdgroup]]) {
  const uint id = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (id >= p.groups) return;
  const uint tile_count = (p.q_len + TILE_ROWS - 1u) / TILE_ROWS;
  const uint row0 = id % tile_count * TILE_ROWS;
  const uint h = id / tile_count % p.q_heads;
  const uint b = id / (tile_count * p.q_heads);

  const Ctx ctx = {p, tables, captures, captures};
  const uint kv_len = kv_len_of(ctx, b);
  const Rows q_rows = {q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z, p.q.w, p.q_len, HEAD_DIM};
  const Rows dout_rows = {dout + p.dout.x + ulong(b) * p.dout.y + ulong(h) * p.dout.z, p.dout.w, p.q_len, V_DIM};
  const Rows k_rows = {k + p.k.x + ulong(b) * p.k.y + ulong(h / p.group) * p.k.z, p.k.w, kv_len, HEAD_DIM};
  const Rows v_rows = {v + p.v.x + ulong(b) * p.v.y + ulong(h / p.group) * p.v.z, p.v.w, kv_len, V_DIM};
  DECLARE_TILES(tiles, AREAS * TILE_ELEMENTS);

  const uint own = row0 + simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  Own<HEAD_DIM, S_PACK, S_KEPT> own_q;
  Own<V_DIM, DP_PACK, DP_KEPT> own_dout;
  int position[ROW_FRAGMENTS];
  Row row[ROW_FRAGMENTS];
  Stat stat[ROW_FRAGMENTS];
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    const uint at = min(own + 8u * r, p.q_len - 1u);
    load_own(own_q, r, q_rows, at, lane);
    load_own(own_dout, r, dout_rows, at, lane);
    position[r] = int(at) + q_offset_of(ctx, b);
    row[r] = row_mod(ctx, int(b), int(h), position[r]);
    stat[r] = stat_of(ctx, stats, b, h, at);
  }

  for (uint chunk = 0; chunk < HEAD_DIM; chunk += CHUNK) {
    Accumulator gradient[ROW_FRAGMENTS][DQ_GROUPS * DQ_PACK / 2];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      #pragma unroll
      for (int c = 0; c < DQ_GROUPS * DQ_PACK / 2; c++) gradient[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    Walk walk = walk_row(ctx, b, h, row0, kv_len);
    while (next_tile(ctx, walk)) {
      Accumulator s[ROW_FRAGMENTS][COLUMN_FRAGMENTS], dp[ROW_FRAGMENTS][COLUMN_FRAGMENTS];
      if (AREAS == 2) stage_both(tiles, k_rows, v_rows, walk.first, thread_index);
      product(dp, own_dout, tiles + AREA_1, v_rows, walk.first, thread_index, lane);
      product(s, own_q, tiles, k_rows, walk.first, thread_index, lane);
      #pragma unroll
      for (uint i = 0; i < COLUMN_FRAGMENTS * 2u; i++) {
        const uint kv = walk.first + 8u * (i / 2u) + lane_col(lane) + i % 2u;
        #pragma unroll
        for (uint r = 0; r < ROW_FRAGMENTS; r++) {
          float weight = s[r][i / 2u].thread_elements()[i % 2u], ds = dp[r][i / 2u].thread_elements()[i % 2u];
          weigh(weight, ds, ctx, stat[r], row[r], b, int(h), position[r], kv, kv < kv_len, walk.kind);
          dp[r][i / 2u].thread_elements()[i % 2u] = ds;
        }
      }
      accumulate<DQ_PACK, DQ_GROUPS>(gradient, dp, tiles, k_rows, walk.first, chunk, AREAS == 1, thread_index, lane);
    }

    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      const uint at = own + 8u * r;
      if (at >= p.q_len) continue;
      device Elem* to = out + p.dq.x + ulong(b) * p.dq.y + ulong(h) * p.dq.z + ulong(at) * p.dq.w;
      store_row<DQ_PACK, DQ_GROUPS>(to, gradient[r], chunk, HEAD_DIM, p.scale, p.accumulate != 0u, lane);
    }
  }
}

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void dkv(device const Elem* q [[buffer(0)]],              // [B, Hq, L, D]
                device const Elem* k [[buffer(1)]],              // [Bkv, Hkv, S, D]
                device const Elem* v [[buffer(2)]],              // [Bkv, Hkv, S, Dv]
                device const Elem* dout [[buffer(3)]],           // [B, Hq, L, Dv]
                device const float* stats [[buffer(4)]],         // lse, with sinks | delta, each [B, Hq, L]
                constant uint* tables [[buffer(5)]],             // block lists, q_offset, kv_len
                device const uint* captures [[buffer(6)]],
                device Elem* out [[buffer(7)]],                  // dk [Bkv, Hkv, S, D] | dv [Bkv, Hkv, S, Dv]
                constant Params& p [[buffer(8)]],
                uint3 threadgroup_at [[threadgroup_position_in_grid]],
                uint thread_index [[thread_index_in_threadgroup]],
                uint simdgroup [[simdgroup_index_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]]) {
  const uint id = threadgroup_at.x + threadgroup_at.y * p.fold + p.first_group;
  if (id >= p.groups) return;
  const uint tile_count = (p.kv_len + TILE_ROWS - 1u) / TILE_ROWS;
  const uint row0 = id % tile_count * TILE_ROWS;
  const uint kv_head = id / tile_count % p.kv_heads;
  const uint kv_batch = id / (tile_count * p.kv_heads);

  const Ctx ctx = {p, tables, captures, captures};
  const Rows k_rows = {k + p.k.x + ulong(kv_batch) * p.k.y + ulong(kv_head) * p.k.z, p.k.w, p.kv_len, HEAD_DIM};
  const Rows v_rows = {v + p.v.x + ulong(kv_batch) * p.v.y + ulong(kv_head) * p.v.z, p.v.w, p.kv_len, V_DIM};
  DECLARE_TILES(tiles, AREAS * TILE_ELEMENTS);

  const uint own = row0 + simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  Own<HEAD_DIM, S_PACK, S_KEPT> own_k;
  Own<V_DIM, DP_PACK, DP_KEPT> own_v;
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    load_own(own_k, r, k_rows, own + 8u * r, lane);
    load_own(own_v, r, v_rows, own + 8u * r, lane);
  }
  // Where all batch entries share k and v, dk has a batch stride of 0 and the sum goes over them.
  const bool shared_kv = p.dk.y == 0u;
  const uint first_b = shared_kv ? 0u : kv_batch, end_b = shared_kv ? p.batch : kv_batch + 1u;

  for (uint chunk = 0; chunk < max(HEAD_DIM, V_DIM); chunk += CHUNK) {
    Accumulator dk[ROW_FRAGMENTS][DQ_GROUPS * DQ_PACK / 2], dv[ROW_FRAGMENTS][DV_GROUPS * DV_PACK / 2];
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      #pragma unroll
      for (int c = 0; c < DQ_GROUPS * DQ_PACK / 2; c++) dk[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      #pragma unroll
      for (int c = 0; c < DV_GROUPS * DV_PACK / 2; c++) dv[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    for (uint b = first_b; b < end_b; b++) {
      const uint kv_len = kv_len_of(ctx, b);
      for (uint h = kv_head * p.group; h < (kv_head + 1u) * p.group; h++) {
        const Rows q_rows = {q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z, p.q.w, p.q_len, HEAD_DIM};
        const Rows dout_rows = {dout + p.dout.x + ulong(b) * p.dout.y + ulong(h) * p.dout.z, p.dout.w, p.q_len, V_DIM};
        Walk walk = walk_column(ctx, b, h, row0);
        while (next_tile(ctx, walk)) {
          Accumulator s[ROW_FRAGMENTS][COLUMN_FRAGMENTS], dp[ROW_FRAGMENTS][COLUMN_FRAGMENTS];
          if (AREAS == 2) stage_both(tiles, q_rows, dout_rows, walk.first, thread_index);
          product(s, own_k, tiles, q_rows, walk.first, thread_index, lane);
          if (DK) product(dp, own_v, tiles + AREA_1, dout_rows, walk.first, thread_index, lane);
          // Each lane reads the statistics of one query row; the others ask it.
          const Stat read_stat = stat_of(ctx, stats, b, h, min(walk.first + lane, p.q_len - 1u));
          #pragma unroll
          for (uint i = 0; i < COLUMN_FRAGMENTS * 2u; i++) {
            const uint column = 8u * (i / 2u) + lane_col(lane) + i % 2u, at = walk.first + column;
            const Stat stat = {simd_shuffle(read_stat.lse, column), simd_shuffle(read_stat.delta, column)};
            const int position = int(min(at, p.q_len - 1u)) + q_offset_of(ctx, b);
            const Row row = row_mod(ctx, int(b), int(h), position);
            #pragma unroll
            for (uint r = 0; r < ROW_FRAGMENTS; r++) {
              const uint kv = own + 8u * r;
              float weight = s[r][i / 2u].thread_elements()[i % 2u], ds = DK ? dp[r][i / 2u].thread_elements()[i % 2u] : 0.0f;
              weigh(weight, ds, ctx, stat, row, b, int(h), position, kv, at < p.q_len && kv < kv_len, walk.kind);
              s[r][i / 2u].thread_elements()[i % 2u] = weight;
              dp[r][i / 2u].thread_elements()[i % 2u] = ds;
            }
          }
          if (DV) accumulate<DV_PACK, DV_GROUPS>(dv, s, tiles + AREA_1, dout_rows, walk.first, chunk, AREAS == 1, thread_index, lane);
          if (DK) accumulate<DQ_PACK, DQ_GROUPS>(dk, dp, tiles, q_rows, walk.first, chunk, AREAS == 1, thread_index, lane);
        }
      }
    }

    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      const uint at = own + 8u * r;
      if (at >= p.kv_len) continue;
      device Elem* to_k = out + p.dk.x + ulong(kv_batch) * p.dk.y + ulong(kv_head) * p.dk.z + ulong(at) * p.dk.w;
      device Elem* to_v = out + p.dv.x + ulong(kv_batch) * p.dv.y + ulong(kv_head) * p.dv.z + ulong(at) * p.dv.w;
      if (DK) store_row<DQ_PACK, DQ_GROUPS>(to_k, dk[r], chunk, HEAD_DIM, p.scale, p.accumulate != 0u, lane);
      if (DV) store_row<DV_PACK, DV_GROUPS>(to_v, dv[r], chunk, V_DIM, 1.0f, p.accumulate != 0u, lane);
    }
  }
}
