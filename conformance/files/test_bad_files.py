"""Inputs that are not models: each gives one line that names file and field, in bounded time and memory."""

from __future__ import annotations

import math
import os
import resource
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.files.broken import head, refusal, value
from conformance.files.mutations import gguf_fields, within
from conformance.files.seeds import gguf_file, small
from conformance.files.seeds import valid as valid_files
from conformance.files.targets import refused
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.core.errors import SpecError
from hybrid.core.places import ROOT
from hybrid.spec.load import parse_toml
from hybrid.spec.schedule import load_schedule
from hybrid.text.tokenizer import TokenizerError


# --------------------------------------------------------------------------------------------------- no regular files
def test_special_files_and_links(tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    whole.write_bytes(gguf_file("q8_0"))
    link, loop, dangling, pipe = (tmp_path / n for n in ("link.gguf", "loop.gguf", "dangling.gguf", "pipe.gguf"))
    link.symlink_to(whole)
    assert open_checkpoint(link).hparams.n_layers == small().n_layers
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "gone")
    os.mkfifo(pipe)
    refusal(loop, "loop.gguf", "symbolic links")
    refusal(dangling, "dangling.gguf", "does not exist")
    refusal(pipe, "pipe.gguf", "pipe")
    refusal(Path("/dev/zero"), "device")
    refusal(Path("/dev/null"), "device")
    refusal(tmp_path, "folder of GGUF files")
    refusal(tmp_path / ("x" * 5000), "too long")
    refusal(tmp_path / "a\0b", "null")
    refusal(whole / "inside.gguf", "m.gguf")
    for path in (Path("/proc/self/status"), Path("/proc/self/mem"), Path("/proc/self/fd/0")):
        if path.exists():
            refusal(path, str(path))
    for name in ("config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja", "tokenizer_config.json"):
        folder = write_hf(tmp_path / f"hf-{name}")
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        refusal(folder, name)


def test_files_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("q8_0"))
    path.chmod(0)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        refusal(path, "m.gguf", "permission denied", "chmod")
    finally:
        if root:
            os.seteuid(0)


# --------------------------------------------------------------------------------------------------- files that change
@pytest.mark.parametrize("change", ["truncate", "rewrite", "grow"])
def test_a_file_that_changes_while_it_is_open_is_refused(tmp_path: Path, change: str) -> None:
    """Without the check, a model might mix tensors of two versions of a file."""
    path = tmp_path / "m.gguf"
    whole = gguf_file("q8_0")
    path.write_bytes(whole)
    c = open_checkpoint(path)
    c.tensor("blk.0.attn_q.weight")
    if change == "truncate":
        os.truncate(path, 100)
    else:
        os.utime(path, ns=(0, 0))
        with open(path, "r+b") as file:
            file.seek(0, os.SEEK_END if change == "grow" else os.SEEK_SET)
            file.write(b"GGUF")
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_norm.weight"):
        with pytest.raises(CheckpointError, match=r"m\.gguf changed while it was open"):
            c.tensor(name)
    with pytest.raises(CheckpointError, match=r"m\.gguf changed while it was open"):
        c.rows("blk.0.attn_q.weight", 0, 4)


