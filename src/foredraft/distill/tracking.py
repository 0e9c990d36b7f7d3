"""Figures of a training sent to an experiment tracker, through accelerate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch

from foredraft.catalog import unknown_name_message
from foredraft.core.errors import MissingExtraError, UnknownNameError
from foredraft.core.processes import processes

_PROJECT = "foredraft"


@runtime_checkable
class Tracker(Protocol):
    """Takes the figures of each step."""

    def log(self, figures: Mapping[str, int | float], step: int) -> None: ...

    def finish(self) -> None: ...


def open_tracker(name: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    """Return what sends figures to the tracker `name`; empty, and in processes beside the main one, to nowhere.

    Args:
        name: As accelerate calls it: tensorboard, wandb, trackio and others.
        folder: Where trackers that write files put them.
        settings: Plain values shown beside the run.

    Raises:
        UnknownNameError: accelerate knows no such tracker.
        MissingExtraError: its package is not installed.
    """
    if not name:
        return _Nowhere()
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    PartialState(cpu=not torch.cuda.is_available())  # Trackers ask it who the main process is.
    if not processes().is_main:
        return _Nowhere()
    known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
    if name not in known:
        raise UnknownNameError(unknown_name_message("tracker", name, known))
    kind = LOGGER_TYPE_TO_CLASS[name]
    if not filter_trackers([name], folder):
        raise MissingExtraError(f"track: {name} needs a package that is not installed: pip install {name}.")
    tracker = kind(_PROJECT, str(folder)) if kind.requires_logging_directory else kind(_PROJECT)
    tracker.start()
    tracker.store_init_configuration(dict(settings))
    return _Accelerate(tracker)


@final
class _Nowhere:
    def log(self, figures: Mapping[str, int | float], step: int) -> None: ...

    def finish(self) -> None: ...


@final
class _Accelerate:
    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def log(self, figures: Mapping[str, int | float], step: int) -> None:
        self._tracker.log(dict(figures), step=step)

    def finish(self) -> None:
        self._tracker.finish()
