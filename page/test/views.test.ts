import assert from "node:assert/strict";
import { test } from "node:test";
import { inkOn, ramp, signed } from "../src/color";
import { count, duration, evidence, matches, number, pathOf, percent, portOf, python } from "../src/format";
import { rangeOf, shade, spansOf, ticks } from "../src/heat";
import { decadesAround, drawable, logSplits, pauses, reach, smoothed } from "../src/lines";
import { read, write } from "../src/state";
import type { Source } from "../src/source";
import type { Group, Run, Trace } from "../src/types";
import { byDepth } from "../src/views/depth";
import { MEASURES, wholes } from "../src/views/cost";
import { visible } from "../src/views/graph";
import { folded, gather } from "../src/views/map";
import { grouped, valueOf } from "../src/views/pictures";
import { settingsOf } from "../src/views/runs";
import { partnerOf } from "../src/views/site";
import { spread } from "../src/views/tables";
import { childrenOf, ownTime } from "../src/views/trace";
import { linesOf, ownerOf } from "../src/views/tree";
import { onOneAxis, rateChanges, savedFiles } from "../src/views/verdict";

test("numbers are short and never hide what is odd", () => {
  assert.deepEqual([0, 1, 1234.5, 1e-9, -2.5e7, Infinity, -Infinity, NaN].map(number), ["0", "1", "1230", "1e-9", "-2.5e7", "not finite", "not finite", ""]);
  assert.equal(number(null), "");
  assert.deepEqual([0.5, 0.0123].map(percent), ["50 %", "1.2 %"]);
});

test("what a finding stands on is told without brackets of JSON", () => {
  assert.equal(evidence([2, 0.5]), "[2, 0.5]");
  assert.equal(evidence([{ name: "x", shape: [8, 3], min: -1 }, { name: "y", type: "int64" }]), "name x, shape [8, 3], min -1; name y, type int64");
  assert.equal(evidence(null), "null");
});

test("an axis does not go into the last digits of numbers that are alike", () => {
  const [low, high] = reach(0.4999999, 0.5000001) as [number, number];
  assert.ok(low < 0.48 && high > 0.52);
  assert.deepEqual(reach(0, 0), [-1, 1]);
  assert.deepEqual(reach(null, null), [null, null]);
  const [bottom, top] = reach(1, 3) as [number, number];
  assert.ok(bottom <= 1 && bottom > 0 && top >= 3 && top < 4);
});

test("over all parameters a look at which none was read is a gap, and those that step by turns keep their latest", () => {
  const rows = { rows: 2, columns: 4, values: [1, NaN, NaN, 2, NaN, NaN, 5, NaN] };
  const [smallest, largest] = spread(rows, 4) as [{ values: number[] }, { values: number[] }];
  assert.deepEqual(smallest.values, [1, NaN, 1, 2]);
  assert.deepEqual(largest.values, [1, NaN, 5, 5]);
});

test("addresses are taken apart at their port", () => {
  assert.deepEqual(["fc1", "fc1:grad_output", "lstm:output[0]", ":input", "`a:b`"].map(portOf), ["output", "grad_output", "output", "input", "output"]);
  assert.deepEqual(["fc1:grad_output", "lstm:output[0]"].map(pathOf), ["fc1", "lstm"]);
  assert.deepEqual(["a.b.weight:grad", "a.b:grad_output", "w:param", ":output"].map(ownerOf), ["a.b", "a.b", "", ""]);
});

test("texts are quoted for Python", () => {
  assert.equal(python('a"b\\c'), '"a\\"b\\\\c"');
  assert.equal(python("\u2028é"), '"\\u2028\\u00e9"');
});

test("every word of a filter must be there", () => {
  assert.ok(matches("Layer1.conv2", "conv layer"));
  assert.ok(!matches("layer1.conv2", "conv3"));
  assert.ok(matches("anything", ""));
});

