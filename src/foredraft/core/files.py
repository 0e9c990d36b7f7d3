"""Files that are written whole or not at all, and folders that are never overwritten."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import BufferedWriter
from pathlib import Path
from typing import Any

from foredraft.core.errors import ForedraftError, OutputError

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two writers apart there
    fcntl = None  # type: ignore[assignment]

# Folders that the work in hand has claimed and does not write yet; threads beside it have claimed none of them.
_claims: ContextVar[frozenset[Path]] = ContextVar("claims", default=frozenset())

_UNWRITABLE = (errno.EACCES, errno.EROFS, errno.EPERM, errno.EFBIG, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write; it takes the place of `path` when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            _flush(partial)
            os.replace(partial, path)
    finally:
        with suppress(OSError):  # a read-only file system refuses this too
            partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `path` when the block ends without an error.

    Raises:
        OutputError: `path` exists and is not an empty folder, another process writes it, or the disk is full.
    """
    claims, own = _claims.get(), {path.absolute()}
    with _claiming(claims - own) if own <= claims else _only_writer(path):
        yield from _whole_folder(path)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the right to write a new folder while what goes into it is made; whole_folder inside then writes under it.

    Raises:
        OutputError: `path` exists and is not an empty folder, or another process holds or writes it.
    """
    with _only_writer(path), _claiming(_claims.get() | {path.absolute()}):
        refuse_existing(path)
        yield


def refuse_existing(path: Path) -> None:
    """Raise an OutputError where whole_folder would: ask before long work, not behind it."""
    try:
        taken = path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))
    except OSError as error:
        raise _unwritable(path, error.errno or 0) from error
    if taken:
        raise OutputError(f"{path} exists already and is never overwritten: name another folder.")


def _whole_folder(path: Path) -> Iterator[Path]:
    refuse_existing(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _explaining(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    _flush(file)
            os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; keys keep their order."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Add whole lines to a text file; a last line that was cut off by a kill is removed first."""
    with _explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(0)
            whole = end if end == 0 else file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.write("".join(f"{line}\n" for line in lines).encode())


@contextmanager
def _claiming(paths: frozenset[Path]) -> Iterator[None]:
    before = _claims.set(paths)
    try:
        yield
    finally:
        _claims.reset(before)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Hold the right to write `path`. The system gives it back when the process ends, however it does."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        with _explaining(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("wb")
    except OSError as error:
        raise _unwritable(path, error.errno or 0) from error
    with file:
        if not _taken(file, lock):
            raise OutputError(f"{path} is being written by another process: wait for it, or name another folder.")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _taken(file: BufferedWriter, lock: Path) -> bool:
    """Return whether this process got the lock, in a file that no other has deleted since it was opened.

    A file system that knows no locks, as some of networks, keeps nobody apart: all get it.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_ino == lock.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return True


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raise an OutputError for what says that the disk does not take `path`; other errors go on as they are."""
    try:
        yield
    except ForedraftError:
        raise
    except Exception as error:  # tokenizers has no kind of its own for a full disk
        number = _number(error)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"No space left on the disk while writing {path}. Free some and run the same command again."
            ) from error
        if number in _UNWRITABLE:
            raise _unwritable(path, number) from error
        raise


def _unwritable(path: Path, number: int) -> OutputError:
    return OutputError(f"{path} cannot be written: {os.strerror(number)}. Name another folder.")


def _number(error: Exception) -> int:
    """Return the system's number of an error; 0 where there is none.

    safetensors and tokenizers tell it in their message only, numpy of a file cut short not even there.
    """
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        return errno.ENOSPC
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else 0
