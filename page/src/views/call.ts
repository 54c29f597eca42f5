// One call: all its numbers, its picture and that of its gradient.

import { copyable, h, table } from "../dom";
import { bytes, count, duration, python } from "../format";
import type { Trace } from "../types";
import type { Page, View } from "../view";
import { cards } from "./pictures";
import { childrenOf, gradient, numbersOf, ownTime, traceOf } from "./trace";

export const call: View = {
  key: "call",
  title: "Call",
  what: "one call: all of its numbers and pictures",
  isShown: () => false,
  async draw(page) {
    const trace = traceOf(page);
    const at = Number(page.route.options.get("at") ?? 0);
    const row = trace.rows[at];
    if (!row) return h("p", {}, `there is no call ${at}`);
    const step = (by: number, text: string) => trace.rows[at + by] && h("a", { class: "button", href: page.link("call", { at: at + by }), title: by < 0 ? "the one before (k)" : "the next (j)", label: by < 0 ? "the call before" : "the next call" }, text);
    return h(
      "div",
      {},
      h("div", { class: "controls" }, h("a", { href: page.link("calls") }, "all calls"), step(-1, "‹"), h("h2", {}, row.path ? row.site : trace.model), step(1, "›")),
      ...facts(page, trace, at),
      h("div", { class: "gallery" }, ...(await cards(page, trace.pictures.filter((one) => one.site === row.site || one.site === `${row.site}:grad_output` || one.site === `${row.site}:output`)))),
    );
  },
};

/** What is known of a call, as tables and links; `view`: where the links to other calls lead. */
export function facts(page: Page, trace: Trace, at: number, view = "call"): (HTMLElement | false)[] {
  const row = trace.rows[at]!;
  const { inside } = childrenOf(trace.rows);
  const known: [string, string][] = [
    ["class", row.cls], ["input", row.input], ["output", row.output], ["type", row.dtype], ["own parameters", count(row.parameters)],
    ["time", duration(row.time_s)], ["own time", inside[at]!.length ? duration(ownTime(trace.rows, inside, at)) : ""], ["FLOPs", row.flops ? count(row.flops) : ""], ["output size", bytes(row.memory_bytes)],
    ["mean, std, min, max", numbersOf(row).join(", ")], ["norm of the gradient at its output", gradient(row.grad_output)], ["norm of its own share of the gradient at its input", gradient(row.grad_input)],
  ];
  const makers = trace.edges.filter(([, to, isKnown]) => isKnown && to === at).map(([from]) => from);
  const end = trace.rows.findIndex((one, place) => place > at && one.depth <= row.depth);
  const last = (end < 0 ? trace.rows.length : end) - 1; // the last call inside, whose output is this one's as a rule
  const takers = [...new Set(trace.edges.filter(([from, to, isKnown]) => isKnown && (from === at || (from === last && to > last))).map(([, to]) => to))];
  const { options } = page.route;
  const links = (title: string, places: number[]) =>
    places.length > 0 && h("p", {}, `${title}: `, ...places.flatMap((one) => [h("a", { href: page.link(view, { ...(view === "call" ? {} : Object.fromEntries(options)), at: one }) }, trace.rows[one]!.site || trace.model), " "]));
  const weights = trace.parameters.filter((one) => ownerOf(one.site) === row.path && row.parameters > 0);
  return [
    copyable(`gaff.capture(model, ${python(row.site || ":output")})`),
    table(["", ""], known.filter(([, value]) => value && value !== ", , , ")),
    weights.length > 0 && table(["parameter", "shape", "gradient norm"], weights.map((one) => [one.site, one.shape, one.requires_grad ? gradient(one.grad) : "frozen"])),
    links("input comes from", makers),
    links("output goes to", takers),
  ];
}

function ownerOf(site: string): string {
  return site.replace(/:param$/, "").split(".").slice(0, -1).join(".");
}
