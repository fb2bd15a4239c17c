"""Uses the console as a person does, in a real browser, on a real cluster: a conversation with a picture, the waterfall
of its time, the router's decision, the list of requests and the picture of the cluster."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import DESKTOP, PHONE, barriers, browser, opened, overflow_px
from cluster_process import ClusterProcess, pids, start_cluster
from playwright.sync_api import Browser, Page, expect

from deploy.demo.ask import Question, mp4, png, questions, wav
from deploy.demo.drawing.facts import Clip, Picture, Sound

pytestmark = pytest.mark.torch

KEY, TENANTS_KEY = "wk-operator-0123456789", "wk-tenant-0123456789"
PICTURES = Path(os.environ.get("WEFT_SCREENSHOTS", Path(__file__).parents[2] / "build" / "screenshots"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    """Starts a cluster with four pairs of a worker and an encoder."""
    with start_cluster(encoders={"replicas": 2}, workers={"replicas": 2}) as running:
        yield running


def question(modality: str) -> Question:
    """Returns a question of the demo about one medium that is at the beginning of its only turn."""
    kind = {"image": Picture, "video": Clip, "audio": Sound}[modality]
    for seed in range(50):
        for each in questions(seed):
            media = [type(medium) for medium in each.sample.media()]
            if media == [kind] and len(each.sample.turns) == 1:
                return each
    raise AssertionError(f"the demo asks nothing about one {modality}")


def file_of(asked: Question, folder: Path) -> Path:
    """Writes the medium of a question to a file."""
    (medium,) = asked.sample.media()
    if isinstance(medium, Picture):
        name, content = "figure.png", png(medium)
    elif isinstance(medium, Clip):
        name, content = "clip.mp4", mp4(medium)
    else:
        name, content = "beeps.wav", wav(medium)
    (folder / name).write_bytes(content)
    return folder / name


def is_ready(page: Page) -> None:
    expect(page.locator("#state-text")).to_contain_text("weft-demo: ready")


def ask(page: Page, text: str) -> None:
    """Sends a message with the keyboard and waits for the end of the answer."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#send:visible")
    expect(page.locator(".message.assistant").last.locator(".facts")).to_contain_text("tokens")


def shot(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"console-{name}.png")


def shown_s(page: Page, place: str) -> list[float]:
    """Returns the seconds of the parts that a table shows; the last one is their sum."""
    return [float(each) for each in page.locator(f"{place} .parts data").evaluate_all("all => all.map(e => e.value)")]


def test_a_conversation_with_a_picture_shows_the_answer_and_where_its_time_went(
    cluster: ClusterProcess, chromium: Browser, tmp_path: Path
) -> None:
    asked = question("image")
    with opened(chromium, f"{cluster.url}/console") as (page, _):
        is_ready(page)
        page.set_input_files("#file", file_of(asked, tmp_path))
        expect(page.locator("#attached li")).to_contain_text("figure.png")
        ask(page, asked.text)
        said = page.locator(".message.assistant .said").last
        expect(said).to_have_text(asked.sample.answer)
        assert page.locator(".message[aria-busy]").count() == 0, "screen readers read answers that are whole"
        page.wait_for_selector("#last .waterfall")
        record_id = page.get_attribute("#last", "data-request")
        with cluster.client() as client:
            record = client.get(f"/weft/requests/{record_id}").json()

        *parts, total_s = shown_s(page, "#last")
        assert sum(parts) == pytest.approx(total_s, rel=1e-3)
        assert total_s == pytest.approx(record["timing"]["total_s"], rel=0.05)
        assert all(each > 0.0 for each in parts)
        rows = page.locator("#last .waterfall .name").all_inner_texts()
        for span in ("Make the prompt", "Plan", "Decode and preprocess", "Encode", "Transfer", "Prefill", "Generate"):
            assert any(row.startswith(span) for row in rows), (span, rows)
        check_decision(page, cluster, record)
        shot(page, "playground")
        second = question("image").text
        ask(page, second)
        expect(page.locator(".message.assistant .said").last).not_to_have_text("…")
        assert page.locator(".message.user").count() == 2


