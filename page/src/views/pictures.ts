// Tensors as pictures: feature maps, attention, tokens by channels, class activations over the photo.

import { RAMP_256, SIGNED_256 } from "../color";
import { filter, h, select, whenSeen } from "../dom";
import { matches, number } from "../format";
import type { Picture, Trace } from "../types";
import type { Page, View } from "../view";

const MOST_OF_GROUP = 24; // pictures; more are told apart by a longer path

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
    const shown = all.filter((one) => (!kind || one.kind === kind) && matches(`${one.site} ${one.title}`, words));
    const groups = grouped(shown);
    return h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        select("kind", [["", "all"], ...kinds.map((one): [string, string] => [one, one])], kind, (value) => again({ kind: value })),
        filter("filter sites", words, (value) => again({ filter: value })),
        h("span", { class: "quiet" }, `${shown.length} pictures of the first example; each is scaled by itself; a click makes one large, with its values`),
      ),
      ...(await Promise.all(groups.map(async ([name, own], at) => {
        const box = h("details", { class: "group" }, h("summary", {}, `${name} `, h("span", { class: "quiet" }, `${own.length}`)), h("div", { class: "gallery" }, ...(await cards(page, own))));
        box.open = at < 3 || words !== "" || groups.length < 4;
        return box;
      }))),
    );
  },
};

/** Pictures by module: a group that is too large is told apart by the next part of the path. */
export function grouped<One extends { site: string }>(shown: One[]): [string, One[]][] {
  const split = (all: One[], parts: number): [string, One[]][] => {
    const found = new Map<string, One[]>();
    for (const one of all) {
      const name = one.site.replace(/[:/@].*$/, "").split(".").slice(0, parts).join(".") || "the model";
      found.set(name, [...(found.get(name) ?? []), one]);
    }
    const deeper = ([name, own]: [string, One[]]): [string, One[]][] => (own.length > MOST_OF_GROUP && name.split(".").length === parts ? split(own, parts + 1) : [[name, own]]);
    return [...found].flatMap(deeper);
  };
  return split(shown, 1);
}

