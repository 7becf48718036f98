"""python -m hybrid.perplexity MODEL TEXT: perplexity of a text, and KL divergence from a reference model."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid.arguments import add_devices, add_weights
from hybrid.cli import CACHES, PRECISIONS, Parser, positive, run
from hybrid.cli.progress import progress_bar
from hybrid.planning.cost import precision_of
from hybrid.planning.passes import bucket_of

if TYPE_CHECKING:
    from hybrid.engine.request import Captured

FORM_FEED = "\n\f\n"
MAX_TEXT = 1 << 28  # bytes
_PASS_ROWS = 512
_TOGETHER = 32  # most documents of a batch
_ROW_ELEMENTS = 1 << 21  # logits processed at once, in float64


@dataclass
class Running:
    """Running mean of a quantity and its standard error."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    most: float = -math.inf

    def add(self, values: np.ndarray) -> None:
        if values.size:
            self.n += values.size
            self.total += float(values.sum())
            self.squares += float(np.square(values).sum())
            self.most = max(self.most, float(values.max()))

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean, assuming independent values."""
        if self.n < 2:
            return math.nan
        return math.sqrt(max(self.squares / self.n - self.mean**2, 0.0) / (self.n - 1))


@dataclass
class Measured:
    """Sums over all predictions."""

    nats: Running = field(default_factory=Running)
    divergence: Running = field(default_factory=Running)
    """KL(reference || model) of each predicted distribution, in nats."""
    reference_nats: Running = field(default_factory=Running)
    same: int = 0
    """Predictions with the reference's most likely token."""
    other_experts: Running = field(default_factory=Running)
    """Share of a mixture's layers with other experts than the reference's, for each prediction."""
    rerouted: Running = field(default_factory=Running)
    """Divergence of predictions with such a layer; `routed_alike`: of the others."""
    routed_alike: Running = field(default_factory=Running)

    def add(
        self, logits: np.ndarray, targets: np.ndarray, reference: np.ndarray | None, others: np.ndarray | None = None
    ) -> None:
        """Logits [n, vocab] of n predictions, the tokens that came, and another model's logits; of a mixture, the share of
        layers with other experts."""
        if others is not None:
            self.other_experts.add(others)
        step = max(1, _ROW_ELEMENTS // logits.shape[1])
        for start in range(0, len(targets), step):
            rows = np.arange(len(targets[start : start + step]))
            picked = targets[start : start + step]
            log_q = _log_softmax(logits[start : start + step])
            self.nats.add(-log_q[rows, picked])
            if reference is None:
                continue
            log_p = _log_softmax(reference[start : start + step])
            self.reference_nats.add(-log_p[rows, picked])
            self.same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            divergence = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(-1), 0.0)
            self.divergence.add(divergence)
            if others is not None:
                some = others[start : start + step] > 0
                self.rerouted.add(divergence[some])
                self.routed_alike.add(divergence[~some])


@dataclass(frozen=True, slots=True)
class Text:
    """Documents as ids; `left_out` tokens were beyond the chunk."""

    documents: tuple[tuple[int, ...], ...]
    left_out: int


def read_text(path: Path, separator: str) -> list[str]:
    """Documents of a UTF-8 file. ValueError if it is not UTF-8, too long or empty."""
    with open(path, "rb") as file:  # not read_text: a device file may be endless
        data = file.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise ValueError(f"{path} is longer than {MAX_TEXT >> 20} MiB: give a part of it")
    try:
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start}") from None
    documents = [d for d in (text.split(separator) if separator else [text]) if d]
    if not documents:
        raise ValueError(f"{path} holds no text")
    return documents


def encode(model: Any, documents: Sequence[str], chunk: int, whole: bool) -> Text:
    """Encode documents with a begin-of-text token, truncated to `chunk` tokens. whole: add further chunks for the rest,
    each with a begin-of-text token."""
    found: list[tuple[int, ...]] = []
    left_out = 0
    for document in documents:
        ids = model.encode(document)
        begin = ids[:1] if model.checkpoint.tokenizer.bos_id in ids[:1] else []
        found.append(tuple(ids[:chunk]))
        rest, step = ids[chunk:], chunk - len(begin)
        if whole:
            found += [(*begin, *rest[at : at + step]) for at in range(0, len(rest), step)]
        else:
            left_out += len(rest)
    usable = tuple(d for d in found if len(d) > 1)
    if not usable:
        raise ValueError("the text has no token to predict: it needs at least two tokens")
    return Text(usable, left_out)


