/**
 * FlexAttention for WebGPU. A mask and a score modification, written once, become a fused and
 * block-sparse attention kernel on the page's GPU.
 *
 * ```ts
 * import init, { Gpu, Attention } from "flexattn";
 * await init();
 * const gpu = await Gpu.create();
 * const attention = new Attention(gpu, { maskMod: "q >= kv && q - kv < 256" });
 * const { out, lse } = await attention.forward(q, k, v);
 * ```
 *
 * Conventions, everywhere: tensors are `[batch, heads, length, head_dim]`; `lse` and `max` are in
 * natural units (natural logarithm, after the scale); a row that keeps nothing gives out 0 and lse
 * -Infinity. `h` in a mod is the QUERY head.
 *
 * @module
 */
import * as wasm from "./wasm/flexattn.js";

// ---------------------------------------------------------------------------------------------
// Tensors

/** Element type of q, k, v and out. Sums and softmax are f32 whatever this is. */
export type DType = "f32" | "f16" | "bf16";

/** A `Float16Array`, spelled structurally so that this file also serves TypeScript versions whose library lacks it. */
export interface Float16ArrayLike extends ArrayBufferView {
  readonly BYTES_PER_ELEMENT: number;
  readonly length: number;
  readonly [Symbol.toStringTag]: "Float16Array";
  [index: number]: number;
}

/** Elements in this program's memory. A `Uint16Array` holds the bits of f16 or bf16: its tensor says which with `dtype`. */
export type HostData = Float32Array | Float16ArrayLike | Uint16Array;

/** `[batch, heads, length, head_dim]`. */
export type Shape = readonly [batch: number, heads: number, length: number, headDim: number];

/**
 * A tensor, row-major unless `strides` says otherwise.
 *
 * A `GPUBuffer` must belong to the device of the {@link Gpu} and have `STORAGE` usage. It is read in
 * place, without a copy: it may be an output of another engine on the same device.
 */
export interface Tensor<D extends HostData | GPUBuffer = HostData | GPUBuffer> {
  readonly data: D;
  readonly shape: Shape;
  /** Implied by a `Float32Array` or `Float16Array`; needed for a `Uint16Array`; f32 for a `GPUBuffer` that does not say. */
  readonly dtype?: DType | undefined;
  /** In elements, one per dimension; the innermost must be 1. `[B, L, H, D]` memory is a stride choice. */
  readonly strides?: Shape | undefined;
  /** Position of the first element, in elements. */
  readonly offset?: number | undefined;
}

/** A tensor that this library made: contiguous, and its dtype is always there. */
export interface OutputTensor<D extends HostData | GPUBuffer> extends Tensor<D> {
  readonly dtype: DType;
}

/** Where results should be: in this program's memory, or left on the GPU. */
export type Residence = "host" | "gpu";

type FloatsIn<R extends Residence> = R extends "gpu" ? GPUBuffer : Float32Array;
type DataIn<R extends Residence, D extends HostData | GPUBuffer> = R extends "gpu" ? GPUBuffer : D extends HostData ? D : HostData;
type HomeOf<D extends HostData | GPUBuffer> = D extends GPUBuffer ? "gpu" : "host";

// ---------------------------------------------------------------------------------------------
// Mods

/** Element type of a captured tensor. */
export type CaptureType = "f32" | "f16" | "bf16" | "i32" | "u32" | "bool";

/** A captured tensor: mods read it by name, one i32 index per dimension, each clamped to its range. */
export interface Capture {
  readonly data: Float32Array | Float16ArrayLike | Int32Array | Uint32Array | Uint16Array | Uint8Array | readonly boolean[] | GPUBuffer;
  /** Implied by the array's type (a `Uint8Array` is bool); needed for a `Uint16Array` and a `GPUBuffer`. */
  readonly dtype?: CaptureType | undefined;
  /** Row-major. `[]` is a single value, read as `name()`. A flat array that does not say is one-dimensional. */
  readonly shape?: readonly number[] | undefined;
}

/** A run-time scalar: changing it compiles nothing. A plain number is an f32. */
export type Scalar = number | { readonly f32: number } | { readonly i32: number } | { readonly u32: number };

