// Any number of all sites over the whole run, on one screen.

import { filter, h, select } from "../dom";
import { matches, portOf } from "../format";
import { type Cells, heat } from "../heat";
import { phasesOf, rowsOf, type Rows, statsOf } from "../rundata";
import type { Source } from "../source";
import type { Run } from "../types";
import type { View } from "../view";

const LINEAR = ["zeros", "saturated", "entropy", "dead", "first_key", "choice", "idle", "dropped"];

export const map: View = {
  key: "map",
  title: "Time × depth",
  what: "one number of every site over time, as a heat map",
  isShown: (page) => page.run.groups.length > 0,
  async draw(page) {
    const options = page.route.options;
    const phase = options.get("phase") ?? "train";
    const stats = statsOf(page.run, phase);
    const stat = options.get("stat") ?? stats[0] ?? "rms";
    const port = options.get("port") ?? "";
    const words = options.get("filter") ?? "";
    const [begin, end] = [Number(options.get("from") ?? 0), Number(options.get("to") ?? Infinity)];
    const again = (more: Record<string, string | number | null>) =>
      page.go("map", { ...Object.fromEntries(options), ...more }, true);
    const zoomed = Number.isFinite(end) ? await page.source.zoom(begin, end) : null;
    const [source, run] = zoomed ? [zoomed, sameRun(zoomed, page.run)] : [page.source, page.run];
    const ports = [...new Set(run.sites.map((site) => portOf(site[1])))];
    const cells = await gather(source, run, { phase, stat, port, words, begin, end });
    const field = filter("filter sites", words, (value) => again({ filter: value }));
    return h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        select("number", stats.map((one) => [one, one]), stat, (value) => again({ stat: value })),
        phasesOf(run).length > 1 && select("phase", phasesOf(run).map((one) => [one, one]), phase, (value) => again({ phase: value })),
        select("port", [["", "all"], ...ports.map((one): [string, string] => [one, one])], port, (value) => again({ port: value })),
        field,
        Number.isFinite(end) && h("button", { type: "button", on: { click: () => again({ from: null, to: null }) } }, `steps ${begin} to ${end} ×`),
      ),
      h("p", { class: "quiet" }, `${cells.rows} sites in the order in which they were called; click opens one, dragging zooms into a range of steps`),
      heat(cells, {
        isLog: !LINEAR.includes(stat),
        height: cells.rows > 400 ? 4 : cells.rows > 120 ? 7 : 14,
        pick: (row) => page.go("site", { site: cells.rowName(row) }),
        brush: (from, to) => again({ from: cells.first(from), to: cells.last(to) }),
      }),
    );
  },
};

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

function hasValue({ values, columns }: Rows, row: number): boolean {
  for (let at = row * columns; at < (row + 1) * columns; at++) if (!Number.isNaN(values[at])) return true;
  return false;
}
