"""A process forked from one with a Vulkan model: every call raises an error, and no call reaches the driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conformance.support.devices import open_backend
from conformance.support.models import BOTH, demo

FORKED = """
import os, signal, sys
import hybrid
from hybrid.kernels.vulkan import api, memory, program, timeline, transfer
class Untouchable:
    def __getattr__(self, name):
        print("touched", name, flush=True)
        os._exit(9)
model = hybrid.load(sys.argv[1], "vulkan", ctx=64)
text = "".join(model.generate("def f(", 8))
pieces = model.generate("def f(", 8)
began = next(pieces)
sys.stdout.flush()
for how in ("close", "leave"):
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    print(how, "::", os.waitstatus_to_exitcode(status), flush=True)
if child == 0:
    signal.alarm(60)  # a child that hangs ends by this, with another status
    for module in (api, memory, program, timeline, transfer):
        module.lib = module.vk = Untouchable()
    uses = {
        "generate": lambda: list(model.generate("def f(", 8)), "go on": lambda: list(pieces),
        "logits": lambda: model.logits([2, 3]), "submit": lambda: model.submit("def f(").result(60),
        "peek": lambda: model.engine.device.peek("history", 0, 1), "wait": lambda: model.engine.device.wait(),
        "read": lambda: model.engine.device.read("history"), "load": lambda: hybrid.load(sys.argv[1], "vulkan", ctx=64),
    }
    for name, use in uses.items():
        try:
            use()
            print(how, name, "was done")
        except RuntimeError as error:
            print(how, name, "::", error)
    with hybrid.load(sys.argv[1], "cpu", ctx=64) as other:
        print(how, "cpu ::", other.device)
    if how == "close":
        model.close()
    sys.exit(7)
print("parent ::", began + "".join(pieces) == text and "".join(model.generate("def f(", 8)) == text)
"""


@pytest.mark.slow
def test_a_forked_process_gets_an_error_and_ends() -> None:
    """Whether it closes the model or leaves it."""
    open_backend("vulkan").close()
    command = [sys.executable, "-c", FORKED, str(demo(layers=BOTH))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    said = dict(line.split(" :: ", 1) for line in done.stdout.splitlines() if " :: " in line)
    assert "was done" not in done.stdout, done.stdout
    for how in ("close", "leave"):
        assert said.pop(f"{how} cpu") == "cpu" and said.pop(how) == "7", done.stdout + done.stderr
    assert said.pop("parent") == "True" and not done.returncode, done.stdout + done.stderr
    assert len(said) == 2 * 8
    for text in said.values():
        assert "was open when this process was forked" in text and "spawn" in text, text
    assert not done.stderr, done.stderr
