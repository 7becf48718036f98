"""Drafters that read their target's cache: their logits are transformers', the text is the target's, pairs fit, files keep
the head."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.assistants import FILE, GUESSES, PAIRS, PROMPT, ROUNDS, pair
from conformance.support.devices import BACKENDS, for_model
from conformance.support.fake_runner import request
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, tiny_assistant, tiny_gemma4, write_hf
from hybrid.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from hybrid.convert import convert
from hybrid.core.plan import FAULTED
from hybrid.core.tensor import Tensor
from hybrid.engine.assistant import Assistant
from hybrid.engine.request import Request
from hybrid.engine.runner import CONTINUES, DRAFTED, Flight
from hybrid.engine.sampling import mask_of
from hybrid.engine.scheduler import Pass
from hybrid.engine.speculation import MOST

TOKENS = 20
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "adjusted": {"temperature": 0.5, "repetition_penalty": 1.2, "logit_bias": {9: -3.0}, "seed": 1},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: pair(tmp_path_factory.mktemp(name), name) for name in PAIRS}


def loaded(paths: tuple[Path, Path], backend: str, **options: Any) -> hybrid.Model:
    settings: dict[str, Any] = {"ctx": 96, "precision": "exact", "prove": False, "speculate": GUESSES}
    return hybrid.load(paths[0], for_model(backend), draft=paths[1], **(settings | options))


def drafter(model: hybrid.Model) -> Assistant:
    assert model.speculator is not None and isinstance(model.speculator.drafter, Assistant)
    return model.speculator.drafter


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[np.ndarray]]]:
    """Logits of every guess by the tokens that its sequence had: each pass is run once more before, without sampling."""
    found: dict[int, list[np.ndarray]] = {}
    guess = Assistant._guess

    def both(self: Assistant, requests: list[Request], i: int) -> None:
        start = self.runner.start

        def again(made: Pass) -> Flight:
            self.runner.start = start  # type: ignore[method-assign]
            rows = self.runner.captured(start(replace(made, capture="decode"))).rows
            for run, row in zip(made.runs, rows, strict=True):
                found.setdefault(len(run.seq.ids), []).append(row)
            return start(made)

        self.runner.start = again  # type: ignore[method-assign]
        guess(self, requests, i)
        self.runner.start = start  # type: ignore[method-assign]

    monkeypatch.setattr(Assistant, "_guess", both)
    yield found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PAIRS)
def test_guesses_are_those_of_transformers(
    folders: Any, logits: dict[int, list[np.ndarray]], name: str, backend: str
) -> None:
    """Chained: each guess starts from the one before. Sliding layers see as many keys as the window is wide."""
    golden = np.load(FILE)
    with loaded(folders[name], backend) as model:
        drafter(model).queues = False  # nothing queued behind a verification, so that each guess is captured
        ids = list(model.submit(PROMPT, max_tokens=ROUNDS + GUESSES + 1, temperature=0, ignore_eos=True).result().ids)
    for i in range(ROUNDS):
        assert ids[i] == golden[f"{name}.{i}.token"]
        found, wanted = np.stack(logits[len(PROMPT) + 1 + i][:GUESSES]), golden[f"{name}.{i}.logits"]
        assert np.abs(found - wanted).max() < 2e-3
        assert wanted.std() > 0.5


def texts(model: hybrid.Model, way: str, prompts: int, **more: Any) -> list[tuple[int, ...]]:
    handles = [
        model.submit(PROMPT[: 9 + 4 * i], max_tokens=TOKENS, ignore_eos=True, **WAYS[way], **more)
        for i in range(prompts)
    ]
    return [handle.result().ids for handle in handles]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_the_same_with_a_drafter(folders: Any, backend: str, way: str) -> None:
    """Batched sequences; random drafters are hardly ever right."""
    name = "small-clusters" if way == "greedy" else "large"
    with loaded(folders[name], backend, slots=3) as model:
        assert texts(model, way, 3) == texts(model, way, 3, speculate=0)
        assert model.metrics().drafted > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_is_the_same_whatever_a_drafter_says(
    folders: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Its tokens are written over: right ones, wrong ones, some right; also as --deterministic."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    right = {"all": lambda at: True, "none": lambda at: False, "some": lambda at: at % 3 > 0}
    chosen = "all"

    def overwrite(self: Assistant, wanted: Any) -> Any:
        given = propose(self, wanted)
        self.runner.device.wait()
        for r, words in given.items():
            row = np.zeros((1, self.runner.cache.ctx), np.int32)
            text = known[tuple(r.prompt)]
            for at in range(len(r.ids), len(r.ids) + len(words)):
                token = text[at - r.n_prompt] if at - r.n_prompt < len(text) else 0
                row[0, at] = token if right[chosen](at) else token ^ 1
            self.runner.device.write("history", Tensor.of(row), r.slot)
        return given

    propose = Assistant.propose
    for deterministic in (False, True) if LONG or backend == "vulkan" else (False,):
        with loaded(folders["large"], backend, slots=2, deterministic=deterministic) as model:
            plain = texts(model, "sampled", 2, speculate=0)
            known.update({PROMPT[: 9 + 4 * i]: text for i, text in enumerate(plain)})
            monkeypatch.setattr(Assistant, "propose", overwrite)
            for chosen in right:
                before = model.metrics()
                assert texts(model, "sampled", 2) == plain
                after = model.metrics()
                drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
                assert {"all": drafted, "none": 0}.get(chosen, accepted) == accepted
                assert drafted and (chosen != "some" or 0 < accepted < drafted)
            monkeypatch.setattr(Assistant, "propose", propose)


class Bounded:
    """Allows even ids for so many tokens, then odd ones. steady: whether it says so."""

    def __init__(self, vocab: int, left: int, steady: bool) -> None:
        self.vocab, self.left, self.says = vocab, left, steady

    def mask(self) -> np.ndarray:
        return mask_of(range(0 if self.left > 0 else 1, self.vocab, 2), self.vocab)

    def accept(self, token: int) -> None:
        self.left -= 1

    def copy(self) -> Bounded:
        return Bounded(self.vocab, self.left, self.says)

    def steady(self) -> int:
        return max(0, self.left) if self.says else 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_that_the_host_does_not_read_need_a_steady_mask(folders: Any, backend: str) -> None:
    with loaded(folders["large"], backend, slots=2) as model:
        found = []
        for steady, speculate in ((True, 0), (False, GUESSES), (True, GUESSES)):
            before, limits = model.metrics().drafted, Bounded(320, 9, steady)
            handle = model.submit(
                PROMPT, max_tokens=TOKENS, temperature=0, ignore_eos=True, constraint=limits, speculate=speculate
            )
            found.append((handle.result().ids, model.metrics().drafted - before))
    assert found[0][0] == found[1][0] == found[2][0]
    assert [drafted > 0 for _, drafted in found] == [False, False, True]
    assert [token % 2 for token in found[0][0]] == [0] * 9 + [1] * (TOKENS - 9)


# --- pairs ------------------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, says: str, target: Any = None, **changes: Any) -> None:
    hp = tiny_gemma4() if target is None else target
    paths = write_hf(tmp_path / "target", hp), write_hf(tmp_path / "draft", tiny_assistant(tiny_gemma4(), **changes))
    with pytest.raises(ValueError, match=says):
        loaded(paths, "cpu")


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    made = tiny_assistant(tiny_gemma4())
    wide = replace(made.layers[2], head_dim=64)
    fewer = replace(made.layers[0], n_kv_heads=1)
    for says, changes in (
        ("needs hidden 96, and that has 64", {"backbone": 96}),
        ("needs vocab 352, and that has 320", {"vocab": 352}),
        ("its layer 2 needs global layers of head_dim 64, and they have 32", {"layers": (*made.layers[:2], wide)}),
        ("its layer 0 needs local layers of n_kv_heads 1, and they have 2", {"layers": (fewer, *made.layers[1:])}),
    ):
        refused(tmp_path / str(len(says)), says, **changes)
    refused(tmp_path / "family", "its schedule gemma3 keeps no hidden state", tiny())


def test_a_drafter_alone_makes_no_text(folders: Any) -> None:
    with pytest.raises(ValueError, match=r"is a drafter: load its target, and give it as draft"):
        hybrid.load(folders["large"][1], "cpu")


# --- files ------------------------------------------------------------------------------------------------------------


def tensors(c: Checkpoint) -> dict[str, np.ndarray]:
    return {name: c.tensor(name).array for name in c.names if not name.endswith("layer_output_scale.weight")}


@pytest.mark.parametrize("name", ["small", "large-clusters"])
def test_conversions_keep_a_drafter(folders: Any, tmp_path: Path, name: str) -> None:
    with open_checkpoint(folders[name][1]) as source:
        convert(source, tmp_path / "mtp.gguf", "f32")
        with open_checkpoint(tmp_path / "mtp.gguf") as sidecar:
            convert(sidecar, tmp_path / "again", "f32", format="hf")
            with open_checkpoint(tmp_path / "again") as again:
                assert source.hparams == replace(sidecar.hparams, eps=source.hparams.eps)
                assert source.hparams == again.hparams
                for other in (sidecar, again):
                    np.testing.assert_equal(tensors(other), tensors(source))
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["model_type"] == "gemma4_assistant" and written["backbone_hidden_size"] == 64
    header = (tmp_path / "again" / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + struct.unpack("<Q", header[:8])[0]])
    assert {"pre_projection.weight", "model.layers.0.self_attn.q_proj.weight"} <= names.keys()
    assert ("masked_embedding.token_ordering" in names) == ("clusters" in name)


def test_a_sidecar_drafts(folders: Any, tmp_path: Path, logits: dict[int, list[np.ndarray]]) -> None:
    """As llama.cpp's converter and others name it, also quantised."""
    target, draft = folders["small-clusters"]
    with open_checkpoint(draft) as source:
        convert(source, tmp_path / "mtp.gguf", "f32")
        convert(source, tmp_path / "q8.gguf", "q8_0")
    raw = (tmp_path / "mtp.gguf").read_bytes()
    for old, new in ((b"gemma4-assistant", b"gemma4_assistant"), (b"nextn.", b"mtp.yy")):
        assert old in raw
        raw = raw.replace(old, new)
    raw = raw.replace(b"mtp.yy", b"nextn.")  # names of another length would move all offsets
    (tmp_path / "other.gguf").write_bytes(raw)
    found = []
    for file in ("mtp.gguf", "other.gguf", "q8.gguf"):
        logits.clear()
        with loaded((target, tmp_path / file), "cpu") as model:
            drafter(model).queues = False
            model.submit(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).result()
        found.append(logits[len(PROMPT) + 1][0])
    np.testing.assert_array_equal(found[0], found[1])
    assert 0 < np.abs(found[2] - found[0]).max() < 0.5


