// The graph of one run: which call took what from which; modules fold, and a panel tells of the one that is chosen.

import { Graph, layout } from "@dagrejs/dagre";
import { css, ramp } from "../color";
import { h, select } from "../dom";
import { keep, type Kept } from "../kept";
import type { Trace } from "../types";
import type { Page, View } from "../view";
import { wide } from "../text";
import { facts } from "./call";
import { childrenOf, traceOf } from "./trace";

const SVG = "http://www.w3.org/2000/svg";
const [HEIGHT, MOST] = [38, 400]; // of a node; nodes that are laid out

export interface Shown {
  nodes: number[]; // rows that are drawn as one node each
  groups: number[]; // rows that are open: a frame around what is inside
  within: Map<number, number>; // the group that a node or a group is in
  edges: [from: number, to: number, isKnown: boolean][];
}

/** What is drawn where calls down to a level are open, and those of `turned` the other way. */
export function visible(trace: Pick<Trace, "rows" | "edges">, level: number, turned: Set<number>): Shown {
  const { inside, top } = childrenOf(trace.rows);
  const found: Shown = { nodes: [], groups: [], within: new Map(), edges: [] };
  const standsFor: number[] = [];
  const lastIn: number[] = []; // of an open group: what it handed on came from there, where it made nothing itself
  const makers = new Set(trace.edges.map(([from]) => from)); // what a call made that also holds others: ops of its own
  const visit = (at: number, group: number | null) => {
    if (group !== null) found.within.set(at, group);
    const isOpen = inside[at]!.length > 0 && trace.rows[at]!.depth < level !== turned.has(at);
    if (isOpen) {
      found.groups.push(at);
      for (const one of inside[at]!) visit(one, at);
      lastIn[at] = inside[at]![inside[at]!.length - 1]!;
      if (makers.has(at)) standsFor[at] = inside[at]![inside[at]!.length - 1]!;
    } else {
      found.nodes.push(at);
      cover(at, at);
    }
  };
  const cover = (at: number, node: number) => {
    standsFor[at] = node;
    for (const one of inside[at]!) cover(one, node);
  };
  for (const at of top) visit(at, null);
  const known = new Map<string, [number, number, boolean]>();
  const nodeOf = (at: number): number | undefined => {
    let here: number | undefined = at;
    for (let turns = 0; here !== undefined && turns < 50; turns++) {
      if (standsFor[here] === here) return here;
      here = standsFor[here] ?? (turns > 0 ? lastIn[here] : undefined);
    }
    return here;
  };
  for (const [from, to, isKnown] of trace.edges) {
    const [one, other] = [nodeOf(from), nodeOf(to)];
    if (one === undefined || other === undefined || one === other) continue;
    const before = known.get(`${one} ${other}`);
    known.set(`${one} ${other}`, [one, other, isKnown || (before?.[2] ?? false)]);
  }
  found.edges = [...known.values()];
  return found;
}

/** The deepest level with no more nodes than fit on a screen or two. */
function levelFor(trace: Trace): number {
  const deepest = Math.max(0, ...trace.rows.map((row) => row.depth));
  for (let level = deepest; level > 1; level--) if (visible(trace, level, new Set()).nodes.length <= 60) return level;
  return 1;
}

