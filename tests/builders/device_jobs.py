"""Small random jobs with device work, for property tests."""

from hypothesis import strategies as st

from tests.builders.device_work import NAMES, UNSEEN, Job, Work
from tests.builders.runs import MAIN, Row

STAGES = ("actor_update", "actor_generate", "mine")


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw one or two ranks with stages, steps, captures and what up to two devices ran."""
    ranks = {rank: draw(rows()) for rank in range(draw(st.integers(1, 2)))}
    each = works(len(ranks))
    kernels = draw(st.lists(each, max_size=9))
    copies = [w._replace(kind="copy") for w in draw(st.lists(each, max_size=3))]
    return Job(
        ranks,
        kernels,
        draw(st.sampled_from([None, copies])),
        draw(st.booleans()),
        draw(st.sampled_from(["", "", "", UNSEEN])) if kernels else "",
    )


def works(ranks: int) -> st.SearchStrategy[Work]:
    return st.builds(
        lambda kind, start, length, stage, ahead, graph, rank, device: Work(
            kind,
            start,
            start + length,
            stage,
            None if ahead is None else max(0, start - ahead),
            graph,
            rank,
            device,
        ),
        st.sampled_from([*NAMES, "compute"]),
        st.integers(2, 60),
        st.integers(0, 12),
        st.sampled_from([None, *STAGES]),
        st.sampled_from([None, -1, 0, 1, 3, 8, 20]),
        st.sampled_from([None, None, None, 1]),
        st.integers(0, ranks - 1),
        st.sampled_from([0, 0, 0, 1]),
    )


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Draw one rank's spans: steps, some left out; stages, nested and on two threads; captures."""
    found = [Row("start", "region", 1, 1, 2, id=1)]
    now = draw(st.integers(0, 9))
    for number in range(1, draw(st.integers(0, 4)) + 1):
        start, now = now, now + draw(st.integers(1, 15))
        if draw(st.integers(0, 3)):
            found.append(Row("step", "step", number, start, now, id=10 + number))
    for number in range(100, 100 + draw(st.integers(0, 5))):
        start, length = draw(st.integers(0, 50)), draw(st.integers(0, 25))
        name, thread = draw(st.sampled_from(STAGES)), draw(st.sampled_from([MAIN, MAIN, 7]))
        found.append(Row(name, "stage", 1, start, start + length, thread, None, None, number))
    now = 0
    for number in range(200, 200 + draw(st.sampled_from([0, 0, 0, 1, 2, 4]))):
        start = now + draw(st.integers(0, 20))
        now = start + draw(st.integers(0, 3))
        name = "rlprof close capture" if number % 2 else "rlprof open capture"
        found.append(Row(name, "region", 1, start, now, id=number))
    return found
