// The cards of the page, each from the state to its own element. Every one copes with figures that a role does not have.
import { bars, columns, curve, line } from "./charts.js";
import { bytes, clock, count, decimal, dishonest, isNumber, lasting, make, nick, plain, put, reason, short, sum, whole } from "./words.js";

const WINDOW = 15; // steps that the reward's mean and band are over
const at = (id) => document.getElementById(id);
const told = new Map();

// Draw only what changed, so that what a reader has selected stays selected.
function changed(id, ...what) {
  const key = JSON.stringify(what);
  if (told.get(id) === key) return false;
  told.set(id, key);
  return true;
}

export const redrawAll = () => told.clear();

const show = (id, visible) => (at(id).hidden = !visible);
const KINDS = new Map([["honest", "good"], ["not looked at", "quiet"], ["not-scored", "quiet"], ["full", "quiet"], ["stale", "quiet"], ["duplicate", "quiet"]]);

export function hero({ node, run, progress, phase, totals, reach }) {
  const name = run?.name ? `“${plain(run.name)}”` : "a run";
  const role = node.role;
  let words = { sampler: `You sample for ${name}.`, verifier: `You keep ${name} honest.`, bootstrap: "You are a seed of the swarm." }[role];
  if (role === "trainer") words = progress.leading === false ? `You stand by for ${name}.` : `You train ${name}.`;
  put(at("hero-words"), phase === "paused" ? `Paused. ${words ?? ""}` : (words ?? "This node starts."));
  let more = reach;
  if (phase === "starting") more = "It is starting: loading the engine and finding others.";
  else if (progress.paused?.length) more = `It begins nothing new: ${plain(progress.paused.join(", "))}.`;
  else if (progress.clock) more = `Beware: ${plain(progress.clock)}.`;
  else if (progress.failing) more = `Failing: ${plain(progress.failing)}`;
  else if (progress.leader_is_silent) more = "The run's leader is silent. This node waits for it, or for the next one.";
  else if (role === "sampler" && progress.joined === false) more = "It asks to be let into the roster. That takes the trainer's next version.";
  else if (role === "sampler" && isNumber(progress.accepted)) more = `${count(progress.accepted, "group")} of yours were accepted so far.`;
  else if (role === "verifier") more = `${count(sum(progress.verdicts), "group")} came by; ${whole(dishonest(progress.verdicts))} found dishonest.`;
  else if (role === "trainer" && totals.steps) more = `${count(totals.groups, "group")} of the swarm became ${count(totals.steps, "step")} so far.`;
  put(at("hero-more"), more);
}

/** Verified tokens: this node's own count, or what a verifier attests, where that is more since the node began anew. */
function credit(own) {
  if (!isNumber(own?.tokens)) return [null, ""];
  const attested = own.attested ?? {};
  const more = isNumber(attested.tokens) && attested.tokens > own.tokens;
  const { tokens, groups } = more ? attested : own;
  return [short(tokens), `verified tokens in ${count(groups ?? 0, "group")}${more ? ", as a verifier attests" : ""}`];
}

