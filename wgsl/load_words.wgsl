// Elements of q, k, v and out: 16 bits, two to a word (low half first), every offset and stride a
// multiple of four elements. Works without shader-f16 and for bf16, which WGSL does not have.

alias Word = vec2<u32>;     // an element of the bindings
alias OutWord = vec2<u32>;
alias Quad = vec2<u32>;     // four elements as workgroup memory holds them

//@slot half
//#include half_f16.wgsl
//@end

// Four elements from element offset `at`, of a row in which `left` elements remain.
fn load_q(at: u32, left: u32) -> Quad { return q[at / 4u]; }
fn load_k(at: u32, left: u32) -> Quad { return k[at / 4u]; }
fn load_v(at: u32, left: u32) -> Quad { return v[at / 4u]; }

fn store_out(at: u32, left: u32, value: vec4<f32>) { out[at / 4u] = narrow(value); }
