"""The small parts of the core: timers, buffer, version tree, estimators, queues."""

import math
import random

import pytest

from scheduler.core.buffers import Buffer
from scheduler.core.context import known_code
from scheduler.core.estimators import (
    MAX_KINDS,
    PEAK_GAIN,
    PRIOR_TOKEN_S,
    RECOVER_S,
    AgentEstimate,
    ArrivalRate,
    HardwarePriors,
    PeakEwma,
    RunEstimate,
)
from scheduler.core.queues import NamedPool, ReadyQueue, TokenBucket
from scheduler.core.state import Version
from scheduler.core.tables import Tables
from scheduler.core.timers import Timers
from scheduler.core.versions import AHEAD, VersionTree
from transport.errors import StoreError
from transport.ids import item_seed


def make_tree(*edges: tuple[int, int | None, int], head: int, floor: int = -1) -> VersionTree:
    """Nodes as (version, parent, step)."""
    tree = VersionTree()
    for version, parent, step in edges:
        tree.put(Version(policy="p", version=version, parent=parent, step=step, stored=True))
    tree.move_head(head, floor)
    return tree


FORKED = ((0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 1, 2))


def test_timers_fire_in_the_order_of_time_kind_and_id():
    timers = Timers()
    for kind, id, at in [("b", "x", 2.0), ("a", "y", 2.0), ("a", "x", 2.0), ("z", "z", 1.0)]:
        timers.set(kind, id, at)
    fired = [timers.pop(2.0) for _ in range(5)]
    assert fired == [("z", "z"), ("a", "x"), ("a", "y"), ("b", "x"), None]


def test_a_moved_timer_fires_once_at_its_last_time():
    timers = Timers()
    for at in (5.0, 9.0, 3.0, 7.0):
        timers.set("a", "x", at)
    assert timers.next_due() == 7.0
    assert timers.pop(6.9) is None
    assert timers.pop(7.0) == ("a", "x")
    assert timers.next_due() is None


def test_a_cancelled_timer_does_not_fire_and_can_be_set_again():
    timers = Timers()
    for _ in range(100):
        timers.set("a", "x", 1.0)
        timers.cancel("a", "x")
    assert timers.next_due() is None
    timers.set("a", "x", 2.0)
    assert timers.pop(5.0) == ("a", "x")
    assert timers.pop(5.0) is None


def test_set_earlier_never_delays():
    timers = Timers()
    timers.set_earlier("a", "x", 3.0)
    timers.set_earlier("a", "x", 8.0)
    assert timers.due("a", "x") == 3.0


def test_lag_is_the_number_of_steps_on_the_tree_path():
    tree = make_tree(*FORKED, head=4, floor=3)
    assert [tree.lag(v) for v in (0, 1, 2, 3, 4)] == [2, 1, 2, 3, 0]


def test_what_descends_from_the_head_may_be_newer_than_the_trainers_last_word():
    tree = make_tree(*FORKED, head=1, floor=-1)
    assert (tree.lag(3), tree.path_lag(3)) == (0, 2)
    assert tree.deadline(3, bound=1) == 4


def test_what_descends_from_the_head_on_a_lineage_that_was_left_is_as_old_as_its_path():
    tree = make_tree(*FORKED, head=1, floor=3)
    assert (tree.lag(3), tree.lag(4)) == (2, 0)


def test_a_number_just_above_everything_known_counts_as_newest_but_has_no_place():
    tree = make_tree(*FORKED, head=4, floor=3)
    assert (tree.lag(5), tree.path_lag(5), tree.deadline(5, 9)) == (0, None, None)
    assert tree.may_be_placed(5)
    assert tree.lag(5 + AHEAD) is None
    assert not tree.may_be_placed(5 + AHEAD)


def test_a_version_whose_parent_is_not_announced_yet_has_no_place():
    tree = make_tree((0, None, 0), (2, 1, 2), head=0)
    assert tree.path_lag(2) is None
    tree.put(Version(policy="p", version=1, parent=0, step=1))
    assert tree.path_lag(2) == 2


def test_deadlines_are_the_last_step_at_which_tokens_are_usable():
    tree = make_tree(*FORKED, head=4, floor=3)
    assert [tree.deadline(v, bound=2) for v in (0, 1, 2, 3, 4)] == [2, 3, 2, None, 4]


def test_old_versions_can_be_pruned_except_the_head_and_what_is_kept():
    tree = make_tree(*FORKED, head=4)
    assert tree.prunable(3, frozenset({1})) == [0, 2]


