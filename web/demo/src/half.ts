// 16-bit elements as the package takes them: the bits of f16 or bf16 in a Uint16Array.

import type { DType, HostData } from "flexattn";

/** Finite numbers in a dtype, rounded to nearest even; past f16's range they become infinite. */
export function narrowed(values: Float32Array, dtype: DType): HostData {
  if (dtype === "f32") return values;
  const words = new Uint32Array(values.buffer, values.byteOffset, values.length);
  if (dtype === "bf16") return Uint16Array.from(words, (word) => (word + 0x7fff + ((word >>> 16) & 1)) >>> 16);
  return Uint16Array.from(values, (value, at) => {
    const sign = ((words[at] ?? 0) >>> 16) & 0x8000;
    const size = Math.abs(value);
    // The exponent of the last of ten digits; below the smallest normal number it stays where it is.
    const exponent = Math.max(Math.floor(Math.log2(size)), -14);
    // With the leading digit, which so adds 1 to the exponent; what rounds up to the next power carries into it.
    return sign | Math.min(0x7c00, ((exponent + 14) << 10) + even(size * 2 ** (10 - exponent)));
  });
}

/** Elements of a dtype as numbers. */
export function widened(data: HostData, dtype: DType): Float32Array {
  if (data instanceof Float32Array) return data;
  const words = new Uint16Array(data.buffer, data.byteOffset, data.byteLength / 2);
  if (dtype === "bf16") return new Float32Array(Uint32Array.from(words, (word) => word << 16).buffer);
  return Float32Array.from(words, (word) => {
    const [exponent, digits] = [(word >> 10) & 31, word & 1023];
    const size = exponent === 0 ? digits * 2 ** -24 : exponent < 31 ? (1024 + digits) * 2 ** (exponent - 25) : digits === 0 ? Infinity : Number.NaN;
    return word & 0x8000 ? -size : size;
  });
}

/** The nearest whole number, of two the even one. */
function even(value: number): number {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}
