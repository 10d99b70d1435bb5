"""Callbacks for the `Trainer` of Hugging Face: one deepens a model, one grows seeds in it.

    Trainer(model, args, callbacks=[DeepenCallback()], ...).train()

`DeepenCallback`: the model is the one finally wanted; a quarter of its blocks are awake at first,
and the rest wake as copies. Checkpoints of the trainer hold the whole model and how many blocks are
awake, so `train(resume_from_checkpoint=...)` goes on as if it had not stopped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.batches import count_samples
from esper.growth.criterion import Loss
from esper.growth.depth.deepen import Deepen
from esper.growth.gardener import DEFAULT_CONTROLLER, Gardener, GardenerConfig
from esper.growth.own_loss import own_loss_of
from esper.integrations import Rounds
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
        options: of `esper.Deepen`: `start`, `at`, `stacks`, `order`, `controller`, `ema`;
            `total_steps` and `batches_per_step` are those of the trainer. Controllers that judge by
            the loss see what the trainer logs, so `logging_steps` must be below 1 % of the run.
    """

    def __init__(self, **options: Any) -> None:
        """Choose how to deepen; blocks sleep from the first batch on."""
        self._options = options
        self._depth: Deepen | None = None
        self._loss: float | None = None

    @property
    def depth(self) -> Deepen:
        """The `Deepen` at work; there is one from the start of `train` on."""
        if self._depth is None:
            raise UsageError("there is a Deepen once trainer.train() has begun")
        return self._depth

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes into its checkpoints."""
        saved = None if self._depth is None else self._depth.state_dict()
        return {"args": {}, "attributes": {"saved": saved, "loss": self._loss}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Put blocks to sleep; the trainer has loaded model and optimizer by now."""
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
                "this checkpoint was written without DeepenCallback, so all of its blocks are "
                "awake; go on without the callback"
            )
        if state.global_step:
            self._depth.load_state_dict(stored["attributes"]["saved"])
            self._loss = stored["attributes"]["loss"]

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Take down the training loss."""
        self._loss = (given.get("logs") or {}).get("loss", self._loss)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Count the step and wake blocks when it is time; the trainer saves after this."""
        self.depth.step(self._loss)


def _check(args: TrainingArguments, model: Any) -> None:
    """Refuse settings of a trainer under which blocks cannot sleep."""
    if args.restore_callback_states_from_checkpoint:
        raise UsageError(
            "DeepenCallback restores itself; leave restore_callback_states_from_checkpoint=False"
        )
    if args.load_best_model_at_end:
        raise UsageError(
            "load_best_model_at_end=True would load blocks that were asleep into a model in which "
            "they are awake; leave it False and load a checkpoint of your choice"
        )
    if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
        raise UsageError(
            "blocks cannot sleep in nn.DataParallel, which the Trainer uses for several GPUs of a "
            "process; start one process for each GPU with torchrun"
        )
    finds_unused = args.ddp_find_unused_parameters
    if finds_unused is None:
        # What the Trainer does by itself.
        finds_unused = not (
            getattr(model, "is_gradient_checkpointing", False) or args.gradient_checkpointing
        )
    is_ddp = args.parallel_mode == ParallelMode.DISTRIBUTED and not args.fsdp
    if is_ddp and not finds_unused:
        raise UsageError(
            "DistributedDataParallel would wait for sleeping blocks; set "
            "TrainingArguments(ddp_find_unused_parameters=True)"
        )


# ---- A callback for the `Trainer` of Hugging Face that lets a model grow while it is trained


class GrowingModel(nn.Module):
    """A garden as the trainer wants a model: it takes what the host takes, and saves as one.

    The trainer asks a model's class which arguments it takes, so every host has a class of its own:
    `growing_model` makes it. What this module does not have itself is looked up in the host.
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
        """Return weights and lifecycle, with tied weights apart, as safetensors needs them."""
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
    """Return a garden as a model that the trainer takes for one of the host's kind."""
    host = type(garden.model)

    def forward(self: GrowingModel, *args: Any, **kwargs: Any) -> Any:
        return GrowingModel.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(host.forward)  # type: ignore[attr-defined]
    kind: type[GrowingModel] = type(
        f"Growing{host.__name__}", (GrowingModel,), {"forward": forward}
    )
    return kind(garden)


