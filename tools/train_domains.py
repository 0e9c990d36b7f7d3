"""Trains the domain classifier that ships with the package, and scores it on sources that it did not learn from.

    python tools/train_domains.py --data DATA --out src/foredraft/data/domains.json

DATA holds corpora/*.jsonl and prompts/*.jsonl as described in its README. Prints F1 by domain on the held-out sources.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.select.domains import DOMAINS, DomainModel, text_features

LENGTHS = (120, 300, 800, 2000)
DECAY = 0.03  # of 0.001 to 0.03 the best where each source that is learnt from is left out in turn
EACH = 900  # windows of a domain in training, and at most of a source in testing
MATH, CODING = ("math", "fermi"), ("coding",)
CHAT = ("writing", "roleplay", "humanities", "stem", "generic", "knowledge", "common-sense", "counterfactual")

FUNCTION_WORDS = (
    "der die das und ist nicht ein eine zu mit von auf den dem des sich im es für er",
    "le la les et un une que est pour dans qui pas au de du ne sur se par plus",
    "el la los las por con una es se del lo que de en y un no su para al",
    "il di che non per sono un una la le del con da si al come più nel i e",
    "het van een en niet dat ze de is op te in voor met zijn die er aan ook als",
)

THINGS = ["leaves", "bricks", "tyres", "spoons", "coins", "letters", "bees", "candles", "matches", "taxis", "seeds"]
PLACES = (
    "a small town", "the whole country", "an office building", "a school bus", "one household", "a football stadium",
    "a large forest", "the average kitchen",
)  # fmt: skip
REQUESTS = (
    " Show your work.",
    " Explain your reasoning.",
    " Think step by step.",
    " Round to two decimals.",
)

# Domain: sources to learn from, and sources to be scored on.
SOURCES = {
    "code": (("corpora/code_python_stdlib", "prompts/code:mbpp"),
             ("prompts/code:humaneval", "prompts/code_edit:pytorch")),
    "mathematics": (("corpora/math_gsm8k_train", "prompts/math:gsm8k", "made-up/exercises"),
                    ("prompts/chat:mt_bench/math", "prompts/chat:vicuna_bench/fermi",
                     "prompts/chat:vicuna_bench/math")),
    "dialogue": (("corpora/dialogue_sgd_train", "prompts/instruct",
                  *(f"prompts/chat:mt_bench/{topic}" for topic in CHAT)),
                 tuple(f"prompts/chat:vicuna_bench/{topic}" for topic in CHAT)),
    "prose": (("corpora/en_kjv", "corpora/en_peps", "corpora/en_python_docs"),
              ("corpora/en_wikitext2", "corpora/en_tinyshakespeare", "prompts/rag:spec_bench")),
    "structured": (("prompts/function_call:bfcl", "prompts/extract_json:sgd"), ("prompts/table_convert:table",)),
    "other language": (("corpora/zh_python_docs", "prompts/writing_zh:writingbench", "made-up/corpora/en_peps",
                        "made-up/corpora/en_kjv", "made-up/corpora/en_python_docs"),
                       ("corpora/zh_poetry", "prompts/dialogue_zh:chatterbot", "prompts/zh_math:mgsm",
                        "prompts/translation:spec_bench")),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chance = random.Random(0)
    features, labels = [], []
    for number, (learnt, _) in enumerate(SOURCES.values()):
        texts = [found for source in learnt if (found := list(read(options.data, source)))]
        for index in range(EACH):
            features.append(text_features(window(texts[index % len(texts)], chance)))
            labels.append(number)
    model = train(np.array(features), np.array(labels))
    names = ("mean", "scale", "weights", "bias")
    data = {name: np.round(getattr(model, name), 5).tolist() for name in names}
    options.out.write_text(json.dumps(data) + "\n")
    report(model, options.data, chance)
    print(f"{options.out.stat().st_size} bytes")


def read(data: Path, source: str) -> Iterator[str]:
    """Yield the texts of a source, `folder/file:task` or without a task."""
    if source == "made-up/exercises":
        yield from exercises(random.Random(1), 1500)
        return
    if source.startswith("made-up/"):
        yield from map(made_foreign, read(data, source.removeprefix("made-up/")))
        return
    file, _, task = source.partition(":")
    for line in (data / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if task and task not in f"{row['task']} {row.get('source', '')}":
            continue
        text = text_of(row, file)
        if text.strip():
            yield text
        if file.endswith("gsm8k_train"):
            yield row["prompt"]


def exercises(chance: random.Random, count: int) -> Iterator[str]:
    """Yield exercises of other kinds than word problems about money: the data holds none to learn from."""
    for _ in range(count):
        a, b, c, n = (chance.randint(2, 60) for _ in range(4))
        thing, other = chance.sample(THINGS, 2)
        place, time = chance.choice(PLACES), chance.choice(("day", "week", "month", "year", "hour"))
        text = chance.choice((
            f"Solve for x: {a}x + {b} = {c}.",
            f"What is the derivative of f(x) = {a}x^{n} - {b}x + {c}?",
            f"A triangle has sides of length {a}, {b} and {c}. What is its area?",
            f"Find the remainder when {a * b * c} is divided by {n}.",
            f"If the probability of rain is 0.{a}, how likely is it that it rains on {b % 7 + 1} of {c % 9 + 7} days?",
            f"What is the sum of the first {n} terms of the sequence that begins with {a}, {a + b}, {a + 2 * b}?",
            f"Convert {a}.{b} kilometres per hour to metres per second.",
            f"A tank of {a * 10} litres is filled at {b} litres a minute and leaks {c} an hour. When is it full?",
            f"How many ways are there to arrange {n} books on {b % 5 + 2} shelves?",
            f"How many {thing} are there in {place}?",
            f"Estimate how many {thing} are used in {place} in a {time}.",
            f"About how many {thing} would fill {place}? Give an estimate.",
            f"How much do all the {thing} and {other} in {place} weigh together?",
            f"What is the average number of {thing} that {place} needs in a {time}?",
            f"Given that f(x) = {a}x^2 - {b}x + {c}, find the value of f({n % 9}).",
            f"The mean of {a}, {b} and y is {c}. What is the value of y?",
        ))  # fmt: skip
        yield text + chance.choice(("", "", *REQUESTS))


def made_foreign(text: str) -> str:
    """Return English with its short words put into one other language, since the data holds none but Chinese."""
    chance = random.Random(text[:100])
    words = chance.choice(FUNCTION_WORDS).split()
    changed = (chance.choice(words) if len(word) < 5 and word.islower() else word for word in text[:20_000].split(" "))
    return " ".join(changed)


def text_of(row: dict[str, Any], file: str) -> str:
    if "translation" in file:
        return row["prompt"].partition(": ")[2]
    messages = "\n".join(str(message["content"]) for message in row.get("messages", ()))
    said = row.get("text") or row.get("prompt") or "\n".join(row.get("turns", ())) or messages
    keeps = file.endswith(("gsm8k_train", "extract_json", "table_convert", "function_call", "mbpp", "prompts/code"))
    reference = row.get("reference")
    if not keeps or reference is None:
        return said
    return f"{said}\n{reference if isinstance(reference, str) else json.dumps(reference)}"


def window(texts: list[str], chance: random.Random) -> str:
    text, size = chance.choice(texts), chance.choice(LENGTHS)
    begin = chance.randrange(max(len(text) - size, 0) + 1)
    return text[begin : begin + size]


def train(features: np.ndarray, labels: np.ndarray) -> DomainModel:
    mean, scale = features.mean(0), features.std(0) + 0.02
    inputs = torch.from_numpy(np.clip((features - mean) / scale, -6, 6))
    wanted = torch.from_numpy(labels)
    weights = torch.zeros(len(DOMAINS), inputs.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(DOMAINS), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=200)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(inputs @ weights.T + bias, wanted) + DECAY * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return DomainModel(mean, scale, weights.detach().numpy(), bias.detach().numpy())


def report(model: DomainModel, data: Path, chance: random.Random) -> None:
    """Print F1 by domain over held-out sources, each domain weighing alike, and where the mistakes go."""
    confusion = np.zeros((len(DOMAINS), len(DOMAINS)))
    for number, (domain, (_, tested)) in enumerate(SOURCES.items()):
        for source in tested:
            if not (texts := list(read(data, source))):
                continue
            windows = [text[-2000:] for text in texts] if source.startswith("prompts") else [
                window(texts, chance) for _ in range(100)]  # fmt: skip
            found = Counter(model.domain(text) for text in windows[:EACH])
            print(f"{domain:15} {source:34} {len(windows):4} {found[domain] / len(windows):.3f}  {dict(found)}")
            confusion[number] += np.array([found[name] for name in DOMAINS])
    shares = confusion / confusion.sum(1, keepdims=True)
    precision, recall = np.diag(shares) / shares.sum(0), np.diag(shares)
    f1 = 2 * precision * recall / (precision + recall)
    for domain, value in zip(DOMAINS, f1, strict=True):
        print(f"F1 {domain:15} {value:.3f}")
    print(f"macro-F1 on held-out sources {f1.mean():.3f}")


if __name__ == "__main__":
    main()
