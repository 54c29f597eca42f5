// Several runs side by side: a verdict each, their losses, and in which settings they differ.

import { h, table } from "../dom";
import { duration, percent } from "../format";
import { scalarsOf } from "../rundata";
import type { Run } from "../types";
import type { View } from "../view";
import { lastLoss, lossChart, SIGN } from "./verdict";

export const runs: View = {
  key: "runs",
  title: "Runs",
  what: "the runs of this page side by side: verdicts, losses, settings that differ",
  isShown: (page) => page.runs.length > 1,
  async draw(page) {
    const scalars = await Promise.all(page.runs.map((run) => scalarsOf(page.source, run)));
    const losses = [...new Set(scalars.flatMap((one) => Object.keys(one?.of ?? {}).filter((name) => name.startsWith("loss:"))))];
    const evaluated = [...new Set(page.runs.flatMap((run) => (run.about?.evaluated ?? []).map(([name]) => name)))];
    const head = ["run", "verdict", "steps", "duration", ...losses.map((name) => `${name.replace("loss:", "")}, last step`), ...evaluated.map((name) => `evaluation (${name}), last`), "findings", "overhead", "end"];
    const rows = page.runs.map((run, at) => [
      h("a", { href: page.link("verdict", { run: at || null }) }, run.name),
      h("span", { class: `state ${run.level}` }, `${SIGN[run.level] ?? ""} ${run.about?.state ?? run.level}`),
      String(run.steps),
      run.about?.seconds ? duration(run.about.seconds) : "",
      ...losses.map((name) => run.about?.ends?.[name] ?? lastLoss(scalars[at]?.of[name]?.values)),
      ...evaluated.map((name) => (run.about?.evaluated ?? []).filter(([one]) => one === name).at(-1)?.[3] ?? ""),
      String(run.findings.filter((one) => !one.is_over).length),
      percent(run.about?.spent ?? run.overhead),
      run.about?.ended ?? "",
    ]);
    const numbers = head.map((_, at) => at).filter((at) => at > 1 && at < head.length - 1);
    const { same, differing } = settingsOf(page.runs);
    return h(
      "div",
      {},
      table(head, rows, numbers),
      ...page.runs.map((run) => h("section", { class: `card ${run.level}` }, h("h3", {}, run.name), h("p", { class: `verdict ${run.level}` }, run.verdict), ...(run.about?.evidence ?? []).map((one) => h("p", { class: "quiet" }, one)))),
      h("h2", {}, "Settings that differ"),
      differing.length ? table(["setting", ...page.runs.map((run) => run.name)], differing) : h("p", { class: "quiet" }, "None of those that the records tell: optimizer, model, batch, precision, device, torch, command."),
      h("p", { class: "quiet" }, `${same} other settings are equal in all runs.`),
      await lossChart(page),
    );
  },
};

/** Settings with the value of each run, where they are not equal. */
export function settingsOf(all: Run[]): { same: number; differing: string[][] } {
  const known = all.map((run) => new Map(run.about?.settings ?? []));
  const names = [...new Set(known.flatMap((one) => [...one.keys()]))];
  const rows = names.map((name) => [name, ...known.map((one) => one.get(name) ?? "not recorded")]);
  const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
  return { same: rows.length - differing.length, differing };
}
