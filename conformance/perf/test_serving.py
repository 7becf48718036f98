"""python -m perf.serving.scheduler: it measures, in a small run."""

from __future__ import annotations


def test_its_cost_is_measured(capsys):
    from hybrid.perf.serving import scheduler

    spent = scheduler.measure(3, 20)
    assert all(len(us) >= 18 and min(us) >= 0 and sum(us) > 0 for us in spent.values())
    assert scheduler.main(["--rows", "2", "--passes", "5"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["rows", "2"]


def test_the_cost_of_readers_is_measured():
    from hybrid.perf.serving import readers

    spent = readers.measure(3, 20)
    assert 0 < spent.engine <= spent.process and spent.passes >= 15
