"""Every bench says its options, and none runs with an option that it doesn't have."""

from __future__ import annotations

import pytest

from loadtest.benches import BENCHES


@pytest.mark.parametrize("name", BENCHES)
def test_help_is_printed_and_nothing_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        BENCHES[name](["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: weft bench {name}")


@pytest.mark.parametrize("name", BENCHES)
def test_an_unknown_option_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        BENCHES[name](["--no-such-option"])
    assert ended.value.code == 2
    assert f"weft bench {name}: error:" in capsys.readouterr().err
