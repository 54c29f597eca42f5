"""A harvest of 1e12 tokens on paper: what is stored, what it costs, and what failures take away. See docs/scale.md.

Nothing is measured here but arithmetic; the failures are drawn (seeded), a worker's life at a time.
"""

import heapq
import random

TOKENS, WIDTH, BYTES = 1e12, 4096, 2  # of one site, in bfloat16
FLOPS = 4e14  # a second and GPU, sustained, in bfloat16
GPU_DOLLARS, STORE_DOLLARS = 2.5, 0.021  # an hour; a month and GB
MODELS = {"124M, width 768": (124e6, 768), "8B, width 4096": (8e9, 4096), "70B, width 8192": (70e9, 8192)}
SHARD = 2**30  # bytes


def paper():
    print("\n### One site, every token, bfloat16\n")
    heads = ("model", "stored", "GPU-hours", "a second and GPU", "shards of 1 GiB", "$ a month", "$ of GPUs",
             "days of storage that cost as much")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, (parameters, width) in MODELS.items():
        size = TOKENS * width * BYTES
        hours = TOKENS * 2 * parameters / FLOPS / 3600
        dollars, gpus, rate = size / 1e9 * STORE_DOLLARS, hours * GPU_DOLLARS, size / hours / 3600
        cells = (name, f"{size / 1e15:.2f} PB", f"{hours:,.0f}", f"{rate / 1e6:,.0f} MB",
                 f"{size / SHARD / 1e6:.1f} M", f"{dollars:,.0f}", f"{gpus:,.0f}",
                 f"{gpus / dollars * 30:.1f}")  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def reduced():
    print("\n### What is left of 8.19 PB (8B, width 4096)\n\n| kept | size | of it |\n|---|---|---|")
    whole = TOKENS * WIDTH * BYTES
    ways = {
        "every number, bfloat16": WIDTH * BYTES,
        'int8 with a scale a row (`dtype="int8"`)': WIDTH + 4,
        "a projection onto 512 numbers, bfloat16 (`gaff.keep.project(512)`)": 512 * BYTES,
        "the 32 largest with their places (`top=32`)": 32 * (BYTES + 4),
        "one token in a hundred, bfloat16 (`rows=` a function)": WIDTH * BYTES / 100,
        "a recipe for each shard of 131,072 tokens, 200 bytes": 200 / 131_072,
    }
    for name, size in ways.items():
        total = TOKENS * size
        power, unit = next(one for one in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB")) if total >= one[0] / 10)
        print(f"| {name} | {total / power:.2f} {unit} | {total / whole:.3%} |")


def simulated(workers, seconds, shards, hours_between_failures, restart=180.0, seed=0):
    """Seconds until all shards are there, those lost to failures, and shards that were begun more than once."""
    drawn = random.Random(seed)
    mean = hours_between_failures * 3600
    free = [(0.0, drawn.expovariate(1 / mean), worker) for worker in range(workers)]  # when, its next failure, which
    heapq.heapify(free)
    lost, again, left, end = 0.0, 0, shards, 0.0
    while left:
        now, failure, worker = heapq.heappop(free)
        if now + seconds > failure:
            lost += max(0.0, failure - now) + restart
            again += failure > now
            heapq.heappush(free, (max(now, failure) + restart, max(now, failure) + drawn.expovariate(1 / mean), worker))
            continue
        left -= 1
        end = max(end, now + seconds)
        heapq.heappush(free, (now + seconds, failure, worker))
    return end, lost, again


def failures():
    print("\n### 1,000 workers, 100,000 shards, a worker fails every 1,000 hours and takes 3 minutes to come back\n")
    print("| seconds a shard | hours | failures a day | shards begun again | of all work lost |\n|---|---|---|---|---|")
    for seconds in (5, 60, 600):
        end, lost, again = simulated(1000, seconds, 100_000, 1000.0)
        print(f"| {seconds} | {end / 3600:.2f} | {1000 * 24 / 1000:.0f} | {again} | {lost / (1000 * end):.3%} |")


def prices():
    paper()
    reduced()
    failures()


if __name__ == "__main__":
    prices()
