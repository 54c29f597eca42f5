// What the page's head holds. The Python side that writes it: gaff/views/page/training.py, one_run.py and parting.py.

export interface Finding {
  rule: string;
  site: string;
  model: string;
  address: string;
  since: number;
  last: number;
  share: number;
  severity: "error" | "warning" | "info";
  message: string;
  cause: string;
  remedy: string;
  evidence: Record<string, unknown>;
  numbers: Record<string, unknown>; // the evidence as people are told it
  also: string[];
  look: string;
  rank: number;
  is_over: boolean;
}

export type End = "highest" | "lowest" | "latest" | "now"; // now: the last number of each row, one column

export interface Group {
  group: string;
  phase: string;
  sites: number[]; // places in Run.sites, a row each
  first: number[]; // the steps of each column
  last: number[];
  stats: Record<string, Partial<Record<End, number>>>; // numbers of chunks
  marks: number[]; // the steps whose magnitudes are known
  together: number; // sites whose magnitudes are in one chunk
  magnitudes: number[];
}

export interface Reached {
  model: string;
  path: string;
  shape: string;
  dtype: string;
  state: string;
  step: number;
  norm: number | null;
  rms: number | null;
  weight: number | null;
  ratio: number | null;
}

/** The verdict in its parts, and the run in a few facts. */
export interface About {
  state: string;
  cause: string;
  rule: string;
  evidence: string[];
  remedy: string;
  since: number | null;
  others: [name: string, text: string, certainty: string][];
  next: [string, string][]; // why, and what to run
  seconds: number | null;
  stepSeconds: number | null;
  device: string;
  ended: string;
  hasFailed: boolean;
  cost: string;
  spent: number | null;
  steady: number | null;
  settings: [string, string][];
  evaluated: [string, number, number | null, string][]; // name, step, loss, and as it is told
  ends: Record<string, string>; // by the name of a loss its last value, which may be no number
  saved: [number, string][]; // steps that were made before, and the file
}

export interface Run {
  name: string;
  path: string;
  verdict: string;
  level: string;
  steps: number;
  complete: boolean;
  error: string;
  overhead: number | null;
  about?: About; // not of a run that has still to begin
  rank: number;
  ranks: number[];
  looks: number;
  lastLook: number;
  command: string;
  began: string;
  facts: [string, string][];
  notes: string[];
  findings: Finding[];
  sites: [string, string, string][]; // model, address, name as Python takes it
  groups: Group[];
  scalars: { names: string[]; chunk?: number; low?: number; mean?: number; odd?: Record<string, { count: number; steps: number[] }> }; // odd: steps without a finite loss
  models: { name: string; class: string; compiled?: boolean; modules?: [string, string][] }[];
  gradients: Reached[];
  flight: Flight[];
  changes: Change[];
  batches: Batch[];
}

/** A batch that was kept; of large ones some samples. */
export interface Batch {
  step: number; // -1: it cannot be read
  why: string;
  inputs: { name: string; shape: number[]; type: string; bad: number[]; checked: number; shown: number[]; images: number | null; tokens: (number | string)[][] }[];
}

export interface Flight {
  step: number | null;
  seconds: number | null;
  lr: number | null;
  scale: number | null;
  samples: number | null;
  batch: string;
  losses: Record<string, number | null>;
}

export interface Change {
  step: number;
  what: string;
  lines: string[];
}

export interface Picture {
  site: string;
  kind: string; // "feature maps", "attention", "tokens x channels", "image", "class activation"
  title: string;
  chunk: number; // uint8: [tiles, height, width], or [height, width, 3] of an image
  shape: number[]; // of the tensor
  low: number;
  high: number;
  labels: string[];
  over: number | null; // the picture that this one is laid over
  signed: boolean;
}

export interface Gradient {
  shape: string;
  norm: number | null;
  zeros: number | null;
  reason: string;
}

export interface Call {
  site: string;
  path: string;
  cls: string;
  call: number;
  depth: number;
  input: string;
  output: string;
  dtype: string;
  parameters: number;
  time_s: number;
  memory_bytes: number;
  flops: number;
  statistics: { mean: number | null; std: number | null; min: number | null; max: number | null; nonfinite: number } | null;
  grad_output: Gradient | null;
  grad_input: Gradient | null;
}

export interface Trace {
  model: string;
  rows: Call[];
  tokens: string[]; // of the first example of a text, in order
  parameters: { site: string; shape: string; dtype: string; elements: number; requires_grad: boolean; grad: Gradient | null }[];
  unused_modules: string[];
  unused_parameters: string[];
  has_backward: boolean;
  device: string;
  notes: string[];
  edges: [number, number, boolean][]; // rows: the second takes what the first has made; false: or an op in between
  pictures: Picture[];
}

export interface DiffRow {
  site: string;
  other: string;
  phase: string;
  step: number | null;
  state: string;
  delta: number | null;
  tolerance: number | null;
  number: string;
  a: string;
  b: string;
  how: string;
  size: string; // the difference as people read it
  allowed: string;
}

export interface Diff {
  a: string;
  b: string;
  verdict: string;
  parted: boolean;
  rows: DiffRow[];
  only_a: string[];
  only_b: string[];
  notes: string[];
}

export interface Head {
  gaff_page: number;
  kind: "training" | "trace" | "diff";
  title: string;
  gaff: string;
  runs?: Run[];
  trace?: Trace;
  diff?: Diff;
  chunks: { encoding: string; shape: number[] }[];
  live?: { version: number; token: string };
}
