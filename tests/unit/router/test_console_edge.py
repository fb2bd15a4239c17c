"""Tests what the console's page loads and asks for: its files, the picture of the cluster, and records with the scores
of all pairs."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import httpx
import pytest
from edge_client import served
from router_chats import chat_body, image, text

from router.console import read_console
from router.observe import ENCODER_NUMBERS, WORKER_NUMBERS
from router.observe.traces import MAX_WITH_PAIRS

CHAT = "/v1/chat/completions"
KEY = "an-operators-key"
TERMS = ("queue_s", "prefill_s", "held_s", "first_token_s", "delivery_s")


# ------------------------------------------------------------ files


async def test_the_page_loads_its_own_files_and_nothing_else() -> None:
    async with served() as (_, client):
        page = await client.get("/console")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son[a-z]+=|https?://", page.text), "nothing runs inline"
        todo, seen = re.findall(r'(?:src|href)="(console/[^"]+)"', page.text), set[str]()
        while todo:
            path = todo.pop()
            if path in seen:
                continue
            seen.add(path)
            part = await client.get(f"/{path}")
            assert part.status_code == 200, path
            assert part.headers["x-content-type-options"] == "nosniff"
            if path.endswith(".js"):
                assert part.headers["content-type"].startswith("text/javascript")
                assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", part.text)
                todo += [f"console/{name}" for name in re.findall(r'from "\./([^"]+)"', part.text)]
            elif path.endswith(".svg"):
                continue
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", part.text), path
        assert seen == {f"console/{name}" for name in read_console()} - {"console/index.html"}


async def test_a_browser_asks_only_whether_a_file_has_changed() -> None:
    async with served() as (_, client):
        first = await client.get("/console/console.js")
        assert first.headers["cache-control"] == "no-cache"
        again = await client.get("/console/console.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        changed = await client.get("/console/console.js", headers={"if-none-match": '"another"'})
        assert changed.content == first.content


async def test_words_and_colours_are_those_of_the_other_pages() -> None:
    async with served() as (_, client):
        said = (await client.get("/console/record_words.js")).text
        values = {line.split(" = ")[0]: json.loads(line.split(" = ")[1].rstrip(";")) for line in said.splitlines()}
        page = (await client.get("/weft/requests", params={"format": "html"})).text
        assert values["export const nameToWords"]["held"] == "Held at the doorstep"
        assert set(values) == {"export const nameToWords", "export const spanToColour", "export const otherColour"}
        assert "Latest requests" in page


async def test_unknown_files_and_a_console_that_is_off_are_named() -> None:
    async with served() as (_, client):
        for name in ("nothing.js", "..", "%2e%2e%2fapp.py", "__init__.py"):
            answer = await client.get(f"/console/{name}")
            assert answer.status_code == 404, name
            assert answer.json()["error"]["code"] == "not_found"
    async with served(has_console=False) as (_, client):
        answer = await client.get("/console")
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            404,
            "the operator has turned the console off",
        )
        assert (await client.get("/console/console.js")).status_code == 404
        assert (await client.get("/v1/models")).status_code == 200


# ------------------------------------------------------------ what it asks for


async def test_models_say_which_media_they_take() -> None:
    async with served() as (cluster, client):
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["input_modalities"] == ["text", *cluster.service.modalities]


async def test_the_picture_has_every_member_with_what_it_reports() -> None:
    async with served(num_workers=2, num_encoders=2) as (cluster, client):
        await client.post(CHAT, content=chat_body([image(), text("?")]))
        picture = (await client.get("/weft/cluster")).json()
        members = (await client.get("/weft/members")).json()
        named = {each["member_id"] for each in picture["encoders"] + picture["workers"]}
        assert named == {each["member_id"] for each in members["members"]}
        assert (picture["router_id"], picture["routers"]) == ("router-0", members["routers"])
        for each in picture["workers"]:
            assert set(WORKER_NUMBERS) <= set(each)
            report = cluster.service.reports.workers.get(each["member_id"])
            assert each["memory_size"] == (None if report is None else report.engine.kv_blocks_total)
        for each in picture["encoders"]:
            assert set(ENCODER_NUMBERS) <= set(each)
            assert each["state"] == "there"
        pairs = {(each["encoder_id"], each["worker_id"]) for each in picture["links"]}
        assert len(pairs) == len(picture["links"]) == 4


async def test_a_worker_that_plans_leave_out_shows_in_the_picture() -> None:
    async with served(num_workers=2) as (cluster, client):
        first, second = sorted(each["member_id"] for each in (await client.get("/weft/cluster")).json()["workers"])
        cluster.service._context.exclude(first)
        states = {each["member_id"]: each["state"] for each in (await client.get("/weft/cluster")).json()["workers"]}
        assert states == {first: "excluded", second: "there"}
        cluster.service.update_leaving([second])
        states = {each["member_id"]: each["state"] for each in (await client.get("/weft/cluster")).json()["workers"]}
        assert states == {first: "excluded", second: "leaving"}


async def record_of(client: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    body = chat_body([text("Look: "), image(), text("?")], weft={"explain": True} | options)
    record: dict[str, Any] = (await client.post(CHAT, content=body)).json()["weft"]["explain"]
    return record


async def test_a_record_has_the_scores_of_all_pairs_if_they_were_asked_for() -> None:
    async with served(num_workers=3, num_encoders=2) as (_, client):
        record = await record_of(client, keep_pairs=True)
        (entry,) = record["plans"]
        assert (len(entry["pairs"]), entry["num_pairs"]) == (6, 6)
        assert len({(each["worker_id"], each["items"][0]["encoder_id"]) for each in entry["pairs"]}) == 6
        best, plan = entry["pairs"][0], entry["plan"]
        for each in entry["pairs"]:
            assert sum(each[name] for name in TERMS) == pytest.approx(each["ttft_s"])
            assert each["ttft_s"] >= best["ttft_s"]
        chosen = (plan["worker_id"], plan["assignments"][0]["encoder_id"])
        (own,) = [e for e in entry["pairs"] if (e["worker_id"], e["items"][0]["encoder_id"]) == chosen]
        assert own["ttft_s"] == pytest.approx(plan["predicted_ttft_s"])
        listed = (await client.get(f"/weft/requests/{record['request_id']}")).json()
        assert listed["plans"][0]["pairs"] == entry["pairs"]
        (without,) = (await record_of(client))["plans"]
        assert set(without) == {"attempt", "plan"}


async def test_only_the_newest_records_keep_their_pairs() -> None:
    async with served() as (_, client):
        ids = [(await record_of(client, keep_pairs=True))["request_id"] for _ in range(MAX_WITH_PAIRS + 2)]
        kept = ["pairs" in (await client.get(f"/weft/requests/{each}")).json()["plans"][0] for each in ids]
        assert kept == [False] * 2 + [True] * MAX_WITH_PAIRS


async def test_a_record_that_lost_its_pairs_gets_no_new_ones() -> None:
    async with served() as (cluster, client):
        record = await record_of(client, keep_pairs=True)
        trace = cluster.service.traces.get(record["request_id"])
        assert trace is not None
        assert trace.keeps_pairs
        trace.drop_pairs()
        assert not trace.keeps_pairs, "its next attempt would score them again"


async def test_pairs_are_for_those_who_may_see_the_members() -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    async with served(operator_digests=(digest,)) as (_, client):
        anonymous = await client.get("/weft/cluster")
        assert anonymous.status_code == 401
        answer = await client.get("/weft/cluster", headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200
        assert (await client.get("/console")).status_code == 200
        slash = await client.get("/console/")
        assert (slash.status_code, slash.json()["error"]["message"]) == (
            404,
            "this server has no `GET /console/`; the path is /console",
        )


# ------------------------------------------------------------ the time of a whole request


async def test_the_parts_of_a_request_add_up_to_its_time() -> None:
    async with served() as (_, client):
        record = await record_of(client)
        whole, first = record["whole"], record["first_token"]
        assert sum(whole["parts"].values()) == pytest.approx(whole["total_s"])
        assert whole["parts"].items() >= first["parts"].items()
        assert set(whole["parts"]) - set(first["parts"]) == {"generate", "returned"}
        assert whole["total_s"] >= first["at_s"]
        (end,) = [e for e in record["events"] if e["name"] == "finished" and e["member_id"] == record["router_id"]]
        assert whole["total_s"] == pytest.approx(end["time_s"])


async def test_a_request_without_a_token_has_no_parts() -> None:
    async with served() as (_, client):
        refused = await client.post(CHAT, content=chat_body("hi", max_tokens=10**6))
        assert refused.status_code == 400
        (listed,) = (await client.get("/weft/requests", params={"format": "json", "limit": 1})).json()["requests"]
        record = (await client.get(f"/weft/requests/{listed['request_id']}")).json()
        assert (record["whole"], record["first_token"]) == (None, None)
        assert listed["total_s"] == pytest.approx(record["events"][-1]["time_s"])
