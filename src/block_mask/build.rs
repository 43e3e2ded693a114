//! Block masks from expressions.

use super::lists::Lists;
use super::quad_tree::{Boxes, Elements, Grid, Pairs, Pattern, classify};
use super::ranges::Summary;
use super::terms::{Open, Terms};
use super::{BlockMask, BlockShape, Class, MAX_BLOCK};
use crate::error::{Error, Result};
use crate::expr::{Bound, CaptureData, Env, IndexBox, Input, MaskMod, Program, Ranges};
use xxhash_rust::xxh3::Xxh3;

/// A mask that is ready to be built for many shapes.
///
/// [`BlockMask::build`] makes one and drops it. Where lengths grow step by step, as in decoding, keep
/// it: the program and the summaries of captured tensors are made once.
///
/// ```
/// use flexattn::{BlockShape, CompiledMask, masks};
///
/// let window = CompiledMask::new(&masks::sliding_window(1024))?;
/// for kv_len in [5000, 5001, 5002] {
///     let shape = BlockShape { q_offset: &[kv_len as i32 - 1], ..BlockShape::new(1, 1, 1, kv_len) };
///     let step = window.build(&shape, [128, 128])?;
///     assert_eq!(step.kept()?, 1024);
/// }
/// # Ok::<(), flexattn::Error>(())
/// ```
#[derive(Debug)]
pub struct Compiled {
    mask_mod: MaskMod,
    /// The mask.
    program: Program,
    terms: Terms,
    /// An output for each term.
    term_program: Program,
    summaries: Vec<Summary>,
}

impl Compiled {
    /// Prepares a mask.
    ///
    /// # Errors
    ///
    /// What [`MaskMod::check`] reports, and [`Error::Unsupported`] when the mask reads a capture that lives only on a GPU.
    pub fn new(mask_mod: &MaskMod) -> Result<Self> {
        mask_mod.check()?;
        for capture in mask_mod.captures() {
            if let CaptureData::Device(_) = capture.data() {
                return Err(Error::unsupported(format!(
                    "the mask reads `{}`, which lives only on the GPU, but its pairs are looked at on the host here; build block masks with `BlockMask::build_on`, or give the capture as host values",
                    capture.name()
                )));
            }
        }
        Ok(Self::of_any(mask_mod))
    }

    /// Prepares a mask that has been checked. If it reads captures that live only on a GPU, its ranges can be
    /// asked for, but not its pairs.
    pub(super) fn of_any(mask_mod: &MaskMod) -> Self {
        let terms = Terms::of(mask_mod.expr());
        Self {
            program: Program::new(std::slice::from_ref(mask_mod.expr())),
            term_program: Program::new(&terms.terms),
            terms,
            summaries: mask_mod.captures().iter().map(Summary::new).collect(),
            mask_mod: mask_mod.clone(),
        }
    }

    /// The mask.
    pub fn mask_mod(&self) -> &MaskMod {
        &self.mask_mod
    }

    /// The blocks of the mask for one shape, in blocks of `block[0]` rows and `block[1]` columns.
    ///
    /// # Errors
    ///
    /// As [`BlockMask::build_with`].
    pub fn build(&self, shape: &BlockShape<'_>, block: [usize; 2]) -> Result<BlockMask> {
        let sizes = Sizes::new(shape, block, self.mask_mod.expr().inputs().contains(Input::Batch))?;
        let heads = self.heads(&sizes);
        let mut rows = Lists::default();
        for b in 0..sizes.batch {
            let entry = b as usize;
            let grid = Grid { q_len: sizes.q_len, kv_len: sizes.kv_lens[entry], block: sizes.block };
            for h in 0..heads {
                let mut matrix =
                    self.matrix([b, h], sizes.q_len, sizes.kv_lens[entry], sizes.q_offset[entry])?;
                rows.push_cells(grid.blocks()[0], &classify(&grid, &mut matrix))?;
            }
        }
        sizes.finish(heads, rows, Some(self.mask_mod.clone()), true)
    }

