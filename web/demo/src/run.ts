// What this machine makes of it: a check against the reference, and times beside an unfused baseline.

import { Attention, type DType, type Gpu, type HostData, type MaskMod, type ScoreMod, type Tensor, type Values } from "flexattn";
import { narrowed, widened } from "./half";
import { unfused } from "./unfused";

/** The mods as the page holds them. */
export interface Mods extends Values {
  maskMod: MaskMod;
  scoreMod: ScoreMod;
}

export interface Sample {
  /** Kept pairs over all pairs. */
  density: number;
  length: number;
  ms: number;
  /** Every pair by unfused kernels; `null` where they do not fit, and without WebGPU. */
  baselineMs: number | null;
  name: string;
}

export interface Watch {
  /** 0 to 1, and what is being done. */
  progress: (part: number, what: string) => void;
  signal: AbortSignal;
}

/** What is measured: the baseline's kernels are written for f32 and this head dim. */
export const HEADS = 4;
export const DIM = 64;

/** Elements that look like activations: normal, the same on every visit. */
export function normal(count: number, seed: number): Float32Array {
  const values = new Float32Array(count);
  let state = seed >>> 0 || 1;
  const uniform = (): number => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return ((state >>> 0) + 0.5) / 2 ** 32;
  };
  for (let i = 0; i < count; i++) values[i] = Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
  return values;
}

/** q, k and v of a call. */
export interface Sizes {
  heads: number;
  qLen: number;
  kvLen: number;
  headDim: number;
  dtype: DType;
}

function inputs({ heads, qLen, kvLen, headDim, dtype }: Sizes): [Tensor<HostData>, Tensor<HostData>, Tensor<HostData>] {
  const make = (seed: number, length: number): Tensor<HostData> => ({ data: narrowed(normal(heads * length * headDim, seed), dtype), shape: [1, heads, length, headDim], dtype });
  return [make(1, qLen), make(2, kvLen), make(3, kvLen)];
}

/** The longest lengths up to the page's own at which the reference, which computes in f64 on one core, answers in a second or so. */
export function checkable({ qLen, kvLen, ...rest }: Sizes): Sizes {
  let most = 512;
  while (most > 128 && rest.heads * most * most * rest.headDim > 2 ** 28) most /= 2;
  return { ...rest, qLen: Math.min(qLen, most), kvLen: Math.min(kvLen, most) };
}

/** How far one element may be off, in parts of the largest: rounding to the dtype, and sums in another order. */
const BOUND: Readonly<Record<DType, number>> = { f32: 5e-5, f16: 1e-3, bf16: 8e-3 };
/** How far it may be off where all are small: what sums of f32 leave of values that cancel. */
const FLOOR = 1e-6;

/** How far off the farthest value is, how far it may be, and how many are not what they should be at all. */
interface Distance {
  worst: number;
  allowed: number;
  broken: number;
}

/** Both may hold infinities, in the same places: the lse of a row that keeps nothing is one. */
function distance(got: ArrayLike<number>, want: Float64Array, bound: number): Distance {
  let [worst, largest, broken] = [0, 0, got.length === want.length ? 0 : 1];
  want.forEach((value, at) => {
    const found = got[at] ?? Number.NaN;
    if (found === value) return void (largest = Math.max(largest, Number.isFinite(value) ? Math.abs(value) : 0));
    const difference = Math.abs(found - value);
    if (!Number.isFinite(difference)) return void broken++;
    [worst, largest] = [Math.max(worst, difference), Math.max(largest, Math.abs(value))];
  });
  return { worst, allowed: bound * largest + FLOOR, broken };
}

export interface Verdict {
  ok: boolean;
  text: string;
}

/** The page's mods on this machine against the definition in f64, from the very same elements. */
export async function verify(gpu: Gpu, mods: Mods, sizes: Sizes): Promise<Verdict> {
  const attention = new Attention(gpu, mods);
  try {
    const [q, k, v] = inputs(sizes);
    const started = performance.now();
    const { out, lse } = await attention.forward(q, k, v, { to: "host" });
    const took = performance.now() - started;
    const want = attention.reference(q, k, v);
    // lse is f32 whatever the dtype is.
    const parts = [distance(widened(out.data, out.dtype), want.out, BOUND[sizes.dtype]), distance(lse, want.lse, BOUND.f32)];
    const broken = parts.reduce((sum, part) => sum + part.broken, 0);
    const worst = Math.max(...parts.map((part) => part.worst));
    const ok = broken === 0 && parts.every((part) => part.worst <= part.allowed);
    const size = `${sizes.heads} heads, ${sizes.qLen} queries × ${sizes.kvLen} keys, head dim ${sizes.headDim}, ${sizes.dtype}`;
    const text = ok
      ? `Right: the largest difference from the f64 reference is ${worst.toExponential(1)} (${size}; first call ${took.toFixed(0)} ms, compiling included).`
      : `Wrong: ${broken > 0 ? `${broken} values are no numbers, or infinite in the wrong place` : `the largest difference is ${worst.toExponential(1)}`} (${size}). Please report this with the address of this page.`;
    return { ok, text };
  } finally {
    attention.free();
  }
}

