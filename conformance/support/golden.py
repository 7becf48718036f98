"""Golden values of a demonstration model, computed in float64 by the plain references from the numbers in its file:

    python -m conformance.support.golden models/demo-gemma4-q8_0.gguf conformance/data/demo-gemma4

reads the prompts of conformance/data/demo-gemma3/golden.json, and writes golden.json (ids, greedy continuations,
held-out loss) and golden.npz (logits: of the last position, of a long prompt also of the first and the middle one). The
device `cpu` proposes each continuation in float32; it is accepted only if every token is the reference's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import hybrid
from conformance.support import plain_gemma3, plain_gemma3n, plain_gemma4
from conformance.support.paths import DATA
from hybrid.checkpoint import Checkpoint, open_checkpoint

FORWARD: dict[str, Callable[[Checkpoint, Sequence[int]], tuple[np.ndarray, np.ndarray]]] = {
    "gemma3": plain_gemma3.forward,
    "gemma3n": plain_gemma3n.forward,
    "gemma4": plain_gemma4.forward,
}
GREEDY, MAX_DOC, DOCS, MANY = 48, 512, 12, 100
HELD_OUT = DATA / "demo-gemma3" / "held-out.txt"


def positions(length: int) -> list[int]:
    """The positions of a prompt whose logits are kept."""
    return [0, length // 2, length - 1] if length >= MANY else [length - 1]


def nats(logits: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """f64 [len(ids) - 1]: -log p of each next token."""
    z = logits[:-1].astype(np.float64)
    top = z.max(-1, keepdims=True)
    norm = np.log(np.exp(z - top).sum(-1)) + top[:, 0]
    return norm - z[np.arange(len(ids) - 1), list(ids[1:])]


def shifted(before: np.ndarray, after: np.ndarray, bound: float) -> bool:
    """Whether the nats of the same predictions, f64 [n] each, differ in the mean by more than `bound`. A few
    predictions vary by chance, differently with each processor's products: two standard errors of the mean difference
    are allowed beside the bound."""
    moved = after - before
    return bool(abs(moved.mean()) > bound + 2 * moved.std() / np.sqrt(moved.size))


def main(file: Path, folder: Path) -> int:
    prompts = [case["ids"] for case in json.loads((DATA / "demo-gemma3" / "golden.json").read_text())["cases"]]
    cases, arrays = [], {}
    with open_checkpoint(file) as checkpoint, hybrid.load(file, device="cpu", precision="exact") as model:
        forward = FORWARD[checkpoint.hparams.family]
        for i, ids in enumerate(prompts):
            list(model.generate(list(ids), max_tokens=GREEDY, ignore_eos=True))
            assert model.stats is not None
            greedy = list(model.stats.ids)
            logits, _ = forward(checkpoint, [*ids, *greedy])
            if logits[len(ids) - 1 : -1].argmax(-1).tolist() != greedy:
                raise SystemExit(f"prompt {i}: float32's tokens are not the reference's")
            arrays[f"logits_{i}"] = logits[positions(len(ids))].astype(np.float32)
            cases.append({"prompt": model.decode(ids[1:]), "ids": ids, "greedy": greedy, "text": model.decode(greedy)})
            print(f"prompt {i}: {len(ids)} tokens", flush=True)
        texts = [model.encode(text, bos=True)[:MAX_DOC] for text in HELD_OUT.read_text().split("\n\f\n")[:DOCS]]
        losses = np.concatenate([nats(forward(checkpoint, ids)[0], ids) for ids in texts])
    folder.mkdir(parents=True, exist_ok=True)
    note = "float64, plain references of conformance/support, from the numbers in the shipped q8_0 file"
    head = {"note": note, "held_out_nats_per_token": float(losses.mean()), "held_out_tokens": losses.size}
    (folder / "golden.json").write_text(json.dumps(head | {"cases": cases}))
    np.savez_compressed(folder / "golden.npz", **arrays)  # type: ignore[arg-type]
    print(f"{folder}: {losses.mean():.4f} nats per token over {losses.size}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
