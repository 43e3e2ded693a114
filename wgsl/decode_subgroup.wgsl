// decode, with subgroup operations: O, m and l of few query rows over parts of many keys, which entry
// `combine` of decode.wgsl then weighs. No workgroup memory and no barriers.
//
// The query rows of all heads that share a kv head are packed, ROWS to a workgroup. k and v are read once
// for each ROWS of them: once per kv head where group * q_len is at most ROWS.
// A workgroup walks p.split_len keys, STEP at a time: 32 for each of its CLUSTERS,
// which are eight neighbouring lanes of a subgroup. A cluster's keys are a part of their own. The order of
// the parts is fixed, so the result is the same every time.

//#include common.wgsl
//#include lookup.wgsl
//#include mods.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 64u;
const ROWS: u32 = 4u;       // packed query rows

const COLUMNS: u32 = 4u;
const CLUSTERS: u32 = THREADS / 8u;
const STEP: u32 = CLUSTERS * TILE_KV;

@group(0) @binding(0) var<storage, read> q: array<Word>;              // [B, Hq, L, D], L at most 32
@group(0) @binding(1) var<storage, read> k: array<Word>;              // [Bkv, Hkv, S, D]
@group(0) @binding(2) var<storage, read> v: array<Word>;              // [Bkv, Hkv, S, Dv]
@group(0) @binding(3) var<storage, read_write> partials: array<f32>;  // O [B, Hq, L, splits, Dv], then (m, l) [B, Hq, L, splits, 2]
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;     // nothing
@group(0) @binding(7) var<storage, read> large: array<u32>;           // one large captured tensor, in place
// What the load files name besides; this entry point does not use it.
@group(0) @binding(3) var<storage, read_write> out: array<OutWord>;

//@slot load
//#include load_f32.wgsl
//@end

//#include online_softmax.wgsl

@compute @workgroup_size(THREADS)
fn split_subgroup(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let rows = p.group * p.q_len;
  let tiles = (rows + ROWS - 1u) / ROWS;
  let splits = p.splits / CLUSTERS;
  let begin = id % splits * p.split_len;
  let first_row = (id / splits) % tiles * ROWS;
  let kv_head = id / (splits * tiles) % p.kv_heads;
  let b = id / (splits * tiles * p.kv_heads);
  let x = lane % 8u;
  let cluster = lane - x;                           // its first lane
  let number = local / 8u;                          // of the cluster in the workgroup

  let kv_len = kv_len_of(b);
  let k_place = Place(K, p.k.x + b * p.k.y + kv_head * p.k.z, p.k.w, kv_len - 1u);
  let v_place = Place(V, p.v.x + b * p.v.y + kv_head * p.v.z, p.v.w, kv_len - 1u);
  var q_head = array<u32, ROWS>();
  var q_pos = array<i32, ROWS>();
  var row = array<Row, ROWS>();
  var m = Scores();                                 // row max so far, in base 2
  var l = Scores();                                 // row sum so far, of this lane's columns
  var o = Rows();                                   // output so far, times the row sum
  var q_rows = Rows();
  for (var i = 0u; i < ROWS; i += 1u) {
    let n = min(first_row + i, rows - 1u);
    q_head[i] = kv_head * p.group + n / p.q_len;
    q_pos[i] = i32(n % p.q_len) + q_offset_of(b);
    m[i] = FLOOR;
    row[i] = row_mod(i32(b), i32(q_head[i]), q_pos[i]);
    q_rows[i] = line(Place(Q, p.q.x + b * p.q.y + q_head[i] * p.q.z, p.q.w, p.q_len - 1u), n % p.q_len, x);
  }

  let end = min(begin + p.split_len, kv_len);
  for (var step = begin; step < end; step += STEP) {
    // Heads may have lists of their own: a step is left out when it is empty for all of the group.
    var any = 0u;
    var shared_kinds = 0u;
    for (var block = step / BLOCK; block * BLOCK < step + STEP; block += 1u) {
      for (var h = 0u; h < min(p.group, p.mask_heads); h += 1u) {
        let kinds = kinds_of(b, kv_head * p.group + h, block);
        any |= kinds;
        if (block == (step + number * TILE_KV) / BLOCK) { shared_kinds = kinds; }
      }
    }
    if (any == 0u) { continue; }
    let kv0 = step + number * TILE_KV;
    let tile = 2u * (kv0 % BLOCK / TILE_KV);

    var s = scores(&q_rows, k_place, kv0, x);

    // Mods. A masked pair is excluded whatever score_mod gave for it; a score of -inf is masked.
    var keep = Kept();
    for (var i = 0u; i < ROWS; i += 1u) {
      var kinds = shared_kinds;
      if (p.mask_heads > 1u) { kinds = kinds_of(b, q_head[i], min(kv0, kv_len - 1u) / BLOCK); }
      let kind = (kinds >> tile) & 3u;
      for (var j = 0u; j < COLUMNS; j += 1u) {
        let kv = kv0 + x + 8u * j;
        let score = score_mod(s[j][i] * p.scale, row[i], i32(b), i32(q_head[i]), q_pos[i], i32(kv));
        s[j][i] = score * LOG2E;
        keep[j][i] = !is_minus_infinity(score) && kv < kv_len && kind != EMPTY;
        if (keep[j][i] && kind == PARTIAL) {
          keep[j][i] = mask_mod(row[i], i32(b), i32(q_head[i]), q_pos[i], i32(kv));
        }
      }
    }

    soften(&s, &keep, &m, &l, &o);
    add_values(&o, &s, v_place, kv0, x, cluster);
  }

  let part = id % splits * CLUSTERS + number;
  let stats_at = p.batch * p.q_heads * p.q_len * p.splits * V_DIM;
  for (var i = 0u; i < ROWS; i += 1u) {
    let sum = cluster_sum(l[i]);
    let n = first_row + i;
    if (n < rows) {
      let partial = ((b * p.q_heads + q_head[i]) * p.q_len + n % p.q_len) * p.splits + part;
      for (var c = 0u; c < QUADS; c += 1u) {
        for (var e = 0u; e < 4u; e += 1u) {
          let column = 4u * (x + 8u * c) + e;
          if (column < V_DIM) { partials[partial * V_DIM + column] = o[i][c][e]; }
        }
      }
      if (x == 0u) {
        partials[stats_at + 2u * partial] = m[i];
        partials[stats_at + 2u * partial + 1u] = sum;
      }
    }
  }
}
