"""General text: windows that see nothing of each other, laws read once, and no evaluation prompt among them."""

import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foredraft.core.errors import CorpusError, TraceError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.data import Example, Group, num_positions, plan_steps, rows_of_tokens
from foredraft.distill.documents import Document, read_documents
from foredraft.distill.init import init_from_target
from foredraft.distill.leaks import refuse_leaked_answers, without_leaks
from foredraft.distill.live import LiveTarget
from foredraft.distill.losses import forward_kl
from foredraft.distill.packed import run_body
from foredraft.distill.packing import pack
from foredraft.distill.student import Student
from foredraft.distill.text import Texts, cut, gather_texts
from foredraft.distill.train import distill
from foredraft.models.head import NO_IDS
from foredraft.pool import evaluate_drafters, run_recipe
from foredraft.recipe import parse_recipe
from foredraft.steps import DistillStep, TextSettings
from foredraft.trace.prompts import Prompt, parse_prompt, render
from foredraft.trace.store import TEXT, absent_target, open_trace
from foredraft.verbs import text_keys
from tests.distilling import tiny_target, written_trace
from tests.tiny import tiny_model, tiny_tokenizer
from tests.traces import build_trace, folder, trace_row

ALL = rows_of_tokens(NO_IDS, 272)
SENTENCES = [f"sea {n} sun oak red owl {n * n} ink fog seas suns, oaks reds owls {n + 7} inks." for n in range(12)]


def corpus(path: Path, rows: list[dict[str, object]] | None = None) -> Path:
    """Write a file of text."""
    rows = rows or [{"text": sentence * 3} for sentence in SENTENCES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _settings(file: Path, **options: object) -> TextSettings:
    return TextSettings(**{"files": [str(file)], "max_tokens": 24, **options})


def _texts(tmp_path: Path, positions: int = 400, traced: SamplingLaw = SamplingLaw(), **options: object) -> Texts:
    settings = _settings(corpus(tmp_path / "text.jsonl"), **options)
    return gather_texts(tiny_target(), settings, traced, positions, tmp_path / "kept")


def test_every_form_of_text_is_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "An owl."}]
    rows = [{"text": "plain"}, {"prompt": "Who?", "reference": "An owl."}, {"messages": chat}, {"text": " "}]
    file = corpus(tmp_path / "rows.jsonl", rows)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain = tmp_path / "book.txt"
    plain.write_text("a whole book", encoding="utf-8")
    documents = read_documents(TextSettings(files=[str(file), str(packed), str(plain)]))
    assert [document.said for document in documents] == [*["plain", *["Who?\n\nAn owl."] * 2] * 2, "a whole book"]
    assert documents[1].messages == documents[2].messages == tuple(chat)
    windows = cut([documents[1]], tiny_tokenizer(), TextSettings(files=["-"]))
    expected = tiny_tokenizer().apply_chat_template(chat, return_dict=False)
    assert windows[0].token_ids.tolist() == expected


