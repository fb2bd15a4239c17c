"""Tests that `weft bench NAME --json` prints JSON and nothing else on standard output, even if the bench's processes
print other text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = """
import subprocess, sys
from pathlib import Path
from loadtest import bench_result, benches

def run(_):
    print("chatter of the bench")
    subprocess.run([sys.executable, "-c", "print('chatter of its server')"], check=True)
    return bench_result.BenchResult([["a", "b"], ["1", "2"]], [bench_result.Bar("speed", 2.0, 1.0, "x")], ["a note"])

bench_result.RESULTS = Path(sys.argv[1])
benches.BENCHES = {"one": run, "two": run, "compare": run}
benches.run_benches("all", as_json=sys.argv[2] == "json")
"""


def outputs(folder: Path, form: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", BENCH, str(folder), form], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_json_alone_is_on_standard_output(tmp_path: Path) -> None:
    """`compare` needs options, so it is no part of `all`."""
    out, err = outputs(tmp_path, "json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["bench"], line["bars"][0]["value"]) for line in lines] == [("one", 2.0), ("two", 2.0)]
    for text in ("| a ", "speed", "a note", "chatter of the bench", "chatter of its server"):
        assert text in err


def test_people_read_the_table_there(tmp_path: Path) -> None:
    out, err = outputs(tmp_path, "text")
    assert "| a " in out
    assert "chatter of its server" in out
    assert '"bars"' not in out
    assert err == ""
