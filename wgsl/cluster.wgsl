// Over the eight lanes of a cluster.
fn cluster_max(x: f32) -> f32 {
  let a = max(x, subgroupShuffleXor(x, 1u));
  let b = max(a, subgroupShuffleXor(a, 2u));
  return max(b, subgroupShuffleXor(b, 4u));
}
fn cluster_sum(x: f32) -> f32 {
  let a = x + subgroupShuffleXor(x, 1u);
  let b = a + subgroupShuffleXor(a, 2u);
  return b + subgroupShuffleXor(b, 4u);
}
