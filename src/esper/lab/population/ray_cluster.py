"""`RayCluster`: actors on the nodes of a Ray cluster; lost ones are replaced.

    with RayCluster("auto") as cluster:
        trainer = Trainer(config, cluster=cluster)

An actor is lost when its process, its node or the connection to it fails. It is replaced at the
next request. A replacement has no rows; `generation` tells the owner of the rows that they have to
be played again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Self

from esper.lab.population.engine import Condition
from esper.lab.population.ray_actor import PopulationActor
from esper.leyline.errors import EsperError, UsageError, needing, reason_of

_START_S = 180.0
"""Time limit in seconds for the start of an actor. Nodes of a cloud take longer; a run waits for
them before it begins."""

_LAUNCHES = 3
"""Attempts to start a replacement."""

_PASSED_ON = (
    # These settings affect the last bits of results.
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OMP_NUM_THREADS"),
    *("MKL_NUM_THREADS", "PYTHONPATH", "ESPER_DEBUG", "ESPER_DEBUG_STAGE"),
    "ESPER_DATA",
)
"""Environment variables that actors inherit from the driver."""


class ClusterError(EsperError, RuntimeError):
    """The cluster cannot carry out a request."""


class ActorLostError(EsperError, RuntimeError):
    """An actor was lost with all its rows."""


@dataclass(slots=True)
class ActorWork:
    """Work of an actor since the last report."""

    actor: int
    node: str
    """Address of the node and its process there."""
    device: str
    rows: int = 0
    """Rows of its last request."""
    epochs: int = 0
    """Epochs, summed over its rows."""
    seconds: float = 0.0
    """Wall-clock seconds of work."""
    processor_seconds: float = 0.0
    """CPU seconds of work; much less if other programs use the machine."""
    losses: list[str] = field(default_factory=list)
    """Nodes that the actor was lost on."""


class RayCluster:
    """Actors of a Ray cluster.

    Args:
        address: of a running cluster, such as '10.0.0.1:6379' or 'auto'; None starts one on this
            machine.
        actors: number of actors; by default one for every GPU of the cluster, or every CPU.
    """

    def __init__(self, address: str | None = None, *, actors: int = 0) -> None:
        """Connect; actors are started by `start`."""
        self._ray = import_ray()
        self._wanted = actors
        self._handles: list[Any] = []
        self._generations: list[int] = []
        self._numbers = 0
        self._fingerprints: dict[Hashable, str] = {}
        self._device = ""
        self.work: list[ActorWork] = []
        """Work of every actor since the last call of `take_work`."""
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            where = address or "this machine"
            try:
                # Warnings of rows arrive with answers; Ray's own messages are in its log files.
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise ClusterError(f"no Ray cluster at {where}: {reason}") from None

    def start(self, device: str) -> None:
        """Start the actors, unless they run already.

        Args:
            device: device of each actor: 'cpu', one core, or 'cuda', one GPU.
        """
        if self._handles:
            if device != self._device:
                raise UsageError(f"the actors have {self._device}, not {device}")
            return
        unit = "GPU" if device == "cuda" else "CPU"
        count = self._wanted or int(self._ray.cluster_resources().get(unit, 0))
        if count < 1:
            raise ClusterError(f"the cluster has no {unit}; add nodes, or use another --device")
        self._device = device
        self._generations = [0] * count
        self._handles = [self._launch() for _ in range(count)]
        try:
            self.work = [self._greet(actor) for actor in range(count)]
        except ActorLostError as error:
            self._end_actors()
            raise ClusterError(
                f"{error} while it started; every node needs esper-grow[ray] and the same Python"
            ) from None
        except BaseException:
            self._end_actors()
            raise

    @property
    def actors(self) -> int:
        """Number of actors."""
        return len(self._handles)

    def generation(self, actor: int) -> int:
        """Return the number of replacements of an actor."""
        return self._generations[actor]

    def next_number(self) -> int:
        """Return an unused number for a population."""
        self._numbers += 1
        return self._numbers

    def fingerprint(self, condition: Condition) -> str:
        """Return the checksum of a task's data, computed once."""
        key = condition.task.splits_key
        if key not in self._fingerprints:
            self._fingerprints[key] = condition.data.splits.fingerprint()
        return self._fingerprints[key]

    def ask(self, actor: int, method: str, *arguments: Any) -> Any:
        """Queue a request to an actor; `answer` waits for the result."""
        return getattr(self._handles[actor], method).remote(*arguments)

    def answer(self, actor: int, asked: Any) -> Any:
        """Wait for the result of a request.

        Raises:
            ActorLostError: The actor was lost and has been replaced.
            ClusterError: The cluster itself has failed.
            EsperError: The error that its rows raised.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(asked)
        except errors.RayTaskError as error:
            raise _cause(error) from None
        except self._lost:
            self._replace(actor)
            raise ActorLostError(f"actor {actor} is gone") from None
        except errors.RayError as error:
            raise ClusterError(f"the cluster failed: {_in_one_line(error)}") from None

    def take_work(self) -> list[ActorWork]:
        """Return the work of every actor, and reset the counters."""
        taken = self.work
        self.work = [ActorWork(each.actor, each.node, each.device) for each in taken]
        return taken

    def close(self) -> None:
        """End the actors, and the local cluster if it was started here."""
        self._end_actors()
        if self._is_own and self._ray.is_initialized():
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    @property
    def _lost(self) -> tuple[type[Exception], ...]:
        """Exceptions of Ray for a lost actor."""
        errors = self._ray.exceptions
        return (
            *(errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError),
            *(errors.NodeDiedError, errors.ObjectLostError),
        )

    def _end_actors(self) -> None:
        for handle in self._handles:
            with contextlib.suppress(Exception):  # the actor or the cluster may have ended
                self._ray.kill(handle)
        self._handles = []

    def _launch(self) -> Any:
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        make: Any = self._ray.remote(PopulationActor).options(
            num_cpus=1,
            num_gpus=1 if self._device == "cuda" else 0,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": passed_on},
        )
        return make.remote(self._device)

    def _greet(self, actor: int) -> ActorWork:
        """Wait until an actor runs, and return its node and process."""
        errors = self._ray.exceptions
        try:
            found = self._ray.get(self.ask(actor, "describe"), timeout=_START_S)
        except errors.GetTimeoutError:
            raise ClusterError(
                f"the cluster had no room for actor {actor} within {_START_S:.0f} s; add a node, "
                "or ask for fewer with --actors"
            ) from None
        except self._lost:
            raise ActorLostError(f"actor {actor} was lost") from None
        except errors.RayError as error:
            raise ClusterError(f"actor {actor} does not start: {_in_one_line(error)}") from None
        return ActorWork(actor, f"{found['host']}:{found['pid']}", found["device"])

    def _replace(self, actor: int) -> None:
        """Replace a lost actor."""
        with contextlib.suppress(Exception):  # end a process that cannot be reached
            self._ray.kill(self._handles[actor])
        before = self.work[actor]
        self._generations[actor] += 1
        for left in reversed(range(_LAUNCHES)):
            self._handles[actor] = self._launch()
            try:
                found = self._greet(actor)
                break
            except ActorLostError as error:
                # The cluster may not have noticed that a node is lost, and place the actor there.
                if not left:
                    raise ClusterError(f"{error} {_LAUNCHES} times while it started") from None
        before.losses.append(before.node)
        before.node, before.device = found.node, found.device


def import_ray() -> Any:
    """Return Ray, or raise an error that says how to install it."""
    with needing("a cluster", "ray"):
        import ray

    return ray


def _cause(error: Any) -> BaseException:
    """Return the original exception of an actor's method."""
    cause = error.cause
    return cause if isinstance(cause, BaseException) else ClusterError(_in_one_line(error))


def _in_one_line(error: Exception) -> str:
    """Return the beginning of a message of Ray, which can be several pages long."""
    return reason_of(error)[:200]
