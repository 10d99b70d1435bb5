"""A training run in its folder, and `esper.train`: what the command does, in one call.

    trained = esper.train("digits", out="runs/tamiyo", rounds=50)
    esper.train(out="runs/tamiyo", resume=True, ppo={"clip": 0.1})

A checkpoint is saved after rounds and every minute, in mid-episode too. `checkpoints/best` is the
policy with the best average so far.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline.documents import read_document
from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.files import atomic_write_text
from esper.leyline.manifest import restoring
from esper.leyline.process import choose_device
from esper.leyline.records import told_round
from esper.leyline.settings import SettingChanges, change_settings
from esper.nissa.reader import open_run
from esper.nissa.sinks import Sink, check_sinks
from esper.nissa.store import DEFAULT_SINKS, OnAlarm, RunStore, open_store
from esper.population.cluster import RayCluster
from esper.report import report_run
from esper.runs.checkpoint import GROWING, TRAINING, Checkpoints, Which, Write, resume_command
from esper.runs.folder import SETTINGS, RunFolder
from esper.runs.record_training import (
    record_changes,
    record_end,
    record_round,
    record_start,
    run_row,
)
from esper.runs.recorded import RecordedRun, carry_out_or_raise
from esper.runs.world import World
from esper.simic.training.config import TrainConfig, compare_settings
from esper.simic.training.progress import Progress, RoundReport
from esper.simic.training.recipes import get_recipe
from esper.simic.training.row_source import TaskRows
from esper.simic.training.trainer import Trainer
from esper.tamiyo.controllers.policy_file import CHECKPOINT_POLICY, find_policy, save_policy

DEFAULT_RECIPE = "digits"

_LATE_SHARE = 0.1
"""The end of a run: its last tenth, at least one round."""


class TrainingRun(RecordedRun[Progress]):
    """A training run that is open for writing; made by `start_training` and `resume_training`.

    Args:
        folder: where it lies.
        trainer: what is trained, in the state to go on from.
        store: where it is written down.
        command: the command that started it.
        world: what it stands on beside its settings.
        is_saved: whether the newest checkpoint holds the trainer's state.
    """

    kind = TRAINING

    def __init__(
        self,
        folder: RunFolder,
        trainer: Trainer,
        store: RunStore,
        command: str,
        world: World,
        *,
        is_saved: bool = False,
    ) -> None:
        """Bring the parts together; nothing is written yet."""
        save_every_s = trainer.config.checkpoint_seconds
        super().__init__(
            folder, store, command, world, save_every_s=save_every_s, is_saved=is_saved
        )
        self.trainer = trainer

    @property
    def config(self) -> TrainConfig:
        """The settings."""
        return self.trainer.config

    def steps(self) -> Iterator[Progress]:
        """Train, one step after another."""
        return self.trainer.train()

    @property
    def is_done(self) -> bool:
        """Whether all rounds are played."""
        return self.trainer.is_done

    def is_due(self, step: Progress) -> bool:
        """Return whether a checkpoint is to be saved: after rounds, and after some time."""
        has_round = step.report is not None
        is_turn = has_round and self.trainer.round % self.config.checkpoint_every == 0
        return is_turn or super().is_due(step)

    def record(self, step: Progress) -> None:
        """Write a round down where one is finished, and keep the policy if it is the best."""
        report = step.report
        if report is None:
            return
        record_round(self.store, self.trainer, report)
        if report.is_best:
            meta = {
                **self._meta(),
                "merit_rolling": report.merit_rolling,
                "score_rolling": report.score_rolling,
            }
            save_policy(self.checkpoints.best, self.trainer.policy, meta=meta)
        self.folder.log(round_line(report))

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Write]]:
        """Return the state, what its manifest says, and the policy as a part of its own."""
        meta = self._meta()

        def write_policy(folder: Path) -> None:
            save_policy(folder, self.trainer.policy, meta=meta)

        return self.trainer.state_dict(), meta, {CHECKPOINT_POLICY: write_policy}

    def record_stop(self) -> str:
        """Write down that the run stops before its end; return where it stopped, in words."""
        self.store.finish("interrupted")
        return f"in round {told_round(self.trainer.round)}, step {self.trainer.step}"

    def finish(self) -> dict[str, Any]:
        """Write what a finished run leaves behind; return its summary."""
        record_end(self.store, self.trainer)
        path = self.folder.path
        report = report_run(path)
        summary = {**summarize_training(path), "report": str(report)}
        atomic_write_text(path / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.folder.log("finished")
        return summary

    def close(self) -> None:
        """Free the rows and close the store."""
        self.trainer.close()
        super().close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.trainer.close()
        super().__exit__(kind, error, trace)

    def _meta(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest says of it."""
        trainer = self.trainer
        return {
            "recipe": self.config.recipe,
            "tasks": list(self.config.tasks),
            "seed": self.config.seed,
            "round": trainer.round,
            "rounds": self.config.rounds,
            "step": trainer.step,
            "env_steps": trainer.tally.env_steps,
        }


