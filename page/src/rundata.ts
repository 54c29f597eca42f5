// Numbers of a run, found by site and name.

import type { Source } from "./source";
import type { End, Group, Run } from "./types";

export interface Rows {
  group: Group;
  rows: number;
  columns: number;
  values: ArrayLike<number>;
}

export interface SiteSeries {
  group: Group;
  x: number[];
  values: number[];
  low: number[] | null;
}

/** The latest number of each row of a group; null where there is none. */
export async function latestOf(source: Source, group: Group, stat: string): Promise<number[] | null> {
  const kept = group.stats[stat];
  if (kept?.now !== undefined) return Array.from((await source.table(kept.now)).values);
  const rows = await rowsOf(source, group, stat, "latest");
  return rows && group.sites.map((_, row) => latest(rows.values, row, rows.columns));
}

const ORDER: End[] = ["latest", "highest", "lowest"];

/** The table of one number of a group; `end`: of a bucket of looks, if it is kept. */
export async function rowsOf(source: Source, group: Group, stat: string, end?: End): Promise<Rows | null> {
  const kept = group.stats[stat];
  if (!kept) return null;
  const wanted = end && kept[end] !== undefined ? end : (["highest", "lowest", "latest"] as End[]).find((one) => kept[one] !== undefined);
  if (!wanted) return null;
  const table = await source.table(kept[wanted]!);
  return { group, rows: group.sites.length, columns: group.first.length, values: table.values };
}

/** One number of one site; null where it is not known. */
export async function seriesOf(source: Source, run: Run, site: number, stat: string, phase = "train"): Promise<SiteSeries | null> {
  for (const group of run.groups) {
    const row = group.phase === phase ? group.sites.indexOf(site) : -1;
    const kept = group.stats[stat];
    if (row < 0 || !kept) continue;
    const read = async (end: End) => {
      const found = await rowsOf(source, group, stat, end);
      return found ? Array.from({ length: found.columns }, (_, at) => found.values[row * found.columns + at]!) : null;
    };
    const main = ORDER.find((end) => kept[end] !== undefined);
    if (!main) continue;
    const values = (await read(main))!;
    if (values.every((value) => Number.isNaN(value))) return null;
    const low = main === "highest" && kept.lowest !== undefined ? await read("lowest") : null;
    return { group, x: group.last, values, low };
  }
  return null;
}

export function phasesOf(run: Run): string[] {
  return [...new Set(run.groups.map((group) => group.phase))];
}

export function statsOf(run: Run, phase: string): string[] {
  return [...new Set(run.groups.filter((group) => group.phase === phase).flatMap((group) => Object.keys(group.stats)))];
}

export function siteNamed(run: Run, name: string): number {
  const found = run.sites.findIndex((site) => site[2] === name);
  return found >= 0 ? found : run.sites.findIndex((site) => site[1] === name);
}

/** The last value of a row that is known, up to a column. */
export function latest(values: ArrayLike<number>, row: number, columns: number, end = columns - 1): number {
  for (let at = end; at >= 0; at--) {
    const value = values[row * columns + at]!;
    if (!Number.isNaN(value)) return value;
  }
  return NaN;
}

export interface Scalars {
  x: number[];
  of: Record<string, { values: number[]; low: number[] | null; mean: number[] }>; // highest, lowest and mean of a bucket
}

/** The curves of every step. */
export async function scalarsOf(source: Source, run: Run): Promise<Scalars | null> {
  if (run.scalars.chunk === undefined) return null;
  const high = await source.table(run.scalars.chunk);
  const low = run.scalars.low === undefined ? null : await source.table(run.scalars.low);
  const mean = run.scalars.mean === undefined ? high : await source.table(run.scalars.mean);
  const columns = high.shape[1]!;
  const row = (table: { values: ArrayLike<number> }, at: number) =>
    Array.from({ length: columns }, (_, column) => table.values[at * columns + column]!);
  const of: Scalars["of"] = {};
  run.scalars.names.forEach((name, at) => {
    of[name] = { values: row(high, at + 1), low: low && row(low, at + 1), mean: row(mean, at + 1) };
  });
  return { x: row(high, 0), of };
}