def measure(
    model: Any, documents: Sequence[Sequence[int]], into: Measured, reference: Any = None, decode: bool = False
) -> None:
    """Add the predictions of some documents. decode: of decode passes, one row of each document. Needs the memory of one pass's logits of each model."""
    ids = np.concatenate([np.asarray(d) for d in documents])
    predicted = np.ones(len(ids), bool)  # rows with a known next token: all but a document's last
    predicted[np.cumsum([len(d) for d in documents]) - 1] = False
    if decode:
        ours = model.engine.decode_logits(documents)
        theirs = None if reference is None else reference.engine.decode_logits(documents)
        for at, part in enumerate(ours):
            lengths = np.array([len(d) for d in documents if len(d) > at])
            rows_used = np.flatnonzero(lengths > at + 1)
            targets = np.array([d[at + 1] for d in documents if len(d) > at + 1], np.int64)
            _add(into, part, rows_used, targets, None if theirs is None else next(theirs))
        return
    with contextlib.ExitStack() as stack:
        rows = min(m.engine.sizes.logits for m in (model, reference) if m is not None)
        ours = stack.enter_context(contextlib.closing(model.engine.forced(documents, rows)))
        theirs = None
        if reference is not None:
            theirs = stack.enter_context(contextlib.closing(reference.engine.forced(documents, rows)))
        at = 0
        for part in ours:
            rows_used = np.flatnonzero(predicted[at : at + len(part.rows)])
            _add(into, part, rows_used, ids[at + 1 + rows_used], None if theirs is None else next(theirs))
            at += len(part.rows)


def _add(into: Measured, ours: Captured, used: np.ndarray, targets: np.ndarray, theirs: Captured | None) -> None:
    reference = None if theirs is None else theirs.rows[used]
    into.add(ours.rows[used], targets, reference, None if theirs is None else _other_experts(ours, theirs, used))


