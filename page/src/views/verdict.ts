// The first glance: what the run was, what is wrong and why, and the loss with what happened to it.

import { LINES } from "../color";
import { copyable, h, select } from "../dom";
import { duration, evidence, number, percent, python } from "../format";
import { type Curve, type Mark, smoothed } from "../lines";
import { scalarsOf, seriesOf, siteNamed } from "../rundata";
import { stepChart } from "../steps";
import type { About, Finding, Run } from "../types";
import type { Page, View } from "../view";

export const SIGN: Record<string, string> = { error: "✖", warning: "▲", info: "●", fine: "✔" };
const MOST_RATES = 12; // changes of the learning rate that are marked
const MOST_SAVED = 120; // steps at which files were saved, of more every second, third ...
const SMOOTHING = { "0": "none", "0.6": "light", "0.9": "medium", "0.97": "strong" };

export const verdict: View = {
  key: "verdict",
  title: "Verdict",
  what: "what the run was, what is wrong, where, since when, and what to do",
  async draw(page) {
    const { run } = page;
    const lasting = run.findings.filter((one) => !one.is_over);
    const over = run.findings.filter((one) => one.is_over);
    const [losses, others] = await Promise.all([lossChart(page), otherCharts(page)]);
    const cards = await Promise.all(lasting.map((one) => card(page, one)));
    const wrong = lasting.filter((one) => one.severity !== "info").length;
    const heading = wrong ? `${wrong} ${wrong === 1 ? "finding" : "findings"}${lasting.length > wrong ? `, and ${lasting.length - wrong} of note` : ""}` : "Of note, and nothing wrong";
    const past = await Promise.all(over.map((one) => card(page, one)));
    return h(
      "div",
      {},
      summary(page),
      ...told(page),
      losses,
      cards.length > 0 && h("h2", {}, heading),
      ...cards,
      others,
      past.length > 0 && h("h2", {}, "No longer seen when the run ended"),
      ...past,
    );
  },
};

/** What the run was, in a line of facts. */
function summary(page: Page): HTMLElement {
  const { run } = page;
  const { about } = run;
  const facts: [string, string, string][] = [["state", about?.state ?? run.level, run.level]];
  if (about) {
    facts.push(
      ["steps", `${run.steps}`, ""],
      ["duration", about.seconds === null ? "" : duration(about.seconds), ""],
      ["time per step", about.stepSeconds === null ? "" : duration(about.stepSeconds), ""],
      ["device", about.device, ""],
      ["end", about.ended, about.hasFailed ? "error" : ""],
      ["looked at", `${run.looks} of ${run.steps} steps`, ""],
      ["overhead", about.spent === null ? "not in the record" : about.steady === null ? percent(about.spent) : `${percent(about.steady)}, at first more`, ""],
      ["processes", run.ranks.length > 1 ? `${run.ranks.length}` : "", ""],
    );
  }
  const known = facts.filter(([, value]) => value !== "");
  return h(
    "section",
    { class: "summary", label: "the run" },
    h("dl", {}, ...known.map(([name, value, level]) => h("div", {}, h("dt", {}, name), h("dd", { class: level ? `state ${level}` : "", title: name === "overhead" ? about!.cost : value }, value)))),
    run.command && h("p", { class: "command" }, copyable(run.command)),
  );
}

/** The verdict, what shows it, what to do, and what to run to be sure. */
function told(page: Page): HTMLElement[] {
  const { run } = page;
  const { about } = run;
  const first = h("p", { class: `verdict ${run.level}` }, h("span", { class: "sign" }, SIGN[run.level] ?? "●"), ` ${about ? sentence(about.cause) : run.verdict}`, about && about.since !== null && h("span", { class: "quiet" }, ` since step ${about.since}`));
  if (!about) return [first];
  const parts: (HTMLElement | false)[] = [
    first,
    about.evidence.length > 0 && h("ul", { class: "because" }, ...about.evidence.map((one) => h("li", {}, one))),
    about.remedy !== "" && h("p", {}, h("b", {}, "What to do: "), about.remedy),
    ...about.next.map(([why, command]) => h("p", {}, h("b", {}, `${why === "to be sure" ? "To test this cause, run" : sentence(why)}: `), copyable(command))),
    ...others(about.others, true, "Also wrong"),
    ...others(about.others, false, "It may also be"),
    !run.complete && h("p", { class: "quiet" }, page.source.head.live ? "The run goes on." : `This is what the run had written (${run.about?.ended ?? "it goes on, or was killed"}).`),
  ];
  return parts.filter((one): one is HTMLElement => one !== false);
}

