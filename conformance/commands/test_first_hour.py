"""Command names, notes, interruption, replaced folders, and chat in the Python API."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.synthetic import tiny, write_hf
from hybrid import generate, inspect, serve
from hybrid.checkpoint import find
from hybrid.cli import Parser
from hybrid.convert.atomic import atomic_files, atomic_folder
from hybrid.core.dtypes import WRITABLE_TYPES
from hybrid.core.places import PACKAGE
from hybrid.kernels.vulkan.api import VulkanUnavailable
from hybrid.text import chat
from hybrid.text.chat_template import ChatError

NO_TEMPLATE = "no chat template: probably a base model\n"
HI = [{"role": "user", "content": "the bee"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(selector: str, **options: Any) -> None:
        raise VulkanUnavailable(f"no {selector} here")

    monkeypatch.setattr("hybrid.kernels.vulkan.device.open_device", none)


def test_chat_answers_as_the_rendered_conversation_is_continued(folder: Path) -> None:
    with hybrid.load(folder, "cpu", ctx=128) as m:
        ids = chat.encode(m.checkpoint.tokenizer, HI)
        want = "".join(m.generate(ids, 8, ignore_eos=True))
        assert "".join(m.chat(HI, 8, ignore_eos=True)) == want
        turns = [*HI, {"role": "assistant", "content": want}, *HI]
        assert "".join(m.chat(turns, max_tokens=4, temperature=0.5, seed=3))
        with pytest.raises(ValueError, match="a list of messages"):
            m.chat("the bee")  # type: ignore[arg-type]
        with pytest.raises(ChatError, match="alternate"):
            m.chat([*HI, *HI])


def test_the_package_is_typed_and_exports_its_error() -> None:
    assert (PACKAGE / "py.typed").is_file() and '"py.typed"' in (PACKAGE.parent / "pyproject.toml").read_text()
    with pytest.raises(hybrid.CheckpointError):
        hybrid.load("/no/such.gguf")


def test_weights_take_the_same_types_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in WRITABLE_TYPES:
        assert generate.parser().parse_args(["--weights", name]).weights == name
    with pytest.raises(SystemExit):
        generate.parser().parse_args(["--weights", "q3"])
    assert "q5_0" in capsys.readouterr().err


def test_usage_names_the_command_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for called, prog in (
        ("/usr/bin/hybrid-generate", "hybrid-generate"),
        (r"C:\bin\hybrid-generate.exe" if os.name == "nt" else "hybrid-generate.exe", "hybrid-generate"),
        ("/x/hybrid/generate/__main__.py", "python -m hybrid.generate"),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        with pytest.raises(SystemExit):
            generate.main(["--nope"])
        assert capsys.readouterr().err == f"error: unrecognized arguments: --nope (see {prog} --help)\n"
        assert Parser(prog="python -m hybrid.generate").format_usage().startswith(f"usage: {prog} ")


def test_batch_and_conversation_say_what_was_passed_over(
    folder: Path, tmp_path: Path, no_gpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("the\n")
    common = [str(folder), "--ctx", "64", "-n", "2"]
    assert generate.main([*common, "--batch", str(tmp_path / "p.txt")]) == 0
    assert capsys.readouterr().err.startswith("passed over: vulkan:gpu: no gpu here\ncpu | 1 results")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("hybrid.generate.chat_loop.run_loop", lambda *a: 0)
    assert generate.main([*common, "--chat"]) == 0
    assert capsys.readouterr().err == "passed over: vulkan:gpu: no gpu here\n" + NO_TEMPLATE


def test_the_server_says_what_was_passed_over(
    folder: Path, no_gpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")

    def loaded(load: Any, *_: Any, **__: Any) -> int:
        load().close()
        return 0

    monkeypatch.setattr("hybrid.serve.process.serve", loaded)
    assert serve.main([str(folder), "--slots", "1", "--ctx", "32", "--no-warm-up"]) == 0
    assert capsys.readouterr().err.endswith("passed over: vulkan:gpu: no gpu here\n" + NO_TEMPLATE)


def test_a_chat_without_a_template_is_doubted(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["--device", "cpu", "--ctx", "64", "-n", "2", "--chat", "-p", "the"]
    assert generate.main([str(folder), *command]) == 0
    assert capsys.readouterr().err.startswith(NO_TEMPLATE)
    own = write_hf(tmp_path, tiny(n_layers=1))
    (own / "chat_template.jinja").write_text(chat.GEMMA_TEMPLATE)
    assert generate.main([str(own), *command]) == 0
    assert NO_TEMPLATE not in capsys.readouterr().err


def test_standard_input_that_is_not_read_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for data, prompt, said in ((b"the bee\n", (), True), (b"", (), False), (b"the bee\n", ("-p", "the"), False)):
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        with os.fdopen(read) as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            assert generate.main([str(folder), "--device", "cpu", "-n", "1", "--ctx", "64", *prompt]) == 0
        assert ("standard input is not read: give --prompt -" in capsys.readouterr().err) == said


def test_a_search_that_finds_nothing_names_its_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "find_models", lambda problem: [])
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    assert inspect.main(["--find"]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path) in said and str(Path.cwd()) in said and said.count("\n") == 1


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_errors_name_the_target_and_no_temporary_file(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "m.gguf"

    def fail(part: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(part / "x" if kind == "folder" else part))

    with pytest.raises(PermissionError) as error:
        if kind == "file":
            with atomic_files([target], False) as parts:
                fail(parts[0])
        else:
            with atomic_folder(target, False) as part:
                fail(part)
    assert error.value.filename == str(target)


def test_a_replaced_folder_keeps_no_tokenizer_of_the_model_before(tmp_path: Path) -> None:
    target = tmp_path / "m"
    (target / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/x.jinja", "mine"):
        (target / name).write_text("old")
    with atomic_folder(target, True) as part:
        (part / "config.json").write_text("new")
        (part / "tokenizer.model").write_text("new")
    assert sorted(p.name for p in target.rglob("*")) == ["config.json", "mine", "tokenizer.model"]
    assert (target / "config.json").read_text() == "new"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Windows cannot send SIGINT to one process")
@pytest.mark.parametrize("when", [1, 2, 4, 8, 16, 32, "run"])
def test_ctrl_c_while_modules_load_is_quiet(tmp_path: Path, when: int | str) -> None:
    """The process interrupts itself at an import: that many after the package's own, and within the command."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    seen = []\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if self.seen or name == 'hybrid':\n"
        "            self.seen.append(name)\n"
        f"        if {when!r} == len(self.seen) - 1 or ({when!r}, name) == ('run', 'hybrid.planning'):\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "hybrid.generate", "--device", "cpu"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        timeout=60,
    )
    assert done.returncode == 130 and done.stdout == b"", done
    assert done.stderr == (b"interrupted\n" if when == "run" else b"")
