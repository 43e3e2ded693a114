// forward, with cooperative matrices: out = softmax(score_mod(q k^T * scale)) v over the kept pairs,
// and its lse and max.
//
// A workgroup computes 32 query rows of one head, in strips of EDGE rows, a subgroup each. It walks the
// tiles of their block list: k is staged, S = q k^T of a strip goes from matrices to workgroup memory,
// where the lanes of the subgroup apply the mods and turn S into P; then v is staged in place of k, and
// O += P v. O stays in matrices. Their elements cannot be reached, so P and O are relative to a
// reference r of each row, which follows the row max m only once m has outgrown it by 2^GROWTH: then O
// goes through workgroup memory once and is scaled there.
// Right for any subgroup size from EDGE on: with fewer subgroups than strips they take turns.

//#include common.wgsl
//#include walk.wgsl
//#include mods.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 128u;
const CHUNK: u32 = 64u;     // columns of q, k and v that are staged at once, a multiple of EDGE

//@slot matrices
//#include coop_f16.wgsl
//@end

const STRIPS: u32 = TILE / EDGE;
const STRIDE: u32 = CHUNK + EDGE;          // of kv_tile; the extra columns spread rows over the banks
const S_STRIDE: u32 = TILE + 4u;
const P_STRIDE: u32 = TILE + EDGE;
const HEAD_MATS: u32 = (HEAD_DIM + EDGE - 1u) / EDGE;
const OUT_MATS: u32 = (V_DIM + EDGE - 1u) / EDGE;
const CHUNK_MATS: u32 = CHUNK / EDGE;
const GROWTH: f32 = 8.0;                   // P is at most 2^8, far from f16's end
const MASKED: f32 = -3e38;                 // below FLOOR: no score of a kept pair is

@group(0) @binding(0) var<storage, read> q: array<Word>;              // [B, Hq, L, D]
@group(0) @binding(1) var<storage, read> k: array<Word>;              // [Bkv, Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<Word>;              // [Bkv, Hkv, S, Dv]
@group(0) @binding(3) var<storage, read_write> out: array<OutWord>;   // [B, Hq, L, Dv]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;     // lse [B, Hq, L] | max [B, Hq, L]
@group(0) @binding(7) var<storage, read> large: array<u32>;           // one large captured tensor, in place

//@slot load
//#include load_f16.wgsl
//@end

var<workgroup> kv_tile: array<Operand, TILE * STRIDE>;     // a chunk of 32 rows of q, k or v
var<workgroup> s_tile: array<f32, TILE * S_STRIDE>;        // S; and O where it is scaled and stored
var<workgroup> p_tile: array<Operand, TILE * P_STRIDE>;    // P
var<workgroup> grown: array<u32, STRIPS>;                  // whether a row of the strip has a new reference

fn put(at: u32, quad: vec4<f32>) {
  for (var e = 0u; e < 4u; e += 1u) { kv_tile[at + e] = Operand(quad[e]); }
}

// Stages chunk `chunk` of 32 rows of q from `row`; rows past q_len repeat the last one. Columns past
// HEAD_DIM are zero.
fn stage_q(base: u32, row: u32, chunk: u32, local: u32) {
  for (var i = local; i < TILE * CHUNK / 4u + p.zero; i += THREADS) {
    let column = chunk * CHUNK + 4u * (i % (CHUNK / 4u));
    let n = i / (CHUNK / 4u);
    var value = vec4<f32>(0.0);
    let at = base + min(row + n, p.q_len - 1u) * p.q.w + column;
    if (column < HEAD_DIM) { value = widen(load_q(at, HEAD_DIM - column)); }
    put(n * STRIDE + 4u * (i % (CHUNK / 4u)), value);
  }
}

// The same of k; rows past kv_len repeat the last one, and their scores are dropped.
fn stage_k(base: u32, kv: u32, kv_len: u32, chunk: u32, local: u32) {
  for (var i = local; i < TILE * CHUNK / 4u + p.zero; i += THREADS) {
    let column = chunk * CHUNK + 4u * (i % (CHUNK / 4u));
    let n = i / (CHUNK / 4u);
    var value = vec4<f32>(0.0);
    let at = base + min(kv + n, kv_len - 1u) * p.k.w + column;
    if (column < HEAD_DIM) { value = widen(load_k(at, HEAD_DIM - column)); }
    put(n * STRIDE + 4u * (i % (CHUNK / 4u)), value);
  }
}

// The same of v. Rows past kv_len are zero, since what lies there may be NaN, and 0 * NaN is too.
fn stage_v(base: u32, kv: u32, kv_len: u32, chunk: u32, local: u32) {
  for (var i = local; i < TILE * CHUNK / 4u + p.zero; i += THREADS) {
    let column = chunk * CHUNK + 4u * (i % (CHUNK / 4u));
    let n = i / (CHUNK / 4u);
    var value = vec4<f32>(0.0);
    let at = base + (kv + n) * p.v.w + column;
    if (column < V_DIM && kv + n < kv_len) { value = widen(load_v(at, V_DIM - column)); }
    put(n * STRIDE + 4u * (i % (CHUNK / 4u)), value);
  }
}