export function tiles(state) {
  const { progress, totals, peers, run, steps } = state;
  const here = peers.filter((peer) => peer.connected && !peer.me).length;
  const before = steps.length > 20 ? mean(steps.slice(-40, -20)) : null;
  const saved = savedBytes(state);
  const found = [
    ["Reward", isNumber(progress.reward) ? decimal(progress.reward) : null, trend(progress.reward, before)],
    ["Held out", isNumber(progress.evaluation?.reward) ? decimal(progress.evaluation.reward) : null, isNumber(progress.evaluation?.best_reward) ? `best ${decimal(progress.evaluation.best_reward)}, version ${whole(progress.evaluation.best_version)}, kept` : ""],
    ["Accepted", isNumber(progress.accepted) ? short(progress.accepted) : null, sum(progress.refused) ? `${short(sum(progress.refused))} refused` : "none refused"],
    ["Credit", ...credit(progress.credit)],
    ["Honest", progress.verdicts ? short(progress.verdicts.honest ?? 0) : null, count(dishonest(progress.verdicts), "forgery", "forgeries")],
    ["Version", isNumber(progress.version) ? whole(progress.version) : null, isNumber(progress.step) ? `step ${whole(progress.step)}` : isNumber(progress.engine_version) ? `the engine has ${whole(progress.engine_version)}` : "the newest here"],
    ["Tokens a second", isNumber(progress.tokens_per_second) ? short(progress.tokens_per_second) : null, totals.tokens ? `${short(totals.tokens)} learnt from` : "over the last seconds"],
    ["Samplers", isNumber(progress.samplers) ? whole(progress.samplers) : null, isNumber(progress.waiting) ? `${short(progress.waiting)} groups wait` : ""],
    ["To deliver", !isNumber(progress.samplers) && isNumber(progress.waiting) ? short(progress.waiting) : null, "groups on their way"],
    ["Peers", whole(here), `of ${whole(Math.max(0, peers.length - 1))} known`],
    ["Saved", saved ? `${saved.share} %` : null, saved ? `${bytes(saved.bytes)} not sent` : ""],
    ["Up for", lasting(state.at - (state.node.began ?? state.at)), run?.mode ? `mode ${plain(run.mode)}` : ""],
  ].filter(([, value]) => value !== null).slice(0, 6);
  if (!changed("tiles", found)) return;
  at("tiles").replaceChildren(...found.map(([label, value, note]) => {
    const tile = make("div", "tile");
    const shown = make("dd", "", undefined);
    shown.append(make("span", "tile-value", value), make("span", "tile-note", note));
    tile.append(make("dt", "", label), shown);
    return tile;
  }));
}

const mean = (rows) => rows.reduce((total, row) => total + (row.reward ?? 0), 0) / rows.length;

function trend(now, before) {
  if (!isNumber(now) || before === null) return "mean of the last steps";
  const by = now - before;
  return Math.abs(by) < 0.005 ? "steady" : `${by > 0 ? "▲" : "▼"} ${Math.abs(by).toFixed(2)} in 30 steps`;
}

function savedBytes({ run, totals }) {
  const full = (run?.model_bytes ?? 0) * totals.versions;
  if (!full || !totals.bytes_out) return null;
  const left = full - totals.bytes_out;
  return { full, bytes: left, share: ((100 * left) / full).toFixed(left / full > 0.995 ? 1 : 0) };
}

export function reward({ steps, node, progress }) {
  show("reward-card", node.role === "trainer" || steps.length > 0);
  const rows = [];
  const recent = [];
  for (const step of steps) {
    if (!isNumber(step.reward)) continue;
    recent.push(step.reward);
    if (recent.length > WINDOW) recent.shift();
    const middle = recent.reduce((total, each) => total + each, 0) / recent.length;
    const spread = Math.sqrt(recent.reduce((total, each) => total + (each - middle) ** 2, 0) / recent.length);
    rows.push({ x: step.step, y: step.reward, mean: middle, low: middle - spread, high: middle + spread, spread });
  }
  const held = progress.evaluation;
  const marks = Array.isArray(held?.curve) ? held.curve.filter(([step, value]) => isNumber(step) && isNumber(value)) : [];
  if (at("reward-card").hidden || !changed("reward", rows.length, rows.at(-1), marks)) return;
  curve(at("reward"), rows, {
    marks,
    label: `Reward over ${rows.length} steps`,
    none: "The curve begins with the second step.",
    xWords: (value) => `${Math.round(value)}`,
    words: (row) => `step ${row.x}: ${row.y.toFixed(3)} (mean ${row.mean.toFixed(3)} ± ${row.spread.toFixed(3)})`,
  });
  const best = rows.reduce((most, row) => Math.max(most, row.mean), 0);
  put(at("reward-aside"), rows.length ? `best mean ${best.toFixed(2)}` : "");
  put(at("reward-foot"), rows.length ? `By step. The line is the mean of ${WINDOW} steps, the band their standard deviation.${marks.length ? " Dots are held-out rewards." : ""}` : "");
}

