// The attention mods: identity score_mod, all-true mask_mod. Positions are global: q is a row plus
// the batch entry's q_offset, h a query head, score = dot(q, k) * scale in natural units.

//@slot captures
//@end

//@slot row
// What the mods need of a row, computed once for all its columns.
struct Row { unused: u32 }
fn row_mod(b: i32, h: i32, q: i32) -> Row { return Row(0u); }
//@end

//@slot score_mod
fn score_mod(score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 { return score; }
//@end

//@slot mask_mod
fn mask_mod(row: Row, b: i32, h: i32, q: i32, kv: i32) -> bool { return true; }
//@end
