// The packed package in a real page: Vite bundles a small project, Chromium runs it on SwiftShader.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { browser, open, serve } from "./browser.mjs";
import { budgets, goldens, install, web } from "./packed.mjs";

const FULL = process.env.FLEXATTN_FULL === "1";
/** One golden of each kind: SwiftShader takes seconds to compile a kernel, and the others add no path through the page's runtime. */
const SUBSET = ["all_masked", "bkv1_b3_causal", "decode_q1_offset", "ev_gt_e_16_40", "real_minilm_l3_padded", "softcap_causal_window", "t5_buckets"];
/** Those of them whose gradients run too. */
const GRADIENTS = ["bkv1_b3_causal", "t5_buckets"];

const names = () => readdirSync(goldens).filter((file) => file.endsWith(".safetensors")).map((file) => file.replace(".safetensors", ""));
/** What an evaluated golden found wrong, one line each. */
const wrong = (verdicts) => verdicts.filter(({ pass }) => !pass).map((each) => `${each.case} ${each.dtype} ${each.tier} ${each.output}: mean ${each.mean}, max ${each.max}, budget ${JSON.stringify(each.budget)}`);

let folder;
let server;
before(() => {
  folder = install("project", join(web, "tests/project"));
  execFileSync("node", [join(web, "node_modules/vite/bin/vite.js"), "build", folder, "--logLevel", "error"], { stdio: "inherit" });
});
before(async () => {
  server = await serve({ "": join(folder, "dist"), goldens, budgets });
});
after(() => server?.close());

