//! Unfused attention on the same device: three kernels with the score matrix in memory (`unfused.wgsl`).

use flexattn::kernels::Fill;
use flexattn::wgpu;
use flexattn::{Error, Gpu, Result};

/// The score matrix is computed in parts of at most this many bytes.
const SCORES: usize = 128 << 20;

/// The register tile of a baseline: 8 x 8 is the fastest of those tried, 4 x 4 is what the portable fused
/// kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tile {
    Eight,
    Four,
}

impl Tile {
    fn rows(self) -> usize {
        match self {
            Tile::Eight => 8,
            Tile::Four => 4,
        }
    }
}

/// What is computed: f32, one batch entry, as many kv heads as query heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub(crate) heads: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) causal: bool,
}

/// Pipelines and buffers, ready to run any number of times.
#[derive(Debug)]
pub(crate) struct Baseline {
    device: wgpu::Device,
    queue: wgpu::Queue,
    pipelines: [wgpu::ComputePipeline; 3],
    /// One bind group a part of the score matrix, and the workgroups of the three kernels.
    parts: Vec<(wgpu::BindGroup, [[usize; 3]; 3])>,
    out: wgpu::Buffer,
}

impl Baseline {
    /// `None` where there is no device: on the Cpu tier.
    pub(crate) fn new(
        gpu: &Gpu,
        problem: Problem,
        tile: Tile,
        data: [&[f32]; 3],
    ) -> Result<Option<Baseline>> {
        let (Some(device), Some(queue)) = (gpu.device(), gpu.queue()) else { return Ok(None) };
        let Problem { heads, q_len, kv_len, head_dim, causal } = problem;
        let edge = 8 * tile.rows();
        if q_len % edge != 0 || kv_len % edge != 0 || head_dim % 64 != 0 {
            return Err(Error::unsupported(format!(
                "the unfused baseline takes lengths that are multiples of {edge} and head dims that are multiples of 64"
            )));
        }
        let pipelines = pipelines(device, head_dim, tile, causal)?;
        let storage =
            wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
        let buffer = |label, bytes: usize, usage| {
            let size = bytes as u64;
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage,
                mapped_at_creation: false,
            })
        };
        let inputs = data.map(|values| {
            let input = buffer("baseline input", size_of_val(values), storage);
            queue.write_buffer(&input, 0, bytemuck::cast_slice(values));
            input
        });
        let out = buffer("baseline out", heads * q_len * head_dim * 4, storage);
        let row = kv_len * 4;
        let rows = (SCORES / row / edge * edge).clamp(edge, q_len);
        let part_heads = if rows < q_len { 1 } else { (SCORES / (row * rows)).clamp(1, heads) };
        let scores = buffer("baseline scores", part_heads * rows * row, storage);
        let mut parts = Vec::new();
        for first_head in (0..heads).step_by(part_heads) {
            for first_row in (0..q_len).step_by(rows) {
                let here = (part_heads.min(heads - first_head), rows.min(q_len - first_row));
                let scale = std::f32::consts::LOG2_E / (head_dim as f32).sqrt();
                let params = [
                    q_len as u32,
                    kv_len as u32,
                    first_row as u32,
                    here.1 as u32,
                    first_head as u32,
                    scale.to_bits(),
                    0,
                    0,
                ];
                let uniform =
                    buffer("baseline params", 32, wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST);
                queue.write_buffer(&uniform, 0, bytemuck::cast_slice(&params));
                let buffers = [&inputs[0], &inputs[1], &inputs[2], &out, &scores, &uniform];
                let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                    label: Some("baseline"),
                    layout: &pipelines[0].get_bind_group_layout(0),
                    entries: &std::array::from_fn::<_, 6, _>(|binding| wgpu::BindGroupEntry {
                        binding: binding as u32,
                        resource: buffers[binding].as_entire_binding(),
                    }),
                });
                let grids = [
                    [kv_len / edge, here.1 / edge, here.0],
                    [here.1, here.0, 1],
                    [head_dim / 64, here.1 / edge, here.0],
                ];
                parts.push((group, grids));
            }
        }
        Ok(Some(Baseline { device: device.clone(), queue: queue.clone(), pipelines, parts, out }))
    }

    /// Submits all of it and waits for its end.
    pub(crate) fn run(&self) -> Result<()> {
        for (group, grids) in &self.parts {
            let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                for (pipeline, [x, y, z]) in self.pipelines.iter().zip(grids) {
                    pass.set_pipeline(pipeline);
                    pass.set_bind_group(0, group, &[]);
                    pass.dispatch_workgroups(*x as u32, *y as u32, *z as u32);
                }
            }
            self.queue.submit([encoder.finish()]);
        }
        wait(&self.device)
    }

    /// The output `[H, L, D]`, to be compared with the fused kernel's.
    pub(crate) fn output(&self, gpu: &Gpu, shape: [usize; 4]) -> Result<Vec<f32>> {
        let [_, heads, rows, columns] = shape;
        let strides = [heads * rows * columns, rows * columns, columns, 1];
        flexattn::Tensor::from_buffer(gpu, &self.out, flexattn::DType::F32, 0, shape, strides)?.read()
    }
}

/// Waits until everything submitted has run.
pub(crate) fn wait(device: &wgpu::Device) -> Result<()> {
    device
        .poll(wgpu::PollType::wait_indefinitely())
        .map(|_| ())
        .map_err(|error| Error::DeviceLost(error.to_string()))
}

/// The three kernels on one layout, so that one bind group serves them all.
fn pipelines(
    device: &wgpu::Device,
    head_dim: usize,
    tile: Tile,
    causal: bool,
) -> Result<[wgpu::ComputePipeline; 3]> {
    let mut fill = Fill::join("unfused.wgsl", &[("unfused.wgsl", include_str!("unfused.wgsl"))])?;
    fill.constant("HEAD_DIM", &head_dim.to_string())?;
    fill.constant("ROWS", &tile.rows().to_string())?;
    fill.constant("CAUSAL", &causal.to_string())?;
    let source = wgpu::ShaderSource::Wgsl(fill.finish().into());
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor { label: Some("unfused"), source });
    let storage = |read_only| wgpu::BufferBindingType::Storage { read_only };
    let entries = std::array::from_fn::<_, 6, _>(|binding| wgpu::BindGroupLayoutEntry {
        binding: binding as u32,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: if binding == 5 { wgpu::BufferBindingType::Uniform } else { storage(binding < 3) },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    });
    let group = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: Some("unfused"),
        entries: &entries,
    });
    let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some("unfused"),
        bind_group_layouts: &[Some(&group)],
        immediate_size: 0,
    });
    Ok(["scores", "weights", "output"].map(|entry| {
        device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(entry),
            layout: Some(&layout),
            module: &module,
            entry_point: Some(entry),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        })
    }))
}
