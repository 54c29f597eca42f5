// Heat maps on a canvas: a row a site, a column a look; one pixel a cell, drawn larger.

import { BAD, css, RAMP_256, type Rgb, ZERO } from "./color";
import { h } from "./dom";
import { number } from "./format";
import { type Kept, keep } from "./kept";

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
  spans?: { domain: [number, number]; at(column: number): [number, number] }; // where columns are in time
  pick?(row: number, column: number): void;
  brush?(from: number, to: number): void; // in the unit of time
  fold?(row: number): void; // the name of a row was chosen
  isFolded?(row: number): boolean;
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

/** A map in a view: it stays when the view is drawn again, with what is scrolled and pointed at. */
export function heat(name: string, cells: Cells, look: Look): HTMLElement {
  if (!cells.rows || !cells.columns) return h("p", { class: "quiet" }, "nothing to draw");
  return keep(`map ${name}`, { name, cells, look }, (given) => new HeatMap(given));
}

interface Given {
  name: string;
  cells: Cells;
  look: Look;
}

const MOST_HIGH = 8192; // pixels that a canvas may be high

class HeatMap implements Kept<Given> {
  element = h("div", { class: "heat" });
  private told = h("div", { class: "told", role: "status" });
  private canvas = h("canvas", { class: "map", tabindex: 0 });
  private axis = h("canvas", { class: "axis" });
  private drawn!: HTMLCanvasElement; // a pixel a cell
  private base = document.createElement("canvas"); // the same as it is shown
  private spot: [number, number] | null = null; // row and column under the pointer
  private from: number | null = null; // where in time a drag began
  private now = 0; // where it is
  private sizes = new ResizeObserver(() => this.render());

  constructor(private given: Given) {
    const { canvas } = this;
    this.told.textContent = "\u00a0";
    canvas.setAttribute("role", "application");
    canvas.addEventListener("mousemove", (event) => this.moved(event));
    canvas.addEventListener("mousedown", (event) => (this.from = this.given.look.brush && event.button === 0 ? this.timeAt(event) : null));
    canvas.addEventListener("mouseup", (event) => this.released(event));
    canvas.addEventListener("mouseleave", () => {
      this.from = null;
      this.paint();
    });
    canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.update(given);
    this.sizes.observe(canvas);
  }

  update(given: Given): void {
    this.given = given;
    const { cells, look, name } = given;
    const range = rangeOf(cells, look.isLog);
    this.drawn = image(cells, range, look);
    this.canvas.setAttribute("aria-label", `${name}: heat map of ${cells.rows} rows and ${cells.columns} columns, ${number(range.low)} to ${number(range.high)}; arrow keys move, Enter opens`);
    this.canvas.style.height = `${cells.rows * look.height}px`;
    const box = h("div", { class: "map-box", scroll: `map ${name}` }, this.names(), this.canvas);
    const scrolled = this.element.querySelector(".map-box")?.scrollTop ?? 0;
    this.element.replaceChildren(scale(range, look.isLog), this.told, box, this.axis);
    box.scrollTop = scrolled;
    if (this.spot && (this.spot[0] >= cells.rows || this.spot[1] >= cells.columns)) this.spot = null;
    this.render();
  }

  close(): void {
    this.sizes.disconnect();
  }

  /** The names of rows, as many as there is room for, beside them. */
  private names(): HTMLElement | false {
    const { cells, look } = this.given;
    const every = Math.ceil(13 / look.height);
    const shown = Array.from({ length: Math.ceil(cells.rows / every) }, (_, at) => (look.flip ? cells.rows - 1 - at * every : at * every));
    return h(
      "div",
      { class: "row-names" },
      ...shown.map((row) => {
        const name = look.fold
          ? h("button", { type: "button", class: `link ${look.isFolded?.(row) ? "folded" : ""}`, title: look.isFolded?.(row) ? `open ${cells.rowName(row)}` : cells.rowName(row), on: { click: () => look.fold!(row) } }, cells.rowName(row))
          : h("div", { title: cells.rowName(row) }, cells.rowName(row));
        name.style.height = `${look.height * every}px`;
        return name;
      }),
    );
  }

  private get ends(): [number, number] {
    const { spans } = this.given.look;
    return spans ? spans.domain : [0, this.given.cells.columns];
  }

