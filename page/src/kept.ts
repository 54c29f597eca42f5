// Parts of a view that outlive its drawing: when a live page is drawn anew, a chart stays where it is and takes new
// numbers, so that it is never blank, and zoom, cursor and selection stay.

import { h } from "./dom";

export interface Kept<Given> {
  element: HTMLElement;
  update(given: Given): void;
  close?(): void;
}

type Mount<Given> = (given: Given) => Kept<Given>;

interface Wanted {
  key: string;
  given: unknown;
  mount: Mount<never>;
}

const wanted = new WeakMap<Element, Wanted>();
let known = new Map<string, Kept<never>>();

/** A place in a view for a part of its own; `key` tells it from others of the same view. */
export function keep<Given>(key: string, given: Given, mount: Mount<Given>): HTMLElement {
  const place = h("div", { class: "place" });
  wanted.set(place, { key, given, mount: mount as unknown as Mount<never> });
  return place;
}

/** Fill the places of a view that is about to be shown, with the parts of the view before where they are the same. */
export function fill(view: HTMLElement, scope: string): void {
  const next = new Map<string, Kept<never>>();
  for (const place of view.querySelectorAll(".place")) {
    const { key, given, mount } = wanted.get(place)!;
    let name = `${scope}\n${key}`;
    while (next.has(name)) name += "'";
    const found = known.get(name);
    const part = found ?? mount(given as never);
    if (found) found.update(given as never);
    next.set(name, part);
    place.replaceWith(part.element);
  }
  for (const [name, part] of known) if (next.get(name) !== part) part.close?.();
  known = next;
}

/** Let all parts go: they are made anew, in other colours for example. */
export function forget(): void {
  for (const part of known.values()) part.close?.();
  known = new Map();
}