def test_a_damaged_order_of_tokens_is_refused(tmp_path: Path) -> None:
    hp = tiny_assistant(tiny_gemma4(), 16)
    for wrong in (np.zeros(320), np.arange(320) + 1, np.arange(-1, 319)):
        folder = write_hf(tmp_path / "draft", hp)
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        order = open_checkpoint(folder).tensor("nextn.token_ordering.weight").array.tobytes()
        assert raw.count(order) == 1
        file.write_bytes(raw.replace(order, wrong.astype("<i4").tobytes()))
        with (
            open_checkpoint(folder) as c,
            pytest.raises(CheckpointError, match="must name each of the 320 tokens once"),
        ):
            c.tensor("nextn.token_ordering.weight")


# --- passes -----------------------------------------------------------------------------------------------------------


def alone(ctx: int = 60) -> tuple[Assistant, list[Pass | None]]:
    """An assistant on a runner without a device; the passes that it starts, None for an abort."""
    passes = list[Pass | None]()
    runner: Any = SimpleNamespace(
        device=SimpleNamespace(shares=lambda name: True, passes_ahead=2, peek=lambda *place: FAULTED),
        cache=SimpleNamespace(ctx=ctx),
        start=lambda made: (passes.append(made), Flight(made, 1, 0.0))[1],
        abort=lambda: passes.append(None),
    )
    return Assistant(runner, "null", {}, lambda: None), passes