/** Captured tensors and scalars, by the names that the mods use. */
export interface Values {
  readonly captures?: Readonly<Record<string, Capture | Float32Array | Int32Array | Uint32Array>> | undefined;
  readonly scalars?: Readonly<Record<string, Scalar>> | undefined;
}

/** One number for each of something, in the order that the parameter's description says. */
export type Numbers = readonly number[] | Float32Array | Int32Array | Uint32Array;

/** The library's masks and their parameters. Each parameter has a default that suits the sizes of the call. */
export interface MaskParameters {
  noop: {};
  causal: {};
  bottom_right_causal: {};
  /** The query itself counts: `window: 1` is the diagonal. */
  sliding_window: { window?: number };
  local_window: { before?: number; after?: number };
  dilated_window: { window?: number; dilation?: number };
  prefix_lm: { prefix?: number };
  prefix_lm_per_batch: { prefix?: Numbers };
  padding: { lengths?: Numbers };
  document: { ids?: Numbers };
  document_per_batch: { ids?: Numbers };
  document_from_offsets: { offsets?: Numbers };
  packed_causal_document: { offsets?: Numbers };
  row_interval: { first?: Numbers; end?: Numbers };
  longformer: { window?: number; is_global?: Numbers };
  strided: { window?: number; stride?: number };
  block_diagonal: { size?: number };
  natten_2d: { height?: number; width?: number; kernel?: number };
  sliding_tile_2d: { canvas?: Numbers; tile?: Numbers; window?: Numbers; text?: number };
  sliding_tile_3d: { canvas?: Numbers; tile?: Numbers; window?: Numbers; text?: number };
  shared_prefix: { ids?: Numbers; prefix_of?: Numbers };
  block_diffusion: { len?: number; block?: number };
  tree: { prefix?: number; parents?: Numbers };
  interval: { group?: Numbers; intervals?: Numbers };
  dense: { keep?: Numbers; shape?: Numbers };
}

/** The library's score modifications and their parameters. */
export interface ScoreParameters {
  identity: {};
  alibi: { slopes?: Numbers };
  softcap: { cap?: number };
  relative_bias: { table?: Numbers; reach?: number };
  t5_bucket_bias: { table?: Numbers; max_distance?: number; bidirectional?: number };
  head_bias: { bias?: Numbers };
  dense_bias: { bias?: Numbers; shape?: Numbers };
  distance_penalty: { rate?: number };
  temperature: { temperature?: number };
  log_n: { train_len?: number };
  sandwich: { dim?: number; reach?: number };
  head_gate: { gate?: Numbers };
}

/** A mask from the library, by name, with its parameters. `prebuilt()` lists them. */
export type PrebuiltMask = { readonly [N in keyof MaskParameters]: { readonly name: N } & MaskParameters[N] }[keyof MaskParameters];

/** A score modification from the library, by name, with its parameters. `prebuilt()` lists them. */
export type PrebuiltScore = { readonly [N in keyof ScoreParameters]: { readonly name: N } & ScoreParameters[N] }[keyof ScoreParameters];

/**
 * Which (query, key) pairs are kept. WGSL text, either a whole function
 * `fn mask_mod(b: i32, h: i32, q: i32, kv: i32) -> bool { ... }` or only its expression; or a mask from
 * the library; or a combination of masks. Plain data: it can be stored, and posted to a Worker.
 */
export type MaskMod =
  | string
  | PrebuiltMask
  | { readonly all: readonly MaskMod[] }
  | { readonly any: readonly MaskMod[] }
  | { readonly not: MaskMod };

/**
 * What becomes of a score (after the scale, before the softmax). WGSL text, either a whole function
 * `fn score_mod(score: f32, b: i32, h: i32, q: i32, kv: i32) -> f32 { ... }` or only its expression; or
 * a modification from the library; or a list of them, applied in order.
 */
export type ScoreMod = string | PrebuiltScore | readonly ScoreMod[];

// ---------------------------------------------------------------------------------------------
// Errors

