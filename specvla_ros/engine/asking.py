# SPDX-License-Identifier: Apache-2.0
"""Questions about a picture that the policy acts on, answered in text beside its actions.

A question is one more segment of the forwards that go on anyway. The images' keys and values are copied from the slot
of the frame's own request, so that no image is computed twice; the question's words and its answer follow behind them,
in a slot that no frame takes. Of one forward they never have more rows than a tree has.
"""

from collections.abc import Sequence

import torch

from specvla_kernels.device import to_device
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.outcome import Question
from specvla_ros.engine.request import Request, ScheduledRequest
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.verifier import Commit
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.text import TextCodec
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import AnswersQuestions, PromptLayout, Target
from specvla_ros.speculation.accept import NOT_A_NUMBER, AcceptanceRule
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.tree import Tree


class Asking:
    """Answers one question at a time, by plain decoding.

    Args:
        target: the policy.
        settings: how the engine decodes; `ask_tokens` is the length of the longest answer.
        cache: keys and values; one of its slots is taken for good.
        root: the tree of a request that has committed nothing.

    Raises:
        UserError: this policy cannot be asked.
    """

    def __init__(self, target: Target, settings: EngineSettings, cache: KVCache, root: Tree) -> None:
        if not target.causal_prompt:
            raise UserError(
                f"{target.directory} looks at its instruction while it reads the images, so that no question can share "
                "them: set decode.ask_tokens to 0"
            )
        if not isinstance(target, AnswersQuestions) or target.action_head:
            raise UserError(
                f"{target.directory} answers no questions about images, or not with model.action_head: set "
                "decode.ask_tokens to 0"
            )
        self._target, self._answering, self._settings, self._cache, self._root = target, target, settings, cache, root
        self._codec = TextCodec(target.text_end_ids, target.decoder.config.vocab_size).with_text(settings.ask_tokens)
        slot = cache.take()
        assert slot is not None
        self._slot = slot
        self._strict = Strict()
        self._question: Question | None = None
        self._request: Request | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is being written."""
        return self._request is not None

    def ask(self, question: Question) -> None:
        """Takes a question in; the next forward of a frame, or the one under way, gives it its picture.

        Raises:
            UserError: another one is not answered yet, or the policy cannot be asked this.
        """
        self._drop_cancelled()
        if self._question is not None:
            raise UserError("another question is being answered: ask again when it is")
        if not question.text.strip():
            raise UserError("the question is empty")
        self._lay_out(self._target.blank_observation(), question)
        self._question = question

    def share(self) -> ScheduledRequest | None:
        """Its part of the next forward; None: it has none."""
        self._drop_cancelled()
        request = self._request
        if request is None:
            return None
        rows = min(max(0, request.layout.rows - request.prefix_len), self._settings.tree_nodes)
        ends = rows > 0 and request.prefix_len + rows == request.layout.rows
        return ScheduledRequest(request, rows, ends_prompt=ends)

    def begin(self, shares: Sequence[ScheduledRequest], rule: AcceptanceRule) -> None:
        """Gives the question that waits the newest frame whose images a forward has just completed.

        Args:
            shares: of that forward, oldest frame first.
            rule: that of the frames that begin, which the answer shares if it is strict.
        """
        question = self._question
        if question is None or self._request is not None:
            return
        for share in reversed(shares):
            frame = share.request
            if frame.observation.stream != question.stream:
                continue
            images = frame.layout.visual_rows[-1].stop
            if frame.prefix_len + share.prompt_rows >= images:
                question.observation = frame.observation
                try:
                    layout = self._lay_out(frame.observation, question)
                except UserError as error:
                    self.drop(str(error))
                    return
                self._request = self._begun(frame, layout, images, rule)
                return

    def commit(self, request: Request, commit: Commit) -> None:
        """Makes the tokens of a forward final."""
        question = self._question
        assert question is not None
        if NOT_A_NUMBER in commit.tokens:
            self.drop("the policy's logits hold NaN")
            return
        known = len(request.tokens)
        request.commit(commit)
        end = self._codec.end(request.tokens, known)
        request.cut(end or len(request.tokens))
        request.tree = Tree.from_root(commit.tokens_on_device[-1])
        question.forwards = len(request.tokens_per_forward)
        question.tokens = [token for token in request.tokens if token not in self._codec.end_ids]
        if end:
            question.done = True
            self._question = self._request = None

    def drop(self, problem: str) -> None:
        """Ends the question that waits or is being answered."""
        question, self._question, self._request = self._question, None, None
        if question is not None:
            question.problem, question.done = problem, True

    def _drop_cancelled(self) -> None:
        if self._question is not None and self._question.cancelled:
            self.drop("it was cancelled")

    def _begun(self, frame: Request, layout: PromptLayout, images: int, rule: AcceptanceRule) -> Request:
        """A request whose first rows are another's, which are copied."""
        for store in (self._cache.keys, self._cache.values):
            store[:, self._slot, :images].copy_(store[:, frame.slot, :images])
        decoder = self._target.decoder
        words = decoder.embed_tokens(to_device(layout.ids[images - layout.rows :], decoder.device))
        return Request(
            observation=frame.observation,
            slot=self._slot,
            layout=layout,
            wait_s=0.0,
            tree=self._root,
            codec=self._codec,
            rule=rule if isinstance(rule, Strict) else self._strict,
            prompt=torch.cat((words.new_zeros(images, words.shape[1]), words)),  # the images' rows are not read
            prefix_len=images,
            asked=True,
        )

    def _lay_out(self, observation: Observation, question: Question) -> PromptLayout:
        """The prompt of a question.

        Raises:
            UserError: the policy cannot be asked this, or it is longer than a slot holds.
        """
        layout = self._answering.question_layout(observation, question.text)
        if len(layout.ids) > self._settings.max_text_tokens:
            raise UserError(
                f"the question has {len(layout.ids)} tokens, but a KV slot holds {self._settings.max_text_tokens}: "
                "shorten it, or raise decode.max_text_tokens"
            )
        return layout
