"""The command line, `qsub` or `python -m qsub`; see docs/command-line.md."""

import sys


def main() -> None:
    """Run it and exit."""
    try:
        import click  # noqa: F401
        import safetensors  # noqa: F401
        import tqdm  # noqa: F401
    except ImportError as error:
        print(f"qsub: the command line needs {error.name}: pip install 'qsub[cli]'", file=sys.stderr)
        sys.exit(1)
    from qsub.cli.app import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
