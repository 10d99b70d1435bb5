"""Show runs in a browser, live: curves, slots, decisions, alarms.

The server only reads, and listens on 127.0.0.1 unless --host is given. Ctrl-C stops it.

Examples:
  esper dashboard                      all runs below runs/
  esper dashboard runs/first           one run
  esper dashboard --port 0 --open      on any free port, in a new browser window
  ssh -L 8737:localhost:8737 machine   forward the port of a dashboard on another machine
"""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError, needing
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import err_console, print_line

_ROOT = "runs"
_PORT = 8737


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "where", metavar="WHERE", nargs="?", help=f"a run, or a folder of runs (default: {_ROOT})"
    )
    parser.add_argument(
        "--port", type=int, default=_PORT, metavar="P", help="port; 0: any free one"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address to listen on; with any but a local one, such as 0.0.0.0, the printed address "
        "has a token, and everybody who has it can read the runs",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name that requests may use, such as that of a proxy; may be given "
        "again (default: none)",
    )
    parser.add_argument("--open", action="store_true", help="open a browser window")
    parser.set_defaults(needs_no_torch=True)


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
        print_line(console, f"showing {root} at {address.url} (Ctrl-C stops it)")
        if not address.is_local:
            print_line(
                console,
                "everybody who can reach this machine and has this address can read the runs",
            )
        if options.open:
            webbrowser.open(address.url)

    serve(root, host=options.host, port=options.port, names=options.allow_host, say=say)
    return 0
