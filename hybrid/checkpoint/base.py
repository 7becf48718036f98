"""A checkpoint as the rest of the project sees it: GGUF's tensor names, stored dtypes, norm weights ready to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hybrid.core.hparams import HParams

if TYPE_CHECKING:
    from hybrid.core.tensor import Packed, Tensor
    from hybrid.text.tokenizer import Tokenizer


class CheckpointError(ValueError):
    """One line that names the file, the field or tensor, and what to do. What a file calls things is shown escaped
    and cut to a readable length."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


_LONGEST = 1000


def printable(text: str) -> str:
    """One line for a terminal: control characters escaped, the middle of a long one left out."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


@dataclass(frozen=True, slots=True)
class Generation:
    """What the checkpoint's author recommends; None where the file says nothing."""

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint: known without reading its data; `load` reads it."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    rows: Callable[[int, int], Tensor] | None = None
    """Rows start..stop of a matrix, read into memory of their own; None: only as a whole."""
    packed: Packed | None = None
    """The same as the file has it; None where `load` computes something."""


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, made by `open_checkpoint`. Tensors are read when asked for, into memory of their own.

    Matrices are [outputs, inputs] in the dtype in which they are stored; norm weights are float32 and multiply
    directly (where a format stores w - 1, the 1 has been added).
    """

    path: Path
    hparams: HParams
    entries: Mapping[str, Entry]
    file_bytes: int
    """Size of all files that hold tensors."""
    chat_template: str | None
    generation: Generation
    make_tokenizer: Callable[[], Tokenizer]
    name: str = ""
    """The model's own name, where the files give one; else the file's."""
    notes: tuple[str, ...] = ()
    """What was assumed because no field says it, and what was left out; each is one line."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, embedding first, then layer by layer."""
        return tuple(self.entries)

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> Tensor:
        """The tensor in its stored dtype, in memory of its own."""
        return self._entry(name).load()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, as `tensor` gives them; only they are read."""
        entry = self._entry(name)
        return entry.load().rows(start, stop) if entry.rows is None else entry.rows(start, stop)

    def packed(self, name: str) -> Packed | None:
        """The tensor as its file has it, for devices that read and repack it themselves; None where it is computed
        (norm weights)."""
        return self._entry(name).packed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Made at first use; CheckpointError where the files have none."""
        return self.make_tokenizer()

    def close(self) -> None:
        """Let go of the files."""
        object.__setattr__(self, "entries", _Closed(self.path))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, name: str) -> Entry:
        try:
            return self.entries[name]
        except KeyError:
            some = ", ".join(self.names[:3])
            raise CheckpointError(f"{self.path}: no tensor {name!r}; there are {some}, ...") from None


class _Closed(dict[str, Entry]):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __missing__(self, name: str) -> Entry:
        raise CheckpointError(f"{self.path} is closed: tensor {name!r} can no longer be read")
