"""Runs other projects' clients and load generators against a served demo model, and prints a table: `make clients`.

    python tests/clients/run_clients.py                  all clients
    python tests/clients/run_clients.py aiperf locust    some of them

Each client has a virtual environment below `build/clients/`, with the versions of `requirements/NAME.txt`. A load has
passed if its program ends with status 0, and its own report counts the requests that were asked for and no errors.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]

from cluster_process import start_cluster  # noqa: E402
from inherited_signals import restore_signals  # noqa: E402

from deploy.demo.ask import messages, questions, wav  # noqa: E402
from deploy.demo.build import demo_checkpoint  # noqa: E402
from deploy.demo.drawing.facts import Sound  # noqa: E402
from deploy.demo.tasks.words import HELLO  # noqa: E402

BUILD = ROOT / "build" / "clients"
TORCH = "torch==2.13.0"
MODEL = "weft-demo"
NUM_REQUESTS = 16
CONCURRENCY = 4
NUM_TOKENS = 8
"""Is the length of an answer. Load generators count one without text as failed, and the demo model has nothing to say
about most of what they send, so they also ask for this many tokens at least."""
LOAD_TIMEOUT_S = 300.0
MODALITIES = ("text", "image", "audio", "video")
SPOKEN = ROOT / "tests" / "media" / "blue.mp3"
"""Is a sound in which the word that names it is said."""
MODALITY_TO_TASK = {"image": "colour", "audio": "beeps", "video": "direction"}


class Counts(NamedTuple):
    """`Counts` holds what a client's own report says."""

    num_done: int
    num_errors: int


