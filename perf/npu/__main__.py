"""python -m perf.npu: modelled times of NPU designs, and the model's residuals against published measurements.

python -m perf.npu                    the residuals: three measurements fitted, others predicted, others far off
python -m perf.npu --fit              the parameters that the three give (they stand in the device sheets)
python -m perf.npu --designs          every product among the shipped designs, by what bounds it
python -m perf.npu --attention        attention with scores in bfloat16 and in int8
python -m perf.npu --placement        NPU or iGPU, matrix by matrix, for 27B and E2B
python -m perf.npu --pipeline         two prefill chunks in flight, by what the NPU does, against the iGPU alone
python -m perf.npu --host             what the host does for a run, measured on this machine
"""

from __future__ import annotations

import sys

from hybrid.cli import Parser, positive
from hybrid.perf.npu.cycles import designs, fit, rates, residuals
from hybrid.perf.npu.host import measure, text
from hybrid.perf.npu.pipeline import table as pipelined
from hybrid.perf.npu.placement import MODELS, placement_table


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="python -m perf.npu", description="Modelled times of NPU designs; no measurement of this project.")
    p.add_argument("--fit", action="store_true", help="print the parameters that the fitted measurements give")
    p.add_argument("--designs", action="store_true", help="print the modelled times of the shipped products")
    p.add_argument("--attention", action="store_true", help="print the modelled times of attention for 27B and E2B")
    p.add_argument("--placement", action="store_true", help="print NPU or iGPU for the matrices of 27B and E2B")
    p.add_argument("--pipeline", action="store_true", help="print what two prefill chunks in flight are worth")
    p.add_argument("--host", action="store_true", help="measure what the host does for a run, on this machine")
    p.add_argument(
        "--tokens", type=positive, default=512, metavar="N", help="tokens of a prefill, or of a chunk of it (512)"
    )
    args = p.parse_args(argv)
    if args.fit:
        print(
            "\n".join(
                f"{k} = {v:.4f}  (modelled: solved from the three measurements marked fitted)" for k, v in fit().items()
            )
        )
    elif args.designs:
        print(designs())
    elif args.attention:
        from hybrid.perf.npu.attention import table  # it compiles the tile kernels, to count their instructions

        print(table(rates()))
    elif args.host:
        print(text(measure({model: parts for model, (_, parts) in MODELS.items()})))
    elif args.pipeline:
        print(pipelined(args.tokens))
    elif args.placement:
        print(placement_table(args.tokens))
    else:
        print(residuals())
    return 0


if __name__ == "__main__":
    sys.exit(main())
