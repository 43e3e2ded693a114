//! What a kernel costs on a problem, counted while it runs and gives the right answer.

use flexattn::expr::{Env, Point, Program};
use flexattn::kernels::Loader;
use flexattn::reference::{self, Problem};
use flexattn::{
    Attention, AttentionShape, DType, Error, Layout, MaskMod, Result, Saved, ScoreMod, Tensor, Tier, Wanted,
};

use crate::emulator::{Emulator, Record};
use crate::launch::{Counters, Options};

/// Which kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// The Metal kernels, with this loader.
    Msl(Loader),
    /// The WGSL kernels of a lower tier, in naga's MSL.
    Wgsl(Tier),
}

impl Kernels {
    /// `staged`, `direct`, `portable`, `subgroup` or `coop-matrix`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for other names.
    pub fn from_name(name: &str) -> Result<Self> {
        if let Some(loader) = Loader::ALL.into_iter().find(|loader| loader.name() == name) {
            return Ok(Self::Msl(loader));
        }
        match Tier::from_name(name)? {
            Tier::Metal => Ok(Self::Msl(Loader::Staged)),
            tier => Ok(Self::Wgsl(tier)),
        }
    }

    /// The name that [`Kernels::from_name`] takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Msl(loader) => loader.name(),
            Self::Wgsl(tier) => tier.name(),
        }
    }

    /// An emulated GPU that runs them.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when there is no clang.
    pub fn emulator(self) -> Result<Emulator> {
        match self {
            Self::Msl(loader) => Emulator::metal(loader),
            Self::Wgsl(tier) => Emulator::new(tier),
        }
    }
}

/// A call to measure: one batch entry, contiguous tensors.
#[derive(Clone, Debug)]
pub struct Case {
    /// Which kernels run.
    pub kernels: Kernels,
    /// Element type.
    pub dtype: DType,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Query rows.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Columns of q, k, v and out.
    pub head_dim: usize,
    /// What the mods see as the position of row 0.
    pub q_offset: i32,
    /// The mask; none keeps all.
    pub mask: Option<MaskMod>,
    /// The score mod; none leaves scores.
    pub score: Option<ScoreMod>,
}

impl Case {
    /// One head, as many keys as queries, no mods.
    pub fn square(kernels: Kernels, dtype: DType, len: usize, head_dim: usize) -> Self {
        Self {
            kernels,
            dtype,
            q_heads: 1,
            kv_heads: 1,
            q_len: len,
            kv_len: len,
            head_dim,
            q_offset: 0,
            mask: None,
            score: None,
        }
    }

    /// A step of decoding: one query of 8 heads on 2 key heads, the last of `kv_len` positions.
    pub fn decode(kernels: Kernels, dtype: DType, kv_len: usize, head_dim: usize) -> Self {
        let square = Self::square(kernels, dtype, kv_len, head_dim);
        Self { q_heads: 8, kv_heads: 2, q_len: 1, q_offset: kv_len as i32 - 1, ..square }
    }

    /// Bytes of k and of v, which every key head's queries share.
    pub fn kv_bytes(&self) -> u64 {
        (2 * self.kv_heads * self.kv_len * self.head_dim * self.dtype.size()) as u64
    }

    /// Runs it, checks out against the reference, and gives what each dispatch did.
    ///
    /// # Errors
    ///
    /// What the emulator or the plan reports; [`Error::Compile`] when out is wrong.
    pub fn measure(&self) -> Result<Vec<Measurement>> {
        let emulator = self.kernels.emulator()?;
        emulator.set_options(Options { count_unique: true, ..Options::default() });
        self.measure_on(&emulator)
    }

    /// The same on an emulator with options of its own.
    ///
    /// # Errors
    ///
    /// As [`Case::measure`].
    pub fn measure_on(&self, emulator: &Emulator) -> Result<Vec<Measurement>> {
        let inputs = Inputs::new(self, emulator)?;
        let output = self.attention().forward(emulator, &inputs.q, &inputs.k, &inputs.v)?;
        let gold = reference::forward(&inputs.problem(self)?)?.out;
        let records = emulator.take_records();
        self.compare("out", &output.out, &gold, 1.0, &records)?;
        self.measurements(records)
    }

    /// Runs the gradients of q, k and v, after a forward call on a sound emulator, checks them against
    /// the reference, and gives what each dispatch did.
    ///
    /// # Errors
    ///
    /// As [`Case::measure`].
    pub fn measure_backward(&self) -> Result<Vec<Measurement>> {
        let emulator = self.kernels.emulator()?;
        emulator.set_options(Options { count_unique: true, ..Options::default() });
        self.measure_backward_on(&emulator)
    }