def test_a_dataset_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    corpus(tmp_path / "data" / "train.jsonl")
    documents = read_documents(TextSettings(dataset=str(tmp_path / "data")))
    assert [document.text for document in documents] == [sentence * 3 for sentence in SENTENCES]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"txt": "a"}], r"rows.jsonl:1: a row of text has text, messages, or prompt and reference"),
        ([{"text": "a"}, {"prompt": "a", "reference": ["b"]}], r"rows.jsonl:2: a row of text has"),
        ([{"text": "  "}], "There is no text in"),
    ],
)
def test_rows_that_are_no_text_are_refused(rows: list[dict[str, object]], message: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=message):
        read_documents(_settings(corpus(tmp_path / "rows.jsonl", rows)))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"There is no text file .*missing.txt"):
        read_documents(_settings(tmp_path / "missing.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorpusError, match="bytes.txt is no text in UTF-8"):
        read_documents(_settings(tmp_path / "bytes.txt"))
    with pytest.raises(CorpusError, match="No document of 1 has two tokens, such as here"):
        cut([Document("here", "a")], tiny_tokenizer(), _settings(tmp_path / "-"))


def test_windows_hold_every_token_once_and_cross_no_end(tmp_path: Path) -> None:
    documents = read_documents(_settings(corpus(tmp_path / "text.jsonl")))
    windows = cut(documents, tiny_tokenizer(), _settings(tmp_path / "-"))
    assert max(len(window.token_ids) for window in windows) == 24
    whole: dict[str, list[int]] = {}
    for window in sorted(windows, key=lambda window: int(window.id.split("#")[1])):
        whole.setdefault(window.document, []).extend(window.token_ids.tolist())
    for number, document in enumerate(documents):
        ids = tiny_tokenizer()(document.text)["input_ids"]
        # A last token alone has nothing to predict it.
        assert whole[str(number)] in (ids, ids[:-1])
    assert [window.id for window in windows] == [w.id for w in cut(documents, tiny_tokenizer(), _settings(tmp_path))]
    assert [w.id for w in windows] != [w.id for w in cut(documents, tiny_tokenizer(), _settings(tmp_path, seed=1))]


def test_every_window_begins_as_the_tokenizer_begins_texts() -> None:
    tokenizer = tiny_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|im_start|>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    windows = cut([Document("-", SENTENCES[0])], tokenizer, TextSettings(files=["-"], max_tokens=20))
    assert len(windows) > 2
    assert all(window.token_ids[0] == 1 and (window.token_ids[1:] != 1).all() for window in windows)
    assert max(len(window.token_ids) for window in windows) == 20


def _gradient(groups: list[Group]) -> dict[str, torch.Tensor]:
    """The sum over positions, not the mean."""
    student = Student.of(init_from_target(tiny_model(), range(1), NO_IDS))
    student.live = LiveTarget(tiny_model(), 259, ALL)
    student.backward(groups, forward_kl)
    count = sum(map(num_positions, groups))
    return {name: weight.grad * count for name, weight in student.weights.items()}


@pytest.mark.parametrize("laws", ["cached", "live"])
def test_a_change_in_one_document_changes_no_gradient_of_another(laws: str, tmp_path: Path) -> None:
    one, two, three = _texts(tmp_path, laws=laws).groups[:3]
    together = pack([one, two], ALL)
    other = pack([one, three], ALL)
    count = num_positions(one)
    model = tiny_model()
    with torch.no_grad():
        states = [run_body(model, packed).last_hidden_state[0, packed.read[:count]] for packed in (together, other)]
    torch.testing.assert_close(states[0], states[1], rtol=1e-5, atol=1e-6)
    alone = [_gradient([group]) for group in (one, two, three)]
    for groups, parts in (([one, two], alone[:2]), ([one, three], [alone[0], alone[2]])):
        for name, gradient in _gradient(groups).items():
            torch.testing.assert_close(gradient, parts[0][name] + parts[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(0.7), SamplingLaw(1.0, 9, 0.9)], ids=str)
def test_text_read_once_teaches_what_the_live_target_teaches(law: SamplingLaw, tmp_path: Path) -> None:
    cached, live = (_texts(tmp_path, 60, law, laws=laws, top=259).groups[:3] for laws in ("cached", "live"))
    assert [group[0].row.id for group in cached] == [group[0].row.id for group in live]
    assert not any(group[0].is_live for group in cached)
    assert all(group[0].is_live for group in live)
    left, right = _gradient(list(cached)), _gradient(list(live))
    for name, gradient in left.items():
        # The file holds log-probabilities in half precision.
        torch.testing.assert_close(right[name], gradient, rtol=2e-2, atol=2e-3 * float(gradient.abs().max()))
    emitted = pack(cached, ALL).law
    assert emitted.emitted.tolist() == [0] * len(emitted)


def test_the_law_of_text_is_that_of_the_trace_or_of_the_settings(tmp_path: Path) -> None:
    assert _texts(tmp_path, traced=SamplingLaw(0.7)).groups[0][0].law == SamplingLaw(0.7)
    assert _texts(tmp_path, traced=GREEDY).groups[0][0].law == SamplingLaw()
    assert _texts(tmp_path, law={"temperature": 0.5, "top_k": 3}).groups[0][0].law == SamplingLaw(0.5, 3)


def test_only_as_much_text_as_is_asked_for_is_read_and_more_is_added(tmp_path: Path) -> None:
    first = _texts(tmp_path, 100)
    (kept,) = (tmp_path / "kept").iterdir()
    assert len(open_trace(kept).info.shards) == 1
    assert open_trace(kept).info.provenance == TEXT
    more = _texts(tmp_path, 10**9)
    trace = open_trace(kept)
    assert trace.info.complete
    assert trace.info.num_rows == len(more.groups) > len(first.groups)
    again = _texts(tmp_path, 100)
    assert again.digest == first.digest != more.digest
    assert len(again.groups) == len(first.groups)
    assert len(_texts(tmp_path, 10**9, tokens=100).groups) == len(first.groups)
    # Another corpus, law, target or cut has a folder of its own.
    for change in ({"max_tokens": 20}, {"top": 8}, {"law": {"temperature": 0.5}}, {"seed": 1}):
        _texts(tmp_path, 10, **change)
    assert len(list((tmp_path / "kept").iterdir())) == 5


def test_kept_text_that_was_changed_is_refused(tmp_path: Path) -> None:
    _texts(tmp_path, 10)
    (shard,) = (tmp_path / "kept").glob("*/*.parquet")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TraceError, match="is not what was written"):
        _texts(tmp_path, 10)


def test_text_and_answers_are_mixed_by_share_in_whole_permutations() -> None:
    answers = [(Example(trace_row(f"a{n}", [1], [20] * (3 + n % 5)), 1.0),) for n in range(11)]
    texts = [(Example(trace_row(f"t{n}", [1], [20] * (9 + n)), 1.0, is_targets=False),) for n in range(4)]
    every = [*answers, *texts]
    for share in (0.1, 0.3, 0.7):
        steps = plan_steps(answers, 3000, 40, 0, texts, share)
        order = [index for step in steps for index in step]
        of_text = sum(num_positions(every[index]) for index in order if index >= 11)
        total = sum(num_positions(every[index]) for index in order)
        assert of_text == pytest.approx(share * total, abs=12)
        for first, count in ((0, 11), (11, 4)):
            own = [index - first for index in order if first <= index < first + count]
            for epoch in range(len(own) // count):
                assert sorted(own[epoch * count : (epoch + 1) * count]) == list(range(count))
        assert steps == plan_steps(answers, 3000, 40, 0, texts, share)
        assert all(sum(num_positions(every[index]) for index in step) >= 40 for step in steps[:-1])
    assert plan_steps(answers, 3000, 40, 0) == plan_steps(answers, 3000, 40, 0, texts, 0.0)


QUESTION = (
    "Write a function that returns the number of vowels in a word, and explain why each line is needed for a beginner."
)


def _prompts(*texts: str) -> list[Prompt]:
    return [parse_prompt({"id": f"e{number}", "prompt": text}, "-") for number, text in enumerate(texts)]


def test_an_evaluation_prompt_in_the_text_is_refused_or_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clean, leaky = Document("clean", SENTENCES[0]), Document("book:7", f"He said: {QUESTION.upper()} And so on.")
    prompts = _prompts("How do owls see at night?", QUESTION)
    with pytest.raises(CorpusError, match=r"1 evaluation prompts are in the text to train on, 'e1' first: 100 % of it "
                       r"stands in book:7\. Leave such documents out \(text.leaks: drop\)"):  # fmt: skip
        without_leaks([clean, leaky], prompts, drop=False)
    with caplog.at_level(logging.WARNING):
        assert without_leaks([clean, leaky], prompts, drop=True) == [clean]
    assert "1 of 2 documents share text with evaluation prompts and are left out." in caplog.text
    assert without_leaks([clean], prompts, drop=False) == [clean]
    with pytest.raises(CorpusError, match="Every document shares text with an evaluation prompt"):
        without_leaks([leaky], prompts, drop=True)
    settings = _settings(corpus(tmp_path / "text.jsonl", [{"prompt": QUESTION, "reference": "No."}]))
    with pytest.raises(CorpusError, match="evaluation prompts are in the text"):
        gather_texts(tiny_target(), settings, SamplingLaw(), 10, tmp_path / "kept", prompts)


def test_a_few_shared_words_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    quote = Document("-", " ".join(QUESTION.split()[:14]))
    with caplog.at_level(logging.WARNING):
        assert without_leaks([quote], _prompts(QUESTION), drop=False) == [quote]
    assert (
        "1 evaluation prompts share a few sequences of 13 words with the text; the most is 20 % of one" in caplog.text
    )


def test_an_evaluation_prompt_in_the_training_trace_is_refused(tmp_path: Path) -> None:
    (prompt,) = _prompts(QUESTION)
    said = render(prompt, tiny_tokenizer()).tolist()
    by_text = build_trace(tmp_path / "text", [trace_row("a#1", said, [20], prompt_id="a")])
    later = build_trace(tmp_path / "later", [trace_row("a#2", [*said, 30, 31], [20], prompt_id="a")])
    by_id = build_trace(tmp_path / "id", [trace_row("e0#1", [5, 6], [20], prompt_id="e0")])
    clean = build_trace(tmp_path / "clean", [trace_row("a#1", said[:-1], [20], prompt_id="a")])
    for trace in (by_text, later, by_id):
        with pytest.raises(TraceError, match=r"holds an answer to '\w+', which is the evaluation prompt 'e0'"):
            refuse_leaked_answers([clean, trace], [prompt], tiny_tokenizer())
    refuse_leaked_answers([clean], [prompt], tiny_tokenizer())
    draft = init_from_target(tiny_model(), range(1), NO_IDS)
    with pytest.raises(TraceError, match="Collect training answers to other prompts"):
        distill(draft, [by_text], DistillStep(tokens=10), tiny_target(), tmp_path / "work", held_out=[prompt])


_KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
from foredraft.distill import loop, text, train as training
from foredraft.distill.init import init_from_target
from foredraft.models.head import NO_IDS
from foredraft.pool import evaluate_drafters, run_recipe
from foredraft.recipe import parse_recipe
from foredraft.steps import DistillStep
from foredraft.trace.store import open_trace
from tests.distilling import tiny_target
from tests.tiny import tiny_model

loop._POSITIONS_BETWEEN_POINTS, text._SHARD_WINDOWS = 500, 8
folder, step = Path(sys.argv[1]), DistillStep.model_validate_json(sys.argv[3])
draft, target = init_from_target(tiny_model(), range(1), NO_IDS), tiny_target()

def train(name):
    trace = open_trace(Path(sys.argv[2]))
    result = training.distill(draft, [trace], step, target, folder / name, text_folder=folder / f"{name}-text")
    save_file({key: value.clone() for key, value in result.draft.model.state_dict().items()}, folder / name / "done")

def state():
    point, shards = folder / "killed" / "resume.safetensors", list((folder / "killed-text").glob("*/*.parquet"))
    return len(shards), point.stat().st_ino if point.exists() else 0

train("whole")
delays, times = random.Random(0), {"text": 0, "train": 0}
while True:
    before, child = state(), os.fork()
    if child == 0:
        train("killed")
        os._exit(0)
    # Some moments after a shard or a point, or while one is written.
    while state() == before and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(delays.uniform(0.0, 0.03))
    if (folder / "killed" / "done").exists():
        break
    times["train" if state()[1] else "text"] += 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(times["text"], times["train"])
"""


@pytest.mark.slow
def test_text_and_rollouts_killed_again_and_again_end_with_the_same_bytes(tmp_path: Path) -> None:
    trace = written_trace(tmp_path / "trace", tiny_model(), 16, SamplingLaw())
    step = DistillStep(
        tokens=1200,
        batch_tokens=100,
        learning_rate=1e-2,
        checkpoint_every=1e-9,
        text=_settings(corpus(tmp_path / "text.jsonl"), share=0.4),
        rollouts={"fraction": 0.6, "share": 0.5, "replay": 0.3, "max_new_tokens": 5},
    )
    command = [sys.executable, "-c", _KILLER, str(tmp_path), str(trace.path), step.model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    in_text, in_training = map(int, done.stdout.split()[-2:])
    assert in_text >= 2
    assert in_training >= 2
    whole, killed = (load_file(tmp_path / name / "done") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    left, right = (next((tmp_path / f"{name}-text").iterdir()) for name in ("whole", "killed"))
    assert folder(left) == folder(right)


def test_text_changes_what_is_learnt_and_the_identity_of_the_training(tmp_path: Path) -> None:
    trace = written_trace(tmp_path / "trace", tiny_model(), 8, SamplingLaw())
    draft = init_from_target(tiny_model(), range(1), NO_IDS)
    settings = {"tokens": 400, "batch_tokens": 100, "learning_rate": 1e-2}
    text = _settings(corpus(tmp_path / "text.jsonl"), share=0.5, top=259)
    weights = [
        distill(draft, [trace], DistillStep(**settings, text=given), tiny_target(), tmp_path / name).draft.model
        for name, given in (("plain", None), ("mixed", text), ("live", text.model_copy(update={"laws": "live"})))
    ]
    plain, mixed, live = (model.model.norm.weight.detach() for model in weights)
    assert not torch.equal(plain, mixed)
    assert float((mixed - live).abs().max()) < 0.1 * float((plain - mixed).abs().max())


RECIPE = """
target: {{model: {target}, dtype: float32}}
trace: {{prompts: [{{file: {folder}/prompts.jsonl, train: 4, eval: 2}}], laws: [{{temperature: 1}}], max_new_tokens: 8}}
candidates:
  one:
    - init: {{layers: first-1}}
    - distill: {{tokens: 60, batch_tokens: 30, text: {{files: [{text}], max_tokens: 24}}}}
  two: [{{from: one}}, {{distill: {{tokens: 40, batch_tokens: 30, text: {{files: [{text}], max_tokens: 24}}}}}}]
evaluate: {{num_draft_tokens: 2, audit_prompts: 0, cost_repeats: 3, criteria_answers: 0}}
select: {{memory_fraction: 2.0}}
export: []
"""


@pytest.mark.slow
def test_candidates_of_a_recipe_share_what_the_target_said_of_text(tiny_target_folder: Path, tmp_path: Path) -> None:
    prompts = [{"prompt": f"Tell me of {word}."} for word in ("sea", "sun", "oak", "red", "owl", "ink", "fog")]
    corpus(tmp_path / "prompts.jsonl", prompts)
    text = corpus(tmp_path / "text.jsonl")
    recipe = parse_recipe(RECIPE.format(target=tiny_target_folder, folder=tmp_path, text=text))
    out = tmp_path / "run"
    run_recipe(recipe, out)
    (kept,) = (out / "text").iterdir()
    written, made = kept.stat().st_mtime_ns, set((out / "drafts").glob("*/*"))
    run_recipe(recipe, out)
    assert set((out / "drafts").glob("*/*")) == made
    assert kept.stat().st_mtime_ns == written
    with pytest.raises(TraceError, match="holds text that no target wrote: drafts learn from it, and are not scored"):
        evaluate_drafters(absent_target([open_trace(kept)]), ["prompt-lookup"], [open_trace(kept)], tmp_path / "scores")
    # Another text in the same file is another training.
    (step,) = (step for step in recipe.candidates["two"] if step.verb == "distill")
    before = text_keys(step, [])
    corpus(text, [{"text": sentence * 2} for sentence in SENTENCES])
    assert text_keys(step, []) != before
    everything = corpus(tmp_path / "leak.jsonl", [{"prompt": row["prompt"], "reference": "No."} for row in prompts])
    leaky = parse_recipe(RECIPE.format(target=tiny_target_folder, folder=tmp_path, text=everything))
    with pytest.raises(CorpusError, match="evaluation prompts are in the text to train on"):
        run_recipe(leaky, tmp_path / "leaky")
    assert not (tmp_path / "leaky" / "traces").exists()
