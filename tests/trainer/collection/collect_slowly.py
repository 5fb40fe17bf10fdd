"""A collection in a process of its own, for tests that kill it: `collect_slowly.py DIRECTORY NUM_PROBLEMS`.

Two samples of each problem, eight episodes at once, 20 ms per turn.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.trainer.collection.hosts import NUM_TURNS, open_slow_host
from trainer.collection.driver import Collection
from trainer.collection.local import LocalExecutor
from trainer.collection.store import EpisodeStore
from trainer.config import CollectConfig
from trainer.episodes.episode import Problem


async def main(directory: Path, num_problems: int) -> None:
    problems = [Problem(f"p{index}", "Count.", str(NUM_TURNS - 1)) for index in range(num_problems)]
    with EpisodeStore(directory / "store", {}) as store:
        async with (
            open_slow_host(0.02, directory / "started") as run_episode,
            LocalExecutor(run_episode, 8) as executor,
        ):
            status = await Collection(store, executor, problems, CollectConfig(samples_per_problem=2)).run()
    print(status.stored_before + status.done)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
