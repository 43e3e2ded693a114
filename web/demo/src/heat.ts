// What each word looks at: attention weights of one head over one sentence, as a picture and as text.

import { arrows } from "./map";
import { channels, colour, surface } from "./canvas";

export interface HeatData {
  words: readonly string[];
  /** Weights of the chosen head, row-major `[words, words]`; a row sums to 1, or to 0 where nothing is kept. */
  weights: Float32Array;
}

export interface Heat {
  draw(data: HeatData, row: number): void;
  redraw(): void;
}

/** Connects picture, reading and word list; `choose` hears which row the reader turned to. */
export function heat(canvas: HTMLCanvasElement, read: HTMLElement, words: HTMLElement, choose: (row: number) => void): Heat {
  let data: HeatData | null = null;
  let row = 0;

  canvas.addEventListener("pointerdown", (event) => {
    if (data === null) return;
    const box = canvas.getBoundingClientRect();
    const { left, side } = frame(box.width, data.words);
    const at = Math.floor(((event.clientY - box.top - left) / side) * data.words.length);
    choose(Math.max(0, Math.min(data.words.length - 1, at)));
  });
  arrows(canvas, (down) => {
    if (data !== null && down !== 0) choose(Math.max(0, Math.min(data.words.length - 1, row + Math.sign(down))));
  });

  function draw(): void {
    const area = surface(canvas);
    if (area === null || data === null) return;
    const { context, width } = area;
    const count = data.words.length;
    const { left, side, size } = frame(width, data.words);
    const cell = side / count;
    const ground = channels(colour("empty"));
    const full = channels(colour("full"));
    for (let y = 0; y < count; y++) {
      for (let x = 0; x < count; x++) {
        context.fillStyle = shade(ground, full, strength(data.weights[y * count + x] ?? 0));
        context.fillRect(left + x * cell, left + y * cell, cell - 1, cell - 1);
      }
    }
    context.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    data.words.forEach((word, i) => {
      context.fillStyle = i === row ? colour("ink") : colour("muted");
      context.textAlign = "right";
      context.fillText(word, left - 6, left + (i + 0.5) * cell);
      context.save();
      context.translate(left + (i + 0.5) * cell, left - 6);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.fillStyle = colour("muted");
      context.fillText(word, 0, 0);
      context.restore();
    });
    context.strokeStyle = colour("partial");
    context.lineWidth = 2;
    context.strokeRect(left - 1, left + row * cell - 1, side + 1, cell + 1);
  }

  function readOut(): void {
    if (data === null) return;
    const count = data.words.length;
    const weights = data.weights.subarray(row * count, (row + 1) * count);
    const ranked = [...weights].map((weight, at) => ({ weight, at })).sort((a, b) => b.weight - a.weight);
    const top = ranked.filter(({ weight }) => weight >= 0.005).slice(0, 3);
    const word = data.words[row] ?? "";
    read.textContent =
      top.length === 0
        ? `“${word}” keeps nothing under this mask: its output is 0.`
        : `“${word}” looks at ${top.map(({ weight, at }) => `“${data?.words[at] ?? ""}” (${(100 * weight).toFixed(0)} %)`).join(", ")}.`;
    const ground = channels(colour("ground"));
    const full = channels(colour("full"));
    [...words.children].forEach((child, at) => {
      if (!(child instanceof HTMLElement)) return;
      const power = strength(weights[at] ?? 0);
      child.style.background = shade(ground, full, power);
      child.style.color = power > 0.55 ? colour("ground") : "";
      child.setAttribute("aria-pressed", String(at === row));
    });
  }

  new ResizeObserver(draw).observe(canvas);

  return {
    draw(next, chosen) {
      row = Math.max(0, Math.min(next.words.length - 1, chosen));
      if (data?.words !== next.words) {
        words.replaceChildren(
          ...next.words.map((word, at) => {
            const button = document.createElement("button");
            button.type = "button";
            button.textContent = word;
            button.addEventListener("click", () => choose(at));
            return button;
          }),
        );
      }
      data = next;
      draw();
      readOut();
    },
    redraw() {
      draw();
      readOut();
    },
  };
}

/** Weights span decades; a square root keeps the small ones visible. */
const strength = (weight: number): number => Math.sqrt(Math.max(0, Math.min(1, weight)));

type Rgb = readonly [number, number, number];

function shade(from: Rgb, to: Rgb, power: number): string {
  const at = (i: 0 | 1 | 2): number => Math.round(from[i] + (to[i] - from[i]) * power);
  return `rgb(${at(0)} ${at(1)} ${at(2)})`;
}

/** Room for the words beside and above the squares. */
function frame(width: number, words: readonly string[]): { left: number; side: number; size: number } {
  const longest = Math.max(...words.map((word) => word.length));
  const size = Math.max(9, Math.min(13, (width / words.length) * 0.62));
  const left = Math.round(longest * size * 0.58 + 10);
  return { left, side: width - left, size };
}
