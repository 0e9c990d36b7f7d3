"""The output folder of a run: claimed once, filled stage by stage, never overwritten."""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import OutputError
from foredraft.core.files import write_json

_MARKER = "foredraft-run.json"
_STAGES = "stages.json"
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a finished stage cost when it ran.

    Attributes:
        name: What it made, such as `distill prefix-6`.
        key: Digest of its inputs.
        seconds: Wall clock, over all its tries.
        peak_bytes: Largest resident memory of the process until its end.
    """

    name: str
    key: str
    seconds: float
    peak_bytes: int


class Workspace:
    """A folder whose stages are kept under digests of their inputs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def open(root: Path) -> "Workspace":
        """Claim an empty or new folder, or go on in one of an earlier run.

        Raises:
            OutputError: the folder holds something else, or cannot be written.
        """
        marker = root / _MARKER
        if root.exists() and not root.is_dir():
            raise OutputError(f"{root} is a file: name a folder.")
        if not marker.is_file():
            if root.is_dir() and any(root.iterdir()):
                raise OutputError(f"{root} holds something that is no foredraft run: name a new folder.")
            write_json(marker, {"schema": _SCHEMA})
        return Workspace(root)

    def stage(
        self,
        name: str,
        key: str,
        path: Path,
        make: Callable[[Path], Any],
        is_done: Callable[[Path], bool] = Path.exists,
    ) -> Path:
        """Return `path` after `make` has written it, unless it is done already.

        `make` writes its path whole or not at all, or says by `is_done` when it is whole; a stage that was
        killed starts again from the points that it kept itself.
        """
        if is_done(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        make(path)
        seconds = time.perf_counter() - started
        records = [record for record in self.records() if record.key != key]
        self._write_records([*records, StageRecord(name, key, round(seconds, 2), _peak_bytes())])
        return path

    def records(self) -> list[StageRecord]:
        """Return the finished stages in the order they ran."""
        file = self.root / _STAGES
        if not file.is_file():
            return []
        return [StageRecord(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]

    def _write_records(self, records: list[StageRecord]) -> None:
        write_json(self.root / _STAGES, [asdict(record) for record in records])


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
