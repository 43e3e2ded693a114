import init, { BlockMask, check, Attention, Gpu, FlexattnError, spell, type MaskMod, type MaskShape, type ScoreMod, type Spelled, type Values } from "flexattn";
import { chart, milliseconds } from "./chart";
import { editor, type Editor } from "./editor";
import { heat } from "./heat";
import { kernelText, showKernel } from "./kernels";
import { blockMap, BLOCK, type MapData } from "./map";
import { named, presets, type Preset } from "./presets";
import { checkable, DIM, HEADS as MEASURED_HEADS, measure, verify, type Mods, type Times } from "./run";
import { sentences, type Sentence } from "./sentences";
import { decode, DTYPES, encode, HEAD_DIMS, HEADS, LENGTHS, PASSES, type ModState, type State } from "./state";

type Kind = "mask" | "score";

const START: State = {
  mask: { preset: "sliding_window", params: { window: 256 }, text: null },
  score: { preset: "identity", params: {}, text: null },
  qLen: 1024,
  kvLen: 1024,
  heads: 4,
  mapHead: 0,
  block: [4, 2],
  sentence: 0,
  head: 1,
  row: 10,
  pass: "forward",
  headDim: 64,
  dtype: "f32",
  onlyMine: true,
};

const at = <T extends Element = HTMLElement>(id: string): T => {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found as unknown as T;
};

let state = decode(location.hash.slice(1), START);
let gpu: Gpu | null = null;
let known: Record<Kind, Preset[]>;
const editors = {} as Record<Kind, Editor>;
/** The last mods that held up, spelled out; what the rest of the page shows. */
let good: { mask: Spelled; score: Spelled; blocks: BlockMask } | null = null;

// ---------------------------------------------------------------------------------------------
// State

let remembering = 0;
/** Changes the state, and soon after the address. */
function change(next: Partial<State>): void {
  state = { ...state, ...next };
  clearTimeout(remembering);
  remembering = window.setTimeout(remember, 250);
}

function remember(): void {
  clearTimeout(remembering);
  const text = encode(state, START);
  history.replaceState(null, "", text === "" ? location.pathname + location.search : `#${text}`);
}

function shape(): MaskShape & { batch: number; heads: number } {
  return { batch: 1, heads: state.heads, qLen: state.qLen, kvLen: state.kvLen };
}

/** A mod spelled for some sizes: text, and the tensors that it reads. */
function spelled(kind: Kind, mod: ModState, sizes: MaskShape): Spelled {
  const preset = spell(kind, named(mod) as MaskMod | ScoreMod, sizes);
  return mod.text === null ? preset : { ...preset, text: mod.text };
}

function valuesOf(...parts: Spelled[]): Values {
  return {
    captures: Object.assign({}, ...parts.map((part) => part.captures)) as NonNullable<Values["captures"]>,
    scalars: Object.assign({}, ...parts.map((part) => part.scalars)) as NonNullable<Values["scalars"]>,
  };
}

/** The page's mods for some sizes, as an Attention takes them. */
function mods(sizes: MaskShape): Mods {
  const mask = spelled("mask", state.mask, sizes);
  const score = spelled("score", state.score, sizes);
  return { maskMod: mask.text, scoreMod: score.text, ...valuesOf(mask, score) };
}

// ---------------------------------------------------------------------------------------------
// The stage: mods and map

const map = blockMap(at<HTMLCanvasElement>("map"), at<HTMLCanvasElement>("zoom"), at("map-read"), (block) => {
  change({ block });
  drawMap();
});
let mapData: MapData | null = null;

