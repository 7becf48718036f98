"""python -m hybrid.bench as a server's readers see it: arriving requests, conversations, energy."""

from __future__ import annotations

import gc
import json
import sys
import threading
import types
from itertools import pairwise
from pathlib import Path

import pytest

from conformance.support.garbage import UNTOUCHED
from hybrid.bench import __main__ as bench
from hybrid.bench import requests, talk
from hybrid.bench.requests import Served, quantiles, summary
from hybrid.core import garbage
from hybrid.core.errors import QueueFull
from hybrid.devices import energy
from hybrid.devices.energy import Energy, Meter, meter_for
from hybrid.engine.handle import Handle
from hybrid.engine.request import Completion, Options, Request, Timings, Usage, Wakeups
from hybrid.engine.stats import Metrics


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench collects garbage once its model is loaded."""
    monkeypatch.setattr(garbage, "gc", UNTOUCHED)


SMALL = ["--random", "gemma3-270m", "--layers", "1", "--vocab", "512", "--device", "cpu"]


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_requests_again():
    def drawn(seed, n=200):
        return requests.requests(n, 5.0, (4, 40), (1, 9), 512, 3, seed)

    assert drawn(1) == drawn(1) != drawn(2)
    many = drawn(1)
    assert {len(r.ids) for r in many} == set(range(4, 41)) and {r.n for r in many} == set(range(1, 10))
    assert len({r.ids[:3] for r in many}) == 1 and len({r.ids[3:] for r in many}) == 200
    assert many[0].at == 0 and [r.at for r in many] == sorted(r.at for r in many)
    assert 30 < many[-1].at < 55, "200 requests at 5 per second"
    assert all(r.at == 0 for r in requests.requests(5, None, (2, 2), (1, 1), 9))


def served(submitted: float, times: list[float], prompt=10, cached=0, finish="length") -> Served:
    usage = Usage(prompt, cached, len(times))
    return Served(
        submitted, tuple(times), Completion("", tuple(range(len(times))), finish, None, usage, Timings(0.0, 0.0, 0.0))
    )


def test_figures_are_those_of_the_readers():
    runs = [served(0.0, [1.0, 1.5, 2.0, 4.0]), served(0.5, [1.5, 2.5, 3.5], cached=6)]
    found = summary(runs, Metrics(passes=2, preemptions=1), Metrics(passes=12, preemptions=4, evictions=7))
    assert found["seconds"] == 4.0 and found["generated_tokens"] == 7 and found["tokens_per_second"] == 7 / 4
    assert found["tokens_per_second_while_all_run"] == pytest.approx(3 / 2.0)  # 2.0, 2.5, 3.5 of 1.5 to 3.5
    assert (found["prompt_tokens"], found["cached_tokens"]) == (20, 6)
    assert found["first_token_ms"] == quantiles([1.0, 1.0]) and found["between_tokens_ms"]["max"] == 2000.0
    assert (found["passes"], found["preemptions"], found["evictions"]) == (10, 3, 7)
    assert (
        summary([served(0.0, [1.0]), served(0.0, [2.0])], Metrics(), Metrics())["tokens_per_second_while_all_run"]
        is None
    )
    with pytest.raises(RuntimeError, match="ended with 'context' after 1 tokens: the measurement is invalid"):
        summary([served(0.0, [1.0], finish="context")], Metrics(), Metrics())


def test_quantiles_are_of_all_values():
    assert quantiles([i / 1000 for i in range(101)]) == pytest.approx(
        {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    )


def asked(ids, n) -> Request:
    """A request as the scheduler holds it."""
    request = Request(0, ids, Options(max_tokens=n))
    request.last = len(ids) + n
    return request


def test_a_full_queue_is_asked_again():
    """A submit that refuses twice, and answers from another thread."""
    refusals, seen = [2], []

    def submit(ids, *, max_tokens, ignore_eos):
        assert ignore_eos
        if refusals[0]:
            refusals[0] -= 1
            raise QueueFull(3, 0.001)
        seen.append(ids)
        request = asked(ids, max_tokens)

        def answer():
            wakeups = Wakeups()
            for i in range(max_tokens):
                request.push(i)
                request.notify(wakeups)
                wakeups.send()

        threading.Thread(target=answer).start()
        return Handle(request)

    wanted = requests.requests(3, 1000.0, (2, 5), (1, 4), 50)
    found = requests.serve(submit, wanted)
    assert not refusals[0] and sorted(seen) == sorted(r.ids for r in wanted)
    assert [len(s.times) for s in found] == [r.n for r in wanted]
    assert all(s.submitted <= s.times[0] for s in found)


@pytest.mark.slow
def test_requests_on_a_model(capsys):
    options = ["--requests", "5", "-b", "2", "--rate", "100", "--prompt-lengths", "4,20", "--output-lengths", "2,6"]
    assert bench.main([*SMALL, *options, "--json", "--seed", "3", "--energy"]) == 0
    out = json.loads(capsys.readouterr().out)
    wanted = requests.requests(5, 100.0, (4, 20), (2, 6), 512, 0, 3)
    found = out["requests"]
    assert found["prompt_tokens"] == sum(len(r.ids) for r in wanted) and found["generated_tokens"] == sum(
        r.n for r in wanted
    )
    assert found["passes"] > 0 and out["slots"] == 2 and out["context"] == 27
    assert found["energy"]["joules"] is None or found["energy"]["joules"] > 0
    assert bench.main([*SMALL, *options]) == 0
    text = capsys.readouterr().out
    for part in (
        "up to 2 sequences of 27 positions",
        "to the first token    p50",
        "between tokens        p50",
        "preemptions",
    ):
        assert part in text, text


@pytest.mark.slow
def test_no_collection_looks_through_the_model_while_it_is_asked(monkeypatch):
    looked = []

    def asked(args, model, meter):
        looked.append(any(found is model for found in gc.get_objects()))
        return {}

    monkeypatch.setattr("hybrid.bench.online._requests", asked)
    monkeypatch.setattr(garbage, "gc", gc)
    assert bench.main([*SMALL, "--requests", "1", "--prompt-lengths", "3", "--output-lengths", "2", "--json"]) == 0
    assert looked == [False]


@pytest.mark.slow
def test_a_conversation_on_a_model(capsys):
    options = ["--conversation", "3", "--prompt-lengths", "33,40", "--output-lengths", "5"]
    assert bench.main([*SMALL, *options, "--json"]) == 0
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert len(turns) == 3 and all(t["first_ms"] > 0 and t["first_ms_alone"] > 0 for t in turns)
    for before, turn in pairwise(turns):
        assert 33 + 5 <= turn["prompt"] - before["prompt"] <= 40 + 5
        assert turn["cached"] == (before["prompt"] + 5 - 1) // 32 * 32, "whole blocks of the tokens run"
    assert talk.text(turns)[1].split()[:2] == ["1", str(turns[0]["prompt"])]


@pytest.mark.slow
def test_a_conversations_energy_is_that_of_its_turns(monkeypatch, capsys):
    """Only of its turns, not of the prompts that it is compared with, per token of its answers."""
    reads = [0]

    def counter():
        reads[0] += 1
        return 10.0 * reads[0]

    monkeypatch.setattr("hybrid.bench.online.meter_for", lambda device: Meter("c", counter=counter))
    monkeypatch.setattr(energy, "SHORTEST", 0.0)
    options = ["--conversation", "3", "--prompt-lengths", "5", "--output-lengths", "4", "--energy"]
    assert bench.main([*SMALL, *options, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [t["answer"] for t in out["turns"]] == [4, 4, 4] and reads == [6]
    assert out["energy"]["joules"] == 30.0 and out["energy"]["joules_per_token"] == 2.5
    assert bench.main([*SMALL, *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("energy: 2.5 J per token, ")


def test_a_cached_prompt_invalidates_a_conversation():
    def submit(ids, *, max_tokens, ignore_eos):
        request = asked(ids, max_tokens)
        request.cached = 32
        for _ in range(max_tokens):
            request.push(1)
        return Handle(request)

    with pytest.raises(RuntimeError, match="32 tokens of a prompt that is new were found in the cache"):
        talk.talk(submit, 1, (40, 40), (2, 2), 50)


@pytest.mark.slow
def test_consecutive_batches(capsys):
    assert bench.main([*SMALL, "-b", "1,3", "-p", "5", "-n", "3", "-r", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [(r["test"], r["tokens"]) for r in found] == [
        ("prefill 5 @ 0", 5),
        ("decode 3 @ 0", 3),
        ("prefill 5 @ 0 x 3", 15),
        ("decode 3 @ 0 x 3", 9),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--requests", "2", "--conversation", "2"], "--requests or --conversation: one of the two"),
        (["--requests", "2", "-b", "1,2"], "-b takes one number with --requests and --conversation"),
        (["--rate", "3", "--conversation", "2"], "--conversation takes no --rate: leave out one or the other"),
        (
            ["--rate", "3", "--seed", "0"],
            "--rate belongs to --requests, --seed belongs to --requests or --conversation: give that",
        ),
        (["--requests", "2", "-p", "512", "-r", "3"], "--requests takes no --prompt, no --repetitions: leave out"),
        (
            ["--conversation", "2", "--shared-prefix", "9", "-r", "1"],
            "--conversation takes no --repetitions, no --shared-prefix",
        ),
        (["--rate", "0", "--requests", "2"], "'0' is not"),
        (["--requests", "2", "--shared-prefix", "128"], "less than the shortest prompt (128)"),
        (["--requests", "0"], "'0' is not a positive number"),
        (["--requests", "2", "--prompt-lengths", "9,3"], "'9,3' is no length and no pair of them such as 16,1024"),
        (["--requests", "2", "--output-lengths", "0,3"], "'0,3' has a 0: give counts such as 1,8,32"),
        (["-b", "0"], "'0' has a 0: give counts such as 1,8,32"),
    ],
)
def test_misuse_is_one_line(capsys, options, says):
    try:
        code = bench.main([*SMALL, *options])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and says in err and err.startswith("error: ") and err.count("\n") == 1


# --- energy ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move."""
    now = [0.0]
    monkeypatch.setattr(energy.time, "perf_counter", lambda: now[0])
    return now


