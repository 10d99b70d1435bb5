// The garden: one lane for each slot, stages as colours, alpha as height, seeds as lives to open.
// Of a network that is deepened: one lane for each stack, a bar for each block that is awake.
import { h, isNumber, number, s, signed, words, worth } from "./dom.js";
import { LEFT, RIGHT } from "./chart.js";

const TOP = 18;
const BAND = 30;
const MARKS = 13;
const GAP = 8;
const LANE = TOP + BAND + MARKS + GAP;
const STACK_BAND = 48;
const STACK = TOP + STACK_BAND + GAP;
const MOST_BARS = 24;
const LETTER = 6.7;
const STAGES = ["germinated", "training", "blending", "holding", "fossilized", "cooldown"];
const COOLING = ["PRUNED", "EMBARGOED", "RESETTING"];

const stageClass = (stage) => (COOLING.includes(stage) ? "cooldown" : String(stage).toLowerCase());
const GLYPHS = {
  GERMINATE: "M0 -4L4 3H-4Z",
  ADVANCE: "M-2 -4L4 0L-2 4Z",
  SET_ALPHA_TARGET: "M0 -4L4 0L0 4L-4 0Z",
  FOSSILIZE: "M-3.5 -3.5H3.5V3.5H-3.5Z",
  PRUNE: "M-4 -2.6L-2.6 -4L0 -1.4L2.6 -4L4 -2.6L1.4 0L4 2.6L2.6 4L0 1.4L-2.6 4L-4 2.6L-1.4 0Z",
};

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

export const tellStack = ({ name, blocks, spans }) => `${shortened(name, 40)}: ${spans.map(([, , awake]) => awake).join(" → ")} of ${blocks} blocks awake`;

export function drawKey() {
  const stages = STAGES.map((stage) => h("li", null, s("svg", { viewBox: "0 0 16 12", "aria-hidden": "true" },
    s("rect", { class: stage, x: 1, y: 1, width: 14, height: 10 })), stage));
  const marks = Object.entries(GLYPHS).map(([op, path]) => h("li", null, s("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true", class: "lanes" },
    s("path", { class: "mark", d: path })), words(op)));
  return h("ul", { class: "key", "aria-label": "Colours and marks" }, stages, marks,
    h("li", null, s("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true", class: "lanes" }, s("path", { class: "mark refused", d: GLYPHS.ADVANCE })), "refused"));
}

export class Lanes {
  constructor(axis, open) {
    this.axis = axis;
    this.open = open;
    this.garden = null;
    this.root = h("div", { class: "lanes-place" });
    this.width = 0;
    axis.members.add(this);
    new ResizeObserver(() => this.root.clientWidth !== this.width && this.draw()).observe(this.root);
  }

  set(garden) {
    this.garden = garden;
    this.draw();
  }

  zoomed() {
    this.draw();
  }

  pointed(value) {
    this.line?.setAttribute("visibility", value === null ? "hidden" : "visible");
    if (value === null || !this.line) return;
    const at = this.x(value);
    this.line.setAttribute("x1", at);
    this.line.setAttribute("x2", at);
  }

