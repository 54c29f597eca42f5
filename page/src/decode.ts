// Chunks as gaff/views/page/chunks.py packs them.

const MISSING = -32768;
const ZERO = -32767;
const INF = 32767;
const NEGATIVE_INF = -32766;
const SHIFT = 15001;

export interface Table {
  shape: number[];
  values: Float64Array | Float32Array | Uint8Array;
}

/** Inflate data without a header. Throws where it is no such data. */
export async function inflate(packed: Uint8Array): Promise<Uint8Array> {
  const stream = new Blob([packed as BlobPart]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export function decode(encoding: string, shape: number[], data: Uint8Array): Table {
  const count = shape.reduce((product, size) => product * size, 1);
  const size = { u8: 1, f64: 8, log16: 2, log16s: 2 }[encoding];
  if (size === undefined) throw new Error(`unknown encoding ${encoding}`);
  if (data.length !== count * size) throw new Error(`a table of ${shape.join("x")} has ${data.length} bytes`);
  if (encoding === "u8") return { shape, values: data };
  if (encoding === "f64") return { shape, values: numbers(data, count) };
  return { shape, values: magnitudes(data, count, shape[shape.length - 1] ?? 1, encoding === "log16s") };
}

function numbers(data: Uint8Array, count: number): Float64Array {
  const bytes = new Uint8Array(8 * count);
  for (let plane = 0; plane < 8; plane++) {
    for (let at = 0, from = plane * count; at < count; at++) bytes[8 * at + plane] = data[from + at]!;
  }
  return new Float64Array(bytes.buffer);
}

const tables = new Map<boolean, Float32Array>();

/** The value of each of the 65,536 codes. */
function meanings(isSigned: boolean): Float32Array {
  let table = tables.get(isSigned);
  if (table === undefined) {
    table = new Float32Array(65536);
    for (let code = -32768; code < 32768; code++) {
      const size = isSigned ? 2 ** ((Math.abs(code) - SHIFT) / 100) : 2 ** (code / 200);
      table[code & 0xffff] = isSigned ? Math.sign(code) * size : size;
    }
    table[MISSING & 0xffff] = NaN;
    table[ZERO & 0xffff] = 0;
    table[INF & 0xffff] = Infinity;
    table[NEGATIVE_INF & 0xffff] = -Infinity;
    tables.set(isSigned, table);
  }
  return table;
}

function magnitudes(data: Uint8Array, count: number, columns: number, isSigned: boolean): Float32Array {
  const meaning = meanings(isSigned);
  const found = new Float32Array(count);
  for (let row = 0; row < count; row += columns) {
    let code = 0;
    for (let at = row; at < row + columns; at++) {
      code = (code + (data[at]! | (data[count + at]! << 8))) & 0xffff; // differences wrap
      found[at] = meaning[code]!;
    }
  }
  return found;
}

export function fromBase64(text: string): Uint8Array {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

/** The share that a byte of magnitudes stands for: 255 is all, each step a 24/254 octave less. */
export function share(byte: number): number {
  return byte === 0 ? 0 : 2 ** (((byte - 255) * 24) / 254);
}

/** The exponent of two at which a bucket of magnitudes begins, see gaff/statistics/rows.py. */
export function lowerEdge(bucket: number): number {
  const coarse: Record<number, number> = { 0: -149, 1: -126, 2: -96, 3: -64, 60: 18, 61: 32, 62: 48, 63: 96 };
  return coarse[bucket] ?? bucket - 42;
}
