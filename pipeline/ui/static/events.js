// The events of the run: a filter, a list of which only what is seen is fetched and drawn, and one event in full.

import { embedded, get } from "./api.js";
import { count, debounced, family, fill, h, offset } from "./dom.js";

const ROW = 25;
const CHUNK_ROWS = 200;
const TALLEST = 6e6;
const CHUNKS_KEPT = 40;

export class Events {
  constructor(onevent) {
    this.onevent = onevent;
    this.total = 0;
    this.chunks = new Map();
    this.query = {};
    this.turn = 0;
    this.zero = 0;
    this.chosen = null;
    this.kind = h("select", { "aria-label": "Kind", onchange: () => this.search() });
    this.actor = h("select", { "aria-label": "Actor", onchange: () => this.search() });
    const typed = debounced(() => this.search(), 250);
    const field = (label, props) => h("input", { type: "search", "aria-label": label, placeholder: label, spellcheck: "false", oninput: typed, ...props });
    this.text = field("text in any field", { class: "grow" });
    this.since = field("from, s or time", { size: 14 });
    this.until = field("until, s or time", { size: 14 });
    this.said = h("span", { class: "said" });
    this.rows = h("div", { class: "rows" });
    this.space = h("div", { class: "space" });
    this.list = h("div", { class: "list", tabindex: "0", role: "listbox", "aria-label": "Events" }, this.space, this.rows);
    this.list.addEventListener("scroll", () => this.place());
    this.list.addEventListener("keydown", (event) => this.type(event));
    new ResizeObserver(() => this.place()).observe(this.list);
    this.element = h(
      "section",
      { class: "card events" },
      h("div", { class: "toolbar" }, this.text, this.kind, this.actor, this.since, this.until, this.said),
      h("div", { class: "row head" }, ["event", "time", "actor", "kind", "what it says"].map((name) => h("span", {}, name))),
      this.list,
    );
  }

  choices(found) {
    const families = [...new Set(found.kinds.map(family))];
    this.offer(this.kind, "every kind", [...families.map((name) => `${name}.*`), ...found.kinds]);
    this.offer(this.actor, "every actor", found.actors);
  }

  offer(select, all, values) {
    const held = select.value;
    fill(select, h("option", { value: "" }, all), values.map((value) => h("option", { value }, value)));
    if (values.includes(held)) select.value = held;
  }

  // Places count from the newest, offsets from the oldest: those stay what they are while the log grows.
  async search() {
    const turn = ++this.turn;
    this.query = { kind: this.kind.value, actor: this.actor.value, text: this.text.value, since: this.since.value, until: this.until.value };
    this.chunks.clear();
    fill(this.said, "searching …");
    try {
      const found = await get("events", { ...this.query, order: "oldest", offset: 0, limit: 1 });
      if (turn !== this.turn) return;
      this.total = found.total;
      fill(this.said, `${count(found.total)} events${embedded ? leftOut() : ""}`);
      this.list.scrollTop = 0;
      this.place();
    } catch (error) {
      if (turn !== this.turn) return;
      this.total = 0;
      fill(this.said, h("b", { class: "bad" }, error.message));
      this.place();
    }
  }

  async grown() {
    if (!this.element.isConnected || this.growing) return;
    this.growing = true;
    try {
      const turn = this.turn;
      const found = await get("events", { ...this.query, order: "oldest", offset: 0, limit: 1 });
      if (turn !== this.turn || found.total === this.total) return;
      const added = found.total - this.total;
      const top = this.list.scrollTop;
      this.total = found.total;
      for (const number of [...this.chunks.keys()]) if ((number + 1) * CHUNK_ROWS > found.total - added) this.chunks.delete(number);
      fill(this.said, `${count(found.total)} events`);
      if (top > 2) this.list.scrollTop = top + added * ROW * this.ratio();
      this.place();
    } catch {
      return;
    } finally {
      this.growing = false;
    }
  }

  ratio() {
    return Math.min(1, TALLEST / Math.max(1, this.total * ROW));
  }

  first() {
    const seen = this.list.clientHeight;
    const tall = Math.min(this.total * ROW, TALLEST);
    if (this.ratio() === 1) return this.list.scrollTop / ROW;
    return (this.list.scrollTop / Math.max(1, tall - seen)) * Math.max(0, this.total - seen / ROW);
  }

  place() {
    if (this.placing) return;
    this.placing = requestAnimationFrame(() => {
      this.placing = 0;
      this.paint();
    });
  }

