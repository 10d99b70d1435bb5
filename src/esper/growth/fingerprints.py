"""Checksums of the data, model and functions that a program gives to `esper.grow`.

A checkpoint holds them, so that a run continued with other data or another model says what is
different. They are cheap, read nothing that can be read only once, and leave the random state as it
was. Values that differ between two readings, such as randomly augmented inputs, are left out.
"""

from __future__ import annotations

import hashlib
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset, TensorDataset

from esper.growth.batches import Batches
from esper.kasmina.slots.arguments import read_batch
from esper.leyline.errors import EsperError
from esper.utils.randomness import random_states, restore_random_states, seeded

_SAMPLES = 32
"""Most samples of a data set that are read."""
_BATCHES = 256
"""Most batches of a list that are read."""
_MOST_BYTES = 2**26
"""Most bytes of a tensor that are read; of a larger one, evenly spaced ones."""
_MOST_MODULES = 1_000
_MOST_FUNCTIONS = 200
_NOT_COMPARED = ("training", "device", "extra_repr")
"""Attributes of modules that may change when a run is continued."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Fingerprint:
    """Collects data into one checksum."""

    def __init__(self) -> None:
        """Start with an empty checksum."""
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, value: Any) -> None:
        """Add a value: tensors, arrays and plain data, nested at will."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, Mapping):
                self._text(f"mapping {list(map(str, one))}")
                waiting += one.values()
            elif isinstance(one, tuple | list):
                self._text(f"sequence {len(one)}")
                waiting += one
            elif isinstance(one, Tensor):
                self._tensor(one)
            elif isinstance(one, np.ndarray) and one.dtype != object:
                self._text(f"array {one.dtype} {one.shape}")
                self._bytes(np.ascontiguousarray(one).reshape(-1).view(np.uint8))
            elif isinstance(one, _PLAIN):
                self._text(f"{type(one).__name__} {one!r}")
            else:
                self._text(type(one).__qualname__)

    def _tensor(self, tensor: Tensor) -> None:
        self._text(f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            self._bytes(data.numpy())

    def _text(self, text: str) -> None:
        word = text.encode("utf-8", "backslashreplace")
        self._digest.update(len(word).to_bytes(8, "little") + word)

    def _bytes(self, data: Any) -> None:
        self._digest.update(data[:: 1 + len(data) // _MOST_BYTES].tobytes())

    def __str__(self) -> str:
        return self._digest.hexdigest()


def fingerprint(*values: Any) -> str:
    """Return a checksum of values: tensors, arrays and plain data, nested at will."""
    found = Fingerprint()
    for value in values:
        found.add(value)
    return str(found)


# ---- Data


def data_contents(name: str, batches: Batches | None) -> dict[str, str]:
    """Return checksums of the user's batches, by name.

    They cover the batches of a list, and the settings and the data set of a DataLoader. Of other
    objects they cover the length, and the first batch if there is a `set_epoch` to choose it.

    Args:
        name: name of the batches in messages, such as "training".
        batches: the batches; None is no data.
    """
    if batches is None or isinstance(batches, Iterator):
        return {}
    found: dict[str, str] = {}
    length = _length(batches)
    if length is not None:
        found[f"number of {name} batches"] = str(length)
    with _undisturbed():
        if isinstance(batches, DataLoader):
            return {**found, **_loader_contents(name, batches)}
        if isinstance(batches, Sequence):
            return {
                **found,
                **_batch_contents(
                    name, [batches[place] for place in _places(len(batches), _BATCHES)]
                ),
            }
        set_epoch = getattr(batches, "set_epoch", None)
        if callable(set_epoch):
            found |= _stable(name, lambda: _first_batches(batches, set_epoch))
    return found


def _first_batches(batches: Batches, set_epoch: Callable[[int], None]) -> list[Any]:
    set_epoch(1)
    for batch in batches:
        return [batch]
    return []


def _loader_contents(name: str, loader: DataLoader[Any]) -> dict[str, str]:
    return {
        f"size of {name} batches": str(loader.batch_size),
        f"order of {name} samples": type(loader.sampler).__qualname__,
        **_dataset_contents(name, loader.dataset),
    }


def _dataset_contents(name: str, dataset: Any) -> dict[str, str]:
    chosen: Any = None
    while isinstance(dataset, Subset):
        chosen = [chosen, list(dataset.indices)]
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        *inputs, targets = dataset.tensors
        return {
            f"{name} inputs": fingerprint(chosen, inputs),
            f"{name} targets": fingerprint(chosen, targets),
        }
    size = _length(dataset)
    if size is None or not hasattr(dataset, "__getitem__"):
        return {}
    found = {
        f"number of {name} samples": str(size),
        f"choice of {name} samples": fingerprint(chosen),
    }
    return {**found, **_stable(name, lambda: [dataset[place] for place in _places(size, _SAMPLES)])}


def _stable(name: str, read: Callable[[], list[Any]]) -> dict[str, str]:
    """Return the checksums that are equal in two readings with other random numbers."""
    try:
        first, second = (_batch_contents(name, _drawn(read, number)) for number in range(2))
    except Exception:
        # Errors in the data are raised when it is used.
        return {}
    return {key: value for key, value in first.items() if second.get(key) == value}


def _drawn(read: Callable[[], list[Any]], number: int) -> list[Any]:
    random.seed(number)
    np.random.seed(number)
    with seeded(number, "fingerprint"):
        return read()


def _batch_contents(name: str, batches: Sequence[Any]) -> dict[str, str]:
    inputs, targets = Fingerprint(), Fingerprint()
    for batch in batches:
        try:
            x, y = read_batch(batch)
        except EsperError:
            x, y = batch, None
        inputs.add(x)
        targets.add(y)
    return {f"{name} inputs": str(inputs), f"{name} targets": str(targets)}


def _places(size: int, most: int) -> list[int]:
    """Return the indices to read: all up to `most`, else evenly spaced ones."""
    if size <= most:
        return list(range(size))
    return [number * (size - 1) // (most - 1) for number in range(most)]


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch after the block."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


# ---- Models and functions


def model_contents(model: nn.Module) -> dict[str, str]:
    """Return checksums of a model's modules and code, and of the shapes and choice of weights."""
    lines = {name: _described(module) for name, module in model.named_modules()}
    found = {
        f"module {name!r} of the model" if name else "model itself": line
        for name, line in list(lines.items())[:_MOST_MODULES]
    }
    found["modules of the model"] = fingerprint(lines)
    weights = model.state_dict().items()
    shapes = {name: list(value.shape) for name, value in weights if hasattr(value, "shape")}
    found |= {
        f"shape of {name!r} in the model": str(shape)
        for name, shape in list(shapes.items())[:_MOST_MODULES]
    }
    found["shapes of the model's weights"] = fingerprint(shapes)
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    found["number of trainable parameters of the model"] = f"{sum(sizes):,}"
    found["choice of the model's parameters that train"] = fingerprint(trains)
    code = Fingerprint()
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        code.add(_code_of(getattr(kind, "forward", None), kind))
    found[_code_name("model")] = str(code)
    return found


def function_contents(name: str, value: Any) -> dict[str, str]:
    """Return checksums of a loss, an optimizer or a schedule."""
    if isinstance(value, nn.Module):
        return {name: _described(value), _code_name(name): fingerprint(_code_of(value.forward))}
    if isinstance(value, Optimizer):
        plain = {key: _plain(given) for key, given in value.defaults.items()}
        return {name: f"{type(value).__qualname__} {plain}"[:400]}
    if isinstance(value, FunctionType | MethodType):
        return {_code_name(name): fingerprint(_code_of(value))}
    return {}


def _code_name(name: str) -> str:
    # Bytecode depends on the version of Python, and on -O.
    major, minor = sys.version_info[:2]
    optimized = f" -{'O' * sys.flags.optimize}" if sys.flags.optimize else ""
    return f"code of the {name} (read by Python {major}.{minor}{optimized})"


def _described(module: nn.Module) -> str:
    """Return a module's class and plain attributes in one line."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    for name in _NOT_COMPARED:
        own.pop(name, None)
    plain = {name: _plain(value) for name, value in sorted(own.items())}
    known = ", ".join(f"{name}={value}" for name, value in plain.items() if value is not None)
    line = f"{type(module).__qualname__}({known})"
    return line if len(line) <= 400 else f"{line[:360]}… {fingerprint(line)}"


def _plain(value: Any) -> str | None:
    """Return a plain value or the name of a function as text, None for anything else."""
    if isinstance(value, _PLAIN) or (
        isinstance(value, tuple | list) and all(isinstance(one, _PLAIN) for one in value)
    ):
        return repr(value)
    if isinstance(value, nn.Module) or not callable(value):
        return None
    if isinstance(value, FunctionType | MethodType) and _is_own(value.__code__):
        return f"{value.__qualname__} {fingerprint(_code_of(value))}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _is_own(code: CodeType) -> bool:
    """Return whether code is the user's, not that of a library."""
    parts = Path(code.co_filename).parts
    is_library = "site-packages" in parts or "dist-packages" in parts
    return not is_library and not code.co_filename.startswith(_LIBRARIES)


_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))


def _code_of(function: Any, kind: type | None = None) -> list[Any]:
    """Return the code of a user's function, and of those that it calls by name, as plain data."""
    found: dict[CodeType, list[Any]] = {}
    waiting: list[Any] = [function]
    while waiting and len(found) < _MOST_FUNCTIONS:
        one = waiting.pop()
        one = getattr(one, "__wrapped__", one)
        one = getattr(one, "__func__", getattr(one, "fget", one))
        if not isinstance(one, FunctionType) or one.__code__ in found or not _is_own(one.__code__):
            continue
        closed = [_plain(_content(cell)) for cell in one.__closure__ or ()]
        given = [_plain(value) for value in (one.__defaults__ or ())]
        constants: dict[str, str] = {}
        for name in _names(one.__code__):
            value = None if kind is None else _class_attribute(kind, name)
            value = one.__globals__.get(name) if value is None else value
            if isinstance(value, int | float):
                constants[name] = repr(value)
            else:
                waiting.append(value)
        found[one.__code__] = [_code_data(one.__code__), closed, given, constants]
    return list(found.values())


def _class_attribute(kind: type, name: str) -> Any:
    """Return an attribute of a class or its bases, without calling descriptors."""
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)


def _names(code: CodeType) -> list[str]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [*code.co_names, *(name for one in inner for name in _names(one))]


def _code_data(code: CodeType) -> list[Any]:
    """Return the content of a code object, without file and line."""
    constants: list[Any] = []
    for number, one in enumerate(code.co_consts):
        if number == 0 and isinstance(one, str):
            continue  # The docstring.
        if isinstance(one, CodeType):
            constants.append(_code_data(one))
        elif isinstance(one, frozenset):
            constants.append(sorted(map(repr, one)))
        else:
            constants.append(repr(one))
    return [code.co_code, constants, list(code.co_names), list(code.co_varnames)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The cell is empty.
        return None
