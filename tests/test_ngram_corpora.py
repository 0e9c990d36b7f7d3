"""Building drafters without a model from texts: what is read, what it weighs, and what is refused."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.checkpoint import read_manifest
from foredraft.core.errors import CapabilityError, CheckpointError, CorpusError, OutputError, UserError
from foredraft.core.files import whole_folder
from foredraft.core.protocols import Drafter
from foredraft.corpora import build_drafter, import_lookup, sources, verify_built
from foredraft.drafters import load_drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.ngram import index
from foredraft.ngram.exports import export_llamacpp_lookup, export_sglang_ngram
from foredraft.ngram_step import NgramStep
from foredraft.recipe import settings_from
from foredraft.trace.store import Absent
from foredraft.verbs import model_free_spec

COMMON, RARE = "the cat sat on the mat", "the cat ran"


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "common.jsonl", tmp_path / "rare.txt"]
    files[0].write_text("".join(json.dumps({"text": COMMON}) + "\n" for _ in range(3)))
    files[1].write_text(RARE)
    return files


def step(kind: str, *given: Path | str, **options: object) -> NgramStep:
    written = [f"{name}={value}" for name, value in options.items()]
    return settings_from(NgramStep, [f"kind={kind}", *sources(False, [str(one) for one in given], []), *written])


def guess(drafter: Drafter, target: LocalTarget, text: str) -> str:
    context = torch.tensor(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    return target.tokenizer.decode(drafter.propose(context, 1, torch.Generator()).token_ids)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_what_a_corpus_weighs_is_what_its_occurrences_count(
    kind: str, target: LocalTarget, texts: list[Path], tmp_path: Path
) -> None:
    weighed = [str(texts[0]), f"{texts[1]}::9"]
    build_drafter(target, [], step(kind, *texts), tmp_path / "even")
    build_drafter(target, [], step(kind, *weighed), tmp_path / "weighed")
    even, heavy = (load_drafter(str(tmp_path / name), target) for name in ("even", "weighed"))
    context = "the cat "
    assert guess(even, target, context) != guess(heavy, target, context)
    alone = build_drafter(target, [], step(kind, texts[1]), tmp_path / "alone")
    assert alone.steps[0]["ngram"]["texts"][0]["files"] == [str(texts[1])]
    assert guess(heavy, target, context) == guess(load_drafter(str(tmp_path / "alone"), target), target, context)


def test_a_corpus_of_many_shards_drafts_as_one_of_a_single_shard(
    target: LocalTarget, texts: list[Path], tmp_path: Path
) -> None:
    """Nothing is lost where a shard ends: only whole sequences go into one."""
    build_drafter(target, [], step("suffix", *texts, shard_tokens=5), tmp_path / "many")
    build_drafter(target, [], step("suffix", *texts), tmp_path / "one")
    assert len(list((tmp_path / "many").glob("*.ngram"))) > len(list((tmp_path / "one").glob("*.ngram"))) == 2
    many, one = (load_drafter(str(tmp_path / name), target) for name in ("many", "one"))
    ids = torch.tensor(target.tokenizer(COMMON, add_special_tokens=False)["input_ids"])
    for end in range(1, len(ids)):
        drafts = [drafter.propose(ids[:end], 4, torch.Generator()).token_ids.tolist() for drafter in (many, one)]
        assert drafts[0] == drafts[1]


def test_what_cannot_be_built_from_is_refused(target: LocalTarget, texts: list[Path], tmp_path: Path) -> None:
    absent = Absent("served", "f", "unknown", target.vocab_size, target.tokenizer_fingerprint)
    (tmp_path / "empty.txt").write_text(" \n")
    out, empty, half = tmp_path / "o", tmp_path / "empty.txt", f"{texts[0]}::0.5"
    refusals: list[tuple[type[UserError], str, Callable[[], Any]]] = [
        (CapabilityError, "name it with --target", lambda: build_drafter(absent, [], step("ngram", *texts), out)),
        (CorpusError, "There is no text in .*empty.txt", lambda: build_drafter(target, [], step("ngram", empty), out)),
        (CorpusError, "nothing to build from", lambda: build_drafter(target, [], NgramStep(kind="ngram"), out)),
        (UserError, "0.5: counts take whole", lambda: build_drafter(target, [], step("ngram", half), out)),
        (UserError, "behind :: stands a weight", lambda: step("ngram", "a.txt::much")),
    ]
    for error, message, call in refusals:
        with pytest.raises(error, match=message):
            call()
    assert not out.exists()


def test_a_drafter_that_learns_is_not_put_where_it_hears_nothing(target: LocalTarget) -> None:
    with pytest.raises(CapabilityError, match="learns from its own blocks, of which tree:max_nodes=4 tells it nothing"):
        load_drafter("traffic+tree:max_nodes=4", target)


def test_the_least_memory_of_traffic_that_a_recipe_allows_is_enough(target: LocalTarget) -> None:
    assert isinstance(load_drafter(model_free_spec(NgramStep(kind="traffic", capacity=80)), target), Drafter)


def test_texts_and_corpus_go_together() -> None:
    with pytest.raises(UserError, match="texts go with corpus"):
        settings_from(NgramStep, ["kind=ngram", "corpus=texts"])
    assert sources(True, ["a"], ["b::2"])[0] == "corpus=trace+texts"


def test_a_full_disk_leaves_nothing(
    target: LocalTarget, texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def write(*given: object) -> int:
        if built:
            raise OSError(errno.ENOSPC, "No space left on device")
        built.append(given)
        return original(*given)

    original = index.build_suffix_index
    monkeypatch.setattr("foredraft.ngram.suffix.build_suffix_index", write)
    with pytest.raises(OutputError, match="No space left on the disk"):
        build_drafter(target, [], step("suffix", *texts), tmp_path / "folder" / "index")
    assert built
    assert list((tmp_path / "folder").iterdir()) == []


def test_of_two_writers_one_is_refused(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out") as partial:
        (partial / "mine").write_text("first")
        with (
            pytest.raises(OutputError, match="is being written by another process"),
            whole_folder(tmp_path / "out"),
        ):
            pass
        (partial / "more").write_text("first")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["mine", "more"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["ngram", "ngram-law", "lookup-table", "suffix"])
def test_verifying_finds_what_was_changed(kind: str, target: LocalTarget, texts: list[Path], tmp_path: Path) -> None:
    build_drafter(target, [], step(kind, *texts, key=2), tmp_path / "built")
    assert verify_built(tmp_path / "built") == read_manifest(tmp_path / "built")
    file = sorted((tmp_path / "built").glob("*.ngram"))[-1]
    data = bytearray(file.read_bytes())
    data[np.flatnonzero(np.frombuffer(data, np.uint8))[-1]] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        verify_built(tmp_path / "built")


def test_a_lookup_cache_goes_out_and_comes_back(target: LocalTarget, texts: list[Path], tmp_path: Path) -> None:
    build_drafter(target, [], step("ngram", *texts, order=2), tmp_path / "table")
    export_llamacpp_lookup(tmp_path / "table", target, 4, tmp_path / "out")
    import_lookup(target, tmp_path / "out" / "lookup-dynamic.bin", tmp_path / "back")
    there, back = (load_drafter(str(tmp_path / name), target) for name in ("table", "back"))
    ids = torch.tensor(target.tokenizer(COMMON, add_special_tokens=False)["input_ids"])
    for end in range(1, len(ids)):
        drafts = [drafter.propose(ids[:end], 3, torch.Generator()).token_ids.tolist() for drafter in (there, back)]
        assert drafts[0] == drafts[1]
    with pytest.raises(CapabilityError, match="is of kind ngram: SGLang's NGRAM takes text"):
        export_sglang_ngram(tmp_path / "table", target, 4, tmp_path / "other")


def test_sglang_gets_the_text_of_an_index(target: LocalTarget, texts: list[Path], tmp_path: Path) -> None:
    build_drafter(target, [], step("suffix", *texts), tmp_path / "index")
    export_sglang_ngram(tmp_path / "index", target, 4, tmp_path / "out")
    lines = (tmp_path / "out" / "corpus.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [COMMON, COMMON, COMMON, RARE]
    assert "--speculative-ngram-external-sam-budget 4" in (tmp_path / "out" / "run.txt").read_text()


@pytest.mark.slow
def test_a_corpus_larger_than_memory_is_built_in_shards_and_refused_in_one(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.little_memory", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    refused, *built = ended.stdout.splitlines()
    assert "Give a smaller shard_tokens" in refused
    assert built == ["24 shards", "the end of the corpus is known", "nothing is left of the whole one"]
