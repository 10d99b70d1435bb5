// Decisions, one line each; opened, they say why: probabilities, values, features, reward.
import { $, get, h, isNumber, number, share, show, signed, roundNumber, words } from "./dom.js";

const HEADS = ["op", "slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"];
const OPS = ["WAIT", "GERMINATE", "ADVANCE", "SET_ALPHA_TARGET", "FOSSILIZE", "PRUNE", "DEEPEN"];

export class Decisions {
  constructor(place, name, where) {
    this.body = $(".body", place);
    this.form = $("form", place);
    this.name = name;
    this.where = where;
    for (const op of OPS) this.form.elements.op.append(h("option", { value: op }, words(op)));
    this.form.addEventListener("change", () => this.load());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.asked = 0;
    this.shown = [];
    // A growing run is one episode.
    this.form.elements.all.parentElement.hidden = !("round" in where());
  }

  setSlots(slots) {
    const select = this.form.elements.slot;
    if (select.options.length - 1 === slots.length) return;
    const now = select.value;
    select.replaceChildren(h("option", { value: "" }, "any"), ...slots.map((slot) => h("option", { value: slot }, slot)));
    select.value = slots.includes(now) ? now : "";
  }

  parameters() {
    const { op, slot, outcome, all } = this.form.elements;
    return {
      id: this.name, slot: slot.value, outcome: outcome.value,
      ...(op.value === "-" ? { acted: 1 } : { op: op.value }),
      ...(all.checked ? {} : this.where()),
    };
  }

  // What somebody reads stays; what is new is offered.
  refresh() {
    if (!this.body.querySelector("details[open]") && this.shown.length <= 50) return this.load();
    if ($(".newer", this.body)) return;
    this.body.prepend(h("button", { class: "button newer", type: "button", on: { click: () => this.load() } }, "There are newer decisions: show them"));
  }

  async load() {
    const asked = (this.asked += 1);
    this.body.setAttribute("aria-busy", "true");
    try {
      const found = await get("/api/decisions", this.parameters());
      if (asked !== this.asked) return;
      this.shown = found.decisions;
      this.draw();
    } catch (error) {
      if (asked === this.asked) show(this.body, h("p", { class: "trouble" }, error.message));
    }
  }

  async more() {
    const found = await get("/api/decisions", { ...this.parameters(), before: this.shown[this.shown.length - 1].id });
    this.shown = [...this.shown, ...found.decisions];
    this.draw(found.decisions.length === 50);
  }

  draw(hasMore = this.shown.length === 50) {
    if (!this.shown.length) return show(this.body, h("p", { class: "empty" }, "No decision like this was recorded."));
    show(this.body, this.shown.map((decision) => drawDecision(decision, "round" in this.where())),
      hasMore && h("p", null, h("button", { class: "button", type: "button", on: { click: () => this.more() } }, "Earlier ones")));
  }
}

function drawDecision(decision, hasRounds) {
  const { heads } = decision;
  const isRefused = decision.outcome && decision.outcome !== "done";
  const likely = heads.op.probability ?? decision.explanation?.probabilities?.op?.[heads.op.choice];
  const given = HEADS.slice(2).filter((head) => heads[head].choice !== null).map((head) => `${words(head)} ${words(heads[head].choice)}`);
  if (isNumber(decision.blocks_after)) given.push(`${decision.blocks_before} to ${decision.blocks_after} blocks`);
  const what = [h("strong", null, words(heads.op.choice)), heads.slot.choice !== null && ` at ${heads.slot.choice}`, given.length > 0 && `: ${given.join(", ")}`,
    isNumber(likely) && h("span", { class: "note" }, ` (${decision.forced ? "the only legal op" : share(likely)})`)];
  const details = h("details", { class: "decision" },
    h("summary", null,
      h("span", { class: "when" }, `${hasRounds ? `round ${roundNumber(decision.round)}, ` : ""}epoch ${decision.step}`),
      h("span", { class: "what" }, what),
      h("span", { class: `outcome${isRefused ? " refused" : ""}` }, isNumber(decision.reward) ? `${signed(decision.reward, 3)} ` : "", isRefused ? words(decision.outcome) : "")));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(explain(decision));
  });
  return details;
}

