// The same module in node on Dawn, the engine of Chrome: with lavapipe 25 it has f16 and subgroups of 8,
// which Chromium's SwiftShader lacks. FLEXATTN_DAWN_RUNNER names the script that sets that driver.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { join } from "node:path";
import { test } from "node:test";
import { install, web } from "./packed.mjs";

const runner = process.env.FLEXATTN_DAWN_RUNNER;
const skip = runner ? false : "FLEXATTN_DAWN_RUNNER is not set: no driver here that Dawn accepts";

test("goldens on Dawn, f16 and subgroups", { skip, timeout: 1_200_000 }, async (t) => {
  const folder = install("dawn", join(web, "tests/dawn"));
  const child = spawn(runner, [process.execPath, "main.js"], { cwd: folder, stdio: ["ignore", "pipe", "inherit"] });
  const seen = new Set();
  for await (const line of createInterface({ input: child.stdout })) {
    if (!line.startsWith("{")) {
      t.diagnostic(line);
      continue;
    }
    const { name, problem, features } = JSON.parse(line);
    if (features) {
      t.diagnostic(`${features.adapter}: ${features.list.join(", ")}; tier ${features.tier}`);
      assert.ok(features.list.includes("shader-f16") && features.list.includes("subgroups"));
      continue;
    }
    seen.add(name);
    await t.test(name, () => assert.equal(problem, ""));
  }
  const code = await new Promise((resolve) => (child.exitCode === null ? child.on("close", resolve) : resolve(child.exitCode)));
  assert.equal(code, 0);
  assert.ok(seen.size > 15, `only ${seen.size} cases ran`);
});
