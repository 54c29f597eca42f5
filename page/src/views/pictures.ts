// Tensors as pictures: feature maps, attention, tokens by channels, class activations over the photo.

import { RAMP_256, SIGNED_256 } from "../color";
import { filter, h, select } from "../dom";
import { matches, number } from "../format";
import type { Picture } from "../types";
import type { Page, View } from "../view";

export const pictures: View = {
  key: "pictures",
  title: "Pictures",
  what: "activations and gradients as pictures",
  isShown: (page) => (page.source.head.trace?.pictures.length ?? 0) > 0,
  async draw(page) {
    const all = page.source.head.trace!.pictures;
    const options = page.route.options;
    const [kind, words] = [options.get("kind") ?? "", options.get("filter") ?? ""];
    const kinds = [...new Set(all.map((one) => one.kind))];
    const again = (more: Record<string, string>) => page.go("pictures", { kind, filter: words, ...more }, true);
    const shown = all.filter((one) => (!kind || one.kind === kind) && matches(one.site, words));
    return h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        select("kind", [["", "all"], ...kinds.map((one): [string, string] => [one, one])], kind, (value) => again({ kind: value })),
        filter("filter sites", words, (value) => again({ filter: value })),
        h("span", { class: "quiet" }, `${shown.length} pictures; each is scaled by itself, its range is written beside it`),
      ),
      h("div", { class: "gallery" }, ...(await cards(page, shown))),
    );
  },
};

/** A figure for each picture, drawn when it comes into sight. */
export async function cards(page: Page, chosen: Picture[]): Promise<HTMLElement[]> {
  const all = page.source.head.trace!.pictures;
  return chosen.map((one) => {
    const canvas = h("canvas", { class: "picture", label: `${one.kind} of ${one.site}` });
    const range = `${number(one.low)} to ${number(one.high)}`;
    const figure = h(
      "figure",
      {},
      canvas,
      h("figcaption", {}, h("b", {}, one.site || "the model"), ` ${one.title}`, one.kind === "image" ? null : h("span", { class: "quiet" }, ` ${one.shape.join("x")}, ${range}`)),
      one.labels.length > 0 && h("p", { class: "quiet labels" }, one.labels.join(" ")),
    );
    const under = one.over === null ? undefined : all[one.over];
    const observer = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      draw(page, canvas, one, under).catch((error: unknown) => figure.append(h("p", { class: "verdict error" }, String(error))));
    });
    observer.observe(figure);
    return figure;
  });
}

async function draw(page: Page, canvas: HTMLCanvasElement, one: Picture, under?: Picture): Promise<void> {
  const { values, shape } = await page.source.table(one.chunk);
  const [tiles, height, width] = one.kind === "image" ? [1, shape[0]!, shape[1]!] : (shape as [number, number, number]);
  const across = tiles === 1 ? 1 : Math.ceil(Math.sqrt((tiles * height) / width));
  const gap = tiles > 1 ? 1 : 0;
  canvas.width = across * (width + gap) - gap;
  canvas.height = Math.ceil(tiles / across) * (height + gap) - gap;
  const context = canvas.getContext("2d")!;
  if (under) {
    await draw(page, canvas, under);
    const layer = document.createElement("canvas");
    await draw(page, layer, one);
    context.globalAlpha = 0.55;
    context.drawImage(layer, 0, 0, canvas.width, canvas.height);
    return;
  }
  const image = context.createImageData(canvas.width, canvas.height);
  for (let tile = 0; tile < tiles; tile++) {
    const [left, top] = [(tile % across) * (width + gap), Math.floor(tile / across) * (height + gap)];
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const at = 4 * ((top + y) * canvas.width + left + x);
        const from = (tile * height + y) * width + x;
        const color = one.kind === "image" ? [values[3 * from]!, values[3 * from + 1]!, values[3 * from + 2]!] : (one.signed ? SIGNED_256 : RAMP_256)[values[from]!]!;
        image.data.set([...color, 255], at);
      }
    }
  }
  context.putImageData(image, 0, 0);
  const scale = Math.max(1, Math.round(Math.min(420, 48 * tiles + 200) / canvas.width));
  canvas.style.width = `${canvas.width * scale}px`;
  if (canvas.width > 6 * canvas.height) canvas.style.height = `${Math.max(48, canvas.height * scale)}px`; // few tokens, many channels
}