  /** Where a column begins and ends, in the unit of time. */
  private span(column: number): [number, number] {
    return this.given.look.spans?.at(column) ?? [column, column + 1];
  }

  /** Draw the cells at the size that there is. */
  private render(): void {
    const { cells, look } = this.given;
    const width = Math.max(1, Math.round(this.canvas.clientWidth));
    const tall = Math.min(cells.rows * look.height, MOST_HIGH);
    for (const one of [this.canvas, this.base]) {
      if (one.width !== width) one.width = width;
      if (one.height !== tall) one.height = tall;
    }
    const context = this.base.getContext("2d")!;
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, width, tall);
    const place = this.placed();
    for (let column = 0; column < cells.columns; column++) {
      const [begin, end] = this.span(column).map(place) as [number, number];
      if (end < 0 || begin > width) continue;
      const left = Math.floor(begin);
      context.drawImage(this.drawn, column, 0, 1, cells.rows, left, 0, Math.max(1, Math.ceil(end) - left), tall);
    }
    this.paintAxis(width, getComputedStyle(this.canvas), place);
    this.paint();
  }

  private placed(): (time: number) => number {
    const [low, high] = this.ends;
    return (time) => ((time - low) / (high - low)) * this.canvas.width;
  }

  /** The cells, and what is under the pointer. */
  private paint(): void {
    const { cells, look } = this.given;
    const { canvas } = this;
    const { width, height: tall } = canvas;
    const place = this.placed();
    const context = canvas.getContext("2d")!;
    context.clearRect(0, 0, width, tall);
    context.drawImage(this.base, 0, 0);
    const style = getComputedStyle(canvas);
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = context.fillStyle = style.color;
    for (const line of look.lines ?? []) {
      const y = Math.round(tall - (line.row * tall) / cells.rows) + 0.5;
      context.setLineDash([4, 4]);
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width, y);
      context.stroke();
      context.fillText(line.label, 4, y - 3);
    }
    context.setLineDash([]);
    if (this.from !== null) {
      const [left, right] = [place(Math.min(this.from, this.now)), place(Math.max(this.from, this.now))];
      context.fillStyle = "rgba(120,160,255,.35)";
      context.fillRect(left, 0, right - left, tall);
    } else if (this.spot !== null) {
      const [row, column] = this.spot;
      const line = look.flip ? cells.rows - 1 - row : row;
      const [begin, end] = this.span(column).map(place) as [number, number];
      context.strokeRect(begin, (line * tall) / cells.rows, Math.max(2, end - begin), tall / cells.rows);
    }
  }

  /** Ticks at round steps. */
  private paintAxis(width: number, style: CSSStyleDeclaration, place: (time: number) => number): void {
    const { axis } = this;
    axis.style.width = `${width}px`;
    const ratio = devicePixelRatio || 1;
    axis.width = width * ratio;
    axis.height = 18 * ratio;
    const context = axis.getContext("2d")!;
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = context.strokeStyle = style.color;
    const [low, high] = this.ends;
    const { cells, look } = this.given;
    const told = (time: number) => (look.spans ? number(time) : cells.columnName(Math.min(cells.columns - 1, time)));
    for (const tick of ticks(low, high, Math.max(2, Math.floor(width / 90)))) {
      const x = Math.round(place(tick)) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, 4);
      context.stroke();
      context.textAlign = x < 20 ? "left" : x > width - 20 ? "right" : "center";
      context.fillText(told(tick), x, 15);
    }
  }

  private timeAt(event: MouseEvent): number {
    const bounds = this.canvas.getBoundingClientRect();
    const [low, high] = this.ends;
    return low + ((event.clientX - bounds.left) / bounds.width) * (high - low);
  }

  /** The row and column under the pointer; of columns -1 between two that are far apart. */
  private where(event: MouseEvent): [number, number] {
    const bounds = this.canvas.getBoundingClientRect();
    const { cells, look } = this.given;
    const line = Math.floor(((event.clientY - bounds.top) / bounds.height) * cells.rows);
    const row = Math.min(cells.rows - 1, Math.max(0, look.flip ? cells.rows - 1 - line : line));
    const time = this.timeAt(event);
    for (let column = cells.columns - 1; column >= 0; column--) {
      const [begin, end] = this.span(column);
      if (time >= begin) return [row, time <= end ? column : -1];
    }
    return [row, -1];
  }

  private moved(event: MouseEvent): void {
    this.now = this.timeAt(event);
    const [row, column] = this.where(event);
    this.spot = column < 0 ? null : [row, column];
    if (this.spot) this.tell();
    else {
      this.told.textContent = `${this.given.cells.rowName(row)} · nothing was looked at here`;
      this.paint();
    }
  }

  private tell(): void {
    const [row, column] = this.spot!;
    const { cells } = this.given;
    const value = cells.at(row, column);
    this.told.textContent = `${cells.rowName(row)} · ${cells.columnName(column)} · ${Number.isNaN(value) ? "not looked at" : number(value)}`;
    this.paint();
  }

  private released(event: MouseEvent): void {
    const from = this.from;
    this.from = null;
    const bounds = this.canvas.getBoundingClientRect();
    const [low, high] = this.ends;
    const to = this.timeAt(event);
    if (from !== null && (Math.abs(to - from) / (high - low)) * bounds.width > 5) this.given.look.brush!(Math.min(from, to), Math.max(from, to));
    else {
      const [row, column] = this.where(event);
      this.given.look.pick?.(row, column);
    }
  }

  /** With Ctrl the wheel zooms, with Shift it moves in time; alone it scrolls. */
  private wheeled(event: WheelEvent): void {
    const { brush } = this.given.look;
    if (!brush || !(event.ctrlKey || event.metaKey || event.shiftKey)) return;
    event.preventDefault();
    const [low, high] = this.ends;
    const size = high - low;
    if (event.shiftKey) {
      const by = (size / 10) * Math.sign(event.deltaY || event.deltaX);
      brush(low + by, high + by);
    } else {
      const at = this.timeAt(event);
      const factor = event.deltaY > 0 ? 1.3 : 1 / 1.3;
      brush(at - (at - low) * factor, at + (high - at) * factor);
    }
  }

  private onKey(event: KeyboardEvent): void {
    const { cells, look } = this.given;
    const move: Record<string, [number, number]> = { ArrowUp: [look.flip ? 1 : -1, 0], ArrowDown: [look.flip ? -1 : 1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const by = move[event.key];
    if (event.key === "Enter" && this.spot) look.pick?.(...this.spot);
    const [low, high] = this.ends;
    if ((event.key === "+" || event.key === "-") && look.brush) {
      const middle = this.spot ? this.span(this.spot[1])[0] : (low + high) / 2;
      const size = ((high - low) / 2) * (event.key === "+" ? 0.5 : 2);
      look.brush(middle - size, middle + size);
    }
    if (!by) return;
    event.preventDefault();
    const [row, column] = this.spot ?? [0, 0];
    this.spot = [Math.min(cells.rows - 1, Math.max(0, row + by[0])), Math.min(cells.columns - 1, Math.max(0, column + by[1]))];
    this.tell();
  }
}

/** Round numbers between two, at most so many. */
export function ticks(low: number, high: number, most: number): number[] {
  const size = (high - low) / most;
  if (!(size > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(size));
  const step = Math.max(1, [1, 2, 5, 10].find((one) => one * power >= size)! * power);
  const found: number[] = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

/** How far each column reaches: to the next, but no further than its neighbours do, so that a pause is seen as one. */
export function spansOf(first: number[], last: number[], range?: [number, number] | null): NonNullable<Look["spans"]> {
  const far = (at: number) => (at < 1 || at >= first.length ? 0 : first[at]! - last[at - 1]!);
  const reach = first.map((_, at) => {
    const isLast = at === first.length - 1; // after it nothing is known: it reaches as far as the one before
    const [here, around] = isLast ? [far(at), far(at - 1)] : [far(at + 1), Math.max(far(at), far(at + 2))];
    return last[at]! + Math.max(1, around > 0 && here > 3 * around ? around : here);
  });
  const domain: [number, number] = range ?? [first[0] ?? 0, reach[reach.length - 1] ?? 1];
  return { domain, at: (column) => [first[column]!, reach[column]!] };
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
    range.hasZero && patch(ZERO, "zero"),
    range.hasBad && patch(BAD, "not finite"),
  );
}
