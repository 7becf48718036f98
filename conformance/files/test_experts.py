"""Mixtures of experts in files and in the engine, beside the equations in float64."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import hybrid
from conformance.support import plain_gemma4
from conformance.support.devices import BACKENDS, Devices
from conformance.support.gguf_files import finish
from conformance.support.synthetic import tiny_gemma4, write_hf
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.checkpoint.families import family_of
from hybrid.checkpoint.gguf_metadata import write_metadata
from hybrid.convert import convert

SIZES = {"few": (8, 2, 32), "many": (128, 8, 32), "all": (4, 4, 64)}
IDS = np.random.default_rng(3).integers(4, 300, 40).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_logits_are_those_of_the_equations(devices: Devices, backend: str, sizes: str, tmp_path: Path) -> None:
    """Prefill, decoding alone, and decoding in a batch."""
    devices.get(backend)
    path = write_hf(tmp_path / "hf", tiny_gemma4(inputs=False, experts=SIZES[sizes]), dtype="f32")
    with open_checkpoint(path) as checkpoint:
        wanted, _ = plain_gemma4.forward(checkpoint, IDS)
    with hybrid.load(path, backend, ctx=64, slots=3) as model:
        assert np.abs(model.logits(IDS) - wanted).max() < 2e-3
        alone = [model.submit(ids, max_tokens=6, ignore_eos=True).result().ids for ids in (IDS, IDS[:7], IDS[:1])]
        known = wanted[:, : model.checkpoint.tokenizer.n_tokens].argmax(-1)
        assert [ids[0] for ids in alone] == known[[-1, 6, 0]].tolist()
        together = [model.submit(ids, max_tokens=6, ignore_eos=True) for ids in (IDS, IDS[:7], IDS[:1])]
        assert [h.result().ids for h in together] == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_experts_of_each_row_can_be_read(
    devices: Devices, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the logits of prompts and of decode passes, each sequence's own where several share passes."""
    devices.get(backend)
    path = write_hf(tmp_path / "hf", tiny_gemma4(inputs=False, experts=SIZES["few"]), dtype="f32")
    texts, routed, router = (IDS[:9], IDS[20:25]), [], plain_gemma4.Plain.router

    def noted(self: plain_gemma4.Plain, x: np.ndarray, layer: int) -> np.ndarray:
        routed.append(router(self, x, layer))
        return routed[-1]

    monkeypatch.setattr(plain_gemma4.Plain, "router", noted)
    with open_checkpoint(path) as checkpoint:
        for ids in texts:
            plain_gemma4.forward(checkpoint, ids)
    wanted = [{*np.argsort(-row)[:2].tolist()} for p in routed for row in p]  # by text, layer, position
    with hybrid.load(path, backend, ctx=64, slots=2, prove=False) as model:
        layers = model.hparams.n_layers
        prompts = [list(model.engine.forced([ids])) for ids in texts]
        found = [np.concatenate([part.experts[i] for part in parts]) for parts in prompts for i in range(layers)]
        assert [{*row.tolist()} for chosen in found for row in chosen] == wanted
        decoded = list(model.engine.decode_logits(texts))
        for t, ids in enumerate(texts):
            rows = [step.experts[i][t] for i in range(layers) for step in decoded[: len(ids)]]
            assert [{*row.tolist()} for row in rows] == wanted[t * 9 * layers :][: len(ids) * layers]
        together = [part.experts[0] for part in model.engine.forced(texts)]
        assert np.array_equal(np.concatenate(together), np.concatenate([found[0], found[layers]]))


def write_apart(source: Checkpoint, path: Path) -> None:
    """A GGUF file with each expert's gate and up in two stacks."""
    writer = gguf.GGUFWriter(path, "gemma4")
    write_metadata(writer, source, "f32")
    for name in source.names:
        array, family = source.tensor(name).array, family_of(source.hparams)
        array = array.reshape(family.gguf_shape(source.hparams, name, array.shape))
        halves = np.split(array, 2, axis=1) if "ffn_gate_up_exps" in name else [array]
        names = [name.replace("gate_up", half) for half in ("gate", "up")] if len(halves) > 1 else [name]
        for one, part in zip(names, halves, strict=True):
            writer.add_tensor(one, np.ascontiguousarray(part))
    finish(writer)


def test_conversions_keep_every_number(tmp_path: Path) -> None:
    """Hugging Face's layout to GGUF and back; GGUF files with gate and up apart; both have three axes."""
    hf = write_hf(tmp_path / "hf", tiny_gemma4(inputs=False, experts=SIZES["few"]), dtype="f32")
    for source, target, form in ((hf, "m.gguf", "gguf"), (tmp_path / "m.gguf", "back", "hf")):
        with open_checkpoint(source) as a:
            convert(a, tmp_path / target, "f32", format=form)  # type: ignore[arg-type]
    with open_checkpoint(hf) as a:
        write_apart(a, tmp_path / "apart.gguf")
    with open_checkpoint(hf) as a, open_checkpoint(tmp_path / "m.gguf") as b, open_checkpoint(tmp_path / "back") as c:
        assert a.hparams.layers == b.hparams.layers == c.hparams.layers and a.hparams.layers[0].n_experts == 8
        with open_checkpoint(tmp_path / "apart.gguf") as d:
            for name in a.names:
                x = a.tensor(name).array
                assert all(np.array_equal(x, other.tensor(name).array) for other in (b, c, d)), name
            name = "blk.1.ffn_gate_up_exps.weight"
            assert np.array_equal(d.rows(name, 30, 70).array, a.tensor(name).array[30:70])
            assert d.packed(name).load().array.tobytes() == a.tensor(name).array.tobytes()