function explain(decision) {
  const { explanation, heads } = decision;
  const parts = [];
  if (decision.reason) parts.push(h("div", null, h("h4", null, decision.outcome === "done" ? "Why" : "Why it was refused"), h("p", null, decision.reason)));
  for (const head of HEADS) {
    const chances = probabilities(decision, head);
    if (!chances.length) continue;
    parts.push(h("div", null, h("h4", null, `${words(head)}${isNumber(heads[head].valid) ? `, ${heads[head].valid} legal` : ""}`), bars(chances, String(heads[head].choice), share, 1)));
  }
  const values = explanation?.values && Object.keys(explanation.values).length
    ? Object.entries(explanation.values).filter(([op]) => !explanation.probabilities?.op || explanation.probabilities.op[op] > 0)
    : [];
  if (values.length) parts.push(h("div", null, h("h4", null, "Expected return of every legal op"), list(values.map(([op, value]) => [words(op), signed(value, 3), op === heads.op.choice]))));
  const critic = [["of the state", decision.value ?? explanation?.value], ["of the op taken", decision.q_taken]].filter(([, value]) => isNumber(value));
  if (critic.length) parts.push(h("div", null, h("h4", null, "What the critic expected"), list(critic.map(([name, value]) => [name, signed(value, 3)]))));
  if (explanation?.contributors?.length)
    parts.push(h("div", null, h("h4", null, `What mattered most (on ${explanation.measured_on === "op" ? "the op's log-probability" : "the value"})`),
      list(explanation.contributors.map((one) => [`${one.feature} = ${number(one.value)}`, signed(one.influence, 3)]))));
  const terms = Object.entries(decision.reward_terms || {}).filter(([, value]) => value);
  if (isNumber(decision.reward))
    parts.push(h("div", null, h("h4", null, "What it was paid"), list([["all", signed(decision.reward, 4), true], ...terms.map(([term, value]) => [words(term), signed(value, 4)])])));
  const details = Object.entries(decision.reward_details || {}).filter(([, value]) => value);
  if (details.length) parts.push(h("div", null, h("h4", null, "What explains the pay"), list(details.map(([name, value]) => [words(name), number(value)]))));
  if (!parts.length) parts.push(h("p", { class: "note" }, "Its controller follows rules; it has no probabilities to show."));
  return h("div", { class: "why" }, parts);
}

function probabilities(decision, head) {
  const known = decision.explanation?.probabilities?.[head];
  const isUsed = decision.heads[head].choice !== null;
  if (known && isUsed) return Object.entries(known).filter(([, chance]) => chance > 0).sort((a, b) => b[1] - a[1]);
  if (!isUsed || !isNumber(decision.heads[head].probability)) return [];
  const others = Array.isArray(decision.alternatives?.[head]) ? decision.alternatives[head] : [];
  const found = [[String(decision.heads[head].choice), decision.heads[head].probability], ...others.map(([name, chance]) => [String(name), chance])];
  const rest = 1 - found.reduce((sum, [, chance]) => sum + chance, 0);
  found.sort((a, b) => b[1] - a[1]);
  return rest > 0.005 ? [...found, ["all others", rest]] : found;
}

const bars = (entries, taken, format, most) => h("table", { class: "bars" }, h("tbody", null, entries.map(([name, value]) =>
  h("tr", { class: words(name) === words(taken) ? "taken" : null }, h("td", null, words(name)), h("td", null, h("meter", { min: 0, max: most, value })), h("td", { class: "number" }, format(value))))));

const list = (rows) => h("table", { class: "bars" }, h("tbody", null, rows.map(([name, value, isTaken]) =>
  h("tr", { class: isTaken ? "taken" : null }, h("td", null, name), h("td", { class: "number" }, value)))));
