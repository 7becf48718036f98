"""python -m hybrid.prove [MODEL ...]: prove this machine's device: every kernel that a model's plans use there.

hybrid.proving runs the kernels' cases. Fused groups, which no single operation selects, run in the model: the logits of
a prompt and the choices of a decoded text, or the vectors of texts, are compared with those of cpu.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.cli import Parser, run
from hybrid.core.dtypes import DTYPES
from hybrid.core.places import MODELS, SPECS
from hybrid.proving import Proof, Report, Subject, Text, prove, routed

if TYPE_CHECKING:
    from hybrid.kernels.vulkan.device import VulkanDevice
    from hybrid.text.tokenizer import Tokenizer

FEW, PROMPT, TEXT, CONTEXT, LAYERS = 12, 40, 12, 96, 6
ON_CPU = 1 << 30  # bytes of weights of the largest model whose texts are compared


def model_names() -> list[str]:
    """Published sizes of specs/models."""
    return sorted(path.stem for path in (SPECS / "models").glob("*.toml"))


def all_models() -> list[str]:
    """The embedded models' files and the published sizes."""
    return [*(str(m) for m in sorted(MODELS.glob("*.gguf"))), *model_names()]


@contextmanager
def opened_model(name: str) -> Iterator[Subject]:
    """A file, or a published size with random weights and its first layers, which have every kind."""
    from hybrid.checkpoint import open_checkpoint
    from hybrid.checkpoint.random import random_checkpoint, random_shape
    from hybrid.engine.loading import EngineConfig

    if name in model_names():
        found = random_checkpoint(name, layers=min(LAYERS, random_shape(name).n_layers))
    else:
        found = open_checkpoint(name)
    with found as checkpoint:
        yield Subject(checkpoint, EngineConfig(slots=1, shared=True, drafts=2))


# --- texts -----------------------------------------------------------------------------------------------------------


def texts_of(paths: Sequence[Path], opened: Callable[..., VulkanDevice], proofs: Mapping[str, Proof]) -> Iterator[Text]:
    """The models' texts, also in the published sizes' type where that runs kernels that no case selects."""
    for path in paths:
        with opened_model(str(path)) as subject:
            size = sum(DTYPES[e.dtype].nbytes(e.shape) for e in subject.checkpoint.entries.values())
            compare = _compare_vectors if subject.checkpoint.hparams.dimensions else _compare
        for weights in (None, "q4_0") if size <= ON_CPU else ():
            if weights is None or any(weights in p.kernel for p in proofs.values() if not p.cases and not p.error):
                text, used = compare(path, opened, weights)
                for kernel in used & proofs.keys():
                    proofs[kernel].cases += 1
                yield text


def _compare(path: Path, opened: Callable[..., VulkanDevice], weights: str | None) -> tuple[Text, frozenset[str]]:
    """How a model's logits and text differ from those of cpu, and the kernels that it used."""
    import numpy as np

    import hybrid
    from hybrid.devices.opening import Opened

    device = opened()
    options: dict[str, Any] = {"ctx": CONTEXT, "weights": weights, "requantize": True}
    with hybrid.load(path, Opened(device, device), **options, prove=False) as model:
        ids = _drawn(model.checkpoint.tokenizer, PROMPT)
        few, ours = model.logits(ids[:FEW]), model.logits(ids)  # passes of few rows have kernels of their own
        text = model.submit(ids, max_tokens=TEXT, ignore_eos=True).result().ids
        used = _used(device)
        faults = "; ".join(model.engine.faults)
        mixture = any(layer.n_experts for layer in model.hparams.layers)
    with hybrid.load(path, "cpu", **options) as model:
        theirs = model.logits([*ids, *text])
    spread = theirs.std(-1)
    at = [*range(FEW), *range(PROMPT)]
    apart = np.sqrt(np.square(np.concatenate([few, ours]) - theirs[at]).mean(-1)) / spread[at]
    chosen = theirs[len(ids) - 1 : -1]
    leads = (chosen.max(-1) - np.take_along_axis(chosen, np.array(text)[:, None], -1)[:, 0]) / spread[len(ids) - 1 : -1]
    # A rounding may choose other experts for a position, which then differs for that reason: the median one counts.
    most = np.median if mixture else np.max
    worst = [float(most(np.nan_to_num(found, nan=np.inf))) for found in (apart, leads)]
    return Text(_named(path, weights), worst[0], worst[1], faults), used


