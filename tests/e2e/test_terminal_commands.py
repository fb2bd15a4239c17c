"""Tests the commands for people against a real cluster, as a user types them on a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from cluster_process import ClusterProcess, start_cluster
from pseudo_terminal import CTRL_D, END, ENTER, on_terminal

from deploy.demo.ask import png, questions
from deploy.demo.drawing.facts import Picture


def weft(cluster: ClusterProcess, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *words, "--url", cluster.url]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)


def awaits_input(screen: str) -> bool:
    return screen.rstrip().endswith("\n>")


FIGURE_SEED = 913
"""No other test shows this picture to the shared cluster, which would keep its features."""


def drawn(folder: Path) -> tuple[Path, str, str]:
    """Returns a file with a picture, a question about it, and the answer."""
    question = next(each for each in questions(FIGURE_SEED) if len(each.sample.turns) == 1 and each.task == "colour")
    [picture] = [each for each in question.sample.media() if isinstance(each, Picture)]
    file = folder / "picture.png"
    file.write_bytes(png(picture))
    return file, question.text, question.sample.answer


def test_a_conversation_with_a_picture_and_its_trace(cluster: ClusterProcess, tmp_path: Path) -> None:
    file, text, answer = drawn(tmp_path)
    with on_terminal("chat", "--url", cluster.url, "--temperature", "0", home=tmp_path) as terminal:
        terminal.shows(awaits_input)
        terminal.send(f"/image {file}{ENTER}")
        terminal.shows(lambda screen: "goes with the next question" in screen and awaits_input(screen))
        terminal.send(f"{text}{ENTER}")
        terminal.shows(lambda screen: re.search(rf"^{answer}$", screen, re.MULTILINE) is not None)
        terminal.shows(awaits_input)
        terminal.send(f"/stats{ENTER}")
        screen = terminal.shows(lambda screen: "generated tokens" in screen and awaits_input(screen))
        name = re.search(r"request (req-\w+);", screen)
        terminal.send(CTRL_D)
        assert terminal.ended() == 0
    assert name is not None
    shown = weft(cluster, "trace", name[1])
    assert shown.returncode == 0, shown.stderr
    for part in ("TIME TO FIRST TOKEN", "Decode and preprocess (item 0", "Encode (item 0", "Transfer (item 0", "ROUTE"):
        assert part in shown.stdout
    record = json.loads(weft(cluster, "trace", "--last", "--modality", "image", "--json").stdout)
    assert record["request_id"] == name[1]
    assert abs(sum(record["first_token"]["parts"].values()) - record["first_token"]["at_s"]) < 1e-9


def test_a_question_in_a_pipe(cluster: ClusterProcess, tmp_path: Path) -> None:
    file, text, answer = drawn(tmp_path)
    done = weft(cluster, "chat", "--temperature", "0", "--image", str(file), given=text)
    assert (done.returncode, done.stdout) == (0, f"{answer}\n"), done.stderr


def test_the_state_of_the_cluster(cluster: ClusterProcess, tmp_path: Path) -> None:
    done = weft(cluster, "status", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["ready"], told["num_workers"], told["num_encoders"]) == (True, 1, 1)
    members = [row["member_id"] for row in (*told["workers"], *told["encoders"])]
    assert len(told["routers"]) == 1
    assert all(row["memory_size"] > 0 for row in (*told["workers"], *told["encoders"]))
    with on_terminal("top", "--url", cluster.url, "--interval", "0.3", home=tmp_path) as terminal:
        terminal.shows(lambda screen: all(name in screen for name in (*members, "req/s", "weft-demo")))
        terminal.send(ENTER)
        terminal.shows("arrived")
        terminal.send(f"{END}q")
        terminal.shows("DONE/S")
        terminal.send("q")
        assert terminal.ended() == 0


def test_the_start_said_what_it_waited_for(cluster: ClusterProcess) -> None:
    lines = [line for line in cluster.log.read_text().splitlines() if line.startswith("weft: waiting for ")]
    assert lines, cluster.log.read_text()
    assert any("loading weights" in line or "measuring costs" in line for line in lines), lines


def test_a_start_says_how_much_of_the_weights_is_loaded() -> None:
    with start_cluster(in_process=True) as cluster:
        told = re.findall(r"the (encoder|worker) \(loading weights\).*, (\d+)% of ([\d.]+) MB", cluster.log.read_text())
    for kind in ("encoder", "worker"):
        shares = [int(share) for each, share, _ in told if each == kind]
        assert shares == sorted(shares)
        assert shares[-1] == 100
    assert len({size for kind, _, size in told if kind == "worker"}) == 1
