"""Tests what a worker's reports say of the sequences that ended."""

from fabric.contracts import AttemptId, EngineStats, FeatureStats, MemberId, MmHash, RequestId, SequenceId, UnitKey
from llm_workers.engine_interface import AbortedSequence, Admitted, Update
from llm_workers.scheduling import AdmittedSequences, FinishedSequence, SequenceTimes, StepEvents
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_reports import WorkerReporter

LACKING = (UnitKey(MmHash("picture"), 0),)


def make_reporter() -> WorkerReporter:
    return WorkerReporter(MemberId("w"), WorkerConfig(), EngineStats(), FeatureStats)


def attempt(name: str) -> AttemptId:
    return AttemptId(RequestId(name), 0)


def admit(reporter: WorkerReporter, name: str, units: tuple[UnitKey, ...]) -> None:
    reporter.take(Update(admitted=[Admitted(attempt(name), AdmittedSequences((), 0, units, "arrived"))]))


def finish(reporter: WorkerReporter, name: str, held_s: float) -> None:
    times = SequenceTimes(0.0, 1.0, held_s, 1.0, 2.0)
    finished = FinishedSequence(SequenceId(RequestId(name), 0, 0), "stop", 1, 10, 0, times)
    reporter.take(Update(events=StepEvents((), (finished,), (), (), ())))


def test_the_time_at_the_doorstep_is_averaged_over_those_that_lacked_features() -> None:
    reporter = make_reporter()
    for number in range(100):
        admit(reporter, f"text{number}", ())
        finish(reporter, f"text{number}", 0.0)
        admit(reporter, f"picture{number}", LACKING)
        finish(reporter, f"picture{number}", 0.5)
    assert abs(reporter.report(0.0).held_s - 0.5) < 0.01


def test_features_that_are_there_in_time_bring_the_average_down() -> None:
    reporter = make_reporter()
    for number, held_s in enumerate([1.0] * 30 + [0.0] * 60):
        admit(reporter, str(number), LACKING)
        finish(reporter, str(number), held_s)
    assert reporter.report(0.0).held_s < 0.01


def test_an_attempt_that_was_aborted_counts_in_no_average() -> None:
    reporter = make_reporter()
    admit(reporter, "a", LACKING)
    aborted = AbortedSequence(SequenceId(RequestId("a"), 0, 0), SequenceTimes(0.0, 0.0, 9.0, 0.0, 9.0))
    reporter.take(Update(aborted=[aborted]))
    finish(reporter, "a", 9.0)
    assert reporter.report(0.0).held_s == 0.0
