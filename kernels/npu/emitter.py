"""A design as IRON source for mlir-aie, release in iron.toml: straight-line code, one call per element of the design.

    python -m kernels.npu.emitter NAME > design.py

iron.check_program binds every call to the release's signatures, reader.read gives the design back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from hybrid.cli import Parser, run
from hybrid.kernels.npu.design import (
    Acquire,
    Array,
    Bind,
    Call,
    Design,
    Dims,
    Element,
    Fifo,
    Link,
    Loop,
    Move,
    Release,
    Statement,
    Tile,
    Worker,
)
from hybrid.kernels.npu.iron import check_program, manifest

DEVICES = {1: "NPU1Col1", 2: "NPU1Col2", 3: "NPU1Col3", 4: "NPU1"}
NUMPY = {
    "i8": "np.int8",
    "u8": "np.uint8",
    "i16": "np.int16",
    "i32": "np.int32",
    "bf16": "bfloat16",
    "f32": "np.float32",
}


def emit(design: Design) -> str:
    """The program's source; its calls have been checked. DesignError or IronError otherwise."""
    source = "\n".join(_lines(design)) + "\n"
    check_program(source)
    return source


def _lines(design: Design) -> Iterator[str]:
    yield f'"""{design.name} for {manifest()["release"]}: written by kernels.npu.emitter, not by hand."""'
    yield ""
    yield "import numpy as np"
    yield "from aie.helpers.taplib import TensorAccessPattern"
    yield f"from aie.iron import {'Buffer, ' if design.buffers else ''}Kernel, ObjectFifo, Program, Runtime, TaskGroup, Worker"
    yield "from aie.iron.controlflow import range_"
    yield f"from aie.iron.device import {DEVICES[design.columns]}, Tile"
    yield "from ml_dtypes import bfloat16"
    yield ""
    yield f'DESIGN = "{design.name}"'
    yield "OBJECTS = {  # how each kernel's object is built, and what it takes of a core"
    for k in design.kernels:
        yield f'    "{k.name}": {{"macros": {dict(k.macros)!r}, "static": {k.static_bytes}, "stack": {k.stack_bytes}}},'
    yield "}"
    yield ""
    for k in design.kernels:
        args = ", ".join("np.int32" if a == "i32" else _array(a) for a in k.args)
        yield f'{_kernel(k.name)} = Kernel("{k.name}", "{k.object}", [{args}])'
    yield ""
    yield from _fifos(design)
    for core in design.cores:
        yield ""
        yield ""
        yield f"def {core.name}({', '.join(core.params)}):"
        yield from _body(core.body, "    ")
    yield ""
    yield ""
    for worker in design.workers:
        yield from _worker(design, worker)
    yield ""
    yield ""
    yield from _sequence(design)
    yield ""
    yield 'if __name__ == "__main__":'
    workers = ", ".join(f"worker_{w.tile.col}_{w.tile.row}" for w in design.workers)
    yield f"    print(Program({DEVICES[design.columns]}(), rt, workers=[{workers}]).resolve_program())"


def _array(array: Array) -> str:
    return f"np.ndarray[{array.shape!r}, np.dtype[{NUMPY[array.dtype]}]]"


def _kernel(name: str) -> str:
    return f"kernel_{name}"


def _tile(tile: Tile) -> str:
    return f"Tile({tile.col}, {tile.row})"


def _dims(dims: Dims) -> str:
    return repr(list(dims))


def _fifos(design: Design) -> Iterator[str]:
    """Fifos that no link makes, then the links: each makes the fifos of its parts."""
    made = {name for link in design.links for name in link.parts}
    for fifo in (f for f in design.fifos if f.name not in made):
        given = f", dims_to_stream={_dims(fifo.to_stream)}" if fifo.to_stream else ""
        given += f", dims_from_stream_per_cons={_dims(fifo.from_stream)}" if fifo.from_stream else ""
        yield f'{fifo.name} = ObjectFifo({_array(fifo.array)}, depth={fifo.depth}, name="{fifo.name}"{given})'
    for link in design.links:
        yield _link(design, link)


