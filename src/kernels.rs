//! The kernels: which file and entry point computes what, with which tile, bound how.
//!
//! A [`KernelSpec`] names one compiled variant; [`KernelSpec::text`] is its source, complete and ready
//! for any WGSL or MSL compiler. Other engines may take the text and run it themselves: the bindings
//! are those of [`KernelSpec::bindings`], the parameter block is [`Params`].
//!
//! The texts live in `wgsl/` and `msl/`, each file a valid program as it stands; this module only
//! fills their constants and slots (see [`Fill`]).

mod files;
mod fill;
mod msl_gradient;
mod msl_table;
mod params;
mod table;
mod tuning;

use xxhash_rust::xxh3::xxh3_128;

use crate::expr::Expr;
use crate::lower::{self, Layout, Mods};
use crate::{DType, Error, Matrices, Profile, Result, Tier};

pub use files::{MSL_FILES, WGSL_FILES};
pub use fill::Fill;
pub use msl_gradient::{MSL_GRADIENT_TILES, MslGradientRow, MslGradientTile};
pub use msl_table::{Loader, MSL_TILES, MetalTile, MslRow, MslTile};
pub use params::{NONE, Params};
pub use table::{Adapter, REGISTERS, TILES, Tile, TileRow};
pub use tuning::Tuning;

/// A shading language, or a dialect of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Language {
    /// WGSL as naga takes it: native wgpu.
    Wgsl,
    /// WGSL as browsers take it: subgroup operations need `enable subgroups;`.
    WgslWeb,
    /// The Metal Shading Language.
    Msl,
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// out, lse and max of all query rows; needs nothing beyond core WebGPU.
    Forward,
    /// O, m and l of few query rows over one part of many keys.
    DecodeSplit,
    /// The same with subgroup operations, for subgroups of 8 lanes and more.
    DecodeSubgroup,
    /// The parts of [`Kernel::DecodeSplit`] or [`Kernel::DecodeSubgroup`] weighed: out, lse and max.
    DecodeCombine,
    /// The same with subgroup operations, for subgroups of 8 lanes and more.
    ForwardSubgroup,
    /// The same with cooperative matrices: f16, and f32 where the device multiplies that too.
    ForwardCoop,
    /// out, lse and max of rows whose keys were attended to in ranges.
    Merge,
    /// lse with sinks, and delta = rowsum(out * dout) less the gradient of lse: what the other gradient
    /// kernels need of each row.
    Delta,
    /// The gradient of the attention sinks, from what [`Kernel::Delta`] left of each row.
    Dsink,
    /// The gradient of q.
    Dq,
    /// The gradients of k and v.
    Dkv,
    /// The gradient of q with subgroup operations, for subgroups of 8 lanes and more.
    DqSubgroup,
    /// The gradients of k and v with subgroup operations.
    DkvSubgroup,
    /// What score_mod reads of captured tensors per query row or per pair: sums over columns.
    CapturedRows,
    /// What it reads per column: sums over query rows.
    CapturedColumns,
    /// The sums of both, added to the gradients of the captured tensors.
    CapturedScatter,
    /// The tile maps of blocks: what a mask that reads a tensor on the device keeps of each tile.
    BlockMask,
}

impl Kernel {
    /// All of them.
    pub const ALL: &[Kernel] = &[
        Kernel::Forward,
        Kernel::DecodeSplit,
        Kernel::DecodeSubgroup,
        Kernel::DecodeCombine,
        Kernel::ForwardSubgroup,
        Kernel::ForwardCoop,
        Kernel::Merge,
        Kernel::Delta,
        Kernel::Dsink,
        Kernel::Dq,
        Kernel::Dkv,
        Kernel::DqSubgroup,
        Kernel::DkvSubgroup,
        Kernel::CapturedRows,
        Kernel::CapturedColumns,
        Kernel::CapturedScatter,
        Kernel::BlockMask,
    ];

