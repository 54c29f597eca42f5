// The frame: what can be seen, which run, keys, light and dark, and following a run that goes on.

import { drawToPrint, h, select } from "./dom";
import { fill, forget } from "./kept";
import { fetchHead, follow, offline, served, type Source } from "./source";
import { read, type Route, write } from "./state";
import { siteNamed } from "./rundata";
import type { Head, Run } from "./types";
import type { Page, View } from "./view";

type Views = Partial<Record<Head["kind"], View[]>>;
let known: View[] = []; // the views of this kind of page
const KNOWN = 1; // the version of the head

const EMPTY: Run = {
  name: "", path: "", verdict: "", level: "fine", steps: 0, complete: true, error: "", overhead: 0, rank: 0, ranks: [0], looks: 0, lastLook: -1,
  command: "", began: "", facts: [], notes: [], findings: [], sites: [], groups: [], scalars: { names: [] }, models: [], gradients: [], flight: [], changes: [], batches: [],
};

let source: Source;
let drawing = 0; // the number of the latest drawing: an older one that ends later is thrown away
let isConnected = true;
const frame = document.getElementById("page")!;
let own = location.protocol === "about:" ? "" : null; // inside a notebook's frame the address is not ours to change

function here(): string {
  return own ?? location.hash;
}

function goTo(hash: string): void {
  if (own === null) location.hash = hash;
  else {
    own = hash;
    void draw();
  }
}

function pageOf(route: Route): Page {
  const all = source.head.runs ?? [];
  const run = all[Number(route.options.get("run") ?? 0)] ?? all[0] ?? EMPTY;
  const chosen = all.indexOf(run);
  const [from, to] = [route.options.get("from"), route.options.get("to")];
  const range: Page["range"] = from !== null && to !== null && Number(to) > Number(from) ? [Number(from), Number(to)] : null;
  const link = (view: string, options = {}) => write(view, { ...(chosen > 0 ? { run: chosen } : {}), ...(range ? { from, to } : {}), ...options });
  const go = (view: string, options = {}, quietly = false) => {
    if (!quietly) return goTo(link(view, options));
    if (own === null) history.replaceState(null, "", link(view, options));
    else own = link(view, options);
    void draw({ keepFocus: true });
  };
  const zoom = (steps: Page["range"]) => go(route.view, { ...Object.fromEntries(route.options), from: steps?.[0] ?? null, to: steps?.[1] ?? null }, true);
  return { source, route, run, runs: all, link, go, range, zoom };
}

function viewsOf(page: Page): View[] {
  return known.filter((view) => view.isShown?.(page) ?? true);
}

async function draw({ keepFocus = false } = {}): Promise<void> {
  const mine = ++drawing;
  const route = read(here());
  const page = pageOf(route);
  const views = viewsOf(page);
  const view = known.find((one) => one.key === route.view) ?? views[0] ?? known[0]!;
  const focused = keepFocus ? document.activeElement?.getAttribute("aria-label") : null;
  const typed = keepFocus && document.activeElement instanceof HTMLInputElement ? document.activeElement.selectionStart : null;
  let content: HTMLElement;
  try {
    const isThere = view.key === "call" || (view.isShown?.(page) ?? true);
    content = isThere ? await view.draw(page) : h("p", { class: "quiet" }, `${view.title}: there is nothing of this here`);
  } catch (error) {
    if (head410(error)) return refresh();
    content = h("p", { class: "verdict error" }, `this view cannot be drawn: ${error instanceof Error ? error.message : String(error)}`);
  }
  if (mine !== drawing) return;
  const made = h(
    "div",
    {},
    header(page),
    h("nav", { label: "views" }, ...views.map((one, at) => h("a", { href: page.link(one.key), class: one === view ? "here" : "", current: one === view && "page", title: `${one.what} (key ${at + 1})` }, one.title))),
    h("main", { id: "main", tabindex: -1 }, route.view && view.key !== route.view && h("p", { class: "quiet" }, `there is no view ${route.view}: this is ${view.title}`), content),
  );
  const scrolled = scrolls();
  fill(made, `${view.key} ${page.run.path}`);
  frame.replaceChildren(...made.children);
  scrollBack(scrolled);
  if (frame.dataset.view !== view.key) frame.querySelector("nav .here")?.scrollIntoView({ block: "nearest", inline: "center" });
  frame.dataset.view = view.key;
  frame.dataset.shown = here();
  document.title = `${view.title} · ${source.head.title} · gaff`;
  announce(page);
  if (focused) {
    const again = [...frame.querySelectorAll<HTMLElement>("[aria-label]")].find((one) => one.getAttribute("aria-label") === focused);
    again?.focus();
    if (again instanceof HTMLInputElement && typed !== null) again.setSelectionRange(typed, typed);
  }
}

