"""Chat templates: the helpers they expect, and the sandbox."""

from datetime import datetime

import pytest

from scheduler_service.text.chat_template import ChatTemplate, ChatTurn
from scheduler_service.text.errors import ChatTemplateError

TURNS = [ChatTurn("system", "be kind"), ChatTurn("user", "hello")]


def _render(source: str) -> str:
    template = ChatTemplate(
        source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2026, 3, 1)
    )
    return template.render(TURNS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[1].content }}{{ eos_token }}", "<s>hello</s>"),
        ("{{ messages[1]['role'] | upper }}", "USER"),
        ("{{ {'é': [1, true]} | tojson }}", '{"é": [1, true]}'),
        ("{{ '<b>' | tojson }}", '"<b>"'),
        ("{{ strftime_now('%d %b %Y') }}", "01 Mar 2026"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
         "{% endfor %}", "hello"),
        ("  {% if add_generation_prompt %}\nyes\n  {% endif %}\n", "yes\n"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "system"),
        ("{{ tools is none }}{{ documents is defined }}", "TrueTrue"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
         "{% endfor %}{{ ns.n }}", "2"),
        ("{{ messages[1].content[1:3] }}{{ messages[1].content.startswith('he') }}", "elTrue"),
    ],
)  # fmt: skip
def test_helpers(source: str, expected: str) -> None:
    assert _render(source) == expected


def test_a_refusal_keeps_the_words_of_the_template() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}{{ messages.__init__.__globals__['x'] }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{% include 'other' %}",
    ],
)
def test_what_the_sandbox_refuses_is_an_error_of_the_conversation(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"\[chat_template\] the model's template refused"):
        _render(source)


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_the_conversation_is_not_changed_by_the_template() -> None:
    with pytest.raises(ChatTemplateError):
        _render("{% set _ = messages[0].update({'content': 'x'}) %}")
