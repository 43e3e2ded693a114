// The smallest kernel that needs what the Metal tier needs: one simdgroup multiplies two 8x8 matrices
// of half ones into floats. Every element of the result is 8.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

[[max_total_threads_per_threadgroup(32)]]
kernel void canary(device float* product [[buffer(0)]]) {  // [8, 8]
  simdgroup_half8x8 ones = make_filled_simdgroup_matrix<half, 8, 8>(half(1));
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(sum, ones, ones, sum);
  simdgroup_store(sum, product, 8);
}
