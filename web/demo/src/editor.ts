// A small code editor: CodeMirror with WGSL colours, and findings shown at the place they are about.

import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { HighlightStyle, StreamLanguage, syntaxHighlighting } from "@codemirror/language";
import { lintKeymap, setDiagnostics, type Diagnostic as Finding } from "@codemirror/lint";
import { EditorState } from "@codemirror/state";
import { drawSelection, EditorView, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import type { Diagnostic } from "flexattn";
import { tokens } from "./wgsl";

const language = StreamLanguage.define<null>({
  name: "wgsl",
  startState: () => null,
  token(stream) {
    if (stream.eatSpace()) return null;
    const rest = stream.string.slice(stream.pos);
    for (const token of tokens(rest)) {
      stream.pos += token.text.length;
      return token.kind === null ? null : { word: "keyword", type: "typeName", number: "number", comment: "comment" }[token.kind];
    }
    stream.next();
    return null;
  },
});

const colours = HighlightStyle.define([
  { tag: tags.keyword, class: "t-word" },
  { tag: tags.typeName, class: "t-type" },
  { tag: tags.number, class: "t-number" },
  { tag: tags.comment, class: "t-comment" },
]);

const look = EditorView.theme({
  "&": { backgroundColor: "transparent", color: "var(--ink)" },
  ".cm-content": { padding: "0.6rem 0", fontFamily: "var(--mono)", caretColor: "var(--ink)" },
  ".cm-cursor": { borderLeftColor: "var(--ink)" },
  ".cm-gutters": { backgroundColor: "transparent", color: "var(--muted)", border: "0", paddingLeft: "0.4rem" },
  ".cm-activeLine": { backgroundColor: "color-mix(in srgb, var(--full) 6%, transparent)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": {
    backgroundColor: "color-mix(in srgb, var(--full) 24%, transparent) !important",
  },
  ".cm-tooltip": { backgroundColor: "var(--raised)", border: "1px solid var(--line)", borderRadius: "6px", maxWidth: "min(36rem, 90vw)" },
  ".cm-diagnostic": { borderLeft: "3px solid var(--wrong)", padding: "0.4rem 0.7rem", fontFamily: "var(--sans)" },
  ".cm-lintRange-error": {
    backgroundImage: "none",
    textDecoration: "underline wavy var(--wrong)",
    textDecorationSkipInk: "none",
    textUnderlineOffset: "3px",
  },
  ".cm-lintPoint-error::after": { borderBottomColor: "var(--wrong)" },
});

export interface Editor {
  /** Replaces the text; does not count as typing. */
  setText(text: string): void;
  /** Marks the findings, or clears them. */
  show(findings: readonly Diagnostic[]): void;
  readonly view: EditorView;
}

/** An editor in `parent`. `typed` hears about every change made by hand. */
export function editor(parent: HTMLElement, label: string, typed: (text: string) => void): Editor {
  let quiet = false;
  const view = new EditorView({
    parent,
    state: EditorState.create({
      extensions: [
        lineNumbers(),
        history(),
        drawSelection(),
        highlightActiveLine(),
        EditorView.lineWrapping,
        EditorView.contentAttributes.of({ "aria-label": label, spellcheck: "false", autocapitalize: "off" }),
        language,
        syntaxHighlighting(colours),
        look,
        // Tab moves on, as everywhere else on a page.
        keymap.of([...defaultKeymap, ...historyKeymap, ...lintKeymap]),
        EditorView.updateListener.of((update) => {
          if (update.docChanged && !quiet) typed(update.state.doc.toString());
        }),
      ],
    }),
  });
  return {
    view,
    setText(text) {
      if (view.state.doc.toString() === text) return;
      quiet = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
      quiet = false;
    },
    show(findings) {
      parent.classList.toggle("broken", findings.length > 0);
      const end = view.state.doc.length;
      const marks: Finding[] = findings.map((finding) => {
        const from = Math.min(finding.from, end);
        return { from, to: Math.max(from, Math.min(finding.to, end)), severity: "error", message: finding.message };
      });
      view.dispatch(setDiagnostics(view.state, marks));
    },
  };
}