export function mine({ node, progress, steps, moments }) {
  mineBars({ node, progress, steps });
  mineOverTime(moments);
}

function mineBars({ node, progress, steps }) {
  const sampler = isNumber(progress.accepted);
  const checks = progress.verdicts !== undefined;
  show("mine-card", !steps.length && node.role !== "trainer" && (sampler || checks));
  if (at("mine-card").hidden || !changed("mine", progress)) return;
  const parts = sampler
    ? [["accepted", progress.accepted, "good"], ["refused", sum(progress.refused), "bad"], ["on their way", progress.waiting ?? 0, "quiet"]]
    : [["honest", progress.verdicts.honest ?? 0, "good"], ["dishonest", dishonest(progress.verdicts), "bad"], ["not judged", (progress.verdicts["not looked at"] ?? 0) + (progress.verdicts["not-scored"] ?? 0), "quiet"]];
  const all = parts.reduce((total, [, value]) => total + value, 0);
  const big = make("p", "big");
  big.append(make("strong", "", whole(parts[0][1])), make("span", "", sampler ? " of your groups were accepted" : " groups were found honest"));
  const stack = make("div", "stack", undefined, { role: "img", "aria-label": parts.map(([name, value]) => `${whole(value)} ${name}`).join(", ") });
  const keys = make("ul", "legend");
  for (const [name, value, kind] of parts) {
    const piece = make("span", `piece ${kind}`);
    piece.style.flexGrow = String(value);
    if (value) stack.append(piece);
    const key = make("li", kind);
    key.append(make("i"), make("span", "", `${whole(value)} ${name}`));
    keys.append(key);
  }
  const words = !all ? "The first groups are being made. This is where you see that they count."
    : sampler ? `${Math.round((100 * parts[0][1]) / Math.max(1, parts[0][1] + parts[1][1]))} % of what was delivered was accepted. Whatever is refused is named with its reason below.`
      : "Each was replayed token by token under the very weights that it names.";
  const chart = at("mine").querySelector(".chart") ?? make("div", "chart");
  at("mine").replaceChildren(big, stack, keys, make("p", "card-foot", words), chart);
}

function mineOverTime(moments) {
  const chart = at("mine").querySelector(".chart");
  const rows = moments.map(([when, , counted]) => [when, counted]);
  if (at("mine-card").hidden || !chart || !changed("mine-chart", rows.length, rows.at(-1))) return;
  line(chart, rows, { label: "How many, over the last minutes", from: "least", ...overTime(rows, (value) => `${whole(value)} so far`) });
}

function overTime(rows, words) {
  const end = rows.at(-1)?.[0];
  return {
    none: "The curve begins in a few seconds.",
    xWords: (value) => (value === end ? "now" : `${lasting(end - value)} ago`),
    words: ([when, value]) => `${clock(when)}: ${words(value)}`,
  };
}

export function speed({ moments, progress }) {
  show("speed-card", isNumber(progress.tokens_per_second) || moments.some(([, value]) => isNumber(value)));
  if (at("speed-card").hidden || !changed("speed", moments.length, moments.at(-1))) return;
  line(at("speed"), moments, { label: "Tokens a second over the last minutes", ...overTime(moments, (value) => `${short(value)} tokens/s`) });
  put(at("speed-aside"), isNumber(progress.tokens_per_second) ? `${short(progress.tokens_per_second)} tokens/s` : "");
}

export function staleness({ totals, run, node }) {
  const ages = totals.staleness ?? {};
  show("stale-card", node.role === "trainer" || sum(ages) > 0);
  if (at("stale-card").hidden || !changed("stale", ages, run?.staleness)) return;
  const bound = run?.staleness;
  const oldest = Math.min(16, Math.max(bound ?? 0, ...Object.keys(ages).map(Number)));
  const rows = Array.from({ length: oldest + 1 }, (_, age) => [`${age}`, ages[age] ?? 0, age === 0 ? "fresh" : ""]);
  columns(at("stale"), rows, { label: "How many steps old groups were when they were learnt from", none: "No group was learnt from yet." });
  put(at("stale-aside"), isNumber(bound) ? `steps old, at most ${bound}` : "steps old");
}

