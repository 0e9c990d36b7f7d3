"""A draft's own law: fitted on training answers, kept in the manifest, scored and decoded under."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from foredraft import compressing, drafters, verbs
from foredraft.acceptance.evaluate import score
from foredraft.acceptance.fitting import FittedLaw, fit_law
from foredraft.acceptance.intervals import Interval, PairedDifference
from foredraft.checkpoint import read_manifest
from foredraft.core.errors import UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.own_law import OwnLaws, bound_for
from foredraft.corpora import build_drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.pool import evaluate_drafters
from foredraft.settings import EvaluateSettings, TraceSettings
from foredraft.steps import HeadStep, LawStep, NgramStep, QuantizeStep
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace
from tests.tiny import WORDS, save_tiny, tiny_model, tiny_tokenizer

PLAIN = SamplingLaw()
COOL = SamplingLaw(0.8)


def test_under_a_greedy_target_a_draft_is_greedy_whatever_it_was_given() -> None:
    for own in (OwnLaws(), OwnLaws(temperature=0.7, top_k=5), OwnLaws(((PLAIN, COOL),))):
        assert own.under(GREEDY) == GREEDY


def test_a_fitted_law_holds_for_its_target_s_law_only() -> None:
    own = OwnLaws(((PLAIN, SamplingLaw(0.5, top_k=9)),))
    assert own.under(PLAIN) == SamplingLaw(0.5, top_k=9)
    assert own.under(COOL) == COOL
    given = OwnLaws(temperature=0.6)
    assert given.under(SamplingLaw(1.0, top_k=40, top_p=0.9)) == SamplingLaw(0.6, top_k=40, top_p=0.9)
    assert OwnLaws(top_k=3).under(COOL) == SamplingLaw(0.8, top_k=3)
    assert OwnLaws.from_json(json.loads(json.dumps(own.to_json()))) == own
    assert OwnLaws.from_json({}) == OwnLaws()


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, target: LocalTarget) -> dict[str, Trace]:
    """Training answers under two laws, and others to score on."""
    root = tmp_path_factory.mktemp("traces")
    settings = TraceSettings(prompts=[{"file": "none"}], max_new_tokens=24, batch_size=8)

    def ask(part: str, law: SamplingLaw) -> Trace:
        prompts = [Prompt(f"{part}{i}", "d", ({"role": "user", "content": f"{part} {WORDS[i]}"},)) for i in range(12)]
        return collect(target, prompts, settings, law, root / f"{part}-{law}")

    return {"train": ask("train", PLAIN), "greedy": ask("train", GREEDY), "eval": ask("eval", PLAIN)}


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself with all logits halved: at temperature 0.5 its law is the target's."""
    folder, model = tmp_path_factory.mktemp("drafts") / "flat", tiny_model()
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fitted(flat: Path, target: LocalTarget, traces: dict[str, Trace], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, step = tmp_path_factory.mktemp("fitted") / "draft", LawStep(num_draft_tokens=3)
    # 0.5 is not among the temperatures tried by default: the nearest ones must do.
    verbs.set_law(flat, target, [traces["train"], traces["greedy"]], step, out)
    return out


def test_a_flat_draft_is_fitted_cooler_and_accepted_more_on_text_that_it_was_not_fitted_on(
    flat: Path, fitted: Path, target: LocalTarget, traces: dict[str, Trace]
) -> None:
    manifest = read_manifest(fitted)
    (fit,) = manifest.options["law_fits"]
    assert 0.4 <= manifest.law.temperature <= 0.6
    assert fit["target"]["temperature"] == 1.0
    assert fit["interval"][0] > 0.0
    before, after = (
        score("draft", drafters.load_drafter(str(folder), target), traces["eval"], [3]) for folder in (flat, fitted)
    )
    assert after.mean_tokens_per_call(3) > before.mean_tokens_per_call(3) + 0.2
    assert after.expected_acceptance > 0.85 > before.expected_acceptance


@pytest.mark.slow
def test_the_report_is_scored_under_the_draft_s_own_law_and_says_so(
    fitted: Path, target: LocalTarget, traces: dict[str, Trace], tmp_path: Path
) -> None:
    settings = EvaluateSettings(num_draft_tokens=3, audit_prompts=2, audit_tokens=16, cost_repeats=3)
    report = evaluate_drafters(target, [str(fitted)], [traces["eval"]], tmp_path / "scores", settings)
    (entry,) = report["laws"][0]["drafters"]
    assert SamplingLaw(**entry["draft_law"]) == read_manifest(fitted).law
    assert entry["expected_acceptance"] > 0.85
    assert entry["audit"]["agrees"]
    low, high = entry["criteria"]["expected_acceptance_bounds"]
    assert low - 0.1 < entry["expected_acceptance"] < high + 0.1


def test_a_law_that_gains_nothing_beyond_the_noise_is_not_kept(target: LocalTarget, traces: dict[str, Trace]) -> None:
    itself = drafters.load_drafter(str(target.path), target)
    found = fit_law("itself", itself, traces["train"], 3, answers=8)
    assert found.law == PLAIN
    assert len(found.tried) >= 9
    assert found.answers == 8


def test_a_better_figure_inside_the_noise_is_recorded_and_not_followed() -> None:
    for bounds, law in (((-0.02, 0.04), PLAIN), ((0.005, 0.04), COOL)):
        gain = PairedDifference(Interval(0.01, *bounds), 900.0, 0.1)
        found = FittedLaw(PLAIN, COOL, {PLAIN: 1.3, COOL: 1.31}, gain, 4, 12)
        assert found.law == law
        assert (found.to_json()["best"]["temperature"], found.to_json()["draft"]["temperature"]) == (
            COOL.temperature,
            law.temperature,
        )


def test_a_greedy_draft_is_one_of_the_laws_tried(flat: Path, target: LocalTarget, traces: dict[str, Trace]) -> None:
    found = fit_law("flat", drafters.load_drafter(str(flat), target), traces["train"], 2, factors=(0.0, 0.5), answers=6)
    assert SamplingLaw(0.0) in found.tried
    assert found.best == SamplingLaw(0.5)
    assert found.tried[found.best] > found.tried[SamplingLaw(0.0)] + 0.3


def test_there_is_nothing_to_fit_under_greedy_targets_or_to_certain_guesses(
    flat: Path, target: LocalTarget, traces: dict[str, Trace], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="all traces are greedy"):
        verbs.set_law(flat, target, [traces["greedy"]], LawStep(), tmp_path / "a")
    build_drafter(target, [traces["train"]], NgramStep(kind="ngram"), tmp_path / "table")
    with pytest.raises(UserError, match="kind ngram: its guesses are certain"):
        verbs.set_law(tmp_path / "table", target, [traces["train"]], LawStep(), tmp_path / "b")


def test_a_law_outlives_a_wider_head_and_not_new_weights(fitted: Path, target: LocalTarget, tmp_path: Path) -> None:
    kept = verbs.set_head(fitted, target, [], HeadStep(), tmp_path / "head")
    assert kept.options["own_laws"] == read_manifest(fitted).options["own_laws"]
    gone = compressing.quantize_draft(fitted, target, (), QuantizeStep(), tmp_path / "int8")
    assert "own_laws" not in gone.options
    assert gone.law == PLAIN


def test_a_head_of_more_rows_can_say_more_and_says_the_rest_in_the_same_proportions(
    flat: Path, target: LocalTarget, traces: dict[str, Trace], tmp_path: Path
) -> None:
    few = verbs.set_head(flat, target, [traces["train"]], HeadStep(rows=40), tmp_path / "few")
    more = verbs.set_head(tmp_path / "few", target, [traces["train"]], HeadStep(rows=120), tmp_path / "more")
    assert (few.options["head_rows"], more.options["head_rows"]) == (40, 120)
    first, second = (_guess(tmp_path / name, target) for name in ("few", "more"))
    said = first > 0
    assert int(said.sum()) == 40
    assert int((second > 0).sum()) == 120
    torch.testing.assert_close(second[said] / second[said].sum(), first[said])


def _guess(folder: Path, target: LocalTarget) -> Tensor:
    drafter = bound_for(drafters.load_drafter(str(folder), target), PLAIN)
    proposal = drafter.propose(torch.arange(5), 1, torch.Generator().manual_seed(0))
    assert proposal.laws is not None
    return proposal.laws.probs(0, int(proposal.token_ids[0]))


def test_an_n_gram_law_takes_a_law_of_its_own_too(
    target: LocalTarget, traces: dict[str, Trace], tmp_path: Path
) -> None:
    build_drafter(target, [traces["train"]], NgramStep(kind="ngram-law"), tmp_path / "counts")
    verbs.set_law(tmp_path / "counts", target, [], LawStep(temperature=0.5, top_k=4), tmp_path / "cool")
    drafter = drafters.load_drafter(str(tmp_path / "cool"), target)
    assert bound_for(drafter, PLAIN).law == SamplingLaw(0.5, top_k=4)
    assert bound_for(drafter, GREEDY).law == GREEDY


def test_transformers_draws_with_the_target_s_settings_whatever_the_draft_s_say(
    tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the export writes no temperature: if this fails, transformers has changed, and so should the export."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    draft = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "draft", num_layers=1))
    draft.generation_config.update(temperature=0.5, top_k=7, do_sample=True, num_assistant_tokens=3)
    seen, original = [], AssistedCandidateGenerator._generate_candidates

    def watched(self: AssistedCandidateGenerator, arguments: dict) -> object:
        config = arguments["generation_config"]
        seen.append((config.do_sample, config.temperature, config.top_k))
        return original(self, arguments)

    monkeypatch.setattr(AssistedCandidateGenerator, "_generate_candidates", watched)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3), "max_new_tokens": 6}
    for do_sample, temperature, top_k in ((True, 0.8, 50), (True, 1.0, 20)):
        seen.clear()
        target.generate(**inputs, assistant_model=draft, do_sample=do_sample, temperature=temperature, top_k=top_k)
        assert set(seen) == {(do_sample, temperature, top_k)}


def test_an_exported_draft_says_that_its_own_law_is_not_used_there(
    fitted: Path, target: LocalTarget, tmp_path: Path
) -> None:
    folder = verbs.export_draft(fitted, target, "transformers", 3, tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert "transformers lets a draft draw with the target's temperature" in card
    settings = json.loads((folder / "generation_config.json").read_text())
    assert not {"temperature", "top_k", "do_sample"} & set(settings)
    assert read_manifest(folder).options["own_laws"] == read_manifest(fitted).options["own_laws"]