/** What went wrong. `parse` and `expression` are about a mod; `out-of-memory` and `device-lost` about the GPU. */
export type ErrorKind =
  | "shape"
  | "dtype"
  | "capture"
  | "expression"
  | "parse"
  | "overflow"
  | "limit"
  | "unsupported"
  | "buffer"
  | "compile"
  | "out-of-memory"
  | "device-lost"
  | "format";

/** A place in the text of a mod. Lines and columns count from 1, `from` and `to` are UTF-16 offsets. */
export interface Position {
  readonly line: number;
  readonly column: number;
  readonly from: number;
  readonly to: number;
}

/** Every error of this library. The message states the value found, the rule, and the remedy. */
export class FlexattnError extends Error {
  override readonly name = "FlexattnError";
  readonly kind: ErrorKind;
  /** Which mod's text is at fault, where one is. */
  readonly mod: "mask" | "score" | undefined;
  readonly position: Position | undefined;

  /** @internal */
  constructor(message: string, kind: ErrorKind, mod?: "mask" | "score", position?: Position) {
    super(message);
    this.kind = kind;
    this.mod = mod;
    this.position = position;
  }
}

/** One finding about the text of a mod, as an editor shows it. */
export interface Diagnostic extends Position {
  readonly mod: "mask" | "score";
  readonly message: string;
}

// ---------------------------------------------------------------------------------------------
// Loading

/** Where the WebAssembly module comes from; without it, from beside this file. */
export type ModuleSource = URL | string | Request | Response | Promise<Response> | BufferSource | WebAssembly.Module;

/**
 * Loads the WebAssembly module. Await it once before anything else; later calls return at once.
 *
 * Bundlers that understand `new URL(..., import.meta.url)` (Vite, webpack 5, Rollup, Parcel) and CDNs
 * that serve the package's files need no argument. Node reads the file from disk.
 */
export default function init(source?: ModuleSource): Promise<void> {
  loading ??= load(source).catch((error: unknown) => {
    loading = undefined;
    throw error;
  });
  return loading;
}

let loading: Promise<void> | undefined;

async function load(source: ModuleSource | undefined): Promise<void> {
  await wasm.default({ module_or_path: source ?? (await besideThisFile()) });
  wasm.start(FlexattnError, pause);
}

