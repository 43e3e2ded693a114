// Elements of dout, and of gradients that are added to: f32 at any offset, with any strides.

fn load_dout(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  return in_row(vec4<f32>(dout[i.x], dout[i.y], dout[i.z], dout[i.w]), left);
}
fn load_out(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  return in_row(vec4<f32>(out[i.x], out[i.y], out[i.z], out[i.w]), left);
}
