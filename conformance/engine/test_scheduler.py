"""Scheduler: rows per pass, order, prefix sharing, free blocks. Random requests: test_scheduler_machine.py."""

from __future__ import annotations

import pytest

from conformance.support.fake_runner import Loop, request
from hybrid.core.errors import ContextExceeded, QueueFull
from hybrid.engine.blocks import Group
from hybrid.engine.request import Request
from hybrid.engine.scheduler import KEPT, Limits, Pass


def loop(slots=4, ctx=200, rows=32, blocks=400, window=0, local=400, block=4, clock=float, **limits) -> Loop:
    groups = [Group("global", blocks)] + ([Group("local", local, window)] if window else [])
    return Loop(groups, block, Limits(slots, ctx, rows, **limits), clock)


def prompt(n: int, first: int = 0) -> list[int]:
    return [(first + 7 * i + i * i) % 23 for i in range(n)]


def rows_of(passes: list[Pass], stream: Request) -> list[int]:
    """Rows of a sequence in each pass."""
    return [sum(len(r.ids or (0,)) for r in p.runs if r.seq is stream) for p in passes]


# --- rows per pass ---------------------------------------------------------------------------------------------------


def test_streams_decode_in_every_pass_while_prompts_run():
    server = loop(mixed=16)
    streams = [server.add(prompt(5, i), 60) for i in range(3)]
    server.steps(3)
    long = server.add(prompt(150), 3)
    passes = server.steps(12)
    for stream in streams:
        assert rows_of(passes, stream) == [1] * 12
    assert all(p.rows <= 16 for p in passes)
    assert rows_of(passes, long)[:2] == [12, 12], "what is left of a mixed pass, in whole blocks"
    server.drain()
    assert server.right(*streams, long)


def test_a_prompt_alone_takes_whole_passes():
    server = loop(mixed=8)
    stream = server.add(prompt(80), 2)
    assert rows_of(server.steps(4), stream) == [32, 32, 16, 1]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    server = loop(rows=32)
    long = server.add(prompt(190), 1)
    short = server.add(prompt(8, 5), 1)
    passes = server.steps(3)
    assert rows_of(passes, short) == [8, 0, 0] and rows_of(passes, long) == [24, 32, 32]


def test_decoding_rows_continue_from_the_devices_position():
    server = loop()
    stream = server.add(prompt(5), 5)
    runs = [p.runs[0] for p in server.steps(5)]
    assert [(r.start, r.ids, r.wants) for r in runs] == [
        (0, tuple(prompt(5)), 1),
        *((5 + i, None, 1) for i in range(4)),
    ]
    assert server.step() is None and stream.finish == "length", "no pass for an unwanted token"
    assert server.scheduler.idle and server.right(stream)


def test_a_stream_sampled_with_the_host_waits_for_its_token():
    server = loop()
    careful, quick = server.add(prompt(5), 6, ahead=False), server.add(prompt(6), 12)
    server.drain()
    assert all(r.ids is not None for p in server.passes for r in p.runs if r.seq is careful)
    assert server.right(careful, quick)
    assert max(len(p.runs) for p in server.passes) == 2 and len(server.passes) <= 14


def test_an_end_is_known_one_pass_late():
    server = loop(slots=1, blocks=50)
    first = server.add(prompt(5), 50, ends=range(23))
    second = server.add(prompt(9, 3), 20)
    passes = server.steps(2)
    assert rows_of(passes, first) == [5, 1] and first.finish == "eos" and len(first.generated) == 1
    server.drain()
    assert server.right(first, second)


def test_a_sequence_may_end_with_the_context():
    server = loop(ctx=20)
    stream, exact = server.add(prompt(10), 30), server.add(prompt(10, 3), 10)
    server.drain()
    assert (stream.finish, len(stream.generated)) == ("context", 10) and server.right(stream)
    assert (exact.finish, len(exact.generated)) == ("length", 10) and server.right(exact)


# --- order -----------------------------------------------------------------------------------------------------------


def entered(server: Loop, streams: list[Request]) -> list[int]:
    """The order in which sequences got their slots."""
    params = [s for p in server.passes for s in p.params]
    return [streams.index(s) for s in params]


def test_first_come_first_served_higher_priorities_first():
    server = loop(slots=1)
    streams = [server.add(prompt(4, i), 2, priority=p) for i, p in enumerate([0, 0, 2, 1, 2])]
    server.drain()
    assert entered(server, streams) == [2, 4, 3, 0, 1] and server.right(*streams)


