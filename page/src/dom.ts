// Elements without markup: whatever comes from a record is text.

type Child = Node | string | number | null | undefined | false;

interface Properties {
  class?: string;
  title?: string;
  href?: string;
  id?: string;
  type?: string;
  value?: string;
  placeholder?: string;
  label?: string;
  role?: string;
  tabindex?: number;
  selected?: boolean;
  current?: string | false;
  scope?: string;
  scroll?: string; // the name of a part that scrolls by itself
  on?: Record<string, (event: Event) => void>;
}

export function h<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  properties: Properties = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (key === "on") {
      for (const [event, listener] of Object.entries(value as object)) element.addEventListener(event, listener as EventListener);
    } else if (key === "label" || key === "current") element.setAttribute(`aria-${key}`, String(value));
    else if (key === "scroll") element.dataset.scroll = String(value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined && child !== false) element.append(typeof child === "number" ? String(child) : child);
  return element;
}

export interface Sorting {
  by: string; // the head of a column, with a minus before it for the largest first; empty: as it is
  key(row: number, column: number): number | string | null; // what a row is put in order by
  again(by: string): void; // somebody wants another order
  only?: number[]; // the columns that can be sorted by
}

/** A table; `right`: columns of numbers. Cells are text or elements. Its head stays in sight. */
export function table(head: string[], rows: Child[][], right: number[] = [], sorting?: Sorting): HTMLElement {
  const side = (at: number) => (right.includes(at) ? "number" : "");
  const order = rows.map((_, at) => at);
  const isDown = sorting?.by.startsWith("-") ?? false;
  const column = sorting ? head.indexOf(sorting.by.replace(/^-/, "")) : -1;
  if (sorting && column >= 0) {
    const keys = rows.map((_, at) => sorting.key(at, column));
    order.sort((one, other) => compare(keys[one]!, keys[other]!, isDown));
  }
  const title = (text: string, at: number) => {
    if (!sorting || !text || (sorting.only && !sorting.only.includes(at))) return h("th", { class: side(at), scope: "col" }, text);
    const isHere = at === column;
    const button = h("button", { class: "sort", type: "button", title: `sort by ${text}`, on: { click: () => sorting.again(!isHere ? `-${text}` : isDown ? text : "") } }, text, h("span", { class: "sign" }, isHere ? (isDown ? " ▼" : " ▲") : ""));
    const cell = h("th", { class: side(at), scope: "col" }, button);
    if (isHere) cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    return cell;
  };
  return h(
    "div",
    { class: "wide tall", scroll: `table ${head.join(" ")}`, tabindex: 0, role: "region", label: `table of ${head[0] || "facts"}` },
    h(
      "table",
      {},
      head.some(Boolean) && h("thead", {}, h("tr", {}, ...head.map(title))),
      h("tbody", {}, ...order.map((at) => h("tr", {}, ...rows[at]!.map((cell, place) => h("td", { class: side(place) }, cell))))),
    ),
  );
}

/** Numbers by size, texts by letters; what is missing comes last. */
function compare(one: number | string | null, other: number | string | null, isDown: boolean): number {
  const isGone = (value: number | string | null) => value === null || value === "" || Number.isNaN(value);
  if (isGone(one) || isGone(other)) return Number(isGone(one)) - Number(isGone(other));
  const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
  return isDown ? -order : order;
}

export function select(label: string, options: [string, string][], value: string, changed: (value: string) => void): HTMLElement {
  const made = h(
    "select",
    { label, on: { change: (event) => changed((event.target as HTMLSelectElement).value) } },
    ...options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
  );
  return h("label", { class: "choice" }, `${label} `, made);
}

/** A field that filters, after a moment. */
export function filter(label: string, value: string, changed: (value: string) => void): HTMLInputElement {
  let waiting: ReturnType<typeof setTimeout> | undefined;
  const made = h("input", { type: "search", label, placeholder: label, value, class: "filter" });
  made.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => changed(made.value), 120);
  });
  return made;
}

export function copyable(text: string): HTMLElement {
  const button = h("button", { class: "copy", title: "copy for Python", type: "button" }, text);
  button.addEventListener("click", () => {
    const done = () => {
      button.classList.add("copied");
      setTimeout(() => button.classList.remove("copied"), 900);
    };
    if (navigator.clipboard !== undefined) navigator.clipboard.writeText(text).then(done, () => selectAll(button));
    else selectAll(button);
  });
  return button;
}

function selectAll(element: HTMLElement): void {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection()?.removeAllRanges();
  getSelection()?.addRange(range);
}

/** Calls ``draw`` once: before an element comes into sight, or before it is printed. Gives what ends the waiting. */
export function whenSeen(element: Element, draw: () => void, margin = "0px"): () => void {
  const end = () => {
    watching.disconnect();
    element.removeEventListener("printed", once);
  };
  const once = () => {
    end();
    draw();
  };
  const watching = new IntersectionObserver((entries) => entries.some((one) => one.isIntersecting) && once(), { rootMargin: margin });
  watching.observe(element);
  element.addEventListener("printed", once);
  return end;
}

/** Draws what still waits to come into sight: paper shows everything. */
export function drawToPrint(): void {
  for (const one of document.querySelectorAll("figure")) one.dispatchEvent(new Event("printed"));
}
