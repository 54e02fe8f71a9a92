# SPDX-License-Identifier: Apache-2.0
"""The given start of an answer: its tokens are computed with the prompt, and only the rest is decoded."""

from dataclasses import dataclass

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout, Target, answer_layout


@dataclass(frozen=True)
class AnswerPrefix:
    """The first tokens of one answer; empty: all of it is decoded."""

    tokens: tuple[int, ...] = ()
    text_ns: int = 0  # stamp of the image that they were written from; 0: unknown
    actions: int = 0  # number of actions in the tokens, with decode.commit
    # True if nothing is given, to renew the thought that is given to newer images meanwhile: these do not overtake it.
    renews: bool = False

    def lay_out(self, target: Target, codec: Codec, observation: Observation) -> PromptLayout:
        """The rows of an observation's prompt with those of the tokens after it.

        Raises UserError if the observation does not fit the policy, or no answer continues after the tokens.
        """
        if self.tokens:
            self._check(target, codec)
        return answer_layout(target, observation, given=len(self.tokens))

    def _check(self, target: Target, codec: Codec) -> None:
        if not target.causal_prompt:
            raise UserError("this policy's prompt attends bidirectionally, so the start of an answer cannot be given")
        vocabulary = target.decoder.config.vocab_size
        wrong = [token for token in self.tokens if not 0 <= token < vocabulary]
        if wrong:
            raise UserError(f"the given token {wrong[0]} is outside the vocabulary of {vocabulary} ids")
        if len(self.tokens) >= codec.max_tokens:
            raise UserError(
                f"the given start of the answer has {len(self.tokens)} tokens, but a whole answer has at most "
                f"{codec.max_tokens}: shorten it, or raise decode.max_reasoning_tokens if the policy writes text"
            )
        if codec.end(self.tokens, 0):
            raise UserError("the given start is a whole answer, so there is nothing to decode: shorten it")


NO_PREFIX = AnswerPrefix()
