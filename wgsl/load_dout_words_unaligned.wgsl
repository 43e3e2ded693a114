// Elements of dout, and of gradients that are added to: 16 bits, two to a word, at any offset, with any
// strides.

fn load_dout(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  let w = i / 2u;
  return quad(vec4<u32>(dout[w.x], dout[w.y], dout[w.z], dout[w.w]), i, left);
}
fn load_out(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  let w = i / 2u;
  let words = vec4<u32>(atomicLoad(&out[w.x]), atomicLoad(&out[w.y]), atomicLoad(&out[w.z]), atomicLoad(&out[w.w]));
  return quad(words, i, left);
}
