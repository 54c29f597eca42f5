"""The thread on which the watch does its work: whatever a signal handler of the program raises, it ends and is found ended."""

import signal
import threading

import pytest

from gaff.training.watch.worker import Worker


class TimeIsUp(Exception):
    pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come while something is freed
def test_what_a_signal_handler_raises_in_the_middle_leaves_nobody_waiting():
    """An exception inside Python's own ``Thread.start``, ``is_alive`` or ``join`` may leave its lock taken for good."""
    armed = []

    def stop(*_):
        if armed:
            armed.clear()
            raise TimeIsUp

    done, failures, reached = [], [], 0
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for trial in range(400):
            worker = Worker(failures.append)
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.000003 * (trial % 97))
                while armed:
                    worker.put(lambda: done.append(None))
                    worker.stop()
            except TimeIsUp:
                reached += 1
            ends = threading.Thread(target=worker.stop, daemon=True)
            ends.start()
            ends.join(20)
            assert not ends.is_alive(), f"it waits for ever: trial {trial}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(
        type(one) is TimeIsUp for one in failures
    )  # a job that was done on this thread, told to whoever made the worker
    assert reached > 20
    assert done


def test_jobs_are_done_in_order_by_a_thread_that_the_program_does_not_find():
    seen, threads = [], []
    worker = Worker(seen.append)
    for number in range(100):
        worker.put(lambda number=number: seen.append(number))
    worker.put(lambda: threads.extend(threading.enumerate()))
    worker.put(threading.current_thread)  # lists a stand-in
    worker.stop()
    assert seen == list(range(100))
    assert [one.name for one in threads] == [one.name for one in threading.enumerate()]
    worker.put(lambda: seen.append("again"))  # starts another
    worker.stop()
    assert seen[-1] == "again"
