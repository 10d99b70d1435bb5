"""Test every architecture and write `docs/zoo.md`: `python -m tests.zoo`."""

from __future__ import annotations

import torch

from tests.zoo.hugging_face import HUGGING_FACE
from tests.zoo.page import PAGE, render
from tests.zoo.plain import PLAIN
from tests.zoo.specimen import examine


def main() -> None:
    torch.set_num_threads(1)
    sections = {}
    for title, specimens in {"PyTorch": PLAIN, "transformers": HUGGING_FACE}.items():
        sections[title] = {}
        for specimen in specimens:
            sections[title][specimen.name] = found = examine(specimen)
            print(specimen.name, *found.refusals or ["ok"], sep=", ", flush=True)
    PAGE.write_text(render(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
