"""Products of the cpu device use as many BLAS threads as speed them up, and restore the process's number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.support.models import demo
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import greedy
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.host import threads
from hybrid.kernels.host.threads import SPLIT_FROM, BlasThreads, seconds_alone
from hybrid.kernels.oracle import ORACLE
from hybrid.kernels.oracle.device import CpuDevice


class Library:
    """A BLAS as threadpoolctl shows one."""

    internal_api, version = "toy", "1.0"

    def __init__(self, n: int) -> None:
        self.num_threads = n

    def set_num_threads(self, n: int) -> None:
        self.num_threads = n


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "processors", lambda: 8)


def test_a_product_is_split_where_that_speeds_it_up(eight: None) -> None:
    library = Library(16)
    with BlasThreads([library]) as blas:
        assert library.num_threads == 16  # until the next product
        for seconds, wanted in ((SPLIT_FROM / 2, 1), (SPLIT_FROM, 8), (1.0, 8), (0.0, 1)):
            blas.use(seconds)
            assert library.num_threads == wanted
    assert library.num_threads == 16
    with pytest.raises(KeyError), BlasThreads([library]) as blas:
        blas.use(0.0)
        raise KeyError
    assert library.num_threads == 16
    one = Library(1)
    with BlasThreads([one]) as blas:
        blas.use(1.0)
    assert one.num_threads == 1 and blas.most == 1 and BlasThreads([]).most == 0
    assert BlasThreads([library]).text == "8 of toy 1.0, 1 for products below 4 ms, of one row 0.6 ms"
    assert blas.text == "1 of toy 1.0"


def test_one_row_is_shared_until_it_waits_for_a_processor(eight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now, library = [100.0], Library(8)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    with BlasThreads([library]) as blas:
        assert not blas.use(0.001) and library.num_threads == 1  # of several rows only the size decides
        assert not blas.use(0.0005, True) and library.num_threads == 1
        assert blas.use(0.001, True) and library.num_threads == 8
        blas.judge(0.001, 0.003)
        assert blas.use(0.001, True) and library.num_threads == 8
        blas.judge(0.001, 0.020)
        assert not blas.use(0.001, True) and library.num_threads == 1
        assert not blas.use(SPLIT_FROM, True) and library.num_threads == 8
        now[0] += 1.1
        assert blas.use(0.001, True) and library.num_threads == 8


def test_a_token_of_small_matrices_is_not_shared_and_a_prompt_of_large_ones_is() -> None:
    assert seconds_alone(1, 2048, 640) < SPLIT_FROM < seconds_alone(1, 262144, 640)  # the layers of 270M, its head
    assert (
        seconds_alone(1, 10240, 2560) > SPLIT_FROM and seconds_alone(512, 2048, 640) > SPLIT_FROM
    )  # 4B; a prompt of 512
    assert seconds_alone(2, 1, 1) > 0


@pytest.mark.slow
def test_every_operation_runs_with_the_threads_of_its_longest_product(tmp_path: Path, eight: None) -> None:
    library, seen = Library(8), dict[str, set[int]]()

    def watched(op: str) -> Any:
        def call(**given: Any) -> Any:
            seen.setdefault(op, set()).add(library.num_threads)
            return ORACLE[op](**given)

        return call

    device = CpuDevice(overrides={op: watched(op) for op in ORACLE})
    device.blas = BlasThreads([library])
    # A head of 40000 rows is split (5 ms), layers of 256 columns are not.
    hp = tiny(hidden=256, vocab=40000)
    with open_checkpoint(write_hf(tmp_path, hp, dtype="f32")) as checkpoint:
        engine = Engine(checkpoint, device, EngineConfig(ctx=64, n_tokens=320))
        greedy(engine, [2, 4, 5], 3)
    assert seen.pop("logits") == {8} and library.num_threads == 8
    assert {"fused_qkv", "fused_ffn", "linear"} & seen.keys() and set().union(*seen.values()) == {1}, seen


def test_a_pass_that_waited_limits_the_next_to_one_thread(
    tmp_path: Path, eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake clock: this machine's speed does not matter."""
    library, seen, now = Library(8), list[int](), [100.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])

    def slow(**given: Any) -> Any:
        seen.append(library.num_threads)
        if len(seen) == 2:  # the first of one row
            now[0] += 0.02
        return ORACLE["logits"](**given)

    device = CpuDevice(overrides={"logits": slow})
    device.blas = BlasThreads([library])
    with open_checkpoint(
        write_hf(tmp_path, tiny(hidden=256, vocab=16000), dtype="f32")
    ) as checkpoint:  # a head of 2 ms
        engine = Engine(checkpoint, device, EngineConfig(ctx=64, n_tokens=320))
        greedy(engine, [2, 4, 5], 4)
    assert seen == [8, 8, 1, 1]


