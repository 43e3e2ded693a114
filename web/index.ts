/// <reference lib="esnext.disposable" preserve="true" />
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
 * place: it may be an output of another engine on the same device. An array is copied in each call.
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

/**
 * A captured tensor: mods read it by name, one i32 index per dimension, each clamped to its range.
 *
 * An array is copied when it is given. A `GPUBuffer` is read in place, one in a call; since its values are not known here, a
 * mask that reads it skips no blocks, unless it comes with a {@link BlockMask}.
 */
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

/**
 * What went wrong. `parse` and `expression` are about a mod; `out-of-memory` and `device-lost` about the
 * GPU; `usage` is a call that could never work: before `init()`, after `free()`, with a promise where its
 * result is meant, or with an option that does not exist.
 */
export type ErrorKind =
  | "usage"
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
 * Bundlers that understand `new URL(..., import.meta.url)`, as Vite does, and CDNs that serve the package's
 * files need no argument. Node reads the file from disk.
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
  loaded = true;
}

let loaded = false;

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
// Guards: what cannot work is refused here, in words, before it reaches the module

/** The module, once it is there. */
function module(): typeof wasm {
  if (!loaded) throw new FlexattnError("the WebAssembly module is not loaded yet; `await init()` once, before anything else", "usage");
  return wasm;
}

const isObject = (value: unknown): value is Record<PropertyKey, unknown> => typeof value === "object" && value !== null;
const isPromise = (value: unknown): boolean => isObject(value) && typeof value["then"] === "function";
// Not by `instanceof`: Node has no such class in its scope.
const isBuffer = (value: unknown): value is GPUBuffer => isObject(value) && typeof value["mapAsync"] === "function";

/** A value in words, for a message. */
function what(value: unknown): string {
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value === "function") return "a function";
  if (!isObject(value)) return String(value);
  if (isPromise(value)) return "a promise";
  if (Array.isArray(value)) return "a list";
  const tag = value[Symbol.toStringTag];
  const name = typeof tag === "string" ? tag : (value.constructor?.name ?? "Object");
  if (name === "Object") return Object.keys(value).length === 0 ? "{}" : `an object with ${Object.keys(value).join(", ")}`;
  return /^[AEIOU]/.test(name) ? `an ${name}` : `a ${name}`;
}

/** Refuses what lacks these methods, and so is not the object of WebGPU that is meant. */
function mustHave(value: unknown, methods: readonly string[], whose: string, wanted: string, remedy: string): void {
  if (isObject(value) && methods.every((name) => typeof value[name] === "function")) return;
  throw new FlexattnError(`${whose} is ${what(value)} but must be ${wanted}; ${isPromise(value) ? "`await` the promise first" : remedy}`, "usage");
}

/** How many letters differ, whatever the case and the underscores. */
function distance(a: string, b: string): number {
  const [x, y] = [a, b].map((word) => word.toLowerCase().replace(/[_-]/g, "")) as [string, string];
  if (x !== "" && (y.startsWith(x) || x.startsWith(y))) return 1;
  let row = Array.from({ length: y.length + 1 }, (_, j) => j);
  for (let i = 1; i <= x.length; i++) {
    const next = [i];
    for (let j = 1; j <= y.length; j++) {
      next.push(Math.min((next[j - 1] ?? 0) + 1, (row[j] ?? 0) + 1, (row[j - 1] ?? 0) + (x[i - 1] === y[j - 1] ? 0 : 1)));
    }
    row = next;
  }
  return row[y.length] ?? 0;
}

/** Refuses options of other names: a typo would otherwise change a result without a word. */
function known(options: unknown, of: string, keys: readonly string[]): void {
  if (!isObject(options) || Array.isArray(options) || isPromise(options)) {
    throw new FlexattnError(`${of} was given ${what(options)} but takes an object with ${keys.join(", ")}`, "usage");
  }
  for (const key of Object.keys(options)) {
    if (keys.includes(key) || options[key] === undefined) continue;
    const [nearest] = [...keys].sort((a, b) => distance(key, a) - distance(key, b));
    const close = nearest !== undefined && distance(key, nearest) <= Math.max(1, key.length / 3);
    const hint = close ? `did you mean ${nearest}? It` : ATTENTION.includes(key) ? "it is said to new Attention. It" : "it";
    throw new FlexattnError(`${of} has no option ${key}; ${hint} takes ${keys.join(", ")}`, "usage");
  }
}

