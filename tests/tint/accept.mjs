// Compiles every WGSL kernel in a folder with Tint, the compiler of Chrome and of Dawn.
//
//   node tests/tint/accept.mjs [--pipelines] FOLDER
//
// FOLDER is what `cargo run --release --example emit -- --all --language wgsl-web --out FOLDER` wrote: the
// kernels and `manifest.json`, one record a kernel (file, entry, label, workgroup_memory). Without a flag,
// Dawn's null backend is asked: it needs no driver, offers f16 and subgroups, and parses, types and
// checks uniformity as a browser does. With `--pipelines` each kernel also becomes a pipeline on the
// first real adapter, as far as that adapter has the features.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { create, globals } from "webgpu";

Object.assign(globalThis, globals);

const words = process.argv.slice(2);
const pipelines = words.includes("--pipelines");
const folder = words.find((word) => !word.startsWith("--"));
if (!folder) {
  console.error("usage: node accept.mjs [--pipelines] FOLDER");
  process.exit(2);
}

// The object that `create` gives must outlive every device made from it.
const gpu = create(pipelines ? [] : ["backend=null"]);
const adapter = await gpu.requestAdapter();
if (!adapter) {
  console.error("Dawn finds no adapter; under --pipelines a Vulkan driver that it accepts must be set");
  process.exit(1);
}
const optional = ["shader-f16", "subgroups"];
const requiredFeatures = optional.filter((feature) => adapter.features.has(feature));
const { maxComputeWorkgroupStorageSize, maxComputeInvocationsPerWorkgroup, maxComputeWorkgroupSizeX } = adapter.limits;
const device = await adapter.requestDevice({
  requiredFeatures,
  requiredLimits: { maxComputeWorkgroupStorageSize, maxComputeInvocationsPerWorkgroup, maxComputeWorkgroupSizeX },
});
const name = adapter.info.description || adapter.info.device || adapter.info.vendor || "no name";
console.log(`adapter: ${pipelines ? name : "none (null backend)"}; features: ${requiredFeatures.join(", ") || "none"}`);

// Errors are read from getCompilationInfo and from the error scope; Dawn's own copy on the console is noise.
device.addEventListener?.("uncapturederror", (event) => event.preventDefault());

let passed = 0;
let failed = 0;
let skipped = 0;
/** Tint's warnings, each with the number of kernels that have it. */
const warnings = new Map();
const manifest = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8"));
for (const { file, entry, label, workgroup_memory } of manifest) {
  const code = readFileSync(join(folder, file), "utf8");
  const wants = [
    [/^\s*enable\s+f16\s*;/m, "shader-f16"],
    [/^\s*enable\s+subgroups\s*;/m, "subgroups"],
  ];
  const lacking = wants.filter(([pattern, feature]) => pattern.test(code) && !requiredFeatures.includes(feature));
  if (lacking.length > 0) {
    console.log(`skipped ${label}: the adapter has no ${lacking.map(([, feature]) => feature).join(", ")}`);
    skipped += 1;
    continue;
  }
  const problem = await compile(code, entry, label, workgroup_memory);
  if (problem) {
    console.log(`FAILED ${label} (${join(folder, file)})\n${problem}`);
    failed += 1;
  } else {
    passed += 1;
  }
}
device.destroy();
for (const [message, kernels] of warnings) {
  console.log(`warning in ${kernels} kernels: ${message}`);
}
console.log(`${passed} passed, ${failed} failed, ${skipped} skipped`);
process.exit(failed === 0 && passed > 0 ? 0 : 1);

/** What is wrong with a kernel, or nothing. */
async function compile(code, entry, label, workgroupMemory) {
  device.pushErrorScope("validation");
  const module = device.createShaderModule({ label, code });
  const { messages } = await module.getCompilationInfo();
  for (const { message } of messages.filter(({ type }) => type === "warning")) {
    warnings.set(message, (warnings.get(message) ?? 0) + 1);
  }
  const isError = messages.some(({ type }) => type === "error");
  let problem = isError && messages.map(({ type, lineNum, linePos, message }) => `  ${type} ${lineNum}:${linePos} ${message}`).join("\n");
  if (!problem && workgroupMemory <= maxComputeWorkgroupStorageSize) {
    try {
      await device.createComputePipelineAsync({ label, layout: "auto", compute: { module, entryPoint: entry } });
    } catch (error) {
      problem = `  pipeline: ${error.message}`;
    }
  }
  const scope = await device.popErrorScope();
  return problem || (scope && `  ${scope.message}`);
}