/** Other causes by name: those that are certain, or those that are not. */
function others(all: About["others"], isCertain: boolean, what: string): HTMLElement[] {
  const names = new Set(all.filter(([, , certainty]) => (certainty === "certain") === isCertain).map(([name]) => name.replaceAll("_", " ")));
  return names.size > 0 ? [h("p", { class: isCertain ? "" : "quiet" }, `${what}: ${[...names].join(", ")}`)] : [];
}

function sentence(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

async function card(page: Page, finding: Finding): Promise<HTMLElement> {
  const known = siteNamed(page.run, finding.address) >= 0 ? finding.address : finding.site;
  const site = siteNamed(page.run, known);
  const stat = finding.rule.includes("update") ? "update_ratio" : "rms";
  const series = site < 0 ? null : await seriesOf(page.source, page.run, site, stat);
  const extent = finding.is_over ? `from step ${finding.since} to ${finding.last}` : `since step ${finding.since}`;
  const share = finding.share < 0.995 ? `, in ${percent(finding.share)} of the looks` : "";
  return h(
    "section",
    { class: `card ${finding.severity}` },
    h(
      "h3",
      {},
      h("span", { class: "sign" }, SIGN[finding.severity] ?? ""),
      ` ${finding.rule.replaceAll("_", " ")}${finding.model || finding.site ? " at " : ""}`,
      !finding.model && !finding.site ? "" : site < 0 ? h("span", {}, finding.address) : h("a", { href: page.link("site", { site: known }) }, finding.address),
    ),
    h("p", {}, finding.message, h("span", { class: "quiet" }, ` (${extent}${share}${page.run.ranks.length > 1 ? `, rank ${finding.rank}` : ""})`)),
    finding.cause && h("p", {}, h("b", {}, "Cause: "), finding.cause),
    finding.remedy && h("p", {}, h("b", {}, "What to do: "), finding.remedy),
    Object.keys(finding.numbers).length > 0 &&
      h(
        "dl",
        { class: "evidence" },
        ...Object.entries(finding.numbers).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, evidence(value))]),
      ),
    finding.also.length > 0 && h("p", { class: "quiet" }, `Also at ${finding.also.slice(0, 12).join(", ")}${finding.also.length > 12 ? ` and ${finding.also.length - 12} more` : ""}`),
    series && stepChart(page, { title: `${stat} of ${known}`, x: series.x, curves: [{ name: `${stat} of ${known}`, values: series.values }], marks: [markOf(finding)], isLog: series.values.some((value) => value > 0), height: 110, pick: () => page.go("site", { site: known }) }),
    h("p", { class: "copies" }, finding.look && copyable(finding.look), site >= 0 && copyable(`record.series(${python(known)}, "rms")`)),
  );
}

function markOf(finding: Finding): Mark {
  return { x: finding.since, label: finding.rule.replaceAll("_", " "), text: `${finding.rule.replaceAll("_", " ")}${finding.model || finding.site ? ` at ${finding.address}` : ""}: ${finding.message}`, level: finding.severity };
}

