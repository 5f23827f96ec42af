"""Small parts of the trainer daemon: bodies, metrics, ranks, home."""

import json
import queue
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_trainer.bodies import check_body, training_group
from cloud_trainer.home import TrainerHome
from cloud_trainer.numpy_trainer import NumpyTrainer, make_numpy_model
from cloud_trainer.ranks import LeadTrainer, Order, follow, ranks_from
from cloud_trainer.tracking import MetricsFile
from transport.errors import ConfigError, StoreError
from transport.runtime.clock import ManualClock
from transport.trajectory import SequenceRecord, TrajectoryGroup, body_digest, pack
from transport.weights.digest import state_digest


def make_group() -> TrajectoryGroup:
    """Two siblings over two prompts; the second policy drew some tokens, a tool others."""
    return TrajectoryGroup(
        job="run/t-000004",
        attempt="run/t-000004#1",
        policies=("run/judge", "run/solver"),
        prompts=((1, 2), (3,)),
        sequences=(
            SequenceRecord(
                prompt=1,
                tokens=(10, 11, 12, 13),
                logprobs=np.array([-0.5, -1.5, 0.0, -2.0], np.float32),
                segments=((1, 1, 7), (1, 0, 3), (1, -1, 0), (1, 1, 8)),
                reward=1.0,
                finish_reason="stop",
            ),
            SequenceRecord(
                prompt=0,
                tokens=(20,),
                logprobs=np.array([-0.25], np.float32),
                segments=((1, 0, 3),),
                reward=0.0,
                finish_reason="length",
            ),
        ),
    )


# ---- bodies --------------------------------------------------------------------------------------


def test_only_tokens_of_the_trained_policy_are_unmasked_and_no_sibling_is_lost() -> None:
    first, second = training_group(make_group(), "run/solver")
    assert first.prompt_tokens == (3,)
    assert first.tokens == (10, 11, 12, 13)
    assert first.loss_mask == (True, False, False, True)
    assert first.versions == (7, 3, 0, 8)
    assert first.logprobs == (-0.5, -1.5, 0.0, -2.0)
    assert (first.reward, first.group) == (1.0, "run/t-000004")
    assert second.loss_mask == (False,)


def test_a_good_body_is_described_for_the_core() -> None:
    data = pack(make_group())
    checked = check_body(body_digest(data), data, "run/solver")
    assert checked.event.code == ""
    assert (checked.event.job, checked.event.size_bytes) == ("run/t-000004", len(data))
    assert checked.event.trainable_tokens == 2
    assert len(checked.group) == 2
    assert check_body(body_digest(data), data, "run/other").event.trainable_tokens == 0


@pytest.mark.parametrize(
    ("data", "digest", "code"),
    [
        (b"other", "0" * 64, "body.digest"),
        (b"", "", "body.digest"),
        (b"no trajectory", body_digest(b"no trajectory"), "body.malformed"),
        (pack(make_group())[:-3], body_digest(pack(make_group())[:-3]), "body.malformed"),
    ],
)
def test_a_bad_body_never_reaches_the_trainer(data: bytes, digest: str, code: str) -> None:
    checked = check_body(digest, data, "run/solver")
    assert checked.event.code == code
    assert checked.group == ()
    assert checked.reason


def test_a_body_with_more_tokens_than_its_run_can_have_made_never_reaches_the_trainer() -> None:
    data = pack(make_group())
    assert not check_body(body_digest(data), data, "run/solver", 4).event.code
    checked = check_body(body_digest(data), data, "run/solver", 3)
    assert (checked.event.code, checked.group) == ("body.too_long", ())
    assert checked.reason == "a sequence of 4 tokens, the run allows 3"


def test_a_body_of_too_many_siblings_or_long_prompts_never_reaches_the_trainer() -> None:
    group = make_group()
    crowd = msgspec.structs.replace(group, sequences=group.sequences * 513)
    wordy = msgspec.structs.replace(
        group, prompts=((1,) * 10_000, (3,)), sequences=group.sequences[1:] * 1000
    )
    for bad, reason in ((crowd, "1026 sequences, at most 1024"), (wordy, "tokens with prompts")):
        data = pack(bad)
        checked = check_body(body_digest(data), data, "run/solver", 64)
        assert (checked.event.code, checked.group) == ("body.too_long", ())
        assert reason in checked.reason


# ---- metrics -------------------------------------------------------------------------------------


