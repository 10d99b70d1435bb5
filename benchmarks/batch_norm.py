"""Compare the returned BatchNorm network with the same weights after PyTorch's `update_bn`.

For every seed `esper.grow` grows a network of two blocks on digits with the default controller, and
trains its twin. The test accuracy of the result is compared with that of a copy whose BatchNorm
statistics `update_bn` recomputed on the whole training set.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from benchmarks.pool import add_sets_option, run_under
from benchmarks.table import print_table

EPOCHS = 40
WIDTH = 4


def make_model(seed: int) -> nn.Module:
    """Return two blocks of convolution, BatchNorm and ReLU with a linear head."""

    def block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()
        )

    torch.manual_seed(seed)
    return nn.Sequential(
        block(1, WIDTH),
        nn.MaxPool2d(2),
        block(WIDTH, 2 * WIDTH),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * WIDTH, 10),
    )


def grow_one(seed: int, epochs: int = EPOCHS, statistics: bool = True) -> dict[str, Any]:
    """Grow one network; return test accuracies in points, as returned and with fresh statistics.

    Args:
        seed: of the run.
        epochs: its length.
        statistics: whether the run recomputes statistics, as it does by default.
    """
    import esper
    from esper.growth.config import GardenerConfig, GrowthConfig
    from esper.lab.tasks import get_task
    from esper.lab.tasks.request import FixedBatches, TrainingBatches
    from esper.leyline.errors import EsperWarning

    data = get_task("digits").load()
    gardener = GardenerConfig() if statistics else GardenerConfig(statistics_samples=0)
    with warnings.catch_warnings():
        # Seeds that the end has caught half-way are no matter here.
        warnings.simplefilter("ignore", EsperWarning)
        grown = esper.grow(
            make_model(seed),
            ["0", "2"],
            train=TrainingBatches(data, 64, seed),
            val=FixedBatches(data, "val", subset=True),
            test=FixedBatches(data, "test"),
            epochs=epochs,
            seed=seed,
            twin=True,
            config=GrowthConfig(gardener=gardener, keep="best" if statistics else "last"),
        )
    inputs = data.batch("train", data.indices("train"))[0]
    network = grown.bake()
    anew = copy.deepcopy(network).train()
    # A last batch of one sample has no statistics.
    update_bn([part for part in inputs.split(64) if len(part) > 1], anew)
    x, y = data.batch("test", data.indices("test"))
    accuracy = {}
    for name, model in (("delivered", network), ("fresh", anew)):
        with torch.no_grad():
            right = model.eval()(x).argmax(1) == y
        accuracy[name] = 100 * float(right.double().mean())
    summary = grown.summary
    return {
        **accuracy,
        "seed": seed,
        "twin": summary.twin_test_score,
        "kept_epoch": summary.kept_epoch,
        "grew": [f"{one.blueprint} at {one.slot}: {one.fate}" for one in summary.seeds],
        "seconds": summary.seconds,
    }


def main(arguments: list[str]) -> int:
    """Grow a few networks and print one row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks batch_norm", description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--jobs", type=int, default=2)
    add_sets_option(parser)
    parser.add_argument(
        "--before",
        action="store_true",
        help="as training leaves the statistics, and the last epoch kept",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    work = partial(grow_one, epochs=options.epochs, statistics=not options.before)
    found = run_under(options.sets, work, range(options.seeds), options.jobs)
    results = [{"set": name, **one} for name, each in found.items() for one in each]
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    rows = [
        [
            one["set"],
            one["seed"],
            f"{one['twin']:.2f}",
            f"{one['delivered']:.2f}",
            f"{one['fresh']:.2f}",
            f"{one['delivered'] - one['twin']:+.2f}",
            one["kept_epoch"],
            "; ".join(one["grew"]) or "–",
        ]
        for one in results
    ]
    columns = [
        "set",
        "seed",
        "twin",
        "delivered",
        "fresh statistics",
        "gain",
        "epoch kept",
        "seeds",
    ]
    print_table(columns, rows)
    gains = [one["delivered"] - one["twin"] for one in results]
    short = [one["fresh"] - one["delivered"] for one in results]
    print(f"\ngain over the twin in points: median {median(gains):+.2f}, least {min(gains):+.2f}")
    print(
        f"fresh statistics would add: mean {fmean(short):+.2f}, "
        f"{min(short):+.2f} to {max(short):+.2f}"
    )
    return 0
