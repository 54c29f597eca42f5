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
    } else if (key === "label") element.setAttribute("aria-label", String(value));
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined && child !== false) element.append(typeof child === "number" ? String(child) : child);
  return element;
}

/** A table; `right`: columns of numbers. Cells are text or elements. */
export function table(head: string[], rows: Child[][], right: number[] = []): HTMLElement {
  const side = (at: number) => (right.includes(at) ? "number" : "");
  return h(
    "div",
    { class: "wide" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map((text, at) => h("th", { class: side(at) }, text)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell, at) => h("td", { class: side(at) }, cell))))),
    ),
  );
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
