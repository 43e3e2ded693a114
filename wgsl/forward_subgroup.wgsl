// forward, with subgroup operations: out = softmax(score_mod(q k^T * scale)) v over the kept pairs,
// and its lse and max. No workgroup memory and no barriers.
//
// A workgroup computes TILE_Q query rows of one head. Eight neighbouring lanes of a subgroup, a
// cluster, compute ROWS of them: lane x holds the columns x + 8 j of S and the vec4 x + 8 c of q and of
// the output. What a lane needs of the others it gets by shuffle: q for S = q k^T, P for O = P v. k and
// v come straight from storage. Any subgroup size from 8 on will do, as long as lanes are numbered as
// invocations are within every eight.

//#include common.wgsl
//#include walk.wgsl
//#include mods.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 64u;
const ROWS: u32 = 4u;       // query rows of a cluster
const COLUMNS: u32 = 4u;    // columns of a lane: 2 or 4

const TILE_Q: u32 = THREADS / 8u * ROWS;
const TILE_KV: u32 = 8u * COLUMNS;
const HEAD_QUADS: u32 = (HEAD_DIM + 3u) / 4u;
const V_QUADS: u32 = (V_DIM + 3u) / 4u;
const IN: u32 = (HEAD_QUADS + 7u) / 8u;    // vec4 of a row of q in one lane
const OUT: u32 = (V_QUADS + 7u) / 8u;      // vec4 of an output row in one lane

@group(0) @binding(0) var<storage, read> q: array<Word>;              // [B, Hq, L, D]
@group(0) @binding(1) var<storage, read> k: array<Word>;              // [Bkv, Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<Word>;              // [Bkv, Hkv, S, Dv]
@group(0) @binding(3) var<storage, read_write> out: array<OutWord>;   // [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;     // lse [B, Hq, L] | max [B, Hq, L]
@group(0) @binding(7) var<storage, read> large: array<u32>;           // one large captured tensor, in place

//@slot load
//#include load_f32.wgsl
//@end

//#include cluster.wgsl

