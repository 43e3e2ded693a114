// backward: dq, and dk and dv, of out = softmax(score_mod(q k^T * scale)) v, given dout and the
// gradient of lse. P and dP are computed again, tile by tile; nothing of size q_len * kv_len is kept.
//
// lse and delta come from delta.wgsl.
// `dq` computes dq of 32 query rows of one head: over the tiles of their block list
//   dP = dout v^T, S = q k^T, P = exp(score_mod(S) - lse), dS = P (dP - delta) score_mod'(S),
//   dq += dS k.
// `dkv` computes dk and dv of 32 columns of one kv head: over the query heads that share it and the
//   tiles of the columns' transposed lists, the same transposed, dv += P^T dout, dk += dS^T q.
// No float atomics: every sum has one owner and one order, so results repeat bit for bit.
// The invocations form a grid of 8 columns and GRID rows. Invocation (tx, ty) has the rows ty + GRID i and
// the columns tx + 8 j of a 32 x 32 tile, and the vec4 tx + 8 c of the rows of a gradient.

//#include common.wgsl
//#include walk.wgsl
//#include mods.wgsl
//#include mods_grad.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 64u;   // 32, 64, 128 or 256
const CHUNK: u32 = 8u;      // vec4 of a row that are staged at once, a multiple of 8
const DK: bool = true;      // whether dkv computes dk
const DV: bool = true;      // and dv
const STAGES: u32 = 2u;     // staged tiles; with 3, and whole rows in a chunk, the rows stay staged

//@slot load
//#include load_f32.wgsl
//@end
//@slot load_dout
//#include load_dout.wgsl
//@end
//#include recompute.wgsl

const OUT: u32 = (max(HEAD_QUADS, V_QUADS) + 7u) / 8u;  // vec4 of a gradient's row in one invocation
const STEP: u32 = CHUNK / 8u;                           // of which one chunk feeds this many
const P_STRIDE: u32 = 9u;

@group(0) @binding(7) var<storage, read_write> out: array<OutWord>;  // dq [B, Hq, L, D]; dk [Bkv, Hkv, S, D] | dv [Bkv, Hkv, S, Dv]

var<workgroup> p_tile: array<vec4<f32>, TILE * P_STRIDE>;  // P or dS; columns tx + 8 j are the vec4 tx

alias Gradient = array<array<vec4<f32>, OUT>, ROWS>;

// Adds p_tile times the columns' rows to a gradient, chunk by chunk; `again` stages the first chunk.
fn add_to(gradient: ptr<function, Gradient>, columns: Rows, again: bool, local: u32) {
  let vectors = (select(HEAD_QUADS, V_QUADS, columns.tensor >= V) + 7u) / 8u;
  let tx = local % 8u;
  let ty = local / 8u;
  for (var c0 = 0u; c0 < vectors; c0 += STEP) {
    if (again || vectors > STEP) {
      workgroupBarrier();
      stage(OTHER, columns, c0 / STEP, local);
    }
    workgroupBarrier();
    for (var x = 0u; x < 8u + p.zero; x += 1u) {
      var weights = array<vec4<f32>, ROWS>();
      for (var i = 0u; i < ROWS; i += 1u) { weights[i] = p_tile[(ty + GRID * i) * P_STRIDE + x]; }
      for (var j = 0u; j < COLUMNS; j += 1u) {
        for (var c = 0u; c < min(STEP, vectors - c0); c += 1u) {
          let value = widen(staged[OTHER + (x + 8u * j) * STRIDE + tx + 8u * c]);
          for (var i = 0u; i < ROWS; i += 1u) { (*gradient)[i][c0 + c] += weights[i][j] * value; }
        }
      }
    }
  }
}

