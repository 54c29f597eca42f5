// The script of pages about trainings: of one run or several, and of differences.

import { start } from "./app";
import { depth } from "./views/depth";
import { diff } from "./views/diff";
import { map } from "./views/map";
import { runs } from "./views/runs";
import { site } from "./views/site";
import { changes, coverage, gradients, optimizer, origin, recorder } from "./views/tables";
import { tree } from "./views/tree";
import { verdict } from "./views/verdict";

start({
  training: [verdict, runs, tree, depth, map, site, gradients, origin, optimizer, recorder, changes, coverage],
  diff: [diff],
});
