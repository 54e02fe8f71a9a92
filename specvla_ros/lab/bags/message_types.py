# SPDX-License-Identifier: Apache-2.0
"""ROS message types without ROS: definitions, serialisation and deserialisation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from rosbags.interfaces import MessageDefinition, MessageDefinitionFormat, Nodetype
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore

from specvla_ros.errors import UserError

VLA_ACTION = "specvla_ros/msg/VlaAction"
DECODE_STATS = "specvla_ros/msg/DecodeStats"

_FORMER_PACKAGE = "specvla_msgs/"  # in recordings made before the messages joined this package
_SEPARATOR = "=" * 80


class MessageTypes:
    """The types of ROS 2, those that a bag defines, and otherwise this package's own."""

    def __init__(self) -> None:
        self._store = get_typestore(Stores.ROS2_JAZZY)
        self._own = {name: _definition(name) for name in (VLA_ACTION, DECODE_STATS)}
        self._learned: dict[str, MessageDefinition] = {}
        for name, text in self._own.items():
            for known in (name, name.replace("specvla_ros/", _FORMER_PACKAGE)):
                self._learned[known] = MessageDefinition(MessageDefinitionFormat.MSG, text)

    def learn(self, msgtype: str, definition: MessageDefinition) -> None:
        """Prepares a type for reading; uses the bag's definition, if any, unless it is a type of ROS 2."""
        if msgtype in self._store.fielddefs:
            self._store.get_msgdef(msgtype)  # generates the code now, not at the first message
        elif definition.format is not MessageDefinitionFormat.NONE and definition.data:
            self._learned[msgtype] = definition

    def deserialise(self, raw: bytes, msgtype: str) -> Any:
        self._parse(msgtype)
        try:
            return self._store.deserialize_cdr(raw, msgtype)
        except Exception as error:  # generated code on untrusted bytes
            raise UserError(
                f"{len(raw)} bytes cannot be read as {msgtype}; they are damaged ({type(error).__name__}: {error})"
            ) from error

    def serialise(self, msgtype: str, fields: Mapping[str, Any], *, stamp_ns: int, frame_id: str) -> bytes:
        """The CDR bytes of a message: a header with this stamp and frame, then the fields."""
        self._parse(msgtype)
        types = self._store.types
        stamp = types["builtin_interfaces/msg/Time"](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
        header = types["std_msgs/msg/Header"](stamp=stamp, frame_id=frame_id)
        arrays = {name: self._as_field(msgtype, name, value) for name, value in fields.items()}
        return bytes(self._store.serialize_cdr(types[msgtype](header=header, **arrays), msgtype))

    def definition(self, msgtype: str) -> str:
        """The ros2msg text of one of this package's types, followed by the definitions that it uses."""
        self._parse(msgtype)
        generated, _ = self._store.generate_msgdef(msgtype, ros_version=2)
        _, separator, needed = generated.partition(_SEPARATOR)
        return f"{self._own[msgtype].rstrip()}\n{separator}{needed}"

    def type_hash(self, msgtype: str) -> str:
        """The type's ROS 2 hash (REP 2011)."""
        self._parse(msgtype)
        return self._store.hash_rihs01(msgtype)

    def _parse(self, msgtype: str) -> None:
        if msgtype in self._store.fielddefs:
            return
        definition = self._learned.get(msgtype)
        if definition is None:
            raise UserError(f"message type {msgtype} is unknown, and the bag holds no definition of it; record as MCAP")
        try:
            if definition.format is MessageDefinitionFormat.IDL:
                types = get_types_from_idl(definition.data)
            else:
                types = get_types_from_msg(definition.data, msgtype)
            self._store.register({name: fields for name, fields in types.items() if name not in self._store.fielddefs})
        except Exception as error:  # a parser on untrusted text
            raise UserError(f"the bag's definition of {msgtype} cannot be parsed: {error}") from error

    def _as_field(self, msgtype: str, name: str, value: Any) -> Any:
        """Converts sequences of numbers to the serialiser's arrays."""
        _, fields = self._store.fielddefs[msgtype]
        kind, detail = dict(fields)[name]
        if kind is not Nodetype.SEQUENCE:
            return value
        (_, (element, *_)), *_ = cast("Any", detail)
        return list(value) if element == "string" else np.asarray(value, dtype=element)


def _definition(msgtype: str) -> str:
    """The text of one of this package's messages, from the installation or else from the sources' msg/."""
    here = Path(__file__)
    installed = here.parent / "definitions"
    folder = installed if installed.is_dir() else here.resolve().parents[3] / "msg"
    return (folder / f"{msgtype.rpartition('/')[2]}.msg").read_text()
