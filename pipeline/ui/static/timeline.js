// The timeline: lanes of spans on a canvas, event marks below each actor, arrows from cause to effect.

import { get } from "./api.js";
import { colour, debounced, fill, h, offset, seconds } from "./dom.js";

const GUTTER = 128;
const RULER = 26;
const HEIGHTS = { barrier: 15, does: 13, waits: 9, rollouts: 22 };
const MARKS_HEIGHT = 9;
const GAP = 9;
const DEEPEST = 4;
const LEAST_S = 0.0005;
const MARGIN = 0.5;
const LETTER = 5.6;
const AGAIN_MS = 250;
const COLOURS = {
  drain: "orange", hold: "sand", transfer: "blue", verify: "violet", quarantined: "rose", failed: "red", step: "green",
  checkpoint: "teal", send: "blue", server: "grey", gate: "orange", wait: "wait", rollout: "sky",
};
const LEGEND = { drain: "drain, close gate", hold: "hold", transfer: "transfer, send", verify: "verify", quarantined: "quarantined", failed: "failed", step: "step", checkpoint: "checkpoint", server: "start server", wait: "wait", rollout: "rollout" };

export class Timeline {
  constructor(onevent) {
    this.onevent = onevent;
    this.data = null;
    this.begin = 0;
    this.end = 0;
    this.length = 0;
    this.following = true;
    this.lanes = [];
    this.hits = null;
    this.hover = null;
    this.chosen = null;
    this.asked = null;
    this.loading = false;
    this.loadedAt = 0;
    this.arrows = true;
    this.canvas = h("canvas", { class: "lanes", tabindex: "0", "aria-label": "Timeline of actors" });
    this.space = h("div", { class: "space" });
    this.scroller = h("div", { class: "scroller" }, this.canvas, this.space);
    this.tip = h("div", { class: "tip", hidden: true });
    this.range = h("span", { class: "range" });
    const button = (label, title, work) => h("button", { type: "button", title, onclick: work }, label);
    const arrows = h("input", { type: "checkbox", checked: true, onchange: () => ((this.arrows = arrows.checked), this.draw()) });
    this.element = h(
      "section",
      { class: "card timeline" },
      h(
        "div",
        { class: "toolbar" },
        button("−", "Zoom out (S)", () => this.zoom(2)),
        button("+", "Zoom in (W)", () => this.zoom(0.5)),
        button("◀", "Back (A)", () => this.pan(-0.25)),
        button("▶", "On (D)", () => this.pan(0.25)),
        button("all", "The whole run (0)", () => this.whole()),
        h("label", {}, arrows, " arrows"),
        this.range,
        h("span", { class: "hint" }, "drag to move, Ctrl+wheel or double-click to zoom, shift+drag for a range"),
      ),
      h("div", { class: "legend" }, Object.entries(LEGEND).map(([kind, text]) => this.key(kind, text))),
      h("div", { class: "stage" }, this.scroller, this.tip),
    );
    this.fetch = debounced(() => this.load(), 90);
    // While the view moves, the page is not laid out anew for this text with every frame.
    this.say = debounced(() => this.data && fill(this.range, `${offset(this.begin)} – ${offset(this.end)} (${seconds(this.end - this.begin)}), ${this.data.events.toLocaleString("en")} events`), 60);
    this.listen();
  }

