"""Laws of verification: a runtime counts what foredraft's literal decoding says, and every trap has its message."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import candidate_generator

from foredraft.cli import main
from foredraft.core.errors import (
    CapabilityError,
    MissingExtraError,
    ModelError,
    PromptError,
    ServerError,
    UnknownNameError,
)
from foredraft.decoding.speculative import BlockCount
from foredraft.export.plan import PLAN
from foredraft.export.transformers import export_transformers
from foredraft.models.target import LocalTarget, load_target
from foredraft.trace.prompts import Prompt
from foredraft.verification import child, counting
from foredraft.verification import verify as verifying
from foredraft.verification.child import Job, Question, Replies, Reply, ask
from foredraft.verification.counting import Counted, Counting
from foredraft.verification.findings import CheckedPrompt, Difference, Verification, first_difference
from foredraft.verification.runtimes import RUNTIMES
from foredraft.verification.verify import VerifySettings, verify
from foredraft.verification.workers import in_transformers
from tests.tiny import save_tiny

SETTINGS = VerifySettings(k=3, max_new_tokens=9)
PROMPTS = [
    Prompt(f"p{i}", "none", ({"role": "user", "content": text},)) for i, text in enumerate(["a sea", "red", "0"])
]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    """It never says its end token within the answers asked for."""
    loaded = load_target(str(tiny_target_folder), "float32")
    loaded.model.generation_config.eos_token_id = None
    return loaded


@pytest.fixture(scope="module")
def exported(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a little noise: some guesses are accepted, some are not."""
    source, out = (tmp_path_factory.mktemp("drafts") / name for name in ("noisy", "out"))
    save_tiny(source)
    with torch.no_grad():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source)
        for number, weight in enumerate(model.parameters()):
            weight += 0.04 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        model.save_pretrained(source)
    export_transformers(source, target, 3, out)
    return out


def answered_here(runtime: Any, python: str, job: Job, speculate: bool, seconds: float) -> Replies:
    """Run the worker of transformers in this process."""
    given = json.loads(job.to_json(speculate))
    lines = list(in_transformers.answers(given))
    return Replies("5.24.0", tuple(Reply(tuple(line["token_ids"]), child._counted(line, job.k)) for line in lines))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    for generator in (
        candidate_generator.AssistedCandidateGenerator,
        candidate_generator.PromptLookupCandidateGenerator,
    ):
        for method in ("get_candidates", "update_candidate_strategy"):
            monkeypatch.setattr(generator, method, getattr(generator, method))
    monkeypatch.setattr(verifying, "ask", answered_here)


