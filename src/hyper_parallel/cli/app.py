"""Construction of the command-line application, its exit codes, and the display of errors."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from hyper_parallel import __version__
from hyper_parallel.cli import overview
from hyper_parallel.cli.pipes import sink_stream
from hyper_parallel.errors import (
    DISK_ERRORS,
    BadValue,
    HyperParallelError,
    MissingDependency,
    OutputNotWritable,
    PrintableFormatter,
    not_writable,
    printable,
)

_DEFECT_STATUS: Final = 70
"""Exit status of a defect (EX_SOFTWARE of sysexits.h); scripts can tell a defect from a user's mistake."""

_FILE_ERRORS: Final = (
    "EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR", "ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ELOOP",
    "EEXIST", "ENOTEMPTY", "EXDEV", "EMFILE", "ENFILE", "ESTALE", "EBUSY", "ETXTBSY",
)  # fmt: skip
"""Names of error numbers that files, disks and permissions cause; most other OSErrors are defects."""


NoCode = Annotated[
    bool,
    typer.Option("--no-code", help="Reject a recipe that names Python code, without importing that code."),
]
"""Option of every command that reads a recipe and may run code named in the recipe."""
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code in the model directory.")]
"""Option of every command that builds a model from a directory instead of a recipe."""


def build_app(commands: Sequence[Callable[..., None]], groups: Sequence[typer.Typer] = ()) -> typer.Typer:
    """Return a typer application with these commands, and with a command with subcommands per group."""
    app = typer.Typer(
        name="hyper-parallel",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(help=overview.ABOUT)(_root)
    for command in commands:
        app.command()(command)
    for group in groups:
        app.add_typer(group, short_help=group.info.help)
    for info in (c for a in (app, *groups) for c in a.registered_commands):
        # The whole first paragraph, because typer's list of commands truncates summaries by default.
        info.short_help = " ".join((info.callback.__doc__ or "").partition("\n\n")[0].split())
    return app


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print an object as text on standard output, or with `err` on standard error; `nl` ends the line.

    Control characters are escaped, because the text may contain words from a file.
    """
    typer.echo(printable(str(text)), err=err, nl=nl)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hyper-parallel {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help=overview.VERSION),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=overview.QUIET)] = False,
) -> None:
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(PrintableFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[lines], level=logging.WARNING)
    logging.getLogger("hyper_parallel").setLevel(logging.WARNING if quiet else logging.INFO)


def is_quiet() -> bool:
    """Return whether `--quiet` was given."""
    return logging.getLogger("hyper_parallel").level > logging.INFO


def enable_garbage_collection() -> None:
    """Enable the cyclic garbage collector for objects that are created from now on."""
    gc.freeze()
    gc.enable()


def run(app: typer.Typer) -> None:
    """Run the application on the process's arguments, and exit with its status."""
    # Imports create many permanent objects, which the cyclic garbage collector would scan again and again.
    gc.disable()
    # torch.cuda.is_available would initialize the CUDA driver, and ranks forked later could not use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        app(prog_name="hyper-parallel")
    except HyperParallelError as error:
        fail(error)
    except ModuleNotFoundError as error:
        from hyper_parallel.cli.requirements import EXTRA, REQUIREMENTS

        missing = (error.name or "").partition(".")[0]
        if missing not in {r.name for r in REQUIREMENTS if r.need == "training"}:
            _defect(error)
        fail(
            MissingDependency(
                f"this command needs `{missing}`, which is not installed; planning works without it",
                got=f"no module {missing}",
                hint=f"{Path(sys.executable).name} -m pip install '{EXTRA}'",
            )
        )
    except BrokenPipeError:
        # The pipe is closed. Redirect stdout, or the interpreter reports the error a second time at exit.
        sink_stream(sys.stdout)
        sys.exit(1)
    except OSError as error:
        fail(error_of_file(error))
    except Exception as error:
        _defect(error)
    finally:
        gc.freeze()  # the process ends: skip the final garbage collection


def error_of_file(error: OSError) -> HyperParallelError:
    """Return the coded error for an OSError of a file or disk; any other OSError ends the process as a defect."""
    if error.errno == errno.ENAMETOOLONG:
        return BadValue(
            "a path is longer than the system allows",
            got=f"{error.filename!s:.80}... of {len(str(error.filename))} characters",
            allowed="4,095 bytes, 255 per name",
        )
    if errno.errorcode.get(error.errno or 0, "") not in _FILE_ERRORS:
        _defect(error)
    if error.filename is None:
        if error.errno in DISK_ERRORS and error.errno != errno.EIO:  # reading can also raise EIO
            return OutputNotWritable("the output cannot be written", got=error.strerror, hint="df -h .")
        return OutputNotWritable("a file or stream cannot be opened, read or written", got=error.strerror)
    return not_writable(error, error.filename, "a file cannot be read or written")


def _defect(error: Exception) -> NoReturn:
    """Print the traceback of an unexpected exception with a request to report it, and exit with status 70."""
    traceback.print_exception(error)
    sys.stderr.write(
        f"\ninternal error: {type(error).__name__} in hyper_parallel {__version__}; this is a defect, "
        "please report it with the lines above\n"
    )
    sys.exit(_DEFECT_STATUS)


def fail(error: HyperParallelError) -> NoReturn:
    """Print a coded error on stderr and exit with status 1."""
    text = error.render()
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        head, _, rest = text.partition(":")
        text = f"\x1b[1;31m{head}\x1b[0m:{rest}".replace("\nhint:", "\n\x1b[1;36mhint\x1b[0m:", 1)
    with suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # otherwise the interpreter exits with another status
            sink_stream(stream)
    sys.exit(1)
