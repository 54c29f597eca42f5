// One site: its values over time, and how its magnitudes were spread; forward on the left, its gradient on the right.

import { copyable, h } from "../dom";
import { lowerEdge, share } from "../decode";
import { matches, number, pathOf, portOf, python } from "../format";
import { heat, spansOf } from "../heat";
import type { Curve } from "../lines";
import { phasesOf, seriesOf, type SiteSeries, siteNamed } from "../rundata";
import type { Source } from "../source";
import { stepChart } from "../steps";
import type { Run } from "../types";
import type { Page, View } from "../view";

// Powers of two at which a number rounds to zero, or to infinity, in a format: see gaff/statistics/rows.py.
const LIMITS: [string, number, number][] = [
  ["float16", -25, 16],
  ["float8 e4m3", -10, 9],
  ["float8 e5m2", -17, 16],
  ["bfloat16", -126, 128],
];
const SHARES = ["zeros", "dead", "saturated", "entropy", "first_key", "choice", "idle", "dropped"];
const OTHERS = ["outlier", "logit", "load", "update_ratio", "adam_rms", "momentum", "lr", "nonfinite"];

export const site: View = {
  key: "site",
  title: "Site",
  what: "one site: curves, and its magnitudes over time with the limits of precision",
  isShown: (page) => page.run.sites.length > 0,
  async draw(page) {
    const wanted = page.route.options.get("site") ?? firstSite(page.run);
    const at = siteNamed(page.run, wanted);
    const picker = choose(page, wanted);
    if (at < 0) return h("div", {}, picker, h("p", {}, `no site ${wanted} in ${page.run.name}`), nearest(page, wanted));
    const partner = partnerOf(page.run, at);
    const sides = await Promise.all([at, ...(partner >= 0 ? [partner] : [])].map((one) => side(page, one)));
    return h("div", {}, picker, h("div", { class: "sides" }, ...sides));
  },
};

/** Where the worst finding is, if it is anywhere: it tells most. */
function firstSite(run: Run): string {
  const found = run.findings.flatMap((one) => [one.address, one.site]).find((name) => siteNamed(run, name) >= 0);
  return found ?? run.sites[0]?.[2] ?? "";
}

/** A field with all sites, and the next and the one before (keys j and k). */
function choose(page: Page, wanted: string): HTMLElement {
  const list = h("datalist", { id: "sites" });
  const field = h("input", { value: wanted, label: "site", class: "filter long" });
  field.setAttribute("list", "sites");
  field.addEventListener("focus", () => list.replaceChildren(...page.run.sites.slice(0, 5000).map(([, , name]) => h("option", { value: name }))), { once: true });
  field.addEventListener("change", () => page.go("site", { site: field.value }));
  const at = siteNamed(page.run, wanted);
  const step = (by: number, text: string, title: string) => {
    const target = page.run.sites[at + by];
    return target && at >= 0 && h("a", { class: "button", href: page.link("site", { site: target[2] }), title }, text);
  };
  return h("div", { class: "controls" }, h("span", { class: "quiet" }, `site (${page.run.sites.length} to choose from)`), step(-1, "‹", "the one before (k)"), field, step(1, "›", "the next (j)"), list);
}

function nearest(page: Page, wanted: string): HTMLElement {
  const words = wanted.split(/[.:]/).filter(Boolean).slice(-1)[0] ?? "";
  const near = page.run.sites.filter(([, , name]) => matches(name, words)).slice(0, 20);
  return h("ul", {}, ...near.map(([, , name]) => h("li", {}, h("a", { href: page.link("site", { site: name }) }, name))));
}

/** The other direction of a stream: the gradient at an output, the gradient of a parameter. */
export function partnerOf(run: Run, at: number): number {
  const [model, address] = run.sites[at]!;
  const other: Record<string, string> = { output: "grad_output", grad_output: "output", param: "grad", grad: "param", update: "param" };
  const port = other[portOf(address)];
  if (port === undefined) return -1;
  return run.sites.findIndex((one) => one[0] === model && portOf(one[1]) === port && pathOf(one[1]) === pathOf(address) && keyOf(one[1]) === keyOf(address));
}

function keyOf(address: string): string {
  return /(\[[^:]*\])$/.exec(address)?.[1] ?? "";
}

async function side(page: Page, at: number): Promise<HTMLElement> {
  const name = page.run.sites[at]![2];
  const parts: HTMLElement[] = [];
  for (const phase of phasesOf(page.run)) {
    const [mean, min, max, rms] = await Promise.all(["mean", "min", "max", "rms"].map((stat) => seriesOf(page.source, page.run, at, stat, phase)));
    if (!rms) continue;
    parts.push(h("h3", {}, phase === "train" ? "rms" : `rms, ${phase}`));
    parts.push(stepChart(page, { title: `rms of ${name}, ${phase}`, ...(await laidOver(page, name, phase, rms)), isLog: rms.values.some((value) => value > 0), height: 180 }));
    const extremes = [["largest", max], ["mean", mean], ["smallest", min]].filter((one): one is [string, SiteSeries] => one[1] !== null);
    if (extremes.length) {
      parts.push(h("h3", {}, "smallest, mean, largest"));
      parts.push(stepChart(page, { title: `smallest, mean, largest of ${name}, ${phase}`, x: rms.x, curves: extremes.map(([title, one]) => ({ name: title, values: one.values })), isLog: false, height: 180 }));
    }
    parts.push(...(await magnitudes(page, at, phase)));
    parts.push(...(await further(page, at, phase)));
  }
  const findings = page.run.findings.filter((one) => [one.address, one.site, ...one.also].includes(name));
  return h(
    "section",
    { class: "side" },
    h("h2", {}, h("a", { href: page.link("site", { site: name }) }, name)),
    ...findings.map((one) => h("p", { class: `verdict ${one.severity}` }, `${one.rule.replaceAll("_", " ")}: ${one.message}`)),
    h("p", { class: "quiet" }, "in Python: ", copyable(`record.series(${python(name)}, "rms")`), ["update"].includes(portOf(name)) ? null : copyable(`gaff.capture(model, ${python(page.run.sites[at]![1])})`)),
    ...(parts.length ? parts : [h("p", { class: "quiet" }, "no numbers of this site")]),
  );
}