/** Lets the page handle what is waiting. A message port, because timers are held back to 4 ms and more. */
function pause(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

async function besideThisFile(): Promise<URL | BufferSource> {
  const url = new URL("./wasm/flexattn_bg.wasm", import.meta.url);
  if (url.protocol !== "file:") return url;
  // Node's fetch does not read files. The name is spelled so that bundlers for pages leave it alone.
  const fs = "node:fs/promises";
  const { readFile } = (await import(/* @vite-ignore */ /* webpackIgnore: true */ fs)) as typeof import("node:fs/promises");
  return readFile(url);
}

// ---------------------------------------------------------------------------------------------
// Gpu

/**
 * Which kernels run: `subgroup` (shuffles between the lanes of a subgroup), `portable` (core WebGPU) or
 * `cpu` (no WebGPU here: WebAssembly, one core, in slices that keep the page responsive).
 */
export type Tier = "subgroup" | "portable" | "cpu";

export interface GpuOptions {
  /** Forces a tier instead of the best one here; refused where the device cannot run it. */
  readonly tier?: Tier | undefined;
  /** The adapter to make the device on. Without it, the browser's high-performance choice. */
  readonly adapter?: GPUAdapter | undefined;
  /** The entry point, where it is not `navigator.gpu` (Node with the `webgpu` package). */
  readonly gpu?: GPU | undefined;
}

/** A device to run on. Everything that is made with it stays on it. */
export class Gpu {
  /** @internal */
  readonly raw: wasm.Gpu;
  /** The tier in use. */
  readonly tier: Tier;
  /** The adapter in words, as the browser describes it; on the `cpu` tier, "WebAssembly". */
  readonly adapter: string;
  /** One sentence per better tier, saying why it is not in use. Empty when nothing better exists. */
  readonly notes: readonly string[];
  /** The device, to share with another engine; `null` on the `cpu` tier. */
  readonly device: GPUDevice | null;
  /** Settles when the device is gone: driver reset, unplugged, destroyed. Make a new Gpu then. Never settles on the `cpu` tier. */
  readonly lost: Promise<GPUDeviceLostInfo>;

  private constructor(raw: wasm.Gpu) {
    this.raw = raw;
    this.tier = raw.tier as Tier;
    this.adapter = raw.adapter;
    this.notes = raw.notes;
    this.device = raw.device ?? null;
    this.lost = this.device?.lost ?? new Promise<GPUDeviceLostInfo>(() => {});
  }

  /**
   * Makes a device of its own with everything that the kernels can use (shader-f16, subgroups,
   * timestamp-query, the adapter's own limits). Without WebGPU the result is on the `cpu` tier and
   * {@link notes} says why.
   */
  static async create(options: GpuOptions = {}): Promise<Gpu> {
    return new Gpu(await wasm.Gpu.create(options));
  }

  /**
   * Adopts a device that the page or another engine made, and never changes or destroys it. Kernels
   * use the features that it was created with: request those of {@link wantedFeatures} for speed.
   */
  static async fromDevice(device: GPUDevice, options: Pick<GpuOptions, "tier"> = {}): Promise<Gpu> {
    return new Gpu(await wasm.Gpu.fromDevice(device, options));
  }

  /** The features of this adapter worth requesting for a device that will run attention. */
  static wantedFeatures(adapter: GPUAdapter): GPUFeatureName[] {
    return wasm.Gpu.wantedFeatures(adapter) as GPUFeatureName[];
  }

  /** The limits of this adapter worth requesting for a device that will run attention. */
  static wantedLimits(adapter: GPUAdapter): Record<string, number> {
    return wasm.Gpu.wantedLimits(adapter) as Record<string, number>;
  }

  /** Waits until everything submitted so far has run; rejects with what went wrong on the GPU, if anything did. */
  async idle(): Promise<void> {
    await this.raw.idle();
  }

  /** Releases caches and, if {@link create} made the device, the device. */
  free(): void {
    this.raw.dispose();
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

// ---------------------------------------------------------------------------------------------
// BlockMask

/** The sizes that a mask is laid over. */
export interface MaskShape {
  /** 1 unless the mask depends on `b`. */
  readonly batch?: number | undefined;
  /** Query heads; 1 unless the mask depends on `h`. */
  readonly heads?: number | undefined;
  readonly qLen: number;
  readonly kvLen: number;
  /** Position of query row 0, per batch entry or for all: 0 unless given. */
  readonly qOffset?: number | readonly number[] | undefined;
  /** How many keys count, per batch entry: all unless given. */
  readonly kvLens?: readonly number[] | undefined;
  /** Rows and columns of a block, 128 by 128 unless given. Kernels take 128 by 128. */
  readonly block?: readonly [rows: number, columns: number] | undefined;
}

/** The blocks of one batch entry and head. */
export interface Blocks {
  readonly rows: number;
  readonly columns: number;
  /** Row-major: 0 empty (skipped), 1 partial (the mask decides pair by pair), 2 full (the mask is not asked). */
  readonly kinds: Uint8Array;
  /** Row-major, for 128 by 128 blocks: 4 by 4 tiles of 32 by 32, two bits each with the same meaning; tile (r, c) is at bit `2 * (4 * r + c)`. */
  readonly tiles: Uint32Array;
}

/** Which blocks of the query-key grid a mask keeps. Built inside {@link Attention} when it is not given. */
export class BlockMask {
  /** @internal */
  readonly raw: wasm.BlockMask;

  private constructor(raw: wasm.BlockMask) {
    this.raw = raw;
  }

  /** From a mask, by range analysis where it decides and by looking where it does not. */
  static build(maskMod: MaskMod, shape: MaskShape, values: Values = {}): BlockMask {
    return new BlockMask(wasm.BlockMask.build(maskMod, shape, values));
  }

  /** From the value of every pair, `[batch, heads, qLen, kvLen]` row-major, 0 for masked. */
  static fromDense(mask: Uint8Array, shape: MaskShape): BlockMask {
    return new BlockMask(wasm.BlockMask.fromDense(mask, shape));
  }

  /** From packed sequences: the offsets at which they start, and the total length last. */
  static fromOffsets(offsets: readonly number[] | Uint32Array | Int32Array, causal = false): BlockMask {
    return new BlockMask(wasm.BlockMask.fromOffsets(Array.from(offsets), causal));
  }

  /** What {@link toBytes} gave. It holds blocks, not the mask: use it together with a `maskMod`. */
  static fromBytes(bytes: Uint8Array): BlockMask {
    return new BlockMask(wasm.BlockMask.fromBytes(bytes));
  }

  get qLen(): number {
    return this.raw.qLen;
  }

  get kvLen(): number {
    return this.raw.kvLen;
  }

  /** Batch entries and heads with lists of their own: 1 where all are alike. */
  get distinct(): { readonly batch: number; readonly heads: number } {
    return { batch: this.raw.batch, heads: this.raw.heads };
  }

  /** Kept pairs over all pairs. Counts them where ranges leave it open. */
  get density(): number {
    return this.raw.density();
  }

  /** Pairs in empty blocks over all pairs: the part of the work that is never visited. */
  get sparsity(): number {
    return this.raw.sparsity();
  }

  /** The blocks of one batch entry and head. */
  blocks(batch = 0, head = 0): Blocks {
    return this.raw.blocks(batch, head);
  }

  /** The mask itself over a window of one batch entry and head, row-major, 1 for kept. */
  tokens(window: { batch?: number; head?: number; q: readonly [from: number, to: number]; kv: readonly [from: number, to: number] }): Uint8Array {
    const { batch = 0, head = 0, q, kv } = window;
    return this.raw.tokens(batch, head, q[0], q[1], kv[0], kv[1]);
  }

  /** Pairs that both keep. */
  and(other: BlockMask): BlockMask {
    return new BlockMask(this.raw.and(other.raw));
  }

  /** Pairs that either keeps. */
  or(other: BlockMask): BlockMask {
    return new BlockMask(this.raw.or(other.raw));
  }

  /** Pairs that this one masks. */
  not(): BlockMask {
    return new BlockMask(this.raw.not());
  }

  /** The blocks as pixels, one per 32 by 32 tile where that fits 1024: `new ImageData(data, width, height)` puts them on a canvas. */
  picture(): { readonly width: number; readonly height: number; readonly data: Uint8ClampedArray<ArrayBuffer> } {
    return this.raw.picture();
  }

  /** The blocks in a form to store. */
  toBytes(): Uint8Array {
    return this.raw.toBytes();
  }

  /** The blocks as text, one character each. */
  toString(): string {
    return this.raw.toText();
  }

  free(): void {
    this.raw.free();
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

// ---------------------------------------------------------------------------------------------
// Attention

/** What an attention operation means. */
export interface AttentionOptions extends Values {
  /** Which pairs are kept: all, unless given. */
  readonly maskMod?: MaskMod | undefined;
  /** What becomes of a score: nothing, unless given. */
  readonly scoreMod?: ScoreMod | undefined;
  /** Blocks known beforehand. Without it they are found from `maskMod` and remembered. */
  readonly blockMask?: BlockMask | undefined;
  /** Factor of the dot products: 1 / sqrt(headDim) unless given. */
  readonly scale?: number | undefined;
  /** Position of query row 0, for all or per batch entry: what `q` in a mod counts from. */
  readonly qOffset?: number | readonly number[] | undefined;
  /** How many keys count, for all or per batch entry: the filled part of a cache. */
  readonly kvLen?: number | readonly number[] | undefined;
  /** One attention sink per query head: a key of this score that has no value. */
  readonly sinks?: readonly number[] | Float32Array | undefined;
}

/** What may change from call to call; none of it compiles anything. */
export interface CallOptions<R extends Residence = Residence> extends Values, Pick<AttentionOptions, "scale" | "qOffset" | "kvLen"> {
  /** Where results go: where `q` is, unless given. */
  readonly to?: R | undefined;
}

/** Options of {@link Attention.forward}. */
export interface ForwardOptions<R extends Residence = Residence> extends CallOptions<R> {
  /** Whether the largest kept score of each row is wanted. */
  readonly max?: boolean | undefined;
  /** Where `out` is written, on the GPU: it may lie in the same buffer as q, k and v. A new buffer unless given. */
  readonly out?: Tensor<GPUBuffer> | undefined;
}

/** Attention's result. On the GPU, buffers belong to the caller, who destroys them. */
export interface Output<R extends Residence, D extends HostData | GPUBuffer = HostData | GPUBuffer> {
  /** `[batch, heads, qLen, vDim]`, in the dtype of q. */
  readonly out: OutputTensor<DataIn<R, D>>;
  /** `[batch, heads, qLen]`: natural logarithm of the sum of exponentials of a row's kept scores; -Infinity for a row that keeps nothing. */
  readonly lse: FloatsIn<R>;
  /** `[batch, heads, qLen]`: the largest kept score; -Infinity for a row that keeps nothing. `null` unless asked for. */
  readonly max: FloatsIn<R> | null;
}

/** What {@link Attention.backward} is given and asked for. */
export interface BackwardOptions<R extends Residence = Residence> extends CallOptions<R> {
  /** Gradient of `lse`, `[batch, heads, qLen]`; 0 unless given. */
  readonly dlse?: Float32Array | GPUBuffer | undefined;
  /** Which gradients: all of q, k and v unless given. Only these are computed. */
  readonly wants?: readonly ("q" | "k" | "v" | "sinks")[] | undefined;
  /** Names of captured float tensors that the score mod reads and whose gradients are wanted. */
  readonly wantsCaptures?: readonly string[] | undefined;
}

/** Gradients. What was not asked for is `null`. */
export interface Gradients<R extends Residence, D extends HostData | GPUBuffer = HostData | GPUBuffer> {
  readonly dq: OutputTensor<DataIn<R, D>> | null;
  readonly dk: OutputTensor<DataIn<R, D>> | null;
  readonly dv: OutputTensor<DataIn<R, D>> | null;
  /** `[heads]`: of the attention sinks. */
  readonly dsinks: FloatsIn<R> | null;
  /** By name, in the capture's shape, f32. */
  readonly captures: Readonly<Record<string, FloatsIn<R>>>;
}

/**
 * An attention operation: a mask, a score modification, and the kernel that they became.
 *
 * Calls return at once with a promise and take effect in the order in which they were made. Few query
 * rows against many keys run as split decode by themselves. The heads of q are a multiple of those of
 * k and v (grouped queries), and a batch of 1 in k and v serves every batch entry of q.
 */
export class Attention {
  /** @internal */
  readonly raw: wasm.Attention;

  /** @throws {FlexattnError} for a mod that does not hold up, with the position in its text. */
  constructor(gpu: Gpu, options: AttentionOptions = {}) {
    this.raw = new wasm.Attention(gpu.raw, options);
    if (options.blockMask) this.raw.useBlockMask(options.blockMask.raw);
  }

  /** softmax(scoreMod(q kᵀ scale)) v over the kept pairs. */
  forward<D extends HostData | GPUBuffer, R extends Residence = HomeOf<D>>(
    q: Tensor<D>,
    k: Tensor,
    v: Tensor,
    options: ForwardOptions<R> = {},
  ): Promise<Output<R, D>> {
    return this.raw.forward(q, k, v, options) as Promise<Output<R, D>>;
  }

  /** Gradients of a loss, given those of `out` and, if it depends on it, of `lse`. `output` is what {@link forward} returned for the same q, k and v. */
  backward<D extends HostData | GPUBuffer, R extends Residence = HomeOf<D>>(
    q: Tensor<D>,
    k: Tensor,
    v: Tensor,
    output: Output<Residence>,
    dout: Tensor,
    options: BackwardOptions<R> = {},
  ): Promise<Gradients<R, D>> {
    return this.raw.backward(q, k, v, output, dout, options) as Promise<Gradients<R, D>>;
  }

  /** The attention weights of some query rows, `[batch, heads, rows.length, kvLen]`: for looking at, not for speed. */
  weights(q: Tensor, k: Tensor, rows: readonly number[], options: CallOptions<"host"> = {}): Promise<Float32Array> {
    return this.raw.weights(q, k, rows, options);
  }

  /** The same result straight from the definition, in f64, on the CPU: slow, and for comparing. */
  reference(q: Tensor<HostData>, k: Tensor<HostData>, v: Tensor<HostData>, options: CallOptions<"host"> = {}): Reference {
    return this.raw.reference(q, k, v, options);
  }

  free(): void {
    this.raw.free();
  }

  [Symbol.dispose](): void {
    this.free();
  }
}

/** What {@link Attention.reference} gives, in f64. */
export interface Reference {
  readonly out: Float64Array;
  readonly lse: Float64Array;
  readonly max: Float64Array;
}

/** Plain attention in one call: an optional bias that is added to the scores, `[1 or B, 1 or H, L, S]`. */
export async function sdpa<D extends HostData | GPUBuffer>(
  gpu: Gpu,
  q: Tensor<D>,
  k: Tensor,
  v: Tensor,
  options: { readonly causal?: boolean; readonly bias?: Capture; readonly scale?: number } = {},
): Promise<OutputTensor<DataIn<HomeOf<D>, D>>> {
  const { causal = false, bias, scale } = options;
  const attention = new Attention(gpu, {
    scale,
    ...(causal ? { maskMod: { name: "causal" } } : {}),
    // An index past a dimension of 1 is clamped to it, which is what broadcasting means.
    ...(bias === undefined ? {} : { scoreMod: "score + bias(b, h, q, kv)", captures: { bias } }),
  });
  try {
    const { out } = await attention.forward(q, k, v);
    return out;
  } finally {
    attention.free();
  }
}

// ---------------------------------------------------------------------------------------------
// Looking inside

/** A mask or score modification of the library. */
export interface Prebuilt {
  readonly kind: "mask" | "score";
  readonly name: string;
  /** What it says, in the notation of the mods. */
  readonly formula: string;
  readonly parameters: readonly { readonly name: string; readonly about: string }[];
}

/** Every mask and score modification that can be asked for by name. */
export function prebuilt(): readonly Prebuilt[] {
  return wasm.prebuilt();
}

/** A mod spelled out: text, and the tensors and scalars that it reads. */
export interface Spelled {
  readonly text: string;
  readonly captures: Readonly<Record<string, Capture>>;
  readonly scalars: Readonly<Record<string, Scalar>>;
}

/** Spells a mod as the expression that it became, simplified; parameters that depend on sizes follow `shape`. */
export function spell(kind: "mask" | "score", mod: MaskMod | ScoreMod, shape: MaskShape, values: Values = {}): Spelled {
  return wasm.spell(kind, mod, shape, values);
}

/** What is wrong with the mods' texts, for an editor: empty when nothing is. Nothing is compiled. */
export function check(options: Pick<AttentionOptions, "maskMod" | "scoreMod" | "captures" | "scalars">): Diagnostic[] {
  return wasm.check(options);
}

/** What {@link emit} is told. */
export interface EmitOptions extends Values {
  readonly maskMod?: MaskMod | undefined;
  readonly scoreMod?: ScoreMod | undefined;
  /** `wgsl` is the dialect of browsers. */
  readonly language: "wgsl" | "msl";
  readonly pass?: "forward" | "decode" | "backward" | undefined;
  readonly headDim?: number | undefined;
  readonly vDim?: number | undefined;
  readonly dtype?: DType | undefined;
  /** The tier whose kernel is meant: `portable` unless given. Without meaning for MSL. */
  readonly tier?: Exclude<Tier, "cpu"> | undefined;
}

/** One kernel of a pass, complete and ready for any compiler of its language. */
export interface KernelText {
  /** Spells the variant: entry point, dtype, dims, tile. */
  readonly label: string;
  readonly entryPoint: string;
  readonly workgroup: readonly [number, number, number];
  readonly text: string;
}

/** The kernels that mods become. No device is needed. */
export function emit(options: EmitOptions): KernelText[] {
  return wasm.emit(options);
}
