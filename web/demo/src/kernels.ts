// The kernels that the mods become, in both languages, with the reader's own lines marked.

import { emit, type EmitOptions } from "flexattn";
import { tokens } from "./wgsl";

/** Slots that are filled from the mods; others hold fixed text. */
const MINE = new Set(["captures", "row", "score_mod", "mask_mod", "score_grad", "captured_grad"]);

interface Line {
  text: string;
  mine: boolean;
}

/** The text of all kernels of the pass, one after the other. */
export function kernelText(options: EmitOptions): string {
  return emit(options)
    .map(({ label, text }) => `// ${label}\n${text.trimEnd()}\n`)
    .join("\n");
}

/** Shows kernel text in `pre`; with `onlyMine`, the lines between mods are folded away. */
export function showKernel(pre: HTMLElement, text: string, onlyMine: boolean): void {
  const lines = marked(text);
  const shown = document.createDocumentFragment();
  let folded = 0;
  const unfold = (): void => {
    if (folded > 0) shown.append(row(`// … ${folded} fixed lines`, false));
    folded = 0;
  };
  for (const line of lines) {
    if (onlyMine && !line.mine) {
      folded++;
      continue;
    }
    unfold();
    shown.append(row(line.text, line.mine));
  }
  unfold();
  pre.replaceChildren(shown);
}

/** Each line, with whether it stands in a slot of the mods. */
function marked(text: string): Line[] {
  const open: boolean[] = [];
  return text.split("\n").map((line) => {
    const begins = /^\/\/@slot (\w+)/.exec(line);
    const mine = open.at(-1) ?? false;
    if (begins) open.push(MINE.has(begins[1] ?? ""));
    else if (line.trimEnd() === "//@end") open.pop();
    else return { text: line, mine };
    return { text: line, mine: false };
  });
}

function row(text: string, mine: boolean): HTMLElement {
  const line = document.createElement("span");
  line.className = mine ? "line mine" : "line";
  for (const token of tokens(text)) {
    if (token.kind === null) {
      line.append(token.text);
      continue;
    }
    const span = document.createElement("span");
    span.className = `t-${token.kind}`;
    span.textContent = token.text;
    line.append(span);
  }
  if (text === "") line.append("\u200b");
  return line;
}
