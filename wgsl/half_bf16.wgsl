// Four bf16, the upper halves of f32, in two words.

fn widen(quad: vec2<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>(vec4<u32>(quad.x << 16u, quad.x & 0xffff0000u,
                                      quad.y << 16u, quad.y & 0xffff0000u));
}

// To the nearest bf16, ties to even; NaN stays NaN.
fn narrow(value: vec4<f32>) -> vec2<u32> {
  let bits = bitcast<vec4<u32>>(value);
  let odd = (bits >> vec4<u32>(16u)) & vec4<u32>(1u);
  let nan = (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
  let half = select((bits + 0x7fffu + odd) >> vec4<u32>(16u), vec4<u32>(0x7fc0u), nan);
  return half.xz | (half.yw << vec2<u32>(16u));
}
