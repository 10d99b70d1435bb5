"""The budget of compute of one growing run: what network and twin have read of it and spent.

Epochs are equal shares of the budget (`esper.kasmina.budget`). The twin has a budget of its own, as
large as the network's: it stays small, and takes more steps on more batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper.growth.batches import END, Batches, BatchStream, batch_size, usual_batch_size
from esper.growth.config import GrowthConfig
from esper.growth.gardener import Gardener
from esper.kasmina.budget import count_budget, share_end, training_flops
from esper.kasmina.flops import HOW_TO_COUNT
from esper.leyline.errors import UsageError


class BudgetedBatches:
    """The training batches of one network."""

    def __init__(self, batches: Batches, position: int = 0) -> None:
        """Begin after so many batches."""
        self._batches = batches
        self._stream = BatchStream(batches)
        self._first = self._position = position
        self.samples = 0
        """Samples of the epoch that was read last."""

    def share(self, allowance: int, flops: int) -> Iterator[Any]:
        """Yield the batches of the next epoch, one at least.

        Args:
            allowance: FLOPs that may be spent on them.
            flops: operations of one sample's forward pass.
        """
        self._stream.seek(self._position)
        self._first, self.samples, spent, largest = self._position, 0, 0, 0
        while not spent or spent + largest <= allowance:
            batch = self._stream.next()
            if batch is END:
                return
            self._position = self._stream.position
            samples = batch_size(batch)
            self.samples += samples
            cost = max(1, training_flops(flops, samples))
            spent, largest = spent + cost, max(largest, cost)
            yield batch

    def again(self) -> Iterator[Any]:
        """Yield the batches of the last epoch once more."""
        last, self._position = self._position, self._first
        self._stream.seek(self._first)
        while self._stream.position < last:
            yield self._stream.next()
        self._position = last

    def fork(self) -> BudgetedBatches:
        """Return what goes on from here by itself."""
        return BudgetedBatches(self._batches, self._position)

    def state_dict(self) -> dict[str, int]:
        """Return where it is."""
        return {"first": self._first, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was asked for."""
        self._first, self._position = int(state["first"]), int(state["position"])


class RunBudget:
    """How far network and twin are in budget and training data.

    Args:
        config: settings of the run, which has a budget.
        gardener: of the network; it is told the budget.
        train: training batches.
        val: validation batches.
    """

    def __init__(
        self, config: GrowthConfig, gardener: Gardener, train: Batches, val: Batches
    ) -> None:
        """Nothing is spent yet."""
        assert config.budget is not None, "the run has a budget"
        if not gardener.garden.placed.is_counted:
            raise UsageError(
                "not all operations of the model can be counted, so it can have no budget, "
                f"{HOW_TO_COUNT}"
            )
        samples = config.gardener.samples_per_epoch
        if isinstance(config.budget, str) and not samples:
            raise UsageError(
                f"budget={config.budget!r} is a multiple of what an epoch takes, but nothing says "
                "how many samples train has; give a number of FLOPs, or a list or a DataLoader"
            )
        batch = usual_batch_size(train, config.training.batch_size)
        self._val_samples = sum(batch_size(each) for each in val)
        self.flops = count_budget(
            config.budget,
            host_flops=gardener.sizes()[1],
            samples_per_epoch=samples,
            batch_samples=batch,
            val_samples=self._val_samples,
            epochs=config.epochs,
        )
        """Training FLOPs of the whole run."""
        gardener.limit_compute(self.flops, batch_samples=batch, val_samples=self._val_samples)
        self._gardener, self._epochs = gardener, config.epochs
        self.own = BudgetedBatches(train)
        self._twin: BudgetedBatches | None = None
        self._twin_spent = 0

    def own_share(self) -> Iterator[Any]:
        """Yield the network's batches of the next epoch."""
        return self.own.share(self._gardener.allowance, self._gardener.sizes()[1])

    def twin_share(self, epoch: int, flops: int) -> Iterator[Any]:
        """Yield the batches of an epoch of the twin, which takes so many FLOPs for one sample."""
        assert self._twin is not None, "the twin was forked"
        self._twin_spent += flops * self._val_samples
        end = share_end(self.flops, epoch, self._epochs)
        yield from self._twin.share(end - self._twin_spent, flops)
        self._twin_spent += training_flops(flops, self._twin.samples)

    def fork_twin(self) -> None:
        """Let the twin go on by itself from here; so far the network was its own twin."""
        self._twin, self._twin_spent = self.own.fork(), self._gardener.spent or 0

    def state_dict(self) -> dict[str, Any]:
        """Return how far both are."""
        twin = None if self._twin is None else self._twin.state_dict()
        return {"own": self.own.state_dict(), "twin": twin, "twin_spent": self._twin_spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was asked for."""
        self.own.load_state_dict(state["own"])
        if state["twin"] is not None:
            self._twin = self.own.fork()
            self._twin.load_state_dict(state["twin"])
        self._twin_spent = int(state["twin_spent"])
