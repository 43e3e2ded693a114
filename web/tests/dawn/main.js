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
/** Those that run in any case, with gradients: dtypes and tiers in turn. Lavapipe takes a second or two to compile each of their kernels. */
const GRADIENTS = ["abs_table", "all_dims_bias", "all_masked", "antidiagonal", "bias2d_qk", "bias3d_bqk"];
const tests = new URL("../../../../tests/", import.meta.url).pathname;
const folder = join(tests, "goldens");
const budgets = JSON.parse(readFileSync(join(tests, "snapshots/web/budgets.json"), "utf8"));

await flexattn.default();
const best = await flexattn.Gpu.create({ gpu });
const list = [...best.device.features].filter((name) => ["shader-f16", "subgroups"].includes(name));
console.log(JSON.stringify({ features: { adapter: best.adapter, list, tier: best.tier } }));
const tiers = best.tier === "portable" ? [best] : [best, await flexattn.Gpu.create({ gpu, tier: "portable" })];

const files = readdirSync(folder).filter((file) => file.endsWith(".safetensors")).sort();
const dtypes = ["f32", "f16", "bf16"];
const all = tiers.flatMap((tier) => dtypes.map((dtype) => [tier, dtype]));
/**
 * On which tiers and in which dtypes a golden runs. Without FLEXATTN_FULL one of `every` runs once, dtypes and tiers in turn;
 * with it each runs in every dtype, tiers in turn: a software adapter takes most of an hour for that.
 */
function runs(golden, index) {
  if (full) return dtypes.map((dtype, i) => [tiers[(index + i) % tiers.length], dtype]);
  const listed = GRADIENTS.indexOf(golden);
  if (listed >= 0) return [all[listed % all.length]];
  return index % every === 0 ? [all[(index / every) % all.length]] : [];
}

for (const [index, file] of files.entries()) {
  const golden = file.replace(".safetensors", "");
  const gradients = full || GRADIENTS.includes(golden);
  for (const [tier, dtype] of runs(golden, index)) {
    const name = `${golden} ${dtype} ${tier.tier}${gradients ? ", gradients" : ""}`;
    let problem = "";
    try {
      const verdicts = await runGolden(flexattn, tier, new Uint8Array(readFileSync(join(folder, file))), dtype, budgets, { gradients });
      problem = verdicts.filter(({ pass }) => !pass).map(({ output, mean, max, budget }) => `${output}: mean ${mean}, max ${max}, budget ${JSON.stringify(budget)}`).join("; ");
    } catch (error) {
      problem = String(error);
    }
    console.log(JSON.stringify({ name, problem }));
  }
}
process.exit(0);
