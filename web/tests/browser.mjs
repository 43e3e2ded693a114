// A headless Chromium on SwiftShader, and a server for a folder of files.

import { createServer } from "node:http";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { extname, join, normalize } from "node:path";
import { chromium } from "playwright-core";

const FLAGS = [
  "--no-sandbox",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--enable-unsafe-webgpu",
];
export const SWIFTSHADER = "--use-webgpu-adapter=swiftshader";

const KINDS = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".wasm": "application/wasm", ".txt": "text/plain; charset=utf-8" };

/** Serves `folders`, by first path segment where one has that name, else the folder named "". */
export async function serve(folders) {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const [, first, ...rest] = path.split("/");
    const file = first !== "" && first in folders ? join(folders[first], ...rest) : join(folders[""], path.endsWith("/") ? `${path}index.html` : path);
    try {
      const body = readFileSync(file);
      response.writeHead(200, { "Content-Type": KINDS[extname(file)] ?? "application/octet-stream" }).end(body);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://localhost:${server.address().port}/`, close: () => server.close() };
}

/** A browser with an empty profile. `webgpu: false` hides WebGPU, as in an older browser. */
export async function browser({ webgpu = true, ...options } = {}) {
  const profile = mkdtempSync(join(tmpdir(), "flexattn-browser-"));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    headless: true,
    args: webgpu ? [...FLAGS, SWIFTSHADER] : FLAGS,
    ...options,
  });
  if (!webgpu) {
    await context.addInitScript(() => Object.defineProperty(Navigator.prototype, "gpu", { get: () => undefined }));
  }
  return {
    context,
    async close() {
      await context.close();
      rmSync(profile, { recursive: true, force: true });
    },
  };
}

/** A page that collects what it complains about. */
export async function open(context, url) {
  const page = await context.newPage();
  const complaints = [];
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  page.on("request", (request) => {
    const { hostname, protocol } = new URL(request.url());
    if (protocol.startsWith("http") && hostname !== "localhost") complaints.push(`asked the network for ${request.url()}`);
  });
  await page.goto(url);
  await page.waitForSelector("html[data-ready=true]", { timeout: 60_000 });
  return { page, complaints };
}
