// decode: attention of few queries over many keys, in two passes: entry `split`, then `combine`.
//
// The query rows of all heads that share a kv head are packed, TILE_Q to a workgroup. k and v are read once
// for each TILE_Q of them: once per kv head where group * q_len is at most TILE_Q. `split` cuts the keys into p.splits parts of p.split_len; a workgroup attends
// to one part and leaves O, m and l of each row, in f32. `combine` weighs the parts, a workgroup for
// each row. The order of the parts is fixed, so the result is the same every time.
// 64 invocations form an 8 x 8 grid (tx, ty), as in forward.wgsl: packed rows ty + 8 i, columns
// tx + 8 j of S, vec4 tx + 8 c of the output's rows.

//#include common.wgsl
//#include lookup.wgsl
//#include mods.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const ROWS: u32 = 2u;       // packed query rows of an invocation
const CHUNK: u32 = 8u;      // vec4 of the rows of q and k that are staged at once
const V_ROWS: u32 = 16u;    // rows of v that are staged at once, a multiple of 4

const COLUMNS: u32 = 4u;
const TILE_Q: u32 = 8u * ROWS;
const TILE_KV: u32 = 8u * COLUMNS;
const HEAD_QUADS: u32 = (HEAD_DIM + 3u) / 4u;
const V_QUADS: u32 = (V_DIM + 3u) / 4u;
const OUT: u32 = (V_QUADS + 7u) / 8u;      // vec4 of an output row in one invocation
const V_STRIDE: u32 = 8u * OUT;
const STRIDE: u32 = CHUNK | 1u;            // odd, so that rows start in different banks
const P_STRIDE: u32 = 9u;

@group(0) @binding(0) var<storage, read> q: array<Word>;                 // [B, Hq, L, D], L at most 32
@group(0) @binding(1) var<storage, read> k: array<Word>;                 // [Bkv, Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<Word>;                 // [Bkv, Hkv, S, Dv]
@group(0) @binding(3) var<storage, read_write> partials: array<f32>;     // of split: O [B, Hq, L, splits, Dv], then (m, l) [B, Hq, L, splits, 2]
@group(0) @binding(0) var<storage, read> parts: array<f32>;              // of combine: the same
@group(0) @binding(3) var<storage, read_write> out: array<OutWord>;      // of combine: [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;        // of combine: lse [B, Hq, L] | max [B, Hq, L]
@group(0) @binding(7) var<storage, read> large: array<u32>;              // one large captured tensor, in place

//@slot load
//#include load_f32.wgsl
//@end

var<workgroup> q_tile: array<Quad, TILE_Q * STRIDE>;       // a chunk of the packed rows of q
var<workgroup> kv_tile: array<Quad, max(TILE_KV * STRIDE, V_ROWS * V_STRIDE)>;  // of k, then rows of v
var<workgroup> p_tile: array<vec4<f32>, TILE_Q * P_STRIDE>;  // P; columns tx + 8 j are the vec4 tx
var<workgroup> reduced: array<f32, TILE_Q * 8u>;           // one value per row and tx

fn partial_of(row: u32, part: u32) -> u32 { return row * p.splits + part; }
fn partial_stats() -> u32 { return p.batch * p.q_heads * p.q_len * p.splits * V_DIM; }

// The kind of the tile of 32 keys from `kv` on.
fn kind_of(b: u32, h: u32, kv: u32) -> u32 {
  return (kinds_of(b, h, kv / BLOCK) >> (2u * (kv % BLOCK / TILE_KV))) & 3u;
}

// Stages chunk `chunk` of the packed rows from `row`: row n is row n % q_len of head n / q_len.
fn stage_q(base: u32, row: u32, rows: u32, chunk: u32, local: u32) {
  for (var i = local; i < TILE_Q * CHUNK + p.zero; i += 64u) {
    let quad = chunk * CHUNK + i % CHUNK;
    if (quad < HEAD_QUADS) {
      let n = min(row + i / CHUNK, rows - 1u);
      let at = base + (n / p.q_len) * p.q.z + (n % p.q_len) * p.q.w + 4u * quad;
      q_tile[(i / CHUNK) * STRIDE + i % CHUNK] = load_q(at, HEAD_DIM - 4u * quad);
    }
  }
}

