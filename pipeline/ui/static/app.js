// The page: the stall explanation on top, and four views of one run.

import { embedded, get, listen } from "./api.js";
import { Charts } from "./charts.js";
import { count, fill, h, seconds } from "./dom.js";
import { Detail, Events } from "./events.js";
import { Samples } from "./samples.js";
import { Timeline } from "./timeline.js";

const VIEWS = ["overview", "timeline", "events", ...(embedded && !embedded.samples ? [] : ["trajectories"])];
const STATES = { loading: "reading the log", live: "live", lost: "store lost", archived: "archived", stopped: "not followed", gone: "server gone" };

class App {
  constructor() {
    this.status = null;
    this.steps = {};
    this.detail = new Detail((row, at) => this.toTimeline(row, at), (row) => this.toSample(row));
    this.charts = new Charts((from, to) => this.zoomSteps(from, to));
    this.timeline = new Timeline((row) => this.detail.show(row));
    this.events = new Events((row) => this.detail.show(row));
    this.samples = new Samples();
    this.title = h("h1", {});
    this.pill = h("span", { class: "pill" });
    this.facts = h("span", { class: "headfacts" });
    this.why = h("section", { class: "card why", "aria-label": "What the run waits for", "aria-live": "polite" });
    this.tabs = h("nav", {}, VIEWS.map((name) => h("a", { href: `#${name}`, dataset: { view: name } }, name)));
    this.main = h("main", {});
    this.allSteps = h("button", { type: "button", hidden: true, onclick: () => this.zoomSteps(null, null) }, "show all steps");
    this.cards = h("div", { class: "cards" });
    this.engines = h("div", { class: "tablebox" });
    this.actors = h("div", { class: "tablebox" });
    this.mishaps = h("div", { class: "tablebox" });
    this.overview = h(
      "div",
      {},
      this.cards,
      h("div", { class: "tables" }, h("section", { class: "card" }, h("h2", {}, "Engines"), this.engines), h("section", { class: "card" }, h("h2", {}, "Actors"), this.actors)),
      h("p", { class: "zoomed" }, this.allSteps),
      this.charts.element,
      this.mishaps,
      embedded ? this.record() : null,
    );
    const page = h("div", {}, h("header", {}, this.title, this.pill, this.facts), this.why, this.tabs, this.main);
    fill(document.getElementById("app"), page, this.detail.element);
    addEventListener("hashchange", () => this.route());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.charts.restyle();
      this.timeline.restyle();
    });
    this.route();
    listen((status) => this.told(status), () => this.lost());
  }

  route() {
    const name = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
    this.view = name;
    for (const tab of this.tabs.children) tab.classList.toggle("chosen", tab.dataset.view === name);
    const shown = { overview: this.overview, timeline: this.timeline.element, events: this.events.element, trajectories: this.samples.element };
    if (this.main.firstChild !== shown[name]) fill(this.main, shown[name]);
    if (this.status) this.refresh(true);
  }

  async refresh(entered) {
    if (this.view === "overview") await this.plot();
    if (this.view === "timeline") this.timeline.grown(this.reach());
    if (this.view === "events") {
      if (entered || !this.chosen) await this.choices();
      if (this.events.turn === 0) await this.events.search();
      else await this.events.grown();
    }
    if (this.view === "trajectories" && (entered || this.samples.offset === 0) && !this.samples.chosen) await this.samples.search();
  }

  // How far the timeline goes: a live run's to this moment, for waits grow longer while nothing happens.
  reach() {
    const { state, length, now, zero } = this.status;
    return (state === "live" || state === "lost") && zero ? Math.max(length, now - zero) : length;
  }

  async choices() {
    const found = await get("choices");
    const key = JSON.stringify(found);
    if (key === this.chosen) return;
    this.chosen = key;
    this.events.choices(found);
  }

  async plot() {
    if (this.plotting) return;
    this.plotting = true;
    try {
      this.charts.show(await get("plots", this.steps));
    } finally {
      this.plotting = false;
    }
  }

  zoomSteps(from, to) {
    this.steps = { from, to };
    this.allSteps.hidden = from === null;
    this.plot();
  }

  toTimeline(row, at) {
    location.hash = "#timeline";
    this.route();
    this.timeline.show(row, at);
  }

  toSample(row) {
    location.hash = "#trajectories";
    this.detail.close();
    this.samples.chosen = row;
    this.route();
    this.samples.search();
    this.samples.show(row);
  }

  // --- what the server says ---

  lost() {
    if (this.status) this.head({ ...this.status, state: "gone" });
  }

  told(status) {
    const grown = !this.status || this.status.version !== status.version;
    this.status = status;
    this.events.zero = this.detail.zero = status.zero;
    this.head(status);
    this.explain(status);
    this.tell(status);
    if (grown || this.view === "timeline") this.refresh(false).catch(() => null);
  }

  head(status) {
    document.title = `${status.why.stuck ? "stuck: " : ""}${status.run}`;
    fill(this.title, status.run);
    this.pill.className = `pill ${status.state}`;
    const part = status.state === "loading" && status.total ? ` ${Math.floor((100 * Math.min(status.events, status.total)) / status.total)} %` : "";
    fill(this.pill, (STATES[status.state] || status.state) + part);
    const unreadable = status.unreadable ? `, ${count(status.unreadable)} can't be read` : "";
    fill(this.facts, `step ${count(status.step)} of ${count(status.steps)}, ${count(status.events)} events${unreadable}`);
  }

  explain(status) {
    const why = status.why;
    const bad = why.stuck || status.problem || status.state === "lost";
    this.why.className = `card why ${status.problem ? "stuck" : why.stuck ? "stuck" : why.also.length ? "noticed" : "fine"}`;
    const path = why.path.map((edge) => h("li", {}, h("b", {}, edge.waiter), " waits for ", h("b", {}, edge.on), ` since ${seconds(why.at - edge.since)}: ${edge.why}`, edge.deadline_at === null ? null : h("span", { class: "deadline" }, due(edge.deadline_at - why.at))));
    const headline = why.lines[0];
    fill(
      this.why,
      status.problem ? h("p", { class: "bad" }, `The log can't be read on: ${status.problem}`) : null,
      h("h2", {}, headline),
      path.length ? h("ol", { class: "path" }, path) : null,
      why.cause ? cause(why.cause) : null,
      why.cycles.map((cycle) => h("p", { class: "bad" }, `cycle: ${[...cycle, cycle[0]].join(" → ")}`)),
      why.barrier ? barrier(why) : null,
      bad || !why.pressure ? null : h("p", { class: "pace" }, `Pace: ${why.pressure.text}.`),
      why.also.length ? h("ul", { class: "also" }, why.also.map((each) => h("li", { title: each.fix }, h("code", {}, each.code), ` ${each.text}`))) : null,
    );
  }

  tell(status) {
    fill(this.cards, status.figures.map(([name, value]) => h("div", {}, h("span", {}, name), h("b", {}, value))));
    const engines = status.engines.map((engine) => [
      engine.name, h("span", { class: `state ${engine.state}` , title: engine.reason }, engine.state), seconds(engine.since), engine.version ?? "–", engine.epoch ?? "–", engine.in_flight ?? unknown(), engine.boots, engine.reason,
    ]);
    fill(this.engines, table(["engine", "state", "for", "version", "epoch", "in flight", "boots", "why"], engines));
    const actors = status.actors.map((actor) => [
      actor.name, actor.boots, actor.left ? "left" : seconds(actor.silent), actor.failed || actor.waits.join("; "),
    ]);
    fill(this.actors, table(["actor", "boots", "silent for", "waits for"], actors));
    const rows = status.mishaps.map((row) => row);
    fill(this.mishaps, rows.length ? h("section", { class: "card" }, h("h2", {}, "What went wrong"), table(["when", "who", "what"], rows)) : null);
  }

  record() {
    const { facts, config } = embedded.record;
    return h("div", {}, h("section", { class: "card" }, h("h2", {}, "Where it ran"), table(["", ""], facts)), h("details", { class: "card" }, h("summary", {}, "Configuration"), h("pre", {}, config)));
  }
}

