# SPDX-License-Identifier: Apache-2.0
"""Instructions as a stranger may send them: what becomes of them is a prompt, or a short reason."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_checkpoint import write_random_checkpoint
from tokenizers import AddedToken, Tokenizer

from specvla_ros.errors import UserError
from specvla_ros.models.families.openvla.prompt import PromptTokenizer, read_prompt_tokenizer
from specvla_ros.models.settings import PromptStyle
from specvla_ros.models.tokenizer import MAX_INSTRUCTION

SPECIAL = ("<s>", "</s>", "<pad>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, hidden_size=32, layers=1)
    read = Tokenizer.from_file(str(Path(directory, "tokenizer.json")))
    read.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return read


def prompt_of(tokenizer: Tokenizer, *taught: str) -> PromptTokenizer:
    return PromptTokenizer(
        tokenizer, style=PromptStyle.OPENVLA, trailing_id=None, vocab_size=tokenizer.get_vocab_size(), taught=taught
    )


@pytest.mark.parametrize("token", [*SPECIAL, "</S>"])
def test_a_special_token_cannot_be_smuggled_in(tokenizer: Tokenizer, token: str) -> None:
    with pytest.raises(UserError, match=f"contains '{token.lower()}', a special token of the policy"):
        prompt_of(tokenizer).ids(f"pick up the cube {token} and more")


@given(text=st.text(alphabet=st.sampled_from("ab <>/spd\0\ud800é")))
def test_no_instruction_brings_more_special_ids_than_the_prompt_has(tokenizer: Tokenizer, text: str) -> None:
    special = {tokenizer.token_to_id(each) for each in SPECIAL}
    prompt = prompt_of(tokenizer)
    usual = [each for each in prompt.ids("ab") if each in special]
    try:
        ids = prompt.ids(text)
    except UserError as error:
        assert len(str(error)) < 300
    else:
        assert [each for each in ids if each in special] == usual


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("lift\0 the cube", "NUL"),
        ("lift \udcff", "not valid Unicode"),
        ("x" * (MAX_INSTRUCTION + 1), f"the limit is {MAX_INSTRUCTION}"),
        (" " * 100_000 + "lift", f"the limit is {MAX_INSTRUCTION}"),
    ],
)
def test_what_is_no_instruction_is_refused_with_a_short_reason(tokenizer: Tokenizer, text: str, reason: str) -> None:
    for prompt in (prompt_of(tokenizer), prompt_of(tokenizer, "lift")):
        with pytest.raises(UserError, match=reason) as refused:
            prompt.ids(text)
        assert len(str(refused.value)) < 200


def test_an_untaught_instruction_is_not_given_back_whole(tokenizer: Tokenizer) -> None:
    taught = [f"lift {n} {'cubes ' * 100}".strip() for n in range(30)]
    with pytest.raises(UserError, match=r"not trained on 'xxx.*and 10 more") as refused:
        prompt_of(tokenizer, *taught).ids("x" * MAX_INSTRUCTION)
    assert len(str(refused.value)) < 2000


def test_a_prompt_begins_with_bos_though_the_file_adds_none(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, hidden_size=32, layers=1)
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = prompt_of(read).ids("lift the cube")
    read.post_processor = None
    without = prompt_of(Tokenizer.from_str(read.to_str()))
    assert without.tokenizer is not None and without.tokenizer.encode("lift").ids[0] != prompt[0]
    assert without.ids("lift the cube") == prompt and prompt[0] == read.token_to_id("<s>")


def test_truncation_and_padding_of_the_file_change_no_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    changed = Tokenizer.from_str(tokenizer.to_str())
    changed.enable_truncation(12)
    changed.enable_padding(length=200)
    changed.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    read = read_prompt_tokenizer(tmp_path, style=PromptStyle.OPENVLA, token_vocab_size=size, vocab_size=size)
    for instruction in ("lift the red cube", "lift the blue cube"):
        assert read.ids(instruction)[:-1] == prompt_of(tokenizer).ids(instruction)
