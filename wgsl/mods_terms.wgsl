// The derivatives of score_mod with respect to what it reads of captured tensors: one term for each
// place that reads one. Terms are sorted by what the place's index depends on: the query row (b, h
// and q only), the column (b, h and kv only), or the pair. Indices count f32 elements of the
// gradients of all captured tensors, which lie one after the other.

//@slot terms
const ROW_TERMS: u32 = 0u;
const COLUMN_TERMS: u32 = 0u;
const PAIR_TERMS: u32 = 0u;
// Of a term, with respect to the element that it reads.
fn row_term(term: u32, score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 { return 0.0; }
fn column_term(term: u32, score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 { return 0.0; }
fn pair_term(term: u32, score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 { return 0.0; }
// The element that a term reads.
fn row_element(term: u32, b: i32, h: i32, q: i32) -> u32 { return 0u; }
fn column_element(term: u32, b: i32, h: i32, kv: i32) -> u32 { return 0u; }
fn pair_element(term: u32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> u32 { return 0u; }
//@end
