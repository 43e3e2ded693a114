// What the gradient kernels compute again of a 32 x 32 tile: S = q k^T and dP = dout v^T, and of each
// pair P and dPost. The invocations form a grid of 8 columns and GRID rows; invocation (tx, ty) has the
// rows ty + GRID i and the columns tx + 8 j of the tile. Rows are query rows and columns kv rows, or the
// other way round.

//#include pair.wgsl

const GRID: u32 = THREADS / 8u;
const ROWS: u32 = TILE / GRID;                           // of one invocation: the more, the more registers
const COLUMNS: u32 = 4u;
const STRIDE: u32 = CHUNK + 1u;                         // odd, so that rows start in different banks
const RESIDENT: bool = STAGES == 3u && max(HEAD_QUADS, V_QUADS) <= CHUNK;

// The operands of a product, a chunk of 32 rows each: first those of S, then of dP, then the columns'.
var<workgroup> staged: array<Quad, STAGES * TILE * STRIDE>;
const S_ROWS: u32 = 0u;
const DP_ROWS: u32 = (STAGES - 2u) * TILE * STRIDE;
const OTHER: u32 = (STAGES - 1u) * TILE * STRIDE;

// 32 rows of a tensor: where row 0 is, how far rows lie apart, and which of `count` rows come first.
struct Rows { tensor: u32, base: u32, stride: u32, first: u32, count: u32 }

// Stages chunk `chunk` of the rows at `to`. Rows past the end are zero: what lies there may be NaN.
fn stage(to: u32, rows: Rows, chunk: u32, local: u32) {
  let dim = select(HEAD_DIM, V_DIM, rows.tensor >= V);
  for (var i = local; i < TILE * CHUNK + p.zero; i += THREADS) {
    let quad = chunk * CHUNK + i % CHUNK;
    let row = rows.first + i / CHUNK;
    var value = Quad();
    if (row < rows.count && 4u * quad < dim) {
      value = load(rows.tensor, rows.base + row * rows.stride + 4u * quad, dim - 4u * quad);
    }
    staged[to + (i / CHUNK) * STRIDE + i % CHUNK] = value;
  }
}

// A 32 x 32 product of rows and columns over the head dimension, chunk by chunk. The last chunk of
// the columns stays staged.
fn product(at: u32, rows: Rows, columns: Rows, local: u32) -> array<vec4<f32>, ROWS> {
  let quads = select(HEAD_QUADS, V_QUADS, rows.tensor >= V);
  let tx = local % 8u;
  let ty = local / 8u;
  var s = array<vec4<f32>, ROWS>();
  for (var i = 0u; i < ROWS; i += 1u) { s[i] = vec4<f32>(0.0); }
  for (var quad0 = 0u; quad0 < quads + p.zero; quad0 += CHUNK) {
    workgroupBarrier();
    if (!RESIDENT) { stage(at, rows, quad0 / CHUNK, local); }
    stage(OTHER, columns, quad0 / CHUNK, local);
    workgroupBarrier();
    for (var d = 0u; d < min(CHUNK, quads - quad0); d += 1u) {
      let b0 = widen(staged[OTHER + tx * STRIDE + d]);
      let b1 = widen(staged[OTHER + (tx + 8u) * STRIDE + d]);
      let b2 = widen(staged[OTHER + (tx + 16u) * STRIDE + d]);
      let b3 = widen(staged[OTHER + (tx + 24u) * STRIDE + d]);
      for (var i = 0u; i < ROWS; i += 1u) {
        let a = widen(staged[at + (ty + GRID * i) * STRIDE + d]);
        s[i] += vec4<f32>(dot(a, b0), dot(a, b1), dot(a, b2), dot(a, b3));
      }
    }
  }
  return s;
}
