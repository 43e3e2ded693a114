// Walking the block list of 32 query rows, or the transposed list of 32 columns: full runs first, then
// partial blocks.
//
// A list's header (in `tables`, 4 words) gives the word ranges of its runs, pairs [first, end) of
// blocks in which every pair is kept, and of its partial blocks, pairs (block, tile map).
// A block is 128 x 128 pairs. A tile map says for each of its 4 x 4 tiles of 32 x 32 whether it is
// empty, partial or full: two bits each, at 2 * (4 * q tile + kv tile).
// All of it is the same for every thread of a threadgroup, so it lies in `constant` memory.
#pragma once
#include "common.metal"

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
