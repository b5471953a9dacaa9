import asyncio
import time

from skyrl.train.utils.utils import Timer


def update(timings):
    with Timer("policy_train", timings):
        time.sleep(0.012)


async def main():
    for _ in range(4):
        timings = {}
        with Timer("step", timings):
            async with Timer("wait_for_generation_buffer", timings):
                await asyncio.sleep(0.01)
            with Timer("run_training", timings):
                with Timer("compute_advantages_and_returns", timings):
                    time.sleep(0.003)
                with Timer("train_critic_and_policy", timings):
                    await asyncio.to_thread(update, timings)
            with Timer("sync_weights", timings):
                time.sleep(0.003)
        assert {"step", "policy_train"} <= timings.keys()


asyncio.run(main())