/** Reads the mods again; where they hold up, everything that shows them follows. */
function update(): void {
  const problems: Record<Kind, string> = { mask: "", score: "" };
  try {
    const mask = spelled("mask", state.mask, shape());
    const score = spelled("score", state.score, shape());
    editors.mask.setText(mask.text);
    editors.score.setText(score.text);
    const values = valuesOf(mask, score);
    const findings = check({ maskMod: mask.text, scoreMod: score.text, ...values });
    for (const kind of ["mask", "score"] as const) {
      const own = findings.filter((finding) => finding.mod === kind);
      editors[kind].show(own);
      problems[kind] = own.map((finding) => `Line ${finding.line}, column ${finding.column}: ${finding.message}`).join("\n");
    }
    if (findings.length === 0) {
      const blocks = BlockMask.build(mask.text, shape(), values);
      good?.blocks.free();
      good = { mask, score, blocks };
    }
  } catch (error) {
    const kind = error instanceof FlexattnError && error.mod === "score" ? "score" : "mask";
    problems[kind] = error instanceof Error ? error.message : String(error);
  }
  for (const kind of ["mask", "score"] as const) {
    const place = at(`${kind}-problem`);
    place.textContent = problems[kind];
    place.hidden = problems[kind] === "";
  }
  const stale = problems.mask !== "" || problems.score !== "";
  // The map is of the mods before the mistake.
  for (const part of document.querySelectorAll(".map, .zoom, .codes")) part.classList.toggle("stale", stale);
  if (good === null || stale) return;
  mapData = null;
  drawMap();
  drawTally();
  drawKernels();
  scheduleWeights();
}

function drawMap(): void {
  if (good === null) return;
  const { blocks } = good;
  const { qLen, kvLen } = state;
  mapData ??= {
    blocks: blocks.blocks(0, state.mapHead),
    qLen,
    kvLen,
    tokens: (row, column) =>
      blocks.tokens({
        head: state.mapHead,
        q: [row * BLOCK, Math.min(qLen, (row + 1) * BLOCK)],
        kv: [column * BLOCK, Math.min(kvLen, (column + 1) * BLOCK)],
      }),
  };
  at("map").style.aspectRatio = String(Math.max(0.5, Math.min(2, kvLen / qLen)));
  map.draw(mapData, state.block);
}

const percent = (part: number): string => `${(100 * part).toFixed(part > 0 && part < 0.01 ? 1 : 0)} %`;

function drawTally(): void {
  if (good === null || mapData === null) return;
  const { kinds } = mapData.blocks;
  const counts = [0, 0, 0];
  for (const kind of kinds) counts[kind] = (counts[kind] ?? 0) + 1;
  const [empty = 0, partial = 0, full = 0] = counts;
  const bar = document.createElement("div");
  bar.className = "tally-bar";
  const key = document.createElement("div");
  key.className = "tally-key";
  for (const [name, count, colour] of [["full", full, "--full"], ["partial", partial, "--partial"], ["empty", empty, "--empty"]] as const) {
    const piece = document.createElement("i");
    piece.style.flex = String(count);
    piece.style.background = `var(${colour})`;
    bar.append(piece);
    const entry = document.createElement("span");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = `var(${colour})`;
    const number = document.createElement("b");
    number.textContent = String(count);
    entry.append(swatch, number, ` ${name}`);
    key.append(entry);
  }
  at("tally").replaceChildren(bar, key);
  const skipped = empty / kinds.length;
  at("map-caption").textContent =
    `Of ${kinds.length} blocks of 128 × 128, ${percent(skipped)} are never visited; the mask keeps ${percent(good.blocks.density)} of all pairs.`;
}

function setUpMod(kind: Kind): void {
  const select = at<HTMLSelectElement>(`${kind}-preset`);
  select.replaceChildren(...known[kind].map(({ name, label }) => new Option(label, name)));
  select.addEventListener("change", () => {
    const preset = known[kind].find(({ name }) => name === select.value);
    if (!preset) return;
    change({ [kind]: { preset: preset.name, params: startOf(preset), text: null } });
    showMod(kind);
    update();
  });
  let typing = 0;
  editors[kind] = editor(at(`${kind}-editor`), kind === "mask" ? "Mask" : "Score modification", (text) => {
    change({ [kind]: { ...state[kind], text } });
    showMod(kind);
    clearTimeout(typing);
    typing = window.setTimeout(update, 120);
  });
  showMod(kind);
}

