"""docs/serving.md: its lines for curl and its program for the official client work as they are printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from conformance.support.paths import ROOT
from conformance.support.server import Running

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.S)
PRINTED = "127.0.0.1:8000"


def ran(command: list[str], text: str, server: Running) -> str:
    """Standard output of a block, the server's own port in place of the printed one."""
    assert PRINTED in text
    done = subprocess.run(
        command, input=text.replace(PRINTED, f"127.0.0.1:{server.port}"), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_line_for_curl(server: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (block,) = (text for kind, text in BLOCKS if kind == "sh" and "curl" in text)
    answer = json.loads(ran(["sh"], block, server))
    assert answer["choices"][0]["text"].strip() and answer["usage"]["completion_tokens"] == 48


@pytest.mark.slow
def test_the_program_for_the_official_client(server: Running) -> None:
    (block,) = (text for kind, text in BLOCKS if kind == "python" and "OpenAI" in text)
    assert ran([sys.executable, "-"], block, server).strip()