const VALUES = ["captures", "scalars"];
const MASK_SHAPE = ["batch", "heads", "qLen", "kvLen", "qOffset", "kvLens", "block"];
const ATTENTION = ["maskMod", "scoreMod", "blockMask", "scale", "qOffset", "kvLen", "sinks", ...VALUES];
const CALL = ["scale", "qOffset", "kvLen", "to", ...VALUES];

/** Refuses what text cannot say about a tensor: a size that is no number, more elements than the shape has. */
function holds(tensor: unknown, name: string): void {
  if (isPromise(tensor)) throw new FlexattnError(`${name} is a promise; \`await\` it first`, "usage");
  if (!isObject(tensor)) return;
  const { data, shape } = tensor;
  if (!Array.isArray(shape) || shape.length !== 4) return;
  for (const [axis, size] of shape.entries()) {
    if (Number.isInteger(size) && size >= 0) continue;
    const which = ["batch", "heads", "length", "head_dim"][axis];
    throw new FlexattnError(`${name}.shape[${axis}] (${which}) is ${what(size)} but must be a whole number from 0 up`, "shape");
  }
  if (isBuffer(data)) {
    if (typeof data.size === "number" && typeof data.usage === "number") return;
    throw new FlexattnError(`${name}.data has a method mapAsync but is no GPUBuffer; pass the buffer itself`, "usage");
  }
  const count = shape.reduce((product: number, size: number) => product * size, 1);
  const length = ArrayBuffer.isView(data) && "length" in data ? Number(data.length) : count;
  if (length > count && tensor["strides"] === undefined && tensor["offset"] === undefined) {
    const remedy = `pass data.subarray(0, ${count}), or give strides or offset to read a part of a larger memory`;
    throw new FlexattnError(`${name}.data has ${length} elements but shape [${shape.join(", ")}] has ${count}; ${remedy}`, "shape");
  }
}

/** Refuses a function where a mod is meant. */
function written(mod: unknown, which: "mask" | "score"): void {
  if (Array.isArray(mod)) return mod.forEach((part) => written(part, which));
  if (isObject(mod)) return [mod["all"], mod["any"], mod["not"]].forEach((part) => written(part, which));
  if (typeof mod !== "function") return;
  const others = which === "mask" ? 'a mask of the library ({ name: "causal" }) or a combination ({ all: [...] })' : 'a modification of the library ({ name: "softcap", cap: 30 }) or a list of those';
  throw new FlexattnError(
    `${which}Mod is a function, which cannot become a kernel; give text ("${which === "mask" ? "q >= kv" : "score * 0.5"}"), ${others}`,
    "expression",
    which,
  );
}

interface ModOptions extends Values {
  readonly maskMod?: unknown;
  readonly scoreMod?: unknown;
}

/** The texts in a mod. */
function texts(mod: unknown): string[] {
  if (typeof mod === "string") return [mod];
  if (Array.isArray(mod)) return mod.flatMap(texts);
  return isObject(mod) ? [mod["all"], mod["any"], mod["not"]].flatMap(texts) : [];
}

/** What to write instead, where the place of a mistake shows what was meant. It follows the message. */
function hint(message: string, which: "mask" | "score" | undefined, place: Position | undefined, options: ModOptions): string {
  if (which === undefined || place === undefined) return "";
  for (const text of texts(which === "mask" ? options.maskMod : options.scoreMod)) {
    const word = text.slice(place.from, place.to);
    const names = (wasm.prebuilt() as Prebuilt[]).filter(({ name }) => name === word);
    const own = names.find(({ kind }) => kind === which) ?? names[0];
    if (own !== undefined) return `; ${word} is a ${own.kind === "mask" ? "mask" : "score modification"} of the library: give { name: "${word}" } as ${own.kind}Mod, not text`;
    if (Object.hasOwn(options.captures ?? {}, word) && !message.includes(`${word}(`)) return `; a captured tensor is read as ${word}(i), with one index per dimension`;
    if (/^[A-Za-z_]\w*$/.test(word) && message.includes("no definition") && !/captures?\b/.test(message)) {
      return "; a tensor or scalar must be given in captures or scalars, and a tensor is read as name(i)";
    }
    if (!/\bf32\b/.test(message)) continue;
    const plain = Object.entries(options.scalars ?? {}).filter(([, value]) => Number.isInteger(value));
    const read = (from: string) => plain.find(([name]) => new RegExp(`\\b${name}\\b`).test(from));
    const scalar = read(word) ?? read(text);
    if (scalar !== undefined) return `; a plain number is an f32: for a whole number give ${scalar[0]}: { i32: ${String(scalar[1])} }`;
  }
  return "";
}

