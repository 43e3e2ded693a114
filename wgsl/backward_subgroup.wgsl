// backward, with subgroup operations: dq, and dk and dv, as backward.wgsl computes them. No workgroup
// memory and no barriers.
//
// `dq_subgroup` computes dq of TILE_ROWS query rows of one head, `dkv_subgroup` dk and dv of TILE_ROWS
// columns of one kv head: over the query heads that share it, transposed.
// Eight neighbouring lanes of a subgroup, a cluster, have ROWS of these rows and go through eight columns
// at a time. P and dS of column x are computed by lane x, and go back to all lanes by shuffle for
// dq += dS k, and the like.
// No float atomics: every sum has one owner and one order, so results repeat bit for bit.

//#include common.wgsl
//#include walk.wgsl
//#include mods.wgsl
//#include mods_grad.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 64u;
const ROWS: u32 = 4u;       // rows of a cluster
const DK: bool = true;      // whether dkv_subgroup computes dk
const DV: bool = true;      // and dv

//@slot load
//#include load_f32.wgsl
//@end
//@slot load_dout
//#include load_dout.wgsl
//@end
//#include pair.wgsl

const TILE_ROWS: u32 = THREADS / 8u * ROWS;             // 32 or 64

@group(0) @binding(7) var<storage, read_write> out: array<OutWord>;  // dq [B, Hq, L, D]; dk [Bkv, Hkv, S, D] | dv [Bkv, Hkv, S, Dv]

//#include cluster.wgsl

@compute @workgroup_size(THREADS)
fn dq_subgroup(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let tiles = (p.q_len + TILE_ROWS - 1u) / TILE_ROWS;
  let first_row = (id % tiles) * TILE_ROWS;
  let h = (id / tiles) % p.q_heads;
  let b = id / (tiles * p.q_heads);
  let x = lane % 8u;
  let cluster = lane - x;                           // its first lane
  let r0 = first_row + (local / 8u) * ROWS;         // its first row

  let kv_len = kv_len_of(b);
  let k_place = Place(K, p.k.x + b * p.k.y + (h / p.group) * p.k.z, p.k.w, kv_len - 1u);
  let v_place = Place(V, p.v.x + b * p.v.y + (h / p.group) * p.v.z, p.v.w, kv_len - 1u);
  var q_rows = rows_of(Place(Q, p.q.x + b * p.q.y + h * p.q.z, p.q.w, p.q_len - 1u), r0, x);
  var dout_rows = rows_of(Place(DOUT, p.dout.x + b * p.dout.y + h * p.dout.z, p.dout.w, p.q_len - 1u), r0, x);
  var q_pos = array<i32, ROWS>();
  var row = array<Row, ROWS>();
  var stat = array<vec2<f32>, ROWS>();
  var gradient = Rows();
  for (var i = 0u; i < ROWS; i += 1u) {
    let r = min(r0 + i, p.q_len - 1u);
    q_pos[i] = i32(r) + q_offset_of(b);
    row[i] = row_mod(i32(b), i32(h), q_pos[i]);
    stat[i] = stats_of((b * p.q_heads + h) * p.q_len + r);
    for (var c = 0u; c < QUADS; c += 1u) { gradient[i][c] = vec4<f32>(0.0); }
  }

  var walk = walk_rows(b, h, first_row, TILE_ROWS, kv_len);
  while (next_tile(&walk)) {
    for (var kv0 = walk.first; kv0 < min(walk.first + TILE, kv_len); kv0 += 8u) {
      var v_columns = columns_of(v_place, kv0, x);
      let dp = product(&dout_rows, &v_columns, x);
      var k_columns = columns_of(k_place, kv0, x);
      let s = product(&q_rows, &k_columns, x);
      var ds = Scores();
      let kv = kv0 + x;
      for (var i = 0u; i < ROWS; i += 1u) {
        let d_post = pair(s[i], dp[i], stat[i], row[i], b, h, q_pos[i], kv, kv < kv_len, walk.kind == FULL).y;
        ds[i] = chain(d_post, score_grad(s[i] * p.scale, row[i], i32(b), i32(h), q_pos[i], i32(kv)));
      }
      add_to(&gradient, &ds, &k_columns, cluster);
    }
  }

  for (var i = 0u; i < ROWS; i += 1u) {
    for (var c = 0u; c < QUADS; c += 1u) {
      let quad = x + 8u * c;
      if (r0 + i < p.q_len && quad < HEAD_QUADS) {
        let at = p.dq.x + b * p.dq.y + h * p.dq.z + (r0 + i) * p.dq.w + 4u * quad;
        store_gradient(at, HEAD_DIM - 4u * quad, gradient[i][c] * p.scale);
      }
    }
  }
}