def device(name: str, kind: str = "discrete") -> types.SimpleNamespace:
    info = types.SimpleNamespace(name=name, kind=kind)
    return types.SimpleNamespace(backend="cpu" if name == "cpu" else "vulkan", info=info)


def used(meter: Meter, clock: list[float], seconds: float, work=lambda: None) -> Energy:
    with meter.running():
        clock[0] += seconds
        work()
    return meter.take()


def test_a_counter_is_read_around_the_runs(clock):
    joules = [100.0]
    meter = Meter("c", counter=lambda: joules[0])
    for _ in range(2):
        joules[0] += 50.0  # between runs: not counted
        with meter.running():
            clock[0] += 1.0
            joules[0] += 30.0
    found = meter.take()
    assert found == Energy(60.0, 2.0, "c") and found.watts == 30.0 and found.per(120) == 0.5
    assert found.line(120) == "energy: 0.5 J per token, 30.0 W (c; 2.0 s)"
    assert meter.take().joules is None, "no run since"


def test_runs_too_short_for_a_counter_have_no_energy(clock):
    found = used(Meter("c", counter=lambda: 1.0), clock, 0.1)
    assert (
        found.joules is None
        and found.line(9) == "energy: not available: runs of 0.10 s are too short for c: ask for more tokens"
    )