async function laidOver(page: Page, name: string, phase: string, own: SiteSeries): Promise<{ x: number[]; curves: Curve[] }> {
  const curves: Curve[] = [{ name: page.runs.length > 1 ? page.run.name : "rms", values: own.values, ...(own.low ? { low: own.low } : {}) }];
  let x = own.x;
  for (const run of page.runs) {
    if (run === page.run) continue;
    const at = siteNamed(run, name);
    const other = at < 0 ? null : await seriesOf(page.source, run, at, "rms", phase);
    if (!other) continue;
    const all = [...new Set([...x, ...other.x])].sort((a, b) => a - b);
    const spread = (from: number[], values: ArrayLike<number | null>) => {
      const known = new Map(from.map((step, place) => [step, values[place]]));
      return all.map((step) => known.get(step) ?? null);
    };
    for (const curve of curves) {
      curve.values = spread(x, curve.values);
      if (curve.low) curve.low = spread(x, curve.low);
    }
    curves.push({ name: run.name, values: spread(other.x, other.values), isDashed: true });
    x = all;
  }
  return { x, curves };
}

async function further(page: Page, at: number, phase: string): Promise<HTMLElement[]> {
  const found: HTMLElement[] = [];
  const shares = await Promise.all(SHARES.map((stat) => seriesOf(page.source, page.run, at, stat, phase)));
  const known = SHARES.map((name, place) => [name, shares[place]] as const).filter((one): one is [string, SiteSeries] => Boolean(one[1]));
  if (known.some(([, one]) => one.values.some((value) => value > 0))) {
    found.push(h("h3", {}, "shares of elements, or of units"));
    found.push(stepChart(page, { title: `shares of ${page.run.sites[at]![2]}, ${phase}`, x: known[0]![1].x, curves: known.map(([name, one]) => ({ name, values: one.values })), isLog: false, height: 140 }));
  }
  for (const stat of OTHERS) {
    const one = await seriesOf(page.source, page.run, at, stat, phase);
    if (one && one.values.some((value) => value !== 0 && !Number.isNaN(value))) {
      found.push(h("h3", {}, stat.replace("_", " ")));
      found.push(stepChart(page, { title: `${stat} of ${page.run.sites[at]![2]}, ${phase}`, x: one.x, curves: [{ name: stat, values: one.values, ...(one.low ? { low: one.low } : {}) }], isLog: stat !== "lr" && stat !== "nonfinite", height: 120 }));
    }
  }
  return found;
}

interface Spread {
  marks: number[];
  share(bucket: number, mark: number): number;
}

/** How the magnitudes of a site were spread, look by look. */
export async function spreadOf(source: Source, run: Run, at: number, phase: string): Promise<Spread | null> {
  for (const group of run.groups) {
    const row = group.phase === phase ? group.sites.indexOf(at) : -1;
    const chunk = row < 0 ? undefined : group.magnitudes[Math.floor(row / group.together)];
    if (chunk === undefined) continue;
    const { values, shape } = await source.table(chunk);
    const [, buckets, marks] = shape as [number, number, number];
    const base = (row % group.together) * buckets * marks;
    return { marks: group.marks, share: (bucket, mark) => share(values[base + bucket * marks + mark]!) };
  }
  return null;
}

async function magnitudes(page: Page, at: number, phase: string): Promise<HTMLElement[]> {
  const spread = await spreadOf(page.source, page.run, at, phase);
  if (!spread || !spread.marks.length) return [];
  const known = Array.from({ length: 64 }, (_, bucket) => bucket).filter((bucket) => spread.marks.some((_, mark) => spread.share(bucket, mark) > 0));
  if (!known.length) return [];
  const low = Math.max(0, Math.min(...known) - 2);
  const high = Math.min(63, Math.max(...known) + 2);
  const lines = LIMITS.flatMap(([name, zero, inf]) => [
    { row: bucketAt(zero) - low, label: `${name}: zero below` },
    { row: bucketAt(inf) - low, label: `${name}: infinite above` },
  ]).filter((line) => line.row >= 0 && line.row <= high - low + 1);
  return [
    h("h3", {}, "magnitudes: the share of elements of each size over time, by powers of two"),
    heat(
      `magnitudes of ${page.run.sites[at]![2]}, ${phase}`,
      {
        rows: high - low + 1,
        columns: spread.marks.length,
        at: (row, column) => {
          const value = spread.share(row + low, column);
          return value > 0 ? value : NaN;
        },
        rowName: (row) => `2^${lowerEdge(row + low)} (${number(2 ** lowerEdge(row + low))})`,
        columnName: (column) => `step ${spread.marks[column]}`,
      },
      { isLog: true, height: 11, flip: true, lines, spans: spansOf(spread.marks, spread.marks, page.range) },
    ),
  ];
}

/** The bucket that begins at this power of two, or the first above. */
function bucketAt(exponent: number): number {
  for (let bucket = 0; bucket < 64; bucket++) if (lowerEdge(bucket) >= exponent) return bucket;
  return 64;
}