@compute @workgroup_size(THREADS)
fn forward_subgroup(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let tiles = (p.q_len + TILE_Q - 1u) / TILE_Q;
  let first_row = (id % tiles) * TILE_Q;
  let h = (id / tiles) % p.q_heads;
  let b = id / (tiles * p.q_heads);
  let x = lane % 8u;
  let cluster = lane - x;                           // its first lane
  let r0 = first_row + (local / 8u) * ROWS;         // its first row

  let kv_len = kv_len_of(b);
  let q_base = p.q.x + b * p.q.y + h * p.q.z;
  let k_base = p.k.x + b * p.k.y + (h / p.group) * p.k.z;
  let v_base = p.v.x + b * p.v.y + (h / p.group) * p.v.z;

  var q_pos = array<i32, ROWS>();
  var row = array<Row, ROWS>();
  var rows = array<array<vec4<f32>, IN>, ROWS>();   // of q; past q_len the last one again
  var m = array<f32, ROWS>();                       // row max so far, in base 2
  var l = array<f32, ROWS>();                       // row sum so far, of this lane's columns
  var o = array<array<vec4<f32>, OUT>, ROWS>();
  for (var i = 0u; i < ROWS; i += 1u) {
    let r = min(r0 + i, p.q_len - 1u);
    q_pos[i] = i32(r) + q_offset_of(b);
    row[i] = row_mod(i32(b), i32(h), q_pos[i]);
    m[i] = FLOOR;
    l[i] = 0.0;
    for (var c = 0u; c < IN; c += 1u) {
      let quad = x + 8u * c;
      rows[i][c] = vec4<f32>(0.0);
      if (quad < HEAD_QUADS) {
        rows[i][c] = widen(load_q(q_base + r * p.q.w + 4u * quad, HEAD_DIM - 4u * quad));
      }
    }
    for (var c = 0u; c < OUT; c += 1u) { o[i][c] = vec4<f32>(0.0); }
  }

  var walk = walk_rows(b, h, first_row, TILE_Q, kv_len);
  while (next_tile(&walk)) {
    for (var kv0 = walk.first; kv0 < min(walk.first + TILE, kv_len); kv0 += TILE_KV) {
      // S = q k^T
      var s = array<array<f32, COLUMNS>, ROWS>();
      var k_at = array<u32, COLUMNS>();
      for (var j = 0u; j < COLUMNS; j += 1u) {
        for (var i = 0u; i < ROWS; i += 1u) { s[i][j] = 0.0; }
        k_at[j] = k_base + min(kv0 + x + 8u * j, kv_len - 1u) * p.k.w;
      }
      for (var c = 0u; c < IN; c += 1u) {
        for (var d = 0u; d < min(8u, HEAD_QUADS - 8u * c) + p.zero; d += 1u) {
          var a = array<vec4<f32>, ROWS>();
          for (var i = 0u; i < ROWS; i += 1u) { a[i] = subgroupShuffle(rows[i][c], cluster + d); }
          let quad = 8u * c + d;
          for (var j = 0u; j < COLUMNS; j += 1u) {
            let value = widen(load_k(k_at[j] + 4u * quad, HEAD_DIM - 4u * quad));
            for (var i = 0u; i < ROWS; i += 1u) { s[i][j] += dot(a[i], value); }
          }
        }
      }

      // Mods. A masked pair is excluded whatever score_mod gave for it; a score of -inf is masked.
      var keep = array<array<bool, COLUMNS>, ROWS>();
      for (var i = 0u; i < ROWS; i += 1u) {
        for (var j = 0u; j < COLUMNS; j += 1u) {
          let kv = i32(kv0 + x + 8u * j);
          let score = score_mod(s[i][j] * p.scale, row[i], i32(b), i32(h), q_pos[i], kv);
          s[i][j] = score * LOG2E;
          keep[i][j] = !is_minus_infinity(score);
        }
      }
      if (walk.kind != FULL || kv0 + TILE_KV > kv_len) {
        for (var i = 0u; i < ROWS; i += 1u) {
          for (var j = 0u; j < COLUMNS; j += 1u) {
            let kv = kv0 + x + 8u * j;
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
        var m_lane = m[i];
        for (var j = 0u; j < COLUMNS; j += 1u) {
          // Not max(): a NaN that is kept has to stay.
          s[i][j] = select(s[i][j], FLOOR, s[i][j] < FLOOR || !keep[i][j]);
          m_lane = max(m_lane, s[i][j]);
        }
        let m_new = cluster_max(m_lane);
        let shrink = exp2(m[i] - m_new);
        m[i] = m_new;
        l[i] *= shrink;
        for (var j = 0u; j < COLUMNS; j += 1u) {
          s[i][j] = select(0.0, exp2(s[i][j] - m_new), keep[i][j]);
          l[i] += s[i][j];
        }
        for (var c = 0u; c < OUT; c += 1u) { o[i][c] *= shrink; }
      }

      // O += P v. Rows past kv_len have P = 0; the last one stands for them, as they may be NaN.
      for (var y = 0u; y < 8u + p.zero; y += 1u) {
        for (var j = 0u; j < COLUMNS; j += 1u) {
          let v_at = v_base + min(kv0 + y + 8u * j, kv_len - 1u) * p.v.w;
          var weight = array<f32, ROWS>();
          for (var i = 0u; i < ROWS; i += 1u) { weight[i] = subgroupShuffle(s[i][j], cluster + y); }
          for (var c = 0u; c < OUT; c += 1u) {
            let quad = min(x + 8u * c, V_QUADS - 1u);
            let value = widen(load_v(v_at + 4u * quad, V_DIM - 4u * quad));
            for (var i = 0u; i < ROWS; i += 1u) { o[i][c] += weight[i] * value; }
          }
        }
      }
    }
  }

  // out = O / l
  for (var i = 0u; i < ROWS; i += 1u) {
    let sum = cluster_sum(l[i]);
    let r = r0 + i;
    if (r < p.q_len) {
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
        let quad = x + 8u * c;
        if (quad < V_QUADS) {
          let at = p.out.x + b * p.out.y + h * p.out.z + r * p.out.w + 4u * quad;
          store_out(at, V_DIM - 4u * quad, select(o[i][c] * factor, vec4<f32>(0.0), empty));
        }
      }
      if (x == 0u) {
        let at = (b * p.q_heads + h) * p.q_len + r;
        if (p.lse_at != NONE) { stats[p.lse_at + at] = lse; }
        if (p.max_at != NONE) { stats[p.max_at + at] = row_max; }
      }
    }
  }
}
