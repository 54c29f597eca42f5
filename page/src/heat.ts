// Heat maps on a canvas: a row a site, a column a look; one pixel a cell, drawn larger.

import { BAD, css, RAMP_256, type Rgb, ZERO } from "./color";
import { h } from "./dom";
import { number } from "./format";

export interface Cells {
  rows: number;
  columns: number;
  at(row: number, column: number): number; // NaN where there is nothing
  rowName(row: number): string;
  columnName(column: number): string;
}

export interface Look {
  isLog: boolean;
  height: number; // of a row, in pixels
  flip?: boolean; // the first row at the bottom
  pick?(row: number, column: number): void;
  brush?(from: number, to: number): void; // columns
  lines?: { row: number; label: string }[]; // at the lower edge of a row
}

export interface Range {
  low: number;
  high: number;
  hasZero: boolean;
  hasBad: boolean;
}

/** The range of the finite values; of a logarithmic one only those above zero. */
export function rangeOf(cells: Cells, isLog: boolean): Range {
  const range: Range = { low: Infinity, high: -Infinity, hasZero: false, hasBad: false };
  for (let row = 0; row < cells.rows; row++) {
    for (let column = 0; column < cells.columns; column++) {
      const value = cells.at(row, column);
      if (Number.isNaN(value)) continue;
      if (!Number.isFinite(value)) range.hasBad = true;
      else if (isLog && value <= 0) range.hasZero = true;
      else {
        if (value < range.low) range.low = value;
        if (value > range.high) range.high = value;
      }
    }
  }
  return range;
}

/** Place in the ramp, 0 to 255; -1: nothing there, -2: zero on a logarithmic scale, -3: not finite. */
export function shade(value: number, range: Range, isLog: boolean): number {
  if (Number.isNaN(value)) return -1;
  if (!Number.isFinite(value)) return -3;
  if (isLog && value <= 0) return -2;
  if (!(range.high > range.low)) return 140;
  const share = isLog
    ? Math.log(value / range.low) / Math.log(range.high / range.low)
    : (value - range.low) / (range.high - range.low);
  return Math.round(255 * share);
}

function image(cells: Cells, range: Range, look: Look): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = cells.columns;
  canvas.height = cells.rows;
  const context = canvas.getContext("2d")!;
  const data = context.createImageData(cells.columns, cells.rows);
  for (let row = 0; row < cells.rows; row++) {
    const line = look.flip ? cells.rows - 1 - row : row;
    for (let column = 0; column < cells.columns; column++) {
      const place = shade(cells.at(row, column), range, look.isLog);
      if (place === -1) continue;
      const color: Rgb = place === -3 ? BAD : place === -2 ? ZERO : RAMP_256[place]!;
      data.data.set([...color, 255], 4 * (line * cells.columns + column));
    }
  }
  context.putImageData(data, 0, 0);
  return canvas;
}

