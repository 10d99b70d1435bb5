// The points of one run as its charts draw them: the whole run, and closer together where it is looked at.
import { get, isNumber, roundNumber, words } from "./dom.js";

const taken = (tables) =>
  Object.fromEntries(Object.entries(tables).map(([name, data]) => {
    const own = { columns: data.columns, rows: new Map(), every: data.every ?? 1 };
    put(own, name, data);
    return [name, own];
  }));

// Of rows with the same key the last counts.
function put(own, table, data) {
  const by = table === "update_heads" ? data.columns.indexOf("head") : -1;
  for (const row of data.rows) own.rows.set(by < 0 ? row[0] : `${row[0]}:${row[by]}`, row);
}

export class Run {
  constructor(name, info, series) {
    this.name = name;
    this.info = info;
    this.kind = series.kind;
    this.position = series.position;
    this.tables = taken(series.tables);
    this.closer = null;
    this.came = null;
    this.looks = 0;
  }

  // Rows that came with the stream.
  add(table, data) {
    if (!this.tables[table]) return;
    put(this.tables[table], table, data);
    this.came?.push([table, data]);
    if (this.closer) this.addCloser(table, data);
  }

  addCloser(table, data) {
    const { from, to, tables } = this.closer;
    put(tables[table], table, { ...data, rows: data.rows.filter(([x]) => x >= from && x <= to) });
  }

  // Read the part between two places of the axis again, null for none; return whether anything changed.
  async look(zoom) {
    const looks = (this.looks += 1);
    const isWhole = Object.values(this.tables).every((own) => own.every === 1);
    if (zoom === null || isWhole) {
      const had = this.closer !== null;
      this.closer = null;
      this.came = null;
      return had;
    }
    // One place more on either side, so that lines reach the edge.
    const first = this.kind === "grow" ? 0 : roundNumber(0);
    const from = Math.max(0, Math.floor(zoom[0]) - first - 1);
    const to = Math.max(from, Math.ceil(zoom[1]) - first + 1);
    // What the stream tells meanwhile may be missing from the answer.
    const came = (this.came = []);
    const found = await get("/api/series", { id: this.name, from, to });
    if (looks !== this.looks) return false;
    this.came = null;
    this.closer = { from, to, tables: taken(found.tables) };
    for (const [table, data] of came) this.addCloser(table, data);
    return true;
  }

  rows(table) {
    const whole = [...this.tables[table].rows.values()];
    const shown = this.closer
      ? [...whole.filter(([x]) => x < this.closer.from || x > this.closer.to), ...this.closer.tables[table].rows.values()]
      : whole;
    return shown.sort((a, b) => a[0] - b[0]);
  }

  // Return [{name, x, y, low, high, line}] of a panel.
  curves(panel) {
    const own = this.tables[panel.table];
    if (!own) return [];
    const rows = this.rows(panel.table);
    const at = (column) => own.columns.indexOf(column);
    if (panel.each) return eachCurve(rows, at(panel.each[0]), panel.each[1]);
    if (panel.by) {
      const groups = new Map();
      for (const row of rows) {
        const name = row[at(panel.by)];
        if (!groups.has(name)) groups.set(name, []);
        groups.get(name).push(row);
      }
      const order = (name) => (name === "op" ? " " : String(name));
      return [...groups.entries()].sort((a, b) => (order(a[0]) < order(b[0]) ? -1 : 1)).map(([name, some]) => ({ ...lineCurve(some, panel.lines[0], at), name: words(name) }));
    }
    return panel.lines.map((line) => lineCurve(rows, line, at));
  }
}

function lineCurve(rows, line, at) {
  const place = at(line.column);
  const known = line.is_joined ? rows.filter((row) => isNumber(row[place])) : rows;
  const column = (name) => (name ? known.map((row) => row[at(name)]) : null);
  return { name: line.name, line, x: known.map((row) => row[0]), y: column(line.column), low: column(line.low), high: column(line.high) };
}

function eachCurve(rows, place, member) {
  const found = new Map();
  for (const row of rows)
    for (const [name, value] of Object.entries(row[place] || {})) {
      if (!found.has(name)) found.set(name, { name: words(name), x: [], y: [] });
      const curve = found.get(name);
      curve.x.push(row[0]);
      curve.y.push(member ? value?.[member] ?? null : value);
    }
  return [...found.values()].filter((curve) => curve.y.some((value) => isNumber(value) && value !== 0)).slice(0, 12);
}