    /// Its file, without the ending that the language adds.
    pub const fn file(self) -> &'static str {
        match self {
            Kernel::Forward => "forward",
            Kernel::DecodeSplit | Kernel::DecodeCombine => "decode",
            Kernel::DecodeSubgroup => "decode_subgroup",
            Kernel::ForwardSubgroup => "forward_subgroup",
            Kernel::ForwardCoop => "forward_coop",
            Kernel::Merge => "merge",
            Kernel::Delta | Kernel::Dsink => "delta",
            Kernel::Dq | Kernel::Dkv => "backward",
            Kernel::DqSubgroup | Kernel::DkvSubgroup => "backward_subgroup",
            Kernel::CapturedRows | Kernel::CapturedColumns | Kernel::CapturedScatter => "captured",
            Kernel::BlockMask => "block_mask",
        }
    }

    /// Its entry point.
    pub const fn entry(self) -> &'static str {
        match self {
            Kernel::Forward => "forward",
            Kernel::DecodeSubgroup => "split_subgroup",
            Kernel::DecodeSplit => "split",
            Kernel::DecodeCombine => "combine",
            Kernel::ForwardSubgroup => "forward_subgroup",
            Kernel::ForwardCoop => "forward_coop",
            Kernel::Merge => "merge",
            Kernel::Delta => "delta",
            Kernel::Dsink => "dsink",
            Kernel::Dq => "dq",
            Kernel::Dkv => "dkv",
            Kernel::DqSubgroup => "dq_subgroup",
            Kernel::DkvSubgroup => "dkv_subgroup",
            Kernel::CapturedRows => "rows",
            Kernel::CapturedColumns => "columns",
            Kernel::CapturedScatter => "scatter",
            Kernel::BlockMask => "block_mask",
        }
    }

    /// Whether it computes gradients, from q, k, v and dout.
    pub const fn is_backward(self) -> bool {
        match self {
            Kernel::Forward
            | Kernel::ForwardSubgroup
            | Kernel::ForwardCoop
            | Kernel::DecodeSplit
            | Kernel::DecodeSubgroup
            | Kernel::DecodeCombine
            | Kernel::Merge
            | Kernel::BlockMask => false,
            Kernel::Delta
            | Kernel::Dsink
            | Kernel::Dq
            | Kernel::Dkv
            | Kernel::DqSubgroup
            | Kernel::DkvSubgroup
            | Kernel::CapturedRows
            | Kernel::CapturedColumns
            | Kernel::CapturedScatter => true,
        }
    }

    /// Whether it needs the derivative of score_mod with respect to the score.
    pub const fn uses_score_grad(self) -> bool {
        matches!(self, Kernel::Dq | Kernel::Dkv | Kernel::DqSubgroup | Kernel::DkvSubgroup)
    }
}

impl Kernel {
    /// Whether it computes out from q, k and v in one pass, so that it may meet all of them in one buffer.
    pub const fn is_forward(self) -> bool {
        matches!(self, Kernel::Forward | Kernel::ForwardSubgroup | Kernel::ForwardCoop)
    }

    /// The kernel of the Portable tier that computes the same, and takes over where this one has no tile.
    pub const fn portable(self) -> Kernel {
        match self {
            Kernel::ForwardSubgroup | Kernel::ForwardCoop => Kernel::Forward,
            Kernel::DecodeSubgroup => Kernel::DecodeSplit,
            Kernel::DqSubgroup => Kernel::Dq,
            Kernel::DkvSubgroup => Kernel::Dkv,
            kernel => kernel,
        }
    }

    /// Whether it reads or writes q, k, v or gradients, in the call's element type.
    pub const fn has_tensors(self) -> bool {
        !matches!(self, Kernel::BlockMask)
    }

    /// Whether it uses subgroup operations, which a device has to be asked for.
    pub const fn uses_subgroups(self) -> bool {
        matches!(
            self,
            Kernel::ForwardSubgroup
                | Kernel::ForwardCoop
                | Kernel::DecodeSubgroup
                | Kernel::DqSubgroup
                | Kernel::DkvSubgroup
        )
    }

    /// Whether it uses cooperative matrices, which browsers do not have.
    pub const fn uses_matrices(self) -> bool {
        matches!(self, Kernel::ForwardCoop)
    }
}

/// How a kernel reads and writes f16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum F16 {
    /// As 32-bit words of two, unpacked when used. Works everywhere, and is what bf16 always does.
    #[default]
    Packed,
    /// As the language's own type: WGSL's needs the device feature `shader-f16`. Only aligned tensors;
    /// others are read as words.
    Native,
}

/// What a binding is, for the pipeline's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BindingKind {
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    ReadWrite,
    /// `var<uniform>`
    Uniform,
}

