"""Chat templates as published: answers are found, media expanded, and what would differ at inference is refused."""

import random
from typing import Any, NamedTuple

import pytest
from chat_tokenizers import byte_tokenizer, llama_tokenizer
from transformers import PreTrainedTokenizerFast

from dit_lora.data.chat.conversation import Conversation, ConversationKind, Turn
from dit_lora.data.chat.template import MediaPlaceholderText, render_template
from dit_lora.errors import DitLoraError

LLAMA, BYTES = llama_tokenizer(), byte_tokenizer()
WORDS = [
    "the",
    "cat",
    "Größe",
    "猫が走る",
    "🎸🎻",
    "(A)",
    "5",
    "12.75",
    "don't\nnew",
    "it's;",
    "naïve",
    "end.",
    "Ж",
    "{",
    "##",
    "x_y",
    "..",
]
_TEXTS = (
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}"
)
# llava-hf/LLaVA-NeXT-Video-7B-hf, chat_template.json
LLAVA_NEXT_VIDEO = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'][0]['text'] }}"
    "{% else %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>\n' }}{% endfor %}"
    + _TEXTS
    + "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Qwen/Qwen2.5-VL-7B-Instruct, chat_template.json
QWEN2_5_VL = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or "
    "'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}Picture "
    "{{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen/Qwen3-VL-8B-Instruct, chat_template.json, without its branches for tools
QWEN3_VL = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].content is string %}
        {{- messages[0].content }}
    {%- else %}
        {%- for content in messages[0].content %}
            {%- if 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif content.type == 'video' or 'video' in content %}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- for content_item in message.content %}
            {%- if 'text' in content_item %}
                {{- content_item.text }}
            {%- endif %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# transformers/models/smolvlm/processing_smolvlm.py, DEFAULT_CHAT_TEMPLATE
SMOLVLM2 = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# OpenGVLab/InternVL3-1B-hf, chat_template.jinja
INTERNVL3 = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<image>\n' }}{% elif content['type'] == 'video' %}{{ '<video>\n' }}{% elif content['type'] == 'text' %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
# transformers/models/llava_next_video/convert_llava_next_video_weights_to_hf.py, chat_mistral
LLAVA_MISTRAL = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}"
    "{% endfor %}{{' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'][0]['text'] + '</s> '}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
_QWEN_PAD = "<|vision_start|><|video_pad|><|vision_end|>"
_STAMPED = "<0.3 seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>"


class Case(NamedTuple):
    template: str
    tokenizer: PreTrainedTokenizerFast
    media: MediaPlaceholderText
    end: str
    kind: ConversationKind = "video"
    system: bool = True


CASES = {
    "llava-next-video": Case(LLAVA_NEXT_VIDEO, LLAMA, MediaPlaceholderText("<video>", "<video>" * 6), ""),
    "llava-mistral": Case(
        LLAVA_MISTRAL, LLAMA, MediaPlaceholderText("<image>", "<image>" * 4), "</s>", "image", False
    ),
    "qwen2.5-vl": Case(
        QWEN2_5_VL,
        BYTES,
        MediaPlaceholderText(_QWEN_PAD, _QWEN_PAD.replace("<|video_pad|>", "<|video_pad|>" * 5)),
        "<|im_end|>",
    ),
    "qwen3-vl": Case(QWEN3_VL, BYTES, MediaPlaceholderText(_QWEN_PAD, _STAMPED * 2), "<|im_end|>"),
    "smolvlm2": Case(
        SMOLVLM2,
        BYTES,
        MediaPlaceholderText("<video>", "Two frames.\nFrame from 00:00:\n<image><image>\n\n"),
        "<end_of_utterance>",
    ),
    "internvl3": Case(
        INTERNVL3,
        byte_tokenizer(trim_offsets=False),
        MediaPlaceholderText("<video>", "Frame1: <image><image>\nFrame2: <image><image>"),
        "<|im_end|>",
    ),
}


