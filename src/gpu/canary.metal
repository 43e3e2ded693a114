// The smallest kernel that needs what the Metal tier needs: one simdgroup multiplies two 8x8 matrices of
// halves into floats, and finds the elements of a matrix in its lanes where the kernels look for them.
// Element i of the result is i.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

[[max_total_threads_per_threadgroup(32)]]
kernel void canary(device float* product [[buffer(0)]],    // [8, 8]
                   uint lane [[thread_index_in_simdgroup]]) {
  const uint row = ((lane / 4u) & 4u) + (lane / 2u) % 4u, col = ((lane / 4u) & 2u) * 2u + (lane % 2u) * 2u;
  simdgroup_half8x8 numbers, identity;
  numbers.thread_elements()[0] = half(8u * row + col);
  numbers.thread_elements()[1] = half(8u * row + col + 1u);
  identity.thread_elements()[0] = half(row == col);
  identity.thread_elements()[1] = half(row == col + 1u);
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(sum, numbers, identity, sum);
  simdgroup_store(sum, product, 8);
}
