// Trajectories: a list to choose from, and one token by token.

import { embedded, get } from "./api.js";
import { count, debounced, fill, h, seconds, short } from "./dom.js";

const PAGE_ROWS = 60;
const HUES = [212, 28, 150, 330, 262, 48, 186, 0, 96, 300];

export class Samples {
  constructor() {
    this.offset = 0;
    this.chosen = null;
    this.found = null;
    this.mode = "version";
    const typed = debounced(() => this.search(), 250);
    this.index = h("input", { type: "search", inputmode: "numeric", placeholder: "group", "aria-label": "Group", size: 8, oninput: typed });
    this.version = h("input", { type: "search", inputmode: "numeric", placeholder: "version", "aria-label": "Version", size: 8, oninput: typed });
    const choose = (label, values) => h("select", { "aria-label": label, onchange: () => this.search() }, values.map(([value, text]) => h("option", { value }, text)));
    this.order = choose("Order", [["newest", "newest"], ["lowest", "lowest reward"], ["highest", "highest reward"], ["longest", "longest"]]);
    this.split = choose("Split", [["", "train and eval"], ["train", "train"], ["eval", "eval"]]);
    this.said = h("span", { class: "said" });
    this.table = h("div", { class: "picks", tabindex: "0" });
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.page(this.offset + PAGE_ROWS) }, "more");
    this.view = h("div", { class: "view" }, h("p", { class: "empty" }, "Choose a sample."));
    this.element = h(
      "section",
      { class: "card samples" },
      h("div", { class: "toolbar" }, this.index, this.version, this.order, this.split, this.said),
      h("div", { class: "two" }, h("div", { class: "left" }, this.table, this.more), this.view),
    );
  }

  async search() {
    this.offset = 0;
    fill(this.table);
    await this.page(0);
  }

  async page(at) {
    this.offset = at;
    const wanted = { index: this.index.value, version: this.version.value, order: this.order.value, split: this.split.value };
    try {
      const found = await get("samples", { ...wanted, offset: at, limit: PAGE_ROWS });
      if (at === 0) fill(this.table);
      this.table.append(...found.samples.map((sample) => this.pick(sample)));
      this.more.hidden = at + found.samples.length >= found.total;
      fill(this.said, `${count(found.total)} samples${embedded ? ` of the newest ${count(embedded.samples.samples.length)}; the run has ${count(embedded.samples.of)}` : ""}`);
      if (!found.total) fill(this.table, h("p", { class: "empty" }, "no sample is like that"));
    } catch (error) {
      fill(this.said, h("b", { class: "bad" }, error.message));
    }
  }

  pick(sample) {
    const reward = h("b", { class: sample.valid ? "" : "bad" }, short(sample.reward));
    return h(
      "button",
      { type: "button", class: sample.row === this.chosen ? "pick chosen" : "pick", dataset: { row: String(sample.row) }, onclick: () => this.show(sample.row) },
      h("span", { class: "grow" }, `group ${sample.index}, sample ${sample.sample}`),
      h("span", { class: "caption" }, `v ${sample.versions.join(", ") || "?"} · ${sample.tokens} tokens`),
      reward,
    );
  }

  async show(row) {
    this.chosen = row;
    for (const pick of this.table.querySelectorAll(".pick")) pick.classList.toggle("chosen", pick.dataset.row === String(row));
    try {
      this.found = await get("sample", { row });
      this.draw();
    } catch (error) {
      fill(this.view, h("p", { class: "bad" }, error.message));
    }
  }

  draw() {
    const { event, trajectory, note } = this.found;
    const facts = [
      ["reward", short(event.reward)], ["task", event.task], ["attempt", event.attempt], ["split", event.split], ["stop", event.stop_reason],
      ["tokens", `${event.prompt_tokens} + ${event.tokens}`], ["seconds", seconds(event.seconds)], ["collector", event.actor],
      ["versions", event.versions.join(", ")], ["masked", event.mask_reason || "no"],
      ...Object.entries(trajectory ? trajectory.components : {}).map(([name, value]) => [name, short(value)]),
    ];
    const modes = [["version", "policy version"], ["logprob", "log-probability"], ["mask", "loss mask"]];
    fill(
      this.view,
      h("h2", {}, `Group ${event.index}, sample ${event.sample}`),
      h("div", { class: "facts" }, facts.map(([name, value]) => h("span", {}, h("i", {}, name), String(value)))),
      note ? h("p", { class: "note" }, note) : null,
      trajectory
        ? h("div", { class: "modes" }, "colour by ", modes.map(([mode, label]) => h("button", { type: "button", class: mode === this.mode ? "chosen" : "", onclick: () => ((this.mode = mode), this.draw()) }, label)))
        : null,
      trajectory ? trajectory.sequences.map((sequence, n) => this.sequence(sequence, n, trajectory.sequences.length)) : null,
      trajectory && Object.keys(trajectory.info).length ? [h("h3", {}, "What the environment said"), h("pre", {}, JSON.stringify(trajectory.info, null, 2))] : null,
    );
  }

  sequence(sequence, n, of) {
    const versions = [...new Set(sequence.spans.filter((span) => span.origin === "sampled").map((span) => span.policy_version))].sort((a, b) => a - b);
    const hue = new Map(versions.map((version, at) => [version, HUES[at % HUES.length]]));
    const text = h("div", { class: "tokens" });
    for (const span of sequence.spans) {
      const stop = Math.min(span.end, sequence.tokens.length);
      for (let at = span.start; at < stop; at++) text.append(this.token(sequence, span, at, hue));
    }
    const tip = h("div", { class: "tokentip" }, "Point at a token.");
    text.addEventListener("pointerover", (event) => {
      const at = event.target.dataset.at;
      if (at !== undefined) fill(tip, said(sequence, Number(at)));
    });
    const sampled = sequence.logprobs.filter((value) => value !== null);
    const mean = sampled.length ? sampled.reduce((sum, value) => sum + value, 0) / sampled.length : null;
    return h(
      "div",
      { class: "sequence" },
      of > 1 ? h("h3", {}, `Sequence ${n + 1} of ${of}`) : null,
      h("p", { class: "caption" }, `${count(sequence.length)} tokens, temperature ${short(sequence.temperature)}, ended by ${sequence.stop_reason}, mean logprob ${short(mean)}`),
      this.legend(versions, hue),
      text,
      tip,
      sequence.tokens.length < sequence.length ? h("p", { class: "caption" }, `the first ${count(sequence.tokens.length)} tokens are shown`) : null,
    );
  }

  legend(versions, hue) {
    const key = (label, style) => {
      const mark = h("i", {});
      mark.style.background = style;
      return h("span", {}, mark, label);
    };
    if (this.mode === "version") return h("div", { class: "legend" }, key("given", "var(--given)"), versions.map((version) => key(`version ${version}`, shade(hue.get(version)))));
    if (this.mode === "mask") return h("div", { class: "legend" }, key("trained on", shade(150)), key("not trained on", "var(--given)"));
    return h("div", { class: "legend" }, key("likely", heat(0)), key("p = 0.37", heat(-1)), key("p = 0.05", heat(-3)), key("p < 0.003", heat(-6)));
  }

  token(sequence, span, at, hue) {
    const text = sequence.tokens[at];
    const element = h("span", { dataset: { at: String(at) }, class: span.origin }, text.replaceAll("\n", "⏎\n") || "\u200b");
    const sampled = span.origin === "sampled";
    if (this.mode === "version" && sampled) element.style.background = shade(hue.get(span.policy_version));
    if (this.mode === "logprob" && sampled) element.style.background = heat(sequence.logprobs[at]);
    if (this.mode === "mask" && sequence.mask[at]) element.style.background = shade(150);
    return element;
  }
}

function said(sequence, at) {
  const span = sequence.spans.find((each) => each.start <= at && at < each.end);
  const logprob = sequence.logprobs[at];
  const parts = [`token ${at}, id ${sequence.ids[at]}, ${JSON.stringify(sequence.tokens[at])}`];
  if (span.origin === "sampled") parts.push(`version ${span.policy_version} on ${span.engine}, boot ${span.boot}`, `logprob ${short(logprob)} (p = ${short(Math.exp(logprob))})`);
  else parts.push("given by the environment");
  parts.push(sequence.mask[at] ? "trained on" : "not trained on");
  return parts.map((part) => h("span", {}, part));
}

function shade(hue) {
  return `hsl(${hue} 70% 55% / 0.28)`;
}

function heat(logprob) {
  const share = Math.min(1, Math.max(0, -logprob / 6));
  return `hsl(${130 - 130 * share} 75% 50% / ${0.14 + 0.4 * share})`;
}
