// Curves, by uPlot: one x, several y; holes where there is no value; marks at what happened.

import uPlot from "uplot";
import { LINES } from "./color";
import { h, whenSeen } from "./dom";
import { number } from "./format";
import { type Kept, keep } from "./kept";

export interface Curve {
  name: string;
  values: ArrayLike<number | null>;
  low?: ArrayLike<number | null>; // the lowest of each bucket, where x is in buckets
  color?: string;
  isDashed?: boolean;
  isFaint?: boolean; // what a smoothed curve was made of
  isSparse?: boolean; // dots, each joined to the next: an evaluation now and then
}

/** Something that happened at a step. */
export interface Mark {
  x: number;
  label: string; // a word or two
  text: string; // a sentence
  level: "error" | "warning" | "info" | "quiet";
  isSmall?: boolean; // a sign at the lower edge, without a line
}

export interface Chart {
  title: string; // what assistive technology calls it
  x: ArrayLike<number>;
  curves: Curve[];
  isLog: boolean;
  height?: number;
  xName: string;
  xText?(value: number): string;
  bands?: { from: number; to: number; label: string }[];
  marks?: Mark[];
  pick?(at: number): void;
  range?: [number, number] | null; // of x that is shown; null: all of it
  zoom?(range: [number, number] | null): void; // somebody has chosen another range
}

/**
 * From where to where the axis of some values goes: a little beyond them, and not into the last digits of numbers that
 * are all alike, where a gradient norm that is clipped at every step would seem to rise.
 */
export function reach(low: number | null, high: number | null): [number | null, number | null] {
  if (low === null || high === null) return [low, high];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const least = 1e-3 * size;
  if (high - low <= least) return size > 0 ? [low - 0.05 * size, high + 0.05 * size] : [-1, 1];
  return uPlot.rangeNum(low, high, 0.1, true) as [number, number];
}

/**
 * What can be drawn: gaps (null) at what is not finite, or not above zero on a logarithmic axis; over missing values the
 * line goes on, but for pauses.
 */
export function drawable(values: ArrayLike<number | null>, isLog: boolean): (number | null | undefined)[] {
  return Array.from(values, (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return undefined;
    return !Number.isFinite(value) || (isLog && value <= 0) ? null : value;
  });
}

/** Where nothing was looked at for more than three times as long as around it: the places before and after. */
export function pauses(values: ArrayLike<number | null | undefined>, x: ArrayLike<number>): [number, number][] {
  const there = Array.from(values, (_, at) => at).filter((at) => values[at] !== undefined);
  const far = (at: number) => (at < 1 || at >= there.length ? 0 : x[there[at]!]! - x[there[at - 1]!]!);
  const isPause = (at: number) => Math.max(far(at - 1), far(at + 1)) > 0 && far(at) > 3 * Math.max(far(at - 1), far(at + 1));
  return there.flatMap((place, at): [number, number][] => (at > 0 && isPause(at) ? [[there[at - 1]!, place]] : []));
}

/** The gaps of a curve in pixels, as uPlot asks for them: at null, and in pauses. */
function withPauses(plot: uPlot, series: number, _first: number, _last: number, known: uPlot.Series.Gaps): uPlot.Series.Gaps {
  const x = plot.data[0];
  const drawn = pauses(plot.data[series]!, x).map(([before, after]): [number, number] => [Math.round(plot.valToPos(x[before]!, "x", true)), Math.round(plot.valToPos(x[after]!, "x", true))]);
  return [...known, ...drawn].sort((one, other) => one[0] - other[0]);
}

