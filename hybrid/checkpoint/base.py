"""The checkpoint interface: GGUF's tensor names, stored dtypes, norm weights without format offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hybrid.core.hparams import HParams

if TYPE_CHECKING:
    from hybrid.core.tensor import Packed, Tensor
    from hybrid.text.tokenizer import Tokenizer


class CheckpointError(ValueError):
    """A one-line message with the file, the field or tensor, and the fix. Names from files are escaped and
    shortened."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


_LONGEST = 1000


def printable(text: str) -> str:
    """One line for a terminal: escapes control characters and elides the middle of long text."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


@dataclass(frozen=True, slots=True)
class Generation:
    """Recommended sampling parameters of the checkpoint; None if absent."""

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint: metadata, and `load` to read its data."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    rows: Callable[[int, int], Tensor] | None = None
    """Reads a copy of rows start..stop of a matrix; None: only the whole tensor can be read."""
    packed: Packed | None = None
    """The tensor in the file's encoding; None if `load` computes it."""


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, made by `open_checkpoint`. Tensors are read on request, as copies.

    Matrices are [outputs, inputs] in their stored dtype. Norm weights are float32 factors (1 is added if a format
    stores w - 1)."""

    path: Path
    hparams: HParams
    entries: Mapping[str, Entry]
    file_bytes: int
    """Size of all files with tensors."""
    chat_template: str | None
    generation: Generation
    make_tokenizer: Callable[[], Tokenizer]
    name: str = ""
    """The model's name in the files, else the file's name."""
    notes: tuple[str, ...] = ()
    """One line for each assumed default and each ignored part."""
    tool_template: str | None = None
    """The chat template for conversations with tools, if it is another one."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompt prefixes of an embedding model, by task."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, embedding first, then layer by layer."""
        return tuple(self.entries)

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> Tensor:
        """A copy of the tensor in its stored dtype."""
        return self._entry(name).load()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of rows start..stop of a tensor; reads only these."""
        entry = self._entry(name)
        return entry.load().rows(start, stop) if entry.rows is None else entry.rows(start, stop)

    def packed(self, name: str) -> Packed | None:
        """The tensor in its file's encoding, for devices that read and repack it; None if it is computed (norm
        weights)."""
        return self._entry(name).packed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read on first use. CheckpointError if there is none."""
        made = self.make_tokenizer()
        object.__setattr__(self, "make_tokenizer", lambda: made)  # frees what it was made of
        return made

    def close(self) -> None:
        """Close the files."""
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
