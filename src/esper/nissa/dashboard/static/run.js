// The page of a run, with others laid over it.
import { Axis, Chart } from "./chart.js";
import { Decisions } from "./decisions.js";
import { $, count, duration, get, h, isNumber, number, points, share, show, signed, table, roundNumber, words } from "./dom.js";
import { Garden, drawForeseen } from "./garden.js";
import { Live } from "./live.js";
import { Run } from "./points.js";

const FIRST_GROUP = "Learning";
const MOST_ALARMS = 4;
const LOOK_MS = 3000; // What has to be asked for anew is asked for no more often.
const ZOOM_MS = 150; // Who zooms step by step is waited for.
const asked = new URLSearchParams(location.search);
const names = [asked.get("id") ?? "", ...asked.getAll("with")].filter((name, place, all) => name && all.indexOf(name) === place).slice(0, 8);
const runs = new Map();
const charts = new Map();
const axes = { round: new Axis("round"), epoch: new Axis("epoch") };
let garden = null;
let decisions = null;
let live = null;
let waiting = false;
let looking = null;

const main = () => runs.get(names[0]);

function lines(panel) {
  const isAlone = runs.size === 1;
  const drawn = [];
  [...runs.values()].forEach((run, order) => {
    const own = run.info.panels.find((each) => each.key === panel.key && each.table === panel.table);
    if (!own) return;
    const isPinned = run === main();
    run.curves(own).forEach((curve, place) => {
      if (!curve.y.some(isNumber)) return;
      const isDashed = curve.line?.is_dashed;
      drawn.push({
        ...curve,
        x: panel.table === "epochs" ? curve.x : curve.x.map(roundNumber),
        name: isAlone ? curve.name : `${shortName(run.name)}: ${curve.name}`,
        colour: isAlone ? place + 1 : order + 1,
        // Colours repeat in some eyes: what comes late has a pattern as well.
        dash: isAlone ? (isDashed ? 1 : place < 4 ? 0 : place - 2) : place,
        width: isAlone ? (isDashed ? 1.3 : 2) : isPinned ? 2.6 : 1.3,
        isFaint: isDashed,
        ...(isPinned && curve.low ? {} : { low: null, high: null }),
        isPinned,
      });
    });
  });
  // What is pinned is drawn last, on top.
  return drawn.sort((a, b) => Number(a.isPinned) - Number(b.isPinned));
}

const shortName = (name) => name.split("/").pop();

// ------------------------------------------------------------------------------------------- top

function drawTop() {
  const { info } = main();
  const { run, progress } = info;
  const place = $("#top");
  const isTraining = run.kind === "train";
  const badge = h("span", { class: `badge ${progress.state}` }, progress.state);
  const part = progress.planned ? (progress.done ?? 0) / progress.planned : null;
  show(place,
    h("h1", null, shortName(info.label), " ", badge),
    h("p", { class: "lead" }, isTraining ? tellTraining(main()) : tellGrowing(info)),
    progress.note && h("p", { class: "note" }, progress.note),
    part !== null && h("progress", { max: 1, value: part, "aria-label": `${share(part)} done` }),
    h("dl", { class: "figures" }, tiles(main()).filter(([, value]) => value && value !== "–").map(([name, value, note]) =>
      h("div", null, h("dt", null, name), h("dd", null, value, note && h("small", null, note))))));
  document.title = `${part !== null && progress.state === "running" ? `${Math.floor(100 * part)} % ` : ""}${shortName(info.label)} – Esper`;
}

function tellGrowing({ run, progress }) {
  const stacks = garden?.data?.stacks ?? [];
  if (stacks.length) {
    const gain = tellGain(progress, "the static network whose blocks are all awake from the first step");
    return `The rule ${run.controller} ${progress.state === "running" ? "deepens" : "deepened"} a network (${run.task ?? "a model"}). ${stacks.map((stack) => stack.text).join("; ")}.${gain}`;
  }
  const kept = garden?.data ? garden.data.seeds.filter((seed) => seed.fate === "fossilized").length : null;
  const who = run.controller ? `The controller ${run.controller}` : "A controller";
  const what = `${who} ${progress.state === "running" ? "grows" : "grew"} a network (${run.task ?? "a model"})`;
  const grown = kept === null ? "" : kept ? `: ${kept} ${kept === 1 ? "seed was" : "seeds were"} kept so far` : ": nothing was kept so far";
  const gain = tellGain(progress, "which had the same start and data and only waits");
  return `${what}${progress.state === "finished" ? grown.replace(" so far", "") : grown}.${gain}`;
}

function tellGain(progress, which) {
  const side = (gain) => `${points(Math.abs(gain))} ${gain >= 0 ? "above" : "below"}`;
  if (!isNumber(progress.val_gain)) return "";
  const test = isNumber(progress.test_gain) ? `; on the test split it is ${side(progress.test_gain)} the twin's` : "";
  return ` Its validation score is ${side(progress.val_gain)} that of its twin, ${which}${test}.`;
}