/** Reads mods, with the hint that a mistake calls for. */
function reading<T>(options: ModOptions, read: () => T): T {
  written(options.maskMod, "mask");
  written(options.scoreMod, "score");
  try {
    return read();
  } catch (error) {
    if (!(error instanceof FlexattnError)) throw error;
    throw new FlexattnError(error.message + hint(error.message, error.mod, error.position, options), error.kind, error.mod, error.position);
  }
}

/** What browsers say about a page's buffers, and what to do about it. */
const REMEDIES: readonly (readonly [RegExp, string])[] = [
  [/associated with/, "a GPUBuffer belongs to another device; make it on gpu.device, or adopt its device with `await Gpu.fromDevice(device)`"],
  [/destroyed/, "a GPUBuffer was destroyed before the call that uses it was submitted; destroy it once the promise has settled"],
  [/mapped/, "a GPUBuffer is mapped; unmap() it before the call"],
  [/synchronization scope|aliasing|overlap/i, "out shares bytes with q, k or v; in a buffer that they share, out needs a part of its own that starts at a multiple of 256 bytes"],
];

/** The error of a call, with the remedy before the browser's own words. */
function explained(error: unknown): unknown {
  if (!(error instanceof FlexattnError) || error.kind !== "buffer") return error;
  const found = REMEDIES.find(([says]) => says.test(error.message));
  return found ? new FlexattnError(`${found[1]} (${error.message})`, "buffer") : error;
}

/** What is left of something after `free()`: a clear word. */
function unfreed<T>(raw: T | undefined, what: string): T {
  if (raw === undefined) throw new FlexattnError(`this ${what} was freed; make a new one, or call free() later`, "usage");
  return raw;
}

const deviceLost = ({ message, reason }: GPUDeviceLostInfo) =>
  new FlexattnError(`the GPU device was lost (${message || reason}); create a new Gpu and upload the tensors again`, "device-lost");

// ---------------------------------------------------------------------------------------------
// Gpu

/** Features worth having: 16-bit arithmetic, shuffles, and time stamps for measuring. */
const FEATURES: readonly GPUFeatureName[] = ["shader-f16", "subgroups", "timestamp-query"];

/** Limits that attention presses against. */
const LIMITS = [
  "maxBufferSize",
  "maxStorageBufferBindingSize",
  "maxComputeWorkgroupStorageSize",
  "maxComputeInvocationsPerWorkgroup",
  "maxComputeWorkgroupSizeX",
  "maxStorageBuffersPerShaderStage",
] as const;

/** Refuses what is no device: within the module, a missing method would end nowhere. */
function mustBeDevice(device: unknown): asserts device is GPUDevice {
  const methods = ["createBuffer", "createBindGroup", "createShaderModule", "createComputePipelineAsync", "createCommandEncoder", "pushErrorScope", "popErrorScope"];
  mustHave(device, methods, "what Gpu.fromDevice was given", "a GPUDevice", "`await adapter.requestDevice()` gives one, and so does an engine's own device");
}

function mustBeAdapter(adapter: unknown): asserts adapter is GPUAdapter {
  mustHave(adapter, ["requestDevice"], "adapter", "a GPUAdapter", "`await navigator.gpu.requestAdapter()` gives one, or null where there is none");
}

function tierOf({ tier }: Pick<GpuOptions, "tier">): Tier | undefined {
  if (tier === undefined || ["subgroup", "portable", "cpu"].includes(tier)) return tier;
  throw new FlexattnError(`tier ${tier} was asked for but a page has subgroup, portable and cpu; leave it out for the best of them`, "unsupported");
}