// The same of k; rows past kv_len repeat the last one, and their scores are dropped.
fn stage_k(base: u32, kv: u32, kv_len: u32, chunk: u32, local: u32) {
  for (var i = local; i < TILE_KV * CHUNK + p.zero; i += 64u) {
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
  for (var i = local; i < V_ROWS * V_STRIDE + p.zero; i += 64u) {
    let n = first + i / V_STRIDE;
    let row = kv + n / 4u + 8u * (n % 4u);
    let quad = i % V_STRIDE;
    var value = Quad();
    if (row < kv_len && quad < V_QUADS) { value = load_v(base + row * p.v.w + 4u * quad, V_DIM - 4u * quad); }
    kv_tile[i] = value;
  }
}

@compute @workgroup_size(64)
fn split(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let rows = p.group * p.q_len;
  let tiles = (rows + TILE_Q - 1u) / TILE_Q;
  let part = id % p.splits;
  let first_row = (id / p.splits) % tiles * TILE_Q;
  let kv_head = id / (p.splits * tiles) % p.kv_heads;
  let b = id / (p.splits * tiles * p.kv_heads);
  let tx = local % 8u;
  let ty = local / 8u;

  let kv_len = kv_len_of(b);
  let q_base = p.q.x + b * p.q.y + kv_head * p.group * p.q.z;
  let k_base = p.k.x + b * p.k.y + kv_head * p.k.z;
  let v_base = p.v.x + b * p.v.y + kv_head * p.v.z;

  var q_head = array<u32, ROWS>();
  var q_pos = array<i32, ROWS>();
  var row = array<Row, ROWS>();
  var m = array<f32, ROWS>();                       // row max so far, in base 2
  var l = array<f32, ROWS>();                       // row sum so far, of this invocation's columns
  var o = array<array<vec4<f32>, OUT>, ROWS>();
  for (var i = 0u; i < ROWS; i += 1u) {
    let n = min(first_row + ty + 8u * i, rows - 1u);
    q_head[i] = kv_head * p.group + n / p.q_len;
    q_pos[i] = i32(n % p.q_len) + q_offset_of(b);
    row[i] = row_mod(i32(b), i32(q_head[i]), q_pos[i]);
    m[i] = FLOOR;
    l[i] = 0.0;
    for (var c = 0u; c < OUT; c += 1u) { o[i][c] = vec4<f32>(0.0); }
  }
  if (HEAD_QUADS <= CHUNK) { stage_q(q_base, first_row, rows, 0u, local); }

  let end = min((part + 1u) * p.split_len, kv_len);
  for (var kv0 = part * p.split_len; kv0 < end; kv0 += TILE_KV) {
    // Heads may have lists of their own: a tile is left out when it is empty for all of the group.
    var any = EMPTY;
    for (var h = 0u; h < min(p.group, p.mask_heads); h += 1u) { any |= kind_of(b, kv_head * p.group + h, kv0); }
    if (any == EMPTY) { continue; }

    // S = q k^T
    var s = array<vec4<f32>, ROWS>();
    for (var i = 0u; i < ROWS; i += 1u) { s[i] = vec4<f32>(0.0); }
    for (var quad0 = 0u; quad0 < HEAD_QUADS; quad0 += CHUNK) {
      workgroupBarrier();
      if (HEAD_QUADS > CHUNK) { stage_q(q_base, first_row, rows, quad0 / CHUNK, local); }
      stage_k(k_base, kv0, kv_len, quad0 / CHUNK, local);
      workgroupBarrier();
      for (var d = 0u; d < min(CHUNK, HEAD_QUADS - quad0) + p.zero; d += 1u) {
        let k0 = widen(kv_tile[tx * STRIDE + d]);
        let k1 = widen(kv_tile[(tx + 8u) * STRIDE + d]);
        let k2 = widen(kv_tile[(tx + 16u) * STRIDE + d]);
        let k3 = widen(kv_tile[(tx + 24u) * STRIDE + d]);
        for (var i = 0u; i < ROWS; i += 1u) {
          let a = widen(q_tile[(ty + 8u * i) * STRIDE + d]);
          s[i] += vec4<f32>(dot(a, k0), dot(a, k1), dot(a, k2), dot(a, k3));
        }
      }
    }

    // Mods. A masked pair is excluded whatever score_mod gave for it; a score of -inf is masked.
    var keep = array<vec4<bool>, ROWS>();
    for (var i = 0u; i < ROWS; i += 1u) {
      var kind = any;
      if (p.mask_heads > 1u) { kind = kind_of(b, q_head[i], kv0); }
      for (var j = 0u; j < COLUMNS; j += 1u) {
        let kv = kv0 + tx + 8u * j;
        let score = score_mod(s[i][j] * p.scale, row[i], i32(b), i32(q_head[i]), q_pos[i], i32(kv));
        s[i][j] = score * LOG2E;
        keep[i][j] = !is_minus_infinity(score) && kv < kv_len && kind != EMPTY;
        if (keep[i][j] && kind == PARTIAL) {
          keep[i][j] = mask_mod(row[i], i32(b), i32(q_head[i]), q_pos[i], i32(kv));
        }
      }
    }

    // Online softmax: the new row max, P = exp2(S - m), and the old sums and output scaled to it.
    for (var i = 0u; i < ROWS; i += 1u) {
      // Not max(): a NaN that is kept has to stay.
      s[i] = select(s[i], vec4<f32>(FLOOR), (s[i] < vec4<f32>(FLOOR)) | !keep[i]);
      reduced[(ty + 8u * i) * 8u + tx] = max(max(s[i].x, s[i].y), max(s[i].z, s[i].w));
    }
    workgroupBarrier();
    for (var i = 0u; i < ROWS; i += 1u) {
      var m_new = m[i];
      for (var x = 0u; x < 8u; x += 1u) { m_new = max(m_new, reduced[(ty + 8u * i) * 8u + x]); }
      let shrink = exp2(m[i] - m_new);
      let weights = select(vec4<f32>(0.0), exp2(s[i] - m_new), keep[i]);
      m[i] = m_new;
      l[i] = l[i] * shrink + dot(weights, vec4<f32>(1.0));
      for (var c = 0u; c < OUT; c += 1u) { o[i][c] *= shrink; }
      p_tile[(ty + 8u * i) * P_STRIDE + tx] = weights;
    }

    // O += P v
    for (var first = 0u; first < TILE_KV; first += V_ROWS) {
      if (first > 0u) { workgroupBarrier(); }
      stage_v(v_base, kv0, kv_len, first, local);
      workgroupBarrier();
      for (var x = 0u; x < V_ROWS / 4u + p.zero; x += 1u) {
        for (var j = 0u; j < COLUMNS; j += 1u) {
          for (var c = 0u; c < OUT; c += 1u) {
            let value = widen(kv_tile[(4u * x + j) * V_STRIDE + tx + 8u * c]);
            for (var i = 0u; i < ROWS; i += 1u) {
              o[i][c] += p_tile[(ty + 8u * i) * P_STRIDE + first / 4u + x][j] * value;
            }
          }
        }
      }
    }
  }

  workgroupBarrier();
  for (var i = 0u; i < ROWS; i += 1u) { reduced[(ty + 8u * i) * 8u + tx] = l[i]; }
  workgroupBarrier();
  for (var i = 0u; i < ROWS; i += 1u) {
    let n = first_row + ty + 8u * i;
    if (n < rows) {
      let partial = partial_of((b * p.q_heads + q_head[i]) * p.q_len + n % p.q_len, part);
      for (var c = 0u; c < OUT; c += 1u) {
        for (var e = 0u; e < 4u; e += 1u) {
          let column = 4u * (tx + 8u * c) + e;
          if (column < V_DIM) { partials[partial * V_DIM + column] = o[i][c][e]; }
        }
      }
      if (tx == 0u) {
        var sum = 0.0;
        for (var x = 0u; x < 8u; x += 1u) { sum += reduced[(ty + 8u * i) * 8u + x]; }
        partials[partial_stats() + 2u * partial] = m[i];
        partials[partial_stats() + 2u * partial + 1u] = sum;
      }
    }
  }
}

@compute @workgroup_size(64)
fn combine(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let row = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (row >= p.groups) { return; }
  let h = row / p.q_len % p.q_heads;
  let b = row / (p.q_len * p.q_heads);
  let first = partial_stats() + 2u * partial_of(row, 0u);

  var m = FLOOR;
  for (var part = 0u; part < p.splits; part += 1u) { m = max(m, parts[first + 2u * part]); }
  var sum = 0.0;
  for (var part = 0u; part < p.splits; part += 1u) {
    sum += parts[first + 2u * part + 1u] * exp2(parts[first + 2u * part] - m);
  }
  // A row with nothing kept: out 0, lse and max -inf.
  let empty = sum == 0.0;
  let row_max = select(m * LN2, minus_infinity(), empty);
  let lse = select(m * LN2 + log(sum), minus_infinity(), empty);
  var factor = select(1.0 / sum, 0.0, empty);
  if (p.sinks_at != NONE) {
    let sink = bitcast<f32>(tables[p.sinks_at + h]);
    factor *= select(1.0 / (1.0 + exp(sink - lse)), 0.0, empty);
  }
  for (var quad = local; quad < V_QUADS; quad += 64u) {
    var value = vec4<f32>(0.0);
    for (var part = 0u; part < p.splits; part += 1u) {
      let weight = exp2(parts[first + 2u * part] - m);
      let place = partial_of(row, part) * V_DIM + 4u * quad;
      for (var e = 0u; e < 4u; e += 1u) {
        if (4u * quad + e < V_DIM) { value[e] += weight * parts[place + e]; }
      }
    }
    let at = p.out.x + b * p.out.y + h * p.out.z + (row % p.q_len) * p.out.w + 4u * quad;
    store_out(at, V_DIM - 4u * quad, select(value * factor, vec4<f32>(0.0), empty));
  }
  if (local == 0u) {
    if (p.lse_at != NONE) { stats[p.lse_at + row] = lse; }
    if (p.max_at != NONE) { stats[p.max_at + row] = row_max; }
  }
}
