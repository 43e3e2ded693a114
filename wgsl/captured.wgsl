// captured: gradients of the captured tensors that score_mod reads.
//
// Each place where score_mod reads a tensor is a term: its gradient there is dPost times a derivative
// of score_mod, summed over all pairs that read the same element.
// `rows` walks the tiles of 32 query rows. It sums the row terms of each row over kv into `sums`; pair
//   terms are added to their elements at once.
// `columns` walks the tiles of 32 columns of one query head, transposed, and sums the column terms.
// `scatter` adds those sums to the elements: each invocation owns every OWNERS-th element and goes
//   through the sums in order.
// Row and column terms are added in one order always, and so are pair terms of an element that only
// one (q, kv) reads, since one invocation has that pair for all heads. A pair term whose element many
// pairs read (a table of distances, of buckets) is added atomically: its last bits depend on timing.

//#include common.wgsl
//#include walk.wgsl
//#include mods.wgsl
//#include mods_terms.wgsl

const HEAD_DIM: u32 = 64u;
const V_DIM: u32 = 64u;
const THREADS: u32 = 64u;   // of rows and columns
const CHUNK: u32 = 8u;      // vec4 of a row that are staged at once, a multiple of 8
const STAGES: u32 = 2u;     // staged tiles

//@slot load
//#include load_f32.wgsl
//@end
//@slot load_dout
//#include load_dout.wgsl
//@end
//#include recompute.wgsl

const OWNERS: u32 = 256u;
const R: u32 = max(ROW_TERMS, 1u);       // WGSL has no empty arrays
const C: u32 = max(COLUMN_TERMS, 1u);

// f32 bits: the gradients of all captured tensors, then the sums: ROW_TERMS x [B, Hq, L] at
// capture_at and, after them, COLUMN_TERMS x [B, Hq, S].
@group(0) @binding(7) var<storage, read_write> gradients: array<atomic<u32>>;
// What the load files store to; no entry point here does, and all tensors are read.
@group(0) @binding(7) var<storage, read_write> out: array<OutWord>;

var<workgroup> reduced: array<f32, TILE * 8u>;   // one value per row and tx

fn row_sum_at(term: u32, row: u32) -> u32 { return p.capture_at + term * p.batch * p.q_heads * p.q_len + row; }
fn column_sum_at(term: u32, column: u32) -> u32 {
  return row_sum_at(ROW_TERMS, 0u) + term * p.batch * p.q_heads * p.kv_len + column;
}

// To an element that no other invocation adds to.
fn add_owned(at: u32, value: f32) {
  atomicStore(&gradients[at], bitcast<u32>(bitcast<f32>(atomicLoad(&gradients[at])) + value));
}

fn add_atomically(at: u32, value: f32) {
  var old = atomicLoad(&gradients[at]);
  loop {
    let result = atomicCompareExchangeWeak(&gradients[at], old, bitcast<u32>(bitcast<f32>(old) + value));
    if (result.exchanged) { break; }
    old = result.old_value;
  }
}

// The sum over the 8 invocations of each row, added to what earlier launches have found, where tx is 0.
fn reduce_rows(value: array<f32, ROWS>, base: u32, first: u32, count: u32, local: u32) {
  let tx = local % 8u;
  let ty = local / 8u;
  workgroupBarrier();
  for (var i = 0u; i < ROWS; i += 1u) { reduced[(ty + GRID * i) * 8u + tx] = value[i]; }
  workgroupBarrier();
  for (var i = 0u; i < ROWS; i += 1u) {
    let r = first + ty + GRID * i;
    if (tx == 0u && r < count) {
      var sum = 0.0;
      for (var x = 0u; x < 8u; x += 1u) { sum += reduced[(ty + GRID * i) * 8u + x]; }
      add_owned(base + r, sum);
    }
  }
}

// With pair terms a workgroup takes its rows of all batch entries and heads, one after the other.
@compute @workgroup_size(THREADS)
fn rows(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let tiles = (p.q_len + TILE - 1u) / TILE;
  let first_row = (id % tiles) * TILE;
  let tx = local % 8u;
  let ty = local / 8u;
  let heads = p.batch * p.q_heads;
  let first_head = select(id / tiles, 0u, PAIR_TERMS > 0u);
  let end_head = select(id / tiles + 1u, heads, PAIR_TERMS > 0u);

  for (var head = first_head; head < end_head; head += 1u) {
    let b = head / p.q_heads;
    let h = head % p.q_heads;
    let kv_len = kv_len_of(b);
    var walk = walk_row(b, h, first_row, kv_len);
    // A head may lie outside of what this launch binds; then its lists are empty.
    if (walk.run == walk.run_end && walk.partial == walk.partial_end) { continue; }
    let q_rows = Rows(Q, p.q.x + b * p.q.y + h * p.q.z, p.q.w, first_row, p.q_len);
    let dout_rows = Rows(DOUT, p.dout.x + b * p.dout.y + h * p.dout.z, p.dout.w, first_row, p.q_len);
    if (RESIDENT) {
      workgroupBarrier();
      stage(S_ROWS, q_rows, 0u, local);
      stage(DP_ROWS, dout_rows, 0u, local);
    }
    var sum = array<array<f32, ROWS>, R>();
    for (var t = 0u; t < R; t += 1u) { for (var i = 0u; i < ROWS; i += 1u) { sum[t][i] = 0.0; } }

    while (next_tile(&walk)) {
      let k_rows = Rows(K, p.k.x + b * p.k.y + (h / p.group) * p.k.z, p.k.w, walk.first, kv_len);
      let v_rows = Rows(V, p.v.x + b * p.v.y + (h / p.group) * p.v.z, p.v.w, walk.first, kv_len);
      let dp = product(DP_ROWS, dout_rows, v_rows, local);
      let s = product(S_ROWS, q_rows, k_rows, local);
      for (var i = 0u; i < ROWS; i += 1u) {
        let r = min(first_row + ty + GRID * i, p.q_len - 1u);
        let q_pos = i32(r) + q_offset_of(b);
        let row = row_mod(i32(b), i32(h), q_pos);
        let stat = stats_of((b * p.q_heads + h) * p.q_len + r);
        let in_rows = first_row + ty + GRID * i < p.q_len;
        for (var j = 0u; j < COLUMNS; j += 1u) {
          let kv = walk.first + tx + 8u * j;
          let d_post = pair(s[i][j], dp[i][j], stat, row, b, h, q_pos, kv, in_rows && kv < kv_len, walk.kind == FULL).y;
          let score = s[i][j] * p.scale;
          for (var t = 0u; t < ROW_TERMS; t += 1u) {
            sum[t][i] += chain(d_post, row_term(t, score, row, i32(b), i32(h), q_pos, i32(kv)));
          }
          if (d_post != 0.0) {
            for (var t = 0u; t < PAIR_TERMS; t += 1u) {
              add_atomically(pair_element(t, row, i32(b), i32(h), q_pos, i32(kv)),
                             d_post * pair_term(t, score, row, i32(b), i32(h), q_pos, i32(kv)));
            }
          }
        }
      }
    }
    for (var t = 0u; t < ROW_TERMS; t += 1u) {
      reduce_rows(sum[t], row_sum_at(t, head * p.q_len), first_row, p.q_len, local);
    }
  }
}

