"""Pairs of a tiny Gemma 4 and its drafter, and what transformers computes with them.

python -m conformance.support.assistants          # renews conformance/data/assistants.npz; needs the extra `reference`
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from conformance.support.paths import DATA
from conformance.support.synthetic import tiny_assistant, tiny_gemma4, write_hf

FILE = DATA / "assistants.npz"
PAIRS = {"small": (True, 0), "small-clusters": (True, 16), "large": (False, 0), "large-clusters": (False, 16)}
"""Name -> whether the target has per-layer inputs and layers that share caches, clusters of the drafter's head."""
ROUNDS, GUESSES, PROMPT = 2, 3, tuple(int(i) for i in np.random.default_rng(7).integers(6, 300, 21))
WINDOW = 8


def pair(folder: Path, name: str, dtype: str = "f32") -> tuple[Path, Path]:
    """The directories of a target and its drafter."""
    inputs, clusters = PAIRS[name]
    hp = tiny_gemma4(inputs=inputs)
    target = write_hf(folder / f"{name}-target", hp, dtype=dtype, seed=1)
    return target, write_hf(folder / f"{name}-draft", tiny_assistant(hp, clusters), dtype=dtype, seed=5)


def reference(target: Path, draft: Path) -> Iterator[tuple[int, np.ndarray]]:
    """For each round: the token that the target chooses, and the drafter's logits f32 [GUESSES, vocab] after it. Sliding
    layers see WINDOW keys."""
    import torch
    from transformers import Gemma4ForCausalLM
    from transformers.models.gemma4_assistant import Gemma4AssistantForCausalLM

    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = Gemma4ForCausalLM.from_pretrained(target, **how).eval()
    drafter = Gemma4AssistantForCausalLM.from_pretrained(draft, **how).eval()
    ids, embed = torch.tensor([PROMPT]), model.get_input_embeddings()
    for _ in range(ROUNDS):
        with torch.no_grad():
            out = model(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
            token, hidden = out.logits[:, -1:].argmax(-1), out.hidden_states[-1][:, -1:]
            caches = dict(out.shared_kv_states)
            caches["sliding_attention"] = tuple(x[:, :, -WINDOW:] for x in caches["sliding_attention"])
            ids, guess, rows = torch.cat([ids, token], 1), token, []
            for _ in range(GUESSES):
                made = drafter(
                    inputs_embeds=torch.cat([embed(guess), hidden], -1),
                    position_ids=torch.tensor([[ids.shape[1] - 1]]),
                    shared_kv_states=caches,
                    use_cache=False,
                )
                rows.append(made.logits[0, 0].numpy())
                guess, hidden = made.logits.argmax(-1), made.last_hidden_state
        yield int(token), np.stack(rows)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PAIRS:
            for i, (token, logits) in enumerate(reference(*pair(Path(folder), name))):
                found |= {f"{name}.{i}.token": np.array(token), f"{name}.{i}.logits": logits}
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    main()