const startOf = (preset: Preset): Record<string, number> => Object.fromEntries(preset.sliders.map(({ name, start }) => [name, start]));

/** The controls around one editor. */
function showMod(kind: Kind): void {
  const mod = state[kind];
  const select = at<HTMLSelectElement>(`${kind}-preset`);
  select.value = mod.preset;
  const preset = known[kind].find(({ name }) => name === mod.preset);
  for (const option of select.options) {
    const label = known[kind].find(({ name }) => name === option.value)?.label ?? option.value;
    option.textContent = option.value === mod.preset && mod.text !== null ? `${label}, edited` : label;
  }
  at(`${kind}-about`).textContent = mod.text === null ? (preset?.about ?? "") : "Edited here. Choose it again to undo.";
  const host = at(`${kind}-params`);
  const sliders = mod.text === null ? (preset?.sliders ?? []) : [];
  // What the sliders stand at: those that stand there already are left alone, since one may be in use.
  const stand = (params: Record<string, number>): string => JSON.stringify([mod.preset, params, sliders.length]);
  if (host.dataset["for"] === stand(mod.params)) return;
  host.dataset["for"] = stand(mod.params);
  host.replaceChildren(
    ...sliders.map((slider) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      const output = document.createElement("output");
      input.type = "range";
      input.min = "0";
      input.max = String(slider.values.length - 1);
      input.step = "1";
      input.id = `${kind}-${slider.name}`;
      const value = mod.params[slider.name] ?? slider.start;
      input.value = String(Math.max(0, slider.values.indexOf(value)));
      output.textContent = String(value);
      input.setAttribute("aria-valuetext", String(value));
      input.addEventListener("input", () => {
        const chosen = slider.values[Number(input.value)] ?? slider.start;
        output.textContent = String(chosen);
        input.setAttribute("aria-valuetext", String(chosen));
        const params = { ...state[kind].params, [slider.name]: chosen };
        change({ [kind]: { ...state[kind], params } });
        host.dataset["for"] = stand(params);
        update();
      });
      label.append(slider.label, input, output);
      return label;
    }),
  );
}

/** A select of numbers or names bound to one field of the state. */
function choice<K extends "qLen" | "kvLen" | "heads" | "pass" | "headDim" | "dtype">(id: string, key: K, values: readonly State[K][], then: () => void): void {
  const select = at<HTMLSelectElement>(id);
  select.replaceChildren(...values.map((value) => new Option(String(value), String(value), false, value === state[key])));
  select.addEventListener("change", () => {
    const value = values[select.selectedIndex];
    if (value !== undefined) change({ [key]: value } as Pick<State, K>);
    then();
  });
}

function showHeads(): void {
  const select = at<HTMLSelectElement>("map-head");
  change({ mapHead: Math.min(state.mapHead, state.heads - 1) });
  select.replaceChildren(...Array.from({ length: state.heads }, (_, head) => new Option(String(head), String(head), false, head === state.mapHead)));
}

// ---------------------------------------------------------------------------------------------
// What each word looks at

let read: Sentence[] | null = null;
let weightsDue = 0;
/** Counts the requests, so that a slow answer does not replace a newer one. */
let weightsAsked = 0;
let weightsSeen = false;
let shownWeights: { all: Float32Array; words: readonly string[] } | null = null;

const picture = heat(at<HTMLCanvasElement>("heat"), at("heat-read"), at("words"), (row) => {
  change({ row });
  drawWeights();
});

function scheduleWeights(): void {
  if (!weightsSeen) return;
  clearTimeout(weightsDue);
  weightsDue = window.setTimeout(() => void computeWeights(), 60);
}

