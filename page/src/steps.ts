// Charts over the steps of a training: all of a page share one cursor and one range of steps, which is in the address.

import { type Chart, chart } from "./lines";
import type { Page } from "./view";

export function stepChart(page: Page, given: Omit<Chart, "xName" | "range" | "zoom">): HTMLElement {
  return chart({ ...given, xName: "step", range: page.range, zoom: page.zoom });
}
