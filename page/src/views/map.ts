// Any number of all sites over the whole run, on one screen: a picture for each port, with a time axis that is true.

import { filter, h, select } from "../dom";
import { matches, pathOf, portOf } from "../format";
import { type Cells, heat, spansOf } from "../heat";
import { phasesOf, rowsOf, type Rows, statsOf } from "../rundata";
import type { Source } from "../source";
import type { Run } from "../types";
import type { View } from "../view";

const LINEAR = ["mean", "min", "max", "zeros", "saturated", "entropy", "dead", "first_key", "choice", "idle", "dropped"];
const HEIGHTS: Record<string, number> = { low: 4, middle: 8, high: 14 };
const WHAT: Record<string, string> = {
  input: "what modules were given", output: "what modules returned", grad_output: "gradients at what modules returned", grad_input: "gradients at what modules were given",
  param: "parameters", grad: "gradients of parameters", update: "what a step changed parameters by",
};

export const map: View = {
  key: "map",
  title: "Time × depth",
  what: "one number of every site over time, as a heat map",
  isShown: (page) => page.run.groups.length > 0,
  async draw(page) {
    const options = page.route.options;
    const phase = options.get("phase") ?? "train";
    const stats = statsOf(page.run, phase);
    const stat = options.get("stat") ?? (stats.includes("rms") ? "rms" : (stats[0] ?? "rms"));
    const port = options.get("port") ?? "";
    const words = options.get("filter") ?? "";
    const depth = Number(options.get("depth") ?? 0);
    const opened = (options.get("open") ?? "").split(",").filter(Boolean);
    const again = (more: Record<string, string | number | null>) =>
      page.go("map", { ...Object.fromEntries(options), ...more }, true);
    const zoomed = page.range ? await page.source.zoom(...page.range) : null;
    const [source, run] = zoomed ? [zoomed, sameRun(zoomed, page.run)] : [page.source, page.run];
    const ports = [...new Set(run.sites.map((site) => portOf(site[1])))];
    const [begin, end] = page.range ?? [0, Infinity];
    const shown = port ? [port] : ports;
    const all = await Promise.all(shown.map((one) => gather(source, run, { phase, stat, port: one, words, begin, end })));
    const most = Math.max(0, ...all.map((cells) => cells.rows));
    const rows = options.get("rows") ?? (most > 400 ? "low" : most > 120 ? "middle" : "high");
    const deepest = Math.max(0, ...run.sites.map((site) => pathOf(site[1]).split(".").length));
    return h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        select("number", stats.map((one) => [one, one.replace("_", " ")]), stat, (value) => again({ stat: value })),
        phasesOf(run).length > 1 && select("phase", phasesOf(run).map((one) => [one, one]), phase, (value) => again({ phase: value })),
        select("port", [["", "all"], ...ports.map((one): [string, string] => [one, one])], port, (value) => again({ port: value })),
        deepest > 1 && select("fold", [["0", "nothing"], ...Array.from({ length: deepest - 1 }, (_, at): [string, string] => [String(at + 1), `below level ${at + 1}`])], String(depth), (value) => again({ depth: value === "0" ? null : value, open: null })),
        select("rows", Object.keys(HEIGHTS).map((one) => [one, one]), rows, (value) => again({ rows: value })),
        filter("filter sites", words, (value) => again({ filter: value })),
      ),
      h("p", { class: "quiet" }, "Sites in the order in which they were called; each port has colours of its own. A click opens a site; dragging zooms into steps, Ctrl and the wheel as well, Shift and the wheel moves; empty is where nothing was looked at."),
      ...shown.flatMap((one, at) => {
        const cells = folded(all[at]!, depth, opened);
        if (!cells.rows) return [];
        const spans = spansOf(cells.steps.map((_, column) => cells.first(column)), cells.steps, page.range);
        return [
          h("h2", {}, `:${one}`, h("span", { class: "quiet" }, ` ${WHAT[one] ?? ""}, ${cells.rows} ${cells.rows === 1 ? "row" : "rows"}`)),
          heat(`${one} ${stat} ${phase}`, cells, {
            isLog: !LINEAR.includes(stat),
            height: HEIGHTS[rows] ?? 14,
            spans,
            pick: (row) => (cells.members(row) > 1 ? again({ open: [...opened, cells.pathOf(row)].join(",") }) : page.go("site", { site: cells.rowName(row) })),
            brush: (from, to) => page.zoom(within(from, to, spansOf(cells.steps.map((_, column) => cells.first(column)), cells.steps).domain, page.range)),
            isFolded: (row) => cells.members(row) > 1,
            fold: (row) => (cells.members(row) > 1 ? again({ open: [...opened, cells.pathOf(row)].join(",") }) : page.go("site", { site: cells.rowName(row) })),
          }),
        ];
      }),
      all.every((cells) => !cells.rows) && h("p", { class: "quiet" }, "nothing to draw"),
    );
  },
};

