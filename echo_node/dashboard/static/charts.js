// Three small charts in SVG: a curve with a band, a line over time, columns. And bars, which are a list.
import { isNumber, make, plain, put, whole } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const MOST_POINTS = 400;
const pointed = new WeakMap(); // where the hand is, by chart

function draw(tag, attributes = {}, text = undefined) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = plain(text);
  return node;
}

function canvas(box, label) {
  const width = Math.max(220, Math.round(box.clientWidth));
  const height = Math.max(120, Math.round(box.clientHeight));
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": plain(label) });
  return { svg, width, height, left: 40, right: width - 10, top: 10, bottom: height - 22 };
}

function empty(box, words) {
  box.replaceChildren(make("p", "empty", words));
}

function ticks(low, high, wanted = 4) {
  const span = high - low || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

const spell = (value) => (Math.abs(value) >= 1000 ? `${+(value / 1000).toFixed(1)}k` : `${+value.toFixed(2)}`);

function axes(place, { x, y, xs, ys, xWords }) {
  for (const value of ys) {
    place.svg.append(
      draw("line", { class: "rule", x1: place.left, x2: place.right, y1: y(value), y2: y(value) }),
      draw("text", { class: "tick", x: place.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, spell(value)),
    );
  }
  for (const value of xs) {
    const at = x(value);
    const anchor = at > place.right - 18 ? "end" : "middle";
    place.svg.append(draw("text", { class: "tick", x: at, y: place.bottom + 15, "text-anchor": anchor }, xWords(value)));
  }
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function thinned(rows) {
  if (rows.length <= MOST_POINTS) return rows;
  const each = rows.length / MOST_POINTS;
  const kept = Array.from({ length: MOST_POINTS }, (_, index) => rows[Math.floor(index * each)]);
  return [...kept, rows.at(-1)];
}

// The words of the nearest point, under the reader's hand, whenever the chart is drawn anew.
function probe(box, place, rows, x, words) {
  const rule = draw("line", { class: "probe", y1: place.top, y2: place.bottom, visibility: "hidden" });
  const text = draw("text", { class: "probe-words", y: place.top + 4, visibility: "hidden" });
  place.svg.append(rule, text);
  const hide = () => [rule, text].forEach((each) => each.setAttribute("visibility", "hidden"));
  const point = (clientX) => {
    const { left, width } = box.getBoundingClientRect();
    const at = ((clientX - left) / width) * place.width;
    const nearest = rows.reduce((best, row) => (Math.abs(x(row) - at) < Math.abs(x(best) - at) ? row : best), rows[0]);
    const found = x(nearest);
    rule.setAttribute("x1", found);
    rule.setAttribute("x2", found);
    text.setAttribute("x", found > place.width / 2 ? found - 6 : found + 6);
    text.setAttribute("text-anchor", found > place.width / 2 ? "end" : "start");
    put(text, words(nearest));
    [rule, text].forEach((each) => each.setAttribute("visibility", "visible"));
  };
  box.onpointermove = (event) => {
    pointed.set(box, event.clientX);
    point(event.clientX);
  };
  box.onpointerleave = () => {
    pointed.delete(box);
    hide();
  };
  if (pointed.has(box)) point(pointed.get(box));
}

// rows: {x, y, low, high, mean}; marks: [[x, y], …] are a second curve, of dots
export function curve(box, rows, { label, none, xWords, words, marks = [] }) {
  const known = thinned(rows.filter((row) => isNumber(row.x) && isNumber(row.y)));
  if (known.length < 2) return empty(box, none);
  const place = canvas(box, label);
  const first = known[0].x;
  const last = known.at(-1).x;
  const low = Math.min(0, ...known.map((row) => row.low));
  const dots = marks.filter(([at]) => at >= first - 1 && at <= last);
  const high = Math.max(...known.map((row) => row.high), ...dots.map(([, value]) => value), low + 1e-9);
  const top = high <= 1.001 && high > 0.5 ? 1 : high * 1.05;
  const x = (value) => place.left + ((value - first) / (last - first || 1)) * (place.right - place.left);
  const y = (value) => place.bottom - ((value - low) / (top - low || 1)) * (place.bottom - place.top);
  axes(place, { x, y, xs: ticks(first, last, 5), ys: ticks(low, top), xWords });
  const upper = known.map((row) => [x(row.x), y(Math.min(row.high, top))]);
  const lower = known.map((row) => [x(row.x), y(Math.max(row.low, low))]).reverse();
  place.svg.append(
    draw("path", { class: "band", d: `${path([...upper, ...lower])}Z` }),
    draw("path", { class: "faint", d: path(known.map((row) => [x(row.x), y(row.y)])) }),
    draw("path", { class: "curve", d: path(known.map((row) => [x(row.x), y(row.mean)])) }),
    draw("circle", { class: "tip", cx: x(last), cy: y(known.at(-1).mean), r: 4 }),
    draw("path", { class: "marks", d: path(dots.map(([step, value]) => [x(Math.max(step, first)), y(value)])) }),
    ...dots.map(([step, value]) => draw("circle", { class: "mark", cx: x(Math.max(step, first)), cy: y(value), r: 3 })),
  );
  probe(box, place, known, (row) => x(row.x), words);
  return box.replaceChildren(place.svg);
}

// rows: [[at, value], …]
export function line(box, rows, { label, none, xWords, words, from = "zero" }) {
  const known = thinned(rows.filter(([at, value]) => isNumber(at) && isNumber(value)));
  if (known.length < 2) return empty(box, none);
  const place = canvas(box, label);
  const first = known[0][0];
  const last = known.at(-1)[0];
  const least = from === "zero" ? 0 : Math.min(...known.map(([, value]) => value));
  const high = least + (Math.max(...known.map(([, value]) => value), least + 1) - least) * 1.1;
  const x = (at) => place.left + ((at - first) / (last - first || 1)) * (place.right - place.left);
  const y = (value) => place.bottom - ((value - least) / (high - least)) * (place.bottom - place.top);
  axes(place, { x, y, xs: [first, last], ys: ticks(least, high, 3), xWords });
  const points = known.map(([at, value]) => [x(at), y(value)]);
  const area = `${path([[x(first), place.bottom], ...points, [x(last), place.bottom]])}Z`;
  place.svg.append(draw("path", { class: "area", d: area }), draw("path", { class: "curve", d: path(points) }));
  probe(box, place, known, ([at]) => x(at), words);
  return box.replaceChildren(place.svg);
}

// rows: [[name, value, kind], …]
export function columns(box, rows, { label, none }) {
  const all = rows.reduce((total, [, value]) => total + value, 0);
  if (!all) return empty(box, none);
  const place = canvas(box, label);
  const high = Math.max(...rows.map(([, value]) => value / all));
  const wide = (place.right - place.left) / rows.length;
  const y = (share) => place.bottom - (share / high) * (place.bottom - place.top - 14);
  place.svg.append(draw("line", { class: "rule", x1: place.left, x2: place.right, y1: place.bottom, y2: place.bottom }));
  rows.forEach(([name, value, kind], index) => {
    const at = place.left + index * wide;
    const top = y(value / all);
    const share = (100 * value) / all;
    const bar = draw("rect", {
      class: `column ${kind}`,
      x: at + wide * 0.14,
      width: wide * 0.72,
      y: Math.min(top, place.bottom - 1.5),
      height: Math.max(place.bottom - top, 1.5),
      rx: 3,
    });
    bar.append(draw("title", {}, `${name}: ${whole(value)}`));
    place.svg.append(
      bar,
      draw("text", { class: "tick", x: at + wide / 2, y: place.bottom + 15, "text-anchor": "middle" }, name),
      draw("text", { class: "tick strong", x: at + wide / 2, y: top - 5, "text-anchor": "middle" },
        value ? `${share < 1 ? "<1" : Math.round(share)}%` : ""),
    );
  });
  return box.replaceChildren(place.svg);
}

// rows: {name, value, words, kind}
export function bars(box, rows, none) {
  if (!rows.length) return box.replaceChildren(make("p", "empty calm", none));
  const most = Math.max(...rows.map((row) => row.value), 1);
  const list = make("ul", "bars");
  for (const row of rows) {
    const item = make("li", row.kind ?? "");
    const head = make("p", "bar-head");
    head.append(make("span", "bar-name", row.name), make("span", "bar-value", row.shown ?? whole(row.value)));
    item.append(head);
    if (row.value) {
      const meter = make("div", "meter");
      const fill = make("div", "fill");
      fill.style.width = `${Math.max(1.5, (100 * row.value) / most)}%`;
      meter.append(fill);
      item.append(meter);
    }
    if (row.words) item.append(make("p", "bar-words", row.words));
    list.append(item);
  }
  return box.replaceChildren(list);
}