/// One compiled variant of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSpec {
    /// What is computed.
    pub kernel: Kernel,
    /// Element type of q, k, v and out.
    pub dtype: DType,
    /// How f16 is accessed; without meaning for other types.
    pub f16: F16,
    /// Columns of q and k.
    pub head_dim: u32,
    /// Columns of v and out.
    pub v_dim: u32,
    /// The tile, from [`Tile::choose`].
    pub tile: Tile,
    /// The tile of the Metal kernel; without one the kernel is WGSL, on Metal too.
    pub metal: Option<MetalTile>,
    /// Every offset and every stride of q, k, v and out is a multiple of 4 elements, and so are
    /// head_dim and v_dim.
    pub aligned: bool,
    /// q, k or v lies in the buffer that out lies in, so all of them are bound `read_write`.
    pub pooled: bool,
    /// Of k and of v: which gradients [`Kernel::Dkv`] and [`Kernel::DkvSubgroup`] compute. Both, for others.
    pub dkv: [bool; 2],
    /// The expressions that fill the slots; what is absent stays the identity, or all-true.
    pub mods: Mods,
    /// The order of the captured tensors and scalars that they read.
    pub layout: Layout,
}

impl KernelSpec {
    /// The kernel without mods, for aligned tensors, f16 as words, with the best tile for any adapter
    /// that fits `workgroup_memory` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when no tile fits.
    pub fn new(
        kernel: Kernel,
        dtype: DType,
        head_dim: u32,
        v_dim: u32,
        workgroup_memory: u32,
    ) -> Result<Self> {
        let mut profile = Profile::floor(Tier::Portable);
        profile.limits.workgroup_memory = workgroup_memory;
        profile.matrices = Matrices { f16: 8, f32: 8 };
        Ok(Self {
            kernel,
            dtype,
            f16: F16::Packed,
            head_dim,
            v_dim,
            tile: Tile::choose(kernel, dtype, head_dim, v_dim, &profile)?,
            metal: None,
            aligned: head_dim.is_multiple_of(4) && v_dim.is_multiple_of(4),
            pooled: false,
            dkv: [true; 2],
            mods: Mods::default(),
            layout: Layout::default(),
        })
    }

    /// The same as a Metal kernel, if `msl/` has it; otherwise as it was.
    pub fn on_metal(self, loader: Loader) -> Self {
        let &Self { kernel, dtype, head_dim, v_dim, .. } = &self;
        let metal = match kernel {
            Kernel::Forward => Some(MetalTile::Attend(MslTile::choose(loader, dtype, head_dim, v_dim))),
            Kernel::DecodeSplit | Kernel::DecodeCombine => {
                Some(MetalTile::Attend(MslTile::decode(loader, dtype, head_dim, v_dim)))
            }
            Kernel::Delta => Some(MetalTile::Rows { loader, threads: 64 }),
            Kernel::Dsink => Some(MetalTile::Rows { loader, threads: 32 }),
            Kernel::Dq | Kernel::Dkv => {
                Some(MetalTile::Gradient(MslGradientTile::choose(kernel, loader, dtype, head_dim, v_dim)))
            }
            Kernel::ForwardSubgroup
            | Kernel::ForwardCoop
            | Kernel::DecodeSubgroup
            | Kernel::Merge
            | Kernel::DqSubgroup
            | Kernel::DkvSubgroup
            | Kernel::CapturedRows
            | Kernel::CapturedColumns
            | Kernel::CapturedScatter
            | Kernel::BlockMask => None,
        };
        Self { metal, ..self }
    }

    /// Spells the variant: what pipelines are labelled with.
    pub fn label(&self) -> String {
        let access = match (self.dtype, self.f16, self.aligned) {
            (DType::F16, F16::Native, true) => "-native",
            (_, _, true) => "",
            (_, _, false) => "-unaligned",
        };
        let pooled = if self.pooled { "-pooled" } else { "" };
        let dims = if self.head_dim == self.v_dim {
            format!("d{}", self.head_dim)
        } else {
            format!("d{}x{}", self.head_dim, self.v_dim)
        };
        let tile = self.metal.map_or_else(|| self.tile.to_string(), |tile| tile.to_string());
        let part = match self.dkv {
            [true, true] => "",
            [true, false] => "-dk",
            [false, true] => "-dv",
            [false, false] => "-none",
        };
        format!("{}{part}-{}{access}{pooled}-{dims}-{tile}", self.kernel.entry(), self.dtype.name())
    }