test("what is shown is in the address, whatever it holds", () => {
  const { view, options } = read(write("site", { site: "a&b=c#d%/<x>", run: 1, none: null }));
  assert.equal(view, "site");
  assert.deepEqual(Object.fromEntries(options), { site: "a&b=c#d%/<x>", run: "1" });
  assert.equal(read("#/%E0%A4%A").view, "%E0%A4%A");
  assert.equal(read("").view, "");
});

test("a cell is shaded by its place in the range; odd ones apart", () => {
  const values = [1e-4, 1, 0, NaN, Infinity];
  const cells = { rows: 1, columns: 5, at: (_: number, column: number) => values[column]!, rowName: () => "", columnName: () => "" };
  const range = rangeOf(cells, true);
  assert.deepEqual(range, { low: 1e-4, high: 1, hasZero: true, hasBad: true });
  assert.deepEqual(values.map((value) => shade(value, range, true)), [0, 255, -2, -1, -3]);
  assert.equal(shade(0.01, range, true), 128);
  assert.equal(shade(5, { ...range, low: 5, high: 5 }, true), 140);
});

test("colours go from dark to light, and from blue over white to red", () => {
  const light = ([r, g, b]: number[]) => 0.3 * r! + 0.59 * g! + 0.11 * b!;
  const steps = [0, 0.25, 0.5, 0.75, 1].map((share) => light(ramp(share)));
  assert.deepEqual(steps, [...steps].sort((a, b) => a - b));
  assert.ok(signed(-1)[2] > signed(-1)[0] && signed(1)[0] > signed(1)[2]);
  assert.deepEqual(signed(0), [245, 245, 245]);
});

test("a logarithmic curve has holes where there is no logarithm", () => {
  assert.deepEqual(drawable([1, 0, -1, NaN, Infinity, null], true), [1, null, null, undefined, null, undefined]);
  assert.deepEqual(drawable([0, -1], false), [0, -1]);
});

const group = (sites: number[], stat: string, chunk: number, last: number[], phase = "train"): Group => ({
  group: "g", phase, sites, first: last, last, stats: { [stat]: { highest: chunk } }, marks: [], together: 32, magnitudes: [],
});

function made(sites: string[], groups: Group[], tables: number[][]): { source: Source; run: Run } {
  const run = { sites: sites.map((site) => ["m", site, site]), groups, models: [], findings: [] } as unknown as Run;
  const source = { table: async (chunk: number) => ({ shape: [], values: Float64Array.from(tables[chunk]!) }) } as unknown as Source;
  return { source, run };
}

test("a map lays groups over the same steps, with holes where one has none", async () => {
  const { source, run } = made(["a", "w:grad", "b"], [group([0, 2], "rms", 0, [0, 10]), group([1], "rms", 1, [0, 5])], [[1, 2, NaN, NaN], [3, 4]]);
  const cells = await gather(source, run, { phase: "train", stat: "rms", port: "", words: "", begin: 0, end: Infinity });
  assert.equal(cells.rows, 2); // b has no value
  assert.deepEqual([0, 1, 2].map((column) => cells.columnName(column)), ["step 0", "step 5", "step 10"]);
  assert.deepEqual([0, 1].map((row) => [0, 1, 2].map((column) => String(cells.at(row, column)))), [["1", "NaN", "2"], ["3", "4", "NaN"]]);
  const zoomed = await gather(source, run, { phase: "train", stat: "rms", port: "grad", words: "w", begin: 5, end: 5 });
  assert.deepEqual([zoomed.rows, zoomed.columns, zoomed.at(0, 0)], [1, 1, 4]);
});

test("gradients by depth are in the order of the forward pass", async () => {
  const { source, run } = made(["a", "b", "b:grad_output", "a:grad_output"], [group([0, 1, 2, 3], "rms", 0, [7])], [[1, 2, 3, 4]]);
  const { sites, curves } = await byDepth({ source }, run, "grad_output", "rms", 1);
  assert.deepEqual(sites, ["a:grad_output", "b:grad_output"]);
  assert.deepEqual(Array.from(curves[0]!.values), [4, 3]);
});