/** The loss, trained and evaluated, with all that happened. */
export async function lossChart(page: Page): Promise<HTMLElement | false> {
  const all = await Promise.all(page.runs.map((run) => scalarsOf(page.source, run)));
  const names = [...new Set(all.flatMap((one) => (one ? Object.keys(one.of).filter((name) => name.startsWith("loss:")) : [])))];
  const isMany = page.runs.length > 1;
  const curves: { x: number[]; curve: Curve }[] = [];
  const weight = Number(page.route.options.get("smooth") ?? 0) || 0;
  let next = 0;
  for (const name of names) {
    page.runs.forEach((run, at) => {
      const [known, table] = [all[at]?.of[name], all[at]];
      if (!known || !table || !known.values.some((value) => !Number.isNaN(value))) return;
      const color = LINES[next++ % LINES.length]!;
      const title = [isMany && run.name, names.length > 1 || !isMany ? name.replace("loss:", "") : ""].filter(Boolean).join(" ");
      const { values, low, mean } = known;
      const each = low && table.x.length > 1 ? (table.x.at(-1)! - table.x[0]!) / (table.x.length - 1) : 1; // steps in a bucket
      if (weight > 0) curves.push({ x: table.x, curve: { name: `${title}, as it was`, values, color, isFaint: true } });
      curves.push({ x: table.x, curve: { name: title, values: weight > 0 ? smoothed(mean, weight ** each) : values, color, isDashed: isMany && run !== page.run, ...(low && !weight ? { low } : {}) } });
    });
  }
  for (const run of page.runs) {
    const told = run.about?.evaluated ?? [];
    for (const name of new Set(told.map(([one]) => one))) {
      const own = told.filter(([one]) => one === name);
      const color = isMany ? LINES[page.runs.indexOf(run) % LINES.length]! : LINES[next++ % LINES.length]!;
      curves.push({ x: own.map(([, step]) => step), curve: { name: `${isMany ? `${run.name} ` : ""}evaluation (${name})`, values: own.map(([, , value]) => value), color, isSparse: true } });
    }
  }
  if (!curves.length) return false;
  const joined = onOneAxis(curves);
  const wanted = page.route.options.get("scale") ?? "auto";
  const isLog = wanted === "log" || (wanted === "auto" && isWide(joined.curves));
  const rates = all[page.runs.indexOf(page.run)];
  const marks = [...eventsOf(page.run), ...savedFiles(page.run.about?.saved ?? []), ...(rates?.of.lr ? rateChanges(rates.x, rates.of.lr.values) : [])].sort((one, other) => one.x - other.x);
  const again = (more: Record<string, string>) => page.go(page.route.view || "verdict", { ...Object.fromEntries(page.route.options), ...more }, true);
  const odd = names.flatMap((name) => (page.run.scalars.odd?.[name] ? [{ name, ...page.run.scalars.odd[name] }] : []));
  return h(
    "section",
    { class: "panel" },
    h(
      "div",
      { class: "controls" },
      h("h2", {}, names.length > 1 ? "Losses" : "Loss"),
      select("smoothing", Object.entries(SMOOTHING), String(weight), (value) => again({ smooth: value === "0" ? "" : value })),
      select("scale", ["auto", "linear", "log"].map((one) => [one, one]), wanted, (value) => again({ scale: value })),
      h("span", { class: "quiet" }, "drag to zoom all charts, double click for all steps"),
    ),
    stepChart(page, { title: "loss", ...joined, isLog, height: 280, marks }),
    ...odd.map(({ name, count, steps }) => h("p", { class: "verdict error" }, `${name.replace("loss:", "")} is NaN or infinite, or was not computed, at ${count} of ${page.run.steps} steps: ${steps.join(", ")}${count > steps.length ? " ..." : ""}`)),
    marks.length > 0 && events(page, marks),
  );
}

/** Curves with steps of their own over the steps of all of them. */
export function onOneAxis(given: { x: ArrayLike<number>; curve: Curve }[]): { x: number[]; curves: Curve[] } {
  const x = [...new Set(given.flatMap((one) => Array.from(one.x)))].sort((a, b) => a - b);
  const place = new Map(x.map((step, at) => [step, at]));
  const curves = given.map(({ x: own, curve }) => {
    const spread = (from: ArrayLike<number | null>) => {
      const values: (number | null)[] = new Array(x.length).fill(NaN);
      Array.from(own).forEach((step, at) => (values[place.get(step)!] = from[at]!));
      return values;
    };
    return { ...curve, values: spread(curve.values), ...(curve.low ? { low: spread(curve.low) } : {}) };
  });
  return { x, curves };
}

/** What is marked on the curves: findings, steps that were left out, what gaff's own clips and edits told. */
export function eventsOf(run: Run): Mark[] {
  const first = new Map<string, Finding>(); // of one rule the first tells most
  for (const one of run.findings) {
    const known = first.get(one.rule);
    if (!known || one.since < known.since) first.set(one.rule, one);
  }
  const marks = [...first.values()].map(markOf);
  marks.push(...run.findings.filter((one) => one.is_over).map((one): Mark => ({ x: one.last, label: "over", text: `${one.rule.replaceAll("_", " ")} at ${one.address} was seen for the last time`, level: "quiet" })));
  marks.push(...run.changes.map((one): Mark => ({ x: one.step, label: one.what, text: `${one.what}: told at step ${one.step}`, level: "quiet" })));
  return marks.sort((one, other) => one.x - other.x);
}

