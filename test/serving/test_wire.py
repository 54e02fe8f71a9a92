# SPDX-License-Identifier: Apache-2.0
"""What clients send, read or refused part by part; what is sent is read back."""

import io
import json
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image

from specvla_ros.errors import UserError
from specvla_ros.serving import vla_eval, wire

PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def policy(*cameras: str, state: int = 0, key: str = "bridge") -> Any:
    return SimpleNamespace(cameras=cameras or ("image",), state_dims=state, unnorm_key=key)


def sent(**fields: Any) -> Any:
    """What is read of an array in openpi's form, with some fields changed."""
    array = {b"__ndarray__": True, b"data": b"\1\2\3\4", b"dtype": "|u1", b"shape": [2, 2]}
    packed = msgpack.packb({"a": array | {name.encode(): value for name, value in fields.items()}})
    return wire.unpack(packed)["a"]


@pytest.mark.parametrize("text_names", [False, True])
@pytest.mark.parametrize(
    "array", [PICTURE, np.linspace(0, 1, 3), np.array([[1], [2]], np.float32), np.array(3), PICTURE[:, ::2]]
)
def test_arrays_come_back_as_they_were_sent(array: np.ndarray, text_names: bool) -> None:
    read = [
        wire.unpack(wire.pack({"a": array, "b": 1}, text_names=text_names))["a"],
        wire._array_of_text(wire.dump(array)),
    ]
    for each in read:
        assert each.dtype == array.dtype and each.shape == array.shape and np.array_equal(each, array)


def test_shapes_and_kinds_at_their_limits() -> None:
    assert sent().tolist() == [[1, 2], [3, 4]] and wire._MAX_DIMS == 8
    assert sent(shape=[4] + [1] * (wire._MAX_DIMS - 1)).ndim == wire._MAX_DIMS
    assert sent(shape=[0, 5], data=b"").shape == (0, 5) and sent(dtype="<u2", shape=[2]).tolist() == [513, 1027]
    assert sent(dtype="longlong", shape=[1], data=b"\5" + 7 * b"\0").tolist() == [5], "a name of eight letters"
    for fields, why in (
        (dict(shape=[4] + [1] * wire._MAX_DIMS), "at most"),
        (dict(shape=[-2, -2]), "whole numbers"),
        (dict(shape=[-1, 0], data=b""), "whole numbers"),
        (dict(shape=[2.0, 2]), "whole numbers"),
        (dict(shape=4), "whole numbers"),
        (dict(shape=[5]), "does not match its 4 bytes"),
        (dict(data="abcd"), "does not match its 0 bytes"),
        (dict(dtype="|O"), "use a numeric one such as"),
        (dict(dtype="<U1"), "use a numeric one such as"),
        (dict(dtype="no such"), "use a numeric one such as"),
        (dict(dtype="ulonglong"), "use a numeric one such as"),
        (dict(dtype=3), "use a numeric one such as"),
        (dict(dtype=","), "use a numeric one such as"),
        (dict(dtype="2}i (O"), "use a numeric one such as"),
    ):
        with pytest.raises(UserError, match=why):
            sent(**fields)


def encoded(size: tuple[int, int], kind: str = "PNG", mode: str = "RGB") -> bytes:
    Image.new(mode, size, 7 if mode == "1" else (1, 2, 3)).save(file := io.BytesIO(), format=kind)
    return file.getvalue()


def test_pictures_as_files_within_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 4000 * 4000 < wire._MAX_PIXELS == 4096 * 4096, "any camera's, and no more memory than 48 MB"
    monkeypatch.setattr(wire, "_MAX_PIXELS", 6)
    sent = {"__image__": True, "format": "png", "data": encoded((3, 2))}
    (picture,) = wire.unpack(msgpack.packb({"a": sent})).values()
    asked = wire.read_observation({"prompt": "lift", "image": picture}, policy())
    assert asked.images["image"].shape == (2, 3, 3) and asked.images["image"][1, 2].tolist() == [1, 2, 3]
    assert wire.EncodedPicture(encoded((2, 2), "JPEG")).decode().shape == (2, 2, 3)
    for data, why in (
        (encoded((7, 1)), r"may have at most 6 pixels, got \(7, 1\)"),
        (encoded((2, 2), "BMP"), "not a PNG or JPEG"),
        (encoded((2, 2))[:50], "truncated"),
        (3, "not a PNG or JPEG"),
    ):
        (picture,) = wire.unpack(msgpack.packb({"a": {"__image__": True, "data": data}})).values()
        with pytest.raises(UserError, match=why):
            picture.decode()


