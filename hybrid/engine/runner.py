"""Model runner: compiles plans, submits the scheduler's passes, and reads sampled tokens.

After warm-up a pass is one submit. The host describes a pass by a message in a ring buffer, the inbox; the pass's first
kernel, begin_pass, takes it (specs/ops/begin_pass.toml). So the host prepares passes while others run. A pass without a
message continues the rows of the pass before: sampled tokens and positions stay on the device.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybrid.checkpoint import Checkpoint
from hybrid.core.device import Counters, Device, Program
from hybrid.core.errors import SpecError
from hybrid.core.plan import (
    CONTROL_TENSOR,
    CONTROL_WORDS,
    ENTRY_WORDS,
    FAULTED,
    INBOX_SETS,
    INBOX_TENSOR,
    MESSAGE_HEADER,
    NOT_FINITE,
    OUT_WORDS,
    ROW_WORDS,
    ROWS_TENSOR,
    SPANS_TENSOR,
    Plan,
    TensorDecl,
)
from hybrid.core.tensor import Tensor
from hybrid.core.units import show_bytes
from hybrid.engine.blocks import Blocks, groups_of
from hybrid.engine.loading import EngineConfig, LoadClock, fitted, load_tensors, placed, sizes_for, target_for
from hybrid.engine.request import Captured, Request
from hybrid.engine.sampling import SamplingState
from hybrid.engine.scheduler import Limits, Pass, Run, Scheduler
from hybrid.engine.stats import TokenLogprob, Work, mean_context
from hybrid.engine.trace import TimedPass, Timing
from hybrid.planning.cache import CacheShape
from hybrid.planning.cost import bytes_read, precision_by_phase
from hybrid.planning.passes import PassSizes, bucket_of
from hybrid.planning.pipeline import caches_elsewhere, outlasting
from hybrid.planning.planner import Target, plan
from hybrid.planning.segments import segments
from hybrid.spec.schedule import Phase, Schedule, find_schedule
from hybrid.spec.step import OPTIONS, Option

log = logging.getLogger("hybrid")

MIXED_ROWS = 512
"""Most rows of a pass in which a sequence decodes; bounds the time between its tokens."""
CONTINUES = -1
"""Token word: the slot's last sampled token. Position word: that token's position; -1 - n: n positions later."""
DRAFTED = -2
"""Token word: the draft model's token (`drafts`) for the row's position; DRAFTED - n: of its slot n."""
FOLLOWS = -(1 << 30)
"""Token word: as DRAFTED up to the last accepted position (`known_until`), else the slot's last sampled token; FOLLOWS - n:
of its slot n. Position word of such a row: min(next position, last verified position)."""
_SKIPPED = 1000  # the pass counter jumps by this where the number of started passes is unknown
PLAIN, VERIFY, HIDDEN = frozenset[Option](), frozenset[Option]({"verify"}), frozenset[Option]({"hidden"})


# --- errors ----------------------------------------------------------------------------------------------------------


class AbortedStep(Exception):
    """A wait between workgroups of a fused kernel timed out. This pass and those queued after it sampled no tokens and
    wrote no KV. Decoding continues unfused. (Usual cause: another program preempted the waiting workgroups' partners.)"""


class NotFinite(RuntimeError):
    """Logits are NaN or infinite."""

    def __init__(self, path: Path, position: int, slot: int | None = None) -> None:
        where = f"after position {position}" + ("" if slot is None else f" of slot {slot}")
        super().__init__(
            f"{path}: the logits {where} are NaN or infinite. A weight may be damaged: python -m hybrid.inspect "
            f"{shlex.quote(str(path))} --check-finite names its tensor; where none is, the activations are beyond "
            "float16: use precision exact"
        )
        self.position, self.slot = position, slot


OF_ONE = (ValueError, NotFinite)
"""Errors of one request, as opposed to those of the device or the model."""


def fault(word: int, path: Path, slot: int, position: int) -> RuntimeError:
    """The error that a negative word of `history` stands for."""
    if word == NOT_FINITE:
        return NotFinite(path, position - 1, slot)
    return RuntimeError(
        f"{path}: the device left {word} as the token for position {position} of slot {slot}: no such word"
    )


def check_finite(path: Path, logits: np.ndarray, start: int) -> None:
    """NotFinite for the first row of logits float32 [rows, vocab] with NaN or infinity. start: position of the first row."""
    # min and max propagate NaN without a temporary matrix
    wrong = ~(np.isfinite(logits.max(-1)) & np.isfinite(logits.min(-1)))
    if wrong.any():
        raise NotFinite(path, start + int(wrong.argmax()))


# --- messages --------------------------------------------------------------------------------------------------------


def message(number: int, p: Pass, mask_rows: np.ndarray | None = None) -> np.ndarray:
    """int32 [words]: the message of pass `number`. mask_rows int32 [outs]: rows of `masks` (None: no masks)."""
    tokens, positions, slots, out_rows = p.arrays()
    rows, outs, entries = len(tokens), len(out_rows), len(p.writes)
    at = np.cumsum([MESSAGE_HEADER, ROW_WORDS * rows, OUT_WORDS * outs, ENTRY_WORDS * entries])
    made = np.zeros(at[-1], np.int32)
    made[:4] = number, rows, outs, entries
    made[at[0] : at[1]].reshape(rows, ROW_WORDS).T[:] = tokens, positions, slots
    wanted = made[at[1] : at[2]].reshape(outs, OUT_WORDS)
    wanted[:, 0], wanted[:, 1] = out_rows, -1 if mask_rows is None else mask_rows
    if entries:
        made[at[2] :] = list(chain.from_iterable(p.writes))
    return made


class Inbox:
    """The device's message ring and the pass counter that indexes it."""

    def __init__(self, device: Device, cache: CacheShape) -> None:
        self._device, self._words = device, cache.message
        self.begun = 0
        """Submitted passes: the device's counter `turn` once they have started."""
        self.messages = 0
        """Messages written."""
        self._known = True
        self._put = False  # whether the next pass has a message
        self._taken: deque[int] = deque(maxlen=INBOX_SETS)  # tickets of the passes with the last messages

    def put(self, p: Pass, mask_rows: np.ndarray | None = None) -> None:
        """Write the next pass's message; waits for the pass whose message had the same place."""
        if not self._known:
            self._device.wait()
            self.begun += _SKIPPED
            self._device.write("turn", Tensor.of(np.array([self.begun], np.uint32)))
            self._known = True
        if len(self._taken) == INBOX_SETS:
            self._device.wait(self._taken[0])
        words = message(self.begun + 1, p, mask_rows)
        if len(words) > self._words:
            what = f"{p.rows} rows with {len(p.writes)} entries of block tables"
            raise ValueError(f"{what} take {len(words)} words of a pass's message, which has room for {self._words}")
        self._device.write(INBOX_TENSOR, Tensor.of(words), self.messages % INBOX_SETS * self._words)
        self.messages += 1
        self._put = True

    def submitted(self, ticket: int) -> None:
        """Note a submitted pass, which takes the message written since the one before."""
        self.begun += 1
        if self._put:
            self._taken.append(ticket)
            self._put = False

    def lost_count(self) -> None:
        """Note a failed submit, after which the counter is unknown."""
        self._known, self._put = False, False


# --- passes ----------------------------------------------------------------------------------------------------------


class Flight(NamedTuple):
    """A submitted pass and its ticket."""

    scheduled: Pass
    ticket: int
    began: float
    """time.perf_counter() before the submit."""


def most_mixed(sizes: PassSizes) -> int:
    """Most rows of a pass in which a sequence decodes; at least one per sequence."""
    return max(sizes.outs[-1], min(sizes.rows[-1], MIXED_ROWS))


def warm_programs(sizes: PassSizes, draft: bool = False) -> list[tuple[Phase, int, int, frozenset[Option]]]:
    """(phase, rows, rows with logits, options) of every plan that plain requests may use. draft: for a draft model, which
    verifies nothing."""
    found: list[tuple[Phase, int, int, frozenset[Option]]] = [("decode", n, n, PLAIN) for n in sizes.decode]
    found += [("prefill", rows, outs, PLAIN) for rows in sizes.rows for outs in (0, *_outs(sizes.outs, rows))]
    if sizes.drafts and not draft:
        mixed = bucket_of(most_mixed(sizes), sizes.rows)  # a pass with drafts is a mixed one
        wants = [(rows, outs) for rows in sizes.rows for outs in _outs(sizes.wants, rows) if rows <= mixed and outs > 1]
        found += [("prefill", rows, outs, VERIFY) for rows, outs in wants]
    return found


def _outs(buckets: Sequence[int], rows: int) -> list[int]:
    """The output buckets that a pass of so many rows may use."""
    return [outs for before, outs in zip((0, *buckets), buckets, strict=False) if before < rows]


class Runner:
    """One checkpoint on one device. schedule: default: the family's. clock: times loading. refused: called with a request
    whose constraint fails, and the error; its row's result is discarded. read: of a drafter, the runner whose cache it
    reads. Closes neither the checkpoint nor the device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        config: EngineConfig | None = None,
        schedule: Schedule | None = None,
        clock: LoadClock | None = None,
        refused: Callable[[Request, Exception], object] = lambda request, error: None,
        read: Runner | None = None,
    ) -> None:
        if checkpoint.hparams.dimensions:
            raise ValueError(
                f"{checkpoint.path} is an embedding model, which writes no text: python -m hybrid.embed makes embeddings with "
                "it, as hybrid.load_embedder does"
            )
        self.checkpoint, self.device, self.refused = checkpoint, device, refused
        self.clock = LoadClock() if clock is None else clock
        schedule = schedule or find_schedule(checkpoint.hparams.family)
        self.config, self.budget = fitted(config or EngineConfig(), checkpoint, device, schedule)
        """budget: the split of the given memory."""
        self.sizes = sizes_for(self.config, checkpoint.hparams, device)
        """Buckets."""
        of = None if read is None else read.target
        self.target: Target = target_for(self.config, checkpoint, device, schedule, self.sizes, of)
        self.cache = self.target.cache
        self.blocks = Blocks(groups_of(self.cache), self.cache.block, reuse=not caches_elsewhere(schedule))
        """Off for devices that keep copies of the KV cache: these learn of appended rows only, not of reused blocks."""
        self.sampling = SamplingState(device, self.target)
        self.inbox = Inbox(device, self.cache)
        self.work = Work()
        self.trace: list[TimedPass] = []
        """With profile: all timed passes."""
        self.cooperative = True
        """Whether kernels may use inter-workgroup waits (AbortedStep)."""
        self.faults: list[str] = []
        """Reports of aborted steps."""
        self.prefilled = Counters()
        """The device's counters after the last pass with prompt rows; `decoded`: passes since."""
        self.decoded = 0
        self._timing = Timing(self.trace, device.overlaps)
        self._programs: dict[tuple[Phase, int, int, bool, bool, frozenset[Option]], Program] = {}
        self._last: Program | None = None  # of the last pass, if a decode pass
        self._sequences: list[tuple[Any, ...]] = []  # (sequence, slot) of the device's current rows
        self._messages = -1  # inbox.messages at that time
        self._layouts: dict[str, Plan] = {}  # the largest plans, whose arena offsets others use
        with self.clock.phase("plan"):
            most, outs = self.sizes.rows[-1], self.sizes.outs[-1]
            self._layouts = {
                "prefill": self.plan("prefill", most, self.sizes.wanted, options=OPTIONS),
                "decode": self.plan("decode", outs, outs, options=OPTIONS),
            }
            plans = self._largest_plans()
        stored = placed(outlasting(plans), 0 if self.budget is None else self.budget.spill)
        self._stored = set(stored)
        self.spilled = frozenset(name for name, decl in stored.items() if decl.pool == "host")
        """Weights in host memory."""
        self.rows = stored[ROWS_TENSOR].shape[0] if ROWS_TENSOR in stored else 0
        """Rows that ids beyond the vocabulary may name (ROWS_TENSOR)."""
        self.spans = SPANS_TENSOR in stored
        """Whether the schedule supports bidirectional spans (SPANS_TENSOR)."""
        self._spanned = set[int]()  # slots with spans
        self.reencoded = load_tensors(checkpoint, device, self.target, self.sizes, plans, stored, self.clock)
        """Matrices that were re-encoded in a type that the device supports."""

    def memory_lines(self) -> list[str]:
        """The split of the memory budget, and weights in host memory with what they cost; empty without both."""
        lines = [] if self.budget is None else [self.budget.line()]
        if not self.spilled:
            return lines
        decode = self.plan("decode", 1, 1)
        experts = {name: decl.nbytes for name, decl in decode.tensors.items() if decl.pool == "any"}
        held = f"{show_bytes(sum(experts[name] for name in self.spilled))} of {show_bytes(sum(experts.values()))}"
        where, bus = (", here the device's own", "") if self.device.unified else ("", " over PCIe")
        read = f"{bytes_read(decode, self.spilled) / 1e6:.1f} MB"
        return [*lines, f"experts: {held} in host memory{where}; a token reads {read} of it{bus}"]

    def limits(self, queue: int) -> Limits:
        """Limits for the scheduler. queue: most waiting requests."""
        sizes, device = self.sizes, self.device
        ahead = 1 if self.config.profile and not device.overlaps else device.passes_ahead
        return Limits(
            self.cache.slots,
            self.cache.ctx,
            sizes.rows[-1],
            most_mixed(sizes),
            sizes.wants[-1],
            sizes.logits,
            min(sizes.logits, self.cache.slots),
            sizes.hidden,
            ahead,
            device.overlaps,
            queue,
        )

    # --- plans -------------------------------------------------------------------------------------------------------

    def plan(
        self,
        phase: Phase,
        rows: int,
        outs: int,
        capture: bool = False,
        sample: bool = True,
        options: Collection[Option] = (),
    ) -> Plan:
        """See planning.planner.plan."""
        made = plan(self.target, rows, outs, phase, capture, sample, self._layouts.get(phase), options)
        devices = {s.device for s in segments(made)}
        if not devices <= self.device.drives:
            raise SpecError(
                f"schedule {self.target.schedule.schedule.name}: steps are placed on {sorted(devices)}, "
                f'but this engine drives {", ".join(sorted(self.device.drives))}: use device = "main"'
            )
        return made

    def program(
        self,
        phase: Phase,
        rows: int,
        outs: int,
        capture: bool = False,
        sample: bool = True,
        options: Collection[Option] = (),
    ) -> Program:
        """The compiled plan of these buckets; compiled on first use."""
        hidden = HIDDEN if self.config.hidden and sample and outs else PLAIN
        key = (phase, rows, outs, capture, sample, hidden.union(options))
        if key not in self._programs:
            cooperative = (
                self.cooperative and sample and (phase == "decode" or "verify" in options)
            )  # passes that can be repeated
            made = self.plan(*key)
            self._programs[key] = self.device.compile(made, profile=self.config.profile, cooperative=cooperative)
        return self._programs[key]

    def warm_up(self, rows: int = 1, options: Collection[Option] = ()) -> None:
        """Compile the programs of one sequence with a prompt of `rows` tokens; with `options`, those of its sampling
        options."""
        sizes, largest = self.sizes, self.sizes.rows[-1]
        if rows > largest:
            self.program("prefill", largest, 0)  # a full chunk without logits
        self.program("prefill", bucket_of(rows % largest or largest, sizes.rows), sizes.outs[0], options=options)
        for outs in sizes.decode[:1] if options else sizes.decode:
            self.program("decode", outs, outs, options=options)
        for n in range(2, min(sizes.drafts + 1, sizes.wanted) + 1 if sizes.drafts else 0):
            rows, outs = bucket_of(n, sizes.rows), bucket_of(n, sizes.wants)
            self.program("prefill", rows, outs, options={*options, "verify"})

    def warm(self, draft: bool = False) -> None:
        """Compile all programs of plain requests. On cpu nothing is compiled."""
        if self.device.backend == "cpu":
            return
        wanted = warm_programs(self.sizes, draft)
        for i, (phase, rows, outs, options) in enumerate(wanted, 1):
            self.program(phase, rows, outs, options=options)
            self.clock.part(i / len(wanted))

    def _largest_plans(self) -> list[Plan]:
        """Plans that together declare every tensor at its largest and need the largest arena."""
        sizes = self.sizes
        return [
            self._layouts["decode"],
            self._layouts["prefill"],
            self.plan("prefill", sizes.logits, sizes.logits, sample=False),
            self.plan("prefill", sizes.hidden, 0, capture=True),
        ]

    # --- passes ------------------------------------------------------------------------------------------------------

    def start(self, p: Pass) -> Flight:
        """Submit a pass; does not wait."""
        began, same = time.perf_counter(), [run[:2] for run in p.runs]
        last, inbox = self._last, self.inbox
        unchanged = last is not None and same == self._sequences and inbox.messages == self._messages
        if unchanged and not p.writes and p.capture is None and p.continues:
            assert last is not None  # the device continues the rows of the pass before
            self.decoded += 1
            self.work.begin(p, True, last.plan)
            return Flight(p, self._counted(last, began, p), began)
        program, decode, masks = self._program_of(p)
        self.work.begin(p, decode, program.plan)
        inbox.put(p, masks)
        self._last = None
        ticket = self._counted(program, began, p)
        self._last, self._sequences, self._messages = program if decode else None, same, inbox.messages
        if any(run.start < run.seq.n_prompt for run in p.runs):
            self.decoded, self.prefilled = 0, self.counters.copy()
        else:
            self.decoded += 1
        return Flight(p, ticket, began)

    def _program_of(self, p: Pass) -> tuple[Program, bool, np.ndarray | None]:
        """The program of a pass, whether its phase is decode, and mask rows."""
        sizes = self.sizes
        if p.capture is not None:
            decode = p.capture == "decode"
            rows = bucket_of(p.rows, sizes.decode if decode else sizes.rows)
            for decl in self._captured(p):
                if decl.name not in self._stored:
                    self.device.store(decl)
                    self._stored.add(decl.name)
            hidden = p.capture == "hidden"
            phase: Phase = "decode" if decode else "prefill"
            return self.program(phase, rows, 0 if hidden else rows, hidden, sample=False), False, None
        wanting = p.wanting
        options, wants = self.sampling.options([run.slot for run in wanting]), sizes.outs
        if p.outs > len(wanting):
            options, wants = options | VERIFY, sizes.wants
        masks = self._masks(wanting)
        if p.decodes and not self.config.deterministic:
            rows = bucket_of(p.outs, sizes.decode)
            return self.program("decode", rows, rows, options=options), True, masks
        outs = bucket_of(p.outs, wants) if p.outs else 0
        return self.program("prefill", bucket_of(p.rows, sizes.rows), outs, options=options), False, masks

    def _counted(self, program: Program, began: float, p: Pass) -> int:
        try:
            ticket = self._submit(program, began, p)
        except BaseException:
            self.inbox.lost_count()  # its message must not reach a later pass
            self._last = None
            raise
        self.inbox.submitted(ticket)
        return ticket

    def _submit(self, program: Program, began: float, p: Pass) -> int:
        ticket = program.submit()
        if self.config.profile:
            self._timing.start(program, ticket, began, (p.rows, p.outs, mean_context(p)))
            if not self.device.overlaps:  # the program's next run overwrites its times
                self.device.wait(ticket)
                self._timing.stop(ticket)
        return ticket

    def _masks(self, wanting: list[Run]) -> np.ndarray | None:
        if not self.sampling.constrained(run.slot for run in wanting):
            return None
        rows = []
        for run in wanting:
            try:
                rows += self.sampling.mask_rows([run.slot] * run.wants).tolist()
            except Exception as error:  # whatever somebody's constraint raises
                self.refused(run.seq, error)
                rows += [-1] * run.wants
        return np.array(rows, np.int32)

    def tokens(self, flight: Flight) -> tuple[list[int], list[int] | None]:
        """Wait for a pass. (tokens, tokens per run with logits): one, or the accepted drafts and one more; counts None: one
        each. NOT_FINITE in place of a token for logits that are not finite. AbortedStep."""
        peek, ticket, runs = self.device.peek, flight.ticket, flight.scheduled.wanting
        if flight.scheduled.outs == len(runs):
            found = [
                peek("history", slot, start + (len(ids) if ids else 1), ticket) for _, slot, start, ids, *_ in runs
            ]
            counts = None
        else:
            each = [self._verified(run, ticket) for run in runs]
            found, counts = [token for tokens in each for token in tokens], [len(tokens) for tokens in each]
        if self.config.profile and not runs:
            self.device.wait(ticket)  # times are read before the next pass
        if runs or self.config.profile:  # otherwise no wait happened
            self._ended(flight)
        if FAULTED in found:
            self.abort()
            raise AbortedStep
        return found, counts

    def _verified(self, run: Run, ticket: int) -> list[int]:
        """The accepted drafts of a run and the token after them."""
        peek, at = self.device.peek, run.start + len(run.ids or (CONTINUES,)) - run.wants + 1
        right = peek("accepted", run.slot, 0, ticket) if run.wants > 1 else 0
        return [peek("history", run.slot, at + i, ticket) for i in range(right + 1)]

    def captured(self, flight: Flight) -> Captured:
        """The rows that a pass reads back."""
        p = flight.scheduled
        found = [self.device.read(d.name, 0, p.rows, flight.ticket).array for d in self._captured(p)]
        self._ended(flight)
        return Captured(np.stack(found)) if p.capture == "hidden" else Captured(found[0], tuple(found[1:]))

    def _captured(self, p: Pass) -> list[TensorDecl]:
        hp, sizes = self.target.hparams, self.sizes
        if p.capture != "hidden":
            used = [(f"chosen.{i}", layer.experts_used) for i, layer in enumerate(hp.layers) if layer.n_experts]
            chosen = [TensorDecl(name, "i32", (sizes.logits, k), "io", per_pass=True) for name, k in used]
            return [TensorDecl("logits", "f32", (sizes.logits, hp.vocab), "io", per_pass=True), *chosen]
        shape = sizes.hidden, hp.n_streams * hp.hidden
        return [TensorDecl(f"hidden.{i}", "f32", shape, "io", per_pass=True) for i in range(hp.n_layers + 1)]

    def _ended(self, flight: Flight) -> None:
        self.work.end(flight.scheduled)
        if self.config.profile:
            self._timing.stop(flight.ticket)

    def logprob(self, slot: int, position: int, ticket: int) -> TokenLogprob | None:
        """Log-probabilities of the token at a position; None if not requested."""
        said = self.sampling.reported(slot, position, ticket)
        return None if said is None else TokenLogprob(*said[0], said[1])

    def assign(self, request: Request, flights: Collection[Flight] = ()) -> None:
        """Write a request's sampling state to its new slot. flights: passes that may still run."""
        slot = request.slot
        assert slot is not None
        spans = self.spans and (request.spans or slot in self._spanned)
        if request.options.counts or spans:  # passes of the slot's last sequence use these tensors
            of = [f.ticket for f in flights if any(run.slot == slot for run in f.scheduled.runs)]
            if of:
                self.device.wait(max(of))
        if spans:
            last = np.zeros((1, self.cache.ctx), np.int32)
            for begin, end in request.spans:
                last[0, begin:end] = end - 1
            self.device.write(SPANS_TENSOR, Tensor.of(last), slot)
            (self._spanned.add if request.spans else self._spanned.discard)(slot)
        self.sampling.assign(slot, request.options, request.prompt, request.options.constraint, request.generated)

    def abort(self) -> None:
        """After an AbortedStep: wait for the device, disable inter-workgroup waits, report once."""
        self.device.wait()
        self.work.lost()
        # Their inter-workgroup flags were not cleared.
        self._programs = {k: p for k, p in self._programs.items() if k[0] != "decode" and "verify" not in k[-1]}
        self._last, self.cooperative = None, False
        text = (
            f"{self.device.name}: a fused kernel timed out, because workgroups waited too long for one another (other work "
            "on this device may have taken their place): the pass was run again unfused, and decoding stays so"
        )
        log.warning("%s", text)
        self.faults.append(text)
        self.device.write(CONTROL_TENSOR, Tensor.of(np.zeros(CONTROL_WORDS, np.uint32)))

    # --- reports -----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        return self.device.counters

    @property
    def precision(self) -> Mapping[str, tuple[str, ...]]:
        return precision_by_phase(
            self.plan("decode", *(self.sizes.outs[-1],) * 2), self.plan("prefill", self.sizes.rows[-1], 1)
        )


class Stack:
    """A second stack of layers on the same queue: an encoder or a draft model. It has its own runner, on a sibling device
    that shares tensors with the main one (Device.sibling), and its own scheduler."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner.blocks, replace(runner.limits(1 << 20), ahead=1 << 20))

    def run(self) -> list[Flight]:
        """Submit all passes that the scheduler makes; does not wait."""
        flights = []
        while (made := self.scheduler.schedule()) is not None:
            flights.append(self.start(made))
        return flights

    def start(self, made: Pass) -> Flight:
        for request in made.params:
            self.runner.assign(request)
        return self.runner.start(made)
