//! WGSL on a GPU adapter: a pipeline for each job.

use flexattn::kernels::{Fill, Language, WGSL_FILES};
use flexattn::lower::slots;

use super::super::random::{KV_LEN, Q_LEN};
use super::{Executor, Found, HEAD, Job, World};

/// A device that runs one job after the other.
pub(super) struct Bench {
    device: wgpu::Device,
    queue: wgpu::Queue,
}

const FRAME: &str = "
struct Params { zero: u32, q_len: u32, kv_len: u32, unused: u32, info: array<vec4<u32>, INFO> }
struct Place { b: i32, h: i32, q: i32, kv: i32, score: f32 }
@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> captures: array<u32>;
@group(0) @binding(2) var<storage, read> large: array<u32>;
@group(0) @binding(3) var<storage, read> places: array<Place>;
@group(0) @binding(4) var<storage, read_write> results: array<u32>;
fn kv_len_of(b: u32) -> u32 { return p.kv_len + b * p.zero; }
@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) id: vec3<u32>) {
  let at = places[id.x];
  var to = id.x * STRIDE;
  let row = row_mod(at.b, at.h, at.q);
  results[to] = bitcast<u32>(score_mod(at.score, row, at.b, at.h, at.q, at.kv));
  results[to + 1u] = select(0u, 1u, mask_mod(row, at.b, at.h, at.q, at.kv));
  results[to + 2u] = bitcast<u32>(score_grad(at.score, row, at.b, at.h, at.q, at.kv));
  to += 3u;
  for (var t = 0u; t < ROW_TERMS; t++) {
    results[to] = bitcast<u32>(row_term(t, at.score, row, at.b, at.h, at.q, at.kv));
    results[to + 1u] = row_element(t, at.b, at.h, at.q);
    to += 2u;
  }
  for (var t = 0u; t < COLUMN_TERMS; t++) {
    results[to] = bitcast<u32>(column_term(t, at.score, row, at.b, at.h, at.q, at.kv));
    results[to + 1u] = column_element(t, at.b, at.h, at.kv);
    to += 2u;
  }
  for (var t = 0u; t < PAIR_TERMS; t++) {
    results[to] = bitcast<u32>(pair_term(t, at.score, row, at.b, at.h, at.q, at.kv));
    results[to + 1u] = pair_element(t, row, at.b, at.h, at.q, at.kv);
    to += 2u;
  }
}
";

/// The files that have the slots.
const MODS: [&str; 3] = ["mods.wgsl", "mods_grad.wgsl", "mods_terms.wgsl"];

impl Bench {
    pub(super) fn new() -> Option<Bench> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let adapter =
            pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())).ok()?;
        let (device, queue) =
            pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor::default())).ok()?;
        Some(Bench { device, queue })
    }

    fn run_one(&self, world: &World, job: &Job) -> Result<Vec<Found>, String> {
        let layout = world.layout([job]);
        let stride = HEAD + 2 * job.terms();
        let mut text = format!("const INFO: u32 = {}u;\nconst STRIDE: u32 = {stride}u;\n", layout.info_len());
        let texts = slots(&job.mods, &layout, Language::Wgsl).map_err(|e| e.to_string())?;
        for file in MODS {
            let mut fill = Fill::join(file, WGSL_FILES).unwrap();
            let here = |slot: &str| {
                let text = WGSL_FILES.iter().find(|(name, _)| *name == file).unwrap().1;
                text.contains(&format!("//@slot {slot}\n"))
            };
            for (slot, text) in texts.iter().filter(|(slot, _)| here(slot)) {
                fill.slot(slot, text).unwrap();
            }
            text.push_str(&fill.finish());
        }
        text.push_str(FRAME);

        let words = world.words(&layout);
        let mut params = vec![0u32, Q_LEN as u32, KV_LEN as u32, 0];
        params.extend(words.info);
        let places: Vec<u32> = job
            .points
            .iter()
            .flat_map(|at| [at.b as u32, at.h as u32, at.q as u32, at.kv as u32, (at.score as f32).to_bits()])
            .collect();
        let points = job.points.len();
        self.dispatch(&text, &[&params, &words.captures, &words.large, &places], [points, stride])
            .map(|words| job.read(&words, stride))
            .map_err(|e| format!("{e}\n{text}"))
    }

    fn dispatch(
        &self,
        text: &str,
        inputs: &[&[u32]; 4],
        [points, stride]: [usize; 2],
    ) -> Result<Vec<u32>, String> {
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
        let zeros = vec![0u32; stride * points];
        let inputs = inputs.map(|words| buffer(words, wgpu::BufferUsages::STORAGE));
        let results = buffer(&zeros, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC);
        let staging = buffer(&zeros, wgpu::BufferUsages::MAP_READ);
        let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(text.into()),
        });
        let entries: Vec<wgpu::BindGroupLayoutEntry> = (0..5)
            .map(|binding| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: binding < 4 },
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
        let buffers = [&inputs[0], &inputs[1], &inputs[2], &inputs[3], &results];
        let entries: Vec<wgpu::BindGroupEntry<'_>> = (0..5u32)
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
        pass.dispatch_workgroups(points as u32, 1, 1);
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

impl Executor for Bench {
    fn run(&self, world: &World, jobs: &[Job]) -> Result<Vec<Vec<Found>>, String> {
        jobs.iter().map(|job| self.run_one(world, job)).collect()
    }

    fn at_once(&self) -> usize {
        16
    }
}
