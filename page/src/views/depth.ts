// The signal by depth: does it vanish or explode on its way, forward and back?

import { h, select } from "../dom";
import { pathOf, portOf } from "../format";
import { chart, type Curve } from "../lines";
import { latest, latestOf, rowsOf } from "../rundata";
import type { Run } from "../types";
import type { Page, View } from "../view";

const CURVES = 6;
const SHADES = ["#6fb1e8", "#5c97d2", "#8a8ec2", "#b58a92", "#d67f45", "#e8590c"]; // seen on white and on black
const HEALTHY = { from: 1e-4, to: 1e-1, label: "usual: 1e-4 to 1e-1" };

const PICTURES: [string, string, string][] = [
  ["rms of activations", "output", "rms"],
  ["rms of gradients at outputs", "grad_output", "rms"],
  ["rms of gradients of parameters", "grad", "rms"],
  ["update ratio of parameters", "param", "update_ratio"],
];

export const depth: View = {
  key: "depth",
  title: "Signal by depth",
  what: "activations, gradients and updates from the first layer to the last",
  isShown: (page) => page.run.groups.length > 0,
  async draw(page) {
    const steps = Math.min(50, Math.max(1, Math.round(Number(page.route.options.get("steps") ?? CURVES)) || CURVES));
    const panels = await Promise.all(PICTURES.map(([title, port, stat]) => panel(page, title, port, stat, steps)));
    return h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        select("looks", ["1", "3", "6"].map((one) => [one, one]), String(steps), (value) => page.go("depth", { steps: value }, true)),
        h("span", { class: "quiet" }, "blue: first steps, orange: last ones; a point for each module or parameter, in the order in which they were called"),
      ),
      h("div", { class: "panels" }, ...panels),
    );
  },
};

async function panel(page: Page, title: string, port: string, stat: string, wanted: number): Promise<HTMLElement> {
  const { sites, curves } = await byDepth(page, page.run, port, stat, wanted);
  if (!sites.length) return h("div", { class: "panel" }, h("h3", {}, title), h("p", { class: "quiet" }, "not in this record"));
  const zeros = sites.filter((_, at) => curves[curves.length - 1]!.values[at] === 0).map(pathOf);
  return h(
    "div",
    { class: "panel" },
    h("h3", {}, title),
    zeros.length > 0 && h("p", { class: "state warning" }, `zero at the latest look, so not on this scale: ${zeros.slice(0, 8).join(", ")}${zeros.length > 8 ? ` and ${zeros.length - 8} more` : ""}`),
    chart({
      title,
      x: sites.map((_, at) => at),
      curves,
      isLog: true,
      height: 260,
      xName: "layer",
      xText: (at) => sites[at] ?? "",
      pick: (at) => page.go("site", { site: sites[at]! }),
      ...(stat === "update_ratio" ? { bands: [HEALTHY] } : {}),
    }),
  );
}

/** Where a site comes in the forward pass: gradients are where their outputs are. */
function placesOf(run: Run): (site: number) => number {
  const key = (site: [string, string, string]) => `${site[0]}\n${site[1].replace(":grad_output", "").replace(":output", "")}`;
  const known = new Map<string, number>();
  run.sites.forEach((site, at) => portOf(site[1]) === "output" && known.set(key(site), at));
  return (site) => known.get(key(run.sites[site]!)) ?? site;
}

export async function byDepth(page: Pick<Page, "source">, run: Run, port: string, stat: string, wanted: number) {
  const sites: string[] = [];
  const curves: Curve[] = [];
  for (const group of run.groups) {
    const rows = group.phase === "train" ? await rowsOf(page.source, group, stat) : null;
    if (!rows) continue;
    const chosen = group.sites.map((site, row) => ({ site, row })).filter(({ site }) => portOf(run.sites[site]![1]) === port);
    if (!chosen.length) continue;
    const place = placesOf(run);
    chosen.sort((one, other) => place(one.site) - place(other.site));
    sites.push(...chosen.map(({ site }) => run.sites[site]![2]));
    const count = Math.min(wanted, rows.columns);
    const now = (await latestOf(page.source, group, stat))!;
    for (let at = 0; at < count; at++) {
      const column = count === 1 ? rows.columns - 1 : Math.round((at * (rows.columns - 1)) / (count - 1));
      const isLast = column === rows.columns - 1;
      const values = chosen.map(({ row }) => (isLast ? now[row]! : latest(rows.values, row, rows.columns, column))); // others step less often
      const isOne = isLast || group.first[column] === group.last[column];
      const color = SHADES[SHADES.length - count + at] ?? SHADES[SHADES.length - 1]!;
      curves.push({ name: isOne ? `step ${group.last[column]}` : `highest of steps ${group.first[column]} to ${group.last[column]}`, values, color });
    }
    break; // of several groups the first that has it
  }
  return { sites, curves };
}
