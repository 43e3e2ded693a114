// Runs goldens on Dawn; prints one line of JSON per case, tier and dtype.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { create, globals } from "webgpu";
import * as flexattn from "flexattn";
import { runGolden } from "./goldens.js";

Object.assign(globalThis, globals);
// The object that `create` gives must outlive every device made from it.
const gpu = create([]);
const full = process.env.FLEXATTN_FULL === "1";
const every = Number(process.env.FLEXATTN_EVERY ?? 5);
/** Whose gradients run too: lavapipe takes a second or two to compile each of their kernels. */
const GRADIENTS = ["abs_table", "all_dims_bias", "all_masked", "antidiagonal", "bias2d_qk", "bias3d_bqk"];
const tests = new URL("../../../../tests/", import.meta.url).pathname;
const folder = join(tests, "goldens");
const budgets = JSON.parse(readFileSync(join(tests, "snapshots/web/budgets.json"), "utf8"));

await flexattn.default();
const best = await flexattn.Gpu.create({ gpu });
const list = [...best.device.features].filter((name) => ["shader-f16", "subgroups"].includes(name));
console.log(JSON.stringify({ features: { adapter: best.adapter, list, tier: best.tier } }));
const tiers = best.tier === "portable" ? [best] : [best, await flexattn.Gpu.create({ gpu, tier: "portable" })];

const files = readdirSync(folder).filter((file) => file.endsWith(".safetensors"));
for (const [index, file] of files.entries()) {
  // Without FLEXATTN_FULL one file of `every` runs once, dtypes and tiers in turn; with it every file in each dtype,
  // tiers in turn: a software adapter takes most of an hour for that.
  if (!full && index % every !== 0) continue;
  const golden = file.replace(".safetensors", "");
  const gradients = full || GRADIENTS.includes(golden);
  // SwiftShader's sin, cos and powers are as exact as Vulkan asks, which is less than f32.
  const loose = /swiftshader/i.test(best.adapter) && golden.startsWith("builtins") ? 16 : 1;
  const dtypes = ["f32", "f16", "bf16"];
  const all = tiers.flatMap((tier) => dtypes.map((dtype) => [tier, dtype]));
  const each = dtypes.map((dtype, i) => [tiers[(index + i) % tiers.length], dtype]);
  for (const [tier, dtype] of full ? each : [all[(index / every) % all.length]]) {
    const name = `${golden} ${dtype} ${tier.tier}${gradients ? ", gradients" : ""}`;
    let problem = "";
    try {
      const verdicts = await runGolden(flexattn, tier, new Uint8Array(readFileSync(join(folder, file))), dtype, budgets, { gradients, loose });
      problem = verdicts.filter(({ pass }) => !pass).map(({ output, mean, max, budget }) => `${output}: mean ${mean}, max ${max}, budget ${JSON.stringify(budget)}`).join("; ");
    } catch (error) {
      problem = String(error);
    }
    console.log(JSON.stringify({ name, problem }));
  }
}
process.exit(0);
