"""The command line: parse, call one job, render, exit. No formula lives here."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, NoReturn

import typer

from kvplan import __version__
from kvplan.cli import audit, calibrate, catalogues, check, compare, explain, kernel_bench, simulate, size
from kvplan.cli.options import LightGroup
from kvplan.errors import InputError, KvplanError
from kvplan.text import literal

if TYPE_CHECKING:
    from typer.models import CommandInfo

#: Click's exceptions, whichever Click it is that Typer brings.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
_CLICK_EXCEPTION: type[Exception] = _USAGE_ERROR.__bases__[0]

_INTERRUPTED = 130
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as the shell has it: no verdict was delivered
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS}
#: Options and commands of the contract that come later, so that asking for one gets a true answer.
_LATER = {
    "--report",
    "trace",
}

app = typer.Typer(
    name="kvplan",
    cls=LightGroup,
    epilog="Start with: kvplan size llama-2-13b --seq 4096",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
size.register(app)
simulate.register(app)
compare.register(app)
check.register(app)
audit.register(app)
calibrate.register(app)
explain.register(app)
kernel_bench.register(app)
catalogues.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"kvplan {__version__}\n")
        raise typer.Exit


@app.callback()
def kvplan(
    ctx: typer.Context,
    _version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Memory planner and simulator for LLM serving: what fits, and what real traffic does to the KV cache."""
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit with the contract's code: 0 yes, 1 no, 2 wrong input, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        with suppress(ValueError):  # outside the main thread nobody else's signals are touched
            signal.signal(number, _terminate)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        code = end.signal_code if isinstance(end, _Terminated) else _BROKEN_PIPE
        if isinstance(end, SystemExit) and end.code == 0:  # shell completion ends so
            code = 0
        # The reader of our output may have gone: Typer turns that into SystemExit(1).
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        sys.stderr.write(
            f"kvplan: error: cannot write: {error.strerror}\nmake room, or choose another place\n"
        )
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = InputError.exit_code
    sys.exit(code)


def _application(arguments: Sequence[str]) -> typer.Typer:
    """The application with the command that is asked for alone: Typer takes longer to build all than to run one."""
    asked = _asked(arguments)
    if not asked:
        return app
    alone = copy(app)
    alone.registered_commands = asked
    return alone


def _asked(arguments: Sequence[str]) -> list[CommandInfo]:
    """The command that the first argument names, if there is one."""
    return [command for command in app.registered_commands if command.name in arguments[:1]]


def _run(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        code = _application(arguments)(arguments, prog_name="kvplan", standalone_mode=False)
    except KvplanError as error:
        code = _fail(error, as_json=as_json)
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except _CLICK_EXCEPTION as error:
        code = _fail(_from_click(error, arguments), as_json=as_json)
    if code == _INTERRUPTED:
        sys.stderr.write("kvplan: interrupted\n")
    return code if isinstance(code, int) else 0


class _Terminated(SystemExit):
    """A signal asked the process to end: outputs are taken back on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal_code = 128 + number


def _terminate(number: int, _frame: object) -> NoReturn:
    raise _Terminated(number)


def _from_click(error: Exception, arguments: Sequence[str]) -> InputError:
    """A usage error in our own form."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kvplan"
    if command == "kvplan" and _asked(arguments):
        command = f"kvplan {arguments[0]}"  # the parser of options does not say whose they are
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    asked = re.search(r"No such (?:option|command):? '?([-a-z]+)", message)
    if asked and asked.group(1) in _LATER:
        message = f"not yet supported: {asked.group(1)}"
    return InputError(message.rstrip("."), where=command, hint=f"{command} --help shows the usage")


def _fail(error: KvplanError, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps({"error": error.to_dict()}) + "\n")
    else:
        sys.stderr.write(f"kvplan: error: {literal(str(error))}\n")
        if error.hint:
            sys.stderr.write(f"{literal(error.hint)}\n")
    return error.exit_code
