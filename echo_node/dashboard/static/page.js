// The page: the node's news to the cards, and the person's wishes to the node.
import { Log } from "./log.js";
import { FORMAT, follow } from "./news.js";
import * as panels from "./panels.js";
import { Swarm } from "./swarm.js";
import { make, plain, put } from "./words.js";

const at = (id) => document.getElementById(id);
const swarm = new Swarm(at("swarm"), at("swarm-tip"));
const log = new Log(at("log"), at("log-kind"), at("log-text"), at("log-foot"));
const PHASES = { starting: "starting", working: "working", paused: "paused", stopping: "stopping" };
let state = null;

function notice(words) {
  at("notice").hidden = !words;
  put(at("notice"), words);
}

function phase(name) {
  at("phase").className = `pill ${PHASES[name] ?? "lost"}`;
  put(at("phase"), PHASES[name] ?? name);
}

function draw(before) {
  notice("");
  phase(state.phase);
  put(at("run-name"), state.run?.name ?? "");
  document.title = plain([state.run?.name, state.node.role, "echo-node"].filter(Boolean).join(" · "));
  for (const card of ["hero", "tiles", "reward", "mine", "speed", "staleness", "traffic", "refusals", "verdicts", "versions", "peers", "facts"]) {
    panels[card](state);
  }
  swarm.show(state, before);
  log.show(state.log);
  at("pause").hidden = !(state.may_control && token);
  put(at("pause"), state.phase === "paused" ? "Resume" : "Pause");
}

function heard(now, before) {
  state = now;
  if (now.format !== FORMAT) return notice("The node was upgraded: load this page again.");
  return draw(before);
}

follow(heard, () => {
  phase("lost");
  notice("The node does not answer. It may have ended, or this page is one too many. Trying again…");
});

// The token comes behind the # of the address, which no server sees, and is gone from it at once.
let token = null;
try {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("echo-token", given);
    history.replaceState(null, "", location.pathname);
  }
  token = sessionStorage.getItem("echo-token");
} catch {
  token = null; // a browser that keeps nothing
}

at("pause").addEventListener("click", async () => {
  const wish = state?.phase === "paused" ? "resume" : "pause";
  at("pause").disabled = true;
  try {
    const answer = await fetch(`api/${wish}`, { method: "POST", headers: { "X-Echo-Token": token } });
    if (!answer.ok) notice(await answer.text());
  } catch {
    notice("The node does not answer.");
  } finally {
    at("pause").disabled = false;
  }
});

for (const [role, words] of [["trainer", "trainer"], ["verifier", "verifier"], ["sampler", "sampler"], ["peer", "other"]]) {
  const item = make("li", role);
  item.append(make("i"), make("span", "", words));
  at("swarm-legend").append(item);
}

let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    panels.redrawAll();
    if (state) draw(state);
  }, 150);
});
