// One episode looked into: its curve, its lanes, what its seeds are worth, what its critic foresaw.
import { Axis, Chart, LEFT, RIGHT } from "./chart.js";
import { $, get, getText, h, isNumber, number, s, show, signed, table, roundNumber, words, worth } from "./dom.js";
import { kindWords, openSeed } from "./seed.js";

// The lanes as the server draws them; here they follow the zoom, the cursor and clicks.
class Lanes {
  constructor(axis, open) {
    this.axis = axis;
    this.open = open;
    this.asked = 0;
    this.where = null;
    this.picture = h("div");
    this.line = h("div", { class: "cursor", hidden: true });
    this.root = h("div", { class: "lanes-place" }, this.picture, this.line);
    axis.members.add(this);
    new ResizeObserver(() => this.root.clientWidth !== this.width && this.draw()).observe(this.root);
    this.root.addEventListener("click", (event) => this.choose(event));
    this.root.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && this.choose(event));
    this.root.addEventListener("pointermove", (event) => this.point(this.value(event)));
    this.root.addEventListener("pointerleave", () => this.point(null));
  }

  set(where, last) {
    this.where = where;
    this.last = last;
    return this.draw();
  }

  zoomed() {
    this.draw();
  }

  async draw() {
    this.width = this.root.clientWidth;
    if (!this.where || !this.width) return;
    const asked = (this.asked += 1);
    const [from, to] = this.axis.zoom || [Math.min(1, this.last), Math.max(2, this.last)];
    const right = this.width - RIGHT;
    try {
      const text = await getText("/api/lanes", { ...this.where, from, to, left: LEFT, right, width: this.width });
      if (asked !== this.asked) return;
      this.scale = [from, to, right];
      const focused = document.activeElement?.dataset?.seed;
      // The server has escaped every text in it, and the page runs no script but its own files.
      this.picture.replaceChildren(document.adoptNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement));
      if (focused) $(`.seed[data-seed="${focused}"]`, this.picture)?.focus();
    } catch (error) {
      if (asked === this.asked) show(this.picture, h("p", { class: "trouble" }, error.message));
    }
  }

  choose(event) {
    const seed = event.target.closest?.(".seed");
    if (!seed) return;
    event.preventDefault();
    this.open(Number(seed.dataset.seed));
  }

  value(event) {
    if (!this.scale) return null;
    const [from, to, right] = this.scale;
    const at = event.clientX - this.root.getBoundingClientRect().left;
    const value = Math.round(from + ((at - LEFT) / (right - LEFT)) * (to - from));
    return value >= from && value <= to ? value : null;
  }

  point(value) {
    this.axis.setCursor(value, this);
    this.pointed(value);
  }

  pointed(value) {
    this.line.hidden = value === null || !this.scale;
    if (this.line.hidden) return;
    const [from, to, right] = this.scale;
    this.line.style.left = `${LEFT + ((value - from) / (to - from)) * (right - LEFT)}px`;
  }
}

export class Garden {
  constructor(name, info, axis, onEpisode) {
    this.name = name;
    this.kind = info.run.kind;
    this.axis = this.kind === "grow" ? axis : new Axis("epoch");
    this.onEpisode = onEpisode;
    this.body = $("#garden .body");
    this.form = $("#episode");
    this.round = info.episodes.last;
    this.row = info.episodes.rows[0] ?? 0;
    this.asked = 0;
    this.data = null;
    this.lanes = new Lanes(this.axis, (ordinal) => openSeed(this.name, this.data, this.data.seeds.find((seed) => seed.ordinal === ordinal)));
    this.score = new Chart({ key: "episode-score", title: "Validation score in this episode", unit: "points" }, this.axis);
    if (this.kind === "train") this.setUp(info.episodes);
  }

