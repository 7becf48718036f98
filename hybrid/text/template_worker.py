"""Pool of warm worker processes that expand chat templates: starting one takes far longer than a job.

A job and its answer are lines of JSON. A worker runs one job at a time. The kernel limits its CPU time and memory where
supported, and a worker is killed at its job's timeout. A worker exits after IDLE seconds without work; at most KEPT are
idle. If all are busy, a job waits START seconds before it starts another worker, so that few workers run many short
jobs and a long job blocks none. A forked child process has its own pool.
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
"""Seconds that a job waits for a busy worker."""


class Late(Exception):
    """The job timed out."""


class Worker:
    """A worker process. jobs: number of completed jobs."""

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
        """Run a job; returns its answer. Raises Late; OSError with the last line of stderr if the process has
        exited."""
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
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        self.drop()

    def drop(self) -> None:
        """Close the pipes only: in a forked child the process belongs to the parent."""
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            with contextlib.suppress(OSError):  # unwritten data
                pipe.close()  # type: ignore[union-attr]


class Pool:
    """Idle workers. Thread-safe."""

    def __init__(self) -> None:
        self._changed, self._free, self._owner = threading.Condition(), list[Worker](), os.getpid()
        self._busy = 0

    def run(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Run a job on an idle or new worker. Raises Late, OSError."""
        packed = json.dumps(job).encode()
        while True:
            worker = self._take()
            kept, whole = worker.jobs > 0, False
            try:
                answer = worker.run(packed, seconds)
                whole = True
            except OSError:
                if kept:  # it had exited while idle
                    continue
                raise
            finally:
                self._give(worker, whole)
            return answer

    def close(self) -> None:
        """Stop the idle workers."""
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
        """Return a worker after a job. whole: it can run another."""
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
        """In a forked child: drop the parent's workers."""
        for worker in self._free:
            worker.drop()
        self._changed, self._free, self._owner, self._busy = threading.Condition(), [], os.getpid(), 0