    /// Identifies the variant, the same in every process and release: equal keys, equal text. Made
    /// from the expressions' hashes, so no text is generated for it.
    pub fn key(&self) -> u128 {
        let hash = |expr: &Option<Expr>| expr.as_ref().map(Expr::hash);
        let Mods { score, mask, grad, terms } = &self.mods;
        let content = format!(
            "{}\0{:?}\0{:?}\0{grad}\0{terms:?}\0{:?}",
            self.label(),
            hash(score),
            hash(mask),
            self.layout
        );
        xxh3_128(content.as_bytes())
    }

    /// The entry point's name.
    pub fn entry(&self) -> &'static str {
        self.kernel.entry()
    }

    /// Invocations of one workgroup.
    pub fn workgroup(&self) -> [u32; 3] {
        [self.metal.map_or(self.tile.threads, |tile| tile.threads()), 1, 1]
    }

    /// Query rows of one workgroup.
    pub fn tile_q(&self) -> u32 {
        match self.metal {
            Some(tile) => tile.rows(),
            None => self.tile.tile_q(self.kernel),
        }
    }

    /// Bytes of workgroup memory.
    pub fn workgroup_memory(&self) -> u32 {
        match self.metal {
            Some(tile) => tile.threadgroup_memory(),
            None => self.tile.workgroup_memory(self.kernel, self.dtype, self.v_dim),
        }
    }

    /// What bindings 0 to 8 are. All nine are in the layout of every kernel, in every language.
    pub fn bindings(&self) -> [BindingKind; 9] {
        use BindingKind::{Read, ReadWrite, Uniform};
        let input = if self.pooled { ReadWrite } else { Read };
        match self.kernel {
            Kernel::Forward | Kernel::ForwardSubgroup | Kernel::ForwardCoop => {
                [input, input, input, ReadWrite, ReadWrite, Read, Read, Read, Uniform]
            }
            // Split writes partials and combine reads them, so out never meets q, k and v; merge likewise. The
            // block mask has neither q, k and v nor statistics.
            Kernel::DecodeSplit
            | Kernel::DecodeSubgroup
            | Kernel::DecodeCombine
            | Kernel::Merge
            | Kernel::BlockMask => [Read, Read, Read, ReadWrite, ReadWrite, Read, Read, Read, Uniform],
            Kernel::Delta
            | Kernel::Dsink
            | Kernel::Dq
            | Kernel::Dkv
            | Kernel::DqSubgroup
            | Kernel::DkvSubgroup
            | Kernel::CapturedRows
            | Kernel::CapturedColumns
            | Kernel::CapturedScatter => {
                // Gradients are written to tensors of their own, so nothing is pooled.
                [Read, Read, Read, Read, ReadWrite, Read, Read, ReadWrite, Uniform]
            }
        }
    }

    /// The source text.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a kernel that the language has no file for, [`Error::Compile`] when
    /// a file and this table disagree.
    pub fn text(&self, language: Language) -> Result<String> {
        let (files, ending): (&[(&str, &str)], _) = match language {
            Language::Wgsl | Language::WgslWeb => (WGSL_FILES, "wgsl"),
            Language::Msl => (MSL_FILES, "metal"),
        };
        let file = format!("{}.{ending}", self.kernel.file());
        if !files.iter().any(|(name, _)| *name == file) {
            return Err(Error::unsupported(format!(
                "there is no {file}; the {} kernel runs from its WGSL text",
                self.entry()
            )));
        }
        if language == Language::Msl {
            return self.msl(&file);
        }
        if language == Language::WgslWeb && self.kernel.uses_matrices() {
            return Err(Error::unsupported(format!(
                "the {} kernel uses cooperative matrices, which browsers do not have; use the {} kernel",
                self.entry(),
                Kernel::ForwardSubgroup.entry()
            )));
        }
        let mut fill = Fill::join(&file, files)?;
        if self.kernel.uses_matrices() {
            fill.slot_file("matrices", self.matrices_file(), files)?;
        }
        if language == Language::WgslWeb && self.kernel.uses_subgroups() {
            fill.enable("subgroups");
        }
        if self.kernel.has_tensors() {
            let (load, half) = self.load_files();
            fill.slot_file("load", load, files)?;
            if self.kernel.is_backward() {
                fill.slot_file("load_dout", self.load_dout_file(), files)?;
            }
            if let Some(half) = half {
                fill.slot_file("half", half, files)?;
            }
            if self.pooled && self.kernel.is_forward() {
                for binding in ["q", "k", "v"] {
                    fill.writable(binding)?;
                }
            }
        }
        for (name, value) in self.constants() {
            fill.constant(name, &value.to_string())?;
        }
        if let Kernel::Dkv | Kernel::DkvSubgroup = self.kernel {
            for (name, wanted) in ["DK", "DV"].into_iter().zip(self.dkv) {
                fill.constant(name, &wanted.to_string())?;
            }
        }
        for (slot, text) in lower::slots(&self.mods, &self.layout, language)? {
            fill.slot(slot, &text)?;
        }
        Ok(fill.finish())
    }

    /// The text of a Metal kernel. The two loaders have the same functions, so that a kernel includes
    /// one and gets either.
    fn msl(&self, file: &str) -> Result<String> {
        let metal = self.metal.or_else(|| self.clone().on_metal(Loader::Staged).metal);
        let tile = metal.ok_or_else(|| Error::unsupported(format!("there is no Metal tile for {file}")))?;
        let mut files = MSL_FILES.to_vec();
        if tile.loader() == Loader::Direct {
            let direct = MSL_FILES.iter().find(|(name, _)| *name == "load_direct.metal");
            let staged = files.iter_mut().find(|(name, _)| *name == "load_staged.metal");
            if let (Some((_, direct)), Some((_, text))) = (direct, staged) {
                *text = direct;
            }
        }
        let mut fill = Fill::join(file, &files)?;
        fill.constant("INFO", &self.layout.info_len().to_string())?;
        fill.constant("ALIGNED", &u32::from(self.aligned).to_string())?;
        let element = match self.dtype {
            DType::F32 => "float",
            DType::F16 => "half",
            DType::BF16 => "ushort",
        };
        fill.constant("Elem", element)?;
        for (name, value) in tile.constants(self.head_dim, self.v_dim) {
            fill.constant(name, &value.to_string())?;
        }
        if self.kernel == Kernel::Dkv {
            for (name, wanted) in ["DK", "DV"].into_iter().zip(self.dkv) {
                fill.constant(name, if wanted { "1" } else { "0" })?;
            }
        }
        for (slot, text) in lower::slots(&self.mods, &self.layout, Language::Msl)? {
            fill.slot(slot, &text)?;
        }
        Ok(fill.finish())
    }

    /// The WGSL files for the slots `load` and, in it, `half`.
    fn load_files(&self) -> (&'static str, Option<&'static str>) {
        match (self.dtype, self.aligned, self.f16) {
            (DType::F32, true, _) => ("load_f32.wgsl", None),
            (DType::F32, false, _) => ("load_f32_unaligned.wgsl", None),
            (DType::F16, true, F16::Native) => ("load_f16.wgsl", None),
            (DType::F16, true, F16::Packed) => ("load_words.wgsl", Some("half_f16.wgsl")),
            (DType::F16, false, _) => ("load_words_unaligned.wgsl", Some("half_f16.wgsl")),
            (DType::BF16, true, _) => ("load_words.wgsl", Some("half_bf16.wgsl")),
            (DType::BF16, false, _) => ("load_words_unaligned.wgsl", Some("half_bf16.wgsl")),
        }
    }

    /// The WGSL file for the slot `matrices` of the kernel with cooperative matrices.
    fn matrices_file(&self) -> &'static str {
        match (self.dtype, self.tile.rows) {
            (DType::F32, _) => "coop_f32.wgsl",
            (DType::F16 | DType::BF16, 16) => "coop_f16_16.wgsl",
            (DType::F16 | DType::BF16, _) => "coop_f16.wgsl",
        }
    }

    /// The WGSL file for the slot `load_dout` of the gradient kernels.
    fn load_dout_file(&self) -> &'static str {
        match (self.dtype, self.aligned) {
            (_, true) => "load_dout.wgsl",
            (DType::F32, false) => "load_dout_f32_unaligned.wgsl",
            (DType::F16 | DType::BF16, false) => "load_dout_words_unaligned.wgsl",
        }
    }

    fn constants(&self) -> Vec<(&'static str, u32)> {
        match self.kernel {
            Kernel::ForwardSubgroup => vec![
                ("INFO", self.layout.info_len() as u32),
                ("HEAD_DIM", self.head_dim),
                ("V_DIM", self.v_dim),
                ("THREADS", self.tile.threads),
                ("ROWS", self.tile.rows),
                ("COLUMNS", self.tile.columns),
            ],
            Kernel::ForwardCoop => vec![
                ("INFO", self.layout.info_len() as u32),
                ("HEAD_DIM", self.head_dim),
                ("V_DIM", self.v_dim),
                ("THREADS", self.tile.threads),
                ("CHUNK", 4 * self.tile.chunk),
            ],
            Kernel::Forward => vec![
                ("INFO", self.layout.info_len() as u32),
                ("HEAD_DIM", self.head_dim),
                ("V_DIM", self.v_dim),
                ("THREADS", self.tile.threads),
                ("ROWS", self.tile.rows),
                ("CHUNK", self.tile.chunk),
                ("V_ROWS", self.tile.v_rows),
            ],
            Kernel::DecodeSplit | Kernel::DecodeCombine => vec![
                ("INFO", self.layout.info_len() as u32),
                ("HEAD_DIM", self.head_dim),
                ("V_DIM", self.v_dim),
                ("ROWS", self.tile.rows),
                ("CHUNK", self.tile.chunk),
                ("V_ROWS", self.tile.v_rows),
            ],
            Kernel::Delta | Kernel::Dsink | Kernel::Merge => {
                vec![("INFO", self.layout.info_len() as u32), ("V_DIM", self.v_dim)]
            }
            Kernel::DecodeSubgroup | Kernel::DqSubgroup | Kernel::DkvSubgroup => vec![
                ("INFO", self.layout.info_len() as u32),
                ("HEAD_DIM", self.head_dim),
                ("V_DIM", self.v_dim),
                ("THREADS", self.tile.threads),
                ("ROWS", self.tile.rows),
            ],
            Kernel::Dq
            | Kernel::Dkv
            | Kernel::CapturedRows
            | Kernel::CapturedColumns
            | Kernel::CapturedScatter => vec![
                ("INFO", self.layout.info_len() as u32),
                ("HEAD_DIM", self.head_dim),
                ("V_DIM", self.v_dim),
                ("THREADS", self.tile.threads),
                ("CHUNK", self.tile.chunk),
                ("STAGES", self.tile.stages),
            ],
            Kernel::BlockMask => {
                vec![("INFO", self.layout.info_len() as u32), ("THREADS", self.tile.threads)]
            }
        }
    }
}