def test_the_buffer_gives_the_earliest_deadline_first_and_keeps_what_it_shows():
    buffer = Buffer(lambda job: None)
    for job, index, deadline in [("c", 3, 5), ("a", 1, 5), ("b", 2, 4)]:
        buffer.add(job, index, deadline)
    assert buffer.first(2) == ["b", "a"]
    assert buffer.first(9) == ["b", "a", "c"]
    buffer.remove("a")
    assert buffer.first(9) == ["b", "c"]


def test_the_buffer_looks_at_a_deadline_again_before_it_gives_a_group_up():
    deadlines = {"a": None, "b": 7, "c": 2}
    buffer = Buffer(deadlines.get)
    for index, job in enumerate("abc"):
        buffer.add(job, index, 2)
    assert buffer.expired(2) == []
    assert buffer.expired(3) == ["a", "c"]
    assert buffer.first(1) == ["b"]


def test_a_buffer_with_many_removals_stays_small():
    buffer = Buffer(lambda job: 0)
    for n in range(5000):
        buffer.add(str(n), n, n)
        if n >= 10:
            buffer.remove(str(n - 10))
    assert len(buffer) == 10
    assert len(buffer._heap) <= 65
    assert buffer.first(1) == ["4990"]


def test_bad_news_counts_at_once_and_good_news_with_time():
    cost = PeakEwma()
    cost.observe(1.0, 0.0)
    cost.observe(3.0, 1.0)
    assert cost.value == pytest.approx(1.0 + 2.0 * PEAK_GAIN)
    cost.observe(0.0, 31.0, tau_s=30.0)
    assert cost.value == pytest.approx((1.0 + 2.0 * PEAK_GAIN) * math.exp(-1.0))


def test_a_bad_estimate_without_news_gives_way_to_the_prior():
    cost = PeakEwma()
    cost.observe(9.0, 0.0)
    assert cost.recovered(1.0, RECOVER_S / 20.0) == 9.0
    assert cost.recovered(1.0, RECOVER_S) == pytest.approx(1.0 + 8.0 * math.exp(-1.0))
    assert cost.recovered(10.0, RECOVER_S) == 9.0  # good news is kept
    assert PeakEwma().recovered(1.0, 0.0) == 1.0


def test_arrivals_are_a_rate_that_falls_when_nothing_comes():
    rate = ArrivalRate()
    for at in range(16):
        rate.observe(float(at))
    assert rate.per_s(15.0) == pytest.approx(1.0)
    assert rate.per_s(30.0) == pytest.approx(0.5)
    assert ArrivalRate().per_s(1.0) is None


def test_kinds_of_work_are_told_apart_and_the_stalest_is_forgotten():
    agent = AgentEstimate()
    for kind in range(MAX_KINDS + 1):
        agent.group_done(lengths=(10,), slots=1, generating_s=1.0 + kind, now=0.0, kind=f"r|{kind}")
    assert len(agent.by_kind) == MAX_KINDS
    assert agent.token_time_s("r|1", 9.0, 0.0) == pytest.approx(0.2)
    assert agent.token_time_s("r|0", 9.0, 0.0) == agent.token_s.value


def test_a_queue_gives_higher_priority_first_then_index_and_a_head_per_family():
    queue = ReadyQueue()
    for job, index, priority, family in [
        ("a", 5, 0, "x"),
        ("b", 1, 0, "x"),
        ("c", 9, 2, "y"),
        ("d", 3, 0, "z"),
    ]:
        queue.add(job, index, priority, family)
    assert (queue.first(), queue.priority()) == ("c", 2)
    assert list(queue.heads(4)) == ["c", "b", "d"]
    queue.discard("c")
    queue.discard("b")
    assert list(queue.heads(4)) == ["d", "a"]
    assert len(queue) == 2


def test_a_token_bucket_fills_up_to_a_minute_and_lets_a_large_group_through():
    bucket = TokenBucket()
    assert bucket.allows(0, 0.0)
    assert bucket.allows(600, 0.0)
    bucket.take(1000.0)
    assert not bucket.allows(600, 10.0)
    assert bucket.allowed_s(600, 10.0) == pytest.approx(40.0)
    assert bucket.allows(600, 40.1)
    bucket.take(-5000.0)
    assert bucket.allows(600, 500.0)
    assert bucket.level == 600.0


