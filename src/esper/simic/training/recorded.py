"""A training run in its folder: recorded, checkpointed and resumed.

A checkpoint is saved after rounds and every minute, in mid-episode too. `checkpoints/best` is the
policy with the best average so far.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from esper.lab.population.ray_population import RayCluster
from esper.lab.tasks.family import FAMILIES, get_family
from esper.lab.tasks.task import TaskConfig, get_task
from esper.leyline.controller import GrowthLimits
from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.reasons import round_number
from esper.nissa.folder import (
    GROWING,
    SETTINGS,
    TRAINING,
    Checkpoints,
    RunFolder,
    Which,
    Write,
    resume_command,
)
from esper.nissa.reader import StoredRun, open_run
from esper.nissa.recorded import RecordedRun, RunInputs
from esper.nissa.report import write_run_report
from esper.nissa.report.training_tables import late_rounds
from esper.nissa.sinks import DEFAULT_SINKS, Sink, check_sinks
from esper.nissa.store import OnAlarm, RunStore, open_store
from esper.simic.training.config import TrainConfig, compare_settings
from esper.simic.training.progress import Progress, round_line
from esper.simic.training.recorder import (
    record_changes,
    record_end,
    record_round,
    record_start,
    run_row,
)
from esper.simic.training.row_source import TaskRows
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.controllers.policy_file import CHECKPOINT_POLICY, Policy, find_policy, save_policy
from esper.utils.manifest import restoring
from esper.utils.settings import SettingChanges, change_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The result of `esper.train`: its run folder, its best policy and its figures."""

    folder: Path
    """The run folder."""
    policy: Path
    """The best policy: a controller for `esper.grow`."""
    report: Path
    """The report, an HTML page."""
    rounds: int
    """Rounds that were played."""
    last_round: Mapping[str, Any]
    """Figures of the last round, such as `return_mean` and `gain_mean`, as the store has them."""
    summary: Mapping[str, Any]
    """The first rounds of the run compared with the last, as in `summary.json`."""