@compute @workgroup_size(THREADS)
fn columns(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let id = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (id >= p.groups) { return; }
  let tiles = (p.kv_len + TILE - 1u) / TILE;
  let first_kv = (id % tiles) * TILE;
  let head = id / tiles;
  let b = head / p.q_heads;
  let h = head % p.q_heads;
  let tx = local % 8u;
  let ty = local / 8u;
  let kv_len = kv_len_of(b);

  let k_rows = Rows(K, p.k.x + b * p.k.y + (h / p.group) * p.k.z, p.k.w, first_kv, kv_len);
  let v_rows = Rows(V, p.v.x + b * p.v.y + (h / p.group) * p.v.z, p.v.w, first_kv, kv_len);
  if (RESIDENT) {
    stage(S_ROWS, k_rows, 0u, local);
    stage(DP_ROWS, v_rows, 0u, local);
  }
  var sum = array<array<f32, ROWS>, C>();
  for (var t = 0u; t < C; t += 1u) { for (var i = 0u; i < ROWS; i += 1u) { sum[t][i] = 0.0; } }

  var walk = walk_column(b, h, first_kv);
  while (next_tile(&walk)) {
    let q_rows = Rows(Q, p.q.x + b * p.q.y + h * p.q.z, p.q.w, walk.first, p.q_len);
    let dout_rows = Rows(DOUT, p.dout.x + b * p.dout.y + h * p.dout.z, p.dout.w, walk.first, p.q_len);
    let s = product(S_ROWS, k_rows, q_rows, local);
    let dp = product(DP_ROWS, v_rows, dout_rows, local);
    for (var j = 0u; j < COLUMNS; j += 1u) {
      let r = min(walk.first + tx + 8u * j, p.q_len - 1u);
      let q_pos = i32(r) + q_offset_of(b);
      let row = row_mod(i32(b), i32(h), q_pos);
      let stat = stats_of((b * p.q_heads + h) * p.q_len + r);
      let in_rows = walk.first + tx + 8u * j < p.q_len;
      for (var i = 0u; i < ROWS; i += 1u) {
        let kv = first_kv + ty + GRID * i;
        let d_post = pair(s[i][j], dp[i][j], stat, row, b, h, q_pos, kv, in_rows && kv < kv_len, walk.kind == FULL).y;
        for (var t = 0u; t < COLUMN_TERMS; t += 1u) {
          sum[t][i] += chain(d_post, column_term(t, s[i][j] * p.scale, row, i32(b), i32(h), q_pos, i32(kv)));
        }
      }
    }
  }
  for (var t = 0u; t < COLUMN_TERMS; t += 1u) {
    reduce_rows(sum[t], column_sum_at(t, head * p.kv_len), first_kv, p.kv_len, local);
  }
}

// Goes through the sums from first_group to groups, counted over terms: those of rows, then those of columns.
@compute @workgroup_size(64)
fn scatter(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let owner = workgroup.x * 64u + local;
  let rows_each = p.batch * p.q_heads * p.q_len;
  let columns_each = p.batch * p.q_heads * p.kv_len;
  for (var sum = p.first_group; sum < p.groups; sum += 1u) {
    var at = 0u;
    if (sum < ROW_TERMS * rows_each) {
      let r = sum % rows_each;
      let b = r / (p.q_heads * p.q_len);
      at = row_element(sum / rows_each, i32(b), i32((r / p.q_len) % p.q_heads), i32(r % p.q_len) + q_offset_of(b));
    } else {
      let column = sum - ROW_TERMS * rows_each;
      let c = column % columns_each;
      let b = c / (p.q_heads * p.kv_len);
      at = column_element(column / columns_each, i32(b), i32((c / p.kv_len) % p.q_heads), i32(c % p.kv_len));
    }
    if (at % OWNERS == owner) { add_owned(at, bitcast<f32>(atomicLoad(&gradients[p.capture_at + sum]))); }
  }
}