  draw() {
    this.width = this.root.clientWidth;
    if (!this.garden || !this.width) return;
    const focused = document.activeElement?.dataset?.seed;
    const { slots, stacks, last } = this.garden;
    const [low, high] = this.axis.zoom || [Math.min(1, last ?? 1), Math.max(2, last ?? 2)];
    const end = this.width - RIGHT;
    this.x = (value) => LEFT + ((value - low) / (high - low)) * (end - LEFT);
    const clip = (value) => Math.max(LEFT, Math.min(end, this.x(value)));
    const height = (stacks.length ? stacks.length * STACK : slots.length * LANE) + 22;
    const drawn = stacks.length
      ? stacks.map((stack, place) => this.drawStack(stack, place * STACK, clip, low, high))
      : slots.map((slot, place) => this.drawLane(slot, place * LANE, clip, low, high));
    this.line = s("line", { class: "cursor", y1: 0, y2: height - 20, visibility: "hidden" });
    const svg = s("svg", { class: "lanes", viewBox: `0 0 ${this.width} ${height}`, role: "group", "aria-label": this.words() },
      drawn, this.drawAxis(low, high, height - 20, end), this.line);
    svg.addEventListener("pointermove", (event) => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      const value = Math.round(low + ((at - LEFT) / (end - LEFT)) * (high - low));
      const isInside = value >= low && value <= high;
      this.axis.setCursor(isInside ? value : null, this);
      this.pointed(isInside ? value : null);
    });
    svg.addEventListener("pointerleave", () => {
      this.axis.setCursor(null, this);
      this.pointed(null);
    });
    this.root.replaceChildren(svg);
    if (focused) for (const seed of svg.querySelectorAll(".seed")) if (seed.dataset.seed === focused) seed.focus();
  }

  words() {
    const { seeds, slots, stacks, last } = this.garden;
    if (stacks.length) return `${stacks.map(tellStack).join("; ")}, over ${last ?? 0} epochs.`;
    return `${slots.length} slots over ${last ?? 0} epochs, ${seeds.length} seeds.`;
  }

  drawStack(stack, top, clip, low, high) {
    const bar = STACK_BAND / stack.blocks;
    const space = stack.blocks <= MOST_BARS ? 0.15 * bar : 0;
    const bottom = top + TOP + STACK_BAND;
    const parts = [
      s("text", { x: 2, y: top + TOP - 5 }, s("title", null, stack.name), tellStack(stack)),
      s("rect", { class: "well", x: LEFT, y: top + TOP, width: clip(high) - LEFT, height: STACK_BAND }),
    ];
    for (const [from, to, awake] of stack.spans) {
      if (to < low || from > high) continue;
      const [left, right] = [clip(from), clip(to)];
      const bars = Array.from({ length: awake }, (_, block) =>
        s("rect", { class: "fossilized", x: left, y: bottom - (block + 1) * bar + space, width: Math.max(1, right - left), height: bar - space }));
      parts.push(s("g", null, s("title", null, `${stack.name}: ${awake} of ${stack.blocks} blocks awake, epochs ${number(from)} to ${number(to)}`), bars));
    }
    return s("g", null, parts);
  }

  drawLane(slot, top, clip, low, high) {
    const { spans, seeds, marks } = this.garden;
    const bottom = top + TOP + BAND;
    const parts = [
      s("text", { x: 2, y: top + TOP + BAND / 2 + 4 }, s("title", null, slot), shortened(slot, 8)),
      s("rect", { class: "well", x: LEFT, y: top + TOP, width: clip(high) - LEFT, height: BAND }),
    ];
    for (const span of spans) {
      if (span.slot !== slot || span.to < low || span.from > high) continue;
      const kind = stageClass(span.stage);
      if (!STAGES.includes(kind)) continue;
      const [from, to] = [clip(span.from), clip(span.to)];
      if (kind === "cooldown") {
        parts.push(s("rect", { class: kind, x: from + 1, y: top + TOP + BAND - 9, width: Math.max(1, to - from - 2), height: 8 }));
        continue;
      }
      parts.push(s("rect", { class: `${kind} tint`, x: from, y: top + TOP, width: Math.max(1, to - from), height: BAND }));
      let path = `M${from} ${bottom}`;
      let at = span.from;
      for (const [step, alpha] of span.alpha) {
        const y = bottom - BAND * Math.max(0, Math.min(1, alpha ?? 0));
        path += `L${clip(at)} ${y}L${clip(step)} ${y}`;
        at = step;
      }
      parts.push(s("path", { class: kind, d: `${path}L${clip(at)} ${bottom}Z` }));
    }
    let free = LEFT;
    const own = seeds.filter((seed) => seed.slot === slot);
    own.forEach((seed, place) => {
      const next = own[place + 1];
      const until = this.endOf(seed, next);
      if (until < low || seed.germinated > high) return;
      const [from, to] = [clip(seed.germinated), clip(until)];
      const name = shortened(String(seed.blueprint), 24);
      const value = isNumber(seed.contribution) ? worth(seed.contribution, seed.contribution_se) : "";
      const room = (next ? clip(next.germinated) : clip(high)) - Math.max(from, free);
      const labels = [];
      if (room > name.length * LETTER + 4) {
        const start = Math.max(from, free);
        labels.push(s("text", { class: "halo", x: start, y: top + TOP - 5 }, name));
        free = start + name.length * LETTER + 10;
        if (value && room > (name.length + value.length) * LETTER + 16) {
          labels.push(s("text", { class: "halo muted", x: free, y: top + TOP - 5 }, value));
          free += value.length * LETTER + 10;
        }
      }
      const told = this.tell(seed);
      parts.push(s("g", {
        class: "seed", tabindex: 0, role: "button", "data-seed": seed.ordinal, "aria-label": `${told}. Opens its life.`,
        on: {
          click: () => this.open(seed),
          keydown: (event) => {
            if (event.key !== "Enter" && event.key !== " ") return;
            event.preventDefault();
            this.open(seed);
          },
        },
      }, s("title", null, told), s("rect", { class: "hit", x: from, y: top + 2, width: Math.max(6, to - from), height: TOP + BAND - 2, rx: 3 }), labels));
    });
    for (const mark of marks) {
      if (mark.slot !== slot || mark.step < low || mark.step > high || !GLYPHS[mark.op]) continue;
      const isRefused = mark.outcome !== "done";
      parts.push(s("path", { class: `mark${isRefused ? " refused" : ""}`, d: GLYPHS[mark.op], transform: `translate(${this.x(mark.step)} ${bottom + 7})` },
        s("title", null, `epoch ${mark.step}: ${words(mark.op)}${isRefused ? `, ${words(mark.outcome)}` : ""}`)));
    }
    return s("g", null, parts);
  }

  // A fossil stays to the end; the others until they are gone.
  endOf(seed, next) {
    const ends = this.garden.spans
      .filter((span) => span.slot === seed.slot && span.from >= seed.germinated && (!next || span.to <= next.germinated))
      .map((span) => span.to);
    return Math.max(seed.germinated + 1, seed.ended ?? 0, ...ends);
  }

  tell(seed) {
    const end = seed.ended === null ? "" : ` after epoch ${seed.ended}`;
    const value = isNumber(seed.contribution) ? `, contribution ${signed(seed.contribution)}${isNumber(seed.contribution_se) ? ` ± ${seed.contribution_se.toFixed(2)}` : ""}` : "";
    return `${seed.blueprint} in ${seed.slot}, germinated after epoch ${seed.germinated}, ${words(seed.fate)}${end}${value}`;
  }

  drawAxis(low, high, top, end) {
    const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6];
    const most = Math.max(2, Math.floor((end - LEFT) / 60));
    const step = steps.find((each) => (high - low) / each <= most) || steps[steps.length - 1];
    const ticks = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step)
      ticks.push(s("text", { class: "muted", x: this.x(at), y: top + 16, "text-anchor": "middle" }, at));
    ticks.push(s("text", { class: "muted", x: 2, y: top + 16 }, "epoch"));
    return [s("line", { class: "axis", x1: LEFT, x2: end, y1: top + 0.5, y2: top + 0.5 }), ticks];
  }
}