def check_decision(page: Page, cluster: ClusterProcess, record: dict[str, Any]) -> None:
    """Checks that the decision shows every pair with every term, and marks the one that was chosen."""
    workers, encoders = pids(cluster, "worker"), pids(cluster, "encoder")
    pairs = page.locator("#last .decision table", has=page.locator("caption", has_text="Terms of each pair"))
    rows = pairs.locator("tbody tr")
    found = {tuple(rows.nth(at).locator("td").all_inner_texts()[:2]) for at in range(rows.count())}
    assert len(workers) == len(encoders) == 2
    assert found == {(worker, encoder) for worker in workers for encoder in encoders}
    titles = pairs.locator("thead th").all_inner_texts()
    assert titles[2:8] == [
        "First token (predicted)",
        "Queue at the worker",
        "Prefill",
        "Held at the doorstep",
        "First token",
        "On the way",
    ]
    (plan,) = record["plans"]
    best = pairs.locator("tr.best td").all_inner_texts()
    assert best[0] == plan["plan"]["worker_id"]
    items = page.locator("#last .decision table", has=page.locator("caption", has_text="Terms of each medium"))
    assert items.locator("tbody tr").count() == len(found)


def test_videos_and_sounds_are_dropped_and_answered(cluster: ClusterProcess, chromium: Browser, tmp_path: Path) -> None:
    with opened(chromium, f"{cluster.url}/console") as (page, _):
        is_ready(page)
        beside = (
            "() => document.body.dispatchEvent(new DragEvent('drop', {dataTransfer, bubbles: true, cancelable: true}))"
        )
        files = "const dataTransfer = new DataTransfer(); dataTransfer.items.add(new File(['x'], 'x.png'));"
        assert page.evaluate(f"() => {{ {files} return ({beside})(); }}") is False, "the browser would open the file"
        for modality, kind in (("video", "video/mp4"), ("audio", "audio/wav")):
            asked = question(modality)
            path = file_of(asked, tmp_path)
            page.click("#clear")
            drop(page, path, kind)
            expect(page.locator("#attached li")).to_contain_text(path.name)
            ask(page, asked.text)
            expect(page.locator(".message.assistant .said").last).to_have_text(asked.sample.answer)
            assert page.locator(f".message.user {modality}").count() == 1


def drop(page: Page, path: Path, kind: str) -> None:
    """Drops a file on the page as a file manager does."""
    content = list(path.read_bytes())
    transfer = page.evaluate_handle(
        """([content, name, type]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(content)], name, {type}));
            return transfer;
        }""",
        [content, path.name, kind],
    )
    page.dispatch_event("#drop", "dragover", {"dataTransfer": transfer})
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


def test_a_picture_of_the_camera_is_sent(cluster: ClusterProcess, chromium: Browser) -> None:
    with opened(chromium, f"{cluster.url}/console") as (page, _):
        is_ready(page)
        page.click("#camera")
        page.click("#camera-take:not([disabled])")
        expect(page.locator("#attached li")).to_contain_text("camera.jpg")
        expect(page.locator("#camera-dialog")).to_be_hidden()
        page.click("#attached button")
        expect(page.locator("#attached li")).to_have_count(0)
        page.click("#camera")
        expect(page.locator("#camera-take")).to_be_enabled()
        tracks = page.evaluate_handle("document.querySelector('#camera-view').srcObject.getTracks()")
        page.keyboard.press("Escape")
        expect(page.locator("#camera-dialog")).to_be_hidden()
        page.wait_for_function("tracks => tracks.every((each) => each.readyState === 'ended')", arg=tracks)
        page.click("#camera")
        page.click("#camera-take:not([disabled])")
        expect(page.locator("#attached li")).to_have_count(1)
        ask(page, question("image").text)
        assert page.locator(".message.user img").count() == 1


def test_problems_are_said_and_the_conversation_goes_on(
    cluster: ClusterProcess, chromium: Browser, tmp_path: Path
) -> None:
    broken, note = tmp_path / "broken.png", tmp_path / "note.txt"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    note.write_text("hello")
    with opened(chromium, f"{cluster.url}/console") as (page, problems):
        is_ready(page)
        page.set_input_files("#file", note)
        expect(page.get_by_role("alert").last).to_contain_text("note.txt is no picture, video or sound")
        page.set_input_files("#file", broken)
        page.fill("#prompt", "What is this?")
        page.press("#prompt", "Enter")
        alert = page.locator(".message.assistant .error")
        expect(alert).to_contain_text("image")
        assert [each for each in problems if "400" not in each] == []
        problems.clear()  # The browser itself reports the answer with status 400.
        expect(page.locator("#prompt")).to_have_value("What is this?")
        page.click("#attached button")
        ask(page, "Hello!")
        assert page.locator(".message.assistant").count() == 2
        cut = 'data: {"choices": [{"delta": {"content": "Half an"}}]}\n\n'
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
        page.fill("#prompt", "Go on")
        page.press("#prompt", "Enter")
        expect(page.locator(".message.assistant").last).to_contain_text("Half an")
        expect(page.locator(".message.assistant .error").last).to_have_text("The answer broke off.")


