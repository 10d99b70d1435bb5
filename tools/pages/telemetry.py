"""The page Telemetry: tables and columns, names of curves, monitors, from what writes them."""

from __future__ import annotations

from collections.abc import Iterator

from esper.nissa.columns import TABLES, VIEWS, Column, Table, View
from esper.nissa.monitors import BANDS, MONITORS
from esper.nissa.schema import SCHEMA_VERSION
from esper.nissa.sinks.sink import METRICS, TERMS

_INTRODUCTION = f"""\
# Telemetry

Everything that a run records is in `run.db` of its folder: one SQLite file in WAL mode, which any
program may read during the run. `python -m tools.pages` makes this page from the code that writes
the file; the schema has version {SCHEMA_VERSION}.

## How to read it

| you want | use |
|---|---|
| the run in a browser, live | `esper dashboard` ([the live page](dashboard.md)) |
| a list of runs | `esper runs`, `esper runs --json` |
| two runs side by side | `esper compare RUN RUN` (`--json`) |
| a query in SQL | `esper query RUN "SELECT step, val_score FROM epochs"` (`--csv`, `--json`) |
| data frames | `with esper.open_run("RUN") as run: run.table("epochs")` (Polars or pandas) |
| plain rows | `with esper.open_run("RUN") as run: run.rows("decisions", where="op != 'WAIT'")` |
| curves | `tensorboard --logdir RUN/tb`; W&B with `--wandb` (extra `wandb`; `WANDB_MODE=offline`) |

Queries are read-only: they cannot write, attach another file or load code.

## Guarantees

- A row is written completely or not at all. A killed process loses at most its last second.
- A missing value is `NULL`, never 0. NaN is stored as `NULL` too.
- Rows are never dropped: if the disk is slow, the run waits, and `runs.wait_s` has the seconds.
- After a resume the file holds what an uninterrupted run would hold, in every column that is not
  marked *volatile* and every row whose `volatile` column is not 1.
- `round, row, step, ordinal` identify a row: the round of training, the network among those
  trained together, the epoch, and a count within these. Every table also has `id`, the
  order of writing.
- Times are seconds since 1970 (UTC); scores, contributions and gains are in points (accuracy 0 to
  100, or the negative loss); shares are 0 to 1.
"""

_VIEWS = """\
## Views

The names of a reward's terms differ between rewards, so the terms are one JSON column:
`reward_terms ->> 'rent'` is one of them. These views have one row per term:
`SELECT term, AVG(share) FROM round_terms GROUP BY term`.
"""

_METRICS = """\
## Names of curves

Sinks use these names for the columns. The x axis of `epochs` is the epoch, that of all others
`env_steps`.
"""

_MONITORS = """\
## Monitors

A monitor checks recorded rows. A finding is a row of `alarms` when it appears, and another one when
it is gone. Heads without a choice, forced steps, and a controller that waits 99 % of the time raise
no alarm.
"""

_BANDS = """\
## Colours

Colours of numbers on pages; they raise no alarm.
"""


def render() -> str:
    """Return the page."""
    parts = [_INTRODUCTION, "## Tables\n"]
    parts += ["\n".join(_table_lines(table)) + "\n" for table in TABLES.values()]
    parts += [_VIEWS, *("\n".join(_view_lines(view)) + "\n" for view in VIEWS.values())]
    parts += [_METRICS, "\n".join(_metric_lines()) + "\n"]
    parts += [_MONITORS, "\n".join(_monitor_lines()) + "\n"]
    parts += [_BANDS, "\n".join(_band_lines()) + "\n"]
    return "\n".join(parts)


def _table_lines(table: Table) -> Iterator[str]:
    yield f"### {table.name}\n"
    yield f"{table.meaning}{' Key: ' + ', '.join(table.key) + '.' if table.key else ''}\n"
    yield "| column | type | unit | meaning |"
    yield "|---|---|---|---|"
    for column in table.columns:
        yield f"| `{column.name}` | {_type(column)} | {column.unit} | {_meaning(column)} |"


def _view_lines(view: View) -> Iterator[str]:
    key = ", ".join(f"`{name}`" for name in TABLES[view.table].key)
    yield f"### {view.name}\n"
    yield f"{view.meaning} From `{view.table}.{view.column}`.\n"
    yield "| column | meaning |"
    yield "|---|---|"
    yield f"| {key} | Those of `{view.table}`. |"
    yield f"| `{view.name_column}` | Its name. |"
    for name, meaning in view.values.items():
        yield f"| `{name}` | {meaning} |"


def _type(column: Column) -> str:
    if column.is_json:
        return "JSON"
    return "flag" if column.is_flag else column.sql.lower()


def _meaning(column: Column) -> str:
    text = column.meaning.replace("|", "\\|")
    return f"{text} *Volatile.*" if column.is_volatile else text


def _metric_lines() -> Iterator[str]:
    yield "| curve | from |"
    yield "|---|---|"
    for record, names in METRICS.items():
        table = next(table for table in TABLES.values() if table.record is record)
        for column, name in names.items():
            if name is not None:
                shown = name.replace("<", "&lt;").replace(">", "&gt;")
                yield f"| {shown} | {table.name}.{column} |"
    for series in TERMS:
        yield f"| rewards/{series}/&lt;term&gt; | round_terms.{series} |"


def _monitor_lines() -> Iterator[str]:
    yield "| monitor | alarms when | what it means | what to try |"
    yield "|---|---|---|---|"
    for name in MONITORS.names():
        monitor = MONITORS.get(name)
        cells = (name, monitor.thresholds, monitor.meaning, monitor.advice)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _band_lines() -> Iterator[str]:
    yield "| number | watch | bad | what it is |"
    yield "|---|---|---|---|"
    for name, band in BANDS.items():
        sign = "<" if band.is_high_good else "≥"
        yield f"| {name} | {sign} {band.watch:g} | {sign} {band.bad:g} | {band.meaning} |"
