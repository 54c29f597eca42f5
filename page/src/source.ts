// Where the data comes from: the page itself, or a server on this machine that follows the run.

import { decode, fromBase64, inflate, type Table } from "./decode";
import type { Head } from "./types";

export interface Source {
  head: Head;
  table(chunk: number): Promise<Table>;
  /** The same runs in a range of steps, in full; null where there is nothing more than the page has. */
  zoom(begin: number, end: number): Promise<Source | null>;
}

function caching(head: Head, packed: (chunk: number) => Promise<Uint8Array>): (chunk: number) => Promise<Table> {
  const known = new Map<number, Promise<Table>>();
  return (chunk) => {
    let found = known.get(chunk);
    if (found === undefined) {
      const told = head.chunks[chunk];
      found = told
        ? packed(chunk)
            .then(inflate)
            .then((data) => decode(told.encoding, told.shape, data))
        : Promise.reject(new Error(`the page has no data ${chunk}`));
      known.set(chunk, found);
      found.catch(() => known.delete(chunk)); // a server may come back
    }
    return found;
  };
}

export function offline(head: Head): Source {
  const packed = async (chunk: number) => {
    const element = document.getElementById(`chunk-${chunk}`);
    if (element === null) throw new Error(`the data ${chunk} of this page is missing: was the file cut off?`);
    return fromBase64(element.textContent ?? "");
  };
  return { head, table: caching(head, packed), zoom: async () => null };
}

export function served(head: Head): Source {
  const { version, token } = head.live!;
  const packed = async (chunk: number) => new Uint8Array(await (await ask(`chunk/${version}/${chunk}`, token)).arrayBuffer());
  return {
    head,
    table: caching(head, packed),
    zoom: async (begin, end) => served(await fetchHead(token, `?begin=${begin}&end=${end}`)),
  };
}

export async function fetchHead(token: string, range = ""): Promise<Head> {
  return (await (await ask(`head${range}`, token)).json()) as Head;
}

async function ask(path: string, token: string): Promise<Response> {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (!answer.ok) throw new Error(`the server says ${answer.status}: ${(await answer.text()).slice(0, 200)}`);
  return answer;
}

/** Calls `changed` with the number of each new version, `state` when the connection comes and goes. */
export function follow(token: string, changed: (version: number) => void, state: (isThere: boolean) => void): void {
  const events = new EventSource(`events?token=${encodeURIComponent(token)}`); // connects again by itself
  events.addEventListener("version", (event) => changed(Number((event as MessageEvent<string>).data)));
  events.addEventListener("open", () => state(true));
  events.addEventListener("error", () => state(false));
}