/// Every variant that tests, examples and other compilers should see: each kernel, element type,
/// access and table row, without mods.
pub fn all_specs() -> Vec<KernelSpec> {
    let mut specs = Vec::new();
    for row in TILES {
        let takes = |dtype: &&DType| {
            dtype.size() as u32 == row.element && !(row.kernel.uses_matrices() && **dtype == DType::BF16)
        };
        for &dtype in DType::ALL.iter().filter(takes) {
            // A row's largest dims, and others that are no multiple of 4.
            for (head_dim, v_dim) in
                [(row.head_dim.min(576), row.v_dim.min(576)), (row.head_dim.min(67), row.v_dim.min(576) - 3)]
            {
                for (f16, pooled) in [(F16::Packed, false), (F16::Native, false), (F16::Packed, true)] {
                    let aligned = head_dim % 4 == 0 && v_dim % 4 == 0;
                    if f16 == F16::Native && (dtype != DType::F16 || !aligned)
                        || pooled && !row.kernel.is_forward()
                    {
                        continue;
                    }
                    specs.push(KernelSpec {
                        kernel: row.kernel,
                        dtype,
                        f16,
                        head_dim,
                        v_dim,
                        tile: row.tile,
                        metal: None,
                        aligned,
                        pooled,
                        dkv: [true; 2],
                        mods: Mods::default(),
                        layout: Layout::default(),
                    });
                }
            }
        }
    }
    specs
}
