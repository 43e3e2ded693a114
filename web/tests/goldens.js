// Golden files in a page or in node: reading one, running it, and judging the outcome by the same
// budgets as every other tier (tests/goldens/README.md has the format and where the numbers come from;
// tests/snapshots/web/budgets.json is what tests/support/src/budget.rs allows).

/** Names and views of a safetensors file. */
export function readGolden(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const headerEnd = 8 + Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, headerEnd)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const copy = bytes.slice(headerEnd + data_offsets[0], headerEnd + data_offsets[1]).buffer;
    tensors[name] = { shape, data: dtype === "I32" ? new Int32Array(copy) : new Float32Array(copy) };
  }
  return { meta: header.__metadata__, tensors };
}

/** f32 as the bits of f16 or bf16, rounded to nearest even. Goldens' inputs are exact in both. */
export function narrow(values, dtype) {
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  return Uint16Array.from(bits, (word) => {
    if (dtype === "bf16") return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const sign = (word >> 16) & 0x8000;
    const exponent = ((word >> 23) & 255) - 112;
    const mantissa = word & 0x7fffff;
    if (((word >> 23) & 255) === 255) return sign | 0x7c00 | (mantissa ? 0x200 : 0);
    if (exponent >= 31) return sign | 0x7c00;
    if (exponent <= 0) {
      if (exponent < -10) return sign;
      const full = mantissa | 0x800000;
      const shift = 14 - exponent;
      const half = full >> shift;
      const rest = full & ((1 << shift) - 1);
      const tie = 1 << (shift - 1);
      return sign | (half + (rest > tie || (rest === tie && half & 1) ? 1 : 0));
    }
    const half = (exponent << 10) | (mantissa >> 13);
    const rest = mantissa & 0x1fff;
    return sign | (half + (rest > 0x1000 || (rest === 0x1000 && half & 1) ? 1 : 0));
  });
}

/** Bits of f16 or bf16, or an f32 array, as f32. */
export function widen(values, dtype) {
  if (dtype === "f32") return values;
  const words = values instanceof Uint16Array ? values : new Uint16Array(values.buffer, values.byteOffset, values.length);
  return Float32Array.from(words, (half) => {
    if (dtype === "bf16") {
      const word = new Uint32Array([half << 16]);
      return new Float32Array(word.buffer)[0];
    }
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 31;
    const mantissa = half & 1023;
    if (exponent === 0) return sign * mantissa * 2 ** -24;
    if (exponent === 31) return mantissa ? Number.NaN : sign * Infinity;
    return sign * (1 + mantissa / 1024) * 2 ** (exponent - 15);
  });
}

/** How an output compares with its golden values, `loose` times as far off as `[mean, max, relative]` allow; `null` allows anything. */
function judge(output, gold, got, budget, loose) {
  const [meanBudget, maxBudget, relative] = budget.map((bound) => (bound ?? Infinity) * loose);
  let [sum, count, max] = [0, 0, 0];
  let pass = gold.length === got.length;
  for (let i = 0; i < gold.length; i++) {
    const [want, have] = [gold[i], got[i]];
    if (!Number.isFinite(want) || !Number.isFinite(have)) {
      if (!Object.is(want, have)) [pass, max] = [false, Infinity];
      continue;
    }
    const off = Math.abs(want - have);
    [sum, count, max] = [sum + off, count + 1, Math.max(max, off)];
    if (off > maxBudget + relative * Math.max(1, Math.abs(want))) pass = false;
  }
  const mean = count === 0 ? 0 : sum / count;
  return { output, pass: pass && mean <= meanBudget, mean, max, budget: { mean: meanBudget, max: maxBudget } };
}

/** How many times the budgets an adapter may be off: SwiftShader's sin, cos and powers are as exact as Vulkan asks, which is less than f32. */
const looseness = (adapter, golden) => (/swiftshader/i.test(adapter) && golden.startsWith("builtins") ? 16 : 1);

const named = (capture) => ({ data: capture.data, shape: capture.shape });

/**
 * Runs one golden on one Gpu and returns a verdict per output. `budgets` is what budgets.json holds.
 * `flexattn` is the package, so that this file needs to know neither where it lies nor how it was bundled.
 */
export async function runGolden(flexattn, gpu, bytes, dtype, budgets, { gradients = true } = {}) {
  const { meta, tensors } = readGolden(bytes);
  const loose = looseness(gpu.adapter, meta.name);
  const tensor = (name) => {
    const { data, shape } = tensors[name];
    return dtype === "f32" ? { data, shape } : { data: narrow(data, dtype), shape, dtype };
  };
  const captures = Object.fromEntries(JSON.parse(meta.captures).map(({ name }) => [name, named(tensors[`cap.${name}`])]));
  const attention = new flexattn.Attention(gpu, {
    captures,
    scale: Number(meta.scale),
    ...(meta.mask_mod ? { maskMod: meta.mask_mod } : {}),
    ...(meta.score_mod ? { scoreMod: meta.score_mod } : {}),
  });
  try {
    const [q, k, v] = ["q", "k", "v"].map(tensor);
    const output = await attention.forward(q, k, v, { max: true });
    const verdict = (name, got) => judge(name, tensors[name].data, got, budgets[meta.name][dtype][name], loose);
    const verdicts = [verdict("out", widen(output.out.data, dtype)), verdict("lse", output.lse), verdict("max", output.max)];
    const wanted = JSON.parse(meta.grad);
    if (gradients && wanted.length > 0) {
      const dout = tensor("dout");
      const names = wanted.filter((name) => name.startsWith("dcap.")).map((name) => name.slice(5));
      const found = await attention.backward(q, k, v, output, dout, {
        wantsCaptures: names,
        ...(tensors.dlse ? { dlse: tensors.dlse.data } : {}),
      });
      for (const name of wanted) {
        const got = name.startsWith("dcap.") ? found.captures[name.slice(5)] : widen(found[name].data, dtype);
        verdicts.push(verdict(name, got));
      }
    }
    return verdicts.map((each) => ({ case: meta.name, dtype, tier: gpu.tier, ...each }));
  } finally {
    attention.free();
  }
}
