"""A harvest into an object store that is killed at any moment, also between the upload of rows and their commit."""

import os
import random
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

import gaff

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
obstore = pytest.importorskip("obstore")
server = pytest.importorskip("moto.server")

# The work begins when a line comes on standard input, so that kills fall into it and not into the imports.
PROGRAM = """
import sys
import torch
import gaff
from test_harvest import loader, net

torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
data = loader(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
gaff.harvest(net(), data, "0", "1", out=sys.argv[1], labels={"target": 1}, shard=4)
"""


@pytest.fixture
def bucket(monkeypatch):
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    endpoint = f"http://127.0.0.1:{running.get_host_and_port()[1]}"
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "ENDPOINT_URL": endpoint,
                        "ALLOW_HTTP": "true", "REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    yield "s3://bucket"
    running.stop()


def begun(url):
    there = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), os.path.dirname(gaff.__path__[0])])
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROGRAM, url], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": there})  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.close()
    return child


def content(url):
    store = obstore.store.from_url(url)
    names = [one["path"] for page in store.list() for one in page if not one["path"].startswith("order")]
    return {name: bytes(store.get(name).bytes()) for name in names}


def test_kills(bucket):
    assert begun(f"{bucket}/whole").wait(100) == 0
    whole = content(f"{bucket}/whole")
    drawn, kills = random.Random(5), 0
    for number in range(3):
        url, known = f"{bucket}/{number}", {}
        for _ in range(4):
            child = begun(url)
            time.sleep(drawn.uniform(0, 0.6))
            os.kill(child.pid, signal.SIGKILL)
            kills += child.wait(100) == -signal.SIGKILL
            there = content(url)
            if "harvest.json" in there:
                assert gaff.load(url).check() == []
            committed = {name: one for name, one in there.items() if name.endswith("shard.json")}
            assert all(committed[name] == one for name, one in known.items())
            known = committed
        assert begun(url).wait(100) == 0
        assert {**content(url), "harvest.json": b""} == {**whole, "harvest.json": b""}
    assert kills >= 6