async function computeWeights(): Promise<void> {
  if (gpu === null) return;
  read ??= await sentences();
  const select = at<HTMLSelectElement>("sentence");
  if (select.options.length === 0) {
    select.replaceChildren(...read.map(({ words }, i) => new Option(words.filter((word) => !word.startsWith("[")).join(" "), String(i), false, i === state.sentence)));
  }
  const sentence = read[state.sentence];
  if (!sentence) return;
  const asked = ++weightsAsked;
  const { words, q, k } = sentence;
  let attention: Attention | null = null;
  try {
    attention = new Attention(gpu, mods({ batch: 1, heads: q.shape[1], qLen: words.length, kvLen: words.length }));
    const all = await attention.weights(q, k, words.map((_, row) => row));
    if (asked !== weightsAsked) return;
    shownWeights = { all, words };
    drawWeights();
  } catch (error) {
    at("heat-read").textContent = error instanceof Error ? error.message : String(error);
  } finally {
    attention?.free();
  }
}

function drawWeights(): void {
  if (shownWeights === null) return;
  const { all, words } = shownWeights;
  const size = words.length * words.length;
  at("head-out").textContent = String(state.head);
  picture.draw({ words, weights: all.subarray(state.head * size, (state.head + 1) * size) }, state.row);
}

// ---------------------------------------------------------------------------------------------
// The kernel it becomes

const code = { wgsl: "", msl: "" };

function drawKernels(): void {
  if (good === null) return;
  const { mask, score } = good;
  for (const language of ["wgsl", "msl"] as const) {
    const pre = at(`code-${language}`);
    try {
      code[language] = kernelText({
        language,
        pass: state.pass,
        headDim: state.headDim,
        dtype: state.dtype,
        maskMod: mask.text,
        scoreMod: score.text,
        ...valuesOf(mask, score),
        ...(language === "wgsl" && gpu !== null && gpu.tier !== "cpu" ? { tier: gpu.tier } : {}),
      });
    } catch (error) {
      code[language] = `// ${error instanceof Error ? error.message : String(error)}`;
    }
    showKernel(pre, code[language], state.onlyMine && code[language].includes("//@slot"));
  }
}

// ---------------------------------------------------------------------------------------------
// On this machine

let running: AbortController | null = null;

