import { defineConfig } from "vite";

export default defineConfig({
  build: { outDir: "dist", target: "es2022", minify: false, modulePreload: { polyfill: false } },
  worker: { format: "es" },
});
