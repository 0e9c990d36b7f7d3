"""The command line: parse, call one function, print. Results go to stdout, everything else to stderr.

Heavy imports happen inside the commands, so that help and completion stay instant.
"""

import json
import logging
import os
import sys
from typing import NoReturn

import typer
from rich.logging import RichHandler

from foredraft.commands import making, measuring, running, selecting, shrinking, training, verifying
from foredraft.commands.common import STDERR, escaped
from foredraft.core.errors import ForedraftError

_INTERRUPTED = 130  # typer's status for Ctrl-C

app = typer.Typer(
    help="Make, shrink, measure and choose draft models for speculative decoding.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for part in (running, training, shrinking, making, measuring, verifying, selecting):
    app.add_typer(part.app)


def main() -> None:
    """Run the command line; a foreseen error is one or two lines on stderr and its exit status."""
    _set_up_logging()
    try:
        # Where stdout is for machines, typer leaves wrong command lines to us.
        status = app(standalone_mode="--json" not in sys.argv)
    except SystemExit as ended:
        status = ended.code
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    except ForedraftError as error:
        _fail(str(error), error.exit_status)
    if status == _INTERRUPTED:
        STDERR.print("Interrupted. The same command goes on where it was.")
    raise SystemExit(status or 0)


def _fail(message: str, status: int) -> NoReturn:
    if not _is_helper():
        if "--json" in sys.argv:
            sys.stdout.write(json.dumps({"error": message}) + "\n")
        STDERR.print(f"[bold red]error:[/] {escaped(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(status) from None


def _is_helper() -> bool:
    """Return whether a launcher started this process beside the main one, which alone prints."""
    return os.environ.get("RANK", "0") != "0"


def _set_up_logging() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=STDERR, show_path=False, show_time=False)])
    logging.getLogger("foredraft").setLevel(logging.CRITICAL if _is_helper() else logging.INFO)


if __name__ == "__main__":
    main()
