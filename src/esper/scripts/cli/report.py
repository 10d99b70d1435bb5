"""Write one self-contained HTML file about a run.

The run may be finished or not. The file needs neither a network nor scripts.

Examples:
  esper report runs/first                     writes runs/first/report.html
  esper report runs/first --out first.html
"""

from __future__ import annotations

import argparse
import os

from esper.leyline.errors import UsageError
from esper.nissa.columns import storable_text
from esper.nissa.report import report_run
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import answer, find_store, out_console, print_line


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("where", metavar="RUN", help="run folder")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: RUN/report.html)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.set_defaults(needs_no_torch=True)


def run(options: argparse.Namespace) -> int:
    """Write the file and print its path."""
    find_store(options.where)
    if options.out is not None and os.path.isdir(options.out):
        raise UsageError(f"--out must be a file, but {options.out} is a folder")
    path = report_run(options.where, options.out)
    run, report = storable_text(str(options.where)), storable_text(str(path))
    document = {"run": run, "report": report, "bytes": path.stat().st_size}
    return answer(options.json, document, lambda: print_line(out_console(), f"report: {path}"))
