"""Drafters without a model, built from what a target wrote and from texts that it did not."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.catalog import resolve
from foredraft.checkpoint import DraftManifest, verify_draft
from foredraft.core.errors import CapabilityError, CorpusError, UserError
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Speaker, Target
from foredraft.distill.documents import Document, stream_documents
from foredraft.lineage import extended
from foredraft.models.made_for import blank_manifest
from foredraft.ngram.container import ANY_FILE, open_container
from foredraft.ngram.corpus import Corpus, gathered
from foredraft.ngram.llamacpp import import_lookup_cache
from foredraft.ngram.suffix import KIND as SUFFIX
from foredraft.ngram.suffix import build_weighted_suffix
from foredraft.ngram.table import KIND as TABLE
from foredraft.ngram.table import write_ngram_table
from foredraft.ngram_step import CorpusSettings, NgramStep
from foredraft.trace.store import Trace, require_same

_BYTES_PER_TOKEN = 4  # about, in text; only progress bars depend on it


def build_drafter(
    target: Speaker, traces: Sequence[Trace], step: NgramStep, out: Path, progress: Progress = SILENT
) -> DraftManifest:
    """Build a model-free drafter from traces, texts or both, as the step says, and write it as a draft checkpoint.

    Text is read as it is needed: the kind suffix holds one shard of it in memory, the others all tokens.

    Raises:
        UnknownNameError: no such kind is built.
        CorpusError: there is no text, or it is of another vocabulary.
        TraceError: a trace was written with another tokenizer.
        CapabilityError: texts are asked for and the target has no tokenizer here.
        UserError: a kind that counts is given a weight that is no whole number.
        OutputError: `out` holds something else, another process writes it, or the disk is full.
    """
    build = resolve("builders", step.kind)
    corpora = _corpora(target, traces, step)
    manifest = extended(blank_manifest(target, step.kind), "ngram", step)
    if step.kind == SUFFIX:
        return build_weighted_suffix(corpora, target.vocab_size, step, manifest, out, progress)
    times = [_whole(corpus) for corpus in corpora]
    sequences = [
        sequence
        for corpus, count in zip(corpora, times, strict=True)
        for sequence in gathered(corpus.sequences, 0, corpus.tokens, f"reading {corpus.name}", progress) * count
    ]
    return build(sequences, target.vocab_size, step, manifest, out, progress)


def import_lookup(target: Speaker, cache: Path, out: Path) -> DraftManifest:
    """Write the counts of llama.cpp's lookup cache as an n-gram table of the target.

    Raises:
        CorpusError: the file is empty, cut short, or holds ids outside the vocabulary or counts below one.
    """
    counts = import_lookup_cache(cache, target.vocab_size)
    step = NgramStep(kind=TABLE, order=counts.order)
    manifest = extended(blank_manifest(target, TABLE), "ngram", step)
    return write_ngram_table(counts, target.vocab_size, manifest, out)


def sources(with_traces: bool, texts: Sequence[str], datasets: Sequence[str]) -> list[str]:
    """Return what --text and --dataset stand for in a recipe; `name::0.5` sets the weight."""
    given = [("files", name) for name in texts] + [("dataset", name) for name in datasets]
    if not given:
        return []
    written: list[dict[str, Any]] = []
    for key, source in given:
        name, _, weight = source.partition("::")
        written.append({key: [name] if key == "files" else name})
        if weight:
            written[-1]["weight"] = _number(weight, source)
    return [f"corpus={'trace+texts' if with_traces else 'texts'}", f"texts={json.dumps(written)}"]


def verify_built(path: Path) -> DraftManifest:
    """Return the manifest of a drafter without a model after reading all of it.

    Raises:
        CheckpointError: names what is missing or changed: a file, or a block of an n-gram file.
    """
    for file in sorted(path.glob(ANY_FILE)):
        open_container(file).verify()
    manifest = verify_draft(path)
    resolve("loaders", manifest.kind)(path)
    return manifest


def _number(written: str, source: str) -> float:
    try:
        return float(written)
    except ValueError as error:
        raise UserError(f"{source}: behind :: stands a weight, such as {source.partition('::')[0]}::2.") from error


def _corpora(target: Speaker, traces: Sequence[Trace], step: NgramStep) -> list[Corpus]:
    corpora = []
    for trace in traces if step.reads_trace else ():
        require_same(trace, target.name, tokenizer_fingerprint=target.tokenizer_fingerprint)
        corpora.append(Corpus(f"answers of {trace.path.name}", 1.0, trace.info.num_tokens, _answers(trace)))
    for text in step.texts:
        if not isinstance(target, Target):
            raise CapabilityError("Texts are cut into tokens as the target does it: name it with --target.")
        sequences = (_encoded(document, target.tokenizer) for document in stream_documents(text))
        corpora.append(Corpus(text.name, text.weight, _expected_tokens(text), sequences))
    if not corpora:
        raise CorpusError("There is nothing to build from: give traces, texts, or both.")
    return corpora


def _answers(trace: Trace) -> Iterator[np.ndarray]:
    return (row.answer_ids.numpy().astype(np.int32) for row in trace.rows(tops=False))


def _encoded(document: Document, tokenizer: Any) -> np.ndarray:
    """Return the tokens of a document; a chat is written as the target reads it."""
    if document.messages and tokenizer.chat_template is not None:
        token_ids = tokenizer.apply_chat_template(list(document.messages), return_dict=False)
    else:
        token_ids = tokenizer(document.said, verbose=False, add_special_tokens=False)["input_ids"]
    return np.array(token_ids, np.int32)


def _whole(corpus: Corpus) -> int:
    if corpus.weight != int(corpus.weight):
        raise UserError(
            f"{corpus.name} has weight {corpus.weight:g}: counts take whole numbers. Give 1, 2, ..., or build a suffix."
        )
    return int(corpus.weight)


def _expected_tokens(text: CorpusSettings) -> int:
    sizes = [path.stat().st_size for path in map(Path, text.files) if path.is_file()]
    return sum(sizes) // _BYTES_PER_TOKEN
