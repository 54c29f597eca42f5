// One run of a model: its calls as a table and as a tree, with gradients beside activations.

import { css, ramp } from "../color";
import { copyable, filter, h, table } from "../dom";
import { count, matches, number, python } from "../format";
import type { Call, Gradient, Trace } from "../types";
import type { Page, View } from "../view";
import { cards } from "./pictures";

const isTrace = (page: Page) => page.source.head.trace !== undefined;

export function traceOf(page: Page): Trace {
  return page.source.head.trace!;
}

export const calls: View = {
  key: "calls",
  title: "Execution",
  what: "every call in the order in which it began, with its numbers",
  isShown: isTrace,
  draw(page) {
    const trace = traceOf(page);
    const words = page.route.options.get("filter") ?? "";
    const rows = trace.rows.map((row, at) => ({ row, at })).filter(({ row }) => matches(`${row.site} ${row.cls}`, words));
    const pictures = new Set(trace.pictures.map((one) => one.site));
    const head = ["site", "class", "in", "out", "params", "time", "FLOPs", "memory", "mean", "std", "min", "max", ...(trace.has_backward ? ["grad of output", "own grad of input"] : [])];
    const cells = rows.map(({ row, at }) => [
      h("a", { href: page.link("call", { at }) }, `${row.site}${pictures.has(row.site) ? " ▣" : ""}`),
      row.cls,
      row.input,
      `${row.output}${row.dtype && row.dtype !== "float32" ? ` ${row.dtype}` : ""}`,
      row.parameters ? count(row.parameters) : "",
      milliseconds(row.time_s),
      row.flops ? count(row.flops) : "",
      row.memory_bytes ? bytes(row.memory_bytes) : "",
      ...numbersOf(row),
      ...(trace.has_backward ? [gradient(row.grad_output), gradient(row.grad_input)] : []),
    ]);
    return h(
      "div",
      {},
      h("div", { class: "controls" }, filter("filter calls", words, (value) => page.go("calls", { filter: value }, true)), h("span", { class: "quiet" }, `${rows.length} calls of ${trace.model} on ${trace.device}; ▣ has a picture`)),
      table(head, cells, [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
      ...endings(trace),
    );
  },
};

function numbersOf(row: Call): string[] {
  const known = row.statistics;
  if (!known) return ["", "", "", ""];
  const bad = known.nonfinite ? ` (${known.nonfinite} not finite)` : "";
  return [number(known.mean), number(known.std), number(known.min), `${number(known.max)}${bad}`];
}

export function gradient(known: Gradient | null): string {
  if (!known) return "";
  if (known.norm === null) return known.reason ? `None: ${known.reason}` : `${known.shape} not finite`;
  return known.norm === 0 ? `${known.shape} zero` : `${known.shape} ${number(known.norm)}`;
}

function milliseconds(seconds: number): string {
  return `${number(seconds * 1000)} ms`;
}

function bytes(size: number): string {
  return size >= 2 ** 20 ? `${(size / 2 ** 20).toFixed(1)} MiB` : `${(size / 1024).toFixed(1)} KiB`;
}

function endings(trace: Trace): HTMLElement[] {
  const lines = [
    ...(trace.unused_modules.length ? [`never called: ${trace.unused_modules.join(", ")}`] : []),
    ...(trace.unused_parameters.length ? [`without influence on the output: ${trace.unused_parameters.join(", ")}`] : []),
    ...trace.notes,
  ];
  return lines.map((line) => h("p", { class: "quiet" }, line));
}

/** The calls as a tree, with bars for time and size. */
export const outline: View = {
  key: "outline",
  title: "Tree",
  what: "the calls, indented by module, coloured by the size of what they made",
  isShown: isTrace,
  draw(page) {
    const trace = traceOf(page);
    const words = page.route.options.get("filter") ?? "";
    const rows = trace.rows.map((row, at) => ({ row, at })).filter(({ row }) => matches(`${row.site} ${row.cls}`, words));
    const sizes = rows.map(({ row }) => rmsOf(row)).filter((value): value is number => value !== null && value > 0);
    const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
    const slowest = Math.max(...rows.map(({ row }) => row.time_s), 1e-9);
    const lines = rows.map(({ row, at }) => {
      const name = h("td", { class: "path" }, h("a", { href: page.link("call", { at }), title: row.site }, row.path === "" && !row.site ? trace.model : lastOf(row)));
      name.style.paddingLeft = `${0.5 + row.depth}em`;
      const size = rmsOf(row);
      const cell = h("td", { class: "number" }, number(size));
      if (size !== null && size > 0 && high > low) {
        const share = Math.log(size / low) / Math.log(high / low);
        cell.style.backgroundColor = css(ramp(share));
        cell.style.color = share > 0.55 ? "#111" : "#fff";
      }
      const bar = h("span", { class: "bar" });
      bar.style.width = `${(60 * row.time_s) / slowest}px`;
      return h("tr", {}, name, h("td", { class: "quiet" }, row.cls), h("td", {}, `${row.input} → ${row.output}`), cell, h("td", {}, bar, ` ${milliseconds(row.time_s)}`), trace.has_backward ? h("td", {}, gradient(row.grad_output)) : null);
    });
    const head = ["call", "class", "shapes", "rms", "time, with what is inside", ...(trace.has_backward ? ["grad of output"] : [])];
    return h("div", {}, h("div", { class: "controls" }, filter("filter calls", words, (value) => page.go("outline", { filter: value }, true))), h("div", { class: "wide" }, h("table", { class: "tree" }, h("thead", {}, h("tr", {}, ...head.map((text) => h("th", {}, text)))), h("tbody", {}, ...lines))), ...endings(trace));
  },
};

function rmsOf(row: Call): number | null {
  const known = row.statistics;
  return known && known.mean !== null && known.std !== null ? Math.hypot(known.mean, known.std) : null;
}

function lastOf(row: Call): string {
  const cut = row.site.lastIndexOf(row.site.includes("/") ? "/" : ".");
  return row.site.slice(cut + 1) || row.cls;
}

/** One call: all its numbers, its picture and that of its gradient. */
export const call: View = {
  key: "call",
  title: "Call",
  what: "one call: all of its numbers and pictures",
  isShown: () => false,
  async draw(page) {
    const trace = traceOf(page);
    const at = Number(page.route.options.get("at") ?? 0);
    const row = trace.rows[at];
    if (!row) return h("p", {}, `there is no call ${at}`);
    const step = (by: number, text: string) => trace.rows[at + by] && h("a", { class: "button", href: page.link("call", { at: at + by }), title: by < 0 ? "the one before (k)" : "the next (j)" }, text);
    const facts: [string, string][] = [
      ["class", row.cls], ["input", row.input], ["output", row.output], ["type", row.dtype], ["own parameters", count(row.parameters)],
      ["time", milliseconds(row.time_s)], ["FLOPs", row.flops ? count(row.flops) : ""], ["memory", bytes(row.memory_bytes)],
      ["mean, std, min, max", numbersOf(row).join(", ")], ["gradient at its output", gradient(row.grad_output)], ["its own gradient at its input", gradient(row.grad_input)],
    ];
    const makers = trace.edges.filter(([, to, isKnown]) => isKnown && to === at).map(([from]) => from);
    const takers = trace.edges.filter(([from, , isKnown]) => isKnown && from === at).map(([, to]) => to);
    const links = (title: string, places: number[]) =>
      places.length > 0 && h("p", {}, `${title}: `, ...places.flatMap((one) => [h("a", { href: page.link("call", { at: one }) }, trace.rows[one]!.site || trace.model), " "]));
    const weights = trace.parameters.filter((one) => ownerOf(one.site) === row.path && row.parameters > 0);
    return h(
      "div",
      {},
      h("div", { class: "controls" }, step(-1, "‹"), h("h2", {}, row.site || trace.model), step(1, "›")),
      copyable(`gaff.capture(model, ${python(row.site || ":output")})`),
      table(["", ""], facts.filter(([, value]) => value && value !== ", , , ")),
      weights.length > 0 && table(["parameter", "shape", "gradient"], weights.map((one) => [one.site, one.shape, one.requires_grad ? gradient(one.grad) : "frozen"])),
      links("takes what was made by", makers),
      links("is taken by", takers),
      ...(await cards(page, trace.pictures.filter((one) => one.site === row.site || one.site === `${row.site}:grad_output` || one.site === `${row.site}:output`))),
    );
  },
};

function ownerOf(site: string): string {
  return site.replace(/:param$/, "").split(".").slice(0, -1).join(".");
}

export const parameters: View = {
  key: "parameters",
  title: "Parameters",
  what: "every parameter and what backward brought it",
  isShown: (page) => isTrace(page) && traceOf(page).parameters.length > 0,
  draw(page) {
    const trace = traceOf(page);
    const words = page.route.options.get("filter") ?? "";
    const rows = trace.parameters.filter((one) => matches(one.site, words));
    return h(
      "div",
      {},
      h("div", { class: "controls" }, filter("filter parameters", words, (value) => page.go("parameters", { filter: value }, true))),
      table(["parameter", "shape", "elements", "trained", "gradient", "zeros"], rows.map((one) => [one.site, one.shape, count(one.elements), one.requires_grad ? "yes" : "no", gradient(one.grad), one.grad?.zeros ? `${Math.round(100 * one.grad.zeros)} %` : ""]), [2, 5]),
    );
  },
};