def test_a_raw_picture_is_an_array_and_a_word_of_its_fields_alone_is_none() -> None:
    raw = {"__image__": True, "format": "raw", "data": b"\1\2", "dtype": "|u1", "shape": [2]}
    assert wire.unpack(msgpack.packb({"a": raw}))["a"].tolist() == [1, 2]
    for other in ({"format": "raw", "data": b"\1\2"}, {"shape": [2]}):
        assert wire.unpack(msgpack.packb({"a": other})) == {"a": other}
    assert wire.unpack(msgpack.packb({"a": {b"__npgeneric__": True, b"data": 3}})) == {"a": 3}
    assert wire.unpack(msgpack.packb({"a": {1: 2}})) == {"a": {1: 2}}


def test_an_array_is_sent_under_the_names_that_its_reader_knows() -> None:
    array = np.array([[1, 2]], np.int8)
    fields = {"__ndarray__": True, "data": b"\1\2", "dtype": "|i1", "shape": [1, 2]}
    assert msgpack.unpackb(wire.pack({"a": array}, text_names=True)) == {"a": fields}
    for packed in (wire.pack({"a": array}), wire.pack({"a": array}, text_names=False)):
        assert msgpack.unpackb(packed) == {"a": {name.encode(): field for name, field in fields.items()}}
    with pytest.raises(TypeError, match="object cannot be sent"):
        wire.pack({"a": object()})


def test_a_message_has_no_more_items_than_the_limit() -> None:
    most = 4096
    assert len(wire.unpack(msgpack.packb({"a": [0] * most}))["a"]) == most
    assert len(wire.unpack(msgpack.packb({"a": {str(n): 0 for n in range(most)}}))["a"]) == most
    for value in ([0] * (most + 1), {str(n): 0 for n in range(most + 1)}):
        with pytest.raises(UserError, match="not valid msgpack"):
            wire.unpack(msgpack.packb({"a": value}))


@pytest.mark.parametrize("text", ["AA", "A!AA", 3, None])
def test_what_is_no_base64_is_said(text: object) -> None:
    with pytest.raises(UserError, match="bytes are not valid base64"):
        wire.parse(json.dumps({"a": {"__numpy__": text, "dtype": "|u1", "shape": [0]}}).encode())


@pytest.mark.parametrize("read", [wire.parse, wire.unpack])
def test_a_message_is_an_object_with_names(read: Any) -> None:
    for message in (b"\xc1", b"[1]", b"\x91\x01", b"\x81\x01\x02", b"{"):
        with pytest.raises(UserError):
            read(message)


@pytest.mark.parametrize(
    "names",
    [
        {"image": PICTURE},
        {"image_image": PICTURE},
        {"observation/image": PICTURE},
        {"images": {"image": PICTURE}},
    ],
)
def test_the_first_camera_by_any_of_its_names(names: dict[str, Any]) -> None:
    asked = wire.read_observation({"prompt": "lift", **names}, policy())
    assert np.array_equal(asked.images["image"], PICTURE) and asked.instruction == "lift"
    assert asked.state is None and asked.ignored == ""


def test_each_camera_gets_its_own_picture_and_the_state_its_numbers() -> None:
    message = {"instruction": "lift", "image": PICTURE, "wrist_image": 255 - PICTURE, "state": [[1, 2]], "z": 1, "a": 2}
    asked = wire.read_observation(message, policy("base", "wrist", state=2))
    assert np.array_equal(asked.images["base"], PICTURE) and np.array_equal(asked.images["wrist"], 255 - PICTURE)
    assert asked.state is not None and asked.state.dtype == np.float64 and asked.state.tolist() == [1, 2]
    assert asked.ignored == "a, z"
    assert wire.read_observation(message, policy("base")).ignored == "a, state, wrist_image, z"