/** A range of whole steps; null where it is wider than what there is. */
function within(from: number, to: number, [low, high]: [number, number], shown: [number, number] | null): [number, number] | null {
  const [begin, end] = [Math.max(0, Math.floor(from)), Math.ceil(to)];
  if (!shown && begin <= low && end >= high) return null;
  return end - begin < 1 ? shown : [begin, end];
}

function sameRun(source: Source, run: Run): Run {
  return source.head.runs?.find((one) => one.path === run.path) ?? run;
}

interface Wanted {
  phase: string;
  stat: string;
  port: string;
  words: string;
  begin: number;
  end: number;
}

interface Gathered extends Cells {
  steps: number[]; // the last of each column
  first(column: number): number;
  last(column: number): number;
}

/** Rows of all groups that have the number, over the steps of all of them. */
export async function gather(source: Source, run: Run, wanted: Wanted): Promise<Gathered> {
  const parts: { rows: Rows; row: number; name: string; site: number }[] = [];
  for (const group of run.groups) {
    if (group.phase !== wanted.phase) continue;
    const rows = await rowsOf(source, group, wanted.stat);
    if (!rows) continue;
    group.sites.forEach((site, row) => {
      const [, address, name] = run.sites[site]!;
      const isWanted = (!wanted.port || portOf(address) === wanted.port) && matches(name, wanted.words);
      if (isWanted && hasValue(rows, row)) parts.push({ rows, row, name, site });
    });
  }
  parts.sort((one, other) => one.site - other.site);
  const groups = [...new Set(parts.map(({ rows }) => rows.group))];
  const steps = [...new Set(groups.flatMap((group) => group.last))]
    .filter((step) => step >= wanted.begin && step <= wanted.end)
    .sort((a, b) => a - b);
  const places = new Map(groups.map((group) => [group, new Map(group.last.map((step, at) => [step, at]))]));
  const begins = new Map(groups.flatMap((group) => group.last.map((step, at): [number, number] => [step, group.first[at]!])));
  const columnOf = parts.map(({ rows }) => {
    const known = places.get(rows.group)!;
    return steps.map((step) => known.get(step) ?? -1);
  });
  return {
    rows: parts.length,
    columns: steps.length,
    steps,
    at: (row, column) => {
      const { rows, row: place } = parts[row]!;
      const here = columnOf[row]![column]!;
      return here < 0 ? NaN : rows.values[place * rows.columns + here]!;
    },
    rowName: (row) => parts[row]!.name,
    columnName: (column) => {
      const [low, high] = [begins.get(steps[column]!)!, steps[column]!];
      return low === high ? `step ${high}` : `steps ${low} to ${high}`;
    },
    first: (column) => begins.get(steps[column]!)!,
    last: (column) => steps[column]!,
  };
}

interface Folded extends Gathered {
  members(row: number): number;
  pathOf(row: number): string;
}

/** Rows below a level of the tree of modules as one, which shows the largest of them; those of `opened` paths stay. */
export function folded(cells: Gathered, depth: number, opened: string[]): Folded {
  const rows: { path: string; members: number[] }[] = [];
  for (let row = 0; row < cells.rows; row++) {
    const name = cells.rowName(row);
    const parts = pathOf(name).split(".");
    const path = parts.slice(0, depth).join(".");
    const isAlone = depth < 1 || parts.length <= depth || opened.includes(path);
    const before = rows[rows.length - 1];
    if (!isAlone && before?.path === path) before.members.push(row);
    else rows.push({ path: isAlone ? name : path, members: [row] });
  }
  return {
    ...cells,
    rows: rows.length,
    at: (row, column) => {
      let found = NaN;
      for (const member of rows[row]!.members) {
        const value = cells.at(member, column);
        if (Number.isNaN(found) || value > found) found = value;
      }
      return found;
    },
    rowName: (row) => {
      const { path, members } = rows[row]!;
      return members.length > 1 ? `${path} (${members.length})` : cells.rowName(members[0]!);
    },
    members: (row) => rows[row]!.members.length,
    pathOf: (row) => rows[row]!.path,
  };
}

function hasValue({ values, columns }: Rows, row: number): boolean {
  for (let at = row * columns; at < (row + 1) * columns; at++) if (!Number.isNaN(values[at])) return true;
  return false;
}