@compute @workgroup_size(THREADS)
fn dq(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let tiles = (p.q_len + TILE - 1u) / TILE;
  let first_row = (id % tiles) * TILE;
  let h = (id / tiles) % p.q_heads;
  let b = id / (tiles * p.q_heads);
  let tx = local % 8u;
  let ty = local / 8u;
  let kv_len = kv_len_of(b);

  let q_rows = Rows(Q, p.q.x + b * p.q.y + h * p.q.z, p.q.w, first_row, p.q_len);
  let dout_rows = Rows(DOUT, p.dout.x + b * p.dout.y + h * p.dout.z, p.dout.w, first_row, p.q_len);
  if (RESIDENT) {
    stage(S_ROWS, q_rows, 0u, local);
    stage(DP_ROWS, dout_rows, 0u, local);
  }
  var q_pos = array<i32, ROWS>();
  var row = array<Row, ROWS>();
  var stat = array<vec2<f32>, ROWS>();
  var gradient = Gradient();
  for (var i = 0u; i < ROWS; i += 1u) {
    let r = min(first_row + ty + GRID * i, p.q_len - 1u);
    q_pos[i] = i32(r) + q_offset_of(b);
    row[i] = row_mod(i32(b), i32(h), q_pos[i]);
    stat[i] = stats_of((b * p.q_heads + h) * p.q_len + r);
    for (var c = 0u; c < OUT; c += 1u) { gradient[i][c] = vec4<f32>(0.0); }
  }

  var walk = walk_row(b, h, first_row, kv_len);
  while (next_tile(&walk)) {
    let k_rows = Rows(K, p.k.x + b * p.k.y + (h / p.group) * p.k.z, p.k.w, walk.first, kv_len);
    let v_rows = Rows(V, p.v.x + b * p.v.y + (h / p.group) * p.v.z, p.v.w, walk.first, kv_len);
    let dp = product(DP_ROWS, dout_rows, v_rows, local);
    let s = product(S_ROWS, q_rows, k_rows, local);
    for (var i = 0u; i < ROWS; i += 1u) {
      var ds = vec4<f32>(0.0);
      for (var j = 0u; j < COLUMNS; j += 1u) {
        let kv = walk.first + tx + 8u * j;
        let d_post = pair(s[i][j], dp[i][j], stat[i], row[i], b, h, q_pos[i], kv, kv < kv_len, walk.kind == FULL).y;
        ds[j] = chain(d_post, score_grad(s[i][j] * p.scale, row[i], i32(b), i32(h), q_pos[i], i32(kv)));
      }
      p_tile[(ty + GRID * i) * P_STRIDE + tx] = ds;
    }
    add_to(&gradient, k_rows, false, local);
  }

  for (var i = 0u; i < ROWS; i += 1u) {
    let r = first_row + ty + GRID * i;
    for (var c = 0u; c < OUT; c += 1u) {
      let quad = tx + 8u * c;
      if (r < p.q_len && quad < HEAD_QUADS) {
        let at = p.dq.x + b * p.dq.y + h * p.dq.z + r * p.dq.w + 4u * quad;
        store_gradient(at, HEAD_DIM - 4u * quad, gradient[i][c] * p.scale);
      }
    }
  }
}

@compute @workgroup_size(THREADS)
fn dkv(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let tiles = (p.kv_len + TILE - 1u) / TILE;
  let first_kv = (id % tiles) * TILE;
  let kv_head = (id / tiles) % p.kv_heads;
  let kv_batch = id / (tiles * p.kv_heads);
  let tx = local % 8u;
  let ty = local / 8u;

  let k_rows = Rows(K, p.k.x + kv_batch * p.k.y + kv_head * p.k.z, p.k.w, first_kv, p.kv_len);
  let v_rows = Rows(V, p.v.x + kv_batch * p.v.y + kv_head * p.v.z, p.v.w, first_kv, p.kv_len);
  if (RESIDENT) {
    stage(S_ROWS, k_rows, 0u, local);
    stage(DP_ROWS, v_rows, 0u, local);
  }
  var dk = Gradient();
  var dv = Gradient();
  for (var i = 0u; i < ROWS; i += 1u) {
    for (var c = 0u; c < OUT; c += 1u) {
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
      var walk = walk_column(b, h, first_kv);
      while (next_tile(&walk)) {
        let q_rows = Rows(Q, p.q.x + b * p.q.y + h * p.q.z, p.q.w, walk.first, p.q_len);
        let dout_rows = Rows(DOUT, p.dout.x + b * p.dout.y + h * p.dout.z, p.dout.w, walk.first, p.q_len);
        let s = product(S_ROWS, k_rows, q_rows, local);
        var dp = array<vec4<f32>, ROWS>();
        if (DK) { dp = product(DP_ROWS, v_rows, dout_rows, local); }
        var ds = array<vec4<f32>, ROWS>();
        var weights = array<vec4<f32>, ROWS>();
        for (var j = 0u; j < COLUMNS; j += 1u) {
          let r = min(walk.first + tx + 8u * j, p.q_len - 1u);
          let q_pos = i32(r) + q_offset_of(b);
          let row = row_mod(i32(b), i32(h), q_pos);
          let stat = stats_of((b * p.q_heads + h) * p.q_len + r);
          let in_rows = walk.first + tx + 8u * j < p.q_len;
          for (var i = 0u; i < ROWS; i += 1u) {
            let kv = first_kv + ty + GRID * i;
            let both = pair(s[i][j], dp[i][j], stat, row, b, h, q_pos, kv, in_rows && kv < kv_len, walk.kind == FULL);
            weights[i][j] = both.x;
            ds[i][j] = chain(both.y, score_grad(s[i][j] * p.scale, row, i32(b), i32(h), q_pos, i32(kv)));
          }
        }
        if (DV) {
          for (var i = 0u; i < ROWS; i += 1u) { p_tile[(ty + GRID * i) * P_STRIDE + tx] = weights[i]; }
          add_to(&dv, dout_rows, !DK, local);
          workgroupBarrier();
        }
        if (DK) {
          for (var i = 0u; i < ROWS; i += 1u) { p_tile[(ty + GRID * i) * P_STRIDE + tx] = ds[i]; }
          add_to(&dk, q_rows, true, local);
        }
      }
    }
  }

  for (var i = 0u; i < ROWS; i += 1u) {
    let r = first_kv + ty + GRID * i;
    for (var c = 0u; c < OUT; c += 1u) {
      let quad = tx + 8u * c;
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
