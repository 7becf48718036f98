"""Inter-workgroup flags (workgroup_flags.slang): a layer in one dispatch makes the text of separate steps, published words
are cleared when all have read them, and where a word is never published, the bound of the wait ends the pass, not the
text."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.engine.test_engine_cpu import IDS
from conformance.mutation.mutate import load, mutated_spirv
from conformance.support.cooperative import (
    HPARAMS,
    MUTANT_WORD,
    SINCE_WORD,
    engine,
    give_up,
    layers,
    set_control,
    tuned,
)
from conformance.support.devices import Devices, left_zero, need_compiler, open_backend, spy_kernels
from conformance.support.paths import MUTANTS
from conformance.support.synthetic import write_hf
from conformance.support.texts import ask, take
from conformance.support.ties import INT8_NEAR, INT8_RMS
from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.random import random_checkpoint
from hybrid.core.plan import FAULTED
from hybrid.devices.opening import open_device
from hybrid.kernels.vulkan.device import VulkanDevice

pytestmark = pytest.mark.width

pytestmark = pytest.mark.slow
FLAG_MUTANTS = {s.name: s for s in load(MUTANTS / "workgroup_flags")}
SILENT = {
    "a row of the output product": ("layer", 1),
    "a block of h": ("layer", 2),
    "a row of the down product": ("layer", 3),
    "a partial result of attention": ("attention", 1),
}
WRONG = {
    "a block's scales exchanged": 4,
    "a row of the output product is not cleared": 5,
    "h is not cleared": 6,
    "a row of the down product is not cleared": 7,
}
Mutants = Callable[[str], Any]
Texts = dict[str, tuple[list[int], bytes]]
PROMPT, TOKENS, WITHIN_S = IDS[:40], 16, 2.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_checkpoint(write_hf(tmp_path_factory.mktemp("workgroup_flags"), HPARAMS, dtype="f32"))


@pytest.fixture(scope="module")
def sound(open_devices: Devices, checkpoint: Any) -> tuple[Texts, set[str]]:
    """Texts of separate steps, and of layers in one dispatch with either merge; and the kernels of the first and the
    last."""
    device = open_devices.get("vulkan")
    texts = {"1": decode(device, checkpoint, 1)}
    with pytest.MonkeyPatch.context() as patch:
        chosen = spy_kernels(device, patch)
        return texts | {
            "2": decode(device, checkpoint, 2),
            "separate": decode(device, checkpoint, 1, layer=False),
        }, chosen


@pytest.fixture(scope="module")
def texts(sound: tuple[Texts, set[str]]) -> Texts:
    return sound[0]


@pytest.fixture(scope="module")
def mutants(
    sound: tuple[Texts, set[str]], checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mutants]:
    """A device with the kernels of a mutant, by name; each is opened once."""
    need_compiler()
    (_, chosen), opened = sound, dict[str, Any]()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as closing:
        folder, made = tmp_path_factory.mktemp("mutants"), tmp_path_factory.getbasetemp()
        made = made.parent if os.environ.get("PYTEST_XDIST_WORKER") else made
        patch.setattr(
            "hybrid.kernels.vulkan.kernel.cache_path", lambda *of: folder / "pipelines"
        )  # no mutant in the user's cache

        def of(name: str) -> Any:
            if name not in opened:
                with open(
                    made / "workgroup_flags.lock", "w"
                ) as lock:  # compiled once, however many processes the run has
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if not (made / "workgroup_flags" / name).exists():
                        (folder / name).mkdir()
                        spirv = mutated_spirv(FLAG_MUTANTS[name], chosen, folder / name)
                        (made / "workgroup_flags").mkdir(exist_ok=True)
                        shutil.copytree(spirv, folder / f"{name}.whole")
                        (folder / f"{name}.whole").rename(made / "workgroup_flags" / name)
                spirv = made / "workgroup_flags" / name
                opened[name] = closing.enter_context(open_backend("vulkan", spirv=spirv))
                decode(
                    opened[name], checkpoint, 1, layer=False
                )  # drivers compile at the first run: compiling is not waiting
            return opened[name]

        yield of


def decode(device: Any, checkpoint: Any, merge: int, layer: bool = True, mutant: int = 0) -> tuple[list[int], bytes]:
    """Tokens, and what an aborted step leaves in place of one; the bits of the last layer's keys. Nothing published may
    be left."""
    with tuned(device, merge, layer):
        made = engine(device, checkpoint)
        events = ask(made, PROMPT, TOKENS).events()
        tokens = take(events, 2)
        set_control(made, {MUTANT_WORD: mutant})
        tokens += take(events, TOKENS - 2)
        assert any(layers(p) for p in device.programs) == layer, "whether a layer was recorded as one dispatch"
        assert all(left_zero(device, program) for program in device.programs)
        assert made.faults == []
        keys = device.read(f"kv.{HPARAMS.n_layers - 1}.k")
        assert any(part.any() for part in keys.parts)
        reached = device.read("next_position").array[0], device.read("next_token").array[0]
        give_up(made)
        program = made.runner.program("decode", 1, 1)
        device.wait(program.submit())
        assert (device.read("next_position").array[0], device.read("next_token").array[0]) == reached
        tokens.append(device.peek("history", 0, int(reached[0]) + 1))
        return tokens, b"".join(p.tobytes() for p in keys.parts)


def test_a_layer_in_one_dispatch_makes_the_text_of_separate_steps(texts: Texts) -> None:
    assert texts["1"] == texts["2"]
    assert texts["1"][0] == texts["separate"][0]
    assert texts["1"][0][-1] == FAULTED and FAULTED not in texts["1"][0][:-1]


@pytest.mark.parametrize(
    ("model", "layers", "kernel"), [("gemma3-4b", 6, ".f16"), ("gemma4-e2b", 18, ".own"), ("gemma4-e4b", 26, ".own")]
)
def test_a_layer_that_ends_with_the_next_attention_makes_the_text_of_separate_steps(
    devices: Devices, model: str, layers: int, kernel: str
) -> None:
    """On published shapes, sampled: a wrong number changes all that follows. Sums in another order move codes of int8
    and so logits a little: the texts are the same up to a choice that this may have moved. Those of Gemma 4 norm their
    values, their layers have their own input, and the last of these read the cache of others; a row's words are polled
    at once."""
    device = devices.get("vulkan")
    if device.cores == 1 or device.storage_buffers < 64:
        pytest.skip(
            f"{device.name} binds {device.storage_buffers} buffers and counts {device.cores} multiprocessors: too few"
        )
    prompt = [int(i * 7919 + 13) % 4000 + 5 for i in range(300)]
    found: list[Any] = []
    kernels, separate = [], []
    for use in ({"workgroups": 0}, {"workgroups": "1 * cores", "threads": 768, "attention": 1}):
        opened = open_device("vulkan")
        made = opened.device
        assert isinstance(made, VulkanDevice)
        with (
            made.tuning.forced("layer", use),
            hybrid.load(random_checkpoint(model, layers=layers, vocab=4096), opened, ctx=1024) as m,
        ):
            request = m.submit(prompt, max_tokens=60, temperature=1.0, seed=3, logprobs=20, ignore_eos=True)
            found.append(request.result().logprobs)
            named = [d.kernel.name for p in made.programs for d in p.recording.dispatches]
            assert m.engine.faults == []
        kernels.append([name for name in named if name.startswith("layer.")])
        separate.append(sum(name.startswith("decode_attention") for name in named))
    assert not kernels[0] and any(kernel in name for name in kernels[1]) and separate[1] < separate[0]
    steps = list(zip(*found, strict=True))
    alike = next((i for i, (ours, theirs) in enumerate(steps) if ours.id != theirs.id), len(steps))
    assert alike >= 30 and len({ours.id for ours, _ in steps}) > 3
    tops = [(dict(ours.top), dict(theirs.top)) for ours, theirs in steps[: alike + 1]]
    moved = np.array([ours[token] - theirs[token] for ours, theirs in tops for token in ours if token in theirs])
    assert (
        len(moved) > 10 * len(tops) and np.sqrt(np.square(moved).mean()) < INT8_RMS and np.abs(moved).max() < INT8_NEAR
    )


@pytest.mark.parametrize("name", WRONG)
def test_what_is_published_wrongly_or_left_is_caught(
    mutants: Mutants, checkpoint: Any, texts: Texts, name: str
) -> None:
    assert caught(lambda: decode(mutants("layer"), checkpoint, 2, mutant=WRONG[name]), texts)


def test_an_aborted_step_that_chooses_is_caught(mutants: Mutants, checkpoint: Any, texts: Texts) -> None:
    assert caught(lambda: decode(mutants("sample"), checkpoint, 2), texts)


def caught(run: Callable[[], tuple[list[int], bytes]], texts: Texts) -> bool:
    """By an assertion of `decode`, or by what it gives: compared here, for an assertion that fails takes 10 s to say
    how megabytes differ."""
    try:
        found = run()
    except AssertionError:
        return True
    return found != texts["2"]


def test_the_mutants_are_sound_until_they_are_asked_for(mutants: Mutants, checkpoint: Any, texts: Texts) -> None:
    for name in ("layer", "attention"):
        assert decode(mutants(name), checkpoint, 2) == texts["2"]


# --- producers that publish nothing ----------------------------------------------------------------------------------


class Clock:
    """Seconds that a generation takes beside compiling: of the processor where that is the device, so that neighbours
    of the test do not count."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = time.process_time if device.info.kind == "cpu" else time.perf_counter
        self.compiling = 0.0
        compiles = device.compile

        def compile(*args: Any, **options: Any) -> Any:
            begin = self.read()
            try:
                return compiles(*args, **options)
            finally:
                self.compiling += self.read() - begin

        monkeypatch.setattr(device, "compile", compile)
        self.begin = self.read()

    def seconds(self) -> float:
        return self.read() - self.begin - self.compiling


@pytest.mark.parametrize("producer", SILENT)
def test_a_producer_that_never_publishes_costs_no_token(
    mutants: Mutants, checkpoint: Any, texts: Texts, producer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the middle of a text on, with more steps on their way."""
    name, mutant = SILENT[producer]
    device, wanted = mutants(name), texts["separate"][0][:-1]
    with tuned(device):
        made = engine(device, checkpoint)
        events = ask(made, PROMPT, TOKENS).events()
        found = take(events, 2)
        set_control(made, {MUTANT_WORD: mutant, SINCE_WORD: len(PROMPT) + 7})
        clock = Clock(device, monkeypatch)
        found += take(events, TOKENS - 2)
        assert clock.seconds() < WITHIN_S
        assert found == wanted
        assert len(made.faults) == 1 and not made.runner.cooperative
