"""The browser of the tests and of ``make shots``: the machine's own Chromium, or the one that ``page/`` gets from npm."""

import fcntl
import functools
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "page"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"]
WITHOUT_HELPERS = ["--headless=shell", "--no-zygote"]  # what a binary without its helper files needs


@functools.lru_cache(maxsize=1)
def executable():
    """The path of a Chromium, or None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    if shutil.which("node") and (PAGE / "node_modules/@sparticuz/chromium").is_dir():
        with open(Path(tempfile.gettempdir()) / "gaff-chromium.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one takes it out of its package
            told = subprocess.run(["node", "chromium.mjs"], cwd=PAGE, check=False, capture_output=True, text=True)
        return told.stdout.strip() or None
    return None


@contextmanager
def opened():
    """A browser of Playwright, closed at the end."""
    from playwright.sync_api import sync_playwright

    path = executable()
    more = WITHOUT_HELPERS if path and path.startswith("/tmp/") else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS + more, env={"HOME": "/tmp"})
        yield browser
        browser.close()
