// Walking the block list of 32 query rows, or the transposed list of 32 columns: full runs first, then
// partial blocks.
//
// A list's header (in `tables`, 4 words) gives the word ranges of its runs, pairs [first, end) of
// blocks in which every pair is kept, and of its partial blocks, pairs (block, tile map).
// A block is 128 x 128 pairs. A tile map says for each of its 4 x 4 tiles of 32 x 32 whether it is
// empty, partial or full: two bits each, at 2 * (4 * q tile + kv tile).
// Everything here is a function of workgroup ids and read-only tables, so it is uniform.

const BLOCK: u32 = 128u;
const TILE: u32 = 32u;
const EMPTY: u32 = 0u;
const PARTIAL: u32 = 1u;
const FULL: u32 = 2u;
const ALL_FULL: u32 = 0xaaaaaaaau;

// The tile of query rows that a workgroup computes, counted over batch entries, heads and tiles of rows.
// First and last tiles take turns: wherever a device cuts the order, the parts are as much work under a
// triangular mask. A launch is of whole heads, or of some tiles of one.
fn tile_of(workgroup: vec3<u32>, tiles: u32) -> u32 {
  let n = workgroup.x + workgroup.y * p.fold;
  let span = max(min(tiles, p.groups - p.first_group), 1u);
  let turn = n % span;
  return p.first_group + n - turn + select(span - 1u - turn / 2u, turn / 2u, turn % 2u == 1u);
}

struct Walk {
  run: u32,            // next run, a word offset in tables
  run_end: u32,
  partial: u32,        // next partial block
  partial_end: u32,
  tile: u32,           // row of the tile map, or column, 0..4
  pair: bool,          // tile rows `tile` and `tile` + 1 are walked as one
  transposed: bool,    // the walk is over the query rows of a column
  kinds: u32,          // kinds of the coming tiles, two bits each
  next: u32,           // first column (transposed: row) of the coming tile
  end: u32,            // end of the columns of the run or block being walked
  count: u32,          // columns in all
  first: u32,          // the current tile: its first column
  kind: u32,           // and PARTIAL or FULL
}

// The list of query rows [row, row + rows) of batch entry b and query head h; rows is at most 64.
fn walk_rows(b: u32, h: u32, row: u32, rows: u32, kv_len: u32) -> Walk {
  let list = ((b % p.mask_batch) * p.mask_heads + h % p.mask_heads) * p.q_blocks + row / BLOCK;
  let header = p.lists + 4u * list;
  return Walk(tables[header], tables[header + 1u], tables[header + 2u], tables[header + 3u],
              (row % BLOCK) / TILE, rows > TILE, false, 0u, 0u, 0u, kv_len, 0u, EMPTY);
}
fn walk_row(b: u32, h: u32, row: u32, kv_len: u32) -> Walk { return walk_rows(b, h, row, TILE, kv_len); }

// The transposed list of columns [kv, kv + columns): which query rows they are kept for; columns is at most 64.
fn walk_columns(b: u32, h: u32, kv: u32, columns: u32) -> Walk {
  let list = ((b % p.mask_batch) * p.mask_heads + h % p.mask_heads) * p.kv_blocks + kv / BLOCK;
  let header = p.lists_t + 4u * list;
  return Walk(tables[header], tables[header + 1u], tables[header + 2u], tables[header + 3u],
              (kv % BLOCK) / TILE, columns > TILE, true, 0u, 0u, 0u, p.q_len, 0u, EMPTY);
}
fn walk_column(b: u32, h: u32, kv: u32) -> Walk { return walk_columns(b, h, kv, TILE); }

// The kinds of the four tiles of row `tile` of a map, or of its column.
fn row_kinds(map: u32, tile: u32) -> u32 { return map >> (8u * tile); }
fn column_kinds(map: u32, tile: u32) -> u32 {
  let kinds = map >> (2u * tile);
  return (kinds & 3u) | ((kinds >> 6u) & 0xcu) | ((kinds >> 12u) & 0x30u) | ((kinds >> 18u) & 0xc0u);
}
fn kinds_of(map: u32, tile: u32, transposed: bool) -> u32 {
  if (transposed) { return column_kinds(map, tile); }
  return row_kinds(map, tile);
}
// The kinds of two rows of tiles taken as one: where they differ it is partial.
fn pair_kinds(a: u32, b: u32) -> u32 {
  let differ = ((a ^ b) | ((a ^ b) >> 1u)) & 0x55u;
  return (a & ~(3u * differ)) | differ;
}

// Moves into the next run or partial block once the current one is used up; false at the end of the list.
fn next_block(walk: ptr<function, Walk>) -> bool {
  while ((*walk).next >= (*walk).end) {
    if ((*walk).run < (*walk).run_end) {
      (*walk).next = tables[(*walk).run] * BLOCK;
      (*walk).end = min(tables[(*walk).run + 1u] * BLOCK, (*walk).count);
      (*walk).kinds = ALL_FULL;
      (*walk).run += 2u;
    } else if ((*walk).partial < (*walk).partial_end) {
      (*walk).next = tables[(*walk).partial] * BLOCK;
      (*walk).end = min((*walk).next + BLOCK, (*walk).count);
      let map = tables[(*walk).partial + 1u];
      (*walk).kinds = kinds_of(map, (*walk).tile, (*walk).transposed);
      if ((*walk).pair) {
        (*walk).kinds = pair_kinds((*walk).kinds, kinds_of(map, (*walk).tile + 1u, (*walk).transposed));
      }
      (*walk).partial += 2u;
    } else {
      return false;
    }
  }
  return true;
}

// Moves to the next tile that is not empty; false at the end of the list.
fn next_tile(walk: ptr<function, Walk>) -> bool {
  while (next_block(walk)) {
    (*walk).first = (*walk).next;
    (*walk).kind = (*walk).kinds & 3u;
    (*walk).next += TILE;
    // Rotating leaves ALL_FULL as it is, however long the run.
    (*walk).kinds = ((*walk).kinds >> 2u) | ((*walk).kinds << 30u);
    if ((*walk).kind != EMPTY) { return true; }
  }
  return false;
}