    /// Heads that have matrices of their own.
    pub(super) fn heads(&self, sizes: &Sizes) -> u32 {
        if self.mask_mod.expr().inputs().contains(Input::Head) { sizes.heads } else { 1 }
    }

    /// The pairs of one (b, h).
    pub(super) fn matrix(&self, bh: [u32; 2], q_len: u32, kv_len: u32, q_offset: i32) -> Result<Matrix<'_>> {
        Ok(Matrix {
            boxes: self.boxes(bh, q_len, kv_len, q_offset)?,
            shifting: None,
            last: i64::from(q_offset).abs().max(i64::from(q_offset) + i64::from(q_len)).max(kv_len.into()),
            bound: self.program.bind(&self.env(q_len, kv_len)?)?,
        })
    }

    /// The boxes of one (b, h).
    pub(super) fn boxes(
        &self,
        [b, h]: [u32; 2],
        q_len: u32,
        kv_len: u32,
        q_offset: i32,
    ) -> Result<Ranged<'_>> {
        Ok(Ranged {
            terms: &self.terms,
            ranges: self.term_program.bind_ranges(&self.env(q_len, kv_len)?)?,
            orders: Vec::new(),
            b: b.cast_signed(),
            h: h.cast_signed(),
            q_offset,
        })
    }

    fn env(&self, q_len: u32, kv_len: u32) -> Result<Env<'_>> {
        let captures = self.mask_mod.captures();
        let mut env = Env::new(captures, self.mask_mod.scalars(), q_len as usize, kv_len as usize)?;
        for (capture, summary) in captures.iter().zip(&self.summaries) {
            env = env.with_ranges(capture.name(), summary);
        }
        Ok(env)
    }
}

/// A checked [`BlockShape`] with offsets and lengths for each batch entry of the mask.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    /// Batch entries that have matrices of their own.
    pub(super) batch: u32,
    /// Query heads, all of them.
    pub(super) heads: u32,
    pub(super) q_len: u32,
    pub(super) kv_len: u32,
    pub(super) block: [u32; 2],
    pub(super) q_offset: Vec<i32>,
    pub(super) kv_lens: Vec<u32>,
}

impl Sizes {
    /// `per_batch` says that the mask depends on the batch index.
    pub(super) fn new(shape: &BlockShape<'_>, block: [usize; 2], per_batch: bool) -> Result<Self> {
        let index = |name: &str, value: usize| match i32::try_from(value) {
            Ok(value) => Ok(value.cast_unsigned()),
            Err(_) => Err(Error::overflow(format!(
                "{name} is {value} but indices are 32 bits: at most {}; split the call",
                i32::MAX
            ))),
        };
        let (batch, heads) = (index("batch", shape.batch)?, index("heads", shape.heads)?);
        let (q_len, kv_len) = (index("q_len", shape.q_len)?, index("kv_len", shape.kv_len)?);
        if batch == 0 || heads == 0 {
            return Err(Error::shape(format!(
                "batch is {batch} and heads is {heads} but both must be at least 1; drop the call"
            )));
        }
        for (name, side) in [("block_q", block[0]), ("block_kv", block[1])] {
            if !(1..=MAX_BLOCK as usize).contains(&side) {
                return Err(Error::shape(format!(
                    "{name} is {side} but must be 1 to {MAX_BLOCK}; kernels use 128"
                )));
            }
        }
        let mut q_offset = per_entry("q_offset", shape.q_offset, 0, shape.batch)?;
        let mut kv_lens = per_entry("kv_lens", shape.kv_lens, kv_len, shape.batch)?;
        if let Some(len) = kv_lens.iter().find(|&&len| len > kv_len) {
            return Err(Error::shape(format!(
                "a kv_len of {len} exceeds the kv_len = {kv_len} of the tensors; shorten it"
            )));
        }
        if let Some(offset) = q_offset.iter().find(|&&offset| offset.checked_add_unsigned(q_len).is_none()) {
            return Err(Error::overflow(format!(
                "q_offset is {offset} but q_offset + q_len = {q_len} must stay below 2^31; use smaller positions"
            )));
        }
        let alike = |b: usize| q_offset[b] == q_offset[0] && kv_lens[b] == kv_lens[0];
        let batch = if per_batch || !(0..shape.batch).all(alike) { batch } else { 1 };
        q_offset.truncate(batch as usize);
        kv_lens.truncate(batch as usize);
        Ok(Self { batch, heads, q_len, kv_len, block: block.map(|side| side as u32), q_offset, kv_lens })
    }

