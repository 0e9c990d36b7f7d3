"""Prompts of the mixed stream: code edits, dialogue, summaries, mathematics, structured output and Chinese.

    python benchmarks/select/stream.py --data DATA --each 24 --not-in RUN/traces/train-T0-... --out stream.jsonl

DATA/prompts holds the files. Of each domain the first prompts by a hash of their ids, no longer than --longest
characters; those that the traces of --not-in answered, from which drafts may have learnt, are left out.
"""

import argparse
import hashlib
import json
from pathlib import Path

from foredraft.trace.store import open_trace

DOMAINS = {
    "code edit": ("code_edit",),
    "dialogue": ("dialogue",),
    "summary": ("long_document",),
    "mathematics": ("math",),
    "structured": ("extract_json", "table_convert"),
    "chinese": ("dialogue_zh", "zh_explain", "zh_math"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--each", type=int, default=24, help="prompts of a domain")
    parser.add_argument("--longest", type=int, default=4000, help="characters of a prompt")
    parser.add_argument("--without", action="append", default=[], choices=list(DOMAINS))
    parser.add_argument("--not-in", type=Path, action="append", default=[], help="traces whose prompts are left out")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    known = {
        row.id.rpartition("#")[0] or row.id for folder in options.not_in for row in open_trace(folder).rows(tops=False)
    }
    chosen = []
    for domain, files in DOMAINS.items():
        if domain in options.without:
            continue
        rows = [json.loads(line) for file in files for line in lines(options.data / "prompts" / f"{file}.jsonl")]
        fitting = [row for row in rows if len(asked(row)) <= options.longest and row["id"] not in known]
        chosen += [row | {"domain": domain} for row in sorted(fitting, key=by_hash)[: options.each]]
    kept = ("id", "domain", "prompt", "messages", "turns")
    rows = [{key: row[key] for key in kept if row.get(key)} for row in sorted(chosen, key=by_hash)]
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def asked(row: dict) -> str:
    return row.get("prompt") or "\n".join(row.get("turns") or [message["content"] for message in row["messages"]])


def by_hash(row: dict) -> str:
    return hashlib.sha256(row["id"].encode()).hexdigest()


if __name__ == "__main__":
    main()
