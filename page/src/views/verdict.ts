// What is wrong, first; then the curves of the run.

import { copyable, h } from "../dom";
import { evidence, percent, python } from "../format";
import { chart, type Curve } from "../lines";
import { scalarsOf, seriesOf, siteNamed } from "../rundata";
import type { Finding, Run } from "../types";
import type { Page, View } from "../view";

const SIGN: Record<string, string> = { error: "✖", warning: "▲", info: "●", fine: "✔" };

export const verdict: View = {
  key: "verdict",
  title: "Verdict",
  what: "what was found, where, since when, and what to do",
  async draw(page) {
    const { run } = page;
    const lasting = run.findings.filter((one) => !one.is_over);
    const over = run.findings.filter((one) => one.is_over);
    const cards = await Promise.all(lasting.map((one) => card(page, one)));
    const past = await Promise.all(over.map((one) => card(page, one)));
    return h(
      "div",
      {},
      h("p", { class: `verdict ${run.level}` }, h("span", { class: "sign" }, SIGN[run.level] ?? "●"), ` ${run.verdict}`),
      run.error && h("p", { class: "verdict error" }, `the run ended with ${run.error}`),
      !run.complete && h("p", { class: "quiet" }, page.source.head.live ? "the run goes on" : "the run goes on, or was killed: this is what it had written"),
      h("p", { class: "quiet" }, `looked at ${run.looks} of ${run.steps} steps; watching took ${percent(run.overhead)} of the time${run.overhead > 0.015 ? ", of which the first half second of a run is free" : ""}`),
      ...cards,
      await curves(page),
      past.length > 0 && h("h2", {}, "Over when the run ended"),
      ...past,
    );
  },
};

async function card(page: Page, finding: Finding): Promise<HTMLElement> {
  const names = [finding.address, ...finding.also];
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
      ` ${finding.rule} at `,
      site < 0 ? h("span", {}, finding.address) : h("a", { href: page.link("site", { site: known }) }, finding.address),
    ),
    h("p", {}, finding.message, h("span", { class: "quiet" }, ` (${extent}${share}${page.run.ranks.length > 1 ? `, rank ${finding.rank}` : ""})`)),
    finding.cause && h("p", {}, h("b", {}, "cause "), finding.cause),
    finding.remedy && h("p", {}, h("b", {}, "remedy "), finding.remedy),
    Object.keys(finding.evidence).length > 0 &&
      h(
        "dl",
        { class: "evidence" },
        ...Object.entries(finding.evidence).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, evidence(value))]),
      ),
    names.length > 1 && h("p", { class: "quiet" }, `also at ${finding.also.slice(0, 12).join(", ")}${finding.also.length > 12 ? ` and ${finding.also.length - 12} more` : ""}`),
    series && chart({ x: series.x, curves: [{ name: `${stat} of ${known}`, values: series.values }], isLog: series.values.some((value) => value > 0), height: 110, xName: "step", pick: () => page.go("site", { site: known }) }),
    finding.look && copyable(finding.look),
    site >= 0 && copyable(`record.series(${python(known)}, "rms")`),
  );
}

async function curves(page: Page): Promise<HTMLElement> {
  const shown: HTMLElement[] = [];
  const all = await Promise.all(page.runs.map((run) => scalarsOf(page.source, run)));
  const names = [...new Set(all.flatMap((one) => (one ? Object.keys(one.of) : [])))];
  const wanted = [...names.filter((name) => name.startsWith("loss:")), ...["grad_norm", "lr", "scale", "seconds"].filter((name) => names.includes(name))];
  for (const name of wanted) {
    const curve = overlaid(page.runs, all, name, page.run);
    const odd = page.run.scalars.odd?.[name];
    if (curve) shown.push(h("div", { class: "panel" }, h("h3", {}, title(name)), chart({ ...curve, isLog: isWide(curve.curves), height: 180, xName: "step" }), odd && h("p", { class: "verdict error" }, `not finite, or not there, at step ${odd.join(", ")}`)));
  }
  return h("div", { class: "panels" }, ...shown);
}

type Known = Awaited<ReturnType<typeof scalarsOf>>;

/** One curve for each run that has it, over all their steps. */
export function overlaid(runs: Run[], all: Known[], name: string, chosen: Run): { x: number[]; curves: Curve[] } | null {
  const having = runs.map((run, at) => ({ run, known: all[at] })).filter(({ known }) => known?.of[name]?.values.some((value) => !Number.isNaN(value)));
  if (!having.length) return null;
  if (having.length === 1) {
    const { known, run } = having[0]!;
    const { values, low } = known!.of[name]!;
    return { x: known!.x, curves: [{ name: runs.length > 1 ? run.name : name.replace("loss:", ""), values, ...(low ? { low } : {}) }] };
  }
  const x = [...new Set(having.flatMap(({ known }) => known!.x))].sort((a, b) => a - b);
  const place = new Map(x.map((step, at) => [step, at]));
  const curves = having.map(({ run, known }) => {
    const values: (number | null)[] = new Array(x.length).fill(null);
    known!.x.forEach((step, at) => (values[place.get(step)!] = known!.of[name]!.values[at]!));
    return { name: run.name, values, isDashed: run !== chosen };
  });
  return { x, curves };
}

function isWide(curves: Curve[]): boolean {
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

function title(name: string): string {
  const known: Record<string, string> = { grad_norm: "norm of all gradients", lr: "learning rate", scale: "scale of the loss", seconds: "seconds a step" };
  return known[name] ?? (name === "loss:loss" ? "loss" : name.replace("loss:", "loss "));
}
