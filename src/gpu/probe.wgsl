// What the subgroup kernels assume about the order of lanes: one workgroup of 64 writes, per
// invocation, its lane and the size of its subgroup. The host requires lane % 8 == index % 8.

@group(0) @binding(0) var<storage, read_write> seen: array<vec2<u32>>; // [64] of (lane, size)

@compute @workgroup_size(64)
fn probe(
  @builtin(local_invocation_index) index: u32,
  @builtin(subgroup_invocation_id) lane: u32,
  @builtin(subgroup_size) size: u32,
) {
  seen[index] = vec2<u32>(lane, size);
}
