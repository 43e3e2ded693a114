import { readFileSync } from "node:fs";
import { defineConfig } from "vite";

// The page is a folder of static files: relative addresses, no server side, nothing fetched from
// elsewhere. `flexattn` is the built package beside it, as a reader's own project would import it.
export default defineConfig({
  base: "./",
  // The package's README, as text that any server of files shows.
  plugins: [{ name: "readme", generateBundle() { this.emitFile({ type: "asset", fileName: "README.txt", source: readFileSync(new URL("../README.md", import.meta.url)) }); } }],
  assetsInclude: ["**/*.safetensors"],
  resolve: { alias: { flexattn: new URL("../dist/index.js", import.meta.url).pathname } },
  build: { outDir: "dist", target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  server: { fs: { allow: ["../.."] } },
});