def _other_experts(ours: Captured, theirs: Captured, used: np.ndarray) -> np.ndarray | None:
    """Share of layers with different sets of experts, for each row used; None unless both are mixtures of the same
    layers."""
    if not ours.experts or [e.shape for e in ours.experts] != [e.shape for e in theirs.experts]:
        return None
    pairs = zip(ours.experts, theirs.experts, strict=True)
    return np.mean([(np.sort(a[used]) != np.sort(b[used])).any(-1) for a, b in pairs], axis=0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [rows, vocab]."""
    z = logits.astype(np.float64)
    z -= z.max(-1, keepdims=True)
    z -= np.log(np.exp(z).sum(-1, keepdims=True))
    return z


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m hybrid.perplexity",
        description="Nats per token and perplexity of a text, and the distance from a reference model. Each document "
        "is read with a begin-of-text token before it; its first token is given, all others are predicted.",
    )
    p.add_argument(
        "model", metavar="MODEL", help=".gguf file, Hugging Face directory, or OWNER/NAME[:FILE.gguf] on Hugging Face"
    )
    p.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 file")
    p.add_argument("--chunk", type=int, default=512, metavar="N", help="documents are read in chunks of N tokens (512)")
    p.add_argument("--cut", action="store_true", help="only the first chunk of each document; the rest is left out")
    p.add_argument("--separator", metavar="LINE", help="line between documents; '' takes the file as one (a form feed)")
    p.add_argument("--limit", type=int, metavar="N", help="only the first N documents")
    p.add_argument(
        "--kl",
        metavar="REFERENCE",
        help="KL divergence and top-1 agreement: another checkpoint with the same tokenizer, or exact, fast or auto: "
        "MODEL itself in that precision",
    )
    p.add_argument(
        "--phase",
        default="prompt",
        choices=("prompt", "decode"),
        metavar="NAME",
        help="read the text as prompts, or by decode passes as tokens are generated, whose precision may differ: prompt, "
        "decode (prompt)",
    )
    p.add_argument("--batch", type=positive, metavar="N", help="with --phase decode: chunks that decode together (1)")
    add_devices(p)
    add_weights(p)
    p.add_argument("--precision", default="auto", choices=PRECISIONS, metavar="NAME", help="auto, exact or fast (auto)")
    p.add_argument(
        "--kv", default="auto", choices=CACHES, metavar="TYPE", help=f"MODEL's KV cache: {', '.join(CACHES)} (auto)"
    )
    p.add_argument("--progress", action="store_true", help="a progress bar even where standard error is no terminal")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: list[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    if args.chunk < 2:
        p.error(f"--chunk {args.chunk}: a prediction needs a token before it, so at least 2")
    if args.limit is not None and args.limit < 1:
        p.error(f"--limit {args.limit} must be positive")
    if args.batch is not None and args.phase != "decode":
        p.error("--batch belongs to --phase decode: prompts share passes by themselves")
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    separator = FORM_FEED if args.separator is None else args.separator and f"\n{args.separator}\n"
    documents = read_text(args.text, separator)[: args.limit]
    found = Measured()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(_load(args.model, args, args.precision, args.weights, args.kv))
        reference = _reference(args, stack)
        text = encode(model, documents, args.chunk, not args.cut)
        if reference is not None:
            _same_tokens(model, reference, documents, args)
        total = sum(len(d) - 1 for d in text.documents)
        begin = time.perf_counter()
        with progress_bar(total, args.text.name, args.progress, unit="token") as update:
            together = _together(args)
            for at in range(0, len(text.documents), together):
                some = text.documents[at : at + together]
                measure(model, some, found, reference, args.phase == "decode")
                update(sum(len(ids) - 1 for ids in some))
        report = _report(args, model, text, found, time.perf_counter() - begin)
    print(json.dumps(_finite(report)) if args.json else "\n".join(_lines(report)))
    return 0


def _load(path: str, args: argparse.Namespace, precision: Any, weights: str | None, kv: Any = "auto") -> Any:
    import hybrid
    from hybrid.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        longest = checkpoint.hparams.context_length
    if args.chunk > longest:
        raise ValueError(f"--chunk {args.chunk} is more than the context of {longest} that {path} was made for")
    slots = _together(args)
    return hybrid.load(
        path,
        args.device,
        args.schedule,
        weights,
        args.chunk,
        precision=precision,
        kv=kv,
        slots=slots,
        progress=True,
        npu=args.npu,
        requantize=args.requantize,
    )


def _together(args: argparse.Namespace) -> int:
    """Documents of a batch. A pass of prompts reads every weight, so it should have hundreds of rows."""
    if args.phase == "decode":
        return args.batch or 1
    return max(1, min(_TOGETHER, _PASS_ROWS // args.chunk))


def _reference(args: argparse.Namespace, stack: contextlib.ExitStack) -> Any:
    if args.kl is None:
        return None
    own = args.kl in PRECISIONS and not os.path.exists(args.kl)
    return stack.enter_context(_load(args.model if own else args.kl, args, args.kl if own else args.precision, None))


def _same_tokens(model: Any, reference: Any, documents: Sequence[str], args: argparse.Namespace) -> None:
    rows = [m.hparams.vocab for m in (model, reference)]
    if rows[0] != rows[1] or any(model.encode(d) != reference.encode(d) for d in documents):
        raise ValueError(
            f"--kl {args.kl}: its tokenizer or vocabulary is not that of {args.model}: nothing can be compared"
        )


def _report(args: argparse.Namespace, model: Any, text: Text, found: Measured, seconds: float) -> dict[str, Any]:
    nats = found.nats
    perplexity = math.exp(nats.mean) if not nats.mean > 709 else math.inf
    report: dict[str, Any] = {
        "model": str(args.model),
        "text": str(args.text),
        "device": model.device,
        "passed_over": [*model.passed_over, *model.engine.device.failures, *model.engine.faults],
        "phase": args.phase,
        "precision": _precision(model, args),
        "documents": len(text.documents),
        "predictions": nats.n,
        "tokens_left_out": text.left_out,
        "nats_per_token": nats.mean,
        "nats_error": nats.error,
        "perplexity": perplexity,
        "perplexity_error": perplexity * nats.error,
        "seconds": seconds,
    }
    if found.divergence.n:
        d = found.divergence
        report["reference"] = {
            "model": args.kl,
            "nats_per_token": found.reference_nats.mean,
            "kl_mean": d.mean,
            "kl_error": d.error,
            "kl_max": d.most,
            "top_1_agreement": found.same / d.n,
        }
    if (others := found.other_experts).n:
        report["reference"]["experts"] = {
            "rows_with_others": others.mean,
            "predictions_with_others": found.rerouted.n / others.n,
            "kl_mean_with_others": found.rerouted.mean,
            "kl_mean_with_same": found.routed_alike.mean,
        }
    return report


def _precision(model: Any, args: argparse.Namespace) -> dict[str, list[str]]:
    """Storage types of the passes that ran."""
    runner = model.engine.runner
    if args.phase == "decode":
        rows = bucket_of(_together(args), runner.sizes.decode)
        made = runner.plan("decode", rows, rows, sample=False)
    else:
        made = runner.plan("prefill", runner.sizes.logits, runner.sizes.logits, sample=False)
    return {k: list(v) for k, v in precision_of(made).items()}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by null for JSON."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(report: dict[str, Any]) -> list[str]:
    types = "; ".join(f"{k} {', '.join(v)}" for k, v in report["precision"].items())
    left_out = f", {report['tokens_left_out']} tokens left out (--cut)" if report["tokens_left_out"] else ""
    lines = [
        f"{report['model']} on {report['device']}, {report['phase']}: {types}",
        *(f"passed over: {reason}" for reason in report["passed_over"]),
        f"{report['text']}: {report['predictions']} predictions in {report['documents']} chunks{left_out}, "
        f"{report['predictions'] / max(report['seconds'], 1e-9):.0f} per second",
        f"nats per token  {report['nats_per_token']:.4f} +- {report['nats_error']:.4f}",
        f"perplexity      {report['perplexity']:.4f} +- {report['perplexity_error']:.4f}",
    ]
    if "reference" in report:
        r = report["reference"]
        lines += [
            f"reference {r['model']}: {r['nats_per_token']:.4f} nats per token",
            f"KL divergence   {r['kl_mean']:.6f} +- {r['kl_error']:.6f}, at most {r['kl_max']:.4f}",
            f"same likeliest  {100 * r['top_1_agreement']:.2f} %",
        ]
        if (e := r.get("experts")) is not None:
            lines.append(
                f"other experts   {100 * e['rows_with_others']:.2f} % of rows (mean of the layers); "
                f"KL {e['kl_mean_with_others']:.6f} where some layer's are ({100 * e['predictions_with_others']:.2f} % of "
                f"predictions), {e['kl_mean_with_same']:.6f} elsewhere"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
