"""An agentic training with a tool server and a judge: `rlprof run -- python train.py`.

Two of sixteen samples call a slow tool, so that each rollout waits for it.
"""

import json
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lightning_rlprof import count, sample, stage, start_session, step

SERVER = Path(__file__).with_name("server.py")

torch.manual_seed(0)
policy = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)


def start(role):
    """Start a server; return its process and address. Elsewhere, each has a terminal."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, SERVER, role], text=True, **pipes)
    return process, f"http://127.0.0.1:{process.stdout.readline().strip()}"


def ask(url, response, seconds):
    """Call a server for a sample."""
    data = json.dumps({"seconds": seconds}).encode()
    urllib.request.urlopen(urllib.request.Request(url, data, response.inject())).read()


def generate(state):
    """Generate eight tokens."""
    count(tokens=8)
    with torch.no_grad():
        for _ in range(8):
            state = torch.tanh(policy(state))
    return state


def roll_out(number):
    """Generate, call a tool, continue, and let the judge score the response."""
    with sample(number, version=session.step) as response:
        with response.phase("actor_generate"):
            state = generate(torch.randn(64))
        with response.phase("env_step"):
            ask(tools, response, 0.2 if number % 8 == 0 else 0.01)
        with response.phase("actor_generate"):
            state = generate(state)
        with response.phase("compute_reward"):
            ask(judge, response, 0.01)
    return response, state


with start_session() as session, ThreadPoolExecutor(16) as pool:
    (process, tools), (other, judge) = start("tools"), start("judge")
    for _ in range(5):
        with step():
            with stage("actor_generate"):
                responses = list(pool.map(roll_out, range(16)))
            with stage("actor_update"):
                states = torch.stack([state for _, state in responses])
                optimizer.zero_grad()
                policy(states).square().mean().backward()
                optimizer.step()
                for response, state in responses:
                    response.end("trained", reward=float(state.mean()))
    process.communicate()
    other.communicate()
