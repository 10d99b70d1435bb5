// The life of one seed, in a dialog.
import { Axis, Chart } from "./chart.js";
import { $, count, get, h, isNumber, number, show, signed, table, words, worth } from "./dom.js";

const KINDS = {
  leave_one_out: "points lost without it", solo_on: "points gained by it alone", shapley: "fair share of all seeds' gain",
  pair: "points lost without both", interaction: "worth more together than apart", all_off: "points lost without any seed",
};
export const kindWords = (kind) => KINDS[kind] || words(kind);

export async function openSeed(name, garden, seed) {
  const dialog = $("#seed");
  const close = h("button", { class: "button", type: "button", on: { click: () => dialog.close() } }, "Close");
  const body = h("div", { "aria-busy": "true" }, h("p", { class: "empty" }, "Reading its life …"));
  dialog.replaceChildren(h("div", { class: "dialog-head" }, h("h2", { id: "seed-title" }, `${seed.blueprint} in ${seed.slot}`), close), body);
  if (!dialog.open) dialog.showModal();
  try {
    const life = await get("/api/seed", { id: name, round: garden.round, row: garden.row, ordinal: seed.ordinal });
    const charts = draw(body, life);
    dialog.addEventListener("close", () => charts.forEach((chart) => chart.remove()), { once: true });
  } catch (error) {
    show(body, h("p", { class: "trouble" }, error.message));
  }
}

function draw(body, life) {
  const { seed, stages, decisions, worth: values } = life;
  const axis = new Axis("epoch");
  const curve = (key, title, column, more = {}) => {
    const chart = new Chart({ key, title, ...more.options }, axis);
    const x = stages.map((stage) => stage.step);
    const y = stages.map((stage) => stage[column]);
    const band = more.se ? {
      low: stages.map((stage) => (isNumber(stage[column]) ? stage[column] - (stage[more.se] ?? 0) : null)),
      high: stages.map((stage) => (isNumber(stage[column]) ? stage[column] + (stage[more.se] ?? 0) : null)),
    } : {};
    return { chart, lines: y.some(isNumber) ? [{ name: more.name || title.toLowerCase(), x, y, colour: 1, width: 2, dash: 0, ...band }] : [] };
  };
  const all = [
    curve("seed-alpha", "Alpha", "alpha", { options: { floor: 0, ceiling: 1 } }),
    curve("seed-contribution", "Contribution", "contribution", { se: "contribution_se", name: "points, ± 1 standard error", options: { unit: "points", reference: 0 } }),
    curve("seed-grad", "Gradient norm", "grad_norm", { options: { floor: 0 } }),
    curve("seed-interaction", "Interaction with the others", "interaction", { options: { unit: "points", reference: 0 } }),
  ].filter(({ lines }) => lines.length);
  const entered = stages.filter((stage) => stage.entered);
  const facts = [
    ["fate", words(seed.fate)], ["germinated", `after epoch ${seed.germinated}`],
    ["ended", seed.ended === null ? "it lives" : `after epoch ${seed.ended}`],
    ["contribution", worth(seed.contribution, seed.contribution_se)], ["score since germination", signed(seed.improvement)],
    ["parameters", count(seed.parameters)], ["operations a sample", count(seed.flops)],
  ];
  show(body,
    h("dl", { class: "figures" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    h("div", { class: "charts" }, all.map(({ chart }) => chart.root)),
    entered.length > 0 && [h("h3", null, "Stages"), table("Stages", [["from epoch", "number"], ["stage", ""], ["alpha", "number"], ["contribution", "number"]],
      entered.map((stage) => [stage.step, words(stage.stage), number(stage.alpha), worth(stage.contribution, stage.contribution_se)]))],
    decisions.length > 0 && [h("h3", null, "Decisions about it"), table("Decisions about it", [["epoch", "number"], ["operation", ""], ["outcome", "words"], ["reward", "number"]],
      decisions.map((one) => [one.step, words(one.op), one.reason || words(one.outcome), isNumber(one.reward) ? signed(one.reward, 3) : "–"]))],
    values.length > 0 && [h("h3", null, "Last measured"), table("Last measured", [["what", "words"], ["with", ""], ["points", "number"], ["epoch", "number"]],
      values.map((one) => [kindWords(one.kind), one.other ? (one.slot === seed.slot ? one.other : one.slot) : "", worth(one.value, one.se), one.step]))]);
  all.forEach(({ chart, lines }) => chart.setLines(lines));
  return all.map(({ chart }) => chart);
}
