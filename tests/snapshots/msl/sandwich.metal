// forward: out = softmax(score_mod(q k^T * scale)) v over the kept pairs, and its lse and max.
//
// A threadgroup computes TILE_ROWS query rows of one head, each simdgroup 8 * ROW_FRAGMENTS of them. It walks
// the tiles of their block list and attends to each (attend.metal). When v has more columns than V_CHUNK
// the walk is repeated for each chunk of them.
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

#define INFO 2        // uint4 of `info`: two per captured tensor, one per four scalars
#define Elem float     // of q, k, v and out: half, float, or ushort with the bits of a bfloat
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
// One kv tile: S = Q K^T, the mods, the online softmax, O += P V. Forward and decode share it.
//
// S, P and O never leave registers: S and O are 8x8 fragments, P overwrites S.
// The attention mods: identity score_mod, all-true mask_mod. Positions are global: q is a row plus
// the batch entry's q_offset, h a query head, score = dot(q, k) * scale in natural units.

//@slot captures
inline int wrap_add(int a, int b) { return int(uint(a) + uint(b)); }
inline int wrap_sub(int a, int b) { return int(uint(a) - uint(b)); }
inline uint position_sandwich(thread const Ctx& ctx, int i0) { return uint(clamp(i0, 0, int(ctx.p.info[0].x) - 1)); }
inline float captured_sandwich(thread const Ctx& ctx, int i0) {
  uint at = ctx.p.info[1].y + position_sandwich(ctx, i0);
  return as_type<float>(ctx.captures[ctx.p.info[1].x + at]);
}
//@end

//@slot row
struct Row { float r0; };
inline Row row_mod(thread const Ctx& ctx, int b, int h, int q) {
  return Row{0.5f / float(wrap_add(h, 1))};
}
//@end

//@slot score_mod
inline float score_mod(thread const Ctx& ctx, float score, Row row, int b, int h, int q, int kv) {
  return score + captured_sandwich(ctx, wrap_add(clamp(wrap_sub(q, kv), -95, 95), 95)) * row.r0;
}
//@end

//@slot mask_mod
inline bool mask_mod(thread const Ctx& ctx, Row row, int b, int h, int q, int kv) { return true; }
//@end
// Products of a simdgroup's rows with the 32 rows of a tile.
// Loads by way of threadgroup memory: M1 and M2, where reading fragments from device memory costs twice.
//
// All threads copy STAGE columns of 32 rows side by side; then each simdgroup reads its fragments from
// there. Two barriers per copy.
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

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void forward(device const Elem* q [[buffer(0)]],          // [B, Hq, L, D]
                    device const Elem* k [[buffer(1)]],          // [Bkv, Hkv, S, D]
                    device const Elem* v [[buffer(2)]],          // [Bkv, Hkv, S, Dv]
                    device Elem* out [[buffer(3)]],              // [B, Hq, L, Dv]
                    device float* stats [[buffer(4)]],           // lse [B, Hq, L] | max [B, Hq, L]
                    constant uint* tables [[buffer(5)]],         // block lists, q_offset, kv_len, sinks
                    device const uint* captures [[buffer(6)]],
                    device const uint* large [[buffer(7)]],
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

  const Ctx ctx = {p, tables, captures, large};
  const uint kv_len = kv_len_of(ctx, b);
  const Rows q_rows = {q + p.q.x + ulong(b) * p.q.y + ulong(h) * p.q.z, p.q.w, p.q_len, HEAD_DIM};
  const Rows k_rows = {k + p.k.x + ulong(b) * p.k.y + ulong(h / p.group) * p.k.z, p.k.w, kv_len, HEAD_DIM};
  const Rows v_rows = {v + p.v.x + ulong(b) * p.v.y + ulong(h / p.group) * p.v.z, p.v.w, kv_len, V_DIM};
  DECLARE_TILES(tiles, TILE_ELEMENTS + Q_TILE);

  // A row past the end repeats the last one, and is not stored.
  Queries queries;
  queries.b = b;
  queries.own = simdgroup * 8u * ROW_FRAGMENTS + lane_row(lane);
  #pragma unroll
  for (uint r = 0; r < ROW_FRAGMENTS; r++) {
    const uint at = min(row0 + queries.own + 8u * r, p.q_len - 1u);
    queries.h[r] = int(h);
    queries.q[r] = int(at) + q_offset_of(ctx, b);
    queries.row[r] = row_mod(ctx, int(b), int(h), queries.q[r]);
    load_row(queries, r, q_rows.first + ulong(at) * q_rows.stride, true, lane);
  }
  stage_q(tiles, q_rows, row0, thread_index);

  for (uint chunk = 0; chunk < V_DIM; chunk += V_CHUNK) {
    Online online;
    begin(online);
    Walk walk = walk_row(ctx, b, h, row0, kv_len);
    while (next_tile(ctx, walk)) {
      uint kind[ROW_FRAGMENTS];
      #pragma unroll
      for (uint r = 0; r < ROW_FRAGMENTS; r++) kind[r] = walk.kind;
      attend(online, queries, ctx, tiles, k_rows, v_rows, walk.first, kind, chunk, thread_index, lane);
    }

    // out = O / l. A row with nothing kept: out 0, lse and max -inf.
    #pragma unroll
    for (uint r = 0; r < ROW_FRAGMENTS; r++) {
      const float sum = row_sum(online.l[r]);
      const uint at = row0 + queries.own + 8u * r;
      if (at >= p.q_len) continue;
      const bool empty = sum == 0.0f;
      const float lse = online.m[r] + log(sum);
      float factor = 1.0f / sum;
      if (p.sinks_at != NONE) factor /= 1.0f + exp(as_type<float>(tables[p.sinks_at + h]) - lse);
      device Elem* out_row = out + p.out.x + ulong(b) * p.out.y + ulong(h) * p.out.z + ulong(at) * p.out.w;
      store_row<V_PACK, V_GROUPS>(out_row, online.o[r], chunk, V_DIM, empty ? 0.0f : factor, false, lane);
      if (lane_col(lane) == 0u && chunk == 0u) {
        const ulong stat = ulong(b * p.q_heads + h) * p.q_len + at;
        if (p.lse_at != NONE) stats[p.lse_at + stat] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(lse));
        if (p.max_at != NONE) stats[p.max_at + stat] = as_type<float>(empty ? MINUS_INFINITY : as_type<uint>(online.m[r]));
      }
    }
  }
}
