//! The parameter block: declared once here, printed as WGSL and MSL.

use bytemuck::{Pod, Zeroable};

use super::Language;

/// The value of a `*_at` field for "there is none".
pub const NONE: u32 = u32::MAX;

/// Spelling of a field type: Rust, WGSL, MSL, and its bytes.
macro_rules! field_type {
    (u32, rust) => {
        u32
    };
    (f32, rust) => {
        f32
    };
    (view, rust) => {
        [u32; 4]
    };
    (u32, wgsl) => {
        "u32"
    };
    (f32, wgsl) => {
        "f32"
    };
    (view, wgsl) => {
        "vec4<u32>"
    };
    (u32, msl) => {
        "uint"
    };
    (f32, msl) => {
        "float"
    };
    (view, msl) => {
        "uint4"
    };
}

macro_rules! params {
    ($($(#[doc = $doc:literal])+ $name:ident: $ty:ident,)+) => {
        /// What a dispatch tells its kernel besides the buffers; the start of binding 8, before the
        /// `info` of captures and scalars.
        ///
        /// Offsets and strides count elements; fields named `*_at` are [`NONE`] where there is none.
        /// A view is (element offset, batch stride, head stride, row stride); K and V shared by all
        /// batch entries have a batch stride of 0.
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        pub struct Params {
            $($(#[doc = $doc])+ pub $name: field_type!($ty, rust),)+
        }

        const FIELDS: &[Field] = &[$(Field {
            name: stringify!($name),
            wgsl: field_type!($ty, wgsl),
            msl: field_type!($ty, msl),
            doc: concat!($($doc),+),
        },)+];
    };
}

struct Field {
    name: &'static str,
    wgsl: &'static str,
    msl: &'static str,
    doc: &'static str,
}

params! {
    /// entries of q and out
    batch: u32,
    /// heads of q and out
    q_heads: u32,
    /// heads of k and v
    kv_heads: u32,
    /// query heads that share a kv head: q_heads / kv_heads
    group: u32,
    /// rows of q
    q_len: u32,
    /// rows of k and v in memory; how many count is per batch entry, at kv_len_at
    kv_len: u32,
    /// blocks of 128 rows in q_len
    q_blocks: u32,
    /// blocks of 128 columns in kv_len
    kv_blocks: u32,
    /// batch entries of the block mask: batch, or 1 if all share one
    mask_batch: u32,
    /// heads of the block mask: q_heads, or 1
    mask_heads: u32,
    /// in tables: headers of the lists of each query row block
    lists: u32,
    /// in tables: headers of the transposed lists, of each kv block
    lists_t: u32,
    /// in tables: the position of query row 0, an i32 per batch entry
    q_offset_at: u32,
    /// in tables: how many rows of k and v count, per batch entry
    kv_len_at: u32,
    /// in tables: an f32 attention sink per query head, or none
    sinks_at: u32,
    /// decode: parts that kv_len is cut into
    splits: u32,
    /// in stats: lse, or none
    lse_at: u32,
    /// in stats: max, or none
    max_at: u32,
    /// in stats: delta = rowsum(out * dout)
    delta_at: u32,
    /// in stats: the gradient of lse, or none
    dlse_at: u32,
    /// factor of dot(q, k)
    scale: f32,
    /// number of the first workgroup of this dispatch
    first_group: u32,
    /// end of the workgroups that have work
    groups: u32,
    /// workgroups in x per step of y
    fold: u32,
    /// decode: columns in a part, a multiple of 32
    split_len: u32,
    /// gradients: 1 where a launch adds to what is there, 0 where it replaces it
    accumulate: u32,
    /// captured gradients: where this pass writes, in elements
    capture_at: u32,
    /// always 0, which a compiler cannot know: keeps long loops rolled
    zero: u32,
    /// view of q
    q: view,
    /// view of k
    k: view,
    /// view of v
    v: view,
    /// view of out
    out: view,
    /// view of dout
    dout: view,
    /// view of dq
    dq: view,
    /// view of dk
    dk: view,
    /// view of dv
    dv: view,
}

impl Params {
    /// The declaration of the parameter block, as `common.wgsl` and `common.metal` contain it.
    pub fn declaration(language: Language) -> String {
        let mut text = String::from("struct Params {\n");
        let info = match language {
            Language::Wgsl | Language::WgslWeb => ["info: array<vec4<u32>, INFO>,", "}\n"],
            Language::Msl => ["uint4 info[INFO];", "};\n"],
        };
        for field in FIELDS {
            let declared = match language {
                Language::Wgsl | Language::WgslWeb => format!("{}: {},", field.name, field.wgsl),
                Language::Msl => format!("{} {};", field.msl, field.name),
            };
            text += &format!("  {declared:<19} //{}\n", field.doc);
        }
        text += &format!("  {} // captures: dims, then offsets; then scalars\n", info[0]);
        text + info[1]
    }
}
