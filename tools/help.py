"""The options of every command as Markdown, from the commands' own parsers.

python -m tools.help          # print it; `make docs` makes a page of it
"""

from __future__ import annotations

import argparse
import importlib
from unittest import mock

COMMANDS = (
    "hybrid.generate",
    "hybrid.serve",
    "hybrid.embed",
    "hybrid.convert",
    "hybrid.inspect",
    "hybrid.perplexity",
    "hybrid.bench",
    "hybrid.schedule",
    "hybrid.doctor",
    "hybrid.prove",
    "hybrid.spec",
    "perf.op",
    "perf.accesses",
    "perf.profile",
    "perf.serving.load",
    "perf.serving.fuzz",
    "perf.serving.clients",
    "perf.serving.pairs",
    "perf.serving.structured",
    "perf.tune",
    "perf.probe",
    "perf.acceptance",
    "perf.sparsity",
    "perf.serving.scheduler",
    "perf.roofline",
    "perf.targets",
    "perf.isa",
    "perf.mesa",
    "perf.gate",
    "perf.record",
    "perf.report",
    "perf.ablate",
    "perf.campaign",
    "perf.neighbours",
    "perf.neighbour",
    "kernels.vulkan.build",
    "kernels.npu.build",
    "kernels.npu.check",
    "kernels.npu.emitter",
    "kernels.npu.headers",
    "perf.npu",
    "hybrid.harness.npu_capture",
)
HEAD = """# Commands

Every option of every command. Each command also takes `--help` and `--version`.
In an installation `perf` and `kernels` are `hybrid.perf` and `hybrid.kernels`.
An error is one line on standard error; `HYBRID_DEBUG=1` adds the traceback.
"""


def installed(command: str) -> str:
    """The module that an installation knows a command by."""
    return command if command.startswith("hybrid.") else f"hybrid.{command}"


class _Found(Exception):
    """Carries a command's parser out of its main()."""


def parser_of(module: str) -> argparse.ArgumentParser:
    """The parser that `python -m module` asks first."""

    def stop(self: argparse.ArgumentParser, *args: object, **more: object) -> None:
        raise _Found(self)

    found = importlib.import_module(installed(module))
    if not hasattr(found, "main"):
        found = importlib.import_module(f"{installed(module)}.__main__")
    with mock.patch.multiple(argparse.ArgumentParser, parse_args=stop, parse_intermixed_args=stop):
        try:
            found.main([])
        except _Found as e:
            return e.args[0]
    raise SystemExit(f"error: {module}: main() read no arguments: it must use an argparse parser")


def section(p: argparse.ArgumentParser, level: int = 2) -> list[str]:
    """One command, then its sub-commands."""
    shown = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)  # elsewhere
    options = [a for a in p._actions if not isinstance(a, shown)]
    places = " ".join(_place(a) for a in options if not a.option_strings)
    subs = [a for a in p._actions if isinstance(a, argparse._SubParsersAction)]
    usage = " ".join(
        filter(None, (p.prog, places, "COMMAND" * bool(subs), "[options]" * any(a.option_strings for a in options)))
    )
    lines = [f"{'#' * level} {p.prog}", "", f"    {usage}", ""]
    lines += [_sentence(_text(p.description)), ""] if p.description else []
    if options:
        lines += ["| argument | meaning |", "|---|---|", *map(_row, options), ""]
    lines += [_text(p.epilog), ""] if p.epilog else []
    for sub in subs:
        about = {c.dest: c.help or "" for c in sub._choices_actions}
        for name, child in sub.choices.items():
            child.description = child.description or _sentence(about.get(name, ""))
            lines += section(child, level + 1)
    return lines


def _row(a: argparse.Action) -> str:
    name, text = (part.replace("|", "\\|") for part in (_name(a), _text(a.help or "")))
    return f"| `{name}` | {text} |"


def _place(a: argparse.Action) -> str:
    name = str(a.metavar or (f"{{{','.join(map(str, a.choices))}}}" if a.choices else a.dest.upper()))
    shown = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}
    return shown.get(str(a.nargs), name)


def _name(a: argparse.Action) -> str:
    if not a.option_strings:
        return _place(a)
    value = "" if a.nargs == 0 else " " + (_place(a) if a.metavar or a.choices else a.dest.upper())
    return ", ".join(a.option_strings) + value


def _text(text: str) -> str:
    return " ".join(text.replace("%%", "%").split())


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def page() -> str:
    lines = [HEAD]
    for module in COMMANDS:
        lines += section(parser_of(module))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
