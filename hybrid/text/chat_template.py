"""A checkpoint's chat template, in jinja2's sandbox and in a process of its own.

The sandbox keeps a template from Python's internals; it cannot keep it from looping for ever or from asking for a
terabyte. So templates from files are expanded by a child (`python -m hybrid.text.chat_template`: JSON in, JSON out) with
bounded time, memory and output. The project's own template needs none of that and is expanded in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

SECONDS = 10.0
"""Wall time of a template, the child's start included (a tenth of a second)."""
MEMORY = 1 << 30
OUTPUT = 1 << 20
"""Characters that a template may add to the messages' own."""


class ChatError(ValueError):
    """The messages or the template cannot be used; says why in one line."""


def expand(template: str, variables: Mapping[str, Any], most: int) -> str:
    """Text of a Jinja template, expanded here. ChatError where it fails, refuses or writes more than `most`
    characters; nothing bounds its time."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    out, length = [], 0
    try:
        for part in env.from_string(template).generate(variables):
            out.append(part)
            length += len(part)
            if length > most:
                raise ChatError(f"the chat template writes more than {most} characters: it does not end, or is not one")
    except ChatError:
        raise
    except MemoryError:
        raise ChatError(f"the chat template needs more than {MEMORY >> 20} MiB of memory") from None
    except (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ChatError(f"the chat template failed: {error}") from None
    return "".join(out)


def expand_apart(template: str, variables: Mapping[str, Any], most: int, seconds: float = SECONDS) -> str:
    """The same in a child process: ChatError also after `seconds`, and where it needs more than MEMORY bytes."""
    try:
        job = json.dumps({"template": template, "variables": variables, "most": most, "seconds": seconds})
    except (TypeError, ValueError) as error:
        raise ChatError(f"the messages hold something that is neither text nor a list or object of texts: {error}") from None
    search = os.pathsep.join(p or os.getcwd() for p in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hybrid.text.chat_template"],
            input=job.encode(),
            capture_output=True,
            timeout=seconds,
            env={**os.environ, "PYTHONPATH": search},
            start_new_session=True,  # a terminal's Ctrl-C is the parent's
        )
    except subprocess.TimeoutExpired:
        raise ChatError(f"the chat template does not end: stopped after {seconds:g} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ChatError(f"the chat template could not be expanded: {last}") from None
    if "error" in answer:
        raise ChatError(answer["error"])
    return answer["text"]


def _refuse(reason: str) -> NoReturn:
    raise ChatError(f"the chat template refuses: {reason}")


def _limit(seconds: float) -> None:
    """Memory and time by the kernel, where there are such limits: they hold even when the parent is gone."""
    try:
        import resource
    except ImportError:  # not on Windows: there the parent's clock is the limit
        return
    for kind, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, int(seconds) + 1)):
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some of them
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> int:
    """The child: one job from standard input, one answer to standard output."""
    job = json.load(sys.stdin)
    _limit(job["seconds"])
    try:
        answer = {"text": expand(job["template"], job["variables"], job["most"])}
    except ChatError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
