"""A point in a training from which it goes on exactly: weights, optimizer, and what was seen on the way."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.core.errors import CheckpointError
from foredraft.core.files import whole_file
from foredraft.distill.validation import Validated

_FILE = "resume.safetensors"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One optimizer step.

    Attributes:
        positions: Answer positions trained on so far, this step's included.
        seconds: Training time so far, interruptions left out.
        loss: Mean over the step's positions, before its update.
        acceptance: Mean of sum min(target, draft) over events, an upper bound of expected_acceptance on
            the step's own text.
        learning_rate: Of this step.
        gradient_norm: Before it was clipped.
    """

    positions: int
    seconds: float
    loss: float
    acceptance: float
    learning_rate: float
    gradient_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollback:
    """A step that failed: earlier weights came back, the rate was halved.

    Attributes:
        step: The step that failed; its text was skipped.
        to_step: The step whose weights came back.
        rate_factor: What learning rates are multiplied by from here on.
        reason: "not finite", of a loss or gradient, or "too high", of losses that stayed far above their minimum.
    """

    step: int
    to_step: int
    rate_factor: float
    reason: str = "not finite"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Everything that the rest of a training depends on, beside its inputs.

    Attributes:
        step: Steps done.
        tensors: Trained weights, the best of them so far and optimizer state, by name; never changed afterwards.
        curve, rollbacks, validations: So far.
    """

    step: int
    tensors: Mapping[str, Float[Tensor, "..."]]
    curve: tuple[CurvePoint, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    validations: tuple[Validated, ...] = ()


def forget_points(folder: Path) -> None:
    """Remove the points of a training whose draft is saved; nothing else may be in the folder."""
    (folder / _FILE).unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()


def save_point(point: ResumePoint, folder: Path, key: str) -> None:
    """Replace the point in `folder`, whole or not at all; `key` identifies the training's inputs.

    Raises:
        OutputError: the disk is full.
    """
    state = {
        "step": point.step,
        "curve": [asdict(entry) for entry in point.curve],
        "rollbacks": [asdict(entry) for entry in point.rollbacks],
        "validations": [asdict(entry) for entry in point.validations],
    }
    with whole_file(folder / _FILE) as partial:
        save_file(dict(point.tensors), partial, metadata={"key": key, "state": json.dumps(state)})


def load_point(folder: Path, key: str) -> ResumePoint | None:
    """Return the point in `folder`, or None where there is none.

    Raises:
        CheckpointError: it belongs to another training, or cannot be read.
    """
    file = folder / _FILE
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata()
            if metadata["key"] != key:
                raise CheckpointError(
                    f"{file} belongs to training {metadata['key']}, of another draft, trace or settings; this "
                    f"one is {key}. Delete it, or name another folder."
                )
            state = json.loads(metadata["state"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Delete it to train from the start.") from error
    return ResumePoint(
        state["step"],
        tensors,
        tuple(CurvePoint(**entry) for entry in state["curve"]),
        tuple(Rollback(**entry) for entry in state["rollbacks"]),
        tuple(Validated(**entry) for entry in state["validations"]),
    )
