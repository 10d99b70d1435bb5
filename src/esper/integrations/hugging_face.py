"""Callbacks for the `Trainer` of Hugging Face: one deepens a model, one grows seeds in it.

    Trainer(model, args, callbacks=[DeepenCallback()], ...).train()

`DeepenCallback` takes the full-size model; a quarter of its blocks are awake at first, and the rest
wake as copies. The trainer's checkpoints hold the whole model and how many blocks are awake, so
`train(resume_from_checkpoint=...)` resumes exactly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.batches import count_samples
from esper.growth.config import DEFAULT_CONTROLLER
from esper.growth.criterion import Loss, own_loss_of
from esper.growth.depth.deepen import Deepen
from esper.integrations import GardenerOptions, Rounds, make_gardener
from esper.kasmina.evaluation import Evaluate, Evaluator
from esper.kasmina.garden import Garden
from esper.leyline.controller import Controller
from esper.leyline.errors import UsageError, needing, warn
from esper.leyline.records import EpochRecord
from esper.utils.storage import separate

with needing("esper.integrations.hugging_face", "transformers"):
    import accelerate  # noqa: F401
    from transformers import TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_callback import ExportableState
    from transformers.training_args import ParallelMode, TrainingArguments


class DeepenCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Deepens the model that a `Trainer` trains.

    Args:
        options: arguments of `esper.Deepen`: `start`, `at`, `stacks`, `order`, `controller`,
            `ema`; `total_steps` and `batches_per_step` come from the trainer. 'plateau' and 'slope'
            see the losses that the trainer logs, so `logging_steps` must be below 1 % of the run.
    """

    def __init__(self, **options: Any) -> None:
        """Choose how to deepen; blocks sleep from the first batch on."""
        self._options = options
        self._depth: Deepen | None = None
        self._loss: float | None = None

    @property
    def depth(self) -> Deepen:
        """The `Deepen` object; available once `train` has begun."""
        if self._depth is None:
            raise UsageError("there is no Deepen before trainer.train(); read it afterwards")
        return self._depth

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes into its checkpoints."""
        saved = None if self._depth is None else self._depth.state_dict()
        return {"args": {}, "attributes": {"saved": saved, "loss": self._loss}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Put blocks to sleep; the trainer has already loaded model and optimizer."""
        _check(args, given["model"])
        options = {
            "total_steps": state.max_steps,
            "batches_per_step": args.gradient_accumulation_steps,
            **self._options,
        }
        self._depth, self._loss = Deepen(given["model"], given["optimizer"], **options), None
        stored = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and stored is None:
            raise UsageError(
                "this checkpoint was written without DeepenCallback, so all its blocks are awake; "
                "resume it without the callback"
            )
        if state.global_step:
            self._depth.load_state_dict(stored["attributes"]["saved"])
            self._loss = stored["attributes"]["loss"]

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Remember the training loss."""
        self._loss = (given.get("logs") or {}).get("loss", self._loss)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Count the step and wake blocks when due; the trainer saves after this."""
        self.depth.step(self._loss)


def _check(args: TrainingArguments, model: Any) -> None:
    """Refuse settings of a trainer under which blocks cannot sleep."""
    if args.restore_callback_states_from_checkpoint:
        raise UsageError(
            "DeepenCallback restores itself; leave restore_callback_states_from_checkpoint=False"
        )
    if args.load_best_model_at_end:
        raise UsageError(
            "load_best_model_at_end=True would load a checkpoint with sleeping blocks into a model "
            "where they are awake; set it to False and load the checkpoint you want yourself"
        )
    if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
        raise UsageError(
            "blocks cannot sleep in nn.DataParallel, which the Trainer uses when one process has "
            "several GPUs; start one process per GPU: torchrun --nproc_per_node=N"
        )
    finds_unused = args.ddp_find_unused_parameters
    if finds_unused is None:
        # The Trainer's own default.
        finds_unused = not (
            getattr(model, "is_gradient_checkpointing", False) or args.gradient_checkpointing
        )
    is_ddp = args.parallel_mode == ParallelMode.DISTRIBUTED and not args.fsdp
    if is_ddp and not finds_unused:
        raise UsageError(
            "DistributedDataParallel would wait for gradients of sleeping blocks; write "
            "TrainingArguments(ddp_find_unused_parameters=True)"
        )


# ---- Seeds in the `Trainer`


