"""python -m perf.tune: the timed candidates, the rejected candidates, and the table that it writes."""

from __future__ import annotations

import json

import pytest

from hybrid.harness.compare import Disagreement
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.tuning import TABLES, Family, Table
from hybrid.perf import tune
from hybrid.perf.tune import Sweep, Tuner, entries
from hybrid.perf.tune import table as tune_table
from hybrid.spec.load import load_toml

QUICK = ["sample", "--workload", "demo", "--seconds", "0.001", "--footprint", "1"]
ABOUT = {"device": "d", "driver": "v", "commit": "c", "command": "python"}


def use(**values):
    return tuple(values.items())


def swept(name, facts, default, **seconds):
    made = Sweep(name, facts, use(threads=default), 1000, 10**12)
    made.seconds = {use(threads=int(k[1:])): v for k, v in seconds.items()}
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for path in TABLES.glob("*.toml"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(tune_table, "TABLES", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_json_has_a_time_for_every_candidate(devices, capsys):
    devices.get("vulkan")
    assert tune.main([*QUICK, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["family"] == "sample" and out["workload"] == "demo.decode" and out["facts"] == {"vocab": 4096}
    assert [c["use"] for c in out["candidates"]] == [{"threads": 256}, {"threads": 1024}]
    assert all(c["seconds"] > 0 for c in out["candidates"]) and out["device"] and out["driver"] and out["commit"]


@pytest.mark.slow
def test_workloads_can_be_changed(devices, capsys):
    devices.get("vulkan")
    assert tune.main([*QUICK, "--set", "V=8192", "--set", "O=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"] == {"vocab": 8192}


@pytest.mark.slow
def test_a_table_is_written_with_where_its_figures_come_from(devices, folder, capsys):
    device = devices.get("vulkan")
    before = load_toml(folder / f"{device.tuning.name}.toml", Table)
    assert tune.main([*QUICK, "--write", "--table", device.tuning.name]) == 0
    table = load_toml(folder / f"{device.tuning.name}.toml", Table)
    assert table.match == before.match and table.measured["sample"].device == device.name
    assert table.measured["sample"].command.startswith("python -m perf.tune sample --workload demo")
    assert "threads=1024" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_candidate_is_an_error_and_is_never_timed(devices, folder, capsys, monkeypatch):
    device, ran = devices.get("vulkan"), []

    def judge(spec, opened, case):
        threads = opened.tuning.choose("sample", {"threads": 256}, vocab=case.bind["V"])["threads"]
        if threads == 1024:
            raise Disagreement("element 5 is 7")
        ran.append(threads)

    monkeypatch.setattr(tune, "run_case", judge)
    before = (folder / f"{device.tuning.name}.toml").read_text()
    assert tune.main([*QUICK, "--write"]) == 1
    out, err = capsys.readouterr()
    assert "candidates that disagree with the oracle, not timed: sample threads=1024: element 5 is 7" in err
    assert "threads=1024 " not in out and ran == [256] * tune.PROOFS
    assert (folder / f"{device.tuning.name}.toml").read_text() == before


@pytest.mark.slow
def test_a_candidate_that_does_not_fit_is_skipped_and_reported(devices, folder, capsys, monkeypatch):
    def judge(spec, opened, case):
        if opened.tuning.choose("sample", {"threads": 256}, vocab=case.bind["V"])["threads"] == 1024:
            raise VulkanError("too many threads")

    monkeypatch.setattr(tune, "run_case", judge)
    devices.get("vulkan")
    assert tune.main(QUICK) == 0
    assert "# unfit here: threads=1024: too many threads" in capsys.readouterr().out


def test_the_default_stays_where_little_is_gained():
    assert entries([swept("w", {"vocab": 9}, 256, t256=1.0, t1024=0.98)], 0.03) == []
    assert entries([swept("w", {"vocab": 9}, 256, t256=1.0, t1024=2.0)], 0.03) == []


def test_one_entry_serves_workloads_of_the_same_types_and_exceptions_come_before_it():
    sweeps = [
        swept("a", {"w": "q4_0", "n": 1}, 256, t256=2.0, t1024=1.0),
        swept("b", {"w": "q4_0", "n": 2}, 256, t256=3.0, t1024=1.0),
        swept("c", {"w": "q4_0", "n": 3}, 256, t256=1.0, t1024=1.2),
        swept("d", {"w": "q8_0", "n": 3}, 256, t256=1.0, t1024=1.2),
    ]
    found = entries(sweeps, 0.03)
    assert [(f.when, f.use) for f in found] == [
        ({"w": "q4_0", "n": 3}, {"threads": 256}),
        ({"w": "q4_0"}, {"threads": 1024}),
    ]
    assert (
        len(found[1].notes) == 3
        and "a: 1000000.0 us, 1 kB/s, 1 TFLOPS; default 2000000.0; worst 2000000.0 (threads=256)" in found[1].notes
    )


def test_a_section_replaces_its_own_and_no_other():
    old = '# head\nschema = 1\n\n[match]\nvendor = "x"\n\n# ---- a\nold a\n\n# ---- c\nold c\n'
    made = tune_table.merged(tune_table.merged(old, "a", "# ---- a\nnew a\n"), "b", "# ---- b\nnew b\n")
    assert (
        made == '# head\nschema = 1\n\n[match]\nvendor = "x"\n\n# ---- a\nnew a\n\n# ---- b\nnew b\n\n# ---- c\nold c\n'
    )
    assert tune_table.merged(made, "b", "# ---- b\nnew b\n") == made


def test_a_new_table_matches_the_device_that_it_was_made_on(devices, folder):
    device = devices.get("vulkan")
    made = tune_table.section("sample", ABOUT, [tune.Found({}, {"threads": 1024}, ("w: 1 us",))], [])
    tune_table.written("mine", device, "sample", made)
    table = load_toml(folder / "mine.toml", Table)
    assert table.match.vendor == device.report.vendor and table.match.driver == device.report.driver_id
    assert dict(table.family[0].use) == {"threads": 1024} and table.measured["sample"].commit == "c"


def test_many_candidates_are_searched_number_by_number():
    """The optimum of a sum is found with far fewer timings than there are combinations."""
    family = Family(name="f", summary="", op="sample", facts=("n",), candidates={k: (1, 2, 4, 8) for k in "abcd"})
    timed = []

    class Fake(Tuner):
        def _proof(self, use, types, like):
            return True

        def _time(self, sweep, case, uses):
            timed.extend(uses)
            sweep.seconds.update(
                {u: sum(abs(v - w) for (_, v), w in zip(u, (8, 1, 4, 2), strict=True)) + 1.0 for u in uses}
            )

    class Spec:
        def nbytes(self, *args):
            return 1

        flops = nbytes

    class Small:
        bind, dtypes, attrs = {}, {}, {}

    found = Fake(None, family, Spec(), 0.0, 0).sweep("w", Small(), {"n": 1}, use(a=1, b=1, c=1, d=1))
    assert min(found.seconds, key=found.seconds.get) == use(a=8, b=1, c=4, d=2)
    assert len(timed) == len(set(timed)) < 64 < 4**4


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["simple"], 1, "there is no 'simple'; did you mean 'sample'?"),
        (["sample", "--workload", "nothing"], 1, "has no workload nothing"),
        (["sample", "--workload", "gemma3-27b"], 1, "no workload of sample gemma3-27b asks for sample here"),
        (["sample", "--device", "cpu"], 1, "the cpu device has no tuning table"),
        (["sample", "--seconds", "x"], 2, "'x' is not a number above 0"),
        (["sample", "--set", "V=x"], 2, "'V=x' is no setting such as T=2048 or x=f16"),
        (["sample", "--set", "logit=f16"], 1, "--set logit: sample has no such axis or tensor; did you mean 'logits'?"),
    ],
)
def test_errors_are_one_line(devices, capsys, options, code, says):
    devices.get("vulkan")
    try:
        found = tune.main(options)
    except SystemExit as end:
        found = end.code
    err = capsys.readouterr().err
    assert found == code and says in err and err.startswith("error: ") and err.count("\n") == 1
