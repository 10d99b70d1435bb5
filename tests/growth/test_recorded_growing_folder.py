"""`esper.grow` in a run folder: what it leaves, and going on after a stop."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.grow import grow
from esper.growth.grown import Grown
from esper.growth.recorded import RecordedGrowth
from esper.kasmina.garden import load_garden
from esper.leyline.errors import CheckpointError, EsperWarning, UsageError
from esper.leyline.records import EpochRecord
from esper.nissa.folder import GROWING, Checkpoints, read_manifest
from esper.nissa.reader import open_run
from tests.plots import SLOTS, growth_config, make_batches, make_net, plain_history, same
from tests.scripts.cli.terminal import esper as esper_command

# Most runs here are too short to grow, or grow by chance; that is not what they are about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*too few to grow in"),
    pytest.mark.filterwarnings("ignore:Nothing grew"),
    pytest.mark.filterwarnings("ignore:there is no run in .* to resume"),
    pytest.mark.filterwarnings("ignore:Nothing that grew was kept"),
    pytest.mark.filterwarnings("ignore:The run stopped after epoch"),
    pytest.mark.filterwarnings("ignore:.*still being blended in"),
]

TRAIN, VAL = make_batches(4), make_batches(2, 32, seed=9)


class Shuffled:
    """Batches in an order that depends on nothing but the epoch."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(len(TRAIN), generator=torch.Generator().manual_seed(self._epoch))
        return iter([TRAIN[number] for number in order])


def grow_tiny(out: Path | None, **changes: Any) -> Grown:
    options: dict[str, Any] = {
        "train": Shuffled(),
        "val": VAL,
        "test": VAL,
        "epochs": 10,
        "seed": 2,
        "twin": True,
        "controller": "random",
        "config": growth_config(1),
        "scheduler": partial(StepLR, step_size=3),
        **changes,
    }
    model = options.pop("model", None) or make_net(dropout=0.2)
    return grow(model, options.pop("slots", SLOTS), out=out, **options)


def interrupt_after(epoch: int, number: int = signal.SIGINT) -> Any:
    def interrupt(record: EpochRecord) -> None:
        if record.epoch == epoch:
            signal.raise_signal(number)

    return interrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Grown:
    return grow_tiny(tmp_path_factory.mktemp("runs") / "whole")


def test_the_folder_holds_everything_about_the_run(whole: Grown) -> None:
    folder = whole.folder
    assert folder is not None
    assert {entry.name for entry in folder.iterdir()} >= {
        *("config.yaml", "run.db", "tb", "checkpoints", "report.html", "log.txt"),
        *("summary.json", "grown"),
    }
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["started_by"] == "esper.grow"
    assert (settings["model"], settings["slots"]) == ("TinyNet", list(SLOTS))
    assert settings["scheduler"] == "StepLR(step_size=3)"
    assert settings["growth"]["epochs"] == 10
    with open_run(folder) as stored:
        assert (stored.info.kind, stored.info.status) == ("grow", "finished")
        assert len(stored.rows("epochs")) == 10
    assert json.loads((folder / "summary.json").read_text())["run"] == str(folder)
    told = read_manifest(folder)
    assert (told.kind, told.epoch, told.meta["epochs"]) == ("growing run", 10, 10)
    loaded = load_garden(folder / "grown", model=make_net(seed=5))
    assert same(loaded.state_dict(), whole.model.state_dict())


def test_the_run_is_the_one_without_a_folder(whole: Grown) -> None:
    plain = grow_tiny(None)
    assert plain.folder is None
    assert plain_history(plain.history) == plain_history(whole.history)
    assert same(plain.model.state_dict(), whole.model.state_dict())


def test_the_best_network_is_kept(whole: Grown) -> None:
    assert whole.folder is not None
    scores = [record.val_score for record in whole.history]
    told = read_manifest(whole.folder / "checkpoints" / "best")
    assert told.kind == "garden"
    assert told.epoch == 1 + scores.index(max(scores))
    best = load_garden(whole.folder / "checkpoints" / "best", model=make_net(seed=5)).eval()
    x, y = (torch.cat(parts) for parts in zip(*VAL, strict=True))
    right = (best(x).argmax(1) == y).double().mean()
    assert 100 * float(right) == pytest.approx(max(scores))


def stop_after(epoch: int) -> Any:
    def stop(record: EpochRecord) -> None:
        if record.epoch == epoch:
            raise StopIteration("seen enough")

    return stop


