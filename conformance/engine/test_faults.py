"""NaN or infinite weights end in an error that says what to do, on every device and by every path."""

from __future__ import annotations

import functools
import json
import struct
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model, shared_device
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, tiny_gemma3n, write_hf
from conformance.support.texts import ask
from hybrid import generate, inspect, perplexity
from hybrid.checkpoint import finite, open_checkpoint
from hybrid.convert import SAME, Wanted, convert
from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Tensor
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.runner import NotFinite, fault
from hybrid.kernels.vulkan.kernel import kernels_digest

NAN, INF, ONES = "nan", "infinity", "all ones"
BITS = {
    "f32": {NAN: b"\0\0\xc0\x7f", INF: b"\0\0\x80\xff", ONES: b"\xff" * 4},
    "f16": {NAN: b"\0\x7e", INF: b"\0\xfc", ONES: b"\xff" * 2},
    "bf16": {NAN: b"\xc0\x7f", INF: b"\x80\xff", ONES: b"\xff" * 2},
}
PROMPT = [2, 4, 5, 6]
TURN = int(kernels_digest(), 16) % 2


def spoil(folder: Path, tensor: str, row: int, bits: bytes) -> Path:
    """Overwrite element 3 of a row of a tensor of model.safetensors."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    info = json.loads(data[8 : 8 + n])[tensor]
    at = 8 + n + info["data_offsets"][0] + (row * info["shape"][1] + 3) * len(bits)
    data[at : at + len(bits)] = bits
    file.write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def opened():
    with ExitStack() as stack:
        yield functools.cache(lambda backend: stack.enter_context(closing(shared_device(backend))))


@pytest.fixture(params=BACKENDS)
def device(opened, request):
    found = opened(request.param)
    yield found
    found.reset()


# Tensor, type, bad value, precision, softcap: covers each writer and each rounding.
PATHS = [
    ("embed_tokens", "f32", NAN, "exact", 30.0),
    ("embed_tokens", "bf16", INF, "fast", 0.0),
    ("layers.1.self_attn.k_proj", "f16", NAN, "exact", 0.0),
    ("layers.1.self_attn.v_proj", "bf16", INF, "fast", 30.0),
    ("layers.1.self_attn.o_proj", "f32", ONES, "exact", 30.0),
    ("layers.1.mlp.gate_proj", "f32", ONES, "fast", 0.0),
    ("layers.1.mlp.up_proj", "f16", INF, "fast", 0.0),
    ("layers.1.mlp.down_proj", "bf16", ONES, "fast", 30.0),
]


@pytest.mark.parametrize(
    ("device", "path"),
    [
        pytest.param(backend, path, id="-".join(map(str, (backend, *path))))
        for backend in BACKENDS
        for path in (PATHS if LONG or backend == "cpu" else PATHS[TURN::2])
    ],
    indirect=["device"],
)
def test_a_spoilt_matrix_is_noticed_at_the_first_token(tmp_path, device, path):
    """On Vulkan, in the short profile, half of the paths, which change with the kernels."""
    tensor, dtype, what, precision, softcap = path
    folder = write_hf(tmp_path, tiny(softcap=softcap), dtype=dtype)
    spoil(folder, f"model.{tensor}.weight", PROMPT[1], BITS[dtype][what])
    with open_checkpoint(folder) as checkpoint:
        engine = Engine(checkpoint, device, EngineConfig(ctx=64, precision=precision))
        with pytest.raises(
            NotFinite, match=r"after position 3 of slot 0 are NaN or infinite.*--check-finite"
        ) as raised:
            ask(engine, PROMPT, 5).result()
        assert (raised.value.position, raised.value.slot) == (3, 0)
        with pytest.raises(NotFinite, match=r"after position \d are"):
            engine.logits(PROMPT)


@pytest.mark.parametrize(
    ("device", "dtype", "what"),
    [(b, *c) for b in BACKENDS for i, c in enumerate((("f32", NAN), ("bf16", INF))) if LONG or b == "cpu" or i == TURN],
    indirect=["device"],
)
def test_a_sparse_feed_forward_cuts_no_damage_off(tmp_path, device, dtype, what):
    """One gate of a sparse layer of Gemma 3n: its threshold is NaN, and no value exceeds NaN."""
    folder = write_hf(tmp_path, tiny_gemma3n(), dtype=dtype)
    spoil(folder, "model.layers.0.mlp.gate_proj.weight", 1, BITS[dtype][what])
    with open_checkpoint(folder) as checkpoint:
        engine = Engine(checkpoint, device, EngineConfig(ctx=64, precision="exact"))
        with pytest.raises(NotFinite, match="after position 3 of slot 0 are NaN or infinite"):
            ask(engine, PROMPT, 5).result()
        with pytest.raises(NotFinite):
            engine.logits(PROMPT[:2])


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_damage_passes_through_int8_activations(tmp_path, device, weights):
    """A matrix of plain numbers among quantised ones, as checkpoints mix them."""
    folder = write_hf(tmp_path / "hf", tiny(), dtype="f32")
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "m.gguf", weights)
    mixed = tmp_path / "mixed.gguf"
    with open_checkpoint(tmp_path / "m.gguf") as source:
        convert(source, mixed, Wanted(SAME, {"attn": "f32"}))
        assert source.dtype("blk.0.ffn_up.weight") == weights
    with open_checkpoint(mixed) as made:
        at = made.entries["blk.1.attn_v.weight"].load.__self__.offset  # type: ignore[attr-defined]
    data = bytearray(mixed.read_bytes())
    data[at : at + 4] = BITS["f32"][NAN]
    mixed.write_bytes(data)
    with open_checkpoint(mixed) as checkpoint:
        engine = Engine(checkpoint, device, EngineConfig(ctx=64))
        with pytest.raises(NotFinite):
            ask(engine, PROMPT, 5).result()


@pytest.mark.slow
@pytest.mark.parametrize("device_name", BACKENDS)
def test_other_sequences_and_what_comes_after_are_untouched(tmp_path, device_name):
    """A token with a bad embedding. Prompts without it run beside it, before it and after it. The failing prompt is as
    long as its slot's earlier contents, so that a pass in flight would write where the fault was reported."""
    folder = spoil(write_hf(tmp_path, tiny(tied=False), dtype="f32"), "model.embed_tokens.weight", 9, BITS["f32"][NAN])
    with hybrid.load(folder, for_model(device_name), ctx=64, slots=2) as model:
        alone = list(model.generate(PROMPT, 12, ignore_eos=True))
        beside = model.generate(PROMPT, 12, ignore_eos=True)
        pieces = [next(beside)]
        for prompt in ([*PROMPT, 9], [9, 4], [2, 9, *PROMPT]):
            "".join(model.generate(prompt[:-1] if prompt[-1] == 9 else PROMPT, 1, ignore_eos=True))
            with pytest.raises(NotFinite, match=f"after position {len(prompt) - 1} of slot 1"):
                list(model.generate(prompt, 8, ignore_eos=True))
            pieces.append(next(beside))
        assert [*pieces, *beside] == alone == list(model.generate(PROMPT, 12, ignore_eos=True))
        engine = model.engine  # a fault during decoding: the token fed back is not the model's
        handle = ask(engine, PROMPT, 9)

        def spoilt(p: Any, start: Any = engine.runner.start) -> Any:
            if len(handle.request.ids) > len(PROMPT):
                engine.device.wait()
                engine.device.write("next_token", Tensor.of(np.array([9], np.int32)), p.runs[0].slot)
            return start(p)

        engine.runner.start = spoilt
        with pytest.raises(NotFinite, match=r"after position [45]"):
            handle.result()


