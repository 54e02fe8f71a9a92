"""The parameters of the policy node."""

from dataclasses import dataclass

from specvla_ros.errors import UserError
from specvla_ros.models.config import QUANTIZATIONS
from specvla_ros.settings.decode import DecodeParameters
from specvla_ros.settings.parameter import parameter

TRANSPORTS = ("auto", "raw", "compressed")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class PolicyParameters(DecodeParameters):
    """Every parameter of the policy node; the descriptions are those that `ros2 param describe` shows."""

    checkpoint: str = parameter("", "Directory of the OpenVLA checkpoint in Hugging Face format.")
    unnorm_key: str = parameter("", "Whose action statistics to use; empty: the checkpoint's only ones.")
    device: str = parameter("auto", "Where the policy runs: auto (CUDA if it is there), cpu, cuda or cuda:N.")
    dtype: str = parameter(
        "auto", "Precision of the weights; auto: float32 on a CPU, bfloat16 on CUDA.", choices=DTYPES
    )
    model_quantization: str = parameter(
        "none",
        "Weights of the language model's layers: int4 (weights alone, for ar and spec), or w8a8 and fp8 (weights and "
        "activations, for every mode). Needs torchao.",
        name="model.quantization",
        choices=QUANTIZATIONS,
    )
    model_action_head: bool = parameter(
        False,
        "Read only the 256 action rows of the output head; for policies that answer with actions alone.",
        name="model.action_head",
    )
    center_crop: bool = parameter(
        False, "Crop images to the central 90 % of their area, as checkpoints fine-tuned with augmentation need."
    )
    image_transport: str = parameter(
        "auto",
        "Which image topics to subscribe to: image (raw), image/compressed, or both (auto). One spares bandwidth.",
        choices=TRANSPORTS,
    )
    instruction: str = parameter("", "What the robot shall do until the topic `instruction` says otherwise.")
    action_dt: float = parameter(
        0.2,
        "Time over which an action's displacements are meant [s]: the period of the training data.",
        minimum=0.001,
        maximum=10.0,
        writable=True,
    )
    max_image_age_s: float = parameter(
        1.0,
        "An image older than this gets no action [s]; 0 switches the check off.",
        minimum=0.0,
        maximum=3600.0,
        writable=True,
    )
    max_future_s: float = parameter(
        0.1,
        "How far an image's stamp may lie ahead of this node's clock [s].",
        minimum=0.0,
        maximum=3600.0,
        writable=True,
    )
    diagnostics_period_s: float = parameter(1.0, "Time between two diagnostics [s].", minimum=0.05, maximum=60.0)

    def check(self) -> None:
        """What can be told before anything is loaded.

        Raises:
            UserError: no checkpoint is named, or the values do not fit together.
        """
        if not self.checkpoint.strip():
            raise UserError(
                "parameter 'checkpoint' is empty; set it to the directory of an OpenVLA checkpoint, "
                "for example checkpoint:=/data/openvla-7b"
            )
        settings = self.engine_settings(self.max_image_age_s)
        if self.model_action_head:
            settings.check_action_head()
