// block_mask: what a mask keeps of each tile of a block, for masks that read a tensor which lives only on
// the GPU.
//
// A workgroup looks at the 128 x 128 pairs of one block of one batch entry and query head, one of those that
// `tables` lists, and writes its tile map: two bits for each of 4 x 4 tiles of 32 x 32, at
// 2 * (4 * q tile + kv tile): 0 where no pair is kept (empty), 1 where some are (partial), 2 where every pair
// that exists is (full). A tile of no pairs is empty.
// Invocation `local` has column local % 32 of each tile, and every (THREADS / 32)-th row of the block.

//#include common.wgsl
//#include mods.wgsl

const THREADS: u32 = 64u;

const BLOCK: u32 = 128u;
const TILE: u32 = 32u;

@group(0) @binding(3) var<storage, read_write> maps: array<u32>;      // a tile map for each block that is listed
@group(0) @binding(7) var<storage, read> large: array<u32>;           // one large captured tensor, in place

var<workgroup> seen: array<u32, THREADS>;  // of each invocation: tiles with a pair that is kept, then with one that is not

@compute @workgroup_size(THREADS)
fn block_mask(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let n = workgroup.x + workgroup.y * p.fold + p.first_group;
  if (n >= p.groups) { return; }
  let block = tables[p.lists + n];              // counted over batch entries, heads, block rows and block columns
  let kv_first = block % p.kv_blocks * BLOCK;
  let q_first = block / p.kv_blocks % p.q_blocks * BLOCK;
  let matrix = block / p.kv_blocks / p.q_blocks;
  let b = matrix / p.mask_heads;
  let h = matrix % p.mask_heads;
  let kv_len = kv_len_of(b);

  var found = 0u;
  let rows = min(BLOCK, p.q_len - q_first);
  for (var r = local / TILE; r < rows; r += THREADS / TILE) {
    let q = i32(q_first + r) + q_offset_of(b);
    let row = row_mod(i32(b), i32(h), q);
    for (var c = 0u; c < BLOCK / TILE; c += 1u) {
      let kv = kv_first + TILE * c + local % TILE;
      let tile = BLOCK / TILE * (r / TILE) + c;
      // A tile of which both have been met is settled.
      if (kv < kv_len && ((found >> tile) & 0x10001u) != 0x10001u) {
        found |= select(0x10000u, 1u, mask_mod(row, i32(b), i32(h), q, i32(kv))) << tile;
      }
    }
  }
  seen[local] = found;
  workgroupBarrier();
  if (local == 0u) {
    for (var i = 1u; i < THREADS; i += 1u) { found |= seen[i]; }
    var map = 0u;
    for (var tile = 0u; tile < 16u; tile += 1u) {
      let kept = (found >> tile) & 1u;
      let dropped = (found >> (tile + 16u)) & 1u;
      map |= (kept * (2u - dropped)) << (2u * tile);
    }
    maps[n] = map;
  }
}
