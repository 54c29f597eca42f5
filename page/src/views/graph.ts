// The graph of one run: which call took what from which.

import { css, ramp } from "../color";
import { filter, h } from "../dom";
import { matches } from "../format";
import type { Trace } from "../types";
import type { View } from "../view";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, GAP_X, GAP_Y] = [190, 34, 18, 26];
const MOST = 1500; // nodes that are drawn

export interface Place {
  at: number; // the row
  x: number;
  y: number;
}

/** Rows that hold no other: the leaves of the tree of calls. */
export function leavesOf(trace: Pick<Trace, "rows">): number[] {
  return trace.rows.map((_, at) => at).filter((at) => (trace.rows[at + 1]?.depth ?? -1) <= trace.rows[at]!.depth);
}

/** Layers by the longest way from an input; within a layer by the mean place of those it takes from. */
export function layout(nodes: number[], edges: Trace["edges"]): { places: Map<number, Place>; width: number; height: number } {
  const shown = new Set(nodes);
  const makers = new Map<number, number[]>(nodes.map((node) => [node, []]));
  for (const [from, to] of edges) if (shown.has(from) && shown.has(to)) makers.get(to)!.push(from);
  const layer = new Map<number, number>();
  const layerOf = (node: number, above: Set<number>): number => {
    const known = layer.get(node);
    if (known !== undefined || above.has(node)) return known ?? -1; // a loop: a module that is called again
    above.add(node);
    const found = Math.max(-1, ...makers.get(node)!.map((one) => layerOf(one, above))) + 1;
    above.delete(node);
    layer.set(node, found);
    return found;
  };
  for (const node of nodes) layerOf(node, new Set());
  const rows: number[][] = [];
  for (const node of nodes) (rows[layer.get(node)!] ??= []).push(node);
  const places = new Map<number, Place>();
  const widest = Math.max(1, ...rows.map((row) => row.length));
  rows.forEach((row, depth) => {
    const wish = (node: number) => {
      const known = makers.get(node)!.map((one) => places.get(one)!.x);
      return known.length ? known.reduce((sum, x) => sum + x, 0) / known.length : 0;
    };
    row.sort((one, other) => wish(one) - wish(other) || one - other);
    const left = ((widest - row.length) * (WIDTH + GAP_X)) / 2;
    row.forEach((node, at) => places.set(node, { at: node, x: left + at * (WIDTH + GAP_X), y: depth * (HEIGHT + GAP_Y) }));
  });
  return { places, width: widest * (WIDTH + GAP_X), height: rows.length * (HEIGHT + GAP_Y) };
}

export const graph: View = {
  key: "graph",
  title: "Graph",
  what: "which call took what from which",
  isShown: (page) => (page.source.head.trace?.rows.length ?? 0) > 0,
  draw(page) {
    const trace = page.source.head.trace!;
    const words = page.route.options.get("filter") ?? "";
    const makers = new Set(trace.edges.map(([from]) => from)); // with ops of their own: what they made no call inside has
    const leaves = [...new Set([...leavesOf(trace), ...makers])].sort((one, other) => one - other).filter((at) => matches(`${trace.rows[at]!.site} ${trace.rows[at]!.cls}`, words));
    const nodes = leaves.slice(0, MOST);
    const { places, width, height } = layout(nodes, trace.edges);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `-4 -4 ${width + 84} ${height + 8}`);
    svg.setAttribute("width", String(width + 84));
    svg.setAttribute("height", String(height + 8));
    svg.setAttribute("class", "graph");
    const draw = (name: string, attributes: Record<string, string | number>, parent: Element = svg) => {
      const made = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
      parent.append(made);
      return made;
    };
    for (const [from, to, isKnown] of trace.edges) {
      const [one, other] = [places.get(from), places.get(to)];
      if (!one || !other) continue;
      const [x1, y1, x2, y2] = [one.x + WIDTH / 2, one.y + HEIGHT, other.x + WIDTH / 2, other.y];
      const far = other.y - one.y > HEIGHT + GAP_Y + 1 && Math.abs(other.x - one.x) < WIDTH / 2; // past others: beside them
      const [side, bow] = [Math.max(one.x, other.x) + WIDTH, 18 + Math.min(60, (other.y - one.y) / 12)];
      const beside = `M${one.x + WIDTH},${one.y + HEIGHT / 2} C${side + bow},${one.y + HEIGHT / 2} ${side + bow},${other.y + HEIGHT / 2} ${other.x + WIDTH},${other.y + HEIGHT / 2}`;
      draw("path", { d: far ? beside : `M${x1},${y1} C${x1},${y1 + GAP_Y} ${x2},${y2 - GAP_Y} ${x2},${y2}`, class: isKnown ? "edge" : "edge guessed" });
    }
    const slowest = Math.log(Math.max(...nodes.map((at) => trace.rows[at]!.time_s), 1e-6) / 1e-6);
    for (const { at, x, y } of places.values()) {
      const row = trace.rows[at]!;
      const link = draw("a", { href: page.link("call", { at }) });
      const share = Math.max(0, Math.log(Math.max(row.time_s, 1e-6) / 1e-6)) / (slowest || 1);
      const isBad = (row.statistics?.nonfinite ?? 0) > 0;
      draw("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 5, class: isBad ? "node bad" : "node" }, link);
      draw("rect", { x, y, width: 5, height: HEIGHT, rx: 2, fill: css(ramp(share)) }, link);
      draw("text", { x: x + 11, y: y + 14, class: "name" }, link).textContent = short(row.site || trace.model, 24);
      draw("text", { x: x + 11, y: y + 28, class: "kind" }, link).textContent = short(`${row.cls} → ${row.output}`, 30);
      draw("title", {}, link).textContent = `${row.site}: ${row.input} → ${row.output}`;
    }
    return h(
      "div",
      {},
      h("div", { class: "controls" }, filter("filter calls", words, (value) => page.go("graph", { filter: value }, true)), h("span", { class: "quiet" }, `${nodes.length} calls that hold no other${leaves.length > MOST ? `, of ${leaves.length}` : ""}; the stripe is their time, from dark to light; a dotted line goes through ops that are no modules${trace.edges.length ? "" : "; what was taken from which is not known"}`)),
      h("div", { class: "wide" }, svg as unknown as HTMLElement),
    );
  },
};

function short(text: string, most: number): string {
  return text.length <= most ? text : `…${text.slice(text.length - most + 1)}`;
}
