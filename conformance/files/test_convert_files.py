"""The converter on disk: the whole new file or none of it, however the run ends; no file overwritten unless forced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from conformance.support.synthetic import tiny, weights, write_hf, write_safetensors
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.convert import convert
from hybrid.convert.__main__ import main
from hybrid.convert.unfinished import part_name, remove_stale

_STOPPED = (
    "import os, signal, sys, hybrid.convert.shards as c\n"
    "from hybrid.convert import __main__ as m\n"
    "real = c.fill\n"
    "def fill(*args):\n"
    "    real(*args)\n"
    "    print(os.listdir(sys.argv[3]), flush=True)\n"
    "    os.kill(os.getpid(), getattr(signal, sys.argv[4]))\n"
    "c.fill = fill\n"
    "sys.exit(m.main([sys.argv[1], sys.argv[2], *sys.argv[5:]]))\n"
)


def _hangs_up() -> None:
    """A hangup ends the process, also where the tests themselves run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _ignores_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _stopped(
    source: Path, target: Path, by: str, *options: str, begins: Callable[[], None] = _hangs_up
) -> subprocess.CompletedProcess[str]:
    """A run that gets a signal when all tensors are written; it prints its folder's contents then."""
    command = [sys.executable, "-c", _STOPPED, str(source), str(target), str(target.parent), by, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=begins)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("small") / "hf", tiny(n_layers=2, vocab=320, layer_is_global=(False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(("by", "code", "said"), [("SIGTERM", 143, "terminated\n"), ("SIGHUP", 129, "hung up\n")])
def test_termination_leaves_nothing(tmp_path: Path, small: Path, by: str, code: int, said: str) -> None:
    done = _stopped(small, tmp_path / "m.gguf", by, "--type", "f32", "--split", "50KB")
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout.count(".part'") > 1 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_hangup_leaves_no_file_and_nohup_continues(tmp_path: Path, small: Path) -> None:
    with open("/dev/full", "w") as nowhere:
        command = [
            sys.executable,
            "-c",
            _STOPPED,
            str(small),
            str(tmp_path / "m.gguf"),
            str(tmp_path),
            "SIGHUP",
            "--type",
            "f32",
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=nowhere, text=True, check=False, preexec_fn=_hangs_up
        )
    assert done.returncode != 0 and ".part'" in done.stdout and list(tmp_path.iterdir()) == []
    ignored = _stopped(small, tmp_path / "m.gguf", "SIGHUP", "--type", "f32", begins=_ignores_hangups)
    assert ignored.returncode == 0 and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("m.gguf", ["--split", "50KB"]), ("folder", ["--format", "hf"])])
