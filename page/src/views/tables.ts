// Views that are tables: gradients of parameters, the first bad op, optimizer, changes, coverage.

import { filter, h, select, table } from "../dom";
import { duration, evidence, matches, number, percent } from "../format";
import { rowsOf, scalarsOf, siteNamed } from "../rundata";
import { stepChart } from "../steps";
import type { Reached } from "../types";
import type { Page, View } from "../view";
import { batchCards } from "./batches";
import { TITLES } from "./verdict";

const STATES = ["none", "zero", "tiny", "arrived", "not finite", "frozen"];

export const gradients: View = {
  key: "gradients",
  title: "Backward",
  what: "what reached each parameter: nothing, zero, a tiny gradient, a gradient, one that is not finite",
  isShown: (page) => page.run.gradients.length > 0,
  async draw(page) {
    const { run } = page;
    const options = page.route.options;
    const [state, words] = [options.get("state") ?? "", options.get("filter") ?? ""];
    const again = (more: Record<string, string>) => page.go("gradients", { ...Object.fromEntries(options), ...more }, true);
    const rows = run.gradients.filter((one) => (!state || one.state === state) && matches(one.path, words));
    const counts = STATES.map((one) => [one, run.gradients.filter((row) => row.state === one).length] as const);
    const scalars = await scalarsOf(page.source, run);
    const scale = lastKnown(scalars?.of.scale?.values ?? []);
    const several = run.models.length > 1;
    const head = ["parameter", "shape", "arrived", "norm", ...(scale > 1 ? ["norm, scaled"] : []), "rms", "weight rms", "update ratio", "at step"];
    const cells = rows.map((one) => {
      const name = `${several ? `${one.model}.` : ""}${one.path}`;
      const site = `${name}:grad`;
      return [
        siteNamed(run, site) >= 0 ? h("a", { href: page.link("site", { site }) }, name) : name,
        `${one.shape}${one.dtype && one.dtype !== "float32" ? ` ${one.dtype}` : ""}`,
        h("span", { class: `state ${one.state.replace(" ", "-")}` }, one.state),
        number(one.norm),
        ...(scale > 1 ? [number(one.norm === null ? null : one.norm * scale)] : []),
        number(one.rms),
        number(one.weight),
        number(one.ratio),
        one.step >= 0 ? String(one.step) : "",
      ];
    });
    return h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        select("arrived", [["", "all"], ...counts.filter(([, size]) => size).map(([one, size]): [string, string] => [one, `${one} (${size})`])], state, (value) => again({ state: value })),
        filter("filter parameters", words, (value) => again({ filter: value })),
      ),
      h("p", { class: "quiet" }, "Gradients as the optimizer had them at the latest look: unscaled, accumulated, reduced. Tiny is less than a millionth of the median gradient, or of the weight that it is to change. ", scale > 1 ? `A GradScaler multiplied the loss by ${number(scale)}: scaled is what arrived in backward.` : ""),
      table(head, cells, [3, 4, 5, 6, 7, 8], { by: options.get("sort") ?? "", again: (by) => again({ sort: by }), key: (at, column) => keyOf(rows[at]!, head[column]!) }),
    );
  },
};

/** What a row is put in order by. */
function keyOf(one: Reached, column: string): number | string | null {
  const known: Record<string, number | string | null> = { parameter: one.path, shape: one.shape, arrived: one.state, rms: one.rms, "weight rms": one.weight, "update ratio": one.ratio, "at step": one.step };
  return column in known ? known[column]! : one.norm;
}

function isConstant(values: number[]): boolean {
  return values.every((value) => value === values[0]);
}

function lastKnown(values: number[]): number {
  return values.filter((value) => !Number.isNaN(value)).at(-1) ?? NaN;
}