class Template:
    """A checkpoint's tokenizer, with its template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str) -> None:
        self.tokenizer, self.template = tokenizer, template

    def apply_chat_template(self, conversation: Any, **named: Any) -> Any:
        return self.tokenizer.apply_chat_template(conversation, chat_template=self.template, **named)


def words(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 8)))


def sample(seed: int, case: Case, kind: ConversationKind | None = None) -> Conversation:
    rng = random.Random(seed)
    turns = tuple(Turn(words(rng), words(rng)) for _ in range(rng.randint(1, 4)))
    system = words(rng) if case.system and rng.random() < 0.5 else ""
    return Conversation(str(seed), kind or case.kind, None, turns, system=system)


def render(case: Case, one: Conversation, **named: Any) -> Any:
    media = None if one.kind == "text" else case.media
    template = Template(case.tokenizer, case.template)
    return render_template(template, case.tokenizer, one, media, **named)


def messages(one: Conversation) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if one.system:
        turns.append({"role": "system", "content": [{"type": "text", "text": one.system}]})
    for index, turn in enumerate(one.turns):
        media = [] if index or one.kind == "text" else [{"type": one.kind}]
        turns.append({"role": "user", "content": [*media, {"type": "text", "text": turn.question}]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
    return turns


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_template_expanded(name: str) -> None:
    case = CASES[name]
    for seed in range(25):
        conversation = sample(seed, case, "text" if seed % 5 == 0 else None)
        text = Template(case.tokenizer, case.template).apply_chat_template(
            messages(conversation), tokenize=False, add_generation_prompt=False
        )
        if conversation.kind != "text":
            text = text.replace(case.media.placeholder, case.media.expansion)
        text = text.rstrip() + ("" if case.end else case.tokenizer.eos_token)
        assert render(case, conversation).ids == case.tokenizer(text).input_ids


@pytest.mark.parametrize("name", CASES)
def test_answers_are_learned_with_their_end_of_turn(name: str) -> None:
    case = CASES[name]
    for seed in range(25):
        conversation = sample(seed, case)
        rendered = render(case, conversation)
        pieces = {
            part: [case.tokenizer.decode(p.ids) for p in rendered.pieces if p.part == part]
            for part in ("answer", "question", "media")
        }
        ends = [case.end or ""] * (len(conversation.turns) - 1) + [case.end or case.tokenizer.eos_token]
        expected = [turn.answer + end for turn, end in zip(conversation.turns, ends, strict=True)]
        assert [text.strip() for text in pieces["answer"]] == expected
        assert [text.strip() for text in pieces["question"]] == [t.question for t in conversation.turns]
        assert "".join(pieces["media"]).split() == case.media.expansion.split()


@pytest.mark.parametrize("name", CASES)
def test_what_inference_sees_is_a_beginning_of_what_is_trained(name: str) -> None:
    case = CASES[name]
    for seed in range(25):
        conversation = sample(seed, case)
        full, prompt = render(case, conversation), render(case, conversation, include_answer=False)
        text = Template(case.tokenizer, case.template).apply_chat_template(
            messages(conversation)[:-1], tokenize=False, add_generation_prompt=True
        )
        text = text.replace(case.media.placeholder, case.media.expansion)
        assert prompt.ids == case.tokenizer(text).input_ids
        assert full.ids[: len(prompt)] == prompt.ids
        answer_labels = full.labels[len(prompt) :]
        assert answer_labels == full.ids[len(prompt) :]  # all of it is learned


def test_one_beginning_of_text_whether_or_not_the_template_writes_it() -> None:
    case = CASES["llava-next-video"]
    case_with_bos = case._replace(template="{{ bos_token }}" + case.template)
    conversation = sample(3, case)
    assert render(case, conversation).ids.count(LLAMA.bos_token_id) == 1
    assert render(case_with_bos, conversation).ids.count(LLAMA.bos_token_id) == 1


def test_the_first_special_token_ends_an_answer() -> None:
    template = QWEN2_5_VL.replace("<|im_end|>\n{% endif %}{% endfor %}", "<|im_end|><|end|>{% endif %}{% endfor %}")
    case = CASES["qwen2.5-vl"]._replace(template=template)
    conversation = Conversation("a", "video", None, (Turn("the cat", "a dog"), Turn("b", "c")))
    answers = [BYTES.decode(p.ids) for p in render(case, conversation).pieces if p.part == "answer"]
    assert answers == ["a dog<|im_end|>", "c<|im_end|>"]


def test_a_question_that_the_system_text_quotes_is_found_where_it_is_asked() -> None:
    conversation = Conversation("a", "video", None, (Turn("the cat", "a dog"),), system="not the cat")
    parts = [p.part for p in render(CASES["qwen3-vl"], conversation).pieces]
    assert parts.index("media") < parts.index("question")


def test_white_space_around_questions_and_answers_is_removed() -> None:
    case = CASES["qwen2.5-vl"]
    conversation = Conversation("a", "video", None, (Turn("the cat", "a dog"),))
    spaced = Conversation("a", "video", None, (Turn("\n the cat ", "\n\na dog "),))
    assert render(case, spaced) == render(case, conversation)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            QWEN2_5_VL.replace("{{ content['text'] }}", "{{ content['text'] | upper }}"),
            "change answers",
        ),
        (
            QWEN2_5_VL.replace("<|im_start|>{{ message['role'] }}", "{{ messages | length }} {{ message['role'] }}"),
            "changes .* prompt of an answer",
        ),
        (QWEN2_5_VL.replace(_QWEN_PAD, ""), "0 times"),
        (QWEN2_5_VL.replace(_QWEN_PAD, _QWEN_PAD * 2), "2 times"),
        ("{% for m in messages %}{{ 'x' + m['content'] }}{% endfor %}", "refuses messages of user"),
        (
            "{% for m in messages %}{% if not loop.last and m.role == 'assistant' %}[past]{% else %}"
            "<video>{{ m.content[-1].text }}{% endif %}<|im_end|>{% endfor %}",
            "an earlier turn",
        ),
    ],
)
def test_a_template_that_rewrites_is_refused(template: str, said: str) -> None:
    case = CASES["qwen2.5-vl"]._replace(template=template)
    conversation = Conversation("a", "video", None, (Turn("the cat", "a dog"), Turn("and", "it runs")))
    with pytest.raises(DitLoraError, match=said):
        render(case, conversation)


def test_a_system_text_that_is_left_out_is_refused() -> None:
    conversation = Conversation("a", "video", None, (Turn("the cat", "a dog"),), system="be brief")
    case = CASES["qwen3-vl"]
    case_without_system = case._replace(template=QWEN3_VL.replace("{{- content.text }}", "", 1))
    assert render(case, conversation)
    with pytest.raises(DitLoraError, match="does not use the system text"):
        render(case_without_system, conversation)
    with pytest.raises(DitLoraError, match="Only user and assistant"):
        render(
            CASES["llava-mistral"],
            Conversation("a", "image", None, conversation.turns, system="be brief"),
        )


@pytest.mark.parametrize(
    ("question", "answer", "said"),
    [
        (f"what is {_QWEN_PAD}?", "a cat", "2 times"),
        ("what is <|video_pad|>?", "a cat", r"own tokens: <\|video_pad\|>"),
        ("what?", "a <|vision_end|> cat", r"own tokens: <\|vision_end\|>"),
    ],
)
def test_the_medias_tokens_in_a_text_are_refused(question: str, answer: str, said: str) -> None:
    conversation = Conversation("a", "video", None, (Turn(question, answer),))
    with pytest.raises(DitLoraError, match=said):
        render(CASES["qwen2.5-vl"], conversation)


@pytest.mark.parametrize("name", CASES)
def test_the_indent_of_an_answer_is_learned(name: str) -> None:
    case, code = CASES[name], "    return 5\nend."
    turns = (Turn("the cat", f"\n \n{code}\n"), Turn("it's;", " the cat"))
    rendered = render(case, Conversation("a", case.kind, None, turns))
    first_answer, last_answer = [case.tokenizer.decode(p.ids) for p in rendered.pieces if p.part == "answer"]
    assert code in first_answer
    assert "\n \n" not in first_answer
    assert "  the cat" not in last_answer


def test_a_template_may_trim_answers() -> None:
    case = CASES["qwen2.5-vl"]
    trimming = case.template.replace("{{ content['text'] }}", "{{ content['text'] | trim }}")
    turns = (Turn("the cat", "    return 5"),)
    rendered = render(case._replace(template=trimming), Conversation("a", case.kind, None, turns))
    (answer,) = [case.tokenizer.decode(p.ids) for p in rendered.pieces if p.part == "answer"]
    assert answer == "return 5<|im_end|>"