def test_overtaking_is_bounded():
    server = loop(slots=1, overtakes=3)
    low = server.add(prompt(4), 2)
    high = [server.add(prompt(4, i), 2, priority=1) for i in range(1, 8)]
    server.drain()
    assert entered(server, [low, *high]) == [1, 2, 3, 0, 4, 5, 6, 7]


def test_a_request_that_is_cancelled_or_late_gives_all_back():
    now = [0.0]
    server = loop(slots=2, clock=lambda: now[0], window=6)
    running, waiting, other = (server.add(prompt(20, i), 50, deadline=d) for i, d in enumerate((9.0, 5.0, None)))
    third = server.add(prompt(5, 9), 5, deadline=5.0)
    server.steps(5)
    now[0] = 5.0
    assert server.scheduler.expire() == [waiting, third] and third.slot is None and not third.generated
    assert server.scheduler.cancel(running, "stop") and not server.scheduler.cancel(running)
    assert (running.finish, waiting.finish) == ("stop", "deadline")
    now[0] = 10.0
    assert server.scheduler.expire() == []
    server.drain()
    assert server.right(other) and server.scheduler.counts.finished == {"deadline": 2, "stop": 1, "length": 1}


def test_requests_that_have_ended_are_not_kept_until_their_deadlines():
    """A request that ends long before its deadline is dropped; deadlines still end running requests."""
    now = [0.0]
    server = loop(slots=2, clock=lambda: now[0])
    waiting = server.add(prompt(9, 1), 150, deadline=100.0)
    for i in range(6 * KEPT):
        server.add(prompt(4, i), 1, deadline=600.0 + i)
        while len(server.scheduler.running) > 1 or server.scheduler.waiting:
            assert server.step() is not None
            if waiting.finish is None and len(waiting.generated) > 100:
                server.scheduler.cancel(waiting)
                waiting = server.add(prompt(9, i), 150, deadline=100.0)
    assert len(server.scheduler._queue._deadlines) <= 2 * KEPT + 2
    now[0] = 100.0
    assert server.scheduler.expire() == [waiting] and waiting.finish == "deadline"


def test_a_full_queue_returns_retry_after():
    now = [0.0]
    server = loop(slots=1, queue=2, clock=lambda: now[0])
    for i in range(2):
        server.add(prompt(4, i), 1)
    with pytest.raises(QueueFull, match="2 requests are waiting") as refused:
        server.add(prompt(4), 1)
    assert refused.value.retry_after == 1.0
    while not server.scheduler.idle:
        server.step()
        now[0] += 4.0
    for i in range(2):
        server.add(prompt(4, i), 1)
    with pytest.raises(QueueFull) as refused:
        server.add(prompt(4), 1)
    assert 4.0 <= refused.value.retry_after <= 12.0


def test_preempted_requests_take_no_place_in_the_queue():
    server = loop(slots=2, blocks=13, ctx=60, queue=1)
    first, second = server.add(prompt(20), 30), None
    server.step()
    second = server.add(prompt(22, 5), 10)
    while not second.preemptions:
        server.step()
    assert server.scheduler.waiting == 1
    third = server.add(prompt(4), 2)
    with pytest.raises(QueueFull):
        server.add(prompt(4), 2)
    server.drain()
    server.add(prompt(4), 2)
    server.drain()
    assert server.right(first, second, third)


def test_requests_that_never_fit_are_refused_with_numbers():
    server = loop(ctx=100, blocks=10, window=9, local=3)
    with pytest.raises(ContextExceeded, match="a prompt of 100 tokens leaves no room in the context of 100"):
        server.add(prompt(100), 1)
    with pytest.raises(
        ContextExceeded, match=r"30 tokens and 12 to generate need 11 blocks of 4 positions in global .* has 10"
    ):
        server.add(prompt(30), 12)
    stream = server.add(prompt(30), 11)
    server.drain()
    assert server.right(stream)


# --- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 6])
def test_a_system_prompt_is_computed_once(window):
    server = loop(slots=8, rows=16, window=window)
    system = prompt(50)
    streams = [server.add([*system, i, i, i], 5) for i in range(6)]
    server.drain()
    shared = 50 // 4 * 4
    assert [s.cached for s in streams] == [0] + [shared] * 5 and server.right(*streams)
    assert sum(sum(rows_of(server.passes, s)) for s in streams) == shared + 6 * (53 - shared + 4)
    assert server.scheduler.counts.cached == 5 * shared


