"""The GRPO that ``rlprof demo`` trains: a learning curve on a CPU in a minute, stages marked."""
