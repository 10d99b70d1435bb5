"""Growing finished networks further: runs are not repeated, and the table takes the better rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import ARMS, RATES, key_of, main, read_records, summarize


def record(arm: str, seed: int, rate: float, val: float, test: float) -> dict[str, Any]:
    named = {"cell": "cnn", "arm": arm, "seed": seed, "rate": rate, "parameters": 1_000}
    return {**named, "val": val, "test": test}


def test_each_seed_counts_at_its_better_rate_on_validation_data() -> None:
    records = [
        record("grown", 0, 1.0, val=90.0, test=80.0),
        record("grown", 0, 0.5, val=91.0, test=70.0),
        record("grown", 1, 1.0, val=92.0, test=74.0),
        record("scratch", 0, 1.0, val=80.0, test=69.0),
        record("scratch", 1, 1.0, val=80.0, test=71.0),
    ]
    grown, scratch = summarize(records)
    assert grown[4:] == ["91.500", "72.000", "–"]
    # 70 - 69 and 74 - 71, with their standard error.
    assert scratch[5:] == ["70.000", "+2.000 ± 1.000"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::esper.EsperWarning")
def test_what_was_run_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.jsonl"
    asked = ["--cells", "cnn", "--scale", "0.05", "--out", str(out), "--folder", str(tmp_path)]
    assert main(asked) == 0
    records = read_records(out)
    assert [key_of(one) for one in records] == [
        f"cnn 0 {arm} {rate}" for rate in RATES for arm in ARMS
    ]
    assert all(0 <= one["test"] <= 100 for one in records)
    assert "cnn 0 grown 1.0: " in capsys.readouterr().out
    # A line was cut short, and is run again; the others stay as they are.
    lines = out.read_text(encoding="utf-8").splitlines()
    out.write_text("\n".join([*lines[:-1], lines[-1][:20]]) + "\n", encoding="utf-8")
    assert main(asked) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cnn 0 ")]
    assert line.startswith("cnn 0 continued 0.5: ")
    again = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    assert again["test"] == records[-1]["test"]
