// The block map: the query x key grid, one cell per block, and one block magnified to its tokens.

import type { Blocks } from "flexattn";
import { bitmap, channels, colour, surface } from "./canvas";

export const BLOCK = 128;
const TILE = 32;
const NAMES = ["empty", "partial", "full"] as const;

export interface MapData {
  blocks: Blocks;
  qLen: number;
  kvLen: number;
  /** Kept pairs of one block, row-major, one byte each; its rows and columns end with the lengths. */
  tokens: (row: number, column: number) => Uint8Array;
}

export interface BlockMap {
  draw(data: MapData, chosen: [number, number]): void;
  /** Draws again in the current colours and size. */
  redraw(): void;
}

/** Connects the two canvases; `choose` hears which block the reader turned to. */
export function blockMap(map: HTMLCanvasElement, zoom: HTMLCanvasElement, read: HTMLElement, choose: (block: [number, number]) => void): BlockMap {
  let data: MapData | null = null;
  let chosen: [number, number] = [0, 0];
  let pair: [number, number] | null = null;
  let picture: HTMLCanvasElement | null = null;

  const cellAt = (event: PointerEvent): [number, number] | null => {
    if (data === null) return null;
    const box = map.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * data.blocks.columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * data.blocks.rows);
    return clampBlock([row, column], data.blocks);
  };
  const move = (block: [number, number]): void => {
    if (data === null) return;
    pair = null;
    choose(clampBlock(block, data.blocks));
  };
  map.addEventListener("pointerdown", (event) => {
    const cell = cellAt(event);
    if (cell) move(cell);
  });
  map.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (cell && data) map.title = `${describe(cell, data)}`;
    if (cell && event.buttons === 1) move(cell);
  });
  arrows(map, (down, right) => move([chosen[0] + down, chosen[1] + right]));

  const turnTo = (next: [number, number] | null): void => {
    if (data === null) return;
    const [height, width] = extent(chosen, data);
    pair = next === null ? null : [Math.max(0, Math.min(height - 1, next[0])), Math.max(0, Math.min(width - 1, next[1]))];
    drawZoom();
  };
  zoom.addEventListener("pointermove", (event) => {
    if (data === null) return;
    const box = zoom.getBoundingClientRect();
    const [height, width] = extent(chosen, data);
    turnTo([Math.floor(((event.clientY - box.top) / box.height) * height), Math.floor(((event.clientX - box.left) / box.width) * width)]);
  });
  zoom.addEventListener("pointerleave", () => turnTo(null));
  zoom.addEventListener("blur", () => turnTo(null));
  arrows(zoom, (down, right) => turnTo(pair === null ? [0, 0] : [pair[0] + down, pair[1] + right]));

  function drawMap(): void {
    const area = surface(map);
    if (area === null || data === null) return;
    const { context, width, height } = area;
    picture ??= overview(data);
    context.imageSmoothingEnabled = picture.width > width;
    context.drawImage(picture, 0, 0, width, height);
    const { rows, columns } = data.blocks;
    const cell = width / columns;
    if (cell >= 9) {
      // Gaps in the colour of the ground, so that blocks read as separate things.
      context.strokeStyle = colour("ground");
      context.lineWidth = Math.min(2.5, cell / 12);
      context.beginPath();
      for (let i = 0; i <= columns; i++) {
        context.moveTo((i * width) / columns, 0);
        context.lineTo((i * width) / columns, height);
      }
      for (let i = 0; i <= rows; i++) {
        context.moveTo(0, (i * height) / rows);
        context.lineTo(width, (i * height) / rows);
      }
      context.stroke();
    }
    const [row, column] = chosen;
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    context.strokeRect((column * width) / columns + 1, (row * height) / rows + 1, Math.max(width / columns - 2, 3), Math.max(height / rows - 2, 3));
  }

  function drawZoom(): void {
    const area = surface(zoom);
    if (area === null || data === null) return;
    const { context, width, height } = area;
    const [rows, columns] = extent(chosen, data);
    const tokens = data.tokens(chosen[0], chosen[1]);
    const kept = channels(colour(data.blocks.kinds[chosen[0] * data.blocks.columns + chosen[1]] === 2 ? "full" : "partial"));
    const dropped = channels(colour("empty"));
    context.drawImage(bitmap(columns, rows, (x, y) => (tokens[y * columns + x] ? kept : dropped)), 0, 0, width, height);
    context.strokeStyle = colour("ground");
    context.lineWidth = 1;
    context.beginPath();
    for (let at = TILE; at < columns; at += TILE) {
      context.moveTo((at * width) / columns, 0);
      context.lineTo((at * width) / columns, height);
    }
    for (let at = TILE; at < rows; at += TILE) {
      context.moveTo(0, (at * height) / rows);
      context.lineTo(width, (at * height) / rows);
    }
    context.stroke();
    if (pair !== null) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      const side = Math.max(4, width / columns + 2);
      context.strokeRect(((pair[1] + 0.5) * width) / columns - side / 2, ((pair[0] + 0.5) * height) / rows - side / 2, side, side);
    }
    read.textContent =
      pair === null
        ? describe(chosen, data)
        : `Query ${chosen[0] * BLOCK + pair[0]}, key ${chosen[1] * BLOCK + pair[1]}: ${tokens[pair[0] * columns + pair[1]] ? "kept" : "masked"}.`;
  }

  new ResizeObserver(() => {
    drawMap();
    drawZoom();
  }).observe(map);

  return {
    draw(next, block) {
      if (next !== data) picture = null;
      data = next;
      chosen = clampBlock(block, next.blocks);
      drawMap();
      drawZoom();
    },
    redraw() {
      picture = null;
      drawMap();
      drawZoom();
    },
  };
}

