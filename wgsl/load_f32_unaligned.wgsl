// Elements of q, k, v and out: f32 at any offset, with any strides.

alias Word = f32;
alias OutWord = f32;
alias Quad = vec4<f32>;

fn widen(quad: Quad) -> vec4<f32> { return quad; }

// The offsets of four elements from `at`. Past the row's end they stay on its last element, which
// lies in the buffer; `in_row` then drops them.
fn quad_at(at: u32, left: u32) -> vec4<u32> {
  return at + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(left - 1u));
}
fn in_row(quad: vec4<f32>, left: u32) -> Quad {
  return select(vec4<f32>(0.0), quad, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(left));
}

// Four elements from element offset `at`, of a row in which `left` elements remain.
fn load_q(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  return in_row(vec4<f32>(q[i.x], q[i.y], q[i.z], q[i.w]), left);
}
fn load_k(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  return in_row(vec4<f32>(k[i.x], k[i.y], k[i.z], k[i.w]), left);
}
fn load_v(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  return in_row(vec4<f32>(v[i.x], v[i.y], v[i.z], v[i.w]), left);
}

fn store_out(at: u32, left: u32, value: vec4<f32>) {
  for (var e = 0u; e < min(left, 4u); e += 1u) { out[at + e] = value[e]; }
}
