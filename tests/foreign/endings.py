"""Ways in which a program that trains ends, or meets the system around it: ``python endings.py NAME`` runs one,
``python endings.py --every FOLDER`` all of them, see ``every``.

Each prints the same and ends with the same code, bare and watched.
"""

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import torch
from torch import nn

ENDINGS = {}


def ending(function):
    ENDINGS[function.__name__] = function
    return function


def train(steps=5, model=None, tell=print):
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
    tell("trained", loss.item(), flush=True)
    return model


@ending
def a_return():
    train()


@ending
def exit_with_a_number():
    train()
    sys.exit(3)


@ending
def exit_with_a_large_number():
    train()
    sys.exit(258)


@ending
def exit_with_a_text():
    train()
    sys.exit("sorry")


@ending
def exit_at_once():
    train()
    os._exit(5)


@ending
def exit_in_a_step():
    model = nn.Linear(4, 1)
    model.register_forward_hook(lambda *_: sys.exit(6))
    train(model=model)


@ending
def exit_in_a_thread():
    train()
    thread = threading.Thread(target=sys.exit, args=(9,))
    thread.start()
    thread.join()
    print("on", flush=True)


@ending
def exit_at_once_in_a_thread():
    train()
    threading.Thread(target=os._exit, args=(8,)).start()
    time.sleep(60)


@ending
def an_exception():
    train()
    raise ValueError("mine")


@ending
def an_exception_in_a_step():
    model = nn.Linear(4, 1)
    model.register_full_backward_hook(lambda *_: {}["no"])
    train(model=model)


@ending
def an_exception_in_a_thread():
    threading.excepthook = lambda args: print("hook", args.exc_type.__name__, flush=True)
    train()
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


@ending
def an_exception_that_a_hook_tells():
    sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, error, flush=True)
    train()
    raise ValueError("mine")


@ending
def an_interrupt():
    train()
    raise KeyboardInterrupt


@ending
def recursion_without_end():
    def call():
        return call()

    train()
    call()


def by(number):
    def end():
        train()
        os.kill(os.getpid(), number)
        time.sleep(60)

    return end


for _name in ("SIGTERM", "SIGINT", "SIGKILL", "SIGHUP", "SIGABRT", "SIGQUIT", "SIGSEGV", "SIGALRM", "SIGUSR2"):
    ENDINGS[f"by_{_name}"] = by(getattr(signal, _name))


@ending
def by_a_signal_in_a_step():
    model = nn.Linear(4, 1)
    model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    train(model=model)


@ending
def a_crash():
    train()
    ctypes.string_at(0)


@ending
def handlers_of_its_own():
    told = []
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(getattr(signal, name), lambda number, frame: told.append(number))
    train()
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.01)
    print(told)
    sys.exit(7)


@ending
def an_alarm():
    signal.signal(signal.SIGALRM, lambda number, frame: sys.exit(4))
    train()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True:
        train(1)
        os.write(1, b"")
        break
    time.sleep(60)


@ending
def functions_at_exit():
    atexit.register(lambda: train(2))
    model = train()
    atexit.register(lambda: print("exit", torch.randn(1).item(), model(torch.ones(1, 4)).shape, flush=True))


@ending
def a_thread_that_goes_on():
    threading.Thread(target=lambda: (time.sleep(0.2), train())).start()
    print("main is done", flush=True)