@pytest.mark.parametrize("change", ["unlink", "replace"])
def test_a_file_that_vanishes_or_is_replaced_stays_readable(tmp_path: Path, change: str) -> None:
    """The open file keeps its bytes."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("q8_0"))
    c = open_checkpoint(path)
    want = c.tensor("blk.0.attn_q.weight").parts[0].copy()
    if change == "unlink":
        path.unlink()
    else:
        other = tmp_path / "other"
        other.write_bytes(b"x")
        os.replace(other, path)
    np.testing.assert_array_equal(c.tensor("blk.0.attn_q.weight").parts[0], want)


# ------------------------------------------------------------------------------------------------------- declarations
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 50000, "deeply|not valid"),
        ("a = " + "[" * 100 + "]" * 100, "deeply"),
        ("a" + ".a" * 50000 + " = 1", "deeply|not valid"),
        ("a = 1" + "0" * 50000, "not valid|digits"),
        ("a = 1\na = 2", "not valid"),
        ("a = '" + "x" * (1 << 21) + "'", "longer than"),
    ],
)
def test_toml_bombs(text: str, words: str) -> None:
    with within(2.0), pytest.raises(SpecError, match=words) as error:
        parse_toml("m.toml", text)
    refused(error.value)


def test_declarations_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "p.toml", tmp_path, Path("/dev/zero"), tmp_path / "none.toml", tmp_path / "bytes.toml"):
        with within(2.0), pytest.raises(SpecError):
            load_schedule(path)
    whole = (ROOT / "specs/schedules/gemma3.toml").read_text()
    for shape in ("9**9", "2**8**8", "(" * 200 + "T" + ")" * 200, "T*" * 200 + "T", "__import__('os')"):
        with within(2.0), pytest.raises(SpecError):
            path = tmp_path / "s.toml"
            path.write_text(whole.replace("shape = [", f'shape = ["{shape}", ', 1))
            load_schedule(path)


# ------------------------------------------------------------------------------------------------------------ prompts
def test_prompts_and_ids_out_of_range(tmp_path: Path) -> None:
    with hybrid.load(write_hf(tmp_path, tiny()), device="cpu", ctx=16) as m:
        rows = m.hparams.vocab
        for call, words in (
            (lambda: m.generate([]), "empty"),
            (lambda: m.generate([1] * 16), "16 tokens"),
            (lambda: m.generate("abc " * 100), "tokens leaves no room"),
            (lambda: next(m.generate([rows])), str(rows)),
            (lambda: next(m.generate([-1])), "-1"),
            (lambda: m.logits([2**31]), str(2**31)),
            (lambda: m.logits([]), "empty"),
            (lambda: m.generate("a", max_tokens=0), "max_tokens"),
            (lambda: m.decode([rows]), str(rows)),
            (lambda: m.generate("a", temperature=math.nan), "temperature"),
        ):
            with within(2.0), pytest.raises((ValueError, TokenizerError), match=words):
                call()
        assert list(m.generate("\ud800", max_tokens=1, ignore_eos=True)) is not None


# ------------------------------------------------------------------------------- commands, with limits of the system
LIMIT = 3 << 30  # address space: NumPy and its threads take most of it


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _sparse(path: Path, head: bytes, size: int) -> Path:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)
    return path


@pytest.mark.slow
def test_commands_end_with_one_line_and_no_output(tmp_path: Path) -> None:
    """In a process with little memory: exit code 1, one line on stderr, nothing on stdout."""
    whole = gguf_file("q8_0")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    huge = _sparse(tmp_path / "huge.gguf", head([value("a", 8, struct.pack("<Q", 30 << 30))], []), 64 << 30)
    texts = _sparse(tmp_path / "texts.gguf", head([value("a", 9, struct.pack("<IQ", 8, 1 << 30))], []), 64 << 30)
    values = _sparse(tmp_path / "values.gguf", head([], [], n_values=1 << 30), 64 << 30)
    folder = write_hf(tmp_path / "hf")
    _sparse(folder / "model.safetensors", struct.pack("<Q", 1 << 34), 64 << 30)
    nan = bytearray(whole)
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    c = open_checkpoint(path)
    at = c.entries["blk.1.ffn_up.weight"].load.__self__.offset  # type: ignore[attr-defined]
    nan[at : at + 2] = b"\xff\x7f"
    (tmp_path / "nan.gguf").write_bytes(nan)
    script = (
        "import sys\nfrom hybrid.generate import main\n"
        "for path in sys.argv[1:]:\n"
        "    code = main([path, '--prompt', 'the', '--device', 'cpu', '--max-tokens', '2'])\n"
        "    print('code', code, file=sys.stderr)\n"
    )
    files = [cut, huge, texts, values, folder, tmp_path / "nan.gguf", tmp_path / "none.gguf", Path("/dev/zero")]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=_limits,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout == "" and len(lines) == 2 * len(files), done.stderr
    for file, error, code in zip(files, lines[::2], lines[1::2], strict=True):
        assert code == "code 1" and error.startswith("error: ") and file.name in error, (error, code)


def test_a_command_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("q8_0")[:-2000])
    command = [sys.executable, "-m", "hybrid.convert", str(path), str(tmp_path / "out.gguf"), "--type", "q4_0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (
        done.returncode == 1 and done.stdout == "" and done.stderr.startswith("error: ") and "cut short" in done.stderr
    )
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_header_fields_are_found_for_mutation(tmp_path: Path) -> None:
    """The mutations overwrite the numbers of the header."""
    path = tmp_path / "m.gguf"
    data = valid_files("gguf_header")[0]
    path.write_bytes(data)
    fields = gguf_fields(path)
    assert fields[:3] == [(4, 4), (8, 8), (16, 8)] and len(fields) > 100
    assert struct.unpack_from("<I", data, fields[0][0]) == (3,)
