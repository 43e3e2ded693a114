// What cannot work is refused in words: value found, rule, remedy. In node, on the cpu tier.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { before, describe, test } from "node:test";
import * as flexattn from "../dist/index.js";

const { Attention, BlockMask, check, emit, FlexattnError, Gpu, sdpa, spell } = flexattn;

/** The error that `attempt` throws or rejects with; anything but a FlexattnError fails, and so does silence. */
async function refusal(attempt) {
  try {
    await attempt();
  } catch (error) {
    assert.ok(error instanceof FlexattnError, `not a FlexattnError: ${error}`);
    return error;
  }
  return assert.fail(`accepted: ${attempt}`);
}
const refused = async (attempt, ...texts) => {
  const error = await refusal(attempt);
  for (const text of texts) assert.match(error.message, text);
  return error;
};

const tensor = (length = 2, dim = 4, fill = 1) => ({ data: new Float32Array(length * dim).fill(fill), shape: [1, 1, length, dim] });
const waves = (length, dim, seed) => ({ data: Float32Array.from({ length: length * dim }, (_, i) => Math.sin(seed + i * 1.7)), shape: [1, 1, length, dim] });

test("before init, everything says so", async () => {
  // A process of its own, in which nobody has called init.
  const tries = ["await Gpu.create()", "await Gpu.fromDevice({})", "new Attention({})", "BlockMask.build('q >= kv', { qLen: 1, kvLen: 1 })", "BlockMask.fromBytes(new Uint8Array(8))", "prebuilt()", "spell('mask', 'q >= kv', { qLen: 1, kvLen: 1 })", "check({})", "emit({ language: 'wgsl' })", "await sdpa()"];
  const program = `import * as all from ${JSON.stringify(new URL("../dist/index.js", import.meta.url).href)};
    const { Gpu, Attention, BlockMask, prebuilt, spell, check, emit, sdpa, FlexattnError } = all;
    const said = [];
    ${tries.map((attempt) => `try { ${attempt}; said.push("accepted"); } catch (error) { said.push(error instanceof FlexattnError ? error.message : "opaque: " + error); }`).join("\n")}
    console.log(JSON.stringify(said));`;
  const said = JSON.parse(execFileSync(process.execPath, ["--input-type=module", "-e", program], { encoding: "utf8" }));
  said.forEach((message, at) => assert.match(message, /await init\(\)/, `${tries[at]}: ${message}`));
});