function tellTraining(run) {
  const { info } = run;
  const last = latest(run, "rounds", "gain_mean");
  const begin = `A controller ${info.progress.state === "running" ? "learns" : "was trained"} on ${info.run.task ?? "its tasks"}, ${count(info.run.rows)} networks a round.`;
  if (!isNumber(last)) return `${begin} No round is over yet.`;
  return `${begin} In the last round a network it grew ended ${points(Math.abs(last))} validation points ${last >= 0 ? "above" : "below"} its waiting twin on average.`;
}

function latest(run, table, column) {
  const own = run.tables[table];
  if (!own) return null;
  const at = own.columns.indexOf(column);
  const rows = [...own.rows.values()].sort((a, b) => b[0] - a[0]);
  const found = rows.find((row) => isNumber(row[at]));
  return found ? found[at] : null;
}

const explainedBeside = (potential) => (isNumber(potential) ? `of the critic; the reward's potential ${number(potential)}` : "of the critic, last update");

function tiles(run) {
  const { run: row, progress } = run.info;
  const time = [progress.state === "running" ? "Time left" : "Time", progress.state === "running" ? duration(progress.eta_s) : duration(row.seconds)];
  const done = ["Progress", progress.planned ? `${count(progress.done ?? 0)} of ${count(progress.planned)}` : count(progress.done), progress.unit];
  if (row.kind === "train") {
    return [done, time, ["Validation gain over the twin", signed(latest(run, "rounds", "gain_mean")), "points, last round"], ["Validation gain, greedy", signed(latest(run, "rounds", "eval_gain")), "points, last evaluation"],
      ["Return", number(latest(run, "rounds", "return_mean")), "last round"], ["Explained variance", number(latest(run, "updates", "explained_variance")), explainedBeside(latest(run, "updates", "potential_share"))],
      ["KL of the update", number(latest(run, "updates", "approx_kl")), "nats"], ["Speed", number(latest(run, "rounds", "steps_per_s")), "decisions a second"]];
  }
  const parameters = row.parameters ?? (latest(run, "epochs", "growth") && row.host_parameters ? Math.round(latest(run, "epochs", "growth") * row.host_parameters) : null);
  const flops = row.flops ?? (latest(run, "epochs", "operations") && row.host_flops ? Math.round(latest(run, "epochs", "operations") * row.host_flops) : null);
  const more = (now, before) => (isNumber(now) && isNumber(before) && before ? `${signed((100 * (now - before)) / before, 1)} % on the host's ${count(before)}` : "");
  const beside = (score, gain) => (isNumber(score) && isNumber(gain) ? `twin ${points(score - gain)}` : "");
  return [done, time, ["Test score", points(progress.test_score), beside(progress.test_score, progress.test_gain)],
    ["Test gain over the twin", signed(progress.test_gain), "points"],
    ["Validation score", points(progress.val_score), beside(progress.val_score, progress.val_gain)],
    ["Validation gain over the twin", signed(progress.val_gain), "points"],
    ["Parameters", count(parameters), more(parameters, row.host_parameters)], ["Operations a sample", count(flops), more(flops, row.host_flops)],
    ...depthTiles(run)];
}

function depthTiles(run) {
  const compute = latest(run, "epochs", "compute");
  const stacks = run === main() ? garden?.data?.stacks ?? [] : [];
  if (!isNumber(compute) || !stacks.length) return [];
  const awake = stacks.map(({ awake, blocks }) => `${awake} of ${blocks}`);
  return [["Blocks awake", [...new Set(awake)].join(", ")], ["Training FLOPs", share(compute), "of the static network's"]];
}

function drawAlarms() {
  const { alarms } = main().info;
  const place = $("#alarms");
  place.hidden = !alarms.length;
  if (!alarms.length) return;
  const order = ["critical", "warning", "info"];
  const standing = alarms.filter((alarm) => alarm.stands).sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity));
  const past = alarms.filter((alarm) => !alarm.stands);
  const line = (alarm) => h("div", { class: "alarm" },
    h("span", { class: `badge ${alarm.stands ? alarm.severity : "cleared"}` }, alarm.stands ? alarm.severity : alarm.state),
    h("p", null, h("strong", null, words(alarm.monitor), alarm.subject ? ` (${alarm.subject})` : ""), `: ${alarm.message ?? ""}`),
    h("p", { class: "note" }, `${main().kind === "train" ? `round ${roundNumber(alarm.round)}` : `epoch ${alarm.step}`}${alarm.advice && alarm.stands ? `. ${alarm.advice}` : ""}`));
  const isOpen = $("#alarms details")?.open;
  show($(".body", place),
    standing.length ? standing.slice(0, MOST_ALARMS).map(line) : h("p", { class: "note" }, "None stands."),
    (past.length > 0 || standing.length > MOST_ALARMS) && h("details", { class: "more", open: isOpen }, h("summary", null, `${past.length + Math.max(0, standing.length - MOST_ALARMS)} more, earlier or cleared`), standing.slice(MOST_ALARMS).map(line), past.map(line)));
}

