//! Kernel text runs on a GPU adapter and gives what the expression says.

use flexattn::expr::{Column, Env, Expr, IndexBox, Op, Point, Program, Range, Type};
use flexattn::kernels::Language;
use flexattn::lower::{Layout, Mods, slots};
use flexattn::{Capture, Scalar, ScoreMod};
use proptest::prelude::*;

use super::random::{self, KV_LEN, Q_LEN};

const POINTS: usize = 64;

/// A device that runs one function at many points.
struct Bench {
    device: wgpu::Device,
    queue: wgpu::Queue,
}

const FRAME: &str = "
struct Params { zero: u32, q_len: u32, kv_len: u32, unused: u32, info: array<vec4<u32>, INFO> }
struct Place { b: i32, h: i32, q: i32, kv: i32, score: f32, unused: array<u32, 3> }
@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> captures: array<u32>;
@group(0) @binding(2) var<storage, read> places: array<Place>;
@group(0) @binding(3) var<storage, read_write> results: array<vec2<u32>>;
fn kv_len_of(b: u32) -> u32 { return p.kv_len + b * p.zero; }
@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) id: vec3<u32>) {
  let at = places[id.x];
  let row = row_mod(at.b, at.h, at.q);
  let score = score_mod(at.score, row, at.b, at.h, at.q, at.kv);
  let keep = mask_mod(row, at.b, at.h, at.q, at.kv);
  results[id.x] = vec2<u32>(bitcast<u32>(score), select(0u, 1u, keep));
}
";

const DEFAULTS: [(&str, &str); 3] = [
    ("row", "struct Row { unused: u32 }\nfn row_mod(b: i32, h: i32, q: i32) -> Row { return Row(0u); }\n"),
    (
        "score_mod",
        "fn score_mod(score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32) -> f32 { return score; }\n",
    ),
    ("mask_mod", "fn mask_mod(row: Row, b: i32, h: i32, q: i32, kv: i32) -> bool { return true; }\n"),
];

impl Bench {
    fn new() -> Option<Bench> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let adapter =
            pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())).ok()?;
        let (device, queue) =
            pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor::default())).ok()?;
        Some(Bench { device, queue })
    }

    /// Score and mask at each point.
    fn run(
        &self,
        mods: &Mods,
        captures: &[Capture],
        scalars: &[Scalar],
        points: &[Point<f64>],
    ) -> Result<Vec<(f32, bool)>, String> {
        let layout = Layout::new(mods.score.iter().chain(&mods.mask), None);
        let texts = slots(mods, &layout, Language::Wgsl).map_err(|e| e.to_string())?;
        let mut text = format!("const INFO: u32 = {}u;\n", layout.info_len());
        for (slot, default) in DEFAULTS {
            if !texts.iter().any(|(name, _)| *name == slot) {
                text.push_str(default);
            }
        }
        for (_, slot) in &texts {
            text.push_str(slot);
            text.push('\n');
        }
        text.push_str(FRAME);

        let mut params = vec![0u32, Q_LEN as u32, KV_LEN as u32, 0];
        params.extend(layout.info(captures, scalars, 0).unwrap().into_iter().flatten());
        let mut words = layout.words(captures).unwrap();
        words.push(0);
        let places: Vec<u32> = points
            .iter()
            .flat_map(|at| {
                [at.b as u32, at.h as u32, at.q as u32, at.kv as u32, (at.score as f32).to_bits(), 0, 0, 0]
            })
            .collect();
        self.dispatch(&text, &[&params, &words, &places], points.len())
            .map(|words| words.chunks(2).map(|w| (f32::from_bits(w[0]), w[1] == 1)).collect())
            .map_err(|e| format!("{e}\n{text}"))
    }

    fn dispatch(&self, text: &str, inputs: &[&[u32]; 3], count: usize) -> Result<Vec<u32>, String> {
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let buffer = |words: &[u32], usage| {
            let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: 4 * words.len() as u64,
                usage: usage | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            self.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(words));
            buffer
        };
        let zeros = vec![0u32; 2 * count];
        let inputs = inputs.map(|words| buffer(words, wgpu::BufferUsages::STORAGE));
        let results = buffer(&zeros, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC);
        let staging = buffer(&zeros, wgpu::BufferUsages::MAP_READ);
        let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(text.into()),
        });
        let entries: Vec<wgpu::BindGroupLayoutEntry> = (0..4)
            .map(|binding| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: binding < 3 },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let group_layout = self
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
        let layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&group_layout)],
            immediate_size: 0,
        });
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        let buffers = [&inputs[0], &inputs[1], &inputs[2], &results];
        let entries: Vec<wgpu::BindGroupEntry<'_>> = (0..4u32)
            .zip(buffers)
            .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &group_layout,
            entries: &entries,
        });
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(count as u32, 1, 1);
        drop(pass);
        encoder.copy_buffer_to_buffer(&results, 0, &staging, 0, staging.size());
        if let Some(error) = pollster::block_on(scope.pop()) {
            return Err(error.to_string());
        }
        self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |_| ());
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| e.to_string())?;
        let view = staging.get_mapped_range(..).map_err(|e| e.to_string())?;
        Ok(bytemuck::cast_slice::<u8, u32>(&view).to_vec())
    }
}

