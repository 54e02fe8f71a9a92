"""Options that several commands share."""

from enum import Enum
from typing import Annotated

import typer


class Dtype(str, Enum):
    """Number formats of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


UnnormKey = Annotated[str, typer.Option(help="Dataset whose action statistics apply; empty: the only one there is.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[Dtype, typer.Option(help="auto: float32 on a CPU, bfloat16 on a GPU.")]
CenterCrop = Annotated[
    bool, typer.Option("--center-crop", help="Use the middle 90 %, for checkpoints fine-tuned with augmentation.")
]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="A task's name; again for more. Default: all.")]
