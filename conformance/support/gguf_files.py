"""Shared parts of the tests' GGUF files, written with the gguf package: required keys, the small tokenizer, the end."""

from __future__ import annotations

from pathlib import Path

import gguf

from conformance.support.synthetic import PIECES
from hybrid.core.hparams import HParams


def sparse(path: Path, hp: HParams, window: bool = True) -> gguf.GGUFWriter:
    """A writer with the required keys, and (`window`) the sliding window's."""
    w = gguf.GGUFWriter(path, "gemma3")
    w.add_context_length(hp.context_length)
    w.add_embedding_length(hp.hidden)
    w.add_block_count(hp.n_layers)
    w.add_feed_forward_length(hp.layers[0].ffn)
    w.add_head_count(hp.layers[0].n_heads)
    w.add_head_count_kv(hp.layers[0].n_kv_heads)
    w.add_key_length(hp.layers[0].head_dim)
    if window:
        w.add_sliding_window(hp.window)
    return w


def add_tokenizer(w: gguf.GGUFWriter) -> None:
    """The vocabulary of conformance.support.synthetic, in the `llama` form."""
    w.add_tokenizer_model("llama")
    w.add_token_list([p.encode() for p, _, _ in PIECES])
    w.add_token_scores([s for _, s, _ in PIECES])
    w.add_token_types([t for _, _, t in PIECES])
    w.add_bos_token_id(2)
    w.add_eos_token_id(1)


def finish(w: gguf.GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
