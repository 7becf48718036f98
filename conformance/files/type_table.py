"""python -m conformance.files.type_table [TYPE ...]: the loss of the shipped demonstration model in every type of file.
The table of docs/quantisation.md was made like this from the model as trained.

Each row: nats per token over the 3025 held-out predictions, and the distance (KL divergence in nats, share of equal
likeliest tokens) between a device's distributions and the exact decoding of the same file: float32 activations on the
cpu device.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import hybrid
from conformance.files.kquants import write_gguf
from conformance.support.models import demo, documents, nats
from hybrid.checkpoint import open_checkpoint

TYPES = (
    "q8_0",
    "q6_k",
    "q5_k_m",
    "q5_k",
    "q5_1",
    "q5_0",
    "q4_k_m",
    "q4_k",
    "q4_1",
    "q4_0",
    "iq4_nl",
    "iq4_xs",
    "q3_k",
    "q2_k",
)
RUNS = (("cpu", "auto"), ("vulkan", "exact"), ("vulkan", "auto"))


def logits(path: Path, device: str, precision: str) -> list[tuple[list[int], np.ndarray]]:
    with hybrid.load(path, device, precision=precision) as model:  # type: ignore[arg-type]
        return [(ids, model.logits(ids)) for ids in documents(model)]


def log_softmax(values: np.ndarray) -> np.ndarray:
    """f64, natural logarithm of the probabilities of each row of logits."""
    z = values.astype(np.float64) - values.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def row(path: Path, types: str) -> str:
    exact = logits(path, "cpu", "exact")
    cells = [types, f"{path.stat().st_size / 1e6:.2f}", f"{mean_nats(exact):.4f}"]
    for device, precision in RUNS:
        got, kl, same = logits(path, device, precision), [], []
        for (_, a), (_, b) in zip(exact, got, strict=True):
            p, q = log_softmax(a), log_softmax(b)
            kl.append((np.exp(p) * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
        cells.append(
            f"{mean_nats(got):.4f}, {np.concatenate(kl).mean():.1e}, {100 * np.concatenate(same).mean():.1f} %"
        )
    return "| " + " | ".join(cells) + " |"


def mean_nats(runs: list[tuple[list[int], np.ndarray]]) -> float:
    return float(np.concatenate([nats(z, ids) for ids, z in runs]).mean())


def main(wanted: list[str]) -> None:
    print("| file | MB | exact decoding | " + " | ".join(f"{d}, {p}" for d, p in RUNS) + " |")
    print("|" + " - |" * (3 + len(RUNS)))
    with tempfile.TemporaryDirectory() as folder, open_checkpoint(demo("f32")) as source:
        for types in wanted or TYPES:
            print(row(write_gguf(source, Path(folder) / f"{types}.gguf", types), types), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
