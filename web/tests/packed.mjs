// The package as a user gets it: packed, installed into an empty project, and there bundled or imported.

import { execFileSync } from "node:child_process";
import { cpSync, existsSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

export const web = new URL("..", import.meta.url).pathname;
export const repository = join(web, "..");
export const goldens = join(repository, "tests/goldens");
export const budgets = join(repository, "tests/snapshots/web");

/** Where tests build. Inside `web`, so that Vite and others are found; ignored by git. */
const room = join(web, "tests/.installed");

const npm = (words, cwd) => execFileSync("npm", words, { cwd, encoding: "utf8", stdio: ["ignore", "pipe", "inherit"] });

let packed;
/** Packs once. Returns the tarball's path and the paths in it. */
export function pack() {
  if (packed) return packed;
  if (!existsSync(join(web, "dist/index.js"))) throw new Error("web/dist is missing: run `cargo xtask web` first");
  rmSync(room, { recursive: true, force: true });
  mkdirSync(room, { recursive: true });
  const [report] = JSON.parse(npm(["pack", "--json", "--ignore-scripts", "--pack-destination", room], web));
  packed = { tarball: join(room, report.filename), files: report.files.map(({ path }) => path), bytes: report.size };
  return packed;
}

/** An empty project with the tarball installed, and the files of `from` beside it. Returns its folder. */
export function install(name, from) {
  const { tarball } = pack();
  const folder = join(room, name);
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
  if (from) {
    cpSync(from, folder, { recursive: true });
    cpSync(join(web, "tests/goldens.js"), join(folder, "goldens.js"));
  }
  writeFileSync(join(folder, "package.json"), JSON.stringify({ name, private: true, type: "module" }));
  npm(["install", "--offline", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", tarball], folder);
  return folder;
}
