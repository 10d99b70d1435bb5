import json

import pytest

from esper.lab.imagined import middle_aged_hosts
from esper.scripts.profile_features import main, where_time_goes


def test_it_prints_costs_ratio_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "8", "--turns", "2", "--epochs", "3"]) == 0
    printed = capsys.readouterr().out
    assert "8 rows, 3 slots" in printed
    for word in ("extraction", "reference", "us per row", "ratio", "signals_to_features"):
        assert word in printed


def test_it_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "4", "--slots", "5", "--turns", "1", "--epochs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["timing"]["slots"] == 5
    assert document["timing"]["extraction_us"] > 0
    assert sum(document["shares"].values()) == pytest.approx(1.0)


def test_the_documents_own_command_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version", "v3", "--rows", "4", "--turns", "1", "--epochs", "1"]) == 0
    assert "us per row" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--version", "v2"])
    assert "choose from" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--slots", "0"], ["--epochs", "-1"]])
def test_a_wrong_request_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "1 or more" in capsys.readouterr().err


def test_shares_are_sorted() -> None:
    shares = [share for _, share in where_time_goes(middle_aged_hosts(4, epochs=2).signals(), 5)]
    assert shares == sorted(shares, reverse=True)
