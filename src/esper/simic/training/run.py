"""TrainingRun: a training run in its folder, with its store and its checkpoints.

    run = start_run("runs/first", get_recipe("digits"))
    with run:
        run.carry_out(show=print)

    run = resume_run("runs/first", settings=["ppo.clip=0.1"], reset_heads=["blueprint"])

A checkpoint is saved after rounds and every minute, in mid-episode too. It holds the watermark of
the store, so that a run which was killed at any moment goes on from its last checkpoint and leaves,
on the CPU, exactly what an uninterrupted run leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from esper.leyline.errors import CheckpointError, ConfigError, UsageError
from esper.leyline.storage import atomic_write_text
from esper.nissa.folder import RunFolder, dump_settings
from esper.nissa.sinks import Sink
from esper.nissa.store import DEFAULT_SINKS, OnAlarm, RunStore, open_store
from esper.simic.training.changes import SettingChanges, apply_settings, compare_settings
from esper.simic.training.checkpoint import Checkpoints, Which
from esper.simic.training.config import TrainConfig
from esper.simic.training.progress import Progress, RoundReport
from esper.simic.training.record_training import (
    record_changes,
    record_end,
    record_round,
    record_start,
    run_row,
)
from esper.simic.training.row_source import TaskRows
from esper.simic.training.trainer import Trainer

Show = Callable[[Progress], None]


class TrainingRun:
    """A run that is open for writing; made by `start_run` and `resume_run`.

    Args:
        folder: where it lies.
        trainer: what is trained, in the state to go on from.
        store: where it is written down.
        command: the command that started it.
    """

    def __init__(
        self, folder: RunFolder, trainer: Trainer, store: RunStore, command: str = ""
    ) -> None:
        """Bring the parts together; nothing is written yet."""
        self.folder, self.trainer, self.store = folder, trainer, store
        self.command = command
        self.checkpoints = Checkpoints(folder.path)
        self.telemetry_seconds = 0.0
        """Time spent on records and checkpoints since the run was opened."""
        self._report: RoundReport | None = None
        self._saved_at = time.monotonic()

    @property
    def config(self) -> TrainConfig:
        """The settings."""
        return self.trainer.config

    @property
    def last_report(self) -> RoundReport | None:
        """The newest round that was finished here."""
        return self._report

    def carry_out(
        self,
        show: Show | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to the end, or until asked to stop; return whether the end was reached.

        Args:
            show: called after every step.
            is_stopped: asked after every step; the state is then saved and training ends.
        """
        for progress in self.trainer.train():
            started = time.perf_counter()
            if progress.report is not None:
                self._finish_round(progress.report)
            elif time.monotonic() - self._saved_at >= self.config.checkpoint_seconds:
                self.save()
            self.telemetry_seconds += time.perf_counter() - started
            if show is not None:
                show(progress)
            if is_stopped():
                break
        if self.trainer.is_done:
            self.save()
            record_end(self.store, self.trainer)
            self.folder.log("finished")
            return True
        self.save()
        self.store.finish("interrupted")
        self.folder.log(f"interrupted in round {self.trainer.round}, step {self.trainer.step}")
        return False

    def save(self) -> None:
        """Save a checkpoint of the state as it is now."""
        # The mark is in the store before the checkpoint that speaks of it exists.
        mark = self.store.watermark()
        state = {**self.trainer.state_dict(), "telemetry": mark, "command": self.command}
        self.checkpoints.save(state, self.trainer.policy, self._meta())
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Free the rows and close the store."""
        self.trainer.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.trainer.close()
        self.store.__exit__(kind, error, trace)

    def _finish_round(self, report: RoundReport) -> None:
        self._report = report
        record_round(self.store, self.trainer, report)
        if report.is_best:
            self.checkpoints.save_best(self.trainer.policy, self._meta(report))
        self.folder.log(round_line(report))
        due = self.trainer.round % self.config.checkpoint_every == 0
        late = time.monotonic() - self._saved_at >= self.config.checkpoint_seconds
        if due or late:
            self.save()

    def _meta(self, report: RoundReport | None = None) -> dict[str, Any]:
        """Return what a checkpoint's manifest says of it."""
        trainer = self.trainer
        meta: dict[str, Any] = {
            "recipe": self.config.recipe,
            "tasks": list(self.config.tasks),
            "seed": self.config.seed,
            "rounds_done": trainer.round,
            "step": trainer.step,
            "env_steps": trainer.tally.env_steps,
        }
        if report is not None:
            meta["merit_rolling"] = report.merit_rolling
            meta["score_rolling"] = report.score_rolling
        return meta