def _link(design: Design, link: Link) -> str:
    parts = [design.fifo(p) for p in link.parts]
    verb, handle = ("split", "cons") if len(link.source) == 1 else ("join", "prod")
    listed = ", ".join(link.parts) + ("," if len(parts) == 1 else "")
    return (
        f"({listed}) = {link.whole}.{handle}().{verb}({list(link.offsets)!r}, tile={_tile(link.tile)}, "
        f"depths={[p.depth for p in parts]!r}, obj_types=[{', '.join(_array(p.array) for p in parts)}], "
        f"names={list(link.parts)!r}, dims_to_stream={_each(parts, 'to_stream')}, "
        f"dims_from_stream={_each(parts, 'from_stream')}{_repeats(parts)})"
    )


def _repeats(parts: Sequence[Fifo]) -> str:
    return f", repeat_counts={[p.repeat for p in parts]!r}" if any(p.repeat > 1 for p in parts) else ""


def _each(parts: Sequence[Fifo], key: str) -> str:
    return repr([list(getattr(p, key)) for p in parts])


def _body(body: Sequence[Statement], indent: str) -> Iterator[str]:
    for s in body:
        if isinstance(s, Loop):
            count = f"{s.count.buffer}[{s.count.index}]" if isinstance(s.count, Element) else s.count
            yield f"{indent}for {s.index or '_'} in range_({count}):"
            yield from _body(s.body, indent + "    ")
        elif isinstance(s, Acquire):
            left = s.names[0] if len(s.names) == 1 else f"({', '.join(s.names)})"
            yield f"{indent}{left} = {s.port}.acquire({len(s.names)})"
        elif isinstance(s, Release):
            yield f"{indent}{s.port}.release({s.count})"
        elif isinstance(s, Call):
            yield f"{indent}{s.kernel}({', '.join(map(str, s.args))})"


def _worker(design: Design, worker: Worker) -> Iterator[str]:
    at = f"{worker.tile.col}_{worker.tile.row}"
    binds = dict(worker.binds)
    for b in (b for b in binds.values() if b.kind == "buffer"):
        yield f'{b.name}_{at} = Buffer({_array(design.buffer(b.name).array)}, name="{b.name}_{at}")'
    args = ", ".join(_argument(binds[p], at) for p in design.core(worker.core).params)
    yield (
        f"worker_{at} = Worker({worker.core}, [{args}], tile={_tile(worker.tile)}, stack_size={worker.stack_bytes}, "
        f'allocation_scheme="{worker.allocation}")'
    )


def _argument(bind: Bind, at: str) -> str:
    if bind.kind == "buffer":
        return f"{bind.name}_{at}"
    return (
        _kernel(bind.name) if bind.kind == "kernel" else f"{bind.name}.{'cons' if bind.kind == 'consume' else 'prod'}()"
    )


def _sequence(design: Design) -> Iterator[str]:
    """The body of the runtime sequence, over the arguments and one handle for each fifo that the shim fills or
    drains."""
    ends = {m.fifo: m for m in design.moves()}
    names = [n for n, _ in design.arguments] + [_end(m) for m in ends.values()]
    yield f"def sequence({', '.join(names)}):"
    seen: set[int] = set()
    for step in design.sequence:
        if step.group not in seen:
            seen.add(step.group)
            yield f"    group_{step.group} = TaskGroup()"
        if not isinstance(step, Move):
            yield f"    group_{step.group}.finish()"
            continue
        dims = design.argument(step.argument).shape
        tap = f"TensorAccessPattern({dims!r}, {step.offset}, {list(step.sizes)!r}, {list(step.strides)!r})"
        wait = ", wait=True" if step.wait else ""
        yield f"    {_end(step)}.{step.kind}({step.argument}, tap={tap}, group=group_{step.group}{wait})"
    yield ""
    yield ""
    made = [_array(a) for _, a in design.arguments]
    made += [f"{m.fifo}.{'prod' if m.kind == 'fill' else 'cons'}(tile={_tile(m.tile)})" for m in ends.values()]
    yield f"rt = Runtime(sequence, [{', '.join(made)}])"


def _end(move: Move) -> str:
    return f"{move.fifo}_{'prod' if move.kind == 'fill' else 'cons'}"


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="python -m kernels.npu.emitter", description="A design as IRON source, on standard output.")
    p.add_argument("name", metavar="NAME", help="a design, as python -m kernels.npu.build --list has them")
    args = p.parse_args(argv)

    def command() -> int:
        from hybrid.kernels.npu.designs import chosen

        (make,) = chosen([args.name]).values()
        sys.stdout.write(emit(make()))
        return 0

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
