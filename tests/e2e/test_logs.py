"""Checks the log of a real cluster: every process writes where `weft serve` says, and the log shows the path of a
request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_media import image_part, user
from cluster_process import ClusterProcess, eventually, start_cluster

pytestmark = [pytest.mark.ray, pytest.mark.nixl]

SECRET = "open sesame"


def said_folder(cluster: ClusterProcess) -> Path:
    """Returns the folder that the command names as the place of the logs."""
    match = re.search(r"the log of every process is in (\S+) \(json, from level debug\)", cluster.log.read_text())
    assert match is not None
    return Path(match[1])


def lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of all processes; every line of every file is an object."""
    return [json.loads(line) for path in folder.glob("*.log") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("in_process", [False, True], ids=["ray", "in-process"])
def test_every_process_writes_where_it_was_said(in_process: bool, tmp_path: Path) -> None:
    section = {"format": "json", "level": "debug", "dir": str(tmp_path)}
    with start_cluster(in_process=in_process, workers={"replicas": 1}, logging=section) as cluster:
        with cluster.client(headers={"authorization": f"Bearer {SECRET}"}) as client:
            members = {each["member_id"] for each in client.get("/weft/members").json()["members"]}
            messages = user(SECRET, image_part(1))
            body = {"model": cluster.model, "messages": messages, "max_tokens": 4, "ignore_eos": True}
            answered = client.post("/v1/chat/completions", json=body)
            assert answered.status_code == 200
            refused = client.post("/v1/chat/completions", json=body | {"temperature": SECRET})
            assert refused.status_code == 400
        folder = said_folder(cluster)
        assert folder.parent == tmp_path

        def exchanges() -> dict[str, dict[str, Any]]:
            return {str(line["request_id"]): line for line in lines(folder) if line.get("method") == "POST"}

        names = [response.headers["x-weft-request-id"] for response in (answered, refused)]
        eventually(lambda: set(names) <= set(exchanges()), 10)
        good, bad = (exchanges()[name] for name in names)
        assert (good["status"], good["code"], good["completion_tokens"]) == (200, "ok", 4)
        assert (bad["status"], bad["code"], bad["level"]) == (400, "invalid_request", "info")
        routers = {line["member_id"] for line in (good, bad)}
        assert len(routers) == 1
        assert not routers & members, "workers and encoders are other members"
        if not in_process:
            written = {path.name for path in folder.glob("*.log")}
            assert {f"worker-{name}.log" in written or f"encoder-{name}.log" in written for name in members} == {True}
            assert f"router-{next(iter(routers))}.log" in written
        assert SECRET not in "".join(path.read_text() for path in folder.glob("*.log"))
    assert lines(folder), "they outlive the cluster"
    if not in_process:
        kept = [str(path.relative_to(folder)) for path in folder.rglob("*")]
        warned = [line for line in lines(folder) if line["level"] == "warning"]
        is_kept = any(re.fullmatch(r"ray/worker-.*\.err", name) for name in kept)
        assert is_kept, f"what libraries printed in the replicas is not among {kept}: {warned}"


def test_lines_of_all_processes_meet_at_the_terminal() -> None:
    with start_cluster(workers={"replicas": 1}, logging={"to": "terminal"}) as cluster:
        with cluster.client() as client:
            body = {"model": cluster.model, "messages": user("Hi"), "max_tokens": 2}
            name = client.post("/v1/chat/completions", json=body).headers["x-weft-request-id"]
        line = re.compile(rf"^\S+ \S+ INFO \S+ {name} router.access_log: POST /v1/chat/completions 200 ok", re.M)
        eventually(lambda: line.search(cluster.log.read_text()) is not None, 20)
        assert len(line.findall(cluster.log.read_text())) == 1
