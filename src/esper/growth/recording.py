"""What a growing run writes into its store: the run itself, its host, every epoch and its end.

Everything but times and memory is a function of the run alone, so that a resumed run leaves what
an uninterrupted one does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from esper.growth.grown import Grown
from esper.growth.run import GrowthRun
from esper.kasmina.contribution import Contributions, Estimate
from esper.leyline.process import gpu_memory_share, resident_bytes, software_versions
from esper.nissa import EventKind, RunRow, RunStore, record_epoch
from esper.nissa.schema import ContributionRow


def run_row(
    run: GrowthRun, *, name: str, controller: str, config: Mapping[str, Any], command: str
) -> RunRow:
    """Return what the store says of a run that begins."""
    return RunRow(
        kind="grow",
        name=name,
        task=run.name,
        controller=controller,
        seed=run.config.seed,
        device=run.device.type,
        rows=1,
        epochs=run.config.epochs,
        slots=list(run.garden.slot_names),
        host_parameters=run.parameters_before,
        config=config,
        command=command,
        versions=software_versions(),
    )


def record_start(store: RunStore, run: GrowthRun) -> None:
    """Write down the host, which a report draws."""
    store.event(
        EventKind.TRAINING_STARTED,
        "the host before growth",
        data={"modules": [module.to_mapping() for module in run.modules]},
    )


def record_history(store: RunStore, run: GrowthRun) -> None:
    """Write every epoch so far into a store that knows none of them."""
    for count in range(1, len(run.history) + 1):
        record_epoch(
            store,
            run.history[:count],
            host_parameters=run.parameters_before,
            ablate_every=run.config.gardener.ablate_every,
        )


def record_newest(store: RunStore, run: GrowthRun) -> None:
    """Write the epoch that was just finished."""
    record_epoch(
        store,
        run.history,
        host_parameters=run.parameters_before,
        ablate_every=run.config.gardener.ablate_every,
        memory_bytes=resident_bytes(),
        gpu_memory_share=gpu_memory_share(run.device),
    )


def record_interruption(store: RunStore, run: GrowthRun) -> None:
    """Write down that the run stops before its end, to be continued."""
    store.finish("interrupted", seconds=run.seconds)


def record_end(store: RunStore, grown: Grown) -> None:
    """Write down how the run ended and what every seed was worth then."""
    summary = grown.summary
    rows = list(_contribution_rows(grown))
    if rows:
        store.write(*rows)
    store.finish(
        "finished",
        val_score=summary.val_score,
        test_score=summary.test_score,
        twin_val_score=summary.twin_val_score,
        twin_test_score=summary.twin_test_score,
        parameters=summary.parameters_after,
        seconds=summary.seconds,
    )


def _contribution_rows(grown: Grown) -> Iterator[ContributionRow]:
    """Return the last measurement; what its epoch has recorded already is not repeated."""
    last = grown.history[-1]
    told = {
        slot.name
        for slot in last.slots
        if slot.contribution is not None and slot.stage in ("BLENDING", "HOLDING")
    }

    def row(kind: str, found: Estimate, slot: str | None = None, other: str | None = None) -> Any:
        return ContributionRow(
            step=last.epoch, kind=kind, slot=slot, other=other, value=found.value, se=found.se
        )

    result: Contributions = grown.contributions
    if not result.leave_one_out:
        return
    yield row("all_off", result.all_off)
    for slot, found in result.leave_one_out.items():
        if slot not in told:
            yield row("leave_one_out", found, slot)
    for kind, single in (("solo_on", result.solo_on), ("shapley", result.shapley)):
        for slot, found in single.items():
            yield row(kind, found, slot)
    pairs = itertools.chain(
        (("pair", key, found) for key, found in result.pairs.items()),
        (("interaction", key, found) for key, found in result.interactions.items()),
    )
    for kind, (slot, other), found in pairs:
        yield row(kind, found, slot, other)
