"""The command line: `a2a CMD`, or `python -m a2a CMD`.

Commands are thin: they parse, call and show. What they need is imported when they run, so that `a2a --help` and
`a2a doctor` work where torch or the compiled library does not.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line; the entry point of the `a2a` script."""
    from a2a.cli.app import run

    run()
