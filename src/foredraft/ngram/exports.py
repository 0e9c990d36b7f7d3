"""Drafters without a model as other programs take them: llama.cpp's lookup caches, and text for SGLang's NGRAM."""

import json
from pathlib import Path

import numpy as np

from foredraft.checkpoint import DraftManifest, read_manifest
from foredraft.core.errors import CapabilityError
from foredraft.core.files import whole_folder
from foredraft.core.protocols import Target
from foredraft.ngram.container import ANY_FILE, open_container
from foredraft.ngram.counts import read_counts
from foredraft.ngram.index import SuffixIndex, open_suffix_index
from foredraft.ngram.llamacpp import MAX_ORDER, STATIC_ORDER, export_lookup_cache
from foredraft.ngram.suffix import KIND as SUFFIX
from foredraft.ngram.suffix_array import SEPARATOR
from foredraft.ngram.table import FILE
from foredraft.ngram.table import KIND as TABLE

_COUNTED = (TABLE, "ngram-law")
_SAM_TOKENS = 10_000_000  # what SGLang reads of a corpus unless told otherwise


def export_llamacpp_lookup(source: Path, target: Target, k: int, out: Path) -> None:
    """Write the counts of a table as lookup-static.bin (two tokens of context) and lookup-dynamic.bin (one to four).

    Raises:
        CapabilityError: the draft holds no counts.
        CorpusError: it counts contexts of one token only, or of more than four.
        CheckpointError: a file of the draft is damaged.
    """
    manifest = _require(source, _COUNTED, "llama.cpp's lookup caches hold counts")
    counts = read_counts(open_container(source / FILE, manifest.kind).verify())
    with whole_folder(out) as folder:
        export_lookup_cache(counts, folder / "lookup-static.bin", STATIC_ORDER)
        if counts.order <= MAX_ORDER:
            export_lookup_cache(counts, folder / "lookup-dynamic.bin", 0)
        (folder / "run.txt").write_text(
            "llama-cli -m TARGET.gguf --spec-type ngram-cache --lookup-cache-static lookup-static.bin\n",
            encoding="utf-8",
        )


def export_sglang_ngram(source: Path, target: Target, k: int, out: Path) -> None:
    """Write the text of a suffix index as the corpus that SGLang's NGRAM reads: one JSON string a line.

    Raises:
        CapabilityError: the draft is no suffix index.
        CheckpointError: a file of the draft is damaged.
    """
    _require(source, (SUFFIX,), "SGLang's NGRAM takes text, which only a suffix index keeps")
    size = 0
    with whole_folder(out) as folder, (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for path in sorted(source.glob(ANY_FILE)):
            index = open_suffix_index(path, verify=True)
            for sequence in _sequences(index):
                text = target.tokenizer.decode(sequence.tolist(), skip_special_tokens=True)
                file.write(json.dumps(text, ensure_ascii=False) + "\n")
            size += index.num_tokens
        limit = f" --speculative-ngram-external-corpus-max-tokens {size}" if size > _SAM_TOKENS else ""
        (folder / "run.txt").write_text(
            f"python -m sglang.launch_server --speculative-algorithm NGRAM --speculative-num-draft-tokens {k + 1}"
            " --speculative-ngram-external-corpus-path corpus.jsonl"
            f" --speculative-ngram-external-sam-budget {k}{limit}\n",
            encoding="utf-8",
        )


def _require(source: Path, kinds: tuple[str, ...], why: str) -> DraftManifest:
    manifest = read_manifest(source)
    if manifest.kind not in kinds:
        raise CapabilityError(f"{source} is of kind {manifest.kind}: {why}. Build one with --kind {kinds[0]}.")
    return manifest


def _sequences(index: SuffixIndex) -> list[np.ndarray]:
    """Return the token sequences of a shard, in the order in which they were given."""
    text = index.text[: len(index.order)]
    parts = np.split(text, np.flatnonzero(text == SEPARATOR))
    return [part[part != SEPARATOR][::-1].astype(np.int64) - 1 for part in reversed(parts) if part.any()]
