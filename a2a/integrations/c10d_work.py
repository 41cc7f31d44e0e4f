"""What backend "a2a" hands to torch as work: finished at once, a2a's own on its way, or several of them as one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work


class Done(Work):
    """Work that was finished when the call returned."""

    def __init__(self) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result([])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def result(self) -> list[Tensor]:
        return []


class Pending(Work):
    """a2a's Work as torch's C++ code knows it."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the call is done; 0 stands for the group's timeout. Raises what the call raised."""
        return bool(self._work.wait(timeout.total_seconds() or None))

    def synchronize(self) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> BaseException | None:
        error: BaseException | None = self._work.exception()
        return error

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future

    def result(self) -> list[Tensor]:
        result: list[Tensor] = self._work.result()
        return result


class Several(Work):
    """Several pieces of work, done when all are."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)  # raises what the call raised
        return True

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]