/** A figure for each picture, drawn when it comes into sight. */
export async function cards(page: Page, chosen: Picture[]): Promise<HTMLElement[]> {
  const trace = page.source.head.trace!;
  return chosen.map((one) => {
    const canvas = h("canvas", { class: "picture" });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${one.title} of ${one.site || "the model"}, ${number(one.low)} to ${number(one.high)}`);
    const button = h("button", { type: "button", class: "bare", title: "make it large", label: `make ${one.title} of ${one.site || "the model"} large`, on: { click: () => void enlarge(page, one) } }, canvas);
    const range = `${number(one.low)} to ${number(one.high)}`;
    const figure = h(
      "figure",
      {},
      button,
      h("figcaption", {}, h("b", {}, one.site || "the model"), ` ${one.title}`, one.kind === "image" ? null : h("span", { class: "quiet" }, ` ${one.shape.join("x")}, ${range}`)),
    );
    const under = one.over === null ? undefined : trace.pictures[one.over];
    whenSeen(figure, () => {
      draw(page, canvas, one, under)
        .then((grid) => fit(canvas, Math.min(420, 48 * grid.tiles + 200)))
        .catch((error: unknown) => figure.append(h("p", { class: "verdict error" }, String(error))));
    });
    return figure;
  });
}

interface Grid {
  tiles: number;
  height: number; // of a tile, in cells
  width: number;
  across: number; // tiles in a row
  gap: number;
}

function gridOf(one: Picture, shape: number[]): Grid {
  const [tiles, height, width] = one.kind === "image" ? [1, shape[0]!, shape[1]!] : (shape as [number, number, number]);
  return { tiles, height, width, across: tiles === 1 ? 1 : Math.ceil(Math.sqrt((tiles * height) / width)), gap: tiles > 1 ? 1 : 0 };
}

/** The value that a byte stands for. */
export function valueOf(one: Pick<Picture, "low" | "high" | "signed">, byte: number): number {
  const limit = Math.max(Math.abs(one.low), Math.abs(one.high));
  return one.signed ? -limit + (2 * limit * byte) / 255 : one.low + ((one.high - one.low) * byte) / 255;
}

/** What the cells along an axis are called: the tokens of a text where there are as many, else numbers. */
function namesOf(trace: Trace, count: number, areTokens: boolean): (at: number) => string {
  return areTokens && trace.tokens.length === count ? (at) => `${at} ${trace.tokens[at]}` : (at) => String(at);
}

async function enlarge(page: Page, one: Picture): Promise<void> {
  const trace = page.source.head.trace!;
  const canvas = h("canvas", { class: "picture", tabindex: 0 });
  const told = h("p", { class: "told", role: "status" }, "point at a cell, or move with the arrow keys, to see its value");
  const box = h("div", { class: "large" }, canvas);
  const dialog = h("dialog", { id: "help", class: "picture-large", label: `${one.title} of ${one.site}` }, h("h2", {}, `${one.site || "the model"}: ${one.title}`), h("p", { class: "quiet" }, `${one.shape.join("x")}, ${number(one.low)} to ${number(one.high)}`), told, box, h("button", { type: "button", on: { click: () => dialog.close() } }, "close (Esc)"));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  const { values, shape } = await page.source.table(one.chunk);
  const grid = gridOf(one, shape);
  await draw(page, canvas, one, one.over === null ? undefined : trace.pictures[one.over]);
  fit(canvas, Math.min(innerWidth * 0.9 - 60, (innerHeight * 0.62 * canvas.width) / canvas.height));
  const isAttention = one.kind === "attention";
  const [rowName, columnName] = [namesOf(trace, grid.height, isAttention || one.kind === "tokens x channels"), namesOf(trace, grid.width, isAttention)];
  const what = one.kind === "attention" ? ["head", "from", "to"] : one.kind === "feature maps" ? ["channel", "row", "column"] : one.kind === "tokens x channels" ? ["", "token", "channel"] : ["", "row", "column"];
  if (one.kind === "attention" && trace.tokens.length === grid.width) box.before(heads(grid, trace));
  let spot: [number, number] = [0, 0]; // in cells of the canvas
  const tell = () => {
    const [x, y] = spot;
    const [column, line] = [Math.floor(x / (grid.width + grid.gap)), Math.floor(y / (grid.height + grid.gap))];
    const tile = line * grid.across + column;
    const [cellX, cellY] = [x - column * (grid.width + grid.gap), y - line * (grid.height + grid.gap)];
    if (tile >= grid.tiles || cellX >= grid.width || cellY >= grid.height) return;
    const from = (tile * grid.height + cellY) * grid.width + cellX;
    const value = one.kind === "image" ? `red, green, blue ${[0, 1, 2].map((at) => values[3 * from + at]).join(", ")}` : number(valueOf(one, values[from]!));
    const step = one.kind === "image" ? "" : ` (± ${number((valueOf(one, 1) - valueOf(one, 0)) / 2)})`;
    told.textContent = `${what[0] ? `${what[0]} ${tile}, ` : ""}${what[1]} ${rowName(cellY)}, ${what[2]} ${columnName(cellX)}: ${value}${step}`;
  };
  canvas.addEventListener("mousemove", (event) => {
    const bounds = canvas.getBoundingClientRect();
    spot = [Math.floor(((event.clientX - bounds.left) / bounds.width) * canvas.width), Math.floor(((event.clientY - bounds.top) / bounds.height) * canvas.height)];
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const by = ({ ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] } as Record<string, [number, number]>)[event.key];
    if (!by) return;
    event.preventDefault();
    spot = [Math.min(canvas.width - 1, Math.max(0, spot[0] + by[0])), Math.min(canvas.height - 1, Math.max(0, spot[1] + by[1]))];
    tell();
  });
}

/** The tokens below the maps of attention. */
function heads(grid: Grid, trace: Trace): HTMLElement {
  return h("p", { class: "quiet" }, `${grid.tiles} heads, from left to right and down; a row is the token that looks, a column the one looked at: `, ...trace.tokens.map((one) => h("span", { class: "token" }, one)));
}

/** Give a canvas a size on the page, at most `most` pixels wide: whole pixels a cell. */
function fit(canvas: HTMLCanvasElement, most: number): void {
  const scale = Math.max(1, Math.floor(most / canvas.width));
  canvas.style.width = `${canvas.width * scale}px`;
  if (canvas.width > 6 * canvas.height) canvas.style.height = `${Math.max(48, canvas.height * scale)}px`; // few tokens, many channels
}

async function draw(page: Page, canvas: HTMLCanvasElement, one: Picture, under?: Picture): Promise<Grid> {
  const { values, shape } = await page.source.table(one.chunk);
  const grid = gridOf(one, shape);
  const { tiles, height, width, across, gap } = grid;
  canvas.width = across * (width + gap) - gap;
  canvas.height = Math.ceil(tiles / across) * (height + gap) - gap;
  const context = canvas.getContext("2d")!;
  if (under) {
    await draw(page, canvas, under);
    const layer = document.createElement("canvas");
    await draw(page, layer, one);
    context.globalAlpha = 0.55;
    context.drawImage(layer, 0, 0, canvas.width, canvas.height);
    return grid;
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
  return grid;
}
