"""Expand a checkpoint's chat template in jinja2's sandbox, in a separate process.

The sandbox protects Python's internals but limits neither time nor memory. Templates from files are therefore expanded
by a worker (`python -m hybrid.text.chat_template`; template_worker.py) with bounded time, memory and output. The
project's own templates are expanded in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from hybrid.text.template_worker import IDLE, Late, Pool

SECONDS = 10.0
"""Timeout of a template, a worker's start included."""
MEMORY = 1 << 30
GUARD = "guard character"
"""Variable with the guard character; no template can name it."""
OUTPUT = 1 << 20
"""Most characters that a template adds to the messages."""


class ChatError(ValueError):
    """Invalid messages or template; the message is one line."""


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """A compiled template, cached since compilation is slower than expansion. Templates cannot modify the sandbox's
    environment, which is that of transformers."""
    from jinja2 import ext, nodes, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """{% generation %} marks what the model wrote, for training. A call block, for its scope of variables."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return str(caller())

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = pass_context(_to_json)
    env.globals |= {"raise_exception": _refuse, "strftime_now": lambda format: datetime.now().strftime(format)}
    return env.from_string(template)


def _to_json(
    context: Any,
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps with transformers' defaults. The guard character (chat.written) stays itself."""
    text = json.dumps(x, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    guard = context.get(GUARD)
    return re.sub("[^\0-\x7f]", lambda c: c[0] if c[0] == guard else json.dumps(c[0])[1:-1], text)


def expand(template: str, variables: Mapping[str, Any], most: int) -> str:
    """Expand a Jinja template in this process, without a time limit. ChatError if it fails, raises an exception or
    writes more than `most` characters."""
    from jinja2 import TemplateError

    out, length = [], 0
    try:
        for part in _compiled(template).generate(variables):
            out.append(part)
            length += len(part)
            if length > most:
                raise ChatError(f"the chat template writes more than {most} characters: it does not end, or is not one")
    except ChatError:
        raise
    except MemoryError:
        raise ChatError(f"the chat template needs more than {MEMORY >> 20} MiB of memory") from None
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ChatError(f"the chat template failed: {error}") from None
    return "".join(out)


_pool = Pool()
atexit.register(_pool.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.after_fork)


def expand_apart(template: str, variables: Mapping[str, Any], most: int, seconds: float = SECONDS) -> str:
    """`expand` in a worker process: ChatError also after `seconds` and beyond MEMORY bytes."""
    job = {"template": template, "variables": variables, "most": most, "seconds": seconds}
    try:
        answer = _pool.run(job, seconds)
    except (TypeError, ValueError) as error:
        raise ChatError(
            f"the messages hold something that is neither text nor a list or object of texts: {error}"
        ) from None
    except Late:
        raise ChatError(f"the chat template does not end: stopped after {seconds:g} s") from None
    except OSError as error:
        raise ChatError(f"the chat template could not be expanded: {error}") from None
    if "error" in answer:
        raise ChatError(answer["error"])
    return str(answer["text"])


def _refuse(reason: str) -> NoReturn:
    raise ChatError(f"the chat template refuses: {reason}")


def _limit(seconds: float) -> None:
    """Set kernel limits of memory and CPU time for the next job, if supported. They hold even if the parent exits."""
    try:
        import resource
    except ImportError:  # Windows: only the parent's timeout applies
        return
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    for kind, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, int(spent + seconds) + 2)):
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some of them
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> int:
    """A worker (template_worker.py): reads jobs on standard input until its end or an idle timeout, and writes answers
    to standard output."""
    import jinja2.sandbox  # noqa: F401 (before the first job)

    while True:
        idle = threading.Timer(IDLE, os._exit, (0,))
        idle.daemon = True
        idle.start()
        line = sys.stdin.buffer.readline()
        idle.cancel()
        if not line:
            return 0
        job = json.loads(line)
        _limit(job["seconds"])
        try:
            answer = {"text": expand(job["template"], job["variables"], job["most"])}
        except ChatError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