def test_a_word_that_no_device_writes_is_no_token():
    assert "left -7 as the token for position 3 of slot 1" in str(fault(-7, Path("m.gguf"), 1, 3))


def test_commands_report_and_name_the_tensor(tmp_path, capsys):
    folder = spoil(
        write_hf(tmp_path / "a model", tiny(), dtype="bf16"), "model.layers.2.mlp.up_proj.weight", 7, BITS["bf16"][ONES]
    )
    held_out = tmp_path / "text"
    held_out.write_text("the abc the abc")
    for main, rest in (
        (generate.main, ["--prompt", "the", "--ctx", "32"]),
        (perplexity.main, [str(held_out), "--chunk", "16"]),
    ):
        assert main([str(folder), "--device", "cpu", *rest]) == 1
        found = capsys.readouterr()
        assert "nan" not in found.out.lower() and f"python -m hybrid.inspect '{folder}' --check-finite" in found.err
    assert inspect.main([str(folder), "--check-finite"]) == 1
    found = capsys.readouterr()
    assert found.out == "" and "tensor blk.2.ffn_up.weight of bf16 is damaged: row 7, element 3 is nan" in found.err
    assert inspect.main([str(folder), "--check-finite", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] != []
    good = write_hf(tmp_path / "good", tiny(), dtype="f16")
    assert inspect.main([str(good), "--check-finite"]) == 0
    assert "every number is finite" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", BITS)
def test_every_row_is_checked(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(finite, "_ELEMENTS", 200)  # three rows at a time
    folder = write_hf(tmp_path, tiny(), dtype=dtype)
    read: list[int] = []
    with open_checkpoint(folder) as checkpoint:
        assert list(finite.damaged(checkpoint, read.append)) == []
        assert sum(read) == sum(DTYPES[checkpoint.dtype(n)].nbytes(checkpoint.shape(n)) for n in checkpoint.names)
    spoil(folder, "model.embed_tokens.weight", 319, BITS[dtype][INF])
    spoil(folder, "model.layers.0.self_attn.q_proj.weight", 0, BITS[dtype][NAN])
    with open_checkpoint(folder) as checkpoint:
        found = list(finite.damaged(checkpoint))
    assert (
        "token_embd.weight of" in found[0] and "row 319, element 3 is -inf" in found[0] and "blk.0.attn_q" in found[1]
    )
    assert len(found) == 2