// naga calls whatever depends on the subgroup's number non-uniform, and asks the same of matrices as of
// derivatives; `works` is uniform in each subgroup, which is what matrices need.
@compute @workgroup_size(THREADS) @diagnostic(off, derivative_uniformity)
fn forward_coop(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
  @builtin(subgroup_invocation_id) lane: u32,
  @builtin(subgroup_size) size: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(num_subgroups) subgroups: u32,
) {
  let tiles = (p.q_len + TILE - 1u) / TILE;
  let id = tile_of(workgroup, tiles);
  if (id >= p.groups) { return; }
  let first_row = (id % tiles) * TILE;
  let h = (id / tiles) % p.q_heads;
  let b = id / (tiles * p.q_heads);

  let kv_len = kv_len_of(b);
  let q_base = p.q.x + b * p.q.y + h * p.q.z;
  let k_base = p.k.x + b * p.k.y + (h / p.group) * p.k.z;
  let v_base = p.v.x + b * p.v.y + (h / p.group) * p.v.z;
  let per_row = max(size / EDGE, 1u);      // lanes that share a row
  let x = lane % per_row;
  if (local < STRIPS) { grown[local] = 0u; }

  for (var turn = 0u; turn < STRIPS; turn += subgroups) {
    let strip = turn + subgroup;
    let works = strip < STRIPS;
    let r = min(strip * EDGE + lane / per_row, TILE - 1u);   // this lane's row of the 32
    let q_row = first_row + r;
    let q_pos = i32(min(q_row, p.q_len - 1u)) + q_offset_of(b);
    let row = row_mod(i32(b), i32(h), q_pos);
    var m = FLOOR;                         // row max so far, in base 2
    var reference = FLOOR;                 // at most m, at least m - GROWTH
    var l = 0.0;                           // row sum so far, of this lane's columns
    var o = array<Sum, OUT_MATS>();
    var q_mats = array<Left, HEAD_MATS>();
    for (var chunk = 0u; chunk * CHUNK_MATS < HEAD_MATS; chunk += 1u) {
      workgroupBarrier();
      stage_q(q_base, first_row, chunk, local);
      workgroupBarrier();
      if (works) {
        for (var d = 0u; d < min(CHUNK_MATS, HEAD_MATS - chunk * CHUNK_MATS); d += 1u) {
          q_mats[chunk * CHUNK_MATS + d] = coopLoadT<Left>(&kv_tile[strip * EDGE * STRIDE + EDGE * d], STRIDE);
        }
      }
    }

    var walk = walk_row(b, h, first_row, kv_len);
    while (next_tile(&walk)) {
      // S = q k^T
      var s = array<Sum, STRIPS>();
      for (var chunk = 0u; chunk * CHUNK_MATS < HEAD_MATS; chunk += 1u) {
        workgroupBarrier();
        stage_k(k_base, walk.first, kv_len, chunk, local);
        workgroupBarrier();
        if (works) {
          for (var d = 0u; d < min(CHUNK_MATS, HEAD_MATS - chunk * CHUNK_MATS); d += 1u) {
            for (var j = 0u; j < STRIPS; j += 1u) {
              let k_mat = coopLoad<Right>(&kv_tile[j * EDGE * STRIDE + EDGE * d], STRIDE);
              s[j] = coopMultiplyAdd(q_mats[chunk * CHUNK_MATS + d], k_mat, s[j]);
            }
          }
        }
      }
      if (works) {
        for (var j = 0u; j < STRIPS; j += 1u) {
          coopStoreT(s[j], &s_tile[strip * EDGE * S_STRIDE + EDGE * j], S_STRIDE);
        }
      }
      workgroupBarrier();

      // Mods, and the new row max. A masked pair is excluded whatever score_mod gave for it; a score of
      // -inf is masked. Then P = exp2(S - reference).
      var shrink = 1.0;
      if (works) {
        for (var j = x; j < TILE; j += per_row) {
          let kv = walk.first + j;
          let score = score_mod(s_tile[r * S_STRIDE + j] * p.scale, row, i32(b), i32(h), q_pos, i32(kv));
          var keep = kv < kv_len && !is_minus_infinity(score);
          if (keep && walk.kind != FULL) { keep = mask_mod(row, i32(b), i32(h), q_pos, i32(kv)); }
          // Not max(): a NaN that is kept has to stay.
          let kept = select(score * LOG2E, FLOOR, score * LOG2E < FLOOR);
          let value = select(MASKED, kept, keep);
          m = max(m, value);
          s_tile[r * S_STRIDE + j] = value;
        }
        for (var other = 1u; other < per_row; other *= 2u) { m = max(m, subgroupShuffleXor(m, other)); }
        let renew = m > reference + GROWTH;
        let any_grown = subgroupAny(renew && l != 0.0);   // nothing summed yet: O is zero
        if (lane == 0u) { grown[strip] = u32(any_grown); }
        if (renew) {
          shrink = exp2(reference - m);
          reference = m;
        }
        l *= shrink;
        for (var j = x; j < TILE; j += per_row) {
          let value = s_tile[r * S_STRIDE + j];
          let weight = select(exp2(value - reference), 0.0, value < FLOOR);
          l += weight;
          p_tile[r * P_STRIDE + j] = Operand(weight);
        }
      }
      workgroupBarrier();

      var scale = 0u;
      for (var i = 0u; i < STRIPS; i += 1u) { scale |= grown[i]; }
      if (scale != 0u) {
        for (var first = 0u; first < OUT_MATS; first += STRIPS) {
          if (works) {
            for (var j = 0u; j < min(STRIPS, OUT_MATS - first); j += 1u) {
              coopStoreT(o[first + j], &s_tile[strip * EDGE * S_STRIDE + EDGE * j], S_STRIDE);
            }
          }
          workgroupBarrier();
          if (works) {
            for (var j = x; j < TILE; j += per_row) { s_tile[r * S_STRIDE + j] *= shrink; }
          }
          workgroupBarrier();
          if (works) {
            for (var j = 0u; j < min(STRIPS, OUT_MATS - first); j += 1u) {
              o[first + j] = coopLoadT<Sum>(&s_tile[strip * EDGE * S_STRIDE + EDGE * j], S_STRIDE);
            }
          }
          workgroupBarrier();
        }
      }

      // O += P v
      var weights = array<Left, STRIPS>();
      if (works) {
        for (var j = 0u; j < STRIPS; j += 1u) {
          weights[j] = coopLoadT<Left>(&p_tile[strip * EDGE * P_STRIDE + EDGE * j], P_STRIDE);
        }
      }
      for (var chunk = 0u; chunk * CHUNK_MATS < OUT_MATS; chunk += 1u) {
        if (chunk > 0u) { workgroupBarrier(); }
        stage_v(v_base, walk.first, kv_len, chunk, local);
        workgroupBarrier();
        if (works) {
          for (var c = 0u; c < min(CHUNK_MATS, OUT_MATS - chunk * CHUNK_MATS); c += 1u) {
            for (var j = 0u; j < STRIPS; j += 1u) {
              let v_mat = coopLoadT<Right>(&kv_tile[j * EDGE * STRIDE + EDGE * c], STRIDE);
              o[chunk * CHUNK_MATS + c] = coopMultiplyAdd(weights[j], v_mat, o[chunk * CHUNK_MATS + c]);
            }
          }
        }
      }
    }

    // out = O / l
    for (var other = 1u; other < per_row; other *= 2u) { l += subgroupShuffleXor(l, other); }
    // A row with nothing kept: out 0, lse and max -inf.
    let empty = l == 0.0;
    let row_max = select(m * LN2, minus_infinity(), empty);
    let lse = select(reference * LN2 + log(l), minus_infinity(), empty);
    var factor = select(1.0 / l, 0.0, empty);
    if (p.sinks_at != NONE) {
      let sink = bitcast<f32>(tables[p.sinks_at + h]);
      factor *= select(1.0 / (1.0 + exp(sink - lse)), 0.0, empty);
    }
    for (var first = 0u; first < OUT_MATS; first += STRIPS) {
      workgroupBarrier();
      if (works) {
        for (var j = 0u; j < min(STRIPS, OUT_MATS - first); j += 1u) {
          coopStoreT(o[first + j], &s_tile[strip * EDGE * S_STRIDE + EDGE * j], S_STRIDE);
        }
      }
      workgroupBarrier();
      for (var quad = x; works && q_row < p.q_len && quad < TILE / 4u; quad += per_row) {
        let column = EDGE * first + 4u * quad;
        if (column < V_DIM) {
          let from_s = r * S_STRIDE + 4u * quad;
          let value = vec4<f32>(s_tile[from_s], s_tile[from_s + 1u], s_tile[from_s + 2u], s_tile[from_s + 3u]);
          let at = p.out.x + b * p.out.y + h * p.out.z + q_row * p.out.w + column;
          store_out(at, V_DIM - column, select(value * factor, vec4<f32>(0.0), empty));
        }
      }
    }
    if (works && x == 0u && q_row < p.q_len) {
      let at = (b * p.q_heads + h) * p.q_len + q_row;
      if (p.lse_at != NONE) { stats[p.lse_at + at] = lse; }
      if (p.max_at != NONE) { stats[p.max_at + at] = row_max; }
    }
  }
}