    /// The mask of these rows.
    pub(super) fn finish(
        self,
        heads: u32,
        rows: Lists,
        mask_mod: Option<MaskMod>,
        derived: bool,
    ) -> Result<BlockMask> {
        let [row_count, column_count] =
            [self.q_len.div_ceil(self.block[0]), self.kv_len.div_ceil(self.block[1])];
        let matrices = self.batch as usize * heads as usize;
        let transposed = rows.transpose(matrices, row_count, column_count, u32::MAX as usize)?;
        Ok(BlockMask {
            batch: self.batch,
            heads,
            q_len: self.q_len,
            kv_len: self.kv_len,
            block: self.block,
            q_offset: self.q_offset,
            kv_lens: self.kv_lens,
            rows,
            transposed,
            mask_mod,
            derived,
        })
    }
}

/// One value for each batch entry from none, one or one each.
fn per_entry<T: Copy>(name: &str, values: &[T], default: T, batch: usize) -> Result<Vec<T>> {
    match values {
        [] => Ok(vec![default; batch]),
        [one] => Ok(vec![*one; batch]),
        _ if values.len() == batch => Ok(values.to_vec()),
        _ => Err(Error::shape(format!(
            "{name} has {} values but must have none, one, or one for each of batch = {batch}",
            values.len()
        ))),
    }
}

/// Sets of terms for which the operations to compute are kept.
const ORDERS: usize = 32;

/// The boxes of one (b, h), as range analysis knows them.
#[derive(Debug)]
pub(super) struct Ranged<'a> {
    terms: &'a Terms,
    ranges: Ranges<'a>,
    /// The sets of terms met so far.
    orders: Vec<Order>,
    b: i32,
    h: i32,
    q_offset: i32,
}

/// The pairs of one (b, h), as range analysis and as elements.
#[derive(Debug)]
pub(super) struct Matrix<'a> {
    boxes: Ranged<'a>,
    /// The terms that depend on no more than q - kv, once asked for.
    shifting: Option<Open>,
    /// No position is larger, either way.
    last: i64,
    bound: Bound<'a, f32>,
}

/// What to compute for a set of terms.
#[derive(Debug)]
struct Order {
    open: Open,
    steps: Vec<u32>,
    /// The steps through which q, or kv, reaches the terms.
    rows: Vec<u32>,
    columns: Vec<u32>,
}

impl Ranged<'_> {
    /// The place of a set of terms in `orders`, or of `wanted`, which is added if neither is there.
    fn order(&mut self, open: Open, wanted: Open) -> usize {
        if let Some(order) = self.orders.iter().position(|order| order.open == open || order.open == wanted) {
            return order;
        }
        self.orders.push(Order {
            open: wanted,
            steps: self.ranges.order(wanted),
            rows: self.ranges.sources(wanted, Input::Q, Input::Kv),
            columns: self.ranges.sources(wanted, Input::Kv, Input::Q),
        });
        self.orders.len() - 1
    }

    /// The hash of the values of these steps in the box asked last, if each has only one.
    fn constants(&self, steps: &[u32]) -> Option<u64> {
        let mut hash = Xxh3::new();
        for &step in steps {
            hash.update(&self.ranges.constant(step)?.to_bits().to_le_bytes());
        }
        Some(hash.digest())
    }

    fn position(&self, q: u32) -> i32 {
        // Checked by `Sizes::new` for all rows.
        self.q_offset.wrapping_add_unsigned(q)
    }
}

