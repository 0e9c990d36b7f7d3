"""A selection on disk: drafters with their digests, lengths, policy and costs; an adaptive drafter is made of it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.checkpoint import MANIFEST, verify_draft
from foredraft.core.errors import CheckpointError, OutputError, UserError
from foredraft.core.files import write_json
from foredraft.core.protocols import Drafter, Speaker
from foredraft.select.adaptive import AdaptiveDrafter, Portfolio
from foredraft.select.block_costs import BlockCosts
from foredraft.select.policies import read_policy

_SCHEMA = 3


@dataclass(frozen=True, slots=True)
class Saved:
    """What a selection rests on.

    Attributes:
        target, target_fingerprint: For whom it was made.
        specs: Of the drafters, by name.
        digests: Of the draft folders that each spec names; empty where it names none.
        lengths: Draft lengths.
        policy: As `read_policy` takes it.
        costs: By the number of requests decoded together; see BlockCosts.to_json.
        target_bytes: Memory of the target; 0 where it is not known.
    """

    target: str
    target_fingerprint: str
    specs: Mapping[str, str]
    digests: Mapping[str, str]
    lengths: Sequence[int]
    policy: str
    costs: Mapping[str, Mapping[str, Any]]
    target_bytes: int = 0

    @staticmethod
    def of(
        speaker: Speaker,
        specs: Mapping[str, str],
        lengths: Sequence[int],
        policy: str,
        costs: Mapping[int, BlockCosts],
        target_bytes: int = 0,
    ) -> "Saved":
        """Return what is saved; draft folders are read for their digests.

        Raises:
            CheckpointError: a draft was changed since it was written.
        """
        return Saved(
            speaker.name,
            speaker.fingerprint,
            dict(specs),
            {name: _digest(spec) for name, spec in specs.items()},
            list(lengths),
            policy,
            {str(requests): one.to_json() for requests, one in costs.items()},
            target_bytes,
        )


def require_free(path: Path) -> None:
    """Refuse a file that is there already, or whose name would not say what it is.

    Raises:
        OutputError: it is, or does not end in .json.
    """
    if path.suffix != ".json":
        raise OutputError(f"{path}: a saved selection is known by the end of its name: name {path}.json, say.")
    if path.exists():
        raise OutputError(f"{path} exists already and is never overwritten: name another file.")


def save_selection(path: Path, saved: Saved) -> None:
    """Write a selection, whole or not at all.

    Raises:
        OutputError: see require_free.
    """
    require_free(path)
    write_json(path, {"schema": _SCHEMA, **asdict(saved)})


def load_selection(path: Path, target: Speaker, load: Callable[[str], Drafter]) -> AdaptiveDrafter:
    """Return the adaptive drafter of a saved selection.

    Args:
        load: Loads a drafter by its spec.

    Raises:
        CheckpointError: the file is no selection, or a drafter of it moved or changed.
        UserError: it was made for another target.
    """
    saved = _read(path)
    if saved.target_fingerprint != target.fingerprint:
        raise UserError(
            f"{path} was chosen for {saved.target} ({saved.target_fingerprint}), the target is {target.name} "
            f"({target.fingerprint}): its costs and drafters are another's. Run foredraft select --simulate again."
        )
    for name, spec in saved.specs.items():
        found = _digest(spec)
        if saved.digests[name] and not found:
            raise CheckpointError(
                f"{path}: the drafter {name} is not at {spec} any more: move it back, or choose again."
            )
        if found != saved.digests[name]:
            raise CheckpointError(
                f"{path}: the drafter {name} at {spec} is {found}, chosen was {saved.digests[name]}: it was made anew. "
                "Choose again, since acceptance and costs may differ."
            )
    costs = _costs(path, saved)
    drafters = {name: load(spec) for name, spec in saved.specs.items()}
    policy, lengths = read_policy(saved.policy), tuple(saved.lengths)
    return AdaptiveDrafter(Portfolio(drafters, lengths, costs, policy, target_bytes=saved.target_bytes))


def _digest(spec: str) -> str:
    """Return the digests of the draft folders that a spec names, ways of drafting included; empty without any."""
    named = sorted({spec, *re.split(r"[+:,=|]", spec)} - {""})
    return "+".join(verify_draft(Path(part)).digest for part in named if (Path(part) / MANIFEST).is_file())


def _costs(path: Path, saved: Saved) -> dict[int, BlockCosts]:
    try:
        return {int(requests): BlockCosts.from_json(one) for requests, one in saved.costs.items()}
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise CheckpointError(f"{path} holds costs that are none ({error}): choose again.") from error


def _read(path: Path) -> Saved:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != _SCHEMA:
            raise CheckpointError(f"{path} is of another version: choose again with this one.")
        return Saved(**data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no selection ({error}): foredraft select --simulate --out writes one."
        ) from error
