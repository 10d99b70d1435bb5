// The one way a curve is drawn: uPlot with a legend, numbers, keys and words around it.
import { h, isNumber, number, s, share, show } from "./dom.js";

export const LEFT = 58;
export const RIGHT = 14;
const HEIGHT = 190;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [12, 4], [4, 2], [1, 4], [6, 2, 1, 2]];
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

// What charts over the same axis share: where the cursor is and what part is shown.
export class Axis {
  constructor(name) {
    this.name = name;
    this.zoom = null;
    this.cursor = null;
    this.members = new Set();
  }

  setZoom(low, high) {
    this.zoom = low === null ? null : [low, high];
    for (const member of this.members) member.zoomed?.();
    dispatchEvent(new CustomEvent("esper:zoom"));
  }

  setCursor(value, from) {
    this.cursor = value;
    for (const member of this.members) if (member !== from) member.pointed?.(value);
  }
}

const colour = (place) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--c${((place - 1) % 8) + 1}`).trim();
const named = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function faint(hex, alpha) {
  const full = hex.length === 4 ? `#${[...hex.slice(1)].map((digit) => digit + digit).join("")}` : hex;
  return full + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

export class Chart {
  // options: title, unit, note, is_share, reference, floor, ceiling
  constructor(options, axis) {
    this.options = options;
    this.axis = axis;
    this.lines = [];
    this.hidden = new Set();
    this.plot = null;
    this.place = h("div", { class: "plot", tabindex: 0, role: "group", "aria-roledescription": "chart", on: { keydown: (event) => this.key(event) } });
    this.legend = h("ul", { class: "legend" });
    this.said = h("p", { class: "unseen", "aria-live": "polite" });
    this.numbers = h("details", { class: "numbers", on: { toggle: () => this.tell() } }, h("summary", null, "Numbers"), h("div"));
    this.root = h("figure", { class: "chart", "data-chart": options.key },
      h("figcaption", null, h("h3", null, options.title), h("span", { class: "unit" }, [options.unit, `by ${axis.name}`].filter(Boolean).join(", "))),
      this.place, this.legend, options.note && h("p", { class: "note" }, options.note), this.said, this.numbers);
    axis.members.add(this);
    new ResizeObserver(() => this.resize()).observe(this.place);
    addEventListener("esper:colours", () => this.build());
  }

  // lines: {name, x, y, low, high, colour, dash, width}; undefined is no place, null is a gap
  setLines(lines) {
    const shape = (all) => all.map((line) => [line.name, line.colour, line.dash, line.width, Boolean(line.low)].join()).join("|");
    const isSame = this.plot && shape(lines) === shape(this.lines);
    this.lines = lines;
    this.align();
    if (!this.data[0].length) return this.clear();
    if (!isSame) return this.build();
    this.plot.setData(this.data, !this.axis.zoom);
    if (this.axis.zoom) this.plot.setScale("x", { min: this.axis.zoom[0], max: this.axis.zoom[1] });
    this.readOut();
    this.describe();
    this.tell();
  }

  align() {
    const places = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const at = new Map(places.map((x, index) => [x, index]));
    const column = (xs, ys) => {
      const values = new Array(places.length).fill(undefined);
      xs.forEach((x, index) => (values[at.get(x)] = ys[index]));
      return values;
    };
    this.data = [places];
    for (const line of this.lines) {
      line.at = this.data.length;
      this.data.push(column(line.x, line.y));
      if (line.low) this.data.push(column(line.x, line.high), column(line.x, line.low));
    }
  }

  clear() {
    this.plot?.destroy();
    this.plot = null;
    show(this.place, h("p", { class: "empty" }, "Nothing measured yet."));
    this.legend.replaceChildren();
    this.place.setAttribute("aria-label", `${this.options.title}: nothing measured yet.`);
  }

  format(value) {
    return this.options.is_share ? share(value) : number(value);
  }

