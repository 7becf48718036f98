"""Cached plans are found again while their inputs are the same."""

from __future__ import annotations

from dataclasses import replace

from conformance.engine.test_planner import target
from hybrid.core.places import SPECS
from hybrid.core.plan import Plan
from hybrid.planning.kept import KeptPlans
from hybrid.planning.planner import plan
from hybrid.spec.schedule import find_schedule, load_schedule


def test_equal_keys_share_a_plan_and_every_part_counts() -> None:
    one = target(schedule=find_schedule("gemma3"))
    made = plan(one, 8, 1, "prefill")
    assert plan(replace(one, weights=dict(one.weights)), 8, 1, "prefill") is made
    name = next(n for n, info in one.weights.items() if len(info.shape) == 2)
    others = [
        plan(one, 16, 1, "prefill"),
        plan(one, 8, 2, "prefill"),
        plan(one, 8, 1, "prefill", layout=plan(one, 16, 1, "prefill")),
        plan(one, 8, 1, "prefill", capture=True),
        plan(one, 8, 1, "prefill", sample=False),
        plan(replace(one, n_tokens=one.n_tokens - 1), 8, 1, "prefill"),
        plan(replace(one, few_rows=one.few_rows + 1), 8, 1, "prefill"),
        plan(replace(one, device="vulkan"), 8, 1, "prefill"),
        plan(replace(one, schedule=load_schedule(SPECS / "schedules" / "gemma3.toml")), 8, 1, "prefill"),
        plan(replace(one, weights={**one.weights, name: one.weights[name]._replace(dtype="f16")}), 8, 1, "prefill"),
    ]
    assert len({id(p) for p in (made, *others)}) == 1 + len(others)
    assert plan(one, 8, 1, "prefill") is made


def test_recent_plans_are_kept_up_to_the_step_limit() -> None:
    whole = plan(target(), 8, 1, "prefill")
    parts = [Plan(f"p{i}", 1, 1, whole.steps[i : i + 2], whole.tensors) for i in range(4)]
    kept, made = KeptPlans(most=6), []

    def get(i: int) -> Plan:
        return kept.get((i,), (), lambda: made.append(i) or parts[i])  # type: ignore[func-returns-value]

    assert [get(i) for i in (0, 1, 2, 0, 3, 0, 2, 1)] == [parts[i] for i in (0, 1, 2, 0, 3, 0, 2, 1)]
    assert made == [0, 1, 2, 3, 1]
    assert kept.get(("long",), (), lambda: whole) is whole and get(1) is parts[1] and made[-1] == 1


def test_objects_are_keyed_by_identity_and_live_as_long_as_their_plan() -> None:
    whole = plan(target(), 8, 1, "prefill")
    one, kept = Plan("p", 1, 1, whole.steps[:1], whole.tensors), KeptPlans(most=2)
    for i in range(8):  # without a reference here, the next list would often reuse the last id
        part = [i]
        assert kept.get((), (part,), lambda i=i: replace(one, name=f"p{i}")).name == f"p{i}"  # type: ignore[misc]
        del part
