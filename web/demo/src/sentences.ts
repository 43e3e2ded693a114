// Queries and keys of one layer of all-MiniLM-L6-v2 on real sentences: the library's own test data.

import type { Tensor } from "flexattn";
import address from "../../../tests/goldens/real_minilm_l3_padded.safetensors?url";

export interface Sentence {
  words: readonly string[];
  q: Tensor<Float32Array>;
  k: Tensor<Float32Array>;
  v: Tensor<Float32Array>;
}

interface Entry {
  shape: [number, number, number, number];
  data_offsets: [number, number];
}

let loading: Promise<Sentence[]> | undefined;

/** The sentences, loaded when first asked for. */
export function sentences(): Promise<Sentence[]> {
  loading ??= load();
  return loading;
}

async function load(): Promise<Sentence[]> {
  const bytes = await (await fetch(address)).arrayBuffer();
  // safetensors: a length, a JSON header, then the elements.
  const headerEnd = 8 + Number(new DataView(bytes).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.slice(8, headerEnd))) as Record<"q" | "k" | "v", Entry> & {
    __metadata__: { tokens: string };
  };
  const batches = JSON.parse(header.__metadata__.tokens) as string[][];
  return batches.map((words, batch) => {
    const cut = (name: "q" | "k" | "v"): Tensor<Float32Array> => {
      const { shape, data_offsets } = header[name];
      const [, heads, length, dim] = shape;
      const all = new Float32Array(bytes.slice(headerEnd + data_offsets[0], headerEnd + data_offsets[1]));
      // The batch is padded to one length: the words that exist are a choice of strides.
      return {
        data: all.subarray(batch * heads * length * dim, (batch + 1) * heads * length * dim),
        shape: [1, heads, words.length, dim],
        strides: [heads * length * dim, length * dim, dim, 1],
      };
    };
    return { words, q: cut("q"), k: cut("k"), v: cut("v") };
  });
}
