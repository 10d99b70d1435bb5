"""Print what the searches of the small family found, and make the tables of its claim.

    python research/arena/tables.py searches          # what hindsight gains in each family tried
    python research/arena/tables.py claim --out DIR   # unpack the claim

Nothing is trained. `claim` unpacks the folder that `esper prove` wrote:

    python -m benchmarks arena DIR/proof
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import tempfile
from pathlib import Path

from esper.lab.proof.choose import Table, measure_headroom, read_table
from esper.lab.proof.results import CellResult, read_results

HERE = Path(__file__).parent


def read_packed(path: Path) -> list[CellResult]:
    """Return the results in a packed file."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "results.jsonl"
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        return read_results(plain)


def print_searches() -> None:
    """Print the headroom of every search of the small family."""
    for path in sorted((HERE / "results").glob("search_[0-9].jsonl.xz")):
        results = [each for each in read_packed(path) if each.purpose == "rung 0"]
        table: Table = read_table(results, "wait")
        plans = [arm for arm in next(iter(table.values())) if ">" in arm]
        found = measure_headroom(table, plans, "val")
        print(
            f"{path.name}: {found['members']:.0f} members, {len(plans)} plans, "
            f"best single plan {100 * found['single']:+.1f} %, hindsight over it "
            f"{100 * found['hindsight']:+.1f} ± {100 * found['standard_error']:.1f} %"
        )


def unpack(out: Path) -> None:
    """Unpack what the claim wrote."""
    for name in sorted(each.name for each in (HERE / "claim").iterdir()):
        source, target = HERE / "claim" / name, out / name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / "config.yaml", target)
        packed = (source / "results.jsonl.xz").read_bytes()
        (target / "results.jsonl").write_bytes(lzma.decompress(packed))
    print(f"python -m benchmarks arena {out / 'proof'}")


def main() -> None:
    """Run the chosen verb."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("searches", help="print what hindsight gains")
    packed = verbs.add_parser("claim", help="unpack the results of the claim")
    packed.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.verb == "searches":
        print_searches()
    else:
        unpack(options.out)


if __name__ == "__main__":
    main()
