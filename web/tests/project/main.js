// What a reader's own project would write: the package by its name, bundled by Vite. Tests drive it
// through window.project.
import * as flexattn from "flexattn";
import * as ort from "onnxruntime-web/webgpu";
import { runGolden } from "./goldens.js";

await flexattn.default();

const gpus = new Map();
/** One Gpu per tier, made when first asked for. */
async function gpuOf(tier) {
  if (!gpus.has(tier)) gpus.set(tier, await flexattn.Gpu.create(tier === "best" ? {} : { tier }));
  return gpus.get(tier);
}

let budgets;

window.project = {
  flexattn,
  ort,
  gpuOf,
  async golden(name, dtype, tier, options) {
    const bytes = new Uint8Array(await (await fetch(`/goldens/${name}.safetensors`)).arrayBuffer());
    budgets ??= await (await fetch("/budgets/budgets.json")).json();
    return runGolden(flexattn, await gpuOf(tier), bytes, dtype, budgets, options);
  },
  worker() {
    return new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  },
};
document.documentElement.dataset.ready = "true";
