// Elements of q, k, v and out: f32, every offset and stride a multiple of four elements.

alias Word = vec4<f32>;     // an element of the bindings
alias OutWord = vec4<f32>;
alias Quad = vec4<f32>;     // four elements as workgroup memory holds them

fn widen(quad: Quad) -> vec4<f32> { return quad; }

// Four elements from element offset `at`, of a row in which `left` elements remain.
fn load_q(at: u32, left: u32) -> Quad { return q[at / 4u]; }
fn load_k(at: u32, left: u32) -> Quad { return k[at / 4u]; }
fn load_v(at: u32, left: u32) -> Quad { return v[at / 4u]; }

fn store_out(at: u32, left: u32, value: vec4<f32>) { out[at / 4u] = value; }