def test_attentions_products_grow_with_what_a_row_sees(tmp_path: Path, eight: None) -> None:
    class Watched(BlasThreads):
        def use(self, seconds: float, one_row: bool = False) -> bool:
            self.asked = seconds
            return super().use(seconds, one_row)

    found: list[tuple[int, int, float]] = []

    def watched(op: str) -> Any:
        def call(**given: Any) -> Any:
            found.append((len(given["positions"]), given["window"], blas.asked))
            return ORACLE[op](**given)

        return call

    device = CpuDevice(overrides={op: watched(op) for op in ("attention", "decode_attention")})
    blas = device.blas = Watched([Library(8)])
    with open_checkpoint(
        write_hf(tmp_path, tiny(n_layers=2, layer_is_global=(False, True)), dtype="f32")
    ) as checkpoint:
        engine = Engine(checkpoint, device, EngineConfig(ctx=64, chunk=16))
        greedy(engine, [2] * 31, 2)
    asked = [  # rows, window and positions that a row may see: after 16, 31 and 32 positions, two queries for a kv head
        (16, 8, 16),
        (16, 0, 16),
        (15, 8, 8 + 15),
        (15, 0, 31),
        (1, 8, 8 + 1),
        (1, 0, 32),
    ]
    assert found == [(n, w, pytest.approx(seconds_alone(2 * n, 1, 16) * seen)) for n, w, seen in asked]
    assert seconds_alone(512 * 4, 1, 256) * 64 < SPLIT_FROM < seconds_alone(512 * 4, 1, 256) * 4096  # 512 rows of 27B


QUOTAS = [("max 100000\n", 6), ("150000 100000\n", 2), ("300000 100000\n", 3), ("nonsense", 6), (None, 6)]


@pytest.mark.parametrize(("text", "most"), QUOTAS)
def test_a_quota_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, most: int
) -> None:
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(threads, "_CPU_MAX", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert threads.processors() == most
    assert BlasThreads([Library(64)]).most == most


@pytest.mark.slow
def test_the_real_librarys_threads_are_set_and_reported() -> None:
    """In a subprocess whose BLAS has two threads."""
    script = (
        "import sys, hybrid\n"
        "from threadpoolctl import threadpool_info\n"
        "from hybrid.kernels.oracle import ORACLE\n"
        "now = lambda: {i['num_threads'] for i in threadpool_info() if i['user_api'] == 'blas'}\n"
        "real, seen = ORACLE['linear'], set()\n"
        "def linear(**given):\n"
        "    seen.update(now())\n"
        "    return real(**given)\n"
        "ORACLE['linear'] = linear\n"
        "import hybrid.kernels.host.threads as t\n"
        "t.processors = lambda: 2\n"
        "before = now()\n"
        "with hybrid.load(sys.argv[1], 'cpu') as m:\n"
        "    list(m.generate('the', 2))\n"
        "    print(before, seen, now(), [d for d in m.stats.details() if d.startswith('threads: ')])\n"
    )
    model = demo()
    done = subprocess.run(
        [sys.executable, "-c", script, str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=model.parent.parent,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    if "{2}" not in done.stdout[:4]:
        pytest.skip(f"this NumPy's BLAS cannot be configured: {done.stdout}")
    assert done.stdout.startswith("{2} {1} {2} ['threads: 2 of ") and "1 for products below 4 ms" in done.stdout