/** How far the parts that scroll by themselves are, by their names: taken out and put back they would begin anew. */
function scrolls(): Map<string, [number, number]> {
  return new Map([...frame.querySelectorAll<HTMLElement>("[data-scroll]")].map((one) => [one.dataset.scroll!, [one.scrollLeft, one.scrollTop]]));
}

function scrollBack(known: Map<string, [number, number]>): void {
  for (const one of frame.querySelectorAll<HTMLElement>("[data-scroll]")) {
    const [left, top] = known.get(one.dataset.scroll!) ?? [0, 0];
    if (left || top) one.scrollTo({ left, top, behavior: "instant" });
  }
}

/** Tell assistive technology when what a run comes to has changed. */
function announce(page: Page): void {
  const box = document.getElementById("announce") ?? document.body.appendChild(h("div", { id: "announce", class: "unseen", role: "status" }));
  box.setAttribute("aria-live", "polite");
  const told = source.head.live ? page.run.verdict : "";
  if (box.textContent !== told) box.textContent = told;
}

function header(page: Page): HTMLElement {
  const { head } = source;
  const chosen = String(page.runs.indexOf(page.run));
  return h(
    "header",
    {},
    h("h1", {}, h("span", { class: "brand" }, "gaff"), ` ${head.kind === "training" ? page.run.name : head.title}`),
    page.runs.length > 1 && select("run", page.runs.map((run, at): [string, string] => [String(at), run.name]), chosen, (value) => goTo(write(page.route.view, { ...Object.fromEntries(page.route.options), run: value }))),
    page.range && h("button", { type: "button", title: "show all steps", on: { click: () => page.zoom(null) } }, `steps ${page.range[0]} to ${page.range[1]} ×`),
    head.live && h("span", { class: isConnected ? "live" : "live lost", id: "live" }, isConnected ? (page.runs.every((run) => run.complete) ? "ended" : "live") : "connecting ..."),
    h("button", { type: "button", label: "light or dark", title: "light or dark (t)", on: { click: toggleTheme } }, "◐"),
    h("button", { type: "button", label: "keys", title: "keys (?)", on: { click: toggleHelp } }, "?"),
  );
}

function toggleTheme(): void {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  forget();
  void draw();
}

function toggleHelp(): void {
  const known = document.getElementById("help");
  if (known) return known.remove();
  const page = pageOf(read(here()));
  const keys: [string, string][] = [
    ...viewsOf(page).map((view, at): [string, string] => [String((at + 1) % 10), `${view.title}: ${view.what}`]),
    ["j, k", "the next site or call, the one before"],
    ["/", "filter"],
    ["in a chart", "arrow keys move the cursor, + and - zoom, Enter opens; dragging zooms all charts, a double click shows all steps"],
    ["[, ]", "the run before, the next run"],
    ["t", "light or dark"],
    ["?", "this list"],
  ];
  const help = h("dialog", { id: "help" }, h("h2", {}, "Keys"), h("dl", { class: "evidence" }, ...keys.flatMap(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])), h("button", { type: "button", on: { click: toggleHelp } }, "close (Esc)"));
  help.addEventListener("close", () => help.remove());
  document.body.append(help);
  help.showModal();
}

function step(by: number): void {
  const page = pageOf(read(here()));
  if (page.route.view === "call") page.go("call", { at: Math.max(0, Math.min(source.head.trace!.rows.length - 1, Number(page.route.options.get("at") ?? 0) + by)) });
  else if (page.run.sites.length) {
    const at = page.route.view === "site" ? siteNamed(page.run, page.route.options.get("site") ?? page.run.sites[0]![2]) : -1;
    const next = page.run.sites[Math.max(0, at + by)];
    if (next) page.go("site", { site: next[2] });
  }
}

