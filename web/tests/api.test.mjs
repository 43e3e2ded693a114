// What each part of the package gives, on the cpu tier in node. Calls on the GPU are in page.test.mjs and node.test.mjs.

import assert from "node:assert/strict";
import { before, describe, test } from "node:test";
import * as flexattn from "../dist/index.js";

const { Attention, BlockMask, emit, Gpu, prebuilt, sdpa, spell } = flexattn;

const waves = (heads, length, dim, seed) => ({ data: Float32Array.from({ length: heads * length * dim }, (_, i) => Math.sin(seed + i * 1.7)), shape: [1, heads, length, dim] });
const worst = (got, want) => {
  assert.equal(got.length, want.length);
  return Math.max(...Array.from(got, (x, i) => Math.abs(x - want[i])));
};
const every = (length) => ({ q: [0, length], kv: [0, length] });

let gpu;
before(async () => {
  await flexattn.default();
  gpu = await Gpu.create({ tier: "cpu" });
});

describe("a block mask", () => {
  const shape = { qLen: 256, kvLen: 256 };

  test("says how much of the work is skipped, and how much is kept", () => {
    const causal = BlockMask.build("q >= kv", shape);
    assert.equal(causal.sparsity, 1 / 4);
    assert.equal(causal.density, 257 / 512);
    assert.deepEqual([causal.qLen, causal.kvLen, causal.distinct], [256, 256, { batch: 1, heads: 1 }]);
    assert.equal(BlockMask.build({ name: "noop" }, shape).sparsity, 0);
  });

  test("is a picture with a pixel for each tile", () => {
    const { width, height, data } = BlockMask.build("q >= kv", shape).picture();
    assert.deepEqual([width, height, data.length], [8, 8, 4 * 8 * 8]);
    assert.ok(data instanceof Uint8ClampedArray);
    const pixel = (row, column) => [...data.slice(4 * (8 * row + column), 4 * (8 * row + column) + 4)];
    assert.deepEqual(pixel(0, 7), [255, 255, 255, 255]);
    const [full, partial] = [pixel(7, 0), pixel(3, 3)];
    for (let tile = 0; tile < 8; tile++) assert.deepEqual(pixel(tile, tile), partial);
    assert.equal(new Set([full, partial, pixel(0, 7)].map(String)).size, 3);
    assert.equal(full[3], 255);
    // Two heads that differ stand beside each other.
    assert.equal(BlockMask.build("q >= kv + h", { ...shape, heads: 2 }).picture().width, 17);
  });

  test("is text with a character for each block", () => {
    const causal = BlockMask.build("q >= kv", { qLen: 384, kvLen: 384 });
    const [sizes, ...lines] = causal.toString().trim().split("\n");
    assert.match(sizes, /q_len 384 kv_len 384 .*3 full, 3 partial/);
    assert.deepEqual(lines, ["▒··", "█▒·", "██▒"]);
    assert.equal(`${causal}`, causal.toString());
  });

  test("or keeps what either keeps, and what both keep and what it masks", () => {
    const [prefix, window] = ["kv < 40", "q >= kv && q - kv < 50"].map((mask) => BlockMask.build(mask, shape));
    const of = (mask) => BlockMask.build(mask, shape);
    for (const [made, wanted] of [
      [prefix.or(window), of("kv < 40 || (q >= kv && q - kv < 50)")],
      [prefix.and(window), of("kv < 40 && q >= kv && q - kv < 50")],
      [window.not(), of("!(q >= kv && q - kv < 50)")],
    ]) {
      assert.deepEqual(made.tokens(every(256)), wanted.tokens(every(256)));
      assert.deepEqual(made.blocks(), wanted.blocks());
    }
    assert.ok(prefix.or(window).density > Math.max(prefix.density, window.density));
  });

  test("comes from the offsets of packed sequences", () => {
    const offsets = [0, 100, 130, 256];
    const ids = Int32Array.from({ length: 256 }, (_, i) => offsets.findLastIndex((offset) => offset <= i));
    const wanted = (mask) => BlockMask.build(mask, shape, { captures: { ids } });
    assert.deepEqual(BlockMask.fromOffsets(offsets).tokens(every(256)), wanted("ids(q) == ids(kv)").tokens(every(256)));
    const causal = BlockMask.fromOffsets(Uint32Array.from(offsets), true);
    assert.deepEqual(causal.tokens(every(256)), wanted("ids(q) == ids(kv) && q >= kv").tokens(every(256)));
    assert.deepEqual([causal.qLen, causal.kvLen], [256, 256]);
  });

  test("survives being stored", () => {
    const causal = BlockMask.build("q >= kv", shape);
    assert.deepEqual(BlockMask.fromBytes(causal.toBytes()).blocks(), causal.blocks());
  });
});