/** The whole map: tokens where there are few, tiles in the middle, one pixel per block when there are many. */
function overview(data: MapData): HTMLCanvasElement {
  const { rows, columns, kinds, tiles } = data.blocks;
  const full = channels(colour("full"));
  const partial = channels(colour("partial"));
  const soft = channels(colour("partial-soft"));
  const empty = channels(colour("empty"));
  const flat = [empty, partial, full] as const;
  const kind = (row: number, column: number): number => kinds[row * columns + column] ?? 0;
  if (rows * columns <= 256) {
    const cells = new Map<number, Uint8Array>();
    return bitmap(data.kvLen, data.qLen, (x, y) => {
      const row = Math.floor(y / BLOCK);
      const column = Math.floor(x / BLOCK);
      const of = kind(row, column);
      if (of !== 1) return flat[of] ?? empty;
      const at = row * columns + column;
      const tokens = cells.get(at) ?? data.tokens(row, column);
      cells.set(at, tokens);
      const width = extent([row, column], data)[1];
      return tokens[(y % BLOCK) * width + (x % BLOCK)] ? partial : mix(soft, empty, 0.62);
    });
  }
  const side = rows * columns <= 64 * 64 ? 4 : 1;
  return bitmap(columns * side, rows * side, (x, y) => {
    const row = Math.floor(y / side);
    const column = Math.floor(x / side);
    const of = kind(row, column);
    if (of !== 1 || side === 1) return flat[of] ?? empty;
    const tile = ((tiles[row * columns + column] ?? 0) >>> (2 * (4 * (y % 4) + (x % 4)))) & 3;
    return tile === 0 ? mix(soft, empty, 0.62) : tile === 1 ? soft : partial;
  });
}

type Rgb = readonly [number, number, number];

function mix(a: Rgb, b: Rgb, toB: number): [number, number, number] {
  return [a[0] + (b[0] - a[0]) * toB, a[1] + (b[1] - a[1]) * toB, a[2] + (b[2] - a[2]) * toB];
}

function extent([row, column]: readonly [number, number], data: MapData): [rows: number, columns: number] {
  return [Math.min(BLOCK, data.qLen - row * BLOCK), Math.min(BLOCK, data.kvLen - column * BLOCK)];
}

function clampBlock([row, column]: readonly [number, number], { rows, columns }: Blocks): [number, number] {
  return [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
}

function describe([row, column]: readonly [number, number], data: MapData): string {
  const [rows, columns] = extent([row, column], data);
  const kind = data.blocks.kinds[row * data.blocks.columns + column] ?? 0;
  const meaning = ["nothing is kept, so the kernel never visits it", "kept pair by pair, under the mask", "every pair is kept, and the mask is not asked"][kind];
  const queries = `Queries ${row * BLOCK}–${row * BLOCK + rows - 1}`;
  const keys = `keys ${column * BLOCK}–${column * BLOCK + columns - 1}`;
  return `${queries} × ${keys}: ${NAMES[kind]}; ${meaning}.`;
}

/** Arrow keys as steps; with Shift, eight at once. */
export function arrows(target: HTMLElement, step: (down: number, right: number) => void): void {
  target.addEventListener("keydown", (event) => {
    const size = event.shiftKey ? 8 : 1;
    const steps: Record<string, readonly [number, number]> = { ArrowUp: [-size, 0], ArrowDown: [size, 0], ArrowLeft: [0, -size], ArrowRight: [0, size] };
    const [down, right] = steps[event.key] ?? [0, 0];
    if (down === 0 && right === 0) return;
    event.preventDefault();
    step(down, right);
  });
}
