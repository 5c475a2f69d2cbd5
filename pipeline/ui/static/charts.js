// Charts with uPlot: lines over the steps share their cursor and their zoom.

import { colour, fill, h, short } from "./dom.js";

const HEIGHT = 210;
const SMALL = 130;

export class Charts {
  constructor(onzoom) {
    this.onzoom = onzoom;
    this.drawn = new Map();
    this.wide = h("div", { class: "charts" });
    this.small = h("div", { class: "charts small" });
    this.element = h("div", {}, this.wide, h("h2", { class: "policy-title" }, "Policy"), this.small);
    this.sizes = new ResizeObserver((entries) => {
      for (const entry of entries) {
        const width = Math.floor(entry.contentRect.width);
        const held = this.drawn.get(entry.target.dataset.chart);
        if (held && held.plot && width > 60 && held.plot.width !== width) {
          held.plot.setSize({ width, height: held.plot.height });
        }
      }
    });
  }

  show(charts) {
    this.small.previousSibling.hidden = !charts.some((chart) => chart.small);
    const names = new Set(charts.map((chart) => chart.name));
    for (const [name, held] of this.drawn) {
      if (names.has(name)) continue;
      if (held.plot) held.plot.destroy();
      held.card.remove();
      this.drawn.delete(name);
    }
    for (const chart of charts) this.draw(chart);
  }

  restyle() {
    const charts = [...this.drawn.values()].map((held) => held.chart);
    this.show([]);
    this.show(charts);
  }

  draw(chart) {
    const shape = JSON.stringify([chart.series.map((series) => [series.label, series.kind]), chart.ticks, chart.caption]);
    let held = this.drawn.get(chart.name);
    if (held && held.shape !== shape) {
      if (held.plot) held.plot.destroy();
      held.card.remove();
      this.drawn.delete(chart.name);
      held = null;
    }
    if (!held) held = this.make(chart, shape);
    held.chart = chart;
    if (held.plot) held.plot.setData(columns(chart));
    else fill(held.place, rowsOf(chart));
  }

  make(chart, shape) {
    const place = h("div", { class: "plot", dataset: { chart: chart.name } });
    const card = h(
      "section",
      { class: "card chart", dataset: { name: chart.name } },
      h("h3", {}, chart.title),
      chart.caption ? h("p", { class: "caption" }, chart.caption) : null,
      place,
    );
    const held = { card, place, shape, chart, plot: null };
    this.drawn.set(chart.name, held);
    (chart.small ? this.small : this.wide).append(card);
    if (!named(chart)) {
      const width = Math.max(240, Math.floor(place.clientWidth) || 420);
      held.plot = new uPlot(this.options(chart, width, held), columns(chart), place);
      this.sizes.observe(place);
    }
    return held;
  }

  options(chart, width, held) {
    const axis = {
      stroke: colour("muted"),
      grid: { stroke: colour("grid"), width: 1 },
      ticks: { stroke: colour("grid"), width: 1 },
      font: "11px system-ui, sans-serif",
      labelFont: "11px system-ui, sans-serif",
      labelGap: 0,
      labelSize: 16,
    };
    const steps = chart.across === "step";
    const stacked = chart.series.length > 1 && chart.series.every((series) => series.kind === "bars") && !chart.ticks.length;
    return {
      width,
      height: chart.small ? SMALL : HEIGHT,
      padding: [10, 8, 0, 0],
      cursor: { sync: steps ? { key: "steps" } : undefined, points: { size: 6 }, drag: { x: true, y: false, setScale: !steps } },
      legend: { live: true },
      scales: { x: { time: false, range: chart.ticks.length ? (u, low, high) => [low - 0.6, high + 0.6] : undefined } },
      axes: [
        {
          ...axis,
          size: 34,
          label: chart.small ? undefined : chart.across,
          values: chart.ticks.length ? (u, at) => at.map((n) => held.chart.ticks[n] ?? "") : (u, at) => at.map((n) => (Number.isInteger(n) ? n : "")),
          splits: chart.ticks.length ? () => held.chart.x : undefined,
        },
        { ...axis, size: 60, label: chart.small ? undefined : chart.up, values: (u, at) => at.map(short) },
      ],
      series: [
        { label: chart.across || "", value: (u, n) => (n === null ? "–" : (held.chart.ticks[n] ?? n)) },
        ...chart.series.map((series, n) => styled(series, (u, value, place, at) => short(at === null ? null : held.chart.series[n].y[at]), stacked)),
      ],
      hooks: {
        draw: [(u) => target(u, held.chart)],
        setSelect: [
          (u) => {
            if (!steps || u.select.width < 6) return;
            const from = u.posToVal(u.select.left, "x");
            const to = u.posToVal(u.select.left + u.select.width, "x");
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            this.onzoom(Math.floor(from), Math.ceil(to));
          },
        ],
      },
    };
  }
}

function named(chart) {
  return chart.ticks.some((tick) => tick.length > 6);
}

function styled(series, value, stacked) {
  const base = { label: series.label, stroke: colour(series.colour), value, spanGaps: true };
  if (series.kind === "bars") {
    return { ...base, fill: colour(series.colour), width: 0, paths: uPlot.paths.bars({ size: [0.75, 44] }), points: { show: false } };
  }
  if (series.kind === "points") {
    return { ...base, paths: () => null, points: { show: true, size: 6, fill: colour(series.colour) } };
  }
  return { ...base, width: series.faint ? 1 : 1.75, alpha: series.faint ? 0.4 : 1, points: { show: series.y.length < 3 } };
}

// Bars are stacked by drawing the sums, the highest first.
function columns(chart) {
  const bars = chart.series.filter((series) => series.kind === "bars");
  if (bars.length < 2 || chart.ticks.length) return [chart.x, ...chart.series.map((series) => series.y)];
  const sums = [];
  let above = chart.x.map(() => 0);
  for (const series of [...chart.series].reverse()) {
    above = above.map((value, n) => value + (series.y[n] || 0));
    sums.unshift(above);
  }
  return [chart.x, ...sums];
}

function target(u, chart) {
  if (chart.target === null) return;
  const y = u.valToPos(chart.target, "y", true);
  if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
  const c = u.ctx;
  c.save();
  c.strokeStyle = colour("green");
  c.fillStyle = colour("green");
  c.setLineDash([6, 4]);
  c.beginPath();
  c.moveTo(u.bbox.left, y);
  c.lineTo(u.bbox.left + u.bbox.width, y);
  c.stroke();
  c.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  c.textAlign = "left";
  c.fillText("target", u.bbox.left + 4, y - 4);
  c.restore();
}

// Categories with long names read better from left to right.
function rowsOf(chart) {
  const series = chart.series[0];
  const most = Math.max(...series.y, 1e-9);
  return chart.ticks.map((tick, n) => {
    const bar = h("i", {});
    bar.style.width = `${(100 * series.y[n]) / most}%`;
    bar.style.background = colour(series.colour);
    return h("div", { class: "barrow" }, h("span", {}, tick), h("div", {}, bar), h("b", {}, short(series.y[n])));
  });
}