test("a stream's partner is its gradient, of the same part of a structure", () => {
  const { run } = made(["l:output[0]", "l:output[1]", "l:grad_output[1]", "w:param", "w:grad"], [], []);
  assert.deepEqual([0, 1, 2, 3, 4].map((at) => partnerOf(run, at)), [-1, 2, 1, 4, 3]);
});

test("the tree shows the latest values, of a module's parameters the largest", async () => {
  const { source, run } = made(["a", "a.w:param", "a.v:param"], [group([0], "rms", 0, [1, 2]), group([1, 2], "update_ratio", 1, [1])], [[1, NaN], [0.1, 0.3]]);
  const lines = await linesOf({ source, run });
  assert.deepEqual(lines.map((line) => line.path), ["a"]);
  assert.equal(lines[0]!.cells[0]!.value, 1);
  assert.deepEqual(lines[0]!.cells[5], { value: 0.3, site: "a.v:param" });
});

test("several curves are laid over all of their steps", () => {
  const { x, curves } = onOneAxis([{ x: [0, 2], curve: { name: "one", values: [1, 2] } }, { x: [1, 2], curve: { name: "two", values: [3, 4], low: [0, 1] } }]);
  assert.deepEqual(x, [0, 1, 2]);
  assert.deepEqual(curves.map((curve) => Array.from(curve.values).map(String)), [["1", "NaN", "2"], ["NaN", "3", "4"]]);
  assert.deepEqual(Array.from(curves[1]!.low!).map(String), ["NaN", "0", "1"]);
});

test("a curve has a gap where nothing was looked at for longer than around it", () => {
  const x = Array.from({ length: 60 }, (_, at) => at);
  const values = x.map((at) => (at % 5 === 0 && (at < 20 || at >= 45) ? at : NaN));
  assert.deepEqual(pauses(drawable(values, false), x), [[15, 45]]);
  assert.deepEqual(pauses(drawable(x.map((at) => (at < 10 || at % 10 === 0 ? at : NaN)), false), x), []); // looks become rarer
  assert.deepEqual(pauses([1, 2, 3, 4], [0, 10, 500, 510]), [[1, 2]]); // columns of looks alone
});

test("a smoothed curve begins where the curve does, and keeps what is not finite", () => {
  const found = smoothed([4, 4, NaN, 4, Infinity, 4], 0.9);
  assert.deepEqual(found.map((value) => (value !== null && Number.isFinite(value) ? Math.round(value * 1e6) / 1e6 : String(value))), [4, 4, "NaN", 4, "Infinity", 4]);
  assert.ok(Math.abs(smoothed([0, 1], 0.5)[1]! - 2 / 3) < 1e-12);
});

test("columns reach to the next look, but not over a pause", () => {
  const { domain, at } = spansOf([0, 1, 2, 10, 11], [0, 1, 2, 10, 11]);
  assert.deepEqual([0, 1, 2, 3, 4].map(at), [[0, 1], [1, 2], [2, 3], [10, 11], [11, 12]]);
  assert.deepEqual(domain, [0, 12]);
  assert.deepEqual(spansOf([0, 10, 20], [9, 19, 29]).at(0), [0, 10]);
});

test("ticks are round numbers", () => {
  assert.deepEqual(ticks(0, 240, 8), [0, 50, 100, 150, 200]);
  assert.deepEqual(ticks(3, 9, 10), [3, 4, 5, 6, 7, 8, 9]);
});

