//! The kernel files, embedded.

/// Name and text of every file in `wgsl/`.
pub const WGSL_FILES: &[(&str, &str)] = &[
    ("backward.wgsl", include_str!("../../wgsl/backward.wgsl")),
    ("backward_subgroup.wgsl", include_str!("../../wgsl/backward_subgroup.wgsl")),
    ("captured.wgsl", include_str!("../../wgsl/captured.wgsl")),
    ("common.wgsl", include_str!("../../wgsl/common.wgsl")),
    ("coop_f16.wgsl", include_str!("../../wgsl/coop_f16.wgsl")),
    ("coop_f16_16.wgsl", include_str!("../../wgsl/coop_f16_16.wgsl")),
    ("coop_f32.wgsl", include_str!("../../wgsl/coop_f32.wgsl")),
    ("decode.wgsl", include_str!("../../wgsl/decode.wgsl")),
    ("decode_subgroup.wgsl", include_str!("../../wgsl/decode_subgroup.wgsl")),
    ("delta.wgsl", include_str!("../../wgsl/delta.wgsl")),
    ("forward.wgsl", include_str!("../../wgsl/forward.wgsl")),
    ("forward_coop.wgsl", include_str!("../../wgsl/forward_coop.wgsl")),
    ("forward_subgroup.wgsl", include_str!("../../wgsl/forward_subgroup.wgsl")),
    ("half_bf16.wgsl", include_str!("../../wgsl/half_bf16.wgsl")),
    ("half_f16.wgsl", include_str!("../../wgsl/half_f16.wgsl")),
    ("load_dout.wgsl", include_str!("../../wgsl/load_dout.wgsl")),
    ("load_dout_f32_unaligned.wgsl", include_str!("../../wgsl/load_dout_f32_unaligned.wgsl")),
    ("load_dout_words_unaligned.wgsl", include_str!("../../wgsl/load_dout_words_unaligned.wgsl")),
    ("load_f16.wgsl", include_str!("../../wgsl/load_f16.wgsl")),
    ("load_f32.wgsl", include_str!("../../wgsl/load_f32.wgsl")),
    ("load_f32_unaligned.wgsl", include_str!("../../wgsl/load_f32_unaligned.wgsl")),
    ("load_words.wgsl", include_str!("../../wgsl/load_words.wgsl")),
    ("load_words_unaligned.wgsl", include_str!("../../wgsl/load_words_unaligned.wgsl")),
    ("lookup.wgsl", include_str!("../../wgsl/lookup.wgsl")),
    ("merge.wgsl", include_str!("../../wgsl/merge.wgsl")),
    ("mods.wgsl", include_str!("../../wgsl/mods.wgsl")),
    ("mods_grad.wgsl", include_str!("../../wgsl/mods_grad.wgsl")),
    ("mods_terms.wgsl", include_str!("../../wgsl/mods_terms.wgsl")),
    ("pair.wgsl", include_str!("../../wgsl/pair.wgsl")),
    ("recompute.wgsl", include_str!("../../wgsl/recompute.wgsl")),
    ("walk.wgsl", include_str!("../../wgsl/walk.wgsl")),
];

/// Name and text of every file in `msl/`.
pub const MSL_FILES: &[(&str, &str)] = &[
    ("attend.metal", include_str!("../../msl/attend.metal")),
    ("common.metal", include_str!("../../msl/common.metal")),
    ("decode.metal", include_str!("../../msl/decode.metal")),
    ("forward.metal", include_str!("../../msl/forward.metal")),
    ("load_direct.metal", include_str!("../../msl/load_direct.metal")),
    ("load_staged.metal", include_str!("../../msl/load_staged.metal")),
    ("mods.metal", include_str!("../../msl/mods.metal")),
    ("tile.metal", include_str!("../../msl/tile.metal")),
    ("walk.metal", include_str!("../../msl/walk.metal")),
];
