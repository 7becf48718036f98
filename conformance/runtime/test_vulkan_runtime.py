"""The Vulkan runtime on a device, with its own test kernels: storing, recording once, re-submission, guards, counters.

Without a Vulkan driver they are skipped (HYBRID_REQUIRE_VULKAN=1: they fail), three also without the validation layer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support.devices import without_vulkan
from conformance.support.paths import DATA
from conformance.support.profile import LONG
from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.kernels.vulkan.api import OutOfDeviceMemory, VulkanError, VulkanUnavailable, vk
from hybrid.kernels.vulkan.build import SPIRV as BUILT
from hybrid.kernels.vulkan.build import read_manifest
from hybrid.kernels.vulkan.device import VulkanDevice, list_devices
from hybrid.kernels.vulkan.features import subgroup_fits
from hybrid.kernels.vulkan.instance import survey
from hybrid.kernels.vulkan.kernel import cache_path
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

SPIRV = DATA / "spirv"
ROWS, WIDTH = 16, 40


def affine(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y = x * scale + add, a row per group; the attribute `kernel` may name the one that writes past the end, `bound` the
    bytes of x and y that are bound."""
    push = struct.pack("<Iff", step.bind["K"], step.attrs.get("scale", 1.0), step.attrs.get("add", 0.0))
    kernel = rec.kernel(str(step.attrs.get("kernel", "toy.affine")), THREADS=rec.device.subgroup_size)
    grid = Live(str(step.attrs.get("extent", "rows")), 1, step.bind["T"])
    x, y = (t[name].parts[0].sub(0, int(step.attrs.get("bound", t[name].parts[0].size))) for name in "xy")
    rec.dispatch(kernel, [x], [y], push, (grid, 1, 1))


def bump(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """control.context += 1; y[0] = x[0] + context."""
    kernel = rec.kernel("toy.bump", THREADS=rec.device.subgroup_size)
    rec.dispatch(kernel, [t["x"].parts[0]], [t["y"].parts[0], rec.control], struct.pack("<Iff", 0, 0, 0))


BINDINGS = {"affine": affine, "bump": bump}


def open_toys(spirv: Path = SPIRV, **options: Any) -> VulkanDevice:
    try:
        return VulkanDevice("auto", spirv=spirv, bindings=BINDINGS, **options)
    except VulkanUnavailable as error:
        demanded = os.environ.get("HYBRID_VULKAN_VALIDATION", "") not in ("", "0")
        if options.pop("validation", None) and not demanded:  # where the layer is required, its absence is a failure
            open_toys(spirv, **options).close()
            pytest.skip(f"a driver, but no validation layer: {error}")
        without_vulkan(error)


@pytest.fixture(scope="module")
def shared_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VulkanDevice]:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    try:
        with open_toys(staging=4096) as device:
            yield device
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def device(shared_device: VulkanDevice) -> Iterator[VulkanDevice]:
    yield shared_device
    shared_device.reset()


def decl(name: str, kind: str = "state", rows: int = ROWS, offset: int = 0) -> TensorDecl:
    return TensorDecl(name, "f32", (rows, WIDTH), kind, offset)  # type: ignore[arg-type]


X = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH) / 8


def prepare(device: VulkanDevice, rows: int = ROWS, context: int = 0) -> None:
    """control, x (io) and y (state) as every plan here uses them."""
    control = np.array([rows, 0, context, 0, 0, 0, 0, 0], np.uint32)
    device.store(TensorDecl("control", "u32", (8,), "io"), Tensor.of(control))
    device.store(decl("x", "io"), Tensor.of(X))
    device.store(decl("y"))


def chain(*steps: Mapping[str, Any], rows: int = ROWS) -> Plan:
    """x -> a0 -> a1 ... -> y through the steps, activations one after another in the arena."""
    middle = [decl(f"a{i}", "activation", rows, i * decl("", "activation", rows).nbytes) for i in range(len(steps) - 1)]
    names = ["x", *[m.name for m in middle], "y"]
    done = tuple(
        Step(
            str(s.get("op", "affine")),
            f"step{i}",
            {"T": rows, "K": WIDTH},
            {"x": names[i], "y": names[i + 1]},
            {k: v for k, v in s.items() if k != "op"},
        )
        for i, s in enumerate(steps)
    )
    tensors = {t.name: t for t in (decl("x", "io", rows), decl("y", "state", rows), *middle)}
    return Plan("toy", rows, 0, done, tensors, sum(m.nbytes for m in middle))


