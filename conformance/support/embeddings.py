"""Tiny embedding models, and the vectors that transformers computes with them.

python -m conformance.support.embeddings          # renews conformance/data/embedding; needs the extra `reference`
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from conformance.support.paths import DATA
from conformance.support.synthetic import tiny_embedding, tiny_embedding2, write_hf

FILE = DATA / "embedding" / "golden.json"
MODELS = {"gemma-embedding": tiny_embedding, "gemma-embedding2": tiny_embedding2}
"""Family -> hyper-parameters."""


def folder_of(folder: Path, family: str) -> Path:
    """The sentence-transformers folder of a family's model."""
    return write_hf(folder, MODELS[family](), dtype="f32", seed=11)


def texts() -> list[list[int]]:
    """Ids of texts shorter and longer than the window."""
    rng = np.random.default_rng(3)
    return [[2, *(int(i) for i in rng.integers(4, 310, n)), 1] for n in (3, 70, 0, 17, 118, 6)]


def reference(folder: Path) -> np.ndarray:
    """Vectors f32 of `texts`, each text alone: the mean of the last hidden states, the matrices beside the model, length
    1. sentence-transformers 6.2 computes the same."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    matrices = [load_file(file)["linear.weight"] for file in sorted(folder.glob("*_Dense/model.safetensors"))]
    found = []
    for ids in texts():
        with torch.no_grad():
            vector = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
            for matrix in matrices:
                vector = matrix @ vector
            found.append(torch.nn.functional.normalize(vector, dim=0).numpy())
    return np.stack(found)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        vectors = {family: reference(folder_of(Path(folder) / family, family)).tolist() for family in MODELS}
    FILE.write_text(json.dumps(vectors))


if __name__ == "__main__":
    main()