function showTimes(times: Times): void {
  const lines = (samples: Times["density"], x: (sample: Times["density"][number]) => number) => [
    {
      name: "flexattn",
      colour: "var(--full)",
      points: samples.map((sample) => ({ x: x(sample), y: sample.ms, label: `${sample.name}, ${sample.length} tokens: ${milliseconds(sample.ms)}` })),
    },
    {
      name: "unfused",
      colour: "var(--baseline)",
      dashed: true,
      points: samples
        .filter((sample) => sample.baselineMs !== null)
        .map((sample) => ({ x: x(sample), y: sample.baselineMs ?? 0, label: `${sample.name}, ${sample.length} tokens, unfused: ${milliseconds(sample.baselineMs ?? 0)}` })),
    },
  ];
  const waiting = "Press Measure: it takes under a minute.";
  chart(at("chart-density"), lines(times.density, (sample) => sample.density), { x: "pairs kept", y: "time", xText: (x) => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)} %` }, waiting);
  chart(at("chart-length"), lines(times.length, (sample) => sample.length), { x: "tokens, with your mask", y: "time", xText: String }, waiting);
}

/** Runs one of the two tasks: one at a time, with a way to stop, and never without a word at the end. */
async function task(work: (gpu: Gpu, signal: AbortSignal) => Promise<string>): Promise<void> {
  const status = at("run-status");
  if (gpu === null || running !== null) return;
  running = new AbortController();
  const buttons = [at<HTMLButtonElement>("verify"), at<HTMLButtonElement>("measure")];
  for (const button of buttons) button.disabled = true;
  status.className = "";
  try {
    status.textContent = await work(gpu, running.signal);
  } catch (error) {
    if (running.signal.aborted) {
      status.textContent = "Stopped.";
    } else {
      status.className = "verdict-wrong";
      status.textContent = error instanceof Error ? error.message : String(error);
    }
  } finally {
    running = null;
    for (const button of buttons) button.disabled = false;
    at("stop").hidden = true;
    at("progress").hidden = true;
  }
}

function setUpRun(): void {
  showTimes({ density: [], length: [] });
  at("verify").addEventListener("click", () => {
    void task(async (gpu) => {
      const sizes = checkable(state);
      at("run-status").textContent = "Computing…";
      const { heads, qLen, kvLen } = sizes;
      const verdict = await verify(gpu, mods({ batch: 1, heads, qLen, kvLen }), sizes);
      at("run-status").className = verdict.ok ? "verdict-right" : "verdict-wrong";
      return verdict.text;
    });
  });
  at("measure").addEventListener("click", () => {
    void task(async (gpu, signal) => {
      const bar = at<HTMLProgressElement>("progress");
      at("stop").hidden = false;
      bar.hidden = false;
      const progress = (part: number, what: string): void => {
        bar.value = part;
        at("run-status").textContent = `Measuring: ${what}`;
      };
      const density = (length: number, mask: MaskMod): number => {
        const sizes = { batch: 1, heads: 1, qLen: length, kvLen: length };
        const own = typeof mask === "string" ? spelled("mask", state.mask, sizes) : null;
        const blocks = BlockMask.build(own?.text ?? mask, sizes, own ? valuesOf(own) : {});
        const found = blocks.density;
        blocks.free();
        return found;
      };
      const times = await measure(gpu, (length) => mods({ batch: 1, heads: MEASURED_HEADS, qLen: length, kvLen: length }), density, { progress, signal }, showTimes);
      const sparse = times.density[0];
      const dense = times.density.at(-1);
      if (!sparse || !dense) return "";
      const faster = sparse.baselineMs === null ? "" : `, ${(sparse.baselineMs / sparse.ms).toFixed(1)} times faster than unfused`;
      return `At ${sparse.length} tokens, keeping ${percent(sparse.density)} of the pairs takes ${milliseconds(sparse.ms)}${faster}; keeping all takes ${milliseconds(dense.ms)}.`;
    });
  });
  at("stop").addEventListener("click", () => running?.abort());
}

function showTier(found: Gpu): void {
  const names = { subgroup: "WebGPU with subgroups", portable: "WebGPU", cpu: "WebAssembly, no GPU" };
  at("device").textContent = `${names[found.tier]} · ${found.adapter}`;
  const sentence = found.tier === "cpu" ? "This page runs on the CPU, in WebAssembly." : `This page runs on ${found.adapter}, with the ${found.tier} kernels.`;
  const reasons = document.createElement("ul");
  reasons.append(
    ...found.notes.map((note) => {
      const item = document.createElement("li");
      item.textContent = note;
      return item;
    }),
  );
  at("baseline").textContent =
    `Measured are ${MEASURED_HEADS} heads of ${DIM} in f32. ` +
    (found.tier === "cpu"
      ? "There is no baseline to compare with: it is made of GPU kernels, and this page runs on the CPU."
      : "“unfused” is plain attention as three kernels on this GPU: one writes every score to memory, one makes a softmax of each row, one multiplies by the values. It visits every pair; a mask would come on top.");
  at("tier").replaceChildren(sentence, ...(found.notes.length > 0 ? [" Why nothing faster:", reasons] : []));
}

// ---------------------------------------------------------------------------------------------
// The page

function setUpPage(): void {
  const theme = at("theme");
  const root = document.documentElement;
  const label = (): void => {
    theme.textContent = root.dataset["theme"] === "dark" ? "Light" : "Dark";
  };
  label();
  theme.addEventListener("click", () => {
    root.dataset["theme"] = root.dataset["theme"] === "dark" ? "light" : "dark";
    localStorage.setItem("theme", root.dataset["theme"]);
    label();
    map.redraw();
    picture.redraw();
  });
  at("share").addEventListener("click", () => {
    remember();
    void copy(location.href, at("share"));
  });
  for (const button of document.querySelectorAll<HTMLElement>("[data-copy]")) {
    button.addEventListener("click", () => void copy(button.dataset["copy"] === "msl" ? code.msl : code.wgsl, button));
  }
  // Not as an address of its own: an address is a state.
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault();
    editors.mask?.view.focus();
  });
  addEventListener("hashchange", () => {
    state = decode(location.hash.slice(1), START);
    showAll();
    update();
  });
}

async function copy(text: string, button: HTMLElement): Promise<void> {
  const before = button.dataset["label"] ?? button.textContent ?? "";
  button.dataset["label"] = before;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

/** Puts the state into every control. */
function showAll(): void {
  for (const kind of ["mask", "score"] as const) {
    if (!known[kind].some(({ name }) => name === state[kind].preset)) state[kind] = structuredClone(START[kind]);
    showMod(kind);
  }
  for (const [id, key] of [["q-len", "qLen"], ["kv-len", "kvLen"], ["heads", "heads"], ["pass", "pass"], ["head-dim", "headDim"], ["dtype", "dtype"]] as const) {
    at<HTMLSelectElement>(id).value = String(state[key]);
  }
  showHeads();
  at<HTMLInputElement>("head").value = String(state.head);
  at<HTMLInputElement>("only-mods").checked = state.onlyMine;
  at<HTMLSelectElement>("sentence").value = String(state.sentence);
}

function setUpControls(): void {
  known = { mask: presets("mask"), score: presets("score") };
  setUpMod("mask");
  setUpMod("score");
  choice("q-len", "qLen", LENGTHS, update);
  choice("kv-len", "kvLen", LENGTHS, update);
  choice("heads", "heads", HEADS, () => {
    showHeads();
    update();
  });
  choice("pass", "pass", PASSES, drawKernels);
  choice("head-dim", "headDim", HEAD_DIMS, drawKernels);
  choice("dtype", "dtype", DTYPES, drawKernels);
  at<HTMLSelectElement>("map-head").addEventListener("change", (event) => {
    change({ mapHead: Number((event.target as HTMLSelectElement).value) });
    mapData = null;
    drawMap();
    drawTally();
  });
  at<HTMLInputElement>("only-mods").addEventListener("change", (event) => {
    change({ onlyMine: (event.target as HTMLInputElement).checked });
    drawKernels();
  });
  at<HTMLInputElement>("head").addEventListener("input", (event) => {
    change({ head: Number((event.target as HTMLInputElement).value) });
    drawWeights();
  });
  at<HTMLSelectElement>("sentence").addEventListener("change", (event) => {
    change({ sentence: (event.target as HTMLSelectElement).selectedIndex, row: 0 });
    scheduleWeights();
  });
  // Sentences are fetched, and kernels compiled for them, only while somebody looks: not for each mask that is tried above.
  new IntersectionObserver((entries) => {
    weightsSeen = entries.at(-1)?.isIntersecting ?? false;
    if (weightsSeen) scheduleWeights();
  }).observe(at("weights"));
}

async function open(): Promise<void> {
  setUpPage();
  await init();
  setUpControls();
  setUpRun();
  showAll();
  update();
  document.documentElement.dataset["ready"] = "true";
  await connect();
}

/** Finds a GPU, and another one when it is lost. */
async function connect(): Promise<void> {
  gpu = await Gpu.create();
  showTier(gpu);
  drawKernels();
  scheduleWeights();
  void gpu.lost.then(async (info) => {
    running?.abort();
    at("device").textContent = `The GPU was lost (${info.message || info.reason}); connecting again…`;
    await connect();
  });
}

open().catch((error: unknown) => {
  at("device").textContent = error instanceof Error ? error.message : String(error);
});