def _compare_vectors(
    path: Path, opened: Callable[..., VulkanDevice], weights: str | None
) -> tuple[Text, frozenset[str]]:
    """`_compare` of an embedding model: by the vectors of a short and a long text."""
    import numpy as np

    import hybrid
    from hybrid.devices.opening import Opened

    device = opened()
    options: dict[str, Any] = {"ctx": CONTEXT, "weights": weights, "requantize": True, "prove": False}
    with hybrid.load_embedder(path, Opened(device, device), **options) as model:
        texts = [_drawn(model.checkpoint.tokenizer, length) for length in (PROMPT, CONTEXT)]
        ours, used = model.embed(texts), _used(device)
    with hybrid.load_embedder(path, "cpu", **options) as model:
        theirs = model.embed(texts)
    apart = np.sqrt(np.square(ours - theirs).mean(-1)) / theirs.std(-1)
    return Text(_named(path, weights), float(np.nan_to_num(apart, nan=np.inf).max()), 0.0), used


def _drawn(tokenizer: Tokenizer, length: int) -> list[int]:
    """The same random ids in every run."""
    import numpy as np

    drawn = np.random.default_rng(0).integers(0, tokenizer.n_tokens, length - 1).tolist()
    return [tokenizer.bos_id or 0, *drawn]


def _used(device: VulkanDevice) -> frozenset[str]:
    """Kernels of the device's programs."""
    return frozenset(d.kernel.name for p in device.programs for d in p.recording.dispatches)


def _named(path: Path, weights: str | None) -> str:
    return path.name + (f" as {weights}" if weights else "")


# --- the command -----------------------------------------------------------------------------------------------------


def table(report: Report) -> Iterator[str]:
    """Report lines."""
    wide = max(len(p.kernel) for p in report.proofs)
    yield f"{report.device}, {report.driver}, kernels {report.kernels}"
    yield f"{'kernel':{wide}}  {'operation':20} {'cases':>5} {'worst/bound':>11}  verdict"
    for p in report.proofs:
        yield f"{p.kernel:{wide}}  {p.operation:20} {p.cases:5} {p.worst:11.2f}  {p.verdict}"
    for t in report.texts:
        yield f"{t.model}: logits or vectors within {t.apart:.3f}, text within {t.lead:.3f} of cpu: {t.error or 'agrees'}"
    yield f"{report.sentence} ({report.seconds:.0f} s)"


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="python -m hybrid.prove", description="Prove this machine's Vulkan device against the oracle.")
    made.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a .gguf file, a Hugging Face directory or a published size such as gemma3-27b (the embedded models and all "
        "published sizes)",
    )
    made.add_argument("--device", default="auto", metavar="NAME", help="auto, vulkan or vulkan:N (auto)")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    made.add_argument("--output", type=Path, metavar="FILE", help="where to write the report (the user's cache)")
    return made


def main(argv: list[str] | None = None) -> int:
    """0: proved; 1: a kernel or a text is wrong."""
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    from hybrid.devices.proofs import report_path
    from hybrid.kernels.vulkan.device import open_device

    models = args.models or all_models()
    files = [Path(m) for m in models if m not in model_names()]
    proving: Callable[..., Report] = partial(
        prove, subjects=[partial(opened_model, m) for m in models], texts=partial(texts_of, files)
    )
    report = routed(proving, partial(open_device, args.device))
    path = args.output or report_path(report.device, report.driver, report.kernels)
    text = report.write(path)
    print(text if args.json else "\n".join([*table(report), f"report: {path}"]))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