export const origin: View = {
  key: "origin",
  title: "First bad op",
  what: "the op in which the first NaN or inf began, and the ops before it",
  isShown: (page) => page.run.findings.some((one) => one.rule === "nonfinite"),
  async draw(page) {
    const found = page.run.findings.filter((one) => one.rule === "nonfinite");
    const batches = await batchCards(page);
    return h("div", {}, ...found.map((one) => {
      const chain = Array.isArray(one.evidence["chain"]) ? one.evidence["chain"].map(evidence) : null;
      return h(
        "section",
        { class: "card error" },
        h("h3", {}, `step ${one.since}: ${one.address}`),
        h("p", {}, one.message),
        h("p", {}, h("b", {}, "Cause: "), one.cause),
        h("p", {}, h("b", {}, "What to do: "), one.remedy),
        h("dl", { class: "evidence" }, ...Object.entries(one.numbers).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, Array.isArray(value) ? h("ul", {}, ...value.map((line) => h("li", {}, evidence(line)))) : evidence(value))])),
        chain && h("h3", {}, "the ops before it"),
        chain && h("ol", { class: "chain" }, ...chain.map((line) => h("li", {}, line))),
      );
    }), ...batches);
  },
};

const OTHERS: Record<string, string> = {
  skipped: "steps that a GradScaler has left out", samples: "samples in a step", update_ratio: "update ratio: what a step changes, over the parameter", adam_rms: "adam rms: root of the mean of g²/v", momentum: "norm of the first moment",
};

export const optimizer: View = {
  key: "optimizer",
  title: "Optimizer",
  what: "learning rate, update ratios, moments, skipped steps",
  isShown: (page) => page.run.groups.some((group) => group.group === "parameters"),
  async draw(page) {
    const { run } = page;
    const scalars = await scalarsOf(page.source, run);
    const panels: HTMLElement[] = [];
    for (const name of ["lr", "grad_norm", "scale", "skipped", "samples"]) {
      const known = scalars?.of[name];
      const title = TITLES[name] ?? OTHERS[name]!;
      if (known?.values.some((value) => value > 0) && !(name === "samples" && isConstant(known.values))) {
        panels.push(h("div", { class: "panel" }, h("h3", {}, title), stepChart(page, { title, x: scalars!.x, curves: [{ name, values: known.values, ...(known.low ? { low: known.low } : {}) }], isLog: name === "grad_norm" || name === "scale", height: 150 })));
      }
    }
    for (const stat of ["update_ratio", "adam_rms", "momentum"]) {
      const curves = await quantiles(page, stat);
      const zero = curves?.curves.filter((one) => one.values.every((value) => !(value > 0))).map((one) => one.name) ?? [];
      if (curves) panels.push(h("div", { class: "panel" }, h("h3", {}, OTHERS[stat]!), zero.length > 0 && h("p", { class: "quiet" }, `zero all the time, so not on this scale: ${zero.join(", ")}`), stepChart(page, { title: OTHERS[stat]!, ...curves, isLog: true, height: 180, ...(stat === "update_ratio" ? { bands: [{ from: 1e-4, to: 1e-1, label: "usual" }] } : {}) })));
    }
    const events = run.findings.filter((one) => ["loss_spike", "scaler_stuck"].includes(one.rule) || one.rule.includes("update"));
    return h("div", {}, h("div", { class: "panels" }, ...panels), events.length > 0 && h("h3", {}, "what happened"), events.length > 0 && table(["step", "rule", "what", "batch", "samples"], events.map((one) => [String(one.since), one.rule, one.message, evidence(one.evidence.batch ?? ""), evidence(one.evidence.samples ?? "")])));
  },
};

/**
 * Smallest, median and largest over all parameters, look by look. Of a look at which some were read the others count with
 * what was read of them last, for optimizers step by turns; a look at which none was read is a gap.
 */
async function quantiles(page: Page, stat: string) {
  const { run } = page;
  const group = run.groups.find((one) => one.group === "parameters" && one.phase === "train");
  const rows = group ? await rowsOf(page.source, group, stat) : null;
  if (!group || !rows) return null;
  return { x: group.last, curves: spread(rows, group.last.length) };
}

