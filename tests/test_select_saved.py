"""A saved selection is a drafter, and notices when what it rests on moved or changed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foredraft.catalog import resolve
from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import CheckpointError, OutputError, UserError
from foredraft.core.progress import SILENT
from foredraft.drafters import load_drafter
from foredraft.select.block_costs import BlockCosts
from foredraft.select.saved import Saved, save_selection
from foredraft.steps import NgramStep
from foredraft.trace.store import Absent

SPEAKER = Absent("tiny", "f", "float32", 272, "t")


def table(folder: Path, seed: int) -> Path:
    """Build a small n-gram table from random text."""
    text = np.random.default_rng(seed).integers(3, 100, 200).astype(np.int32)
    manifest = DraftManifest("ngram", 272, "tiny", "f", "t")
    resolve("builders", "ngram")([text], 272, NgramStep(kind="ngram"), manifest, folder, SILENT)
    return folder


def test_it_comes_back_as_it_was_and_notices_every_change(tmp_path: Path) -> None:
    draft, path = table(tmp_path / "draft", 0), tmp_path / "selection.json"
    costs = {requests: BlockCosts.by_ratio([0.1, 0.01], 4, 0.1, requests) for requests in (1, 16)}
    specs = {"table": str(draft), "copy": "prompt-lookup"}
    save_selection(path, Saved.of(SPEAKER, specs, (2, 4), "ucb:width=1", costs, target_bytes=10**6))
    found = load_drafter(str(path), SPEAKER)
    assert found.kind == "adaptive"
    assert list(found.portfolio.drafters) == ["table", "copy"]
    assert found.portfolio.lengths == (2, 4)
    assert found.portfolio.policy.width == 1.0
    for requests, known in ((1, 1), (15, 1), (16, 16), (40, 16)):
        kept = found.portfolio.costs_of(requests)
        assert np.array_equal(kept.drafts, costs[known].drafts)
        assert np.array_equal(kept.target, costs[known].target)
    assert found.portfolio.target_bytes == 10**6
    with pytest.raises(OutputError, match="never overwritten"):
        save_selection(path, Saved.of(SPEAKER, {"copy": "prompt-lookup"}, (2,), "ucb", costs))
    with pytest.raises(UserError, match=r"was chosen for tiny \(f\), the target is tiny \(g\)"):
        load_drafter(str(path), replace(SPEAKER, fingerprint="g"))
    shutil.move(draft, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="the drafter table is not at"):
        load_drafter(str(path), SPEAKER)
    table(draft, 1)
    with pytest.raises(CheckpointError, match="it was made anew"):
        load_drafter(str(path), SPEAKER)


def test_a_draft_behind_a_way_of_drafting_is_noticed_too(tmp_path: Path) -> None:
    draft, path = table(tmp_path / "draft", 0), tmp_path / "selection.json"
    costs = {1: BlockCosts.by_ratio([0.1, 0.1], 4, 0.1, 1)}
    specs = {"wrapped": f"{draft}+adaptive:others=prompt-lookup", "first": f"prompt-lookup+first-guess:first={draft}"}
    save_selection(path, Saved.of(SPEAKER, specs, (2, 4), "ucb", costs))
    for name in specs:
        shutil.rmtree(draft)
        table(draft, 1)
        alone = tmp_path / f"{name}.json"
        alone.write_text(json.dumps({**json.loads(path.read_text()), "specs": {name: specs[name]}}))
        with pytest.raises(CheckpointError, match=f"the drafter {name} .* it was made anew"):
            load_drafter(str(alone), SPEAKER)
        shutil.rmtree(draft)
        with pytest.raises(CheckpointError, match=f"the drafter {name} is not at"):
            load_drafter(str(alone), SPEAKER)
        table(draft, 0)


def test_what_is_no_selection_says_so(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 7}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"is no selection|another version"):
            load_drafter(str(tmp_path / "bad.json"), SPEAKER)


def test_damaged_costs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    costs = {1: BlockCosts.by_ratio([0.1], 4, 0.1)}
    save_selection(path, Saved.of(SPEAKER, {"copy": "prompt-lookup"}, (2,), "ucb", costs))
    whole = json.loads(path.read_text())
    for name, damaged in (
        ("reading_seconds", None),
        ("reading_seconds", [0.1, 0.2]),
        ("reading_seconds", [-1.0]),
        ("draft_seconds", [0.1]),
        ("draft_seconds", [["a"]]),
        ("target_seconds", 1.0),
        ("overhead", None),
    ):
        path.write_text(json.dumps(whole | {"costs": {"1": whole["costs"]["1"] | {name: damaged}}}))
        with pytest.raises(CheckpointError, match="costs that are none"):
            load_drafter(str(path), SPEAKER)
    path.write_text(json.dumps(whole | {"costs": {"1": {}}}))
    with pytest.raises(CheckpointError, match="costs that are none"):
        load_drafter(str(path), SPEAKER)