function onKey(event: KeyboardEvent): void {
  const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (document.getElementById("help")) return event.key === "?" ? toggleHelp() : undefined;
  if (event.key === "Escape") {
    (document.activeElement as HTMLElement | null)?.blur();
  }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const page = pageOf(read(here()));
  const views = viewsOf(page);
  const digit = "1234567890".indexOf(event.key);
  if (event.key.length === 1 && digit >= 0) {
    if (views[digit]) page.go(views[digit]!.key);
  } else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") toggleHelp();
  else if (event.key === "[" || event.key === "]") {
    const run = page.runs.indexOf(page.run) + (event.key === "]" ? 1 : -1);
    if (page.runs[run]) goTo(write(page.route.view, { ...Object.fromEntries(page.route.options), run }));
  } else if (event.key === "/") {
    const field = frame.querySelector<HTMLInputElement>("input.filter");
    if (field) {
      event.preventDefault();
      field.focus();
      field.select();
    }
  }
}

/** The server keeps a version no longer than a while. */
function head410(error: unknown): boolean {
  return source.head.live !== undefined && error instanceof Error && error.message.includes("says 410");
}

async function refresh(): Promise<void> {
  source = served(await fetchHead(source.head.live!.token));
  await draw({ keepFocus: true });
}

/** A run that goes on: a new version is drawn in place of the old one. */
function live(head: Head): void {
  const token = head.live!.token;
  let isFetching = false;
  let latest = head.live!.version;
  const changed = async (version: number) => {
    latest = Math.max(latest, version);
    if (isFetching || version <= source.head.live!.version) return;
    isFetching = true;
    try {
      while (source.head.live!.version < latest) {
        source = served(await fetchHead(token));
        const scroll = document.scrollingElement?.scrollTop ?? 0;
        await draw({ keepFocus: true });
        document.scrollingElement?.scrollTo({ top: scroll });
      }
    } catch {
      connection(false); // the server has gone; it is asked again when it is back
    } finally {
      isFetching = false;
    }
  };
  follow(token, (version) => void changed(version), connection);
}

function connection(isThere: boolean): void {
  if (isThere === isConnected) return;
  isConnected = isThere;
  const sign = document.getElementById("live");
  const isOver = source.head.runs?.every((run) => run.complete);
  if (sign) {
    sign.textContent = isThere ? (isOver ? "ended" : "live") : "connecting ...";
    sign.className = isThere ? "live" : "live lost";
  }
}

/** Draw the page; `views`: of each kind of page that this script knows, in the order of their keys. */
export function start(views: Views): void {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  let head: Head;
  try {
    head = JSON.parse(document.getElementById("head")!.textContent ?? "") as Head;
  } catch {
    frame.replaceChildren(h("p", { class: "verdict error" }, "the data of this page cannot be read: was the file cut off?"));
    return;
  }
  if (head.gaff_page !== KNOWN || !views[head.kind]) {
    frame.replaceChildren(h("p", { class: "verdict error" }, `this page holds data of version ${head.gaff_page}: expected ${KNOWN}`));
    return;
  }
  known = views[head.kind]!;
  source = head.live ? served(head) : offline(head);
  addEventListener("beforeprint", drawToPrint);
  addEventListener("hashchange", () => void draw());
  addEventListener("click", (event) => {
    const link = own === null ? null : (event.target as Element).closest('a[href^="#/"]');
    if (!link) return;
    event.preventDefault();
    goTo(link.getAttribute("href")!);
  });
  addEventListener("keydown", onKey);
  void draw().then(() => {
    if (head.live) live(head);
    else decodeAhead(0);
  });
}

/** Decode in the pauses what the page of a site needs, so that it opens at once. */
function decodeAhead(at: number): void {
  const { chunks } = source.head;
  if (at >= chunks.length || at >= 400) return;
  const next = () => decodeAhead(at + 1);
  requestIdleCallback(() => {
    if (chunks[at]!.encoding.startsWith("log16")) void source.table(at).then(next, next);
    else next();
  });
}
