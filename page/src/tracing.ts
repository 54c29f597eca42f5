// The script of the page of one run of a model.

import { start } from "./app";
import { call } from "./views/call";
import { cost } from "./views/cost";
import { graph } from "./views/graph";
import { pictures } from "./views/pictures";
import { calls, parameters } from "./views/trace";

start({ trace: [calls, graph, cost, pictures, parameters, call] });
