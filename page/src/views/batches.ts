// Batches that were kept because something went wrong in their step: images, or tokens.

import { h } from "../dom";
import type { Batch } from "../types";
import type { Page } from "../view";

/** Cards of the batches of a step, or of all; nothing where none was kept. */
export async function batchCards(page: Page, step: number | null = null): Promise<HTMLElement[]> {
  const chosen = page.run.batches.filter((one) => step === null || one.step === step);
  return Promise.all(chosen.map((one) => card(page, one)));
}

async function card(page: Page, batch: Batch): Promise<HTMLElement> {
  const parts = await Promise.all(
    batch.inputs.map(async (one) => {
      const part = one.checked < one.shape[0]! ? ` of the first ${one.checked}` : "";
      const bad = one.bad.length ? `, not finite in sample ${one.bad.join(", ")}${part}` : one.checked ? `, finite in all samples${part}` : "";
      const told = h("p", { class: "quiet" }, `${one.name}: ${one.shape.join("x")} ${one.type}${bad}`);
      if (one.images === null) return h("div", {}, told, ...one.tokens.slice(0, 4).map((row) => h("p", {}, ...row.map((token) => h("span", { class: "token" }, String(token))))));
      const { values, shape } = await page.source.table(one.images);
      return h("div", {}, told, h("div", { class: "gallery" }, ...one.shown.map((number, at) => sample(values, shape, at, number, one.bad.includes(number)))));
    }),
  );
  const title = batch.step < 0 ? batch.why : `the batch of step ${batch.step}, kept for ${batch.why}; some of its samples`;
  return h("section", { class: "card" }, h("h3", {}, title), ...parts, batch.step >= 0 && h("p", { class: "quiet" }, "gaff replay runs it again, with the weights of that step"));
}

function sample(values: ArrayLike<number>, [, height, width]: number[], at: number, number: number, isBad: boolean): HTMLElement {
  const canvas = h("canvas", { class: "picture" });
  canvas.width = width!;
  canvas.height = height!;
  canvas.style.width = `${Math.max(1, Math.floor(80 / width!)) * width!}px`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `sample ${number}${isBad ? ", with values that are not finite" : ""}`);
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(width!, height!);
  const base = at * height! * width! * 3;
  for (let cell = 0; cell < height! * width!; cell++) image.data.set([values[base + 3 * cell]!, values[base + 3 * cell + 1]!, values[base + 3 * cell + 2]!, 255], 4 * cell);
  context.putImageData(image, 0, 0);
  return h("figure", {}, canvas, h("figcaption", { class: isBad ? "state error" : "quiet" }, `sample ${number}${isBad ? ": not finite" : ""}`));
}