/** The smallest, the largest and the median of each column of rows, as told above. */
export function spread(rows: { values: ArrayLike<number>; rows: number; columns: number }, looks: number) {
  const now = new Float64Array(rows.rows).fill(NaN); // the latest of each
  const sorted = Array.from({ length: looks }, (_, column) => {
    const known = new Float64Array(rows.rows);
    let count = 0;
    let wasRead = false;
    for (let row = 0; row < rows.rows; row++) {
      const here = rows.values[row * rows.columns + column]!;
      if (!Number.isNaN(here)) [now[row], wasRead] = [here, true];
      const value = now[row]!;
      if (Number.isFinite(value)) known[count++] = value;
    }
    return known.subarray(0, wasRead ? count : 0).sort();
  });
  const at = (share: number) => sorted.map((known) => (known.length ? known[Math.round(share * (known.length - 1))]! : NaN));
  return [{ name: "smallest", values: at(0), isDashed: true }, { name: "largest", values: at(1), isDashed: true }, { name: "median", values: at(0.5) }];
}

export const recorder: View = {
  key: "last",
  title: "Last steps",
  what: "the flight recorder: every one of the last steps, looked at or not",
  isShown: (page) => page.run.flight.length > 0,
  async draw(page) {
    const batches = await batchCards(page);
    const rows = [...page.run.flight].reverse();
    const names = [...new Set(rows.flatMap((row) => Object.keys(row.losses)))];
    const hasScale = rows.some((row) => row.scale !== null);
    const head = ["step", ...names, "learning rate", ...(hasScale ? ["loss scale"] : []), "samples", "time", "checksum of the batch"];
    const cells = rows.map((row) => [
      number(row.step),
      ...names.map((name) => (name in row.losses ? (row.losses[name] === null ? h("span", { class: "state error" }, "NaN or inf") : row.losses[name]!.toPrecision(4)) : "")),
      number(row.lr),
      ...(hasScale ? [number(row.scale)] : []),
      number(row.samples),
      row.seconds ? duration(row.seconds) : "did not end",
      row.batch,
    ]);
    return h(
      "div",
      {},
      h("p", { class: "quiet" }, "The latest first. Batches with the same checksum are the same, as far as their first 4 KiB tell."),
      table(head, cells, head.map((_, at) => at).slice(0, -1)),
      ...batches,
    );
  },
};

export const changes: View = {
  key: "changes",
  title: "Clips and edits",
  what: "what gaff's own clipping and edits did in this run",
  isShown: (page) => page.run.changes.length > 0,
  draw: (page) =>
    h("div", {}, ...page.run.changes.map((one) => h("section", { class: "card" }, h("h3", {}, one.what), h("p", { class: "quiet" }, `reported at step ${one.step}`), h("pre", {}, one.lines.join("\n"))))),
};

const HIDDEN = ["threads", "cuda", "rank", "seconds"]; // told otherwise already

export const coverage: View = {
  key: "coverage",
  title: "Coverage",
  what: "what was looked at, what was not, and what it cost",
  draw(page) {
    const { run } = page;
    const told = new Map<string, string>([
      ["folder", run.path],
      ["command", run.command],
      ["began", run.began],
      ["models", run.models.map((one) => `${one.name} (${one.class}${one.compiled ? ", compiled" : ""})`).join(", ")],
      ["sites", String(run.sites.length)],
      ["looks", `${run.looks} of ${run.steps} steps, the last of them step ${run.lastLook}`],
      ["overhead", run.about?.cost ?? ""],
      ["processes", run.ranks.length > 1 ? `${run.ranks.length}; tables of rank ${run.rank}` : "1"],
      ["ended", run.about?.ended ?? (run.complete ? "yes" : "no: the run goes on, or was killed")],
    ]);
    for (const [name, value] of [...(run.about?.settings ?? []), ...run.facts]) if (!told.has(name) && !name.startsWith("class of ") && !HIDDEN.includes(name)) told.set(name === "budget" ? "overhead allowed" : name, name === "budget" ? percent(Number(value)) : value);
    const rows = [...told].filter(([, value]) => value !== "");
    const kinds = run.groups.map((group) => [`${group.group}, ${group.phase}`, String(group.sites.length), String(group.first.length), group.last.some((last, at) => last !== group.first[at]) ? "several looks" : "one look"]);
    return h(
      "div",
      {},
      table(["", ""], rows),
      h("h3", {}, "numbers over time"),
      table(["kind", "sites", "points in time", "a point is of"], kinds, [1, 2]),
      run.notes.length > 0 && h("h3", {}, "notes"),
      h("ul", {}, ...run.notes.map((note) => h("li", {}, note))),
    );
  },
};