function drawSettings() {
  const { info } = main();
  const { run } = info;
  const facts = [["command", run.command], ["task", run.task], ["recipe", run.recipe], ["controller", run.controller], ["seed", run.seed], ["device", run.device], ["machine", run.host],
    ["started", isNumber(run.created) ? new Date(1000 * run.created).toISOString().replace("T", " ").slice(0, 16) + " UTC" : null], ["resumed", run.resumes ? `${run.resumes} times` : null]];
  const pair = ([name, value]) => [h("code", null, name), typeof value === "object" && value !== null ? JSON.stringify(value) : String(value)];
  show($("#settings .body"),
    table("The run", [["what", ""], ["value", "words"]], facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(pair), { classes: "pairs" }),
    h("details", { class: "more" }, h("summary", null, `${info.settings.length} settings`), table("Settings", [["setting", ""], ["value", "words"]], info.settings.map(pair), { classes: "pairs" })));
}

// ---------------------------------------------------------------------------------------- panels

function setUpPanels() {
  const groups = new Map();
  for (const panel of main().info.panels) {
    if (!groups.has(panel.group)) groups.set(panel.group, []);
    groups.get(panel.group).push(panel);
  }
  for (const chart of charts.values()) chart.remove();
  charts.clear();
  const first = [];
  const rest = [];
  for (const [group, panels] of groups) {
    const grid = h("div", { class: "charts" });
    for (const panel of panels) {
      const chart = new Chart(panel, panel.table === "epochs" ? axes.epoch : axes.round);
      charts.set(panel.key, chart);
      grid.append(chart.root);
    }
    if (group === "Critic") grid.append(h("div", { id: "foreseen" }));
    (group === FIRST_GROUP ? first : rest).push(h("section", { class: "group", "data-group": group, "aria-label": group }, h("h2", null, group), grid));
  }
  show($("#first-panels"), first);
  show($("#panels"), rest);
  filterPanels();
}

function drawPanels() {
  for (const panel of main().info.panels) charts.get(panel.key).setLines(lines(panel));
}

function filterPanels() {
  const text = $("#panels-filter").value.trim().toLowerCase();
  for (const group of document.querySelectorAll("[data-group]")) {
    let isAny = false;
    for (const figure of group.querySelectorAll("figure.chart")) {
      const isShown = !text || `${group.dataset.group} ${$("h3", figure).textContent}`.toLowerCase().includes(text);
      figure.hidden = !isShown;
      isAny ||= isShown;
    }
    group.hidden = !isAny;
  }
}

// ---------------------------------------------------------------------------------- several runs

function drawOverlaid() {
  const place = $("#overlaid");
  place.replaceChildren(...(names.length < 2 ? [] : names.map((name, order) => h("li", { class: order ? "" : "pinned" },
    h("span", null, order ? "" : "pinned: ", shortName(name)),
    order > 0 && h("button", { type: "button", "aria-label": `Pin ${name}`, on: { click: () => go([name, ...names.filter((each) => each !== name)]) } }, "pin"),
    h("button", { type: "button", "aria-label": `Leave out ${name}`, on: { click: () => go(names.filter((each) => each !== name)) } }, "leave out")))));
}

function go(chosen) {
  const query = new URLSearchParams();
  chosen.forEach((name, place) => query.append(place ? "with" : "id", name));
  location.search = query.toString();
}

async function offerOthers() {
  const { runs: found } = await get("/api/runs");
  const select = $("#overlay");
  const others = found.filter((run) => run.state !== "damaged" && run.kind === main().kind && !names.includes(run.name));
  select.replaceChildren(h("option", { value: "" }, others.length ? "another run …" : "no other run of its kind"), ...others.map((run) => h("option", { value: run.name }, run.name)));
  select.disabled = !others.length;
  select.onchange = () => select.value && go([...names, select.value]);
}

// ------------------------------------------------------------------------------------------ live

async function load(name) {
  const [info, series] = await Promise.all([get("/api/run", { id: name }), get("/api/series", { id: name })]);
  runs.set(name, new Run(name, info, series));
}

// The pinned run must be there; another one that is not leaves the rest as it is.
async function loadAll() {
  const missing = [];
  await Promise.all(names.map((name, place) => load(name).catch((error) => {
    if (place === 0) throw error;
    missing.push([name, error.message]);
  })));
  for (const [name] of missing) names.splice(names.indexOf(name), 1);
  return missing.map(([name, reason]) => `${name}: ${reason}`);
}