@pytest.mark.parametrize("window", [0, 6, 30])
def test_a_conversation_pays_for_new_tokens_only(window):
    server = loop(window=window, local=60)
    ids: list[int] = []
    for turn in range(8):
        known = len(ids) - 1  # the last token of an answer has not been run
        ids += prompt(9, turn)
        stream = server.add(ids, 7 + turn % 4)
        server.drain()
        assert server.right(stream)
        assert stream.cached == max(0, known // 4 * 4)
        ids = list(stream.ids)
    edited = server.add([*ids[: len(ids) - 16], *prompt(8, 20)], 3)  # another last message
    server.drain()
    assert edited.cached >= (len(ids) - 16) // 4 * 4 - 4 and server.right(edited)


def test_conversations_survive_others_that_end():
    """The last window of a branch is evicted last: traffic evicts the middles of ended sequences first."""
    server = loop(window=8, local=40, blocks=400)
    talks = [list(server.oracle.text(prompt(3, i), 1, frozenset())) + prompt(40, 2 * i) for i in range(4)]
    streams = [server.add(t, 10) for t in talks]
    server.drain()
    for i in range(3):
        server.add(prompt(40, 31 + i), 3)
        server.drain()
    assert server.scheduler.blocks.evictions > 0
    again = [server.add([*s.ids, 1, 2], 2) for s in streams]
    server.drain()
    assert [a.cached for a in again] == [48] * 4 and server.right(*again)


def test_blocks_are_shared_from_the_next_pass_on():
    """Two alike in one pass: the second waits for the first's blocks, and computes none twice."""
    server = loop()
    one, two = (server.add(prompt(21), 3) for _ in range(2))
    passes = server.steps(2)
    assert rows_of(passes, one) == [21, 1] and rows_of(passes, two) == [0, 1] and two.cached == 20
    server.drain()
    assert server.right(one, two)


# --- free blocks -----------------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_beside_another_waits():
    server = loop(slots=2, blocks=16)
    first, second = server.add(prompt(40), 9), server.add(prompt(40, 5), 9)
    server.drain()
    assert server.scheduler.counts.preemptions == 0 and server.right(first, second)


@pytest.mark.parametrize("window", [0, 5])
def test_the_last_in_order_is_preempted_and_resumes(window):
    server = loop(slots=3, blocks=20, window=window, local=20)
    streams = [server.add(prompt(16, i), 30) for i in range(3)]
    server.drain()
    assert server.right(*streams)
    assert streams[0].preemptions == 0 and streams[2].preemptions > 0


def test_computed_blocks_are_found_again_after_a_preemption():
    server = loop(slots=2, blocks=24)
    first, second = server.add(prompt(30), 40), server.add(prompt(30, 5), 30)
    server.drain()
    assert second.preemptions and server.right(first, second)
    assert second.cached == 0
    (again,) = [run for p in server.passes for run in p.runs if run.seq is second and run.start and run.ids][1:]
    assert (again.start, len(again.ids)) == (24, 25) and server.scheduler.counts.recomputed == 24, "one token is new"


def test_a_slot_whose_token_is_not_read_yet_is_not_given_again():
    """The last in order is preempted while a pass that samples its token runs; a request of high priority arrives just
    then."""

    def server_at(passes: int) -> tuple[Loop, Request, Request]:
        server = loop(slots=2, blocks=13, ctx=60)
        first, second = server.add(prompt(20), 30), server.add(prompt(22, 5), 10)
        server.steps(passes)
        return server, first, second

    at = next(n for n in range(1, 20) if server_at(n)[2].preemptions) - 1
    server, first, second = server_at(at)
    slot, flying = second.slot, second.pending
    urgent = server.add(prompt(1, 9), 2, priority=1)
    made = server.step()
    assert second.preemptions and flying and slot in made.released and all(run.slot != slot for run in made.runs)
    server.drain()
    assert server.right(first, second, urgent)


def test_a_lost_device_costs_time_and_no_token():
    server = loop(window=6)
    streams = [server.add(prompt(30, i), 20) for i in range(4)]
    server.steps(8)
    known = [list(s.ids) for s in streams]
    server.scheduler.lose()
    server.runner.lose()
    server._flights.clear()
    assert server.scheduler.in_flight == 0 and [s.ids for s in streams] == known
    server.drain()
    assert server.right(*streams)


# --- rows that are read back, overlapping passes, computed blocks -----------------------------------------------------


def test_one_pass_that_reads_rows_back_is_in_flight():
    """Unless overlapping passes have separate results."""
    for overlap in (False, True):
        server = loop(overlap=overlap)
        for i in range(2):
            server.add(prompt(20, i), 1, capture="logits", rows=8)
        made = [server.scheduler.schedule() for _ in range(2)]
        assert [done is not None for done in made] == [True, overlap]


def test_rows_wait_for_their_reader():
    """Rows that were read back and not taken are held in host memory."""
    server = loop(slots=2)
    server.scheduler.ready = lambda request: not request.captured
    reader = server.add(prompt(30), 1, capture="logits", rows=4)
    server.steps(12)
    assert len(reader.captured) <= server.scheduler.limits.ahead
    for _ in range(40):
        reader.captured.clear()
        server.step()
    assert reader.finish == "length"


def test_a_reader_that_rests_gives_its_slot_up():
    """After the passes with its rows."""
    server = loop(slots=1, overlap=True)
    server.scheduler.ready = lambda request: not request.captured
    reader = server.add(prompt(30), 1, capture="hidden", rows=8, ahead=False)
    flights = [server.scheduler.schedule() for _ in range(2)]
    other = server.add(prompt(4, 3), 3)
    for done in flights:
        assert server.scheduler.schedule() is None and not reader.preemptions
        server.scheduler.commit(done, *server.runner.run(done))
    server.steps(4)
    assert reader.preemptions == 1 and server.right(other)
    for _ in range(6):
        reader.captured.clear()
        server.step()
    assert reader.finish == "length"


def test_a_slot_that_an_idle_reader_gives_up_may_still_be_read():
    """Overlapping passes: a slot is reused only after the passes in flight."""
    server = loop(slots=2, overlap=True)
    server.scheduler.ready = lambda request: not request.captured
    reader, other = server.add(prompt(30), 1, capture="hidden", rows=8, ahead=False), server.add(prompt(4, 3), 9)
    server.steps(4)
    third = server.add(prompt(5, 7), 3)
    server.steps(12)
    assert reader.captured and reader.preemptions == 1 and server.right(other, third)


def test_a_slot_is_reused_after_overlapping_passes():
    server = loop(slots=1, overlap=True)
    first = server.add(prompt(4), 9)
    done = server.scheduler.schedule()
    server.scheduler.cancel(first)
    second = server.add(prompt(4, 3), 3)
    assert server.scheduler.schedule() is None, "that pass may still read the slot's tables"
    server.scheduler.commit(done, *server.runner.run(done))
    server.drain()
    assert server.right(second)


def test_block_tables_of_a_message_are_bounded_whatever_counts_as_computed():
    """Many requests whose positions are marked as computed enter in several passes."""
    server = loop(slots=8, ctx=200, blocks=8 * 51)
    streams = [server.add(prompt(180, i), 4, start=170) for i in range(8)]
    passes = server.steps(12)
    assert all(len(done.writes) <= server.scheduler.max_writes for done in passes)
    assert sum(len(done.writes) for done in passes) >= 8 * 43 > server.scheduler.max_writes
    server.drain()
    assert all(len(s.generated) == 4 for s in streams)


def test_positions_marked_computed_are_neither_found_nor_shared():
    server = loop(window=6)
    server.add(prompt(20), 1, start=13)
    done = server.step()
    assert [run.start for run in done.runs] == [13]
    assert min(index for group, _, index, _ in done.writes if group == 1) == 2, "the next row's window"
    server.drain()
    other = server.add(prompt(20), 3)
    server.drain()
    assert not other.cached and server.right(other)


# --- verification ----------------------------------------------------------------------------------------------------


def test_drafts_that_are_right_save_passes():
    server = loop(outs=12)
    stream = server.add(prompt(9), 24, ahead=False)
    other = server.add(prompt(4, 3), 24)
    for _ in range(40):
        if stream.generated and not stream.pending and stream.finish is None:
            right = server.oracle.text(stream.ids, 3, frozenset())
            server.scheduler.draft(stream, [*right, (right[-1] + 1) % 23])
        server.step()
    counts = server.scheduler.counts
    assert server.right(stream) and 0 < counts.accepted < counts.drafted
    assert sum(r.seq is stream for p in server.passes for r in p.runs) <= 9
    server.drain()
    assert server.right(other)


def test_an_end_among_the_drafts_ends_it():
    server = loop(outs=12)
    text = server.oracle.text(prompt(9), 6, frozenset())
    end = next(i for i in range(2, 6) if text[i] not in text[:i])
    stream = server.add(prompt(9), 20, ahead=False, ends=[text[end]])
    server.steps(2)
    assert stream.generated == text[:1]
    server.scheduler.draft(stream, text[1:6])
    server.drain()
    assert stream.generated == text[: end + 1] and stream.finish == "eos"


def test_drafts_never_cost_another_stream_its_row():
    server = loop(slots=3, rows=4, outs=4)
    stream = server.add(prompt(2), 20, ahead=False)
    others = [server.add(prompt(2, i), 20) for i in (1, 2)]
    server.steps(6)
    for _ in range(6):
        if not stream.pending:
            server.scheduler.draft(stream, [1, 2, 3, 4])
        done = server.step()
        assert done is not None and done.rows <= 4 and {r.seq for r in done.runs} >= set(others)
    server.drain()
    assert server.right(stream, *others)


def test_drafts_leave_rows_for_spans():
    server = loop(slots=3, rows=12, outs=12, ahead=1)
    stream = server.add(prompt(2), 60, ahead=False)
    server.steps(2)
    spanned = server.add(prompt(10, 3), 4, spans=[(0, 10)])
    for _ in range(2):  # admitted in the first
        server.scheduler.draft(stream, [1, 2, 3, 4, 5, 6])
        done = server.step()
    assert done and [(run.seq, len(run.ids or (0,))) for run in done.runs] == [(stream, 1), (spanned, 10)]
    server.drain()


def test_spans_that_never_fit_are_refused():
    """Beside a row of every other slot, or in the rows that a reader takes at a time."""
    server = loop(slots=3, rows=12, mixed=9, logits=6)
    server.add(prompt(20), 4, spans=[(3, 10), (10, 17)])
    for options, most in (({}, 7), ({"capture": "logits"}, 6), ({"capture": "logits", "rows": 4}, 4)):
        with pytest.raises(ValueError, match=f"{most + 1} positions that see one another .* which has {most}"):
            server.add(prompt(20), 4, spans=[(3, 4 + most)], **options)
    server.drain()
    small = loop(slots=1, rows=32, window=4, local=3)
    with pytest.raises(ContextExceeded, match="local layers"):
        small.add(prompt(20), 4, spans=[(2, 14)])


def test_the_first_in_order_has_blocks_for_its_whole_span():
    """Another sequence is preempted if needed: a part of a span does not run."""
    server = loop(slots=3, rows=8, blocks=16)
    others = [server.add(prompt(9, i), 40) for i in (1, 2)]
    server.steps(4)
    first = server.add(prompt(30, 5), 2, spans=[(a, a + 4) for a in range(2, 26, 4)], priority=1)
    rows = rows_of(server.steps(90), first)
    running = [i for i, n in enumerate(rows) if n]
    assert 0 not in rows[running[0] : running[-1]] and sum(s.preemptions for s in others) > 0
    assert server.right(first, *others)


def test_a_pass_as_arrays():
    server = loop(rows=10, outs=8)
    one = server.add([5, 6, 7], 9)
    server.step()
    two = server.add([9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2], 9)
    passes = server.steps(2)
    tokens, positions, slots, outs = (a.tolist() for a in passes[0].arrays())
    assert (tokens, positions) == ([-1, 9, 8, 7, 6, 5, 4, 3, 2], [3, *range(8)])
    assert slots == [one.slot] + [two.slot] * 8 and outs == [0]
    tokens, positions, slots, outs = (a.tolist() for a in passes[1].arrays())
    assert (tokens, positions, outs) == ([-1, 1, 0, 1, 2], [4, 8, 9, 10, 11], [0, 4])
    assert passes[1].context == 12 and passes[1].outs == 2


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_misuse_is_an_error():
    server = loop(slots=2)
    stream = server.add(prompt(5), 9)
    with pytest.raises(ValueError, match="has been added before"):
        server.scheduler.add(stream)
    with pytest.raises(ValueError, match="ahead=False"):
        server.scheduler.draft(stream, [1])
    one, two = server.scheduler.schedule(), server.scheduler.schedule()
    assert one is not None and two is not None and server.scheduler.schedule() is None
    with pytest.raises(ValueError, match="pass 2 is not the oldest in flight"):
        server.scheduler.commit(two, [1])
    with pytest.raises(ValueError, match="pass 1: 2 tokens are not what its runs want"):
        server.scheduler.commit(one, [1, 2])
    with pytest.raises(ValueError, match=r"pass 1: its runs take 1 to \[1\] tokens, not \[2\]"):
        server.scheduler.commit(one, [1, 2], [2])
    with pytest.raises(ValueError, match="the prompt is empty"):
        request(1, [], 1)
    with pytest.raises(ValueError, match="max_tokens must be a positive integer, not 0"):
        request(1, [1], 0)
    for wrong, said in (
        ({"rows": 1}, "rows must be at least the number of slots, 2, not 1"),
        ({"ahead": 0}, "ahead must be pos"),
    ):
        with pytest.raises(ValueError, match=said):
            Limits(**{"slots": 2, "ctx": 9, "rows": 9, **wrong})