export function traffic(state) {
  const { totals, run, node } = state;
  show("bytes-card", node.role === "trainer" || totals.bytes_in + totals.bytes_out > 0);
  if (at("bytes-card").hidden || !changed("bytes", totals.bytes_in, totals.bytes_out, run?.model_bytes)) return;
  const saved = savedBytes(state);
  const rows = [
    { name: "Groups in", value: totals.bytes_in, shown: bytes(totals.bytes_in), kind: "in" },
    { name: "Versions out", value: totals.bytes_out, shown: bytes(totals.bytes_out), kind: "out" },
  ];
  if (saved) rows.push({ name: "The same versions as whole weights", value: saved.full, shown: bytes(saved.full), kind: "quiet" });
  bars(at("bytes"), totals.bytes_in + totals.bytes_out ? rows : [], "Nothing was sent yet.");
  put(at("bytes-aside"), saved ? `${saved.share} % saved` : "");
}

export function refusals({ progress }) {
  const counts = progress.refused ?? progress.dropped;
  show("refused-card", counts !== undefined);
  if (counts === undefined || !changed("refused", counts)) return;
  bars(at("refused"), ranked(counts), "Nothing was refused.");
  put(at("refused-aside"), sum(counts) ? `${short(sum(counts))} in all` : "");
}

export function verdicts({ progress, peers }) {
  const counts = progress.verdicts;
  const muted = peers.filter((peer) => peer.muted);
  const condemned = counts ? 0 : (progress.dropped?.condemned ?? 0);
  if (!changed("verdicts", counts, condemned, muted)) return;
  const rows = ranked(counts ?? {});
  if (condemned) rows.push({ name: "groups condemned", value: condemned, words: "verdicts against them came before they were learnt from", kind: "bad" });
  for (const peer of muted) rows.push({ name: `${peer.me ? "you are" : `${nick(peer.peer_id)} is`} muted`, value: 0, shown: "", words: peer.muted, kind: "bad" });
  bars(at("verdicts"), rows, counts ? "No group was looked at yet." : "Nobody is muted. Verdicts are kept by verifiers; whom they condemn stands here.");
  put(at("verdict-aside"), muted.length ? count(muted.length, "peer muted", "peers muted") : "");
}

function ranked(counts) {
  return Object.entries(counts)
    .filter(([, value]) => isNumber(value) && value > 0)
    .sort((a, b) => b[1] - a[1])
    .slice(0, 12)
    .map(([name, value]) => ({ name, value, words: reason(name), kind: KINDS.get(name) ?? "bad" }));
}

function table(box, heads, rows) {
  const grid = make("table");
  const top = make("tr");
  top.append(...heads.map(([name, kind]) => make("th", kind ?? "", name, { scope: "col" })));
  const head = make("thead");
  head.append(top);
  const body = make("tbody");
  for (const row of rows) {
    const line = make("tr", row.kind ?? "");
    line.append(...row.cells.map((cell, index) => (cell instanceof Node ? cell : make("td", heads[index][1] ?? "", cell))));
    body.append(line);
  }
  grid.append(head, body);
  box.replaceChildren(grid);
}

export function versions({ steps, run, node }) {
  show("versions-card", node.role === "trainer" || steps.length > 0);
  const out = steps.filter((step) => isNumber(step.version) && step.bytes_out > 0).slice(-40).reverse();
  if (at("versions-card").hidden || !changed("versions", out[0], out.length)) return;
  if (!out.length) return void at("versions").replaceChildren(make("p", "empty", "No version was published yet."));
  table(at("versions"), [["Version"], ["Head"], ["Reward", "number"], ["Size", "number"], ["At", "number"]], out.map((step) => ({
    cells: [`v${step.version}`, code(plain(step.head ?? "").slice(0, 8)), decimal(step.reward), bytes(step.bytes_out), clock(step.at)],
  })));
  put(at("versions-aside"), run?.model_bytes ? `whole weights ${bytes(run.model_bytes)}` : "");
}

