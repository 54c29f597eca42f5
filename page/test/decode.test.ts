import assert from "node:assert/strict";
import { test } from "node:test";
import { decode, fromBase64, inflate, lowerEdge, share } from "../src/decode";

/** Differences along rows of `columns`, as planes of low and high bytes: what the Python side packs. */
function packed(codes: number[], columns: number): Uint8Array {
  const steps = codes.map((code, at) => (code - (at % columns ? codes[at - 1]! : 0)) & 0xffff);
  return new Uint8Array([...steps.map((step) => step & 255), ...steps.map((step) => step >> 8)]);
}

test("codes become values, and the odd ones what they stand for", () => {
  const { values } = decode("log16", [2, 3], packed([0, 200, -400, -32768, -32767, 32767], 3));
  assert.deepEqual([...values].map(String), ["1", "2", "0.25", "NaN", "0", "Infinity"]);
});

test("signed codes tell signs", () => {
  const { values } = decode("log16s", [1, 4], packed([15001, -15001, 15101, -32766], 4));
  assert.deepEqual([...values], [1, -1, 2, -Infinity]);
});

test("differences wrap, from the lowest code to the highest", () => {
  const { values } = decode("log16", [1, 2], packed([-32768, 32767], 2));
  assert.ok(Number.isNaN(values[0]!) && values[1] === Infinity);
});

test("numbers of eight bytes come back as they were", () => {
  const numbers = new Float64Array([1.5, -2e300, NaN, 0.1]);
  const bytes = new Uint8Array(numbers.buffer);
  const planes = new Uint8Array(32);
  for (let at = 0; at < 4; at++) for (let plane = 0; plane < 8; plane++) planes[plane * 4 + at] = bytes[8 * at + plane]!;
  assert.deepEqual([...decode("f64", [2, 2], planes).values], [...numbers]);
});

test("a table that is cut off, or of an unknown kind, is refused", () => {
  assert.throws(() => decode("log16", [2, 3], new Uint8Array(11)), /has 11 bytes/);
  assert.throws(() => decode("zip", [1], new Uint8Array(1)), /unknown encoding zip/);
});

test("data is inflated, and what is none is an error", async () => {
  const stream = new Blob([new Uint8Array([1, 2, 3])]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const made = new Uint8Array(await new Response(stream).arrayBuffer());
  const text = Buffer.from(made).toString("base64");
  assert.deepEqual([...(await inflate(fromBase64(text)))], [1, 2, 3]);
  await assert.rejects(inflate(new Uint8Array([255, 255, 255])));
});

test("bytes of magnitudes are shares, buckets powers of two", () => {
  assert.equal(share(0), 0);
  assert.equal(share(255), 1);
  assert.ok(Math.abs(share(1) - 2 ** -24) < 1e-12);
  assert.deepEqual([0, 3, 4, 42, 59, 60, 63].map(lowerEdge), [-149, -64, -38, 0, 17, 18, 96]);
});