  key(kind, text) {
    const mark = h("i", {});
    mark.style.background = `var(--${COLOURS[kind]})`;
    return h("span", {}, mark, text);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event.offsetX)));
    canvas.addEventListener("keydown", (event) => this.type(event));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (event.ctrlKey || event.metaKey) {
          event.preventDefault();
          this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120), this.timeAt(event.offsetX));
        } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          event.preventDefault();
          this.shift((event.deltaX / this.wide()) * (this.end - this.begin));
        }
      },
      { passive: false },
    );
    this.scroller.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.resize()).observe(this.scroller);
  }

  // --- the window ---

  grown(length) {
    const before = this.length;
    this.length = Math.max(length, LEAST_S);
    if (this.following) {
      const wide = this.end - this.begin;
      if (this.begin <= 0 || wide >= before) [this.begin, this.end] = [0, this.length];
      else [this.begin, this.end] = [this.length - wide, this.length];
    }
    if (!this.element.isConnected) return;
    if (this.following || !this.data || this.end > before) this.fetch();
  }

  whole() {
    this.following = true;
    this.look(0, this.length, true);
  }

  look(begin, end, follow) {
    const wide = Math.min(Math.max(end - begin, LEAST_S), Math.max(this.length, LEAST_S));
    begin = Math.min(Math.max(begin, 0), Math.max(0, this.length - wide));
    this.begin = begin;
    this.end = begin + wide;
    this.following = follow ?? this.end >= this.length - 1e-9;
    this.draw();
    if (this.beyond() && !this.loading && performance.now() - this.loadedAt > AGAIN_MS) this.load();
    this.fetch();
  }

  // A long drag does not wait for its end to see what it comes upon.
  beyond() {
    return this.data && ((this.begin < this.data.begin && this.data.begin > 0) || (this.end > this.data.end && this.data.end < this.length));
  }

  zoom(factor, at) {
    const middle = at ?? (this.begin + this.end) / 2;
    this.look(middle - (middle - this.begin) * factor, middle + (this.end - middle) * factor);
  }

  shift(by) {
    this.look(this.begin + by, this.end + by);
  }

  pan(share) {
    this.shift(share * (this.end - this.begin));
  }

  async show(row, at) {
    this.chosen = row;
    if (at < this.begin || at > this.end) {
      const wide = this.end - this.begin;
      this.look(at - wide / 2, at + wide / 2, false);
    }
    this.draw();
  }

  async load() {
    const wide = this.end - this.begin;
    if (!(wide > 0) || this.wide() < 50) return;
    const from = Math.max(0, this.begin - wide * MARGIN);
    const to = Math.min(Math.max(this.length, LEAST_S), this.end + wide * MARGIN);
    const width = Math.min(8000, Math.max(50, Math.round((this.wide() * (to - from)) / wide)));
    const asked = (this.asked = { from, to, width });
    this.loading = true;
    try {
      const data = await get("timeline", asked);
      if (this.asked !== asked) return;
      this.data = data;
      this.arrange();
      this.draw();
    } catch (error) {
      fill(this.range, String(error.message));
    } finally {
      if (this.asked === asked) [this.loading, this.loadedAt] = [false, performance.now()];
    }
  }

  // --- geometry ---

  wide() {
    return Math.max(1, this.scroller.clientWidth - GUTTER);
  }

  // While painting: `scale` and `edge` are taken from the layout once a frame, not for each of thousands of spans.
  x(at) {
    return GUTTER + (at - this.begin) * this.scale;
  }

  timeAt(x) {
    return this.begin + ((x - GUTTER) / this.wide()) * (this.end - this.begin);
  }

  arrange() {
    const actors = new Map();
    for (const lane of this.data.lanes) {
      if (!actors.has(lane.actor)) actors.set(lane.actor, []);
      actors.get(lane.actor).push(lane);
    }
    for (const [actor, track] of this.data.open) {
      if (!actors.has(actor)) actors.set(actor, []);
      if (!actors.get(actor).some((lane) => lane.track === track)) actors.get(actor).push({ actor, track, spans: [] });
    }
    const marked = this.data.marks ? new Set(this.data.marks.map((mark) => mark[2])) : new Set(Object.keys(this.data.density));
    const names = (this.data.actors || []).filter((name) => actors.has(name) || marked.has(name));
    for (const name of [...actors.keys(), ...marked]) if (!names.includes(name)) names.push(name);
    this.marked = new Map();
    for (const mark of this.data.marks || []) {
      if (!this.marked.has(mark[2])) this.marked.set(mark[2], []);
      this.marked.get(mark[2]).push(mark);
    }
    this.rows = [];
    this.marksAt = new Map();
    this.densities = new Map();
    let y = RULER;
    for (const name of names) {
      const top = y;
      const order = Object.keys(HEIGHTS);
      const lanes = (actors.get(name) || []).sort((a, b) => order.indexOf(a.track) - order.indexOf(b.track));
      for (const lane of lanes) {
        lane.open = this.data.open.filter((open) => open[0] === name && open[1] === lane.track);
        lane.places = stacked(lane, lane.open);
        const deep = Math.max(1, ...lane.places.map((place) => place + 1));
        const tall = HEIGHTS[lane.track] * (lane.levels ? 1 : lane.track === "rollouts" && deep > 1 ? deep * 0.4 : deep);
        lane.y = y;
        lane.tall = tall;
        lane.each = lane.levels ? tall : tall / deep;
        y += tall + 2;
      }
      this.marksAt.set(name, y);
      y += MARKS_HEIGHT;
      this.rows.push({ name, top, bottom: y, lanes });
      y += GAP;
    }
    this.space.style.height = `${y}px`;
  }

  resize() {
    if (!this.element.isConnected) return;
    this.fetch();
    this.draw();
  }

  // --- drawing ---

  draw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      this.paint();
    });
  }

  paint() {
    const wide = this.scroller.clientWidth;
    const tall = this.scroller.clientHeight;
    const ratio = devicePixelRatio || 1;
    if (!this.data || wide < 60) return;
    if (this.canvas.width !== Math.round(wide * ratio) || this.canvas.height !== Math.round(tall * ratio)) {
      this.canvas.width = Math.round(wide * ratio);
      this.canvas.height = Math.round(tall * ratio);
      this.canvas.style.width = `${wide}px`;
      this.canvas.style.height = `${tall}px`;
    }
    this.measure(wide);
    const c = this.canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, wide, tall);
    const ink = this.ink || this.mix();
    this.hits = null;
    const down = this.scroller.scrollTop;
    c.save();
    c.beginPath();
    c.rect(GUTTER, RULER, wide - GUTTER, tall - RULER);
    c.clip();
    this.grid(c, ink, tall);
    c.translate(0, -down);
    c.font = "10px system-ui, sans-serif";
    c.textAlign = "left";
    for (const row of this.rows) {
      if (row.bottom < down + RULER - 4 || row.top > down + tall) continue;
      for (const lane of row.lanes) this.lane(c, lane, ink);
      this.marks(c, row.name, ink);
    }
    if (this.arrows) this.paintArrows(c, down, tall);
    c.restore();
    this.gutter(c, ink, down, tall);
    this.ruler(c, ink, wide);
    if (this.drag && this.drag.selecting) {
      c.fillStyle = ink.select;
      c.fillRect(Math.min(this.drag.x, this.drag.to), RULER, Math.abs(this.drag.to - this.drag.x), tall);
    }
    this.say();
  }

  measure(wide) {
    this.edge = Math.max(wide, GUTTER + 1);
    this.scale = (this.edge - GUTTER) / (this.end - this.begin);
  }

  // Colours are looked up once for a scheme, not for each of thousands of spans.
  mix() {
    const names = ["text", "muted", "grid", "mark", "card", "sky", "arrow", "on-span", "select"];
    this.ink = Object.fromEntries(names.map((name) => [name, colour(name)]));
    this.palette = this.data.kinds.map((kind) => colour(COLOURS[kind]));
    return this.ink;
  }

  restyle() {
    this.ink = null;
    if (this.data) {
      this.densities.clear();
      for (const lane of this.data.lanes) lane.strip = null;
    }
    this.draw();
  }

  ticks() {
    const rough = ((this.end - this.begin) / this.wide()) * 110;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    if (rough > 30) step = [60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400].find((n) => n >= rough) || 172800;
    const found = [];
    for (let at = Math.ceil(this.begin / step) * step; at <= this.end; at += step) found.push(at);
    return found;
  }

  grid(c, ink, tall) {
    c.fillStyle = ink.grid;
    for (const at of this.ticks()) c.fillRect(Math.round(this.x(at)), 0, 1, tall);
  }

  ruler(c, ink, wide) {
    c.fillStyle = ink.card;
    c.fillRect(0, 0, wide, RULER);
    c.fillStyle = ink.muted;
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "center";
    const fine = this.end - this.begin < 20;
    for (const at of this.ticks()) {
      const text = fine ? offset(at) : offset(at).slice(0, 8);
      const x = this.x(at);
      if (x > GUTTER + 20 && x < wide - 30) c.fillText(text, x, 16);
    }
    c.fillStyle = ink.grid;
    c.fillRect(GUTTER, RULER - 1, wide - GUTTER, 1);
  }

  gutter(c, ink, down, tall) {
    c.save();
    c.beginPath();
    c.rect(0, RULER, GUTTER, tall - RULER);
    c.clip();
    c.textAlign = "right";
    for (const row of this.rows) {
      const y = row.top - down;
      if (row.bottom - down < RULER || y > tall) continue;
      c.font = "600 12px system-ui, sans-serif";
      c.fillStyle = ink.text;
      c.fillText(row.name, GUTTER - 10, y + 11, GUTTER - 16);
    }
    c.restore();
  }

  lane(c, lane, ink) {
    if (lane.levels) this.levels(c, lane);
    if (lane.bins) this.binned(c, lane);
    const labels = [];
    c.globalAlpha = lane.track === "rollouts" ? 0.75 : 1;
    this.bars(c, lane, lane.spans, 0, labels);
    if (lane.open.length) {
      c.globalAlpha = 0.55;
      this.bars(c, lane, this.underWay(lane), lane.spans.length, labels);
    }
    c.globalAlpha = 1;
    c.fillStyle = ink["on-span"];
    for (const [text, x, y] of labels) c.fillText(text, x, y);
  }

  underWay(lane) {
    return lane.open.map((open) => [open[2], Math.max(this.length, open[2]), open[3], -1, `${open[4]} (under way)`]);
  }

  // Spans of a lane, whose places begin with number `first`; their names go to `labels`, to be written when all are drawn.
  bars(c, lane, spans, first, labels) {
    const tall = Math.max(lane.each - 1, 2);
    let colour = -1;
    for (let n = 0; n < spans.length; n++) {
      const span = spans[n];
      if (span[1] < this.begin || span[0] > this.end) continue;
      const left = Math.max(this.x(span[0]), GUTTER - 2);
      const width = Math.max(Math.min(this.x(span[1]), this.edge + 2) - left, 1);
      const y = lane.y + (lane.places[first + n] || 0) * lane.each;
      if (span[2] !== colour) c.fillStyle = this.palette[(colour = span[2])];
      c.fillRect(left, y, width, tall);
      if (width > 44 && tall >= 10) {
        const text = fitting(span[4], Math.floor((width - 6) / LETTER));
        if (text) labels.push([text, left + 4, y + tall / 2 + 3.5]);
      }
      if (span[3] >= 0 && span[3] === this.chosen) this.frame(c, left, y, width, tall);
    }
  }

  frame(c, left, top, width, tall) {
    c.strokeStyle = this.ink.text;
    c.lineWidth = 2;
    c.strokeRect(left - 1, top - 1, width + 2, tall + 2);
    c.lineWidth = 1;
  }

  // Bins are drawn once for each answer, a column a bin, and stretched to their place: moving costs the same for any number.
  strip(c, lane, y, tall, render) {
    const ratio = devicePixelRatio || 1;
    if (!lane.strip) {
      lane.strip = h("canvas", { width: this.data.bins, height: Math.max(1, Math.round(tall * ratio)) });
      const inner = lane.strip.getContext("2d");
      inner.scale(1, lane.strip.height / tall);
      render(inner);
    }
    const [from, to] = [this.x(this.data.begin), this.x(this.data.end)];
    c.imageSmoothingEnabled = false;
    c.drawImage(lane.strip, from, y, to - from, tall);
  }

  // Kinds of one bin stand on each other, as high as the share of the bin that they cover.
  binned(c, lane) {
    this.strip(c, lane, lane.y, lane.tall, (inner) => {
      for (const [kind, rects] of stackedBins(lane.bins, lane.tall - 1)) {
        inner.fillStyle = this.palette[kind];
        for (const [bin, top, tall] of rects) inner.fillRect(bin, top, 1, tall);
      }
    });
  }

  binAt(x) {
    return Math.floor(((this.timeAt(x) - this.data.begin) / (this.data.end - this.data.begin)) * this.data.bins);
  }

  // One place to point at for a whole row of bins: what lies there is looked up when somebody does.
  across(top, bottom, tell) {
    this.hits.push({ left: GUTTER, right: this.edge, top, bottom, row: -1, tell: (x) => tell(this.binAt(x)) });
  }

  levels(c, lane) {
    const most = Math.max(...lane.levels, 1);
    this.strip(c, lane, lane.y, lane.tall, (inner) => {
      inner.fillStyle = this.ink.sky;
      lane.levels.forEach((level, bin) => {
        const tall = (level / most) * (lane.tall - 2);
        if (level) inner.fillRect(bin, lane.tall - 2 - tall, 1, tall);
      });
    });
  }

  marks(c, name, ink) {
    const y = this.marksAt.get(name);
    if (this.data.marks) {
      c.fillStyle = ink.mark;
      for (const mark of this.marked.get(name) || []) {
        const x = this.x(mark[1]);
        if (x < GUTTER - 3 || x > this.edge + 3) continue;
        const chosen = mark[0] === this.chosen;
        if (chosen) c.fillStyle = ink.text;
        c.fillRect(x - 1, y + 1, 2, MARKS_HEIGHT - 3);
        if (chosen) c.fillStyle = ink.mark;
        if (mark[0] === this.chosen) this.frame(c, x - 2, y, 4, MARKS_HEIGHT - 2);
      }
      return;
    }
    const counts = this.data.density[name];
    if (!counts) return;
    if (!this.densities.has(name)) this.densities.set(name, {});
    this.strip(c, this.densities.get(name), y, MARKS_HEIGHT, (inner) => {
      const most = Math.max(...counts, 1);
      inner.fillStyle = ink.mark;
      counts.forEach((n, bin) => {
        inner.globalAlpha = 0.2 + (0.8 * n) / most;
        if (n) inner.fillRect(bin, 1, 1, MARKS_HEIGHT - 3);
      });
    });
  }

  paintArrows(c, down, tall) {
    if (!this.data.arrows) return;
    const focus = this.hover && this.hover.row >= 0 ? this.hover.row : this.chosen;
    const near = (y) => y !== undefined && y > down - 200 && y < down + tall + 200;
    for (const strong of [false, true]) {
      c.strokeStyle = strong ? this.ink.text : this.ink.arrow;
      c.fillStyle = c.strokeStyle;
      c.globalAlpha = strong ? 0.95 : 0.45;
      for (const [from, to, at, then, cause, effect] of this.data.arrows) {
        if ((from === focus || to === focus) !== strong || then < this.begin || at > this.end) continue;
        const [top, bottom] = [this.marksAt.get(cause), this.marksAt.get(effect)];
        if (!near(top) && !near(bottom)) continue;
        this.arrow(c, this.x(at), top + 4, this.x(then), bottom + 4);
      }
    }
    c.globalAlpha = 1;
  }

  arrow(c, x, y, toX, toY) {
    const bend = Math.max(8, Math.min(40, Math.abs(toX - x) / 2));
    c.beginPath();
    c.moveTo(x, y);
    c.bezierCurveTo(x + bend, y, toX - bend, toY, toX, toY);
    c.stroke();
    c.beginPath();
    c.moveTo(toX, toY);
    c.lineTo(toX - 5, toY - 2.5);
    c.lineTo(toX - 5, toY + 2.5);
    c.fill();
  }

  // --- hands ---

  // What can be pointed at is gathered when somebody points, not with every frame.
  gather() {
    this.hits = [];
    this.measure(this.scroller.clientWidth);
    const [down, tall] = [this.scroller.scrollTop, this.scroller.clientHeight];
    for (const row of this.rows || []) {
      if (row.bottom < down + RULER - 4 || row.top > down + tall) continue;
      for (const lane of row.lanes) this.lanePlaces(lane);
      this.markPlaces(row.name);
    }
  }

  lanePlaces(lane) {
    const [top, bottom] = [lane.y, lane.y + lane.tall];
    if (lane.levels) {
      const most = Math.max(...lane.levels, 1);
      this.across(top, bottom, (bin) => (lane.levels[bin] ? [`${lane.actor}: ${lane.levels[bin]} rollouts under way`, `at most ${most} in this window`] : null));
    }
    if (lane.bins) {
      this.across(top, bottom, (bin) => {
        const found = lane.bins.filter((each) => each[0] === bin);
        if (!found.length) return null;
        const parts = found.map(([, kind, number]) => `${number} × ${this.data.kinds[kind]}`);
        return [`${lane.actor}: ${parts.join(", ")}`, "zoom in to see them"];
      });
    }
    [...lane.spans, ...this.underWay(lane)].forEach(([start, end, , row, name], n) => {
      if (end < this.begin || start > this.end) return;
      const left = Math.max(this.x(start), GUTTER - 2);
      const right = Math.max(Math.min(this.x(end), this.edge + 2), left + 3);
      const y = lane.y + (lane.places[n] || 0) * lane.each;
      this.hits.push({ left, right, top: y, bottom: y + Math.max(lane.each - 1, 2), row, tell: () => [`${lane.actor}: ${name}`, `${seconds(end - start)} from ${offset(start)}`] });
    });
  }

  markPlaces(name) {
    const y = this.marksAt.get(name);
    const counts = this.data.marks ? null : this.data.density[name];
    if (counts) this.across(y, y + MARKS_HEIGHT, (bin) => (counts[bin] ? [`${name}: ${counts[bin]} events`, "zoom in to see them"] : null));
    for (const [row, at, , kind] of this.marked.get(name) || []) {
      const x = this.x(at);
      if (x < GUTTER - 3 || x > this.edge + 3) continue;
      this.hits.push({ left: x - 3, right: x + 3, top: y, bottom: y + MARKS_HEIGHT, row, tell: () => [`${name}: ${kind}`, `at ${offset(at)}`] });
    }
  }

  at(event) {
    const [x, y] = [event.offsetX, event.offsetY + this.scroller.scrollTop];
    if (event.offsetY < RULER || x < GUTTER || !this.data) return null;
    if (!this.hits) this.gather();
    for (let n = this.hits.length - 1; n >= 0; n--) {
      const hit = this.hits[n];
      if (x >= hit.left && x <= hit.right && y >= hit.top && y <= hit.bottom) return hit;
    }
    return null;
  }

  press(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, to: event.offsetX, y: event.clientY, begin: this.begin, end: this.end, top: this.scroller.scrollTop, moved: false, selecting: event.shiftKey };
  }

  move(event) {
    const drag = this.drag;
    if (!drag) {
      this.point(event);
      return;
    }
    drag.to = event.offsetX;
    if (Math.abs(event.offsetX - drag.x) + Math.abs(event.clientY - drag.y) > 3) drag.moved = true;
    if (!drag.moved) return;
    this.tip.hidden = true;
    if (drag.selecting) {
      this.draw();
      return;
    }
    const by = ((drag.x - event.offsetX) / this.wide()) * (drag.end - drag.begin);
    this.look(drag.begin + by, drag.end + by);
    this.scroller.scrollTop = drag.top + drag.y - event.clientY;
  }

  release(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag) return;
    if (drag.moved && drag.selecting && Math.abs(drag.to - drag.x) > 4) {
      this.look(this.timeAt(Math.min(drag.x, drag.to)), this.timeAt(Math.max(drag.x, drag.to)));
    } else if (!drag.moved) {
      const hit = this.at(event);
      if (hit && hit.row >= 0) {
        this.chosen = hit.row;
        this.onevent(hit.row);
      }
    }
    this.draw();
  }

  point(event) {
    const hit = this.at(event);
    const there = hit ? `${hit.row} ${hit.left} ${hit.top}` : "";
    if (there !== (this.hover ? this.hover.there : "")) {
      this.hover = hit && { ...hit, there };
      if (this.data && this.data.arrows) this.draw();
    }
    this.canvas.style.cursor = hit && hit.row >= 0 ? "pointer" : "default";
    this.tip.hidden = !hit;
    if (!hit) return;
    const told = hit.tell(event.offsetX);
    this.tip.hidden = !told;
    if (!told) return;
    const [title, detail] = told;
    fill(this.tip, h("b", {}, title), h("span", {}, detail));
    const box = this.scroller.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 14, box.width - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${Math.min(event.clientY - box.top + 16, box.height - 48)}px`;
  }

  leave() {
    this.tip.hidden = true;
    if (this.hover) {
      this.hover = null;
      this.draw();
    }
  }

  type(event) {
    const work = {
      w: () => this.zoom(0.5), s: () => this.zoom(2), a: () => this.pan(-0.25), d: () => this.pan(0.25), 0: () => this.whole(),
      "+": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25),
    }[event.key];
    if (!work || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    work();
  }
}

// As much of a span's name as makes sense in so many letters: all of it, what stands before its details, or nothing.
function fitting(name, letters) {
  if (name.length <= letters) return name;
  const [short] = name.split(/[,:]/);
  return short.length <= letters ? short : "";
}

// Which of a few rows each span of a lane takes, so that none covers another; deeper ones share the last.
function stacked(lane, open) {
  const spans = [...lane.spans, ...open.map((each) => [each[2], Infinity])];
  const order = spans.map((_, n) => n).sort((a, b) => spans[a][0] - spans[b][0]);
  const deepest = lane.track === "barrier" ? 1 : lane.track === "rollouts" ? 16 : DEEPEST;
  const free = [];
  const places = new Array(spans.length).fill(0);
  for (const n of order) {
    let place = free.findIndex((end) => end <= spans[n][0] + 1e-9);
    if (place < 0) place = free.length < deepest ? free.length : deepest - 1;
    free[place] = Math.max(free[place] || 0, spans[n][1]);
    places[n] = place;
  }
  return places;
}

// Kind -> [bin, top, height] of each bin that has some of it.
function stackedBins(bins, tall) {
  const found = new Map();
  let [last, y] = [-1, tall];
  for (const [bin, kind, , share] of bins) {
    if (bin !== last) [last, y] = [bin, tall];
    const top = Math.max(0, y - Math.max(1.5, share * tall));
    if (y - top < 0.5) continue;
    if (!found.has(kind)) found.set(kind, []);
    found.get(kind).push([bin, top, y - top]);
    y = top;
  }
  return found;
}
