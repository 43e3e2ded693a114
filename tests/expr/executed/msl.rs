//! MSL in the emulator: all functions of a batch in one kernel, each in a namespace of its own.

use std::sync::LazyLock;

use flexattn::expr::Op;
use flexattn::kernels::{Fill, Language, MSL_FILES, Params};
use flexattn::lower::{Layout, slots};
use flexattn_emulator::{Bound, Kernel, Memory, Options, clang, lint};

use super::super::random::{KV_LEN, Q_LEN};
use super::{Executor, Found, HEAD, Job, World};

/// The emulator, with a mistake in what is lowered: a text and what stands there instead.
pub(super) struct Emulated(Option<[&'static str; 2]>);

/// `common.metal` stands once above all namespaces.
static MODS: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| {
    MSL_FILES.iter().map(|(name, text)| (*name, if *name == "common.metal" { "" } else { text })).collect()
});

const NO_TERMS: &str = "#define ROW_TERMS 0u
#define COLUMN_TERMS 0u
#define PAIR_TERMS 0u
inline float row_term(thread const Ctx& ctx, uint term, float score, Row row, int b, int h, int q, int kv) { return 0.0f; }
inline float column_term(thread const Ctx& ctx, uint term, float score, Row row, int b, int h, int q, int kv) { return 0.0f; }
inline float pair_term(thread const Ctx& ctx, uint term, float score, Row row, int b, int h, int q, int kv) { return 0.0f; }
inline uint row_element(thread const Ctx& ctx, uint term, int b, int h, int q) { return 0u; }
inline uint column_element(thread const Ctx& ctx, uint term, int b, int h, int kv) { return 0u; }
inline uint pair_element(thread const Ctx& ctx, uint term, Row row, int b, int h, int q, int kv) { return 0u; }
";

/// Writes what the mods of its namespace give at a place.
const CALLS: &str = "inline void evaluate(thread const Ctx& ctx, thread const Place& at, device uint* to) {
  const Row row = row_mod(ctx, at.b, at.h, at.q);
  *to++ = as_type<uint>(score_mod(ctx, at.score, row, at.b, at.h, at.q, at.kv));
  *to++ = uint(mask_mod(ctx, row, at.b, at.h, at.q, at.kv));
  *to++ = as_type<uint>(score_grad(ctx, at.score, row, at.b, at.h, at.q, at.kv));
  for (uint t = 0; t < ROW_TERMS; t++) {
    *to++ = as_type<uint>(row_term(ctx, t, at.score, row, at.b, at.h, at.q, at.kv));
    *to++ = row_element(ctx, t, at.b, at.h, at.q);
  }
  for (uint t = 0; t < COLUMN_TERMS; t++) {
    *to++ = as_type<uint>(column_term(ctx, t, at.score, row, at.b, at.h, at.q, at.kv));
    *to++ = column_element(ctx, t, at.b, at.h, at.kv);
  }
  for (uint t = 0; t < PAIR_TERMS; t++) {
    *to++ = as_type<uint>(pair_term(ctx, t, at.score, row, at.b, at.h, at.q, at.kv));
    *to++ = pair_element(ctx, t, row, at.b, at.h, at.q, at.kv);
  }
}
#undef ROW_TERMS
#undef COLUMN_TERMS
#undef PAIR_TERMS
";

const PLACE: &str = "struct Place { int b, h, q, kv; float score; };\n";

