"""Processes that expand chat templates, kept warm: starting one costs a tenth of a second, a job on a warm one about a
millisecond.

A job is a line of JSON, and so is its answer. A worker has one job at a time, bounded in processor time and memory by
the kernel where it can be, and by the clock of whoever waits; one that is late is killed, one that has had nothing to
do for IDLE seconds ends by itself, and at most KEPT wait for work. Who finds all of them busy waits about as long as
starting another would take, and only then starts one: many short jobs at once are done by few workers, and a long one
holds nobody up. Workers belong to the process that started them: a forked child starts its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

IDLE = 60.0
KEPT = 2
START = 0.2
"""Seconds that a job waits for a worker that others use."""


class Late(Exception):
    """The job took longer than it may."""


class Worker:
    """One process. jobs: how many it has done."""

    def __init__(self) -> None:
        search = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybrid.text.chat_template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "PYTHONPATH": search},
            start_new_session=True,  # a terminal's Ctrl-C is the parent's
        )
        self.jobs = 0

    def run(self, job: bytes, seconds: float) -> dict[str, Any]:
        """The answer. Late; OSError where the process has ended, with its last words."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        clock = threading.Timer(seconds, stop)
        clock.daemon = True
        clock.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(job + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            clock.cancel()
        self.jobs += 1
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        if late.is_set():
            raise Late
        self._said.seek(0)
        last = self._said.read().decode("utf-8", "replace").strip().splitlines()
        raise OSError(last[-1] if last else f"exit code {code}")

    def close(self) -> None:
        """End the process and let go of its pipes."""
        self._process.kill()
        self._process.wait()
        self.drop()

    def drop(self) -> None:
        """Let go of the pipes alone: in a forked child the process is the parent's."""
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            with contextlib.suppress(OSError):  # what could not be written any more
                pipe.close()  # type: ignore[union-attr]


class Pool:
    """Workers without a job. For any thread."""

    def __init__(self) -> None:
        self._changed, self._free, self._owner = threading.Condition(), list[Worker](), os.getpid()
        self._busy = 0

    def run(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """On a worker that waits, or a new one. Late, OSError."""
        packed = json.dumps(job).encode()
        while True:
            worker = self._take()
            kept, whole = worker.jobs > 0, False
            try:
                answer = worker.run(packed, seconds)
                whole = True
            except OSError:
                if kept:  # it had ended while nobody asked
                    continue
                raise
            finally:
                self._give(worker, whole)
            return answer

    def close(self) -> None:
        """End those that wait."""
        with self._changed:
            free, self._free = self._free, []
        for worker in free:
            worker.close()

    def _take(self) -> Worker:
        with self._changed:
            if self._busy >= KEPT:
                self._changed.wait_for(lambda: self._free, START)
            self._busy += 1
            if self._free:
                return self._free.pop()
        try:
            return Worker()
        except BaseException:
            self._give(None, False)
            raise

    def _give(self, worker: Worker | None, whole: bool) -> None:
        """Back from a job; whole: it can do another."""
        with self._changed:
            mine = self._owner == os.getpid()
            self._busy -= mine
            if worker is not None and whole and mine and len(self._free) < KEPT:
                self._free.append(worker)
                worker = None
            self._changed.notify()
        if worker is not None:
            worker.close()

    def after_fork(self) -> None:
        """In a forked child: forget the parent's."""
        for worker in self._free:
            worker.drop()
        self._changed, self._free, self._owner, self._busy = threading.Condition(), [], os.getpid(), 0