/** A device with everything of use that the adapter has, or why there is none. */
async function newDevice({ adapter, gpu }: GpuOptions): Promise<GPUDevice | string> {
  const said = (error: unknown) => (error instanceof Error ? error.message : String(error));
  let found: GPUAdapter | null | undefined = adapter;
  if (found === undefined) {
    const entry = gpu ?? (globalThis.navigator as Navigator | undefined)?.gpu;
    if (entry === undefined) return "there is no WebGPU here (navigator.gpu is missing: an older browser, or a page without https)";
    mustHave(entry, ["requestAdapter"], "gpu", "the entry point of WebGPU", "leave it out in a page; in Node, it is what create([]) of the package webgpu gives");
    try {
      found = await entry.requestAdapter({ powerPreference: "high-performance" });
    } catch (error) {
      return `WebGPU offers no adapter: ${said(error)}`;
    }
    if (!found) return "WebGPU is here but offers no adapter";
  }
  mustBeAdapter(found);
  try {
    return await found.requestDevice({ label: "flexattn", requiredFeatures: Gpu.wantedFeatures(found), requiredLimits: Gpu.wantedLimits(found) });
  } catch (error) {
    return `the adapter gave no device: ${said(error)}`;
  }
}

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
  #raw: wasm.Gpu | undefined;
  #loss: GPUDeviceLostInfo | undefined;
  /** What the device was made from. In Node it must outlive the device, so it is kept here. */
  readonly #entry: GPU | undefined;
  /** The tier in use. */
  readonly tier: Tier;
  /** The adapter in words, as the browser describes it; on the `cpu` tier, "WebAssembly". */
  readonly adapter: string;
  /** One sentence per better tier of a page, saying why it is not in use. Empty when nothing better exists. */
  readonly notes: readonly string[];
  /** The device, to share with another engine; `null` on the `cpu` tier. */
  readonly device: GPUDevice | null;
  /** Settles when the device is gone: driver reset, unplugged, destroyed. Make a new Gpu then. Never settles on the `cpu` tier. */
  readonly lost: Promise<GPUDeviceLostInfo>;

  private constructor(raw: wasm.Gpu, entry?: GPU) {
    this.#raw = raw;
    this.#entry = entry;
    this.tier = raw.tier as Tier;
    this.adapter = raw.adapter;
    this.notes = raw.notes;
    this.device = raw.device ?? null;
    this.lost = this.device?.lost ?? new Promise<GPUDeviceLostInfo>(() => {});
    // Before anybody else can wait for it, so that whoever has waited meets a Gpu that knows.
    void this.lost.then((info) => (this.#loss = info));
  }

  /**
   * Makes a device of its own with everything that the kernels can use (shader-f16, subgroups,
   * timestamp-query, the adapter's own limits). Without WebGPU the result is on the `cpu` tier and
   * {@link notes} says why.
   */
  static async create(options: GpuOptions = {}): Promise<Gpu> {
    const raw = module().Gpu;
    known(options, "Gpu.create", ["tier", "adapter", "gpu"]);
    const tier = tierOf(options);
    if (tier === "cpu") return new Gpu(raw.cpu("the cpu tier was asked for"));
    const device = await newDevice(options);
    if (typeof device !== "string") return Gpu.#adopt(device, true, tier, options.gpu);
    if (tier === undefined) return new Gpu(raw.cpu(device));
    throw new FlexattnError(`${device}; without a tier, the cpu tier is used`, "unsupported");
  }

  /**
   * Adopts a device that the page or another engine made, and never changes or destroys it. Kernels
   * use the features that it was created with: request those of {@link wantedFeatures} for speed.
   * Rejects for a device that is lost already.
   */
  static async fromDevice(device: GPUDevice, options: Pick<GpuOptions, "tier"> = {}): Promise<Gpu> {
    const raw = module().Gpu;
    mustBeDevice(device);
    known(options, "Gpu.fromDevice", ["tier"]);
    const tier = tierOf(options);
    return tier === "cpu" ? new Gpu(raw.cpu("the cpu tier was asked for")) : Gpu.#adopt(device, false, tier);
  }

  static async #adopt(device: GPUDevice, owned: boolean, tier: Tier | undefined, entry?: GPU): Promise<Gpu> {
    const lost = device.lost.then(deviceLost);
    // The answer to a scope comes after the news of a loss before it, and does not wait for the GPU's work.
    device.pushErrorScope("validation");
    await Promise.race([lost, device.popErrorScope().catch(() => null)]);
    const gone = await Promise.race([lost, pause()]);
    if (gone) throw gone;
    return new Gpu(await wasm.Gpu.adopt(device, owned, tier), entry);
  }

  /** The features of this adapter worth requesting for a device that will run attention. */
  static wantedFeatures(adapter: GPUAdapter): GPUFeatureName[] {
    mustBeAdapter(adapter);
    return FEATURES.filter((name) => adapter.features.has(name));
  }

  /** The limits of this adapter worth requesting for a device that will run attention. */
  static wantedLimits(adapter: GPUAdapter): Record<string, number> {
    mustBeAdapter(adapter);
    return Object.fromEntries(LIMITS.map((name) => [name, adapter.limits[name]]).filter(([, limit]) => limit !== undefined));
  }

  /** @internal */
  get raw(): wasm.Gpu {
    return unfreed(this.#raw, "Gpu");
  }

  /** @internal Refuses a call that could not take effect any more. */
  alive(): void {
    unfreed(this.#raw, "Gpu");
    if (this.#loss) throw deviceLost(this.#loss);
  }

  /** Waits until everything submitted so far has run; rejects with what went wrong on the GPU, if anything did. */
  async idle(): Promise<void> {
    this.alive();
    try {
      await this.raw.idle();
    } catch (error) {
      throw explained(error);
    }
  }

  /** Releases caches and, if {@link create} made the device, the device. Calls made later reject. */
  free(): void {
    this.#raw?.dispose();
    this.#raw?.free();
    this.#raw = undefined;
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

/**
 * Which blocks of the query-key grid a mask keeps. Built inside {@link Attention} when it is not given.
 *
 * It brings the mask that it was built from, which is asked in partial blocks only: an
 * {@link Attention} that takes it needs no `maskMod`.
 */
export class BlockMask {
  #raw: wasm.BlockMask | undefined;
  /** Batch entries and heads that it was laid over, where it was said: more than {@link distinct} where all are alike. */
  readonly #of: readonly [batch: number, heads: number];

  private constructor(raw: wasm.BlockMask, of: readonly [batch: number, heads: number]) {
    this.#raw = raw;
    this.#of = of;
  }

  /** From a mask, by range analysis where it decides and by looking where it does not. */
  static build(maskMod: MaskMod, shape: MaskShape, values: Values = {}): BlockMask {
    const raw = module().BlockMask;
    known(shape, "the shape of a block mask", MASK_SHAPE);
    known(values, "BlockMask.build", VALUES);
    return new BlockMask(reading({ maskMod, ...values }, () => raw.build(maskMod, shape, values)), [shape.batch ?? 1, shape.heads ?? 1]);
  }

  /** From the value of every pair, `[batch, heads, qLen, kvLen]` row-major, 0 for masked. */
  static fromDense(mask: Uint8Array, shape: MaskShape): BlockMask {
    const raw = module().BlockMask;
    known(shape, "the shape of a block mask", MASK_SHAPE);
    return new BlockMask(raw.fromDense(mask, shape), [shape.batch ?? 1, shape.heads ?? 1]);
  }

  /** From packed sequences: the offsets at which they start, and the total length last. */
  static fromOffsets(offsets: readonly number[] | Uint32Array | Int32Array, causal = false): BlockMask {
    return new BlockMask(module().BlockMask.fromOffsets(Array.from(offsets), causal), [1, Infinity]);
  }

  /** What {@link toBytes} gave. It holds blocks, not the mask: use it together with the `maskMod` that they are of. */
  static fromBytes(bytes: Uint8Array): BlockMask {
    return new BlockMask(module().BlockMask.fromBytes(bytes), [Infinity, Infinity]);
  }

  /** @internal */
  get raw(): wasm.BlockMask {
    return unfreed(this.#raw, "BlockMask");
  }

  /** Refuses a batch entry or head that the mask does not have. */
  #has(batch: number, head: number): void {
    const { distinct } = this;
    for (const [name, at, own, of] of [["batch", batch, distinct.batch, this.#of[0]], ["head", head, distinct.heads, this.#of[1]]] as const) {
      const count = own === 1 ? of : own;
      if (Number.isInteger(at) && at >= 0 && at < count) continue;
      const rule = Number.isFinite(count) ? `below ${count}, as many as the mask has` : "0 or more";
      throw new FlexattnError(`${name} is ${what(at)} but must be a whole number ${rule}`, "shape");
    }
  }

  #with(other: BlockMask, raw: wasm.BlockMask): BlockMask {
    return new BlockMask(raw, [Math.max(this.#of[0], other.#of[0]), Math.max(this.#of[1], other.#of[1])]);
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
    this.#has(batch, head);
    return this.raw.blocks(batch, head);
  }

  /** The mask itself over a window of one batch entry and head, row-major, 1 for kept. */
  tokens(window: { batch?: number; head?: number; q: readonly [from: number, to: number]; kv: readonly [from: number, to: number] }): Uint8Array {
    const { batch = 0, head = 0, q, kv } = window;
    this.#has(batch, head);
    return this.raw.tokens(batch, head, q[0], q[1], kv[0], kv[1]);
  }

  /** Pairs that both keep. */
  and(other: BlockMask): BlockMask {
    return this.#with(other, this.raw.and(other.raw));
  }

  /** Pairs that either keeps. */
  or(other: BlockMask): BlockMask {
    return this.#with(other, this.raw.or(other.raw));
  }

  /** Pairs that this one masks. */
  not(): BlockMask {
    return this.#with(this, this.raw.not());
  }

  /**
   * The blocks as pixels, one per tile of a 4 by 4 part of a block, or at most 1024 each way: `new ImageData(data, width, height)`
   * puts them on a canvas. Batch entries stand below, heads beside each other, up to 16 of each, a pixel apart.
   */
  picture(): { readonly width: number; readonly height: number; readonly data: Uint8ClampedArray<ArrayBuffer> } {
    return this.raw.picture();
  }

  /** The blocks in a form to store. */
  toBytes(): Uint8Array {
    return this.raw.toBytes();
  }

  /** For a console: a line of sizes, then a character per block (`█` full, `▒` partial, `·` empty), or fewer where they are many. */
  toString(): string {
    return this.raw.toText();
  }

  /** Releases its memory in the module. Once is enough, and more does no harm; it cannot be used afterwards. */
  free(): void {
    this.#raw?.free();
    this.#raw = undefined;
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
  /**
   * Blocks known beforehand. Without it they are found from `maskMod` and remembered.
   *
   * Pairs of full blocks are kept and those of empty ones are not, without asking; a mask is asked in
   * partial blocks only. It is the one that the blocks were built from, so `maskMod` is left out: another
   * one is refused. Blocks of {@link BlockMask.fromBytes} bring none; there, `maskMod` must be the mask that
   * they are of, which nothing can check. Captured values that change the mask need new blocks too.
   */
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

/** Attention's result. On the GPU, each is a buffer of its own that belongs to the caller, who destroys it. */
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

/** Gradients. What was not asked for is `null`. Two calls give the same bits, but for some of `captures`. */
export interface Gradients<R extends Residence, D extends HostData | GPUBuffer = HostData | GPUBuffer> {
  readonly dq: OutputTensor<DataIn<R, D>> | null;
  readonly dk: OutputTensor<DataIn<R, D>> | null;
  readonly dv: OutputTensor<DataIn<R, D>> | null;
  /** `[heads]`: of the attention sinks. */
  readonly dsinks: FloatsIn<R> | null;
  /**
   * By name, in the capture's shape, f32. Of a capture that is indexed by `q` and `kv` together and whose elements several
   * pairs read, such as a table of distances, the last bits may differ from call to call: its sums are made in any order.
   */
  readonly captures: Readonly<Record<string, FloatsIn<R>>>;
}

/**
 * An attention operation: a mask, a score modification, and the kernel that they became.
 *
 * Calls return at once with a promise and take effect in the order in which they were made. Once its kernels
 * are compiled, a call is one submit; work of more than about half a second is cut into several. Few query
 * rows against many keys run as split decode by themselves. The heads of q are a multiple of those of
 * k and v (grouped queries), and a batch of 1 in k and v serves every batch entry of q.
 */
export class Attention {
  #raw: wasm.Attention | undefined;
  readonly #gpu: Gpu;

  /** @throws {FlexattnError} for a mod that does not hold up, with the position in its text. */
  constructor(gpu: Gpu, options: AttentionOptions = {}) {
    const raw = module().Attention;
    if (!(gpu instanceof Gpu)) {
      const remedy = isPromise(gpu) ? "`await Gpu.create()` first" : "`await Gpu.create()` gives one";
      throw new FlexattnError(`new Attention was given ${what(gpu)} but its first argument must be a Gpu; ${remedy}`, "usage");
    }
    known(options, "new Attention", ATTENTION);
    const { blockMask } = options;
    if (blockMask !== undefined && !(blockMask instanceof BlockMask)) {
      throw new FlexattnError(`blockMask is ${what(blockMask)} but must be a BlockMask; BlockMask.build(maskMod, shape) makes one`, "usage");
    }
    const blocks = blockMask?.raw;
    const made = reading(options, () => new raw(gpu.raw, options));
    try {
      if (blocks) made.useBlockMask(blocks);
    } catch (error) {
      made.free();
      throw error;
    }
    this.#raw = made;
    this.#gpu = gpu;
  }

  /** One call. Its work is given to the device before this returns; `onGpu` says where the results stay. */
  async #call<T>(tensors: Readonly<Record<string, unknown>>, options: object, of: string, keys: readonly string[], give: (raw: wasm.Attention) => Promise<unknown>): Promise<T> {
    const raw = unfreed(this.#raw, "Attention");
    this.#gpu.alive();
    known(options, of, keys);
    for (const [name, tensor] of Object.entries(tensors)) holds(tensor, name);
    let result: unknown;
    try {
      result = await give(raw);
    } catch (error) {
      throw explained(error);
    }
    // What has reached the host stays good. A buffer of a lost device is good for nothing.
    if (isObject(result) && Object.values(result).some((part) => isBuffer(part) || (isObject(part) && isBuffer(part["data"])))) this.#gpu.alive();
    return result as T;
  }

  /** softmax(scoreMod(q kᵀ scale)) v over the kept pairs. */
  forward<D extends HostData | GPUBuffer, R extends Residence = HomeOf<D>>(
    q: Tensor<D>,
    k: Tensor,
    v: Tensor,
    options: ForwardOptions<R> = {},
  ): Promise<Output<R, D>> {
    return this.#call({ q, k, v, out: options?.out }, options, "forward", [...CALL, "max", "out"], (raw) => raw.forward(q, k, v, options));
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
    return this.#call({ q, k, v, output, "output.out": output?.out, dout }, options, "backward", [...CALL, "dlse", "wants", "wantsCaptures"], (raw) =>
      raw.backward(q, k, v, output, dout, options),
    );
  }

  /** The attention weights of some query rows, `[batch, heads, rows.length, kvLen]`: for looking at, not for speed. */
  weights(q: Tensor, k: Tensor, rows: readonly number[], options: CallOptions<"host"> = {}): Promise<Float32Array> {
    return this.#call({ q, k }, options, "weights", CALL, (raw) => raw.weights(q, k, rows, options));
  }

  /** The same result straight from the definition, in f64, on the CPU: slow, and for comparing. */
  reference(q: Tensor<HostData>, k: Tensor<HostData>, v: Tensor<HostData>, options: CallOptions<"host"> = {}): Reference {
    const raw = unfreed(this.#raw, "Attention");
    known(options, "reference", CALL);
    for (const [name, tensor] of Object.entries({ q, k, v })) holds(tensor, name);
    return raw.reference(q, k, v, options) as Reference;
  }

  /** Releases its memory in the module. Once is enough, and more does no harm; it cannot be used afterwards. */
  free(): void {
    this.#raw?.free();
    this.#raw = undefined;
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

/** Options of {@link sdpa}. */
export interface SdpaOptions {
  /** Which pairs are kept: all, unless given. A text reads no captures here; `{ name: "dense", keep, shape }` is a mask as a tensor. */
  readonly mask?: MaskMod | undefined;
  /** Whether query `q` sees keys 0 to `q` only, of those that `mask` keeps. */
  readonly causal?: boolean | undefined;
  /** Added to the scores, after the scale: floats of shape `[1 or B, 1 or H, L, S]`. */
  readonly bias?: Capture | undefined;
  /** Factor of the dot products: 1 / sqrt(headDim) unless given. */
  readonly scale?: number | undefined;
}

/** Plain attention in one call. Where it is called again and again, an {@link Attention} keeps its kernels. */
export async function sdpa<D extends HostData | GPUBuffer>(
  gpu: Gpu,
  q: Tensor<D>,
  k: Tensor,
  v: Tensor,
  options: SdpaOptions = {},
): Promise<OutputTensor<DataIn<HomeOf<D>, D>>> {
  known(options, "sdpa", ["mask", "causal", "bias", "scale"]);
  const { mask, causal = false, bias, scale } = options;
  const [first, second] = [mask, ...(causal ? ["q >= kv"] : [])].filter((one) => one !== undefined);
  if (bias !== undefined && Array.isArray(q?.shape) && Array.isArray(k?.shape)) fitsBias(bias, q, k);
  const attention = new Attention(gpu, {
    scale,
    maskMod: first === undefined || second === undefined ? first : { all: [first, second] },
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

/** Refuses a bias of another shape: its indices would be clamped, without a word. */
function fitsBias(bias: Capture, q: Tensor, k: Tensor): void {
  const shape = isObject(bias) ? bias.shape : undefined;
  const [batch, heads, qLen] = q.shape;
  const sizes = [batch, heads, qLen, k.shape[2]];
  const fits = Array.isArray(shape) && shape.length === 4 && shape.every((size, axis) => size === sizes[axis] || (axis < 2 && size === 1));
  if (fits) return;
  const found = Array.isArray(shape) ? `bias.shape is [${shape.join(", ")}]` : `bias.shape is ${what(shape)}`;
  throw new FlexattnError(`${found} but must be [1 or ${batch}, 1 or ${heads}, ${sizes[2]}, ${sizes[3]}]: batch, heads, queries, keys`, "capture");
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
  return module().prebuilt();
}

/** A mod spelled out: text, and the tensors and scalars that it reads. */
export interface Spelled {
  readonly text: string;
  readonly captures: Readonly<Record<string, Capture>>;
  readonly scalars: Readonly<Record<string, Scalar>>;
}

/** Spells a mod as the expression that it became, simplified; parameters that depend on sizes follow `shape`. */
export function spell(kind: "mask" | "score", mod: MaskMod | ScoreMod, shape: MaskShape, values: Values = {}): Spelled {
  const { spell } = module();
  known(shape, "the shape of spell", MASK_SHAPE);
  known(values, "spell", VALUES);
  return reading({ [`${kind}Mod`]: mod, ...values }, () => spell(kind, mod, shape, values));
}

/** What is wrong with the mods' texts, for an editor: empty when nothing is. Nothing is compiled. */
export function check(options: Pick<AttentionOptions, "maskMod" | "scoreMod" | "captures" | "scalars">): Diagnostic[] {
  const { check } = module();
  known(options, "check", ATTENTION);
  return (check(options) as Diagnostic[]).map((found) => ({ ...found, message: found.message + hint(found.message, found.mod, found, options) }));
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
  const { emit } = module();
  known(options, "emit", ["maskMod", "scoreMod", "language", "pass", "headDim", "vDim", "dtype", "tier", ...VALUES]);
  const { language } = options;
  if (language !== "wgsl" && language !== "msl") throw new FlexattnError(`language is ${what(language)} but must be "wgsl" or "msl"`, "unsupported");
  for (const name of ["headDim", "vDim"] as const) {
    const size = options[name];
    if (size === undefined || (Number.isInteger(size) && size > 0)) continue;
    throw new FlexattnError(`${name} is ${what(size)} but must be a whole number from 1 up`, "shape");
  }
  return reading(options, () => emit(options));
}