# --- storing and staging ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [4, 4092, 4096, 4100, 8192, 3 * 4096, 3 * 4096 + 4, 10 * 4096 - 4])
def test_staging_is_exact_around_chunk_edges(device: VulkanDevice, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 2**31, nbytes // 4, dtype=np.int32)
    device.store(TensorDecl("s", "i32", data.shape, "state"))
    device.write("s", Tensor.of(data))
    np.testing.assert_array_equal(device.read("s").array, data)
    # The same through staging in both directions, whatever memory the device has.
    piece, out = device.tensor("s").parts[0], np.zeros(nbytes, np.uint8)
    device.transfer.upload(piece, data[::-1].copy().view(np.uint8))
    device.transfer.download(piece, out)
    np.testing.assert_array_equal(out.view(np.int32), data[::-1])
    device.transfer.fill(piece, 0x5A)
    device.transfer.download(piece, out)
    assert (out == 0x5A).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "q4_0", "q8_0"])
def test_weights_in_pieces_and_split_by_rows_read_back_the_same(device: VulkanDevice, dtype: str) -> None:
    rng = np.random.default_rng(3)
    whole = Tensor.empty(dtype, (100, 64))
    for part in whole.parts:
        part.view(np.uint8)[:] = rng.integers(0, 256, part.view(np.uint8).shape, dtype=np.uint8)
    limit, device.max_range = device.max_range, 2048
    try:
        device.store(
            TensorDecl("w", dtype, (100, 64), "weight"), parts=[lambda: whole.rows(0, 33), lambda: whole.rows(33, 100)]
        )
    finally:
        device.max_range = limit
    assert len(device.tensor("w").chunks) > 1
    for start, stop in ((0, 100), (7, 93), (63, 65), (5, 5)):
        for got, want in zip(device.read("w", start, stop).parts, whole.rows(start, stop).parts, strict=True):
            assert got.tobytes() == want.tobytes()
    with pytest.raises(VulkanError, match="split into"):
        _ = device.tensor("w").parts


def test_errors_of_storing_name_the_tensor(device: VulkanDevice) -> None:
    prepare(device)
    with pytest.raises(ValueError, match="y is already stored"):
        device.store(decl("y"))
    with pytest.raises(ValueError, match="16 rows; 16 from row 1"):
        device.write("y", Tensor.of(X), row=1)
    with pytest.raises(ValueError, match=r"y is f32\[16, 40\]; i32"):
        device.write("y", Tensor.of(X.astype(np.int32)))
    with pytest.raises(KeyError, match="no tensor 'z'"):
        device.read("z")
    with pytest.raises(ValueError, match="its parts gave 8"):
        device.store(decl("w", "weight"), parts=[lambda: Tensor.of(X[:8])])
    assert "w" not in device._tensors


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_computes_its_live_rows_only(device: VulkanDevice) -> None:
    prepare(device, rows=5)
    device.wait(device.compile(chain({"scale": 2.0}, {"add": 1.0})).submit())
    want = np.zeros_like(X)
    want[:5] = X[:5] * 2 + 1
    np.testing.assert_array_equal(device.read("y").array, want)


def test_a_smaller_bucket_uses_the_first_rows(device: VulkanDevice) -> None:
    prepare(device, rows=16)
    device.wait(device.compile(chain({"scale": 3.0}, rows=4)).submit())
    np.testing.assert_array_equal(device.read("y", 0, 4).array, X[:4] * 3)
    assert not device.read("y", 4).array.any()
    with pytest.raises(ValueError, match="y is stored with shape"):
        device.compile(Plan("big", 32, 0, (), {"y": decl("y", "state", 32)}))