export const graph: View = {
  key: "graph",
  title: "Graph",
  what: "which call took what from which; modules fold",
  isShown: (page) => (page.source.head.trace?.rows.length ?? 0) > 0,
  draw(page) {
    const trace = traceOf(page);
    const { options } = page.route;
    const deepest = Math.max(0, ...trace.rows.map((row) => row.depth));
    const level = Number(options.get("level") ?? levelFor(trace));
    const turned = new Set((options.get("turned") ?? "").split(",").filter(Boolean).map(Number));
    const again = (more: Record<string, string | number | null>) => page.go("graph", { ...Object.fromEntries(options), ...more }, true);
    const shown = visible(trace, level, turned);
    const chosen = options.has("at") ? Number(options.get("at")) : -1;
    const row = trace.rows[chosen];
    const turn = (at: number) => {
      const next = new Set(turned);
      if (!next.delete(at)) next.add(at);
      again({ turned: [...next].join(","), at });
    };
    const tooMany = shown.nodes.length > MOST;
    return h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        deepest > 0 && select("open to level", Array.from({ length: deepest + 1 }, (_, at): [string, string] => [String(at), at === deepest ? `${at} (all)` : String(at)]), String(level), (value) => again({ level: value, turned: null })),
        h("span", { class: "quiet" }, `${shown.nodes.length} nodes of ${trace.rows.length} calls; ▸ opens a module and ▾ folds it; the wheel zooms, dragging moves, 0 shows all; the stripe is time, lighter is slower; dotted lines go through functions outside of modules, or are presumed${trace.edges.length ? "" : "; what was taken from which is not known"}`),
      ),
      tooMany
        ? h("p", { class: "verdict warning" }, `${shown.nodes.length} nodes are more than are laid out (${MOST}): open fewer levels`)
        : h(
            "div",
            { class: row ? "with-panel" : "" },
            keep(`graph ${level} ${[...turned].join(",")}`, { page, trace, shown, chosen, choose: (at: number) => again({ at }), turn }, (given) => new GraphPicture(given)),
            row && h("aside", { class: "card", label: "the call that is chosen" }, h("h2", {}, h("a", { href: page.link("call", { at: chosen }) }, row.site || trace.model)), ...facts(page, trace, chosen, "graph"), h("button", { type: "button", on: { click: () => again({ at: null }) } }, "close")),
          ),
    );
  },
};

interface Given {
  page: Page;
  trace: Trace;
  shown: Shown;
  chosen: number;
  choose(at: number): void;
  turn(at: number): void;
}

/** The picture; how far it is zoomed and moved stays while another node is chosen. */
class GraphPicture implements Kept<Given> {
  element: HTMLElement;
  private svg = document.createElementNS(SVG, "svg");
  private view = { x: 0, y: 0, width: 0, height: 0 }; // without a width: all of it
  private sizes = new ResizeObserver(() => this.show());
  private all = { width: 100, height: 100 };

  constructor(private given: Given) {
    this.element = h("div", { class: "graph-box" }, this.svg as unknown as HTMLElement);
    this.svg.setAttribute("class", "graph");
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("role", "group");
    this.svg.setAttribute("aria-label", `graph of ${given.shown.nodes.length} calls; arrow keys move, plus and minus zoom, 0 shows all, Tab goes from call to call`);
    this.draw();
    this.svg.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    this.svg.addEventListener("pointerdown", (event) => this.pressed(event));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    this.sizes.observe(this.element);
  }

  close(): void {
    this.sizes.disconnect();
  }

  update(given: Given): void {
    this.given = given;
    this.mark();
  }