describe("after init", () => {
  let gpu;
  let attention;
  before(async () => {
    await flexattn.default();
    gpu = await Gpu.create({ tier: "cpu" });
    attention = new Attention(gpu);
  });

  test("what is no device, adapter or entry point is refused, with what to await", { timeout: 10_000 }, async () => {
    class GPUAdapter {
      requestDevice() {}
    }
    const adapter = new GPUAdapter();
    await refused(() => Gpu.fromDevice(undefined), /is undefined but must be a GPUDevice; `await adapter.requestDevice\(\)`/);
    await refused(() => Gpu.fromDevice({}), /is \{\} but must be a GPUDevice/);
    await refused(() => Gpu.fromDevice(adapter), /is a GPUAdapter but must be a GPUDevice; .*requestDevice/);
    await refused(() => Gpu.fromDevice(Promise.resolve()), /is a promise but must be a GPUDevice; `await` the promise/);
    await refused(() => Gpu.create({ gpu: {} }), /gpu is \{\} but must be the entry point/);
    await refused(() => Gpu.create({ adapter: Promise.resolve(adapter) }), /adapter is a promise .*`await`/);
    await refused(() => Gpu.create({ adapter: null }), /adapter is null/);
    await refused(() => Gpu.wantedFeatures(undefined), /adapter is undefined/);
    await refused(() => Gpu.create({ tier: "metal" }), /tier metal .*subgroup, portable and cpu/);
  });

  test("what WebGPU itself throws is the reason for the cpu tier, or rejects", { timeout: 10_000 }, async () => {
    const gpu = { requestAdapter: () => { throw new Error("not today"); } };
    assert.match((await Gpu.create({ gpu })).notes[0], /not today/);
    await refused(() => Gpu.create({ gpu, tier: "portable" }), /not today; without a tier/);
    const adapter = { features: new Set(), limits: {}, requestDevice: async () => { throw new Error("used up"); } };
    assert.match((await Gpu.create({ adapter })).notes[0], /used up/);
  });

  test("a lost device is refused", { timeout: 10_000 }, async () => {
    const nothing = () => {};
    const device = Object.fromEntries(["createBuffer", "createBindGroup", "createShaderModule", "createComputePipelineAsync", "createCommandEncoder", "pushErrorScope"].map((name) => [name, nothing]));
    Object.assign(device, { popErrorScope: async () => null, lost: Promise.resolve({ reason: "destroyed", message: "gone" }) });
    assert.equal((await refused(() => Gpu.fromDevice(device), /lost \(gone\); create a new Gpu/)).kind, "device-lost");
  });

  test("notes name only tiers that a page can have", async () => {
    assert.doesNotMatch((await Gpu.create()).notes.join(), /metal|coop/);
  });

  test("a Gpu that is none is refused, with await where it is a promise", async () => {
    await refused(() => new Attention(Gpu.create()), /a promise but its first argument must be a Gpu; `await Gpu.create\(\)` first/);
    await refused(() => new Attention(), /was given undefined/);
    await refused(() => new Attention({ maskMod: "q >= kv" }), /an object with maskMod/);
    await refused(() => new Attention(gpu, { blockMask: {} }), /blockMask is \{\} .*BlockMask.build/);
  });

  test("free may be called twice, and use after it says so", async () => {
    const own = await Gpu.create({ tier: "cpu" });
    const short = new Attention(own);
    const blocks = BlockMask.build("q >= kv", { qLen: 4, kvLen: 4 });
    const x = tensor();
    const flying = short.forward(x, x, x);
    for (const each of [short, blocks]) {
      each.free();
      each.free();
    }
    assert.equal((await flying).out.data[0], 1);
    await refused(() => short.forward(x, x, x), /this Attention was freed/);
    await refused(() => short.weights(x, x, [0]), /this Attention was freed/);
    await refused(() => short.reference(x, x, x), /this Attention was freed/);
    await refused(() => blocks.density, /this BlockMask was freed/);
    await refused(() => new Attention(own, { blockMask: blocks }), /this BlockMask was freed/);
    const left = new Attention(own);
    own.free();
    own.free();
    await refused(() => left.forward(x, x, x), /this Gpu was freed/);
    await refused(() => new Attention(own), /this Gpu was freed/);
    await refused(() => own.idle(), /this Gpu was freed/);
  });

  test("options of other names are refused, with the nearest name", async () => {
    const x = tensor();
    const error = await refused(() => new Attention(gpu, { mask: "q >= kv" }), /new Attention has no option mask; did you mean maskMod\?/);
    assert.equal(error.kind, "usage");
    await refused(() => new Attention(gpu, { mask_mod: "q >= kv" }), /did you mean maskMod\?/);
    await refused(() => new Attention(gpu, { score: "score" }), /did you mean scoreMod\?/);
    await refused(() => new Attention(gpu, "q >= kv"), /was given "q >= kv" but takes an object with maskMod/);
    await refused(() => attention.forward(x, x, x, { kv_len: 1 }), /forward has no option kv_len; did you mean kvLen\?/);
    await refused(() => attention.forward(x, x, x, { maskMod: "q >= kv" }), /maskMod; it is said to new Attention/);
    await refused(() => attention.backward(x, x, x, {}, x, { want: ["q"] }), /did you mean wants\?/);
    await refused(() => attention.weights(x, x, [0], { max: true }), /no option max/);
    await refused(() => attention.reference(x, x, x, { kvlen: 1 }), /did you mean kvLen\?/);
    await refused(() => Gpu.create({ teir: "cpu" }), /no option teir/);
    await refused(() => BlockMask.build("q >= kv", { qlen: 4, kvLen: 4 }), /did you mean qLen\?/);
    await refused(() => spell("mask", "q >= kv", { qLen: 1, kvLen: 1 }, { capture: {} }), /did you mean captures\?/);
    await refused(() => check({ maskmod: "q" }), /did you mean maskMod\?/);
    await refused(() => emit({ language: "wgsl", head_dim: 64 }), /did you mean headDim\?/);
    await refused(() => sdpa(gpu, x, x, x, { casual: true }), /did you mean causal\?/);
    // What is not said is not said, whatever its name.
    new Attention(gpu, { mask: undefined, maskMod: undefined }).free();
  });

  test("sizes that are no numbers, and data that its shape does not cover", async () => {
    const x = tensor();
    await refused(() => attention.forward({ ...x, shape: [1, 1, Number.NaN, 4] }, x, x), /q\.shape\[2\] \(length\) is NaN/);
    await refused(() => attention.forward(x, { ...x, shape: [1, "1", 2, 4] }, x), /k\.shape\[1\] \(heads\) is "1"/);
    const long = { data: new Float32Array(12), shape: [1, 1, 2, 4] };
    const error = await refused(() => attention.forward(x, x, long), /v\.data has 12 elements but shape \[1, 1, 2, 4\] has 8; pass data\.subarray\(0, 8\), or give strides or offset/);
    assert.equal(error.kind, "shape");
    await refused(() => attention.reference(long, x, x), /q\.data has 12 elements/);
    await refused(() => attention.forward(x, x, Promise.resolve(x)), /v is a promise/);
    assert.equal((await attention.forward({ ...long, offset: 4 }, x, x)).out.data[0], 1);
  });

  test("mods that are no text, and texts that meant something else", async () => {
    const mod = (maskMod, more = {}) => () => new Attention(gpu, { maskMod, ...more });
    const error = await refused(mod((q, kv) => q >= kv), /maskMod is a function.*text \("q >= kv"\).*\{ name: "causal" \}.*combination/);
    assert.equal(error.mod, "mask");
    await refused(mod({ all: ["q >= kv", () => true] }), /maskMod is a function/);
    await refused(mod("causal"), /causal is a mask of the library: give \{ name: "causal" \}/);
    await refused(mod({ any: ["q < 3", " causal "] }), /give \{ name: "causal" \}/);
    await refused(() => new Attention(gpu, { scoreMod: "alibi" }), /alibi is a score modification of the library/);
    await refused(mod("q - kv < window", { scalars: { window: 5 } }), /give window: \{ i32: 5 \}/);
    await refused(mod("doc(q) == doc(kv)"), /captures/, /\(i/);
    await refused(mod("doc[q] == doc[kv]", { captures: { doc: new Int32Array(4) } }), /doc\(/);
    const [found] = check({ maskMod: "q - kv < window", scalars: { window: 5 } });
    assert.match(found.message, /i32: 5/);
    assert.deepEqual([found.line, found.from], [1, 0]);
    assert.deepEqual(check({ maskMod: "q >= kv", blockMask: undefined }), []);
  });

  test("emit needs a language and sizes", async () => {
    await refused(() => emit({ maskMod: "q >= kv" }), /language is undefined but must be "wgsl" or "msl"/);
    await refused(() => emit({ language: "wgsl", headDim: 0 }), /headDim is 0 but must be a whole number from 1 up/);
    await refused(() => emit({ language: "wgsl", vDim: 1.5 }), /vDim is 1.5/);
  });

  test("a block mask has the batch entries and heads that it was laid over", async () => {
    const alike = BlockMask.build("q >= kv", { heads: 4, qLen: 300, kvLen: 300 });
    assert.equal(alike.blocks(0, 3).rows, 3);
    await refused(() => alike.blocks(9), /batch is 9 but must be a whole number below 1/);
    await refused(() => alike.blocks(0, 4), /head is 4 .* below 4/);
    await refused(() => alike.blocks(0, -1), /head is -1/);
    await refused(() => alike.tokens({ head: 7, q: [0, 1], kv: [0, 1] }), /head is 7/);
    assert.equal(alike.not().blocks(0, 3).rows, 3);
    const several = BlockMask.fromBytes(BlockMask.build("q >= kv + h", { heads: 2, qLen: 300, kvLen: 300 }).toBytes());
    assert.equal(several.blocks(0, 1).rows, 3);
    await refused(() => several.blocks(0, 2), /head is 2/);
  });

  describe("with a block mask", () => {
    const [length, dim] = [300, 8];
    const [q, k, v] = [1, 2, 3].map((seed) => waves(length, dim, seed));
    const agree = async (options, call = {}) => {
      const attention = new Attention(gpu, options);
      const { out } = await attention.forward(q, k, v, call);
      const want = attention.reference(q, k, v, call).out;
      assert.ok(Math.max(...out.data.map((x, i) => Math.abs(x - want[i]))) < 1e-5, "reference and forward differ");
      return want;
    };
    const shape = { qLen: length, kvLen: length };

    test("the reference follows it", async () => {
      const causal = new Attention(gpu, { maskMod: "q >= kv" }).reference(q, k, v).out;
      assert.deepEqual(await agree({ blockMask: BlockMask.build("q >= kv", shape) }), causal);
      assert.deepEqual(await agree({ blockMask: BlockMask.build("q >= kv", shape), maskMod: "q >= kv" }), causal);
      assert.deepEqual(await agree({ blockMask: BlockMask.fromBytes(BlockMask.build("q >= kv", shape).toBytes()), maskMod: "q >= kv" }), causal);
      // Without a mask nobody decides the pairs of partial tiles.
      const bare = new Attention(gpu, { blockMask: BlockMask.fromBytes(BlockMask.build("q >= kv", shape).toBytes()) });
      await refused(() => bare.forward(q, k, v), /partial tiles but neither it nor the attention has a mask_mod/);
      await refused(() => bare.reference(q, k, v), /no mask_mod/);
      const dense = Uint8Array.from({ length: length * length }, (_, i) => (Math.floor(i / length) >= i % length ? 1 : 0));
      assert.deepEqual(await agree({ blockMask: BlockMask.fromDense(dense, shape) }), causal);
      await agree({ blockMask: BlockMask.build("q >= kv", { ...shape, qOffset: 40 }) }, { qOffset: 40 });
      await agree({ blockMask: BlockMask.build("q >= kv", shape).and(BlockMask.build("q - kv < 90", shape)), scoreMod: "score + f32(kv - q) * 0.01" });
    });

    test("another mask beside it is refused", async () => {
      const blockMask = BlockMask.build("q >= kv", shape);
      await refused(() => new Attention(gpu, { blockMask, maskMod: "q - kv < 9" }).forward(q, k, v), /`mask_mod`: the block mask was built from another one; build it again, or leave it out/);
      await refused(() => new Attention(gpu, { blockMask, maskMod: { name: "sliding_window" } }).forward(q, k, v), /`mask_mod`: the block mask was built from another one/);
      const window = (i32) => ({ scalars: { window: { i32 } } });
      const windowed = { maskMod: "q - kv < window", blockMask: BlockMask.build("q - kv < window", shape, window(5)) };
      await refused(() => new Attention(gpu, { ...windowed, ...window(6) }).forward(q, k, v), /`window`: the block mask was built from another one/);
      await refused(() => new Attention(gpu, { ...windowed, ...window(5) }).forward(q, k, v, window(6)), /blockMask was built with another value/);
      await agree({ ...windowed, ...window(5) }, window(5));
      await refused(() => new Attention(gpu, { blockMask }).reference(tensor(), tensor(), tensor()), /block mask is for/);
    });
  });

  test("writing into a captured array changes nothing; a call's values do", async () => {
    const doc = new Int32Array([0, 0]);
    const split = new Attention(gpu, { maskMod: "doc(q) == doc(kv)", captures: { doc } });
    const x = tensor();
    doc[1] = 1;
    assert.ok(Math.abs((await split.forward(x, x, x)).lse[0] - (2 + Math.LN2)) < 1e-6);
    assert.ok(Math.abs((await split.forward(x, x, x, { captures: { doc } })).lse[0] - 2) < 1e-6);
  });

  test("a step of decoding sees what the whole sequence's last row sees", async () => {
    const [n, dim] = [37, 8];
    const [k, v] = [waves(64, dim, 1), waves(64, dim, 2)];
    const q = waves(1, dim, 3);
    const causal = new Attention(gpu, { maskMod: { name: "causal" } });
    const { out } = await causal.forward(q, k, v, { qOffset: n - 1, kvLen: n });
    const part = ({ data }) => ({ data: data.slice(0, n * dim), shape: [1, 1, n, dim] });
    const want = new Attention(gpu).reference(q, part(k), part(v)).out;
    assert.ok(Math.max(...out.data.map((x, i) => Math.abs(x - want[i]))) < 1e-5);
  });
});
