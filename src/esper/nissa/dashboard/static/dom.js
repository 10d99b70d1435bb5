// Elements and numbers. Text becomes text nodes only: what a store holds is never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const $ = (selector, root = document) => root.querySelector(selector);

export function show(place, ...children) {
  place.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  place.removeAttribute("aria-busy");
}

// A round as people count it: the first is 1, in the store it is 0.
export const roundNumber = (round) => round + 1;

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const MINUS = "−";
const sign = (text) => text.replace("-", MINUS);

export function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-4)) return sign(value.toExponential(2));
  if (Number.isInteger(value)) return sign(value.toLocaleString("en"));
  if (size >= 1000) return sign(Math.round(value).toLocaleString("en"));
  return sign(value.toPrecision(Math.max(digits, Math.min(4, Math.floor(Math.log10(size || 1)) + 3))).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""));
}

export const points = (value) => (isNumber(value) ? sign(value.toFixed(2)) : "–");
export const signed = (value, decimals = 2) =>
  isNumber(value) ? (value > 0 ? "+" : "") + sign(value.toFixed(decimals)) : "–";
export const share = (value) => {
  if (!isNumber(value)) return "–";
  const percent = 100 * value;
  return `${Math.abs(percent) >= 10 ? sign(percent.toFixed(1).replace(/\.0$/, "")) : number(+percent.toPrecision(2))} %`;
};
export const count = (value) => (isNumber(value) ? value.toLocaleString("en") : "–");
export const worth = (value, se) =>
  isNumber(value) ? `${signed(value)}${isNumber(se) ? ` ± ${se.toFixed(2)}` : ""}` : "not measured";
export const words = (text) => String(text ?? "").replaceAll("_", " ").toLowerCase();

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 1) return `${number(seconds)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

async function ask(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters || {}))
    if (value !== null && value !== undefined && value !== "") query.append(name, value);
  let answer;
  try {
    answer = await fetch(`${path}?${query}`);
  } catch {
    throw new Error("The server does not answer; is `esper dashboard` still running?");
  }
  if (answer.ok) return answer;
  const data = await answer.json().catch(() => ({}));
  throw new Error(data.error || `The server answered ${answer.status}.`);
}

export const get = async (path, parameters) => (await ask(path, parameters)).json();
export const getText = async (path, parameters) => (await ask(path, parameters)).text();

export function table(caption, columns, rows, { classes = "" } = {}) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", { class: classes },
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
      h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, place) =>
        h("td", { class: columns[place][1], "data-name": columns[place][0] }, cell)))))));
}
