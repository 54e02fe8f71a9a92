"""Options and checks that several commands share."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specvla_ros.errors import UserError
from specvla_ros.models.settings import WeightFormat as Quantization
from specvla_ros.planning.device import known_devices

if TYPE_CHECKING:
    from specvla_ros.engine.settings import EngineSettings


class Dtype(str, Enum):
    """Number formats of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


PolicyOption = Annotated[
    Path | None, typer.Option(help="OpenVLA checkpoint directory. Default: the nano policy of this package.")
]
World = Annotated[str, typer.Option(help="table, or a LIBERO suite such as libero_spatial.")]
Episodes = Annotated[int, typer.Option(help="Per task.", min=1)]
Seed = Annotated[int, typer.Option(help="Of the first episode's start; the others follow.", min=0)]
Emulate = Annotated[
    str,
    typer.Option(help=f"Count stage times of a device: {', '.join(known_devices())} or a JSON file. An emulation."),
]
UnnormKey = Annotated[str, typer.Option(help="Dataset whose action statistics apply; empty: the only one there is.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[Dtype, typer.Option(help="auto: float32 on a CPU, bfloat16 on a GPU.")]
QuantizationOption = Annotated[
    Quantization, typer.Option("--quantization", help="Of the language model's layers; int4 and fp8 on a GPU only.")
]
CenterCrop = Annotated[
    bool, typer.Option("--center-crop", help="Use the middle 90 %, for checkpoints fine-tuned with augmentation.")
]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="A task's name; again for more. Default: all.")]
Workers = Annotated[int, typer.Option(help="Worker processes; 0: this one alone.", min=0)]
Mode = Annotated[str, typer.Option(help="How tokens are decoded; short for -p decode.mode:=…")]
Parameters = Annotated[
    list[str] | None,
    typer.Option("-p", "--param", help="name:=value, as the policy node takes it: decode.*, draft.*, acceptance.*"),
]
ParamsFile = Annotated[Path | None, typer.Option(help="ROS parameter file (a profile) with decode.*, draft.*, ….")]


def engine_settings(mode: str, parameters: list[str] | None, params_file: Path | None) -> "EngineSettings":
    """What --mode, -p and --params-file describe.

    Raises:
        UserError: an unknown parameter or a value out of range.
    """
    from specvla_ros.engine.settings import engine_settings_from

    return engine_settings_from(mode=mode, assignments=parameters or (), params_file=params_file)


def check_accelerate() -> None:
    """Whether what training needs is installed.

    Raises:
        UserError: it is not.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise UserError("training needs accelerate: pip install -r requirements/train.txt") from None
