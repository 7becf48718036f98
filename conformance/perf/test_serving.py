"""perf.serving: it measures, in a small run."""

from __future__ import annotations

import hybrid
from conformance.support.models import BOTH, cut
from hybrid.checkpoint import open_checkpoint
from hybrid.core.places import DEMO


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


def test_answers_with_a_schema_take_fewer_passes():
    """Their texts stay the same. With fixed blanks nearly every expected token is forced."""
    from hybrid.perf.serving import structured

    with hybrid.load(cut(open_checkpoint(DEMO), BOTH), "cpu", slots=8, ctx=256, precision="exact") as model:
        plain, found = (structured.measure(model, 1, True, drafts) for drafts in (False, True))
    assert plain.passes >= plain.tokens and not plain.drafted
    assert found.texts == plain.texts and found.accepted >= 0.9 * found.drafted > 0
    assert found.passes == plain.passes - found.accepted  # how many depends on masks that come in time
