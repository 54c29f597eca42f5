// What the page shows is in its address: #/map?stat=rms&run=0. Links are deep, back and forward work.

export interface Route {
  view: string;
  options: URLSearchParams;
}

export function read(hash: string): Route {
  const text = hash.replace(/^#\/?/, "");
  const cut = text.indexOf("?");
  const view = cut < 0 ? text : text.slice(0, cut);
  return { view: safely(view), options: new URLSearchParams(cut < 0 ? "" : text.slice(cut + 1)) };
}

function safely(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody's own percent signs
  }
}

export function write(view: string, options: Record<string, string | number | null | undefined> = {}): string {
  const kept = new URLSearchParams();
  for (const [key, value] of Object.entries(options)) {
    if (value !== null && value !== undefined && value !== "") kept.set(key, String(value));
  }
  const text = kept.toString();
  return `#/${encodeURIComponent(view)}${text ? `?${text}` : ""}`;
}
