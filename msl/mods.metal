// The attention mods: identity score_mod, all-true mask_mod. Positions are global: q is a row plus
// the batch entry's q_offset, h a query head, score = dot(q, k) * scale in natural units.
#pragma once
#include "common.metal"

//@slot captures
//@end

//@slot row
// What the mods need of a row, computed once for all its columns.
struct Row { uint unused; };
inline Row row_mod(thread const Ctx& ctx, int b, int h, int q) { return Row{0u}; }
//@end

//@slot score_mod
inline float score_mod(thread const Ctx& ctx, float score, Row row, int b, int h, int q, int kv) { return score; }
//@end

//@slot mask_mod
inline bool mask_mod(thread const Ctx& ctx, Row row, int b, int h, int q, int kv) { return true; }
//@end
