# SPDX-License-Identifier: Apache-2.0
"""Behaviour cloning from bags, end to end on a tiny policy."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import bags as recordings
from support.checkpoints import load_openvla
from support.nightly import nightly_but

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.control.convention import ActionFrame, ConventionSettings
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.demonstrations import DemonstrationRecord, Hindsight, write_demonstration
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.bags.lerobot.export import export
from specvla_ros.lab.bags.lerobot.export_plan import ExportPlan
from specvla_ros.lab.plans import NanoShape, PolicyTraining
from specvla_ros.lab.training.dataset import Batches, action_chunks, action_statistics, load_demonstrations, shuffled
from specvla_ros.lab.training.nano import teach_instructions, write_nano
from specvla_ros.lab.training.train_policy import action_loss, train_policy
from specvla_ros.lab.training.trainer import STATE_DIRECTORY
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.bins import ActionTokenizer
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.families.openvla.target import require_openvla
from specvla_ros.speculation.settings import DraftSettings, adjusted

SHAPE = NanoShape(image_size=28, patch_size=14, vision_dim=32, vision_depth=2, hidden_size=64, layers=2, head_dim=16)
LEFT, RIGHT = "go left", "go right"


def write_bags(directory: Path, *, bags: int = 20, steps: int = 6, hindsight: bool = True) -> None:
    """The brightness of the picture says how far, the instruction in which direction."""
    rng = np.random.default_rng(0)
    for i in range(bags):
        far = rng.uniform(0.2, 1.0, steps)
        images = [np.full((40, 40, 3), round(200 * each), dtype=np.uint8) for each in far]
        actions = [np.array([0.05 * each, 0.02, 0, 0, 0, 0.1 * each, 1.0]) for each in far]
        others = {"right": Hindsight(RIGHT, [each * [-1, 1, 1, 1, 1, 1, 0] for each in actions])} if hindsight else {}
        write_demonstration(
            directory / f"bag-{i:02d}",
            DemonstrationRecord(images, actions, LEFT, [0.2 * k for k in range(steps)], others),
        )


@pytest.fixture(scope="module")
def bags(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bags")
    write_bags(directory)
    return directory


def training(**changes) -> PolicyTraining:
    settings: dict[str, Any] = dict(
        steps=60, batch_size=32, learning_rate=3e-3, validate_every=20, unnorm_key="d", shape=SHAPE
    )
    return PolicyTraining(**settings | changes)


def test_bags_become_arrays_once(bags, tmp_path):
    data = load_demonstrations(find_bags([bags]).bags, tmp_path / "cache", 28, TopicChoice())
    assert data.images.shape == (120, 1, 28, 28, 3) and data.actions.shape == (120, 2, 7)
    assert data.instructions == (LEFT, RIGHT)
    np.testing.assert_allclose(data.actions[:, 0, 0], -data.actions[:, 1, 0])
    brightness = data.images.mean((1, 2, 3, 4)) / 200
    np.testing.assert_allclose(brightness, data.actions[:, 0, 0] / 0.05, atol=0.01)
    assert data.validation.sum() == 6 and data.validation[-1]
    stamp = (tmp_path / "cache" / "images.npy").stat().st_mtime_ns
    load_demonstrations(find_bags([bags]).bags, tmp_path / "cache", 28, TopicChoice())
    assert (tmp_path / "cache" / "images.npy").stat().st_mtime_ns == stamp


def test_trained_policy_is_a_checkpoint_that_follows_image_and_instruction(bags, tmp_path):
    history = train_policy([bags], tmp_path / "policy", training(steps=150))
    assert history[-1].step == 150 and history[-1].loss < 0.7 * history[0].loss
    assert not (tmp_path / "policy" / STATE_DIRECTORY).exists()
    recorded = json.loads((tmp_path / "policy" / "training.json").read_text())
    assert recorded["seed"] == 0 and recorded["episodes"] == 20 and len(recorded["validation"]) == len(history)
    policy = load_openvla(tmp_path / "policy")
    assert policy.prompt.taught == (LEFT, RIGHT) and policy.unnorm_key == "d"
    with pytest.raises(UserError, match="not trained on 'go up'; its instructions are: 'go left'; 'go right'"):
        policy.prompt.ids("go up")
    assert policy.prompt.ids("Go  LEFT.") == policy.prompt.ids("go left")
    assert history[-1].accuracy[6] > 0.95  # the gripper hangs on the instruction alone


BOTH = TopicChoice(cameras={"wrist": "/wrist/image_raw"}, state_topic="/joint_states", state_names=("turn", "reach"))


def write_bags_of_all_sensors(directory: Path, *, bags: int = 20, steps: int = 6) -> None:
    """The wrist's picture says how far, and of the state the number `turn` in which direction."""
    rng = np.random.default_rng(1)
    for i in range(bags):
        far, turn = rng.uniform(0.2, 1.0, steps), rng.choice((-1.0, 1.0), steps)
        wrist = [np.full((40, 40, 3), round(200 * each), dtype=np.uint8) for each in far]
        nothing = [np.zeros((40, 40, 3), np.uint8)] * steps
        actions = [np.array([0.05 * a * b, 0.02, 0, 0, 0, 0, float(b > 0)]) for a, b in zip(far, turn, strict=True)]
        states = [np.array([0.3, each]) for each in turn]
        times = [0.2 * k for k in range(steps)]
        names = ("reach", "turn")
        record = DemonstrationRecord(nothing, actions, LEFT, times, {}, {"wrist": wrist}, names, states)
        write_demonstration(directory / f"bag-{i:02d}", record)