  paint() {
    this.space.style.height = `${Math.min(this.total * ROW, TALLEST)}px`;
    const first = this.first();
    const start = Math.max(0, Math.floor(first) - 4);
    const stop = Math.min(this.total, start + Math.ceil(this.list.clientHeight / ROW) + 10);
    const lines = [];
    for (let place = start; place < stop; place++) lines.push(this.line(place, first));
    fill(this.rows, lines);
    if (!this.total) fill(this.rows, h("p", { class: "empty" }, "no event is like that"));
  }

  line(place, first) {
    const at = this.total - 1 - place;
    const number = Math.floor(at / CHUNK_ROWS);
    const chunk = this.chunks.get(number);
    if (!chunk) this.fetch(number);
    const event = chunk && chunk !== "asked" ? chunk[at - number * CHUNK_ROWS] : null;
    const row = event ? eventRow(event, this.zero, (chosen) => this.choose(chosen)) : h("div", { class: "row" }, h("span", {}, "…"));
    if (event && event.row === this.chosen) row.classList.add("chosen");
    row.style.transform = `translateY(${this.list.scrollTop + (place - first) * ROW}px)`;
    return row;
  }

  async fetch(number) {
    const turn = this.turn;
    this.chunks.set(number, "asked");
    while (this.chunks.size > CHUNKS_KEPT) this.chunks.delete(this.chunks.keys().next().value);
    try {
      const found = await get("events", { ...this.query, order: "oldest", offset: number * CHUNK_ROWS, limit: CHUNK_ROWS });
      if (turn !== this.turn) return;
      this.chunks.set(number, found.events);
      this.place();
    } catch (error) {
      if (turn === this.turn) fill(this.said, h("b", { class: "bad" }, error.message));
    }
  }

  choose(row) {
    this.chosen = row;
    this.place();
    this.onevent(row);
  }

  type(event) {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    this.list.scrollTop += event.key === "ArrowDown" ? ROW : -ROW;
  }
}

function leftOut() {
  const number = embedded.record.left_out;
  return number ? `, ${count(number)} common ones are left out: see pipeline ui` : "";
}

export function eventRow(event, zero, onchoose) {
  return h(
    "div",
    { class: "row", role: "option", onclick: () => onchoose(event.row), dataset: { row: String(event.row) } },
    h("span", { class: "n" }, String(event.n)),
    h("span", { class: "when", title: new Date(event.at * 1000).toISOString() }, offset(event.at - zero)),
    h("span", {}, event.actor),
    h("span", { class: `kind ${family(event.kind)}` }, event.kind),
    h("span", { class: "what" }, event.text),
  );
}

export class Detail {
  constructor(ontimeline, onsample) {
    this.ontimeline = ontimeline;
    this.onsample = onsample;
    this.zero = 0;
    this.body = h("div", { class: "body" });
    this.element = h("aside", { class: "detail", hidden: true, "aria-label": "Event" }, h("button", { type: "button", class: "close", title: "Close (Escape)", onclick: () => this.close() }, "×"), this.body);
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  close() {
    this.element.hidden = true;
  }

  async show(row) {
    this.element.hidden = false;
    try {
      const found = await get("event", { row });
      this.draw(found);
    } catch (error) {
      fill(this.body, h("p", { class: "bad" }, error.message));
    }
  }

  draw(found) {
    const chain = (events) => h("div", { class: "chain" }, events.map((event) => eventRow(event, this.zero, (row) => this.show(row))));
    fill(
      this.body,
      h("h2", {}, found.kind),
      h("p", { class: "lead" }, `event ${count(found.n)} by ${found.actor}, boot ${found.boot}, ${offset(found.at - this.zero)} after the start (${new Date(found.at * 1000).toISOString()})`),
      h(
        "p",
        { class: "buttons" },
        h("button", { type: "button", onclick: () => this.ontimeline(found.row, found.at - this.zero) }, "show in the timeline"),
        found.trajectory && (!embedded || (embedded.samples && embedded.samples.tokens[found.row])) ? h("button", { type: "button", onclick: () => this.onsample(found.row) }, "show its tokens") : null,
      ),
      h("pre", {}, JSON.stringify(found.event.body, null, 2)),
      h("h3", {}, `Causes (${found.causes.length})`),
      found.causes.length ? chain(found.causes) : h("p", { class: "caption" }, "No event led to it: a timer, a boot, or something outside of the log."),
      h("h3", {}, `Effects (${found.effects.length + found.more_effects})`),
      found.effects.length ? chain(found.effects) : h("p", { class: "caption" }, "No event followed from it at once."),
      found.more_effects ? h("p", { class: "caption" }, `and ${found.more_effects} more`) : null,
      h("h3", {}, "Envelope"),
      h("pre", {}, JSON.stringify({ ...found.event, body: undefined }, null, 2)),
    );
    this.element.scrollTop = 0;
  }
}