def test_a_run_ends_well_when_on_epoch_says_so(tmp_path: Path) -> None:
    plain = grow_tiny(None, on_epoch=stop_after(4))
    out = tmp_path / "run"
    grown = grow_tiny(out, on_epoch=stop_after(4))
    for one in (plain, grown):
        assert len(one.history) == one.summary.epochs == 4
        assert one.summary.stopped == "on_epoch raised StopIteration (seen enough)"
    assert same(plain.model.state_dict(), grown.model.state_dict())
    with open_run(out) as stored:
        assert (stored.info.status, stored.info.stopped) == ("finished", grown.summary.stopped)
        assert stored.info.kept_epoch == grown.summary.kept_epoch
    # It is over, until it is given another length; then it goes on as if it had not stopped.
    assert len(grow_tiny(out, resume=True).history) == 4
    longer = grow_tiny(out, resume=True, epochs=12)
    assert len(longer.history) == 12
    assert longer.summary.stopped == ""


def test_a_run_is_extended_as_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    grow_tiny(out, epochs=3)
    grown = grow_tiny(out, epochs=5, keep="best", patience=50, resume=True)
    assert len(grown.history) == 5
    settings = yaml.safe_load((out / "config.yaml").read_text())["growth"]
    assert (settings["epochs"], settings["keep"], settings["patience"]) == (5, "best", 50)
    with open_run(out) as stored:
        (event,) = stored.rows("events", where="kind = 'settings_changed'")
    assert "growth.epochs 3 -> 5" in str(event["message"])
    assert len(grow_tiny(out, epochs=5, keep="best", patience=50, resume=True).history) == 5


@pytest.mark.parametrize(("keep", "stop"), [("best", 3), ("best", 7), ("last", 7)])
def test_what_is_kept_survives_a_resume_bit_for_bit(keep: Any, stop: int, tmp_path: Path) -> None:
    # A network that gets worse: the best is saved long before the run is continued.
    options: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "scheduler": worse, "keep": keep}
    expected = grow_tiny(None, **options)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        grow_tiny(out, on_epoch=interrupt_after(stop), **options)
    found = grow_tiny(out, resume=True, **options)
    assert replace(found.summary, seconds=0.0) == replace(expected.summary, seconds=0.0)
    assert same(found.model.state_dict(), expected.model.state_dict())
    assert (found.twin is None) == (expected.twin is None)
    if found.twin is not None and expected.twin is not None:
        assert same(found.twin.state_dict(), expected.twin.state_dict())
    with open_run(out) as stored:
        assert stored.info.kept_epoch == expected.summary.kept_epoch
    page = (out / "report.html").read_text()
    kept, last = expected.summary.kept_epoch, len(expected.history)
    told = "the last epoch" if kept == last else f"epoch {kept}, the best validated of {last},"
    assert f"The network of {told} is the result." in page


@pytest.mark.parametrize("has_own", [True, False])
def test_shuffled_batches_go_on_in_the_order_they_would_have_had(
    has_own: bool, tmp_path: Path
) -> None:
    def shuffled() -> DataLoader[Any]:
        torch.manual_seed(4)
        own = torch.Generator().manual_seed(5) if has_own else None
        inputs, targets = (torch.cat(each) for each in zip(*TRAIN, strict=True))
        return DataLoader(TensorDataset(inputs, targets), 16, shuffle=True, generator=own)

    options: dict[str, Any] = {"epochs": 5, "controller": "wait", "twin": False, "keep": "last"}
    expected = grow_tiny(tmp_path / "whole", train=shuffled(), **options)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        grow_tiny(out, train=shuffled(), on_epoch=interrupt_after(2), **options)
    found = grow_tiny(out, train=shuffled(), resume=True, **options)
    assert plain_history(found.history) == plain_history(expected.history)
    assert same(found.model.state_dict(), expected.model.state_dict())


def worse(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 2 else 10.0)


class StopsIn:
    """A loss in which signals arrive at a training step."""

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.times = step, times

    def __call__(self, outputs: Any, targets: Any) -> Any:
        if torch.is_grad_enabled():
            self.step -= 1
            if not self.step:
                for _ in range(self.times):
                    signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(outputs, targets)


def test_an_interrupt_is_answered_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = len(TRAIN)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt, match="is saved up to epoch 2; continue it with"):
        grow_tiny(
            tmp_path / "run",
            twin=False,
            loss=StopsIn(steps + 1),
            on_epoch=lambda record: said.append(capsys.readouterr().err),
        )
    assert said == ["", "finishing epoch 2, then saving; press Ctrl-C again to stop now\n"]


