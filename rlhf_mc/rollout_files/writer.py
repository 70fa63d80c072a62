"""One thread that writes while the caller trains, one job at a time; what goes wrong in it waits for the caller to ask."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class BackgroundWriter:
    """Runs one job in the background; the thread starts with the first. Use as a context manager.

    Left by an error, it waits for the job, and adds a note to that error where the job failed too.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._job: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failed = self.wait()
        self._pool.shutdown()
        if failed is not None:
            if error is None:
                raise failed
            error.add_note(f"the last job in the background failed too: {failed}")

    def submit(self, job: Callable[[], None]) -> None:
        """Starts `job`. RuntimeError where the outcome of the last one was not asked for: its error would be lost."""
        if self._job is not None:
            raise RuntimeError("the last job was not waited for")
        self._job = self._pool.submit(job)

    def wait(self) -> BaseException | None:
        """Waits for the job, if there is one, and gives its error, once. No collective: agree on it before raising."""
        job, self._job = self._job, None
        return None if job is None else job.exception()