test("rows below a level are one, which shows the largest; those that were opened stay", () => {
  const names = ["a.x.u", "a.x.v", "a.y", "b"];
  const cells = { rows: 4, columns: 1, steps: [0], at: (row: number) => [1, 3, NaN, 2][row]!, rowName: (row: number) => names[row]!, columnName: () => "", first: () => 0, last: () => 0 };
  const found = folded(cells, 1, []);
  assert.deepEqual([0, 1].map((row) => [found.rowName(row), found.at(row, 0), found.members(row)]), [["a (3)", 3, 3], ["b", 2, 1]]);
  assert.equal(folded(cells, 1, ["a"]).rows, 4);
  assert.equal(folded(cells, 0, []).rows, 4);
});

test("settings that differ are told", () => {
  const run = (settings: [string, string][]) => ({ about: { settings } }) as unknown as Run;
  assert.deepEqual(settingsOf([run([["lr", "1"], ["batch", "8"]]), run([["lr", "2"], ["batch", "8"], ["decay", "0"]])]), { same: 1, differing: [["lr", "1", "2"], ["decay", "not recorded", "0"]] });
});

const rows = [0, 1, 2, 2, 1].map((depth, at) => ({ depth, path: `m${at}`, call: 0, time_s: [10, 6, 2, 3, 1][at]!, flops: 0, memory_bytes: [1, 8, 4, 8, 16][at]!, parameters: [0, 0, 5, 0, 7][at]! })) as unknown as Trace["rows"];

test("what a call takes holds what is inside it", () => {
  const { inside, top } = childrenOf(rows);
  assert.deepEqual([inside, top], [[[1, 4], [2, 3], [], [], []], [0]]);
  assert.deepEqual(rows.map((_, at) => ownTime(rows, inside, at)), [3, 1, 2, 3, 1]);
  const parameters = [["m2.weight:param", 5], ["m4.weight:param", 4], ["m4.bias:param", 3]].map(([site, elements]) => ({ site, elements })) as unknown as Trace["parameters"];
  assert.deepEqual(wholes({ rows, parameters }, MEASURES.parameters!, inside), [12, 5, 5, 0, 7]);
  assert.deepEqual(wholes({ rows, parameters }, MEASURES.memory!, inside), [28, 12, 4, 8, 16]);
  assert.deepEqual(wholes({ rows, parameters }, MEASURES.time!, inside), [10, 6, 2, 3, 1]);
});

test("a graph folds: edges lead from and to what is shown, and are told once", () => {
  const edges: Trace["edges"] = [[2, 3, true], [3, 4, false], [2, 4, true]];
  const closed = visible({ rows, edges }, 1, new Set());
  assert.deepEqual([closed.nodes, closed.groups, closed.edges], [[1, 4], [0], [[1, 4, true]]]);
  const open = visible({ rows, edges }, 1, new Set([1]));
  assert.deepEqual([open.nodes, open.groups, open.edges], [[2, 3, 4], [0, 1], edges]);
  assert.deepEqual([...open.within], [[1, 0], [2, 1], [3, 1], [4, 0]]);
});

test("pictures are grouped by module, and a large group by a longer path", () => {
  const shown = [...Array.from({ length: 30 }, (_, at) => ({ site: `a.${at % 2}.x` })), { site: "b.c:grad_output" }, { site: ":input" }];
  assert.deepEqual(grouped(shown).map(([name, own]) => [name, own.length]), [["a.0", 15], ["a.1", 15], ["b", 1], ["the model", 1]]);
});

test("a byte of a picture stands for a value, from its lowest to its highest or around zero", () => {
  assert.deepEqual([0, 255].map((byte) => valueOf({ low: 1, high: 3, signed: false }, byte)), [1, 3]);
  assert.deepEqual([0, 255].map((byte) => valueOf({ low: -1, high: 4, signed: true }, byte)), [-4, 4]);
});

test("letters are read on every colour of the ramp", () => {
  const light = (color: number[]) => color.map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4)).reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at]!, 0);
  for (let share = 0; share <= 1; share += 0.01) {
    const [one, other] = [light(ramp(share)), inkOn(ramp(share)) === "#000" ? 0 : 1];
    assert.ok((Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05) >= 4.5, String(share));
  }
});

