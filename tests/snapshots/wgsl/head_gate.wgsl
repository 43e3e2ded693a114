// forward: out = softmax(score_mod(q k^T * scale)) v over the kept pairs, and its lse and max.
//
// A workgroup computes TILE_Q query rows of one head. It walks the tiles of their block list: for
// each it stages k, computes S = q k^T, applies the mods, updates the online softmax (row max m, row
// sum l), stages v in place of k, and adds P v to the output, which stays in registers.
// The invocations form a grid of 8 x Y (tx, ty). Invocation (tx, ty) has the rows ty + Y i, the columns
// tx + 8 j of S and the vec4 tx + 8 c of the output's rows: neighbours read neighbouring banks.

// Parameters, tables and captured tensors, as every kernel binds them; and the attention mods.

const INFO: u32 = 2u;          // vec4 of `info`: two per captured tensor, one per four scalars
const NONE: u32 = 0xffffffffu;

struct Params {
  batch: u32,         // entries of q and out
  q_heads: u32,       // heads of q and out
  kv_heads: u32,      // heads of k and v
  group: u32,         // query heads that share a kv head: q_heads / kv_heads
  q_len: u32,         // rows of q
  kv_len: u32,        // rows of k and v in memory; how many count is per batch entry, at kv_len_at
  q_blocks: u32,      // blocks of 128 rows in q_len
  kv_blocks: u32,     // blocks of 128 columns in kv_len
  mask_batch: u32,    // batch entries of the block mask: batch, or 1 if all share one
  mask_heads: u32,    // heads of the block mask: q_heads, or 1
  lists: u32,         // in tables: headers of the lists of each query row block
  lists_t: u32,       // in tables: headers of the transposed lists, of each kv block
  q_offset_at: u32,   // in tables: the position of query row 0, an i32 per batch entry
  kv_len_at: u32,     // in tables: how many rows of k and v count, per batch entry
  sinks_at: u32,      // in tables: an f32 attention sink per query head, or none
  splits: u32,        // decode: parts that kv_len is cut into
  lse_at: u32,        // in stats: lse, or none
  max_at: u32,        // in stats: max, or none
  delta_at: u32,      // in stats: delta = rowsum(out * dout)
  dlse_at: u32,       // in stats: the gradient of lse, or none
  scale: f32,         // factor of dot(q, k)
  first_group: u32,   // number of the first workgroup of this dispatch
  groups: u32,        // end of the workgroups that have work
  fold: u32,          // workgroups in x per step of y
  split_len: u32,     // decode: columns in a part, a multiple of 32
  accumulate: u32,    // gradients: 1 where a launch adds to what is there, 0 where it replaces it
  capture_at: u32,    // captured gradients: where this pass writes, in elements
  zero: u32,          // always 0, which a compiler cannot know: keeps long loops rolled
  q: vec4<u32>,       // view of q
  k: vec4<u32>,       // view of k
  v: vec4<u32>,       // view of v
  out: vec4<u32>,     // view of out
  dout: vec4<u32>,    // view of dout
  dq: vec4<u32>,      // view of dq
  dk: vec4<u32>,      // view of dk
  dv: vec4<u32>,      // view of dv
  info: array<vec4<u32>, INFO>, // captures: dims, then offsets; then scalars
}

@group(0) @binding(5) var<storage, read> tables: array<u32>;    // block lists, q_offset, kv_len, sinks
@group(0) @binding(6) var<storage, read> captures: array<u32>;  // captured tensors, one after the other
@group(0) @binding(8) var<uniform> p: Params;

// The position of query row 0, which mods see as q.
fn q_offset_of(b: u32) -> i32 { return bitcast<i32>(tables[p.q_offset_at + b]); }
// How many rows of k and v count.
fn kv_len_of(b: u32) -> u32 { return tables[p.kv_len_at + b]; }

// Scores are exponentiated base 2 inside the kernels; score_mod, lse and max are in natural units.
const LOG2E: f32 = 1.4426950408889634;
const LN2: f32 = 0.6931471805599453;
// Below every score that can be told apart; finite, so that differences are.
const FLOOR: f32 = -1e38;

// WGSL has no infinite constants, and a constant bitcast to one is refused.
fn minus_infinity() -> f32 { return bitcast<f32>(0xff800000u + p.zero); }
fn is_minus_infinity(x: f32) -> bool { return bitcast<u32>(x) == 0xff800000u; }
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
// The attention mods: identity score_mod, all-true mask_mod. Positions are global: q is a row plus
// the batch entry's q_offset, h a query head, score = dot(q, k) * scale in natural units.