/** Milliseconds of one call: the median of rounds that take turns, so that a busy machine hits both alike. */
async function times(gpu: Gpu, calls: readonly (() => Promise<void>)[], signal: AbortSignal): Promise<number[]> {
  const rounds = 5;
  const repeats: number[] = [];
  for (const call of calls) {
    // Compiles, and says how often a round has to repeat to be measurable.
    await call();
    await gpu.idle();
    const started = performance.now();
    await call();
    await gpu.idle();
    repeats.push(Math.max(1, Math.min(20, Math.round(30 / Math.max(performance.now() - started, 0.5)))));
  }
  const found: number[][] = calls.map(() => []);
  for (let round = 0; round < rounds; round++) {
    for (const [which, call] of calls.entries()) {
      signal.throwIfAborted();
      const repeat = repeats[which] ?? 1;
      const started = performance.now();
      // Together: none waits for the browser to have checked the one before.
      await Promise.all(Array.from({ length: repeat }, call));
      await gpu.idle();
      found[which]?.push((performance.now() - started) / repeat);
    }
  }
  return found.map((list) => list.sort((a, b) => a - b)[Math.floor(list.length / 2)] ?? Number.NaN);
}

async function sample(gpu: Gpu, mods: Partial<Mods>, name: string, length: number, density: number, watch: Watch): Promise<Sample> {
  const attention = new Attention(gpu, mods);
  const held: { destroy: () => void }[] = [{ destroy: () => attention.free() }];
  try {
    const tensors = inputs({ heads: HEADS, qLen: length, kvLen: length, headDim: DIM, dtype: "f32" });
    const { device } = gpu;
    if (device === null) {
      const fused = async (): Promise<void> => void (await attention.forward(...tensors));
      const [ms = Number.NaN] = await times(gpu, [fused], watch.signal);
      return { density, length, ms, baselineMs: null, name };
    }
    const buffers = tensors.map(({ data }) => {
      const buffer = device.createBuffer({ size: data.byteLength, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST });
      device.queue.writeBuffer(buffer, 0, data as Float32Array<ArrayBuffer>);
      held.push(buffer);
      return buffer;
    }) as [GPUBuffer, GPUBuffer, GPUBuffer];
    const [q, k, v] = buffers.map((data): Tensor<GPUBuffer> => ({ data, shape: tensors[0].shape })) as [Tensor<GPUBuffer>, Tensor<GPUBuffer>, Tensor<GPUBuffer>];
    const fused = async (): Promise<void> => {
      const { out, lse } = await attention.forward(q, k, v);
      out.data.destroy();
      lse.destroy();
    };
    const plain = await unfused(device, HEADS, length, buffers);
    if (plain) held.push(plain);
    const [ms = Number.NaN, baselineMs = null] = await times(gpu, plain ? [fused, async () => plain.run()] : [fused], watch.signal);
    return { density, length, ms, baselineMs, name };
  } finally {
    for (const one of held) one.destroy();
  }
}

/** The length at which a dense call takes long enough to measure and short enough to wait for. */
async function reach(gpu: Gpu, watch: Watch): Promise<number> {
  const { ms, baselineMs } = await sample(gpu, {}, "probe", 256, 1, watch);
  const slowest = Math.max(ms, baselineMs ?? 0);
  let length = 512;
  // Dense work grows with the square of the length; a sample repeats a call about a dozen times.
  while (length < 8192 && slowest * (2 * length / 256) ** 2 < 250) length *= 2;
  return length;
}

export interface Times {
  density: Sample[];
  length: Sample[];
}

/** Times against density (windows of several widths, causal and everything, with the page's score) and against length (the page's own mods). `found` hears of each sample. */
export async function measure(gpu: Gpu, modsAt: (length: number) => Mods, densityOf: (length: number, mask: MaskMod) => number, watch: Watch, found: (times: Times) => void): Promise<Times> {
  const times: Times = { density: [], length: [] };
  watch.progress(0, "finding a length that suits this machine");
  const longest = await reach(gpu, watch);
  const masks: [string, MaskMod][] = [16, 8, 4, 2].map((part) => [`window of ${longest / part}`, { name: "sliding_window", window: longest / part }]);
  masks.push(["causal", { name: "causal" }], ["everything", { name: "noop" }]);
  const lengths = [longest / 8, longest / 4, longest / 2, longest].filter((length) => length >= 128);
  const steps = masks.length + lengths.length;
  let done = 0;
  for (const [name, maskMod] of masks) {
    watch.progress(done++ / steps, `${name}, ${longest} tokens`);
    const density = densityOf(longest, maskMod);
    times.density.push(await sample(gpu, { ...modsAt(longest), maskMod }, name, longest, density, watch));
    times.density.sort((a, b) => a.density - b.density);
    found(times);
  }
  for (const length of lengths) {
    watch.progress(done++ / steps, `your mask, ${length} tokens`);
    const mods = modsAt(length);
    times.length.push(await sample(gpu, mods, "your mask", length, densityOf(length, mods.maskMod), watch));
    found(times);
  }
  watch.progress(1, "done");
  return times;
}
