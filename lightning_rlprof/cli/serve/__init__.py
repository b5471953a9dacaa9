"""The report of a run in the browser, live: the verb ``serve``, its pages and its metrics."""
