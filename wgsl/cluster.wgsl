// Rows spread over a cluster, eight neighbouring lanes of a subgroup: lane x holds the vec4 x + 8 c of each
// row. A product of two rows is then a sum over the lanes: each adds up its vec4, and three exchanges
// add and deal out the sums of eight columns so that lane x gets column x.

const QUADS: u32 = (max(HEAD_QUADS, V_QUADS) + 7u) / 8u;  // vec4 of a row in one lane

alias Line = array<vec4<f32>, QUADS>;   // of a row or a column, in one lane
alias Rows = array<Line, ROWS>;         // the rows of a cluster
alias Columns = array<Line, 8>;
alias Scores = array<f32, ROWS>;        // of the cluster's rows and the lane's column

// The rows of one head of a tensor: where row 0 is, how far they lie apart, and the last one.
struct Place { tensor: u32, base: u32, stride: u32, last: u32 }

// Past the end the last row stands for others, and zeros for vec4.
fn line(place: Place, row: u32, x: u32) -> Line {
  let dim = select(HEAD_DIM, V_DIM, place.tensor >= V);
  let quads = select(HEAD_QUADS, V_QUADS, place.tensor >= V);
  var values = Line();
  for (var c = 0u; c < QUADS; c += 1u) {
    let quad = min(x + 8u * c, quads - 1u);
    let at = place.base + min(row, place.last) * place.stride + 4u * quad;
    values[c] = select(vec4<f32>(0.0), widen(load(place.tensor, at, dim - 4u * quad)), x + 8u * c < quads);
  }
  return values;
}

fn rows_of(place: Place, first: u32, x: u32) -> Rows {
  var rows = Rows();
  for (var i = 0u; i < ROWS; i += 1u) { rows[i] = line(place, first + i, x); }
  return rows;
}

fn columns_of(place: Place, first: u32, x: u32) -> Columns {
  var columns = Columns();
  for (var y = 0u; y < 8u; y += 1u) { columns[y] = line(place, first + y, x); }
  return columns;
}

// Adds up eight sums over the lanes of a cluster. Each lane passes its part of all; lane x gets sum x.
fn deal(low: vec4<f32>, high: vec4<f32>, x: u32) -> f32 {
  let upper = (x & 4u) != 0u;
  let odd_pair = (x & 2u) != 0u;
  let odd = (x & 1u) != 0u;
  let four = select(low, high, upper) + subgroupShuffleXor(select(high, low, upper), 4u);
  let two = select(four.xy, four.zw, odd_pair) + subgroupShuffleXor(select(four.zw, four.xy, odd_pair), 2u);
  return select(two.x, two.y, odd) + subgroupShuffleXor(select(two.y, two.x, odd), 1u);
}

// The products of the cluster's rows and eight columns.
fn product(rows: ptr<function, Rows>, columns: ptr<function, Columns>, x: u32) -> Scores {
  var s = Scores();
  for (var i = 0u; i < ROWS; i += 1u) {
    var low = vec4<f32>(0.0);
    var high = vec4<f32>(0.0);
    for (var c = 0u; c < QUADS; c += 1u) {
      let a = (*rows)[i][c];
      low += vec4<f32>(dot(a, (*columns)[0][c]), dot(a, (*columns)[1][c]), dot(a, (*columns)[2][c]), dot(a, (*columns)[3][c]));
      high += vec4<f32>(dot(a, (*columns)[4][c]), dot(a, (*columns)[5][c]), dot(a, (*columns)[6][c]), dot(a, (*columns)[7][c]));
    }
    s[i] = deal(low, high, x);
  }
  return s;
}

// Adds the weights of eight columns times these to a sum of each row; `cluster` is its first lane.
fn add_to(sums: ptr<function, Rows>, weights: ptr<function, Scores>, columns: ptr<function, Columns>, cluster: u32) {
  for (var i = 0u; i < ROWS; i += 1u) {
    for (var y = 0u; y < 8u; y += 1u) {
      let weight = subgroupShuffle((*weights)[i], cluster + y);
      for (var c = 0u; c < QUADS; c += 1u) { (*sums)[i][c] += weight * (*columns)[y][c]; }
    }
  }
}

// Over the eight lanes of a cluster.
fn cluster_max(x: f32) -> f32 {
  let a = max(x, subgroupShuffleXor(x, 1u));
  let b = max(a, subgroupShuffleXor(a, 2u));
  return max(b, subgroupShuffleXor(b, 4u));
}
fn cluster_sum(x: f32) -> f32 {
  let a = x + subgroupShuffleXor(x, 1u);
  let b = a + subgroupShuffleXor(a, 2u);
  return b + subgroupShuffleXor(b, 4u);
}
