// Bundles the tests, which are TypeScript, and runs them with node's own runner.
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const out = mkdtempSync(join(tmpdir(), "gaff-page-"));
const names = readdirSync("test").filter((name) => name.endsWith(".test.ts"));
await build({
  entryPoints: names.map((name) => join("test", name)),
  bundle: true,
  outdir: out,
  outExtension: { ".js": ".mjs" },
  format: "esm",
  platform: "node",
  target: "node20",
});
const { status } = spawnSync(process.execPath, ["--test", out], { stdio: "inherit" });
rmSync(out, { recursive: true });
process.exit(status ?? 1);
