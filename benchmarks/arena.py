"""Make every table of a claim from the folder of a proof, whether it is finished or not.

Prints the tables and writes `tables.md` and `tables.json` into the folder. They say what the first
arm is worth against every other, by kind of network and by data set, without the five members that
favour it most, against the best decisions in hindsight, and where growing is useless; and whether
it watches. Nothing is trained. What was not played is left out and named in the last table.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.table import print_table
from esper.lab.proof.evidence import gather, read_proof
from esper.lab.proof.results import RESULTS_FILE, CellResult, read_results
from esper.lab.proof.tables import headline, sections, to_markdown
from esper.leyline.errors import UsageError
from esper.nissa.folder import RunFolder
from esper.nissa.listing import COMMAND
from esper.utils.files import atomic_write_text
from esper.utils.process import find_module


def results_of(folder: Path) -> list[CellResult]:
    """Return the results in a folder of a proof or a search."""
    path = folder / RESULTS_FILE
    if not path.is_file():
        raise UsageError(f"{folder} has no {RESULTS_FILE}; give the --out of a proof or a search")
    return read_results(path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks arena",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="--out of `esper prove`")
    parser.add_argument(
        "--search",
        type=Path,
        metavar="SEARCH",
        help="--out of an `esper search` on the same members, whose schedules and static depths "
        "are chosen from in hindsight (default: the proof's arms of these kinds)",
    )
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="plugins",
        metavar="MODULE",
        help="module or .py file that registers the family, if it is not one of Esper's",
    )
    parser.add_argument("--out", type=Path, help="folder for the tables (default: FOLDER)")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    options = parser.parse_args(arguments)
    for name in options.plugins:
        import_module(find_module(name))
    settings = RunFolder(options.folder).read_config()
    if settings.pop(COMMAND, None) != "prove":
        raise UsageError(
            f"{options.folder} was not written by `esper prove`; give one of its --out"
        )
    proof = read_proof(settings, results_of(options.folder))
    found = gather(proof, results_of(options.search) if options.search else ())
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    target = options.out or options.folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        atomic_write_text(target / "tables.json", text)
        atomic_write_text(target / "tables.md", to_markdown(found))
    except OSError as error:
        raise UsageError(f"cannot write into {target}: {error.strerror}; give --out") from None
    if options.json:
        print(text, end="")
        return 0
    print(headline(found))
    for each in sections(found):
        print(f"\n{each.title}\n{each.notes}\n")
        if each.rows:
            print_table(each.header, each.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
