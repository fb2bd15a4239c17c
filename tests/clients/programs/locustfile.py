"""Loads a server with locust: each user asks about a text, a picture, a sound or a video, and reads the stream.

`CLIENTS_ASKED` names a file with the questions, which `tests/clients/run_clients.py` writes. The tag of a task is its
modality. A request fails if its status, or an event of its stream, says so, or if the stream has no end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from locust import HttpUser, tag, task

ASKED = json.loads(Path(os.environ["CLIENTS_ASKED"]).read_text())


class Asker(HttpUser):
    def ask(self, modality: str) -> None:
        body: dict[str, Any] = {"model": ASKED["model"], "messages": ASKED["loads"][modality], "max_tokens": 8}
        body |= {"stream": True}
        with self.client.post(
            "/v1/chat/completions", json=body, name=modality, stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return
            events = [line for line in response.iter_lines() if line.startswith(b"data: ")]
            if not events or events[-1] != b"data: [DONE]":
                response.failure("the stream has no end")
            elif any("error" in json.loads(event[len("data: ") :]) for event in events[:-1]):
                response.failure("the stream holds an error")

    @tag("text")
    @task
    def text(self) -> None:
        self.ask("text")

    @tag("image")
    @task
    def image(self) -> None:
        self.ask("image")

    @tag("audio")
    @task
    def audio(self) -> None:
        self.ask("audio")

    @tag("video")
    @task
    def video(self) -> None:
        self.ask("video")
