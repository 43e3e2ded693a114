// The same module in node on Dawn, the engine of Chrome, on two drivers: lavapipe 25, which has f16 and
// subgroups of 8, and Chromium's SwiftShader, which has neither. FLEXATTN_DAWN_RUNNER names the script that
// sets the first.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createInterface } from "node:readline";
import { join } from "node:path";
import { test } from "node:test";
import { install, web } from "./packed.mjs";

const runner = process.env.FLEXATTN_DAWN_RUNNER;
const timeout = process.env.FLEXATTN_FULL === "1" ? 7_200_000 : 1_200_000;
const swiftshader = "/usr/lib/chromium/vk_swiftshader_icd.json";

/** Runs tests/dawn on a driver: hands its adapter's report to `check`, and makes each case a test. */
async function goldensAgree(t, { name, command, env, check, wanted }) {
  const folder = install(name, join(web, "tests/dawn"));
  const [program, ...words] = [...command, process.execPath, "main.js"];
  const child = spawn(program, words, { cwd: folder, env: { ...process.env, ...env }, stdio: ["ignore", "pipe", "inherit"], signal: t.signal });
  child.on("error", (error) => t.diagnostic(String(error)));
  const seen = new Set();
  for await (const line of createInterface({ input: child.stdout })) {
    if (!line.startsWith("{")) {
      t.diagnostic(line);
      continue;
    }
    const { name, problem, features } = JSON.parse(line);
    if (features) {
      t.diagnostic(`${features.adapter}: ${features.list.join(", ")}; tier ${features.tier}`);
      check(features);
      continue;
    }
    seen.add(name);
    await t.test(name, () => assert.equal(problem, ""));
  }
  const code = await new Promise((resolve) => (child.exitCode === null ? child.on("close", resolve) : resolve(child.exitCode)));
  assert.equal(code, 0);
  // Every golden that has to run did, whatever the order of the others; and gradients in each dtype.
  assert.ok(seen.size >= wanted, `only ${seen.size} cases ran`);
  for (const dtype of ["f32", "f16", "bf16"]) assert.ok([...seen].some((name) => name.includes(` ${dtype} `) && name.endsWith(", gradients")), `no gradients in ${dtype}`);
}

test("goldens on Dawn with lavapipe: f16 and subgroups", {
  skip: runner ? false : "FLEXATTN_DAWN_RUNNER is not set: no lavapipe here that Dawn accepts",
  timeout,
}, (t) => goldensAgree(t, {
  name: "dawn",
  command: [runner],
  env: {},
  check: ({ tier, list }) => {
    assert.equal(tier, "subgroup");
    assert.deepEqual([...list].sort(), ["shader-f16", "subgroups"]);
  },
  wanted: 22,
}));

test("goldens on Dawn with SwiftShader: subgroups of 4 lanes fall to the portable tier", {
  skip: existsSync(swiftshader) ? false : `${swiftshader} is missing: install chromium`,
  timeout,
}, (t) => goldensAgree(t, {
  name: "dawn-swiftshader",
  command: [],
  env: { VK_DRIVER_FILES: swiftshader, VK_ICD_FILENAMES: swiftshader, FLEXATTN_EVERY: "4" },
  check: ({ tier, adapter }) => {
    assert.match(adapter, /swiftshader/i);
    assert.equal(tier, "portable");
  },
  wanted: 26,
}));