def test_a_power_is_sampled_while_it_runs(clock):
    powers = iter(range(10**6))
    looked = threading.Event()

    def power() -> float:
        n = next(powers)
        if n == 3:
            looked.set()
        clock[0] += 0.25
        return 20.0 + n % 2

    found = used(Meter("p", power=power), clock, 2.0, lambda: looked.wait(30))
    assert looked.is_set() and found.joules is not None
    assert 20.0 * (found.seconds - 0.25) <= found.joules <= 21.0 * found.seconds and found.seconds >= 3.0


def test_a_sensor_that_goes_is_an_error():
    calls = [0]

    def power() -> float:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError("gone")
        return 1.0

    with pytest.raises(RuntimeError, match="p cannot be read any more: gone"), Meter("p", power=power).running():
        pass


def test_rapl_adds_up_processors_and_wraps_around(tmp_path, clock):
    for name, start in (("intel-rapl:0", 900_000), ("intel-rapl:1", 5), ("intel-rapl:0:0", 7)):
        folder = tmp_path / "class/powercap" / name
        folder.mkdir(parents=True)
        (folder / "energy_uj").write_text(str(start))
        (folder / "max_energy_range_uj").write_text("1000000")

    def work():
        (tmp_path / "class/powercap/intel-rapl:0/energy_uj").write_text("400000")  # wrapped around: 500000 more
        (tmp_path / "class/powercap/intel-rapl:1/energy_uj").write_text("250005")

    for one in (device("cpu"), device("llvmpipe", "cpu")):
        meter = meter_for(one, tmp_path)
        found = used(meter, clock, 2.0, work)
        assert found.joules == pytest.approx(0.75) and found.source == "RAPL, whole processors"
        (tmp_path / "class/powercap/intel-rapl:0/energy_uj").write_text("900000")
        (tmp_path / "class/powercap/intel-rapl:1/energy_uj").write_text("5")


