"""Work that is done off the training thread, in order, and never waited for.

One thread, and not a pool: jobs touch the judge and the recorder, which are made for one thread, and their order is
that of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import get_ident

from gaff.compat.threads import UnlistedThread

_MOST = 256  # jobs that may wait; looks beyond them are dropped and counted
_MOST_BYTES = 1 << 26  # that looks which wait may hold


class Worker:
    """Does jobs one after the other on a thread of its own, which is started by the first and ends with ``stop``.

    A job that raises is given to ``failed``, on that thread. ``dropped``: looks that were not taken, since too many
    waited. The processor time of the thread, which holds the interpreter back from the training thread: ``looks_s`` of
    looks, ``others_s`` of all else. The thread is a daemon, which does not keep the process from ending, and is not
    listed among those of the program.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._jobs: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()
        self._thread: UnlistedThread | None = None
        self._taken = self._done = 0  # bytes of all looks
        self.dropped = 0
        self.looks_s = 0.0
        self.others_s = 0.0

    def put(self, job: Callable[[], None]) -> None:
        """Hand over a job; returns at once."""
        self._put(job, 0)

    def put_look(self, job: Callable[[], None], size: int) -> None:
        """Hand over a look that holds ``size`` bytes; dropped, and counted, where too many wait or hold too much.

        One is always taken, however large it is. Returns at once.
        """
        waiting = self._taken - self._done
        if self._jobs.qsize() >= _MOST or (waiting and waiting + size > _MOST_BYTES):
            self.dropped += 1
            return
        self._taken += size
        self._put(job, size)

    def _put(self, job: Callable[[], None], size: int) -> None:
        self._jobs.put((job, size))
        if self._thread is None or self._thread.is_over or self._thread.ident is None:
            self._thread = UnlistedThread(self._work)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending: nobody is held up any more
                self._thread = None
                self._drain()

    def stop(self) -> None:
        """Wait until all jobs are done, and end the thread; the next job starts another."""
        thread = self._thread
        if thread is not None and not thread.is_over and thread.ident not in (None, get_ident()):
            self._jobs.put(None)
            thread.wait()
        self._thread = None
        self._drain()

    def abandon(self) -> None:
        """Forget thread and jobs, in a forked child: the thread is not there, and its jobs are the parent's."""
        self._thread = None
        self._jobs = SimpleQueue()
        self._taken = self._done

    def _work(self, thread: UnlistedThread) -> None:
        """The thread: do jobs until None comes, and add up the processor time that they take.

        Nothing where another has been started since: what a signal handler raised may have hidden that this one was.
        """
        began = time.thread_time()
        while self._thread is thread and (one := self._jobs.get()) is not None:
            self._do(*one)
            now = time.thread_time()
            if one[1]:
                self.looks_s += now - began
            else:
                self.others_s += now - began
            began = now

    def _drain(self) -> None:
        """Do what was handed over after the thread was told to end, on the thread that asks."""
        while True:
            try:
                one = self._jobs.get_nowait()
            except Empty:
                return
            if one is not None:
                self._do(*one)

    def _do(self, job: Callable[[], None], size: int) -> None:
        """Do one job, and hand what it raises to ``failed``: an error of gaff's own must end nothing of the user's."""
        try:
            job()
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            self._failed(error)
        self._done += size