  build() {
    if (!this.data?.[0].length) return this.clear();
    this.plot?.destroy();
    this.place.replaceChildren();
    const isGrey = document.documentElement.dataset.palette === "grey";
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, place) => {
      const stroke = colour(line.colour);
      const dash = line.dash ? DASHES[line.dash % 8] : isGrey ? DASHES[place % 8] : [];
      series.push({ label: line.name, stroke, width: line.width, dash, show: !this.hidden.has(line.name), points: { size: 5 } });
      if (line.low) {
        const edge = { stroke: "transparent", width: 0, points: { show: false }, show: !this.hidden.has(line.name) };
        bands.push({ series: [series.length, series.length + 1], fill: faint(stroke, line.isFaint ? 0.1 : 0.18) });
        series.push({ ...edge, label: "high" }, { ...edge, label: "low" });
      }
    });
    const axis = { stroke: named("muted"), font: "12px system-ui, sans-serif", grid: { stroke: named("grid"), width: 1 }, ticks: { stroke: named("grid"), width: 1, size: 4 } };
    const { is_share: isShare } = this.options;
    this.plot = new uPlot({
      width: this.place.clientWidth || 300,
      height: HEIGHT,
      padding: [8, RIGHT, 0, 0],
      legend: { show: false },
      scales: { x: { time: false, range: (plot, low, high) => this.xRange(low, high) }, y: { range: (plot, low, high) => this.yRange(low, high) } },
      axes: [
        { ...axis, incrs: STEPS, space: 44, size: 26, gap: 3 },
        { ...axis, size: LEFT, gap: 4, space: 28, values: (plot, ticks) => ticks.map((tick) => (isShare ? `${number(+(100 * tick).toPrecision(6))} %` : number(+tick.toPrecision(6)))) },
      ],
      series,
      bands,
      cursor: {
        y: false,
        focus: { prox: 24 },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.axis.setZoom(null) },
        sync: { key: this.axis.name, scales: ["x", null], setSeries: false, filters: { pub: isMove, sub: isMove } },
      },
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 4) this.axis.setZoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [(plot) => {
          this.readOut();
          if (plot.cursor.event) this.axis.setCursor(plot.cursor.idx === null || plot.cursor.idx === undefined ? null : plot.data[0][plot.cursor.idx], this);
        }],
        drawAxes: [(plot) => this.drawReference(plot)],
      },
    }, this.data, this.place);
    this.zoomed();
    this.drawLegend();
    this.describe();
    this.tell();
  }

  xRange(low, high) {
    if (this.axis.zoom) return this.axis.zoom;
    if (!isNumber(low)) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  yRange(low, high) {
    const { floor, ceiling, is_share: isShare } = this.options;
    if (!isNumber(low) || !isNumber(high)) return [0, 1];
    if (isNumber(floor)) low = Math.min(low, floor);
    if (isNumber(ceiling)) high = Math.max(high, ceiling);
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || (isShare ? 0.05 : 0.5);
    return [low === floor ? low : low - pad, high === ceiling ? high : high + pad];
  }

  drawReference(plot) {
    const { reference } = this.options;
    if (!isNumber(reference) || reference < plot.scales.y.min || reference > plot.scales.y.max) return;
    const { ctx, bbox } = plot;
    const y = plot.valToPos(reference, "y", true);
    ctx.save();
    ctx.strokeStyle = named("muted");
    ctx.setLineDash([3 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  drawLegend() {
    const isGrey = document.documentElement.dataset.palette === "grey";
    this.values = [];
    this.legend.replaceChildren(...this.lines.map((line, place) => {
      const value = h("span", { class: "value" });
      this.values.push(value);
      const dash = line.dash ? DASHES[line.dash % 8] : isGrey ? DASHES[place % 8] : [];
      return h("li", null, h("button", {
        type: "button", "aria-pressed": String(!this.hidden.has(line.name)), title: "Show or hide",
        on: { click: (event) => this.toggle(line, event.currentTarget) },
      }, s("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" },
        s("path", { d: "M1 4H21", class: `s${((line.colour - 1) % 8) + 1}`, "stroke-width": line.width + 0.6, "stroke-dasharray": dash.join(" ") || null })),
      line.name, value));
    }));
    this.readOut();
  }

  toggle(line, button) {
    const isShown = this.hidden.has(line.name);
    if (isShown) this.hidden.delete(line.name);
    else this.hidden.add(line.name);
    button.setAttribute("aria-pressed", String(isShown));
    for (let at = line.at; at < line.at + (line.low ? 3 : 1); at += 1) this.plot.setSeries(at, { show: isShown });
  }

  at() {
    const idx = this.plot?.cursor.idx;
    return idx === null || idx === undefined || this.plot.cursor.left < 0 ? null : idx;
  }

  readOut() {
    if (!this.plot || !this.values) return;
    const idx = this.at();
    this.lines.forEach((line, place) => {
      if (this.values[place]) this.values[place].textContent = this.valueText(line, idx);
    });
  }

  valueText(line, idx) {
    const values = this.data[line.at];
    let at = idx;
    if (idx === null) for (at = values.length - 1; at > 0 && !isNumber(values[at]); at -= 1);
    else for (let back = 0; back < 40 && at > 0 && values[at] === undefined; back += 1) at -= 1;
    if (!isNumber(values[at])) return "–";
    const band = line.low && isNumber(this.data[line.at + 1][at]) ? ` (${this.format(this.data[line.at + 2][at])} to ${this.format(this.data[line.at + 1][at])})` : "";
    return this.format(values[at]) + band;
  }

  describe() {
    const told = this.lines.slice(0, 8).map((line) => {
      const known = line.y.map((y, index) => [line.x[index], y]).filter(([, y]) => isNumber(y));
      if (!known.length) return `${line.name}: nothing measured`;
      const [first, last] = [known[0], known[known.length - 1]];
      return `${line.name}: ${this.format(first[1])} at ${this.axis.name} ${first[0]}, ${this.format(last[1])} at ${last[0]}`;
    });
    this.place.setAttribute("aria-label", `${this.options.title}. ${told.join("; ")}. Arrow keys move the cursor, plus and minus zoom, Escape shows all.`);
  }

  tell() {
    if (!this.numbers.open || !this.plot) return;
    const from = Math.max(0, this.data[0].length - 200);
    const rows = this.data[0].slice(from).map((x, index) => [x, ...this.lines.map((line) => this.format(this.data[line.at][from + index]))]).reverse();
    this.numbers.lastElementChild.replaceChildren(h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Numbers of ${this.options.title}` },
      h("table", null, h("thead", null, h("tr", null, [this.axis.name, ...this.lines.map((line) => line.name)].map((name) => h("th", { scope: "col", class: "number" }, name)))),
        h("tbody", null, rows.map((row) => h("tr", null, row.map((cell) => h("td", { class: "number" }, cell))))))));
  }

  key(event) {
    if (!this.plot || event.target !== this.place || event.ctrlKey || event.metaKey || event.altKey) return;
    const places = this.data[0];
    const [low, high] = this.axis.zoom || [places[0], places[places.length - 1]];
    const now = this.at() ?? (event.key === "ArrowRight" ? -1 : places.length);
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: places.length - 1 };
    if (event.key in moves) {
      const idx = Math.max(0, Math.min(places.length - 1, moves[event.key]));
      this.point(places[idx]);
      this.axis.setCursor(places[idx], this);
      this.said.textContent = `${this.axis.name} ${places[idx]}: ${this.lines.map((line) => `${line.name} ${this.valueText(line, idx)}`).join(", ")}`;
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = this.at() === null ? (low + high) / 2 : places[this.at()];
      const half = ((high - low) / 2) * (event.key === "-" ? 2 : 0.5);
      const [from, to] = [Math.max(places[0], middle - half), Math.min(places[places.length - 1], middle + half)];
      if (to - from >= 1) this.axis.setZoom(from, to);
      if (event.key === "-" && from <= places[0] && to >= places[places.length - 1]) this.axis.setZoom(null);
    } else if (event.key === "Escape" || event.key === "0") {
      this.axis.setZoom(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  point(value) {
    if (!this.plot) return;
    const left = value === null ? -10 : this.plot.valToPos(value, "x");
    this.plot.setCursor({ left, top: left < 0 ? -10 : 10 }, false);
    this.readOut();
  }

  pointed(value) {
    this.point(value);
  }

  zoomed() {
    if (!this.plot) return;
    const places = this.data[0];
    const [low, high] = this.axis.zoom || this.xRange(places[0], places[places.length - 1]);
    this.plot.setScale("x", { min: low, max: high });
  }

  resize() {
    if (this.plot && this.place.clientWidth && this.place.clientWidth !== this.plot.width)
      this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
  }

  // A chart that is no longer shown takes no part in what others do.
  remove() {
    this.axis.members.delete(this);
    this.plot?.destroy();
    this.plot = null;
  }
}

const isMove = (type) => type === "mousemove" || type === "mouseleave";
