"""A checkpoint as the rest of the project sees it: GGUF's tensor names, stored dtypes, norm weights ready to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

from hybrid.hparams import HParams
from hybrid.spec.tensor import Tensor
from hybrid.tokenizer import Tokenizer


class CheckpointError(ValueError):
    """One line that names the file, the field or tensor, and what to do."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the checkpoint's author recommends; None where the file says nothing."""

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint: known without reading its data; `load` maps or copies it."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, made by `open_checkpoint`. Tensors are read when asked for, from memory maps.

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

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, embedding first, then layer by layer."""
        return tuple(self.entries)

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> Tensor:
        """The tensor in its stored dtype. Plain types are read-only views of the file where they are aligned."""
        return self._entry(name).load()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Made at first use; CheckpointError where the files have none."""
        return self.make_tokenizer()

    def close(self) -> None:
        """Let go of the files. A map goes when the last tensor that looks into it does."""
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
