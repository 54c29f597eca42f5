import assert from "node:assert/strict";
import { test } from "node:test";
import { ramp, signed } from "../src/color";
import { matches, number, pathOf, percent, portOf, python } from "../src/format";
import { rangeOf, shade } from "../src/heat";
import { badAt, drawable } from "../src/lines";
import { read, write } from "../src/state";
import type { Source } from "../src/source";
import type { Group, Run } from "../src/types";
import { byDepth } from "../src/views/depth";
import { layout, leavesOf } from "../src/views/graph";
import { gather } from "../src/views/map";
import { partnerOf } from "../src/views/site";
import { linesOf, ownerOf } from "../src/views/tree";
import { overlaid } from "../src/views/verdict";

test("numbers are short and never hide what is odd", () => {
  assert.deepEqual([0, 1, 1234.5, 1e-9, -2.5e7, Infinity, -Infinity, NaN].map(number), ["0", "1", "1230", "1.00e-9", "-2.50e7", "not finite", "not finite", ""]);
  assert.equal(number(null), "");
  assert.deepEqual([0.5, 0.0123].map(percent), ["50 %", "1.23 %"]);
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
  assert.deepEqual(badAt([1, Infinity, NaN, -Infinity]), [1, 3]);
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

test("several runs are laid over all of their steps", () => {
  const runs = [{ name: "one" }, { name: "two" }] as Run[];
  const all = [{ x: [0, 2], of: { lr: { values: [1, 2], low: null } } }, { x: [1, 2], of: { lr: { values: [3, 4], low: null } } }];
  const found = overlaid(runs, all, "lr", runs[0]!)!;
  assert.deepEqual(found.x, [0, 1, 2]);
  assert.deepEqual(found.curves.map((curve) => Array.from(curve.values)), [[1, null, 2], [null, 3, 4]]);
  assert.equal(overlaid(runs, all, "loss:x", runs[0]!), null);
});

test("a graph puts each call below those that it takes from, also in a loop", () => {
  const rows = [0, 1, 2, 1].map((depth) => ({ depth }));
  assert.deepEqual(leavesOf({ rows } as never), [2, 3]);
  const { places } = layout([0, 1, 2, 3], [[0, 1, true], [0, 2, true], [1, 3, true], [2, 3, true]]);
  const y = [0, 1, 2, 3].map((node) => places.get(node)!.y);
  assert.ok(y[0]! < y[1]! && y[1] === y[2] && y[2]! < y[3]!);
  assert.notEqual(places.get(1)!.x, places.get(2)!.x);
  assert.equal(layout([0, 1], [[0, 1, true], [1, 0, true]]).places.size, 2);
});
