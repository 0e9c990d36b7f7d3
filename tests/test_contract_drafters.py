"""Everything registered in the catalog holds to the drafter contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foredraft.catalog import names, resolve
from foredraft.checkpoint import DraftManifest, read_manifest
from foredraft.core.progress import SILENT
from foredraft.core.protocols import Answer, Drafter
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.loading import load_causal_lm
from foredraft.steps import NgramStep
from tests.contract_drafter import check_drafter

VOCAB_SIZE = 272
NUM_TOKENS = 259


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Random text, text that repeats itself, and an answer of one token."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(3, NUM_TOKENS, (40,), generator=generator)
    phrase = torch.randint(3, NUM_TOKENS, (5,), generator=generator)
    return [
        Answer(torch.cat([phrase, random[:3], phrase.repeat(2), random[3:5]]), start=9),
        Answer(random, start=34),
        Answer(phrase.repeat(2), start=9),
    ]


def _causal_lm_folders(target: Path, folder: Path) -> Iterator[Path]:
    """An ordinary transformers folder, and a foredraft checkpoint with a trimmed head."""
    yield target
    manifest = DraftManifest("causal-lm", VOCAB_SIZE, "tiny", "target-digest", "tokenizer-digest")
    draft = Draft(load_draft(target).model, torch.arange(0, 200))
    save_draft(draft, folder / "trimmed", manifest, load_causal_lm(str(target)).tokenizer)
    yield folder / "trimmed"


@pytest.mark.parametrize("name", names("drafters"))
def test_registered_drafter_holds_the_contract(name: str, answers: list[Answer]) -> None:
    def made() -> Drafter:
        return resolve("drafters", name)(VOCAB_SIZE)

    check_drafter(made(), answers, again=made)


@pytest.mark.parametrize("name", names("builders"))
def test_built_drafter_holds_the_contract(name: str, answers: list[Answer], tmp_path: Path) -> None:
    check_drafter(_load(_builds(name, answers, tmp_path / "built")), answers)


def _builds(kind: str, answers: list[Answer], out: Path) -> Path:
    manifest = DraftManifest(kind, VOCAB_SIZE, "tiny", "target-digest", "tokenizer-digest")
    sequences = [answer.token_ids.numpy().astype("int32") for answer in answers[:2]]
    resolve("builders", kind)(sequences, VOCAB_SIZE, NgramStep(kind=kind), manifest, out, SILENT)
    return out


WRAPPED = {
    "tree": ("suffix", {"max_nodes": 7}),
    "confident": ("ngram-law", {"threshold": 0.02}),
    "mixture": ("ngram-law", {"share": 0.3}),
    "first-guess": ("ngram-law", {"first": "prompt-lookup"}),
}


@pytest.mark.parametrize("name", sorted(WRAPPED))
def test_wrapped_drafter_without_a_model_holds_the_contract(name: str, answers: list[Answer], tmp_path: Path) -> None:
    kind, options = WRAPPED[name]
    drafter = _load(_builds(kind, answers, tmp_path / "base"))
    loads = {"prompt-lookup": resolve("drafters", "prompt-lookup")(VOCAB_SIZE)}
    if name == "mixture":
        loads["law"], options = _load(_builds("ngram-law", answers[:1], tmp_path / "law")), {**options, "ngram": "law"}
    check_drafter(resolve("wrappers", name)(drafter, loads.__getitem__, **options), answers)


def test_no_way_of_drafting_is_left_out() -> None:
    """A cascade needs models; tests/test_decoding_registered.py decodes with it. test_select_adaptive.py: the rest."""
    assert set(names("wrappers")) == {"adaptive", "cascade", *WRAPPED}


@pytest.mark.slow
def test_causal_lm_holds_the_contract(tiny_draft_folder: Path, answers: list[Answer], tmp_path: Path) -> None:
    for folder in _causal_lm_folders(tiny_draft_folder, tmp_path):
        check_drafter(resolve("loaders", "causal-lm")(folder), answers)


def test_no_loader_is_left_out() -> None:
    assert set(names("loaders")) == {"causal-lm", *names("builders")}


def _load(folder: Path) -> Drafter:
    drafter = resolve("loaders", read_manifest(folder).kind)(folder)
    assert isinstance(drafter, Drafter)
    return drafter
