"""generate --batch FILE: generate for a file of prompts, with results in the file's order.

Each line of FILE is a prompt or, if it begins with {, a JSON object: {"prompt": "...", "max_tokens": 100, ...} with any
option of Model.submit. Results are printed, or written to --output FILE as one JSON object a line. An interrupted batch
resumes after the existing results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import IO, Any

from hybrid.cli.progress import progress_bar
from hybrid.core.errors import nearest
from hybrid.core.units import show_rate
from hybrid.engine.handle import Handle, outcomes
from hybrid.engine.request import Completion, Options
from hybrid.text.stops import StopFilter

BREAK = "\n\f\n"
"""Separator of results on standard output, since texts may have empty lines."""
NOT_OURS = ("constraint", "thought")


@dataclass(frozen=True, slots=True)
class Asked:
    """A line of the file: the prompt, and options that override the command's."""

    prompt: str
    options: Mapping[str, Any]
    where: str = ""
    """The file and its line."""


def decoded(path: Path, data: bytes) -> str:
    """A file's text. ValueError names a file that is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {line} is not UTF-8: save the file in that encoding") from None


def read(path: Path, text: str) -> list[Asked]:
    """The prompts of a batch file. ValueError names the line, the key and the fix."""
    found = []
    for number, line in enumerate(lines(text), 1):
        if line.strip():
            found.append(_parsed(f"{path}: line {number}", line))
    if not found:
        raise ValueError(f"{path} has no prompt: write one a line, or a JSON object a line")
    return found


def lines(text: str) -> list[str]:
    """Lines that end at \\n or \\r\\n: JSON may hold U+2028 and what else str.splitlines cuts at."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _parsed(where: str, line: str) -> Asked:
    if not line.lstrip().startswith("{"):
        return Asked(line, {}, where)
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON object: {error}") from None
    prompt = given.pop("prompt", None)
    if not isinstance(prompt, str):
        raise ValueError(f"{where}: prompt must be text, not {prompt!r}")
    known = [f.name for f in fields(Options) if f.name not in NOT_OURS]
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise ValueError(f"{where}: unknown option {unknown!r}{nearest(unknown, known)}")
    if isinstance(given.get("logit_bias"), dict):
        given["logit_bias"] = {int(k) if k.lstrip("-").isdigit() else k: v for k, v in given["logit_bias"].items()}
    try:
        stop = given.get("stop", ())
        StopFilter([stop] if isinstance(stop, str) else stop)
        Options.of(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return Asked(prompt, given, where)


def written(path: Path, asked: Sequence[Asked]) -> int:
    """Number of complete results in an output file, those of the first prompts. ValueError for results of other
    prompts."""
    if not path.exists():
        return 0
    data = decoded(path, path.read_bytes())
    whole = data[: data.rfind("\n") + 1]
    if whole != data:  # interrupted within a line
        path.write_bytes(whole.encode())
    results = lines(whole)
    for number, line in enumerate(results):
        try:
            prompt = json.loads(line).get("prompt")
        except (json.JSONDecodeError, AttributeError):
            prompt = None
        if number >= len(asked) or prompt != asked[number].prompt:
            wrong = f"line {number + 1} is no result of this batch's prompt {number + 1}"
            raise ValueError(f"{path}: {wrong}: name another output file")
    return len(results)


def encoded(model: Any, text: str, chat: bool, system: str, parse_special: bool) -> list[int]:
    """A prompt's ids; chat: as a user message, after the `system` prompt if given."""
    if not chat:
        return list(model.encode(text, parse_special=parse_special))
    from hybrid.text.chat import encode

    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": text}]
    return list(encode(model.checkpoint.tokenizer, messages, model.checkpoint.chat_template, parse_special))


def run_batch(
    model: Any,
    encode: Callable[[str], Sequence[int]],
    asked: Sequence[Asked],
    options: Mapping[str, Any],
    *,
    output: Path | None,
    as_json: bool,
    drafts: str = "",
) -> int:
    """Generate for all prompts and print or write the results, then totals on standard error. drafts: the drafter's
    name, for a line on speculation. Returns the exit code: 1 if a prompt failed."""

    def results(rest: Sequence[Asked], first: int) -> Iterator[dict[str, Any]]:
        def asked_for(a: Asked) -> Handle:
            handle: Handle = model.submit(encode(a.prompt), **{**options, **a.options})
            return handle

        done = outcomes(partial(asked_for, a) for a in rest)
        for index, (a, one) in enumerate(zip(rest, done, strict=True), first):
            yield result(index, a, one)

    return write_all(results, asked, model.device, output=output, as_json=as_json, drafts=drafts)


def write_all(
    results: Callable[[Sequence[Asked], int], Iterator[dict[str, Any]]],
    asked: Sequence[Asked],
    device: str,
    *,
    output: Path | None,
    as_json: bool,
    drafts: str = "",
) -> int:
    """Print or write, in order, the results of prompts without one. results(prompts, index of the first) generates
    them."""
    done = 0 if output is None else written(output, asked)
    rest = asked[done:]
    if done:
        print(f"{output}: {done} of {len(asked)} results exist already", file=sys.stderr)
    target: IO[str] = sys.stdout if output is None else output.open("a", encoding="utf-8")
    totals = _Totals()
    try:
        with progress_bar(len(asked), "prompts", False, "prompts", after=1.0) as advance:
            advance(done)
            for one in results(rest, done) if rest else ():
                totals.add(one)
                whole = as_json or output is not None
                if "error" in one:
                    print(f"error: {one['error']}", file=sys.stderr)
                print(json.dumps(one, ensure_ascii=False) if whole else one.get("text", ""), file=target, flush=True)
                if not whole and one["index"] + 1 < len(asked):
                    print(BREAK.strip("\n"), file=target)
                advance(1)
    except KeyboardInterrupt:
        return 130
    finally:
        if output is not None:
            target.close()
        print(totals.line(device), file=sys.stderr)
        if drafts:
            share = f" ({100 * totals.accepted / totals.drafted:.0f} %)" if totals.drafted else ""
            print(
                f"speculation ({drafts}): drafted {totals.drafted}, accepted {totals.accepted}{share}", file=sys.stderr
            )
    return 1 if totals.errors else 0


def result(index: int, asked: Asked, one: Completion | Exception) -> dict[str, Any]:
    """A prompt's result, or its error, as the JSON object of a line of --output."""
    if isinstance(one, Exception):
        return {"index": index, "prompt": asked.prompt, "error": f"{asked.where}: {one}" if asked.where else str(one)}
    usage = {f.name: getattr(one.usage, f.name) for f in fields(one.usage)}
    timings = {f.name: getattr(one.timings, f.name) for f in fields(one.timings)}
    found = {
        "index": index,
        "prompt": asked.prompt,
        "text": one.text,
        "ids": list(one.ids),
        "finish": one.finish,
        "usage": usage,
        "timings": timings,
    }
    if one.logprobs is not None:
        found["logprobs"] = [{"id": p.id, "logprob": p.logprob, "top": [list(t) for t in p.top]} for p in one.logprobs]
    return found


class _Totals:
    def __init__(self) -> None:
        self.results = self.errors = self.prompt = self.cached = self.generated = 0
        self.drafted = self.accepted = 0
        self._begin = time.perf_counter()

    def add(self, one: Mapping[str, Any]) -> None:
        if "error" in one:
            self.errors += 1
            return
        self.results += 1
        self.prompt += one["usage"]["prompt_tokens"]
        self.cached += one["usage"]["cached_tokens"]
        self.generated += one["usage"]["completion_tokens"]
        self.drafted += one["usage"]["drafted_tokens"]
        self.accepted += one["usage"]["accepted_tokens"]

    def line(self, device: str) -> str:
        seconds = time.perf_counter() - self._begin
        cached = f", {self.cached} of them cached" if self.cached else ""
        speed = show_rate(self.generated / seconds, "tok/s") if seconds > 0 else ""
        wrong = f", {self.errors} errors" if self.errors else ""
        results = f"{self.results} results{wrong}"
        return f"{device} | {results} | prompts {self.prompt} tokens{cached} | generated {self.generated}, {speed}"
