// Colouring of WGSL and MSL text: one tokenizer for the editors and for the kernel panels.

export type TokenKind = "word" | "type" | "number" | "comment";

const WORDS = new Set(
  (
    "fn let var const if else return for while loop switch case default break continue continuing struct alias enable " +
    "true false override kernel device constant threadgroup thread using namespace typedef static inline"
  ).split(" "),
);
const TYPES = /^(?:[iuf](?:8|16|32)|bool|void|u?int[234]?|uchar|ushort|half[234]?|float[234]?|vec[234][iufh]?|mat\d.*|array|atomic|ptr|simdgroup_.*matrix.*|bfloat|size_t)$/;
const TOKEN = /\/\/.*|\/\*[^]*?\*\/|[A-Za-z_]\w*|(?:0x[\da-fA-F]+|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)[iufh]?|#\w+|[^]/y;

/** The kind of one token's text. */
function kindOf(token: string): TokenKind | null {
  if (token.startsWith("//") || token.startsWith("/*")) return "comment";
  if (/^(?:\d|\.\d)/.test(token)) return "number";
  if (token.startsWith("#") || WORDS.has(token)) return "word";
  return TYPES.test(token) ? "type" : null;
}

/** The tokens of a text, in order, nothing left out. */
export function* tokens(text: string): Generator<{ text: string; kind: TokenKind | null }> {
  TOKEN.lastIndex = 0;
  for (let match = TOKEN.exec(text); match !== null; match = TOKEN.exec(text)) {
    yield { text: match[0], kind: kindOf(match[0]) };
  }
}
