"""Commands of `qsub`, and what they exit with."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from qsub import __version__
from qsub.cli import commands
from qsub.cli.stopping import Stopping, Terminated
from qsub.streaming.select import PatternError
from qsub.streaming.target import NotWritten

SUCCESS, FAILED, USAGE, MISSING, BAD_INPUT, NOT_WRITTEN = 0, 1, 2, 3, 4, 5
INTERRUPTED, TERMINATED, BROKEN_PIPE = 130, 143, 141  # 128 and the number of the signal

EPILOG = """\b
Exit codes:
  0    done
  1    a package is missing, stdout can't be written, or qsub itself failed
  2    wrong arguments
  3    SRC, or a file that belongs to it, is missing or can't be read
  4    SRC is damaged, or holds nothing that the command can convert (int8 already, or of another method)
  5    DST exists or can't be written (disk full, no permission)
  130  interrupted by Ctrl-C; 143 by SIGTERM

On any failure to convert there is no DST."""

_PATH: Any = click.Path(readable=False, path_type=Path)  # what can't be read is told by its exit code
_SOURCE = click.argument("source", metavar="SRC", type=_PATH)
_TARGET = click.argument("target", metavar="DST", type=_PATH)
_PATTERNS: dict[str, Any] = {"multiple": True, "metavar": "PATTERN"}


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def qsub() -> None:
    """Convert model files to int8 weights and back, a few rows at a time."""


@qsub.command()
@_SOURCE
@_TARGET
@click.option(
    "--only", help="Quantize only layers with such a name (*, ? and [] as in a shell); repeatable.", **_PATTERNS
)
@click.option("--skip", help="Leave layers with such a name in float; repeatable.", **_PATTERNS)
@click.option("--activations", type=click.Choice(["int8"]), help="Store that inputs are quantized on the fly.")
@click.option("--outlier-threshold", type=float, help="With --activations int8: input columns over it stay float.")
@click.option("--dry-run", is_flag=True, help="List what would be done to each tensor, and write nothing.")
def quantize(source: Path, target: Path, **options: Any) -> None:
    """Write SRC with the weights of Linear layers in int8 to DST.

    SRC is a Hugging Face folder, a .safetensors file or a *.safetensors.index.json; DST becomes the same. It is loaded
    by qsub.load_file and, a folder, by transformers' from_pretrained.

    In a Hugging Face folder the model of config.json says which weights are those of nn.Linear. Without one, those
    are float matrices called *.weight, unless their layer is called an embedding; --only replaces that guess.
    """
    commands.quantize(source, target, **options)


@qsub.command()
@_SOURCE
@_TARGET
def dequantize(source: Path, target: Path) -> None:
    """Write SRC with all quantized tensors in float to DST, as any reader of safetensors reads it."""
    commands.dequantize(source, target)


@qsub.command()
@click.argument("file", type=_PATH)
@click.option("--original", type=_PATH, help="The float model: adds each layer's SQNR in dB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(file: Path, original: Path | None, as_json: bool) -> None:
    """List the tensors of FILE (or a folder or index): code, shape and bytes."""
    commands.inspect(file, original, as_json)


@qsub.command()
@_SOURCE
@_TARGET
@click.option("--from", "origin", type=click.Choice(["bitsandbytes"]), help="Read its 8-bit layers.")
@click.option("--to", "goal", type=click.Choice(["bitsandbytes"]), help="Write its 8-bit layers.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="That weights read show.")
def convert(source: Path, target: Path, origin: str | None, goal: str | None, dtype: str | None) -> None:
    """Convert SRC from or to the 8-bit layers of bitsandbytes; codes carry over as they are.

    The weights show the dtype of config.json, or float16, if --dtype doesn't say another. A folder keeps the threshold
    that bitsandbytes multiplied with.
    """
    if (origin is None) == (goal is None) or (goal and dtype):
        raise click.UsageError("pass either --from bitsandbytes (with --dtype, if you like) or --to bitsandbytes")
    commands.convert(source, target, origin is not None, dtype)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; errors are one line on stderr.

    Returns:
        The exit code, see EPILOG.
    """
    _open_standard_streams()
    try:
        with Stopping() as stopping:
            # click's own main has other texts and codes
            with qsub.make_context("qsub", list(arguments), obj=stopping) as context:
                qsub.invoke(context)
            sys.stdout.flush()
        return SUCCESS
    except click.exceptions.Exit as done:  # of --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.ClickException as error:
        return _failed(USAGE, f"{error.format_message()} (qsub --help)")
    except PatternError as error:
        return _failed(USAGE, str(error))
    except KeyboardInterrupt:
        return _failed(INTERRUPTED, "interrupted; nothing was written")
    except Terminated:
        return _failed(TERMINATED, "terminated; nothing was written")
    except BrokenPipeError:  # qsub inspect ... | head
        _drop_stdout()
        return BROKEN_PIPE
    except NotWritten as error:
        full = "; it was not written, free some space" if error.errno == errno.ENOSPC else ""
        return _failed(NOT_WRITTEN, _describe(error) + full)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # files have names: it is that of a print
            _drop_stdout()
            return _failed(FAILED, f"stdout: {error.strerror}")
        return _failed(MISSING, _describe(error))
    except (ValueError, ImportError) as error:
        return _failed(BAD_INPUT if isinstance(error, ValueError) else FAILED, str(error))


def _open_standard_streams() -> None:
    """Closed ones lead nowhere: else files that are opened would take their numbers, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))


def _drop_stdout() -> None:
    """What is still to be printed goes nowhere: Python prints it when it exits, and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe(error: OSError) -> str:
    return str(error) if error.errno is None else f"{error.filename}: {error.strerror}"


def _failed(code: int, text: str) -> int:
    print("qsub: " + " ".join(text.split()), file=sys.stderr)
    return code