@ending
def a_daemon_that_waits():
    train()
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@ending
def threads_that_train():
    threads = [threading.Thread(target=train) for _ in range(1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    train()


@ending
def all_threads_that_are_there_are_waited_for():
    train()
    for one in threading.enumerate():
        if one is not threading.main_thread():
            one.join(5)
            print("was there:", one.name, one.is_alive(), flush=True)
    print(threading.active_count(), flush=True)


@ending
def a_fork():
    train()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        train(2)
        os._exit(11)
    print("child", os.waitpid(child, 0)[1] >> 8, flush=True)
    train(2)


@ending
def a_fork_that_returns():
    train()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    train(2)


@ending
def a_fork_in_a_step():
    def fork(*_):
        child = os.fork()
        if child == 0:
            os._exit(3)
        print(os.waitpid(child, 0)[1] >> 8, flush=True)

    model = nn.Linear(4, 1)
    model.register_forward_hook(fork)
    train(2, model)


def _square(x):
    return (torch.full((2,), float(x)) ** 2).sum().item()


@ending
def pools():
    train()
    for how in ("fork", "spawn"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(how, pool.map(_square, [1, 2]), flush=True)


@ending
def loaders():
    data = torch.utils.data.DataLoader(list(range(6)), batch_size=3, num_workers=1)
    train()
    print([one.tolist() for one in data], flush=True)


@ending
def a_process_that_fails():
    train()
    done = subprocess.run([sys.executable, "-c", "import torch, sys; print(torch.ones(1)); sys.exit(3)"], check=False)
    print(done.returncode, flush=True)


@ending
def another_program_in_its_place():
    train()
    os.execv(sys.executable, [sys.executable, "-c", "import sys; print('other'); sys.exit(12)"])


@ending
def a_closed_output():
    train()
    os.close(1)


@ending
def a_closed_error():
    train()
    os.close(2)
    sys.stderr = None
    train(2)


@ending
def no_output_at_all():
    sys.stdout = sys.stderr = None
    train()
    sys.exit(2)


@ending
def every_file_is_closed():
    train()
    os.closerange(3, 256)
    train(2)


@ending
def numbers_of_files():
    train()
    os.close(0)
    print(os.open(os.devnull, os.O_RDONLY), flush=True)


@ending
def another_folder():
    train()
    os.chdir("/")
    train(2)


@ending
def no_room_for_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    train()


@ending
def few_open_files():
    train()
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    train(2)


@ending
def warnings_and_logs():
    logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
    train()
    logging.getLogger("mine").info("told")
    print([one for one in logging.root.manager.loggerDict if one.startswith("gaff")], flush=True)


@ending
def what_is_to_be_seen():
    train()
    print(sys.argv, __name__, sys.flags.interactive, sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
    print(threading.current_thread().name, gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit())
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM))
    print(sys.gettrace(), sys.getprofile(), sys.excepthook is sys.__excepthook__, threading.excepthook.__name__)
    print(
        sys.stdout is sys.__stdout__,
        sys.stderr is sys.__stderr__,
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        flush=True,
    )


def every(folder):
    """Fork a child for each ending, bare and watched, with its outputs in files; in a child: what it has to run.

    Importing torch once for all takes a fraction of the time. A child begins to watch as a process of ``gaff watch`` does
    once it has imported torch. In this process: how all of them ended, as JSON in ``ended.json``; returns None.
    """
    import gaff.training.watch.launched as launched

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:  # as a job in the background inherits it, and would sleep on
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    train(1, tell=lambda *_, **__: None)  # the first step imports more than torch itself
    gc.collect()
    gc.freeze()  # or each child would copy all of that memory, to look through it as it ends
    told = {"quiet": True, "plain": False, "every": 1}
    ended = {}
    for name in sys.argv[3:] or ENDINGS:
        for how in ("bare", "watched"):
            child = os.fork()
            if child == 0:
                for number, stream in ((1, "out"), (2, "err")):
                    file = os.open(f"{folder}/{name}.{how}.{stream}", os.O_WRONLY | os.O_CREAT, 0o644)
                    os.dup2(file, number)
                    os.close(file)
                sys.argv[1:] = [name]
                if how == "watched":
                    os.mkdir(f"{folder}/{name}")
                    os.environ["GAFF_WATCH"] = json.dumps({**told, "out": f"{folder}/{name}"})
                    launched.start()
                return ENDINGS[name]
            ended[f"{name}.{how}"] = _ended(child)
    with open(f"{folder}/ended.json", "w") as file:
        json.dump(ended, file)
    return None


def _ended(child):
    """The status of a child that has ended; it is killed after a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "did not end"


if __name__ == "__main__":
    run = every(sys.argv[2]) if sys.argv[1] == "--every" else ENDINGS[sys.argv[1]]
    if run is not None:
        torch.manual_seed(0)
        run()
