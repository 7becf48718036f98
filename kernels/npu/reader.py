"""Read an emitted IRON program back as a design, to check that the emitted text matches the design."""

from __future__ import annotations

import ast
from typing import Any, Literal

from hybrid.kernels.npu.design import (
    Acquire,
    Array,
    Bind,
    Buffer,
    Call,
    Core,
    Design,
    DesignError,
    Element,
    Fifo,
    Finish,
    Kernel,
    Link,
    Loop,
    Move,
    Release,
    Statement,
    Tile,
    Worker,
)
from hybrid.kernels.npu.emitter import DEVICES, NUMPY

Made = dict[str, Any]


def read(source: str) -> Design:
    """The design of a program that emitter.emit wrote. DesignError names the line of anything else."""
    return _Reader(ast.parse(source)).design()


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.name, self.objects = "", {}  # type: str, dict[str, Any]
        self.kernels: dict[str, Kernel] = {}
        self.fifos: dict[str, Fifo] = {}
        self.links: list[Link] = []
        self.cores: list[Core] = []
        self.workers: dict[str, Worker] = {}
        self.buffers: dict[str, Buffer] = {}
        self.buffer_of: dict[str, str] = {}
        self.arguments: list[tuple[str, Array]] = []
        self.sequence: list[Move | Finish] = []
        self.columns = 0
        self.body: ast.FunctionDef | None = None

    def design(self) -> Design:
        for node in self.tree.body:
            if isinstance(node, ast.Assign):
                self._assign(node)
            elif isinstance(node, ast.FunctionDef) and node.name == "sequence":
                self.body = node
            elif isinstance(node, ast.FunctionDef):
                self.cores.append(Core(node.name, tuple(a.arg for a in node.args.args), _statements(node.body)))
            elif isinstance(node, ast.ImportFrom) and node.module == "aie.iron.device":
                self.columns = next(c for c, d in DEVICES.items() if d in {a.name for a in node.names})
        return Design(
            self.name,
            self.columns,
            tuple(self.arguments),
            tuple(self.kernels.values()),
            tuple(self.fifos.values()),
            tuple(self.links),
            tuple(self.cores),
            tuple(self.workers.values()),
            tuple(self.sequence),
            tuple(self.buffers.values()),
        )

    def _assign(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        if isinstance(value, ast.Constant):
            self.name = str(value.value)
        elif isinstance(value, ast.Dict):
            self.objects = ast.literal_eval(value)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            make = {
                "Kernel": self._kernel,
                "ObjectFifo": self._fifo,
                "Worker": self._worker,
                "Buffer": self._buffer,
                "Runtime": self._runtime,
            }.get(value.func.id)
            if make:
                make(ast.unparse(target), value)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            self._link(value)
        else:
            raise DesignError(f"line {node.lineno}: {ast.unparse(node)} is nothing that the emitter writes")

    def _kernel(self, _: str, call: ast.Call) -> None:
        name, obj = (ast.literal_eval(a) for a in call.args[:2])
        types = call.args[2]
        assert isinstance(types, ast.List)
        args = tuple("i32" if ast.unparse(t) == "np.int32" else _array(t) for t in types.elts)
        made = self.objects[name]
        self.kernels[name] = Kernel(name, obj, args, tuple(made["macros"].items()), made["static"], made["stack"])  # type: ignore[arg-type]

    def _fifo(self, name: str, call: ast.Call) -> None:
        given = _keywords(call)
        self.fifos[name] = Fifo(
            name,
            _array(call.args[0]),
            ast.literal_eval(given["depth"]),
            _dims(given.get("dims_to_stream")),
            _dims(given.get("dims_from_stream_per_cons")),
        )

    def _link(self, call: ast.Call) -> None:
        func, given = call.func, _keywords(call)
        assert (
            isinstance(func, ast.Attribute)
            and isinstance(func.value, ast.Call)
            and isinstance(func.value.func, ast.Attribute)
        )
        whole = ast.unparse(func.value.func.value)
        names = tuple(ast.literal_eval(given["names"]))
        depths, types = ast.literal_eval(given["depths"]), given["obj_types"]
        to, since = (_list(given[k]) for k in ("dims_to_stream", "dims_from_stream"))
        assert isinstance(types, ast.List)
        repeats = ast.literal_eval(given["repeat_counts"]) if "repeat_counts" in given else [1] * len(names)
        for i, name in enumerate(names):
            self.fifos[name] = Fifo(name, _array(types.elts[i]), depths[i], to[i], since[i], repeats[i])
        source, target = ((whole,), names) if func.attr == "split" else (names, (whole,))
        self.links.append(Link(_tile(given["tile"]), source, target, tuple(ast.literal_eval(call.args[0]))))

    def _buffer(self, target: str, call: ast.Call) -> None:
        name = target.rsplit("_", 2)[0]
        self.buffers[name] = Buffer(name, _array(call.args[0]))
        self.buffer_of[target] = name

    def _worker(self, name: str, call: ast.Call) -> None:
        given, args = _keywords(call), call.args[1]
        core = next(c for c in self.cores if c.name == ast.unparse(call.args[0]))
        assert isinstance(args, ast.List)
        binds = tuple((p, self._bind(a)) for p, a in zip(core.params, args.elts, strict=True))
        self.workers[name] = Worker(
            _tile(given["tile"]),
            core.name,
            binds,
            ast.literal_eval(given["stack_size"]),
            ast.literal_eval(given["allocation_scheme"]),
        )

    def _bind(self, node: ast.expr) -> Bind:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return Bind("consume" if node.func.attr == "cons" else "produce", ast.unparse(node.func.value))
        text = ast.unparse(node)
        if text in self.buffer_of:
            return Bind("buffer", self.buffer_of[text])
        return Bind("kernel", text.removeprefix("kernel_"))

    def _runtime(self, _: str, call: ast.Call) -> None:
        """`Runtime(sequence, [types of the arguments..., ends of fifos with their shim tiles...])`."""
        given = call.args[1]
        assert self.body is not None and isinstance(given, ast.List)
        ends: dict[str, tuple[str, Tile]] = {}
        for formal, node in zip((a.arg for a in self.body.args.args), given.elts, strict=True):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                ends[formal] = ast.unparse(node.func.value), _tile(_keywords(node)["tile"])
            else:
                self.arguments.append((formal, _array(node)))
        for statement in self.body.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                done = statement.value
                assert isinstance(done.func, ast.Attribute)
                if done.func.attr == "finish":
                    self.sequence.append(Finish(_group(done.func.value)))
                elif done.func.attr in ("fill", "drain"):
                    self.sequence.append(_move("fill" if done.func.attr == "fill" else "drain", done, ends))


def _move(kind: Literal["fill", "drain"], call: ast.Call, ends: dict[str, tuple[str, Tile]]) -> Move:
    given, end = _keywords(call), call.func
    tap = given["tap"]
    assert isinstance(tap, ast.Call) and isinstance(end, ast.Attribute)
    offset, sizes, strides = (ast.literal_eval(a) for a in tap.args[1:])
    fifo, tile = ends[ast.unparse(end.value)]
    argument, group = ast.unparse(call.args[0]), _group(given["group"])
    return Move(kind, fifo, argument, tile, offset, tuple(sizes), tuple(strides), group, "wait" in given)


def _statements(body: list[ast.stmt]) -> tuple[Statement, ...]:
    made: list[Statement] = []
    for s in body:
        if isinstance(s, ast.For):
            assert isinstance(s.iter, ast.Call)
            index = ast.unparse(s.target)
            made.append(Loop(_count(s.iter.args[0]), _statements(s.body), "" if index == "_" else index))
            continue
        call = s.value if isinstance(s, (ast.Expr, ast.Assign)) else None
        assert isinstance(call, ast.Call)
        if isinstance(s, ast.Assign) and isinstance(call.func, ast.Attribute):
            left = s.targets[0]
            names = tuple(map(ast.unparse, left.elts)) if isinstance(left, ast.Tuple) else (ast.unparse(left),)
            made.append(Acquire(ast.unparse(call.func.value), names))
        elif isinstance(call.func, ast.Attribute):
            made.append(Release(ast.unparse(call.func.value), ast.literal_eval(call.args[0])))
        else:
            args = tuple(ast.literal_eval(a) if isinstance(a, ast.Constant) else ast.unparse(a) for a in call.args)
            made.append(Call(ast.unparse(call.func), args))
    return tuple(made)


def _count(node: ast.expr) -> int | Element:
    if isinstance(node, ast.Subscript):
        return Element(ast.unparse(node.value), ast.literal_eval(node.slice))
    return int(ast.literal_eval(node))


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {str(k.arg): k.value for k in call.keywords}


def _tile(node: ast.expr) -> Tile:
    assert isinstance(node, ast.Call)
    return Tile(*(ast.literal_eval(a) for a in node.args))


def _group(node: ast.expr) -> int:
    return int(ast.unparse(node).removeprefix("group_"))


def _dims(node: ast.expr | None) -> tuple[tuple[int, int], ...]:
    return () if node is None else tuple(ast.literal_eval(node))


def _list(node: ast.expr) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(d) for d in ast.literal_eval(node)]


def _array(node: ast.expr) -> Array:
    """np.ndarray[(64,), np.dtype[np.int8]]"""
    assert isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)
    shape, dtype = node.slice.elts
    assert isinstance(dtype, ast.Subscript)
    return Array(next(d for d, n in NUMPY.items() if n == ast.unparse(dtype.slice)), ast.literal_eval(shape))