class GrowingCallback(TrainerCallback):  # type: ignore[misc]
    """Grows a garden in a `Trainer`; give that its `model` and its `optimizer`.

    Args:
        garden: around the model to be trained.
        horizon: evaluations of the whole run.
        controller: 'tamiyo', the learned one that comes along, 'heuristic', 'wait',
            'schedule:FILE', or an object.
        loss: how an evaluation sample is judged, as `esper.grow` takes it; by default the model's
            own loss.
        evaluate: measures the garden in place of the trainer's evaluation batches: a function from
            the model to (loss[M], correct[M] or None), samples in a fixed order.
        max_growth: most parameters and operations of the grown network, as a multiple of the
            model's: 2.0 or "2x" lets it double. By default what the controller learned under:
            'tamiyo' grows a network to twice its size at most, rules know no limit.
        max_seeds: most seeds alive or fossilized at once, 0 without a limit.
        max_parameters: most trainable parameters, in place of what `max_growth` allows.
        max_added_flops: most operations per sample that seeds may add, likewise.
        seed: seed of controllers that draw.
        config: further settings.
    """

    def __init__(
        self,
        garden: Garden,
        horizon: int,
        controller: str | Controller = DEFAULT_CONTROLLER,
        *,
        loss: Loss | None = None,
        evaluate: Evaluate | Evaluator | None = None,
        max_growth: float | str | None = None,
        max_seeds: int | None = None,
        max_parameters: int | None = None,
        max_added_flops: int | None = None,
        seed: int = 0,
        config: GardenerConfig | None = None,
    ) -> None:
        """Bring garden and controller together; nothing is measured yet."""
        self.gardener = Gardener(
            garden,
            controller,
            horizon,
            max_growth=max_growth,
            max_seeds=max_seeds,
            max_parameters=max_parameters,
            max_added_flops=max_added_flops,
            seed=seed,
            # The trainer gives every process a part of the evaluation samples.
            config=(config or GardenerConfig()).replace(val_is_sharded=True),
        )
        self.model = growing_model(garden)
        """What to give to the trainer as its model."""
        self._rounds = Rounds(self.gardener, loss, evaluate)
        self._measures_itself = evaluate is not None
        self._is_training = False
        self._step = -1

    @property
    def history(self) -> list[EpochRecord]:
        """What happened, one record for each evaluation."""
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
        """Refuse a trainer in which nothing could grow."""
        if given["model"] is not self.model:
            raise UsageError("the trainer trains another model; give it growing.model")
        carried = self.gardener.carried
        if carried is None or _inner(given["optimizer"]) is not carried.optimizer:
            raise UsageError(
                "the trainer has an optimizer that new seeds cannot join; give it one: "
                "optimizers=(growing.optimizer(torch.optim.AdamW, lr=...), None)"
            )
        expected = _evaluations(args, state)
        if not expected:
            raise UsageError(
                "growth decides whenever the trainer evaluates; set eval_strategy='epoch', or "
                "'steps' with eval_steps=N"
            )
        if expected < self.gardener.horizon:
            warn(
                f"the trainer will evaluate {expected} times, but the horizon of growth is "
                f"{self.gardener.horizon}; seeds may not be ready at the end"
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
        # Of several evaluation sets the first one counts; evaluations by hand do not.
        if not self._is_training or state.global_step == self._step:
            return
        self._step = state.global_step
        self.model.train()
        self._rounds.end(None if self._measures_itself else given["eval_dataloader"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Grow no more."""
        self._is_training = False
        self.model.on_loss = None


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate may have wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _evaluations(args: TrainingArguments, state: TrainerState) -> int:
    """Return how often the trainer will evaluate."""
    # Its names are both text and members of an enumeration.
    if args.eval_strategy == "epoch":
        return int(state.num_train_epochs)
    if args.eval_strategy == "steps":
        return int(state.max_steps / state.eval_steps)
    return 0