test("jumps of the learning rate are marked, a schedule that always changes is not", () => {
  assert.deepEqual(rateChanges([0, 1, 2, 3], [0.1, 0.1, 0.01, 0.01]).map(({ x, text }) => [x, text]), [[2, "the learning rate goes from 0.1 to 0.01"]]);
  const x = Array.from({ length: 40 }, (_, at) => at);
  assert.deepEqual(rateChanges(x, x.map((at) => 2 ** -at)), []);
  assert.deepEqual(rateChanges([0, 1], [0, 1]), []);
  assert.deepEqual(rateChanges([0, 1, 2, 3, 4], [1, 1, 0.5, 0.2, 0.1]), []); // the end of a schedule
  const saved = savedFiles([[0, "start.pt"], [10, "model.pt"], [10, "optimizer.pt"]]);
  assert.deepEqual(saved.map(({ x, text }) => [x, text]), [[0, "after 0 steps: start.pt"], [9, "after 10 steps: model.pt, optimizer.pt"]]);
});

test("counts and times near the next unit are told in it", () => {
  assert.deepEqual([999_400, 999_600, 13.2e12].map(count), ["999k", "1.00M", "13.2T"]);
  assert.deepEqual([119.7, 3599.8, 3659, 7199].map(duration), ["2 min 0 s", "1 h 0 min", "1 h 1 min", "2 h 0 min"]);
});

test("the parameters of a module that is called several times, and a weight that two modules share, are counted once", () => {
  const rows = [0, 1, 2].map((call) => ({ call, path: "a", parameters: 72, time_s: 1, flops: 1, memory_bytes: 1 }));
  const parameters = [{ site: "a.weight:param", elements: 72 }];
  const trace = { rows, parameters } as unknown as Pick<Trace, "rows" | "parameters">;
  const tied = { rows: [...rows, { call: 0, path: "head", parameters: 72 }], parameters } as unknown as Trace;
  assert.deepEqual(wholes(tied, MEASURES.parameters!, [[], [], [], []]), [72, 0, 0, 0]);
  assert.deepEqual(wholes(trace, MEASURES.parameters!, [[], [], []]), [72, 0, 0]);
  assert.deepEqual(wholes(trace, MEASURES.flops!, [[], [], []]), [1, 1, 1]);
});

test("a logarithmic axis has ticks wherever numbers are", () => {
  assert.deepEqual(decadesAround(6.9e-23, 0.03), [1e-23, 0.1]);
  assert.deepEqual(decadesAround(5e-324, 1), [1e-323, 1]);
  assert.deepEqual(decadesAround(1, 1), [1, 10]);
  const few = logSplits(1e-23, 0.1);
  assert.ok(few.length > 4 && few.length < 11 && few.every((one) => one > 0));
  assert.deepEqual(logSplits(0.1, 1), [0.1, 0.2, 0.5, 1]);
  assert.ok(logSplits(1e-323, 1e300).length < 10);
});

test("blocks in a row are joined, though what ends each of them is open and makes nothing itself", () => {
  const row = (site: string, depth: number) => ({ site, depth });
  // net > [first > [norm, inner > [up, down]], last]; first adds what inner made to what it was given
  const rows = [row("", 0), row("first", 1), row("norm", 2), row("inner", 2), row("up", 3), row("down", 3), row("last", 1)];
  const edges: [number, number, boolean][] = [[2, 4, true], [4, 5, true], [5, 1, false], [1, 6, true]];
  const { nodes, edges: drawn } = visible({ rows, edges } as unknown as Parameters<typeof visible>[0], 3, new Set());
  assert.deepEqual(nodes, [2, 4, 5, 6]);
  assert.ok(drawn.some(([from, to]) => from === 5 && to === 6));
});

test("a path in quotes keeps its brackets", () => {
  assert.equal(ownerOf("`w[0]`:output"), "`w[0]`");
  assert.equal(ownerOf("h:output[0]"), "h");
});
