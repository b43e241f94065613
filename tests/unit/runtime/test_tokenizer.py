from __future__ import annotations

import pytest
from helpers.toy_tokenizer import CHAT_TEMPLATE, EOS, MASK, PAD, encode, tokenizer_json

from trtllm_dspark.errors import EngineError, RequestError
from trtllm_dspark.runtime import Tokenizer


def make(template: str | None) -> Tokenizer:
    return Tokenizer(tokenizer_json(), chat_template=template, eos_token_ids=(EOS,))


def test_encode_chat_renders_the_template() -> None:
    assert make(CHAT_TEMPLATE).encode_chat([{"role": "user", "content": "hé"}]) == encode("hé")


def test_render_chat_offers_tokens_json_and_loop_controls() -> None:
    template = "{{ eos_token }}{{ messages | tojson }}{% for m in messages %}{% break %}{% endfor %}"
    assert make(template).render_chat([{"content": "<&>"}]) == '<|end|>[{"content": "<&>"}]'


def test_render_chat_marks_of_generation_change_nothing() -> None:
    inside = "{% generation %}{% set x = 'b' %}{{ x }}{{ m.content }}\n{% endgeneration %}"
    template = "{% set x = 'a' %}{% for m in messages %}" + inside + "{{ x }}{% endfor %}"
    assert make(template).render_chat([{"content": "hi"}]) == "bhi\na"


def test_render_chat_json_takes_what_templates_give_it() -> None:
    template = "{{ messages | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    assert make(template).render_chat([{"b": "é", "a": 1}]) == '[{"a":1,"b":"\\u00e9"}]'
    assert make("{{ messages | tojson(indent=1) }}").render_chat(["é"]) == '[\n "é"\n]'  # type: ignore[list-item]


def test_render_chat_tools_and_documents_are_none_unless_given() -> None:
    template = make("{% if tools is not none %}T{% endif %}{% if documents is not none %}D{% endif %}")
    assert template.render_chat([]) == ""
    assert template.render_chat([], tools=[1]) == "T"


def test_render_chat_special_tokens_are_those_of_the_tokenizer() -> None:
    template = "{{ bos_token }}[{{ eos_token }}]{{ pad_token }}{{ unk_token is defined }}"
    # As the ids say: the engines of earlier versions.
    plain = Tokenizer(tokenizer_json(), chat_template=template, eos_token_ids=(EOS, PAD), bos_token_id=MASK)
    assert plain.render_chat([]) == "<|mask|>[<|end|>]False"
    # Llama 3.1 generates until either of two tokens and its template closes turns with the second; Qwen3 has no bos.
    named = Tokenizer(
        tokenizer_json(),
        chat_template=template,
        eos_token_ids=(EOS, PAD),
        bos_token_id=MASK,
        special_tokens={"bos_token": None, "eos_token": "<|pad|>", "pad_token": "<|pad|>", "unk_token": None},
    )
    assert named.render_chat([]) == "[<|pad|>]<|pad|>False"
    assert named.eos_token_ids == (EOS, PAD)


def test_encode_half_a_surrogate_pair_is_refused() -> None:
    tokenizer = make(CHAT_TEMPLATE)
    for encode_text in (tokenizer.encode, lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(RequestError, match="character 1 is half a surrogate pair"):
            encode_text("a\ud83d")


def test_encode_chat_without_template_is_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        make(None).encode_chat([])


def test_render_chat_template_that_refuses_gives_its_message() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        make("{{ raise_exception('roles must alternate') }}").render_chat([])


def test_render_chat_refusal_quotes_the_messages_in_a_line() -> None:
    template = make("{{ raise_exception('unknown role ' + messages[0]['role']) }}")
    with pytest.raises(RequestError, match="unknown role xxx") as refused:
        template.render_chat([{"role": "x" * 10**6, "content": ""}])
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_render_chat_hostile_template_stays_in_the_sandbox(template: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        make(template).render_chat([{"role": "user", "content": "x"}])


def test_tokenizer_broken_template_is_refused() -> None:
    with pytest.raises(EngineError, match="chat template"):
        make("{% for %}")


def test_tokenizer_broken_json_is_refused() -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        Tokenizer("{}")