/// What the values of the first output may be at one point.
fn range_at(program: &Program, env: &Env<'_>, at: &Point<f64>) -> Range {
    certain_at(program, 1, env, at).0
}

/// The same, and whether none of the first `count` outputs may be NaN.
fn certain_at(program: &Program, count: usize, env: &Env<'_>, at: &Point<f64>) -> (Range, bool) {
    let index = IndexBox { b: (at.b, at.b), h: (at.h, at.h), q: (at.q, at.q), kv: (at.kv, at.kv) };
    let mut ranges = program.bind_ranges(env).unwrap();
    let first = ranges.range_with_score(&index, Range::of(at.score, at.score));
    (first, (0..count).all(|i| !ranges.output(i).nan))
}

#[test]
fn kernel_text_of_random_expressions_gives_their_values() {
    let Some(bench) = Bench::new() else {
        println!("SKIPPED: no GPU adapter");
        return;
    };
    let (captures, scalars) = (random::captures(), random::scalars());
    let env = Env::new(&captures, &scalars, Q_LEN, KV_LEN).unwrap();
    let exact = std::cell::Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(random::config(32));
    let points = prop::collection::vec(random::point(), POINTS);
    runner
        .run(&(random::any_expr(), random::mask(4), points), |(expr, mask, points)| {
            // What a mod holds is simplified; naga's own arithmetic on constants never sees the rest.
            let (expr, mask) = (super::values::simplified(&expr), super::values::simplified(&mask));
            // Integers pass as two halves that f32 holds exactly.
            let halves: Vec<Expr> = match expr.ty() {
                Type::F32 => vec![expr.clone()],
                Type::Bool => vec![Expr::new(Op::ToF32, std::slice::from_ref(&expr)).unwrap()],
                Type::I32 | Type::U32 => [0u32, 16]
                    .map(|shift| {
                        let word = Expr::new(Op::ToU32, std::slice::from_ref(&expr)).unwrap();
                        let half = Expr::new(Op::Shr, &[word, Expr::constant(shift)]).unwrap();
                        let half = Expr::new(Op::And, &[half, Expr::constant(65_535u32)]).unwrap();
                        Expr::new(Op::ToF32, &[half]).unwrap()
                    })
                    .to_vec(),
            };
            for score in halves {
                let mods = Mods { score: Some(score.clone()), mask: Some(mask.clone()), ..Mods::default() };
                let got = bench.run(&mods, &captures, &scalars, &points).map_err(TestCaseError::fail)?;
                let parts = [super::values::all_parts(&score), super::values::all_parts(&mask)];
                let [scores, masks] = parts.each_ref().map(|parts| Program::new(parts));
                for (at, (value, keep)) in points.iter().zip(got) {
                    // What follows from a NaN is not defined: drivers take exp2(log2(x)) for x.
                    let (range, certain) = certain_at(&scores, parts[0].len(), &env, at);
                    let fits = !certain || (range.lo <= value.into() && f64::from(value) <= range.hi);
                    prop_assert!(fits, "{score} is {value} on the GPU, but {range:?} at {at:?}");
                    let (kept, certain) = certain_at(&masks, parts[1].len(), &env, at);
                    let fits = !certain || if keep { !kept.never() } else { !kept.always() };
                    prop_assert!(fits, "{mask} is {keep} on the GPU, but {kept:?} at {at:?}");
                    exact.set(
                        exact.get() + usize::from(range.lo == range.hi) + usize::from(kept.lo == kept.hi),
                    );
                }
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
    assert!(exact.get() > 1000, "only {} values were certain", exact.get());
}

#[test]
fn functions_are_as_exact_on_the_gpu_as_ranges_say() {
    let Some(bench) = Bench::new() else {
        println!("SKIPPED: no GPU adapter");
        return;
    };
    let functions = [
        "exp(score)",
        "exp2(score)",
        "log(abs(score))",
        "log2(abs(score))",
        "sqrt(abs(score))",
        "sqrt(score * 0.0)",
        "sqrt(ceil(clamp(score, -0.5, 0.0)))",
        "pow(sqrt(ceil(clamp(score, -0.5, 0.0))), -4.0)",
        "sin(score)",
        "cos(score)",
        "tanh(score)",
        "tanh(score * 30.0)",
        "sigmoid(score * 20.0)",
        "pow(abs(score) + 0.1, score)",
        "pow(score, round(score))",
        "pow(score, 5.0) + pow(score, 3.0)",
        "pow(abs(score), 0.5)",
        "pow(min(score, 0.0) * 0.0, round(score) + 20.0)",
        "pow(score * 0.0, 0.0 * score)",
        "1.0 / score",
        "round(score * 2.0)",
        "fract(score)",
        "floor(score)",
        "sign(score)",
        "score % 0.75",
        "clamp(score, 2.0, -1.0)",
        "f32(i32(score * 1e9))",
        "f32(u32(score * 1e9))",
        "f32(i32(score * 1e30))",
    ];
    let points: Vec<Point<f64>> = (0..POINTS)
        .map(|i| Point { score: f64::from((i as f32 - 31.5) * 0.17), b: 0, h: 0, q: 0, kv: 0 })
        .collect();
    let env = Env::new(&[], &[], Q_LEN, KV_LEN).unwrap();
    for text in functions {
        let expr = ScoreMod::from_wgsl(text, &[], &[]).unwrap().expr().clone();
        let mods = Mods { score: Some(expr.clone()), ..Mods::default() };
        let got = bench.run(&mods, &[], &[], &points).unwrap();
        let program = Program::new(&[expr]);
        let mut reference = program.bind::<f64>(&env).unwrap();
        for (at, (value, _)) in points.iter().zip(got) {
            let range = range_at(&program, &env, at);
            assert!(
                range.lo <= value.into() && f64::from(value) <= range.hi,
                "{text} is {value}, not in {range:?} at {}",
                at.score
            );
            reference.point(at);
            let Column::F32(expected) = reference.output(0) else { panic!("{text} is f32") };
            assert!(
                range.lo <= expected[0] && expected[0] <= range.hi,
                "{text} is {expected:?}, not in {range:?} at {}",
                at.score
            );
        }
    }
}

#[test]
fn infinite_and_nan_constants_reach_the_gpu() {
    let Some(bench) = Bench::new() else {
        println!("SKIPPED: no GPU adapter");
        return;
    };
    for x in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, -0.0, 1.0e-38] {
        let chosen = Expr::new(
            Op::Select,
            &[
                Expr::new(Op::Ge, &[Expr::input(flexattn::expr::Input::Q), Expr::constant(0)]).unwrap(),
                Expr::constant(x),
                Expr::input(flexattn::expr::Input::Score),
            ],
        )
        .unwrap();
        let mods = Mods { score: Some(chosen), ..Mods::default() };
        let at = Point { score: 1.0, b: 0, h: 0, q: 1, kv: 0 };
        let got = bench.run(&mods, &[], &[], &[at]).unwrap();
        assert_eq!(got[0].0.to_bits(), x.to_bits(), "{x}");
    }
}