/** Where the learning rate jumps, by a fifth or more from one step to the next; no stretch in which it always changes. */
export function rateChanges(x: number[], rates: ArrayLike<number>): Mark[] {
  const found: Mark[] = [];
  const jumps = (at: number) => at >= 1 && at < x.length && rates[at - 1]! > 0 && rates[at]! > 0 && Math.abs(Math.log(rates[at]! / rates[at - 1]!)) > 0.2;
  for (let at = 1; at < x.length; at++) {
    if (!jumps(at) || jumps(at - 1) || jumps(at + 1)) continue;
    found.push({ x: x[at]!, label: "lr", text: `the learning rate goes from ${number(rates[at - 1]!)} to ${number(rates[at]!)}`, level: "quiet" });
  }
  return found.length <= MOST_RATES ? found : [];
}

/** Where files were saved, a small mark a step; of very many only some, among them the last. */
export function savedFiles(saved: [number, string][]): Mark[] {
  const bySteps = new Map<number, string[]>();
  for (const [made, file] of saved) bySteps.set(made, [...(bySteps.get(made) ?? []), file]);
  const each = Math.ceil(bySteps.size / MOST_SAVED);
  const told = [...bySteps].filter((_, at) => (bySteps.size - 1 - at) % each === 0);
  return told.map(([made, files]) => ({ x: Math.max(0, made - 1), label: "saved", text: `after ${made} ${made === 1 ? "step" : "steps"}: ${[...new Set(files)].join(", ")}`, level: "quiet", isSmall: true }));
}

function events(page: Page, marks: Mark[]): HTMLElement {
  const shown = marks.slice(0, 30);
  return h(
    "details",
    { class: "numbers" },
    h("summary", {}, marks.length === 1 ? "the event that is marked" : `the ${marks.length} events that are marked`),
    h("ul", { class: "events" }, ...shown.map((one) => h("li", {}, h("button", { type: "button", class: "link", on: { click: () => page.zoom([Math.max(0, one.x - 20), one.x + 20]) } }, `step ${one.x}`), h("span", { class: `state ${one.level}` }, ` ${one.label} `), one.text))),
  );
}

/** The norm of the gradients, the learning rate, the time of a step: of every step, of all runs. */
async function otherCharts(page: Page): Promise<HTMLElement> {
  const all = await Promise.all(page.runs.map((run) => scalarsOf(page.source, run)));
  const shown: HTMLElement[] = [];
  for (const [name, title] of Object.entries(TITLES)) {
    const having = page.runs.flatMap((run, at) => {
      const known = all[at]?.of[name];
      if (!known?.values.some((value) => !Number.isNaN(value))) return [];
      const low = known.low ? { low: known.low } : {};
      return [{ x: all[at]!.x, curve: { name: page.runs.length > 1 ? run.name : title, values: known.values, isDashed: run !== page.run, ...low } }];
    });
    if (!having.length) continue;
    const joined = onOneAxis(having);
    shown.push(h("div", { class: "panel" }, h("h3", {}, title), stepChart(page, { title, ...joined, isLog: isWide(joined.curves), height: 180, marks: eventsOf(page.run).filter((one) => one.level === "error") })));
  }
  return h("div", { class: "panels" }, ...shown);
}

export const TITLES: Record<string, string> = { grad_norm: "norm of all gradients together", lr: "learning rate", scale: "scale of the loss (GradScaler)", seconds: "seconds a step" };

export function isWide(curves: Curve[]): boolean {
  let [low, high] = [Infinity, 0];
  for (const { values } of curves) {
    for (const value of Array.from(values)) {
      if (value === null || !Number.isFinite(value)) continue;
      if (value <= 0) return false;
      [low, high] = [Math.min(low, value), Math.max(high, value)];
    }
  }
  return high > 30 * low;
}

/** The last value of a loss that is known, as text. */
export function lastLoss(values: ArrayLike<number | null> | undefined): string {
  const known = Array.from(values ?? []).filter((value): value is number => value !== null && !Number.isNaN(value));
  return known.length ? number(known[known.length - 1]) : "";
}
