"""Small parts of the trainer daemon: bodies, metrics, ranks, home."""

import contextlib
import json
import queue
import threading
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest

from cloud_trainer.bodies import check_body, training_group
from cloud_trainer.config import TrainerTable
from cloud_trainer.factory import make_trainer
from cloud_trainer.home import TrainerHome
from cloud_trainer.numpy_trainer import NumpyTrainer, make_numpy_model
from cloud_trainer.process_group import ranks_from
from cloud_trainer.ranks import (
    AnyOrder,
    CloseOrder,
    IdleOrder,
    LeadTrainer,
    LoadOrder,
    MakeOrder,
    PublishOrder,
    RestoreOrder,
    StateOrder,
    StepOrder,
    follow,
)
from cloud_trainer.spread import ShardedOverRanks
from cloud_trainer.tracking import MetricsFile
from transport.errors import ConfigError, StoreError
from transport.runs import PolicySpec
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


def test_a_policy_gets_the_sequences_with_tokens_of_its_own_and_those_unmasked() -> None:
    (first,) = training_group(make_group(), "run/solver")
    assert first.prompt_tokens == (3,)
    assert first.tokens == (10, 11, 12, 13)
    assert first.loss_mask == (True, False, False, True)
    assert first.versions == (7, 3, 0, 8)
    assert first.logprobs == (-0.5, -1.5, 0.0, -2.0)
    assert (first.reward, first.group) == (1.0, "run/t-000004")
    first, second = training_group(make_group(), "run/judge")
    assert first.loss_mask == (False, True, False, False)
    assert second.loss_mask == (True,)
    assert training_group(make_group(), "run/other") == ()


def test_a_good_body_is_described_for_the_core() -> None:
    data = pack(make_group())
    checked = check_body(body_digest(data), data, "run/solver")
    assert checked.event.code == ""
    assert (checked.event.job, checked.event.size_bytes) == ("run/t-000004", len(data))
    assert checked.event.trainable_tokens == 2
    assert len(checked.group) == 1
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
    """Several ranks in one process."""

    device = "cpu"

    def __init__(self, rank: int, orders: "queue.Queue[AnyOrder]", world_size: int = 2) -> None:
        self.rank = rank
        self.world_size = world_size
        self._orders = orders

    def turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, order: AnyOrder) -> None:
        self._orders.put(order)

    def receive(self) -> AnyOrder:
        return self._orders.get(timeout=10)


def test_followers_make_every_call_of_rank_0_and_end_with_it(tmp_path: Path) -> None:
    model = make_numpy_model(tmp_path / "model")
    orders: queue.Queue[AnyOrder] = queue.Queue()
    made: list[NumpyTrainer] = []

    def make(spec: PolicySpec) -> NumpyTrainer:
        made.append(NumpyTrainer(spec.settings))
        return made[-1]

    thread = threading.Thread(target=follow, args=(QueueRanks(1, orders), make))
    thread.start()
    spec = PolicySpec(model=str(model), trainer="numpy", settings={"lr": 0.1})
    ranks = QueueRanks(0, orders)
    leader = LeadTrainer(NumpyTrainer(spec.settings), ranks, spec)
    leader.load(model)
    groups = [training_group(make_group(), "run/solver")]
    leader.step(groups)
    leader.state_dict()
    leader.step(groups)
    weights = state_digest(leader.published_state())
    leader.export(tmp_path / "leader")
    ranks.send(CloseOrder())
    thread.join(10)
    assert not thread.is_alive()
    (follower,) = made
    assert follower.step_count == leader.step_count == 2
    assert state_digest(follower.published_state()) == weights


def test_ranks_are_those_of_the_environment() -> None:
    assert ranks_from({}).world_size == 1
    assert ranks_from({"WORLD_SIZE": "1"}).rank == 0
    two = {"WORLD_SIZE": "2", "RANK": "0"}
    for environment, device, message in (
        ({"WORLD_SIZE": "many"}, "cpu", "WORLD_SIZE: 'many' is no number"),
        ({"WORLD_SIZE": "2"}, "cpu", "RANK: -1 is none of 2"),
        ({**two, "RANK": "2"}, "cpu", "RANK: 2 is none of 2"),
        (two, "cuda:1", "one device for 2 ranks; write 'cuda'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ranks_from(environment, device=device)


def test_orders_are_plain_messagepack() -> None:
    groups = (training_group(make_group(), "run/solver"),)
    spec = PolicySpec(model="model", settings={"lr": 0.1, "lora": {"rank": 4}})
    for order in (
        MakeOrder(spec=spec),
        LoadOrder(folder="/models/a"),
        RestoreOrder(meta={"updates": 3, "rng": [1, 2]}),
        StepOrder(groups=groups),
        PublishOrder(),
        StateOrder(),
        IdleOrder(),
        CloseOrder(),
    ):
        data = msgspec.msgpack.encode(order)
        assert msgspec.msgpack.decode(data, type=AnyOrder) == order
        assert msgpack.unpackb(data)["type"] == type(order).__name__


@pytest.mark.parametrize(("work", "ranks"), [(0, 2), (1, 3), (5, 2), (6, 3), (7, 4)])
def test_every_rank_does_as_many_pieces_and_every_piece_is_done_once(work: int, ranks: int) -> None:
    pieces = [f"piece {number}" for number in range(work)]
    shares = [
        ShardedOverRanks(QueueRanks(rank, queue.Queue(), ranks)).share(pieces, lambda piece: "")
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    done = sorted(piece for share in shares for piece in share)
    assert [piece for piece in done if piece] == pieces
    assert len(done) - len(pieces) < ranks


def test_a_trainer_of_one_process_is_not_shared_by_several_ranks() -> None:
    spec = PolicySpec(model="model", trainer="numpy")
    ranks = QueueRanks(0, queue.Queue())
    with pytest.raises(ConfigError, match=r"trainer\.ranks: 2 ranks, but trainer = 'numpy'"):
        make_trainer(spec, TrainerTable(policy="run/solver"), ranks)


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
    assert numbers == [1_000_000, 1_000_001, 1_000_002, 1_000_003]
    clock.set_wall(2000.0)
    home = TrainerHome(tmp_path / "b", keep_checkpoints=1)
    assert home.start(clock).incarnation == 2_000_000
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
