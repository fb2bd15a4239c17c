"""Draws the dashboards with Grafana's own components, so that people can look at them: `make dashboard-pictures`.

    python tests/dashboards/draw_dashboards.py                        starts a cluster, loads it, draws all boards
    python tests/dashboards/draw_dashboards.py weft-router --answers build/dashboards/answers.json     draws one again
    python tests/dashboards/draw_dashboards.py --prometheus http://127.0.0.1:9090       shows a cluster that you have
    python tests/dashboards/draw_dashboards.py --made-up              draws series that are made up, within seconds
    python tests/dashboards/draw_dashboards.py --docs                 writes the pictures of docs/monitoring.md too

Pictures go to `build/dashboards/`. A cluster of the demo model gets every kind of request for a while, and then more
videos than it can take, so that the pictures show an incident; a real Prometheus scrapes it. A dashboard that would be
empty, because Weft does not give its metrics yet, is drawn with made-up series and says so.

It needs Node with npm (packages go to `build/dashboards/page`), Chromium (`WEFT_CHROMIUM`, or `chromium` on the path),
and, unless answers are given, Prometheus (`make prometheus`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]

from cluster_process import ClusterProcess, eventually, start_cluster  # noqa: E402
from dashboard_answers import Answers, BoardTime, asked, board_time, made_up  # noqa: E402
from dashboard_queries import boards  # noqa: E402
from inherited_signals import restore_signals  # noqa: E402
from metric_load import send_load  # noqa: E402
from prometheus_process import PrometheusProcess, prometheus_of  # noqa: E402
from prometheus_tools import found_tool  # noqa: E402

BUILD = ROOT / "build" / "dashboards"
PAGE = HERE / "page"
KEPT = BUILD / "answers.json"
SPEECH = "weft-speech"
SCRAPE_S = 2.0
"""Is the scrape interval of the Prometheus that watches the cluster."""
CALM, FULL = ("mixed", 1.5), ("video", 8.0)
"""Name the scenarios of the load with their rates, in requests per second: `FULL` comes in addition to `CALM`."""
MADE_UP = "made-up series"
DOCS = ROOT / "docs" / "dashboards"
DOCS_TO_ROW = {"lost-time.webp": "weft-overview-2", "encoder-load.webp": "weft-encoders-1"}
"""Maps the pictures of the documentation to the rows that they show."""


class Unable(Exception):
    """`Unable` says what is missing for the pictures, and how to get it."""


# ------------------------------------------------------------ answers


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def locust(url: str, scenario: str, rate: float, duration_s: float) -> subprocess.Popen[str]:
    """Starts a load of a scenario that ends by itself."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    command += ["--host", url, "--scenario", scenario, "--rate", f"{rate:g}", "--run-time", f"{duration_s:g}s"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def send_incident(cluster: ClusterProcess, duration_s: float) -> None:
    """Sends requests of every kind, some of which are refused, and in the middle third more videos than are served."""

    async def every_kind() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
            await send_load(client, cluster.model)

    with contextlib.ExitStack() as stack:
        calm = stack.enter_context(locust(cluster.url, *CALM, duration_s))
        asyncio.run(every_kind())
        time.sleep(duration_s / 3)
        full = stack.enter_context(locust(cluster.url, *FULL, duration_s / 3))
        for name, load in (("calm", calm), ("full", full)):
            _, said = load.communicate(timeout=duration_s * 4 + 240)
            print(f"the {name} load ended with status {load.returncode}" + (f":\n{said}" if load.returncode else ""))


def recorded(names: Sequence[str], duration_s: float) -> dict[str, dict[str, Any]]:
    """Starts a cluster and a Prometheus, sends the load, and returns what draws each dashboard."""
    if found_tool("prometheus") is None:
        raise Unable("there is no prometheus; `make prometheus` gets it where apt does")
    with (
        tempfile.TemporaryDirectory() as folder,
        start_cluster(
            network={"metrics_port": free_port()}, workers={"num_blocks": 512}, encoders={"decode_processes": 1}
        ) as cluster,
        prometheus_of(cluster.url, Path(folder), free_port()) as prometheus,
    ):
        from_s = time.time()
        print(f"the cluster serves at {cluster.url}; the load takes about {duration_s:g} s")
        send_incident(cluster, duration_s)
        num_before = prometheus.num_scrapes()
        eventually(lambda: prometheus.num_scrapes() >= num_before + 3)
        return asked_all(prometheus, names, board_time(from_s, time.time(), SCRAPE_S))


def asked_all(prometheus: PrometheusProcess, names: Sequence[str], shown: BoardTime) -> dict[str, dict[str, Any]]:
    """Asks for every dashboard, and keeps the answers in a file, which `--answers` reads. The dashboard whose metrics
    do not exist yet gets made-up series."""
    found = {
        name: drawing(shown, made_up(name, shown), MADE_UP)
        if name == SPEECH
        else drawing(shown, asked(prometheus, name, shown))
        for name in names
    }
    KEPT.write_text(json.dumps(found))
    return found


def drawing(shown: BoardTime, answers: Answers, note: str = "") -> dict[str, Any]:
    return {"fromS": shown.from_s, "untilS": shown.until_s, "stepS": shown.step_s, "note": note, "answers": answers}


