"""Entry point of the `esper` command: finds the verb, runs it, turns errors into exit codes.

Exit codes: 0 done, 1 failed while running, 2 the request was wrong, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from esper._version import __version__
from esper.cli.parser import Parser

_DESCRIPTION = "Grow neural networks while they train."

_EPILOG = """\
examples:
  esper grow --task digits --out runs/first     grow the embedded digits network
  esper tasks                                   what can be grown here
  esper blueprints                              what it can be grown with
"""


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    from esper.cli import blueprints, doctor, grow, tasks

    parser = Parser(prog="esper", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"esper {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for verb in (grow, tasks, blueprints, doctor):
        verb.add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from esper.leyline.errors import EsperError, UsageError

    try:
        options = build_parser().parse_args(arguments)
        _limit_threads()
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _complain(error, 2)
    except EsperError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`esper tasks | head`): not a failure, and nothing left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(error: Exception, code: int) -> int:
    from esper.cli.output import safe

    print(f"esper: {safe(' '.join(str(error).split()))}", file=sys.stderr)
    if os.environ.get("ESPER_DEBUG") == "1":
        raise error
    return code


def _limit_threads() -> None:
    """Use one thread: networks this small lose more to waiting than they gain."""
    import torch

    torch.set_num_threads(int(os.environ.get("ESPER_THREADS", "1")))


if __name__ == "__main__":
    raise SystemExit(main())