def test_the_hundredth_submit_gives_the_bits_of_the_first_and_costs_nothing_but_itself(device: VulkanDevice) -> None:
    prepare(device)
    program = device.compile(chain({"scale": 1.1}, {"add": 0.3}, {"scale": 0.7}))
    device.wait(program.submit())
    first, before = device.read("y").array.tobytes(), device.counters.copy()
    for _ in range(99):
        device.wait(program.submit())
    spent = device.counters.minus(before)
    assert device.read("y").array.tobytes() == first
    assert (spent.submits, spent.dispatches, spent.barriers) == (99, 99 * program.dispatches, 99 * program.barriers)
    for field in ("allocations", "descriptor_writes", "pipelines", "recordings", "transfers", "bytes_up", "bytes_down"):
        assert getattr(spent, field) == 0, field


def test_ranges_of_different_sizes_have_descriptor_sets_of_their_own(device: VulkanDevice) -> None:
    """Though they begin at the same byte; equal ones share a set."""
    prepare(device)
    names = {"x": "x", "y": "y"}
    one = Step("affine", "one row", {"T": 1, "K": WIDTH}, names, {"bound": 4 * WIDTH})
    every = Step("affine", "every row", {"T": ROWS, "K": WIDTH}, names, {"scale": 2.0})
    before = device.counters.copy()
    program = device.compile(Plan("ranges", ROWS, 0, (one, every, every), {"x": decl("x", "io"), "y": decl("y")}))
    assert device.counters.minus(before).descriptor_writes == 3 * 3, "one set is of the grids"
    device.wait(program.submit())
    np.testing.assert_array_equal(device.read("y").array, X * 2)


def test_runs_of_one_submit_follow_each_other(device: VulkanDevice) -> None:
    prepare(device)
    steps = (
        Step("affine", "there", {"T": ROWS, "K": WIDTH}, {"x": "x", "y": "y"}, {"add": 1.0}),
        Step("affine", "back", {"T": ROWS, "K": WIDTH}, {"x": "y", "y": "x"}, {"add": 0.5}),
    )
    program = device.compile(Plan("loop", ROWS, 0, steps, {"x": decl("x", "io"), "y": decl("y")}))
    device.read("x")  # uploads that wait for the next submit are done
    before = device.counters.copy()
    device.wait(program.submit(times=7))
    assert device.counters.minus(before).submits == 1
    np.testing.assert_array_equal(device.read("x").array, X + 7 * 1.5)


def test_control_written_inside_a_plan_resizes_the_grids_after_it(device: VulkanDevice) -> None:
    prepare(device, rows=0, context=0)
    program = device.compile(chain({"op": "bump"}, {"extent": "context", "add": 1.0}))
    for run in (1, 2, 3):
        device.poison(0)
        device.wait(program.submit())
        assert device.read("control").array[2] == run
        y = device.read("y").array
        assert y[0, 0] == X[0, 0] + run + 1 and (y[:run, 1:] == 1).all() and not y[run:].any()


def test_counts_in_any_word_bound_the_rows_of_their_steps(device: VulkanDevice) -> None:
    """As a mixture's experts have them: two steps with separate counts beside one with the pass's, which another step
    writes in between."""
    prepare(device, rows=5)
    a, b = decl("a"), decl("b")
    experts = TensorDecl("experts", "u32", (8,), "state")
    for d, start in ((a, None), (b, None), (experts, np.array([9, 3, 0, 0, 0, 0, 0, 9], np.uint32))):
        device.store(d, None if start is None else Tensor.of(start))
    bind = {"T": ROWS, "K": WIDTH}
    plan = Plan(
        "counted",
        ROWS,
        0,
        (
            Step(
                "affine", "first", bind, {"x": "x", "y": "a"}, {"extent": "1", "add": 1.0}, extent="1", counts="experts"
            ),
            Step("affine", "pass", bind, {"x": "x", "y": "y"}, {"add": 2.0}),
            Step("bump", "count", bind, {"x": "x", "y": "a"}, counts="experts"),  # experts[2] += 1
            Step("affine", "last", bind, {"x": "x", "y": "b"}, {"extent": "2"}, extent="2", counts="experts"),
        ),
        {t.name: t for t in (decl("x", "io"), decl("y"), a, b, experts)},
        0,
    )
    program = device.compile(plan)
    for run in (1, 2):
        device.wait(program.submit())
        ran = {n: int((device.read(n).array != 0)[:, 1:].any(axis=1).sum()) for n in ("a", "y", "b")}
        assert ran == {"a": 3, "y": 5, "b": run}
        assert device.read("experts").array[[1, 2, 7]].tolist() == [3, run, 9]
        assert not device.read("control").array[1:].any()