describe("with WebGPU", () => {
  let chromium;
  let page;
  let complaints;
  before(async () => {
    chromium = await browser();
    ({ page, complaints } = await open(chromium.context, server.url));
  });
  after(() => chromium?.close());

  for (const name of FULL ? names() : SUBSET) {
    for (const dtype of FULL ? ["f32", "f16", "bf16"] : [name.includes("causal") ? "f16" : "f32"]) {
      test(`golden ${name} ${dtype}`, { timeout: 300_000 }, async () => {
        const gradients = FULL || GRADIENTS.includes(name);
        assert.deepEqual(wrong(await page.evaluate((asked) => project.golden(...asked), [name, dtype, "best", { gradients }])), []);
      });
    }
  }

  test("the device is asked for everything of use that the adapter has", async () => {
    const found = await page.evaluate(async () => {
      const gpu = await project.gpuOf("best");
      const adapter = await navigator.gpu.requestAdapter();
      return {
        missing: project.flexattn.Gpu.wantedFeatures(adapter).filter((feature) => !gpu.device.features.has(feature)),
        buffers: [gpu.device.limits.maxBufferSize, adapter.limits.maxBufferSize],
        notes: gpu.notes,
        adapter: gpu.adapter,
      };
    });
    assert.deepEqual(found.missing, []);
    assert.equal(found.buffers[0], found.buffers[1]);
    assert.ok(found.notes.every((note) => note.startsWith("subgroup: ")) && found.adapter.length > 0);
  });

  test("a call is one submit, and the second one compiles nothing", async () => {
    const counted = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const gpu = await Gpu.create();
      const counts = { submits: 0, pipelines: 0 };
      const { queue } = gpu.device;
      const [submit, compile] = [queue.submit.bind(queue), gpu.device.createComputePipelineAsync.bind(gpu.device)];
      queue.submit = (commands) => (counts.submits++, submit(commands));
      gpu.device.createComputePipelineAsync = (descriptor) => (counts.pipelines++, compile(descriptor));
      const attention = new Attention(gpu, { maskMod: "q - kv < window && q >= kv", scalars: { window: { i32: 4 } } });
      const tensor = (length) => ({ data: new Float32Array(length * 16).fill(0.5), shape: [1, 1, length, 16] });
      await attention.forward(tensor(40), tensor(40), tensor(40));
      const first = { ...counts };
      counts.submits = 0;
      counts.pipelines = 0;
      const { lse } = await attention.forward(tensor(50), tensor(50), tensor(50), { scalars: { window: { i32: 2 } } });
      const last = lse.at(-1);
      gpu.free();
      return { first, second: counts, last };
    });
    assert.equal(counted.first.pipelines, 1);
    assert.deepEqual(counted.second, { submits: 1, pipelines: 0 });
    // Two keys kept, each of score 16 * 0.25 / 4 = 1.
    assert.ok(Math.abs(counted.last - (1 + Math.LN2)) < 1e-5);
  });

  test("work past the budget of a submit goes to the device in several", { timeout: 120_000 }, async () => {
    const submits = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const gpu = await Gpu.create();
      const attention = new Attention(gpu);
      const x = (length) => ({ data: new Float32Array(length * 16).fill(0.1), shape: [1, 1, length, 16] });
      const [short, long] = [x(64), x(8192)];
      await attention.forward(short, short, short);
      let count = 0;
      const { queue } = gpu.device;
      const submit = queue.submit.bind(queue);
      queue.submit = (commands) => (count++, submit(commands));
      await attention.forward(long, long, long);
      gpu.free();
      return count;
    });
    assert.ok(submits > 1, `${submits}`);
  });

  test("gradients stay on the GPU when asked to, and are those that come to the host", { timeout: 300_000 }, async () => {
    const found = await page.evaluate(async () => {
      const { Attention } = project.flexattn;
      const gpu = await project.gpuOf("best");
      const [heads, length, dim] = [2, 33, 16];
      const x = (seed) => ({ data: Float32Array.from({ length: heads * length * dim }, (_, i) => Math.sin(seed + i)), shape: [1, heads, length, dim] });
      const [q, k, v, dout] = [1, 2, 3, 4].map(x);
      const attention = new Attention(gpu, { maskMod: "q >= kv", scoreMod: "score + slope(h) * f32(kv - q)", captures: { slope: new Float32Array([0.1, 0.2]) }, sinks: [0, 0.5] });
      const output = await attention.forward(q, k, v, { to: "gpu" });
      const wanted = { wants: ["q", "k", "v", "sinks"], wantsCaptures: ["slope"] };
      const host = await attention.backward(q, k, v, output, dout, { ...wanted, to: "host" });
      const there = await attention.backward(q, k, v, output, dout, { ...wanted, to: "gpu" });
      const read = async (buffer, count) => {
        const staging = gpu.device.createBuffer({ size: count * 4, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
        const encoder = gpu.device.createCommandEncoder();
        encoder.copyBufferToBuffer(buffer, 0, staging, 0, count * 4);
        gpu.device.queue.submit([encoder.finish()]);
        await staging.mapAsync(GPUMapMode.READ);
        return new Float32Array(staging.getMappedRange());
      };
      const pairs = [["dq", (g) => g.dq.data], ["dk", (g) => g.dk.data], ["dv", (g) => g.dv.data], ["dsinks", (g) => g.dsinks], ["slope", (g) => g.captures.slope]];
      const result = [];
      for (const [name, part] of pairs) {
        const [want, buffer] = [part(host), part(there)];
        const got = await read(buffer, want.length);
        result.push({ name, buffer: buffer instanceof GPUBuffer, same: got.length === want.length && got.every((x, i) => x === want[i]), zero: want.every((x) => x === 0) });
        buffer.destroy();
      }
      return result;
    });
    for (const { name, buffer, same, zero } of found) assert.deepEqual([name, buffer, same, zero], [name, true, true, false]);
  });

  test("calls take effect in the order in which they were made", async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const gpu = await Gpu.create();
      const x = { data: new Float32Array(33 * 16).fill(1), shape: [1, 1, 33, 16] };
      const v = (value) => ({ data: new Float32Array(33 * 16).fill(value), shape: [1, 1, 33, 16] });
      // Nothing is compiled yet, so the first ones wait; the last could overtake them and must not.
      const calls = [1, 2, 3].map((value) => new Attention(gpu, { maskMod: `q >= kv - ${value}` }).forward(x, x, v(value), { to: "gpu" }));
      const outputs = await Promise.all(calls);
      const again = await new Attention(gpu).forward({ ...outputs[2].out }, { ...outputs[0].out }, { ...outputs[1].out }, { to: "host" });
      gpu.free();
      return again.out.data[0];
    });
    assert.equal(found, 2);
  });

  test("errors carry the place in the text", async () => {
    const found = await page.evaluate(async () => {
      const { Attention, check, FlexattnError } = project.flexattn;
      const gpu = await project.gpuOf("best");
      try {
        new Attention(gpu, { maskMod: "q >= kv &&\n  q - kvv < 3" });
        return null;
      } catch (error) {
        return {
          ours: error instanceof FlexattnError,
          kind: error.kind,
          mod: error.mod,
          position: error.position,
          checked: check({ maskMod: "q >= kv", scoreMod: "score + é" }),
        };
      }
    });
    assert.equal(found.ours, true);
    assert.deepEqual([found.kind, found.mod, found.position.line, found.position.column], ["parse", "mask", 2, 7]);
    assert.equal("q >= kv &&\n  q - kvv < 3".slice(found.position.from, found.position.to), "kvv");
    assert.deepEqual(found.checked.map(({ mod, line, column }) => [mod, line, column]), [["score", 1, 9]]);
  });

  test("bad input is refused with value, rule and remedy", async () => {
    const messages = await page.evaluate(async () => {
      const { Attention } = project.flexattn;
      const gpu = await project.gpuOf("best");
      const x = (heads, extra = {}) => ({ data: new Float32Array(heads * 8), shape: [1, heads, 2, 4], ...extra });
      const attention = new Attention(gpu);
      const unusable = gpu.device.createBuffer({ size: 64, usage: GPUBufferUsage.COPY_SRC });
      const tries = [
        () => attention.forward(x(8), x(3), x(3)),
        () => attention.forward({ data: new Uint16Array(8), shape: [1, 1, 2, 4] }, x(1), x(1)),
        () => attention.forward({ data: unusable, shape: [1, 1, 2, 4] }, x(1), x(1)),
        () => attention.forward({ data: new Float32Array(3), shape: [1, 1, 2, 4] }, x(1), x(1)),
        () => attention.forward({ data: new Float32Array(8), shape: [1, 2, 4] }, x(1), x(1)),
      ];
      const messages = [];
      for (const attempt of tries) messages.push(await attempt().then(() => "accepted", (error) => `${error.kind}: ${error.message}`));
      return messages;
    });
    assert.match(messages[0], /^shape: kv_heads is 3 but must divide q_heads = 8/);
    assert.match(messages[1], /^dtype: .*say which with dtype/);
    assert.match(messages[2], /^buffer: .*STORAGE/);
    assert.match(messages[3], /^buffer: /);
    assert.match(messages[4], /^shape: .*3 numbers but must have 4/);
  });

  test("two engines share one device, and buffers go between them without a copy", { timeout: 300_000 }, async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const { ort } = project;
      // An ONNX model by hand: y = x + x, [1, 2, 8, 16] f32.
      const bytes = (...parts) => Uint8Array.from(parts.flat(Infinity));
      const text = (string) => [...new TextEncoder().encode(string)];
      const field = (number, content) => [(number << 3) | 2, content.length, ...content];
      const number = (field, value) => [field << 3, value];
      const dim = (value) => field(1, number(1, value));
      const type = field(1, [...number(1, 1), ...field(2, [1, 2, 8, 16].flatMap(dim))]);
      const value = (name) => [...field(1, text(name)), ...field(2, type)];
      const node = [...field(1, text("x")), ...field(1, text("x")), ...field(2, text("y")), ...field(4, text("Add"))];
      const graph = [...field(1, node), ...field(2, text("g")), ...field(11, value("x")), ...field(12, value("y"))];
      const length = [(graph.length & 127) | 128, graph.length >> 7];
      const model = bytes(number(1, 8), [(7 << 3) | 2, ...length, ...graph], field(8, number(2, 13)));
      const session = await ort.InferenceSession.create(model, { executionProviders: ["webgpu"], preferredOutputLocation: "gpu-buffer" });
      const device = await ort.env.webgpu.device;
      const gpu = await Gpu.fromDevice(device);

      const shape = [1, 2, 8, 16];
      const input = Float32Array.from({ length: 256 }, (_, i) => Math.sin(i));
      // onnxruntime's output feeds attention, and attention's output feeds onnxruntime.
      const { y } = await session.run({ x: new ort.Tensor("float32", input, shape) });
      const q = { data: y.gpuBuffer, shape };
      const { out } = await new Attention(gpu, { maskMod: "q >= kv" }).forward(q, q, q);
      const { y: doubled } = await session.run({ x: ort.Tensor.fromGpuBuffer(out.data, { dataType: "float32", dims: shape }) });
      const got = await doubled.getData();

      const twice = { data: input.map((x) => x + x), shape };
      const want = (await new Attention(await Gpu.create({ tier: "cpu" }), { maskMod: "q >= kv" }).forward(twice, twice, twice)).out.data;
      return { same: gpu.device === device, tier: gpu.tier, error: Math.max(...got.map((x, i) => Math.abs(x - 2 * want[i]))) };
    });
    assert.equal(found.same, true);
    assert.ok(found.error < 1e-5, JSON.stringify(found));
  });

  test("one pool buffer holds q, k, v and out", async () => {
    const found = await page.evaluate(async () => {
      const { Attention } = project.flexattn;
      const gpu = await project.gpuOf("best");
      const [length, dim] = [40, 16];
      const size = length * dim;
      const values = Float32Array.from({ length: 3 * size }, (_, i) => Math.cos(i));
      const pool = gpu.device.createBuffer({ size: 4 * size * 4, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC });
      gpu.device.queue.writeBuffer(pool, 0, values);
      const view = (at) => ({ data: pool, shape: [1, 1, length, dim], offset: at * size });
      const attention = new Attention(gpu, { maskMod: "q >= kv" });
      await attention.forward(view(0), view(1), view(2), { out: view(3) });
      const staging = gpu.device.createBuffer({ size: size * 4, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
      const encoder = gpu.device.createCommandEncoder();
      encoder.copyBufferToBuffer(pool, 3 * size * 4, staging, 0, size * 4);
      gpu.device.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      const got = new Float32Array(staging.getMappedRange());
      const part = (at) => ({ data: values.slice(at * size, (at + 1) * size), shape: [1, 1, length, dim] });
      const want = attention.reference(part(0), part(1), part(2)).out;
      return Math.max(...got.map((x, i) => Math.abs(x - want[i])));
    });
    assert.ok(found < 1e-5, String(found));
  });

  test("it works in a Worker", { timeout: 120_000 }, async () => {
    const found = await page.evaluate(async () => {
      const worker = project.worker();
      const x = { data: new Float32Array(8 * 16).fill(1), shape: [1, 1, 8, 16] };
      const v = { data: Float32Array.from({ length: 8 * 16 }, (_, i) => Math.floor(i / 16)), shape: [1, 1, 8, 16] };
      const message = await new Promise((resolve) => {
        worker.onmessage = ({ data }) => resolve(data);
        worker.postMessage({ options: {}, attention: { maskMod: { name: "causal" } }, q: x, k: x, v });
      });
      worker.terminate();
      return { ...message, out: message.out && [...message.out].filter((_, i) => i % 16 === 0) };
    });
    assert.equal(found.error, undefined);
    assert.notEqual(found.tier, "cpu");
    found.out.forEach((x, row) => assert.ok(Math.abs(x - row / 2) < 1e-5));
  });

  test("a lost device rejects the call, settles lost, and a new Gpu works", async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const x = { data: new Float32Array(64 * 16), shape: [1, 1, 64, 16] };
      const gpu = await Gpu.create();
      const attention = new Attention(gpu);
      await attention.forward(x, x, x);
      const flying = attention.forward(x, x, x).then(() => "finished", (error) => error.kind);
      gpu.device.destroy();
      const later = attention.forward(x, x, x).then(() => "finished", (error) => `${error.kind}: ${error.message}`);
      const lost = await gpu.lost;
      const next = await Gpu.create();
      const { lse } = await new Attention(next).forward(x, x, x);
      next.free();
      return { flying: await flying, later: await later, after: await attention.forward(x, x, x).catch((error) => error.kind), reason: lost.reason, lse: lse[0] };
    });
    assert.equal(found.reason, "destroyed");
    assert.ok(["device-lost", "finished"].includes(found.flying), found.flying);
    assert.match(found.later, /^device-lost: .*create a new Gpu/);
    assert.equal(found.after, "device-lost");
    assert.ok(Math.abs(found.lse - Math.log(64)) < 1e-5);
  });

  test("once the loss is known, calls on buffers reject too, and a lost device is not adopted", async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const said = (promise) => promise.then(() => "accepted", (error) => `${error.kind}: ${error.message}`);
      const device = await (await navigator.gpu.requestAdapter()).requestDevice();
      const gpu = await Gpu.fromDevice(device);
      const x = { data: device.createBuffer({ size: 64 * 16 * 4, usage: GPUBufferUsage.STORAGE }), shape: [1, 1, 64, 16] };
      const attention = new Attention(gpu);
      await attention.forward(x, x, x);
      device.destroy();
      const adopted = await said(Gpu.fromDevice(device));
      await gpu.lost;
      return [adopted, await said(attention.forward(x, x, x)), await said(gpu.idle()), await said(Gpu.fromDevice(device))];
    });
    for (const message of found) assert.match(message, /^device-lost: .*create a new Gpu/);
  });

  test("buffers that a call cannot use are refused with a remedy", async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const gpu = await project.gpuOf("best");
      const said = (promise) => promise.then(() => "accepted", (error) => `${error.kind}: ${error.message}`);
      const buffer = (device, tensors = 1) => device.createBuffer({ size: tensors * 64 * 16 * 4, usage: GPUBufferUsage.STORAGE });
      const view = (data, offset = 0) => ({ data, shape: [1, 1, 64, 16], offset });
      const attention = new Attention(gpu);
      const good = view(buffer(gpu.device));
      const other = await Gpu.create();
      const foreign = await said(attention.forward(view(buffer(other.device)), good, good, { to: "host" }));
      other.free();
      const dead = buffer(gpu.device);
      dead.destroy();
      const destroyed = await said(attention.forward(view(dead), good, good, { to: "host" }));
      const pool = buffer(gpu.device, 2);
      const overlap = await said(attention.forward(view(pool), good, good, { out: view(pool, 512), to: "host" }));
      const fake = await said(attention.forward(view({ mapAsync() {} }), good, good));
      const after = await said(attention.forward(good, good, good, { to: "host" }));
      return { foreign, destroyed, overlap, fake, after };
    });
    assert.match(found.foreign, /^buffer: a GPUBuffer belongs to another device; make it on gpu\.device, or adopt its device/);
    assert.match(found.destroyed, /^buffer: a GPUBuffer was destroyed before/);
    assert.match(found.overlap, /^buffer: out shares places with q, .* give it its own/);
    assert.match(found.fake, /^usage: .*no GPUBuffer/);
    assert.equal(found.after, "accepted");
  });

  test("the page had nothing to complain about", () => assert.deepEqual(complaints, []));
});