@dataclass(frozen=True, slots=True)
class Load:
    """A `Load` is one run of a client. `counts` reads its report."""

    name: str
    """Is the modality, or what the load asks for."""
    command: tuple[str, ...]
    counts: Callable[[Path, str], Counts]
    num_wanted: int = 1
    """The report must count at least this many requests."""
    needs: str = ""
    """Names a module without which the load can't run. It is then left out, and the table says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """A `Client` is a program of another project, with its loads."""

    name: str
    package: str
    loads: tuple[Load, ...]
    needs_torch: bool = False


# ------------------------------------------------------------ what the clients' reports say


def program_counts(folder: Path, output: str) -> Counts:
    """Reads the last line of a program of `programs/`, which ends with an error at the first wrong answer."""
    found = re.search(r"requests without an error: (\d+)", output)
    return Counts(int(found[1]) if found else 0, 0)


def aiperf_counts(folder: Path, output: str) -> Counts:
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    num_errors = sum(each["count"] for each in report["error_summary"])
    return Counts(int(report["request_count"]["avg"]), num_errors)


def guidellm_counts(folder: Path, output: str) -> Counts:
    (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    return Counts(totals["successful"], totals["errored"] + totals["incomplete"])


def vllm_counts(folder: Path, output: str) -> Counts:
    report = json.loads((folder / "report.json").read_text())
    # The report on embeddings counts no failures.
    return Counts(report["completed"], report.get("failed", report["num_prompts"] - report["completed"]))


def locust_counts(folder: Path, output: str) -> Counts:
    with (folder / "report_stats.csv").open() as file:
        total = next(row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
    return Counts(int(total["Request Count"]), int(total["Failure Count"]))


def locust_mix_counts(folder: Path, output: str) -> Counts:
    """Does the same, and counts a modality that was never asked for as an error."""
    with (folder / "report_stats.csv").open() as file:
        names = {row["Name"] for row in csv.DictReader(file)}
    counts = locust_counts(folder, output)
    return counts._replace(num_errors=counts.num_errors + len(set(MODALITIES) - names))


# ------------------------------------------------------------ the clients


def clients(url: str, files: Path) -> list[Client]:
    """Returns all clients with their loads on the server at `url`. `files` holds what `write_files` wrote."""
    programs = HERE / "programs"
    asked = str(files / "asked.json")
    chats = [("langchain", "langchain-openai"), ("litellm", "litellm"), ("llamaindex", "llama-index-llms-openai-like")]
    found = [
        Client(name, package, (Load("calls", ("python", str(programs / f"{name}_chat.py"), asked), program_counts),))
        for name, package in chats
    ]
    return [
        *found,
        Client("locust", "locust", locust_loads(url)),
        Client("aiperf", "aiperf", aiperf_loads(url)),
        Client("guidellm", "guidellm", guidellm_loads(url, files), needs_torch=True),
        Client("vllm", "vllm", vllm_loads(url, files), needs_torch=True),
    ]


def locust_loads(url: str) -> tuple[Load, ...]:
    """Returns a load of each modality, and one of all of them together."""
    common = ("locust", "-f", str(HERE / "programs" / "locustfile.py"), "--headless", "--host", url)
    common += ("--users", str(CONCURRENCY), "--spawn-rate", str(CONCURRENCY), "--stop-timeout", "30")
    common += ("--csv", "report", "--run-time")
    single = [Load(name, (*common, "5s", "--tags", name), locust_counts, NUM_REQUESTS) for name in MODALITIES]
    return (*single, Load("all four", (*common, "10s"), locust_mix_counts, NUM_REQUESTS))


def aiperf_loads(url: str) -> tuple[Load, ...]:
    common = ("aiperf", "profile", "--model", MODEL, "--url", url, "--request-count", str(NUM_REQUESTS))
    common += ("--concurrency", str(CONCURRENCY), "--artifact-dir", ".", "--ui", "none", "--endpoint-type")
    read = ("--tokenizer", str(demo_checkpoint()), "--isl", "40")
    written = (*read, "--streaming", "--osl", str(NUM_TOKENS), "--extra-inputs", f"min_tokens:{NUM_TOKENS}")
    chat, sound = ("chat", *written), ("--audio-length-mean", "1")
    video = ("--video-width", "96", "--video-height", "96", "--video-duration", "1", "--video-fps", "4")
    name_to_options = {
        "text": chat,
        "image": (*chat, "--image-width-mean", "96", "--image-height-mean", "96"),
        "audio": (*chat, *sound),
        "video": (*chat, *video),
        "heard video": (*chat, *video, "--video-audio-num-channels", "1"),
        "responses": ("responses", *written),
        "completions": ("completions", *written),
        "embeddings": ("embeddings", *read),
        "transcripts": ("audio-transcription", *sound),
    }
    return tuple(Load(name, common + options, aiperf_counts, NUM_REQUESTS) for name, options in name_to_options.items())


def guidellm_loads(url: str, files: Path) -> tuple[Load, ...]:
    common = ("guidellm", "run", "--profile", f"kind=concurrent,streams={CONCURRENCY}")
    common += ("--constraint", f"kind=max_requests,count={NUM_REQUESTS}")
    common += ("--tokenizer", f"kind=hf_auto,model={demo_checkpoint()}")
    common += ("--output", "kind=json,path=report.json", "--disable-console")
    backend = f"kind=openai_http,target={url},model={MODEL}"
    written = f"{backend},extras.body.min_tokens={NUM_TOKENS}"
    text = f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_TOKENS}"
    sounds = f"kind=json_file,path={files / 'audio.jsonl'}"
    name_to_data = {
        "text": (text, written),
        "image": (f"kind=synthetic_image,width=96,height=96,output_tokens={NUM_TOKENS}", written),
        "video": ("kind=synthetic_video,width=96,height=96,frames=4,fps=4", written),
        "audio": (sounds, written),
        "responses": (text, f"{written},request_format=/v1/responses"),
        "completions": (text, f"{written},request_format=/v1/completions"),
        "embeddings": (text, f"{backend},request_format=/v1/embeddings"),
        # For streams of transcripts, guidellm reads vLLM's events, and not those of OpenAI.
        "transcripts": (sounds, f"{backend},request_format=/v1/audio/transcriptions,stream=false"),
    }
    loads = []
    for name, (data, asked) in name_to_data.items():
        needs = "torchcodec.decoders" if data == sounds else ""
        command = (*common, "--backend", asked, "--data", data)
        loads.append(Load(name, command, guidellm_counts, NUM_REQUESTS, needs))
    return tuple(loads)


def vllm_loads(url: str, files: Path) -> tuple[Load, ...]:
    def of(backend: str, path: str) -> tuple[str, ...]:
        command = ("vllm", "bench", "serve", "--backend", backend, "--base-url", url, "--model", MODEL)
        command += ("--endpoint", path, "--tokenizer", str(demo_checkpoint()))
        command += ("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(CONCURRENCY))
        return (*command, "--save-result", "--result-dir", ".", "--result-filename", "report.json", "--dataset-name")

    written = ("--extra-body", json.dumps({"min_tokens": NUM_TOKENS}))
    lengths = ("--random-input-len", "20", "--random-output-len", str(NUM_TOKENS))

    def made(shape: str, limits: Mapping[str, int]) -> tuple[str, ...]:
        bucket = ("--random-mm-bucket-config", f"{{{shape}: 1.0}}")
        return ("random-mm", *lengths, *bucket, "--random-mm-limit-mm-per-prompt", json.dumps(limits))

    sounds = ("custom_audio", "--dataset-path", str(files / "audio.jsonl"), "--enable-multimodal-chat")
    sounds += ("--custom-output-len", str(NUM_TOKENS))
    name_to_data = {
        "text": ("openai-chat", "/v1/chat/completions", ("random", *lengths)),
        "image": ("openai-chat", "/v1/chat/completions", made("(96, 96, 1)", {"image": 1, "video": 0})),
        "video": ("openai-chat", "/v1/chat/completions", made("(96, 96, 4)", {"image": 0, "video": 1})),
        "audio": ("openai-chat", "/v1/chat/completions", sounds),
        "responses": ("openai-responses", "/v1/responses", ("random", *lengths)),
        "completions": ("openai", "/v1/completions", ("random", *lengths)),
    }
    loads = [
        Load(name, (*of(backend, path), *data, *written), vllm_counts, NUM_REQUESTS)
        for name, (backend, path, data) in name_to_data.items()
    ]
    embedded = (*of("openai-embeddings", "/v1/embeddings"), "random", *lengths)
    return (*loads, Load("embeddings", embedded, vllm_counts, NUM_REQUESTS))


def write_files(url: str, folder: Path) -> None:
    """Writes what the programs ask, and the sounds of those load generators that make none."""
    asked: dict[str, Any] = {"text": [{"role": "user", "content": "Hello"}]}
    samples = {each.task: each.sample for each in questions(0)}
    asked |= {modality: messages(samples[task]) for modality, task in MODALITY_TO_TASK.items()}
    parts = asked["image"][-1]["content"]
    content = {
        "url": f"{url}/v1",
        "model": MODEL,
        "hello": HELLO,
        "picture": next(part["image_url"]["url"] for part in parts if part["type"] == "image_url"),
        "question": next(part["text"] for part in parts if part["type"] == "text"),
        "answer": samples["colour"].answer,
        "heard": samples["beeps"].answer,
        "spoken": str(SPOKEN),
        "word": SPOKEN.stem,
        "loads": asked,
    }
    (folder / "asked.json").write_text(json.dumps(content))
    sound = next(medium for medium in samples["beeps"].media() if isinstance(medium, Sound))
    (folder / "sound.wav").write_bytes(wav(sound))
    line = json.dumps({"prompt": "How many beeps do you hear?", "audio": str(folder / "sound.wav")})
    (folder / "audio.jsonl").write_text("\n".join([line] * NUM_REQUESTS))


# ------------------------------------------------------------ running them


def install(client: Client) -> Path:
    """Returns the folder of the client's virtual environment, which it makes if there is none with these versions.
    Raises CalledProcessError if a package can't be installed."""
    folder, wanted = BUILD / client.name, HERE / "requirements" / f"{client.name}.txt"
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted.read_text():
        return folder
    print(f"installing {client.package} into {folder.relative_to(ROOT)}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    variables = without_python_path()
    if client.needs_torch:
        subprocess.run((*pip, TORCH), check=True, env=variables)
    # The file names every package. `vllm` and `guidellm` would ask for gigabytes that a client of HTTP never loads.
    options = ("--no-deps", "--no-warn-conflicts", "--requirement", str(wanted))
    subprocess.run((*pip, *options), check=True, env=variables)
    link_ffmpeg(folder)
    stamp.write_text(wanted.read_text())
    return folder


def link_ffmpeg(folder: Path) -> None:
    """Makes FFmpeg usable for the programs of an environment, so that none must be installed on the machine. aiperf
    runs the program, which `imageio-ffmpeg` brings. torchcodec, with which guidellm reads sounds, loads the libraries,
    which `av` brings under names of its own; each gets a link with its usual name beside it."""
    for program in folder.glob("lib/python*/site-packages/imageio_ffmpeg/binaries/ffmpeg-*"):
        (folder / "bin" / "ffmpeg").symlink_to(program)
    for library in folder.glob("lib/python*/site-packages/av.libs/lib*-*.so.*"):
        found = re.fullmatch(r"(lib(?:av|sw)\w+)-[0-9a-f]+(\.so\.\d+).*", library.name)
        if found is not None:
            library.with_name(found[1] + found[2]).symlink_to(library.name)


def library_path(environment: Path) -> dict[str, str]:
    """Returns the variable with which a program finds the libraries that `link_ffmpeg` has linked."""
    folders = [str(path) for path in environment.glob("lib/python*/site-packages/av.libs")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(folders)} if folders else {}


def without_python_path() -> dict[str, str]:
    """Returns the variables of this process, without the one that would let a client import Weft's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def can_import(environment: Path, module: str) -> bool:
    command = (str(environment / "bin" / "python"), "-c", f"import {module}")
    variables = without_python_path() | library_path(environment)
    return subprocess.run(command, capture_output=True, env=variables).returncode == 0


def version_of(client: Client) -> str:
    """Returns the name and version of the client's package."""
    lines = (HERE / "requirements" / f"{client.name}.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{client.package}==")).replace("==", " ")


