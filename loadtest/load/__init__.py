"""Puts load on a running cluster over its HTTP API, and says how fast and how right its answers were.

    scenarios      names mixes of requests: which kinds, how many, how they arrive
    chat_content   makes the bodies of chats: drawn questions with a known answer, or words and media of a given size
    timed_answer   reads the server-sent events of an answer, and takes its times
    load_samples   holds the times of one answer, and makes tables, plots and a page of many
    member_series  reads from `/metrics` how busy encoders and workers are during the load
    locust_chats   is the user of locust, which sends the requests of a scenario

`loadtest/locustfile.py` is what locust runs; it imports `locust_chats`, which needs locust (the `loadtest` extra). The
bench `serve` uses the other modules without it. The folder knows the cluster by its HTTP API alone.
"""

from __future__ import annotations

from loadtest.load.chat_content import ChatContent, DrawnContent, LoadChat, SizedContent, content_for
from loadtest.load.load_samples import LoadSample, kind_rows, load_page, summary_json
from loadtest.load.member_series import SERIES, SeriesWatch
from loadtest.load.scenarios import DOCUMENT_MIXES, SCENARIOS, LoadScenario, scenario_requests
from loadtest.load.timed_answer import AnswerTimes, TimedAnswer, refusal

__all__ = [
    "DOCUMENT_MIXES",
    "SCENARIOS",
    "SERIES",
    "AnswerTimes",
    "ChatContent",
    "DrawnContent",
    "LoadChat",
    "LoadSample",
    "LoadScenario",
    "SeriesWatch",
    "SizedContent",
    "TimedAnswer",
    "content_for",
    "kind_rows",
    "load_page",
    "refusal",
    "scenario_requests",
    "summary_json",
]
