// forward, with subgroup operations: out = softmax(score_mod(q k^T * scale)) v over the kept pairs,
// and its lse and max. No workgroup memory and no barriers.
//
// A workgroup computes TILE_Q query rows of one head. Eight neighbouring lanes of a subgroup, a cluster,
// compute ROWS of them, TILE_KV columns at a time. k and v come straight from storage, a row of them over
// the lanes of a cluster. Any subgroup size from 8 on will do, as long as lanes are numbered as
// invocations are within every eight.

//#include common.wgsl
//#include walk.wgsl
//#include mods.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 64u;
const ROWS: u32 = 4u;       // query rows of a cluster
const COLUMNS: u32 = 2u;    // columns of a lane: 1 or 2

const TILE_Q: u32 = THREADS / 8u * ROWS;

@group(0) @binding(0) var<storage, read> q: array<Word>;              // [B, Hq, L, D]
@group(0) @binding(1) var<storage, read> k: array<Word>;              // [Bkv, Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<Word>;              // [Bkv, Hkv, S, Dv]
@group(0) @binding(3) var<storage, read_write> out: array<OutWord>;   // [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;     // lse [B, Hq, L] | max [B, Hq, L]
@group(0) @binding(7) var<storage, read> large: array<u32>;           // one large captured tensor, in place

//@slot load
//#include load_f32.wgsl
//@end

//#include online_softmax.wgsl

@compute @workgroup_size(THREADS)
fn forward_subgroup(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let tiles = (p.q_len + TILE_Q - 1u) / TILE_Q;
  let id = tile_of(workgroup, tiles);
  if (id >= p.groups) { return; }
  let first_row = (id % tiles) * TILE_Q;
  let h = (id / tiles) % p.q_heads;
  let b = id / (tiles * p.q_heads);
  let x = lane % 8u;
  let cluster = lane - x;                           // its first lane
  let r0 = first_row + (local / 8u) * ROWS;         // its first row

  let kv_len = kv_len_of(b);
  let k_place = Place(K, p.k.x + b * p.k.y + (h / p.group) * p.k.z, p.k.w, kv_len - 1u);
  let v_place = Place(V, p.v.x + b * p.v.y + (h / p.group) * p.v.z, p.v.w, kv_len - 1u);
  // Past q_len the last row again.
  var q_rows = rows_of(Place(Q, p.q.x + b * p.q.y + h * p.q.z, p.q.w, p.q_len - 1u), r0, x);
  var q_pos = array<i32, ROWS>();
  var row = array<Row, ROWS>();
  var m = Scores();                                 // row max so far, in base 2
  var l = Scores();                                 // row sum so far, of this lane's columns
  var o = Rows();                                   // output so far, times the row sum
  for (var i = 0u; i < ROWS; i += 1u) {
    q_pos[i] = i32(min(r0 + i, p.q_len - 1u)) + q_offset_of(b);
    m[i] = FLOOR;
    row[i] = row_mod(i32(b), i32(h), q_pos[i]);
  }

  var walk = walk_rows(b, h, first_row, TILE_Q, kv_len);
  while (next_tile(&walk)) {
    for (var kv0 = walk.first; kv0 < min(walk.first + TILE, kv_len); kv0 += TILE_KV) {
      var s = scores(&q_rows, k_place, kv0, x);

      // Mods. A masked pair is excluded whatever score_mod gave for it; a score of -inf is masked.
      var keep = Kept();
      for (var i = 0u; i < ROWS; i += 1u) {
        for (var j = 0u; j < COLUMNS; j += 1u) {
          let kv = i32(kv0 + x + 8u * j);
          let score = score_mod(s[j][i] * p.scale, row[i], i32(b), i32(h), q_pos[i], kv);
          s[j][i] = score * LOG2E;
          keep[j][i] = !is_minus_infinity(score);
        }
      }
      if (walk.kind != FULL || kv0 + TILE_KV > kv_len) {
        for (var i = 0u; i < ROWS; i += 1u) {
          for (var j = 0u; j < COLUMNS; j += 1u) {
            let kv = kv0 + x + 8u * j;
            if (kv >= kv_len) {
              keep[j][i] = false;
            } else if (walk.kind != FULL) {
              keep[j][i] = keep[j][i] && mask_mod(row[i], i32(b), i32(h), q_pos[i], i32(kv));
            }
          }
        }
      }

      soften(&s, &keep, &m, &l, &o);
      add_values(&o, &s, v_place, kv0, x, cluster);
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
      for (var c = 0u; c < QUADS; c += 1u) {
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
