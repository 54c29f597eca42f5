// One run of a model: its calls in the order of execution, as a table that folds and can be put in another order.

import { shadeWith } from "../color";
import { filter, h, select, table } from "../dom";
import { bytes, count, duration, matches, number } from "../format";
import type { Call, Gradient, Trace } from "../types";
import type { Page, View } from "../view";

const isTrace = (page: Page) => page.source.head.trace !== undefined;

export function traceOf(page: Page): Trace {
  return page.source.head.trace!;
}

/** Of each call those directly inside it, in the order of their beginnings; last the outermost. */
export function childrenOf(rows: Pick<Call, "depth">[]): { inside: number[][]; top: number[] } {
  const inside: number[][] = rows.map(() => []);
  const top: number[] = [];
  const open: number[] = [];
  rows.forEach((row, at) => {
    while (open.length && rows[open[open.length - 1]!]!.depth >= row.depth) open.pop();
    (open.length ? inside[open[open.length - 1]!]! : top).push(at);
    open.push(at);
  });
  return { inside, top };
}

/** The time of a call less that of the calls inside it. */
export function ownTime(rows: Call[], inside: number[][], at: number): number {
  return Math.max(0, rows[at]!.time_s - inside[at]!.reduce((sum, one) => sum + rows[one]!.time_s, 0));
}

const COLUMNS = ["call", "class", "input", "output", "parameters", "time", "own time", "FLOPs", "output size", "rms", "mean", "std", "min", "max", "gradient norm", "own gradient at input"];

export const calls: View = {
  key: "calls",
  title: "Execution",
  what: "every call in the order in which it began, with its numbers; folds, and sorts by a click on a head",
  isShown: isTrace,
  draw(page) {
    const trace = traceOf(page);
    const { options } = page.route;
    const words = options.get("filter") ?? "";
    const sort = options.get("sort") ?? "";
    const deepest = Math.max(0, ...trace.rows.map((row) => row.depth));
    const levels = Math.min(deepest, Number(options.get("levels") ?? (trace.rows.length > 400 ? 2 : deepest)));
    const again = (more: Record<string, string | null>) => page.go("calls", { ...Object.fromEntries(options), ...more }, true);
    const { inside } = childrenOf(trace.rows);
    const isFlat = sort !== "" || words !== "";
    const shown = trace.rows.map((row, at) => ({ row, at })).filter(({ row }) => (isFlat || row.depth <= levels) && matches(`${row.site} ${row.cls}`, words));
    const rms = trace.rows.map(rmsOf);
    const sizes = rms.filter((value): value is number => value !== null && value > 0);
    const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
    const pictures = new Set(trace.pictures.map((one) => one.site));
    const used = COLUMNS.map((_, at) => at).filter((at) => at < 14 || trace.has_backward);
    const cells = shown.map(({ row, at }) => {
      const all = [
        nameCell(page, row, at, isFlat, pictures.has(row.site), !isFlat && row.depth === levels ? inside[at]!.length : 0),
        row.cls,
        row.input,
        `${row.output}${row.dtype && row.dtype !== "float32" ? ` ${row.dtype}` : ""}`,
        row.parameters ? count(row.parameters) : "",
        duration(row.time_s),
        duration(ownTime(trace.rows, inside, at)),
        row.flops ? count(row.flops) : "",
        row.memory_bytes ? bytes(row.memory_bytes) : "",
        rmsCell(rms[at]!, low, high),
        ...numbersOf(row),
        ...(trace.has_backward ? [gradient(row.grad_output), gradient(row.grad_input)] : []),
      ];
      return used.map((column) => all[column]!);
    });
    const key = (at: number, column: number): number | string | null => {
      const { row, at: place } = shown[at]!;
      const known = row.statistics;
      return [row.site, row.cls, row.input, row.output, row.parameters, row.time_s, ownTime(trace.rows, inside, place), row.flops, row.memory_bytes, rms[place]!,
        known?.mean ?? null, known?.std ?? null, known?.min ?? null, known?.max ?? null, row.grad_output?.norm ?? null, row.grad_input?.norm ?? null][column]!;
    };
    return h(
      "div",
      {},
      totals(trace),
      h(
        "div",
        { class: "controls" },
        filter("filter calls", words, (value) => again({ filter: value })),
        deepest > 0 && select("levels", Array.from({ length: deepest + 1 }, (_, at): [string, string] => [String(at), at === deepest ? "all" : String(at)]), String(levels), (value) => again({ levels: value })),
        sort && h("button", { type: "button", on: { click: () => again({ sort: null }) } }, `sorted by ${sort.replace(/^-/, "")} ×`),
        h("span", { class: "quiet" }, `${shown.length} of ${trace.rows.length} calls; ▣ has a picture; times are without what measuring took; a click on a head sorts`),
      ),
      table(used.map((at) => COLUMNS[at]!), cells, used.filter((at) => at >= 4), { by: sort, key, again: (by) => again({ sort: by }) }),
      ...endings(trace),
    );
  },
};