    /// The same on an emulator with options of its own.
    ///
    /// # Errors
    ///
    /// As [`Case::measure`].
    pub fn measure_backward_on(&self, emulator: &Emulator) -> Result<Vec<Measurement>> {
        let sound = self.kernels.emulator()?;
        let inputs = Inputs::new(self, &sound)?;
        let attention = self.attention().with_lse(true);
        let output = attention.forward(&sound, &inputs.q, &inputs.k, &inputs.v)?;
        let dout_shape = output.out.shape();
        let dout = numbers(dout_shape.iter().product(), 4, self.dtype);
        let dlse = numbers(self.q_heads * self.q_len, 5, DType::F32);
        let gold = reference::backward(&inputs.problem(self)?, &dout, &dlse)?;
        let dout = tensor(emulator, self.dtype, &dout, dout_shape)?;
        let dlse = tensor(emulator, DType::F32, &dlse, [1, self.q_heads, self.q_len, 1])?;
        let saved = Saved::new(&inputs.q, &inputs.k, &inputs.v, &output)?;
        let found = attention.backward(emulator, &saved, &dout, Some(&dlse), &Wanted::qkv())?;
        let records = emulator.take_records();
        for (name, tensor, gold) in
            [("dq", &found.dq, &gold.dq), ("dk", &found.dk, &gold.dk), ("dv", &found.dv, &gold.dv)]
        {
            let tensor = tensor.as_ref().ok_or_else(|| Error::unsupported(format!("there is no {name}")))?;
            let largest = gold.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
            self.compare(name, tensor, gold, largest, &records)?;
        }
        self.measurements(records)
    }

    fn attention(&self) -> Attention {
        let mut attention = Attention::new().q_offset(self.q_offset);
        if let Some(mask) = &self.mask {
            attention = attention.mask_mod(mask.clone());
        }
        if let Some(score) = &self.score {
            attention = attention.score_mod(score.clone());
        }
        attention
    }

    /// An error when `tensor` is not `gold`, whose largest value is `scale`.
    fn compare(
        &self,
        name: &str,
        tensor: &Tensor<Emulator>,
        gold: &[f64],
        scale: f64,
        records: &[Record],
    ) -> Result<()> {
        let got = tensor.read()?;
        let error = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs();
        // A NaN is larger than anything.
        let largest = |worst: f64, error: f64| if worst.is_nan() || error <= worst { worst } else { error };
        let error = got.iter().zip(gold).map(error).fold(0.0, largest) / scale;
        let allowed = match self.dtype {
            DType::F32 => 1e-5,
            DType::F16 => 1e-3,
            DType::BF16 => 1e-2,
        };
        if error <= allowed {
            return Ok(());
        }
        let label = records.first().map_or(name, |record| record.label.as_str());
        Err(Error::compile(label, format!("{name} differs from the reference by {error}")))
    }

    fn measurements(&self, records: Vec<Record>) -> Result<Vec<Measurement>> {
        let kept = self.kept_pairs()?;
        Ok(records.into_iter().map(|record| Measurement::new(self, record, kept)).collect())
    }

    /// Pairs of query and key that the mask keeps, over all heads.
    fn kept_pairs(&self) -> Result<u64> {
        let Some(mask) = &self.mask else { return Ok((self.q_heads * self.q_len * self.kv_len) as u64) };
        let program = Program::new(&[mask.expr().clone()]);
        let env = Env::new(mask.captures(), mask.scalars(), self.q_len, self.kv_len)?;
        let mut bound = program.bind::<f64>(&env)?;
        let mut kept = 0;
        for (h, q) in (0..self.q_heads as i32).flat_map(|h| (0..self.q_len as i32).map(move |q| (h, q))) {
            for kv in 0..self.kv_len as i32 {
                bound.point(&Point { score: 0.0, b: 0, h, q: q + self.q_offset, kv });
                kept += u64::from(bound.output(0).bools()[0]);
            }
        }
        Ok(kept)
    }
}

/// q, k and v of a [`Case`], here and on an emulator.
struct Inputs {
    layouts: [Layout; 3],
    values: [Vec<f32>; 3],
    q_offset: [i32; 1],
    q: Tensor<Emulator>,
    k: Tensor<Emulator>,
    v: Tensor<Emulator>,
}

impl Inputs {
    fn new(case: &Case, emulator: &Emulator) -> Result<Self> {
        let &Case { dtype, q_heads, kv_heads, q_len, kv_len, head_dim, .. } = case;
        let q_shape = [1, q_heads, q_len, head_dim];
        let kv_shape = [1, kv_heads, kv_len, head_dim];
        let values = [(q_shape, 1), (kv_shape, 2), (kv_shape, 3)]
            .map(|(shape, seed)| numbers(shape.iter().product(), seed, dtype));
        Ok(Self {
            layouts: [
                Layout::contiguous(q_shape)?,
                Layout::contiguous(kv_shape)?,
                Layout::contiguous(kv_shape)?,
            ],
            q: tensor(emulator, dtype, &values[0], q_shape)?,
            k: tensor(emulator, dtype, &values[1], kv_shape)?,
            v: tensor(emulator, dtype, &values[2], kv_shape)?,
            values,
            q_offset: [case.q_offset],
        })
    }

