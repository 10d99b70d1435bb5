"""Write `docs/zoo.md` from the results of the architecture tests: `python -m tests.zoo`."""

from __future__ import annotations

from pathlib import Path

from tests.zoo.specimen import STEPS, Findings

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

_HEAD = """# Tested architectures

Each network on this page is a known architecture, built as small as it can be: in plain PyTorch, or
from a configuration of the `transformers` library. One test runs each of them through all the steps
below, with random weights and random data. It shows that the steps work, not that growing pays.

| column | what the test does | what has to hold |
|---|---|---|
| slots, axes | call `esper.suggest_slots` | the slots and their axes are those in the table |
| grow | train a seed in every slot and blend it in | outputs change and are finite |
| bake | turn the grown network into a plain module | outputs equal to 1e-5 |
| save, load | save the growth, load it around a fresh model | outputs equal to the bit |
| PT2, ONNX | export, then run the file with two batch sizes | outputs equal to 1e-4 |

*axes* names the axes of the activations: B samples, C channels or features, T time steps, L
positions, H and W height and width. A network without slots stops there, and its other cells are
empty.
"refused" means that Esper raised an error at this step. The list below each table has the errors.

`make test-integrations` runs every network and compares the results with this page.
`python -m tests.zoo` writes the page anew. `make test` runs the first five networks, without the
exports.
"""

_TITLES = "| network | slots | axes | grow | bake | save, load | PT2 | ONNX |"


def row(name: str, found: Findings) -> str:
    """Return the table row of one network."""
    names = ", ".join(f"`{slot}`" for slot in found.slots) or "none"
    cells = [name, names, ", ".join(found.axes), *(_cell(found, step) for step in STEPS[1:])]
    return f"| {' | '.join(cells)} |"


def _cell(found: Findings, step: str) -> str:
    if "suggest" in found.refusals:
        return ""
    return "refused" if step in found.refusals else "yes"


def refusals(name: str, found: Findings) -> list[str]:
    """Return the list items with the errors that Esper raised for one network."""
    return [f"* {name}, {step}: {reason}" for step, reason in found.refusals.items()]


def render(sections: dict[str, dict[str, Findings]]) -> str:
    """Return the whole page; `sections` maps a title to the findings by network."""
    parts = [_HEAD]
    for title, networks in sections.items():
        lines = [f"## {title}", "", _TITLES, "|" + "---|" * 8]
        lines += [row(name, found) for name, found in networks.items()]
        errors = [line for name, found in networks.items() for line in refusals(name, found)]
        if errors:
            lines += ["", "Refused:", "", *errors]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
