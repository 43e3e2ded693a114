//! The kernel files, embedded. In a page, where every byte is fetched, without comments, and without the kernels
//! of cooperative matrices, which browsers do not offer.

/// A kernel file's text.
#[cfg(not(target_arch = "wasm32"))]
macro_rules! text {
    ($path:literal) => {
        include_str!($path)
    };
}

#[cfg(target_arch = "wasm32")]
macro_rules! text {
    ($path:literal) => {{
        const WHOLE: &str = include_str!($path);
        const LENGTH: usize = without_comments::<0>(WHOLE).1;
        const TEXT: [u8; LENGTH] = without_comments::<LENGTH>(WHOLE).0;
        match std::str::from_utf8(&TEXT) {
            Ok(text) => text,
            Err(_) => "",
        }
    }};
}

/// The first `N` bytes of a text without its comments, and the length of all of it. Marks (`//@slot`, `//#include`) are
/// not comments.
#[cfg(any(test, target_arch = "wasm32"))]
const fn without_comments<const N: usize>(text: &str) -> ([u8; N], usize) {
    let text = text.as_bytes();
    let mut out = [b' '; N];
    let (mut at, mut length) = (0, 0);
    // Blanks are held back until it is known that something follows them.
    let (mut blanks, mut empty, mut comment) = (0, true, false);
    while at < text.len() {
        let byte = text[at];
        let slashes = byte == b'/' && at + 1 < text.len() && text[at + 1] == b'/';
        if slashes && !(at + 2 < text.len() && (text[at + 2] == b'@' || text[at + 2] == b'#')) {
            comment = true;
            while at < text.len() && text[at] != b'\n' {
                at += 1;
            }
            continue;
        }
        at += 1;
        if byte == b' ' {
            blanks += 1;
            continue;
        }
        if byte == b'\n' {
            blanks = 0;
            // The line of a comment goes with it.
            let dropped = empty && comment;
            (empty, comment) = (true, false);
            if dropped {
                continue;
            }
        } else {
            empty = false;
        }
        while blanks > 0 {
            // The array holds blanks already.
            length += 1;
            blanks -= 1;
        }
        if length < N {
            out[length] = byte;
        }
        length += 1;
    }
    (out, length)
}

/// Name and text of every file in `wgsl/`.
pub const WGSL_FILES: &[(&str, &str)] = &[
    ("backward.wgsl", text!("../../wgsl/backward.wgsl")),
    ("backward_subgroup.wgsl", text!("../../wgsl/backward_subgroup.wgsl")),
    ("block_mask.wgsl", text!("../../wgsl/block_mask.wgsl")),
    ("captured.wgsl", text!("../../wgsl/captured.wgsl")),
    ("cluster.wgsl", text!("../../wgsl/cluster.wgsl")),
    ("common.wgsl", text!("../../wgsl/common.wgsl")),
    #[cfg(not(target_arch = "wasm32"))]
    ("coop_f16.wgsl", text!("../../wgsl/coop_f16.wgsl")),
    #[cfg(not(target_arch = "wasm32"))]
    ("coop_f16_16.wgsl", text!("../../wgsl/coop_f16_16.wgsl")),
    #[cfg(not(target_arch = "wasm32"))]
    ("coop_f32.wgsl", text!("../../wgsl/coop_f32.wgsl")),
    ("decode.wgsl", text!("../../wgsl/decode.wgsl")),
    ("decode_subgroup.wgsl", text!("../../wgsl/decode_subgroup.wgsl")),
    ("delta.wgsl", text!("../../wgsl/delta.wgsl")),
    ("forward.wgsl", text!("../../wgsl/forward.wgsl")),
    #[cfg(not(target_arch = "wasm32"))]
    ("forward_coop.wgsl", text!("../../wgsl/forward_coop.wgsl")),
    ("forward_subgroup.wgsl", text!("../../wgsl/forward_subgroup.wgsl")),
    ("half_bf16.wgsl", text!("../../wgsl/half_bf16.wgsl")),
    ("half_f16.wgsl", text!("../../wgsl/half_f16.wgsl")),
    ("load_dout.wgsl", text!("../../wgsl/load_dout.wgsl")),
    ("load_dout_f32_unaligned.wgsl", text!("../../wgsl/load_dout_f32_unaligned.wgsl")),
    ("load_dout_words_unaligned.wgsl", text!("../../wgsl/load_dout_words_unaligned.wgsl")),
    ("load_f16.wgsl", text!("../../wgsl/load_f16.wgsl")),
    ("load_f32.wgsl", text!("../../wgsl/load_f32.wgsl")),
    ("load_f32_unaligned.wgsl", text!("../../wgsl/load_f32_unaligned.wgsl")),
    ("load_words.wgsl", text!("../../wgsl/load_words.wgsl")),
    ("load_words_unaligned.wgsl", text!("../../wgsl/load_words_unaligned.wgsl")),
    ("lookup.wgsl", text!("../../wgsl/lookup.wgsl")),
    ("merge.wgsl", text!("../../wgsl/merge.wgsl")),
    ("mods.wgsl", text!("../../wgsl/mods.wgsl")),
    ("mods_grad.wgsl", text!("../../wgsl/mods_grad.wgsl")),
    ("mods_terms.wgsl", text!("../../wgsl/mods_terms.wgsl")),
    ("online_softmax.wgsl", text!("../../wgsl/online_softmax.wgsl")),
    ("pair.wgsl", text!("../../wgsl/pair.wgsl")),
    ("recompute.wgsl", text!("../../wgsl/recompute.wgsl")),
    ("walk.wgsl", text!("../../wgsl/walk.wgsl")),
];

/// Name and text of every file in `msl/`.
pub const MSL_FILES: &[(&str, &str)] = &[
    ("attend.metal", text!("../../msl/attend.metal")),
    ("backward.metal", text!("../../msl/backward.metal")),
    ("common.metal", text!("../../msl/common.metal")),
    ("decode.metal", text!("../../msl/decode.metal")),
    ("delta.metal", text!("../../msl/delta.metal")),
    ("forward.metal", text!("../../msl/forward.metal")),
    ("load_direct.metal", text!("../../msl/load_direct.metal")),
    ("load_staged.metal", text!("../../msl/load_staged.metal")),
    ("mods.metal", text!("../../msl/mods.metal")),
    ("mods_grad.metal", text!("../../msl/mods_grad.metal")),
    ("product.metal", text!("../../msl/product.metal")),
    ("recompute.metal", text!("../../msl/recompute.metal")),
    ("tile.metal", text!("../../msl/tile.metal")),
    ("walk.metal", text!("../../msl/walk.metal")),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_left_out_and_marks_and_code_stay() {
        const TEXT: &str = "// A kernel.\n//#include common.wgsl\n\nlet a = b / c; // half\n  // alone\n  //@slot x\n    d();\n";
        const LENGTH: usize = without_comments::<0>(TEXT).1;
        let stripped = without_comments::<LENGTH>(TEXT).0;
        let expected = "//#include common.wgsl\n\nlet a = b / c;\n  //@slot x\n    d();\n";
        assert_eq!(std::str::from_utf8(&stripped), Ok(expected));
    }

    #[test]
    fn no_kernel_has_a_string_that_might_hold_slashes() {
        for (name, text) in WGSL_FILES.iter().chain(MSL_FILES) {
            let strings =
                text.lines().filter(|line| line.contains('"') && !line.trim_start().starts_with("//"));
            for line in strings {
                assert!(line.starts_with("#include "), "{name}: {line}");
            }
        }
    }
}