/** An exponential mean of what is finite, without the pull of its beginning (as Adam corrects its moments). */
export function smoothed(values: ArrayLike<number | null>, weight: number): (number | null)[] {
  let [mean, sum] = [0, 0];
  return Array.from(values, (value) => {
    if (value === null || !Number.isFinite(value)) return value;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}

/** A chart in a view: it stays when the view is drawn again, and takes the new numbers. */
export function chart(given: Chart): HTMLElement {
  return keep(`chart ${given.title}`, given, (first) => new LineChart(first));
}

/** What a plot is made for: with another of these it is made anew. */
function kindOf({ curves, isLog, height }: Chart): string {
  return JSON.stringify([isLog, height, curves.map((one) => [one.name, one.color, Boolean(one.low), one.isDashed, one.isFaint, one.isSparse])]);
}

class LineChart implements Kept<Chart> {
  element: HTMLElement;
  private legend = h("div", { class: "legend" });
  private body = h("div", { class: "plot", tabindex: 0 });
  private plot: uPlot | null = null;
  private isDrawn = false; // it has come into sight
  private endWaiting: () => void;
  private sizes: ResizeObserver;

  constructor(private given: Chart) {
    const numbers = h("details", { class: "numbers" }, h("summary", {}, "show as a table"));
    numbers.addEventListener("toggle", () => numbers.replaceChildren(numbers.firstElementChild!, ...(numbers.open ? [this.table()] : [])));
    this.element = h("figure", { class: "chart", role: "group", label: given.title }, this.legend, this.body, numbers);
    this.body.style.minHeight = `${this.height}px`;
    this.body.setAttribute("role", "img");
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    this.tell(null);
    this.endWaiting = whenSeen(this.element, () => this.draw(), "300px");
    this.sizes = new ResizeObserver(() => {
      const width = Math.max(200, this.body.clientWidth);
      if (this.plot && this.element.isConnected && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    });
    this.sizes.observe(this.body);
  }

  update(given: Chart): void {
    const isSame = sameRange(given.range, this.given.range);
    const isOther = kindOf(given) !== kindOf(this.given);
    this.given = given;
    this.describe();
    if (!this.plot || isOther) {
      const wasDrawn = this.isDrawn;
      this.plot?.destroy();
      this.plot = null;
      this.tell(null);
      if (wasDrawn) this.draw();
      return;
    }
    this.plot.setData(this.data(), false);
    if (!isSame || !given.range) this.range();
    else this.plot.redraw(true, true); // y may have grown
    this.tell(this.plot.cursor.idx ?? null);
  }

  close(): void {
    this.endWaiting();
    this.sizes.disconnect();
    this.plot?.destroy();
  }

  private get height(): number {
    return this.given.height ?? 240;
  }

  private get isEmpty(): boolean {
    return this.given.curves.every((curve) => drawable(curve.values, this.given.isLog).every((value) => value === null || value === undefined));
  }

  private data(): uPlot.AlignedData {
    const { curves, isLog, x } = this.given;
    const rows = curves.flatMap((curve) => [drawable(curve.values, isLog), ...(curve.low ? [drawable(curve.low, isLog)] : [])]);
    return [Array.from(x), ...rows] as uPlot.AlignedData;
  }

  private draw(): void {
    this.describe();
    this.isDrawn = true;
    this.body.replaceChildren();
    try {
      this.body.style.minHeight = this.isEmpty ? "0" : `${this.height}px`;
      if (this.isEmpty) this.body.replaceChildren(h("p", { class: "quiet" }, "nothing to draw: every value is NaN, infinite, or missing"));
      else this.plot = this.made();
    } catch (error) {
      this.body.replaceChildren(h("p", { class: "quiet" }, `this curve cannot be drawn: ${String(error)}`));
    }
    this.range();
  }

  /** What the picture shows, in words. */
  private describe(): void {
    const told = this.given.curves.map((curve) => {
      const known = Array.from(curve.values).filter((value): value is number => value !== null && value !== undefined && !Number.isNaN(value));
      return known.length ? `${curve.name}: ${number(known[0])} to ${number(known[known.length - 1])}, ${known.length} values` : `${curve.name}: no value`;
    });
    this.body.setAttribute("aria-label", `${this.given.title}; ${told.slice(0, 8).join("; ")}. Arrow keys move the cursor, plus and minus zoom${this.given.pick ? ", Enter opens" : ""}.`);
  }

  private made(): uPlot {
    const { given } = this;
    const isWhole = Array.from(given.x).every(Number.isInteger); // steps: there is none in between
    const style = getComputedStyle(document.documentElement);
    const [ink, line] = [style.getPropertyValue("--quiet").trim(), style.getPropertyValue("--line").trim()];
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    given.curves.forEach((curve, at) => {
      const color = curve.color ?? LINES[at % LINES.length]!;
      const known = Array.from(curve.values).filter((value) => value !== null && value !== undefined && !Number.isNaN(value)).length;
      series.push({
        stroke: curve.isFaint ? `${color}55` : color, width: curve.isFaint ? 1 : 1.5, points: { show: curve.isSparse || known < 150, size: curve.isSparse ? 6 : 4 },
        ...(curve.isDashed ? { dash: [5, 4] } : {}), ...(curve.isSparse ? { paths: () => null } : { gaps: withPauses }),
      });
      if (!curve.low) return;
      series.push({ stroke: color, width: 0.5, points: { show: false }, gaps: withPauses });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${color}33` });
    });
    const plot = new uPlot(
      {
        width: Math.max(200, this.body.clientWidth),
        height: this.height,
        legend: { show: false },
        cursor: { points: { size: 6 }, drag: { x: true, y: false, setScale: false }, ...(given.zoom ? { sync: { key: "steps", scales: ["x", null] } } : {}) },
        scales: { x: { time: false }, y: given.isLog ? { distr: 3, range: (_: uPlot, low: number | null, high: number | null) => decadesAround(low, high) } : { range: (_: uPlot, low: number | null, high: number | null) => reach(low, high) } },
        axes: [
          { ...axis, ...(given.xText ? { values: (_: uPlot, splits: number[]) => splits.map((x) => (Number.isInteger(x) && x >= 0 && x < given.x.length ? tickName(given.xText!(x), given.x.length) : "")) } : { values: (_: uPlot, splits: number[]) => splits.map((x) => (isWhole && !Number.isInteger(x) ? "" : number(x))) }) },
          { ...axis, ...(given.isLog ? { grid: { ...axis.grid, filter: decades }, ticks: { ...axis.ticks, filter: decades }, splits: (_: uPlot, __: number, low: number, high: number) => logSplits(low, high), filter: (_: uPlot, splits: number[]) => splits } : {}), size: 64, values: (_: uPlot, splits: number[]) => splits.map((value) => (value === null ? "" : number(value))) },
        ],
        series,
        bands,
        hooks: {
          setCursor: [(self) => this.tell(self.cursor.idx ?? null)],
          setSelect: [(self) => this.select(self)],
          drawClear: [(self) => (this.given.bands ?? []).forEach((band) => drawBand(self, band))],
          draw: [(self) => drawMarks(self, this.given.marks ?? [], style)],
        },
      },
      this.data(),
      this.body,
    );
    plot.over.addEventListener("click", () => plot.cursor.idx !== null && plot.cursor.idx !== undefined && this.given.pick?.(plot.cursor.idx));
    plot.over.addEventListener("dblclick", () => this.given.zoom?.(null));
    return plot;
  }

  /** Show the range of x that is wanted: of the whole page, or of this chart alone. */
  private range(): void {
    const [first, last] = [this.given.x[0] ?? 0, this.given.x[this.given.x.length - 1] ?? 1];
    const [min, max] = this.given.range ?? [first, last > first ? last : first + 1];
    this.plot?.setScale("x", { min, max });
  }

  private select(plot: uPlot): void {
    const { left, width } = plot.select;
    if (width < 4) return;
    const [min, max] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.show(min, max);
  }

  private show(min: number, max: number): void {
    if (this.given.zoom) this.given.zoom([Math.max(0, Math.floor(min)), Math.ceil(max)]);
    else this.plot?.setScale("x", { min, max });
  }

  private onKey(event: KeyboardEvent): void {
    const { plot } = this;
    if (!plot) return;
    const count = this.given.x.length;
    const at = plot.cursor.idx ?? -1;
    const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -count, End: count }[event.key];
    const { min, max } = plot.scales.x as { min: number; max: number };
    const middle = at >= 0 ? this.given.x[at]! : (min + max) / 2;
    if (move !== undefined) {
      const next = Math.min(count - 1, Math.max(0, at + move));
      plot.setCursor({ left: plot.valToPos(this.given.x[next]!, "x"), top: plot.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "=") this.show(middle - (middle - min) / 2, middle + (max - middle) / 2);
    else if (event.key === "-" || event.key === "0") this.given.zoom ? this.given.zoom(null) : this.range();
    else if (event.key === "Enter" && at >= 0) this.given.pick?.(at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** The legend, with the values under the cursor and what happened there. */
  private tell(at: number | null): void {
    const { given } = this;
    const x = at === null ? null : given.x[at];
    const reach = ((given.x[given.x.length - 1] ?? 0) - (given.x[0] ?? 0)) / 80;
    const near = x === null || x === undefined ? [] : (given.marks ?? []).filter((mark) => Math.abs(mark.x - x) <= reach);
    this.legend.replaceChildren(
      h("span", { class: "quiet" }, x === null || x === undefined ? given.xName : (given.xText ?? ((value: number) => `${given.xName} ${number(value)}`))(x)),
      ...given.curves.filter((one) => !one.isFaint).map((curve) => {
        const place = given.curves.indexOf(curve);
        const [value, low] = at === null ? [null, null] : [curve.values[at], curve.low?.[at]];
        const mark = h("span", { class: curve.isSparse ? "stroke dots" : curve.isDashed ? "stroke dashed" : "stroke" });
        mark.style.color = curve.color ?? LINES[place % LINES.length]!;
        return h("span", { class: "key" }, mark, curve.name, value === null || value === undefined || Number.isNaN(value) ? "" : h("b", {}, ` ${between(low, value)}`));
      }),
      ...near.slice(0, 3).map((mark) => h("span", { class: `state ${mark.level}` }, `step ${mark.x}: ${mark.text}`)),
    );
  }

  private table(): HTMLElement {
    const { x, curves, xName, xText } = this.given;
    const places = Array.from(x, (_, at) => at).filter((at) => curves.some((one) => one.values[at] !== null && !Number.isNaN(one.values[at]!)));
    const every = Math.ceil(places.length / 400);
    const shown = places.filter((_, at) => at % every === 0 || at === places.length - 1);
    return h(
      "div",
      { class: "wide" },
      every > 1 && h("p", { class: "quiet" }, `every ${every}th of ${places.length}`),
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...[xName, ...curves.map((one) => one.name)].map((text) => h("th", { class: "number" }, text)))),
        h("tbody", {}, ...shown.map((at) => h("tr", {}, h("td", { class: "number" }, xText ? xText(x[at]!) : number(x[at])), ...curves.map((one) => h("td", { class: "number" }, between(one.low?.[at], one.values[at])))))),
      ),
    );
  }
}

/** From which power of ten to which a logarithmic axis goes; of what float64 holds. */
export function decadesAround(low: number | null, high: number | null): [number | null, number | null] {
  if (low === null || high === null || !(low > 0)) return [low, high];
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  return [power(Math.max(from, -323)), power(from < to ? to : to + 1)];
}

/** Ticks of a logarithmic axis: powers of ten, some of them where there are many, and what lies between where few are. */
export function logSplits(low: number, high: number): number[] {
  const [from, to] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  if (!(to - from < 700)) return [];
  const every = Math.max(1, Math.ceil((to - from) / 8));
  const powers = Array.from({ length: Math.max(0, to - from + 1) }, (_, at) => from + at).filter((one) => (one - from) % every === 0);
  if (powers.length > 2) return powers.map(power);
  return Array.from({ length: to - from + 3 }, (_, at) => from - 1 + at).flatMap((one) => [1, 2, 5].map((digit) => digit * power(one))).filter((one) => low <= one && one <= high);
}

/** A power of ten, as it is written. */
function power(exponent: number): number {
  return Number(`1e${exponent}`);
}

/** The name of a place on the axis: its end, where there is room for a few; else nothing but a tick. */
function tickName(name: string, count: number): string {
  const short = name.replace(/:[a-z_]+$/, "").split(".").slice(-2).join(".") || name;
  return count > 12 ? "" : short.length > 12 ? `…${short.slice(-11)}` : short;
}

/** A number, or the lowest and the highest of a bucket of several. */
function between(low: number | null | undefined, high: number | null | undefined): string {
  const isOne = low === null || low === undefined || Number.isNaN(low) || low === high;
  return isOne ? number(high) : `${number(low)} to ${number(high)}`;
}

function sameRange(one: Chart["range"], other: Chart["range"]): boolean {
  return one === other || (!!one && !!other && one[0] === other[0] && one[1] === other[1]);
}

/** Only powers of ten get a line of the grid, where there are several. */
function decades(_: uPlot, splits: number[]): (number | null)[] {
  const isDecade = (value: number) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
  return splits.filter(isDecade).length < 2 ? splits : splits.map((value) => (isDecade(value) ? value : null));
}

/** Marks with their labels, which make way for each other. */
function drawMarks(plot: uPlot, marks: Mark[], style: CSSStyleDeclaration): void {
  const rows: number[] = []; // where the last label of each row ends
  for (const mark of [...marks].sort((one, other) => one.x - other.x)) {
    const x = plot.valToPos(mark.x, "x", true);
    plot.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    const size = plot.ctx.measureText(mark.label).width + 16 * devicePixelRatio;
    const isRight = x > plot.bbox.left + 0.7 * plot.bbox.width;
    const [begin, end] = isRight ? [x - size, x] : [x, x + size];
    let row = rows.findIndex((last) => last <= begin);
    if (row < 0) row = rows.length;
    if (mark.level !== "quiet") rows[row] = end;
    drawMark(plot, mark, style, Math.min(row, 5), isRight);
  }
}

/** A line over the height of the chart, and a sign at its top. */
function drawMark(plot: uPlot, mark: Mark, style: CSSStyleDeclaration, row: number, isRight: boolean): void {
  const x = plot.valToPos(mark.x, "x", true);
  const { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  const { ctx } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = style.getPropertyValue(`--${mark.level === "info" ? "accent" : mark.level}`).trim();
  ctx.lineWidth = devicePixelRatio;
  const size = 4 * devicePixelRatio;
  if (mark.isSmall) {
    ctx.beginPath();
    ctx.moveTo(x - size, top + height);
    ctx.lineTo(x + size, top + height);
    ctx.lineTo(x, top + height - 1.5 * size);
    ctx.fill();
    ctx.restore();
    return;
  }
  ctx.globalAlpha = mark.level === "quiet" ? 0.5 : 0.85;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, top);
  ctx.lineTo(x, top + height);
  ctx.stroke();
  ctx.globalAlpha = 1;
  ctx.beginPath();
  ctx.moveTo(x - size, top);
  ctx.lineTo(x + size, top);
  ctx.lineTo(x, top + 1.5 * size);
  ctx.fill();
  if (mark.level !== "quiet") {
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = isRight ? "right" : "left";
    ctx.fillText(mark.label, x + (isRight ? -1.5 : 1.5) * size, top + (2.5 + 3.2 * row) * size);
  }
  ctx.restore();
}

function drawBand(plot: uPlot, band: { from: number; to: number; label: string }): void {
  const [top, bottom] = [plot.valToPos(band.to, "y", true), plot.valToPos(band.from, "y", true)];
  const low = Math.min(bottom, plot.bbox.top + plot.bbox.height);
  const high = Math.max(top, plot.bbox.top);
  if (!(low > high)) return;
  plot.ctx.save();
  plot.ctx.fillStyle = "rgba(60,180,110,.12)";
  plot.ctx.fillRect(plot.bbox.left, high, plot.bbox.width, low - high);
  plot.ctx.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--fine").trim();
  plot.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  plot.ctx.textBaseline = "top";
  plot.ctx.fillText(band.label, plot.bbox.left + 6, high + 6);
  plot.ctx.restore();
}