def test_a_new_conversation_may_begin_while_an_answer_comes(cluster: ClusterProcess, chromium: Browser) -> None:
    with opened(chromium, f"{cluster.url}/console") as (page, _):
        is_ready(page)
        ask(page, "Hello!")
        page.click(".settings summary")
        page.fill("#max-tokens", "2000")
        page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route.request.post_data)))
        page.fill("#prompt", "What is new?")
        page.focus("#send")
        page.keyboard.press("Space")
        expect(page.locator("#stop")).to_be_focused()
        expect(page.locator(".message.assistant .said").last).not_to_have_text("…")
        page.click("#clear")
        expect(page.locator("#send")).to_be_visible()
        page.unroute("**/v1/chat/completions")
        page.fill("#max-tokens", "8")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Hi")
        assert json.loads(sent.value.post_data or "")["messages"] == [{"role": "user", "content": "Hi"}]
        expect(page.locator(".message.assistant .facts").last).to_contain_text("tokens")


def test_an_answer_can_be_stopped(cluster: ClusterProcess, chromium: Browser) -> None:
    with opened(chromium, f"{cluster.url}/console") as (page, _):
        is_ready(page)
        page.click(".settings summary")
        page.fill("#max-tokens", "2000")
        page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route.request.post_data)))
        page.fill("#prompt", "Hello!")
        page.click("#send")
        expect(page.locator(".message.assistant .said").last).not_to_have_text("…")
        page.click("#stop")
        expect(page.locator(".message.assistant .facts").last).to_have_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        page.click("#tab-requests")
        expect(page.locator("button.request").first).to_contain_text("aborted")


def endless(body: str | None) -> str:
    return json.dumps(json.loads(body or "") | {"ignore_eos": True})


def test_requests_are_listed_and_chosen_with_the_keyboard_and_exported(
    cluster: ClusterProcess, chromium: Browser
) -> None:
    with opened(chromium, f"{cluster.url}/console") as (page, _):
        is_ready(page)
        for _ in range(2):
            ask(page, "Hello!")
        page.evaluate("document.querySelector('#live').checked = false")  # As browsers that restore a page may show it.
        page.focus("#tab-playground")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#tab-requests")).to_be_focused()
        first = page.locator("button.request").first
        expect(first).to_be_visible()
        page.check("#live")
        first.focus()
        page.keyboard.press("ArrowDown")
        second = page.locator("button.request").nth(1)
        expect(second).to_be_focused()
        page.evaluate("row = document.activeElement; blurs = 0; row.addEventListener('blur', () => { blurs += 1; })")
        newest = first.get_attribute("data-request") or ""
        with cluster.client() as client:
            client.post("/v1/completions", json={"model": cluster.model, "prompt": "Hi", "max_tokens": 2})
        expect(first).not_to_have_attribute("data-request", newest)
        assert page.evaluate("[row.isConnected, row === document.activeElement, blurs]") == [True, True, 0]
        second = page.locator("button.request").nth(2)
        page.keyboard.press("Enter")
        page.wait_for_selector("#chosen .waterfall")
        wanted = second.get_attribute("data-request")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('#chosen') !== null"), "Tab leaves the list at once"
        assert page.get_attribute("#chosen", "data-request") == wanted
        *parts, total_s = shown_s(page, "#chosen")
        assert sum(parts) == pytest.approx(total_s, rel=1e-3)
        shot(page, "requests")
        with page.expect_download() as one:
            page.click("#chosen >> text=Export for Perfetto")
        spans = json.loads(Path(one.value.path()).read_text())["traceEvents"]
        assert {"Prefill", "prefill"} & {each.get("name") for each in spans}, spans[:5]
        with page.expect_download() as minute:
            page.click("#export-minute")
        every = json.loads(Path(minute.value.path()).read_text())["traceEvents"]
        assert len(every) > len(spans)
        page.set_viewport_size({"width": 390, "height": 240})
        page.evaluate("scrollTo(0, 0)")
        expect(page.locator("#chosen")).not_to_be_in_viewport()
        first.press("Enter")
        expect(page.locator("#chosen h2")).to_be_in_viewport()
        page.select_option("#kind", "video")
        expect(page.locator("#request-list")).not_to_contain_text("text")


