// The README's code is what a reader pastes: its first block as a module in a page and as strict TypeScript,
// the others as TypeScript among the names that they speak of.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { install, web } from "./packed.mjs";

const blocks = [...readFileSync(join(web, "README.md"), "utf8").matchAll(/^```(js|ts)\n([^]*?)^```/gm)].map(([, language, text]) => ({ language, text }));

const OPTIONS = { module: "ESNext", moduleResolution: "bundler", types: [], strict: true, noEmit: true, noUncheckedIndexedAccess: true, exactOptionalPropertyTypes: true, skipLibCheck: false };
const compile = (folder, name, files, options) => {
  writeFileSync(join(folder, name), JSON.stringify({ compilerOptions: { ...OPTIONS, ...options }, files }));
  execFileSync("node", [join(web, "node_modules/typescript/bin/tsc"), "--project", join(folder, name)], { stdio: "inherit" });
};

test("the first block runs as it stands, and is strict TypeScript", { timeout: 120_000 }, () => {
  const folder = install("readme");
  const [{ text }] = blocks;
  writeFileSync(join(folder, "main.js"), text);
  const said = execFileSync("node", ["main.js"], { cwd: folder, encoding: "utf8" });
  assert.match(said, /Float32Array\(524288\)/);
  assert.match(said, /Float32Array\(8192\)/);
  writeFileSync(join(folder, "main.ts"), text);
  // What Vite's template for TypeScript says today.
  compile(folder, "tsconfig.json", ["main.ts"], { target: "ES2023", lib: ["ES2023", "DOM"] });
});

test("the other blocks are TypeScript", () => {
  const folder = install("readme-others");
  const names = `import init, { Attention, BlockMask, emit, Gpu, type Output, type Tensor } from "flexattn";
declare const ids: number[], slopes: Float32Array, newIds: Int32Array, n: number, shape: readonly [number, number, number, number];
declare const q: Tensor<Float32Array>, k: Tensor, v: Tensor, cacheK: Tensor, cacheV: Tensor, dout: Tensor;
declare const ort: { env: { webgpu: { device: Promise<GPUDevice> } }; Tensor: { fromGpuBuffer(buffer: GPUBuffer, options: object): object } };
declare const y: { gpuBuffer: GPUBuffer };
declare const gpu: Gpu, attention: Attention;
void [init, BlockMask, emit] satisfies unknown;
export type { Output };
`;
  const files = blocks.slice(1).map(({ text }, at) => {
    const name = `block${at}.ts`;
    writeFileSync(join(folder, name), `${names}export async function block() {\n${text}}\n`);
    return name;
  });
  assert.ok(files.length >= 6);
  compile(folder, "tsconfig.json", files, { target: "ESNext", lib: ["ESNext", "DOM"] });
});