    fn problem<'a>(&'a self, case: &'a Case) -> Result<Problem<'a>> {
        let [q, k, v] = &self.layouts;
        let [q_values, k_values, v_values] = &self.values;
        Ok(Problem {
            mask_mod: case.mask.as_ref(),
            score_mod: case.score.as_ref(),
            q_offset: &self.q_offset,
            ..Problem::new(AttentionShape::new(q, k, v)?, q_values, k_values, v_values)
        })
    }
}

fn tensor(emulator: &Emulator, dtype: DType, values: &[f32], shape: [usize; 4]) -> Result<Tensor<Emulator>> {
    let tensor = Tensor::zeros(emulator, dtype, shape)?;
    tensor.buffer().write(0, &dtype.narrow(values));
    Ok(tensor)
}

/// Sums of four uniform numbers: near enough to normal, and the same everywhere.
fn numbers(count: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..count).map(|_| 0.8 * (next() + next() + next() + next())).collect();
    dtype.widen(&dtype.narrow(&values))
}

/// What one dispatch of a [`Case`] cost.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The dispatch.
    pub record: Record,
    /// Matrix products (8x8x8) that the kept pairs need, both products together.
    pub mma_minimum: u64,
    /// Device bytes with q read once, and k and v once per 32 query rows (staged, and the WGSL kernels)
    /// or once per simdgroup of 8 (direct, decode), in tiles that are not empty. dq reads q and dout once
    /// and k and v like that, k once more without staging; dkv k and v once, and q and dout like that, both
    /// once more without staging; lse and delta once per simdgroup of 8 rows.
    pub device_read_minimum: u64,
    /// Tiles of 32 rows and 32 keys that were computed.
    pub kv_tiles: u64,
    /// Pairs of query and key that the mask keeps.
    pub kept: u64,
}

impl Measurement {
    fn new(case: &Case, record: Record, kept: u64) -> Self {
        // These passes see no pairs: combine needs what split left, delta its rows, both once.
        if matches!(record.entry, "combine" | "delta" | "dsink") {
            let device_read_minimum = record.counters.device_unique;
            return Self { mma_minimum: 0, device_read_minimum, kv_tiles: 0, kept, record };
        }
        let kv_tiles = record.counters.score_calls / 1024;
        let row_bytes = (case.head_dim * case.dtype.size()) as u64;
        // Rows that share one reading of the others. A simdgroup of decode has 8.
        let alone = case.kernels == Kernels::Msl(Loader::Direct) || record.entry == "split";
        // A workgroup of decode with subgroup operations has as many as there are, up to 4.
        let packed = (case.q_heads / case.kv_heads * case.q_len).next_power_of_two().min(4) as u64;
        let rows = match (alone, record.entry) {
            (true, _) => 8,
            (false, "split_subgroup") => packed,
            (false, _) => 32,
        };
        // Own rows once, with lse and delta; of a tile two tensors once per `rows`; products of a pair.
        let (own, stats, products) = match record.entry {
            "dq" => (2 * case.q_heads * case.q_len, case.q_heads * case.q_len * 8, 3),
            "dkv" => (2 * case.kv_heads * case.kv_len, 0, 4),
            _ => (case.q_heads * case.q_len, 0, 2),
        };
        // dkv asks for those of a tile's query rows, a simdgroup for itself.
        let tile_stats = if record.entry == "dkv" { 4 * 32 * 8 } else { 0 };
        // What is staged serves several products; a simdgroup by itself reads each operand again.
        let tensors = if alone { products } else { 2 };
        Self {
            mma_minimum: 2 * products * kept * case.head_dim as u64 / 1024,
            device_read_minimum: own as u64 * row_bytes
                + stats as u64
                + kv_tiles * (32 / rows * 32 * tensors * row_bytes + tile_stats),
            kv_tiles,
            kept,
            record,
        }
    }

    /// Device bytes read, block lists apart: they are the same for all threads (and `constant` in MSL).
    pub fn device_read(&self) -> u64 {
        self.record.counters.device_read - self.record.counters.read_of[TABLES]
    }

    /// Share of the time in matrix products that are needed, by the cost model below.
    pub fn model_utilisation(&self) -> f64 {
        MMA * self.mma_minimum as f64 / cycles(&self.record.counters)
    }
}

const MMA: f64 = 18.0;
/// The buffer index of the block lists.
const TABLES: usize = 5;

/// Cycles of one simdgroup, for comparing designs and nothing else: occupancy, registers, caches and
/// everything that is not counted are left out. A thread's share of a simdgroup operation is 1/32.
pub fn cycles(c: &Counters) -> f64 {
    let per_lane = |count: u64| count as f64 / 32.0;
    let lines = |bytes: u64| bytes as f64 / 128.0;
    MMA * c.mma as f64
        + per_lane(c.fp + c.conversions)
        + 4.0 * per_lane(c.transcendentals)
        + 2.0 * c.shuffles as f64
        + 14.5 * c.reductions as f64
        + 2.0 * lines(c.threadgroup_read + c.threadgroup_write)
        + 4.0 * lines(c.device_read + c.device_write)
}
