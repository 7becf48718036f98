"""The engine: weights, RoPE tables and KV cache on one device; prefill in chunks, decode of one token per sequence and
pass.

After warm-up a pass is one submit. Tokens, positions and sampled ids stay on the device; the host reads a token from
`history` once its pass has finished, while the next pass may already run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from hybrid.checkpoint import Checkpoint
from hybrid.core import interrupts
from hybrid.core.device import Counters, Device, Program
from hybrid.core.errors import ContextExceeded, SpecError
from hybrid.core.plan import FAULTED, Plan, TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.engine import streams, teacher_forcing, voids
from hybrid.engine.blocks import Blocks, groups_of
from hybrid.engine.choosing import Choosing
from hybrid.engine.chunks import Chunk, check_prompts, chunks
from hybrid.engine.config import EngineConfig, sizes_for, target_for
from hybrid.engine.constraint import Constraint
from hybrid.engine.faults import fault
from hybrid.engine.inbox import GOES_ON, Inbox, Rows
from hybrid.engine.kv import BlockTables
from hybrid.engine.loading import LoadClock, load_tensors
from hybrid.engine.lock import EngineLock
from hybrid.engine.room import fitted
from hybrid.engine.sampling import Sampling
from hybrid.engine.trace import Pass, Timing
from hybrid.planning.cost import precision_by_phase
from hybrid.planning.passes import bucket_of
from hybrid.planning.pipeline import caches_elsewhere, for_pipeline_slot, outlasting
from hybrid.planning.planner import plan
from hybrid.planning.segments import segments
from hybrid.spec.schedule import Phase, Schedule, find_schedule
from hybrid.spec.step import OPTIONS, Option


class Engine:
    """One checkpoint on one device, for up to `config.slots` sequences at a time.

    schedule: another than the shipped one of the checkpoint's family. clock: notes what loading takes.
    Closes neither the checkpoint nor the device. One thread at a time uses an engine: threads that share one hold
    `lock` (Model, and the blocking conveniences here, do).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        config: EngineConfig | None = None,
        *,
        schedule: Schedule | None = None,
        clock: LoadClock | None = None,
    ) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.clock = LoadClock() if clock is None else clock
        self.lock = EngineLock()
        schedule = schedule or find_schedule(checkpoint.hparams.family)
        self.config, self.room = fitted(config or EngineConfig(), checkpoint, device, schedule)
        """room: what the memory that was given is for."""
        self.sizes = sizes_for(self.config, checkpoint.hparams, device)
        """Row counts that plans are made for."""
        self.target = target_for(self.config, checkpoint, device, schedule, self.sizes)
        self.cache = self.target.cache
        self.blocks = Blocks(groups_of(self.cache), self.cache.block, reuse=not caches_elsewhere(schedule))
        """The KV cache's; a device with views of the cache of its own is told of what is appended, not of what is found
        again."""
        self.tables = BlockTables(self.cache, self.blocks)
        self.choosing = Choosing(device, self.target)
        self.positions: dict[int, int] = {}
        """Live slot -> position of its next token."""
        self.prefilled = Counters()
        """The device's counters after the last prefill: decoding is what came since."""
        self.trace: list[Pass] = []
        """With profile: every pass that has been waited for."""
        self.cooperative = True
        """Whether decode passes may use kernels whose workgroups wait for one another (hybrid/engine/voids.py)."""
        self.faults: list[str] = []
        """Why passes were run again, and how decoding goes on since."""
        self.served = False
        """Whether scheduled passes (runner.py) have been submitted since all passes were last waited for."""
        self._timing = Timing(self.trace)
        self._last_pipeline_slot = device.pipeline_depth - 1  # of the last prefill pass
        self._slot_ticket: dict[int, int] = {}  # the ticket of a pipeline slot's last pass
        self.programs: dict[tuple[Phase, int, int, bool, bool, int, frozenset[Option]], Program] = {}
        self._decoding: tuple[int, ...] | None = None  # sequences that the device's rows are set up for
        self._decoder: Program | None = None
        self.inbox = Inbox(device, self.cache)
        self._message = False  # whether the next pass has one in the inbox
        self._layouts: dict[str, Plan] = {}  # the largest plans: smaller ones take their offsets
        with self.clock.phase("plan"):
            most, outs = self.sizes.rows[-1], self.sizes.outs[-1]
            self._layouts = {
                "prefill": self.plan("prefill", most, self.sizes.wanted, options=OPTIONS),
                "decode": self.plan("decode", outs, outs, options=OPTIONS),
            }
            plans = self._largest_plans()
        self._stored = set(outlasting(plans))
        self.reencoded = load_tensors(
            checkpoint, device, self.target, self.sizes, plans, self.clock, self.config.progress
        )
        """Matrices that the device holds in another storage type than the file, because it does not compute with that
        one."""

    # ------------------------------------------------------------------------------------------------------ sequences
    def admit(
        self,
        length: int | None = None,
        sampling: Sampling | None = None,
        slot: int | None = None,
        *,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> int:
        """Reserve a slot and the cache for a sequence of at most `length` tokens (default: the context), whose tokens
        are chosen by sampling, prompt and constraint (Choosing.admit)."""
        (sampling := sampling or Sampling()).check(self.target.n_tokens)
        self._settle()
        slot = self.tables.admit(self.cache.ctx if length is None else length, slot)
        for group in self.tables.tables:
            if f"block_table.{group}" in self._stored:
                self.device.write(f"block_table.{group}", Tensor.of(self.tables.row(group, slot)), slot)
        self.choosing.admit(slot, sampling, prompt, constraint)
        self.positions[slot] = 0
        return slot

    def set_sampling(self, slot: int, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        """Choose a live sequence's next tokens by other parameters. prompt: all its tokens until then."""
        self._settle()
        self.choosing.admit(slot, sampling, prompt)
        self._decoding = None

    def rewind(self, slot: int, position: int, anyway: bool = False) -> bool:
        """Truncate a live sequence to `position` tokens. False, and nothing done, where that is impossible: local
        layers keep a ring of blocks, in which later positions have overwritten some that attention would read again
        (`anyway`: it reads those instead, which is enough for measuring time)."""
        self._settle()
        lost = self.positions[slot] - position
        if lost < 0 or position < 0:
            raise ValueError(f"slot {slot} holds {self.positions[slot]} tokens: {position} is not before their end")
        if not anyway and self.cache.forgets(lost):
            return False
        self.positions[slot] = position
        self._decoding = None
        return True

    def release(self, slot: int) -> None:
        """End a sequence and free its slot and cache blocks."""
        self._settle()
        self.tables.release(slot)
        self.choosing.release(slot)
        del self.positions[slot]
        self._decoding = None

    # --------------------------------------------------------------------------------------------------------- passes
    def submit_prefill(self, prompts: Mapping[int, Sequence[int]]) -> int:
        """Prefill prompts {slot: ids} of admitted slots, after the tokens that they hold; returns the last pass's
        ticket.

        Once that has finished, `token(slot, n)` is the token sampled after the n ids so far.
        """
        self.check(prompts)
        ticket = 0
        for chunk in self.passes(prompts):
            outs = bucket_of(len(chunk.out_rows), self.sizes.outs) if len(chunk.out_rows) else 0
            rows = bucket_of(len(chunk.tokens), self.sizes.rows)
            options = self.choosing.options(chunk.slots[chunk.out_rows].tolist())
            program = self.program("prefill", rows, outs, pipeline_slot=self.next_pipeline_slot(), options=options)
            ticket = self.run_chunk(chunk, program)
        if self.device.pipeline_depth > 1:
            self._settle()  # passes advance while they are waited for
        for slot, ids in prompts.items():
            self.positions[slot] += len(ids)
        self.prefilled = self.counters.copy()
        return ticket

    def passes(self, prompts: Mapping[int, Sequence[int]], starts: Mapping[int, int] | None = None) -> Iterator[Chunk]:
        """The prefill passes of prompts {slot: ids} whose first ids stand at positions `starts` (default: after what
        slots hold)."""
        return chunks(prompts, self.positions if starts is None else starts, self.sizes.rows[-1])

    def submit_decode(self, slots: Sequence[int], times: int = 1) -> int:
        """Decode one more token (or `times`) for each slot, in one submit; returns its ticket. The prefill of each slot
        must have been submitted; ContextExceeded where a slot has no room for the tokens."""
        slots, ctx, positions = tuple(slots), self.cache.ctx, self.positions
        if times > 1 and self.choosing.constrained(slots):
            raise ValueError("a constraint hears of each token before the next: decode one at a time")
        for slot in slots:
            if positions[slot] + times > ctx:
                held = f"slot {slot} has {positions[slot]} tokens of {ctx}"
                raise ContextExceeded(f"{held}: no room for {times} more; load the model with a larger ctx")
        if slots != self._decoding or self.choosing.constrained(slots):
            self._decode_rows(slots)
        for slot in slots:
            positions[slot] += times
        assert self._decoder is not None
        return self._submit(self._decoder, times)

    def token(self, slot: int, position: int, ticket: int | None = None) -> int:
        """The token sampled for a position of a slot, once the pass `ticket` (default: every pass) has finished.
        NotFinite where the logits were NaN or infinite. With a ticket, read tokens in the order of their positions, or
        `wait` first: of several void passes only the first position is marked."""
        if ticket is None:
            self.wait()
        token = self.device.peek("history", slot, position, ticket)
        if token == FAULTED:
            self._settle()
            token = self.device.peek("history", slot, position)
        if token < 0:
            raise fault(token, self.checkpoint.path, slot, position)
        return token

    def wait(self, ticket: int | None = None) -> None:
        """Until the pass `ticket` (default: every pass) has finished, and, if it was void, has been run again."""
        self.device.wait(ticket)
        if self._decoding is not None and voids.is_void(self, ticket):
            self._settle()

    def stream(self, slot: int, ids: Sequence[int], most: int, at_once: int = 1) -> Iterator[int]:
        """Prefill one admitted slot and yield up to `most` tokens (fewer where the context ends), `at_once` of them
        decoded by each submit. The next submit is made before the tokens of one are read (streams.submit_ahead):
        dropping the iterator leaves up to 2 * at_once - 1 passes too many, which is harmless."""
        return streams.stream(self, slot, ids, most, at_once)

    # -------------------------------------------------------------------------------------------- blocking conveniences
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Prefill prompts {slot: ids}, admitting slots that are not live; returns the first token sampled for each."""
        with self.lock, interrupts.allowed():
            for slot in prompts:
                if slot not in self.positions:
                    self.admit(slot=slot)
            self.wait(self.submit_prefill(prompts))
            return {
                slot: self.token(slot, self.positions[slot])
                for slot in prompts
                if self.positions[slot] < self.cache.ctx
            }

    def decode(self, steps: int, slots: Sequence[int] | None = None) -> dict[int, list[int]]:
        """`steps` more tokens for each slot (default: all live ones), in one submit."""
        with self.lock, interrupts.allowed():
            slots = tuple(sorted(self.positions) if slots is None else slots)
            start = {s: self.positions[s] + 1 for s in slots}
            if any(start[s] + steps > self.cache.ctx for s in slots):
                raise ContextExceeded(f"{steps} more tokens do not fit in the context of {self.cache.ctx}")
            ticket = self.submit_decode(slots, steps)
            return {s: [self.token(s, at, ticket) for at in range(start[s], start[s] + steps)] for s in slots}

    def logits(self, ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
        """Teacher forcing: logits float32 [len(ids), vocab], by passes of at most `chunk` rows."""
        return np.concatenate(list(self.logits_by_pass(ids, chunk)))

    def logits_by_pass(self, ids: Sequence[int], chunk: int | None = None) -> Iterator[np.ndarray]:
        """The rows of `logits` pass by pass: takes the memory of one pass, whatever the length and the vocabulary."""
        return self.logits_of([ids], chunk)

    def logits_of(self, sequences: Sequence[Sequence[int]], chunk: int | None = None) -> Iterator[np.ndarray]:
        """As `logits_by_pass`, for several sequences one after another. As many as there are free slots are batched,
        because a pass reads every weight however few rows it has."""
        return self.lock.steps(teacher_forcing.logits_of(self, sequences, chunk))

    def hidden_states(self, ids: Sequence[int], chunk: int | None = None, streams: bool = False) -> np.ndarray:
        """Residual stream, float32 [layers + 1, len(ids), hidden]: after the scaled embedding and after each layer. Of
        several streams (Gemma 3n) the one that layers compute on; `streams`: all, [layers + 1, len(ids), streams,
        hidden]."""
        with self.lock, interrupts.allowed():
            return teacher_forcing.hidden_states(self, ids, chunk, streams)

    # -------------------------------------------------------------------------------------------------------- reports
    @property
    def counters(self) -> Counters:
        return self.device.counters

    @property
    def precision(self) -> Mapping[str, tuple[str, ...]]:
        return precision_by_phase(
            self.plan("decode", *(self.sizes.outs[-1],) * 2), self.plan("prefill", self.sizes.rows[-1], 1)
        )

    def next_pipeline_slot(self) -> int:
        """The pipeline slot for the next prefill pass: the one whose last pass was the longest ago."""
        self._last_pipeline_slot = (self._last_pipeline_slot + 1) % self.device.pipeline_depth
        return self._last_pipeline_slot

    def program(
        self,
        phase: Phase,
        rows: int,
        outs: int,
        capture: bool = False,
        sample: bool = True,
        pipeline_slot: int = 0,
        options: Collection[Option] = (),
    ) -> Program:
        """The plan (planning.planner.plan) of a pass with these row counts, buckets of `sizes`; compiled at its first
        use."""
        key = (phase, rows, outs, capture, sample, pipeline_slot, frozenset(options))
        if key not in self.programs:
            cooperative = self.cooperative and (phase == "decode" or "verify" in options)  # passes that are run again
            self.programs[key] = self.device.compile(
                self.plan(*key), profile=self.config.profile, cooperative=cooperative
            )
        return self.programs[key]

    def forget_programs(self, phase: Phase) -> None:
        """Compile the programs of a phase, and those that verify, anew at their next use."""
        self.programs = {key: p for key, p in self.programs.items() if key[0] != phase and "verify" not in key[-1]}
        self._decoding = None

    def plan(
        self,
        phase: Phase,
        rows: int,
        outs: int,
        capture: bool = False,
        sample: bool = True,
        pipeline_slot: int = 0,
        options: Collection[Option] = (),
    ) -> Plan:
        made = plan(self.target, rows, outs, phase, capture, sample, self._layouts.get(phase), options)
        devices = {s.device for s in segments(made)}
        if not devices <= self.device.drives:
            raise SpecError(
                f"schedule {self.target.schedule.schedule.name}: steps are placed on {sorted(devices)}, "
                f'but this engine drives {", ".join(sorted(self.device.drives))}: use device = "main"'
            )
        if self.device.pipeline_depth == 1 or phase == "decode":
            return made
        return for_pipeline_slot(made, pipeline_slot, self.target.schedule, self._layouts.get(phase, made).arena_bytes)

    def warm_up(self, rows: int = 1, options: Collection[Option] = ()) -> None:
        """Compile what decoding and a prompt of `rows` tokens need, so that their passes only submit; with `options`,
        what one sequence needs whose tokens are chosen so."""
        largest = self.sizes.rows[-1]
        last = rows % largest or largest
        for i in range(self.device.pipeline_depth):
            if rows > largest:
                self.program("prefill", largest, 0, pipeline_slot=i)  # only full chunks can lack a last row
            self.program(
                "prefill", bucket_of(last, self.sizes.rows), self.sizes.outs[0], pipeline_slot=i, options=options
            )
        for outs in self.sizes.decode[:1] if options else self.sizes.decode:
            self.program("decode", outs, outs, options=options)
        for n in range(2, min(self.sizes.guesses + 1, self.sizes.wanted) + 1 if self.sizes.guesses else 0):
            self.program(
                "prefill", bucket_of(n, self.sizes.rows), bucket_of(n, self.sizes.wants), options={*options, "verify"}
            )

    # ------------------------------------------------------------------------------------------------------- internals
    def _largest_plans(self) -> list[Plan]:
        """Plans that between them declare every tensor at its largest, and use the most of the arena."""
        sizes, plans = self.sizes, [self._layouts["decode"]]
        for i in range(self.device.pipeline_depth):
            plans.append(self.plan("prefill", sizes.rows[-1], sizes.wanted, pipeline_slot=i, options=OPTIONS))
            plans.append(self.plan("prefill", sizes.logits, sizes.logits, sample=False, pipeline_slot=i))
            plans.append(self.plan("prefill", sizes.hidden, 0, capture=True, pipeline_slot=i))
        return plans

    def check(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """ValueError for a prompt that cannot be run."""
        check_prompts(prompts, self.positions, self.target.hparams.vocab, self.cache.ctx)

    def _decode_rows(self, slots: tuple[int, ...]) -> None:
        """The message of rows that decode one token of each slot, in every pass from now on."""
        self._settle()
        n = len(slots)
        bucket, options = bucket_of(n, self.sizes.decode), self.choosing.options(slots)
        self._decoder = self.program("decode", bucket, bucket, options=options)
        onward, masks = np.full(n, GOES_ON, np.int32), self._mask_rows(slots)
        self.inbox.put(Rows(onward, onward, np.array(slots, np.int32), np.arange(n, dtype=np.int32), masks))
        self._message = True
        self._decoding = slots

    def _mask_rows(self, slots: Sequence[int]) -> np.ndarray | None:
        return self.choosing.mask_rows(slots) if self.choosing.constrained(slots) else None

    def _settle(self) -> None:
        """Wait for every pass, and run void ones again: the host may write io tensors only while no pass reads them."""
        self.device.wait()
        self._timing.stop()
        if self.served and voids.is_void(self):
            voids.drop(self)  # who made these passes starts again
        elif self._decoding is not None and voids.is_void(self):
            voids.run_again(self, self._decoding)
        self.served = False

    def run_chunk(self, chunk: Chunk, program: Program) -> int:
        """Submit one prefill pass, once the last pass of its pipeline slot has finished; returns its ticket."""
        pipeline_slot = program.plan.pipeline_slot
        if self._decoding is not None:  # its passes may be void, and are run again with the rows that they had
            self._settle()
        elif pipeline_slot in self._slot_ticket:
            self.device.wait(self._slot_ticket[pipeline_slot])
            self._timing.stop(pipeline_slot)
        self._decoding = None
        masks = self._mask_rows(chunk.slots[chunk.out_rows].tolist())
        self.inbox.put(Rows(chunk.tokens, chunk.positions, chunk.slots, chunk.out_rows, masks))
        self._message = True
        ticket = self._submit(program)
        if pipeline_slot is not None:
            self._slot_ticket[pipeline_slot] = ticket
        return ticket

    def submit_scheduled(self, program: Program, rows: Rows | None, times: int = 1) -> int:
        """Submit a scheduled pass with these rows (None: the last ones), and `times` - 1 that go on from there; its
        ticket."""
        if rows is not None:
            self._decoding = None
            self.inbox.put(rows)
            self._message = True
        self.served = True
        return self._submit(program, times)

    def settle(self) -> None:
        """Until every pass has finished, void ones run again; those of the scheduler are dropped."""
        self._settle()

    def _submit(self, program: Program, times: int = 1) -> int:
        if self.config.profile:
            self._timing.start(program)
        try:
            ticket = program.submit(times)
        except BaseException:
            self.inbox.lost_count()
            raise
        self.inbox.begun += times
        if self._message:
            self.inbox.taken(ticket)
            self._message = False
        if self.config.profile and program.plan.pipeline_slot is None:
            self.device.wait(ticket)
            self._timing.stop()
        return ticket

    def result(self, decl: TensorDecl) -> None:
        """Store a tensor of logits or hidden states that a plan leaves for the host, at its first use."""
        if decl.name not in self._stored:
            self.device.store(decl)
            self._stored.add(decl.name)