def test_uploads_and_submits_keep_their_order(device: VulkanDevice) -> None:
    prepare(device)
    device.store(decl("s"))
    steps = (Step("affine", "s", {"T": ROWS, "K": WIDTH}, {"x": "s", "y": "y"}),)
    program = device.compile(Plan("s", ROWS, 0, steps, {"s": decl("s"), "y": decl("y")}))
    for value in range(20):
        device.write("s", Tensor.of(np.full((ROWS, WIDTH), value, np.float32)))
        program.submit()
        assert (device.read("y").array == value).all()


def test_of_two_uploads_that_wait_together_the_later_one_wins() -> None:
    """They are in one command buffer, where only a barrier orders copies to the same bytes: without it the validation
    layer's hazard check fails this, even on a driver that keeps order."""
    with open_toys(validation="sync") as device:
        prepare(device)
        piece, out, want = device.tensor("y").parts[0], np.zeros(X.nbytes, np.uint8), np.zeros(X.size, np.float32)
        device.transfer.upload(piece, out)
        before = device.counters.copy()
        for value in range(1, 9):
            device.transfer.upload(piece.sub(value * 64, 1024), np.full(256, value, np.float32).view(np.uint8))
            want[value * 16 : value * 16 + 256] = value
        assert device.counters.minus(before).transfers == 0 and device.transfer.pending
        device.transfer.download(piece, out)
        np.testing.assert_array_equal(out.view(np.float32), want)
        device.check_validation()


def test_a_ticket_that_no_submit_gave_is_refused(device: VulkanDevice) -> None:
    prepare(device)
    ticket = device.compile(chain({})).submit()
    with pytest.raises(ValueError, match=f"no such ticket: {ticket + 1000}; the last submit was"):
        device.wait(ticket + 1000)
    with pytest.raises(ValueError, match="no such ticket"):
        device.read("control", ticket=ticket + 1000)
    device.wait(ticket)


def test_profiled_steps_have_names_and_times(device: VulkanDevice) -> None:
    prepare(device)
    program = device.compile(chain({}, {}, {}), profile=True)
    assert program.times() == []
    device.wait(program.submit())
    times = program.times()
    assert [t.name for t in times] == ["step0", "step1", "step2"]
    assert all(t.duration >= 0 for t in times) and times[-1].start + times[-1].duration < 60


def test_a_failed_compilation_gives_a_reason_and_frees_memory(device: VulkanDevice) -> None:
    prepare(device)
    programs = device.memory()["programs"]
    with pytest.raises(
        VulkanError,
        match=r"no binding for operation 'conv'; known: affine, bump; a new one is kernels/vulkan/ops/conv.py",
    ):
        device.compile(chain({"op": "conv"}))
    with pytest.raises(VulkanError, match=r"no SPIR-V module 'toy\.gone'.*nearest: toy\.affine"):
        device.compile(chain({"kernel": "toy.gone"}))
    with pytest.raises(VulkanError, match=r"no specialisation constants \['ROWS'\]"):
        device.kernel("toy.affine", ROWS=1)
    with pytest.raises(VulkanError, match=r"does not fit this device: it needs .*(shared memory|workgroup)"):
        device.kernel("toy.affine", THREADS=1 << 20)
    assert device.memory()["programs"] == programs and not device.programs


# --- guards, budget, cache, closing ----------------------------------------------------------------------------------


def test_a_write_past_the_end_is_found_by_its_guard() -> None:
    with open_toys(guard=64) as device:
        prepare(device)
        good = device.compile(chain({}, {}))
        device.poison(0x7F)
        device.wait(good.submit())
        assert device.check_guards() == []
        device.wait(device.compile(chain({"kernel": "toy.stray", "scale": float(ROWS * WIDTH)}, {})).submit())
        assert [n.rstrip("'") for n in device.check_guards()] == ["toy:a0"]


