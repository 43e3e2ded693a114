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
import * as wasm from "./wasm/flexattn_web.js";

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
export type Scalar = number | boolean | { readonly f32: number } | { readonly i32: number } | { readonly u32: number };

/** Captured tensors and scalars, by the names that the mods use. */
export interface Values {
  readonly captures?: Readonly<Record<string, Capture | Float32Array | Int32Array | Uint32Array>> | undefined;
  readonly scalars?: Readonly<Record<string, Scalar>> | undefined;
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
  wasm.start(FlexattnError);
}

async function besideThisFile(): Promise<URL | BufferSource> {
  const url = new URL("./wasm/flexattn_web_bg.wasm", import.meta.url);
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
