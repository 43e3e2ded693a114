// A line chart with logarithmic axes, drawn as SVG and labelled at the lines themselves.

export interface Point {
  x: number;
  y: number;
  /** What the point is, for the tooltip and for readers of the page's text. */
  label: string;
}

export interface Line {
  name: string;
  colour: string;
  dashed?: boolean;
  points: readonly Point[];
}

export interface Axes {
  x: string;
  y: string;
  /** Text of a value on the x axis. */
  xText: (value: number) => string;
}

const WIDTH = 520;
const HEIGHT = 260;
const LEFT = 52;
const RIGHT = 84;
const TOP = 14;
const BOTTOM = 38;

export const milliseconds = (value: number): string =>
  value >= 100 ? `${value.toFixed(0)} ms` : value >= 10 ? `${value.toFixed(1)} ms` : `${value.toFixed(2)} ms`;

/** Draws the lines into `host`; with no points yet, says `empty`. */
export function chart(host: HTMLElement, lines: readonly Line[], axes: Axes, empty: string): void {
  const all = lines.flatMap((line) => line.points);
  if (all.length === 0) {
    const note = document.createElement("p");
    note.className = "empty";
    note.textContent = empty;
    host.replaceChildren(note);
    return;
  }
  const [x0, x1] = span(all.map((point) => point.x), 1.15);
  const [y0, y1] = span(all.map((point) => point.y), 1.4);
  const place = (value: number, from: number, to: number, low: number, high: number): number =>
    low + ((high - low) * Math.log(value / from)) / Math.log(to / from);
  const px = (x: number): number => place(x, x0, x1, LEFT, WIDTH - RIGHT);
  const py = (y: number): number => place(y, y0, y1, HEIGHT - BOTTOM, TOP);

  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": describe(lines, axes) });
  for (const y of steps(y0, y1)) {
    svg.append(
      element("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y), stroke: "var(--line)" }),
      text(LEFT - 7, py(y) + 4, "end", milliseconds(y).replace(/\.0+ /, " ")),
    );
  }
  const ticks = [...new Set(all.map((point) => point.x))].sort((a, b) => a - b);
  let last = -Infinity;
  for (const x of ticks) {
    if (px(x) - last < 38) continue;
    last = px(x);
    svg.append(text(px(x), HEIGHT - BOTTOM + 17, "middle", axes.xText(x)));
  }
  svg.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "middle", axes.x));

  const ends = lines.map((line) => line.points.at(-1)).map((point) => (point ? py(point.y) : 0));
  const labels = apart(ends, 13);
  lines.forEach((line, index) => {
    if (line.points.length === 0) return;
    const path = line.points.map((point, i) => `${i === 0 ? "M" : "L"}${px(point.x).toFixed(1)} ${py(point.y).toFixed(1)}`).join("");
    svg.append(element("path", { d: path, fill: "none", stroke: line.colour, "stroke-width": 2, "stroke-dasharray": line.dashed ? "5 4" : "none" }));
    for (const point of line.points) {
      const dot = element("circle", { cx: px(point.x), cy: py(point.y), r: 3.5, fill: line.colour });
      const title = element("title", {});
      title.textContent = point.label;
      dot.append(title);
      svg.append(dot);
    }
    const end = line.points.at(-1);
    if (!end) return;
    const name = text(px(end.x) + 9, (labels[index] ?? 0) + 4, "start", line.name);
    name.setAttribute("fill", line.colour);
    name.setAttribute("font-weight", "600");
    svg.append(name);
  });
  host.replaceChildren(svg);
}

function span(values: readonly number[], room: number): [number, number] {
  const low = Math.min(...values);
  const high = Math.max(...values);
  return [low / room, high * room];
}

/** 1, 2, 5 times powers of ten inside the span; only the powers when there are many. */
function steps(from: number, to: number): number[] {
  const found: number[] = [];
  for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(to)); power++) {
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  }
  const inside = found.filter((value) => value >= from && value <= to);
  return inside.length > 6 ? inside.filter((value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9) : inside;
}

/** Moves label positions apart so that neighbours are `gap` away from each other. */
function apart(positions: readonly number[], gap: number): number[] {
  const order = positions.map((y, index) => ({ y, index })).sort((a, b) => a.y - b.y);
  for (let i = 1; i < order.length; i++) {
    const above = order[i - 1];
    const here = order[i];
    if (above && here && here.y - above.y < gap) here.y = above.y + gap;
  }
  const moved = [...positions];
  for (const { y, index } of order) moved[index] = y;
  return moved;
}

function describe(lines: readonly Line[], axes: Axes): string {
  const parts = lines.map((line) => `${line.name}: ${line.points.map((point) => `${axes.xText(point.x)} ${milliseconds(point.y)}`).join(", ")}`);
  return `${axes.y} against ${axes.x}. ${parts.join(". ")}`;
}

function element(name: string, attributes: Record<string, string | number>): SVGElement {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

function text(x: number, y: number, anchor: string, content: string): SVGElement {
  const made = element("text", { x, y, "text-anchor": anchor, fill: "currentColor" });
  made.textContent = content;
  return made;
}
