// Where two runs, or two models, part.

import { filter, h, select, table } from "../dom";
import { matches, number } from "../format";
import type { View } from "../view";

export const diff: View = {
  key: "diff",
  title: "Difference",
  what: "where the two part, first of all",
  isShown: (page) => page.source.head.diff !== undefined,
  draw(page) {
    const known = page.source.head.diff!;
    const options = page.route.options;
    const [state, words] = [options.get("state") ?? "", options.get("filter") ?? ""];
    const again = (more: Record<string, string>) => page.go("diff", { state, filter: words, ...more }, true);
    const states = [...new Set(known.rows.map((row) => row.state))];
    const rows = known.rows.filter((row) => (!state || row.state === state) && matches(`${row.site} ${row.other}`, words));
    const hasSteps = known.rows.some((row) => row.step !== null);
    const cells = rows.slice(0, 5000).map((row) => [
      row.phase,
      ...(hasSteps ? [row.step === null ? "" : String(row.step)] : []),
      row.site,
      row.other === row.site ? "" : row.other,
      h("span", { class: `state ${row.state.replace(/ /g, "-")}` }, row.state),
      row.delta === null ? "inf" : number(row.delta),
      number(row.tolerance),
      row.number,
      row.a,
      row.b,
      row.how,
    ]);
    return h(
      "div",
      {},
      h("p", { class: `verdict ${known.parted ? "warning" : "fine"}` }, known.verdict),
      h("p", { class: "quiet" }, `A is ${known.a}, B is ${known.b}`),
      h("div", { class: "controls" }, select("state", [["", "all"], ...states.map((one): [string, string] => [one, one])], state, (value) => again({ state: value })), filter("filter sites", words, (value) => again({ filter: value }))),
      table(["phase", ...(hasSteps ? ["step"] : []), "site of A", "site of B", "state", "difference", "tolerance", "number", "A", "B", "matched by"], cells, hasSteps ? [1, 5, 6] : [4, 5]),
      known.only_a.length > 0 && h("p", {}, `only in A: ${known.only_a.join(", ")}`),
      known.only_b.length > 0 && h("p", {}, `only in B: ${known.only_b.join(", ")}`),
      ...known.notes.map((note) => h("p", { class: "quiet" }, note)),
    );
  },
};