def test_a_budget_refuses_with_purpose_and_sizes() -> None:
    with open_toys(budget=4 << 20, staging=1 << 16) as device:
        prepare(device)
        with pytest.raises(OutOfDeviceMemory, match=r"8\.0 MiB for weights requested, [0-9.]+ MiB available \(held"):
            device.store(TensorDecl("w", "f32", (2048, 1024), "weight"))
        held = device.memory()
        assert held["weights"] == 0 and held["io"] > 0
        device.store(decl("w", "weight"), Tensor.of(X))
        assert device.memory()["weights"] == decl("w").nbytes


def test_pipelines_are_kept_on_disk_and_a_damaged_file_is_only_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run() -> bytes:
        with open_toys() as device:
            prepare(device)
            device.wait(device.compile(chain({"scale": 2.0})).submit())
            return device.read("y").array.tobytes()

    first = run()
    with open_toys() as device:
        path = cache_path(device.report.uuid, device.report.driver)
    assert path.is_file() and path.is_relative_to(tmp_path) and not caplog.records
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run() == first and "is damaged" in caplog.text
    caplog.clear()
    assert run() == first and not caplog.records


def test_closing_leaves_no_object_and_the_validation_layer_is_silent() -> None:
    device = open_toys(validation="sync")
    with device:
        prepare(device)
        program = device.compile(chain({"op": "bump"}, {"extent": "context"}, {"scale": 2.0}), profile=True)
        device.wait(program.submit(times=3))
        device.write("y", Tensor.of(X))
        device.poison(1)
        assert program.times() and device.read("y").array.shape == X.shape
        device.check_validation()
    device.close()
    calls: tuple[Callable[[], Any], ...] = (
        program.submit,
        device.check_guards,
        lambda: device.read("y"),
        lambda: device.write("x", Tensor.of(X)),
        lambda: device.store(decl("new")),
        lambda: device.compile(chain({})),
        lambda: device.reserve(1),
        lambda: device.poison(0),
        lambda: device.kernel("toy.affine"),
        lambda: device.loading(0).__enter__(),
    )
    for call in calls:
        with pytest.raises(VulkanError, match="closed"):
            call()


@pytest.mark.slow
def test_every_shipped_module_makes_a_pipeline_or_names_the_feature_it_misses() -> None:
    """Under the validation layer where it is installed: it also checks the SPIR-V. A fourth of them in the short
    profile."""
    try:
        device = VulkanDevice("auto", validation=True)
    except VulkanUnavailable:
        device = open_toys(spirv=BUILT)
    with device:
        manifest = read_manifest(BUILT)
        assert manifest
        for name, entry in list(manifest.items())[:: 1 if LONG else 4]:
            try:
                device.kernel(name, **{k: device.subgroup_size for k in entry["constants"] if k == "SUBGROUP"})
            except VulkanError as error:
                assert "does not fit this device" in str(error), error
                assert "feature" in str(error) or "storage buffers" in str(error), error


def test_a_validation_message_fails_the_close() -> None:
    device = open_toys(validation=True)
    vk.vkCreateSemaphore(device.handle, vk.VkSemaphoreCreateInfo(), None)  # and never destroyed
    with pytest.raises(VulkanError, match="validation layer reported"):
        device.close()


def test_the_devices_of_this_machine_are_listed_with_their_report() -> None:
    try:
        devices = list_devices()
    except VulkanUnavailable as error:
        without_vulkan(error)
    for (info, report), listed in zip(survey(), devices, strict=True):
        assert info == listed and report.limits.subgroup >= 1 and report.heaps and report.driver
        assert {f.name for f in report.features} >= {"shaderIntegerDotProduct", "timelineSemaphore"}


@pytest.mark.parametrize(("size", "fits"), [(4, False), (8, True), (16, True), (32, True), (64, False)])
def test_subgroups_that_the_kernels_cannot_use_are_refused(device: VulkanDevice, size: int, fits: bool) -> None:
    """A report as of a device that has this one size."""
    limits = replace(device.report.limits, subgroup=size, min_subgroup=size, max_subgroup=size)
    report = replace(device.report, limits=limits)
    report = replace(report, features=(subgroup_fits(report),))
    if fits:
        report.demand("toy")
    else:
        with pytest.raises(VulkanUnavailable, match=f"toy .*subgroups of 8, 16 or 32 lanes.*here they have {size}"):
            report.demand("toy")