/** The map, what is under the pointer, and a scale. Rows are drawn only where they can be seen. */
export function heat(cells: Cells, look: Look): HTMLElement {
  if (!cells.rows || !cells.columns) return h("p", { class: "quiet" }, "nothing to draw");
  const range = rangeOf(cells, look.isLog);
  const drawn = image(cells, range, look);
  const told = h("div", { class: "told", role: "status" }, " ");
  const canvas = h("canvas", { class: "map", tabindex: 0, label: "heat map; arrow keys move, Enter opens" });
  const height = cells.rows * look.height;
  canvas.style.height = `${height}px`;
  const every = Math.ceil(14 / look.height); // rows to a name, where rows are lower than letters
  const named = look.flip ? [] : Array.from({ length: Math.ceil(cells.rows / every) }, (_, at) => cells.rowName(at * every));
  const names = named.length > 0 && h("div", { class: "row-names" }, ...named.map((name) => h("div", { title: name }, name)));
  if (names) for (const one of names.children) (one as HTMLElement).style.height = `${look.height * every}px`;
  const box = h("div", { class: "map-box" }, names, canvas);
  const ends = h("div", { class: "ends quiet" }, h("span", {}, cells.columnName(0)), h("span", {}, cells.columnName(cells.columns - 1)));
  let spot: [number, number] | null = null;
  let from: number | null = null;

  const paint = () => {
    const width = Math.max(1, Math.round(canvas.clientWidth));
    const most = 8192; // pixels that a canvas may be high
    if (canvas.width !== width) canvas.width = width;
    const tall = Math.min(height, most);
    if (canvas.height !== tall) canvas.height = tall;
    const context = canvas.getContext("2d")!;
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, width, tall);
    context.drawImage(drawn, 0, 0, width, tall);
    const style = getComputedStyle(canvas);
    context.font = "11px system-ui, sans-serif";
    for (const line of look.lines ?? []) {
      const y = Math.round(tall - (line.row * tall) / cells.rows) + 0.5;
      context.strokeStyle = context.fillStyle = style.color;
      context.setLineDash([4, 4]);
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width, y);
      context.stroke();
      context.fillText(line.label, 4, y - 3);
    }
    context.setLineDash([]);
    if (from !== null && spot !== null) {
      const [low, high] = [Math.min(from, spot[1]), Math.max(from, spot[1]) + 1];
      context.fillStyle = "rgba(120,160,255,.35)";
      context.fillRect((low * width) / cells.columns, 0, ((high - low) * width) / cells.columns, tall);
    } else if (spot !== null) {
      const line = look.flip ? cells.rows - 1 - spot[0] : spot[0];
      context.strokeStyle = style.color;
      context.strokeRect((spot[1] * width) / cells.columns, (line * tall) / cells.rows, width / cells.columns, tall / cells.rows);
    }
  };
  const tell = () => {
    if (spot === null) return;
    const value = cells.at(spot[0], spot[1]);
    const text = Number.isNaN(value) ? "not looked at" : number(value);
    told.textContent = `${cells.rowName(spot[0])} · ${cells.columnName(spot[1])} · ${text}`;
    paint();
  };
  const where = (event: MouseEvent): [number, number] => {
    const bounds = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - bounds.left) / bounds.width) * cells.columns);
    const line = Math.floor(((event.clientY - bounds.top) / bounds.height) * cells.rows);
    const row = look.flip ? cells.rows - 1 - line : line;
    return [Math.min(cells.rows - 1, Math.max(0, row)), Math.min(cells.columns - 1, Math.max(0, column))];
  };
  canvas.addEventListener("mousemove", (event) => {
    spot = where(event);
    tell();
  });
  canvas.addEventListener("mousedown", (event) => {
    from = look.brush ? where(event)[1] : null;
  });
  canvas.addEventListener("mouseup", (event) => {
    const [row, column] = where(event);
    if (from !== null && Math.abs(column - from) > 1) look.brush!(Math.min(from, column), Math.max(from, column));
    else look.pick?.(row, column);
    from = null;
  });
  canvas.addEventListener("mouseleave", () => {
    from = null;
    paint();
  });
  canvas.addEventListener("keydown", (event) => {
    const move: Record<string, [number, number]> = { ArrowUp: [look.flip ? 1 : -1, 0], ArrowDown: [look.flip ? -1 : 1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const by = move[event.key];
    if (event.key === "Enter" && spot) look.pick?.(...spot);
    if (!by) return;
    event.preventDefault();
    const [row, column] = spot ?? [0, 0];
    spot = [Math.min(cells.rows - 1, Math.max(0, row + by[0])), Math.min(cells.columns - 1, Math.max(0, column + by[1]))];
    tell();
  });
  new ResizeObserver(paint).observe(canvas);
  return h("div", { class: "heat" }, scale(range, look.isLog), told, box, ends);
}

/** What the colours mean. */
function scale(range: Range, isLog: boolean): HTMLElement {
  const bar = h("canvas", { class: "ramp" });
  bar.width = 256;
  bar.height = 1;
  const context = bar.getContext("2d")!;
  RAMP_256.forEach((color, at) => {
    context.fillStyle = css(color);
    context.fillRect(at, 0, 1, 1);
  });
  const patch = (color: Rgb, text: string) => {
    const one = h("span", { class: "patch" });
    one.style.backgroundColor = css(color);
    return h("span", { class: "key" }, one, text);
  };
  const known = range.high >= range.low;
  return h(
    "div",
    { class: "scale" },
    known && number(range.low),
    known && bar,
    known && number(range.high),
    known && isLog && h("span", { class: "quiet" }, "logarithmic"),
    range.hasZero && patch(ZERO, isLog ? "zero or below" : "zero"),
    range.hasBad && patch(BAD, "not finite"),
  );
}
