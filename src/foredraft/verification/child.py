"""Starting a runtime in its own environment, and what it says."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from foredraft.core.errors import ServerError
from foredraft.core.programs import environment_elsewhere
from foredraft.verification.counting import Counted
from foredraft.verification.runtimes import Runtime

_RUN = Path(__file__).parent / "workers" / "run.py"
_LOG_LINES = 12
# One thread that waits instead of spinning; no network; vLLM in the one process, with a small cache.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and how many tokens its answer has."""

    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """What a runtime is asked.

    Attributes:
        target, draft: Folders or GGUF files, whichever it reads; draft is empty for plain decoding and lookup.
        k: Draft tokens of a block.
        lookup: Options of prompt lookup; empty for a draft that is a model.
        is_exact: Whether llama.cpp keeps its caches in float32; its defaults are faster.
    """

    target: Path
    draft: str
    k: int
    questions: tuple[Question, ...]
    lookup: dict[str, int]
    threads: int = 1
    is_exact: bool = True

    def to_json(self, speculate: bool) -> str:
        longest = max(len(question.token_ids) + question.max_new_tokens for question in self.questions)
        return json.dumps({
            "target": str(self.target), "draft": self.draft, "k": self.k, "speculate": speculate,
            "lookup": self.lookup, "threads": self.threads,
            "is_exact": self.is_exact, "max_context": longest + 2 * self.k + 2,
            "prompts": [
                {"token_ids": question.token_ids, "max_new_tokens": question.max_new_tokens}
                for question in self.questions
            ],
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a runtime, and the seconds it took; the first one's hold the start too."""

    token_ids: tuple[int, ...]
    counted: Counted
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Replies:
    """All answers of one run of a runtime."""

    version: str
    replies: tuple[Reply, ...]


def ask(runtime: Runtime, python: str, job: Job, speculate: bool, seconds: float) -> Replies:
    """Answer the job's prompts in a process of its own.

    Args:
        speculate: With the draft, or plainly.
        seconds: Longest that the whole run may take.

    Raises:
        ServerError: it did not come up, stopped, or took too long; the message ends with its log's last lines.
    """
    environment = {**environment_elsewhere(), **_ENVIRONMENT, "OMP_NUM_THREADS": str(job.threads)}
    command = [python, str(_RUN), runtime.worker]
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            done = subprocess.run(
                command, input=job.to_json(speculate), stdout=subprocess.PIPE, stderr=log,
                encoding="utf-8", errors="replace", timeout=seconds, env=environment, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ServerError(
                f"{runtime.worker} did not answer within {seconds:.0f} s. Ask for fewer prompts or shorter answers, or "
                f"give it more time. {_last_lines(log)}"
            ) from error
        except OSError as error:
            raise ServerError(f"{python} cannot be started: {error.strerror}.") from error
        return _read(runtime, done.stdout, job, log)


def _read(runtime: Runtime, text: str, job: Job, log: IO[str]) -> Replies:
    version, replies, wanted = "unknown", [], len(job.questions)
    for line in _lines(text):
        match line:
            case {"error": error}:
                raise ServerError(f"{runtime.worker} failed: {error} {_port_sentence(str(error))}{_last_lines(log)}")
            case {"version": said}:
                version = str(said)
            case _:
                replies.append(_reply(runtime, line, job.k, log))
    if len(replies) < wanted:
        raise ServerError(f"{runtime.worker} stopped after {len(replies)} of {wanted} answers. {_last_lines(log)}")
    if len(replies) > wanted:
        raise ServerError(f"{runtime.worker} gave {len(replies)} answers to {wanted} prompts. {_last_lines(log)}")
    return Replies(version, tuple(replies))


def _lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # cut off by the end of the process


def _reply(runtime: Runtime, line: Any, k: int, log: IO[str]) -> Reply:
    try:
        return Reply(tuple(map(int, line["token_ids"])), _counted(line, k), float(line.get("seconds", 0.0)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServerError(
            f"{runtime.worker} wrote a line that is no answer ({type(error).__name__}: {error}). {_last_lines(log)}"
        ) from error


def _counted(line: dict[str, Any], k: int) -> Counted:
    blocks, drafted, by_position = line["blocks"], line["drafted"], line["by_position"]
    if by_position is not None and len(by_position) != k:
        raise ValueError(f"it counts {len(by_position)} positions of blocks of {k}")
    return Counted(
        None if blocks is None else int(blocks),
        None if drafted is None else int(drafted),
        int(line["accepted"]),
        None if by_position is None else tuple(map(int, by_position)),
    )


def _port_sentence(error: str) -> str:
    """Return what to do where another program holds a port; workers ask for any free one."""
    if "address already in use" not in error.lower():
        return ""
    return "(another program holds the port that it was told to use: unset VLLM_PORT and its like, or end that one). "


def _last_lines(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.rstrip() for line in log.readlines() if line.strip()][-_LOG_LINES:]
    return "Its log ends with:\n" + "\n".join(lines) if lines else "It logged nothing."
