// What every view is given, and what it gives back.

import type { Source } from "./source";
import type { Route } from "./state";
import type { Run } from "./types";

export interface Page {
  source: Source;
  route: Route;
  run: Run; // the one that is chosen; of a page without runs an empty one
  runs: Run[];
  range: [number, number] | null; // the steps that are shown; null: all
  zoom(range: [number, number] | null): void;
  /** A link to a view, with the run and the steps that are chosen. */
  link(view: string, options?: Record<string, string | number | null | undefined>): string;
  /** Go there; `quietly`: no new entry in the history. */
  go(view: string, options?: Record<string, string | number | null | undefined>, quietly?: boolean): void;
}

export interface View {
  key: string;
  title: string;
  what: string; // one line, for the help
  isShown?(page: Page): boolean;
  draw(page: Page): HTMLElement | Promise<HTMLElement>;
}
