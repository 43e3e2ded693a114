//! Unfused attention of one query row a head, on the same device (`unfused_row.wgsl`): f32, head dim 64.

use crate::baseline::wait;
use crate::measure::Sizes;
use flexattn::wgpu;
use flexattn::{DType, Error, Gpu, Result, Tensor};

/// Pipelines and buffers, ready to run any number of times.
#[derive(Debug)]
pub(crate) struct UnfusedRow {
    device: wgpu::Device,
    queue: wgpu::Queue,
    passes: [(wgpu::ComputePipeline, wgpu::BindGroup, [u32; 2]); 3],
    out: wgpu::Buffer,
}

impl UnfusedRow {
    /// `None` where there is no device: on the Cpu tier.
    pub(crate) fn new(gpu: &Gpu, sizes: &Sizes, data: [&[f32]; 3]) -> Result<Option<UnfusedRow>> {
        let (Some(device), Some(queue)) = (gpu.device(), gpu.queue()) else { return Ok(None) };
        if sizes.q_len != 1 || sizes.head_dim != 64 {
            return Err(Error::unsupported("the unfused baseline of one row takes q_len 1 and head dim 64"));
        }
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some("unfused row"),
            source: wgpu::ShaderSource::Wgsl(include_str!("unfused_row.wgsl").into()),
        });
        use wgpu::BufferUsages as U;
        let buffer = |label, bytes: usize, usage| {
            let size = bytes as u64;
            let usage = usage | U::COPY_DST;
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage,
                mapped_at_creation: false,
            })
        };
        let inputs = data.map(|values| {
            let input = buffer("unfused input", size_of_val(values), U::STORAGE);
            queue.write_buffer(&input, 0, bytemuck::cast_slice(values));
            input
        });
        let out = buffer("unfused out", sizes.q_heads * sizes.head_dim * 4, U::STORAGE | U::COPY_SRC);
        let scores = buffer("unfused scores", sizes.q_heads * sizes.kv_len * 4, U::STORAGE);
        let params = buffer("unfused params", 16, U::UNIFORM);
        let scale = std::f32::consts::LOG2_E / (sizes.head_dim as f32).sqrt();
        let group = sizes.q_heads / sizes.kv_heads;
        let words = [sizes.q_heads as u32, group as u32, sizes.kv_len as u32, scale.to_bits()];
        queue.write_buffer(&params, 0, bytemuck::cast_slice(&words));

        let buffers = [&inputs[0], &inputs[1], &inputs[2], &out, &scores, &params];
        let heads = sizes.q_heads as u32;
        let keys = (sizes.kv_len as u32).div_ceil(64);
        let kernels: [(&str, &[usize], [u32; 2]); 3] = [
            ("scores", &[0, 1, 4, 5], [keys, heads]),
            ("weights", &[4, 5], [heads, 1]),
            ("output", &[2, 3, 4, 5], [heads, 1]),
        ];
        let passes = kernels.map(|(entry, bound, grid)| {
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(entry),
                layout: None,
                module: &module,
                entry_point: Some(entry),
                compilation_options: wgpu::PipelineCompilationOptions::default(),
                cache: None,
            });
            let entries: Vec<_> = bound
                .iter()
                .map(|&binding| wgpu::BindGroupEntry {
                    binding: binding as u32,
                    resource: buffers[binding].as_entire_binding(),
                })
                .collect();
            let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(entry),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &entries,
            });
            (pipeline, group, grid)
        });
        Ok(Some(UnfusedRow { device: device.clone(), queue: queue.clone(), passes, out }))
    }

    /// Submits all of it and waits for its end.
    pub(crate) fn run(&self) -> Result<()> {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            for (pipeline, group, [x, y]) in &self.passes {
                pass.set_pipeline(pipeline);
                pass.set_bind_group(0, group, &[]);
                pass.dispatch_workgroups(*x, *y, 1);
            }
        }
        self.queue.submit([encoder.finish()]);
        wait(&self.device)
    }

    /// The output `[H, 1, D]`, to be compared with the fused kernel's.
    pub(crate) fn output(&self, gpu: &Gpu, shape: [usize; 4]) -> Result<Vec<f32>> {
        let [_, heads, rows, columns] = shape;
        let strides = [heads * rows * columns, rows * columns, columns, 1];
        Tensor::from_buffer(gpu, &self.out, DType::F32, 0, shape, strides)?.read()
    }
}