impl Boxes for Ranged<'_> {
    fn all(&self) -> Open {
        self.terms.all()
    }

    fn range(&mut self, pairs: &Pairs, open: Open) -> (Class, Open) {
        let q = (self.position(pairs.q[0]), self.position(pairs.q[1] - 1));
        let kv = (pairs.kv[0].cast_signed(), (pairs.kv[1] - 1).cast_signed());
        // Masks of many terms can meet very many sets: from some number on, all terms are computed.
        let wanted = if self.orders.len() < ORDERS { open } else { self.terms.all() };
        let order = self.order(open, wanted);
        let at = IndexBox { b: (self.b, self.b), h: (self.h, self.h), q, kv };
        self.ranges.range_in(&self.orders[order].steps, &at);
        let decided = |value: bool| if value { Class::Full } else { Class::Empty };
        let mut left = open;
        let mut rest = open;
        while rest != 0 {
            let term = rest.trailing_zeros();
            rest &= rest - 1;
            let found = self.ranges.output(term as usize);
            let value = match (found.never(), found.always()) {
                (true, _) => false,
                (_, true) => true,
                _ => continue,
            };
            if value == self.terms.deciding {
                return (decided(value), 0);
            }
            left &= !(1 << term);
        }
        match left {
            0 => (decided(!self.terms.deciding), 0),
            _ => (Class::Partial, left),
        }
    }
}

impl Matrix<'_> {
    /// Which pairs of a stretch of one row are kept.
    pub(super) fn mask_row(&mut self, q: u32, kv: [u32; 2]) -> &[bool] {
        let Ranged { b, h, .. } = self.boxes;
        let position = self.boxes.position(q);
        self.bound.row(b, h, position, kv[0].cast_signed(), &[], (kv[1] - kv[0]) as usize);
        self.bound.output(0).bools()
    }
}

impl Boxes for Matrix<'_> {
    fn all(&self) -> Open {
        self.boxes.all()
    }

    fn range(&mut self, pairs: &Pairs, open: Open) -> (Class, Open) {
        self.boxes.range(pairs, open)
    }
}

impl Elements for Matrix<'_> {
    fn pattern(&mut self, pairs: &Pairs, open: Open) -> Option<Pattern> {
        let boxes = &mut self.boxes;
        let shifting = *self.shifting.get_or_insert_with(|| boxes.terms.shifting(self.last));
        if open & !shifting == 0 {
            return Some(Pattern::Diagonal(open, i64::from(pairs.q[0]) - i64::from(pairs.kv[0])));
        }
        if boxes.orders.len() >= ORDERS {
            return None;
        }
        let order = boxes.order(open, open);
        let order = &boxes.orders[order];
        if let Some(values) = boxes.constants(&order.columns) {
            return Some(Pattern::Rows(open, pairs.q[0], values));
        }
        let values = boxes.constants(&order.rows)?;
        Some(Pattern::Columns(open, pairs.kv[0], values))
    }

    fn keeps(&mut self, q: u32, kv: u32, open: Open) -> bool {
        // The range of one position mostly is one value, and cheaper than a row of one.
        match self.range(&Pairs { q: [q, q + 1], kv: [kv, kv + 1] }, open) {
            (Class::Full, _) => true,
            (Class::Empty, _) => false,
            (Class::Partial, _) => self.mask_row(q, [kv, kv + 1]).first() == Some(&true),
        }
    }

    fn row(&mut self, q: u32, kv: [u32; 2]) -> (bool, bool) {
        let keep = self.mask_row(q, kv);
        (keep.contains(&true), !keep.contains(&false))
    }
}
