// Numbers and names as people read them.

export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return "not finite";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(3)));
}

export function count(value: number): string {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]] as const) {
    if (Math.abs(value) >= 0.9995 * size) return `${(value / size).toPrecision(3)}${unit}`;
  }
  return String(value);
}

/** Seconds in the unit that people use for so many. */
export function duration(seconds: number): string {
  if (seconds < 1e-3) return `${number(seconds * 1e6)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3)} ms`;
  if (seconds < 100) return `${number(seconds)} s`;
  const [whole, minutes] = [Math.round(seconds), Math.round(seconds / 60)];
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Bytes in a decimal unit, as the tables in a terminal tell them. */
export function bytes(size: number): string {
  for (const [unit, of] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]] as const) {
    if (size >= of) return `${(size / of).toFixed(1)} ${unit}`;
  }
  return `${size} B`;
}

export function percent(share: number | null): string {
  if (share === null) return "";
  return `${(100 * share).toFixed(share < 0.01 ? 2 : share < 0.1 ? 1 : 0)} %`;
}

/** What a value of evidence looks like: text as it is, numbers short, lists with commas, objects as names and values. */
export function evidence(value: unknown): string {
  if (typeof value === "number") return number(value);
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.every((one) => typeof one === "number") ? `[${value.map(evidence).join(", ")}]` : value.map(evidence).join("; ");
  if (value && typeof value === "object") return Object.entries(value).map(([name, inner]) => `${name} ${evidence(inner)}`).join(", ");
  return JSON.stringify(value) ?? "";
}

/** Whether every word of a filter is in the text. */
export function matches(text: string, filter: string): boolean {
  const here = text.toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => here.includes(word));
}

/** A text as Python writes it. */
export function python(text: string): string {
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** The port of an address: `grad_output` of `fc1:grad_output`, `output` of `fc1`. */
export function portOf(address: string): string {
  const found = /:([a-z_]+)(\[[^:]*)?$/.exec(address);
  return found ? found[1]! : "output";
}

export function pathOf(address: string): string {
  return address.replace(/:([a-z_]+)(\[[^:]*)?$/, "");
}
