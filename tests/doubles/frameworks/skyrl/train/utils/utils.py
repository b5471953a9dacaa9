"""Double of SkyRL 0.3.0: its timer, entered with `with` and `async with`."""

import time


class Timer:
    def __init__(self, message, update_dict=None):
        self.message, self.update_dict = message, update_dict

    def __enter__(self):
        self.start_time = time.time()
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        if self.update_dict is not None:
            taken = time.time() - self.start_time
            self.update_dict[self.message] = self.update_dict.get(self.message, 0.0) + taken

    async def __aenter__(self):
        self.start_time = time.time()
        return self

    async def __aexit__(self, exc_type, exc_val, exc_tb):
        self.__exit__(exc_type, exc_val, exc_tb)