  private draw(): void {
    const { trace, shown } = this.given;
    const made = new Graph({ compound: true, multigraph: false });
    made.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 34, marginx: 8, marginy: 8 });
    made.setDefaultEdgeLabel(() => ({}));
    const texts = new Map(shown.nodes.map((at) => [at, labelOf(trace, at)]));
    for (const at of shown.nodes) {
      const [name, kind] = texts.get(at)!;
      made.setNode(String(at), { width: 38 + Math.max(wide(name, "600 12px"), wide(kind, "12px")), height: HEIGHT });
    }
    for (const at of shown.groups) made.setNode(String(at), { label: labelOf(trace, at)[0] });
    for (const [at, group] of shown.within) if (shown.groups.includes(at) || texts.has(at)) made.setParent(String(at), String(group));
    for (const [from, to, isKnown] of shown.edges) {
      const shape = isKnown ? firstShape(trace.rows[from]!.output) : "";
      made.setEdge(String(from), String(to), { width: wide(shape, "11px"), height: 12, labelpos: "c", shape });
    }
    layout(made);
    const size = made.graph() as { width: number; height: number };
    this.all = { width: size.width, height: size.height };
    for (const at of shown.groups) this.group(at, made.node(String(at)) as Box);
    const known = new Map(shown.edges.map(([from, to, isKnown]) => [`${from} ${to}`, isKnown]));
    for (const edge of made.edges()) {
      const told = made.edge(edge) as { points: { x: number; y: number }[]; x: number; y: number; shape: string };
      put(this.svg, "path", { d: curve(told.points), class: known.get(`${edge.v} ${edge.w}`) ? "edge" : "edge guessed" });
      if (told.shape && told.x !== undefined) put(this.svg, "text", { x: told.x, y: told.y + 3, class: "shape" }).textContent = told.shape;
    }
    const slowest = Math.log(Math.max(...shown.nodes.map((at) => trace.rows[at]!.time_s), 1e-6) / 1e-6) || 1;
    for (const at of shown.nodes) this.node(at, made.node(String(at)) as Box, texts.get(at)!, slowest);
    this.mark();
  }

  private mark(): void {
    for (const one of this.svg.querySelectorAll("[data-at]")) one.classList.toggle("chosen", Number((one as SVGElement).dataset.at) === this.given.chosen);
  }

  private group(at: number, box: Box): void {
    const { trace } = this.given;
    const [left, top] = [box.x - box.width / 2, box.y - box.height / 2];
    const made = put(this.svg, "g", { class: "group", "data-at": at });
    put(made, "rect", { x: left, y: top, width: box.width, height: box.height, rx: 8 });
    this.button(made, at, left + 8, top + 13, `▾ ${labelOf(trace, at)[0]}`, "fold");
  }

  private node(at: number, box: Box, [name, kind]: [string, string], slowest: number): void {
    const { trace } = this.given;
    const row = trace.rows[at]!;
    const [left, top] = [box.x - box.width / 2, box.y - box.height / 2];
    const isBad = (row.statistics?.nonfinite ?? 0) > 0;
    const made = put(this.svg, "g", { class: isBad ? "node bad" : "node", "data-at": at, tabindex: 0, role: "button", "aria-label": `${row.site || trace.model}, ${row.cls}, ${row.input} to ${row.output}` });
    put(made, "title", {}).textContent = `${row.site || trace.model}: ${row.input} → ${row.output}`;
    put(made, "rect", { x: left, y: top, width: box.width, height: box.height, rx: 5 });
    const share = Math.max(0, Math.log(Math.max(row.time_s, 1e-6) / 1e-6)) / slowest;
    put(made, "rect", { x: left, y: top, width: 5, height: box.height, rx: 2, class: "stripe", fill: css(ramp(share)) });
    put(made, "text", { x: left + 12, y: top + 16, class: "name" }).textContent = name;
    put(made, "text", { x: left + 12, y: top + 30, class: "kind" }).textContent = kind;
    const holds = (trace.rows[at + 1]?.depth ?? -1) > row.depth;
    if (holds) this.button(made, at, left + box.width - 14, top + 16, "▸", "open");
    const choose = () => this.given.choose(at);
    made.addEventListener("click", choose);
    made.addEventListener("keydown", (event) => {
      if ((event as KeyboardEvent).key !== "Enter" && (event as KeyboardEvent).key !== " ") return;
      event.preventDefault();
      choose();
    });
  }

  /** A sign that opens or folds a module. */
  private button(parent: Element, at: number, x: number, y: number, text: string, verb: string): void {
    const { trace } = this.given;
    const made = put(parent, "text", { x, y, class: "turn", tabindex: 0, role: "button", "aria-label": `${verb} ${trace.rows[at]!.site || trace.model}` });
    made.textContent = text;
    const turn = (event: Event) => {
      event.stopPropagation();
      this.given.turn(at);
    };
    made.addEventListener("click", turn);
    made.addEventListener("keydown", (event) => (event as KeyboardEvent).key === "Enter" && turn(event));
  }

  /** All of it. */
  private fit(): void {
    const [across, high] = [this.element.clientWidth, this.element.clientHeight];
    const scale = Math.min(1, across / (this.all.width + 16), high / (this.all.height + 16));
    this.view = { x: (this.all.width - across / scale) / 2, y: (this.all.height - high / scale) / 2, width: across / scale, height: high / scale };
    this.show();
  }

  private show(): void {
    const [across, high] = [this.element.clientWidth, this.element.clientHeight];
    if (!across || !high) return;
    if (!this.view.width) {
      const scale = Math.min(1, Math.max(0.3, across / (this.all.width + 16)));
      this.view = { x: (this.all.width - across / scale) / 2, y: -4, width: across / scale, height: high / scale };
    } else this.view.height = (this.view.width * high) / across;
    const { x, y, width, height } = this.view;
    this.svg.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
  }

  private zoom(factor: number, x: number, y: number): void {
    const width = Math.min(20 * this.all.width + 1000, Math.max(80, this.view.width * factor));
    const real = width / this.view.width;
    this.view = { x: x - (x - this.view.x) * real, y: y - (y - this.view.y) * real, width, height: this.view.height * real };
    this.show();
  }

  private wheeled(event: WheelEvent): void {
    event.preventDefault();
    const bounds = this.svg.getBoundingClientRect();
    const [x, y] = [this.view.x + ((event.clientX - bounds.left) / bounds.width) * this.view.width, this.view.y + ((event.clientY - bounds.top) / bounds.height) * this.view.height];
    this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, x, y);
  }

  private pressed(event: PointerEvent): void {
    if (event.button !== 0) return;
    const begin = { x: event.clientX, y: event.clientY, view: { ...this.view } };
    const scale = this.view.width / Math.max(1, this.svg.clientWidth);
    const move = (now: PointerEvent) => {
      this.view = { ...begin.view, x: begin.view.x - (now.clientX - begin.x) * scale, y: begin.view.y - (now.clientY - begin.y) * scale };
      this.show();
    };
    const end = () => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", end);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", end);
  }

  private onKey(event: KeyboardEvent): void {
    const { x, y, width, height } = this.view;
    const by: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = by[event.key];
    if (move) {
      this.view = { ...this.view, x: x + (move[0] * width) / 10, y: y + (move[1] * height) / 10 };
      this.show();
    } else if (event.key === "+" || event.key === "-") this.zoom(event.key === "+" ? 1 / 1.3 : 1.3, x + width / 2, y + height / 2);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

function labelOf(trace: Trace, at: number): [string, string] {
  const row = trace.rows[at]!;
  const site = row.path ? row.site : trace.model;
  const name = site.slice(site.lastIndexOf(site.includes("/") ? "/" : ".") + 1);
  const parent = site.slice(0, Math.max(0, site.length - name.length - 1));
  const shown = /^\d+$/.test(name) && parent ? `${parent.slice(parent.lastIndexOf(".") + 1)}.${name}` : name;
  return [short(shown, 26), short(row.cls, 30)];
}

function firstShape(shapes: string): string {
  const first = shapes.split(",")[0]!.trim();
  return /^\d/.test(first) ? first : "";
}

/** A smooth line through points. */
function curve(points: { x: number; y: number }[]): string {
  const [first, ...rest] = points;
  if (!first) return "";
  let path = `M${first.x},${first.y}`;
  for (let at = 0; at < rest.length; at++) {
    const [here, next] = [rest[at]!, rest[at + 1]];
    path += next ? ` Q${here.x},${here.y} ${(here.x + next.x) / 2},${(here.y + next.y) / 2}` : ` L${here.x},${here.y}`;
  }
  return path;
}

function put(parent: Element, name: string, attributes: Record<string, string | number>): Element {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  parent.append(made);
  return made;
}

function short(text: string, most: number): string {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
