// The list of runs, looked at again every few seconds.
import { $, count, duration, get, h, points, share, show, signed, table, words } from "./dom.js";

const EVERY_MS = 4000;
const place = $("#runs");
const filter = $("#filter");
const together = $("#together");
const connection = $("#connection");
const chosen = new Set();
let runs = [];
let shown = "";

const address = (names) => {
  const query = new URLSearchParams();
  names.forEach((name, at) => query.append(at ? "with" : "id", name));
  return `/run?${query}`;
};

function matches(run, text) {
  const told = [run.name, run.task, run.controller, run.state, run.kind].join(" ");
  try {
    return new RegExp(text, "i").test(told);
  } catch {
    return told.toLowerCase().includes(text.toLowerCase());
  }
}

function progress(run) {
  if (run.done === null && run.planned === null) return "";
  const text = run.planned ? `${count(run.done ?? 0)} of ${count(run.planned)} ${run.unit}` : `${count(run.done)} ${run.unit}`;
  if (!run.planned) return text;
  return [h("progress", { max: run.planned, value: run.done ?? 0, "aria-label": `${share((run.done ?? 0) / run.planned)} done` }), " ", h("span", null, text)];
}

function draw() {
  const found = runs.filter((run) => matches(run, filter.value.trim()));
  const state = JSON.stringify([found.map((run) => ({ ...run, age_s: run.age_s && duration(run.age_s) })), [...chosen], filter.value]);
  if (state === shown) return;
  shown = state;
  const focused = document.activeElement?.dataset?.run;
  if (!runs.length)
    return show(place, h("p", { class: "empty" }, "There are no runs here yet. Start one with ", h("code", null, "esper grow --task digits --out runs/first"), "; it appears by itself."));
  if (!found.length) return show(place, h("p", { class: "empty" }, "No run matches the filter."));
  const columns = [["choose", "pick"], ["run", ""], ["state", ""], ["task", ""], ["controller", ""], ["progress", ""], ["validation score", "number"], ["validation gain", "number"], ["test gain", "number"], ["written", "number"]];
  show(place, h("section", { class: "group" }, table("Runs", columns, found.map((run) => [
    run.state === "damaged" ? "" : h("input", {
      type: "checkbox", "data-run": run.name, "aria-label": `Choose ${run.name}`, checked: chosen.has(run.name),
      on: { change: (event) => choose(run.name, event.target.checked) },
    }),
    run.state === "damaged"
      ? [h("strong", null, run.name), h("div", { class: "note" }, run.note)]
      : [h("a", { href: address([run.name]) }, run.name), run.note && h("div", { class: "note" }, run.note)],
    h("span", { class: `badge ${run.state}` }, run.state),
    run.task ?? "", run.controller ?? (run.kind ? words(run.kind) : ""), progress(run), points(run.val_score), signed(run.val_gain), signed(run.test_gain),
    run.age_s === null ? "" : `${duration(run.age_s)} ago`,
  ]), { classes: "runs-table" })));
  if (focused) for (const box of place.querySelectorAll("input")) if (box.dataset.run === focused) box.focus();
}

function choose(name, isChosen) {
  if (isChosen) chosen.add(name);
  else chosen.delete(name);
  together.setAttribute("aria-disabled", String(!chosen.size));
  if (chosen.size) together.href = address([...chosen]);
  else together.removeAttribute("href");
  together.textContent = chosen.size > 1 ? `Open these ${chosen.size} together` : "Open the chosen together";
}

async function look() {
  try {
    runs = (await get("/api/runs")).runs;
    connection.dataset.state = "live";
    connection.textContent = "live";
    draw();
  } catch (error) {
    connection.dataset.state = "lost";
    connection.textContent = "connection lost, trying again";
    if (!runs.length) show(place, h("p", { class: "trouble" }, error.message));
  }
  setTimeout(look, document.hidden ? 3 * EVERY_MS : EVERY_MS);
}

filter.addEventListener("input", draw);
look();
