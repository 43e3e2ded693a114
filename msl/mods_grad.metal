// The derivative of score_mod with respect to the score: 1 for the identity.
#pragma once
#include "mods.metal"

//@slot score_grad
inline float score_grad(thread const Ctx& ctx, float score, Row row, int b, int h, int q, int kv) { return 1.0f; }
//@end
