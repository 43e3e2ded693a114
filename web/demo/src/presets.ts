// The library's masks and score mods, as this page offers them: a name for people, a sentence, sliders.

import { prebuilt, type MaskMod, type ScoreMod } from "flexattn";
import type { ModState } from "./state";

export interface Slider {
  name: string;
  label: string;
  /** Values to choose from; a slider's position is an index. */
  values: readonly number[];
  start: number;
}

export interface Preset {
  name: string;
  label: string;
  about: string;
  formula: string;
  sliders: readonly Slider[];
}

const powers = (from: number, to: number): number[] => {
  const values: number[] = [];
  for (let value = from; value <= to; value *= 2) values.push(value);
  return values;
};
const tokens = (name: string, start: number, label = name): Slider => ({ name, label, values: powers(1, 8192), start });

/** What the library's table does not say: a sentence for people, and which numbers are worth a slider. */
const NOTES: Record<string, { about: string; sliders?: readonly Slider[] }> = {
  noop: { about: "Every query looks at every key." },
  causal: { about: "A token looks at itself and at what came before it, as in every language model." },
  bottom_right_causal: { about: "Causal, with the last query at the last key: for a chunk of queries at the end of a cache." },
  sliding_window: { about: "Only the most recent tokens, as in Mistral.", sliders: [tokens("window", 256)] },
  local_window: { about: "Neighbours on both sides.", sliders: [tokens("before", 128), tokens("after", 64)] },
  dilated_window: { about: "A wide window with holes in it.", sliders: [tokens("window", 256), { ...tokens("dilation", 4), values: powers(1, 64) }] },
  prefix_lm: { about: "A prompt that everyone sees, causal after it.", sliders: [tokens("prefix", 256)] },
  prefix_lm_per_batch: { about: "A prompt of its own length for each batch entry." },
  padding: { about: "Tokens that are only there to fill the batch see nothing and are not seen." },
  document: { about: "Several documents packed into one sequence, each seeing only itself." },
  document_per_batch: { about: "Packed documents, differently in each batch entry." },
  document_from_offsets: { about: "Packed documents, given by where each one starts." },
  packed_causal_document: { about: "Packed documents, causal inside each." },
  row_interval: { about: "Each query sees one interval of keys." },
  interval: { about: "Each key is seen by up to two intervals of queries." },
  longformer: { about: "A window, and a few tokens that see and are seen by everyone.", sliders: [tokens("window", 64)] },
  strided: { about: "Recent tokens, and every so-manyth of the older ones.", sliders: [tokens("window", 128), tokens("stride", 64)] },
  block_diagonal: { about: "Chunks that see only themselves.", sliders: [tokens("size", 256)] },
  natten_2d: { about: "A square neighbourhood in an image, row by row." },
  sliding_tile_2d: { about: "Tiles of an image that see the tiles around them." },
  sliding_tile_3d: { about: "Tiles of a video that see the tiles around them." },
  shared_prefix: { about: "Many answers to one prompt, packed: each sees the prompt and itself." },
  block_diffusion: { about: "Noised blocks that see themselves and the clean blocks before them." },
  tree: { about: "Speculative decoding: a token sees its ancestors in a tree." },
  dense: { about: "A tensor says it for every pair." },
  identity: { about: "The score as it is." },
  alibi: { about: "Distance costs, by a slope that differs from head to head." },
  softcap: { about: "Scores saturate, as in Gemma 2.", sliders: [{ name: "cap", label: "cap", values: [1, 2, 5, 10, 20, 30, 50, 100], start: 20 }] },
  relative_bias: { about: "A learnt bias for each head and distance." },
  t5_bucket_bias: { about: "T5's learnt biases: near distances one by one, far ones in logarithmic buckets." },
  head_bias: { about: "A constant for each head." },
  dense_bias: { about: "A tensor is added." },
  distance_penalty: { about: "The further away, the less.", sliders: [{ name: "rate", label: "rate", values: [0.001, 0.01, 0.05, 0.1, 0.5, 1], start: 0.05 }] },
  temperature: { about: "Sharper below 1, flatter above.", sliders: [{ name: "temperature", label: "temperature", values: [0.25, 0.5, 0.75, 1, 1.5, 2, 4], start: 0.5 }] },
  log_n: { about: "Scores grow with the length, so that attention stays as sharp as in training." },
  sandwich: { about: "A bias made of cosines of the distance." },
  head_gate: { about: "A learnt gate for each head." },
};

const NAMES: Record<string, string> = {
  noop: "Full attention",
  identity: "Unchanged",
  prefix_lm: "Prefix LM",
  prefix_lm_per_batch: "Prefix LM, per batch entry",
  natten_2d: "Neighbourhood 2D (NATTEN)",
  alibi: "ALiBi",
  t5_bucket_bias: "T5 buckets",
  log_n: "log n scaling",
  dense: "Dense tensor",
};

const titled = (name: string): string => {
  const words = name.replaceAll("_", " ").replace(/\b([23])d\b/, "$1D");
  return words.charAt(0).toUpperCase() + words.slice(1);
};

/** Every mask, or every score mod, in the library's order. */
export function presets(kind: "mask" | "score"): Preset[] {
  return prebuilt()
    .filter((row) => row.kind === kind)
    .map(({ name, formula, parameters }) => {
      const note = NOTES[name];
      const sliders = (note?.sliders ?? []).filter((slider) => parameters.some((parameter) => parameter.name === slider.name));
      return { name, label: NAMES[name] ?? titled(name), about: note?.about ?? "", formula, sliders };
    });
}

/** The library's mod with the sliders' values, as the package takes it. */
export function named(mod: ModState): MaskMod & ScoreMod {
  return { name: mod.preset, ...mod.params } as unknown as MaskMod & ScoreMod;
}
