"""Write the metadata of a GGUF file that llama.cpp and our reader need."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybrid.checkpoint.base import Checkpoint, CheckpointError
from hybrid.checkpoint.families import family_of
from hybrid.checkpoint.files import exists
from hybrid.checkpoint.gguf_tokenizer import padding_piece
from hybrid.checkpoint.sentence import PROMPT_TASKS, PROMPT_TEXTS
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.core.dtypes import FILE_TYPES
from hybrid.text.merges import with_scores
from hybrid.text.tokenizer import NORMAL, SPACE, TURN_ENDS, UNUSED, USER_DEFINED, Vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

_QUANTIZATION_VERSION = 2
_PADDING_SCORE = -10000.0


def write_metadata(writer: GGUFWriter, source: Checkpoint, dtype: str) -> None:
    """Write all keys of `source`: general, hyper-parameters, tokenizer, chat template, recommended sampling."""
    writer.add_type("model")
    writer.add_name(source.name)
    writer.add_file_type(FILE_TYPES[dtype].file_type)
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    family = family_of(source.hparams)
    for key, value in family.gguf_fields(source.hparams).items():
        _add(writer, f"{family.architecture}.{key}", value)
    if source.prompts:
        writer.add_array(f"{family.architecture}.{PROMPT_TASKS}", list(source.prompts))
        writer.add_array(f"{family.architecture}.{PROMPT_TEXTS}", list(source.prompts.values()))
    sampling = source.generation
    numbers = {
        "temp": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "penalty_repeat": sampling.repetition_penalty,
    }
    for key, number in numbers.items():
        if number is not None:
            writer.add_float32(f"general.sampling.{key}", number)
    if sampling.top_k is not None:
        writer.add_int32("general.sampling.top_k", sampling.top_k)
    merged = family.merged_tokenizer and source.tokenizer.vocabulary.merges is not None
    _write_tokenizer(writer, source, merged)
    if source.chat_template:
        writer.add_chat_template(source.chat_template)
    if source.tool_template:
        writer.add_array("tokenizer.chat_templates", ["tool_use"])
        writer.add_string("tokenizer.chat_template.tool_use", source.tool_template)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _scored(source: Checkpoint) -> Vocabulary:
    """The vocabulary with scores: those of a tokenizer.model with the same pieces, else made from the merges."""
    v = source.tokenizer.vocabulary
    file = source.path / "tokenizer.model"
    if v.merges is not None and source.path.is_dir() and exists(file):
        own = read_sentencepiece(file)
        n = min(len(own.pieces), len(v.pieces))
        if own.pieces[:n] == v.pieces[:n]:
            return replace(v, scores=[*own.scores[:n], *[0.0] * (len(v.pieces) - n)], merges=None)
    return with_scores(v)


def _write_tokenizer(writer: GGUFWriter, source: Checkpoint, merged: bool) -> None:
    """Write the vocabulary, padded to the embedding's rows as other engines require. merged: with merges, as in Gemma
    4's files; else with scores."""
    tokenizer, rows, eos_ids = source.tokenizer, source.hparams.vocab, source.generation.eos_ids
    v = tokenizer.vocabulary if merged else _scored(source)
    if v.reach or v.after_id not in (None, v.eos_id):
        what = "lstrip, rstrip or single_word" if v.reach else "another token than end-of-text after every text"
        piece = v.pieces[v.reach[0][0] if v.reach else v.after_id or 0]
        raise CheckpointError(
            f"{source.path}: token {piece!r} has {what}, which GGUF cannot say, so that ids would change: change it in "
            "tokenizer.json first"
        )
    pieces, scores, types = list(v.pieces), list(v.scores), list(v.types)
    for index, piece in enumerate(pieces):
        if types[index] == USER_DEFINED:
            # User-defined pieces with real spaces match in GGUF but not in SentencePiece. As normal pieces they
            # never match, since merges see U+2581.
            types[index] = NORMAL if " " in piece else USER_DEFINED
            pieces[index] = piece.replace(SPACE, " ")
    for index in range(len(pieces), rows):
        pieces.append(padding_piece(index))
        scores.append(_PADDING_SCORE)
        types.append(UNUSED)
    writer.add_tokenizer_model("gemma4" if merged else "llama")
    writer.add_tokenizer_pre("default")
    if merged:
        writer.add_token_merges([m.encode("utf-8", "surrogateescape") for m in v.merges or ()])
    writer.add_token_list([p.encode("utf-8", "surrogateescape") for p in pieces])
    writer.add_token_scores([float(s) for s in scores])
    writer.add_token_types([int(t) for t in types])
    turns = (tokenizer.token_id(text) for text in TURN_ENDS)
    ends = [i for i in dict.fromkeys((*eos_ids, *turns)) if i is not None and i != v.eos_id and i in tokenizer.eos_ids]
    for add, token in (
        (writer.add_bos_token_id, v.bos_id),
        (writer.add_eos_token_id, v.eos_id),
        (writer.add_eot_token_id, ends[0] if ends else None),
        (writer.add_unk_token_id, v.unk_id),
        (writer.add_pad_token_id, v.pad_id),
    ):
        if token is not None:
            add(token)
    if len(ends) > 1:  # other engines recognise the rest by text
        writer.add_array("tokenizer.ggml.eos_token_ids", ends)
    writer.add_add_bos_token(v.bos_id is not None and v.add_bos)
    writer.add_add_eos_token(v.after_id is not None and v.after_id == v.eos_id)
    writer.add_add_space_prefix(v.add_space_prefix)
