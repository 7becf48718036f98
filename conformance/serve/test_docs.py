"""docs/serving.md: its curl lines and its program for the official client work as printed."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.support.paths import ROOT
from conformance.support.server import Running

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.S)
PRINTED = "127.0.0.1:8000"


def block_of(kind: str, word: str, server: Running) -> str:
    """The code block of a language that contains a word, with the server's own port in place of the printed one."""
    (text,) = (text for found, text in BLOCKS if found == kind and word in text)
    assert PRINTED in text
    return text.replace(PRINTED, f"127.0.0.1:{server.port}")


@pytest.mark.slow
def test_the_line_for_curl(server: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(["sh"], input=block_of("sh", "curl", server), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["text"].strip() and answer["usage"]["completion_tokens"] == 48


@pytest.mark.slow
def test_the_program_for_the_official_client(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a separate file, in this process, which has imported the client."""
    program = tmp_path / "program.py"
    program.write_text(block_of("python", "OpenAI", server), encoding="utf-8")
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.strip()
