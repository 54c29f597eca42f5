// Where two runs, or two models, part.

import { filter, h, select, table } from "../dom";
import { matches } from "../format";
import type { View } from "../view";

const MOST = 5000; // rows that are drawn

export const diff: View = {
  key: "diff",
  title: "Difference",
  what: "where the two part, first of all",
  isShown: (page) => page.source.head.diff !== undefined,
  draw(page) {
    const known = page.source.head.diff!;
    const options = page.route.options;
    const [state, words] = [options.get("state") ?? "", options.get("filter") ?? ""];
    const again = (more: Record<string, string>) => page.go("diff", { ...Object.fromEntries(options), ...more }, true);
    const states = [...new Set(known.rows.map((row) => row.state))];
    const rows = known.rows.filter((row) => (!state || row.state === state) && matches(`${row.site} ${row.other}`, words));
    const hasOther = known.rows.some((row) => row.other !== row.site);
    const hasSteps = known.rows.some((row) => row.step !== null);
    const shown = rows.length <= MOST ? rows : [...rows.filter((row) => row.state === "parted"), ...rows.filter((row) => row.state !== "parted")].slice(0, MOST);
    const cells = shown.map((row) => [
      row.site,
      ...(hasOther ? [row.other === row.site ? "" : row.other] : []),
      h("span", { class: `state ${row.state.replace(/ /g, "-")}` }, row.state === "parted" ? "differs" : row.state),
      row.number,
      row.a,
      row.b,
      row.size,
      row.allowed,
      row.phase,
      ...(hasSteps ? [row.step === null ? "" : String(row.step)] : []),
      ...(hasOther ? [row.how] : []),
    ]);
    const head = ["site", ...(hasOther ? ["site of B"] : []), "state", "number", "A", "B", "difference", "rounding or noise", "phase", ...(hasSteps ? ["step"] : []), ...(hasOther ? ["matched by"] : [])];
    const right = ["A", "B", "difference", "rounding or noise", "step"].map((one) => head.indexOf(one));
    const key = (at: number, column: number): number | string | null => {
      const row = shown[at]!;
      const name = head[column]!;
      return name === "difference" ? (row.delta ?? Infinity) : name === "rounding or noise" ? row.tolerance : name === "step" ? row.step : name === "A" ? Number(row.a) : name === "B" ? Number(row.b) : String(cells[at]![column] instanceof HTMLElement ? row.state : cells[at]![column]);
    };
    return h(
      "div",
      {},
      h("p", { class: `verdict ${known.parted ? "warning" : "fine"}` }, known.verdict),
      h("p", { class: "quiet" }, `A is ${known.a}, B is ${known.b}`),
      h("div", { class: "controls" }, select("state", [["", "all"], ...states.map((one): [string, string] => [one, one === "parted" ? "differs" : one])], state, (value) => again({ state: value })), filter("filter sites", words, (value) => again({ filter: value }))),
      rows.length > MOST && h("p", { class: "quiet" }, `${rows.length - MOST} of ${rows.length} rows are left out, those that differ last; a filter shows others`),
      table(head, cells, right, { by: options.get("sort") ?? "", key, again: (by) => again({ sort: by }) }),
      known.only_a.length > 0 && h("p", {}, `only in A: ${known.only_a.join(", ")}`),
      known.only_b.length > 0 && h("p", {}, `only in B: ${known.only_b.join(", ")}`),
      ...known.notes.map((note) => h("p", { class: "quiet" }, note)),
    );
  },
};
