// The swarm as a picture that moves: trainers in the middle, verifiers around them, samplers outside. A dot that travels is
// a group or a version; a ring that grows is a version that goes out. It draws what the board knows, and nothing more.
import { dishonest, isNumber, nick, plain, sum } from "./words.js";

const RINGS = { trainer: 0, verifier: 0.46, sampler: 0.88, peer: 1.1 };
const SIZES = { trainer: 17, verifier: 12, sampler: 11, peer: 6 };
const MARKS = { trainer: "T", verifier: "V", sampler: "S", peer: "" };
const DRIFT = { trainer: 0.05, verifier: -0.024, sampler: 0.014, peer: -0.006 }; // radians a second
const MOST_PULSES = 60;
const MOST_LABELS = 28;
const FRAME_MS = 33;
const still = matchMedia("(prefers-reduced-motion: reduce)");

const known = (role) => (Object.hasOwn(RINGS, role) ? role : "peer");

export class Swarm {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.nodes = new Map();
    this.pulses = [];
    this.waves = [];
    this.newest = null;
    this.bound = null;
    this.drawn = 0;
    this.colours();
    document.addEventListener("themechange", () => this.colours());
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => (tip.hidden = true));
    new ResizeObserver(() => this.fit()).observe(canvas);
    this.fit();
    const turn = (now) => {
      if (now - this.drawn >= FRAME_MS && !(still.matches && !this.stale)) this.frame(now);
      requestAnimationFrame(turn);
    };
    requestAnimationFrame(turn);
  }

  colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    const names = ["ink", "soft", "line", "card", "good", "bad", "warn", "accent", "trainer", "verifier", "sampler", "peer"];
    this.colour = Object.fromEntries(names.map((name) => [name, of(name)]));
    this.stale = true;
  }

  fit() {
    const dense = Math.min(devicePixelRatio || 1, 2);
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * dense);
    this.canvas.height = Math.round(this.height * dense);
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(dense, 0, 0, dense, 0, 0);
    this.stale = true;
  }

  show(state, before) {
    const peers = state.peers ?? [];
    const rings = { trainer: [], verifier: [], sampler: [], peer: [] };
    for (const peer of peers) rings[known(peer.role)].push(peer);
    const there = new Set();
    const lonely = rings.sampler.every((peer) => peer.me); // others may well be samplers: only a trainer knows
    for (const [role, members] of Object.entries(rings)) {
      members.forEach((peer, index) => {
        const alone = role === "trainer" && members.length === 1;
        const goal = {
          angle: ((index + 0.5) / members.length) * 2 * Math.PI + ({ verifier: 0.5, peer: 0.7 }[role] ?? 0.1),
          ring: role === "trainer" && !alone ? 0.17 : role === "peer" && lonely ? RINGS.sampler : RINGS[role],
        };
        const found = this.nodes.get(peer.peer_id) ?? { angle: goal.angle, ring: goal.ring + 0.2, shown: 0 };
        this.nodes.set(peer.peer_id, Object.assign(found, { peer, role, goal }));
        there.add(peer.peer_id);
      });
    }
    for (const id of this.nodes.keys()) if (!there.has(id)) this.nodes.delete(id);
    const steps = peers.map((peer) => peer.step).filter(isNumber);
    this.newest = Math.max(state.progress.step ?? 0, ...steps);
    this.bound = state.run?.staleness ?? null;
    if (before && !still.matches && !document.hidden) this.animate(state, before);
    this.stale = true;
  }

  // What travels

  animate(state, before) {
    const me = [...this.nodes.values()].find((node) => node.peer.me);
    const of = (role) => [...this.nodes.values()].filter((node) => node.role === role && node.peer.connected);
    const now = state.progress;
    const was = before.progress;
    const rose = (name) => isNumber(now[name]) && isNumber(was[name]) && now[name] > was[name];
    const leader = of("trainer")[0];
    for (const step of state.steps.slice(before.steps.length ? before.steps.length : 0).slice(-4)) {
      for (const [id, groups] of Object.entries(step.samplers ?? {})) {
        const from = this.nodes.get(id);
        if (from && me) this.send(from, me, "sampler", Math.min(3, groups));
      }
    }
    if (me?.role === "sampler") {
      if (rose("accepted")) of("trainer").forEach((to) => this.send(me, to, "sampler", Math.min(4, now.accepted - was.accepted)));
      if (sum(now.refused) > sum(was.refused) && leader) this.send(me, leader, "bad", 1);
    }
    if (me?.role === "verifier") {
      const from = of("sampler")[0] ?? leader;
      if ((now.verdicts?.honest ?? 0) > (was.verdicts?.honest ?? 0) && from) this.send(from, me, "good", 1);
      if (dishonest(now.verdicts) > dishonest(was.verdicts) && from) this.send(from, me, "bad", 1);
    }
    if (rose("version") && leader) {
      this.waves.push({ node: leader, at: performance.now() });
      [...of("sampler"), ...of("verifier")].slice(0, 24).forEach((to) => this.send(leader, to, "trainer", 1));
    }
  }

  send(from, to, colour, times) {
    for (let index = 0; index < times && this.pulses.length < MOST_PULSES; index += 1) {
      const wait = index * 160 + Math.random() * 250;
      this.pulses.push({ from, to, colour, at: performance.now() + wait, lasts: 900 + Math.random() * 300 });
    }
  }

  // The picture

  place(node) {
    const wide = this.width / 2 - 46;
    const high = this.height / 2 - 34;
    return {
      x: this.width / 2 + Math.cos(node.angle) * node.ring * wide,
      y: this.height / 2 - 6 + Math.sin(node.angle) * node.ring * high,
    };
  }

  frame(now) {
    const seconds = Math.min(0.1, (now - this.drawn) / 1000);
    this.drawn = now;
    this.stale = false;
    const { pen, width, height } = this;
    pen.clearRect(0, 0, width, height);
    for (const node of this.nodes.values()) this.move(node, seconds);
    this.rings();
    this.links();
    this.travel(performance.now());
    const crowded = this.nodes.size > MOST_LABELS;
    const above = (node) => (node.peer.me ? 2 : node.role === "peer" ? 0 : 1);
    const order = [...this.nodes.values()].sort((a, b) => above(a) - above(b));
    for (const node of order) this.dot(node, crowded);
    pen.globalAlpha = 1;
  }

  move(node, seconds) {
    const quick = still.matches ? 1 : 1 - Math.exp(-4 * seconds);
    if (!still.matches) node.goal.angle += DRIFT[node.role] * seconds;
    const turn = Math.atan2(Math.sin(node.goal.angle - node.angle), Math.cos(node.goal.angle - node.angle));
    node.angle += turn * quick;
    node.ring += (node.goal.ring - node.ring) * quick;
    node.shown += (1 - node.shown) * quick;
  }

  rings() {
    const { pen } = this;
    pen.strokeStyle = this.colour.line;
    pen.lineWidth = 1;
    for (const ring of [RINGS.verifier, RINGS.sampler]) {
      pen.globalAlpha = 0.75;
      pen.setLineDash([2, 6]);
      pen.beginPath();
      pen.ellipse(this.width / 2, this.height / 2 - 6, (this.width / 2 - 46) * ring, (this.height / 2 - 34) * ring, 0, 0, 7);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  links() {
    const { pen } = this;
    const me = [...this.nodes.values()].find((node) => node.peer.me);
    if (!me) return;
    const here = this.place(me);
    for (const node of this.nodes.values()) {
      if (node === me || !node.peer.connected) continue;
      const there = this.place(node);
      pen.globalAlpha = 0.5 * node.shown;
      pen.strokeStyle = node.peer.muted ? this.colour.bad : this.colour.line;
      pen.lineWidth = 1.3;
      pen.beginPath();
      pen.moveTo(here.x, here.y);
      pen.lineTo(there.x, there.y);
      pen.stroke();
    }
  }

  travel(now) {
    const { pen } = this;
    this.waves = this.waves.filter((wave) => now - wave.at < 1800);
    for (const wave of this.waves) {
      const part = (now - wave.at) / 1800;
      const { x, y } = this.place(wave.node);
      pen.globalAlpha = 0.35 * (1 - part);
      pen.strokeStyle = this.colour.trainer;
      pen.lineWidth = 2;
      pen.beginPath();
      pen.ellipse(x, y, (this.width / 2 - 30) * part, (this.height / 2 - 20) * part, 0, 0, 7);
      pen.stroke();
    }
    this.pulses = this.pulses.filter((pulse) => now < pulse.at + pulse.lasts);
    for (const pulse of this.pulses) {
      const part = (now - pulse.at) / pulse.lasts;
      if (part < 0) continue;
      const eased = part * part * (3 - 2 * part);
      const from = this.place(pulse.from);
      const to = this.place(pulse.to);
      pen.fillStyle = this.colour[pulse.colour];
      for (const [back, alpha, size] of [[0.06, 0.25, 2.4], [0.03, 0.5, 3], [0, 1, 3.6]]) {
        const at = Math.max(0, eased - back);
        pen.globalAlpha = alpha * Math.min(1, 6 * (1 - part));
        pen.beginPath();
        pen.arc(from.x + (to.x - from.x) * at, from.y + (to.y - from.y) * at, size, 0, 7);
        pen.fill();
      }
    }
  }

  dot(node, crowded) {
    const { pen, colour } = this;
    const { peer, role } = node;
    const { x, y } = this.place(node);
    const size = SIZES[role] * (crowded && role !== "trainer" ? 0.7 : 1);
    const there = peer.connected ? 1 : 0.38;
    pen.globalAlpha = node.shown * there;
    if (peer.me) {
      pen.fillStyle = colour[role];
      pen.globalAlpha = 0.16 * node.shown;
      pen.beginPath();
      pen.arc(x, y, size + 10, 0, 7);
      pen.fill();
      pen.globalAlpha = node.shown;
    }
    pen.fillStyle = colour.card;
    pen.beginPath();
    pen.arc(x, y, size + 2.5, 0, 7);
    pen.fill();
    pen.fillStyle = peer.muted ? colour.bad : colour[role];
    pen.beginPath();
    pen.arc(x, y, size, 0, 7);
    pen.fill();
    this.freshness(node, x, y, size);
    if (MARKS[role] && size >= 7) {
      pen.fillStyle = colour.card;
      pen.font = `700 ${Math.round(size)}px system-ui, sans-serif`;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(peer.muted ? "×" : MARKS[role], x, y + 0.5);
    }
    if (peer.me || (!crowded && (role !== "peer" || node.goal.ring < 1))) this.label(node, x, y + size + 8, there);
  }

  // A ring around a sampler: whole when its last group was of the newest step, and shorter the older that was.
  freshness(node, x, y, size) {
    if (node.role !== "sampler" || !isNumber(node.peer.step) || !isNumber(this.newest)) return;
    const lag = Math.max(0, this.newest - node.peer.step);
    const bound = Math.max(1, this.bound ?? 4);
    this.pen.strokeStyle = lag > bound ? this.colour.warn : this.colour.sampler;
    this.pen.lineWidth = 2;
    this.pen.beginPath();
    this.pen.arc(x, y, size + 4.5, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * Math.max(0.06, 1 - lag / (bound + 1)));
    this.pen.stroke();
  }

  label({ peer, role, shown }, x, y, there) {
    const { pen } = this;
    const small = this.width < 480;
    pen.globalAlpha = shown * Math.max(0.6, there);
    pen.textAlign = "center";
    pen.textBaseline = "top";
    pen.fillStyle = peer.me ? this.colour.ink : this.colour.soft;
    pen.font = `${peer.me ? 700 : 500} 11px system-ui, sans-serif`;
    pen.fillText(peer.me ? "you" : nick(peer.peer_id), x, y);
    if (role === "sampler" && isNumber(peer.step) && !small) pen.fillText(`step ${peer.step}`, x, y + 13);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = { x: event.clientX - box.left, y: event.clientY - box.top };
    let best = null;
    let distance = 22;
    for (const node of this.nodes.values()) {
      const { x, y } = this.place(node);
      const found = Math.hypot(x - at.x, y - at.y);
      if (found < distance) [best, distance] = [node, found];
    }
    this.tip.hidden = !best;
    if (!best) return;
    this.tip.textContent = inWords(best.peer);
    this.tip.style.left = `${Math.min(Math.max(at.x + 12, 0), this.width - 230)}px`;
    this.tip.style.top = `${Math.max(0, at.y - 12)}px`;
  }
}

function inWords(peer) {
  const parts = [peer.me ? "you" : plain(peer.peer_id), peer.role];
  if (peer.engine) parts.push(peer.engine);
  if (isNumber(peer.groups)) parts.push(`${peer.groups} groups learnt from`);
  if (isNumber(peer.step)) parts.push(`last at step ${peer.step}`);
  if (peer.muted) parts.push(`muted: ${peer.muted}`);
  else if (!peer.connected) parts.push("not connected");
  return plain(parts.join(" · "));
}
