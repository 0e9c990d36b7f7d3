"""What others publish: question files of benchmarks as prompts, and the reports of server benchmarks as figures.

Files are known by what they hold, never by their names.
"""

import gzip
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import PromptError, UserError

_GZIP = b"\x1f\x8b"
_HUMANEVAL_PARTS = ("canonical_solution", "entry_point", "test")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PublishedAcceptance:
    """What a server's benchmark says about speculation; NaN where it does not.

    Attributes:
        runtime: "vllm" or "sglang".
        model: As the report names it.
        k: Draft tokens of a block; 0 where the report does not say.
        mean_tokens_per_call: Tokens emitted / verified blocks, bonus included. Both call it acceptance length.
        accepted_of_drafted: Accepted / drafted tokens, in [0, 1]; not acceptance_rate, which counts examined ones.
        reached: Share of all blocks in which draft token i and all before it were accepted.
        requests: Answers behind the figures.
    """

    runtime: str
    model: str
    k: int
    mean_tokens_per_call: float
    accepted_of_drafted: float = math.nan
    reached: tuple[float, ...] = ()
    requests: int = 0


def adapted(row: Any, where: str) -> Any:
    """Return a row of a known question file in the form of our own prompt files; any other row as it is.

    Args:
        where: Place of the row, for errors.

    Raises:
        PromptError: it is a benchmark's report, which holds no prompts.
    """
    if not isinstance(row, dict):
        return row
    if read_report_row(row) is not None or _is_report(row):
        raise PromptError(
            f"{where}: this is a benchmark's report, which holds no prompts: name the file it was run on."
        )
    for adapt in _ADAPTERS:
        if found := adapt(row):
            return {**found, **{name: row[name] for name in ("id", "domain") if name in row}}
    return row


def unpacked(data: bytes, where: str) -> bytes:
    """Return the content of a file that may be packed by gzip.

    Raises:
        PromptError: it is packed, and broken.
    """
    if not data.startswith(_GZIP):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise PromptError(f"{where} cannot be unpacked: {error}.") from error


def read_published(path: Path) -> PublishedAcceptance | None:
    """Return what a report of `vllm bench serve` or of SGLang's bench_serving says; None for any other file.

    Of a JSON Lines file with several runs, the last one counts.

    Raises:
        UserError: it is such a report, of a server that did not speculate.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    row = _last_object(text)
    if not isinstance(row, dict) or "laws" in row:
        return None
    found = read_report_row(row)
    if found is None and _is_report(row):
        raise UserError(f"{path} is a benchmark's report without figures on speculation: was the draft in use?")
    return found


def read_report_row(row: Row) -> PublishedAcceptance | None:
    """Return the figures of a report; None where it holds none."""
    for read in (_vllm_report, _sglang_report):
        if (found := read(row)) is not None:
            return found
    return None


def _spec_bench(row: Row) -> dict[str, Any] | None:
    """Spec-Bench and MT-bench: question_id, category, turns (Xia et al. 2024, arXiv 2401.07851)."""
    if "turns" not in row or "question_id" not in row:
        return None
    domain = {"domain": row["category"]} if row.get("category") else {}
    return {"id": row["question_id"], "turns": row["turns"], **domain}


def _humaneval(row: Row) -> dict[str, Any] | None:
    """HumanEval: task_id, prompt, and what tests the answer (Chen et al. 2021, arXiv 2107.03374)."""
    if not {"task_id", "prompt"} <= row.keys() or not any(part in row for part in _HUMANEVAL_PARTS):
        return None
    return {"id": row["task_id"], "prompt": row["prompt"], "domain": "humaneval"}


def _gsm8k(row: Row) -> dict[str, Any] | None:
    """GSM8K: question and answer (Cobbe et al. 2021, arXiv 2110.14168)."""
    if not {"question", "answer"} <= row.keys() or {"prompt", "messages", "turns"} & row.keys():
        return None
    return {"prompt": row["question"], "domain": "gsm8k"}


_ADAPTERS: tuple[Callable[[Row], dict[str, Any] | None], ...] = (_spec_bench, _humaneval, _gsm8k)


def _vllm_report(row: Row) -> PublishedAcceptance | None:
    """vllm bench serve --save-result: counters of the server over the run. Its rate is in percent of drafted tokens."""
    length = row.get("spec_decode_acceptance_length")
    if not isinstance(length, int | float):
        return None
    drafts, drafted = _number(row, "spec_decode_num_drafts"), _number(row, "spec_decode_draft_tokens")
    reached = tuple(float(share) for share in row.get("spec_decode_per_position_acceptance_rates") or ())
    return PublishedAcceptance(
        runtime="vllm",
        model=str(row.get("model_id", "")),
        k=round(drafted / drafts) if drafts > 0 else len(reached),
        mean_tokens_per_call=float(length),
        accepted_of_drafted=_number(row, "spec_decode_acceptance_rate") / 100.0,
        reached=reached,
        requests=int(row.get("completed") or 0),
    )


def _sglang_report(row: Row) -> PublishedAcceptance | None:
    """bench_serving --output-file of SGLang: accept_length, the server's mean over all that it has answered."""
    length = row.get("accept_length")
    if not isinstance(length, int | float) or not _is_report(row):
        return None
    info = row.get("server_info")
    server = info if isinstance(info, dict) else {}
    steps = server.get("speculative_num_steps") or row.get("speculative_num_steps") or 0
    return PublishedAcceptance(
        runtime="sglang",
        model=str(row.get("model") or server.get("model_path") or ""),
        k=int(steps),
        mean_tokens_per_call=float(length),
        requests=int(row.get("completed") or 0),
    )


def _is_report(row: Row) -> bool:
    return {"duration", "completed", "total_input_tokens", "request_throughput"} <= row.keys()


def _last_object(text: str) -> Any:
    for part in (text, text.splitlines()[-1] if text else ""):
        try:
            return json.loads(part)
        except ValueError:
            continue
    return None


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