class TrainingRun(RecordedRun[Progress]):
    """A training run that is open for writing; made by `start_training` and `resume_training`.

    Args:
        folder: the run folder.
        trainer: the trainer, in the state to continue from.
        store: the store of the run.
        command: the command that started it.
        inputs: data and versions that the run depends on besides its settings.
        is_saved: whether the newest checkpoint has the trainer's state.
    """

    kind = TRAINING

    def __init__(
        self,
        folder: RunFolder,
        trainer: Trainer,
        store: RunStore,
        command: str,
        inputs: RunInputs,
        *,
        is_saved: bool = False,
    ) -> None:
        """Set up the run; nothing is written yet."""
        save_every_s = trainer.config.checkpoint_seconds
        super().__init__(
            folder, store, command, inputs, save_every_s=save_every_s, is_saved=is_saved
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
        """Store a round if the step finished it."""
        report = step.report
        if report is not None:
            record_round(self.store, self.trainer, report)
            self.folder.log(f"round {round_number(report.round)} {round_line(report)}")

    def best(self, step: Progress) -> Write | None:
        """Return a function that writes the policy of this round if it is the best so far."""
        report = step.report
        if report is None or not report.is_best:
            return None
        meta = {
            **self._meta(),
            "merit_rolling": report.merit_rolling,
            "score_rolling": report.score_rolling,
        }
        # A copy: training may go on before it is written.
        policy = copy.deepcopy(self._policy())
        return lambda folder: save_policy(folder, policy, meta=meta)

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Write]]:
        """Return the state, the manifest's entries, and the policy as a separate part."""
        meta = self._meta()

        def write_policy(folder: Path) -> None:
            save_policy(folder, self._policy(), meta=meta)

        return self.trainer.state_dict(), meta, {CHECKPOINT_POLICY: write_policy}

    def record_stop(self) -> str:
        """Record that the run was interrupted; return where, in words."""
        self.store.finish("interrupted")
        return f"in round {round_number(self.trainer.round)}, step {self.trainer.step}"

    def finish(self) -> Trained:
        """Write the report and the summary of a finished run."""
        record_end(self.store, self.trainer)
        with open_run(self.folder.path) as stored:
            report = write_run_report(stored)
            summary = {**summarize_training(stored), "report": str(report)}
            last_round = stored.rows("rounds")[-1]
        self.folder.finish(summary)
        return Trained(
            folder=self.folder.path,
            policy=Path(summary["policy"]),
            report=report,
            rounds=summary["rounds"],
            last_round=last_round,
            summary=summary,
        )

    def close(self) -> None:
        """Free the rows and close the store."""
        self.trainer.close()
        super().close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.trainer.close()
        super().__exit__(kind, error, trace)

    def _policy(self) -> Policy:
        """Return the policy with the growth limits and the horizon of its training."""
        names = [name for stage in self.config.stages for name in stage.tasks]
        horizon = shortest_run(names, self.config.epochs)
        return replace(self.trainer.policy, limits=common_limits(names), horizon=horizon)

    def _meta(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's manifest."""
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

    With a Ray cluster the rows are there; a continued run may use another one or none.
    """
    check_sinks(sinks)
    trainer = Trainer(config, cluster=cluster)
    # Before the folder is claimed: a wrong request must not replace an existing run.
    inputs = _find_inputs(trainer)
    folder = RunFolder(path)
    with folder.claim_new(config.to_mapping(), overwrite=overwrite) as lock:
        folder.log(f"started: {command}" if command else "started")
        row = run_row(trainer, name=folder.path.absolute().name, command=command)
        store = open_store(folder.path, row, sinks=sinks, on_alarm=on_alarm, lock=lock)
        record_start(store, trainer)
        return TrainingRun(folder, trainer, store, command, inputs)


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
    """Open a run to continue from its last checkpoint, exactly or with changed settings.

    Args:
        path: the run folder.
        settings: changes by dotted key; see `change_settings`.
        reset_heads: heads that are initialised anew.
        checkpoint: the checkpoint to continue from.
        sinks: where records go besides the store.
        on_alarm: called with every alarm.
        cluster: Ray cluster that holds the rows; by default this process does.

    Raises:
        UsageError: It is not a training run, or a setting cannot change.
        CheckpointError: The checkpoint is damaged, or belongs to another kind of run.
    """
    check_sinks(sinks)
    folder = RunFolder(path)
    with folder.claim_run() as lock:
        config = read_run_config(folder)
        state = Checkpoints(folder.path, TRAINING).load(checkpoint)
        config = change_settings(config, settings or {})
        # Compared with the settings of the checkpoint: the folder may have newer ones.
        changes = SettingChanges()
        place = Checkpoints(folder.path, TRAINING).folder / checkpoint
        if state is not None:
            with restoring(place):
                changes = compare_settings(TrainConfig.from_mapping(state["config"]), config)
        trainer = Trainer(config, is_continued=state is not None, cluster=cluster)
        inputs, versions = _find_inputs(trainer), {}
        command, resume = "", True
        if state is not None:
            with restoring(place):
                # Other tasks have other data.
                named = {*changes.settings, *(settings or {})} & {"data", "tasks", "curriculum"}
                versions = inputs.differences(
                    folder.path, state["world"], {"data"} if named else ()
                )
                # A round that other heads have played teaches the new ones nothing.
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
        run = TrainingRun(folder, trainer, store, command, inputs, is_saved=is_saved)
        if state is None:
            record_start(store, trainer)
        folder.log(f"continued in round {round_number(trainer.round)}, step {trainer.step}")
        run.warn_of_other_versions(versions)
        if changes or reset_heads:
            record_changes(store, trainer, changes, reset_heads)
            folder.log(
                f"changed: {changes.describe()}; fresh heads: {', '.join(reset_heads) or '-'}"
            )
            folder.write_config(config.to_mapping())
            # Saved at once, so that the next resume has the change.
            run.save()
        return run


def _find_inputs(trainer: Trainer) -> RunInputs:
    rows = trainer.row_source
    return RunInputs.now({"data": rows.read_data() if isinstance(rows, TaskRows) else None})


def read_run_config(folder: RunFolder) -> TrainConfig:
    """Return the settings of a training run."""
    settings = folder.read_run_config()
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


UPDATE_FIGURES = ("explained_variance", "potential_share", "approx_kl")
"""Columns of an update that are in the summary of a run."""


def summarize_training(stored: StoredRun) -> dict[str, Any]:
    """Return figures of the first round and of the last tenth, and the folder of the policy."""
    info = stored.info
    rounds = stored.rows("rounds")
    updates = stored.rows("updates", columns=("round", *UPDATE_FIGURES), where="is_last = 1")
    late = late_rounds(rounds)
    late_updates = updates[-len(late) :] if late else []
    return {
        "run": str(stored.folder),
        "recipe": info.recipe,
        "task": info.task,
        "seed": info.seed,
        "device": info.device,
        "rounds": len(rounds),
        "episodes": sum(row["episodes"] or 0 for row in rounds),
        "env_steps": rounds[-1]["env_steps"] if rounds else 0,
        "seconds": sum(row["seconds"] or 0.0 for row in rounds),
        "first": {**_means(rounds[:1], updates[:1]), "entropy": _entropies(stored, rounds[:1])},
        "last": {
            "rounds": len(late),
            **_means(late, late_updates),
            "entropy": _entropies(stored, late),
        },
        "evaluation": _last_evaluation(rounds),
        "policy": str(find_policy(stored.folder)),
    }


def _means(rounds: Sequence[dict[str, Any]], updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("return_mean", "gain_mean", "fossilization_rate", "wait_share_free")
    found = {name: _mean([row[name] for row in rounds]) for name in names}
    episodes = sum(row["episodes"] or 0 for row in rounds)
    germinated = sum(row["seeds_germinated"] or 0 for row in rounds)
    found["germinations"] = germinated / episodes if episodes else None
    for name in UPDATE_FIGURES:
        found[name] = _mean([row[name] for row in updates])
    return found


def _entropies(stored: StoredRun, rounds: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return every head's mean conditional entropy after these updates."""
    if not rounds:
        return {}
    found = stored.rows(
        "update_heads",
        columns=("round", "ordinal", "head", "entropy_conditional"),
        where="round BETWEEN ? AND ?",
        parameters=(rounds[0]["round"], rounds[-1]["round"]),
    )
    # An update has a row for every pass; the last one counts.
    newest = {(row["round"], row["head"]): row for row in sorted(found, key=itemgetter("ordinal"))}
    heads = dict.fromkeys(head for _, head in newest)
    return {
        head: _mean([row["entropy_conditional"] for (_, of), row in newest.items() if of == head])
        for head in heads
    }


def _last_evaluation(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last greedy evaluation; None if there was none."""
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


def common_limits(names: Iterable[str]) -> GrowthLimits:
    """Return the limits that hold on all of these tasks and families; none where they differ."""
    configs = [_config(name) for name in names]
    parameters = {config.param_limit for config in configs}
    flops = {config.flop_limit for config in configs}
    return GrowthLimits(
        parameters=parameters.pop() if len(parameters) == 1 else None,
        flops=flops.pop() if len(flops) == 1 else None,
    )


def shortest_run(names: Iterable[str], epochs: int) -> int:
    """Return the fewest epochs of a run on these tasks and families, none of which is longer."""
    families = [get_family(name) for name in names if name in FAMILIES]
    own = [member.horizon for family in families for member in family.members("train")]
    return min([epochs, *own])


def _config(name: str) -> TaskConfig:
    """Return the settings of a task, or of a member that stands for its family."""
    if name in FAMILIES:
        return get_family(name).members("train")[0].task().config
    return get_task(name).config
