"""How reports look and what every one has around it: sizes, colours, style sheets, the page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from esper.leyline.files import atomic_write_text
from esper.leyline.stages import COOLDOWN_STAGES, MODULE_STAGES
from esper.report.markup import escaped

WIDTH = 760.0
"""Width of the picture in its own units; it is scaled to the space it gets."""

MARGIN = 6.0

FONT = 23.0
"""The largest text size in the picture's units, used on phones: 11 pixels at 366 pixels' width.

Room is reserved for this size everywhere; wider screens use smaller sizes and have air to spare.
"""

ROW = 27.0
"""Height of a line of text at the largest size."""

STAGE_CLASSES: dict[str, str] = {
    **{stage.name: stage.name.lower() for stage in MODULE_STAGES},
    **{stage.name: "cooldown" for stage in COOLDOWN_STAGES},
}
"""What is drawn for a stage, by its name; stages of an empty slot are not here."""

LEGEND_STAGES = (*(stage.name.lower() for stage in MODULE_STAGES), "cooldown")

PICTURE_STYLE = """
.growth{--surface:#fff;--well:#f1f3f6;--ink:#19212a;--muted:#56616d;--grid:#dde2e8;
--grown:#0a58a8;--twin:#6a7480;--germinated:#c98500;--training:#2f97dc;--blending:#a8327f;
--holding:#1f3f94;--fossilized:#00805c;--cooldown:#98a0a8;color-scheme:light dark}
@media (prefers-color-scheme:dark){.growth{--surface:#14181d;--well:#1f252c;--ink:#e8ecf1;
--muted:#a3adb8;--grid:#323a44;--grown:#7cc0ff;--twin:#a3adb8;--germinated:#f0b840;
--training:#74c3f2;--blending:#d98bb8;--holding:#5b74d8;--fossilized:#17a67c;
--cooldown:#626b75}}
.growth text{font:400 12.5px system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,
sans-serif;fill:var(--ink)}
@media (max-width:800px){.growth text{font-size:17px}}
@media (max-width:520px){.growth text{font-size:23px}}
.growth .strong{font-weight:650}.growth .muted{fill:var(--muted)}
.growth .number{font-variant-numeric:tabular-nums}
.growth .halo{paint-order:stroke;stroke:var(--surface);stroke-width:4px;stroke-linejoin:round}
.growth .surface{fill:var(--surface)}.growth .well{fill:var(--well)}
.growth .grid{stroke:var(--grid);stroke-width:1;vector-effect:non-scaling-stroke}
.growth .leader{stroke:var(--muted);stroke-opacity:.55;stroke-width:1;
vector-effect:non-scaling-stroke}
.growth .axis{stroke:var(--muted);stroke-width:1;vector-effect:non-scaling-stroke}
.growth .curve{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round;
vector-effect:non-scaling-stroke}
.growth .curve.grown{stroke:var(--grown)}
.growth .curve.twin{stroke:var(--twin);stroke-width:1.8;stroke-dasharray:5 4}
.growth .end.grown,.growth text.grown{fill:var(--grown)}
.growth .end.twin,.growth text.twin{fill:var(--twin)}
.growth .column{fill:var(--ink);fill-opacity:0}.growth .column:hover{fill-opacity:.08}
.growth .run{shape-rendering:crispEdges}
.growth .tint{opacity:.2}
.growth .germinated{fill:var(--germinated)}.growth .training{fill:var(--training)}
.growth .blending{fill:var(--blending)}.growth .holding{fill:var(--holding)}
.growth .fossilized{fill:var(--fossilized)}
.growth .cooldown{fill:none;stroke:var(--cooldown);stroke-width:1.5;stroke-dasharray:3 2;
vector-effect:non-scaling-stroke}
.growth .mark{fill:var(--ink);stroke:var(--surface);stroke-width:1;stroke-linejoin:round;
vector-effect:non-scaling-stroke}
.growth .refused .mark{fill:var(--surface);stroke:var(--ink);stroke-width:1.3}
.growth .mark.cross{fill:none;stroke:var(--ink);stroke-width:2.2;stroke-linecap:round}
.growth .refused .mark.cross{stroke-width:1;stroke-dasharray:2 2}
.growth .part{fill:var(--well);stroke:var(--grid);stroke-width:1;vector-effect:non-scaling-stroke}
.growth .part.seed{stroke:var(--muted)}
.growth .part.empty,.growth .part.hidden{fill:none;stroke:var(--muted);stroke-dasharray:4 3}
.growth .arrow{fill:none;stroke:var(--muted);stroke-width:1.4;stroke-linejoin:round;
vector-effect:non-scaling-stroke}
""".strip()

CHART_STYLE = """
.chart{--grid:#dde2e8;--muted:#56616d;--ink:#19212a;--c1:#0a58a8;--c2:#c98500;--c3:#a8327f;
--c4:#00805c;--c5:#6a7480;--c6:#2f97dc;display:block;width:100%;height:auto}
@media (prefers-color-scheme:dark){.chart{--grid:#323a44;--muted:#a3adb8;--ink:#e8ecf1;
--c1:#7cc0ff;--c2:#f0b840;--c3:#d98bb8;--c4:#17a67c;--c5:#a3adb8;--c6:#5b74d8}}
.chart text{font:400 12px system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;
fill:var(--ink)}
@media (max-width:800px){.chart text{font-size:14px}}
@media (max-width:520px){.chart text{font-size:15.5px}}
.chart .strong{font-weight:650}.chart text.muted{fill:var(--muted)}
.chart text.number{font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--grid)}.chart .axis{stroke:var(--muted)}
.chart .reference{stroke:var(--muted);stroke-dasharray:2 3}
.chart .line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.chart .line,.chart .grid,.chart .axis,.chart .reference{vector-effect:non-scaling-stroke}
.chart .dashed{stroke-dasharray:4 3}
.chart .dots{stroke-width:3;stroke-dasharray:0 7}
.chart .line.c1{stroke:var(--c1)}.chart .line.c2{stroke:var(--c2)}.chart .line.c3{stroke:var(--c3)}
.chart .line.c4{stroke:var(--c4)}.chart .line.c5{stroke:var(--c5)}.chart .line.c6{stroke:var(--c6)}
.chart text.c1,.chart .c1.band,.chart .c1.area{fill:var(--c1)}
.chart .c2.band,.chart .c2.area{fill:var(--c2)}.chart .c3.band,.chart .c3.area{fill:var(--c3)}
.chart .c4.band,.chart .c4.area{fill:var(--c4)}.chart .c5.band,.chart .c5.area{fill:var(--c5)}
.chart .c6.band,.chart .c6.area{fill:var(--c6)}
.chart .band{fill-opacity:.14}.chart .strong-band{fill-opacity:.22}.chart .area{fill-opacity:.75}
.chart .column{fill:var(--ink);fill-opacity:0}.chart .column:hover{fill-opacity:.08}
.charts{display:grid;gap:.9rem 1.1rem;grid-template-columns:repeat(auto-fill,
minmax(min(100%,25rem),1fr));margin:.4rem 0 .8rem}
.charts.small{grid-template-columns:repeat(auto-fill,minmax(min(46%,12.5rem),1fr));gap:.7rem .9rem}
.charts.heads{grid-template-columns:repeat(4,1fr);gap:.5rem .9rem}
@media (max-width:800px){.charts.heads{grid-template-columns:repeat(2,1fr)}}
""".strip()

# A table that is wider than its container has a shade at the edge behind which more is hidden:
# the covers scroll with the table, the shades stay.
PAGE_STYLE = """
:root{color-scheme:light dark;--page:#f1f3f6;--surface:#fff;--ink:#19212a;--muted:#56616d;
--line:#d5dbe2;--accent:#0a58a8;--head:#f6f8fa;--shade:#19212a40}
@media (prefers-color-scheme:dark){:root{--page:#0c0f12;--surface:#14181d;--ink:#e8ecf1;
--muted:#a3adb8;--line:#323a44;--accent:#7cc0ff;--head:#1b2127;--shade:#a3adb866}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;font-size:1rem;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;
overflow-wrap:anywhere}
main{max-width:62rem;margin:0 auto;padding:1.25rem clamp(.6rem,2.5vw,1.5rem) 3rem}
h1{font-size:clamp(1.4rem,1.1rem + 1.6vw,2.1rem);line-height:1.2;margin:.4rem 0 .6rem}
h2{font-size:1.15rem;margin:0 0 .6rem}
p{margin:0 0 .7rem;max-width:46rem}
.lead{font-size:1.08rem}
.note,figcaption{color:var(--muted);font-size:.9rem}
section,figure{background:var(--surface);border:1px solid var(--line);border-radius:.6rem;
margin:1rem 0;padding:1rem clamp(.6rem,2vw,1.25rem)}
figure{padding:.6rem clamp(.25rem,1.5vw,1rem) .8rem}
figcaption{padding:.5rem .35rem 0}
figure svg{display:block;width:100%;height:auto}
.figures{display:flex;flex-wrap:wrap;gap:.6rem;margin:1rem 0}
.figures div{background:var(--surface);border:1px solid var(--line);border-radius:.6rem;
padding:.7rem .9rem;flex:1 1 auto;min-width:min(100%,9.5rem)}
.figures dt{color:var(--muted);font-size:.85rem}
.figures dd{margin:0;font-size:1.2rem;font-weight:650;font-variant-numeric:tabular-nums;
line-height:1.3}
.figures dd small{display:block;font-size:.85rem;font-weight:400;color:var(--muted)}
.scroll{overflow-x:auto;max-width:100%;background:
linear-gradient(to right,var(--surface) 40%,transparent) left/2.5rem 100% no-repeat local,
linear-gradient(to left,var(--surface) 40%,transparent) right/2.5rem 100% no-repeat local,
linear-gradient(to right,var(--shade),transparent) left/1rem 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) right/1rem 100% no-repeat scroll}
.scroll:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.92rem}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{text-align:left;vertical-align:top;padding:.4rem .65rem;
border-bottom:1px solid var(--line)}
td{overflow-wrap:normal}
thead th{white-space:nowrap;color:var(--muted);font-weight:600;
border-bottom-width:2px}
tbody tr:last-child>*{border-bottom:0}
td.words{min-width:13rem;overflow-wrap:anywhere}
td.when{min-width:7rem}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.pairs th{width:40%;min-width:7rem;font-weight:500;color:var(--muted)}
.pairs td{overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;background:var(--head);border:1px solid var(--line);
border-radius:.4rem;padding:.6rem .75rem;font-size:.9rem}
code,pre,.pairs{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.pairs{font-size:.86rem}
h3{font-size:.95rem;margin:1.1rem 0 .4rem}
details{border-top:1px solid var(--line);padding:.5rem 0}
summary{cursor:pointer;font-weight:600;padding:.2rem 0}
summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
td.quiet{color:var(--muted)}
@media (max-width:32rem){.pairs th,.pairs td{display:block;width:auto}
.pairs th{border:0;padding-bottom:0}.pairs td{padding-top:0}}
@media print{body{background:none}section,figure{break-inside:avoid}}
""".strip()


# Nothing is fetched and nothing runs, whatever a value in the page tries.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(title: str, top: str, *sections: str, style: str = PAGE_STYLE) -> str:
    """Return one self-contained HTML page; `top` and the sections are markup."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n"
        f"<main>\n<header>\n<h1>{escaped(title)}</h1>\n{top}</header>\n"
        f"{''.join(sections)}"
        "</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """Return one section of a page; the body is markup."""
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}</section>\n"


def render_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return the few numbers to remember: a name, a value, and a note that may be empty."""
    body = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}"
        + (f"<small>{escaped(note)}</small>" if note else "")
        + "</dd></div>\n"
        for name, value, note in tiles
    )
    return f'<dl class="figures">\n{body}</dl>\n'


def write_report(path: Path | str, html: str) -> None:
    """Write a report so that a reader finds the old one or the new one, never a part.

    Raises:
        CheckpointError: The disk refused; the file that was there before is untouched.
    """
    atomic_write_text(Path(path), html)