def start_run(
    path: str | Path,
    config: TrainConfig,
    *,
    overwrite: bool = False,
    command: str = "",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
) -> TrainingRun:
    """Create a run folder and open it; nothing is trained yet."""
    trainer = Trainer(config)
    if isinstance(trainer.row_source, TaskRows):
        # A wrong request must not replace a run that is there.
        trainer.row_source.read_data()
    folder = RunFolder(path)
    folder.create(config.to_mapping(), overwrite=overwrite)
    folder.log(f"started: {command}" if command else "started")
    row = run_row(trainer, name=folder.path.absolute().name, command=command)
    store = open_store(folder.path, row, sinks=sinks, on_alarm=on_alarm)
    record_start(store, trainer)
    return TrainingRun(folder, trainer, store, command)


def resume_run(
    path: str | Path,
    *,
    settings: Sequence[str] = (),
    reset_heads: Sequence[str] = (),
    checkpoint: Which = "latest",
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_alarm: OnAlarm | None = None,
) -> TrainingRun:
    """Open a run to go on from its last checkpoint, exactly or with the named changes.

    Args:
        path: the run folder.
        settings: changes, each 'KEY=VALUE'; see `apply_settings`.
        reset_heads: heads that start afresh.
        checkpoint: which checkpoint to go on from.
        sinks: where records are shown beside the store.
        on_alarm: called with every alarm.

    Raises:
        UsageError: It is no training run, or a setting cannot change.
        CheckpointError: The checkpoint is damaged or foreign.
    """
    folder = RunFolder(path)
    config = read_run_config(folder)
    state = Checkpoints(folder.path).load(checkpoint)
    config = apply_settings(config, settings)
    # What the checkpoint was saved under, not what the folder says: a change may not be saved yet.
    changes = SettingChanges({}, False)
    if state is not None:
        changes = compare_settings(TrainConfig.from_mapping(state["config"]), config)
    trainer = Trainer(config)
    command, resume = "", True if state is None else state["telemetry"]
    if state is not None:
        # What was decided by other heads says nothing about fresh ones.
        restarts = changes.restarts_round or bool(reset_heads)
        trainer.load_state_dict(state, restart_round=restarts)
        command = str(state["command"])
    if reset_heads:
        trainer.agent.reset_heads(list(reset_heads))
    row = run_row(trainer, name=folder.path.absolute().name, command=command)
    store = open_store(folder.path, row, resume=resume, sinks=sinks, on_alarm=on_alarm)
    run = TrainingRun(folder, trainer, store, command)
    if state is None:
        record_start(store, trainer)
    folder.log(f"continued in round {trainer.round}, step {trainer.step}")
    if changes or reset_heads:
        record_changes(store, trainer, changes, reset_heads)
        folder.log(f"changed: {changes.describe()}; fresh heads: {', '.join(reset_heads) or '-'}")
        atomic_write_text(folder.path / "config.yaml", dump_settings(config.to_mapping()))
        # A change is made once; whoever continues after this has it.
        run.save()
    return run


def read_run_config(folder: RunFolder) -> TrainConfig:
    """Return the settings of a training run."""
    settings = folder.read_config()
    if "ppo" not in settings:
        raise UsageError(
            f"{folder.path} is not a training run; continue a growing run with esper grow --resume"
        )
    try:
        return TrainConfig.from_mapping(settings)
    except ConfigError as error:
        raise CheckpointError(f"{folder.path / 'config.yaml'}: {error}") from None


def round_line(report: RoundReport) -> str:
    """Return a round in one line of the log."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"round {report.round} return {report.return_mean:+.3f} "
        f"gain {number(report.gain_mean, '+.2f')} score {report.score_mean:.2f} "
        f"fossilized {number(report.fossilization_rate, '.0%')} "
        f"ev {number(report.explained_variance, '.2f')} kl {number(report.approx_kl, '.4f')} "
        f"wait {number(report.wait_share_free, '.0%')} ({report.seconds:.1f} s)"
    )