def start_training(
    path: str | Path,
    config: TrainConfig,
    *,
    overwrite: bool = False,
    command: str = "",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
    cluster: RayCluster | None = None,
) -> TrainingRun:
    """Create a run folder and open it; nothing is trained yet.

    With a cluster the rows live there, whatever it is when the run is continued.
    """
    check_sinks(sinks)
    trainer = Trainer(config, cluster=cluster)
    # A wrong request must not replace a run that is there.
    world = _find_world(trainer)
    folder = RunFolder(path)
    with folder.claim_new(config.to_mapping(), overwrite=overwrite) as lock:
        folder.log(f"started: {command}" if command else "started")
        row = run_row(trainer, name=folder.path.absolute().name, command=command)
        store = open_store(folder.path, row, sinks=sinks, on_alarm=on_alarm, lock=lock)
        record_start(store, trainer)
        return TrainingRun(folder, trainer, store, command, world)


def resume_training(
    path: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    reset_heads: Sequence[str] = (),
    checkpoint: Which = "latest",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
    cluster: RayCluster | None = None,
) -> TrainingRun:
    """Open a run to go on from its last checkpoint, exactly or with the named changes.

    Args:
        path: the run folder.
        settings: changes by dotted key; see `change_settings`.
        reset_heads: heads that start afresh.
        checkpoint: which checkpoint to go on from.
        sinks: where records are shown beside the store.
        on_alarm: called with every alarm.
        cluster: where the rows live from now on instead of in this process.

    Raises:
        UsageError: It is no training run, or a setting cannot change.
        CheckpointError: The checkpoint is damaged or foreign.
    """
    check_sinks(sinks)
    folder = RunFolder(path)
    with folder.claim_run() as lock:
        config = read_run_config(folder)
        state = Checkpoints(folder.path, TRAINING).load(checkpoint)
        config = change_settings(config, settings or {})
        # What the checkpoint was saved under, not what the folder says: a change may not be saved
        # yet.
        changes = SettingChanges()
        place = Checkpoints(folder.path, TRAINING).folder / checkpoint
        if state is not None:
            with restoring(place):
                changes = compare_settings(TrainConfig.from_mapping(state["config"]), config)
        trainer = Trainer(config, is_continued=state is not None, cluster=cluster)
        world, versions = _find_world(trainer), {}
        command, resume = "", True
        if state is not None:
            with restoring(place):
                # Other tasks have other data.
                named = {*changes.settings, *(settings or {})} & {"data", "tasks", "curriculum"}
                versions = world.differences(folder.path, state["world"], {"data"} if named else ())
                # What was decided by other heads says nothing about fresh ones.
                restarts = changes.restarts_round or bool(reset_heads)
                trainer.load_state_dict(state, restart_round=restarts)
                command, resume = str(state["command"]), state["telemetry"]
        if reset_heads:
            trainer.agent.reset_heads(list(reset_heads))
        row = run_row(trainer, name=folder.path.absolute().name, command=command)
        store = open_store(
            folder.path, row, resume=resume, sinks=sinks, on_alarm=on_alarm, lock=lock
        )
        is_saved = state is not None and checkpoint == "latest"
        run = TrainingRun(folder, trainer, store, command, world, is_saved=is_saved)
        if state is None:
            record_start(store, trainer)
        folder.log(f"continued in round {told_round(trainer.round)}, step {trainer.step}")
        run.tell_versions(versions)
        if changes or reset_heads:
            record_changes(store, trainer, changes, reset_heads)
            folder.log(
                f"changed: {changes.describe()}; fresh heads: {', '.join(reset_heads) or '-'}"
            )
            folder.write_config(config.to_mapping())
            # A change is made once; whoever continues after this has it.
            run.save()
        return run


