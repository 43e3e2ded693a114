// The README's code is what a reader pastes: its first block in node, in a page and as strict TypeScript, the others as
// TypeScript among the names that they speak of.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { browser } from "./browser.mjs";
import { install, web } from "./packed.mjs";

const readme = readFileSync(join(web, "README.md"), "utf8");
const blocks = [...readme.matchAll(/^```(js|ts)\n([^]*?)^```/gm)].map(([, language, text]) => ({ language, text }));

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

test("an empty folder, what the README says, and a minute: the page answers", { timeout: 120_000 }, async () => {
  const started = Date.now();
  // Below `web`, so that npx finds the Vite of the lockfile and fetches none.
  const folder = install("readme-page");
  const [{ text }] = blocks;
  const [script] = /<script type="module" src="[^"]*"><\/script>/.exec(readme) ?? assert.fail("the README has no script tag");
  writeFileSync(join(folder, "main.js"), text);
  writeFileSync(join(folder, "index.html"), script);
  const vite = spawn("npx", ["vite"], { cwd: folder, stdio: ["ignore", "pipe", "inherit"], detached: true });
  const chromium = await browser();
  try {
    let said = "";
    for await (const part of vite.stdout) {
      said += part;
      if (said.includes("http://localhost:")) break;
    }
    const page = await chromium.context.newPage();
    const problems = [];
    page.on("pageerror", (error) => problems.push(String(error)));
    const answer = page.waitForEvent("console", { predicate: (message) => message.args().length === 2, timeout: 60_000 });
    await page.goto(/http:\/\/localhost:\d+\//.exec(said.replace(/\x1b\[\d+m/g, ""))[0]);
    const [out, lse] = await Promise.all((await answer).args().map((each) => each.evaluate((data) => ({ length: data.length, first: [...data.slice(0, 4)], finite: data.every(Number.isFinite) }))));
    const took = Date.now() - started;
    console.log(`# from npm install to the answer: ${(took / 1000).toFixed(1)} s`);
    assert.deepEqual([out.length, out.finite, lse.length, lse.finite], [8 * 1024 * 64, true, 8 * 1024, true]);
    assert.ok(out.first.every((x) => Math.abs(x) <= 0.5) && out.first.some((x) => x !== 0), String(out.first));
    assert.deepEqual(problems, []);
    assert.ok(took < 60_000, `${took} ms`);
  } finally {
    // npx and what it started.
    process.kill(-vite.pid);
    await chromium.close();
  }
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
