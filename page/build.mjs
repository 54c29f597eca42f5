// Builds the page's script and style into the package; `--check` says whether what is there is what would be built.
import { build } from "esbuild";
import { readFileSync, writeFileSync, mkdirSync } from "node:fs";

const out = new URL("../src/gaff/views/page/assets/", import.meta.url);
const limits = { "page.js": 100 * 1024, both: 150 * 1024 }; // bytes

// uPlot without its dates, bars, steps and splines, which are a fifth of it: our x is a step, our curves are lines.
const UNUSED = [
  [/^function genTimeStuffs\(ms\) \{[\s\S]*?^\}$/m, "function genTimeStuffs() { return [[1], [], () => () => []]; }"],
  [/^function fmtDate\(tpl, names\) \{[\s\S]*?^\}$/m, "function fmtDate() { return () => ''; }"],
  [/^\t\(paths\.stepped = stepped\);$/m, ""],
  [/^\t\(paths\.bars    = bars\);$/m, ""],
  [/^\t\(paths\.spline  = monotoneCubic\);$/m, ""],
  [/^function tzDate\(date, tz\) \{[\s\S]*?^\}$/m, "function tzDate(date) { return date; }"],
];
const withoutUnused = {
  name: "without-unused",
  setup(build) {
    build.onLoad({ filter: /uPlot\.esm\.js$/ }, ({ path }) => {
      let text = readFileSync(path, "utf8");
      for (const [what, instead] of UNUSED) {
        if (!what.test(text)) throw new Error(`this uPlot has no ${what}`);
        text = text.replace(what, instead);
      }
      return { contents: text, loader: "js" };
    });
  },
};

async function bundle(entry) {
  const result = await build({
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: "es2022",
    legalComments: "inline",
    charset: "ascii",
    plugins: [withoutUnused],
  });
  return result.outputFiles[0].text;
}

const made = {
  "page.js": await bundle("src/main.ts"),
  "page.css": await bundle("src/page.css"),
  "uPlot-LICENSE.txt": readFileSync("node_modules/uplot/LICENSE", "utf8"), // goes into every page
};
for (const [name, text] of Object.entries(made)) {
  if (/<\/(script|style)|-->/i.test(text)) throw new Error(`${name} would end the element that holds it`);
}
const sizes = Object.values(made).map((text) => text.length);
if (sizes[0] > limits["page.js"] || sizes[0] + sizes[1] > limits.both) {
  throw new Error(`script ${sizes[0]} bytes, style ${sizes[1]}: more than ${JSON.stringify(limits)}`);
}
if (process.argv.includes("--check")) {
  for (const [name, text] of Object.entries(made)) {
    if (readFileSync(new URL(name, out), "utf8") !== text) throw new Error(`${name} is not what page/ builds: make page`);
  }
} else {
  mkdirSync(out, { recursive: true });
  for (const [name, text] of Object.entries(made)) writeFileSync(new URL(name, out), text);
}
console.log(`script ${sizes[0]} bytes, style ${sizes[1]} bytes`);
