// The packed package in a real page: Vite bundles a small project, Chromium runs it on SwiftShader.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { browser, open, serve } from "./browser.mjs";
import { budgets, goldens, install, web } from "./packed.mjs";

const FULL = process.env.FLEXATTN_FULL === "1";
/** One golden of each kind, and its dtype: SwiftShader takes seconds to compile a kernel, and the others add no path through the page's runtime. */
const SUBSET = {
  all_masked: "f32",
  bkv1_b3_causal: "f16",
  decode_q1_offset: "f32",
  ev_gt_e_16_40: "bf16",
  real_minilm_l3_padded: "f32",
  softcap_causal_window: "f16",
  t5_buckets: "f32",
};
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

  for (const name of FULL ? names() : Object.keys(SUBSET)) {
    for (const dtype of FULL ? ["f32", "f16", "bf16"] : [SUBSET[name]]) {
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
      const features = ["shader-f16", "subgroups", "timestamp-query"];
      const limits = ["maxBufferSize", "maxStorageBufferBindingSize", "maxComputeWorkgroupStorageSize", "maxComputeInvocationsPerWorkgroup", "maxComputeWorkgroupSizeX", "maxStorageBuffersPerShaderStage"];
      return {
        missing: features.filter((feature) => adapter.features.has(feature) && !gpu.device.features.has(feature)),
        lower: limits.filter((limit) => gpu.device.limits[limit] !== adapter.limits[limit]),
        notes: gpu.notes,
        adapter: gpu.adapter,
      };
    });
    assert.deepEqual(found.missing, []);
    assert.deepEqual(found.lower, []);
    assert.ok(found.notes.every((note) => note.startsWith("subgroup: ")) && found.adapter.length > 0);
  });

  test("a call of each kind is one submit, and the second one compiles nothing", { timeout: 300_000 }, async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const gpu = await Gpu.create();
      let counts;
      const { queue } = gpu.device;
      const [submit, compile] = [queue.submit.bind(queue), gpu.device.createComputePipelineAsync.bind(gpu.device)];
      queue.submit = (commands) => (counts.submits++, submit(commands));
      gpu.device.createComputePipelineAsync = (descriptor) => (counts.pipelines++, compile(descriptor));
      const counted = async (call) => {
        counts = { submits: 0, pipelines: 0 };
        const result = await call();
        return { result, ...counts };
      };
      const attention = new Attention(gpu, { maskMod: "q - kv < window && q >= kv", scalars: { window: { i32: 4 } } });
      const tensor = (length) => ({ data: new Float32Array(length * 16).fill(0.5), shape: [1, 1, length, 16] });
      const narrower = { scalars: { window: { i32: 2 } } };
      const kinds = {
        forward: (x, options) => attention.forward(x, x, x, options),
        decode: (x, options) => attention.forward(tensor(1), x, x, { ...options, qOffset: x.shape[2] - 1 }),
        backward: async (x, options) => attention.backward(x, x, x, await output(x, options), x, options),
      };
      const outputs = new Map();
      const output = (x, options) => outputs.get(x) ?? attention.forward(x, x, x, options);
      const found = {};
      for (const [kind, call] of Object.entries(kinds)) {
        // The kernels of decode are for caches of 512 keys and more.
        const [first, second] = kind === "decode" ? [tensor(520), tensor(550)] : [tensor(40), tensor(50)];
        // What backward is given is made before anything is counted.
        if (kind === "backward") for (const [x, options] of [[first, {}], [second, narrower]]) outputs.set(x, (counts = {}, await output(x, options)));
        const [cold, warm] = [await counted(() => call(first)), await counted(() => call(second, narrower))];
        found[kind] = { compiled: cold.pipelines, submits: warm.submits, again: warm.pipelines, lse: warm.result.lse?.at(-1) };
      }
      gpu.free();
      return found;
    });
    for (const [kind, { compiled, submits, again }] of Object.entries(found)) {
      assert.ok(compiled >= 1, `${kind} compiled nothing`);
      assert.deepEqual({ submits, again }, { submits: 1, again: 0 }, kind);
    }
    // Two keys kept, each of score 16 * 0.25 / 4 = 1.
    for (const { lse } of [found.forward, found.decode]) assert.ok(Math.abs(lse - (1 + Math.LN2)) < 1e-5);
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
      // What each of the calls that could copy the buffer, and the one that binds it, is given.
      const [touched, bound] = [[], []];
      const watched = [
        [GPUCommandEncoder.prototype, "copyBufferToBuffer", (given) => touched.push(...given)],
        [GPUQueue.prototype, "writeBuffer", (given) => touched.push(...given)],
        [GPUBuffer.prototype, "mapAsync", (_, buffer) => touched.push(buffer)],
        [GPUDevice.prototype, "createBindGroup", ([{ entries }]) => bound.push(...entries.map(({ resource }) => resource.buffer))],
      ];
      const undo = watched.map(([prototype, name, see]) => {
        const original = prototype[name];
        prototype[name] = function (...given) {
          see(given, this);
          return original.apply(this, given);
        };
        return () => (prototype[name] = original);
      });
      const { out } = await new Attention(gpu, { maskMod: "q >= kv" }).forward(q, q, q);
      for (const each of undo) each();
      const inPlace = { touched: touched.includes(y.gpuBuffer) || touched.includes(out.data), bound: bound.filter((buffer) => buffer === y.gpuBuffer).length, written: bound.includes(out.data) };
      const { y: doubled } = await session.run({ x: ort.Tensor.fromGpuBuffer(out.data, { dataType: "float32", dims: shape }) });
      const got = await doubled.getData();

      const twice = { data: input.map((x) => x + x), shape };
      const want = (await new Attention(await Gpu.create({ tier: "cpu" }), { maskMod: "q >= kv" }).forward(twice, twice, twice)).out.data;
      return { inPlace, same: gpu.device === device, tier: gpu.tier, error: Math.max(...got.map((x, i) => Math.abs(x - 2 * want[i]))) };
    });
    assert.equal(found.same, true);
    assert.deepEqual(found.inPlace, { touched: false, bound: 3, written: true });
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

  test("a call that leaves its result on the GPU rejects when the browser refuses it, and the next one runs", { timeout: 300_000 }, async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const [gpu, other] = [await Gpu.create(), await Gpu.create()];
      const said = (promise) => promise.then(() => "accepted", (error) => `${error.kind}: ${error.message}`);
      const tensor = ({ device }) => ({ data: device.createBuffer({ size: 64 * 16 * 4, usage: GPUBufferUsage.STORAGE }), shape: [1, 1, 64, 16] });
      const attention = new Attention(gpu);
      const [good, foreign, dead] = [tensor(gpu), tensor(other), tensor(gpu)];
      dead.data.destroy();
      const result = [];
      // The first time kernels are compiled before anything is submitted, the second time they are there.
      for (let round = 0; round < 2; round++) {
        for (const bad of [foreign, dead]) {
          result.push(await said(attention.forward(bad, good, good)), await said(attention.forward(good, good, good)));
        }
        const output = await attention.forward(good, good, good);
        result.push(await said(attention.backward(foreign, good, good, output, good)), await said(attention.backward(good, good, good, output, good)));
        // Not awaited one by one: each has its own verdict.
        result.push(...(await Promise.all([good, foreign, good].map((q) => said(attention.forward(q, good, good))))));
        result.push(await said(gpu.idle()), await said(attention.weights(foreign, good, [0])), await said(attention.weights({ ...good, data: new Float32Array(1024) }, { ...good, data: new Float32Array(1024) }, [0])));
      }
      gpu.free();
      other.free();
      return result;
    });
    const [foreign, dead] = [/^buffer: a GPUBuffer belongs to another device/, /^buffer: a GPUBuffer was destroyed before/];
    const wanted = [foreign, /^accepted$/, dead, /^accepted$/, foreign, /^accepted$/, /^accepted$/, foreign, /^accepted$/, /^accepted$/, foreign, /^accepted$/];
    for (const [at, message] of found.entries()) assert.match(message, wanted[at % wanted.length], `${at}`);
  });

  test("a call leaves the page's own error scopes alone", { timeout: 120_000 }, async () => {
    const found = await page.evaluate(async () => {
      const { Attention, Gpu } = project.flexattn;
      const gpu = await Gpu.create();
      const { device } = gpu;
      const attention = new Attention(gpu);
      const x = { data: new Float32Array(64 * 16).fill(1), shape: [1, 1, 64, 16] };
      const calls = {
        weights: () => attention.weights(x, x, [0]),
        forward: () => attention.forward(x, x, x),
        backward: async () => attention.backward(x, x, x, await attention.forward(x, x, x), x),
      };
      const found = {};
      for (const [name, call] of Object.entries(calls)) {
        for (const time of ["first", "second"]) {
          device.pushErrorScope("validation");
          device.createBuffer({ label: "of the page", size: 4, usage: 0 });
          await call();
          const own = await device.popErrorScope();
          const beyond = await device.popErrorScope().then(() => "a scope that nobody popped", ({ name }) => name);
          found[`${name}, ${time}`] = [own?.message.includes("of the page") ?? null, beyond];
        }
      }
      gpu.free();
      return found;
    });
    for (const [call, scopes] of Object.entries(found)) assert.deepEqual(scopes, [true, "OperationError"], call);
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

  for (const name of FULL ? names() : Object.keys(SUBSET)) {
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
