"""Every table of a claim, by one command, from the folder of a proof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from esper.nissa.folder import RunFolder
from tests.lab.proof.test_evidence import ARMS, EFFECTS, MEMBERS, cells, settings


def write(folder: Path, kind: str = "prove") -> Path:
    """Write a folder as `esper prove` leaves it when it is stopped within the last line."""
    with RunFolder(folder).claim_new({"command": kind, **settings(*ARMS)}, overwrite=False) as lock:
        lock.release()
    lines = [f"{each.to_line()}\n" for each in cells(EFFECTS)]
    (folder / "results.jsonl").write_text("".join(lines)[:-9])
    return folder


def test_one_command_makes_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "proof")
    before = (folder / "results.jsonl").read_bytes()
    assert main(["arena", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"mine on {len(MEMBERS)} members of depth_family")
    for words in ("By kind of network", "Against hindsight", "| depths ", "| arm   | late"):
        assert words in said
    found = json.loads((folder / "tables.json").read_text())
    assert found["left_out"]["arms"] == {
        "late": f"played on {len(MEMBERS) - 1} of {len(MEMBERS)} members"
    }
    assert (folder / "tables.md").read_text().startswith("# mine on ")
    assert (folder / "results.jsonl").read_bytes() == before
    assert main(["arena", str(folder), "--json", "--out", str(tmp_path / "other")]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert json.loads((tmp_path / "other" / "tables.json").read_text()) == found


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not there" in capsys.readouterr().err
    assert main(["arena", str(write(tmp_path / "search", "search"))]) == 2
    assert "was not written by `esper prove`" in capsys.readouterr().err
    folder = write(tmp_path / "empty")
    (folder / "results.jsonl").unlink()
    assert main(["arena", str(folder)]) == 2
    assert "has no results.jsonl" in capsys.readouterr().err
