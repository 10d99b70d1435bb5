"""Make the controller that ships with Esper from a trained policy, its settings and its results.

    python research/campaign/ship.py --policy STATE/clone/policy --config STATE/clone/config.yaml \
        --results results/gate_clone.json --card card.md

Paths are relative to this folder where they do not exist otherwise. The package's folder is written
as a whole; `tests/tamiyo/controllers/test_pretrained.py` has the decisions that it must make.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import yaml

from esper.lab.tasks import get_family
from esper.lab.tasks.member import GROWTH_LIMIT
from esper.leyline.controller import GrowthLimits
from esper.tamiyo.controllers import Tamiyo, load_policy

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "src" / "esper" / "tamiyo" / "weights"


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, required=True, help="folder of a saved policy")
    parser.add_argument("--config", type=Path, required=True, help="config.yaml of its training")
    parser.add_argument("--results", type=Path, required=True, help="what it reached, JSON")
    parser.add_argument("--card", type=Path, default=Path("card.md"), help="Markdown")
    parser.add_argument("--name", default="tamiyo")
    options = parser.parse_args()
    policy, config, results, card = (
        path if path.exists() else HERE / path
        for path in (options.policy, options.config, options.results, options.card)
    )
    # Every member of a family lives within the same limits, whatever learned from it.
    limits = GrowthLimits(parameters=GROWTH_LIMIT, flops=GROWTH_LIMIT)
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    members = [get_family(name).members("train") for name in settings["tasks"]]
    horizon = min(member.horizon for each in members for member in each)
    Tamiyo(
        policy=replace(load_policy(policy), limits=limits, horizon=horizon),
        card=card.read_text(encoding="utf-8"),
        train_config=settings,
        results=json.loads(results.read_text(encoding="utf-8")),
    ).save_pretrained(PACKAGE / options.name)


if __name__ == "__main__":
    main()
