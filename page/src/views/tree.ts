// The model as a tree: a line a module, coloured by what its latest look says.

import { shadeWith } from "../color";
import { filter, h } from "../dom";
import { count, matches, number, pathOf, percent, portOf } from "../format";
import { latestOf as lastOf } from "../rundata";
import type { Run } from "../types";
import type { Page, View } from "../view";

const SHARES = ["zeros", "dead units"]; // from none to all
const WIDE = 10; // a column whose values are nearer than this factor is not coloured

const COLUMNS: [string, string, string][] = [
  ["rms", "output", "rms"],
  ["gradient", "grad_output", "rms"],
  ["zeros", "output", "zeros"],
  ["dead units", "output", "dead"],
  ["not finite", "output", "nonfinite"],
  ["update ratio", "param", "update_ratio"],
];

interface Line {
  model: string;
  path: string;
  class: string;
  depth: number;
  cells: { value: number; site: string }[];
  wrong: string[];
}

export const tree: View = {
  key: "tree",
  title: "Model",
  what: "the model as a tree, with the latest numbers of every module",
  async draw(page) {
    const words = page.route.options.get("filter") ?? "";
    const lines = (await linesOf(page)).filter((line) => matches(`${line.path} ${line.class}`, words));
    const ranges = COLUMNS.map((_, at) => {
      const known = lines.map((line) => line.cells[at]!.value).filter((value) => value > 0 && Number.isFinite(value));
      return [Math.min(...known), Math.max(...known)] as const;
    });
    const field = filter("filter modules", words, (value) => page.go("tree", { filter: value }, true));
    const shown = COLUMNS.map((_, at) => at).filter((at) => lines.some((line) => !Number.isNaN(line.cells[at]!.value)));
    const head = ["module", "class", ...shown.map((at) => COLUMNS[at]![0]), "findings"];
    const body = lines.map((line) => row(page, line, shown, ranges));
    return h(
      "div",
      {},
      h("div", { class: "controls" }, field, h("span", { class: "quiet" }, `${count(lines.length)} modules, with the numbers of their latest look; lighter is larger within a column, on a logarithmic scale`)),
      h("div", { class: "wide tall", scroll: "tree", tabindex: 0, role: "region", label: "table of modules" }, h("table", { class: "tree" }, h("thead", {}, h("tr", {}, ...head.map((text, at) => h("th", { class: at > 1 && at < head.length - 1 ? "number" : "", scope: "col" }, text)))), h("tbody", {}, ...body))),
    );
  },
};

function row(page: Page, line: Line, shown: number[], ranges: (readonly [number, number])[]): HTMLElement {
  const name = h("td", { class: "path" });
  name.style.paddingLeft = `${0.5 + line.depth}em`;
  const site = line.cells.find((cell) => cell.site)?.site;
  const label = line.path === "" ? line.model || "the model" : line.path.slice(line.path.lastIndexOf(".") + 1);
  name.append(site ? h("a", { href: page.link("site", { site }), title: line.path }, label) : label);
  const cells = shown.map((at) => {
    const { value, site: target } = line.cells[at]!;
    const [low, high] = ranges[at]!;
    const isShare = SHARES.includes(COLUMNS[at]![0]);
    const cell = h("td", { class: "number" }, Number.isNaN(value) ? "" : isShare ? percent(value) : number(value));
    if (value === 0 && ["rms", "gradient"].includes(COLUMNS[at]![0])) cell.classList.add("state", "warning");
    else if (value > 0 && Number.isFinite(value) && (isShare || high > WIDE * low)) {
      const share = isShare ? value : Math.log(value / low) / Math.log(high / low);
      shadeWith(cell, share);
    }
    if (target) cell.title = target;
    return cell;
  });
  return h("tr", { class: line.wrong.length ? "wrong" : "" }, name, h("td", { class: "quiet" }, line.class), ...cells, h("td", {}, line.wrong.join(", ")));
}

/** Modules in the order of the model, or of their sites where the record has no list of modules. */
export async function linesOf(page: Pick<Page, "source" | "run">): Promise<Line[]> {
  const { run } = page;
  const values = await Promise.all(COLUMNS.map(([, port, stat]) => latestOf(page, port, stat)));
  const wrong = new Map<string, string[]>();
  for (const one of run.findings) {
    if (one.is_over) continue;
    for (const site of [one.site, ...one.also]) {
      const key = `${one.model}\n${ownerOf(site)}`;
      wrong.set(key, [...new Set([...(wrong.get(key) ?? []), one.rule])]);
    }
  }
  return modulesOf(run).map(([model, path, kind]) => ({
    model,
    path,
    class: kind,
    depth: path === "" ? 0 : path.split(".").length,
    cells: values.map((known) => known.get(`${model}\n${path}`) ?? { value: NaN, site: "" }),
    wrong: (wrong.get(`${model}\n${path}`) ?? []),
  }));
}

function modulesOf(run: Run): [string, string, string][] {
  const told = run.models.flatMap((model) => (model.modules ?? []).map(([path, kind]): [string, string, string] => [model.name, path, kind]));
  if (told.length) return told;
  const found = new Map<string, [string, string, string]>();
  for (const [model, address] of run.sites) {
    const path = ownerOf(address);
    if (!found.has(`${model}\n${path}`)) found.set(`${model}\n${path}`, [model, path, ""]);
  }
  return [...found.values()];
}

/** The module that a site belongs to: of a parameter the one that owns it. */
export function ownerOf(address: string): string {
  const path = pathOf(address);
  if (["param", "grad", "update"].includes(portOf(address))) return path.split(".").slice(0, -1).join(".");
  return path.replace(/^((?:`[^`]*`|[^`[])*)\[.*$/, "$1"); // not of a name in quotes
}

/** Of each module; of several parameters the largest. */
async function latestOf(page: Pick<Page, "source" | "run">, port: string, stat: string) {
  const found = new Map<string, { value: number; site: string }>();
  for (const group of page.run.groups) {
    const values = group.phase === "train" ? await lastOf(page.source, group, stat) : null;
    if (!values) continue;
    group.sites.forEach((site, at) => {
      const [model, address, name] = page.run.sites[site]!;
      if (portOf(address) !== port) return;
      const value = values[at]!;
      const key = `${model}\n${ownerOf(address)}`;
      const known = found.get(key);
      if (!Number.isNaN(value) && (known === undefined || value > known.value)) found.set(key, { value, site: name });
    });
  }
  return found;
}
