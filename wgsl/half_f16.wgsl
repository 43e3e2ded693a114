// Four f16 in two words.

fn widen(quad: vec2<u32>) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(quad.x), unpack2x16float(quad.y));
}

// To the nearest f16, ties to even; too large is infinite. pack2x16float is not used: WGSL leaves
// its rounding and its overflow to the driver.
fn narrow(value: vec4<f32>) -> vec2<u32> {
  let bits = bitcast<vec4<u32>>(value);
  let sign = (bits >> vec4<u32>(16u)) & vec4<u32>(0x8000u);
  let magnitude = bits & vec4<u32>(0x7fffffffu);
  // Normal: move the exponent's bias from 127 to 15 and round 13 bits away.
  let odd = (magnitude >> vec4<u32>(13u)) & vec4<u32>(1u);
  let normal = min((magnitude - 0x38000000u + 0xfffu + odd) >> vec4<u32>(13u), vec4<u32>(0x7c00u));
  // Subnormal (below 2^-14): adding 0.5 aligns the last f16 bit with the last f32 bit.
  let subnormal = bitcast<vec4<u32>>(bitcast<vec4<f32>>(magnitude) + 0.5) - 0x3f000000u;
  let finite = select(normal, subnormal, magnitude < vec4<u32>(0x38800000u));
  let half = sign | select(finite, vec4<u32>(0x7e00u), magnitude > vec4<u32>(0x7f800000u));
  return half.xz | (half.yw << vec2<u32>(16u));
}
