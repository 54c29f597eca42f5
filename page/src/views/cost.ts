// Where time, operations, memory and parameters go: calls inside calls, as wide as what they take.

import { LINES } from "../color";
import { h, select } from "../dom";
import { bytes, count, duration, percent } from "../format";
import type { Call, Trace } from "../types";
import type { View } from "../view";
import { wide } from "../text";
import { childrenOf, traceOf } from "./trace";
import { ownerOf } from "./tree";

const REST = "outside of modules that hold no other";
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HIGH] = [1200, 22];
const LEAST = 1.2; // units of width that a call must have to be drawn
interface Measure {
  title: string;
  own(row: Call, sizes: Map<string, number>): number; // of the call itself, or with all that is inside it
  isWhole: boolean;
  text(value: number): string;
}

export const MEASURES: Record<string, Measure> = {
  time: { title: "time", own: (row) => row.time_s, isWhole: true, text: duration },
  flops: { title: "FLOPs", own: (row) => row.flops, isWhole: true, text: count },
  memory: { title: "size of outputs", own: (row) => row.memory_bytes, isWhole: false, text: bytes },
  parameters: { title: "parameters", own: (row, sizes) => (row.call || !row.parameters ? 0 : (sizes.get(row.path) ?? 0)), isWhole: false, text: count }, // once
};

/** What each call takes with all that is inside it; the outputs of a call that holds others are those of these. */
export function wholes(trace: Pick<Trace, "rows" | "parameters">, measure: Measure, inside: number[][]): number[] {
  const found: number[] = trace.rows.map(() => 0);
  const sizes = new Map<string, number>(); // of each module's parameters; one that several share is the first's
  for (const one of trace.parameters) sizes.set(ownerOf(one.site), (sizes.get(ownerOf(one.site)) ?? 0) + one.elements);
  for (let at = trace.rows.length - 1; at >= 0; at--) {
    const below = inside[at]!.reduce((sum, one) => sum + found[one]!, 0);
    const own = measure.own(trace.rows[at]!, sizes);
    const isMemory = measure === MEASURES.memory;
    found[at] = measure.isWhole ? Math.max(own, below) : isMemory && inside[at]!.length ? below : own + below;
  }
  return found;
}