def test_a_run_that_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    with pytest.warns(EsperWarning, match=r"no run in .*run to resume, so a new one starts there"):
        grow_tiny(tmp_path / "run", epochs=2, resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        warnings.filterwarnings("ignore", "Nothing grew|.*too few")
        grow_tiny(tmp_path / "run", epochs=3, resume=True)


def test_a_second_interrupt_ends_with_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.nissa.recorded.SAME_REQUEST_S", -1.0)
    steps = len(TRAIN)
    out, loss = tmp_path / "run", StopsIn(steps + 1, times=2)
    with pytest.raises(KeyboardInterrupt, match="is saved up to epoch 1; continue it with"):
        grow_tiny(out, loss=loss, twin=False)
    assert read_manifest(out).epoch == 1
    found = grow_tiny(out, loss=loss, twin=False, resume=True)
    assert [record.epoch for record in found.history] == list(range(1, len(found.history) + 1))


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_run_that_was_interrupted_ends_as_if_it_never_was(
    whole: Grown, tmp_path: Path, stop: int
) -> None:
    out = tmp_path / "run"
    with pytest.raises(
        KeyboardInterrupt, match=r"is saved up to epoch \d+; continue it with resume=True"
    ):
        # There is no run yet: it is started.
        grow_tiny(out, resume=True, on_epoch=interrupt_after(stop))
    assert read_manifest(out).epoch == stop
    with open_run(out) as stored:
        assert stored.info.status == "interrupted"
        assert stored.info.seconds
    seen: list[int] = []
    # The weights it is made with do not matter: those of the checkpoint do.
    model = make_net(seed=77, dropout=0.2)
    again = grow_tiny(
        out, model=model, resume=True, on_epoch=lambda record: seen.append(record.epoch)
    )
    assert seen == list(range(stop + 1, 11))
    assert plain_history(again.history) == plain_history(whole.history)
    assert same(again.model.state_dict(), whole.model.state_dict())
    assert again.twin is not None
    assert whole.twin is not None
    assert same(again.twin.state_dict(), whole.twin.state_dict())
    assert again.summary.test_score == whole.summary.test_score
    assert whole.folder is not None
    one, other = (Checkpoints(run, GROWING) for run in (out, whole.folder))
    states = [one.load(), other.load()]
    for state in states:
        assert state is not None
        for name in ("seconds", "telemetry"):
            state.pop(name)
        state["gardener"].pop("history")
    assert same(states[0], states[1])
    assert read_manifest(one.best).checksums == read_manifest(other.best).checksums
    # A run that is over may be asked for again.
    over = grow_tiny(out, resume=True)
    assert plain_history(over.history) == plain_history(whole.history)


def test_a_run_that_failed_goes_on_from_its_last_checkpoint(
    whole: Grown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(record: EpochRecord) -> None:
        if record.epoch == 5:
            raise RuntimeError("the power went out")

    monkeypatch.setattr(RecordedGrowth, "is_due", lambda self, step: step.epoch == 3)
    with pytest.raises(RuntimeError, match="power"):
        grow_tiny(tmp_path / "run", on_epoch=fail)
    assert read_manifest(tmp_path / "run").epoch == 3
    again = grow_tiny(tmp_path / "run", resume=True)
    assert plain_history(again.history) == plain_history(whole.history)
    with open_run(tmp_path / "run") as stored:
        assert [row["step"] for row in stored.rows("epochs")] == list(range(1, 11))


def test_the_previous_checkpoint_is_older_and_can_be_gone_on_from(
    whole: Grown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedGrowth, "is_due", lambda self, step: True)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        grow_tiny(out, on_epoch=interrupt_after(6))
    places = [out / "checkpoints" / name for name in ("previous", "latest")]
    assert [read_manifest(place).epoch for place in places] == [5, 6]
    (places[1] / "state" / "tree.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the checkpoint before it .* is whole"):
        grow_tiny(out, resume=True)
    again = grow_tiny(out, resume="previous")
    assert [read_manifest(place).epoch for place in places] == [9, 10]
    assert plain_history(again.history) == plain_history(whole.history)


def test_a_signal_while_the_result_is_written_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Grown, "save", lambda self, folder: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            grow_tiny(tmp_path / "run", epochs=2)
    assert len(grow_tiny(tmp_path / "run", epochs=2, resume=True).history) == 2


def test_a_thread_grows_too(tmp_path: Path) -> None:
    found: list[Grown] = []
    thread = threading.Thread(target=lambda: found.append(grow_tiny(tmp_path / "run", epochs=2)))
    thread.start()
    thread.join()
    assert len(found[0].history) == 2


# ---------------------------------------------------------------------------------------- refusals


def wider() -> nn.Module:
    net = make_net(dropout=0.2)
    net.head = nn.Linear(6, 4)
    return net


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decide_every": 2}, r"decide_every is 0 in .* and cannot become 2"),
        ({"epochs": 9}, r"already trained 10 epochs, more than epochs=9"),
        ({"seed": 3}, r"growth\.seed is 2"),
        ({"twin": False}, r"growth\.twin is True"),
        ({"slots": SLOTS[:2]}, r"slots is \['stem', 'body', 'neck'\]"),
        ({"optimizer": partial(AdamW, lr=0.1)}, r"optimizer is None .*'AdamW\(lr=0\.1\)'"),
        ({"optimizer": SGD}, "optimizer is None .*'SGD'"),
        ({"scheduler": None}, r"scheduler is 'StepLR\(step_size=3\)'"),
        ({"loss": "regression"}, "loss is None"),
        (
            {"model": wider()},
            r"the module 'head' of the model of .* changed .*out_features=3.*out_features=4",
        ),
        ({"model": nn.Sequential(nn.Linear(4, 3)), "slots": ["0"]}, "model is 'TinyNet'"),
    ],
)
def test_another_run_is_not_a_continuation(
    whole: Grown, changes: dict[str, Any], words: str
) -> None:
    assert whole.folder is not None
    before = (whole.folder / "config.yaml").read_text(), read_manifest(whole.folder)
    with pytest.raises(UsageError, match=words) as caught:
        grow_tiny(whole.folder, resume=True, **changes)
    assert "\n" not in str(caught.value)
    assert ((whole.folder / "config.yaml").read_text(), read_manifest(whole.folder)) == before