def test_the_rate_of_a_group_is_bounded_by_its_longest_sibling_or_its_waves():
    wide, narrow = AgentEstimate(), AgentEstimate()
    wide.group_done(lengths=(10, 20, 30), slots=8, generating_s=3.0, now=0.0)
    narrow.group_done(lengths=(10, 20, 30), slots=1, generating_s=3.0, now=0.0)
    assert wide.token_s.value == pytest.approx(3.0 / 30)
    assert narrow.token_s.value == pytest.approx(3.0 / 60)


def test_a_group_without_tokens_or_time_teaches_nothing():
    estimate = AgentEstimate()
    assert estimate.group_done(lengths=(0, 0), slots=2, generating_s=1.0, now=0.0) is None
    assert estimate.group_done(lengths=(4,), slots=2, generating_s=0.0, now=0.0) is None
    assert estimate.token_s.value is None


def test_unknown_hardware_is_taken_for_average_and_known_hardware_for_its_own():
    priors = HardwarePriors()
    assert priors.token_s("h200") == PRIOR_TOKEN_S
    priors.observe("cpu", 0.5)
    priors.observe("h200", 0.001)
    assert priors.token_s("h200") == 0.001
    assert 0.001 < priors.token_s("a100") < 0.5


def test_a_run_is_expected_to_use_its_length_limit_until_it_is_known_better():
    estimate = RunEstimate(max_new_tokens=64, siblings=4)
    assert (estimate.tokens_mean, estimate.tokens_longest) == (32, 64)
    estimate.group_done((4, 8), 1000)
    assert (estimate.tokens_mean, estimate.tokens_longest, estimate.body_bytes) == (6, 8, 1000)


def test_three_of_four_groups_are_no_longer_than_likely():
    estimate = RunEstimate(max_new_tokens=16_384, siblings=1)
    rng = random.Random(1)
    lengths = [max(1, round(rng.lognormvariate(6.5, 0.9))) for _ in range(4000)]
    likely = []
    for length in lengths:
        estimate.group_done((length,), 1000)
        likely.append(estimate.tokens_likely)
    seen = list(zip(lengths[500:], likely[500:], strict=True))
    within = sum(length <= bound for length, bound in seen) / len(seen)
    assert 0.7 < within < 0.8


def test_groups_of_one_length_are_likely_to_have_it():
    estimate = RunEstimate(max_new_tokens=64, siblings=2)
    assert estimate.tokens_likely == 64
    for _ in range(3):
        estimate.group_done((5, 20), 1000)
    assert estimate.tokens_likely == pytest.approx(20.0)


def test_open_agents_can_be_cut_from_anywhere():
    agents = NamedPool()
    for name in "abcd":
        assert agents.put(name, is_in=True)
    assert not agents.put("a", is_in=True)
    agents.put("b", is_in=False)
    agents.put("d", is_in=False)
    assert sorted(agents.names) == ["a", "c"]
    assert "b" not in agents
    assert "c" in agents


def test_a_queue_gives_the_lowest_index_and_forgets_what_was_taken_out():
    queue = ReadyQueue()
    for job, index in [("b", 2), ("a", 1), ("c", 3)]:
        queue.add(job, index)
        queue.add(job, index)
    queue.discard("a")
    assert (queue.first(), len(queue)) == ("b", 2)
    queue.add("a", 1)
    assert queue.first() == "a"


def test_seeds_differ_by_run_kind_and_item_and_by_nothing_else():
    seeds = [
        item_seed(run, kind, n) for run in (0, 1) for kind in ("train", "eval") for n in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert item_seed(3, "train", 9) == item_seed(3, "train", 9)


@pytest.mark.parametrize(
    ("code", "known"),
    [("engine.generation", "engine.generation"), ("", "other"), ("a b", "other"), ("ü", "other")],
)
def test_codes_of_peers_are_used_only_when_plain(code, known):
    assert known_code(code) == known


@pytest.mark.parametrize(
    ("table", "value", "text"),
    [("nonsense", b"", "unknown table"), ("job", b"\x01", "does not decode")],
)
def test_a_row_that_can_not_be_read_names_itself_and_a_remedy(table, value, text):
    with pytest.raises(StoreError, match=f"{table}/key.*{text}"):
        Tables().load(table, "key", value)


def test_lanes_that_cannot_move_do_not_hide_those_behind_them():
    queue = ReadyQueue()
    for number in range(40):
        queue.add(f"job-{number:02}", number, lane=f"lane-{number}")
    seen = set()
    for _ in range(20):
        heads = queue.heads(8)
        assert len(heads) == len(set(heads)) == 8
        assert heads[:4] == [f"job-{n:02}" for n in range(4)]
        seen.update(heads)
    assert len(seen) == 40
