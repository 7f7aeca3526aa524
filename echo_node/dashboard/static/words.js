// Numbers and texts as people read them. Text from peers goes in as text and as nothing else: there is no innerHTML here.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu;

export const plain = (value) => String(value ?? "").replace(HIDDEN, "\uFFFD");

export function put(node, text) {
  const wanted = plain(text);
  if (node.textContent !== wanted) node.textContent = wanted;
  return node;
}

export function make(tag, className = "", text = undefined, attributes = {}) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = plain(text);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, plain(value));
  return node;
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function whole(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-GB") : "–";
}

export function decimal(value, digits = 2) {
  return isNumber(value) ? value.toFixed(digits) : "–";
}

export function short(value) {
  if (!isNumber(value)) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value >= 100 || Number.isInteger(value) ? whole(value) : value.toFixed(1);
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  const names = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  let left = value;
  while (Math.abs(left) >= 1000 && index < names.length - 1) {
    left /= 1000;
    index += 1;
  }
  return `${index === 0 || left >= 100 ? Math.round(left) : left.toFixed(1)} ${names[index]}`;
}

export function lasting(seconds) {
  if (!isNumber(seconds) || seconds < 0) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

export const clock = (at) => (isNumber(at) ? new Date(at * 1000).toLocaleTimeString("en-GB") : "");

export const count = (number, one, many = `${one}s`) => `${whole(number)} ${number === 1 ? one : many}`;

export function nick(id) {
  const text = plain(id);
  return text.length > 14 ? `…${text.slice(-7)}` : text;
}

const REASONS = {
  condemned: "a verdict found it dishonest",
  duplicate: "that slot was filled before",
  "forked-head": "from a branch that a new leader left behind",
  full: "the trainer's buffer was full: slow down",
  malformed: "not a message of this protocol",
  muted: "the peer is muted because of what it sent before",
  "not-in-roster": "the sampler had not joined yet",
  "over-limit": "larger than the run allows",
  stale: "older than the run allows",
  "unknown-head": "made with weights that nobody published",
  "wrong-engine": "not the engine that it joined with",
  "wrong-prompt": "not the prompt of its slot",
  "wrong-signature": "not signed by whom it names",
  honest: "replayed, and found right",
  "not looked at": "could not be replayed on the verifier's machine: its log says why",
  "not-scored": "the contract failed on it",
  "skipped-slots": "it left out what it should have sent",
  "luck-not-its-own": "not drawn with the slot’s seed, or from other weights",
  "token-out-of-reach": "a token that those weights would not have drawn",
  "wrong-logprobs": "its log-probabilities are made up",
  "wrong-reward": "it claims another reward than it earned",
  "wrong-temperature": "drawn at another temperature",
};

export const reason = (name) => (Object.hasOwn(REASONS, name) ? REASONS[name] : "");

// What a verifier found, and could not hold against anybody.
const NEUTRAL = ["honest", "not looked at", "not-scored"];

export const dishonest = (verdicts) =>
  Object.entries(verdicts ?? {}).reduce((all, [name, each]) => all + (NEUTRAL.includes(name) || !isNumber(each) ? 0 : each), 0);

export const sum = (counts) => Object.values(counts ?? {}).reduce((all, each) => all + (isNumber(each) ? each : 0), 0);
