// Everything that the page shows, as one value, and the address that holds it.

import type { DType } from "flexattn";

/** A mod as the page edits it: the one of the library that it started from, and what was changed. */
export interface ModState {
  /** Name in the library. Edited text still reads the tensors that this one captures. */
  preset: string;
  /** Values of the sliders, by the names of the parameters; the library's own defaults for others. */
  params: Record<string, number>;
  /** The text, once it has been changed by hand; until then it follows preset, parameters and sizes. */
  text: string | null;
}

export interface State {
  mask: ModState;
  score: ModState;
  qLen: number;
  kvLen: number;
  heads: number;
  mapHead: number;
  /** Chosen block: [query block, key block]. */
  block: [number, number];
  sentence: number;
  head: number;
  row: number;
  pass: "forward" | "decode" | "backward";
  headDim: number;
  dtype: DType;
  onlyMine: boolean;
}

export const LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384];
export const HEADS = [1, 2, 4, 8, 12, 16];
export const HEAD_DIMS = [32, 64, 80, 96, 128, 256];
export const DTYPES: readonly DType[] = ["f32", "f16", "bf16"];
export const PASSES = ["forward", "decode", "backward"] as const;

/** The state as text for an address: only what differs from the start, so that short states have short links. */
export function encode(state: State, start: State): string {
  const changed: Partial<Record<keyof State, unknown>> = {};
  for (const key of Object.keys(start) as (keyof State)[]) {
    if (JSON.stringify(state[key]) !== JSON.stringify(start[key])) changed[key] = state[key];
  }
  if (Object.keys(changed).length === 0) return "";
  const bytes = new TextEncoder().encode(JSON.stringify(changed));
  const binary = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** The state that an address holds; anything missing or of the wrong kind keeps its start value. */
export function decode(text: string, start: State): State {
  const state = structuredClone(start);
  if (text === "") return state;
  let read: Record<string, unknown>;
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const value: unknown = JSON.parse(new TextDecoder().decode(Uint8Array.from(binary, (c) => c.charCodeAt(0))));
    if (typeof value !== "object" || value === null) return state;
    read = value as Record<string, unknown>;
  } catch {
    return state;
  }
  for (const which of ["mask", "score"] as const) {
    const mod = read[which];
    if (isMod(mod)) state[which] = { preset: mod.preset, params: { ...mod.params }, text: mod.text?.slice(0, 20_000) ?? null };
  }
  const oneOf = <T>(value: unknown, allowed: readonly T[], otherwise: T): T => (allowed.includes(value as T) ? (value as T) : otherwise);
  const count = (value: unknown, below: number, otherwise: number): number =>
    typeof value === "number" && Number.isInteger(value) && value >= 0 && value < below ? value : otherwise;
  state.qLen = oneOf(read["qLen"], LENGTHS, state.qLen);
  state.kvLen = oneOf(read["kvLen"], LENGTHS, state.kvLen);
  state.heads = oneOf(read["heads"], HEADS, state.heads);
  state.mapHead = count(read["mapHead"], state.heads, 0);
  if (Array.isArray(read["block"])) {
    state.block = [count(read["block"][0], state.qLen / 128, 0), count(read["block"][1], state.kvLen / 128, 0)];
  }
  state.sentence = count(read["sentence"], 4, state.sentence);
  state.head = count(read["head"], 12, state.head);
  state.row = count(read["row"], 24, state.row);
  state.pass = oneOf(read["pass"], PASSES, state.pass);
  state.headDim = oneOf(read["headDim"], HEAD_DIMS, state.headDim);
  state.dtype = oneOf(read["dtype"], DTYPES, state.dtype);
  if (typeof read["onlyMine"] === "boolean") state.onlyMine = read["onlyMine"];
  return state;
}

function isMod(value: unknown): value is ModState {
  if (typeof value !== "object" || value === null) return false;
  const { preset, text, params } = value as Partial<Record<keyof ModState, unknown>>;
  return (
    typeof preset === "string" &&
    (typeof text === "string" || text === null) &&
    typeof params === "object" &&
    params !== null &&
    Object.values(params).every((number) => typeof number === "number" && Number.isFinite(number))
  );
}
