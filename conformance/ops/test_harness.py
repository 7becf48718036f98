"""Tests of the harness: each kind of wrong result must be caught, or a green suite would mean nothing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.support.devices import GUARD
from conformance.support.expected import Failure, apply_expected, load
from hybrid.harness import compare, run_case, values
from hybrid.harness.cases import Case
from hybrid.harness.compare import Disagreement
from hybrid.harness.sampling import Params, judge
from hybrid.harness.scales import F16_STEP, steps
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.spec import load_ops

SPECS = load_ops()
LINEAR = Case("linear", {"T": 6, "K": 320, "N": 420}, {"x": "f32", "w": "bf16", "y": "f32"}, rows=5, seed=3)
QUANTISE = Case("quantize_act", {"T": 3, "K": 96}, {"x": "f32", "y": "q8_act"}, rows=2, seed=5)
APPEND = Case(
    "qk_norm_rope_append",
    {"T": 4, "HQ": 2, "B": 9, "BS": 4, "HK": 1, "D": 32, "S": 2, "MB": 4, "C": 16, "KV": 2, "R": 32},
    {**SPECS["qk_norm_rope_append"].dtypes()},
    {"eps": 1e-6},
    rows=3,
    seed=1,
)

Tamper = Callable[[dict[str, list[np.ndarray]], dict[str, list[np.ndarray]]], None]


class Tampered(CpuDevice):
    """The NumPy device with a fault: `tamper(now, before)` changes the stored parts after each run."""

    def __init__(self, tamper: Tamper, **options: Any) -> None:
        super().__init__(guard=GUARD, **options)
        self.tamper = tamper

    def compile(self, plan: Any, profile: bool = False) -> Any:
        program = super().compile(plan, profile)

        def submit(times: int = 1) -> int:
            now = {n: list(self.stored(n).parts) for n in plan.tensors}
            before = {n: [p.copy() for p in parts] for n, parts in now.items()}
            ticket = program.submit(times)
            self.tamper(now, before)
            return ticket

        return SimpleNamespace(plan=plan, submit=submit)


def caught(case: Case, tamper: Tamper = lambda now, before: None, **options: Any) -> str:
    """The error of a faulty device; the sound device must pass the same case."""
    run_case(SPECS[case.op], CpuDevice(guard=GUARD), case)
    with pytest.raises(Disagreement) as failure:
        run_case(SPECS[case.op], Tampered(tamper, **options), case)
    message = str(failure.value)
    assert case.op in message and f"seed={case.seed}" in message, "the message must reproduce the case"
    return message


def test_zeros() -> None:
    assert "beyond the bound" in caught(LINEAR, lambda now, before: now["y"][0][:5].fill(0))


def test_stale_buffer() -> None:
    stale = values.normal(1, "stale", (5, 420)).astype(np.float32)
    assert "beyond the bound" in caught(LINEAR, lambda now, before: now["y"][0].__setitem__(slice(5), stale))


def test_output_left_unwritten() -> None:
    def tamper(now: dict, before: dict) -> None:
        now["y"][0][4, 419] = before["y"][0][4, 419]

    assert "unwritten" in caught(LINEAR, tamper)


def test_result_added_to_what_was_there() -> None:
    def tamper(now: dict, before: dict) -> None:
        now["y"][0][:5] += before["y"][0][:5]

    assert "unwritten" in caught(LINEAR, tamper)


def test_dropped_tail_of_the_reduction() -> None:
    def cut(*, x: np.ndarray, w: np.ndarray, real: type) -> tuple[np.ndarray]:
        return (x[:, :-32] @ w[:, :-32].T,)

    assert "beyond the bound" in caught(LINEAR, overrides={"linear": cut})


def test_swapped_rows() -> None:
    def tamper(now: dict, before: dict) -> None:
        now["y"][0][[0, 1]] = now["y"][0][[1, 0]]

    assert "beyond the bound" in caught(LINEAR, tamper)


def test_one_wrong_element_in_2100() -> None:
    """5 x 420 elements, one of ordinary size zeroed: a mean square error would pass it (ggml allows 5e-4)."""

    def tamper(now: dict, before: dict) -> None:
        y = now["y"][0]
        y[3, int(np.argsort(np.abs(y[3]))[210])] = 0

    message = caught(LINEAR, tamper)
    assert "1 of 2100 elements" in message
    assert float(re.search(r"NMSE (\S+)", message).group(1)) < 5e-4  # type: ignore[union-attr]


def test_bf16_accumulation() -> None:
    def coarse(*, x: np.ndarray, w: np.ndarray, real: type) -> tuple[np.ndarray]:
        total = np.zeros((len(x), len(w)), np.float64)
        for k in range(0, x.shape[1], 32):
            total = values.real(values.rounded(total + x[:, k : k + 32] @ w[:, k : k + 32].T, "bf16"))
        return (total,)

    message = caught(LINEAR, overrides={"linear": coarse})
    assert float(re.search(r"NMSE (\S+)", message).group(1)) < 5e-4  # type: ignore[union-attr]


def test_float16_inputs_where_float32_was_promised() -> None:
    def half(*, x: np.ndarray, w: np.ndarray, real: type) -> tuple[np.ndarray]:
        return (x.astype(np.float16).astype(real) @ w.T,)

    caught(LINEAR, overrides={"linear": half})


def test_input_modified() -> None:
    def tamper(now: dict, before: dict) -> None:
        now["x"][0][2, 7] += 1

    assert "input x was modified" in caught(LINEAR, tamper)


def test_guard_band_overwritten() -> None:
    def overrun(now: dict, before: dict) -> None:
        device._guarded["y"].room[-1] ^= 0xFF

    device = Tampered(overrun)
    with pytest.raises(Disagreement, match="guard bands overwritten around y"):
        run_case(SPECS["linear"], device, LINEAR)


def test_row_beyond_the_live_ones_written() -> None:
    assert "beyond the 5 live ones" in caught(LINEAR, lambda now, before: now["y"][0][5].fill(0))


def test_nan_where_the_oracle_has_none() -> None:
    assert "non-finite" in caught(LINEAR, lambda now, before: now["y"][0][1, :3].fill(np.nan))


@pytest.mark.parametrize("fault", ["code", "scale", "sum"])
def test_int8_activations(fault: str) -> None:
    def tamper(now: dict, before: dict) -> None:
        codes, scales = now["y"]
        if fault == "code":
            codes[1, 40] += 1 if codes[1, 40] < 0 else -1
        else:
            scales[1, 2 + (fault == "sum")] *= np.float32(1 + 2.0**-20)

    message = caught(QUANTISE, tamper)
    assert {"code": "y.sum", "scale": "y.scale", "sum": "y.sum"}[fault] in message


def test_code_off_by_one_with_its_sum() -> None:
    def tamper(now: dict, before: dict) -> None:
        codes, scales = now["y"]
        codes[1, 40] += 1 if codes[1, 40] < 0 else -1
        scales[1, 3] = scales[1, 2] * codes[1, 32:64].astype(np.float32).sum()

    assert "y.codes" in caught(QUANTISE, tamper)


def test_append_to_another_place() -> None:
    def tamper(now: dict, before: dict) -> None:
        cache, old = now["k_cache"][0], before["k_cache"][0]
        block, row = np.argwhere((cache != old).any(axis=(2, 3)))[0]
        cache[block, (row + 1) % 4], cache[block, row] = cache[block, row].copy(), old[block, row]

    assert "k_cache" in caught(APPEND, tamper)


def test_exact_mode_wants_equality() -> None:
    exact = Case("linear", {"T": 2, "K": 64, "N": 40}, {"x": "q8_act", "w": "q4_0", "y": "f32"}, rows=2, mode="exact")

    def tamper(now: dict, before: dict) -> None:
        now["y"][0][1, 3] = np.nextafter(now["y"][0][1, 3], np.float32(np.inf))

    assert "equality is demanded" in caught(exact, tamper)


def test_a_difference_of_files_names_the_first_byte(tmp_path: Path) -> None:
    for name, data in (("a", b"12345678"), ("b", b"12945678"), ("c", b"1234")):
        (tmp_path / name).write_bytes(data)
    compare.same_files(tmp_path / "a", tmp_path / "a")
    compare.same_files(tmp_path / "a", tmp_path / "b", last=4)
    for other, says in (("b", "8 bytes differ from 8, first at 2"), ("c", "8 bytes differ from 4, first at 4")):
        with pytest.raises(Disagreement, match=says):
            compare.same_files(tmp_path / "a", tmp_path / other)


def test_sampling() -> None:
    z = values.normal(4, "z", (50,), 3.0)
    judge("greedy", z, Params(), 0, int(z.argmax()))
    for params, token in ((Params(), 3), (Params(1.0, top_k=2), int(np.argsort(z)[-3])), (Params(), 50)):
        with pytest.raises(Disagreement):
            judge("wrong", z, params, 0, token)


def test_vacuous_cases_fail() -> None:
    one = np.ones(4)
    with pytest.raises(Disagreement, match="vacuous"):
        compare.within("x", one, one, 2 * one)
    with pytest.raises(Disagreement, match="no elements"):
        compare.within("x", one[:0], one[:0], one[:0])
    with pytest.raises(Disagreement, match="proves nothing"):
        compare.within("x", one * np.nan, one * np.nan, one)
    with pytest.raises(Disagreement, match="no live rows"):
        run_case(SPECS["linear"], CpuDevice(), Case("linear", LINEAR.bind, LINEAR.dtypes, rows=0))


def test_a_step_of_f16_is_allowed_for_weights_that_are_subnormal_in_it_alone() -> None:
    x, w = np.array([[8.0, -2.0, 1.0]]), np.array([[3e-5, 1e-4, -6e-5], [1.0, 1.0, 1.0]])
    assert steps(x, "f16", w).tolist() == [[9 * F16_STEP, 0.0]]
    assert not steps(x, "f32", w).any() and not steps(x, "q8_act", w).any()


def test_values_are_the_same_everywhere() -> None:
    assert [hex(x) for x in values.bits(0, "x", 2)] == ["0x902d9832b1159590", "0x3a2f272600776aae"]
    assert np.array_equal(values.normal(7, "w", (3, 5)).ravel()[:4], values.normal(7, "w", (4,)))
    assert not np.array_equal(values.normal(7, "w", (4,)), values.normal(8, "w", (4,)))
    sample = values.normal(9, "w", (100_000,))
    assert abs(sample.mean()) < 0.02 and abs(sample.std() - 1) < 0.02


def test_expected_failures_are_data() -> None:
    load()
    item = SimpleNamespace(
        nodeid="conformance/ops/test_ops.py::test_edge[a-b]", config=SimpleNamespace(args=["conformance"])
    )
    marks: list[Any] = []
    item.add_marker = marks.append
    day = datetime.date(2030, 1, 2)
    apply_expected([item], [Failure("test_ops.py::test_edge[a-*]", "why", day)], today=day)  # type: ignore[list-item]
    assert marks[0].kwargs["strict"] and marks[0].kwargs["raises"] is Disagreement
    with pytest.raises(pytest.UsageError, match="expired"):
        apply_expected([item], [Failure("test_ops.py::test_edge[a-b]", "why", day)], day + datetime.timedelta(1))  # type: ignore[list-item]
    with pytest.raises(pytest.UsageError, match="remove the entry"):
        apply_expected([item], [Failure("test_ops.py::test_edge[gone]", "why", day)], day)  # type: ignore[list-item]