def test_what_is_missing_or_of_another_kind_is_named() -> None:
    whole: dict[str, Any] = {"prompt": "lift", "image": PICTURE, "state": [1.0]}
    for given, of, why in (
        (whole | {"prompt": 3}, policy(), "'prompt' must be text, got int"),
        (whole | {"instruction": ["lift"]}, policy(), "'instruction' must be text, got list"),
        ({"image": PICTURE}, policy(), "give the task as 'prompt' or 'instruction'"),
        (
            whole,
            policy("base", "wrist"),
            "the image of camera 'wrist' is missing; the policy's cameras are base, wrist",
        ),
        ({"prompt": "lift"}, policy(), "the message has none"),
        (whole | {"image": PICTURE[0]}, policy(), r"must be uint8 RGB .* got uint8 \[4, 3\]"),
        (whole | {"image": PICTURE[..., :2]}, policy(), r"got uint8 \[4, 4, 2\]"),
        (whole | {"image": PICTURE.astype(float)}, policy(), "got float64"),
        (whole | {"image": [1]}, policy(), r"got list; send it as an array, as JSON does after json_numpy\.patch\(\)"),
        ({"prompt": "lift", "image": PICTURE}, policy(state=3), "send 3 numbers as 'state'"),
        (whole | {"state": "ab"}, policy(state=1), "must be a list of numbers"),
        (whole | {"state": [1, 2]}, policy(state=3), r"'state' must be 3 finite numbers, got \[1\.0, 2\.0\]"),
        (whole | {"state": [float("nan")]}, policy(state=1), r"'state' must be 1 finite numbers, got \[nan\]"),
        (whole | {"state": [10**400]}, policy(state=1), "must be a list of numbers"),
        (whole | {"unnorm_key": PICTURE}, policy(), "'unnorm_key' must be text, got ndarray"),
        (whole | {"unnorm_key": "other"}, policy(), "unnorm_key other, but the policy was loaded with bridge"),
    ):
        with pytest.raises(UserError, match=why):
            wire.read_observation(given, of)
    for key in ("bridge", "", None):
        wire.read_observation(whole | {"unnorm_key": key}, policy())
    wire.read_observation(whole | {"unnorm_key": "libero_goal"}, policy(key="libero_goal_no_noops"))


@pytest.mark.parametrize(
    ("cameras", "state", "wanted"),
    [
        (("image",), 0, set()),
        (("image", "wrist"), 0, {"send_wrist_image"}),
        (("image",), 8, {"send_state"}),
        (("image", "wrist"), 8, {"send_wrist_image", "send_state"}),
    ],
)
def test_a_benchmark_is_asked_for_what_the_policy_reads(cameras: tuple[str, ...], state: int, wanted: set[str]) -> None:
    hello = vla_eval._hello(policy(*cameras, state=state))
    assert hello["observation_params"] == dict.fromkeys(wanted, True) and hello["protocol_version"] == 1


def test_a_benchmarks_cameras_by_name_or_in_order() -> None:
    both = policy("image", "wrist")

    def names(**payload: Any) -> dict[str, Any]:
        return vla_eval._observation({"task_description": "lift", **payload}, both)

    assert names(images={"wrist": 1, "image": 2}) == {"wrist": 1, "image": 2, "prompt": "lift"}
    assert names(images={"agentview": 1, "eye": 2, "third": 3}) == {
        "image": 1,
        "wrist": 2,
        "third": 3,
        "prompt": "lift",
    }
    for images in ({"wrist": 2, "agentview": 1}, {"wrist_image": 2, "agentview": 1}, {"agentview": 1, "wrist": 2}):
        found = names(images=images)
        assert (found["image"], found.get("wrist", found.get("wrist_image"))) == (1, 2), "what has its name keeps it"
    assert names(images=PICTURE[0, 0, 0], states=[1]) == {"image": 0, "state": [1], "prompt": "lift"}
    assert names() == {"prompt": "lift"}
