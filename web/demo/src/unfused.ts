// Attention without fusing: the kernels that the library's bench measures against, on the same device.
// Scores, softmax and output are kernels of their own, with the whole score matrix in memory between them.
// No mask is applied: what a mask would add comes on top.

import text from "../../../examples/bench/unfused.wgsl?raw";

/** Rows and columns of a tile; lengths are multiples of it. */
const TILE = 64;

export interface Unfused {
  /** Submits one call. */
  run: () => void;
  destroy: () => void;
}

/** f32, one batch entry, head dim 64; or `null` where even one head's scores are more than the device binds. */
export async function unfused(device: GPUDevice, heads: number, length: number, [q, k, v]: readonly [GPUBuffer, GPUBuffer, GPUBuffer]): Promise<Unfused | null> {
  const scoresOfHead = 4 * length * length;
  const together = Math.min(heads, Math.floor(device.limits.maxStorageBufferBindingSize / scoresOfHead));
  if (together < 1 || length % TILE !== 0) return null;
  const made: GPUBuffer[] = [];
  const buffer = (size: number, usage: number): GPUBuffer => {
    const one = device.createBuffer({ size, usage });
    made.push(one);
    return one;
  };
  const out = buffer(heads * length * 64 * 4, GPUBufferUsage.STORAGE);
  const scores = buffer(together * scoresOfHead, GPUBufferUsage.STORAGE);
  const layout = device.createBindGroupLayout({
    entries: [0, 1, 2, 3, 4, 5].map((binding) => ({
      binding,
      visibility: GPUShaderStage.COMPUTE,
      buffer: { type: binding === 5 ? "uniform" : binding < 3 ? "read-only-storage" : "storage" },
    })),
  });
  const module = device.createShaderModule({ code: text });
  const pipelines = await Promise.all(
    ["scores", "weights", "output"].map((entryPoint) =>
      device.createComputePipelineAsync({ layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }), compute: { module, entryPoint } }),
    ),
  );
  const parts: { group: GPUBindGroup; grids: [number, number, number][] }[] = [];
  for (let head = 0; head < heads; head += together) {
    const here = Math.min(together, heads - head);
    const params = buffer(32, GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST);
    device.queue.writeBuffer(params, 0, new Uint32Array([length, length, 0, length, head, 0, 0, 0]));
    device.queue.writeBuffer(params, 20, new Float32Array([Math.LOG2E / 8]));
    const buffers = [q, k, v, out, scores, params];
    parts.push({
      group: device.createBindGroup({ layout, entries: buffers.map((one, binding) => ({ binding, resource: { buffer: one } })) }),
      grids: [[length / TILE, length / TILE, here], [length, here, 1], [1, length / TILE, here]],
    });
  }
  return {
    run() {
      const encoder = device.createCommandEncoder();
      const pass = encoder.beginComputePass();
      for (const { group, grids } of parts) {
        pass.setBindGroup(0, group);
        pipelines.forEach((pipeline, at) => {
          pass.setPipeline(pipeline);
          pass.dispatchWorkgroups(...(grids[at] ?? [1, 1, 1]));
        });
      }
      pass.end();
      device.queue.submit([encoder.finish()]);
    },
    destroy() {
      for (const one of made) one.destroy();
    },
  };
}
