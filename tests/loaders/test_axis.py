from lightning_rlprof.loaders.axis import anchors
from tests.runs import header

DAY = 86_400 * 10**9


def test_ranks_of_one_host_share_the_median_anchor() -> None:
    skews = [0, 40, 90, 5_000_000]
    headers = {
        rank: header(rank, unix_ns=10**18 + skew + rank * 1000, clock_ns=rank * 1000)
        for rank, skew in enumerate(skews)
    }
    assert anchors(headers) == (dict.fromkeys(range(4), 10**18 + 40), [])


def test_hosts_have_their_own_anchor_and_are_said_to_be_uncalibrated() -> None:
    headers = {0: header(0, host="a", unix_ns=5 * DAY), 1: header(1, host="b", unix_ns=2 * DAY)}

    found, problems = anchors(headers)

    assert found == {0: 5 * DAY, 1: 2 * DAY}
    assert [problem.text for problem in problems] == [
        "clocks of 2 hosts are not calibrated: between hosts, times may be off by ms"
    ]


def test_one_host_name_on_two_machines_is_noticed() -> None:
    headers = {
        rank: header(rank, unix_ns=10**18, clock_ns=clock)
        for rank, clock in enumerate([0, 50, DAY, DAY + 50])
    }

    found, problems = anchors(headers)

    assert found == {0: 10**18 - 50, 1: 10**18 - 50, 2: 10**18 - DAY - 50, 3: 10**18 - DAY - 50}
    assert problems[0].text == "host node-a: its ranks' clocks disagree by seconds, as on 2 hosts"
    assert "clocks of 2 hosts are not calibrated" in problems[1].text
