// Canvases at the screen's own resolution, in the page's colours.

export interface Surface {
  context: CanvasRenderingContext2D;
  /** Side lengths in CSS pixels. */
  width: number;
  height: number;
}

/** The canvas, cleared and scaled so that one unit is one CSS pixel. */
export function surface(canvas: HTMLCanvasElement): Surface | null {
  const { width, height } = canvas.getBoundingClientRect();
  const context = canvas.getContext("2d");
  if (context === null || width === 0) return null;
  const density = Math.min(window.devicePixelRatio || 1, 3);
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  context.setTransform(density, 0, 0, density, 0, 0);
  context.imageSmoothingEnabled = false;
  return { context, width, height };
}

/** A colour of the page's theme, as the canvas wants it. */
export function colour(name: "ground" | "ink" | "muted" | "line" | "full" | "partial" | "partial-soft" | "empty" | "raised"): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Red, green, blue of a `#rrggbb` colour. */
export function channels(hex: string): [number, number, number] {
  const value = Number.parseInt(hex.slice(1), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}

/** An offscreen picture of `width` x `height` pixels whose colours come from `at`. */
export function bitmap(width: number, height: number, at: (x: number, y: number) => readonly [number, number, number, number?]): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  if (context === null) return canvas;
  const image = context.createImageData(width, height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const [red, green, blue, alpha = 255] = at(x, y);
      image.data.set([red, green, blue, alpha], 4 * (y * width + x));
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