def run(load: Load, client: Client, environment: Path, files: Path) -> tuple[str, Counts]:
    """Runs a load in a folder of its own. Returns what is wrong, or an empty text, and the counts of the report."""
    folder = BUILD / "out" / client.name / load.name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    variables = without_python_path() | library_path(environment)
    variables |= {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CLIENTS_ASKED": str(files / "asked.json"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    program = str(environment / "bin" / load.command[0])
    try:
        with tempfile.TemporaryDirectory() as left_behind:  # aiperf leaves files there.
            done = subprocess.run(
                (program, *load.command[1:]),
                cwd=folder,
                env=variables | {"TMPDIR": left_behind},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LOAD_TIMEOUT_S,
            )
    except subprocess.TimeoutExpired:
        return f"no end after {LOAD_TIMEOUT_S:g} s", Counts(0, 0)
    (folder / "output.txt").write_text(done.stdout)
    if done.returncode:
        return f"status {done.returncode}, see {(folder / 'output.txt').relative_to(ROOT)}", Counts(0, 0)
    try:
        counts = load.counts(folder, done.stdout)
    except (OSError, LookupError, ValueError) as error:
        return f"the report can't be read: {error!r}", Counts(0, 0)
    if counts.num_errors or counts.num_done < load.num_wanted:
        return f"{counts.num_done} of {load.num_wanted} requests, {counts.num_errors} errors", counts
    return "", counts


HEAD = ("Client", "Load", "Requests", "Errors", "Seconds", "Result")


def row(cells: Sequence[str]) -> str:
    """Returns a row of a table in Markdown, with columns that also line up in a terminal."""
    widths = (34, 11, 8, 6, 7)
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return f"| {' | '.join((*padded, *cells[len(widths) :]))} |"


def run_client(client: Client, files: Path) -> Iterator[tuple[bool, str]]:
    """Installs a client and runs its loads. Yields for each whether it passed or was left out, and its row."""
    environment = install(client)
    for load in client.loads:
        started_s = time.monotonic()
        if load.needs and not can_import(environment, load.needs):
            flaw, counts, result = "", Counts(0, 0), f"left out, because `{load.needs}` can't be loaded"
        else:
            flaw, counts = run(load, client, environment, files)
            result = flaw or "passed"
        seconds = f"{time.monotonic() - started_s:.1f}"
        cells = (version_of(client), load.name, str(counts.num_done), str(counts.num_errors), seconds, result)
        yield not flaw, row(cells)


def run_all(names: Sequence[str]) -> int:
    """Runs the loads of the clients with these names, or of all. Returns the exit status."""
    num_failed, rows = 0, [row(HEAD), f"|{'---|' * len(HEAD)}"]
    files = BUILD / "files"
    files.mkdir(parents=True, exist_ok=True)
    with start_cluster(in_process=True, model={"embeddings": "mean"}) as cluster:
        write_files(cluster.url, files)
        for client in clients(cluster.url, files):
            if names and client.name not in names:
                continue
            for is_good, line in run_client(client, files):
                num_failed += not is_good
                rows.append(line)
                print(line, flush=True)
    print("\n" + "\n".join(rows), flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    restore_signals()
    sys.exit(run_all(sys.argv[1:]))