describe("kernel text", () => {
  const mods = { maskMod: "q - kv < window && q >= kv", scoreMod: "score * 0.125", scalars: { window: { i32: 17 } } };

  test("is WGSL for every pass, with the mods in it", () => {
    for (const pass of ["forward", "decode", "backward"]) {
      const kernels = emit({ ...mods, language: "wgsl", pass, headDim: 64 });
      assert.ok(kernels.length >= 1);
      for (const { label, entryPoint, workgroup, text } of kernels) {
        assert.ok(label.includes("f32") || pass !== "forward", label);
        assert.match(text, new RegExp(`@compute[^]*fn ${entryPoint}\\b`));
        assert.ok(workgroup.every((size) => size >= 1) && workgroup.reduce((a, b) => a * b) <= 256);
      }
      assert.ok(kernels.some(({ text }) => text.includes("0.125")), `no score_mod in ${pass}`);
    }
  });

  test("is MSL for every pass, with the mods in it", () => {
    for (const pass of ["forward", "decode", "backward"]) {
      const kernels = emit({ ...mods, language: "msl", pass, headDim: 64, dtype: "f16" });
      assert.ok(kernels.length >= 1);
      for (const { entryPoint, text } of kernels) assert.match(text, new RegExp(`kernel void ${entryPoint}\\b`));
      assert.ok(kernels.some(({ text }) => text.includes("0.125")), `no score_mod in ${pass}`);
    }
  });

  test("follows dtype, sizes and tier", () => {
    const text = (options) => emit({ language: "wgsl", ...options })[0].text;
    const plain = text({});
    assert.match(text({ headDim: 128 }), /const HEAD_DIM: u32 = 128u/);
    for (const other of [{ headDim: 128 }, { headDim: 64, vDim: 32 }, { dtype: "f16" }, { tier: "subgroup" }]) assert.notEqual(text(other), plain, JSON.stringify(other));
    assert.match(text({ tier: "subgroup" }), /enable subgroups;/);
    assert.doesNotMatch(plain, /enable subgroups;/);
  });
});

describe("attention sinks", () => {
  const sinks = [0.5, -1];
  const [q, k, v] = [1, 2, 3].map((seed) => waves(2, 9, 4, seed));

  test("take their share of each row and have no value", async () => {
    const attention = new Attention(gpu, { maskMod: "q >= kv", sinks });
    const plain = new Attention(gpu, { maskMod: "q >= kv" });
    const [with_, without] = [await attention.forward(q, k, v), await plain.forward(q, k, v)];
    const share = (row) => 1 / (1 + Math.exp(sinks[Math.floor(row / 9)] - without.lse[row]));
    assert.ok(worst(with_.out.data, without.out.data.map((x, i) => x * share(Math.floor(i / 4)))) < 1e-6);
    assert.ok(worst(with_.out.data, attention.reference(q, k, v).out) < 1e-6);
  });

  test("have gradients, which follow the output when a sink moves", async () => {
    const dout = waves(2, 9, 4, 4);
    const loss = ({ out }) => out.reduce((sum, x, i) => sum + x * dout.data[i], 0);
    const at = (sinks) => new Attention(gpu, { maskMod: "q >= kv", sinks });
    const attention = at(sinks);
    const { dsinks, dq } = await attention.backward(q, k, v, await attention.forward(q, k, v), dout, { wants: ["sinks"] });
    assert.equal(dq, null);
    const step = 1e-3;
    const moved = (head, by) => loss(at(sinks.map((sink, i) => (i === head ? sink + by : sink))).reference(q, k, v));
    sinks.forEach((_, head) => {
      const difference = (moved(head, step) - moved(head, -step)) / (2 * step);
      assert.ok(Math.abs(dsinks[head] - difference) < 1e-4 * Math.max(1, Math.abs(difference)), `${dsinks[head]} and ${difference}`);
    });
  });
});

