"""`python -m benchmarks [NAME] [options]`: run one benchmark, or list them."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def names() -> list[str]:
    """Return the benchmarks there are."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not (module.name.startswith("_") or module.name in ("pool", "problems", "table"))
    )


def main(arguments: list[str]) -> int:
    """Run the named benchmark with the rest of the arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [--help]\n")
        for name in names():
            module = importlib.import_module(f"benchmarks.{name}")
            print(f"  {name:20} {(module.__doc__ or '').strip().splitlines()[0]}")
        return 0
    if arguments[0] not in names():
        print(f"unknown benchmark {arguments[0]!r}; known: {', '.join(names())}", file=sys.stderr)
        return 2
    from esper.leyline.errors import EsperError

    module = importlib.import_module(f"benchmarks.{arguments[0]}")
    try:
        return int(module.main(arguments[1:]))
    except EsperError as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
