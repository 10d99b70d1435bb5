"""The page about the zoo, `docs/zoo.md`, made from what was found: `python -m tests.zoo`."""

from __future__ import annotations

from pathlib import Path

from tests.zoo.specimen import STEPS, Findings

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

_HEAD = """# The zoo

Networks that others designed, each as small as it can be: written down with PyTorch alone, or made
by the `transformers` library. For each one, slots are suggested, a seed is raised in every one of
them, and what has grown is baked, saved and loaded around a fresh model, and exported and run with
another size of batch; outputs must stay the same (exactly when saved, to 1e-5 when baked, to 1e-4
when exported). What is not possible is refused in one line.

`make test-integrations` goes through all of it and compares it with this page, which
`python -m tests.zoo` writes. `make test` does so for the first five, without the exports.
"""

_TITLES = "| network | slots | axes | grow | bake | save, load | PT2 | ONNX |"


def row(name: str, found: Findings) -> str:
    """Return what was found about one network, as a line of its table."""
    names = ", ".join(f"`{slot}`" for slot in found.slots) or "none"
    cells = [name, names, ", ".join(found.axes), *(_cell(found, step) for step in STEPS[1:])]
    return f"| {' | '.join(cells)} |"


def _cell(found: Findings, step: str) -> str:
    if "suggest" in found.refusals:
        return ""
    return "refused" if step in found.refusals else "yes"


def refusals(name: str, found: Findings) -> list[str]:
    """Return what was refused about one network, as lines of a list."""
    return [f"* {name}, {step}: {reason}" for step, reason in found.refusals.items()]


def render(sections: dict[str, dict[str, Findings]]) -> str:
    """Return the whole page, by title of a section and name of a network."""
    parts = [_HEAD]
    for title, networks in sections.items():
        lines = [f"## {title}", "", _TITLES, "|" + "---|" * 8]
        lines += [row(name, found) for name, found in networks.items()]
        told = [line for name, found in networks.items() for line in refusals(name, found)]
        if told:
            lines += ["", "Refused:", "", *told]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
