"""`esper dashboard`: runs in a browser, live, read from their stores."""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError, needing
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import err_console, tell

_ROOT = "runs"
_PORT = 8737

_EPILOG = """\
examples:
  esper dashboard                      every run below runs/
  esper dashboard runs/first           one run
  esper dashboard --port 0 --open      any free port, and a browser window
  ssh -L 8737:localhost:8737 machine   to look at a run on another machine, served there
"""


def set_up(parser: Parser) -> None:
    """Describe the verb and its options."""
    parser.description = (
        "Show runs in a browser while they go on: curves, the garden, decisions, alarms. It only "
        "reads, and listens on this machine alone unless --host says otherwise. Ctrl-C ends it."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "where", metavar="WHERE", nargs="?", help=f"a run, or a folder of runs (default: {_ROOT})"
    )
    parser.add_argument("--port", type=int, default=_PORT, metavar="P", help="0: any free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="where to listen; beyond this machine, as with 0.0.0.0, the address gets a token, "
        "and whoever has it reads every run shown",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name the page may be asked for under, such as that of a proxy; may be "
        "given again (default: none)",
    )
    parser.add_argument("--open", action="store_true", help="open a browser window")
    parser.set_defaults(run=run, needs_no_torch=True)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    root = Path(_ROOT if options.where is None else options.where)
    if not os.path.isdir(root):
        raise UsageError(
            f"there is no folder {root}; give a run or a folder of runs, or start one with "
            "`esper grow --out runs/first`"
        )
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port must be 0 to 65535, got {options.port}")
    with needing("the dashboard", "dash"):
        from esper.nissa.dashboard.app import serve

    def say(address: Any) -> None:
        console = err_console()
        tell(console, f"showing {root} at {address.url} (Ctrl-C ends it)")
        if not address.is_local:
            tell(
                console, "everybody who reaches this machine and has that address can read the runs"
            )
        if options.open:
            webbrowser.open(address.url)

    serve(root, host=options.host, port=options.port, names=options.allow_host, say=say)
    return 0