def test_what_the_command_may_change_a_program_may_change(tmp_path: Path) -> None:
    grow_tiny(tmp_path / "run", epochs=2)
    found = grow_tiny(tmp_path / "run", epochs=4, controller="wait", max_seeds=3, resume=True)
    assert [record.decision.op for record in found.history[2:3] if record.decision] == ["WAIT"]
    with open_run(tmp_path / "run") as stored:
        (event,) = stored.rows("events", where="kind = ?", parameters=["settings_changed"])
    assert event["data"]["settings"] == {
        "controller": ["random", "wait"],
        "growth.epochs": [2, 4],
        "growth.garden.lifecycle.rules.max_seeds": [0, 3],
    }


def relu_net() -> nn.Module:
    net = make_net(dropout=0.2)
    net.neck = nn.ReLU()
    return net


class Flipped(Shuffled):
    """The same inputs with other labels."""

    def __iter__(self) -> Any:
        return ((x, 2 - y) for x, y in super().__iter__())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": relu_net()}, r"module 'neck' of the model of .*\(was Tanh\(\), is ReLU\("),
        ({"train": Flipped()}, "the training targets of"),
        ({"val": [(x, 2 - y) for x, y in VAL]}, "the validation targets of"),
        ({"test": VAL[:1]}, r"the number of test batches of .*\(was 2, is 1\)"),
        ({"model": make_net(dropout=0.3)}, "module 'dropout' of the model"),
    ],
)
def test_another_world_is_not_a_continuation(
    whole: Grown, changes: dict[str, Any], words: str
) -> None:
    assert whole.folder is not None
    with pytest.raises(UsageError, match=words) as caught:
        grow_tiny(whole.folder, resume=True, **changes)
    assert "\n" not in str(caught.value)


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    # Leaving the folder within the run is the caller's own affair.
    found = grow_tiny(
        Path("run"), epochs=2, on_epoch=lambda record: os.chdir(tmp_path / "elsewhere")
    )
    assert found.folder == tmp_path / "run"
    assert (tmp_path / "run" / "report.html").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_in_use_is_refused_or_replaced(tmp_path: Path, whole: Grown) -> None:
    with pytest.raises(
        UsageError,
        match="continue it with resume=True, replace it with overwrite=True, or",
    ):
        grow_tiny(whole.folder)
    with pytest.raises(UsageError, match="give one of them"):
        grow_tiny(whole.folder, resume=True, overwrite=True)
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match=r"out="):
            grow_tiny(None, **options)
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match=r"no run folder|not a run folder"):
            grow_tiny(tmp_path, **options)
    grow_tiny(tmp_path / "run", epochs=2)
    assert len(grow_tiny(tmp_path / "run", epochs=3, overwrite=True).history) == 3


def test_a_mistake_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'stem'"):
        grow_tiny(tmp_path / "run", slots=["stim"])
    assert not (tmp_path / "run").exists()


def test_the_command_and_the_call_continue_their_own(
    tmp_path: Path, whole: Grown, capsys: pytest.CaptureFixture[str]
) -> None:
    said = esper_command(capsys, "grow", "--resume", "--out", whole.folder)
    assert "was started by a Python program" in said.complaint()
    assert "esper.grow(model, ..., out=" in said.complaint()
    fast = ("grow", "--task", "digits_mlp", "--no-twin", "--epochs", 1, "--controller", "wait")
    assert esper_command(capsys, *fast, "--out", tmp_path / "run").code == 0
    with pytest.raises(UsageError, match=r"was not started by esper.grow; continue it by esper"):
        grow_tiny(tmp_path / "run", resume=True)


def test_the_public_name() -> None:
    assert esper.grow is grow
