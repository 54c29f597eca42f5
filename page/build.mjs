// Builds the pages' scripts and style into the package; `--check` says whether what is there is what would be built.
import { build } from "esbuild";
import { readFileSync, writeFileSync, mkdirSync } from "node:fs";

const out = new URL("../src/gaff/views/page/assets/", import.meta.url);
const MOST = 140_000; // bytes of a script

// uPlot without its dates, bars, steps and splines, which are a fifth of it: our x is a step, our curves are lines.
const UNUSED = [
  [/^function genTimeStuffs\(ms\) \{[\s\S]*?^\}$/m, "function genTimeStuffs() { return [[1], [], () => () => []]; }"],
  [/^function fmtDate\(tpl, names\) \{[\s\S]*?^\}$/m, "function fmtDate() { return () => ''; }"],
  [/^\t\(paths\.stepped = stepped\);$/m, ""],
  [/^\t\(paths\.bars    = bars\);$/m, ""],
  [/^\t\(paths\.spline  = monotoneCubic\);$/m, ""],
  [/domEnv \? nav\.language : 'en-US'/, "'en-US'"], // a browser may name a language that Intl refuses
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
  "training.js": await bundle("src/training.ts"),
  "tracing.js": await bundle("src/tracing.ts"),
  "page.css": await bundle("src/page.css"),
  "uPlot-LICENSE.txt": readFileSync("node_modules/uplot/LICENSE", "utf8"), // goes into every page that has it in it
  "dagre-LICENSE.txt": readFileSync("node_modules/@dagrejs/dagre/LICENSE", "utf8"),
};
for (const [name, text] of Object.entries(made)) {
  if (/<\/(script|style)|-->/i.test(text)) throw new Error(`${name} would end the element that holds it`);
}
const sizes = Object.entries(made).map(([name, text]) => `${name} ${text.length} bytes`);
for (const [name, text] of Object.entries(made)) {
  if (name.endsWith(".js") && text.length > MOST) throw new Error(`${name} has ${text.length} bytes: more than ${MOST}`);
}
if (process.argv.includes("--check")) {
  for (const [name, text] of Object.entries(made)) {
    if (readFileSync(new URL(name, out), "utf8") !== text) throw new Error(`${name} is not what page/ builds: make page`);
  }
} else {
  mkdirSync(out, { recursive: true });
  for (const [name, text] of Object.entries(made)) writeFileSync(new URL(name, out), text);
}
console.log(sizes.join("\n"));
