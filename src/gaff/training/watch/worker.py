"""Work that is done off the training thread, in order, and never waited for.

One thread, and not a pool: jobs touch the judge and the recorder, which are made for one thread, and their order is
that of the steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

_MOST = 256  # jobs that may wait; further ones are dropped and counted


class Worker:
    """Does jobs one after the other on a thread of its own, which is started by the first and ends with ``stop``.

    A job that raises is given to ``failed``, on that thread. ``dropped``: jobs that were not taken, since too many
    waited. ``spent_s``: the processor time of the thread, which holds the interpreter back from the training thread.
    The thread is a daemon: it does not keep the process from ending.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.spent_s = 0.0

    def put(self, job: Callable[[], None], *, is_vital: bool = True) -> None:
        """Hand over a job; returns at once. One that is not vital is dropped, and counted, where too many wait."""
        if not is_vital and self._jobs.qsize() >= _MOST:
            self.dropped += 1
            return
        self._jobs.put(job)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="gaff", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending: nobody is held up any more
                self._thread = None
                self._drain()

    def stop(self) -> None:
        """Wait until all jobs are done, and end the thread; the next job starts another."""
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            self._jobs.put(None)
            thread.join()
        self._thread = None
        self._drain()

    def abandon(self) -> None:
        """Forget thread and jobs, in a forked child: the thread is not there, and its jobs are the parent's."""
        self._thread = None
        self._jobs = SimpleQueue()

    def _work(self) -> None:
        """The thread: do jobs until None comes, and add up the processor time that they take."""
        began = time.thread_time()
        while (job := self._jobs.get()) is not None:
            self._do(job)
            now = time.thread_time()
            self.spent_s += now - began
            began = now

    def _drain(self) -> None:
        """Do what was handed over after the thread was told to end, on the thread that asks."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                self._do(job)

    def _do(self, job: Callable[[], None]) -> None:
        """Do one job, and hand what it raises to ``failed``: an error of gaff's own must end nothing of the user's."""
        try:
            job()
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            self._failed(error)
