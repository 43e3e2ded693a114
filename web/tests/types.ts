// Type tests: compiled against the packed package, never run. `expect-error` lines must be errors.
import init, {
  Attention,
  BlockMask,
  check,
  emit,
  FlexattnError,
  Gpu,
  prebuilt,
  sdpa,
  spell,
  type Diagnostic,
  type ErrorKind,
  type HostData,
  type MaskMod,
  type Output,
  type ScoreMod,
  type Tensor,
  type Tier,
} from "flexattn";

type Same<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false;
const same = <A, B>(_: Same<A, B>): void => {};

async function calls(device: GPUDevice, buffer: GPUBuffer): Promise<void> {
  await init();
  await init(new URL("https://example.org/flexattn.wasm"));
  const gpu = await Gpu.create({ tier: "portable" });
  using shared = await Gpu.fromDevice(device);
  same<Tier, typeof gpu.tier>(true);
  same<GPUDevice | null, typeof shared.device>(true);

  const host: Tensor<Float32Array> = { data: new Float32Array(64), shape: [1, 1, 8, 8] };
  const half = { data: new Uint16Array(64), shape: [1, 1, 8, 8], dtype: "bf16" } as const;
  const onGpu: Tensor<GPUBuffer> = { data: buffer, shape: [1, 1, 8, 8], strides: [64, 64, 8, 1], offset: 0 };

  const attention = new Attention(gpu, {
    maskMod: { all: ["q >= kv", { name: "sliding_window", window: 256 }, { not: { any: ["q == kv"] } }] },
    scoreMod: [{ name: "softcap", cap: 30 }, "score + slope(h)"],
    captures: { slope: new Float32Array(8), table: { data: new Uint16Array(4), dtype: "f16", shape: [2, 2] } },
    scalars: { rate: 0.5, window: { i32: 3 } },
    qOffset: [1, 2],
    kvLen: 7,
    sinks: [0, 0],
  });

  const a = await attention.forward(host, host, host);
  same<Float32Array, typeof a.out.data>(true);
  same<Float32Array, typeof a.lse>(true);
  same<Float32Array | null, typeof a.max>(true);
  const b = await attention.forward(onGpu, onGpu, onGpu, { max: true });
  same<GPUBuffer, typeof b.out.data>(true);
  same<GPUBuffer, typeof b.lse>(true);
  const c = await attention.forward(onGpu, onGpu, onGpu, { to: "host" });
  same<HostData, typeof c.out.data>(true);
  const d = await attention.forward(host, host, host, { to: "gpu" });
  same<GPUBuffer, typeof d.out.data>(true);
  const e = await attention.forward(half, half, half);
  same<Uint16Array<ArrayBuffer>, typeof e.out.data>(true);

  const gradients = await attention.backward(host, host, host, a, host, { wants: ["q"], wantsCaptures: ["slope"] });
  same<Float32Array | undefined, (typeof gradients.dq & object)["data"] | undefined>(true);
  const output: Output<"host" | "gpu"> = a;
  void output;

  const blocks = BlockMask.build({ name: "causal" }, { qLen: 1024, kvLen: 1024 });
  same<number, typeof blocks.density>(true);
  same<number, ReturnType<typeof blocks.picture>["width"]>(true);
  const plain = await sdpa(gpu, host, host, host, { causal: true, mask: { any: ["kv == 0", { name: "causal" }] }, bias: { data: new Float32Array(64), shape: [1, 1, 8, 8] } });
  same<Float32Array, typeof plain.data>(true);

  const findings: Diagnostic[] = check({ maskMod: "q >" });
  void findings.map(({ from, to, line, column, message, mod }) => [from, to, line, column, message, mod] as const);
  same<"mask" | "score", ReturnType<typeof prebuilt>[number]["kind"]>(true);
  void emit({ language: "msl", pass: "decode", headDim: 128, dtype: "f16" })[0]?.text.length;
  void spell("mask", { name: "causal" }, { qLen: 8, kvLen: 8 }).text;

  try {
    new Attention(gpu, { maskMod: "nonsense" });
  } catch (error) {
    if (error instanceof FlexattnError) {
      same<ErrorKind, typeof error.kind>(true);
      void error.position?.line;
    }
  }

  // @ts-expect-error a name that is not in the library
  const unknown: MaskMod = { name: "sliding_widow" };
  // @ts-expect-error a parameter that the mask does not have
  const extra: MaskMod = { name: "causal", window: 3 };
  // @ts-expect-error a score mod is not a mask
  const wrong: MaskMod = { name: "alibi" };
  // @ts-expect-error three dimensions
  const flat: Tensor = { data: new Float32Array(8), shape: [1, 8, 8] };
  // @ts-expect-error a language that is not emitted
  emit({ language: "glsl" });
  // @ts-expect-error a mask is a mod, not numbers
  await sdpa(gpu, host, host, host, { mask: new Float32Array(64) });
  // @ts-expect-error no such tier in a page
  await Gpu.create({ tier: "metal" });
  const score: ScoreMod = "score";
  void [unknown, extra, wrong, flat, score];
}
void calls;