def test_metrics_are_lines_of_json_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.write("step", 12.3456, {"step": 1, "loss": float("nan")})
    metrics.write("version", 13.0, {"version": 1})
    lines = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert lines == [
        {"kind": "step", "wall_s": 12.346, "step": 1, "loss": None},
        {"kind": "version", "wall_s": 13.0, "version": 1},
    ]


def test_metrics_are_bounded_by_rotation(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, limit_bytes=400)
    for step in range(100):
        metrics.write("step", 0.0, {"step": step})
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["metrics.jsonl", "metrics.jsonl.1"]
    assert all(path.stat().st_size <= 400 for path in files)
    assert json.loads(metrics.path.read_text().splitlines()[-1])["step"] == 99


def test_a_line_torn_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind":"step","st')
    MetricsFile(tmp_path).write("step", 0.0, {"step": 2})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["step"] == 2


# ---- ranks ---------------------------------------------------------------------------------------


class QueueRanks:
    """Two ranks in one process."""

    world_size = 2

    def __init__(self, rank: int, orders: "queue.Queue[Order]") -> None:
        self.rank = rank
        self._orders = orders

    def send(self, order: Order) -> None:
        self._orders.put(order)

    def receive(self) -> Order:
        return self._orders.get(timeout=10)


def test_followers_make_every_call_of_rank_0_and_end_with_it(tmp_path: Path) -> None:
    model = make_numpy_model(tmp_path / "model")
    orders: queue.Queue[Order] = queue.Queue()
    follower = NumpyTrainer({"lr": 0.1})
    thread = threading.Thread(target=follow, args=(QueueRanks(1, orders), follower))
    thread.start()
    leader = LeadTrainer(NumpyTrainer({"lr": 0.1}), QueueRanks(0, orders))
    leader.load(model)
    groups = [training_group(make_group(), "run/solver")]
    leader.step(groups)
    arrays, meta = leader.state_dict()
    leader.step(groups)
    leader.load_state_dict(arrays, meta)
    leader.step(groups)
    weights = state_digest(leader.published_state())
    leader.export(tmp_path / "leader")
    leader.close()
    thread.join(10)
    assert not thread.is_alive()
    assert follower.step_count == leader.step_count == 2
    assert state_digest(follower.published_state()) == weights


def test_one_rank_needs_no_others_and_several_are_refused() -> None:
    assert ranks_from({}).world_size == 1
    assert ranks_from({"WORLD_SIZE": "1"}).rank == 0
    with pytest.raises(ConfigError, match="FSDP2"):
        ranks_from({"WORLD_SIZE": "4", "RANK": "0"})


# ---- home ----------------------------------------------------------------------------------------


def test_incarnations_grow_with_every_start_and_also_after_the_folder_was_lost(
    tmp_path: Path,
) -> None:
    clock = ManualClock(wall_s=1000.0)
    home = TrainerHome(tmp_path / "a", keep_checkpoints=1)
    numbers = [home.start(clock).incarnation for _ in range(3)]
    clock.set_wall(10.0)
    numbers.append(home.start(clock).incarnation)
    home.release()
    assert numbers == [1000, 1001, 1002, 1003]
    clock.set_wall(2000.0)
    home = TrainerHome(tmp_path / "b", keep_checkpoints=1)
    assert home.start(clock).incarnation == 2000
    home.release()


def test_a_first_start_publishes_version_0_and_a_republishing_one_its_checkpoint(
    tmp_path: Path,
) -> None:
    home = TrainerHome(tmp_path / "home", keep_checkpoints=1)
    for republish in (False, True):
        position = home.start(ManualClock(), republish=republish).position
        assert [(p.version, p.whole) for p in position.pending] == [(0, True)]
    home.release()


def test_an_export_replaces_the_one_before(tmp_path: Path) -> None:
    home = TrainerHome(tmp_path / "home", keep_checkpoints=1)
    trainer = NumpyTrainer({"lr": 0.1})
    trainer.load(make_numpy_model(tmp_path / "model"))
    for _ in range(2):
        trainer.step([training_group(make_group(), "run/solver")])
        folder = home.export(trainer)
        again = NumpyTrainer({})
        again.load(folder)
        assert state_digest(again.published_state()) == state_digest(trainer.published_state())
    assert not (home.folder / "model.new").exists()
    home.release()


def test_a_damaged_incarnation_file_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    home = TrainerHome(tmp_path / "home", keep_checkpoints=1)
    (home.folder / "incarnation").write_text("x")
    with pytest.raises(StoreError, match="remove it"):
        home.start(ManualClock())
    home.release()