describe("sdpa", () => {
  const [q, k, v] = [waves(2, 5, 4, 1), waves(2, 7, 4, 2), waves(2, 7, 4, 3)];
  const same = async (options, wanted) => assert.ok(worst((await sdpa(gpu, q, k, v, options)).data, new Attention(gpu, wanted).reference(q, k, v).out) < 1e-6, JSON.stringify(options));

  test("takes a mask, which causal narrows", async () => {
    await same({}, {});
    await same({ causal: true }, { maskMod: "q >= kv" });
    await same({ mask: "kv != 1" }, { maskMod: "kv != 1" });
    await same({ mask: { any: ["kv == 0", { name: "sliding_window", window: 2 }] }, causal: true, scale: 0.3 }, { maskMod: "q >= kv && (kv == 0 || q - kv < 2)", scale: 0.3 });
    const keep = Uint8Array.from({ length: 35 }, (_, i) => (i % 3 === 0 ? 1 : 0));
    await same({ mask: { name: "dense", keep: [...keep], shape: [1, 1, 5, 7] } }, { maskMod: "keep(q, kv)", captures: { keep: { data: keep, shape: [5, 7] } } });
  });

  test("adds a bias, whose batch entries and heads may be one for all", async () => {
    for (const heads of [1, 2]) {
      const bias = { data: Float32Array.from({ length: heads * 35 }, (_, i) => Math.cos(i)), shape: [1, heads, 5, 7] };
      await same({ bias }, { scoreMod: `score + bias(${heads === 1 ? 0 : "h"}, q, kv)`, captures: { bias: { ...bias, shape: [heads, 5, 7] } } });
    }
  });

  test("refuses a bias of another shape, and a mask that is none", async () => {
    const refused = (options, text) => assert.rejects(sdpa(gpu, q, k, v, options), ({ name, message }) => name === "FlexattnError" && text.test(message));
    const bias = (shape) => ({ data: new Float32Array(shape.reduce((a, b) => a * b)), shape });
    await refused({ bias: bias([1, 2, 5, 6]) }, /bias\.shape is \[1, 2, 5, 6\] but must be \[1 or 1, 1 or 2, 5, 7\]/);
    await refused({ bias: bias([5, 7]) }, /bias\.shape is \[5, 7\]/);
    await refused({ bias: { data: new Float32Array(70) } }, /bias\.shape is undefined/);
    await refused({ bias: new Float32Array(70) }, /bias\.shape is undefined/);
    await refused({ mask: (q, kv) => q >= kv }, /is a function, which cannot become a kernel/);
    await refused({ mask: "q >=" }, /./);
    await refused({ attn_mask: "q >= kv" }, /no option attn_mask/);
  });
});

describe("looking inside", () => {
  test("weights are the rows of the softmax", async () => {
    const [q, k] = [waves(1, 6, 4, 1), waves(1, 6, 4, 2)];
    const weights = await new Attention(gpu, { maskMod: "q >= kv" }).weights(q, k, [0, 4]);
    assert.equal(weights.length, 12);
    assert.deepEqual([...weights.slice(0, 6)], [1, 0, 0, 0, 0, 0]);
    assert.ok(Math.abs(weights.slice(6).reduce((a, b) => a + b) - 1) < 1e-6);
    assert.equal(weights[11], 0);
  });

  test("every name of the library can be spelled, and means the same as text", () => {
    const sizes = { heads: 2, qLen: 64, kvLen: 64 };
    assert.ok(prebuilt().length > 30);
    for (const { kind, name } of prebuilt()) assert.ok(spell(kind, { name }, sizes).text.length > 0, name);
    const { text, captures, scalars } = spell("mask", { name: "sliding_window", window: 9 }, sizes);
    assert.deepEqual(BlockMask.build(text, sizes, { captures, scalars }).tokens(every(64)), BlockMask.build({ name: "sliding_window", window: 9 }, sizes).tokens(every(64)));
  });
});

test("`using` gives back what was made: Symbol.dispose is free", async () => {
  const own = await Gpu.create({ tier: "cpu" });
  const [attention, blocks] = [new Attention(own), BlockMask.build("q >= kv", { qLen: 4, kvLen: 4 })];
  const x = waves(1, 2, 4, 1);
  for (const each of [attention, blocks, own]) {
    each[Symbol.dispose]();
    each[Symbol.dispose]();
  }
  await assert.rejects(attention.forward(x, x, x), /this Attention was freed/);
  assert.throws(() => blocks.density, /this BlockMask was freed/);
  await assert.rejects(own.idle(), /this Gpu was freed/);
});