@compute @workgroup_size(THREADS)
fn dkv_subgroup(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let tiles = (p.kv_len + TILE_ROWS - 1u) / TILE_ROWS;
  let first_kv = (id % tiles) * TILE_ROWS;
  let kv_head = (id / tiles) % p.kv_heads;
  let kv_batch = id / (tiles * p.kv_heads);
  let x = lane % 8u;
  let cluster = lane - x;
  let kv0 = first_kv + (local / 8u) * ROWS;         // its first column

  var k_rows = rows_of(Place(K, p.k.x + kv_batch * p.k.y + kv_head * p.k.z, p.k.w, p.kv_len - 1u), kv0, x);
  var v_rows = rows_of(Place(V, p.v.x + kv_batch * p.v.y + kv_head * p.v.z, p.v.w, p.kv_len - 1u), kv0, x);
  var dk = Rows();
  var dv = Rows();
  for (var i = 0u; i < ROWS; i += 1u) {
    for (var c = 0u; c < QUADS; c += 1u) {
      dk[i][c] = vec4<f32>(0.0);
      dv[i][c] = vec4<f32>(0.0);
    }
  }

  // Where all batch entries share k and v, dk has a batch stride of 0 and the sum goes over them.
  let shared_kv = p.dk.y == 0u;
  let first_b = select(kv_batch, 0u, shared_kv);
  let end_b = select(kv_batch + 1u, p.batch, shared_kv);
  for (var b = first_b; b < end_b; b += 1u) {
    let kv_len = kv_len_of(b);
    for (var h = kv_head * p.group; h < (kv_head + 1u) * p.group; h += 1u) {
      let q_place = Place(Q, p.q.x + b * p.q.y + h * p.q.z, p.q.w, p.q_len - 1u);
      let dout_place = Place(DOUT, p.dout.x + b * p.dout.y + h * p.dout.z, p.dout.w, p.q_len - 1u);
      var walk = walk_columns(b, h, first_kv, TILE_ROWS);
      while (next_tile(&walk)) {
        for (var r0 = walk.first; r0 < min(walk.first + TILE, p.q_len); r0 += 8u) {
          var q_columns = columns_of(q_place, r0, x);
          let s = product(&k_rows, &q_columns, x);
          var dout_columns = columns_of(dout_place, r0, x);
          var dp = Scores();
          if (DK) { dp = product(&v_rows, &dout_columns, x); }
          let r = min(r0 + x, p.q_len - 1u);
          let q_pos = i32(r) + q_offset_of(b);
          let row = row_mod(i32(b), i32(h), q_pos);
          let stat = stats_of((b * p.q_heads + h) * p.q_len + r);
          var weights = Scores();
          var ds = Scores();
          for (var i = 0u; i < ROWS; i += 1u) {
            let kv = kv0 + i;
            let both = pair(s[i], dp[i], stat, row, b, h, q_pos, kv, r0 + x < p.q_len && kv < kv_len, walk.kind == FULL);
            weights[i] = both.x;
            ds[i] = chain(both.y, score_grad(s[i] * p.scale, row, i32(b), i32(h), q_pos, i32(kv)));
          }
          if (DV) { add_to(&dv, &weights, &dout_columns, cluster); }
          if (DK) { add_to(&dk, &ds, &q_columns, cluster); }
        }
      }
    }
  }

  for (var i = 0u; i < ROWS; i += 1u) {
    let r = kv0 + i;
    for (var c = 0u; c < QUADS; c += 1u) {
      let quad = x + 8u * c;
      if (DK && r < p.kv_len && quad < HEAD_QUADS) {
        let at = p.dk.x + kv_batch * p.dk.y + kv_head * p.dk.z + r * p.dk.w + 4u * quad;
        store_gradient(at, HEAD_DIM - 4u * quad, dk[i][c] * p.scale);
      }
      if (DV && r < p.kv_len && quad < V_QUADS) {
        let at = p.dv.x + kv_batch * p.dv.y + kv_head * p.dv.z + r * p.dv.w + 4u * quad;
        store_gradient(at, V_DIM - 4u * quad, dv[i][c]);
      }
    }
  }
}