def _find_world(trainer: Trainer) -> World:
    rows = trainer.row_source
    return World.now({"data": rows.read_data() if isinstance(rows, TaskRows) else None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What `esper.train` leaves behind."""

    folder: Path
    """The run folder."""
    policy: Path
    """The best policy: a controller for `esper.grow`."""
    report: Path
    """The page to read."""
    rounds: int
    """Rounds that were played."""
    last_round: Mapping[str, Any]
    """Figures of the last round, such as `return_mean` and `gain_mean`, as the store has them."""
    summary: Mapping[str, Any]
    """The beginning and the end of the run in comparison, as in `summary.json`."""


def train(
    recipe: str | None = None,
    *,
    out: str | Path,
    rounds: int | None = None,
    device: str | None = None,
    resume: bool | Which = False,
    overwrite: bool = False,
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Trained:
    """Train a controller in a run folder, as `esper train` does.

    Args:
        recipe: a recipe's name, or the `config.yaml` of a run; 'digits' by default.
        out: the run folder.
        rounds: rounds of episodes and updates; the recipe's by default.
        device: 'auto', 'cpu' or 'cuda'; the recipe's by default.
        resume: go on with the run in `out` exactly, or with the settings that are given here, or
            start it where there is none; 'previous' goes on from the checkpoint before the latest.
        overwrite: replace the run in `out`.
        sinks: where curves and alarms are shown beside the store: 'tensorboard', 'wandb' (with
            WANDB_MODE=offline without a server), a registered name, or an object.
        on_progress: called after every step; `progress.report` is the round it may have finished.
        settings: any other setting of `TrainConfig`; a mapping changes some of a nested one, as in
            `ppo={"clip": 0.1}`.

    Raises:
        UsageError: Something about the request is wrong; one line says what would be right.
        KeyboardInterrupt: Ctrl-C. The step in progress was finished and saved.
    """
    if resume and overwrite:
        raise UsageError("resume continues a run and overwrite replaces it; give one of them")
    given = dict(settings)
    if rounds is not None:
        given["rounds"] = rounds
    if device is not None:
        given["device"] = choose_device(device).type
    folder = RunFolder(out)
    if resume and folder.is_run:
        if recipe is not None:
            _refuse_other_recipe(folder, find_recipe(recipe))
        which: Which = "previous" if resume == "previous" else "latest"
        run = resume_training(out, settings=given, checkpoint=which, sinks=sinks)
    else:
        config = resolve_recipe(recipe or DEFAULT_RECIPE, given)
        run = start_training(
            out, config, overwrite=overwrite, command="esper.train(...)", sinks=sinks
        )
    with run:
        carry_out_or_raise(run, on_progress)
        summary = run.finish()
    with open_run(folder.path) as stored:
        rows = stored.rows("rounds")
    return Trained(
        folder=folder.path,
        policy=Path(summary["policy"]),
        report=Path(summary["report"]),
        rounds=summary["rounds"],
        last_round=rows[-1],
        summary=summary,
    )


def resolve_recipe(recipe: str, settings: Mapping[str, Any]) -> TrainConfig:
    """Return a recipe with some settings changed, complete for the machine it is to run on."""
    config = change_settings(find_recipe(recipe), settings)
    if "tasks" in settings and "curriculum" not in settings:
        config = config.replace(curriculum=())
    return config.replace(device=choose_device(config.device).type)


def find_recipe(name: str) -> TrainConfig:
    """Return the recipe with a name, or the one that a file or a run folder holds."""
    path = Path(name)
    if os.path.isdir(path):
        path = path / SETTINGS
    if not os.path.isfile(path):
        return get_recipe(name)
    try:
        return TrainConfig.from_mapping(read_document(path))
    except (OSError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is no recipe: {reason}") from None


def read_run_config(folder: RunFolder) -> TrainConfig:
    """Return the settings of a training run."""
    settings = folder.read_config()
    if "ppo" not in settings:
        again = resume_command(folder.path, GROWING)
        raise UsageError(
            f"{folder.path} is not a training run; continue a growing run with {again}"
        )
    try:
        return TrainConfig.from_mapping(settings)
    except ConfigError as error:
        Checkpoints(folder.path, TRAINING).refuse_other_format()
        raise CheckpointError(f"{folder.path / SETTINGS}: {error}") from None


def summarize_training(folder: Path) -> dict[str, Any]:
    """Return how the first round went, how the last tenth did, and where the policy is."""
    with open_run(folder) as stored:
        info = stored.info
        rounds = stored.rows("rounds")
        updates = stored.rows(
            "updates", columns=("round", "explained_variance", "approx_kl"), where="is_last = 1"
        )
    late = rounds[-max(1, round(_LATE_SHARE * len(rounds))) :]
    late_updates = updates[-len(late) :] if late else []
    return {
        "run": str(folder),
        "recipe": info.recipe,
        "task": info.task,
        "seed": info.seed,
        "device": info.device,
        "rounds": len(rounds),
        "episodes": sum(row["episodes"] or 0 for row in rounds),
        "env_steps": rounds[-1]["env_steps"] if rounds else 0,
        "seconds": sum(row["seconds"] or 0.0 for row in rounds),
        "first": _means(rounds[:1], updates[:1]),
        "last": {"rounds": len(late), **_means(late, late_updates)},
        "evaluation": _last_evaluation(rounds),
        "policy": str(find_policy(folder)),
    }


def round_line(report: RoundReport) -> str:
    """Return a round in one line of the log."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"round {told_round(report.round)} return {report.return_mean:+.3f} "
        f"gain {number(report.gain_mean, '+.2f')} score {report.score_mean:.2f} "
        f"fossilized {number(report.fossilization_rate, '.0%')} "
        f"ev {number(report.explained_variance, '.2f')} kl {number(report.approx_kl, '.4f')} "
        f"wait {number(report.wait_share_free, '.0%')} ({report.seconds:.1f} s)"
    )


def _refuse_other_recipe(folder: RunFolder, asked: TrainConfig) -> None:
    found = read_run_config(folder).recipe
    if asked.recipe != found:
        raise UsageError(
            f"{folder.path} was started from the recipe {found!r}, not {asked.recipe!r}; continue "
            "it with its own, or give another folder by out=..."
        )


def _means(rounds: list[dict[str, Any]], updates: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("return_mean", "gain_mean", "fossilization_rate", "wait_share_free")
    found = {name: _mean([row[name] for row in rounds]) for name in names}
    episodes = sum(row["episodes"] or 0 for row in rounds)
    germinated = sum(row["seeds_germinated"] or 0 for row in rounds)
    found["germinations"] = germinated / episodes if episodes else None
    for name in ("explained_variance", "approx_kl"):
        found[name] = _mean([row[name] for row in updates])
    return found


def _last_evaluation(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last greedy evaluation, None where there was none."""
    for row in reversed(rounds):
        if row["eval_episodes"]:
            return {
                "round": row["round"],
                "episodes": row["eval_episodes"],
                "return": row["eval_return"],
                "gain": row["eval_gain"],
            }
    return None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