let lastTrouble = null;

function onChange(change) {
  const run = runs.get(change.run);
  if (!run) return;
  if (change.error) {
    lastTrouble = change.run;
    return trouble(`${change.run}: ${change.error}`);
  }
  if (lastTrouble === change.run) {
    lastTrouble = null;
    trouble("");
  }
  if (change.progress) run.info.progress = { ...run.info.progress, ...change.progress };
  if (change.reset) return reload(change.run);
  for (const [table, data] of Object.entries(change.rows || {})) run.add(table, data);
  const changed = change.changed || [];
  if (Object.keys(change.rows || {}).length) drawPanels();
  if (run !== main()) return;
  drawTop();
  if (change.progress?.state === "finished" || changed.includes("alarms")) again(run);
  if (["seed_stages", "seeds", "decisions", "epochs", "contributions"].some((table) => changed.includes(table))) lookIn();
}

// What the top says beyond progress is asked for again, at most every two seconds.
let asking = null;
function again(run) {
  asking ??= setTimeout(async () => {
    asking = null;
    const info = await get("/api/run", { id: run.name }).catch(() => null);
    if (!info) return;
    run.info = info;
    drawTop();
    drawAlarms();
  }, 500);
}

function lookIn() {
  if (waiting) return;
  waiting = true;
  setTimeout(async () => {
    waiting = false;
    if (main().kind === "train") {
      const info = await get("/api/run", { id: names[0] }).catch(() => null);
      if (info && info.episodes.last !== null) garden.follow(info.episodes.last);
    } else garden.load();
  }, LOOK_MS);
}

async function reload(name) {
  await load(name);
  setUpPanels();
  drawAll();
  lookCloser();
}

// Of a long run the part that is looked at is read again, with its own points.
async function lookCloser() {
  const closer = [...runs.values()].map((run) => run.look((run.kind === "grow" ? axes.epoch : axes.round).zoom));
  const looked = await Promise.allSettled(closer);
  if (looked.some((one) => one.value)) drawPanels();
  const failed = looked.find((one) => one.status === "rejected");
  if (failed || lastTrouble === "closer") {
    lastTrouble = failed ? "closer" : null;
    trouble(failed ? `Drawn with the points of the whole run: ${failed.reason.message}` : "");
  }
}

function trouble(text) {
  const place = $("#trouble");
  place.hidden = !text;
  place.textContent = text;
}

function drawAll() {
  drawTop();
  drawAlarms();
  drawSettings();
  drawPanels();
}

function onEpisode(which) {
  decisions.setSlots(which.data.slots);
  decisions.refresh();
  if (which.kind === "grow") drawTop();
  const place = $("#foreseen");
  if (place) drawForeseen(place, which.name, which.round).then(filterPanels, () => place.replaceChildren());
}

async function start() {
  $("#panels-filter").addEventListener("input", filterPanels);
  $("#unzoom").addEventListener("click", () => [...Object.values(axes), garden?.axis].forEach((axis) => axis?.setZoom(null)));
  addEventListener("esper:zoom", () => {
    $("#unzoom").disabled = !axes.round.zoom && !axes.epoch.zoom && !garden?.axis.zoom;
    clearTimeout(looking);
    looking = setTimeout(lookCloser, ZOOM_MS);
  });
  if (!names.length) throw new Error("No run was named; choose one in the list.");
  const missing = await loadAll();
  // The order of the address is the order of the colours.
  const ordered = names.map((name) => [name, runs.get(name)]);
  runs.clear();
  ordered.forEach(([name, run]) => runs.set(name, run));
  setUpPanels();
  drawOverlaid();
  garden = new Garden(names[0], main().info, axes.epoch, onEpisode);
  decisions = new Decisions($("#decisions"), names[0], () => garden.where());
  if (!main().info.panels.length) for (const id of ["garden", "decisions"]) document.getElementById(id).hidden = true;
  drawAll();
  offerOthers().catch(() => null);
  if (main().info.episodes.last === null) decisions.load();
  garden.load();
  if (missing.length) trouble(`Not shown: ${missing.join("; ")}`);
  live = new Live(names, Object.fromEntries([...runs].map(([name, run]) => [name, run.position])), onChange);
  addEventListener("pagehide", () => live.stop());
}

start().catch((error) => {
  show($("#top"), h("h1", null, "This run cannot be shown"), h("p", null, error.message), h("p", null, h("a", { href: "/" }, "All runs")));
  for (const place of document.querySelectorAll("main > :not(#top)")) place.hidden = true;
  $("#connection").dataset.state = "lost";
  $("#connection").textContent = "not connected";
});
