// Elements of dout: f32 at any offset, with any strides.

fn load_dout(at: u32, left: u32) -> Quad {
  let i = quad_at(at, left);
  return in_row(vec4<f32>(dout[i.x], dout[i.y], dout[i.z], dout[i.w]), left);
}
