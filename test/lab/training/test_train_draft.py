# SPDX-License-Identifier: Apache-2.0
"""Training of draft heads: features of the target, resuming after a kill, and what it reports."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.bags import episode, write_bag
from support.checkpoints import load_openvla
from support.draft_heads import random_head
from support.dying import make_shard_dying_once
from support.patience import wait_until
from support.random_checkpoint import write_random_checkpoint
from support.random_fast import AnyFast, write_fast_policy
from typer.testing import CliRunner

from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.plans import THIS_PROCESS, DraftTraining, Spread
from specvla_ros.lab.training import draft_features, train_draft
from specvla_ros.lab.training.draft_features import FeatureStore, answer, read_shard, shuffled_samples
from specvla_ros.lab.training.train_draft import check_frames, draft_loss, validate_draft
from specvla_ros.lab.training.trainer import STATE_DIRECTORY, Progress
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.models.settings import ModelSettings
from specvla_ros.speculation.drafters.eagle.head import load_draft_head
from specvla_ros.speculation.settings import DraftSettings

pytest.importorskip("accelerate", reason="training needs accelerate: pip install -r requirements/train.txt")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    directory = tmp_path_factory.mktemp("target")
    write_random_checkpoint(directory, seed=4, hidden_size=64, layers=2)
    return load_openvla(directory, device="cpu")


def frames(n: int) -> Iterator[Observation]:
    for i in range(n):
        image = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        yield Observation(image, f"put carrot {'on plate' if i % 3 else 'away'}", stamp_ns=i + 1)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_features, "SHARD_SAMPLES", 16)


def test_features_are_what_the_engine_decodes(policy: OpenVLATarget) -> None:
    wanted = list(frames(3))
    samples = answer(policy, wanted)
    assert len(samples) == 3
    for frame, sample in zip(wanted, samples, strict=True):
        action = Engine(policy, EngineSettings("ar")).act(frame)
        assert isinstance(action, Action)
        assert tuple(sample.tokens.tolist()) == action.tokens
        behind = policy.decoder.embed_tokens(sample.tokens[:-1])
        whole = torch.cat((sample.prompt, behind))
        cache = new_cache(policy.decoder, slots=1, slot_rows=len(whole))
        hidden = packed_forward(policy.decoder, [Segment(0, 0, whole)], cache).hidden
        torch.testing.assert_close(sample.hidden, hidden, atol=1e-4, rtol=1e-4)


def test_answers_of_any_length_are_what_the_engine_decodes(tmp_path: Path) -> None:
    target = load_openvla(write_fast_policy(tmp_path / "fast"), device="cpu")
    values = {field.name: getattr(target.codec, field.name) for field in fields(FastCodec)}
    target = replace(target, codec=AnyFast(**values))
    wanted = list(frames(40))
    samples, plain = answer(target, wanted), Engine(target, EngineSettings("ar"))
    actions = [plain.act(frame) for frame in wanted]
    for sample, action in zip(samples, actions, strict=True):
        assert isinstance(action, Action)
        assert target.codec.action_tokens(sample.tokens.tolist()) == action.tokens
    assert len({len(sample.tokens) for sample in samples}) > 2
    store = FeatureStore(tmp_path / "features", {})
    store.fill(target, frames(40), max_text=0, limit_bytes=1e9)
    for read, sample in zip(read_shard(store.shards[0]), samples, strict=True):
        assert read.tokens.equal(sample.tokens) and len(read.hidden) == len(read.prompt) + len(read.tokens) - 1
        torch.testing.assert_close(read.hidden.float(), sample.hidden, atol=2e-2, rtol=2e-2)


def test_answers_with_text_before_the_action_are_what_the_engine_decodes(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, seed=1, hidden_size=64, layers=2, text=1.2)
    writer, wanted = load_openvla(tmp_path, device="cpu"), list(frames(30))
    plain = Engine(writer, EngineSettings("ar", max_reasoning_tokens=24))
    outcomes = [plain.act(frame) for frame in wanted]
    actions = [each for each in outcomes if isinstance(each, Action)]
    samples = answer(writer, wanted, max_text=24)
    assert len(samples) == len(actions) and {len(each.text_tokens) > 0 for each in actions} == {True, False}
    for sample, action in zip(samples, actions, strict=True):
        assert tuple(sample.tokens.tolist()) == action.text_tokens + action.tokens


def test_a_store_goes_on_behind_its_last_whole_shard(policy: OpenVLATarget, tmp_path: Path, small_shards: None) -> None:
    def cut_short() -> Iterator[Observation]:
        for i, frame in enumerate(frames(50)):
            if i == 40:
                raise KeyboardInterrupt
            yield frame

    store = FeatureStore(tmp_path, {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        store.fill(policy, cut_short(), max_text=0, limit_bytes=1e9)
    assert len(store.shards) == 2
    seen: list[int] = []
    FeatureStore(tmp_path, {"a": 1}).fill(policy, frames(50), max_text=0, limit_bytes=1e9, on_frame=seen.append)
    assert (seen[0], seen[-1], len(store.shards)) == (48, 50, 4)
    whole = FeatureStore(tmp_path / "whole", {})
    whole.fill(policy, frames(50), max_text=0, limit_bytes=1e9)
    for ours, theirs in zip(store.shards, whole.shards, strict=True):
        assert all(tensor.equal(load_file(theirs)[name]) for name, tensor in load_file(ours).items())
    with pytest.raises(UserError, match="another target or other data"):
        FeatureStore(tmp_path, {"a": 2})


def test_the_disk_is_bounded_and_an_epoch_holds_every_sample_once(
    policy: OpenVLATarget, tmp_path: Path, small_shards: None
) -> None:
    store = FeatureStore(tmp_path, {})
    store.fill(policy, frames(200), max_text=0, limit_bytes=1)
    assert len(store.shards) == 1
    store.fill(policy, frames(40), max_text=0, limit_bytes=1e9)
    every = sorted(sample.hidden.float().sum().item() for shard in store.shards for sample in read_shard(shard))
    orders = [[s.hidden.float().sum().item() for s in shuffled_samples(store.shards, seed=0, epoch=e)] for e in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == every
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    "where",
    (
        pytest.param(Spread(workers=2), id="processes"),
        pytest.param(Spread(workers=2, ray="local"), id="ray"),
    ),
)
@pytest.mark.nightly
def test_workers_make_the_shards_of_one_process_though_one_is_killed(
    policy: OpenVLATarget,
    tmp_path: Path,
    small_shards: None,
    where: Spread,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if where.ray:
        request.getfixturevalue("cluster")
    for name, length in (("a", 9), ("b", 21), ("c", 3), ("d", 14)):
        write_bag(tmp_path / "bags" / name, episode(length))
    monkeypatch.setattr(draft_features, "make_shard", make_shard_dying_once)

    def collect(
        out: Path, frames: int, where: Spread = THIS_PROCESS, *, max_bytes: float = 1e9
    ) -> list[dict[str, torch.Tensor]]:
        given: dict[str, Any] = dict(seed=1, frames=frames, max_bytes=max_bytes, model=ModelSettings(device="cpu"))
        shards = train_draft.collect_features(policy, [tmp_path / "bags"], out, spread=where, **given)
        assert sorted(out.rglob("*.safetensors")) == shards
        return [load_file(shard) for shard in shards]

    here = collect(tmp_path / "here", 45)
    there = collect(tmp_path / "there", 45, where)
    assert (tmp_path / "there" / STATE_DIRECTORY / "features" / ".died").exists(), "the worker was not killed"
    assert [len(shard["lengths"]) for shard in here] == [16, 16, 13] and len(there) == 3
    for ours, theirs in zip(here, there, strict=True):
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    next((tmp_path / "there").rglob("shard-00000.safetensors")).unlink()
    assert len(collect(tmp_path / "there", 45, where)) == 3
    assert len(collect(tmp_path / "bounded", 45, where, max_bytes=1)) == 1


class _Stop(Exception):
    pass


def test_training_goes_on_where_it_stopped_and_teaches(
    policy: OpenVLATarget, tmp_path: Path, small_shards: None
) -> None:
    # Few pictures again and again, so that a few epochs must teach something.
    store = FeatureStore(tmp_path / "features", {})
    store.fill(policy, (frame for _ in range(8) for frame in frames(8)), max_text=0, limit_bytes=1e9)
    chosen = DraftTraining(epochs=8, batch_size=8, learning_rate=4e-3, own_steps=3)
    whole = train_draft.train_draft(policy, store.shards, tmp_path / "whole", chosen)

    def stop(progress: Progress) -> None:
        if progress.validation is not None and progress.validation.epoch == 3:
            raise _Stop

    with pytest.raises(_Stop):
        train_draft.train_draft(policy, store.shards, tmp_path / "again", chosen, stop)
    resumed = train_draft.train_draft(policy, store.shards, tmp_path / "again", chosen)
    assert [each.epoch for each in resumed] == list(range(1, 9))
    assert resumed == whole
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again")]
    assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())
    assert whole[-1].tau > whole[0].tau and whole[-1].tau > 2
    described = json.loads((tmp_path / "again" / "training.json").read_text())
    assert len(described["epochs_done"]) == 8
    assert not (tmp_path / "again" / STATE_DIRECTORY).exists()

    load_draft_head(tmp_path / "again", policy.decoder)
    drafted = Engine(policy, EngineSettings("spec", draft=DraftSettings(head=str(tmp_path / "again"))))
    forwards = 0
    for frame in frames(8):
        action = drafted.act(frame)
        assert isinstance(action, Action)
        forwards += action.record.forwards
    assert forwards < 8 * 5, "the engine must reap what the validation promised"


@pytest.mark.nightly
def test_a_parallel_head_is_taught_and_drafts_in_one_forward(
    policy: OpenVLATarget, tmp_path: Path, small_shards: None
) -> None:
    store = FeatureStore(tmp_path / "features", {})
    store.fill(policy, (frame for _ in range(8) for frame in frames(8)), max_text=0, limit_bytes=1e9)
    chosen = DraftTraining(epochs=12, batch_size=8, learning_rate=4e-3, parallel_depth=5)
    found = train_draft.train_draft(policy, store.shards, tmp_path / "head", chosen)
    assert found[-1].tau > found[0].tau and found[-1].tau > 2
    assert load_draft_head(tmp_path / "head", policy.decoder).mask_rows.norm(dim=1).gt(0).all()
    engine = Engine(policy, EngineSettings("spec", draft=DraftSettings(head=str(tmp_path / "head"))))
    forwards = 0
    for frame in frames(8):
        action = engine.act(frame)
        assert isinstance(action, Action)
        forwards += action.record.forwards
    assert forwards < 8 * 5
    assert engine.drafter.work.head_forwards <= forwards, "one forward of the head for each of the target's"
    with pytest.raises(UserError, match=r"drafts 5 tokens in one forward, but draft\.depth is 6: lower it"):
        Engine(policy, EngineSettings("spec", draft=DraftSettings(head=str(tmp_path / "head"), depth=6)))


def test_another_training_in_the_same_place_is_refused(
    policy: OpenVLATarget, tmp_path: Path, small_shards: None
) -> None:
    store = FeatureStore(tmp_path / "features", {})
    store.fill(policy, frames(40), max_text=0, limit_bytes=1e9)

    def stop(_: Progress) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        train_draft.train_draft(policy, store.shards, tmp_path / "out", DraftTraining(epochs=1, batch_size=4), stop)
    with pytest.raises(UserError, match="state of another training"):
        train_draft.train_draft(policy, store.shards, tmp_path / "out", DraftTraining(epochs=2, batch_size=4))
    with pytest.raises(UserError, match="one shard only"):
        train_draft.train_draft(policy, store.shards[:1], tmp_path / "few", DraftTraining())
    with pytest.raises(UserError, match="--learning-rate"):
        DraftTraining(learning_rate=2.0)
    with pytest.raises(UserError, match="--own-steps requires a head that grows trees level by level"):
        DraftTraining(own_steps=2, parallel_depth=5)
    with pytest.raises(UserError, match="--parallel-depth 64: a tree is at most 63 deep"):
        DraftTraining(parallel_depth=64)


def test_the_loss_is_one_of_the_features_and_a_tenth_of_the_tokens() -> None:
    """Spec-VLA, section 5.1."""
    generator = torch.Generator().manual_seed(0)
    features, away = torch.randn(2, 3, 8, generator=generator), torch.randn(2, 3, 8, generator=generator)
    lm_head = torch.randn(5, 8, generator=generator)
    probabilities = torch.randn(2, 3, 5, generator=generator).softmax(-1)
    for predicted in (features, features + away):
        difference = (predicted - features).abs()
        smooth_l1 = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean()
        log_probabilities = (predicted @ lm_head.T).log_softmax(-1)
        entropy = -(probabilities * log_probabilities).sum(-1).mean()
        loss = draft_loss(predicted, features, probabilities, lm_head)
        torch.testing.assert_close(loss, 1.0 * smooth_l1 + 0.1 * entropy)


def test_too_few_frames_are_refused_before_the_target_is_asked(tmp_path: Path) -> None:
    write_bag(tmp_path / "bags" / "one", episode(150, actions=False))
    (tmp_path / "none").mkdir()  # of the target there is nothing but what it is
    shutil.copy(nano_policy() / "config.json", tmp_path / "none")
    data = ["--data", str(tmp_path / "bags"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "specvla_ros.cli", "train-draft", "--target", str(tmp_path / "none"), *data]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    words = " ".join(result.stderr.replace("│", " ").split())
    assert "the data hold 150 images with an instruction, too few" in words
    assert "257 are the minimum: give more bags, or run the target in simulation with train-draft --data sim" in words
    assert not (tmp_path / "out").exists()


def test_frames_are_counted_over_all_bags(tmp_path: Path) -> None:
    for name, images in (("one", 150), ("two", 107)):
        write_bag(tmp_path / name, episode(images, actions=False))
    check_frames([tmp_path], 20000)
    check_frames(None, 257)
    with pytest.raises(
        UserError, match="--frames 256 is too few to train on and to validate with; 257 are the minimum"
    ):
        check_frames([tmp_path], 256)


def test_a_finished_head_is_not_written_over(tmp_path: Path) -> None:
    head, bag = tmp_path / "head", write_bag(tmp_path / "bag", episode(1, actions=False))
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"of the robot")
    command = ["train-draft", "--target", "nano", "--data", str(bag), "--out", str(head)]
    for interrupted, refused in ((False, "already holds a draft head; choose another --out"), (True, "too few")):
        if interrupted:
            (head / STATE_DIRECTORY).mkdir()
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError) and refused in str(result.exception), result.output
    assert (head / "model.safetensors").read_bytes() == b"of the robot"


@pytest.mark.nightly
def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    target, data, out = tmp_path / "target", tmp_path / "bags", tmp_path / "head"
    write_random_checkpoint(target, seed=4, hidden_size=64, layers=1)
    data.mkdir()
    write_bag(data / "one", episode(600, actions=False))
    command = [sys.executable, "-m", "specvla_ros.cli", "train-draft", "--target", str(target), "--data", str(data)]
    command += ["--out", str(out), "--epochs", "2", "--learning-rate", "1e-3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    wait_until(lambda: list(out.glob("training_state/features/shard-*.safetensors")) or process.poll() is not None)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "model.safetensors").exists()
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert "epoch 2: " in finished.stderr
    assert load_draft_head(out, load_openvla(target, device="cpu").decoder) is not None


def test_a_head_is_judged_in_the_dtype_of_its_target(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, seed=4, hidden_size=64, layers=2)
    policy = load_openvla(tmp_path, device="cpu", dtype="bfloat16")
    head = random_head(policy.decoder).to(torch.float32)
    judged = validate_draft(policy, head, answer(policy, list(frames(2))), epoch=1)
    assert judged.samples == 2 and judged.tau >= 1
    assert head.fc.weight.dtype == torch.float32
