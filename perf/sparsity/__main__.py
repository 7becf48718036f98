"""python -m perf.sparsity MODEL --text FILE: the share of weights that sparse feed-forwards need, and the
modelled saving.

The model runs on cpu over beginnings of the text's stretches; every sparse feed-forward is watched. The shares are
those of MODEL; times are modelled for a published size (--for) on a device sheet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.cli import Parser, UsageError, positive, run
from hybrid.cli.progress import tracked
from hybrid.devices.opening import Opened
from hybrid.kernels.oracle import ORACLE
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.kernels.oracle.ffn import sparsified
from hybrid.kernels.oracle.linear import linear
from hybrid.model import Model as Loaded
from hybrid.model import load
from hybrid.perf.acceptance.__main__ import beginnings
from hybrid.perf.roofline.model import modelled_sheet
from hybrid.perf.roofline.work import subject
from hybrid.perf.sparsity import Saved, Union, saved, unions
from hybrid.quant.codec import argument, dequantise
from hybrid.spec.devicesheet import DeviceSheet
from hybrid.spec.model import find_model


class Watched:
    """fused_ffn that notes, of sparse layers, which gates are above their threshold and which activations are not zero:
    bool [T, F] for each call, in the order of layers."""

    def __init__(self) -> None:
        self.above: list[np.ndarray] = []
        self.active: list[np.ndarray] = []

    def __call__(
        self, *, x: Any, w_gate_up: Any, sparsity: float = 0.0, h: Any = None, **more: Any
    ) -> tuple[np.ndarray, ...]:
        results = ORACLE["fused_ffn"](x=x, w_gate_up=w_gate_up, sparsity=sparsity, h=h, **more)
        if sparsity > 0:
            gate = linear(x=x, w=w_gate_up, real=np.float32)[0]
            self.above.append(sparsified(gate[:, : gate.shape[-1] // 2], sparsity) > 0)
            self.active.append(dequantise(argument(h), np.float32) != 0)
        return results

    def taken(self, layers: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """[tokens, F] of each layer, of the passes since the last call, each of which has gone through so many sparse
        layers."""
        above, active = ([np.concatenate(kind[i::layers]) for i in range(layers)] for kind in (self.above, self.active))
        self.above, self.active = [], []
        return above, active


def measure(model: Loaded, watched: Watched, texts: Sequence[Sequence[int]]) -> list[Union]:
    """Of texts that the model reads. ValueError where none of its layers is sparse."""
    layers = sum(x.sparsity > 0 for x in model.checkpoint.hparams.layers)
    if not layers:
        raise ValueError(f"{model.checkpoint.name} has no sparse feed-forward: nothing to measure (Gemma 3n has some)")
    watched.above, watched.active = [], []
    above, active = [], []
    for ids in tracked(texts, "texts"):
        model.logits(list(ids))
        a, b = watched.taken(layers)
        above.append(a)
        active.append(b)
    return unions(above, active)


def table(
    found: Sequence[Union], times: Sequence[Saved], source: str, name: str, dtype: str, sheet: DeviceSheet
) -> str:
    lines = [f"{source}: measured, of up's rows and down's columns in sparse layers", ""]
    lines += [f"{'tokens':>7}{'rows of up':>12}{'consecutive':>13}{'columns':>9}{'blocks of 32':>14}"]
    lines += [f"{u.tokens:>7}{u.up:>12.1%}{u.consecutive:>13.1%}{u.down:>9.1%}{u.blocks:>14.1%}" for u in found]
    lines += [
        "",
        f"{name} {dtype} on {sheet.device.name} with those shares: modelled, ms of a pass that reads all, and saved",
        "",
    ]
    lines += [f"{'tokens':>7}{'pass':>9}{'rows of up':>18}{'columns of down':>18}"]
    for s in times:
        rows, columns = (f"{1e3 * x:.2f} ({x / s.seconds:.1%})" for x in (s.up, s.down))
        lines.append(f"{s.tokens:>7}{1e3 * s.seconds:>9.2f}{rows:>18}{columns:>18}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.sparsity",
        description="What sparse feed-forwards need of their weights, and what that saves.",
    )
    p.add_argument("model", metavar="MODEL", help=".gguf file or Hugging Face directory of Gemma 3n")
    p.add_argument("--text", type=Path, required=True, metavar="FILE", help="text that the model reads")
    p.add_argument("--texts", type=positive, default=64, metavar="N", help="how many stretches of it (64)")
    p.add_argument("--length", type=positive, default=64, metavar="N", help="tokens of each, 32 or more (64)")
    p.add_argument(
        "--for",
        dest="size",
        default="gemma3n-e2b",
        metavar="NAME",
        help="published size that times are of (gemma3n-e2b)",
    )
    p.add_argument(
        "--type", default="q4_0", metavar="TYPE", help="storage type of its matrices, of blocks of 32 or plain (q4_0)"
    )
    p.add_argument(
        "--context", type=positive, default=256, metavar="N", help="positions that each sequence holds (256)"
    )
    p.add_argument("--device", default="radeon-780m", metavar="SHEET", help="of specs/devices (radeon-780m)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def _main(args: argparse.Namespace) -> int:
    sheet, hp = modelled_sheet(args.device), find_model(args.size).hparams()
    if not any(x.sparsity for x in hp.layers):
        raise UsageError(f"--for {args.size}: none of its layers is sparse; gemma3n-e2b and gemma3n-e4b have some")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--text {args.text}: {e}") from None
    watched = Watched()
    device = CpuDevice(overrides={"fused_ffn": watched})
    with load(args.model, Opened(device, device), ctx=args.length, chunk=args.length) as model:
        found = measure(model, watched, beginnings(text, model, args.texts, args.length))
        source = f"{model.checkpoint.name}, {args.texts} x {args.length} tokens"
    planned = subject(args.size, args.type, capabilities=sheet.limits.capabilities)
    times = saved(found, planned, hp, args.type, args.context, sheet)
    if args.json:
        print(json.dumps({"measured": [asdict(u) for u in found], "modelled": [asdict(s) for s in times]}))
    else:
        print(table(found, times, source, args.size, args.type, sheet))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


if __name__ == "__main__":
    sys.exit(main())