const code = (text) => {
  const cell = make("td");
  cell.append(make("code", "", text));
  return cell;
};

export function peers({ peers: all, progress }) {
  const newest = Math.max(0, ...[progress.step, ...all.map((peer) => peer.step)].filter(isNumber));
  const rank = { trainer: 0, verifier: 1, sampler: 2 };
  const sorted = [...all].sort((a, b) => (b.me ? 1 : 0) - (a.me ? 1 : 0) || (rank[a.role] ?? 3) - (rank[b.role] ?? 3) || (b.groups ?? 0) - (a.groups ?? 0)).slice(0, 200);
  if (!changed("peers", sorted, newest)) return;
  const any = (name) => all.some((peer) => peer[name] !== undefined && peer[name] !== null);
  const heads = [["Peer"], ["Role"], ...(any("engine") ? [["Engine"]] : []), ...(any("groups") ? [["Groups", "number"]] : []), ...(any("step") ? [["Step", "number"]] : []), ["State"]];
  table(at("peers"), heads, sorted.map((peer) => {
    const who = make("td");
    who.append(make("code", "", nick(peer.peer_id), { title: peer.peer_id }));
    if (peer.me) who.append(make("span", "tag", "you"));
    const role = make("td");
    const dot = make("span", `role ${["trainer", "verifier", "sampler"].includes(peer.role) ? peer.role : "peer"}`);
    dot.append(make("i"), make("span", "", peer.role));
    role.append(dot);
    const state = peer.muted ? `muted: ${peer.muted}` : peer.connected ? "connected" : "away";
    const lag = isNumber(peer.step) ? newest - peer.step : null;
    const cells = [who, role];
    if (any("engine")) cells.push(peer.engine ?? "");
    if (any("groups")) cells.push(isNumber(peer.groups) ? whole(peer.groups) : "");
    if (any("step")) cells.push(lag === null ? "" : lag ? `${peer.step} (−${lag})` : `${peer.step}`);
    cells.push(make("td", peer.muted ? "bad" : peer.connected ? "good" : "soft", state));
    return { cells };
  }));
  put(at("peers-aside"), count(all.length, "peer"));
  const here = all.filter((peer) => peer.connected && !peer.me).length;
  put(at("swarm-words"), all.length > 1 ? `This node is connected to ${whole(here)} of ${whole(all.length - 1)} peers that it knows of the run.` : "Nobody else is known yet.");
}

export function facts({ node, run, addresses, reach, program, at: now }) {
  const found = [
    ["Peer id", node.peer_id, "code"], ["Role", node.role], ["Reach", reach], ["Addresses", addresses.join("\u2003"), "code"],
    ["Run", run?.id, "code"], ["Author", run?.author, "code"], ["Contract", run?.contract],
    ["Mode", run?.mode], ["Oldest group", isNumber(run?.staleness) ? count(run.staleness, "step") : ""],
    ["Group size", isNumber(run?.group_size) ? whole(run.group_size) : ""],
    ["Whole weights", run?.model_bytes ? bytes(run.model_bytes) : ""],
    ["State", node.state, "code"], ["Started", isNumber(node.began) ? `${new Date(node.began * 1000).toLocaleString("en-GB")} (${lasting(now - node.began)})` : ""],
  ].filter(([, value]) => value);
  put(at("program"), program);
  if (!changed("facts", found)) return;
  at("facts").replaceChildren(...found.map(([name, value, kind]) => {
    const pair = make("div");
    const shown = make("dd");
    shown.append(kind === "code" ? make("code", "", value) : make("span", "", value));
    pair.append(make("dt", "", name), shown);
    return pair;
  }));
}