class GrowingModel(nn.Module):
    """A garden in the form of its host: same arguments, saved as one model.

    The trainer reads a model's arguments from its class, so `growing_model` makes a class for every
    host. Attributes that this module lacks are looked up in the host.
    """

    def __init__(self, garden: Garden) -> None:
        """Hold the garden; nothing is copied."""
        super().__init__()
        self.garden = garden
        self.on_loss: Callable[[Any], None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the garden."""
        outputs = self.garden(*args, **kwargs)
        if self.training and self.on_loss is not None:
            self.on_loss(own_loss_of(outputs))
        return outputs

    @property
    def config(self) -> Any:
        """The configuration of the host."""
        return getattr(self.garden.model, "config", None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return weights and lifecycle; safetensors needs tied weights as separate tensors."""
        state = super().state_dict(*args, **kwargs)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        state.update(separate(tensors))
        return state

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "garden":
                raise
            return getattr(self.garden.model, name)


def growing_model(garden: Garden) -> GrowingModel:
    """Return a garden as a model that the trainer treats like the host."""
    host = type(garden.model)

    def forward(self: GrowingModel, *args: Any, **kwargs: Any) -> Any:
        return GrowingModel.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(host.forward)  # type: ignore[attr-defined]
    kind: type[GrowingModel] = type(
        f"Growing{host.__name__}", (GrowingModel,), {"forward": forward}
    )
    return kind(garden)


class GrowingCallback(TrainerCallback):  # type: ignore[misc]
    """Grows a garden in a `Trainer`; give the trainer its `model` and its `optimizer`.

    Args:
        garden: around the model to be trained.
        horizon: evaluations of the whole run.
        controller: who decides, as for `esper.Gardener`.
        loss: the loss of an evaluation sample, as `esper.grow` takes it; by default the model's
            own.
        evaluate: measures the garden instead of the trainer's evaluation batches: a function from
            the model to (loss[M], correct[M] or None), samples in a fixed order.
        options: further arguments of `esper.Gardener`: `max_growth`, `max_seeds`,
            `max_parameters`, `max_added_flops`, `ablate_every`, `seed`, `config`.
    """

    def __init__(
        self,
        garden: Garden,
        horizon: int,
        controller: str | Controller = DEFAULT_CONTROLLER,
        *,
        loss: Loss | None = None,
        evaluate: Evaluate | Evaluator | None = None,
        **options: Unpack[GardenerOptions],
    ) -> None:
        """Bring garden and controller together; nothing is measured yet."""
        self.gardener = make_gardener(garden, controller, horizon, **options)
        self.model = growing_model(garden)
        """The model to give to the trainer."""
        self._rounds = Rounds(self.gardener, loss, evaluate)
        self._measures_itself = evaluate is not None
        self._is_training = False
        self._step = -1

    @property
    def history(self) -> list[EpochRecord]:
        """One record for each evaluation."""
        return self.gardener.history

    def optimizer(
        self,
        factory: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> Optimizer:
        """Return `factory(params, **options)` for the trainer, kept in step with growth."""
        made = self.gardener.optimizer(factory, params, **options)
        self._rounds.carry(made)
        return made

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Refuse a trainer in which nothing can grow."""
        if given["model"] is not self.model:
            raise UsageError("the trainer has another model; write Trainer(growing.model, ...)")
        carried = self.gardener.carried
        if carried is None or _inner(given["optimizer"]) is not carried.optimizer:
            raise UsageError(
                "new seeds cannot join the trainer's optimizer; write "
                "Trainer(..., optimizers=(growing.optimizer(torch.optim.AdamW, lr=...), None))"
            )
        expected = _evaluations(args, state)
        if not expected:
            raise UsageError(
                "GrowingCallback decides after each evaluation, and this trainer never evaluates; "
                "set eval_strategy='epoch', or 'steps' with eval_steps=N"
            )
        if expected < self.gardener.horizon:
            warn(
                f"the trainer will evaluate {expected} times, fewer than the horizon of "
                f"{self.gardener.horizon}, so seeds may be unfinished at the end; write "
                f"GrowingCallback(garden, horizon={expected})"
            )
        each = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.gardener.tell(
            train_samples=count_samples(given["train_dataloader"]),
            samples_per_epoch=state.max_steps * each // expected,
        )
        self._is_training = True
        self.model.on_loss = self._rounds.add_loss

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Measure, decide and act; the trainer saves its checkpoint after this."""
        # Only the first of several evaluation sets counts, and none that is called by hand.
        if not self._is_training or state.global_step == self._step:
            return
        self._step = state.global_step
        self.model.train()
        self._rounds.end(None if self._measures_itself else given["eval_dataloader"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Stop growing."""
        self._is_training = False
        self.model.on_loss = None


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate may have wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _evaluations(args: TrainingArguments, state: TrainerState) -> int:
    """Return how often the trainer will evaluate."""
    if args.eval_strategy == "epoch":
        return int(state.num_train_epochs)
    if args.eval_strategy == "steps":
        return int(state.max_steps / state.eval_steps)
    return 0