function unknown() {
  return h("span", { title: "no gateway has a journal that can be read, or that of a long archive is being read" }, "?");
}

function due(left) {
  return left >= 0 ? `, deadline in ${seconds(left)}` : `, deadline passed ${seconds(-left)} ago`;
}

function some(names) {
  if (!names.length) return "nobody";
  return names.length <= 4 ? names.join(", ") : `${names.slice(0, 4).join(", ")} and ${names.length - 4} more`;
}

function cause(found) {
  return h(
    "div",
    { class: "cause" },
    h("p", {}, h("code", {}, found.code), ` ${found.culprit}: ${found.text}`),
    found.evidence.length ? h("ul", {}, found.evidence.map((line) => h("li", {}, line))) : null,
    h("p", { class: "fix" }, h("b", {}, "What usually fixes it: "), found.fix),
  );
}

function barrier(why) {
  const found = why.barrier;
  const missing = some(found.missing.map((each) => `${each.event} from ${each.member}`));
  return h("p", { class: "barrier" }, `Refit ${found.epoch} to version ${found.version}, in ${found.phase} since ${seconds(why.at - found.since)}${due(found.deadline_at - why.at)}. Arrived: ${some(found.arrived)}. Missing: ${missing}.`);
}

function table(names, rows) {
  const cell = (value) => h("td", {}, value instanceof Node ? value : String(value ?? ""));
  const head = names.some(Boolean) ? h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))) : null;
  return h("table", {}, head, h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))));
}

new App();