def test_files_of_a_killed_run_are_removed_by_the_next(
    tmp_path: Path, small: Path, name: str, options: list[str]
) -> None:
    killed = _stopped(small, tmp_path / name, "SIGKILL", "--type", "f32", *options)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert killed.returncode == -9 and left and all(p.endswith(".part") for p in left)
    command = [sys.executable, "-m", "hybrid.convert", str(small), str(tmp_path / "other.gguf"), "--type", "q8_0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and [p.name for p in tmp_path.iterdir()] == ["other.gguf"]
    assert done.stderr.count("note: removed") == len(left) and all(n in done.stderr for n in left)


def test_files_of_running_processes_stay(tmp_path: Path) -> None:
    def made(name: str, age: float = 0.0) -> Path:
        path = tmp_path / name
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
        return path

    mine = part_name(tmp_path / "m.gguf").name  # of this process, which lives
    host = mine.split(".")[3].split("-")[0]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stays = [
        made(mine),
        made(".n.gguf.12345.part"),
        made(f".n.gguf.{host}-x.part"),
        made("n.gguf.part"),
        made(".n.gguf.00000000-1.part", 3600),
        made(f".n.gguf.{host}-{ended.pid}.old.part"),
    ]
    goes = [
        made(f".n.gguf.{host}-{ended.pid}.part"),
        made(".o.gguf.00000000-1.part", 25 * 3600),
        made(f".p.gguf.{host}-{os.getpid()}.part", 1e7),
    ]  # of an ended process with the same number
    assert remove_stale(tmp_path) == sorted(goes) and sorted(tmp_path.iterdir()) == sorted(stays)
    made("n.gguf")  # the file that it replaced exists
    assert remove_stale(tmp_path, replaced=True) == [stays[-1]] and mine in {p.name for p in tmp_path.iterdir()}


def test_a_failure_midway_leaves_nothing(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", dtype="f32")
    truth = {f"model.{n}": t for n, t in weights(tiny(), "f32").items()}
    bad = truth["model.layers.2.mlp.down_proj.weight"].array
    for value, dtype, words in ((np.nan, "q8_0", "NaN"), (1e6, "f16", "--type bf16"), (1e38, "q4_0", "too large")):
        bad[3, 3] = value
        write_safetensors(folder / "model.safetensors", truth)
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        (out / "m.gguf").write_bytes(b"before")
        with open_checkpoint(folder) as source, pytest.raises(CheckpointError, match=rf"blk\.2\.ffn_down.*{words}"):
            convert(source, out / "m.gguf", dtype, force=True)
        assert [(p.name, p.read_bytes()) for p in out.iterdir()] == [("m.gguf", b"before")]


def test_a_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("hybrid.convert.shutil.disk_usage", lambda path: usage)
    (tmp_path / "out").mkdir()
    with open_checkpoint(write_hf(tmp_path / "hf")) as source:
        for name, format in (("m.gguf", "gguf"), ("m", "hf")):
            with pytest.raises(CheckpointError, match=r"takes .* KiB, and its disk has 1000 B left"):
                convert(source, tmp_path / "out" / name, "f32", format=format)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with open_checkpoint(write_hf(tmp_path / "hf")) as source, pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out" / "m.gguf", "f32", progress=stop)
    assert list((tmp_path / "out").iterdir()) == []


def test_no_conversion_replaces_its_source(tmp_path: Path) -> None:
    """By its name, through links, a part of a split file, a file of a folder; other files of that folder may be made."""
    folder, path, other = write_hf(tmp_path / "hf"), tmp_path / "m.gguf", tmp_path / "link.gguf"
    with open_checkpoint(folder) as source:
        convert(source, path, "bf16")
        convert(source, tmp_path / "s.gguf", "bf16", split=60_000)
        convert(source, folder / "m.gguf", "f16")
    other.symlink_to(path)
    (part, *_), last = sorted(tmp_path.glob("s-*.gguf")), max(tmp_path.glob("s-*.gguf"))
    (tmp_path / "to.gguf").symlink_to(last)
    (tmp_path / "hf2").symlink_to(folder)
    before = {f: f.read_bytes() for f in (path, part, last, folder / "model.safetensors")}
    pairs: list[tuple[Path, Path, Literal["gguf", "hf"]]] = [
        (path, path, "gguf"),
        (path, other, "gguf"),
        (other, path, "gguf"),
        (part, last, "gguf"),
        (part, tmp_path / "to.gguf", "gguf"),
        (folder, folder / "model.safetensors", "gguf"),
        (folder, folder, "hf"),
        (folder, tmp_path / "hf2", "hf"),
    ]
    for of, target, format in pairs:
        with open_checkpoint(of) as source, pytest.raises(CheckpointError, match="is the source, or one of its files"):
            convert(source, target, "f16", format=format, force=True)
    assert before == {f: f.read_bytes() for f in before}


def test_existing_files_are_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [str(write_hf(tmp_path / "hf")), str(tmp_path / "m.gguf"), "--type", "q4_0"]
    assert main([*args, "--progress"]) == 0
    out = capsys.readouterr()
    assert "m.gguf" in out.out and "q4_0" in out.out and "100%" in out.err
    assert main(args) == 1 and "--force" in capsys.readouterr().err
    assert main([*args, "--force"]) == 0 and capsys.readouterr().err == ""
    for target, words in (
        (tmp_path, "holds other files"),
        (tmp_path / "no" / "m.gguf", "create the folder"),
        (tmp_path / "m.bin", "end the name in .gguf"),
    ):
        assert main([args[0], str(target), "--type", "f32", "--force"]) == 1 and words in capsys.readouterr().err
    assert main([*args, "--split", "1KB"]) == 0  # shards have other names
    assert main([*args, "--split", "1KB"]) == 1 and "00001-of" in capsys.readouterr().err


def test_the_command_gives_one_line_and_no_traceback(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hybrid.convert",
        str(tmp_path / "none"),
        str(tmp_path / "x.gguf"),
        "--type",
        "f32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "no such file" in done.stderr
