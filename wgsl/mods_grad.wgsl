// The derivative of score_mod with respect to the score: 1 for the identity.

//@slot score_grad
fn score_grad(score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 { return 1.0; }
//@end
