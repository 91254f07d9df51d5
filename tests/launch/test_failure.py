"""Which failure came first, and how it is reported."""

from __future__ import annotations

import signal
from pathlib import Path

from distkit.launch.attempt import ended_by_signal
from distkit.launch.failure import ErrorRecord, Failure, first_failure
from distkit.launch.report import failure_report


def failed(rank: int, code: int, time: float, *, recorded: bool = False, log: str = "/none") -> Failure:
    text = "Traceback (most recent call last):\nValueError: boom\n"
    record = ErrorRecord(rank, "host0", 1, time, "ValueError", "boom", text, code) if recorded else None
    return Failure(rank, "host0", code, time, log, record)


def test_a_killed_rank_is_the_cause_of_lost_connections() -> None:
    killed, lost = failed(1, -9, 10.2), failed(0, 1, 10.1, recorded=True)
    assert first_failure([lost, killed]) is killed


def test_an_abort_may_be_a_consequence() -> None:
    raised, aborted = failed(1, 1, 10.0, recorded=True), failed(0, -6, 10.5)
    assert first_failure([aborted, raised]) is raised


def test_the_earliest_exception_counts() -> None:
    assert first_failure([failed(0, 1, 11.0, recorded=True), failed(3, 1, 10.9, recorded=True)]).rank == 3


def test_failures_travel_as_json() -> None:
    for failure in (failed(1, -9, 1.5), failed(0, 1, 2.5, recorded=True)):
        assert Failure.from_json(failure.to_json()) == failure


def test_the_traceback_is_last() -> None:
    report = failure_report(failed(1, 1, 1.0, recorded=True), [failed(0, -6, 2.0)], processes=2)
    assert report.splitlines()[1] == "distkit-run: rank 1 of 2 failed on host0 (exit status 1)"
    assert "  then: rank 0, killed by SIGABRT" in report and report.endswith("\nValueError: boom\n")


def test_the_logs_end_stands_in_for_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "rank-001.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    report = failure_report(failed(1, -11, 1.0, log=str(log)), [], processes=2)
    assert "killed by SIGSEGV" in report and report.endswith("  | line 99\n") and "line 79" not in report


def test_exit_status() -> None:
    assert [failed(0, code, 1.0).exit_status for code in (1, 7, -9, -15)] == [1, 7, 137, 143]


def test_a_run_that_ended_on_a_signal_did_not_fail() -> None:
    """X8: every rank ended as it was asked to; one that failed by itself is a failure."""
    assert ended_by_signal([failed(0, 138, 1.0), failed(1, 138, 1.1)]) == signal.SIGUSR1
    assert ended_by_signal([failed(0, 143, 1.0)]) == signal.SIGTERM
    for others in ([failed(0, 138, 1.0), failed(1, 1, 1.1)], [failed(0, 137, 1.0)], []):
        assert ended_by_signal(others) is None


def test_a_lost_host_is_the_cause() -> None:
    """It is noticed after the ranks that lost their connection to it."""
    first = failed(0, 1, 10.0, recorded=True)
    lost = Failure(2, "host1", 255, 26.0, "/none", lost="the host was lost with ranks 2 to 3: no sign of life for 16 s")
    assert first_failure([first, lost]) is lost
    report = failure_report(lost, [first], processes=4, next_step="; again")
    assert report.splitlines()[1].startswith("distkit-run: host1 (the host was lost with ranks 2 to 3: no sign of life")
    assert Failure.from_json(lost.to_json()) == lost