  setUp(episodes) {
    this.form.hidden = false;
    const round = $("#episode-round");
    const row = $("#episode-row");
    round.max = roundNumber(episodes.last ?? 0);
    round.min = roundNumber(episodes.first ?? 0);
    round.value = round.max;
    round.addEventListener("change", () => {
      $("#episode-follow").checked = false;
      round.value = Math.max(Number(round.min), Math.min(Number(round.max), Math.floor(Number(round.value) || 0)));
      this.round = Number(round.value) - roundNumber(0);
      this.load();
    });
    row.addEventListener("change", () => {
      this.row = Number(row.value);
      this.load();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  // The latest round is followed as long as nobody looks at another.
  follow(last) {
    if (this.kind !== "train") return this.load();
    $("#episode-round").max = roundNumber(last);
    if (!$("#episode-follow").checked && this.data?.last) return null;
    this.round = last;
    $("#episode-round").value = roundNumber(last);
    return this.load();
  }

  where() {
    return this.kind === "train" ? { round: this.round, row: this.row } : {};
  }

  async load() {
    const asked = (this.asked += 1);
    if (this.round === null) return show(this.body, h("p", { class: "empty" }, "No episode was recorded yet; the first appears when its round is over."));
    try {
      let found = await get("/api/garden", { id: this.name, round: this.round, row: this.row });
      if (found.rows.length && !found.rows.includes(this.row) && this.kind === "train") {
        this.row = found.rows[0];
        found = await get("/api/garden", { id: this.name, round: this.round, row: this.row });
      }
      if (asked !== this.asked) return null;
      this.data = found;
      this.draw();
      this.onEpisode(this);
    } catch (error) {
      if (asked === this.asked) show(this.body, h("p", { class: "trouble" }, error.message));
    }
    return null;
  }

  draw() {
    const { data } = this;
    const row = $("#episode-row");
    row.replaceChildren(...data.rows.map((each) => h("option", { value: each }, each)));
    row.value = this.row;
    if (!data.last) return show(this.body, h("p", { class: "empty" }, "Nothing was recorded of this episode."));
    const isNew = !this.body.contains(this.lanes.root);
    const hasStacks = data.stacks.length > 0;
    if (hasStacks) $("#garden-title").textContent = "Blocks";
    if (isNew)
      show(this.body, this.told = h("p", { class: "note" }), this.kind === "train" && this.score.root, this.lanes.root,
        h("p", { class: "note" }, hasStacks ? "A lane for each stack: every bar is a block, from the step at which it woke as a copy of one that was awake. Blocks that sleep cost nothing." : "A lane for each slot: the colour is the stage, the height of the solid band is alpha. Below the end of a seed stands its contribution in points, with its standard error. Click a seed to see its life."));
    this.told.textContent = this.words();
    this.lanes.set({ id: this.name, round: this.round, row: this.row }, data.last);
    const x = data.epochs.map((epoch) => epoch.step);
    this.score.setLines([
      { name: "grown", x, y: data.epochs.map((epoch) => epoch.val_score), colour: 1, width: 2, dash: 0 },
      { name: "twin, which only waits", x, y: data.epochs.map((epoch) => epoch.twin_score), colour: 2, width: 1.6, dash: 1 },
    ].filter((line) => line.y.some(isNumber)));
    this.drawWorth();
    return null;
  }

  words() {
    const { episode, seeds, stacks, every } = this.data;
    const parts = stacks.length ? [] : [`${seeds.length} ${seeds.length === 1 ? "seed" : "seeds"} germinated`, `${seeds.filter((seed) => seed.fate === "fossilized").length} kept`];
    if (episode) {
      if (episode.task) parts.unshift(`${episode.task}${isNumber(episode.env_seed) ? `, seed ${episode.env_seed}` : ""}`);
      if (isNumber(episode.gain)) parts.push(`validation gain ${signed(episode.gain)} points`);
      if (isNumber(episode.episodic_return)) parts.push(`return ${number(episode.episodic_return)}`);
      if (episode.rollback_reason) parts.push(`rolled back: ${words(episode.rollback_reason)}`);
    }
    if (every > 1) parts.push(`one epoch in ${every} is drawn`);
    return parts.length ? `${parts.join(", ")}.` : "";
  }

  drawWorth() {
    const { worth: values } = this.data;
    const place = $("#worth");
    place.hidden = !values.length;
    if (!values.length) return;
    const pairs = values.filter((one) => one.kind === "interaction" && one.other);
    const rows = values.filter((one) => one.kind !== "interaction" && one.kind !== "pair");
    show($(".body", place), h("div", { class: "side" },
      rows.length > 0 && table("What each seed is worth", [["what", "words"], ["slot", ""], ["points", "number"], ["epoch", "number"]],
        rows.map((one) => [kindWords(one.kind), one.slot ?? "all", worth(one.value, one.se), one.step])),
      h("div", null, h("h3", null, "Interactions"), pairs.length ? matrix(pairs)
        : h("p", { class: "note" }, "No pair was measured: that needs two seeds at a time."))));
  }
}

function matrix(pairs) {
  const slots = [...new Set(pairs.flatMap((pair) => [pair.slot, pair.other]))].sort();
  const cell = (row, column) => {
    const found = pairs.find((pair) => (pair.slot === row && pair.other === column) || (pair.slot === column && pair.other === row));
    return found ? h("td", { class: found.value > 0 ? "up" : "down" }, worth(found.value, found.se)) : h("td", { class: "note" }, row === column ? "·" : "");
  };
  return [h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Interactions" }, h("table", { class: "matrix" },
    h("thead", null, h("tr", null, h("th"), slots.map((slot) => h("th", { scope: "col" }, slot)))),
    h("tbody", null, slots.map((row) => h("tr", null, h("th", { scope: "row" }, row), slots.map((column) => cell(row, column))))))),
  h("p", { class: "note" }, "Points that two seeds are worth more together than apart; below 0 they stand in each other's way.")];
}

// Predicted against real returns, as a cloud around the diagonal.
export async function drawForeseen(place, name, round) {
  const found = await get("/api/foreseen", { id: name, round });
  const { points } = found;
  if (points.length < 2) return place.replaceChildren();
  const size = 300;
  const pad = 44;
  const values = points.flatMap(([predicted, real]) => [predicted, real]);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const x = (value) => pad + ((value - low) / (high - low)) * (size - pad - 8);
  const y = (value) => size - pad - ((value - low) / (high - low)) * (size - pad - 8);
  const dots = points.map(([predicted, real]) => `M${x(predicted).toFixed(1)} ${y(real).toFixed(1)}h0`).join("");
  const mean = (list) => list.reduce((sum, value) => sum + value, 0) / list.length;
  const [mp, mr] = [mean(points.map((point) => point[0])), mean(points.map((point) => point[1]))];
  const spread = (at, middle) => Math.sqrt(mean(points.map((point) => (point[at] - middle) ** 2)));
  const both = mean(points.map(([predicted, real]) => (predicted - mp) * (real - mr)));
  const correlation = both / (spread(0, mp) * spread(1, mr));
  const told = `${points.length} decisions of round ${roundNumber(round)}${found.every > 1 ? ` (one in ${found.every})` : ""}${Number.isFinite(correlation) ? `, correlation ${number(correlation)}` : ""}.`;
  return place.replaceChildren(h("figure", { class: "chart", "data-chart": "foreseen" },
    h("figcaption", null, h("h3", null, "Predicted against real returns"), h("span", { class: "unit" }, "reward")),
    s("svg", { class: "drawing", viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `Predicted against real returns: ${told}` },
      s("line", { class: "axis", x1: pad, x2: size - 8, y1: size - pad, y2: size - pad }),
      s("line", { class: "axis", x1: pad, x2: pad, y1: 8, y2: size - pad }),
      s("line", { class: "diagonal", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }),
      s("path", { class: "s1", d: dots, "stroke-width": 4, "stroke-linecap": "round", "stroke-opacity": 0.45, fill: "none" }),
      [low, (low + high) / 2, high].map((value) => [
        s("text", { class: "muted", x: x(value), y: size - pad + 15, "text-anchor": value === low ? "start" : value === high ? "end" : "middle" }, number(value)),
        s("text", { class: "muted", x: pad - 5, y: y(value) + (value === high ? 10 : value === low ? 0 : 4), "text-anchor": "end" }, number(value))]),
      s("text", { class: "muted", x: size - 8, y: size - 6, "text-anchor": "end" }, "predicted: the critic's value"),
      s("text", { class: "muted", x: pad + 6, y: 18 }, "real")),
    h("p", { class: "note" }, told, ` Real is what was paid from a decision to the end of its episode, discounted by ${found.discount}, with the potential that had been paid before it.`)));
}