describe("without WebGPU", () => {
  let chromium;
  let page;
  let complaints;
  before(async () => {
    chromium = await browser({ webgpu: false });
    ({ page, complaints } = await open(chromium.context, server.url));
  });
  after(() => chromium?.close());

  test("the cpu tier runs and says why", async () => {
    const found = await page.evaluate(async () => {
      const gpu = await project.gpuOf("best");
      return { tier: gpu.tier, notes: gpu.notes, device: gpu.device };
    });
    assert.equal(found.tier, "cpu");
    assert.match(found.notes.join(), /no WebGPU/);
    assert.equal(found.device, null);
  });

  for (const name of FULL ? names() : SUBSET) {
    test(`golden ${name} f32 on the cpu tier`, { timeout: 120_000 }, async () => {
      assert.deepEqual(wrong(await page.evaluate((name) => project.golden(name, "f32", "best"), name)), []);
    });
  }

  test("long work does not freeze the page", { timeout: 120_000 }, async () => {
    const found = await page.evaluate(async () => {
      const { Attention } = project.flexattn;
      const gpu = await project.gpuOf("best");
      const x = { data: new Float32Array(4 * 2048 * 64).fill(0.1), shape: [1, 4, 2048, 64] };
      let longest = 0;
      let last = performance.now();
      const timer = setInterval(() => {
        longest = Math.max(longest, performance.now() - last);
        last = performance.now();
      }, 5);
      const started = performance.now();
      await new Attention(gpu).forward(x, x, x);
      clearInterval(timer);
      return { took: performance.now() - started, longest };
    });
    assert.ok(found.took > 200, `too short to tell: ${JSON.stringify(found)}`);
    assert.ok(found.longest < 150, JSON.stringify(found));
  });

  test("asking for a GPU tier is an error that says so", async () => {
    const message = await page.evaluate(() => project.flexattn.Gpu.create({ tier: "portable" }).then(() => "made", (error) => error.message));
    assert.match(message, /no WebGPU here/);
  });

  test("the page had nothing to complain about", () => assert.deepEqual(complaints, []));
});
