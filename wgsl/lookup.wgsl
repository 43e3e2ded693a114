// What the block lists say of one block, for kernels that choose the blocks themselves: few queries, all
// of them among the first 32 rows.

const BLOCK: u32 = 128u;
const EMPTY: u32 = 0u;
const PARTIAL: u32 = 1u;
const FULL: u32 = 2u;
const ALL_FULL: u32 = 0xaau;

// The kinds of the four tiles of 32 keys of a block, two bits each, from the list of (b, h).
fn kinds_of(b: u32, h: u32, block: u32) -> u32 {
  let header = p.lists + 4u * (((b % p.mask_batch) * p.mask_heads + h % p.mask_heads) * p.q_blocks);
  // The first run that ends after the block, then the first partial block not before it.
  var first = tables[header];
  var end = tables[header + 1u];
  let runs = end;
  while (first < end) {
    let middle = first + (end - first) / 4u * 2u;
    if (tables[middle + 1u] <= block) { first = middle + 2u; } else { end = middle; }
  }
  if (first < runs) {
    if (tables[first] <= block) { return ALL_FULL; }
  }
  first = tables[header + 2u];
  end = tables[header + 3u];
  let partial_end = end;
  while (first < end) {
    let middle = first + (end - first) / 4u * 2u;
    if (tables[middle] < block) { first = middle + 2u; } else { end = middle; }
  }
  if (first < partial_end) {
    if (tables[first] == block) { return tables[first + 1u] & 0xffu; }
  }
  return 0u;
}
