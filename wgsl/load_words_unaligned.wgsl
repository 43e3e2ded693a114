// Elements of q, k, v and out: 16 bits, two to a word (low half first), at any offset, with any
// strides.

alias Word = u32;
alias OutWord = atomic<u32>;
alias Quad = vec2<u32>;     // four elements as workgroup memory holds them

//@slot half
//#include half_f16.wgsl
//@end

// The offsets of four elements from `at`. Past the row's end they stay on its last element, which
// lies in the buffer; `quad` then drops them.
fn quad_at(at: u32, left: u32) -> vec4<u32> {
  return at + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(left - 1u));
}
// Four elements, each the half of its word that the parity of its offset names.
fn quad(words: vec4<u32>, at: vec4<u32>, left: u32) -> Quad {
  let halves = (words >> (16u * (at & vec4<u32>(1u)))) & vec4<u32>(0xffffu);
  let kept = select(vec4<u32>(0u), halves, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(left));
  return kept.xz | (kept.yw << vec2<u32>(16u));
}

// Four elements from element offset `at`, of a row in which `left` elements remain.
fn load_q(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  let w = i / 2u;
  return quad(vec4<u32>(q[w.x], q[w.y], q[w.z], q[w.w]), i, left);
}
fn load_k(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  let w = i / 2u;
  return quad(vec4<u32>(k[w.x], k[w.y], k[w.z], k[w.w]), i, left);
}
fn load_v(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  let w = i / 2u;
  return quad(vec4<u32>(v[w.x], v[w.y], v[w.z], v[w.w]), i, left);
}

// A word may be shared with a neighbour (odd v_dim, odd offsets): each half is cleared and set
// atomically by the one invocation that owns it.
fn store_out(at: u32, left: u32, value: vec4<f32>) {
  let words = narrow(value);
  for (var e = 0u; e < min(left, 4u); e += 1u) {
    let half = (words[e / 2u] >> (16u * (e % 2u))) & 0xffffu;
    let shift = 16u * ((at + e) % 2u);
    atomicAnd(&out[(at + e) / 2u], 0xffff0000u >> shift);
    atomicOr(&out[(at + e) / 2u], half << shift);
  }
}