@pytest.mark.usefixtures("here")
def test_transformers_counts_what_literal_decoding_counts(target: LocalTarget, exported: Path) -> None:
    found = verify(str(exported), target, "transformers", PROMPTS, SETTINGS)
    assert found.faults == []
    assert (found.same_text, found.same_counts, found.exact) == (3, 3, True)
    counted = found.counted
    assert counted == found.expected
    assert counted.by_position is not None
    assert 0 < counted.accepted < (counted.drafted or 0)
    assert found.to_json()["passed"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("max_match", [1, 3])
def test_the_lookup_of_transformers_copies_after_the_earliest_match(target: LocalTarget, max_match: int) -> None:
    # Behind that many tokens this target says a padding row, which transformers takes for a token.
    settings = replace(SETTINGS, max_new_tokens=18)
    found = verify(f"prompt-lookup:max_match={max_match}", target, "transformers", PROMPTS, settings)
    assert found.faults == []
    assert found.counted == found.expected
    assert found.counted.accepted > 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("max_new_tokens", range(2, 8))
def test_answers_of_any_length_are_counted_alike(target: LocalTarget, exported: Path, max_new_tokens: int) -> None:
    settings = replace(SETTINGS, max_new_tokens=max_new_tokens)
    assert verify(str(exported), target, "transformers", PROMPTS[:2], settings).faults == []


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_draft_that_was_damaged_after_it_was_measured_is_found(
    target: LocalTarget, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime loads other weights than those that foredraft counts with."""
    damaged = lambda runtime, python, job, speculate, seconds: answered_here(  # noqa: E731
        runtime, python, replace(job, draft=str(target.path)), speculate, seconds
    )
    monkeypatch.setattr(verifying, "ask", damaged)
    found = verify(str(exported), target, "transformers", PROMPTS, SETTINGS)
    assert found.faults
    assert all("counted" in fault and "expected" in fault for fault in found.faults)


@pytest.mark.parametrize("token", [-1, 272])
def test_a_token_that_the_target_lacks_is_named(
    token: int, target: LocalTarget, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strange(runtime: Any, python: str, job: Job, speculate: bool, seconds: float) -> Replies:
        return Replies("5.24.0", (Reply((token, token + speculate), Counted(1, 3, 1, (1, 0, 0))),))

    monkeypatch.setattr(verifying, "ask", strange)
    with pytest.raises(ServerError, match=f"answered with token {token}, and the target has 0 to 271"):
        verify(str(exported), target, "transformers", PROMPTS[:1], SETTINGS)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_speculation_that_is_silently_off_is_a_fault(
    target: LocalTarget, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp does with -md without --spec-type: the draft is loaded and never used."""
    off = lambda runtime, python, job, speculate, seconds: answered_here(  # noqa: E731
        runtime, python, job, False, seconds
    )
    monkeypatch.setattr(verifying, "ask", off)
    (fault,) = verify(str(exported), target, "transformers", PROMPTS, SETTINGS).faults
    assert "drafted no token: speculation is silently off" in fault


@pytest.mark.usefixtures("here")
def test_the_length_is_the_plans_unless_one_is_given(target: LocalTarget, exported: Path, tmp_path: Path) -> None:
    assert verify(str(exported), target, "transformers", PROMPTS[:1], VerifySettings(max_new_tokens=4)).k == 3
    assert verifying._planned(str(tmp_path)) == 4


@pytest.mark.parametrize("length", ["", 0, -3, 65, "Infinity"])
def test_a_plan_without_a_length_that_can_be_is_named(length: object, tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text(f'{{"num_draft_tokens": {length}}}' if length != "" else "{}")
    with pytest.raises(ModelError, match="cannot be read .*: export the draft again, or give --k"):
        verifying._planned(str(tmp_path))


@pytest.mark.parametrize(
    ("ends", "first_is_plain", "expected"),
    [
        ("whole", False, Counted(3, 9, 4, (2, 1, 1))),
        ("room", False, Counted(3, 8, 4, (2, 1, 1))),
        ("spare", False, Counted(3, 6, 4, (2, 1, 1))),
    ],
)
def test_the_last_block_is_as_long_as_the_runtime_makes_it(ends: Any, first_is_plain: bool, expected: Counted) -> None:
    blocks = [BlockCount(3, 3, 3, 4), BlockCount(3, 1, 0, 1), BlockCount(3, 2, 1, 2), BlockCount(3, 1, 0, 1)]
    assert counting._as_counted(blocks, 7, 3, Counting(first_is_plain, ends)) == expected


def test_blocks_that_are_cropped_are_whole_until_one_token_is_left() -> None:
    blocks = [BlockCount(3, 3, 3, 4), BlockCount(3, 3, 3, 4), BlockCount(3, 1, 0, 1)]
    assert counting._as_counted(blocks, 6, 3, Counting(False, "cropped")) == Counted(2, 6, 4, (2, 1, 1))
    assert counting._as_counted(blocks, 5, 3, Counting(False, "cropped")) == Counted(1, 3, 3, (1, 1, 1))


def test_a_block_of_no_guess_is_none() -> None:
    blocks = [BlockCount(0, 0, 0, 1), BlockCount(2, 2, 2, 3)]
    assert counting._as_counted(blocks, 4, 3, Counting(False, "whole")) == Counted(1, 2, 2, (1, 1, 0))


def test_what_a_runtime_does_not_say_agrees_with_everything() -> None:
    known, silent = Counted(2, 6, 3, (2, 1, 0)), Counted(None, None, 3, None)
    assert known.agrees_with(silent)
    assert not known.agrees_with(replace(silent, accepted=2))
    assert not known.agrees_with(replace(known, by_position=(1, 1, 1)))
    assert Counted.total([known, silent]) == Counted(None, None, 6, None)
    assert Counted.total([known, known]) == Counted(4, 12, 6, (4, 2, 0))


def prompt(**changes: Any) -> CheckedPrompt:
    one = Counted(10, 30, 9, (7, 2, 0))
    return CheckedPrompt(**{"name": "p", "counted": one, "expected": one, "own_difference": None,
                            "other_difference": None, "draft_gap": 1.0} | changes)  # fmt: skip


def verification(*prompts: CheckedPrompt, exact: bool = True) -> Verification:
    return Verification("vllm", "0.32.0", "draft", 3, exact, prompts)


LESS = Counted(10, 30, 8, (6, 2, 0))
FEWER_BLOCKS = Counted(9, 27, 9, (7, 2, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"own_difference": Difference(4, 0.5)}, "leaves plain decoding at token 4, where the target's"),
        ({"own_difference": Difference(4, 1e-5)}, ""),
        ({"counted": LESS}, "8 of 30 [6, 2, 0] counted, 9 of 30 [7, 2, 0] expected; the draft's closest choice leads"),
        ({"counted": LESS, "draft_gap": 1e-5}, ""),
        ({"counted": FEWER_BLOCKS, "other_difference": Difference(7, 1e-5)}, ""),
        *(
            (
                {"counted": counted, "other_difference": Difference(7, 0.3)},
                "plain text of vllm leaves the target's at token 7, where the target's best token leads by 0.3000",
            )
            for counted in (Counted(10, 30, 9, (7, 2, 0)), FEWER_BLOCKS)
        ),
    ],
)
def test_only_what_hangs_on_a_tie_may_differ(changes: dict[str, Any], message: str) -> None:
    faults = verification(prompt(), prompt(**changes)).faults
    assert len(faults) == bool(message)
    assert message in "".join(faults)


def test_rounded_drafts_must_lie_in_the_interval() -> None:
    less = prompt(counted=Counted(10, 30, 2, (2, 0, 0)))
    noisy = [prompt(counted=Counted(10, 30, 9 + more, None)) for more in (1, -1, 0)]
    assert verification(*noisy, exact=False).faults == []
    (fault,) = verification(less, less, less, exact=False).faults
    assert "differ by -0.700 to -0.700" in fault


@pytest.mark.parametrize(("gap", "exact", "is_fault"), [(0.14, False, False), (0.14, True, True), (0.3, False, True)])
def test_where_a_rounded_draft_needs_bfloat16_the_target_may_decide_ties_otherwise(
    gap: float, exact: bool, is_fault: bool
) -> None:
    assert bool(verification(prompt(other_difference=Difference(7, gap)), exact=exact).faults) is is_fault


@pytest.mark.parametrize("drafted", [0, None])
def test_prompts_from_which_nothing_is_drafted_prove_nothing(drafted: int | None) -> None:
    nothing = prompt(counted=Counted(None, drafted, 0, None), expected=Counted(0, 0, 0, (0, 0, 0)))
    (fault,) = verification(nothing).faults
    assert "has nothing to accept, by foredraft's own count: they prove nothing" in fault


def test_the_three_figures_that_runtimes_call_acceptance_are_told_apart() -> None:
    figures = verification(prompt()).to_json()["counted"]
    assert figures["accepted_of_drafted"] == pytest.approx(9 / 30)
    assert figures["acceptance_rate"] == pytest.approx(9 / 19)
    assert figures["mean_tokens_per_guess"] == pytest.approx(1.9)


def test_the_first_difference_is_found() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


SCRIPTS = {
    "works": 'import json, sys\njob = json.load(sys.stdin)\nprint(json.dumps({"version": "9"}))\n'
    'print(json.dumps({"token_ids": [1], "blocks": 1, "drafted": 3, "accepted": 1, "by_position": [1, 0, 0]}))',
    "fails": 'import sys\nprint("loading weights", file=sys.stderr)\nprint(\'{"error": "OSError: no such layer"}\')',
    "dies": 'import sys\nprint(\'{"version": "9"}\')\nsys.exit("killed for want of memory")',
    "cut": 'print(\'{"version": "9"}\')\nprint(\'{"token_ids": [1, 2\')',
    "twice": 'line = \'{"token_ids": [1], "blocks": 1, "drafted": 3, "accepted": 1, "by_position": null}\'\n'
    "print(line)\nprint(line)",
    "lacks": 'print(\'{"token_ids": [1], "drafted": 3, "accepted": 1, "by_position": null}\')',
    "nothing": 'print(\'{"token_ids": [1], "blocks": 1, "drafted": 3, "accepted": null, "by_position": null}\')',
    "longer": 'print(\'{"token_ids": [1], "blocks": 1, "drafted": 3, "accepted": 1, "by_position": [1, 0, 0, 0]}\')',
    "infinite": 'print(\'{"token_ids": [1], "blocks": 1, "drafted": 3, "accepted": Infinity, "by_position": null}\')',
    "number": "print(5)",
    "hangs": 'import sys, time\nprint("still loading", file=sys.stderr, flush=True)\ntime.sleep(60)',
}


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        ("fails", 30.0, "failed: OSError: no such layer Its log ends with:\nloading weights"),
        ("dies", 30.0, "stopped after 0 of 1 answers. Its log ends with:\nkilled for want of memory"),
        ("cut", 30.0, "stopped after 0 of 1 answers. It logged nothing"),
        ("twice", 30.0, "gave 2 answers to 1 prompts. It logged nothing"),
        ("lacks", 30.0, "wrote a line that is no answer .KeyError: 'blocks'"),
        ("nothing", 30.0, "wrote a line that is no answer .TypeError: "),
        ("longer", 30.0, "wrote a line that is no answer .ValueError: it counts 4 positions of blocks of 3"),
        ("infinite", 30.0, "wrote a line that is no answer .OverflowError: "),
        ("number", 30.0, "wrote a line that is no answer .TypeError: "),
        ("hangs", 2.0, "did not answer within 2 s. .*Its log ends with:\nstill loading"),
    ],
)
def test_a_runtime_that_does_not_come_up_shows_its_last_words(
    script: str, seconds: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.py").write_text(SCRIPTS[script])
    monkeypatch.setattr(child, "_RUN", tmp_path / "run.py")
    job = Job(tmp_path, "draft", 3, (Question((1, 2), 4),), {})
    with pytest.raises(ServerError, match=message):
        ask(RUNTIMES["vllm"], sys.executable, job, True, seconds)


def test_answers_of_a_child_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.py").write_text(SCRIPTS["works"])
    monkeypatch.setattr(child, "_RUN", tmp_path / "run.py")
    found = ask(RUNTIMES["vllm"], sys.executable, Job(tmp_path, "", 3, (Question((1, 2), 4),), {}), True, 30.0)
    assert found == Replies("9", (Reply((1,), Counted(1, 3, 1, (1, 0, 0))),))


def test_a_runtime_that_is_missing_is_named_with_what_installs_it(
    target: LocalTarget, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREDRAFT_VLLM_PYTHON", raising=False)
    with pytest.raises(MissingExtraError, match=r"tools/runtimes.sh vllm DIR\nThen set FOREDRAFT_VLLM_PYTHON"):
        verify(str(exported), target, "vllm", PROMPTS, SETTINGS)
    with pytest.raises(MissingExtraError, match="There is no interpreter /nowhere/python"):
        verify(str(exported), target, "vllm", PROMPTS, replace(SETTINGS, python="/nowhere/python"))
    with pytest.raises(UnknownNameError, match="Unknown runtime to verify in 'vlm'.*Did you mean 'vllm'"):
        verify(str(exported), target, "vlm", PROMPTS, SETTINGS)


def test_a_version_that_was_not_tested_is_a_warning(target: LocalTarget) -> None:
    (warning,) = verifying._untested("vllm", RUNTIMES["vllm"], Replies("0.40.1", ()))
    assert "This is vllm 0.40.1; the worker was run with 0.32 only" in warning
    assert verifying._untested("vllm", RUNTIMES["vllm"], Replies("0.32.4", ())) == ()


@pytest.mark.parametrize("rows", [288, 400])
def test_a_padded_vocabulary_is_refused_before_the_runtime_starts(
    rows: int, target: LocalTarget, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "wide", num_layers=1, vocab_size=rows)
    with pytest.raises(CapabilityError, match=f"vllm does not take .*padding included: 272 and {rows}. Pad the draft"):
        verify(str(tmp_path / "wide"), target, "vllm", PROMPTS, replace(SETTINGS, python=sys.executable))


def test_what_a_runtime_does_not_read_is_said(target: LocalTarget, exported: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, python=sys.executable)
    with pytest.raises(ModelError, match="holds no draft.gguf: write one with foredraft export"):
        verify(str(exported), target, "llama.cpp", PROMPTS, settings)
    with pytest.raises(ModelError, match="is no transformers folder"):
        verify(str(tmp_path), target, "vllm", PROMPTS, settings)


@pytest.mark.usefixtures("here")
def test_answers_of_one_word_are_no_test(target: LocalTarget, exported: Path) -> None:
    with pytest.raises(PromptError, match="with a word or two"):
        verify(str(exported), target, "transformers", [], SETTINGS)


@pytest.mark.usefixtures("here")
def test_the_command_prints_the_table_and_ends_by_the_verdict(
    target: LocalTarget, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["foredraft", "verify", str(exported), "--target", str(target.path), "--num-prompts", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--max-new-tokens", "4", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["num_draft_tokens"], found["prompts"]) == (True, 3, 1)
    monkeypatch.setattr(Verification, "faults", property(lambda self: ["p: it is another text."]))
    monkeypatch.setattr(sys, "argv", [*arguments, "--max-new-tokens", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 1
    assert "by position" in shown.out
    assert "it is another text" in shown.err
