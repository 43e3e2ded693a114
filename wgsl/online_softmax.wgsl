// The online softmax of a cluster's rows, 8 COLUMNS columns at a time: lane x has the columns x + 8 j.

const HEAD_QUADS: u32 = (HEAD_DIM + 3u) / 4u;
const V_QUADS: u32 = (V_DIM + 3u) / 4u;
const TILE_KV: u32 = 8u * COLUMNS;

const Q: u32 = 0u;
const K: u32 = 1u;
const V: u32 = 2u;

fn load(tensor: u32, at: u32, left: u32) -> Quad {
  if (tensor == Q) { return load_q(at, left); }
  if (tensor == K) { return load_k(at, left); }
  return load_v(at, left);
}

//#include cluster.wgsl

alias Tile = array<Scores, COLUMNS>;                  // S, then P
alias Kept = array<array<bool, ROWS>, COLUMNS>;

// S = q k^T
fn scores(q: ptr<function, Rows>, k: Place, kv0: u32, x: u32) -> Tile {
  var s = Tile();
  for (var j = 0u; j < COLUMNS; j += 1u) {
    var columns = columns_of(k, kv0 + 8u * j, x);
    s[j] = product(q, &columns, x);
  }
  return s;
}

// P = exp2(S - m). `m` is the row max so far, `l` the row sum of this lane's columns, `o` the output times
// the row sum; the latter two are scaled to the new max. `s` is in base 2.
fn soften(
  s: ptr<function, Tile>, keep: ptr<function, Kept>,
  m: ptr<function, Scores>, l: ptr<function, Scores>, o: ptr<function, Rows>,
) {
  for (var i = 0u; i < ROWS; i += 1u) {
    var m_lane = (*m)[i];
    for (var j = 0u; j < COLUMNS; j += 1u) {
      // Not max(): a NaN that is kept has to stay.
      (*s)[j][i] = select((*s)[j][i], FLOOR, (*s)[j][i] < FLOOR || !(*keep)[j][i]);
      m_lane = max(m_lane, (*s)[j][i]);
    }
    let m_new = cluster_max(m_lane);
    let shrink = exp2((*m)[i] - m_new);
    (*m)[i] = m_new;
    (*l)[i] *= shrink;
    for (var j = 0u; j < COLUMNS; j += 1u) {
      (*s)[j][i] = select(0.0, exp2((*s)[j][i] - m_new), (*keep)[j][i]);
      (*l)[i] += (*s)[j][i];
    }
    for (var c = 0u; c < QUADS; c += 1u) { (*o)[i][c] *= shrink; }
  }
}

// O += P v. Rows past the end have P = 0; the last one stands for them, as they may be NaN.
fn add_values(o: ptr<function, Rows>, s: ptr<function, Tile>, v: Place, kv0: u32, x: u32, cluster: u32) {
  for (var j = 0u; j < COLUMNS; j += 1u) {
    var columns = columns_of(v, kv0 + 8u * j, x);
    var weights = (*s)[j];
    add_to(o, &weights, &columns, cluster);
  }
}
