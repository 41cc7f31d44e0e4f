"""One rank under mpiexec: `python -m a2a.cli.rank_process JOB`, where JOB is what `ranks.run_ranks` has pickled."""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from a2a.cli.ranks import join, leave
from a2a.config import launch


def main() -> None:
    work, options, lines = pickle.loads(Path(sys.argv[1]).read_bytes())
    started = launch()
    join(started)
    with Path(lines).open("a") as file:

        def emit(message: dict[str, Any]) -> None:
            if started.rank == 0:
                file.write(json.dumps(message) + "\n")
                file.flush()

        try:
            work(options, emit)
        except Exception as error:
            told = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            Path(f"{lines}.rank{started.rank}").write_text(told)  # stderr may be lost when MPI aborts
            _abort()
    leave()


def _abort() -> None:
    """End the other ranks too: they may be waiting for this one, and MPI_Finalize would wait for them."""
    try:
        from mpi4py import MPI
    except ImportError:
        sys.exit(1)
    MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main()