export const cost: View = {
  key: "cost",
  title: "Cost",
  what: "where time, FLOPs, memory and parameters go, as a flame graph",
  isShown: (page) => (page.source.head.trace?.rows.length ?? 0) > 0,
  draw(page) {
    const trace = traceOf(page);
    const { options } = page.route;
    const chosen = MEASURES[options.get("of") ?? "time"] ? (options.get("of") ?? "time") : "time";
    const measure = MEASURES[chosen]!;
    const { inside, top } = childrenOf(trace.rows);
    const whole = wholes(trace, measure, inside);
    const root = options.has("at") ? Number(options.get("at")) : -1;
    const first = trace.rows[root] ? [root] : top;
    const total = first.reduce((sum, at) => sum + whole[at]!, 0);
    const again = (more: Record<string, string | number | null>) => page.go("cost", { ...Object.fromEntries(options), ...more }, true);
    const controls = h(
      "div",
      { class: "controls" },
      select("measure", Object.entries(MEASURES).map(([key, one]): [string, string] => [key, one.title]), chosen, (value) => again({ of: value, at: null })),
      trace.rows[root] && h("button", { type: "button", on: { click: () => again({ at: null }) } }, `${trace.rows[root].site || trace.model} ×`),
      h("span", { class: "quiet" }, `${measure.text(total)}; a call is as wide as its share, the calls inside it are below; a click looks into one`),
    );
    if (!(total > 0)) return h("div", {}, controls, h("p", { class: "quiet" }, "nothing of this was measured"));
    const svg = document.createElementNS(SVG, "svg");
    const isLeaf = (at: number) => !inside[at]!.length;
    const classes = [...new Set([...trace.rows.filter((_, at) => isLeaf(at)), ...trace.rows].map((row) => row.cls))];
    const colorOf = (cls: string) => LINES[classes.indexOf(cls) % LINES.length]!;
    let deepest = 0;
    let narrow = 0;
    const countOf = (at: number): number => inside[at]!.reduce((sum, one) => sum + countOf(one), 1);
    const place = (at: number, left: number, level: number) => {
      const width = (WIDTH * whole[at]!) / total;
      if (width < LEAST) {
        narrow += countOf(at);
        return;
      }
      deepest = Math.max(deepest, level);
      const row = trace.rows[at]!;
      const name = row.path ? row.site : trace.model;
      const told = `${name} (${row.cls}): ${measure.text(whole[at]!)}, ${percent(whole[at]! / total)}`;
      const link = draw(svg, "a", { href: page.link("cost", { of: chosen, at }), "aria-label": told });
      draw(link, "title", {}).textContent = told;
      draw(link, "rect", { x: left, y: level * HIGH, width: Math.max(0.5, width - 0.5), height: HIGH - 1, rx: 2, fill: colorOf(row.cls), "fill-opacity": inside[at]!.length ? 0.45 : 0.85 });
      const fitting = [`${lastOf(name)} ${measure.text(whole[at]!)}`, lastOf(name)].find((text) => wide(text, "11px") < width - 8);
      if (fitting) draw(link, "text", { x: left + 4, y: level * HIGH + 15 }).textContent = fitting;
      let next = left;
      for (const one of inside[at]!) {
        place(one, next, level + 1);
        next += (WIDTH * whole[one]!) / total;
      }
    };
    let left = 0;
    for (const at of first) {
      place(at, left, 0);
      left += (WIDTH * whole[at]!) / total;
    }
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${(deepest + 1) * HIGH}`);
    svg.setAttribute("class", "flame");
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", `${measure.title} by call`);
    const leaves = trace.rows.map((_, at) => at).filter(isLeaf);
    const byClass = classes.map((cls): [string, number, number] => {
      const own = leaves.filter((at) => trace.rows[at]!.cls === cls);
      return [cls, own.length, own.reduce((sum, at) => sum + whole[at]!, 0)];
    });
    const all = top.reduce((sum, at) => sum + whole[at]!, 0);
    const rest = all - byClass.reduce((sum, [, , value]) => sum + value, 0);
    byClass.push([REST, 1, rest > 0.005 * all ? rest : 0]);
    const shares = byClass.filter(([, size, value]) => size > 0 && value > 0).sort((one, other) => other[2] - one[2]);
    return h(
      "div",
      {},
      controls,
      h("div", { class: "wide" }, svg as unknown as HTMLElement),
      narrow > 0 && h("p", { class: "quiet" }, `${narrow} ${narrow === 1 ? "call is" : "calls are"} too narrow to be drawn; the table of calls has all of them`),
      h("h2", {}, "By class"),
      h(
        "div",
        { class: "shares" },
        ...shares.map(([cls, size, value]) => {
          const patch = h("span", { class: "bar" });
          patch.style.width = `${(100 * value) / shares[0]![2]}%`;
          patch.style.backgroundColor = cls === REST ? "var(--quiet)" : colorOf(cls);
          return h("div", {}, h("span", {}, cls === REST ? cls : `${cls} × ${size}`), h("span", { class: "track" }, patch), h("span", { class: "quiet" }, `${measure.text(value)}, ${percent(value / all)}`));
        }),
      ),
    );
  },
};

function draw(parent: Element, name: string, attributes: Record<string, string | number>): Element {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  parent.append(made);
  return made;
}

/** The end of an address: of a number with the name before it. */
function lastOf(site: string): string {
  const parts = site.split(site.includes("/") ? "/" : ".");
  const last = parts[parts.length - 1]!;
  return /^\d+$/.test(last) && parts.length > 1 ? `${parts[parts.length - 2]}.${last}` : last;
}
