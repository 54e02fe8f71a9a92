# SPDX-License-Identifier: Apache-2.0
"""OpenVLA checkpoints of several cameras and with a state: config.json says so, and every mode decodes them alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import SENSORS_CAMERAS as CAMERAS
from support.checkpoints import copy_checkpoint, edit_json, load_openvla, with_sensors, write_checkpoint

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.settings import NO_HEAD, DraftSettings, adjusted

ASKED = "put the carrot on the plate"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_sensors(write_checkpoint(tmp_path_factory.mktemp("sensors"), seed=5))


@pytest.fixture(scope="module")
def target(directory: Path) -> OpenVLATarget:
    return load_openvla(directory, device="cpu")


def observation(seed: int, stamp_ns: int = 1) -> Observation:
    rng = np.random.default_rng(seed)
    images = {name: rng.integers(0, 256, (60, 80, 3), dtype=np.uint8) for name in reversed(CAMERAS)}
    return Observation(images, ASKED, stamp_ns=stamp_ns, state=rng.uniform([-1, 0], [1, 0.08]))


def test_the_prompt_is_bos_then_the_pictures_in_order_then_the_state_then_the_text(target: OpenVLATarget) -> None:
    seen = observation(0)
    layout = target.prompt_layout(seen)
    assert seen.state is not None and target.cameras == CAMERAS and target.state_dims == 2
    # As an action's values are written: bins of the range between the training data's quantiles.
    edges = np.linspace(-1, 1, 256)
    normalised = [seen.state[0], seen.state[1] / 0.04 - 1]
    state = [target.model.config.token_vocab_size - np.digitize(value, edges) for value in normalised]
    words = target.prompt.ids(ASKED)
    assert layout.ids == (words[0], *state, *words[1:])
    pictures = [target.model.image_embeddings(target.image_processor(seen.cameras[name])) for name in CAMERAS]
    text = target.decoder.embed_tokens(torch.tensor(layout.ids))
    expected = torch.cat((text[:1], *pictures, text[1:]))
    torch.testing.assert_close(target.prompt_embeddings(seen, layout.ids), expected)
    assert layout.rows == len(expected) and layout.visual_rows == (range(1, 1 + target.image_tokens),)


def test_a_state_beyond_the_training_data_takes_the_last_bin(target: OpenVLATarget) -> None:
    assert target.state is not None
    np.testing.assert_array_equal(target.state.ids(np.array([9.0, -9.0])), target.state.ids(np.array([1.0, 0.0])))


@pytest.mark.parametrize("mode", ["spec", "pipeline", "specpipe"])
def test_strict_decoding_equals_plain_decoding_in_every_mode(mode: str, directory: Path) -> None:
    plain = Engine(load_openvla(directory, device="cpu"), EngineSettings("ar"))
    drafts = adjusted(DraftSettings(head=NO_HEAD), temporal=True)
    engine = Engine(load_openvla(directory, device="cpu"), EngineSettings(mode, draft=drafts))
    found: list[Outcome] = []
    for stamp in range(1, 9):
        found += [*engine.submit(observation(stamp // 2, stamp)), *engine.tick(), *engine.tick()]
    while engine.busy:
        found += engine.tick()
    actions = [each for each in found if isinstance(each, Action)]
    assert len(actions) > 3
    for action in actions:
        expected = plain.act(observation(action.observation.stamp_ns // 2, plain.mailbox.last_stamp_ns + 1))
        assert isinstance(expected, Action) and action.tokens == expected.tokens


def test_the_state_and_every_picture_decide(target: OpenVLATarget) -> None:
    seen, decoder = observation(0), target.decoder

    def prompt(**changes: Any) -> torch.Tensor:
        changed = Observation(**vars(seen) | changes)
        return target.prompt_embeddings(changed, target.prompt_layout(changed).ids)

    whole = prompt()
    for name in CAMERAS:
        assert not prompt(images={**seen.cameras, name: 255 - seen.cameras[name]}).equal(whole)
    assert not prompt(state=np.array([0.9, 0.01])).equal(whole) and whole.dtype == decoder.dtype


def test_other_cameras_and_states_are_refused(target: OpenVLATarget) -> None:
    seen = observation(0)
    two = {name: seen.cameras[name] for name in CAMERAS[:2]}
    with pytest.raises(UserError, match="needs images of the cameras image, left, wrist, but got image, left"):
        target.prompt_layout(Observation(two, ASKED, 1, state=seen.state))
    for state in (None, np.zeros(3), np.array([0.0, np.nan])):
        with pytest.raises(UserError, match="reads the robot's state, 2 finite numbers"):
            target.prompt_layout(Observation(seen.images, ASKED, 1, state=state))


def test_a_config_that_does_not_fit_is_refused(directory: Path, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cameras": ["image", "image"]}, "a list of distinct names"),
        ({"cameras": []}, "a list of distinct names"),
        ({"state_dims": 3}, "state_dims 3 and statistics of 2 numbers under proprio"),
    ]
    for i, (changes, words) in enumerate(wrong):
        copied = with_sensors(copy_checkpoint(directory, tmp_path / str(i)), **changes)
        with pytest.raises(UserError, match=words):
            load_openvla(copied, device="cpu")
    copied = copy_checkpoint(directory, tmp_path / "none")
    edit_json(copied / "config.json", lambda config: config["norm_stats"]["bridge_orig"].pop("proprio"))
    with pytest.raises(UserError, match=r"\['proprio'\] needs the lists q01 and q99"):
        load_openvla(copied, device="cpu")
    with pytest.raises(UserError, match="needs exactly the cameras image, left, wrist;"):
        load_openvla(directory, device="cpu", cameras=("image", "left"))