def test_images_without_an_action_are_skipped_and_counted(tmp_path, caplog):
    twice = [each for each in recordings.episode(6) if each[1] != recordings.NUMBERS or each[2] // 10**8 % 4]
    kept = sum(each[1] == recordings.NUMBERS for each in twice)
    bag = recordings.write_bag(tmp_path / "bag", twice)
    data = load_demonstrations([bag], tmp_path / "cache", 28, TopicChoice())
    assert len(data.images) == kept < 5
    assert f"{6 - kept} images are skipped: no instruction, or no recorded action before the next image" in caplog.text
    caplog.clear()
    whole = recordings.write_bag(tmp_path / "whole", recordings.episode(6)[:-1])  # without the last image's action
    assert len(load_demonstrations([whole], tmp_path / "other", 28, TopicChoice()).images) == 5 and not caplog.text


def test_bags_of_two_cameras_with_a_state_become_arrays_in_their_order(tmp_path):
    write_bags_of_all_sensors(tmp_path / "bags")
    data = load_demonstrations(find_bags([tmp_path / "bags"]).bags, tmp_path / "cache", 28, BOTH)
    assert data.images.shape == (120, 2, 28, 28, 3) and data.states.shape == (120, 2)
    np.testing.assert_array_equal(data.states[:, 0], np.sign(data.actions[:, 0, 0]))  # `turn` first
    assert data.images[:, 0].max() == 0 < data.images[:, 1].min()


@pytest.mark.nightly
def test_a_policy_of_two_cameras_with_a_state_learns_from_both(tmp_path):
    write_bags_of_all_sensors(tmp_path / "bags")

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step == 50:
            raise Stop

    settings = training(steps=250, topics=BOTH)
    with pytest.raises(Stop):
        train_policy([tmp_path / "bags"], tmp_path / "policy", settings, on_progress=stop)
    train_policy([tmp_path / "bags"], tmp_path / "policy", settings)
    policy = load_openvla(tmp_path / "policy")
    assert policy.cameras == ("image", "wrist") and policy.state_dims == 2
    engine = Engine(policy, EngineSettings("ar"))
    black = np.zeros((40, 40, 3), np.uint8)

    def act(far: float, turn: float) -> np.ndarray:
        images = {"image": black, "wrist": np.full((40, 40, 3), round(200 * far), np.uint8)}
        stamp = engine.mailbox.last_stamp_ns + 1
        action = engine.act(Observation(images, LEFT, stamp, state=np.array([turn, 0.3])))
        assert isinstance(action, Action), action
        return action.values

    assert act(0.5, 1.0)[6] == pytest.approx(1, abs=0.1) and act(0.5, -1.0)[6] == pytest.approx(0, abs=0.1)
    assert act(0.9, 1.0)[0] > act(0.3, 1.0)[0] + 0.01 > act(0.9, -1.0)[0]


def test_a_bag_without_what_shall_be_read_is_refused_by_name(bags, tmp_path):
    with pytest.raises(UserError, match="no messages on topic '/wrist/image_raw'"):
        load_demonstrations(find_bags([bags]).bags, tmp_path / "cache", 28, BOTH)
    write_bags_of_all_sensors(tmp_path / "bags", bags=1)
    other = replace(BOTH, state_names=("lift",))
    with pytest.raises(
        UserError, match=r"no image has all inputs: no 'state' sample.*no message has 'lift'; they have reach, turn"
    ):
        load_demonstrations(find_bags([tmp_path / "bags"]).bags, tmp_path / "cache", 28, other)


@pytest.mark.nightly
def test_training_that_was_stopped_goes_on_as_if_it_had_not_been(bags, tmp_path):
    whole = train_policy([bags], tmp_path / "whole", training())

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step == 50:
            raise Stop

    with pytest.raises(Stop):
        train_policy([bags], tmp_path / "parts", training(), on_progress=stop)
    steps = []
    parts = train_policy(
        [bags], tmp_path / "parts", training(), on_progress=lambda progress: steps.append(progress.step)
    )
    assert steps[0] == 41  # after the last validation, where the state is kept
    assert [each.step for each in parts] == [20, 40, 60]
    assert [each.loss for each in parts] == pytest.approx([each.loss for each in whole], rel=1e-4)


@pytest.mark.nightly
def test_killed_training_goes_on(bags, tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; sys.path[:0] = {path!r}\n"
        "from lab.training.test_train_policy import training\n"
        "from specvla_ros.lab.training.train_policy import train_policy\n"
        "die = lambda progress: progress.step == 30 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "train_policy([Path({bags!r})], Path({out!r}), training(), on_progress=die)"
    ).format(path=[str(Path(__file__).parents[2]), *sys.path], bags=str(bags), out=str(tmp_path / "policy"))
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    history = train_policy([bags], tmp_path / "policy", training())
    assert [each.step for each in history] == [20, 40, 60]


def test_training_goes_on_in_one_of_several_processes(bags, tmp_path, monkeypatch):
    device = torch.device("cpu", 0)  # accelerate's, if there are several processes without a GPU
    monkeypatch.setattr(pytest.importorskip("accelerate").Accelerator, "device", device)
    few = training(steps=4, validate_every=2)

    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_policy([bags], tmp_path / "policy", few, on_progress=stop)
    assert [each.step for each in train_policy([bags], tmp_path / "policy", few)] == [2, 4]


def test_other_settings_do_not_go_on_with_a_state(bags, tmp_path):
    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_policy([bags], tmp_path / "policy", training(), on_progress=stop)
    with pytest.raises(UserError, match="state of another training"):
        train_policy([bags], tmp_path / "policy", training(seed=1))


def test_finished_checkpoint_is_not_written_over(bags, tmp_path):
    train_policy([bags], tmp_path / "policy", training(steps=2))
    with pytest.raises(UserError, match="already holds a checkpoint"):
        train_policy([bags], tmp_path / "policy", training(steps=2))


@pytest.mark.nightly
def test_training_goes_on_from_another_checkpoint(bags, tmp_path):
    first = train_policy([bags], tmp_path / "first", training(steps=40))
    again = training(steps=2, validate_every=1, learning_rate=1e-4, init=str(tmp_path / "first"))
    found = train_policy([bags], tmp_path / "second", again)
    assert found[0].loss < first[0].loss and abs(found[0].loss - first[-1].loss) < 0.2
    assert json.loads((tmp_path / "second" / "training.json").read_text())["init"] == str(tmp_path / "first")
    write_bags(tmp_path / "others", hindsight=False)
    config = tmp_path / "first" / "config.json"
    config.write_text(config.read_text().replace(LEFT, "go up"))
    train_policy([tmp_path / "others"], tmp_path / "third", again)
    assert load_openvla(tmp_path / "third").prompt.taught == (LEFT,)


def test_statistics_of_another_name_are_refused_where_those_of_the_checkpoint_stay(bags, tmp_path) -> None:
    write_nano(tmp_path / "first", SHAPE, (LEFT, RIGHT), {"d": action_statistics(np.eye(7))}, seed=0)
    for codec in ("bins", "digits"):
        other = training(steps=1, codec=codec, init=str(tmp_path / "first"), unnorm_key="mine")
        with pytest.raises(UserError, match=r"--unnorm-key mine: .*keeps its statistics, .* are named d: give"):
            train_policy([bags], tmp_path / codec, other)
        assert not (tmp_path / codec / "config.json").exists()


def test_new_instructions_bring_their_words_and_leave_the_rest_of_the_policy(tmp_path):
    write_nano(tmp_path, SHAPE, (LEFT, RIGHT), {"d": action_statistics(np.eye(7))}, seed=0)
    before = load_openvla(tmp_path)
    teach_instructions(tmp_path, ("go there", "turn right"), seed=0)
    after = load_openvla(tmp_path)
    assert after.prompt.taught == ("go there", "turn right")
    (new,) = {*after.prompt.ids("go there")} - {*before.prompt.ids("go right")}
    assert new == before.codec.action_ids.first, "new words come before the action tokens"
    assert after.codec.action_ids.first == new + 2
    one, other = (policy.model.decoder for policy in (before, after))
    for table in ("embed_tokens", "lm_head"):
        old, grown = (getattr(decoder, table).weight for decoder in (one, other))
        assert torch.equal(grown[:new], old[:new]) and torch.equal(grown[new + 2 :], old[new:])
        assert len(torch.unique(grown[new : new + 2], dim=0)) == 2


def test_data_that_is_not_there_or_not_enough_is_named(bags, tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        find_bags([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="no bags in"):
        find_bags([tmp_path])
    write_bags(tmp_path / "few", bags=3)
    with pytest.raises(UserError, match="too few to train on"):
        train_policy([tmp_path / "few"], tmp_path / "policy", training())
    write_bags(tmp_path / "mixed" / "a", bags=1)
    write_bags(tmp_path / "mixed" / "b", bags=1, hindsight=False)
    with pytest.raises(UserError, match="train on bags of one kind"):
        load_demonstrations(
            find_bags([tmp_path / "mixed" / "a", tmp_path / "mixed" / "b"]).bags, tmp_path / "cache", 28, TopicChoice()
        )


def test_order_is_the_same_wherever_it_begins():
    steps = np.arange(100, 150)
    whole = shuffled(steps, 8, seed=3)
    first = [next(whole) for _ in range(15)]
    later = shuffled(steps, 8, seed=3, start=9)
    for batch in first[9:]:
        np.testing.assert_array_equal(batch, next(later))
    assert sorted(np.concatenate(first[:6])) == sorted(set(np.concatenate(first[:6])))


def test_loss_is_least_at_the_true_bins_and_forgives_neighbours():
    tokenizer = ActionTokenizer(300)
    answers = torch.full((1, 7), 170)

    def loss_at(token: int, *, gripper: int) -> float:
        logits = torch.full((1, 7, 310), -20.0)
        logits[:, :, token] = 20.0
        logits[:, 6] = -20.0
        logits[:, 6, gripper] = 20.0
        return float(action_loss(logits, answers, tokenizer))

    assert loss_at(170, gripper=170) < loss_at(172, gripper=170) < loss_at(190, gripper=170)
    assert loss_at(170, gripper=170) < loss_at(170, gripper=171)


def test_statistics_leave_the_gripper_as_it_is():
    actions = np.random.default_rng(0).normal(size=(1000, 2, 7))
    found: Any = action_statistics(actions)["action"]
    assert found["q01"][6] == 0 and found["q99"][6] == 1 and found["mask"] == [True] * 6 + [False]
    assert found["q99"][0] == pytest.approx(np.quantile(actions[..., 0], 0.99))


@pytest.mark.parametrize(
    "change", [dict(steps=0), dict(batch_size=0), dict(learning_rate=0.0), dict(learning_rate=2.0)]
)
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(UserError, match="must"):
        training(**change)


def test_chunks_end_with_their_episode(bags, tmp_path):
    data = load_demonstrations(find_bags([bags]).bags, tmp_path / "cache", 28, TopicChoice())
    everything = (np.full(7, -np.inf), np.full(7, np.inf))
    chunks = action_chunks(data, 4, everything, None)
    assert chunks.shape == (120, 4, 7)
    low, high = (np.quantile(data.actions, share) * np.ones(7) for share in (0.2, 0.8))
    np.testing.assert_array_equal(action_chunks(data, 4, (low, high), None), chunks.clip(low, high))
    for step in (0, 3, 5, 6, 119):
        last = 6 * (step // 6) + 5
        np.testing.assert_array_equal(chunks[step], data.actions[[min(step + k, last) for k in range(4)], 0])


def test_a_chunks_actions_are_so_many_seconds_apart_whatever_the_pictures_rate(bags, tmp_path):
    data = load_demonstrations(find_bags([bags]).bags, tmp_path / "cache", 28, TopicChoice())
    rng = np.random.default_rng(0)
    gaps = rng.choice([50_000_000, 100_000_000, 200_000_000], len(data.actions))
    data = replace(data, time_ns=np.cumsum(gaps))
    everything = (np.full(7, -np.inf), np.full(7, np.inf))
    chunks = action_chunks(data, 4, everything, 0.2)
    for step in range(len(chunks)):
        mine = np.flatnonzero(data.episode_of == data.episode_of[step])
        for k, action in enumerate(chunks[step]):
            wanted = data.time_ns[step] + k * 200_000_000
            nearest = mine[np.abs(data.time_ns[mine] - wanted).argmin()]  # the earlier of two as near
            np.testing.assert_array_equal(action, data.actions[nearest, 0])


@pytest.mark.nightly
@pytest.mark.parametrize("codec", nightly_but(lambda codec: codec == "fast", ["digits", "fast"]))
@pytest.mark.parametrize("begins", nightly_but(lambda begins: not begins, [False, True]))
def test_a_policy_of_chunks_is_trained_and_answers_with_them(bags, tmp_path, codec: str, begins: bool) -> None:
    changes = dict(steps=80, validate_every=10, codec=codec, horizon=2)
    if begins:
        train_policy([bags], tmp_path / "first", training(steps=20))
        changes |= dict(init=str(tmp_path / "first"))
    history = train_policy([bags], tmp_path / "policy", training(**changes))
    assert history[-1].loss < 0.7 * history[0].loss
    assert len(history[-1].accuracy) == 1 and history[-1].accuracy[0] > 0.3 and not history[-1].bin_distance
    target = load_target(tmp_path / "policy", device="cpu")
    assert target.codec.horizon == 2 and type(target.codec).__name__ == f"{codec.title()}Codec"
    engine = Engine(target, EngineSettings("spec", draft=adjusted(DraftSettings(nodes=16), chunk_shift=True)))
    plain = Engine(target, EngineSettings("ar"))
    for seen in range(6):
        image = np.full((40, 40, 3), 60 + 20 * seen, dtype=np.uint8)
        ours, theirs = (each.act(Observation(image, LEFT, seen + 1)) for each in (engine, plain))
        assert type(ours) is type(theirs)
        if isinstance(ours, Action) and isinstance(theirs, Action):
            assert ours.tokens == theirs.tokens and ours.actions.shape == (2, 7)
        else:
            assert isinstance(ours, Drop) and ours.reason is DropReason.NOT_AN_ACTION


JOINTS = ("hip", "knee", "gripper")
STATE = TopicChoice(state_topic="/joint_states")


def write_joint_bags(
    directory: Path, *, bags: int = 20, steps: int = 6, names: tuple[str, ...] = JOINTS, way: float = 0.1
) -> None:
    """The joints' goals are ahead of them by what the picture's brightness says."""
    rng = np.random.default_rng(0)
    for i in range(bags):
        at, ahead = rng.uniform(-1, 1, (steps, 2)), rng.uniform(0.2, 1.0, (steps, 2))
        images = [np.full((40, 40, 3), round(200 * each[0]), dtype=np.uint8) for each in ahead]
        goals = [np.append(here + way * each, 1.0)[: len(names)] for here, each in zip(at, ahead, strict=True)]
        times = [0.2 * k for k in range(steps)]
        record = DemonstrationRecord(
            images,
            goals,
            LEFT,
            times,
            {},
            state_names=("knee", "hip"),
            states=[*at[:, ::-1].copy()],
            action_names=names,
        )
        write_demonstration(directory / f"bag-{i:02d}", record)


@pytest.mark.parametrize("codec", ["bins", "fast", "digits"])
def test_a_policy_of_joints_learns_their_displacements_and_names_them(tmp_path, codec: str) -> None:
    write_joint_bags(tmp_path / "bags")
    changes = dict(steps=4, validate_every=4, codec=codec, horizon=3, unnorm_key="specvla_joints", topics=STATE)
    train_policy([tmp_path / "bags"], tmp_path / "policy", training(**changes))
    target = load_target(tmp_path / "policy", device="cpu")
    assert target.codec.names == JOINTS and target.state_names == ("knee", "hip")
    convention = ConventionSettings().convention(target.unnorm_key, target.codec.dt_s, target.codec.names)
    assert (convention.frame, convention.joints, convention.dt_s) == (ActionFrame.JOINTS, JOINTS, 0.2)
    data = load_demonstrations(find_bags([tmp_path / "bags"]).bags, tmp_path / "cache", 28, STATE)
    everything = (np.full(3, -np.inf), np.full(3, np.inf))
    chunks = action_chunks(data, 1 if codec == "bins" else 3, everything, 0.2)
    np.testing.assert_array_equal(chunks[1, 0], [*(data.actions[1, 0, :2] - data.states[1, ::-1]), 1.0])
    if codec != "bins":
        np.testing.assert_array_equal(chunks[1, 2], [*(data.actions[3, 0, :2] - data.states[1, ::-1]), 1.0])
    if isinstance(target.codec, DigitsCodec):  # in 250 steps of a joint's range, not in the tool's 100
        answer = [id_ for id_ in Batches(require_openvla(target), data)._answers[1, 0].tolist() if id_ >= 0]
        numbers = [int(word) for word in target.codec._words(target.codec.action_tokens(answer))]
        assert all(number % 4 == 0 for number in numbers) and any(number % 10 for number in numbers)
    low, high = target.codec.action_range
    np.testing.assert_allclose([low[:2], high[:2]], np.quantile(chunks[..., :2].reshape(-1, 2), (0.01, 0.99), axis=0))


@pytest.mark.parametrize("tool", [False, True])
def test_an_exported_datasets_actions_are_of_joints_if_its_bags_are(tmp_path, tool: bool) -> None:
    state = tuple(f"joint{i}" for i in range(1, 7))
    names = () if tool else (*state, "gripper")
    images, actions = [np.zeros((40, 40, 3), np.uint8)] * 3, [np.array([0.1 * i] * 6 + [1.0]) for i in range(3)]
    states, times = [np.full(6, 0.05)] * 3, [0.0, 0.2, 0.4]
    record = DemonstrationRecord(images, actions, LEFT, times, {}, state_names=state, states=states, action_names=names)
    write_demonstration(tmp_path / "bag", record)
    export([tmp_path / "bag"], tmp_path / "dataset", ExportPlan(), TopicChoice())
    data = load_demonstrations([*find_bags([tmp_path / "dataset"]).bags], tmp_path / "cache", 28, STATE)
    assert data.action_names == names and data.state_names == state
    np.testing.assert_allclose(data.starts[:, :6], 0.0 if tool else 0.05)


def test_the_last_joint_of_an_arm_without_a_gripper_is_one_like_the_others(tmp_path) -> None:
    write_joint_bags(tmp_path / "bags", names=JOINTS[:2], way=-0.1)
    changes = dict(steps=2, validate_every=2, unnorm_key="specvla_joints", topics=STATE)
    train_policy([tmp_path / "bags"], tmp_path / "policy", training(**changes))
    target = load_target(tmp_path / "policy", device="cpu")
    low, high = target.codec.action_range
    assert target.codec.names == JOINTS[:2]
    assert (low < -0.09).all() and (high < -0.015).all(), "displacements between -0.1 and -0.02 of both"
    data = load_demonstrations(find_bags([tmp_path / "bags"]).bags, tmp_path / "cache", 28, STATE)
    taught = [target.codec.decode(each[0].tolist())[0] for each in Batches(require_openvla(target), data)._answers]
    np.testing.assert_allclose(taught, data.actions[:, 0] - data.starts, atol=0.002)


def test_a_policy_that_is_trained_further_keeps_its_statistics(tmp_path) -> None:
    write_joint_bags(tmp_path / "bags")
    write_joint_bags(tmp_path / "more", bags=22)
    changes = dict(steps=2, validate_every=2, unnorm_key="specvla_joints", topics=STATE)
    train_policy([tmp_path / "bags"], tmp_path / "first", training(**changes))
    train_policy([tmp_path / "more"], tmp_path / "second", training(**changes, init=str(tmp_path / "first")))
    assert (tmp_path / "second" / "config.json").read_bytes() == (tmp_path / "first" / "config.json").read_bytes()


def test_joints_without_their_state_or_under_a_tools_name_are_refused(tmp_path) -> None:
    write_joint_bags(tmp_path / "bags")
    for changes, why in (
        (dict(unnorm_key="specvla_joints"), "the state lacks hip, knee: .* give the joints' topic with --state-topic"),
        (dict(unnorm_key="specvla_table", topics=STATE), "known for actions of the tool: give --unnorm-key another"),
    ):
        with pytest.raises(UserError, match=why):
            train_policy([tmp_path / "bags"], tmp_path / "policy", training(**changes))
    write_bags(tmp_path / "tool", bags=1, hindsight=False)
    with pytest.raises(UserError, match=r"its actions are of x, y, .* but earlier bags' are of hip, knee, gripper"):
        load_demonstrations(
            [*find_bags([tmp_path / "bags", tmp_path / "tool"]).bags], tmp_path / "c", 28, TopicChoice()
        )


@pytest.mark.parametrize(
    "label",
    ["x,y,z,roll,pitch,yaw,gripper", "dx, dy, dz, droll, dpitch, dyaw, gripper_open", "action"],
)
def test_a_label_of_a_tools_action_does_not_make_it_one_of_joints(tmp_path, label: str) -> None:
    images, actions = [np.zeros((40, 40, 3), np.uint8)] * 2, [np.array([0.01, 0, 0, 0, 0, 0, 1.0])] * 2
    record = DemonstrationRecord(images, actions, LEFT, [0.0, 0.2], {}, action_names=tuple(label.split(",")))
    write_demonstration(tmp_path / "bag", record)
    data = load_demonstrations([tmp_path / "bag"], tmp_path / "cache", 28, TopicChoice())
    assert data.action_names == () and data.actions.shape == (2, 1, 7)
    np.testing.assert_array_equal(data.starts, 0.0)


def test_other_codecs_are_refused():
    with pytest.raises(UserError, match="--codec 'words' cannot be trained; choose one of bins, digits, fast"):
        training(codec="words")