//@slot captures
fn position_gate(i0: i32) -> u32 { return u32(clamp(i0, 0, i32(p.info[0].x) - 1)); }
fn captured_gate(i0: i32) -> f32 {
  let at = p.info[1].y + position_gate(i0);
  return bitcast<f32>(captures[p.info[1].x + at]);
}
//@end

//@slot row
struct Row { r0: f32 }
fn row_mod(b: i32, h: i32, q: i32) -> Row {
  return Row(1.0 / (1.0 + exp(-captured_gate(h))));
}
//@end

//@slot score_mod
fn score_mod(score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 {
  return score * row.r0;
}
//@end

//@slot mask_mod
fn mask_mod(row: Row, b: i32, h: i32, q: i32, kv: i32) -> bool { return true; }
//@end

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 64u;
const ROWS: u32 = 4u;       // query rows of an invocation
const CHUNK: u32 = 8u;      // vec4 of the rows of q and k that are staged at once
const V_ROWS: u32 = 16u;    // rows of v that are staged at once, a multiple of 4

const COLUMNS: u32 = 4u;
const Y: u32 = THREADS / 8u;               // invocations in a column of the grid
const TILE_Q: u32 = Y * ROWS;
const TILE_KV: u32 = 8u * COLUMNS;
const HEAD_QUADS: u32 = (HEAD_DIM + 3u) / 4u;
const V_QUADS: u32 = (V_DIM + 3u) / 4u;
const OUT: u32 = (V_QUADS + 7u) / 8u;      // vec4 of an output row in one invocation
const V_STRIDE: u32 = 8u * OUT;
const STRIDE: u32 = CHUNK | 1u;            // odd, so that rows start in different banks
const P_STRIDE: u32 = 9u;

@group(0) @binding(0) var<storage, read> q: array<Word>;              // [B, Hq, L, D]
@group(0) @binding(1) var<storage, read> k: array<Word>;              // [Bkv, Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<Word>;              // [Bkv, Hkv, S, Dv]
@group(0) @binding(3) var<storage, read_write> out: array<OutWord>;   // [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;     // lse [B, Hq, L] | max [B, Hq, L]
@group(0) @binding(7) var<storage, read> large: array<u32>;           // one large captured tensor, in place

//@slot load
// Elements of q, k, v and out: f32, every offset and stride a multiple of four elements.

alias Word = vec4<f32>;     // an element of the bindings
alias OutWord = vec4<f32>;
alias Quad = vec4<f32>;     // four elements as workgroup memory holds them

fn widen(quad: Quad) -> vec4<f32> { return quad; }

// Four elements from element offset `at`, of a row in which `left` elements remain.
fn load_q(at: u32, left: u32) -> Quad { return q[at / 4u]; }
fn load_k(at: u32, left: u32) -> Quad { return k[at / 4u]; }
fn load_v(at: u32, left: u32) -> Quad { return v[at / 4u]; }

fn store_out(at: u32, left: u32, value: vec4<f32>) { out[at / 4u] = value; }
//@end

var<workgroup> q_tile: array<Quad, TILE_Q * STRIDE>;       // a chunk of TILE_Q rows of q
var<workgroup> kv_tile: array<Quad, max(TILE_KV * STRIDE, V_ROWS * V_STRIDE)>;  // of k, then rows of v
var<workgroup> p_tile: array<vec4<f32>, TILE_Q * P_STRIDE>;  // P; columns tx + 8 j are the vec4 tx
var<workgroup> reduced: array<f32, TILE_Q * 8u>;           // one value per row and tx

// Stages chunk `chunk` of TILE_Q rows from `row`; rows past q_len repeat the last one.
fn stage_q(base: u32, row: u32, chunk: u32, local: u32) {
  for (var i = local; i < TILE_Q * CHUNK + p.zero; i += THREADS) {
    let quad = chunk * CHUNK + i % CHUNK;
    if (quad < HEAD_QUADS) {
      let at = base + min(row + i / CHUNK, p.q_len - 1u) * p.q.w + 4u * quad;
      q_tile[(i / CHUNK) * STRIDE + i % CHUNK] = load_q(at, HEAD_DIM - 4u * quad);
    }
  }
}

// The same of k; rows past kv_len repeat the last one, and their scores are dropped.
fn stage_k(base: u32, kv: u32, kv_len: u32, chunk: u32, local: u32) {
  for (var i = local; i < TILE_KV * CHUNK + p.zero; i += THREADS) {
    let quad = chunk * CHUNK + i % CHUNK;
    if (quad < HEAD_QUADS) {
      let at = base + min(kv + i / CHUNK, kv_len - 1u) * p.k.w + 4u * quad;
      kv_tile[(i / CHUNK) * STRIDE + i % CHUNK] = load_k(at, HEAD_DIM - 4u * quad);
    }
  }
}

// Stages V_ROWS rows of v in the order of P's columns: row n is kv + n / 4 + 8 (n % 4). Rows past
// kv_len are zero, since what lies there may be NaN, and 0 * NaN is too; so are columns past V_DIM.
fn stage_v(base: u32, kv: u32, kv_len: u32, first: u32, local: u32) {
  for (var i = local; i < V_ROWS * V_STRIDE + p.zero; i += THREADS) {
    let n = first + i / V_STRIDE;
    let row = kv + n / 4u + 8u * (n % 4u);
    let quad = i % V_STRIDE;
    var value = Quad();
    if (row < kv_len && quad < V_QUADS) { value = load_v(base + row * p.v.w + 4u * quad, V_DIM - 4u * quad); }
    kv_tile[i] = value;
  }
}

@compute @workgroup_size(THREADS)
fn forward(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let tiles = (p.q_len + TILE_Q - 1u) / TILE_Q;
  let id = tile_of(workgroup, tiles);
  if (id >= p.groups) { return; }
  let first_row = (id % tiles) * TILE_Q;
  let h = (id / tiles) % p.q_heads;
  let b = id / (tiles * p.q_heads);
  let tx = local % 8u;
  let ty = local / 8u;

  let kv_len = kv_len_of(b);
  let q_base = p.q.x + b * p.q.y + h * p.q.z;
  let k_base = p.k.x + b * p.k.y + (h / p.group) * p.k.z;
  let v_base = p.v.x + b * p.v.y + (h / p.group) * p.v.z;

  var q_pos = array<i32, ROWS>();
  var row = array<Row, ROWS>();
  var m = array<f32, ROWS>();                       // row max so far, in base 2
  var l = array<f32, ROWS>();                       // row sum so far, of this invocation's columns
  var o = array<array<vec4<f32>, OUT>, ROWS>();
  for (var i = 0u; i < ROWS; i += 1u) {
    q_pos[i] = i32(min(first_row + ty + Y * i, p.q_len - 1u)) + q_offset_of(b);
    row[i] = row_mod(i32(b), i32(h), q_pos[i]);
    m[i] = FLOOR;
    l[i] = 0.0;
    for (var c = 0u; c < OUT; c += 1u) { o[i][c] = vec4<f32>(0.0); }
  }
  if (HEAD_QUADS <= CHUNK) { stage_q(q_base, first_row, 0u, local); }

  var walk = walk_rows(b, h, first_row, TILE_Q, kv_len);
  while (next_tile(&walk)) {
    // S = q k^T
    var s = array<vec4<f32>, ROWS>();
    for (var i = 0u; i < ROWS; i += 1u) { s[i] = vec4<f32>(0.0); }
    for (var quad0 = 0u; quad0 < HEAD_QUADS; quad0 += CHUNK) {
      workgroupBarrier();
      if (HEAD_QUADS > CHUNK) { stage_q(q_base, first_row, quad0 / CHUNK, local); }
      stage_k(k_base, walk.first, kv_len, quad0 / CHUNK, local);
      workgroupBarrier();
      for (var d = 0u; d < min(CHUNK, HEAD_QUADS - quad0) + p.zero; d += 1u) {
        let k0 = widen(kv_tile[tx * STRIDE + d]);
        let k1 = widen(kv_tile[(tx + 8u) * STRIDE + d]);
        let k2 = widen(kv_tile[(tx + 16u) * STRIDE + d]);
        let k3 = widen(kv_tile[(tx + 24u) * STRIDE + d]);
        for (var i = 0u; i < ROWS; i += 1u) {
          let a = widen(q_tile[(ty + Y * i) * STRIDE + d]);
          s[i] += vec4<f32>(dot(a, k0), dot(a, k1), dot(a, k2), dot(a, k3));
        }
      }
    }

    // Mods. A masked pair is excluded whatever score_mod gave for it; a score of -inf is masked.
    var keep = array<vec4<bool>, ROWS>();
    for (var i = 0u; i < ROWS; i += 1u) {
      for (var j = 0u; j < COLUMNS; j += 1u) {
        let kv = walk.first + tx + 8u * j;
        let score = score_mod(s[i][j] * p.scale, row[i], i32(b), i32(h), q_pos[i], i32(kv));
        s[i][j] = score * LOG2E;
        keep[i][j] = !is_minus_infinity(score);
      }
    }
    if (walk.kind != FULL || walk.first + TILE_KV > kv_len) {
      for (var i = 0u; i < ROWS; i += 1u) {
        for (var j = 0u; j < COLUMNS; j += 1u) {
          let kv = walk.first + tx + 8u * j;
          if (kv >= kv_len) {
            keep[i][j] = false;
          } else if (walk.kind != FULL) {
            keep[i][j] = keep[i][j] && mask_mod(row[i], i32(b), i32(h), q_pos[i], i32(kv));
          }
        }
      }
    }

    // Online softmax: the new row max, P = exp2(S - m), and the old sums and output scaled to it.
    for (var i = 0u; i < ROWS; i += 1u) {
      // Not max(): a NaN that is kept has to stay.
      s[i] = select(s[i], vec4<f32>(FLOOR), (s[i] < vec4<f32>(FLOOR)) | !keep[i]);
      reduced[(ty + Y * i) * 8u + tx] = max(max(s[i].x, s[i].y), max(s[i].z, s[i].w));
    }
    workgroupBarrier();
    for (var i = 0u; i < ROWS; i += 1u) {
      var m_new = m[i];
      for (var x = 0u; x < 8u; x += 1u) { m_new = max(m_new, reduced[(ty + Y * i) * 8u + x]); }
      let shrink = exp2(m[i] - m_new);
      let weights = select(vec4<f32>(0.0), exp2(s[i] - m_new), keep[i]);
      m[i] = m_new;
      l[i] = l[i] * shrink + dot(weights, vec4<f32>(1.0));
      for (var c = 0u; c < OUT; c += 1u) { o[i][c] *= shrink; }
      p_tile[(ty + Y * i) * P_STRIDE + tx] = weights;
    }

    // O += P v
    for (var first = 0u; first < TILE_KV; first += V_ROWS) {
      if (first > 0u) { workgroupBarrier(); }
      stage_v(v_base, walk.first, kv_len, first, local);
      workgroupBarrier();
      for (var x = 0u; x < V_ROWS / 4u + p.zero; x += 1u) {
        var weights = array<vec4<f32>, ROWS>();
        for (var i = 0u; i < ROWS; i += 1u) {
          weights[i] = p_tile[(ty + Y * i) * P_STRIDE + first / 4u + x];
        }
        for (var j = 0u; j < COLUMNS; j += 1u) {
          for (var c = 0u; c < OUT; c += 1u) {
            let value = widen(kv_tile[(4u * x + j) * V_STRIDE + tx + 8u * c]);
            for (var i = 0u; i < ROWS; i += 1u) { o[i][c] += weights[i][j] * value; }
          }
        }
      }
    }
  }

  // The row sums of the 8 invocations, then out = O / l.
  workgroupBarrier();
  for (var i = 0u; i < ROWS; i += 1u) { reduced[(ty + Y * i) * 8u + tx] = l[i]; }
  workgroupBarrier();
  for (var i = 0u; i < ROWS; i += 1u) {
    let r = first_row + ty + Y * i;
    if (r < p.q_len) {
      var sum = 0.0;
      for (var x = 0u; x < 8u; x += 1u) { sum += reduced[(ty + Y * i) * 8u + x]; }
      // A row with nothing kept: out 0, lse and max -inf.
      let empty = sum == 0.0;
      let row_max = select(m[i] * LN2, minus_infinity(), empty);
      let lse = select(m[i] * LN2 + log(sum), minus_infinity(), empty);
      var factor = select(1.0 / sum, 0.0, empty);
      if (p.sinks_at != NONE) {
        let sink = bitcast<f32>(tables[p.sinks_at + h]);
        factor *= select(1.0 / (1.0 + exp(sink - lse)), 0.0, empty);
      }
      for (var c = 0u; c < OUT; c += 1u) {
        let quad = tx + 8u * c;
        if (quad < V_QUADS) {
          let at = p.out.x + b * p.out.y + h * p.out.z + r * p.out.w + 4u * quad;
          store_out(at, V_DIM - 4u * quad, select(o[i][c] * factor, vec4<f32>(0.0), empty));
        }
      }
      if (tx == 0u) {
        let at = (b * p.q_heads + h) * p.q_len + r;
        if (p.lse_at != NONE) { stats[p.lse_at + at] = lse; }
        if (p.max_at != NONE) { stats[p.max_at + at] = row_max; }
      }
    }
  }
}