def test_the_picture_of_the_cluster_shows_every_member(cluster: ClusterProcess, chromium: Browser) -> None:
    with cluster.client() as client:
        listed = client.get("/weft/members").json()
    kinds = [each["kind"] for each in listed["members"]]
    members = [each["member_id"] for each in listed["members"] + listed["routers"]]
    with opened(chromium, f"{cluster.url}/console#cluster") as (page, _):
        is_ready(page)
        expect(page.locator(".member")).to_have_count(len(members))
        cards = page.locator(".member").evaluate_all("all => all.map(each => each.dataset.member)")
        assert set(cards) == set(members)
        expect(page.locator(".link.same_host")).to_have_count(kinds.count("encoder") * kinds.count("worker"))
        before = page.locator("#totals").inner_text()
        with httpx.Client(base_url=cluster.url, timeout=120) as client:
            body = {"model": cluster.model, "prompt": "Hi", "max_tokens": 400, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
        expect(page.locator("#totals")).to_contain_text(re.compile(r"[1-9][0-9]* tokens/s"))
        assert "in flight" in before
        shot(page, "cluster")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_has_no_barriers_and_fits_its_window(
    cluster: ClusterProcess, chromium: Browser, scheme: str, window: dict[str, int], tmp_path: Path
) -> None:
    path = file_of(question("image"), tmp_path)
    with opened(chromium, f"{cluster.url}/console", viewport=window, color_scheme=scheme) as (page, _):
        is_ready(page)
        page.set_input_files("#file", path)
        ask(page, question("image").text)
        page.wait_for_selector("#last .waterfall")
        name = f"{'phone' if window is PHONE else 'desktop'}-{scheme}"
        for tab, shown in (("playground", "#last .waterfall"), ("requests", "button.request"), ("cluster", ".member")):
            page.click(f"#tab-{tab}")
            page.wait_for_selector(shown)
            assert barriers(page) == [], tab
            assert overflow_px(page) <= 0, tab
            shot(page, f"{name}-{tab}")
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.reload()
        expect(page.locator("#theme")).to_have_text("Theme: light")


def test_a_cluster_that_was_away_may_serve_another_model(cluster: ClusterProcess, chromium: Browser) -> None:
    forbid = (
        "for (const area of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, area, {get() { throw Error(); }});"
    )
    other = {"data": [{"id": "another", "input_modalities": ["text"]}]}
    with opened(chromium, f"{cluster.url}/console") as (page, problems):
        page.add_init_script(forbid)
        page.reload()
        is_ready(page)  # Also where the browser keeps nothing for pages.
        page.route("**/v1/models", lambda route: route.fulfill(json=other))
        page.route("**/health/ready", lambda route: route.abort())
        expect(page.locator("#state-text")).to_have_text("The server can't be reached.")
        page.unroute("**/health/ready")
        expect(page.locator("#state-text")).to_contain_text("another: ready")
        expect(page.locator("#attach")).to_be_hidden()
        assert {each.partition(": ")[2] for each in problems} == {"net::ERR_FAILED"}
        problems.clear()


def test_keys_are_asked_for_and_decide_what_is_shown(chromium: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{digest(KEY)} - ops role=operator\n{digest(TENANTS_KEY)} shop web\n")
    access = {"keys_file": str(keys)}
    with (
        start_cluster(in_process=True, access=access, tenants={"shop": {}}) as guarded,
        opened(chromium, f"{guarded.url}/console") as (page, problems),
    ):
        expect(page.locator("#key-dialog")).to_be_visible()
        use_key(page, "wrong")
        expect(page.locator("#state-text")).to_have_text("the key is not known")
        page.click("#key")
        use_key(page, TENANTS_KEY)
        is_ready(page)
        ask(page, "Hello!")
        expect(page.locator("#last")).to_contain_text("An operator's key shows the waterfall")
        page.click("#tab-cluster")
        expect(page.locator("#state-text")).to_have_text("this needs an operator's key")
        page.evaluate(
            "said = []; new MutationObserver(() => said.push(document.querySelector('#state-text').textContent))"
            ".observe(document.querySelector('#state'), {subtree: true, childList: true, characterData: true})"
        )
        for _ in range(2):
            page.wait_for_event("response", lambda answer: answer.url.endswith("/weft/cluster"))
        assert page.evaluate("said") == [], "a status that changes is read out each time"
        page.click("#key")
        use_key(page, KEY)
        expect(page.locator(".member").first).to_be_visible()
        page.click("#key")
        use_key(page, TENANTS_KEY)
        expect(page.locator(".member")).to_have_count(0)
        statuses = {re.sub(r"\D", "", each.partition("status of")[2])[:3] for each in problems}
        assert statuses <= {"401", "403"}
        problems.clear()  # The browser reports refusals.


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def use_key(page: Page, key: str) -> None:
    page.fill("#key-field", key)
    page.press("#key-field", "Enter")
