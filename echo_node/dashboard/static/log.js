// What the node said, the newest first, and a way to find something in it.
import { clock, count, make, plain, put } from "./words.js";

const MOST = 200;

export class Log {
  constructor(list, kind, text, foot) {
    Object.assign(this, { list, kind, text, foot, lines: [], key: "" });
    kind.addEventListener("change", () => this.draw());
    text.addEventListener("input", () => this.draw());
  }

  show(lines) {
    this.lines = lines;
    const kinds = [...new Set(lines.map((line) => plain(line.event)))].sort();
    const there = new Set([...this.kind.options].map((option) => option.value));
    for (const kind of kinds) if (!there.has(kind)) this.kind.append(make("option", "", kind, { value: kind }));
    this.draw();
  }

  draw() {
    const wanted = this.text.value.trim().toLowerCase();
    const found = this.lines.filter(
      (line) =>
        (!this.kind.value || plain(line.event) === this.kind.value) &&
        (!wanted || `${line.event} ${line.words}`.toLowerCase().includes(wanted)),
    );
    const shown = found.slice(-MOST).reverse();
    const key = JSON.stringify([shown[0], shown.length, this.kind.value, wanted]);
    if (key === this.key) return;
    this.key = key;
    this.list.replaceChildren(
      ...shown.map((line) => {
        const item = make("li");
        item.append(
          make("time", "", clock(line.at)),
          make("span", `kind kind-${/^[a-z-]+$/.test(line.event) ? line.event : "other"}`, line.event),
          make("span", "words", line.words),
        );
        return item;
      }),
    );
    const all = this.lines.length;
    put(this.foot, found.length === all ? count(all, "line") : `${count(found.length, "line")} of ${all} match`);
  }
}