def words(passes: list[Pass | None]) -> list[tuple[Any, ...]]:
    return [(run.slot, run.ids, run.at) for made in passes if made for run in made.runs]


def test_guesses_follow_one_another_on_the_device() -> None:
    small, passes = alone()
    one, two = request(0, [1] * 9, 30), request(1, [1] * 5, 30)
    one.slot, two.slot = 1, 3
    assert small.propose({one: 2, two: 1}) == {one: [DRAFTED - 1] * 2, two: [DRAFTED - 3]}
    assert words(passes) == [(1, (CONTINUES,), -1), (3, (CONTINUES,), -1), (1, (DRAFTED - 1,), -2)]


def test_guesses_behind_a_verification_are_not_made_again() -> None:
    small, passes = alone()
    one = request(0, [1] * 9, 30)
    one.slot = 0
    small.propose({one: 3})
    assert small.queue_after({one: 3}, 2) and len(words(passes)) == 5
    assert small.expects(one) == 0, "the verification is not read yet"
    one.ids += [1, 1]
    assert small.expects(one) == 2
    small.propose({one: 3})
    assert words(passes)[5:] == [(0, (DRAFTED,), -3)], "the third guess alone"
    one.ids += [1]
    assert small.expects(one) == 0, "no pass was queued after that one"
    one.ids = [1] * 56
    assert not small.queue_after({one: 3}, MOST), "beyond the context"


def test_an_aborted_guess_is_forgotten() -> None:
    small, passes = alone()
    one = request(0, [1] * 9, 30)
    one.slot = 0
    small.propose({one: 2})
    small.queue_after({one: 2}, 2)
    small.wait()
    one.ids += [1]
    assert passes[-1] is None and small.expects(one) == 0
