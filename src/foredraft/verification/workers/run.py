"""Runs one runtime in its own environment: a job comes as JSON on stdin, answers leave as JSON lines on stdout.

python run.py in_vllm < job.json. Neither this file nor its neighbours import foredraft, which that environment need not
have. A job is {"target", "draft", "k", "speculate", "max_context", "threads", "is_exact", "lookup", "prompts":
[{"token_ids", "max_new_tokens"}]}. An answer is {"token_ids", "blocks", "drafted", "accepted", "by_position"}, null for
what the runtime does not count; "seconds" since the answer before, or since the start, are added here. The first line
is {"version"}, an error is {"error"}.
"""

import json
import os
import sys
import time
from importlib import import_module


def main() -> int:
    # What runtimes print themselves belongs into the log.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.read())
    try:
        runtime = import_module(sys.argv[1])
        _say(lines, {"version": runtime.version()})
        since = time.perf_counter()
        for answer in runtime.answers(job):
            _say(lines, answer | {"seconds": time.perf_counter() - since})
            since = time.perf_counter()
    except Exception as error:  # whatever it is, the other side shows it
        _say(lines, {"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


def _say(lines, value) -> None:  # type: ignore[no-untyped-def]
    lines.write(json.dumps(value) + "\n")
    lines.flush()


if __name__ == "__main__":
    sys.exit(main())
