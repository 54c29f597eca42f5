// How wide a text is where it is drawn.

let ruler: CanvasRenderingContext2D | null = null;

/** Pixels; `font`: weight and size, such as "600 12px". */
export function wide(text: string, font: string): number {
  ruler ??= document.createElement("canvas").getContext("2d")!;
  ruler.font = `${font} system-ui, sans-serif`;
  return ruler.measureText(text).width;
}
