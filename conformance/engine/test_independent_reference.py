"""Hugging Face transformers as an independent reference for whole models (extra `reference`; skipped where it is not
installed)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conformance.support.devices import BACKENDS, open_backend
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine

transformers = pytest.importorskip("transformers", reason="the extra `reference` is not installed")
torch = pytest.importorskip("torch", reason="the extra `reference` is not installed")

IDS = [2, *range(20, 60), 7, 9, 300, 31]  # longer than the window
SHAPES = {
    "plain": {},
    "capped": {"softcap": 5.0},
    "scaled rope": {"rope_factor": 8.0, "rope_theta_global": 1e4},
    "one kv head, wide heads": {"n_kv_heads": 1, "head_dim": 48},
    "all local": {"layer_is_global": (False, False, False), "window": 33},
    "scale from elsewhere": {"attention_scale": 168.0**-0.5},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dialect", ["new", "old"])
def test_logits_are_those_of_transformers(tmp_path: Path, backend: str, name: str, dialect: str) -> None:
    folder = write_hf(tmp_path, tiny(**SHAPES[name]), dialect=dialect, dtype="f32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        reference = model.eval()(torch.tensor([IDS]), output_hidden_states=True)
    device = open_backend(backend)
    try:
        engine = Engine(open_checkpoint(folder), device, EngineConfig(chunk=16))
        logits, hidden = engine.logits(IDS), engine.hidden_states(IDS)
    finally:
        device.close()
    wanted = reference.logits[0].numpy()
    assert np.abs(logits - wanted).max() < 1e-4 * np.abs(wanted).max()
    # The last of theirs is after the final norm; ours are the residual stream.
    layers = np.stack([h[0].numpy() for h in reference.hidden_states[:-1]])
    assert np.abs(hidden[:-1] - layers).max() < 1e-4 * np.abs(layers).max()