def test_amdgpu_is_sampled(tmp_path, clock):
    for i, (name, files) in enumerate({"coretemp": (), "amdgpu": ("power1_average",)}.items()):
        folder = tmp_path / f"class/hwmon/hwmon{i}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(name + "\n")
        for file in files:
            (folder / file).write_text("15000000\n")
    meter = meter_for(device("AMD Radeon 780M (RADV)", "integrated"), tmp_path)
    assert used(meter, clock, 2.0) == Energy(30.0, 2.0, "amdgpu's power, sampled")


def nvml(names: list[str], energies: list[int] | None) -> types.ModuleType:
    made = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def total(handle: int) -> int:
        if energies is None:
            raise NVMLError("not supported")
        return energies.pop(0)

    made.NVMLError = NVMLError
    made.nvmlInit = lambda: None
    made.nvmlDeviceGetCount = lambda: len(names)
    made.nvmlDeviceGetHandleByIndex = lambda i: i
    made.nvmlDeviceGetName = lambda i: names[i].encode()
    made.nvmlDeviceGetTotalEnergyConsumption = total
    made.nvmlDeviceGetPowerUsage = lambda i: 200_000
    return made


def test_nvml_counts_millijoules(monkeypatch, clock):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["NVIDIA T4", "NVIDIA H200"], [0, 1000, 701_000]))
    found = used(meter_for(device("NVIDIA H200")), clock, 2.0)
    assert found == Energy(700.0, 2.0, "NVML's energy counter") and found.watts == 350.0


def test_missing_counters_are_reported(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    amd = tmp_path / "class/hwmon/hwmon0"
    amd.mkdir(parents=True)
    (amd / "name").write_text("amdgpu")
    said = {
        "cpu": "no RAPL counters in ",
        "NVIDIA H200": "NVML is read by nvidia-ml-py: pip install nvidia-ml-py",
        "AMD Radeon": "amdgpu has no power1_average or power1_input in ",
        "Mali-G720": "no counter is known for Mali-G720",
    }
    for name, text in said.items():
        meter = meter_for(device(name), tmp_path)
        with meter.running():
            pass
        assert meter.take().line(1).startswith(f"energy: not available: {text}")
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["NVIDIA H200"] * 8, [0]))
    assert "NVML sees 8 such GPUs" in meter_for(device("NVIDIA H200"), tmp_path).source
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["NVIDIA P4"], None))
    assert meter_for(device("NVIDIA P4"), tmp_path).source == "NVML's power, sampled"


def test_counters_that_only_root_may_read_are_named(monkeypatch, tmp_path):
    folder = tmp_path / "class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text("1")
    read = Path.read_text

    def refuse(path: Path, *args: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert meter_for(device("cpu"), tmp_path).source == f"{folder}/energy_uj: Permission denied"
