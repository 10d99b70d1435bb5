"""What a run stands on beside its settings: data, model, its controller's file, and the software.

A checkpoint says what these were. Continued on other data or with another schedule, a run would
silently become another one: that is refused, unless the setting that names them was given anew.
Other software is allowed and told, because numbers may then differ in their last digits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.process import software_versions
from esper.leyline.records import Plain

SETTABLE = ("data", "controller")
"""Contents that a setting names, so that another one can be given."""

_CHECKSUM = re.compile("[0-9a-f]{32}")

COMPARED_VERSIONS = ("esper", "python", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class World(Plain):
    """What was found when a run was started or continued."""

    contents: Mapping[str, str]
    """By name, such as 'data' or 'training targets': a checksum, or what it is in a few words."""
    versions: Mapping[str, str]
    """Of the software."""

    @classmethod
    def now(cls, contents: Mapping[str, str | None]) -> World:
        """Return the world with these contents, where there are any, and the software that runs."""
        found = software_versions()
        return cls(
            {name: value for name, value in contents.items() if value is not None},
            {name: found[name] for name in COMPARED_VERSIONS},
        )

    def differences(
        self, run: Path, saved: Mapping[str, Any], changed: Collection[str]
    ) -> dict[str, tuple[str, str]]:
        """Return which software is another than it was, by name: its version then and now.

        Args:
            run: the folder of the run.
            saved: what a checkpoint says, as `to_mapping` returned it.
            changed: settings that were changed on purpose, so that their content may differ.

        Raises:
            UsageError: Some content is another, and nobody said that it should be.
        """
        try:
            contents, versions = dict(saved["contents"]), dict(saved["versions"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of {run} does not say what it was made with ({error}); "
                "use another copy of it"
            ) from None
        for name, checksum in self.contents.items():
            before = str(contents.get(name, checksum))
            if before != checksum and name not in changed:
                shown = "" if _CHECKSUM.fullmatch(checksum) else f" (was {before}, is {checksum})"
                again = f" or go on with what is there now by --set {name}=...,"
                raise UsageError(
                    f"the {name} of {run} changed since it was saved{shown}; put back what it was,"
                    f"{again if name in SETTABLE else ''} or start a new run"
                )
        return {
            name: (str(versions[name]), now)
            for name, now in self.versions.items()
            if versions.get(name, now) != now
        }


def describe_versions(differences: Mapping[str, tuple[str, str]]) -> str:
    """Return other software in one line."""
    return ", ".join(f"{name} {was} -> {now}" for name, (was, now) in differences.items())
