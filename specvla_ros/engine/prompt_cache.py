"""From an observation to prompt ids, with the last instruction's kept."""

from specvla_ros.engine.observation import Observation
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import Target


class PromptCache:
    """Tokenises an instruction once, not once per frame.

    Args:
        policy: whose prompt it is.
        max_text_tokens: the longest prompt text that a slot holds.
    """

    def __init__(self, policy: Target, max_text_tokens: int) -> None:
        self._policy = policy
        self._max_text_tokens = max_text_tokens
        self._last: tuple[str, tuple[int, ...]] = ("", ())

    def ids(self, observation: Observation) -> tuple[int, ...]:
        """The prompt of an observation.

        Raises:
            UserError: the policy cannot be asked this, or it is longer than a slot holds.
        """
        if observation.prompt_ids is not None:
            ids = self._policy.prompt.complete(observation.prompt_ids)
        elif self._last[0] == observation.instruction and self._last[1]:
            return self._last[1]
        else:
            ids = self._policy.prompt_ids(observation.instruction)
        if len(ids) > self._max_text_tokens:
            raise UserError(
                f"the prompt has {len(ids)} tokens, but a KV slot holds {self._max_text_tokens}: "
                "shorten the instruction, or raise decode.max_text_tokens"
            )
        if observation.prompt_ids is None:
            self._last = (observation.instruction, ids)
        return ids
