"""Workers that expand templates: reused, bounded, replaced when they end, and not shared after a fork."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from hybrid.text import template_worker
from hybrid.text.template_worker import KEPT, Late, Pool

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def job(template: str, **variables: object) -> dict[str, object]:
    return {"template": template, "variables": variables, "most": 1000, "seconds": 20.0}


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def test_one_process_does_one_job_after_another(pool: Pool) -> None:
    said = "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + x %}{{ ns.n }}"
    assert [pool.run(job(said, x=n), 20) for n in (1, 2, 3)] == [{"text": "1"}, {"text": "2"}, {"text": "3"}]
    (worker,) = pool._free
    assert worker.jobs == 3
    assert "error" in pool.run(job("{{ nope.x }}"), 20) and pool.run(job("a\n{{ x }}", x="\ud83d"), 20) == {
        "text": "a\n\ud83d"
    }
    assert pool._free == [worker]


def test_several_at_a_time_have_a_process_each_and_few_are_kept(pool: Pool) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: pool.run(job("{{ n }}", n=n), 60), range(12)))
    assert found == [{"text": str(n)} for n in range(12)] and 1 <= len(pool._free) <= KEPT


class Fake:
    """A worker whose jobs end when the test says so."""

    made: ClassVar[list[Fake]] = []
    gate: ClassVar[threading.Event] = threading.Event()

    def __init__(self) -> None:
        self.jobs, self.closed = 0, False
        self.made.append(self)

    def run(self, job: bytes, seconds: float) -> dict[str, object]:
        assert self.gate.wait(60)
        self.jobs += 1
        return {}

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("start", [60.0, 0.01])
def test_many_callers_share_few_workers_with_a_timeout(start: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """start: with long limits, no more start than are kept; with short limits each caller has one, and the surplus is
    ended."""
    monkeypatch.setattr(template_worker, "START", start)
    monkeypatch.setattr(template_worker, "Worker", Fake)
    monkeypatch.setattr(Fake, "made", [])
    monkeypatch.setattr(Fake, "gate", threading.Event())
    pool, count = Pool(), 6
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(pool.run, {}, 1.0) for _ in range(count)]
        until = time.monotonic() + 60
        while len(Fake.made) < (KEPT if start > 1 else count) and time.monotonic() < until:
            time.sleep(0.001)
        Fake.gate.set()
        assert [a.result(60) for a in asked] == [{}] * count
    assert len(Fake.made) == (KEPT if start > 1 else count) and pool._busy == 0
    assert len(pool._free) == KEPT and sum(w.closed for w in Fake.made) == len(Fake.made) - KEPT


def test_a_worker_that_fails_to_start_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(template_worker, "Worker", failing)
    pool = Pool()
    with pytest.raises(OSError, match="no more processes"):
        pool.run({}, 1.0)
    assert pool._busy == 0


@pytest.mark.slow
def test_a_late_worker_is_ended_and_replaced(pool: Pool) -> None:
    assert pool.run(job("a"), 20) == {"text": "a"}
    (worker,) = pool._free
    with pytest.raises(Late):
        pool.run(job(ENDLESS), 0.5)
    assert not pool._free and worker._process.returncode == -signal.SIGKILL
    assert pool.run(job("b"), 20) == {"text": "b"}


def test_a_worker_that_ended_while_idle_is_replaced(pool: Pool) -> None:
    pool.run(job("a"), 20)
    (worker,) = pool._free
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait(20)
    assert pool.run(job("b"), 20) == {"text": "b"}
    assert pool._free != [worker]


def test_memory_is_given_back_after_a_job_that_took_too_much(pool: Pool) -> None:
    for _ in range(2):
        assert "MiB" in pool.run(job("{{ 'a' * 10 ** 10 }}"), 20)["error"]
    assert pool.run(job("a"), 20) == {"text": "a"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_its_own(pool: Pool) -> None:
    pool.run(job("a"), 20)
    (worker,) = pool._free
    pid = os.fork()
    if not pid:
        try:
            pool.after_fork()
            mine = pool.run(job("c"), 20)
            pool.close()
            os._exit(0 if mine == {"text": "c"} else 1)
        except BaseException:
            os._exit(2)
    until = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0 and ended[0] == pid
    assert pool.run(job("b"), 20) == {"text": "b"} and pool._free == [worker]