def found_answers(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what draws each dashboard, from where the command says. Raises Unable if Prometheus does not answer."""
    names, until_s = options.boards or list(boards()), time.time()
    if options.answers:
        kept = json.loads(options.answers.read_text())
        return {name: kept[name] for name in names}
    if options.made_up:
        shown = board_time(until_s - 3600, until_s, 15)
        return {name: drawing(shown, made_up(name, shown), MADE_UP) for name in names}
    if options.prometheus:
        shown = board_time(until_s - options.minutes * 60, until_s, options.scrape_s)
        try:
            with httpx.Client(base_url=options.prometheus, timeout=60) as client:
                return asked_all(PrometheusProcess(client), names, shown)
        except httpx.TransportError as error:
            raise Unable(f"Prometheus does not answer at {options.prometheus}: {error}") from error
    return recorded(names, options.minutes * 60)


# ------------------------------------------------------------ pictures


def found_chromium() -> str:
    named = os.environ.get("WEFT_CHROMIUM") or shutil.which("chromium")
    if named is None:
        raise Unable("there is no chromium; run `apt-get install chromium` (Debian), or name one in WEFT_CHROMIUM")
    return named


def install_page() -> Path:
    """Copies the page to `build/`, and installs its packages there if they have changed. Returns the folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unable("there is no npm; install Node 20 or later")
    folder = BUILD / "page"
    folder.mkdir(parents=True, exist_ok=True)
    lock, installed = PAGE / "package-lock.json", folder / "node_modules" / ".installed.json"
    for file in PAGE.iterdir():
        shutil.copy(file, folder / file.name)
    if not installed.exists() or installed.read_text() != lock.read_text():
        print("npm installs Grafana's components below build/dashboards/page, about 600 MB")
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(command, cwd=folder, check=True)
        installed.write_text(lock.read_text())
    return folder


def pictures(drawings: Mapping[str, dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Draws each dashboard, and yields what the browser says of it: the picture, panels without data, errors."""
    folder, chromium, plan = install_page(), found_chromium(), []
    for name, each in drawings.items():
        payload = BUILD / f"{name}.payload.json"
        shown = {"board": boards()[name], "width": options.width, "mode": "light" if options.light else "dark"}
        payload.write_text(json.dumps(shown | each))
        plan.append({"payload": str(payload), "picture": str(BUILD / f"{name}.png"), "rows": rows_of(name)})
    file = BUILD / "plan.json"
    file.write_text(json.dumps({"chromium": chromium, "scale": options.scale, "boards": plan}))
    done = subprocess.run(["node", "take_pictures.mjs", str(file)], cwd=folder, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Unable(f"the pictures were not drawn (status {done.returncode})")
    yield from map(json.loads, done.stdout.splitlines())


def rows_of(name: str) -> dict[str, str]:
    """Maps the title of each row to the file of its picture."""
    titles = [panel["title"] for panel in boards()[name]["panels"] if panel["type"] == "row"]
    return {title: str(BUILD / f"{name}-{number}.png") for number, title in enumerate(titles, start=1)}


def write_docs() -> None:
    """Writes the pictures of the documentation from those of rows."""
    DOCS.mkdir(exist_ok=True)
    for name, row in DOCS_TO_ROW.items():
        with Image.open(BUILD / f"{row}.png") as picture:
            picture.save(DOCS / name, quality=80, method=6)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draws the dashboards with Grafana's own components.")
    parser.add_argument("boards", nargs="*", metavar="BOARD", help=f"draws these only, of {', '.join(boards())}")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prometheus", metavar="URL", help="asks this Prometheus, and starts no cluster")
    source.add_argument("--answers", type=Path, metavar="FILE", help="draws answers that an earlier run has kept")
    source.add_argument("--made-up", action="store_true", help="draws made-up series, to look at the layout")
    parser.add_argument("--minutes", type=float, default=3.0, help="loads the cluster, or shows, this many minutes")
    parser.add_argument("--scrape-s", type=float, default=15.0, help="names the scrape interval of that Prometheus")
    parser.add_argument("--light", action="store_true", help="draws Grafana's light theme")
    parser.add_argument("--width", type=int, default=1600, help="sets the width of a dashboard in pixels")
    parser.add_argument("--scale", type=float, default=1.0, help="sets pixels of the picture per pixel of the page")
    parser.add_argument("--docs", action="store_true", help="writes the pictures of the documentation too")
    options = parser.parse_args()
    unknown = [name for name in options.boards if name not in boards()]
    if unknown:
        parser.error(f"there is no dashboard `{unknown[0]}`; there are {', '.join(boards())}")
    return options


def main() -> int:
    options = parsed()
    restore_signals()
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        found_chromium()
        drawings = found_answers(options)
        said = list(pictures(drawings, options))
    except Unable as error:
        print(error, file=sys.stderr)
        return 1
    if options.docs:
        write_docs()
    for each in said:
        empty = f"; no data: {', '.join(each['empty'])}" if each["empty"] else ""
        print(f"{Path(each['picture']).relative_to(ROOT)}: {each['panels']} panels{empty}")
        for error in each["errors"]:
            print(f"  {error}", file=sys.stderr)
    return 1 if any(each["errors"] for each in said) else 0


if __name__ == "__main__":
    sys.exit(main())
