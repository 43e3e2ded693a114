// What is in the tarball, what it weighs, and what its types promise.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFileSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { install, pack, repository, web } from "./packed.mjs";

test("the tarball holds what is needed and nothing else", () => {
  const { files } = pack();
  assert.deepEqual(files.toSorted(), [
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "dist/index.d.ts",
    "dist/index.js",
    "dist/wasm/flexattn.js",
    "dist/wasm/flexattn_bg.wasm",
    "package.json",
  ]);
  for (const licence of ["LICENSE-APACHE", "LICENSE-MIT"]) assert.deepEqual(readFileSync(join(web, licence)), readFileSync(join(repository, licence)));
});

test("the module weighs less than its ceiling on the wire", () => {
  // More where the standard library of rustup is linked, as `cargo xtask test web` says.
  const ceiling = Number(process.env.FLEXATTN_MODULE_CEILING ?? 500_000);
  const module = readFileSync(join(web, "dist/wasm/flexattn_bg.wasm"));
  const { length } = execFileSync("gzip", ["-9"], { input: module, maxBuffer: 1e7 });
  assert.ok(length < ceiling, `${length} bytes, ceiling ${ceiling}`);
});

test("exports name types first and the package has no side effects", () => {
  const manifest = JSON.parse(readFileSync(join(web, "package.json"), "utf8"));
  assert.equal(Object.keys(manifest.exports["."])[0], "types");
  assert.equal(manifest.sideEffects, false);
  assert.equal(manifest.type, "module");
  assert.equal(manifest.dependencies, undefined);
});

test("types hold, and none of them is any", () => {
  const folder = install("types");
  copyFileSync(join(web, "tests/types.ts"), join(folder, "types.ts"));
  const options = {
    target: "ESNext",
    module: "ESNext",
    moduleResolution: "bundler",
    lib: ["ESNext", "DOM"],
    types: [],
    strict: true,
    noEmit: true,
    exactOptionalPropertyTypes: true,
    skipLibCheck: false,
  };
  writeFileSync(join(folder, "tsconfig.json"), JSON.stringify({ compilerOptions: options, files: ["types.ts"] }));
  const compile = (file) => execFileSync("node", [join(web, "node_modules/typescript/bin/tsc"), "--project", join(folder, file)], { stdio: "inherit" });
  compile("tsconfig.json");
  // The declarations bring what they need beyond the library of the reader's target.
  writeFileSync(join(folder, "import.ts"), 'export { Attention } from "flexattn";\n');
  const template = { ...options, target: "ES2023", lib: ["ES2023", "DOM", "DOM.Iterable"] };
  writeFileSync(join(folder, "template.json"), JSON.stringify({ compilerOptions: template, files: ["import.ts"] }));
  compile("template.json");
  const declared = readFileSync(join(folder, "node_modules/flexattn/dist/index.d.ts"), "utf8").replace(/\/\*[^]*?\*\//g, "");
  assert.doesNotMatch(declared, /\bany\b(?!\??:)/);
});

test("bare import in node needs no browser", async () => {
  const folder = install("node");
  writeFileSync(
    join(folder, "main.js"),
    `import init, { Gpu, Attention } from "flexattn";
     await init();
     const gpu = await Gpu.create();
     const x = { data: new Float32Array(2 * 4).fill(1), shape: [1, 1, 2, 4] };
     const { out, lse } = await new Attention(gpu, { maskMod: "q >= kv" }).forward(x, x, x);
     console.log(JSON.stringify({ tier: gpu.tier, notes: gpu.notes, out: [...out.data], lse: [...lse] }));`,
  );
  const said = JSON.parse(execFileSync("node", ["main.js"], { cwd: folder, encoding: "utf8" }));
  assert.equal(said.tier, "cpu");
  assert.match(said.notes[0], /WebGPU/);
  assert.deepEqual(said.out, Array(8).fill(1));
  assert.ok(Math.abs(said.lse[0] - 2) < 1e-6 && Math.abs(said.lse[1] - (2 + Math.LN2)) < 1e-6);
});