function nameCell(page: Page, row: Call, at: number, isFlat: boolean, hasPicture: boolean, hidden: number): HTMLElement {
  const name = h("span", { class: "path" }, h("a", { href: page.link("call", { at }), title: row.site }, !row.path && !row.site.includes("/") ? traceOf(page).model : isFlat ? row.site : lastOf(row)), hasPicture && " ▣", hidden > 0 && h("span", { class: "quiet" }, ` +${hidden}`));
  if (!isFlat) name.style.paddingLeft = `${row.depth}em`;
  return name;
}

function rmsCell(size: number | null, low: number, high: number): HTMLElement | string {
  if (size === null) return "";
  const cell = h("span", { class: "chip" }, number(size));
  if (size > 0 && high > low && Number.isFinite(size)) {
    const share = Math.log(size / low) / Math.log(high / low);
    shadeWith(cell, share);
  }
  return cell;
}

/** What the whole model comes to. */
function totals(trace: Trace): HTMLElement {
  const trained = trace.parameters.filter((one) => one.requires_grad).reduce((sum, one) => sum + one.elements, 0);
  const all = trace.parameters.reduce((sum, one) => sum + one.elements, 0);
  const size = trace.parameters.reduce((sum, one) => sum + one.elements * bytesOf(one.dtype), 0);
  const { inside, top } = childrenOf(trace.rows);
  const leaves = trace.rows.filter((_, at) => !inside[at]!.length);
  const activations = leaves.reduce((sum, row) => sum + row.memory_bytes, 0);
  const sum = (of: (row: Call) => number) => top.reduce((total, at) => total + of(trace.rows[at]!), 0);
  const flops = sum((row) => row.flops);
  const facts: [string, string][] = [
    ["calls", String(trace.rows.length)],
    ["parameters", count(all)],
    ["trained", trained === all ? "all" : count(trained)],
    ["frozen", trained === all ? "" : count(all - trained)],
    ["memory of parameters", bytes(size)],
    ["FLOPs", flops ? count(flops) : ""],
    ["multiply-adds", flops ? count(flops / 2) : ""],
    ["size of outputs, those in place too", bytes(activations)],
    ["time", duration(sum((row) => row.time_s))],
    ["device", trace.device],
  ];
  return h("section", { class: "summary", label: "totals" }, h("dl", {}, ...facts.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))), trace.tokens.length > 0 && h("p", { class: "tokens" }, h("span", { class: "quiet" }, "input "), ...trace.tokens.map((one) => h("span", { class: "token" }, one))));
}

function bytesOf(dtype: string): number {
  const known = /(\d+)/.exec(dtype);
  return dtype === "bool" ? 1 : known ? Number(known[1]) / 8 : 4;
}

export function numbersOf(row: Call): string[] {
  const known = row.statistics;
  if (!known) return ["", "", "", ""];
  const bad = known.nonfinite ? ` (${known.nonfinite} not finite)` : "";
  return [number(known.mean), number(known.std), number(known.min), `${number(known.max)}${bad}`];
}

export function gradient(known: Gradient | null): string {
  if (!known) return "";
  if (known.norm === null) return known.reason ? `None: ${known.reason}` : "not finite";
  return known.norm === 0 ? "zero" : number(known.norm);
}

function endings(trace: Trace): HTMLElement[] {
  const lines = [
    ...(trace.unused_modules.length ? [`Never called: ${trace.unused_modules.join(", ")}`] : []),
    ...(trace.unused_parameters.length ? [`No gradient comes to: ${trace.unused_parameters.join(", ")}`] : []),
    ...trace.notes,
  ];
  return lines.map((line) => h("p", { class: "quiet" }, line));
}

export function rmsOf(row: Call): number | null {
  const known = row.statistics;
  return known && known.mean !== null && known.std !== null ? Math.hypot(known.mean, known.std) : null;
}

function lastOf(row: Call): string {
  const cut = row.site.lastIndexOf(row.site.includes("/") ? "/" : ".");
  return row.site.slice(cut + 1) || row.cls;
}

export const parameters: View = {
  key: "parameters",
  title: "Parameters",
  what: "every parameter and what backward brought it",
  isShown: (page) => isTrace(page) && traceOf(page).parameters.length > 0,
  draw(page) {
    const trace = traceOf(page);
    const { options } = page.route;
    const words = options.get("filter") ?? "";
    const again = (more: Record<string, string>) => page.go("parameters", { ...Object.fromEntries(options), ...more }, true);
    const rows = trace.parameters.filter((one) => matches(one.site, words));
    const head = ["parameter", "shape", "type", "elements", "trained", "gradient norm", "zeros in gradient"];
    const key = (at: number, column: number) => {
      const one = rows[at]!;
      return [one.site, one.shape, one.dtype, one.elements, one.requires_grad ? "yes" : "no", one.grad?.norm ?? null, one.grad?.zeros ?? null][column]!;
    };
    const cells = rows.map((one) => [one.site, one.shape, one.dtype, count(one.elements), one.requires_grad ? "yes" : "no", gradient(one.grad), one.grad?.zeros ? `${Math.round(100 * one.grad.zeros)} %` : ""]);
    return h(
      "div",
      {},
      h("div", { class: "controls" }, filter("filter parameters", words, (value) => again({ filter: value })), h("span", { class: "quiet" }, `${rows.length} of ${trace.parameters.length}`)),
      table(head, cells, [3, 5, 6], { by: options.get("sort") ?? "", key, again: (by) => again({ sort: by }) }),
    );
  },
};
