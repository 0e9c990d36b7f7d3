"""Digests: the names under which stages, checkpoints and traces are kept."""

import hashlib
import json
from pathlib import Path
from typing import Any

_CHUNK = 1 << 22


def digest_of(value: Any) -> str:
    """Return 16 hex digits that identify a JSON-like value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
    return sha.hexdigest()
