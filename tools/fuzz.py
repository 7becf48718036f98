"""python -m tools.fuzz TARGET [libFuzzer options]: coverage-guided fuzzing of a reader, until it is stopped.

TARGET: gguf, directory (config.json and safetensors), tokenizer_model, tokenizer_json, toml. Needs the extra `fuzz`
(atheris). The corpus is kept in build/fuzz/TARGET and begins with the valid files of conformance.files.seeds; what
crashes, works for two seconds, takes a gigabyte of memory or ends with an error that is not one line is written beside
it.

    python -m tools.fuzz gguf -max_total_time=600
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hybrid", "json"]):
    from conformance.files.mutations import within
    from conformance.files.seeds import kept, valid
    from conformance.files.targets import REFUSALS, TARGETS, refused

SECONDS = 2.0  # of processor time
MEMORY = Path("/dev/shm")
WORDS = (
    "GGUF",
    "general.alignment",
    "general.architecture",
    "gemma3",
    "gemma3.block_count",
    "split.count",
    "split.no",
    "tokenizer.ggml.tokens",
    "token_embd.weight",
    "blk.0.attn_q.weight",
    "data_offsets",
    "__metadata__",
    "shape",
    "dtype",
    "text_config",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "null",
    "NaN",
    "Infinity",
    "-1",
    "1e400",
    "9223372036854775808",
    "[[[[[[[[",
    "{}",
    "\\\\ud800",
    "\\x00",
    "\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x7f",
)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        raise SystemExit(f"error: name a target: {', '.join(TARGETS)}")
    corpus = Path("build/fuzz") / name
    corpus.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate([*valid(name), *(path.read_bytes() for path in kept(name))]):
        (corpus / f"seed-{index}").write_bytes(data)
    words = corpus.with_name(f"{name}.dict")
    words.write_text("".join(f'"{w}"\n' for w in WORDS))
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    target = TARGETS[name]

    def one(data: bytes) -> None:
        try:
            with within(SECONDS):
                target(folder, data)
        except REFUSALS as error:
            refused(error)

    options = [
        f"-dict={words}",
        "-timeout=60",
        "-rss_limit_mb=1024",
        "-print_final_stats=1",
        "-max_len=65536",
        f"-artifact_prefix=build/fuzz/{name}-",
    ]
    atheris.Setup([sys.argv[0], *options, *sys.argv[2:], str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
