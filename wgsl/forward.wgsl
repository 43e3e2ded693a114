// forward: out = softmax(score_mod(q k^T * scale)) v over the kept pairs, and its lse and max.
//
// A workgroup computes TILE_Q query rows of one head. It walks the tiles of their block list: for
// each it stages k, computes S = q k^T, applies the mods, updates the online softmax (row max m, row
// sum l), stages v in place of k, and adds P v to the output, which stays in registers.
// The invocations form a grid of 8 x Y (tx, ty). Invocation (tx, ty) has the rows ty + Y i, the columns
// tx + 8 j of S and the vec4 tx + 8 c of the output's rows: neighbours read neighbouring banks.

//#include common.wgsl
//#include walk.wgsl
//#include mods.wgsl

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
//#include load_f32.wgsl
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
