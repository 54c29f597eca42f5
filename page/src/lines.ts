// Curves, by uPlot: one x, several y; holes where there is no value.

import uPlot from "uplot";
import { LINES } from "./color";
import { h } from "./dom";
import { number } from "./format";

export interface Curve {
  name: string;
  values: ArrayLike<number | null>;
  low?: ArrayLike<number | null>; // the lowest of each bucket, where x is in buckets
  color?: string;
  isDashed?: boolean;
}

export interface Chart {
  x: ArrayLike<number>;
  curves: Curve[];
  isLog: boolean;
  height?: number;
  xName: string;
  xText?(value: number): string;
  bands?: { from: number; to: number; label: string }[];
  pick?(at: number): void;
}

/** What can be drawn: gaps (null) at what is not finite, or not above zero on a logarithmic axis; over what is missing the line goes on. */
export function drawable(values: ArrayLike<number | null>, isLog: boolean): (number | null | undefined)[] {
  return Array.from(values, (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return undefined;
    return !Number.isFinite(value) || (isLog && value <= 0) ? null : value;
  });
}

/** Steps at which a curve has a value that is not finite. */
export function badAt(values: ArrayLike<number | null>): number[] {
  return Array.from(values, (value, at) => (value === Infinity || value === -Infinity ? at : -1)).filter((at) => at >= 0);
}

const live = new Set<{ plot: uPlot; box: HTMLElement }>();

/** Forget the charts of the view before: their canvases are gone. */
export function clearCharts(): void {
  for (const { plot } of live) plot.destroy();
  live.clear();
}

export function chart(given: Chart): HTMLElement {
  const legend = h("div", { class: "legend" });
  const box = h("div", { class: "chart" }, legend);
  const rows: (number | null | undefined)[][] = [];
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const isEmpty = given.curves.every((curve) => drawable(curve.values, given.isLog).every((value) => value === null || value === undefined));
  given.curves.forEach((curve, at) => {
    const color = curve.color ?? LINES[at % LINES.length]!;
    const few = curve.values.length < 60;
    rows.push(drawable(curve.values, given.isLog));
    series.push({ stroke: color, width: 1.5, points: { show: few, size: 4 }, ...(curve.isDashed ? { dash: [5, 4] } : {}) });
    if (curve.low) {
      rows.push(drawable(curve.low, given.isLog));
      series.push({ stroke: color, width: 0.5, points: { show: false } });
      bands.push({ series: [rows.length - 1, rows.length], fill: `${color}33` });
    }
  });
  const tell = (at: number | null) => {
    legend.replaceChildren(
      h("span", { class: "quiet" }, at === null ? given.xName : (given.xText ?? ((x) => `${given.xName} ${x}`))(given.x[at]!)),
      ...given.curves.map((curve, place) => {
        const value = at === null ? null : curve.values[at];
        const mark = h("span", { class: "patch" });
        mark.style.backgroundColor = curve.color ?? LINES[place % LINES.length]!;
        return h("span", { class: "key" }, mark, curve.name, value === null || value === undefined ? "" : ` ${number(value)}`);
      }),
    );
  };
  tell(null);
  if (isEmpty) {
    box.append(h("p", { class: "quiet" }, "no value that can be drawn"));
    return box;
  }
  box.style.minHeight = `${given.height ?? 240}px`;
  const seen = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      try {
        plotInto();
      } catch (error) {
        box.append(h("p", { class: "quiet" }, `this curve cannot be drawn: ${String(error)}`));
      }
    },
    { rootMargin: "300px" }, // before it comes into sight
  );
  seen.observe(box);
  const plotInto = () => {
    const style = getComputedStyle(document.documentElement);
    const [ink, line] = [style.getPropertyValue("--quiet").trim(), style.getPropertyValue("--line").trim()];
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot(
      {
        width: Math.max(200, box.clientWidth),
        height: given.height ?? 240,
        legend: { show: false },
        cursor: { points: { size: 6 }, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: given.isLog ? { distr: 3 } : {} },
        axes: [
          { ...axis, ...(given.xText ? { values: (_: uPlot, splits: number[]) => splits.map((x) => (Number.isInteger(x) ? String(x) : "")) } : {}) },
          { ...axis, ...(given.isLog ? { grid: { ...axis.grid, filter: decades }, ticks: { ...axis.ticks, filter: decades } } : {}), size: 64, values: (_: uPlot, splits: number[]) => splits.map((value) => (value === null ? "" : number(value))) },
        ],
        series,
        bands,
        hooks: {
          setCursor: [(self) => tell(self.cursor.idx ?? null)],
          drawClear: [(self) => (given.bands ?? []).forEach((band) => drawBand(self, band))],
        },
      },
      [Array.from(given.x), ...rows] as uPlot.AlignedData,
      box,
    );
    live.add({ plot, box });
    if (given.pick) plot.over.addEventListener("click", () => plot.cursor.idx !== null && plot.cursor.idx !== undefined && given.pick!(plot.cursor.idx));
    new ResizeObserver(() => {
      const width = Math.max(200, box.clientWidth);
      if (box.isConnected && width !== plot.width) plot.setSize({ width, height: given.height ?? 240 });
    }).observe(box);
  };
  return box;
}

/** Only powers of ten get a line of the grid, where there are several. */
function decades(_: uPlot, splits: number[]): (number | null)[] {
  const isDecade = (value: number) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
  return splits.filter(isDecade).length < 2 ? splits : splits.map((value) => (isDecade(value) ? value : null));
}

function drawBand(plot: uPlot, band: { from: number; to: number; label: string }): void {
  const [top, bottom] = [plot.valToPos(band.to, "y", true), plot.valToPos(band.from, "y", true)];
  const low = Math.min(bottom, plot.bbox.top + plot.bbox.height);
  const high = Math.max(top, plot.bbox.top);
  if (!(low > high)) return;
  plot.ctx.save();
  plot.ctx.fillStyle = "rgba(60,180,110,.12)";
  plot.ctx.fillRect(plot.bbox.left, high, plot.bbox.width, low - high);
  plot.ctx.fillStyle = "rgba(60,160,110,.9)";
  plot.ctx.textBaseline = "top";
  plot.ctx.fillText(band.label, plot.bbox.left + 6, high + 6);
  plot.ctx.restore();
}