/// A threadgroup of one thread for each job and place.
const ENTRY: &str = "kernel void executed(
    device const Place* places [[buffer(0)]], device uint* results [[buffer(3)]], constant uint* tables [[buffer(5)]],
    device const uint* captures [[buffer(6)]], device const uint* large [[buffer(7)]], constant Params& p [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]]) {
  const Ctx ctx = {p, tables, captures, large};
  const uint n = group.y * POINTS + group.x;
  device const Place* place = places + n;
  const Place at = {place->b, place->h, place->q, place->kv, place->score};
  device uint* to = results + n * STRIDE;
  switch (group.y) {
";

impl Emulated {
    pub(super) fn new() -> flexattn::Result<Self> {
        clang().map(|_| Self(None))
    }
}

fn functions(job: &Job, layout: &Layout) -> flexattn::Result<String> {
    let mut fill = Fill::join("mods_grad.metal", &MODS)?;
    let mut terms = NO_TERMS.to_owned();
    for (slot, text) in slots(&job.mods, layout, Language::Msl)? {
        if slot == "terms" {
            terms = text + "\n";
        } else {
            fill.slot(slot, &text)?;
        }
    }
    Ok(fill.finish() + &terms + CALLS)
}

/// One kernel for all `jobs`.
fn text(
    jobs: &[Job],
    layout: &Layout,
    stride: usize,
    mistake: Option<[&str; 2]>,
) -> flexattn::Result<String> {
    let mut common = Fill::join("common.metal", MSL_FILES)?;
    common.constant("INFO", &layout.info_len().to_string())?;
    let mut text = common.finish() + PLACE;
    let mut cases = String::new();
    for (i, job) in jobs.iter().enumerate() {
        let sound = functions(job, layout)?;
        let functions = mistake.map_or(sound.clone(), |[from, to]| sound.replace(from, to));
        text += &format!("namespace job_{i} {{\n{functions}}}\n");
        cases += &format!("    case {i}: job_{i}::evaluate(ctx, at, to); break;\n");
    }
    let entry = ENTRY.replace("POINTS", &jobs[0].points.len().to_string());
    Ok(text + &entry.replace("STRIDE", &stride.to_string()) + &cases + "  }\n}\n")
}

impl Executor for Emulated {
    fn run(&self, world: &World, jobs: &[Job]) -> Result<Vec<Vec<Found>>, String> {
        let layout = world.layout(jobs);
        let points = jobs[0].points.len();
        assert!(jobs.iter().all(|job| job.points.len() == points), "jobs of a batch have as many points");
        let stride = HEAD + 2 * jobs.iter().map(Job::terms).max().unwrap_or(0);
        let text = text(jobs, &layout, stride, self.0).map_err(|error| error.to_string())?;
        if let Some(broken) = lint(&text).first() {
            return Err(format!("{broken}\n{text}"));
        }
        let kernel = Kernel::compile(&text).map_err(|error| error.to_string())?;

        let words = world.words(&layout);
        let places = jobs.iter().flat_map(|job| &job.points).flat_map(|at| {
            [at.b as u32, at.h as u32, at.q as u32, at.kv as u32, (at.score as f32).to_bits()]
        });
        let batch = 1 + jobs.iter().flat_map(|job| &job.points).map(|at| at.b).max().unwrap_or(0);
        let params = Params { q_len: Q_LEN as u32, kv_len: KV_LEN as u32, kv_len_at: 2, ..Params::default() };
        let memory = |words: &[u32]| Memory::from_bytes(bytemuck::cast_slice(words));
        let mut block: Vec<u8> = bytemuck::bytes_of(&params).to_vec();
        block.extend_from_slice(bytemuck::cast_slice(&words.info));
        // Nothing else of the tables is read.
        let tables: Vec<u32> = [u32::MAX; 2].into_iter().chain(vec![KV_LEN as u32; batch as usize]).collect();
        let results = Memory::new(4 * stride * points * jobs.len());
        let bound = [
            (0, &memory(&places.collect::<Vec<_>>())),
            (3, &results),
            (5, &memory(&tables)),
            (6, &memory(&words.captures)),
            (7, &memory(&words.large)),
            (8, &Memory::from_bytes(&block)),
        ]
        .map(|(index, memory)| Bound::whole(index, memory));
        let grid = [points as u32, jobs.len() as u32, 1];
        let outcome = kernel.launch("executed", &bound, grid, [1, 1, 1], &Options::default());
        let outcome = outcome.map_err(|error| error.to_string())?;
        if let Some(report) = outcome.reports.first() {
            return Err(format!("{report}\n{text}"));
        }
        let bytes = results.read(0, results.size());
        let words: Vec<u32> = bytes.chunks(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        Ok(jobs
            .iter()
            .zip(words.chunks(stride * points))
            .map(|(job, words)| job.read(words, stride))
            .collect())
    }

    fn at_once(&self) -> usize {
        128
    }
}

/// What the checks are for: an operation that is spelled wrongly does not pass.
#[test]
fn mistakes_in_the_spelling_of_operations_are_noticed() {
    if let Err(error) = Emulated::new() {
        println!("SKIPPED: {error}");
        return;
    }
    let mistakes: [(Op, [&'static str; 2]); 24] = [
        (Op::FloorDiv, ["int(rest != 0 &&", "int(rest == 0 &&"]),
        (Op::FloorMod, ["? rest + by : rest", "? rest : rest"]),
        (Op::Div, ["return a / ((b == 0", "return a % ((b == 0"]),
        (Op::Div, ["b == 0u ? 1u", "b == 0u ? 2u"]),
        (Op::Rem, ["return a % ((b == 0", "return a / ((b == 0"]),
        (Op::Rem, ["b == 0u ? 1u", "b == 0u ? 2u"]),
        (Op::Shl, ["(b & 31u)", "(b & 15u)"]),
        (Op::Shr, ["& 31u", "& 15u"]),
        (Op::Sign, ["int(a > 0) - int(a < 0)", "int(a > 0)"]),
        (Op::Abs, ["a < 0 ? int(0u", "a < 0 ? int(1u"]),
        (Op::WrappingNeg, ["0u - uint(a)", "1u - uint(a)"]),
        (Op::WrappingAdd, ["uint(a) + uint(b)", "uint(a) | uint(b)"]),
        (Op::WrappingSub, ["uint(a) - uint(b)", "uint(b) - uint(a)"]),
        (Op::WrappingMul, ["uint(a) * uint(b)", "uint(a) * uint(a)"]),
        (Op::ToI32, ["-2147483648.0f", "-2147483520.0f"]),
        (Op::ToU32, ["4294967040.0f", "4294966784.0f"]),
        (Op::Pow, ["whole && odd && x", "x"]),
        (Op::Pow, ["whole ? size : x", "x"]),
        (Op::Round, ["rint(", "round("]),
        (Op::CountOneBits, ["popcount(", "clz("]),
        (Op::Xor, [" ^ ", " | "]),
        (Op::Not, ["~", ""]),
        (Op::Clamp, ["min(max(", "max(min("]),
        (Op::Tanh, ["tanh(clamp(", "(clamp("]),
    ];
    let (world, points) = super::edges();
    for (op, [from, to]) in mistakes {
        let calls = super::every_call(&world, &points).into_iter();
        let jobs: Vec<Job> = calls.filter(|(other, _)| *other == op).map(|(_, job)| job).collect();
        let layout = world.layout(&jobs);
        let there = jobs.iter().any(|job| functions(job, &layout).unwrap().contains(from));
        assert!(there, "{op:?} is not spelled with `{from}`");
        let wrong = Emulated(Some([from, to]));
        let found = super::agree(&wrong, &world, &jobs).and_then(|_| super::negative_powers(&wrong));
        let message = found.expect_err(&format!("{op:?}: nobody noticed `{from}` -> `{to}`"));
        assert!(message.contains("in kernel text"), "{op:?} with `{to}` fails in another way: {message}");
    }
}
